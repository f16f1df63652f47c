"""Which optimizers can update one unit at a time: those that work elementwise; who is refused."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from lohan_fx.errors import UnsupportedOptimizerError

SUPPORTED: tuple[type[Optimizer], ...] = (
    AdamW,
    Adam,
    SGD,
    RMSprop,
    Adagrad,
    Adamax,
    NAdam,
    RAdam,
    Adadelta,
    ASGD,
    Rprop,
)
"""Classes of torch.optim whose update of an element reads that element and scalars only."""

_NOT_ELEMENTWISE = {
    "LBFGS": "it calls a closure several times a step and mixes all parameters in one direction",
    "SparseAdam": "it needs sparse gradients, and the gradients that are emitted are dense",
    "Adafactor": "it factors its second moment into rows and columns and scales by tensor norms",
    "Muon": "it orthogonalizes whole matrices",
}

_ADVICE = (
    f"Use one of {', '.join(cls.__name__ for cls in SUPPORTED)}; or leave `optimizer=` out: then "
    "only activations are managed and your optimizer steps on `.grad` as ever."
)

_NO_PART_OF_THE_UPDATE = frozenset(
    {"add_param_group", "load_state_dict", "state_dict", "zero_grad"}
)


def refusal(optimizer: object, reason: str, advice: str = _ADVICE) -> UnsupportedOptimizerError:
    """The error that names an optimizer, why it is refused, and what to do."""
    return UnsupportedOptimizerError(
        f"{type(optimizer).__module__}.{type(optimizer).__qualname__} cannot update parameters "
        f"unit by unit: {reason}. {advice}"
    )


def supported_base(optimizer: Optimizer) -> type[Optimizer]:
    """Return the class in `SUPPORTED` whose update `optimizer` runs, or refuse."""
    for name, reason in _NOT_ELEMENTWISE.items():
        known = getattr(torch.optim, name, None)
        if known is not None and isinstance(optimizer, known):
            raise refusal(optimizer, reason)
    cls = type(optimizer)
    base = next((c for c in cls.__mro__ if c in SUPPORTED), None)
    if base is None:
        reason = "its class is not known to work elementwise"
        closure = inspect.signature(cls.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            reason = "its step needs a closure, which would run the model again inside the update"
        inner = getattr(optimizer, "optimizer", None)
        if isinstance(inner, Optimizer):
            raise refusal(optimizer, reason, f"Pass the {type(inner).__name__} that it wraps.")
        raise refusal(optimizer, reason)
    for c in cls.__mro__[: cls.__mro__.index(base)]:
        for name, value in vars(c).items():
            if name.startswith("__") or name in _NO_PART_OF_THE_UPDATE or not hasattr(base, name):
                continue
            # torch wraps `step` in place, on the class of the first instance.
            if inspect.unwrap(value) is not inspect.unwrap(getattr(base, name)):
                raise refusal(optimizer, f"{c.__qualname__} overrides {base.__name__}.{name}")
    return base


def check_flags(optimizer: Optimizer, values: Mapping[str, Any]) -> None:
    """Refuse hyperparameters of a group that change what `step` does."""
    if values.get("differentiable"):
        raise refusal(
            optimizer, "it has differentiable=True", "Construct it with differentiable=False."
        )
    if values.get("capturable"):
        raise refusal(
            optimizer,
            "it has capturable=True, whose arithmetic exists on accelerators only, while units may "
            "be updated in host memory",
            "Construct it with capturable=False.",
        )


def check_supported(optimizer: Optimizer) -> None:
    """Refuse an optimizer that cannot update one unit at a time with exact results.

    Supported are the classes in `SUPPORTED` and subclasses of them that override nothing that
    takes part in the update; learning rates may be tensors.

    Raises:
        UnsupportedOptimizerError: another class, an overridden step, differentiable=True,
            capturable=True, a parameter that holds a sparse gradient.
    """
    if not isinstance(optimizer, Optimizer):
        raise refusal(optimizer, "it is no torch.optim.Optimizer")
    supported_base(optimizer)
    for group in optimizer.param_groups:
        check_flags(optimizer, group)
        if any(p.grad is not None and p.grad.layout is not torch.strided for p in group["params"]):
            raise sparse_refusal(optimizer)


def sparse_refusal(optimizer: Optimizer) -> UnsupportedOptimizerError:
    """The error about a parameter with a sparse gradient."""
    return refusal(
        optimizer,
        "a parameter has a sparse gradient",
        "Construct nn.Embedding and nn.EmbeddingBag with sparse=False.",
    )
