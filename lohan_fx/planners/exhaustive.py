"""Assignments of a small workload by ascending lower bound: all, or those near one. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from lohan_fx.hardware import MemoryBudget
from lohan_fx.planners.assign import Improver
from lohan_fx.planners.model import UNIT_OPTIONS, Model, Option
from lohan_fx.planners.simplex import ChoiceProgram, Floats, Ints

_UNIT_CHOICES: tuple[frozenset[Option], ...] = (
    frozenset(UNIT_OPTIONS),
    frozenset({"device", "parked", "cast", "cast-parked", "host", "direct", "ssd", "ssd-copy"}),
    frozenset({"device", "host", "ssd", "ssd-copy"}),
)
"""From all ways to read a unit to the usual one: as many as the limit allows."""

MAX_PAIRS = 12_000
"""With more pairs of changes than this, they are made one at a time."""


def columns_of(model: Model, limit: int) -> list[list[int]] | None:
    """For each group the columns to enumerate, at most `limit` assignments; None if more."""
    for wanted in _UNIT_CHOICES:
        found = []
        for g, group in enumerate(model.groups):
            start = int(model.start[g])
            columns = [
                start + k
                for k, option in enumerate(group.options)
                if group.kind == "residual" or option in wanted
            ]
            found.append(columns or [start + k for k in range(len(group.options))])
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
    fits = _fitting(program, search.num_time, totals)
    values: Floats = search.value(totals[:, fits], 0.0)
    options = [o for group in model.groups for o in group.options]
    for at in np.lexsort((fits, effort[fits], values)):
        k = int(fits[at])
        assignment = {
            group.members[0]: options[int(column[k])]
            for group, column in zip(model.groups, chosen, strict=True)
        }
        yield float(values[at]) * model.unit_s, assignment


def exchanges(
    model: Model, budget: MemoryBudget, now: Mapping[str, Option]
) -> Iterator[tuple[float, dict[str, Option]]]:
    """(lower bound in seconds, assignment) with one or two other choices, as `by_bound` does.

    Two, so that memory goes from one residual to another; only one if there are too many pairs.
    """
    program = model.program(budget)
    search = Improver(model, program)
    columns = [model.column(name, option) for name, option in now.items()]
    if None in columns:
        return
    x = np.bincount(np.array(columns, dtype=np.int64), minlength=len(model.column_group))
    moves = np.flatnonzero(x[search.moves[:, 0]] > 0)
    count = len(moves)
    change = np.hstack([search.change[:, moves], np.zeros((len(program.limits), 1))])
    effort = model.effort[search.moves[moves, 1]] - model.effort[search.moves[moves, 0]]
    effort = np.append(effort, 0.0)
    group = np.append(model.column_group[search.moves[moves, 0]], -1)
    first, second = np.arange(count), np.full(count, count)  # the move `count` changes nothing
    if count * (count - 1) // 2 <= MAX_PAIRS:
        first, second = np.triu_indices(count + 1, k=1)
        apart = group[first] != group[second]
        first, second = first[apart], second[apart]
    totals = search.totals(x)[:, None] + change[:, first] + change[:, second]
    effort = effort[first] + effort[second]
    fits = _fitting(program, search.num_time, totals)
    values: Floats = search.value(totals[:, fits], 0.0)
    options = [(group.members[0], o) for group in model.groups for o in group.options]
    for at in np.lexsort((fits, effort[fits], values)):
        k = int(fits[at])
        picked = [search.moves[moves[m], 1] for m in (first[k], second[k]) if m < count]
        yield float(values[at]) * model.unit_s, {**now, **dict(options[j] for j in picked)}


def _fitting(program: ChoiceProgram, num_time: int, totals: Floats) -> Ints:
    """The columns of totals that exceed no budget."""
    slack = 1e-6 * np.abs(program.limits[num_time:, None])
    return np.flatnonzero((totals[num_time:] <= slack).all(axis=0))
