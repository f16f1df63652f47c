"""What repeats in a workload: equal blocks, and where a step can be cut into windows. No torch."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lohan_fx.workload import MODEL_INPUT_KINDS, Workload

MAX_LAYERS = 32
"""A block with more ops that make residuals is cut into segments of at most this many."""

_ALONE_FIRST, _ALONE_LAST, _MIDDLE = 3, 3, 4
"""Segments at both ends get windows of their own: there copies and updates have no time left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive forward ops [first, last] whose residuals are recomputed in one region.

    A segment is a block, or a part of one that is too long. Segments with the same `kind` are
    structurally equal: same ops, sizes and seconds, and the same uses in backward.
    """

    name: str
    kind: int
    first: int
    last: int
    values: tuple[str, ...]


def _block_signatures(workload: Workload) -> dict[str, tuple[object, ...]]:
    """Block → everything that planning sees of its ops, names aside."""
    found: dict[str, list[object]] = defaultdict(list)
    for op in workload.ops:
        writes = tuple(workload.values[v].num_bytes for v in op.writes)
        reads = tuple(workload.values[v].num_bytes for v in op.reads)
        found[op.block].append(
            (op.phase, op.target, op.flops, op.seconds, op.recomputable, reads, writes)
        )
    return {block: tuple(ops) for block, ops in found.items()}


def segments_of(workload: Workload) -> tuple[Segment, ...]:
    """Segments in forward order; blocks without residuals have none."""
    by_block: dict[str, list[str]] = defaultdict(list)
    for v in workload.residuals:
        by_block[workload.values[v].block].append(v)
    signatures = _block_signatures(workload)
    kinds: dict[object, int] = {}
    found = []
    for block, values in by_block.items():
        parts = _parts(workload, values)
        for k, part in enumerate(parts):
            key = (signatures.get(block, block), k)
            found.append(
                Segment(
                    name=block if len(parts) == 1 else f"{block}/{k}",
                    kind=kinds.setdefault(key, len(kinds)),
                    first=workload.producer[part[0]],
                    last=workload.producer[part[-1]],
                    values=part,
                )
            )
    return tuple(sorted(found, key=lambda s: s.first))


def _parts(workload: Workload, values: Sequence[str]) -> list[tuple[str, ...]]:
    """Cut a block's residuals where the fewest bytes cross, into runs of at most MAX_LAYERS ops."""
    layers = sorted({workload.producer[v] for v in values})
    if len(layers) <= MAX_LAYERS:
        return [tuple(values)]
    crossing = _crossing_bytes(workload, layers[0], layers[-1])
    starts = [0]
    while len(layers) - starts[-1] > MAX_LAYERS:
        low, high = starts[-1] + MAX_LAYERS // 2, starts[-1] + MAX_LAYERS
        starts.append(
            min(range(low, high + 1), key=lambda k: (crossing[layers[k] - layers[0]], -k))
        )
    bounds = [layers[s] for s in starts]
    parts: list[list[str]] = [[] for _ in starts]
    for v in values:
        parts[bisect_right(bounds, workload.producer[v]) - 1].append(v)
    return [tuple(part) for part in parts]


def _crossing_bytes(workload: Workload, first: int, last: int) -> list[int]:
    """For each op of [first, last]: bytes made before it that forward ops from it on read."""
    change = [0] * (last - first + 2)
    for name, value in workload.values.items():
        made = workload.producer.get(name)
        if made is None or value.kind in MODEL_INPUT_KINDS or made >= workload.num_forward_ops:
            continue
        end = workload.last_forward_use(name)
        a, b = max(made + 1, first), min(end, last)
        if a <= b:
            change[a - first] += value.num_bytes
            change[b - first + 1] -= value.num_bytes
    total, found = 0, []
    for step in change[:-1]:
        total += step
        found.append(total)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Stretches of the step. Window w has the forward ops from `forward[w]` on, up to the next.

    `backward[w]` is the first backward op that reads a residual of window w alone: in backward,
    windows come in descending order.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]

    def of_op(self, op: int) -> int:
        """Window of a forward op."""
        return max(0, bisect_right(self.forward, op) - 1)

    def __len__(self) -> int:
        return len(self.forward)


def windows_of(workload: Workload, segments: Sequence[Segment]) -> Windows:
    """One window a segment if they are few; else single ones at the ends, four in the middle."""
    starts = [0, *(s.first for s in segments[1:])]
    if len(starts) > _ALONE_FIRST + _ALONE_LAST + _MIDDLE:
        middle = len(starts) - _ALONE_FIRST - _ALONE_LAST
        bounds = [_ALONE_FIRST + round(k * middle / _MIDDLE) for k in range(_MIDDLE)]
        picked = [*range(_ALONE_FIRST), *bounds, *range(len(starts) - _ALONE_LAST, len(starts))]
        starts = [starts[k] for k in picked]
    starts = sorted(set(starts))
    n = workload.num_forward_ops
    residuals = set(workload.residuals)
    backward: list[int] = []
    for a, b in reversed([*pairwise([*starts, n])]):
        uses = [
            workload.first_backward_use(v)
            for i in range(a, b)
            for v in workload.ops[i].writes
            if v in residuals and workload.last_forward_use(v) < b
        ]
        later = backward[-1] if backward else n
        backward.append(max(later, min(uses, default=later)))
    return Windows(forward=tuple(starts), backward=tuple(reversed(backward)))
