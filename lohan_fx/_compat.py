"""Every private PyTorch name that lohan_fx uses, for torch 2.11 to 2.14.

Nothing else in the package imports a name with a leading underscore from torch.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import logging
import operator
import re
import sys
import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config
from torch import fx, nn
from torch._decomp import decompositions
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
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.fx.graph import _BoxedCodeGen
from torch.multiprocessing import reductions
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)

__all__ = [
    "TRACING",
    "BufferAOTInput",
    "DataDependentOutputException",
    "DisableTorchFunctionSubclass",
    "DynamoCapture",
    "FakeTensor",
    "FakeTensorMode",
    "GradAOTOutput",
    "HigherOrderOperator",
    "InputMutationAOTOutput",
    "LazyGraphModule",
    "OpOverload",
    "ParamAOTInput",
    "Partition",
    "PlainAOTInput",
    "PlainAOTOutput",
    "StorageWeakRef",
    "TangentAOTInput",
    "TorchDispatchMode",
    "Unmoved",
    "aot_backend",
    "boxed",
    "cuda_sleep",
    "data_dependent_node",
    "dynamo_capture",
    "export_joint",
    "fake_mode",
    "inductor_kernel",
    "is_wrapper_subclass",
    "make_subclass",
    "make_wrapper_subclass",
    "set_cuda_allocator",
    "specialize",
    "storage_key",
    "traces",
    "unfused_rnn",
    "user_frames",
    "version_of",
]

TRACING = threading.RLock()
"""Held while a model is traced or compiled. Torch then sets a flag of the whole process
(`torch.compiler.is_compiling`) with which its optimizers round differently: an update that runs
on another thread waits."""


def traces() -> bool:
    """Whether this thread holds `TRACING`: it must wait for no update then."""
    owned: bool = TRACING._is_owned()  # type: ignore[attr-defined]
    return owned


StorageWeakRef: Any = reductions.StorageWeakRef
"""Identity of a storage, and whether anybody still holds it."""

LazyGraphModule = _LazyGraphModule
"""A GraphModule that generates and compiles its Python code when it is first called."""


def fake_mode() -> FakeTensorMode:
    """A fake mode that Dynamo and AOTAutograd can both trace under.

    It has a ShapeEnv, and takes real tensors that a forward finds in attributes and globals.
    """
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


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
def _silent(name: str) -> Iterator[None]:
    """Switch a logger off."""
    logger = logging.getLogger(name)
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


@dataclass(frozen=True, slots=True)
class DynamoCapture:
    """What Dynamo captured: a module that returns a flat tuple, and how to build the rest.

    `inputs` are the tensors behind the graph's placeholders: the fakes of parameters, buffers and
    arguments, and real tensors that forward found elsewhere. `output_values[i]` is the example
    (fake) value of flat output i. `unflatten(module, flat, arguments)` builds the structure that
    the user's forward returns, of what the module holds at that time; `arguments` are the values of
    args and then kwargs, in the order of the capture. `side_effects` names the Python state that
    forward changes; it changed once, while tracing.
    """

    module: fx.GraphModule
    inputs: tuple[Any, ...]
    unflatten: Callable[[nn.Module, tuple[Any, ...], tuple[Any, ...]], Any]
    output_values: tuple[Any, ...]
    side_effects: tuple[str, ...]

    def isolate_outputs(self, differentiable: Container[int]) -> None:
        """Give each flat output its own place in autograd.

        The others than `differentiable` are detached, so that they cost no tangent. Aliases are
        copied where an alias would lose something: a differentiable output that shares its
        storage with an input or with another output (AOTAutograd would trace no gradient through
        it), and any view of a parameter (whose memory comes and goes).
        """
        graph = self.module.graph
        output = graph.output_node()
        flat: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        values = self.output_values
        tensors = {i: v for i, v in enumerate(values) if isinstance(v, torch.Tensor)}
        inputs = [
            (storage_key(v), actual)
            for n, actual in zip(graph.find_nodes(op="placeholder"), self.inputs, strict=True)
            if isinstance(v := n.meta["example_value"], torch.Tensor)
        ]
        parameters = {key for key, actual in inputs if isinstance(actual, nn.Parameter)}
        shared = Counter(storage_key(v) for v in tensors.values())
        shared.update(key for key, _ in inputs)
        with graph.inserting_before(output):
            for i, value in tensors.items():
                key = storage_key(value)
                if i not in differentiable and value.requires_grad:
                    flat[i] = graph.call_method("detach", (flat[i],))
                if key in parameters or (i in differentiable and shared[key] > 1):
                    flat[i] = graph.call_method("clone", (flat[i],))
        output.args = (tuple(flat),)
        self.module.recompile()

    def written_outside(self) -> fx.Node | None:
        """A placeholder that forward writes into in place although it is a real tensor."""
        for node, actual in zip(
            self.module.graph.find_nodes(op="placeholder"), self.inputs, strict=True
        ):
            real = isinstance(actual, torch.Tensor) and not isinstance(actual, FakeTensor)
            if real and version_of(node.meta["example_value"]) > 0:
                return node
        return None


def dynamo_capture(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> DynamoCapture:
    """Capture `module` whole. Its parameters, buffers and inputs may be fake tensors.

    Raises:
        torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError: at a graph break.
    """
    config = torch._dynamo.config.patch(
        ignore_logging_functions=_logger_methods(),
        allow_rnn=True,
        assume_static_by_default=True,
        automatic_dynamic_shapes=False,
        specialize_float=True,
    )
    # torch 2.11 logs an error of its own: its statistics cannot hold the set of functions above.
    statistics = _silent("torch._dynamo.metrics_context")
    with TRACING, config, statistics, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        gm = dynamo_graph_capture_for_export(module)(*args, **kwargs)
    # torch 2.11 gives it copies of what the module held while tracing.
    gm._parameters, gm._buffers = module._parameters, module._buffers
    codegen: Any = gm.graph._codegen
    flatten, unflatten = codegen.dynamo_bytecode_flatten, codegen.dynamo_bytecode_unflatten
    # Dynamo leaves what it traced, and so the module, in the globals of the module's source file.
    traced = unflatten.out
    traced.graph_capture_output.f_globals.pop(traced.backend_input.backend_id, None)
    for function in (flatten, unflatten):  # torch 2.11 forgets that globals fall back to builtins
        function.f_globals = {**vars(builtins), **function.f_globals}
    inputs = flatten(*args, *kwargs.values())
    codegen.generate_output = lambda output_args, **_: (
        f"return ({', '.join(repr(a) for a in output_args)},)"
    )
    codegen.process_outputs = tuple
    gm.recompile()
    flat: Any = gm.graph.output_node().args[0]
    values = tuple(
        n.meta.get("example_value", n.meta.get("val")) if isinstance(n, fx.Node) else n
        for n in flat
    )
    return DynamoCapture(gm, tuple(inputs), _Rebuild(unflatten), values, _side_effects(said))


class _Rebuild:
    """Dynamo's bytecode that rebuilds the return value, made callable once: PyTorch's own class
    reads through the bytecode at every call, 10 ms for a GPT of 32 layers. That class also holds
    the module's parts for ever: here the module is an argument."""

    def __init__(self, unflatten: Any) -> None:
        self._flat: tuple[Any, ...] = ()
        self._num_args: int = unflatten.input_processor.num_args
        self._keywords: list[str] = unflatten.input_processor.kwarg_names
        self._run: Callable[..., Any] = unflatten.out.forward_callable(
            compiled_fn=lambda *_: self._flat, extra_globals=unflatten.f_globals
        )

    def __call__(self, module: nn.Module, flat: tuple[Any, ...], arguments: tuple[Any, ...]) -> Any:
        args, rest = arguments[: self._num_args], arguments[self._num_args :]
        self._flat = flat
        try:
            with torch._C._DisableTorchDispatch():
                return self._run(module, *args, **dict(zip(self._keywords, rest, strict=True)))
        finally:
            self._flat = ()


