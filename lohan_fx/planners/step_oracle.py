"""The least time of a step, proved: no plan's simulated step takes less (`step_program`). No torch.

For steps of up to some 60 ops without swapping, 40 with; a solver that is stopped early still says
what it proved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lohan_fx.errors import InsufficientMemoryError
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import Action
from lohan_fx.planners.milp import Limits, SolverError, Status, pick_solver
from lohan_fx.planners.oracle_schedule import Links
from lohan_fx.planners.schedule import Choices
from lohan_fx.planners.step_program import StepProgram
from lohan_fx.workload import Workload


@dataclass(frozen=True, kw_only=True)
class StepBound:
    """What a solver proved of a step.

    Attributes:
        status: "optimal" within the gap that was asked for; "feasible" or "unknown" if the solver
            stopped early, with or without a solution of its own.
        bound_s: no plan's simulated step takes less.
        seconds: the program's best known solution, infinite if there is none; a plan may need
            more, as the program leaves out some of what it does.
        remade: residual that this solution makes again → the op before which it first does.
        swapped: residuals that it fetches.
        solver: which one ran.
    """

    status: Status
    bound_s: float
    seconds: float
    remade: Mapping[str, str]
    swapped: frozenset[str]
    solver: str

    @property
    def gap(self) -> float:
        """How far the solver was from done: seconds / bound_s − 1."""
        return self.seconds / self.bound_s - 1 if self.bound_s > 0 else math.inf

    def choices(self, workload: Workload) -> Choices:
        """The solution as a plan would have it: a region for every op that something is remade
        before, what is remade once stays. It may need more memory or time than the program says.
        """
        actions: dict[str, Action] = dict.fromkeys(workload.residuals, "keep")
        actions.update(dict.fromkeys(self.remade, "recompute"))
        actions.update(dict.fromkeys(self.swapped, "swap"))
        return Choices(
            actions=actions,
            unit_tiers=dict.fromkeys(workload.unit_by_name, "device"),
            regions={v: op for v, op in self.remade.items() if v not in self.swapped},
        )


def step_bound(
    workload: Workload,
    hw: HardwareProfile,
    budget: MemoryBudget,
    limits: Limits | None = None,
    *,
    swap: bool = True,
) -> StepBound:
    """The least time of a step with all units on the device (`states="device"`), not "serial".

    Args:
        swap: whether residuals may be swapped, to host memory and SSDs as the budgets allow.

    Raises:
        InsufficientMemoryError: no plan fits; `need_bytes` is less than what a plan needs.
        SolverError: no solver is there, or it was stopped before it proved anything.
    """
    limits = limits or Limits()
    solver = pick_solver(limits.solver)
    links = Links.of(hw, budget.host_bytes, budget.ssd_bytes) if swap else None
    program = StepProgram(workload, hw, budget.device_bytes, links)
    need, where = program.least_bytes()
    if need > budget.device_bytes:
        raise _infeasible(need, budget.device_bytes, where)
    answer = program.lp.solve(solver, limits)
    if answer.status == "infeasible":
        relaxed = StepProgram(workload, hw, None, links, relaxed=True)
        least = relaxed.lp.solve(solver, limits).bound * relaxed.unit_bytes
        need = max(budget.device_bytes + 1, int(least) if math.isfinite(least) else 0)
        raise _infeasible(need, budget.device_bytes, workload.name)
    if not math.isfinite(answer.bound):
        raise _unproved(solver, workload, limits)
    return StepBound(
        status=answer.status,
        bound_s=program.seconds_of(answer.bound),
        seconds=program.seconds_of(answer.value),
        remade=program.remade() if answer.solved else {},
        swapped=program.swapped() if answer.solved else frozenset(),
        solver=solver,
    )


def least_device_bytes(
    workload: Workload,
    hw: HardwareProfile,
    budget: MemoryBudget,
    limits: Limits | None = None,
    *,
    swap: bool = True,
) -> tuple[int, int]:
    """(no plan fits less, the least that the program was found to fit): device memory.

    The arguments are those of `step_bound`; `budget.device_bytes` does not count.

    Raises:
        SolverError: no solver is there, or it was stopped before it found anything.
    """
    limits = limits or Limits()
    solver = pick_solver(limits.solver)
    links = Links.of(hw, budget.host_bytes, budget.ssd_bytes) if swap else None
    program = StepProgram(workload, hw, None, links)
    answer = program.lp.solve(solver, limits)
    if not answer.solved:
        raise _unproved(solver, workload, limits)
    need, _ = program.least_bytes()
    bytes_of = (math.ceil(x * program.unit_bytes) for x in (answer.bound, answer.value))
    low, high = (max(need, size) for size in bytes_of)
    return low, high


def _unproved(solver: str, workload: Workload, limits: Limits) -> SolverError:
    return SolverError(
        f"{solver} proved nothing about the {len(workload.ops)} ops of {workload.name} in "
        f"{limits.time_s:g} s: allow more time or take a smaller model"
    )


def _infeasible(need: int, have: int, where: str) -> InsufficientMemoryError:
    return InsufficientMemoryError(
        "device",
        need,
        have,
        where=f"{where}, the program is infeasible",
        advice="No plan with all units on the device fits: it needs at least what is named here.",
    )
