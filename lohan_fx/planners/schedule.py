"""From choices to a complete plan: tiers checked, every movement placed, memory exact.

`finish` first lets every copy occupy device memory for as short as the program allows; if that
fits, it lets copies start earlier and end later, lane by lane, while the exact residency stays
within the budget. Strategies decide *what*; this module decides *when*.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar, cast, get_args

import numpy as np

from lohan_fx.errors import InsufficientMemoryError, PlanError
from lohan_fx.footprint import may_cast, may_park
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import TIERS, Action, FetchWindow, Plan, ResidualPlan, Schedule, Tier, UnitPlan
from lohan_fx.planners.lanes import Load
from lohan_fx.planners.overlap import extend
from lohan_fx.planners.prediction import predict
from lohan_fx.planners.regions import split_regions
from lohan_fx.planners.registry import PlannerOptions, States, get, names
from lohan_fx.planners.tiers import check_capacity, copies_that_fit, device_advice, swap_tiers
from lohan_fx.planners.windows import emit_points, region_reads, unit_runs, unit_uses
from lohan_fx.program import Program, Region, Residency, lower, regions_of, residency
from lohan_fx.workload import Workload

TINY_SHIFT = 16
"""A residual is tiny if it has at most 2⁻¹⁶ of the bytes of all residuals."""


UnitMode = Literal["fetch", "hold", "direct", "direct-forward"]
"""How ops read a unit in host memory or on SSD.

