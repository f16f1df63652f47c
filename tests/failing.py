"""A run in which something fails, beside the same run in plain PyTorch."""

from __future__ import annotations

import copy
import gc
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

import lohan_fx
import lohan_fx.compiled.allocation
import lohan_fx.compiled.building
import lohan_fx.compiled.fitting
import lohan_fx.compiled.programs
from lohan_fx.api import LohanModule
from lohan_fx.errors import StepError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import SCHEDULES
from lohan_fx.runtime import engine
from lohan_fx.runtime.arena import Arena, PageLocker
from tests.models import loss_of, make
from tests.training import (
    Squeezed,
    WithCopies,
    alternating,
    identical,
    remember_captures,
    training_of,
)

TIERS = ("device", "host", "ssd")


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


COPIES = "ssd, with copies in host memory"


def with_copies(*states: str) -> Any:
    """Schedules and where the states are; in the default suite, of several tiers every second pair.
    With copies, there, one schedule only: its fetches wait for less than an update's write."""
    rows = alternating(SCHEDULES, states)
    if len(states) == 1:
        rows = [(schedule, *states) for schedule in SCHEDULES]
    slow = [(schedule, COPIES) for schedule in SCHEDULES if schedule != "overlapped"]
    return pytest.mark.parametrize(
        ("schedule", "where"),
        [
            *rows,
            ("overlapped", COPIES),
            *(pytest.param(*row, marks=pytest.mark.slow) for row in slow),
        ],
    )


class Mixed(Plain):
    """The run in mixed precision, with the states in host memory."""

    def __init__(self, name: str, hw: HardwareProfile) -> None:
        super().__init__(name)
        self.model = lohan_fx.compile(
            self.model, hw=hw, optimizer=self.optimizer, states="host", swap_to="host", dtype="bf16"
        )


_plain: dict[str, Plain] = {}


class Run:
    """The same run, compiled; `done` are the steps that it has taken."""

    def __init__(
        self, hw: HardwareProfile, patch: pytest.MonkeyPatch, name: str = "mlp", **options: Any
    ) -> None:
        remember_captures(patch, name)
        self.name = name
        if options.get("states") == COPIES:
            self.plain = Mixed(name, hw)
            options.update(states="ssd", strategy=WithCopies(), dtype="bf16")
        else:
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

    def close(self, hw: HardwareProfile) -> None:
        self.model.lohan.close()
        if isinstance(self.plain, Mixed):
            self.plain.model.lohan.close()  # type: ignore[union-attr]
        assert not list(Path(hw.ssds[0].path).iterdir())

    def step(self) -> Tensor:
        torch.manual_seed(self.done)
        loss: Tensor = loss_of(self.name, self.model(**self.inputs))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def two_steps(self) -> None:
        """What goes wrong in the first one may be met in the second one only."""
        self.step()
        self.step()

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


def pin_with(locker: type[PageLocker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have models on a CPU pin their host memory, too, by a locker that needs no GPU."""

    def pinned(num_bytes: int, **options: Any) -> Arena:
        return Arena(num_bytes, **{**options, "pin": True})

    for module in (lohan_fx.compiled.allocation, engine):
        monkeypatch.setattr(module, "Arena", pinned)
    monkeypatch.setattr(lohan_fx.compiled.allocation, "PageLocker", locker)
