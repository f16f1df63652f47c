"""Unit optimizers beside plain torch.optim, step by step, and what both are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lohan_fx.runtime.initial_state import pull_initial_state, release_state
from lohan_fx.runtime.optimizer import UnitOptimizer
from lohan_fx.runtime.param_groups import Hyperparameters

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

SHAPES = ((37,), (5, 7), (), (2, 3, 4, 4), (33,), (3, 1))
"""Odd sizes: every kernel has elements left over after its last full vector."""
UNITS = ((0, 1, 2), (3, 4, 5))
SECOND_GROUP = (1, 4, 5)
NUM_STEPS = 5
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def equal(a: Tensor, b: Tensor) -> bool:
    """Equal in shape, dtype, device and bits (NaN equals NaN)."""
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    return bool(((a == b) | (a.isnan() & b.isnan())).all()) and torch.equal(
        a.signbit(), b.signbit()
    )


def new_params(device: str = "cpu") -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(s, generator=generator).to(device)) for s in SHAPES]


def new_grads(step: int, *, skip_first: bool = True, device: str = "cpu") -> list[Tensor | None]:
    """Gradients of one step; parameter 3 gets none at first, parameter 1 none in between."""
    generator = torch.Generator().manual_seed(100 + step)
    grads: list[Tensor | None] = [torch.randn(s, generator=generator).to(device) for s in SHAPES]
    if step == 2:
        grads[1] = None
    if step == 0 and skip_first:
        grads[3] = None
    return grads


def maker(cls: type[torch.optim.Optimizer], second: dict[str, Any], **options: Any) -> Make:
    """Two groups: the parameters of `SECOND_GROUP` get the options `second` as well."""

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        chosen = [params[i] for i in SECOND_GROUP]
        others = [p for i, p in enumerate(params) if i not in SECOND_GROUP]
        groups: list[dict[str, Any]] = [{"params": others}, {"params": chosen, **second}]
        return cls(groups, **options)

    return make


class Host:
    """What the engine does: masters and state in storage, copied to new addresses each step."""

    def __init__(
        self, make: Make, device: str = "cpu", *, tier: str | None = None, **options: Any
    ) -> None:
        self.params = new_params(device)
        self.optimizer = make(self.params)
        self.units = [
            UnitOptimizer(self.optimizer, [self.params[i] for i in unit], **options)
            for unit in UNITS
        ]
        self.masters = [p.detach().to(tier or device, copy=True) for p in self.params]
        self.state: list[dict[str, Tensor]] = [{} for _ in self.params]
        for unit, indices in zip(self.units, UNITS, strict=True):
            for k, i in enumerate(indices):
                # Nothing may read state before the first update.
                self.state[i] = {
                    n: torch.full_like(self.masters[i], torch.nan) for n in unit.state_names(k)
                }
        self.addresses = 0

    def adopt_state(self) -> None:
        """Move the state of the user's optimizer into storage."""
        for unit, indices in zip(self.units, UNITS, strict=True):
            params = [self.params[i] for i in indices]
            initial = pull_initial_state(self.optimizer, params)
            for i, tensors in zip(indices, initial.tensors, strict=True):
                for name, value in tensors.items():
                    self.state[i][name].copy_(value)
            unit.load_scalar_state(initial.scalars)
            release_state(self.optimizer, params)

    def stage(self, source: Tensor) -> Tensor:
        """Copy to a view of a new flat buffer, at another alignment each time.

        On accelerators aligned to 16 bytes: elsewhere torch's fused SGD with maximize rounds
        differently.
        """
        self.addresses += 1
        offset = self.addresses % 7 * (1 if source.is_cpu else 4)
        flat = torch.empty(source.numel() + offset, dtype=source.dtype, device=source.device)
        view = flat[offset:].view(source.shape)
        view.copy_(source)
        return view

    def step(
        self, grads: list[Tensor | None], hyperparameters: Hyperparameters | None = None
    ) -> None:
        for unit, indices in zip(self.units, UNITS, strict=True):
            masters = [self.stage(self.masters[i]) for i in indices]
            state = [{n: self.stage(v) for n, v in self.state[i].items()} for i in indices]
            given = [grads[i] for i in indices]
            staged = [None if g is None else self.stage(g) for g in given]
            unit.step(masters, staged, state, hyperparameters=hyperparameters)
            for i, master, views in zip(indices, masters, state, strict=True):
                assert master.grad is None
                self.masters[i].copy_(master)
                for name, view in views.items():
                    self.state[i][name].copy_(view)

    @property
    def scalars(self) -> list[dict[str, float] | None]:
        return [s for unit in self.units for s in unit.scalar_state()]


def runs(make: Make, device: str) -> bool:
    """Whether this torch has such a kernel on this device (fused Adagrad came late to CUDA)."""
    try:
        Plain(make, device).step(new_grads(1, device=device))
    except RuntimeError:
        return False
    return True


class Plain:
    """The user's loop without lohan_fx."""

    def __init__(self, make: Make, device: str = "cpu") -> None:
        self.params = new_params(device)
        self.optimizer = make(self.params)

    def step(self, grads: list[Tensor | None]) -> None:
        for p, g in zip(self.params, grads, strict=True):
            p.grad = None if g is None else g.clone()
        self.optimizer.step()


def assert_same(host: Host, plain: Plain) -> None:
    for i, p in enumerate(plain.params):
        assert equal(host.masters[i], p.detach()), f"master {i}"
        entry = {k: v for k, v in plain.optimizer.state.get(p, {}).items() if v is not None}
        scalars = host.scalars[i]
        if not entry:
            assert scalars is None
            continue
        assert scalars is not None
        assert {*entry} == {*host.state[i], *scalars}
        for name, value in entry.items():
            if name in scalars:
                assert scalars[name] == float(value), f"scalar {name} of {i}"
            else:
                assert equal(host.state[i][name], value), f"state {name} of {i}"
