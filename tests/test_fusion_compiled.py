"""Kernels by Inductor: eager to rounding, with the layouts that are planned."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import lohan_fx
import lohan_fx.compiled.building
from lohan_fx.annotate import (
    mark_roots,
)
from lohan_fx.api import LohanModule
from lohan_fx.capture import capture
from lohan_fx.fusion import Kernels, fuse
from lohan_fx.fusion.clusters import _Finder, _replace
from lohan_fx.hardware import HardwareProfile
from lohan_fx.models.gpt import GPT
from tests.captured import run_eager, run_graph
from tests.fusing import (
    CPU,
    Checked,
    Draft,
    attending_llama,
    check_kernels,
    fuse_everything,
    fused_nodes,
    replace_all,
)
from tests.training import (
    training_of,
)

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    fuse_everything(monkeypatch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("vocabulary", [96, 101])
def test_compiled_steps_are_eager_to_rounding(
    vocabulary: int, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SGD: Adam makes steps of full size from gradients that are rounding only."""

    def train(model: nn.Module, training: Any) -> list[Tensor]:
        losses = []
        for _ in range(3):
            loss = model(ids, targets)
            loss.backward()
            training.step()
            losses.append(loss.detach())
        return losses

    def new() -> nn.Module:
        torch.manual_seed(0)
        return GPT(2, 2, 32, vocabulary=vocabulary, sequence=12)

    torch.manual_seed(1)
    ids, targets = torch.randint(0, vocabulary, (2, 3, 12))
    plain = new()
    wanted = train(plain, training_of("sgd", plain))
    made = check_kernels(monkeypatch, compiled=True)
    model = new()
    training = training_of("sgd", model)
    model = lohan_fx.compile(
        model, hw=hw, optimizer=training.optimizer, strategy="recompute-all", fused=True
    )
    found = train(model, training)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    assert made[0].calls > 0
    assert isinstance(model, LohanModule)
    model.lohan.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_llamas_are_eager_to_rounding() -> None:
    """Rotary embeddings, masks and norms, forward and backward."""
    model, inputs = attending_llama(2)
    captured = capture(model, (), inputs)
    made = Checked(CPU, compiled=True)
    assert fuse(captured, model, made) > made.kernels.count > 0
    assert None not in made.kernels._made.values()
    want, tangents = run_eager(model, (), inputs, lambda output: output.loss, nullcontext())
    have = run_graph(captured, model, (), inputs, tangents)
    assert made.calls >= made.kernels.count
    torch.testing.assert_close(have.outputs, want.outputs, rtol=1e-5, atol=1e-6)
    assert have.gradients.keys() == want.gradients.keys()
    for name, gradient in have.gradients.items():
        torch.testing.assert_close(gradient, want.gradients[name], rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_kernel_that_reads_nothing() -> None:
    """A causal mask is made of numbers alone."""
    draft = Draft()
    rows, columns = (draft(aten.arange.default, 8) for _ in "ab")
    below = draft(aten.le.Tensor, columns, draft(aten.unsqueeze.default, rows, 1))
    mask = draft(aten.where.self, below, *(draft(aten.scalar_tensor.default, v) for v in (0.0, -1)))
    module = draft.finish(draft(aten.mm.default, mask, draft.placeholder("x")))
    finder = draft.finder()
    (cluster,) = finder.clusters()
    assert _replace(finder, cluster, module, Kernels(CPU, compiled=True))
    (made,) = fused_nodes(module.graph)
    assert not made.args
    assert torch.equal(made.target(), torch.ones(8, 8).triu(1).neg())  # type: ignore[operator]


def compiled(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[fx.GraphModule, list[int]]:
    """A function whose clusters Inductor compiled, and how many ops each has."""
    module = make_fx(function, tracing_mode="fake")(*inputs)
    module.graph.output_node().args = ((module.graph.output_node().args[0],),)
    for node in module.graph.nodes:
        if node.op == "call_function":
            node.meta.update(phase="forward", block="a")
    mark_roots(module.graph)
    finder = _Finder(module.graph, CPU)
    replace_all(module, finder, compiled=True)
    module.recompile()
    return module, [len(n.meta["members"]) for n in fused_nodes(module.graph)]


BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("function", "members"),
    [
        # Inductor would not round these numbers to their dtype
        (lambda x: torch.full((8,), 0.1, dtype=BF16).float() + x, [2]),
        (lambda x: torch.full((8,), 1 / 3, dtype=FP16) * x + 1.0, [2]),
        (lambda x: torch.full_like(x, 0.1, dtype=BF16).float() + x, [2]),
        (lambda x: torch.arange(1000, 1008, dtype=BF16).float() + x, [2]),
        (lambda x: torch.arange(0.3, 700.25, 0.1).view(-1, 8) + x.sin() * 0.0, [3]),
        # and here there is nothing to round
        (lambda x: torch.full((8,), 0.5, dtype=BF16).float() + x, [2]),
        (lambda x: torch.arange(8).float() + x, [2]),
        (lambda x: torch.arange(8, dtype=torch.float32) + x, [1]),
        (lambda x: torch.ones_like(x, dtype=BF16).float() + x, [3]),
        (lambda x: torch.full((8,), 0.1) + x, [1]),
    ],
)
def test_created_numbers_are_rounded_to_their_dtype(
    function: Callable[[Tensor], Tensor], members: list[int]
) -> None:
    x = torch.arange(8.0)
    module, found = compiled(function, x)
    assert torch.equal(module(x)[0], function(x))
    assert found == members


@pytest.mark.filterwarnings("ignore")
def test_joined_images_keep_their_layout() -> None:
    """Also of equal pieces, for which Inductor has a way of its own."""

    def join(x: Tensor) -> Tensor:
        return (torch.cat([x, x], 1) + 1.0) * 2.0

    x = torch.randn(2, 4, 6, 5).contiguous(memory_format=torch.channels_last)
    module, members = compiled(join, x)
    assert members == [3]
    found, wanted = module(x)[0], join(x)
    assert torch.equal(found, wanted)
    assert found.stride() == wanted.stride() == (240, 1, 40, 8)


@pytest.mark.parametrize("strides", [(1, 8), (64,), None])
def test_kernels_with_another_layout_are_given_up(
    strides: tuple[int, ...] | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    original = lohan_fx._compat.inductor_kernel

    def another(*args: Any) -> Any:
        return original(*args)[0], [strides]

    monkeypatch.setattr(lohan_fx._compat, "inductor_kernel", another)
    draft = Draft()
    x = draft.placeholder("x")
    body = draft.finish(draft(aten.sin.default, draft(aten.cos.default, x)))
    assert Kernels(CPU, compiled=True)(body, "sine") is None
    assert "sine is not fused: Inductor made" in caplog.text


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, BF16, FP16])
@pytest.mark.parametrize("least", ["-inf", "min"])
def test_an_attention_mask_is_one_op_in_any_dtype(dtype: torch.dtype, least: str) -> None:
    number = torch.finfo(dtype).min if least == "min" else float("-inf")

    def mask() -> Tensor:
        below = torch.arange(8) <= torch.arange(8)[:, None]
        return torch.where(below, *(torch.scalar_tensor(v, dtype=dtype) for v in (0.0, number)))

    module, found = compiled(mask)
    assert found == [2]  # the comparison and the choice
    assert [n.op for n in module.graph.nodes] == ["call_function", "output"]
    assert torch.equal(module()[0], mask())
