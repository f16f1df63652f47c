"""Keep residuals on the device while the exact peak allows: what LoHan leaves out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import numpy as np

from lohan_fx.plan import Tier
from lohan_fx.planners.schedule import Draft
from lohan_fx.program import Region
from lohan_fx.workload import Workload


def overlap_reserve(workload: Workload, tiers: dict[str, Tier]) -> int:
    """Bytes that must stay free so that copies can overlap with compute.

    One more unit's compute copy and one unit's gradients, of the largest unit that moves.
    """
    moved = [u for u in workload.units if tiers[u.name] != "device"]
    compute = max((u.compute_bytes for u in moved), default=0)
    gradients = max((u.gradient_bytes for u in moved if u.trainable), default=0)
    return compute + gradients


def _region_bytes(
    workload: Workload, region: Region, saved: Collection[str], kept: str = ""
) -> int:
    """Most bytes of a region's own values while it runs, beside what is saved or kept."""
    wanted = {v for v in region.wanted if v not in saved and v != kept}
    needed, ops = set(wanted), []
    for op in (workload.ops[i] for i in reversed(region.ops)):
        if not needed.isdisjoint(op.writes):
            ops.append(op)
            needed.update(v for v in op.reads if v not in saved and v != kept)
    ops.reverse()
    last = {v: k for k, op in enumerate(ops) for v in (*op.reads, *op.writes)}
    alive: dict[str, int] = {}
    now = peak = 0
    for k, op in enumerate(ops):
        for v in op.writes:
            alive[v] = workload.values[v].num_bytes
            now += alive[v]
        peak = max(peak, now + op.scratch_bytes)
        for v in {*op.reads, *op.writes} - wanted:
            if last[v] == k:
                now -= alive.pop(v, 0)
    return peak


def keep_greedily(
    made: Draft, limit_bytes: int, candidates: Iterable[str], worth: Callable[[str], float]
) -> list[str]:
    """Residuals of a draft that can stay on the device, highest `worth` per byte first.

    Equal ones: those made last, as they are needed soonest. What is kept is no longer made by
    its region, which then needs less memory itself. The peak of the new draft may still differ,
    as other regions may read something else then: check it.
    """
    workload, plan = made.workload, made.plan
    load = np.array(made.memory.series, dtype=np.int64)
    place = {(x.kind, x.name): k for k, x in enumerate(made.program.instructions)}
    region_of = {v: region for region in made.regions for v in region.wanted}
    saved = {v for v, r in plan.residuals.items() if r.action != "recompute"}
    saved |= {v.name for v in workload.values.values() if v.is_output}
    inside = {r.name: _region_bytes(workload, r, saved) for r in made.regions}

    def priority(v: str) -> tuple[float, int]:
        size = max(1, workload.values[v].num_bytes)
        return (-worth(v) / size, -workload.producer[v])

    kept = []
    for v in sorted(candidates, key=priority):
        if plan.residuals[v].action == "keep":
            continue
        size, region = workload.values[v].num_bytes, region_of.get(v)
        if region is None:
            span = load[place["release", v] + 1 : place["prefetch", v]]
        else:
            last_use = workload.ops[workload.last_forward_use(v)].name
            span = load[place["compute", last_use] + 1 : place["recompute", region.name]]
        if span.size and int(np.max(span)) + size > limit_bytes:
            continue
        if region is not None:
            less = _region_bytes(workload, region, saved, v)
            at = place["recompute", region.name]
            added = size + less - inside[region.name]
            if added > 0 and int(load[at]) + added > limit_bytes:
                continue
            saved.add(v)
            load[at] += added
            inside[region.name] = less
        span += size
        kept.append(v)
    return kept
