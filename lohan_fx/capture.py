"""nn.Module + inputs → one joint FX graph (forward and backward) with a role on every edge.

The model is traced with fake parameters on the compute device in the compute dtype, so that it
may live anywhere (host, SSD, meta) and nothing is allocated. The resulting graph is functional
ATen without decompositions: the very kernels that eager mode runs, in the same order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import logging
import operator
import re
import sysconfig
import traceback
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from lohan_fx import _compat
from lohan_fx.chunk_loss import LOSS_CHUNK_BYTES, chunk_losses
from lohan_fx.errors import CaptureError

logger = logging.getLogger("lohan_fx")

Outputs = Literal["auto", "all"] | Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRole:
    """What a placeholder of the joint graph is.

    kind "parameter"/"buffer": `target` is the fully qualified name; "input": `index` is the
    position among the flattened (args, kwargs); "tangent": `index` is the flat output whose
    gradient it is.
    """

    kind: Literal["parameter", "buffer", "input", "tangent"]
    target: str = ""
    index: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputRole:
    """What an output of the joint graph is.

    kind "output": flat user output `index`; "mutation": the new value of buffer `target` or of
    input `index`; "gradient": of parameter `target` or input `index`.
    """

    kind: Literal["output", "mutation", "gradient"]
    target: str = ""
    index: int = -1


@dataclass(frozen=True, kw_only=True)
class Captured:
    """One captured training (or inference) step.

    `graph` is functional: placeholders in the order of `inputs`, one flat output tuple in the
    order of `outputs`; nodes of the forward come before those of the backward, which carry
    ``meta["phase"] == "backward"``. `differentiable` are the flat outputs that get a tangent;
    `unflatten(flat outputs, args, kwargs)` builds what the user's forward returns.
    """

    graph: fx.GraphModule
    inputs: tuple[InputRole, ...]
    outputs: tuple[OutputRole, ...]
    num_outputs: int
    differentiable: tuple[int, ...]
    unflatten: Callable[[tuple[Any, ...], tuple[Any, ...], dict[str, Any]], Any]
    compute_dtype: torch.dtype | None
    device: torch.device
    first_names: Mapping[str, str]

    def first_name(self, target: str) -> str:
        """The first of a tied parameter's names."""
        return self.first_names.get(target, target)

    def clone(self) -> Captured:
        """A copy to rewrite; nodes keep their names and marks, values are shared."""
        graph = fx.Graph()
        new: dict[fx.Node, fx.Node] = {}
        for node in self.graph.graph.nodes:
            new[node] = graph.node_copy(node, new.__getitem__)
            new[node].name = node.name
        for node in graph.nodes:
            if "root" in node.meta:
                node.meta["root"] = new[node.meta["root"]]
        return dataclasses.replace(self, graph=_compat.LazyGraphModule(self.graph, graph))

    @property
    def has_backward(self) -> bool:
        return bool(self.differentiable)


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
            chosen = _differentiable(dynamo, outputs, arguments) if grad else ()
            dynamo.isolate_outputs(chosen)
            with _compat.export_joint(dynamo.module, fake_args, fake_kwargs) as joint:
                captured = _normalize(
                    model, dynamo, joint, chosen, dtype, device, tuple(kwargs), loss_chunk_bytes
                )
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(_explain(model, error)) from error
    _check_buffers(model, captured, dynamo.side_effects)
    return captured


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
        where = _where(model, _compat.frames_in(node.meta.get("stack_trace") or ""))
        raise CaptureError(
            f"cannot capture {type(model).__name__} as one graph{where}\n  the size or value of "
            f"what {op_name(node)} returns depends on data\n  {_FIXED_SHAPES}"
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
    dynamo: _compat.DynamoCapture, outputs: Outputs, arguments: tuple[Any, ...]
) -> tuple[int, ...]:
    """Indices of the flat outputs that get a tangent."""
    values = dynamo.output_values
    wants = [
        i
        for i, v in enumerate(values)
        if isinstance(v, torch.Tensor) and v.is_floating_point() and v.requires_grad
    ]
    if not wants:
        raise CaptureError(
            "no output of the model requires a gradient: nothing to train (are all parameters "
            "frozen, or is the forward under no_grad?)"
        )
    if outputs == "all":
        return tuple(wants)
    names = _top_level_names(dynamo, arguments)
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


