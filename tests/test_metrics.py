"""`model.lohan.metrics()`: every key is explained, and every value is what the run did."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

import lohan_fx
from lohan_fx.api import LohanModule
from lohan_fx.errors import HardwareError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.metrics import KEYS, LINKS
from lohan_fx.runtime import ssd
from tests.faults import Fault, Faults
from tests.models import loss_of, make
from tests.training import Squeezed, remember_captures, training_of

ON_CUDA = {"lohan/device_peak_bytes"}
RATED = {"lohan/ssd_wear"}
CLIPPED = {"lohan/grad_norm"}


class Run:
    def __init__(self, hw: HardwareProfile, patch: pytest.MonkeyPatch, **options: Any) -> None:
        remember_captures(patch, "mlp")
        model, self.inputs = make("mlp")
        self.optimizer = training_of("adam", model).optimizer
        options = {"states": "ssd", "swap_to": "ssd", **options}
        made = lohan_fx.compile(
            model, hw=hw, optimizer=self.optimizer, strategy=Squeezed("swap-all", 0.0), **options
        )
        assert isinstance(made, LohanModule)
        self.model = made

    def step(self) -> None:
        loss_of("mlp", self.model(**self.inputs)).backward()
        self.optimizer.step()

    def metrics(self) -> dict[str, float | int]:
        return self.model.lohan.metrics()


@pytest.mark.parametrize("schedule", ["optimized", "overlapped", "deferred", "serial"])
def test_steps_are_those_that_have_gradients(
    schedule: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An optimizer.step() without a backward does nothing; one that is left out was a step."""
    run = Run(hw, monkeypatch, schedule=schedule)
    run.optimizer.step()
    run.step()
    run.optimizer.step()
    assert run.metrics()["lohan/steps"] == 1
    run.step()
    assert run.metrics()["lohan/steps"] == 2
    run.model.lohan.close()
    skipping = Run(hw, monkeypatch, skip_nonfinite=True, accumulate=2)
    for scale in (1.0, math.nan):
        (loss_of("mlp", skipping.model(**skipping.inputs)) * scale).backward()
        skipping.optimizer.step()  # after one of two backwards
    assert skipping.metrics()["lohan/steps"] == 2
    assert skipping.metrics()["lohan/skipped_steps"] == 1
    skipping.model.lohan.close()


