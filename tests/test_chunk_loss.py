"""Losses in chunks: found where they should be, equal to rounding, planned like anything else."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM
from transformers.pytorch_utils import Conv1D

import lohan_fx
from lohan_fx.api import LohanModule
from lohan_fx.capture import Captured, capture
from tests.captured import check_exact, leaves, run_eager, run_graph
from tests.models import BATCH, LENGTH, VOCAB, WIDTH, Layer, Tied, gpt2, llama, t5
from tests.test_peak import measure
from tests.training import Squeezed, Training, cpu_hardware, training_of

NUM_CHUNKS = 4


class LossOnly(nn.Module):
    """A model of transformers that returns nothing but its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Any:
        return self.model(**inputs).loss


class Head(nn.Module):
    """Something that makes rows, a head, a loss."""

    def __init__(
        self,
        head: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    ) -> None:
        super().__init__()
        self.body = nn.Linear(16, WIDTH)
        self.head = head
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.head(self.body(x).tanh())
        return self.loss(logits.view(-1, VOCAB), y.flatten())


def bert() -> nn.Module:
    return BertForMaskedLM(
        BertConfig(
            num_hidden_layers=1,
            hidden_size=WIDTH,
            intermediate_size=96,
            num_attention_heads=4,
            vocab_size=VOCAB,
            max_position_embeddings=32,
        )
    )


class Input(Head):
    """The head reads the model's input, which has a gradient."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.loss(self.head(x), y)


def shallow(model: nn.Module) -> nn.Module:
    """One layer is enough, and nothing but the loss."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if config is not None:
            config.use_cache = False
        if isinstance(module, nn.ModuleList) and len(set(map(type, module))) == 1:
            del module[1:]
    return LossOnly(model)


def linear(bias: bool = True) -> nn.Module:
    return nn.Linear(WIDTH, VOCAB, bias=bias)


def untransposed() -> nn.Module:
    """A head as GPT-2 has it in its layers."""
    made: nn.Module = Conv1D(VOCAB, WIDTH)  # type: ignore[no-untyped-call]
    return made


def frozen(model: Head, *names: str) -> nn.Module:
    for name in names:
        model.get_submodule(name).requires_grad_(False)
    return model


def text(length: int = LENGTH) -> dict[str, Tensor]:
    labels = torch.randint(0, VOCAB, (BATCH, length))
    labels[0, : length // 2] = -100  # the whole first chunk, and more
    return {"input_ids": torch.randint(0, VOCAB, (BATCH, LENGTH)), "labels": labels}


def rows(*shape: int) -> dict[str, Tensor]:
    return {"x": torch.randn(*shape, 16).double(), "y": torch.randint(0, VOCAB, shape)}


def summed(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="sum")


def upcast(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), y, ignore_index=3)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "gpt2": (lambda: shallow(gpt2()), text),
    "llama": (lambda: shallow(llama()), text),
    "bert": (lambda: shallow(bert()), text),
    "t5": (lambda: shallow(t5()), lambda: text(8)),
    "tied and shifted": (Tied, lambda: {"input_ids": text()["input_ids"]}),
    "mean": (lambda: Head(linear(bias=False)), lambda: rows(3, 8)),
    "sum": (lambda: Head(linear(), summed), lambda: rows(16)),
    "cast": (lambda: Head(linear(), upcast), lambda: rows(16)),
    "23 rows": (lambda: Head(linear()), lambda: rows(23)),
    "weight not transposed": (lambda: Head(untransposed()), lambda: rows(2, 8)),
    "input": (
        lambda: Input(linear()),
        lambda: {"x": torch.randn(16, WIDTH).double().requires_grad_(), "y": rows(16)["y"]},
    ),
    "frozen head": (lambda: frozen(Head(linear()), "head"), lambda: rows(2, 8)),
    "frozen body": (lambda: frozen(Head(linear()), "body"), lambda: rows(2, 8)),
}


def make(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20)
        build, inputs = MODELS[name]
        return build().double().train(), inputs()


def chunk_bytes(inputs: dict[str, Tensor]) -> int:
    """So that there are four chunks."""
    shifted = "labels" not in inputs and "y" not in inputs
    targets = inputs["input_ids"][:, 1:] if shifted else inputs.get("labels", inputs.get("y"))
    assert targets is not None
    return -(-targets.numel() // NUM_CHUNKS) * VOCAB * 4


def num_chunks(captured: Captured) -> int:
    found = [re.match(r"chunk(\d+)_", n.name) for n in captured.graph.graph.nodes]
    return len({m[1] for m in found if m})


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("bert", "t5") else ())
        for name in MODELS
    ],
)
def test_a_step_in_chunks_equals_eager_to_rounding(name: str) -> None:
    model, inputs = make(name)
    captured = capture(model, (), inputs, loss_chunk_bytes=chunk_bytes(inputs))
    assert num_chunks(captured) == NUM_CHUNKS
    check_close(captured, model, inputs, 1e-6 if name == "cast" else 1e-12)


