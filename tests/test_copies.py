"""Compute copies of SSD units in host memory: the same training, with fewer bytes to the SSD."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lohan_fx.api import LohanModule
from lohan_fx.footprint import align, host_bytes_needed, ssd_bytes_needed
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import SCHEDULES, Plan
from lohan_fx.simulate import simulate
from lohan_fx.workload import Workload
from tests.loops import assert_same, compiled, windows
from tests.models import make
from tests.test_exactness import Meter
from tests.training import (
    Squeezed,
    Training,
    WithCopies,
    identical,
    remember_captures,
    step,
    training_of,
)


def train(
    name: str,
    hw: HardwareProfile,
    loop: Callable[[LohanModule, Training, dict[str, Any]], list[Tensor]],
    **options: Any,
) -> tuple[list[Tensor], nn.Module, torch.optim.Optimizer]:
    """What a loop notes, and the closed model."""
    model, inputs = make(name)
    training = training_of("adamw", model)
    options = {"dtype": "bf16", "swap_to": "ssd", **options}
    made = compiled(model, training.optimizer, hw, **options)
    found = loop(made, training, inputs)
    made.lohan.close()
    return found, model, training.optimizer


MORE = (("gpt2", 2), ("llama", 1), ("frozen", 1), ("tied", 2), ("resnet", 1))
"""Models, and which units have copies."""


def assert_like_host(
    name: str,
    hw: HardwareProfile,
    loop: Callable[[LohanModule, Training, dict[str, Any]], list[Tensor]],
    **options: Any,
) -> None:
    """A loop notes and leaves the same, to the bit, as with all states in host memory."""
    strategy = options.pop("strategy", WithCopies())
    wanted, plain, its = train(name, hw, loop, states="host", **options)
    found, model, optimizer = train(name, hw, loop, states="ssd", strategy=strategy, **options)
    assert len(found) == len(wanted) > 0
    assert all(map(identical, found, wanted))
    assert_same(model, optimizer, plain, its)


# -- the same training ---------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("name", "every"),
    [("gpt2", 1), *(pytest.param(*row, marks=pytest.mark.slow) for row in MORE)],
)
def test_steps_are_the_same_and_move_the_planned_bytes(
    name: str, every: int, schedule: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loop(made: LohanModule, training: Training, inputs: dict[str, Any]) -> list[Tensor]:
        made.lohan.prepare(**inputs)
        noted = []
        for seed in range(3):
            meter = Meter(made)
            found = step(name, made, inputs, seed, training.step)
            noted += [found.loss, *found.tensors.values()]
            meter.check()
        return noted

    remember_captures(monkeypatch, f"{name}, bf16")
    assert_like_host(name, hw, loop, schedule=schedule, strategy=WithCopies(every=every))


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 2, "schedule": "overlapped"},
        {"accumulate": 2, "schedule": "serial"},
        {"accumulate": 2, "clip_grad_norm": 0.1, "schedule": "deferred"},
        {"gradients": "kept", "schedule": "serial"},
        {"gradients": "kept", "schedule": "deferred"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_sums_of_gradients(
    options: dict[str, Any], hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluations in between read the copies, too."""
    remember_captures(monkeypatch, "tied, bf16")
    norm = options.get("clip_grad_norm")
    loop = windows("tied", (2, 2, 1), norm=norm)
    assert_like_host("tied", hw, loop, strategy=WithCopies(every=2), **options)


# -- memory and bytes ------------------------------------------------------------------------------


def test_what_is_planned_is_allocated_and_predicted(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the same plan without copies: 2 reads and a write of the copy less, a step."""
    remember_captures(monkeypatch, "gpt2, bf16")

    def measured(strategy: Any) -> tuple[Plan, Workload, dict[str, Any]]:
        model, inputs = make("gpt2")
        optimizer = training_of("adamw", model).optimizer
        options: dict[str, Any] = {"dtype": "bf16", "states": "ssd", "swap_to": "host"}
        made = compiled(model, optimizer, hw, strategy=strategy, schedule="optimized", **options)
        program = made.lohan.prepare(**inputs)
        found = made.lohan.metrics()
        made.lohan.close()
        traffic = simulate(program.workload, program.plan, hw).traffic
        predicted = program.plan.prediction
        assert traffic.ssd_read_bytes == predicted.ssd_read_bytes
        assert traffic.ssd_write_bytes == predicted.ssd_write_bytes
        host = host_bytes_needed(program.workload, program.plan)
        ssd = ssd_bytes_needed(program.workload, program.plan)
        assert found["lohan/host_bytes"] == sum(host.values()) == predicted.peak_host_bytes
        assert found["lohan/ssd_bytes"] == sum(ssd.values()) == predicted.peak_ssd_bytes
        return program.plan, program.workload, {**host, "file": ssd["units"]}

    before, workload, without = measured(Squeezed("swap-all", 0.0))
    after, _, need = measured(WithCopies())
    copies = sum(align(u.compute_bytes) for u in workload.units)
    fetched = sum(u.compute_bytes * len(before.units[u.name].windows) for u in workload.units)
    assert need["compute copies"] == copies == without["file"] - need["file"] > 0
    assert need["state ring"] < without["state ring"]
    assert need["staging"] == 0 < without["staging"]
    read, written = (
        (p.prediction.ssd_read_bytes, p.prediction.ssd_write_bytes) for p in (before, after)
    )
    saved = sum(u.compute_bytes for u in workload.units)
    assert (read[0] - written[0], read[1] - written[1]) == (fetched, saved)
