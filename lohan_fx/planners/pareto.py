"""pareto: activations, resident units, swap and recomputation traded in one budget.

For every residual keep, host, SSD or recompute; for every unit's states device, host or SSD (its
compute copy with them, or in host memory), and how that copy is read. Equal blocks are found
(`structure`) and their choices counted, not named, so that a linear program (`model`, solved by
`simplex`: no solver is needed) is small for any depth. Its optimum is a lower bound on the
simulated step of every plan that the options allow. Its solution, rounded to whole copies and
improved as an integer program (`trial`), is completed by `finish` with exact memory, a few times
with more or less memory left to copies in flight; then the simulator decides (`pareto_offers`).
With few residuals and units the search is exhaustive; else it goes on from the best plans
(`pareto_local`). In small workloads regions need not be blocks (`regions.LateRegions`).

All other strategies are candidates too, and so are this strategy's plans for the rungs of a fixed
ladder of smaller budgets (`pareto_ladder`): the result is never slower than any of theirs. Where
nothing fits, `pareto_shortage` says what lacks. Nothing here knows torch or looks at a clock, so
the same input gives the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lohan_fx import progress
from lohan_fx.errors import InsufficientMemoryError, LohanError, PlanError
from lohan_fx.footprint import may_cast
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import Plan
from lohan_fx.planners import registry, resident
from lohan_fx.planners.assign import assignment_of
from lohan_fx.planners.effort import Effort
from lohan_fx.planners.exhaustive import by_bound, columns_of
from lohan_fx.planners.model import Model
from lohan_fx.planners.pareto_ladder import try_budget, try_rungs
from lohan_fx.planners.pareto_local import climb, exchange_choices
from lohan_fx.planners.pareto_offers import Candidate, Offers
from lohan_fx.planners.pareto_report import NAME, ParetoReport, binding, device_price
from lohan_fx.planners.pareto_shortage import Shortage
from lohan_fx.planners.registry import PlannerOptions, register
from lohan_fx.planners.schedule import Choices, Draft, device_error, finish, remembered_drafts
from lohan_fx.planners.simplex import solve
from lohan_fx.planners.strategy import Strategy
from lohan_fx.planners.tiers import check_ssds
from lohan_fx.planners.trial import UNLIMITED, leanest_of_all, least_memory
from lohan_fx.workload import Workload

NOT_CANDIDATES = frozenset({NAME, "checkmate", "lohan+checkmate"})
"""Strategies that are not run as candidates: this one, and what needs a solver and minutes."""


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
        with remembered_drafts():
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
    unknown = set(options.fixed_units or {}) - set(workload.unit_by_name)
    if unknown:
        raise PlanError(f"fixed_units names unknown units {sorted(unknown)[:5]}")
    check_ssds(hw, options)


class _Search:
    """One planning run."""

    def __init__(
        self,
        strategy: Pareto,
        workload: Workload,
        hw: HardwareProfile,
        budget: MemoryBudget,
        options: PlannerOptions,
    ) -> None:
        _check(workload, hw, options)
        self.strategy = strategy
        self.workload = workload
        self.hw = hw
        self.budget = budget
        self.options = options.with_copies()
        self.effort = strategy.effort or Effort.of(workload)
        self.model = Model(workload, hw, self.options)
        self.offers = Offers(self.model, budget)
        self.around: list[Plan] = []
        self.errors: list[InsufficientMemoryError] = []
        self.exhaustive = False

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
        offers = self.offers
        for step in steps:
            if not offers.done:
                progress.report(f"pareto: {step.__name__.replace('_', ' ')}{offers.so_far}")
                step()
        if offers.best is None:
            self.lean_plan()
        best = offers.best
        if best is None:
            shortage = Shortage(
                model=self.model,
                budget=self.budget,
                effort=self.effort,
                errors=self.errors,
                first_plan=self.first_plan,
            )
            raise (shortage.error() if self.options.explain else shortage.least_error()).anew()
        report = ParetoReport(
            step_s=best.seconds,
            bound_s=offers.bound_s,
            gap=best.seconds / offers.bound_s - 1 if offers.bound_s > 0 else 0.0,
            binding=binding(self.model, offers.relaxed),
            device_s_per_byte=device_price(self.model, offers.relaxed),
            source=best.source,
            exhaustive=self.exhaustive or offers.done,
            num_simulated=offers.num_simulated,
        )
        notes = (*report.notes(), *self.resident_notes(best), *best.plan.notes)
        return replace(best.plan, strategy=NAME, notes=notes), report

    def resident_notes(self, best: Candidate) -> tuple[str, ...]:
        """How many units are on the device, if any, unless the plan's own notes begin with that."""
        if best.source == resident.NAME:
            return ()
        some = any(unit.tier == "device" for unit in best.plan.units.values())
        return (resident.resident_note(best.plan, self.options),) if some else ()

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
            if same and used.within(self.budget):
                self.offers.offer(replace(plan, notes=()), NAME)

    def keep_all(self) -> None:
        """Everything on the device, if that fits: then there is nothing to hide."""
        assignment: dict[str, str] = {}
        for group in self.model.groups:
            homes = ("keep",) if group.kind == "residual" else ("device", "cast")
            home = next((option for option in homes if option in group.options), None)
            if home is None:
                return
            assignment.update(dict.fromkeys(group.members, home))
        self.offers.simulate(assignment)  # type: ignore[arg-type]

    def other_strategies(self) -> None:
        """All that are registered; of those that raise, the errors are kept."""
        if not self.strategy.others:
            return
        casts = self.options.fixed_casts or ()
        states = sum(
            u.state_bytes + (0 if u.name in casts and may_cast(u, "device") else u.compute_bytes)
            for u in self.workload.units
        )
        all_fit = states <= self.budget.device_bytes
        for name in candidates():
            if name == resident.NAME and not resident.may_help(
                self.workload, self.budget, self.options
            ):
                continue  # it would plan what "lohan" plans
            if not all_fit and _wants_all_resident(name, self.options):
                continue  # it cannot fit, and large models take seconds to find that out
            self._consider(name)

    def room_for_states(self) -> float:
        """Bytes of states on the device beyond which no plan takes less of it than the leanest, if
        nothing fits it, whatever the host memory: such plans cannot say any better what lacks."""
        if math.isfinite(self.offers.relaxed.bound):
            return math.inf
        least = least_memory(self.model, replace(self.budget, host_bytes=UNLIMITED))
        if least <= self.budget.device_bytes or self.leanest is None:
            return math.inf
        return self.leanest.memory.peak_bytes - least

    def _consider(self, name: str) -> None:
        """Offer a strategy's plan, or keep the error that it raises for lack of memory."""
        progress.report(f"pareto: trying {name}{self.offers.so_far}")
        args = (self.workload, self.hw, self.budget, self.options)
        try:
            made = self._made(name)
            found = finish(*args, made, name) if isinstance(made, Choices) else made
        except InsufficientMemoryError as error:
            self.errors.append(error.anew())
        except LohanError:
            return
        else:
            bound_s = self.offers.bound_of(assignment_of(self.model, found))
            if self.offers.may_gain(bound_s):
                self.offers.offer(found, name)

    def _made(self, name: str) -> Plan | Choices:
        """What a strategy plans; the plans around that of `lohan-resident` are kept for later."""
        args = (self.workload, self.hw, self.budget, self.options)
        if name != resident.NAME:
            return registry.get(name)(*args)
        room = self.room_for_states()
        plans = resident.plans_around(*args, self.effort.around, room)
        self.around = plans[1:]
        return plans[0]

    def own_plans(self) -> None:
        """The integer program at this budget."""
        try_budget(self.offers, self.effort)

    def ladder(self) -> None:
        """The integer program at smaller budgets."""
        try_rungs(self.offers, self.effort)

    def search_all(self) -> None:
        """Every assignment by ascending bound, if there are few enough of them."""
        if not self.effort.assignments:
            return
        model = Model(self.workload, self.hw, self.options, by_value=True)
        columns = columns_of(model, self.effort.assignments)
        if columns is None:
            return
        offers, left = self.offers, self.effort.simulations
        for bound_s, assignment in by_bound(model, self.budget, columns):
            if not offers.may_gain(bound_s):
                break
            if not left:
                return
            left -= 1
            offers.simulate(assignment)
            if offers.num_drafts < self.effort.drafts and offers.best is not None:
                offers.simulate_late(assignment, offers.best.seconds)
        self.exhaustive = True

    def polish(self) -> None:
        """Single changes of the best plan, and of those around the best of `lohan-resident`: where
        a unit more just fits, Algorithm 1 may swap what should be recomputed then."""
        best = self.offers.best
        if best is None or self.exhaustive or not self.effort.polish:
            return
        for plan in (best.plan, *self.around):
            climb(self.offers, plan, self.effort.polish)

    def exchange(self) -> None:
        """One or two changes at a time, from the best plans of several strategies."""
        if self.offers.best is None or self.exhaustive or not self.effort.drafts:
            return
        exchange_choices(self.offers, self.effort.starts, self.effort.drafts)

    @cached_property
    def leanest(self) -> Draft | None:
        """The draft with the smallest peak, however slow; None if host memory is too small."""
        return leanest_of_all(self.model, self.budget, NAME, self.effort.lean)

    def lean_plan(self) -> None:
        """Offer the leanest plan, or keep the error that says what it lacks."""
        made = self.leanest
        if made is None:
            if not self.errors:  # nobody has said what lacks
                self._consider("lohan")
        elif made.memory.peak_bytes <= self.budget.device_bytes:
            self.offers.finish(made, self.budget)
        else:
            self.errors.append(device_error(made, self.budget, self.options))

    def first_plan(self, budget: MemoryBudget, options: PlannerOptions) -> Plan | None:
        """What a search for another budget, or with other options, comes upon first."""
        other = _Search(self.strategy, self.workload, self.hw, budget, options)
        for step in (other.own_plans, other.other_strategies, other.ladder, other.search_all):
            step()
            if other.offers.best is not None:
                return other.offers.best.plan
        return None


register(NAME)(Pareto())
