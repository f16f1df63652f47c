"""Record a real step as a `Timeline`: CUDA events on the lanes' streams, host clocks elsewhere.

Recording is off unless a `Recorder` is attached to the lanes; then every transfer, update, wait and
stretch of compute between two waits leaves one span.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from lohan_fx.hardware import lane_name
from lohan_fx.timeline import Lane, Span, StepPhase, Timeline

Stamp = torch.cuda.Event | tuple[torch.cuda.Event, torch.cuda.Event] | float
"""A moment: an event on a stream, the later of two, or seconds of the host's clock."""


class Label(NamedTuple):
    """What a transfer is about: kind and name of its instruction, and where that stands."""

    kind: str
    name: str
    phase: StepPhase


class Recorder:
    """Collects the spans of one step, as tuples in a list, to which any thread may append: what
    this costs is the launching thread's time. Names are made when all is over."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._raw: list[tuple[Lane, Label | StepPhase, Stamp, Stamp, int]] = []
        self._segment: Stamp | None = None
        self.phase: StepPhase = "forward"
        if self._cuda:
            torch.cuda.synchronize()
        self._base = self.mark()
        self._base_s = time.perf_counter()

    def mark(self, stream: torch.cuda.Stream | None = None) -> torch.cuda.Event | float:
        """Now, on a stream, or on the current one, which torch looks up in Python (on a CPU device:
        on the host). The device takes some microseconds over it, too."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def add(self, lane: Lane, label: Label, start: Stamp, end: Stamp, num_bytes: int = 0) -> None:
        self._raw.append((lane, label, start, end, num_bytes))

    # -- the compute lane --------------------------------------------------------------------

    @property
    def computing(self) -> bool:
        """Whether this is between `begin_compute` and `end_compute`."""
        return self._segment is not None

    def begin_compute(self, now: Stamp | None = None) -> None:
        """Compute goes on from here, or from `now`: fewer events, less that recording costs."""
        self._segment = self.mark() if now is None else now

    def end_compute(self, stream: torch.cuda.Stream | None = None) -> torch.cuda.Event | float:
        """Compute, on this stream, pauses here, for an op of ours."""
        now = self.mark(stream)
        if self._segment is not None:
            self._raw.append(("gpu", self.phase, self._segment, now, 0))
            self._segment = None
        return now

    def drop_compute(self) -> None:
        """Compute does not go on: what it was doing has failed."""
        self._segment = None

    # -- result ------------------------------------------------------------------------------

    def timeline(self, name: str) -> Timeline:
        """Everything recorded so far, in seconds since the recorder was made."""
        if self._cuda:
            torch.cuda.synchronize()
        spans, count = [], 0
        for lane, what, start, end, num_bytes in tuple(self._raw):
            if isinstance(what, Label):
                label = what
            else:  # the phase of a stretch of compute
                label = Label("compute", f"segment {count}", what)
                count += 1
            start_s, end_s = self._seconds(start), self._seconds(end)
            spans.append(
                Span(
                    lane=lane,
                    name=label.name,
                    kind=label.kind,
                    start_s=start_s,
                    end_s=max(start_s, end_s),
                    num_bytes=num_bytes,
                    phase=label.phase,
                )
            )
        compute = lane_name("gpu", "cuda" if self._cuda else "cpu")
        return Timeline(name=name, spans=tuple(spans), compute=compute)

    def _seconds(self, stamp: Stamp) -> float:
        if isinstance(stamp, float):
            return stamp - self._base_s
        if isinstance(stamp, tuple):
            return max(map(self._seconds, stamp))
        assert isinstance(self._base, torch.cuda.Event)
        return self._base.elapsed_time(stamp) / 1e3