def _side_effects(said: Sequence[warnings.WarningMessage]) -> tuple[str, ...]:
    """Sources in Dynamo's warning of side effects, e.g. ``L['self']._buffers``."""
    texts = [str(w.message) for w in said if "side effects happened" in str(w.message)]
    return tuple(s for text in texts for s in re.findall(r'"(L\[[^"]*|G\[[^"]*)"', text))


def data_dependent_node(module: fx.GraphModule) -> fx.Node | None:
    """The first node of a Dynamo graph whose size or value is known only when it has run."""
    for node in module.graph.nodes:
        value = node.meta.get("example_value")
        if value is not None and free_unbacked_symbols(value):
            assert isinstance(node, fx.Node)
            return node
    return None


Frame = tuple[str, int, str, str]
"""(file, line, function, code) of one entry of a stack."""


def frames_in(text: str) -> list[Frame]:
    """The stack that a text quotes, outermost first."""
    found = re.findall(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)', text)
    return [(file, int(line), function, code) for file, line, function, code in found]


def user_frames(error: BaseException) -> list[Frame]:
    """The traced code that an error is about, outermost first.

    Dynamo attaches the stack of the code that it traced; errors of later stages quote it in
    their text.
    """
    stack = getattr(error, "real_stack", None)
    if stack:
        return [(f.filename, f.lineno or 0, f.name, (f.line or "").strip()) for f in stack]
    return frames_in(str(error))


