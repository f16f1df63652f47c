"""The rewritten program for people: text with tiers, bytes, slots and source layers; SVG.

The text is made from the graph itself, node by node: the printed program is the executed one.
Results that are taken out of a tuple are printed with the op that returns it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from lohan_fx._compat import LazyGraphModule
from lohan_fx.annotate import is_getitem, storage_bytes
from lohan_fx.errors import LohanError, format_bytes
from lohan_fx.joint_graph import op_name

if TYPE_CHECKING:
    from lohan_fx.joint_graph import OutputRole
    from lohan_fx.passes.base import Mark, Rewrite

WIDTH = 100
"""Columns of the printed program; only names that are longer stick out."""

_DTYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.complex64: "c64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
}

_COLORS = {
    "offload": "lightskyblue",
    "release": "lightskyblue",
    "prefetch": "lightskyblue",
    "wait": "lightskyblue",
    "fetch_unit": "palegreen",
    "wait_unit": "palegreen",
    "host_view": "palegreen",
    "recompute": "orange",
    "write_gradient": "salmon",
    "emit_gradients": "salmon",
    "release_gradients": "salmon",
}


class ProgramModule(LazyGraphModule):
    """The rewritten joint graph as one GraphModule: walk it, print it, save it, draw it.

    ``str(program)`` is the whole program as text. The two halves that run are cut from this very
    graph.
    """

    def __init__(self, rewrite: Rewrite) -> None:
        super().__init__(rewrite.module, rewrite.graph, class_name="LohanProgram")
        self._rewrite = rewrite

    @cached_property
    def text(self) -> str:
        """The program, one line an op (see `program_lines`)."""
        return "\n".join(program_lines(self._rewrite))

    def __str__(self) -> str:
        return self.text

    def save_text(self, path: str | Path) -> None:
        """Write the printed program to a file."""
        Path(path).write_text(self.text + "\n", encoding="utf-8")

    def draw(self, path: str | Path) -> None:
        """Draw the program as SVG: moves blue, parameters green, recompute orange, gradients red.

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
        names = {node: f"n{i}" for i, node in enumerate(self.graph.nodes)}
        for node, name in names.items():
            mark: Mark | None = node.meta.get("lohan")
            label, color = node.name, "lightgrey"
            if mark is not None and not mark.part:
                num_bytes = _bytes(node, mark)
                size = f"\n{format_bytes(num_bytes)}" if num_bytes else ""
                label = f"{mark.kind}\n{mark.name}\n{mark.tier}{size}"
                color = _COLORS[mark.kind]
            dot.add_node(pydot.Node(name, label=label, style="filled", fillcolor=color))
            for source in node.all_input_nodes:
                dot.add_edge(pydot.Edge(names[source], name))
        try:
            dot.write(str(path), format="svg")
        except FileNotFoundError as error:
            raise LohanError("drawing needs graphviz: install it so that `dot` runs") from error


def program_lines(rewrite: Rewrite) -> Iterator[str]:
    """The program, one line an op, grouped by phase and source block.

    A comment ends a line: the result's type, and the source layer where it changes. The ops that
    a recompute region runs again stand behind a bar below it.
    """
    workload, graph = rewrite.workload, rewrite.graph
    yield f"program {workload.name}, strategy {rewrite.plan.strategy!r}:"
    yield from _input_lines(graph)
    phase = block = module = None
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or _folded(node):
            continue
        if node.meta["phase"] != phase:
            phase, block, module = node.meta["phase"], None, None
            yield f"{phase}:"
        if node.meta["block"] != block:
            block = node.meta["block"]
            yield f"  # {block}"
        mark: Mark | None = node.meta.get("lohan")
        if mark is not None and not mark.part:
            yield from _marked_lines(node, mark)
            if mark.kind == "recompute":
                yield from _region_lines(rewrite, node)
            continue
        own = node.meta.get("module")
        layer = own if own not in (module, block) else None
        module = own
        yield from _op_lines(node, "  ", {}, layer)
    flat: Any = graph.output_node().args[0]
    roles = zip(flat, rewrite.captured.outputs, strict=True)
    returned = [
        f"{_role(role)} {_argument(value, {})}" for value, role in roles if value is not None
    ]
    yield from _lines("  ", f"return {', '.join(returned) or 'nothing'}")


def _input_lines(graph: fx.Graph) -> Iterator[str]:
    groups: dict[str, list[str]] = {}
    for node in graph.find_nodes(op="placeholder"):
        text = f"%{node.name} {_type(node.meta['val'])}"
        groups.setdefault(node.meta["role"].kind, []).append(text)
    for kind, texts in groups.items():
        yield from _lines("  ", f"{kind}s: {', '.join(texts)}")


