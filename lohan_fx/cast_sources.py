"""Let backward make again what forward cast to a wider dtype, instead of saving it.

A norm in float32 around bfloat16 (Llama's RMSNorm and its kin) saves the float32 copy of its input:
twice the bytes of the input itself, which nothing else saves. Worse, that input is the block's: a
step in which no block input is saved leaves LoHan's A_interBlock (§IV-B) empty, and what recomputes
one block begins at the embedding. So

    forward   x [bfloat16] → cast → c [float32] → …          saved: c
    backward  … c …

becomes

    forward   x → cast → c → …                               saved: x
    backward  x → cast → c' → … c' …

The same op on the same values: exact. Left alone are casts that backward would have to hold more
for: of a part of a storage that is larger than the cast and not read in backward anyway; those
whose result the step returns; and those of what the step is given: parameters would have to come
back for it, inputs and buffers may be written before backward.

A result that is such a source may not be written before backward then, though plain PyTorch, which
saved the cast, would not mind: `runtime.written` refuses the backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lohan_fx.joint_copy import drop_dead
from lohan_fx.joint_graph import storage_id

_CAST = torch.ops.aten._to_copy.default

_Read = tuple[fx.Node, fx.Node]
"""What is read, and the op of backward that reads it."""


def save_sources_of_casts(graph: fx.Graph) -> None:
    """Rewrite a joint graph in place; nodes have ``meta["val"]`` and ``meta["phase"]``."""
    reads: dict[int | None, list[_Read]] = defaultdict(list)
    for node in graph.nodes:
        if node.op not in ("placeholder", "output") and node.meta["phase"] == "backward":
            for source in node.all_input_nodes:
                key = storage_id(source)
                if key != storage_id(node):  # else a view: who reads it reads the storage
                    reads[key].append((source, node))
    returned = {storage_id(node) for node in graph.output_node().all_input_nodes}
    given = {storage_id(node) for node in graph.find_nodes(op="placeholder")}
    for cast in reversed(list(graph.nodes)):  # of a chain, the last: it reads the one before
        key = storage_id(cast)
        if not _widens(cast) or key in returned or key not in reads:
            continue
        source = _source(cast)
        if storage_id(source) in given:
            continue
        whole = source.meta["val"].untyped_storage().nbytes()
        smaller = storage_id(source) in reads or whole < cast.meta["val"].nbytes
        paths = {view: _path(view, cast) for view, _ in reads[key]}
        if smaller and all(paths.values()):
            again = _make_again(graph, reads.pop(key), paths)
            reads[storage_id(source)].append((source, again))
    drop_dead(graph)  # views that backward reads in its own casts now


def _source(node: fx.Node) -> fx.Node:
    """What a cast or a view is made of."""
    (source,) = node.all_input_nodes
    return source


def _widens(node: fx.Node) -> bool:
    """Whether the node is a cast in forward, to a wider floating-point dtype and nothing else."""
    if node.target is not _CAST or node.meta["phase"] != "forward":
        return False
    before, after = _source(node).meta["val"], node.meta["val"]
    return bool(
        before.dtype.is_floating_point
        and after.dtype.is_floating_point
        and after.dtype.itemsize > before.dtype.itemsize
        and after.device == before.device
    )


def _path(view: fx.Node, cast: fx.Node) -> list[fx.Node]:
    """The cast and the views that lead from it to one of them; empty if that is not all."""
    path = [view]
    while path[-1] is not cast:
        if storage_id(path[-1]) != storage_id(cast) or len(path[-1].all_input_nodes) != 1:
            return []
        path.append(_source(path[-1]))
    return path[::-1]


def _make_again(
    graph: fx.Graph, reads: Sequence[_Read], paths: dict[fx.Node, list[fx.Node]]
) -> fx.Node:
    """Cast again in front of the first read; all of them read that. Returns the cast."""
    first = min(reader for _, reader in reads)
    made: dict[fx.Node, fx.Node] = {}
    for source, reader in reads:
        for node in paths[source]:
            if node in made:
                continue
            with graph.inserting_before(first):
                copy = made[node] = graph.node_copy(node, lambda n: made.get(n, n))
            args, kwargs = fx.map_arg((copy.args, copy.kwargs), lambda n: n.meta["val"])
            target: Any = node.target
            with torch.no_grad():
                copy.meta = {**first.meta, "val": target(*args, **kwargs)}
        reader.replace_input_with(source, made[source])
    (path, *_) = paths.values()
    return made[path[0]]
