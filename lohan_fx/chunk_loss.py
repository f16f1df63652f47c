"""Cut the cross entropy of a linear head into chunks of rows: no tensor is as large as all logits.

With a large vocabulary the logits, their log-softmax and the gradients of both are the largest
tensors of a step, and several are alive at its peak. `chunk_losses` finds

    x [M, h] → mm or addmm → logits [M, V] → views, slices, casts → _log_softmax → nll_loss

with its backward in a joint graph, and makes one chunk of rows after another instead. Chunks are
made of the ops that were there, so what a chunk leaves for backward is a residual like any other:
kept, swapped, or recomputed by itself. Backward takes the chunks from the last to the first; it
makes and consumes the gradient of one chunk's logits before it begins with the next.

Exact but for rounding:

- Rows of logits come from a matmul with fewer rows, whose kernel may sum in another order. From
  there on a row is what it was, its gradient included: the loss is made of all rows at once, by
  the op that made it before (given each row's own log-probability as the only class), with the
  same sum, the same divisor of the mean, and the same treatment of `ignore_index`.
- Gradients of weight and bias are sums over chunks, rounded to their own dtype after each chunk.

Logits that the model returns, too, are made as they were, in one piece; what follows them is in
chunks. Left alone are logits that anything else reads, class weights, label smoothing, and heads
with other ops between matmul and log-softmax.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lohan_fx._compat import storage_key

aten = torch.ops.aten

LOSS_CHUNK_BYTES = 256 * 2**20
"""The default of `chunk_bytes`."""

_CASTS = frozenset({aten._to_copy.default})
_SLICES = frozenset({aten.slice.Tensor, aten.slice_backward.default})
_MOVES = frozenset({aten.view.default, aten._unsafe_view.default, aten.clone.default}) | _SLICES
"""Ops that change where rows are, and leave what is in them."""

_EACH_ROW = 0
"""A reduction of nll_loss: none."""

_IGNORED = -100
"""The class of ignored rows where the loss is made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Backward:
    """The backward of a loss.

    `path` leads from the log-softmax's gradient to that of the matmul's result. Of the gradients
    that the matmul's backward makes, those that nobody wants are absent.
    """

    nll: fx.Node
    path: tuple[fx.Node, ...]
    d_rows: fx.Node | None = None
    d_weight: fx.Node | None = None
    d_bias: fx.Node | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loss:
    """A linear head with its cross entropy; `path` leads from the matmul to the log-softmax.

    `whole` is the last of its nodes that the model returns, if there is one: it and what is before
    it stays in one piece.
    """

    path: tuple[fx.Node, ...]
    whole: fx.Node | None
    nll: fx.Node
    backward: _Backward | None


def chunk_losses(graph: fx.Graph, chunk_bytes: int) -> int:
    """Rewrite a functional joint graph in place; returns how many losses are in chunks now.

    Nodes have ``meta["val"]`` and ``meta["phase"]``. There are as many chunks as the smallest
    power of two that lets a chunk's logits take at most `chunk_bytes` in float32; 0 leaves the
    graph as it is.
    """
    found = 0
    for nll in graph.find_nodes(op="call_function", target=aten.nll_loss_forward.default):
        loss = _match(nll)
        if loss is None:
            continue
        num_rows, num_classes = loss.path[-1].meta["val"].shape
        size = _chunk_rows(num_rows, num_classes, chunk_bytes)
        if size < num_rows:
            _rewrite(graph, loss, size)
            found += 1
    return found


