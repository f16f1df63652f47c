"""A step, or one block of it, as the graph of stages that the Checkmate program works on. No torch.

A node is one op, or consecutive ops that stand or fall together; it makes all of its results or
none. Memory is counted as `program.residency` counts it: results are born before the node runs,
what nobody reads any more dies after it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from lohan_fx.workload import MODEL_INPUT_KINDS, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One stage's first-time computation.

    Attributes:
        seconds: device time.
        num_bytes: of the results that later nodes read (or that stay).
        scratch_bytes: what else is alive at the fullest moment while it runs.
        reads: earlier nodes whose results it needs.
        pinned: the results stay to the end of the step.
        recomputable: it may run again.
        swappable: its results may be sent to host memory or SSD.
        values: the results' names.
    """

    name: str
    seconds: float
    num_bytes: int
    scratch_bytes: int = 0
    reads: tuple[int, ...] = ()
    pinned: bool = False
    recomputable: bool = True
    swappable: bool = True
    values: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Nodes in execution order. `static_bytes` are on the device all along.

    `turn` is the first node of backward.
    """

    nodes: tuple[Node, ...]
    turn: int
    static_bytes: int = 0
    index: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.nodes)

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """For each node, those that read its results, ascending."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for k, node in enumerate(self.nodes):
            for i in node.reads:
                found[i].append(k)
        return tuple(tuple(where) for where in found)

    @cached_property
    def last_need(self) -> tuple[int, ...]:
        """For each node the last stage in which its result can be of any use, transitively.

        After its last direct use a result may still be read by a recomputed user.
        """
        last = list(range(len(self.nodes)))
        for i in reversed(range(len(self.nodes))):
            users = (last[k] if self.nodes[k].recomputable else k for k in self.users[i])
            last[i] = max([i, *users])
            if self.nodes[i].pinned:
                last[i] = len(self.nodes) - 1
        return tuple(last)

    @property
    def seconds(self) -> float:
        """Device time of computing every node once."""
        return sum(node.seconds for node in self.nodes)

    @property
    def working_bytes(self) -> int:
        """What the hungriest node needs at once: no schedule needs less."""
        return self.static_bytes + max(
            (
                node.num_bytes
                + node.scratch_bytes
                + sum(self.nodes[i].num_bytes for i in node.reads)
                for node in self.nodes
            ),
            default=0,
        )


def graph_of(
    workload: Workload,
    *,
    ops: Sequence[int] | None = None,
    max_nodes: int | None = None,
    small_bytes: int = 0,
    static_bytes: int = 0,
    recompute_backward: bool = False,
) -> Graph:
    """The graph of some ops of a workload, all by default.

    Args:
        ops: ascending indices. Results of other ops that they read become nodes of their own
            that take no time, before the first reader of their phase.
        max_nodes: with more ops than this, consecutive ones are merged; one with a residual of
            more than `small_bytes` ends a node in forward, and one that is the first to read
            such a residual begins one in backward.
        small_bytes: values up to this size do not count.
        static_bytes: device bytes beside activations.
        recompute_backward: whether backward ops may run again; the runtime cannot do that.
    """
    chosen = list(range(len(workload.ops))) if ops is None else list(ops)
    groups = [[i] for i in chosen]
    if max_nodes is not None and len(groups) > max_nodes:
        groups = _merged(workload, chosen, small_bytes)
        groups = _at_most(workload, groups, max_nodes)
    return _Builder(workload, groups, small_bytes, static_bytes, recompute_backward).build()


def _merged(workload: Workload, chosen: Sequence[int], small_bytes: int) -> list[list[int]]:
    """Runs of ops between residuals."""
    n = workload.num_forward_ops
    large = {v for v in workload.residuals if workload.values[v].num_bytes > small_bytes}
    seen: set[str] = set()
    groups: list[list[int]] = []
    begin = True
    for i in chosen:
        op = workload.ops[i]
        if i < n:
            groups.append([i]) if begin else groups[-1].append(i)
            begin = any(v in large for v in op.writes)
            continue
        fresh = {v for v in op.reads if v in large} - seen
        seen |= fresh
        turned = not groups or groups[-1][-1] < n
        groups.append([i]) if fresh or turned else groups[-1].append(i)
    return groups


