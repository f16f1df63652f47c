"""When something fails: the error is clear, nothing leaks, the run goes on or says how to go on.

Every test here lets something go wrong in the middle of training, then asks the same question as
a user would: are weights and optimizer states those of one step, bit for bit, or does the model
say that they are not, and how to go on?
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import errno
import gc
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
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
from lohan_fx.errors import InsufficientMemoryError, LohanError, StepError, StorageError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import LATE, SCHEDULES
from lohan_fx.runtime import arena, engine, states
from lohan_fx.runtime.arena import Arena, BufferRing, PageLocker
from lohan_fx.runtime.executor import Executor
from lohan_fx.runtime.lane import Lane, RankedLane, Ticket
from lohan_fx.runtime.optimizer import UnitOptimizer
from lohan_fx.runtime.ssd import IoPool, RunDirectory, StripedFile, striped_file
from lohan_fx.runtime.unit_updates import UnitUpdates
from lohan_fx.runtime.updates import Updater
from lohan_fx.runtime.waiting import Future
from tests.faults import Fault, Faults, interrupted
from tests.models import loss_of, make
from tests.training import (
    Squeezed,
    WithCopies,
    identical,
    model_threads,
    remember_captures,
    training_of,
)

TIERS = ("device", "host", "ssd")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(striped_file, "_RETRIES_S", (0.001, 0.001, 0.001))


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
    """Schedules and where the states are. With copies, in the default suite, one schedule only:
    its fetches wait for less than an update's write."""
    rows = [(schedule, where) for where in states for schedule in SCHEDULES]
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
        {"states": "device", "schedule": "serial"},
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


# -- set-up that fails -----------------------------------------------------------------------------


class Trained(Run):
    """A run whose first step was plain PyTorch's, so that the optimizer has states to lose."""

    def __init__(self, hw: HardwareProfile, patch: pytest.MonkeyPatch, **options: Any) -> None:
        model, inputs = make("mlp")
        optimizer = training_of("adam", model).optimizer
        torch.manual_seed(0)
        loss_of("mlp", model(**inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        super().__init__(hw, patch, **options)
        self.model.load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])
        self.done = 1

    def refused(self, hw: HardwareProfile, error: type[BaseException]) -> str:
        """Set-up fails; model and optimizer are as they were, and nothing is left behind."""
        threads = model_threads()
        with pytest.raises(error) as caught:
            self.model.lohan.prepare(**self.inputs)
        assert self.model.lohan.memory is None
        gc.collect()
        until = time.monotonic() + 5  # a thread that was told to end needs a moment
        while not model_threads() <= threads and time.monotonic() < until:
            time.sleep(0.01)
        assert model_threads() <= threads
        assert not list(Path(hw.ssds[0].path).iterdir())
        self.check()
        return str(caught.value)


