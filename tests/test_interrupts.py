"""An interrupt at any line: no step is torn without the model saying so, and nothing leaks."""

from __future__ import annotations

import itertools
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lohan_fx.api import LohanModule
from lohan_fx.errors import StepError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import LATE, SCHEDULES
from lohan_fx.runtime import engine
from lohan_fx.runtime.executor import Executor
from lohan_fx.runtime.optimizer import UnitOptimizer
from lohan_fx.runtime.ssd import striped_file
from lohan_fx.runtime.unit_updates import UnitUpdates
from lohan_fx.runtime.updates import Updater
from tests.failing import COPIES, TIERS, Resources, Run, with_copies
from tests.faults import interrupted
from tests.training import (
    model_threads,
)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(striped_file, "_RETRIES_S", (0.001, 0.001, 0.001))


def sweep_interrupts(run: Run, num_places: int, seed: int) -> dict[str, int]:
    run.good_step()
    with interrupted() as counted:
        run.good_step()
    chance = random.Random(seed)
    outcomes: dict[str, int] = {}
    resources = Resources(run)
    width = counted.count / num_places
    for place in range(num_places):
        at = 1 + int((place + chance.random()) * width)
        reached = False
        with interrupted(at) as places:
            try:
                run.step()
            except KeyboardInterrupt:
                reached = True
        if not reached:  # the number of lines depends on who waits for whom
            run.done += 1
            outcome = "missed"
        else:
            outcome = run.go_on()
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        try:
            run.good_step()
            resources.assert_back()
        except BaseException as error:
            error.add_note(f"after an interrupt at place {at}, {places.place}: {outcome}")
            raise
    return outcomes


