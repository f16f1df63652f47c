"""Checkpoints: a directory of safetensors files, written and read one tensor at a time.

    model.safetensors       parameters and persistent buffers under the model's own names
    optimizer.safetensors   the optimizer's tensors, as ``<parameter>.<state>``
    extra.safetensors       states of random generators, tensors of ``extra=``
    checkpoint.json         the step, hyperparameters of groups, scalar states, ``extra=``

Large files become shards with an index, as transformers writes them. A parameter with several
names is written once, and the file's metadata has the others, as ``safetensors.torch.save_model``
writes and ``load_model`` reads them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import io
import json
import operator
import os
import random
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lohan_fx._compat import is_wrapper_subclass
from lohan_fx.compiled import CompiledModel
from lohan_fx.errors import (
    CheckpointError,
    LohanError,
    StepError,
    StorageError,
    format_bytes,
)
from lohan_fx.hardware import parse_bytes
from lohan_fx.runtime.optimizer import UnitOptimizer
from lohan_fx.weights import (
    DTYPES,
    INDEX,
    WHOLE,
    FileStore,
    Place,
    StoredWeights,
    fill,
    match,
    places_of,
    sharded,
    take_buffers,
)

FORMAT = "lohan_fx checkpoint"
VERSION = 1
MAX_SHARD_BYTES = 5 << 30

_DESCRIPTION = "checkpoint.json"
_OPTIMIZER = "optimizer.safetensors"
_OPTIMIZER_INDEX = "optimizer.safetensors.index.json"
_EXTRA = "extra.safetensors"
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_RELIEVE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What `load` found besides the states that it has put back."""

    path: Path
    step: int | None
    extra: dict[str, Any]


def save(
    model: nn.Module,
    directory: str | Path,
    *,
    optimizer: Optimizer | Literal[False] | None = None,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    max_shard_bytes: int | str = MAX_SHARD_BYTES,
) -> Path:
    """Write a checkpoint of `model` and its optimizer; it replaces the one that is there.

    Works for compiled models, whose states are written from the tiers where they are, and for
    any other nn.Module. Memory is taken for one tensor at a time, and only where it is not in host
    memory already. The checkpoint is complete or not there: it is written beside `directory`, made
    durable, and takes its place in one step of the file system; what was there before stays until
    then, also if the process is killed.

    Saved are parameters, persistent buffers, the optimizer's states and hyperparameters, the
    states of the random generators (torch's on the CPU and on all CUDA devices, Python's,
    NumPy's), and `extra`.

    Args:
        model: any module.
        directory: is made. Its parent must be there, or can be made.
        optimizer: None takes the one that the model was compiled with, if any. False leaves it
            out.
        step: for `latest`, and for your loop.
        extra: anything else that a resumed run needs, such as ``scheduler.state_dict()``: nested
            dicts, lists and tuples of tensors, numbers, strings, booleans and None.
        max_shard_bytes: larger files become shards with an index.

    Raises:
        StepError: between backward and ``optimizer.step()``, or after a step that failed halfway.
        StorageError: too little space (the message has path, need and have), or a failed write.
        LohanError: `extra` has something that cannot be written; the model has no data yet.
    """
    target = Path(directory)
    compiled = _compiled(model)
    optimizer = _chosen(compiled, optimizer)
    if compiled is not None:
        compiled.check_ended()
        _check_whole(compiled)
    tensors: dict[str, Tensor] = {}
    description: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    description["step"] = None if step is None else operator.index(step)
    description["extra"] = _encode(dict(extra or {}), "extra", tensors)
    description["random"] = _encode(_random_states(), "random", tensors)
    places = places_of(model)
    lost = [place.name for place in places if place.tensor.is_meta]
    if lost:
        raise LohanError(
            f"{lost[0]} is on the meta device: the model gets its data at the first forward. Run "
            "one, or model.lohan.prepare(*inputs), before saving"
        )
    aliases = {name: place.name for place in places for name in place.names[1:]}
    limit = parse_bytes(max_shard_bytes)
    with _lent(compiled, optimizer):
        weights = {place.name: place.tensor for place in places}
        files = _sharded_files(weights, WHOLE, limit, {"format": "pt", **aliases})
        if optimizer is not None:
            described, states = _describe(model, compiled, optimizer, tensors)
            description["optimizer"] = described
            files += _sharded_files(states, _OPTIMIZER, limit, {})
        files.append(_Tensors(_EXTRA, tensors, {}))
        config = getattr(getattr(model, "config", None), "to_json_string", None)
        if config is not None:  # transformers: `from_pretrained(directory)` works
            files.append(_Text("config.json", config()))
        description["files"] = [file.name for file in files]
        files.append(_Text(_DESCRIPTION, json.dumps(description)))
        memory = None if compiled is None else compiled.memory
        _write(target, files, (lambda: None) if memory is None else memory.states.forget)
    return target


