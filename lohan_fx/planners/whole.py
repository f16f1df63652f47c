"""Plans for steps whose gradients must be whole before anything is updated: to clip them by their
norm, or to leave a step out. What that allows early are trials in second copies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from lohan_fx.errors import InsufficientMemoryError
from lohan_fx.plan import Plan, Schedule
from lohan_fx.planners.registry import PlannerOptions

MakePlan = Callable[[PlannerOptions], Plan]
"""A strategy that only lacks its options."""


def tried_or_deferred(
    make: MakePlan, options: PlannerOptions, settled: Schedule | None = None
) -> Plan:
    """A plan with schedule "speculative"; with "deferred" if host memory has no room for second
    copies. Where these may have driven units to the SSD, the plan that is predicted to be faster.

    Args:
        make: raises InsufficientMemoryError if no plan fits.
        options: their schedule is of no matter.
        settled: the schedule of another program that shares the memory, if there is one.

    Raises:
        InsufficientMemoryError: neither fits.
    """
    tried = None
    if settled != "deferred":
        with suppress(InsufficientMemoryError):
            tried = make(replace(options, schedule="speculative", explain=False))
    if tried is not None:
        on_ssd = any(unit.tier == "ssd" for unit in tried.units.values())
        if settled is not None or options.states == "ssd" or not on_ssd:
            return tried
    late = replace(options, schedule="deferred", explain=options.explain and tried is None)
    try:
        deferred = make(late)
    except InsufficientMemoryError:
        if tried is None:
            raise
        return tried
    return deferred if tried is None else min(deferred, tried, key=_step_s)


def _step_s(plan: Plan) -> float:
    return plan.prediction.step_s
