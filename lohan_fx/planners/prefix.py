"""How many residuals of an order must leave the device."""

from __future__ import annotations

from collections.abc import Sequence

from lohan_fx.errors import InsufficientMemoryError
from lohan_fx.footprint import align
from lohan_fx.planners.algorithm1 import swap_room
from lohan_fx.planners.strategy import Activations, Setting


def swap_prefix(setting: Setting, order: Sequence[str], count: int) -> Activations:
    """Swap the first `count` residuals of the order, keep all others."""
    swapped = set(order[:count])
    residuals = setting.workload.residuals
    return Activations(actions={v: "swap" if v in swapped else "keep" for v in residuals})


def affordable_prefix(setting: Setting, order: Sequence[str]) -> list[str]:
    """The longest prefix of the order that host memory and SSD have room for."""
    s = setting
    left = swap_room(s.workload, s.hw, s.budget, s.options, s.tiers).total
    found = []
    for v in order:
        left -= align(s.workload.values[v].num_bytes)
        if left < 0:
            break
        found.append(v)
    return found


def fewest_swapped(setting: Setting, order: Sequence[str], at_least: int = 0) -> int:
    """The smallest number of leading residuals whose swap makes the plan fit the device.

    With the shortest windows a swapped residual is on the device at no moment when a kept one is
    not, so the peak never rises with the number, and bisection is exact.

    Raises:
        InsufficientMemoryError: no number fits; of the tier that was in the way.
    """
    low, high = at_least, len(order)
    best: int | None = None
    error: InsufficientMemoryError | None = None
    tried = 0
    while low <= high:
        # both ends first: often all can stay, or not even swapping all helps
        middle = (low, high)[tried] if tried < 2 else (low + high) // 2
        tried += 1
        try:
            made = setting.draft(swap_prefix(setting, order, middle))
        except InsufficientMemoryError as lower:  # too much for host memory and SSD together
            error, high = lower.anew(), middle - 1
            continue
        if setting.fits(made):
            best, high = middle, middle - 1
        else:
            error, low = setting.error(made), middle + 1
    if best is None:
        assert error is not None
        raise error.anew()
    return best
