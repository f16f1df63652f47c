"""Insert `fetch_unit` / `wait_unit` for every window: of units that live off the device, and of
those there that keep no compute copy.

Ops inside a window read the parameters out of the window's flat buffer; the parameters then are
no inputs of the program any more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from lohan_fx.annotate import UnitLayout
from lohan_fx.joint_graph import is_parameter
from lohan_fx.passes.base import Mark, Rewrite, replace_uses
from lohan_fx.program import window_storage
from lohan_fx.runtime import ops


@dataclass(frozen=True, slots=True)
class Parameters:
    """Options: none; the plan's windows say when a unit is on the device."""

    name: str = "parameters"

    def __call__(self, rewrite: Rewrite) -> None:
        inputs = parameter_inputs(rewrite)
        position = positions(rewrite)
        for layout in rewrite.layouts:
            decision = rewrite.plan.units[layout.name]
            if decision.tier != "device" or decision.casts:
                _windows(rewrite, layout, inputs, position)
        for nodes in inputs.values():
            for node in nodes:
                if not node.users:
                    rewrite.graph.erase_node(node)


def _windows(
    rewrite: Rewrite,
    layout: UnitLayout,
    inputs: dict[str, list[fx.Node]],
    position: dict[fx.Node, int],
) -> None:
    w = rewrite.workload
    decision = rewrite.plan.units[layout.name]
    key = rewrite.units[layout.name]
    parameters = [node for s in layout.slices for node in inputs.get(s.name, ())]
    if not parameters:
        return
    flat_value, slice_values = flat_values(layout, parameters[0])
    for k, window in enumerate(decision.windows):
        name = window_storage(layout.name, k)
        flat = rewrite.insert_before(
            window.fetch_before,
            ops.fetch_unit,
            (rewrite.run, key, k),
            Mark(
                kind="fetch_unit",
                name=name,
                key=key,
                tier=decision.fetch_tier,
                num_bytes=0 if decision.casts else w.unit_by_name[layout.name].compute_bytes,
            ),
        )
        rewrite.returns(flat, flat_value)
        ready = rewrite.insert_before(
            window.first_use,
            ops.wait_unit,
            (flat, rewrite.run, key, k),
            Mark(kind="wait_unit", name=name, key=key),
        )
        rewrite.returns(ready, slice_values)
        lo, hi = w.op_index[window.first_use], w.op_index[window.last_use]
        for j, s in enumerate(layout.slices):
            for parameter in inputs.get(s.name, ()):
                users = [u for u in parameter.users if lo <= position.get(u, -1) <= hi]
                if users:
                    again = rewrite.take(ready, j, parameter, name=parameter.name, view_of=flat)
                    replace_uses(parameter, again, users)


def parameter_inputs(rewrite: Rewrite) -> dict[str, list[fx.Node]]:
    """First name of a parameter → its placeholders (a tied one may have several)."""
    found: dict[str, list[fx.Node]] = {}
    for node in rewrite.graph.find_nodes(op="placeholder"):
        if is_parameter(node):
            name = rewrite.captured.first_name(node.meta["role"].target)
            found.setdefault(name, []).append(node)
    return found


def positions(rewrite: Rewrite) -> dict[fx.Node, int]:
    """Node → index of the op that it is, or stands before (views, regions)."""
    index = {rewrite.nodes[op.name]: i for i, op in enumerate(rewrite.workload.ops)}
    found: dict[fx.Node, int] = {}
    at = len(index)
    for node in reversed(rewrite.graph.nodes):
        at = index.get(node, at)
        found[node] = at
    return found


def flat_values(
    layout: UnitLayout, parameter: fx.Node
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The fake flat buffer of a unit, and its slices; all windows of the unit share them."""
    like = parameter.meta["val"]
    with like.fake_mode, torch.no_grad():
        flat = torch.empty(layout.numel, dtype=layout.copy_dtype, device=like.device)
        return flat, tuple(flat.as_strided(s.shape, s.stride, s.offset) for s in layout.slices)
