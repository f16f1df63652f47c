"""Schedule "speculative": host units are updated beside backward into second copies, which count if
no gradient had to be clipped."""

from __future__ import annotations

import copy
import gc
import itertools
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import lohan_fx
from lohan_fx import footprint
from lohan_fx.api import LohanModule
from lohan_fx.errors import InsufficientMemoryError, LohanError, StepError
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import Action, Plan, Tier, UnitPlan
from lohan_fx.planners import Choices, PlannerOptions, finish, make_plan
from lohan_fx.program import lower
from lohan_fx.runtime.clipping import Clipping
from lohan_fx.runtime.lane import RankedLane, Ticket
from lohan_fx.runtime.lanes import Lanes
from lohan_fx.runtime.native import adam
from lohan_fx.runtime.optimizer import UnitOptimizer
from lohan_fx.runtime.recording import Label
from lohan_fx.runtime.trials import Trials
from lohan_fx.runtime.unit_jobs import UnitJobs
from lohan_fx.runtime.unit_states import UnitStates
from lohan_fx.runtime.unit_updates import UnitUpdates
from lohan_fx.runtime.update_values import Clip, Results
from lohan_fx.runtime.updates import Updater
from lohan_fx.simulate import Simulation, simulate
from lohan_fx.workload import Workload
from tests.faults import interrupted
from tests.loops import (
    TIERS,
    InjectedError,
    assert_same,
    check,
    compiled,
    evaluate,
    sometimes,
    updater_of,
    wait_until_begun,
    windows,
)
from tests.models import loss_of, make
from tests.test_refinement import Turns, judged, tiers, trained
from tests.test_simulate import machine, make_the_plan, make_unit, make_workload, spans
from tests.training import Training, alternating, identical, remember_captures, training_of
from tests.workloads import budget, small_hardware, workloads

__all__ = ["judged"]  # a fixture

NEVER = 1e9
"""A norm that no gradient of these models has."""
SPECULATIVE: dict[str, Any] = {"states": "host", "schedule": "speculative"}


class Watch:
    """Counts what trials do, and can keep backward waiting for them. All trials have begun when
    `optimizer.step()` asks for norms that they take, and when it accepts them.

    Attributes:
        flips: units that went on with their second copy.
        early: trials that had ended when the last unit's gradients were emitted.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.flips: list[str] = []
        self.early = 0
        flip, emit, settle = UnitStates.flip, Updater.emit, Trials.settle
        end_additions = Updater._end_tried_additions

        def counted(states: UnitStates) -> None:
            flip(states)
            self.flips.append(states.unit.name)

        def waiting(updater: Updater, index: int, gradients: Any, **how: Any) -> None:
            trials = updater.trials
            if trials is not None and updater._jobs.rank[index] == 1 - len(updater._jobs.rank):
                for trial in trials._open:
                    assert trial.ended._signal.wait(timeout=30)
                    self.early += 1
            emit(updater, index, gradients, **how)

        def tried(updater: Updater, *args: Any) -> None:
            if updater.trials is not None:
                wait_until_begun(updater.trials)
            end_additions(updater, *args)

        def begun(trials: Trials, *args: Any) -> list[Any]:
            wait_until_begun(trials)
            return settle(trials, *args)

        patch.setattr(UnitStates, "flip", counted)
        patch.setattr(Updater, "emit", waiting)
        patch.setattr(Updater, "_end_tried_additions", tried)
        patch.setattr(Trials, "settle", begun)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def trials_of(model: nn.Module) -> Trials:
    trials = updater_of(model).trials  # type: ignore[arg-type]
    assert trials is not None
    return trials


def num_units(model: nn.Module) -> int:
    return len(updater_of(model)._states.trained)  # type: ignore[arg-type]


def settled(model: nn.Module) -> None:
    """Wait until everything that was tried has ended."""
    for trial in trials_of(model)._open:
        trial.ended.settle()


def backward(model: nn.Module, inputs: dict[str, Any], *, scale: float = 1.0) -> Tensor:
    torch.manual_seed(0)
    loss = loss_of("mlp", model(**inputs))
    (loss * scale).backward()
    return loss.detach()


def step(
    model: nn.Module, training: Training, inputs: dict[str, Any], *, scale: float = 1.0
) -> Tensor:
    loss = backward(model, inputs, scale=scale)
    training.step()
    return loss


class Pair:
    """The MLP compiled, and in plain PyTorch."""

    def __init__(
        self,
        hw: HardwareProfile,
        patch: pytest.MonkeyPatch,
        optimizer: str = "adam",
        **options: Any,
    ) -> None:
        remember_captures(patch, "mlp")
        self.plain, self.inputs = make("mlp")
        self.its = training_of(optimizer, self.plain)
        self.model, self.batch = make("mlp")
        self.ours = training_of(optimizer, self.model)
        self.made = compiled(self.model, self.ours.optimizer, hw, **{**SPECULATIVE, **options})

    def both(self) -> None:
        """A step on both sides."""
        found = step(self.made, self.ours, self.batch)
        assert identical(found, step(self.plain, self.its, self.inputs))

    def check(self) -> None:
        """Weights and optimizer states are plain PyTorch's; the compiled model goes on."""
        assert all(map(identical, self.made.parameters(), self.plain.parameters()))
        found = self.ours.optimizer.state_dict()["state"]
        wanted = self.its.optimizer.state_dict()["state"]
        assert found.keys() == wanted.keys()
        for key, values in wanted.items():
            assert found[key].keys() == values.keys()
            assert all(identical(torch.as_tensor(found[key][n]), v) for n, v in values.items())

    def close(self) -> None:
        self.made.lohan.close()
        assert_same(self.model, self.ours.optimizer, self.plain, self.its.optimizer)


# -- steps are plain PyTorch's ---------------------------------------------------------------------


QUICK = {
    ("gpt2", "host", 1),
    ("mlp", "host", 3),
    ("mlp", "ssd", 1),
    ("mlp", "device", 3),
    ("frozen", "host", 1),
    ("tied", "host", 3),
}


