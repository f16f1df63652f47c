"""Values out of JSON, checked against the annotations of the dataclasses that they are for.

Whoever edited a file, or has one that is damaged, is told the field by its place:
``units['h.0'].tier``. Nothing here knows torch.
"""

from __future__ import annotations

import functools
import json
import reprlib
import types
from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from lohan_fx.errors import LohanError

T = TypeVar("T")

_LIMIT = 10**30
"""No count of bytes, FLOPs or seconds comes near it, and every float can hold what is below."""


_MAX_DEPTH = 200
"""Lists and objects within each other: what reads them may call itself for each."""


def json_of(file: Path) -> Any:
    """What a JSON file holds.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON, or nested too deeply.
    """
    return json_in(file.read_bytes())


_KINDS = {
    "traceEvents": "a trace, for Perfetto",
    "matmul_flops_per_s": "a hardware profile",
    "residuals": "a plan",
}


def kind_of(data: Any) -> str:
    """What a file of lohan_fx is, by a key that no other has; empty if it is none."""
    keys = data.keys() if isinstance(data, Mapping) else ()
    return next((kind for key, kind in _KINDS.items() if key in keys), "")


def json_in(text: bytes) -> Any:
    """What JSON in UTF-8 holds.

    Raises:
        ValueError: it is none, or nested too deeply.
    """
    try:
        found = json.loads(text.decode())
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    check_depth(found)
    return found


def check_depth(value: Any) -> None:
    """Raise ValueError if lists and objects are nested more deeply than a file may have them."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


_TOO_DEEP = f"its values are nested more than {_MAX_DEPTH} deep"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Reads one kind of file.

    Attributes:
        what: what messages call it.
        error: what they are raised as.
        optional: class → fields with defaults that a file may lack. It has all others.
    """

    what: str
    error: type[LohanError]
    optional: Mapping[type, Collection[str]] = field(default_factory=dict)

    def read(self, kind: type[T], value: Any, at: str = "") -> T:
        """A value as an annotation wants it.

        Args:
            kind: a dataclass, str, bool, int or float (neither is negative), Any, Literal[…],
                tuple[…, ...], dict or Mapping[str, …], or one of these or None.
            value: what the JSON has there.
            at: its place in the file.

        Raises:
            `error`: something is missing, unknown or of another kind.
        """
        return cast(T, self._read(kind, value, at))

    def wrong(self, at: str, value: Any, wanted: str) -> LohanError:
        """The error about a value that is not what it has to be."""
        return self.error(
            f"{self.what} has an entry of the wrong kind: {at or 'all of it'} is "
            f"{reprlib.repr(value)}, not {wanted}"
        )

    def _read(self, kind: Any, value: Any, at: str) -> Any:
        if is_dataclass(kind):
            return self._record(kind, value, at)
        origin, args = _form_of(kind)
        if origin is Literal:
            if value not in args:
                raise self.wrong(at, value, " or ".join(map(repr, args)))
            return value
        if origin is tuple:
            if not isinstance(value, list | tuple):
                raise self.wrong(at, value, "a list")
            return tuple(self._read(args[0], v, f"{at}[{i}]") for i, v in enumerate(value))
        if origin in (Mapping, dict):
            return {
                k: self._read(args[1], v, f"{at}[{k!r}]") for k, v in self._named(value, at).items()
            }
        if origin is not None:  # … or None
            return None if value is None else self._read(args[0], value, at)
        return self._single(kind, value, at)

    def _record(self, kind: Any, value: Any, at: str) -> Any:
        given, known, optional = self._named(value, at), _fields_of(kind), self.optional.get(kind)
        places = {name: f"{at}.{name}" if at else name for name in (*known, *given)}
        for name, (_, has_default) in known.items():
            if name not in given and not (has_default and name in (optional or ())):
                raise self.error(f"{self.what} lacks {places[name]!r}: is the file complete?")
        for name in given:
            if name not in known:
                raise self.error(
                    f"{self.what} has an entry that this version of lohan_fx does not know: "
                    f"{places[name]}"
                )
        return kind(**{n: self._read(known[n][0], v, places[n]) for n, v in given.items()})

    def _single(self, kind: Any, value: Any, at: str) -> Any:
        if kind is Any:
            return value
        if kind in (str, bool):
            if not isinstance(value, kind):
                raise self.wrong(at, value, "a text" if kind is str else "true or false")
            return value
        is_number = isinstance(value, int if kind is int else int | float)
        if not is_number or isinstance(value, bool) or not 0 <= value < _LIMIT:  # NaN is neither
            what = "a whole number" if kind is int else "a number"
            raise self.wrong(at, value, f"{what} from 0 to 1e30")
        return value

    def _named(self, value: Any, at: str) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise self.wrong(at, value, "a JSON object")
        return value


@functools.cache
def _form_of(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """What an annotation is made of; None and nothing if it is a class."""
    origin = get_origin(kind)
    assert origin in (None, Literal, tuple, dict, Mapping, Union, types.UnionType), kind
    return origin, get_args(kind)


@functools.cache
def _fields_of(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Field of a dataclass → its annotation, and whether it has a default."""
    hints = get_type_hints(kind)

    def has_default(of: Field[Any]) -> bool:
        return of.default is not MISSING or of.default_factory is not MISSING

    return {of.name: (hints[of.name], has_default(of)) for of in fields(kind)}
