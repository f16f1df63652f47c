"""`lohan_fx.ablate`: the table of predictions, what really running shows, plots."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lohan_fx
from lohan_fx.ablation import SLOW, Ablation, Row, ablate
from lohan_fx.errors import HardwareError, LohanError, PlanError
from lohan_fx.hardware import MemoryBudget
from lohan_fx.planned import Planned
from lohan_fx.planners import Choices, PlannerOptions, get, make_plan, names
from lohan_fx.planners.pareto import lower_bound
from lohan_fx.plots import activation_peak_bytes, swap_curve
from lohan_fx.simulate import simulate
from lohan_fx.workload import Workload
from tests.toys import made, meta, rows, toy
from tests.workloads import budget, gpt_workload, small_hardware

HW = small_hardware()
WORKLOAD = gpt_workload(layers=4, hidden=64, batch=4)
TIGHT = budget(device=1_500_000)
STRATEGIES = ("keep-all", "lohan", "recompute-all", "swap-all", "zero-infinity")


@pytest.fixture(scope="module")
def found() -> Ablation:
    memory = [TIGHT, budget()]
    return ablate(WORKLOAD, hw=HW, strategies=STRATEGIES, memory=memory)


def row_of(ablation: Ablation, strategy: str, which: int = 0) -> Row:
    return [r for r in ablation.rows if r.case.strategy == strategy][which]


# -- predictions -----------------------------------------------------------------------------


def test_one_row_a_case_in_order(found: Ablation) -> None:
    assert [r.case.strategy for r in found.rows] == [*STRATEGIES, *STRATEGIES]
    assert len({r.case.memory for r in found.rows}) == 2
    assert found.model == WORKLOAD.name
    assert found.hardware == HW.name


def test_figures_are_the_simulators(found: Ablation) -> None:
    row = row_of(found, "lohan")
    plan = make_plan("lohan", WORKLOAD, HW, TIGHT)
    simulation = simulate(WORKLOAD, plan, HW)
    assert row.planned is not None
    assert row.planned.plan == plan
    assert row.step_s == simulation.step_s
    assert row.step_s == pytest.approx(
        (row.forward_s or 0) + (row.backward_s or 0) + (row.optimizer_s or 0)
    )
    assert row.d2h_bytes == simulation.traffic.d2h_bytes
    assert row.ssd_read_bytes == simulation.traffic.ssd_read_bytes
    assert row.peak_device_bytes == simulation.peaks["device"] <= TIGHT.device_bytes
    assert row.peak_host_bytes == simulation.peaks["host"]
    assert row.bound_s == lower_bound(WORKLOAD, HW, TIGHT)
    assert row.gap == pytest.approx(simulation.step_s / row.bound_s - 1)  # type: ignore[operator]
    flops = WORKLOAD.forward_flops + WORKLOAD.backward_flops
    assert row.flops_per_s == pytest.approx(flops / simulation.step_s)
    swapped = (v for v, r in plan.residuals.items() if r.action == "swap")
    assert row.swapped_bytes == sum(WORKLOAD.values[v].num_bytes for v in swapped)
    assert row.recompute_flops == plan.prediction.recompute_flops
    assert row.schedule == "optimized"
    assert row_of(found, "zero-infinity").schedule == "serial"


def test_what_does_not_fit_is_a_row_with_the_reason(found: Ablation) -> None:
    row = row_of(found, "keep-all")
    assert not row.fits
    assert row.step_s is row.gap is row.planned is None
    assert row.reason.startswith("device: needs ")
    assert row.reason.endswith("has 1.43 MiB")
    assert row_of(found, "keep-all", 1).fits
    assert found.best is row_of(found, "keep-all", 1)
    assert Ablation(model="m", hardware="h", items="tokens", rows=(row,)).best is None


def test_axes_multiply() -> None:
    found = ablate(
        WORKLOAD,
        hw=HW,
        strategies=["swap-all"],
        states=["host", "ssd"],
        swap_to=["host", "ssd"],
        schedule=["serial", "optimized"],
    )
    assert len(found.rows) == 8
    assert len({(r.case.states, r.case.swap_to, r.case.schedule) for r in found.rows}) == 8
    for row in found.rows:
        assert row.schedule == row.case.schedule
        assert row.planned is not None
        assert {u.tier for u in row.planned.plan.units.values()} == {row.case.states}
    text = str(found)
    assert "swap_to" in text
    assert "batch" not in text


def test_all_strategies_by_default() -> None:
    found = ablate(gpt_workload(), hw=HW)
    assert {r.case.strategy for r in found.rows} == set(names()) - SLOW
    assert all(r.fits for r in found.rows)
    for row in found.rows:
        assert row.gap is not None
        assert row.gap >= -1e-9


def test_a_strategy_of_ones_own() -> None:
    def mine(workload: Workload, *_: Any) -> Choices:
        return Choices(
            actions=dict.fromkeys(workload.residuals, "swap"),
            unit_tiers={u.name: "host" for u in workload.units},
        )

    (row,) = ablate(WORKLOAD, hw=HW, strategies=[mine]).rows
    assert row.case.strategy == "mine"
    assert row.fits


def test_rows_are_told_as_they_come() -> None:
    seen: list[Row] = []
    found = ablate(WORKLOAD, hw=HW, strategies=STRATEGIES, on_row=seen.append)
    assert tuple(seen) == found.rows


def test_models_and_plans_can_be_compared() -> None:
    found = ablate(
        meta(lambda: toy(2)), rows(), hw=HW, strategies=["lohan", "swap-all"], batch=[4, 9]
    )
    assert [r.case.batch for r in found.rows] == [4, 4, 9, 9]
    assert found.items == "samples"
    planned = lohan_fx.plan(meta(lambda: toy(2)), rows(), hw=HW, batch=9)
    again = ablate(planned, strategies=["lohan", "swap-all"])
    assert [r.step_s for r in again.rows] == [r.step_s for r in found.rows[2:]]
    assert ablate(planned, strategies=["lohan"], batch=4).rows[0].step_s == found.rows[0].step_s
    slow = HW.replace(name="slow", d2h_bytes_per_s=1e6, h2d_bytes_per_s=1e6)
    (there,) = ablate(planned, hw=slow, strategies=["swap-all"]).rows
    assert (there.step_s or 0.0) > (found.rows[3].step_s or 0.0)


# -- output ----------------------------------------------------------------------------------


def test_tables(found: Ablation) -> None:
    text = str(found)
    for strategy in STRATEGIES:
        assert strategy in text
    assert "needs" in text
    assert "peaks and traffic of one step in MiB" in text
    assert "measured" not in text


def test_csv_and_json_have_every_figure(found: Ablation) -> None:
    lines = list(csv.DictReader(io.StringIO(found.to_csv())))
    data = json.loads(found.to_json())
    assert len(lines) == len(data["rows"]) == len(found.rows)
    for line, entry, row in zip(lines, data["rows"], found.rows, strict=True):
        assert list(line) == list(entry)
        assert line["strategy"] == entry["strategy"] == row.case.strategy
        assert entry["fits"] is row.fits
        assert entry["step_s"] == row.step_s
        if row.step_s is None:
            assert line["step_s"] == ""
            assert line["reason"] == row.reason
        else:
            assert math.isclose(float(line["step_s"]), row.step_s)
            assert int(line["peak_device_bytes"]) == row.peak_device_bytes


def test_markdown(found: Ablation) -> None:
    head, rule, *lines = found.to_markdown().splitlines()
    assert head.startswith("| strategy | memory | time | tokens/s |")
    assert head.count("|") == rule.count("|")
    assert len(lines) == len(found.rows)
    assert all(line.count("|") == head.count("|") for line in lines)


def test_saving(found: Ablation, tmp_path: Path) -> None:
    for suffix, text in ((".csv", found.to_csv()), (".json", found.to_json())):
        path = tmp_path / f"table{suffix}"
        found.save(path)
        assert path.read_text() == text
    found.save(tmp_path / "table.md")
    with pytest.raises(LohanError, match=r"ends in \.json, \.csv, \.md"):
        found.save(tmp_path / "table.txt")


# -- plots -----------------------------------------------------------------------------------


def test_the_swap_curve() -> None:
    """It starts at A_interBlock, ends with everything, and its choices fit."""
    curve = swap_curve(WORKLOAD, HW, budget())
    sizes = [size for size, _ in curve.points]
    assert sizes == sorted(set(sizes))
    total = sum(WORKLOAD.values[v].num_bytes for v in WORKLOAD.residuals)
    assert total * 0.99 <= sizes[-1] <= total
    base = sum(WORKLOAD.values[v].num_bytes for v in WORKLOAD.inter_block)
    assert base <= sizes[0] <= base * 1.05
    assert curve.num_skipped == 0
    assert len(curve.closed_form) >= len(curve.points)
    tight = swap_curve(WORKLOAD, HW, budget(device=480_000))
    assert tight.num_skipped > 0
    assert len(tight.points) + tight.num_skipped == len(curve.points)


def test_plots_are_drawn(found: Ablation, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for draw, name in ((found.plot, "swaps.png"), (found.plot_memory, "memory.svg")):
        draw(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 10_000
    with pytest.raises(LohanError, match="cannot draw"):
        found.plot(tmp_path / "plot.xyz")


def test_nothing_to_plot(tmp_path: Path) -> None:
    found = ablate(WORKLOAD, hw=HW, strategies=["keep-all"], memory={"device": "1KiB"})
    with pytest.raises(LohanError, match="no case fits"):
        found.plot(tmp_path / "a.png")
    assert "device: needs" in str(found)


def test_without_matplotlib(
    found: Ablation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(LohanError, match=r"pip install matplotlib, or '\.\[plots\]'"):
        found.plot(tmp_path / "a.png")


def test_activation_peaks(found: Ablation) -> None:
    planned = row_of(found, "keep-all", 1).planned
    assert planned is not None
    states = sum(u.compute_bytes + u.state_bytes for u in WORKLOAD.units)
    peak = activation_peak_bytes(planned)
    assert 0 < peak <= planned.plan.prediction.peak_device_bytes - states


# -- measuring -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> lohan_fx.HardwareProfile:
    path = str(tmp_path_factory.mktemp("ssd"))
    base = small_hardware(device_kind="cpu")
    (ssd,) = base.ssds
    return base.replace(ssds=(type(ssd)(**{**vars_of(ssd), "path": path}),))


def vars_of(x: Any) -> dict[str, Any]:
    return {name: getattr(x, name) for name in x.__dataclass_fields__}


@pytest.mark.slow
def test_measured_rows(here: lohan_fx.HardwareProfile) -> None:
    """Real steps: bytes by link are the predicted ones, losses do not depend on the strategy."""
    found = ablate(
        made,
        hw=here,
        strategies=["keep-all", "swap-all", "recompute-all"],
        memory={"device": "1MiB"},
        measure=True,
        steps=2,
        optimizer="adamw",
    )
    losses = set()
    for row in found.rows:
        assert row.measured is not None, row.reason
        m = row.measured
        assert m.step_s > 0
        assert m.timed_step_s > 0
        assert m.items_per_s == pytest.approx(8 / m.step_s)
        assert m.peak_device_bytes is None
        moved = (m.d2h_bytes, m.h2d_bytes, m.ssd_read_bytes, m.ssd_write_bytes)
        assert moved == (row.d2h_bytes, row.h2d_bytes, row.ssd_read_bytes, row.ssd_write_bytes)
        assert len(m.losses) == 5
        losses.add(m.losses)
    assert len(losses) == 1
    (falling,) = losses
    assert falling[-1] < falling[0]
    text = str(found)
    assert "measured on this machine" in text
    assert "ops timed" in text
    assert "measured samples/s" in found.to_markdown()
    data = json.loads(found.to_json())["rows"][0]
    assert data["measured_step_s"] == found.rows[0].measured.step_s  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_model_is_copied_before_it_is_measured(here: lohan_fx.HardwareProfile) -> None:
    model, x = made()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for optimizer in (None, torch.optim.SGD):
        (row,) = ablate(
            model,
            {"x": x},
            hw=here,
            strategies=["lohan"],
            measure=True,
            steps=1,
            optimizer=optimizer,
        ).rows
        assert row.measured is not None
    assert type(model).__name__ == "Toy"
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_what_cannot_be_measured(here: lohan_fx.HardwareProfile) -> None:
    model, x = made()

    def ask(model: Any, inputs: Any = None, **more: Any) -> None:
        options = {"hw": here, "strategies": ["keep-all"], "measure": True, "steps": 1, **more}
        ablate(model, inputs, **options)

    with pytest.raises(LohanError, match="inputs must be real tensors"):
        ask(model, rows())
    with pytest.raises(LohanError, match="on the meta device"):
        ask(meta(lambda: toy(2)), x)
    with pytest.raises(LohanError, match="number of measured steps, at least 1"):
        ask(model, x, steps=0)
    with pytest.raises(LohanError, match="with batch 3 needs inputs as a function"):
        ask(model, x, batch=3)
    with pytest.raises(LohanError, match="not one that exists"):
        ask(model, x, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(LohanError, match="a model with weights"):
        ask(WORKLOAD)
    with pytest.raises(LohanError, match="returns its loss"):
        ask(torch.nn.Linear(16, 4), x)
    if not torch.cuda.is_available():
        with pytest.raises(HardwareError, match="CUDA device"):
            ask(model, x, hw=HW)


# -- bad input -------------------------------------------------------------------------------


def test_one_strategy_needs_no_list() -> None:
    assert [row.case.strategy for row in ablate(WORKLOAD, hw=HW, strategies="lohan").rows] == [
        "lohan"
    ]
    assert len(ablate(WORKLOAD, hw=HW, strategies=get("lohan")).rows) == 1


def test_bad_requests() -> None:
    with pytest.raises(PlanError, match="states 'gpu' is none of auto"):
        ablate(WORKLOAD, hw=HW, strategies="lohan", states=["host", "gpu"])
    with pytest.raises(LohanError, match="hw= is missing"):
        ablate(WORKLOAD)
    with pytest.raises(PlanError, match="no strategy is named"):
        ablate(WORKLOAD, hw=HW, strategies=["lohen"])
    with pytest.raises(LohanError, match="batch= needs the model"):
        ablate(WORKLOAD, hw=HW, strategies=["lohan"], batch=3)
    with pytest.raises(HardwareError, match="unknown memory tier"):
        ablate(WORKLOAD, hw=HW, strategies=["lohan"], memory={"gpu": "1GiB"})
    with pytest.raises(LohanError, match="no model is named"):
        ablate("gpt-1b", hw=HW)
    loaded = Planned(
        model="m",
        workload=WORKLOAD,
        plan=make_plan("lohan", WORKLOAD, HW, budget()),
        hw=HW,
        budget=MemoryBudget(device_bytes=2**30, host_bytes=2**30, ssd_bytes=2**30),
        batch=4,
    )
    assert ablate(loaded, strategies=["lohan"]).rows[0].step_s == loaded.step_s
    with pytest.raises(LohanError, match="batch= needs the model"):
        ablate(loaded, strategies=["lohan"], batch=8)


def test_a_tier_that_is_not_there_is_a_reason() -> None:
    (row,) = ablate(
        WORKLOAD, hw=small_hardware(ssd=False), strategies=["swap-all"], states="ssd"
    ).rows
    assert "no SSDs" in row.reason


def test_bounds_are_of_what_a_row_was_asked_for() -> None:
    """Each of its own, whichever row came first."""
    both = ablate(WORKLOAD, hw=HW, strategies="lohan", memory=TIGHT, states=["ssd", "auto"])
    for row in both.rows:
        options: Any = PlannerOptions(states=row.case.states)
        assert row.bound_s == lower_bound(WORKLOAD, HW, TIGHT, options)
    assert both.rows[0].bound_s != both.rows[1].bound_s


def test_units_without_copies_are_a_column_where_there_are_any() -> None:
    workload = gpt_workload(masters=True)
    casts = tuple(u.name for u in workload.units)[:2]

    def casting(w: Any, hw: Any, limit: Any, options: Any) -> Any:
        options = replace(options, states="device", fixed_casts=casts)
        return make_plan("keep-all", w, hw, limit, options)

    found = ablate(workload, hw=HW, strategies=["keep-all", casting], memory=budget())
    assert [row.num_casts for row in found.rows] == [0, 2]
    text = str(found)
    assert "cast units: units on the device that keep no compute copy" in text
    assert "cast units" in found.to_markdown().splitlines()[0]
    assert "cast units" not in str(ablate(workload, hw=HW, strategies="keep-all", memory=budget()))
