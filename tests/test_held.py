"""What a closed model leaves in memory, whatever of its training user code still holds.

A loss holds autograd's graph of its step, an error the frames that it passed through. Neither may
hold states, gradients or buffers. Weights stay with the module, states with the optimizer.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import time
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode, in_kernel_invocation_manager
from torch.multiprocessing.reductions import StorageWeakRef

import lohan_fx
from lohan_fx.api import LohanModule
from lohan_fx.errors import StepError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.runtime.engine import Engine
from lohan_fx.runtime.lane import Lane
from lohan_fx.runtime.states import ModelStates
from lohan_fx.runtime.updates import Updater
from tests.training import alternating, remember_captures

TIERS = ("device", "host", "ssd")
Held = Literal["loss", "loss before backward", "recorder", "error", "program"]


class Watched:
    """Storages of a model, by what they are for."""

    def __init__(self, model: LohanModule) -> None:
        memory = model.lohan.memory
        assert memory is not None
        self._refs: list[tuple[str, StorageWeakRef]] = []
        for states in memory.states.units:
            flats = states.flats
            assert flats is not None
            self._add("copy", flats.compute)
            self._add("master", flats.master)
            self._add("sum", flats.gradient)
            for moment in flats.moments.values():
                self._add("moment", moment)
        for arena in (memory.arena, memory.buffer_arena, memory.store.arena, *memory.spares):
            if arena is not None:
                self._add("host memory", arena.view(0, 1))
        for program in model.lohan.programs.values():
            for pending in program.executor.waiting:
                for saved in pending.saved:
                    self._add("saved", saved)

    def _add(self, what: str, tensor: Tensor | None) -> None:
        if tensor is not None and tensor.numel():
            self._refs.append((what, StorageWeakRef(tensor.untyped_storage())))

    @property
    def kinds(self) -> set[str]:
        return {what for what, _ in self._refs}

    @property
    def alive(self) -> set[str]:
        gc.collect()
        return {what for what, ref in self._refs if not ref.expired()}


class Run:
    """A model of four units, trained for a step; a forward waits for its backward."""

    def __init__(self, hw: HardwareProfile, states: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        self.optimizer = torch.optim.AdamW(self.module.parameters())
        self.model: Any = lohan_fx.compile(
            self.module,
            hw=hw,
            optimizer=self.optimizer,
            strategy="swap-all",
            states=states,  # type: ignore[arg-type]
            dtype="bf16",
            accumulate="manual",
            **options,
        )
        self.model.lohan.prepare(torch.zeros(8, 64))
        with self.model.lohan.record() as self.recorder:
            self.loss = self.forward()
            self.loss.backward()
            self.optimizer.step()
        with self.model.no_sync():
            self.forward().backward()  # a sum that no step takes
        self.waiting = self.forward()

    def forward(self) -> Tensor:
        loss: Tensor = self.model(torch.randn(8, 64)).square().mean()
        return loss

    def thing(self, held: Held) -> object:
        things: dict[Held, object] = {
            "loss": self.loss,
            "loss before backward": self.waiting,
            "recorder": (self.recorder, self.recorder.timeline("step")),
            "program": self.model.lohan.program(),
        }
        return things[held]


def failed_backward(loss: Tensor, patch: pytest.MonkeyPatch) -> BaseException:
    """Its error, which holds this frame and those that called it, as all errors do."""
    emit = Engine.emit_gradients

    def fail(engine: Engine, gradients: Any, unit: int) -> None:
        emit(engine, gradients, unit)
        if unit == 1:
            raise RuntimeError("injected")

    with patch.context() as context:
        context.setattr(Engine, "emit_gradients", fail)
        with pytest.raises(RuntimeError, match="injected") as caught:
            loss.backward()
    return caught.value


@pytest.mark.parametrize(
    ("states", "held", "how"),
    alternating(
        TIERS,
        ("loss", "loss before backward", "recorder", "error", "program"),
        ("closed", "deleted"),
    ),
)
def test_nothing_is_left(
    states: str, held: Held, how: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember_captures(monkeypatch, "four layers")
    run = Run(hw, states)
    watched = Watched(run.model)
    assert watched.kinds >= {"copy", "master", "moment", "sum", "saved"}
    thing = failed_backward(run.waiting, monkeypatch) if held == "error" else run.thing(held)
    if how == "closed":
        run.model.lohan.close()
    del run
    assert not watched.alive
    if held == "loss before backward":
        assert isinstance(thing, Tensor)
        with pytest.raises(StepError, match="closed or deleted"):
            thing.backward()


def test_the_module_keeps_its_weights_alone(hw: HardwareProfile) -> None:
    """On the device; in host memory, and in a file, all units share one piece of memory."""
    run = Run(hw, "device")
    watched, module = Watched(run.model), run.module
    run.model.lohan.close()
    wanted = [p.detach().clone() for p in module.parameters()]
    del run
    assert watched.alive == {"master"}
    assert all(map(torch.equal, module.parameters(), wanted))


def test_the_optimizer_keeps_its_states(hw: HardwareProfile) -> None:
    run = Run(hw, "device")
    watched, optimizer = Watched(run.model), run.optimizer
    run.model.lohan.close()
    del run
    assert watched.alive == {"master", "moment"}
    assert len(optimizer.state) == 8


# -- what a model that was deleted, and not closed, leaves to its optimizer ----------------------


class Pair:
    """A small model in plain PyTorch and another one compiled, in step, until `delete`."""

    def __init__(self, hw: HardwareProfile, **options: Any) -> None:
        self.models: list[nn.Module] = []
        self.optimizers: list[torch.optim.AdamW] = []
        for _ in range(2):
            torch.manual_seed(0)
            self.models.append(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))))
            self.optimizers.append(torch.optim.AdamW(self.models[-1].parameters()))
        compiled: Any = lohan_fx.compile(
            self.models[1], hw=hw, optimizer=self.optimizers[1], strategy="swap-all", **options
        )
        self.handle = compiled.lohan
        for _ in range(2):
            self.backward()
            self.step()
            for optimizer in self.optimizers:
                optimizer.zero_grad()

    @property
    def optimizer(self) -> torch.optim.AdamW:
        return self.optimizers[1]

    def backward(self) -> None:
        for model in self.models:
            torch.manual_seed(1)
            model(torch.randn(4, 8)).square().mean().backward()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def delete(self) -> None:
        del self.models[1]
        gc.collect()

    def check(self) -> None:
        """Both optimizers have the same parameters and states, those that they hold themselves."""
        plain, other = ([*o.param_groups[0]["params"]] for o in self.optimizers)
        assert all(map(torch.equal, plain, other))
        states = [self.optimizers[0].state[p] for p in plain]
        for want, p in zip(states, other, strict=True):
            have = self.optimizer.state[p]
            assert want.keys() == have.keys()
            assert all(torch.equal(want[name], have[name]) for name in want)


@pytest.mark.parametrize("handle", [True, False])
@pytest.mark.parametrize("states", TIERS)
def test_a_deleted_model_gives_states_back(states: str, handle: bool, hw: HardwareProfile) -> None:
    """As if it had been closed, whether somebody holds ``model.lohan`` or the optimizer alone."""
    pair = Pair(hw, states=states)
    compiled = pair.handle
    if not handle:
        del pair.handle, compiled
    pair.delete()
    pair.check()
    if handle:
        compiled.close()
        compiled.close()
        assert compiled.memory is None
        pair.check()
    saved = pair.optimizer.state_dict()
    assert len(saved["state"]) == 8
    copy.deepcopy(pair.optimizer)
    pair.optimizer.load_state_dict(saved)
    pair.check()
    for optimizer in pair.optimizers:  # in plain PyTorch from here on
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
    pair.step()
    pair.check()


@pytest.mark.parametrize("schedule", ["overlapped", "deferred", "speculative"])
def test_a_deleted_model_ends_its_last_step(schedule: str, hw: HardwareProfile) -> None:
    """Its updates may still run then."""
    pair = Pair(hw, states="host", schedule=schedule)
    pair.backward()
    pair.step()
    pair.delete()
    pair.check()
    pair.optimizer.step()


def test_the_other_model_of_an_optimizer_goes_on(hw: HardwareProfile) -> None:
    models = [nn.Linear(8, 8) for _ in range(2)]
    optimizer = torch.optim.AdamW([p for model in models for p in model.parameters()])
    made = [lohan_fx.compile(model, hw=hw, optimizer=optimizer) for model in models]
    for _ in range(2):
        for model in made:
            model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    del model, made[0], models[0]
    gc.collect()
    before = models[0].weight.detach().clone()
    made[0](torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert not torch.equal(models[0].weight, before)
    assert len(optimizer.state_dict()["state"]) == 4
    assert isinstance(made[0], LohanModule)
    made[0].lohan.close()
    assert [*map(int, (s["step"] for s in optimizer.state.values()))] == [2, 2, 3, 3]


def test_an_optimizer_holds_states_of_a_deleted_model_alone(hw: HardwareProfile) -> None:
    run = Run(hw, "device")
    watched, optimizer = Watched(run.model), run.optimizer
    del run
    assert watched.alive == {"master", "moment"}
    assert len(optimizer.state) == 8


@pytest.mark.parametrize("handle", [True, False])
@pytest.mark.parametrize(
    ("options", "stands"),
    [
        ({}, "stand between two steps: .* took the step"),
        ({"schedule": "serial"}, "are those of the step before"),
        ({"clip_grad_norm": 1.0}, "are those of the step before"),
        ({"accumulate": "manual"}, "are those of the step before"),
    ],
)
def test_the_step_of_a_deleted_model_is_lost(
    options: dict[str, Any], stands: str, handle: bool, hw: HardwareProfile
) -> None:
    """It says so; then the optimizer goes on."""
    pair = Pair(hw, **options)
    with pair.handle.no_sync() if "accumulate" in options else contextlib.nullcontext():
        pair.backward()
    if not handle:
        del pair.handle
    pair.delete()
    with pytest.raises(StepError, match=rf"was deleted between backward and .*{stands}"):
        pair.optimizer.step()
    assert len(pair.optimizer.state_dict()["state"]) == 8
    pair.optimizer.step()
    if "between" not in stands:
        pair.check()


@pytest.mark.parametrize("states", TIERS)
def test_gradients_that_are_kept_outlive_the_model(states: str, hw: HardwareProfile) -> None:
    pair = Pair(hw, states=states, gradients="kept")
    pair.backward()
    pair.delete()
    pair.step()
    pair.check()


def test_a_model_that_another_thread_deletes(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks the optimizer waits for what it gets back."""
    pair = Pair(hw, states="host")
    give_back = ModelStates.give_back

    def slow(states: ModelStates, optimizer: torch.optim.Optimizer) -> None:
        time.sleep(0.2)
        give_back(states, optimizer)

    monkeypatch.setattr(ModelStates, "give_back", slow)
    thread = threading.Thread(target=pair.delete)
    thread.start()
    thread.join()
    assert len(pair.optimizer.state_dict()["state"]) == 8
    pair.check()


