"""What an update takes on its device: a rehearsal of few chunks says what one of all does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import ASGD, Adam, Optimizer

from lohan_fx.annotate import Slice, UnitLayout
from lohan_fx.runtime import chunked_update, native_update, scratch
from lohan_fx.runtime.scratch import update_scratch_bytes
from lohan_fx.runtime.shadow import Shadow
from lohan_fx.runtime.supported_optimizers import SUPPORTED
from lohan_fx.runtime.update_values import Updated

Rehearsal = Callable[..., int]

CPU = torch.device("cpu")
LIMIT = 2048


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (chunked_update, scratch):
        monkeypatch.setattr(module, "default_limit", lambda device: LIMIT)


def layout_of(
    numels: Sequence[int], *, copies: torch.dtype = torch.float32, turned: int = 0
) -> UnitLayout:
    """Vectors; so many of the first ones are matrices that do not lie row by row."""
    slices = []
    offset = 0
    for i, numel in enumerate(numels):
        shape, stride = ((numel // 2, 2), (1, numel // 2)) if i < turned else ((numel,), (1,))
        slices.append(Slice(name=str(i), offset=offset, numel=numel, shape=shape, stride=stride))
        offset += numel
    return UnitLayout(
        name="unit",
        block="",
        slices=tuple(slices),
        numel=offset,
        dtype=torch.float32,
        copy_dtype=copies,
        shown_dtype=torch.float32,
        trains=True,
    )


def found(make: Callable[..., Optimizer], layout: UnitLayout, *, mixed: bool = False) -> int:
    parameters = [nn.Parameter(torch.empty(2)) for _ in layout.slices]
    optimizer = make(parameters)
    return update_scratch_bytes(optimizer, parameters, layout, mixed=mixed, device=CPU, clips=mixed)


@pytest.fixture
def in_full(monkeypatch: pytest.MonkeyPatch) -> Rehearsal:
    """The figure of a rehearsal of every chunk."""

    def rehearsed(*arguments: Any, **options: Any) -> int:
        with monkeypatch.context() as patch:
            patch.setattr(scratch, "_shortened", lambda slice_, limit: slice_)
            return found(*arguments, **options)

    return rehearsed


NUMELS = (100, 5 * LIMIT + 5, 300, 4 * LIMIT, LIMIT - 1, 1, 3 * LIMIT + 1, 7)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("foreach", "mixed"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("kind", SUPPORTED, ids=lambda kind: kind.__name__)
def test_few_chunks_say_what_all_do(
    in_full: Rehearsal, kind: Callable[..., Optimizer], foreach: bool, mixed: bool
) -> None:
    make = functools.partial(kind, foreach=foreach, lr=0.1)
    layout = layout_of(NUMELS, copies=torch.bfloat16 if mixed else torch.float32)
    assert found(make, layout, mixed=mixed) == in_full(make, layout, mixed=mixed)


@pytest.mark.usefixtures("small_chunks")
def test_what_is_left_out_is_never_missing(in_full: Rehearsal) -> None:
    """A peak before it is that of a parameter that is taken whole, or of another group."""

    def two_groups(parameters: Sequence[nn.Parameter]) -> Optimizer:
        amsgrad = {"params": parameters[:1], "amsgrad": True}
        return Adam([amsgrad, {"params": parameters[1:]}], foreach=False)

    for make, layout in (
        (Adam, layout_of((3 * LIMIT, 9 * LIMIT), turned=1)),
        (two_groups, layout_of((3 * LIMIT, 9 * LIMIT))),
    ):
        left_out = 4 * sum(s.numel // LIMIT - 2 for s in layout.slices)
        assert 0 <= found(make, layout) - in_full(make, layout) <= left_out


@pytest.mark.usefixtures("small_chunks")
def test_what_a_kernel_does_at_once_has_no_chunks(
    in_full: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps no scalars of chunks, so there are none to add."""
    monkeypatch.setattr(native_update, "update", lambda *args, **kwargs: Updated({}, {}))
    assert found(Adam, layout_of(NUMELS)) == in_full(Adam, layout_of(NUMELS)) < 100


@pytest.mark.parametrize("kind", [Adam, ASGD])  # the second one cannot be rehearsed on fakes
def test_a_large_parameter_costs_what_a_small_one_does(
    monkeypatch: pytest.MonkeyPatch, kind: Callable[..., Optimizer]
) -> None:
    """One of 2**30 elements has a thousand chunks, and some GiB of states."""
    runs: list[object] = []
    run = Shadow.run

    def counted(*arguments: Any) -> None:
        runs.append(arguments)
        assert len(runs) < 50
        run(*arguments)

    monkeypatch.setattr(Shadow, "run", counted)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    chunk = 2**20
    few, many = (found(kind, layout_of((numel,))) for numel in (4 * chunk, 2**30))
    assert many > few > 4 * chunk