def _chunk_rows(num_rows: int, num_classes: int, chunk_bytes: int) -> int:
    """Rows of a chunk; the last one may have fewer."""
    if chunk_bytes <= 0:
        return num_rows
    count = 1
    while -(-num_rows // count) * num_classes * 4 > chunk_bytes and count < num_rows:
        count *= 2
    return -(-num_rows // count)


def _any(argument: Any) -> Any:
    """An argument of a node, whose type is known from the pattern."""
    return argument


# -- the pattern -------------------------------------------------------------------------------


def _match(nll: fx.Node) -> _Loss | None:
    """The loss that ends in `nll`, if everything about it is as the module's docstring says."""
    log_softmax, _, weight, reduction, _ = nll.args
    if weight is not None or reduction == _EACH_ROW or not isinstance(log_softmax, fx.Node):
        return None
    if log_softmax.target is not aten._log_softmax.default or log_softmax.args[1] not in (1, -1):
        return None
    if log_softmax.meta["val"].dim() != 2:  # a single row
        return None
    path = [log_softmax]
    whole: fx.Node | None = None
    while _moves_rows(path[0]) or path[0] is log_softmax:
        source = path[0].args[0]
        assert isinstance(source, fx.Node)
        others = [user for user in source.users if user is not path[0]]
        if not all(map(_is_returned, others)):
            return None
        if others and whole is None:
            whole = source
        path.insert(0, source)
    if not _is_head(path[0]):
        return None
    if whole is not None and any(node.target in _SLICES for node in path):
        return None  # a copy of all of the logits
    backward = None
    if len(log_softmax.users) > 1:
        backward = _match_backward(nll, path)
        if backward is None:
            return None
    return _Loss(path=tuple(path), whole=whole, nll=nll, backward=backward)


def _match_backward(nll: fx.Node, path: Sequence[fx.Node]) -> _Backward | None:
    """The backward of the loss, if it is all that reads what forward saved of it."""
    matmul, log_softmax = path[0], path[-1]
    first = _only_user(log_softmax, aten.nll_loss_backward.default)
    second = _only_user(log_softmax, aten._log_softmax_backward_data.default)
    if first is None or second is None or set(log_softmax.users) != {nll, first, second}:
        return None
    if set(first.users) != {second} or first.args[1:6] != nll.args:
        return None
    back = [second]
    while len(back[-1].users) == 1 and _moves_rows(user := next(iter(back[-1].users))):
        back.append(user)
    gradient = back[-1]
    if gradient.meta["val"].shape != matmul.meta["val"].shape:
        return None
    rows = matmul.args[-2]
    found: dict[str, fx.Node] = {}

    for user in gradient.users:
        node = user
        if _is_transpose(user, gradient) and len(user.users) == 1:
            (node,) = user.users  # (gradient.T @ rows).T
        if node.target is aten.mm.default and node.args[0] is gradient and _is_old(node.args[1]):
            name = "d_rows"
        elif node.target is aten.mm.default and (
            node.args == (user, rows)
            if node is not user
            else node.args[1] is gradient and _is_transpose(node.args[0], rows)
        ):
            name = "d_weight"
        elif node.target is aten.sum.dim_IntList and node.args[:2] == (gradient, [0]):
            name = "d_bias"
        else:
            return None
        if found.setdefault(name, node) is not node:
            return None
    return _Backward(nll=first, path=tuple(back), **found) if found else None


def _is_returned(node: fx.Node) -> bool:
    """Whether the node is what the model returns, or a detached value for nothing else."""
    if node.op == "output":
        return True
    return node.target is aten.detach.default and all(user.op == "output" for user in node.users)


def _only_user(node: fx.Node, target: Callable[..., Any]) -> fx.Node | None:
    found = [user for user in node.users if user.target is target]
    return found[0] if len(found) == 1 else None


def _is_transpose(node: Any, of: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.t.default and node.args[0] is of


def _is_old(node: Any) -> bool:
    """Whether forward has the value, or its transpose."""
    if isinstance(node, fx.Node) and node.target is aten.t.default:
        return _is_old(node.args[0])
    return isinstance(node, fx.Node) and node.meta["phase"] == "forward"


def _moves_rows(node: fx.Node) -> bool:
    """Whether the op leaves what is in a row as it is, up to its dtype."""
    if node.target not in _MOVES | _CASTS:
        return False
    source: Any = node.args[0]
    value = node.meta["val"]
    if source.meta["val"].shape[-1:] != value.shape[-1:]:
        return False
    if node.target in _SLICES:
        at = 1 if node.target is aten.slice.Tensor else 2
        dim: Any = node.args[at] if len(node.args) > at else 0
        return bool(dim % value.dim() != value.dim() - 1)
    return True


def _is_head(node: fx.Node) -> bool:
    """Whether the op is a matmul of contiguous rows, plus a bias at most."""
    if node.target is aten.addmm.default:
        bias: Any = node.args[0]
        if node.kwargs or bias.meta["val"].dim() != 1:
            return False
    elif node.target is not aten.mm.default:
        return False
    rows: Any = node.args[-2]
    return bool(rows.meta["val"].is_contiguous())


# -- the rewrite -------------------------------------------------------------------------------


def _rewrite(graph: fx.Graph, loss: _Loss, size: int) -> None:
    old = {*loss.path}
    with graph.inserting_before(loss.nll):
        chunks = _forward(graph, loss, size)
    if (backward := loss.backward) is not None:
        old |= {backward.nll, *backward.path}
        place = {node: i for i, node in enumerate(graph.nodes)}
        results = [n for n in (backward.d_rows, backward.d_weight, backward.d_bias) if n]
        first = min(results, key=place.__getitem__)
        for result in results:
            old |= {result, *result.all_input_nodes}
            for source in reversed(_transposes(result)):  # of the weight: they need nothing else
                if place[source] > place[first]:
                    first.prepend(source)
        with graph.inserting_before(first):
            _backward(graph, backward, chunks)
    for node in reversed(list(graph.nodes)):
        if node in old and node.op == "call_function" and not node.users:
            graph.erase_node(node)


def _transposes(result: fx.Node) -> list[fx.Node]:
    """The chains of transposes that a matmul reads, from the matmul on."""
    found = [n for n in result.all_input_nodes if n.target is aten.t.default]
    for node in found:
        found += [n for n in node.all_input_nodes if n.target is aten.t.default]
    return found


def _forward(graph: fx.Graph, loss: _Loss, size: int) -> list[dict[fx.Node, fx.Node]]:
    """Make all chunks, and the loss of them; returns what stands for what in each chunk."""
    matmul, nll = loss.path[0], loss.nll
    log_softmax, targets, _, reduction, ignored = (_any(a) for a in nll.args)
    given: fx.Node = _any(matmul.args[-2])
    rows = _move(graph, loss.path[1:-1], given)
    num_rows, num_classes = log_softmax.meta["val"].shape
    path, logits = loss.path, loss.whole
    if logits is not None:
        path = path[path.index(logits) + 1 :]
        shape = (logits, [num_rows, num_classes])
        logits = _call(graph, aten.view.default, shape, logits, "chunks_logits")
    chunks: list[dict[fx.Node, fx.Node]] = []
    each = []
    for k, start in enumerate(range(0, num_rows, size)):
        prefix = f"chunk{k}_"
        part = (0, start, min(start + size, num_rows))
        taken = aten.slice.Tensor
        env: dict[fx.Node, fx.Node] = {
            given: _call(graph, taken, (rows, *part), matmul, f"{prefix}rows"),
            targets: _call(graph, taken, (targets, *part), nll, f"{prefix}targets"),
        }
        if loss.whole is not None and logits is not None:
            env[loss.whole] = _call(graph, taken, (logits, *part), logits, f"{prefix}logits")
        _follow(graph, path, env, prefix)
        args = (env[log_softmax], env[targets], None, _EACH_ROW, ignored)
        losses = _call(graph, nll.target, args, nll, prefix + nll.name)
        each.append(_call(graph, operator.getitem, (losses, 0), nll, f"{losses.name}_r0"))
        chunks.append(env)

    def call(target: Any, args: tuple[Any, ...], name: str) -> fx.Node:
        return _call(graph, target, args, nll, f"chunks_{name}")

    log_p = call(aten.neg.default, (call(aten.cat.default, (each,), "losses"),), "log_p")
    is_ignored = call(aten.eq.Scalar, (targets, ignored), "is_ignored")
    nll.args = (
        call(aten.unsqueeze.default, (log_p, 1), "picked"),
        call(aten.where.Scalar, (is_ignored, _IGNORED, 0), "classes"),
        None,
        reduction,
        _IGNORED,
    )
    return chunks


def _backward(
    graph: fx.Graph, backward: _Backward, chunks: Sequence[dict[fx.Node, fx.Node]]
) -> None:
    """Make the gradients of all chunks, the last one first, and what the matmul's backward makes
    of them."""
    d_rows, d_weight, d_bias = backward.d_rows, backward.d_weight, backward.d_bias
    parts: list[fx.Node] = []
    weight: fx.Node | None = None
    bias: fx.Node | None = None
    for k, env in reversed(list(enumerate(chunks))):
        prefix = f"chunk{k}_"
        _follow(graph, (backward.nll, *backward.path), env, prefix)
        if d_weight is not None:
            left = _any(d_weight.args[0])
            env[left] = _again(graph, left, env, prefix)
            env[left].meta["phase"] = "backward"
            if weight is None:
                weight = _again(graph, d_weight, env, prefix)
            else:
                args = (weight, *(env[_any(a)] for a in d_weight.args))
                name = prefix + d_weight.name
                weight = _call(graph, aten.addmm.default, args, d_weight, name)
        if d_bias is not None:
            part = _again(graph, d_bias, env, prefix)
            name = f"{prefix}sum_of_{d_bias.name}"
            bias = (
                part if bias is None else _call(graph, aten.add.Tensor, (bias, part), d_bias, name)
            )
        if d_rows is not None:
            parts.insert(0, _again(graph, d_rows, env, prefix))
    if d_rows is not None:
        whole = _call(graph, aten.cat.default, (parts,), d_rows, f"chunks_{d_rows.name}")
        _replace(d_rows, _move(graph, backward.path[1:], whole))
    if d_weight is not None and weight is not None:
        _replace(d_weight, weight)
    if d_bias is not None and bias is not None:
        _replace(d_bias, bias)


def _follow(
    graph: fx.Graph, path: Sequence[fx.Node], env: dict[fx.Node, fx.Node], prefix: str
) -> None:
    """Do the ops of `path` for one chunk, whose rows are where they belong already."""
    for node in path:
        source: Any = node.args[0]
        env[node] = env[source] if node.target in _MOVES else _again(graph, node, env, prefix)


def _move(graph: fx.Graph, path: Sequence[fx.Node], rows: fx.Node) -> fx.Node:
    """Move rows of another width as `path` moves rows of logits."""
    if not any(node.target in _SLICES for node in path):
        return rows  # each row is where it was
    width = rows.meta["val"].shape[-1]
    for like in path:
        if like.target in _CASTS:
            continue
        args: tuple[Any, ...] = (rows, *like.args[1:])
        if like.target is aten.slice_backward.default:
            args = (rows, [*args[1][:-1], width], *args[2:])
        elif like.target not in (aten.slice.Tensor, aten.clone.default):
            args = (rows, [*like.meta["val"].shape[:-1], width])
        rows = _call(graph, like.target, args, like, f"rows_{like.name.lstrip('_')}", like.kwargs)
    return rows


def _again(graph: fx.Graph, node: fx.Node, env: Mapping[fx.Node, fx.Node], prefix: str) -> fx.Node:
    """The same op on what stands in `env` for its arguments."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env.get(n, n))
    return _call(graph, node.target, args, node, prefix + node.name.lstrip("_"), kwargs)


def _call(
    graph: fx.Graph,
    target: Any,
    args: tuple[Any, ...],
    like: fx.Node,
    name: str,
    kwargs: Mapping[str, Any] | None = None,
) -> fx.Node:
    """A new node that comes from where the node `like` does."""
    node = graph.create_node("call_function", target, args, dict(kwargs or {}), name)
    values: Any = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with torch.no_grad():
        value = target(*values[0], **values[1])
    node.meta = {**like.meta, "val": value}
    return node


def _replace(old: fx.Node, new: fx.Node) -> None:
    """Let everything read `new`, whose storage becomes that of `old`, which views of it have."""
    value: torch.Tensor = old.meta["val"]
    key, node = storage_key(new.meta["val"]), new
    while True:
        made = node.meta["val"]
        with torch.no_grad():
            node.meta["val"] = value.as_strided(made.size(), made.stride(), made.storage_offset())
        source: Any = node.args[0]
        if not isinstance(source, fx.Node) or storage_key(source.meta["val"]) != key:
            break
        node = source
    new.meta["val"] = value
    old.replace_all_uses_with(new)
