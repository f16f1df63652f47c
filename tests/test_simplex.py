"""The linear programs behind `pareto`: optimal by their own certificate, or infeasible by HiGHS."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lohan_fx.planners.simplex import ChoiceProgram, Solution, lagrangian_bound, solve


def random_program(seed: int, *, tight: float) -> ChoiceProgram:
    """Groups of 1 to 4 options, rows that bound sums, rows that push one of two z up."""
    rng = np.random.default_rng(seed)
    groups, rows = int(rng.integers(1, 25)), int(rng.integers(1, 20))
    group = np.repeat(np.arange(groups), rng.integers(1, 5, groups)).astype(np.int64)
    matrix = rng.random((rows, len(group))) * (rng.random((rows, len(group))) < 0.6)
    counts = rng.integers(1, 10, groups).astype(float)
    extra = np.zeros((rows, 2))
    lanes = rng.integers(0, 3, rows)
    for r, lane in enumerate(lanes):
        if lane < 2:
            extra[r, lane] = -1.0
    bounds = np.where(lanes < 2, -rng.random(rows), rng.random(rows) * counts.sum() * tight)
    return ChoiceProgram(
        costs=rng.random(len(group)) * (rng.random(len(group)) < 0.5),
        matrix=matrix,
        group=group,
        counts=counts,
        extra=extra,
        extra_costs=np.ones(2),
        limits=bounds,
    )


def check_optimal(p: ChoiceProgram, found: Solution) -> None:
    """Feasible, and as good as a bound that holds by weak duality: nothing can be better."""
    assert found.status == "optimal"
    assert np.allclose(np.bincount(p.group, weights=found.x), p.counts)
    assert (found.x >= 0).all()
    assert (found.z >= 0).all()
    over = p.matrix @ found.x + p.extra @ found.z - p.limits
    assert over.max() <= 1e-7 * (1 + np.abs(p.limits).max())
    value = p.costs @ found.x + p.extra_costs @ found.z
    assert found.value == pytest.approx(value)
    assert found.bound == pytest.approx(value, rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("seed", range(20))
def test_totals_in_other_units_than_their_rows(seed: int) -> None:
    """A z in bytes is 1 in a row of tens of gigabytes: that is not 0."""
    p = random_program(seed, tight=5.0)
    size = np.where(p.extra.any(axis=1), 1e11, 1.0)
    large = replace(
        p,
        matrix=p.matrix * size[:, None],
        limits=p.limits * size,
        extra_costs=p.extra_costs / 1e11,
    )
    found, wanted = solve(large), solve(p)
    assert found.status == wanted.status
    if found.status == "optimal":
        check_optimal(large, found)
        assert found.value == pytest.approx(wanted.value)


@settings(max_examples=75, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), tight=st.sampled_from((0.3, 0.45, 0.8)))
def test_optimal_or_infeasible(seed: int, tight: float) -> None:
    p = random_program(seed, tight=tight)
    found = solve(p)
    if found.status == "infeasible":
        assert found.bound == np.inf
        assert by_highs(p) is None
    else:
        check_optimal(p, found)


def by_highs(p: ChoiceProgram) -> float | None:
    """The optimum by a solver; None if infeasible."""
    highspy = pytest.importorskip("highspy")
    highs: Any = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    inf = highspy.kHighsInf
    for cost in (*p.costs, *p.extra_costs):
        highs.addCol(float(cost), 0.0, inf, 0, np.zeros(0, dtype=np.int32), np.zeros(0))
    columns = np.arange(len(p.costs) + len(p.extra_costs), dtype=np.int32)
    for row, extra, limit in zip(p.matrix, p.extra, p.limits, strict=True):
        highs.addRow(-inf, float(limit), len(columns), columns, np.concatenate([row, extra]))
    for g, count in enumerate(p.counts):
        members = np.flatnonzero(p.group == g).astype(np.int32)
        highs.addRow(float(count), float(count), len(members), members, np.ones(len(members)))
    highs.run()
    optimal = highs.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return float(highs.getObjectiveValue()) if optimal else None


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), prices=st.integers(0, 2**32 - 1))
def test_any_prices_give_a_lower_bound(seed: int, prices: int) -> None:
    p = random_program(seed, tight=0.8)
    found = solve(p)
    y = -np.random.default_rng(prices).random(len(p.limits))
    if found.status == "optimal":
        assert lagrangian_bound(p, y) <= found.value + 1e-9


def test_a_start_does_not_change_the_optimum() -> None:
    p = random_program(3, tight=0.8)
    first = np.flatnonzero(np.diff(p.group, prepend=-1)).astype(np.int64)
    last = np.flatnonzero(np.diff(p.group, append=-1)).astype(np.int64)
    values = {round(solve(p, start).value, 9) for start in (first, last)}
    assert len(values) == 1


def test_more_rows_are_obeyed() -> None:
    p = random_program(5, tight=0.8)
    free = solve(p)
    at = int(np.argmax(free.x))
    row = np.zeros((1, len(p.costs)))
    row[0, at] = 1.0
    held = solve(p.with_rows(row, np.array([free.x[at] / 2])))
    assert held.status == "infeasible" or held.x[at] <= free.x[at] / 2 + 1e-7
    assert held.value >= free.value - 1e-9


def test_steps_may_run_out_but_the_bound_holds() -> None:
    p = random_program(11, tight=0.8)
    whole = solve(p)
    for steps in range(whole.steps):
        part = solve(p, max_steps=steps)
        assert part.status == "limit"
        assert part.bound <= whole.value + 1e-9
