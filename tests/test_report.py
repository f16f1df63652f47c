"""Tables that people read: what they say of a plan, and that they say it in 80 columns."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lohan_fx.ablation import ablate
from lohan_fx.errors import InsufficientMemoryError, LohanError
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.metrics import KEYS
from lohan_fx.plan import Plan
from lohan_fx.planned import Planned
from lohan_fx.planners import PlannerOptions, make_plan
from lohan_fx.report import (
    footprint_parts,
    hardware_table,
    memory_table,
    moved_text,
    plan_file_parts,
    plan_parts,
    plan_table,
    presets_table,
    render,
    short_bytes,
    step_table,
)
from lohan_fx.runtime.lanes import Counters
from lohan_fx.runtime.recording import Recorder
from lohan_fx.timeline import format_diff, load_trace
from lohan_fx.workload import Workload
from tests.workloads import budget, gpt_workload, small_hardware

HW = small_hardware()
WORKLOAD = gpt_workload()


def plan_of(
    strategy: str, limit: MemoryBudget | None = None, workload: Workload = WORKLOAD
) -> Plan:
    options = PlannerOptions(states="ssd", swap_to="ssd")
    return make_plan(strategy, workload, HW, limit or budget(), options)


def rows(text: str) -> list[list[str]]:
    """The cells of every row of every table in a text."""
    lines = [line for line in text.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def parsed_bytes(cell: str) -> float:
    if not cell:
        return 0.0
    number, unit = cell.split()
    return float(number) * 1024 ** ["B", "KiB", "MiB", "GiB"].index(unit)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (12 * 2**20, "12.0 MiB"),
        (999 * 2**20, "999 MiB"),
        (1.5 * 2**30, "1.50 GiB"),
        (3 * 2**50, "3072 TiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_short_bytes(num_bytes: float, text: str) -> None:
    assert short_bytes(num_bytes) == text


@pytest.mark.parametrize("strategy", ["keep-all", "swap-all", "recompute-all"])
def test_the_plan_table_accounts_for_every_byte(strategy: str) -> None:
    plan = plan_of(strategy)
    total = rows(render([plan_table(WORKLOAD, plan)]))[-1]
    assert total[0] == "all"
    shown = sum(parsed_bytes(cell) for cell in total[1:5])
    exact = sum(WORKLOAD.values[v].num_bytes for v in WORKLOAD.residuals)
    assert shown == pytest.approx(exact, rel=0.01)


def test_the_plan_table_sorts_bytes_by_decision() -> None:
    plan = plan_of("swap-all")
    first = WORKLOAD.residuals[0]
    block = WORKLOAD.values[first].block
    size = WORKLOAD.values[first].num_bytes
    others = {v: replace(r, action="keep", tier="device") for v, r in plan.residuals.items()}
    for column, decision in enumerate(
        (
            replace(plan.residuals[first], action="keep", tier="device"),
            replace(plan.residuals[first], action="swap", tier="host"),
            replace(plan.residuals[first], action="swap", tier="ssd"),
            replace(plan.residuals[first], action="recompute", tier="device"),
        ),
        start=1,
    ):
        changed = replace(plan, residuals={**others, first: decision})
        row = next(r for r in rows(render([plan_table(WORKLOAD, changed)])) if r[0] == block)
        kept = sum(
            WORKLOAD.values[v].num_bytes
            for v in WORKLOAD.residuals
            if v != first and WORKLOAD.values[v].block == block
        )
        assert parsed_bytes(row[column]) == pytest.approx(size + (kept if column == 1 else 0), 0.01)


def test_states_are_shown_by_tier_and_access() -> None:
    plan = plan_of("swap-all")
    unit = WORKLOAD.units[0]
    assert {r[5] for r in rows(render([plan_table(WORKLOAD, plan)]))[:-1]} <= {"ssd", ""}
    direct = replace(plan.units[unit.name], tier="host", access="direct")
    changed = replace(plan, units={**plan.units, unit.name: direct})
    found = {r[0]: r[5] for r in rows(render([plan_table(WORKLOAD, changed)]))}
    assert found[unit.block] == "host, direct"


def test_neighbours_that_are_treated_alike_share_a_row() -> None:
    workload = gpt_workload(layers=12)
    text = render([plan_table(workload, plan_of("keep-all", workload=workload))])
    blocks = [b for b in workload.blocks if b not in text]
    assert len(blocks) >= 9
    assert re.search(r"… \S+ \(12×\)", text)


def test_memory_shows_the_share_of_the_budget() -> None:
    plan = plan_of("swap-all")
    limit = budget(device=plan.prediction.peak_device_bytes * 2)
    found = {r[0]: r[1:] for r in rows(render([memory_table(plan, limit)]))}
    assert found["device"][-1] == "50%"
    assert found["ssd"][1] == "1.00 GiB"
    none = replace(limit, ssd_bytes=0)
    assert {r[0]: r[-1] for r in rows(render([memory_table(plan, none)]))}["ssd"] == ""
    assert len(rows(render([memory_table(plan)]))[0]) == 2


def test_memory_says_what_it_consists_of() -> None:
    text = render(plan_parts(WORKLOAD, plan_of("swap-all"), budget()))
    assert "state ring" in text
    assert "residuals" in text


@pytest.mark.parametrize("tier", ["host", "ssd"])
def test_sums_of_gradients_are_named(tier: Any) -> None:
    """They are among the states of units, wherever these are; on the device they are no part."""
    units = tuple(replace(u, accumulator_bytes=4 * u.num_params) for u in WORKLOAD.units)
    workload = replace(WORKLOAD, units=units)
    options = PlannerOptions(states=tier)
    plan = make_plan("swap-all", workload, HW, budget(), options)
    plan_without = make_plan("swap-all", WORKLOAD, HW, budget(), options)
    found, without = footprint_parts(workload, plan), footprint_parts(WORKLOAD, plan_without)
    sums = f"sums of gradients {short_bytes(4 * WORKLOAD.num_params)}"
    assert sums in found[tier].split(", ")
    assert not any("sums" in text for t, text in {**found, **without}.items() if t != tier)
    assert "sums" not in without[tier]
    parts = [part.split(" ", 1)[1] for part in found[tier].split(", ") if part.startswith("units")]
    whole = [
        part.split(" ", 1)[1] for part in without[tier].split(", ") if part.startswith("units")
    ]
    lost = parsed_bytes(whole[0]) - parsed_bytes(parts[0])
    assert lost == pytest.approx(4 * WORKLOAD.num_params, rel=0.02)


def test_a_step_beside_what_was_moved() -> None:
    plan = plan_of("swap-all")
    moved = Counters(d2h_bytes=2**20, ssd_read_bytes=3 * 2**30)
    found = {r[0]: r[1:] for r in rows(render([step_table(plan, moved)]))}
    assert found["device to host"] == [short_bytes(plan.prediction.d2h_bytes), "1.00 MiB"]
    assert found["SSD read"][1] == "3.00 GiB"
    assert found["binding in it"][0] == plan.prediction.binding
    assert found["optimizer schedule"][0] == plan.schedule
    assert moved_text(moved) == "D2H 1.00 MiB, H2D 0 B, SSD read 3.00 GiB, written 0 B"


def test_where_gradients_add_up_it_is_a_micro_batch() -> None:
    """The last one of a step: its figures are not a whole step's."""
    units = tuple(replace(u, accumulator_bytes=4 * u.num_params) for u in WORKLOAD.units)
    plan = plan_of("swap-all")
    title = "the last micro-batch of a step, with the updates"
    assert title in render(plan_parts(replace(WORKLOAD, units=units), plan))
    text = render(plan_parts(WORKLOAD, plan))
    assert title not in text
    assert "one step" in text


