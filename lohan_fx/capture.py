"""nn.Module + inputs → one joint FX graph (forward and backward) with a role on every edge.

The model is traced with fake parameters on the compute device in the compute dtype, so that it
may live anywhere (host, SSD, meta) and nothing is allocated. The resulting graph is functional
ATen without decompositions: the very kernels that eager mode runs, in the same order, but for the
rewrites at the end of `_normalize`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lohan_fx import _compat
from lohan_fx.capture_failure import FIXED_SHAPES, explain, location
from lohan_fx.cast_sources import save_sources_of_casts
from lohan_fx.chunk_loss import LOSS_CHUNK_BYTES, chunk_losses
from lohan_fx.equal_values import merge_equal_values
from lohan_fx.errors import CaptureError
from lohan_fx.gradient_sums import sum_gradients_in_place
from lohan_fx.joint_copy import constants_of, copy_joint
from lohan_fx.joint_graph import Captured, InputRole, OutputRole, op_name

__all__ = [
    "Captured",
    "InputRole",
    "OutputRole",
    "Outputs",
    "capture",
    "dense_stride",
    "first_names",
]

logger = logging.getLogger("lohan_fx")

Outputs = Literal["auto", "all"] | Sequence[str]


def capture(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    outputs: Outputs = "auto",
    grad: bool = True,
    loss_chunk_bytes: int = LOSS_CHUNK_BYTES,
) -> Captured:
    """Capture one step of `model` on example inputs. No data is touched.

    Args:
        model: any traceable module; parameters may be on any device, meta included.
        args, kwargs: example inputs (real or fake tensors and constants, any pytree).
        device: where the step will run.
        dtype: compute dtype of floating-point parameters and inputs; None keeps the model's.
        outputs: which outputs take part in the loss. "auto": the floating-point scalars that
            require a gradient (a loss), or everything that does if there are none; "all":
            everything; or names of top-level outputs. The others are returned detached and
            cost no gradient.
        grad: False captures the forward alone (evaluation).
        loss_chunk_bytes: the cross entropy of logits larger than this (in float32) is made in
            chunks of rows (`lohan_fx.chunk_loss`); 0 leaves all as they are.

    Raises:
        CaptureError: a graph break or an unsupported construct; names the module and the line.
    """
    kwargs = dict(kwargs or {})
    device = torch.device(device)
    _check_memory(model)
    mode = _compat.fake_mode()
    with (
        _fake_state(model, mode, device, dtype, grad),
        _compat.unfused_rnn(model),
        torch.set_grad_enabled(grad),
    ):
        try:
            fake_args, fake_kwargs = _fake_inputs(mode, args, kwargs, device, dtype, grad)
            dynamo = _compat.dynamo_capture(model, fake_args, fake_kwargs)
            _check_dynamo(model, dynamo)
            arguments = (*fake_args, *fake_kwargs.values())
            chosen = _differentiable(model, dynamo, outputs, arguments) if grad else ()
            detached = _detached(model, dynamo, chosen, arguments) if grad else {}
            dynamo.isolate_outputs(chosen)
            with _compat.export_joint(dynamo.module, fake_args, fake_kwargs) as joint:
                captured = _normalize(
                    model, dynamo, joint, chosen, dtype, device, tuple(kwargs), loss_chunk_bytes
                )
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(explain(model, error)) from error
    _check_buffers(model, captured, dynamo.side_effects)
    return replace(captured, detached=detached)


def _check_memory(model: nn.Module) -> None:
    """Refuse parameters that are not plain tensors with memory of their own.

    They get new memory in the tiers; whatever shared the old one would silently part from them.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    spans: list[tuple[int, int, int, str]] = []
    for name, t in tensors.items():
        _check_plain(name, t)
        if t.numel():
            last = sum((n - 1) * k for n, k in zip(t.shape, t.stride(), strict=True))
            start = t.storage_offset() * t.element_size()
            end = start + (last + 1) * t.element_size()
            spans.append((_compat.storage_key(t), int(start), int(end), name))
    for (key, _, end, a), (other, start, _, b) in itertools.pairwise(sorted(spans)):
        trains = any(
            isinstance(tensors[n], nn.Parameter) and tensors[n].requires_grad for n in (a, b)
        )
        if key == other and start < end and trains:
            raise CaptureError(
                f"{a} and {b} are different tensors over the same memory: tie parameters by "
                "assigning one Parameter under both names"
            )


