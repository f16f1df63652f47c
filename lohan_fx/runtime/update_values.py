"""What an update of a unit's parameters is given, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lohan_fx.runtime.shadow import StateSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """What happens to gradients before they are used, in the masters' dtype.

    Attributes:
        factor: every element is multiplied by it: a scalar tensor on the CPU, or None.
        limit: every element is brought into [-limit, limit]; None: it is not.
    """

    factor: Tensor | None = None
    limit: float | None = None

    @property
    def changes(self) -> bool:
        """Whether anything happens to them."""
        return self.factor is not None or self.limit is not None

    def apply(self, gradient: Tensor) -> None:
        """Change a gradient in place, as torch.nn.utils would. Nothing else may hold it: one tensor
        can be the gradient of two parameters, or go on to the layers below."""
        if self.factor is not None:
            gradient.mul_(self.factor.to(gradient.device))
        if self.limit is not None:
            gradient.clamp_(-self.limit, self.limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Where the results of an update go that is only tried: as the arguments of `step_mixed`."""

    masters: Sequence[Tensor]
    state: Sequence[Mapping[str, Tensor]]
    compute: Sequence[Tensor] | None


Squares = tuple[float | None, ...]
"""Sums of squares of gradients, one a parameter, as `Tried.squares`."""


@dataclass(frozen=True, slots=True)
class Tried:
    """What came of an update that was only tried.

    Attributes:
        scalars: the scalar state of each parameter after it.
        squares: of each parameter's gradient the sum of squares in float64; None where it was not
            asked for, or there is no gradient.
    """

    scalars: tuple[dict[str, Tensor] | None, ...]
    squares: Squares


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """The tensors of one update, one of each a parameter.

    Attributes:
        masters, grads, sums, state: as the arguments of `UnitOptimizer.step_mixed`.
        copies: its `compute`; all None if there are none.
        mixed: gradients may have another dtype than their masters.
        clip: what to do to gradients first.
        results: where the results go; None: into `masters`, `state` and `copies`.
    """

    masters: Sequence[Tensor]
    grads: Sequence[Tensor | None]
    sums: Sequence[Tensor | None]
    state: Sequence[Mapping[str, Tensor]]
    copies: Sequence[Tensor | None]
    mixed: bool
    clip: Clip
    results: Results | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A parameter in its group: what its update depends on besides the operands.

    Attributes:
        group: index of the group.
        values: hyperparameters of the group.
        layout: the state that they need.
        names: state of parameter shape that has storage.
        scalars: its scalar state; None before the first update. An update leaves it as it is.
    """

    group: int
    values: Mapping[str, Any]
    layout: StateSpec
    names: tuple[str, ...]
    scalars: Mapping[str, Tensor] | None


@dataclass(frozen=True, slots=True)
class Updated:
    """What came of an update.

    Attributes:
        scalars: by index, the scalar state after it of the parameters that were updated.
        squares: by index, the sums of squares of their gradients, if they were asked for.
    """

    scalars: Mapping[int, dict[str, Tensor]]
    squares: Mapping[int, float]