def load(
    model: nn.Module,
    directory: str | Path,
    *,
    optimizer: Optimizer | Literal[False] | None = None,
    rng: bool = True,
) -> Checkpoint:
    """Put a checkpoint of `save` back into `model` and its optimizer, one tensor at a time.

    A run goes on bit by bit as it would have: with the same options, or other tiers, budgets and
    strategies, compiled or in plain PyTorch. Everything is checked before anything is written.
    A compiled model that has not run yet gets what it has memory for now, and the rest (parameters
    on the meta device, the optimizer's states) at its first forward; leave the files where they
    are until then.

    Args:
        model: as it was when it was saved: the same names and shapes.
        directory: of `save`.
        optimizer: with the same parameters in the same groups. None takes the one that the model
            was compiled with, if any. False leaves the optimizer's states alone.
        rng: put the states of the random generators back, too.

    Returns:
        The step and ``extra=`` that were saved.

    Raises:
        CheckpointError: files are missing, damaged, or of another model or optimizer; nothing has
            been changed.
        StepError: between backward and ``optimizer.step()``.
    """
    path = _found(Path(directory))
    compiled = _compiled(model)
    optimizer = _chosen(compiled, optimizer)
    if compiled is not None:
        compiled.check_ended()
    description = _read_description(path)
    extra = FileStore([(path / _EXTRA, None)], str(path / _EXTRA))
    places = places_of(model)
    store = sharded(path, WHOLE, INDEX)
    keys = match(model, places, store)
    states = None
    if optimizer is not None:
        states = _States(model, optimizer, path, description)
        if compiled is not None and optimizer is compiled.optimizer:
            states.check_elementwise()
        store.join(states.store, states.masters.values())
    if compiled is None and any(place.tensor.is_meta for place in places):
        raise LohanError(
            "the model is on the meta device: compile it before load(), or give it memory with "
            "model.to_empty(device='cpu')"
        )
    tensors = dict(zip(extra.infos, map(torch.clone, extra.read(extra.infos)), strict=True))
    found = _decode(description["extra"], tensors)
    random_states = _decode(description["random"], tensors)
    take_buffers(model, places, store, keys)
    if states is None:
        _load_weights(compiled, places, StoredWeights(store, keys), ())
    else:
        exact = StoredWeights(store, {**keys, **states.masters})
        _load_weights(compiled, places, exact, tuple(states.masters))
        if compiled is not None and optimizer is compiled.optimizer:
            states.load_groups(tensors)
            compiled.load_states(states.lend)
        else:
            states.load_plainly(tensors)
    if rng:
        _set_random_states(random_states)
    return Checkpoint(path=path, step=description["step"], extra=found)


def latest(directory: str | Path) -> Path | None:
    """The checkpoint with the highest step among the directories in `directory`; None if there
    is none. Checkpoints that were cut short do not count."""
    found: list[tuple[int, Path]] = []
    root = Path(directory)
    for path in root.iterdir() if root.is_dir() else ():
        with contextlib.suppress(CheckpointError):
            step = _read_description(path)["step"]
            if step is not None and not path.name.startswith("."):
                found.append((step, path))
    return max(found)[1] if found else None