def _check_plain(name: str, t: torch.Tensor) -> None:
    if _compat.is_wrapper_subclass(t) or t.layout != torch.strided:
        raise CaptureError(f"{name} is a {type(t).__name__} ({t.layout}), not a plain tensor")


def _check_dynamo(model: nn.Module, dynamo: _compat.DynamoCapture) -> None:
    """Refuse what the joint graph would silently get wrong or could not trace."""
    node = _compat.data_dependent_node(dynamo.module)
    if node is not None:
        where = location(model, _compat.frames_in(node.meta.get("stack_trace") or ""))
        raise CaptureError(
            f"cannot capture {type(model).__name__} as one graph{where}\n  the size or value of "
            f"what {op_name(node)} returns depends on data\n  {FIXED_SHAPES}"
        )
    node = dynamo.written_outside()
    if node is not None:
        raise CaptureError(
            f"forward of {type(model).__name__} writes into {node.name} in place, a tensor that "
            "is neither an input nor registered with a module: make it a buffer"
        )
    changed = [
        _module_of(source) or "the model itself"
        for source in dynamo.side_effects
        if re.fullmatch(r"L\['self'\](\._modules\['\w+'\])*", source)
        and not type(model.get_submodule(_module_of(source))).__module__.startswith("torch.")
    ]
    if changed:
        logger.warning(
            "lohan_fx: forward sets attributes of %s: that happens while tracing, not in every "
            "step. State that must change in every step belongs into a buffer, written in place",
            ", ".join(changed),
        )


def _module_of(source: str) -> str:
    """The module that Dynamo's name of a source is about: ``L['self']._modules['a']`` → ``a``."""
    return ".".join(re.findall(r"_modules\['([^']+)'\]", source))


@contextlib.contextmanager
def _fake_state(
    model: nn.Module,
    mode: _compat.FakeTensorMode,
    device: torch.device,
    dtype: torch.dtype | None,
    grad: bool,
) -> Iterator[None]:
    """Put fake parameters and buffers into the model for the time of the capture.

    Shared tensors stay shared: one fake for each.
    """
    memo: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor, cast: bool) -> torch.Tensor:
        found = memo.get(id(tensor))
        if found is None:
            to = dtype if cast and dtype is not None and tensor.is_floating_point() else None
            stride = tensor.stride()
            if isinstance(tensor, nn.Parameter):
                stride = dense_stride(tensor)
            with mode:
                empty = torch.empty_strided(
                    tensor.size(), stride, dtype=to or tensor.dtype, device=device
                )
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad and grad)
            found = memo[id(tensor)] = empty
        return found

    saved = [(m, dict(m._parameters), dict(m._buffers)) for m in model.modules()]
    try:
        for module, parameters, buffers in saved:
            for name, p in parameters.items():
                if p is not None:
                    module._parameters[name] = fake(p, True)  # type: ignore[assignment]
            for name, b in buffers.items():
                if b is not None:
                    module._buffers[name] = fake(b, False)
        yield
    finally:
        for module, parameters, buffers in saved:
            module._parameters.update(parameters)
            module._buffers.update(buffers)