@contextlib.contextmanager
def unfused_rnn(module: nn.Module) -> Iterator[None]:
    """Trace recurrent layers as their cells, if there are any.

    The fused kernels of oneDNN and cuDNN pass a workspace to backward whose size only the
    kernel knows; no plan could count or move it.
    """
    if not any(isinstance(m, nn.RNNBase) for m in module.modules()):
        yield
        return
    mkldnn, cudnn = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    torch._C._set_cudnn_enabled(False)
    layers = decompositions._rnn_helper
    decompositions._rnn_helper = functools.partial(_rnn_layers, layers)
    try:
        yield
    finally:
        decompositions._rnn_helper = layers
        torch._C._set_mkldnn_enabled(mkldnn)
        torch._C._set_cudnn_enabled(cudnn)


def _rnn_layers(
    layers: Callable[..., Any],
    x: torch.Tensor,
    hidden: Sequence[Any],
    params: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    layer: Callable[..., Any],
) -> tuple[torch.Tensor, list[Any]]:
    """Recurrent layers one by one, with the dropout between them.

    What PyTorch traces (2.11 to 2.14) leaves the dropout out: it compares the wrong way round.
    """
    x = x.transpose(0, 1) if batch_first else x
    step = 2 if bidirectional else 1
    last: list[Any] = []
    for i in range(num_layers):
        if i > 0 and train and dropout != 0:
            x = torch.dropout(x, dropout, train=True)
        own = slice(i * step, (i + 1) * step)
        x, states = layers(
            x, hidden[own], params[own], has_biases, 1, 0.0, train, bidirectional, False, layer
        )
        last += states
    return (x.transpose(0, 1) if batch_first else x), last


@dataclass(frozen=True, slots=True)
class JointExport:
    """A joint graph with descriptors on its placeholders and outputs."""

    module: fx.GraphModule
    output_descriptors: tuple[Any, ...]


