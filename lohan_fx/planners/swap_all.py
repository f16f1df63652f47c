"""swap-all: every residual goes to host memory or SSD. The smallest device peak there is."""

from __future__ import annotations

from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import Plan
from lohan_fx.planners.registry import PlannerOptions, register
from lohan_fx.planners.schedule import Choices, finish
from lohan_fx.planners.tiers import unit_tiers
from lohan_fx.workload import Workload


@register("swap-all")
def swap_all(
    workload: Workload, hw: HardwareProfile, budget: MemoryBudget, options: PlannerOptions
) -> Plan:
    """Swap every residual; units are in host memory as far as it goes, then on SSD.

    A residual that is reloaded right before its first use is on the device for no longer than
    any strategy must have it there; so if this does not fit the device, nothing does.

    Raises:
        InsufficientMemoryError: a tier is too small.
    """
    swap_bytes = sum(workload.values[v].num_bytes for v in workload.residuals)
    choices = Choices(
        actions=dict.fromkeys(workload.residuals, "swap"),
        unit_tiers=unit_tiers(workload, hw, budget, options, swap_bytes=swap_bytes),
    )
    return finish(workload, hw, budget, options, choices, "swap-all")
