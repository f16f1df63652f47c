"""Run what was planned: compile a copy of the model, take a few steps, read clocks and counters."""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lohan_fx.api import compile
from lohan_fx.errors import HardwareError, LohanError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.model_arguments import make_optimizer, split_inputs
from lohan_fx.models import NamedModel, named
from lohan_fx.planned import Planned
from lohan_fx.planners import Planner, PlannerOptions
from lohan_fx.simulate import simulate
from lohan_fx.tracer import Tracer

WARM_UP_STEPS = 2
"""Steps before the measured ones: the first ones trace, allocate and touch memory."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What really running a case showed; of one step.

    Attributes:
        step_s: median seconds of the measured steps, optimizer included.
        items_per_s, flops_per_s: as in `ablation.Row`.
        peak_device_bytes: largest requested bytes on the device, over what was there before;
            None on a CPU, where the device is the process itself.
        d2h_bytes, h2d_bytes, ssd_read_bytes, ssd_write_bytes: moved, by the runtime's counters.
        timed_step_s: the simulated step with the measured seconds of every op (the papers'
            profiling stage), in place of the roofline's.
        losses: of all steps, warm-up included.
    """

    step_s: float
    items_per_s: float
    flops_per_s: float
    peak_device_bytes: int | None
    d2h_bytes: int
    h2d_bytes: int
    ssd_read_bytes: int
    ssd_write_bytes: int
    timed_step_s: float
    losses: tuple[float, ...]


@dataclass(frozen=True)
class Runner:
    """Runs cases of one model on this machine; see `lohan_fx.ablate` for the arguments."""

    model: Any
    inputs: Any
    hw: HardwareProfile
    sequence: int | None
    optimizer: Any
    dtype: Any
    outputs: Any
    steps: int = 3

    def __post_init__(self) -> None:
        if self.hw.device_kind == "cuda" and not torch.cuda.is_available():
            raise HardwareError(
                f"profile {self.hw.name!r} is of a CUDA device, and this machine has none: "
                "measure on a profile of this machine, or leave measure out"
            )
        if isinstance(self.optimizer, torch.optim.Optimizer):
            raise LohanError(
                "measure= runs copies of the model: give the optimizer as a name, a class or a "
                "function of the parameters, not one that exists"
            )

    def run(self, strategy: str | Planner, planned: Planned, options: PlannerOptions) -> Measured:
        """Compile a fresh model under the same strategy and budget, and take steps.

        Raises:
            LohanError: there are no weights or inputs to run on, or forward returns no loss.
        """
        model, args, kwargs = self._fresh(planned)
        device = "cuda" if self.hw.device_kind == "cuda" else "cpu"
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.to(device), (args, kwargs))
        gc.collect()
        before = _requested()
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = make_optimizer(self.optimizer, parameters) if self.optimizer else None
        budget = planned.budget
        compiled = compile(
            model,
            hw=self.hw,
            optimizer=optimizer,
            strategy=strategy,
            memory={
                "device": budget.device_bytes,
                "host": budget.host_bytes,
                "ssd": budget.ssd_bytes,
            },
            dtype=self.dtype,
            outputs=self.outputs,
            states=options.states,
            swap_to=options.swap_to,
            schedule=options.schedule,
        )
        try:
            return self._measure(compiled, optimizer, args, kwargs, planned, before)
        finally:
            compiled.lohan.close()  # type: ignore[operator, union-attr]
            del compiled, model, optimizer
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()

    def _measure(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        planned: Planned,
        before: int | None,
    ) -> Measured:
        losses = []
        lohan: Any = model.lohan

        def step() -> float:
            _synchronize(before)
            start = time.perf_counter()
            loss = _loss(model(*args, **kwargs))
            loss.backward()  # type: ignore[no-untyped-call]
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
            else:
                model.zero_grad()
            _synchronize(before)
            seconds = time.perf_counter() - start
            losses.append(float(loss.detach()))
            return seconds

        for _ in range(WARM_UP_STEPS):
            step()
        if before is not None:
            torch.cuda.reset_peak_memory_stats()
        moved = lohan.counters
        seconds = statistics.median(step() for _ in range(self.steps))
        moved = lohan.counters.minus(moved)
        peak = _requested("peak")
        with lohan.time_ops() as timer:
            step()
        program = lohan.program()
        timed = simulate(program.workload.timed(timer.seconds()), program.plan, self.hw)
        flops = planned.workload.forward_flops + planned.workload.backward_flops
        return Measured(
            step_s=seconds,
            items_per_s=planned.num_items / seconds,
            flops_per_s=flops / seconds,
            peak_device_bytes=None if peak is None or before is None else peak - before,
            d2h_bytes=moved.d2h_bytes // self.steps,
            h2d_bytes=moved.h2d_bytes // self.steps,
            ssd_read_bytes=moved.ssd_read_bytes // self.steps,
            ssd_write_bytes=moved.ssd_write_bytes // self.steps,
            timed_step_s=timed.step_s,
            losses=tuple(losses),
        )

    def _fresh(self, planned: Planned) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """A model with weights of its own, and real inputs of the case's batch size."""
        batch = planned.batch
        source = named(self.model) if isinstance(self.model, str) else self.model
        given: Any = self.inputs
        if isinstance(source, NamedModel):
            model: Any = source.build(sequence=self.sequence)
            given = given or source.inputs(batch or 1, self.sequence, device="cpu")
        elif isinstance(source, Planned) and isinstance(source.source, Tracer):
            model = copy.deepcopy(source.source.model)
            given = given if given is not None else source.source.inputs(batch)
        elif isinstance(source, nn.Module):
            model = copy.deepcopy(source)
        elif callable(source):
            model = source()
            if isinstance(model, tuple) and len(model) == 2:
                model, own = model
                given = given if given is not None else own
        else:
            raise LohanError(
                f"measure= needs a model with weights, or a function that builds one, not a "
                f"{type(source).__name__}"
            )
        if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
            raise LohanError(
                "measure= needs weights, and the model is on the meta device: give a function that "
                "builds it"
            )
        args, kwargs = _real_inputs(given, batch)
        return model, args, kwargs


def _real_inputs(given: Any, batch: int | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], dict):
        args, kwargs = given  # a tracer's
    elif callable(given) and not isinstance(given, Tensor):
        args, kwargs = split_inputs(given(1 if batch is None else batch))
    else:
        args, kwargs = split_inputs(given)
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if any(t.is_meta for t in tensors):
        raise LohanError("measure= runs the model: inputs must be real tensors, not meta tensors")
    sizes = {t.shape[0] for t in tensors if t.dim()}
    if batch is not None and sizes and batch not in sizes:
        raise LohanError(
            f"measure= with batch {batch} needs inputs as a function of the batch size; those "
            f"given have {sorted(sizes)}"
        )
    return args, kwargs


def _loss(output: Any) -> Tensor:
    """The loss in what forward returns: the only scalar, or what is named so."""
    found = getattr(output, "loss", None)
    if isinstance(output, Mapping):
        found = output.get("loss", found)
    leaves = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    scalars = [x for x in leaves if x.numel() == 1]
    if found is None and len(scalars) == 1:
        found = scalars[0]
    if not isinstance(found, Tensor):
        raise LohanError("measure= needs a forward that returns its loss, alone or named 'loss'")
    return found


def _requested(which: str = "current") -> int | None:
    """Requested bytes on the CUDA device; None without one."""
    if not torch.cuda.is_available():
        return None
    return int(torch.cuda.memory_stats().get(f"requested_bytes.all.{which}", 0))


def _synchronize(cuda: int | None) -> None:
    if cuda is not None:
        torch.cuda.synchronize()
