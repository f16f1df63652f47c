"""A strategy is three policies that do not know each other, and defaults for the other axes.

Activations (keep, swap, recompute), access to parameters (how ops read units, how gradients
leave), placement of model states, tier of swapped activations, optimizer schedule: a `Strategy`
holds one choice for each. `PlannerOptions` overrules the last three; `combine` mixes strategies:
LoHan §V-E's "LoHan+Cap" is ``combine("capuchin", states="ssd", schedule="optimized")``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from lohan_fx.errors import InsufficientMemoryError, PlanError
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import Action, Plan, Schedule, Tier
from lohan_fx.planners.registry import Planner, PlannerOptions, States, SwapTo, get
from lohan_fx.planners.schedule import (
    Choices,
    Draft,
    UnitMode,
    device_error,
    finish,
    lean_draft,
    must_save,
)
from lohan_fx.planners.tiers import unit_tiers
from lohan_fx.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Activations:
    """What happens to residuals; the fields are those of `Choices`. `notes` say why."""

    actions: Mapping[str, Action]
    swap_tiers: Mapping[str, Tier] | None = None
    regions: Mapping[str, str] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """How units are read and their gradients leave; the fields are those of `Choices`."""

    modes: Mapping[str, UnitMode] = field(default_factory=dict)
    direct_gradients: Collection[str] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a policy decides about: every axis but its own is fixed.

    `options` have the strategy's defaults filled in; `tiers` are those of the units.
    """

    name: str
    workload: Workload
    hw: HardwareProfile
    budget: MemoryBudget
    options: PlannerOptions
    tiers: Mapping[str, Tier]

    def choices(self, found: Activations, access: Parameters | None = None) -> Choices:
        access = access or Parameters()
        return Choices(
            actions=found.actions,
            unit_tiers=self.tiers,
            swap_tiers=found.swap_tiers,
            regions=found.regions,
            modes=access.modes,
            direct_gradients=access.direct_gradients,
        )

    def draft(self, found: Activations, access: Parameters | None = None) -> Draft:
        """The plan with the shortest windows; tiny residuals are kept if that fits.

        Raises:
            InsufficientMemoryError: the host or SSD budget is too small.
        """
        choices = self.choices(found, access)
        args = (self.workload, self.hw, self.budget, self.options, choices, self.name)
        made = lean_draft(*args)
        return made if self.fits(made) else lean_draft(*args, keep_tiny=False)

    def fits(self, made: Draft) -> bool:
        return made.memory.peak_bytes <= self.budget.device_bytes

    def error(self, made: Draft) -> InsufficientMemoryError:
        return device_error(made, self.budget, self.options)

    def num_bytes(self, values: Collection[str]) -> int:
        return sum(self.workload.values[v].num_bytes for v in values)


class ActivationPolicy(Protocol):
    """Decides keep, swap or recompute for every residual."""

    def __call__(self, setting: Setting, /) -> Activations: ...


