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