def test_every_key_is_explained_and_there(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(hw, monkeypatch)
    before = run.metrics()
    assert not any(before.values())
    for _ in range(2):
        run.step()
    found = run.metrics()
    assert found.keys() == KEYS.keys() - ON_CUDA - RATED - CLIPPED
    assert before.keys() == found.keys() - {"lohan/step_s"}
    for key, value in found.items():
        assert type(value) is (float if key.endswith("_s") else int), key
    json.dumps(found)  # plain numbers, as loggers take them
    assert found["lohan/steps"] == 2
    run.model.lohan.close()


def test_gradients_are_those_of_the_last_step(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The norm, and how many steps were left out, or tried beside backward in vain."""
    run = Run(
        hw,
        monkeypatch,
        states="host",
        clip_grad_norm=1e-6,
        skip_nonfinite=True,
        schedule="speculative",
    )
    assert "lohan/grad_norm" not in run.metrics()
    run.step()
    found = run.metrics()
    assert found["lohan/grad_norm"] == run.model.lohan.grad_norm
    assert (found["lohan/skipped_steps"], found["lohan/redone_steps"]) == (0, 1)
    loss = loss_of("mlp", run.model(**run.inputs))
    (loss * math.nan).backward()
    run.optimizer.step()
    found = run.metrics()
    assert math.isnan(found["lohan/grad_norm"])
    assert found["lohan/skipped_steps"] == 1
    assert found["lohan/steps"] == 2
    run.model.lohan.close()


def test_bytes_are_those_of_the_plan(hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(hw, monkeypatch)
    run.step()
    run.metrics()
    for steps in (1, 3):
        for _ in range(steps):
            run.step()
        found = run.metrics()
        p = run.model.plan.prediction
        for link in LINKS:
            assert found[f"lohan/{link}_bytes"] == steps * getattr(p, f"{link}_bytes") > 0
            total = getattr(run.model.lohan.counters, f"{link}_bytes")
            assert found[f"lohan/total_{link}_bytes"] == total
    assert found["lohan/steps"] == 5
    pool = run.model.lohan.memory.pool  # type: ignore[union-attr]
    assert pool is not None
    assert found["lohan/ssd_written_bytes"] == pool.counters.bytes_written
    assert found["lohan/ssd_written_bytes"] >= found["lohan/total_ssd_write_bytes"]
    assert found["lohan/planned_device_bytes"] == p.peak_device_bytes
    assert found["lohan/host_bytes"] >= p.peak_host_bytes
    assert found["lohan/ssd_bytes"] >= p.peak_ssd_bytes
    assert (found["lohan/programs"], found["lohan/parked_bytes"]) == (1, 0)
    run.model.lohan.close()


def test_seconds_are_those_of_the_lanes(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow disk: compute waits for it, the SSD lane is busy, and steps take as long."""
    run = Run(hw, monkeypatch, schedule="naive")
    run.step()
    run.metrics()
    reads = ssd.Syscalls.preadv

    def slow(*args: Any) -> int:
        time.sleep(0.02)
        return reads(*args)

    monkeypatch.setattr(ssd.Syscalls, "preadv", slow)
    began = time.perf_counter()
    for _ in range(3):
        run.step()
    wall_s = time.perf_counter() - began
    found = run.metrics()
    assert 0.02 < found["lohan/step_s"] <= wall_s / 3 * 1.5 + 0.01
    assert 0.06 < found["lohan/ssd_s"] <= wall_s
    assert 0.06 < found["lohan/exposed_s"] + found["lohan/wait_s"] <= wall_s
    for name in ("d2h_s", "h2d_s", "cpu_optimizer_s"):
        assert 0 < found[f"lohan/{name}"] < wall_s
    idle = run.metrics()
    assert "lohan/step_s" not in idle
    assert all(idle[k] == 0 for k in idle if k.endswith("_s") or k in {"lohan/h2d_bytes"})
    run.model.lohan.close()


def test_wear_needs_every_rating(hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    rated = tuple(dataclasses.replace(s, endurance_bytes=10**9) for s in hw.ssds)
    run = Run(dataclasses.replace(hw, ssds=rated), monkeypatch)
    run.step()
    found = run.metrics()
    assert found["lohan/ssd_wear"] == found["lohan/ssd_written_bytes"] / 10**9 > 0
    run.model.lohan.close()


def test_a_rating_is_part_of_a_profile_file(hw: HardwareProfile, tmp_path: Path) -> None:
    rated = dataclasses.replace(
        hw, ssds=tuple(dataclasses.replace(s, endurance_bytes=7 * 10**15) for s in hw.ssds)
    )
    for profile in (hw, rated):
        profile.save(tmp_path / "profile.json")
        assert HardwareProfile.load(tmp_path / "profile.json") == profile
    assert "endurance_bytes" not in json.dumps(hw.to_dict())  # files of before are as before
    with pytest.raises(HardwareError, match="endurance_bytes"):
        dataclasses.replace(hw, ssds=(dataclasses.replace(hw.ssds[0], endurance_bytes=-1),))


def test_what_is_left_to_the_next_forward(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(hw, monkeypatch, schedule="overlapped")
    writes = ssd.Syscalls.pwritev

    def slow(*args: Any) -> int:
        time.sleep(0.05)
        return writes(*args)

    run.step()
    monkeypatch.setattr(ssd.Syscalls, "pwritev", slow)
    run.step()
    assert run.metrics()["lohan/late_updates"] > 0
    run.model.lohan.close()


def test_retries_are_counted(hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = Faults()
    faults.install(monkeypatch)
    run = Run(hw, monkeypatch)
    run.step()
    faults.fault = Fault("preadv", faults.counts["preadv"] + 2, times=2)
    run.step()
    assert faults.happened == run.metrics()["lohan/ssd_retries"] == 2
    run.model.lohan.close()


def test_reading_is_cheap(hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Microseconds: a call takes less than a thousandth of a step of any model worth training."""
    run = Run(hw, monkeypatch)
    run.step()
    began = time.perf_counter()
    for _ in range(200):
        run.metrics()
    assert (time.perf_counter() - began) / 200 < 1e-3
    run.model.lohan.close()
