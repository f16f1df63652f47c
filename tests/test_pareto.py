"""pareto: as good as trying everything, never behind another strategy, honest about the rest."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lohan_fx.errors import InsufficientMemoryError, PlanError
from lohan_fx.footprint import may_cast
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import SCHEDULES, Action, Plan, Schedule, Tier
from lohan_fx.planners import Choices, PlannerOptions, finish, make_plan, names
from lohan_fx.planners.effort import Effort
from lohan_fx.planners.exhaustive import exchanges
from lohan_fx.planners.keep import keep_greedily
from lohan_fx.planners.model import Model, Option
from lohan_fx.planners.pareto import NOT_CANDIDATES, Pareto, frontier, lower_bound
from lohan_fx.planners.random_policy import RandomPolicy
from lohan_fx.planners.regions import LateRegions
from lohan_fx.planners.schedule import Draft, draft, finish_draft, must_save
from lohan_fx.planners.simplex import solve
from lohan_fx.planners.structure import MAX_LAYERS, segments_of, windows_of
from lohan_fx.planners.trial import make_draft
from lohan_fx.program import lower
from lohan_fx.simulate import simulate, step_seconds
from lohan_fx.workload import Op, Workload
from tests.test_planners import check
from tests.test_simulate import machine as unit_machine
from tests.test_simulate import make_unit, make_workload
from tests.workloads import (
    Builder,
    budget,
    gpt_workload,
    mlp_workload,
    random_workload,
    small_hardware,
)

HW = small_hardware()


def machine(seed: int) -> HardwareProfile:
    """Round rates; a slow, even or fast link, a slow or fast CPU, with or without SSDs."""
    rng = random.Random(seed)
    link = rng.choice((1e9, 2e10, 1e11))
    out = link * rng.choice((1, 0.5))
    return small_hardware(
        ssd=rng.random() < 0.6,
        h2d_bytes_per_s=link,
        d2h_bytes_per_s=out,
        duplex_bytes_per_s=rng.choice((link, (link + out) * 0.8, link + out)),
        cpu_optimizer_params_per_s=rng.choice((1e8, 2e9, 1e11)),
    )


def tiny_workload(seed: int) -> Workload:
    """A chain with a skip connection: three to five residuals, one or two units, a loss. Half of
    the units may keep no compute copy."""
    rng, masters = random.Random(seed), random.Random(f"masters of {seed}")
    b = Builder(f"tiny-{seed}")
    b.value("x", 4096, "input")
    blocks = rng.randint(1, 2)
    count = rng.randint(3, 4 if blocks == 2 else 5)
    for k in range(blocks):
        size = rng.choice((256, 2048, 8192))
        b.unit(f"b{k}", f"b{k}", {f"w{k}": size}, master=masters.random() < 0.5)
    names, last = ["x"], "x"
    for i in range(count):
        block = f"b{i * blocks // count}"
        reads = [last, "w" + block[1:]] if i % 2 == 0 else [last, rng.choice(names)]
        last = b.op(
            f"f{i}",
            list(dict.fromkeys(reads)),
            [(f"y{i}", rng.choice((4096, 8192, 20000)))],
            block=block,
            flops=rng.choice((0, 10**6, 2 * 10**7)),
            recomputable=rng.random() < 0.9,
        )
        names.append(last)
    b.op("loss", [last], [("loss", 4)], block=f"b{blocks - 1}", output=True)
    d = b.op("loss.b", [last], [("d", 4096)], block=f"b{blocks - 1}", phase="backward")
    for i in reversed(range(count)):
        block = f"b{i * blocks // count}"
        reads = [d, names[i + 1], names[i]]
        writes = [(f"d{i}", 8192)]
        if i % 2 == 0:
            reads.append("w" + block[1:])
            first = next(k for k in range(0, count, 2) if f"b{k * blocks // count}" == block)
            if i == first:
                size = b.values["w" + block[1:]].num_bytes
                writes.append((f"grad.w{block[1:]}", size))
        d = b.op(
            f"f{i}.b",
            list(dict.fromkeys(reads)),
            writes,
            block=block,
            phase="backward",
            flops=10**6,
        )
    return b.build()


def assignments(
    workload: Workload, hw: HardwareProfile, options: PlannerOptions
) -> Iterator[Choices]:
    """Every action and tier of every residual, every tier of every unit; with and without compute
    copies on the device."""
    saved = must_save(workload)
    places: list[Tier] = ["host", "ssd"] if hw.ssds else ["host"]
    ways: list[list[tuple[Action, Tier]]] = []
    for v in workload.residuals:
        found: list[tuple[Action, Tier]] = [("keep", "device")]
        found += [("swap", place) for place in places]
        found += [] if v in saved else [("recompute", "device")]
        ways.append(found)
    tiers: list[Tier] = ["device", *places] if options.states == "auto" else [options.states]
    homes = [
        [(tier, casts) for tier in tiers for casts in (False, True)[: 1 + may_cast(u, tier)]]
        for u in workload.units
    ]
    units = [u.name for u in workload.units]
    for settled in itertools.product(*homes):
        at = dict(zip(units, settled, strict=True))
        for picked in itertools.product(*ways):
            chosen = dict(zip(workload.residuals, picked, strict=True))
            yield Choices(
                actions={v: action for v, (action, _) in chosen.items()},
                unit_tiers={name: tier for name, (tier, _) in at.items()},
                casts=[name for name, (_, casts) in at.items() if casts],
                swap_tiers={v: tier for v, (action, tier) in chosen.items() if action == "swap"},
            )


def try_everything(
    workload: Workload, hw: HardwareProfile, limit: MemoryBudget, options: PlannerOptions
) -> float:
    """The least simulated step of all assignments that `finish` accepts."""
    best = math.inf
    for choices in assignments(workload, hw, options):
        try:
            plan = finish(workload, hw, limit, options, choices, "all")
        except InsufficientMemoryError:
            continue
        best = min(best, step_seconds(workload, plan, hw))
    return best


def whole_bytes(workload: Workload) -> int:
    """More than any plan can have on the device."""
    values = sum(v.num_bytes for v in workload.values.values())
    return values + sum(u.compute_bytes + u.state_bytes for u in workload.units)


# -- as good as trying everything -----------------------------------------------------------------


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**6), part=st.sampled_from((0.35, 0.5, 0.7, 1.0)), ssd=st.booleans())
def test_equals_exhaustive_search(seed: int, part: float, ssd: bool) -> None:
    workload = tiny_workload(seed)
    assert len(workload.residuals) <= 6
    hw = machine(seed) if ssd else replace(machine(seed), ssds=(), **_NO_SSD)
    limit = budget(device=int(whole_bytes(workload) * part), ssd=2**30 if hw.ssds else 0)
    options = PlannerOptions(states="auto" if len(workload.residuals) < 5 else "host")
    best = try_everything(workload, hw, limit, options)
    try:
        plan, report = Pareto().solve(workload, hw, limit, options)
    except InsufficientMemoryError:
        assert best == math.inf
        return
    assert report.step_s <= best * (1 + 1e-9)
    assert report.step_s == step_seconds(workload, plan, hw)
    alone = Pareto(others=False, effort=Effort(reserves=(), ladder=0, polish=0))
    _, own = alone.solve(workload, hw, limit, replace(options, states="host"))
    if best < math.inf:
        rest = try_everything(workload, hw, limit, replace(options, states="host"))
        assert own.step_s <= rest * (1 + 1e-9)


_NO_SSD: dict[str, Any] = {"ssd_read_bytes_per_s": 0.0, "ssd_write_bytes_per_s": 0.0}


# -- never slower, monotone -----------------------------------------------------------------------


def some_workload(seed: int) -> Workload:
    rng = random.Random(seed)
    if seed % 3 == 0:
        return random_workload(seed, rng.randint(1, 4), 4)
    return gpt_workload(
        layers=rng.randint(1, 4),
        hidden=rng.choice((32, 128, 512)),
        tied=rng.random() < 0.3,
        dropout=rng.random() < 0.3,
        masters=rng.random() < 0.6,
    )


def rivals(
    workload: Workload, hw: HardwareProfile, limit: MemoryBudget, options: PlannerOptions
) -> dict[str, float]:
    found = {}
    for name in names():
        if name not in NOT_CANDIDATES:
            try:
                plan = make_plan(name, workload, hw, limit, options)
            except (InsufficientMemoryError, PlanError):
                continue
            found[name] = step_seconds(workload, plan, hw)
    return found


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**6), part=st.floats(0.08, 1.1), host=st.sampled_from((0.3, 1.5)))
def test_never_slower_than_any_strategy(seed: int, part: float, host: float) -> None:
    workload, hw = some_workload(seed), machine(seed)
    whole = whole_bytes(workload)
    limit = MemoryBudget(
        device_bytes=int(whole * part),
        host_bytes=int(whole * host),
        ssd_bytes=2**30 if hw.ssds else 0,
    )
    others = rivals(workload, hw, limit, PlannerOptions())
    try:
        plan, report = Pareto().solve(workload, hw, limit)
    except InsufficientMemoryError as error:
        assert not others
        assert error.need_bytes > error.have_bytes
        return
    check(workload, plan, limit)
    assert plan.strategy == "pareto"
    assert report.bound_s <= report.step_s * (1 + 1e-9)
    assert report.gap == pytest.approx(report.step_s / report.bound_s - 1)
    for name, seconds in others.items():
        assert report.step_s <= seconds * (1 + 1e-9), name


@pytest.mark.parametrize(
    ("tier", "parts"),
    [("device", (0.1, 0.3, 0.6, 2.0)), ("host", (0.7, 0.8, 2.0)), ("ssd", (0.1, 0.6, 2.0))],
)
def test_more_memory_is_never_slower(tier: str, parts: Sequence[float]) -> None:
    """Each budget planned for by itself."""
    workload, hw = gpt_workload(layers=1, hidden=128), replace(machine(4), **_SSD)
    whole = whole_bytes(workload)
    roomy = MemoryBudget(device_bytes=whole // 3, host_bytes=whole, ssd_bytes=whole)
    last = math.inf
    for part in parts:
        limit = replace(roomy, **{f"{tier}_bytes": int(whole * part)})
        try:
            _, report = Pareto().solve(workload, hw, limit)
        except InsufficientMemoryError:
            assert last == math.inf
            continue
        assert report.step_s <= last * (1 + 1e-9), (part, report.source)
        last = report.step_s
    assert last < math.inf


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10**6),
    tier=st.sampled_from(("device", "host", "ssd")),
    start=st.floats(0.1, 0.6),
    growth=st.floats(1.01, 1.5),
)
def test_time_is_monotone_in_every_budget(
    seed: int, tier: str, start: float, growth: float
) -> None:
    """Budgets planned for together, however close, in whatever order they are given."""
    workload, hw = some_workload(seed), replace(machine(seed), **_SSD)
    whole = whole_bytes(workload)
    roomy = MemoryBudget(device_bytes=whole // 3, host_bytes=whole, ssd_bytes=whole)
    parts = [start * growth**k for k in range(4)]
    limits = [replace(roomy, **{f"{tier}_bytes": int(whole * part)}) for part in parts]
    quick = Pareto(effort=Effort(reserves=(1.0, 0.0), ladder=1, polish=10, assignments=0))
    found = frontier(workload, hw, limits[::-1], strategy=quick)[::-1]
    last = math.inf
    for limit, made in zip(limits, found, strict=True):
        if isinstance(made, InsufficientMemoryError):
            assert last == math.inf
            continue
        plan, report = made
        check(workload, plan, limit)
        assert report.step_s <= last * (1 + 1e-9)
        assert len([note for note in plan.notes if note.startswith("simulated step")]) == 1
        last = report.step_s


_SSD: dict[str, Any] = {
    "ssds": HW.ssds,
    "ssd_read_bytes_per_s": 6e9,
    "ssd_write_bytes_per_s": 4e9,
}


def test_a_known_plan_is_where_a_search_begins() -> None:
    """What runs, given by refinement: a short search finds nothing slower. Not if another schedule
    is wanted, or if it does not fit."""
    workload = gpt_workload(layers=2, hidden=256, batch=8)
    whole = whole_bytes(workload)
    roomy = MemoryBudget(device_bytes=whole // 3, host_bytes=whole, ssd_bytes=0)
    best, _ = Pareto().solve(workload, HW, roomy)
    short = Pareto(others=False, effort=Effort(reserves=(), ladder=0, polish=0, assignments=0))

    def seconds(limit: MemoryBudget, schedule: Schedule) -> float:
        options = PlannerOptions(known=(best,), schedule=schedule)
        return short.solve(workload, HW, limit, options)[1].step_s

    known_s = step_seconds(workload, best, HW)
    assert short.solve(workload, HW, roomy)[1].step_s > known_s
    assert seconds(roomy, best.schedule) == known_s
    assert seconds(roomy, "serial") > known_s
    less = best.prediction.peak_device_bytes - 1
    assert seconds(replace(roomy, device_bytes=less), best.schedule) > known_s


def test_keeps_everything_if_it_fits() -> None:
    workload = gpt_workload(layers=6, hidden=512, batch=16)
    plan, report = Pareto().solve(workload, HW, budget())
    assert plan.count("keep") == len(workload.residuals)
    kept = make_plan("keep-all", workload, HW, budget())
    assert report.step_s <= step_seconds(workload, kept, HW)


def test_units_stay_on_the_device_where_the_cpu_binds() -> None:
    """measurements.md: with memory to spare, resident units remove the CPU's bottleneck."""
    workload = gpt_workload(layers=6, hidden=256, batch=8)
    hw = small_hardware(cpu_optimizer_params_per_s=2e8)
    states = sum(u.compute_bytes + u.state_bytes for u in workload.units)
    limit = budget(device=int(0.6 * states) + 3 * 2**20)
    plan, report = Pareto().solve(workload, hw, limit)
    resident = [u.name for u in workload.units if plan.units[u.name].tier == "device"]
    assert resident
    assert len(resident) < len(workload.units)
    host = make_plan("lohan", workload, hw, limit)
    assert report.step_s < 0.7 * step_seconds(workload, host, hw)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_more_workloads(seed: int) -> None:
    """The properties above, for fixed seeds."""
    rng = random.Random(seed)
    part, host = rng.uniform(0.08, 1.1), rng.choice((0.3, 1.5))
    test_never_slower_than_any_strategy.hypothesis.inner_test(seed, part, host)  # type: ignore[attr-defined]
    for tier in ("device", "host", "ssd"):
        test_time_is_monotone_in_every_budget.hypothesis.inner_test(  # type: ignore[attr-defined]
            seed, tier, rng.uniform(0.1, 0.6), rng.uniform(1.01, 1.5)
        )


