"""lohan-resident: Algorithm 1 with as many device-resident units as make the step shortest.

A resident unit is updated on the device, so it costs neither link nor CPU time; its states take
memory that activations would have, which then are swapped or recomputed. Units whose gradients
come last become resident first: their updates are what `optimizer.step()` would wait for. How many
is found by simulation, closer and closer around the best count. Host memory that is left holds
compute copies of units on SSD. Where resident units are not all that there is, they are also tried
without compute copies, which are cast where they are used: that lets more of them be resident.
Where gradients of resident units wait for optimizer.step(), those that would wait longest may wait
in host memory, if that lets more units be resident. Where all units are on the device anyway
(states="device"), as many keep no compute copies as make the step shortest.

(LoHan §IV keeps no states on the device; ZeRO-Offload's successors and SSDTrain §3 do when memory
is left.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lohan_fx.errors import InsufficientMemoryError
from lohan_fx.footprint import may_cast, may_park, unit_bytes
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import Plan, Tier
from lohan_fx.planners.lohan import Lohan
from lohan_fx.planners.registry import PlannerOptions, register
from lohan_fx.simulate import step_seconds
from lohan_fx.workload import Unit, Workload

NAME = "lohan-resident"

_MIN_GAIN = 0.002
"""Of the step's time: for less no gradients are parked."""

_MIN_SHARE = 0.02
"""With less of the parameters resident, updates are what they were, and no count is tried."""


