"""Checkpoints: a directory of safetensors files, written and read one tensor at a time.

    model.safetensors       parameters and persistent buffers under the model's own names
    optimizer.safetensors   the optimizer's tensors, as ``<parameter>.<state>``
    extra.safetensors       states of random generators, tensors of ``extra=``
    checkpoint.json         the step, hyperparameters of groups, scalar states, ``extra=``,
                            checksums of all of that

Large files become shards with an index, as transformers writes them. A parameter with several
names is written once, and the file's metadata has the others, as ``safetensors.torch.save_model``
writes and ``load_model`` reads them.
"""

from __future__ import annotations

import contextlib
import io
import operator
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lohan_fx import manifest
from lohan_fx.arguments import check_flag, path_of
from lohan_fx.atomic import TensorFile, TextFile, tensor_files, write_directory
from lohan_fx.atomic import found as found_directory
from lohan_fx.compiled.integrity import Part
from lohan_fx.compiled.model import CompiledModel
from lohan_fx.encoded import decode, encode, tensors_in
from lohan_fx.errors import CheckpointError, LohanError, listed
from lohan_fx.hardware import parse_bytes
from lohan_fx.manifest import DESCRIPTION, FORMAT, VERSION
from lohan_fx.reading import check_depth
from lohan_fx.runtime.optimizer import UnitOptimizer
from lohan_fx.weights import (
    INDEX,
    WHOLE,
    FileStore,
    Place,
    StoredWeights,
    TensorInfo,
    fill,
    kind_of,
    match,
    places_of,
    sharded,
    take_buffers,
    text_of,
)

MAX_SHARD_BYTES = 5 << 30

