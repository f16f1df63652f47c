"""Measured refinement: the first steps correct the cost model, once, and perhaps the plan.

A plan is made from rooflines and a profile that was taken on an idle machine. In a step, ops take
their own time, and links, SSDs and the CPU optimizer share the host's memory. So the second step
times every op, the third and the fourth record the lanes; from these come seconds by op and the
rates at which bytes really moved. Plans are compared by `simulate` with those, never by a clock.
Steps are those of the optimizer: of several backwards that make one, the first is timed and all are
recorded, and the plan changes between two steps.
Nothing here changes a model: see `compiled.replanning`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import Plan
from lohan_fx.program import lower
from lohan_fx.runtime.lanes import Lanes
from lohan_fx.runtime.op_timing import OpTimer
from lohan_fx.runtime.recording import Recorder
from lohan_fx.simulate.updates import update_share
from lohan_fx.timeline import SSD_WRITES, Lane, Span, Timeline
from lohan_fx.workload import Workload

MIN_GAIN = 0.02
"""A plan replaces the first one if it is predicted to be faster by more than this share."""

TIMED_STEP = 2
RECORDED_STEPS = (3, 4)
"""Counted from 1. In the first step kernels are built and memory is touched."""

_MIN_BYTES = 2**20
"""Smaller copies measure latency, not bandwidth."""

_MAX_CORRECTION = 4.0
"""A rate that is off by more was measured wrongly, then or now."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the first steps say: the workload with measured seconds, the profile with the rates
    of a running step."""

    workload: Workload
    hw: HardwareProfile


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of it.

    Attributes:
        before_s, after_s: predicted seconds a step, of the first plan and of the one that is used:
            both by the simulator, with what was measured. Neither is the time of a real step.
        moved: names of units that live in another tier since, or keep a compute copy, or no longer.
        seconds: what planning and changing took.
    """

    before_s: float
    after_s: float
    moved: tuple[str, ...]
    seconds: float

    @property
    def changed(self) -> bool:
        return self.after_s < self.before_s

    def text(self) -> str:
        """For people, who compare what they read with their clock: neither figure is of one."""
        found = "with what the first steps measured, the simulator predicts "
        what = "of one forward, backward and its updates"
        if not self.changed:
            return (
                f"{found}{self.before_s:.4g} s a step, and no other plan that is faster by more "
                f"than {MIN_GAIN:.0%}: the plan stays. This is a prediction, {what}, not the time "
                "of a step that ran"
            )
        units = "1 unit" if len(self.moved) == 1 else f"{len(self.moved)} units"
        moved = f", {units} elsewhere or with other copies" if self.moved else ""
        return (
            f"{found}{self.before_s:.4g} s a step of the first plan and {self.after_s:.4g} s of "
            f"another, which replaces it{moved} (took {self.seconds:.1f} s; refine=False keeps the "
            f"first plan). Both are predictions, {what}, not times of steps that ran"
        )


class _Timed(Protocol):
    """What takes an `OpTimer`: an executor."""

    timer: OpTimer | None


