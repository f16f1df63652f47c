"""Where a model's weights come from: safetensors files, a mapping of tensors, or initialization.

Everything is checked before anything is allocated; then the values come one parameter at a time,
and go straight into the tiers (`runtime.states`), so that a model on the meta device is loaded or
initialized with no more memory than its plan has.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from lohan_fx.errors import CheckpointError, LohanError, listed
from lohan_fx.initialization import Initialization, realize, restore_buffers
from lohan_fx.manifest import HEADER, WHOLE_FILE, Checksums, bytes_of, check, checksums_in
from lohan_fx.reading import Reader, json_in

logger = logging.getLogger("lohan_fx")

WeightsArgument: TypeAlias = str | Path | Mapping[str, Tensor]
"""A .safetensors file, a directory of them, a mapping name → tensor, or the string "init"."""

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Names of dtypes in safetensors files."""

_REOPEN_BYTES = 64 << 20
"""A file is mapped anew after so many bytes, so that what was read leaves the process."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a store has under a name. `dtype` is None for a kind that torch here does not know."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None


class Store(Protocol):
    """Tensors by name, read one at a time."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def infos(self) -> Mapping[str, TensorInfo]: ...

    def read(self, keys: Iterable[str]) -> Iterator[Tensor]:
        """Yield the tensors in this order. One is valid until the next is asked for."""


class FileStore:
    """Tensors in safetensors files. Only headers are read until `read`.

    Args:
        files: key → the file that has it; None for every key of that file.
        name: what messages call it.
        checksums: what is read is compared with them, where there are any.

    Raises:
        CheckpointError: a file is missing, cut short or damaged, or lacks a key.
    """

    def __init__(
        self,
        files: Iterable[tuple[Path, Container[str] | None]],
        name: str,
        checksums: Checksums | None = None,
    ) -> None:
        self.name = name
        self._checksums = dict(checksums or {})
        self.infos: dict[str, TensorInfo] = {}
        self.files: dict[str, Path] = {}
        for path, wanted in files:
            with _opened(path) as file:
                check(path, HEADER, _header(path), self._of(path))
                for key in file.keys():  # noqa: SIM118 - not a mapping
                    if wanted is None or key in wanted:
                        part = file.get_slice(key)
                        dtype = DTYPES.get(part.get_dtype())
                        self.infos[key] = TensorInfo(tuple(part.get_shape()), dtype)
                        self.files[key] = path

    def join(self, other: FileStore, keys: Iterable[str]) -> None:
        """Have these tensors of another store, too."""
        for key in keys:
            self.infos[key], self.files[key] = other.infos[key], other.files[key]
        self._checksums |= other._checksums

    def _of(self, path: Path) -> Mapping[str, int]:
        return self._checksums.get(path.name, {})

    def read(self, keys: Iterable[str]) -> Iterator[Tensor]:
        path: Path | None = None
        num_bytes = 0
        with ExitStack() as stack:
            file: Any = None
            for key in keys:
                if self.files[key] != path or num_bytes > _REOPEN_BYTES:
                    stack.close()
                    path, num_bytes = self.files[key], 0
                    file = stack.enter_context(_opened(path))
                try:
                    tensor: Tensor = file.get_tensor(key)
                except SafetensorError as error:
                    raise CheckpointError(f"cannot read {key} from {path}: {error}") from error
                num_bytes += tensor.nbytes
                check(path, key, bytes_of(tensor), self._of(path))
                yield tensor
                del tensor


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path}: {error.strerror or error}; weights are a local .safetensors file "
            "or directory, or 'init' for the model's own initialization"
        ) from error
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is no complete safetensors file: {error}; it was cut short, damaged, or is of "
            "another format"
        ) from error


def _header(path: Path) -> bytes:
    """The bytes before the first tensor."""
    with path.open("rb") as file:
        length = file.read(8)
        return length + file.read(int.from_bytes(length, "little"))