_OPTIMIZER = "optimizer.safetensors"
_OPTIMIZER_INDEX = "optimizer.safetensors.index.json"
_EXTRA = "extra.safetensors"
_READ = (".safetensors", ".safetensors.index.json")
"""How the names of files end that `load` needs."""


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

    Gradients that are added up for a step that has not ended are not saved: save after
    ``optimizer.step()``. With ``accumulate=`` (or ``forwards=``) a UserWarning says how many
    backwards are left out; what is in ``.grad`` with ``gradients="kept"`` is yours to save.

    Raises:
        StepError: units were updated since backward began, or after a step that failed halfway.
        StorageError: too little space (the message has path, need and have), or a failed write.
        LohanError: `extra` has something that cannot be written; the model has no data yet.
    """
    target = path_of("directory", directory)
    compiled = _compiled(model)
    optimizer = _chosen(compiled, optimizer)
    try:
        step = None if step is None else operator.index(step)
    except TypeError:
        raise LohanError(f"step={step!r}: use a whole number, or None") from None
    if not isinstance(extra, (Mapping, type(None))):
        raise LohanError(f"extra={extra!r}: give a dict, such as {{'scheduler': …}}")
    try:
        limit = parse_bytes(max_shard_bytes)
    except ValueError as error:
        raise LohanError(f"max_shard_bytes: {error}") from error
    if compiled is not None:
        compiled.integrity.check_ended()
        compiled.integrity.check_whole()
        compiled.take_over()  # masters are saved beside their parameters
    tensors: dict[str, Tensor] = {}
    description: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    description["step"] = step
    try:
        description["extra"] = encode(dict(extra or {}), "extra", tensors)
        check_depth(description)  # as `load` does
    except (RecursionError, ValueError):
        raise LohanError("extra= is nested too deeply: give flat dicts and lists") from None
    description["random"] = encode(_random_states(), "random", tensors)
    places = places_of(model)
    lost = [place.name for place in places if place.tensor.is_meta]
    if lost:
        raise LohanError(
            f"{lost[0]} is on the meta device: the model gets its data at the first forward. Run "
            "one, or model.lohan.prepare(*inputs), before saving"
        )
    aliases = {name: place.name for place in places for name in place.names[1:]}
    with _lent(compiled, optimizer):
        weights = {place.name: place.tensor for place in places}
        files = tensor_files(weights, WHOLE, limit, {"format": "pt", **aliases})
        if optimizer is not None:
            described, states = _describe(model, compiled, optimizer, tensors)
            description["optimizer"] = described
            files += tensor_files(states, _OPTIMIZER, limit, {})
        files.append(TensorFile(_EXTRA, tensors, {}))
        config = getattr(getattr(model, "config", None), "to_json_string", None)
        # transformers: `from_pretrained(directory)` works; not for peft's models, whose names are
        # others than those of the model that their configuration describes
        if config is not None and not hasattr(model, "peft_config"):
            files.append(TextFile("config.json", config()))
        description["files"] = [file.name for file in files]
        memory = None if compiled is None else compiled.memory
        _warn_of_sums(compiled, optimizer)
        write_directory(
            target,
            [*files, _DescriptionFile(description, files)],
            replaces=_old_files(found_directory(target)),
            relieve=(lambda: None) if memory is None else memory.states.forget,
        )
    return target


def load(
    model: nn.Module,
    directory: str | Path,
    *,
    optimizer: Optimizer | Literal[False] | None = None,
    rng: bool = True,
    verify: bool = True,
) -> Checkpoint:
    """Put a checkpoint of `save` back into `model` and its optimizer, one tensor at a time.

    A run goes on bit by bit as it would have: with the same options, or other tiers, budgets and
    strategies, compiled or in plain PyTorch. Names, shapes and groups are checked before anything
    is written, the bytes of a tensor while they are read. A compiled model that has not run yet
    gets what it has memory for now, and the rest (parameters on the meta device, the optimizer's
    states) at its first forward; leave the files where they are until then.

    Args:
        model: as it was when it was saved: the same names and shapes.
        directory: of `save`.
        optimizer: with the same parameters in the same groups. None takes the one that the model
            was compiled with, if any. False leaves the optimizer's states alone.
        rng: put the states of the random generators back, too.
        verify: compare what is read with the checksums that were saved (about a third of a second
            of one core per GiB). False reads a damaged checkpoint as it is.

    Returns:
        The step and ``extra=`` that were saved.

    Raises:
        CheckpointError: files are missing, damaged, or of another model or optimizer. Nothing has
            been changed, unless the message says that the model was loaded in part; a compiled
            model then refuses to run and to be saved until another checkpoint is loaded.
        StepError: between backward and ``optimizer.step()``.
    """
    path = found_directory(path_of("directory", directory))
    compiled = _compiled(model)
    check_flag("rng", rng)
    check_flag("verify", verify)
    optimizer = _chosen(compiled, optimizer)
    if compiled is not None:
        compiled.integrity.check_ended()
    description = manifest.read(path, verify=verify)
    _check_there(path, description["files"], optimizer is not None)
    checksums = description.get("checksums", {}) if verify else {}
    extra = FileStore([(path / _EXTRA, None)], str(path / _EXTRA), checksums)
    with contextlib.nullcontext() if compiled is None else compiled.integrity.replacing():
        places = places_of(model)
    store = sharded(path, WHOLE, INDEX, checksums)
    keys = match(model, places, store)
    states = None
    if optimizer is not None:
        states = _States(model, optimizer, path, description, checksums)
        if compiled is not None and optimizer is compiled.optimizer:
            states.check_elementwise()
        store.join(states.store, states.masters.values())
    if compiled is None and any(place.tensor.is_meta for place in places):
        raise LohanError(
            "the model is on the meta device: compile it before load(), or give it memory with "
            "model.to_empty(device='cpu')"
        )
    tensors = dict(zip(extra.infos, map(torch.clone, extra.read(extra.infos)), strict=True))
    at = f"{path / DESCRIPTION}: "
    found = decode(description["extra"], tensors, f"{at}extra")
    random_states = decode(description["random"], tensors, f"{at}random")
    if states is not None:
        states.check_groups(tensors)
    take_buffers(model, places, store, keys)
    ours = compiled is not None and states is not None and optimizer is compiled.optimizer
    unsaved = _unsaved_backwards(compiled, optimizer)
    with _loading(compiled, ("model", "optimizer") if ours else ("model",)):
        if states is None:
            _load_weights(compiled, places, StoredWeights(store, keys), ())
        else:
            exact = StoredWeights(store, {**keys, **states.masters})
            _load_weights(compiled, places, exact, tuple(states.masters))
            if compiled is not None and compiled.optimizer_states is not None and ours:
                states.load_groups(tensors)
                compiled.optimizer_states.load(states.lend)
            else:
                states.load_plainly(tensors)
    if unsaved:
        warnings.warn(
            f"lohan_fx.load in the middle of a step: gradients of {_backwards(unsaved)}, added up "
            "for the next optimizer.step(), are dropped, as the checkpoint begins a step",
            UserWarning,
            stacklevel=2,
        )
    if rng:
        try:
            _set_random_states(random_states)
        except (
            AttributeError,
            IndexError,
            KeyError,
            OverflowError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise CheckpointError(
                f"{path} has no whole states of the random generators ({error!r}); all else has "
                "been loaded: load(…, rng=False) leaves them out"
            ) from error
    return Checkpoint(path=path, step=description["step"], extra=found)


def latest(directory: str | Path) -> Path | None:
    """The checkpoint with the highest step among the directories in `directory`; None if there
    is none. Checkpoints that were cut short, or whose description is damaged, do not count."""
    found: list[tuple[int, Path]] = []
    root = path_of("directory", directory)
    for path in root.iterdir() if root.is_dir() else ():
        with contextlib.suppress(CheckpointError):
            step = manifest.read(path)["step"]
            if step is not None and not path.name.startswith("."):
                found.append((step, path))
    return max(found)[1] if found else None


class _DescriptionFile:
    """``checkpoint.json``: written last, with the checksums of the others."""

    name = DESCRIPTION

    def __init__(
        self, description: Mapping[str, Any], files: Sequence[TensorFile | TextFile]
    ) -> None:
        self._description = description
        self._files = files

    def _data(self) -> bytes:
        checksums = {file.name: file.checksums for file in self._files}
        return manifest.write(self._description, checksums).encode()

    @property
    def num_bytes(self) -> int:
        return len(self._data())

    def write(self, file: io.BufferedWriter, relieve: Callable[[], None]) -> None:
        file.write(self._data())


# ---------------------------------------------------------------------------------------------
# Model and optimizer
# ---------------------------------------------------------------------------------------------


def _compiled(model: nn.Module) -> CompiledModel | None:
    if not isinstance(model, nn.Module):
        raise LohanError(
            "a checkpoint is of a torch.nn.Module and its optimizer, not of a "
            f"{type(model).__name__}"
        )
    found = model.__dict__.get("_lohan")
    return found if isinstance(found, CompiledModel) else None


def _chosen(
    compiled: CompiledModel | None, optimizer: Optimizer | Literal[False] | None
) -> Optimizer | None:
    if optimizer is None and compiled is not None:
        return compiled.optimizer
    if optimizer is not None and optimizer is not False and not isinstance(optimizer, Optimizer):
        name = getattr(optimizer, "__name__", type(optimizer).__name__)
        raise LohanError(f"optimizer={name}: use None, False or a torch.optim.Optimizer")
    return optimizer or None


def _warn_of_sums(compiled: CompiledModel | None, optimizer: Optimizer | None) -> None:
    """Say that a run that goes on from this checkpoint will lack gradients that were added up."""
    count = _unsaved_backwards(compiled, optimizer)
    if count:
        warnings.warn(
            f"lohan_fx.save in the middle of a step: the checkpoint lacks {_backwards(count)}, "
            "whose gradients were added up for the next optimizer.step(). Save right after "
            "optimizer.step(), or run the whole step again when you go on from here",
            UserWarning,
            stacklevel=3,
        )


def _unsaved_backwards(compiled: CompiledModel | None, optimizer: Optimizer | None) -> int:
    """Those that no checkpoint has; 0 of weights alone, from which no run goes on."""
    states = compiled.optimizer_states if compiled is not None else None
    if compiled is None or states is None or optimizer is not compiled.optimizer:
        return 0
    return states.unsaved_backwards


def _backwards(count: int) -> str:
    return "1 backward" if count == 1 else f"{count} backwards"


@contextlib.contextmanager
def _lent(compiled: CompiledModel | None, optimizer: Optimizer | None) -> Iterator[None]:
    """The optimizer has its states, as views of where they are."""
    states = compiled.optimizer_states if compiled is not None else None
    if compiled is None or states is None or optimizer is not compiled.optimizer:
        yield
        return
    states.lend()
    try:
        yield
    finally:
        states.unlend()


@contextlib.contextmanager
def _loading(compiled: CompiledModel | None, parts: Sequence[Part]) -> Iterator[None]:
    """While values are written into the model; what fails here leaves it loaded in part."""
    try:
        with contextlib.nullcontext() if compiled is None else compiled.integrity.loading(parts):
            yield
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}. The model has been loaded in part: load another checkpoint into it before "
            "it is trained or saved"
        ) from error


def _check_there(path: Path, files: Sequence[str], optimizer: bool) -> None:
    """See that all files are there that are to be read.

    Raises:
        CheckpointError: names those that are not.
    """
    lost = [name for name in files if name.endswith(_READ) and not (path / name).is_file()]
    weights_only = [name for name in lost if not name.startswith("optimizer.")]
    if not optimizer:
        lost = weights_only
    if not lost:
        return
    cure = "copy them back, or load another checkpoint"
    if not weights_only:
        cure += "; load(…, optimizer=False) takes the weights alone, and the optimizer begins anew"
    elif not [name for name in lost if name != _EXTRA]:
        cure += f"; compile(weights={str(path)!r}) takes the weights alone"
    raise CheckpointError(f"{path} is not complete: it was saved with {listed(lost)}: {cure}")


def _load_weights(
    compiled: CompiledModel | None,
    places: Sequence[Place],
    source: StoredWeights,
    masters: Sequence[str],
) -> None:
    if compiled is None or compiled.memory is None:
        fill(places, source)
        if compiled is not None:
            compiled.arriving.source = source
            compiled.arriving.masters = masters
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
        groups.append({"params": names, "values": encode(values, f"{name}.groups.{g}", extra)})
        for p, of in zip(group["params"], names, strict=True):
            if optimizer.state.get(p):
                states[of] = encode(dict(optimizer.state[p]), of, tensors)
    masters = {}
    if compiled is not None and compiled.memory is not None and optimizer is compiled.optimizer:
        for of, master in compiled.memory.states.hidden_masters():
            masters[of] = f"{of}.fp32_master"
            tensors[masters[of]] = master
    described = {"class": name, "groups": groups, "states": states, "masters": masters}
    return described, tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """A group of the optimizer: names of its parameters, and encoded hyperparameters."""

    params: tuple[str, ...]
    values: Mapping[str, Any]


def _is_number(value: Any) -> bool:
    """Whether float() takes it, and it is no text."""
    if isinstance(value, Tensor):
        return not value.dim()
    return isinstance(value, int | float) and not abs(value) > sys.float_info.max


def _is_alike(now: Any, value: Any) -> bool:
    """Whether a hyperparameter may become this value: a number stays one, or begins as None."""
    if now is None or value is None:
        return True
    if isinstance(now, int | float | Tensor):
        return isinstance(value, int | float | Tensor)
    kinds = (kind for kind in (str, list | tuple) if isinstance(now, kind))
    return all(isinstance(value, kind) for kind in kinds)


class _States:
    """The optimizer's part of a checkpoint, checked against an optimizer.

    Attributes:
        store: the tensors.
        masters: parameter → key of its master, where the parameter has less precision.

    Raises:
        CheckpointError: there is none, or it is of other groups.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        path: Path,
        description: Mapping[str, Any],
        checksums: manifest.Checksums,
    ) -> None:
        found = description.get("optimizer")
        if found is None:
            raise CheckpointError(
                f"{path} has no states of an optimizer: it was saved without. Pass "
                "optimizer=False to load weights only"
            )
        self._optimizer = optimizer
        self._path = path
        self._at = f"{path / DESCRIPTION}: optimizer"
        reader = manifest.reader_of(path)
        part = reader.read(dict[str, Any], found, "optimizer")
        self._groups = reader.read(tuple[_Group, ...], part.get("groups"), "optimizer.groups")
        self._entries = reader.read(
            dict[str, dict[str, Any]], part.get("states"), "optimizer.states"
        )
        self.masters = reader.read(dict[str, str], part.get("masters"), "optimizer.masters")
        self._parameters = dict(model.named_parameters())
        self.store = sharded(path, _OPTIMIZER, _OPTIMIZER_INDEX, checksums)
        self._names = _names_of(model, optimizer)
        saved = [group.params for group in self._groups]
        if [sorted(names) for names in saved] != [sorted(names) for names in self._names]:
            raise CheckpointError(self._other_groups(saved))
        keys = [key for entry in self._entries.values() for key in tensors_in(entry)]
        keys += self.masters.values()
        lost = [k for k in keys if not isinstance(k, str) or k not in self.store.infos]
        if lost:
            raise CheckpointError(f"{self.store.name} lacks {', '.join(map(str, lost[:8]))}")
        for name in self._entries:
            self._entry(name, self.store.infos)
        for name, key in self.masters.items():
            if name not in self._parameters:
                raise CheckpointError(f"{self._at}.masters has {name}, which the model lacks")
            self._check_like(name, key, self.store.infos[key])

    def _entry(self, name: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The states of a parameter, with these in the place of their tensors."""
        at = f"{self._at}.states.{name}"
        return {k: decode(v, tensors, f"{at}.{k}") for k, v in self._entries[name].items()}

    def _check_like(self, name: str, what: str, found: TensorInfo | Tensor) -> None:
        """See that a tensor has the shape of a parameter, and numbers of its kind."""
        p = self._parameters[name]
        if tuple(found.shape) != tuple(p.shape) or kind_of(found) != kind_of(p):
            raise CheckpointError(
                f"{what} in {self.store.name} is {text_of(found)}, the parameter {text_of(p)}"
            )

    def _other_groups(self, saved: Sequence[Sequence[str]]) -> str:
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
            found = self._entry(name, self.store.infos) if name in self._entries else {}
            entry = {k: v for k, v in found.items() if v is not None}
            wanted = {*unit.state_names(i), *unit.scalar_names(i)}
            if entry and set(entry) != wanted:
                raise CheckpointError(
                    f"{self._path} has the states {sorted(entry)} for {name}; this "
                    f"{type(self._optimizer).__name__} keeps {sorted(wanted)}: construct the "
                    "optimizer with the options that it was saved with"
                )
            for key, value in entry.items():
                what = f"{key} of {name}"
                if key in unit.state_names(i) and isinstance(value, TensorInfo | Tensor):
                    self._check_like(name, what, value)
                elif key in unit.state_names(i) or not _is_number(value):
                    raise CheckpointError(f"{self._at}.states has {value!r} as {what}")

    def check_groups(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse hyperparameters that are of another kind than the optimizer's."""
        for g, group in enumerate(self._optimizer.param_groups):
            for key, value in self._values(g, tensors).items():
                if not _is_alike(group.get(key), value):
                    raise CheckpointError(
                        f"{self._at}.groups[{g}].values.{key} is {value!r}, and "
                        f"{type(self._optimizer).__name__} has {group[key]!r} there"
                    )

    def _values(self, g: int, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """The hyperparameters of group `g`."""
        at = f"{self._at}.groups[{g}].values"
        return {k: decode(v, tensors, f"{at}.{k}") for k, v in self._groups[g].values.items()}

    def lend(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Give the optimizer the states of these parameters, as they are in the files."""
        keys = [key for name in parameters for key in tensors_in(self._entries.get(name))]
        tensors = dict(zip(keys, self.store.read(keys), strict=True))
        for name, p in parameters.items():
            if name in self._entries:
                self._optimizer.state[p] = self._entry(name, tensors)

    def load_groups(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the hyperparameters; tensors among them keep their identity."""
        for g, group in enumerate(self._optimizer.param_groups):
            for key, value in self._values(g, tensors).items():
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
        for g, group in enumerate(self._optimizer.param_groups):
            first = sum(len(g["params"]) for g in groups)
            indices = range(first, first + len(group["params"]))
            groups.append({**self._values(g, tensors), "params": list(indices)})
            for i, p in zip(indices, group["params"], strict=True):
                entry = self._optimizer.state.pop(p, None)
                if entry is not None:
                    states[i] = {
                        k: v.clone() if isinstance(v, Tensor) else v for k, v in entry.items()
                    }
        try:
            self._optimizer.load_state_dict({"state": states, "param_groups": groups})
        except (
            AttributeError,
            KeyError,
            OverflowError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise CheckpointError(
                f"{self._path} has states that {type(self._optimizer).__name__} does not take "
                f"({error!r})"
            ) from error


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


def _old_files(path: Path) -> set[str] | None:
    """The files of the checkpoint at `path`; None if there is none."""
    try:
        return {*manifest.read(path, verify=False)["files"], DESCRIPTION}
    except CheckpointError:
        return None