# ---------------------------------------------------------------------------------------------
# Model and optimizer
# ---------------------------------------------------------------------------------------------


def _compiled(model: nn.Module) -> CompiledModel | None:
    found = model.__dict__.get("_lohan")
    return found if isinstance(found, CompiledModel) else None


def _check_whole(compiled: CompiledModel) -> None:
    """Refuse a model of which some units took a step that others did not."""
    updater = compiled.memory.updater if compiled.memory is not None else None
    if updater is not None and updater.torn:
        raise StepError(
            "a step failed after some units were updated, so the model stands between two steps "
            f"({', '.join(updater.torn)} took the step, the others did not) and is not saved: go "
            "on from the last checkpoint"
        )


def _chosen(
    compiled: CompiledModel | None, optimizer: Optimizer | Literal[False] | None
) -> Optimizer | None:
    if optimizer is None and compiled is not None:
        return compiled.optimizer
    return optimizer or None


@contextlib.contextmanager
def _lent(compiled: CompiledModel | None, optimizer: Optimizer | None) -> Iterator[None]:
    """The optimizer has its states, as views of where they are."""
    if compiled is None or optimizer is not compiled.optimizer:
        yield
        return
    compiled.lend_states()
    try:
        yield
    finally:
        compiled.unlend_states()


def _load_weights(
    compiled: CompiledModel | None,
    places: Sequence[Place],
    source: StoredWeights,
    masters: Sequence[str],
) -> None:
    if compiled is None or compiled.memory is None:
        fill(places, source)
        if compiled is not None:
            compiled.source = source
            compiled.masters = masters
        return
    states = compiled.memory.states
    names = [s.name for unit in states.units for s in unit.layout.slices]
    states.write(source.stream(compiled.model, names), names)
    fill([p for p in places if not isinstance(p.tensor, nn.Parameter)], source)


