"""Strategies by name, and the options that all of them share."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from lohan_fx.arguments import check_call
from lohan_fx.cost_model import CostOptions
from lohan_fx.errors import PlanError
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import SCHEDULES, TIERS, Plan, Schedule, Tier
from lohan_fx.workload import Workload

if TYPE_CHECKING:
    from lohan_fx.planners.schedule import Choices

States = Literal["auto", Tier]
SwapTo = Literal["auto", "host", "ssd"]
AskedSchedule = Literal["auto", Schedule]


@dataclass(frozen=True, kw_only=True)
class PlannerOptions:
    """The axes that are independent of the strategy.

    Attributes:
        states: tier of the units; "auto" lets the strategy choose.
        swap_to: tier of swapped residuals; "auto" fills host memory before the SSDs.
        schedule: how the optimizer overlaps with backward; "auto" lets the strategy choose
            ("optimized", unless it stands for a system that does otherwise).
        fixed_units: unit → tier for units that must stay where they are (a second program
            of the same model); takes precedence over `states`.
        copies: "host" lets the compute copies of SSD units live in the host memory that nothing
            else needs, "states" leaves them with their states; "auto" lets the strategy choose
            ("states", where it stands for a system that does so).
        fixed_copies: the units whose copies are in host memory, and no others (as `fixed_units`);
            takes precedence over `copies`.
        fixed_parked: the device units whose gradients are parked, if they may be, and no others (as
            `fixed_units`).
        fixed_casts: the device units that keep no compute copy, if they may do without, and no
            others (as `fixed_units`).
        cost: which extensions of the cost model count.
        explain: the error of a plan that fits nowhere says what would do, which takes more plans.
        known: finished plans of the same workload: a strategy that searches (`pareto`) begins with
            those that fit, and finds none that is slower.

    Raises:
        PlanError: a value that is none of these.
    """

    states: States = "auto"
    swap_to: SwapTo = "auto"
    schedule: AskedSchedule = "auto"
    fixed_units: Mapping[str, Tier] | None = None
    copies: Literal["auto", "states", "host"] = "auto"
    fixed_copies: Collection[str] | None = None
    fixed_parked: Collection[str] | None = None
    fixed_casts: Collection[str] | None = None
    cost: CostOptions = field(default_factory=CostOptions)
    explain: bool = True
    known: tuple[Plan, ...] = ()

    def __post_init__(self) -> None:
        allowed = {
            "states": ("auto", *TIERS),
            "swap_to": ("auto", "host", "ssd"),
            "schedule": ("auto", *SCHEDULES),
            "copies": ("auto", "states", "host"),
        }
        for name, values in allowed.items():
            value = getattr(self, name)
            if value not in values:
                raise PlanError(f"{name} {value!r} is none of {', '.join(values)}")
        for unit, tier in (self.fixed_units or {}).items():
            if tier not in TIERS:
                raise PlanError(f"fixed_units[{unit!r}] {tier!r} is none of {', '.join(TIERS)}")

    def with_copies(self) -> PlannerOptions:
        """The options of a strategy that lets copies live in host memory if it may choose."""
        return replace(self, copies="host") if self.copies == "auto" else self

    @property
    def update_schedule(self) -> Schedule:
        """`schedule`, with "auto" read as "optimized"."""
        return "optimized" if self.schedule == "auto" else self.schedule


class Planner(Protocol):
    """A strategy. It returns a complete plan, or choices that `finish` completes."""

    def __call__(
        self,
        workload: Workload,
        hw: HardwareProfile,
        budget: MemoryBudget,
        options: PlannerOptions,
        /,
    ) -> Plan | Choices: ...


_PLANNERS: dict[str, Planner] = {}
_P = TypeVar("_P", bound=Planner)


def register(name: str) -> Callable[[_P], _P]:
    """Decorator: make a planner known under `name`.

    Raises:
        PlanError: another planner has that name.
    """

    def add(planner: _P) -> _P:
        if _PLANNERS.get(name, planner) is not planner:
            raise PlanError(f"a strategy named {name!r} is registered already")
        _PLANNERS[name] = planner
        return planner

    return add


def names() -> tuple[str, ...]:
    """Names of all registered strategies, sorted."""
    return tuple(sorted(_PLANNERS))


def get(strategy: str | Planner) -> Planner:
    """A planner by name; a callable is returned as it is.

    Raises:
        PlanError: no strategy has that name; the message lists them and the nearest one.
    """
    if not isinstance(strategy, str):
        if callable(strategy):
            check_call(strategy, 4, "a strategy is called with workload, hw, budget and options")
            return strategy
        raise PlanError(f"a strategy is a name or a callable, not {type(strategy).__name__}")
    if strategy in _PLANNERS:
        return _PLANNERS[strategy]
    near = difflib.get_close_matches(strategy.lower(), names(), n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise PlanError(f"no strategy is named {strategy!r}{hint} Known: {', '.join(names())}")
