"""Set-up that fails: model and optimizer are as they were, and nothing is left behind."""

from __future__ import annotations

import copy
import errno
import gc
import random
import re
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import lohan_fx
import lohan_fx.compiled.allocation
import lohan_fx.compiled.building
import lohan_fx.compiled.fitting
import lohan_fx.compiled.programs
from lohan_fx.api import LohanModule
from lohan_fx.errors import InsufficientMemoryError, LohanError, StorageError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.runtime import arena
from lohan_fx.runtime.arena import PageLocker
from lohan_fx.runtime.ssd import striped_file
from tests.failing import TIERS, Run, pin_with
from tests.faults import Fault, Faults, interrupted
from tests.models import loss_of, make
from tests.training import (
    model_threads,
    training_of,
)
from tests.workloads import small_hardware


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(striped_file, "_RETRIES_S", (0.001, 0.001, 0.001))


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

    pin_with(Refusing, monkeypatch)
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


@pytest.mark.parametrize("prepared", [False, True])
def test_the_largest_batch_comes_first(prepared: bool) -> None:
    """Units stay where the first batch had room for them; another may have none then."""
    model = torch.nn.Sequential(
        *(layer for _ in range(6) for layer in (torch.nn.Linear(256, 256), torch.nn.Tanh()))
    )
    optimizer = torch.optim.AdamW(model.parameters())
    made = lohan_fx.compile(
        model,
        hw=small_hardware(device_kind="cpu", ssd=False),
        optimizer=optimizer,
        memory={"device": "26MiB"},
    )
    assert isinstance(made, LohanModule)
    large = torch.ones(4096, 256)
    if prepared:
        made.lohan.prepare(large)
    made(torch.ones(1, 256)).mean().backward()
    optimizer.step()
    if prepared:
        made(large).mean().backward()
        optimizer.step()
    else:
        with pytest.raises(InsufficientMemoryError, match=r"prepare\(…\) with the largest batch"):
            made(large)
    made.lohan.close()
