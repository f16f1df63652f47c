"""How far strategies are from the best plan that there is, on graphs small enough to know it.

    python -m benchmarks.optimality [--jobs 2] [--time 6] [--only MODEL …] [--out FILE]

Prints the table, and writes its rows into the document, between its two markers. Some three
minutes on two cores. Needs torch (to trace the models) and a MILP solver.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lohan_fx
from lohan_fx.errors import LohanError
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.models.gpt import Block
from lohan_fx.planners import PlannerOptions, finish, make_plan
from lohan_fx.planners.milp import Limits
from lohan_fx.planners.step_oracle import least_device_bytes, step_bound
from lohan_fx.simulate import step_seconds
from lohan_fx.workload import Workload

DOCUMENT = Path(__file__).parents[1] / "docs" / "optimality.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
PLENTY = 2**42
STRATEGIES = (
    "lohan",
    "pareto",
    "checkmate",
    "capuchin",
    "fuyou",
    "chen-sqrt",
    "recompute-all",
    "swap-all",
)
PARTS = (0.1, 0.4)
"""Device budgets: where they stand between what the oracle needs and what keeping all needs."""

TIERS: Mapping[str, Sequence[str]] = {
    "rtx4090-12xp5510": ("none", "host"),
    "memferry-a100": ("none", "host"),
    "h100-1ssd": ("ssd",),
}
"""Hardware preset → where residuals may be swapped to, in turn."""


# -- models -----------------------------------------------------------------------------------


class Mlp(nn.Module):
    """Blocks of a hidden layer four times as wide, each with a shortcut."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class Transformer(nn.Module):
    """Blocks of the papers' GPT, without embedding and head."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class UNet(nn.Module):
    """Two levels down, two up; what is made first is used last."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = (width, 2 * width, 4 * width)
        self.down = nn.ModuleList(
            nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(sizes)
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in itertools.pairwise(sizes)
        )

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            skips.append(x)
            x = F.avg_pool2d(F.gelu(layer(x)), 2)
        for layer, skip in zip(reversed(self.up), reversed(skips), strict=True):
            x = F.gelu(layer(x)) + skip
        return x.square().mean()


MODELS: Mapping[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mlp, 3 blocks": lambda: (Mlp(3, 4096), torch.empty(16384, 4096)),
    "transformer, 1 block": lambda: (Transformer(1, 4096, 32), torch.empty(16, 1024, 4096)),
    "transformer, 2 blocks": lambda: (Transformer(2, 4096, 32), torch.empty(16, 1024, 4096)),
    "u-net, 2 levels": lambda: (UNet(64), torch.empty(64, 64, 128, 128)),
}


@cache
def workload_of(model: str, preset: str) -> Workload:
    """One step in bf16 without an optimizer: activations are all there is to plan."""
    with torch.device("meta"):
        module, x = MODELS[model]()
    module, x = module.to(torch.bfloat16), x.to(torch.bfloat16)
    planned = lohan_fx.plan(module, (x,), hw=preset, optimizer=None)
    return planned.workload


# -- cases ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """`tier`: where residuals may go, "none" for nowhere."""

    model: str
    preset: str
    tier: str
    part: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was found.

    Attributes:
        num_ops: of the step.
        device_bytes: the budget.
        bound_s: proved: no plan's simulated step takes less.
        steps: strategy → seconds of its simulated step; a strategy without a plan is not there.
        own_s: of the oracle's solution as a plan, infinite if it does not fit.
        wall_s: solver's and planners' time.
    """

    case: Case
    num_ops: int
    device_bytes: int
    bound_s: float
    steps: Mapping[str, float]
    own_s: float
    wall_s: float

    @property
    def best_s(self) -> float:
        return min([self.own_s, *self.steps.values()])

    @property
    def own_is_best(self) -> bool:
        """Whether the oracle's solution is a plan that no strategy comes up with."""
        return self.own_s < 0.9995 * min(self.steps.values(), default=float("inf"))

    def gap(self, seconds: float) -> float:
        return seconds / self.bound_s - 1


