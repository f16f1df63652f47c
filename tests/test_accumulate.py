"""`accumulate=`: several backwards make a step, and the sum is plain PyTorch's."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lohan_fx.api import LohanModule
from lohan_fx.errors import LohanError, StepError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import SCHEDULES
from lohan_fx.runtime.unit_gradients import UnitGradients
from lohan_fx.runtime.unit_updates import UnitUpdates
from lohan_fx.runtime.updates import Updater
from tests.loops import (
    TIERS,
    InjectedError,
    assert_same,
    check,
    compiled,
    evaluate,
    sometimes,
    updater_of,
    windows,
)
from tests.models import loss_of, make
from tests.training import (
    Training,
    identical,
    remember_captures,
    training_of,
)

QUICK = {
    ("gpt2", "ssd", "optimized"),
    ("gpt2", "ssd", "deferred"),
    ("gpt2", "host", "overlapped"),
    ("gpt2", "device", "serial"),
    ("frozen", "ssd", "naive"),
    ("frozen", "host", "deferred"),
    ("tied", "ssd", "serial"),
    ("mlp", "device", "optimized"),
}


@pytest.mark.parametrize(
    ("name", "states", "schedule"),
    [
        pytest.param(*row, marks=() if row in QUICK else pytest.mark.slow)
        for row in itertools.product(
            ("gpt2", "llama", "mlp", "resnet", "frozen", "tied"), TIERS, SCHEDULES
        )
    ],
)
def test_steps_of_several_backwards(
    name: str,
    states: str,
    schedule: str,
    hw: HardwareProfile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Full ones, and one that optimizer.step() ends early; with evaluations between backwards."""

    def between(model: nn.Module, _: Training) -> None:
        if not isinstance(model, LohanModule) or not updater_of(model).pending:
            evaluate(name, model, inputs)

    inputs = make(name)[1]
    loop = windows(name, (3, 1, 3), between=between)
    check(name, loop, hw, monkeypatch, states=states, schedule=schedule, accumulate=3)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("states", ["host", "ssd"])
