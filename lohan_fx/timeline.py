"""What happened when, on which lane: simulated or recorded. Nothing here knows torch.

The simulator (`lohan_fx.simulate`) makes a `Timeline`, the runtime records one of the same kind, so
that the error of the model is `diff(simulated, recorded)`, and both open side by side in Perfetto
(`trace`, `save_trace`). Times are seconds since the step began; the trace is in microseconds.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from lohan_fx.arguments import path_of
from lohan_fx.errors import LohanError, format_bytes
from lohan_fx.reading import json_of

Lane = Literal["gpu", "h2d", "d2h", "ssd", "cpu"]
StepPhase = Literal["forward", "backward", "optimizer"]

LANES: tuple[Lane, ...] = ("gpu", "h2d", "d2h", "ssd", "cpu")
PHASES: tuple[StepPhase, ...] = ("forward", "backward", "optimizer")
TRANSFER_LANES: tuple[Lane, ...] = ("h2d", "d2h", "ssd")

SSD_WRITES: frozenset[str] = frozenset({"offload", "write_states"})
"""Kinds of span that write on the ssd lane; all others read."""

STALLS: Mapping[str, tuple[Lane, ...]] = {
    "release": ("d2h", "ssd"),
    "wait": ("h2d", "ssd"),
    "wait_unit": ("h2d", "ssd"),
    "release_gradients": ("d2h", "ssd"),
    "emit_gradients": ("cpu", "ssd", "d2h"),
    "join": ("cpu", "ssd", "d2h"),
}
"""Kinds of span on the gpu lane in which it does nothing, and the lanes it may wait for.

