"""The rewritten program for people: text with tiers, bytes, slots and source layers; SVG.

The text is made from the graph itself, node by node: the printed program is the executed one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from lohan_fx.errors import LohanError, format_bytes

if TYPE_CHECKING:
    from lohan_fx.passes.base import Mark, Rewrite

_DTYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
}


class ProgramModule(fx.GraphModule):
    """The rewritten joint graph as one GraphModule: walk it, print it, save it, draw it.

    ``str(program)`` is the whole program as text. The two halves that run are cut from this very
    graph.
    """

    def __init__(self, rewrite: Rewrite) -> None:
        super().__init__(rewrite.module, rewrite.graph, class_name="LohanProgram")
        self.text = "\n".join(program_lines(self))

    def __str__(self) -> str:
        return self.text

    def save_text(self, path: str | Path) -> None:
        """Write the printed program to a file."""
        Path(path).write_text(self.text + "\n", encoding="utf-8")

    def draw(self, path: str | Path) -> None:
        """Draw the program as SVG.

        Raises:
            LohanError: pydot or graphviz's ``dot`` is not installed; says how to get them.
        """
        try:
            import pydot
        except ImportError as error:
            raise LohanError(
                "drawing needs pydot and graphviz: pip install pydot, and your system's graphviz"
            ) from error
        dot = pydot.Dot("program", graph_type="digraph", rankdir="TB")
        for node in self.graph.nodes:
            mark: Mark | None = node.meta.get("lohan")
            color = "lightgrey" if mark is None else "lightblue"
            label = node.name if mark is None else f"{mark.kind}\n{mark.name}\n{mark.tier}"
            dot.add_node(pydot.Node(node.name, label=label, style="filled", fillcolor=color))
            for source in node.all_input_nodes:
                dot.add_edge(pydot.Edge(source.name, node.name))
        try:
            dot.write(str(path), format="svg")
        except FileNotFoundError as error:
            raise LohanError("drawing needs graphviz: install it so that `dot` runs") from error


def program_lines(module: fx.GraphModule) -> Iterator[str]:
    """The program, one line an op, grouped by phase and source block."""
    phase = block = None
    inputs = module.graph.find_nodes(op="placeholder")
    yield f"program({len(inputs)} inputs):"
    for node in inputs:
        yield f"  {_name(node)}: {_type(node.meta['val'])}"
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.meta["phase"] != phase:
            phase = node.meta["phase"]
            block = None
            yield f"{phase}:"
        if node.meta.get("block") != block:
            block = node.meta.get("block")
            yield f"  # {block}"
        yield f"  {_line(module, node)}"
    returned = module.graph.output_node().args[0]
    yield f"  return {', '.join(_argument(a) for a in returned)}"  # type: ignore[union-attr]


def _line(module: fx.GraphModule, node: fx.Node) -> str:
    mark: Mark | None = node.meta.get("lohan")
    if mark is not None and not mark.part:
        return _marked_line(module, node, mark)
    arguments = [_argument(a) for a in node.args]
    arguments += [f"{k}={_argument(v)}" for k, v in node.kwargs.items()]
    text = f"{_name(node)} = {_target(node)}({', '.join(arguments)})"
    if isinstance(node.meta.get("val"), torch.Tensor):
        text += f"  # {_type(node.meta['val'])}"
    return text


def _marked_line(module: fx.GraphModule, node: fx.Node, mark: Mark) -> str:
    size = f" {format_bytes(mark.num_bytes)}" if mark.num_bytes else ""
    tensors = [_argument(a) for a in node.args if isinstance(a, fx.Node)]
    if mark.kind in ("offload", "prefetch"):
        where = f"{mark.tier} slot {mark.key}"
        arrow = f"-> {where}" if mark.kind == "offload" else f"<- {where}"
        return f"{_name(node)} = {mark.kind}({tensors[0]}) {arrow}{size}"
    if mark.kind in ("release", "wait"):
        return f"{_name(node)} = {mark.kind}({', '.join(tensors)})  # slot {mark.key}"
    if mark.kind == "fetch_unit":
        return f"{_name(node)} = fetch_unit({mark.name}) <- {mark.tier}{size}"
    if mark.kind == "wait_unit":
        return f"{_name(node)} = wait_unit({tensors[0]})  # {mark.name}"
    if mark.kind == "recompute":
        body = module.get_submodule(str(node.target))
        assert isinstance(body, fx.GraphModule)
        num_ops = sum(1 for n in body.graph.nodes if n.op == "call_function")
        return f"{_name(node)} = {node.target}({', '.join(tensors)})  # {num_ops} ops again"
    given = node.args[0]
    count = sum(1 for g in given if g is not None)  # type: ignore[union-attr]
    arrow = f" -> {mark.tier}{size}" if mark.kind == "emit_gradients" else ""
    return f"{_name(node)} = {mark.kind}({mark.name}: {count} gradients){arrow}"


def _name(node: fx.Node) -> str:
    return f"%{node.name}"


def _target(node: fx.Node) -> str:
    if node.op == "get_attr":
        return f"constant {node.target}"
    name = getattr(node.target, "__name__", str(node.target))
    return re.sub(r"\.default$", "", str(node.target) if "." in str(node.target) else name)


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return _name(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_argument(v) for v in value)}]"
    return str(value)


def _type(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    shape = ",".join(str(s) for s in value.shape)
    name = _DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))
    return f"{name}[{shape}]"
