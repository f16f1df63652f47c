"""Insert `recompute_k(…)`: a call_module that holds the cloned forward ops of one region."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import fx

from lohan_fx.annotate import is_getitem, is_view
from lohan_fx.passes.base import Mark, Rewrite, replace_uses
from lohan_fx.program import Region


@dataclass(frozen=True, slots=True)
class Recompute:
    """Options: none; the plan's regions say what is run again, and before which op."""

    name: str = "recompute"

    def __call__(self, rewrite: Rewrite) -> None:
        current: dict[str, fx.Node] = {}
        by_name = {n.name: n for n in rewrite.graph.nodes}
        for k, region in enumerate(rewrite.regions):
            body, sources = _region_body(rewrite, region, by_name)
            target = f"recompute_{k}_{re.sub(r'[^0-9a-zA-Z_]', '_', region.name)}"
            rewrite.module.add_submodule(target, body)
            mark = Mark(kind="recompute", name=region.name, key=k)
            anchor = rewrite.workload.ops[region.anchor].name
            call = rewrite.insert(
                rewrite.before(anchor, mark.rank),
                target,
                tuple(current.get(s.name, s) for s in sources),
                mark,
                tuple(by_name[v].meta["val"] for v in region.wanted),
                behind=False,
                phase="backward",
                block=rewrite.op_nodes[anchor].meta["block"],
            )
            for j, v in enumerate(region.wanted):
                original = by_name[v]
                again = rewrite.take(call, j, original, view_of=None)
                users = [u for u in original.users if u.meta.get("phase") == "backward"]
                replace_uses(original, again, (u for u in users if u is not call))
                current[v] = again


def _region_body(
    rewrite: Rewrite, region: Region, by_name: dict[str, fx.Node]
) -> tuple[fx.GraphModule, list[fx.Node]]:
    """Clone the region's ops, with the views between them, into a graph of its own."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    sources: list[fx.Node] = []
    for v in region.reads:
        sources.append(by_name[v])
        env[by_name[v]] = graph.placeholder(v)
        env[by_name[v]].meta = {"val": by_name[v].meta["val"]}

    def clone(node: fx.Node) -> fx.Node:
        if node in env:
            return env[node]
        for source in node.all_input_nodes:
            clone(source)
        made = graph.node_copy(node, env.__getitem__)
        env[node] = made
        return made

    for i in region.ops:
        op = rewrite.op_nodes[rewrite.workload.ops[i].name]
        clone(op)
        for user in op.users:
            if is_getitem(user) and not is_view(user):
                clone(user)
    graph.output(tuple(env[by_name[v]] for v in region.wanted))
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
    body = fx.GraphModule(rewrite.module, graph, class_name="RecomputeRegion")
    return body, sources