def _fake_inputs(
    mode: _compat.FakeTensorMode,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype | None,
    grad: bool,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Fake copies of the inputs; two arguments never share one, even if the caller's do."""

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        _check_plain("an input", leaf)
        to = dtype if dtype is not None and leaf.is_floating_point() else leaf.dtype
        with mode:
            empty = torch.empty_strided(leaf.size(), leaf.stride(), dtype=to, device=device)
        return empty.requires_grad_(leaf.requires_grad and grad)

    made: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(fake, (args, kwargs))
    return made


def _differentiable(
    model: nn.Module, dynamo: _compat.DynamoCapture, outputs: Outputs, arguments: tuple[Any, ...]
) -> tuple[int, ...]:
    """Indices of the flat outputs that get a tangent."""
    values, wants = dynamo.output_values, _wanting(dynamo)
    if not wants:
        raise CaptureError(
            "no output of the model requires a gradient: nothing to train (are all parameters "
            "frozen, or is the forward under no_grad?)"
        )
    if outputs == "all":
        return tuple(wants)
    names = _top_level_names(model, dynamo, arguments)
    if outputs == "auto":
        scalars = [i for i in wants if values[i].numel() == 1]
        losses = [i for i in scalars if names.get(i) == "loss"]
        return tuple(losses or scalars or wants)
    if isinstance(outputs, str):
        raise CaptureError(f"outputs={outputs!r}: use 'auto', 'all', or a sequence of output names")
    chosen = [i for i in wants if names.get(i) in set(outputs)]
    missing = set(outputs) - {names.get(i) for i in chosen}
    if missing:
        known = sorted({n for i in wants if (n := names.get(i)) is not None})
        raise CaptureError(
            f"outputs={list(outputs)!r}: {sorted(missing)} are not differentiable outputs of the "
            f"model; it has {known}"
        )
    return tuple(chosen)


def _wanting(dynamo: _compat.DynamoCapture) -> list[int]:
    """Indices of the flat outputs that require a gradient."""
    return [
        i
        for i, v in enumerate(dynamo.output_values)
        if isinstance(v, torch.Tensor) and v.is_floating_point() and v.requires_grad
    ]


def _detached(
    model: nn.Module,
    dynamo: _compat.DynamoCapture,
    chosen: Sequence[int],
    arguments: tuple[Any, ...],
) -> dict[int, str]:
    """Flat outputs that require a gradient and get no tangent: index → name, or position."""
    left = [i for i in _wanting(dynamo) if i not in chosen]
    names = _top_level_names(model, dynamo, arguments) if left else {}
    return {i: names.get(i, str(i)) for i in left}


def _top_level_names(
    model: nn.Module, dynamo: _compat.DynamoCapture, arguments: tuple[Any, ...]
) -> dict[int, str]:
    """Flat output index → key, attribute or position at the top of the returned structure."""
    marks = tuple(torch.empty(0) for _ in dynamo.output_values)
    built = dynamo.unflatten(model, marks, arguments)
    if isinstance(built, torch.Tensor):
        return {i: "output" for i, m in enumerate(marks) if m is built}
    if isinstance(built, Mapping):
        items = [(str(k), v) for k, v in built.items()]
    elif hasattr(built, "__dataclass_fields__"):
        items = [(k, getattr(built, k)) for k in built.__dataclass_fields__]
    elif isinstance(built, (tuple, list)):
        fields = getattr(built, "_fields", range(len(built)))
        items = [(str(k), v) for k, v in zip(fields, built, strict=True)]
    else:
        return {}
    index = {id(m): i for i, m in enumerate(marks)}
    return {index[id(v)]: k for k, v in items if id(v) in index}


def _input_role(desc: Any) -> InputRole:
    if isinstance(desc, _compat.ParamAOTInput):
        return InputRole(kind="parameter", target=desc.target)
    if isinstance(desc, _compat.BufferAOTInput):
        return InputRole(kind="buffer", target=desc.target)
    if isinstance(desc, _compat.PlainAOTInput):
        return InputRole(kind="input", index=desc.idx)
    if isinstance(desc, _compat.TangentAOTInput):
        if isinstance(desc.output, _compat.PlainAOTOutput):
            return InputRole(kind="tangent", index=desc.output.idx)
        if isinstance(desc.output, _compat.InputMutationAOTOutput):
            raise _written(_input_role(desc.output.mutated_input))
    raise CaptureError(
        f"the captured step has an input of a kind that lohan_fx does not know: {desc!r}"
    )


def _output_role(desc: Any) -> OutputRole:
    if isinstance(desc, _compat.PlainAOTOutput):
        return OutputRole(kind="output", index=desc.idx)
    if isinstance(desc, _compat.GradAOTOutput):
        of = _input_role(desc.grad_of)
        return OutputRole(kind="gradient", target=of.target, index=of.index)
    if isinstance(desc, _compat.InputMutationAOTOutput):
        of = _input_role(desc.mutated_input)
        if of.kind == "parameter":
            raise _written(of)
        return OutputRole(kind="mutation", target=of.target, index=of.index)
    raise CaptureError(
        f"the captured step has an output of a kind that lohan_fx does not know: {desc!r}"
    )


def _written(role: InputRole) -> CaptureError:
    what = f"{role.kind} {role.target}" if role.target else f"input {role.index}"
    return CaptureError(
        f"forward writes into {what} in place: it is part of what the step differentiates, and "
        "parameters and inputs that need a gradient must not change in forward"
    )


def _normalize(
    model: nn.Module,
    dynamo: _compat.DynamoCapture,
    joint: _compat.JointExport,
    differentiable: tuple[int, ...],
    dtype: torch.dtype | None,
    device: torch.device,
    keywords: tuple[str, ...],
    loss_chunk_bytes: int,
) -> Captured:
    """Copy the joint graph: forward nodes first, readable placeholders, only known outputs."""
    source = joint.module.graph
    roles = {
        node: _input_role(node.meta.get("desc"))
        for node in source.find_nodes(op="placeholder")
        if isinstance(node.meta.get("val"), torch.Tensor)  # else a constant: traced in
    }
    flat: Any = source.output_node().args[0]
    returned = [
        (value, _output_role(desc))
        for value, desc in zip(flat, joint.output_descriptors, strict=True)
        if value is not None or not (desc is None or isinstance(desc, _compat.GradAOTOutput))
    ]
    graph = copy_joint(source, roles, returned)
    outputs = [role for _, role in returned]
    chunk_losses(graph, loss_chunk_bytes)
    merge_equal_values(graph)
    save_sources_of_casts(graph)
    sum_gradients_in_place(graph, outputs)
    inputs = tuple(n.meta["role"] for n in graph.find_nodes(op="placeholder"))
    num_outputs = len(dynamo.output_values)
    _check_roles(inputs, outputs, num_outputs, differentiable)
    return Captured(
        graph=_compat.LazyGraphModule(constants_of(joint.module, graph), graph),
        inputs=inputs,
        outputs=tuple(outputs),
        num_outputs=num_outputs,
        differentiable=differentiable,
        unflatten=_Unflatten(dynamo.unflatten, keywords),
        compute_dtype=dtype,
        device=device,
        first_names=first_names(model),
    )


def _check_roles(
    inputs: Sequence[InputRole],
    outputs: Sequence[OutputRole],
    num_outputs: int,
    differentiable: Sequence[int],
) -> None:
    """What the runtime takes for granted of a captured graph."""
    absent = set(range(num_outputs)) - {r.index for r in outputs if r.kind == "output"}
    if absent:
        raise CaptureError(
            f"flat outputs {sorted(absent)} of the model are not in the captured graph"
        )
    tangents = {r.index for r in inputs if r.kind == "tangent"}
    if tangents != set(differentiable):
        raise CaptureError(
            f"flat outputs {sorted(set(differentiable) ^ tangents)} of the model take part in "
            "the loss, but autograd traces nothing through them"
        )


def _check_buffers(model: nn.Module, captured: Captured, side_effects: Sequence[str]) -> None:
    """Refuse updates of buffers that the graph does not hold: they would be lost silently."""
    changed = {r.target for r in captured.outputs if r.kind == "mutation"}
    memory: dict[int, str] = {}
    for name, buffer in model.named_buffers():
        other = memory.setdefault(_compat.storage_key(buffer), name)
        if other != name and {name, other} & changed:
            raise CaptureError(
                f"forward writes into buffers {other} and {name}, which share memory: register "
                "one of them and make the other a property"
            )
    read = {r.target for r in captured.inputs if r.kind == "buffer"}
    for source in (s for s in side_effects if s.endswith(("._buffers", "._parameters"))):
        path = _module_of(source)
        prefix = f"{path}." if path else ""
        own = {prefix + name for name in model.get_submodule(path)._buffers}
        written = own & changed and not own & read - changed  # in place, and assigned to itself
        if not written or source.endswith("._parameters"):
            raise CaptureError(
                f"forward assigns a new tensor to a registered name of module "
                f"{path or '(the model itself)'} ({', '.join(sorted(own & read) or sorted(own))}):"
                " write into the tensor in place (buffer.copy_(...))"
            )


def dense_stride(p: torch.Tensor) -> tuple[int, ...]:
    """The strides of a parameter in its unit's flat buffer: its own, if they leave no gaps."""
    expected = 1
    for stride, size in sorted(zip(p.stride(), p.shape, strict=True)):
        if size != 1 and stride != expected:
            return torch.empty(p.shape, device="meta").stride()
        expected *= size
    return tuple(p.stride())


def first_names(model: nn.Module) -> dict[str, str]:
    """Every name of every parameter → the first name of that tensor (tied ones have several)."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(p), name)
        for name, p in model.named_parameters(remove_duplicate=False)
    }


@dataclass(frozen=True, slots=True)
class _Unflatten:
    """Put args and kwargs in the order of the capture, then rebuild forward's return value."""

    rebuild: Callable[[nn.Module, tuple[Any, ...], tuple[Any, ...]], Any]
    keywords: tuple[str, ...]

    def __call__(
        self,
        module: nn.Module,
        flat: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        return self.rebuild(module, flat, (*args, *(kwargs[name] for name in self.keywords)))
