"""Recompute regions smaller than a block."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lohan_fx.errors import InsufficientMemoryError
from lohan_fx.plan import Action
from lohan_fx.planners import PlannerOptions, make_plan
from lohan_fx.planners.regions import TWICE, split_regions
from lohan_fx.planners.schedule import Choices, draft, lean_draft, must_save
from lohan_fx.program import regions_of
from lohan_fx.workload import Workload
from tests.workloads import budget, gpt_workload, small_hardware, workloads

HW = small_hardware()


def actions_of(workload: Workload, swapped: set[str]) -> dict[str, Action]:
    return {v: "swap" if v in swapped else "recompute" for v in workload.residuals}


def choices_of(workload: Workload, actions: dict[str, Action], **more: object) -> Choices:
    tiers = dict.fromkeys((u.name for u in workload.units), "host")
    return Choices(actions=actions, unit_tiers=tiers, **more)  # type: ignore[arg-type]


def test_what_is_saved_cuts_a_block() -> None:
    """With the residual between attention and feed-forward part saved, they are two regions."""
    w = gpt_workload(layers=2, hidden=256, seq=128, batch=4)
    swapped = set(w.inter_block) | {"h0.a_mid"}
    names = split_regions(w, actions_of(w, swapped))
    attention = {names[f"h0.{v}"] for v in ("a_qkv", "a_att")}
    feed_forward = {names[f"h0.{v}"] for v in ("a_up", "a_gelu")}
    assert len(attention) == len(feed_forward) == 1
    assert attention != feed_forward
    assert names["h0.a_up"] in ("h0/h0.up", "h0/h0.ln2"), "named by the first op of a member"


def test_without_a_cut_matmuls_keep_a_block_together() -> None:
    """What needs the same matmul stays in one region; a norm is cheap enough to run twice."""
    w = gpt_workload(layers=2, hidden=256, seq=128, batch=4)
    names = split_regions(w, actions_of(w, set(w.inter_block)))
    joined = {names[f"h0.{v}"] for v in ("a_qkv", "a_att", "a_mid", "a_up", "a_gelu")}
    assert len(joined) == 1


def test_a_block_that_stays_whole_keeps_its_name() -> None:
    w = gpt_workload(layers=2, hidden=256, seq=128, batch=4)
    swapped = set(w.residuals) - {"h1.a_gelu"}
    assert split_regions(w, actions_of(w, swapped)) == {"h1.a_gelu": "h1"}


@settings(max_examples=30)
@given(workloads(), st.data())
def test_splitting_costs_little_and_plans_stay_legal(w: Workload, data: st.DataObject) -> None:
    saved = must_save(w)
    actions: dict[str, Action] = {
        v: data.draw(st.sampled_from(("keep", "swap")))
        if v in saved
        else data.draw(st.sampled_from(("keep", "swap", "recompute")))
        for v in w.residuals
    }
    names = split_regions(w, actions)
    assert set(names) == {v for v, a in actions.items() if a == "recompute"}
    big = budget(10**9, 10**9, 10**9)
    args = (w, HW, big, PlannerOptions())
    made = draft(*args, choices_of(w, actions, regions=names), "test", keep_tiny=False)
    whole = draft(*args, choices_of(w, actions), "test", keep_tiny=False)
    assert {v for r in made.regions for v in r.wanted} == set(names)
    for block in w.blocks:
        run = [i for r in made.regions if r.name.split("/")[0] == block for i in r.ops]
        once = {i for r in whole.regions if r.name == block for i in r.ops}
        limit = TWICE * sum(op.seconds for op in w.ops[: w.num_forward_ops] if op.block == block)
        twice = {i for i in run if run.count(i) > 1 and w.ops[i].block == block}
        # regions of other blocks may have made what a region reads: then nothing runs again
        assert all(w.ops[i].seconds <= limit for i in twice & once)


def test_only_what_does_not_fit_is_split() -> None:
    w = gpt_workload(layers=3, hidden=256, seq=128, batch=4)
    actions = actions_of(w, set(w.inter_block) | {f"h{k}.a_mid" for k in range(3)})
    choices = choices_of(w, actions)
    whole = draft(w, HW, budget(), PlannerOptions(), choices, "test")
    same = lean_draft(w, HW, budget(), PlannerOptions(), choices, "test")
    assert same.regions == whole.regions
    assert {r.name for r in whole.regions} == {"h0", "h1", "h2", "head"}
    tight = budget(whole.memory.peak_bytes - 1)
    lean = lean_draft(w, HW, tight, PlannerOptions(), choices, "test")
    assert len(lean.regions) > 4
    assert lean.memory.peak_bytes < whole.memory.peak_bytes
    chosen = choices_of(w, actions, regions=dict.fromkeys(names_of(actions), "mine"))
    kept = lean_draft(w, HW, tight, PlannerOptions(), chosen, "test")
    assert {r.name for r in kept.regions} == {"mine"}, "regions that were chosen stay"


def names_of(actions: dict[str, Action]) -> list[str]:
    return [v for v, a in actions.items() if a == "recompute"]


def test_lohan_fits_where_whole_blocks_do_not() -> None:
    """Slow SSDs make Algorithm 1 recompute all it can; memory makes it swap a little more."""
    hw = small_hardware(ssd_read_bytes_per_s=1e8, ssd_write_bytes_per_s=1e8)
    w = gpt_workload(layers=6, hidden=256, seq=128, batch=8)
    options = PlannerOptions(states="ssd", swap_to="ssd")
    roomy = make_plan("lohan-paper", w, hw, budget(), options)
    assert {r.region for r in roomy.residuals.values()} - {None} <= set(w.blocks)
    need = roomy.prediction.peak_device_bytes
    plans = []
    for percent in (90, 80, 70, 60):
        try:
            plans.append(make_plan("lohan", w, hw, budget(need * percent // 100), options))
        except InsufficientMemoryError:
            break
    assert len(plans) >= 2
    for plan in plans:
        assert plan.count("recompute") > 0, "not everything is swapped"
        assert plan.prediction.peak_device_bytes < need
        assert len(regions_of(w, plan)) > len([b for b in w.blocks if b.startswith("h")]) / 2


@pytest.mark.parametrize("module", ["lohan_fx.planners.regions"])
def test_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)
