"""Which backwards make a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Accumulation:
    """How many backwards make a step; one object for all updaters of a model.

    Attributes:
        kept: gradients are the user's, as in plain PyTorch: every backward adds to them, and
            optimizer.step() reads them.
        limit: so many backwards make a step (the user's optimizer.step() may end it before);
            None: every backward is the last one that is not `more`.
        more: the user says that the backwards that run now are not the last.
        forwards: so many of them may wait for their backward at once; a step's last backward is
            one that leaves none.
        waiting: how many wait now.
        count: backwards of this step so far, without the last.
    """

    kept: bool = False
    limit: int | None = 1
    more: bool = False
    forwards: int = 1
    waiting: Callable[[], int] = lambda: 0
    count: int = 0

    @property
    def adds(self) -> bool:
        """Whether units have a flat in which gradients add up."""
        return self.kept or self.limit != 1 or self.forwards > 1

    def ends(self) -> bool:
        """Whether the backward that begins is the step's last."""
        if self.kept or self.waiting():
            return False
        return not self.more if self.limit is None else self.count + 1 >= self.limit

    def next_may_end(self) -> bool:
        """Whether the backward after the one that begins may be the step's last. (Parameters that
        have no gradient in this one, but had one before, are not asked about again.)"""
        return self.limit is None or self.count + 2 >= self.limit