# -- regions and exchanges ------------------------------------------------------------------------


def layers(*sizes: int) -> Workload:
    """f0, f1, … in a block each, of one second each; backward reads their results, last first."""
    b = Builder("layers")
    last = b.value("x", 64, "input")
    for k, size in enumerate(sizes):
        last = b.op(f"f{k}", [last], [(f"y{k}", size)], block=f"b{k}", flops=10**13)
    d = b.op("loss", [last], [("loss", 4)], block="head", output=True)
    for k in reversed(range(len(sizes))):
        d = b.op(f"f{k}.b", [d, f"y{k}"], [(f"d{k}", 64)], block=f"b{k}", phase="backward")
    return b.build()


def test_late_regions_make_again_what_earlier_ones_had() -> None:
    """y2's region runs f1 and f0, too; y1's f0: unless what they make stays."""
    workload = layers(100, 100, 100)
    one = workload.ops[0].seconds
    late = LateRegions(workload, workload.residuals)
    assert late.names == {"y0": "f0.b", "y1": "f1.b", "y2": "f2.b"}
    assert late.seconds == pytest.approx(6 * one)
    assert late.least_seconds == pytest.approx(3 * one)
    last = workload.op_index["f2.b"]
    assert ("y1", last) in late.earlier()
    late.anchors = late.moved("y1", last)
    assert late.seconds == pytest.approx(4 * one)
    late.anchors = late.moved("y0", last)
    assert late.seconds == pytest.approx(late.least_seconds)
    assert late.earlier() == []