def check_close(
    captured: Captured, model: nn.Module, inputs: dict[str, Tensor], tolerance: float
) -> None:
    """The captured graph's step is eager's, to rounding."""
    captured.graph.graph.lint()
    want, tangents = run_eager(model, (), inputs, loss_of, contextlib.nullcontext())
    have = run_graph(captured, model, (), inputs, tangents)
    first = captured.first_name
    gradients = {first(n): g for n, g in have.gradients.items()}
    assert gradients.keys() == {first(n) for n in want.gradients}
    torch.testing.assert_close(have.outputs, want.outputs, rtol=tolerance, atol=tolerance)
    for key, gradient in want.gradients.items():
        torch.testing.assert_close(gradients[first(key)], gradient, rtol=tolerance, atol=tolerance)
    assert torch.equal(have.rng, want.rng)


def loss_of(output: Any) -> Tensor:
    loss: Tensor = leaves(output)[0]
    return loss


def test_the_loss_and_gradients_of_logits_are_made_as_without_chunks() -> None:
    """A mean over no rows is not a number; the others divide by the rows that count."""
    model, inputs = make("mean")
    captured = capture(model, (), inputs, loss_chunk_bytes=chunk_bytes(inputs))
    inputs["y"].fill_(-100)
    want, tangents = run_eager(model, (), inputs, loss_of, contextlib.nullcontext())
    have = run_graph(captured, model, (), inputs, tangents)
    assert have.outputs[0].isnan()
    assert want.outputs[0].isnan()
    inputs["y"][1, 2] = 5
    check_close(captured, model, inputs, 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_neither_overflows_nor_counts_wrongly(dtype: torch.dtype) -> None:
    """A sum of 5000 losses is beyond float16, and 5000 is no bfloat16."""
    head = nn.Linear(WIDTH, VOCAB)
    model = Head(head).to(dtype)
    inputs = {"x": torch.randn(5000, 16).to(dtype), "y": torch.randint(0, VOCAB, (5000,))}
    with torch.no_grad():
        head.weight.mul_(100)
    captured = capture(model, (), inputs, loss_chunk_bytes=VOCAB * 4 * 1250)
    assert num_chunks(captured) == NUM_CHUNKS
    want, tangents = run_eager(model, (), inputs, loss_of, contextlib.nullcontext())
    have = run_graph(captured, model, (), inputs, tangents)
    assert torch.equal(have.outputs[0], want.outputs[0])
    for key, gradient in have.gradients.items():
        torch.testing.assert_close(gradient, want.gradients[key], rtol=0.05, atol=0.02)


def test_evaluation_has_chunks_too() -> None:
    model, inputs = make("tied and shifted")
    model.eval()
    with torch.no_grad():
        captured = capture(model, (), inputs, grad=False, loss_chunk_bytes=chunk_bytes(inputs))
        assert num_chunks(captured) == NUM_CHUNKS
        have = run_graph(captured, model, (), inputs, ())
        torch.testing.assert_close(have.outputs[0], model(**inputs), rtol=1e-12, atol=0)


def test_logits_that_are_returned_stay_whole() -> None:
    """Bit for bit what they were, and so is the loss."""
    torch.manual_seed(0)
    model, inputs = AndLogits(linear()).double(), rows(16)
    captured = capture(model, (), inputs, loss_chunk_bytes=chunk_bytes(inputs))
    assert num_chunks(captured) == NUM_CHUNKS
    check_close(captured, model, inputs, 1e-12)
    want, tangents = run_eager(model, (), inputs, loss_of, contextlib.nullcontext())
    have = run_graph(captured, model, (), inputs, tangents)
    assert all(map(torch.equal, have.outputs, want.outputs))


# -- left alone --------------------------------------------------------------------------------


class AndLogits(Head):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.head(self.body(x).tanh())
        return self.loss(logits, y), logits


class AndNorm(Head):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.head(self.body(x).tanh())
        return self.loss(logits, y) + logits.square().mean()


def weighted(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, weight=torch.ones(VOCAB, dtype=logits.dtype))


def smoothed(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, label_smoothing=0.1)


def each_row(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="none").mean()


def capped(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.tanh(), y)


def shifted(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits[:-1], y[1:])


LEFT_ALONE: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "returned, and shifted": (lambda: AndLogits(linear(), shifted), 1),
    "read by something else": (lambda: AndNorm(linear()), 1),
    "weighted": (lambda: Head(linear(), weighted), 1),
    "smoothed": (lambda: Head(linear(), smoothed), 1),
    "each row": (lambda: Head(linear(), each_row), 1),
    "capped": (lambda: Head(linear(), capped), 1),
    "no linear head": (lambda: Head(nn.Sequential(linear(), nn.GELU())), 1),
    "small": (lambda: Head(linear()), 16 * VOCAB * 4),
    "off": (lambda: Head(linear()), 0),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_alone(name: str) -> None:
    build, limit = LEFT_ALONE[name]
    model = build().double()
    captured = check_exact(model, (), rows(16), loss_chunk_bytes=limit)
    assert num_chunks(captured) == 0


# -- training ----------------------------------------------------------------------------------


class Large(nn.Module):
    """A vocabulary that outweighs all else."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 32)
        self.layers = nn.ModuleList(Layer(32) for _ in range(2))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def large(vocabulary: int) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    ids, targets = (torch.randint(0, vocabulary, (4, 100)) for _ in range(2))
    return Large(vocabulary).train(), {"ids": ids, "targets": targets}


def compiled(
    model: nn.Module, directory: Path, strategy: str | Squeezed, limit: int
) -> tuple[LohanModule, Training]:
    training = training_of("sgd", model)
    made = lohan_fx.compile(
        model,
        hw=cpu_hardware(directory),
        optimizer=training.optimizer,
        strategy=strategy,
        loss_chunk_bytes=limit,
    )
    assert isinstance(made, LohanModule)
    return made, training


@pytest.mark.parametrize(
    "strategy",
    [
        *("lohan", "swap-all"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("keep-all", "recompute-all")),
    ],
)
def test_training_equals_eager_to_rounding(strategy: str, tmp_path: Path) -> None:
    vocabulary = 1000
    model, inputs = large(vocabulary)
    model = model.double()
    plain = copy.deepcopy(model)
    tight = strategy if strategy == "keep-all" else Squeezed(strategy)
    made, training = compiled(model, tmp_path, tight, 100 * vocabulary * 4)
    other = training_of("sgd", plain)
    for seed in range(2):
        losses = []
        for each, side in ((made, training), (plain, other)):
            torch.manual_seed(seed)
            loss = each(**inputs)
            loss.backward()
            side.step()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
    found = dict(made.named_parameters())
    for key, wanted in plain.named_parameters():
        torch.testing.assert_close(found[key], wanted, rtol=1e-12, atol=1e-13)
    assert "chunk3_log_softmax" in str(made.graph)
    chunks = {v: r.action for v, r in made.plan.residuals.items() if v.endswith("log_softmax")}
    assert len(chunks) == NUM_CHUNKS
    if strategy in ("recompute-all", "swap-all"):
        assert set(chunks.values()) == {strategy.removesuffix("-all")}
    made.lohan.close()


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11
@pytest.mark.parametrize(
    "strategy",
    [
        *("keep-all", "recompute-all"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("lohan", "swap-all")),
    ],
)
def test_the_peak_falls_as_predicted(strategy: str, tmp_path: Path) -> None:
    vocabulary = 10_000
    logits = 400 * vocabulary * 4
    whole = peak_bytes(vocabulary, tmp_path, strategy, 0)
    chunked = peak_bytes(vocabulary, tmp_path, strategy, logits // 8)
    assert whole > 3 * logits  # log-softmax, and the gradients of loss and log-softmax
    weight = vocabulary * 32 * 4
    kept = logits if strategy == "keep-all" else 0
    assert chunked < kept + 3 * logits / 8 + 2 * weight + 2**19


def peak_bytes(vocabulary: int, directory: Path, strategy: str, limit: int) -> int:
    """Predicted and measured."""
    model, inputs = large(vocabulary)
    tight = strategy if strategy == "keep-all" else Squeezed(strategy, 0.0)
    made, training = compiled(model, directory, tight, limit)
    made(**inputs).backward()
    training.step()
    measured = measure(lambda: made(**inputs).backward())
    memory = made.lohan.program().memory
    predicted = memory.peak_bytes - memory.static_bytes
    assert measured.peak_bytes == pytest.approx(predicted, rel=0.01)
    made.lohan.close()
    return predicted
