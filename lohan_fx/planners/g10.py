"""g10: migrate what relieves memory most, to SSD if it is idle for long enough, else to host.

Source: Zhang et al., MICRO'23, as planners.md has it. An item is a value and its idle interval;
its benefit is m·Σdt over the ops, while it is away, at which residency exceeds the line of
0.99 × device memory. The item with the largest benefit is booked next: it goes to SSD if its
interval is longer than 2(latency + m/B) + δ·(one way), δ = 0.5, and the SSD has bandwidth left;
else to host memory. It is evicted at once; the start of its prefetch is calculated back from its
use. The search ends at the line. Nothing is recomputed.

Bandwidth is booked in slots, one an op and lane: d2h, h2d, and one for the SSDs (simplex).

Not as in the paper:
  - States do not migrate: they stay on the device, or are updated on the CPU (``states=``; LoHan
    §V-E's LoHan+G10 is "lohan+g10"). G10's optimizer on the device over migrated states (LoHan
    §III-B: 182 GB a direction for 13B) has no counterpart here.
  - Idle is between the last use in forward and the first in backward.
  - Where hidden transfers are not enough, the rest is swapped by benefit alone, host memory first:
    what the paper leaves to page faults.
  - The path leads through host memory, not GPUDirect Storage.

Its artifact's published times (planners.md) are of kernel traces that are not at hand here.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lohan_fx.errors import format_bytes
from lohan_fx.footprint import align, unit_bytes
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import Action, Tier
from lohan_fx.planners.registry import register
from lohan_fx.planners.schedule import ALL_KEPT, tiny_residuals
from lohan_fx.planners.strategy import Activations, Setting, Strategy
from lohan_fx.planners.tiers import has_ssd, host_room

LINE = 0.99
"""Where the search ends, of the device budget."""

DELTA = 0.5
LATENCY_S = 20e-6
"""SSD latency, of the public artifact's configuration."""

_SHORTEST_S = 1e-12  # an op of no length still holds memory

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """Ops `first`..`last`−1 run without the value; `slots` are what its transfers take.

    A slot is (lane, first op, seconds of each op).
    """

    tier: Tier
    first: int
    last: int
    slots: tuple[tuple[str, int, Seconds], ...] = ()


class Slots:
    """Free seconds of each lane, by op."""

    def __init__(self, seconds: Seconds) -> None:
        self.free = {lane: seconds.copy() for lane in ("d2h", "h2d", "ssd")}

    def out(self, lane: str, first: int, stop: int, need: float) -> tuple[int, Seconds] | None:
        """(op behind the transfer, seconds taken) for a transfer that starts at op `first`."""
        total = np.cumsum(self.free[lane][first:stop])
        k = int(np.searchsorted(total, need * (1 - 1e-12)))
        if k >= len(total):
            return None
        taken = self.free[lane][first : first + k + 1].copy()
        taken[k] -= total[k] - need
        return first + k + 1, taken

    def back(self, lane: str, first: int, stop: int, need: float) -> tuple[int, Seconds] | None:
        """(op at which the transfer starts, seconds taken) for one that ends with op `stop`−1."""
        total = np.cumsum(self.free[lane][first:stop][::-1])
        k = int(np.searchsorted(total, need * (1 - 1e-12)))
        if k >= len(total):
            return None
        taken = self.free[lane][stop - k - 1 : stop].copy()
        taken[0] -= total[k] - need
        return stop - k - 1, taken

    def take(self, absence: Absence) -> None:
        for lane, first, taken in absence.slots:
            free = self.free[lane][first : first + len(taken)]
            np.maximum(free - taken, 0.0, out=free)


