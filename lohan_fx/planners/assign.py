"""From a solution of the linear model to whole choices: rounding, improving, naming. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lohan_fx.plan import Action, Plan, Tier
from lohan_fx.planners.model import CAST, COPIED, PARKED, UNIT_OPTIONS, Model, Option
from lohan_fx.planners.schedule import Choices, UnitMode
from lohan_fx.planners.simplex import ChoiceProgram, Floats, Ints
from lohan_fx.planners.time_rows import BACKWARD, BETWEEN, FORWARD, OPTIMIZER, STEP, TO_END

Assignment = Mapping[str, Option]
"""Residual or unit → its option."""

_OVER_BUDGET = 1e5
"""What exceeding a budget by all of it costs, in steps: more than a unit's states can save."""

_FIRST_MOVES = 16
"""So many of the cheapest moves are tried as the first of a pair."""

_FROM_THE_START: Mapping[Option, int] = {
    # Copies of what is made first have the longest time; what is made last is kept shortest.
    "ssd": 0,
    "host": 1,
    "recompute": 2,
    "keep": 3,
}
_UNITS_FROM_THE_START: Mapping[Option, int] = {
    # Units used first are updated last, when nothing hides that: they belong on the device.
    "device": 0,
    "cast": 0,
    "cast-parked": 1,
    "parked": 1,  # the later a unit is used, the longer its gradients would stay on the device
    "direct": 2,
    "reload": 3,
    "hold": 4,
    "host": 5,
    "ssd-copy-hold": 6,
    "ssd-copy": 7,
    "ssd-hold": 8,
    "ssd": 9,
}


_ON_DEVICE: Mapping[tuple[bool, bool], Option] = {
    (False, False): "device",
    (False, True): "parked",
    (True, False): "cast",
    (True, True): "cast-parked",
}
"""By whether the unit casts, and whether its gradients are parked."""


def rounded(model: Model, x: Floats) -> Ints:
    """Whole copies of each option: parts below one go to the options with the largest parts."""
    whole = np.floor(x + 1e-9)
    part = x - whole
    for g in range(len(model.groups)):
        columns = np.arange(model.start[g], model.start[g + 1])
        missing = round(model.counts[g] - whole[columns].sum())
        order = sorted(columns, key=lambda j: (-part[j], j))
        for j in order[:missing]:
            whole[j] += 1
    return whole.astype(np.int64)


def rounded_evenly(model: Model, x: Floats) -> Ints:
    """Whole copies of each option, about as many in all groups together as `x` has in parts.

    Where equal units are groups of their own, as the windows of their ops differ, a program that
    has room for three of eight elsewhere gives each group the same three eighths, and `rounded`
    would leave all eight where most of each is. Here what a group was given too little or too much
    of is carried to the next one; so an option that `x` has a part of may get more of a group than
    that part rounded up, but never more than what the group's parts are together.
    """
    whole = np.floor(x + 1e-9)
    part = x - whole
    due: dict[tuple[str, Option], float] = {}
    for g, group in enumerate(model.groups):
        first = int(model.start[g])
        keys = [(group.kind, option) for option in group.options]
        for k, key in enumerate(keys):
            due[key] = due.get(key, 0.0) + float(part[first + k])
        missing = round(model.counts[g] - whole[first : first + len(keys)].sum())
        for _ in range(missing):
            allowed = [k for k in range(len(keys)) if part[first + k] > 1e-9] or [0]
            k = max(allowed, key=lambda k: (due[keys[k]], -k))
            whole[first + k] += 1
            due[keys[k]] -= 1.0
    return whole.astype(np.int64)


