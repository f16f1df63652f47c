"""The printed program: tiers, bytes, slots, source layers; as text, as SVG, as a graph to walk."""

from __future__ import annotations

import re
import shutil
import sys
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import fx

import lohan_fx
from lohan_fx.errors import LohanError, format_bytes
from lohan_fx.passes import Rewrite
from lohan_fx.planners import Choices
from lohan_fx.printing import WIDTH, ProgramModule
from tests.captured import HW, step
from tests.models import make
from tests.test_passes import RECOMPUTE, SWAP, swapping, two


@cache
def mixed() -> Rewrite:
    """Every kind of op of ours, and every tier."""
    made = step("gpt2")
    actions = ("swap", "keep", "recompute")
    tiers = ("host", "ssd", "device")
    residuals = made.workload.residuals
    choices = Choices(
        actions={v: actions[k % 3] for k, v in enumerate(residuals)},  # type: ignore[misc]
        swap_tiers={v: tiers[k % 2] for k, v in enumerate(residuals)},  # type: ignore[misc]
        unit_tiers={u.name: tiers[k % 3] for k, u in enumerate(made.layouts)},  # type: ignore[misc]
    )
    return made.rewritten(made.plan(choices))


def lines_of(text: str) -> list[str]:
    """Lines that were broken, put together again."""
    text = re.sub(r"\n {6,}# ", "  # ", text)
    return re.sub(r"\n {6,}", " ", text).splitlines()


def test_movements_show_tier_slot_and_bytes() -> None:
    rewrite = mixed()
    text = str(ProgramModule(rewrite))
    lines = {line.split(" = ")[0].strip(): line for line in lines_of(text) if " = " in line}
    seen = set()
    for node in rewrite.graph.nodes:
        mark = node.meta.get("lohan")
        if mark is None or mark.part or mark.kind in ("wait_unit", "recompute"):
            continue
        line = lines[f"%{node.name}"]
        seen.add((mark.kind, mark.tier))
        if mark.kind in ("offload", "prefetch"):
            arrow = {"offload": "->", "prefetch": "<-"}[mark.kind]
            size = format_bytes(mark.num_bytes)
            assert line.endswith(f" {arrow} {mark.tier} slot {mark.key} {size}")
        elif mark.kind in ("release", "wait"):
            assert line.endswith(f"  # slot {mark.key}")
        elif mark.kind == "fetch_unit":
            size = format_bytes(mark.num_bytes)
            assert line.endswith(f"fetch_unit({mark.name}) <- {mark.tier} {size}")
        elif mark.kind == "emit_gradients":
            size = f" {format_bytes(mark.num_bytes)}" if mark.num_bytes else ""
            assert line.endswith(f") -> {mark.tier}{size}")
    for kind in ("offload", "prefetch", "fetch_unit", "emit_gradients"):
        assert {(kind, "host"), (kind, "ssd")} <= seen
    assert ("emit_gradients", "device") in seen


def test_every_op_stands_there_in_order() -> None:
    rewrite = mixed()
    text = "\n".join(lines_of(str(ProgramModule(rewrite))))
    at = 0
    for node in rewrite.graph.nodes:
        if node.op in ("call_function", "call_module") and not node.name.startswith("getitem"):
            found = re.compile(rf"%{node.name}(,| =|$)").search(text, at)
            if found is None:  # an op that returns a tuple: printed by its results
                assert isinstance(node.meta["val"], (tuple, list)), node.name
                continue
            at = found.start()
    assert at > 0


def test_phases_blocks_and_source_layers() -> None:
    lines = lines_of(str(ProgramModule(mixed())))
    assert lines[0] == "program gpt2, strategy 'test':"
    assert [line for line in lines if line in ("forward:", "backward:")] == [
        "forward:",
        "backward:",
    ]
    blocks = [line[4:] for line in lines if line.startswith("  # ")]
    expected = ["transformer", "transformer.h.0", "transformer.h.1", "transformer.ln_f"]
    assert blocks == [*expected, *expected[::-1]]
    (first,) = [line for line in lines if line.startswith("  %native_layer_norm_r0,")]
    assert "aten.native_layer_norm(" in first
    assert first.endswith("@ transformer.h.0.ln_1")
    assert "f32[2,12,64], f32[2,12,1], f32[2,12,1]" in first
    assert "@ transformer.h.1.mlp.c_fc" in "\n".join(lines)


