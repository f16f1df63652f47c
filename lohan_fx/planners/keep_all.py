"""keep-all: nothing leaves the device. What a model that fits should do."""

from __future__ import annotations

from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import Plan
from lohan_fx.planners.registry import PlannerOptions, register
from lohan_fx.planners.schedule import Choices, finish
from lohan_fx.planners.tiers import unit_tiers
from lohan_fx.workload import Workload


@register("keep-all")
def keep_all(
    workload: Workload, hw: HardwareProfile, budget: MemoryBudget, options: PlannerOptions
) -> Plan:
    """Keep every residual; units are device-resident unless `options.states` says otherwise.

    Raises:
        InsufficientMemoryError: it does not fit.
    """
    choices = Choices(
        actions=dict.fromkeys(workload.residuals, "keep"),
        unit_tiers=unit_tiers(workload, hw, budget, options, auto="device"),
    )
    return finish(workload, hw, budget, options, choices, "keep-all")
