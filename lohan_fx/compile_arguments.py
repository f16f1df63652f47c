"""What `compile` is given: every argument checked; "auto", names and files become what they mean.

All functions raise LohanError about what is wrong, or HardwareError: the profile is of no device
that is here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from lohan_fx.arguments import check_count, check_flag, check_outputs
from lohan_fx.compiled.options import Gradients
from lohan_fx.errors import HardwareError, LohanError, PlanError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import SCHEDULES, WAITING, WHOLE, Plan, Schedule
from lohan_fx.planned import hardware
from lohan_fx.planners import Planner, get
from lohan_fx.profiling import profile_hardware
from lohan_fx.progress import Shown


def check_misplaced(values: tuple[object, ...]) -> None:
    """Refuse what was given by its place: which of many options it is, only a name says."""
    if not values:
        return
    kinds = {torch.optim.Optimizer: "optimizer", HardwareProfile: "hw", Plan: "plan"}
    value = values[0]
    name = next((name for kind, name in kinds.items() if isinstance(value, kind)), None)
    what = f"the {type(value).__name__} as {name}=…" if name else "every other argument by its name"
    raise LohanError(
        f"compile takes the model alone by its place: write {what}, as in "
        "lohan_fx.compile(model, hw=hw, optimizer=optimizer)"
    )


def check_optimizer(optimizer: Any) -> None:
    """Refuse what is no optimizer, such as the class of one."""
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        name = getattr(optimizer, "__name__", type(optimizer).__name__)
        raise LohanError(
            f"optimizer= needs a torch.optim optimizer over the model's parameters, such as "
            f"torch.optim.AdamW(model.parameters()), not {name}"
        )


def check_choices(
    *, fused: Any, refine: Any, progress: Any, forwards: Any, loss_chunk_bytes: Any, outputs: Any
) -> None:
    """Refuse values that the independent arguments do not have."""
    check_count("forwards", forwards, "forwards")
    check_outputs(outputs)
    for name, choice in (("fused", fused), ("refine", refine), ("progress", progress)):
        check_flag(name, choice, "auto")
    check_count("loss_chunk_bytes", loss_chunk_bytes, "bytes, or 0 for never", least=0)


def check_gradients(
    optimizer: torch.optim.Optimizer | None,
    gradients: Gradients,
    accumulate: int | Literal["manual"],
    clip_grad_norm: float | None,
    clip_grad_value: float | None,
    skip_nonfinite: bool,
) -> None:
    """Refuse options about gradients that contradict each other."""
    if gradients not in ("consumed", "kept"):
        raise LohanError(f"gradients={gradients!r}: use 'consumed' or 'kept'")
    counts = isinstance(accumulate, int) and not isinstance(accumulate, bool) and accumulate > 0
    if not counts and accumulate != "manual":
        raise LohanError(f"accumulate={accumulate!r}: use 'manual' or a number of backwards")
    for name, value in (("clip_grad_norm", clip_grad_norm), ("clip_grad_value", clip_grad_value)):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (number and value >= 0):
            raise LohanError(f"{name}={value!r}: use None or a number that is not negative")
    check_flag("skip_nonfinite", skip_nonfinite)
    if clip_grad_norm is not None and clip_grad_value is not None:
        raise LohanError("clip_grad_norm and clip_grad_value together have no order: use one")
    asked = {
        "accumulate": accumulate != 1,
        "clip_grad_norm": clip_grad_norm is not None,
        "clip_grad_value": clip_grad_value is not None,
        "skip_nonfinite": skip_nonfinite,
    }
    first = next((name for name, is_asked in asked.items() if is_asked), None)
    if first is not None and gradients == "kept":
        raise LohanError(
            f"{first}= with gradients='kept', where gradients are yours until optimizer.step(): "
            "leave it out and do it in the loop, as in plain PyTorch, or leave gradients= out"
        )
    if first is not None and optimizer is None:
        raise LohanError(f"{first}= needs optimizer=: without one, gradients are in .grad as ever")


def chosen_plan(plan: Plan | str | Path | None) -> Plan | None:
    """The plan to use in place of the strategy's, read if it is a file."""
    if isinstance(plan, (str, Path)):
        return Plan.load(plan)
    if not isinstance(plan, (Plan, type(None))):
        raise LohanError(f"plan={plan!r}: use a plan (lohan_fx.plan(…).plan), or its file")
    return plan


