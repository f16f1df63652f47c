"""The simulator: timelines worked out by hand, invariants, the closed form, trace, speed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lohan_fx.cost_model import CostOptions, IterationTime, iteration_time
from lohan_fx.errors import HardwareError, InsufficientMemoryError
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import (
    SCHEDULES,
    FetchWindow,
    Plan,
    ResidualPlan,
    Schedule,
    Tier,
    UnitPlan,
)
from lohan_fx.planners import PlannerOptions, make_plan
from lohan_fx.planners.prediction import demand_of
from lohan_fx.program import lower, residency
from lohan_fx.simulate import Rules, Simulation, simulate, step_seconds
from lohan_fx.timeline import LANES, Lane, dump_trace
from lohan_fx.workload import Unit, Workload
from tests.workloads import (
    Builder,
    _gpt_block,
    _gpt_block_backward,
    budget,
    gpt_workload,
    small_hardware,
    workloads,
)

GOLDEN = Path(__file__).parent / "golden" / "traces"
BEST = Rules()  # what the runtime does
PLAIN = Rules(urgent_first=False, eager_reads=False)

# -- timelines by hand ------------------------------------------------------------------------

CHUNK = 16 * 2**20
"""A staging buffer: SSD transfers move in these. All sizes here are chunks, all rates chunks/s."""


def machine(
    h2d: float = 1.0,
    d2h: float = 1.0,
    duplex: float | None = None,
    read: float = 1.0,
    write: float = 1.0,
    kind: Any = "cuda",
) -> HardwareProfile:
    """Chunks a second; 1 parameter/s on the CPU, 1 chunk/s of device memory."""
    return small_hardware(
        device_kind=kind,
        h2d_bytes_per_s=h2d * CHUNK,
        d2h_bytes_per_s=d2h * CHUNK,
        duplex_bytes_per_s=(h2d + d2h if duplex is None else duplex) * CHUNK,
        ssd_read_bytes_per_s=read * CHUNK,
        ssd_write_bytes_per_s=write * CHUNK,
        cpu_optimizer_params_per_s=1.0,
        device_bytes_per_s=float(CHUNK),
    )


def make_workload(
    ops: Sequence[tuple[str, float, str, str]],
    sizes: Mapping[str, int],
    units: Sequence[Unit] = (),
    parameters: Mapping[str, str] | None = None,
) -> Workload:
    """Ops are (name, seconds, what it reads, what it writes), forward if the name starts with f.

    Sizes are in chunks, 0 if absent. `parameters` are value → unit.
    """
    b = Builder("hand-made")
    b.value("x", 0, "input")
    for p, unit in (parameters or {}).items():
        b.value(p, sizes.get(p, 0) * CHUNK, "parameter", unit=unit)
    for name, _, reads, writes in ops:
        b.op(
            name,
            reads.split(),
            [(v, sizes.get(v, 0) * CHUNK) for v in writes.split()],
            block=name[1:],
            phase="forward" if name.startswith("f") else "backward",
        )
    b.units.extend(units)
    made = b.build()
    seconds = {name: s for name, s, _, _ in ops}
    return replace(made, ops=tuple(replace(op, seconds=seconds[op.name]) for op in made.ops))


def make_unit(name: str, *, params: int = 0, compute: int = 0, states: int = 0) -> Unit:
    """Sizes in chunks; a gradient is as large as the compute copy. Trains if it has params."""
    return Unit(
        name=name,
        block=name,
        parameters=(),
        num_params=params,
        compute_bytes=compute * CHUNK,
        state_bytes=states * CHUNK,
        gradient_bytes=compute * CHUNK if params else 0,
        gradients=(f"g.{name}",) if params else (),
    )


def make_the_plan(
    workload: Workload,
    residuals: Mapping[str, ResidualPlan] | None = None,
    units: Mapping[str, UnitPlan] | None = None,
    schedule: Schedule = "optimized",
) -> Plan:
    kept = {v: ResidualPlan(action="keep") for v in workload.residuals}
    return Plan(
        strategy="by hand",
        workload=workload.name,
        residuals={**kept, **(residuals or {})},
        units=units or {},
        schedule=schedule,
    )


def swap(tier: Tier, release_after: str, prefetch_before: str) -> ResidualPlan:
    return ResidualPlan(
        action="swap", tier=tier, release_after=release_after, prefetch_before=prefetch_before
    )


def spans(made: Simulation, lane: Lane) -> list[tuple[str, str, float, float]]:
    """(kind, name, start, end) of a lane, times rounded to microseconds."""
    found = made.timeline.by_lane[lane]
    return [(s.kind, s.name, round(s.start_s, 6), round(s.end_s, 6)) for s in found]


SWAP_OPS = [
    ("f0", 1.0, "x", "a"),
    ("f1", 1.0, "a", "b"),
    ("b1", 1.0, "b", "d"),
    ("b0", 1.0, "d a", "e"),
]


def test_release_and_wait_hold_compute_until_the_copy_ends() -> None:
    w = make_workload(SWAP_OPS, {"a": 4})
    plan = make_the_plan(w, {"a": swap("host", "f1", "b1")})
    made = simulate(w, plan, machine(h2d=1.0, d2h=2.0))
    assert spans(made, "d2h") == [("offload", "a", 1, 3)]
    assert spans(made, "h2d") == [("prefetch", "a", 3, 7)]
    assert spans(made, "gpu") == [
        ("compute", "f0", 0, 1),
        ("compute", "f1", 1, 2),
        ("release", "a", 2, 3),
        ("compute", "b1", 3, 4),
        ("wait", "a", 4, 7),
        ("compute", "b0", 7, 8),
    ]
    assert (made.forward_s, made.backward_s, made.optimizer_s, made.step_s) == (3, 5, 0, 8)
    assert made.exposed_transfer_s == 1 + 3
    assert made.binding == {"forward": "gpu", "backward": "h2d"}
    assert [(s.kind, s.lane, s.seconds) for s in made.timeline.stalls] == [
        ("release", "d2h", 1),
        ("wait", "h2d", 3),
    ]
    host = [(0.0, 0), (1.0, 4 * CHUNK), (7.0, 0)]
    assert made.series["host"] == tuple(host)
    assert made.series["device"][0] == (0.0, 4 * CHUNK)
    assert made.peaks["device"] == made.device.peak_bytes == 4 * CHUNK


def fetch_workload() -> tuple[Workload, Plan]:
    """A residual leaves while a unit comes in: 4 chunks each, from second 1 on."""
    unit = make_unit("u", compute=4)
    ops = [("f0", 1.0, "x", "a"), ("f1", 1.0, "a w", "b"), ("b0", 1.0, "b a", "d")]
    w = make_workload(ops, {"a": 4}, [unit], {"w": "u"})
    windows = (FetchWindow(fetch_before="f1", first_use="f1", last_use="f1"),)
    units = {"u": UnitPlan(tier="host", windows=windows)}
    return w, make_the_plan(w, {"a": swap("host", "f1", "b0")}, units)


def test_both_directions_share_the_duplex_rate_while_both_work() -> None:
    w, plan = fetch_workload()
    # Alone 2 and 4 chunks/s; together 2/6 and 4/6 of 3 chunks/s, half of it: h2d is done at
    # 1 + 4/2, when d2h has 2 of 4 chunks left, which take 1 s at full speed.
    made = simulate(w, plan, machine(h2d=4.0, d2h=2.0, duplex=3.0))
    assert spans(made, "h2d")[0] == ("fetch_unit", "u#0", 1, 3)
    assert spans(made, "d2h") == [("offload", "a", 1, 4)]
    apart = simulate(w, plan, machine(h2d=4.0, d2h=2.0))
    assert spans(apart, "h2d")[0] == ("fetch_unit", "u#0", 1, 2)
    assert spans(apart, "d2h") == [("offload", "a", 1, 3)]


def test_an_ssd_transfer_passes_link_and_ssd_chunk_by_chunk() -> None:
    w = make_workload(SWAP_OPS, {"a": 4})
    plan = make_the_plan(w, {"a": swap("ssd", "f1", "b1")})
    made = simulate(w, plan, machine(h2d=1.0, d2h=2.0, read=2.0, write=1.0))
    # Copies of half a second each from 1; the write of the first starts when it is copied.
    assert spans(made, "d2h") == [("offload", "a", 1, 3)]
    # The reload, asked for at 3, waits for the last write, and is read as fast as the link takes.
    assert spans(made, "ssd") == [("offload", "a", 1.5, 5.5), ("prefetch", "a", 5.5, 7.5)]
    assert spans(made, "h2d") == [("prefetch", "a", 6, 10)]
    assert made.step_s == 11
    assert made.series["ssd"] == ((0.0, 0), (1.0, 4 * CHUNK), (10.0, 0))


def test_staging_buffers_bound_what_is_between_link_and_ssd() -> None:
    w = make_workload(SWAP_OPS, {"a": 12})
    plan = make_the_plan(w, {"a": swap("ssd", "f1", "b1")})
    made = simulate(w, plan, machine(h2d=12.0, d2h=10.0, read=12.0, write=1.0))
    copies = spans(made, "d2h")
    # Eight buffers: the ninth copy starts when the first write ends, 1.1 + 1.
    assert copies[0] == ("offload", "a", 1, 1.8)
    assert [start for _, _, start, _ in copies[1:]] == [2.1, 3.1, 4.1, 5.1]
    assert spans(made, "gpu")[2] == ("release", "a", 2, 5.2)
    # Four reads ahead of the link, which then are as fast as each other.
    assert spans(made, "ssd")[1] == ("prefetch", "a", 13.1, 14.1)


def test_on_cuda_a_host_copy_passes_an_ssd_copy_that_is_still_reading() -> None:
    ops = [("f0", 1.0, "x", "a b"), ("b1", 0.0, "a", "d"), ("b0", 1.0, "d b", "e")]
    w = make_workload(ops, {"a": 4, "b": 4})
    plan = make_the_plan(w, {"a": swap("ssd", "f0", "b1"), "b": swap("host", "f0", "b1")})
    rates: dict[str, Any] = {"h2d": 4.0, "d2h": 4.0, "read": 1.0, "write": 4.0}
    cuda = simulate(w, plan, machine(**rates))
    # Offload: b goes on the stream while the first chunk of a is copied.
    assert spans(cuda, "d2h")[:2] == [("offload", "a", 1, 1.25), ("offload", "b", 1.25, 2.25)]
    assert spans(cuda, "h2d") == [
        ("prefetch", "b", 3, 4),
        *(("prefetch", "a", 4.25 + k, 4.5 + k) for k in range(4)),
    ]
    # On a CPU device one thread copies all, in order.
    cpu = simulate(w, plan, machine(**rates, kind="cpu"))
    assert spans(cpu, "d2h") == [("offload", "a", 1, 2), ("offload", "b", 2, 3)]
    assert spans(cpu, "h2d")[-2:] == [("prefetch", "a", 7, 7.25), ("prefetch", "b", 7.25, 8.25)]


def update_workload(
    num_units: int, backward_s: float, *, params: int = 1, states: int = 2
) -> Workload:
    """Units u0, u1, …: one backward op each, the last unit first."""
    units = [make_unit(f"u{k}", params=params, compute=1, states=states) for k in range(num_units)]
    ops = [("f0", 1.0, "x", "a")]
    ops += [(f"b{k}", backward_s, "a", f"g.u{k}") for k in reversed(range(num_units))]
    return make_workload(ops, {}, units)


def updates(workload: Workload, tier: Tier, schedule: Schedule, **rates: Any) -> Simulation:
    """Gradients are released after the last op; d2h 2 chunks/s, SSD 1 read, 1 write."""
    end = workload.ops[-1].name
    units = {
        u.name: UnitPlan(
            tier=tier,
            emit_after=f"b{u.name[1:]}",
            release_gradients_after=None if tier == "device" else end,
        )
        for u in workload.units
    }
    rules = rates.pop("rules", None)
    plan = make_the_plan(workload, units=units, schedule=schedule)
    return simulate(workload, plan, machine(d2h=2.0, **rates), rules=rules)


def test_serial_updates_units_one_by_one_after_backward() -> None:
    made = updates(update_workload(3, 1.0), "ssd", "serial")
    assert spans(made, "d2h") == [
        ("emit_gradients", "u2", 2, 2.5),
        ("emit_gradients", "u1", 3, 3.5),
        ("emit_gradients", "u0", 4, 4.5),
    ]
    assert spans(made, "gpu")[-2:] == [
        ("release_gradients", "u0", 4, 4.5),
        ("join", "optimizer.step", 4.5, 22.5),
    ]
    # Each unit: read 2, update 1, write 3 (states and compute copy).
    assert spans(made, "ssd")[:3] == [
        ("read_states", "u2", 4.5, 6.5),
        ("write_states", "u2", 7.5, 10.5),
        ("read_states", "u1", 10.5, 12.5),
    ]
    assert spans(made, "cpu")[0] == ("update", "u2", 6.5, 7.5)
    assert (made.forward_s, made.backward_s, made.optimizer_s) == (1, 3.5, 18)
    assert made.timeline.phases == {
        "forward": (0, 1),
        "backward": (1, 4.5),
        "optimizer": (4.5, 22.5),
    }


def test_naive_updates_on_arrival_and_a_full_ring_holds_backward() -> None:
    made = updates(update_workload(3, 1.0), "ssd", "naive")
    # u2: read 2.5-4.5, update, written at 8.5. Until then u2 and u1 hold both buffers.
    assert spans(made, "gpu")[4:] == [
        ("emit_gradients", "u0", 4, 8.5),
        ("release_gradients", "u0", 8.5, 9),
        ("join", "optimizer.step", 9, 20.5),
    ]
    assert spans(made, "cpu") == [
        ("update", "u2", 4.5, 5.5),
        ("update", "u1", 10.5, 11.5),
        ("update", "u0", 16.5, 17.5),
    ]
    assert made.timeline.stalls[0].lane == "ssd"


def test_optimized_reads_ahead_and_writes_behind() -> None:
    made = updates(update_workload(3, 1.0), "ssd", "optimized")
    assert spans(made, "ssd") == [
        ("read_states", "u2", 1, 3),
        ("read_states", "u1", 3, 5),
        ("read_states", "u0", 5, 7),
        ("write_states", "u2", 7, 10),  # asked for at 4
        ("write_states", "u1", 10, 13),
        ("write_states", "u0", 13, 16),
    ]
    assert spans(made, "cpu") == [
        ("update", "u2", 3, 4),
        ("update", "u1", 5, 6),
        ("update", "u0", 7, 8),
    ]
    assert (made.backward_s, made.optimizer_s, made.step_s) == (3.5, 11.5, 16)


def test_optimized_has_three_buffers_for_states() -> None:
    made = updates(update_workload(4, 1.0), "ssd", "optimized")
    # u0 gets a buffer when u3 is written, at 12; the writes of u2 and u1 were asked for before.
    assert spans(made, "ssd")[3:] == [
        ("write_states", "u3", 7, 10),
        ("write_states", "u2", 10, 13),
        ("write_states", "u1", 13, 16),
        ("read_states", "u0", 16, 18),
        ("write_states", "u0", 19, 22),
    ]


def test_eager_reads_do_not_wait_for_the_next_gradient() -> None:
    def read_u0(rules: Rules) -> float:
        made = updates(update_workload(4, 10.0), "ssd", "optimized", rules=rules)
        return next(start for kind, name, start, _ in spans(made, "ssd") if name == "u0")

    # u3's gradient is there at 11.5, it is written at 15.5; u2 is updated at 22.5, and its write
    # is asked for before the read of u0.
    assert read_u0(Rules(urgent_first=False)) == 15.5
    assert read_u0(PLAIN) == 25.5


def test_a_full_gradient_ring_holds_emission_in_host_memory_too() -> None:
    made = updates(update_workload(3, 1.0, params=5), "host", "optimized")
    assert spans(made, "cpu") == [
        ("update", "u2", 2.5, 7.5),
        ("update", "u1", 7.5, 12.5),
        ("update", "u0", 12.5, 17.5),
    ]
    assert spans(made, "gpu")[4:6] == [
        ("emit_gradients", "u0", 4, 7.5),
        ("release_gradients", "u0", 7.5, 8),
    ]
    assert spans(made, "ssd") == []


@pytest.mark.parametrize(("schedule", "start"), [("optimized", 2.0), ("naive", 2.0), ("serial", 3)])
def test_resident_units_are_updated_by_the_device(schedule: Schedule, start: float) -> None:
    made = updates(update_workload(2, 1.0), "device", schedule)
    # 2 * (2 of states + 1 of copy) + 1 of gradient = 7 chunks, at 1 chunk/s.
    ours = [s for s in spans(made, "gpu") if s[0] == "update"]
    assert ours[0] == ("update", "u1", start, start + 7)
    assert made.step_s == 1 + 2 + 14
    assert made.timeline.by_lane["d2h"] == made.timeline.by_lane["cpu"] == ()
    assert made.optimizer_s == (14 if schedule == "serial" else 0)


def mixed_ssd() -> tuple[Workload, Plan]:
    """u1's states (8 chunks) are read from second 1; the copy of v (1 chunk) is fetched at 2."""
    units = [make_unit("u", params=1, compute=1, states=8), make_unit("v", compute=1)]
    ops = [
        ("f0", 1.0, "x", "a"),
        ("b2", 1.0, "a", "d"),
        ("b1", 1.0, "d w", "e"),
        ("b0", 1.0, "e", "g.u"),
    ]
    w = make_workload(ops, {}, units, {"w": "v"})
    window = FetchWindow(fetch_before="b1", first_use="b1", last_use="b1")
    plans = {
        "u": UnitPlan(tier="ssd", emit_after="b0", release_gradients_after="b0"),
        "v": UnitPlan(tier="ssd", windows=(window,)),
    }
    return w, make_the_plan(w, units=plans)


