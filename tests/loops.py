"""Loops with several backwards a step, with lohan_fx and without, to compare bit by bit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import lohan_fx
from lohan_fx.api import LohanModule
from lohan_fx.hardware import HardwareProfile
from lohan_fx.runtime.trials import Trials
from lohan_fx.runtime.updates import Updater
from tests.models import loss_of, make
from tests.training import Squeezed, Training, identical, remember_captures, training_of

TIERS = ("device", "host", "ssd")

AT_ONCE: list[dict[str, Any]] = [
    {"schedule": "naive"},
    {"schedule": "optimized"},
    {"schedule": "overlapped"},
    {"schedule": "optimized", "accumulate": 2},
]
"""Updates begin in backward."""


class InjectedError(Exception):
    pass


def compiled(
    model: nn.Module, optimizer: torch.optim.Optimizer, hw: HardwareProfile, **options: Any
) -> LohanModule:
    made = lohan_fx.compile(
        model, hw=hw, optimizer=optimizer, **{"strategy": Squeezed("swap-all"), **options}
    )
    assert isinstance(made, LohanModule)
    return made


def updater_of(model: LohanModule) -> Updater:
    assert model.lohan.memory is not None
    assert model.lohan.memory.updater is not None
    return model.lohan.memory.updater


def wait_until_begun(trials: Trials, count: int | None = None) -> None:
    """Wait until so many trials of this step (all) have begun: others would not be accepted."""
    deadline = time.monotonic() + 30
    opened = list(trials._open)
    while sum(trial.begun for trial in opened) < (len(opened) if count is None else count):
        assert time.monotonic() < deadline
        time.sleep(1e-4)


def evaluate(name: str, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    torch.manual_seed(0)
    with torch.no_grad():
        return loss_of(name, model(**inputs)).clone()


def windows(
    name: str,
    sizes: Sequence[int],
    *,
    norm: float | None = None,
    value: float | None = None,
    between: Callable[[nn.Module, Training], None] = lambda model, training: None,
) -> Callable[[nn.Module, Training, dict[str, Any]], list[Tensor]]:
    """A loop of steps of so many backwards each, which notes losses, norms and evaluations.

    Plain PyTorch clips in the loop; a compiled model does itself.
    """

    def loop(model: nn.Module, training: Training, inputs: dict[str, Any]) -> list[Tensor]:
        noted, seed = [], 0
        ours = isinstance(model, LohanModule)
        for size in sizes:
            for _ in range(size):
                torch.manual_seed(seed)
                seed += 1
                loss = loss_of(name, model(**inputs))
                loss.backward()
                noted.append(loss.detach())
                between(model, training)
            if norm is not None and not ours:
                noted.append(clip_grad_norm_(model.parameters(), norm))
            if value is not None and not ours:
                clip_grad_value_(model.parameters(), value)
            training.optimizer.step()
            if norm is not None and isinstance(model, LohanModule):
                noted.append(torch.tensor(model.lohan.grad_norm))
            if training.scheduler is not None:
                training.scheduler.step()
            training.optimizer.zero_grad()
            noted.append(evaluate(name, model, inputs))
        return noted

    return loop


def check(
    name: str,
    loop: Callable[[nn.Module, Training, dict[str, Any]], list[Tensor]],
    hw: HardwareProfile,
    patch: pytest.MonkeyPatch | None,
    *,
    optimizer: str = "adamw",
    exact: bool = True,
    **options: Any,
) -> None:
    """The loop notes the same with lohan_fx and without, and leaves the same model and states: to
    the bit, or to rounding."""
    if patch is not None:
        remember_captures(patch, name)
    plain, inputs = make(name)
    its = training_of(optimizer, plain)
    wanted = loop(plain, its, inputs)
    model, inputs = make(name)
    training = training_of(optimizer, model)
    made = compiled(model, training.optimizer, hw, **options)
    found = loop(made, training, inputs)
    made.lohan.close()
    assert len(found) == len(wanted) > 0
    if not exact:
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(list(model.parameters()), list(plain.parameters()))
        return
    assert all(map(identical, found, wanted))
    assert_same(model, training.optimizer, plain, its.optimizer)


def assert_same(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plain: nn.Module,
    its: torch.optim.Optimizer,
) -> None:
    """Parameters, and what the optimizers keep for them."""
    pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
    assert pairs
    for p, q in pairs:
        assert identical(p, q)
        have, want = optimizer.state.get(p, {}), its.state.get(q, {})
        assert have.keys() == want.keys()
        assert all(identical(torch.as_tensor(have[k]), v) for k, v in want.items())


class Sometimes(nn.Module):
    """A layer that only some batches use, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.extra, self.never = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, extra: bool) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (self.extra(x) if extra else x).square().mean()


def sometimes() -> Iterator[tuple[Sometimes, torch.optim.Optimizer]]:
    """Twice the same, with weight decay that a parameter without a gradient must not get."""
    for _ in range(2):
        torch.manual_seed(0)
        model = Sometimes()
        yield model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