def test_a_model_is_not_deleted_in_the_middle_of_a_step(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though garbage collection strikes there, and nobody holds it."""
    pair = Pair(hw, states="host", schedule="serial")
    pair.backward()
    vars(pair.models[1])["cycle"] = [pair.models[1]]
    del pair.handle, pair.models[1]
    finish = Updater.finish

    def collect(updater: Updater) -> bool:
        gc.collect()
        ends_step = finish(updater)
        gc.collect()
        return ends_step

    monkeypatch.setattr(Updater, "finish", collect)
    pair.step()
    gc.collect()
    pair.check()


@pytest.mark.parametrize("in_an_op", [False, True])
def test_a_model_that_is_deleted_while_another_is_traced(
    in_an_op: bool, hw: HardwareProfile
) -> None:
    """Also in an op that makes a fake tensor, in which real ones are sent to meta kernels, too."""
    pair = Pair(hw, states="host")
    mode = FakeTensorMode()
    op = in_kernel_invocation_manager(mode) if in_an_op else contextlib.nullcontext()
    with enable_python_dispatcher(), mode, torch.device("meta"), torch.inference_mode(), op:
        pair.delete()
    pair.check()
    assert not any(t.is_inference() for s in pair.optimizer.state.values() for t in s.values())


@pytest.mark.parametrize("states", TIERS)
def test_a_step_that_failed_holds_no_activations(
    states: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its error is handled, so that the next step has their memory."""
    run = Run(hw, states)
    watched = Watched(run.model)
    error = failed_backward(run.waiting, monkeypatch)
    assert "saved" not in watched.alive
    frames = list(_frames(error))
    assert "_emit_gradients" in [frame.f_code.co_name for frame in frames]  # names stay
    run.model.lohan.close()


def test_locals_of_an_error_that_was_handled_before_stay(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the user's."""
    run = Run(hw, "host")

    def own() -> None:
        mine = "a local of the user's"
        raise ValueError(len(mine))

    try:
        own()
    except ValueError as error:
        failed_backward(run.waiting, monkeypatch)
        *_, last = _frames(error)
        assert last.f_locals == {"mine": "a local of the user's"}
    run.model.lohan.close()


def test_locals_of_an_error_that_a_failed_step_came_from_stay(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the user's, of an op's own error, too; ours are not."""
    run = Run(hw, "host")

    def own(*_: Any) -> None:
        mine = "a local of the user's"
        raise ValueError(len(mine))

    with pytest.raises(ValueError, match="21") as kept:
        own()

    def fail(*_: Any) -> None:
        theirs = "a local of a frame that ours called"
        raise RuntimeError(len(theirs)) from kept.value

    with monkeypatch.context() as context:
        context.setattr(Engine, "emit_gradients", fail)
        with pytest.raises(RuntimeError) as caught:
            run.waiting.backward()
    *_, last = _frames(kept.value)
    assert last.f_locals["mine"] == "a local of the user's"
    *outer, last = _frames(caught.value)
    assert last.f_locals["theirs"] == "a local of a frame that ours called"
    cleared = {f.f_code.co_name: f.f_locals for f in outer if "lohan_fx" in f.f_code.co_filename}
    assert cleared["_emit_gradients"] == {}
    run.model.lohan.close()


def test_an_interrupted_close(hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs then says what to do; programs have what lanes may still use."""
    run = Run(hw, "host")
    executor = run.model.lohan.program().executor

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for owner, name in ((Lane, "close"), (ModelStates, "close")):
        with monkeypatch.context() as context:
            context.setattr(owner, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                run.model.lohan.close()
        assert (executor.engine.updater is None) == (owner is ModelStates)
        for use in (run.forward, lambda: run.model.lohan.prepare(torch.zeros(8, 64))):
            with pytest.raises(StepError, match=r"closed in part, .* interrupted: call it again"):
                use()
    run.model.lohan.close()
    assert not isinstance(run.model, LohanModule)
    run.forward().backward()


def _frames(error: Any) -> Iterator[Any]:
    entry = error.__traceback__
    while entry is not None:
        yield entry.tb_frame
        entry = entry.tb_next
