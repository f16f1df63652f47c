"""`gradients="kept"`: `.grad` is the user's, and every loop of plain PyTorch gives its numbers."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from lohan_fx.api import LohanModule
from lohan_fx.errors import LohanError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.runtime.arena import Arena
from lohan_fx.runtime.gradients import Gradients
from lohan_fx.runtime.unit_gradients import UnitGradients
from lohan_fx.runtime.updates import Updater
from tests import loops
from tests.faults import interrupted
from tests.loops import TIERS, InjectedError, sometimes
from tests.models import MLP, loss_of, make
from tests.training import (
    alternating,
    identical,
    remember_captures,
    training_of,
)

Loop = Callable[[nn.Module, torch.optim.Optimizer, dict[str, Any]], list[Tensor]]


def compiled(
    model: nn.Module, optimizer: torch.optim.Optimizer, hw: HardwareProfile, **options: Any
) -> LohanModule:
    return loops.compiled(model, optimizer, hw, **{"gradients": "kept", **options})


def check(
    name: str,
    loop: Loop,
    hw: HardwareProfile,
    patch: pytest.MonkeyPatch | None,
    *,
    optimizer: str = "adamw",
    **options: Any,
) -> None:
    """The loop notes the same tensors with lohan_fx and without, and leaves the same model."""
    if patch is not None:
        remember_captures(patch, name)
    plain, inputs = make(name)
    wanted = loop(plain, training_of(optimizer, plain).optimizer, inputs)
    model, inputs = make(name)
    made = training_of(optimizer, model).optimizer
    found = loop(compiled(model, made, hw, **options), made, inputs)
    assert len(found) == len(wanted) > 0
    assert all(map(identical, found, wanted))
    assert isinstance(model, LohanModule)
    model.lohan.close()
    assert all(map(identical, model.parameters(), plain.parameters()))


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def accumulate(
    name: str, change: Callable[[nn.Module, int], None] = lambda model, step: None, micro: int = 2
) -> Loop:
    """Some backwards, then `change`, then a step; gradients are noted before and after it."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Any) -> list[Tensor]:
        noted = []
        for step in range(3):
            for k in range(micro):
                torch.manual_seed(10 * step + k)
                loss = loss_of(name, model(**inputs)) / micro
                loss.backward()
                noted.append(loss.detach())
            change(model, step)
            noted += gradients(model)
            optimizer.param_groups[0]["lr"] *= 0.9
            optimizer.step()
            noted += gradients(model)
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        return noted

    return loop


def clip(model: nn.Module, _: int) -> None:
    clip_grad_norm_(model.parameters(), 0.1)


def noise(model: nn.Module, step: int) -> None:
    torch.manual_seed(step)
    for p in model.parameters():
        if p.grad is not None:
            p.grad.add_(torch.randn_like(p), alpha=1e-3)


def replace(model: nn.Module, step: int) -> None:
    """Some gradients become others, some go; before the last step a backward adds to that."""
    for k, p in enumerate(model.parameters()):
        if p.grad is not None and k % 3 == step % 3:
            p.grad = None if k % 2 else 2 * p.grad


QUICK = {("gpt2", "ssd"), ("gpt2", "device"), ("mlp", "host"), ("frozen", "ssd"), ("tied", "host")}


