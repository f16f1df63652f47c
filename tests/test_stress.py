"""Steps while every thread is late at random: nothing but time may change."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

import lohan_fx
from lohan_fx.api import LohanModule
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import SCHEDULES
from lohan_fx.runtime.engine import Engine
from lohan_fx.runtime.lane import Lane, Ticket
from lohan_fx.runtime.ssd import Syscalls
from lohan_fx.runtime.trials import Trials
from lohan_fx.runtime.unit_updates import UnitUpdates
from tests.models import loss_of, make
from tests.training import Squeezed, identical, model_threads, remember_captures, training_of

STRATEGIES = ("swap-all", "recompute-all", "random", "lohan")
LONGEST_S = 0.004
FLAT_BYTES = 8 * 2**20
"""What the resident set may grow by in 40 steps, for heaps are never quite at rest. One copy of the
weights kept at each step would be twice as much."""


class Delays:
    """Random sleeps in all lanes, in I/O threads, around updates and in compute.

    Attributes:
        threads: names of the threads that have slept.
    """

    def __init__(self, patch: pytest.MonkeyPatch, seed: int) -> None:
        self._chance = random.Random(seed)
        self._lock = threading.Lock()
        self.threads: set[str] = set()
        submit = Lane.submit

        def late_submit(
            lane: Lane,
            job: Callable[[], None],
            ticket: Ticket | None = None,
            *more: Any,
            **options: Any,
        ) -> Ticket:
            held = [job]  # lanes drop a job before its ticket is signalled

            def late() -> None:
                self.sleep()
                held.pop()()
                self.sleep()

            return submit(lane, late, ticket, *more, **options)

        patch.setattr(Lane, "submit", late_submit)
        for cls, method in (
            (Syscalls, "preadv"),
            (Syscalls, "pwritev"),
            (UnitUpdates, "run"),
            (Trials, "_update"),
            (Engine, "release"),
            (Engine, "prefetch"),
            (Engine, "wait_unit"),
            (Engine, "emit_gradients"),
        ):
            patch.setattr(cls, method, self._late(getattr(cls, method)))

    def _late(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def late(*args: Any, **kwargs: Any) -> Any:
            self.sleep()
            return function(*args, **kwargs)

        return late

    def sleep(self) -> None:
        with self._lock:
            late = self._chance.random() < 0.3
            length = self._chance.uniform(0, LONGEST_S)
            self.threads.add(threading.current_thread().name.rstrip("0123456789-_"))
        if late:
            time.sleep(length)


def leftovers(
    hw: HardwareProfile, before: set[threading.Thread]
) -> tuple[set[threading.Thread], list[Path]]:
    """Threads of models that were not there before, and files."""
    gc.collect()
    return model_threads() - before, list(Path(hw.ssds[0].path).rglob("*"))


def train(
    name: str, model: nn.Module, inputs: dict[str, Any], optimizer: Any, num_steps: int
) -> Iterator[Tensor]:
    """Losses. Weights are not looked at in between: that would wait for updates."""
    for seed in range(num_steps):
        torch.manual_seed(seed)
        loss = loss_of(name, model(**inputs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def check(
    name: str,
    strategy: str,
    schedule: str,
    states: str,
    hw: HardwareProfile,
    patch: pytest.MonkeyPatch,
    *,
    num_steps: int = 4,
    seed: int = 0,
) -> None:
    before = model_threads()
    plain, inputs = make(name)
    wanted = list(train(name, plain, inputs, training_of("adam", plain).optimizer, num_steps))
    remember_captures(patch, name)
    model, inputs = make(name)
    optimizer = training_of("adam", model).optimizer
    delays = Delays(patch, seed)
    model = lohan_fx.compile(
        model,
        hw=hw,
        optimizer=optimizer,
        strategy=Squeezed(strategy, 0.0),
        states=states,  # type: ignore[arg-type]
        swap_to="host" if states == "host" else "ssd",
        schedule=schedule,  # type: ignore[arg-type]
    )
    assert isinstance(model, LohanModule)
    found = list(train(name, model, inputs, optimizer, num_steps))
    moved = model.plan.prediction.d2h_bytes + model.plan.prediction.h2d_bytes
    model.lohan.close()
    assert all(map(identical, found, wanted))
    assert all(map(identical, model.parameters(), plain.parameters()))
    assert "MainThread" in delays.threads
    if moved:
        assert {"lohan_fx-d2h", "lohan_fx-h2d"} <= delays.threads
    else:  # all of a small model's activations are made again
        assert states == "device"
    if states != "device" and schedule != "serial":
        assert "lohan_fx-optimizer" in delays.threads
    if states == "ssd":
        assert any("io" in name for name in delays.threads)
    assert leftovers(hw, before) == (set(), [])


def test_late_threads_change_nothing(hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    check("mlp", "swap-all", "overlapped", "ssd", hw, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("states", ["device", "host", "ssd"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_late_threads_change_nothing_anywhere(
    name: str,
    strategy: str,
    schedule: str,
    states: str,
    hw: HardwareProfile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seed in range(2):
        with monkeypatch.context() as patch:
            check(name, strategy, schedule, states, hw, patch, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("states", "schedule"), [("ssd", "overlapped"), ("host", "optimized"), ("host", "speculative")]
)
def test_memory_is_flat(
    states: str, schedule: str, late: bool, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember_captures(monkeypatch, "gpt2")
    before = model_threads()
    model, inputs = make("gpt2")
    optimizer = training_of("adam", model).optimizer
    if late:
        Delays(monkeypatch, 0)
    model = lohan_fx.compile(
        model,
        hw=hw,
        optimizer=optimizer,
        strategy=Squeezed("swap-all", 0.0),
        states=states,  # type: ignore[arg-type]
        swap_to=states,  # type: ignore[arg-type]
        schedule=schedule,  # type: ignore[arg-type]
    )
    assert isinstance(model, LohanModule)
    process = psutil.Process()
    sizes, files, threads = [], [], []
    for _ in train("gpt2", model, inputs, optimizer, 60):
        gc.collect()
        sizes.append(process.memory_info().rss)
        files.append(process.num_fds())
        threads.append(threading.active_count())
    assert max(sizes[50:]) - max(sizes[10:20]) < FLAT_BYTES
    assert files[59] == files[20]
    assert threads[59] == threads[20]
    model.lohan.close()
    assert leftovers(hw, before) == (set(), [])


@pytest.mark.slow
def test_many_models_one_after_another(hw: HardwareProfile) -> None:
    """Threads, descriptors and memory are back after each; some are dropped, not closed."""
    process = psutil.Process()
    before = model_threads()
    sizes: list[int] = []
    files: list[int] = []
    for k in range(24):
        model, inputs = make("mlp")
        optimizer = training_of("adam", model).optimizer
        made: Any = lohan_fx.compile(
            model, hw=hw, optimizer=optimizer, strategy="swap-all", states="ssd", swap_to="ssd",
            schedule=SCHEDULES[k % len(SCHEDULES)],
        )  # fmt: skip
        losses: list[Tensor] = list(train("mlp", made, inputs, optimizer, 2))
        assert len(losses) == 2
        if k % 3:
            made.lohan.close()
        del made, model, optimizer, losses
        assert leftovers(hw, before) == (set(), [])
        sizes.append(process.memory_info().rss)
        files.append(process.num_fds())
    assert max(sizes[18:]) - max(sizes[4:10]) < FLAT_BYTES
    assert files[23] == files[4]
