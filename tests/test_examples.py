"""The examples do what they say: the losses of their loops are those of plain PyTorch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from examples import accelerate_loop, lightning_loop, minilm, trainer
from lohan_fx.api import LohanModule
from tests.architectures import everywhere
from tests.training import cpu_hardware

ROOT = Path(__file__).parent.parent


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """A plan with states in all tiers, that swaps and recomputes."""
    return {"hw": cpu_hardware(tmp_path), "strategy": everywhere}


def test_trainer(options: dict[str, Any], tmp_path: Path) -> None:
    """With evaluation; a checkpoint of the first half goes on with lohan_fx, and without."""
    wanted, _ = trainer.train(tmp_path / "plain", compiled=False)
    half = trainer.NUM_STEPS // 2
    first, model = trainer.train(tmp_path / "ours", compiled=True, num_steps=half, **options)
    assert first == wanted[: len(first)]
    assert isinstance(model, LohanModule)
    assert len(model.lohan.programs) == 2
    assert {u.tier for u in model.plan.units.values()} == {"device", "host", "ssd"}
    model.lohan.close()
    shutil.copytree(tmp_path / "ours", tmp_path / "copy")
    resumed, _ = trainer.train(tmp_path / "ours", compiled=True, resume=True, **options)
    assert resumed == wanted
    resumed, _ = trainer.train(tmp_path / "copy", compiled=False, resume=True)
    assert resumed == wanted
    assert len(wanted) == trainer.NUM_STEPS + 2


@pytest.mark.filterwarnings(
    "ignore:The .* does not have many workers",
)
def test_lightning(options: dict[str, Any], tmp_path: Path) -> None:
    wanted, _ = lightning_loop.train(tmp_path / "plain", compiled=False)
    found, _ = lightning_loop.train(tmp_path / "ours", compiled=True, **options)
    assert found == wanted
    first, checkpoint = lightning_loop.train(tmp_path, compiled=True, epochs=1, **options)
    second, _ = lightning_loop.train(tmp_path, compiled=True, resume=checkpoint, **options)
    assert len(first) > 3
    assert first == wanted[: len(first)]
    assert len(second) > 3


def test_accelerate(options: dict[str, Any], tmp_path: Path) -> None:
    """With the state of a first epoch saved, and loaded in a second run."""
    wanted = accelerate_loop.train(tmp_path / "plain", compiled=False)
    found = accelerate_loop.train(tmp_path / "ours", compiled=True, **options)
    assert found == wanted
    second = accelerate_loop.train(tmp_path / "ours", compiled=True, resume=True, **options)
    assert second == wanted[len(wanted) // 2 :]


@pytest.mark.slow
def test_pretrained_minilm(options: dict[str, Any]) -> None:
    """A few steps; the example itself takes more, and classifies four of five docstrings right."""
    few = {"num_steps": 2, "batch": 4, "num_tests": 16}
    wanted = minilm.train(compiled=False, **few)
    found = minilm.train(compiled=True, **few, **options)
    assert found == wanted
    assert len(found[0]) == 2


@pytest.mark.slow
def test_backend(tmp_path: Path) -> None:
    """By name, as `torch.compile` finds it once the package is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    entries = project["entry-points"]["torch_dynamo_backends"]
    info = tmp_path / "lohan_fx-0.dist-info"
    info.mkdir()
    lines = ["[torch_dynamo_backends]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    (info / "METADATA").write_text("Name: lohan_fx\nVersion: 0\n", encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    command = [sys.executable, str(ROOT / "examples" / "backend.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "losses with backend='lohan_fx' and without: identical\n"
