"""Make once what every block makes anew and backward reads: a mask of numbers, say.

``scaled_dot_product_attention`` turns a mask of booleans into one of numbers, in every layer the
same, and its backward reads it: as many residuals, or as many times recomputed from where the
positions are made. So values that backward reads, and that the same ops make of the same values,
become the first of them, made behind what it is made of, outside of the blocks.

The same ops on the same values: exact. Left alone are what parameters have a part in (activations:
what one block can make again of its input should not live from the first block to the last),
results of ops that draw, write, hold a graph or return several tensors, what the step returns
(callers may write into it), and values with views.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from lohan_fx._compat import storage_key
from lohan_fx.joint_copy import drop_dead
from lohan_fx.joint_graph import is_parameter, is_repeatable, storage_id

_LOCATION = ("nn_module_stack", "seq_nr", "stack_trace")
"""What says where an op stands: `annotate.mark_blocks` reads it."""


def merge_equal_values(graph: fx.Graph) -> int:
    """Rewrite a joint graph in place; nodes have ``meta["val"]`` and ``meta["phase"]``.

    Returns:
        how many values are made no more.
    """
    returned = {storage_id(node) for node in graph.output_node().all_input_nodes}
    numbers = _Numbers()
    learned: set[fx.Node] = set()
    first: dict[int, fx.Node] = {}
    shared: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "output" or node.meta["phase"] != "forward":
            continue
        number = numbers.add(node)
        if is_parameter(node) or not learned.isdisjoint(node.all_input_nodes):
            learned.add(node)
        if node in learned or storage_id(node) in returned or not _is_saved(node):
            continue
        kept = first.setdefault(number, node)
        if kept is not node:
            shared.setdefault(kept, []).append(node)
    for kept, others in shared.items():
        if any(_module(other) != _module(kept) for other in others):
            _move_out(graph, kept)
        for other in others:
            other.replace_all_uses_with(kept)
    drop_dead(graph)
    return sum(map(len, shared.values()))


class _Numbers:
    """Equal numbers for nodes whose results are equal: the same op on equal arguments."""

    def __init__(self) -> None:
        self._of_node: dict[fx.Node, int] = {}
        self._of_expression: dict[Hashable, int] = {}

    def add(self, node: fx.Node) -> int:
        """The number of a node whose arguments have theirs."""
        expression: Hashable = node
        if node.op == "call_function" and is_repeatable(node):
            expression = (node.target, self._hashable(node.args), self._hashable(node.kwargs))
        elif node.op == "get_attr":
            expression = node.target
        number = self._of_expression.setdefault(expression, len(self._of_expression))
        self._of_node[node] = number
        return number

    def _hashable(self, argument: Any) -> Hashable:
        """Equal for arguments that say the same. 1, 1.0, True and -0.0 are four things."""
        if isinstance(argument, fx.Node):
            return ("node", self._of_node[argument])
        if isinstance(argument, (tuple, list)):
            return ("tuple", *map(self._hashable, argument))
        if isinstance(argument, dict):
            items = ((key, self._hashable(value)) for key, value in sorted(argument.items()))
            return ("dict", *items)
        return (type(argument), repr(argument))


def _keys(node: fx.Node) -> set[int]:
    """Identities of all storages that the node returns."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return {storage_key(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}


def _is_saved(node: fx.Node) -> bool:
    """Whether the node is an op whose one result is a tensor of its own that backward reads, and
    that has no views."""
    key = storage_id(node)
    return (
        node.op == "call_function"
        and key is not None
        and is_repeatable(node)
        and all(key not in _keys(other) for other in (*node.all_input_nodes, *node.users))
        and any(user.op != "output" and user.meta["phase"] == "backward" for user in node.users)
    )


def _module(node: fx.Node) -> str | None:
    """The module whose forward made the node."""
    stack = node.meta.get("nn_module_stack")
    return str(list(stack.values())[-1][0]) if stack else None


def _move_out(graph: fx.Graph, node: fx.Node) -> None:
    """Let a node stand right behind what it is made of, as if it had been made there. Views and
    numbers in between, which cost nothing, go with it."""
    order = {n: k for k, n in enumerate(graph.nodes)}
    chain: dict[fx.Node, None] = {}
    anchors: list[fx.Node] = []

    def visit(n: fx.Node) -> None:
        for source in n.all_input_nodes:
            if source.op == "call_function" and source not in chain and _is_free(source):
                visit(source)
                chain[source] = None
            elif source not in chain:
                anchors.append(source)

    visit(node)
    compute = [n for n in graph.nodes if n.op not in ("placeholder", "get_attr")]
    last = max((order[a] for a in anchors if a.op != "placeholder"), default=-1)
    like = next((n for n in compute if order[n] >= last), node)
    if order[like] == last:
        like.append(node)
    else:  # what it is made of has no place of its own
        like.prepend(node)
    location = {key: like.meta[key] for key in _LOCATION if key in like.meta}
    made: dict[fx.Node, fx.Node] = {}
    for source in chain:
        with graph.inserting_before(node):
            copy = made[source] = graph.node_copy(source, lambda n: made.get(n, n))
        copy.meta["val"] = _value_of(copy)
        _locate(copy, location)
    for source, copy in made.items():
        node.replace_input_with(source, copy)
    _locate(node, location)


def _value_of(copy: fx.Node) -> torch.Tensor:
    """What a copied op returns: a number of its own, or a view of what the copy reads."""
    value: torch.Tensor = copy.meta["val"]
    with torch.no_grad():
        if not copy.all_input_nodes:
            return torch.empty_like(value)
        args, kwargs = fx.map_arg((copy.args, copy.kwargs), lambda n: n.meta["val"])
        target: Any = copy.target
        made: torch.Tensor = target(*args, **kwargs)
        return made


def _locate(node: fx.Node, location: dict[str, Any]) -> None:
    node.meta = {k: v for k, v in node.meta.items() if k not in _LOCATION} | location


def _is_free(node: fx.Node) -> bool:
    """Whether an op makes no memory worth mentioning: a view, or a single number."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not is_repeatable(node):
        return False
    if not node.all_input_nodes:
        return value.numel() <= 1
    return storage_id(node) in map(storage_id, node.all_input_nodes)
