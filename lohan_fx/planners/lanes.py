"""Where copies start and end: two walks over the ops with a clock, FIFO lanes and a budget.

The walk forward places releases: a copy that leaves the device holds its memory until the lane
has finished it. The walk backward, in mirrored time, places prefetches: a copy that arrives
holds its memory from the moment it must start. Where memory does not allow that, the oldest
copy is cut short, and the clock waits for it, as the device will.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Load = npt.NDArray[np.int64]
"""Device bytes during each op: the largest residency of the instructions around it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A copy from the device: made by op `start`, last read by op `last_use`.

    Its memory may fall after any op in last_use..limit. `ssd_s` is 0.0 for host copies.
    """

    name: str
    num_bytes: int
    start: int
    last_use: int
    limit: int
    link_s: float
    ssd_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """A copy to the device, first read by op `use`.

    It may start before any op in earliest..use, and shall start before op `ahead` even if the
    lane would be fast enough for less.
    """

    name: str
    num_bytes: int
    use: int
    earliest: int
    ahead: int
    link_s: float
    ssd_s: float = 0.0


class _Lane:
    """A link with an SSD behind it; both FIFO, an SSD copy is done when both are."""

    def __init__(self) -> None:
        self.link = 0.0
        self.ssd = 0.0

    def finish(self, now: float, link_s: float, ssd_s: float) -> float:
        self.link = max(self.link, now) + link_s
        if not ssd_s:
            return self.link
        self.ssd = max(self.ssd, now) + ssd_s
        return max(self.link, self.ssd)


def place_releases(
    seconds: Sequence[float], load: Load, budget_bytes: int, copies: Iterable[Outgoing]
) -> dict[str, int]:
    """Choose for each copy the op after which its memory falls; adds the memory to `load`.

    That is the first op at or after `last_use` whose end the copy does not outlast. If the
    load at the next op would exceed the budget, it is the op before that one.
    """
    starting: dict[int, list[Outgoing]] = {}
    ending: dict[int, list[Outgoing]] = {}
    for copy in copies:
        starting.setdefault(copy.start, []).append(copy)
        ending.setdefault(copy.last_use, []).append(copy)
    placed: dict[str, int] = {}
    finish: dict[str, float] = {}
    pending: list[tuple[float, int, Outgoing]] = []
    lane, now, held, order = _Lane(), 0.0, 0, 0
    for i, duration in enumerate(seconds):
        while pending and load[i] + held > budget_bytes:
            end, _, copy = heapq.heappop(pending)
            placed[copy.name] = i - 1
            held -= copy.num_bytes
            now = max(now, end)
        load[i] += held
        now += duration
        for copy in starting.get(i, ()):
            finish[copy.name] = lane.finish(now, copy.link_s, copy.ssd_s)
        for copy in ending.get(i, ()):
            heapq.heappush(pending, (finish[copy.name], order, copy))
            held += copy.num_bytes
            order += 1
        due: list[tuple[float, int, Outgoing]] = []
        while pending and pending[0][0] <= now:
            due.append(heapq.heappop(pending))
        late = [item for item in pending if item[2].limit <= i]
        if late:
            now = max(end for end, _, _ in late)
            pending = [item for item in pending if item[2].limit > i]
            heapq.heapify(pending)
        for _, _, copy in due + late:
            placed[copy.name] = i
            held -= copy.num_bytes
    return placed


def place_prefetches(
    seconds: Sequence[float], load: Load, budget_bytes: int, copies: Iterable[Incoming]
) -> dict[str, int]:
    """Choose for each copy the op before which it starts; adds the memory to `load`.

    In mirrored time a copy "ends" where it must start. Copies keep the order of their uses.
    """
    using: dict[int, list[Incoming]] = {}
    bound: dict[int, list[Incoming]] = {}
    for copy in copies:
        using.setdefault(copy.use, []).append(copy)
        bound.setdefault(copy.earliest, []).append(copy)
    placed: dict[str, int] = {}
    pending: deque[tuple[float, Incoming]] = deque()
    lane, now, held = _Lane(), 0.0, 0

    def place(at: int) -> None:
        nonlocal now, held
        end, copy = pending.popleft()
        placed[copy.name] = at
        held -= copy.num_bytes
        now = max(now, end)

    for i in range(len(seconds) - 1, -1, -1):
        while pending and load[i] + held > budget_bytes:
            place(i + 1)
        load[i] += held
        now += seconds[i]
        for copy in using.get(i, ()):
            pending.append((lane.finish(now, copy.link_s, copy.ssd_s), copy))
            held += copy.num_bytes
        while pending and pending[0][0] <= now and i <= pending[0][1].ahead:
            place(i)
        late = {c.name for c in bound.get(i, ()) if c.name not in placed}
        if late:
            for _, copy in pending:
                if copy.name in late:
                    placed[copy.name] = i
                    held -= copy.num_bytes
            pending = deque(item for item in pending if item[1].name not in late)
    return placed
