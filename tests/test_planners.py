"""Every strategy gives a plan that lowers, fits its budget, and does what it predicts."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import math
import re
import subprocess
import sys
import weakref
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lohan_fx.errors import (
    InsufficientMemoryError,
    LohanError,
    PlanError,
    format_bytes,
    format_need,
)
from lohan_fx.footprint import align, host_breakdown, host_bytes_needed, ssd_bytes_needed
from lohan_fx.hardware import HardwareProfile, MemoryBudget, parse_bytes
from lohan_fx.plan import SCHEDULES, Action, Plan
from lohan_fx.planners import (
    Choices,
    PlannerOptions,
    finish,
    get,
    make_plan,
    names,
    register,
    registry,
    resident,
    tiers,
)
from lohan_fx.planners.lohan import Lohan
from lohan_fx.planners.random_policy import RandomPolicy
from lohan_fx.planners.schedule import draft, must_save, tiny_residuals
from lohan_fx.program import lower, regions_of, residency
from lohan_fx.workload import Workload
from tests.workloads import Builder, budget, gpt_workload, mlp_workload, small_hardware, workloads

STRATEGIES = ("keep-all", "swap-all", "recompute-all", "lohan", "lohan-paper", "random")
HW = small_hardware()
GOLDEN = Path(__file__).parent / "golden" / "plans"

every_option = st.builds(
    PlannerOptions,
    states=st.sampled_from(("auto", "device", "host", "ssd")),
    swap_to=st.sampled_from(("auto", "host", "ssd")),
    schedule=st.sampled_from(SCHEDULES),
    copies=st.sampled_from(("states", "host")),
)


def smallest_peak(workload: Workload, options: PlannerOptions, states: dict[str, Any]) -> int:
    """Device peak of swapping everything with the shortest windows."""
    actions: dict[str, Action] = dict.fromkeys(workload.residuals, "swap")
    choices = Choices(actions=actions, unit_tiers=states)
    made = draft(workload, HW, budget(), options, choices, "test", keep_tiny=False)
    return made.memory.peak_bytes


def check(workload: Workload, plan: Plan, limit: MemoryBudget) -> None:
    """What must hold of every finished plan."""
    memory = residency(lower(workload, plan))
    assert memory.peak_bytes == plan.prediction.peak_device_bytes <= limit.device_bytes
    host = sum(host_bytes_needed(workload, plan).values())
    ssd = sum(ssd_bytes_needed(workload, plan).values())
    assert host == plan.prediction.peak_host_bytes <= limit.host_bytes
    assert ssd == plan.prediction.peak_ssd_bytes <= limit.ssd_bytes
    index = workload.op_index
    for unit in plan.units.values():
        assert unit.tier != "device" or unit.casts or not unit.windows
        assert not unit.casts or all(w.fetch_before == w.first_use for w in unit.windows)
        for before, after in itertools.pairwise(unit.windows):
            assert index[before.last_use] < index[after.fetch_before]
    assert Plan.from_dict(plan.to_dict()) == plan


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(workload=workloads(), options=every_option, tightness=st.floats(0, 1.3))
def test_any_plan_fits_and_equals_its_prediction(
    strategy: str, workload: Workload, options: PlannerOptions, tightness: float
) -> None:
    home: Any = {"auto": "host"}.get(options.states, options.states)
    least = smallest_peak(workload, options, {u.name: home for u in workload.units})
    total = sum(v.num_bytes for v in workload.values.values())
    limit = budget(device=least + int(tightness * total))
    try:
        plan = make_plan(strategy, workload, HW, limit, options)
    except InsufficientMemoryError as error:
        assert error.need_bytes > error.have_bytes
        assert error.tier == "device"
        assert strategy not in ("swap-all", "lohan", "lohan-paper")
        return
    check(workload, plan, limit)


@settings(max_examples=30, deadline=None)
@given(
    workload=workloads(),
    options=every_option,
    host=st.integers(0, 400_000),
    ssd=st.booleans(),
    device=st.integers(10_000, 200_000),
)
def test_small_tiers_fail_by_name_or_fit(
    workload: Workload, options: PlannerOptions, host: int, ssd: bool, device: int
) -> None:
    limit = budget(device=device, host=host, ssd=300_000 if ssd else 0)
    hw = small_hardware(ssd=ssd)
    for strategy in STRATEGIES:
        try:
            plan = make_plan(strategy, workload, hw, limit, options)
        except InsufficientMemoryError as error:
            assert error.need_bytes > error.have_bytes
            assert str(error).startswith(f"not enough {error.tier} memory")
        except PlanError as error:
            assert not ssd
            assert "no SSDs" in str(error)
        else:
            check(workload, plan, limit)


@settings(max_examples=25, deadline=None)
@given(workload=workloads(), seed=st.integers(0, 99), states=st.sampled_from(("device", "host")))
def test_swap_all_has_the_smallest_peak(workload: Workload, seed: int, states: str) -> None:
    options = PlannerOptions(states=states)  # type: ignore[arg-type]
    plan = make_plan(RandomPolicy(seed), workload, HW, budget(), options)
    tiers = {name: unit.tier for name, unit in plan.units.items()}
    actions = {v: r.action for v, r in plan.residuals.items()}
    made = draft(workload, HW, budget(), options, Choices(actions=actions, unit_tiers=tiers), "x")
    assert smallest_peak(workload, options, tiers) <= made.memory.peak_bytes


@settings(max_examples=20, deadline=None)
@given(workload=workloads(), strategy=st.sampled_from(STRATEGIES), part=st.floats(0, 1))
def test_more_device_memory_never_makes_a_plan_infeasible(
    workload: Workload, strategy: str, part: float
) -> None:
    roomy = make_plan(strategy, workload, HW, budget()).prediction.peak_device_bytes
    limit = budget(device=int(roomy * part))
    try:
        make_plan(strategy, workload, HW, limit)
    except InsufficientMemoryError as error:
        limit = budget(device=error.need_bytes)
        check(workload, make_plan(strategy, workload, HW, limit), limit)
    for more in (limit.device_bytes + 1, 2 * limit.device_bytes):
        make_plan(strategy, workload, HW, budget(device=more))


@pytest.mark.parametrize("tied", [False, True])
def test_lohan_keeps_everything_if_it_fits(tied: bool) -> None:
    workload = gpt_workload(tied=tied, dropout=True)
    plan = make_plan("lohan", workload, HW, budget())
    assert plan.count("keep") == len(workload.residuals)
    assert {unit.tier for unit in plan.units.values()} == {"host"}


def test_lohan_swaps_block_inputs_and_recomputes_when_links_bind() -> None:
    workload = gpt_workload(layers=4, hidden=32, batch=4)
    plan = make_plan("lohan-paper", workload, HW, budget())
    swapped = {v for v, r in plan.residuals.items() if r.action == "swap"}
    assert swapped == workload.inter_block
    assert "case 1" in plan.notes[0]


def test_lohan_swaps_all_when_compute_binds() -> None:
    workload = gpt_workload(layers=2, hidden=256, batch=8, seq=64)
    options = PlannerOptions(states="device")
    notes = {}
    for rate in (1e13, 3e11):
        hw = small_hardware(h2d_bytes_per_s=rate, d2h_bytes_per_s=rate, duplex_bytes_per_s=2 * rate)
        plan = make_plan(Lohan(keep=False), workload, hw, budget(), options)
        notes[rate] = plan.notes[0]
        assert plan.count("swap") > len(workload.inter_block)
    assert "case 2" in notes[1e13]
    assert "case 3" in notes[3e11]


def test_more_memory_never_makes_lohan_slower() -> None:
    workload = gpt_workload(layers=6, hidden=128, batch=8, dropout=True)
    hw = small_hardware(cpu_optimizer_params_per_s=1e15)
    full = make_plan("lohan", workload, hw, budget()).prediction.peak_device_bytes
    times = []
    for part in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.5):
        limit = budget(device=int(full * part))
        times.append(make_plan("lohan", workload, hw, limit).prediction.step_s)
    for slower, faster in itertools.pairwise(times):
        assert faster <= slower * (1 + 1e-9)


def test_random_masks_are_saved_even_if_their_bits_are_no_residual() -> None:
    workload = mlp_workload()
    assert must_save(workload) == {"a0", "m0"}
    plan = make_plan("recompute-all", workload, HW, budget())
    assert plan.residuals["m0"].action == "swap"
    assert plan.residuals["a0"].action == "keep"


def test_tiny_residuals_are_kept() -> None:
    workload = gpt_workload(layers=6, hidden=2048, seq=512)
    tiny = tiny_residuals(workload)
    assert {"h0.rstd1", "h2.mean2"} <= tiny
    plan = make_plan("swap-all", workload, HW, budget(host=2**40))
    assert {v for v, r in plan.residuals.items() if r.action == "keep"} == tiny


@settings(max_examples=20, deadline=None)
@given(workload=workloads())
def test_must_save_is_what_full_recomputation_needs(workload: Workload) -> None:
    saved = must_save(workload)
    actions: dict[str, Action] = {
        v: "swap" if v in saved else "recompute" for v in workload.residuals
    }
    tiers: dict[str, Any] = dict.fromkeys(workload.unit_by_name, "host")
    choices = Choices(actions=actions, unit_tiers=tiers)
    made = draft(workload, HW, budget(), PlannerOptions(), choices, "x", keep_tiny=False)
    assert {v for v, r in made.plan.residuals.items() if r.action == "swap"} == saved
    held = {v.name for v in workload.values.values() if v.is_output}
    for v in saved:
        everything_else = (held | set(workload.residuals)) - {v}
        assert workload.recompute_ops([v], everything_else)[1], v


def test_tied_embedding_has_a_window_at_each_end() -> None:
    workload = gpt_workload(layers=3, tied=True)
    limit = budget()
    plan = make_plan("recompute-all", workload, HW, limit, PlannerOptions(states="host"))
    windows = plan.units["embed"].windows
    assert [w.first_use for w in windows] == ["embed", "head", "loss.b"]  # logits are remade
    assert plan.units["embed"].emit_after == "tie.b"
    check(workload, plan, limit)


def test_units_are_fetched_one_ahead() -> None:
    workload = gpt_workload(layers=4)
    plan = make_plan("recompute-all", workload, HW, budget(), PlannerOptions(states="host"))
    index = workload.op_index
    starts = sorted(
        (index[w.first_use], index[w.fetch_before]) for u in plan.units.values() for w in u.windows
    )
    n = workload.num_forward_ops
    for (before, _), (first, fetch) in itertools.pairwise(starts):
        assert fetch <= before or (fetch == n and before < n <= first)


def test_fixed_units_stay() -> None:
    workload = gpt_workload(layers=2)
    fixed: Any = {"h0": "device", "h1": "ssd"}
    for strategy in STRATEGIES:
        plan = make_plan(strategy, workload, HW, budget(), PlannerOptions(fixed_units=fixed))
        assert (plan.units["h0"].tier, plan.units["h1"].tier) == ("device", "ssd")
    with pytest.raises(PlanError, match="unknown units"):
        make_plan("lohan", workload, HW, budget(), PlannerOptions(fixed_units={"no": "host"}))


def copied(plan: Plan) -> list[str]:
    return [name for name, unit in plan.units.items() if unit.copy_tier == "host"]


def test_copies_fill_the_host_memory_that_is_left() -> None:
    """Whoever may choose lets copies of units on SSD live there; systems of papers leave them where
    they have them."""
    workload = gpt_workload(layers=2)
    on_ssd = PlannerOptions(states="ssd", swap_to="ssd")
    every = list(workload.unit_by_name)
    for strategy in STRATEGIES:
        assert copied(make_plan(strategy, workload, HW, budget(), on_ssd)) == []
        told = make_plan(strategy, workload, HW, budget(), replace(on_ssd, copies="host"))
        assert copied(told) == every if strategy != "random" else set(copied(told)) < set(every)
    for strategy in ("pareto", "lohan-resident"):
        assert copied(make_plan(strategy, workload, HW, budget(), on_ssd)) == every
        no = make_plan(strategy, workload, HW, budget(), replace(on_ssd, copies="states"))
        assert copied(no) == []


def test_copies_of_units_used_first_come_first() -> None:
    workload = gpt_workload(layers=16)
    options = PlannerOptions(states="ssd", swap_to="ssd", copies="host")
    without = make_plan("lohan", workload, HW, budget(), replace(options, copies="states"))
    units = workload.units[:4]
    room = sum(align(u.compute_bytes) for u in units)
    limit = budget(host=without.prediction.peak_host_bytes + room)
    plan = make_plan("lohan", workload, HW, limit, options)
    assert copied(plan) == [u.name for u in units]
    traffic = sum((len(plan.units[u.name].windows) + 1) * u.compute_bytes for u in units)
    before, after = without.prediction, plan.prediction
    saved = before.ssd_read_bytes + before.ssd_write_bytes
    assert saved - after.ssd_read_bytes - after.ssd_write_bytes == traffic


def test_copies_take_no_room_from_what_is_swapped() -> None:
    workload = gpt_workload(layers=4, hidden=64, batch=8)
    options = PlannerOptions(states="ssd", swap_to="host")
    before = make_plan("swap-all", workload, HW, budget(), options)
    need = before.prediction.peak_host_bytes
    args = ("swap-all", workload, HW, budget(host=need), replace(options, copies="host"))
    assert make_plan(*args).residuals == before.residuals


def test_copies_that_are_fixed_stay() -> None:
    workload = gpt_workload(layers=2)
    units = dict.fromkeys(workload.unit_by_name, "ssd")
    options = PlannerOptions(fixed_units=units, fixed_copies=("embed", "h1"))  # type: ignore[arg-type]
    for strategy in (*STRATEGIES, "pareto", "lohan-resident"):
        assert copied(make_plan(strategy, workload, HW, budget(), options)) == ["embed", "h1"]


def test_only_a_copy_of_something_leaves_its_states() -> None:
    workload = mlp_workload()
    units = tuple(replace(u, own_master=True) for u in workload.units)
    options = PlannerOptions(states="ssd", copies="host")
    for strategy in ("swap-all", "pareto"):
        plan = make_plan(strategy, replace(workload, units=units), HW, budget(), options)
        assert copied(plan) == []


def test_states_spill_to_ssd_from_the_last_unit() -> None:
    workload = gpt_workload(layers=8, hidden=64)
    need = sum(u.compute_bytes + u.state_bytes for u in workload.units)
    plan = make_plan("swap-all", workload, HW, budget(host=int(need * 0.75)))
    tiers = [plan.units[u.name].tier for u in workload.units]
    assert set(tiers) == {"host", "ssd"}
    assert tiers[0] == "host"
    assert tiers[-2] == "ssd"


def test_host_is_for_what_is_used_soonest() -> None:
    workload = gpt_workload(layers=4)
    options = PlannerOptions(states="device")
    plan = make_plan("swap-all", workload, HW, budget(host=400_000), options)
    uses = {
        tier: [workload.first_backward_use(v) for v, r in plan.residuals.items() if r.tier == tier]
        for tier in ("host", "ssd")
    }
    assert uses["host"]
    assert uses["ssd"]
    big = [v for v in workload.residuals if workload.values[v].num_bytes > 8192]
    soon = min(big, key=workload.first_backward_use)
    assert plan.residuals[soon].tier == "host"


def test_swapping_leaves_time_for_the_copy() -> None:
    """With memory to spare, a release stands where the lane has finished, not at once."""
    workload = gpt_workload(layers=4, hidden=128)
    plan = make_plan("swap-all", workload, HW, budget(), PlannerOptions(states="device"))
    index = workload.op_index
    late = [
        v
        for v, r in plan.residuals.items()
        if r.action == "swap" and index[r.release_after or ""] > workload.last_forward_use(v)
    ]
    early = [
        v
        for v, r in plan.residuals.items()
        if r.action == "swap" and index[r.prefetch_before or ""] < workload.first_backward_use(v)
    ]
    assert len(late) > len(workload.residuals) / 2
    assert len(early) > len(workload.residuals) / 2


def test_units_stay_in_host_memory_where_ssd_buffers_need_more() -> None:
    """Updates on SSD pass through three buffers of the largest unit: a large embedding stays."""
    workload = gpt_workload(layers=6, hidden=64, vocab=8192)
    home: dict[str, Any] = {u.name: "host" if u.name in _ENDS else "ssd" for u in workload.units}
    largest = max(workload.values[v].num_bytes for v in workload.residuals)
    need = sum(host_breakdown(workload.units, home, "optimized", (), [largest]).values())
    on_ssd: dict[str, Any] = dict.fromkeys(home, "ssd")
    assert need < sum(host_breakdown(workload.units, on_ssd, "optimized").values())
    limit = budget(host=need)
    plan = make_plan("swap-all", workload, HW, limit)
    assert {plan.units[name].tier for name in _ENDS} == {"host"}
    check(workload, plan, limit)


_ENDS = ("embed", "head")


def test_host_memory_is_set_aside_for_staging() -> None:
    """What must be swapped has room nowhere but on SSD, which is reached through host memory."""
    workload = gpt_workload(layers=4, hidden=64, batch=8)
    home: dict[str, Any] = {u.name: "host" for u in workload.units}
    units = sum(host_breakdown(workload.units, home, "optimized").values())
    for host in (units, units + 4096):
        limit = budget(device=900_000, host=host)
        plan = make_plan("lohan", workload, HW, limit)
        kept = {v for v, r in plan.residuals.items() if r.action == "keep"}
        assert not workload.inter_block <= kept
        check(workload, plan, limit)


def test_a_broken_plan_file_is_a_plan_error(tmp_path: Path) -> None:
    plan = make_plan("lohan", mlp_workload(), HW, budget())
    assert plan.prediction.recompute_s >= 0
    data = plan.to_dict()
    for key in ("residuals", "units", "prediction", "schedule"):
        with pytest.raises(PlanError, match=key):
            Plan.from_dict({k: v for k, v in data.items() if k != key})
    with pytest.raises(PlanError, match="action"):
        Plan.from_dict({**data, "residuals": {"a0": {"act": "keep"}}})
    path = tmp_path / "plan.json"
    plan.save(path)
    path.write_text(path.read_text()[:-40])
    with pytest.raises(PlanError, match="is no JSON file"):
        Plan.load(path)
    path.write_text("[]")
    with pytest.raises(PlanError, match="holds a list"):
        Plan.load(path)


def test_a_plan_prints_as_a_summary() -> None:
    plan = make_plan("lohan", mlp_workload(), HW, budget(), PlannerOptions(states="host"))
    text = str(dataclasses.replace(plan, notes=("so it is",)))
    lines = text.splitlines()
    assert lines[0] == f"lohan plan for {plan.workload}, schedule {plan.schedule}"
    assert f"{plan.count('keep')} keep" in lines[1]
    assert lines[2] == f"units: {len(plan.units)} host"
    assert "device peak" in lines[3]
    assert lines[-1] == "note: so it is"
    assert repr(plan).startswith("Plan(strategy='lohan'")


def test_unknown_options_are_refused() -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"states": "gpu"}, "states 'gpu' is none of auto, device, host, ssd"),
        ({"swap_to": "disk"}, "swap_to 'disk' is none of auto, host, ssd"),
        ({"copies": "ssd"}, "copies 'ssd' is none of auto, states, host"),
        ({"schedule": "fast"}, "schedule 'fast' is none of auto, serial"),
        ({"fixed_units": {"u": "gpu"}}, r"fixed_units\['u'\] 'gpu' is none of device"),
    ]
    for options, message in bad:
        with pytest.raises(PlanError, match=message):
            PlannerOptions(**options)


def test_choices_that_make_no_sense_are_refused() -> None:
    w = mlp_workload()
    good: dict[str, Any] = {
        "actions": dict.fromkeys(w.residuals, "swap"),
        "unit_tiers": dict.fromkeys(w.unit_by_name, "host"),
    }
    v, unit = w.residuals[0], w.units[0]
    bad: list[tuple[dict[str, Any], str]] = [
        ({"actions": {**good["actions"], v: "offload"}}, f"{v}.* is 'offload': use keep, swap"),
        ({"unit_tiers": {**good["unit_tiers"], unit.name: "gpu"}}, "is 'gpu': use device, host"),
        ({"unit_tiers": dict.fromkeys(w.units, "host")}, "unit_tiers has a Unit as a key"),
        ({"swap_tiers": {v: "device"}}, "is 'device': use host, ssd"),
        ({"modes": {unit.name: "read"}}, "is 'read': use fetch"),
        ({"actions": {}}, f"actions lacks {len(w.residuals)} of"),
        ({"actions": {**good["actions"], "odd": "keep"}}, r"does not have: \['odd'\]"),
    ]
    for change, message in bad:
        with pytest.raises(PlanError, match=message):
            make_plan(lambda *_, c=change: Choices(**{**good, **c}), w, HW, budget())


def test_the_strategy_of_the_documentation_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_PLANNERS", dict(registry._PLANNERS))
    text = (Path(__file__).parents[1] / "docs" / "planners.md").read_text(encoding="utf-8")
    code = text.partition("```python\n")[2].partition("\nprint(")[0]
    exec(code, {})
    workload = mlp_workload()
    plan = make_plan("swap-large", workload, HW, budget())
    assert plan.strategy == "swap-large"
    assert {unit.tier for unit in plan.units.values()} == {"host"}


def test_what_does_not_fit_is_not_advised_again() -> None:
    for strategy in ("pareto", "swap-all"):
        with pytest.raises(InsufficientMemoryError) as error:
            make_plan(strategy, gpt_workload(), HW, budget(device=1000))
        advice = str(error.value).splitlines()[-1]
        assert ("try strategy='pareto'" in advice) == (strategy != "pareto")
        assert "swap-all" not in advice


def test_unknown_strategy_names_the_nearest() -> None:
    with pytest.raises(PlanError, match=r"'PARETO'; did you mean 'pareto'\? Known: "):
        get("PARETO")
    with pytest.raises(PlanError, match=r"named 'xyzzy'\. Known: "):
        get("xyzzy")
    with pytest.raises(PlanError, match=r"did you mean 'lohan'.*keep-all"):
        get("lohen")
    assert set(STRATEGIES) <= set(names())
    with pytest.raises(PlanError, match="registered already"):
        register("lohan")(RandomPolicy())


def test_a_callable_may_return_choices() -> None:
    workload = mlp_workload()

    def mine(w: Workload, hw: HardwareProfile, b: MemoryBudget, o: PlannerOptions) -> Choices:
        return Choices(
            actions=dict.fromkeys(w.residuals, "keep"),
            unit_tiers=dict.fromkeys(w.unit_by_name, "ssd"),
        )

    plan = make_plan(mine, workload, HW, budget())
    assert plan.strategy == "mine"
    check(workload, plan, budget())

    def forgets(*_: object) -> None:
        pass

    with pytest.raises(PlanError, match="strategy 'forgets' returned NoneType: return a Plan or"):
        make_plan(forgets, workload, HW, budget())  # type: ignore[arg-type]


def test_incomplete_choices_are_refused() -> None:
    workload = mlp_workload()
    tiers: Any = dict.fromkeys(workload.unit_by_name, "host")
    for choices in (
        Choices(actions={}, unit_tiers=tiers),
        Choices(actions=dict.fromkeys(workload.residuals, "keep"), unit_tiers={}),
    ):
        with pytest.raises(PlanError, match="lacks"):
            finish(workload, HW, budget(), PlannerOptions(), choices, "x")


def test_no_room_is_explained() -> None:
    workload = gpt_workload()
    with pytest.raises(InsufficientMemoryError) as caught:
        make_plan("lohan", workload, HW, budget(device=1000))
    assert caught.value.tier == "device"
    assert caught.value.at_peak
    assert caught.value.where
    with pytest.raises(InsufficientMemoryError) as caught:
        make_plan("swap-all", workload, small_hardware(ssd=False), budget(host=1000, ssd=0))
    assert caught.value.tier == "host"


def test_lohan_puts_units_on_the_device_if_nothing_else_has_room() -> None:
    workload = gpt_workload()
    hw, limit = small_hardware(ssd=False), budget(host=1000, ssd=0)
    plan = make_plan("lohan", workload, hw, limit)
    assert {unit.tier for unit in plan.units.values()} == {"device"}
    assert "too little host memory" in plan.notes[0]
    check(workload, plan, limit)


class _Held:
    """Stands for the tensors in a caller's variables."""