def _op_lines(
    node: fx.Node, indent: str, names: Mapping[fx.Node, str], layer: str | None
) -> Iterator[str]:
    """A compute op; `names` are of nodes that are to be called otherwise."""
    arguments = [_argument(a, names) for a in node.args]
    arguments += [
        f"{key}={_argument(value, names)}"
        for key, value in node.kwargs.items()
        if key not in ("layout", "pin_memory")
    ]
    call = f"constant {node.target}" if node.op == "get_attr" else op_name(node)
    if node.op != "get_attr":
        call += f"({', '.join(arguments)})"
    types = ", ".join(_type(n.meta.get("val")) for n in _results(node) if n is not None)
    comment = f"{types} @ {layer}" if layer else types
    yield from _lines(indent, f"{_assigned(node, names)} = {call}", comment)


def _marked_lines(node: fx.Node, mark: Mark) -> Iterator[str]:
    num_bytes = _bytes(node, mark)
    size = f" {format_bytes(num_bytes)}" if num_bytes else ""
    tensors = ", ".join(_argument(a, {}) for a in node.args if isinstance(a, fx.Node))
    call, comment = f"{mark.kind}({tensors})", ""
    if mark.kind == "offload":
        call += f" -> {mark.tier} slot {mark.key}{size}"
    elif mark.kind == "prefetch":
        call += f" <- {mark.tier} slot {mark.key}{size}"
    elif mark.kind in ("release", "wait"):
        comment = f"slot {mark.key}"
    elif mark.kind == "fetch_unit":
        source = mark.tier if mark.tier != "device" else "master"
        call = f"fetch_unit({mark.name}) <- {source}{size}"
    elif mark.kind == "wait_unit":
        comment = mark.name
    elif mark.kind == "host_view":
        call, comment = f"host_view({mark.name})", f"ops read{size} where it lies, on the host"
    elif mark.kind == "recompute":
        call, comment = f"{node.target}({tensors})", f"runs {mark.name} again"
    else:
        given: Any = node.args[0]
        gradients = ", ".join(_argument(g, {}) for g in given if g is not None)
        call = f"{mark.kind}({mark.name}: {gradients})"
        call += f" -> {mark.tier}{size}" if mark.kind != "release_gradients" else ""
    yield from _lines("  ", f"{_assigned(node, {})} = {call}", comment)


def _bytes(node: fx.Node, mark: Mark) -> int:
    """What a move takes along; of a cast, which moves nothing, the copy that it makes."""
    casts = mark.kind == "fetch_unit" and mark.tier == "device"
    return storage_bytes(node.meta["val"]) if casts else mark.num_bytes


def _region_lines(rewrite: Rewrite, node: fx.Node) -> Iterator[str]:
    """The ops of a region, in terms of what it is called with and what it returns."""
    body = rewrite.module.get_submodule(str(node.target))
    assert isinstance(body, fx.GraphModule)
    given = zip(body.graph.find_nodes(op="placeholder"), node.args, strict=True)
    names = {inner: _argument(outer, {}) for inner, outer in given}
    made: Any = body.graph.output_node().args[0]
    for inner, outer in zip(made, _results(node), strict=True):
        if outer is not None:
            names[inner] = f"%{outer.name}"
    module = None
    for inner in body.graph.nodes:
        if inner.op in ("placeholder", "output") or _folded(inner):
            continue
        own = inner.meta.get("module")
        yield from _op_lines(inner, "  | ", names, own if own != module else None)
        module = own


def _folded(node: fx.Node) -> bool:
    """Whether a node is printed as a result of the op before it."""
    return is_getitem(node) and node in _results(node.all_input_nodes[0])


def _results(node: fx.Node) -> list[fx.Node | None]:
    """The nodes that take a tuple's results, right behind it; None for one that nobody takes.

    An op that returns no tuple is its own result.
    """
    value = node.meta.get("val")
    if not isinstance(value, (tuple, list)):
        return [node]
    taken: list[fx.Node | None] = [None] * len(value)
    after = node.next
    while is_getitem(after) and after.args[0] is node:
        index = after.args[1]
        assert isinstance(index, int)
        if taken[index] is None:
            taken[index] = after
        after = after.next
    return taken if any(taken) else [node]


def _assigned(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    return ", ".join(
        "_" if result is None else names.get(result, f"%{result.name}") for result in _results(node)
    )


def _argument(value: Any, names: Mapping[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names.get(value, f"%{value.name}")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_argument(v, names) for v in value)}]"
    if isinstance(value, torch.dtype):
        return _DTYPES.get(value, str(value))
    return str(value)


def _type(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_type, value))})"
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    shape = ",".join(str(s) for s in value.shape)
    name = _DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))
    return f"{name}[{shape}]"


def _role(role: OutputRole) -> str:
    what = role.target or str(role.index)
    return f"{role.kind} {what}:"


def _lines(indent: str, code: str, comment: str = "") -> Iterable[str]:
    """Code and its comment, broken where they are too long for a line."""
    line = f"{indent}{code}  # {comment}" if comment else indent + code
    if len(line) <= WIDTH:
        return [line]
    more = f"{indent}    "
    lines = textwrap.wrap(
        code,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=more,
        break_long_words=False,
        break_on_hyphens=False,
    )
    if comment and len(lines[-1]) + len(comment) + 4 <= WIDTH:
        lines[-1] += f"  # {comment}"
    elif comment:
        lines.append(f"{more}# {comment}")
    return lines