def test_the_ssd_serves_in_order_or_what_is_urgent_first() -> None:
    w, plan = mixed_ssd()
    made = simulate(w, plan, machine(), rules=PLAIN)
    assert spans(made, "ssd")[:2] == [("read_states", "u", 1, 9), ("fetch_unit", "v#0", 9, 10)]
    assert made.timeline.stalls[0].name == "v#0"
    assert made.timeline.stalls[0].lane == "ssd"
    urgent = simulate(w, plan, machine(), rules=Rules(eager_reads=False))
    assert spans(urgent, "ssd")[:3] == [
        ("read_states", "u", 1, 2),
        ("fetch_unit", "v#0", 2, 3),
        ("read_states", "u", 3, 10),
    ]
    assert [s.num_bytes for s in urgent.timeline.by_lane["ssd"][:3]] == [
        CHUNK,
        CHUNK,
        7 * CHUNK,
    ]
    assert urgent.traffic == made.traffic


def test_compute_that_reaches_into_host_memory_is_busy_and_comes_first() -> None:
    units = [make_unit("u", params=4, compute=1), make_unit("v", compute=4)]
    ops = [("f0", 1.0, "x", "a"), ("f1", 1.0, "a w", "b"), ("f2", 1.0, "b v", "c")]
    w = make_workload(
        [*ops, ("b0", 1.0, "c a", "g.u")], {"w": 4, "g.u": 1}, units, {"w": "u", "v": "v"}
    )
    window = FetchWindow(fetch_before="f0", first_use="f2", last_use="f2")
    plans = {
        "u": UnitPlan(tier="host", emit_after="b0", access="direct", gradients="direct"),
        "v": UnitPlan(tier="host", windows=(window,)),
    }
    made = simulate(w, make_the_plan(w, units=plans), machine(h2d=2.0, d2h=2.0))
    # The fetch of 4 chunks has 2 chunks left when f1 reads 4 chunks of w.
    assert spans(made, "h2d") == [
        ("fetch_unit", "v#0", 0, 1),
        ("direct_read", "f1", 1, 3),
        ("fetch_unit", "v#0", 3, 4),
    ]
    assert spans(made, "gpu")[:4] == [
        ("compute", "f0", 0, 1),
        ("direct_read", "f1", 1, 3),
        ("compute", "f1", 3, 4),
        ("compute", "f2", 4, 5),
    ]
    assert spans(made, "gpu")[-2:] == [
        ("write_gradient", "g.u@u", 6, 6.5),
        ("join", "optimizer.step", 6.5, 10.5),
    ]
    assert spans(made, "cpu") == [("update", "u", 6.5, 10.5)]
    assert (made.traffic.h2d_bytes, made.traffic.d2h_bytes) == (8 * CHUNK, CHUNK)


