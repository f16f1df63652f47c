"""Gradient clipping and skipped steps: what needs the gradients of the whole step.

Norms are taken where a gradient is made or completed, one a parameter, and combined as
`torch.nn.utils.clip_grad_norm_` does: the same numbers, to the bit where the same kernels run.

Mostly nothing has to be clipped, and that can be known before the norms are (`Bounds`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lohan_fx.runtime.flats import Flats, views_of
from lohan_fx.runtime.unit_states import UnitStates
from lohan_fx.runtime.update_values import Clip

logger = logging.getLogger("lohan_fx")

_EXACT_ENOUGH = (torch.float32, torch.float64)

_LARGEST = 1e18
"""Norms below it are surely finite when they are combined in float32, which squares them."""


@dataclass(slots=True, kw_only=True)
class Clipping:
    """What `lohan_fx.compile` was asked to do with gradients, and what came of it.

    Attributes:
        max_norm, max_value: as torch.nn.utils.clip_grad_norm_ and clip_grad_value_ take them.
        skip_nonfinite: leave a step out whose gradients have no finite norm.
        grad_norm: the last step's norm, before clipping; None if it was not needed.
        skipped_steps: steps left out so far.
        redone_steps: steps whose updates were tried in vain so far, for there was something to clip
            (schedule "speculative").
    """

    max_norm: float | None = None
    max_value: float | None = None
    skip_nonfinite: bool = False
    grad_norm: float | None = None
    skipped_steps: int = 0
    redone_steps: int = 0

    @property
    def needs_norms(self) -> bool:
        return self.max_norm is not None or self.skip_nonfinite

    @property
    def clips(self) -> bool:
        return self.max_norm is not None or self.max_value is not None

    def by_value(self) -> Clip | None:
        """What can be done to a gradient without knowing the others."""
        return None if self.max_value is None else Clip(limit=self.max_value)

    def choose(self, total: Tensor) -> Clip | None:
        """What to do to all gradients, by their norm; call `skips` first."""
        if self.max_norm is None:
            return self.by_value()
        factor = torch.clamp(self.max_norm / (total + 1e-6), max=1.0).cpu()
        return None if float(factor) == 1.0 else Clip(factor=factor)

    def keeps(self, bound: float) -> bool:
        """Whether gradients whose norm is at most `bound` are sure to be used as they are: neither
        clipped by it nor left out. What rounding may add to either side is allowed for."""
        limit = _LARGEST if self.max_norm is None else min(self.max_norm, _LARGEST)
        return bound * (1 + 1e-4) + 1e-5 <= limit

    def skips(self, total: Tensor) -> bool:
        """Note the step's norm; says whether the step is left out."""
        self.grad_norm = float(total)
        if not self.skip_nonfinite or math.isfinite(self.grad_norm):
            return False
        self.skipped_steps += 1
        if self.skipped_steps == 1:
            logger.warning(
                "lohan_fx: the gradients' norm is %s, so this step is skipped: weights and states "
                "stay as they are (this is said once; model.lohan.skipped_steps counts)",
                self.grad_norm,
            )
        return True


class Bounds:
    """What is known of gradients before the last ones are added to their sums, and bounds the norms
    that they will have: the norm of a sum is at most the sum of norms.

    Attributes:
        wanted: somebody will ask.
        of_sums: norms of the sums that are made now are wanted: what is added next may be the last.
    """

    def __init__(self) -> None:
        self.wanted = self.of_sums = False
        self._sums: dict[int, float] = {}
        self._last: dict[int, Tensor] = {}

    def begin(self, *, next_may_end: bool) -> None:
        """Backward begins: other gradients will be the last, perhaps those of the next one."""
        self.of_sums = self.wanted and next_may_end
        self._last.clear()

    def clear(self) -> None:
        """There are no sums any more."""
        self._sums.clear()

    def note_sum(self, states: UnitStates, i: int, squares: float | None) -> None:
        """The sum of squares of what has been added up for a unit's parameter `i`; None: it is
        unknown."""
        if squares is None:
            self._sums.pop(states.positions[i], None)
        else:
            self._sums[states.positions[i]] = math.sqrt(squares)

    def take(self, states: UnitStates, i: int, gradient: Tensor) -> None:
        """Take the norm of the last gradient of a unit's parameter `i`, where the gradient is; not
        if it is rounded on its way to host memory, where its norm may be larger, nor if norms are
        combined in half precision, which rounds more than `Clipping.keeps` allows for."""
        layout = states.layout
        if gradient.dtype == layout.copy_dtype and layout.dtype in _EXACT_ENOUGH:
            self._last[states.positions[i]] = _norm(gradient.detach(), states.layout.dtype)

    def sum(self, position: int) -> float | None:
        """The norm of what is in a parameter's sum, if it is known."""
        return self._sums.get(position)

    def last(self, position: int) -> Tensor | None:
        """The norm of a parameter's last gradient, if it is known."""
        return self._last.get(position)