@pytest.mark.parametrize(
    ("name", "states"),
    [
        pytest.param(*row, marks=() if row in QUICK else pytest.mark.slow)
        for row in itertools.product(("gpt2", "llama", "mlp", "resnet", "frozen", "tied"), TIERS)
    ],
)
def test_accumulation_and_clipping(
    name: str, states: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(name, accumulate(name, clip), hw, monkeypatch, states=states)


@pytest.mark.parametrize("states", TIERS)
@pytest.mark.parametrize("change", [noise, replace])
def test_gradients_are_the_users(
    change: Callable[[nn.Module, int], None],
    states: str,
    hw: HardwareProfile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check("gpt2", accumulate("gpt2", change, 1), hw, monkeypatch, states=states)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("states", TIERS)
def test_other_optimizers(
    optimizer: str, states: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_value(model: nn.Module, _: int) -> None:
        clip_grad_value_(model.parameters(), 1e-3)

    loop = accumulate("mlp", by_value, 3)
    check("mlp", loop, hw, monkeypatch, optimizer=optimizer, states=states)


@pytest.mark.parametrize("states", TIERS)
def test_what_a_loop_may_do_in_between(states: str, hw: HardwareProfile) -> None:
    """Backwards of other shapes, evaluation before the step, replaced gradients that a backward
    adds to, steps without a backward, and none at all."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Any) -> list[Tensor]:
        torch.manual_seed(0)
        noted = []
        for step in range(2):
            for size in (6, 2):
                part = {k: v[:size] for k, v in inputs.items()}
                loss_of("mlp", model(**part)).backward()
                if size == 6:
                    replace(model, step)
            with torch.no_grad():
                noted.append(loss_of("mlp", model(**inputs)).clone())
            optimizer.step()
            noted.append(loss_of("mlp", model(**inputs)).detach())  # its backward never comes
            optimizer.step()  # with the gradients of the step before, as plain PyTorch
            noted += gradients(model)
            optimizer.zero_grad()
            optimizer.step()
            noted += [p.detach().clone() for p in model.parameters()]
        return noted

    check("mlp", loop, hw, None, states=states)


@pytest.mark.parametrize("states", TIERS)
def test_a_closure(states: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Lightning steps: forward and backward run inside optimizer.step()."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Any) -> list[Tensor]:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of("mlp", model(**inputs))
            loss.backward()
            clip(model, 0)
            return loss.detach()

        torch.manual_seed(0)
        return [torch.as_tensor(optimizer.step(closure)) for _ in range(3)]

    check("mlp", loop, hw, monkeypatch, states=states)


@pytest.mark.parametrize("states", TIERS)
def test_parameters_without_a_gradient(states: str, hw: HardwareProfile) -> None:
    """They are left alone, also by weight decay; a sum may come from one backward only."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        torch.manual_seed(1)
        x = torch.randn(4, 8)
        noted = []
        for uses in ((True, False), (False, True), (False, False)):
            for use in uses:
                loss = model(x, use)
                loss.backward()
                noted.append(loss.detach())
            noted.append(clip_grad_norm_(model.parameters(), 0.01))
            noted += gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        return noted

    (plain, its), (model, optimizer) = sometimes()
    wanted = loop(plain, its)
    made = compiled(model, optimizer, hw, states=states)
    assert all(map(identical, loop(made, optimizer), wanted))
    made.lohan.close()
    assert all(map(identical, model.parameters(), plain.parameters()))


# -- mixed precision -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("states", "dtype"),
    [
        ("device", "bf16"),
        ("host", "fp16"),
        ("ssd", "bf16"),
        pytest.param("ssd", "fp16", marks=pytest.mark.slow),
    ],
)
def test_sums_are_of_the_masters_dtype(
    states: str, dtype: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum of float(gradient); clipped, it is what the masters are updated with."""
    remember_captures(monkeypatch, "gpt2")
    model, inputs = make("gpt2")
    model.eval()  # no dropout: backwards repeat
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    made = compiled(model, optimizer, hw, states=states, dtype=dtype)
    other = {**inputs, "input_ids": inputs["input_ids"].flip(0), "labels": inputs["labels"].flip(1)}

    def backward(batch: dict[str, Any]) -> list[Tensor]:
        made(**batch).loss.backward()
        return gradients(made)

    first = backward(inputs)
    optimizer.zero_grad()
    second = backward(other)
    optimizer.zero_grad(set_to_none=False)
    backward(inputs)
    both = backward(other)
    assert all(g.dtype == torch.float32 for g in both)
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    assert all(identical(g, g.to(low).float()) for g in first)
    assert all(identical(a + b, c) for a, b, c in zip(first, second, both, strict=True))
    assert any(not identical(c, c.to(low).float()) for c in both)

    clip_grad_norm_(made.parameters(), 0.5)
    masters = [p.detach().clone() for p in made.parameters()]
    plain = torch.optim.AdamW(masters, lr=1e-3, fused=True)
    for master, gradient in zip(masters, gradients(made), strict=True):
        master.grad = gradient
    plain.step()
    optimizer.step()
    assert all(map(identical, made.parameters(), masters))
    made.lohan.close()


def test_bf16_parameters_have_fp32_gradients(hw: HardwareProfile) -> None:
    """With dtype= their masters, and so their gradients, are fp32."""
    torch.manual_seed(0)
    model = MLP().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    made = compiled(model, optimizer, hw, states="host", dtype="bf16")
    x, y = torch.randn(6, 16, dtype=torch.bfloat16), torch.randint(0, 10, (6,))
    loss_of("mlp", made(x=x, y=y)).backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in made.parameters())
    optimizer.step()
    optimizer.zero_grad()
    made.lohan.close()


@pytest.mark.parametrize(
    ("states", "fused"),
    [
        ("device", True),
        ("ssd", None),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in (("device", None), ("ssd", True))),
    ],
)
def test_grad_scaler(
    states: str, fused: bool | None, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp16 with loss scaling: a step that overflows is skipped, others see unscaled gradients."""
    remember_captures(monkeypatch, "gpt2")
    model, inputs = make("gpt2")
    model.eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    made = compiled(model, optimizer, hw, states=states, dtype="fp16")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=2)
    skipped = 0
    for _ in range(12):
        before = [p.detach().clone() for p in made.parameters()]
        scaler.scale(made(**inputs).loss).backward()
        scale = scaler.get_scale()
        scaled = gradients(made)
        overflow = not all(bool(g.isfinite().all()) for g in scaled)
        counts = [v["step"].clone() for v in optimizer.state_dict()["state"].values()]
        scaler.step(optimizer)
        scaler.update()
        same = all(map(identical, made.parameters(), before))
        now = [v["step"] for v in optimizer.state_dict()["state"].values()]
        assert same == overflow == (now == counts)
        assert (scaler.get_scale() == scale / 2) == overflow
        if overflow:
            skipped += 1
        else:
            unscaled = gradients(made)
            assert all(identical(g / scale, u) for g, u in zip(scaled, unscaled, strict=True))
        optimizer.zero_grad()
    assert 0 < skipped < 12
    made.lohan.close()


def test_a_scaled_step_that_is_given_up(hw: HardwareProfile) -> None:
    """It has divided gradients by the scale; those of the next backward are divided, too."""
    model, inputs = make("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    made = compiled(model, optimizer, hw, states="host")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss_of("mlp", made(**inputs))).backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gradients, "found", _interrupts)
        with pytest.raises(KeyboardInterrupt):
            scaler.step(optimizer)
    del optimizer.grad_scale  # GradScaler would multiply the next one by it
    optimizer.zero_grad()
    scaler.scale(loss_of("mlp", made(**inputs))).backward()
    scaled = gradients(made)
    scaler.step(optimizer)
    assert all(identical(g / 1024.0, u) for g, u in zip(scaled, gradients(made), strict=True))
    made.lohan.close()


def _interrupts(*_: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("schedule", ["serial", "deferred"])
def test_a_step_that_fails_after_its_updates_is_taken(
    schedule: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradients are not used again: neither by a second step nor instead of later ones."""
    remember_captures(monkeypatch, "mlp")
    plain, inputs = make("mlp")
    its = training_of("sgd", plain).optimizer
    model, _ = make("mlp")
    optimizer = training_of("sgd", model).optimizer
    made = compiled(model, optimizer, hw, states="host", schedule=schedule)
    for side in (plain, made):
        torch.manual_seed(0)
        loss_of("mlp", side(**inputs)).backward()
    handle = optimizer.register_step_pre_hook(_interrupts)  # it is called behind ours
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    handle.remove()
    optimizer.step()
    its.step()
    assert all(map(identical, made.parameters(), plain.parameters()))
    for side, its_optimizer in ((plain, its), (made, optimizer)):
        its_optimizer.zero_grad()
        torch.manual_seed(1)
        loss_of("mlp", side(**inputs)).backward()
        for k, p in enumerate(side.parameters()):
            if p.grad is not None:
                p.grad = None if k % 2 else 2 * p.grad
        its_optimizer.step()
    made.lohan.close()
    assert all(map(identical, made.parameters(), plain.parameters()))


@pytest.mark.parametrize("method", ["hide", "show_hidden"])
def test_gradients_are_hidden_all_or_none(
    method: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever an interrupt strikes, the next step finds those that are there still, or none."""
    remember_captures(monkeypatch, "mlp")
    model, inputs = make("mlp")
    made = compiled(model, training_of("sgd", model).optimizer, hw, states="host")
    loss_of("mlp", made(**inputs)).backward()
    assert made.lohan.memory is not None
    kept = made.lohan.memory.states.gradients
    given = [p.grad for p in made.parameters()]
    for at in itertools.count(1):
        if method == "show_hidden":
            kept.hide()
        with contextlib.suppress(KeyboardInterrupt), interrupted(at):
            getattr(kept, method)()
            break
        kept.forget_hidden()
        found = [p.grad for p in made.parameters()]
        assert all(map(operator.is_, found, given)) or found == [None] * len(given)
        for p, gradient in zip(made.parameters(), given, strict=True):
            p.grad = gradient
    assert at > 10
    made.lohan.close()


@pytest.mark.parametrize("states", TIERS)
@pytest.mark.parametrize("schedule", ["serial", "deferred"])
def test_weights_that_are_loaded_between_backward_and_step(
    schedule: str, states: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They count, as in plain PyTorch, also where parameters are copies of float32 masters."""
    remember_captures(monkeypatch, "mlp in bf16")
    model, inputs = make("mlp")
    model.to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    inputs = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in inputs.items()}
    made = compiled(model, optimizer, hw, states=states, schedule=schedule, dtype="bf16")
    torch.manual_seed(0)
    loss_of("mlp", made(**inputs)).backward()
    made.load_state_dict({k: torch.zeros_like(v) for k, v in made.state_dict().items()})
    wanted = [(0 - 0.5 * g).to(torch.bfloat16) for g in gradients(made)]
    for _ in range(2):
        optimizer.step()
        optimizer.zero_grad()
        loss_of("mlp", made(**inputs))  # before anybody waits for updates
        assert all(map(identical, made.parameters(), wanted))
    made.lohan.close()


# -- what cannot be --------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["naive", "optimized", "overlapped"])
def test_schedules_that_update_in_backward(schedule: str, hw: HardwareProfile) -> None:
    model, _ = make("mlp")
    optimizer = training_of("adam", model).optimizer
    with pytest.raises(LohanError, match=f"{schedule}.*gradients='kept'.*schedule='deferred'"):
        compiled(model, optimizer, hw, schedule=schedule)
    with pytest.raises(LohanError, match="use 'consumed' or 'kept'"):
        compiled(model, optimizer, hw, gradients="lost")


@pytest.mark.parametrize(("where", "states"), alternating(("backward", "addition"), TIERS))
def test_a_backward_that_fails(
    where: str, states: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After zero_grad nothing is left of it: the next step is right."""
    remember_captures(monkeypatch, "gpt2")
    plain, inputs = make("gpt2")
    its = training_of("adam", plain).optimizer
    model, batch = make("gpt2")
    optimizer = training_of("adam", model).optimizer
    made = compiled(model, optimizer, hw, states=states)
    for seed in range(3):
        for side, step, given in ((plain, its, inputs), (made, optimizer, batch)):
            torch.manual_seed(seed)
            loss_of("gpt2", side(**given)).backward()
            step.step()
            step.zero_grad()
        loss = loss_of("gpt2", made(**batch))
        calls = itertools.count()
        with monkeypatch.context() as patch:
            target, method = (Updater, "emit") if where == "backward" else (UnitGradients, "add")
            original = getattr(target, method)

            def fail(*args: Any, original: Any = original, calls: Any = calls, **how: Any) -> Any:
                if next(calls) == 1:
                    raise InjectedError
                return original(*args, **how)

            patch.setattr(target, method, fail)
            with pytest.raises(InjectedError):
                loss.backward()
        optimizer.zero_grad()
    made.lohan.close()
    assert all(map(identical, made.parameters(), plain.parameters()))


def test_the_gradient_counts_in_every_tier(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As large as the masters, where the states are."""
    remember_captures(monkeypatch, "mlp")
    sizes = {}
    for kept in ("consumed", "kept"):
        for states in TIERS:
            model, inputs = make("mlp")
            optimizer = training_of("adam", model).optimizer
            made = compiled(model, optimizer, hw, states=states, gradients=kept, schedule="serial")
            program = made.lohan.prepare(**inputs)
            assert program.memory.peak_bytes == program.plan.prediction.peak_device_bytes
            sizes[kept, states] = sum(u.state_bytes for u in program.workload.units)
            accumulators = sum(u.accumulator_bytes for u in program.workload.units)
            made.lohan.close()
            assert accumulators == (0 if kept == "consumed" else sizes["consumed", states] // 2)
            assert sizes[kept, states] == sizes["consumed", states] + accumulators


@pytest.mark.parametrize("options", [{"gradients": "kept"}, {"accumulate": 2}])
def test_units_that_move_take_their_gradients_along(
    options: dict[str, Any], hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a refined plan moves them, here in the middle of a sum."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Any) -> list[Tensor]:
        noted = []
        for step in range(2):
            for k in range(2):
                torch.manual_seed(10 * step + k)
                loss = loss_of("mlp", model(**inputs))
                loss.backward()
                noted.append(loss.detach())
                if k == 0 and isinstance(model, LohanModule):
                    move(model, step)
            optimizer.step()
            optimizer.zero_grad()
        return noted

    def move(model: LohanModule, step: int) -> None:
        memory = model.lohan.memory
        assert memory is not None
        model.lohan.sync()
        for states in memory.states.units:
            arena = Arena(states.num_bytes, pin=False) if step == 0 else None
            if arena is not None:
                memory.moved.append(arena)
            memory.states.move(states, arena)
        memory.buffers = {}
        ((key, program),) = model.lohan.programs.items()
        workload = program.workload
        plan = model.lohan.builder.plan_for(workload)
        model.lohan.programs[key] = model.lohan.builder.build(
            program.executor.captured, workload, plan
        )

    options = {"gradients": "consumed", "states": "device", "schedule": "serial", **options}
    check("mlp", loop, hw, None, **options)
