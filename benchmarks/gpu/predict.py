"""Predicted against measured: step time and peak of a GPT of about 1.3B, budgets x strategies.

    python benchmarks/gpu/predict.py [--out FILE]

The profile comes from `profile_hardware`; seconds of the ops and the optimizer's rate next to a
running step come from two steps of the first configuration (the papers' profiling stage), and are
used for all others.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from first_run import batches
from gpt import Gpt, Shape

import lohan_fx
from lohan_fx.simulate import simulate
from lohan_fx.timeline import save_trace


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--budgets", default="12GiB,20GiB")
    parser.add_argument("--strategies", default="lohan,recompute-all,swap-all,zero-offload")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--trace", type=Path)
    options = parser.parse_args()
    shape = Shape(layers=options.layers, hidden=options.hidden, heads=options.hidden // 128)
    data = batches(shape, options.batch, options.steps + 2)
    torch.manual_seed(0)
    weights = Gpt(shape).state_dict()
    rows: list[dict[str, Any]] = []
    timings: dict[str, float] | None = None
    with tempfile.TemporaryDirectory() as directory:
        hw = lohan_fx.profile_hardware(ssd=[directory], quick=True)
        print(*(f"  {k}: {v}" for k, v in hw.describe()), sep="\n", flush=True)
        for budget in options.budgets.split(","):
            for strategy in options.strategies.split(","):
                model = Gpt(shape)
                model.load_state_dict(weights)
                opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
                start = time.perf_counter()
                model = lohan_fx.compile(
                    model, hw=hw, optimizer=opt, strategy=strategy, memory={"device": budget}
                )
                try:
                    program = model.lohan.prepare(*data[0])
                except lohan_fx.errors.InsufficientMemoryError as error:
                    print(f"{strategy} in {budget}: {str(error).splitlines()[0]}", flush=True)
                    model.lohan.close()
                    continue
                start_s = time.perf_counter() - start

                def step(i: int) -> None:
                    model(*data[i]).backward()
                    opt.step()
                    opt.zero_grad()

                step(0)
                step(1)
                if timings is None:
                    with model.lohan.time_ops() as timer:
                        step(0)
                        step(1)
                    timings = dict(timer.seconds())
                    with model.lohan.record() as recorder:
                        step(0)
                    recorded = recorder.timeline("recorded")
                    updates = [s for s in recorded.by_lane["cpu"] if s.kind == "update"]
                    params = sum(
                        u.num_params for u in program.workload.units
                        if program.plan.units[u.name].tier != "device"
                    )
                    if updates:
                        rate = params / sum(s.seconds for s in updates)
                        print(f"optimizer next to the step: {rate / 1e9:.2f} Gparam/s", flush=True)
                        hw = hw.replace(cpu_optimizer_params_per_s=rate)
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                base = torch.cuda.memory_stats()["requested_bytes.all.current"]
                seconds = []
                for i in range(2, options.steps + 2):
                    torch.cuda.synchronize()
                    begin = time.perf_counter()
                    step(i)
                    torch.cuda.synchronize()
                    seconds.append(time.perf_counter() - begin)
                peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - base
                memory = program.memory
                simulation = simulate(program.workload.timed(timings), program.plan, hw)
                measured = statistics.median(seconds)
                row = {
                    "strategy": strategy,
                    "budget": budget,
                    "step_s": measured,
                    "predicted_s": simulation.step_s,
                    "ratio": simulation.step_s / measured,
                    "peak_over_static": peak,
                    "predicted_over_static": memory.peak_bytes - memory.static_bytes,
                    "peak_error": (memory.peak_bytes - memory.static_bytes) / peak - 1,
                    "start_s": start_s,
                    "binding": {k: v for k, v in simulation.binding.items()},
                }
                rows.append(row)
                print(
                    f"{strategy} in {budget}: {measured:.3f} s, predicted {simulation.step_s:.3f} "
                    f"({row['ratio']:.2f}), peak above what stays {peak / 2**30:.3f} GiB, predicted "
                    f"{row['predicted_over_static'] / 2**30:.3f} ({row['peak_error']:+.2%}), "
                    f"start {start_s:.1f} s, binding {row['binding']}",
                    flush=True,
                )
                with model.lohan.record() as recorder:
                    step(0)
                recorded = recorder.timeline(f"recorded {strategy} {budget}")
                print(recorded.summary(), flush=True)
                print(simulation.summary(), flush=True)
                if options.trace:
                    save_trace(options.trace, [simulation.timeline.coalesce(), recorded])
                model.lohan.close()
                del model, opt, program
                gc.collect()
                torch.cuda.empty_cache()
    if options.out:
        card = torch.cuda.get_device_name()
        options.out.write_text(json.dumps({"card": card, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
