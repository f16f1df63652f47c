"""The joint graph of a captured step (forward and backward): its roles, and what its nodes are."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx, nn

from lohan_fx import _compat


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

    `graph` is functional, but for sums of gradients that consume a summand (`gradient_sums`):
    placeholders in the order of `inputs`, one flat output tuple in the order of `outputs`; nodes of
    the forward come before those of the backward, which carry ``meta["phase"] == "backward"``.
    `differentiable` are the flat outputs that get a tangent;
    `unflatten(module, flat outputs, args, kwargs)` builds what the module's forward returns.
    `detached` are the flat outputs that would have a gradient in plain PyTorch and get none, by
    name.
    """

    graph: fx.GraphModule
    inputs: tuple[InputRole, ...]
    outputs: tuple[OutputRole, ...]
    num_outputs: int
    differentiable: tuple[int, ...]
    unflatten: Callable[[nn.Module, tuple[Any, ...], tuple[Any, ...], dict[str, Any]], Any]
    compute_dtype: torch.dtype | None
    device: torch.device
    first_names: Mapping[str, str]
    detached: Mapping[int, str] = field(default_factory=dict)

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


def placeholder_name(role: InputRole) -> str:
    """Readable placeholder name: ``p_h_0_ln_1_weight``, ``b_running_mean``, ``input_0``."""
    if role.kind in ("parameter", "buffer"):
        return f"{role.kind[0]}_{re.sub(r'[^0-9a-zA-Z_]', '_', role.target)}"
    return f"{role.kind}_{role.index}"


def is_parameter(node: fx.Node) -> bool:
    """Whether the node is a parameter of the model."""
    return node.op == "placeholder" and bool(node.meta["role"].kind == "parameter")


def storage_id(node: fx.Node) -> int | None:
    """Identity of the storage of a node's tensor, equal for all views; None: it is no tensor."""
    value = node.meta.get("val")
    return _compat.storage_key(value) if isinstance(value, torch.Tensor) else None


def op_name(node: fx.Node) -> str:
    """What a node calls, for people: ``aten.addmm``, ``mul``, ``getitem``."""
    if isinstance(node.target, str):
        return node.target
    if isinstance(node.target, _compat.OpOverload):
        return str(node.target).removesuffix(".default")
    return getattr(node.target, "__name__", str(node.target))


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