def test_what_is_missing_shows_where_need_and_have_look_alike() -> None:
    """A need is rounded up: so much is enough."""
    error = InsufficientMemoryError("device", 2**24 + 1, 2**24, where="here")
    assert "need 16.01 MiB, have 16.00 MiB" in str(error)
    error = InsufficientMemoryError("device", 2**24 - 1000, 2**24 - 2000, where="here")
    assert "need 16.00 MiB (1000 B more), have 16.00 MiB" in str(error)
    assert "need 2 B, have 1 B" in str(InsufficientMemoryError("host", 2, 1, where="here"))


def test_notes_are_printed() -> None:
    plan = replace(plan_of("lohan"), notes=("first [bold]", "second"))
    text = render(plan_parts(WORKLOAD, plan))
    assert "note: first [bold]\nnote: second\n" in text


def test_a_plan_file_alone_shows_counts() -> None:
    plan = plan_of("lohan")
    found = {r[0]: r[1] for r in rows(render(plan_file_parts(plan)))}
    assert found["residuals"].startswith(f"keep {plan.count('keep')}, ")
    assert found["residuals"].endswith(f", recompute {plan.count('recompute')}")
    assert found["units"] == f"device 0, host 0, ssd {len(WORKLOAD.units)}"
    assert found["fingerprint"] == plan.fingerprint


