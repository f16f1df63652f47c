"""Updates in chunks, in mixed precision, and with sums of gradients: plain torch.optim's bits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from lohan_fx.runtime.optimizer import UnitOptimizer
from lohan_fx.runtime.update_values import Clip
from tests.optimizers import (
    DEVICES,
    equal,
    new_grads,
    new_params,
)

LARGE = (70_001, 1500, 1024, 3)

CHUNKED = [
    (optim.AdamW, {"amsgrad": True}),
    (optim.AdamW, {"fused": True}),
    (optim.SGD, {"momentum": 0.9, "fused": True}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True, "foreach": True}),
    (optim.ASGD, {"foreach": True}),
]


@pytest.mark.parametrize("chunk", [1, 5000, None])
@pytest.mark.parametrize(("cls", "options"), CHUNKED, ids=lambda v: getattr(v, "__name__", str(v)))
def test_chunks_change_nothing(cls: Any, options: dict[str, Any], chunk: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(n, generator=generator)) for n in LARGE]
    masters = [p.detach().clone() for p in params]
    optimizer = cls(params, lr=0.1, **options)
    unit = UnitOptimizer(optimizer, params, chunk_elements=chunk)
    state = [{n: torch.full_like(m, torch.nan) for n in unit.state_names()} for m in masters]
    for _ in range(3):
        grads = [torch.randn(n, generator=generator) for n in LARGE]
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
        unit.step(masters, grads, state)
    for p, m, views in zip(params, masters, state, strict=True):
        assert equal(p.detach(), m)
        assert all(equal(optimizer.state[p][n], v) for n, v in views.items())
    assert unit.scalar_state()[0] == {
        n: float(optimizer.state[params[0]][n]) for n in unit.scalar_names()
    }


@pytest.mark.parametrize("scratch_elements", [None, 2000, 100_000])
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
def test_mixed_precision(scratch_elements: int | None, grad_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(n, generator=generator).bfloat16() for n in LARGE]
    params = [nn.Parameter(s.clone()) for s in start]  # what the user sees: the compute copies
    unit = UnitOptimizer(optim.AdamW(params, lr=0.01), params, chunk_elements=4096)
    masters = [s.float() for s in start]
    state = [{n: torch.empty_like(m) for n in unit.state_names()} for m in masters]
    compute = [torch.zeros_like(s) for s in start]
    scratch = None if scratch_elements is None else torch.empty(scratch_elements)
    reference = [nn.Parameter(s.float()) for s in start]
    optimizer = optim.AdamW(reference, lr=0.01)
    for step in range(4):
        grads: list[Tensor | None] = [
            torch.randn(n, generator=generator).to(grad_dtype) for n in LARGE
        ]
        if step == 0:
            grads[1] = None
        kept = copy.deepcopy(grads)
        unit.step_mixed(masters, grads, state, compute, scratch=scratch)
        for p, g in zip(reference, kept, strict=True):
            p.grad = None if g is None else g.float()
        optimizer.step()
        for p, m, c in zip(reference, masters, compute, strict=True):
            assert equal(p.detach(), m)
            assert equal(p.detach().bfloat16(), c)
        assert all(
            a is b is None or (a is not None and b is not None and equal(a, b))
            for a, b in zip(grads, kept, strict=True)
        )
    assert not torch.equal(compute[0], start[0])


@pytest.mark.parametrize("clip", [None, Clip(factor=torch.tensor(0.25), limit=0.1)])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("cls", "options"),
    [(optim.AdamW, {"fused": True}), (optim.AdamW, {"foreach": False}), (optim.SGD, {})],
)
def test_gradients_that_are_added_to_sums(
    cls: Any, options: dict[str, Any], device: str, clip: Clip | None
) -> None:
    """As if they had been added before: in the update's own pass (fused, on a CPU), or apart. A
    parameter may have a gradient, a sum, both, or neither."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(n, generator=generator).to(device)) for n in (*LARGE, 7)]
    grads = [torch.randn(p.shape, generator=generator).to(device).bfloat16() for p in params]
    before = [torch.randn(p.shape, generator=generator).to(device) for p in params]
    has = [(True, True), (False, True), (True, False), (False, False)]
    has += [(True, True)] * (len(params) - len(has))
    found = []
    for adds in (False, True):
        unit = UnitOptimizer(cls(params, lr=0.01, **options), params)
        masters = [p.detach().clone() for p in params]
        state = [{n: torch.zeros_like(m) for n in unit.state_names()} for m in masters]
        compute = [torch.zeros_like(m, dtype=torch.bfloat16) for m in masters]
        late = [g.clone() if one else None for g, (one, _) in zip(grads, has, strict=True)]
        sums = [t.clone() if two else None for t, (_, two) in zip(before, has, strict=True)]
        if adds:
            unit.step_mixed(masters, late, state, compute, sums=sums, clip=clip)
        else:
            whole = [
                s if g is None else g.float() if s is None else s + g.float()
                for g, s in zip(late, sums, strict=True)
            ]
            unit.step_mixed(masters, whole, state, compute, clip=clip)
        found.append([*masters, *compute, *(v for views in state for v in views.values())])
    assert all(map(equal, *found))
    assert not torch.equal(found[0][0], params[0].detach())


def test_sums_of_another_number_of_parameters() -> None:
    params = new_params()
    unit = UnitOptimizer(optim.SGD(params, lr=0.1), params)
    masters = [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match="6 gradients, 2 sums"):
        unit.step(masters, new_grads(1), [{} for _ in params], sums=[None, None])
