"""Trials that add the last gradients of a step to its sums, and take the norms, in their own pass.

As on CUDA: there norms of sums come from what completes them (on a CPU device they are plain
PyTorch's). What they are compared with is schedule "deferred", which adds first.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import Schedule
from lohan_fx.runtime import sums
from lohan_fx.runtime.clipping import Clipping, Norms
from lohan_fx.runtime.native import adam
from lohan_fx.runtime.optimizer import UnitOptimizer
from lohan_fx.runtime.trials import Trial, Trials
from lohan_fx.runtime.unit_updates import UnitUpdates
from tests.loops import InjectedError, assert_same, compiled, sometimes, updater_of, windows
from tests.models import make
from tests.test_speculative import NEVER, Watch, settled, watch
from tests.training import Training, identical, remember_captures, training_of

__all__ = ["watch"]  # a fixture

needs_kernel = pytest.mark.skipif(adam.kernel() is None, reason="no C++ compiler")
ACCUMULATE = 3


class Additions:
    """Counts additions that are passes of their own, and passes for norms that the last call of
    optimizer.step() still had to wait for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count = self.num_completed = 0
        add, complete = UnitUpdates.add, UnitUpdates.complete

        def counted(updates: UnitUpdates, *args: Any) -> None:
            self.count += 1
            add(updates, *args)

        def completed(updates: UnitUpdates, *args: Any) -> None:
            self.num_completed += 1
            complete(updates, *args)

        patch.setattr(UnitUpdates, "add", counted)
        patch.setattr(UnitUpdates, "complete", completed)


@pytest.fixture
def additions(monkeypatch: pytest.MonkeyPatch) -> Additions:
    make_norms = Norms.__init__

    def passing(norms: Norms, *, in_passing: bool) -> None:
        del in_passing
        make_norms(norms, in_passing=True)

    monkeypatch.setattr(Norms, "__init__", passing)
    remember_captures(monkeypatch, "mlp")
    return Additions(monkeypatch)


Side = tuple[list[Tensor], nn.Module, torch.optim.Optimizer]


def run(hw: HardwareProfile, schedule: Schedule, norm: float, sizes: Sequence[int]) -> Side:
    """Steps of so many backwards each of the MLP, in bf16 with float32 masters."""
    model, inputs = make("mlp")
    training = training_of("adamw", model)
    options: dict[str, Any] = {"states": "host", "dtype": "bf16", "schedule": schedule}
    made = compiled(
        model,
        training.optimizer,
        hw,
        accumulate=ACCUMULATE,
        clip_grad_norm=norm,
        **options,
    )
    noted = windows("mlp", sizes, norm=norm)(made, training, inputs)
    made.lohan.close()
    return noted, model, training.optimizer


def trained_with(
    schedule: str, model: nn.Module, uses: Sequence[Sequence[bool]], hw: HardwareProfile
) -> Side:
    """Steps of as many backwards as each has entries, of a model that is told what to use."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    options: dict[str, Any] = {"states": "host", "schedule": schedule, "accumulate": len(uses[0])}
    made = compiled(model, optimizer, hw, clip_grad_norm=NEVER, **options)
    x, noted = torch.linspace(-1, 1, 32).view(4, 8), []
    for step in uses:
        for use in step:
            loss = made(x, use)
            loss.backward()
            noted.append(loss.detach())
        optimizer.step()
        noted.append(torch.tensor(made.lohan.grad_norm))
        optimizer.zero_grad()
    made.lohan.close()
    return noted, model, optimizer


def assert_alike(first: Side, second: Side) -> None:
    assert len(first[0]) == len(second[0])
    assert all(map(identical, first[0], second[0]))
    assert_same(*first[1:], *second[1:])


@needs_kernel
@pytest.mark.parametrize("norm", [NEVER, 0.5, 0.0])
def test_the_same_as_added_first(
    norm: float, additions: Additions, watch: Watch, hw: HardwareProfile
) -> None:
    """Losses, norms, weights and states, to the bit; also of a step that ends early."""
    sizes = (3, 3, 1, 3, 3)
    wanted = run(hw, "deferred", norm, sizes)
    first, additions.count = additions.count, 0
    found = run(hw, "speculative", norm, sizes)
    assert_alike(found, wanted)
    units = first // sum(sizes)
    assert first == units * sum(sizes)
    if norm == NEVER:  # the last of each whole step is in the trial's pass
        assert additions.count == first - 4 * units
        assert len(watch.flips) == 4 * units
    else:
        assert additions.count < first


@needs_kernel
@pytest.mark.parametrize("bounded", [False, True])
def test_what_has_not_begun_is_added_by_the_update(
    bounded: bool, additions: Additions, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial that runs when optimizer.step() asks for norms goes on; of the others only the
    norms are taken, as nothing was added; or nothing, if a bound is enough."""
    if not bounded:
        monkeypatch.setattr(Clipping, "keeps", lambda *_: False)
    sizes = (3, 3)
    wanted = run(hw, "deferred", NEVER, sizes)
    units, additions.count = additions.count // sum(sizes), 0
    assert units > 2
    try_step, give_up = UnitOptimizer.try_step, Trials.give_up
    asked, said = threading.Semaphore(0), []

    def late(*args: Any, **kwargs: Any) -> Any:
        for _ in range(units):
            assert asked.acquire(timeout=30)
        return try_step(*args, **kwargs)

    def giving_up(trials: Trials, trial: Trial) -> bool:
        while not any(t.begun for t in trials._open):
            threading.Event().wait(1e-4)
        said.append(give_up(trials, trial))
        asked.release()
        return said[-1]

    monkeypatch.setattr(UnitOptimizer, "try_step", late)
    monkeypatch.setattr(Trials, "give_up", giving_up)
    found = run(hw, "speculative", NEVER, sizes)
    assert_alike(found, wanted)
    assert said.count(True) == 2
    assert len(said) == 2 * units
    assert additions.num_completed == (0 if bounded else 2 * (units - 1))
    assert additions.count == 4 * units


