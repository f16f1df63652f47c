"""What happens when: spans as they end, and memory over time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lohan_fx.timeline import Lane, Series, Span, StepPhase


@dataclass(frozen=True, slots=True, eq=False)
class Label:
    """What a span says; one object a transfer. A `free` transfer takes no time (warm start); the
    bytes of one that does not count are another step's."""

    name: str
    kind: str
    phase: StepPhase
    block: str
    free: bool = False
    counts: bool = True


class Recorder:
    """Spans as they end; pieces of one transfer that touch become one span."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._open: dict[Lane, tuple[float, float, Label, int]] = {}

    def add(self, lane: Lane, start: float, end: float, label: Label, num_bytes: int = 0) -> None:
        last = self._open.get(lane)
        if last is not None:
            if last[2] is label and last[1] == start:
                self._open[lane] = (last[0], end, label, last[3] + num_bytes)
                return
            self._close(lane, *last)
        self._open[lane] = (start, end, label, num_bytes)

    def _close(self, lane: Lane, start: float, end: float, label: Label, num_bytes: int) -> None:
        self.spans.append(
            Span(
                lane=lane,
                name=label.name,
                kind=label.kind,
                start_s=start,
                end_s=end,
                num_bytes=num_bytes if label.counts else 0,
                phase=label.phase,
                block=label.block,
            )
        )

    def finish(self, origin_s: float, end_s: float) -> Iterator[Span]:
        """Spans by the time since the step's start. What goes on after its end is cut there, and
        what the step before left over moves no bytes of this one."""
        for lane, last in self._open.items():
            self._close(lane, *last)
        self._open.clear()
        if not origin_s:
            yield from self.spans
            return
        for span in self.spans:
            start, end = (min(t, end_s) - origin_s for t in (span.start_s, span.end_s))
            if end <= 0:
                continue
            yield replace(span, start_s=max(start, 0.0), end_s=end)


class NoRecorder(Recorder):
    """Keeps nothing, for those who only want to know how long a step takes."""

    def add(self, lane: Lane, start: float, end: float, label: Label, num_bytes: int = 0) -> None:
        pass


def series_of(points: list[tuple[float, int]]) -> Series:
    """Largest value at each time, without repetitions."""
    found: list[tuple[float, int]] = []
    for time, size in points:
        if found and found[-1][0] == time:
            found[-1] = (time, max(found[-1][1], size))
        elif not found or found[-1][1] != size:
            found.append((time, size))
    return tuple(found)


def slot_series(base: int, changes: list[tuple[float, int]]) -> Series:
    """What `base` bytes become by changes in any order."""
    now = base
    points = [(0.0, base)]
    for time, change in sorted(changes, key=lambda c: c[0]):
        now += change
        points.append((time, now))
    return series_of(points)
