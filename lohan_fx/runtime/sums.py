"""Sums of gradients: several backwards before a step, or gradients that are the user's."""

from __future__ import annotations

import torch
from torch import Tensor

from lohan_fx.runtime.native import adam

_CHUNK = 2**16
"""Elements that torch casts at a time where a sum has another dtype than what is added to it (at
least: a thread gets no fewer than 2**15)."""


@torch.no_grad()
def add(total: Tensor, gradient: Tensor, has: bool, *, squared: bool = False) -> float | None:
    """Add to a sum that there is; begin it otherwise. `squared`: returns the sum of squares of the
    new totals, if it costs no second pass."""
    if not has:
        total.copy_(gradient)
        return None
    if total.device.type != "cpu" or total.stride() != gradient.stride():
        total.add_(gradient)  # elsewhere than on CPUs a cast takes no memory
        return None
    kernel = adam.kernel()
    if kernel is not None and squared:
        squares = kernel.add_squared(total, gradient)
        if squares is not None:
            return squares
    elif kernel is not None and kernel.add(total, gradient):
        return None
    if total.dtype == gradient.dtype:
        total.add_(gradient)
        return None
    size = total.numel()
    flat, other = total.as_strided((size,), (1,)), gradient.as_strided((size,), (1,))
    step = max(_CHUNK, 2**15 * torch.get_num_threads())
    for at in range(0, size, step):
        flat[at : at + step].add_(other[at : at + step])
    return None