fetch: a copy for each run of ops that use it. hold: one copy, from the first use of the step to
the last. direct: in host memory, where it lies. direct-forward: so in forward only, and one copy
for the whole backward, which may start when forward no longer needs it.
"""


ALL_KEPT = "what backward reads (residuals) fits the device: all of it is kept there"
"""The note of plans that neither swap nor recompute."""


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What a strategy decides, without positions.

    Attributes:
        actions: residual → "keep", "swap" or "recompute"; every residual must be there.
        unit_tiers: unit → tier; every unit must be there.
        swap_tiers: swapped residual → "host" or "ssd"; by `tiers.swap_tiers` if None.
        regions: recomputed residual → name of its region; if None, the residual's block, or
            smaller regions where blocks do not fit (`lean_draft`).
        modes: unit → how ops read it, "fetch" if it is not there; no matter for device units.
        direct_gradients: units whose gradients the device writes to the host by itself.
        parked: device units whose gradients wait in host memory, with schedules in which they wait
            for optimizer.step().
        copies: SSD units whose compute copies are in host memory; as `options.copies` says if None.
        casts: device units that keep no compute copy, where they may do without.
    """

    actions: Mapping[str, Action]
    unit_tiers: Mapping[str, Tier]
    swap_tiers: Mapping[str, Tier] | None = None
    regions: Mapping[str, str] | None = None
    modes: Mapping[str, UnitMode] = field(default_factory=dict)
    direct_gradients: Collection[str] = ()
    parked: Collection[str] = ()
    copies: Collection[str] | None = None
    casts: Collection[str] = ()


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A legal plan with the shortest windows, its program and its exact memory.

    `load[i]` is the largest residency, in bytes, of the instructions around op i: those that
    stand before it, itself, and those after it.
    """

    workload: Workload
    plan: Plan
    regions: tuple[Region, ...]
    program: Program
    memory: Residency
    load: Load

    @property
    def peaks_before_regions(self) -> bool:
        """Whether the peak stands before all regions: there smaller regions, or fewer residuals in
        them, change nothing, so the peak becomes no lower."""
        first = min((region.anchor for region in self.regions), default=0)
        return int(self.load[:first].max(initial=0)) == self.memory.peak_bytes


def tiny_residuals(workload: Workload) -> frozenset[str]:
    """Residuals not worth a copy or a region of their own: a layer norm's statistics.

    The rule is relative to the workload, so that it does not change with the budget.
    """
    sizes = {v: workload.values[v].num_bytes for v in workload.residuals}
    limit = sum(sizes.values()) >> TINY_SHIFT
    return frozenset(v for v, size in sizes.items() if size <= limit)


def must_save(workload: Workload) -> frozenset[str]:
    """`Workload.must_save`."""
    return workload.must_save


def _check(
    what: str,
    given: Mapping[str, Any],
    known: set[str],
    allowed: Sequence[str],
    *,
    all_of_them: bool = True,
) -> None:
    """Refuse a field of `Choices` whose keys are not those of the workload, or a value that is
    not allowed."""
    for key, value in given.items():
        if not isinstance(key, str):
            raise PlanError(f"choices.{what} has a {type(key).__name__} as a key: use its name")
        if value not in allowed:
            raise PlanError(f"choices.{what}[{key!r}] is {value!r}: use {', '.join(allowed)}")
    unknown, missing = sorted(given.keys() - known), sorted(known - given.keys())
    if unknown:
        raise PlanError(f"choices.{what} names what the workload does not have: {unknown[:5]}")
    if missing and all_of_them:
        raise PlanError(f"choices.{what} lacks {len(missing)} of {len(known)}: {missing[:5]}")


def settle(
    workload: Workload, actions: Mapping[str, Action], *, keep_tiny: bool = True
) -> dict[str, Action]:
    """Make actions legal: tiny residuals are kept, those that must be saved are not recomputed.

    A residual that was to be recomputed but must be saved is swapped.

    Raises:
        PlanError: a residual of the workload is missing, an unknown one is named, or an action is
            none.
    """
    _check("actions", actions, set(workload.residuals), get_args(Action))
    tiny = tiny_residuals(workload) if keep_tiny else frozenset()
    saved = must_save(workload)
    settled: dict[str, Action] = {}
    for v in workload.residuals:
        action = actions[v]
        if v in tiny:
            action = "keep"
        elif action == "recompute" and v in saved:
            action = "swap"
        settled[v] = action
    return settled


def _residual_plans(
    workload: Workload,
    actions: Mapping[str, Action],
    tiers: Mapping[str, Tier],
    names: Mapping[str, str] | None,
) -> dict[str, ResidualPlan]:
    """Residuals without positions."""
    made: dict[tuple[Action, Tier, str | None], ResidualPlan] = {}  # there are few, and equal ones
    plans: dict[str, ResidualPlan] = {}
    for v in workload.residuals:
        action: Action = actions[v]
        tier: Tier = tiers[v] if action == "swap" else "device"
        region = None
        if action == "recompute":
            block = workload.values[v].block
            region = block if names is None else names.get(v, block)
        key = (action, tier, region)
        if key not in made:
            made[key] = ResidualPlan(action=action, tier=tier, region=region)
        plans[v] = made[key]
    return plans


def _place_residuals(
    workload: Workload, plans: Mapping[str, ResidualPlan], regions: Sequence[Region]
) -> dict[str, ResidualPlan]:
    """Release right after the last forward use, reload right before the first use."""
    reads = region_reads(regions)
    placed = dict(plans)
    for v, decision in plans.items():
        if decision.action == "swap":
            first = workload.first_backward_use(v)
            placed[v] = replace(
                decision,
                release_after=workload.ops[workload.last_forward_use(v)].name,
                prefetch_before=workload.ops[min(first, reads.get(v, first))].name,
            )
    return placed


def _stays(workload: Workload, mode: UnitMode, uses: Sequence[int]) -> list[tuple[int, int]]:
    """(first, last) op of each stay of a unit's copy on the device."""
    if mode == "direct":
        return []
    if mode == "direct-forward":
        uses = [i for i in uses if i >= workload.num_forward_ops]
    if mode == "fetch":
        return unit_runs(workload, uses)
    return [(uses[0], uses[-1])] if uses else []