class MappingStore:
    """Tensors that are there already."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        for key, value in tensors.items():
            if not isinstance(key, str):
                raise LohanError(f"weights has the key {key!r}: keys are names of parameters")
            if not isinstance(value, Tensor) or value.is_meta:
                kind = "a meta tensor" if isinstance(value, Tensor) else type(value).__name__
                raise LohanError(f"weights[{key!r}] is {kind}: give tensors that have data")
        self.name = "the mapping"
        self.infos = {k: TensorInfo(tuple(t.shape), t.dtype) for k, t in tensors.items()}
        self._tensors = tensors

    def read(self, keys: Iterable[str]) -> Iterator[Tensor]:
        for key in keys:
            yield self._tensors[key].detach()


def open_store(weights: WeightsArgument) -> Store:
    """Find the files behind ``weights=`` and read their headers.

    Raises:
        CheckpointError: there is no such file, or it is damaged.
    """
    if isinstance(weights, Mapping):
        return MappingStore(weights)
    path = Path(weights)
    if path.is_dir():
        return sharded(path, WHOLE, INDEX, checksums_in(path))
    if path.name.endswith(".index.json"):
        return sharded(path.parent, "", path.name)
    if path.suffix != ".safetensors" and path.exists():
        raise CheckpointError(
            f"{path} is no .safetensors file: convert it with safetensors.torch.save_file, or pass "
            "weights={name: tensor}"
        )
    return FileStore([(path, None)], str(path))


def sharded(
    directory: Path, whole: str, index: str, checksums: Checksums | None = None
) -> FileStore:
    """The file `whole`, or the shards that `index` names, in a directory."""
    if (directory / whole).is_file():
        return FileStore([(directory / whole, None)], str(directory / whole), checksums)
    path = directory / index
    if not path.is_file():
        there = sorted(p.name for p in directory.iterdir())[:8]
        raise CheckpointError(
            f"{directory} has neither {whole} nor {index}; it has "
            f"{', '.join(there) or 'nothing'}. If the weights have another name, give that file; "
            "to load weights without an optimizer's states, load(…, optimizer=False)"
        )
    text = path.read_bytes()
    check(path, WHOLE_FILE, text, (checksums or {}).get(index, {}))
    try:
        places = json_in(text)["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no index of safetensors files: {error!r}") from error
    reader = Reader(what=str(path), error=CheckpointError)
    files: dict[str, set[str]] = {}
    for key, file in reader.read(dict[str, str], places, "weight_map").items():
        files.setdefault(file, set()).add(key)
    found = [(directory / file, keys) for file, keys in files.items()]
    store = FileStore(found, str(path), checksums)
    lost = [f"{key} (in {places[key]})" for key in places if key not in store.infos]
    if lost:
        raise CheckpointError(f"{path} names tensors that are not there: {listed(lost)}")
    return store


# ---------------------------------------------------------------------------------------------
# Matching names
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """A parameter or persistent buffer of a model, with all of its names in ``state_dict()``."""

    names: tuple[str, ...]
    tensor: Tensor

    @property
    def name(self) -> str:
        return self.names[0]


def places_of(model: nn.Module) -> list[Place]:
    """What belongs into a file of the model's weights; tied parameters come once.

    Raises:
        LohanError: ``state_dict()`` has something that is no parameter and no buffer.
    """
    known = {id(t) for t in (*model.parameters(), *model.buffers())}
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in known:
            raise LohanError(
                f"state_dict() of the {type(model).__name__} has {name}, a "
                f"{type(value).__name__} that is neither a parameter nor a buffer: register it as "
                "a buffer, or save it with extra="
            )
        names.setdefault(id(value), []).append(name)
        tensors[id(value)] = value
    return [Place(tuple(found), tensors[key]) for key, found in names.items()]


def match(
    model: nn.Module, places: Sequence[Place], store: Store, *, keep: bool = False
) -> dict[str, str]:
    """First name of each place → its key in the store.

    Any name of a tied parameter will do. Dtypes may differ within floating point. A buffer that
    the model does not save may be in the store all the same. With `keep`, what has data need not
    be there.

    Raises:
        CheckpointError: names all keys that are missing, unexpected, or do not fit.
    """
    found: dict[str, str] = {}
    missing: list[str] = []
    wrong: list[str] = []
    for place in places:
        keys = [name for name in place.names if name in store.infos]
        if not keys and keep and not place.tensor.is_meta:
            continue
        if not keys:
            missing.append(f"{' = '.join(place.names)} {text_of(place.tensor)}")
            continue
        found[place.name] = keys[0]
        info = store.infos[keys[0]]
        if info.shape != tuple(place.tensor.shape) or kind_of(info) != kind_of(place.tensor):
            wrong.append(f"{keys[0]}: file {text_of(info)}, model {text_of(place.tensor)}")
    known = {name for place in places for name in place.names}
    known.update(name for name, _ in model.named_buffers(remove_duplicate=False))
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()  # transformers
    unexpected = [
        f"{key} {text_of(info)}"
        for key, info in store.infos.items()
        if key not in known and not any(re.search(p, key) for p in patterns)
    ]
    problems = {"missing": missing, "unexpected": unexpected, "of another shape or kind": wrong}
    lines = [f"{what} ({len(keys)}): {listed(keys)}" for what, keys in problems.items() if keys]
    if lines:
        raise CheckpointError(
            "\n  ".join([f"{store.name} does not fit the {type(model).__name__}:", *lines])
            + (_prefix_hint(known, store.infos) or _inner_hint(known, store.infos))
        )
    _check_tied(places, store)
    return found


def _check_tied(places: Sequence[Place], store: Store) -> None:
    """Refuse a file in which the names of one parameter have different values."""
    for place in places:
        keys = [name for name in place.names if name in store.infos]
        for first, other in itertools.pairwise(keys):
            a, b = (next(iter(store.read([key]))) for key in (first, other))
            if a.shape != b.shape or not torch.equal(a, b.to(a.dtype)):
                raise CheckpointError(
                    f"{first} and {other} are one parameter of the model and have different values "
                    f"in {store.name}: untie them in the model, or leave one out of the weights"
                )


def kind_of(tensor: Tensor | TensorInfo) -> tuple[bool, bool] | None:
    """Whether its numbers are floating-point, or complex: what a cast does not change."""
    dtype = tensor.dtype
    return None if dtype is None else (dtype.is_floating_point, dtype.is_complex)


def text_of(tensor: Tensor | TensorInfo) -> str:
    """Shape and dtype, for messages."""
    dtype = str(tensor.dtype).removeprefix("torch.") if tensor.dtype else "a dtype torch lacks"
    return f"{tuple(tensor.shape)} {dtype}"


def _prefix_hint(known: Container[str], infos: Mapping[str, TensorInfo]) -> str:
    """Say so if all names fit but for a prefix."""
    heads = {key[: i + 1] for key in infos for i, c in enumerate(key) if c == "."}
    for head in sorted(heads, key=len):
        if all(key.startswith(head) and key.removeprefix(head) in known for key in infos):
            return (
                f"\n  names fit without {head!r}: the file is of an outer module. Compile that "
                f"module, or pass weights={{name.removeprefix({head!r}): tensor, …}}"
            )
    return ""


_WRAPPED = ".base_layer."
"""Where peft has a layer that it adapts."""


def _inner_hint(known: Iterable[str], infos: Container[str]) -> str:
    """Say so if the file's names fit after a prefix."""
    known = set(known)
    heads = {key[: i + 1] for key in known for i, c in enumerate(key) if c == "."}
    for head in sorted(heads, key=len):
        inner = [key.removeprefix(head) for key in known if key.startswith(head)]
        if sum(key.replace(_WRAPPED, ".") in infos for key in inner) * 2 <= len(inner):
            continue
        wrapped = any(_WRAPPED in key and key.replace(_WRAPPED, ".") in infos for key in inner)
        also, taken = "", "name"
        if wrapped:
            also = f", and with {_WRAPPED!r} where a layer is wrapped"
            taken = f"name.replace({_WRAPPED!r}, '.')"
        return (
            f"\n  most names fit after {head!r}{also}: the file is of the inner module "
            f"{head.removesuffix('.')}. Pass weights={{{head!r} + name: tensors[{taken}], …}} "
            "for the model's own names, with what is missing"
        )
    return ""