def _top_level_names(dynamo: _compat.DynamoCapture, arguments: tuple[Any, ...]) -> dict[int, str]:
    """Flat output index → key, attribute or position at the top of the returned structure."""
    marks = tuple(torch.empty(0) for _ in dynamo.output_values)
    built = dynamo.unflatten(marks, arguments)
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


def placeholder_name(role: InputRole) -> str:
    """Readable placeholder name: ``p_h_0_ln_1_weight``, ``b_running_mean``, ``input_0``."""
    if role.kind in ("parameter", "buffer"):
        return f"{role.kind[0]}_{re.sub(r'[^0-9a-zA-Z_]', '_', role.target)}"
    return f"{role.kind}_{role.index}"


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
        if "val" in node.meta  # else a constant among the arguments: traced in
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


def copy_joint(
    source: fx.Graph,
    roles: Mapping[fx.Node, InputRole],
    returned: Sequence[tuple[Any, OutputRole]],
) -> fx.Graph:
    """Copy a joint graph: forward nodes first, readable names, what nobody reads left out.

    Args:
        roles: the placeholders that stay; others must be unread, or symbols of fixed value.
        returned: the outputs that stay, in order.
    """
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {}
    for node in source.find_nodes(op="placeholder"):
        if node in roles:
            role = roles[node]
            env[node] = made = graph.placeholder(placeholder_name(role))
            phase = "backward" if role.kind == "tangent" else "forward"
            made.meta = {"val": node.meta["val"], "role": role, "phase": phase}
        elif isinstance(node.meta.get("val"), (int, torch.SymInt)):
            env[node] = int(node.meta["val"])
    body = [n for n in source.nodes if n.op not in ("placeholder", "output")]
    for node in sorted(body, key=lambda n: _phase(n) == "backward"):  # stable
        env[node] = made = _copy(graph, node, env)
        made.meta["phase"] = _phase(node)
        _check_layout(made)
    older = {
        _compat.storage_key(value)
        for n in graph.nodes
        if (n.op == "placeholder" or n.meta["phase"] == "forward")
        and isinstance(value := n.meta.get("val"), torch.Tensor)
    }
    outputs = [(env[v] if isinstance(v, fx.Node) else v, role) for v, role in returned]
    graph.output(tuple(_own(graph, v, older) if r.kind == "gradient" else v for v, r in outputs))
    _drop_aliases(graph)
    _drop_dead(graph)
    return graph


def _copy(graph: fx.Graph, node: fx.Node, env: Mapping[fx.Node, Any]) -> fx.Node:
    """Copy a node; one that takes a result out of a tuple is named after the op."""
    name = node.name
    if node.target is operator.getitem:
        source: Any = node.args[0]
        name = f"{env[source].name}_r{node.args[1]}"
    args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
    made = graph.create_node(node.op, node.target, args, kwargs, name, node.type)
    made.meta = dict(node.meta)
    _correct_statistics(made)
    _round_dropout(made)
    return made


def _round_dropout(node: fx.Node) -> None:
    """Let the gradient of dropout be scaled by a rounded factor, as eager mode's is on a CPU.

    There it is a product with a mask of zeros and factors, in the input's dtype.
    """
    if node.target is torch.ops.aten.native_dropout_backward.default:
        arguments: Any = node.args
        gradient, mask, scale = arguments
        value = gradient.meta["val"]
        if value.device.type == "cpu":
            node.args = (gradient, mask, torch.tensor(scale, dtype=value.dtype).item())


_NORMS = {
    torch.ops.aten.native_layer_norm.default,
    torch.ops.aten.native_group_norm.default,
    torch.ops.aten._native_batch_norm_legit_functional.default,
}