@dataclass
class _Counts:
    """Plans by the number of resident units, and of those among them whose gradients are parked;
    None if there is none that fits. `casts`: those of them that may keep no compute copy keep none.
    """

    workload: Workload
    hw: HardwareProfile
    budget: MemoryBudget
    options: PlannerOptions
    order: tuple[str, ...]
    casts: bool = False

    def __post_init__(self) -> None:
        self.found: dict[tuple[int, int], tuple[float, Plan] | None] = {}
        self.errors: list[InsufficientMemoryError] = []

    @cached_property
    def most(self) -> int:
        """How many units could be resident if they were all that there is."""
        return _most(self.workload, self.budget, self.order, casts=self.casts)

    def seconds(self, count: int, parked: int = 0) -> float:
        key = count, parked
        if key not in self.found:
            self.found[key] = self._plan(*key)
        made = self.found[key]
        return math.inf if made is None else made[0]

    def plan(self, count: int, parked: int = 0) -> Plan | None:
        """The plan, with a note that says what is resident."""
        self.seconds(count, parked)
        made = self.found[count, parked]
        if made is None:
            return None
        note = resident_note(made[1], self.options, self.which(count))
        return replace(made[1], notes=(note, *made[1].notes))

    def which(self, count: int) -> str:
        """Those that are resident, for the note."""
        return " (those whose gradients come last)" if 0 < count < len(self.order) else ""

    def search(self, low: int) -> int:
        """The best count of at least `low`: like bisection, around the best of three points."""
        least, high = low, self.most
        best = min((low, high), key=self.seconds)
        while high - low > 1:
            inner = {low + (high - low) * k // 4 for k in (1, 2, 3)} - {low, high}
            best = min((best, *sorted(inner)), key=self.seconds)
            tried = sorted({low, best, high} | inner)
            place = tried.index(best)
            around = (tried[max(0, place - 1)], tried[min(place + 1, len(tried) - 1)])
            if around == (low, high):  # nothing is left between them
                break
            low, high = around
        if self.seconds(best) == math.inf:  # those that fit may lie between those that were tried
            best = min(range(least, self.most + 1), key=self.seconds)
        return best

    def park(self, count: int) -> tuple[int, int]:
        """Park gradients of as many units, and have as many more resident, as gains; of no more
        than that takes, since parked ones cross the link twice."""
        best = count, 0
        while True:
            n = best[0]
            around = [(n, n // 2), (n + 1, (n + 1) // 2), (n + 1, n)]
            around = [(count, k) for count, k in around if k > 0 and count <= self.most]
            found = min(around, key=lambda key: self.seconds(*key), default=best)
            if not self.seconds(*found) < (1 - _MIN_GAIN) * self.seconds(*best):  # maybe inf, both
                break
            best = found
        count, high = best
        low = 0  # of so few it is not known, or known to be slower
        limit = self.seconds(count, high) * (1 + _MIN_GAIN)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.seconds(count, middle) <= limit else (middle, high)
        return count, high

    def _plan(self, count: int, parked: int) -> tuple[float, Plan] | None:
        resident = self.order[:count]
        fixed: dict[str, Tier] = dict.fromkeys(resident, "device")
        fixed.update(self.options.fixed_units or {})
        longest = resident[count - parked :]  # their gradients are made first
        options = replace(self.options, fixed_units=fixed)
        if options.fixed_parked is None:
            options = replace(options, fixed_parked=longest)
        if options.fixed_casts is None:
            options = replace(options, fixed_casts=resident if self.casts else ())
        try:
            plan = Lohan(name=NAME)(self.workload, self.hw, self.budget, options)
        except InsufficientMemoryError as error:
            self.errors.append(error.anew())
            return None
        return step_seconds(self.workload, plan, self.hw), plan


def resident_note(plan: Plan, options: PlannerOptions, which: str = "") -> str:
    """How many units live on the device, and how; counted in the plan, as nobody need have chosen
    them: `states` may say so, or host memory be too small for any other place.

    Args:
        which: of those that could be, which ones are.
    """
    here = [unit for unit in plan.units.values() if unit.tier == "device"]
    note = f"{len(here)} of {len(plan.units)} units are resident on the device{which}"
    if options.states != "auto":
        note += f", as states={options.states!r}"
        note += " and fixed_units have it" if options.fixed_units else " has it"
    casts = sum(unit.casts for unit in here)
    parked = sum(unit.gradients == "parked" for unit in here)
    note += f", {casts} keep no compute copy" if casts else ""
    return note + (f", gradients of {parked} wait in host memory" if parked else "")


def plan_resident(
    workload: Workload, hw: HardwareProfile, budget: MemoryBudget, options: PlannerOptions
) -> Plan:
    """Plan one step.

    Raises:
        InsufficientMemoryError: as strategy "lohan" does.
    """
    return plans_around(workload, hw, budget, options, 0)[0]


def plans_around(
    workload: Workload,
    hw: HardwareProfile,
    budget: MemoryBudget,
    options: PlannerOptions,
    distance: int,
    room: float = math.inf,
) -> list[Plan]:
    """The best plan, then those with up to `distance` units more or less on the device, if they
    fit: where memory is tight, Algorithm 1 may make little of a count that is better.

    Args:
        workload, hw, budget, options: as for any strategy.
        distance: in units.
        room: no more than so many bytes of states are resident, beside those that must be.

    Raises:
        InsufficientMemoryError: as strategy "lohan" does.
    """
    options = options.with_copies()
    if there := _on_device_anyway(workload, options):
        return _plans_casting(_Casting(workload, hw, budget, options, there, casts=True), distance)
    order = _last_gradients_first(workload, options)
    states = itertools.accumulate(workload.unit_by_name[name].state_bytes for name in order)
    order = order[: sum(total <= room for total in states)]
    may = may_help(workload, budget, options)
    counts = _Counts(workload, hw, budget, options, order)
    errors = counts.errors
    best = counts.search(0) if may else 0
    if may and best < len(order) and _may_cast(workload, options):
        others = _Counts(workload, hw, budget, options, order, casts=True)
        count = others.search(min(best, others.most))
        errors = errors + others.errors
        if others.seconds(count) < (1 - _MIN_GAIN) * counts.seconds(best):
            counts, best = others, count
    wanted = [(best, 0)]
    parks = any(may_park(u, "device", options.update_schedule) for u in workload.units)
    if parks and options.fixed_parked is None:
        wanted.insert(0, counts.park(best))
    return _those_that_fit(counts, best, wanted, distance, errors)


class _Casting(_Counts):
    """Plans by the number of units without compute copies, of those that are on the device whatever
    is chosen."""

    @cached_property
    def most(self) -> int:
        return len(self.order)

    def which(self, count: int) -> str:
        return ""

    def gains(self) -> bool:
        """Whether there is memory to gain from copies: something is not kept, and without any it
        fits."""
        made = self.plan(0)
        if made is not None and made.count("keep") == len(self.workload.residuals):
            return False
        return self.seconds(self.most) < math.inf


def _plans_casting(counts: _Casting, distance: int) -> list[Plan]:
    """`plans_around`, of units that are on the device anyway: casts take the device's time, so
    there are none that save less than they cost."""
    best = counts.search(0) if counts.gains() else 0
    if not counts.seconds(best) < (1 - _MIN_GAIN) * counts.seconds(0):  # maybe inf, both
        best = 0
    return _those_that_fit(counts, best, [(best, 0)], distance, counts.errors)


def _those_that_fit(
    counts: _Counts,
    best: int,
    wanted: list[tuple[int, int]],
    distance: int,
    errors: Sequence[InsufficientMemoryError],
) -> list[Plan]:
    """The wanted plans, and those around the best count; the least of the errors if none fits."""
    for k in range(1, distance + 1):
        wanted += [(count, 0) for count in (best + k, best - k) if 0 <= count <= counts.most]
    plans = (counts.plan(*key) for key in dict.fromkeys(wanted))
    found = [plan for plan in plans if plan is not None]
    if not found:
        raise min(errors, key=lambda e: e.need_bytes).anew()
    return found


def _may_cast(workload: Workload, options: PlannerOptions) -> bool:
    """Whether it is open which units on the device keep compute copies."""
    return options.fixed_casts is None and any(may_cast(u, "device") for u in workload.units)


def may_help(workload: Workload, budget: MemoryBudget, options: PlannerOptions) -> bool:
    """Whether units that could be resident hold enough of the parameters to be worth a search, or
    units that are on the device anyway have compute copies that they may do without."""
    if _on_device_anyway(workload, options):
        return True
    order = _last_gradients_first(workload, options)
    names = order[: _most(workload, budget, order)]
    resident = sum(workload.unit_by_name[name].num_params for name in names)
    return resident >= _MIN_SHARE * workload.num_params


def _most(
    workload: Workload, budget: MemoryBudget, order: Sequence[str], *, casts: bool = False
) -> int:
    """How many units could be resident if they were all that there is."""
    units = [workload.unit_by_name[name] for name in order]
    sizes = [unit_bytes(u, copy=not (casts and may_cast(u, "device"))) for u in units]
    return sum(total <= budget.device_bytes for total in itertools.accumulate(sizes))


def _last_gradients_first(workload: Workload, options: PlannerOptions) -> tuple[str, ...]:
    """Trainable units whose tier is open; the one whose gradients backward makes last is first."""
    if options.states != "auto":
        return ()
    fixed = options.fixed_units or {}
    return _sorted(workload, [u for u in workload.units if u.trainable and u.name not in fixed])


def _on_device_anyway(workload: Workload, options: PlannerOptions) -> tuple[str, ...]:
    """Units that `options.states` puts on the device, if they may keep no compute copy and that is
    open. First those whose gradients come last: they are used farthest from where forward ends, and
    memory is at its peak."""
    if options.states != "device" or options.fixed_casts is not None:
        return ()
    tiers = {u.name: (options.fixed_units or {}).get(u.name, "device") for u in workload.units}
    return _sorted(workload, [u for u in workload.units if may_cast(u, tiers[u.name])])


def _sorted(workload: Workload, units: Sequence[Unit]) -> tuple[str, ...]:
    """By when backward makes the last gradient, the latest first."""
    made = {
        unit.name: max((workload.producer.get(g, -1) for g in unit.gradients), default=-1)
        for unit in units
    }
    return tuple(sorted(made, key=lambda name: -made[name]))


register(NAME)(plan_resident)
