"""Keep residuals on the device while the exact peak allows: what LoHan leaves out."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from lohan_fx.plan import Tier
from lohan_fx.planners.schedule import Draft
from lohan_fx.workload import Workload


def overlap_reserve(workload: Workload, tiers: dict[str, Tier]) -> int:
    """Bytes that must stay free so that copies can overlap with compute.

    One more unit's compute copy and one unit's gradients, of the largest unit that moves.
    """
    moved = [u for u in workload.units if tiers[u.name] != "device"]
    compute = max((u.compute_bytes for u in moved), default=0)
    gradients = max((u.gradient_bytes for u in moved if u.trainable), default=0)
    return compute + gradients


def keep_greedily(
    made: Draft, limit_bytes: int, candidates: Iterable[str], worth: Callable[[str], float]
) -> list[str]:
    """Residuals of a draft that can stay on the device, highest `worth` per byte first.

    Equal ones: those made last, as they are needed soonest. The device load is an upper bound
    for residuals whose recompute region changes shape; check the peak of the new draft.
    """
    workload, plan, load = made.workload, made.plan, made.load.copy()
    index = workload.op_index
    anchors = {v: region.anchor for region in made.regions for v in region.wanted}

    def priority(v: str) -> tuple[float, int]:
        size = max(1, workload.values[v].num_bytes)
        return (-worth(v) / size, -workload.producer[v])

    kept = []
    for v in sorted(candidates, key=priority):
        decision = plan.residuals[v]
        if decision.action == "keep":
            continue
        start = workload.last_forward_use(v) + 1
        if decision.prefetch_before is not None:
            stop = index[decision.prefetch_before]
        else:
            stop = anchors[v] + 1
        size = workload.values[v].num_bytes
        span = load[start:stop]
        if span.size and int(np.max(span)) + size > limit_bytes:
            continue
        span += size
        kept.append(v)
    return kept
