"""What a forward asks of all modules and parameters, in one pass over them.

`nn.Module.named_modules` and what is built on it take a millisecond for a Llama of 16 layers, and
a forward would call them several times while the device waits for its first kernel. So what they
found is kept for as long as modules have the same children and parameters under the same names.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lohan_fx._compat import ModuleParts, have_gradient_hooks

_needs_gradient: Callable[[nn.Parameter], bool] = operator.attrgetter("requires_grad")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A model as a forward finds it.

    Attributes:
        named: its parameters by every name that they have.
        inner: the modules inside, by name.
        modes: of every module, whether it trains.
        trains: of every name in `named`, whether the parameter needs a gradient.
        hooked: whether a parameter or a module inside has a hook of backward.
    """

    named: Mapping[str, nn.Parameter]
    inner: Sequence[tuple[str, nn.Module]]
    modes: tuple[bool, ...]
    trains: tuple[bool, ...]
    hooked: bool


class Structure:
    """Which modules and parameters a model has.

    Args:
        module: the model, which is not held.
        cls: its class before it was compiled.
        named: its parameters by every name, as that class gives them.

    Attributes:
        is_plain: `seen` knows whether they are others now. Otherwise a class has a walk of its own,
            and a structure is for one forward.
    """

    def __init__(
        self, module: nn.Module, cls: type[nn.Module], named: Mapping[str, nn.Parameter]
    ) -> None:
        modules = list(module.named_modules())
        self._named = named
        self._inner = modules[1:]
        self._parameters = list(named.values())
        self.is_plain = _is_plain(cls, [m for _, m in modules])
        self._dicts = [vars(m) for _, m in self._inner]
        if self.is_plain:
            dicts = [vars(module), *self._dicts]
            self._owners = _owners(dicts)
            self._sizes = [*map(len, self._owners)]
            entries = [(of, name, held) for of in self._owners for name, held in of.items()]
            self._places = [of for of, _, _ in entries]
            self._names = [name for _, name, _ in entries]
            self._held = [held for _, _, held in entries]

    def seen(self, module: nn.Module) -> Seen | None:
        """The model as it is now; None if it is of this structure no more."""
        if self.is_plain:
            dicts = [vars(module), *self._dicts]
            if not self._is_of(dicts):
                return None
            modes = tuple(map(ModuleParts.training, dicts))
            hooked = any(map(any, (map(hooks, self._dicts) for hooks in ModuleParts.backward)))
        else:
            modes = tuple(m.training for m in module.modules())
            hooked = True  # who refuses them looks closer
        return Seen(
            named=self._named,
            inner=self._inner,
            modes=modes,
            trains=tuple(map(_needs_gradient, self._parameters)),
            hooked=hooked or have_gradient_hooks(self._parameters),
        )

    def _is_of(self, dicts: Sequence[dict[str, Any]]) -> bool:
        """Whether modules of these dicts have the same children and parameters: the same objects,
        as tensors that are equal may be others."""
        owners = _owners(dicts)
        return (
            all(map(operator.is_, owners, self._owners))
            and [*map(len, owners)] == self._sizes
            and all(map(operator.is_, map(dict.get, self._places, self._names), self._held))
        )


def _owners(dicts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Where modules of these dicts have their children and parameters, by name."""
    return [*map(ModuleParts.children, dicts), *map(ModuleParts.parameters, dicts)]


def _is_plain(cls: type[nn.Module], modules: Sequence[nn.Module]) -> bool:
    """Whether modules and parameters are what the modules' own dicts say, and nothing else."""
    classes: set[type[nn.Module]] = {cls, *(type(m) for m in modules[1:])}
    return (
        cls.named_parameters is nn.Module.named_parameters
        and all(c.named_modules is nn.Module.named_modules for c in classes)
        and all(vars(m).keys() >= ModuleParts.names for m in modules)
    )