def test_tables_fit_80_columns() -> None:
    parts = plan_parts(WORKLOAD, plan_of("lohan"), budget(), Counters())
    text = render([*parts, hardware_table(HW), presets_table()], width=80)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "…" not in text.replace(" … ", "")
    assert all(line == line.rstrip() for line in text.splitlines())


def test_presets_are_all_listed() -> None:
    names = [row[0] for row in rows(render([presets_table()], width=140))]
    assert names == list(HardwareProfile.preset_names())


def test_the_model_reports_itself() -> None:
    torch = pytest.importorskip("torch")
    import lohan_fx

    hw = small_hardware(device_kind="cpu", device_name="cpu", ssd=False)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = lohan_fx.compile(
        model, hw=hw, optimizer=optimizer, strategy="swap-all", states="host", outputs="all"
    )
    try:
        with pytest.raises(LohanError, match="there is no program yet"):
            model.report()
        x = torch.randn(4, 16)
        model.lohan.prepare(x)
        before = {r[0]: r[1:] for r in rows(model.report())}
        assert before["device to host"][1] == "0 B"
        model(x).sum().backward()
        optimizer.step()
        after = {r[0]: r[1:] for r in rows(model.report())}
        assert after["device to host"] == [before["device to host"][0]] * 2
        assert after["host to device"] == [before["host to device"][0]] * 2
    finally:
        model.lohan.close()


@pytest.mark.parametrize(
    ("strategy", "schedule"),
    [("pareto", "deferred"), ("lohan", "optimized"), ("fuyou", "serial"), ("lohan", "deferred")],
)
def test_nothing_that_people_read_calls_a_cpu_a_gpu(
    strategy: str, schedule: Any, tmp_path: Path
) -> None:
    """The compute lane is named where it binds, in tables, notes, summaries and traces."""
    texts = {}
    for kind in ("cpu", "cuda"):
        hw = small_hardware(device_kind=kind, matmul_flops_per_s={"bfloat16": 1e9})
        made = ablate(gpt_workload(), hw=hw, strategies=[strategy], schedule=schedule)
        planned = made.rows[0].planned
        assert planned is not None
        timeline = planned.simulation.timeline
        planned.trace(tmp_path / "trace.json")
        assert load_trace(tmp_path / "trace.json")[0].compute == timeline.compute
        parts = [
            *(str(made), planned.report(), str(planned.plan), timeline.summary()),
            *(format_diff(timeline, timeline), (tmp_path / "trace.json").read_text()),
        ]
        texts[kind] = "\n".join(parts)
    assert not re.search(r"\bgpu\b", texts["cpu"])
    assert len(re.findall(r"\bcompute\b", texts["cpu"])) > 4
    assert re.search(r"\bgpu\b", texts["cuda"])