def _plan_beside(strategy: str, limit: MemoryBudget) -> weakref.ref[_Held]:
    held = _Held()
    with suppress(LohanError):
        make_plan(strategy, gpt_workload(layers=1), HW, limit)
    return weakref.ref(held)


@pytest.mark.parametrize("strategy", [n for n in names() if "checkmate" not in n])
def test_planning_holds_nothing_of_its_callers(strategy: str) -> None:
    """An error that its own frame keeps would hold all callers' frames, and with them tensors on
    the device, until garbage is collected. (PuLP keeps one, once a process.)"""
    gc.collect()
    gc.disable()
    try:
        for device_bytes in (400_000, 300_000, 60_000):
            held = _plan_beside(strategy, budget(device=device_bytes))
            assert held() is None, device_bytes
    finally:
        gc.enable()


def test_planners_do_not_import_torch() -> None:
    code = "import sys, lohan_fx.planners; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_same_input_same_plan() -> None:
    workload = gpt_workload(dropout=True)
    for strategy in STRATEGIES:
        limit = budget(device=500_000 if strategy.startswith("lohan") else 2**30)
        one, two = (make_plan(strategy, workload, HW, limit) for _ in range(2))
        assert one == two
        assert one.fingerprint == two.fingerprint


def print_plan(workload: Workload, plan: Plan) -> str:
    """A short form of a plan, for golden files."""
    p = plan.prediction
    lines = [
        f"{plan.strategy} of {plan.workload}, {plan.schedule}",
        f"peaks: device {p.peak_device_bytes}, host {p.peak_host_bytes}, ssd {p.peak_ssd_bytes}",
        f"d2h {p.d2h_bytes}, h2d {p.h2d_bytes}, recompute {p.recompute_flops} FLOPs; {p.binding}",
    ]
    for v, r in plan.residuals.items():
        where = f" {r.tier}, release after {r.release_after}, prefetch before {r.prefetch_before}"
        tail = {"keep": "", "swap": where, "recompute": f" in {r.region}"}[r.action]
        lines.append(f"{v}: {r.action}{tail}")
    for name, unit in plan.units.items():
        direct = ", read in place" if unit.access == "direct" else ""
        direct += ", gradients written in place" if unit.gradients == "direct" else ""
        lines.append(f"{name}: {unit.tier}{direct}")
        lines += [f"  {w.fetch_before} | {w.first_use} .. {w.last_use}" for w in unit.windows]
        lines.append(f"  emit {unit.emit_after}, release {unit.release_gradients_after}")
    regions = regions_of(workload, plan)
    lines += [f"region {r.name} before {workload.ops[r.anchor].name}: {r.ops}" for r in regions]
    lines += [f"note: {note}" for note in plan.notes]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("strategy", [*STRATEGIES, "lohan-resident", "pareto"])
