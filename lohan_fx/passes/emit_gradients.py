"""Take the gradients of managed parameters out of the outputs: `emit_gradients(grads, unit)`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import fx

from lohan_fx.annotate import is_view
from lohan_fx.passes.base import Mark, Rewrite
from lohan_fx.passes.normalize import replay
from lohan_fx.program import written_gradient
from lohan_fx.runtime import ops


@dataclass(frozen=True, slots=True)
class EmitGradients:
    """Options: none; the plan says after which op a unit's gradients leave the program."""

    name: str = "emit_gradients"

    def __call__(self, rewrite: Rewrite) -> None:
        output = rewrite.graph.output_node()
        returned: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        gradient: dict[str, fx.Node] = {}
        trained = {s.name for u in rewrite.layouts if u.trains for s in u.slices}
        for i, (node, role) in enumerate(zip(returned, rewrite.captured.outputs, strict=True)):
            name = rewrite.captured.first_name(role.target)
            if role.kind == "gradient" and name in trained:
                gradient[name] = node
                returned[i] = None
        for layout in rewrite.layouts:
            if not rewrite.workload.unit_by_name[layout.name].trainable:
                continue
            gradients = [gradient.get(s.name) for s in layout.slices]
            if rewrite.plan.units[layout.name].gradients == "direct":
                _write(rewrite, layout.name, gradients)
            else:
                self._emit(rewrite, layout.name, gradients)
        output.args = (tuple(returned),)
        for node in reversed(list(rewrite.graph.nodes)):  # else they keep gradients alive
            if node.op == "call_function" and not node.users and is_view(node):
                rewrite.graph.erase_node(node)

    @staticmethod
    def _emit(rewrite: Rewrite, name: str, gradients: list[fx.Node | None]) -> None:
        unit = rewrite.workload.unit_by_name[name]
        decision = rewrite.plan.units[name]
        assert decision.emit_after is not None
        key = rewrite.units[name]
        moves = decision.gradient_tier != "device"
        mark = Mark(
            kind="emit_gradients",
            name=name,
            key=key,
            tier=decision.gradient_tier,
            num_bytes=unit.gradient_bytes if moves else 0,
        )
        token = rewrite.insert_after(
            decision.emit_after, ops.emit_gradients, (gradients, rewrite.run, key), mark
        )
        memo: dict[fx.Node, fx.Node] = {}
        gradients = [g if g is None else replay(rewrite.graph, g, token, memo) for g in gradients]
        for clone in memo.values():  # they stand with the op that they are made for
            clone.meta["lohan"] = dataclasses.replace(mark, part=True)
        token.args = (gradients, rewrite.run, key)
        if moves:
            assert decision.release_gradients_after is not None
            rewrite.insert_after(
                decision.release_gradients_after,
                ops.release_gradients,
                (gradients, token, rewrite.run, key),
                Mark(kind="release_gradients", name=name, key=key),
            )


def _write(rewrite: Rewrite, name: str, gradients: list[fx.Node | None]) -> None:
    """Each gradient goes to the host right after the op that makes it (GO-MemFerry §IV)."""
    w = rewrite.workload
    decision = rewrite.plan.units[name]
    key = rewrite.units[name]
    tokens = []
    for value in dict.fromkeys(w.unit_by_name[name].gradients):
        taken = [(j, g) for j, g in enumerate(gradients) if g is not None and _is_of(g, value)]
        made = max(w.producer.get(value, -1), w.num_forward_ops)
        mark = Mark(
            kind="write_gradient",
            name=written_gradient(name, value),
            key=key,
            tier=decision.tier,
            num_bytes=w.values[value].num_bytes,
        )
        token = rewrite.insert_after(w.ops[made].name, ops.write_gradient, (), mark)
        memo: dict[fx.Node, fx.Node] = {}
        views = [replay(rewrite.graph, g, token, memo) for _, g in taken]
        for clone in memo.values():
            clone.meta["lohan"] = dataclasses.replace(mark, part=True)
        token.args = (views, rewrite.run, key, [j for j, _ in taken])
        tokens.append(token)
    assert decision.emit_after is not None
    mark = Mark(kind="emit_gradients", name=name, key=key, tier=decision.tier)
    rewrite.insert_after(decision.emit_after, ops.emit_written, (tokens, rewrite.run, key), mark)


def _is_of(gradient: fx.Node, value: str) -> bool:
    root = gradient.meta["root"]
    assert isinstance(root, fx.Node)
    return root.name == value
