"""Values of a checkpoint as JSON, with their tensors beside it; nothing is pickled.

What JSON has no form for is an object with one entry, whose name begins with a dollar:
``{"$tensor": key}``, ``{"$scalar": [dtype, number]}``, ``{"$tuple": […]}``, and pairs of keys and
values in ``{"$items": […]}`` and ``{"$counter": […]}``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lohan_fx.atomic import DTYPE_NAMES
from lohan_fx.errors import CheckpointError, LohanError
from lohan_fx.weights import DTYPES


def encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON; its tensors are put into `tensors`, under keys that start with `path`."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.dtype not in DTYPE_NAMES:
            raise LohanError(
                f"{path} is a tensor of {value.dtype}, {value.layout}: safetensors files hold "
                f"{', '.join(str(d).removeprefix('torch.') for d in DTYPE_NAMES)}"
            )
        if not value.dim() and not value.is_complex():
            return {"$scalar": [DTYPE_NAMES[value.dtype], value.item()]}
        key = path
        while key in tensors:
            key += "_"
        tensors[key] = value.detach()
        return {"$tensor": key}
    if isinstance(value, Mapping):
        kind = "$counter" if isinstance(value, Counter) else "$items"
        if kind == "$items" and all(isinstance(k, str) and k[:1] != "$" for k in value):
            return {k: encode(v, f"{path}.{k}", tensors) for k, v in value.items()}
        pairs = [
            [encode(k, f"{path} key", tensors), encode(v, f"{path}.{k}", tensors)]
            for k, v in value.items()
        ]
        return {kind: pairs}
    if type(value) in (list, tuple):
        found = [encode(v, f"{path}.{i}", tensors) for i, v in enumerate(value)]
        return found if isinstance(value, list) else {"$tuple": found}
    raise LohanError(
        f"{path} is a {type(value).__qualname__}, which a checkpoint cannot hold (nothing is "
        "pickled): give dicts, lists, tuples, tensors, numbers, strings, booleans and None, such "
        "as the state_dict() of the object"
    )


def decode(value: Any, tensors: Mapping[str, Any], at: str) -> Any:
    """The inverse of `encode`.

    Args:
        value: from JSON.
        tensors: by key.
        at: the value's place, for messages.

    Raises:
        CheckpointError: it is nothing that `encode` makes, or names a tensor that is not there.
    """
    if isinstance(value, list):
        return [decode(v, tensors, f"{at}[{i}]") for i, v in enumerate(value)]
    if not isinstance(value, dict):
        return value
    kind, inner = next(iter(value.items())) if len(value) == 1 else ("", ())
    if kind == "$tensor":
        if not isinstance(inner, str) or inner not in tensors:
            raise CheckpointError(f"{at} lacks its tensor {inner!r}: load another checkpoint")
        return tensors[inner]
    if kind == "$scalar":
        return _scalar(inner, at)
    if kind == "$tuple" and isinstance(inner, list):
        return tuple(decode(inner, tensors, at))
    if kind in ("$items", "$counter"):
        try:
            made = {decode(k, tensors, f"a key of {at}"): decode(v, tensors, at) for k, v in inner}
        except (TypeError, ValueError) as error:
            raise _damaged(at, error) from error
        return Counter(made) if kind == "$counter" else made
    return {k: decode(v, tensors, f"{at}.{k}") for k, v in value.items()}


def _scalar(inner: Any, at: str) -> Tensor:
    try:
        name, number = inner
        if not isinstance(number, bool | int | float):
            raise TypeError(f"{number!r} is no number")
        return torch.tensor(number, dtype=DTYPES[name])
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise _damaged(at, error) from error


def _damaged(at: str, error: Exception) -> CheckpointError:
    return CheckpointError(f"{at} is damaged ({error!r}): load another checkpoint")


def tensors_in(value: Any) -> list[str]:
    """Keys of the tensors in an encoded value."""
    if isinstance(value, dict):
        if len(value) == 1 and "$tensor" in value:
            return [value["$tensor"]]
        return [key for v in value.values() for key in tensors_in(v)]
    return [key for v in value for key in tensors_in(v)] if isinstance(value, list) else []
