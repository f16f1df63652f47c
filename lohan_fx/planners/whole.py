"""Plans for steps whose gradients must be whole before anything is updated: to clip them by their
norm, or to leave a step out. What that allows early are trials in second copies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from lohan_fx.errors import InsufficientMemoryError
from lohan_fx.plan import Plan
from lohan_fx.planners.registry import PlannerOptions

MakePlan = Callable[[PlannerOptions], Plan]
"""A strategy that only lacks its options."""


def tried_or_deferred(make: MakePlan, options: PlannerOptions, *, deferred: bool = False) -> Plan:
    """A plan with schedule "speculative"; with "deferred" if host memory has no room for second
    copies, or these drive units to the SSD, where nothing is tried: then late updates are as fast.

    Args:
        make: raises InsufficientMemoryError if no plan fits.
        options: their schedule is of no matter.
        deferred: another program that shares the memory had no room for second copies.

    Raises:
        InsufficientMemoryError: neither fits.
    """
    if not deferred:
        with suppress(InsufficientMemoryError):
            tried = make(replace(options, schedule="speculative", explain=False))
            on_ssd = any(unit.tier == "ssd" for unit in tried.units.values())
            if options.states == "ssd" or not on_ssd:
                return tried
    return make(replace(options, schedule="deferred"))
