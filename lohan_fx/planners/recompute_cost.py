"""FLOPs and seconds of recomputation for a changing set of saved residuals, exact on the DAG."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from lohan_fx.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What Algorithm 1 calls a layer: the residuals that one op makes.

    `flops` and `seconds` are those of the ops between the nearest other residuals and this
    one; an op that several layers need is shared evenly among them, so that the layers'
    FLOPs add up to no more than FLOP_f. `num_bytes` is A_layer.
    """

    name: str
    values: tuple[str, ...]
    num_bytes: int
    flops: float
    seconds: float


def layers_of(workload: Workload, candidates: Iterable[str]) -> tuple[Layer, ...]:
    """Group candidate residuals into layers, in order of creation."""
    groups: dict[int, list[str]] = defaultdict(list)
    for v in candidates:
        groups[workload.producer[v]].append(v)
    have = set(workload.residuals)
    have.update(v.name for v in workload.values.values() if v.is_output)
    segments = {}
    for i, values in groups.items():
        have.difference_update(values)
        segments[i], _ = workload.recompute_ops(values, have)
        have.update(values)
    sharers: dict[int, int] = defaultdict(int)
    for segment in segments.values():
        for k in segment:
            sharers[k] += 1
    return tuple(
        Layer(
            name=workload.ops[i].name,
            values=tuple(values),
            num_bytes=sum(workload.values[v].num_bytes for v in values),
            flops=sum(workload.ops[k].flops / sharers[k] for k in segments[i]),
            seconds=sum(workload.ops[k].seconds / sharers[k] for k in segments[i]),
        )
        for i, values in sorted(groups.items())
    )


class RecomputeCost:
    """FLOP_r of the current set of saved residuals; regions are blocks.

    Each block's cost is cached; saving a residual only re-evaluates the blocks whose regions
    can reach it. Values that other regions have made are not counted as available, so where
    blocks reach into each other the result is an upper bound.
    """

    def __init__(self, workload: Workload, saved: Iterable[str]) -> None:
        self._workload = workload
        self._outputs = {v.name for v in workload.values.values() if v.is_output}
        self._saved = set(saved) | self._outputs
        self._members: dict[str, list[str]] = defaultdict(list)
        for v in workload.residuals:
            self._members[workload.values[v].block].append(v)
        self._cost: dict[str, tuple[int, float]] = {}
        self._reach: dict[str, set[str]] = defaultdict(set)
        for block, members in self._members.items():
            ops = self._evaluate(block)
            for i in ops:
                for v in (*workload.ops[i].reads, *workload.ops[i].writes):
                    self._reach[v].add(block)
            for v in members:
                self._reach[v].add(block)

    def _evaluate(self, block: str) -> tuple[int, ...]:
        wanted = [v for v in self._members[block] if v not in self._saved]
        ops, _ = self._workload.recompute_ops(wanted, self._saved)
        all_ops = self._workload.ops
        self._cost[block] = (
            sum(all_ops[i].flops for i in ops),
            sum(all_ops[i].seconds for i in ops),
        )
        return ops

    def save(self, values: Iterable[str]) -> None:
        """Count residuals as saved from now on."""
        changed = set(values) - self._saved
        self._saved |= changed
        for block in {b for v in changed for b in self._reach[v] if b in self._members}:
            self._evaluate(block)

    @property
    def flops(self) -> int:
        """FLOP_r."""
        return sum(flops for flops, _ in self._cost.values())

    @property
    def seconds(self) -> float:
        """Seconds of all recomputed ops."""
        return sum(seconds for _, seconds in self._cost.values())
