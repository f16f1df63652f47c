"""Which ops become one: clusters of memory-bound ops of one block and phase."""

from __future__ import annotations

import bisect
import heapq
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from lohan_fx._compat import LazyGraphModule, OpOverload
from lohan_fx.annotate import is_getitem, is_view, mark_blocks, mark_roots, tensors_of
from lohan_fx.fusion.align import align
from lohan_fx.joint_graph import Captured, is_repeatable, op_name

MAX_OPS = 24
"""Ops in one cluster: beyond that, kernels spill registers and compile slowly."""

MIN_BYTES = 2**20
"""Clusters that make less are left alone: a launch is all that they would save."""

_FUSIBLE = frozenset(
    {
        "aten._log_softmax",
        "aten._log_softmax_backward_data",
        "aten._softmax",
        "aten._softmax_backward_data",
        "aten._to_copy",
        "aten.clone",
        "aten.constant_pad_nd",
        "aten.mean",
        "aten.native_layer_norm",
        "aten.native_layer_norm_backward",
        "aten.select_backward",
        "aten.slice_backward",
        "aten.stack",
        "aten.sum",
    }
)
"""Ops without ``torch.Tag.pointwise`` that Inductor fuses with others."""

_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.int64})


Kernel = Callable[..., Any]
Compiler = Callable[[fx.GraphModule, str], Kernel | None]
"""(body, name) → what the fused node calls: the body's inputs → its outputs. A body with one output
returns the tensor, otherwise a tuple. None: the ops stay what they are."""


@dataclass(slots=True, eq=False)
class _Cluster:
    """Ops that become one. `phase` and `block` are those of all of them."""

    phase: str
    block: str
    members: list[fx.Node] = field(default_factory=list)


def fuse(
    captured: Captured, model: torch.nn.Module, compiler: Compiler, min_bytes: int | None = None
) -> int:
    """Fuse what can be fused, in place, and makes at least `min_bytes` (`MIN_BYTES`) by cluster.

    Returns the number of fused ops.

    Marks blocks (`annotate.mark_blocks`), which limit the clusters.
    """
    graph = captured.graph.graph
    mark_blocks(graph, model)
    mark_roots(graph)
    align(graph, lambda node: is_fusible(node, captured.device))
    finder = _Finder(graph, captured.device)
    least = MIN_BYTES if min_bytes is None else min_bytes
    clusters = [c for c in finder.clusters() if sum(map(_bytes, c.members)) >= least]
    fused = sum(_replace(finder, cluster, captured.graph, compiler) for cluster in clusters)
    if fused:
        _sort(graph, finder.position)
        for node in reversed(list(graph.nodes)):
            if (
                node.op == "call_function"
                and not node.users
                and (is_view(node) or is_getitem(node))
            ):
                graph.erase_node(node)
        graph.lint()
    return fused


def _bytes(op: fx.Node) -> int:
    """Bytes of all that an op makes."""
    return sum(t.numel() * t.element_size() for t in tensors_of(op.meta.get("val")))


def maker_of(value: fx.Node) -> fx.Node | None:
    """The op (or placeholder) that made the storage of a value; None for what holds no tensor."""
    root: fx.Node | None = value.meta.get("root")
    if root is None:
        return value if value.op == "call_function" else None
    if is_getitem(root):
        source = root.args[0]
        assert isinstance(source, fx.Node)
        return source
    return root


