"""Hyperparameters of the user's parameter groups: taken at one time, used at another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Hyperparameters = tuple[dict[str, Any], ...]
"""Per parameter group of the user's optimizer: its entries without the parameters."""

NOT_HYPERPARAMETERS = frozenset({"params", "param_names"})


def snapshot_hyperparameters(optimizer: Optimizer) -> Hyperparameters:
    """Copy the hyperparameters of all groups, to be given to later `UnitOptimizer.step` calls.

    A scheduler that runs after the copy, also one that writes into a tensor learning rate, does
    not change it.
    """
    return tuple(
        {k: _cloned(v) for k, v in group.items() if k not in NOT_HYPERPARAMETERS}
        for group in optimizer.param_groups
    )


def same_hyperparameters(taken: Hyperparameters, optimizer: Optimizer) -> bool:
    """Whether the optimizer has still what `snapshot_hyperparameters` took."""
    now = [
        {k: v for k, v in group.items() if k not in NOT_HYPERPARAMETERS}
        for group in optimizer.param_groups
    ]
    return len(taken) == len(now) and all(
        a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
        for a, b in zip(taken, now, strict=True)
    )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return bool(torch.equal(torch.as_tensor(a).cpu(), torch.as_tensor(b).cpu()))
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return all(map(_same, a, b))
    return bool(a == b)


def _cloned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return tuple(map(_cloned, value)) if isinstance(value, tuple) else value


def _reachable(value: Any, device: torch.device) -> Any:
    """Return a hyperparameter as kernels on `device` can read it: a CPU scalar always can."""
    if isinstance(value, Tensor):
        return value if value.device.type == "cpu" else value.to(device)
    return tuple(_reachable(v, device) for v in value) if isinstance(value, tuple) else value


def group_values(group: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The hyperparameters of a group, as kernels on `device` can read them."""
    return {k: _reachable(v, device) for k, v in group.items() if k not in NOT_HYPERPARAMETERS}


def places_of(optimizer: Optimizer, params: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return (group, position in the group) of every parameter. Raises ValueError."""
    found = {
        p: (g, k)
        for g, group in enumerate(optimizer.param_groups)
        for k, p in enumerate(group["params"])
    }
    for i, p in enumerate(params):
        if p not in found:
            raise ValueError(
                f"parameter {i} of the unit, shape {tuple(p.shape)}, is in no parameter group of "
                f"the {type(optimizer).__name__}"
            )
    return [found[p] for p in params]
