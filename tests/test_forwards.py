"""`forwards=`: several forwards wait for their backward, as in a loss that calls a module twice."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lohan_fx import footprint
from lohan_fx.compiled import lookup
from lohan_fx.compiled.programs import CompiledProgram
from lohan_fx.errors import InsufficientMemoryError, LohanError, StepError, format_need
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import SCHEDULES, Plan
from lohan_fx.planners import PlannerOptions, make_plan
from lohan_fx.program import waiting_bytes
from lohan_fx.runtime.updates import Updater
from lohan_fx.workload import Workload
from tests.loops import TIERS, InjectedError, check, compiled, evaluate, updater_of
from tests.models import loss_of, make
from tests.training import (
    Squeezed,
    Training,
    alternating,
    identical,
    remember_captures,
    training_of,
)


def half(inputs: dict[str, Any], k: int) -> dict[str, Any]:
    """Another batch of the same shapes."""
    return {n: v.roll(k, 0) if isinstance(v, Tensor) else v for n, v in inputs.items()}


def twice(name: str, num_calls: int = 2, accumulate: int = 1) -> Any:
    """One loss of several calls; noted with the gradients of the last one in plain PyTorch."""

    def loop(model: nn.Module, training: Training, inputs: dict[str, Any]) -> list[Tensor]:
        noted = []
        torch.manual_seed(0)
        for _ in range(2):
            for _ in range(accumulate):
                losses = [loss_of(name, model(**half(inputs, k))) for k in range(num_calls)]
                loss = torch.stack([(k + 1) * x for k, x in enumerate(losses)]).sum()
                loss.backward()
                noted.append(loss.detach())
            training.step()
        return noted

    return loop


QUICK = {
    ("gpt2", "ssd", "optimized"),
    ("gpt2", "host", "deferred"),
    ("frozen", "ssd", "overlapped"),
    ("tied", "device", "naive"),
    ("mlp", "host", "serial"),
}


TIED = ("gpt2", "tied")
"""Plain PyTorch adds the gradients of every use of a parameter one by one, over all calls; a
compiled model those of a call first: equal to rounding."""


@pytest.mark.parametrize(
    ("name", "states", "schedule"),
    [
        pytest.param(*row, marks=() if row in QUICK else pytest.mark.slow)
        for row in itertools.product(("gpt2", "mlp", "resnet", "frozen", "tied"), TIERS, SCHEDULES)
    ],
)
@pytest.mark.parametrize("swap_to", ["host", "ssd"])
def test_a_module_that_is_called_twice(
    swap_to: str,
    name: str,
    states: str,
    schedule: str,
    hw: HardwareProfile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"states": states, "schedule": schedule, "swap_to": swap_to}
    if name in TIED:
        options.update(optimizer="sgd", exact=False)
    check(name, twice(name), hw, monkeypatch, forwards=2, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 2},
        {"gradients": "kept"},
        {"accumulate": 2, "clip_grad_value": 1e-3},
    ],
)
def test_with_accumulation(
    options: dict[str, Any], hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain PyTorch adds up the gradients of one backward before it adds them to others."""

    def loop(model: nn.Module, training: Training, inputs: dict[str, Any]) -> list[Tensor]:
        if "clip_grad_value" in options and not hasattr(model, "lohan"):
            training.optimizer.register_step_pre_hook(
                lambda *_: torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
            )
        return list(twice("mlp", 3, 2)(model, training, inputs))

    options = {"optimizer": "sgd", "states": "ssd", "forwards": 3, **options}
    check("mlp", loop, hw, monkeypatch, exact=False, **options)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def towers() -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    model = Tower()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), torch.randn(4, 8)