def check_states(states: str, plan: Plan | None) -> None:
    """Refuse a tier for states beside a plan, which has one for every unit."""
    if plan is not None and states != "auto":
        raise LohanError(
            f"states={states!r}, but a plan says itself where states are: leave states= out, or "
            "make a plan with it"
        )


def chosen_schedule(
    schedule: Schedule | Literal["auto"],
    strategy: str | Planner,
    plan: Plan | None,
    *,
    gradients: Gradients,
    clip_grad_norm: float | None,
    skip_nonfinite: bool,
) -> Schedule | Literal["auto"]:
    """The schedule to plan with; "auto" leaves it to the strategy.

    Raises:
        LohanError: the schedule, or the plan's, begins updates before the gradients allow it; the
            plan has another one.
        PlanError: there is no such strategy, or schedule.
    """
    if schedule not in ("auto", *SCHEDULES):
        known = ", ".join(("auto", *SCHEDULES))
        raise PlanError(f"schedule {schedule!r} is none of {known}")
    if plan is not None and schedule not in ("auto", plan.schedule):
        raise LohanError(
            f"schedule={schedule!r}, but the plan was made with schedule {plan.schedule!r}: leave "
            "schedule= out, or make a plan with it"
        )
    own = getattr(get(strategy), "schedule", None)
    default: Schedule
    allowed = WHOLE
    if gradients == "kept":
        allowed = WAITING
        why = "with gradients='kept' the gradients are the user's until then"
        default = "serial"
    elif clip_grad_norm is not None or skip_nonfinite:
        asks = "skip_nonfinite" if clip_grad_norm is None else "clip_grad_norm"
        why = f"{asks} needs the norm of all gradients before the first update"
        default = "speculative"
    else:
        return schedule
    if own in WAITING:
        default = own
    wanted = schedule if plan is None else plan.schedule
    if wanted not in ("auto", *allowed):
        others = " or ".join(repr(s) for s in reversed(SCHEDULES) if s in allowed)
        use = f"use schedule={others} ('auto' is {default!r} here)"
        if plan is not None:
            clips = "" if gradients == "kept" else "clips=True (lohan-fx plan --clip) or "
            use = (
                f"the plan was made with schedule {wanted!r}, so make another plan, with "
                f"{clips}schedule={others}"
            )
        raise LohanError(
            f"schedule {wanted!r} updates units before optimizer.step(), but {why}: {use}"
        )
    return default if wanted == "auto" else wanted


def may_defer(schedule: Schedule | Literal["auto"], chosen: Schedule | Literal["auto"]) -> bool:
    """Whether the chosen schedule is not the user's wish and needs memory that may be missing."""
    return schedule == "auto" and chosen == "speculative"


def chosen_hardware(hw: HardwareProfile | str | Path | None, progress: Shown) -> HardwareProfile:
    """The profile that is given, named or in a file; this machine's, measured now, if None."""
    if isinstance(hw, torch.optim.Optimizer):
        raise LohanError(
            f"hw= is the hardware, not the {type(hw).__name__}: write optimizer= for that"
        )
    return profile_hardware(progress=progress is not False) if hw is None else hardware(hw)


def device_of(hw: HardwareProfile) -> torch.device:
    """The device of this process that the profile is about."""
    if hw.device_kind != "cuda":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise HardwareError(
            f"profile {hw.name!r} is of a CUDA device, and this machine has none: profile this "
            "machine with profile_hardware()"
        )
    return torch.device("cuda", torch.cuda.current_device())


_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp64": torch.float64,
    "float64": torch.float64,
}


def dtype_of(dtype: torch.dtype | str) -> torch.dtype:
    """A compute dtype by its name, or as it is."""
    found = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found is None or found not in _DTYPES.values():
        raise LohanError(
            f"dtype={dtype!r}: use 'auto', None, one of {', '.join(_DTYPES)}, or the torch.dtype"
        )
    return found


def chosen_dtype(
    dtype: torch.dtype | str | None,
    device: torch.device,
    optimizer: torch.optim.Optimizer | None,
) -> torch.dtype | None:
    """The compute dtype; None is the model's own."""
    if dtype == "auto":
        dtype = torch.bfloat16 if device.type == "cuda" and optimizer is not None else None
    elif dtype is not None:
        dtype = dtype_of(dtype)
    if dtype is not None and optimizer is None:
        raise LohanError("dtype= needs optimizer=: without one there are no masters to update")
    return dtype