def test_a_region_shows_what_it_runs_again() -> None:
    lines = str(ProgramModule(two().rewritten(swapping(RECOMPUTE)))).splitlines()
    k = next(i for i, line in enumerate(lines) if "recompute_0_layers_0(" in line)
    assert lines[k : k + 3] == [
        "  %tanh_again = recompute_0_layers_0(%input_0, %p_layers_0_w)  # runs layers.0 again",
        "  | %mm = aten.mm(%input_0, %p_layers_0_w)  # f32[6,4] @ layers.0",
        "  | %tanh_again = aten.tanh(%mm)  # f32[6,4]",
    ]


def test_what_is_returned_and_what_is_given() -> None:
    text = str(ProgramModule(two().rewrite(swapping(SWAP))))
    assert "  parameters: %p_layers_0_w f32[8,4], %p_layers_1_w f32[4,2]\n" in text
    assert "  inputs: %input_0 f32[6,8]\n" in text
    assert text.endswith(
        "return output 0: %mm_1, gradient layers.0.w: %mm_4, gradient layers.1.w: %mm_2"
    )
    assert str(ProgramModule(two().rewritten(swapping(SWAP)))).endswith("  return output 0: %mm_1")


def test_lines_are_not_too_long() -> None:
    for line in str(ProgramModule(mixed())).splitlines():
        assert len(line) <= WIDTH


def test_save_text(tmp_path: Path) -> None:
    program = ProgramModule(two().rewritten(swapping(SWAP)))
    program.save_text(tmp_path / "program.txt")
    assert (tmp_path / "program.txt").read_text(encoding="utf-8") == f"{program}\n"


# -- drawing ---------------------------------------------------------------------------------------


def test_drawing_gives_an_svg(tmp_path: Path) -> None:
    pytest.importorskip("pydot")
    if shutil.which("dot") is None:
        pytest.skip("graphviz is not installed")
    program = ProgramModule(two().rewritten(swapping(SWAP)))
    program.draw(tmp_path / "program.svg")
    root = ElementTree.parse(tmp_path / "program.svg").getroot()
    assert root.tag.endswith("svg")
    words = [e.text for e in root.iter() if e.tag.endswith("text")]
    assert {"offload", "prefetch", "tanh", "ssd", "96 B", "mm_1"} <= set(words)
    boxes = [e for e in root.iter() if e.get("class") == "node"]
    assert len(boxes) == len(program.graph.nodes)


def test_drawing_without_graphviz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pydot")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LohanError, match="needs graphviz"):
        ProgramModule(two().rewritten(swapping(SWAP))).draw(tmp_path / "program.svg")
    assert not (tmp_path / "program.svg").exists()


def test_drawing_without_pydot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydot", None)
    with pytest.raises(LohanError, match="pip install pydot"):
        ProgramModule(two().rewritten(swapping(SWAP))).draw(tmp_path / "program.svg")


# -- model.graph -----------------------------------------------------------------------------------


def test_the_graph_of_a_compiled_model_can_be_walked() -> None:
    model, kwargs = make("mlp")
    model = lohan_fx.compile(model, hw=HW, strategy="swap-all", states="host", swap_to="host")
    try:
        model.lohan.prepare(**kwargs)
        graph = model.graph
        assert isinstance(graph, fx.GraphModule)
        marks = [n.meta["lohan"].kind for n in graph.graph.nodes if "lohan" in n.meta]
        assert marks.count("offload") == marks.count("prefetch") > 0
        graph.graph.lint()
        targets = {n.target for n in graph.graph.nodes if n.op == "call_function"}
        assert torch.ops.lohan.wait.default in targets
        assert torch.ops.aten.addmm.default in targets
        assert "def forward(self, " in graph.code
        assert str(graph).startswith("program MLP, strategy 'swap-all':")
    finally:
        model.lohan.close()
