"""benchmarks/gpu: what of it runs without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
