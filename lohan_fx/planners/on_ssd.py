"""What else would do where nothing fits: states on SSDs, in a plan of "lohan". No torch."""

from __future__ import annotations

from dataclasses import replace

from lohan_fx.errors import InsufficientMemoryError, LohanError, format_bytes, format_need
from lohan_fx.footprint import align, host_breakdown, unit_bytes
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import Plan, Tier
from lohan_fx.planners.registry import PlannerOptions, get
from lohan_fx.workload import Workload

STRATEGY = "lohan"
"""Quick, and with states on SSDs as lean as any; `pareto` finds its plans, too."""


def budget_with_ssds(
    workload: Workload, hw: HardwareProfile, budget: MemoryBudget, options: PlannerOptions
) -> MemoryBudget | None:
    """A budget that holds this one, in which `STRATEGY` has a plan: with space on SSDs for all
    states, and the host memory that their buffers need; None: no SSDs, or it has none there either.
    """
    if not hw.ssds or options.states not in ("auto", "ssd") or options.fixed_units:
        return None
    units = sum(unit_bytes(unit) for unit in workload.units)
    swapped = [workload.values[v].num_bytes for v in workload.residuals]
    tiers: dict[str, Tier] = dict.fromkeys(workload.unit_by_name, "ssd")
    buffers = host_breakdown(workload.units, tiers, options.update_schedule, (), swapped)
    large = replace(
        budget,
        host_bytes=max(budget.host_bytes, sum(buffers.values())),
        ssd_bytes=max(budget.ssd_bytes, units + sum(map(align, swapped))),
    )

    def plan(limit: MemoryBudget) -> Plan:
        made = get(STRATEGY)(workload, hw, limit, options)
        assert isinstance(made, Plan)
        return made

    try:
        used = plan(large).prediction
    except InsufficientMemoryError as error:
        lacks = error.tier == "device"
        return replace(large, device_bytes=error.need_bytes) if lacks else None
    except LohanError:
        return None
    least = replace(
        large,
        host_bytes=max(budget.host_bytes, used.peak_host_bytes),
        ssd_bytes=max(budget.ssd_bytes, used.peak_ssd_bytes),
    )
    try:
        plan(least)  # with just that much it may decide otherwise
    except InsufficientMemoryError:
        return large
    return least


def more_than(budget: MemoryBudget, larger: MemoryBudget) -> str:
    """What a budget lacks of a larger one: ``"2.00 GiB of SSDs (there are 512.00 MiB)"``."""
    parts = (
        ("SSDs", larger.ssd_bytes, budget.ssd_bytes),
        ("host memory", larger.host_bytes, budget.host_bytes),
        ("device memory", larger.device_bytes, budget.device_bytes),
    )
    lacks = [
        f"{format_need(need)} of {what} (there are {format_bytes(have)})"
        for what, need, have in parts
        if need > have
    ]
    return " and ".join(filter(None, (", ".join(lacks[:-1]), lacks[-1])))