@needs_kernel
@pytest.mark.parametrize("at", [0, 1])
def test_a_trial_that_fails(
    at: int,
    additions: Additions,
    watch: Watch,
    hw: HardwareProfile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = run(hw, "deferred", NEVER, (3,))
    units, additions.count = additions.count // 3, 0
    try_step, calls = UnitOptimizer.try_step, itertools.count()

    def fail(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == at:
            raise InjectedError
        return try_step(*args, **kwargs)

    monkeypatch.setattr(UnitOptimizer, "try_step", fail)
    assert_alike(run(hw, "speculative", NEVER, (3,)), wanted)
    assert len(watch.flips) == units - 1
    assert (additions.count, additions.num_completed) == (2 * units, 1)


def test_without_the_kernel_gradients_are_added_and_then_tried(
    additions: Additions, watch: Watch, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adam, "kernel", lambda: None)
    wanted = run(hw, "deferred", NEVER, (3, 3))
    first, additions.count = additions.count, 0
    assert_alike(run(hw, "speculative", NEVER, (3, 3)), wanted)
    assert additions.count == first
    assert len(watch.flips) == 2 * first // 6


@needs_kernel
@pytest.mark.usefixtures("additions")
def test_parameters_without_a_gradient(watch: Watch, hw: HardwareProfile) -> None:
    """In the last backward, in those before it, or in all of them."""
    uses = [(True, False), (False, True), (False, False), (True, True), (True, False)]
    (first, _), (second, _) = sometimes()
    sides = ("speculative", first), ("deferred", second)
    assert_alike(*(trained_with(schedule, model, uses, hw) for schedule, model in sides))
    assert watch.flips


@needs_kernel
@pytest.mark.usefixtures("additions")
def test_a_step_that_is_skipped_leaves_nothing(watch: Watch, hw: HardwareProfile) -> None:
    """Neither sums nor trials are left for the next one."""

    def loop(model: Any, training: Training, inputs: dict[str, Any]) -> list[Tensor]:
        noted = []
        for scale in (1.0, float("inf"), 1.0, 2.0):
            for _ in range(ACCUMULATE):
                torch.manual_seed(0)
                loss = model(**inputs).square().mean() * scale
                loss.backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            noted.append(torch.tensor(model.lohan.grad_norm))
        return noted

    sides: list[Side] = []
    for schedule in ("deferred", "speculative"):
        model, inputs = make("mlp")
        training = training_of("adamw", model)
        options: dict[str, Any] = {"states": "host", "dtype": "bf16", "schedule": schedule}
        options.update(skip_nonfinite=True, clip_grad_norm=NEVER, accumulate=ACCUMULATE)
        made = compiled(model, training.optimizer, hw, **options)
        sides.append((loop(made, training, inputs), model, training.optimizer))
        assert made.lohan.skipped_steps == 1
        made.lohan.close()
    assert_alike(*sides)
    assert watch.flips


@pytest.mark.parametrize("clip", [NEVER, None])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_an_addition_that_fails_in_a_trial_fails_the_step(
    at: int, clip: float | None, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of a unit's gradients may have been added: to add all of them again would be wrong."""
    monkeypatch.setattr(adam, "kernel", lambda: None)
    model, inputs = make("mlp")
    training = training_of("sgd", model)
    options: dict[str, Any] = {"states": "host", "schedule": "speculative", "accumulate": 2}
    made = compiled(model, training.optimizer, hw, clip_grad_norm=clip, **options)
    before = [p.detach().clone() for p in model.parameters()]
    add, calls = sums._add, itertools.count()

    def fail(*args: Any) -> None:
        if next(calls) == at:
            raise InjectedError
        add(*args)

    made(**inputs).square().mean().backward()
    assert updater_of(made).settle() is None  # what it adds is there
    with monkeypatch.context() as patch:
        patch.setattr(sums, "_add", fail)
        made(**inputs).square().mean().backward()
        settled(made)  # so that it failed in a trial, and not in the update of what none had begun
        with pytest.raises(InjectedError):
            training.optimizer.step()
    assert all(map(identical, model.parameters(), before))
    for _ in range(2):
        made(**inputs).square().mean().backward()
    training.optimizer.step()
    made.lohan.close()
