"""go-memferry: MemFerry, and gradients that the device writes to host memory itself.

Source: papers/memferry.txt §IV-D. All gradients start out written directly; those of some layers
return to the device, up to a share of all gradient bytes (the reserve factor S_req). Which ones:
D[i,j] = max(D[i−1,j], D[i−1,j−s_i] + T_GBP(i) − T_CBP(i)), the most backward time won with j
bytes on the device.

The paper's default writes all of them directly (reserve 0); its user states the share. Here the
budget does: the largest share in steps of 1/64 whose exact peak fits the device, unless `reserve`
is given.

Not as in the paper:
  - T_GBP − T_CBP is the time of the writes over the link; the copy of a gradient on the device
    hides behind backward.
  - A gradient is on the device while the op runs that makes it, and is written right after it:
    PyTorch's accumulation into a gradient in host memory does the same.
  - Sizes are counted in 1/1024 of all gradients, rounded up, so that the table stays small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lohan_fx.planners.memferry import hybrid_training, keep_everything
from lohan_fx.planners.registry import register
from lohan_fx.planners.strategy import Activations, Parameters, Setting, Strategy

BUCKETS = 1024
STEPS = 64


def most_time_won(sizes: Sequence[int], gains_s: Sequence[float], room: int) -> frozenset[int]:
    """Items with the largest sum of gains whose sizes add up to at most `room`: the DP of §IV-D."""
    width = max(0, room) + 1
    best = np.zeros((len(sizes) + 1, width))
    for i, (size, gain) in enumerate(zip(sizes, gains_s, strict=True), start=1):
        best[i] = best[i - 1]
        if size < width:
            np.maximum(best[i, size:], best[i - 1, : width - size] + gain, out=best[i, size:])
    chosen, j = set(), width - 1
    for i in range(len(sizes), 0, -1):
        if best[i, j] > best[i - 1, j]:
            chosen.add(i - 1)
            j -= sizes[i - 1]
    return frozenset(chosen)


@dataclass(frozen=True, slots=True)
class GradientOffload:
    """MemFerry's modes and the gradient plan.

    `reserve` is the share of gradient bytes that stays on the device until copied; None takes the
    largest share that fits.
    """

    reserve: float | None = None

    def __call__(self, setting: Setting, found: Activations) -> Parameters:
        modes = hybrid_training(setting, found)
        units = [
            u for u in setting.workload.units if u.trainable and setting.tiers[u.name] != "device"
        ]
        total = sum(u.gradient_bytes for u in units)
        bucket = max(1, -(-total // BUCKETS))
        sizes = [-(-u.gradient_bytes // bucket) for u in units]
        gains_s = [u.gradient_bytes / setting.hw.d2h_bytes_per_s for u in units]

        def plan(reserve: float) -> Parameters:
            kept: frozenset[int] | set[int] = set(range(len(units)))
            if reserve < 1:
                kept = most_time_won(sizes, gains_s, int(reserve * total / bucket))
            written = frozenset(u.name for i, u in enumerate(units) if i not in kept)
            note = f"{len(written)} of {len(units)} units write gradients directly"
            return replace(modes, direct_gradients=written, notes=(*modes.notes, note))

        if self.reserve is not None:
            return plan(self.reserve)
        low, high = 0, STEPS
        while low < high:
            middle = high if low == 0 and high == STEPS else (low + high + 1) // 2
            if setting.fits(setting.draft(found, plan(middle / STEPS))):
                low = middle
            else:
                high = middle - 1
        return plan(low / STEPS)


def go_memferry(reserve: float | None = None) -> Strategy:
    """The strategy with a reserve factor from 0 (the paper's default) to 1 (MemFerry)."""
    return Strategy(
        name="go-memferry",
        activations=keep_everything,
        parameters=GradientOffload(reserve),
        states="host",
        swap_to="host",
        schedule="naive",
    )


register("go-memferry")(go_memferry())
