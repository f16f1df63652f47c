"""What `pareto` tells about a plan: how good it is, and what holds it back. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lohan_fx.planners.model import Model
from lohan_fx.planners.simplex import Solution
from lohan_fx.planners.time_rows import (
    BACKWARD,
    BETWEEN,
    FORWARD,
    OPTIMIZER,
    STEP,
    TO_END,
    Stages,
)

NAME = "pareto"

_STAGES: Mapping[str, tuple[Stages, ...]] = {
    "forward": (FORWARD, BETWEEN),
    "backward": (BACKWARD,),
    "optimizer": (OPTIMIZER, TO_END, STEP),
}


@dataclass(frozen=True, kw_only=True)
class ParetoReport:
    """How good a plan is, and what holds it back.

    Attributes:
        step_s: seconds of the simulated step.
        bound_s: no plan that options and budgets allow takes less, by the simulator.
        gap: step_s / bound_s − 1.
        binding: stage → the resource that binds it in the optimum of the linear program, as
            reports call it.
        device_s_per_byte: seconds that one more byte of device memory would save, at the margin.
        source: the strategy whose plan it is; "pareto" for its own.
        exhaustive: every assignment was either simulated or ruled out by its bound.
        num_simulated: how many plans were simulated.
    """

    step_s: float
    bound_s: float
    gap: float
    binding: Mapping[str, str]
    device_s_per_byte: float
    source: str
    exhaustive: bool
    num_simulated: int

    def notes(self) -> tuple[str, ...]:
        """For `Plan.notes`."""
        tail = ", every assignment was tried or ruled out" if self.exhaustive else ""
        stages = ", ".join(f"{stage} {resource}" for stage, resource in self.binding.items())
        found = [
            f"simulated step {self.step_s:.6g} s, lower bound {self.bound_s:.6g} s, "
            f"gap {100 * self.gap:.2f}%{tail}",
            f"what binds that lower bound: {stages}",
        ]
        for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
            saved = self.device_s_per_byte * size
            if 0 < saved < self.step_s / 2:
                found.append(f"one more {unit} of device memory saves at most {saved:.3g} s")
                break
        if self.source != NAME:
            found.append(f"the plan is strategy {self.source!r}'s: nothing faster was found")
        return tuple(found)


def binding(model: Model, relaxed: Solution) -> dict[str, str]:
    """Stage → the resource that the relaxed program's optimum pays most for.

    A row's price is shared between the device and its lane by their parts of its seconds.
    """
    time = model.time @ relaxed.x
    found = {}
    for stage, patterns in _STAGES.items():
        total: dict[str, float] = {}
        rows = zip(model.rows, relaxed.prices, time, strict=False)
        for row, price, added in rows:
            if row.stages not in patterns or price > -1e-9 or row.base + added <= 0:
                continue
            lane = float(added / (row.base + added)) if row.resource != "gpu" else 0.0
            for resource, part in (("gpu", 1 - lane), (row.resource, lane)):
                total[resource] = total.get(resource, 0.0) - float(price) * part
        if total:
            found[stage] = model.hw.lane_name(max(total, key=lambda r: (total[r], r)))
    return found


def device_price(model: Model, relaxed: Solution) -> float:
    """Seconds that a byte of device memory is worth in the relaxed program's optimum."""
    first = len(model.rows)
    rows = relaxed.prices[first : first + len(model.memory_ops)]
    return float(-np.minimum(rows, 0.0).sum()) * model.unit_s