@pytest.mark.parametrize("seed", range(6))
def test_exchanges_are_those_that_are_near(seed: int) -> None:
    """Each assignment with one or two other choices, once; bounds ascend and hold."""
    workload, hw = tiny_workload(seed), machine(seed)
    model = Model(workload, hw, PlannerOptions(states="host"), by_value=True)
    now: dict[str, Option] = {group.members[0]: group.options[0] for group in model.groups}
    found = list(exchanges(model, budget(ssd=2**30), now))
    changes = [{v for v in now if changed[v] != now[v]} for _, changed in found]
    assert {len(names) for names in changes} == {1, 2}
    bounds = [bound_s for bound_s, _ in found]
    assert bounds == sorted(bounds)
    assert len({tuple(changed.values()) for _, changed in found}) == len(found)
    others = [len(group.options) - 1 for group in model.groups]
    pairs = (sum(others) ** 2 - sum(n * n for n in others)) // 2
    assert len(found) == sum(others) + pairs
    for bound_s, changed in found[:40]:
        with suppress(InsufficientMemoryError):
            made = make_draft(model, changed, budget(ssd=2**30), "near")
            plan = finish_draft(made, hw, budget(ssd=2**30), model.options)
            assert bound_s <= step_seconds(workload, plan, hw) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_what_is_kept_counts_once(seed: int) -> None:
    """As much is kept as fits: the region that made it no longer does."""
    rng = random.Random(seed)
    workload = layers(*(rng.choice((1000, 3000, 8000)) for _ in range(6)))
    options = PlannerOptions(states="device")

    def made(kept: Iterable[str]) -> Draft:
        actions: dict[str, Action] = dict.fromkeys(workload.residuals, "recompute")
        actions.update(dict.fromkeys(kept, "keep"))
        regions = dict.fromkeys(workload.residuals, "all")
        choices = Choices(actions=actions, unit_tiers={}, regions=regions)
        return draft(workload, HW, budget(), options, choices, "some")

    limit = made(workload.residuals).memory.peak_bytes
    assert set(keep_greedily(made([]), limit, workload.residuals, lambda v: 1.0)) == set(
        workload.residuals
    )
    less = made([]).memory.peak_bytes
    kept = keep_greedily(made([]), less, workload.residuals, lambda v: 1.0)
    assert made(kept).memory.peak_bytes <= less
    for v in set(workload.residuals) - set(kept):
        assert made([*kept, v]).memory.peak_bytes > less