def _names_of(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Names of the parameters of each group."""
    names = {id(p): name for name, p in model.named_parameters()}
    found = []
    for g, group in enumerate(optimizer.param_groups):
        foreign = [tuple(p.shape) for p in group["params"] if id(p) not in names]
        if foreign:
            raise LohanError(
                f"group {g} of the {type(optimizer).__name__} has a parameter of shape "
                f"{foreign[0]} that is not in the {type(model).__name__}: a checkpoint holds one "
                "model and its own optimizer"
            )
        found.append([names[id(p)] for p in group["params"]])
    return found


def _describe(
    model: nn.Module, compiled: CompiledModel | None, optimizer: Optimizer, extra: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What JSON has to say of the optimizer, and its tensors. Tensor hyperparameters go to
    `extra`."""
    name = type(optimizer).__name__
    tensors: dict[str, Tensor] = {}
    groups = []
    states = {}
    for g, (group, names) in enumerate(
        zip(optimizer.param_groups, _names_of(model, optimizer), strict=True)
    ):
        values = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        groups.append({"params": names, "values": _encode(values, f"{name}.groups.{g}", extra)})
        for p, of in zip(group["params"], names, strict=True):
            if optimizer.state.get(p):
                states[of] = _encode(dict(optimizer.state[p]), of, tensors)
    masters = {}
    if compiled is not None and compiled.memory is not None and optimizer is compiled.optimizer:
        for of, master in compiled.memory.states.hidden_masters():
            masters[of] = f"{of}.fp32_master"
            tensors[masters[of]] = master
    described = {"class": name, "groups": groups, "states": states, "masters": masters}
    return described, tensors


class _States:
    """The optimizer's part of a checkpoint, checked against an optimizer.

    Attributes:
        store: the tensors.
        masters: parameter → key of its master, where the parameter has less precision.

    Raises:
        CheckpointError: there is none, or it is of other groups.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, path: Path, description: Mapping[str, Any]
    ) -> None:
        found = description.get("optimizer")
        if found is None:
            raise CheckpointError(
                f"{path} has no states of an optimizer: it was saved without. Pass "
                "optimizer=False to load weights only"
            )
        self._optimizer = optimizer
        self._path = path
        self._groups: list[dict[str, Any]] = found["groups"]
        self._entries: dict[str, Any] = found["states"]
        self._parameters = dict(model.named_parameters())
        self.masters: dict[str, str] = found["masters"]
        self.store = sharded(path, _OPTIMIZER, _OPTIMIZER_INDEX)
        self._names = _names_of(model, optimizer)
        saved = [group["params"] for group in self._groups]
        if [sorted(names) for names in saved] != [sorted(names) for names in self._names]:
            raise CheckpointError(self._other_groups(saved))
        keys = [key for entry in found["states"].values() for key in _tensors_in(entry)]
        lost = [k for k in (*keys, *self.masters.values()) if k not in self.store.infos]
        if lost:
            raise CheckpointError(f"{self.store.name} lacks {', '.join(lost[:8])}")

    def _other_groups(self, saved: list[list[str]]) -> str:
        lines = [
            f"{self._path} is of another optimizer: {len(saved)} groups of "
            f"{[len(names) for names in saved]} parameters, here "
            f"{len(self._names)} of {[len(names) for names in self._names]}"
        ]
        for g, (a, b) in enumerate(zip(saved, self._names, strict=False)):
            only = [("checkpoint", set(a) - set(b)), ("optimizer", set(b) - set(a))]
            lines += [
                f"  group {g}, only in the {where}: {', '.join(sorted(names)[:8])}"
                for where, names in only
                if names
            ]
        return "\n".join(lines)

    def check_elementwise(self) -> None:
        """Refuse states that the present options of the optimizer do not go with."""
        names = [name for names in self._names for name in names]
        unit = UnitOptimizer(self._optimizer, [self._parameters[name] for name in names])
        for i, name in enumerate(names):
            entry = {k: v for k, v in self._entries.get(name, {}).items() if v is not None}
            wanted = {*unit.state_names(i), *unit.scalar_names(i)}
            if entry and set(entry) != wanted:
                raise CheckpointError(
                    f"{self._path} has the states {sorted(entry)} for {name}; this "
                    f"{type(self._optimizer).__name__} keeps {sorted(wanted)}: construct the "
                    "optimizer with the options that it was saved with"
                )
            shape = tuple(self._parameters[name].shape)
            for key in unit.state_names(i) if entry else ():
                info = [self.store.infos[k].shape for k in _tensors_in(entry[key])] or [()]
                if info[0] != shape:
                    raise CheckpointError(
                        f"{key} of {name} in {self.store.name} has shape {info[0]}, the parameter "
                        f"{shape}"
                    )

    def lend(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Give the optimizer the states of these parameters, as they are in the files."""
        keys = [key for name in parameters for key in _tensors_in(self._entries.get(name))]
        tensors = dict(zip(keys, self.store.read(keys), strict=True))
        for name, p in parameters.items():
            if name in self._entries:
                self._optimizer.state[p] = _decode(self._entries[name], tensors)

    def load_groups(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the hyperparameters; tensors among them keep their identity."""
        for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
            for key, value in _decode(saved["values"], tensors).items():
                if isinstance(group.get(key), Tensor):
                    group[key].copy_(torch.as_tensor(value))
                else:
                    group[key] = value

    def load_plainly(self, tensors: Mapping[str, Tensor]) -> None:
        """Load states and hyperparameters by the optimizer's own ``load_state_dict``."""
        self._optimizer.state.clear()
        self.lend(self._parameters)
        groups: list[dict[str, Any]] = []
        states = {}
        for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
            first = sum(len(g["params"]) for g in groups)
            indices = range(first, first + len(group["params"]))
            groups.append({**_decode(saved["values"], tensors), "params": list(indices)})
            for i, p in zip(indices, group["params"], strict=True):
                entry = self._optimizer.state.pop(p, None)
                if entry is not None:
                    states[i] = {
                        k: v.clone() if isinstance(v, Tensor) else v for k, v in entry.items()
                    }
        self._optimizer.load_state_dict({"state": states, "param_groups": groups})


# ---------------------------------------------------------------------------------------------
# Random generators
# ---------------------------------------------------------------------------------------------


def _random_states() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict)
    state = dict(numpy["state"])
    if "key" in state:
        state["key"] = torch.from_numpy(state["key"].astype(np.int64))
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gauss],
        "numpy": {**numpy, "state": state},
    }


