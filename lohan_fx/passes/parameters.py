"""Insert `fetch_unit` / `wait_unit` for every window of every unit that lives off the device.

Ops inside a window read the parameters out of the window's flat buffer; the parameters then are
no inputs of the program any more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from lohan_fx.annotate import Slice, UnitLayout
from lohan_fx.passes.base import Mark, Rewrite
from lohan_fx.passes.normalize import is_parameter
from lohan_fx.program import window_storage
from lohan_fx.runtime import ops


@dataclass(frozen=True, slots=True)
class Parameters:
    """Options: none; the plan's windows say when a unit is on the device."""

    name: str = "parameters"

    def __call__(self, rewrite: Rewrite) -> None:
        inputs = _placeholders(rewrite)
        position = _positions(rewrite)
        for layout in rewrite.layouts:
            if rewrite.plan.units[layout.name].tier == "device":
                continue
            self._windows(rewrite, layout, inputs, position)
        for node in (n for nodes in inputs.values() for n in nodes):
            if not node.users:
                rewrite.graph.erase_node(node)

    @staticmethod
    def _windows(
        rewrite: Rewrite,
        layout: UnitLayout,
        inputs: dict[str, list[fx.Node]],
        position: dict[fx.Node, int],
    ) -> None:
        w = rewrite.workload
        unit = w.unit_by_name[layout.name]
        decision = rewrite.plan.units[layout.name]
        key = rewrite.units[layout.name]
        for k, window in enumerate(decision.windows):
            name = window_storage(layout.name, k)
            issue = rewrite.op_nodes[window.fetch_before]
            mark = Mark(
                kind="fetch_unit",
                name=name,
                key=key,
                tier=decision.tier,
                num_bytes=unit.compute_bytes,
            )
            flat = rewrite.insert(
                rewrite.before(window.fetch_before, mark.rank),
                ops.fetch_unit,
                (rewrite.run, key, k),
                mark,
                _flat(rewrite, layout),
                behind=False,
                phase=issue.meta["phase"],
                block=issue.meta["block"],
            )
            first = rewrite.op_nodes[window.first_use]
            mark = Mark(kind="wait_unit", name=name, key=key)
            ready = rewrite.insert(
                rewrite.before(window.first_use, mark.rank),
                ops.wait_unit,
                (flat, rewrite.run, key, k),
                mark,
                tuple(_view(flat.meta["val"], s) for s in layout.slices),
                behind=False,
                phase=first.meta["phase"],
                block=first.meta["block"],
            )
            lo, hi = w.op_index[window.first_use], w.op_index[window.last_use]
            for j, s in enumerate(layout.slices):
                for parameter in inputs.get(s.name, ()):
                    users = [u for u in parameter.users if lo <= position.get(u, -1) <= hi]
                    if users:
                        again = rewrite.take(ready, j, parameter, view_of=flat)
                        for user in users:
                            user.replace_input_with(parameter, again)


def _placeholders(rewrite: Rewrite) -> dict[str, list[fx.Node]]:
    """First name of a parameter → its placeholders (a tied one may have several)."""
    found: dict[str, list[fx.Node]] = {}
    for node in rewrite.graph.find_nodes(op="placeholder"):
        if is_parameter(node):
            name = rewrite.captured.first_name(node.meta["role"].target)
            found.setdefault(name, []).append(node)
    return found


def _positions(rewrite: Rewrite) -> dict[fx.Node, int]:
    """Node → index of the op that it is, or stands before (views, regions)."""
    index = {rewrite.op_nodes[op.name]: i for i, op in enumerate(rewrite.workload.ops)}
    found: dict[fx.Node, int] = {}
    at = len(index)
    for node in reversed(list(rewrite.graph.nodes)):
        at = index.get(node, at)
        found[node] = at
    return found


def _flat(rewrite: Rewrite, layout: UnitLayout) -> torch.Tensor:
    like = next(
        n.meta["val"] for n in rewrite.graph.find_nodes(op="placeholder") if is_parameter(n)
    )
    with like.fake_mode:
        return torch.empty(layout.numel, dtype=layout.copy_dtype, device=like.device)


def _view(flat: torch.Tensor, s: Slice) -> torch.Tensor:
    return flat.as_strided(s.shape, s.stride, s.offset)
