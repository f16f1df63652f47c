"""Sums of gradients: of several backwards before a step, or the user's own (`.grad`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lohan_fx.runtime.native import adam
from lohan_fx.runtime.native.adam import Addend

_CHUNK = 2**16
"""Elements that torch casts at a time where a sum has another dtype than what is added to it (at
least: a thread gets no fewer than 2**15)."""


@torch.no_grad()
def add(addends: Sequence[Addend], *, squared: bool = False) -> list[float | None]:
    """Add gradients to totals, each pair of one shape and device, of any floating dtypes.

    In host memory our own kernel adds what it can, all in one call: OpenMP's threads, which torch's
    kernels run on, would spin on cores that launch GPU kernels.

    Args:
        squared: the sums of squares of the new totals are wanted, where they cost no second pass.

    Returns:
        these sums, None where there is none.
    """
    kernel = adam.kernel() if any(a.total.device.type == "cpu" for a in addends) else None
    ours = [i for i, a in enumerate(addends) if kernel and kernel.takes(a.total, a.gradient)]
    squares: list[float | None] = [None] * len(addends)
    if kernel is not None and ours:
        found = kernel.add([addends[i] for i in ours], squared=squared)
        for i, value in zip(ours if squared else (), found, strict=True):
            squares[i] = value
    for i in sorted(set(range(len(addends))).difference(ours)):
        _add(*addends[i])
    return squares


def squares(addends: Sequence[Addend]) -> list[float] | None:
    """What `add` would find, if it is `squared`; nothing is added. None: that costs a second pass
    over some of them."""
    kernel = adam.kernel()
    if kernel is None or not all(kernel.takes(a.total, a.gradient) for a in addends):
        return None
    return kernel.squares(addends)


def _add(total: Tensor, gradient: Tensor, begins: bool) -> None:
    if begins:
        total.copy_(gradient)
        return
    alike = total.stride() == gradient.stride()
    if total.dtype == gradient.dtype or total.device.type != "cpu" or not alike:
        total.add_(gradient)  # elsewhere than on CPUs a cast takes no memory
        return
    size = total.numel()
    flat, other = total.as_strided((size,), (1,)), gradient.as_strided((size,), (1,))
    step = max(_CHUNK, 2**15 * torch.get_num_threads())
    for at in range(0, size, step):
        flat[at : at + step].add_(other[at : at + step])


def added(gradients: Sequence[Tensor | None], sums: Sequence[Tensor | None]) -> list[Tensor | None]:
    """What the gradients are together with the sums that there are; these take them up."""
    pairs = list(zip(gradients, sums, strict=True))
    add([Addend(s, g, False) for g, s in pairs if g is not None and s is not None])
    return [g if s is None else s for g, s in pairs]
