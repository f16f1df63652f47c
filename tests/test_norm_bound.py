"""Steps of schedule "speculative" that go on because a bound of the norm shows that nothing has to
be clipped: the norm itself is known when their updates have ended.

Norms are taken in passing, as on CUDA. What they are compared with is schedule "deferred", which
has every norm before it updates.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lohan_fx.api import LohanModule
from lohan_fx.compiled.model import CompiledModel
from lohan_fx.errors import StepError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.runtime import sums
from lohan_fx.runtime.clipping import Clipping, Norms
from lohan_fx.runtime.native import adam
from lohan_fx.runtime.native.adam import Addend
from lohan_fx.runtime.optimizer import UnitOptimizer
from lohan_fx.runtime.states import ModelStates
from lohan_fx.runtime.trials import Trials
from lohan_fx.runtime.unit_states import UnitStates
from lohan_fx.runtime.unit_updates import UnitUpdates
from lohan_fx.runtime.updates import Updater
from tests.loops import InjectedError, compiled, sometimes, updater_of
from tests.models import loss_of, make
from tests.test_speculative import NEVER, sweep, wait_until_begun
from tests.test_trial_sums import Additions, Side, additions, assert_alike, trained_with
from tests.training import alternating, identical, training_of

__all__ = ["additions"]  # a fixture

pytestmark = pytest.mark.skipif(adam.kernel() is None, reason="no C++ compiler")


class Late:
    """Of the trials of each step one has begun when optimizer.step() comes, and goes on when the
    others have been given up.

    Attributes:
        bounds: what was known of norms, step by step, and whether it was enough.
        error: is raised where the trial would go on.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.bounds: list[tuple[float, bool]] = []
        self.error: BaseException | None = None
        self._given_up = threading.Event()
        try_step, keeps = UnitOptimizer.try_step, Clipping.keeps
        end, wait = Updater._end_tried_additions, Updater._wait_for_sums

        def late(*args: Any, **kwargs: Any) -> Any:
            assert self._given_up.wait(timeout=30)
            if self.error is not None:
                raise self.error
            return try_step(*args, **kwargs)

        def ending(updater: Updater, *args: Any) -> None:
            if updater._tried:
                assert updater.trials is not None
                wait_until_begun(updater.trials, 1)
            end(updater, *args)
            self._given_up.clear()

        def waiting(updater: Updater) -> None:
            self._given_up.set()
            wait(updater)

        def noted(clipping: Clipping, bound: float) -> bool:
            self.bounds.append((bound, keeps(clipping, bound)))
            return self.bounds[-1][1]

        patch.setattr(UnitOptimizer, "try_step", late)
        patch.setattr(Updater, "_end_tried_additions", ending)
        patch.setattr(Updater, "_wait_for_sums", waiting)
        patch.setattr(Clipping, "keeps", noted)


@pytest.fixture
def late(additions: Additions, monkeypatch: pytest.MonkeyPatch) -> Late:
    del additions
    return Late(monkeypatch)


Loop = Callable[[LohanModule, torch.optim.Optimizer, dict[str, Any]], list[Tensor]]


def backward(
    model: nn.Module, inputs: dict[str, Any], scale: float = 1.0, name: str = "mlp"
) -> Tensor:
    torch.manual_seed(0)
    loss = loss_of(name, model(**inputs)) * scale
    loss.backward()
    return loss.detach()


def scaled(name: str, steps: Sequence[Sequence[float]], *, manual: bool = False) -> Loop:
    """Steps of one backward for each scale; notes losses, and the norm right after each step."""

    def loop(
        model: LohanModule, optimizer: torch.optim.Optimizer, inputs: dict[str, Any]
    ) -> list[Tensor]:
        noted = []
        for scales in steps:
            for k, scale in enumerate(scales):
                model.lohan._training.accumulation.more = manual and k < len(scales) - 1
                noted.append(backward(model, inputs, scale, name))
            optimizer.step()
            noted.append(torch.tensor(model.lohan.grad_norm))
            optimizer.zero_grad()
        return noted

    return loop


