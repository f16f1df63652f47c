"""Products with odd sizes, whose kernels are slow, are padded or cut: the same values."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import lohan_fx
import lohan_fx.compiled.building
from lohan_fx.annotate import (
    is_view,
    mark_blocks,
    mark_roots,
)
from lohan_fx.api import LohanModule
from lohan_fx.capture import Captured, capture
from lohan_fx.fusion import Kernels, align, fuse
from lohan_fx.hardware import HardwareProfile
from tests.captured import run_eager, run_graph
from tests.fusing import (
    CPU,
    check_kernels,
    fuse_everything,
)
from tests.training import (
    training_of,
)

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    fuse_everything(monkeypatch)


class Odd(nn.Module):
    """A head over an odd vocabulary; with `logits`, these are returned, too."""

    def __init__(self, width: int, columns: int, *, bias: bool, logits: bool = False) -> None:
        super().__init__()
        self.start = nn.Linear(16, width)
        self.head = nn.Linear(width, columns, bias=bias)
        self.logits = logits

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.head(nn.functional.gelu(self.start(x)))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        return (loss, logits) if self.logits else loss


def odd(
    rows: int, columns: int, *, bias: bool, logits: bool = False
) -> tuple[nn.Module, dict[str, Any]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Odd(24, columns, bias=bias, logits=logits).double()
        x = torch.randn(1, rows, 16, dtype=torch.float64)
        return model, {"x": x, "y": torch.randint(0, columns, (1, rows))}


def aligned(model: nn.Module, inputs: dict[str, Any], **options: Any) -> tuple[Captured, int]:
    captured = capture(model, (), inputs, **options)
    mark_blocks(captured.graph.graph, model)
    mark_roots(captured.graph.graph)
    # `fuse` pads what it fuses with the padding, which is nothing in float64
    count = align.align(captured.graph.graph, lambda node: node.op == "call_function")
    captured.graph.graph.lint()
    captured.graph.recompile()
    return captured, count


class Strides(fx.Interpreter):
    """Runs a graph and holds every value to its planned layout."""

    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        planned = n.meta.get("val")
        if n.op == "call_function" and isinstance(planned, Tensor):
            assert found.shape == planned.shape, n
            assert found.stride() == planned.stride(), n
            assert found.untyped_storage().nbytes() == planned.untyped_storage().nbytes(), n
        return found


def check_layouts(captured: Captured, model: nn.Module, inputs: dict[str, Any]) -> None:
    named = dict(model.named_parameters())
    arguments = [
        named[r.target].detach() if r.kind == "parameter"
        else torch.ones((), dtype=torch.float64) if r.kind == "tangent"
        else list(inputs.values())[r.index]
        for r in captured.inputs
    ]  # fmt: skip
    with torch.no_grad():
        Strides(captured.graph).run(*arguments)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("columns", [100, 101])
@pytest.mark.parametrize("rows", [36, 37])
def test_odd_products_have_the_same_values(rows: int, columns: int, bias: bool) -> None:
    model, inputs = odd(rows, columns, bias=bias)
    captured, count = aligned(model, inputs)
    assert bool(count) == bool(columns % 2 or rows % 2)  # weights' gradients sum over rows
    want, tangents = run_eager(model, (), inputs, lambda loss: loss, nullcontext())
    have = run_graph(captured, model, (), inputs, tangents)
    torch.testing.assert_close(have.outputs, want.outputs, rtol=1e-13, atol=0)
    assert have.gradients.keys() == want.gradients.keys()
    for name, gradient in have.gradients.items():
        torch.testing.assert_close(gradient, want.gradients[name], rtol=1e-11, atol=1e-15)
        assert gradient.is_contiguous()


@pytest.mark.parametrize("fused", [False, True])
def test_layouts_are_as_planned_behind_odd_products(fused: bool) -> None:
    """Views follow the rows' new stride; sizes of storages are what memory plans count."""
    model, inputs = odd(37, 101, bias=True)
    captured, count = aligned(model, inputs)
    assert count
    if fused:
        captured = capture(model, (), inputs)
        fuse(captured, model, Kernels(CPU, compiled=False))
    check_layouts(captured, model, inputs)
    heads = [n for n in captured.graph.graph.nodes if n.target is align.aligned_addmm]
    assert [n.meta["val"].stride() for n in heads] == [(24, 1), (102, 1)][-len(heads) :]
    views = [u for n in heads for u in n.users if is_view(u)]
    assert {max(u.meta["val"].stride()[-2:]) for u in views} == {102}


def test_returned_logits_are_left_alone() -> None:
    model, inputs = odd(36, 101, bias=True, logits=True)
    captured, _ = aligned(model, inputs)
    assert not any(
        n.target in (align.aligned_mm, align.aligned_addmm) and 101 in n.meta["val"].shape
        for n in captured.graph.graph.nodes
        if n.meta.get("phase") == "forward"
    )
    with torch.no_grad():
        _, wanted = model(**inputs)
    _, tangents = run_eager(model, (), inputs, lambda o: o[0], nullcontext())
    have = run_graph(captured, model, (), inputs, tangents)
    assert torch.equal(have.outputs[1], wanted)
    assert have.outputs[1].is_contiguous()


def test_small_products_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(align, "MIN_ELEMENTS", 2**20)
    assert aligned(*odd(37, 101, bias=True))[1] == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(36, 40), (37, 41), (1, 9), (40, 5)])
