"""lohan-resident: Algorithm 1 with as many device-resident units as make the step shortest.

A resident unit is updated on the device, so it costs neither link nor CPU time; its states take
memory that activations would have, which then are swapped or recomputed. Units whose gradients
come last become resident first: their updates are what `optimizer.step()` would wait for. How many
is found by simulation, closer and closer around the best count. Host memory that is left holds
compute copies of units on SSD. Where gradients of resident units wait for optimizer.step(), those
that would wait longest may wait in host memory, if that lets more units be resident.

(LoHan §IV keeps no states on the device; ZeRO-Offload's successors and SSDTrain §3 do when memory
is left.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lohan_fx.errors import InsufficientMemoryError
from lohan_fx.footprint import may_park, unit_bytes
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import Plan, Tier
from lohan_fx.planners.lohan import Lohan
from lohan_fx.planners.registry import PlannerOptions, register
from lohan_fx.simulate import step_seconds
from lohan_fx.workload import Workload

NAME = "lohan-resident"

_MIN_GAIN = 0.002
"""Of the step's time: for less no gradients are parked."""

_MIN_SHARE = 0.02
"""With less of the parameters resident, updates are what they were, and no count is tried."""


@dataclass
class _Counts:
    """Plans by the number of resident units, and of those among them whose gradients are parked;
    None if there is none that fits."""

    workload: Workload
    hw: HardwareProfile
    budget: MemoryBudget
    options: PlannerOptions
    order: tuple[str, ...]

    def __post_init__(self) -> None:
        self.found: dict[tuple[int, int], tuple[float, Plan] | None] = {}
        self.errors: list[InsufficientMemoryError] = []

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
        note = f"{count} of {len(self.workload.units)} units are resident: those whose gradients "
        note += "come last"
        if parked:
            note += f"; gradients of {parked} of them wait in host memory"
        return replace(made[1], notes=(note, *made[1].notes))

    def park(self, count: int, most: int) -> tuple[int, int]:
        """Park gradients of as many units, and have as many more resident, as gains; of no more
        than that takes, since parked ones cross the link twice."""
        best = count, 0
        while True:
            n = best[0]
            around = [(n, n // 2), (n + 1, (n + 1) // 2), (n + 1, n)]
            around = [(count, k) for count, k in around if k > 0 and count <= most]
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
        try:
            plan = Lohan(name=NAME)(self.workload, self.hw, self.budget, options)
        except InsufficientMemoryError as error:
            self.errors.append(error.anew())
            return None
        return step_seconds(self.workload, plan, self.hw), plan


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
) -> list[Plan]:
    """The best plan, then those with up to `distance` units more or less on the device, if they
    fit: where memory is tight, Algorithm 1 may make little of a count that is better.

    Raises:
        InsufficientMemoryError: as strategy "lohan" does.
    """
    options = options.with_copies()
    order = _last_gradients_first(workload, options)
    counts = _Counts(workload, hw, budget, options, order)
    low, high = 0, _most(workload, budget, order) if may_help(workload, budget, options) else 0
    most = high
    best = min((low, high), key=counts.seconds)
    while high - low > 1:  # like bisection: around the best of three inner points
        inner = {low + (high - low) * k // 4 for k in (1, 2, 3)} - {low, high}
        best = min((best, *sorted(inner)), key=counts.seconds)
        tried = sorted({low, best, high} | inner)
        place = tried.index(best)
        around = (tried[max(0, place - 1)], tried[min(place + 1, len(tried) - 1)])
        if around == (low, high):  # nothing is left between them
            break
        low, high = around
    if counts.seconds(best) == math.inf:  # those that fit may lie between those that were tried
        best = min(range(most + 1), key=counts.seconds)
    wanted = [(best, 0)]
    may = any(may_park(u, "device", options.update_schedule) for u in workload.units)
    if may and options.fixed_parked is None:
        wanted.insert(0, counts.park(best, most))
    for k in range(1, distance + 1):
        wanted += [(count, 0) for count in (best + k, best - k) if 0 <= count <= most]
    plans = (counts.plan(*key) for key in dict.fromkeys(wanted))
    found = [plan for plan in plans if plan is not None]
    if not found:
        raise min(counts.errors, key=lambda e: e.need_bytes).anew()
    return found


def may_help(workload: Workload, budget: MemoryBudget, options: PlannerOptions) -> bool:
    """Whether units that could be resident hold enough of the parameters to be worth a search."""
    order = _last_gradients_first(workload, options)
    names = order[: _most(workload, budget, order)]
    resident = sum(workload.unit_by_name[name].num_params for name in names)
    return resident >= _MIN_SHARE * workload.num_params


def _most(workload: Workload, budget: MemoryBudget, order: Sequence[str]) -> int:
    """How many units could be resident if they were all that there is."""
    sizes = [unit_bytes(workload.unit_by_name[name]) for name in order]
    return sum(total <= budget.device_bytes for total in itertools.accumulate(sizes))


def _last_gradients_first(workload: Workload, options: PlannerOptions) -> tuple[str, ...]:
    """Trainable units whose tier is open; the one whose gradients backward makes last is first."""
    if options.states != "auto":
        return ()
    fixed = options.fixed_units or {}
    made = {
        unit.name: max((workload.producer.get(g, -1) for g in unit.gradients), default=-1)
        for unit in workload.units
        if unit.trainable and unit.name not in fixed
    }
    return tuple(sorted(made, key=lambda name: -made[name]))


register(NAME)(plan_resident)