# -- bounds ---------------------------------------------------------------------------------------


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(seed=468, states="auto", schedule="serial", copies="states")  # fits unless aligned
@given(
    seed=st.integers(0, 10**6),
    states=st.sampled_from(("auto", "device", "host", "ssd")),
    schedule=st.sampled_from(SCHEDULES),
    copies=st.sampled_from(("states", "host")),
)
def test_bound_holds_for_every_plan(seed: int, states: Any, schedule: Any, copies: Any) -> None:
    """For every strategy and some random plans: the bound at exactly the memory that they use."""
    workload, hw = some_workload(seed), machine(seed)
    options = PlannerOptions(states=states, schedule=schedule, copies=copies)
    models = [Model(workload, hw, options, by_value=by_value) for by_value in (False, True)]
    planners = [name for name in names() if name not in NOT_CANDIDATES]
    for planner in [*planners, *(RandomPolicy(k) for k in range(3))]:
        limit = budget(ssd=2**30 if hw.ssds else 0)
        try:
            plan = make_plan(planner, workload, hw, limit, options)
        except (InsufficientMemoryError, PlanError):
            continue
        p = plan.prediction
        used = MemoryBudget(
            device_bytes=p.peak_device_bytes,
            host_bytes=p.peak_host_bytes,
            ssd_bytes=p.peak_ssd_bytes,
        )
        seconds = step_seconds(workload, plan, hw)
        for model in models:
            found = solve(model.program(used), model.leanest)
            assert found.status == "optimal", (planner, plan.strategy)
            assert found.bound * model.unit_s <= seconds * (1 + 1e-9), plan.strategy