def test_golden_plans(strategy: str, request: pytest.FixtureRequest) -> None:
    workload = mlp_workload()
    limit = budget() if strategy in ("keep-all", "random") else budget(device=40_000)
    text = print_plan(workload, make_plan(strategy, workload, HW, limit))
    assert text.count("\n") <= 25
    path = GOLDEN / f"{strategy}.txt"
    if request.config.getoption("--regen-golden"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


@settings(max_examples=30, deadline=None)
@given(
    layers=st.integers(26, 34),
    seconds=st.one_of(
        st.lists(st.integers(0, 9), min_size=40, max_size=40),
        st.integers(0, 40).map(lambda k: [9 if i == k % 27 else math.inf for i in range(40)]),
    ),
)
def test_the_count_of_resident_units_that_was_best_is_kept(
    layers: int, seconds: list[float]
) -> None:
    """Whatever the counts are worth: the search narrows around the best that it has seen; and it
    finds one that fits, if there is one."""
    workload, plan = _of_layers(layers)
    tried: dict[int, float] = {}

    def planned(self: object, count: int, parked: int) -> tuple[float, Plan] | None:
        assert not parked
        tried[count] = seconds[count]
        if seconds[count] == math.inf:
            return None
        return seconds[count], replace(plan, notes=(f"count {count}",))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resident._Counts, "_plan", planned)
        found = resident.plan_resident(workload, small_hardware(), budget(), PlannerOptions())
    best = int(found.notes[-1].removeprefix("count "))
    assert tried[best] == min(tried.values())