def test_other_optimizers(
    optimizer: str, states: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = windows("mlp", (2, 2, 2))
    check("mlp", loop, hw, monkeypatch, optimizer=optimizer, states=states, accumulate=2)


@pytest.mark.parametrize("strategy", ["memferry", "go-memferry", "lohan", "zero-infinity"])
def test_strategies(strategy: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among them those that write gradients to the host as they are made."""
    check("gpt2", windows("gpt2", (2, 2)), hw, monkeypatch, strategy=strategy, accumulate=2)


MORE_MIXED = [("device", "bf16"), ("host", "fp16"), ("ssd", "fp16")]


def marked(model: nn.Module, last: bool) -> Any:
    return nullcontext() if last or not isinstance(model, LohanModule) else model.no_sync()


@pytest.mark.parametrize("schedule", ["optimized", "deferred"])
@pytest.mark.parametrize("states", TIERS)
def test_the_loop_says_which_backward_is_the_last(
    states: str, schedule: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loop(model: nn.Module, training: Training, inputs: dict[str, Any]) -> list[Tensor]:
        noted = []
        torch.manual_seed(0)
        for size in (1, 3, 2):
            for k in range(size):
                with marked(model, k + 1 == size):
                    loss = loss_of("mlp", model(**inputs))
                    loss.backward()
                noted.append(loss.detach())
            training.step()
        return noted

    options = {"states": states, "schedule": schedule, "accumulate": "manual"}
    check("mlp", loop, hw, monkeypatch, **options)


@pytest.mark.parametrize(
    ("states", "schedule"),
    [
        ("device", "serial"),
        ("device", "optimized"),
        ("host", "naive"),
        ("host", "deferred"),
        ("ssd", "overlapped"),
        ("ssd", "deferred"),
    ],
)
def test_parameters_that_some_backwards_do_not_reach(
    states: str, schedule: str, hw: HardwareProfile
) -> None:
    """The last backward need not bring a gradient of what an earlier one did (DeepSpeed #5241)."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        x = torch.linspace(-1, 1, 32).view(4, 8)
        noted = []
        for uses in ((True, False), (False, True), (False, False), (True, True)):
            for use in uses:
                loss = model(x, use)
                loss.backward()
                noted.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        return noted

    (plain, its), (model, optimizer) = sometimes()
    wanted = loop(plain, its)
    made = compiled(model, optimizer, hw, states=states, schedule=schedule, accumulate=2)
    found = loop(made, optimizer)
    made.lohan.close()
    assert all(map(identical, found, wanted))
    assert_same(model, optimizer, plain, its)


@pytest.mark.parametrize("states", TIERS)
def test_what_a_loop_may_do_in_between(
    states: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of other shapes; steps without a backward; resets in the middle, of all kinds; the
    learning rate and betas change."""

    def loop(model: nn.Module, training: Training, inputs: dict[str, Any]) -> list[Tensor]:
        optimizer, noted = training.optimizer, []
        torch.manual_seed(0)

        def backward(size: int) -> None:
            loss = loss_of("mlp", model(**{k: v[:size] for k, v in inputs.items()}))
            loss.backward()
            noted.append(loss.detach())

        resets = (
            optimizer.zero_grad,
            lambda: optimizer.zero_grad(set_to_none=False),
            model.zero_grad,
            lambda: model.zero_grad(set_to_none=False),
        )
        for k, reset in enumerate(resets):
            backward(6)
            reset()
            backward(4)
            backward(6)
            optimizer.step()
            optimizer.zero_grad()
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.5
            optimizer.param_groups[1]["betas"] = (0.5 + 0.1 * k, 0.9)
        return noted

    check("mlp", loop, hw, None, states=states, accumulate=2)


@pytest.mark.parametrize("states", TIERS)
def test_states_are_saved_and_loaded_in_the_middle(
    states: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of the last step; the sum is not part of them, and goes on."""

    def loop(model: nn.Module, training: Training, inputs: dict[str, Any]) -> list[Tensor]:
        noted = []
        torch.manual_seed(0)
        for k in range(6):
            loss_of("mlp", model(**inputs)).backward()
            if k % 2:
                training.step()
                continue
            saved = training.optimizer.state_dict()
            for _, state in sorted(saved["state"].items()):
                noted += [value.clone() for _, value in sorted(state.items())]
            training.optimizer.load_state_dict(saved)
            model.load_state_dict({n: v.clone() for n, v in model.state_dict().items()})
        return noted

    check("mlp", loop, hw, monkeypatch, states=states, accumulate=2)


@pytest.mark.parametrize(
    ("states", "dtype"),
    [("ssd", "bf16"), *(pytest.param(*x, marks=pytest.mark.slow) for x in MORE_MIXED)],
)
def test_sums_are_of_the_masters_dtype(
    states: str, dtype: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those that users see with gradients="kept", which are checked against plain sums."""
    remember_captures(monkeypatch, "gpt2")
    sides = []
    for options in ({"accumulate": 3}, {"gradients": "kept"}):
        model, inputs = make("gpt2")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        made = compiled(model, optimizer, hw, states=states, dtype=dtype, **options)
        losses = []
        torch.manual_seed(0)
        for _ in range(2):
            for _ in range(3):
                loss = made(**inputs).loss
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        made.lohan.close()
        sides.append([*losses, *model.parameters()])
    assert all(map(identical, *sides))


def test_what_moves(hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward that is not the last moves no states but the sums; the first one reads none."""
    remember_captures(monkeypatch, "mlp")
    model, inputs = make("mlp")
    training = training_of("adam", model)
    options = {"states": "ssd", "swap_to": "host", "accumulate": 3}
    made = compiled(model, training.optimizer, hw, **options)
    units = made.lohan.prepare(**inputs).workload.units
    sums = sum(u.accumulator_bytes for u in units)
    moved = []
    for k in range(6):
        loss = loss_of("mlp", made(**inputs))
        before = made.lohan.counters
        loss.backward()
        if k % 3 == 2:
            training.step()
        made.lohan.sync()
        moved.append(made.lohan.counters.minus(before))
    fetched = moved[0].ssd_read_bytes
    assert (
        [m.ssd_write_bytes for m in moved[:2]]
        == [sums, sums]
        == [m.ssd_write_bytes for m in moved[3:5]]
    )
    assert moved[1].ssd_read_bytes == moved[4].ssd_read_bytes == fetched + sums
    assert moved[3].ssd_read_bytes == fetched
    assert moved[2].ssd_read_bytes == fetched + sum(u.update_read_bytes for u in units)
    assert moved[2].ssd_write_bytes == sum(u.update_write_bytes for u in units)
    made.lohan.close()


# -- failures --------------------------------------------------------------------------------------


QUICK_FAULTS = {
    ("forward", "ssd", "overlapped"),
    ("backward", "device", "serial"),
    ("backward", "ssd", "optimized"),
    ("backward", "host", "deferred"),
    ("addition", "ssd", "deferred"),
    ("addition", "host", "naive"),
    ("addition", "ssd", "overlapped"),
}


@pytest.mark.parametrize(
    ("where", "states", "schedule"),
    [
        pytest.param(*row, marks=() if row in QUICK_FAULTS else pytest.mark.slow)
        for row in itertools.product(("forward", "backward", "addition"), TIERS, SCHEDULES)
    ],
)
def test_an_exception_in_the_middle(
    where: str,
    states: str,
    schedule: str,
    hw: HardwareProfile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A failed forward changes nothing. A failed backward drops the step's sums: what follows is
    a step of its own, as after zero_grad."""
    remember_captures(monkeypatch, "gpt2")
    plain, inputs = make("gpt2")
    its = training_of("adam", plain)
    model, batch = make("gpt2")
    training = training_of("adam", model)
    made = compiled(model, training.optimizer, hw, states=states, schedule=schedule, accumulate=3)
    sides = ((plain, its, inputs), (made, training, batch))

    def backward(side: nn.Module, given: dict[str, Any], seed: int) -> None:
        torch.manual_seed(seed)
        loss_of("gpt2", side(**given)).backward()

    def steps(num_backwards: int, seed: int) -> None:
        for side, each, given in sides:
            for k in range(num_backwards):
                backward(side, given, seed + k)
            if num_backwards == 3 or where == "forward":
                each.step()

    steps(3, 0)
    for side, _, given in sides:
        backward(side, given, 10)
    if where == "forward":
        with pytest.raises(IndexError):
            made(**{**batch, "input_ids": batch["input_ids"] + 10_000})
        steps(2, 20)
    else:
        target, method = (Updater, "emit") if where == "backward" else (UnitGradients, "add")
        original, calls = getattr(target, method), itertools.count()

        def fail(*args: Any, **how: Any) -> Any:
            if next(calls) == 1:
                raise InjectedError
            return original(*args, **how)

        def backward_and_sync() -> None:
            backward(made, batch, 11)
            made.lohan.sync()

        with monkeypatch.context() as patch:
            patch.setattr(target, method, fail)
            with pytest.raises(InjectedError):
                backward_and_sync()
        its.optimizer.zero_grad()
    steps(3, 30)
    steps(3, 40)
    made.lohan.close()
    assert_same(model, training.optimizer, plain, its.optimizer)


def test_an_exception_in_the_last_backward(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If units were updated, the model stands between two steps, and says so."""
    remember_captures(monkeypatch, "gpt2")
    model, inputs = make("gpt2")
    training = training_of("adam", model)
    made = compiled(model, training.optimizer, hw, states="device", accumulate=2)
    loss_of("gpt2", made(**inputs)).backward()
    loss = loss_of("gpt2", made(**inputs))
    original, calls = UnitUpdates.run, itertools.count()

    def fail(*args: Any) -> None:
        if next(calls) == 1:
            raise InjectedError
        original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(UnitUpdates, "run", fail)
        with pytest.raises(InjectedError):
            loss.backward()
    with pytest.raises(StepError, match="between two steps"):
        made(**inputs)
    made.lohan.close()


def test_what_is_refused(hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    remember_captures(monkeypatch, "mlp")
    model, _ = make("mlp")
    optimizer = training_of("adam", model).optimizer
    for wrong in (0, -1, True, 1.5, "sometimes"):
        with pytest.raises(LohanError, match="'manual' or a number of backwards"):
            compiled(model, optimizer, hw, accumulate=wrong)
    with pytest.raises(LohanError, match=r"accumulate= with gradients='kept'.*in the loop"):
        compiled(model, optimizer, hw, accumulate=2, gradients="kept")
    with pytest.raises(LohanError, match="accumulate= needs optimizer="):
        compiled(model, None, hw, accumulate=2)  # type: ignore[arg-type]
    made = compiled(model, optimizer, hw, accumulate=2)
    with pytest.raises(StepError, match="accumulate='manual'"), made.no_sync():
        pass
    made.lohan.close()


@pytest.mark.parametrize(
    ("accumulate", "said"),
    [
        (1, r"^backward ran, but .* compile with accumulate= or gradients='kept'$"),
        (2, r"^2 of 2 backwards of accumulate=2 have run, .*: call optimizer\.step\(\) before"),
        ("manual", r"^a backward outside model\.no_sync\(\) ran.* inside model\.no_sync\(\)$"),
    ],
    ids=["1", "2", "manual"],
)
def test_a_backward_too_many_says_how_many_make_a_step(
    accumulate: Any, said: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not ask for what the user wrote already."""
    remember_captures(monkeypatch, "mlp")
    model, inputs = make("mlp")
    made = compiled(model, training_of("adam", model).optimizer, hw, accumulate=accumulate)
    for more in (False,) if accumulate == 1 else (True, False):
        with made.no_sync() if accumulate == "manual" and more else nullcontext():
            loss_of("mlp", made(**inputs)).backward()
    with pytest.raises(StepError, match=said):
        made(**inputs)
    made.lohan.close()
