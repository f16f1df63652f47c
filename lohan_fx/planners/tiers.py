"""Which tier units and swapped residuals live in, within the host and SSD budgets."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from lohan_fx.errors import InsufficientMemoryError, PlanError, format_bytes, format_need
from lohan_fx.footprint import (
    align,
    has_own_buffer,
    host_breakdown,
    host_bytes_needed,
    host_copies,
    may_cast,
    may_park,
    own_buffers,
    ssd_bytes_needed,
    tiers_of,
    unit_bytes,
)
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import WHOLE, Plan, Tier
from lohan_fx.planners.on_ssd import STRATEGY, budget_with_ssds, more_than
from lohan_fx.planners.registry import PlannerOptions
from lohan_fx.workload import Workload

QUICK_OPS = 1_500
"""Every strategy plans a workload of so many ops in seconds (`effort`)."""


def has_ssd(hw: HardwareProfile, budget: MemoryBudget) -> bool:
    """Whether a plan may use the SSD tier."""
    return bool(hw.ssds) and budget.ssd_bytes > 0


def check_ssds(hw: HardwareProfile, options: PlannerOptions) -> None:
    """Raise PlanError if the options ask for the SSD tier, and there are no SSDs."""
    for name in ("states", "swap_to"):
        if getattr(options, name) == "ssd":
            _need_ssd(hw, f"{name}='ssd'")
    if "ssd" in (options.fixed_units or {}).values():
        _need_ssd(hw, "fixed_units")


def _need_ssd(hw: HardwareProfile, what: str) -> None:
    if not hw.ssds:
        raise PlanError(f"{what} asks for the ssd tier, but hardware profile {hw.name} has no SSDs")


def unit_tiers(
    workload: Workload,
    hw: HardwareProfile,
    budget: MemoryBudget,
    options: PlannerOptions,
    *,
    auto: Tier = "host",
    swap_bytes: int = 0,
) -> dict[str, Tier]:
    """Tier of every unit, by `options.fixed_units`, `options.states`, or the strategy's `auto`.

    "host" as `auto` means host memory as long as it has room, then SSD. Units take host memory
    before swapped residuals do (a byte of state crosses the SSD link at least twice a step, a
    byte of activation exactly twice); only if residuals can go nowhere else are their
    `swap_bytes` set aside first. Units used first get host memory first: their updates come
    last and are the ones that no backward hides.

    Raises:
        PlanError: the SSD tier is asked for, but there are no SSDs; an unknown fixed unit.
    """
    fixed = dict(options.fixed_units or {})
    unknown = set(fixed) - set(workload.unit_by_name)
    if unknown:
        raise PlanError(f"fixed_units names unknown units {sorted(unknown)[:5]}")
    if options.states == "ssd" or "ssd" in fixed.values():
        _need_ssd(hw, "states='ssd'")
    tier: Tier = auto if options.states == "auto" else options.states
    tiers: dict[str, Tier] = {u.name: fixed.get(u.name, tier) for u in workload.units}
    if tier != "host" or options.states == "host" or not has_ssd(hw, budget):
        return tiers
    return _fill_host(workload, budget, options, tiers, set(tiers) - set(fixed), swap_bytes)


def _fill_host(
    workload: Workload,
    budget: MemoryBudget,
    options: PlannerOptions,
    tiers: dict[str, Tier],
    free: Collection[str],
    swap_bytes: int,
) -> dict[str, Tier]:
    """Keep what fits in host memory there, and move the other free units to SSD.

    Residuals that find no room beside the units go to SSD through staging buffers, which are in
    host memory, too: those are set aside, unless SSD is too small for the units that have to go.
    """
    largest = max((workload.values[v].num_bytes for v in workload.residuals), default=0)

    def need(trial: Mapping[str, Tier], host: Sequence[int], ssd: Sequence[int]) -> int:
        own = _parked(workload, options, trial)
        parts = host_breakdown(workload.units, trial, options.update_schedule, host, ssd, own)
        return sum(parts.values())

    def fits(trial: Mapping[str, Tier], *, staged: bool) -> bool:
        if options.swap_to == "host" or (options.swap_to == "auto" and swap_bytes):
            if need(trial, [swap_bytes], []) <= budget.host_bytes:
                return True
            if options.swap_to == "host":
                return False
        return need(trial, [], [largest] if staged and swap_bytes else []) <= budget.host_bytes

    def filled(*, staged: bool) -> dict[str, Tier]:
        if fits(tiers, staged=staged):
            return tiers
        found = {name: "ssd" if name in free else tier for name, tier in tiers.items()}
        # an SSD unit is updated through three buffers of its size: the largest may need less
        # host memory if they stay there
        few = dict(found)
        for unit in sorted(workload.units, key=lambda u: -unit_bytes(u)):
            if fits(few, staged=staged):
                found = few
                break
            if unit.name in free:
                few[unit.name] = "host"
        for unit in workload.units:
            if unit.name in free and fits({**found, unit.name: "host"}, staged=staged):
                found[unit.name] = "host"
        return found

    found = filled(staged=True)
    on_ssd = sum(unit_bytes(u) for u in workload.units if found[u.name] == "ssd")
    return found if on_ssd <= budget.ssd_bytes else filled(staged=False)


def _parked(
    workload: Workload, options: PlannerOptions, tiers: Mapping[str, Tier]
) -> frozenset[str]:
    """The units in `options.fixed_parked` whose gradients host memory has buffers for."""
    units, schedule = workload.unit_by_name, options.update_schedule
    wanted = set(options.fixed_parked or ()) & units.keys()
    return frozenset(name for name in wanted if may_park(units[name], tiers[name], schedule))


def host_room(
    workload: Workload,
    budget: MemoryBudget,
    options: PlannerOptions,
    tiers: Mapping[str, Tier],
    ssd_residuals: Collection[int] = (),
) -> int:
    """MEM_avail (LoHan Eq. 3): host bytes left for activations after what the runtime needs."""
    own = _parked(workload, options, tiers)
    need = host_breakdown(workload.units, tiers, options.update_schedule, (), ssd_residuals, own)
    return max(0, budget.host_bytes - sum(need.values()))


def swap_tiers(
    workload: Workload,
    hw: HardwareProfile,
    budget: MemoryBudget,
    options: PlannerOptions,
    tiers: Mapping[str, Tier],
    swapped: Collection[str],
) -> dict[str, Tier]:
    """Tier of every swapped residual.

    Host memory first. If it is too small, the residuals that backward uses soonest get it:
    those made last. SSD gets the ones that have the longest time to be written and read.

    Raises:
        PlanError: `swap_to` is "ssd", but there are no SSDs.
    """
    if options.swap_to == "ssd" and swapped:
        _need_ssd(hw, "swap_to='ssd'")
        return dict.fromkeys(swapped, "ssd")
    sizes = {v: align(workload.values[v].num_bytes) for v in swapped}
    room = host_room(workload, budget, options, tiers)
    only_host = options.swap_to == "host" or not has_ssd(hw, budget)
    if only_host or sum(sizes.values()) <= room:
        return dict.fromkeys(swapped, "host")
    room = host_room(workload, budget, options, tiers, tuple(sizes.values()))
    found: dict[str, Tier] = {}
    for v in sorted(swapped, key=lambda v: (workload.first_backward_use(v), v)):
        found[v] = "host" if sizes[v] <= room else "ssd"
        room -= sizes[v] if found[v] == "host" else 0
    return found


def copies_that_fit(
    workload: Workload,
    budget: MemoryBudget,
    options: PlannerOptions,
    tiers: Mapping[str, Tier],
    host_residuals: Collection[int] = (),
    ssd_residuals: Collection[int] = (),
    direct: Collection[str] = (),
) -> frozenset[str]:
    """SSD units whose compute copies host memory has room for beside everything else.

    A byte of a copy there saves three bytes of SSD traffic a step, whichever unit it is of: two
    reads in forward and backward, and a write. So units used first come first: nothing hides
    their fetches.
    """
    own = [*direct, *_parked(workload, options, tiers)]
    rest = (options.update_schedule, host_residuals, ssd_residuals, own)

    def room(copies: Collection[str]) -> int:
        need = host_breakdown(workload.units, tiers, *rest, copies)
        return budget.host_bytes - sum(need.values())

    units = [u for u in workload.units if tiers[u.name] == "ssd" and u.has_separate_copy]
    everyone = frozenset(u.name for u in units)
    if not units or room(everyone) >= 0:  # buffers are smaller then: it may fit though some do not
        return everyone
    left = room(())
    found = set()
    for unit in units:
        size = align(unit.compute_bytes)
        if size <= left:
            found.add(unit.name)
            left -= size
    return frozenset(found)


def sure_copies(
    workload: Workload, budget: MemoryBudget, options: PlannerOptions, tiers: Mapping[str, Tier]
) -> frozenset[str]:
    """SSD units whose copies will be in host memory whatever is swapped."""
    if options.fixed_copies is not None:
        return frozenset(options.fixed_copies)
    if options.copies != "host" or options.swap_to != "ssd":
        return frozenset()
    sizes = [workload.values[v].num_bytes for v in workload.residuals]
    return copies_that_fit(workload, budget, options, tiers, (), sizes)


def check_capacity(workload: Workload, plan: Plan, budget: MemoryBudget) -> None:
    """Raise `InsufficientMemoryError` if the plan needs more host or SSD memory than there is."""
    needs: tuple[tuple[Tier, dict[str, int], int], ...] = (
        ("host", host_bytes_needed(workload, plan), budget.host_bytes),
        ("ssd", ssd_bytes_needed(workload, plan), budget.ssd_bytes),
    )
    lacking = [(tier, need, have) for tier, need, have in needs if sum(need.values()) > have]
    if not lacking:
        return
    tier, need, have = lacking[0]
    advice = _SSD_ADVICE if tier == "ssd" else host_advice(workload, plan, budget)
    for other, more, there in lacking[1:]:
        advice += (
            f" Not enough {other} memory either: need {format_need(sum(more.values()))}, have "
            f"{format_bytes(there)}."
        )
    parts = sorted(need.items(), key=lambda item: (-item[1], item[0]))
    raise InsufficientMemoryError(
        tier,
        sum(need.values()),
        have,
        where=f"the whole step, strategy {plan.strategy!r}",
        at_peak=[(name, size) for name, size in parts if size],
        advice=advice,
    )


def check_states_fit(
    workload: Workload, hw: HardwareProfile, budget: MemoryBudget, options: PlannerOptions
) -> None:
    """Refuse what no strategy can plan, before one takes its time to find that out. Small workloads
    are left to it: it is quick, and says exactly what it needs.

    Raises:
        InsufficientMemoryError: all tiers where units may be are too small for them, together.
    """
    if len(workload.ops) <= QUICK_OPS or options.fixed_units:
        return
    if "ssd" in (options.states, options.swap_to) and not hw.ssds:
        return  # that is what is wrong first
    ssd = has_ssd(hw, budget)
    tiers: tuple[Tier, ...] = ("device", "host", "ssd") if ssd else ("device", "host")
    if options.states != "auto":
        tiers = (options.states,)
    have = {tier: getattr(budget, f"{tier}_bytes") for tier in tiers}
    apart = options.states == "ssd"  # compute copies may be in host memory then
    casts = "device" in tiers  # without them
    need = sum(
        u.state_bytes
        + (
            0
            if (apart and u.has_separate_copy) or (casts and may_cast(u, "device"))
            else u.compute_bytes
        )
        for u in workload.units
    )
    lacks = need - sum(have.values())
    if lacks <= 0:
        return
    last, others = tiers[-1], " and ".join(tiers[:-1])
    more = f"more {last} memory" if last != "ssd" else "more space on SSDs"
    if options.states != "auto":
        more += ", or let states be elsewhere, too (states='auto')"
    elif not ssd:
        more += ", or an SSD"
    where = "the model's states" + (f", of which {others} memory is full" if others else "")
    at_peak = [("states of all units" + (", compute copies" if not apart else ""), need)]
    least = have[last] + lacks
    names = last == "ssd" and options.explain
    way = budget_with_ssds(workload, hw, budget, options) if names else None
    if way is None:
        advice = f"Give the plan {more}: no batch is small enough, and no strategy takes less. "
        advice += "For states alone: what else a step needs is not counted."
        raise InsufficientMemoryError(
            last, least, have[last], where=where, at_peak=at_peak, advice=advice
        )
    units = sum(map(unit_bytes, workload.units))
    parts = {"states and copies of all units": units, "activations": way.ssd_bytes - units}
    raise InsufficientMemoryError(
        last,
        way.ssd_bytes,
        have[last],
        where=f"the whole step, strategy {STRATEGY!r}",
        at_peak=[(what, size) for what, size in parts.items() if size],
        advice=f"With {more_than(budget, way)} there is a plan. No strategy does with less than "
        f"{format_need(least)} of SSDs ({where}), and no batch is small enough.",
    )


_SSD_ADVICE = "Give the plan a larger SSD, or let states or activations stay in host memory."


def host_advice(workload: Workload, plan: Plan, budget: MemoryBudget) -> str:
    """What makes a plan take less host memory than it does, with this budget of SSDs."""
    need = host_bytes_needed(workload, plan)
    total = sum(need.values())
    ways = ["more host memory"]
    if need["units"] or need["spares"]:
        ways += _states_on_ssd(workload, plan, budget, total)
    if need["residuals"]:
        if _moved(workload, plan, tiers_of(plan), residuals=True) < total:
            ways.append("an SSD for activations (swap_to='ssd')")
        ways += ["a smaller batch", "a strategy that recomputes"]
    found = f"Give the plan {' or '.join(ways)}."
    in_turn = sum(host_bytes_needed(workload, replace(plan, schedule="serial")).values())
    if in_turn < total:
        found += f" With schedule='serial' it needs {format_need(in_turn)}, and more time."
    own = own_buffers(plan)
    waiting = [
        unit
        for unit in workload.units
        if plan.units[unit.name].tier == "ssd" and has_own_buffer(unit, "ssd", plan.schedule, own)
    ]
    if waiting and plan.schedule in WHOLE:
        found += (
            " Gradients wait in host memory for optimizer.step(): with accumulate='manual' they "
            "are added to sums beside the states, on the SSD."
        )
    return found


def device_advice(
    workload: Workload, budget: MemoryBudget, options: PlannerOptions, elsewhere: str = "auto"
) -> str:
    """What makes a step take less of the device, or what else there is to give; no full stop.

    Args:
        elsewhere: the value of states= that lets states be in other tiers.
    """
    ways = ["more device memory"]
    fixed = options.fixed_units or {}
    tiers = (fixed.get(u.name, options.states) for u in workload.units)
    here = [u for u, tier in zip(workload.units, tiers, strict=True) if tier == "device"]
    states = sum(u.state_bytes for u in here) if options.states == "device" else 0
    if states < budget.device_bytes:  # else no batch is small enough
        ways.append("a smaller batch")
    advice = f"Give the plan {' or '.join(ways)}"
    if options.states == "device":
        advice += f", or let states be elsewhere, too (states={elsewhere!r})"
    return advice


def _states_on_ssd(workload: Workload, plan: Plan, budget: MemoryBudget, limit: int) -> list[str]:
    """The advice to have all states on SSD, if that takes less host memory than the limit; with how
    much it takes, where the budget has less."""
    need = _moved(workload, plan, dict.fromkeys(plan.units, "ssd"))
    if need >= limit:
        return []
    states = sum(unit_bytes(unit) for unit in workload.units)
    size = f" of {format_need(states)}" if 0 < budget.ssd_bytes < states else ""
    what = "states='ssd'"
    if need > budget.host_bytes:
        what += f", which needs {format_need(need)} of host memory"
    return [f"an SSD{size} for states ({what})"]


def _moved(
    workload: Workload, plan: Plan, tiers: Mapping[str, Tier], *, residuals: bool = False
) -> int:
    """Host bytes of a plan with its units in other tiers, or with what it swaps (`residuals`) on
    SSD."""
    sizes: dict[str, list[int]] = {"host": [], "ssd": []}
    for v, r in plan.residuals.items():
        if r.action == "swap":
            sizes["ssd" if residuals else r.tier].append(workload.values[v].num_bytes)
    own = own_buffers(plan) if residuals else ()
    copies = host_copies(plan) if residuals else ()
    rest = (plan.schedule, sizes["host"], sizes["ssd"], own, copies)
    return sum(host_breakdown(workload.units, tiers, *rest).values())
