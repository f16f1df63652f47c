"""benchmarks/gpu: what of it runs without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.training import cpu_hardware

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_a_run_that_is_killed_twice_and_resumed(tmp_path: Path) -> None:
    """The life of a toy in four processes, two of which are killed with SIGKILL."""
    out = tmp_path / "life.json"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "benchmarks/gpu/life.py"), "--tiny"]
    command += ["--parts", "life", "--directory", str(tmp_path), "--out", str(out)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    life = json.loads(out.read_text())["life"]
    assert len(life["checks"]) == 11
    assert all(life["checks"].values())
    whole, resumed = life["steps"]["whole"], life["steps"]["resumed"]
    assert [step["losses"] for step in whole[3:]] == [step["losses"] for step in resumed]
    assert list(tmp_path.iterdir()) == [out], "checkpoints of a temporary directory are removed"


def test_a_kept_profile_is_that_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read as it is, if it has the SSDs that are asked for."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks/gpu")
    profiled = import_module("harness").profiled
    hw, file = cpu_hardware(tmp_path), tmp_path / "hw.json"
    hw.save(file)
    (ssd,) = hw.ssds
    assert profiled(file, ssd=[ssd.path]) == profiled(file) == hw
    with pytest.raises(SystemExit, match=r"hw\.json is without the SSD /elsewhere: name another"):
        profiled(file, ssd=["/elsewhere"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "another card")
    with pytest.raises(SystemExit, match=rf"is of {hw.device_name}, this is another card"):
        profiled(file)


def without_gpu(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A script of the GPU benchmarks, where no GPU is to be seen."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "benchmarks/gpu" / script), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_without_a_gpu_nothing_is_run_or_kept(tmp_path: Path) -> None:
    """A CPU's profile in --hw would be read on the next machine that has a GPU."""
    done = without_gpu("speed.py", "2.78B-b8", "--hw", str(tmp_path / "hw.json"), "--lean")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == "speed.py needs a CUDA GPU"
    assert "Traceback" not in done.stderr
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("text", [None, "{", "[]", '{"life": {}}'])
def test_the_table_of_no_results_is_a_line(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "speed.json"
    if text is not None:
        file.write_text(text)
    done = without_gpu("table.py", str(file))
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("table.py")
    assert str(file) in line


STAND_IN = """#!/bin/sh
case "$*" in
    *--systems\\ plain*) echo "warned of before"; kill -KILL $$ ;;
    *) echo "Traceback"; echo "torch.OutOfMemoryError: of all"; echo "a warning behind it" ;;
esac >&2
exit 1
"""


def test_a_system_that_dies_is_a_row_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each runs in a process of its own; the others go on. In place of Python there is a script
    that dies as systems do: killed by a signal, or of an error."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks/gpu")
    speed = import_module("speed")
    python, out = tmp_path / "python", tmp_path / "out.json"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    arguments = ["2.78B-b8", "--systems", "plain,save-on-cpu", "--no-refine", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["speed.py", *arguments])
    monkeypatch.setattr("sys.executable", str(python))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    speed.main()
    assert json.loads(out.read_text())["cases"]["2.78B-b8"] == {
        "plain": {"failed": "killed by SIGKILL"},
        "save-on-cpu": {"failed": "torch.OutOfMemoryError: of all"},
    }
    shown = capsys.readouterr()
    assert "2.78B-b8 plain failed: killed by SIGKILL" in shown.out
    assert "torch.OutOfMemoryError: of all" in shown.out
    assert "a warning behind it" in shown.err, "what they say is passed on"


def test_the_table_sets_ours_against_goals(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the rows of what it is compared with; the disk's floor is one."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks/gpu")
    case_cells = import_module("table").case_cells
    ours = {"step_s": 0.5, "tokens_per_s": 16384.0, "bound_s": 0.4, "binds": "gpu"}
    found = {
        "shape": {"layers": 32},
        "batch": 8,
        "host_memory": {"alone": 1e9},
        "plain": {"step_s": 0.45, "tokens_per_s": 18204.0, "peak": 2**30},
        "ours": ours | {"floor_s": 0.6, "rss": 2**31},
        "deepspeed-zero3": {"failed": "killed by SIGKILL"},
    }
    assert case_cells("2.78B-b8", found) == [
        ["2.78B-b8", "plain", "0.450", "18,204", "0.900", "0.85", "", "", "1.00", "", ""],
        ["2.78B-b8", "ours", "0.500", "16,384", "", "", "0.400", "gpu", "", "2.0", ""],
        ["2.78B-b8", "deepspeed-zero3", "killed by SIGKILL"],
        ["2.78B-b8", "disk", "0.600", "", "1.200", "", "", "", "", "", ""],
    ]