def is_fusible(node: fx.Node, device: torch.device) -> bool:
    """Whether Inductor makes a kernel of the op that can hold others, too."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return False
    name = str(target.overloadpacket)
    if torch.Tag.pointwise not in target.tags and name not in _FUSIBLE:
        return False
    if not is_repeatable(node):
        return False
    tensors = tensors_of(node.meta.get("val"))
    for source in node.all_input_nodes:
        tensors += tensors_of(source.meta.get("val"))
    return all(t.device.type == device.type and t.dtype in _DTYPES for t in tensors)


class _Finder:
    """Finds the clusters of one graph; knows who reads what, through views."""

    def __init__(self, graph: fx.Graph, device: torch.device) -> None:
        self.graph = graph
        self.device = device
        self.position: dict[fx.Node, float] = {n: i for i, n in enumerate(graph.nodes)}
        self.sources: dict[fx.Node, list[fx.Node]] = {}
        self.readers: dict[fx.Node, list[fx.Node]] = {}
        for node in graph.nodes:
            if node.op == "placeholder" or is_view(node) or is_getitem(node):
                continue
            found = map(maker_of, node.all_input_nodes)
            makers = dict.fromkeys(maker for maker in found if maker is not None)
            self.sources[node] = list(makers)
            for maker in makers:
                self.readers.setdefault(maker, []).append(node)
        self._ops = list(self.sources)
        self._places = [self.position[n] for n in self._ops]

    def clusters(self) -> list[_Cluster]:
        """Clusters of at least two ops, grown along the edges of the graph in order."""
        home: dict[fx.Node, _Cluster] = {}
        for node in list(self.sources):
            if not is_fusible(node, self.device):
                continue
            cluster = _Cluster(node.meta["phase"], node.meta["block"], [node])
            home[node] = cluster
            for source in self.sources[node]:
                other = home.get(source)
                if other is not None and other is not cluster and self.may_merge(other, cluster):
                    other.members += cluster.members
                    home.update(dict.fromkeys(cluster.members, other))
                    cluster = other
        found = {id(c): c for c in home.values() if len(c.members) > 1}
        return list(found.values())

    def may_merge(self, a: _Cluster, b: _Cluster) -> bool:
        """Whether one op can stand for both: what they read is made before those who read them,
        and memory does not wait for it."""
        if (a.phase, a.block) != (b.phase, b.block):
            return False
        members = {*a.members, *b.members}
        if len(members) > MAX_OPS:
            return False
        if a.phase == "forward" and self.hides_a_cut(a, b):
            return False
        first, last = self.window(members)
        return first < last and self.held_bytes(members, last) <= max(map(_bytes, members))

    def hides_a_cut(self, a: _Cluster, b: _Cluster) -> bool:
        """Whether `b` could be run again from a value of `a` that others read, too, and only from
        more bytes as one op: that would save a read of the value, and cost a place to recompute
        from. The float32 copy of a bfloat16 value is no such place, nor is SiLU's result."""
        inside = {*a.members, *b.members}
        needs = {s for m in b.members for s in self.sources[m]}
        cut = [m for m in a.members if m in needs and any(r not in inside for r in self.readers[m])]
        more = {s for m in a.members for s in self.sources[m]} - inside - needs
        instead = [s for s in more if s.op == "call_function"]
        return bool(cut) and sum(map(_bytes, instead)) > sum(map(_bytes, cut))

    def held_bytes(self, members: set[fx.Node], last: float) -> int:
        """Bytes of what the members read that would stay longer, past other ops, if they were one:
        sums over pieces that are made one after another must not wait for the last piece."""
        end = min(max(self.position[m] for m in members), last)
        held = 0
        for source in {s for m in members for s in self.sources[m]} - members:
            if source.op != "call_function":
                continue
            use = max(self.position[r] for r in self.readers[source])
            if use < end and next(self._others(members, use, end), None) is not None:
                held += _bytes(source)
        return held

    def _others(self, members: set[fx.Node], start: float, end: float) -> Iterator[float]:
        """Positions between two positions of ops that are no members."""
        for k in range(bisect.bisect_right(self._places, start), len(self._places)):
            if self._places[k] >= end:
                return
            if self._ops[k] not in members:
                yield self._places[k]

    def window(self, members: Iterable[fx.Node]) -> tuple[float, float]:
        """Position of the last op that the members read, and of the first op that reads them."""
        inside = set(members)
        reads = [self.position[s] for m in inside for s in self.sources[m] if s not in inside]
        read_by = [
            self.position[r] for m in inside for r in self.readers.get(m, ()) if r not in inside
        ]
        return max(reads, default=-1.0), min(read_by, default=float(len(self.position)))


def _replace(
    finder: _Finder, cluster: _Cluster, module: fx.GraphModule, compiler: Compiler
) -> bool:
    """Put one node in place of a cluster, and results taken out of it in place of its values.

    Two clusters may each be possible and not both: says whether this one still was.
    """
    graph = finder.graph
    members = sorted(cluster.members, key=finder.position.__getitem__)
    inside = set(members)
    first, last = finder.window(members)
    if first >= last:
        return False
    at = min(finder.position[members[-1]], last - 0.5)
    wanted = [v for m in members for v in _values(m) if _is_read_outside(v, inside)]
    if not wanted:  # dead code
        return False
    body, reads = _body(members, wanted, module)
    name = "_".join(["fused", *dict.fromkeys(_short(m) for m in members)][:5])
    kernel = compiler(body, name)
    if kernel is None:
        return False
    anchor = members[-1]
    with graph.inserting_before(anchor):
        made = graph.create_node("call_function", kernel, tuple(reads), name=f"fused_{anchor.name}")
    made.meta = {k: v for k, v in anchor.meta.items() if k not in ("val", "root")}
    made.meta["members"] = tuple(m.name for m in members)
    values = tuple(v.meta["val"] for v in wanted)
    scratch = getattr(kernel, "scratch_bytes", 0)
    made.meta.update(val=values[0] if len(wanted) == 1 else values, scratch_bytes=scratch)
    finder.position[made] = max(at, first + 0.25)
    new = [made]
    if len(wanted) > 1:
        with graph.inserting_before(anchor):
            new = [graph.call_function(operator.getitem, (made, k)) for k in range(len(wanted))]
        for node, old in zip(new, wanted, strict=True):
            node.meta = {**made.meta, "val": old.meta["val"]}
            finder.position[node] = finder.position[made]
    for node, old in zip(new, wanted, strict=True):
        node.meta["root"] = node
        for view in _views_of(old):
            view.meta["root"] = node
        old.replace_all_uses_with(node)
        if len(wanted) > 1:
            node.name = f"{old.name}_fused"
    _erase(graph, members)
    # others see the fused op where they saw its members
    finder.sources[made] = list(dict.fromkeys(s for m in members for s in finder.sources[m]))
    finder.sources[made] = [s for s in finder.sources[made] if s not in inside]
    for source in finder.sources[made]:
        readers = finder.readers[source]
        finder.readers[source] = [r for r in readers if r not in inside] + [made]
    outside = [r for m in members for r in finder.readers.pop(m, ()) if r not in inside]
    finder.readers[made] = list(dict.fromkeys(outside))
    for reader in finder.readers[made]:
        kept = [s for s in finder.sources[reader] if s not in inside]
        finder.sources[reader] = [*kept, made]
    for member in members:
        del finder.sources[member]
    return True


