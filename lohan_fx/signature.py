"""What a program is made for: shapes, dtypes and modes. Another signature needs another program."""

from __future__ import annotations

import enum
import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lohan_fx.errors import CaptureError

_CONSTANTS = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.Size,
)


class Signature(NamedTuple):
    """Equal for calls that can run the same program.

    `grad`: whether backward will follow; `modes`: of every module, whether it trains;
    `trains`: of every parameter, whether it needs a gradient; `autocast`: the dtype of the region
    that the call stands in; `structure`: of args and kwargs; `leaves`: of each, what matters.
    """

    grad: bool
    modes: tuple[bool, ...]
    trains: tuple[bool, ...]
    autocast: torch.dtype | None
    structure: str
    leaves: tuple[Any, ...]


def signature_of(
    modes: tuple[bool, ...],
    trains: tuple[bool, ...],
    device: torch.device,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Signature:
    """The signature of a call, of a model with these `modes` and `trains`.

    Raises:
        CaptureError: an input is neither a tensor nor hashable.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    grad = torch.is_grad_enabled() and (
        any(trains) or any(isinstance(x, Tensor) and x.requires_grad for x in leaves)
    )
    autocast = torch.is_autocast_enabled(device.type)
    return Signature(
        grad=grad,
        modes=modes,
        trains=trains,
        autocast=torch.get_autocast_dtype(device.type) if autocast else None,
        structure=str(spec),
        leaves=tuple(_leaf(leaf, grad) for leaf in leaves),
    )


def _leaf(leaf: Any, grad: bool) -> Any:
    if isinstance(leaf, Tensor):
        shape, needs_grad = tuple(leaf.shape), leaf.requires_grad and grad
        return (shape, leaf.stride(), leaf.dtype, leaf.device, needs_grad)
    try:
        hash(leaf)
    except TypeError:
        raise CaptureError(
            f"an input of type {type(leaf).__name__} is neither a tensor nor hashable: "
            "register it as a pytree node, or pass its tensors"
        ) from None
    return (type(leaf), leaf)


def foreign_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The type of an input that is no tensor, constant or container of these, or "".

    Forward may change such an object in every call (a cache of keys and values), which a program
    cannot do.
    """
    for leaf in pytree.tree_leaves((args, kwargs)):
        if not isinstance(leaf, (Tensor, *_CONSTANTS)):
            return type(leaf).__name__
    return ""


def difference(old: Signature, new: Signature, args: tuple[Any, ...], kwargs: Any) -> str:
    """For people: the first thing by which `new`, the signature of these inputs, differs."""
    if old.structure != new.structure or len(old.leaves) != len(new.leaves):
        return "other arguments, or containers of them"
    paths = [path for path, _ in pytree.tree_flatten_with_path((args, kwargs))[0]]
    for path, a, b in zip(paths, old.leaves, new.leaves, strict=True):
        if a != b:
            return f"{_name(path)} {_change(a, b)}"
    if old.modes != new.modes:
        changed = sum(a != b for a, b in itertools.zip_longest(old.modes, new.modes))
        return f"train() or eval() of {changed} modules"
    if old.autocast != new.autocast:
        return f"autocast {old.autocast or 'off'} → {new.autocast or 'off'}"
    return "requires_grad of parameters"


def _name(path: tuple[Any, ...]) -> str:
    """``input_ids`` for a keyword, ``argument 0`` for a positional one, and what lies inside."""
    group, first, *rest = path
    name = f"argument {first.idx}" if group.idx == 0 else str(first.key)
    return name + pytree.keystr(tuple(rest))


def _change(a: tuple[Any, ...], b: tuple[Any, ...]) -> str:
    if len(a) == len(b) == 2:
        return f"{a[1]!r} → {b[1]!r}"
    if len(a) != len(b):
        return "is a tensor now and then"
    kinds = ("shape", "strides", "dtype", "device", "requires_grad")
    what, x, y = next(row for row in zip(kinds, a, b, strict=True) if row[1] != row[2])
    return f"of {what} {x} → {y}"
