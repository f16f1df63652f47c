"""nn.Module + inputs → one joint FX graph (forward and backward) with a role on every edge.

The model is traced with fake parameters on the compute device in the compute dtype, so that it
may live anywhere (host, SSD, meta) and nothing is allocated. The resulting graph is functional
ATen without decompositions: the very kernels that eager mode runs, in the same order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from lohan_fx import _compat
from lohan_fx.errors import CaptureError

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
    ``meta["phase"] == "backward"``. `flat_outputs` holds what forward returns besides tensors of
    the graph (constants), `unflatten` builds the user's structure from a flat tuple.
    """

    graph: fx.GraphModule
    inputs: tuple[InputRole, ...]
    outputs: tuple[OutputRole, ...]
    num_outputs: int
    differentiable: tuple[int, ...]
    unflatten: Callable[[tuple[Any, ...], tuple[Any, ...], dict[str, Any]], Any]
    compute_dtype: torch.dtype | None
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
        return dataclasses.replace(self, graph=fx.GraphModule(self.graph, graph))

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

    Raises:
        CaptureError: a graph break or an unsupported construct; names the module and the line.
    """
    kwargs = dict(kwargs or {})
    mode = _compat.fake_mode()
    with _fake_state(model, mode, torch.device(device), dtype, grad):
        fake_args, fake_kwargs = _fake_inputs(mode, args, kwargs, torch.device(device), dtype, grad)
        grad_context = torch.enable_grad() if grad else torch.no_grad()
        try:
            with grad_context:
                dynamo = _compat.dynamo_capture(model, fake_args, fake_kwargs)
                diff = _differentiable(dynamo, outputs, len(fake_args), fake_kwargs) if grad else ()
                dynamo.detach_outputs(
                    [
                        i
                        for i, v in enumerate(dynamo.output_values)
                        if i not in diff and isinstance(v, torch.Tensor) and v.requires_grad
                    ]
                )
                with _compat.export_joint(dynamo.module, fake_args, fake_kwargs) as joint:
                    return _normalize(model, dynamo, joint, diff, dtype)
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(_explain(model, error)) from error


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
            with mode:
                empty = torch.empty_strided(
                    tensor.size(), tensor.stride(), dtype=to or tensor.dtype, device=device
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
        to = dtype if dtype is not None and leaf.is_floating_point() else leaf.dtype
        with mode:
            empty = torch.empty_strided(leaf.size(), leaf.stride(), dtype=to, device=device)
        return empty.requires_grad_(leaf.requires_grad and grad)

    made: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(fake, (args, kwargs))
    return made


def _differentiable(
    dynamo: _compat.DynamoCapture, outputs: Outputs, num_args: int, kwargs: Mapping[str, Any]
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
    names = _top_level_names(dynamo)
    if outputs == "auto":
        scalars = [i for i in wants if values[i].numel() == 1]
        losses = [i for i in scalars if names.get(i) == "loss"]
        return tuple(losses or scalars or wants)
    if isinstance(outputs, str):
        raise CaptureError(
            f"outputs={outputs!r}: use 'auto', 'all', or a sequence of output names"
        )
    chosen = [i for i in wants if names.get(i) in set(outputs)]
    missing = set(outputs) - {names.get(i) for i in chosen}
    if missing:
        known = sorted({n for i in wants if (n := names.get(i)) is not None})
        raise CaptureError(
            f"outputs={list(outputs)!r}: {sorted(missing)} are not differentiable outputs of the "
            f"model; it has {known}"
        )
    return tuple(chosen)


def _top_level_names(dynamo: _compat.DynamoCapture) -> dict[int, str]:
    """Flat output index → key, attribute or position at the top of the returned structure."""
    marks = tuple(torch.empty(0) for _ in dynamo.output_values)
    built = dynamo.unflatten(marks, (None,) * len(dynamo.argument_names))
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
    if isinstance(desc, _compat.TangentAOTInput) and isinstance(
        desc.output, _compat.PlainAOTOutput
    ):
        return InputRole(kind="tangent", index=desc.output.idx)
    raise CaptureError(
        f"the captured step has an input of a kind that lohan_fx does not know: {desc!r} "
        "(tensor subclasses and outputs that are views of inputs are not supported)"
    )


def _output_role(desc: Any) -> OutputRole | None:
    if isinstance(desc, _compat.PlainAOTOutput):
        return OutputRole(kind="output", index=desc.idx)
    if isinstance(desc, _compat.GradAOTOutput):
        of = _input_role(desc.grad_of)
        return OutputRole(kind="gradient", target=of.target, index=of.index)
    if isinstance(desc, _compat.InputMutationAOTOutput):
        of = _input_role(desc.mutated_input)
        return OutputRole(kind="mutation", target=of.target, index=of.index)
    return None


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
) -> Captured:
    """Copy the joint graph: forward nodes first, readable placeholders, only known outputs."""
    source = joint.module.graph
    roles: list[InputRole] = []
    outputs: list[OutputRole] = []
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in source.find_nodes(op="placeholder"):
        role = _input_role(node.meta.get("desc"))
        made = graph.placeholder(placeholder_name(role))
        made.meta = {"val": node.meta["val"], "role": role, "phase": _phase(node)}
        env[node] = made
        roles.append(role)
    body = [n for n in source.nodes if n.op not in ("placeholder", "output")]
    for node in sorted(body, key=lambda n: _phase(n) == "backward"):  # stable
        made = graph.node_copy(node, env.__getitem__)
        made.meta["phase"] = _phase(node)
        env[node] = made
    returned: list[Any] = []
    seen: dict[int, Any] = {}
    flat = source.output_node().args[0]
    for value, desc in zip(flat, joint.output_descriptors, strict=True):  # type: ignore[arg-type]
        out_role = _output_role(desc)
        if out_role is None or (value is None and out_role.kind == "gradient"):
            continue
        if out_role.kind == "output":
            seen[out_role.index] = value
        outputs.append(out_role)
        returned.append(env[value] if isinstance(value, fx.Node) else value)
    graph.output(tuple(returned))
    _drop_dead(graph)
    module = fx.GraphModule(_constants(joint.module, graph), graph)
    kept = [n for n in graph.find_nodes(op="placeholder")]
    num_outputs = len(dynamo.output_values)
    absent = [i for i in range(num_outputs) if i not in seen]
    if absent:
        raise CaptureError(f"flat outputs {absent} of the model are not in the captured graph")
    return Captured(
        graph=module,
        inputs=tuple(n.meta["role"] for n in kept),
        outputs=tuple(outputs),
        num_outputs=num_outputs,
        differentiable=differentiable,
        unflatten=_Unflatten(dynamo.unflatten, dynamo.argument_names),
        compute_dtype=dtype,
        first_names=first_names(model),
    )


def first_names(model: nn.Module) -> dict[str, str]:
    """Every name of every parameter → the first name of that tensor (tied ones have several)."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(p), name)
        for name, p in model.named_parameters(remove_duplicate=False)
    }