# ---------------------------------------------------------------------------------------------
# Sources
# ---------------------------------------------------------------------------------------------


class Source(Protocol):
    """Values for parameters on the meta device, when memory for them has been made."""

    def stream(self, model: nn.Module, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield each of the parameters once, by first name, in any order."""


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Values from a store, under the keys that `match` found."""

    store: Store
    keys: Mapping[str, str]

    def stream(self, model: nn.Module, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        return zip(names, self.store.read(self.keys[n] for n in names), strict=True)


def resolve(model: nn.Module, weights: WeightsArgument | None) -> Source | None:
    """Check ``weights=`` against the model; give its meta buffers their values.

    Parameters stay as they are; see `fill`.

    Raises:
        CheckpointError: names do not fit, or a file is damaged.
        LohanError: something stays without a value: the message says what.
    """
    on_meta = [n for n, p in model.named_parameters() if p.is_meta]
    if weights is None:
        if on_meta:
            raise LohanError(
                f"parameter {on_meta[0]} is on the meta device: it has no data to train (as "
                f"{len(on_meta)} parameters have none). Pass weights=path (safetensors), or "
                'weights="init", which lohan_fx.load may follow'
            )
        return None
    if isinstance(weights, str) and weights == "init":
        return Initialization(model)
    if not isinstance(weights, (str, Path, Mapping)):
        raise LohanError(
            f"weights={weights!r}: give a path, a mapping name → tensor, or the string 'init'"
        )
    store = open_store(weights)
    places = places_of(model)
    keys = match(model, places, store, keep=bool(on_meta))
    kept = [place.name for place in places if place.name not in keys]
    if kept:
        logger.warning(
            "lohan_fx: %s has nothing for %s, which keep the data that they have",
            store.name,
            listed(kept),
        )
    take_buffers(model, places, store, keys)
    return StoredWeights(store, keys)


def take_buffers(
    model: nn.Module, places: Sequence[Place], store: Store, keys: Mapping[str, str]
) -> None:
    """Give meta buffers their values: from the store, or from their modules' initialization.

    Raises:
        LohanError: names the buffers that nothing gives a value.
    """
    restore_buffers(model, {id(place.tensor) for place in places})
    buffers = [p for p in places if p.tensor.is_meta and not isinstance(p.tensor, nn.Parameter)]
    for place, value in zip(buffers, store.read(keys[p.name] for p in buffers), strict=True):
        realize(place.tensor, torch.empty_like(place.tensor, device="cpu").copy_(value))


def fill(places: Sequence[Place], source: StoredWeights) -> None:
    """Copy values into what has memory."""
    real = [p for p in places if not p.tensor.is_meta and p.name in source.keys]
    values = source.store.read(source.keys[p.name] for p in real)
    with torch.no_grad():
        for place, value in zip(real, values, strict=True):
            place.tensor.copy_(value)
