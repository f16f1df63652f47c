"""Let a half that runs call what it calls directly: the last thing that happens to it.

torch's dispatcher takes some microseconds a call, and a layer of a transformer has more views and
ops of ours than kernels: with small kernels the device waits for them. So views become methods of
tensors, views that say the same become one, and ops of ours the functions behind them. Values, and
when memory is given back, stay what they are. What is printed, verified and simulated is the
program before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lohan_fx._compat import LazyGraphModule
from lohan_fx.runtime import ops

_aten = torch.ops.aten
_METHODS: dict[Any, str] = {
    _aten.view.default: "view",
    _aten._unsafe_view.default: "view",  # differs for autograd alone
    _aten.t.default: "t",
    _aten.transpose.int: "transpose",
    _aten.permute.default: "permute",
    _aten.unsqueeze.default: "unsqueeze",
    _aten.squeeze.dim: "squeeze",
    _aten.expand.default: "expand",
    _aten.select.int: "select",
}
_RESHAPES = (_aten.view.default, _aten._unsafe_view.default)


def direct_calls(half: fx.GraphModule) -> None:
    """Change a half in place; recompute regions, which the printed program shares, are copied."""
    for node in half.graph.find_nodes(op="call_module"):
        region = half.get_submodule(node.target)
        assert isinstance(region, fx.GraphModule)
        copied = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        copied.output(copied.graph_copy(region.graph, env))
        _direct(copied)
        half.add_submodule(
            node.target, LazyGraphModule(region, copied, class_name="RecomputeRegion")
        )
    _direct(half.graph)
    half.recompile()


def _direct(graph: fx.Graph) -> None:
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in ops.direct:
            node.target = ops.direct[node.target]
        elif node.target in _METHODS and not node.kwargs:
            source: Any = node.args[0]
            if node.target is _aten.t.default is source.target:  # transposed twice
                node.replace_all_uses_with(source.args[0])
                graph.erase_node(node)
                continue
            _skip_shape(node)
            key = (_METHODS[node.target], _hashable(node.args))
            first = seen.setdefault(key, node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)
    for node in reversed(seen.values()):
        if node.users:
            node.op, node.target = "call_method", _METHODS[node.target]
        else:
            graph.erase_node(node)


def _skip_shape(node: fx.Node) -> None:
    """Let a view of a contiguous tensor's view be one of that tensor."""
    source: Any = node.args[0]
    if not all(n.op == "call_function" and n.target in _RESHAPES for n in (node, source)):
        return
    base: Any = source.args[0]
    value = base.meta.get("val")
    if isinstance(value, torch.Tensor) and value.is_contiguous():
        node.args = (base, *node.args[1:])


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, (list, tuple)) else value
