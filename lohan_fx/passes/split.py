"""Cut the rewritten graph at the boundary between forward and backward.

Each half is a boxed GraphModule: it takes its inputs in one list and empties it, so that a saved
tensor dies at its last use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lohan_fx._compat import boxed
from lohan_fx.joint_graph import InputRole, OutputRole
from lohan_fx.passes.base import Rewrite


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """The two programs that run.

    forward(list of `forward_inputs`) returns the outputs with a role in `forward_outputs`, then
    `num_saved` tensors. backward(list of `backward_inputs`, then the saved tensors) returns the
    gradients in `backward_outputs` that nothing in the program consumed. `reachable` are those of
    the saved tensors that user code has, too: (index, as what).
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    forward_inputs: tuple[InputRole, ...]
    forward_outputs: tuple[OutputRole, ...]
    backward_inputs: tuple[InputRole, ...]
    backward_outputs: tuple[OutputRole, ...]
    num_saved: int
    reachable: tuple[tuple[int, str], ...]


def split(rewrite: Rewrite) -> Halves:
    """Cut the program. A buffer or input that forward changes is saved as it was, by a copy."""
    graph = rewrite.graph
    nodes = [n for n in graph.nodes if n.op != "output"]
    flat: Any = graph.output_node().args[0]
    returned = list(zip(flat, rewrite.captured.outputs, strict=True))
    out_forward = [(n, r) for n, r in returned if r.kind != "gradient"]
    out_backward = [(n, r) for n, r in returned if r.kind == "gradient" and n is not None]
    written = {(r.target, r.index) for _, r in out_forward if r.kind == "mutation"}

    def in_backward(node: fx.Node) -> bool:
        return node.op not in ("placeholder", "output") and node.meta["phase"] == "backward"

    def is_changed(node: fx.Node) -> bool:
        """Whether forward changes this buffer or input."""
        role = node.meta.get("role")
        return (
            role is not None
            and role.kind in ("buffer", "input")
            and (role.target, role.index) in written
        )

    def is_direct(node: fx.Node) -> bool:
        """Whether backward finds the value again by itself, where forward found it."""
        if node.op != "placeholder":
            return node.op == "get_attr"
        return node.meta["role"].kind != "input" and not is_changed(node)

    wanted = {n for n, _ in out_backward}
    needed = [
        n for n in nodes if not in_backward(n) and (n in wanted or any(map(in_backward, n.users)))
    ]
    direct = [n for n in needed if is_direct(n)]
    saved = [n for n in needed if not is_direct(n)]

    forward = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    kept, constants = set(saved), {n for n in direct if n.op == "get_attr"}
    takes = [
        n
        for n in graph.find_nodes(op="placeholder")
        if n.meta["role"].kind != "tangent"
        and (n in kept or any(not in_backward(u) for u in n.users))
    ]
    for node in takes:
        env[node] = forward.node_copy(node)
    copies = {
        n: forward.call_function(torch.ops.aten.clone.default, (env[n],))
        for n in saved
        if is_changed(n)
    }
    for node in nodes:
        if node.op != "placeholder" and not in_backward(node):
            env[node] = forward.node_copy(node, env.__getitem__)
    forward.output(
        (
            *(env[n] if isinstance(n, fx.Node) else n for n, _ in out_forward),
            *(copies.get(n, env[n]) for n in saved),
        )
    )

    backward = fx.Graph()
    env = {}
    inputs = [n for n in direct if n.op == "placeholder"]
    for node in (*inputs, *saved):
        env[node] = backward.placeholder(node.name)
        env[node].meta = dict(node.meta)
    for node in nodes:
        if in_backward(node) or node in constants:
            env[node] = backward.node_copy(node, env.__getitem__)
    backward.output(tuple(env[n] for n, _ in out_backward))
    return Halves(
        forward=boxed(rewrite.module, forward),
        backward=boxed(rewrite.module, backward) if rewrite.captured.has_backward else None,
        forward_inputs=tuple(n.meta["role"] for n in takes),
        forward_outputs=tuple(r for _, r in out_forward),
        backward_inputs=tuple(n.meta["role"] for n in inputs),
        backward_outputs=tuple(r for _, r in out_backward),
        num_saved=len(saved),
        reachable=tuple(
            (index, what)
            for index, n in enumerate(saved)
            if n not in copies and (what := _of_user(n, out_forward))
        ),
    )


def _of_user(saved: fx.Node, returned: Sequence[tuple[fx.Node, OutputRole]]) -> str:
    """What a saved tensor is to user code; empty if it has none of its memory."""
    root = saved.meta.get("root", saved)
    if root.op == "placeholder":
        return f"input {root.meta['role'].index}" if root.meta["role"].kind == "input" else ""
    outputs = [
        r.index
        for n, r in returned
        if r.kind == "output" and isinstance(n, fx.Node) and n.meta.get("root", n) is root
    ]
    return f"output {outputs[0]}" if outputs else ""
