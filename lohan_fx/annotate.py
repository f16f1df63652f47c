"""Captured joint graph → Workload: FLOPs, bytes, roofline seconds, blocks, units, storages.

Also marks every node of the graph in place: ``meta["block"]``, ``meta["root"]`` (the node whose
storage a view shares), ``meta["module"]`` (the source layer).
"""

from __future__ import annotations

import itertools
import operator
import re
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import (
    flop_registry,
    register_flop_formula,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from lohan_fx._compat import OpOverload, storage_key
from lohan_fx.capture import dense_stride
from lohan_fx.errors import CaptureError, LohanError
from lohan_fx.gradient_sums import inner_bytes, own_scratch_bytes
from lohan_fx.hardware import HardwareProfile
from lohan_fx.joint_graph import Captured, is_random, is_repeatable, op_name
from lohan_fx.workload import Op, Unit, Value, Workload
from lohan_fx.workspace import workspace_bytes

ALIGNMENT_BYTES = 256
"""Offsets of parameters inside a unit's flat buffers are multiples of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """What training keeps for each parameter element besides its compute copy.

    `compute_dtype` None keeps the parameter's own dtype (then it is its own master);
    otherwise an fp32 master is kept beside it. `num_states` optimizer tensors have the
    master's dtype; so has the gradient in which several backwards add up, if it `accumulates`.
    """

    compute_dtype: torch.dtype | None
    num_states: int
    accumulates: bool = False

    def master_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        return parameter.dtype if self.compute_dtype is None else torch.float32

    def copy_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        return parameter.dtype if self.compute_dtype is None else self.compute_dtype


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors of a node's ``meta["val"]``, flattened."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for part in value for t in tensors_of(part)]
    return []


# ---------------------------------------------------------------------------------------------
# Blocks
# ---------------------------------------------------------------------------------------------


def block_paths(model: nn.Module) -> Mapping[str, str]:
    """Module name → the block that it belongs to, for modules inside a repeated container.

    A block is a child of a ModuleList or Sequential that holds at least two children of one
    class: a transformer block, a ResNet bottleneck. The outermost such container counts.
    """
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        if any(name == b or name.startswith(b + ".") for b in found.values()):
            continue
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            classes = [type(child) for child in module.children()]
            if len(classes) > len(set(classes)):
                prefix = f"{name}." if name else ""
                for child, _ in module.named_children():
                    found[prefix + child] = prefix + child
    return {
        name: block
        for name, _ in model.named_modules()
        for block in [_block_prefix(name, found)]
        if block is not None
    }


def _block_prefix(name: str, blocks: Mapping[str, str]) -> str | None:
    parts = name.split(".")
    for k in range(1, len(parts) + 1):
        if (prefix := ".".join(parts[:k])) in blocks:
            return prefix
    return None


def _module_path(node: fx.Node, names: Container[str]) -> str | None:
    """The module whose forward made the node: the longest known suffix of its stack entry."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return None
    parts = module_name(str(list(stack.values())[-1][0])).split(".")
    suffixes = (".".join(parts[k:]) for k in range(len(parts) + 1))
    return next((s for s in suffixes if s in names), "")


def module_name(source: str) -> str:
    """A module as Dynamo names it, as a dotted path: ``L['self']._modules['a']`` → ``L.self.a``."""
    path = re.sub(r"\[['\"]?([^\]'\"]+)['\"]?\]", r".\1", source).replace("_modules.", "")
    return re.sub(r"@\d+", "", path)


def mark_blocks(graph: fx.Graph, model: nn.Module) -> None:
    """Set ``meta["block"]`` and ``meta["module"]`` on every compute node.

    Forward: maximal runs of consecutive ops in one block, or outside of all blocks (named by
    the first module of the run). A block that runs twice (a shared module) gets a suffix.
    Backward: the block of the forward op that it differentiates; a sum of gradients has none and
    goes with the op before it, which made the last summand.
    """
    blocks = block_paths(model)
    names = {name for name, _ in model.named_modules()}
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    of_seq: dict[int, str] = {}
    of_path: dict[str, str] = {}
    runs: Counter[str] = Counter()
    current = ""
    key: str | None = None
    path = ""
    pending: list[fx.Node] = []  # nodes that make no tensor go with the op that reads them
    for node in (n for n in nodes if n.meta["phase"] == "forward"):
        path = own if (own := _module_path(node, names)) is not None else path
        node.meta["module"] = path
        pending.append(node)
        if node.op == "get_attr" or not tensors_of(node.meta.get("val")):
            continue
        inside = blocks.get(path)
        if inside != key or not current:
            key = inside
            base = inside or path or "outer"
            runs[base] += 1
            current = base if runs[base] == 1 else f"{base}@{runs[base]}"
        for n in pending:
            n.meta["block"] = current
        pending.clear()
        if (seq := node.meta.get("seq_nr")) is not None:
            of_seq[seq] = current
        of_path[path] = current
    for node in pending:
        node.meta["block"] = current
    for node in (n for n in nodes if n.meta["phase"] == "backward"):
        path = own if (own := _module_path(node, names)) is not None else path
        if own is not None:
            current = of_seq.get(node.meta.get("seq_nr", -1)) or of_path.get(own) or current
        node.meta["block"] = current
        node.meta["module"] = path


# ---------------------------------------------------------------------------------------------
# Storages
# ---------------------------------------------------------------------------------------------


def mark_roots(graph: fx.Graph) -> None:
    """Set ``meta["root"]``, the node that created a storage, on that node and on all views of it.

    A node is a view if its storage belongs to another node already; so is a tuple of views. An
    op that returns several new storages has no root; the nodes that take its results are theirs.
    """
    owner: dict[int, fx.Node] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            node.meta["root"] = owner.setdefault(storage_key(value), node)
        elif node.op == "call_function" and isinstance(value, (tuple, list)):
            keys = [storage_key(t) for t in tensors_of(value)]
            if keys and all(key in owner for key in keys):
                node.meta["root"] = owner[keys[0]]


def is_view(node: fx.Node) -> bool:
    """Whether the node creates no storage: a view, or a tuple of views."""
    return node.meta.get("root", node) is not node


def is_getitem(node: fx.Node) -> bool:
    """Whether the node takes one tensor out of a tuple-valued op."""
    return node.op == "call_function" and node.target is operator.getitem


# ---------------------------------------------------------------------------------------------
# FLOPs and bytes
# ---------------------------------------------------------------------------------------------


def _sdpa_cpu(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _sdpa_cpu_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))


