"""Which ops become one: clusters of memory-bound ops of one block and phase."""

from __future__ import annotations

import bisect
import heapq
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

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

MAX_PIECES = 8
"""What one ``cat`` or ``stack`` puts together: of more, Inductor copies each by itself."""

_FUSIBLE = frozenset(
    {
        "aten._log_softmax",
        "aten._log_softmax_backward_data",
        "aten._softmax",
        "aten._softmax_backward_data",
        "aten._to_copy",
        "aten.cat",
        "aten.clone",
        "aten.constant_pad_nd",
        "aten.full_like",
        "aten.mean",
        "aten.native_layer_norm",
        "aten.native_layer_norm_backward",
        "aten.ones_like",
        "aten.select_backward",
        "aten.slice_backward",
        "aten.stack",
        "aten.sum",
        "aten.zeros_like",
    }
)
"""Ops without ``torch.Tag.pointwise`` that Inductor fuses with others."""

_JOINING = frozenset({"aten.cat", "aten.stack"})
"""Ops that are limited to `MAX_PIECES`."""

_CREATING = frozenset({"aten.arange", "aten.full", "aten.ones", "aten.scalar_tensor", "aten.zeros"})
"""Ops that make a tensor of numbers alone. A kernel has what it needs of them in registers."""

_NUMBERS = {
    "aten.constant_pad_nd": "value",
    "aten.full": "fill_value",
    "aten.full_like": "fill_value",
    "aten.scalar_tensor": "s",
}
"""What ops call the number that they fill a tensor with."""

_MAX_WHOLE = 2**24
"""Whole numbers up to this one are exact in float32."""

_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.int64})


Kernel = Callable[..., Any]
Compiler = Callable[[fx.GraphModule, str], Kernel | None]
"""(body, name) → what the fused node calls: the body's inputs → its outputs. A body with one output
returns the tensor, otherwise a tuple. None: the ops stay what they are."""


@dataclass(slots=True, eq=False)
class _Cluster:
    """Ops that become one. `phase` and `block` are those of all of them; `early` says that the one
    op stands in the first one's place instead of the last one's."""

    phase: str
    block: str
    members: list[fx.Node] = field(default_factory=list)
    early: bool = False


class _Life(NamedTuple):
    """Where a value is made and read last, by position, and its size."""

    start: float
    end: float
    num_bytes: int


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

    def replace(clusters: Iterable[_Cluster]) -> int:
        count = 0
        for cluster in clusters:
            if sum(map(_bytes, cluster.members)) < least:
                continue
            if _replace(finder, cluster, captured.graph, compiler):
                count += 1
                continue
            others = [m for m in cluster.members if not _is_joining(m)]
            if len(others) < len(cluster.members):  # what kernels do with joined pieces varies
                count += replace(finder.clusters(others))
        return count

    fused = replace(finder.clusters())
    if fused:
        _sort(graph, finder.position)
        for node in reversed(list(graph.nodes)):
            free = is_view(node) or is_getitem(node) or node in finder.created
            if node.op == "call_function" and not node.users and free:
                graph.erase_node(node)
        graph.lint()
    return fused


def _bytes(op: fx.Node) -> int:
    """Bytes of all that an op makes."""
    return sum(t.numel() * t.element_size() for t in tensors_of(op.meta.get("val")))


def _num_elements(op: fx.Node) -> int:
    """Of the largest tensor that an op makes."""
    return max((t.numel() for t in tensors_of(op.meta.get("val"))), default=0)


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
    if _is_joining(node) and len(cast(Sized, node.args[0])) > MAX_PIECES:
        return False
    return is_repeatable(node) and _has_kernels(node, device) and _is_exact(node)


