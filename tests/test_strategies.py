"""The papers' strategies: each one's defining rule on workloads made by hand, and all together."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lohan_fx.errors import InsufficientMemoryError, PlanError
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import SCHEDULES, Plan
from lohan_fx.planners import PlannerOptions, combine, get, make_plan, names
from lohan_fx.planners.capuchin import free_time_s, hybrid
from lohan_fx.planners.chen_sqrt import articulation_points, checkpoints
from lohan_fx.planners.clock import Clock
from lohan_fx.planners.flashneuron import offload_in_forward_order
from lohan_fx.planners.fuyou import by_priority, schedule_activations, swap_scale
from lohan_fx.planners.g10 import DELTA, LATENCY_S, Slots, migrate, ssd_interval_s
from lohan_fx.planners.go_memferry import go_memferry, most_time_won
from lohan_fx.planners.memferry import ForwardPlan, LayerTimes, greedy_reload
from lohan_fx.planners.prefix import swap_prefix
from lohan_fx.planners.recompute_cost import Layer, layers_of
from lohan_fx.planners.schedule import must_save
from lohan_fx.planners.ssdtrain import Transfers, hidden_amount, last_module, lifespan_s, ssdtrain
from lohan_fx.planners.strategy import Setting, Strategy, place, with_defaults
from lohan_fx.workload import Op, Value, Workload
from tests.test_planners import check, print_plan
from tests.workloads import (
    Builder,
    budget,
    gpt_workload,
    small_hardware,
    workloads,
)

STRATEGIES = (
    "capuchin",
    "chen-sqrt",
    "colossal-ai",
    "flashneuron",
    "fuyou",
    "g10",
    "go-memferry",
    "lohan+capuchin",
    "lohan+g10",
    "lohan+zero",
    "memferry",
    "ssdtrain",
    "zero-infinity",
    "zero-offload",
)
HW = small_hardware()
GOLDEN = Path(__file__).parent / "golden" / "plans"
RESIDENT = PlannerOptions(states="device")


def setting(
    workload: Workload,
    hw: HardwareProfile = HW,
    limit: MemoryBudget | None = None,
    strategy: str = "test",
    options: PlannerOptions = RESIDENT,
) -> Setting:
    """What a strategy's policies would be given."""
    limit = limit or budget()
    planner = get(strategy) if strategy != "test" else None
    if isinstance(planner, Strategy):
        options = with_defaults(
            options, states=planner.states, swap_to=planner.swap_to, schedule=planner.schedule
        )
    return Setting(
        name=strategy,
        workload=workload,
        hw=hw,
        budget=limit,
        options=options,
        tiers=place(workload, hw, limit, options),
    )


def of(plan: Plan, action: str) -> set[str]:
    return {v for v, r in plan.residuals.items() if r.action == action}


def chain(sizes: list[int], forward_s: float = 1.0, backward_s: float = 2.0) -> Workload:
    """Blocks x → r0 → r1 → …; backward op b_i reads r_i. No parameters, no FLOPs."""
    ops, values = [], {"x": Value(name="x", num_bytes=0, kind="input")}
    before = "x"
    for i, size in enumerate(sizes):
        values[f"r{i}"] = Value(name=f"r{i}", num_bytes=size, block=f"m{i}")
        ops.append(_op(f"f{i}", "forward", i, (before,), f"r{i}", forward_s))
        before = f"r{i}"
    values["loss"] = Value(name="loss", num_bytes=0, is_output=True)
    ops.append(_op("loss", "forward", len(sizes) - 1, (before,), "loss", 0.0))
    before = "loss"
    for i in reversed(range(len(sizes))):
        values[f"d{i}"] = Value(name=f"d{i}", num_bytes=0)
        ops.append(_op(f"b{i}", "backward", i, (before, f"r{i}"), f"d{i}", backward_s))
        before = f"d{i}"
    return Workload(name="chain", ops=tuple(ops), values=values)


def _op(name: str, phase: Any, block: int, reads: Any, writes: str, seconds: float) -> Op:
    return Op(
        name=name,
        target="f",
        block=f"m{block}",
        phase=phase,
        reads=reads,
        writes=(writes,),
        seconds=seconds,
    )


def few_rows(workload: Workload, name: str, num_bytes: int) -> Workload:
    """The op reads that much, and not all of its parameters: a gather."""
    ops = (replace(op, bytes_read=num_bytes) if op.name == name else op for op in workload.ops)
    return replace(workload, ops=tuple(ops))


def slow_hardware(**changes: float) -> HardwareProfile:
    """One byte a second everywhere, unless changed."""
    rates: dict[str, Any] = {
        "h2d_bytes_per_s": 1.0,
        "d2h_bytes_per_s": 1.0,
        "duplex_bytes_per_s": 2.0,
        "ssd_read_bytes_per_s": 1.0,
        "ssd_write_bytes_per_s": 1.0,
    }
    return small_hardware(**{**rates, **changes})


