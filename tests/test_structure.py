"""A forward notices every change of modules and parameters, though it does not walk over them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lohan_fx
from lohan_fx.compiled.structure import Seen
from lohan_fx.compiled.user_module import UserModule
from lohan_fx.errors import StepError
from lohan_fx.hardware import HardwareProfile


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


class Model(nn.Module):
    """A shared module, and a parameter with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Part(), Part()
        self.again = self.first
        self.second.linear.weight = self.first.linear.weight
        self.drop = nn.Dropout(0.0)
        self.none: nn.Module | None = None
        self.register_module("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.again(self.second(self.first(x))))


class OwnWalk(Model):
    """Whose parameters are not what its dicts say."""

    hidden: bool = False

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, p in super().named_parameters(*args, **kwargs):
            if not (self.hidden and name.endswith("scale")):
                yield name, p


def replaced(p: nn.Parameter) -> nn.Parameter:
    """Another parameter that is equal."""
    return nn.Parameter(p.detach().clone())


def rename(module: nn.Module, old: str, new: str) -> None:
    module._modules[new] = module._modules.pop(old)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda m: None,
    "all to eval": lambda m: m.eval(),
    "one to eval": lambda m: m.second.linear.eval(),
    "frozen": lambda m: m.first.linear.bias.requires_grad_(False),
    "equal parameter": lambda m: setattr(m.second, "scale", replaced(m.second.scale)),
    "equal, in the dict": lambda m: m.second._parameters.update(scale=replaced(m.second.scale)),
    "untied": lambda m: setattr(m.second.linear, "weight", replaced(m.first.linear.weight)),
    "parameter gone": lambda m: delattr(m.second, "scale"),
    "parameter None": lambda m: setattr(m.second, "scale", None),
    "parameter more": lambda m: setattr(m.second, "more", nn.Parameter(torch.ones(2))),
    "parameter of the whole": lambda m: setattr(m, "more", nn.Parameter(torch.ones(2))),
    "child more": lambda m: setattr(m.second, "more", nn.Linear(2, 2)),
    "child without parameters": lambda m: setattr(m, "none", nn.ReLU()),
    "child for None": lambda m: setattr(m, "nothing", nn.Linear(2, 2)),
    "child replaced": lambda m: setattr(m, "drop", nn.Dropout(0.0)),
    "child gone": lambda m: delattr(m, "again"),
    "children swapped": lambda m: m._modules.update(first=m.second, second=m.first),
    "renamed": lambda m: rename(m, "second", "last"),
    "another dict": lambda m: setattr(m.second, "_parameters", dict(m.second._parameters)),
    "hook of a module": lambda m: m.second.linear.register_full_backward_hook(print),
    "hook before": lambda m: m.drop.register_full_backward_pre_hook(print),
    "hook in another dict": lambda m: setattr(m.drop, "_backward_hooks", OrderedDict({1: print})),
    "hook of a parameter": lambda m: m.first.scale.register_hook(print),
    "hook behind": lambda m: m.first.scale.register_post_accumulate_grad_hook(print),
    "hook of the whole": lambda m: m.register_full_backward_hook(print),
    "hidden": lambda m: setattr(m, "hidden", True),
}


def check(seen: Seen, model: nn.Module) -> None:
    """It is what PyTorch's own walks find."""
    named = dict(model.named_parameters(remove_duplicate=False))
    assert list(seen.named) == list(named)
    assert all(seen.named[name] is p for name, p in named.items())
    assert seen.trains == tuple(p.requires_grad for p in named.values())
    modules = list(model.named_modules())
    assert list(seen.inner) == modules[1:]
    assert seen.modes == tuple(m.training for _, m in modules)


@pytest.mark.parametrize("cls", [Model, OwnWalk])
@pytest.mark.parametrize("kind", CHANGES)
def test_changes_are_seen(kind: str, cls: type[Model]) -> None:
    model = cls()
    user = UserModule(model)
    check(user.look(), model)
    CHANGES[kind](model)
    for _ in range(2):
        seen = user.look()
        check(seen, model)
        if cls is Model:  # else hooks are looked for each time
            assert seen.hooked == (kind.startswith("hook") and kind != "hook of the whole")
    other = user.look()
    kept = cls is Model
    assert (other.named is seen.named) == kept


@pytest.mark.parametrize("kind", ["one to eval", "frozen"])
def test_another_mode_is_another_program(kind: str, hw: HardwareProfile) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made: Any = lohan_fx.compile(model, hw=hw, optimizer=optimizer)
    for change in ("nothing", kind, "nothing"):
        CHANGES[change](model)
        made(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(made.lohan.programs) == 2
    made.lohan.close()


def prepared(model: nn.Module, hw: HardwareProfile) -> Any:
    """The model compiled, with a program."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made: Any = lohan_fx.compile(model, hw=hw, optimizer=optimizer)
    made.lohan.prepare(torch.ones(2, 4))
    return made


@pytest.mark.parametrize("kind", ["equal parameter", "equal, in the dict", "parameter more"])
def test_another_parameter_is_refused(kind: str, hw: HardwareProfile) -> None:
    model = Model()
    made = prepared(model, hw)
    CHANGES[kind](model)
    name = "more" if kind == "parameter more" else "scale"
    with pytest.raises(StepError, match=rf"parameter second\.{name} is another tensor"):
        made(torch.ones(2, 4))
    made.lohan.close()


def test_a_parameter_that_is_gone_is_missed(hw: HardwareProfile) -> None:
    """As adapters are when peft merges them."""
    model = Model()
    made = prepared(model, hw)
    del model.second.scale
    with pytest.raises(
        StepError, match=r"second\.scale is no longer part of the model: .*close\(\)"
    ):
        made(torch.ones(2, 4))
    made.lohan.close()


def test_layers_replaced_before_the_first_forward(hw: HardwareProfile) -> None:
    """By others, by none, or by their own under another name (as peft wraps them)."""

    def replaced(model: Model) -> None:
        model.second = Part()

    def removed(model: Model) -> None:
        del model.second.scale

    def renamed(model: Model) -> None:
        model.second = nn.Sequential(model.second)

    for change, what in (
        (replaced, r"second\.[\w.]+ is another tensor"),
        (removed, r"second\.scale is no longer part of the model"),
        (renamed, r"second\.[\w.]+ has another name now"),
    ):
        model = Model()
        made = lohan_fx.compile(model, hw=hw, optimizer=torch.optim.SGD(model.parameters()))
        change(model)
        for call in (made, made.lohan.prepare):
            with pytest.raises(StepError, match=rf"parameter {what}.*close\(\)"):
                call(torch.ones(2, 4))
        made.lohan.close()


def test_a_hook_of_a_module_that_came_later_is_refused(hw: HardwareProfile) -> None:
    model = Model()
    made = prepared(model, hw)
    model.drop = nn.Dropout(0.0)
    model.drop.register_full_backward_hook(print)
    with pytest.raises(StepError, match="module drop has a hook"):
        made(torch.ones(2, 4))
    made.lohan.close()