class _Migrations:
    """The policy's state: residency over time, free slots, room in the tiers."""

    def __init__(self, setting: Setting) -> None:
        w = self.workload = setting.workload
        self.setting = setting
        self.hw = setting.hw
        self.seconds: Seconds = np.array([op.seconds for op in w.ops]) + _SHORTEST_S
        self.slots = Slots(self.seconds)
        keep: dict[str, Action] = dict.fromkeys(w.residuals, "keep")
        self.load = setting.draft(Activations(actions=keep)).load.copy()
        self.line = int(LINE * setting.budget.device_bytes)
        self.tiers: dict[str, Tier] = {}
        self.room = _room(setting)
        tiny = tiny_residuals(w)
        self.waiting = [v for v in w.residuals if v not in tiny]

    def interval(self, value: str) -> tuple[int, int]:
        """The idle ops of a value: first, and the one behind the last."""
        w = self.workload
        return w.last_forward_use(value) + 1, w.first_backward_use(value)

    def benefit(self, value: str, first: int, last: int) -> float:
        """m·Σdt over the ops first..last−1 at which residency exceeds the line."""
        over = self.load[first:last] > self.line
        return self.workload.values[value].num_bytes * float(self.seconds[first:last][over].sum())

    @property
    def done(self) -> bool:
        return int(self.load.max(initial=0)) <= self.line

    def homes(self, value: str) -> Iterator[Tier]:
        """Tiers with room for a value: SSD first."""
        size = align(self.workload.values[value].num_bytes)
        return (tier for tier in ("ssd", "host") if self.room.get(tier, 0) >= size)

    def hidden(self, value: str) -> Absence | None:
        """The absence with transfers that the free slots hide, on SSD if it may be there."""
        size = self.workload.values[value].num_bytes
        first, last = self.interval(value)
        idle_s = float(self.seconds[first:last].sum())
        for tier in self.homes(value):
            if tier == "ssd" and idle_s <= ssd_interval_s(self.hw, size):
                continue
            found = self.book(value, tier, first, last)
            if found is not None and self.benefit(value, found.first, found.last) > 0:
                return found
        return None

    def book(self, value: str, tier: Tier, first: int, last: int) -> Absence | None:
        size = self.workload.values[value].num_bytes
        away = [("d2h", size / self.hw.d2h_bytes_per_s)]
        back = [("h2d", size / self.hw.h2d_bytes_per_s)]
        if tier == "ssd":
            away.append(("ssd", LATENCY_S + size / self.hw.ssd_write_bytes_per_s))
            back.append(("ssd", LATENCY_S + size / self.hw.ssd_read_bytes_per_s))
        begin, end, slots = first, last, []
        for lane, need in away:
            out = self.slots.out(lane, first, last, need)
            if out is None:
                return None
            begin = max(begin, out[0])
            slots.append((lane, first, out[1]))
        for lane, need in back:
            # behind the eviction, whose slots on a shared lane are not booked yet
            reload = self.slots.back(lane, begin, last, need)
            if reload is None:
                return None
            end = min(end, reload[0])
            slots.append((lane, reload[0], reload[1]))
        if end <= begin:
            return None
        return Absence(tier=tier, first=begin, last=end, slots=tuple(slots))

    def exposed(self, value: str) -> Absence | None:
        """The whole idle interval, transfers hidden or not; host memory first."""
        first, last = self.interval(value)
        tier = next(reversed(list(self.homes(value))), None)
        return None if tier is None else Absence(tier=tier, first=first, last=last)

    def migrate(self, absence_of: Callable[[str], Absence | None]) -> None:
        """Take items with the largest benefit until the line is met.

        The benefit is that of the whole idle interval. It never grows, as load only shrinks, so a
        lazy heap finds the largest. Items without a home, or without effect there, are left.
        """
        heap = [(-self.benefit(v, *self.interval(v)), k, v) for k, v in enumerate(self.waiting)]
        heapq.heapify(heap)
        while heap and not self.done:
            bound, k, v = heap[0]
            now = self.benefit(v, *self.interval(v))
            if now < -bound * (1 - 1e-9):
                heapq.heapreplace(heap, (-now, k, v))
                continue
            heapq.heappop(heap)
            absence = absence_of(v) if now else None
            if absence is not None:
                self.slots.take(absence)
                size = self.workload.values[v].num_bytes
                self.load[absence.first : absence.last] -= size
                self.room[absence.tier] -= align(size)
                self.tiers[v] = absence.tier
        self.waiting = [v for v in self.waiting if v not in self.tiers]


def ssd_interval_s(hw: HardwareProfile, num_bytes: int) -> float:
    """The shortest idle interval for which SSD is worth it: 2(latency + m/B) + δ·(one way)."""
    away = LATENCY_S + num_bytes / hw.ssd_write_bytes_per_s
    back = LATENCY_S + num_bytes / hw.ssd_read_bytes_per_s
    return away + back + DELTA * max(away, back)


def _room(setting: Setting) -> dict[Tier, int]:
    """Bytes for residuals in each tier that they may go to."""
    w, options = setting.workload, setting.options
    sizes = [w.values[v].num_bytes for v in w.residuals]
    ssd = has_ssd(setting.hw, setting.budget) and options.swap_to != "host"
    room: dict[Tier, int] = {}
    if ssd:
        taken = sum(unit_bytes(u) for u in w.units if setting.tiers[u.name] == "ssd")
        room["ssd"] = max(0, setting.budget.ssd_bytes - taken)
    if options.swap_to != "ssd":
        room["host"] = host_room(w, setting.budget, options, setting.tiers, sizes if ssd else ())
    return room


def migrate(setting: Setting) -> Activations:
    """The activation policy. What does not fit in the end is left to `finish` to refuse.

    Raises:
        InsufficientMemoryError: the host or SSD budget is too small for the states.
    """
    state = _Migrations(setting)
    state.migrate(state.hidden)
    hidden = len(state.tiers)
    state.migrate(state.exposed)
    notes = [
        f"{format_bytes(setting.num_bytes(values))} migrate to {tier}"
        for tier in ("ssd", "host")
        if (values := [v for v, t in state.tiers.items() if t == tier])
    ]
    if len(state.tiers) > hidden:
        notes.append(f"{len(state.tiers) - hidden} of {len(state.tiers)} migrations are exposed")
    residuals = setting.workload.residuals
    return Activations(
        actions={v: "swap" if v in state.tiers else "keep" for v in residuals},
        swap_tiers=state.tiers,
        notes=tuple(notes) or (ALL_KEPT,),
    )


G10 = register("g10")(Strategy(name="g10", activations=migrate, states="device", schedule="serial"))