def _correct_statistics(node: fx.Node) -> None:
    """Give mean and inverse deviation, as a normalization saves them, the dtype that they have.

    On a CPU it is that of the first parameter or running statistic (is_mixed_type in
    ATen/native/cpu/mixed_data_type.h); a fake tensor says that it is the input's. The two differ
    in autocast regions.
    """
    source: Any = node.args[0] if node.target is operator.getitem else node
    if source.target not in _NORMS:
        return
    x, *others = [a.meta["val"] for a in source.args if isinstance(a, fx.Node)]
    if x.device.type != "cpu" or not others or others[0].dtype == x.dtype:
        return
    if source is node:
        y, mean, deviation, *rest = node.meta["val"]
        with mean.fake_mode:
            statistics = [t.to(others[0].dtype) for t in (mean, deviation)]
        node.meta["val"] = (y, *statistics, *rest)
    else:
        node.meta["val"] = source.meta["val"][node.args[1]]


def _own(graph: fx.Graph, gradient: fx.Node, older: Container[int]) -> fx.Node:
    """A gradient with memory that backward made: a copy, if it is a view of something `older`.

    (Of a tangent: the gradient of a plain sum; of a saved tensor: a straight-through estimator.)
    """
    value = gradient.meta["val"]
    if _compat.storage_key(value) not in older:
        return gradient
    with torch.no_grad():
        copied = value.clone()
    node = graph.call_function(torch.ops.aten.clone.default, (gradient,))
    node.meta = {**gradient.meta, "val": copied, "phase": "backward"}
    return node