def _place_units(
    workload: Workload,
    choices: Choices,
    tiers: Mapping[str, Tier],
    copies: Collection[str],
    parked: Collection[str],
    casts: Collection[str],
    schedule: Schedule,
    regions: Sequence[Region],
) -> dict[str, UnitPlan]:
    """Fetch right before each stay, let gradients go right after they are emitted."""
    ops = workload.ops
    uses = unit_uses(workload, regions)
    emits = emit_points(workload, uses)
    plans: dict[str, UnitPlan] = {}
    for unit in workload.units:
        moves = tiers[unit.name] != "device"
        casting = unit.name in casts and may_cast(unit, tiers[unit.name])
        mode = choices.modes.get(unit.name, "fetch") if moves else "fetch"
        writes = moves and unit.trainable and unit.name in choices.direct_gradients
        parks = unit.name in parked and may_park(unit, tiers[unit.name], schedule)
        windows = tuple(
            FetchWindow(fetch_before=ops[a].name, first_use=ops[a].name, last_use=ops[b].name)
            for a, b in _stays(workload, mode, uses[unit.name])
            if moves or casting
        )
        emit = ops[emits[unit.name]].name if unit.trainable else None
        plans[unit.name] = UnitPlan(
            tier=tiers[unit.name],
            windows=windows,
            emit_after=emit,
            release_gradients_after=emit if parks or (moves and not writes) else None,
            access="direct" if moves and mode in ("direct", "direct-forward") else "fetch",
            gradients="direct" if writes else "parked" if parks else "copy",
            copy_tier="host" if unit.name in copies else None,
            casts=casting,
        )
    return plans


def _copies(
    workload: Workload,
    budget: MemoryBudget,
    options: PlannerOptions,
    choices: Choices,
    tiers: Mapping[str, Tier],
    swapped: Mapping[Tier, Collection[int]],
) -> Collection[str]:
    """SSD units whose compute copies are in host memory; `swapped` has residuals' sizes by tier."""
    if options.fixed_copies is not None:
        return options.fixed_copies
    if choices.copies is not None:
        return choices.copies
    if options.copies != "host":
        return ()
    direct = [name for name in choices.direct_gradients if tiers[name] != "device"]
    args = (workload, budget, options, tiers)
    return copies_that_fit(*args, swapped["host"], swapped["ssd"], direct)


def load_of(workload: Workload, program: Program, memory: Residency) -> Load:
    """Largest residency, in bytes, of the instructions around each op."""
    load = np.zeros(len(workload.ops), dtype=np.int64)
    before = {"fetch_unit", "prefetch", "wait_unit", "host_view", "wait", "recompute", "compute"}
    i = 0
    for instruction, size in zip(program.instructions, memory.series, strict=True):
        at = i if instruction.kind in before else i - 1
        load[at] = max(load[at], size)
        i += instruction.kind == "compute"
    return load


_REMEMBERED = 300_000
"""Ops of all that is remembered: what all strategies make of a small workload, and no more than
some 70 MB of a large one."""

_remembered: ContextVar[dict[Hashable, Any] | None] = ContextVar("remembered", default=None)


@contextmanager
def remembered_drafts() -> Iterator[None]:
    """In this context no draft is made twice if it is among the last ones: most strategies end with
    the same few choices where memory is short, and ask for them again with another device budget.
    """
    token = _remembered.set({})
    try:
        yield
    finally:
        _remembered.reset(token)


_T = TypeVar("_T")


def _once(workload: Workload, key: Hashable, make: Callable[[], _T]) -> _T:
    """What is remembered of a workload under a key, or else is made now."""
    kept = _remembered.get()
    if kept is None:
        return make()
    key = id(workload), key
    workload_, found = kept.pop(key, (workload, None))
    if found is None:
        found = make()
    kept[key] = workload_, found  # alive, so that no other one has its id; the last to be forgotten
    if len(kept) * len(workload.ops) > _REMEMBERED:
        del kept[next(iter(kept))]
    return cast("_T", found)