@pytest.mark.parametrize(
    ("kind", "states"), alternating(("contrast", "chain", "shapes", "both orders"), TIERS)
)
def test_what_a_loss_may_do(kind: str, states: str, hw: HardwareProfile) -> None:
    """Compare outputs, feed one into the other, take batches of other shapes; backwards of losses
    of their own, in any order."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> list[Tensor]:
        noted = []
        for _ in range(3):
            if kind == "both orders":
                for order in ((0, 1), (1, 0)):
                    losses = [model(x * k).square().mean() for k in (1, 2)]
                    for k in order:
                        losses[k].backward()
                    noted += losses
                    optimizer.step()
                    optimizer.zero_grad()
                continue
            if kind == "contrast":
                loss = (model(x) - model(x.flip(0)).detach() * 0.5).square().mean()
                loss = loss + (model(x + 1) * model(x - 1)).sum()
            elif kind == "chain":
                loss = model(model(model(x))).square().mean()
            else:
                loss = model(x).mean() + model(x[:2]).square().sum() + model(x[:3]).sum()
            loss.backward()
            noted.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        return noted

    plain, its, x = towers()
    wanted = loop(plain, its, x)
    model, optimizer, x = towers()
    made = compiled(model, optimizer, hw, states=states, forwards=4, outputs="all")
    if kind == "shapes":
        for size in (4, 2, 3):
            made.lohan.prepare(x[:size])
    found = loop(made, optimizer, x)
    made.lohan.close()
    assert all(map(identical, found, wanted))
    assert all(map(identical, model.parameters(), plain.parameters()))


def test_a_forward_whose_backward_never_comes(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates wait for optimizer.step() then; the oldest one too many is dropped."""

    def loop(model: nn.Module, training: Training, inputs: dict[str, Any]) -> list[Tensor]:
        noted = []
        torch.manual_seed(0)
        for _ in range(3):
            noted.append(loss_of("mlp", model(**inputs)).detach())
            loss = loss_of("mlp", model(**inputs))
            loss.backward()
            noted.append(loss.detach())
            training.step()
        return noted

    check("mlp", loop, hw, monkeypatch, states="host", forwards=2)
    model, inputs = make("mlp")
    made = compiled(model, training_of("adam", model).optimizer, hw, forwards=2)
    late = loss_of("mlp", made(**inputs))
    for _ in range(2):
        loss_of("mlp", made(**inputs))
    with pytest.raises(StepError, match="compile with forwards=n"):
        late.backward()
    made.lohan.close()


@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("states", TIERS)
def test_an_evaluation_between_a_forward_and_its_backward(
    states: str, forwards: int, hw: HardwareProfile
) -> None:
    """It wants forwards=2; one after optimizer.step() does not."""
    plain, its, x = towers()
    model, optimizer, x = towers()
    made = compiled(model, optimizer, hw, states=states, forwards=forwards)

    def evaluate(module: nn.Module) -> Tensor:
        with torch.no_grad():
            return module(x + 1)

    for between in (False, True) if forwards == 1 else (True, False, True):
        losses = [m(x).square().mean() for m in (made, plain)]
        if between:
            assert identical(evaluate(made), evaluate(plain))
        losses[1].backward()
        if between and forwards == 1:
            with pytest.raises(StepError, match=r"an evaluation's included.*forwards=n"):
                losses[0].backward()
            break
        losses[0].backward()
        for each in (optimizer, its):
            each.step()
            each.zero_grad()
        assert identical(*losses)
        assert identical(evaluate(made), evaluate(plain))
    made.lohan.close()


