"""What speed.py runs: models, batches, memory, the plan's settings, and the goals."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpt import Shape

GPT_1_3B = Shape(layers=24, hidden=2048, heads=16)
GPT_2_78B = Shape(layers=32, hidden=2560, heads=20)

PLAIN = {"plain": 0.85}
DISK = {"disk": 0.85}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model and batch. `cap` is lohan_fx's device memory in GiB, all of the card if None;
    `host` its host memory. With `ssd` states and swapped activations are on the SSD. Without
    `recompute` plain training keeps all activations. `goals` says what share of whose speed
    lohan_fx is to reach, "disk" being that of the disk's own rates, if all states cross it."""

    shape: Shape
    batch: int
    cap: float | None = 24
    host: float | None = None
    ssd: bool = False
    recompute: bool = True
    strategy: str = "lohan-resident"
    schedule: str = "overlapped"
    refine: bool = True
    goals: dict[str, float] = field(default_factory=lambda: PLAIN)

    @property
    def systems(self) -> list[str]:
        """Those that are run unless others are named: what sets a goal, but for peers that have to
        be installed, and lohan_fx."""
        return [name for name in self.goals if name.startswith("plain")] + ["ours"]

    @property
    def tokens(self) -> int:
        return self.batch * self.shape.sequence


CASES = {
    "0.4B-b8": Case(shape=Shape(layers=24, hidden=1024, heads=16), batch=8, cap=4),
    "1.3B-fits": Case(
        shape=GPT_1_3B,
        batch=8,
        cap=None,
        recompute=False,
        schedule="auto",
        refine=False,
        goals={"plain-mixed-whole": 0.98},
    ),
    "2.78B-b8": Case(
        shape=GPT_2_78B,
        batch=8,
        strategy="pareto",
        goals={"plain": 0.85, "deepspeed-zero3": 4.0},
    ),
    "2.78B-b32": Case(
        shape=GPT_2_78B,
        batch=32,
        strategy="pareto",
        goals={"plain": 0.95, "deepspeed-zero3": 2.0},
    ),
    "6.05B-b16": Case(shape=Shape(layers=28, hidden=4096, heads=32), batch=16),
    "1.3B-b32-ssd": Case(
        shape=GPT_1_3B,
        batch=32,
        cap=12,
        host=8,
        ssd=True,
        schedule="auto",
        refine=False,
        goals=DISK,
    ),
    "2.78B-b32-ssd": Case(
        shape=GPT_2_78B, batch=32, host=16, ssd=True, schedule="auto", refine=False, goals=DISK
    ),
}
