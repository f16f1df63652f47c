"""Gradients of tied parameters, summed in place: where that is safe, exact, in what memory."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import lohan_fx
import lohan_fx.capture
from lohan_fx.api import LohanModule
from lohan_fx.capture import Captured, capture
from lohan_fx.fusion import Kernels, fuse
from lohan_fx.fusion.align import aligned_mm
from lohan_fx.gradient_sums import (
    add_embedding_gradient,
    add_gradient,
    give_layouts,
    sum_gradients_in_place,
    sums_in_place,
)
from lohan_fx.joint_graph import storage_id
from lohan_fx.passes.verify import check_program
from lohan_fx.planners import Choices
from lohan_fx.program import residency
from lohan_fx.workload import Workload
from tests.captured import Step, check_exact, run_graph, step_of
from tests.fusing import fuse_everything
from tests.test_peak import TOLERANCE, Measured, measure
from tests.training import Squeezed, cpu_hardware, identical, remember_captures, training_of
from tests.workloads import small_hardware

aten = torch.ops.aten
BF16, F32 = torch.bfloat16, torch.float32
VOCAB, WIDTH = 100, 32
KIB = 2**10


@contextmanager
def chunks_of(num_bytes: int | None) -> Iterator[None]:
    """Captures with chunks of at most so much; None: without the rewrite."""

    def rewrite(*arguments: Any) -> int:
        if num_bytes is None:
            return 0
        return sum_gradients_in_place(*arguments, chunk_bytes=num_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lohan_fx.capture, "sum_gradients_in_place", rewrite)
        yield


def sums(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if sums_in_place(n)]


# -- the op ------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding_idx", [-1, 3])
@pytest.mark.parametrize("width", [1, 7, 64, 100])
@pytest.mark.parametrize("dtype", [F32, BF16, torch.float64])
def test_chunks_of_columns_have_the_same_bits(
    dtype: torch.dtype, width: int, padding_idx: int
) -> None:
    generator = torch.Generator().manual_seed(width)
    ids = torch.randint(0, 20, (5, 40), generator=generator)
    gradient = torch.randn(5, 40, width, generator=generator).to(dtype)
    head = torch.randn(20, width, generator=generator).to(dtype)
    part = aten.embedding_dense_backward.default(gradient, ids, 20, padding_idx, False)
    for chunks in (1, 2, 4, 8, 32, 1024):
        total = head.clone()
        made = add_embedding_gradient(total, gradient, ids, 20, padding_idx, chunks)
        assert made.data_ptr() == total.data_ptr()
        assert identical(made, head + part)
        assert identical(total, part + head)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [40, 5000])  # CUDA has a kernel for few, and one that sorts
@pytest.mark.parametrize("padding_idx", [-1, 3])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_chunks_of_columns_have_the_same_bits_on_a_gpu(
    dtype: torch.dtype, padding_idx: int, num_tokens: int
) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    ids = torch.randint(0, 700, (2, num_tokens), generator=generator, device="cuda")
    gradient = torch.randn(2, num_tokens, 520, generator=generator, device="cuda").to(dtype)
    head = torch.randn(1000, 520, generator=generator, device="cuda").to(dtype)
    part = aten.embedding_dense_backward.default(gradient, ids, 1000, padding_idx, False)
    for chunks in (1, 4, 8, 64):
        total = head.clone()
        add_embedding_gradient(total, gradient, ids, 1000, padding_idx, chunks)
        assert identical(total, head + part)


def test_a_plain_sum_has_the_same_bits() -> None:
    a, b = torch.randn(3, 5).bfloat16(), torch.randn(5, 3).bfloat16().t()
    total = a.clone()
    assert add_gradient(total, b) is total
    assert identical(total, a + b)


def test_only_what_is_larger_than_a_chunk_is_cut() -> None:
    graph, roles = unwritten(tied)
    assert sum_gradients_in_place(graph, roles) == 1
    (made,) = sums(graph)
    assert made.args[-1] == 1
    row = VOCAB * F32.itemsize  # of all rows, a column
    for limit, chunks in ((WIDTH * row, 1), (WIDTH * row - 1, 2), (WIDTH // 8 * row, 8), (1, 32)):
        graph, roles = unwritten(tied)
        assert sum_gradients_in_place(graph, roles, limit) == 1
        assert sums(graph)[0].args[-1] == chunks


# -- models ------------------------------------------------------------------------------------


def gpt2() -> nn.Module:
    config = GPT2Config(
        n_layer=2, n_embd=WIDTH, n_head=2, vocab_size=VOCAB, n_positions=32,
        bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)  # type: ignore[no-any-return]


def llama() -> nn.Module:
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=WIDTH, intermediate_size=64, num_attention_heads=2,
        vocab_size=VOCAB, tie_word_embeddings=True, pad_token_id=3, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)  # type: ignore[no-any-return]


def t5() -> nn.Module:
    config = T5Config(
        d_model=WIDTH, d_kv=16, d_ff=64, num_layers=1, num_heads=2, vocab_size=VOCAB,
        decoder_start_token_id=0, use_cache=False, dropout_rate=0.1,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)  # type: ignore[no-any-return]


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "gpt2": (gpt2, 1),
    "llama": (llama, 1),
    "t5": (t5, 2),  # decoder and encoder read one embedding, and so does the head
}


def made(name: str, dtype: torch.dtype = F32) -> tuple[nn.Module, dict[str, Any]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODELS[name][0]().to(dtype).train()
        ids = torch.randint(4, VOCAB, (2, 12))
    mask = torch.ones_like(ids)
    mask[-1, -3:] = 0
    inputs = {"input_ids": ids.where(mask > 0, 3), "labels": ids, "attention_mask": mask}
    if name == "t5":
        inputs["decoder_attention_mask"] = mask
    return model, inputs


@pytest.mark.parametrize(("name", "dtype"), [("llama", BF16), ("t5", BF16)])
def test_models_are_exact(name: str, dtype: torch.dtype) -> None:
    model, inputs = made(name, dtype)
    with chunks_of(VOCAB * WIDTH * dtype.itemsize // 4):
        captured = check_exact(model, (), inputs)
    graph = captured.graph.graph
    graph.lint()
    found = sums(graph)
    assert [n.target for n in found] == [add_embedding_gradient] * MODELS[name][1]
    assert [n.args[-1] for n in found] == [4] * len(found)
    assert set(found[-1].users) == {graph.output_node()}


def test_a_loss_in_chunks_has_the_same_bits() -> None:
    """The head's gradient is a sum over chunks of rows already, and is added to after the last."""
    model, inputs = made("llama", BF16)
    found = []
    for num_bytes in (None, KIB):
        with chunks_of(num_bytes):
            captured = capture(model, (), inputs, loss_chunk_bytes=VOCAB * 4 * 6)
        (tangent,) = (r for r in captured.inputs if r.kind == "tangent")
        tangents = [torch.ones(()) if i == tangent.index else None for i in range(2)]
        found.append(run_graph(captured, model, (), inputs, tangents).gradients)
    (node,) = sums(captured.graph.graph)
    total: Any = node.args[0]
    while storage_id(total.all_input_nodes[0]) == storage_id(total):
        (total,) = total.all_input_nodes
    assert total.target is aten.addmm.default
    assert found[0].keys() == found[1].keys()
    assert all(identical(found[0][key], gradient) for key, gradient in found[1].items())


