"""A plan for a captured step: the one that was given, or one within budget from the strategy."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from functools import partial

from lohan_fx.compiled.leaving_room import ALONE, Beside, needs, plan_leaving_room
from lohan_fx.compiled.options import Options
from lohan_fx.errors import InsufficientMemoryError, PlanError, format_bytes, format_need
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import Plan, Prediction, Tier
from lohan_fx.planners import make_plan
from lohan_fx.planners.prediction import predict
from lohan_fx.planners.registry import PlannerOptions
from lohan_fx.planners.tiers import check_states_fit
from lohan_fx.planners.whole import tried_or_deferred
from lohan_fx.program import lower, residency
from lohan_fx.workload import Workload

PREPARE = "model.lohan.prepare(…) with a batch to train on"
"""What plans where units are by a step that trains."""


def has_backward(workload: Workload) -> bool:
    """Whether it is of a step that trains."""
    return workload.num_forward_ops < len(workload.ops)


def given_plan(options: Options, workload: Workload) -> Plan | None:
    """The user's plan, if there is one. Its prediction is of the step and the machine at hand; if
    the step is not the one it was made for, a note says so, as its other notes are of that one;
    another one, that the strategy that was asked for did not make it.

    Raises:
        PlanError: it is of another model, or program, than the one at hand.
        InsufficientMemoryError: it does not fit the budget.
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
        program = lower(workload, plan)
        memory = residency(program)
        need = needs(workload, plan, program, memory)
    except PlanError as error:
        if not has_backward(workload):
            raise PlanError(
                "the plan given to compile is of a step that trains, and an evaluation comes "
                f"first: call {PREPARE} before it"
            ) from error
        raise PlanError(
            f"the plan given to compile is of another program: {error}. It must have been made "
            f"for the same model, inputs and options: here fused={options.fused}, "
            f"loss_chunk_bytes={options.loss_chunk_bytes} (lohan_fx.plan plans for "
            "fused=False)"
        ) from error
    others = options.forwards - 1
    for tier, (peak, waiting) in need.items():
        whole, have = peak + others * waiting, getattr(options.budget, f"{tier}_bytes")
        if whole > have:
            raise InsufficientMemoryError(
                tier,
                whole,
                have,
                where="the whole step, by the plan given to compile",
                advice=_why_too_large(options, plan, tier, peak, have),
            )
    here = predict(workload, options.hw, options.planner, plan, program, memory)
    old, notes = plan.prediction, plan.notes
    if any(getattr(here, name) != getattr(old, name) for name in _OF_A_STEP):
        notes = (_of_another(old, here), *notes)
    asked = options.strategy
    if isinstance(asked, str) and asked not in ("pareto", plan.strategy):  # "pareto": the default
        note = (
            f"strategy={asked!r} did not make this plan, which was given to compile: it plans what "
            "else runs (other shapes, evaluations)"
        )
        notes = (note, *(other for other in notes if other != note))
    return dataclasses.replace(plan, prediction=here, notes=notes)


_OF_A_STEP = tuple(
    f.name for f in dataclasses.fields(Prediction) if f.name.endswith(("_bytes", "_flops"))
)
"""What a plan predicts that no machine changes, but other shapes, optimizers and options do."""


def _of_another(old: Prediction, here: Prediction) -> str:
    """What to tell of a plan that was made for another step than the one that it runs."""
    was, found = (
        f"{format_bytes(p.peak_device_bytes)} on the device, {format_bytes(p.peak_host_bytes)} in "
        f"host memory, {p.step_s:.3g} s by the closed form"
        for p in (old, here)
    )
    return (
        "the plan given to compile was made for another step than this one (other shapes, "
        "optimizer, compute dtype or options), and may be far from the best here. It expected "
        f"peaks of {was}; this step has {found}, as predicted above. Its own notes, which follow, "
        "are of the other step"
    )


def _why_too_large(options: Options, plan: Plan, tier: Tier, peak: int, have: int) -> str:
    """What a given plan was made for that is not so here; and what to do."""
    planned = getattr(plan.prediction, f"peak_{tier}_bytes")
    if peak != planned:
        return (
            f"The plan was made for {format_need(planned)} at its peak, which here is "
            f"{format_need(peak)}: with another batch, optimizer or compute dtype, or without what "
            "adds gradients up here (accumulates=True of lohan_fx.plan). Make a plan of this, or "
            "leave plan= out."
        )
    if peak <= have:
        return (
            f"One forward fits, forwards={options.forwards} hold more at once: leave plan= out, or "
            "make it for less memory."
        )
    return (
        "Give compile the memory= that it was made for, or make a plan for this one: leave plan= "
        "out."
    )


def fitting_plan(
    options: Options,
    workload: Workload,
    hw: HardwareProfile,
    planner: PlannerOptions,
    *,
    deferred: bool,
    beside: Beside = ALONE,
) -> Plan:
    """A plan that leaves room for what the other forwards hold that wait at once: for those of
    other programs if there is one, else for its own, and a note says so.

    Args:
        options: strategy, budget, number of forwards.
        workload: what is planned.
        hw: the profile that seconds come from.
        planner: what is fixed or wished about tiers and schedule.
        deferred: a program that shares the memory has no room for second copies.
        beside: what other programs take on the device.

    Raises:
        InsufficientMemoryError: there is none.
        PlanError: the strategy failed.
    """
    if isinstance(options.strategy, str):  # what others may do, nobody knows
        check_states_fit(workload, hw, options.budget, planner)
    make = partial(_plan_once, options, workload, hw, planner=planner, deferred=deferred)
    trains, others = has_backward(workload), options.forwards - 1
    if others and beside != ALONE:
        counts: tuple[int, ...] = (others,)
        if not trains:  # it waits beside no step; all the others may wait beside it
            counts, beside = (others + 1, others), dataclasses.replace(beside, peak=0)
        for count in counts:
            with suppress(InsufficientMemoryError):
                plan = plan_leaving_room(workload, options.budget, count, make, beside)
                return plan if count == counts[0] else _with_room_for(count, plan)
    if not others or not trains:
        plan = make(options.budget)
    else:
        plan = plan_leaving_room(workload, options.budget, others, make)
    return plan if not others or beside == ALONE else _with_room_for(0, plan)


_NO_MORE_ROOM = "no plan was found that leaves more room"


def _with_room_for(count: int, plan: Plan) -> Plan:
    """The plan, with a note that says how many forwards of other programs it has room for."""
    which = f"more than {count} of the forwards" if count else "forwards"
    note = (
        f"while {which} of other shapes or modes wait for their backward, this program may exceed "
        f"the device budget: {_NO_MORE_ROOM}"
    )
    return dataclasses.replace(plan, notes=(*plan.notes, note))


def leaves_too_little(plan: Plan) -> bool:
    """Whether a note says that no plan leaves room for all that may wait."""
    return any(note.endswith(_NO_MORE_ROOM) for note in plan.notes)


def _plan_once(
    options: Options,
    workload: Workload,
    hw: HardwareProfile,
    budget: MemoryBudget,
    planner: PlannerOptions,
    deferred: bool,
) -> Plan:
    """A plan; as strategy and options have it, or late updates if they may be late."""
    make = partial(make_plan, options.strategy, workload, hw, budget)
    if not options.may_defer:
        return make(planner)
    return tried_or_deferred(make, planner, deferred=deferred)
