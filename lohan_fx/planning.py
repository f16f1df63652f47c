"""`plan`: plan and simulate a model that is not there, for a machine that is not there either.

The model is traced with fake tensors on the CPU, in the compute dtype: attention without a mask
becomes PyTorch's fused kernel for CPUs, which saves what the GPU's flash attention saves (its
output and the logarithms of its sums). Where blocks repeat, only few of them are traced
(`replicate`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from lohan_fx.annotate import Slice, StateLayout, UnitLayout, annotate, unit_layouts
from lohan_fx.api import LohanModule, dtype_of
from lohan_fx.arguments import check_call, check_count, check_flag, check_outputs
from lohan_fx.capture import Outputs, capture
from lohan_fx.depth import Repetition, cut, repetitions
from lohan_fx.errors import CaptureError, InsufficientMemoryError, LohanError
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.models import NamedModel, family_of, named
from lohan_fx.plan import Schedule
from lohan_fx.planned import Planned, Search, SearchKind, Trial, hardware
from lohan_fx.planners import Planner, PlannerOptions, get, make_plan
from lohan_fx.progress import Line
from lohan_fx.replicate import NotRepeatedError, extrapolate
from lohan_fx.report import short_bytes
from lohan_fx.runtime.optimizer import SUPPORTED, UnitOptimizer, check_supported
from lohan_fx.runtime.scratch import update_scratch_bytes
from lohan_fx.workload import Workload

Inputs = Mapping[str, Any] | Sequence[Any] | Tensor | Callable[[int], Any]
"""Example inputs: keyword arguments, positional ones, one tensor, or batch size → one of these."""

Model = str | NamedModel | nn.Module | Callable[[], Any]
"""A name, a module, a function that builds one (or it and its inputs), a configuration."""

Optimizer = str | torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None

DEFAULT_STRATEGY = "pareto"

_QUICKER = {"pareto": "lohan"}
"""Strategy → one whose plans it considers, too: what fits one, fits the other."""

MAX_BATCH = 2**20
"""Where a search for the largest batch gives up."""

_SMALL = 4096
"""Elements of a unit for which the memory of an update is found out."""

_DEPTHS = (3, 4)
"""Periods of the shallower of two traces; the second one if the first does not settle it."""


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
        full_trace: trace every block, however many are equal.
        search: "max-batch" finds the largest batch that fits, starting at `batch`; "max-model"
            the largest model of the named model's family.

    Raises:
        InsufficientMemoryError: no plan of the strategy fits the budget.
        CaptureError, HardwareError, PlanError, LohanError: see their messages.
    """
    if search not in (None, "max-batch", "max-model"):
        raise LohanError(f"search={search!r}: use 'max-batch' or 'max-model'")
    get(strategy)
    hw = hardware(hw)
    request = _Request(
        strategy=strategy,
        hw=hw,
        budget=MemoryBudget.from_request(hw, memory),
        options=PlannerOptions(states=states, swap_to=swap_to, schedule=schedule),
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


# -- the model -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A workload, and what was counted while making it."""

    workload: Workload
    batch: int | None
    num_items: int
    items: str
    how: str


@dataclass(kw_only=True)
class Tracer:
    """Makes workloads of one model, for any batch size.

    Attributes:
        inputs: batch size (None: as given) → (args, kwargs).
        states: what training keeps for each parameter.
        optimizer: parameters → what updates them; None without one.
        items: what throughput counts; None finds out from the inputs.
    """

    name: str
    model: nn.Module
    inputs: Callable[[int | None], tuple[tuple[Any, ...], dict[str, Any]]]
    hw: HardwareProfile
    states: StateLayout
    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] | None = None
    outputs: Outputs = "auto"
    items: str | None = None
    full_trace: bool = False
    _found: dict[int | None, Traced] = field(default_factory=dict)
    _scratch: dict[Any, int] = field(default_factory=dict)

    def workload(self, batch: int | None = None) -> Traced:
        """The workload of one step; made once a batch size.

        Raises:
            CaptureError: the model cannot be traced.
        """
        if batch not in self._found:
            self._found[batch] = self._trace(batch)
        return self._found[batch]

    def _trace(self, batch: int | None) -> Traced:
        if batch is not None:
            check_count("batch", batch, "samples")
        args, kwargs = self.inputs(batch)
        workload, how = self._replicated(args, kwargs)
        size, count, items = _count(args, kwargs)
        if self.items is not None and items == "samples":
            items = self.items
        return Traced(
            workload=workload,
            batch=batch if batch is not None else size,
            num_items=count,
            items=items,
            how=how,
        )

    def _replicated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Workload, str]:
        if self.full_trace:
            return self._full(args, kwargs), "in full, as asked for"
        chosen = _worth_cutting(repetitions(self.model))
        if not chosen:
            return self._full(args, kwargs), "in full: too few blocks repeat to leave any out"
        reason = ""
        known: dict[tuple[int, ...], Workload] = {}
        for depth in _DEPTHS:
            if depth >= min(r.count for r in chosen):
                break
            try:
                found = self._deep(chosen, depth, args, kwargs, known)
            except (NotRepeatedError, CaptureError) as error:
                reason = str(error).splitlines()[0]
                if isinstance(error, CaptureError):
                    break
                continue
            parts = (
                f"{r.blocks_at(depth)} and {r.blocks_at(depth + 1)} of the {r.num_blocks} blocks "
                f"in {r.path or 'the model'}"
                for r in chosen
            )
            return found, f"with {', '.join(parts)}; the others are replicas"
        return self._full(args, kwargs), f"in full: blocks could not be replicated ({reason})"

    def _deep(
        self,
        chosen: Sequence[Repetition],
        depth: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        known: dict[tuple[int, ...], Workload],
    ) -> Workload:
        """One container after another: depth, depth + 1 → all, for every depth of the others."""

        def traced(counts: tuple[int, ...]) -> Workload:
            if counts not in known:
                with cut(self.model, dict(zip(chosen, counts, strict=True))):
                    known[counts] = self._full(args, kwargs)
            return known[counts]

        def deep(counts: tuple[int, ...]) -> Workload:
            k = len(counts)
            if k == len(chosen):
                return traced(counts)
            small, large = (deep((*counts, n)) for n in (depth, depth + 1))
            return extrapolate(small, large, chosen[k].count - depth - 1)

        return deep(())

    def _full(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Workload:
        """Trace the model as it is now."""
        gpu = self.hw.device_kind != "cpu"
        with _fused_attention() if gpu else contextlib.nullcontext():
            captured = capture(
                self.model,
                args,
                kwargs,
                dtype=self.states.compute_dtype,
                outputs=self.outputs,
            )
        layouts = self.layouts()
        workload = annotate(captured, self.model, layouts, self.states, self.hw, name=self.name)
        if gpu:  # what CPU kernels take inside says nothing about others
            ops = tuple(replace(op, scratch_bytes=0) for op in workload.ops)
            workload = replace(workload, ops=ops)
        return self._with_scratch(workload, layouts)

    def _with_scratch(self, workload: Workload, layouts: Sequence[UnitLayout]) -> Workload:
        """Add what updates take on the device."""
        named = dict(self.model.named_parameters())
        trained = [p for p in named.values() if p.requires_grad]
        if self.optimizer is None or not trained:
            return workload
        optimizer = self.optimizer(trained)
        units = []
        for unit, layout in zip(workload.units, layouts, strict=True):
            scratch = 0
            if unit.trainable:
                parameters = [named[s.name] for s in layout.slices]
                scratch = self._scratch_bytes(optimizer, parameters, layout)
            units.append(replace(unit, update_scratch_bytes=scratch))
        return replace(workload, units=tuple(units))

    def _scratch_bytes(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        layout: UnitLayout,
    ) -> int:
        """On a CPU, as `lohan_fx.compile` has it. Other devices update a unit at once: in
        proportion to what a small one takes."""
        mixed = self.states.compute_dtype is not None
        slices: Any = tuple((s.offset, s.shape, s.stride) for s in layout.slices)
        whole = self.hw.device_kind != "cpu"
        if whole:
            small = Slice(name="", offset=0, numel=_SMALL, shape=(_SMALL,), stride=(1,))
            slices = (layout.numel,)
            layout = replace(layout, slices=(small,), numel=_SMALL)
            parameters = parameters[:1]
        groups = enumerate(optimizer.param_groups)
        own = {id(p) for p in parameters}
        places = tuple(k for k, group in groups for p in group["params"] if id(p) in own)
        key = (slices, layout.dtype, layout.copy_dtype, places)
        if key not in self._scratch:
            device = torch.device("cpu")
            found = update_scratch_bytes(optimizer, parameters, layout, mixed=mixed, device=device)
            self._scratch[key] = found * slices[0] // _SMALL if whole else found
        return self._scratch[key]

    @property
    def compute_dtype(self) -> str:
        """Name of the dtype of matmuls."""
        dtype = self.states.compute_dtype
        if dtype is None:
            floating = (p.dtype for p in self.model.parameters() if p.is_floating_point())
            dtype = next(floating, torch.float32)
        return str(dtype).removeprefix("torch.")

    def layouts(self) -> tuple[UnitLayout, ...]:
        """The flat layouts of the model as it is now."""
        trained = [n for n, p in self.model.named_parameters() if p.requires_grad]
        return unit_layouts(self.model, trained if self.optimizer else [], self.states)


def _worth_cutting(found: Sequence[Repetition]) -> tuple[Repetition, ...]:
    """The repetitions whose replication traces the fewest blocks; none if that saves nothing."""
    found = sorted(found, key=lambda r: r.num_blocks - r.blocks_at(_DEPTHS[0]), reverse=True)
    whole = sum(r.num_blocks for r in found)
    best: tuple[Repetition, ...] = ()
    least = whole
    for k in range(1, len(found) + 1):
        chosen, rest = found[:k], found[k:]
        few = sum(
            sum(r.blocks_at(n) for r, n in zip(chosen, counts, strict=True))
            for counts in itertools.product((_DEPTHS[0], _DEPTHS[0] + 1), repeat=k)
        )
        cost = few + 2**k * sum(r.num_blocks for r in rest)
        if cost < least:
            best, least = tuple(chosen), cost
    return best


@contextlib.contextmanager
def _fused_attention() -> Iterator[None]:
    """Trace attention without its dropout: with it, CPUs have no fused kernel, and the graph
    would hold the attention matrix, which no GPU keeps."""
    original = functional.scaled_dot_product_attention

    def fused(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **more: Any,
    ) -> Tensor:
        return original(query, key, value, attn_mask, 0.0, is_causal, **more)

    functional.scaled_dot_product_attention = fused  # type: ignore[assignment]
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


def _count(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int | None, int, str]:
    """(batch, items of one step, what they are): tokens if there are sequences of integers."""
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim()]
    if not tensors:
        return None, 1, "steps"
    tokens = [t.numel() for t in tensors if t.dim() == 2 and not t.is_floating_point()]
    batch = tensors[0].shape[0]
    return (batch, max(tokens), "tokens") if tokens else (batch, batch, "samples")


