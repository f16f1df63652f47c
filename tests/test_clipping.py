"""Clipping by norm and by value, skipped steps, and what a consumed gradient says."""

from __future__ import annotations

import itertools
import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from lohan_fx.errors import LohanError, StepError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import SCHEDULES
from lohan_fx.runtime.clipping import Norms
from lohan_fx.runtime.guards import ConsumedGradient
from lohan_fx.runtime.native import adam
from lohan_fx.runtime.optimizer import UnitOptimizer
from lohan_fx.runtime.unit_states import UnitStates
from lohan_fx.runtime.update_values import Clip
from tests.loops import TIERS, assert_same, check, compiled, sometimes, windows
from tests.models import loss_of, make
from tests.training import (
    Training,
    alternating,
    identical,
    remember_captures,
    training_of,
)

WHOLE = ("serial", "deferred", "speculative")


# -- by norm ---------------------------------------------------------------------------------------


QUICK = {
    ("gpt2", "ssd", "deferred", 1),
    ("gpt2", "ssd", "deferred", 3),
    ("gpt2", "device", "serial", 1),
    ("gpt2", "host", "deferred", 1),
    ("frozen", "host", "serial", 3),
    ("frozen", "ssd", "serial", 1),
    ("tied", "host", "deferred", 3),
    ("mlp", "device", "deferred", 3),
    ("gpt2", "host", "speculative", 1),
    ("gpt2", "host", "speculative", 3),
    ("tied", "host", "speculative", 1),
    ("frozen", "host", "speculative", 3),
    ("mlp", "ssd", "speculative", 3),
    ("mlp", "device", "speculative", 1),
}


