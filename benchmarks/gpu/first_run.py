"""A GPT of about 400M parameters under a quarter of the memory that plain training takes.

    python benchmarks/gpu/first_run.py [--out FILE]

Trains it plainly (mixed precision, everything on the GPU), then with lohan_fx under a device
budget of a quarter of the plain peak: same weights, same batches. Prints losses, tokens/s, peaks.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpt import Gpt, PlainMixed, Shape
from harness import Batch, Timing, batches, ours, timed
from torch import Tensor

import lohan_fx


def plain_run(shape: Shape, weights: dict[str, Tensor], data: list[Batch]) -> tuple[Timing, int]:
    """Plain training; its timing, and the peak with the model's states."""
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    model = Gpt(shape).cuda()
    model.load_state_dict(weights)
    plain = PlainMixed(model, lr=1e-4)
    states = torch.cuda.memory_stats()["requested_bytes.all.current"] - before
    timing = timed(lambda ids, targets: plain.step(plain.model, ids, targets), data)
    return timing, states + timing.peak_bytes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--fraction", type=float, default=0.25)
    parser.add_argument("--strategies", default="lohan")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    shape = Shape(layers=24, hidden=1024, heads=16)
    data = batches(shape, options.batch, options.steps)
    tokens = options.batch * shape.sequence
    torch.manual_seed(0)
    weights = Gpt(shape).state_dict()
    plain, plain_peak = plain_run(shape, weights, data)
    gc.collect()
    torch.cuda.empty_cache()
    plain_s = plain.step_s()
    gib = plain_peak / 2**30
    print(f"plain: {tokens / plain_s:,.0f} tokens/s, peak {gib:.2f} GiB", flush=True)
    results: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "params": shape.num_params,
        "batch": options.batch,
        "plain": {"tokens_per_s": tokens / plain_s, "peak": plain_peak, "losses": plain.losses},
    }
    with tempfile.TemporaryDirectory() as directory:
        hw = lohan_fx.profile_hardware(ssd=[directory], quick=True)
        print(*(f"  {k}: {v}" for k, v in hw.describe()), sep="\n", flush=True)
        budget = int(plain_peak * options.fraction)
        for strategy in options.strategies.split(","):
            memory = {"device": budget}
            with ours(shape, weights, hw, strategy=strategy, memory=memory, refine=False) as run:
                start = time.perf_counter()
                program = run.lohan.prepare(*data[0])
                start_s = time.perf_counter() - start
                before = run.lohan.counters
                timing = timed(run.step, data)
                moved = run.lohan.counters.minus(before)
                held = program.memory.static_bytes
                print(run.model.report(), flush=True)  # type: ignore[operator]
            step_s = timing.step_s()
            pairs = zip(timing.losses, plain.losses, strict=True)
            worst = max(abs(a - b) / abs(b) for a, b in pairs)
            prediction = program.plan.prediction
            row = {
                "tokens_per_s": tokens / step_s,
                "peak": timing.peak_bytes + held,
                "predicted_peak": prediction.peak_device_bytes,
                "budget": budget,
                "start_s": start_s,
                "losses": timing.losses,
                "worst_relative_loss_error": worst,
                "moved": {k: getattr(moved, k) / options.steps for k in moved.__dataclass_fields__},
                "planned": {k: getattr(prediction, k) for k in moved.__dataclass_fields__},
            }
            results[strategy] = row
            print(
                f"{strategy}: {row['tokens_per_s']:,.0f} tokens/s ({plain_s / step_s:.2f} of "
                f"plain), peak {row['peak'] / 2**30:.3f} GiB of {budget / 2**30:.3f} (predicted "
                f"{row['predicted_peak'] / 2**30:.3f}), start {start_s:.1f} s, worst loss "
                f"difference {worst:.1e}",
                flush=True,
            )
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
