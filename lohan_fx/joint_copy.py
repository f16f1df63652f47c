"""AOTAutograd's joint graph → the same step as everything after capture reads it.

Forward nodes come first, names are readable, dead ops are gone, every gradient has memory of its
own; and where a fake tensor or a kernel's rule differs from what eager mode does, eager mode wins.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from lohan_fx import _compat
from lohan_fx.errors import CaptureError
from lohan_fx.joint_graph import InputRole, OutputRole, is_repeatable, op_name, placeholder_name


def copy_joint(
    source: fx.Graph,
    roles: Mapping[fx.Node, InputRole],
    returned: Sequence[tuple[Any, OutputRole]],
) -> fx.Graph:
    """Copy a joint graph: forward nodes first, readable names, what nobody reads left out.

    Args:
        roles: the placeholders that stay; others must be unread, or symbols of fixed value.
        returned: the outputs that stay, in order.
    """
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {}
    for node in source.find_nodes(op="placeholder"):
        if node in roles:
            role = roles[node]
            env[node] = made = graph.placeholder(placeholder_name(role))
            phase = "backward" if role.kind == "tangent" else "forward"
            made.meta = {"val": node.meta["val"], "role": role, "phase": phase}
        elif isinstance(node.meta.get("val"), (int, torch.SymInt)):
            env[node] = int(node.meta["val"])
    body = [n for n in source.nodes if n.op not in ("placeholder", "output")]
    for node in sorted(body, key=lambda n: _phase(n) == "backward"):  # stable
        env[node] = made = _copy(graph, node, env)
        made.meta["phase"] = _phase(node)
        _check_layout(made)
    older = {
        _compat.storage_key(value)
        for n in graph.nodes
        if (n.op == "placeholder" or n.meta["phase"] == "forward")
        and isinstance(value := n.meta.get("val"), torch.Tensor)
    }
    outputs = [(env[v] if isinstance(v, fx.Node) else v, role) for v, role in returned]
    graph.output(tuple(_own(graph, v, older) if r.kind == "gradient" else v for v, r in outputs))
    _drop_aliases(graph)
    drop_dead(graph)
    return graph


def _phase(node: fx.Node) -> str:
    return "backward" if "backward" in str(node.meta.get("partitioner_tag")) else "forward"


def _copy(graph: fx.Graph, node: fx.Node, env: Mapping[fx.Node, Any]) -> fx.Node:
    """Copy a node; one that takes a result out of a tuple is named after the op."""
    name = node.name
    if node.target is operator.getitem:
        source: Any = node.args[0]
        name = f"{env[source].name}_r{node.args[1]}"
    args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
    made = graph.create_node(node.op, node.target, args, kwargs, name, node.type)
    made.meta = dict(node.meta)
    _correct_statistics(made)
    _round_dropout(made)
    return made


def _round_dropout(node: fx.Node) -> None:
    """Let the gradient of dropout be scaled by a rounded factor, as eager mode's is on a CPU.

    There it is a product with a mask of zeros and factors, in the input's dtype.
    """
    if node.target is torch.ops.aten.native_dropout_backward.default:
        arguments: Any = node.args
        gradient, mask, scale = arguments
        value = gradient.meta["val"]
        if value.device.type == "cpu":
            node.args = (gradient, mask, torch.tensor(scale, dtype=value.dtype).item())


_NORMS = {
    torch.ops.aten.native_layer_norm.default,
    torch.ops.aten.native_group_norm.default,
    torch.ops.aten._native_batch_norm_legit_functional.default,
}


def _correct_statistics(node: fx.Node) -> None:
    """Give mean and inverse deviation, as a normalization saves them, the dtype that they have.

    On a CPU it is that of the first parameter or running statistic (is_mixed_type in
    ATen/native/cpu/mixed_data_type.h); a fake tensor says that it is the input's. The two differ
    in autocast regions.
    """
    source: Any = node.args[0] if node.target is operator.getitem else node
    if source.target not in _NORMS:
        return
    x, *others = [a.meta["val"] for a in source.args if isinstance(a, fx.Node)]
    if x.device.type != "cpu" or not others or others[0].dtype == x.dtype:
        return
    if source is node:
        y, mean, deviation, *rest = node.meta["val"]
        with mean.fake_mode:
            statistics = [t.to(others[0].dtype) for t in (mean, deviation)]
        node.meta["val"] = (y, *statistics, *rest)
    else:
        node.meta["val"] = source.meta["val"][node.args[1]]


def _own(graph: fx.Graph, gradient: fx.Node, older: Container[int]) -> fx.Node:
    """A gradient with memory that backward made: a copy, if it is a view of something `older`.

    (Of a tangent: the gradient of a plain sum; of a saved tensor: a straight-through estimator.)
    """
    value = gradient.meta["val"]
    if _compat.storage_key(value) not in older:
        return gradient
    with torch.no_grad():
        copied = value.clone()
    node = graph.call_function(torch.ops.aten.clone.default, (gradient,))
    node.meta = {**gradient.meta, "val": copied, "phase": "backward"}
    return node


def _check_layout(node: fx.Node) -> None:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and value.layout != torch.strided:
        raise CaptureError(
            f"{op_name(node)} makes a tensor of layout {value.layout}: lohan_fx moves "
            "strided tensors only (an embedding with sparse=True has a sparse gradient)"
        )


def _drop_aliases(graph: fx.Graph) -> None:
    """Let ops read through ``detach`` and ``alias``: to them, these return what they are given."""
    identities = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
    for node in graph.nodes:
        if node.target in identities:
            node.replace_all_uses_with(node.args[0], lambda user: user.op != "output")


def drop_dead(graph: fx.Graph) -> None:
    """Remove what nobody reads, but never an op that draws randomness: eager draws it too."""
    for node in reversed(list(graph.nodes)):
        if node.users or node.op == "output":
            continue
        if node.op == "placeholder":
            if node.meta["role"].kind in ("parameter", "buffer"):
                graph.erase_node(node)
        elif is_repeatable(node):
            graph.erase_node(node)


def constants_of(source: fx.GraphModule, graph: fx.Graph) -> dict[str, Any]:
    """Tensors that the forward makes from Python numbers, as real tensors."""
    found: dict[str, Any] = {}
    for node in graph.find_nodes(op="get_attr"):
        value = getattr(source, node.target)
        if isinstance(value, _compat.FakeTensor):
            value = value.constant
            if value is None:
                raise CaptureError(
                    f"constant {node.target} of the forward has no value while tracing: make it "
                    "a buffer of the module"
                )
        found[node.target] = value
    return found