class ParameterPolicy(Protocol):
    """Decides how units are read; what happens to residuals is decided."""

    def __call__(self, setting: Setting, found: Activations, /) -> Parameters: ...


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A planner made of policies.

    Attributes:
        name: the strategy's name in plans and errors.
        activations, parameters: the policies; `parameters` None fetches a unit for each run of
            ops that use it.
        states: tier of the units; "auto" is host memory as far as it goes, then SSD.
        swap_to: tier of swapped residuals; "auto" is host memory as far as it goes, then SSD.
        schedule: how the optimizer overlaps with backward.
        remarks: notes about the finished plan.
    """

    name: str
    activations: ActivationPolicy
    parameters: ParameterPolicy | None = None
    states: States = "auto"
    swap_to: SwapTo = "auto"
    schedule: Schedule = "optimized"
    remarks: Callable[[Setting, Plan], tuple[str, ...]] | None = None

    def __call__(
        self,
        workload: Workload,
        hw: HardwareProfile,
        budget: MemoryBudget,
        options: PlannerOptions,
    ) -> Plan:
        """Plan one step.

        Raises:
            InsufficientMemoryError: the policies' decisions do not fit a tier.
            PlanError: the SSD tier is asked for, but there are no SSDs.
        """
        options = with_defaults(
            options, states=self.states, swap_to=self.swap_to, schedule=self.schedule
        )
        setting = Setting(
            name=self.name,
            workload=workload,
            hw=hw,
            budget=budget,
            options=options,
            tiers=place(workload, hw, budget, options),
        )
        found = self.activations(setting)
        access = self.parameters(setting, found) if self.parameters else Parameters()
        notes = (*found.notes, *access.notes)
        choices = setting.choices(found, access)
        plan = finish(workload, hw, budget, options, choices, self.name, notes)
        if self.remarks is not None:
            plan = replace(plan, notes=(*plan.notes, *self.remarks(setting, plan)))
        return plan


def with_defaults(
    options: PlannerOptions,
    *,
    schedule: Schedule,
    states: States = "auto",
    swap_to: SwapTo = "auto",
) -> PlannerOptions:
    """The options, with what they leave "auto" filled in."""
    return replace(
        options,
        states=states if options.states == "auto" else options.states,
        swap_to=swap_to if options.swap_to == "auto" else options.swap_to,
        schedule=schedule if options.schedule == "auto" else options.schedule,
    )


def place(
    workload: Workload, hw: HardwareProfile, budget: MemoryBudget, options: PlannerOptions
) -> dict[str, Tier]:
    """Unit tiers by the options alone: "auto" is host memory, then SSD.

    Block inputs and what cannot be made again get room in host memory first if they can go
    nowhere else.
    """
    saved = workload.inter_block | must_save(workload)
    swap_bytes = sum(workload.values[v].num_bytes for v in saved)
    return unit_tiers(workload, hw, budget, options, swap_bytes=swap_bytes)


@dataclass(frozen=True, kw_only=True)
class Combined:
    """A planner that is no `Strategy`, under other defaults: units are placed before it runs."""

    name: str
    planner: str | Planner
    states: States = "auto"
    swap_to: SwapTo = "auto"
    schedule: Schedule = "optimized"

    def __call__(
        self,
        workload: Workload,
        hw: HardwareProfile,
        budget: MemoryBudget,
        options: PlannerOptions,
    ) -> Plan:
        """Plan one step; raises what the planner raises."""
        planner = get(self.planner)
        if isinstance(planner, Strategy):
            changed = replace(
                planner,
                name=self.name,
                states=self.states,
                swap_to=planner.swap_to if self.swap_to == "auto" else self.swap_to,
                schedule=self.schedule,
            )
            return changed(workload, hw, budget, options)
        options = with_defaults(
            options, states=self.states, swap_to=self.swap_to, schedule=self.schedule
        )
        options = replace(options, fixed_units=place(workload, hw, budget, options))
        found = planner(workload, hw, budget, options)
        if isinstance(found, Choices):
            return finish(workload, hw, budget, options, found, self.name)
        return replace(found, strategy=self.name)


def combine(
    activations: str | Planner,
    *,
    states: States = "auto",
    swap_to: SwapTo = "auto",
    schedule: Schedule = "optimized",
    parameters: str | ParameterPolicy | None = None,
    name: str | None = None,
) -> Planner:
    """The activation policy of one strategy with other choices for the other axes.

    Args:
        activations: a registered name, or a planner. Its own placement of states and schedule
            no longer count.
        states: "auto" is host memory as far as it goes, then SSD (as LoHan has it).
        swap_to: "auto" keeps the tier that the activation policy has.
        schedule: LoHan's by default.
        parameters: a policy for access to parameters, or the name of a strategy that has one
            (MemFerry's); None keeps that of `activations`.
        name: in plans and errors; made from the parts if None.

    Raises:
        PlanError: no strategy has that name, or it has no such policy.
    """
    label = activations if isinstance(activations, str) else _label(activations)
    name = name or f"{label}[{states},{schedule}]"
    if parameters is None:
        return Combined(
            name=name, planner=activations, states=states, swap_to=swap_to, schedule=schedule
        )
    base = get(activations)
    if not isinstance(base, Strategy):
        raise PlanError(f"{label} is no Strategy: its access to parameters cannot be replaced")
    if isinstance(parameters, str):
        other = get(parameters)
        if not isinstance(other, Strategy) or other.parameters is None:
            raise PlanError(f"{parameters} has no policy for access to parameters")
        parameters = other.parameters
    return Combined(
        name=name,
        planner=replace(base, parameters=parameters),
        states=states,
        swap_to=swap_to,
        schedule=schedule,
    )


def _label(planner: Planner) -> str:
    return str(getattr(planner, "name", None) or getattr(planner, "__name__", "custom"))
