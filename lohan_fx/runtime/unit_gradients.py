"""One unit's gradients in one step, and how they add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lohan_fx.runtime import sums
from lohan_fx.runtime.clipping import Norms
from lohan_fx.runtime.flats import Flats, views_of
from lohan_fx.runtime.lanes import Ticket
from lohan_fx.runtime.unit_states import UnitStates


@dataclass(slots=True)
class UnitGradients:
    """A unit's gradients: those that have come, and of which parameters there is a sum besides.

    `arrival` is when they are there (None: they are). `fresh` is when the unit at rest is what the
    step makes it, if its update is to run beside the next forward.
    """

    states: UnitStates
    gradients: list[Tensor | None]
    sums: list[bool]
    arrival: Ticket | None = None
    fresh: Ticket | None = None

    @classmethod
    def only_sums(cls, states: UnitStates) -> UnitGradients:
        """What a unit has by now, without gradients that come besides."""
        return cls(states, [None] * len(states.sums), list(states.sums))

    def add(self, flats: Flats, norms: Norms) -> None:
        """Add gradients to the sums that there are; the others begin with them."""
        assert flats.gradient is not None
        states = self.states
        totals = views_of(flats.gradient, states.layout.slices)
        squared = norms.wanted and norms.in_passing
        for i, (total, gradient) in enumerate(zip(totals, self.gradients, strict=True)):
            if gradient is not None:
                squares = sums.add(total, gradient, self.sums[i], squared=squared)
                if squares is not None:
                    norms.note(states, i, squares)

    def take_norms(self, flats: Flats, norms: Norms) -> None:
        """Take the norms, if they are wanted, of what `add` has completed, where it took none."""
        if norms.wanted:
            states = self.states
            parts = zip(self.gradients, self.sums, strict=True)
            whole = [has or g is not None for g, has in parts]
            norms.take_sums(
                states, flats, [has and not norms.has(states, i) for i, has in enumerate(whole)]
            )

    def complete(self, flats: Flats, norms: Norms) -> list[Tensor | None]:
        """What the step's gradients are: those that came last, or sums, which take them up."""
        if not any(self.sums):
            return self.gradients
        UnitGradients(self.states, _only(self.gradients, self.sums), self.sums).add(flats, norms)
        return self.chosen(flats)

    def chosen(self, flats: Flats) -> list[Tensor | None]:
        """Of each parameter the sum, where there is one, or else what came last."""
        if not any(self.sums):
            return self.gradients
        assert flats.gradient is not None
        totals = views_of(flats.gradient, self.states.layout.slices)
        parts = zip(self.gradients, self.sums, totals, strict=True)
        return [total if has else gradient for gradient, has, total in parts]


def _only(gradients: Sequence[Tensor | None], chosen: Sequence[bool]) -> list[Tensor | None]:
    return [g if yes else None for g, yes in zip(gradients, chosen, strict=True)]