def test_warm_start_skips_what_is_fetched_before_the_first_op() -> None:
    unit = make_unit("u", compute=3)
    w = make_workload([("f0", 1.0, "x w", "a"), ("b0", 1.0, "a", "d")], {}, [unit], {"w": "u"})
    window = FetchWindow(fetch_before="f0", first_use="f0", last_use="f0")
    plan = make_the_plan(w, units={"u": UnitPlan(tier="ssd", windows=(window,))})
    cold, warm = (simulate(w, plan, machine(), warm_start=warm) for warm in (False, True))
    assert (cold.step_s, warm.step_s) == (1 + 3 + 2, 2)  # the last chunk passes the link alone
    assert cold.traffic == warm.traffic
    assert warm.traffic.ssd_read_bytes == 3 * CHUNK


# -- what holds of every simulation ---------------------------------------------------------

every_option = st.builds(
    PlannerOptions,
    states=st.sampled_from(("auto", "device", "host", "ssd")),
    swap_to=st.sampled_from(("auto", "host", "ssd")),
    schedule=st.sampled_from(SCHEDULES),
    copies=st.sampled_from(("states", "host")),
)
every_rule = st.builds(Rules, urgent_first=st.booleans(), eager_reads=st.booleans())
strategies = st.sampled_from(("swap-all", "lohan", "random", "keep-all", "recompute-all"))


