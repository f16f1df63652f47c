"""What stands in ``.grad`` where plain PyTorch would have a gradient that is there no more, or not
yet the user's again.

Both are tensor subclasses, made once a parameter, so that a training loop that only resets
gradients (optimizer.zero_grad, model.zero_grad, ``p.grad = None``) needs no change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lohan_fx._compat import DisableTorchFunctionSubclass, make_subclass, make_wrapper_subclass
from lohan_fx.errors import StepError

_ADVICE = (
    "the gradient of this parameter was consumed while backward ran (gradients='consumed'). To "
    "clip gradients, give lohan_fx.compile clip_grad_norm= or clip_grad_value=; to add up several "
    "backwards, accumulate=; to read or change gradients (or with a GradScaler), gradients='kept'"
)

_ASKED = frozenset(
    {
        "device",
        "dtype",
        "grad_fn",
        "is_sparse",
        "layout",
        "requires_grad",
        "requires_grad_",
        "shape",
        "size",
    }
)
"""What may be asked of a consumed gradient: nothing of its values."""

_ZEROES = frozenset({"zero_", "_foreach_zero_"})


def _name(func: Any) -> str:
    name = getattr(func, "__name__", "")
    if name == "__get__":  # of a property
        return str(getattr(func.__self__, "__name__", ""))
    return str(name)


class ConsumedGradient(Tensor):
    """A gradient that is gone. It has no storage; every use of its values is a StepError.

    Attributes:
        zeroed: zero_grad(set_to_none=False) has reset it.
        looks: shape, dtype and device, which cost less to compare so.
    """

    zeroed: bool
    looks: tuple[torch.Size, torch.dtype, torch.device]

    @staticmethod
    def of(parameter: nn.Parameter) -> ConsumedGradient:
        made: ConsumedGradient = make_wrapper_subclass(ConsumedGradient, parameter)
        made.zeroed = False
        made.looks = (parameter.shape, parameter.dtype, parameter.device)
        return made

    def fits(self, parameter: nn.Parameter) -> bool:
        """Whether it can be the parameter's ``.grad``."""
        return self.looks == (parameter.shape, parameter.dtype, parameter.device)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "ConsumedGradient()"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = _name(func)
        if name in _ASKED:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if name in _ZEROES:
            given = pytree.tree_leaves(args)
            for tensor in given:
                if isinstance(tensor, ConsumedGradient):
                    tensor.zeroed = True
            others = [t for t in given if not isinstance(t, ConsumedGradient)]
            if others and name == "_foreach_zero_":
                torch._foreach_zero_(others)
            return args[0]
        raise StepError(_ADVICE)

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        raise StepError(_ADVICE)


class LentGradient(Tensor):
    """A gradient that updates beside the next forward may still read (schedule "deferred").

    It shares the memory of the gradient; whoever uses it waits for the updates first.
    """

    wait: Callable[[], None]

    @staticmethod
    def of(gradient: Tensor) -> LentGradient:
        made: LentGradient = make_subclass(LentGradient, gradient)
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if _name(func) not in _ASKED:
            for tensor in pytree.tree_leaves((args, kwargs)):
                if isinstance(tensor, LentGradient):
                    tensor.wait()
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
