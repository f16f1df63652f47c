"""Units read in host memory and gradients written there: plan, program, footprint, prediction."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lohan_fx.errors import PlanError
from lohan_fx.footprint import align, gradient_ring, host_bytes_needed
from lohan_fx.plan import SCHEDULES, Action, FetchWindow, Plan
from lohan_fx.planners import Choices, PlannerOptions, finish
from lohan_fx.planners.schedule import UnitMode
from lohan_fx.program import (
    ROWS_PER_PASS,
    Instruction,
    direct_read_bytes,
    lower,
    residency,
)
from lohan_fx.workload import Op, Workload
from tests.test_planners import check
from tests.test_workload_program import AFTER, BEFORE, Liveness, groups
from tests.workloads import budget, gpt_workload, mlp_workload, small_hardware, workloads

HW = small_hardware()
OPTIONS = PlannerOptions()
MODES: tuple[UnitMode, ...] = get_args(UnitMode)


def plan_of(workload: Workload, options: PlannerOptions = OPTIONS, **choices: Any) -> Plan:
    """Keep everything, units in host memory, unless `choices` say otherwise."""
    defaults: dict[str, Any] = {
        "actions": dict.fromkeys(workload.residuals, "keep"),
        "unit_tiers": dict.fromkeys(workload.unit_by_name, "host"),
    }
    found = Choices(**{**defaults, **choices})
    return finish(workload, HW, budget(), options, found, "test")


def random_choices(workload: Workload, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    actions: tuple[Action, ...] = ("keep", "swap", "recompute")
    names = tuple(workload.unit_by_name)
    return {
        "actions": {v: rng.choice(actions) for v in workload.residuals},
        "unit_tiers": {u: rng.choice(("device", "host", "host")) for u in names},
        "modes": {u: rng.choice(MODES) for u in names if rng.random() < 0.9},
        "direct_gradients": {u for u in names if rng.random() < 0.5},
    }


class DirectLiveness(Liveness):
    """A gradient that is written directly is read by its write, not by its emission."""

    def _emitted(self, v: str) -> list[tuple[int, float]]:
        found = []
        for unit in self.w.units:
            if v in unit.gradients:
                p = self.plan.units[unit.name]
                if p.gradients == "direct":
                    found.append((max(self.w.producer[v], self.n), 0.65))
                    continue
                found.append(self.emit(unit.name))
                if p.release_gradients_after:
                    found.append((self.w.op_index[p.release_gradients_after], 0.8))
        return found


@settings(max_examples=75, deadline=None)
@given(workload=workloads(), seed=st.integers(0, 9999), schedule=st.sampled_from(SCHEDULES))
def test_residency_equals_brute_force(workload: Workload, seed: int, schedule: Any) -> None:
    options = PlannerOptions(schedule=schedule)
    plan = plan_of(workload, options, **random_choices(workload, seed))
    check(workload, plan, budget())
    assert residency(lower(workload, plan)).peak_bytes == DirectLiveness(workload, plan).peak()


@settings(max_examples=40, deadline=None)
@given(workload=workloads(), seed=st.integers(0, 9999))
def test_direct_reads_have_a_view_and_no_device_memory(workload: Workload, seed: int) -> None:
    choices = random_choices(workload, seed)
    plan = plan_of(workload, **choices)
    program = lower(workload, plan)
    rank = {kind: k for k, kind in enumerate((*AFTER, *BEFORE))}
    for kinds in groups(program):
        assert kinds == sorted(kinds, key=rank.__getitem__)
    seen: set[tuple[str, str]] = set()
    in_place = {u for u, p in plan.units.items() if p.access == "direct"}
    for x in program.instructions:
        if x.kind == "host_view":
            seen.add((x.name.rpartition("@")[0], x.phase))
            assert not x.births
            assert not x.reads
        for op in (x, *x.body):
            if op.kind == "compute":
                read = _units_outside_windows(workload, op, in_place)
                assert bool(op.direct_bytes) == bool(read)
                assert {(u, x.phase) for u in read} <= seen
    viewed = sum(x.num_bytes for x in program.instructions if x.kind == "host_view")
    assert viewed == sum(x.direct_bytes for x in program.instructions)
    writes = [x for x in program.instructions if x.kind == "write_gradient"]
    direct = [u for u in workload.units if plan.units[u.name].gradients == "direct"]
    assert len(writes) == sum(len(set(u.gradients)) for u in direct)
    for u in direct:
        assert plan.units[u.name].release_gradients_after is None


def _units_outside_windows(workload: Workload, op: Instruction, in_place: set[str]) -> set[str]:
    """Units that an op reads without reading any of their windows."""
    windows = {s.rpartition("#")[0] for s in op.reads}
    values = (workload.values[v] for v in workload.ops[workload.op_index[op.name]].reads)
    return {
        v.unit
        for v in values
        if v.kind == "parameter"
        and v.num_bytes
        and v.unit is not None
        and v.unit in in_place - windows
    }


def test_modes_by_hand() -> None:
    workload = mlp_workload()
    texts = {}
    for mode in MODES:
        program = lower(workload, plan_of(workload, modes={"b1": mode}))
        texts[mode] = [
            str(x) for x in program.instructions if "b1" in x.name or (x.direct_bytes and x.name)
        ]
    emitted = ["emit_gradients b1 host 2048 B", "release_gradients b1"]
    fetch = ["fetch_unit b1#0 host 2048 B", "wait_unit b1#0"]
    again = ["fetch_unit b1#1 host 2048 B", "wait_unit b1#1"]
    assert texts["fetch"] == [*fetch, *again, *emitted]
    assert texts["hold"] == [*fetch, *emitted]
    # lin1: 8 MFLOP and 2048 B are 3907 rows: 16 passes; lin1.b 31
    assert texts["direct"] == [
        "host_view b1@forward host 32768 B",
        "compute lin1 reading 32768 B of host memory",
        "host_view b1@backward host 63488 B",
        "compute lin1.b reading 63488 B of host memory",
        *emitted,
    ]
    assert texts["direct-forward"] == [
        "fetch_unit b1#0 host 2048 B",
        "host_view b1@forward host 32768 B",
        "compute lin1 reading 32768 B of host memory",
        "wait_unit b1#0",
        *emitted,
    ]


def test_held_units_are_fetched_once() -> None:
    workload = gpt_workload(layers=3)
    modes: dict[str, UnitMode] = dict.fromkeys(workload.unit_by_name, "hold")
    once = plan_of(workload, modes=modes).prediction
    twice = plan_of(workload).prediction
    size = sum(u.compute_bytes for u in workload.units)
    assert once.h2d_bytes == size
    assert twice.h2d_bytes > 1.5 * size


def test_gradients_are_written_when_they_are_made() -> None:
    workload = mlp_workload()
    plan = plan_of(workload, direct_gradients={"b1"})
    text = [str(x) for x in lower(workload, plan).instructions if "1" in x.name]
    assert text[-3:] == [
        "compute lin1.b",
        "write_gradient grad.w1@b1 host 2048 B",
        "emit_gradients b1 host",
    ]
    assert plan.prediction.d2h_bytes == plan_of(workload).prediction.d2h_bytes


def test_direct_gradients_have_buffers_of_their_own() -> None:
    workload = gpt_workload(layers=3)
    ring = plan_of(workload)
    written = plan_of(workload, direct_gradients=set(workload.unit_by_name))
    sizes = [align(u.compute_bytes) for u in workload.units]
    assert host_bytes_needed(workload, ring)["gradients"] == 2 * max(sizes)
    assert host_bytes_needed(workload, written)["gradients"] == sum(sizes)
    tiers: Any = dict.fromkeys(workload.unit_by_name, "host")
    assert gradient_ring(workload.units, tiers, "naive", "host", set(tiers)).count == 0
    embed = align(workload.units[0].compute_bytes)
    mixed = plan_of(workload, direct_gradients={"embed"})
    assert host_bytes_needed(workload, mixed)["gradients"] == 2 * max(sizes[1:]) + embed


def test_what_a_direct_read_costs() -> None:
    op = Op(name="f", target="f", block="b", phase="forward", reads=(), writes=())
    weight = 2 * 4096 * 4096
    rows = 8192
    linear = replace(op, flops=2 * rows * 4096 * 4096, bytes_read=weight + 2 * rows * 4096)
    assert direct_read_bytes(linear, weight) == rows // ROWS_PER_PASS * weight
    few = replace(op, flops=2 * 16 * 4096 * 4096, bytes_read=weight)
    assert direct_read_bytes(few, weight) == weight
    table = 2 * 50257 * 4096
    gather = replace(op, bytes_read=8 * rows + 2 * rows * 4096)
    assert direct_read_bytes(gather, table) == gather.bytes_read
    assert direct_read_bytes(replace(op, bytes_read=2 * table), table) == table
    assert direct_read_bytes(op, 100) == 100  # nothing known: all of it
    # measurements.md, at 55.3 GB/s: linear 21.2 ms (and 0.4 of its own), embedding 1.35 ms
    assert direct_read_bytes(linear, weight) / 55.3e9 == pytest.approx(20.8e-3, rel=0.1)
    assert gather.bytes_read / 55.3e9 == pytest.approx(1.35e-3, rel=0.12)


def test_direct_reads_and_writes_take_device_and_link_time() -> None:
    workload = mlp_workload()
    plain = plan_of(workload).prediction
    plan = plan_of(workload, modes={"b1": "direct"}, direct_gradients={"b1"})
    direct = plan.prediction
    forward = sum(op.seconds for op in workload.ops[:5]) + 32768 / HW.h2d_bytes_per_s
    backward = sum(op.seconds for op in workload.ops[5:])
    backward += 63488 / HW.h2d_bytes_per_s + 2048 / HW.d2h_bytes_per_s
    assert direct.forward_s == pytest.approx(forward)
    assert direct.backward_s == pytest.approx(backward)
    assert direct.h2d_bytes == plain.h2d_bytes - 2 * 2048 + 32768 + 63488


def test_plan_files_of_old_stay_as_they_were() -> None:
    workload = mlp_workload()
    plain = plan_of(workload)
    units = plain.to_dict()["units"]
    assert all(
        set(u) == {"tier", "windows", "emit_after", "release_gradients_after"}
        for u in units.values()
    )
    direct = plan_of(workload, modes={"b1": "direct"}, direct_gradients={"b1"})
    assert direct.to_dict()["units"]["b1"]["access"] == "direct"
    assert Plan.from_dict(direct.to_dict()) == direct
    assert direct.fingerprint != plain.fingerprint


def change_unit(plan: Plan, name: str, **changes: Any) -> Plan:
    return replace(plan, units={**plan.units, name: replace(plan.units[name], **changes)})


def broken_plans() -> list[tuple[str, Plan]]:
    workload = mlp_workload()
    good = plan_of(workload, modes={"b1": "direct"})
    emitted = good.units["b1"].emit_after
    late = FetchWindow(fetch_before="loss.b", first_use="loss.b", last_use="lin1.b")
    on_ssd = plan_of(workload, unit_tiers={"b0": "host", "b1": "ssd"})
    resident = plan_of(workload, unit_tiers={"b0": "host", "b1": "device"})
    assert emitted == "lin1.b"
    return [
        ("outside its windows", change_unit(good, "b1", access="fetch")),
        ("outside its windows", change_unit(good, "b1", access="fetch", windows=(late,))),
        ("only host memory", change_unit(on_ssd, "b1", access="direct")),
        ("only host memory", change_unit(resident, "b1", access="direct")),
        ("its gradients stay", change_unit(resident, "b1", gradients="direct")),
    ]


@pytest.mark.parametrize(("message", "plan"), broken_plans())
def test_broken_plans_are_refused(message: str, plan: Plan) -> None:
    with pytest.raises(PlanError, match=message):
        lower(mlp_workload(), plan)


def test_emission_stands_behind_the_last_direct_read() -> None:
    """A gradient that is there before the parameter's last use: the update must wait for that."""
    workload = mlp_workload()
    plan = plan_of(workload, modes={"b1": "direct"})
    ops = list(workload.ops)
    k = workload.op_index["drop0.b"]
    ops[k] = replace(ops[k], reads=("d1", "m0", "w1"))
    later = replace(workload, ops=tuple(ops))
    with pytest.raises(PlanError, match="emits before op"):
        lower(later, plan)
