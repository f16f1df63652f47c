"""What a finished plan is worth: seconds of one simulated step. No torch."""

from __future__ import annotations

from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import Plan
from lohan_fx.simulate import simulate
from lohan_fx.workload import Workload


def step_seconds(workload: Workload, plan: Plan, hw: HardwareProfile) -> float:
    """Seconds from the first instruction to the end of optimizer.step()."""
    return simulate(workload, plan, hw).step_s
