"""pareto: activations, resident units, swap and recomputation traded in one budget.

For every residual keep, host, SSD or recompute; for every unit's states device, host or SSD (its
compute copy with them, or in host memory), and how that copy is read. Equal blocks are found
(`structure`) and their choices counted, not named, so that a linear program (`model`, solved by
`simplex`: no solver is needed) is small for any depth. Its optimum is a lower bound on the
simulated step of every plan that the options allow. Its solution, rounded to whole copies and
improved as an integer program (`trial`), is completed by `finish` with exact memory, a few times
with more or less memory left to copies in flight; then the simulator decides. With few residuals
and units the search is exhaustive. In small workloads regions need not be blocks
(`regions.LateRegions`).

All other strategies are candidates too, and so are this strategy's plans for the rungs of a fixed
ladder of smaller budgets: the result is never slower than any of theirs. Nothing here knows torch
or looks at a clock, so the same input gives the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import numpy as np

from lohan_fx import progress
from lohan_fx.errors import InsufficientMemoryError, LohanError, PlanError, format_bytes
from lohan_fx.footprint import host_bytes_needed, ssd_bytes_needed
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import Plan
from lohan_fx.planners import registry, resident
from lohan_fx.planners.assign import Assignment, Improver, assignment_of, choices_of
from lohan_fx.planners.effort import Effort
from lohan_fx.planners.exhaustive import by_bound, columns_of, exchanges
from lohan_fx.planners.keep import overlap_reserve
from lohan_fx.planners.model import Model
from lohan_fx.planners.pareto_report import ParetoReport
from lohan_fx.planners.regions import LateRegions
from lohan_fx.planners.registry import PlannerOptions, register
from lohan_fx.planners.schedule import Choices, Draft, device_error, draft, finish, finish_draft
from lohan_fx.planners.simplex import lagrangian_bound, solve
from lohan_fx.planners.strategy import Strategy
from lohan_fx.planners.time_rows import Stages
from lohan_fx.planners.trial import (
    leanest_draft,
    least_host,
    least_memory,
    make_draft,
    solve_at,
)
from lohan_fx.program import Residency, lower, residency
from lohan_fx.simulate import step_seconds
from lohan_fx.workload import Workload

NAME = "pareto"

NOT_CANDIDATES = frozenset({NAME, "checkmate", "lohan+checkmate"})
"""Strategies that are not run as candidates: this one, and what needs a solver and minutes."""

_SAME = 1e-9
"""A relative difference of seconds that is none."""

_STAGES: Mapping[str, tuple[Stages, ...]] = {
    "forward": ((1.0, 0.0, 0.0),),
    "backward": ((0.0, 1.0, 0.0),),
    "optimizer": ((0.0, 0.0, 1.0), (0.0, 1.0, 1.0), (1.0, 1.0, 1.0)),
}


@dataclass(frozen=True, kw_only=True)
class _Candidate:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Pareto:
    """The strategy.

    Attributes:
        effort: how hard to try; by the size of the workload if None.
        others: whether the other strategies are candidates.
        known: finished plans of the same workload; those that fit are candidates.
    """

    effort: Effort | None = None
    others: bool = True
    known: tuple[Plan, ...] = ()

    def __call__(
        self,
        workload: Workload,
        hw: HardwareProfile,
        budget: MemoryBudget,
        options: PlannerOptions,
    ) -> Plan:
        """Plan one step.

        Raises:
            InsufficientMemoryError: nothing fits; `need_bytes` is the smallest budget that does.
            PlanError: the SSD tier is asked for, but there are no SSDs; an unknown fixed unit.
        """
        return self.solve(workload, hw, budget, options)[0]

    def solve(
        self,
        workload: Workload,
        hw: HardwareProfile,
        budget: MemoryBudget,
        options: PlannerOptions | None = None,
    ) -> tuple[Plan, ParetoReport]:
        """The plan, and how far it may be from the best one. Raises as calling it does."""
        return _Search(self, workload, hw, budget, options or PlannerOptions()).run()


def candidates() -> list[str]:
    """The built-in strategies whose plans are candidates. A user's own are none: they may fail."""
    found = []
    for name in registry.names():
        planner = registry.get(name)
        module = str(getattr(planner, "__module__", type(planner).__module__))
        if name not in NOT_CANDIDATES and module.startswith(__package__):
            found.append(name)
    return found


