"""Workloads of a model that is not there, for any batch size.

The model is traced with fake tensors on the CPU, in the compute dtype: attention without a mask
becomes PyTorch's fused kernel for CPUs, which saves what the GPU's flash attention saves (its
output and the logarithms of its sums). Where blocks repeat, only few of them are traced
(`replicate`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from lohan_fx.annotate import Slice, StateLayout, UnitLayout, annotate, unit_layouts
from lohan_fx.arguments import check_count
from lohan_fx.capture import Outputs, capture
from lohan_fx.depth import Repetition, cut, repetitions
from lohan_fx.errors import CaptureError
from lohan_fx.gradient_sums import own_scratch_bytes
from lohan_fx.hardware import HardwareProfile
from lohan_fx.replicate import NotRepeatedError, extrapolate
from lohan_fx.runtime.scratch import update_scratch_bytes
from lohan_fx.workload import Workload

_SMALL = 4096
"""Elements of a unit for which the memory of an update is found out."""

_DEPTHS = (3, 4)
"""Periods of the shallower of two traces; the second one if the first does not settle it."""


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
            own = {n.name: own_scratch_bytes(n) for n in captured.graph.graph.nodes}
            ops = tuple(replace(op, scratch_bytes=own[op.name]) for op in workload.ops)
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
