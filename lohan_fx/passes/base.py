"""What passes share: the rewrite in progress, places in the program, the pass manager."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from lohan_fx._compat import FakeTensor
from lohan_fx.annotate import UnitLayout, is_getitem, is_view
from lohan_fx.capture import Captured
from lohan_fx.errors import LohanError, VerificationError
from lohan_fx.plan import Plan
from lohan_fx.program import Kind, Region, regions_of
from lohan_fx.workload import Workload

# Canonical order around an op (lohan_fx.program): a node of a kind stands behind all nodes of
# lower rank at the same place.
RANK: dict[str, int] = {
    "fetch_unit": 0,
    "prefetch": 1,
    "wait_unit": 2,
    "wait": 3,
    "recompute": 4,
    "offload": 5,
    "release": 6,
    "emit_gradients": 7,
    "release_gradients": 8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What an inserted node is: ``node.meta["lohan"]``.

    `name` is the residual, unit window, unit or region; `key` the slot or unit number that the
    runtime knows it by; results that are taken out of a tuple carry their source's mark with
    `part` set.
    """

    kind: Kind
    name: str
    key: int = -1
    tier: str = "device"
    num_bytes: int = 0
    part: bool = False

    @property
    def rank(self) -> int:
        return RANK[self.kind]


@dataclass(kw_only=True)
class Rewrite:
    """A copy of the joint graph being rewritten, with what the passes need to know.

    `run` is the number under which the runtime registers the engine; `slots` numbers the
    swapped residuals and `units` the units; `handles` are the releases that prefetches follow.
    """

    captured: Captured
    workload: Workload
    plan: Plan
    layouts: tuple[UnitLayout, ...]
    run: int = 0
    module: fx.GraphModule = field(init=False)
    regions: tuple[Region, ...] = field(init=False)
    op_nodes: dict[str, fx.Node] = field(init=False)
    slots: dict[str, int] = field(init=False)
    units: dict[str, int] = field(init=False)
    handles: dict[str, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.captured = self.captured.clone()
        self.module = self.captured.graph
        self.regions = regions_of(self.workload, self.plan)
        nodes = {n.name: n for n in self.graph.nodes}
        self.op_nodes = {op.name: nodes[op.name] for op in self.workload.ops}
        swapped = [v for v in self.workload.residuals if self.plan.residuals[v].action == "swap"]
        self.slots = {v: i for i, v in enumerate(swapped)}
        self.units = {u.name: i for i, u in enumerate(self.layouts)}

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    def node(self, name: str) -> fx.Node:
        return next(n for n in self.graph.nodes if n.name == name)

    def first_use(self, value: str) -> int:
        """First backward use of a residual: an op, or the op that a region stands before."""
        uses = [self.workload.first_backward_use(value)]
        uses += [r.anchor for r in self.regions if value in r.reads]
        return min(uses)

    def before(self, op: str, rank: int) -> fx.Node:
        """The node to insert in front of, for a node of `rank` that stands before `op`."""
        at = self.op_nodes[op]
        while True:
            previous = at.prev
            mark = previous.meta.get("lohan")
            if mark is not None:
                if not rank < mark.rank <= RANK["recompute"]:
                    return at
            elif previous.meta.get("phase") != at.meta["phase"] or not is_view(previous):
                return at
            at = previous

    def after(self, op: str, rank: int) -> fx.Node:
        """The node to insert behind, for a node of `rank` that stands after `op`."""
        at = self.op_nodes[op]
        while True:
            following = at.next
            mark = following.meta.get("lohan")
            if mark is not None:
                if not RANK["recompute"] < mark.rank <= rank:
                    return at
            elif not (is_getitem(following) and following.args[0] is self.op_nodes[op]):
                return at
            at = following

    def insert(
        self,
        where: fx.Node,
        target: Callable[..., Any] | str,
        args: tuple[Any, ...],
        mark: Mark,
        value: Any,
        *,
        behind: bool,
        phase: str,
        block: str = "",
    ) -> fx.Node:
        """Insert one op of ours. `value` is its (fake) result, a new storage."""
        context = (
            self.graph.inserting_after(where) if behind else self.graph.inserting_before(where)
        )
        with context:
            if isinstance(target, str):
                node = self.graph.call_module(target, args)
            else:
                node = self.graph.call_function(target, args)
        node.meta.update(val=value, lohan=mark, phase=phase, block=block)
        if isinstance(value, torch.Tensor):
            node.meta["root"] = node
        return node

    def take(self, source: fx.Node, index: int, like: fx.Node, *, view_of: fx.Node | None) -> fx.Node:
        """Take result `index` out of a tuple-valued op of ours, behind its other results."""
        last = source
        while is_getitem(last.next) and last.next.args[0] is source:
            last = last.next
        with self.graph.inserting_after(last):
            node = self.graph.call_function(operator.getitem, (source, index))
        node.meta.update(
            val=like.meta["val"],
            lohan=dataclasses.replace(source.meta["lohan"], part=True),
            phase=source.meta["phase"],
            block=source.meta["block"],
        )
        node.meta["root"] = view_of if view_of is not None else node
        return node

    def empty_like(self, node: fx.Node) -> Any:
        """A fake result with the strides of `node`, on a storage of its own."""
        value = node.meta["val"]
        with value.fake_mode:
            return torch.empty_strided(
                value.size(), value.stride(), dtype=value.dtype, device=value.device
            )

    def token(self) -> Any:
        """The fake result of an op that returns only an order: an empty tensor on the host."""
        mode = next(
            n.meta["val"].fake_mode
            for n in self.graph.nodes
            if isinstance(n.meta.get("val"), FakeTensor)
        )
        with mode:
            return torch.empty(0)


class Pass(Protocol):
    """One rewrite of the joint graph, in place. Options are fields, bound when it is built."""

    @property
    def name(self) -> str: ...

    def __call__(self, rewrite: Rewrite) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PassManager:
    """Run passes in order; verify after each; name the failing one and those before it.

    `observe(name, rewrite)` is called after each pass: it serves printing and timing.
    """

    passes: Sequence[Pass]
    verify: Callable[[Rewrite], None] | None = None
    observe: Callable[[str, Rewrite], None] | None = None

    def __call__(self, rewrite: Rewrite) -> None:
        done: list[str] = []
        for step in self.passes:
            try:
                step(rewrite)
                rewrite.graph.lint()
                if self.verify is not None:
                    self.verify(rewrite)
            except LohanError:
                raise
            except Exception as error:
                raise VerificationError(
                    f"pass {step.name!r} failed (after {', '.join(done) or 'none'}): {error}"
                ) from error
            done.append(step.name)
            if self.observe is not None:
                self.observe(step.name, rewrite)


def replace_uses(old: fx.Node, new: fx.Node, users: Iterable[fx.Node]) -> None:
    """Make `users` read `new` where they read `old`."""
    for user in list(users):
        user.replace_input_with(old, new)
