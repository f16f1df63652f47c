"""Timelines: seconds by lane and phase, stalls, comparison, traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lohan_fx.errors import LohanError
from lohan_fx.timeline import (
    LANES,
    PHASES,
    Lane,
    Span,
    StepPhase,
    Timeline,
    Traffic,
    diff,
    dump_trace,
    format_diff,
    load_trace,
    save_trace,
    trace,
)


def span(
    lane: Lane,
    kind: str,
    start: float,
    end: float,
    num_bytes: int = 0,
    phase: StepPhase = "forward",
    name: str = "",
) -> Span:
    return Span(
        lane=lane,
        name=name or kind,
        kind=kind,
        start_s=start,
        end_s=end,
        num_bytes=num_bytes,
        phase=phase,
        block="h0",
    )


# Forward 0-4, backward 4-10, then 2 s of optimizer.
STEP = Timeline(
    name="a step",
    spans=(
        span("ssd", "write_states", 9, 12, 30, "backward"),
        span("gpu", "compute", 0, 2),
        span("gpu", "release", 2, 4, name="x"),
        span("gpu", "compute", 4, 7, phase="backward"),
        span("gpu", "wait_unit", 7, 9, phase="backward", name="h0#1"),
        span("gpu", "recompute", 9, 10, phase="backward"),
        span("gpu", "join", 10, 12, phase="optimizer"),
        span("d2h", "offload", 1, 4, 12, name="x"),
        span("h2d", "fetch_unit", 8, 9, 8, "backward", "h0#1"),
        span("ssd", "fetch_unit", 5, 8.5, 8, "backward", "h0#1"),
        span("ssd", "read_states", 4, 6, 20, "backward"),  # overlaps, as a recording may
        span("cpu", "update", 6, 9, phase="backward"),
    ),
    memory={"device": ((0.0, 5), (3.0, 9), (5.0, 2))},
)


def test_phases_end_with_their_last_span_on_the_gpu_lane() -> None:
    assert STEP.phases == {"forward": (0, 4), "backward": (4, 10), "optimizer": (10, 12)}
    assert STEP.window() == (0, 12)
    empty = Timeline(name="nothing")
    assert empty.window() == (0, 0)
    assert set(empty.phases.values()) == {(0.0, 0.0)}
    assert empty.binding() == "gpu"


def test_busy_and_idle_seconds() -> None:
    assert [STEP.busy_s(lane) for lane in LANES] == [6, 1, 3, 4.5 + 3, 3]
    assert [STEP.busy_s("ssd", p) for p in PHASES] == [0, 4.5 + 1, 2]
    assert STEP.idle_s("gpu") == 6
    assert [STEP.idle_s("gpu", p) for p in PHASES] == [2, 2, 2]
    assert STEP.binding() == "ssd"
    assert [STEP.binding(p) for p in PHASES] == ["d2h", "ssd", "ssd"]


def test_exposed_seconds_are_those_in_which_the_gpu_lane_does_not_work() -> None:
    assert STEP.exposed_s("d2h") == 2
    assert STEP.exposed_s("ssd") == 1.5 + 2
    assert STEP.exposed_s("h2d") == 1
    assert STEP.exposed_s() == 2 + 2 + 2  # ssd and h2d overlap from 8 to 8.5
    assert STEP.exposed_s(phase="backward") == 2
    assert STEP.exposed_s("cpu") == 2


def test_stalls_name_what_they_wait_for_and_the_lane_to_blame() -> None:
    found = [(s.kind, s.name, s.lane, s.seconds) for s in STEP.stalls]
    assert found == [
        ("release", "x", "d2h", 2),
        ("wait_unit", "h0#1", "ssd", 2),
        ("join", "join", "ssd", 2),
    ]


def test_bytes_and_peaks() -> None:
    expected = Traffic(d2h_bytes=12, h2d_bytes=8, ssd_read_bytes=28, ssd_write_bytes=30)
    assert STEP.traffic == expected
    assert STEP.peaks == {"device": 9}


def test_spans_are_sorted_and_lanes_checked() -> None:
    assert [s.lane for s in STEP.spans] == sorted((s.lane for s in STEP.spans), key=LANES.index)
    with pytest.raises(ValueError, match="unknown lanes"):
        Timeline(name="bad", spans=(span("tpu", "compute", 0, 1),))  # type: ignore[arg-type]


def test_merge_joins_recorders_that_share_a_clock() -> None:
    parts = [
        Timeline(name=lane, spans=STEP.by_lane[lane], memory={lane: ((0.0, 1),)}) for lane in LANES
    ]
    merged = parts[0].merge(*parts[1:])
    assert merged.spans == STEP.spans
    assert set(merged.memory) == set(LANES)
    with pytest.raises(ValueError, match="more than one"):
        parts[0].merge(parts[0])


def test_coalesce_joins_the_chunks_of_a_transfer() -> None:
    chunks = [span("h2d", "prefetch", k, k + 0.75, 4, name="x") for k in range(3)]
    other = span("h2d", "prefetch", 3, 4, 4, name="y")
    line = Timeline(name="chunks", spans=(*chunks, other))
    assert line.coalesce(0.1) == line
    joined = line.coalesce(0.25)
    assert [(s.name, s.start_s, s.end_s, s.num_bytes) for s in joined.spans] == [
        ("x", 0, 2.75, 12),
        ("y", 3, 4, 4),
    ]
    assert joined.traffic == line.traffic


def test_diff_compares_lanes_and_kinds() -> None:
    slower = Timeline(
        name="recorded",
        spans=(
            *(s for s in STEP.spans if s.lane == "gpu"),
            span("d2h", "offload", 1, 7, 12),
            span("d2h", "emit_gradients", 8, 9, 1),
        ),
    )
    found = {(d.lane, d.kind): d for d in diff(STEP, slower)}
    assert (found["gpu", ""].delta_s, found["gpu", "compute"].ratio) == (0, 1)
    whole = found["d2h", ""]
    assert (whole.a_s, whole.b_s, whole.a_count, whole.b_count) == (3, 7, 1, 2)
    assert (whole.a_bytes, whole.b_bytes) == (12, 13)
    assert found["d2h", "offload"].ratio == 2
    assert found["d2h", "emit_gradients"].ratio == float("inf")
    assert found["cpu", ""].b_s == 0
    lines = format_diff(STEP, slower).splitlines()
    assert lines[0].split() == [
        *("lane", "kind", "a", "step", "ms", "recorded", "ms", "delta", "ms", "ratio", "bytes")
    ]
    assert lines[1].split() == ["step", "12000.000", "12000.000", "0.000", "1.000"]
    assert any(line.split()[-1] == "+1" for line in lines)
    assert all(d.delta_s == 0 and d.ratio == 1 for d in diff(STEP, STEP))


def test_summary() -> None:
    assert STEP.summary().splitlines() == [
        "a step: step 12000.000 ms (forward 4000.000, backward 6000.000, optimizer 2000.000)",
        "lane   busy ms    idle ms  exposed ms  forward  backward  optimizer",
        " gpu  6000.000   6000.000           -      50%       67%         0%",
        " h2d  1000.000  11000.000    1000.000       0%       17%         0%",
        " d2h  3000.000   9000.000    2000.000      75%        0%         0%",
        " ssd  7500.000   4500.000    3500.000       0%       92%       100%",
        " cpu  3000.000   9000.000    2000.000       0%       50%         0%",
        "moved: d2h 12 B, h2d 8 B, ssd read 28 B, ssd written 30 B",
        "stalled: 2000.000 ms in 1 x release, behind d2h",
        "stalled: 2000.000 ms in 1 x wait_unit, behind ssd",
        "stalled: 2000.000 ms in 1 x join, behind ssd",
        "peak: device 9 B",
    ]
    assert Timeline(name="nothing").summary().startswith("nothing: step 0.000 ms")


def test_a_trace_of_several_timelines_has_a_process_for_each(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    save_trace(path, [STEP, Timeline(name="other", spans=STEP.by_lane["cpu"])])
    made = json.loads(path.read_text(encoding="utf-8"))
    assert made == trace([STEP, Timeline(name="other", spans=STEP.by_lane["cpu"])])
    events = made["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["a step", "other"]
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
    }
    assert [threads[1, k] for k in range(1, 6)] == list(LANES)
    work: list[dict[str, Any]] = [e for e in events if e["ph"] == "X"]
    assert len(work) == len(STEP.spans) + 1
    first = next(e for e in work if e["cat"] == "offload")
    assert (first["ts"], first["dur"], first["tid"]) == (1e6, 3e6, LANES.index("d2h") + 1)
    assert first["args"] == {"phase": "forward", "block": "h0", "bytes": 12}
    assert [e["cat"] for e in work if "stall" in e["cat"]] == [
        "release,stall",
        "wait_unit,stall",
        "join,stall",
    ]
    assert [(e["ts"], e["args"]["bytes"]) for e in events if e["ph"] == "C"] == [
        (0, 5),
        (3e6, 9),
        (5e6, 2),
    ]
    assert trace(STEP) == json.loads(dump_trace([STEP]))

    read = load_trace(path)
    assert [timeline.name for timeline in read] == names
    assert read[0] == STEP
    assert dump_trace(read) == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": [{"pid": 1}]}'])
def test_other_files_are_no_traces(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(LohanError, match=r"other\.json is no trace"):
        load_trace(path)


lines = st.lists(
    st.tuples(st.sampled_from(LANES), st.integers(0, 30), st.integers(0, 9), st.booleans()),
    max_size=12,
)


@given(lines)
def test_seconds_equal_a_count_of_ticks(drawn: list[tuple[Lane, int, int, bool]]) -> None:
    """All times are whole seconds here, so every set of seconds can be counted one by one."""
    made = Timeline(
        name="random",
        spans=tuple(
            span(lane, "wait" if stall and lane == "gpu" else "compute", start, start + length)
            for lane, start, length, stall in drawn
        ),
    )

    def ticks(lane: Lane) -> set[int]:
        return {
            t
            for s in made.by_lane[lane]
            if not s.stall
            for t in range(int(s.start_s), int(s.end_s))
        }

    for lane in LANES:
        assert made.busy_s(lane) == len(ticks(lane))
        assert sum(made.busy_s(lane, p) for p in PHASES) == len(ticks(lane))
        assert made.exposed_s(lane) == len(ticks(lane) - ticks("gpu"))
        assert made.idle_s(lane) == made.end_s - made.start_s - len(ticks(lane))
    transfers = ticks("h2d") | ticks("d2h") | ticks("ssd")
    assert made.exposed_s() == len(transfers - ticks("gpu"))
