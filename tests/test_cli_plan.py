"""``lohan-fx models | plan | simulate | ablate``: what they print and save, and their errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

import lohan_fx
from lohan_fx import ablation
from lohan_fx.api import LohanModule
from lohan_fx.cli import app
from lohan_fx.errors import PlanError
from lohan_fx.models import names
from lohan_fx.plan import Plan
from lohan_fx.planned import Planned
from lohan_fx.planners import make_plan
from lohan_fx.timeline import load_trace, save_trace
from tests.toys import made, small
from tests.workloads import budget, gpt_workload, small_hardware

TOY, SMALL = "tests.toys:made", "tests.toys:small"


def run(*arguments: str | Path) -> Result:
    if arguments[0] == "plan" and "--strategy" not in arguments:
        arguments = (*arguments, "--strategy", "lohan")  # quicker than the default
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def output(*arguments: str | Path) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def message(*arguments: str | Path) -> str:
    """The one message of a command that fails."""
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.fixture(scope="module")
def hw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hw") / "hw.json"
    small_hardware().save(path)
    return path


@pytest.fixture
def saved(hw: Path, tmp_path: Path) -> Path:
    path = tmp_path / "saved.json"
    output("plan", TOY, "--hw", hw, "--out", path)
    return path


def test_models() -> None:
    text = output("models")
    for name in names():
        assert name in text


def test_plan_prints_and_saves(hw: Path, tmp_path: Path) -> None:
    out, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    arguments = ("plan", TOY, "--hw", hw, "--batch", "16", "--memory", "device=100KiB")
    result = run(*arguments, "--out", out, "--trace", trace, "--strategy", "swap-all")
    assert result.exit_code == 0
    for part in ("Toy, swap-all", "16 (16 samples)", "100 KiB", "blocks.", "traced: "):
        assert part in result.stdout
    assert result.stderr.splitlines() == [f"saved {out}", f"saved {trace}"]
    assert Plan.load(out).strategy == "swap-all"
    assert Planned.load(out).budget.device_bytes == 100 * 1024
    assert json.loads(trace.read_text())["traceEvents"]
    assert all(len(line) <= 100 for line in result.stdout.splitlines())


def test_axes_of_a_plan(hw: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    output(
        *("plan", TOY, "--hw", hw, "--strategy", "swap-all", "--out", out),
        *("--states", "ssd", "--swap-to", "ssd", "--schedule", "naive"),
        *("--optimizer", "sgd", "--dtype", "float16", "--full-trace"),
    )
    found = Planned.load(out)
    assert {u.tier for u in found.plan.units.values()} == {"ssd"}
    assert {r.tier for r in found.plan.residuals.values() if r.action == "swap"} == {"ssd"}
    assert found.plan.schedule == "naive"
    assert found.compute_dtype == "float16"
    assert all(u.state_bytes == 4 * u.num_params for u in found.workload.units)
    assert found.traced == "in full, as asked for"
    assert not any(u.accumulator_bytes for u in found.workload.units)
    output("plan", TOY, "--hw", hw, "--strategy", "lohan", "--accumulate", "--clip", "--out", out)
    assert Planned.load(out).plan.schedule == "speculative"
    units = [u for u in Planned.load(out).workload.units if u.trainable]
    assert all(u.accumulator_bytes == 4 * u.num_params for u in units)


def test_searching(hw: Path) -> None:
    model, inputs = small()
    ask = {"hw": str(hw), "strategy": "keep-all", "batch": 5}
    peak = lohan_fx.plan(model, inputs, **ask).plan.prediction.peak_device_bytes
    text = output(
        *("plan", SMALL, "--hw", hw, "--strategy", "keep-all"),
        *("--memory", f"device={peak / 1024}KiB", "--search", "max-batch", "--batch", "4"),
    )
    assert "max-batch: batch 5" in text
    assert "limit: batch 6" in text
    assert "device memory: needs" in text
    assert "name one" in message("plan", SMALL, "--hw", hw, "--search", "max-model")
    assert "max-batch" in message("plan", SMALL, "--hw", hw, "--search", "max-speed")


def test_simulate(saved: Path, hw: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    result = run("simulate", saved, saved, "--trace", trace)
    assert result.exit_code == 0
    assert result.stdout.count("Toy, lohan") == 2
    events = json.loads(trace.read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {1, 2}
    elsewhere = output("simulate", saved, "--hw", "rtx4090-12xp5510")
    assert "rtx4090-12xp5510" in elsewhere
    small = small_hardware(device_bytes=1024, name="tiny")
    small.save(tmp_path / "tiny.json")
    assert "tiny has 1.00 KiB" in output("simulate", saved, "--hw", tmp_path / "tiny.json")


def test_a_real_step_beside_the_simulated_one(tmp_path: Path) -> None:
    hw = small_hardware(device_kind="cpu", ssd=False)
    model, inputs = made()
    planned = lohan_fx.plan(model, inputs, hw=hw, strategy="recompute-all")
    planned.save(tmp_path / "plan.json")
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = lohan_fx.compile(model, hw=hw, optimizer=optimizer, strategy="recompute-all")
    assert isinstance(compiled, LohanModule)

    def step() -> None:
        compiled(inputs).backward()
        optimizer.step()

    step()
    with compiled.lohan.record() as recorder:
        step()
    save_trace(tmp_path / "real.json", recorder.timeline("recorded step"))
    compiled.lohan.close()

    both = tmp_path / "both.json"
    text = output(
        *("simulate", tmp_path / "plan.json"),
        *("--recorded", tmp_path / "real.json", "--trace", both),
    )
    assert "recorded step ms" in text
    assert [t.name for t in load_trace(both)] == ["simulated recompute-all", "recorded step"]
    assert "is no trace" in message(
        "simulate", tmp_path / "plan.json", "--recorded", tmp_path / "plan.json"
    )


def test_a_picture_of_lanes(saved: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    output("simulate", saved, "--plot", tmp_path / "lanes.png")
    assert (tmp_path / "lanes.png").read_bytes().startswith(b"\x89PNG")
    assert "cannot draw" in message("simulate", saved, "--plot", tmp_path / "lanes.what")


def test_report_reads_what_plan_writes(saved: Path) -> None:
    assert "lohan plan for Toy" in output("report", saved)


def test_ablate(hw: Path, tmp_path: Path) -> None:
    files = [tmp_path / f"table{suffix}" for suffix in (".csv", ".json", ".md")]
    result = run(
        *("ablate", TOY, "--hw", hw, "--batch", "8", "--batch", "16"),
        *("--strategy", "lohan", "--strategy", "keep-all"),
        *("--memory", "device=40KiB", "--memory", "device=1MiB,host=10MiB"),
        *(part for file in files for part in ("--out", file)),
    )
    assert result.exit_code == 0
    for part in ("lohan", "keep-all", "batch", "device=", "why not", "peaks and traffic"):
        assert part in result.stdout
    assert result.stderr.splitlines() == [f"saved {file}" for file in files]
    assert len(json.loads(files[1].read_text())["rows"]) == 8
    assert len(files[0].read_text().splitlines()) == 9


def test_ablate_draws(hw: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    swaps, memory = tmp_path / "a.png", tmp_path / "b.png"
    run(
        *("ablate", TOY, "--hw", hw, "--strategy", "lohan"),
        *("--plot", swaps, "--plot-memory", memory),
    )
    assert swaps.stat().st_size
    assert memory.stat().st_size


@pytest.mark.parametrize("option", ["--plot", "--plot-memory"])
def test_what_cannot_be_drawn_is_said_before_the_work(
    option: str, hw: Path, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(ablation, "ablate", lambda *_, **__: pytest.fail("it worked first"))
    table = tmp_path / "table.md"
    said = message("ablate", TOY, "--hw", hw, "--out", table, option, tmp_path / "a.png")
    assert "plots need matplotlib" in said
    assert not table.exists()
    if option == "--plot":
        monkeypatch.setattr(Planned, "load", lambda _: pytest.fail("it worked first"))
        assert "need matplotlib" in message("simulate", saved, option, tmp_path / "a.png")


def test_ablate_measures(tmp_path: Path) -> None:
    small_hardware(device_kind="cpu", ssd=False).save(tmp_path / "hw.json")
    text = output(
        *("ablate", TOY, "--hw", tmp_path / "hw.json", "--strategy", "lohan"),
        *("--measure", "--steps", "1"),
    )
    assert "measured on this machine" in text
    assert "error of" in text


def test_models_of_ones_own(hw: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from tests.toys import made\nnumber = 3\n")
    assert "Toy, lohan" in output("plan", f"{file}:made", "--hw", hw)
    assert "has no function 'number'" in message("plan", f"{file}:number", "--hw", hw)
    assert "has no function 'other'" in message("plan", f"{file}:other", "--hw", hw)
    assert "none.py does not exist" in message("plan", f"{tmp_path}/none.py:made", "--hw", hw)
    assert "mine.py:function" in message("plan", file, "--hw", hw)
    assert "gpt is a family: use it with --search max-model" in message("plan", "gpt", "--hw", hw)
    assert "cannot import tests.none" in message("plan", "tests.none:made", "--hw", hw)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("gpt-174b", "--hw", "HW"), "did you mean 'gpt-175b'"),
        ((TOY, "--hw", "rtx9090"), "no hardware preset 'rtx9090'"),
        ((TOY, "--hw", "none.json"), "none.json"),
        ((TOY, "--hw", "HW", "--memory", "gpu=1GiB"), "unknown memory tier 'gpu'"),
        ((TOY, "--hw", "HW", "--memory", "device=999TiB"), "ask for less"),
        ((TOY, "--hw", "HW", "--strategy", "lohen"), "did you mean 'lohan'"),
        ((TOY, "--hw", "HW", "--memory", "device"), "write it as device=24GiB"),
        ((TOY, "--hw", "HW", "--memory", "device=1XB"), "is no size"),
        ((TOY, "--hw", "HW", "--memory", "device=1KiB"), "not enough device memory"),
        ((TOY, "--hw", "HW", "--states", "gpu"), "--states gpu: use one of auto"),
        ((TOY, "--hw", "HW", "--swap-to", "device"), "--swap-to device"),
        ((TOY, "--hw", "HW", "--schedule", "late"), "schedule 'late'"),
        ((TOY, "--hw", "HW", "--dtype", "int8"), "--dtype int8"),
        ((TOY, "--hw", "HW", "--optimizer", "adamx"), "no optimizer 'adamx'"),
        ((TOY, "--hw", "HW", "--out", "/none/plan.json"), "its directory does not exist"),
    ],
)
def test_plan_errors(arguments: tuple[str, ...], wanted: str, hw: Path) -> None:
    assert wanted in message("plan", *(str(hw) if a == "HW" else a for a in arguments))


def test_a_broken_profile(hw: Path, tmp_path: Path) -> None:
    text = hw.read_text()
    broken = tmp_path / "broken.json"
    for change, wanted in (
        (text[: len(text) // 2], "broken.json"),
        ("", "broken.json"),
        (replaced(text, h2d_bytes_per_s=0), "h2d_bytes_per_s is 0"),
        (replaced(text, ssd_read_bytes_per_s=0), "ssd_read_bytes_per_s is 0"),
        (replaced(text, h2d_bytes_per_s="fast"), "h2d_bytes_per_s is 'fast'"),
        (replaced(text, device_bytes=None), "device_bytes"),
        (replaced(text, matmul_flops_per_s={}), "at least one dtype"),
    ):
        broken.write_text(change)
        for command in ("plan", "ablate"):
            assert wanted in message(command, TOY, "--hw", broken)


def replaced(text: str, **changes: object) -> str:
    return json.dumps(json.loads(text) | changes)


def test_a_broken_plan(saved: Path, tmp_path: Path) -> None:
    text = saved.read_text()
    data = json.loads(text)
    made = data["planned"]
    row = made["workload"]["ops"][0]
    seconds = made["workload"]["op_fields"].index("seconds")
    odd = {**made["workload"], "ops": [[*row[:seconds], {}, *row[seconds + 1 :]]]}
    broken = tmp_path / "broken.json"
    for change in (
        text[: len(text) // 2],
        "[]",
        json.dumps({**data, "residuals": {}}),
        json.dumps({**data, "planned": {**made, "model": None}}),
        json.dumps({**data, "planned": {**made, "num_items": "many"}}),
        json.dumps({**data, "planned": {**made, "workload": odd}}),
        json.dumps({**data, "planned": {**made, "budget": {}}}),
    ):
        broken.write_text(change)
        assert "broken.json" in message("simulate", broken)


def test_other_errors(hw: Path, saved: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    make_plan("lohan", gpt_workload(), small_hardware(), budget()).save(plan)
    assert "holds no workload" in message("simulate", plan)
    assert "hw.json is no plan, but a hardware profile" in message("simulate", hw)
    trace = tmp_path / "trace.json"
    Planned.load(saved).trace(trace)
    assert "trace.json is no plan, but a trace" in message("simulate", trace)
    assert "nor a hardware profile of lohan_fx, but a trace" in message("report", trace)
    for file, kind in ((hw, "a hardware profile"), (trace, "a trace")):
        with pytest.raises(PlanError, match=f"is no plan, but {kind}"):
            Plan.load(file)
    nowhere = message("simulate", tmp_path / "none.json")
    assert "cannot read the plan" in nowhere
    assert "none.json: No such file" in nowhere
    assert "did you mean '24GiB'" in message("plan", TOY, "--hw", hw, "--memory", "device=24")
    assert "ends in .csv" in message("ablate", TOY, "--hw", hw, "--out", tmp_path / "a.txt")
    ask = ("ablate", TOY, "--hw", hw, "--strategy")
    assert "no strategy is named" in message(*ask, "lohen")
    assert "--schedule late" in message(*ask, "lohan", "--schedule", "late")
    measured = message(*ask, "lohan", "--measure")
    assert "CUDA device" in measured


def test_missing_arguments_are_usage_errors() -> None:
    assert run("plan").exit_code == 2
    assert run("plan", TOY).exit_code == 2
    assert run("plan", TOY, "--hw", "x", "--batch", "0").exit_code == 2
    assert run("simulate").exit_code == 2
