"""Hooks that plain PyTorch's backward calls: they are called, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lohan_fx
from lohan_fx.errors import StepError
from lohan_fx.hardware import HardwareProfile
from tests.training import alternating


def built() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    loss: Tensor = model(torch.ones(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


HOOKS: dict[str, tuple[Callable[[Any, Callable[..., Any]], Any], str]] = {
    "tensor": (
        lambda m, hook: m[0].weight.register_hook(hook),
        r"parameter 0\.weight has a hook of register_hook\(\).*gradients='kept'",
    ),
    "accumulated": (
        lambda m, hook: m[0].weight.register_post_accumulate_grad_hook(hook),
        r"parameter 0\.weight has a hook of register_post_accumulate_grad_hook\(\)",
    ),
    "module": (
        lambda m, hook: m[2].register_full_backward_hook(hook),
        r"module 2 has a hook of register_full_backward_hook\(\).*gradients='kept'",
    ),
    "before module": (
        lambda m, hook: m[2].register_full_backward_pre_hook(hook),
        r"module 2 has a hook of register_full_backward_pre_hook\(\)",
    ),
}


@pytest.mark.parametrize(
    ("kind", "late", "gradients"),
    alternating(tuple(HOOKS), ((False, "consumed"), (True, "kept"))),
)
def test_a_hook_that_would_not_be_called_is_refused(
    kind: str, late: bool, gradients: Any, hw: HardwareProfile
) -> None:
    register, message = HOOKS[kind]
    plain, model = built(), built()
    reference = torch.optim.AdamW(plain.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    lohan_fx.compile(model, hw=hw, optimizer=optimizer, gradients=gradients)
    if late:
        assert torch.equal(step(model, optimizer), step(plain, reference))
    called: list[Any] = []
    handle = register(model, lambda *given: called.append(given))
    with pytest.raises(StepError, match=message):
        step(model, optimizer)
    with torch.no_grad():
        model(torch.ones(4, 8))  # no backward, no hook
    handle.remove()
    for _ in range(2):  # nothing has happened
        assert torch.equal(step(model, optimizer), step(plain, reference))
    assert not called
    model.lohan.close()  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("kind", ["tensor", "accumulated"])
def test_hooks_are_called_where_autograd_has_the_gradients(kind: str, hw: HardwareProfile) -> None:
    """Without an optimizer, and for the parameters that it does not have."""
    register, _ = HOOKS[kind]
    for managed in (False, True):
        model = built()
        optimizer = torch.optim.SGD(model[2].parameters() if managed else model.parameters(), 0.1)
        called: list[Any] = []
        register(model, lambda *given: called.append(given))  # noqa: B023
        lohan_fx.compile(model, hw=hw, optimizer=optimizer if managed else None)
        for _ in range(2):
            step(model, optimizer)
        assert len(called) == 2
        model.lohan.close()  # type: ignore[operator, union-attr]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("late", [False, True])
def test_hooks_of_the_whole_model_are_called_once(late: bool, hw: HardwareProfile) -> None:
    """Around the program: what they change is changed once, as in plain PyTorch."""
    plain, model = built(), built()
    reference = torch.optim.SGD(plain.parameters(), 0.1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    lohan_fx.compile(model, hw=hw, optimizer=optimizer)
    if late:
        assert torch.equal(step(model, optimizer), step(plain, reference))
    called: list[Any] = []
    for module in (plain, model):
        module.register_forward_pre_hook(lambda _, given: (given[0] + 1,))
        module.register_forward_hook(lambda _m, _given, out: out * 2)
        module.register_full_backward_pre_hook(lambda _, given: (given[0] * 3,))
        module.register_full_backward_hook(lambda *given: called.append(given))
    for _ in range(2):
        assert torch.equal(step(model, optimizer), step(plain, reference))
    assert len(called) == 4
    model.lohan.close()  # type: ignore[operator, union-attr]