def plan_for(strategy: str, workload: Workload, options: PlannerOptions, tight: float) -> Plan:
    """A plan within a budget between the smallest and the largest; swap-all if nothing else."""
    hw = small_hardware()
    everything = make_plan("keep-all", workload, hw, budget(), options).prediction
    least = make_plan("swap-all", workload, hw, budget(), options).prediction
    span = everything.peak_device_bytes - least.peak_device_bytes
    limit = budget(device=least.peak_device_bytes + max(0, int(tight * span)))
    try:
        return make_plan(strategy, workload, hw, limit, options)
    except InsufficientMemoryError:
        return make_plan("swap-all", workload, hw, budget(), options)


@settings(max_examples=75, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    workload=workloads(),
    options=every_option,
    strategy=strategies,
    tight=st.floats(0, 1),
    rules=every_rule,
    kind=st.sampled_from(("cpu", "cuda")),
    duplex=st.sampled_from((2.5e10, 4e10)),
    warm_start=st.booleans(),
)
def test_invariants(
    workload: Workload,
    options: PlannerOptions,
    strategy: str,
    tight: float,
    rules: Rules,
    kind: Any,
    duplex: float,
    warm_start: bool,
) -> None:
    plan = plan_for(strategy, workload, options, tight)
    hw = small_hardware(device_kind=kind, duplex_bytes_per_s=duplex)
    made = simulate(workload, plan, hw, rules=rules, warm_start=warm_start)
    line, prediction = made.timeline, plan.prediction
    # A lane does one thing at a time, and something always goes on.
    for lane in LANES:
        for before, after in zip(line.by_lane[lane], line.by_lane[lane][1:], strict=False):
            assert before.end_s <= after.start_s
    work = sorted((s.start_s, s.end_s) for s in line.spans if not s.stall)
    reached = 0.0
    for start, end in work:
        assert start <= reached * (1 + 1e-9) + 1e-15
        reached = max(reached, end)
    assert reached == pytest.approx(made.step_s)
    # Every byte and every storage is accounted for.
    for link in ("d2h", "h2d", "ssd_read", "ssd_write"):
        assert getattr(made.traffic, f"{link}_bytes") == getattr(prediction, f"{link}_bytes")
    assert made.peaks == {
        "device": prediction.peak_device_bytes,
        "host": prediction.peak_host_bytes,
        "ssd": prediction.peak_ssd_bytes,
    }
    # The step is no shorter than any lane's work, and is the sum of its phases.
    assert made.step_s >= max(line.busy_s(lane) for lane in LANES) * (1 - 1e-9)
    assert made.step_s == pytest.approx(made.forward_s + made.backward_s + made.optimizer_s)
    phases = {"forward": made.forward_s, "backward": made.backward_s}
    for phase, seconds in phases.items():
        start, end = line.phases[phase]  # type: ignore[index]
        assert end - start == pytest.approx(seconds, abs=1e-12)
    gpu = sum(op.seconds for op in workload.ops)
    assert line.busy_s("gpu") >= gpu * (1 - 1e-9)
    stalled = sum(s.seconds for s in line.stalls)
    assert line.busy_s("gpu") + stalled == pytest.approx(made.step_s)
    assert simulate(workload, plan, hw, rules=rules, warm_start=warm_start) == made
    assert step_seconds(workload, plan, hw) == simulate(workload, plan, hw).step_s


