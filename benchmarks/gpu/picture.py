"""Lanes of the last recorded steps, over those of the simulator.

    python benchmarks/gpu/picture.py FOLDER/2.78B-b8.trace.json steps.png [--steps 2]

The trace is one of speed.py's `--traces`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from harness import RECORDED_STEPS

from lohan_fx.plots import plot_timelines
from lohan_fx.timeline import Timeline, load_trace


def last_steps(recorded: Timeline, steps: int) -> Timeline:
    """The last of `RECORDED_STEPS` steps that do the same: from the first op of theirs to the end,
    the spans of other lanes cut there."""
    ops = [span for span in recorded.by_lane["gpu"] if span.kind == "compute"]
    start = ops[len(ops) * (RECORDED_STEPS - steps) // RECORDED_STEPS].start_s
    spans = tuple(
        replace(s, start_s=max(start, s.start_s)) for s in recorded.spans if s.end_s > start
    )
    return replace(recorded, name=f"{recorded.name}, {steps} steps", spans=spans)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--steps", type=int, default=2, choices=range(1, RECORDED_STEPS + 1))
    options = parser.parse_args()
    recorded, simulated = load_trace(options.trace)
    made = last_steps(recorded, options.steps)
    plot_timelines([made, simulated], options.picture)
    print(made.summary())


if __name__ == "__main__":
    main()
