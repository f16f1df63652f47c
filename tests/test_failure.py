"""When something fails: the error is clear, nothing leaks, the run goes on or says how to go on.

Every test here lets something go wrong in the middle of training, then asks the same question as
a user would: are weights and optimizer states those of one step, bit for bit, or does the model
say that they are not, and how to go on?
"""

from __future__ import annotations

import copy
import gc
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

import lohan_fx
import lohan_fx.compiled
from lohan_fx.api import LohanModule
from lohan_fx.errors import StepError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import SCHEDULES
from lohan_fx.runtime import ssd
from tests.faults import interrupted
from tests.models import loss_of, make
from tests.training import (
    Squeezed,
    cpu_hardware,
    identical,
    one_thread,
    remember_captures,
    training_of,
)

TIERS = ("device", "host", "ssd")


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssd, "_RETRIES_S", (0.001, 0.001, 0.001))


@pytest.fixture
def hw(tmp_path: Path) -> HardwareProfile:
    return cpu_hardware(tmp_path)


def tensors_of(state: Any, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a state dict by path."""
    if isinstance(state, Tensor):
        return {prefix: state.detach()}
    found: dict[str, Tensor] = {}
    if isinstance(state, dict):
        for key, value in state.items():
            found.update(tensors_of(value, f"{prefix}.{key}"))
    return found


def same(a: Any, b: Any) -> bool:
    x, y = tensors_of(a), tensors_of(b)
    return x.keys() == y.keys() and all(identical(t, y[k]) for k, t in x.items())


class Plain:
    """The run in plain PyTorch, with everything that there is after each step."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.model, self.inputs = make(name)
        self.optimizer = training_of("adam", self.model).optimizer
        self.saved: list[tuple[Any, Any]] = []
        self.losses: list[Tensor] = []

    def after(self, num_steps: int) -> tuple[Any, Any]:
        """(state_dict of the model, of the optimizer)"""
        self._run(num_steps)
        return self.saved[num_steps]

    def loss(self, step: int) -> Tensor:
        self._run(step + 1)
        return self.losses[step]

    def _run(self, num_steps: int) -> None:
        if not self.saved:
            self._save()
        while len(self.saved) <= num_steps:
            torch.manual_seed(len(self.losses))
            loss = loss_of(self.name, self.model(**self.inputs))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.detach())
            self._save()

    def _save(self) -> None:
        self.saved.append(
            (copy.deepcopy(self.model.state_dict()), copy.deepcopy(self.optimizer.state_dict()))
        )


_plain: dict[str, Plain] = {}


class Run:
    """The same run, compiled; `done` are the steps that it has taken."""

    def __init__(
        self, hw: HardwareProfile, patch: pytest.MonkeyPatch, name: str = "mlp", **options: Any
    ) -> None:
        remember_captures(patch, name)
        self.name = name
        self.plain = _plain.setdefault(name, Plain(name))
        model, self.inputs = make(name)
        self.optimizer = training_of("adam", model).optimizer
        options = {
            "strategy": Squeezed("swap-all", 0.0), "states": "ssd", "swap_to": "ssd", **options
        }  # fmt: skip
        made = lohan_fx.compile(model, hw=hw, optimizer=self.optimizer, **options)
        assert isinstance(made, LohanModule)
        self.model = made
        self.done = 0

    def step(self) -> Tensor:
        torch.manual_seed(self.done)
        loss: Tensor = loss_of(self.name, self.model(**self.inputs))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def good_step(self) -> None:
        """A step that is plain PyTorch's, bit for bit."""
        assert identical(self.step(), self.plain.loss(self.done))
        self.done += 1
        self.check()

    def check(self) -> None:
        weights, state = self.plain.after(self.done)
        assert same(self.model.state_dict(), weights)
        assert same(self.optimizer.state_dict(), state)

    def go_on(self) -> str:
        """After a failed step: find out, from what the model says, what has become of it.

        Returns "lost" (as if it had not begun), "taken", "ended" (`optimizer.step()` took it up),
        or "torn" (a checkpoint was loaded). All but the last are exact.
        """
        outcome = ""
        try:
            found = self.model.state_dict()
        except StepError as error:
            if "between two steps" in str(error):
                self.load(self.done)
                return "torn"
            assert "call optimizer.step()" in str(error)
            self.optimizer.step()
            found = self.model.state_dict()
            outcome = "ended"
        before, after = (self.plain.after(self.done + k)[0] for k in (0, 1))
        if same(found, after):
            self.done += 1
            outcome = outcome or "taken"
        else:
            assert not outcome
            assert same(found, before)
            outcome = "lost"
        self.check()
        return outcome

    def load(self, done: int) -> None:
        """Load plain PyTorch's checkpoint, as the message of a torn model says."""
        weights, state = self.plain.after(done)
        with pytest.raises(StepError, match=r"between two steps.*Load a checkpoint"):
            self.step()
        with pytest.raises(StepError, match="between two steps"):
            self.optimizer.state_dict()
        self.model.load_state_dict(weights)
        with pytest.raises(StepError, match="between two steps"):  # not without the optimizer
            self.step()
        self.optimizer.load_state_dict(copy.deepcopy(state))
        self.done = done
        self.check()


class Resources:
    """Descriptors, threads, and all staging buffers at home."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.found = self._now()

    def _now(self) -> Any:
        gc.collect()
        memory = self._run.model.lohan.memory
        assert memory is not None
        rings = [memory.lanes.staging, *(memory.updater._all_rings if memory.updater else [])]
        return (
            psutil.Process().num_fds(),
            sorted(t.name for t in threading.enumerate()),
            [len(ring._free) for ring in rings if ring is not None],
        )

    def assert_back(self) -> None:
        assert self._now() == self.found


# -- an interrupt at any line ----------------------------------------------------------------------


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


@pytest.mark.parametrize("states", TIERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_interrupt_anywhere_in_a_step(
    schedule: str, states: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(hw, monkeypatch, states=states, schedule=schedule)
    num_places = int(os.environ.get("PLACES", "12"))
    outcomes = sweep_interrupts(run, num_places, seed=int(os.environ.get("SEED", "0")))
    assert outcomes.get("lost", 0) > num_places // 6
    run.model.lohan.close()
    assert not list(Path(hw.ssds[0].path).iterdir())
