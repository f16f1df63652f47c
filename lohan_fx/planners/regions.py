"""Recompute regions smaller than a block, where they cost next to nothing. No torch.

A region makes all its members at once, before the first backward op that reads one of them; a
block as one region therefore holds the activations of the whole block. Residuals that are saved
cut a block: what is computed from the input of the feed-forward part need not be there
while the attention part is differentiated, and the other way round. `LateRegions` are for
workloads that are small enough to try which residuals share one, across blocks too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from lohan_fx.plan import Action
from lohan_fx.workload import Workload

TWICE = 0.01
"""An op may run in two regions if it takes no more than this share of its block's forward."""

MAX_PARTS = 256
"""A block with more recomputed residuals than this stays whole."""


def split_regions(workload: Workload, actions: Mapping[str, Action]) -> dict[str, str]:
    """Recomputed residual → name of its region: as many regions as cost (almost) nothing.

    Two residuals of a block share a region if making them runs a common op that is worth
    `TWICE` its block's forward; only cheaper ones (norms, sums) run again in each region that
    needs them. A block that stays whole keeps its name.
    """
    n = workload.num_forward_ops
    ops = workload.ops
    block_s: dict[str, float] = defaultdict(float)
    for op in ops[:n]:
        block_s[op.block] += op.seconds
    have = {v for v, action in actions.items() if action != "recompute"}
    have |= {v.name for v in workload.values.values() if v.is_output}
    parts: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for v in workload.residuals:
        if actions[v] == "recompute":
            made = workload.producer[v]
            parts[ops[made].block][made].append(v)
    names: dict[str, str] = {}
    for block, members in parts.items():
        limit = TWICE * block_s[block]
        root = _joined(workload, members, have, limit) if len(members) <= MAX_PARTS else {}
        whole = len(set(root.values())) <= 1
        for made, values in members.items():
            name = block if whole else f"{block}/{ops[root[made]].name}"
            names.update(dict.fromkeys(values, name))
    return names


def _joined(
    workload: Workload, parts: Mapping[int, Iterable[str]], have: set[str], limit_s: float
) -> dict[int, int]:
    """Part → the first part of its region: parts that share an op above the limit are one."""
    root = {part: part for part in parts}

    def find(part: int) -> int:
        while root[part] != part:
            part = root[part]
        return part

    owner: dict[int, int] = {}
    for part, values in parts.items():
        run, _ = workload.recompute_ops(values, have)
        for op in run:
            if workload.ops[op].seconds > limit_s:
                a, b = find(owner.setdefault(op, part)), find(part)
                root[max(a, b)] = min(a, b)
    return {part: find(part) for part in parts}


class LateRegions:
    """Regions as late as they can be: one before every op that is the first to read a member.

    They need the least memory, but what a later region needs and an earlier one has made is
    made again, unless it stays: then it moves to the earlier region, whatever its block.
    """

    def __init__(self, workload: Workload, remade: Iterable[str]) -> None:
        self.workload = workload
        self.saved = set(workload.residuals) - set(remade)
        self.saved |= {v.name for v in workload.values.values() if v.is_output}
        self.anchors = {v: workload.first_backward_use(v) for v in remade}

    @property
    def names(self) -> dict[str, str]:
        """Residual → name of its region."""
        return {v: self.workload.ops[at].name for v, at in self.anchors.items()}

    @property
    def least_seconds(self) -> float:
        """What making all of them takes at least: every op once."""
        run, _ = self.workload.recompute_ops(self.anchors, self.saved)
        return self._seconds(run)

    @property
    def seconds(self) -> float:
        return sum(self._seconds(run) for run in self._runs(self.anchors).values())

    def _seconds(self, run: Iterable[int]) -> float:
        return sum(self.workload.ops[i].seconds for i in run)

    def moved(self, value: str, at: int) -> dict[str, int]:
        """The places with one residual in an earlier region; what it leaves may move back."""
        anchors = {**self.anchors, value: at}
        first = dict.fromkeys(anchors.values(), len(self.workload.ops))
        for v, place in anchors.items():
            first[place] = min(first[place], self.workload.first_backward_use(v))
        return {v: first[place] for v, place in anchors.items()}

    def _runs(self, anchors: Mapping[str, int]) -> dict[int, tuple[int, ...]]:
        """Region's place → the ops that it runs."""
        members: dict[int, list[str]] = defaultdict(list)
        for v, at in anchors.items():
            members[at].append(v)
        have, found = set(self.saved), {}
        for at in sorted(members):
            found[at], _ = self.workload.recompute_ops(members[at], have)
            have.update(members[at])
        return found

    def earlier(self) -> list[tuple[str, int]]:
        """(residual, place of an earlier region), where that saves time; most a byte first."""
        w, runs, now = self.workload, self._runs(self.anchors), self.seconds
        found = []
        for v, own in self.anchors.items():
            for at, run in runs.items():
                if at >= own or not set(run) & set(runs[own]):
                    continue
                moved = self._runs(self.moved(v, at)).values()
                saved = now - sum(self._seconds(r) for r in moved)
                if saved > 0:
                    found.append((-saved / max(1, w.values[v].num_bytes), at, v))
        return [(v, at) for _, at, v in sorted(found)]