@pytest.mark.parametrize(
    ("name", "states", "schedule", "accumulate"),
    [
        pytest.param(*row, marks=() if row in QUICK else pytest.mark.slow)
        for row in itertools.product(
            ("gpt2", "llama", "mlp", "resnet", "frozen", "tied"), TIERS, WHOLE, (1, 3)
        )
    ],
)
def test_by_norm(
    name: str,
    states: str,
    schedule: str,
    accumulate: int,
    hw: HardwareProfile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`grad_norm` is what clip_grad_norm_ returns; steps that end early are clipped, too."""
    loop = windows(name, (1, 1, 1) if accumulate == 1 else (3, 1, 3), norm=0.1)
    options = {"states": states, "schedule": schedule, "accumulate": accumulate}
    check(name, loop, hw, monkeypatch, clip_grad_norm=0.1, **options)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_of_more_precision_than_masters(
    accumulate: int, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dtype="fp64" of a float32 model, norms are of gradients in float32, as sums are."""
    loop = windows("mlp", (accumulate, accumulate), norm=0.1)
    options = {"states": "host", "accumulate": accumulate, "dtype": "fp64"}
    remember_captures(monkeypatch, "mlp")
    (plain, inputs), (model, batch) = make("mlp"), make("mlp")
    its, training = training_of("sgd", plain), training_of("sgd", model)
    wanted = loop(plain, its, inputs)
    made = compiled(model, training.optimizer, hw, clip_grad_norm=0.1, **options)
    found = loop(made, training, batch)
    made.lohan.close()
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, check_dtype=False, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("states", ["host", "ssd"])
@pytest.mark.parametrize("schedule", WHOLE)
def test_norms_that_come_with_the_sums(
    states: str, schedule: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA: in float64, without a pass of their own; equal to rounding."""
    noted = []
    make_norms, note = Norms.__init__, Norms.note

    def passing(norms: Norms, *, in_passing: bool) -> None:
        assert not in_passing  # the default on a CPU
        make_norms(norms, in_passing=True)

    def noting(norms: Norms, unit: UnitStates, i: int, squares: float) -> None:
        noted.append(squares)
        note(norms, unit, i, squares)

    monkeypatch.setattr(Norms, "__init__", passing)
    monkeypatch.setattr(Norms, "note", noting)
    loop = windows("gpt2", (3, 3), norm=0.1)
    options = {"states": states, "schedule": schedule, "accumulate": 3, "clip_grad_norm": 0.1}
    check("gpt2", loop, hw, monkeypatch, exact=False, **options)
    assert noted


@pytest.mark.parametrize("states", TIERS)
@pytest.mark.parametrize("limit", [1e6, 0.0])
def test_a_norm_that_is_never_reached_or_always(
    limit: float, states: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = windows("mlp", (1, 1, 1), norm=limit)
    check("mlp", loop, hw, monkeypatch, states=states, clip_grad_norm=limit)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("states", ["host", "ssd"])
def test_by_norm_with_other_optimizers(
    optimizer: str, states: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = windows("mlp", (1, 1, 1), norm=0.1)
    options = {"optimizer": optimizer, "states": states}
    check("mlp", loop, hw, monkeypatch, clip_grad_norm=0.1, **options)


@pytest.mark.parametrize("strategy", ["memferry", "go-memferry"])
def test_by_norm_where_the_device_writes_gradients(
    strategy: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = windows("gpt2", (1, 1), norm=0.1)
    check("gpt2", loop, hw, monkeypatch, strategy=strategy, clip_grad_norm=0.1)


@pytest.mark.parametrize(("states", "accumulate"), alternating(TIERS, (1, 2)))
def test_parameters_without_a_gradient(states: str, accumulate: int, hw: HardwareProfile) -> None:
    """They have no part in the norm (DeepSpeed #5241); sums that the last backward misses do."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, ours: bool) -> list[Tensor]:
        x = torch.linspace(-1, 1, 32).view(4, 8)
        noted = []
        for uses in ((True, False), (False, True), (False, False), (True, True)):
            for use in uses[:accumulate]:
                loss = model(x, use)
                loss.backward()
                noted.append(loss.detach())
            if ours:
                optimizer.step()
                noted.append(torch.tensor(model.lohan.grad_norm))  # type: ignore[union-attr]
            else:
                noted.append(clip_grad_norm_(model.parameters(), 0.01))
                optimizer.step()
            optimizer.zero_grad()
        return noted

    (plain, its), (model, optimizer) = sometimes()
    wanted = loop(plain, its, False)
    made = compiled(model, optimizer, hw, states=states, accumulate=accumulate, clip_grad_norm=0.01)
    found = loop(made, optimizer, True)
    made.lohan.close()
    assert all(map(identical, found, wanted))
    assert_same(model, optimizer, plain, its)


@pytest.mark.parametrize(
    ("states", "dtype", "accumulate"),
    [
        ("host", "bf16", 1),
        ("ssd", "bf16", 2),
        pytest.param("device", "bf16", 1, marks=pytest.mark.slow),
        pytest.param("device", "fp16", 2, marks=pytest.mark.slow),
        pytest.param("ssd", "fp16", 1, marks=pytest.mark.slow),
    ],
)
def test_mixed_precision_clips_float32_gradients(
    states: str,
    dtype: str,
    accumulate: int,
    hw: HardwareProfile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As clip_grad_norm_ does to float32 gradients that users see (gradients="kept")."""
    remember_captures(monkeypatch, "gpt2")
    sides = []
    for kept in (True, False):
        model, inputs = make("gpt2")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        options: dict[str, Any] = {"accumulate": accumulate, "clip_grad_norm": 0.1}
        if kept:
            options = {"gradients": "kept"}
        made = compiled(model, optimizer, hw, states=states, dtype=dtype, **options)
        noted = []
        torch.manual_seed(0)
        for _ in range(2):
            for _ in range(accumulate):
                loss = made(**inputs).loss
                loss.backward()
                noted.append(loss.detach())
            if kept:
                noted.append(clip_grad_norm_(made.parameters(), 0.1))
            optimizer.step()
            if not kept:
                noted.append(torch.tensor(made.lohan.grad_norm))
            optimizer.zero_grad()
        made.lohan.close()
        sides.append([*noted, *model.parameters()])
    assert all(map(identical, *sides))


# -- by value --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("states", "schedule", "accumulate"),
    [
        pytest.param(*row, marks=() if k % 4 == 0 else pytest.mark.slow)
        for k, row in enumerate(itertools.product(TIERS, SCHEDULES, (1, 3)))
    ],
)
def test_by_value(
    states: str,
    schedule: str,
    accumulate: int,
    hw: HardwareProfile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = windows("gpt2", (1, 1) if accumulate == 1 else (3, 1), value=1e-3)
    options = {"states": states, "schedule": schedule, "accumulate": accumulate}
    check("gpt2", loop, hw, monkeypatch, clip_grad_value=1e-3, **options)


# -- kernels ---------------------------------------------------------------------------------------


GRADIENT = torch.tensor(
    [0.0, -0.0, 1e-3, -1e-3, 0.5, -0.5, 3.0, -3.0, math.inf, -math.inf, math.nan, 1e-40]
).repeat(100)[:1187]


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(
    "clip", [Clip(factor=torch.tensor(0.3)), Clip(factor=torch.tensor(math.nan)), Clip(limit=0.7)]
)
def test_kernels_clip_as_torch_does(
    clip: Clip, maximize: bool, dtype: torch.dtype, fused: bool | None
) -> None:
    """The native kernel in mixed precision and on float32, and torch's own on pieces."""
    torch.manual_seed(0)
    start = torch.randn(1187)
    gradient = GRADIENT.to(dtype)
    whole = gradient.float().clone()
    plain = nn.Parameter(start.clone())
    plain.grad = whole
    if clip.factor is not None:
        plain.grad.mul_(clip.factor)
    else:
        clip_grad_value_([plain], 0.7)
    mixed = dtype != torch.float32
    options: dict[str, Any] = {"lr": 0.1, "maximize": maximize, "fused": fused or mixed}
    torch.optim.AdamW([plain], **options).step()
    p = nn.Parameter(start.clone())
    unit = UnitOptimizer(torch.optim.AdamW([p], **options), [p], chunk_elements=1024)
    state = [{n: torch.zeros(1187) for n in unit.state_names()}]
    master = start.clone()
    if mixed:
        unit.step_mixed([master], [gradient], state, [torch.empty(1187, dtype=dtype)], clip=clip)
    else:
        unit.step([master], [gradient.clone()], state, clip=clip)
    assert identical(master.isnan(), plain.isnan())
    assert identical(master.nan_to_num(), plain.detach().nan_to_num())
    assert adam.kernel() is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_low_precision(dtype: torch.dtype) -> None:
    """What `Norms` relies on: the cast inside of vector_norm changes no bit."""
    torch.manual_seed(0)
    for size in (1, 7, 1000, 70_001):
        x = torch.randn(size).to(dtype)
        found = torch.linalg.vector_norm(x, 2.0, dtype=torch.float32)
        assert identical(found, torch.linalg.vector_norm(x.float(), 2.0))


# -- skipped steps ---------------------------------------------------------------------------------


SKIPPING = (
    ("device", "serial", 1),
    ("device", "deferred", 2),
    ("host", "deferred", 1),
    ("host", "speculative", 2),
    ("ssd", "serial", 2),
    ("ssd", "deferred", 1),
    ("ssd", "deferred", 2),
)


@pytest.mark.parametrize(
    ("what", "states", "schedule", "accumulate"),
    alternating((math.inf, math.nan), SKIPPING),
)
def test_a_step_that_is_skipped(
    what: float,
    states: str,
    schedule: str,
    accumulate: int,
    hw: HardwareProfile,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Weights, states and step counters are those of plain PyTorch that leaves the step out."""
    steps = ("good", "bad", "good", "bad", "good")

    def loop(model: nn.Module, training: Training, inputs: dict[str, Any]) -> list[Tensor]:
        noted = []
        for seed, kind in enumerate(steps):
            torch.manual_seed(seed)
            for k in range(accumulate):
                loss = loss_of("mlp", model(**inputs))
                (loss * what if kind == "bad" and k == 0 else loss).backward()
                noted.append(loss.detach())
            if kind == "good" or hasattr(model, "lohan"):
                training.optimizer.step()
            training.optimizer.zero_grad()
            if hasattr(model, "lohan"):
                assert model.lohan.skipped_steps == steps[: seed + 1].count("bad")
                assert math.isfinite(model.lohan.grad_norm) == (kind == "good")
        return noted

    options = {"states": states, "schedule": schedule, "accumulate": accumulate}
    with caplog.at_level(logging.WARNING, logger="lohan_fx"):
        check("mlp", loop, hw, monkeypatch, skip_nonfinite=True, **options)
    said = [r.message for r in caplog.records if "skipped" in r.message]
    assert len(said) == 1
    assert "skipped_steps" in said[0]


def test_without_skipping_nan_passes(hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """As through clip_grad_norm_."""
    remember_captures(monkeypatch, "mlp")
    model, inputs = make("mlp")
    optimizer = training_of("adam", model).optimizer
    made = compiled(model, optimizer, hw, clip_grad_norm=1.0)
    (loss_of("mlp", made(**inputs)) * math.nan).backward()
    optimizer.step()
    assert made.lohan.grad_norm is not None
    assert math.isnan(made.lohan.grad_norm)
    assert made.lohan.skipped_steps == 0
    assert all(p.isnan().all() for p in made.parameters())
    made.lohan.close()


# -- what a consumed gradient says -----------------------------------------------------------------


@pytest.mark.parametrize("states", TIERS)
def test_a_consumed_gradient_says_what_to_write(
    states: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember_captures(monkeypatch, "mlp")
    model, inputs = make("mlp")
    optimizer = training_of("adam", model).optimizer
    made = compiled(model, optimizer, hw, states=states)
    loss_of("mlp", made(**inputs)).backward()
    gradient = next(made.parameters()).grad
    assert isinstance(gradient, ConsumedGradient)
    assert repr(gradient) == "ConsumedGradient()"
    parameter = next(made.parameters())
    assert (gradient.shape, gradient.dtype) == (parameter.shape, parameter.dtype)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    uses = (
        lambda: clip_grad_norm_(made.parameters(), 1.0),
        lambda: clip_grad_value_(made.parameters(), 1.0),
        gradient.norm,
        lambda: gradient + 1,
        lambda: torch.ones_like(parameter).add_(gradient),
        lambda: gradient.mul_(2),
        lambda: gradient.detach().clone(),
        lambda: gradient.data,
        lambda: float(gradient.view(-1)[0]),
        gradient.numpy,
        lambda: scaler.unscale_(optimizer),
    )
    for use in uses:
        with pytest.raises(StepError) as caught:
            use()
        for word in ("clip_grad_norm=", "accumulate=", "gradients='kept'"):
            assert word in str(caught.value)
    optimizer.step()
    made.lohan.close()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_resets_work_as_ever(
    schedule: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """zero_grad of optimizer and model, both ways, before and after a step, and p.grad = None."""

    def loop(model: nn.Module, training: Training, inputs: dict[str, Any]) -> list[Tensor]:
        optimizer = training.optimizer

        def by_hand() -> None:
            for p in model.parameters():
                p.grad = None

        torch.manual_seed(0)
        noted = []
        for reset in (
            optimizer.zero_grad,
            lambda: optimizer.zero_grad(set_to_none=False),
            model.zero_grad,
            lambda: model.zero_grad(set_to_none=False),
            by_hand,
        ):
            reset()
            loss = loss_of("mlp", model(**inputs))
            loss.backward()
            noted.append(loss.detach())
            training.optimizer.step()
            reset()
        return noted

    check("mlp", loop, hw, monkeypatch, schedule=schedule, states="host")


def test_a_gradient_of_the_users_is_refused(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain PyTorch would add to it. A reset makes the model usable."""
    remember_captures(monkeypatch, "mlp")
    model, inputs = make("mlp")
    optimizer = training_of("adam", model).optimizer
    made = compiled(model, optimizer, hw, states="host")
    loss = loss_of("mlp", made(**inputs))
    name, parameter = next(iter(made.named_parameters()))
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(StepError, match=f"parameter {name} has a .grad.*zero_grad"):
        loss.backward()
    optimizer.zero_grad()
    loss_of("mlp", made(**inputs)).backward()
    optimizer.step()
    made.lohan.close()


def test_what_is_refused(hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = make("mlp")
    optimizer = training_of("adam", model).optimizer
    for schedule in ("naive", "optimized", "overlapped"):
        for option in ({"clip_grad_norm": 1.0}, {"skip_nonfinite": True}):
            name = next(iter(option))
            with pytest.raises(LohanError, match=f"{schedule}.*{name} needs the norm.*deferred"):
                compiled(model, optimizer, hw, schedule=schedule, **option)
    for bad in (-1.0, math.nan):
        with pytest.raises(LohanError, match="not negative"):
            compiled(model, optimizer, hw, clip_grad_norm=bad)
    with pytest.raises(LohanError, match="have no order"):
        compiled(model, optimizer, hw, clip_grad_norm=1.0, clip_grad_value=1.0)
    with pytest.raises(LohanError, match="in the loop, as in plain PyTorch"):
        compiled(model, optimizer, hw, clip_grad_norm=1.0, gradients="kept")
    with pytest.raises(LohanError, match="needs optimizer="):
        compiled(model, None, hw, clip_grad_norm=1.0)  # type: ignore[arg-type]
