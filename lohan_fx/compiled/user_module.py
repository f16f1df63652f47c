"""The user's nn.Module under the class that replaced its own.

Compiling gives the module a subclass of its class, whose forward runs the programs, and which waits
for updates where parameters are asked for. `UserModule` reaches what was there before.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lohan_fx._compat import without_hooks
from lohan_fx.compiled.structure import Seen, Structure
from lohan_fx.errors import StepError


class UserModule:
    """A module as it was before it was compiled. Held weakly: it holds its compiled model.

    Attributes:
        ref: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.ref = weakref.ref(module)
        self._class = type(module)
        self._structure: Structure | None = None
        self._forward = module.__dict__.get("forward")  # of the instance alone, as wrappers set it

    @property
    def module(self) -> nn.Module:
        """The module.

        Raises:
            StepError: it has been deleted.
        """
        module = self.ref()
        if module is None:
            raise StepError("the compiled model has been deleted")
        return module

    def look(self) -> Seen:
        """The module as it is now: parameters, modes, hooks. Does not wait for updates."""
        module, structure = self.module, self._structure
        seen = structure.seen(module) if structure is not None else None
        if seen is None:
            structure = Structure(module, self._class, self.parameters())
            self._structure = structure if structure.is_plain else None
            seen = structure.seen(module)
            assert seen is not None
        return seen

    def named_parameters(self, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As the user's class names them, without waiting for updates (`LohanModule`)."""
        found: Iterator[tuple[str, nn.Parameter]]
        found = self._class.named_parameters(self.module, **options)
        return found

    def parameters(self) -> dict[str, nn.Parameter]:
        """By every name that they have."""
        return dict(self.named_parameters(remove_duplicate=False))

    @contextmanager
    def as_it_was(self) -> Iterator[nn.Module]:
        """The module with the forward that it had before it was compiled."""
        module = self.module
        wrapped, forward = type(module), module.__dict__.pop("forward", None)
        module.__class__ = self._class
        if self._forward is not None:
            module.__dict__["forward"] = self._forward
        try:
            yield module
        finally:
            module.__class__ = wrapped
            module.__dict__.pop("forward", None)
            if forward is not None:  # set since: it calls the compiled one
                module.__dict__["forward"] = forward

    @contextmanager
    def to_be_traced(self) -> Iterator[nn.Module]:
        """The module as it was, without gradients, and without its own hooks: those are called
        around the program and are no part of it."""
        with self.as_it_was() as module, _without_gradients(module), without_hooks(module):
            yield module

    def give_back(self, compiled: object) -> None:
        """Make the module an ordinary one again, if it is this compiled model's still."""
        module = self.ref()
        if module is not None and module.__dict__.get("_lohan") is compiled:
            self._structure = None
            module.__class__ = self._class
            del module.__dict__["_lohan"]
            if self._forward is not None:
                module.__dict__.setdefault("forward", self._forward)


@contextmanager
def _without_gradients(module: nn.Module) -> Iterator[None]:
    """Tracing would look into parameters' gradients, which are not there in the traced model."""
    gradients: list[tuple[nn.Parameter, Tensor]]
    gradients = [(p, p.grad) for p in module.parameters() if p.grad is not None]
    for p, _ in gradients:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in gradients:
            p.grad = gradient
