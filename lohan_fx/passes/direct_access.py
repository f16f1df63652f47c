"""Insert `host_view` for units that ops read where they lie, in host memory (MemFerry §IV).

Ops of such a unit outside of its fetch windows read views of its host buffer; the parameters then
are no inputs of the program any more.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from lohan_fx.annotate import UnitLayout
from lohan_fx.passes.base import Mark, Rewrite, replace_uses
from lohan_fx.passes.parameters import flat_values, parameter_inputs, positions
from lohan_fx.program import host_view_name
from lohan_fx.runtime import ops
from lohan_fx.workload import Phase


@dataclass(frozen=True, slots=True)
class DirectAccess:
    """Options: none; the plan says which units are read directly."""

    name: str = "direct_access"

    def __call__(self, rewrite: Rewrite) -> None:
        direct = [u for u in rewrite.layouts if rewrite.plan.units[u.name].access == "direct"]
        if not direct:
            return
        inputs = parameter_inputs(rewrite)
        position = positions(rewrite)
        read_bytes = {
            x.name: x.num_bytes for x in rewrite.program.instructions if x.kind == "host_view"
        }
        for layout in direct:
            for phase in ("forward", "backward"):
                _view(rewrite, layout, phase, inputs, position, read_bytes)
            for s in layout.slices:
                for node in inputs.get(s.name, ()):
                    if not node.users:
                        rewrite.graph.erase_node(node)


def _view(
    rewrite: Rewrite,
    layout: UnitLayout,
    phase: Phase,
    inputs: dict[str, list[fx.Node]],
    position: dict[fx.Node, int],
    read_bytes: dict[str, int],
) -> None:
    uses = [
        (j, parameter, [u for u in parameter.users if u.meta.get("phase") == phase])
        for j, s in enumerate(layout.slices)
        for parameter in inputs.get(s.name, ())
    ]
    uses = [(j, parameter, users) for j, parameter, users in uses if users]
    if not uses:
        return
    first = min(position[u] for _, _, users in uses for u in users)
    name = host_view_name(layout.name, phase)
    key = rewrite.units[layout.name]
    view = rewrite.insert_before(
        rewrite.workload.ops[first].name,
        ops.host_view,
        (rewrite.run, key, int(phase == "backward"), read_bytes[name]),
        Mark(kind="host_view", name=name, key=key, tier="host", num_bytes=read_bytes[name]),
    )
    rewrite.returns(view, flat_values(layout, uses[0][1])[1])
    for j, parameter, users in uses:
        again = rewrite.take(view, j, parameter, name=parameter.name, view_of=view)
        replace_uses(parameter, again, users)
