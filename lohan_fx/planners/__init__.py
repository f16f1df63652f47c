"""Strategies: (Workload, HardwareProfile, MemoryBudget, PlannerOptions) → Plan. No torch.

`make_plan` runs a strategy by name, or any callable that returns a `Plan` or `Choices`.
Every module below registers one strategy; the order is of no matter.
"""

from __future__ import annotations

from lohan_fx.errors import PlanError
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import Plan
from lohan_fx.planners import capuchin as _capuchin
from lohan_fx.planners import checkmate as _checkmate
from lohan_fx.planners import chen_sqrt as _chen_sqrt
from lohan_fx.planners import colossal_ai as _colossal_ai
from lohan_fx.planners import combined as _combined
from lohan_fx.planners import flashneuron as _flashneuron
from lohan_fx.planners import fuyou as _fuyou
from lohan_fx.planners import g10 as _g10
from lohan_fx.planners import go_memferry as _go_memferry
from lohan_fx.planners import keep_all as _keep_all
from lohan_fx.planners import lohan as _lohan
from lohan_fx.planners import memferry as _memferry
from lohan_fx.planners import pareto as _pareto
from lohan_fx.planners import random_policy as _random_policy
from lohan_fx.planners import recompute_all as _recompute_all
from lohan_fx.planners import resident as _resident
from lohan_fx.planners import ssdtrain as _ssdtrain
from lohan_fx.planners import swap_all as _swap_all
from lohan_fx.planners import zero_infinity as _zero_infinity
from lohan_fx.planners import zero_offload as _zero_offload
from lohan_fx.planners.registry import Planner, PlannerOptions, get, names, register
from lohan_fx.planners.schedule import Choices, finish
from lohan_fx.planners.strategy import Strategy, combine, with_defaults
from lohan_fx.workload import Workload

BUILT_IN = (
    _capuchin,
    _checkmate,
    _chen_sqrt,
    _colossal_ai,
    _combined,
    _flashneuron,
    _fuyou,
    _g10,
    _go_memferry,
    _keep_all,
    _lohan,
    _memferry,
    _pareto,
    _random_policy,
    _recompute_all,
    _resident,
    _ssdtrain,
    _swap_all,
    _zero_infinity,
    _zero_offload,
)
"""Modules whose import registers a strategy."""

__all__ = [
    "BUILT_IN",
    "Choices",
    "Planner",
    "PlannerOptions",
    "Strategy",
    "combine",
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

    Schedule "auto" becomes the strategy's own, or "optimized".

    Raises:
        PlanError: unknown strategy, or a result that does not match the workload.
        InsufficientMemoryError: no plan of this strategy fits a tier.
    """
    options = options or PlannerOptions()
    planner = get(strategy)
    options = with_defaults(options, schedule=getattr(planner, "schedule", "optimized"))
    found = planner(workload, hw, budget, options)
    name = strategy if isinstance(strategy, str) else getattr(planner, "__name__", "custom")
    if isinstance(found, Choices):
        return finish(workload, hw, budget, options, found, name)
    if not isinstance(found, Plan):
        raise PlanError(
            f"strategy {name!r} returned {type(found).__name__}: return a Plan or Choices"
        )
    return found
