"""recompute-all: activation checkpointing by block. Block inputs stay on the device."""

from __future__ import annotations

from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import Action, Plan
from lohan_fx.planners.registry import PlannerOptions, register
from lohan_fx.planners.schedule import Choices, finish
from lohan_fx.planners.tiers import unit_tiers
from lohan_fx.workload import Workload


@register("recompute-all")
def recompute_all(
    workload: Workload, hw: HardwareProfile, budget: MemoryBudget, options: PlannerOptions
) -> Plan:
    """Keep what blocks pass to each other; make everything else again, one region a block.

    What cannot be made again (random masks) is swapped, by the rule of `schedule.settle`.

    Raises:
        InsufficientMemoryError: a tier is too small.
    """
    actions: dict[str, Action] = {
        v: "keep" if v in workload.inter_block else "recompute" for v in workload.residuals
    }
    choices = Choices(actions=actions, unit_tiers=unit_tiers(workload, hw, budget, options))
    return finish(workload, hw, budget, options, choices, "recompute-all")
