"""benchmarks/papers: the gates, and what the generator writes."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.papers import figure, jobs, models, report, systems
from benchmarks.papers.__main__ import FIGURES, full, quick
from benchmarks.papers.figure import Row, Spec, Values
from benchmarks.papers.workloads import workload
from lohan_fx.errors import InsufficientMemoryError, LohanError
from lohan_fx.hardware import HardwareProfile
from tests.workloads import gpt_workload, small_hardware

NAMED = {
    *(f"lohan-{k}" for k in ("5a", "5c", "6", "7", "8", "9a", "9b", "10a", "10b", "13")),
    *(f"fuyou-{k}" for k in ("5", "7", "9", "10")),
    *("ssdtrain-3", "ssdtrain-5", "memferry-9", "memferry-12", "memferry-13"),
}


# The gates


FAST = {
    ("lohan-5a", "b8"),
    ("lohan-5c", "b16"),
    *(("lohan-10b", f"b64-{n}") for n in (1, 2, 3, 6, 12)),
}
"""Gates that take three traces; `test_the_full_run` has all."""


def outside(rows: list[Row]) -> list[str]:
    """What is not within its gate."""
    return [
        f"{row.paper.figure} {row.paper.label}: {row.ours} for {row.paper.value}"
        for row in rows
        if row.within_gate is False
    ]


def test_the_gates_hold() -> None:
    rows = quick(keys=FAST)
    assert len(rows) == len(FAST)
    assert not outside(rows)


def test_the_gates_are_those_of_the_issue() -> None:
    values = Values()
    stated = [values.of(spec.key)[key] for spec in FIGURES for key in spec.gates]
    found = {(v.figure, v.value): v.gate for v in stated}
    thirteen = (42.8, 84.3, 143.1, 155.8, 153.8)
    ssds = (70.3, 111.7, 136.3, 151.5, 148.2)
    assert found == {
        **{("lohan-5a", v): 0.10 for v in thirteen},
        **{("lohan-5c", v): 0.15 for v in (52.6, 86.9)},
        **{("lohan-10b", v): 0.10 for v in ssds},
    }


# The document, from made-up results


def made_up(job: jobs.Job) -> Any:
    """A result of the right kind for any job; larger batches and systems differ a little."""
    rank = list(systems.SYSTEMS).index(getattr(job, "system", "lohan"))
    if isinstance(job, jobs.Step):
        seconds = 10.0 + job.batch + rank
        return jobs.Outcome(
            step_s=seconds,
            tflops=1000 / seconds,
            swapped_bytes=10**9,
            ssd_write_bytes=10**10,
            peak_device_bytes=2**30,
        )
    if isinstance(job, jobs.LargestModel):
        return "gpt-135b" if rank else "gpt-276b"
    if isinstance(job, jobs.SwapSweep):
        points = tuple((k * 10**9, 10.0 + abs(k - 3)) for k in range(1, 8))
        return jobs.Curve(points=points, predicted=2, base_bytes=10**9, all_bytes=7 * 10**9)
    if isinstance(job, jobs.Memory):
        return jobs.DeviceMemory(activations=900, parameters=60, gradients=40, direct=10)
    assert isinstance(job, jobs.Activations)
    return jobs.StepSize(activations=10**9, model_flops=1e15)


def results_of(spec: Spec) -> jobs.Results:
    return jobs.Results({job: made_up(job) for job in spec.jobs()})


@pytest.fixture(scope="module")
def figures() -> list[figure.Figure]:
    values = Values()
    return [spec.figure(results_of(spec), values) for spec in FIGURES]


def test_every_figure_of_the_issue_is_there() -> None:
    assert {spec.key for spec in FIGURES} == NAMED
    values = Values()
    assert {f for f, _ in (*values.values, *values.claims)} == NAMED


def test_every_value_says_where_it_stands() -> None:
    values = Values()
    for stated in (*values.values.values(), *values.claims.values()):
        assert re.match(r"(LoHan|Fuyou|SSDTrain|MemFerry) (§|Table)|measurements\.md", stated.where)


def test_a_stated_value_that_no_figure_uses_is_an_error() -> None:
    values = Values()
    spec = FIGURES[0]
    first = values.of(spec.key)["b8"]
    values.values[spec.key, "more"] = replace(first, key="more", gate=None)
    with pytest.raises(ValueError, match=r"lohan-5a does not use.*more"):
        spec.figure(results_of(spec), values)


def test_the_document(figures: list[figure.Figure], tmp_path: Path) -> None:
    text = report.markdown(figures, "img")
    assert report.COMMAND in text
    for made in figures:
        assert f'## <a id="{made.key}"></a>{made.title}' in text
        assert f"](img/papers-{made.key}.png)" in text
        assert made.setup in text
        for row in made.rows:
            assert row.paper.label in text
            assert row.paper.where in text
        for check in made.checks:
            assert check.claim.text in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    for before, line in pairwise(tables):
        if set(before) <= set("|-:"):
            assert line.count("|") == before.count("|"), line
    assert "| what | paper | ours | ratio | stated in |" in text
    assert "## Gates" in text
    assert "## What misses" in text


def test_the_document_that_is_kept() -> None:
    """docs/papers.md has every figure, stated value and plot, and plots are small."""
    docs = Path(__file__).parents[1] / "docs"
    text = (docs / "papers.md").read_text(encoding="utf-8")
    values = Values()
    for stated in values.values.values():
        assert stated.label in text
    for claim in values.claims.values():
        assert claim.text in text
    images = [docs / "img" / f"papers-{spec.key}.png" for spec in FIGURES]
    assert all(f"](img/{image.name})" in text for image in images)
    sizes = [image.stat().st_size for image in images]
    assert max(sizes) < 100_000
    assert sum(sizes) < 1_500_000
    assert "**outside**" not in text


def test_the_plots(figures: list[figure.Figure], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for made in (figures[0], figures[6], figures[-1]):  # lines, stars, bars
        path = tmp_path / report.plot_name(made)
        report.plot(made, path)
        assert path.read_bytes().startswith(b"\x89PNG")


def test_the_table_of_gates() -> None:
    values = Values()
    stated = values.of("lohan-5a")["b64"]
    good, bad = (Row(paper=stated, ours=ours) for ours in (150.0, 100.0))
    table = report.gates_table([good, bad])
    assert "| LoHan, batch 64, TFLOPS | 155.8 | 150.0 | 0.963 | ±10% | within |" in table
    assert "**outside**" in table
    assert Row(paper=stated, ours=None).within_gate is False


# Systems and jobs


def test_copies_start_late_without_eagerness() -> None:
    w, hw = gpt_workload(layers=4, hidden=256, seq=128), small_hardware()
    eager = systems.SYSTEMS["zero-offload"]
    lazy = replace(eager, eager=False).plan(w, hw, hw.host_bytes)
    early = replace(eager, eager=True).plan(w, hw, hw.host_bytes)
    index = w.op_index
    for name, unit in lazy.units.items():
        for late, soon in zip(unit.windows, early.units[name].windows, strict=True):
            assert late.fetch_before == late.first_use
            assert index[soon.fetch_before] <= index[late.fetch_before]
    assert {v: r.action for v, r in lazy.residuals.items()} == {
        v: r.action for v, r in early.residuals.items()
    }


def test_everything_is_copied_first() -> None:
    w, hw = gpt_workload(layers=4), small_hardware()
    plan = systems.SYSTEMS["native-offload"].plan(w, hw, hw.host_bytes)
    windows = [window for unit in plan.units.values() for window in unit.windows]
    assert windows
    assert {window.first_use for window in windows} == {w.ops[0].name}


def test_what_the_real_system_needs_of_host_memory_counts() -> None:
    w, hw = gpt_workload(), small_hardware()
    system = replace(systems.SYSTEMS["zero-offload"], host_bytes_per_param=6.0)
    system.plan(w, hw, hw.host_bytes)
    with pytest.raises(InsufficientMemoryError, match="host"):
        system.plan(w, hw, 6 * w.num_params - 1)


def test_model_flops() -> None:
    """72·B·s·l·h²·(1 + s/6h + v/12lh): the usual count, forward and twice that for backward."""
    spec = models.spec_of("gpt-13b")
    h, layers, s = 5120, 40, 1024
    usual = 72 * 8 * s * layers * h**2 * (1 + s / (6 * h) + 50257 / (12 * layers * h))
    assert spec.model_flops(8) == pytest.approx(usual)
    with pytest.raises(LohanError, match="no model is named"):
        models.spec_of("gpt-14b")


def test_jobs_run_once_and_come_back_by_value() -> None:
    ran: list[str] = []
    step = jobs.Activations("bert-base", 1)
    again = jobs.Activations("bert-base", 1)
    results = jobs.run([step, again], progress=ran.append)
    assert len(ran) == 1
    assert results[again].activations > 0


def test_pipelined_optimizer_is_bound_by_its_busiest_resource() -> None:
    hw = HardwareProfile.preset("rtx4090-12xp5510")
    step = jobs.Step("gpt-13b", 8, hw.name, "lohan-serial").run()
    params = sum(u.num_params for u in workload("gpt-13b", 8, hw).units)
    least = 12 * params / hw.ssd_read_bytes_per_s + 14 * params / hw.ssd_write_bytes_per_s
    assert least < step.optimizer_s < 1.05 * least


# All of it


@pytest.mark.slow
def test_the_full_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = full(tmp_path, processes=2)
    assert len([row for row in rows if row.paper.gate]) == 12
    assert not outside(rows)
    text = (tmp_path / "papers.md").read_text(encoding="utf-8")
    assert len(list((tmp_path / "img").glob("*.png"))) == len(NAMED)
    found = re.search(
        r"Of (\d+) statements about order .*, (\d+) hold; of\n(\d+) others, (\d+)", text
    )
    assert found is not None
    order, held, others, held_too = map(int, found.groups())
    assert order == held, "who wins, and where the optimum lies"
    assert others - held_too <= 6, "docs/papers.md lists them, with reasons"
    sizes = [p.stat().st_size for p in (tmp_path / "img").glob("*.png")]
    assert max(sizes) < 100_000
    assert sum(sizes) < 1_500_000