class Improver:
    """Local search over whole copies: the integer program's own objective, budgets as penalties.

    A move takes one copy of a group from one option to another. All moves are tried at once; the
    best is made, until none gains. If `pairs`, the best second move after each of the most
    promising first ones is tried as well: that trades memory between groups.
    """

    def __init__(self, model: Model, program: ChoiceProgram) -> None:
        self.model = model
        self.program = program
        self.num_time = len(model.rows)
        stages = np.array([row.stages for row in model.rows])
        kinds = {
            "f": FORWARD,
            "b": BACKWARD,
            "o": OPTIMIZER,
            "end": TO_END,
            "between": BETWEEN,
            "all": STEP,
        }
        self.of_kind = {
            name: np.flatnonzero((stages == kind).all(axis=1)) for name, kind in kinds.items()
        }
        limits = program.limits[self.num_time :]
        self.scale = _OVER_BUDGET / np.maximum(np.abs(limits), 1.0)
        pairs = [
            (j, k)
            for g in range(len(model.groups))
            for j in range(model.start[g], model.start[g + 1])
            for k in range(model.start[g], model.start[g + 1])
            if j != k
        ]
        self.moves: npt.NDArray[np.int64] = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        matrix = program.matrix
        self.change = matrix[:, self.moves[:, 1]] - matrix[:, self.moves[:, 0]]
        self.cost = program.costs[self.moves[:, 1]] - program.costs[self.moves[:, 0]]

    def value(self, totals: Floats, cost: Any) -> Any:
        """Step seconds (in the program's unit) for totals of all rows; vectorised over columns."""

        def most(kind: str) -> Any:
            rows = self.of_kind[kind]
            return totals[rows].max(axis=0) if rows.size else 0.0

        forward, backward = np.maximum(most("f"), 0.0), np.maximum(most("b"), 0.0)
        tail = np.maximum(most("o"), most("end") - backward)
        tail = np.maximum(tail, most("between") - forward)
        tail = np.maximum(np.maximum(tail, most("all") - forward - backward), 0.0)
        over = np.maximum(totals[self.num_time :], 0.0)
        return forward + backward + tail + cost + (self.scale @ over)

    def totals(self, x: Ints) -> Floats:
        return np.asarray(self.program.matrix @ x - self.program.limits)

    def score(self, x: Ints) -> float:
        return float(self.value(self.totals(x)[:, None], self.program.costs @ x)[0])

    def run(self, x: Ints, *, pairs: bool, max_moves: int = 200) -> Ints:
        """Improve until no move gains, or after `max_moves`."""
        x = x.copy()
        if not len(self.moves):
            return x
        now = self.score(x)
        for _ in range(max_moves):
            totals, cost = self.totals(x), float(self.program.costs @ x)
            values = self._after(x, totals, cost)
            best = int(np.argmin(values))
            if values[best] < now - 1e-9:
                found = [best]
            elif pairs:
                found = self._pair(x, totals, cost, values, now)
            else:
                found = []
            if not found:
                break
            for move in found:
                j, k = self.moves[move]
                x[j] -= 1
                x[k] += 1
            now = self.score(x)
        return x

    def _after(self, x: Ints, totals: Floats, cost: float) -> Floats:
        values = self.value(totals[:, None] + self.change, cost + self.cost)
        return np.where(x[self.moves[:, 0]] > 0, values, np.inf)

    def _pair(self, x: Ints, totals: Floats, cost: float, values: Floats, now: float) -> list[int]:
        """Two moves that gain together; the first is among the cheapest."""
        best, found = now - 1e-9, []
        for first in np.argsort(values, kind="stable")[:_FIRST_MOVES]:
            if not np.isfinite(values[first]):
                break
            j, k = self.moves[first]
            after = x.copy()
            after[j] -= 1
            after[k] += 1
            second = self._after(
                after, totals + self.change[:, first], cost + float(self.cost[first])
            )
            at = int(np.argmin(second))
            if second[at] < best:
                best, found = float(second[at]), [int(first), at]
        return found


def assign(model: Model, x: Ints) -> dict[str, Option]:
    """Give each member of a group one of its options; see the orders above."""
    found: dict[str, Option] = {}
    for g, group in enumerate(model.groups):
        order = _FROM_THE_START if group.kind == "residual" else _UNITS_FROM_THE_START
        columns = {o: int(x[model.start[g] + k]) for k, o in enumerate(group.options)}
        names = sorted(group.options, key=order.__getitem__)
        sequence = [o for o in names for _ in range(columns[o])]
        found.update(zip(group.members, sequence, strict=True))
    return found


def choices_of(model: Model, assignment: Assignment) -> Choices:
    """Choices that `finish` completes."""
    w = model.workload
    tiers: dict[str, Tier] = {}
    modes: dict[str, UnitMode] = {}
    for unit in w.units:
        tier, mode = UNIT_OPTIONS[assignment[unit.name]]
        tiers[unit.name] = tier
        if mode != "fetch":
            modes[unit.name] = mode
    swapped: dict[str, Tier] = {}
    actions: dict[str, Action] = {}
    for v in w.residuals:
        option = assignment[v]
        actions[v] = "keep"
        if option == "recompute":
            actions[v] = "recompute"
        elif option == "host" or option == "ssd":
            actions[v] = "swap"
            swapped[v] = option
    return Choices(
        actions=actions,
        unit_tiers=tiers,
        swap_tiers=swapped,
        regions=model.region_of,
        modes=modes,
        parked=[u.name for u in w.units if assignment[u.name] in PARKED],
        casts=[u.name for u in w.units if assignment[u.name] in CAST],
        copies=[u.name for u in w.units if assignment[u.name] in COPIED],
    )


def assignment_of(model: Model, plan: Plan) -> dict[str, Option] | None:
    """The options of a finished plan, its regions aside; None if there is no option for a unit."""
    found: dict[str, Option] = {}
    for v, r in plan.residuals.items():
        found[v] = r.action if r.action != "swap" else ("host" if r.tier == "host" else "ssd")
    index, turn = model.workload.op_index, model.workload.num_forward_ops
    for name, unit in plan.units.items():
        spans = [(index[w.first_use], index[w.last_use]) for w in unit.windows]
        across = any(a < turn <= b for a, b in spans)
        option: Option
        if unit.tier == "device":
            option = _ON_DEVICE[unit.casts, unit.gradients == "parked"]
        elif unit.access == "direct":
            option = "reload" if spans else "direct"
        elif unit.tier == "host":
            option = "hold" if across else "host"
        elif unit.copy_tier is None:
            option = "ssd-hold" if across else "ssd"
        else:
            option = "ssd-copy-hold" if across else "ssd-copy"
        found[name] = option
    return found
