"""`plan`: plan and simulate a model that is not there, for a machine that is not there either."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from lohan_fx.capture import Outputs
from lohan_fx.compile_arguments import chosen_schedule, may_defer
from lohan_fx.errors import InsufficientMemoryError, LohanError
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.model_arguments import Inputs, Model, Optimizer, make_tracer
from lohan_fx.models import NamedModel, family_of
from lohan_fx.plan import Schedule
from lohan_fx.planned import Planned, Search, SearchKind, Trial, hardware
from lohan_fx.planners import Planner, PlannerOptions, make_plan
from lohan_fx.planners.tiers import check_ssds, check_states_fit
from lohan_fx.planners.whole import tried_or_deferred
from lohan_fx.progress import Line
from lohan_fx.report import short_bytes
from lohan_fx.tracer import Tracer

DEFAULT_STRATEGY = "pareto"

_QUICKER = {"pareto": "lohan"}
"""Strategy → one whose plans it considers, too: what fits one, fits the other."""

MAX_BATCH = 2**20
"""Where a search for the largest batch gives up."""


def plan(
    model: Model,
    inputs: Inputs | None = None,
    *,
    hw: HardwareProfile | str,
    batch: int | None = None,
    sequence: int | None = None,
    optimizer: Optimizer = "adamw",
    strategy: str | Planner = DEFAULT_STRATEGY,
    memory: Mapping[str, int | str] | None = None,
    dtype: torch.dtype | str | None = "auto",
    outputs: Outputs = "auto",
    states: Literal["auto", "device", "host", "ssd"] = "auto",
    swap_to: Literal["auto", "host", "ssd"] = "auto",
    schedule: Schedule | Literal["auto"] = "auto",
    accumulates: bool = False,
    clips: bool = False,
    full_trace: bool = False,
    search: SearchKind | None = None,
) -> Planned:
    """Plan one training step and simulate it, without weights or accelerator.

    Args:
        model: a name (`lohan_fx.models.names()`: the papers' GPTs and DiTs), a module (build it
            under ``torch.device("meta")``), a function that builds one, or a configuration of
            Hugging Face transformers.
        inputs: example inputs of forward; meta tensors will do. A function of the batch size
            makes them for any batch. Not needed for named models and transformers.
        hw: a profile, the name of a preset, or a file.
        batch: samples of one step. With tensors as `inputs`, their first dimension is set to it.
        sequence: tokens of a sample, for named models and transformers.
        optimizer: a name, class or instance of torch.optim, for the size of its states; None
            leaves the optimizer out.
        strategy, memory, dtype, outputs, states, swap_to, schedule: as for `lohan_fx.compile`;
            schedule "auto" is the strategy's own.
        accumulates: units have a sum of gradients beside their states, as `compile` makes them for
            ``accumulate=`` and ``gradients="kept"``; the step is one whose backward is the last.
        clips: gradients are clipped by their norm, as with ``clip_grad_norm=`` of `compile`, or
            steps skipped: schedule "auto" is what it is there. The step clips nothing.
        full_trace: trace every block, however many are equal.
        search: "max-batch" finds the largest batch that fits, starting at `batch`; "max-model"
            the largest model of the named model's family.

    Raises:
        InsufficientMemoryError: no plan of the strategy fits the budget.
        CaptureError, HardwareError, PlanError, LohanError: see their messages.
    """
    if search not in (None, "max-batch", "max-model"):
        raise LohanError(f"search={search!r}: use 'max-batch' or 'max-model'")
    chosen = chosen_schedule(
        schedule,
        strategy,
        None,
        gradients="consumed",
        clip_grad_norm=math.inf if clips else None,
        skip_nonfinite=False,
    )
    if clips and optimizer is None:
        raise LohanError("clips=True needs an optimizer: without one nothing is clipped")
    hw = hardware(hw)
    options = PlannerOptions(states=states, swap_to=swap_to, schedule=chosen)
    check_ssds(hw, options)  # tracing takes its time
    request = _Request(
        strategy=strategy,
        hw=hw,
        budget=MemoryBudget.from_request(hw, memory),
        options=options,
        may_defer=may_defer(schedule, chosen),
        tracer=functools.partial(
            make_tracer,
            inputs=inputs,
            hw=hw,
            sequence=sequence,
            optimizer=optimizer,
            dtype=dtype,
            outputs=outputs,
            accumulates=accumulates,
            full_trace=full_trace,
        ),
    )
    if search == "max-model":
        return request.largest_model(model, batch)
    tracer = request.tracer(model)
    if search == "max-batch":
        return request.largest_batch(tracer, batch)
    return request.plan(tracer, batch)


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What `plan` was asked for, the model and the batch aside."""

    strategy: str | Planner
    hw: HardwareProfile
    budget: MemoryBudget
    options: PlannerOptions
    may_defer: bool
    tracer: Callable[[Model], Tracer]

    def plan(self, tracer: Tracer, batch: int | None, search: Search | None = None) -> Planned:
        line = Line()
        with line.stage("tracing the model"):
            traced = tracer.workload(batch)
        with line.stage("planning"):
            if isinstance(self.strategy, str):  # what others may do, nobody knows
                check_states_fit(traced.workload, self.hw, self.budget, self.options)
            make = functools.partial(
                make_plan, self.strategy, traced.workload, self.hw, self.budget
            )
            made = tried_or_deferred(make, self.options) if self.may_defer else make(self.options)
        return Planned(
            model=tracer.name,
            workload=traced.workload,
            plan=made,
            hw=self.hw,
            budget=self.budget,
            batch=traced.batch,
            num_items=traced.num_items,
            items=traced.items,
            compute_dtype=tracer.compute_dtype,
            traced=traced.how,
            search=search,
            states=self.options.states,
            swap_to=self.options.swap_to,
            schedule=self.options.schedule,
            source=tracer,
        )

    def trial(self, tracer: Tracer, batch: int | None) -> Planned:
        """A plan that shows that it fits, by a quicker strategy if that does.

        Raises:
            InsufficientMemoryError: it does not.
        """
        quicker = _QUICKER.get(self.strategy) if isinstance(self.strategy, str) else None
        if quicker is not None:
            options = replace(self.options, explain=False)  # nobody reads the error
            with contextlib.suppress(InsufficientMemoryError):
                return replace(self, strategy=quicker, options=options).plan(tracer, batch)
        return self.plan(tracer, batch)

    def final(self, trial: Planned, batch: int | None) -> Planned:
        """What a trial stands for, by the strategy that was asked for."""
        if isinstance(self.strategy, str) and trial.plan.strategy == _QUICKER.get(self.strategy):
            return self.plan(trial.source, batch)
        return trial

    def largest_batch(self, tracer: Tracer, start: int | None) -> Planned:
        """Grow fourfold until it no longer fits; then guess by what the failures need, or halve."""
        trials: dict[int, Trial] = {}
        plans: dict[int, Planned] = {}
        errors: dict[int, InsufficientMemoryError] = {}

        def fits(batch: int) -> bool:
            try:
                plans[batch] = self.trial(tracer, batch)
            except InsufficientMemoryError as error:
                errors[batch] = error.anew()
            reason = _why_not(errors[batch]) if batch in errors else ""
            trials[batch] = Trial(label=f"batch {batch}", fits=batch in plans, reason=reason)
            return batch in plans

        low, high = 0, start or 1
        while high <= MAX_BATCH and fits(high):
            low, high = high, 4 * high
        if low == 0 and high == 1:
            raise errors[1].anew()
        for k in itertools.count():
            if high - low <= 1 or high > MAX_BATCH:
                break
            middle = next_batch(low, high, errors[high], halve=k % 3 == 2)
            low, high = (middle, high) if fits(middle) else (low, middle)
        if low == 0:
            raise errors[1].anew()
        limit = f"nothing up to batch {low}; larger ones were not tried"
        if high in errors:
            limit = f"batch {high}: {_why_not(errors[high])}"
        search = Search(
            kind="max-batch",
            found=f"batch {low}",
            trials=tuple(trials[b] for b in sorted(trials)),
            limit=limit,
        )
        return replace(self.final(plans[low], low), search=search)

    def largest_model(self, model: Model, batch: int | None) -> Planned:
        """Bisect the family of a named model."""
        if isinstance(model, NamedModel):
            model = model.name
        if not isinstance(model, str):
            raise LohanError("search='max-model' goes through a family of named models: name one")
        ladder = family_of(model)
        trials: dict[int, Trial] = {}
        best: Planned | None = None
        errors: dict[int, InsufficientMemoryError] = {}
        low, high = -1, len(ladder)
        while high - low > 1:
            middle = (low + high) // 2
            try:
                tracer = self.tracer(ladder[middle])
                best = self.trial(tracer, batch)
                low = middle
            except InsufficientMemoryError as error:
                errors[middle] = error.anew()
                high = middle
            reason = _why_not(errors[middle]) if middle in errors else ""
            trials[middle] = Trial(label=ladder[middle].name, fits=low == middle, reason=reason)
        if best is None:
            raise errors[0].anew()
        limit = f"nothing: {ladder[-1].name} is the largest of its family"
        if high in errors:
            limit = f"{ladder[high].name}: {_why_not(errors[high])}"
        search = Search(
            kind="max-model",
            found=ladder[low].name,
            trials=tuple(trials[k] for k in sorted(trials)),
            limit=limit,
        )
        return replace(self.final(best, batch), search=search)


def next_batch(low: int, high: int, error: InsufficientMemoryError, *, halve: bool) -> int:
    """Between what fits and what does not: as if the need were in proportion to the batch."""
    guess = int(high * error.have_bytes / error.need_bytes)
    return (low + high) // 2 if halve or not low < guess < high else guess


def _why_not(error: InsufficientMemoryError) -> str:
    """The error in one line, with how much is missing."""
    need, have = short_bytes(error.need_bytes), short_bytes(error.have_bytes)
    more = short_bytes(error.need_bytes - error.have_bytes)
    where = error.where.partition(", strategy ")[0]
    return f"{error.tier} memory: needs {need} of {have}, {more} too much, at {where}"