@pytest.mark.parametrize(
    ("name", "states", "accumulate"),
    [
        pytest.param(*row, marks=() if row in QUICK else pytest.mark.slow)
        for row in itertools.product(
            ("gpt2", "llama", "mlp", "resnet", "frozen", "tied"), TIERS, (1, 3)
        )
    ],
)
def test_trials_change_nothing(
    name: str,
    states: str,
    accumulate: int,
    watch: Watch,
    hw: HardwareProfile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Host units go on with their second copies, others wait; the numbers are the same."""
    loop = windows(name, (1, 1, 1) if accumulate == 1 else (3, 1, 3), norm=NEVER)
    options = {**SPECULATIVE, "states": states, "accumulate": accumulate}
    check(name, loop, hw, monkeypatch, clip_grad_norm=NEVER, **options)
    assert bool(watch.flips) == (states == "host")
    assert bool(watch.early) == (states == "host")


def test_updates_run_while_backward_goes_on(
    watch: Watch, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the last unit's have ended when it is emitted; parameters do not show it before
    optimizer.step(), and there nothing is left to do."""
    both = Pair(hw, monkeypatch, clip_grad_norm=NEVER)
    both.both()
    before = [p.detach().clone() for p in both.made.parameters()]
    watch.early = 0
    backward(both.made, both.batch)
    assert watch.early == num_units(both.made) - 1
    settled(both.made)
    held = list(both.model.parameters())
    assert all(map(identical, held, before))
    assert not updater_of(both.made)._updates.begun
    with monkeypatch.context() as patch:
        patch.setattr(UnitUpdates, "run", None)
        both.ours.step()
    step(both.plain, both.its, both.inputs)
    assert all(map(identical, held, both.plain.parameters()))
    assert len(watch.flips) == 2 * num_units(both.made)
    both.close()


class Arrivals:
    """Holds gradients back: the first unit's until the second's are on their way, these until the
    first unit's trial has ended. `met`: which of the two happened in time."""

    def __init__(self, model: nn.Module, patch: pytest.MonkeyPatch) -> None:
        self.met: list[bool] = []
        self._second = threading.Event()
        to_host = Lanes.to_host

        def held(lanes: Lanes, pairs: Any, label: Label) -> Ticket:
            ticket = to_host(lanes, pairs, label)
            if label.kind != "emit_gradients" or len(self._held) == 2:
                return ticket
            late = Ticket()
            self._held.append(late)
            job = self._first if len(self._held) == 1 else self._then
            threading.Thread(target=job, args=(model, ticket, late)).start()
            return late

        self._held: list[Ticket] = []
        patch.setattr(Lanes, "to_host", held)
        patch.setattr(Updater, "release", lambda *_: None)  # a CUDA host does not wait there

    def _first(self, _: nn.Module, ticket: Ticket, late: Ticket) -> None:
        self.met.append(self._second.wait(timeout=5))
        ticket.settle()
        late.finish(ticket.event)

    def _then(self, model: nn.Module, ticket: Ticket, late: Ticket) -> None:
        while not trials_of(model)._open:  # backward has sent the gradients, and goes on to say so
            threading.Event().wait(1e-3)
        self._second.set()
        self.met.append(trials_of(model)._open[0].ended._signal.wait(timeout=5))
        ticket.settle()
        late.finish(ticket.event)


def test_trials_run_while_other_gradients_are_on_their_way(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA backward has emitted everything long before the first gradient arrives: additions
    that wait for theirs must not keep trials waiting."""
    remember_captures(monkeypatch, "gpt2")
    model, inputs = make("gpt2")
    training = training_of("adamw", model)
    made = compiled(
        model, training.optimizer, hw, accumulate=2, clip_grad_norm=NEVER, **SPECULATIVE
    )
    for k in range(2):
        if k:
            arrivals = Arrivals(made, monkeypatch)
        loss_of("gpt2", made(**inputs)).backward()
    training.optimizer.step()
    made.lohan.close()  # type: ignore[union-attr]
    assert arrivals.met == [True, True]


def test_parts_of_the_model_are_saved_as_the_step_made_them(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """state_dict() of a submodule waits for updates that still run; a pickled one has no hooks."""
    remember_captures(monkeypatch, "gpt2")
    model, inputs = make("gpt2")
    training = training_of("adamw", model)
    made = compiled(model, training.optimizer, hw, clip_grad_norm=NEVER, **SPECULATIVE)
    update = Trials._update

    def slow(trials: Trials, trial: Any) -> Any:
        threading.Event().wait(0.05)
        return update(trials, trial)

    monkeypatch.setattr(Trials, "_update", slow)
    part = made.get_submodule("transformer.h")
    for seed in range(3):
        torch.manual_seed(seed)
        loss_of("gpt2", made(**inputs)).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        early = {name: value.clone() for name, value in part.state_dict().items()}
        for name, value in made.state_dict().items():
            if name.startswith("transformer.h."):
                assert identical(early[name.removeprefix("transformer.h.")], value)
    copied = copy.deepcopy(part)
    made.lohan.close()  # type: ignore[union-attr]
    assert copied.state_dict().keys() == part.state_dict().keys()
    assert not any(module._state_dict_pre_hooks for module in made.modules())


def test_a_clipped_step_is_redone_and_the_next_one_does_not_try(
    watch: Watch, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit lies between the norms of the two kinds of steps."""
    scales = (1e-3, 100.0, 100.0, 1e-3, 1e-3)
    notes = []

    def loop(model: nn.Module, training: Training, inputs: dict[str, Any]) -> list[Tensor]:
        noted = []
        for scale in scales:
            watch.flips.clear()
            noted.append(backward(model, inputs, scale=scale))
            ours = hasattr(model, "lohan")
            tried = ours and bool(trials_of(model)._open)
            if not ours:
                noted.append(clip_grad_norm_(model.parameters(), 0.5))
            training.step()
            if ours:
                noted.append(torch.tensor(model.lohan.grad_norm))  # type: ignore[union-attr]
                assert len(watch.flips) in (0, num_units(model))
                notes.append((tried, bool(watch.flips), model.lohan.redone_steps))
        return noted

    check("mlp", loop, hw, monkeypatch, clip_grad_norm=0.5, **SPECULATIVE)
    assert notes == [
        (True, True, 0),
        (True, False, 1),
        (False, False, 1),  # the step before was clipped, and so is this one
        (False, False, 1),  # so it was, but this one is not
        (True, True, 1),
    ]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_is_skipped(
    accumulate: int, watch: Watch, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was tried with NaN is dropped, and plain PyTorch leaves the step out."""

    def loop(model: nn.Module, training: Training, inputs: dict[str, Any]) -> list[Tensor]:
        noted = []
        for bad in (False, True, False, True, False):
            scales = [torch.nan if bad else 1.0, *[1.0] * (accumulate - 1)]
            noted += [backward(model, inputs, scale=scale) for scale in scales]
            if not bad or hasattr(model, "lohan"):
                training.optimizer.step()
            training.optimizer.zero_grad()
        return noted

    options = {**SPECULATIVE, "accumulate": accumulate, "skip_nonfinite": True}
    check("mlp", loop, hw, monkeypatch, **options)
    assert len(watch.flips) == 3 * len(set(watch.flips))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_parameters_without_a_gradient(accumulate: int, watch: Watch, hw: HardwareProfile) -> None:
    """They are in the second copy, too, also before they have any state."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        x = torch.linspace(-1, 1, 32).view(4, 8)
        noted = []
        for uses in ((False, True), (True, False), (False, False), (True, True)):
            for use in uses[:accumulate]:
                loss = model(x, use)
                loss.backward()
                noted.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        return noted

    (plain, its), (model, optimizer) = sometimes()
    wanted = loop(plain, its)
    made = compiled(model, optimizer, hw, accumulate=accumulate, **SPECULATIVE)
    found = loop(made, optimizer)
    made.lohan.close()
    assert watch.flips
    assert all(map(identical, found, wanted))
    assert_same(model, optimizer, plain, its)


class OneUnit(nn.Module):
    """A layer of which one parameter has a gradient only if it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.extra = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor, extra: bool) -> Tensor:
        y = x @ self.weight
        return (y + self.extra if extra else y).square().mean()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.05, amsgrad=True),
    "fused amsgrad": lambda p: torch.optim.AdamW(p, lr=0.05, amsgrad=True, fused=True),
    "fused": lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.1, maximize=True, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
}


@pytest.mark.parametrize(("accumulate", "kind"), alternating((1, 2), tuple(OPTIMIZERS)))
def test_a_unit_with_some_gradients_and_any_optimizer(
    kind: str, accumulate: int, watch: Watch, hw: HardwareProfile
) -> None:
    """From the first step on, in which there is no state yet."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        x = torch.linspace(-1, 1, 32).view(4, 8)
        noted = []
        for use in (False, True, False, True):
            for _ in range(accumulate):
                loss = model(x, use)
                loss.backward()
                noted.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        return noted

    plain, model = OneUnit(), OneUnit()
    its, optimizer = (OPTIMIZERS[kind](m.parameters()) for m in (plain, model))
    wanted = loop(plain, its)
    made = compiled(model, optimizer, hw, accumulate=accumulate, **SPECULATIVE)
    found = loop(made, optimizer)
    made.lohan.close()
    assert len(watch.flips) == 4
    assert all(map(identical, found, wanted))
    assert_same(model, optimizer, plain, its)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(
    ("dtype", "accumulate"),
    [("bf16", 1), ("bf16", 2), pytest.param("fp16", 1, marks=pytest.mark.slow)],
)
def test_mixed_precision(
    dtype: str,
    accumulate: int,
    native: bool,
    watch: Watch,
    hw: HardwareProfile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As schedule "serial", where plain PyTorch rounds differently; with our kernel and torch's."""
    if not native:
        monkeypatch.setattr(adam, "kernel", lambda: None)
    remember_captures(monkeypatch, "mlp")
    sides = []
    for schedule in ("serial", "speculative"):
        model, inputs = make("mlp")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)
        options = {"states": "host", "dtype": dtype, "schedule": schedule}
        made = compiled(model, optimizer, hw, accumulate=accumulate, **options)
        noted = []
        for _ in range(3):
            noted += [backward(made, inputs) for _ in range(accumulate)]
            optimizer.step()
            optimizer.zero_grad()
        made.lohan.close()
        sides.append((noted, model, optimizer))
    (first, model, optimizer), (second, plain, its) = sides
    assert watch.flips
    assert all(map(identical, first, second))
    assert_same(model, optimizer, plain, its)


def test_with_several_forwards(
    watch: Watch, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loop(model: nn.Module, training: Training, inputs: dict[str, Any]) -> list[Tensor]:
        noted = []
        torch.manual_seed(0)
        for _ in range(3):
            losses = [loss_of("mlp", model(**inputs)) for _ in range(2)]
            for loss in losses:
                loss.backward()
            noted += [loss.detach() for loss in losses]
            training.step()
        return noted

    check("mlp", loop, hw, monkeypatch, forwards=2, clip_grad_norm=NEVER, **SPECULATIVE)
    assert len(watch.flips) == 3 * len(set(watch.flips))


@pytest.mark.parametrize("strategy", ["memferry", "go-memferry"])
def test_where_the_device_reads_and_writes_host_memory(
    strategy: str, watch: Watch, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the copy that counts."""
    loop = windows("gpt2", (1, 1, 1), norm=NEVER)
    options = {"strategy": strategy, "schedule": "speculative"}
    check("gpt2", loop, hw, monkeypatch, clip_grad_norm=NEVER, **options)
    assert watch.flips


def test_by_value(watch: Watch, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Needs no other gradient: trials are clipped by it, and right."""
    loop = windows("mlp", (1, 1, 1), value=1e-3)
    check("mlp", loop, hw, monkeypatch, clip_grad_value=1e-3, **SPECULATIVE)
    assert len(watch.flips) == 3 * len(set(watch.flips))


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("clip", [None, Clip(factor=torch.tensor(0.3)), Clip(limit=0.5)])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_update_that_is_tried_leaves_everything(
    kind: str, clip: Clip | None, mixed: bool
) -> None:
    """But state before the first update. Its results are those of the update in place."""
    torch.manual_seed(0)
    sizes = (1187, 37, 5)
    parameters = [nn.Parameter(torch.randn(size)) for size in sizes]
    unit = UnitOptimizer(OPTIMIZERS[kind](parameters), parameters, chunk_elements=1024)
    names = unit.state_names()
    dtype = torch.bfloat16 if mixed else torch.float32
    masters = [p.detach().clone() for p in parameters]
    state = [{n: torch.full_like(m, torch.nan) for n in names} for m in masters]
    compute = [m.to(dtype) for m in masters]
    for without in (2, 1, None):
        gradients = [
            None if k == without else torch.randn(size).to(dtype) for k, size in enumerate(sizes)
        ]
        results = Results(
            masters=[torch.full_like(m, torch.nan) for m in masters],
            state=[{n: torch.full_like(m, torch.nan) for n in names} for m in masters],
            compute=[torch.full_like(c, torch.nan) for c in compute] if mixed else None,
        )
        given: list[Any] = [masters, compute, [g for g in gradients if g is not None]]
        if without != 2:
            given.append([v for views in state[:1] for v in views.values()])
        before, scalars = copy.deepcopy(given), unit.scalar_state()
        made = unit.try_step(masters, gradients, state, results, clip=clip)
        for tensors, wanted in zip(given, before, strict=True):
            assert all(map(identical, tensors, wanted))
        assert unit.scalar_state() == scalars
        if mixed:
            unit.step_mixed(masters, gradients, state, compute, clip=clip)
            assert results.compute is not None
            assert all(map(identical, results.compute, compute))
        else:
            unit.step(masters, gradients, state, clip=clip)
        assert all(map(identical, results.masters, masters))
        for k, views in enumerate(state):
            if unit.scalar_state()[k] is not None:
                assert all(identical(results.state[k][n], v) for n, v in views.items())
        scalars = unit.scalar_state()
        unit.accept(made)
        assert unit.scalar_state() == scalars


# -- what users do between backward and step -------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_hyperparameters_are_those_of_the_step(
    optimizer: str, watch: Watch, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trials with others do not count, although they have ended."""
    counts = []

    def loop(model: nn.Module, training: Training, inputs: dict[str, Any]) -> list[Tensor]:
        noted = []
        for k in range(4):
            noted.append(backward(model, inputs))
            if hasattr(model, "lohan"):
                settled(model)
                watch.flips.clear()
            if k % 2:
                for group in training.optimizer.param_groups:
                    group["lr"] = 1e-3 * (k + 1)
            training.optimizer.step()
            if hasattr(model, "lohan"):
                counts.append(len(watch.flips))
            training.optimizer.zero_grad()
        return noted

    check("mlp", loop, hw, monkeypatch, optimizer=optimizer, **SPECULATIVE)
    assert [bool(n) for n in counts] == [True, False, True, False]


@pytest.mark.parametrize("how", ["copy", "data"])
def test_weights_that_are_written_between_backward_and_step(
    how: str, watch: Watch, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step goes on from them, as in plain PyTorch; their unit's trial does not count."""
    both = Pair(hw, monkeypatch)
    both.both()
    backward(both.made, both.batch)
    backward(both.plain, both.inputs)
    settled(both.made)
    watch.flips.clear()
    for p in (next(both.model.parameters()), next(both.plain.parameters())):
        with torch.no_grad():
            if how == "copy":
                p.mul_(0.5)
            else:
                p.data = p.data * 0.5
    for training in (both.ours, both.its):
        training.optimizer.step()
        training.optimizer.zero_grad()
    assert len(watch.flips) == num_units(both.made) - 1
    both.both()
    both.check()
    both.close()


def test_what_is_refused_between_backward_and_step(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forwards, programs, weights and states; the step goes on after that."""
    both = Pair(hw, monkeypatch)
    both.both()
    backward(both.made, both.batch)
    saved = both.its.optimizer.state_dict()
    for ask in (
        lambda: both.made(**both.batch),
        lambda: both.made.lohan.prepare(**both.batch),  # new buffers: a step without clipping
        both.ours.optimizer.state_dict,
        lambda: both.ours.optimizer.load_state_dict(saved),
        both.made.state_dict,
        lambda: both.made.load_state_dict(both.plain.state_dict()),
        both.made.lohan.sync,
        lambda: lohan_fx.save(both.made, "nowhere"),
    ):
        with torch.no_grad(), pytest.raises(StepError, match=r"optimizer\.step"):
            ask()
    both.ours.step()
    step(both.plain, both.its, both.inputs)
    both.check()
    both.close()


# -- what users hold -------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["state_dict", "array", "detached", "view"])
def test_memory_that_is_held_shows_the_new_weights(
    what: str, watch: Watch, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the same address; units go on with second copies when nobody looks any more."""
    both = Pair(hw, monkeypatch)
    both.both()
    both.both()
    names = dict(both.made.named_parameters())
    held: dict[str, Any] = {
        "state_dict": both.made.state_dict,
        "array": lambda: {k: p.detach().numpy() for k, p in names.items()},
        "detached": lambda: {k: p.detach() for k, p in names.items()},
        "view": lambda: {k: p.detach().view(-1) for k, p in names.items()},
    }[what]()
    places = {k: p.data_ptr() for k, p in names.items()}
    watch.flips.clear()
    for _ in range(2):
        both.both()
        both.made.lohan.sync()
        for key, wanted in both.plain.named_parameters():
            found = torch.as_tensor(held[key])
            assert identical(found.view(wanted.shape), wanted)
            assert found.data_ptr() == names[key].data_ptr() == places[key]
    assert not watch.flips
    del held, found
    both.both()
    assert len(watch.flips) == num_units(both.made)
    both.check()
    both.close()


def test_a_unit_that_is_held_alone(
    watch: Watch, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Pair(hw, monkeypatch)
    both.both()
    held = next(iter(both.made.parameters())).detach()
    watch.flips.clear()
    both.both()
    assert len(watch.flips) == num_units(both.made) - 1
    both.made.lohan.sync()
    assert identical(held, next(iter(both.plain.parameters())))
    both.close()


@pytest.mark.parametrize("how", ["copy", "load", "checkpoint"])
def test_what_is_held_when_weights_are_written(
    how: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A kept state_dict() goes on showing the parameters, as in plain PyTorch."""
    both = Pair(hw, monkeypatch)
    both.both()
    lohan_fx.save(both.made, tmp_path / "checkpoint")
    held = both.made.state_dict()
    with torch.no_grad():
        for side in (both.made, both.plain):
            if how == "copy":
                for p in side.parameters():
                    p.mul_(0.5)
            elif how == "load":
                side.load_state_dict({k: v * 0.5 for k, v in side.state_dict().items()})
    if how == "checkpoint":
        lohan_fx.load(both.made, tmp_path / "checkpoint")
    for _ in range(2):
        both.both()
        both.made.lohan.sync()
        for key, wanted in both.plain.named_parameters():
            assert identical(held[key], wanted)
    both.close()


def test_states_that_are_held_show_the_new_ones(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kept optimizer.state_dict() shows moments as they are, as in plain PyTorch."""
    both = Pair(hw, monkeypatch)
    both.both()
    held = both.ours.optimizer.state_dict()["state"]
    for _ in range(2):
        both.both()
        both.made.lohan.sync()
        for key, values in both.its.optimizer.state_dict()["state"].items():
            for name in ("exp_avg", "exp_avg_sq"):
                assert identical(held[key][name], values[name])
    both.close()


# -- states come and go ----------------------------------------------------------------------------


def test_states_are_loaded_between_steps(
    watch: Watch, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into whichever copy counts then."""
    both = Pair(hw, monkeypatch)
    kept = []
    for k in range(5):
        both.both()
        both.check()
        if k < 2:
            kept.append(
                (
                    {n: v.clone() for n, v in both.plain.state_dict().items()},
                    torch.optim.Adam(make("mlp")[0].parameters()).state_dict() if not k else None,
                )
            )
        if k == 2:
            weights, state = kept[0]
            for model, training in ((both.made, both.ours), (both.plain, both.its)):
                model.load_state_dict(weights)
                assert state is not None
                training.optimizer.load_state_dict(state)
    assert len(watch.flips) == 5 * num_units(both.made)
    both.close()


@pytest.mark.parametrize("num_steps", [2, 3])
@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_a_resumed_run_is_the_same_run(
    dtype: Any,
    num_steps: int,
    watch: Watch,
    hw: HardwareProfile,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """From either copy; into the model that was saved, and into another one."""
    both = Pair(hw, monkeypatch, dtype=dtype)
    for _ in range(num_steps):
        step(both.made, both.ours, both.batch)
    lohan_fx.save(both.made, tmp_path / "checkpoint")
    wanted = [step(both.made, both.ours, both.batch) for _ in range(3)]
    other = Pair(hw, monkeypatch, dtype=dtype)
    for each in (both, other):
        lohan_fx.load(each.made, tmp_path / "checkpoint")
        found = [step(each.made, each.ours, each.batch) for _ in range(3)]
        assert all(map(identical, found, wanted))
    assert watch.flips
    weights = [p.detach().clone() for p in both.made.parameters()]
    assert all(map(identical, other.made.parameters(), weights))
    for each in (both, other):
        each.made.lohan.close()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("swap-all", "host"), ("keep-all", "device")),
        (("swap-all", "device"), ("keep-all", "host")),
    ],
    ids=["to the device", "to the host"],
)
@pytest.mark.usefixtures("judged")
def test_units_that_move(first: Any, second: Any, watch: Watch, tmp_path: Path) -> None:
    """Units that come to the host are tried from then on, others no more. (`trained` compares with
    plain PyTorch.)"""
    model, inputs = trained(
        tmp_path, Turns(first, second), "mlp", schedule="speculative", clip_grad_norm=NEVER
    )
    assert model.lohan.refined is not None
    assert model.lohan.refined.moved
    memory = model.lohan.memory
    assert memory is not None
    assert sum(arena.num_bytes for arena in memory.spares) == needs(model)["spares"]
    watch.flips.clear()
    backward(model, inputs)
    model.lohan.optimizer.step()  # type: ignore[union-attr]
    on_host = [name for name, tier in tiers(model).items() if tier == "host"]
    assert sorted(watch.flips) == sorted(on_host)
    model.lohan.close()


# -- what goes wrong -------------------------------------------------------------------------------


def test_backward_that_fails_after_trials(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch, watch: Watch
) -> None:
    """The step has never been: weights and states are those before, and the next one is right."""
    both = Pair(hw, monkeypatch)
    for _ in range(2):
        both.both()
    emit, calls = Updater.emit, itertools.count(1)
    last = num_units(both.made)

    def fail(*args: Any, **how: Any) -> None:
        if next(calls) == last:
            settled(both.made)
            raise InjectedError
        emit(*args, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Updater, "emit", fail)
        with pytest.raises(InjectedError):
            backward(both.made, both.batch)
    assert not updater_of(both.made).torn
    both.ours.optimizer.zero_grad()
    both.check()
    watch.flips.clear()
    for _ in range(2):
        both.both()
        both.check()
    assert len(watch.flips) == 2 * num_units(both.made)
    both.close()


def test_a_trial_that_fails(
    watch: Watch, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its unit is updated where it is; the others' trials count."""
    both = Pair(hw, monkeypatch)
    both.both()
    try_step, calls = UnitOptimizer.try_step, itertools.count()

    def fail(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 1:
            raise InjectedError
        return try_step(*args, **kwargs)

    watch.flips.clear()
    with monkeypatch.context() as patch:
        patch.setattr(UnitOptimizer, "try_step", fail)
        backward(both.made, both.batch)
        settled(both.made)
        both.ours.step()
    step(both.plain, both.its, both.inputs)
    assert len(watch.flips) == num_units(both.made) - 1
    both.check()
    both.close()


def test_a_trial_that_fails_when_it_counts(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then it is an update that fails: others took the step, and the model says so."""
    both = Pair(hw, monkeypatch)
    both.both()
    stepped = threading.Event()

    def late(*args: Any, **kwargs: Any) -> Any:
        assert stepped.wait(timeout=30)
        raise InjectedError

    monkeypatch.setattr(UnitOptimizer, "try_step", late)
    backward(both.made, both.batch)
    wait_until_begun(trials_of(both.made), 1)
    both.ours.optimizer.step()
    stepped.set()
    with pytest.raises(InjectedError):
        both.made.lohan.sync()
    with pytest.raises(StepError, match=r"between two steps: .* took the step"):
        both.made(**both.batch)
    both.made.lohan.close()


def test_what_has_not_begun_is_updated_in_place(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the unit whose trial runs when optimizer.step() is called goes on with its copy."""
    both = Pair(hw, monkeypatch)
    flip, flips = UnitStates.flip, []
    stepped = threading.Event()
    try_step = UnitOptimizer.try_step

    def late(*args: Any, **kwargs: Any) -> Any:
        assert stepped.wait(timeout=30)
        return try_step(*args, **kwargs)

    def counted(states: UnitStates) -> None:
        flip(states)
        flips.append(states.unit.name)

    monkeypatch.setattr(UnitOptimizer, "try_step", late)
    monkeypatch.setattr(UnitStates, "flip", counted)
    for _ in range(3):
        stepped.clear()
        flips.clear()
        backward(both.made, both.batch)
        backward(both.plain, both.inputs)
        wait_until_begun(trials_of(both.made), 1)
        both.ours.step()
        both.its.step()
        assert len(flips) == 1
        stepped.set()
        both.check()
    both.close()


@pytest.mark.parametrize("then", ["again", "close"])
def test_an_acceptance_that_fails(
    then: str, watch: Watch, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next optimizer.step() goes on with it; or the model can be closed."""
    both = Pair(hw, monkeypatch)
    both.both()
    may_flip, calls = UnitStates.may_flip, itertools.count()

    def fail(*args: Any) -> bool:
        if next(calls) == 1:
            raise InjectedError
        return may_flip(*args)

    monkeypatch.setattr(UnitStates, "may_flip", fail)
    watch.flips.clear()
    backward(both.made, both.batch)
    with pytest.raises(InjectedError):
        both.ours.step()
    if then == "close":
        both.made.lohan.close()
        return
    both.ours.step()
    step(both.plain, both.its, both.inputs)
    assert len(watch.flips) == num_units(both.made)
    both.check()
    both.both()
    both.close()


def test_trials_that_end_after_the_step(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is accepted before it has ended is waited for: by forward, state_dict() and sync()."""
    both = Pair(hw, monkeypatch)
    both.both()
    try_step = UnitOptimizer.try_step
    stepped = threading.Event()

    def late(*args: Any, **kwargs: Any) -> Any:
        assert stepped.wait(timeout=30)
        return try_step(*args, **kwargs)

    monkeypatch.setattr(UnitOptimizer, "try_step", late)
    for ask in (both.made.lohan.sync, both.made.state_dict, lambda: None):
        stepped.clear()
        backward(both.made, both.batch)
        both.ours.step()
        assert any(not t.done() for t in updater_of(both.made)._jobs.tickets)
        stepped.set()
        ask()
        step(both.plain, both.its, both.inputs)
    stepped.set()
    both.both()
    both.check()
    both.close()


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("place", [0.02, 0.3, 0.5, 0.7, 0.9])
def test_an_interrupt_in_the_step(
    place: float, clips: bool, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """optimizer.step() is called again, and takes it up; or there has been no step at all."""
    sweep(hw, monkeypatch, clips, 1, lambda count: [1 + int(place * count)])


@pytest.mark.parametrize("place", [0.05, 0.2])
def test_an_interrupt_while_sums_are_completed(
    place: float, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is added twice."""
    sweep(hw, monkeypatch, False, 2, lambda count: [1 + int(place * count)])


def test_a_step_that_is_taken_up_clips_what_was_submitted_before(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt leaves an update with the optimizer's thread, which runs while the next call
    looks for what to clip."""
    both = Pair(hw, monkeypatch, clip_grad_norm=1e-3)

    def plainly() -> None:
        backward(both.plain, both.inputs)
        clip_grad_norm_(both.plain.parameters(), 1e-3)
        both.its.step()

    step(both.made, both.ours, both.batch)
    plainly()
    backward(both.made, both.batch)
    updater = updater_of(both.made)
    gate, run, submit = threading.Event(), UnitJobs._run, RankedLane.submit_ranked

    def held(*args: Any, **kwargs: Any) -> None:
        assert gate.wait(timeout=30)
        run(*args, **kwargs)

    def struck(*args: Any) -> Any:
        submit(*args)
        monkeypatch.setattr(RankedLane, "submit_ranked", submit)
        raise KeyboardInterrupt

    choose = Clipping.choose

    def slow(*args: Any) -> Any:
        gate.set()
        deadline = time.monotonic() + 30
        while not updater._updates.ended:
            assert time.monotonic() < deadline
            time.sleep(1e-4)
        return choose(*args)

    monkeypatch.setattr(UnitJobs, "_run", held)
    monkeypatch.setattr(RankedLane, "submit_ranked", struck)
    with pytest.raises(KeyboardInterrupt):
        both.ours.optimizer.step()
    monkeypatch.setattr(Clipping, "choose", slow)
    both.ours.step()
    plainly()
    both.check()
    both.close()


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("clips", [False, True])
def test_an_interrupt_at_every_place_of_the_step(
    clips: bool, accumulate: int, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep(hw, monkeypatch, clips, accumulate, lambda count: range(1, count + 10))


def sweep(
    hw: HardwareProfile,
    patch: pytest.MonkeyPatch,
    clips: bool,
    accumulate: int,
    places: Callable[[int], Any],
    optimizer: str = "adam",
) -> None:
    limit = 1e-3 if clips else NEVER
    both = Pair(hw, patch, optimizer, clip_grad_norm=limit, accumulate=accumulate)

    def plainly() -> None:
        for _ in range(accumulate):
            backward(both.plain, both.inputs)
        clip_grad_norm_(both.plain.parameters(), limit)
        both.its.step()

    def ours(at: int) -> int:
        trials = updater_of(both.made).trials if both.made.lohan.memory else None
        if trials is not None:
            trials._clipped = False  # try each time
        for _ in range(accumulate):
            backward(both.made, both.batch)
        with interrupted(at) as counted, suppress(KeyboardInterrupt):
            both.ours.optimizer.step()
        if updater_of(both.made).pending:
            both.ours.optimizer.step()
        both.ours.optimizer.zero_grad()
        pairs = zip(both.made.parameters(), both.plain.parameters(), strict=True)
        if not all(map(identical, *zip(*pairs, strict=True))):
            plainly()  # else all of it was dropped before the first unit was updated
        try:
            both.check()
        except BaseException as error:
            error.add_note(f"after an interrupt at place {at}, {counted.place}")
            raise
        return counted.count

    ours(0)
    count = ours(0)
    assert count > 50
    steps = 2 + sum(bool(ours(at)) for at in places(count))
    (taken,) = {int(s["step"]) for s in both.its.optimizer.state_dict()["state"].values()}
    assert steps - taken < 3
    both.close()


@pytest.mark.parametrize("when", ["trials run", "trials have ended", "accepted"])
def test_close_in_the_middle(
    when: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between backward and step the model is what it was before; after it, the step is taken."""
    gc.collect()
    before = {t for t in threading.enumerate() if t.name.startswith("lohan_fx")}
    both = Pair(hw, monkeypatch)
    for _ in range(2):
        both.both()
    run, going = UnitOptimizer._update, threading.Event()

    def slow(unit: UnitOptimizer, *args: Any, **kwargs: Any) -> Any:
        found = run(unit, *args, **kwargs)
        if when != "trials have ended":  # its scalars are those of the step that is tried
            going.set()
            threading.Event().wait(0.05)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(UnitOptimizer, "_update", slow)
        backward(both.made, both.batch)
        if when == "accepted":
            both.ours.step()
            step(both.plain, both.its, both.inputs)
        elif when == "trials run":
            assert going.wait(timeout=30)
        else:
            settled(both.made)
        both.close()
    gc.collect()
    assert {t for t in threading.enumerate() if t.name.startswith("lohan_fx")} <= before


# -- plans -----------------------------------------------------------------------------------------


def needs(model: nn.Module) -> dict[str, int]:
    program = model.lohan.program()  # type: ignore[union-attr]
    return footprint.host_bytes_needed(program.workload, program.plan)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_planned_host_memory_is_what_is_allocated(
    dtype: Any, accumulate: int, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Second copies of all host units, without what gradients add up in."""
    both = Pair(hw, monkeypatch, dtype=dtype, accumulate=accumulate)
    both.made.lohan.prepare(**both.batch)
    memory, need = both.made.lohan.memory, needs(both.made)
    assert memory is not None
    assert sum(arena.num_bytes for arena in memory.spares) == need["spares"] > 0
    assert memory.arena is not None
    assert memory.arena.num_bytes == need["units"]
    both.made.lohan.close()


def test_units_that_a_program_does_not_train(hw: HardwareProfile) -> None:
    """They have no second copies, until one does."""
    model, optimizer = next(sometimes())
    made = compiled(model, optimizer, hw, strategy="keep-all", states="host", clip_grad_norm=NEVER)
    for extra, number in ((False, 3), (True, 4)):
        need = made.lohan.prepare(torch.randn(4, 8), extra) and needs(made)
        assert held_bytes(made) == sum(need.values())
        memory = made.lohan.memory
        assert memory is not None
        assert sum(s.spare is not None for s in memory.states.units) == number
    made.lohan.close()


def test_without_room_it_is_deferred(hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is the default; who asks for it by name is told what lacks."""
    remember_captures(monkeypatch, "mlp")

    def prepared(**options: Any) -> Any:
        model, inputs = make("mlp")
        optimizer = training_of("adam", model).optimizer
        made = compiled(model, optimizer, hw, strategy="keep-all", states="host", **options)
        made.lohan.prepare(**inputs)
        return made

    made = prepared(clip_grad_norm=1.0)
    assert made.plan.schedule == "speculative"
    need = needs(made)
    made.lohan.close()
    room = {"device": "1GiB", "host": sum(need.values()) - 1, "ssd": "1GiB"}
    made = prepared(clip_grad_norm=1.0, memory=room)
    assert made.plan.schedule == "deferred"
    assert needs(made)["spares"] == 0
    assert not made.lohan.memory.spares
    assert {s.tier for s in made.lohan.memory.states.units} == {"host"}
    made.lohan.close()
    with pytest.raises(InsufficientMemoryError):
        prepared(schedule="speculative", memory=room)
    made = prepared(skip_nonfinite=True, memory={**room, "host": sum(need.values())})
    assert made.plan.schedule == "speculative"
    made.lohan.close()


def test_units_on_ssds_are_not_tried(hw: HardwareProfile) -> None:
    """Where a strategy has some there, updates are late: they would wait in either schedule."""

    def strategy(
        workload: Workload, hw: HardwareProfile, budget: MemoryBudget, options: PlannerOptions
    ) -> Plan:
        tiers: dict[str, Tier] = {u.name: "host" for u in workload.units}
        tiers[workload.units[0].name] = "ssd"
        actions: dict[str, Action] = dict.fromkeys(workload.residuals, "keep")
        choices = Choices(actions=actions, unit_tiers=tiers)
        return finish(workload, hw, budget, options, choices, "one on SSD")

    model, inputs = make("mlp")
    training = training_of("adam", model)
    made = compiled(model, training.optimizer, hw, strategy=strategy, clip_grad_norm=NEVER)
    for _ in range(2):
        found = step(made, training, inputs)
    assert made.plan.schedule == "deferred"
    evaluate("mlp", made, inputs)  # another program, of the same schedule
    assert updater_of(made).schedule == "deferred"
    made.lohan.close()
    plain, inputs = make("mlp")
    its = training_of("adam", plain)
    for _ in range(2):
        wanted = step(plain, its, inputs)
    assert identical(found, wanted)
    assert_same(model, training.optimizer, plain, its.optimizer)


def held_bytes(model: LohanModule) -> int:
    """Host memory that a model holds."""
    memory = model.lohan.memory
    assert memory is not None
    slabs = (memory.arena, memory.buffer_arena, *memory.moved, *memory.spares)
    return memory.store.host_bytes + sum(slab.num_bytes for slab in slabs if slab is not None)


@pytest.mark.parametrize(
    ("order", "schedules", "dtype"),
    [
        ("big evaluate big", "DDD", None),
        pytest.param("big small big", "DDD", None, marks=pytest.mark.slow),
        ("small big small big", "SDDD", "bf16"),
        ("evaluate big small", "SDD", None),
        pytest.param("small big small big", "SDDD", None, marks=pytest.mark.slow),
        pytest.param("small evaluate small", "SSS", "bf16", marks=pytest.mark.slow),
    ],
)
def test_programs_that_share_host_memory(
    order: str, schedules: str, dtype: Any, hw: HardwareProfile
) -> None:
    """One that has no room for second copies takes them from all, for good, and evaluations neither
    bring nor take them: so the budget holds. Nothing is lost with them."""
    batches = {"small": make("mlp")[1]}
    batches["big"] = {k: torch.cat([v] * 100) for k, v in batches["small"].items()}

    def begun(**more: Any) -> tuple[LohanModule, Training]:
        model, _ = make("mlp")
        training = training_of("adam", model)
        options = {"strategy": "swap-all", "states": "host", "swap_to": "host", "dtype": dtype}
        made = compiled(model, training.optimizer, hw, clip_grad_norm=NEVER, **options, **more)
        return made, training

    probe, _ = begun(schedule="deferred")
    probe.lohan.prepare(**batches["big"])
    room = sum(needs(probe).values()) + footprint.PAGE_BYTES
    probe.lohan.close()
    ours, its = begun(memory={"device": "1GiB", "host": room, "ssd": "1GiB"})
    other, training = begun(schedule="serial")
    for k, (what, schedule) in enumerate(zip(order.split(), schedules, strict=True)):
        for made in (ours, other):
            made.lohan.sync()
            with torch.no_grad():  # the user's writes are not lost, either
                next(iter(made.parameters())).add_(0.125 * k)
        if what == "evaluate":
            found, wanted = (evaluate("mlp", made, batches["small"]) for made in (ours, other))
        else:
            found = step(ours, its, batches[what])
            wanted = step(other, training, batches[what])
        assert identical(found, wanted)
        assert updater_of(ours).schedule[0] == schedule.lower()
        assert held_bytes(ours) <= room
    for made in (ours, other):
        made.lohan.close()
    assert_same(ours, its.optimizer, other, training.optimizer)


def test_kept_gradients_are_refused(hw: HardwareProfile) -> None:
    """They are the user's until optimizer.step()."""
    model, _ = make("mlp")
    optimizer = training_of("adam", model).optimizer
    with pytest.raises(LohanError, match=r"'speculative' updates units before .*gradients='kept'"):
        compiled(model, optimizer, hw, gradients="kept", schedule="speculative")


def hand_made(tier: Any, schedule: Any) -> Simulation:
    """Two units; 1 s of forward, 1 s of backward for each; copies of 1 chunk, states of 2."""
    units = [make_unit(f"u{k}", params=1, compute=1, states=2) for k in range(2)]
    ops = [("f0", 1.0, "x", "a"), ("b1", 1.0, "a", "g.u1 d"), ("b0", 1.0, "d", "g.u0")]
    w = make_workload(ops, {"g.u0": 1, "g.u1": 1}, units)
    plans = {
        f"u{k}": UnitPlan(
            tier=tier,
            emit_after=f"b{k}",
            release_gradients_after=None if tier == "device" else f"b{k}",
        )
        for k in range(2)
    }
    return simulate(w, make_the_plan(w, units=plans, schedule=schedule), machine(d2h=2.0))


def test_host_units_take_as_long_as_with_overlapped_updates() -> None:
    found, wanted = hand_made("host", "speculative"), hand_made("host", "overlapped")
    assert found.step_s == wanted.step_s < hand_made("host", "deferred").step_s
    assert spans(found, "cpu") == spans(wanted, "cpu")


@pytest.mark.parametrize("tier", ["device", "ssd"])
def test_other_units_take_as_long_as_with_deferred_updates(tier: str) -> None:
    found, wanted = hand_made(tier, "speculative"), hand_made(tier, "deferred")
    assert (found.step_s, found.optimizer_s) == (wanted.step_s, wanted.optimizer_s)
    for lane in ("gpu", "cpu", "ssd"):
        assert spans(found, lane) == spans(wanted, lane)  # type: ignore[arg-type]
    if tier == "device":
        ends = [end for kind, _, _, end in spans(found, "gpu") if kind != "update"]
        begins = [start for kind, _, start, _ in spans(found, "gpu") if kind == "update"]
        assert min(begins) >= max(ends)


@settings(max_examples=25, deadline=None)
@given(
    workload=workloads(),
    strategy=st.sampled_from(("swap-all", "random", "recompute-all")),
    states=st.sampled_from(("auto", "host")),
)
def test_programs_are_those_of_deferred_updates(
    workload: Workload, strategy: str, states: Any
) -> None:
    """The same instructions; and of host memory the second copies more, which fit the budget."""
    plans = {}
    for schedule in ("speculative", "deferred"):
        options = PlannerOptions(schedule=schedule, states=states)  # type: ignore[arg-type]
        plans[schedule] = make_plan(strategy, workload, small_hardware(), budget(), options)
    found, wanted = plans["speculative"], plans["deferred"]
    if found.units == wanted.units and found.residuals == wanted.residuals:
        assert lower(workload, found).instructions == lower(workload, wanted).instructions
    need = footprint.host_bytes_needed(workload, found)
    tiers_of_units = footprint.tiers_of(found)
    assert need["spares"] == sum(
        footprint.spare_bytes(u, tiers_of_units[u.name], "speculative") for u in workload.units
    )
    assert sum(need.values()) <= budget().host_bytes