@pytest.mark.parametrize("host", ["u0", "u1"])
def test_deferred_updates_run_beside_those_on_the_device(host: str) -> None:
    """30 s on the CPU and 32 s on the device after backward: one does not wait for the other."""
    ops = [("f0", 1.0, "x w0", "a"), ("f1", 1.0, "a w1", "b")]
    ops += [("b1", 1.0, "b a w1", "d g.u1"), ("b0", 1.0, "d x w0", "g.u0")]
    units = [make_unit(name, params=30, compute=2, states=13) for name in ("u0", "u1")]
    sizes = {"w0": 2, "w1": 2, "g.u0": 2, "g.u1": 2}
    workload = make_workload(ops, sizes, units, {"w0": "u0", "w1": "u1"})
    tiers: dict[str, Tier] = {**dict.fromkeys(("u0", "u1"), "device"), host: "host"}
    options = PlannerOptions(schedule="deferred", fixed_units=tiers)
    hw, limit = unit_machine(h2d=1e4, d2h=1e4), budget(2**40, 2**40, 2**40)
    _, report = Pareto().solve(workload, hw, limit, options)
    assert report.bound_s == pytest.approx(4 + 2 * (13 + 2) + 2, rel=1e-3)
    assert report.bound_s <= report.step_s < report.bound_s * 1.001