Part = tuple[UnitStates, Sequence[Tensor | None], Sequence[bool]]
"""A unit's last gradients, and of which parameters there is a sum besides."""


class Norms:
    """The norms of one step's gradients, parameter by parameter.

    Attributes:
        wanted: the gradients that come now are whole, and their norms are needed.
        in_passing: norms of sums in host memory come from the additions that complete them, in
            float64. A pass of torch's kernel over them, one thread's, would take as long as the
            updates; on a CPU device it is plain PyTorch's kernel, so there the bits are its.
        bounds: what is known of those that are not.
    """

    def __init__(self, *, in_passing: bool) -> None:
        self.wanted = False
        self.in_passing = in_passing
        self.bounds = Bounds()
        self._found: dict[int, Tensor] = {}

    def begin(self, *, wanted: bool, next_may_end: bool) -> None:
        """Backward begins; the one after it may be the step's last."""
        self.wanted = wanted
        self.bounds.begin(next_may_end=next_may_end)
        self._found.clear()

    def take(self, states: UnitStates, i: int, gradient: Tensor) -> None:
        """Take the norm of the gradient of a unit's parameter `i`, where the gradient is."""
        self._found[states.positions[i]] = _norm(gradient.detach(), states.layout.dtype)

    def note(self, states: UnitStates, i: int, squares: float) -> None:
        """Take the norm of the gradient of a unit's parameter `i` from its sum of squares."""
        norm = torch.tensor(math.sqrt(squares), dtype=states.layout.dtype)
        self._found[states.positions[i]] = norm

    def note_all(self, states: UnitStates, squares: Sequence[float | None]) -> None:
        """`note` for all parameters of a unit that have one."""
        for i, value in enumerate(squares):
            if value is not None:
                self.note(states, i, value)

    def take_all(self, states: UnitStates, gradients: Sequence[Tensor | None]) -> None:
        """`take` for all parameters of a unit that have one."""
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                self.take(states, i, gradient)

    def take_sums(self, states: UnitStates, flats: Flats, sums: Sequence[bool]) -> None:
        """`take` of what has been added up, for the parameters that have a sum."""
        assert flats.gradient is not None
        views = views_of(flats.gradient, states.layout.slices)
        self.take_all(states, [v if has else None for v, has in zip(views, sums, strict=True)])

    def has(self, states: UnitStates, i: int) -> bool:
        return states.positions[i] in self._found

    def bound(self, parts: Iterable[Part]) -> float:
        """What the norm of all is at most, though some may be missing; inf: that is not known.
        Trials may take more of them meanwhile.

        Args:
            parts: the gradients of all units that are not on the device, at least.
        """
        known = dict(self._found)  # one call of C
        norms = list(known.values())
        sums = [0.0] * len(norms)  # what each is added to
        squares: list[float] = []  # of sums to which nothing is added
        for states, gradients, summed in parts:
            for position, last, has in zip(states.positions, gradients, summed, strict=True):
                if position in known or (last is None and not has):
                    continue
                total = self.bounds.sum(position) if has else 0.0
                norm = self.bounds.last(position)
                if total is None or (norm is None and last is not None):
                    return math.inf
                if last is None or norm is None:
                    squares.append(total * total)
                else:
                    sums.append(total)
                    norms.append(norm)
        for total, norm in zip(sums, _on_host(norms), strict=True):
            most = total + float(norm)
            squares.append(most * most)  # ** raises an error instead of being infinite
        return math.sqrt(sum(squares))

    def total(self) -> Tensor:
        """The norm of all, in the order of model.parameters(), as torch combines them."""
        norms = [self._found[position] for position in sorted(self._found)]
        if not norms:
            return torch.zeros(())
        if len({norm.device for norm in norms}) > 1:
            norms = _on_host(norms)
        return torch.linalg.vector_norm(torch.stack(norms), 2.0)


def _norm(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """A gradient's norm, in this dtype."""
    if torch.promote_types(gradient.dtype, dtype) != dtype:  # vector_norm narrows nothing
        gradient = gradient.to(dtype)
    cast = None if gradient.dtype == dtype else dtype
    return torch.linalg.vector_norm(gradient, 2.0, dtype=cast)


def _on_host(norms: Sequence[Tensor]) -> list[Tensor]:
    """Scalars of several devices on the host, with one transfer a device."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for k, norm in enumerate(norms):
        groups.setdefault((norm.device, norm.dtype), []).append(k)
    found = list(norms)
    for places in groups.values():
        moved = torch.stack([norms[k] for k in places]).cpu()
        for k, norm in zip(places, moved, strict=True):
            found[k] = norm
    return found
