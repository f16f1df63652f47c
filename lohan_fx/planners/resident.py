"""lohan-resident: Algorithm 1 with as many device-resident units as make the step shortest.

A resident unit is updated on the device, so it costs neither link nor CPU time; its states take
memory that activations would have, which then are swapped or recomputed. Units whose gradients
come last become resident first: their updates are what `optimizer.step()` would wait for. How many
is found by simulation: a coarse scan, then closer around its best.

(LoHan §IV keeps no states on the device; ZeRO-Offload's successors and SSDTrain §3 do when memory
is left.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lohan_fx.errors import InsufficientMemoryError
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import Plan, Tier
from lohan_fx.planners.evaluate import step_seconds
from lohan_fx.planners.lohan import Lohan
from lohan_fx.planners.registry import PlannerOptions, register
from lohan_fx.workload import Workload

NAME = "lohan-resident"

_SCAN = 6
"""Parts into which each round of the scan cuts its range."""


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
        return float("inf") if made is None else made[0]

    def _plan(self, count: int) -> tuple[float, Plan] | None:
        fixed: dict[str, Tier] = dict.fromkeys(self.order[:count], "device")
        fixed.update(self.options.fixed_units or {})
        options = replace(self.options, fixed_units=fixed)
        try:
            plan = Lohan(name=NAME)(self.workload, self.hw, self.budget, options)
        except InsufficientMemoryError as error:
            self.errors.append(error)
            return None
        return step_seconds(self.workload, plan, self.hw), plan


def plan_resident(
    workload: Workload, hw: HardwareProfile, budget: MemoryBudget, options: PlannerOptions
) -> Plan:
    """Plan one step.

    Raises:
        InsufficientMemoryError: as strategy "lohan" does.
    """
    counts = _Counts(workload, hw, budget, options, _last_gradients_first(workload, options))
    low, high = 0, len(counts.order)
    while True:
        step = max(1, (high - low) // _SCAN)
        tried = sorted({*range(low, high + 1, step), high})
        best = min(tried, key=counts.seconds)
        if step == 1:
            break
        low, high = max(low, best - step + 1), min(high, best + step - 1)
    made = counts.found[best]
    if made is None:
        raise min(counts.errors, key=lambda e: e.need_bytes)
    note = f"{best} of {len(workload.units)} units are resident: those whose gradients come last"
    return replace(made[1], notes=(note, *made[1].notes))


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
