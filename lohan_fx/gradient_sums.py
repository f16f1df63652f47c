"""Sum the gradients of a tied parameter in the memory of the first of them.

A parameter that is read twice has the sum of two gradients as its own. With a tied embedding the
joint graph ends with

    total = head_gradient + embedding_dense_backward(gradient, indices)

three tensors as large as the parameter, at once: for a vocabulary of 128256 and 2048 columns in
bfloat16 3 · 501 MiB, the peak of the whole step. `sum_gradients_in_place` makes that

    total = add_embedding_gradient(head_gradient, gradient, indices)

which makes the embedding's gradient in chunks of columns and adds each to the head's, in place: the
peak is one such tensor and a chunk. A sum of two gradients that matmuls or embeddings make becomes
an addition in place: two tensors instead of three. (What other ops make is fused with the sum.)

Exact: each column of an embedding's gradient is made by the same sums, whichever columns are made
beside it; and an addition in place rounds as any other.

The op consumes its first argument, and in the graph its result is a value of its own: no two values
share memory while both may be read. So the workload counts the result's bytes beside those of the
first argument; `Op.scratch_bytes` takes them away again.

Rewritten are sums that are the gradient of a parameter, one of whose summands is all of a storage
that a matmul, an embedding's backward or such a sum has made (or a cast, before an embedding's
gradient), and that nothing else reads.
Left alone are all others, and sums whose summands differ from it in shape, strides or dtype. Made
whole, but added in place, is the gradient of an embedding with `scale_grad_by_freq`, and one that
stands before the other summand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lohan_fx.joint_graph import OutputRole, storage_id

_aten = torch.ops.aten

GRADIENT_CHUNK_BYTES = 64 * 2**20
"""Chunks of an embedding's gradient take at most this much, if a column does."""


def _add_embedding_gradient(
    total: Tensor,
    gradient: Tensor,
    indices: Tensor,
    num_weights: int,
    padding_idx: int,
    chunks: int,
) -> Tensor:
    for columns in _chunks(total.shape[1], chunks):
        part = _aten.embedding_dense_backward.default(
            gradient[..., columns], indices, num_weights, padding_idx, False
        )
        total[:, columns].add_(part)
        del part  # else it would be there while the next one is made
    return total


def _add_gradient(total: Tensor, gradient: Tensor) -> Tensor:
    return total.add_(gradient)


_SCHEMAS: dict[str, Callable[..., Tensor]] = {
    "add_embedding_gradient(Tensor(a!) total, Tensor gradient, Tensor indices, int num_weights, "
    "int padding_idx, int chunks) -> Tensor(a!)": _add_embedding_gradient,
    "add_gradient(Tensor(a!) total, Tensor gradient) -> Tensor(a!)": _add_gradient,
}
_library = torch.library.Library("lohan", "FRAGMENT")
for _schema, _function in _SCHEMAS.items():
    _library.define(_schema)
    _library.impl(_schema.partition("(")[0], _function, "CompositeExplicitAutograd")

add_embedding_gradient = torch.ops.lohan.add_embedding_gradient.default
add_gradient = torch.ops.lohan.add_gradient.default


