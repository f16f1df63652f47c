"""`compile`: the one new line in a training loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Never, TypeVar

import torch
from torch import nn

from lohan_fx._compat import Unmoved
from lohan_fx.capture import Outputs
from lohan_fx.chunk_loss import LOSS_CHUNK_BYTES
from lohan_fx.compile_arguments import (
    check_choices,
    check_gradients,
    check_misplaced,
    check_optimizer,
    check_states,
    chosen_dtype,
    chosen_hardware,
    chosen_plan,
    chosen_schedule,
    device_of,
    may_defer,
)
from lohan_fx.compiled.model import CompiledModel
from lohan_fx.compiled.options import Gradients, Options
from lohan_fx.errors import LohanError
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import Plan, Schedule
from lohan_fx.planners import Planner, PlannerOptions
from lohan_fx.printing import ProgramModule
from lohan_fx.progress import Shown
from lohan_fx.report import report_text
from lohan_fx.runtime.malloc import expand_segments, return_freed_memory
from lohan_fx.weights import StoredWeights, WeightsArgument, fill, places_of, resolve

M = TypeVar("M", bound=nn.Module)


class LohanModule(Unmoved):
    """What a compiled module's class adds to the user's class."""

    @property
    def lohan(self) -> CompiledModel:
        """The compiled model behind this module: programs, counters, `prepare`, `close`."""
        compiled = self.__dict__["_lohan"]
        assert isinstance(compiled, CompiledModel)
        return compiled

    @property
    def graph(self) -> ProgramModule:
        """The rewritten program that ran last: print it, walk it, save it, draw it."""
        return self.lohan.program().graph

    @property
    def plan(self) -> Plan:
        """The plan of that program."""
        return self.lohan.program().plan

    def no_sync(self) -> AbstractContextManager[None]:
        """For backwards that are not the last of their step, with ``accumulate="manual"``."""
        return self.lohan.no_sync()

    def report(self) -> str:
        """The plan and its prediction as tables, and what was moved so far."""
        return report_text(self.lohan)

    def keeps(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Stay: the plan says where parameters live. Loops may name the compute device.

        Raises:
            LohanError: another device, dtype or layout is asked for.
        """
        device = self.lohan.options.device
        probe = torch.empty(2, 2, 2, 2, device=device)
        asked = convert(probe)
        if any(getattr(asked, k) != getattr(probe, k) for k in ("device", "dtype")) or (
            asked.stride() != probe.stride()
        ):
            raise LohanError(
                f"a compiled {type(self).__name__} computes on {device}, and its parameters live "
                "where the plan puts them: convert the model before lohan_fx.compile, or after "
                "model.lohan.close()"
            )

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """As the last step made them. Between backward and optimizer.step() units that backward
        has updated are this step's already."""
        if not self.lohan.resetting:
            self.lohan.wait()
        return super().named_parameters(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ever, without waiting for updates: it reads no parameter."""
        self.lohan.resetting = True
        try:
            super().zero_grad(set_to_none)
        finally:
            self.lohan.resetting = False

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.lohan.integrity.check_saving()
        return super().state_dict(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copies and pickles: threads, files and host memory belong to one model."""
        raise LohanError(
            f"a compiled {type(self).__name__} cannot be copied or pickled: copy the model before "
            "lohan_fx.compile or after model.lohan.close(), or use its state_dict()"
        )


def compile(
    model: M,
    *misplaced: Never,
    hw: HardwareProfile | str | Path | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    strategy: str | Planner = "pareto",
    memory: Mapping[str, int | str] | None = None,
    dtype: torch.dtype | str | None = "auto",
    outputs: Outputs = "auto",
    states: Literal["auto", "device", "host", "ssd"] = "auto",
    swap_to: Literal["auto", "host", "ssd"] = "auto",
    schedule: Schedule | Literal["auto"] = "auto",
    fused: bool | Literal["auto"] = "auto",
    plan: Plan | str | Path | None = None,
    loss_chunk_bytes: int = LOSS_CHUNK_BYTES,
    gradients: Gradients = "consumed",
    accumulate: int | Literal["manual"] = 1,
    clip_grad_norm: float | None = None,
    clip_grad_value: float | None = None,
    skip_nonfinite: bool = False,
    forwards: int = 1,
    refine: bool | Literal["auto"] = "auto",
    progress: Shown = "auto",
    weights: WeightsArgument | None = None,
) -> M:
    """Make `model` train within a memory budget, with plain PyTorch's numbers.

    The model is changed in place and returned: its class becomes a subclass whose forward runs
    the rewritten program (isinstance, state_dict, printing and attributes stay). Nothing is
    traced or moved before the first forward, whose inputs it needs. On CUDA the caching allocator
    gets expandable segments, unless PYTORCH_ALLOC_CONF is set, for the whole process.

    Args:
        model: any module that Dynamo can trace whole.
        misplaced: nothing; all else has a name.
        hw: from `profile_hardware`, or the name of a preset or of a saved profile; measured now
            (without SSDs) if None.
        optimizer: a torch.optim optimizer over the model's parameters. With it, parameters and
            optimizer states live where the plan puts them and gradients are consumed while
            backward runs; ``optimizer.step()`` joins. Without it, only activations are managed
            and gradients land in ``.grad``.
        strategy: a registered name (`lohan_fx.planners.names()`) or a callable.
        memory: budget, e.g. ``{"device": "300MiB", "host": "16GiB"}``; parts of the hardware's
            capacity if absent.
        dtype: compute dtype; parameters then have fp32 masters and a compute copy. "auto":
            bfloat16 on CUDA with an optimizer, otherwise the model's own dtype (None).
        outputs: which outputs get gradients: "auto" (the loss: floating-point scalars; all
            outputs if there is none), "all", or names of top-level outputs. A backward that comes
            to another one is a StepError.
        states: tier of parameters and optimizer states; "auto" lets the strategy choose.
        swap_to: tier of swapped activations; "auto" fills host memory first.
        schedule: "optimized", "naive" or "serial" (LoHan Fig. 3): how updates overlap with
            backward. "overlapped": "optimized", and what is left of them runs beside the next
            forward (call ``model.lohan.sync()`` before you read or write a parameter that you
            hold; the model's own ``parameters()``, ``state_dict()`` and ``load_state_dict()``
            do; between backward and ``optimizer.step()`` all but ``parameters()`` are a StepError,
            unless gradients are kept). "deferred": all of them run there, none before
            ``optimizer.step()``. "speculative": so it is, but host units are updated beside
            backward all the same, into second copies (14 bytes a parameter more of host memory),
            which count if no gradient had to be clipped. "auto": the strategy's own, or what the
            options below need.
        fused: compile what lies between matrix products and attention with Inductor: faster, and
            equal to rounding where eager's own kernels are equal to the bit. "auto": on CUDA.
        plan: a plan made earlier for the same model, inputs and options, or its file. The first
            program runs it; those of other shapes, and evaluations, are planned by the strategy,
            with units where it has them.
        loss_chunk_bytes: logits that take more than this in float32, and go into nothing but a
            cross entropy, are made in chunks of rows, each of at most this size; loss and
            gradients then equal plain PyTorch's to rounding. 0: never (`lohan_fx.chunk_loss`).
        gradients: "consumed": a gradient updates its unit as soon as it is there, and is gone.
            "kept": plain PyTorch's ways. Every backward adds to the parameters' ``.grad`` (in the
            masters' dtype, where the unit's states are), user code may change or replace it (clip,
            unscale, zero), and all updates run in optimizer.step(), or after it (schedules
            "serial" and "deferred"): loops that accumulate and clip, GradScaler, Trainer and
            Lightning need no change. It takes a gradient beside the states of every unit.
        accumulate: so many backwards make a step; their gradients add up beside the states, in
            the masters' dtype, and updates run while the last one does, by the schedule. An
            ``optimizer.step()`` that comes earlier ends the step with what there is. "manual":
            every backward outside of ``with model.no_sync():`` is the last one.
        clip_grad_norm: scale the gradients of every step so that their norm is no larger, as
            torch.nn.utils.clip_grad_norm_ does. It needs all of them before the first update
            counts: "auto" is schedule "speculative" then, or "deferred" where host memory has no
            room for that. ``model.lohan.grad_norm`` is the last norm.
        clip_grad_value: bring every element of them into [-value, value], with any schedule.
        skip_nonfinite: leave a step out whose gradients have no finite norm; schedules as for
            `clip_grad_norm`. ``model.lohan.skipped_steps`` counts them.
        forwards: how many forwards may wait for their backward at once: 2 if a loss calls the
            module twice, or if an evaluation comes between a forward and its backward (one after
            ``optimizer.step()`` needs none of this). Each takes memory for what it saves: the plan
            leaves room for that. Gradients add up until none waits.
        refine: let the first four steps correct the cost model (`lohan_fx.refinement`): if another
            plan is predicted to be faster by more than 2%, it replaces the first one before the
            fifth step, and says so. Units that move between device and host are then updated by
            another kernel, equal to rounding: switch it off where runs must repeat bit for bit.
            "auto": on CUDA, unless `plan` is given or PyTorch's deterministic algorithms are on.
        progress: show a line on stderr while set-up takes long: stage, seconds, what a planner is
            trying. "auto": if stderr is a terminal.
        weights: for a model built on the meta device (in whole or in part): a .safetensors file, a
            directory with model.safetensors or model.safetensors.index.json (a checkpoint of
            `save`, too), or a mapping name → tensor. Names, shapes and kinds are checked now, for
            all parameters and persistent buffers; at the first forward the values stream into
            the tiers, unit by unit, cast to the model's dtypes. Parameters that have data are
            loaded at once, or keep it if others are on the meta device and the file lacks them
            (a new head, adapters). "init" runs the modules' own initialization instead, with
            the random numbers that follow at the first forward
            (`lohan_fx.initialization`). Buffers that no file has get their values from
            their modules' initialization.

    Raises:
        UnsupportedOptimizerError: the optimizer's update is not elementwise.
        HardwareError: the profile and the machine, or the budget and the profile, disagree.
        LohanError: a trained parameter is neither float32 nor of `dtype`; and any wrong argument.
        CheckpointError: weights= is damaged or does not fit; all keys concerned are named.
        At the first forward: CaptureError, InsufficientMemoryError, StorageError, PlanError.
    """
    _check_model(model)
    check_misplaced(misplaced)
    check_optimizer(optimizer)
    check_choices(
        fused=fused,
        refine=refine,
        progress=progress,
        forwards=forwards,
        loss_chunk_bytes=loss_chunk_bytes,
        outputs=outputs,
    )
    check_gradients(
        optimizer, gradients, accumulate, clip_grad_norm, clip_grad_value, skip_nonfinite
    )
    plan = chosen_plan(plan)
    check_states(states, plan)
    chosen = chosen_schedule(
        schedule,
        strategy,
        plan,
        gradients=gradients,
        clip_grad_norm=clip_grad_norm,
        skip_nonfinite=skip_nonfinite,
    )
    planner = PlannerOptions(states=states, swap_to=swap_to, schedule=chosen)
    hw = chosen_hardware(hw, progress)
    device = device_of(hw)
    options = Options(
        hw=hw,
        budget=MemoryBudget.from_request(hw, memory),
        device=device,
        dtype=chosen_dtype(dtype, device, optimizer),
        strategy=strategy,
        planner=planner,
        outputs=outputs,
        fused=device.type == "cuda" if fused == "auto" else fused,
        plan=plan,
        loss_chunk_bytes=loss_chunk_bytes,
        gradients=gradients,
        accumulate=accumulate,
        clip_grad_norm=clip_grad_norm,
        clip_grad_value=clip_grad_value,
        skip_nonfinite=skip_nonfinite,
        forwards=forwards,
        may_defer=may_defer(schedule, chosen),
        refine=_refines(device) if refine == "auto" else refine,
        progress=progress,
    )
    _set_allocator(device)
    source = resolve(model, weights)
    compiled = CompiledModel(model, optimizer, options, source)
    if isinstance(source, StoredWeights):
        fill(places_of(model), source)
    return _become_compiled(model, compiled)


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise LohanError(f"compile needs a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, LohanModule):
        raise LohanError(
            "the model is compiled already: call model.lohan.close() before compiling it again"
        )
    if hasattr(model, "_orig_mod"):
        raise LohanError(
            "the model was made by torch.compile, which lohan_fx.compile takes the place of: give "
            "the model itself"
        )


def _refines(device: torch.device) -> bool:
    return device.type == "cuda" and not torch.are_deterministic_algorithms_enabled()


def _set_allocator(device: torch.device) -> None:
    """Let this process's allocator keep little more than what is in use."""
    if device.type == "cpu":
        return_freed_memory()
    else:
        expand_segments()


def _become_compiled(model: M, compiled: CompiledModel) -> M:
    """Give the model a subclass of its class, whose forward runs the compiled model."""
    cls = type(model)
    model.__dict__["_lohan"] = compiled
    own = model.__dict__.pop("forward", None)

    @functools.wraps(cls.forward)  # loops ask for its signature, to know which inputs it takes
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        compiled: CompiledModel | None = self.__dict__.get("_lohan")
        if compiled is not None:
            return compiled(args, kwargs)
        # closed, and called by who wrapped it in the meantime
        return cls.forward(self, *args, **kwargs) if own is None else own(*args, **kwargs)

    members = {"__module__": cls.__module__, "forward": forward}
    model.__class__ = type(cls.__name__, (LohanModule, cls), members)
    return model