@pytest.mark.parametrize(
    ("name", "strategy", "options"),
    [
        ("gpt2", "recompute-all", {"states": "device", "accumulate": 2}),
        ("llama", "swap-all", {"states": "ssd", "schedule": "deferred"}),
        ("gpt2", "go-memferry", {"states": "host"}),
        ("llama", "lohan", {"states": "host", "gradients": "kept"}),
        pytest.param(
            *("t5", "lohan", {"states": "host", "gradients": "kept"}), marks=pytest.mark.slow
        ),
    ],
)
def test_training_is_plain_pytorchs(
    name: str,
    strategy: str,
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    remember_captures(monkeypatch, f"{name} with tied weights, in chunks of 1 KiB")
    model, inputs = made(name)
    plain = copy.deepcopy(model)
    training, other = training_of("adamw", model), training_of("adamw", plain)
    with chunks_of(KIB):
        ours = lohan_fx.compile(
            model,
            hw=cpu_hardware(tmp_path),
            optimizer=training.optimizer,
            strategy=Squeezed(strategy),
            **options,
        )
        assert isinstance(ours, LohanModule)
        torch.manual_seed(1)
        losses = steps(ours, training, inputs, options)
    torch.manual_seed(1)
    wanted = steps(plain, other, inputs, options)
    assert all(identical(a, b) for a, b in zip(losses, wanted, strict=True))
    found = dict(ours.named_parameters())
    assert all(identical(found[key], p) for key, p in plain.named_parameters())
    assert "add_embedding_gradient" in str(ours.graph)
    ours.lohan.close()


def steps(model: nn.Module, training: Any, inputs: dict[str, Any], options: Any) -> list[Tensor]:
    found = []
    for _ in range(2):
        for _ in range(options.get("accumulate", 1)):
            loss = model(**inputs).loss
            loss.backward()
            found.append(loss.detach())
        if options.get("gradients") == "kept":
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        training.step()
    return found


# -- what is rewritten, and what is not --------------------------------------------------------


class Toy(nn.Module):
    """A matrix [VOCAB, WIDTH], another one, and what `body` does with them."""

    def __init__(self, body: Callable[..., Tensor], dtype: torch.dtype, turned: bool) -> None:
        super().__init__()
        weight = torch.randn(WIDTH, VOCAB, dtype=dtype).t()
        self.weight = nn.Parameter(weight if turned else weight.contiguous())
        self.other = nn.Parameter(torch.randn(VOCAB, WIDTH, dtype=dtype))
        self.body = body

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        return self.body(self.weight, self.other, ids, x)


def toy(body: Callable[..., Tensor], *, turned: bool = False) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    return Toy(body, F32, turned), (torch.randint(0, VOCAB, (2, 6)), torch.randn(2, 6, WIDTH))


def tied(w: Tensor, other: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    return ((F.embedding(ids, w).sin() + x) @ w.t()).cos().sum()


def head_first(w: Tensor, other: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    """What forward does last backward does first."""
    y = (x @ w.t()).cos().sum()
    return y + F.embedding(ids, w).sin().sum() * y


def by_frequency(w: Tensor, other: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    y = F.embedding(ids, w, scale_grad_by_freq=True)
    return ((y.sin() + x) @ w.t()).cos().sum()


def with_padding(w: Tensor, other: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    return ((F.embedding(ids, w, padding_idx=2).sin() + x) @ w.t()).cos().sum()


def read_twice(w: Tensor, other: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    """The head's gradient is that of `other`, too, which is returned."""
    return ((F.embedding(ids, w).sin() + x) @ (w + other).t()).cos().sum()


def two_heads(w: Tensor, other: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    return ((x @ w.t()).cos() @ w).sin().sum() + (x @ other.t()).sum()


def head_of_a_part(w: Tensor, other: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    return ((F.embedding(ids, w).sin() + x) @ w[: VOCAB // 2].t()).cos().sum()


def elementwise(w: Tensor, other: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    return w.sin().sum() + w.cos().sum() * w.exp().sum()


def doubled(w: Tensor, other: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    return (x @ (w + w).t()).cos().sum()


def in_autocast(w: Tensor, other: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    y = F.embedding(ids, w).sin() + x
    with torch.autocast("cpu", BF16):
        logits = y @ w.t()
    return logits.float().cos().sum()


def into_an_activation(w: Tensor, other: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    """What is summed is no gradient of a parameter."""
    y = x @ other.t() @ w
    return (y @ w.t()).cos().sum() + (y @ other.t()).sin().sum()


EMBEDDING, PLAIN = add_embedding_gradient, add_gradient

CASES: dict[str, tuple[Callable[..., Tensor], list[Any]]] = {
    "tied": (tied, [EMBEDDING]),
    "padding": (with_padding, [EMBEDDING]),
    "autocast": (in_autocast, [EMBEDDING]),
    "embedding's gradient first": (head_first, [PLAIN]),
    "by frequency": (by_frequency, [PLAIN]),
    "read twice": (read_twice, [PLAIN]),
    "no embedding": (two_heads, [PLAIN]),
    "of a part": (head_of_a_part, []),
    "elementwise": (elementwise, []),
    "the same twice": (doubled, []),
}


@pytest.mark.parametrize("name", CASES)
def test_sums(name: str) -> None:
    body, targets = CASES[name]
    model, inputs = toy(body)
    with chunks_of(VOCAB * WIDTH):
        captured = check_exact(model, inputs)
    graph = captured.graph.graph
    graph.lint()
    assert [n.target for n in sums(graph)] == targets
    for node in sums(graph):
        total: Any = node.args[0]
        assert set(total.users) == {node}
        if name == "read twice":
            assert total.target is aten.embedding_dense_backward.default


def test_a_transposed_parameter_is_left_alone() -> None:
    model, inputs = toy(tied, turned=True)
    captured = check_exact(model, inputs)
    assert not sums(captured.graph.graph)


def test_sums_that_are_no_parameters_gradient_are_left_alone() -> None:
    model, inputs = toy(into_an_activation)
    graph = check_exact(model, inputs).graph.graph
    kept = [n for n in graph.nodes if n.target is aten.add.Tensor and n.meta["phase"] == "backward"]
    assert kept
    assert all(WIDTH in n.meta["val"].shape and VOCAB in n.meta["val"].shape for n in sums(graph))


def unwritten(body: Callable[..., Tensor]) -> tuple[fx.Graph, Any]:
    model, inputs = toy(body)
    with chunks_of(None):
        captured = capture(model, inputs)
    return captured.graph.graph, captured.outputs


def the_sum(graph: fx.Graph) -> fx.Node:
    (found,) = (
        n
        for n in graph.find_nodes(op="call_function", target=aten.add.Tensor)
        if n.meta["phase"] == "backward" and n.meta["val"].shape == (VOCAB, WIDTH)
    )
    return found


def with_alpha(graph: fx.Graph, add: fx.Node) -> None:
    add.kwargs = {"alpha": 2}


def read_by_another(graph: fx.Graph, add: fx.Node) -> None:
    with graph.inserting_after(add):
        graph.call_function(aten.sin.default, (add,)).meta = dict(add.meta)


def of_another_dtype(graph: fx.Graph, add: fx.Node) -> None:
    head = next(a for a in add.all_input_nodes if a.target is not EMBEDDING)
    head.meta["val"] = head.meta["val"].double()


def saved(graph: fx.Graph, add: fx.Node) -> None:
    for node in graph.find_nodes(op="call_function", target=aten.mm.default):
        node.meta["phase"] = "forward"
    for node in graph.find_nodes(op="call_function", target=aten.embedding_dense_backward.default):
        node.meta["phase"] = "forward"


@pytest.mark.parametrize("change", [with_alpha, read_by_another, of_another_dtype, saved])
def test_left_alone(change: Callable[[fx.Graph, fx.Node], None]) -> None:
    graph, roles = unwritten(tied)
    change(graph, the_sum(graph))
    before = str(graph)
    assert sum_gradients_in_place(graph, roles) == 0
    assert str(graph) == before


def test_the_op_is_never_run_twice_nor_left_out() -> None:
    model, inputs = toy(tied)
    captured = capture(model, inputs)
    (node,) = sums(captured.graph.graph)
    assert node.is_impure()
    workload = step_of(model, dict(zip(("ids", "x"), inputs, strict=True)), "toy").workload
    assert not workload.ops[workload.op_index[node.name]].recomputable


# -- memory ------------------------------------------------------------------------------------

LARGE, HIDDEN = 16384, 128
WHOLE = LARGE * HIDDEN * F32.itemsize
NUM_TOKENS = 4


class Large(nn.Module):
    """A model whose largest tensors are the gradients of its tied embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LARGE, HIDDEN)
        self.layer = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, LARGE, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layer(self.embedding(ids))), ids)


def measured_and_planned(
    chunk_bytes: int | None, directory: Path, **options: Any
) -> tuple[int, int]:
    torch.manual_seed(0)
    model, ids = Large(), torch.randint(0, LARGE, (NUM_TOKENS,))
    training = training_of("sgd", model)
    with chunks_of(chunk_bytes):
        ours = lohan_fx.compile(
            model,
            hw=cpu_hardware(directory),
            optimizer=training.optimizer,
            strategy="keep-all",
            **options,
        )
        assert isinstance(ours, LohanModule)
        ours.lohan.prepare(ids)
    gc.collect()
    found: list[Measured] = []
    for _ in range(2):
        found.append(measure(lambda: ours(ids).backward()))
        training.step()
    memory = ours.lohan.program().memory
    assert memory.peak_bytes == ours.plan.prediction.peak_device_bytes
    assert sum(size for _, size in memory.at_peak) == memory.peak_bytes - memory.static_bytes
    ours.lohan.close()
    return max(m.peak_bytes for m in found), memory.peak_bytes - memory.static_bytes


def test_the_peak_falls_by_what_is_saved(tmp_path: Path) -> None:
    options = {"states": "device", "schedule": "deferred"}  # an update would be the peak
    before = measured_and_planned(None, tmp_path, **options)
    whole = measured_and_planned(WHOLE, tmp_path, **options)
    chunks = measured_and_planned(WHOLE // 8, tmp_path, **options)
    for measured, planned in (before, whole, chunks):
        assert planned == pytest.approx(measured, rel=0.001)
    read = NUM_TOKENS * HIDDEN * F32.itemsize  # the embedding's output gradient, which lives on
    assert before[1] - whole[1] == WHOLE - read
    assert whole[1] - chunks[1] == WHOLE - WHOLE // 8 - read // 8  # a copy of its columns


def test_units_that_are_fetched(tmp_path: Path) -> None:
    """The embedding itself, the head's gradient, and that of the logits are the peak then."""
    before = measured_and_planned(None, tmp_path, states="host")
    chunks = measured_and_planned(WHOLE // 8, tmp_path, states="host")
    for measured, planned in (before, chunks):
        assert planned == pytest.approx(measured, rel=TOLERANCE)
    assert before[1] > 3 * WHOLE
    assert chunks[1] < 2.1 * WHOLE


def large_step() -> Step:
    torch.manual_seed(0)
    return step_of(Large(), {"ids": torch.randint(0, LARGE, (NUM_TOKENS,))}, "large")


def the_op(workload: Workload) -> Any:
    (found,) = (op for op in workload.ops if "add_embedding_gradient" in op.target)
    return found


def test_the_workload_counts_what_is_allocated() -> None:
    with chunks_of(WHOLE // 4):
        ours = large_step()
    with chunks_of(None):
        plain = large_step()
    op = the_op(ours.workload)
    width = HIDDEN // 4
    assert op.scratch_bytes == (LARGE + NUM_TOKENS) * width * F32.itemsize - WHOLE
    assert ours.workload.values[op.writes[0]].kind == "gradient"
    assert ours.workload.values[op.writes[0]].num_bytes == WHOLE
    two = [o for o in plain.workload.ops if o.writes == op.writes or "embedding_dense" in o.target]
    assert len(two) == 2
    assert op.bytes_read == sum(o.bytes_read for o in two)
    assert op.bytes_written == sum(o.bytes_written for o in two)
    actions = dict.fromkeys(ours.workload.residuals, "keep")
    tiers = dict.fromkeys(ours.workload.unit_by_name, "device")
    plan = ours.plan(Choices(actions=actions, unit_tiers=tiers), schedule="deferred")
    made = ours.rewritten(plan)
    assert residency(check_program(made)).peak_name == op.name


def test_a_plan_for_a_gpu_counts_it_too(tmp_path: Path) -> None:
    with torch.device("meta"):
        model, ids = Large(), torch.zeros(NUM_TOKENS, dtype=torch.long)
    with chunks_of(WHOLE // 4):
        planned = lohan_fx.plan(model, ids, hw=small_hardware())
    op = the_op(planned.workload)
    assert op.scratch_bytes < 0
    assert {o.name for o in planned.workload.ops if o.scratch_bytes} == {op.name}


def test_rows_of_padding_stay_with_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """An odd vocabulary: the head's gradient has a few rows more in memory than it shows."""
    fuse_everything(monkeypatch)

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(1001, 64)
            self.head = nn.Linear(64, 1001, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self.embedding(ids)), ids)

    torch.manual_seed(0)
    model, inputs = Odd(), {"ids": torch.randint(0, 1001, (24,))}
    captured: Captured = capture(model, (), inputs)
    assert fuse(captured, model, Kernels(torch.device("cpu"), compiled=False))
    (node,) = sums(captured.graph.graph)
    total: Any = node.args[0]
    assert any(n.target is aligned_mm for n in captured.graph.graph.nodes)
    storages = [n.meta["val"].untyped_storage().nbytes() for n in (node, total)]
    assert storages == [1024 * 64 * 4] * 2
    give_layouts(captured.graph.graph)
    check_exact(
        model, (), inputs, captured=captured, equal=partial(torch.allclose, rtol=1e-4, atol=1e-7)
    )