def run(
    schedule: str, loop: Loop, hw: HardwareProfile, name: str = "mlp", **options: Any
) -> tuple[Side, CompiledModel]:
    """A loop on a model of that name, with bf16 and float32 masters if nothing else is said."""
    model, inputs = make(name)
    training = training_of(options.pop("optimizer", "adamw"), model)
    options = {"states": "host", "dtype": "bf16", "clip_grad_norm": NEVER, **options}
    made = compiled(model, training.optimizer, hw, schedule=schedule, **options)
    lohan = made.lohan
    noted = loop(made, training.optimizer, inputs)
    lohan.close()
    return (noted, model, training.optimizer), lohan


def norms_of(side: Side, per_step: int) -> list[float]:
    return [float(value) for value in side[0][per_step :: per_step + 1]]


# -- the same steps ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "accumulate"), alternating(("far", "between", "clips"), (2, 3, "manual"))
)
def test_the_same_as_with_all_norms(
    limit: str,
    accumulate: int | str,
    late: Late,
    additions: Additions,
    hw: HardwareProfile,
) -> None:
    """Losses, weights, states and norms, to the bit. Gradients of a step cancel in part, so that
    the bound is far above the norm."""
    size = 2 if accumulate == 2 else 3
    steps = [[1.0] * (size - 1) + [0.5 - size / 2]] * 3
    loop = scaled("mlp", steps, manual=accumulate == "manual")
    wanted, _ = run("deferred", loop, hw, accumulate=accumulate)
    norms = norms_of(wanted, size)
    norm = {"far": NEVER, "between": 1.2 * max(norms), "clips": 0.5 * min(norms)}[limit]
    if limit == "clips":
        wanted, _ = run("deferred", loop, hw, accumulate=accumulate, clip_grad_norm=norm)
    assert not late.bounds
    additions.num_completed = 0
    found, made = run("speculative", loop, hw, accumulate=accumulate, clip_grad_norm=norm)
    assert_alike(found, wanted)
    assert [enough for _, enough in late.bounds] == (
        [limit == "far"] * (1 if limit == "clips" else 3)  # then steps are clipped, and none tries
    )
    for (bound, _), exact in zip(late.bounds, norms_of(found, size), strict=False):
        assert exact < norm or limit == "clips"
        assert exact * 1.5 < bound
    assert bool(additions.num_completed) == (limit != "far")
    assert made.redone_steps == (limit == "clips")


def test_masters_in_half_precision_have_no_bound(late: Late, hw: HardwareProfile) -> None:
    """Norms are combined in it: what is far below a float32 limit is infinite, and skipped."""

    def trained(schedule: str, scale: float) -> tuple[list[Tensor], nn.Module, CompiledModel]:
        model, inputs = make("mlp")
        model = model.half()
        inputs = {k: v.half() if v.is_floating_point() else v for k, v in inputs.items()}
        inputs = {k: v.detach() for k, v in inputs.items()}
        training = training_of("adamw", model)
        options: dict[str, Any] = {"states": "host", "dtype": None, "accumulate": "manual"}
        options["skip_nonfinite"] = True
        made = compiled(model, training.optimizer, hw, schedule=schedule, **options)
        noted = scaled("mlp", [[scale]], manual=True)(made, training.optimizer, inputs)
        lohan = made.lohan
        lohan.close()
        return noted, model, lohan

    (_, norm), _, _ = trained("deferred", 1.0)
    scale = 75_000 / float(norm)  # no element of a gradient is infinite
    _, model, lohan = trained("speculative", scale)
    _, plain, its = trained("deferred", scale)
    assert its.skipped_steps == 1
    assert lohan.skipped_steps == 1
    assert all(map(identical, model.parameters(), plain.parameters()))


