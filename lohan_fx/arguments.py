"""Checks of arguments that the public functions share: what is wrong is said by its name."""

from __future__ import annotations

import inspect
import operator
import os
from pathlib import Path
from typing import Any

from lohan_fx.errors import LohanError


def path_of(name: str, value: Any) -> Path:
    """A path, as text or as an object that stands for one.

    Raises:
        LohanError: it is none, or empty, as a shell variable that is not set.
    """
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        raise LohanError(f"{name}={value!r}: give a path, as text or a pathlib.Path")
    if value == "" or "\0" in os.fspath(value):
        raise LohanError(f"{name}={value!r} is no path: '.' stands for the current directory")
    return Path(value)


def check_count(name: str, value: Any, what: str, least: int = 1) -> int:
    """A whole number of `what` as an int, if it is one and large enough."""
    try:
        count = operator.index(value)  # also of NumPy's
    except TypeError:
        count = least - 1
    if count < least or isinstance(value, bool):
        raise LohanError(f"{name}={value!r}: use a number of {what}, at least {least}")
    return count


def check_flag(name: str, value: Any, *others: str) -> None:
    """See that it is True, False or one of `others`."""
    if isinstance(value, bool) or (isinstance(value, str) and value in others):
        return
    known = ["True", "False", *map(repr, others)]
    raise LohanError(f"{name}={value!r}: use {', '.join(known[:-1])} or {known[-1]}")


def check_outputs(value: Any) -> None:
    """See that ``outputs=`` names outputs; whether the model has them, its trace tells."""
    names = () if isinstance(value, str) or not hasattr(value, "__iter__") else tuple(value)
    if value not in ("auto", "all") and not (names and all(isinstance(n, str) for n in names)):
        raise LohanError(
            f"outputs={value!r}: use 'auto', 'all', or a sequence of output names, such as ['loss']"
        )


def check_call(function: Any, num_arguments: int, what: str) -> None:
    """See that a function can be called with so many arguments; `what` says who calls it."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # as of builtins
        return
    try:
        signature.bind(*(None,) * num_arguments)
    except TypeError as error:
        name = getattr(function, "__qualname__", type(function).__name__)
        raise LohanError(f"{what}, and {name}{signature} cannot be: {error}") from None


def several(name: str, value: Any) -> list[Any]:
    """One value or a collection of them, as a list."""
    if value is None or isinstance(value, str | int):
        return [value]
    found = [*value] if hasattr(value, "__iter__") else []
    if not found:
        raise LohanError(f"{name}={value!r}: give one, or a list of at least one")
    return found
