"""capuchin: swap what is idle for long, then whichever of swap and recompute costs less.

Source: Peng et al., ASPLOS'20, as planners.md has it. Candidates are the values that are alive at
the peak and used again after it. FreeTime = (t_back − m/B) − (t_evict + m/B): where it is not
negative, the swap is hidden. Candidates are swapped in descending FreeTime while they are hidden
and memory is missing. After that the best swap (its overhead is −FreeTime) is compared with the
best recomputation: the one that saves the most memory per second (MSPS = m / recompute seconds),
whose cost grows as its sources are evicted. Swaps go to host memory; states stay on the device,
and the optimizer runs after backward.

Not as in the paper:
  - Idle is between the last use in forward and the first in backward; tensors that are idle
    within one phase stay.
  - What is missing is measured on the exact plan, and the search goes on at the new peak until
    it fits. A region whose own working set is the peak is swapped instead.
  - Regions are blocks: what one block recomputes is made in one go, right before backward first
    needs any of it (the paper's collective recomputation). Nothing is made twice.
  - Times are the roofline's, not those of a measured first iteration; the paper's feedback that
    moves swap-ins earlier is the placement of copies that all strategies share.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import numpy as np

from lohan_fx.errors import format_bytes
from lohan_fx.footprint import align
from lohan_fx.plan import Action
from lohan_fx.planners.algorithm1 import swap_room
from lohan_fx.planners.clock import Clock, in_s, out_s
from lohan_fx.planners.registry import register
from lohan_fx.planners.schedule import ALL_KEPT, Draft, must_save, tiny_residuals
from lohan_fx.planners.strategy import Activations, Setting, Strategy


def free_time_s(setting: Setting, clock: Clock, value: str) -> float:
    """Seconds by which a swap of `value` through host memory is hidden; negative if it is not."""
    size = setting.workload.values[value].num_bytes
    back = clock.back(value) - in_s(setting.hw, size, "host")
    return back - (clock.idle_from(value) + out_s(setting.hw, size, "host"))


class _Hybrid:
    """The policy's state: what is decided, and what a recomputation costs now."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.workload = setting.workload
        clock = Clock(self.workload)
        self.free_s = {v: free_time_s(setting, clock, v) for v in self.workload.residuals}
        self.actions: dict[str, Action] = dict.fromkeys(self.workload.residuals, "keep")
        self.fixed = must_save(self.workload)
        self.tiny = tiny_residuals(self.workload)
        outputs = (v.name for v in self.workload.values.values() if v.is_output)
        self.available = {*self.workload.residuals, *outputs}
        self.room = swap_room(
            self.workload, setting.hw, setting.budget, setting.options, setting.tiers
        ).total

    def recompute_s(self, value: str) -> float:
        """Seconds to make a value again from what is not recomputed itself."""
        self.available.discard(value)
        ops, _ = self.workload.recompute_ops([value], self.available)
        self.available.add(value)
        return sum(self.workload.ops[i].seconds for i in ops)

    def candidates(self, peak: int) -> list[str]:
        """Values that are kept, idle at op `peak`, and used again."""
        w = self.workload
        return [
            v
            for v, action in self.actions.items()
            if action == "keep"
            and v not in self.tiny
            and w.last_forward_use(v) < peak < w.first_backward_use(v)
        ]

    def can_swap(self, value: str) -> bool:
        return align(self.workload.values[value].num_bytes) <= self.room

    def decide(self, value: str, action: Action) -> int:
        """Take a decision; returns the bytes that it frees."""
        size = self.workload.values[value].num_bytes
        self.actions[value] = action
        if action == "swap":
            self.room -= align(size)
            self.available.add(value)
        else:
            self.available.discard(value)
        return size

    def free(self, candidates: Iterable[str], missing: int) -> bool:
        """Decide about candidates until `missing` bytes are free; whether any was decided."""
        size = self.workload.values
        swaps = sorted(candidates, key=lambda v: (self.free_s[v], v))  # the best one last
        remakes = [
            (self.recompute_s(v) / max(1, size[v].num_bytes), v)
            for v in swaps
            if v not in self.fixed
        ]
        heapq.heapify(remakes)  # the highest MSPS first
        left = set(swaps)
        count = len(left)
        while missing > 0 and left:
            swap = self.best_swap(swaps, left)
            remake = None
            if swap is None or self.free_s[swap] < 0:
                remake = self.best_recomputation(remakes, left)
            if swap is None and remake is None:
                break
            if remake is not None and (swap is None or remake[0] < -self.free_s[swap]):
                left.discard(remake[1])
                missing -= self.decide(remake[1], "recompute")
            elif swap is not None:
                left.discard(swap)
                missing -= self.decide(swap, "swap")
        return len(left) < count

    def best_swap(self, swaps: list[str], left: set[str]) -> str | None:
        """The candidate with the most FreeTime that host memory has room for."""
        while swaps and not (swaps[-1] in left and self.can_swap(swaps[-1])):
            swaps.pop()
        return swaps[-1] if swaps else None

    def best_recomputation(
        self, remakes: list[tuple[float, str]], left: set[str]
    ) -> tuple[float, str] | None:
        """(seconds, candidate) with the highest MSPS. Costs only grow: re-rank the top alone."""
        while remakes:
            rank, v = remakes[0]
            if v not in left:
                heapq.heappop(remakes)
                continue
            seconds = self.recompute_s(v)
            now = seconds / max(1, self.workload.values[v].num_bytes)
            if now <= rank * (1 + 1e-9):
                return seconds, v
            heapq.heapreplace(remakes, (now, v))
        return None

    def relieve(self, made: Draft, peak: int) -> bool:
        """Swap the members of regions that stand at the peak; whether there were any."""
        swapped = False
        for region in made.regions:
            end = max(self.workload.users[v][-1] for v in region.wanted)
            for v in region.wanted if region.anchor <= peak <= end else ():
                if self.can_swap(v):
                    self.decide(v, "swap")
                    swapped = True
        return swapped


def hybrid(setting: Setting) -> Activations:
    """The activation policy. What does not fit in the end is left to `finish` to refuse.

    Raises:
        InsufficientMemoryError: the host or SSD budget is too small for the states.
    """
    state = _Hybrid(setting)
    while True:
        made = setting.draft(Activations(actions=state.actions))
        missing = made.memory.peak_bytes - setting.budget.device_bytes
        if missing <= 0:
            break
        peak = int(np.argmax(made.load))
        if not state.free(state.candidates(peak), missing) and not state.relieve(made, peak):
            break
    counts = [
        f"{format_bytes(setting.num_bytes(values))} {name}"
        for name in ("swap", "recompute")
        if (values := [v for v, action in state.actions.items() if action == name])
    ]
    note = ", ".join(counts) or ALL_KEPT
    return Activations(actions=state.actions, notes=(note,))


CAPUCHIN = register("capuchin")(
    Strategy(
        name="capuchin", activations=hybrid, states="device", swap_to="host", schedule="serial"
    )
)
