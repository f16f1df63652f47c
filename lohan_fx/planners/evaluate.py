"""What a finished plan is worth: simulated seconds of a step. No torch."""

from __future__ import annotations

from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import Plan
from lohan_fx.simulate import simulate
from lohan_fx.workload import Workload


def step_seconds(workload: Workload, plan: Plan, hw: HardwareProfile, backwards: int = 1) -> float:
    """Seconds from the first instruction to the end of optimizer.step(); where several backwards
    make a step, of their mean: all but the last only add their gradients to the sums."""
    last_s = simulate(workload, plan, hw).step_s
    if backwards == 1:
        return last_s
    others_s = simulate(workload, plan, hw, adds=True).step_s
    return (last_s + (backwards - 1) * others_s) / backwards
