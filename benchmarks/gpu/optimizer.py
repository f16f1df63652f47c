"""Rate of the CPU optimizer: our kernel and torch's, against the host memory's bandwidth.

    python benchmarks/gpu/optimizer.py

Parameters per second by number of threads, on one unit of 79M parameters: bfloat16 gradients and
compute copies, float32 masters and AdamW states. The floor is 28 bytes a parameter. On a GPU, also
beside copies in both directions: optimizer and link share the host's memory.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import torch
from torch import nn

from lohan_fx.runtime.native.adam import AdamKernel, Update, library
from lohan_fx.runtime.optimizer import UnitOptimizer

NUM_PARAMS = 79_000_000 // 2048 * 2048
BYTES_PER_PARAM = 28


def rate(call: Callable[[], object], repeats: int = 5) -> float:
    """Gparam/s of `call`, the best of some, after one warm-up."""
    call()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return NUM_PARAMS / min(seconds) / 1e9


def beside_copies(update: Callable[[], object]) -> str:
    """The rate of `update` while both directions of the link copy, and what these move."""
    num_bytes = 2**28
    device = [torch.empty(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    host = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    over, moved = threading.Event(), [0]

    def copy() -> None:
        while not over.is_set():
            with torch.cuda.stream(streams[0]):
                device[0].copy_(host[0], non_blocking=True)
            with torch.cuda.stream(streams[1]):
                host[1].copy_(device[1], non_blocking=True)
            torch.cuda.synchronize()
            moved[0] += 2 * num_bytes

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        update()
        before, start, repeats = moved[0], time.perf_counter(), 20
        for _ in range(repeats):
            update()
        seconds, copied = time.perf_counter() - start, moved[0] - before
    finally:
        over.set()
        thread.join()
    updated = repeats * NUM_PARAMS / seconds / 1e9
    total = updated * BYTES_PER_PARAM + copied / seconds / 1e9
    return (
        f"beside copies both ways: {updated:.2f} Gparam/s, {copied / seconds / 1e9:.1f} GB/s of "
        f"copies, {total:.0f} GB/s together"
    )


def main() -> None:
    master = torch.randn(NUM_PARAMS)
    parameter = nn.Parameter(master)
    state = {"exp_avg": torch.zeros(NUM_PARAMS), "exp_avg_sq": torch.zeros(NUM_PARAMS)}
    gradient = torch.randn(NUM_PARAMS).mul_(1e-3).to(torch.bfloat16)
    copy = torch.empty(NUM_PARAMS, dtype=torch.bfloat16)
    update = Update(
        master=master,
        gradient=gradient,
        copy=copy,
        max_exp_avg_sq=None,
        lr=1e-5,
        beta1=0.9,
        beta2=0.999,
        eps=1e-8,
        weight_decay=0.01,
        step=3.0,
        decoupled=True,
        maximize=False,
        **state,
    )
    cores = len(os.sched_getaffinity(0))
    counts = sorted({max(1, cores * k // 8) for k in (1, 2, 4, 6, 7, 8)})
    for threads in counts:
        torch.set_num_threads(threads)
        kernel = AdamKernel(library(), threads)
        ours = rate(lambda kernel=kernel: kernel.run([update]))  # type: ignore[misc]
        if torch.cuda.is_available() and threads == cores:
            print(beside_copies(lambda kernel=kernel: kernel.run([update])))  # type: ignore[misc]
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


if __name__ == "__main__":
    main()
