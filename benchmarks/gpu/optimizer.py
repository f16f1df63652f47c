"""Rate of the CPU optimizer: our kernel and torch's, against the host memory's bandwidth.

    python benchmarks/gpu/optimizer.py

Parameters per second by number of threads, on one unit of 79M parameters: bfloat16 gradients and
compute copies, float32 masters and AdamW states. The floor is 28 bytes a parameter. On a GPU, also
beside a running backward, and beside copies in both directions: optimizer and link share the host's
memory. With all threads, also where the runtime has units: in a slab, pinned on a GPU; and as the
median of many repetitions.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from gpt import Block, Shape
from torch import nn

from lohan_fx.runtime.arena import Arena
from lohan_fx.runtime.native.adam import AdamKernel, Update, library
from lohan_fx.runtime.optimizer import UnitOptimizer

NUM_PARAMS = 79_000_000 // 2048 * 2048
BYTES_PER_PARAM = 28
UNIT_BYTES = 16 * NUM_PARAMS
"""A master, two moments, a bf16 gradient and a bf16 copy."""


def seconds_of(call: Callable[[], object], repeats: int) -> list[float]:
    """Of each repetition, after one warm-up."""
    call()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def rate(call: Callable[[], object], repeats: int = 5) -> float:
    """Gparam/s of `call`, the best of some."""
    return NUM_PARAMS / min(seconds_of(call, repeats)) / 1e9


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """What the host's memory gives the CPU optimizer: parameters/s alone, beside a running backward
    that copies nothing, and beside copies in both directions, with what these move then, in
    bytes/s."""

    alone: float
    backward: float
    beside: float
    copied: float

    @property
    def bytes_per_s(self) -> float:
        """The most that was seen: by the optimizer alone, or with the copies."""
        return max(BYTES_PER_PARAM * self.alone, BYTES_PER_PARAM * self.beside + self.copied)

    def left(self, link_bytes_per_s: float) -> float:
        """Parameters/s for which memory has room beside a link that moves so much."""
        return (self.bytes_per_s - link_bytes_per_s) / BYTES_PER_PARAM

    def __str__(self) -> str:
        of_memory = BYTES_PER_PARAM * self.backward / self.bytes_per_s
        return (
            f"updates alone {self.alone / 1e9:.2f} Gparam/s, beside a backward "
            f"{self.backward / 1e9:.2f} ({of_memory:.0%} of memory), beside copies both ways "
            f"{self.beside / 1e9:.2f} and {self.copied / 1e9:.1f} GB/s of copies; "
            f"{self.bytes_per_s / 1e9:.0f} GB/s of host memory"
        )


def host_memory() -> HostMemory:
    """Measure it, with a thread a core, in memory where the runtime has units."""
    kernel = AdamKernel(library(), len(os.sched_getaffinity(0)))
    update = make_update(in_slab())
    run = partial(kernel.run, [update])
    try:
        alone = 1e9 * rate(run)
        copies, backward = Copies(), Backward()
        rate_of_copies = beside(copies.run, run)
        return HostMemory(
            alone=alone,
            backward=beside(backward.run, run).params_per_s,
            beside=rate_of_copies.params_per_s,
            copied=rate_of_copies.others_per_s * copies.num_bytes,
        )
    finally:
        kernel.close()


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Parameters/s of updates, and how often other work was done a second at the same time."""

    params_per_s: float
    others_per_s: float


def beside(other: Callable[[], None], update: Callable[[], object]) -> Beside:
    """Rates of 20 updates while a thread does other work again and again."""
    over, done = threading.Event(), [0]

    def repeat() -> None:
        while not over.is_set():
            other()
            done[0] += 1

    other()
    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        update()
        before, start, repeats = done[0], time.perf_counter(), 20
        for _ in range(repeats):
            update()
        seconds, others = time.perf_counter() - start, done[0] - before
    finally:
        over.set()
        thread.join()
    return Beside(params_per_s=repeats * NUM_PARAMS / seconds, others_per_s=others / seconds)


