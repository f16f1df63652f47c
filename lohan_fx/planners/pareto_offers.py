"""The plans that `pareto` comes upon for one budget, and the fastest of them. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from lohan_fx.errors import InsufficientMemoryError
from lohan_fx.hardware import MemoryBudget
from lohan_fx.plan import Plan
from lohan_fx.planners.assign import Assignment, Improver, choices_of
from lohan_fx.planners.model import Model
from lohan_fx.planners.pareto_report import NAME
from lohan_fx.planners.regions import LateRegions
from lohan_fx.planners.schedule import Draft, draft, finish_draft
from lohan_fx.planners.simplex import solve
from lohan_fx.planners.trial import make_draft
from lohan_fx.simulate import step_seconds

_SAME = 1e-9
"""A relative difference of seconds that is none."""


def faster(seconds: float, than_s: float) -> bool:
    """Whether it is faster by more than rounding."""
    return seconds < than_s * (1 - _SAME)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A finished plan that fits. `source` is the strategy that made it."""

    plan: Plan
    seconds: float
    source: str

    @property
    def order(self) -> tuple[float, int, int]:
        """Faster first; then less traffic, then less device memory."""
        p = self.plan.prediction
        moved = p.d2h_bytes + p.h2d_bytes + p.ssd_read_bytes + p.ssd_write_bytes
        return (self.seconds, moved, p.peak_device_bytes)


class Offers:
    """What was offered so far. A plan is simulated as it is offered.

    Attributes:
        model: of the workload and the options.
        budget: what a plan may use.
        relaxed: the optimum of the model's linear program at the budget.
        bound_s: seconds that no plan undercuts, by that optimum.
        best: the fastest plan so far.
        by_source: the fastest of each strategy.
        num_simulated: how many plans were offered.
        num_drafts: how many drafts `simulate_late` has made.
    """

    def __init__(self, model: Model, budget: MemoryBudget) -> None:
        self.model = model
        self.budget = budget
        program = model.program(budget)
        self.relaxed = solve(program, model.leanest)
        self.bound_s = self.relaxed.bound * model.unit_s
        self.best: Candidate | None = None
        self.by_source: dict[str, Candidate] = {}
        self.num_simulated = 0
        self.num_drafts = 0
        self._evaluator = Improver(model, program)
        self._tried: set[tuple[object, ...]] = set()

    @property
    def so_far(self) -> str:
        """The best step and its bound, for people who wait."""
        if self.best is None:
            return ""
        return f", best step {self.best.seconds:.3g} s, bound {self.bound_s:.3g} s"

    @property
    def done(self) -> bool:
        """Whether nothing faster can exist."""
        return self.best is not None and self.best.seconds <= self.bound_s * (1 + _SAME)

    def may_gain(self, bound_s: float) -> bool:
        """Whether a lower bound leaves room below the best plan."""
        if self.best is None:
            return bound_s < math.inf
        return faster(bound_s, self.best.seconds)

    def offer(self, plan: Plan, source: str) -> float:
        """Simulate a finished plan; it becomes the best if it is."""
        self.num_simulated += 1
        seconds = step_seconds(self.model.workload, plan, self.model.hw)
        found = Candidate(plan=plan, seconds=seconds, source=source)
        if self.best is None or found.order < self.best.order:
            self.best = found
        first = self.by_source.setdefault(source, found)
        if found.order < first.order:
            self.by_source[source] = found
        return seconds

    def finish(self, made: Draft, budget: MemoryBudget) -> float:
        """Complete a draft and offer it, unless that has been done or it does not fit.

        Returns its seconds; infinite if it was not offered.
        """
        if made.memory.peak_bytes > budget.device_bytes:
            return math.inf
        plan = made.plan
        actions = tuple((r.action, r.tier) for r in plan.residuals.values())
        regions = tuple((r.anchor, r.wanted) for r in made.regions)
        units = tuple(
            (u.tier, u.copy_tier, u.access, u.gradients, u.casts, len(u.windows))
            for u in plan.units.values()
        )
        key = (budget.device_bytes, actions, regions, units)
        if key in self._tried:
            return math.inf
        self._tried.add(key)
        return self.offer(finish_draft(made, self.model.hw, budget, self.model.options), NAME)

    def bound_of(self, assignment: Assignment | None) -> float:
        """Seconds that no plan with this assignment undercuts; 0.0 if the model lacks it."""
        if assignment is None:
            return 0.0
        columns = [self.model.column(name, option) for name, option in assignment.items()]
        if None in columns:
            return 0.0
        x = np.bincount(np.array(columns, dtype=np.int64), minlength=len(self.model.column_group))
        search = self._evaluator
        totals = search.totals(x)
        totals[search.num_time :] = 0.0
        return float(search.value(totals[:, None], 0.0)[0]) * self.model.unit_s

    def simulate(self, assignment: Assignment) -> None:
        """Offer an assignment if it fits and its bound leaves room below the best plan."""
        if self.may_gain(self.bound_of(assignment)):
            self.seconds_of(assignment)

    def seconds_of(self, assignment: Assignment) -> float:
        """Offer an assignment. Its seconds; infinite if it does not fit or was offered before."""
        try:
            made = make_draft(self.model, assignment, self.budget, NAME)
        except InsufficientMemoryError:
            return math.inf
        return self.finish(made, self.budget)

    def simulate_late(self, assignment: Assignment, limit_s: float = math.inf) -> float:
        """Offer an assignment with regions as late as can be, and with some joined to earlier ones.

        Returns the seconds of the better one; infinite if neither was offered, as they do not
        fit, have been offered before, or cannot undercut the limit.
        """
        w = self.model.workload
        late = LateRegions(w, [v for v in w.residuals if assignment[v] == "recompute"])
        compute_s = self.model.unit_s
        if not faster(compute_s + late.least_seconds, limit_s):
            return math.inf
        made = self._late_draft(assignment, late)
        if made is None:
            return math.inf
        seconds = math.inf
        if faster(compute_s + late.seconds, limit_s):
            seconds = self.finish(made, self.budget)
        joined = self._join(assignment, late)
        if joined is not None and faster(compute_s + late.seconds, min(limit_s, seconds)):
            seconds = min(seconds, self.finish(joined, self.budget))
        return seconds

    def _join(self, assignment: Assignment, late: LateRegions) -> Draft | None:
        """Make residuals in earlier regions while that saves time and fits; the last draft."""
        made = None
        moves = late.earlier()
        while moves:
            before, late.anchors = late.anchors, late.moved(*moves.pop(0))
            trial = self._late_draft(assignment, late)
            if trial is None:
                late.anchors = before
            else:
                made, moves = trial, late.earlier()
        return made

    def _late_draft(self, assignment: Assignment, late: LateRegions) -> Draft | None:
        """The draft of an assignment with these regions, if it fits."""
        self.num_drafts += 1
        choices = replace(choices_of(self.model, assignment), regions=late.names)
        model = self.model
        try:
            made = draft(model.workload, model.hw, self.budget, model.options, choices, NAME)
        except InsufficientMemoryError:
            return None
        return made if made.memory.peak_bytes <= self.budget.device_bytes else None
