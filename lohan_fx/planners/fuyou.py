"""fuyou: automatic activation scheduling over SSDs, with the optimizer beside backward.

Source: papers/fuyou.txt §4.5. From D_start, one checkpoint a transformer block, layers are added
to the swap set by swap benefit factor, SBF = FLOP / swap time (Eq. 12), through two queues: the
high-priority one has the layers like Linear_4htoh (Table 2), the other one the rest. Of all
prefixes with D_start ≤ D_f ≤ D_max (Eq. 9–11), the one with the least T_iter (Eq. 1–8) wins.
States on SSD; swapped bytes in host memory while it has room (§4.4); updates overlap with
backward, and the write-back of a unit with the update of the next (§4.3): schedule "optimized".

Eq. 1–8 are LoHan's with two differences: the CPU optimizer's time T_o^comp counts (Eq. 5), and
all of D_f crosses the SSDs (Eq. 4 and 7), host memory or not.

Not as in the paper:
  - Table 2's queue is one layer type by name. Here a layer is in it if its SBF exceeds that of
    all layers together; for the four linear layers of a transformer block (SBF 1, 1, 1, 4), that
    is Linear_4htoh. On the joint graph its output is often no residual (only the sum with the
    shortcut is, the checkpoint itself); the queue then has what else costs more than the average.
  - D_max is met by whole layers: the last one that stays within it.
  - If recomputation needs more device memory than there is, everything is swapped; the paper
    starts at D_start and assumes that this fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lohan_fx.cost_model import CostOptions, IterationTime, iteration_time, unit_demand
from lohan_fx.errors import format_bytes
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import Action
from lohan_fx.planners.prefix import affordable_prefix
from lohan_fx.planners.recompute_cost import Layer, layers_of
from lohan_fx.planners.registry import register
from lohan_fx.planners.schedule import must_save, tiny_residuals
from lohan_fx.planners.strategy import Activations, Setting, Strategy
from lohan_fx.planners.tiers import has_ssd
from lohan_fx.planners.windows import num_fetches
from lohan_fx.workload import Workload

EQUATIONS = replace(CostOptions.paper(), cpu_optimizer=True)
"""Eq. 1–8: LoHan's equations and the CPU optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The first `count` layers of the order swapped: D_f bytes, and T_iter."""

    count: int
    swapped_bytes: int
    time: IterationTime


@dataclass(frozen=True, kw_only=True)
class SwapScale:
    """All points of the search from D_start on, and D_max."""

    points: tuple[Point, ...]
    max_bytes: int

    @property
    def best(self) -> Point:
        """The least T_iter within D_max (Eq. 11), with the fewest bytes."""
        start = self.points[0]
        allowed = [p for p in self.points if p.swapped_bytes <= self.max_bytes] or [start]
        least = min(p.time.step_s for p in allowed) * (1 + 1e-12)
        return next(p for p in allowed if p.time.step_s <= least)


def by_priority(layers: Iterable[Layer]) -> list[Layer]:
    """The high-priority queue, then the other; each in order of creation."""
    layers = [layer for layer in layers if layer.num_bytes]
    total_bytes = sum(layer.num_bytes for layer in layers)
    total_flops = math.fsum(layer.flops for layer in layers)

    def low(layer: Layer) -> bool:
        return layer.flops * total_bytes <= total_flops * layer.num_bytes * (1 + 1e-9)

    return sorted(layers, key=low)


def swap_scale(setting: Setting, start: Sequence[str], order: Sequence[Layer]) -> SwapScale:
    """T_iter for every number of swapped layers beyond D_start, by Eq. 1–8."""
    w, hw = setting.workload, setting.hw
    demand = unit_demand(w, setting.tiers, num_fetches(w))
    ssd = has_ssd(hw, setting.budget) and setting.options.swap_to != "host"
    swapped = setting.num_bytes(start)
    flops = math.fsum(layer.flops for layer in order)
    points: list[Point] = []
    for count in range(len(order) + 1):
        if count:
            swapped += order[count - 1].num_bytes
            flops -= order[count - 1].flops
        filled = demand.with_activations(
            recompute_flops=max(0, round(flops)),
            recompute_s=0.0,
            swapped_bytes=swapped,
            available_bytes=0 if ssd else swapped,
        )
        time = iteration_time(hw, filled, EQUATIONS, setting.options.update_schedule)
        points.append(Point(count=count, swapped_bytes=swapped, time=time))
    return SwapScale(points=tuple(points), max_bytes=max_swap_bytes(hw, points[0].time, ssd=ssd))


def max_swap_bytes(hw: HardwareProfile, start: IterationTime, *, ssd: bool) -> int:
    """D_max (Eq. 9 and 10): the time by which the GPU binds backward, in bytes."""
    terms = start.backward_terms
    links = max(terms["g2m"], terms["m2g"], terms["ssd"])
    rates = [min(hw.h2d_bytes_per_s, hw.d2h_bytes_per_s)]
    if ssd:
        rates += [hw.ssd_write_bytes_per_s, hw.ssd_read_bytes_per_s]
    return int(max(0.0, terms["gpu"] - links) * min(rates))


def _actions(workload: Workload, swapped: set[str], kept: frozenset[str]) -> dict[str, Action]:
    return {
        v: "keep" if v in kept else "swap" if v in swapped else "recompute"
        for v in workload.residuals
    }


def schedule_activations(setting: Setting) -> Activations:
    """The activation policy.

    Raises:
        InsufficientMemoryError: neither the chosen amount nor swapping everything fits.
    """
    w = setting.workload
    tiny = tiny_residuals(w)
    saved = (w.inter_block | must_save(w)) - tiny
    start = [v for v in w.residuals if v in saved]
    rest = [v for v in w.residuals if v not in start and v not in tiny]
    order = by_priority(layers_of(w, rest))
    values = [v for layer in order for v in layer.values]
    affordable = set(affordable_prefix(setting, [*start, *values]))
    order = [layer for layer in order if affordable.issuperset(layer.values)]
    scale = swap_scale(setting, start, order)
    best = scale.best
    swapped = {*start, *(v for layer in order[: best.count] for v in layer.values)}
    note = (
        f"Fuyou's search for what to swap took {best.count} of {len(order)} layers beside block "
        f"inputs ({format_bytes(scale.points[0].swapped_bytes)}, D_start): "
        f"{format_bytes(best.swapped_bytes)} (D_f) of at most {format_bytes(scale.max_bytes)} "
        f"(D_max); binding by its cost model: {best.time.binding}"
    )
    found = Activations(actions=_actions(w, swapped, tiny), notes=(note,))
    if setting.fits(setting.draft(found)):
        return found
    swap_all: dict[str, Action] = dict.fromkeys(w.residuals, "swap")
    return Activations(
        actions=swap_all, notes=(note, "everything is swapped: recomputation does not fit")
    )


FUYOU = register("fuyou")(Strategy(name="fuyou", activations=schedule_activations, states="ssd"))