# -- every strategy ----------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    workload=workloads(),
    options=st.builds(
        PlannerOptions,
        states=st.sampled_from(("auto", "device", "host", "ssd")),
        swap_to=st.sampled_from(("auto", "host", "ssd")),
        schedule=st.sampled_from(("auto", *SCHEDULES)),
    ),
    part=st.floats(0, 1.1),
)
def test_any_plan_fits_and_equals_its_prediction(
    strategy: str, workload: Workload, options: PlannerOptions, part: float
) -> None:
    roomy = make_plan(strategy, workload, HW, budget(), options)
    check(workload, roomy, budget())
    limit = budget(device=int(roomy.prediction.peak_device_bytes * part))
    try:
        plan = make_plan(strategy, workload, HW, limit, options)
    except InsufficientMemoryError as error:
        assert error.tier == "device"
        assert error.need_bytes > error.have_bytes
        assert error.at_peak
        return
    check(workload, plan, limit)
    assert plan.strategy == strategy
    assert plan == make_plan(strategy, workload, HW, limit, options)


@settings(max_examples=30, deadline=None)
@given(
    workload=workloads(),
    host=st.integers(0, 400_000),
    ssd=st.booleans(),
    device=st.integers(10_000, 200_000),
)
def test_small_tiers_fail_by_name_or_fit(
    workload: Workload, host: int, ssd: bool, device: int
) -> None:
    limit = budget(device=device, host=host, ssd=200_000 if ssd else 0)
    hw = small_hardware(ssd=ssd)
    for strategy in STRATEGIES:
        try:
            plan = make_plan(strategy, workload, hw, limit)
        except InsufficientMemoryError as error:
            assert error.need_bytes > error.have_bytes
            assert str(error).startswith(f"not enough {error.tier} memory")
        except PlanError as error:
            assert not ssd
            assert "no SSDs" in str(error)
        else:
            check(workload, plan, limit)


def test_all_are_registered() -> None:
    assert set(STRATEGIES) <= set(names())