def _wants_all_resident(name: str, options: PlannerOptions) -> bool:
    """Whether a strategy places all units on the device, whatever the budget."""
    planner = registry.get(name)
    fixed = options.states != "auto" or options.fixed_units
    return isinstance(planner, Strategy) and planner.states == "device" and not fixed


def lower_bound(
    workload: Workload,
    hw: HardwareProfile,
    budget: MemoryBudget,
    options: PlannerOptions | None = None,
) -> float:
    """Seconds that no plan's simulated step undercuts; infinite if none can fit."""
    model = Model(workload, hw, (options or PlannerOptions()).with_copies())
    return solve(model.program(budget), model.leanest).bound * model.unit_s


def frontier(
    workload: Workload,
    hw: HardwareProfile,
    budgets: Sequence[MemoryBudget],
    options: PlannerOptions | None = None,
    strategy: Pareto | None = None,
) -> list[tuple[Plan, ParetoReport] | InsufficientMemoryError]:
    """A plan, or why there is none, for each budget, in their order.

    Each plan is a candidate for every larger budget: none of them is slower, or infeasible.
    """
    strategy = strategy or Pareto()
    found: dict[int, tuple[Plan, ParetoReport] | InsufficientMemoryError] = {}
    known: list[Plan] = list(strategy.known)
    sizes = [(b.device_bytes, b.host_bytes, b.ssd_bytes) for b in budgets]
    for k in sorted(range(len(budgets)), key=sizes.__getitem__):  # each after all that it holds
        try:
            made = replace(strategy, known=tuple(known)).solve(workload, hw, budgets[k], options)
        except InsufficientMemoryError as error:
            found[k] = error.anew()
        else:
            found[k] = made
            known.append(made[0])
    return [found[k] for k in range(len(budgets))]


def _check(workload: Workload, hw: HardwareProfile, options: PlannerOptions) -> None:
    fixed = dict(options.fixed_units or {})
    unknown = set(fixed) - set(workload.unit_by_name)
    if unknown:
        raise PlanError(f"fixed_units names unknown units {sorted(unknown)[:5]}")
    wants = "ssd" in (options.states, options.swap_to, *fixed.values())
    if wants and not hw.ssds:
        raise PlanError(
            f"the options ask for the ssd tier, but hardware profile {hw.name} has no SSDs"
        )


