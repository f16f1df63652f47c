"""Adam and AdamW in one pass over device memory, for resident units in mixed precision.

The arithmetic is `adam.cpp`'s; torch's own kernels would read the gradient, its float32 copy and
the new master once more each (40 instead of 28 bytes a parameter). Results equal theirs to
rounding.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from lohan_fx.runtime.native.adam import Update

logger = logging.getLogger("lohan_fx")

_BLOCK = 1024


class CudaAdamKernel:
    """The Triton kernel; compiled for each combination of dtypes at its first call."""

    def __init__(self) -> None:
        from lohan_fx.runtime.native import adam_triton

        self._kernel: Any = adam_triton.adam

    def run(self, updates: Sequence[Update]) -> None:
        """Update all parameters in place, on the current stream."""
        for u in updates:
            correction1, correction2 = 1 - u.beta1**u.step, 1 - u.beta2**u.step
            size = u.master.numel()
            grid = (-(-size // _BLOCK),)
            with torch.cuda.device(u.master.device):
                self._kernel[grid](
                    u.master,
                    u.exp_avg,
                    u.exp_avg_sq,
                    u.gradient,
                    u.master if u.copy is None else u.copy,
                    size,
                    1 - u.lr * u.weight_decay if u.decoupled else 1.0,
                    0.0 if u.decoupled else u.weight_decay,
                    -1.0 if u.maximize else 1.0,
                    1 - u.beta1,
                    u.beta2,
                    1 - u.beta2,
                    math.sqrt(correction2),
                    u.eps,
                    -u.lr / correction1,
                    u.factor,
                    u.limit,
                    COPIES=u.copy is not None,
                    BLOCK=_BLOCK,
                )


def expected() -> bool:
    """Whether `kernel` should have one; runs nothing."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def kernel() -> CudaAdamKernel | None:
    """The process's kernel; None where there is no Triton, or it cannot compile."""
    if not expected():
        logger.info("no Triton: torch's kernels update resident units")
        return None
    try:
        made = CudaAdamKernel()
        made.run([_tiny_update()])
    except Exception as error:  # noqa: BLE001 - compilers fail in many ways
        logger.warning("lohan_fx: torch's kernels update resident units: %s", error)
        return None
    return made


def _tiny_update() -> Update:
    from lohan_fx.runtime.native.adam import Update

    state = torch.zeros(2, device="cuda")
    half = torch.zeros(2, device="cuda", dtype=torch.bfloat16)
    return Update(
        master=state,
        exp_avg=state.clone(),
        exp_avg_sq=state.clone(),
        max_exp_avg_sq=None,
        gradient=half,
        copy=half.clone(),
        lr=0.0,
        beta1=0.9,
        beta2=0.999,
        eps=1e-8,
        weight_decay=0.0,
        step=1.0,
        decoupled=True,
        maximize=False,
    )