`emit_gradients` waits for a free gradient buffer, `join` is optimizer.step() at the end.
"""

Interval = tuple[float, float]
Series = tuple[tuple[float, int], ...]
"""(seconds, bytes) points of a step function: the bytes hold until the next point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One stretch of work (or, on the gpu lane, of waiting: kinds in `STALLS`).

    `name` is the op, residual, unit window, unit or region that it is about, as in
    `program.Instruction`. Kinds: compute, recompute (gpu); update (gpu, cpu); offload, prefetch
    (links, ssd); fetch_unit (links, ssd; gpu: a cast); emit_gradients (d2h); read_states,
    write_states (ssd); direct_read and write_gradient (gpu and a link: compute itself reaches into
    host memory).
    `phase` is where the program ordered the work; it may run later.
    """

    lane: Lane
    name: str
    kind: str
    start_s: float
    end_s: float
    num_bytes: int = 0
    phase: StepPhase = "forward"
    block: str = ""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @property
    def stall(self) -> bool:
        return self.lane == "gpu" and self.kind in STALLS


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """The gpu lane waits: for `name`, most of the time because of what `lane` was doing.

    `lane` is the one, among those that the wait depends on, that was busy longest meanwhile.
    """

    name: str
    kind: str
    lane: Lane
    start_s: float
    end_s: float
    phase: StepPhase
    block: str

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes moved, by link. Fields as in `plan.Prediction` and the runtime's counters."""

    d2h_bytes: int = 0
    h2d_bytes: int = 0
    ssd_read_bytes: int = 0
    ssd_write_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """All spans of one step, and the memory of each tier over time.

    Attributes:
        name: what a trace shows as the process: "simulated lohan", "recorded step 3".
        spans: by lane, then start. Spans of the ssd lane may overlap in a recording.
        memory: tier or any other name → series in bytes.
        compute: what people are shown as the name of the gpu lane (`HardwareProfile.lane_name`).
    """

    name: str
    spans: tuple[Span, ...] = ()
    memory: Mapping[str, Series] = field(default_factory=dict)
    compute: str = "gpu"

    def __post_init__(self) -> None:
        order = {lane: i for i, lane in enumerate(LANES)}
        odd = {s.lane for s in self.spans} - set(order)
        if odd:
            raise ValueError(f"unknown lanes {sorted(odd)}: use {', '.join(LANES)}")
        ordered = sorted(self.spans, key=lambda s: (order[s.lane], s.start_s))
        object.__setattr__(self, "spans", tuple(ordered))

    # -- parts ------------------------------------------------------------------------------

    @cached_property
    def by_lane(self) -> Mapping[Lane, tuple[Span, ...]]:
        """Lane → its spans by start; every lane is there."""
        found: dict[Lane, list[Span]] = {lane: [] for lane in LANES}
        for span in self.spans:
            found[span.lane].append(span)
        return {lane: tuple(spans) for lane, spans in found.items()}

    @cached_property
    def start_s(self) -> float:
        return min((s.start_s for s in self.spans), default=0.0)

    @cached_property
    def end_s(self) -> float:
        return max((s.end_s for s in self.spans), default=0.0)

    @cached_property
    def phases(self) -> Mapping[StepPhase, Interval]:
        """Phase → (start, end) in seconds: forward and backward end with their last span on
        the gpu lane, the optimizer phase is what is left of the step."""
        ends = dict.fromkeys(("forward", "backward"), self.start_s)
        for span in self.by_lane["gpu"]:
            if span.phase in ends:
                ends[span.phase] = max(ends[span.phase], span.end_s)
        forward = ends["forward"]
        backward = max(forward, ends["backward"])
        return {
            "forward": (self.start_s, forward),
            "backward": (forward, backward),
            "optimizer": (backward, max(backward, self.end_s)),
        }

    def window(self, phase: StepPhase | None = None) -> Interval:
        """(start, end) of a phase, in seconds; of the whole step if None."""
        return (self.start_s, self.end_s) if phase is None else self.phases[phase]

    # -- seconds ----------------------------------------------------------------------------

    @cached_property
    def _busy(self) -> Mapping[Lane, list[Interval]]:
        return {
            lane: _union((s.start_s, s.end_s) for s in spans if not s.stall)
            for lane, spans in self.by_lane.items()
        }

    def busy_s(self, lane: Lane, phase: StepPhase | None = None) -> float:
        """Seconds in which the lane works, in all or during one phase. Stalls do not count."""
        return _total(_clip(self._busy[lane], *self.window(phase)))

    def idle_s(self, lane: Lane, phase: StepPhase | None = None) -> float:
        """Seconds of the step, or of one phase, in which the lane does not work."""
        start, end = self.window(phase)
        return end - start - self.busy_s(lane, phase)

    def exposed_s(
        self, lanes: Lane | Sequence[Lane] = TRANSFER_LANES, phase: StepPhase | None = None
    ) -> float:
        """Seconds in which any of these lanes works and the gpu lane does not.

        The default is the exposed transfer time: what links and SSDs add to the step.
        """
        names: Sequence[Lane] = (lanes,) if isinstance(lanes, str) else lanes
        window = self.window(phase)
        any_busy = _union(x for lane in names for x in _clip(self._busy[lane], *window))
        return _total(any_busy) - _total(_both(any_busy, self._busy["gpu"]))

    def binding(self, phase: StepPhase | None = None) -> Lane:
        """The lane that works longest; gpu first among equals."""
        return max(LANES, key=lambda lane: self.busy_s(lane, phase))

    @cached_property
    def stalls(self) -> tuple[Stall, ...]:
        """The waits of the gpu lane, in order, each with the lane to blame."""
        found = []
        for span in self.by_lane["gpu"]:
            if span.stall:
                blamed = max(
                    STALLS[span.kind],
                    key=lambda lane: _total(_clip(self._busy[lane], span.start_s, span.end_s)),
                )
                found.append(
                    Stall(
                        name=span.name,
                        kind=span.kind,
                        lane=blamed,
                        start_s=span.start_s,
                        end_s=span.end_s,
                        phase=span.phase,
                        block=span.block,
                    )
                )
        return tuple(found)

    # -- bytes ------------------------------------------------------------------------------

    @cached_property
    def traffic(self) -> Traffic:
        """Bytes of all spans, by link and for the SSDs by direction."""
        ssd = self.by_lane["ssd"]
        return Traffic(
            d2h_bytes=sum(s.num_bytes for s in self.by_lane["d2h"]),
            h2d_bytes=sum(s.num_bytes for s in self.by_lane["h2d"]),
            ssd_read_bytes=sum(s.num_bytes for s in ssd if s.kind not in SSD_WRITES),
            ssd_write_bytes=sum(s.num_bytes for s in ssd if s.kind in SSD_WRITES),
        )

    @cached_property
    def peaks(self) -> Mapping[str, int]:
        """Largest bytes of each series in `memory`."""
        return {
            name: max((size for _, size in series), default=0)
            for name, series in self.memory.items()
        }

    # -- other timelines --------------------------------------------------------------------

    def merge(self, *others: Timeline) -> Timeline:
        """One timeline with the spans and series of all, which must share one clock.

        Raises:
            ValueError: two of them have a series of the same name.
        """
        memory = dict(self.memory)
        for other in others:
            twice = memory.keys() & other.memory.keys()
            if twice:
                raise ValueError(f"series {sorted(twice)} are in more than one timeline")
            memory.update(other.memory)
        spans = (*self.spans, *(s for other in others for s in other.spans))
        return replace(self, spans=spans, memory=memory)

    def coalesce(self, gap_s: float = 0.0) -> Timeline:
        """Join the pieces of a transfer that follow each other within `gap_s` seconds.

        Pieces are neighbours on their lane of the same name and kind; the result has fewer spans,
        the same bytes, and gaps of up to `gap_s` counted as work.
        """
        spans: list[Span] = []
        for span in self.spans:
            last = spans[-1] if spans else None
            if (
                last is not None
                and (last.lane, last.name, last.kind) == (span.lane, span.name, span.kind)
                and span.start_s - last.end_s <= gap_s
            ):
                spans[-1] = replace(
                    last,
                    end_s=max(last.end_s, span.end_s),
                    num_bytes=last.num_bytes + span.num_bytes,
                )
            else:
                spans.append(span)
        return replace(self, spans=tuple(spans))

    # -- for people -------------------------------------------------------------------------

    def shown(self, lane: Lane) -> str:
        """The name of a lane."""
        return self.compute if lane == "gpu" else lane

    def summary(self) -> str:
        """A table of each lane's work by phase, the bytes moved, the stalls and the peaks."""
        start, end = self.window()
        parts = [f"{p} {_ms(b - a)}" for p, (a, b) in self.phases.items()]
        lines = [f"{self.name}: step {_ms(end - start)} ms ({', '.join(parts)})"]
        head = ["lane", "busy ms", "idle ms", "exposed ms", *PHASES]
        rows = [head]
        rows += [
            [
                self.shown(lane),
                _ms(self.busy_s(lane)),
                _ms(self.idle_s(lane)),
                "-" if lane == "gpu" else _ms(self.exposed_s(lane)),
                *(_share(self.busy_s(lane, p), self.window(p)) for p in PHASES),
            ]
            for lane in LANES
        ]
        lines += _table(rows)
        moved = self.traffic
        lines.append(
            f"moved: d2h {format_bytes(moved.d2h_bytes)}, h2d {format_bytes(moved.h2d_bytes)}, "
            f"ssd read {format_bytes(moved.ssd_read_bytes)}, "
            f"ssd written {format_bytes(moved.ssd_write_bytes)}"
        )
        waits: dict[tuple[str, Lane], list[float]] = defaultdict(list)
        for stall in self.stalls:
            waits[stall.kind, stall.lane].append(stall.seconds)
        for (kind, lane), seconds in sorted(waits.items(), key=lambda item: -sum(item[1])):
            lines.append(
                f"stalled: {_ms(sum(seconds))} ms in {len(seconds)} x {kind}, behind {lane}"
            )
        if self.peaks:
            sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.peaks.items())
            lines.append(f"peak: {sizes}")
        return "\n".join(lines) + "\n"


