"""Units on the device that keep no compute copy: what is planned, predicted and simulated."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from lohan_fx.bounds import step_bound
from lohan_fx.cost_model import CostOptions, iteration_time, unit_demand
from lohan_fx.errors import InsufficientMemoryError, PlanError
from lohan_fx.footprint import cast_units, host_bytes_needed, may_cast, tiers_of
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import LATE, SCHEDULES, FetchWindow, Plan, Schedule, Tier, UnitPlan
from lohan_fx.planners import PlannerOptions, make_plan, names
from lohan_fx.planners.assign import assignment_of, choices_of
from lohan_fx.planners.exhaustive import columns_of
from lohan_fx.planners.model import CAST, PARKED, Model, Option
from lohan_fx.planners.overlap import _fetches, lane_rates
from lohan_fx.planners.pareto import NOT_CANDIDATES, Pareto, lower_bound
from lohan_fx.planners.pareto_offers import Offers
from lohan_fx.planners.prediction import demand_of
from lohan_fx.planners.random_policy import RandomPolicy
from lohan_fx.planners.registry import Planner
from lohan_fx.planners.schedule import draft, load_of
from lohan_fx.planners.tiers import QUICK_OPS, check_states_fit
from lohan_fx.planners.trial import leanest_draft, leanest_of_all, least_memory
from lohan_fx.planners.windows import num_fetches
from lohan_fx.program import lower, residency, window_storage
from lohan_fx.simulate import simulate, step_seconds
from lohan_fx.workload import Workload
from tests.test_pareto import machine as any_machine
from tests.test_pareto import some_workload, try_everything
from tests.test_planners import check
from tests.test_simulate import (
    CHUNK,
    machine,
    make_the_plan,
    make_unit,
    make_workload,
    spans,
    update_workload,
)
from tests.workloads import budget, gpt_workload, random_workload, small_hardware, workloads

ROOMY = MemoryBudget(device_bytes=2**40, host_bytes=2**40, ssd_bytes=2**40)

# -- by hand ---------------------------------------------------------------------------------------

OPS = [
    ("f0", 1.0, "x w0", "a"),
    ("f1", 1.0, "a w1", "b"),
    ("b1", 1.0, "b a w1", "d g.u1"),
    ("b0", 1.0, "d x w0", "g.u0"),
]
SIZES = {"a": 1, "b": 1, "d": 1, "w0": 2, "w1": 2, "g.u0": 2, "g.u1": 2}
UNITS = [
    replace(make_unit(n, params=4, compute=2, states=12), master_bytes=4 * CHUNK)
    for n in ("u0", "u1")
]
WORKLOAD = make_workload(OPS, SIZES, UNITS, {"w0": "u0", "w1": "u1"})
CAST_S, UPDATE_S, BARE_UPDATE_S = 4 + 2, 2 * (12 + 2) + 2, 2 * 12 + 2
"""A chunk a second: the master is read, the copy written; states and copy are read and written, the
gradient is read."""


def window(op: str) -> FetchWindow:
    return FetchWindow(fetch_before=op, first_use=op, last_use=op)


def by_hand(casts: Collection[str] = ("u1",), schedule: Schedule = "optimized") -> Plan:
    units = {
        f"u{k}": UnitPlan(
            tier="device",
            emit_after=f"b{k}",
            casts=f"u{k}" in casts,
            windows=(window(f"f{k}"), window(f"b{k}")) if f"u{k}" in casts else (),
        )
        for k in range(2)
    }
    return make_the_plan(WORKLOAD, units=units, schedule=schedule)


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    plan = by_hand()
    data = plan.to_dict()
    assert data["units"]["u1"]["casts"] is True
    assert "casts" not in data["units"]["u0"]
    assert Plan.from_dict(data) == plan != by_hand(())
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert plan.fingerprint != by_hand(()).fingerprint
    assert "1 device with copies cast where they are used" in str(plan)
    assert "cast" not in str(by_hand(()))


def test_the_program() -> None:
    program = lower(WORKLOAD, by_hand())
    assert [str(x) for x in program.instructions] == [
        "compute f0",
        "fetch_unit u1#0",
        "wait_unit u1#0",
        "compute f1",
        "fetch_unit u1#1",
        "wait_unit u1#1",
        "compute b1",
        "emit_gradients u1",
        "compute b0",
        "emit_gradients u0",
    ]
    fetched = [x for x in program.instructions if x.kind == "fetch_unit"]
    assert {(x.tier, x.num_bytes) for x in fetched} == {("device", 0)}
    assert [x.births for x in fetched] == [((f"u1#{k}", 2 * CHUNK),) for k in range(2)]
    reads = {x.name: x.reads for x in program.instructions if x.kind == "compute"}
    assert "u1#0" in reads["f1"]
    assert "u1#1" in reads["b1"]


def test_memory_has_the_copy_only_where_it_is_used() -> None:
    """Ops f0, f1, b1, b0: with all copies 28 chunks are always there."""
    found = {}
    for casts in ((), ("u1",), ("u0", "u1")):
        program = lower(WORKLOAD, by_hand(casts))
        memory = residency(program)
        assert memory.static_bytes == program.static_bytes == (28 - 2 * len(casts)) * CHUNK
        ops = [x.kind == "compute" for x in program.instructions]
        found[len(casts)] = [size // CHUNK for size in itertools.compress(memory.series, ops)]
    copies = [28 + alive for alive in (1, 2, 5, 3)]
    assert found[0] == copies
    assert found[1] == [copies[0] - 2, copies[1], copies[2], copies[3] - 2]
    assert found[2] == [size - 2 for size in copies]
    assert not sum(host_bytes_needed(WORKLOAD, by_hand()).values())


@pytest.mark.parametrize(
    ("tier", "master"), [("host", 4 * CHUNK), ("ssd", 4 * CHUNK), ("device", 0)]
)
def test_what_must_keep_its_copy(tier: Tier, master: int) -> None:
    unit = replace(UNITS[1], master_bytes=master)
    workload = replace(WORKLOAD, units=(UNITS[0], unit))
    plan = by_hand()
    plan = replace(plan, units={**plan.units, "u1": replace(plan.units["u1"], tier=tier)})
    assert not may_cast(unit, tier)
    with pytest.raises(PlanError, match=rf"unit u1 \({tier} tier\) must keep its compute copy"):
        lower(workload, plan)
    lower(WORKLOAD, by_hand())


def test_a_cast_has_windows_for_all_that_read_it() -> None:
    plan = by_hand()
    few = replace(plan.units["u1"], windows=plan.units["u1"].windows[:1])
    with pytest.raises(PlanError, match="outside its windows"):
        lower(WORKLOAD, replace(plan, units={**plan.units, "u1": few}))


def test_the_simulated_step() -> None:
    made = simulate(WORKLOAD, by_hand(), machine())
    update, bare = UPDATE_S, BARE_UPDATE_S
    lengths = [
        ("compute", "f0", 1),
        ("fetch_unit", "u1#0", CAST_S),
        ("compute", "f1", 1),
        ("fetch_unit", "u1#1", CAST_S),
        ("compute", "b1", 1),
        ("update", "u1", bare),
        ("compute", "b0", 1),
        ("update", "u0", update),
    ]
    gpu = spans(made, "gpu")
    assert [(kind, name, end - start) for kind, name, start, end in gpu] == lengths
    assert made.step_s == gpu[-1][-1] == 4 + 2 * CAST_S + bare + update
    assert made.forward_s == 2 + CAST_S
    assert not spans(made, "h2d")
    assert not made.traffic.h2d_bytes


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("casts", [(), ("u0",), ("u0", "u1")])
def test_predicted_as_simulated_where_nothing_moves(
    casts: Collection[str], schedule: Schedule
) -> None:
    plan, hw = by_hand(casts, schedule), machine()
    demand = demand_of(WORKLOAD, plan, lower(WORKLOAD, plan))
    assert demand.cast_forward_bytes == demand.cast_backward_bytes == CAST_S * len(casts) * CHUNK
    assert demand.device_update_bytes == (2 * UPDATE_S - 4 * len(casts)) * CHUNK
    wanted = 4 + 2 * UPDATE_S + (2 * CAST_S - 4) * len(casts)
    assert step_seconds(WORKLOAD, plan, hw) == pytest.approx(wanted)
    assert step_bound(WORKLOAD, plan, hw).seconds == pytest.approx(wanted)
    assert iteration_time(hw, demand, CostOptions(), schedule).step_s == pytest.approx(wanted)
    estimate = unit_demand(WORKLOAD, tiers_of(plan), num_fetches(WORKLOAD), (), casts)
    for name in ("cast_forward_bytes", "cast_backward_bytes", "device_update_bytes"):
        assert getattr(estimate, name) == getattr(demand, name)


def test_parked_gradients_of_units_that_cast() -> None:
    plan = by_hand(("u0", "u1"), "deferred")
    parked = replace(plan.units["u1"], gradients="parked", release_gradients_after="b1")
    plan = replace(plan, units={**plan.units, "u1": parked})
    made = simulate(WORKLOAD, plan, machine())
    last = [(kind, name, end - start) for kind, name, start, end in spans(made, "gpu")][-3:]
    assert last == [("direct_read", "u1", 2), ("update", "u1", 26), ("update", "u0", 26)]
    model = Model(WORKLOAD, machine(), PlannerOptions(schedule="deferred"))
    found = assignment_of(model, plan)
    assert found is not None
    assert (found["u0"], found["u1"]) == ("cast", "cast-parked")


# -- any plan --------------------------------------------------------------------------------------

schedules = st.sampled_from(SCHEDULES)
some_states = st.sampled_from(("auto", "device", "device"))
anything = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def that_casts(workload: Workload, hw: HardwareProfile, seed: int, options: PlannerOptions) -> Plan:
    """A random plan in which some unit casts."""
    limit = replace(ROOMY, ssd_bytes=ROOMY.ssd_bytes if hw.ssds else 0)
    plan = RandomPolicy(seed)(workload, hw, limit, options)
    assume(cast_units(plan))
    return plan


def used_by(plan: Plan) -> MemoryBudget:
    p = plan.prediction
    return MemoryBudget(
        device_bytes=p.peak_device_bytes,
        host_bytes=p.peak_host_bytes,
        ssd_bytes=p.peak_ssd_bytes,
    )


@anything
@given(workload=workloads(), seed=st.integers(0, 9999), schedule=schedules, states=some_states)
def test_casts_and_updates_take_the_device_their_time(
    workload: Workload, seed: int, schedule: Schedule, states: Any
) -> None:
    hw = small_hardware()
    plan = that_casts(workload, hw, seed, PlannerOptions(schedule=schedule, states=states))
    check(workload, plan, ROOMY)
    casts = cast_units(plan)
    made = simulate(workload, plan, hw)
    took: dict[tuple[str, str], float] = {}
    for span in made.timeline.by_lane["gpu"]:
        key = span.kind, span.name
        took[key] = took.get(key, 0.0) + span.seconds
    moved = 0
    for unit in workload.units:
        p = plan.units[unit.name]
        if p.tier == "device" and unit.trainable:
            copy = unit.name not in casts
            size = 2 * (unit.state_bytes + unit.compute_bytes * copy) + unit.gradient_bytes
            assert took["update", unit.name] == pytest.approx(size / hw.device_bytes_per_s)
        for k in range(len(p.windows)):
            seconds = took.pop(("fetch_unit", window_storage(unit.name, k)), 0.0)
            size = unit.master_bytes + unit.compute_bytes if p.casts else 0
            assert seconds == pytest.approx(size / hw.device_bytes_per_s)
            moved += size
    assert not [name for kind, name in took if kind == "fetch_unit"]
    assert made.traffic.h2d_bytes == plan.prediction.h2d_bytes
    program = lower(workload, plan)
    demand = demand_of(workload, plan, program)
    assert demand.cast_forward_bytes + demand.cast_backward_bytes == moved
    assert step_bound(workload, plan, hw, program=program).seconds <= made.step_s * (1 + 1e-9)
    copies = sum(workload.unit_by_name[name].compute_bytes for name in casts)
    kept = {n: replace(u, casts=False, windows=()) for n, u in plan.units.items() if u.casts}
    others = lower(workload, replace(plan, units={**plan.units, **kept}))
    assert others.static_bytes - program.static_bytes == copies > 0


@anything
@given(
    workload=st.one_of(workloads(), st.builds(some_workload, st.integers(0, 10**6))),
    hw=st.builds(any_machine, st.integers(0, 10**6)),
    seed=st.integers(0, 9999),
    schedule=schedules,
    states=some_states,
)
def test_no_plan_that_casts_undercuts_the_bound(
    workload: Workload, hw: HardwareProfile, seed: int, schedule: Schedule, states: Any
) -> None:
    """Of all plans in the memory that it uses, and of those with the same options."""
    if schedule in LATE:
        # The second step is simulated: where the first has left SSDs a backlog, its backward may
        # have hidden more updates than that of any later step does.
        hw = replace(hw, ssds=(), ssd_read_bytes_per_s=0.0, ssd_write_bytes_per_s=0.0)
    options = PlannerOptions(schedule=schedule, states=states, copies="host")
    plan = that_casts(workload, hw, seed, options)
    limit, seconds = used_by(plan), step_seconds(workload, plan, hw)
    assert lower_bound(workload, hw, limit, options) <= seconds * (1 + 1e-9)
    program = lower(workload, plan)
    load = load_of(workload, program, residency(program))
    for by_value in (False, True):
        model = Model(workload, hw, options, by_value=by_value)
        found = assignment_of(model, plan)
        assert found is not None
        assert {name for name in found if found[name] in CAST} == cast_units(plan)
        assert Offers(model, limit).bound_of(found) <= seconds * (1 + 1e-9)
        columns = [model.column(name, option) for name, option in found.items()]
        assert None not in columns
        x = np.bincount(np.array(columns, dtype=np.int64), minlength=len(model.column_group))
        for op, size in enumerate(load):
            row = model.memory_row(op)
            assert row.base + row.least @ x <= size * (1 + 1e-9)


@anything
@given(seed=st.integers(0, 10**6), schedule=schedules, by_value=st.booleans())
def test_choices_are_named_again(seed: int, schedule: Schedule, by_value: bool) -> None:
    rng, workload = random.Random(seed), random_workload(seed, 3, 4)
    hw, options = small_hardware(), PlannerOptions(schedule=schedule)
    model = Model(workload, hw, options, by_value=by_value)
    plain = {"keep", "host", "ssd", "recompute", "device", "parked", *CAST}
    given_: dict[str, Option] = {
        member: rng.choice([o for o in group.options if o in plain])
        for group in model.groups
        for member in group.members
    }
    choices = choices_of(model, given_)
    assert {*choices.casts} == {n for n, o in given_.items() if o in CAST}
    assert {*choices.parked} == {n for n, o in given_.items() if o in PARKED}
    made = draft(workload, hw, ROOMY, options, choices, "given")
    assert assignment_of(model, made.plan) == given_


def test_every_way_to_be_on_the_device_is_an_option() -> None:
    workload = gpt_workload(layers=2, masters=True)
    bare = replace(workload, units=tuple(replace(u, master_bytes=0) for u in workload.units))
    hw = small_hardware(ssd=False)

    def options(w: Workload, **changes: Any) -> set[str]:
        model = Model(w, hw, PlannerOptions(states="device", **changes), by_value=True)
        return {*model.groups[model.group_of["h0"]].options}

    assert options(workload) == {"device", "cast"}
    assert options(bare) == options(bare, fixed_casts=["h0"]) == {"device"}
    every = {"device", "parked", "cast", "cast-parked"}
    assert options(workload, schedule="deferred") == every
    assert options(workload, fixed_casts=["h0"]) == {"cast"}
    assert options(workload, fixed_casts=["h1"]) == {"device"}
    both = {"fixed_casts": ["h0"], "fixed_parked": ["h0"], "schedule": "serial"}
    assert options(workload, **both) == {"cast-parked"}


def test_a_group_is_of_units_that_may_do_the_same() -> None:
    workload = gpt_workload(layers=6, masters=True)
    units = [replace(u, master_bytes=0) if u.name == "h2" else u for u in workload.units]
    model = Model(replace(workload, units=tuple(units)), small_hardware(), PlannerOptions())
    assert model.groups[model.group_of["h2"]].members == ("h2",)


# -- strategies ------------------------------------------------------------------------------------


def slow_cpu(**changes: Any) -> HardwareProfile:
    return small_hardware(**{"cpu_optimizer_params_per_s": 2e8, **changes})


DEEP = gpt_workload(layers=12, hidden=256, batch=8, masters=True)


LARGE_BATCH = gpt_workload(layers=2, hidden=64, batch=256, seq=64, masters=True)


def tight_for(workload: Workload, part: float) -> MemoryBudget:
    """A part of all states on the device, and some more for what is computed."""
    states = sum(u.compute_bytes + u.state_bytes for u in workload.units)
    return budget(device=int(part * states) + 4 * 2**20)


@pytest.mark.parametrize("schedule", ["optimized", "overlapped", "speculative"])
@pytest.mark.parametrize("strategy", ["lohan-resident", "pareto"])
def test_more_units_are_resident_without_copies(strategy: str, schedule: Any) -> None:
    limit, hw = tight_for(DEEP, 0.7), slow_cpu()
    options = PlannerOptions(schedule=schedule)
    plan = make_plan(strategy, DEEP, hw, limit, options)
    kept = make_plan(strategy, DEEP, hw, limit, replace(options, fixed_casts=()))
    check(DEEP, plan, limit)
    assert cast_units(plan)
    assert not cast_units(kept)
    resident = [sum(u.tier == "device" for u in each.units.values()) for each in (plan, kept)]
    assert resident[0] > resident[1]
    assert step_seconds(DEEP, plan, hw) < 0.99 * step_seconds(DEEP, kept, hw)


@pytest.mark.parametrize("strategy", ["keep-all", "lohan", "lohan-resident", "pareto", "swap-all"])
def test_what_fits_keeps_its_copies(strategy: str) -> None:
    plan = make_plan(strategy, DEEP, slow_cpu(), budget())
    assert not cast_units(plan)
    if strategy != "swap-all":
        assert plan.count("keep") == len(DEEP.residuals)
    if strategy in ("keep-all", "lohan-resident"):
        assert {u.tier for u in plan.units.values()} == {"device"}


def test_nothing_is_cast_that_gains_nothing() -> None:
    """Where the CPU is fast, and casts are slow."""
    hw = small_hardware(cpu_optimizer_params_per_s=1e12, device_bytes_per_s=1e9)
    for strategy in ("lohan-resident", "pareto"):
        assert not cast_units(make_plan(strategy, DEEP, hw, tight_for(DEEP, 0.7)))


@pytest.mark.parametrize("strategy", ["lohan-resident", "pareto"])
def test_units_that_are_on_the_device_anyway_cast_where_they_must(strategy: str) -> None:
    """All states are to be there: as many keep no copies as it takes to fit, and no more."""
    hw, options = slow_cpu(), PlannerOptions(states="device")
    found = []
    for part in (0.9, 0.97):
        limit = tight_for(DEEP, part)
        plan = make_plan(strategy, DEEP, hw, limit, options)
        check(DEEP, plan, limit)
        assert {u.tier for u in plan.units.values()} == {"device"}
        found.append(len(cast_units(plan)))
        if strategy == "lohan-resident":
            assert plan.notes[0] == (
                "14 of 14 units are resident on the device, as states='device' has it, "
                f"{found[-1]} keep no compute copy"
            )
        with pytest.raises(InsufficientMemoryError):
            make_plan(strategy, DEEP, hw, limit, replace(options, fixed_casts=()))
    assert len(DEEP.units) > found[0] > found[1] > 0


@pytest.mark.parametrize(("schedule", "part"), [("optimized", 1.1), ("deferred", 1.13)])
def test_units_that_are_on_the_device_anyway_cast_where_that_saves_recomputation(
    schedule: Schedule, part: float
) -> None:
    hw = small_hardware(device_bytes_per_s=1e13)  # casts are cheap
    limit, options = tight_for(DEEP, part), PlannerOptions(states="device", schedule=schedule)
    plan = make_plan("lohan-resident", DEEP, hw, limit, options)
    kept = make_plan("lohan-resident", DEEP, hw, limit, replace(options, fixed_casts=()))
    check(DEEP, plan, limit)
    assert cast_units(plan)
    assert plan.count("keep") > kept.count("keep")
    assert step_seconds(DEEP, plan, hw) < 0.99 * step_seconds(DEEP, kept, hw)


def test_units_that_are_on_the_device_anyway_cast_where_that_is_all_it_gains() -> None:
    """Not where everything is kept, nor where casts are slow, nor where nothing fits at all."""
    options = PlannerOptions(states="device")
    assert not cast_units(make_plan("lohan-resident", DEEP, slow_cpu(), budget(), options))
    slow = small_hardware(device_bytes_per_s=1e9)
    plan = make_plan("lohan-resident", DEEP, slow, tight_for(DEEP, 1.1), options)
    assert not cast_units(plan)
    assert plan.count("keep") < len(DEEP.residuals)
    with pytest.raises(InsufficientMemoryError) as error:
        make_plan("lohan-resident", DEEP, slow, tight_for(DEEP, 0.5), options)
    with pytest.raises(InsufficientMemoryError) as whole:
        make_plan("pareto", DEEP, slow, tight_for(DEEP, 0.5), options)
    advice = " Give the plan more device memory, or let states be elsewhere, too (states='auto')."
    assert whole.value.advice.endswith(advice)  # no batch is small enough
    with pytest.raises(InsufficientMemoryError, match="memory or a smaller batch, or let states"):
        make_plan("pareto", LARGE_BATCH, slow, tight_for(LARGE_BATCH, 0.95), options)
    least = sum(u.state_bytes for u in DEEP.units)
    copies = sum(u.compute_bytes for u in DEEP.units)
    assert least < error.value.need_bytes < least + copies


def obeying() -> list[str | Planner]:
    return [*(name for name in names() if name not in NOT_CANDIDATES), "pareto", RandomPolicy(3)]


@pytest.mark.parametrize("strategy", obeying(), ids=str)
@pytest.mark.parametrize("fixed", [(), ("h0",), ("embed", "h0", "h1", "head")])
def test_what_casts_may_be_given(strategy: Any, fixed: tuple[str, ...]) -> None:
    """Of those that may; a unit without a master that is shown, or in host memory, may not."""
    workload = gpt_workload(layers=2, masters=True)
    units = [replace(u, master_bytes=0) if u.name == "head" else u for u in workload.units]
    workload = replace(workload, units=tuple(units))
    tiers: Any = {"embed": "device", "h0": "device", "h1": "host", "head": "device"}
    options = PlannerOptions(fixed_units=tiers, fixed_casts=fixed)
    plan = make_plan(strategy, workload, small_hardware(), budget(), options)
    assert cast_units(plan) == {*fixed} & {"embed", "h0"}
    check(workload, plan, budget())
    options = PlannerOptions(states="device", fixed_casts=fixed)
    plan = make_plan(strategy, workload, small_hardware(), budget(), options)
    assert cast_units(plan) == {*fixed} - {"head"}


def test_lohan_resident_obeys_where_it_chooses_units() -> None:
    fixed = {u.name for u in DEEP.units[::2]}
    limit, options = tight_for(DEEP, 0.5), PlannerOptions(fixed_casts=fixed)
    for strategy in ("lohan-resident", "pareto"):
        plan = make_plan(strategy, DEEP, slow_cpu(), limit, options)
        resident = {name for name, u in plan.units.items() if u.tier == "device"}
        assert 0 < len(resident) < len(DEEP.units)
        assert cast_units(plan) == fixed & resident


def test_random_plans_cast() -> None:
    found = set()
    for seed in range(12):
        options = PlannerOptions(states="device")
        plan = RandomPolicy(seed)(WORKLOAD, small_hardware(), ROOMY, options)
        found.add(cast_units(plan))
    assert found == {frozenset(names) for names in ((), ("u0",), ("u1",), ("u0", "u1"))}


def test_casts_are_no_sooner_than_they_are_used() -> None:
    """However much memory there is; copies of host units come as early as they can."""
    workload = gpt_workload(layers=6, hidden=256, masters=True)
    tiers: Any = {u.name: ("device", "host")[k % 2] for k, u in enumerate(workload.units)}
    hw, options = small_hardware(), PlannerOptions(fixed_units=tiers, fixed_casts=tuple(tiers))
    for strategy in ("swap-all", "lohan", "pareto"):
        plan = make_plan(strategy, workload, hw, budget(), options)
        casts = cast_units(plan)
        assert casts == {name for name, tier in tiers.items() if tier == "device"}
        fetched = {c.name for c in _fetches(workload, plan, lane_rates(workload, plan, hw))}
        assert {name.rpartition("#")[0] for name in fetched} == set(tiers) - casts
        moved = {
            name: [w.fetch_before != w.first_use for w in plan.units[name].windows]
            for name in tiers
        }
        assert not any(any(moved[name]) for name in casts)
        assert all(moved[name] for name in casts)
        assert any(any(moved[name]) for name in set(tiers) - casts)


# -- the optimum -----------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["all copies", "one copy less", "no copies"])
def test_pareto_finds_the_optimum_of_all_assignments(part: str) -> None:
    """An optimizer step of minutes on the CPU: both units are on the device, and cast if they must
    be to fit."""
    hw = small_hardware(
        ssd=False, device_bytes_per_s=1000.0 * CHUNK, cpu_optimizer_params_per_s=0.01
    )
    options = PlannerOptions()
    peaks = [residency(lower(WORKLOAD, by_hand(casts))).peak_bytes for casts in ((), ("u0", "u1"))]
    assert peaks[0] > peaks[1]
    size = {"all copies": peaks[0], "one copy less": peaks[0] - 1, "no copies": peaks[1]}[part]
    limit = budget(device=size, host=2**40, ssd=0)
    best = try_everything(WORKLOAD, hw, limit, options)
    plan, report = Pareto().solve(WORKLOAD, hw, limit, options)
    assert {u.tier for u in plan.units.values()} == {"device"}
    assert bool(cast_units(plan)) == (part != "all copies")
    assert report.exhaustive
    assert report.step_s == pytest.approx(best)


def test_a_unit_that_no_op_reads_needs_no_copy() -> None:
    """It has no windows with a copy, and none without: two plans all the same."""
    workload = update_workload(2, 1.0, states=12)
    units = [replace(u, master_bytes=4 * CHUNK) for u in workload.units]
    workload = replace(workload, units=tuple(units))
    hw = small_hardware(ssd=False, device_bytes_per_s=float(CHUNK), cpu_optimizer_params_per_s=1e-3)
    limit = budget(device=2**40, host=2**40, ssd=0)
    plan, report = Pareto().solve(workload, hw, limit)
    assert cast_units(plan) == {"u0", "u1"}
    assert not any(u.windows for u in plan.units.values())
    assert report.step_s == pytest.approx(try_everything(workload, hw, limit, PlannerOptions()))


def test_few_ways_to_read_units_have_those_without_copies() -> None:
    """Of assignments that are enumerated, where all are too many."""
    model = Model(WORKLOAD, small_hardware(), PlannerOptions(schedule="deferred"), by_value=True)
    sizes = [len(group.options) for group in model.groups]
    columns = columns_of(model, math.prod(sizes) - 1)
    assert columns is not None
    options = [o for group in model.groups for o in group.options]
    found = {options[column] for column in itertools.chain(*columns)}
    assert {"cast", "cast-parked", "device", "parked"} <= found
    assert not found & {"hold", "reload"}


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", [0, 10_000])
def test_units_need_no_more_than_their_states(host: int) -> None:
    """No buffers of SSD units are counted on, where units fit without copies only."""
    workload, hw = gpt_workload(layers=6, hidden=256, batch=1, seq=8, masters=True), slow_cpu()
    options = PlannerOptions(fixed_casts=[u.name for u in workload.units])
    plan = make_plan("keep-all", workload, hw, budget(), options)
    used = replace(used_by(plan), host_bytes=host, ssd_bytes=2**30)
    assert used.device_bytes < sum(u.compute_bytes + u.state_bytes for u in workload.units)
    seconds = step_seconds(workload, plan, hw)
    assert lower_bound(workload, hw, used) <= seconds * (1 + 1e-9)
    found, report = Pareto().solve(workload, hw, used)
    check(workload, found, used)
    assert report.bound_s <= report.step_s <= seconds * (1 + 1e-9)
    for name in ("keep-all", "zero-offload"):
        with pytest.raises(InsufficientMemoryError):
            make_plan(name, workload, hw, used, PlannerOptions())


@pytest.mark.parametrize("states", ["device", "auto"])
def test_a_large_model_without_copies_is_not_refused(states: Any) -> None:
    """Before planning: where all states fit, though not beside all compute copies."""
    workload, hw = gpt_workload(layers=64, hidden=32, batch=1, seq=8, masters=True), slow_cpu()
    assert len(workload.ops) > QUICK_OPS
    least = sum(u.state_bytes for u in workload.units)
    options = PlannerOptions(states=states)
    check_states_fit(workload, hw, budget(device=least, host=0, ssd=0), options)
    with pytest.raises(InsufficientMemoryError):
        check_states_fit(workload, hw, budget(device=least - 1, host=0, ssd=0), options)
    bare = replace(workload, units=tuple(replace(u, master_bytes=0) for u in workload.units))
    with pytest.raises(InsufficientMemoryError):
        check_states_fit(bare, hw, budget(device=least, host=0, ssd=0), options)


SHORT = gpt_workload(layers=8, hidden=256, masters=True)
SHORT_STATES = sum(u.state_bytes + u.compute_bytes for u in SHORT.units)


def test_a_shortage_asks_for_no_more_host_memory_than_will_do() -> None:
    """Units that are on the device without copies need no host memory, nor buffers for SSDs."""
    hw = small_hardware(ssd=False)
    limit = budget(device=SHORT_STATES // 2, host=SHORT_STATES // 2, ssd=0)
    with pytest.raises(InsufficientMemoryError) as caught:
        Pareto().solve(SHORT, hw, limit)
    with pytest.raises(InsufficientMemoryError) as other:
        make_plan("lohan-resident", SHORT, hw, limit)
    error = caught.value
    assert error.tier == other.value.tier == "host"
    assert limit.host_bytes < error.need_bytes <= other.value.need_bytes < 0.6 * SHORT_STATES
    enough = replace(limit, host_bytes=error.need_bytes)
    check(SHORT, Pareto().solve(SHORT, hw, enough)[0], enough)


def test_the_leanest_plan_has_all_units_elsewhere_that_there_is_room_for() -> None:
    """More host memory is never of no use, nor is it left where equal units differ in windows."""
    model = Model(SHORT, small_hardware(ssd=False), PlannerOptions(), by_value=True)
    peaks = []
    for part in (0.0, 0.2, 0.4, 0.6, 0.8, 1.1):
        limit = budget(device=0, host=int(part * SHORT_STATES), ssd=0)
        made = leanest_draft(model, limit, "pareto", 0)
        assert made is not None
        peaks.append(made.memory.peak_bytes / SHORT_STATES)
        assert peaks[-1] >= least_memory(model, limit) / SHORT_STATES
        assert peaks[-1] < max(0.0, 1 - part) + 0.2
    assert peaks == sorted(peaks, reverse=True)


def test_more_ssd_makes_no_need_larger() -> None:
    """Buffers for it would take the host memory that units have without it."""
    workload = gpt_workload(layers=8)
    whole = sum(u.state_bytes + u.compute_bytes for u in workload.units)
    for states in ("auto", "device"):
        options = PlannerOptions(states=states)  # type: ignore[arg-type]
        model = Model(workload, small_hardware(), options.with_copies())
        peaks = []
        for part in (0.0, 0.1, 0.4, 4.0):
            limit = budget(device=0, host=whole // 3, ssd=int(part * whole))
            made = leanest_of_all(model, limit, "pareto", 10)
            assert made is not None
            peaks.append(made.memory.peak_bytes)
        assert peaks == sorted(peaks, reverse=True)
    needs = []
    for ssd in (0, whole):
        limit, brief = budget(whole // 4, whole // 6, ssd), PlannerOptions(explain=False)
        with pytest.raises(InsufficientMemoryError, match="not enough device memory") as error:
            Pareto().solve(workload, small_hardware(), limit, brief)
        needs.append(error.value.need_bytes)
    assert needs[1] <= needs[0]


def test_the_note_about_units_on_the_device_names_what_has_them_there() -> None:
    workload, options = gpt_workload(layers=2), PlannerOptions(states="device")
    some = replace(options, fixed_units={"h0": "host"})
    for asked, why in ((options, "4 of 4"), (some, "3 of 4")):
        for strategy in ("lohan-resident", "pareto"):
            notes = make_plan(strategy, workload, small_hardware(), budget(), asked).notes
            [note] = [note for note in notes if note.startswith(why)]
            words = "states='device' and fixed_units have it"
            assert (words in note) == (asked is some)
            assert ("states='device' has it" in note) == (asked is options)