RATES = ("h2d_bytes_per_s", "d2h_bytes_per_s", "cpu_optimizer_params_per_s", "device_bytes_per_s")


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    workload=workloads(),
    schedule=st.sampled_from(SCHEDULES),
    states=st.sampled_from(("device", "host")),
    strategy=strategies,
    rate=st.sampled_from(RATES),
    factor=st.floats(1, 100),
)
def test_without_ssds_a_faster_machine_is_never_slower(
    workload: Workload, schedule: Schedule, states: Any, strategy: str, rate: str, factor: float
) -> None:
    """Host memory only, full duplex: every queue is fed in program order, so the step is a sum
    along a longest path. With SSDs, or a link whose directions share a rate, it need not hold:
    a transfer that is ready earlier may go before another that compute needs more."""
    options = PlannerOptions(states=states, swap_to="host", schedule=schedule)
    plan = plan_for(strategy, workload, options, 0.5)
    hw = small_hardware(duplex_bytes_per_s=1e15)
    faster = hw.replace(**{rate: factor * getattr(hw, rate)})
    slow, fast = (simulate(workload, plan, m).step_s for m in (hw, faster))
    assert fast <= slow * (1 + 1e-9)


def test_a_faster_link_can_be_slower_with_ssds() -> None:
    """The gradient arrives earlier, so that the read of 8 chunks of states (schedule "naive")
    comes before the fetch that a long op waits for."""
    units = [make_unit("u", params=1, compute=1, states=8), make_unit("v", compute=1)]
    ops = [("f0", 1.0, "x", "a"), ("b2", 1.0, "a", "g.u"), ("b1", 0.5, "a", "d")]
    w = make_workload([*ops, ("b0", 20.0, "d w", "e")], {}, units, {"w": "v"})
    window = FetchWindow(fetch_before="b0", first_use="b0", last_use="b0")
    plans = {
        "u": UnitPlan(tier="ssd", emit_after="b2", release_gradients_after="b0"),
        "v": UnitPlan(tier="ssd", windows=(window,)),
    }
    plan = make_the_plan(w, units=plans, schedule="naive")
    slow, fast = (simulate(w, plan, machine(d2h=rate), rules=PLAIN).step_s for rate in (1.0, 4.0))
    assert slow == 2.5 + 1 + 1 + 20
    assert fast == 2.25 + 8 + 1 + 1 + 20
    urgent = [
        simulate(w, plan, machine(d2h=rate), rules=Rules(eager_reads=False)).step_s
        for rate in (1.0, 4.0)
    ]
    assert urgent == [slow, slow]


