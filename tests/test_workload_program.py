"""Lowering and residency, against a second implementation that shares no code with them."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lohan_fx.errors import PlanError
from lohan_fx.plan import SCHEDULES, WHOLE, FetchWindow, Plan
from lohan_fx.planners import PlannerOptions, make_plan
from lohan_fx.planners.random_policy import RandomPolicy
from lohan_fx.program import Program, lower, regions_of, residency, window_storage
from lohan_fx.workload import Op, Value, Workload
from tests.workloads import budget, gpt_workload, mlp_workload, small_hardware, workloads

HW = small_hardware()
EMIT = "emit_gradients"
BEFORE = ("fetch_unit", "prefetch", "wait_unit", "host_view", "wait", "recompute")
AFTER = ("offload", "release", "write_gradient", "emit_gradients", "release_gradients")
INPUTS = ("input", "buffer", "constant", "parameter")


def random_plan(workload: Workload, seed: int, schedule: Any = "optimized") -> Plan:
    options = PlannerOptions(schedule=schedule, copies="host")
    return make_plan(RandomPolicy(seed), workload, HW, budget(), options)


class Liveness:
    """Intervals of residency, straight from the plan's definition.

    Time is (op, place): places before the op are negative, the op itself is 0, places after it
    are positive. A region's body has its own fractions between the waits and the op.
    """

    def __init__(self, workload: Workload, plan: Plan) -> None:
        self.w, self.plan, self.n = workload, plan, workload.num_forward_ops
        self.end = (len(workload.ops), 0.0)
        self.spans: list[tuple[tuple[int, float], tuple[int, float], int]] = []
        self.samples: set[tuple[int, float]] = {(i, 0.0) for i in range(len(workload.ops))}
        self.regions = regions_of(workload, plan)
        self.remade = {v: r for r in self.regions for v in r.wanted}
        self._values()
        self._regions()
        self._units()

    def size(self, v: str) -> int:
        return self.w.values[v].num_bytes

    def reads_at(self, v: str) -> list[tuple[int, float]]:
        """When ops and regions read a value (regions hold what they read to their end)."""
        found = [(i, 0.0) for i in self.w.users[v]]
        found += [(r.anchor, self.place(r, len(r.ops))) for r in self.regions if v in r.reads]
        return found

    def place(self, region: Any, step: int) -> float:
        same = [r for r in self.regions if r.anchor == region.anchor]
        return -0.5 + 0.4 * (same.index(region) + step / (len(region.ops) + 1)) / len(same)

    def span(self, first: tuple[int, float], last: tuple[int, float], size: int) -> None:
        self.spans.append((first, max(first, last), size))

    def _values(self) -> None:
        for v in self.w.values.values():
            if v.kind in INPUTS:
                continue
            made = (self.w.producer[v.name], 0.0)
            reads = self.reads_at(v.name)
            if v.is_output or v.name in self._kept_gradients():
                self.span(made, self.end, v.num_bytes)
                continue
            decision = self.plan.residuals.get(v.name)
            if decision is None or decision.action == "keep":
                self.span(made, max([made, *reads, *self._emitted(v.name)]), v.num_bytes)
                continue
            forward = [t for t in reads if t[0] < self.n]
            if decision.action == "swap":
                release = self.w.op_index[decision.release_after or ""]
                self.span(made, (release, 0.6), v.num_bytes)
                start = self.w.op_index[decision.prefetch_before or ""]
                self.samples.add((start, -0.9))
                self.span((start, -0.9), max(t for t in reads if t[0] >= self.n), v.num_bytes)
            else:
                self.span(made, max([made, *forward]), v.num_bytes)

    def _emitted(self, v: str) -> list[tuple[int, float]]:
        found = []
        for unit in self.w.units:
            if v in unit.gradients:
                p = self.plan.units[unit.name]
                found.append(self.emit(unit.name))
                if p.release_gradients_after:
                    found.append((self.w.op_index[p.release_gradients_after], 0.8))
        return found

    def emit(self, unit: str) -> tuple[int, float]:
        """Units that emit after one op do so one after another, in workload order."""
        rank = [u.name for u in self.w.units].index(unit) / len(self.w.units)
        return (self.w.op_index[self.plan.units[unit].emit_after or ""], 0.7 + 0.05 * rank)

    def _kept_gradients(self) -> set[str]:
        if self.plan.schedule not in WHOLE:
            return set()
        plans = self.plan.units
        kept = [
            u
            for u in self.w.units
            if plans[u.name].tier == "device" and plans[u.name].gradients != "parked"
        ]
        return {g for u in kept for g in u.gradients}

    def _regions(self) -> None:
        for region in self.regions:
            end = (region.anchor, self.place(region, len(region.ops)))
            for k, i in enumerate(region.ops):
                now = (region.anchor, self.place(region, k))
                self.samples.add(now)
                for v in self.w.ops[i].writes:
                    inner = [
                        (region.anchor, self.place(region, j))
                        for j, u in enumerate(region.ops)
                        if v in self.w.ops[u].reads
                    ]
                    last = max([now, *inner])
                    if v in region.wanted:
                        later = [t for t in self.reads_at(v) if t[0] >= self.n]
                        last = max([end, *later])
                    self.span(now, last, self.size(v))
            self.samples.add(end)

    def _units(self) -> None:
        for unit in self.w.units:
            p = self.plan.units[unit.name]
            params = set(self.w.parameters_of_unit[unit.name])
            for window in p.windows:
                start = self.w.op_index[window.fetch_before]
                first, last = (self.w.op_index[x] for x in (window.first_use, window.last_use))
                held = [(first, -0.7)]
                held += [t for v in params for t in self.reads_at(v) if first <= t[0] <= last]
                self.samples.add((start, -0.95))
                self.span((start, -0.95), max(held), unit.compute_bytes)
            if p.tier == "device" and unit.trainable and self.plan.schedule not in WHOLE:
                at = self.emit(unit.name)
                self.samples.add(at)
                self.span(at, at, unit.update_scratch_bytes)

    def static(self) -> int:
        held = sum(
            v.num_bytes for v in self.w.values.values() if v.kind in ("input", "buffer", "constant")
        )
        return held + sum(
            u.state_bytes + (0 if self.plan.units[u.name].casts else u.compute_bytes)
            for u in self.w.units
            if self.plan.units[u.name].tier == "device"
        )

    def peak(self) -> int:
        return self.static() + max(
            sum(size for first, last, size in self.spans if first <= now <= last)
            for now in self.samples
        )


@settings(max_examples=75, deadline=None)
@given(workload=workloads(), seed=st.integers(0, 9999), schedule=st.sampled_from(SCHEDULES))
def test_residency_equals_brute_force(workload: Workload, seed: int, schedule: Any) -> None:
    plan = random_plan(workload, seed, schedule)
    assert residency(lower(workload, plan)).peak_bytes == Liveness(workload, plan).peak()


@settings(max_examples=40, deadline=None)
@given(workload=workloads(), seed=st.integers(0, 9999))
def test_nothing_is_read_before_it_exists_or_after_it_died(workload: Workload, seed: int) -> None:
    program = lower(workload, random_plan(workload, seed))
    born: set[str] = set()
    for instruction in program.instructions:
        inside: set[str] = set()
        for inner in instruction.body:
            assert set(inner.reads) <= born | inside
            inside |= {name for name, _ in inner.births}
        names = {name for name, _ in instruction.births}
        assert not names & born, "a storage is born once"
        assert set(instruction.reads) <= born
        born |= names
    released: set[str] = set()
    for instruction in program.instructions:
        assert not released & set(instruction.reads)
        if instruction.kind == "release":
            released.add(instruction.name)


def groups(program: Program) -> list[list[str]]:
    """Instruction kinds around each op: what stands before it, and after the op before."""
    found: list[list[str]] = [[]]
    for instruction in program.instructions:
        if instruction.kind == "compute":
            found.append([])
        else:
            found[-1].append(instruction.kind)
    return found


@settings(max_examples=40, deadline=None)
@given(workload=workloads(), seed=st.integers(0, 9999))
def test_canonical_order(workload: Workload, seed: int) -> None:
    plan = random_plan(workload, seed)
    program = lower(workload, plan)
    rank = {kind: k for k, kind in enumerate((*AFTER, *BEFORE))}
    for kinds in groups(program):
        assert kinds == sorted(kinds, key=rank.__getitem__)
    computed = [x.name for x in program.instructions if x.kind == "compute"]
    assert computed == [op.name for op in workload.ops]
    counts: dict[str, int] = defaultdict(int)
    for instruction in program.instructions:
        counts[instruction.kind] += 1
    swapped = plan.count("swap")
    assert all(counts[k] == swapped for k in ("offload", "release", "prefetch", "wait"))
    windows = sum(len(unit.windows) for unit in plan.units.values())
    assert counts["fetch_unit"] == counts["wait_unit"] == windows
    assert counts["emit_gradients"] == sum(unit.trainable for unit in workload.units)


@settings(max_examples=40, deadline=None)
@given(workload=workloads(), seed=st.integers(0, 9999))
def test_a_unit_is_fetched_from_where_its_copy_is(workload: Workload, seed: int) -> None:
    plan = random_plan(workload, seed)
    program, predicted = lower(workload, plan), plan.prediction
    read = written = 0
    for unit in workload.units:
        p = plan.units[unit.name]
        names = {window_storage(unit.name, k) for k in range(len(p.windows))}
        fetched = [x for x in program.instructions if x.kind == "fetch_unit" and x.name in names]
        assert {x.tier for x in fetched} <= {p.copy_tier or p.tier}
        assert {x.num_bytes for x in fetched} <= {0 if p.casts else unit.compute_bytes}
        emitted = [x for x in program.instructions if (x.kind, x.name) == (EMIT, unit.name)]
        assert {x.tier for x in emitted} <= {p.tier}
        if p.tier == "ssd":
            copy = unit.compute_bytes if p.copy_tier is None else 0
            read += copy * len(p.windows) + unit.update_read_bytes * unit.trainable
            written += (unit.state_bytes - unit.accumulator_bytes + copy) * unit.trainable
    swapped = [v for v, r in plan.residuals.items() if (r.action, r.tier) == ("swap", "ssd")]
    size = sum(workload.values[v].num_bytes for v in swapped)
    assert (predicted.ssd_read_bytes, predicted.ssd_write_bytes) == (read + size, written + size)
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


@settings(max_examples=40, deadline=None)
@given(workload=workloads(), seeds=st.lists(st.integers(0, 10**6), min_size=2, max_size=4))
def test_what_was_lowered_before_is_of_no_matter(workload: Workload, seeds: list[int]) -> None:
    """Instructions of the last program are taken over where they are the same, and only there."""
    for seed in [*seeds, *seeds]:
        plan = random_plan(workload, seed, SCHEDULES[seed % len(SCHEDULES)])
        units = plan.units
        if seed % 2:  # read in host memory, where they may be
            units = {
                name: replace(unit, access="direct", windows=()) if unit.tier == "host" else unit
                for name, unit in units.items()
            }
        changed = replace(plan, units=units)
        assert lower(workload, changed) == lower(replace(workload), changed)


def test_a_region_that_reads_host_memory_is_another_one() -> None:
    w = gpt_workload(layers=1)
    here, there = (
        make_plan("recompute-all", w, HW, budget(), PlannerOptions(states=states))
        for states in ("device", "host")
    )
    units = {n: replace(unit, access="direct", windows=()) for n, unit in there.units.items()}
    for plan in (here, replace(there, units=units), here):
        assert lower(w, plan) == lower(replace(w), plan)


def test_a_small_program_by_hand() -> None:
    workload = mlp_workload()
    plan = make_plan("swap-all", workload, HW, budget(device=10**6))
    program = lower(workload, plan)
    text = [str(x) for x in program.instructions if x.kind != "compute"]
    assert text[:4] == [
        "fetch_unit b0#0 host 2048 B",
        "fetch_unit b1#0 host 2048 B",
        "wait_unit b0#0",
        "offload a0 host 8192 B",
    ]
    assert text[-5:] == [
        "emit_gradients b1 host 2048 B",
        "wait m0",
        "emit_gradients b0 host 2048 B",
        "release_gradients b0",
        "release_gradients b1",
    ]
    memory = residency(program)
    assert len(memory.series) == len(program.instructions)
    assert memory.series[memory.peak_index] == max(memory.series) == memory.peak_bytes
    assert memory.static_bytes == 4096


def change_residual(plan: Plan, v: str, **changes: Any) -> Plan:
    return replace(plan, residuals={**plan.residuals, v: replace(plan.residuals[v], **changes)})


def change_unit(plan: Plan, name: str, **changes: Any) -> Plan:
    return replace(plan, units={**plan.units, name: replace(plan.units[name], **changes)})


def broken_plans() -> list[tuple[str, Plan]]:
    workload = mlp_workload()
    good = make_plan("swap-all", workload, HW, budget())
    window = FetchWindow(fetch_before="lin1", first_use="lin0", last_use="lin1")
    early = FetchWindow(fetch_before="loss.b", first_use="loss.b", last_use="gelu1.b")
    fewer = {k: v for k, v in good.residuals.items() if k != "h1"}
    return [
        ("lacks", change_residual(good, "h1", release_after="nowhere")),
        ("lacks", change_residual(good, "h1", prefetch_before=None)),
        ("after its last use", change_residual(good, "a0", release_after="drop0")),
        ("release of a0", change_residual(good, "a0", release_after="loss.b")),
        ("before its first use", change_residual(good, "h1", prefetch_before="lin1.b")),
        ("must stand in backward", change_residual(good, "h1", prefetch_before="loss")),
        ("cannot be run again", change_residual(good, "m0", action="recompute", region="b0")),
        ("disagree on residuals", replace(good, residuals=fewer)),
        ("disagree on units", replace(good, units={})),
        ("out of order", change_unit(good, "b1", windows=(window,))),
        ("outside its windows", change_unit(good, "b1", windows=(early,))),
        ("emits before gradient", change_unit(good, "b1", emit_after="gelu1.b")),
        ("cannot live in host memory", change_unit(good, "b1", copy_tier="host")),
        ("cannot live in moon memory", change_unit(good, "b1", tier="ssd", copy_tier="moon")),
        ("before it emits", change_unit(good, "b1", release_gradients_after="gelu1.b")),
    ]


@pytest.mark.parametrize(("message", "plan"), broken_plans())
def test_broken_plans_are_refused(message: str, plan: Plan) -> None:
    with pytest.raises(PlanError, match=message):
        lower(mlp_workload(), plan)


def test_outputs_are_there_for_recompute_regions() -> None:
    """An output lives to the end of the step, so a region reads it and does not remake it."""
    ops = (
        Op(name="f0", target="f", block="b", phase="forward", reads=("x",), writes=("out",)),
        Op(name="f1", target="f", block="b", phase="forward", reads=("out",), writes=("r",)),
        Op(name="g", target="g", block="b", phase="backward", reads=("r",), writes=("d",)),
    )
    values = {v: Value(name=v, num_bytes=8) for v in ("r", "d")}
    values["x"] = Value(name="x", num_bytes=8, kind="input")
    values["out"] = Value(name="out", num_bytes=8, is_output=True)
    workload = Workload(name="w", ops=ops, values=values)
    assert workload.residuals == ("r",)
    plan = make_plan("recompute-all", workload, HW, budget(device=32))
    (region,) = regions_of(workload, plan)
    assert (region.ops, region.reads) == ((1,), ("out",))


def test_workload_queries() -> None:
    workload = gpt_workload(layers=2, dropout=True)
    assert workload.blocks == ("embed", "h0", "h1", "head")
    assert workload.inter_block == {"x0", "x1", "x2"}
    assert workload.ops[workload.num_forward_ops].name == "loss.b"
    assert workload.recompute_ops(["h0.a_gelu"], ["h0.a_up"])[0] == (workload.op_index["h0.gelu"],)
    assert workload.recompute_ops(["h0.a_mid"], ["x0", "h0.a_att"])[1] == ("h0.a_drop",)
    first, second = (sum(u.num_params for u in workload.units[:k]) for k in (1, 4))
    assert workload.num_params == second
    assert first == 128 * 64
    for before, after in itertools.pairwise(workload.residuals):
        assert workload.producer[before] <= workload.producer[after]