def test_bound_is_close_for_a_deep_model() -> None:
    """24 blocks, activations of four times the device: within 1% of what cannot be undercut."""
    workload = gpt_workload(layers=24, hidden=4096, batch=8, seq=1024, vocab=50257, heads=32)
    hw = HardwareProfile.preset("rtx4090-12xp5510")
    limit = MemoryBudget.from_request(hw)
    plan, report = Pareto().solve(workload, hw, limit)
    assert report.gap < 0.01
    assert report.source == "pareto"
    assert lower_bound(workload, hw, limit) == pytest.approx(report.bound_s)
    assert report.binding["backward"] == "gpu"
    assert plan.notes[0].startswith("simulated step")
    assert "lower bound" in plan.notes[0]
    assert plan.notes[1].startswith("what binds that lower bound: ")


def test_exhaustive_search_is_marked() -> None:
    plan, report = Pareto().solve(mlp_workload(), HW, budget(device=40_000))
    assert report.exhaustive
    assert "every assignment was tried or ruled out" in plan.notes[0]


# -- options --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_options_are_obeyed() -> None:
    workload = gpt_workload(layers=2)
    for states in ("device", "host", "ssd"):
        options = PlannerOptions(states=states)  # type: ignore[arg-type]
        plan = make_plan(Pareto(), workload, HW, budget(), options)
        assert {u.tier for u in plan.units.values()} == {states}
    fixed: Any = {"h0": "ssd", "h1": "host"}
    plan = make_plan(Pareto(), workload, HW, budget(), PlannerOptions(fixed_units=fixed))
    assert (plan.units["h0"].tier, plan.units["h1"].tier) == ("ssd", "host")
    for tier in ("host", "ssd"):
        options = PlannerOptions(states="host", swap_to=tier)  # type: ignore[arg-type]
        plan = make_plan(Pareto(), workload, HW, budget(device=230_000), options)
        assert {r.tier for r in plan.residuals.values() if r.action == "swap"} <= {tier}
    for schedule in SCHEDULES:
        options = PlannerOptions(schedule=schedule)
        assert make_plan(Pareto(), workload, HW, budget(), options).schedule == schedule


def test_bad_options_are_refused() -> None:
    workload = gpt_workload(layers=2)
    for options in (
        PlannerOptions(states="ssd"),
        PlannerOptions(swap_to="ssd"),
        PlannerOptions(fixed_units={"h0": "ssd"}),
    ):
        with pytest.raises(PlanError, match="no SSDs"):
            make_plan(Pareto(), workload, small_hardware(ssd=False), budget(ssd=0), options)
    with pytest.raises(PlanError, match="unknown units"):
        make_plan(Pareto(), workload, HW, budget(), PlannerOptions(fixed_units={"no": "host"}))


def test_same_input_same_plan() -> None:
    workload = gpt_workload(layers=1, dropout=True)
    one, two = (Pareto().solve(workload, HW, budget(device=300_000)) for _ in range(2))
    assert one == two
    assert one[0].fingerprint == two[0].fingerprint


def test_no_units_and_no_residuals() -> None:
    b = Builder("bare")
    b.value("x", 64, "input")
    b.op("f", ["x"], [("y", 64)], block="b")
    b.op("loss", ["y"], [("loss", 4)], block="b", output=True)
    b.op("loss.b", ["loss"], [("d", 64)], block="b", phase="backward")
    plan, report = Pareto().solve(b.build(), HW, budget())
    assert plan.residuals == {}
    assert report.step_s == pytest.approx(report.bound_s)


# -- structure ------------------------------------------------------------------------------------


def test_equal_blocks_are_found() -> None:
    workload = gpt_workload(layers=12)
    kinds: dict[int, list[str]] = {}
    for segment in segments_of(workload):
        kinds.setdefault(segment.kind, []).append(segment.name)
    assert [len(names) for names in kinds.values()] == [1, 12, 1]
    windows = windows_of(workload, segments_of(workload))
    assert len(windows) == 10
    assert list(windows.backward) == sorted(windows.backward, reverse=True)
    model = Model(workload, HW, PlannerOptions())
    assert sum(len(g.members) for g in model.groups if g.kind == "residual") == len(
        workload.residuals
    )
    assert max(len(g.members) for g in model.groups) > 1


