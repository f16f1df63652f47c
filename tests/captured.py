"""Captures of the tiny models, made once for all tests, and the joint graph run by hand."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lohan_fx.annotate import StateLayout, UnitLayout, annotate, unit_layouts
from lohan_fx.capture import Captured, capture
from lohan_fx.hardware import MemoryBudget
from lohan_fx.passes import PassManager, Rewrite, pipeline
from lohan_fx.passes.verify import check_invariants
from lohan_fx.plan import Plan
from lohan_fx.planners import Choices, PlannerOptions, finish
from lohan_fx.workload import Workload
from tests.models import loss_of, make
from tests.workloads import small_hardware

HW = small_hardware(device_kind="cpu", block_flops_dtype="float32")
BUDGET = MemoryBudget(device_bytes=2**30, host_bytes=2**30, ssd_bytes=2**30)
STATES = StateLayout(compute_dtype=None, num_states=2)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A captured and annotated training step."""

    model: nn.Module
    kwargs: Mapping[str, Any]
    captured: Captured
    layouts: tuple[UnitLayout, ...]
    workload: Workload

    def rewrite(self, plan: Plan) -> Rewrite:
        return Rewrite(
            captured=self.captured, workload=self.workload, plan=plan, layouts=self.layouts
        )

    def rewritten(self, plan: Plan) -> Rewrite:
        """The plan's program, after all passes."""
        made = self.rewrite(plan)
        PassManager(passes=pipeline(), verify=check_invariants)(made)
        return made

    def plan(self, choices: Choices, **options: Any) -> Plan:
        return finish(self.workload, HW, BUDGET, PlannerOptions(**options), choices, "test")


def step_of(
    model: nn.Module, kwargs: Mapping[str, Any], name: str, states: StateLayout = STATES
) -> Step:
    """Capture and annotate one step; all parameters that need a gradient train."""
    captured = capture(model, (), kwargs, dtype=states.compute_dtype)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    layouts = unit_layouts(model, trained, states)
    workload = annotate(captured, model, layouts, states, HW, name=name)
    return Step(model=model, kwargs=kwargs, captured=captured, layouts=layouts, workload=workload)


@functools.cache
def step(name: str) -> Step:
    """The step of a model in `tests.models`."""
    model, kwargs = make(name)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False  # caches are outputs that live to the step's end
    return step_of(model, kwargs, name)


# -- running a joint graph ---------------------------------------------------------------------


def leaves(value: Any) -> list[Any]:
    """What a forward returned, flattened, plain dataclasses included."""
    if dataclasses.is_dataclass(value) and not isinstance(value, Mapping):
        value = [getattr(value, f.name) for f in dataclasses.fields(value)]
    return [leaf for leaf in pytree.tree_leaves(value) if leaf is not None]


def detached(value: Any) -> Any:
    """A copy of what a forward returned, without its history."""
    if dataclasses.is_dataclass(value) and not isinstance(value, Mapping):
        fields = {f.name: detached(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)  # type: ignore[type-var]

    def of(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return leaf

    return pytree.tree_map(of, value)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one step gives: outputs, gradients and new values by name, the RNG state after it."""

    outputs: list[Any]
    gradients: dict[str, Tensor]
    changed: dict[str, Tensor]
    rng: Tensor


def run_eager(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss: Callable[[Any], Tensor],
    context: AbstractContextManager[Any],
) -> tuple[Result, list[Tensor | None]]:
    """One step of a copy of the model, forward in `context`; also the outputs' tangents."""
    model, (args, kwargs) = copy.deepcopy((model, (args, kwargs)))
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor):
            leaf.grad = None  # another test's, on inputs that tests share
    before = {n: b.clone() for n, b in model.named_buffers()}
    torch.manual_seed(7)
    with context:
        output = model(*args, **kwargs)
    loss(output).backward()
    rng = torch.get_rng_state()
    named = dict(model.named_parameters(remove_duplicate=False))
    gradients = {n: p.grad for n, p in named.items() if p.grad is not None}
    for i, leaf in enumerate(pytree.tree_leaves((args, kwargs))):
        if isinstance(leaf, Tensor) and leaf.grad is not None:
            gradients[str(i)] = leaf.grad
    changed = {n: b for n, b in model.named_buffers() if not torch.equal(b, before[n])}
    again = detached(output)
    needing = [t for t in leaves(again) if isinstance(t, Tensor) and t.requires_grad]
    found = torch.autograd.grad(loss(again), needing, allow_unused=True)
    tangent = {id(t): g for t, g in zip(needing, found, strict=True)}
    tangents = [tangent.get(id(t)) for t in leaves(again)]
    return Result(outputs=leaves(output), gradients=gradients, changed=changed, rng=rng), tangents


def run_graph(
    captured: Captured,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    tangents: Sequence[Tensor | None],
) -> Result:
    """The joint graph by itself, forward and backward in one call, from the same seed."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    flat = pytree.tree_leaves((args, kwargs))
    marks = tuple(torch.empty(0) for _ in range(captured.num_outputs))
    built = captured.unflatten(model, marks, args, dict(kwargs))
    places = {id(m): i for i, m in enumerate(leaves(built))}

    def argument(role: Any) -> Tensor:
        if role.kind == "parameter":
            return parameters[role.target].detach()
        if role.kind == "buffer":
            return buffers[role.target].clone()
        if role.kind == "tangent":
            tangent = tangents[places[id(marks[role.index])]]
            assert tangent is not None
            return tangent
        return flat[role.index].detach().clone()

    inputs = [argument(role) for role in captured.inputs]
    torch.manual_seed(7)
    with torch.no_grad():
        results = list(zip(captured.graph(*inputs), captured.outputs, strict=True))
    rng = torch.get_rng_state()

    def named(kind: str) -> dict[str, Tensor]:
        return {r.target or str(r.index): v for v, r in results if r.kind == kind}

    outputs = named("output")
    user = captured.unflatten(
        model, tuple(outputs[str(i)] for i in range(captured.num_outputs)), args, dict(kwargs)
    )
    return Result(
        outputs=leaves(user), gradients=named("gradient"), changed=named("mutation"), rng=rng
    )


def check_exact(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[[Any], Tensor] = lambda output: leaves(output)[0],
    captured: Captured | None = None,
    context: AbstractContextManager[Any] | None = None,
    equal: Callable[[Tensor, Tensor], bool] = torch.equal,
    **options: Any,
) -> Captured:
    """Capture (unless given) and hold the graph's step equal to eager's, bit by bit."""
    kwargs = kwargs or {}
    context = context or contextlib.nullcontext()
    if captured is None:
        with context:
            captured = capture(model, args, kwargs, **options)
    want, tangents = run_eager(model, args, kwargs, loss, context)
    have = run_graph(captured, model, args, kwargs, tangents)
    assert len(have.outputs) == len(want.outputs)
    for a, b in zip(have.outputs, want.outputs, strict=True):
        assert torch.equal(a, b) if isinstance(b, Tensor) else a == b
    tied = {captured.first_name(n) for n in want.gradients}
    assert {captured.first_name(n) for n in have.gradients} == tied
    for name, gradient in have.gradients.items():
        assert equal(gradient, want.gradients[name]), name
    assert have.changed.keys() >= want.changed.keys()
    for name, value in want.changed.items():
        assert torch.equal(have.changed[name], value), name
    assert torch.equal(have.rng, want.rng), "randomness drawn differs"
    return captured


def check_step(name: str) -> None:
    made = step(name)
    check_exact(
        made.model,
        (),
        made.kwargs,
        loss=lambda output: loss_of(name, output),
        captured=made.captured,
    )
