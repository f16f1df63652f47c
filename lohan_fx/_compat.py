"""Every private PyTorch name that lohan_fx uses, for torch 2.11 to 2.14.

Nothing else in the package imports a name with a leading underscore from torch.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.exc import Unsupported, UserError
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import _BoxedCodeGen

__all__ = [
    "BufferAOTInput",
    "DynamoCapture",
    "FakeTensor",
    "FakeTensorMode",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "TangentAOTInput",
    "Unsupported",
    "UserError",
    "boxed",
    "dynamo_capture",
    "export_joint",
    "fake_mode",
    "storage_key",
    "version_of",
]


def fake_mode() -> FakeTensorMode:
    """A fake mode that Dynamo and AOTAutograd can both trace under (it has a ShapeEnv)."""
    return FakeTensorMode(shape_env=ShapeEnv())


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage: equal for a (fake) tensor and all its views."""
    return int(tensor.untyped_storage()._cdata)


def _logger_methods() -> set[Callable[..., Any]]:
    """Methods of logging.Logger, those that libraries add to it (``warning_once``) included.

    Dynamo would break the graph at a log call; tracing must not depend on whether a model
    logs, so all of them become no-ops while it traces.
    """
    names = [n for n in dir(logging.Logger) if not n.startswith("__")]
    return {f for n in names if callable(f := getattr(logging.Logger, n))}


@contextlib.contextmanager
def _quiet_metrics() -> Iterator[None]:
    """Torch 2.11 cannot put a set of functions into its metrics, and logs that at length."""
    log = logging.getLogger("torch._dynamo.metrics_context")
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


@dataclass(frozen=True, slots=True)
class DynamoCapture:
    """What Dynamo captured: a module that returns a flat tuple, and how to build the rest.

    `output_values[i]` is the example (fake) value of flat output i. `unflatten(flat, args)`
    builds the structure that the user's forward returns; `args` are bound positionally in
    the order of `argument_names`.
    """

    module: fx.GraphModule
    argument_names: tuple[str, ...]
    unflatten: Callable[[tuple[Any, ...], tuple[Any, ...]], Any]
    output_values: tuple[Any, ...]

    def detach_outputs(self, indices: Sequence[int]) -> None:
        """Cut flat outputs off from autograd, so that they cost no tangents."""
        graph = self.module.graph
        node = graph.output_node()
        flat = list(node.args[0])  # type: ignore[arg-type]
        with graph.inserting_before(node):
            for i in indices:
                flat[i] = graph.call_method("detach", (flat[i],))
        node.args = (tuple(flat),)
        self.module.recompile()


def dynamo_capture(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> DynamoCapture:
    """Capture `module` whole. Its parameters, buffers and inputs may be fake tensors.

    Raises:
        torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError: at a graph break.
    """
    torch._dynamo.reset()
    config = torch._dynamo.config.patch(
        ignore_logging_functions=_logger_methods(),
        allow_rnn=True,
        assume_static_by_default=True,
        automatic_dynamic_shapes=False,
        specialize_float=True,
    )
    with config, _quiet_metrics(), warnings.catch_warnings():
        # Dynamo warns of Python side effects that it saw (output recorders, counters); they
        # happened while tracing and have no part in the numbers.
        warnings.simplefilter("ignore")
        gm = dynamo_graph_capture_for_export(module)(*args, **kwargs)
    codegen: Any = gm.graph._codegen
    unflatten = codegen.dynamo_bytecode_unflatten
    names = tuple(codegen.orig_arg_names)
    codegen.generate_output = lambda output_args, **_: (
        f"return ({', '.join(repr(a) for a in output_args)},)"
    )
    codegen.process_outputs = tuple
    gm.recompile()
    flat = gm.graph.output_node().args[0]
    values = tuple(
        n.meta.get("example_value", n.meta.get("val")) if isinstance(n, fx.Node) else n
        for n in flat  # type: ignore[union-attr]
    )
    return DynamoCapture(gm, names, unflatten, values)


@dataclass(frozen=True, slots=True)
class JointExport:
    """A joint graph with descriptors on its placeholders and outputs."""

    module: fx.GraphModule
    output_descriptors: tuple[Any, ...]


@contextlib.contextmanager
def export_joint(
    module: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[JointExport]:
    """Trace forward and backward into one functional graph, without decompositions."""
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        joint = aot_export_joint_with_descriptors(stack, module, args, kwargs)
        gm = joint.graph_module
        yield JointExport(gm, tuple(gm.graph.output_node().meta["desc"]))


def boxed(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A GraphModule whose forward takes one list and empties it: inputs die at their last use."""
    graph.set_codegen(_BoxedCodeGen())
    return fx.GraphModule(root, graph)


def version_of(tensor: torch.Tensor) -> int:
    """How many times the tensor was written in place through itself or a view of it."""
    return int(tensor._version)