def _set_random_states(states: Mapping[str, Any]) -> None:
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    numpy = dict(states["numpy"])
    if "key" in numpy["state"]:
        numpy["state"] = {**numpy["state"], "key": numpy["state"]["key"].numpy().astype(np.uint32)}
    np.random.set_state(numpy)
    torch.set_rng_state(states["torch"])
    if states["cuda"] and torch.cuda.is_available():
        for device, state in zip(range(torch.cuda.device_count()), states["cuda"], strict=False):
            torch.cuda.set_rng_state(state, device)


# ---------------------------------------------------------------------------------------------
# Values in JSON
# ---------------------------------------------------------------------------------------------


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON; its tensors are put into `tensors`, under keys that start with `path`."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.dtype not in _DTYPE_NAMES:
            raise LohanError(
                f"{path} is a tensor of {value.dtype}, {value.layout}: safetensors files hold "
                f"{', '.join(str(d).removeprefix('torch.') for d in _DTYPE_NAMES)}"
            )
        if not value.dim() and not value.is_complex():
            return {"$scalar": [_DTYPE_NAMES[value.dtype], value.item()]}
        key = path
        while key in tensors:
            key += "_"
        tensors[key] = value.detach()
        return {"$tensor": key}
    if isinstance(value, Mapping):
        kind = "$counter" if isinstance(value, Counter) else "$items"
        if kind == "$items" and all(isinstance(k, str) and k[:1] != "$" for k in value):
            return {k: _encode(v, f"{path}.{k}", tensors) for k, v in value.items()}
        pairs = [
            [_encode(k, f"{path} key", tensors), _encode(v, f"{path}.{k}", tensors)]
            for k, v in value.items()
        ]
        return {kind: pairs}
    if type(value) in (list, tuple):
        found = [_encode(v, f"{path}.{i}", tensors) for i, v in enumerate(value)]
        return found if isinstance(value, list) else {"$tuple": found}
    raise LohanError(
        f"{path} is a {type(value).__qualname__}, which a checkpoint cannot hold (nothing is "
        "pickled): give dicts, lists, tuples, tensors, numbers, strings, booleans and None, such "
        "as the state_dict() of the object"
    )


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        kind, inner = next(iter(value.items()))
        if kind == "$tensor":
            return tensors[inner]
        if kind == "$scalar":
            return torch.tensor(inner[1], dtype=DTYPES[inner[0]])
        if kind == "$tuple":
            return tuple(_decode(inner, tensors))
        if kind in ("$items", "$counter"):
            made = {_decode(k, tensors): _decode(v, tensors) for k, v in inner}
            return Counter(made) if kind == "$counter" else made
    return {k: _decode(v, tensors) for k, v in value.items()}


def _tensors_in(value: Any) -> list[str]:
    """Keys of the tensors in an encoded value."""
    if isinstance(value, dict):
        if "$tensor" in value:
            return [value["$tensor"]]
        return [key for v in value.values() for key in _tensors_in(v)]
    return [key for v in value for key in _tensors_in(v)] if isinstance(value, list) else []


# ---------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Text:
    """A small file."""

    name: str
    text: str

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode())

    def write(self, file: io.BufferedWriter, relieve: Callable[[], None]) -> None:
        file.write(self.text.encode())


