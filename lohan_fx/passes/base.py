"""What passes share: the rewrite in progress, places in the program, the pass manager."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import fx

from lohan_fx._compat import FakeTensor
from lohan_fx.annotate import UnitLayout, is_getitem, is_view
from lohan_fx.errors import LohanError, VerificationError
from lohan_fx.joint_graph import Captured
from lohan_fx.plan import Plan, Tier
from lohan_fx.program import Kind, Program, Region, lower, regions_of
from lohan_fx.workload import Workload

_ORDER: tuple[Kind, ...] = (
    "fetch_unit",
    "prefetch",
    "wait_unit",
    "host_view",
    "wait",
    "recompute",
    "offload",
    "release",
    "write_gradient",
    "emit_gradients",
    "release_gradients",
)
RANK: dict[Kind, int] = {kind: rank for rank, kind in enumerate(_ORDER)}
"""Canonical order around an op (lohan_fx.program): up to recompute before it, the others after
it. A node of a kind stands behind all nodes of lower rank at the same place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What an inserted node is: ``node.meta["lohan"]``.

    `name` is the residual, unit window, unit or region; `key` the slot or unit number that the
    runtime knows it by. Results that are taken out of a tuple, and views that are made for one
    op of ours alone, carry that op's mark with `part` set.
    """

    kind: Kind
    name: str
    key: int = -1
    tier: Tier = "device"
    num_bytes: int = 0
    part: bool = False

    @property
    def rank(self) -> int:
        return RANK[self.kind]


@dataclass(kw_only=True)
class Rewrite:
    """A copy of the joint graph being rewritten, with what the passes need to know.

    `run` is the number under which the runtime registers the engine. `nodes` are the captured
    graph's nodes by name: values and ops have their nodes' names. `slots` numbers the swapped
    residuals and `units` the units; `handles` are the releases that prefetches follow. `program`
    is what the passes must arrive at: the plan, lowered.

    Raises:
        PlanError: the plan does not fit the workload, or contradicts itself.
    """

    captured: Captured
    workload: Workload
    plan: Plan
    layouts: tuple[UnitLayout, ...]
    run: int = 0
    module: fx.GraphModule = field(init=False)
    program: Program = field(init=False)
    regions: tuple[Region, ...] = field(init=False)
    nodes: dict[str, fx.Node] = field(init=False)
    slots: dict[str, int] = field(init=False)
    units: dict[str, int] = field(init=False)
    handles: dict[str, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.program = lower(self.workload, self.plan)
        self.captured = self.captured.clone()
        self.module = self.captured.graph
        self.regions = regions_of(self.workload, self.plan)
        self.nodes = {n.name: n for n in self.graph.nodes}
        swapped = [v for v in self.workload.residuals if self.plan.residuals[v].action == "swap"]
        self.slots = {v: i for i, v in enumerate(swapped)}
        self.units = {u.name: i for i, u in enumerate(self.layouts)}

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    def is_op(self, node: fx.Node) -> bool:
        """Whether the node is an op of the workload (and no view, result or node of ours)."""
        return node.name in self.workload.op_index and self.nodes.get(node.name) is node

    @cached_property
    def first_uses(self) -> dict[str, int]:
        """Swapped residual → first backward use: an op, or the op that a region stands before.

        In the order in which waits and prefetches stand.
        """
        first = {v: self.workload.first_backward_use(v) for v in self.slots}
        for region in self.regions:
            for v in region.reads:
                if v in first:
                    first[v] = min(first[v], region.anchor)
        return dict(sorted(first.items(), key=lambda item: item[1]))

    # -- places -----------------------------------------------------------------------------

    def insert_before(
        self, op: str, target: Callable[..., Any] | str, args: tuple[Any, ...], mark: Mark
    ) -> fx.Node:
        """Insert one op of ours at the place of its rank before compute op `op`."""
        anchor = at = self.nodes[op]
        while True:
            previous = at.prev
            other: Mark | None = previous.meta.get("lohan")
            if other is not None:
                if not mark.rank < other.rank <= RANK["recompute"]:
                    break
            elif previous.meta.get("phase") != anchor.meta["phase"] or not is_view(previous):
                break
            at = previous
        with self.graph.inserting_before(at):
            return self._create(anchor, target, args, mark)

    def insert_after(
        self, op: str, target: Callable[..., Any], args: tuple[Any, ...], mark: Mark
    ) -> fx.Node:
        """Insert one op of ours at the place of its rank after compute op `op`."""
        anchor = at = self.nodes[op]
        while True:
            following = at.next
            other: Mark | None = following.meta.get("lohan")
            if other is not None:
                if not RANK["recompute"] < other.rank <= mark.rank:
                    break
            elif not (is_getitem(following) and following.args[0] is anchor):
                break
            at = following
        with self.graph.inserting_after(at):
            return self._create(anchor, target, args, mark)

    def _create(
        self, anchor: fx.Node, target: Callable[..., Any] | str, args: tuple[Any, ...], mark: Mark
    ) -> fx.Node:
        op = "call_module" if isinstance(target, str) else "call_function"
        name = f"{mark.kind}_{mark.name}"
        node = self.graph.create_node(op, target, args, name=name)
        node.meta.update(
            val=self._token, lohan=mark, phase=anchor.meta["phase"], block=anchor.meta["block"]
        )
        node.meta["root"] = node
        return node

    @cached_property
    def _token(self) -> torch.Tensor:
        """The fake result of an op that returns only an order: an empty tensor on the host."""
        values = (n.meta.get("val") for n in self.graph.nodes)
        mode = next(v.fake_mode for v in values if isinstance(v, FakeTensor))
        with mode:
            return torch.empty(0)

    # -- results ----------------------------------------------------------------------------

    def returns(self, node: fx.Node, value: Any, *, view_of: fx.Node | None = None) -> fx.Node:
        """Say what an inserted op returns (`value` is fake), on whose storage; returns `node`."""
        node.meta["val"] = value
        node.meta.pop("root", None)
        if isinstance(value, torch.Tensor):
            node.meta["root"] = view_of if view_of is not None else node
        return node

    def take(
        self,
        source: fx.Node,
        index: int,
        like: fx.Node,
        *,
        name: str,
        view_of: fx.Node | None = None,
    ) -> fx.Node:
        """Take result `index` out of a tuple-valued op of ours, behind its other results.

        It stands for `like` from here on.
        """
        last = source
        while is_getitem(last.next) and last.next.args[0] is source:
            last = last.next
        with self.graph.inserting_after(last):
            node = self.graph.create_node(
                "call_function", operator.getitem, (source, index), name=name
            )
        node.meta.update(
            lohan=dataclasses.replace(source.meta["lohan"], part=True),
            phase=source.meta["phase"],
            block=source.meta["block"],
        )
        return self.returns(node, like.meta["val"], view_of=view_of)

    @staticmethod
    def empty_like(node: fx.Node) -> torch.Tensor:
        """A fake tensor with the strides of `node`'s, on a storage of its own."""
        value = node.meta["val"]
        with value.fake_mode:
            return torch.empty_strided(
                value.size(), value.stride(), dtype=value.dtype, device=value.device
            )


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
                if self.verify is not None:
                    self.verify(rewrite)
                rewrite.graph.lint()
            except Exception as error:
                if isinstance(error, LohanError) and not isinstance(error, VerificationError):
                    raise
                raise VerificationError(
                    f"pass {step.name!r} (after {', '.join(done) or 'none'}): {error}"
                ) from error
            done.append(step.name)
            if self.observe is not None:
                self.observe(step.name, rewrite)


def backward_users(node: fx.Node) -> list[fx.Node]:
    """The nodes of the backward that read `node`."""
    return [user for user in node.users if user.meta.get("phase") == "backward"]


def replace_uses(old: fx.Node, new: fx.Node, users: Iterable[fx.Node]) -> None:
    """Make `users` read `new` where they read `old`; views among them share its storage then."""
    for user in list(users):
        user.replace_input_with(old, new)
        _move_view(user, new.meta["root"])


def _move_view(node: fx.Node, root: fx.Node) -> None:
    if is_view(node) and "lohan" not in node.meta:
        node.meta["root"] = root
        for user in node.users:
            _move_view(user, root)
