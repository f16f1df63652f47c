"""Strategies: (Workload, HardwareProfile, MemoryBudget, PlannerOptions) → Plan. No torch.

`make_plan` runs a strategy by name, or any callable that returns a `Plan` or `Choices`.
Every module below registers one strategy; the order is of no matter.
"""

from __future__ import annotations

from lohan_fx.errors import PlanError
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import Plan
from lohan_fx.planners import keep_all as _keep_all
from lohan_fx.planners import lohan as _lohan
from lohan_fx.planners import random_policy as _random_policy
from lohan_fx.planners import recompute_all as _recompute_all
from lohan_fx.planners import swap_all as _swap_all
from lohan_fx.planners.registry import Planner, PlannerOptions, get, names, register
from lohan_fx.planners.schedule import Choices, finish
from lohan_fx.workload import Workload

BUILT_IN = (_keep_all, _lohan, _random_policy, _recompute_all, _swap_all)
"""Modules whose import registers a strategy."""

__all__ = [
    "BUILT_IN",
    "Choices",
    "Planner",
    "PlannerOptions",
    "finish",
    "get",
    "make_plan",
    "names",
    "register",
]


def make_plan(
    strategy: str | Planner,
    workload: Workload,
    hw: HardwareProfile,
    budget: MemoryBudget,
    options: PlannerOptions | None = None,
) -> Plan:
    """Run a strategy. `Choices` from a user's callable are completed by `finish`.

    Raises:
        PlanError: unknown strategy, or a result that does not match the workload.
        InsufficientMemoryError: no plan of this strategy fits a tier.
    """
    options = options or PlannerOptions()
    planner = get(strategy)
    found = planner(workload, hw, budget, options)
    if isinstance(found, Choices):
        name = strategy if isinstance(strategy, str) else getattr(planner, "__name__", "custom")
        return finish(workload, hw, budget, options, found, name)
    if not isinstance(found, Plan):
        raise PlanError(
            f"strategy {strategy!r} returned {type(found).__name__}: return a Plan or Choices"
        )
    return found