@dataclass(frozen=True, slots=True)
class _Unflatten:
    """Bind (args, kwargs) to the forward's argument order, then rebuild its return value."""

    rebuild: Callable[[tuple[Any, ...], tuple[Any, ...]], Any]
    argument_names: tuple[str, ...]

    def __call__(
        self, flat: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        bound = args + tuple(kwargs[n] for n in self.argument_names[len(args) :])
        return self.rebuild(flat, bound)


def _phase(node: fx.Node) -> str:
    if node.op == "placeholder":
        return "backward" if isinstance(node.meta.get("desc"), _compat.TangentAOTInput) else (
            "forward"
        )
    tag = str(node.meta.get("partitioner_tag", "is_forward"))
    return "backward" if "backward" in tag else "forward"


def is_random(node: fx.Node) -> bool:
    """Whether the op draws from a random generator (its result cannot be had again)."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags and not _dropout_is_off(node)


def _dropout_is_off(node: fx.Node) -> bool:
    """Attention ops carry the tag for their dropout; with probability 0 they draw nothing."""
    schema = getattr(node.target, "_schema", None)
    for i, a in enumerate(schema.arguments if schema else ()):
        if a.name == "dropout_p":
            value = node.kwargs.get("dropout_p", node.args[i] if i < len(node.args) else 0.0)
            return value == 0.0
    return False


def _drop_dead(graph: fx.Graph) -> None:
    """Remove what nobody reads, but never an op that draws randomness: eager draws it too."""
    for node in reversed(list(graph.nodes)):
        if node.users or node.op == "output":
            continue
        if node.op == "placeholder":
            if node.meta["role"].kind in ("parameter", "buffer"):
                graph.erase_node(node)
            continue
        if node.is_impure() or is_random(node):
            continue
        graph.erase_node(node)


def _constants(source: fx.GraphModule, graph: fx.Graph) -> dict[str, Any]:
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


def _explain(model: nn.Module, error: Exception) -> str:
    """One message: what broke, in which module, at which line of user code, what to do."""
    text = str(error).strip()
    head = text.splitlines()[0] if text else type(error).__name__
    where = ""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)', text)
    if not frames:
        frames = [
            (f.filename, str(f.lineno), f.name, f.line or "")
            for f in traceback.extract_tb(error.__traceback__)
            if "/torch/" not in f.filename and "lohan_fx" not in f.filename
        ]
    if frames:
        file, line, function, code = frames[-1]
        where = f"\n  at {file}:{line} in {function}: {code.strip()}"
    hints = re.findall(r"Hint: (.*)", text)
    advice = f"\n  hint: {hints[0]}" if hints else ""
    return (
        f"cannot capture {type(model).__name__} as one graph: {head}{where}{advice}\n"
        "  lohan_fx needs a forward without graph breaks: no data-dependent Python control flow, "
        "no calls that Dynamo cannot trace"
    )