@dataclass
class _Search:
    """One planning run."""

    strategy: Pareto
    workload: Workload
    hw: HardwareProfile
    budget: MemoryBudget
    options: PlannerOptions
    best: _Candidate | None = None
    by_source: dict[str, _Candidate] = field(default_factory=dict)
    around: list[Plan] = field(default_factory=list)
    errors: list[InsufficientMemoryError] = field(default_factory=list)
    num_simulated: int = 0
    num_drafts: int = 0
    exhaustive: bool = False

    def __post_init__(self) -> None:
        _check(self.workload, self.hw, self.options)
        self.options = self.options.with_copies()
        self.effort = self.strategy.effort or Effort.of(self.workload)
        self.model = Model(self.workload, self.hw, self.options)
        self.relaxed = solve(self.model.program(self.budget), self.model.leanest)
        self.bound_s = self.relaxed.bound * self.model.unit_s
        self.evaluator = Improver(self.model, self.model.program(self.budget))
        self.tried: set[tuple[object, ...]] = set()

    def run(self) -> tuple[Plan, ParetoReport]:
        steps: tuple[Callable[[], None], ...] = (
            self.known_plans,
            self.keep_all,
            self.other_strategies,
            self.own_plans,
            self.ladder,
            self.search_all,
            self.polish,
            self.exchange,
        )
        for step in steps:
            if not self.done:
                progress.report(f"pareto: {step.__name__.replace('_', ' ')}{self.so_far}")
                step()
        if self.best is None:
            self.lean_plan()
        if self.best is None:
            raise (self.error() if self.options.explain else self.least_error()).anew()
        report = ParetoReport(
            step_s=self.best.seconds,
            bound_s=self.bound_s,
            gap=self.best.seconds / self.bound_s - 1 if self.bound_s > 0 else 0.0,
            binding=self.binding(),
            device_s_per_byte=self.device_price(),
            source=self.best.source,
            exhaustive=self.exhaustive or self.done,
            num_simulated=self.num_simulated,
        )
        notes = (*report.notes(), *self.best.plan.notes)
        return replace(self.best.plan, strategy=NAME, notes=notes), report

    # -- the best so far ----------------------------------------------------------------------

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
        return bound_s < self.best.seconds * (1 - _SAME)

    def offer(self, plan: Plan, source: str) -> float:
        """Simulate a finished plan; it becomes the best if it is."""
        self.num_simulated += 1
        seconds = step_seconds(self.workload, plan, self.hw)
        found = _Candidate(plan=plan, seconds=seconds, source=source)
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
        units = tuple((u.tier, u.copy_tier, u.access, len(u.windows)) for u in plan.units.values())
        key = (budget.device_bytes, actions, regions, units)
        if key in self.tried:
            return math.inf
        self.tried.add(key)
        return self.offer(finish_draft(made, self.hw, budget, self.options), NAME)

    def bound_of(self, assignment: Assignment | None) -> float:
        """Seconds that no plan with this assignment undercuts; 0.0 if the model lacks it."""
        if assignment is None:
            return 0.0
        columns = [self.model.column(name, option) for name, option in assignment.items()]
        if None in columns:
            return 0.0
        x = np.bincount(np.array(columns, dtype=np.int64), minlength=len(self.model.column_group))
        search = self.evaluator
        totals = search.totals(x)
        totals[search.num_time :] = 0.0
        return float(search.value(totals[:, None], 0.0)[0]) * self.model.unit_s

    # -- where candidates come from -------------------------------------------------------------

    def known_plans(self) -> None:
        """Those that were given, if they fit, and are of the schedule that is wanted."""
        for plan in (*self.strategy.known, *self.options.known):
            p = plan.prediction
            used = MemoryBudget(
                device_bytes=p.peak_device_bytes,
                host_bytes=p.peak_host_bytes,
                ssd_bytes=p.peak_ssd_bytes,
            )
            wanted = self.options.schedule in ("auto", plan.schedule)
            same = wanted and plan.workload == self.workload.name
            if same and _within(used, self.budget):
                self.offer(replace(plan, notes=()), NAME)

    def keep_all(self) -> None:
        """Everything on the device, if that fits: then there is nothing to hide."""
        assignment: dict[str, str] = {}
        for group in self.model.groups:
            home = "keep" if group.kind == "residual" else "device"
            if home not in group.options:
                return
            assignment.update(dict.fromkeys(group.members, home))
        self.simulate(assignment)  # type: ignore[arg-type]

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
        remade = [v for v in self.workload.residuals if assignment[v] == "recompute"]
        late = LateRegions(self.workload, remade)
        compute_s = self.model.unit_s
        if compute_s + late.least_seconds >= limit_s * (1 - _SAME):
            return math.inf
        made = self.late_draft(assignment, late)
        if made is None:
            return math.inf
        seconds = math.inf
        if compute_s + late.seconds < limit_s * (1 - _SAME):
            seconds = self.finish(made, self.budget)
        joined = self.join(assignment, late)
        if joined is not None and compute_s + late.seconds < min(limit_s, seconds) * (1 - _SAME):
            seconds = min(seconds, self.finish(joined, self.budget))
        return seconds

    def join(self, assignment: Assignment, late: LateRegions) -> Draft | None:
        """Make residuals in earlier regions while that saves time and fits; the last draft."""
        made = None
        moves = late.earlier()
        while moves:
            before, late.anchors = late.anchors, late.moved(*moves.pop(0))
            trial = self.late_draft(assignment, late)
            if trial is None:
                late.anchors = before
            else:
                made, moves = trial, late.earlier()
        return made

    def late_draft(self, assignment: Assignment, late: LateRegions) -> Draft | None:
        """The draft of an assignment with these regions, if it fits."""
        self.num_drafts += 1
        choices = replace(choices_of(self.model, assignment), regions=late.names)
        args = (self.workload, self.hw, self.budget, self.options, choices, NAME)
        try:
            made = draft(*args)
        except InsufficientMemoryError:
            return None
        return made if made.memory.peak_bytes <= self.budget.device_bytes else None

    def other_strategies(self) -> None:
        """All that are registered; of those that raise, the errors are kept."""
        if not self.strategy.others:
            return
        args = (self.workload, self.hw, self.budget, self.options)
        states = sum(u.compute_bytes + u.state_bytes for u in self.workload.units)
        all_fit = states <= self.budget.device_bytes
        for name in candidates():
            if name == resident.NAME and not resident.may_help(
                self.workload, self.budget, self.options
            ):
                continue  # it would plan what "lohan" plans
            if not all_fit and _wants_all_resident(name, self.options):
                continue  # it cannot fit, and large models take seconds to find that out
            progress.report(f"pareto: trying {name}{self.so_far}")
            try:
                made = self._made(name)
                found = finish(*args, made, name) if isinstance(made, Choices) else made
            except InsufficientMemoryError as error:
                self.errors.append(error.anew())
            except LohanError:
                continue
            else:
                if self.may_gain(self.bound_of(assignment_of(self.model, found))):
                    self.offer(found, name)

    def _made(self, name: str) -> Plan | Choices:
        """What a strategy plans; the plans around that of `lohan-resident` are kept for later."""
        args = (self.workload, self.hw, self.budget, self.options)
        if name != resident.NAME:
            return registry.get(name)(*args)
        plans = resident.plans_around(*args, self.effort.around)
        self.around = plans[1:]
        return plans[0]

    def own_plans(self) -> None:
        """The integer program at this budget, with several shares of it left to copies."""
        for k, share in enumerate(self.effort.reserves):
            nodes = self.effort.nodes if k < 2 else 1
            self.try_budget(self.budget, int(share * self.reserve_bytes), self.budget, nodes)

    @property
    def reserve_bytes(self) -> int:
        """A unit's copy and gradients, or the largest residual: what lets one copy overlap."""
        sizes = [self.workload.values[v].num_bytes for v in self.workload.residuals]
        return max(
            [overlap_reserve(self.workload, dict.fromkeys(self._unit_names, "host")), *sizes]
        )

    @property
    def _unit_names(self) -> tuple[str, ...]:
        return tuple(unit.name for unit in self.workload.units)

    def bound(self, budget: MemoryBudget) -> float:
        """A lower bound in seconds at another budget, by the prices of this one's optimum."""
        if not math.isfinite(self.relaxed.bound):
            return 0.0
        program = self.model.program(budget)
        return lagrangian_bound(program, self.relaxed.prices) * self.model.unit_s

    def try_budget(
        self, budget: MemoryBudget, reserve: int, finish: MemoryBudget, nodes: int = 1
    ) -> MemoryBudget | None:
        """The integer program at a budget less a reserve; windows may use `finish`.

        Returns what the found draft uses of every tier; None if there is none.
        """
        target = replace(budget, device_bytes=budget.device_bytes - reserve)
        if target.device_bytes <= 0 or not self.may_gain(self.bound(target)):
            return None
        trial = solve_at(self.model, target, NAME, nodes)
        if trial is None:
            return None
        self.finish(trial.made, finish)
        return MemoryBudget(
            device_bytes=trial.made.memory.peak_bytes + reserve,
            host_bytes=sum(host_bytes_needed(self.workload, trial.made.plan).values()),
            ssd_bytes=sum(ssd_bytes_needed(self.workload, trial.made.plan).values()),
        )

    def ladder(self) -> None:
        """The integer program at the rungs of a fixed ladder of budgets below this one.

        What is found at a rung is found for every larger budget, so that a larger one is not
        slower. A rung is passed over if its bound is no better than the best plan, or if a
        higher rung's plan fits it: the program has the same optimum there.
        """
        used: list[tuple[MemoryBudget, MemoryBudget]] = []
        failed: list[MemoryBudget] = []
        for rung in self.rungs():
            if len(used) + len(failed) >= self.effort.ladder or self.done:
                return
            if any(_within(rung, above) and _within(need, rung) for above, need in used):
                continue
            if any(_within(rung, above) for above in failed):
                continue
            need = self.try_budget(rung, min(self.reserve_bytes, rung.device_bytes // 8), rung)
            if need is not None:
                used.append((rung, need))
            else:
                failed.append(rung)

    def rungs(self) -> Iterator[MemoryBudget]:
        """Rungs of all tiers, device memory descending; those that cannot gain are left out."""
        hosts = list(_geometric(self.budget.host_bytes, self.effort.host_rungs, 8))
        ssds = list(_geometric(self.budget.ssd_bytes, 1, 4))
        for device in _geometric(self.budget.device_bytes, self.effort.device_rungs, 16):
            top = MemoryBudget(device_bytes=device, host_bytes=hosts[0], ssd_bytes=ssds[0])
            if not self.may_gain(self.bound(replace(self.budget, device_bytes=device))):
                return
            for host in hosts:
                for ssd in ssds:
                    rung = replace(top, host_bytes=host, ssd_bytes=ssd)
                    if self.may_gain(self.bound(rung)):
                        yield rung

    def search_all(self) -> None:
        """Every assignment by ascending bound, if there are few enough of them."""
        if not self.effort.assignments:
            return
        model = Model(self.workload, self.hw, self.options, by_value=True)
        columns = columns_of(model, self.effort.assignments)
        if columns is None:
            return
        left = self.effort.simulations
        for bound_s, assignment in by_bound(model, self.budget, columns):
            if not self.may_gain(bound_s):
                break
            if not left:
                return
            left -= 1
            self.simulate(assignment)
            if self.num_drafts < self.effort.drafts and self.best is not None:
                self.simulate_late(assignment, self.best.seconds)
        self.exhaustive = True

    def polish(self) -> None:
        """Change one unit or residual at a time, the largest first, as long as that gains.

        It begins with the best plan, and with those around the best of `lohan-resident`: where a
        unit more just fits, Algorithm 1 may swap what should be recomputed then.
        """
        if self.best is None or self.exhaustive or not self.effort.polish:
            return
        for plan in (self.best.plan, *self.around):
            self.climb(plan)

    def climb(self, plan: Plan) -> None:
        """Single changes of a plan; the first that gains is made, until none does."""
        assignment = assignment_of(self.model, plan)
        if assignment is None:
            return
        seconds = step_seconds(self.workload, plan, self.hw)
        stop = self.num_simulated + self.effort.polish
        names, idle, k = self._by_size(), 0, 0
        while idle < len(names) and self.num_simulated < stop and not self.done:
            name = names[k % len(names)]
            k, idle = k + 1, idle + 1
            for option in self.model.groups[self.model.group_of[name]].options:
                if option == assignment[name] or self.num_simulated >= stop:
                    continue
                changed = {**assignment, name: option}
                if self.bound_of(changed) >= seconds * (1 - _SAME):
                    continue
                made_s = self.seconds_of(changed)
                if made_s < seconds * (1 - _SAME):
                    assignment, seconds, idle = changed, made_s, 0

    def exchange(self) -> None:
        """From the best plans of several strategies, change one or two choices at a time.

        Regions are as late as they can be, or joined, across blocks too: so this finds what
        `polish` cannot. What one start has led to is not offered again from another.
        """
        if self.best is None or self.exhaustive or not self.effort.drafts:
            return
        stop = self.num_drafts + self.effort.drafts
        model = Model(self.workload, self.hw, self.options, by_value=True)
        starts = sorted(self.by_source.values(), key=lambda found: found.order)
        for start in starts[: self.effort.starts]:
            self.descend(model, start, stop)

    def descend(self, model: Model, start: _Candidate, stop: int) -> None:
        """The first of the changes, by ascending bound, that gains; again, until none does."""
        found, seconds = assignment_of(self.model, start.plan), start.seconds
        if found is not None:
            seconds = min(seconds, self.simulate_late(found, seconds))
        while found is not None and not self.done:
            now, found = found, None
            for bound_s, changed in exchanges(model, self.budget, now):
                if self.num_drafts >= stop or bound_s >= seconds * (1 - _SAME):
                    return
                made_s = self.simulate_late(changed, seconds)
                if made_s < seconds:
                    found, seconds = changed, made_s
                    break

    def _by_size(self) -> list[str]:
        """Residuals and units in turn, the largest of each first."""
        units = [(u.compute_bytes + u.state_bytes, u.name) for u in self.workload.units]
        sizes = [(self.workload.values[v].num_bytes, v) for v in self.workload.residuals]
        ordered = (sorted(of, key=lambda item: (-item[0], item[1])) for of in (sizes, units))
        return [item[1] for pair in zip_longest(*ordered) for item in pair if item is not None]

    # -- explanations ---------------------------------------------------------------------------

    def binding(self) -> dict[str, str]:
        """Stage → the resource that the relaxed program's optimum pays most for.

        A row's price is shared between the device and its lane by their parts of its seconds.
        """
        time = self.model.time @ self.relaxed.x
        found = {}
        for stage, patterns in _STAGES.items():
            total: dict[str, float] = {}
            rows = zip(self.model.rows, self.relaxed.prices, time, strict=False)
            for row, price, added in rows:
                if row.stages not in patterns or price > -1e-9 or row.base + added <= 0:
                    continue
                lane = float(added / (row.base + added)) if row.resource != "gpu" else 0.0
                for resource, part in (("gpu", 1 - lane), (row.resource, lane)):
                    total[resource] = total.get(resource, 0.0) - float(price) * part
            if total:
                found[stage] = self.hw.lane_name(max(total, key=lambda r: (total[r], r)))
        return found

    def device_price(self) -> float:
        """Seconds that a byte of device memory is worth in the relaxed program's optimum."""
        first = len(self.model.rows)
        rows = self.relaxed.prices[first : first + len(self.model.memory_ops)]
        return float(-np.minimum(rows, 0.0).sum()) * self.model.unit_s

    def lean_plan(self) -> None:
        """The plan with the smallest peak, however slow."""
        made = leanest_draft(self.model, self.budget, NAME, self.effort.lean)
        if made is None:
            return
        if made.memory.peak_bytes <= self.budget.device_bytes:
            self.finish(made, self.budget)
        else:
            self.errors.append(device_error(made.memory, self.budget, NAME))

    def error(self) -> InsufficientMemoryError:
        """Of the tier that lacks least for a plan, by its share of what there is; of the other one,
        its advice.

        With schedule "speculative" host memory comes first: what has no room there twice goes to
        the device, so the leanest plan would lack that.
        """
        host = self.error_of_host()
        least = self.least_error()
        if host is None or (least.tier == "ssd" and self.options.schedule != "speculative"):
            return self.error_of_device(least)
        if self.options.schedule == "speculative" or _growth(host) <= _growth(least):
            return host
        return self.error_of_device(least, host)

    def error_of_host(self) -> InsufficientMemoryError | None:
        """Of host memory, if a plan fits with more of that alone."""
        found = least_host(self.model, self.budget, NAME, self.effort.lean)
        if found is None:
            return None
        need, made = found
        parts = host_bytes_needed(self.workload, made.plan)
        advice = "Give the plan more host memory or an SSD"
        where = "the whole step"
        if self.options.schedule == "speculative":
            where += ", with second copies of units in host memory"
            if self.fits_deferred():
                advice += ", or use schedule='deferred': it needs no second copies, and fits"
            else:
                advice += "; schedule='deferred', which needs no second copies, does not fit either"
        elif self.budget.ssd_bytes:
            more = " or more room on SSD" if any(e.tier == "ssd" for e in self.errors) else ""
            advice = f"Give the plan more host memory{more}"
        return InsufficientMemoryError(
            "host",
            need,
            self.budget.host_bytes,
            where=where,
            at_peak=sorted(((n, b) for n, b in parts.items() if b), key=lambda part: -part[1]),
            advice=advice + ".",
        )

    def fits_deferred(self) -> bool:
        """Whether there is a plan for the same budget without second copies."""
        options = replace(self.options, schedule="deferred")
        other = replace(self, options=options, best=None, by_source={}, errors=[], around=[])
        for step in (other.lean_plan, other.own_plans, other.other_strategies, other.ladder):
            step()
            if other.best is not None:
                return True
        return False

    def least_error(self) -> InsufficientMemoryError:
        """What the leanest plan needs; of the device if that is what it lacks."""
        device = [e for e in self.errors if e.tier == "device"]
        return min(device or self.errors, key=lambda e: e.need_bytes)

    def error_of_device(
        self, least: InsufficientMemoryError, host: InsufficientMemoryError | None = None
    ) -> InsufficientMemoryError:
        """The `least_error`; smaller budgets may have plans all the same, so some are tried.

        `host` is what would do instead.
        """
        bound = least_memory(self.model, self.budget) if least.tier == "device" else math.inf
        need, at_peak, where = least.need_bytes, least.at_peak, least.where
        peak = need
        for _ in range(self.effort.lower):
            if least.tier != "device" or peak - 1 < bound:
                break
            below = self.fitting(peak - 1) or (self.fitting(peak) if peak < need else None)
            if below is None:
                break
            need = below.budget.device_bytes
            found = device_error(below.least_memory_of_best(), self.budget, NAME)
            at_peak, where = found.at_peak, found.where
            if need == peak:
                break
            peak = found.need_bytes
        advice = "This is the smallest need of all plans that were found"
        if math.isfinite(bound):
            advice += f"; none can need less than {format_bytes(bound)}"
        if host is not None and least.tier == "device":
            advice += f". With {format_bytes(host.need_bytes)} of host memory "
            advice += f"(there are {format_bytes(host.have_bytes)}) there is one for this device"
        return InsufficientMemoryError(
            least.tier, need, least.have_bytes, where=where, at_peak=at_peak, advice=advice + "."
        )

    def fitting(self, device_bytes: int) -> _Search | None:
        """The search at another device budget, if that has a plan (other than the leanest)."""
        budget = replace(self.budget, device_bytes=device_bytes)
        other = replace(self, budget=budget, best=None, by_source={}, errors=[])
        for step in (other.own_plans, other.other_strategies, other.ladder):
            step()
            if other.best is not None:
                return other
        return None

    def least_memory_of_best(self) -> Residency:
        assert self.best is not None
        return residency(lower(self.workload, self.best.plan))


def _growth(error: InsufficientMemoryError) -> float:
    """How many times what there is would be needed."""
    return error.need_bytes / error.have_bytes if error.have_bytes else math.inf


def _geometric(limit: int, per_octave: int, count: int) -> Iterator[int]:
    """The `count` largest numbers 2^(k / per_octave), k whole, up to the limit; 0 at least."""
    if limit <= 0:
        yield 0
        return
    top = math.floor(math.log2(limit) * per_octave + 1e-9)
    for k in range(top, max(top - count, 0), -1):
        size = int(2 ** (k / per_octave))
        if size <= limit:
            yield size


def _within(one: MemoryBudget, other: MemoryBudget) -> bool:
    return (
        one.device_bytes <= other.device_bytes
        and one.host_bytes <= other.host_bytes
        and one.ssd_bytes <= other.ssd_bytes
    )


register(NAME)(Pareto())
