"""Units on the device without a compute copy, which is cast from the master where it is used: the
same training to the bit."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lohan_fx._compat import FakeTensorMode
from lohan_fx.api import LohanModule
from lohan_fx.footprint import cast_units
from lohan_fx.hardware import HardwareProfile
from lohan_fx.planners.random_policy import RandomPolicy
from lohan_fx.runtime import chunked_update
from lohan_fx.runtime.native import adam_cuda
from lohan_fx.runtime.optimizer import UnitOptimizer
from lohan_fx.runtime.update_values import Updated
from tests.casting import (
    ALWAYS,
    HARD,
    KEPT,
    NEVER,
    Casts,
    Run,
    assert_equal,
    assert_in_memory,
    assert_same_run,
    trained_units,
)
from tests.loops import assert_same, compiled, windows
from tests.models import loss_of, make
from tests.test_exactness import Meter
from tests.training import (
    NUM_STEPS,
    Training,
    cpu_hardware,
    identical,
    remember_captures,
    step,
    step_in_mixed_precision,
)

Loop = Callable[[LohanModule, Training, dict[str, Any]], list[Tensor]]


def stepping(name: str, num_steps: int = NUM_STEPS) -> Loop:
    """Steps that move the planned bytes, which casts do not cross any link with."""

    def loop(made: LohanModule, training: Training, inputs: dict[str, Any]) -> list[Tensor]:
        made.lohan.prepare(**inputs)
        noted = []
        for seed in range(num_steps):
            meter = Meter(made)
            found = step(name, made, inputs, seed, training.step)
            noted += [found.loss, *found.tensors.values()]
            meter.check()
        return noted

    return loop


def manually(name: str) -> Loop:
    """Micro-batches, of which the loop says which is a step's last."""

    def loop(made: LohanModule, training: Training, inputs: dict[str, Any]) -> list[Tensor]:
        noted = []
        for size in (1, 3, 2):
            for k in range(size):
                with made.no_sync() if k + 1 < size else nullcontext():
                    torch.manual_seed(10 * size + k)
                    loss = loss_of(name, made(**inputs))
                    loss.backward()
                noted.append(loss.detach())
            training.step()
        return noted + [p.detach().clone() for p in made.parameters()]

    return loop


Left = tuple[list[Tensor], Run]


def run_of(name: str, hw: HardwareProfile, strategy: Any, loop: Loop, **options: Any) -> Left:
    run = Run(hw, strategy, name, **options)
    found = loop(run.model, run.training, run.inputs)
    wanted = trained_units(run.model) if strategy.every == 1 else None
    if strategy.every == 0:
        wanted = set()
    if wanted is not None:
        assert_in_memory(run.model, wanted)
    assert bool(cast_units(run.model.plan)) == bool(strategy.every)
    run.close()
    return found, run


@functools.cache
def kept(name: str, loop: Callable[[str], Loop], options: tuple[tuple[str, Any], ...]) -> Left:
    """What a plan gives that keeps everything."""
    with tempfile.TemporaryDirectory() as directory:
        hw = cpu_hardware(Path(directory))
        return run_of(name, hw, KEPT, loop(name), **dict(options))


def check(
    name: str,
    hw: HardwareProfile,
    patch: pytest.MonkeyPatch,
    strategy: Casts,
    loop: Callable[[str], Loop] = stepping,
    *,
    schedule: str = "serial",
    **options: Any,
) -> Run:
    """A loop notes and leaves the same, to the bit, as with copies and activations kept."""
    remember_captures(patch, f"casts, {name}")
    wanted, plain = kept(name, loop, tuple(options.items()))
    found, run = run_of(name, hw, strategy, loop(name), schedule=schedule, **options)
    assert_equal(found, wanted)
    assert_same_run(run, plain)
    return run


SCHEDULES = ("overlapped", "optimized", "serial", "deferred", "speculative")
RANDOM = [Casts(1, RandomPolicy(seed=seed)) for seed in (1, 2)]


