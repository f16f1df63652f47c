"""Whole copies of every option: branch and bound over the linear program. No torch.

The program has few groups of many equal copies, so that its rounded solution is nearly always
within a fraction of a percent; branching matters for shallow models, where a unit's states are a
large part of the memory. Units are branched on first. The number of nodes is limited, so the
result comes with the bound of what was not looked at.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from lohan_fx.planners.assign import Improver, rounded
from lohan_fx.planners.model import Model
from lohan_fx.planners.simplex import ChoiceProgram, Floats, Ints, Solution, solve

_GAP = 1e-4
"""A node that can gain less than this part of the best value is not looked at."""

_PAIRS = 1_200
"""With at most so many moves, the local search tries pairs of them."""


@dataclass(frozen=True, kw_only=True)
class Whole:
    """`x[j]` copies of option j; `value` in the program's unit, `bound` of the integer program.

    `worth[j]` is the price of option j at the optimum of the linear program.
    """

    x: Ints
    value: float
    bound: float
    worth: Floats
    nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """A part of the choices: `limits` are (option, at most?, copies)."""

    limits: tuple[tuple[int, bool, int], ...]
    start: Ints


def _restricted(program: ChoiceProgram, node: _Node) -> ChoiceProgram:
    if not node.limits:
        return program
    matrix = np.zeros((len(node.limits), len(program.costs)))
    limits = np.zeros(len(node.limits))
    for r, (column, at_most, copies) in enumerate(node.limits):
        sign = 1.0 if at_most else -1.0
        matrix[r, column] = sign
        limits[r] = sign * copies
    return program.with_rows(matrix, limits)


def _fullest(model: Model, x: Floats) -> Ints:
    """For each group the option with the most copies: where to start a neighbouring program."""
    found = [
        int(model.start[g]) + int(np.argmax(x[model.start[g] : model.start[g + 1]]))
        for g in range(len(model.groups))
    ]
    return np.array(found, dtype=np.int64)


def _branching(model: Model, x: Floats) -> int | None:
    """The option to branch on: a unit's before a residual's, the least whole one; None if whole."""
    part = np.minimum(x - np.floor(x), np.ceil(x) - x)
    best = None
    for column, group, _ in model.columns():
        if part[column] > 1e-6:
            key = (group.kind != "unit", -part[column], column)
            if best is None or key < best:
                best = key
    return None if best is None else best[2]


def solve_whole(model: Model, program: ChoiceProgram, max_nodes: int) -> Whole | None:
    """The best whole copies found; None if the linear program is infeasible.

    At least one node is looked at. The result may exceed a budget a little if rounding does.
    """
    improver = Improver(model, program)
    pairs = len(improver.moves) <= _PAIRS
    root = _Node(limits=(), start=model.leanest)
    first = solve(program, root.start)
    if first.status == "infeasible":
        return None
    worth = -first.prices[: len(model.rows)] @ (model.time / model.unit_s) + program.costs
    best_x, best = np.zeros(0, dtype=np.int64), np.inf
    queue: list[tuple[float, int, _Node, Solution]] = [(first.value, 0, root, first)]
    count = nodes = 0
    while queue and nodes < max_nodes:
        if queue[0][0] >= best - _GAP * abs(best):
            break
        _, _, node, solution = heapq.heappop(queue)
        nodes += 1
        x = improver.run(rounded(model, solution.x), pairs=pairs)
        value = improver.score(x)
        if value < best:
            best_x, best = x, value
        column = _branching(model, solution.x)
        if column is None or nodes >= max_nodes:
            continue
        at = int(np.floor(solution.x[column]))
        start = _fullest(model, solution.x)
        for limit in ((column, True, at), (column, False, at + 1)):
            child = _Node(limits=(*node.limits, limit), start=start)
            found = solve(_restricted(program, child), start)
            if found.status != "infeasible" and found.value < best - _GAP * abs(best):
                count += 1
                heapq.heappush(queue, (found.value, count, child, found))
    bound = min(queue[0][0], best) if queue else best
    return Whole(x=best_x, value=best, bound=bound, worth=worth, nodes=nodes)