# -- what users give -------------------------------------------------------------------------


def split_inputs(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs → (args, kwargs)."""
    if isinstance(given, Mapping):
        return (), dict(given)
    if isinstance(given, Tensor):
        return (given,), {}
    if isinstance(given, Sequence) and not isinstance(given, str):
        return tuple(given), {}
    raise LohanError(
        f"inputs are {type(given).__name__}: give keyword arguments as a dict, positional ones as "
        "a tuple, one tensor, or a function of the batch size that returns one of these"
    )


def _inputs(given: Inputs) -> Callable[[int | None], tuple[tuple[Any, ...], dict[str, Any]]]:
    """Example inputs → inputs of any batch size."""
    if callable(given) and not isinstance(given, Tensor):
        make = given
        return lambda batch: split_inputs(make(1 if batch is None else batch))
    args, kwargs = split_inputs(given)
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    sizes = {t.shape[0] if t.dim() else None for t in tensors}

    def sized(batch: int | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if batch is None or sizes == {batch}:
            return args, kwargs
        if len(sizes) != 1 or None in sizes:
            raise LohanError(
                "batch= needs inputs whose tensors all have the batch as their first dimension, "
                "or inputs as a function of the batch size"
            )

        def resize(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            size = (batch, *x.shape[1:])
            return torch.empty(size, dtype=x.dtype, device="meta", requires_grad=x.requires_grad)

        made: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(resize, (args, kwargs))
        return made

    return sized


def _is_config(model: Any) -> bool:
    """Whether it is a configuration of Hugging Face transformers."""
    return hasattr(model, "model_type") and hasattr(model, "to_dict")


def _from_config(config: Any) -> nn.Module:
    """The model of a transformers configuration, on the meta device, without a cache of keys."""
    import transformers

    config = copy.deepcopy(config)
    config.use_cache = False
    names = [n for n in config.architectures or () if hasattr(transformers, n)]
    with torch.device("meta"):
        if names:
            made = getattr(transformers, names[0])(config)
        else:
            auto: Any = transformers.AutoModelForCausalLM
            if getattr(config, "is_encoder_decoder", False):
                auto = transformers.AutoModelForSeq2SeqLM
            made = auto.from_config(config)
    assert isinstance(made, nn.Module)
    return made.train()


def _text_inputs(sequence: int) -> Callable[[int], dict[str, Tensor]]:
    def make(batch: int) -> dict[str, Tensor]:
        ids = torch.empty((batch, sequence), dtype=torch.long, device="meta")
        return {"input_ids": ids, "labels": ids}

    return make


def num_states(optimizer: Optimizer) -> int:
    """Optimizer tensors of parameter shape that each element has.

    Raises:
        LohanError: no optimizer of torch.optim has that name.
        UnsupportedOptimizerError: its update is not elementwise.
    """
    if optimizer is None:
        return 0
    made = make_optimizer(optimizer, [nn.Parameter(torch.zeros(1))])
    check_supported(made)
    parameter = made.param_groups[0]["params"][0]
    return len(UnitOptimizer(made, [parameter]).state_names())


def make_optimizer(
    optimizer: Optimizer, parameters: Sequence[nn.Parameter]
) -> torch.optim.Optimizer:
    """An optimizer by name, or by a class or function of the parameters; one that exists as it is.

    Raises:
        LohanError: no optimizer of torch.optim has that name, or the function returns none.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if isinstance(optimizer, str):
        known: dict[str, Callable[[Any], torch.optim.Optimizer]]
        known = {cls.__name__.lower(): cls for cls in SUPPORTED}
        if optimizer.lower() not in known:
            raise LohanError(f"no optimizer {optimizer!r}: use one of {', '.join(known)}")
        return known[optimizer.lower()](parameters)
    made = optimizer(parameters) if callable(optimizer) else optimizer
    if not isinstance(made, torch.optim.Optimizer):
        raise LohanError(
            f"optimizer= is a {type(made).__name__}: give a name, a class of torch.optim, or a "
            "function that makes one from parameters"
        )
    return made


# -- planning --------------------------------------------------------------------------------


def make_tracer(
    model: Model,
    inputs: Inputs | None = None,
    *,
    hw: HardwareProfile,
    sequence: int | None = None,
    optimizer: Optimizer = "adamw",
    dtype: torch.dtype | str | None = "auto",
    outputs: Outputs = "auto",
    accumulates: bool = False,
    full_trace: bool = False,
) -> Tracer:
    """What makes workloads of a model; arguments as for `plan`.

    Raises:
        LohanError: an unknown name, a missing input, a model that is compiled already.
    """
    if sequence is not None:
        check_count("sequence", sequence, "tokens")
    check_flag("accumulates", accumulates)
    check_flag("full_trace", full_trace)
    check_outputs(outputs)
    if isinstance(model, str):
        model = named(model)
    module, own, name, items = _module_of(model, sequence)
    given = inputs if inputs is not None else own
    if isinstance(module, LohanModule):
        raise LohanError("the model is compiled already: plan it before compile, or read .plan")
    if given is None and _is_config(getattr(module, "config", None)):
        given = _text_inputs(sequence or 1024)
    if given is None:
        raise LohanError(
            f"inputs= is missing: {type(module).__name__} is no named model, so an example of "
            "its inputs is needed (meta tensors will do)"
        )
    if dtype == "auto":
        on_gpu = hw.device_kind != "cpu" and optimizer is not None
        dtype = torch.bfloat16 if on_gpu else None
    elif dtype is not None:
        dtype = dtype_of(dtype)
    if dtype is not None and optimizer is None:
        raise LohanError("dtype= needs optimizer=: without one there are no masters to update")
    return Tracer(
        name=name or type(module).__name__,
        model=module,
        inputs=_inputs(given),
        hw=hw,
        states=StateLayout(
            compute_dtype=dtype,
            num_states=num_states(optimizer),
            accumulates=accumulates and optimizer is not None,
        ),
        optimizer=functools.partial(make_optimizer, optimizer) if optimizer is not None else None,
        outputs=outputs,
        items=items,
        full_trace=full_trace,
    )


def _module_of(
    model: NamedModel | nn.Module | Callable[[], Any], sequence: int | None
) -> tuple[nn.Module, Inputs | None, str, str | None]:
    """(module, inputs if the model brings them, name, what throughput counts)."""
    if isinstance(model, NamedModel):
        spec = model
        with torch.device("meta"):
            module = spec.build(sequence=sequence)
        return module, lambda batch: spec.inputs(batch, sequence), spec.name, spec.items
    if isinstance(model, nn.Module):
        return model, None, "", None
    if _is_config(model):
        return _from_config(model), None, "", None
    return (*_built(model), "", None)


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What `plan` was asked for, the model and the batch aside."""

    strategy: str | Planner
    hw: HardwareProfile
    budget: MemoryBudget
    options: PlannerOptions
    tracer: Callable[[Model], Tracer]

    def plan(self, tracer: Tracer, batch: int | None, search: Search | None = None) -> Planned:
        line = Line()
        with line.stage("tracing the model"):
            traced = tracer.workload(batch)
        with line.stage("planning"):
            made = make_plan(self.strategy, traced.workload, self.hw, self.budget, self.options)
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
            source=tracer,
        )

    def trial(self, tracer: Tracer, batch: int | None) -> Planned:
        """A plan that shows that it fits, by a quicker strategy if that does.

        Raises:
            InsufficientMemoryError: it does not.
        """
        quicker = _QUICKER.get(self.strategy) if isinstance(self.strategy, str) else None
        if quicker is not None:
            with contextlib.suppress(InsufficientMemoryError):
                return replace(self, strategy=quicker).plan(tracer, batch)
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
                errors[batch] = error
            reason = _why_not(errors[batch]) if batch in errors else ""
            trials[batch] = Trial(label=f"batch {batch}", fits=batch in plans, reason=reason)
            return batch in plans

        low, high = 0, start or 1
        while high <= MAX_BATCH and fits(high):
            low, high = high, 4 * high
        if low == 0 and high == 1:
            raise errors[1]
        for k in itertools.count():
            if high - low <= 1 or high > MAX_BATCH:
                break
            middle = _next_batch(low, high, errors[high], halve=k % 3 == 2)
            low, high = (middle, high) if fits(middle) else (low, middle)
        if low == 0:
            raise errors[1]
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
                errors[middle] = error
                high = middle
            reason = _why_not(errors[middle]) if middle in errors else ""
            trials[middle] = Trial(label=ladder[middle].name, fits=low == middle, reason=reason)
        if best is None:
            raise errors[0]
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


def _built(model: Callable[[], Any]) -> tuple[nn.Module, Inputs | None]:
    """The result of a factory: a module, or a module and its inputs."""
    if not callable(model):
        raise LohanError(
            f"model is {type(model).__name__}: give a name, a torch.nn.Module, a function that "
            "builds one, or a transformers configuration"
        )
    check_call(model, 0, "the function that builds the model is called without arguments")
    with torch.device("meta"):
        made = model()
    module, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module):
        raise LohanError(f"the model's function returned {type(module).__name__}, no nn.Module")
    return module, inputs


def _next_batch(low: int, high: int, error: InsufficientMemoryError, *, halve: bool) -> int:
    """Between what fits and what does not: as if the need were in proportion to the batch."""
    guess = int(high * error.have_bytes / error.need_bytes)
    return (low + high) // 2 if halve or not low < guess < high else guess


def _why_not(error: InsufficientMemoryError) -> str:
    """The error in one line, with how much is missing."""
    need, have = short_bytes(error.need_bytes), short_bytes(error.have_bytes)
    more = short_bytes(error.need_bytes - error.have_bytes)
    where = error.where.partition(", strategy ")[0]
    return f"{error.tier} memory: needs {need} of {have}, {more} too much, at {where}"