def test_a_long_block_is_cut_where_little_crosses() -> None:
    workload = one_block(gpt_workload(layers=12))
    segments = segments_of(workload)
    assert len(segments) > 3
    made = [{workload.producer[v] for v in s.values} for s in segments]
    assert all(len(ops) <= MAX_LAYERS for ops in made)
    limit = budget(device=int(0.3 * whole_bytes(workload)))
    plan, _ = Pareto().solve(workload, HW, limit)
    check(workload, plan, limit)


def one_block(workload: Workload) -> Workload:
    """The same ops, all in one block: nothing is known to be repeated."""
    ops: tuple[Op, ...] = tuple(replace(op, block="all") for op in workload.ops)
    values = {name: replace(v, block="all") for name, v in workload.values.items()}
    return Workload(name="one", ops=ops, values=values, units=workload.units)


def deep_workload(blocks: int, forward_ops: int, *, repeated: bool) -> Workload:
    """Blocks of random ops with random reads; each block alike, or each another."""
    b = Builder(f"deep-{blocks}x{forward_ops}")
    size, params = 2**24, 2**24
    b.value("ids", 4096, "input")
    x = b.op("embed", ["ids"], [("x0", size)], block="embed")
    tapes = []
    for k in range(blocks):
        rng = random.Random(0 if repeated else k)
        block, weight = f"h{k}", f"h{k}.w"
        b.unit(block, block, {weight: params})
        made, tape = [x], []
        for i in range(forward_ops):
            heavy = i == 0 or rng.random() < 0.25
            reads = [made[-1], *([weight] if heavy else [])]
            if i == forward_ops - 1 or rng.random() < 0.25:
                reads.append(rng.choice(made))
            width = size * rng.choice((1, 1, 2, 4)) if i < forward_ops - 1 else size
            work = rng.choice((4 * 10**11, 10**12)) if heavy else 0
            reads = list(dict.fromkeys(reads))
            made.append(
                b.op(f"{block}.{i}", reads, [(f"{block}.y{i}", width)], block=block, flops=work)
            )
            tape.append((f"{block}.{i}", reads[0], heavy, rng.random() < 0.45))
        x = made[-1]
        tapes.append((block, weight, tape))
    b.op("loss", [x], [("loss", 4)], block="head", output=True)
    d = b.op("loss.b", [x], [("d", size)], block="head", phase="backward")
    for block, weight, tape in reversed(tapes):
        for i, (name, source, heavy, saved) in reversed(list(enumerate(tape))):
            reads = [d, *([source] if saved else []), *([weight] if heavy else [])]
            writes = [(f"{name}.d", size)]
            if i == 0:
                writes.append((f"grad.{weight}", 2 * params))
            work = 10**12 if heavy else 0
            d = b.op(f"{name}.b", reads, writes, block=block, phase="backward", flops=work)
            b.op(f"{name}.s", [d], [(f"{name}.t", 64)], block=block, phase="backward")
    return b.build()


@pytest.mark.slow
@pytest.mark.parametrize(("blocks", "repeated"), [(96, True), (37, False)])
def test_large_models_are_planned_in_time(blocks: int, repeated: bool) -> None:
    """13,000 ops in 96 blocks, and 5,000 ops without repetition. CPU seconds, not wall-clock."""
    import time

    workload = deep_workload(blocks, 45, repeated=repeated)
    assert len(workload.ops) > (12_900 if repeated else 4_900)
    hw = HardwareProfile.preset("rtx4090-12xp5510")
    begin = time.process_time()
    plan, report = Pareto().solve(workload, hw, MemoryBudget.from_request(hw))
    assert time.process_time() - begin < 60
    assert report.gap < 0.05
    assert len(lower(workload, plan).instructions) > len(workload.ops)


def test_the_report_is_about_the_plan() -> None:
    workload = gpt_workload(layers=1)
    limit = budget(device=300_000)
    plan, report = Pareto().solve(workload, HW, limit)
    again: Plan = Plan.from_dict(plan.to_dict())
    assert simulate(workload, again, HW).step_s == report.step_s
    assert report.num_simulated >= 1
    assert report.source in {*names(), "pareto"}
    assert report.device_s_per_byte >= 0
