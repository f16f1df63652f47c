"""Replay views where they are used, so that a value is saved once a storage, by its root.

After this pass backward reads what exists before it only by the node that made the storage,
every view of a parameter stands right before the op that reads it, and the results of a
tuple-valued op follow it at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from lohan_fx.annotate import is_getitem, is_view
from lohan_fx.joint_graph import is_parameter
from lohan_fx.passes.base import Rewrite


@dataclass(frozen=True, slots=True)
class Normalize:
    """See the module's docstring. Options: none."""

    name: str = "normalize"

    def __call__(self, rewrite: Rewrite) -> None:
        graph = rewrite.graph
        _gather_results(graph)
        shared: dict[fx.Node, fx.Node] = {}
        for node in list(graph.nodes):
            if node.op in ("placeholder", "output") or is_getitem(node) or is_view(node):
                continue
            backward = node.meta["phase"] == "backward"
            private: dict[fx.Node, fx.Node] = {}
            for source in node.all_input_nodes:
                if not is_view(source):
                    continue
                root: fx.Node = source.meta["root"]
                if is_parameter(root):
                    memo = private
                elif backward and root.meta["phase"] == "forward":
                    memo = shared
                else:
                    continue
                node.replace_input_with(source, replay(graph, source, node, memo))
        for node in reversed(list(graph.nodes)):
            if node.op == "call_function" and not node.users and is_view(node):
                graph.erase_node(node)


def _gather_results(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if isinstance(node.meta.get("val"), (tuple, list)):
            last = node
            for result in sorted(filter(is_getitem, node.users), key=lambda u: u.args[1]):
                last.append(result)
                last = result


def replay(graph: fx.Graph, view: fx.Node, user: fx.Node, memo: dict[fx.Node, fx.Node]) -> fx.Node:
    """Clone a chain of views in front of `user`; clones are shared through `memo`."""
    if view in memo:
        return memo[view]
    if not is_view(view):
        return view
    env = {a: replay(graph, a, user, memo) for a in view.all_input_nodes}
    with graph.inserting_before(user):
        clone = graph.node_copy(view, env.__getitem__)
    clone.meta["phase"] = user.meta["phase"]
    clone.meta["block"] = user.meta["block"]
    memo[view] = clone
    return clone
