"""pareto where memory is short: what it names is the smallest need, of the right tier, and true."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lohan_fx.errors import InsufficientMemoryError, format_bytes, format_need
from lohan_fx.hardware import MemoryBudget
from lohan_fx.plan import Plan
from lohan_fx.planners import PlannerOptions, make_plan, schedule
from lohan_fx.planners.effort import Effort
from lohan_fx.planners.model import Model
from lohan_fx.planners.pareto import Pareto
from lohan_fx.planners.trial import least_memory
from lohan_fx.program import Program, lower
from lohan_fx.workload import Workload
from tests.test_pareto import machine, some_workload
from tests.test_planners import check
from tests.workloads import budget, gpt_workload, mlp_workload, small_hardware


@settings(max_examples=2, deadline=None)
@example(seed=1746)  # there a plan is found that none can undercut
@given(seed=st.integers(0, 10**6))
def test_infeasible_names_the_smallest_budget(seed: int) -> None:
    workload, hw = some_workload(seed), machine(seed)
    tight = MemoryBudget(device_bytes=1000, host_bytes=2**30, ssd_bytes=2**30 if hw.ssds else 0)
    with pytest.raises(InsufficientMemoryError) as caught:
        Pareto().solve(workload, hw, tight)
    error = caught.value
    assert error.tier == "device"
    assert error.have_bytes == 1000
    assert error.at_peak
    assert "smallest need" in str(error)
    assert error.advice.endswith("Give the plan more device memory or a smaller batch.")
    bound = least_memory(Model(workload, hw, PlannerOptions().with_copies()), tight)
    assert ("none can need less" in error.advice) == (bound > error.need_bytes // 2)
    if bound > error.need_bytes // 2:
        same = format_need(math.ceil(bound)) == format_need(error.need_bytes)
        assert (
            "need less. " if same else f"need less than {format_bytes(bound)}. "
        ) in error.advice
    enough = replace(tight, device_bytes=error.need_bytes)
    check(workload, Pareto().solve(workload, hw, enough)[0], enough)
    less = replace(tight, device_bytes=error.need_bytes - 1)
    with pytest.raises(InsufficientMemoryError) as again:
        Pareto().solve(workload, hw, less)
    assert again.value.need_bytes == error.need_bytes


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_more_workloads(seed: int) -> None:
    test_infeasible_names_the_smallest_budget.hypothesis.inner_test(seed)  # type: ignore[attr-defined]


def test_alone_it_says_what_lacks_too() -> None:
    """Where no draft fits host memory, and no other strategy has been asked."""
    workload, hw = gpt_workload(), small_hardware(ssd=False)
    states = sum(u.compute_bytes + u.state_bytes for u in workload.units)
    limit = budget(device=states // 2, host=states - states // 2, ssd=0)
    with pytest.raises(InsufficientMemoryError) as caught:
        Pareto(others=False).solve(workload, hw, limit)
    assert caught.value.need_bytes > caught.value.have_bytes


def test_the_tier_that_lacks_least_is_named() -> None:
    """Twice as much host memory would do: the device would have to hold everything instead."""
    workload, hw = gpt_workload(layers=8), small_hardware()
    on_ssd = PlannerOptions(states="ssd")
    p = make_plan("recompute-all", workload, hw, budget(), on_ssd).prediction
    limit = budget(device=p.peak_device_bytes, host=p.peak_host_bytes // 2)
    with pytest.raises(InsufficientMemoryError) as caught:
        Pareto().solve(workload, hw, limit)
    error = caught.value
    assert error.tier == "host"
    assert limit.host_bytes == error.have_bytes < error.need_bytes <= p.peak_host_bytes * 1.02
    assert "state ring" in dict(error.at_peak)
    enough = replace(limit, host_bytes=error.need_bytes)
    check(workload, Pareto().solve(workload, hw, enough)[0], enough)
    with pytest.raises(InsufficientMemoryError, match="not enough device memory"):
        Pareto().solve(workload, hw, limit, PlannerOptions(explain=False))  # nobody reads it

    with pytest.raises(InsufficientMemoryError) as caught:
        Pareto().solve(workload, hw, replace(limit, host_bytes=10_000))
    error = caught.value
    assert error.tier == "device"
    assert "of host memory (there are 9.77 KiB) there is one for this device" in str(error)


@pytest.mark.parametrize("states", ["auto", pytest.param("host", marks=pytest.mark.slow)])
def test_host_memory_for_second_copies_is_named(states: Any) -> None:
    """Not the device, which would have to hold all units that host memory cannot hold twice."""
    workload, hw = gpt_workload(layers=1), small_hardware(ssd=False)
    late = PlannerOptions(states="host", schedule="deferred")
    p = make_plan("recompute-all", workload, hw, budget(), late).prediction
    limit = budget(device=p.peak_device_bytes * 21 // 20, host=p.peak_host_bytes, ssd=0)
    tries = PlannerOptions(states=states, schedule="speculative")
    with pytest.raises(InsufficientMemoryError) as caught:
        Pareto().solve(workload, hw, limit, tries)
    error = caught.value
    assert error.tier == "host"
    assert error.need_bytes > error.have_bytes == limit.host_bytes
    assert "spares" in dict(error.at_peak)
    assert "Or use schedule='deferred': it needs no second copies, and fits" in str(error)
    check(workload, Pareto().solve(workload, hw, limit, replace(late, states=states))[0], limit)
    enough = replace(limit, host_bytes=error.need_bytes)
    check(workload, Pareto().solve(workload, hw, enough, tries)[0], enough)
    none = replace(limit, host_bytes=1000)
    with pytest.raises(InsufficientMemoryError, match=r"host memory(?s:.*)does not fit either"):
        Pareto().solve(workload, hw, none, tries)
    if states == "auto":  # what no host memory helps
        small = replace(limit, device_bytes=p.peak_device_bytes // 4)
        with pytest.raises(InsufficientMemoryError, match="not enough device memory"):
            Pareto(effort=Effort(lower=0)).solve(workload, hw, small, tries)


@pytest.mark.parametrize("part", [0.01, 0.8])
def test_no_draft_is_made_twice(part: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strategies that fit nowhere end with the same choices: whoever mistypes a budget waits."""
    workload, hw = gpt_workload(layers=8), small_hardware()
    made: list[Plan] = []

    def counted(workload: Workload, plan: Plan, *rest: Any) -> Program:
        made.append(replace(plan, strategy=""))
        return lower(workload, plan, *rest)

    limit = MemoryBudget(device_bytes=1000, host_bytes=2**30, ssd_bytes=2**30)
    with pytest.raises(InsufficientMemoryError) as caught:
        Pareto().solve(workload, hw, limit)
    monkeypatch.setattr(schedule, "lower", counted)
    limit = replace(limit, device_bytes=int(part * caught.value.need_bytes))
    with pytest.raises(InsufficientMemoryError) as again:
        Pareto().solve(workload, hw, limit)
    assert again.value.need_bytes == caught.value.need_bytes
    assert len(made) == len({json.dumps(plan.to_dict()) for plan in made})


@pytest.mark.parametrize("host", [0, 1, 2])
def test_a_ladder_of_next_to_nothing(host: int) -> None:
    limit = budget(host=host, ssd=host)
    plan, _ = Pareto(others=False).solve(mlp_workload(), small_hardware(), limit)
    assert {u.tier for u in plan.units.values()} == {"device"}


def test_no_host_memory_and_no_ssd() -> None:
    workload = gpt_workload(layers=1)
    limit = budget(host=0, ssd=0)
    plan, _ = Pareto().solve(workload, small_hardware(ssd=False), limit)
    assert {u.tier for u in plan.units.values()} == {"device"}
    assert plan.count("swap") == 0
    states = sum(u.compute_bytes + u.state_bytes for u in workload.units)
    with pytest.raises(InsufficientMemoryError) as caught:
        Pareto().solve(workload, small_hardware(ssd=False), budget(states, host=0, ssd=0))
    assert caught.value.need_bytes > states
