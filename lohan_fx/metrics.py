"""What a step moved, took and wore, as a plain dict for a logger.

`Meter.read` turns counters that the runtime keeps anyway into `model.lohan.metrics()`; `KEYS` says
what each value means. Counters only grow: values "since the last call" are differences.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from lohan_fx.hardware import HardwareProfile
from lohan_fx.runtime.arena import Arena
from lohan_fx.runtime.clipping import Clipping
from lohan_fx.runtime.lanes import Counters
from lohan_fx.runtime.memory import Memory

LINKS = ("d2h", "h2d", "ssd_read", "ssd_write")

KEYS: dict[str, str] = {
    "lohan/steps": "steps that backward began and optimizer.step() ended since the model was "
    "compiled, those left out for their gradients, too",
    "lohan/step_s": "seconds from the end of one optimizer.step() to that of the next, averaged "
    "over the steps since the last call; absent if there are none, or no two yet",
    "lohan/wait_s": "seconds that optimizer.step() and what joins it waited for updates, since the "
    "last call",
    "lohan/exposed_s": "seconds that compute waited for transfers in forward and backward, since "
    "the last call; absent on CUDA, where only model.lohan.record() knows it",
    "lohan/d2h_s": "seconds in which the lane copied device to host, since the last call; absent "
    "on CUDA",
    "lohan/h2d_s": "the same for host to device",
    "lohan/ssd_s": "seconds in which at least one SSD transfer ran, since the last call",
    "lohan/cpu_optimizer_s": "seconds of updates in host memory, since the last call",
    **{
        f"lohan/{link}_bytes": f"bytes moved over the link {link.replace('_', ' ')}, since the "
        "last call"
        for link in LINKS
    },
    **{f"lohan/total_{link}_bytes": "the same since the model was compiled" for link in LINKS},
    "lohan/ssd_written_bytes": "bytes that system calls have written to SSDs in this run, padding "
    "included: what wears them",
    "lohan/ssd_wear": "that as a share of the rated endurance of all SSDs together; absent unless "
    "each of hw.ssds has its endurance_bytes",
    "lohan/ssd_retries": "SSD system calls made again since the run began, because they had failed",
    "lohan/parked_bytes": "model states that left a failing SSD for host memory, beyond the plan",
    "lohan/planned_device_bytes": "largest peak of device memory by the plans of all programs",
    "lohan/device_peak_bytes": "largest that torch's allocator had allocated on the device; absent "
    "on a CPU device",
    "lohan/host_bytes": "host memory that the runtime holds",
    "lohan/ssd_bytes": "SSD space that the run holds",
    "lohan/grad_norm": "norm of the last step's gradients before clipping; absent unless "
    "clip_grad_norm or skip_nonfinite needs it, and not finite in a step that was skipped; reading "
    "it may wait for the step's updates, as model.lohan.grad_norm",
    "lohan/skipped_steps": "steps left out because their gradients were not finite "
    "(skip_nonfinite), since the model was compiled",
    "lohan/redone_steps": "steps whose updates were tried beside backward in vain, as their "
    "gradients had to be clipped (schedule 'speculative'), since the model was compiled",
    "lohan/programs": "programs made and kept, one for each signature of inputs",
    "lohan/late_updates": "unit updates that the last optimizer.step() left to run beside the next "
    "forward (schedules 'overlapped', 'deferred', 'speculative')",
}
"""Every key that `model.lohan.metrics()` may have, and what its value is."""


@dataclass(kw_only=True)
class Meter:
    """Keeps what the last call saw.

    Attributes:
        num_steps: steps that have ended.
    """

    num_steps: int = 0
    _ended_s: float = 0.0
    _first_s: float = 0.0
    _first_step: int = 0
    _moved: Counters = field(default_factory=Counters)
    _seconds: dict[str, float] = field(default_factory=dict)

    def end_step(self) -> None:
        """An optimizer.step() ends."""
        self.num_steps += 1
        self._ended_s = time.perf_counter()
        if self._first_step == 0:
            self._first_s, self._first_step = self._ended_s, self.num_steps

    def read(
        self,
        memory: Memory | None,
        hw: HardwareProfile,
        device: torch.device,
        peaks: Sequence[int],
        clipping: Clipping,
    ) -> dict[str, float | int]:
        """The metrics; see `KEYS`.

        Args:
            memory: of the model; None before its first program.
            hw: the profile whose SSDs it uses.
            device: where it computes.
            peaks: planned bytes on the device, of each program.
            clipping: what became of its gradients.
        """
        found: dict[str, float | int] = {"lohan/steps": self.num_steps}
        if self.num_steps > self._first_step:
            steps = self.num_steps - self._first_step
            found["lohan/step_s"] = (self._ended_s - self._first_s) / steps
            self._first_s, self._first_step = self._ended_s, self.num_steps
        now = _lane_seconds(memory, device)
        for name, seconds in now.items():
            found[f"lohan/{name}"] = seconds - self._seconds.get(name, 0.0)
        self._seconds = now
        moved = memory.lanes.counters.copy() if memory is not None else Counters()
        for prefix, counters in (("", moved.minus(self._moved)), ("total_", moved)):
            for link in LINKS:
                found[f"lohan/{prefix}{link}_bytes"] = getattr(counters, f"{link}_bytes")
        self._moved = moved
        found.update(_ssd(memory, hw))
        found.update(_memory(memory, device, peaks))
        found.update(_gradients(clipping))
        return found


def _lane_seconds(memory: Memory | None, device: torch.device) -> dict[str, float]:
    """Seconds so far, by the names of their keys."""
    lanes = memory.lanes if memory is not None else None
    pool = memory.pool if memory is not None else None
    found = {
        "wait_s": lanes.wait_s if lanes is not None else 0.0,
        "cpu_optimizer_s": lanes.update_s if lanes is not None else 0.0,
        "ssd_s": pool.counters.busy_s if pool is not None else 0.0,
    }
    if device.type == "cpu":
        found["exposed_s"] = lanes.exposed_s if lanes is not None else 0.0
        found["d2h_s"] = lanes.d2h.busy_s if lanes is not None else 0.0
        found["h2d_s"] = lanes.h2d.busy_s if lanes is not None else 0.0
    return found


def _ssd(memory: Memory | None, hw: HardwareProfile) -> dict[str, float | int]:
    pool = memory.pool if memory is not None else None
    written = pool.counters.bytes_written if pool is not None else 0
    found: dict[str, float | int] = {
        "lohan/ssd_written_bytes": written,
        "lohan/ssd_retries": pool.counters.num_retries if pool is not None else 0,
        "lohan/parked_bytes": 0,
        "lohan/ssd_bytes": 0,
    }
    ratings = [ssd.endurance_bytes for ssd in hw.ssds]
    rated = [rating for rating in ratings if rating is not None]
    if rated and len(rated) == len(ratings):
        found["lohan/ssd_wear"] = written / sum(rated)
    if memory is not None:
        files = [file for file in (memory.file, memory.store.file) if file is not None]
        found["lohan/ssd_bytes"] = sum(file.num_bytes for file in files)
        found["lohan/parked_bytes"] = sum(
            states.num_bytes for states in memory.states.units if states.parked
        )
    return found


def _memory(
    memory: Memory | None, device: torch.device, peaks: Sequence[int]
) -> dict[str, float | int]:
    arenas: list[Arena | None] = []
    if memory is not None:
        arenas = [memory.arena, memory.buffer_arena, memory.store.arena]
        arenas += [*memory.moved, *memory.spares]
    updater = memory.updater if memory is not None else None
    found: dict[str, float | int] = {
        "lohan/planned_device_bytes": max(peaks, default=0),
        "lohan/host_bytes": sum(arena.num_bytes for arena in arenas if arena is not None),
        "lohan/programs": len(peaks),
        "lohan/late_updates": updater.num_left if updater is not None else 0,
    }
    if device.type == "cuda":
        found["lohan/device_peak_bytes"] = torch.cuda.max_memory_allocated(device)
    return found


def _gradients(clipping: Clipping) -> dict[str, float | int]:
    found: dict[str, float | int] = {
        "lohan/skipped_steps": clipping.skipped_steps,
        "lohan/redone_steps": clipping.redone_steps,
    }
    if clipping.grad_norm is not None:
        found["lohan/grad_norm"] = clipping.grad_norm
    return found