@pytest.mark.parametrize("states", TIERS)
def test_an_interrupt_anywhere_in_set_up(
    states: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planning, allocation, moving the states, the rewrite."""
    with interrupted() as counted:
        run = Trained(hw, monkeypatch, states=states)
        run.model.lohan.prepare(**run.inputs)
    run.close(hw)
    chance = random.Random(0)
    run = Trained(hw, monkeypatch, states=states)
    for place in range(10):
        at = int((place + chance.random()) * counted.count / 10)
        reached = False
        with interrupted(at) as places:
            try:
                run.model.lohan.prepare(**run.inputs)
            except KeyboardInterrupt:
                reached = True
        if not reached:
            break
        run.check()
        if run.model.lohan.memory is None:
            assert not list(Path(hw.ssds[0].path).iterdir()), places.place
    for _ in range(2):
        run.good_step()
    run.close(hw)


def test_an_interrupt_right_behind_allocation(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model that has memory gives it back, threads and all."""
    before = model_threads()
    run = Trained(hw, monkeypatch)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(lohan_fx.compiled.programs.Programs, "own_memory", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run.model.lohan.prepare(**run.inputs)
    assert isinstance(run.model, LohanModule)
    assert run.model.lohan.memory is not None
    run.close(hw)
    assert model_threads() <= before


@pytest.mark.parametrize(
    ("module", "stage"),
    [
        (lohan_fx.compiled.building, "capture"),
        (lohan_fx.compiled.building, "annotate"),
        (lohan_fx.compiled.fitting, "make_plan"),
        (lohan_fx.compiled.building, "split"),
        (lohan_fx.compiled.allocation, "ModelStates"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_interrupt_in_a_stage_of_set_up(
    module: ModuleType, stage: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Trained(hw, monkeypatch)

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, stage, interrupt)
        with pytest.raises(KeyboardInterrupt):
            run.model.lohan.prepare(**run.inputs)
    assert isinstance(run.model, LohanModule)
    run.check()
    run.good_step()
    run.close(hw)


@pytest.mark.slow
def test_every_system_call_of_set_up_may_fail(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Faults()
    run = Trained(hw, monkeypatch)
    with monkeypatch.context() as patch:
        counted.install(patch)
        run.model.lohan.prepare(**run.inputs)
        run.close(hw)
    run = Trained(hw, monkeypatch)
    for call in ("open", "fallocate", "preadv", "pwritev", "fdatasync"):
        for at in range(1, counted.counts[call] + 1):
            with monkeypatch.context() as patch:
                faults = Faults(Fault(call, at, code=errno.ENOSPC))  # type: ignore[arg-type]
                faults.install(patch)
                said = run.refused(hw, StorageError)
            assert "No space left on device" in said
            assert str(hw.ssds[0].path) in said
            assert re.search("free some space|local file system", said)
    run.good_step()
    run.close(hw)


@pytest.mark.parametrize("at", [1, 2])
def test_host_memory_is_refused(
    at: int, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Trained(hw, monkeypatch, states="host")
    calls, original = [0], arena.map_anonymous

    def refuse(num_bytes: int) -> int:
        calls[0] += 1
        if calls[0] == at:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return original(num_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(arena, "map_anonymous", refuse)
        said = run.refused(hw, InsufficientMemoryError)
    assert "not enough host memory" in said
    assert "smaller host budget" in said
    run.good_step()
    run.close(hw)


def test_pinning_is_refused(hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said once, with the limit; copies go on from pageable memory."""

    class Refusing(PageLocker):
        def available(self) -> bool:
            return True

        def lock(self, address: int, num_bytes: int) -> str:
            return "out of memory"

    def pinned(num_bytes: int, **options: Any) -> Arena:
        return Arena(num_bytes, **{**options, "pin": True})

    for module in (lohan_fx.compiled.allocation, engine):
        monkeypatch.setattr(module, "Arena", pinned)
    monkeypatch.setattr(lohan_fx.compiled.allocation, "PageLocker", Refusing)
    run = Run(hw, monkeypatch, states="host", swap_to="host")
    with pytest.warns(RuntimeWarning, match=r"were refused: out of memory.*ulimit -l") as caught:
        run.good_step()
    assert len(caught) == 1
    run.good_step()
    run.close(hw)


def test_threads_are_refused(hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Trained(hw, monkeypatch, schedule="speculative")
    original = threading.Thread.start
    for at in range(1, 9):  # two lanes, four threads for the disk, the optimizer and its trials
        calls = [0]

        def refuse(thread: threading.Thread, at: int = at, calls: list[int] = calls) -> None:
            ours = re.match("lohan_fx-(?!touch)", thread.name) is not None
            calls[0] += ours
            if calls[0] == at and (ours or "touch" in thread.name):
                raise RuntimeError("can't start new thread")
            original(thread)

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            said = run.refused(hw, LohanError)
        assert "can't start new thread" in said
        assert "ulimit -u" in said
    run.good_step()
    run.close(hw)


# -- a disk that fails -----------------------------------------------------------------------------


def assert_explains(error: StorageError, hw: HardwareProfile, code: int) -> None:
    text = str(error)
    assert re.search(r"(read|write) failed on ", text)
    assert str(hw.ssds[0].path) in text
    assert os.strerror(code) in text
    assert re.search(r"want \d+ bytes from \d+, got \d+", text)
    assert re.search("see dmesg|free some space", text)


@with_copies("ssd")
def test_reads_fail(
    schedule: str, where: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For good from the k-th of a step on, until the disk is back."""
    faults = Faults()
    faults.install(monkeypatch)
    run = Run(hw, monkeypatch, states=where, schedule=schedule)
    run.good_step()
    before = faults.counts["preadv"]
    run.good_step()
    each = faults.counts["preadv"] - before
    resources = Resources(run)
    outcomes = []
    for at in (1, 2, each // 3, each // 2, each * 2 // 3, each - 1):
        code = (errno.EIO, errno.ENODEV)[at % 2]
        faults.fault = Fault("preadv", faults.counts["preadv"] + at, code=code)
        try:
            run.step()
            run.model.lohan.sync()
        except StorageError as error:
            assert_explains(error, hw, code)
            faults.fault = None
            outcomes.append(run.go_on())
        else:
            assert not faults.happened
            run.done += 1
        faults.fault, faults.happened = None, 0
        run.good_step()
        resources.assert_back()
    assert "lost" in outcomes
    assert ("ended" in outcomes) == (schedule == "serial")
    assert ("torn" in outcomes) <= (schedule != "serial")
    run.close(hw)


@with_copies("ssd")
def test_writes_fail(
    schedule: str, where: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """States that cannot be written stay in host memory: the run goes on, bit for bit."""
    faults = Faults()
    faults.install(monkeypatch)
    run = Run(hw, monkeypatch, states=where, schedule=schedule, swap_to="host")
    run.good_step()
    before = faults.counts["pwritev"]
    run.good_step()
    each = faults.counts["pwritev"] - before
    memory = run.model.lohan.memory
    assert memory is not None
    units = memory.states.units
    parked = 0
    for at in (each, 1):  # one unit's, then everything's
        faults.fault = Fault("pwritev", faults.counts["pwritev"] + at, code=errno.ENOSPC)
        for _ in range(1 if at == each else 3):
            run.good_step()
        faults.fault = None
        run.good_step()
        assert parked < sum(u.parked for u in units)
        parked = sum(u.parked for u in units)
        assert (parked == len(units)) == (at == 1)
        held = sum(u.num_bytes for u in units if u.parked)
        assert run.model.lohan.metrics()["lohan/parked_bytes"] == held
    said = [r.getMessage() for r in caplog.records if "stay in host memory" in r.getMessage()]
    assert len(said) == parked
    assert all("No space left" in m and "save a checkpoint" in m for m in said)
    weights, state = run.plain.after(run.done)
    run.close(hw)
    assert same(run.model.state_dict(), weights)  # the model's still, after its end
    assert same(run.optimizer.state_dict(), state)


SUMS: list[dict[str, Any]] = [
    {"accumulate": 2, "schedule": "optimized"},  # a step of one backward: the sum is all there is
    {"accumulate": 2, "schedule": "serial"},
    {"accumulate": 2, "schedule": "deferred", "clip_grad_norm": 1e9},
    {"gradients": "kept", "schedule": "serial"},
    {"gradients": "kept", "schedule": "deferred"},
]


@pytest.mark.parametrize("options", SUMS, ids=lambda o: f"{next(iter(o))}-{o['schedule']}")
def test_writes_of_sums_fail(
    options: dict[str, Any], hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient sum that cannot be written stays in host memory with its unit."""
    faults = Faults()
    faults.install(monkeypatch)
    run = Run(hw, monkeypatch, swap_to="host", **options)
    run.good_step()
    units = run.model.lohan.memory.states.units  # type: ignore[union-attr]
    for times, parked in ((1, 1), (1_000_000, len(units))):
        # what a step writes first are sums: its states are written after its last backward
        at = faults.counts["pwritev"] + 1
        faults.fault = Fault("pwritev", at, times=times, code=errno.EROFS)
        torch.manual_seed(run.done)
        loss = loss_of(run.name, run.model(**run.inputs))
        loss.backward()
        run.model.lohan.memory.updater._wait_for_sums()  # type: ignore[union-attr]
        assert sum(u.parked for u in units) == parked
        run.optimizer.step()
        run.optimizer.zero_grad()
        assert identical(loss.detach(), run.plain.loss(run.done))
        run.done += 1
        run.check()
        faults.fault = None
        run.good_step()
    run.close(hw)


@pytest.mark.parametrize("options", SUMS[::3], ids=lambda o: next(iter(o)))
@pytest.mark.parametrize("reads", [True, False])
def test_writes_of_sums_fail_and_units_cannot_be_parked(
    options: dict[str, Any], reads: bool, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without memory for the unit, or the rest of it: the step is lost, weights are not."""
    faults = Faults()
    faults.install(monkeypatch)
    run = Run(hw, monkeypatch, swap_to="host", **options)
    run.good_step()
    if reads:
        monkeypatch.setattr(states, "available_host_bytes", lambda: 0)
    else:
        monkeypatch.setattr(StripedFile, "pread_here", _fails)
    faults.fault = Fault("pwritev", faults.counts["pwritev"] + 1, code=errno.ENOSPC)
    with pytest.raises(StorageError, match="write failed on"):
        run.step()
    faults.fault = None
    run.model.zero_grad()
    run.check()
    run.good_step()
    run.close(hw)


def _fails(*_: Any) -> None:
    raise StorageError("injected")


@with_copies("ssd")
def test_writes_fail_and_there_is_no_memory(
    schedule: str, where: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults()
    faults.install(monkeypatch)
    run = Run(hw, monkeypatch, states=where, schedule=schedule, swap_to="host")
    run.good_step()
    resources = Resources(run)
    monkeypatch.setattr(states, "available_host_bytes", lambda: 0)
    faults.fault = Fault("pwritev", faults.counts["pwritev"] + 1)
    with pytest.raises(StorageError) as caught:
        run.two_steps()
    assert_explains(caught.value, hw, errno.EIO)
    faults.fault = None
    assert run.go_on() == "torn"
    run.good_step()
    resources.assert_back()
    run.close(hw)


def test_offloads_fail(hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations that cannot be written: the step is lost, the model is not."""
    faults = Faults()
    faults.install(monkeypatch)
    run = Run(hw, monkeypatch, states="host")
    for _ in range(3):
        run.good_step()
        faults.fault = Fault("pwritev", faults.counts["pwritev"] + 1)
        with pytest.raises(StorageError) as caught:
            run.step()
        assert_explains(caught.value, hw, errno.EIO)
        faults.fault = None
        assert run.go_on() in ("lost", "torn")
    run.good_step()
    run.close(hw)


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
@pytest.mark.parametrize("how", ["twice", "short", "late", "interrupted"])
def test_faults_that_pass(
    how: str, call: Any, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors that pass, short counts and a slow disk change nothing. Nor does an interrupt on a
    thread of ours, which cannot happen: it is an error like any other."""
    faults = Faults()
    faults.install(monkeypatch)
    run = Run(hw, monkeypatch)
    run.good_step()
    for k in range(4):
        at = faults.counts[call] + 1 + 2 * k
        if how == "interrupted":
            faults.fault = Fault(call, at, times=1, interrupt=True)
            with contextlib.suppress(KeyboardInterrupt):
                run.step()
                run.model.lohan.sync()
            run.go_on()
        else:
            faults.fault = {
                "twice": Fault(call, at, times=2),
                "short": Fault(call, at, times=9, code=0),
                "late": Fault(call, at, times=2, hang_s=0.05),
            }[how]
            run.good_step()
        assert faults.happened
        faults.happened = 0
    faults.fault = None
    run.good_step()
    run.close(hw)


def data_files(hw: HardwareProfile) -> list[Path]:
    return sorted(Path(hw.ssds[0].path).rglob("*.stripes"))


def test_a_file_that_is_cut_behind_our_back(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error, and not a killed process: mappings must not be touched then."""
    run = Run(hw, monkeypatch)
    run.good_step()
    (path,) = [p for p in data_files(hw) if p.name.startswith("states")]
    os.truncate(path, 8192)
    for use in (run.step, run.model.state_dict, run.optimizer.state_dict):
        with pytest.raises(
            StorageError, match=rf"{path}.* was cut to 8192 of its \d+ bytes.*dmesg"
        ):
            use()
    run.model.lohan.memory.file.close()  # type: ignore[union-attr]


def test_a_write_never_fills_the_hole_of_a_cut_file(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would read as zeros."""
    run = Run(hw, monkeypatch, states="host")
    run.good_step()
    (path,) = data_files(hw)
    os.truncate(path, 0)
    with pytest.raises(StorageError, match=r"write failed on .* was cut to 0 of its"):
        run.step()
    assert path.stat().st_size == 0


def test_a_directory_that_is_removed_behind_our_back(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files without a name are files still; closing finds nothing to remove."""
    run = Run(hw, monkeypatch)
    run.good_step()
    for path in data_files(hw):
        path.unlink()
    for path in Path(hw.ssds[0].path).rglob("*.lock"):
        path.unlink()
    for _ in range(2):
        run.good_step()
    run.close(hw)


# -- threads that end ------------------------------------------------------------------------------


def end_thread(thread: threading.Thread) -> None:
    """Raise SystemExit in a thread; it comes when the thread next runs Python."""
    assert thread.ident is not None
    set_error = ctypes.pythonapi.PyThreadState_SetAsyncExc
    assert set_error(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)) == 1


ENDED = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@ENDED
@pytest.mark.parametrize("name", ["optimizer", "d2h", "h2d"])
def test_a_lane_that_is_ended(
    name: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for it gets an error, and nobody waits for ever."""
    run = Run(hw, monkeypatch)
    run.good_step()
    (thread,) = [t for t in threading.enumerate() if t.name == f"lohan_fx-{name}"]
    end_thread(thread)
    with pytest.raises((StepError, StorageError), match=r"thread is gone|was ended"):
        run.two_steps()
    thread.join(10)
    with pytest.raises(
        (StepError, StorageError), match=r"is gone.*a checkpoint|between two steps|was ended"
    ):
        run.step()
    run.close(hw)


@ENDED
def test_threads_for_the_disk_that_are_ended(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(hw, monkeypatch)
    run.good_step()
    for thread in threading.enumerate():
        if "lohan_fx-io" in thread.name:
            end_thread(thread)
    for _ in range(2):
        with pytest.raises((StorageError, StepError)):
            run.step()
    run.close(hw)


@ENDED
def test_a_thread_for_the_disk_that_is_ended_in_a_callback() -> None:
    """What waits for its transfer goes on, and callbacks behind that one are called."""
    pool = IoPool(1)
    begin = threading.Event()
    in_flight: set[Future] = set()
    called: list[Future] = []
    future = pool.submit([lambda: bool(begin.wait(10))], in_flight=in_flight)  # type: ignore[list-item, return-value]
    future.add_done_callback(lambda _: end_thread(threading.current_thread()))
    future.add_done_callback(called.append)
    begin.set()
    waits = threading.Thread(target=future.settle, daemon=True)
    waits.start()
    waits.join(10)
    assert not waits.is_alive()
    assert called == [future]
    pool._threads[0].join(10)
    assert not in_flight
    with pytest.raises(StorageError, match="threads are closed"):
        pool.submit([lambda: None]).result(10)
    pool.close()


@ENDED
@pytest.mark.parametrize("place", ["release", "exception"])
def test_a_thread_for_the_disk_that_is_ended_when_a_write_has_ended(
    place: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In what follows on the write: buffers are given back, tickets signalled."""
    run = Run(hw, monkeypatch)
    run.good_step()
    owner: type = BufferRing if place == "release" else Future
    original = getattr(owner, place)

    def ends(*args: Any) -> Any:
        if "lohan_fx-io" in threading.current_thread().name:
            end_thread(threading.current_thread())
        return original(*args)

    monkeypatch.setattr(owner, place, ends)
    for _ in range(2):
        with pytest.raises((StorageError, StepError)):
            run.step()
    run.close(hw)


@ENDED
def test_what_waits_for_a_lane_that_is_ended_fails() -> None:
    lost = threading.Event()
    lane = RankedLane("test", on_lost=lost.set)
    lane.submit(lambda: None).synchronize()
    first, also = Ticket(), Ticket()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # the thread is ended when it has the first job, after this
    try:
        end_thread(lane._thread)
        lane.submit(first.finish, first)
        ranked = lane.submit_ranked(also.finish, 1, first, (also,))
    finally:
        sys.setswitchinterval(interval)
    for ticket in (first, ranked, also):
        ticket.settle()
        assert isinstance(ticket.error, StepError)
    lane._thread.join(10)
    assert lost.is_set()
    with pytest.raises(StepError, match="the test thread is gone"):
        lane.submit(lambda: None)
    lane.drain()
    lane.close()


def test_a_forked_child_does_not_wait_for_threads_that_it_lacks() -> None:
    lane, pool = Lane("test"), IoPool(1)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with contextlib.suppress(StorageError):
                pool.submit([lambda: None]).result(5)
                os._exit(2)
            lane.submit(lambda: None)
        except StepError as error:
            code = 0 if "does not survive a fork" in str(error) else 3
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    lane.close()
    pool.close()


@pytest.mark.parametrize("states", ["host", "ssd"])
def test_a_child_that_is_forked_beside_updates_ends(
    states: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs at its exit does not wait for threads that it lacks, and leaves its parent's
    files."""
    run = Run(hw, monkeypatch, states=states, schedule="deferred")
    run.good_step()
    go_on = threading.Event()
    update = UnitUpdates.run

    def late(*args: Any) -> None:
        assert go_on.wait(30)
        update(*args)

    monkeypatch.setattr(UnitUpdates, "run", late)
    run.step()
    memory = run.model.lohan.memory
    assert memory is not None
    pid = os.fork()
    if pid == 0:
        memory.close()
        for part in (memory.file, memory.store.file, memory.pool, memory.run):
            if part is not None:
                part.close()
        os._exit(0)
    try:
        until = time.monotonic() + 10
        while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < until:
            time.sleep(0.01)
    finally:
        if not ended[0]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        go_on.set()
    assert ended == (pid, 0)
    run.done += 1
    run.good_step()
    run.close(hw)


# -- kill -9, and two runs in one directory --------------------------------------------------------

CHILD = """
import os, sys, torch
from pathlib import Path
import lohan_fx
from tests.models import loss_of, make
from tests.training import Squeezed, cpu_hardware, training_of
torch.set_num_threads(1)
root, save = Path(sys.argv[1]), Path(sys.argv[2])
model, inputs = make("mlp")
optimizer = training_of("adam", model).optimizer
model = lohan_fx.compile(model, hw=cpu_hardware(root), optimizer=optimizer, states="ssd",
                         swap_to="ssd", schedule="overlapped", strategy=Squeezed("swap-all", 0.0))
for step in range(int(sys.argv[3])):
    torch.manual_seed(step)
    loss = loss_of("mlp", model(**inputs))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex(), flush=True)
    state = {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, f"{save}.new")
    os.replace(f"{save}.new", save)
sys.stdin.read()
"""


def child(root: Path, save: Path, num_steps: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(root), str(save), str(num_steps)],
        cwd=Path(__file__).parent.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_kill_9_beside_another_run(
    hw: HardwareProfile, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes train in one directory. One is killed in mid-step: the next run removes its
    files, goes on from its last save, and the other never notices."""
    root, saves = Path(hw.ssds[0].path), tmp_path_factory.mktemp("saves")
    killed, other = child(root, saves / "killed", 100_000), child(root, saves / "other", 40)
    try:
        assert killed.stdout is not None
        assert other.stdout is not None
        for _ in range(3):
            assert killed.stdout.readline()
        first = other.stdout.readline()
        time.sleep(random.Random(0).random() * 0.05)
        killed.kill()
        killed.wait(30)
        assert {re.sub(r"\D*(\d+)-.*", r"\1", p.name) for p in root.iterdir()} == {
            str(killed.pid),
            str(other.pid),
        }
        run = Run(hw, monkeypatch)
        saved = torch.load(saves / "killed")
        run.model.load_state_dict(saved["model"])
        run.optimizer.load_state_dict(saved["optimizer"])
        run.done = saved["step"]
        assert run.done >= 2  # what was printed was saved before the next print
        run.good_step()
        names = {re.sub(r"\D*(\d+)-.*", r"\1", p.name) for p in root.iterdir()}
        assert names == {str(os.getpid()), str(other.pid)}
        lines = [first, *(other.stdout.readline() for _ in range(39))]
        wanted = [run.plain.loss(step).item().hex() for step in range(40)]
        assert [line.strip() for line in lines] == wanted
        run.good_step()
        run.model.lohan.close()
        other.communicate(timeout=30)
        assert other.returncode == 0
        RunDirectory([root]).close()
        assert not list(root.iterdir())
    finally:
        for process in (killed, other):
            process.kill()
            process.communicate()
