"""Insert `recompute_k(…)`: a call_module that holds the cloned forward ops of one region."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import fx

from lohan_fx._compat import LazyGraphModule
from lohan_fx.annotate import is_getitem, is_view
from lohan_fx.passes.base import Mark, Rewrite, backward_users, replace_uses
from lohan_fx.program import Region


@dataclass(frozen=True, slots=True)
class Recompute:
    """Options: none; the plan's regions say what is run again, and before which op."""

    name: str = "recompute"

    def __call__(self, rewrite: Rewrite) -> None:
        current: dict[str, fx.Node] = {}
        for k, region in enumerate(rewrite.regions):
            target = f"recompute_{k}_{re.sub(r'[^0-9a-zA-Z_]', '_', region.name)}"
            rewrite.module.add_submodule(target, _body(rewrite, region))
            wanted = [rewrite.nodes[v] for v in region.wanted]
            call = rewrite.insert_before(
                rewrite.workload.ops[region.anchor].name,
                target,
                tuple(current.get(v, rewrite.nodes[v]) for v in region.reads),
                Mark(kind="recompute", name=region.name, key=k),
            )
            rewrite.returns(call, tuple(node.meta["val"] for node in wanted))
            for j, node in enumerate(wanted):
                users = backward_users(node)
                again = rewrite.take(call, j, node, name=f"{node.name}_again")
                replace_uses(node, again, users)
                current[node.name] = again


def _body(rewrite: Rewrite, region: Region) -> fx.GraphModule:
    """Clone the region's ops, with the views between them, into a graph of its own."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for v in region.reads:
        node = rewrite.nodes[v]
        env[node] = graph.placeholder(v)
        env[node].meta = {"val": node.meta["val"], "root": node}

    def clone(node: fx.Node) -> None:
        if node not in env:
            for source in node.all_input_nodes:
                clone(source)
            env[node] = graph.node_copy(node, env.__getitem__)

    for i in region.ops:
        op = rewrite.nodes[rewrite.workload.ops[i].name]
        clone(op)
        for user in op.users:
            if is_getitem(user) and not is_view(user):
                clone(user)
    graph.output(tuple(env[rewrite.nodes[v]] for v in region.wanted))
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
    for made in env.values():  # a root is a node of the same graph
        if "root" in made.meta:
            made.meta["root"] = env[made.meta["root"]]
    return LazyGraphModule(rewrite.module, graph, class_name="RecomputeRegion")