@with_copies(*TIERS)
def test_an_interrupt_anywhere_in_a_step(
    schedule: str, where: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(hw, monkeypatch, states=where, schedule=schedule)
    outcomes = sweep_interrupts(run, num_places=3, seed=0)
    assert outcomes.get("lost", 0) >= 1, outcomes
    run.close(hw)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"states": "device", "schedule": "serial"}, marks=pytest.mark.slow),
        {"states": "device", "schedule": "deferred"},
        {"states": "ssd", "schedule": "deferred", "gradients": "kept"},
    ],
    ids=lambda options: " ".join(options.values()),
)
def test_an_interrupt_leaves_autograd_on(
    options: Any, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that strikes where `no_grad` is left, which is Python."""
    left = torch.no_grad.__exit__.__code__
    for at in itertools.count(1):
        run = Run(hw, monkeypatch, **options)
        run.step()
        count = itertools.count(1)

        def strike(frame: Any, event: str, _: Any, at: int = at, count: Any = count) -> None:
            if event == "call" and frame.f_code is left and next(count) == at:
                sys.settrace(None)
                raise KeyboardInterrupt

        before = sys.gettrace()
        sys.settrace(strike)
        try:
            run.step()
            break
        except KeyboardInterrupt:
            assert torch.is_grad_enabled()
        finally:
            sys.settrace(before)
            torch.set_grad_enabled(True)
            run.close(hw)
    assert (at > 2) == (options["states"] == "device")


@pytest.mark.slow
@pytest.mark.parametrize("states", [*TIERS, COPIES])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_interrupt_anywhere_in_a_step_often(
    schedule: str, states: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(hw, monkeypatch, states=states, schedule=schedule)
    sweep_interrupts(run, num_places=100, seed=1)
    run.close(hw)


@pytest.mark.parametrize("schedule", ["serial", "deferred", "speculative"])
def test_an_interrupt_in_an_update_on_the_device(
    schedule: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tears the model, which another optimizer.step() says, too."""
    run = Run(hw, monkeypatch, states="device", schedule=schedule)
    run.good_step()
    update, count = UnitOptimizer.step, itertools.count(1)

    def interrupt(*args: Any, **kwargs: Any) -> None:
        update(*args, **kwargs)
        if next(count) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(UnitOptimizer, "step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run.step()
    with pytest.raises(StepError, match="between two steps"):
        run.optimizer.step()
    assert run.go_on() == "torn"
    run.good_step()
    run.close(hw)


@pytest.mark.parametrize("schedule", ["optimized", *sorted(LATE)])
def test_a_step_that_is_interrupted_is_ended_by_another(
    schedule: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(hw, monkeypatch, states="host", schedule=schedule)
    run.good_step()
    with monkeypatch.context() as patch:
        patch.setattr(Updater, "finish", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            run.step()
    with pytest.raises(StepError, match=r"call optimizer\.step\(\)"):
        run.step()
    assert run.go_on() == "ended"
    run.good_step()
    run.close(hw)


@pytest.mark.parametrize(
    ("schedule", "gradients"),
    [*((schedule, "consumed") for schedule in SCHEDULES), ("serial", "kept"), ("deferred", "kept")],
)
def test_an_interrupt_while_an_ended_step_is_forgotten(
    schedule: str, gradients: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All units took it. Whoever takes it for unfinished and calls optimizer.step() again has not
    taken it twice."""
    run = Run(hw, monkeypatch, states="host", schedule=schedule, gradients=gradients)
    run.good_step()
    clear = UnitUpdates.clear

    def cleared(updates: UnitUpdates) -> None:
        all_ended = len(updates.ended) > 1
        clear(updates)
        if all_ended:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(UnitUpdates, "clear", cleared)
        with pytest.raises(KeyboardInterrupt):
            run.two_steps()
    assert run.go_on() != "lost"
    run.optimizer.zero_grad()  # with gradients="kept" they are the user's
    run.good_step()
    run.close(hw)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in finalizers
@pytest.mark.parametrize(
    ("schedule", "states"), [("deferred", "ssd"), ("speculative", "host"), ("serial", "device")]
)
def test_an_interrupted_close_is_called_again(
    schedule: str, states: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is an ordinary one then, with its weights and states; nothing else is left."""
    before = model_threads()
    num_places, struck = 0, 0
    for place in range(9):
        run = Run(hw, monkeypatch, states=states, schedule=schedule)
        run.step()
        run.done = 1
        at = place * num_places // 8 + 1 if place else 0
        try:
            with interrupted(at) as places:
                run.model.lohan.close()
        except KeyboardInterrupt:
            struck += 1
            if isinstance(run.model, LohanModule):
                run.model.lohan.close()
        num_places = num_places or places.count
        assert not isinstance(run.model, LohanModule), places.place
        run.check()
        assert not list(Path(hw.ssds[0].path).iterdir()), places.place
        assert model_threads() <= before, places.place
    assert struck >= 5


@pytest.mark.parametrize("states", ["device", "ssd"])
def test_a_signal_from_outside(
    states: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, at a random moment of a step or of what follows."""
    run = Run(hw, monkeypatch, states=states, schedule="overlapped")
    run.good_step()
    began = time.perf_counter()
    run.good_step()
    length_s = time.perf_counter() - began
    chance = random.Random(0)
    here = threading.get_ident()
    num_interrupts = 0
    for _ in range(12):
        timer = threading.Timer(chance.random() * length_s, signal.pthread_kill, (here, 2))
        stepped = False
        try:
            timer.start()
            run.step()
            stepped = True
            timer.join()
            time.sleep(0.001)  # the signal is taken here at the latest
        except KeyboardInterrupt:
            num_interrupts += 1
            timer.join()
        if stepped:
            run.done += 1
            run.check()
        else:
            run.go_on()
        run.good_step()
    assert num_interrupts > 0
    run.close(hw)


@pytest.mark.parametrize("states", TIERS)
@pytest.mark.parametrize("half", ["forward", "backward"])
def test_a_second_interrupt_while_the_first_is_handled(
    half: str, states: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(hw, monkeypatch, states=states, schedule="optimized")
    run.good_step()
    resources = Resources(run)
    op = "offload" if half == "forward" else "emit_gradients"
    with monkeypatch.context() as patch:

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(engine.Engine, op, interrupt)
        patch.setattr(Executor, "abort", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run.step()
    if half == "backward":  # the user takes the step for good
        run.optimizer.step()
    assert run.go_on() == "lost"
    run.good_step()
    resources.assert_back()
    run.close(hw)