def measure(case: Case, time_s: float) -> Row:
    start = time.monotonic()
    hw = HardwareProfile.preset(case.preset)
    work = workload_of(case.model, case.preset)
    options = PlannerOptions(states="device", schedule="optimized")
    swap = case.tier != "none"
    room = MemoryBudget(
        device_bytes=PLENTY,
        host_bytes=PLENTY if case.tier == "host" else 2**30 if swap else 0,
        ssd_bytes=PLENTY if case.tier == "ssd" else 0,
    )
    limits = Limits(time_s=time_s, gap=1e-3)
    _, least = least_device_bytes(work, hw, room, limits, swap=swap)
    most = make_plan("keep-all", work, hw, room, options).prediction.peak_device_bytes
    budget = MemoryBudget(
        device_bytes=least + int(case.part * (most - least)),
        host_bytes=room.host_bytes,
        ssd_bytes=room.ssd_bytes,
    )
    bound = step_bound(work, hw, budget, limits, swap=swap)
    steps = {}
    for strategy in STRATEGIES:
        try:
            plan = make_plan(strategy, work, hw, budget, options)
        except LohanError:
            continue
        steps[strategy] = step_seconds(work, plan, hw)
    try:
        own = finish(work, hw, budget, options, bound.choices(work), "oracle")
        own_s = step_seconds(work, own, hw)
    except LohanError:
        own_s = float("inf")
    return Row(
        case=case,
        num_ops=len(work.ops),
        device_bytes=budget.device_bytes,
        bound_s=bound.bound_s,
        steps=steps,
        own_s=own_s,
        wall_s=time.monotonic() - start,
    )


def cases(models: Iterable[str]) -> list[Case]:
    return [
        Case(model=model, preset=preset, tier=tier, part=part)
        for model in models
        for preset, tiers in TIERS.items()
        for tier in tiers
        for part in PARTS
    ]


def run(chosen: Sequence[Case], time_s: float, jobs: int) -> list[Row]:
    """In processes of their own; the slow ones first."""
    order = sorted(range(len(chosen)), key=lambda k: -len(chosen[k].model))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        futures = {k: pool.submit(measure, chosen[k], time_s) for k in order}
        rows = []
        for k, case in enumerate(chosen):
            rows.append(futures[k].result())
            print(
                f"{case.model}, {case.preset}, {case.tier}, {case.part}: ", end="", file=sys.stderr
            )
            print(f"{rows[-1].wall_s:.1f} s", file=sys.stderr, flush=True)
    return rows


# -- tables -----------------------------------------------------------------------------------


def percent(gap: float) -> str:
    return "0" if gap < 5e-4 else f"{100 * gap:.1f}"


def table(rows: Sequence[Row]) -> str:
    head = ["model", "hardware", "swap to", "budget", "least step", "best plan", *STRATEGIES]
    lines = [head, ["---"] * len(head)]
    before: tuple[str, ...] | None = None
    for row in rows:
        case = row.case
        names = (f"{case.model} ({row.num_ops} ops)", case.preset, case.tier)
        cells = ["" if names == before else name for name in names]
        cells += [f"{row.device_bytes / 2**30:.2f} GiB", f"{1e3 * row.bound_s:.1f} ms"]
        cells.append(percent(row.gap(row.best_s)) + ("*" if row.own_is_best else ""))
        found = [row.gap(row.steps[s]) if s in row.steps else None for s in STRATEGIES]
        cells += ["–" if gap is None else percent(gap) for gap in found]
        lines.append(cells)
        before = names
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def summary(rows: Sequence[Row]) -> str:
    lines = [
        "| strategy | has a plan | best | within 1% | mean gap | largest gap "
        "| within 1% of the best plan | most above it |",
        "|---" * 8 + "|",
    ]
    for strategy in STRATEGIES:
        planned = [row for row in rows if strategy in row.steps]
        if not planned:
            continue
        gaps = [row.gap(row.steps[strategy]) for row in planned]
        behind = [row.steps[strategy] / row.best_s - 1 for row in planned]
        lines.append(
            f"| {strategy} | {len(gaps)} of {len(rows)} | {sum(g < 1e-3 for g in gaps)} "
            f"| {sum(g < 0.01 for g in gaps)} | {100 * sum(gaps) / len(gaps):.1f}% "
            f"| {100 * max(gaps):.1f}% "
            f"| {sum(b < 0.01 for b in behind)} | {percent(max(behind))}% |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optimality", description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--time", type=float, default=6.0, help="seconds for the solver, a case")
    parser.add_argument("--only", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--out", type=Path, default=DOCUMENT)
    options = parser.parse_args()
    start = time.monotonic()
    rows = run(cases(options.only), options.time, options.jobs)
    text = f"{summary(rows)}\n\n{table(rows)}"
    print(text)
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)
    before, _, rest = options.out.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    options.out.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