@contextlib.contextmanager
def export_joint(
    module: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[JointExport]:
    """Trace forward and backward into one functional graph, without decompositions.

    Under autocast forward is traced with it and backward without, as training loops run them.
    """
    backward = torch._functorch.config.patch(backward_pass_autocast="off")
    with TRACING, contextlib.ExitStack() as stack, backward, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        joint = aot_export_joint_with_descriptors(stack, module, args, kwargs)
        gm = joint.graph_module
        yield JointExport(gm, tuple(gm.graph.output_node().meta["desc"]))


def storage_users(tensor: torch.Tensor) -> int:
    """How many tensors and arrays share a tensor's memory; only differences mean anything."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def specialize(inputs: Sequence[Any]) -> None:
    """Fix every size that torch.compile left open in these inputs: it guards them as they are."""
    for x in inputs:
        sizes = (*x.size(), *x.stride(), x.storage_offset()) if isinstance(x, torch.Tensor) else [x]
        for size in sizes:
            if isinstance(size, torch.SymInt):
                int(size)


@dataclass(frozen=True, slots=True)
class Partition:
    """Boxed forward and backward of a joint graph; ``around_…(run, arguments)`` runs each."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    around_forward: Callable[..., Any]
    around_backward: Callable[..., Any]


def aot_backend(
    module: fx.GraphModule, inputs: Sequence[Any], partition: Callable[..., Partition]
) -> Callable[..., Any]:
    """Compile a Dynamo graph through AOTAutograd, without decompositions.

    `partition(joint, joint inputs, num_fwd_outputs=…)` cuts the graph. One without backward runs as
    it is.
    """
    from torch._dynamo.backends.common import aot_autograd

    found: list[Partition] = []

    def cut(*args: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        found.append(partition(*args, **options))
        return found[-1].forward, found[-1].backward

    def run(graph: fx.GraphModule, around: Callable[..., Any]) -> Any:
        def boxed_call(arguments: list[Any]) -> Any:
            return around(graph.forward, arguments)

        boxed_call._boxed_call = True  # type: ignore[attr-defined]
        return boxed_call

    def unpacked(forward: Callable[..., Any], arguments: list[Any]) -> Any:
        return forward(*arguments)

    made = aot_autograd(
        fw_compiler=lambda graph, _: run(graph, found[-1].around_forward),
        bw_compiler=lambda graph, _: run(graph, found[-1].around_backward),
        inference_compiler=lambda graph, _: run(graph, unpacked),
        partition_fn=cut,
    )
    with torch._functorch.config.patch(backward_pass_autocast="off"):
        compiled: Callable[..., Any] = made(module, inputs)
    return compiled


class Unmoved(nn.Module):
    """A module that is asked before anybody, its parent included, converts its tensors.

    `.to()`, `.cuda()`, `.half()` and the like all end in `_apply`.
    """

    def keeps(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Raise if the conversion is refused; otherwise nothing is converted."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        self.keeps(fn)
        return self


def is_wrapper_subclass(tensor: torch.Tensor) -> bool:
    """Whether a tensor is made of other tensors (DTensor, quantized tensors, ...)."""
    return bool(is_traceable_wrapper_subclass(tensor))


def boxed(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A GraphModule whose forward takes one list and empties it: inputs die at their last use."""
    graph.set_codegen(_BoxedCodeGen())
    return fx.GraphModule(root, graph)


DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
"""Inside of it, functions of tensor subclasses are those of plain tensors."""


def make_subclass(cls: type[torch.Tensor], tensor: torch.Tensor) -> Any:
    """The same memory as a tensor of class `cls`."""
    return torch.Tensor._make_subclass(cls, tensor)


def make_wrapper_subclass(cls: type[torch.Tensor], like: torch.Tensor) -> Any:
    """A tensor of class `cls` without storage, that looks like another."""
    return torch.Tensor._make_wrapper_subclass(
        cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
    )


_VERSION: Callable[[torch.Tensor], int] = operator.attrgetter("_version")


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """`version_of` each."""
    try:
        return [*map(_VERSION, tensors)]
    except RuntimeError:
        return [*map(version_of, tensors)]


def version_of(tensor: torch.Tensor) -> int:
    """How many times the tensor was written in place through itself or a view of it; 0 for those
    of inference mode, which count nothing."""
    return 0 if tensor.is_inference() else int(tensor._version)


def cuda_sleep(cycles: int) -> None:
    """Keep the current stream busy for so many cycles of the device's clock."""
    torch.cuda._sleep(cycles)


def inductor_kernel(
    body: fx.GraphModule, inputs: Sequence[torch.Tensor]
) -> tuple[Callable[[list[torch.Tensor]], Sequence[torch.Tensor]], list[tuple[int, ...] | None]]:
    """Compile a functional graph for inputs of these layouts (fake tensors).

    The result takes one list, which it empties, and returns the outputs; their strides (None:
    unknown) come with it, and should be those that the graph's own have. Values are rounded to
    their dtypes between ops, as eager mode does.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    values = (n.meta.get("val") for n in body.graph.nodes)  # of a graph that reads nothing, too
    mode = next(t.fake_mode for t in values if isinstance(t, FakeTensor))
    plain = torch._C._DisableAutocast()  # the graph's ops have their dtypes
    decompositions = dict(select_decomp_table())
    decompositions.pop(torch.ops.aten.cat.default, None)  # of equal pieces: it forgets their layout
    with TRACING, torch.no_grad(), plain, mode, config.patch(emulate_precision_casts=True):
        module = make_fx(body, decomposition_table=decompositions)(*inputs)
        output = module.graph.output_node()
        returned: Any = output.args[0]
        output.meta["user_visible_output_idxs"] = list(range(len(returned)))
        made: Any = compile_fx_inner(module, list(inputs))
    strides = getattr(made, "output_strides", None)
    if strides is None:  # a graph without ops is not compiled
        return made, [n.meta["val"].stride() for n in returned]
    # without what surrounds it, for profilers and metrics of compilation, at every call
    run = made.current_callable or made
    return run, [found and tuple(map(int, found)) for found in strides]


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Ops in the block make real tensors without gradients, whatever mode this thread is in, and
    also inside of an op that makes a fake tensor: there all are sent to kernels for meta tensors.
    """
    functions, decompositions = torch._C.DisableTorchFunction(), torch._C._DisablePythonDispatcher()
    with torch._C._PreserveDispatchKeyGuard(), _disable_current_modes(), functions, decompositions:
        torch._C._set_meta_in_tls_dispatch_include(False)
        with torch.inference_mode(False), torch.no_grad():
            yield


def is_generated(file: str) -> bool:
    """Whether torch made the code that has this file name: of a graph module, or around kernels."""
    inductor = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    return file.startswith("<eval_with_key>") or (
        inductor is not None and file.startswith(inductor.cache_dir())
    )


class ModuleParts:
    """Read the dict of an nn.Module, faster than its attributes.

    Attributes:
        names: keys in the dict of every module that is one in Python (TorchScript's lack some).
        backward: its backward hooks, of both kinds.
    """

    names = frozenset(
        {"training", "_modules", "_parameters", "_backward_hooks", "_backward_pre_hooks"}
    )
    training: Callable[[Any], bool] = operator.itemgetter("training")
    children: Callable[[Any], dict[str, nn.Module | None]] = operator.itemgetter("_modules")
    parameters: Callable[[Any], dict[str, nn.Parameter | None]] = operator.itemgetter("_parameters")
    backward: tuple[Callable[[Any], Any], ...] = (
        operator.itemgetter("_backward_hooks"),
        operator.itemgetter("_backward_pre_hooks"),
    )


_BACKWARD_HOOKS = operator.attrgetter("_backward_hooks")
_GRADIENT_HOOKS = operator.attrgetter("_post_accumulate_grad_hooks")


def have_gradient_hooks(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether `gradient_hook` finds one at any of them."""
    return any(map(_BACKWARD_HOOKS, parameters)) or any(map(_GRADIENT_HOOKS, parameters))


def gradient_hook(parameter: torch.Tensor) -> str:
    """What registered a hook that autograd would call with the parameter's gradient, or ""."""
    if parameter._backward_hooks:
        return "register_hook"
    hooks = parameter._post_accumulate_grad_hooks
    return "register_post_accumulate_grad_hook" if hooks else ""


@contextlib.contextmanager
def without_hooks(module: nn.Module) -> Iterator[None]:
    """The module itself has no hooks, neither of forward nor of backward; those inside stay."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    found = {kind: module.__dict__[kind] for kind in kinds}
    module.__dict__.update({kind: OrderedDict() for kind in kinds})
    try:
        yield
    finally:
        module.__dict__.update(found)


def backward_hook(module: nn.Module) -> str:
    """What registered a hook that autograd would call at the module's backward, or ""."""
    if module._backward_hooks:
        return "register_full_backward_hook"
    return "register_full_backward_pre_hook" if module._backward_pre_hooks else ""


def set_cuda_allocator(settings: str) -> bool:
    """Change settings of CUDA's caching allocator, in the syntax of ``PYTORCH_ALLOC_CONF``.

    False where this version of torch does not let us.
    """
    try:
        torch._C._accelerator_setAllocatorSettings(settings)
    except (AttributeError, RuntimeError):
        return False
    return True