def test_a_plan_for_ssds_needs_them() -> None:
    w, plan = mixed_ssd()
    with pytest.raises(HardwareError, match="has no SSDs"):
        simulate(w, plan, small_hardware(ssd=False))


# -- the closed form ------------------------------------------------------------------------

SIZES = {"13B": (40, 5120, 40), "175B": (96, 12288, 96)}
"""LoHan, Table IV: layers, hidden dimension, heads."""


def paper_gpt(size: str, batch: int, hw: HardwareProfile) -> Workload:
    """A GPT of Table IV at sequence 1024, vocabulary 50257: the ops and bytes of each block, the
    head and loss as one op that keeps no logits. An op takes FLOPs / THP_G, as in Eq. 2."""
    layers, hidden, heads = SIZES[size]
    seq, vocab = 1024, 50257
    b = Builder(f"gpt-{size}-{batch}")
    tokens, square = batch * seq, hidden * hidden
    act, flops = 2 * tokens * hidden, 2 * tokens * vocab * hidden
    b.value("ids", 8 * tokens, "input")
    b.unit("embed", "embed", {"wte": vocab * hidden})
    widths = {"ln1": hidden, "qkv": 3 * square, "proj": square, "ln2": hidden}
    widths |= {"up": 4 * square, "down": 4 * square}
    for k in range(layers):
        b.unit(f"h{k}", f"h{k}", {f"h{k}.{p}": n for p, n in widths.items()})
    b.unit("head", "head", {"lm_head": vocab * hidden})
    x = b.op("embed", ["ids", "wte"], [("x0", act)], block="embed")
    saved = []
    for k in range(layers):
        x, names = _gpt_block(b, k, x, tokens, hidden, heads, batch, seq, False)
        saved.append(names)
    reads = [x, "lm_head", "ids"]
    b.op("loss", reads, [("loss", 4)], block="head", flops=flops, output=True)
    writes = [("d.x", act), ("grad.lm_head", 2 * vocab * hidden)]
    b.op("loss.b", reads, writes, block="head", phase="backward", flops=2 * flops)
    d = "d.x"
    for k in reversed(range(layers)):
        d = _gpt_block_backward(b, k, saved[k], d, tokens, hidden)
    grad = [("grad.wte", 2 * vocab * hidden)]
    b.op("embed.b", [d, "ids"], grad, block="embed", phase="backward")
    made = b.build()
    rate = hw.block_flops_per_s
    return replace(made, ops=tuple(replace(op, seconds=op.flops / rate) for op in made.ops))


