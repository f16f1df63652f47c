"""Every assignment of a small workload, by ascending lower bound. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from lohan_fx.hardware import MemoryBudget
from lohan_fx.planners.assign import Improver
from lohan_fx.planners.model import Model, Option
from lohan_fx.planners.simplex import Floats

_UNIT_CHOICES: tuple[frozenset[Option], ...] = (
    frozenset({"device", "host", "hold", "direct", "reload", "ssd", "ssd-hold"}),
    frozenset({"device", "host", "direct", "ssd"}),
    frozenset({"device", "host", "ssd"}),
)
"""From all ways to read a unit to the usual one: as many as the limit allows."""


def columns_of(model: Model, limit: int) -> list[list[int]] | None:
    """For each group the columns to enumerate, at most `limit` assignments; None if more."""
    for wanted in _UNIT_CHOICES:
        found = []
        for g, group in enumerate(model.groups):
            start = int(model.start[g])
            columns = [
                start + k
                for k, option in enumerate(group.options)
                if group.kind == "residual" or option in wanted or len(group.options) == 1
            ]
            found.append(columns)
        if math.prod(len(columns) for columns in found) <= limit:
            return found
    return None


def by_bound(
    model: Model, budget: MemoryBudget, columns: Sequence[Sequence[int]]
) -> Iterator[tuple[float, dict[str, Option]]]:
    """(lower bound in seconds, assignment), ascending; those that cannot fit are left out.

    The model must have one member in every group (`Model(by_value=True)`).
    """
    program = model.program(budget)
    search = Improver(model, program)
    count = math.prod(len(c) for c in columns)
    picks = np.unravel_index(np.arange(count), [len(c) for c in columns]) if columns else ()
    totals = np.repeat(-program.limits[:, None], max(count, 1), axis=1)
    effort = np.zeros(max(count, 1))
    chosen = [np.asarray(c)[pick] for c, pick in zip(columns, picks, strict=True)]
    for column in chosen:
        totals += program.matrix[:, column]
        effort += model.effort[column]
    slack = totals[search.num_time :] <= 1e-6 * np.abs(program.limits[search.num_time :, None])
    fits = np.flatnonzero(slack.all(axis=0))
    values: Floats = search.value(totals[:, fits], 0.0)
    options = [o for group in model.groups for o in group.options]
    for at in np.lexsort((fits, effort[fits], values)):
        k = int(fits[at])
        assignment = {
            group.members[0]: options[int(column[k])]
            for group, column in zip(model.groups, chosen, strict=True)
        }
        yield float(values[at]) * model.unit_s, assignment