class Copies:
    """256 MiB in both directions of the link at once."""

    num_bytes = 2 * 2**28

    def __init__(self) -> None:
        half = self.num_bytes // 2
        self._device = [torch.empty(half, dtype=torch.uint8, device="cuda") for _ in range(2)]
        self._host = [torch.empty(half, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._streams = [torch.cuda.Stream() for _ in range(2)]

    def run(self) -> None:
        with torch.cuda.stream(self._streams[0]):
            self._device[0].copy_(self._host[0], non_blocking=True)
        with torch.cuda.stream(self._streams[1]):
            self._host[1].copy_(self._device[1], non_blocking=True)
        torch.cuda.synchronize()


class Backward:
    """Backwards of a GPT block on 8 × 1024 tokens, launched op by op from Python."""

    def __init__(self) -> None:
        shape = Shape(layers=1, hidden=2560, heads=20)
        self._block = Block(shape).to("cuda", torch.bfloat16)
        size = (8, shape.sequence, shape.hidden)
        rows = torch.randn(size, device="cuda", dtype=torch.bfloat16)
        self._output = self._block(rows).sum()

    def run(self) -> None:
        for _ in range(4):
            self._output.backward(retain_graph=True)
        self._block.zero_grad()
        torch.cuda.synchronize()


Take = Callable[[torch.dtype], torch.Tensor]
"""Memory for `NUM_PARAMS` elements."""


def anywhere(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(NUM_PARAMS, dtype=dtype)


def in_slab() -> Take:
    """Memory where the runtime has units."""
    arena = Arena(UNIT_BYTES, pin=torch.cuda.is_available())
    arena.register(0, arena.num_bytes)
    used = 0

    def take(dtype: torch.dtype) -> torch.Tensor:
        nonlocal used
        view = arena.typed(used, [NUM_PARAMS], dtype)
        used += view.nbytes  # whole pages
        return view

    return take


def make_update(take: Take = anywhere) -> Update:
    """AdamW of one unit, in mixed precision."""
    return Update(
        master=take(torch.float32).normal_(),
        gradient=take(torch.bfloat16).normal_().mul_(1e-3),
        copy=take(torch.bfloat16),
        exp_avg=take(torch.float32).zero_(),
        exp_avg_sq=take(torch.float32).zero_(),
        max_exp_avg_sq=None,
        lr=1e-5,
        beta1=0.9,
        beta2=0.999,
        eps=1e-8,
        weight_decay=0.01,
        step=3.0,
        decoupled=True,
        maximize=False,
    )


def main() -> None:
    if torch.cuda.is_available():
        print(host_memory(), flush=True)
    update = make_update()
    master, gradient, copy = update.master, update.gradient, update.copy
    state = {"exp_avg": update.exp_avg, "exp_avg_sq": update.exp_avg_sq}
    parameter = nn.Parameter(master)
    cores = len(os.sched_getaffinity(0))
    counts = sorted({max(1, cores * k // 8) for k in (1, 2, 4, 6, 7, 8)})
    for threads in counts:
        torch.set_num_threads(threads)
        kernel = AdamKernel(library(), threads)
        ours = rate(lambda kernel=kernel: kernel.run([update]))  # type: ignore[misc]
        kernel.close()
        adam = torch.optim.AdamW([parameter], lr=1e-5, fused=True)
        parameter.grad = gradient.float()
        plain = rate(adam.step)
        large = torch.empty(2**28)
        source = torch.randn(2**28)
        copied = rate(lambda large=large, source=source: large.copy_(source))  # type: ignore[misc]
        bandwidth = copied * 1e9 / NUM_PARAMS * 2 * large.numel() * 4 / 1e9
        unit = UnitOptimizer(adam, [parameter])
        chunked = rate(
            lambda unit=unit: unit.step_mixed([master], [gradient], [state], [copy])  # type: ignore[misc]
        )
        print(
            f"{threads} threads: ours {ours:.2f} Gparam/s ({ours * BYTES_PER_PARAM:.0f} GB/s), "
            f"torch's fp32 only {plain:.2f}, as a unit {chunked:.2f}; memory copy "
            f"{bandwidth:.0f} GB/s",
            flush=True,
        )
    kernel = AdamKernel(library(), cores)
    for where, made in (("anywhere", update), ("in a slab", make_update(in_slab()))):
        seconds = seconds_of(lambda made=made: kernel.run([made]), 20)  # type: ignore[misc]
        best, median = (NUM_PARAMS / f(seconds) / 1e9 for f in (min, statistics.median))
        print(f"{where}: best {best:.2f}, median {median:.2f} Gparam/s", flush=True)
    kernel.close()


if __name__ == "__main__":
    main()