def both(
    size: str, batch: int, rules: Rules, ssds: int = 12, **options: Any
) -> tuple[Simulation, IterationTime]:
    hw = HardwareProfile.preset(f"rtx4090-{ssds}xp5510")
    w = paper_gpt(size, batch, hw)
    asked = PlannerOptions(**{"states": "ssd", **options})
    plan = make_plan("lohan", w, hw, MemoryBudget.from_request(hw), asked)
    program = lower(w, plan)
    cost = CostOptions()
    closed = iteration_time(hw, demand_of(w, plan, program), cost, plan.schedule)
    return simulate(w, plan, hw, program=program, rules=rules), closed


@pytest.mark.parametrize(
    ("size", "batch"),
    [("13B", 8), ("13B", 16), ("13B", 32), ("13B", 64), ("13B", 128), ("175B", 8), ("175B", 16)],
)
def test_closed_form_and_simulation_agree(size: str, batch: int) -> None:
    """Within 3% when the SSDs serve first what compute waits for; never below the closed form."""
    made, closed = both(size, batch, BEST)
    assert 1 - 1e-9 <= made.step_s / closed.step_s <= 1.03


@pytest.mark.parametrize(
    ("size", "batch", "at_least"), [("13B", 32, 1.10), ("175B", 8, 1.05), ("175B", 16, 1.15)]
)
def test_what_the_runtimes_order_of_ssd_requests_costs(
    size: str, batch: int, at_least: float
) -> None:
    """With the runtime's present rules fetches queue behind whole units of states, and the SSDs
    idle while the optimizer waits for a gradient: the closed form, which knows no queues, is too
    optimistic where SSD and device are about equally busy."""
    made, closed = both(size, batch, PLAIN)
    assert at_least <= made.step_s / closed.step_s <= 1.25
    assert made.timeline.stalls
    worst = max(made.timeline.stalls, key=lambda s: s.seconds if s.kind != "join" else 0.0)
    assert (worst.kind, worst.lane) == ("wait_unit", "ssd")


