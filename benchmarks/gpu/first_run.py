"""A GPT of about 350M parameters under a quarter of the memory that plain training takes.

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

import lohan_fx


def batches(shape: Shape, batch: int, steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    size = (steps, 2, batch, shape.sequence)
    data = torch.randint(0, shape.vocabulary, size, generator=generator)
    return [(ids.cuda(), targets.cuda()) for ids, targets in data]


def timed(step: Any, data: Any) -> tuple[list[float], float, int]:
    """Losses, median seconds a step after the third, peak requested bytes."""
    losses, seconds = [], []
    torch.cuda.reset_peak_memory_stats()
    for ids, targets in data:
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = step(ids, targets)
        losses.append(loss.item())
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    tail = sorted(seconds[3:])
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    return losses, tail[len(tail) // 2], peak


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--fraction", type=float, default=0.25)
    parser.add_argument("--strategies", default="lohan")
    parser.add_argument("--schedules", default="optimized")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    shape = Shape(layers=24, hidden=1024, heads=16)
    data = batches(shape, options.batch, options.steps)
    tokens = options.batch * shape.sequence
    torch.manual_seed(0)
    weights = {k: v.clone() for k, v in Gpt(shape).state_dict().items()}
    results: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "params": shape.num_params,
        "batch": options.batch,
    }

    model = Gpt(shape).cuda()
    model.load_state_dict(weights)
    plain = PlainMixed(model, lr=1e-4)
    losses, step_s, peak = timed(lambda i, t: plain.step(plain.model, i, t), data)
    results["plain"] = {"step_s": step_s, "tokens_per_s": tokens / step_s, "peak": peak, "losses": losses}
    print(f"plain: {tokens / step_s:,.0f} tokens/s, peak {peak / 2**30:.2f} GiB", flush=True)
    del model, plain
    gc.collect()
    torch.cuda.empty_cache()

    with tempfile.TemporaryDirectory() as directory:
        hw = lohan_fx.profile_hardware(ssd=[directory], quick=True)
        print(*(f"  {k}: {v}" for k, v in hw.describe()), sep="\n", flush=True)
        budget = int(peak * options.fraction)
        for strategy in options.strategies.split(","):
            for schedule in options.schedules.split(","):
                model = Gpt(shape)
                model.load_state_dict(weights)
                opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
                start = time.perf_counter()
                model = lohan_fx.compile(
                    model,
                    hw=hw,
                    optimizer=opt,
                    strategy=strategy,
                    schedule=schedule,
                    memory={"device": budget},
                )
                program = model.lohan.prepare(*data[0])
                start_s = time.perf_counter() - start
                before = model.lohan.counters

                def step(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
                    loss = model(ids, targets)
                    loss.backward()
                    opt.step()
                    opt.zero_grad()
                    return loss.detach()

                ours, ours_s, ours_peak = timed(step, data)
                moved = model.lohan.counters.minus(before)
                held = sum(t.numel() * t.element_size() for pair in data[1:] for t in pair)
                p = program.plan.prediction
                worst = max(abs(a - b) / abs(b) for a, b in zip(ours, losses, strict=True))
                name = f"{strategy}/{schedule}"
                results[name] = {
                    "step_s": ours_s,
                    "tokens_per_s": tokens / ours_s,
                    "peak": ours_peak - held,
                    "predicted_peak": p.peak_device_bytes,
                    "budget": budget,
                    "predicted_step_s": p.step_s,
                    "start_s": start_s,
                    "losses": ours,
                    "worst_relative_loss_error": worst,
                    "moved_per_step": {
                        k: getattr(moved, k) / options.steps for k in moved.__dataclass_fields__
                    },
                    "planned_per_step": {k: getattr(p, k) for k in moved.__dataclass_fields__},
                }
                print(model.report(), flush=True)
                print(
                    f"{name}: {tokens / ours_s:,.0f} tokens/s ({step_s / ours_s:.2f} of plain), peak "
                    f"{(ours_peak - held) / 2**30:.3f} GiB of {budget / 2**30:.3f} (predicted "
                    f"{p.peak_device_bytes / 2**30:.3f}), step {ours_s:.3f} s (predicted "
                    f"{p.step_s:.3f}), start {start_s:.1f} s, worst loss difference {worst:.2e}",
                    flush=True,
                )
                model.lohan.close()
                del model, opt, program
                gc.collect()
                torch.cuda.empty_cache()
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
