"""Schedule "deferred": updates wait for optimizer.step(), then run beside the next forward."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lohan_fx.cost_model import Demand, iteration_time
from lohan_fx.errors import StepError
from lohan_fx.footprint import gradient_bytes_needed, has_own_buffer
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import UnitPlan
from lohan_fx.runtime.guards import LentGradient
from lohan_fx.runtime.unit_updates import UnitUpdates
from lohan_fx.simulate import simulate
from lohan_fx.workload import Unit
from tests.loops import TIERS, InjectedError, assert_same, check, compiled, updater_of
from tests.models import loss_of, make
from tests.test_overlap import hash_of, slow_updates
from tests.test_simulate import machine, make_the_plan, make_unit, make_workload, spans
from tests.training import (
    Squeezed,
    Training,
    alternating,
    ended,
    identical,
    model_threads,
    remember_captures,
    training_of,
)

LATE_TIERS = ("host", "ssd")


def running(model: nn.Module) -> bool:
    return any(not t.done() for t in updater_of(model)._jobs.tickets)  # type: ignore[arg-type]


def steps(name: str, model: nn.Module, training: Training, inputs: Any, num: int) -> list[Tensor]:
    noted = []
    for seed in range(num):
        torch.manual_seed(seed)
        loss = loss_of(name, model(**inputs))
        loss.backward()
        training.step()
        noted.append(loss.detach())
    return noted


QUICK = {
    ("gpt2", "ssd", "swap-all"),
    ("gpt2", "host", "recompute-all"),
    ("mlp", "device", "swap-all"),
    ("frozen", "ssd", "swap-all"),
    ("tied", "host", "swap-all"),
}


@pytest.mark.parametrize(
    ("name", "states", "strategy"),
    [
        pytest.param(*row, marks=() if row in QUICK else pytest.mark.slow)
        for row in itertools.product(
            ("gpt2", "llama", "mlp", "resnet", "frozen", "tied"),
            TIERS,
            ("swap-all", "recompute-all", "random"),
        )
    ],
)
def test_late_updates_change_nothing(
    name: str,
    states: str,
    strategy: str,
    hw: HardwareProfile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None begins before optimizer.step(), and some still run when it has returned."""
    slow_updates(monkeypatch, 0.02, seed=hash_of(name, states))
    late = []

    def loop(model: nn.Module, training: Training, inputs: dict[str, Any]) -> list[Tensor]:
        noted = []
        for seed in range(3):
            torch.manual_seed(seed)
            loss = loss_of(name, model(**inputs))
            loss.backward()
            if hasattr(model, "lohan"):
                assert not updater_of(model)._updates.begun  # type: ignore[arg-type]
            training.step()
            if hasattr(model, "lohan"):
                late.append(running(model))
            noted.append(loss.detach())
        return noted

    options = {"states": states, "schedule": "deferred", "strategy": Squeezed(strategy)}
    check(name, loop, hw, monkeypatch, **options)
    assert all(late) == (states != "device")