@pytest.mark.parametrize(("schedule", "limit"), [("serial", 1.02), ("naive", 1.03)])
def test_the_other_schedules_agree_too(schedule: Schedule, limit: float) -> None:
    for batch in (8, 64):
        made, closed = both("13B", batch, PLAIN, schedule=schedule)
        assert 1 - 1e-9 <= made.step_s / closed.step_s <= limit


# -- trace and speed ------------------------------------------------------------------------


def test_golden_trace(request: pytest.FixtureRequest) -> None:
    w, plan = fetch_workload()
    text = dump_trace(simulate(w, plan, machine(h2d=4.0, d2h=2.0, duplex=3.0)).timeline)
    path = GOLDEN / "fetch.json"
    if request.config.getoption("--regen-golden"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("layers", [100, pytest.param(545, marks=pytest.mark.slow)])
def test_thousands_of_ops(layers: int) -> None:
    w = gpt_workload(layers=layers, hidden=64, batch=8, seq=512)
    assert len(w.ops) > 13_000 * layers // 545
    hw = small_hardware(device_bytes=2**40, host_bytes=2**40)
    limit = budget(2**40, 2**40, 2**40)
    options = PlannerOptions(states="ssd", swap_to="ssd")
    plan = make_plan("swap-all", w, hw, limit, options)
    program = lower(w, plan)
    memory = residency(program)
    made = simulate(w, plan, hw, program=program, memory=memory, rules=BEST)
    assert made.traffic.ssd_read_bytes == plan.prediction.ssd_read_bytes
    assert made.num_events > 20_000 * layers // 545


def test_simulating_leaves_torch_out() -> None:
    code = "import sys, lohan_fx.simulate, lohan_fx.timeline; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
