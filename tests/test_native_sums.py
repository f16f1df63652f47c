"""Sums of gradients, and of their squares, by the compiled CPU optimizer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from lohan_fx.runtime import sums
from lohan_fx.runtime.native import adam
from lohan_fx.runtime.native.adam import AdamKernel, Addend
from tests.test_native_adam import SIZES, kernels, library, needs_compiler, same

__all__ = ["kernels", "library"]  # fixtures


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("begins", [False, True])
def test_sums_are_torchs(
    kernels: Mapping[int, AdamKernel], begins: bool, dtype: torch.dtype
) -> None:
    """All in one call; a total that begins is not read. Their squares are summed in float64,
    whatever the threads."""
    starts = [torch.full((n,), math.nan) if begins else torch.randn(n) for n in SIZES]
    gradients = [torch.randn(n).to(dtype) for n in SIZES]
    wanted = [
        g.float() if begins else s + g.float() for s, g in zip(starts, gradients, strict=True)
    ]
    found = set()
    for kernel in kernels.values():
        for squared in (False, True):
            totals = [start.clone() for start in starts]
            addends = [Addend(t, g, begins) for t, g in zip(totals, gradients, strict=True)]
            squares = kernel.add(addends, squared=squared)
            assert all(same(t, w) for t, w in zip(totals, wanted, strict=True))
            if squared:
                found.add(tuple(squares))
            else:
                assert squares == []
    (squares,) = found
    assert squares == pytest.approx([w.double().square().sum().item() for w in wanted], rel=1e-13)


@needs_compiler
def test_parts_that_begin_beside_those_that_do_not(kernels: Mapping[int, AdamKernel]) -> None:
    old, new, gradient = torch.ones(40_000), torch.ones(40_000), torch.full((40_000,), 2.0)
    assert kernels[2].add([]) == []
    kernels[2].add([Addend(old, gradient, False), Addend(new, gradient.bfloat16(), True)])
    assert (old == 3).all()
    assert (new == 2).all()


@needs_compiler
def test_sums_that_the_kernel_leaves_to_torch(kernels: Mapping[int, AdamKernel]) -> None:
    takes = kernels[1].takes
    four = torch.ones(4)
    assert takes(four, four)
    assert takes(four, four.bfloat16())
    assert not takes(four.double(), four)
    assert not takes(four.bfloat16(), four.bfloat16())
    assert not takes(four, four.double())
    assert not takes(four, torch.ones(5))
    assert not takes(torch.ones(4, 3), torch.ones(3, 4).t())
    assert not takes(four, torch.ones(4, device="meta"))


@needs_compiler
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e30])
def test_squares_of_large_and_no_numbers(kernels: Mapping[int, AdamKernel], value: float) -> None:
    addend = Addend(torch.full((5000,), value), torch.zeros(5000), False)
    (found,) = kernels[2].add([addend], squared=True)
    assert found == pytest.approx(5000 * value * value, rel=1e-6, nan_ok=True)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("total", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_sums_of_any_dtypes(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, total: torch.dtype, native: bool
) -> None:
    """By the kernel or by torch: the numbers of `add_` and `copy_`."""
    if not native:
        monkeypatch.setattr(adam, "kernel", lambda: None)
    totals = [torch.randn(70_000).to(total), torch.randn(9, 5).to(total).t()]
    gradients = [torch.randn(t.shape).to(dtype) for t in totals]
    for begins in (True, False):
        wanted = [
            t.clone().copy_(g) if begins else t + g.to(t.dtype)
            for t, g in zip(totals, gradients, strict=True)
        ]
        addends = [Addend(t, g, begins) for t, g in zip(totals, gradients, strict=True)]
        squares = sums.add(addends, squared=True)
        tolerance = {"rtol": 0.0, "atol": 0.0}
        if torch.promote_types(total, dtype) != total:  # then torch adds wider, and rounds once
            tolerance = {"rtol": 1e-2, "atol": 1e-2}
        for t, w, found in zip(totals, wanted, squares, strict=True):
            torch.testing.assert_close(t, w, **tolerance)
            if found is not None:
                assert found == pytest.approx(t.double().square().sum().item(), rel=1e-13)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_update_adds_to_a_sum_in_passing(
    kernels: Mapping[int, AdamKernel], dtype: torch.dtype
) -> None:
    """The bits of an addition before the update; the sum stays as it is."""
    for size in SIZES:
        case = [torch.randn(size), torch.rand(size), torch.rand(size)]
        gradient, before = torch.randn(size).to(dtype), torch.randn(size)
        results = []
        for total, given in ((before, gradient), (None, before + gradient.float())):
            states = [t.clone() for t in case]
            kept = None if total is None else total.clone()
            kernels[2].run([summed_update(states, given, kept)])
            assert kept is None or same(kept, before)
            results.append(states)
        assert all(map(same, *results))


def summed_update(states: list[Tensor], gradient: Tensor, total: Tensor | None) -> adam.Update:
    master, exp_avg, exp_avg_sq = states
    return adam.Update(
        master=master,
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
        max_exp_avg_sq=None,
        gradient=gradient,
        copy=None,
        lr=1e-2,
        beta1=0.9,
        beta2=0.99,
        eps=1e-8,
        weight_decay=0.1,
        step=3.0,
        decoupled=True,
        maximize=False,
        factor=0.5,
        sum=total,
    )


@needs_compiler
@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("moved", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_squares_are_the_same_whoever_takes_them(
    kernels: Mapping[int, AdamKernel], dtype: torch.dtype, moved: bool, summed: bool
) -> None:
    """An addition, an update in passing, or a pass that writes nothing: to the bit."""
    for size in (*SIZES, 70_007):
        case = [torch.randn(size), torch.rand(size), torch.rand(size)]
        gradient, before = torch.randn(size).to(dtype), torch.randn(size)
        total = before.clone()
        addend = Addend(total, gradient, not summed)
        foreseen = kernels[1].squares([addend, addend])
        assert same(total, before)
        update = summed_update(case, gradient, before if summed else None)
        if moved:
            new = [torch.empty(size) for _ in case]
            target = adam.Target(
                master=new[0], exp_avg=new[1], exp_avg_sq=new[2], max_exp_avg_sq=None
            )
            update = dataclasses.replace(update, target=target)
        passing = kernels[5].run([update], squared=True)
        added = kernels[2].add([addend], squared=True)
        assert foreseen == [*added, *added] == [*passing, *passing]
