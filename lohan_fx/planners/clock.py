"""When ops run if nothing waits: the time axis of strategies that compare idle intervals."""

from __future__ import annotations

from itertools import accumulate

from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import Tier
from lohan_fx.workload import Workload


class Clock:
    """Seconds from the begin of the step, with everything on the device and no waits.

    `start[i]` and `end[i]` are those of op i.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self.end = list(accumulate(op.seconds for op in workload.ops))
        self.start = [0.0, *self.end[:-1]]

    def made(self, value: str) -> float:
        """When a residual's producer ends."""
        return self.end[self._workload.producer[value]]

    def idle_from(self, value: str) -> float:
        """When forward has used a residual for the last time."""
        return self.end[self._workload.last_forward_use(value)]

    def back(self, value: str) -> float:
        """When backward uses a residual for the first time."""
        return self.start[self._workload.first_backward_use(value)]


def out_s(hw: HardwareProfile, num_bytes: int, tier: Tier) -> float:
    """Seconds of a copy from the device to a tier; an SSD takes it as fast as the slower part."""
    rate = hw.d2h_bytes_per_s
    return num_bytes / (min(rate, hw.ssd_write_bytes_per_s) if tier == "ssd" else rate)


def in_s(hw: HardwareProfile, num_bytes: int, tier: Tier) -> float:
    """Seconds of a copy from a tier to the device."""
    rate = hw.h2d_bytes_per_s
    return num_bytes / (min(rate, hw.ssd_read_bytes_per_s) if tier == "ssd" else rate)
