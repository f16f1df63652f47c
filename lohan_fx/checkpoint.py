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
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lohan_fx import manifest
from lohan_fx.arguments import check_flag, path_of
from lohan_fx.atomic import TensorFile, TextFile, tensor_files, write_directory
from lohan_fx.atomic import found as found_directory
from lohan_fx.checkpoint_states import OPTIMIZER, SavedStates, describe
from lohan_fx.compiled.integrity import Part
from lohan_fx.compiled.model import CompiledModel
from lohan_fx.encoded import decode, encode
from lohan_fx.errors import CheckpointError, LohanError, listed
from lohan_fx.hardware import parse_bytes
from lohan_fx.manifest import DESCRIPTION, FORMAT, VERSION
from lohan_fx.random_states import random_states, set_random_states
from lohan_fx.reading import check_depth
from lohan_fx.weights import (
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

MAX_SHARD_BYTES = 5 << 30

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

    What was written into parameters is taken over first, as by ``model.lohan.take_over()``, unless
    `optimizer` is False: weights are read once more for that.

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
        # masters are saved beside their parameters, and `load` reads masters: all are compared, as
        # what nobody counts (``.data``) would be gone with them
        compiled.take_over(uncounted=optimizer is compiled.optimizer)
    tensors: dict[str, Tensor] = {}
    description: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    description["step"] = step
    try:
        description["extra"] = encode(dict(extra or {}), "extra", tensors)
        check_depth(description)  # as `load` does
    except (RecursionError, ValueError):
        raise LohanError("extra= is nested too deeply: give flat dicts and lists") from None
    description["random"] = encode(random_states(), "random", tensors)
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
            described, states = describe(model, compiled, optimizer, tensors)
            description["optimizer"] = described
            files += tensor_files(states, OPTIMIZER, limit, {})
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
    if directory is None:
        raise LohanError(
            "directory=None: give the directory of a checkpoint (lohan_fx.latest returns None "
            "where there is none)"
        )
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
        states = SavedStates(model, optimizer, path, description, checksums)
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
            set_random_states(random_states)
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


def _old_files(path: Path) -> set[str] | None:
    """The files of the checkpoint at `path`; None if there is none."""
    try:
        return {*manifest.read(path, verify=False)["files"], DESCRIPTION}
    except CheckpointError:
        return None
