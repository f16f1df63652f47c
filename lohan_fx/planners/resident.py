"""lohan-resident: Algorithm 1 with as many device-resident units as make the step shortest.

A resident unit is updated on the device, so it costs neither link nor CPU time; its states take
memory that activations would have, which then are swapped or recomputed. Units whose gradients
come last become resident first: their updates are what `optimizer.step()` would wait for. How many
is found by simulation, closer and closer around the best count. Host memory that is left holds
compute copies of units on SSD.

(LoHan §IV keeps no states on the device; ZeRO-Offload's successors and SSDTrain §3 do when memory
is left.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lohan_fx.errors import InsufficientMemoryError
from lohan_fx.footprint import unit_bytes
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import Plan, Tier
from lohan_fx.planners.evaluate import step_seconds
from lohan_fx.planners.lohan import Lohan
from lohan_fx.planners.registry import PlannerOptions, register
from lohan_fx.workload import Workload

NAME = "lohan-resident"

_MIN_SHARE = 0.02
"""With less of the parameters resident, updates are what they were, and no count is tried."""


@dataclass
class _Counts:
    """Plans by the number of resident units; None if there is none that fits."""

    workload: Workload
    hw: HardwareProfile
    budget: MemoryBudget
    options: PlannerOptions
    order: tuple[str, ...]

    def __post_init__(self) -> None:
        self.found: dict[int, tuple[float, Plan] | None] = {}
        self.errors: list[InsufficientMemoryError] = []

    def seconds(self, count: int) -> float:
        if count not in self.found:
            self.found[count] = self._plan(count)
        made = self.found[count]
        return math.inf if made is None else made[0]

    def _plan(self, count: int) -> tuple[float, Plan] | None:
        fixed: dict[str, Tier] = dict.fromkeys(self.order[:count], "device")
        fixed.update(self.options.fixed_units or {})
        options = replace(self.options, fixed_units=fixed)
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
    wanted = [best]
    for k in range(1, distance + 1):
        wanted += [count for count in (best + k, best - k) if 0 <= count <= most]
    found = []
    for count in wanted:
        counts.seconds(count)
        made = counts.found[count]
        if made is not None:
            note = f"{count} of {len(workload.units)} units are resident: those whose gradients "
            found.append(replace(made[1], notes=(f"{note}come last", *made[1].notes)))
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