def _chunks(num_columns: int, count: int) -> list[slice]:
    """Columns of each chunk; the last one may have fewer."""
    width = max(1, -(-num_columns // count))
    return [slice(i, min(i + width, num_columns)) for i in range(0, num_columns, width)]


# -- memory ------------------------------------------------------------------------------------


def sums_in_place(node: fx.Node) -> bool:
    """Whether the op's result takes the memory of its first argument."""
    return node.target in (add_embedding_gradient, add_gradient)


def inner_bytes(node: fx.Node) -> int:
    """Bytes of the gradient that such an op makes and adds, in whichever number of chunks."""
    return int(node.meta["val"].nbytes) if node.target is add_embedding_gradient else 0


def own_scratch_bytes(node: fx.Node) -> int:
    """Bytes that such an op holds beyond what it reads and writes: a chunk, and its columns of what
    the chunk is made of, less the memory that it takes for its result and does not allocate.
    Of other ops 0."""
    if not sums_in_place(node):
        return 0
    total: Any = node.args[0]
    scratch = -int(total.meta["val"].untyped_storage().nbytes())
    if node.target is add_embedding_gradient:
        _, source, *_, count = node.args
        value, given = node.meta["val"], source.meta["val"]  # type: ignore[union-attr]
        rows = value.shape[0]
        columns = _chunks(value.shape[1], count)[0] if value.numel() else slice(0, 0)  # type: ignore[arg-type]
        if not given[..., columns].is_contiguous():
            rows += given.numel() // given.shape[-1]
        scratch += int(rows * (columns.stop - columns.start) * value.element_size())
    return scratch


def give_layouts(graph: fx.Graph) -> None:
    """Let the result of each such op be laid out as what it is added to, on as large a storage:
    `fusion.align` gives matmuls results with rows of padding behind them."""
    for node in graph.nodes:
        if not sums_in_place(node):
            continue
        value, total = node.meta["val"], node.args[0].meta["val"]
        num_bytes = total.untyped_storage().nbytes()
        if value.untyped_storage().nbytes() != num_bytes:
            with torch.no_grad():
                whole = total.new_empty(num_bytes // total.element_size())
                node.meta["val"] = whole.as_strided(
                    total.size(), total.stride(), total.storage_offset()
                )


# -- the rewrite -------------------------------------------------------------------------------


def sum_gradients_in_place(
    graph: fx.Graph, outputs: Sequence[OutputRole], chunk_bytes: int = GRADIENT_CHUNK_BYTES
) -> int:
    """Rewrite a functional joint graph in place; returns how many sums are made in place now.

    Nodes have ``meta["val"]`` and ``meta["phase"]``. `outputs` are the roles of what the graph
    returns. Of an embedding's gradient there are as many chunks as the smallest power of two that
    lets one take at most `chunk_bytes`.
    """
    returned: Any = graph.output_node().args[0]
    found: dict[fx.Node, None] = {}
    for node, role in zip(returned, outputs, strict=True):
        is_gradient = role.kind == "gradient" and role.target and isinstance(node, fx.Node)
        if is_gradient and all(user.op == "output" for user in node.users):
            found.update(dict.fromkeys(_sums(node)))
    place = {node: i for i, node in enumerate(graph.nodes)}
    return sum(_rewrite(graph, add, place, chunk_bytes) for add in sorted(found))


def _sums(node: fx.Node) -> list[fx.Node]:
    """A sum of two tensors laid out like it, and those summands that are such sums for it alone."""
    if node.target is not _aten.add.Tensor or node.kwargs:
        return []
    if not all(isinstance(a, fx.Node) and _is_alike(a, node) for a in node.args):
        return []
    inner = [a for a in node.all_input_nodes if set(a.users) == {node}]
    return [node, *(add for a in inner for add in _sums(a))]


def _is_alike(node: fx.Node, other: fx.Node) -> bool:
    """Whether two values are laid out alike, without gaps."""
    a, b = node.meta["val"], other.meta["val"]
    return bool(
        (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)
        and a.is_contiguous()
    )


def _rewrite(graph: fx.Graph, add: fx.Node, place: dict[fx.Node, int], chunk_bytes: int) -> bool:
    """Replace one sum; `place` orders the nodes that there were, and those that are new."""
    summands = sorted(add.all_input_nodes, key=place.__getitem__)
    if len(summands) != 2:  # twice the same
        return False
    first, second = summands
    target, like = add_gradient, add
    args: tuple[Any, ...]
    if _is_embedding(second) and _may_be_written(first, add):
        gradient, indices, num_weights, padding_idx, _ = second.args
        chunks = _num_chunks(second.meta["val"], chunk_bytes)
        target, like = add_embedding_gradient, second
        args = (first, gradient, indices, num_weights, padding_idx, chunks)
    elif not all(_views(s)[-1].target in _FRESH for s in summands):
        return False
    elif _may_be_written(first, add):
        args = (first, second)
    elif _may_be_written(second, add):
        args = (second, first)
    else:
        return False
    with graph.inserting_before(like):
        made = graph.call_function(target, args)
    made.meta = {**like.meta, "val": add.meta["val"]}
    place[made] = place[like]
    name = add.name
    add.replace_all_uses_with(made)
    graph.erase_node(add)
    if like is second:
        graph.erase_node(second)
    made.name = name
    return True


def _is_embedding(node: fx.Node) -> bool:
    """Whether the op makes the gradient of an embedding, for one reader, by column."""
    return (
        node.target is _aten.embedding_dense_backward.default
        and len(node.users) == 1
        and node.args[4] is False
        and node.meta["val"].dim() == 2
    )


def _num_chunks(value: Tensor, chunk_bytes: int) -> int:
    num_rows, num_columns = value.shape
    count = 1
    while -(-num_columns // count) * num_rows * value.element_size() > chunk_bytes:
        if count >= num_columns:
            break
        count *= 2
    return count


_FRESH = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.embedding_dense_backward.default,
        add_embedding_gradient,
        add_gradient,
    }
)
"""Ops that are not fused with others, and whose result is in memory of its own."""


def _may_be_written(node: fx.Node, reader: fx.Node) -> bool:
    """Whether a value is all of a storage that backward has made and only `reader` reads."""
    value, views = node.meta["val"], _views(node)
    maker = views[-1]
    return (
        all(set(n.users) == {user} for n, user in zip(views, [reader, *views], strict=False))
        and maker.op == "call_function"
        and maker.meta["phase"] == "backward"
        and (maker.target in _FRESH or _is_only_cast(maker))
        and value.untyped_storage().nbytes() == value.nbytes
    )


def _views(node: fx.Node) -> list[fx.Node]:
    """A value, what it is a view of, and so on to what made the storage."""
    found = [node]
    while len(sources := found[-1].all_input_nodes) == 1:
        if storage_id(sources[0]) != storage_id(node):
            break
        found.append(sources[0])
    return found


def _is_only_cast(node: fx.Node) -> bool:
    """Whether the op is a cast to another dtype, of what nothing else reads: a compiler makes one
    tensor of two equal casts."""
    if node.target is not _aten._to_copy.default:
        return False
    (source,) = node.all_input_nodes
    return len(source.users) == 1 and source.meta["val"].dtype != node.meta["val"].dtype