def _is_joining(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and str(node.target.overloadpacket) in _JOINING


def is_created(node: fx.Node, device: torch.device) -> bool:
    """Whether an op makes a tensor of numbers alone, where and as kernels can have it."""
    target = node.target
    return (
        node.op == "call_function"
        and isinstance(target, OpOverload)
        and str(target.overloadpacket) in _CREATING
        and not node.all_input_nodes
        and _has_kernels(node, device)
        and _is_exact(node)
    )


def _is_exact(node: fx.Node) -> bool:
    """Whether the numbers that an op writes are the same inside a kernel.

    There, numbers of reduced precision are float32, and those that no op computes are not rounded:
    0.1 in bfloat16 stays 0.1. A range is computed from its bounds, in another order than eager's.
    """
    assert isinstance(node.target, OpOverload)
    name = str(node.target.overloadpacket)
    if name == "aten.arange":
        dtype = node.meta["val"].dtype
        bounds = [a for a in node.args if a is not None]
        whole = all(isinstance(a, int) and abs(a) <= _MAX_WHOLE for a in bounds)
        return whole and dtype in (torch.int64, torch.float32)
    if name not in _NUMBERS:
        return True
    dtype, number = node.meta["val"].dtype, _argument(node, _NUMBERS[name])
    if not isinstance(number, int | float):
        return False
    if dtype in (torch.float16, torch.bfloat16):
        rounded = torch.tensor(number, dtype=dtype, device="cpu").item()
        return rounded == number or math.isnan(number)
    return dtype.is_floating_point or isinstance(number, int)


def _argument(node: fx.Node, name: str) -> Any:
    """What an op is given as the argument of this name."""
    assert isinstance(node.target, OpOverload)
    if name in node.kwargs:
        return node.kwargs[name]
    arguments = node.target._schema.arguments
    index = next(k for k, argument in enumerate(arguments) if argument.name == name)
    return node.args[index] if index < len(node.args) else arguments[index].default_value


def _has_kernels(node: fx.Node, device: torch.device) -> bool:
    """Whether all tensors of an op are on the device, in dtypes that Inductor's kernels have."""
    tensors = tensors_of(node.meta.get("val"))
    for source in node.all_input_nodes:
        tensors += tensors_of(source.meta.get("val"))
    return all(t.device.type == device.type and t.dtype in _DTYPES for t in tensors)


class _Finder:
    """Finds the clusters of one graph; knows who reads what, through views.

    What is made of numbers alone (`created`) belongs to no cluster: as views are, it is made again
    in each that reads it. So it is no source that anything waits for.
    """

    def __init__(self, graph: fx.Graph, device: torch.device) -> None:
        self.graph = graph
        self.device = device
        self.created = {n for n in graph.nodes if is_created(n, device)}
        self.position: dict[fx.Node, float] = {n: i for i, n in enumerate(graph.nodes)}
        self.sources: dict[fx.Node, list[fx.Node]] = {}
        self.readers: dict[fx.Node, list[fx.Node]] = {}
        readers_of_created: dict[fx.Node, list[fx.Node]] = {}
        for node in graph.nodes:
            if node.op == "placeholder" or is_view(node) or is_getitem(node):
                continue
            if node in self.created:
                continue
            found = map(maker_of, node.all_input_nodes)
            makers = dict.fromkeys(maker for maker in found if maker is not None)
            self.sources[node] = [m for m in makers if m not in self.created]
            for maker in makers:
                known = readers_of_created if maker in self.created else self.readers
                known.setdefault(maker, []).append(node)
        self._absorbing = {
            reader
            for readers in readers_of_created.values()
            if all(is_fusible(reader, device) for reader in readers)
            for reader in readers
        }
        self._ops = list(self.sources)
        self._places = [self.position[n] for n in self._ops]

    def clusters(self, ops: Iterable[fx.Node] | None = None) -> list[_Cluster]:
        """Clusters of at least two ops, grown along the edges of the graph in order; and single
        ops that spare those who make what they read. Of these ops alone, if some are given."""
        nodes = sorted(self.sources if ops is None else ops, key=self.position.__getitem__)
        nodes = [n for n in nodes if is_fusible(n, self.device)]
        home = {n: _Cluster(n.meta["phase"], n.meta["block"], [n]) for n in nodes}
        for early in (False, True):  # early ones first would keep others from being one
            for node in nodes:
                before = 0
                while before < len(home[node].members):  # what does not fit may fit behind another
                    before = len(home[node].members)
                    self._grow(home, node, early=early)
        wanted = (c for n, c in home.items() if len(c.members) > 1 or n in self._absorbing)
        return list({id(c): c for c in wanted}.values())

    def _grow(self, home: dict[fx.Node, _Cluster], node: fx.Node, *, early: bool) -> None:
        """Make one of a node's cluster and those that it reads or stands beside, where possible."""
        sources = self.sources[node]
        for neighbor in (*sources, *self.siblings(node)):
            cluster, other = home[node], home.get(neighbor)
            if other is None or other is cluster:
                continue
            beside = neighbor not in sources
            merged = self.merged(other, cluster, early=early, beside=beside)
            if merged is not None:
                home.update(dict.fromkeys(merged.members, merged))

    def siblings(self, node: fx.Node) -> Iterator[fx.Node]:
        """Ops of backward, where nothing is run again, that read all of a gradient which this one
        reads, too: one op reads it once."""
        for source in node.all_input_nodes:
            root: fx.Node = source.meta.get("root", source)
            phases, size = {root.meta.get("phase"), node.meta["phase"]}, _num_elements(root)
            if phases == {"backward"} and _num_elements(node) == size and root not in self.created:
                yield from (r for r in _readers_of(root) if _num_elements(r) == size)

    def merged(self, a: _Cluster, b: _Cluster, *, early: bool, beside: bool) -> _Cluster | None:
        """Both as one, if one op can stand for them: what they read is made before those who read
        them, and memory does not wait for it: in the last one's place, or (`early`) not there but
        in the first one's. Clusters `beside` each other, neither of which reads the other, need not
        be one: not if both at once take more memory."""
        if (a.phase, a.block) != (b.phase, b.block):
            return None
        members = {*a.members, *b.members}
        if len(members) > MAX_OPS:
            return None
        if a.phase == "forward" and self.hides_a_cut(a, b):
            return None
        first, last = self.window(members)
        if first >= last:
            return None
        late = self.held_bytes(members, last) <= max(map(_bytes, members))
        if late == early or (early and not self.is_free_early(members)):
            return None
        if beside and not self.takes_no_more(members):
            return None
        return _Cluster(a.phase, a.block, [*a.members, *b.members], early=early)

    def hides_a_cut(self, a: _Cluster, b: _Cluster) -> bool:
        """Whether `b` could be run again from values of `a` that others read, too, and only from
        more bytes as one op: that would save a read of them, and cost a place to recompute from.
        The float32 copy of a bfloat16 value is no such place, nor is SiLU's result. If `b` needs a
        value that nobody else reads, `a` is run again with it as it is."""
        inside = {*a.members, *b.members}
        needs = {s for m in b.members for s in self.sources[m]}
        cut = [m for m in a.members if m in needs]
        if not all(any(r not in inside for r in self.readers[m]) for m in cut):
            return False
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

    def start(self, members: Iterable[fx.Node]) -> float:
        """The first place that one op could have: the first member's, behind all that is read."""
        first, _ = self.window(members)
        return max(min(self.position[m] for m in members), first + 0.25)

    def is_free_early(self, members: set[fx.Node]) -> bool:
        """Whether one op in the first place that it could have holds nothing longer, and makes no
        results before their time that take more than the members' values that are no more."""
        start = self.start(members)
        if self.held_bytes(members, start):
            return False
        end = max(self.position[m] for m in members)
        inner, results = self.lives(members)
        return all(
            sum(v.num_bytes for v in results if v.start > place)
            <= sum(v.num_bytes for v in inner if v.start < place < v.end)
            for place in self._others(members, start, end)
        )

    def takes_no_more(self, members: set[fx.Node]) -> bool:
        """Whether one op, which needs all that it reads and makes at once, takes no more memory
        than the members, one after another."""
        inner, results = self.lives(members)
        read = [
            _Life(self.position[s], max(self.position[r] for r in self.readers[s]), _bytes(s))
            for s in {s for m in members for s in self.sources[m]} - members
            if s.op == "call_function"
        ]
        most = max(
            sum(v.num_bytes for v in inner + results + read if v.start <= place <= v.end)
            for place in map(self.position.__getitem__, members)
        )
        return sum(v.num_bytes for v in results + read) <= most

    def lives(self, members: set[fx.Node]) -> tuple[list[_Life], list[_Life]]:
        """The members' values: those that members alone read, and results."""
        inner: list[_Life] = []
        results: list[_Life] = []
        for m in members:
            for v in _values(m):
                end = max(map(self.position.__getitem__, _readers_of(v)), default=self.position[m])
                kind = results if _is_read_outside(v, members) else inner
                kind.append(_Life(self.position[m], end, _bytes(v)))
        return inner, results

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
    at = finder.start(members) if cluster.early else finder.position[members[-1]]
    at = max(min(at, last - 0.5), first + 0.25)
    wanted = [v for m in members for v in _values(m) if _is_read_outside(v, inside)]
    if not wanted:  # dead code
        return False
    body, reads = _body(members, wanted, module, finder.created)
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
    finder.position[made] = at
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


def _readers_of(value: fx.Node) -> Iterator[fx.Node]:
    """The ops that read a value, or a view of it."""
    for user in value.users:
        if is_view(user):
            yield from _readers_of(user)
        else:
            yield user


def _is_read_outside(value: fx.Node, inside: set[fx.Node]) -> bool:
    return any(reader not in inside for reader in _readers_of(value))


def _body(
    members: Sequence[fx.Node],
    wanted: Sequence[fx.Node],
    module: fx.GraphModule,
    created: set[fx.Node],
) -> tuple[fx.GraphModule, list[fx.Node]]:
    """The members, with the views between and before them and what is made of numbers alone, as a
    graph of its own; and what it reads: whole values, so that views cost nothing."""
    graph = fx.Graph()
    made = {v for m in members for v in _values(m)} | set(members)

    def find(node: fx.Node) -> fx.Node:
        if node not in env:
            for source in node.all_input_nodes:
                find(source)
            env[node] = graph.node_copy(node, env.__getitem__)
        return env[node]

    reads = _inputs(members, made | created)
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
    """What the members read that is not made inside: the values behind views."""
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