@pytest.mark.parametrize("states", TIERS)
def test_a_backward_that_fails(
    states: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two: nothing was updated, and the next step is right."""
    remember_captures(monkeypatch, "mlp")
    plain, inputs = make("mlp")
    its = training_of("adam", plain)
    model, batch = make("mlp")
    training = training_of("adam", model)
    options = {"states": states, "schedule": "deferred", "forwards": 2}
    made = compiled(model, training.optimizer, hw, **options)
    loss = sum(loss_of("mlp", made(**half(batch, k))) for k in range(2))
    num_units = len(updater_of(made)._states.trained)
    original, calls = Updater.emit, itertools.count()

    def fail(*args: Any, **how: Any) -> None:
        if next(calls) == num_units + 1:
            raise InjectedError
        original(*args, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Updater, "emit", fail)
        with pytest.raises(InjectedError):
            loss.backward()  # type: ignore[union-attr]
    training.optimizer.zero_grad()
    wanted = twice("mlp")(plain, its, inputs)
    assert all(map(identical, twice("mlp")(made, training, batch), wanted))
    made.lohan.close()
    assert all(map(identical, model.parameters(), plain.parameters()))


@pytest.mark.parametrize("swap_to", ["host", "ssd"])
def test_memory_is_planned_for_all(
    swap_to: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember_captures(monkeypatch, "gpt2")
    model, inputs = make("gpt2")
    optimizer = training_of("adam", model).optimizer
    options = {"strategy": "swap-all", "states": "host", "swap_to": swap_to, "forwards": 3}
    made = compiled(model, optimizer, hw, **options)
    program = made.lohan.prepare(**inputs)
    memory = made.lohan.memory
    assert memory is not None
    needed = {"host": footprint.host_bytes_needed, "ssd": footprint.ssd_bytes_needed}[swap_to]
    one = needed(program.workload, program.plan)["residuals"]
    assert one > 0
    store = memory.store
    assert (store.host_bytes if swap_to == "host" else store.ssd_bytes) == one
    place = store.arena if swap_to == "host" else store.file
    assert place is not None
    assert place.num_bytes == 3 * one
    held = waiting_bytes(program.instructions)
    assert 0 < held < program.memory.peak_bytes
    peak = program.memory.peak_bytes + 2 * held
    made.lohan.close()
    tight = {"device": peak, "host": "64MiB", "ssd": "64MiB"}
    again = compiled(model, optimizer, hw, **options, memory=tight)
    again.lohan.prepare(**inputs)
    again.lohan.close()
    keeps = {**options, "strategy": "keep-all"}
    none = compiled(model, optimizer, hw, **keeps, memory=tight)
    with pytest.raises(InsufficientMemoryError):
        none.lohan.prepare(**inputs)
    none.lohan.close()


def test_host_memory_that_waiting_forwards_lack_is_named(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for one forward, but not for what eight others hold."""
    remember_captures(monkeypatch, "gpt2")
    model, inputs = make("gpt2")
    optimizer = training_of("adam", model).optimizer
    options = {"strategy": "swap-all", "states": "device", "swap_to": "host"}
    one = compiled(model, optimizer, hw, **options)
    peak = one.lohan.prepare(**inputs).plan.prediction.peak_host_bytes
    one.lohan.close()
    tight = {"device": "64MiB", "host": peak, "ssd": 0}
    made = compiled(model, optimizer, hw, **options, forwards=9, memory=tight)
    with pytest.raises(InsufficientMemoryError, match="what waiting forwards hold") as error:
        made.lohan.prepare(**inputs)
    assert error.value.tier == "host"
    assert (error.value.need_bytes, error.value.have_bytes) == (9 * peak, peak)
    made.lohan.close()
    enough = compiled(
        model, optimizer, hw, **options, forwards=9, memory={**tight, "host": 9 * peak}
    )
    enough.lohan.prepare(**inputs)
    enough.lohan.close()


@pytest.mark.parametrize("strategy", ["lohan", "pareto"])
def test_any_device_budget_from_the_need_on_has_a_plan(
    strategy: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan for a large part of it keeps so much that waiting forwards leave the next one less
    than any plan needs: one for a smaller part does."""
    remember_captures(monkeypatch, "gpt2")
    model, inputs = make("gpt2")
    optimizer = training_of("adam", model).optimizer

    def whole(device: int, forwards: int = 2) -> int:
        """What the plan needs, with a forward that waits."""
        memory = {"device": device, "host": "64MiB", "ssd": "64MiB"}
        options = {"strategy": strategy, "states": "host", "forwards": forwards, "memory": memory}
        made = compiled(model, optimizer, hw, **options)
        try:
            program = made.lohan.prepare(**inputs)
            return program.memory.peak_bytes + waiting_bytes(program.instructions)
        finally:
            made.lohan.close()

    most = whole(2**26)
    with pytest.raises(InsufficientMemoryError, match="while one forward waits") as error:
        whole(4096)
    need, have = error.value.need_bytes, error.value.have_bytes
    assert have == 4096
    assert error.value.at_peak[0][0] == "what waiting forwards hold (forwards=2)"
    alone = need - error.value.at_peak[0][1]
    assert f"One step alone needs {format_need(alone)}" in error.value.advice
    assert whole(alone, forwards=1) == need
    assert alone < need < most
    steps = 8 if strategy == "lohan" else 2
    for k in range(steps + 1):
        device = need + k * (most - need) // steps
        assert need <= whole(device) <= device
    with pytest.raises(InsufficientMemoryError, match="while one forward waits") as error:
        whole(need - 1)
    assert error.value.need_bytes == need


def test_programs_leave_room_for_what_waits_of_others(
    hw: HardwareProfile,
) -> None:
    """An evaluation for all forwards that may wait, a step of another shape for the others, if
    there is a plan for that."""
    model, inputs = make("gpt2")
    optimizer = training_of("adam", model).optimizer

    def repeated(times: int) -> dict[str, Any]:
        return {n: x.repeat(times, 1) if isinstance(x, Tensor) else x for n, x in inputs.items()}

    fewer = {name: x[:1] if isinstance(x, Tensor) else x for name, x in inputs.items()}
    options = {"strategy": "lohan", "states": "host", "forwards": 2}
    made = compiled(model, optimizer, hw, **options)
    program = made.lohan.prepare(**inputs)
    most = program.memory.peak_bytes + waiting_bytes(program.instructions)
    made.lohan.close()
    device = most + 2**16
    memory = {"device": device, "host": "64MiB", "ssd": "64MiB"}
    made = compiled(model, optimizer, hw, **options, memory=memory)
    first = made.lohan.prepare(**inputs)
    held = waiting_bytes(first.instructions)
    assert first.memory.peak_bytes + held == most

    def note(plan: Plan) -> bool:
        return any("may exceed the device budget" in note for note in plan.notes)

    small = made.lohan.prepare(**fewer)
    assert max(first.memory.peak_bytes, small.memory.peak_bytes) + held <= device
    assert not note(small.plan)
    for batch, fits in ((inputs, True), (repeated(2), True), (repeated(8), False)):
        with torch.no_grad():
            made(**batch)
        evaluation = next(reversed(made.lohan.programs.values()))
        assert not evaluation.executor.captured.has_backward
        if fits:
            assert evaluation.memory.peak_bytes + 2 * held <= device
        else:  # it runs all the same: as a rule, nothing waits then
            assert device - held < evaluation.memory.peak_bytes <= device
        assert note(evaluation.plan) == (not fits)
    made.lohan.close()


@pytest.mark.parametrize("first", ["training", "evaluation", "prepared", "smaller batches"])
def test_evaluations_leave_room_whichever_comes_first(
    first: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that leaves too little for a training program made behind it is made again, and counts
    once. It gives what plain PyTorch does, beside a forward that waits."""
    plain, inputs = make("gpt2")
    model, _ = make("gpt2")
    optimizer = training_of("adam", model).optimizer
    options = {"strategy": "lohan", "states": "host", "forwards": 2}
    made = compiled(model, optimizer, hw, **options)
    program = made.lohan.prepare(**inputs)
    most = program.memory.peak_bytes + waiting_bytes(program.instructions)
    made.lohan.close()
    memory = {"device": most, "host": "64MiB", "ssd": "64MiB"}
    made = compiled(model, optimizer, hw, **options, memory=memory)
    programs = made.lohan.programs
    monkeypatch.setattr(lookup, "MAX_EVALUATIONS", 1)

    def evaluation() -> CompiledProgram:
        (found,) = [p for p in programs.values() if not p.executor.captured.has_backward]
        return found

    fewer = {n: x[:1] if isinstance(x, Tensor) else x for n, x in inputs.items()}
    if first == "smaller batches":
        made.lohan.prepare(**fewer)
    before = None
    if first != "training":
        with torch.no_grad():
            made.lohan.prepare(**inputs) if first == "prepared" else made(**inputs)
        before = evaluation()
        made.lohan.prepare(**inputs)
    loss = loss_of("gpt2", made(**inputs))
    assert identical(evaluate("gpt2", made, inputs), evaluate("gpt2", plain, inputs))
    found = evaluation()
    assert before is not found
    train = [p for p in programs.values() if p.executor.captured.has_backward]
    held = max(waiting_bytes(p.instructions) for p in train)
    assert found.memory.peak_bytes + 2 * held <= most
    if before is not None:
        assert before.memory.peak_bytes + 2 * held > most
    assert not any("may exceed the device budget" in note for note in found.plan.notes)
    loss.backward()
    optimizer.step()
    made.lohan.prepare(**fewer)  # whose forwards hold less
    assert evaluation() is found
    assert made.lohan._programs.num_evaluations == 1
    made.lohan.close()


def test_a_larger_part_is_planned_for_where_that_is_faster(hw: HardwareProfile) -> None:
    """What the plan for the whole budget holds would leave the least for the one that runs."""
    model, inputs = make("gpt2")
    optimizer = training_of("adam", model).optimizer
    tried: list[float] = []

    def strategy(
        workload: Workload, hw: HardwareProfile, budget: MemoryBudget, options: PlannerOptions
    ) -> Plan:
        plan = make_plan("lohan", workload, hw, budget, options)
        step_s = 1 / budget.device_bytes
        tried.append(step_s)
        return replace(plan, prediction=replace(plan.prediction, step_s=step_s))

    def whole(device: int) -> tuple[int, Plan]:
        memory = {"device": device, "host": "64MiB", "ssd": "64MiB"}
        options = {"strategy": strategy, "states": "host", "forwards": 2, "memory": memory}
        made = compiled(model, optimizer, hw, **options)
        program = made.lohan.prepare(**inputs)
        made.lohan.close()
        return program.memory.peak_bytes + waiting_bytes(program.instructions), program.plan

    most, plan = whole(2**26)
    assert tried == [plan.prediction.step_s]
    tried.clear()
    device = (plan.prediction.peak_device_bytes + most) // 2
    size, plan = whole(device)
    assert size <= device
    assert 1 / tried[0] == pytest.approx(device)
    assert tried[0] < plan.prediction.step_s < tried[1]


def test_strategies_use_what_is_left(hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = twice("frozen")
    check("frozen", loop, hw, monkeypatch, strategy=Squeezed("pareto"), forwards=2)


def test_what_is_refused(hw: HardwareProfile) -> None:
    model, _ = make("mlp")
    optimizer = training_of("adam", model).optimizer
    for wrong in (0, True, 1.5):
        with pytest.raises(LohanError, match=r"forwards=.*at least 1"):
            compiled(model, optimizer, hw, forwards=wrong)
