"""The update of a unit by the user's own `step`, run on chunks of its parameters.

For any optimizer that works elementwise; `native_update` does it faster where it can.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lohan_fx.runtime.shadow import Shadow
from lohan_fx.runtime.sums import added
from lohan_fx.runtime.supported_optimizers import sparse_refusal
from lohan_fx.runtime.update_values import Clip, Member, Operands, Updated

_ALIGNMENT = 1024
"""Pieces of a parameter begin at multiples of this many elements, so that vectorized kernels
treat every element as they do in the whole parameter (fused CPU kernels round the elements that
are left over after the last full vector differently)."""


def update(
    shadow: Shadow,
    given: Operands,
    members: Sequence[Member],
    *,
    chunk_elements: int | None,
    scratch: Tensor | None,
) -> Updated:
    """Update all parameters that have a gradient; none are squared.

    Args:
        shadow: of the user's optimizer.
        given: at least one parameter.
        members: one a parameter.
        chunk_elements: as for `UnitOptimizer`.
        scratch: as for `UnitOptimizer.step_mixed`.

    Raises:
        ValueError: views do not fit each other.
        UnsupportedOptimizerError: a gradient is sparse.
    """
    grads = added(given.grads, given.sums)
    masters, state, results = given.masters, given.state, given.results
    if results is not None:
        for i, (master, views) in enumerate(zip(masters, state, strict=True)):
            results.masters[i].copy_(master)
            for name, view in results.state[i].items():
                view.copy_(views[name])
        masters, state = results.masters, results.state
    unit_elements = sum(master.numel() for master in masters)
    limit = _limit(masters[0], unit_elements, chunk_elements, scratch)
    pieces: list[_Piece] = []
    for i, (master, grad, copy) in enumerate(zip(masters, grads, given.copies, strict=True)):
        if master.device != masters[0].device:
            raise _misfit(f"master {i}", master, masters[0])
        if copy is not None and copy.shape != master.shape:
            raise _misfit(f"compute copy {i}", copy, master)
        if grad is None:
            continue
        if grad.layout is not torch.strided:
            raise sparse_refusal(shadow.optimizer)
        if (
            grad.shape != master.shape
            or grad.device != master.device
            or (not given.mixed and grad.dtype != master.dtype)
        ):
            raise _misfit(f"gradient {i}", grad, master)
        views = _views(i, members[i].names, state[i], master)
        whole = _Piece(i, members[i], master.detach(), grad, copy, views)
        for piece in whole.cut(limit):
            piece.begin()
            pieces.append(piece)
    for batch in _batches(pieces, limit):
        _run(shadow, batch, scratch, given.clip, keep=results is not None)
    after: dict[int, dict[str, Tensor]] = {}
    for piece in reversed(pieces):  # all pieces of a parameter end with the same scalars
        if piece.entry:
            names = piece.member.names
            after[piece.index] = {n: v for n, v in piece.entry.items() if n not in names}
    return Updated(after, {})


@dataclass(slots=True)
class _Piece:
    """A whole parameter, or a run of its elements.

    `views` is where the state belongs; `entry` is what the shadow sees and fills: empty before
    the first update, else the views and the scalars.
    """

    index: int
    member: Member
    master: Tensor
    grad: Tensor
    compute: Tensor | None
    views: dict[str, Tensor]
    entry: dict[str, Tensor] = field(default_factory=dict)

    @property
    def fresh(self) -> bool:
        """Whether it has state, but none yet."""
        layout = self.member.layout
        return self.member.scalars is None and bool(layout.tensors or layout.scalars)

    def cut(self, limit: int) -> Iterator[_Piece]:
        """Pieces of at most `limit` elements; itself where that is more, or not contiguous."""
        numel = self.master.numel()
        if numel <= limit or not (
            self.master.is_contiguous()
            and self.grad.is_contiguous()
            and (self.compute is None or self.compute.is_contiguous())
        ):
            yield self
            return
        for start in range(0, numel, limit):
            at = slice(start, start + limit)
            yield _Piece(
                self.index,
                self.member,
                self.master.view(-1)[at],
                self.grad.view(-1)[at],
                None if self.compute is None else self.compute.view(-1)[at],
                {name: view.view(-1)[at] for name, view in self.views.items()},
            )

    def begin(self) -> None:
        """Fill the entry from the state that there is."""
        if self.member.scalars is None:
            return
        homes = self.member.layout.scalars
        for name, value in self.member.scalars.items():
            device, dtype = homes.get(name, (value.device, value.dtype))
            self.entry[name] = value.to(device, dtype, copy=True)
        self.entry.update(self.views)


def default_limit(device: torch.device) -> int:
    """Most elements to update at a time on a device, where nobody says how many."""
    if device.type != "cpu":
        return sys.maxsize
    return max(2**20, 2**15 * torch.get_num_threads())  # kernels give a thread no fewer than 2**15


def _limit(
    master: Tensor, unit_elements: int, chunk_elements: int | None, scratch: Tensor | None
) -> int:
    """Most elements to update at a time."""
    if chunk_elements is not None:
        limit = -(-chunk_elements // _ALIGNMENT) * _ALIGNMENT
    else:
        limit = default_limit(master.device)
    if scratch is None:
        return limit
    if scratch.dtype != master.dtype or scratch.device != master.device or scratch.dim() != 1:
        raise _misfit("scratch", scratch, master)
    have = scratch.numel()
    if have >= unit_elements:
        return limit
    if have < _ALIGNMENT:
        raise ValueError(f"scratch has {have} elements, needs {min(unit_elements, _ALIGNMENT)}")
    return min(limit, have // _ALIGNMENT * _ALIGNMENT)


def _views(
    index: int, names: Iterable[str], state: Mapping[str, Tensor], master: Tensor
) -> dict[str, Tensor]:
    """The state of one parameter, which lies in memory as its master does."""
    views: dict[str, Tensor] = {}
    for name in names:
        view = state.get(name)
        if view is None:
            raise ValueError(f"state {name} of parameter {index} is missing")
        if (
            view.shape != master.shape
            or view.dtype != master.dtype
            or view.device != master.device
            or not _same_order(view, master)
        ):
            raise _misfit(f"state {name} of parameter {index}", view, master)
        views[name] = view
    return views


def _batches(pieces: Iterable[_Piece], limit: int) -> Iterator[list[_Piece]]:
    """Take pieces together up to `limit` elements.

    Parameters without state come apart from others: the fused SGD of torch cannot mix them.
    """
    batch: list[_Piece] = []
    size = 0
    for piece in pieces:
        numel = piece.master.numel()
        if batch and (size + numel > limit or piece.fresh != batch[0].fresh):
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += numel
    if batch:
        yield batch


def _run(
    shadow: Shadow, batch: Sequence[_Piece], scratch: Tensor | None, clip: Clip, *, keep: bool
) -> None:
    """Update one batch: cast and clip gradients, step, bring home new state, write compute
    copies. `keep`: gradients must not be overwritten."""
    groups: dict[int, dict[str, Any]] = {}
    used = 0
    for piece in batch:
        master, grad = piece.master, piece.grad
        cast = grad.dtype != master.dtype or not _same_order(grad, master)
        if cast or clip.changes or keep:
            end = used + master.numel()
            if scratch is not None and end <= scratch.numel() and master.is_contiguous():
                grad = scratch[used:end].view(master.shape)
                used = end
            else:
                grad = torch.empty_like(master)
            grad.copy_(piece.grad)
        clip.apply(grad)
        master.grad = grad
        member = piece.member
        if member.group not in groups:
            groups[member.group] = {**member.values, "params": []}
        groups[member.group]["params"].append(master)
    shadow.run(list(groups.values()), [(piece.master, piece.entry) for piece in batch])
    for piece in batch:
        for name, view in piece.views.items():
            made = piece.entry.get(name)
            if made is view or not piece.entry:
                continue
            if made is None:
                view.zero_()
            else:
                view.copy_(made)
                piece.entry[name] = view
        piece.master.grad = None
        if piece.compute is not None:
            piece.compute.copy_(piece.master)


def _same_order(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape lie in memory alike; fused kernels read them linearly."""
    return a.stride() == b.stride() or (a.is_contiguous() and b.is_contiguous())


def _misfit(what: str, found: Tensor, master: Tensor) -> ValueError:
    def text(t: Tensor) -> str:
        return f"{tuple(t.shape)} {t.dtype} on {t.device}, strides {t.stride()}"

    return ValueError(f"{what} is {text(found)}; it does not fit the master: {text(master)}")