def test_aligned_products_by_themselves(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, columns = shape
    a = torch.randint(-3, 4, (rows, 16), generator=generator).to(dtype)
    b = torch.randint(-3, 4, (16, columns), generator=generator).to(dtype)
    bias = torch.randint(-3, 4, (columns,), generator=generator).to(dtype)
    for found, wanted in (
        (align.aligned_mm(a, b), a @ b),
        (align.aligned_mm(a, b.t().contiguous().t()), a @ b),
        (align.aligned_addmm(bias, a, b), torch.addmm(bias, a, b)),
    ):
        assert torch.equal(found, wanted)  # whole numbers: no order of sums rounds
        assert found.stride(0) * found.element_size() % align.ROW_BYTES == 0
        assert found.stride(0) - columns < align.ROW_BYTES


def test_sums_of_float16_are_not_cut() -> None:
    """A part of a sum may be too large for it where the sum is not."""
    a, b = torch.zeros(8, 80, dtype=torch.float16)[:, :73], torch.zeros(73, 8, dtype=torch.float16)
    a[:, -1], b[-1] = 300.0, 300.0
    a[:, 0], b[0] = -250.0, 250.0
    assert torch.equal(align.aligned_mm(a, b), a @ b)
    assert (a @ b).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_odd_sums_are_cut_where_rows_are_aligned(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient that a head passes on sums over the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    step = align.ROW_BYTES // dtype.itemsize
    depth = 9 * step + 1

    def whole(rows: int, columns: int) -> Tensor:
        values = torch.randint(-3, 4, (rows, columns), generator=generator)
        return values.to(dtype)

    padded = torch.full((37, 10 * step), torch.nan).to(dtype)
    padded[:, :depth] = whole(37, depth)
    b = whole(depth, 5 * step)
    depths = []
    mm, addmm_ = torch.mm, Tensor.addmm_

    def counted(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        depths.append(a.shape[1])
        return mm(a, b, out=out)

    def added(self: Tensor, a: Tensor, b: Tensor) -> Tensor:
        depths.append(a.shape[1])
        return addmm_(self, a, b)

    monkeypatch.setattr(torch, "mm", counted)
    monkeypatch.setattr(Tensor, "addmm_", added)
    for a, second, parts in (
        (padded[:, :depth], b, [1, 9 * step]),
        (padded[:, :depth].contiguous(), b, [depth]),  # rows that are not aligned
        (padded[:, : 9 * step], b[: 9 * step], [9 * step]),
    ):
        found = align.aligned_mm(a, second)
        wanted = a.double() @ second.double()  # oneDNN's bfloat16 reads behind rows, with AMX
        assert torch.equal(found, wanted.to(dtype))
        assert found.is_contiguous()
        assert depths == parts
        depths.clear()


def test_the_gradient_that_a_head_passes_on_is_cut() -> None:
    model, inputs = odd(36, 101, bias=True)
    captured, _ = aligned(model, inputs)
    passed = [
        n
        for n in captured.graph.graph.nodes
        if n.target is align.aligned_mm
        and n.meta["phase"] == "backward"
        and n.args[0].meta["val"].shape == (36, 101)
    ]
    assert len(passed) == 1
    check_layouts(captured, model, inputs)


@pytest.mark.parametrize("strategy", ["recompute-all", "swap-all"])
def test_odd_steps_are_eager_to_rounding(
    strategy: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = check_kernels(monkeypatch)
    plain, inputs = odd(37, 101, bias=True)
    model, _ = odd(37, 101, bias=True)
    training = training_of("adam", model)
    reference = training_of("adam", plain)
    model = lohan_fx.compile(
        model, hw=hw, optimizer=training.optimizer, strategy=strategy, states="host", fused=True
    )
    for _ in range(3):
        losses = []
        for side, its in ((plain, reference), (model, training)):
            loss = side(**inputs)
            loss.backward()
            its.step()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=0)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
    assert made
    assert isinstance(model, LohanModule)
    assert "aligned_addmm" in str(model.graph)
    model.lohan.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [101, 127, 129])
def test_products_of_padded_matrices_take_the_padding_along(
    columns: int, dtype: torch.dtype
) -> None:
    """The gradient of a head: its rows are the columns of the padded matrix."""
    generator = torch.Generator().manual_seed(0)
    step = align.PADDED_BYTES // dtype.itemsize
    stride = -(-columns // step) * step
    whole = torch.full((37, stride), torch.nan).to(dtype)
    gradient = whole[:, :columns]
    gradient.copy_(torch.randint(-3, 4, (37, columns), generator=generator))
    x = torch.randint(-3, 4, (37, 24), generator=generator).to(dtype)
    found = align.aligned_mm(gradient.t(), x)
    assert torch.equal(found, gradient.t().contiguous() @ x)
    assert found.is_contiguous()
    assert found.untyped_storage().nbytes() == stride * 24 * dtype.itemsize  # one product of all


def test_heads_gradients_are_computed_with_their_padding() -> None:
    """In the graph, too: the layout that is planned says so. (With the loss in chunks: a gradient
    that is returned as it is made is left alone.)"""
    model, inputs = odd(37, 101, bias=False)
    captured, _ = aligned(model, inputs, loss_chunk_bytes=12 * 101 * 4)
    products = [
        n
        for n in captured.graph.graph.nodes
        if n.target is align.aligned_mm and n.meta["phase"] == "backward"
    ]
    step = align.PADDED_BYTES // 8
    rows = -(-101 // step) * step
    sizes = [
        n.meta["val"].untyped_storage().nbytes() for n in products if n.meta["val"].shape[0] == 101
    ]
    assert sizes == [rows * 24 * 8] * len(sizes)
    assert sizes
    check_layouts(captured, model, inputs)