def draft(
    workload: Workload,
    hw: HardwareProfile,
    budget: MemoryBudget,
    options: PlannerOptions,
    choices: Choices,
    strategy: str,
    *,
    keep_tiny: bool = True,
) -> Draft:
    """Complete choices with the shortest windows. The device budget is not checked.

    Raises:
        PlanError: the choices do not match the workload.
        InsufficientMemoryError: the host or SSD budget is too small for these choices.
    """
    units, residuals = set(workload.unit_by_name), set(workload.residuals)
    _check("unit_tiers", choices.unit_tiers, units, TIERS)
    _check("modes", choices.modes, units, get_args(UnitMode), all_of_them=False)
    _check("swap_tiers", choices.swap_tiers or {}, residuals, ("host", "ssd"), all_of_them=False)
    unit_tiers = {**choices.unit_tiers, **(options.fixed_units or {})}
    parked = choices.parked if options.fixed_parked is None else options.fixed_parked
    casts = choices.casts if options.fixed_casts is None else options.fixed_casts
    options = replace(options, fixed_parked=parked)  # host memory has their buffers, too
    actions = settle(workload, choices.actions, keep_tiny=keep_tiny)
    swapped = [v for v, action in actions.items() if action == "swap"]
    tiers = swap_tiers(workload, hw, budget, options, unit_tiers, swapped)
    tiers.update({v: t for v, t in (choices.swap_tiers or {}).items() if v in tiers})
    sizes = {t: [workload.values[v].num_bytes for v in tiers if tiers[v] == t] for t in TIERS}
    copies = _copies(workload, budget, options, choices, unit_tiers, sizes)
    decided = _residual_plans(workload, actions, tiers, choices.regions)
    schedule = options.update_schedule

    def place() -> tuple[Plan, tuple[Region, ...]]:
        plan = Plan(
            strategy=strategy,
            workload=workload.name,
            residuals=decided,
            units={},
            schedule=schedule,
        )
        regions = regions_of(workload, plan)
        residuals = _place_residuals(workload, decided, regions)
        args = (unit_tiers, copies, parked, casts, schedule, regions)
        return replace(
            plan, residuals=residuals, units=_place_units(workload, choices, *args)
        ), regions

    def lowered() -> Draft:
        program = lower(workload, plan, regions)
        memory = residency(program)
        return Draft(
            workload=workload,
            plan=plan,
            regions=regions,
            program=program,
            memory=memory,
            load=load_of(workload, program, memory),
        )

    key = (
        schedule,
        *(tuple(getattr(r, x) for r in decided.values()) for x in ("action", "tier", "region")),
        tuple(unit_tiers[u.name] for u in workload.units),
        tuple(sorted(choices.modes.items())),
        *(frozenset(x) for x in (copies, parked, casts, choices.direct_gradients)),
    )
    plan, regions = _once(workload, ("placed", key), place)
    plan = replace(plan, strategy=strategy)
    check_capacity(workload, plan, budget)
    return replace(_once(workload, ("draft", key), lowered), plan=plan)


def lean_draft(
    workload: Workload,
    hw: HardwareProfile,
    budget: MemoryBudget,
    options: PlannerOptions,
    choices: Choices,
    strategy: str,
    *,
    keep_tiny: bool = True,
) -> Draft:
    """`draft`; where regions are not chosen and blocks are too large for the device, smaller ones.

    Raises: as `draft`.
    """
    args = (workload, hw, budget, options)
    made = draft(*args, choices, strategy, keep_tiny=keep_tiny)
    if choices.regions is not None or made.memory.peak_bytes <= budget.device_bytes:
        return made
    if made.peaks_before_regions:
        return made
    actions = settle(workload, choices.actions, keep_tiny=keep_tiny)
    key = ("regions", tuple(actions.values()))
    names = _once(workload, key, lambda: split_regions(workload, actions))
    if all(name == workload.values[v].block for v, name in names.items()):
        return made
    parted = draft(*args, replace(choices, regions=names), strategy, keep_tiny=keep_tiny)
    return min(made, parted, key=lambda d: d.memory.peak_bytes)