@pytest.mark.parametrize("schedule", ["serial", "deferred", "speculative"])
@pytest.mark.parametrize("states", TIERS)
def test_the_learning_rate_is_that_of_the_step(
    schedule: str, states: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in plain PyTorch it may change between backward and optimizer.step(), and after it."""

    def loop(model: nn.Module, training: Training, inputs: dict[str, Any]) -> list[Tensor]:
        noted = []
        torch.manual_seed(0)
        for k in range(3):
            loss = loss_of("mlp", model(**inputs))
            loss.backward()
            for group in training.optimizer.param_groups:
                group["lr"] = 1e-3 * (k + 1)
                group["betas"] = (0.5 + 0.1 * k, 0.99)
            training.optimizer.step()
            for group in training.optimizer.param_groups:
                group["lr"] = 1.0
            training.optimizer.zero_grad()
            noted.append(loss.detach())
        return noted

    check("mlp", loop, hw, monkeypatch, states=states, schedule=schedule)


@pytest.mark.parametrize(
    ("how", "states"),
    alternating(("state_dict", "parameters", "sync", "evaluate", "optimizer"), LATE_TIERS),
)
def test_who_asks_gets_updated_weights(
    how: str, states: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_updates(monkeypatch, 0.04)
    remember_captures(monkeypatch, "mlp")
    plain, inputs = make("mlp")
    its = training_of("adam", plain)
    steps("mlp", plain, its, inputs, 2)
    model, batch = make("mlp")
    training = training_of("adam", model)
    made = compiled(model, training.optimizer, hw, states=states, schedule="deferred")
    held = list(made.parameters())
    steps("mlp", made, training, batch, 2)
    assert running(made)
    if how == "evaluate":
        torch.manual_seed(0)
        with torch.no_grad():
            found = loss_of("mlp", made(**batch))
            torch.manual_seed(0)
            assert identical(found, loss_of("mlp", plain(**inputs)))
        made.lohan.sync()
    elif how == "optimizer":
        saved = training.optimizer.state_dict()["state"]
        wanted = its.optimizer.state_dict()["state"]
        for key, values in wanted.items():
            assert all(identical(torch.as_tensor(saved[key][n]), v) for n, v in values.items())
    else:
        ask = {"state_dict": made.state_dict, "sync": made.lohan.sync}
        ask.get(how, lambda: list(made.parameters()))()
    assert not running(made)
    assert all(map(identical, held, plain.parameters()))
    made.lohan.close()


@pytest.mark.parametrize("states", LATE_TIERS)
def test_a_model_that_is_dropped_beside_updates(
    states: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = model_threads()
    slow_updates(monkeypatch, 0.03)
    model, inputs = make("mlp")
    training = training_of("adam", model)
    made = compiled(model, training.optimizer, hw, states=states, schedule="deferred")
    held = list(made.parameters())
    steps("mlp", made, training, inputs, 2)
    assert running(made)
    del made, model, training
    gc.collect()
    assert ended(model_threads() - before)
    assert not list(Path(hw.ssds[0].path).rglob("*"))
    plain, inputs = make("mlp")
    steps("mlp", plain, training_of("adam", plain), inputs, 2)
    assert all(map(identical, held, plain.parameters()))


@pytest.mark.parametrize("states", TIERS)
def test_an_update_that_fails(
    states: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised where the weights are needed next; what took the step is named."""
    remember_captures(monkeypatch, "mlp")
    model, inputs = make("mlp")
    training = training_of("adam", model)
    made = compiled(model, training.optimizer, hw, states=states, schedule="deferred")
    steps("mlp", made, training, inputs, 1)
    made.lohan.sync()
    original, calls = UnitUpdates.run, itertools.count()

    def fail(*args: Any) -> None:
        if next(calls) == 1:
            raise InjectedError
        original(*args)

    def step_and_sync() -> None:
        steps("mlp", made, training, inputs, 1)
        made.lohan.sync()

    with monkeypatch.context() as patch:
        patch.setattr(UnitUpdates, "run", fail)
        with pytest.raises(InjectedError):
            step_and_sync()
    with pytest.raises(StepError, match=r"between two steps: .* took the step"):
        made(**inputs)
    made.lohan.close()
    assert not list(Path(hw.ssds[0].path).rglob("*"))


# -- kept gradients --------------------------------------------------------------------------------


USES = ("read", "zero", "change", "replace", "none", "model", "again")


@pytest.mark.parametrize("states", TIERS)
def test_kept_gradients_beside_updates(
    states: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They can be read, reset in place, changed and replaced at once: updates that still read them
    are waited for."""
    slow_updates(monkeypatch, 0.03)
    lent = []

    def loop(model: nn.Module, training: Training, inputs: dict[str, Any]) -> list[Tensor]:
        optimizer, noted = training.optimizer, []
        parameters = list(model.parameters())
        for seed, then in enumerate(
            ("read", "zero", "change", "replace", "none", "model", "again")
        ):
            torch.manual_seed(seed)
            loss = loss_of("mlp", model(**inputs))
            loss.backward()
            noted.append(loss.detach())
            if then == "replace":
                parameters[0].grad = torch.ones_like(parameters[0])
            optimizer.step()
            if hasattr(model, "lohan"):
                late = running(model)
                lent.append(isinstance(parameters[1].grad, LentGradient))
                assert late == (states != "device")
            if then == "read":
                noted += [p.grad.clone() for p in parameters if p.grad is not None]
            elif then == "zero":
                optimizer.zero_grad(set_to_none=False)
            elif then == "change":
                torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], 2.0)
            elif then == "replace":
                assert parameters[0].grad is not None
                parameters[0].grad.fill_(7.0)
                optimizer.zero_grad()
            elif then == "none":
                optimizer.zero_grad()
            elif then == "model":
                model.zero_grad(set_to_none=False)
        optimizer.step()  # once more, with the same gradients
        noted += [p.grad.clone() for p in parameters if p.grad is not None]
        return noted

    check("mlp", loop, hw, monkeypatch, states=states, schedule="deferred", gradients="kept")
    assert all(lent)


# -- plans -----------------------------------------------------------------------------------------


def unit(tier_bytes: int, *, accumulator: int = 0) -> Unit:
    return Unit(
        name="u",
        block="u",
        parameters=("w",),
        num_params=tier_bytes,
        compute_bytes=tier_bytes,
        state_bytes=2 * tier_bytes + accumulator,
        gradient_bytes=tier_bytes,
        gradients=("g",),
        accumulator_bytes=accumulator,
    )


def test_gradients_wait_in_buffers_of_their_own() -> None:
    """Of all units but resident ones; sums wait where the states are."""
    for tier in LATE_TIERS:
        assert has_own_buffer(unit(4096), tier, "deferred")  # type: ignore[arg-type]
        assert not has_own_buffer(unit(4096, accumulator=4096), tier, "deferred")  # type: ignore[arg-type]
        assert gradient_bytes_needed([unit(4096)], {"u": tier}, "deferred") == 4096  # type: ignore[dict-item]
        two = [unit(4096, accumulator=4096)]
        assert gradient_bytes_needed(two, {"u": tier}, "deferred") == 2 * 4096  # type: ignore[dict-item]
    assert not has_own_buffer(unit(4096), "device", "deferred")


def deferred(tier: Any, params: int = 1) -> Any:
    """Two units; 1 s of forward, 1 s of backward for each; copies of 1 chunk, states of 2."""
    units = [make_unit(f"u{k}", params=params, compute=1, states=2) for k in range(2)]
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
    return simulate(w, make_the_plan(w, units=plans, schedule="deferred"), machine(d2h=2.0))


def test_updates_start_when_backward_has_ended() -> None:
    """The second of two steps: the first one's updates begin with it, u0's first, which forward
    needs first; backward waits for both."""
    made = deferred("host", params=2)
    assert spans(made, "cpu")[:2] == [("update", "u0", 0, 2), ("update", "u1", 2, 4)]
    assert made.step_s == 4 + 1 + 0.5 + 1 + 0.5
    assert (made.forward_s, made.optimizer_s) == (1, 0)
    assert made.traffic.d2h_bytes == 2 * 16 * 2**20


def test_states_on_ssds_are_read_when_backward_has_ended() -> None:
    made = deferred("ssd")
    assert spans(made, "ssd")[:4] == [
        ("read_states", "u0", 0, 2),
        ("read_states", "u1", 2, 4),
        ("write_states", "u0", 4, 7),
        ("write_states", "u1", 7, 10),
    ]
    assert made.step_s == 10 + 3


def test_resident_units_are_updated_after_backward() -> None:
    made = deferred("device")
    assert made.optimizer_s == 14
    assert made.step_s == 1 + 2 + 14


def test_the_closed_form() -> None:
    """The optimizer's work goes beside forward, and no further."""
    hw = machine()
    demand = Demand(forward_s=1.0, backward_s=2.0, num_cpu_params=3)
    assert iteration_time(hw, demand, schedule="deferred").step_s == 3 + 2
    assert iteration_time(hw, demand, schedule="overlapped").step_s == 1 + 2
    assert iteration_time(hw, demand, schedule="serial").step_s == 1 + 2 + 3


def test_the_same_weights_as_other_schedules(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In mixed precision, where plain PyTorch rounds differently."""
    remember_captures(monkeypatch, "gpt2")
    sides = []
    for schedule in ("serial", "deferred"):
        model, inputs = make("gpt2")
        training = training_of("adamw", model)
        options = {"states": "ssd", "dtype": "bf16", "schedule": schedule}
        made = compiled(model, training.optimizer, hw, **options)
        losses = steps("gpt2", made, training, inputs, 3)
        made.lohan.close()
        sides.append((losses, model, training.optimizer))
    (first, model, optimizer), (second, plain, its) = sides
    assert all(map(identical, first, second))
    assert_same(model, optimizer, plain, its)


@pytest.mark.parametrize("schedule", ["overlapped", "deferred"])
def test_resetting_gradients_waits_for_nothing(
    schedule: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_updates(monkeypatch, 0.1)
    remember_captures(monkeypatch, "mlp")
    model, inputs = make("mlp")
    training = training_of("adam", model)
    made = compiled(model, training.optimizer, hw, states="host", schedule=schedule)
    loss_of("mlp", made(**inputs)).backward()
    training.optimizer.step()
    assert running(made)
    made.zero_grad()
    made.zero_grad(set_to_none=False)
    training.optimizer.zero_grad()
    assert running(made)
    made.lohan.close()
