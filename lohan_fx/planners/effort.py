"""How hard `pareto` tries, by the size of the workload. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from lohan_fx.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How hard to try.

    Attributes:
        reserves: memory left to copies in flight, as shares of what lets one copy overlap
            (`pareto_ladder`); one trial each.
        device_rungs, host_rungs: rungs of the ladder in an octave of device and host memory.
        ladder: most trials on the ladder.
        assignments: most assignments that are enumerated.
        simulations: most of them that are simulated.
        polish: most plans that the last local search simulates from one start.
        around: from plans with so many units more or less on the device it starts, too.
        drafts: most drafts of the search that exchanges choices, and regions with them.
        starts: from the best plans of so many strategies it begins.
        nodes: most nodes of branch and bound in a trial at the budget itself.
        lean, lower: where nothing fits: most drafts on the way to the smallest need; how often
            a budget below it is tried.
    """

    reserves: tuple[float, ...] = (1.0, 0.0, 0.5, 2.0)
    device_rungs: int = 4
    host_rungs: int = 2
    ladder: int = 4
    assignments: int = 40_000
    simulations: int = 1_500
    polish: int = 48
    around: int = 0
    drafts: int = 300
    starts: int = 4
    nodes: int = 6
    lean: int = 12
    lower: int = 0

    @classmethod
    def of(cls, workload: Workload) -> Effort:
        """By the number of ops, as the time to evaluate a plan is in proportion to it."""
        ops = len(workload.ops)
        if ops <= 150:
            return cls(drafts=300 if ops <= 80 else 100, lean=120, lower=40)
        if ops <= 1_500:
            return cls(assignments=0, drafts=0, polish=24, around=1, nodes=2, lean=40, lower=1)
        if ops <= 4_000:
            return cls(ladder=2, assignments=0, drafts=0, polish=0, nodes=1)
        reserves = (1.0, 2.0)
        return cls(
            reserves=reserves,
            device_rungs=2,
            host_rungs=1,
            ladder=1,
            assignments=0,
            drafts=0,
            polish=0,
            nodes=1,
        )
