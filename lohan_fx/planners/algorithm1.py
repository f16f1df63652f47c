"""LoHan's Algorithm 1: how much to swap, on an exact recompute cost."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from lohan_fx.cost_model import Demand, IterationTime, iteration_time, unit_demand
from lohan_fx.errors import format_bytes
from lohan_fx.footprint import align, may_cast, unit_bytes
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import Tier
from lohan_fx.planners.recompute_cost import Layer, RecomputeCost, layers_of
from lohan_fx.planners.registry import PlannerOptions
from lohan_fx.planners.schedule import must_save
from lohan_fx.planners.tiers import has_ssd, host_room, sure_copies
from lohan_fx.planners.windows import num_fetches
from lohan_fx.workload import Workload


@dataclass(frozen=True, kw_only=True)
class SwapSearch:
    """The result of Algorithm 1.

    `points` are (A_G2M bytes, T_iter seconds) for every prefix of the order that was tried,
    from A_interBlock on; `case` is the paper's case 1, 2 or 3.
    """

    swapped: frozenset[str]
    layers: tuple[Layer, ...]
    points: tuple[tuple[int, float], ...]
    time: IterationTime
    case: int
    note: str


@dataclass(frozen=True, kw_only=True)
class SwapRoom:
    """Where swapped bytes go: up to `host` in host memory (MEM_avail), up to `total` at all."""

    host: int
    total: int


def swap_room(
    workload: Workload,
    hw: HardwareProfile,
    budget: MemoryBudget,
    options: PlannerOptions,
    tiers: Mapping[str, Tier],
) -> SwapRoom:
    """Bytes that units leave to swapped residuals in host memory and on SSD."""
    sizes = tuple(workload.values[v].num_bytes for v in workload.residuals)
    room = host_room(workload, budget, options, tiers)
    if options.swap_to == "host" or not has_ssd(hw, budget):
        return SwapRoom(host=room, total=room)
    on_ssd = sum(unit_bytes(u) for u in workload.units if tiers[u.name] == "ssd")
    ssd = max(0, budget.ssd_bytes - on_ssd)
    if options.swap_to == "ssd":
        return SwapRoom(host=0, total=ssd)
    if sum(sizes) > room:
        room = host_room(workload, budget, options, tiers, sizes)
    return SwapRoom(host=room, total=room + ssd)


def offloading_benefit(layer: Layer, options: PlannerOptions) -> float:
    """OB = FLOP_layer / A_layer (Eq. 6); with the roofline extension, seconds / A_layer."""
    work = layer.seconds if options.cost.roofline else layer.flops
    return work / layer.num_bytes if layer.num_bytes else math.inf


def by_benefit(layers: Iterable[Layer], options: PlannerOptions) -> list[Layer]:
    """Layers with the highest offloading benefit first; equal ones in order of creation."""
    return sorted(layers, key=lambda layer: -offloading_benefit(layer, options))


def _exact(
    workload: Workload, saved: Collection[str], order: Iterable[Layer]
) -> Iterable[tuple[int, float]]:
    """(FLOP_r, seconds) after each prefix, starting with the empty one; exact on the DAG."""
    cost = RecomputeCost(workload, saved)
    yield cost.flops, cost.seconds
    for layer in order:
        cost.save(layer.values)
        yield cost.flops, cost.seconds


def _additive(order: Collection[Layer]) -> Iterable[tuple[int, float]]:
    """FLOP_r by Eq. 7: what all layers cost, less those that are swapped."""
    flops = sum(layer.flops for layer in order)
    seconds = sum(layer.seconds for layer in order)
    yield round(flops), seconds
    for layer in order:
        flops -= layer.flops
        seconds -= layer.seconds
        yield max(0, round(flops)), max(0.0, seconds)


def search(
    workload: Workload,
    hw: HardwareProfile,
    budget: MemoryBudget,
    options: PlannerOptions,
    tiers: Mapping[str, Tier],
    kept: Collection[str] = (),
    *,
    literal: bool = False,
) -> SwapSearch:
    """Algorithm 1 over the residuals that are not `kept` on the device.

    All inter-block residuals are swapped (A_interBlock), and what no region can make again.
    Then layers are added by descending offloading benefit, until T_iter stops falling.
    T_iter is convex in A_G2M under the paper's assumptions, so the first turn is the minimum.
    On a DAG a layer may pay off only together with the next one; so, unless `literal`, the
    search goes through the whole order and takes the least T_iter, with the fewest bytes. A
    layer that exceeds what host memory and SSD can hold is passed over.
    """
    base = (workload.inter_block | must_save(workload)) - set(kept)
    rest = [v for v in workload.residuals if v not in base and v not in kept]
    room = swap_room(workload, hw, budget, options, tiers)
    swapped_bytes = sum(workload.values[v].num_bytes for v in base)
    order = by_benefit(layers_of(workload, rest), options)
    order = _that_fit(workload, order, room.total - _slot_bytes(workload, base))
    copies = sure_copies(workload, budget, options, tiers)
    fixed = options.fixed_casts or ()
    casts = [u.name for u in workload.units if u.name in fixed and may_cast(u, tiers[u.name])]
    demand = unit_demand(workload, tiers, num_fetches(workload), copies, casts)
    costs = _additive(order) if literal else _exact(workload, {*base, *kept}, order)
    times: list[IterationTime] = []
    points: list[tuple[int, float]] = []
    for (flops, seconds), layer in zip(costs, [None, *order], strict=True):
        swapped_bytes += layer.num_bytes if layer else 0
        time = _time(hw, options, demand, room, flops, seconds, swapped_bytes)
        if literal and points and time.step_s >= min(t for _, t in points):
            points.append((swapped_bytes, time.step_s))
            break
        times.append(time)
        points.append((swapped_bytes, time.step_s))
    best = _first_least([time.step_s for time in times])
    case = 1 if best == 0 else 2 if best == len(order) else 3
    chosen = order[:best]
    return SwapSearch(
        swapped=base | {v for layer in chosen for v in layer.values},
        layers=tuple(order),
        points=tuple(points),
        time=times[best],
        case=case,
        note=f"LoHan's search for what to swap (Algorithm 1, case {case}) took {best} of "
        f"{len(order)} layers beside block inputs, {format_bytes(points[best][0])} in all "
        f"(binding by its cost model: {times[best].binding})",
    )


def _slot_bytes(workload: Workload, values: Iterable[str]) -> int:
    return sum(align(workload.values[v].num_bytes) for v in values)


def _that_fit(workload: Workload, order: Iterable[Layer], room: int) -> list[Layer]:
    found = []
    for layer in order:
        size = _slot_bytes(workload, layer.values)
        if size <= room:
            found.append(layer)
            room -= size
    return found


def overflow(workload: Workload, room: SwapRoom, values: Collection[str]) -> frozenset[str]:
    """Those of `values` that no tier below the device has room for.

    They are the ones that backward uses soonest, whose stay on the device is shortest.
    """
    left, found = room.total, set()
    for v in sorted(values, key=lambda v: (-workload.first_backward_use(v), v)):
        size = align(workload.values[v].num_bytes)
        if size > left:
            found.add(v)
        else:
            left -= size
    return frozenset(found)


def _first_least(times: Collection[float]) -> int:
    limit = min(times) * (1 + 1e-12)
    return next(k for k, time in enumerate(times) if time <= limit)


def _time(
    hw: HardwareProfile,
    options: PlannerOptions,
    demand: Demand,
    room: SwapRoom,
    flops: int,
    seconds: float,
    swapped_bytes: int,
) -> IterationTime:
    filled = demand.with_activations(
        recompute_flops=flops,
        recompute_s=seconds,
        swapped_bytes=swapped_bytes,
        available_bytes=room.host if room.host < room.total else swapped_bytes,
    )
    return iteration_time(hw, filled, options.cost, options.update_schedule)