class Refinement:
    """Watches the first steps of one program. A forward of another one in between starts it
    again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._executor: _Timed | None = None
        self._step = 0
        self._timer: OpTimer | None = None
        self._recorder: Recorder | None = None
        self._num_recorded = 0

    def before_forward(self, executor: _Timed, lanes: Lanes, *, begins: bool) -> bool:
        """A forward begins, and with it a step (`begins`) or not; says whether all is measured, and
        then leaves nothing attached."""
        if self._executor is not executor:
            self.detach(lanes)
            self._executor, self._step, self._timer, self._recorder = executor, 0, None, None
            self._num_recorded = 0
        self._step += begins
        if self._recorder is not None and lanes.recorder is not self._recorder:
            self._recorder = None  # the user has recorded instead: ours lacks a step, or its part
        if self._timer is not None and executor.timer is self._timer:
            executor.timer = None
        if self._step == TIMED_STEP and self._timer is None and executor.timer is None:
            executor.timer = self._timer = OpTimer(self._device)
        if self._step == RECORDED_STEPS[0] and lanes.recorder is None:
            lanes.recorder = self._recorder = Recorder(self._device)
        if self._step > RECORDED_STEPS[-1]:
            return True
        self.count(executor)
        return False

    def count(self, executor: _Timed) -> None:
        """A forward of this program begins; where others wait for their backward, nothing is
        attached or detached."""
        self._num_recorded += self._recorder is not None and self._executor is executor

    def detach(self, lanes: Lanes) -> None:
        """Measure no more. The steps that were recorded must have ended."""
        if self._executor is not None and self._executor.timer is self._timer:
            self._executor.timer = None
        if lanes.recorder is self._recorder:
            lanes.recorder = None

    def measured(self, workload: Workload, hw: HardwareProfile, plan: Plan) -> Measured | None:
        """The corrected cost model of what ran by this plan; None if the user measured in these
        steps."""
        if self._timer is None or self._recorder is None:
            return None
        timeline = self._recorder.timeline("first steps")
        seconds = self._timer.seconds()
        share = running_share(timeline, workload.timed(seconds), plan, self._num_recorded)
        return Measured(
            workload=workload.timed({op: share * s for op, s in seconds.items()}),
            hw=corrected(hw, timeline, workload, plan),
        )


def running_share(timeline: Timeline, timed: Workload, plan: Plan, num_runs: int) -> float:
    """Seconds of compute in what was recorded over those of all its ops, timed one by one; at most
    1.

    Timing adds to small ops: on CUDA the device waits at times for the host, which is slow beside
    the CPU optimizer (a Llama of 1.2B on an H100: 0.26 s of ops in a step that computes for 0.20).

    Args:
        timed: with the seconds of ops by themselves.
        num_runs: forwards with their backward that were recorded.
    """
    ops = sum(
        x.seconds for x in lower(timed, plan).instructions if x.kind in ("compute", "recompute")
    )
    apart = ("update", "fetch_unit")  # not the ops' work (nor are norms: they take far less)
    ran = sum(s.seconds for s in timeline.by_lane["gpu"] if not s.stall and s.kind not in apart)
    return min(1.0, max(ran / num_runs / ops, 1 / _MAX_CORRECTION)) if ops and ran else 1.0


def corrected(
    hw: HardwareProfile, timeline: Timeline, workload: Workload, plan: Plan
) -> HardwareProfile:
    """The profile with the rates that the lanes had. What did not run keeps its rate."""
    lanes = timeline.by_lane
    h2d = _limited(hw.h2d_bytes_per_s, _bandwidth(lanes["h2d"]))
    d2h = _limited(hw.d2h_bytes_per_s, _bandwidth(lanes["d2h"]))
    units = workload.unit_by_name
    updates = [s for s in lanes["cpu"] if s.kind == "update"]
    work = sum(
        update_share(units[s.name], plan.units[s.name].tier, plan.schedule)
        * units[s.name].num_params
        for s in updates
    )
    optimizer = _limited(
        hw.cpu_optimizer_params_per_s, _rate(work, sum(s.seconds for s in updates))
    )
    changes = {
        "h2d_bytes_per_s": h2d,
        "d2h_bytes_per_s": d2h,
        "duplex_bytes_per_s": max(min(hw.duplex_bytes_per_s, h2d + d2h), h2d, d2h),
        "cpu_optimizer_params_per_s": optimizer,
    }
    if hw.ssds and lanes["ssd"]:
        factor = _ssd_factor(hw, timeline)
        changes["ssd_read_bytes_per_s"] = factor * hw.ssd_read_bytes_per_s
        changes["ssd_write_bytes_per_s"] = factor * hw.ssd_write_bytes_per_s
    return hw.replace(**changes)


def _bandwidth(spans: Iterable[Span]) -> float | None:
    large = [s for s in spans if s.num_bytes >= _MIN_BYTES]
    return _rate(sum(s.num_bytes for s in large), sum(s.seconds for s in large))


def _rate(amount: float, seconds: float) -> float | None:
    return amount / seconds if amount and seconds > 0 else None


def _limited(rate: float, found: float | None) -> float:
    if found is None:
        return rate
    return min(max(found, rate / _MAX_CORRECTION), rate * _MAX_CORRECTION)


def _ssd_factor(hw: HardwareProfile, timeline: Timeline) -> float:
    """Measured over expected speed of a lane on which reads and writes take turns."""
    lane: Lane = "ssd"
    expected = sum(
        s.num_bytes
        / (hw.ssd_write_bytes_per_s if s.kind in SSD_WRITES else hw.ssd_read_bytes_per_s)
        for s in timeline.by_lane[lane]
    )
    busy = timeline.busy_s(lane)
    return _limited(1.0, _rate(expected, busy))