def at_the_peak(memory: Residency) -> tuple[tuple[str, int], ...]:
    """What is on the device at the peak, largest first."""
    static = ("inputs, buffers, device-resident units", memory.static_bytes)
    return tuple(sorted((static, *memory.at_peak), key=lambda item: (-item[1], item[0])))


def device_error(
    made: Draft, budget: MemoryBudget, options: PlannerOptions
) -> InsufficientMemoryError:
    """The error for a plan whose shortest windows exceed the device budget."""
    strategy = made.plan.strategy
    planner = get(strategy) if strategy in names() else None
    own: States = getattr(planner, "states", "auto")
    asked = replace(options, states=own) if options.states == "auto" else options
    advice = device_advice(made.workload, budget, asked, "auto" if own == "auto" else "host")
    if strategy != "pareto" and not _is_least(made, options):
        advice += ", or try strategy='pareto'"
    return InsufficientMemoryError(
        "device",
        made.memory.peak_bytes,
        budget.device_bytes,
        where=f"{made.memory.peak_name}, strategy {strategy!r}",
        at_peak=at_the_peak(made.memory),
        advice=f"{advice}.",
    )


def _is_least(made: Draft, options: PlannerOptions) -> bool:
    """Whether it is plain that no plan takes less of the device: at the peak there is nothing but
    what every plan has there, and what the op itself reads and writes."""
    memory, units = made.memory, made.plan.units
    here = [u for u in made.workload.units if units[u.name].tier == "device"]
    open_casts = options.fixed_casts is None and any(
        may_cast(u, "device") and not units[u.name].casts for u in here
    )
    if here and (options.states != "device" or open_casts):
        return False
    peak = made.program.instructions[memory.peak_index]
    if peak.kind != "compute":
        return False
    needed = {*peak.reads, *dict(peak.births), f"{peak.name} (workspace)", *made.program.pinned}
    return all(name in needed for name, _ in memory.at_peak)


def finish(
    workload: Workload,
    hw: HardwareProfile,
    budget: MemoryBudget,
    options: PlannerOptions,
    choices: Choices,
    strategy: str,
    notes: Sequence[str] = (),
) -> Plan:
    """Turn choices into a complete plan whose exact device peak is within the budget.

    Tiny residuals are kept if that fits, whatever was chosen for them. The result has a
    prediction, and lowers to a program without further decisions.

    Raises:
        PlanError: the choices do not match the workload.
        InsufficientMemoryError: a tier is too small even with the shortest windows.
    """
    made = lean_draft(workload, hw, budget, options, choices, strategy)
    if made.memory.peak_bytes > budget.device_bytes:
        made = lean_draft(workload, hw, budget, options, choices, strategy, keep_tiny=False)
    return finish_draft(made, hw, budget, options, notes)


def finish_draft(
    made: Draft,
    hw: HardwareProfile,
    budget: MemoryBudget,
    options: PlannerOptions,
    notes: Sequence[str] = (),
) -> Plan:
    """`finish` for a draft that exists already.

    Raises:
        InsufficientMemoryError: the draft's peak exceeds the device budget.
        PlanError: a bug: the plan's exact peak is not the one that was planned.
    """
    if made.memory.peak_bytes > budget.device_bytes:
        raise device_error(made, budget, options)
    plan = extend(made.workload, made.plan, made.regions, made.load.copy(), hw, budget)
    program = lower(made.workload, plan)
    memory = residency(program)
    if memory.peak_bytes > budget.device_bytes:
        raise PlanError(
            f"strategy {plan.strategy!r}: windows of workload {plan.workload} reach "
            f"{memory.peak_bytes} B at {memory.peak_name}, over the budget of "
            f"{budget.device_bytes} B: please report this plan as a bug"
        )
    prediction = predict(made.workload, hw, options, plan, program, memory)
    return replace(plan, prediction=prediction, notes=tuple(notes))