def test_a_recording_on_a_cpu_has_no_gpu() -> None:
    recorder = Recorder(torch.device("cpu"))
    recorder.begin_compute()
    recorder.end_compute()
    assert re.search(r"^ *compute +0", recorder.timeline("step").summary(), re.MULTILINE)
    assert not [key for key in KEYS if "gpu" in key]


def test_units_without_copies_are_counted_and_explained(tmp_path: Path) -> None:
    """In every report where a table says "copy cast", and where a plan file says nothing of units
    by name."""
    workload = gpt_workload(masters=True)
    casts = [u.name for u in workload.units][1:3]
    some, none = (
        make_plan("pareto", workload, HW, budget(), PlannerOptions(states="device", fixed_casts=c))
        for c in (casts, ())
    )
    counted = f"{len(workload.units)} of {len(workload.units)} units are resident on the device"
    assert f"{counted}, as states='device' has it, 2 keep no compute copy" in some.notes
    assert f"{counted}, as states='device' has it" in none.notes
    line = "copy cast: 2 units on the device keep no compute copy"
    shell = {"model": "gpt", "workload": workload, "hw": HW, "budget": budget()}
    for plan, there in ((some, True), (none, False)):
        text = render(plan_parts(workload, plan, budget()))
        planned = Planned(**shell, plan=plan)  # type: ignore[arg-type]
        for found in (text, planned.report()):
            assert (line in found) == ("copy cast" in found) == there
        assert ("without compute copies" in render(plan_file_parts(plan))) == there


@pytest.mark.parametrize("states", ["auto", "device", "host"])
@pytest.mark.parametrize("strategy", ["lohan-resident", "pareto"])
def test_resident_units_are_those_of_the_plan(strategy: str, states: Any) -> None:
    """Whoever has put them there."""
    options = PlannerOptions(states=states)
    plan = make_plan(
        strategy, WORKLOAD, HW, budget(device=2**22 if states == "device" else 2**19), options
    )
    count = sum(unit.tier == "device" for unit in plan.units.values())
    told = [note for note in plan.notes if "units are resident" in note]
    assert len(told) == (1 if count or strategy == "lohan-resident" else 0)
    assert all(note.startswith(f"{count} of {len(plan.units)} units") for note in told)
    assert all(("as states=" in note) == (states != "auto") for note in told)


@pytest.mark.parametrize("strategy", ["lohan", "lohan-resident", "g10", "capuchin"])
def test_what_is_kept_is_named(strategy: str) -> None:
    """It is what backward reads: parameters and states may be anywhere."""
    plan = make_plan(strategy, WORKLOAD, HW, budget(), PlannerOptions(states="host"))
    assert plan.count("keep") == len(WORKLOAD.residuals)
    kept = "what backward reads (residuals) fits the device: all of it is kept there"
    assert kept in plan.notes


@pytest.mark.parametrize("states", ["auto", "device", "host", "ssd"])
@pytest.mark.parametrize("schedule", ["auto", "serial", "deferred"])
def test_a_report_has_one_lower_bound(states: Any, schedule: Any, tmp_path: Path) -> None:
    """The one in pareto's notes, of the options that were asked for; so has a file of it."""
    limit = budget(device=2**22)
    table = ablate(
        WORKLOAD, hw=HW, strategies="pareto", memory=limit, states=states, schedule=schedule
    )
    (row,) = table.rows
    assert row.planned is not None
    row.planned.save(tmp_path / "plan.json")
    told = row.planned.plan.notes[0]
    for found in (row.bound_s, row.planned.bound_s, Planned.load(tmp_path / "plan.json").bound_s):
        assert f"lower bound {found:.6g} s" in told
    assert f"gap {100 * row.planned.gap:.2f}%" in told
