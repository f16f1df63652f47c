"""Loss curves against plain training, memory over many steps, and races between the lanes.

    python benchmarks/gpu/endurance.py [--parts curves,races] [--races STRATEGY …] [--out FILE]

A GPT of about 400M parameters in 3 GiB learns sequences that follow a rule. Plain mixed-precision
training sees the same four times: compiled block by block, by eager PyTorch, and by eager PyTorch
from weights that are a millionth off. How far these are apart is what rounding makes of a run;
lohan_fx may be no more than twice as far from any of them. Then, with deterministic algorithms,
steps are run three times, the last time with random pauses around every copy, on the device
(`torch.cuda._sleep` on its stream and on compute's) and on the host: losses must stay what they
were to the bit, or a copy and a kernel raced.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import baselines
import psutil
import torch
from gpt import PlainMixed, Shape
from harness import Batch, Ours, ours
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import lohan_fx
from lohan_fx.hardware import HardwareProfile
from lohan_fx.runtime.lane import Lane, Ticket
from lohan_fx.runtime.lanes import Lanes

SHAPE = Shape(layers=24, hidden=1024, heads=16)
GIB = 2**30
LR = 3e-5
"""At 1e-4 losses jump around step 20, and rounding decides how far: plain runs from weights that
are a millionth off end up to 0.97 apart (H200); at this rate, 0.002."""

WARMUP = 20
"""Steps until the learning rate is whole."""

OFF = 1e-6
"""What the weights of further plain runs are multiplied with differs from one by so much."""

FURTHER = 2
"""So many of them are run."""


def warming_up(optimizer: Optimizer) -> LambdaLR:
    for group in optimizer.param_groups:
        group["lr"] = LR
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))


def plain_curve(data: list[Batch], *, compiled: bool, seed: int = 0) -> list[float]:
    """Losses of plain mixed precision, everything on the device; with a seed, from weights that
    are a little off."""
    model = baselines.build(SHAPE)
    if seed:
        generator = torch.Generator("cuda").manual_seed(seed)
        with torch.no_grad():
            for p in model.parameters():
                noise = torch.randn(p.shape, device="cuda", generator=generator)
                p.mul_(1 + OFF * noise)
    made = PlainMixed(model, lr=LR)
    if compiled:
        baselines.compile_blocks(made.model)
    schedule = warming_up(made.optimizer)
    losses = []
    for batch in data:
        losses.append(made.step(made.model, *batch).item())
        schedule.step()
    del made, model, schedule
    baselines.free()
    return losses


def apart(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


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
        schedule = warming_up(run.optimizer)
        return [_watched(run, schedule, batch, i, watch) for i, batch in enumerate(data)]


def _watched(
    run: Ours, schedule: LambdaLR, batch: Batch, index: int, watch: Callable[[int], None]
) -> float:
    loss = run.step(*batch).item()
    schedule.step()
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


RACES: dict[str, dict[str, Any]] = {
    "swap-all": {"schedule": "optimized"},
    "lohan": {"schedule": "overlapped"},
    "lohan-resident": {"schedule": "speculative", "clip_grad_norm": 1e6},
}
"""Strategy → what it runs with."""


def curves(hw: HardwareProfile, data: list[Batch], steps: int) -> tuple[dict[str, Any], bool]:
    """Loss curves, and memory over as many steps; and whether the curves are close enough."""
    plain = {
        "compiled": plain_curve(data, compiled=True),
        "eager": plain_curve(data, compiled=False),
    }
    for seed in range(1, 1 + FURTHER):
        plain[f"{OFF:g} off, {seed}"] = plain_curve(data, compiled=False, seed=seed)
    process = psutil.Process()
    rss: list[int] = []
    retries: list[int] = []

    def watch(_: int) -> None:
        rss.append(process.memory_info().rss)
        retries.append(torch.cuda.memory_stats()["num_alloc_retries"])

    many = (data * (1 + steps // len(data)))[:steps]
    losses = train(hw, many, watch=watch, schedule="overlapped")
    curve = losses[: len(data)]
    limit = max(apart(a, b) for a, b in combinations(plain.values(), 2))
    distances = [apart(curve, of) for of in plain.values()]
    for name, of in (*plain.items(), ("lohan_fx", curve)):
        print(f"{name:15} {' '.join(f'{x:.3f}' for x in of[::7])} {of[-1]:.3f}")
    print(f"plain runs are up to {limit:.4f} apart, lohan_fx is ", end="")
    print(f"{min(distances):.4f} to {max(distances):.4f} from them")
    grown = (rss[-1] - rss[20]) / 2**10
    print(f"RSS after 20 steps {rss[20] / GIB:.2f} GiB, after {len(rss)} {rss[-1] / GIB:.2f} GiB")
    print(f"({grown:+.0f} KiB); allocator retries {retries[-1]}", flush=True)
    return {"plain": plain, "ours": losses, "rss": rss}, max(distances) <= 2 * limit


def race(hw: HardwareProfile, data: list[Batch], strategy: str) -> bool:
    """Whether losses are the same to the bit with random pauses and without."""

    def losses() -> list[float]:
        return train(hw, data, watch=lambda _: None, strategy=strategy, **RACES[strategy])

    calm, again = losses(), losses()
    with Pauses(seed=7) as pauses:
        paused = losses()
    name = f"{strategy}, {RACES[strategy]['schedule']}"
    print(f"{name}: same losses again: {calm == again}, with ", end="")
    print(f"{pauses.count} pauses: {calm == paused}", flush=True)
    return calm == paused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--curve", type=int, default=50)
    parser.add_argument("--parts", default="curves,races", help="curves, races, or both")
    parser.add_argument("--races", nargs="+", choices=RACES, default=list(RACES), help="of these")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    parts = options.parts.split(",")
    if not {"curves", "races"}.issuperset(parts):
        parser.error(f"--parts {options.parts}: use curves, races, or curves,races")
    if "races" not in parts and options.races != list(RACES):
        parser.error(f"--parts {options.parts} runs no --races")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when cuBLAS starts
    data = lessons(options.curve)
    hw = lohan_fx.profile_hardware(quick=True)
    racing: dict[str, bool] = {}
    result: dict[str, Any] = {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
    close = True
    if "curves" in parts:
        found, close = curves(hw, data, options.steps)
        result |= found
    if "races" in parts:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        result["same_with_pauses"] = racing
        for strategy in options.races:
            if options.out:
                options.out.write_text(json.dumps(result))
            racing[strategy] = race(hw, data[:6], strategy)
    if options.out:
        options.out.write_text(json.dumps(result))
    if not all(racing.values()) or not close:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