def _short(node: fx.Node) -> str:
    return op_name(node).removeprefix("aten.").partition(".")[0].strip("_")


def _values(op: fx.Node) -> Iterator[fx.Node]:
    """The tensors that an op makes: itself, or the results taken out of it."""
    if isinstance(op.meta.get("val"), torch.Tensor):
        yield op
    else:
        yield from (u for u in op.users if is_getitem(u) and not is_view(u))


def _views_of(value: fx.Node) -> Iterator[fx.Node]:
    for user in value.users:
        if is_view(user) and user.meta["root"] is not user:
            yield user
            yield from _views_of(user)


def _is_read_outside(value: fx.Node, inside: set[fx.Node]) -> bool:
    for user in value.users:
        if is_view(user):
            if _is_read_outside(user, inside):
                return True
        elif user not in inside:
            return True
    return False


def _body(
    members: Sequence[fx.Node], wanted: Sequence[fx.Node], module: fx.GraphModule
) -> tuple[fx.GraphModule, list[fx.Node]]:
    """The members, with the views between and before them, as a graph of its own; and what it
    reads: whole values, so that views cost nothing."""
    graph = fx.Graph()
    made = {v for m in members for v in _values(m)} | set(members)

    def find(node: fx.Node) -> fx.Node:
        if node not in env:
            for source in node.all_input_nodes:
                find(source)
            env[node] = graph.node_copy(node, env.__getitem__)
        return env[node]

    reads = _inputs(members, made)
    env = {node: _placeholder(graph, node, k) for k, node in enumerate(reads)}
    for member in members:
        find(member)
    graph.output(tuple(find(v) for v in wanted))
    return LazyGraphModule(module, graph, class_name="Fused"), reads


def _placeholder(graph: fx.Graph, node: fx.Node, k: int) -> fx.Node:
    made = graph.placeholder(f"x{k}")
    made.meta = {"val": node.meta["val"]}
    return made


def _inputs(members: Sequence[fx.Node], made: set[fx.Node]) -> list[fx.Node]:
    """What the members read that they do not make: the values behind views."""
    found: dict[fx.Node, None] = {}

    def visit(node: fx.Node) -> None:
        if node in made:
            return
        if is_view(node):
            for source in node.all_input_nodes:
                visit(source)
        else:
            found[node] = None

    for member in members:
        for source in member.all_input_nodes:
            visit(source)
    return list(found)


def _erase(graph: fx.Graph, members: Sequence[fx.Node]) -> None:
    """Remove the members, and views and results that nobody reads any more."""

    def erase(node: fx.Node) -> None:
        for user in list(node.users):
            if is_view(user) or is_getitem(user):
                erase(user)
        if not node.users:
            graph.erase_node(node)

    for member in reversed(members):
        erase(member)


def _sort(graph: fx.Graph, position: dict[fx.Node, float]) -> None:
    """Order the nodes so that what is read stands first, otherwise by position."""
    nodes = list(graph.nodes)
    rank: dict[fx.Node, tuple[float, int]] = {n: (position[n], i) for i, n in enumerate(nodes)}
    missing = {n: len(n.all_input_nodes) for n in nodes}
    ready = [(rank[n], n) for n in nodes if not missing[n]]
    heapq.heapify(ready)
    last: fx.Node | None = None
    placed = 0
    while ready:
        _, node = heapq.heappop(ready)
        placed += 1
        if last is not None:
            last.append(node)
        last = node
        for user in node.users:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (rank[user], user))
    if placed != len(nodes):
        raise RuntimeError(f"fused ops wait for each other: {len(nodes) - placed} nodes in a cycle")
