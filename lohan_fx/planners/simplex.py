"""A linear program of choices: so many copies of each group, one option each, few shared rows.

    minimise   c·x + d·z
    such that  A x + E z ≤ b,   Σ_{j of group g} x_j = n_g,   x ≥ 0, z ≥ 0

Generalised upper bounding (Dantzig and Van Slyke 1967): one option of every group is its *key*
and is substituted away, so the basis has one row for each shared row, however many groups there
are. The shared rows are few (about 100). Numpy only; the same input gives the same pivots. Every
optimum comes with `bound`, which holds by weak duality whatever the arithmetic did.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_EPS = 1e-9
_REFACTOR = 100
_STALLED = 40
"""Steps without progress after which Bland's rule prevents a cycle."""


@dataclass(frozen=True, kw_only=True)
class ChoiceProgram:
    """`matrix[r, j]`, `costs[j]`, `group[j]` of options; `extra[r, k]`, `extra_costs[k]` of z;
    `limits[r]` the right side; `counts[g]` copies of group g. Groups are 0, 1, …; the options
    of a group stand together."""

    costs: Floats
    matrix: Floats
    group: Ints
    counts: Floats
    extra: Floats
    extra_costs: Floats
    limits: Floats

    def with_rows(self, matrix: Floats, limits: Floats) -> ChoiceProgram:
        """The same program with further rows over x."""
        return ChoiceProgram(
            costs=self.costs,
            matrix=np.vstack([self.matrix, matrix]),
            group=self.group,
            counts=self.counts,
            extra=np.vstack([self.extra, np.zeros((len(limits), self.extra.shape[1]))]),
            extra_costs=self.extra_costs,
            limits=np.concatenate([self.limits, limits]),
        )


@dataclass(frozen=True, kw_only=True)
class Solution:
    """`status` "limit": the step limit came first; `value` is then no minimum, `bound` holds.

    `prices[r]` ≤ 0: how much the optimum falls with each unit of `limits[r]`, negated. For an
    infeasible program `bound` is infinite, and the other fields are of no use.
    """

    status: Literal["optimal", "infeasible", "limit"]
    value: float
    bound: float
    x: Floats
    z: Floats
    prices: Floats
    steps: int


def lagrangian_bound(p: ChoiceProgram, prices: Floats) -> float:
    """A lower bound on the optimum from any prices (weak duality).

    Positive prices are cut to 0, and all are scaled until no z has a negative reduced cost.
    """
    y = np.minimum(prices, 0.0)
    load = y @ p.extra
    over = load > p.extra_costs
    if over.any():
        if np.any(p.extra_costs[over] <= 0):
            return -np.inf
        y = y / float(np.max(load[over] / p.extra_costs[over]))
    reduced = p.costs - y @ p.matrix
    starts = np.flatnonzero(np.diff(p.group, prepend=-1))
    best = np.minimum.reduceat(reduced, starts) if len(starts) else np.zeros(0)
    return float(y @ p.limits + p.counts @ best)


def solve(p: ChoiceProgram, start: Ints | None = None, max_steps: int = 20_000) -> Solution:
    """Solve by the primal simplex method, in two phases.

    Args:
        p: every group has at least one option.
        start: one option of each group to begin with; the first of each if None.
        max_steps: pivots, both phases together.
    """
    scale = np.abs(p.matrix).max(axis=1, initial=0.0)
    scale = np.where(scale > 0, scale, np.abs(p.limits))
    scale = np.maximum(scale, np.abs(p.extra).max(axis=1))
    scale = np.where(scale > 0, scale, 1.0)
    # a z counts seconds beside rows of seconds, or bytes beside rows of gigabytes
    extra = p.extra / scale[:, None]
    size = np.abs(extra).max(axis=0, initial=0.0)
    size = np.where(size > 0, size, 1.0)
    scaled = ChoiceProgram(
        costs=p.costs,
        matrix=p.matrix / scale[:, None],
        group=p.group,
        counts=p.counts,
        extra=extra / size,
        extra_costs=p.extra_costs / size,
        limits=p.limits / scale,
    )
    keys = np.flatnonzero(np.diff(p.group, prepend=-1)) if start is None else start.copy()
    found = _Simplex(scaled, keys).run(max_steps)
    prices = found.prices / scale
    bound = np.inf if found.status == "infeasible" else lagrangian_bound(p, prices)
    return Solution(
        status=found.status,
        value=found.value,
        bound=bound,
        x=found.x,
        z=found.z / size,
        prices=prices,
        steps=found.steps,
    )