def ladder_workload() -> Workload:
    """Three blocks of two layers, a unit at each end; f0 is a gather. For golden plans."""
    b = Builder("ladder")
    b.value("x", 4096, "input")
    b.unit("first", "b0", {"w": 1024})
    b.unit("last", "b2", {"v": 1024})
    weights = {0: ["w"], 5: ["v"]}
    before = "x"
    for k in range(6):
        reads = [before, *weights.get(k, ())]
        flops = 4_000_000 if k else 0
        before = b.op(f"f{k}", reads, [(f"r{k}", 8192)], block=f"b{k // 2}", flops=flops)
    b.op("loss", [before], [("loss", 4)], block="b2", output=True)
    d = b.op("loss.b", [before], [("d6", 8192)], block="b2", phase="backward")
    for k in reversed(range(6)):
        reads = [d, "x" if k == 0 else f"r{k - 1}", f"r{k}", *weights.get(k, ())]
        writes = [(f"d{k}", 8192), *((f"grad.{p}", 2048) for p in weights.get(k, ()))]
        d = b.op(f"b{k}", reads, writes, block=f"b{k // 2}", phase="backward", flops=8_000_000)
    return few_rows(b.build(), "f0", 512)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_golden_plans(strategy: str, request: pytest.FixtureRequest) -> None:
    workload = ladder_workload()
    planner = {"go-memferry": go_memferry(reserve=0.5)}.get(strategy, get(strategy))
    resident = getattr(planner, "states", None) == "device"
    limit = budget(device=86_000 if resident or "memferry" in strategy else 62_000)
    text = print_plan(workload, make_plan(planner, workload, HW, limit))
    assert text.count("\n") <= 25
    path = GOLDEN / f"{strategy}.txt"
    if request.config.getoption("--regen-golden"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


# -- the axes ----------------------------------------------------------------------------------


def test_a_strategys_axes_are_defaults() -> None:
    workload = gpt_workload()
    plan = make_plan("zero-infinity", workload, HW, budget())
    assert plan.schedule == "serial"
    assert {u.tier for u in plan.units.values()} == {"ssd"}
    assert {r.tier for r in plan.residuals.values() if r.action == "swap"} == {"host"}
    other = PlannerOptions(states="host", swap_to="ssd", schedule="naive")
    plan = make_plan("zero-infinity", workload, HW, budget(), other)
    assert plan.schedule == "naive"
    assert {u.tier for u in plan.units.values()} == {"host"}
    assert {r.tier for r in plan.residuals.values() if r.action == "swap"} == {"ssd"}
    assert make_plan("lohan", workload, HW, budget()).schedule == "optimized"


@pytest.mark.parametrize("name", ["zero-infinity", "capuchin", "g10", "recompute-all", "swap-all"])
def test_lohan_with_anothers_activations(name: str) -> None:
    """§V-E: the activations of one, the states and the schedule of LoHan."""
    workload = gpt_workload(layers=4, hidden=64, batch=4)
    limit = budget(device=900_000)
    plan = make_plan(combine(name), workload, HW, limit)
    alone = make_plan(name, workload, HW, limit, PlannerOptions(states="host"))
    lohan = make_plan("lohan", workload, HW, limit)
    assert plan.strategy == f"{name}[auto,optimized]"
    assert plan.schedule == lohan.schedule
    assert [u.tier for u in plan.units.values()] == [u.tier for u in lohan.units.values()]
    assert of(plan, "swap") == of(alone, "swap")
    assert of(plan, "recompute") == of(alone, "recompute")
    named = {"zero-infinity": "lohan+zero", "capuchin": "lohan+capuchin", "g10": "lohan+g10"}
    if name in named:
        same = make_plan(named[name], workload, HW, limit)
        assert replace(same, strategy=plan.strategy) == plan


def test_combine_takes_any_planner_and_any_access() -> None:
    workload = gpt_workload(layers=2)
    resident = combine("keep-all", states="device", schedule="serial", name="mine")
    plan = make_plan(resident, workload, HW, budget())
    assert (plan.strategy, plan.schedule) == ("mine", "serial")
    assert {u.tier for u in plan.units.values()} == {"device"}
    on_ssd = make_plan(resident, workload, HW, budget(), PlannerOptions(states="ssd"))
    assert {u.tier for u in on_ssd.units.values()} == {"ssd"}
    held = make_plan(combine("zero-offload", parameters="memferry"), workload, HW, budget())
    assert of(held, "swap") == workload.inter_block
    assert [len(u.windows) for u in held.units.values()] == [0, 1, 1, 1]
    assert held.units["embed"].access == "direct"
    with pytest.raises(PlanError, match="is no Strategy"):
        combine("keep-all", parameters="memferry")
    with pytest.raises(PlanError, match="no policy for access"):
        combine("fuyou", parameters="capuchin")


# -- static checkpoints ------------------------------------------------------------------------


def test_static_checkpoints() -> None:
    workload = gpt_workload(layers=3, dropout=True)
    inputs = {"x0", "x1", "x2", "x3"}
    masks = {f"h{k}.{v}" for k in range(3) for v in ("mask", "a_mid")}  # a_mid: mask · branch + x
    expected = {
        "zero-infinity": ("swap", "ssd", {"host"}),
        "zero-offload": ("swap", "host", {"host"}),
        "colossal-ai": ("keep", "ssd", {"device"}),
    }
    for name, (action, states, tiers) in expected.items():
        plan = make_plan(name, workload, HW, budget())
        assert of(plan, action) == inputs | masks
        assert of(plan, "recompute") == set(workload.residuals) - inputs - masks
        assert {u.tier for u in plan.units.values()} == {states}
        assert {plan.residuals[v].tier for v in inputs} == tiers
        assert plan.schedule == "serial"
        assert {r.region for r in plan.residuals.values() if r.region} <= set(workload.blocks)


def test_zero_offload_never_uses_ssd() -> None:
    workload = gpt_workload(layers=8)
    states = sum(u.compute_bytes + u.state_bytes for u in workload.units)
    with pytest.raises(InsufficientMemoryError) as caught:
        make_plan("zero-offload", workload, HW, budget(host=states))
    assert caught.value.tier == "host"
    make_plan("zero-infinity", workload, HW, budget(host=states))


# -- flashneuron -------------------------------------------------------------------------------


def test_flashneuron_offloads_the_first_until_the_rest_fits() -> None:
    workload = chain([10, 20, 30, 40, 50])  # 150 bytes when the last one is made
    for room, count in ((150, 0), (149, 1), (140, 1), (139, 2), (121, 2), (119, 3), (90, 3)):
        s = setting(workload, limit=budget(device=room), strategy="flashneuron")
        found = offload_in_forward_order(s)
        swapped = [v for v, action in found.actions.items() if action == "swap"]
        assert swapped == [f"r{i}" for i in range(count)]
    with pytest.raises(InsufficientMemoryError) as caught:  # b4 reads 50 after f4 read 40
        make_plan("flashneuron", workload, HW, budget(device=89))
    assert caught.value.need_bytes == 90
    plan = make_plan("flashneuron", workload, HW, budget(device=119))
    assert {plan.residuals[v].tier for v in of(plan, "swap")} == {"ssd"}


@settings(max_examples=20, deadline=None)
@given(workload=workloads(), part=st.floats(0, 1))
def test_flashneuron_offloads_no_more_than_it_must(workload: Workload, part: float) -> None:
    full = make_plan("flashneuron", workload, HW, budget()).prediction.peak_device_bytes
    s = setting(workload, limit=budget(device=int(full * part)), strategy="flashneuron")
    order = workload.residuals
    fits = [s.fits(s.draft(swap_prefix(s, order, k))) for k in range(len(order) + 1)]
    assert fits == sorted(fits)
    if not fits[-1]:
        with pytest.raises(InsufficientMemoryError):
            offload_in_forward_order(s)
        return
    actions = offload_in_forward_order(s).actions
    assert sum(a == "swap" for a in actions.values()) == fits.index(True)


# -- ssdtrain ----------------------------------------------------------------------------------


def test_ssdtrain_offloads_what_drains_in_time() -> None:
    workload = chain([1] * 6)  # forward to 6 s, then b5 6..8, b4 8..10, … b0 16..18
    assert last_module(workload) == {"r5"}
    for rate, count in ((1.0, 5), (0.5, 4), (0.34, 3), (0.2, 2), (0.05, 0)):
        s = setting(workload, slow_hardware(ssd_write_bytes_per_s=rate), strategy="ssdtrain")
        assert hidden_amount(s, ["r0", "r1", "r2", "r3", "r4"]) == count, rate
    s = setting(workload, slow_hardware(ssd_write_bytes_per_s=0.5), strategy="ssdtrain")
    times = Transfers.of(s, Clock(workload), ["r0", "r1", "r2", "r3", "r4"])
    assert times.written == {"r0": 3.0, "r1": 5.0, "r2": 7.0, "r3": 9.0, "r4": 11.0}
    assert times.load == {"r0": 15.0, "r1": 13.0, "r2": 11.0, "r3": 9.0, "r4": 7.0}
    plan = make_plan("ssdtrain", workload, s.hw, budget())
    assert of(plan, "swap") == {"r0", "r1", "r2", "r3"}
    assert of(plan, "keep") == {"r4", "r5"}
    assert plan.count("recompute") == 0


def test_ssdtrain_loads_queue_up() -> None:
    """Loads are first come, first served, so a slow link must start them early."""
    workload = chain([1] * 4, forward_s=1.0, backward_s=0.5)  # b3 4..4.5, b2 4.5.., b0 5.5..6
    s = setting(workload, strategy="ssdtrain", hw=slow_hardware())
    assert Transfers.of(s, Clock(workload), ["r0", "r1", "r2"]).load == {
        "r0": 4.5,
        "r1": 3.5,
        "r2": 2.5,
    }
    # alone, r1 would be loaded from 4 s; behind it, r0 pushes that to 3.5 s (written at 3 s)
    assert hidden_amount(s, ["r0", "r1", "r2"]) == 2


def test_ssdtrain_forwards_what_is_still_being_written() -> None:
    workload = chain([1] * 6)
    hw = slow_hardware(ssd_write_bytes_per_s=0.5)
    plan = make_plan(ssdtrain(amount_bytes=5), workload, hw, budget())
    assert of(plan, "swap") == {"r0", "r1", "r2", "r3"}  # r4: written at 11 s, loaded from 7
    assert plan.notes[0] == "4 residuals (4 B) leave, 1 B are forwarded"
    plan = make_plan(ssdtrain(amount_bytes=2), workload, hw, budget())
    assert of(plan, "swap") == {"r0", "r1"}


def test_ssdtrain_offloads_more_if_memory_is_small() -> None:
    workload = chain([1] * 6)
    hw = slow_hardware(ssd_write_bytes_per_s=0.05)
    assert of(make_plan("ssdtrain", workload, hw, budget(device=6)), "swap") == set()
    plan = make_plan("ssdtrain", workload, hw, budget(device=3))
    assert of(plan, "swap") == {"r0", "r1", "r2"}
    assert "backward waits" in plan.notes[1]
    assert of(make_plan("ssdtrain", workload, hw, budget(device=2)), "keep") == {"r4", "r5"}
    with pytest.raises(InsufficientMemoryError):
        make_plan("ssdtrain", workload, hw, budget(device=1))


def test_ssdtrain_stays_within_the_ssd() -> None:
    workload = chain([4096] * 6)
    plan = make_plan("ssdtrain", workload, HW, budget(ssd=3 * 4096))
    assert of(plan, "swap") <= {"r0", "r1", "r2"}


def test_ssd_lifespan() -> None:
    assert lifespan_s(1000.0, 2.0, 10.0) == 200.0
    assert lifespan_s(1000.0, 2.0, 0) == math.inf
    workload = gpt_workload(layers=4, hidden=64, batch=4)
    plan = make_plan(ssdtrain(endurance_bytes=1e15), workload, HW, budget())
    written, step = plan.prediction.ssd_write_bytes, plan.prediction.step_s
    assert written == sum(workload.values[v].num_bytes for v in of(plan, "swap")) > 0
    years = 1e15 * step / written / (365.25 * 86400)
    assert plan.notes[-1].startswith(f"SSD lifespan {years:.3g} years")
    assert "600" not in plan.notes[-1]
    assert "129 PB" in make_plan("ssdtrain", workload, HW, budget()).notes[-1]  # 600 TB · 2.5 · 86


# -- fuyou -------------------------------------------------------------------------------------


def test_fuyou_has_two_queues() -> None:
    """Table 2: shapes (b,s,3h), (b,s,h), (b,s,4h), (b,s,h); FLOPs 6, 2, 8, 8; SBF 1, 1, 1, 4."""
    rows = [("qkv", 3, 6), ("htoh", 1, 2), ("hto4h", 4, 8), ("4htoh", 1, 8)]
    layers = [
        Layer(name=f"{k}.{name}", values=(), num_bytes=size, flops=flops, seconds=0.0)
        for k in range(2)
        for name, size, flops in rows
    ]
    assert [layer.name for layer in by_priority(layers)] == [
        *("0.4htoh", "1.4htoh"),
        *("0.qkv", "0.htoh", "0.hto4h", "1.qkv", "1.htoh", "1.hto4h"),
    ]
    assert by_priority(layers[:3]) == layers[:3]


def test_fuyou_follows_its_equations() -> None:
    workload = gpt_workload(layers=3, hidden=128, batch=8, seq=64)
    hw = small_hardware(block_flops_per_s=1e11)
    s = setting(workload, hw, strategy="fuyou", options=PlannerOptions())
    start = [v for v in workload.residuals if v in workload.inter_block]
    order = by_priority(layers_of(workload, [v for v in workload.residuals if v not in start]))
    scale = swap_scale(s, start, order)
    p, tput = workload.num_params, 1e11
    p_b = p - workload.units[0].num_params  # backward does not read the embedding
    bw, s2c, c2s = hw.h2d_bytes_per_s, hw.ssd_read_bytes_per_s, hw.ssd_write_bytes_per_s
    t_comp = workload.forward_flops / tput
    t_o = p / hw.cpu_optimizer_params_per_s
    d_f = s.num_bytes(start)
    recompute = sum(layer.flops for layer in order)
    expected = []
    for layer in (None, *order):
        if layer is not None:
            d_f, recompute = d_f + layer.num_bytes, recompute - layer.flops
        t_f = max(t_comp, 2 * p / bw, d_f / bw, 2 * p / s2c + d_f / c2s)  # Eq. 2-4
        t_gpu = max(2 * p / bw, (2 * p_b + d_f) / bw)  # Eq. 6
        t_ssd = (12 * p + 2 * p_b + d_f) / s2c + 14 * p / c2s  # Eq. 7
        t_b = max(2 * t_comp + recompute / tput, t_o, t_gpu, t_ssd)  # Eq. 5 and 8
        expected.append((d_f, t_f + t_b))
        if layer is None:
            t_max = 2 * t_comp + recompute / tput - max(t_gpu, t_ssd)  # Eq. 9
            d_max = max(0, t_max) * min(bw, c2s, s2c)  # Eq. 10
    assert [x.swapped_bytes for x in scale.points] == [d for d, _ in expected]
    assert [x.time.step_s for x in scale.points] == pytest.approx([t for _, t in expected])
    assert scale.max_bytes == pytest.approx(d_max, rel=1e-6)
    allowed = [(t, d) for d, t in expected if d <= d_max or d == expected[0][0]]
    assert scale.best.time.step_s == pytest.approx(min(allowed)[0])
    assert len(allowed) > 1
    plan = make_plan("fuyou", workload, hw, budget())
    assert s.num_bytes(of(plan, "swap")) == scale.best.swapped_bytes
    assert (plan.schedule, {u.tier for u in plan.units.values()}) == ("optimized", {"ssd"})
    assert {plan.residuals[v].tier for v in of(plan, "swap")} == {"host"}


def test_fuyou_starts_at_one_checkpoint_a_block() -> None:
    workload = gpt_workload(layers=3, dropout=True)
    s = setting(workload, strategy="fuyou", options=PlannerOptions())  # SSD binds: no more
    swapped = {v for v, a in schedule_activations(s).actions.items() if a == "swap"}
    assert swapped == workload.inter_block | must_save(workload)


# -- capuchin ----------------------------------------------------------------------------------


def test_capuchin_free_time() -> None:
    workload = chain([1] * 6)
    s = setting(workload, slow_hardware(h2d_bytes_per_s=0.5, d2h_bytes_per_s=0.25))
    clock = Clock(workload)
    # r0: used by f1 until 2 s, by b0 from 16 s; out 4 s, in 2 s
    assert free_time_s(s, clock, "r0") == 16 - 2 - (2 + 4)
    assert free_time_s(s, clock, "r4") == 8 - 2 - (6 + 4)


def test_capuchin_swaps_the_longest_idle_first() -> None:
    workload = chain([10] * 6)
    for room, count in ((60, 0), (59, 1), (50, 1), (49, 2), (31, 3)):
        s = setting(workload, limit=budget(device=room), strategy="capuchin")
        actions = hybrid(s).actions
        assert {v for v, a in actions.items() if a == "swap"} == {f"r{i}" for i in range(count)}
        assert "recompute" not in actions.values()


def test_capuchin_recomputes_where_that_costs_less() -> None:
    """Nothing is hidden: r_i costs 1 s to make again, and −FreeTime to swap."""
    workload = chain([10] * 6, forward_s=1.0, backward_s=2.0)
    s = setting(workload, slow_hardware(), budget(device=50), "capuchin")
    free = {v: free_time_s(s, Clock(workload), v) for v in workload.residuals}
    assert free["r0"] == -6.0
    assert max(free.values()) == -6.0
    actions = hybrid(s).actions
    assert list(actions.values()).count("recompute") == 1
    assert "swap" not in actions.values()
    fast = slow_hardware(h2d_bytes_per_s=1.3, d2h_bytes_per_s=1.5)  # FreeTime of r0: −0.36 s
    s = setting(workload, fast, budget(device=50), "capuchin")
    assert hybrid(s).actions["r0"] == "swap"


def test_capuchin_costs_grow_as_sources_are_evicted() -> None:
    """r1 alone costs 1 s; after r0 went, making r1 again takes r0's op too."""
    workload = chain([10, 10, 10, 10])
    s = setting(workload, slow_hardware(), budget(device=30), "capuchin")
    first = {v for v, a in hybrid(s).actions.items() if a == "recompute"}
    assert len(first) == 1
    s = setting(workload, slow_hardware(), budget(device=21), "capuchin")
    both = {v for v, a in hybrid(s).actions.items() if a != "keep"}
    assert len(both) >= 2


def test_capuchin_swaps_what_cannot_be_made_again() -> None:
    workload = gpt_workload(layers=3, hidden=64, batch=8, dropout=True)
    hw = small_hardware(h2d_bytes_per_s=1e8, d2h_bytes_per_s=1e8)
    limit = budget(device=1_000_000)
    plan = make_plan("capuchin", workload, hw, limit, PlannerOptions(states="host"))
    assert plan.count("recompute")
    assert not of(plan, "recompute") & must_save(workload)
    check(workload, plan, limit)


# -- g10 ---------------------------------------------------------------------------------------


def test_g10_ssd_rule() -> None:
    hw = slow_hardware(ssd_read_bytes_per_s=4.0, ssd_write_bytes_per_s=2.0)
    away, back = LATENCY_S + 5.0, LATENCY_S + 2.5
    assert ssd_interval_s(hw, 10) == pytest.approx(away + back + DELTA * away)


def test_g10_books_bandwidth() -> None:
    slots = Slots(np.ones(6))
    stop, taken = slots.out("d2h", 1, 6, 2.5) or (0, np.zeros(0))
    assert (stop, taken.tolist()) == (4, [1.0, 1.0, 0.5])
    begin, taken = slots.back("h2d", 1, 6, 1.25) or (0, np.zeros(0))
    assert (begin, taken.tolist()) == (4, [0.25, 1.0])
    assert slots.out("d2h", 1, 6, 5.5) is None
    assert slots.back("h2d", 4, 6, 2.5) is None


def test_g10_evicts_by_benefit_and_stops_at_the_line() -> None:
    """Benefit is bytes times the seconds over the line while away: r0 is away for longest."""
    workload = chain([100] * 6)
    hw = small_hardware()
    for room, swapped in ((607, set()), (605, {"r0"}), (510, {"r0"}), (504, {"r0", "r1"})):
        s = setting(workload, hw, budget(device=room), "g10")
        assert {v for v, a in migrate(s).actions.items() if a == "swap"} == swapped, room
    big = chain([100, 300, 100, 100, 100, 100])
    s = setting(big, hw, budget(device=790), "g10")  # one is enough, and r1 is the largest
    assert {v for v, a in migrate(s).actions.items() if a == "swap"} == {"r1"}


def test_g10_uses_host_memory_when_ssd_is_too_slow_or_full() -> None:
    workload = chain([1] * 6)  # r0 is idle from 2 s to 16 s
    limit = budget(device=5)

    def home(**rates: float) -> dict[str, str]:
        s = setting(workload, slow_hardware(**rates), limit, "g10")
        return dict(migrate(s).swap_tiers or {})

    assert home() == {"r0": "ssd", "r1": "ssd"}
    assert home(ssd_write_bytes_per_s=0.1) == {"r0": "host", "r1": "host"}  # 10 s + 1 + 5 > 14
    # the write of r0 takes the SSD from 2 s to 5.5 s; those of r1 and r2 would end after 8 s
    assert home(ssd_write_bytes_per_s=2 / 7) == {"r0": "ssd", "r1": "host", "r2": "host"}


def test_g10_without_bandwidth_swaps_anyway() -> None:
    workload = chain([100] * 6)
    hw = slow_hardware()  # a copy takes 100 s
    s = setting(workload, hw, budget(device=450), "g10")
    found = migrate(s)
    assert {v for v, a in found.actions.items() if a == "swap"} == {"r0", "r1"}
    assert set((found.swap_tiers or {}).values()) == {"host"}
    assert "2 of 2 migrations are exposed" in found.notes


def test_g10_recomputes_nothing() -> None:
    workload = gpt_workload(layers=4, hidden=64, batch=4)
    options = PlannerOptions(states="host")
    full = make_plan("g10", workload, HW, budget(), options).prediction.peak_device_bytes
    plan = make_plan("g10", workload, HW, budget(device=full * 3 // 4), options)
    assert plan.count("swap")
    assert plan.count("recompute") == 0


# -- chen-sqrt ---------------------------------------------------------------------------------


def test_chen_articulation_points() -> None:
    workload = gpt_workload(layers=2)
    # between two sub-layers only the residual stream is alive; in them, it and a branch are
    assert articulation_points(workload) == (
        "x0",
        "h0.a_mid",
        "x1",
        "h1.a_mid",
        "x2",
        "logits",
    )
    assert checkpoints(workload) == ("h0.a_mid", "h1.a_mid", "logits")  # ⌊√6⌋ = 2


def test_chen_segments_on_a_chain() -> None:
    workload = chain([10] * 9)
    assert checkpoints(workload) == ("r2", "r5", "r8")
    plan = make_plan("chen-sqrt", workload, HW, budget())
    assert of(plan, "keep") == {"r2", "r5", "r8"}
    regions = {v: r.region for v, r in plan.residuals.items() if r.region}
    assert regions == {
        **dict.fromkeys(("r0", "r1"), "start"),
        **dict.fromkeys(("r3", "r4"), "after r2"),
        **dict.fromkeys(("r6", "r7"), "after r5"),
    }
    assert plan.prediction.peak_device_bytes == 40  # two checkpoints below r8, a segment of two


@settings(max_examples=50, deadline=None)
@given(workload=workloads())
def test_articulation_points_cut_the_graph(workload: Workload) -> None:
    """Without the value, no op after its producer can be reached from one before."""
    n = workload.num_forward_ops
    found = articulation_points(workload)
    for v in workload.residuals:
        made = workload.producer[v]
        graph = nx.DiGraph()
        graph.add_nodes_from(range(n))
        for op, u in itertools.product(range(n), workload.values):
            if u != v and u in workload.producer and op in workload.users[u]:
                graph.add_edge(workload.producer[u], op)
        reached = {w for op in range(made + 1) for w in nx.descendants(graph, op) if w > made}
        used = any(made < i < n for i in workload.users[v])
        assert (v in found) == (used and not reached), v


# -- memferry ----------------------------------------------------------------------------------


def layer(name: str, transfer: float, forward: float, direct: float, **more: float) -> LayerTimes:
    return LayerTimes(
        name=name,
        transfer_s=transfer,
        forward_s=forward,
        forward_direct_s=direct,
        backward_s=more.pop("backward", 2 * forward),
        backward_direct_s=more.pop("backward_direct", 2 * direct),
        **{f"{k}_s": v for k, v in more.items()},
    )


def test_memferry_algorithm_1_by_hand() -> None:
    a = layer("a", 4, 1, 2)  # 2 ≤ 1 + 4: DHA
    b = layer("b", 1, 1, 2.5)  # GFGB, hidden in T_res = 2
    plan = ForwardPlan(layers=[a, b]).run()
    assert (plan.direct, plan.total_s, plan.reserved_s, plan.tag) == ([True, False], 3, 2, 1)
    # c is exposed by 8 − 2 = 6 s. b in host memory: 1.5 s slower, and T_res gains 1 + 1.5
    c = layer("c", 8, 1, 20)
    plan = ForwardPlan(layers=[a, b, c]).run()
    assert plan.direct == [True, True, False]
    assert (plan.total_s, plan.reserved_s, plan.tag) == (9, 1, 2)
    # …which is no use if b is too slow there: 9 s more to hide 6 s
    slow = layer("b", 1, 1, 10)
    plan = ForwardPlan(layers=[a, slow, c]).run()
    assert (plan.direct, plan.total_s, plan.reserved_s) == ([True, False, False], 10, 1)
    # computation between layers hides transfers as well
    plan = ForwardPlan(layers=[a, replace(b, after_s=6.5), c]).run()
    assert (plan.direct, plan.total_s, plan.reserved_s) == ([True, False, False], 10.5, 1.5)


def test_memferry_backtracks_from_the_first_layer_while_there_is_no_tag() -> None:
    first = layer("a", 5, 1, 7)  # GFGB, exposed: 6 s
    second = layer("b", 9, 1, 20)
    plan = ForwardPlan(layers=[first]).run()
    assert (plan.direct, plan.total_s, plan.reserved_s, plan.tag) == ([False], 6, 1, -1)
    plan = ForwardPlan(layers=[first, second]).run()
    # a in host memory is 6 s slower, and T_res gains 11: 0 + 6 + 6 + 1 = 13, not 6 + 8 + 1
    assert plan.direct == [True, False]
    assert (plan.total_s, plan.reserved_s, plan.tag) == (13, 4, 1)


def test_memferry_reloads_while_the_link_is_idle() -> None:
    """Forward ends at 10 s; backward runs d, c, b, a; GFGB transfers end at 2 s."""
    layers = [
        layer("a", 3, 1, 2, backward=2, backward_direct=5),  # saves 1 a second of transfer
        layer("b", 2, 1, 9),  # GFGB
        layer("c", 4, 1, 2, backward=1, backward_direct=9),  # saves 2
        layer("d", 9, 1, 2, backward=1, backward_direct=90),  # saves most, but begins at 10 s
    ]
    direct = [True, False, True, True]
    assert greedy_reload(layers, direct, 10.0, 12.0) == [2, 0]  # to 6 s, to 9 s
    assert greedy_reload(layers, direct, 10.0, 8.0) == [2]
    assert greedy_reload(layers, direct, 12.0, 12.0) == [3]
    useless = [replace(x, backward_direct_s=x.backward_s) for x in layers]
    assert greedy_reload(useless, direct, 10.0, 12.0) == []


@pytest.mark.parametrize("tied", [False, True])
def test_memferry_reads_the_embedding_where_it_lies(tied: bool) -> None:
    gpt = gpt_workload(layers=3, batch=8, seq=128, vocab=512, tied=tied)
    workload = few_rows(gpt, "embed", 8192)
    plan = make_plan("memferry", workload, HW, budget())
    modes = {u: (p.access, len(p.windows)) for u, p in plan.units.items()}
    blocks = {f"h{k}": ("fetch", 1) for k in range(3)}
    if tied:  # the head reads all of it, and is slow in host memory
        assert modes == {"embed": ("fetch", 1), **blocks}
    else:
        assert modes == {"embed": ("direct", 0), **blocks, "head": ("fetch", 1)}
        assert plan.notes == (in_modes(4, 1, 0),)
        copied = sum(u.compute_bytes for u in workload.units[1:])
        assert plan.prediction.h2d_bytes == copied + 8192
    assert plan.count("keep") == len(workload.residuals)
    assert plan.schedule == "naive"


def test_memferry_gives_reloads_back_if_memory_is_small() -> None:
    """An adapter of few parameters that many rows go through: direct in forward, not backward."""
    workload = adapter_workload()
    plan = make_plan("memferry", workload, HW, budget())
    assert plan.notes == (in_modes(1, 0, 1),)
    unit = plan.units["small"]
    assert (unit.access, [w.first_use for w in unit.windows]) == ("direct", ["small.b"])
    limit = budget(device=least_budget("memferry", workload))
    tight = make_plan("memferry", workload, HW, limit)
    assert tight.notes == (in_modes(1, 1, 0),)
    check(workload, tight, limit)


def in_modes(gfgb: int, dha: int, dfgb: int) -> str:
    """MemFerry's note: so many units in each mode, with what the mode does."""
    return (
        f"units: {gfgb} copied to the device once for the step (GFGB), {dha} read in host memory "
        f"(DHA), {dfgb} read there in forward, copied for backward (DFGB)"
    )


def adapter_workload() -> Workload:
    """A unit that forward reads a little of, and backward all of, many times; and a large one."""
    b = Builder("adapter")
    b.value("x", 4096, "input")
    b.unit("small", "small", {"w": 400_000})
    b.unit("big", "big", {"v": 262_144})
    b.op("small", ["x", "w"], [("r0", 8192)], block="small")
    b.op("big", ["r0", "v"], [("r1", 8192)], block="big", flops=4 * 10**9)
    b.op("loss", ["r1"], [("loss", 4)], block="big", output=True)
    back: dict[str, Any] = {"phase": "backward"}
    b.op("loss.b", ["r1"], [("d1", 8192)], block="big", **back)
    writes = [("d0", 8192), ("grad.v", 524_288)]
    b.op("big.b", ["d1", "r0", "v"], writes, block="big", flops=8 * 10**9, **back)
    writes = [("dx", 8192), ("grad.w", 800_000)]
    b.op("small.b", ["d0", "x", "w"], writes, block="small", flops=10**9, **back)
    return few_rows(b.build(), "small", 64)


# -- go-memferry -------------------------------------------------------------------------------


def test_gradient_dp_by_hand() -> None:
    sizes, gains = [3, 4, 5], [3.0, 5.0, 6.0]
    assert most_time_won(sizes, gains, 12) == {0, 1, 2}
    assert most_time_won(sizes, gains, 11) == {1, 2}
    assert most_time_won(sizes, gains, 8) == {0, 2}  # 9, and 8 for the first two
    assert most_time_won(sizes, gains, 4) == {1}
    assert most_time_won(sizes, gains, 2) == set()
    assert most_time_won([0, 1], [0.0, 1.0], 0) == set()


@settings(max_examples=50, deadline=None)
@given(
    items=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6),
    room=st.integers(-1, 30),
)
def test_gradient_dp_is_optimal(items: list[tuple[int, int]], room: int) -> None:
    sizes, gains = [size for size, _ in items], [float(gain) for _, gain in items]
    chosen = most_time_won(sizes, gains, room)
    best = max(
        sum(gains[i] for i in subset)
        for k in range(len(items) + 1)
        for subset in itertools.combinations(range(len(items)), k)
        if sum(sizes[i] for i in subset) <= max(0, room)
    )
    assert sum(gains[i] for i in chosen) == best
    assert sum(sizes[i] for i in chosen) <= max(0, room)


def test_go_memferry_writes_gradients_if_it_must() -> None:
    workload = gpt_workload(layers=4, hidden=64)
    memferry = make_plan("memferry", workload, HW, budget())
    same = make_plan("go-memferry", workload, HW, budget())
    assert {u.gradients for u in same.units.values()} == {"copy"}
    assert same.prediction == memferry.prediction
    least = make_plan(go_memferry(reserve=0.0), workload, HW, budget())
    assert {u.gradients for u in least.units.values()} == {"direct"}
    assert least.prediction.d2h_bytes == memferry.prediction.d2h_bytes
    assert least.prediction.peak_device_bytes < memferry.prediction.peak_device_bytes
    shares = []
    for reserve in (0.0, 0.25, 0.5, 0.75, 1.0):
        plan = make_plan(go_memferry(reserve), workload, HW, budget())
        kept = [u for u in workload.units if plan.units[u.name].gradients == "copy"]
        shares.append(sum(u.gradient_bytes for u in kept))
        assert shares[-1] <= reserve * sum(u.gradient_bytes for u in workload.units)
    assert shares == sorted(set(shares))
    # the gradients of a block add up, until they are copied or as long as an op runs
    small = gpt_workload(layers=3, hidden=128, batch=1, seq=8)
    least_bytes = least_budget("go-memferry", small)
    block = small.unit_by_name["h0"].gradient_bytes
    largest = max(small.values[g].num_bytes for g in small.unit_by_name["h0"].gradients)
    assert least_budget("memferry", small) - least_bytes == pytest.approx(block - largest, rel=0.2)
    limit = budget(device=least_bytes)
    plan = make_plan("go-memferry", small, HW, limit)
    assert "direct" in {u.gradients for u in plan.units.values()}
    check(small, plan, limit)


def least_budget(strategy: str, workload: Workload) -> int:
    """The smallest device budget that a strategy's error asks for."""
    with pytest.raises(InsufficientMemoryError) as caught:
        make_plan(strategy, workload, HW, budget(device=1))
    return caught.value.need_bytes