def _at_most(workload: Workload, groups: list[list[int]], max_nodes: int) -> list[list[int]]:
    """Merge the neighbours, within a phase, with the fewest bytes of results between them."""
    n = workload.num_forward_ops
    sizes = [
        sum(workload.values[v].num_bytes for i in group for v in workload.ops[i].writes)
        for group in groups
    ]
    while len(groups) > max_nodes:
        pairs = [
            (sizes[k] + sizes[k + 1], k)
            for k in range(len(groups) - 1)
            if (groups[k][0] < n) == (groups[k + 1][0] < n)
        ]
        if not pairs:
            break
        k = min(pairs)[1]
        groups[k : k + 2] = [groups[k] + groups[k + 1]]
        sizes[k : k + 2] = [sizes[k] + sizes[k + 1]]
    return groups


class _Builder:
    def __init__(
        self,
        workload: Workload,
        groups: Sequence[Sequence[int]],
        small_bytes: int,
        static_bytes: int,
        recompute_backward: bool,
    ) -> None:
        self.w = workload
        self.groups = groups
        self.small = small_bytes
        self.static = static_bytes
        self.recompute_backward = recompute_backward
        self.members = {i for group in groups for i in group}
        self.of_value: dict[str, int] = {}
        self.nodes: list[Node] = []

    def build(self) -> Graph:
        n = self.w.num_forward_ops
        turn = None
        for group in self.groups:
            self._inputs(group)
            if turn is None and group[0] >= n:
                turn = len(self.nodes)
            self._node(group)
        return Graph(
            nodes=tuple(self.nodes),
            turn=len(self.nodes) if turn is None else turn,
            static_bytes=self.static,
            index={node.name: k for k, node in enumerate(self.nodes)},
        )

    def _counted(self, value: str) -> int:
        size = self.w.values[value].num_bytes
        return size if size > self.small else 0

    def _inputs(self, group: Sequence[int]) -> None:
        """Nodes for what the group reads of ops that are not in the graph."""
        for i in group:
            for v in self.w.ops[i].reads:
                outside = self.w.producer.get(v) is not None and v not in self.of_value
                if outside and self.w.producer[v] not in self.members:
                    self.of_value[v] = len(self.nodes)
                    self.nodes.append(
                        Node(
                            name=v,
                            seconds=0.0,
                            num_bytes=self._counted(v),
                            recomputable=False,
                            values=(v,),
                        )
                    )

    def _node(self, group: Sequence[int]) -> None:
        ops = [self.w.ops[i] for i in group]
        own = set(group)
        reads = []
        results = []
        for i in group:
            reads += [self.of_value[v] for v in self.w.ops[i].reads if v in self.of_value]
            for v in self.w.ops[i].writes:
                used = any(k in self.members and k not in own for k in self.w.users[v])
                if used or self.w.values[v].is_output:
                    results.append(v)
        here = len(self.nodes)
        forward = group[0] < self.w.num_forward_ops
        counted = [v for v in results if self.w.values[v].kind not in MODEL_INPUT_KINDS]
        for v in counted:
            self.of_value[v] = here
        self.nodes.append(
            Node(
                name=ops[-1].name,
                seconds=sum(op.seconds for op in ops),
                num_bytes=sum(self._counted(v) for v in counted),
                scratch_bytes=self._scratch(group, set(counted)),
                reads=tuple(dict.fromkeys(reads)),
                pinned=any(self.w.values[v].is_output for v in counted),
                recomputable=all(op.recomputable for op in ops)
                and (forward or self.recompute_backward),
                values=tuple(counted),
            )
        )

    def _scratch(self, group: Sequence[int], results: Collection[str]) -> int:
        """Bytes of the group's inner values, and of its ops' scratch, at their fullest moment; less
        than nothing, if a result takes the memory of what the group reads."""
        last: dict[str, int] = {}
        for i in group:
            for v in (*self.w.ops[i].reads, *self.w.ops[i].writes):
                last[v] = i
        alive: dict[str, int] = {}
        most = -sum(map(self._counted, results))
        for i in group:
            op = self.w.ops[i]
            alive.update({v: self._counted(v) for v in op.writes if v not in results})
            most = max(most, sum(alive.values()) + op.scratch_bytes)
            alive = {v: size for v, size in alive.items() if last[v] > i}
        return most
