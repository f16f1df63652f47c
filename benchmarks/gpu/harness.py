"""What the GPU benchmarks share: a profile, batches, one run through lohan_fx, honest peaks."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpt import Gpt, Shape
from torch import Tensor

import lohan_fx
from lohan_fx.hardware import HardwareProfile

Batch = tuple[Tensor, Tensor]

RECORDED_STEPS = 4
"""What speed.py records at once."""


def profiled(
    path: Path | None, *, ssd: Sequence[str] = (), device: str | None = None
) -> HardwareProfile:
    """Return the machine's quick profile, from `path` if it is there, kept there otherwise. So
    commands that follow each other on one machine plan for the same rates.

    Raises:
        SystemExit: the file is of another device, or without the SSDs asked for.
    """
    if path is None or not path.is_file():
        hw = lohan_fx.profile_hardware(quick=True, ssd=list(ssd), device=device)
        if path is not None:
            hw.save(path)
        return hw
    hw = HardwareProfile.load(path)
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    if here is not None and hw.device_name != here:
        raise SystemExit(f"{path} is of {hw.device_name}, this is {here}: name another file")
    have = [of.path for of in hw.ssds]
    if missing := [directory for directory in ssd if directory not in have]:
        raise SystemExit(f"{path} is without the SSD {missing[0]}: name another file")
    return hw


def batches(shape: Shape, batch: int, steps: int) -> list[Batch]:
    """Random tokens and targets, on the device, the same at every call."""
    generator = torch.Generator().manual_seed(1)
    size = (steps, 2, batch, shape.sequence)
    data = torch.randint(0, shape.vocabulary, size, generator=generator)
    return [(ids.cuda(), targets.cuda()) for ids, targets in data]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One run: losses, seconds of each step, peak requested bytes above what was there before."""

    losses: list[float]
    seconds: list[float]
    peak_bytes: int

    def step_s(self, skip: int = 3) -> float:
        """Median seconds a step, without the first ones."""
        return statistics.median(self.seconds[skip:])


def timed(step: Callable[[Tensor, Tensor], Tensor], data: Sequence[Batch]) -> Timing:
    """Run `step` on every batch. Memory that is allocated already does not count."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_stats()["requested_bytes.all.current"]
    losses, seconds = [], []
    for ids, targets in data:
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = step(ids, targets)
        losses.append(loss.item())
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - base
    return Timing(losses=losses, seconds=seconds, peak_bytes=peak)


class Ours:
    """A GPT compiled by lohan_fx, with AdamW, and its training step. Empties `weights`: whoever
    holds them would hold a second model in host memory."""

    def __init__(
        self, shape: Shape, weights: dict[str, Tensor], hw: HardwareProfile, **options: Any
    ) -> None:
        with torch.device("meta"):
            model = Gpt(shape)
        model.to_empty(device="cpu")
        model.load_state_dict(weights)
        weights.clear()
        start = time.perf_counter()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.model = lohan_fx.compile(model, hw=hw, optimizer=self.optimizer, **options)
        self.lohan: Any = self.model.lohan  # type: ignore[attr-defined]
        self.started = start

    def step(self, ids: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.model(ids, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


@contextmanager
def ours(
    shape: Shape, weights: dict[str, Tensor], hw: HardwareProfile, **options: Any
) -> Iterator[Ours]:
    """`Ours`, with all its memory given back at the end."""
    made = Ours(shape, weights, hw, **options)
    try:
        yield made
    finally:
        made.lohan.close()
        del made
        gc.collect()
        torch.cuda.empty_cache()
