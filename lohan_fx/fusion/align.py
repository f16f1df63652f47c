"""Products of matrices with odd sizes at the speed of even ones.

A vocabulary of 50257 is no multiple of 8, and neither is a row of 50257 bfloat16 numbers one of 16
bytes: products that read or write such a matrix run at a fraction of the speed (H100, 1024 x 2560 x
50257: 107 TFLOPS, and 380 with padded rows). So forward's product is written into rows of a padded
stride, and its last odd columns are computed apart: 710 TFLOPS. Gradients that products read are
padded by the op that makes them (`clusters` fuses the two), to whole cache lines; a weight's
gradient, whose rows are the columns of such a matrix, is computed with its padding, and has a few
rows more in memory than it shows. A product that sums over the vocabulary sums over its last odd
entries first (H100, 1024 x 50257 x 2048: 112 TFLOPS as one product, though all rows are aligned).
Values stay what they are, to rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from lohan_fx._compat import storage_key
from lohan_fx.annotate import is_view
from lohan_fx.gradient_sums import give_layouts

ROW_BYTES = 16
"""What the tensor cores' loads are aligned to."""

PADDED_BYTES = 128
"""Rows that are padded anyway end at multiples of this: matrix kernels take tiles so wide."""

MIN_ELEMENTS = 2**20
"""Smaller matrices are left alone."""

_aten = torch.ops.aten


