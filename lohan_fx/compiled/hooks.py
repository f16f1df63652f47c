"""Hooks: ours on the user's optimizer and modules, and theirs that would never be called.

`NoCopies` is one, too: on copying and pickling an optimizer, for which torch has no hook.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from torch import nn
from torch.optim import Optimizer

from lohan_fx._compat import backward_hook, gradient_hook
from lohan_fx.errors import LohanError, StepError

T = TypeVar("T")


class Call(Generic[T]):
    """A hook that calls a method, whatever it is called with itself.

    Holds the method's object weakly: optimizer and model must not keep it alive.
    """

    def __init__(self, owner: T, method: Callable[[T], None]) -> None:
        self._owner = weakref.ref(owner)
        self._method = method

    def __call__(self, *_: Any) -> None:
        owner = self._owner()
        if owner is not None:
            self._method(owner)


class SubmoduleCall(Call[T]):
    """A hook of a submodule, which may be copied or pickled by itself: the copy has none."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _nothing


def _nothing(*_: Any) -> None:
    pass


class NoCopies:
    """Refuses copies and pickles of an optimizer whose states a compiled model has.

    ``Optimizer.state`` is empty between calls, so a copy would begin with new states, and say
    nothing. It stands as ``__getstate__`` in the instance, where copy and pickle look first: the
    optimizer's class stays what it is.

    Args:
        optimizer: the user's. It may be that of several models.
        owner: the module whose tiers have them; held weakly. Without it copies are as ever.
    """

    def __init__(self, optimizer: Optimizer, owner: object) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._owner: weakref.ref[object] | None = weakref.ref(owner)
        self._before: Callable[[], Any] | None = vars(optimizer).get("__getstate__")
        vars(optimizer)["__getstate__"] = self

    def __call__(self) -> Any:
        optimizer = self._optimizer()
        assert optimizer is not None  # its own method is called
        name = type(optimizer).__name__
        if self._owner is not None and self._owner() is not None:
            raise LohanError(
                f"the {name} of a compiled model cannot be copied or pickled: the model's tiers "
                "have its states. Use its state_dict(), or copy it before lohan_fx.compile or "
                "after model.lohan.close()"
            )
        return type(optimizer).__getstate__(optimizer) if self._before is None else self._before()

    def remove(self) -> None:
        """Copies are as ever, whatever stands in the optimizer's place now."""
        self._owner = None
        optimizer = self._optimizer()
        if optimizer is None or vars(optimizer).get("__getstate__") is not self:
            return
        if self._before is None:
            del vars(optimizer)["__getstate__"]
        else:
            vars(optimizer)["__getstate__"] = self._before


def refuse_uncalled(
    trained: Iterable[str],
    named: Mapping[str, nn.Parameter],
    modules: Iterable[tuple[str, nn.Module]],
) -> None:
    """Refuse hooks that plain PyTorch's backward would call, and a program's does not.

    Without an optimizer parameters get their gradients from autograd, and hooks are called.

    Args:
        trained: names of the parameters that the optimizer updates.
        named: the model's parameters.
        modules: the modules inside the model.

    Raises:
        StepError: there is such a hook.
    """
    for name in trained:
        kind = gradient_hook(named[name]) if name in named else ""
        if kind:
            raise StepError(
                f"parameter {name} has a hook of {kind}(), which would not be called: the "
                "gradient updates its unit in backward, or is added up there, without passing "
                "through autograd. Remove the hook; compile with gradients='kept' and read or "
                "change .grad between backward and optimizer.step(), or use clip_grad_norm= or "
                "clip_grad_value= (a hook that runs an optimizer in backward is not needed)"
            )
    for name, module in modules:
        kind = backward_hook(module)
        if kind:
            raise StepError(
                f"module {name} has a hook of {kind}(), which would not be called: backward is "
                "one program. Remove it, or keep what needs it out of the module that is "
                "compiled; gradients of parameters are in .grad with gradients='kept'"
            )
