"""A plan for a captured step: the one that was given, or one within budget from the strategy."""

from __future__ import annotations

import dataclasses
from contextlib import suppress

from lohan_fx import footprint
from lohan_fx.compiled.options import Options
from lohan_fx.errors import InsufficientMemoryError, PlanError
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import Plan
from lohan_fx.planners import make_plan
from lohan_fx.planners.registry import PlannerOptions
from lohan_fx.program import lower, residency, waiting_bytes
from lohan_fx.workload import Workload


def given_plan(options: Options, workload: Workload) -> Plan | None:
    """The user's plan, if there is one.

    Raises:
        PlanError: it is of another model, or program, than the one at hand.
    """
    plan = options.plan
    if plan is None:
        return None
    if plan.workload != workload.name:
        raise PlanError(
            f"the plan given to compile is of {plan.workload}, not of {workload.name}: make one "
            "for this model, or leave plan= out"
        )
    try:
        lower(workload, plan)
    except PlanError as error:
        raise PlanError(
            f"the plan given to compile is of another program: {error}. It must have been made "
            f"for the same model, inputs and options: here fused={options.fused}, "
            f"loss_chunk_bytes={options.loss_chunk_bytes} (lohan_fx.plan plans for "
            "fused=False)"
        ) from error
    return plan


def fitting_plan(
    options: Options,
    workload: Workload,
    hw: HardwareProfile,
    planner: PlannerOptions,
    *,
    deferred: bool,
) -> Plan:
    """A plan that leaves room for what the other forwards hold that wait at once.

    Args:
        options: strategy, budget, number of forwards.
        workload: what is planned.
        hw: the profile that seconds come from.
        planner: what is fixed or wished about tiers and schedule.
        deferred: a program that shares the memory has no room for second copies.

    Raises:
        InsufficientMemoryError: there is none.
        PlanError: the strategy failed.
    """
    others = options.forwards - 1
    budget = options.budget
    while True:
        plan = _plan_once(options, workload, hw, budget, planner, deferred=deferred)
        if not others:
            return plan
        program = lower(workload, plan)
        host = footprint.host_bytes_needed(workload, plan)
        ssd = footprint.ssd_bytes_needed(workload, plan)
        waiting = {
            "device_bytes": waiting_bytes(program),
            "host_bytes": host["residuals"],
            "ssd_bytes": ssd["residuals"],
        }
        peaks = {
            "device_bytes": residency(program).peak_bytes,
            "host_bytes": sum(host.values()),
            "ssd_bytes": sum(ssd.values()),
        }
        less = {
            tier: size
            for tier, peak in peaks.items()
            if peak + others * waiting[tier] > getattr(options.budget, tier)
            and (size := getattr(options.budget, tier) - others * waiting[tier])
            < getattr(budget, tier)
        }
        if not less:
            return plan
        tier = min(less, key=less.__getitem__)
        if less[tier] < 0:
            raise InsufficientMemoryError(
                tier.removesuffix("_bytes"),
                others * waiting[tier],
                getattr(options.budget, tier),
                where="what waiting forwards hold",
                advice=f"give more memory, or a smaller forwards= than {options.forwards}",
            )
        budget = dataclasses.replace(budget, **less)


def _plan_once(
    options: Options,
    workload: Workload,
    hw: HardwareProfile,
    budget: MemoryBudget,
    planner: PlannerOptions,
    *,
    deferred: bool,
) -> Plan:
    """A plan; with late updates if early ones into second copies have no room in host memory,
    or drive units to the SSD, or had none for another program: they share it."""
    if not options.may_defer or planner.states == "ssd":
        return make_plan(options.strategy, workload, hw, budget, planner)
    if not deferred:
        with suppress(InsufficientMemoryError):
            early = dataclasses.replace(planner, explain=False)
            plan = make_plan(options.strategy, workload, hw, budget, early)
            if all(unit.tier != "ssd" for unit in plan.units.values()):
                return plan
    late = dataclasses.replace(planner, schedule="deferred")
    return make_plan(options.strategy, workload, hw, budget, late)
