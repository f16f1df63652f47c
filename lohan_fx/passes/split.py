"""Cut the rewritten graph at the boundary between forward and backward: the last act.

Each half is a boxed GraphModule: it takes its inputs in one list and empties it, so that a saved
tensor dies at its last use.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from lohan_fx._compat import boxed
from lohan_fx.capture import InputRole, OutputRole
from lohan_fx.passes.base import Rewrite


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """The two programs that run.

    forward(list of `forward_inputs`) returns the outputs with a role in `forward_outputs`, then
    `num_saved` tensors. backward(list of `backward_inputs`, then the saved tensors) returns the
    gradients in `backward_outputs` that nothing in the program consumed.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    forward_inputs: tuple[InputRole, ...]
    forward_outputs: tuple[OutputRole, ...]
    backward_inputs: tuple[InputRole, ...]
    backward_outputs: tuple[OutputRole, ...]
    num_saved: int


def split(rewrite: Rewrite) -> Halves:
    """Cut the program. A buffer that forward changes is saved as it was, by a copy."""
    graph = rewrite.graph
    body = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    ahead = [n for n in body if n.meta["phase"] == "forward"]
    behind = [n for n in body if n.meta["phase"] == "backward"]
    returned = list(zip(graph.output_node().args[0], rewrite.captured.outputs, strict=True))  # type: ignore[arg-type]
    out_forward = [(n, r) for n, r in returned if r.kind != "gradient"]
    out_backward = [(n, r) for n, r in returned if r.kind == "gradient" and n is not None]
    mutated = {(r.target, r.index) for _, r in out_forward if r.kind == "mutation"}

    in_behind = set(behind)
    needed = [
        n
        for n in graph.nodes
        if n not in in_behind
        and n.op != "output"
        and (
            any(u in in_behind for u in n.users)
            or any(n is g for g, _ in out_backward)
        )
    ]
    direct = [
        n
        for n in needed
        if n.op == "get_attr"
        or (
            n.op == "placeholder"
            and n.meta["role"].kind in ("parameter", "buffer", "tangent")
            and (n.meta["role"].target, n.meta["role"].index) not in mutated
        )
    ]
    saved = [n for n in needed if n not in set(direct)]

    forward = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    takes = [
        n
        for n in graph.find_nodes(op="placeholder")
        if n.meta["role"].kind != "tangent"
        and (any(u not in in_behind for u in n.users) or n in set(saved))
    ]
    for node in takes:
        env[node] = forward.node_copy(node)
    copies: dict[fx.Node, fx.Node] = {}
    for node in saved:
        role = node.meta.get("role")
        if role is not None and (role.target, role.index) in mutated:
            copies[node] = forward.call_function(torch.ops.aten.clone.default, (env[node],))
    for node in ahead:
        env[node] = forward.node_copy(node, env.__getitem__)
    forward.output(
        tuple(env[n] if isinstance(n, fx.Node) else n for n, _ in out_forward)
        + tuple(copies.get(n, env[n]) for n in saved)
    )
    halves_backward = None
    if behind or out_backward:
        backward = fx.Graph()
        env = {}
        for node in (*[n for n in direct if n.op == "placeholder"], *saved):
            env[node] = backward.placeholder(node.name)
            env[node].meta = dict(node.meta)
        for node in direct:
            if node.op == "get_attr":
                env[node] = backward.node_copy(node)
        for node in behind:
            env[node] = backward.node_copy(node, env.__getitem__)
        backward.output(tuple(env[n] for n, _ in out_backward))
        halves_backward = boxed(rewrite.module, backward)
    return Halves(
        forward=boxed(rewrite.module, forward),
        backward=halves_backward,
        forward_inputs=tuple(n.meta["role"] for n in takes),
        forward_outputs=tuple(r for _, r in out_forward),
        backward_inputs=tuple(n.meta["role"] for n in direct if n.op == "placeholder"),
        backward_outputs=tuple(r for _, r in out_backward),
        num_saved=len(saved),
    )