# -- comparison -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One kind of span on one lane in two timelines; kind "" is the lane as a whole.

    For a kind, seconds are the sum of its spans; for a lane, its busy time.
    """

    lane: Lane
    kind: str
    a_s: float
    b_s: float
    a_bytes: int
    b_bytes: int
    a_count: int
    b_count: int

    @property
    def delta_s(self) -> float:
        """How much longer b is, in seconds."""
        return self.b_s - self.a_s

    @property
    def ratio(self) -> float:
        """Seconds of b over those of a; 1.0 if both are zero, infinite if only a is."""
        if self.a_s:
            return self.b_s / self.a_s
        return float("inf") if self.b_s else 1.0


def diff(a: Timeline, b: Timeline) -> tuple[Difference, ...]:
    """Compare two timelines of the same program: each lane, then its kinds by name."""
    found = []
    for lane in LANES:
        spans = (a.by_lane[lane], b.by_lane[lane])
        kinds = sorted({s.kind for side in spans for s in side})
        if not kinds:
            continue
        for kind in ("", *kinds):
            a_side, b_side = ([s for s in side if kind in ("", s.kind)] for side in spans)
            found.append(
                Difference(
                    lane=lane,
                    kind=kind,
                    a_s=sum(s.seconds for s in a_side) if kind else a.busy_s(lane),
                    b_s=sum(s.seconds for s in b_side) if kind else b.busy_s(lane),
                    a_bytes=sum(s.num_bytes for s in a_side),
                    b_bytes=sum(s.num_bytes for s in b_side),
                    a_count=len(a_side),
                    b_count=len(b_side),
                )
            )
    return tuple(found)


def format_diff(a: Timeline, b: Timeline) -> str:
    """`diff` as a text table, in milliseconds, with the whole step first."""
    rows = [["lane", "kind", f"{a.name} ms", f"{b.name} ms", "delta ms", "ratio", "bytes"]]
    whole = [timeline.end_s - timeline.start_s for timeline in (a, b)]
    ratio = f"{whole[1] / whole[0]:.3f}" if whole[0] else "-"
    rows.append(["step", "", _ms(whole[0]), _ms(whole[1]), _ms(whole[1] - whole[0]), ratio, ""])
    for d in diff(a, b):
        same = "same" if d.a_bytes == d.b_bytes else f"{d.b_bytes - d.a_bytes:+d}"
        rows.append(
            [
                a.shown(d.lane),
                d.kind,
                _ms(d.a_s),
                _ms(d.b_s),
                _ms(d.delta_s),
                f"{d.ratio:.3f}",
                same,
            ]
        )
    return "\n".join(_table(rows)) + "\n"


# -- trace ----------------------------------------------------------------------------------


def trace(timelines: Timeline | Sequence[Timeline]) -> dict[str, Any]:
    """Chrome trace format, for Perfetto (ui.perfetto.dev) and chrome://tracing.

    One process a timeline, one thread a lane, one counter track a memory series. `ts` and `dur` are
    microseconds, counters bytes. Format: "Trace Event Format", Google, complete ("X"), counter
    ("C") and metadata ("M") events.
    """
    if isinstance(timelines, Timeline):
        timelines = (timelines,)
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [
            event for pid, timeline in enumerate(timelines, 1) for event in _events(timeline, pid)
        ],
    }


def dump_trace(timelines: Timeline | Sequence[Timeline]) -> str:
    """`trace` as JSON text, one event a line."""
    made = trace(timelines)
    events = ",\n".join(json.dumps(event) for event in made.pop("traceEvents"))
    head = json.dumps(made)[:-1]
    return f'{head}, "traceEvents": [\n{events}\n]}}\n'


def save_trace(path: str | Path, timelines: Timeline | Sequence[Timeline]) -> None:
    """Write one timeline, or several side by side, to a file that Perfetto opens."""
    try:
        path_of("path", path).write_text(dump_trace(timelines), encoding="utf-8")
    except OSError as error:
        raise LohanError(f"cannot write {path}: {error.strerror}; name a file") from error


def load_trace(path: str | Path) -> tuple[Timeline, ...]:
    """The timelines of a file that `save_trace` wrote, to the nanosecond.

    Raises:
        LohanError: it is another file.
    """
    try:
        events = json_of(path_of("path", path))["traceEvents"]
        return tuple(_timeline([e for e in events if e["pid"] == pid]) for pid in _pids(events))
    except OSError as error:
        raise LohanError(f"cannot read {path}: {error.strerror}; name a trace") from error
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise LohanError(f"{path} is no trace that save_trace wrote ({error!r})") from error


def _pids(events: Sequence[Mapping[str, Any]]) -> list[int]:
    return sorted({e["pid"] for e in events})


def _timeline(events: Sequence[Mapping[str, Any]]) -> Timeline:
    """The inverse of `_events`."""
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [
        Span(
            lane=LANES[e["tid"] - 1],
            name=e["name"],
            kind=e["cat"].removesuffix(",stall"),
            start_s=e["ts"] / 1e6,
            end_s=(e["ts"] + e["dur"]) / 1e6,
            num_bytes=e["args"].get("bytes", 0),
            phase=e["args"]["phase"],
            block=e["args"].get("block", ""),
        )
        for e in events
        if e["ph"] == "X"
    ]
    memory: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for e in events:
        if e["ph"] == "C":
            tier = e["name"].removesuffix(" bytes")
            memory[tier].append((e["ts"] / 1e6, e["args"]["bytes"]))
    return Timeline(
        name=names[0],
        spans=tuple(spans),
        memory={tier: tuple(series) for tier, series in memory.items()},
        compute=threads[LANES.index("gpu") + 1],
    )


def _events(timeline: Timeline, pid: int) -> Iterator[dict[str, Any]]:
    def meta(what: str, tid: int, args: dict[str, Any]) -> dict[str, Any]:
        return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args}

    yield meta("process_name", 0, {"name": timeline.name})
    yield meta("process_sort_index", 0, {"sort_index": pid})
    for tid, lane in enumerate(LANES, 1):
        yield meta("thread_name", tid, {"name": timeline.shown(lane)})
        yield meta("thread_sort_index", tid, {"sort_index": tid})
    for span in timeline.spans:
        args: dict[str, Any] = {"phase": span.phase}
        if span.block:
            args["block"] = span.block
        if span.num_bytes:
            args["bytes"] = span.num_bytes
        yield {
            "ph": "X",
            "pid": pid,
            "tid": LANES.index(span.lane) + 1,
            "name": span.name,
            "cat": f"{span.kind},stall" if span.stall else span.kind,
            "ts": _us(span.start_s),
            "dur": _us(span.seconds),
            "args": args,
        }
    for name, series in timeline.memory.items():
        for time, size in series:
            yield {
                "ph": "C",
                "pid": pid,
                "name": f"{name} bytes",
                "ts": _us(time),
                "args": {"bytes": size},
            }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


# -- small helpers --------------------------------------------------------------------------


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals, ascending, that cover the same."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > start:
            found.append((start, end))
    return found


def _clip(intervals: Sequence[Interval], start: float, end: float) -> list[Interval]:
    """The parts of disjoint ascending intervals that lie in start..end."""
    first = max(0, bisect_right(intervals, (start, start)) - 1)
    found = []
    for i in range(first, len(intervals)):
        a, b = intervals[i]
        if a >= end:
            break
        if b > start:
            found.append((max(a, start), min(b, end)))
    return found


def _both(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Where two lists of disjoint ascending intervals overlap."""
    found = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if end > start:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def _total(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def _share(seconds: float, window: Interval) -> str:
    length = window[1] - window[0]
    return f"{seconds / length:.0%}" if length > 0 else "-"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
