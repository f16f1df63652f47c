"""A *shadow* of the user's optimizer: its class and options, without its parameters and hooks."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adagrad, Optimizer

from lohan_fx._compat import TRACING
from lohan_fx.runtime.supported_optimizers import check_flags, refusal


class Shadow:
    """An instance of the user's optimizer class that owns neither parameters nor hooks.

    The plain function under the class's `step` is called: no hooks, no profiler, no scheduler
    wrapper of the user's instance.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._step: Callable[[Optimizer], object] = inspect.unwrap(type(optimizer).step)
        self._instance = type(optimizer).__new__(type(optimizer))

    def run(
        self, groups: list[dict[str, Any]], entries: Sequence[tuple[Tensor, dict[str, Tensor]]]
    ) -> None:
        """Step once on `groups`; `entries` maps their tensors to their states, filled in place."""
        if isinstance(self.optimizer, Adagrad):
            self._begin(groups, dict(entries))
        attributes = vars(self._instance)
        attributes.update(vars(self.optimizer))
        attributes.update(grad_scale=None, found_inf=None)  # GradScaler's, for plain steps
        self._instance.state = defaultdict(dict, entries)
        self._instance.param_groups = groups
        try:
            with TRACING, torch.no_grad():
                self._step(self._instance)
        finally:
            attributes.clear()

    def _begin(
        self, groups: Sequence[Mapping[str, Any]], entries: Mapping[Tensor, dict[str, Tensor]]
    ) -> None:
        """Make the first state of Adagrad, which older torch makes at construction only."""
        value = self.optimizer.defaults["initial_accumulator_value"]
        for group in groups:
            for tensor in group["params"]:
                if not entries[tensor]:
                    fused = group.get("fused")
                    made = Adagrad([tensor], initial_accumulator_value=value, fused=fused)
                    entries[tensor].update(made.state[tensor])


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What the optimizer keeps for a parameter under one group's hyperparameters.

    `tensors` are names of state of parameter shape; `scalars` maps names to where they live.
    """

    tensors: tuple[str, ...]
    scalars: Mapping[str, tuple[torch.device, torch.dtype]]


def state_spec(shadow: Shadow, values: Mapping[str, Any], device: torch.device) -> StateSpec:
    """Find out by one step on two elements. Raises UnsupportedOptimizerError."""
    check_flags(shadow.optimizer, values)
    parameter = torch.ones(2, device=device)
    parameter.grad = torch.ones_like(parameter)
    entry: dict[str, Tensor] = {}
    shadow.run([{**values, "params": [parameter]}], [(parameter, entry)])
    entry = {name: value for name, value in entry.items() if value is not None}
    odd = [n for n, v in entry.items() if v.shape not in (parameter.shape, torch.Size())]
    if odd:
        raise refusal(shadow.optimizer, f"its state {', '.join(odd)} is no elementwise state")
    return StateSpec(
        tensors=tuple(n for n, v in entry.items() if v.shape == parameter.shape),
        scalars={n: (v.device, v.dtype) for n, v in entry.items() if not v.dim()},
    )


def structure_of(values: Mapping[str, Any]) -> tuple[tuple[str, bool], ...]:
    """Return what the names of the state can depend on: which hyperparameters are on."""
    return tuple((k, isinstance(v, Tensor) or bool(v)) for k, v in values.items() if k != "lr")
