"""When each parameter unit is read, and the fetch windows that follow from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from lohan_fx.program import Region
from lohan_fx.workload import Workload


def unit_uses(workload: Workload, regions: Iterable[Region] = ()) -> dict[str, list[int]]:
    """Unit → ascending indices of the ops that read its parameters.

    What a recompute region reads counts at the op that the region stands before.
    """
    found: dict[str, set[int]] = {unit.name: set() for unit in workload.units}
    of_op = workload.units_read
    for i, units in enumerate(of_op):
        for unit in units:
            found[unit].add(i)
    for region in regions:
        for i in region.ops:
            for unit in of_op[i]:
                found[unit].add(region.anchor)
    return {unit: sorted(uses) for unit, uses in found.items()}


def _adjacent(workload: Workload, last: int, first: int) -> bool:
    """Whether only ops of the two uses' own blocks lie between them, in one phase."""
    ops = workload.ops
    if ops[last].phase != ops[first].phase:
        return False
    own = {ops[last].block, ops[first].block}
    return all(ops[i].block in own for i in range(last + 1, first))


def unit_runs(workload: Workload, uses: Sequence[int]) -> list[tuple[int, int]]:
    """(first, last) op of each stay on the device that a unit with these uses needs.

    A run ends with its phase, and where ops of blocks that do not use the unit come between:
    a tied embedding, read by the first and the last block, has a run for each.
    """
    runs: list[tuple[int, int]] = []
    for use in uses:
        if runs and _adjacent(workload, runs[-1][1], use):
            runs[-1] = (runs[-1][0], use)
        else:
            runs.append((use, use))
    return runs


def num_fetches(workload: Workload, regions: Iterable[Region] = ()) -> dict[str, tuple[int, int]]:
    """Unit → how many runs it has in forward and in backward."""
    n = workload.num_forward_ops
    found = {}
    for unit, uses in unit_uses(workload, regions).items():
        firsts = [first for first, _ in unit_runs(workload, uses)]
        forward = sum(first < n for first in firsts)
        found[unit] = (forward, len(firsts) - forward)
    return found


def emit_points(workload: Workload, uses: dict[str, list[int]]) -> dict[str, int]:
    """Trainable unit → op after which its gradients exist and nothing reads its parameters."""
    found = {}
    for unit in workload.units:
        if unit.trainable:
            made = [workload.producer[g] for g in unit.gradients]
            found[unit.name] = max([*made, *uses[unit.name], workload.num_forward_ops])
    return found


def region_reads(regions: Iterable[Region]) -> dict[str, int]:
    """Value → the first op before which a recompute region that reads it stands."""
    found: dict[str, int] = {}
    for region in regions:
        for v in region.reads:
            found[v] = min(found.get(v, region.anchor), region.anchor)
    return found


def anchored_seconds(workload: Workload, regions: Iterable[Region]) -> dict[int, float]:
    """Op index → seconds of the regions that stand before it."""
    found: dict[int, float] = defaultdict(float)
    for region in regions:
        found[region.anchor] += sum(workload.ops[i].seconds for i in region.ops)
    return found
