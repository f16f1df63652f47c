"""One trial of `pareto`: the integer program at a budget, as an exact draft. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from lohan_fx.errors import InsufficientMemoryError
from lohan_fx.hardware import MemoryBudget
from lohan_fx.planners.assign import Assignment, assign, choices_of, rounded
from lohan_fx.planners.integer import solve_whole
from lohan_fx.planners.keep import keep_greedily
from lohan_fx.planners.model import Model, Option
from lohan_fx.planners.schedule import Draft, lean_draft
from lohan_fx.planners.simplex import Floats, solve

TIE_BREAK = 0.005
"""Weight of hidden copies and recomputation against the step: none is better than some."""

_ATTEMPTS = 5
"""The model's memory is an estimate between its rows: so often is it corrected."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A draft whose peak is within the target; `value_s` is the model's estimate of its step."""

    made: Draft
    assignment: Assignment
    value_s: float


def make_draft(
    model: Model, assignment: Assignment, budget: MemoryBudget, name: str, *, keep_tiny: bool = True
) -> Draft:
    """The draft of an assignment; regions smaller than blocks if else it exceeds the device budget.

    It may exceed it all the same.

    Raises:
        InsufficientMemoryError: host memory or SSD is too small.
    """
    args = (model.workload, model.hw, budget, model.options, choices_of(model, assignment), name)
    return lean_draft(*args, keep_tiny=keep_tiny)


def solve_at(model: Model, target: MemoryBudget, name: str, max_nodes: int = 1) -> Trial | None:
    """The best assignment found for a budget; None if none was found.

    Depends on the arguments alone. Where the exact draft exceeds the target, a row
    for that op is added and the budget corrected by the excess.
    """
    device, host = 0, 0
    ops: set[int] = set()
    for _ in range(_ATTEMPTS):
        program = model.program(
            target, relaxed=False, reserve=(device, host), tie_break=TIE_BREAK, more_ops=ops
        )
        whole = solve_whole(model, program, max_nodes)
        if whole is None:
            return None
        assignment = assign(model, whole.x)
        try:
            made = make_draft(model, assignment, target, name)
        except InsufficientMemoryError as error:
            if error.tier != "host":
                return None
            host += error.need_bytes - error.have_bytes
            continue
        over = made.memory.peak_bytes - target.device_bytes
        if over <= 0:
            value = whole.value * model.unit_s
            found = Trial(made=made, assignment=assignment, value_s=value)
            return filled(model, found, target, whole.worth, name)
        device += over
        ops.add(int(np.argmax(made.load)))
    return None


def filled(model: Model, trial: Trial, target: MemoryBudget, worth: Floats, name: str) -> Trial:
    """Keep more residuals where the exact load leaves room; `worth` has each option's price."""

    def saved(v: str) -> float:
        g = model.group_of[v]
        options = model.groups[g].options
        start = int(model.start[g])
        now = start + options.index(trial.assignment[v])
        return float(worth[now] - worth[start + options.index("keep")])

    names = [
        v
        for v in keep_greedily(trial.made, target.device_bytes, model.workload.residuals, saved)
        if saved(v) > 0
    ]
    while names:
        kept: Mapping[str, Option] = {**trial.assignment, **dict.fromkeys(names, "keep")}
        made = make_draft(model, kept, target, name)
        if made.memory.peak_bytes <= target.device_bytes:
            return replace(trial, made=made, assignment=kept)
        names = names[: len(names) // 2]
    return trial


def leanest_drafts(model: Model, budget: MemoryBudget, name: str) -> list[Draft]:
    """Drafts with as little device memory as host memory and SSD allow, whatever the time."""
    found = []
    host = 0
    for _ in range(_ATTEMPTS):
        program = model.program(
            budget, relaxed=False, reserve=(0, host), tie_break=1e-3, least_memory=True
        )
        solution = solve(program, model.leanest)
        if solution.status == "infeasible":
            break
        assignment = assign(model, rounded(model, solution.x))
        try:
            found.append(make_draft(model, assignment, budget, name))
            break
        except InsufficientMemoryError as error:
            if error.tier != "host":
                break
            host += error.need_bytes - error.have_bytes
    return found


def least_memory(model: Model, budget: MemoryBudget) -> float:
    """Device bytes that no plan undercuts; infinite if host memory or SSD is too small."""
    return solve(model.program(budget, least_memory=True), model.leanest).bound