def _inverse(matrix: Floats) -> Floats:
    """By Gauss and Jordan, with partial pivoting."""
    size = len(matrix)
    work = np.concatenate([matrix, np.eye(size)], axis=1)
    for k in range(size):
        pivot = k + int(np.argmax(np.abs(work[k:, k])))
        if pivot != k:
            work[[k, pivot]] = work[[pivot, k]]
        row = work[k] / work[k, k]
        work -= work[:, k, None] * row[None, :]
        work[k] = row
    return work[:, size:]


class _Simplex:
    """Columns in this order: x (structural), z, slacks, one artificial.

    The basis inverse is kept in product form and made anew every `_REFACTOR` steps. Products are
    einsum's own loops: where threads contend, BLAS takes a hundred times as long at this size.
    """

    def __init__(self, p: ChoiceProgram, keys: Ints) -> None:
        self.p = p
        self.rows = len(p.limits)
        self.num_x = len(p.costs)
        self.num_z = len(p.extra_costs)
        self.slack0 = self.num_x + self.num_z
        self.artificial = self.slack0 + self.rows
        self.keys = keys
        self.basic = np.arange(self.rows, dtype=np.int64) + self.slack0
        self.inverse: Floats = np.eye(self.rows)
        self.steps = 0
        rest = self._rest()
        self.violated = (rest < 0).astype(np.float64)
        if (rest < 0).any():
            worst = int(np.argmin(rest))
            self._replace(worst, self.artificial, -self.violated)

    def run(self, max_steps: int) -> Solution:
        status: Literal["optimal", "infeasible", "limit"] = "optimal"
        if self.artificial in self.basic:
            done = self._phase(np.zeros(self.num_x), np.zeros(self.num_z), 1.0, max_steps)
            at = np.flatnonzero(self.basic == self.artificial)
            if at.size and self._values()[at[0]] > 1e-7:
                status = "infeasible" if done else "limit"
            elif at.size:
                self._drive_out(int(at[0]))
        costs, extra_costs = self.p.costs, self.p.extra_costs
        if status == "optimal" and not self._phase(costs, extra_costs, 0.0, max_steps):
            status = "limit"
        x, z = self._primal()
        value = float(costs @ x + extra_costs @ z)
        y = self._prices(costs, extra_costs, 0.0)
        return Solution(status=status, value=value, bound=0.0, x=x, z=z, prices=y, steps=self.steps)

    # -- the basis ----------------------------------------------------------------------------

    def _column(self, j: int) -> Floats:
        if j < self.num_x:
            key = self.keys[self.p.group[j]]
            return np.asarray(self.p.matrix[:, j] - self.p.matrix[:, key])
        if j < self.slack0:
            return np.asarray(self.p.extra[:, j - self.num_x])
        if j == self.artificial:
            return -self.violated
        unit = np.zeros(self.rows)
        unit[j - self.slack0] = 1.0
        return unit

    def _replace(self, at: int, entering: int, step: Floats) -> None:
        """Column `entering`, whose coordinates in the basis are `step`, takes position `at`."""
        self.basic[at] = entering
        row = self.inverse[at] / step[at]
        self.inverse -= step[:, None] * row[None, :]
        self.inverse[at] = row

    def _refactor(self) -> None:
        basis = np.stack([self._column(int(j)) for j in self.basic], axis=1)
        self.inverse = _inverse(basis)

    def _rest(self) -> Floats:
        return np.asarray(
            self.p.limits - np.einsum("ij,j->i", self.p.matrix[:, self.keys], self.p.counts)
        )

    def _values(self) -> Floats:
        return np.asarray(np.einsum("ij,j->i", self.inverse, self._rest()))

    def _prices(self, costs: Floats, extra_costs: Floats, artificial: float) -> Floats:
        basic = self.basic
        found = np.zeros(self.rows)
        is_x = basic < self.num_x
        xs = basic[is_x]
        found[is_x] = costs[xs] - costs[self.keys[self.p.group[xs]]]
        is_z = (basic >= self.num_x) & (basic < self.slack0)
        found[is_z] = extra_costs[basic[is_z] - self.num_x]
        found[basic == self.artificial] = artificial
        return np.asarray(np.einsum("i,ij->j", found, self.inverse))

    def _primal(self) -> tuple[Floats, Floats]:
        self._refactor()
        x, z = np.zeros(self.num_x), np.zeros(self.num_z)
        x[self.keys] = self.p.counts
        for j, value in zip(self.basic, np.maximum(self._values(), 0.0), strict=True):
            if j < self.num_x:
                x[j] = value
                x[self.keys[self.p.group[j]]] -= value
            elif j < self.slack0:
                z[j - self.num_x] = value
        return np.maximum(x, 0.0), z

    def _drive_out(self, at: int) -> None:
        """The artificial is 0 but basic: another column with a pivot in its row replaces it."""
        taken = {*self.basic.tolist(), *self.keys.tolist()}
        for j in (*range(self.slack0, self.artificial), *range(self.slack0)):
            if j in taken:
                continue
            step = np.einsum("ij,j->i", self.inverse, self._column(j))
            if abs(step[at]) > 1e-7:
                self._replace(at, j, step)
                return

    # -- steps --------------------------------------------------------------------------------

    def _phase(self, costs: Floats, extra_costs: Floats, artificial: float, max_steps: int) -> bool:
        """Pivot to the optimum of these costs; False if the steps ran out."""
        stalled = 0
        while self.steps < max_steps:
            y = self._prices(costs, extra_costs, artificial)
            entering = self._entering(y, costs, extra_costs, bland=stalled > _STALLED)
            if entering is None:
                return True
            self.steps += 1
            step = np.einsum("ij,j->i", self.inverse, self._column(entering))
            length = self._pivot(entering, step, np.maximum(self._values(), 0.0))
            stalled = 0 if length > _EPS else stalled + 1
            if self.steps % _REFACTOR == 0:
                self._refactor()
            if artificial and self.artificial not in self.basic:
                return True
        return False

    def _entering(
        self, y: Floats, costs: Floats, extra_costs: Floats, *, bland: bool
    ) -> int | None:
        reduced = costs - np.einsum("i,ij->j", y, self.p.matrix)
        reduced = reduced - reduced[self.keys][self.p.group]
        extra = extra_costs - np.einsum("i,ij->j", y, self.p.extra)
        every = np.concatenate([reduced, extra, -y])
        every[self.basic[self.basic < self.artificial]] = 0.0
        tolerance = _EPS * max(1.0, float(np.abs(y).max(initial=0.0)))
        if bland:
            below = np.flatnonzero(every < -tolerance)
            return int(below[0]) if below.size else None
        best = int(np.argmin(every))
        return best if every[best] < -tolerance else None

    def _pivot(self, entering: int, step: Floats, values: Floats) -> float:
        """Let `entering` grow until a basic variable, or a group's key, reaches 0."""
        group = self.p.group
        ratios = np.full(self.rows, np.inf)
        falling = step > 1e-9
        ratios[falling] = values[falling] / step[falling]
        # a group's key is n_g less its other options, so it changes with those
        is_x = self.basic < self.num_x
        touched = group[self.basic[is_x]]
        used = np.bincount(touched, weights=values[is_x], minlength=len(self.p.counts))
        rate = np.bincount(touched, weights=step[is_x], minlength=len(self.p.counts))
        if entering < self.num_x:
            rate[group[entering]] -= 1.0
        shrinking = np.flatnonzero(rate < -1e-9)
        key_ratios = np.maximum(self.p.counts[shrinking] - used[shrinking], 0.0) / -rate[shrinking]
        length = float(min(ratios.min(initial=np.inf), key_ratios.min(initial=np.inf)))
        if not np.isfinite(length):
            raise ArithmeticError("the program is unbounded")
        rows = np.flatnonzero(ratios <= length * (1 + 1e-9) + 1e-12)
        if rows.size:
            # prefer the artificial, then the largest pivot: stable, and the same every time
            order = [
                (bool(self.basic[i] != self.artificial), -step[i], self.basic[i], i) for i in rows
            ]
            self._replace(int(min(order)[3]), entering, step)
            return length
        self._swap_key(int(shrinking[int(np.argmin(key_ratios))]), entering, step)
        return length

    def _swap_key(self, leaving: int, entering: int, step: Floats) -> None:
        """The key of a group leaves; another basic option of the group becomes its key."""
        basic = [int(j) if j < self.num_x else -1 for j in self.basic]
        places = [i for i, j in enumerate(basic) if j >= 0 and self.p.group[j] == leaving]
        if not places:
            self.keys[leaving] = entering
            return
        at, rest = places[0], places[1:]
        self.keys[leaving] = self.basic[at]
        self.inverse[at] += self.inverse[rest].sum(axis=0)
        if entering < self.num_x and self.p.group[entering] == leaving:
            # all columns of the group are now relative to the new key, that of `entering` too
            step = np.einsum("ij,j->i", self.inverse, self._column(entering))
        else:
            step = step.copy()
            step[at] += step[rest].sum()
        self._replace(at, entering, step)
