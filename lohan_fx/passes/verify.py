"""Read the program back from the graph, and check the invariants.

`read_back(rewrite)` is the inverse of the passes: the same list of `Instruction` that
`lohan_fx.program.lower` makes from the plan, but made from what the graph's nodes read, return
and hold. After the last pass the two must be equal (`check_program`); after every pass the
invariants below hold (`check_invariants`):

1. one offload, one release, one prefetch and one wait of a residual at most, in that order, and
   nothing reads a reload before its wait;
2. no use of a value after its release, nor of any view of it;
3. nothing that is recomputed draws randomness, mutates or communicates;
4. no gradient is emitted before it exists.

That the order, the bytes and the peak are the planned ones follows from equality with the plan's
program, whose peak by storage is held against the budget.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from lohan_fx.annotate import device_bytes, is_view, storage_bytes
from lohan_fx.errors import InsufficientMemoryError, VerificationError
from lohan_fx.joint_graph import is_repeatable, op_name
from lohan_fx.passes.base import Mark, Rewrite
from lohan_fx.program import Instruction, Program, recomputed, reload_of, residency
from lohan_fx.workload import Phase

# ---------------------------------------------------------------------------------------------
# Invariants
# ---------------------------------------------------------------------------------------------


def check_invariants(rewrite: Rewrite) -> None:
    """Check what must hold after every pass.

    Raises:
        VerificationError: names the invariant, the value and the nodes.
    """
    order = {node: i for i, node in enumerate(rewrite.graph.nodes)}
    marked: dict[tuple[str, str], fx.Node] = {}
    for node in rewrite.graph.nodes:
        mark: Mark | None = node.meta.get("lohan")
        if mark is None or mark.part:
            continue
        other = marked.setdefault((mark.kind, mark.name), node)
        if other is not node:
            raise VerificationError(
                f"{mark.kind} of {mark.name} stands twice: {other.name} and {node.name}"
            )
    for (kind, name), node in marked.items():
        if kind == "release":
            _check_release(node, name, order)
        elif kind == "prefetch":
            _check_prefetch(node, name, marked, order)
        elif kind == "recompute":
            _check_region(rewrite, node)
        elif kind == "emit_gradients":
            _check_emit(rewrite, node, name, order)


def _readers(value: fx.Node) -> Iterable[fx.Node]:
    """Everything that reads a value or a view of it, views themselves included."""
    for user in value.users:
        yield user
        if is_view(user) and user.meta.get("lohan") is None:
            yield from _readers(user)


def _check_release(node: fx.Node, name: str, order: dict[fx.Node, int]) -> None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    for user in _readers(source):
        # backward readers move to the reload in a later pass; _check_prefetch sees to them
        if order[user] > order[node] and user.meta.get("phase") == "forward":
            raise VerificationError(
                f"{name} is read by {user.name} after its release at {node.name}"
            )


def _check_prefetch(
    node: fx.Node,
    name: str,
    marked: dict[tuple[str, str], fx.Node],
    order: dict[fx.Node, int],
) -> None:
    steps = []
    for kind in ("offload", "release", "prefetch", "wait"):
        if (kind, name) not in marked:
            raise VerificationError(f"{name} is reloaded, but there is no {kind} of it")
        steps.append(marked[kind, name])
    for before, after in itertools.pairwise(steps):
        if order[before] > order[after]:
            raise VerificationError(f"{name}: {after.name} stands before {before.name}")
    offload, release, _, wait = steps
    for user in node.users:
        if user is not wait:
            raise VerificationError(f"the reload of {name} is read by {user.name} without a wait")
    source = offload.args[0]
    assert isinstance(source, fx.Node)
    for user in _readers(source):
        if user.op != "output" and order[user] > order[release]:
            raise VerificationError(
                f"{name} is read by {user.name} after its release at {release.name}"
            )


def _check_region(rewrite: Rewrite, node: fx.Node) -> None:
    for inner in body_of(rewrite, node).graph.nodes:
        if inner.op == "call_function" and not is_repeatable(inner):
            raise VerificationError(
                f"region {node.name} would run {inner.name} ({op_name(inner)}) again, which "
                "draws randomness, mutates or communicates"
            )


def _check_emit(rewrite: Rewrite, node: fx.Node, name: str, order: dict[fx.Node, int]) -> None:
    for value in rewrite.workload.unit_by_name[name].gradients:
        made = rewrite.nodes[value]
        if order[made] > order[node]:
            raise VerificationError(
                f"unit {name} emits its gradients at {node.name}, before {made.name} is made"
            )


def body_of(rewrite: Rewrite, node: fx.Node) -> fx.GraphModule:
    """The graph of a recompute region."""
    body = rewrite.module.get_submodule(str(node.target))
    assert isinstance(body, fx.GraphModule)
    return body


# ---------------------------------------------------------------------------------------------
# The program in the graph
# ---------------------------------------------------------------------------------------------


def read_back(rewrite: Rewrite) -> tuple[Instruction, ...]:
    """The instructions that the graph holds, in its order, as `shown`."""
    reader = _Reader(rewrite)
    found = []
    for node in rewrite.graph.nodes:
        mark: Mark | None = node.meta.get("lohan")
        if mark is None and rewrite.is_op(node):
            found.append(reader.compute(node, node.meta["phase"]))
        elif mark is not None and not mark.part:
            found.append(reader.marked(node, mark))
    return tuple(shown(instruction) for instruction in found)


def shown(instruction: Instruction) -> Instruction:
    """An instruction without what no graph shows: costs and scratch; sets are sorted."""
    return dataclasses.replace(
        instruction,
        reads=tuple(sorted(set(instruction.reads))),
        births=tuple(sorted(instruction.births)),
        seconds=0.0,
        flops=0,
        scratch_bytes=0,
        direct_bytes=0,
        body=tuple(shown(inner) for inner in instruction.body),
    )


class _Reader:
    """Reads instructions off nodes, and gives storages the names that the lowering uses.

    `region` is that of a recompute's body; `storages` then holds what the caller passes in. A
    root without a storage is on the device all along.
    """

    def __init__(
        self,
        rewrite: Rewrite,
        region: str | None = None,
        storages: dict[fx.Node, str] | None = None,
    ) -> None:
        self.rewrite = rewrite
        self.region = region
        self.storages = {} if storages is None else storages

    def compute(self, node: fx.Node, phase: Phase) -> Instruction:
        op = self.rewrite.workload.ops[self.rewrite.workload.op_index[node.name]]
        made = {n.name: n for n in (node, *node.users) if n.meta.get("root") is n}
        births = []
        for v in op.writes:
            name = v if self.region is None else recomputed(v, self.region)
            if v in made:
                self.storages[made[v]] = name
                held = made[v].meta["val"]
                births.append((name, device_bytes(held, self.rewrite.captured.device)))
            else:  # a result that nothing reads
                births.append((name, self.rewrite.workload.values[v].num_bytes))
        return Instruction(
            kind="compute",
            name=node.name,
            phase=phase,
            reads=self._reads(node),
            births=tuple(births),
        )

    def marked(self, node: fx.Node, mark: Mark) -> Instruction:
        reads = self._reads(node)
        births: tuple[tuple[str, int], ...] = ()
        body: tuple[Instruction, ...] = ()
        if mark.kind in ("prefetch", "fetch_unit"):
            name = reload_of(mark.name) if mark.kind == "prefetch" else mark.name
            self.storages[node] = name
            births = ((name, storage_bytes(node.meta["val"])),)
        elif mark.kind == "recompute":
            body = self._body(node, mark.name)
            wanted = self.rewrite.regions[mark.key].wanted
            names = [recomputed(v, mark.name) for v in wanted]
            births = tuple(zip(names, map(storage_bytes, node.meta["val"]), strict=True))
            for result in node.users:
                index: Any = result.args[1]
                self.storages[result] = names[index]
        return Instruction(
            kind=mark.kind,
            name=mark.name,
            phase=node.meta["phase"],
            reads=reads,
            births=births,
            tier=mark.tier,
            num_bytes=mark.num_bytes,
            body=body,
        )

    def _body(self, node: fx.Node, region: str) -> tuple[Instruction, ...]:
        graph = body_of(self.rewrite, node).graph
        given = zip(graph.find_nodes(op="placeholder"), node.args, strict=True)
        storages = {
            inner: self.storages[outer.meta["root"]]
            for inner, outer in given
            if isinstance(outer, fx.Node) and outer.meta["root"] in self.storages
        }
        reader = _Reader(self.rewrite, region, storages)
        ops = self.rewrite.workload.op_index
        return tuple(
            reader.compute(inner, "backward")
            for inner in graph.nodes
            if inner.op == "call_function" and inner.name in ops
        )

    def _reads(self, node: fx.Node) -> tuple[str, ...]:
        found: dict[str, None] = {}
        for source in node.all_input_nodes:
            if source.meta.get("val") is None:
                continue
            if "root" in source.meta:
                roots = [source.meta["root"]]
            else:  # a tuple of tensors with storages of their own
                roots = [result.meta["root"] for result in source.users if "root" in result.meta]
            found.update((self.storages[root], None) for root in roots if root in self.storages)
        return tuple(found)


def check_program(rewrite: Rewrite, budget_bytes: int | None = None) -> Program:
    """Hold the finished graph equal to the plan's program; check its peak.

    Returns the program. `budget_bytes` is the device budget (None: unlimited).

    Raises:
        VerificationError: the graph and the plan disagree; names the first difference.
        InsufficientMemoryError: the program needs more than the budget.
    """
    program = rewrite.program
    wanted = tuple(shown(instruction) for instruction in program.instructions)
    found = read_back(rewrite)
    if wanted != found:
        raise VerificationError(
            f"the graph is not the plan's program: {_difference(wanted, found)}"
        )
    memory = residency(program)
    if budget_bytes is not None and memory.peak_bytes > budget_bytes:
        raise InsufficientMemoryError(
            "device",
            memory.peak_bytes,
            budget_bytes,
            where=memory.peak_name,
            at_peak=memory.at_peak,
        )
    return program


def _difference(wanted: Sequence[Instruction], found: Sequence[Instruction]) -> str:
    """Where two programs part, in words."""
    plan, graph = ([(x.kind, x.name) for x in side] for side in (wanted, found))
    if plan != graph:
        k = next(
            (k for k, (a, b) in enumerate(zip(plan, graph, strict=False)) if a != b),
            min(len(plan), len(graph)),
        )
        words = [f"at {k} the plan has {_names(plan[k:])}, the graph {_names(graph[k:])}"]
        missing, extra = Counter(plan) - Counter(graph), Counter(graph) - Counter(plan)
        words += [f"missing: {_names(missing)}"] * bool(missing)
        words += [f"not in the plan: {_names(extra)}"] * bool(extra)
        return "; ".join(words)
    a, b = next((a, b) for a, b in zip(wanted, found, strict=True) if a != b)
    for x, y in zip(a.body, b.body, strict=False):
        if x != y:
            a, b = x, y
            break
    field = next(f.name for f in dataclasses.fields(a) if getattr(a, f.name) != getattr(b, f.name))
    return f"{field} of {a.kind} {a.name}: plan {getattr(a, field)}, graph {getattr(b, field)}"


def _names(steps: Iterable[tuple[str, str]]) -> str:
    return ", ".join(" ".join(step) for step in itertools.islice(steps, 3)) or "nothing more"