class _Tensors:
    """A safetensors file: 8 bytes of the header's length, a JSON header, the tensors' bytes."""

    def __init__(
        self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
    ) -> None:
        self.name = name
        # Larger items first, so that every tensor is aligned to its item size.
        self._tensors = dict(sorted(tensors.items(), key=lambda kv: -kv[1].element_size()))
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        end = 0
        for key, t in self._tensors.items():
            begin, end = end, end + t.numel() * t.element_size()
            header[key] = {
                "dtype": _DTYPE_NAMES[t.dtype],
                "shape": list(t.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        self.data_bytes = end

    @property
    def num_bytes(self) -> int:
        return len(self._header) + self.data_bytes

    def write(self, file: io.BufferedWriter, relieve: Callable[[], None]) -> None:
        """Write tensor by tensor; `relieve` is called now and then."""
        file.write(self._header)
        since = 0
        for tensor in self._tensors.values():
            flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1)
            if flat.numel():
                file.write(flat.view(torch.uint8).numpy().data)
            since += flat.nbytes
            del flat
            if since > _RELIEVE_BYTES:
                since = 0
                relieve()
        relieve()


def _sharded_files(
    tensors: Mapping[str, Tensor], whole: str, max_bytes: int, metadata: Mapping[str, str]
) -> list[_File]:
    """One file, or shards of at most `max_bytes` (or of one tensor) with an index."""
    wrong = [k for k, t in tensors.items() if t.dtype not in _DTYPE_NAMES or not _is_plain(t)]
    if wrong:
        t = tensors[wrong[0]]
        raise LohanError(
            f"{wrong[0]} is a {type(t).__name__} of {t.dtype}, {t.layout}, which a safetensors "
            "file cannot hold"
        )
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for key, tensor in tensors.items():
        num_bytes = tensor.numel() * tensor.element_size()
        if shards[-1] and size + num_bytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][key] = tensor
        size += num_bytes
    if len(shards) == 1:
        return [_Tensors(whole, tensors, metadata)]
    stem = whole.removesuffix(".safetensors")
    files = [
        _Tensors(f"{stem}-{i:05}-of-{len(shards):05}.safetensors", shard, metadata)
        for i, shard in enumerate(shards, 1)
    ]
    places = {k: f.name for f, shard in zip(files, shards, strict=True) for k in shard}
    total = sum(f.data_bytes for f in files)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    return [*files, _Text(f"{whole}.index.json", json.dumps(index, indent=1))]


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not is_wrapper_subclass(tensor)


_File: TypeAlias = _Text | _Tensors


def _write(target: Path, files: Sequence[_File], relieve: Callable[[], None]) -> None:
    """Write files into a new directory, and put it in the place of `target` in one step."""
    target = Path(os.path.realpath(target))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _workspace(target) as new:
            kept = _foreign_files(target, {file.name for file in files})
            _check_space(new, sum(file.num_bytes for file in files))
            for file in files:
                with (new / file.name).open("wb") as out:
                    file.write(out, relieve)
                    out.flush()
                    os.fsync(out.fileno())
            for path in kept:
                shutil.copy2(path, new / path.name)
            _sync_directory(new)
            _replace(target, new)
    except OSError as error:
        raise StorageError(
            f"cannot write the checkpoint {target}: {error.strerror or error}"
            f"{f' ({error.filename})' if error.filename else ''}; what was there before is "
            "unchanged"
        ) from error


def _check_space(directory: Path, need_bytes: int) -> None:
    usage = os.statvfs(directory)
    have_bytes = usage.f_bavail * usage.f_frsize
    if need_bytes > have_bytes:
        raise StorageError(
            f"not enough space for a checkpoint in {directory.parent}: need "
            f"{format_bytes(need_bytes)}, have {format_bytes(have_bytes)}; free some, or choose "
            "another directory (the checkpoint that is there stays until the new one is complete)"
        )


