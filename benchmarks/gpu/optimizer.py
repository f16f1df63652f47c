"""Rate of the CPU optimizer: plain fused AdamW, and a unit's mixed-precision update.

    python benchmarks/gpu/optimizer.py

Parameters per second over chunks and threads, on one unit of 79M parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from lohan_fx.runtime.optimizer import UnitOptimizer

NUM_PARAMS = 79_000_000 // 2048 * 2048


def rate(call: Callable[[], None], repeats: int = 4) -> float:
    """Gparam/s of `call`, after one warm-up."""
    call()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return repeats * NUM_PARAMS / (time.perf_counter() - start) / 1e9


def main() -> None:
    parameter = nn.Parameter(torch.empty(NUM_PARAMS))
    optimizer = torch.optim.AdamW([parameter], lr=1e-5)
    master = torch.randn(NUM_PARAMS)
    state = {"exp_avg": torch.zeros(NUM_PARAMS), "exp_avg_sq": torch.zeros(NUM_PARAMS)}
    gradient = torch.randn(NUM_PARAMS).mul_(1e-3)
    half = gradient.to(torch.bfloat16)
    copy = torch.empty(NUM_PARAMS, dtype=torch.bfloat16)
    for threads in (8, 16):
        torch.set_num_threads(threads)
        whole = UnitOptimizer(optimizer, [parameter], prefer_fused=True, chunk_elements=NUM_PARAMS)
        plain = rate(partial(whole.step, [master], [gradient], [state]))
        row = [f"{threads} threads: fp32 whole {plain:.2f}"]
        for chunk in (None, 2**19, 2**21, 2**22, 2**23):
            unit = UnitOptimizer(optimizer, [parameter], prefer_fused=True, chunk_elements=chunk)
            mixed = rate(partial(unit.step_mixed, [master], [half], [state], [copy]))
            row.append(f"mixed chunk {chunk} {mixed:.2f}")
        print("; ".join(row), "Gparam/s", flush=True)


if __name__ == "__main__":
    main()