def aligned_mm(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b``, with rows that begin at multiples of `ROW_BYTES`."""
    padded = _with_padding(a)
    if padded is not None:
        return torch.mm(padded, b)[: a.shape[0]]
    out = _rows(a, b)
    rest, even = _depths(a, b)
    for rows, columns in _parts(a, out):
        part = out[rows, columns]
        if rest is not None:  # the short sum first: it is rounded once more than the long one
            torch.mm(a[rows, rest], b[rest, columns], out=part)
            part.addmm_(a[rows, even], b[even, columns])
        else:
            torch.mm(a[rows], b[:, columns], out=part)
    return out


def aligned_addmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``bias + a @ b`` for a bias of one row, with rows that begin at multiples of `ROW_BYTES`."""
    out = _rows(a, b)
    for rows, columns in _parts(a, out):
        torch.addmm(bias[columns], a[rows], b[:, columns], out=out[rows, columns])
    return out


aligned_mm.overloadpacket = _aten.mm  # type: ignore[attr-defined]  # its FLOPs are those of aten.mm
aligned_addmm.overloadpacket = _aten.addmm  # type: ignore[attr-defined]

_ALIGNED = {_aten.mm.default: aligned_mm, _aten.addmm.default: aligned_addmm}


def _rows(a: Tensor, b: Tensor) -> Tensor:
    """Memory for the product of two matrices."""
    return _empty(a.shape[0], b.shape[1], a)


def _empty(rows: int, columns: int, like: Tensor) -> Tensor:
    stride = -(-columns // _step(like)) * _step(like)
    return torch.empty_strided((rows, columns), (stride, 1), dtype=like.dtype, device=like.device)


def _parts(a: Tensor, out: Tensor) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of a result: what is a multiple of the step, and what is left. Rows matter
    where the first factor's are its fast dimension (the gradient of a weight)."""
    rows = _cut(out.shape[0], _step(out) if _by_columns(a) else 1)
    yield from itertools.product(rows, _cut(out.shape[1], _step(out)))


def _depths(a: Tensor, b: Tensor) -> tuple[slice | None, slice]:
    """What of a product's sums is no multiple of the step, and what is. Nothing is cut off where
    that would not help, for the factors' own rows are not aligned; nor of float16, in which a part
    of a sum may overflow where the sum does not."""
    step, size = _step(a), a.shape[1]
    even = size // step * step
    narrow = a.dtype == torch.float16
    if narrow or even == size or size <= 8 * step or not all(map(_is_aligned, (a, b))):
        return None, slice(0, size)
    return slice(even, size), slice(0, even)


def _is_aligned(matrix: Tensor) -> bool:
    """Whether all rows (or columns, if these lie together) begin at multiples of `ROW_BYTES`."""
    fast, slow = sorted(matrix.stride())
    step = _step(matrix)
    return fast == 1 and slow % step == 0 and matrix.storage_offset() % step == 0


def _by_columns(a: Tensor) -> bool:
    return a.stride(0) == 1 and a.stride(1) != 1


def _with_padding(a: Tensor) -> Tensor | None:
    """A transposed matrix of padded rows with its padding, which is rows here; None if it has none.
    What stands there does not matter: no other row of a product reads it."""
    step = PADDED_BYTES // a.element_size()
    rows, extra = a.stride(1), a.stride(1) - a.shape[0]
    if a.stride(0) != 1 or rows % step or not 0 < extra < step or a.storage_offset():
        return None
    return a.as_strided((rows, a.shape[1]), a.stride())


def _cut(size: int, step: int) -> tuple[slice, ...]:
    even = size // step * step
    parts = (slice(0, even), slice(even, size))
    return tuple(part for part in parts if part.stop > part.start)


def _step(like: Tensor) -> int:
    return max(1, ROW_BYTES // like.element_size())


def align(graph: fx.Graph, is_fusible: Callable[[fx.Node], bool]) -> int:
    """Align the large products of a captured graph, in place; needs marked roots. Returns how many
    values were padded, and products replaced.

    `is_fusible` says what `clusters` can fuse with the padding of its result; elsewhere padding
    would cost a pass over the matrix.
    """
    count = 0
    for node in list(graph.nodes):
        if node.target is _aten.mm.default and node.meta["phase"] == "backward":
            for source in node.all_input_nodes:
                root = source.meta["root"]
                if is_fusible(root) and _is_odd(root.meta["val"]) and not is_view(root):
                    count += _pad(graph, root)
    for node in list(graph.nodes):
        if node.target in _ALIGNED and not node.kwargs and _is_misshapen(node):
            count += _align_result(node)
    give_layouts(graph)
    return count


def _is_odd(value: Any) -> bool:
    """Whether a large contiguous tensor has rows that are no multiple of `ROW_BYTES`."""
    return (
        isinstance(value, Tensor)
        and value.dim() >= 2
        and value.numel() >= MIN_ELEMENTS
        and value.shape[-1] > 8 * _step(value)
        and value.is_contiguous()
        and value.shape[-1] * value.element_size() % ROW_BYTES != 0
    )


def _is_misshapen(node: fx.Node) -> bool:
    """Whether a product is large, and a size of it is no multiple of the step."""
    return _has_odd_result(node) or _has_odd_depth(node)


def _has_odd_depth(node: fx.Node) -> bool:
    if node.target is not _aten.mm.default:
        return False
    a, b = (source.meta["val"] for source in node.args)  # type: ignore[union-attr]
    return min(a.numel(), b.numel()) >= MIN_ELEMENTS and _depths(a, b)[0] is not None


def _has_odd_result(node: fx.Node) -> bool:
    value = node.meta["val"]
    if value.numel() < MIN_ELEMENTS or min(value.shape) <= 8 * _step(value):
        return False
    first: Any = node.args[-2]
    bias: Any = node.args[0]
    if node.target is _aten.addmm.default and bias.meta["val"].dim() != 1:
        return False
    rows, columns = (size % _step(value) != 0 for size in value.shape)
    return columns or (rows and _by_columns(first.meta["val"]))


def _align_result(node: fx.Node) -> bool:
    value = node.meta["val"]
    first: Any = node.args[0]
    padded = _with_padding(first.meta["val"]) if node.target is _aten.mm.default else None
    with value.fake_mode:
        if padded is not None:
            rows, columns = padded.shape[0], value.shape[1]
            made = torch.empty(rows, columns, dtype=value.dtype, device=value.device)
            made = made[: value.shape[0]]
        else:
            made = _empty(value.shape[0], value.shape[1], value)
    if _layout_of(made) != _layout_of(value) and not _relayout(node, made):
        return False
    target: Any = _ALIGNED[node.target]  # type: ignore[index]
    node.target = target
    return True


def _layout_of(value: Tensor) -> tuple[tuple[int, ...], int]:
    return value.stride(), value.untyped_storage().nbytes()


def _pad(graph: fx.Graph, node: fx.Node) -> bool:
    """Write a value into padded rows; who read it reads the rows without their padding."""
    value = node.meta["val"]
    columns = value.shape[-1]
    extra = -columns % (PADDED_BYTES // value.element_size())
    with value.fake_mode:
        padded = torch.empty(
            *value.shape[:-1], columns + extra, dtype=value.dtype, device=value.device
        )
    if not _relayout(node, padded.narrow(-1, 0, columns)):
        return False
    node.meta["val"] = value  # it is not what changes
    users = list(node.users)
    with graph.inserting_after(node):
        pad = _call(graph, _aten.constant_pad_nd.default, (node, [0, extra]), f"{node.name}_padded")
    with graph.inserting_after(pad):
        end = value.dim() - 1
        cut = _call(graph, _aten.slice.Tensor, (pad, end, 0, columns), f"{node.name}_rows")
    for made in (pad, cut):
        made.meta = {**node.meta, "root": pad}
    pad.meta["val"] = padded
    cut.meta["val"] = padded.narrow(-1, 0, columns)
    for user in users:
        user.replace_input_with(node, cut)
    for view in list(_views(cut)):
        view.meta["root"] = pad
        view.meta["val"] = _run(view)
    return True


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...], name: str) -> fx.Node:
    return graph.create_node("call_function", target, args, name=name)


def _relayout(node: fx.Node, value: Tensor) -> bool:
    """Give a value another layout, and its views theirs; False if a view or a result forbids it."""
    views = list(_views(node))
    before = {n: n.meta["val"] for n in (node, *views)}
    possible = not any(u.op == "output" for n in before for u in n.users)
    if possible:
        node.meta["val"] = value
        possible = all(map(_follow, views))
    if not possible:
        for n, was in before.items():
            n.meta["val"] = was
    return possible


def _follow(view: fx.Node) -> bool:
    """Give a view the layout that follows from its source's; False if there is none."""
    if not isinstance(view.meta["val"], Tensor):  # views in a tuple
        return False
    source: Any = view.args[0]
    try:
        made = _run(view)
    except (RuntimeError, ValueError):
        return False
    if storage_key(made) != storage_key(source.meta["val"]):  # a copy: its strides would change
        return False
    view.meta["val"] = made
    return True


def _views(node: fx.Node) -> Iterator[fx.Node]:
    """Views of a value, and views of these, in order."""
    for user in list(node.users):
        if is_view(user):
            yield user
            yield from _views(user)


def _run(node: fx.Node) -> Tensor:
    """What a view of (fake) tensors returns."""
    args, kwargs = pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], (node.args, node.kwargs))
    made = node.target(*args, **kwargs)  # type: ignore[operator]
    assert isinstance(made, Tensor)
    return made