@pytest.mark.parametrize("bad", [None, 0, 1])
def test_a_step_that_is_skipped(bad: int | None, late: Late, hw: HardwareProfile) -> None:
    """With one gradient of the second step not a number: first or last."""
    scales = [math.nan if k == bad else 1.0 for k in range(2)]
    loop = scaled("mlp", [[1.0, 1.0], scales, [1.0, 1.0]])
    options: dict[str, Any] = {"skip_nonfinite": True, "clip_grad_norm": None, "accumulate": 2}
    wanted, _ = run("deferred", loop, hw, **options)
    found, made = run("speculative", loop, hw, **options)
    assert_alike(found, wanted)
    assert made.skipped_steps == (bad is not None)
    assert [enough for _, enough in late.bounds] == [True, bad is None, True]


@pytest.mark.parametrize("name", ["tied", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_tied_weights(name: str, late: Late, hw: HardwareProfile) -> None:
    loop = scaled(name, [[1.0, 0.5]] * 2)
    sides = [run(s, loop, hw, name, accumulate=2)[0] for s in ("deferred", "speculative")]
    assert_alike(*sides)
    assert [enough for _, enough in late.bounds] == [True, True]


class Part(nn.Module):
    """A layer of which one parameter has a gradient only if it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.extra = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor, extra: bool) -> Tensor:
        y = x @ self.weight
        return torch.tanh(y + self.extra if extra else y)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Part() for _ in range(3)])

    def forward(self, x: Tensor, extra: bool) -> Tensor:
        for layer in self.layers:
            x = layer(x, extra)
        return x.square().mean()


def whole_units() -> tuple[nn.Module, nn.Module]:
    (first, _), (second, _) = sometimes()
    return first, second


@pytest.mark.parametrize("models", [whole_units, lambda: (Parts(), Parts())])
def test_parameters_without_a_gradient(
    models: Callable[[], tuple[nn.Module, nn.Module]], late: Late, hw: HardwareProfile
) -> None:
    """In the last backward, in those before it, or in all of them; whole units of them, or parts
    of units."""
    uses = [(True, False), (False, True), (False, False), (True, True), (True, False)]

    sides = zip(("speculative", "deferred"), models(), strict=True)
    assert_alike(*(trained_with(schedule, model, uses, hw) for schedule, model in sides))
    assert len(late.bounds) == len(uses)
    assert all(enough for _, enough in late.bounds)


def test_gradients_that_came_early_only(late: Late, hw: HardwareProfile) -> None:
    """Of three backwards in the first alone: there is no bound, so the norm is waited for."""
    uses = [(True, False, False)] * 2
    sides = [trained_with(s, Parts(), uses, hw) for s in ("speculative", "deferred")]
    assert_alike(*sides)
    assert late.bounds == [(math.inf, False)] * 2


def test_sums_that_were_reset_in_the_middle(late: Late, hw: HardwareProfile) -> None:
    """What they held before bounds nothing."""

    def loop(
        model: LohanModule, optimizer: torch.optim.Optimizer, inputs: dict[str, Any]
    ) -> list[Tensor]:
        noted = []
        for scales in ((1e9, 0.0, 1.0), (1.0, 1e9, 1.0)):
            backward(model, inputs, scales[0])
            optimizer.zero_grad()
            for scale in scales[1:]:
                backward(model, inputs, scale)
            optimizer.step()
            noted.append(torch.tensor(model.lohan.grad_norm))
            optimizer.zero_grad()
        return noted

    sides = [run(s, loop, hw, accumulate=2)[0] for s in ("deferred", "speculative")]
    assert_alike(*sides)
    assert [enough for _, enough in late.bounds] == [True, False]


@pytest.mark.parametrize(("accumulate", "squared"), [(4, 1), ("manual", 3), (2, 1)])
def test_only_sums_that_may_be_the_last_but_one_are_squared(
    accumulate: int | str,
    squared: int,
    late: Late,
    hw: HardwareProfile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Squares take an addition longer, and those of other sums bound nothing."""
    size = accumulate if isinstance(accumulate, int) else 4
    asked: list[bool] = []
    add = sums.add

    def noted(addends: Sequence[Addend], *, squared: bool = False) -> list[float | None]:
        asked.append(squared)
        return add(addends, squared=squared)

    monkeypatch.setattr(sums, "add", noted)
    loop = scaled("mlp", [[1.0] * size] * 2, manual=accumulate == "manual")
    found, made = run("speculative", loop, hw, accumulate=accumulate)
    assert [enough for _, enough in late.bounds] == [True, True]
    per_backward = len(asked) / (2 * (size - 1))
    assert sum(asked) / 2 == squared * per_backward
    assert made.redone_steps == 0
    wanted, _ = run("deferred", loop, hw, accumulate=accumulate)
    assert_alike(found, wanted)


# -- nothing is waited for -----------------------------------------------------------------------


class Held:
    """Trials stay in the kernel until they are `released`.

    Attributes:
        error: is raised then.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.released = threading.Event()
        self.error: BaseException | None = None
        kernel_run = adam.AdamKernel.run

        def held(
            kernel: adam.AdamKernel, updates: Sequence[adam.Update], **options: Any
        ) -> list[float]:
            if any(update.target is not None for update in updates):
                assert self.released.wait(timeout=30)
                if self.error is not None:
                    raise self.error
            return kernel_run(kernel, updates, **options)

        patch.setattr(adam.AdamKernel, "run", held)


def begun(model: LohanModule, inputs: dict[str, Any]) -> None:
    """Both backwards of a step; then one trial runs."""
    for _ in range(2):
        backward(model, inputs)
    trials = updater_of(model).trials
    assert trials is not None
    wait_until_begun(trials, 1)


@pytest.mark.usefixtures("additions")
@pytest.mark.parametrize("how", ["grad_norm", "metrics", "later", "no norm"])
def test_the_step_returns_while_a_trial_runs(
    how: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The norm is there when somebody asks for it."""

    def loop(
        model: LohanModule, optimizer: torch.optim.Optimizer, inputs: dict[str, Any]
    ) -> list[Tensor]:
        for _ in range(2):
            backward(model, inputs)
        optimizer.step()
        optimizer.zero_grad()
        return [torch.tensor(model.lohan.grad_norm)] if how != "no norm" else []

    limit = None if how == "no norm" else NEVER
    wanted, _ = run("deferred", loop, hw, accumulate=2, clip_grad_norm=limit)
    model, inputs = make("mlp")
    optimizer = training_of("adamw", model).optimizer
    options: dict[str, Any] = {"states": "host", "dtype": "bf16", "schedule": "speculative"}
    made = compiled(model, optimizer, hw, accumulate=2, clip_grad_norm=limit, **options)
    held = Held(monkeypatch)
    begun(made, inputs)
    optimizer.step()  # would wait for ever
    optimizer.zero_grad()
    assert updater_of(made)._updates.ended == []
    assert made.lohan._training.clipping.grad_norm is None
    held.released.set()
    noted = []
    if how == "grad_norm":
        noted.append(made.lohan.grad_norm)
    elif how == "metrics":
        noted.append(made.lohan.metrics()["lohan/grad_norm"])
    elif how == "later":
        made.lohan.sync()
        noted.append(made.lohan._training.clipping.grad_norm)
    made.lohan.close()
    assert_alike(([torch.tensor(norm) for norm in noted], model, optimizer), wanted)


def test_trials_go_on_while_backward_runs_on_the_device(
    additions: Additions, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """optimizer.step() may come long before the last gradients: no trial is given up for that."""
    settle, submit = ModelStates.settle, Trials.submit
    flip, try_step = UnitStates.flip, UnitOptimizer.try_step
    waits, flips, tried = threading.Event(), [], []

    def submitted(*args: Any) -> Any:
        trial = submit(*args)
        tried.extend([trial] if trial is not None else [])
        return trial

    def slow_device(states: ModelStates, unit: UnitStates | None = None) -> None:
        waits.set()
        while tried:
            tried.pop().ended.settle()
        waits.clear()
        settle(states, unit)

    def late(*args: Any, **kwargs: Any) -> Any:
        assert waits.wait(timeout=30)
        return try_step(*args, **kwargs)

    def flipped(states: UnitStates) -> None:
        flips.append(states.unit.name)
        flip(states)

    monkeypatch.setattr(Trials, "submit", submitted)
    monkeypatch.setattr(ModelStates, "settle", slow_device)
    monkeypatch.setattr(UnitStates, "flip", flipped)
    monkeypatch.setattr(UnitOptimizer, "try_step", late)
    loop = scaled("mlp", [[1.0, 1.0]] * 2)
    wanted, _ = run("deferred", loop, hw, accumulate=2)
    units = additions.count // 4
    found, _ = run("speculative", loop, hw, accumulate=2)
    assert_alike(found, wanted)
    assert len(flips) == 2 * units


@pytest.mark.usefixtures("additions")
def test_the_norm_is_known_after_the_model_is_closed(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = make("mlp")
    optimizer = training_of("adamw", model).optimizer
    options: dict[str, Any] = {"states": "host", "schedule": "speculative", "accumulate": 2}
    made = compiled(model, optimizer, hw, clip_grad_norm=NEVER, **options)
    held, lohan = Held(monkeypatch), made.lohan
    begun(made, inputs)
    optimizer.step()
    held.released.set()
    lohan.close()
    assert lohan.grad_norm is not None
    assert lohan.grad_norm > 0


@pytest.mark.usefixtures("additions")
def test_a_unit_whose_memory_is_held(hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trial runs when it is dropped, and the update in place comes to the same norm."""

    def loop(
        model: LohanModule, optimizer: torch.optim.Optimizer, inputs: dict[str, Any]
    ) -> list[Tensor]:
        held = Held(monkeypatch) if updater is not None else None
        kept = [p.detach() for p in model.parameters()]
        for _ in range(2):
            backward(model, inputs)
        if held is not None:
            wait_until_begun(updater_of(model).trials, 1)  # type: ignore[arg-type]
        optimizer.step()
        if held is not None:
            held.released.set()
        noted = [torch.tensor(model.lohan.grad_norm), *(k.clone() for k in kept)]
        optimizer.zero_grad()
        return noted

    updater = None
    wanted, _ = run("deferred", loop, hw, accumulate=2, dtype=None)
    updater = True
    found, _ = run("speculative", loop, hw, accumulate=2, dtype=None)
    assert_alike(found, wanted)


# -- no kernel adds in passing -------------------------------------------------------------------


def test_without_a_kernel_for_the_update(
    late: Late, additions: Additions, hw: HardwareProfile
) -> None:
    """The trial that runs adds first, which may fail the step: it is waited for."""
    loop = scaled("mlp", [[1.0, 1.0]] * 2)
    options: dict[str, Any] = {"accumulate": 2, "optimizer": "sgd"}
    wanted, _ = run("deferred", loop, hw, **options)
    additions.num_completed = 0
    found, _ = run("speculative", loop, hw, **options)
    assert_alike(found, wanted)
    assert [enough for _, enough in late.bounds] == [True, True]
    assert additions.num_completed > 0


@pytest.mark.usefixtures("additions")
def test_an_addition_that_fails_fails_the_step(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs when optimizer.step() comes, which does not go on without it."""
    model, inputs = make("mlp")
    optimizer = training_of("sgd", model).optimizer
    options: dict[str, Any] = {"states": "host", "schedule": "speculative", "accumulate": 2}
    made = compiled(model, optimizer, hw, clip_grad_norm=NEVER, **options)
    before = [p.detach().clone() for p in model.parameters()]
    asked = threading.Event()
    goes_on = Updater._goes_on

    def failing(*_: Any) -> None:
        assert asked.wait(timeout=30)
        raise InjectedError

    def going(updater: Updater, *args: Any) -> bool:
        found = goes_on(updater, *args)
        asked.set()
        return found

    backward(made, inputs)
    assert updater_of(made).settle() is None
    with monkeypatch.context() as patch:
        patch.setattr(UnitUpdates, "add", failing)
        patch.setattr(Updater, "_goes_on", going)
        backward(made, inputs)
        trials = updater_of(made).trials
        assert trials is not None
        wait_until_begun(trials, 1)
        with pytest.raises(InjectedError):
            optimizer.step()
    assert all(map(identical, model.parameters(), before))
    for _ in range(2):
        backward(made, inputs)
    optimizer.step()
    made.lohan.close()


@pytest.mark.usefixtures("late")
def test_updates_in_place_without_a_kernel(
    additions: Additions, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms are taken in a pass of their own, beside the next forward."""
    loop = scaled("mlp", [[1.0, 1.0]] * 2)
    wanted, _ = run("deferred", loop, hw, accumulate=2)
    step_mixed = UnitOptimizer.step_mixed

    def refused(*args: Any, squared: bool = False, **options: Any) -> Any:
        return None if squared else step_mixed(*args, **options)

    monkeypatch.setattr(UnitOptimizer, "step_mixed", refused)
    additions.num_completed = 0
    found, _ = run("speculative", loop, hw, accumulate=2)
    assert_alike(found, wanted)
    assert additions.num_completed > 0


# -- failures ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("additions")
@pytest.mark.parametrize("which", ["trial", "update"])
@pytest.mark.parametrize("ask", ["norm", "sync"])
def test_an_update_that_fails(
    which: str, ask: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without a bound: the model says that it is torn. The norm is not known."""
    model, inputs = make("mlp")
    optimizer = training_of("adamw", model).optimizer
    options: dict[str, Any] = {"states": "host", "schedule": "speculative", "accumulate": 2}
    made = compiled(model, optimizer, hw, dtype="bf16", clip_grad_norm=NEVER, **options)
    begun(made, inputs)
    optimizer.step()
    assert made.lohan.grad_norm is not None
    optimizer.zero_grad()
    with monkeypatch.context() as patch:
        held = Held(patch)
        if which == "trial":
            held.error = InjectedError()
        begun(made, inputs)
        if which == "update":
            patch.setattr(UnitOptimizer, "step_mixed", _fail)
        optimizer.step()
        held.released.set()
        with pytest.raises(InjectedError):
            _ = made.lohan.grad_norm if ask == "norm" else made.lohan.sync()
    assert made.lohan.grad_norm is None
    optimizer.zero_grad()
    with pytest.raises(StepError, match="between two steps"):
        made(**inputs)
    made.lohan.close()


def _fail(*_: Any, **__: Any) -> None:
    raise InjectedError


def test_a_trial_that_fails_early(late: Late, additions: Additions, hw: HardwareProfile) -> None:
    """It may be that its gradients never came: norms are taken before anything is updated."""
    loop = scaled("mlp", [[1.0, 1.0]])
    wanted, _ = run("deferred", loop, hw, accumulate=2)
    late.error = InjectedError()
    units, additions.num_completed = additions.count // 2, 0
    found, _ = run("speculative", loop, hw, accumulate=2)
    assert_alike(found, wanted)
    assert [enough for _, enough in late.bounds] == [True]
    assert additions.num_completed == units


@pytest.mark.slow
@pytest.mark.usefixtures("additions")
def test_an_interrupt_at_every_place(hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial runs and others have not begun."""
    try_step, goes_on = UnitOptimizer.try_step, Updater._goes_on
    found = []

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.01)
        return try_step(*args, **kwargs)

    def noted(*args: Any) -> bool:
        found.append(goes_on(*args))
        return found[-1]

    monkeypatch.setattr(UnitOptimizer, "try_step", slow)
    monkeypatch.setattr(Updater, "_goes_on", noted)
    sweep(hw, monkeypatch, False, 2, lambda count: range(1, count + 10), "fused adam")
    assert found.count(True) > 50


# -- the bound itself ----------------------------------------------------------------------------


class Layout:
    dtype = torch.float32

    def __init__(self, copy_dtype: torch.dtype) -> None:
        self.copy_dtype = copy_dtype


class States:
    """What norms need of a unit."""

    def __init__(self, size: int, copy_dtype: torch.dtype) -> None:
        self.positions = list(range(size))
        self.layout = Layout(copy_dtype)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.sampled_from(["sum", "last", "both", "exact", "none"]), min_size=1, max_size=5),
    st.integers(0, 2**31),
    st.floats(-12, 12),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_norm_is_never_above_the_bound(
    kinds: list[str], seed: int, exponent: float, dtype: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(seed)
    norms, states = Norms(in_passing=True), States(len(kinds), dtype)
    exact = Norms(in_passing=True)
    norms.begin(wanted=True, next_may_end=False)
    last: list[Tensor | None] = []
    sums: list[bool] = []
    for i, kind in enumerate(kinds):
        total, gradient = torch.randn(2, 257, generator=random) * 10**exponent
        if seed % 2:
            gradient = total * 0.5  # the two are alike, and the bound is the norm
        gradient = gradient.to(dtype)
        arrived = gradient.float()
        sums.append(kind in ("sum", "both"))
        last.append(gradient if kind in ("last", "both", "exact") else None)
        if sums[-1]:
            norms.bounds.note_sum(states, i, float(total.double().square().sum()))  # type: ignore[arg-type]
        if last[-1] is not None:
            norms.bounds.take(states, i, gradient)  # type: ignore[arg-type]
        if kind == "none":
            continue
        whole = (total if sums[-1] else 0.0) + (arrived if last[-1] is not None else 0.0)
        assert isinstance(whole, Tensor)
        exact.note(states, i, float(whole.double().square().sum()))  # type: ignore[arg-type]
        if kind == "exact":
            norms.note(states, i, float(whole.double().square().sum()))  # type: ignore[arg-type]
    bound = norms.bound([(states, last, sums)])  # type: ignore[list-item]
    total_norm = float(exact.total())
    assert total_norm <= bound * (1 + 1e-5)
    clipping = Clipping(max_norm=bound)
    assert not clipping.keeps(bound)
    clipping.max_norm = bound * (1 + 2e-4) + 2e-5
    assert clipping.keeps(bound)
    assert clipping.choose(exact.total()) is None


def test_what_is_not_known_is_no_bound() -> None:
    norms, states = Norms(in_passing=True), States(1, torch.float32)
    parts: Any = [(states, [torch.ones(3)], [True])]
    assert norms.bound(parts) == math.inf
    norms.bounds.note_sum(states, 0, 3.0)  # type: ignore[arg-type]
    assert norms.bound(parts) == math.inf
    norms.bounds.take(states, 0, torch.ones(3))  # type: ignore[arg-type]
    assert norms.bound(parts) == pytest.approx(2 * math.sqrt(3))
    norms.begin(wanted=True, next_may_end=False)
    norms.bounds.take(states, 0, torch.ones(3).double())  # type: ignore[arg-type]
    assert norms.bound(parts) == math.inf  # it is rounded on its way
    norms.bounds.take(states, 0, torch.ones(3))  # type: ignore[arg-type]
    norms.bounds.note_sum(states, 0, None)  # type: ignore[arg-type]
    assert norms.bound(parts) == math.inf
    for bound in (math.inf, math.nan, 1e19):  # torch squares norms in float32
        for limit in (None, 1e30):
            assert not Clipping(skip_nonfinite=True, max_norm=limit).keeps(bound)
    assert Clipping(skip_nonfinite=True).keeps(1e17)
    assert not Clipping(max_norm=0.0).keeps(0.0)
