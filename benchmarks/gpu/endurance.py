"""Loss curves against plain training, memory over many steps, and races between the lanes.

    python benchmarks/gpu/endurance.py [--out FILE]

A GPT of about 400M parameters in 4 GiB learns sequences that follow a rule; plain mixed-precision
training sees the same. Then steps are run twice, the second time with random pauses around every
copy, on the device (`torch.cuda._sleep` on its stream and on compute's) and on the host: losses
must stay what they were to the bit, or a copy and a kernel raced.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import baselines
import psutil
import torch
from gpt import Shape
from harness import Batch, Ours, ours

import lohan_fx
from lohan_fx.hardware import HardwareProfile
from lohan_fx.runtime.lanes import Lane, Lanes, Ticket

SHAPE = Shape(layers=24, hidden=1024, heads=16)
GIB = 2**30


def lessons(steps: int, batch: int = 8) -> list[Batch]:
    """Token t+1 is a fixed function of token t, with one in eight drawn at random."""
    generator = torch.Generator().manual_seed(3)
    rule = torch.randperm(1000, generator=generator)
    found = []
    for _ in range(steps):
        rows = torch.randint(0, 1000, (batch, SHAPE.sequence + 1), generator=generator)
        keep = torch.rand(rows.shape, generator=generator) < 0.125
        for t in range(SHAPE.sequence):
            rows[:, t + 1] = torch.where(keep[:, t + 1], rows[:, t + 1], rule[rows[:, t]])
        found.append((rows[:, :-1].contiguous().cuda(), rows[:, 1:].contiguous().cuda()))
    return found


def train(
    hw: HardwareProfile, data: list[Batch], *, watch: Callable[[int], None], **options: Any
) -> list[float]:
    weights = {k: v.cpu() for k, v in baselines.build(SHAPE).state_dict().items()}
    baselines.free()
    settings = {"strategy": "lohan", "memory": {"device": "3GiB"}, "refine": False, **options}
    with ours(SHAPE, weights, hw, **settings) as run:
        return [_watched(run, batch, i, watch) for i, batch in enumerate(data)]


def _watched(run: Ours, batch: Batch, index: int, watch: Callable[[int], None]) -> float:
    loss = run.step(*batch).item()
    watch(index)
    return loss


class Pauses:
    """Random pauses around every copy: on the copy's stream, on compute's, and on the host."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._copy = Lanes._copy
        self.count = 0

    def __enter__(self) -> Pauses:
        pauses = self

        def copy(lanes: Lanes, lane: Lane, *given: Any) -> Ticket:
            with torch.cuda.stream(lane.stream):
                pauses.pause()
            ticket = pauses._copy(lanes, lane, *given)
            pauses.pause()
            return ticket

        Lanes._copy = copy  # type: ignore[method-assign]
        return self

    def pause(self) -> None:
        """Keep the current stream busy for up to half a millisecond, and the host now and then."""
        self.count += 1
        cycles = self._random.choice((0, 0, 10**5, 10**6))
        if cycles:
            torch.cuda._sleep(cycles)
        if self._random.random() < 0.1:
            time.sleep(2e-3)

    def __exit__(self, *_: object) -> None:
        Lanes._copy = self._copy  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--curve", type=int, default=50)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    data = lessons(options.curve)
    hw = lohan_fx.profile_hardware(quick=True)

    plain_step = baselines.plain_mixed(SHAPE)
    plain = [plain_step(*batch).item() for batch in data]
    del plain_step
    baselines.free()

    process = psutil.Process()
    rss: list[int] = []
    retries: list[int] = []

    def watch(_: int) -> None:
        rss.append(process.memory_info().rss)
        retries.append(torch.cuda.memory_stats()["num_alloc_retries"])

    many = (data * (1 + options.steps // len(data)))[: options.steps]
    losses = train(hw, many, watch=watch, schedule="overlapped")
    curve = losses[: options.curve]
    apart = max(abs(a - b) for a, b in zip(curve, plain, strict=True))
    print(f"plain    {' '.join(f'{x:.3f}' for x in plain[::7])}", flush=True)
    print(f"lohan_fx {' '.join(f'{x:.3f}' for x in curve[::7])}; at most {apart:.4f} apart")
    grown = (rss[-1] - rss[20]) / 2**20
    print(f"RSS after 20 steps {rss[20] / GIB:.2f} GiB, after {len(rss)} {rss[-1] / GIB:.2f} GiB")
    print(f"({grown:+.1f} MiB); allocator retries {retries[-1]}", flush=True)

    racing: dict[str, bool] = {}
    few = data[:6]
    for strategy, schedule in (
        ("swap-all", "optimized"),
        ("lohan", "overlapped"),
        ("lohan-resident", "speculative"),
    ):
        name = f"{strategy}, {schedule}"
        settings: dict[str, Any] = {"strategy": strategy, "schedule": schedule}
        if schedule == "speculative":
            settings["clip_grad_norm"] = 1e6
        calm = train(hw, few, watch=lambda _: None, **settings)
        with Pauses(seed=7) as pauses:
            paused = train(hw, few, watch=lambda _: None, **settings)
        racing[name] = calm == paused
        print(f"{name}: {pauses.count} pauses, same losses: {calm == paused}", flush=True)
    if options.out:
        result = {
            "card": torch.cuda.get_device_name(),
            "plain": plain,
            "ours": losses,
            "rss": rss,
            "same_with_pauses": racing,
        }
        options.out.write_text(json.dumps(result))
    if not all(racing.values()) or apart > 0.05:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