def _check_layout(node: fx.Node) -> None:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and value.layout != torch.strided:
        raise CaptureError(
            f"{op_name(node)} makes a tensor of layout {value.layout}: lohan_fx moves "
            "strided tensors only (an embedding with sparse=True has a sparse gradient)"
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

    rebuild: Callable[[tuple[Any, ...], tuple[Any, ...]], Any]
    keywords: tuple[str, ...]

    def __call__(self, flat: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.rebuild(flat, (*args, *(kwargs[name] for name in self.keywords)))


def _phase(node: fx.Node) -> str:
    return "backward" if "backward" in str(node.meta.get("partitioner_tag")) else "forward"


def is_random(node: fx.Node) -> bool:
    """Whether the op draws from a random generator (its result cannot be had again)."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags and not _dropout_is_off(node)


def is_repeatable(node: fx.Node) -> bool:
    """Whether the op, run again, gives the same result and does nothing else.

    A higher-order op holds a graph of its own, which may draw or mutate: it counts as if it did.
    """
    higher = isinstance(node.target, _compat.HigherOrderOperator)
    return not (higher or is_random(node) or node.is_impure())


def _dropout_is_off(node: fx.Node) -> bool:
    """Attention ops carry the tag for their dropout; with probability 0 they draw nothing."""
    schema = getattr(node.target, "_schema", None)
    for i, a in enumerate(schema.arguments if schema else ()):
        if a.name == "dropout_p":
            value = node.kwargs.get("dropout_p", node.args[i] if i < len(node.args) else 0.0)
            return bool(value == 0.0)
    return False


def _drop_aliases(graph: fx.Graph) -> None:
    """Let ops read through ``detach`` and ``alias``: to them, these return what they are given."""
    identities = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
    for node in graph.nodes:
        if node.target in identities:
            node.replace_all_uses_with(node.args[0], lambda user: user.op != "output")


def _drop_dead(graph: fx.Graph) -> None:
    """Remove what nobody reads, but never an op that draws randomness: eager draws it too."""
    for node in reversed(list(graph.nodes)):
        if node.users or node.op == "output":
            continue
        if node.op == "placeholder":
            if node.meta["role"].kind in ("parameter", "buffer"):
                graph.erase_node(node)
        elif is_repeatable(node):
            graph.erase_node(node)


def constants_of(source: fx.GraphModule, graph: fx.Graph) -> dict[str, Any]:
    """Tensors that the forward makes from Python numbers, as real tensors."""
    found: dict[str, Any] = {}
    for node in graph.find_nodes(op="get_attr"):
        value = getattr(source, node.target)
        if isinstance(value, _compat.FakeTensor):
            value = value.constant
            if value is None:
                raise CaptureError(
                    f"constant {node.target} of the forward has no value while tracing: make it "
                    "a buffer of the module"
                )
        found[node.target] = value
    return found


def op_name(node: fx.Node) -> str:
    """What a node calls, for people: ``aten.addmm``, ``mul``, ``getitem``."""
    if isinstance(node.target, str):
        return node.target
    if isinstance(node.target, _compat.OpOverload):
        return str(node.target).removesuffix(".default")
    return getattr(node.target, "__name__", str(node.target))


_FIXED_SHAPES = (
    "lohan_fx plans memory before the step runs and needs fixed shapes: mask (torch.where) instead "
    "of selecting, and run experts as one product, not in a loop (models of transformers: "
    "experts_implementation='grouped_mm' or 'batched_mm')"
)


def _explain(model: nn.Module, error: Exception) -> str:
    """One message: in which module, at which line of user code, what broke, what to do."""
    frames = _compat.user_frames(error) or [
        (f.filename, f.lineno or 0, f.name, f.line or "")
        for f in traceback.extract_tb(error.__traceback__)
    ]
    text = str(error).strip()
    what = text.splitlines()[0] if text else type(error).__name__
    for label in ("Explanation", "Developer debug context"):
        if found := re.search(rf"{label}: *(\S.*)", text):
            what += f"\n  {found[1]}"
    hint = re.search(r"Hint: (.*)", text)
    advice = f"\n  hint: {hint[1]}" if hint else ""
    need = (
        "lohan_fx needs a forward without graph breaks: no data-dependent Python control flow, "
        "no calls that Dynamo cannot trace"
    )
    if "data-dependent expression" in what:  # Dynamo proposes annotations, which fix no size
        what, advice, need = "a size or a branch depends on data", "", _FIXED_SHAPES
    return (
        f"cannot capture {type(model).__name__} as one graph{_where(model, frames)}\n"
        f"  {what}{advice}\n  {need}"
    )


def _where(model: nn.Module, frames: Sequence[_compat.Frame]) -> str:
    """The innermost module whose forward is on the stack, and the line of user code."""
    inside: list[tuple[str, nn.Module]] = []
    for frame in frames:  # outermost first: each forward narrows the choice
        under = tuple(f"{name}." if name else "" for name, _ in inside) or ("",)
        found = [
            (name, module)
            for name, module in model.named_modules()
            if name.startswith(under) and _runs(module, frame)
        ]
        inside = found or inside
    text = ""
    if inside:
        name, module = inside[0]
        more = f", or {len(inside) - 1} more of its kind" if len(inside) > 1 else ""
        text = f"\n  in module {name or '(the model itself)'} ({type(module).__name__}{more})"
    user = [f for f in frames if not _is_foreign(f[0])]
    if user:
        file, line, function, code = user[-1]
        text += f"\n  at {file}:{line} in {function}: {code.strip()}"
    return text


def _runs(module: nn.Module, frame: _compat.Frame) -> bool:
    """Whether the frame is in the module's forward."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None or code.co_filename != frame[0]:
        return False
    lines = [line for _, _, line in code.co_lines() if line is not None]
    return bool(lines) and min(lines) <= frame[1] <= max(lines)


def _is_foreign(file: str) -> bool:
    """Whether a file is no user code: PyTorch, this package, or the standard library."""
    roots = [str(Path(torch.__file__).parent), str(Path(__file__).parent)]
    library = sysconfig.get_paths()["stdlib"]
    packages = "site-packages" in file or "dist-packages" in file
    return any(file.startswith(r) for r in roots) or (file.startswith(library) and not packages)