def _foreign_files(target: Path, ours: Container[str]) -> list[Path]:
    """Files of others in the checkpoint that is replaced; they go into the new one.

    Raises:
        StorageError: `target` is not a checkpoint, or there are directories in it.
    """
    if not target.exists():
        return []
    if not target.is_dir():
        raise StorageError(f"{target} is a file: name a directory for the checkpoint")
    there = sorted(target.iterdir())
    if not there:
        return []
    try:
        description = _read_description(target)
    except CheckpointError:
        raise StorageError(
            f"{target} is not empty and no checkpoint of lohan_fx (it has {there[0].name}): "
            "saving would replace it. Name a directory of its own for the checkpoint"
        ) from None
    old = {*description["files"], _DESCRIPTION}
    foreign = [path for path in there if path.name not in old and path.name not in ours]
    directories = [path.name for path in foreign if path.is_dir()]
    if directories:
        raise StorageError(
            f"{target} is a checkpoint with the directory {directories[0]} in it, which saving "
            "would remove: move that, or name another directory"
        )
    return foreign


def _previous(target: Path) -> Path:
    return target.parent / f".{target.name}.previous"


@contextlib.contextmanager
def _workspace(target: Path) -> Iterator[Path]:
    """A new directory beside `target`. It is locked while its process lives: what dead ones left is
    removed first."""
    prefix = f".{target.name}.saving-"
    previous = _previous(target)
    if previous.is_dir():
        if target.exists():
            shutil.rmtree(previous)
        else:
            previous.rename(target)
    for path in target.parent.glob(f"{glob.escape(prefix)}*"):
        with contextlib.suppress(OSError):  # alive, or going away by itself
            lock = _lock(path)
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
    with _new_directory(target.parent, prefix) as path:
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _new_directory(parent: Path, prefix: str) -> Iterator[Path]:
    """Make a directory and hold its lock. Before it is held, another save may remove it as a dead
    one's: then there is another. Where there are no locks, nobody removes what dead ones left."""
    with contextlib.ExitStack() as stack:
        while True:
            path = parent / f"{prefix}{secrets.token_hex(8)}"
            path.mkdir()
            try:
                lock = _lock(path)
            except (BlockingIOError, FileNotFoundError):
                continue
            except OSError:
                break
            stack.callback(os.close, lock)
            if os.fstat(lock).st_nlink:
                break
        yield path


def _lock(path: Path) -> int:
    """Lock a directory. Raises BlockingIOError if somebody else has, another OSError where the
    file system has no locks."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _replace(target: Path, new: Path) -> None:
    """Put `new` in the place of `target`; afterwards `new` is the old one, or gone.

    File systems that cannot exchange two directories get two renames; `load` finds the old
    checkpoint if the process ends between them.
    """
    if not target.exists():
        new.rename(target)
    elif not _exchange(target, new):
        target.rename(_previous(target))
        new.rename(target)
        _sync_directory(target.parent)
        shutil.rmtree(_previous(target))
    _sync_directory(target.parent)


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two directories atomically; False if the file system cannot."""
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(here, os.fsencode(a), here, os.fsencode(b), exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(a))


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that syncs no directories
            raise
    finally:
        os.close(fd)


def _found(directory: Path) -> Path:
    """The checkpoint at `directory`, also if its replacement was cut short."""
    target = Path(os.path.realpath(directory))
    return _previous(target) if not target.exists() and _previous(target).is_dir() else target


def _read_description(path: Path) -> dict[str, Any]:
    file = path / _DESCRIPTION
    try:
        found = json.loads(file.read_text())
    except OSError as error:
        raise CheckpointError(
            f"{path} is no checkpoint of lohan_fx.save: cannot read {file}: {error.strerror}"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise CheckpointError(f"{file} is of another format than {FORMAT!r}")
    if found.get("version") != VERSION:
        raise CheckpointError(
            f"{file} is of version {found.get('version')}; this lohan_fx reads {VERSION}"
        )
    lost = [k for k in ("step", "extra", "random", "files") if k not in found]
    if lost:
        raise CheckpointError(f"{file} is damaged: it lacks {', '.join(lost)}")
    return found