def _grouped_mm(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """(tokens, k) x (groups, k, n), or (groups, m, k) x (groups, k, n): 2 FLOPs a product."""
    rows = a[0] * a[1] if len(a) == 3 else a[0]
    return int(2 * rows * a[-1] * b[-1])


def _register_missing_formulas() -> None:
    missing = {
        "_scaled_dot_product_flash_attention_for_cpu": _sdpa_cpu,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _sdpa_cpu_backward,
        "_grouped_mm": _grouped_mm,
    }
    for name, formula in missing.items():
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None and packet not in flop_registry:
            register_flop_formula(packet)(formula)  # type: ignore[arg-type]


def flops_of(node: fx.Node) -> int:
    """FLOPs of one node by shape (a multiply-add counts two); 0 for memory-bound ops."""
    packet = getattr(node.target, "overloadpacket", None)
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    args, kwargs = pytree.tree_map_only(
        fx.Node, lambda n: n.meta.get("val"), (node.args, node.kwargs)
    )
    return int(formula(*args, **kwargs, out_val=node.meta.get("val")))


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def storage_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the whole storage behind a (fake) tensor."""
    return int(tensor.untyped_storage().nbytes())


def device_bytes(tensor: torch.Tensor, device: torch.device) -> int:
    """Bytes of the storage if it is on the compute device, else 0: a random generator's state
    that a CUDA kernel returns on the host takes no device memory."""
    return storage_bytes(tensor) if tensor.device.type == device.type else 0


# ---------------------------------------------------------------------------------------------
# Units
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Where one parameter lies in its unit's flat buffers. Elements, not bytes."""

    name: str
    offset: int
    numel: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitLayout:
    """The flat layout of one unit; every parameter starts at a multiple of the alignment.

    `dtype` is of its states, `copy_dtype` of what the graph reads, `shown_dtype` of the model's
    parameters.
    """

    name: str
    block: str
    slices: tuple[Slice, ...]
    numel: int
    dtype: torch.dtype
    copy_dtype: torch.dtype
    shown_dtype: torch.dtype
    trains: bool


def unit_layouts(
    model: nn.Module, trained: Iterable[str], layout: StateLayout
) -> tuple[UnitLayout, ...]:
    """Group the model's parameters into units that move together.

    One unit a block; outside of blocks, one a module that owns parameters. Parameters that
    train and those that do not, and different dtypes, never share a unit. Tied parameters
    belong to the unit of their first name.

    Raises:
        LohanError: a trained parameter's dtype is neither that of masters nor of compute copies.
    """
    train = set(trained)
    blocks = block_paths(model)
    groups: dict[tuple[str, bool, torch.dtype], list[tuple[str, nn.Parameter]]] = {}
    for name, p in model.named_parameters():
        owner = name.rpartition(".")[0]
        base = blocks.get(owner, owner) or "root"
        groups.setdefault((base, name in train, p.dtype), []).append((name, p))
    bases = [base for base, _, _ in groups]
    found = []
    for (base, trains, dtype), members in groups.items():
        name = base
        if bases.count(base) > 1:
            name = f"{base}[{'train' if trains else 'frozen'},{str(dtype).removeprefix('torch.')}]"
        copy_dtype = layout.copy_dtype(members[0][1])
        master_dtype = layout.master_dtype(members[0][1]) if trains else copy_dtype
        if trains and dtype not in (master_dtype, copy_dtype):
            shown = " or ".join(map(str, dict.fromkeys((master_dtype, copy_dtype))))
            raise LohanError(
                f"{members[0][0]} is trained and {dtype}: in mixed precision with "
                f"dtype={str(copy_dtype).removeprefix('torch.')!r} it shows what training makes of "
                f"it only as {shown}. Convert the model (model.float()) before lohan_fx.compile, "
                "or pass dtype=None"
            )
        step = ALIGNMENT_BYTES // copy_dtype.itemsize
        slices = []
        end = 0
        for fqn, p in members:
            slices.append(
                Slice(
                    name=fqn,
                    offset=end,
                    numel=p.numel(),
                    shape=tuple(p.shape),
                    stride=dense_stride(p),
                )
            )
            end += -(-p.numel() // step) * step
        found.append(
            UnitLayout(
                name=name,
                block=base,
                slices=tuple(slices),
                numel=end,
                dtype=master_dtype,
                copy_dtype=copy_dtype,
                shown_dtype=dtype,
                trains=trains,
            )
        )
    return tuple(found)


# ---------------------------------------------------------------------------------------------
# The workload
# ---------------------------------------------------------------------------------------------


def _name_apart(graph: fx.Graph, units: Collection[str]) -> None:
    """Rename ops that are called like a unit (a module `embedding`, and its op): plans and planners
    name residuals and units alike."""
    names = {node.name for node in graph.nodes}
    for node in graph.nodes:
        if node.name in units:
            base = name = f"{node.name}_op"
            count = itertools.count(1)
            while name in names or name in units:
                name = f"{base}_{next(count)}"
            names.add(name)
            node.name = name


def annotate(
    captured: Captured,
    model: nn.Module,
    layouts: Sequence[UnitLayout],
    states: StateLayout,
    hw: HardwareProfile,
    *,
    name: str | None = None,
) -> Workload:
    """Make the workload of a captured step, and mark its nodes.

    Raises:
        CaptureError: the graph holds a value whose size is not known before it runs.
    """
    _register_missing_formulas()
    graph = captured.graph.graph
    _name_apart(graph, {u.name for u in layouts})
    tied = captured.first_names
    if any("block" not in n.meta for n in graph.nodes if n.op == "call_function"):
        mark_blocks(graph, model)  # else `fusion` has
    mark_roots(graph)
    unit_of = {s.name: u.name for u in layouts for s in u.slices}
    trained = {s.name for u in layouts if u.trains for s in u.slices}

    flat: Any = graph.output_node().args[0]
    gradient_of: dict[str, str] = {}
    returned: set[str] = set()
    for node, role in zip(flat, captured.outputs, strict=True):
        if not isinstance(node, fx.Node):
            continue
        root = node.meta["root"].name
        if role.kind == "gradient" and tied.get(role.target, role.target) in trained:
            gradient_of[tied.get(role.target, role.target)] = root
        else:
            returned.add(root)

    values: dict[str, Value] = {}
    ops: list[Op] = []
    gradients = set(gradient_of.values())
    for node in graph.nodes:
        if node.op == "output":
            continue
        value = node.meta.get("val")
        if any(isinstance(s, torch.SymInt) for t in tensors_of(value) for s in t.shape):
            raise CaptureError(
                f"{op_name(node)} in {node.meta.get('module', '?')} has a data-dependent shape: "
                "lohan_fx plans memory before the step runs and needs fixed shapes"
            )
        if node.op in ("placeholder", "get_attr"):
            if not isinstance(value, torch.Tensor):  # the graph of a higher-order op
                continue
            role = node.meta.get("role")
            kind: Any = role.kind if role is not None else "constant"
            fqn = tied.get(role.target, role.target) if role is not None else ""
            values[node.name] = Value(
                name=node.name,
                num_bytes=storage_bytes(value) if kind != "tangent" else _num_bytes(value),
                kind="input" if kind == "tangent" else kind,
                unit=unit_of.get(fqn) if kind == "parameter" else None,
            )
            continue
        if is_view(node) or is_getitem(node) or not tensors_of(value):
            continue
        op, made = _op(node, hw, captured.device, gradients, returned)
        ops.append(op)
        values.update({v.name: v for v in made})

    units = tuple(_unit(u, gradient_of, values, states) for u in layouts)
    return Workload(
        name=name or type(model).__name__,
        ops=tuple(ops),
        values=values,
        units=units,
        num_tokens=_num_tokens(graph),
    )


def _num_tokens(graph: fx.Graph) -> int:
    """Elements of the largest integer input (token ids); without one, rows of the largest."""
    inputs = [
        n.meta["val"] for n in graph.find_nodes(op="placeholder") if n.meta["role"].kind == "input"
    ]
    if not inputs:
        return 0
    integers = [t.numel() for t in inputs if not t.is_floating_point()]
    largest = max(inputs, key=lambda t: t.numel())
    return max(integers) if integers else len(largest) if largest.dim() else 1


_GATHERS = frozenset({"aten.embedding", "aten.index", "aten.index_select", "aten.gather"})
"""Ops that read no more of their first argument than they return."""


def _gathers_from(node: fx.Node, source: fx.Node) -> bool:
    packet = getattr(node.target, "overloadpacket", None)
    return str(packet) in _GATHERS and node.args[0] is source


def _op(
    node: fx.Node,
    hw: HardwareProfile,
    device: torch.device,
    gradients: set[str],
    returned: set[str],
) -> tuple[Op, list[Value]]:
    results = _results(node, device)
    # what is not on the device stays where it is: it is never swapped, nor made again
    elsewhere = {
        name
        for name, t in _made(node).items()
        if t.device.type != device.type or _is_generator_state(node, t)
    }
    read = {n.meta["root"] for n in node.all_input_nodes if "root" in n.meta}
    for source in node.all_input_nodes:  # a tuple argument: all of its tensors
        if "root" not in source.meta:
            read |= {g.meta["root"] for g in source.users if "root" in g.meta}
    outs = tensors_of(node.meta["val"])
    inner = inner_bytes(node)
    bytes_written = inner + sum(_num_bytes(t) for t in outs)
    bytes_read = inner + sum(
        min(_num_bytes(t), bytes_written) if _gathers_from(node, a) else _num_bytes(t)
        for a in node.all_input_nodes
        for t in tensors_of(a.meta.get("val"))
    )
    flops = flops_of(node)
    dtype = str(outs[0].dtype).removeprefix("torch.")
    rate = hw.flops_per_s(dtype)
    seconds = max(flops / rate, (bytes_read + bytes_written) / hw.device_bytes_per_s)
    block = node.meta["block"]
    op = Op(
        name=node.name,
        target=str(node.target) if isinstance(node.target, OpOverload) else op_name(node),
        block=block,
        phase=node.meta["phase"],
        reads=tuple(sorted({r.name for r in read})),
        writes=tuple(name for name, _ in results),
        flops=flops,
        bytes_read=bytes_read,
        bytes_written=bytes_written,
        seconds=seconds,
        scratch_bytes=node.meta.get("scratch_bytes")
        or own_scratch_bytes(node)
        or workspace_bytes(node),
        recomputable=is_repeatable(node),
    )
    made = [
        Value(
            name=name,
            num_bytes=size,
            kind="gradient" if name in gradients else "activation",
            block=block,
            is_output=name in returned or name in elsewhere,
        )
        for name, size in results
    ]
    return op, made


def _is_generator_state(node: fx.Node, result: torch.Tensor) -> bool:
    """Seed and offset that fused attention returns: traced as device tensors, made on the host."""
    return is_random(node) and storage_bytes(result) <= 16 and not result.is_floating_point()


def _made(node: fx.Node) -> dict[str, torch.Tensor]:
    """Node name → its tensor, for the op itself or the results taken out of it."""
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        return {node.name: value}
    taken = {g.name: g.meta.get("val") for g in node.users}
    return {name: t for name, t in taken.items() if isinstance(t, torch.Tensor)}


def _results(node: fx.Node, device: torch.device) -> list[tuple[str, int]]:
    """(value name, storage bytes) of every storage that the op creates.

    A tuple-valued op names its results by the getitem nodes that take them; results that
    nobody takes are named after the op and die at once.
    """
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        return [(node.name, device_bytes(value, device))]
    taken = {
        storage_key(g.meta["val"]): g.meta["root"].name
        for g in node.users
        if is_getitem(g) and isinstance(g.meta.get("val"), torch.Tensor)
    }
    given = {storage_key(t) for a in node.all_input_nodes for t in tensors_of(a.meta.get("val"))}
    found: dict[int, tuple[str, int]] = {}
    for i, t in enumerate(tensors_of(value)):
        key = storage_key(t)
        if key not in given and key not in found:
            found[key] = (taken.get(key, f"{node.name}.{i}"), device_bytes(t, device))
    return list(found.values())


def _unit(
    u: UnitLayout, gradient_of: Mapping[str, str], values: Mapping[str, Value], states: StateLayout
) -> Unit:
    gradients = tuple(gradient_of[s.name] for s in u.slices if s.name in gradient_of)
    compute = u.numel * u.copy_dtype.itemsize
    state = accumulator = master = 0
    if u.trains:
        flat = u.numel * u.dtype.itemsize
        state = states.num_states * flat
        if states.compute_dtype is not None:
            state += flat
            master = flat if u.shown_dtype == u.dtype else 0
        if states.accumulates:
            accumulator = flat
    return Unit(
        name=u.name,
        block=u.block,
        parameters=tuple(s.name for s in u.slices),
        num_params=u.numel,
        compute_bytes=compute,
        state_bytes=state + accumulator,
        gradient_bytes=sum(
            s.numel * u.copy_dtype.itemsize for s in u.slices if s.name in gradient_of
        ),
        gradients=gradients,
        own_master=u.trains and states.compute_dtype is None,
        accumulator_bytes=accumulator,
        master_bytes=master,
    )