@functools.cache
def _of_layers(layers: int) -> tuple[Workload, Plan]:
    workload = gpt_workload(layers=layers)
    return workload, make_plan("lohan", workload, small_hardware(), budget(), PlannerOptions())


@pytest.mark.parametrize(
    ("states", "ssd", "last"),
    [
        ("auto", True, "ssd"),
        ("auto", False, "host"),
        ("host", True, "host"),
        ("device", True, "device"),
        ("ssd", True, "ssd"),
    ],
)
@pytest.mark.parametrize("strategy", ["lohan", "lohan-resident", "keep-all"])
def test_states_that_fit_nowhere_are_refused_at_once(
    strategy: str, states: Any, ssd: bool, last: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the need of what must hold the rest; the strategy would have found no plan either."""
    workload, hw = gpt_workload(), small_hardware(ssd=ssd)
    need = sum(u.state_bytes for u in workload.units)
    if states != "ssd":  # compute copies may be in host memory then
        need += sum(u.compute_bytes for u in workload.units)
    share = need // 4
    allowed = [last] if states != "auto" else ["device", "host", *["ssd"] * ssd]
    have = dict.fromkeys(allowed, share)
    have[last] = need - share * (len(allowed) - 1)
    rest = dict.fromkeys({"device", "host", "ssd"} - set(allowed), 2**40)
    enough = budget(**have, **rest)
    have[last] -= 1
    limit = budget(**have, **rest)
    options = PlannerOptions(states=states)
    with pytest.raises(InsufficientMemoryError, match=f"strategy '{strategy}'"):
        make_plan(strategy, workload, hw, limit, options)
    tiers.check_states_fit(workload, hw, limit, options)  # it is small: the strategy is quick
    monkeypatch.setattr(tiers, "QUICK_OPS", 0)
    tiers.check_states_fit(workload, hw, enough, options)
    with pytest.raises(InsufficientMemoryError, match="no batch is small enough") as error:
        tiers.check_states_fit(workload, hw, limit, options)
    found = error.value
    assert (found.tier, found.have_bytes) == (last, have[last])
    if last == "ssd":  # it is about a plan, and says what none undercuts
        assert f"with less than {format_need(have[last] + 1)} of SSDs" in found.advice
        make_plan("lohan", workload, hw, asked_for(found, limit), options)
        return
    assert found.need_bytes == have[last] + 1
    assert ("states='auto'" in found.advice) == (states != "auto")
    assert ("or an SSD" in found.advice) == (states == "auto" and not ssd)


def asked_for(error: InsufficientMemoryError, limit: MemoryBudget) -> MemoryBudget:
    """A budget with what an error's way with SSDs asks for, as it is printed."""
    names = {"SSDs": "ssd_bytes", "host memory": "host_bytes", "device memory": "device_bytes"}
    asked = re.findall(r"([\d.]+ \w+) of (SSDs|host memory|device memory) \(there", error.advice)
    assert asked
    return replace(limit, **{names[what]: parse_bytes(size) for size, what in asked})


@pytest.mark.parametrize("states", ["auto", "ssd"])
@pytest.mark.parametrize("schedule", ["auto", "deferred"])
@pytest.mark.parametrize("share", [64, 1])
def test_states_that_fit_nowhere_say_what_would_do(
    states: Any, schedule: Any, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each tier that lacks, also the buffers in host memory, and the working set on the device:
    states that are thought to fill those leave no room for either."""
    monkeypatch.setattr(tiers, "QUICK_OPS", 0)
    workload, hw = gpt_workload(layers=8), small_hardware()
    options = PlannerOptions(states=states, schedule=schedule)
    free = make_plan("lohan", workload, hw, budget(), replace(options, states="ssd")).prediction
    device = free.peak_device_bytes if share == 1 else free.peak_device_bytes // share
    limit = budget(device=device, host=4096, ssd=4096)
    with pytest.raises(InsufficientMemoryError, match="there is a plan") as error:
        tiers.check_states_fit(workload, hw, limit, options)
    found = error.value
    asked = asked_for(found, limit)
    with pytest.raises(InsufficientMemoryError, match="For states alone"):
        tiers.check_states_fit(workload, hw, limit, replace(options, explain=False))
    assert found.tier == "ssd"
    assert parse_bytes(format_need(found.need_bytes)) == asked.ssd_bytes
    assert (asked.device_bytes > device) == (share > 1)
    for strategy in ("lohan", "pareto"):
        make_plan(strategy, workload, hw, asked, options)


@pytest.mark.parametrize("states", ["auto", "ssd"])
def test_pareto_names_the_way_with_ssds(states: Any) -> None:
    """Beside what it says of the device and of host memory, which are no smaller than all states
    then; with just that much there is a plan."""
    workload, hw = gpt_workload(layers=8), small_hardware()
    options = PlannerOptions(states=states)
    free = make_plan("lohan", workload, hw, budget(), replace(options, states="ssd")).prediction
    limit = budget(device=free.peak_device_bytes, host=4096, ssd=free.peak_ssd_bytes // 3)
    with pytest.raises(InsufficientMemoryError) as error:
        make_plan("pareto", workload, hw, limit, options)
    assert "Or use SSDs: with " in error.value.advice
    asked = asked_for(error.value, limit)
    assert asked.ssd_bytes <= 1.01 * free.peak_ssd_bytes
    make_plan("pareto", workload, hw, asked, options)


def test_what_is_wrong_first_is_said_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little memory for states, and: no SSDs to swap to; no space on them; a user's strategy,
    of which nobody knows what it does."""
    monkeypatch.setattr(tiers, "QUICK_OPS", 0)
    workload, none = gpt_workload(), budget(device=0, host=0, ssd=0)
    for options in (PlannerOptions(swap_to="ssd"), PlannerOptions(states="ssd")):
        tiers.check_states_fit(workload, small_hardware(ssd=False), none, options)
        with pytest.raises(PlanError, match="has no SSDs"):
            tiers.check_ssds(small_hardware(ssd=False), options)
    with pytest.raises(InsufficientMemoryError, match="not enough host memory"):
        tiers.check_states_fit(workload, small_hardware(), none, PlannerOptions())


@pytest.mark.parametrize("accumulator", [False, True])
def test_the_advice_is_about_what_takes_host_memory(accumulator: bool) -> None:
    """Gradients that wait, of units on SSDs: neither an SSD nor a smaller batch takes any away."""
    workload = gpt_workload()
    if accumulator:
        units = [replace(u, accumulator_bytes=4 * u.num_params) for u in workload.units]
        workload = replace(workload, units=tuple(units))
    options = PlannerOptions(states="ssd", swap_to="ssd", schedule="deferred")
    plan = make_plan("swap-all", workload, small_hardware(), budget(), options)
    need = sum(host_bytes_needed(workload, plan).values())
    with pytest.raises(InsufficientMemoryError) as error:
        make_plan("swap-all", workload, small_hardware(), budget(host=need - 1), options)
    assert ("accumulate='manual'" in error.value.advice) is not accumulator
    assert "smaller batch" not in error.value.advice
    workload = gpt_workload(layers=8)  # few of its units fill the buffers that SSD units need
    in_host = PlannerOptions(states="host", swap_to="host")
    plan = make_plan("swap-all", workload, small_hardware(), budget(), in_host)
    need = sum(host_bytes_needed(workload, plan).values())
    with pytest.raises(InsufficientMemoryError) as error:
        make_plan("swap-all", workload, small_hardware(), budget(host=need - 1), in_host)
    for part in ("states='ssd'", "swap_to='ssd'", "a smaller batch", "recomputes"):
        assert part in error.value.advice
    assert "accumulate=" not in error.value.advice


def test_the_advice_is_enough() -> None:
    """The SSD that states would need, and what the schedule that updates in turn does: with that
    much, to the byte, there is a plan."""
    workload, hw = gpt_workload(layers=8), small_hardware()
    options = PlannerOptions(states="host", swap_to="host")
    with pytest.raises(InsufficientMemoryError) as error:
        make_plan("recompute-all", workload, hw, budget(host=1, ssd=1), options)
    on_ssd = PlannerOptions(states="ssd", swap_to="host")
    plan = make_plan("recompute-all", workload, hw, budget(), on_ssd)
    states = ssd_bytes_needed(workload, plan)["units"]
    assert f"an SSD of {format_need(states)} for states" in error.value.advice
    make_plan("recompute-all", workload, hw, budget(ssd=states), on_ssd)

    need = sum(host_bytes_needed(workload, plan).values())
    with pytest.raises(InsufficientMemoryError) as error:
        make_plan("recompute-all", workload, hw, budget(host=need - 1), on_ssd)
    serial = replace(on_ssd, schedule="serial")
    less = sum(
        host_bytes_needed(
            workload, make_plan("recompute-all", workload, hw, budget(), serial)
        ).values()
    )
    assert less < need
    assert f"With schedule='serial' it needs {format_need(less)}" in error.value.advice
    make_plan("recompute-all", workload, hw, budget(host=less), serial)


def test_states_on_ssd_are_advised_where_that_helps() -> None:
    """Their buffers take host memory: how much, is said where there is less; nothing is where they
    take more than states in host memory."""
    hw, options = small_hardware(), PlannerOptions(states="host", swap_to="host")
    for layers in (1, 8):
        workload = gpt_workload(layers=layers)
        plan = make_plan("recompute-all", workload, hw, budget(), options)
        whole = sum(host_bytes_needed(workload, plan).values())
        on_ssd = dict.fromkeys(workload.unit_by_name, "ssd")
        need = sum(host_breakdown(workload.units, on_ssd, "optimized").values())
        assert (need < whole) == (layers == 8)
        for host in {min(need, whole) - 1, whole - 1}:
            with pytest.raises(InsufficientMemoryError) as error:
                make_plan("recompute-all", workload, hw, budget(host=host), options)
            advice, size = error.value.advice, f", which needs {format_need(need)} of host memory"
            assert ("states='ssd'" in advice) == (need < whole)
            assert (f"(states='ssd'{size})" in advice) == (host < need < whole)
            if host >= need:
                make_plan(
                    "recompute-all", workload, hw, budget(host=host), replace(options, states="ssd")
                )


@pytest.mark.parametrize("strategy", ["lohan", "lohan-resident"])
def test_a_shortage_of_two_tiers_names_both(strategy: str) -> None:
    """With as much host memory as is said, there would be too little SSD."""
    workload, hw = gpt_workload(layers=8), small_hardware()
    p = make_plan(strategy, workload, hw, budget(), PlannerOptions(states="ssd")).prediction
    small = budget(device=2 * p.peak_device_bytes, host=1000, ssd=p.peak_ssd_bytes // 4)
    with pytest.raises(InsufficientMemoryError, match="not enough host memory") as error:
        make_plan(strategy, workload, hw, small)
    found = re.search(r"Not enough ssd memory either: need (.*), have (.*)\.", str(error.value))
    assert found is not None
    assert found[2] == format_bytes(small.ssd_bytes)
    both = replace(small, host_bytes=error.value.need_bytes, ssd_bytes=parse_bytes(found[1]))
    make_plan(strategy, workload, hw, both)


def test_device_advice_is_of_what_helps() -> None:
    """No batch where states alone are too large; no strategy where an op alone is; then states
    elsewhere, by a value that lets them be there."""
    b, hw = Builder("bare"), small_hardware()
    b.value("x", 64, "input")
    b.op("f", ["x"], [("y", 64)], block="b")
    b.op("loss", ["y"], [("loss", 4)], block="b", output=True)
    b.op("loss.b", ["loss", "y"], [("d", 64)], block="b", phase="backward")
    with pytest.raises(InsufficientMemoryError) as error:
        make_plan("lohan", b.build(), hw, budget(device=100))
    assert error.value.advice == "Give the plan more device memory or a smaller batch."
    with pytest.raises(InsufficientMemoryError):
        make_plan("pareto", b.build(), hw, budget(device=error.value.need_bytes - 1))
    workload = gpt_workload()
    with pytest.raises(InsufficientMemoryError, match="batch, or try strategy='pareto'"):
        make_plan("lohan", workload, hw, budget(device=1000))
    for strategy, auto in (("lohan", "auto"), ("lohan-resident", "auto"), ("capuchin", "host")):
        options = PlannerOptions(states="device")
        with pytest.raises(InsufficientMemoryError) as error:
            make_plan(strategy, workload, hw, budget(device=1000), options)
        advice = error.value.advice
        assert f"memory, or let states be elsewhere, too (states={auto!r})" in advice
        assert "strategy='pareto'" in advice
    with pytest.raises(InsufficientMemoryError, match=r"\(states='host'\)"):
        make_plan("capuchin", workload, hw, budget(device=1000))
