"""One unit's gradients in one step, and how they add up."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lohan_fx.runtime import sums
from lohan_fx.runtime.clipping import Norms
from lohan_fx.runtime.flats import Flats, views_of
from lohan_fx.runtime.lane import Ticket
from lohan_fx.runtime.native.adam import Addend
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

    @property
    def unadded(self) -> bool:
        """Whether there are gradients besides sums."""
        return any(g is not None for g in self.gradients)

    def add(self, flats: Flats, norms: Norms) -> None:
        """Add gradients to the sums that there are; the others begin with them. There are only sums
        then: a second call does nothing."""
        addends = self._addends(flats)
        squared = norms.in_passing and (norms.wanted or norms.bounds.of_sums)
        squares = sums.add(list(addends.values()), squared=squared)
        for i, value in zip(addends, squares, strict=True):
            norms.bounds.note_sum(self.states, i, value)
            if value is not None and norms.wanted:
                norms.note(self.states, i, value)
        self.sums = [has or g is not None for has, g in zip(self.sums, self.gradients, strict=True)]
        self.gradients = [None] * len(self.gradients)

    def _addends(self, flats: Flats) -> dict[int, Addend]:
        """By parameter."""
        assert flats.gradient is not None
        totals = views_of(flats.gradient, self.states.layout.slices)
        parts = zip(totals, self.gradients, self.sums, strict=True)
        return {i: Addend(t, g, not has) for i, (t, g, has) in enumerate(parts) if g is not None}

    def foresee_norms(self, flats: Flats, norms: Norms) -> bool:
        """Take the norms of the sums that `add` would make, without adding: what follows adds in
        its own pass. False: nothing was done, for it is no faster than to add."""
        if not norms.in_passing:
            return False
        addends = self._addends(flats)
        squares = sums.squares(list(addends.values()))
        if squares is None:
            return False
        for i, value in zip(addends, squares, strict=True):
            norms.note(self.states, i, value)
        self.take_norms(flats, norms)
        return True

    def lacks_norms(self, norms: Norms) -> bool:
        """Whether norms are wanted that nobody has taken: `Norms.bound` was enough."""
        parts = enumerate(zip(self.gradients, self.sums, strict=True))
        return norms.wanted and any(
            (g is not None or has) and not norms.has(self.states, i) for i, (g, has) in parts
        )

    def take_norms(self, flats: Flats, norms: Norms) -> None:
        """Take the norms, if they are wanted, of sums that are complete and have none."""
        if norms.wanted:
            states = self.states
            late = [has and not norms.has(states, i) for i, has in enumerate(self.sums)]
            norms.take_sums(states, flats, late)

    def totals(self, flats: Flats) -> list[Tensor | None] | None:
        """The sums to which the gradients that came last are added; None if there are none."""
        if not any(self.sums):
            return None
        assert flats.gradient is not None
        totals = views_of(flats.gradient, self.states.layout.slices)
        return [t if has else None for t, has in zip(totals, self.sums, strict=True)]