@pytest.mark.parametrize("strategy", [Casts(), *RANDOM], ids=["kept", "random 1", "random 2"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_steps(
    schedule: str, strategy: Casts, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = check("gpt2", hw, monkeypatch, strategy, schedule=schedule)
    assert run


@pytest.mark.parametrize("strategy", HARD, ids=["swap", "recompute", "every second"])
@pytest.mark.parametrize("name", ["llama", "bert", "resnet", "frozen", "shared", "unused"])
def test_architectures(
    name: str, strategy: Casts, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = ["llama", "bert", "resnet", "frozen", "shared", "unused"].index(name)
    schedule = SCHEDULES[(index + HARD.index(strategy)) % len(SCHEDULES)]
    check(name, hw, monkeypatch, strategy, schedule=schedule)


def test_halves(hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    check("tied", hw, monkeypatch, HARD[0], schedule="overlapped", dtype="fp16")


def together(name: str) -> Loop:
    """Two forwards at once, whose backwards begin with the first."""

    def loop(made: LohanModule, training: Training, inputs: dict[str, Any]) -> list[Tensor]:
        noted: list[Tensor] = []
        for seed in range(3):
            torch.manual_seed(seed)
            losses = [loss_of(name, made(**inputs)) for _ in range(2)]
            for loss in losses:
                loss.backward()
            training.step()
            noted += [loss.detach() for loss in losses]
        return noted

    return loop


@pytest.mark.parametrize("schedule", ["optimized", "deferred"])
def test_forwards_that_wait(
    schedule: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"forwards": 2, "accumulate": 2}
    check("tied", hw, monkeypatch, RANDOM[0], together, schedule=schedule, **options)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("schedule", ["overlapped", "speculative"])
def test_other_optimizers(
    schedule: str, optimizer: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    check("tied", hw, monkeypatch, HARD[0], schedule=schedule, optimizer=optimizer)


@pytest.mark.parametrize("schedule", ["overlapped", "serial", "deferred", "speculative"])
def test_micro_batches(schedule: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"schedule": schedule, "accumulate": "manual"}
    check("gpt2", hw, monkeypatch, RANDOM[0], manually, **options)


def clipping(norm: float) -> Callable[[str], Loop]:
    """Norms, and evaluations between steps, by a program of their own."""
    return clipping_always if norm == ALWAYS else clipping_never


def clipping_always(name: str) -> Loop:
    return windows(name, (2, 2, 1), norm=ALWAYS)


def clipping_never(name: str) -> Loop:
    return windows(name, (2, 2, 1), norm=NEVER)


@pytest.mark.parametrize("norm", [ALWAYS, NEVER], ids=["always", "never"])
@pytest.mark.parametrize("schedule", ["serial", "deferred", "speculative"])
def test_clipping(
    schedule: str, norm: float, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"schedule": schedule, "accumulate": 2, "clip_grad_norm": norm}
    check("tied", hw, monkeypatch, HARD[2], clipping(norm), **options)


def whole(name: str) -> Loop:
    return windows(name, (2, 1))


@pytest.mark.parametrize("schedule", ["serial", "deferred"])
def test_gradients_kept(
    schedule: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    check("tied", hw, monkeypatch, HARD[0], whole, schedule=schedule, gradients="kept")


@pytest.mark.parametrize("schedule", ["overlapped", "speculative"])
def test_a_step_is_what_a_user_would_write(
    schedule: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bf16 model cast from fp32 masters before each step, and PyTorch's fused AdamW on these."""
    remember_captures(monkeypatch, "casts, mlp")
    masters, inputs = make("mlp")
    compute = copy.deepcopy(masters).bfloat16()
    plain = torch.optim.AdamW(masters.parameters(), lr=1e-3, fused=True)
    model, _ = make("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "schedule": schedule}
    made = compiled(model, optimizer, hw, strategy=HARD[0], **options)
    for seed in range(NUM_STEPS):
        torch.manual_seed(seed)
        wanted = step_in_mixed_precision(masters, compute, inputs, plain)
        torch.manual_seed(seed)
        found = made(**inputs)
        found.backward()
        optimizer.step()
        assert identical(found.detach(), wanted)
        assert_equal([*made.parameters()], [*masters.parameters()])
    assert_in_memory(made, trained_units(made))
    made.lohan.close()
    assert_same(model, optimizer, masters, plain)


@pytest.mark.parametrize("copied", [True, False])
def test_our_kernel_updates_units_on_a_gpu(copied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a copy or without, as plans count on: torch's own wants gradients in float32 beside
    these, and rounds differently. (Nothing runs: there need be no GPU.)"""
    by_torch: list[bool] = []

    def update(*_: Any, **__: Any) -> Updated:
        by_torch.append(True)
        return Updated({}, {})

    monkeypatch.setattr(adam_cuda, "expected", lambda: True)
    monkeypatch.setattr(chunked_update, "update", update)
    p = nn.Parameter(torch.zeros(4096))
    with FakeTensorMode():
        unit = UnitOptimizer(torch.optim.AdamW([p], fused=True), [p])
        master = torch.zeros(4096, device="cuda")
        gradient = torch.zeros(4096, device="cuda", dtype=torch.bfloat16)
        state = [{name: torch.zeros_like(master) for name in unit.state_names()}]
        unit.step_mixed([master], [gradient], state, [gradient.clone() if copied else None])
        assert not by_torch
        unit.step([master], [gradient.float()], state)
        assert by_torch
