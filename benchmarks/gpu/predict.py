"""Predicted against measured: step time and peak of a GPT of about 1.3B, budgets x strategies.

    python benchmarks/gpu/predict.py [--out FILE] [--trace FILE]

The profile comes from `profile_hardware`; seconds of the ops and the optimizer's rate next to a
running step come from steps of the first configuration (the papers' profiling stage), and are
used for all others.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpt import Gpt, Shape
from harness import Batch, Ours, batches, ours, timed

import lohan_fx
from lohan_fx.errors import InsufficientMemoryError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.simulate import simulate
from lohan_fx.timeline import Timeline, save_trace


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What the profiling stage found: seconds by op, and the hardware with the CPU optimizer's
    rate alone (it has the CPU for itself in schedule "serial") and next to a running step."""

    op_seconds: Mapping[str, float]
    alone: HardwareProfile
    beside: HardwareProfile


def recorded(run: Ours, batch: Batch, name: str) -> Timeline:
    with run.lohan.record() as recorder:
        run.step(*batch)
    timeline: Timeline = recorder.timeline(name)
    return timeline


def calibrate(run: Ours, hw: HardwareProfile, batch: Batch) -> Calibration:
    with run.lohan.time_ops() as timer:
        run.step(*batch)
        run.step(*batch)
    updates = [s for s in recorded(run, batch, "").by_lane["cpu"] if s.kind == "update"]
    program = run.lohan.program()
    params = sum(
        u.num_params for u in program.workload.units if program.plan.units[u.name].tier != "device"
    )
    rate = params / sum(s.seconds for s in updates)
    print(f"optimizer next to the step: {rate / 1e9:.2f} Gparam/s", flush=True)
    beside = hw.replace(cpu_optimizer_params_per_s=rate)
    return Calibration(op_seconds=timer.seconds(), alone=hw, beside=beside)


def compare(
    run: Ours, calibration: Calibration, data: list[Batch], name: str
) -> tuple[dict[str, Any], list[Timeline]]:
    """Measure, predict, print; returns the row and both timelines."""
    timing = timed(run.step, data)
    program = run.lohan.program()
    workload = program.workload.timed(calibration.op_seconds)
    serial = program.plan.schedule == "serial"
    hw = calibration.alone if serial else calibration.beside
    simulation = simulate(workload, program.plan, hw)
    measured = timing.step_s(skip=0)
    planned = program.memory.peak_bytes - program.memory.static_bytes
    row = {
        "name": name,
        "step_s": measured,
        "predicted_s": simulation.step_s,
        "ratio": simulation.step_s / measured,
        "peak": timing.peak_bytes,
        "predicted_peak": planned,
        "peak_error": planned / timing.peak_bytes - 1,
        "binding": dict(simulation.binding.items()),
    }
    print(
        f"{name}: {measured:.3f} s, predicted {simulation.step_s:.3f} ({row['ratio']:.2f}); peak "
        f"above what stays {timing.peak_bytes / 2**30:.3f} GiB, predicted {planned / 2**30:.3f} "
        f"({row['peak_error']:+.2%}); {row['binding']}",
        flush=True,
    )
    real = recorded(run, data[0], f"recorded {name}")
    return row, [simulation.timeline.coalesce(), real]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--budgets", default="12GiB,8GiB")
    parser.add_argument("--strategies", default="lohan,recompute-all,swap-all,zero-offload")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--trace", type=Path)
    options = parser.parse_args()
    shape = Shape(layers=options.layers, hidden=options.hidden, heads=options.hidden // 128)
    data = batches(shape, options.batch, options.steps)
    torch.manual_seed(0)
    weights = Gpt(shape).state_dict()
    rows: list[dict[str, Any]] = []
    timelines: list[Timeline] = []
    calibration: Calibration | None = None
    with tempfile.TemporaryDirectory() as directory:
        hw = lohan_fx.profile_hardware(ssd=[directory], quick=True)
        print(*(f"  {k}: {v}" for k, v in hw.describe()), sep="\n", flush=True)
        for budget in options.budgets.split(","):
            for strategy in options.strategies.split(","):
                name = f"{strategy} in {budget}"
                memory = {"device": budget}
                with ours(
                    shape, weights, hw, strategy=strategy, memory=memory, refine=False
                ) as run:
                    try:
                        run.lohan.prepare(*data[0])
                    except InsufficientMemoryError as error:
                        print(f"{name}: {str(error).splitlines()[0]}", flush=True)
                        continue
                    run.step(*data[0])
                    run.step(*data[0])
                    if calibration is None:
                        calibration = calibrate(run, hw, data[0])
                    row, made = compare(run, calibration, data, name)
                rows.append(row)
                timelines += made
                for timeline in made:
                    print(timeline.summary(), flush=True)
    card = torch.cuda.get_device_name()
    if options.out:
        options.out.write_text(json.dumps({"card": card, "rows": rows}, indent=1))
    if options.trace:
        save_trace(options.trace, timelines)


if __name__ == "__main__":
    main()
