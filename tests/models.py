"""Tiny models of every kind that lohan_fx must train exactly. Each comes with its own batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

VOCAB = 96
WIDTH = 64
BATCH = 2
LENGTH = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A model and what a training loop needs of it.

    `inputs` makes the keyword arguments of forward; `loss` takes the loss out of what it returns
    (or computes it, where the model has none).
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    loss: Callable[[Any], Tensor]


def make(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model in training mode and its batch; the same ones at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20)
        example = EXAMPLES[name]
        return example.build().train(), example.inputs()


def loss_of(name: str, output: Any) -> Tensor:
    return EXAMPLES[name].loss(output)


def _tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(0, VOCAB, (BATCH, length))


def _text(**more: Callable[[], Tensor]) -> dict[str, Any]:
    return {"input_ids": _tokens(), **{name: value() for name, value in more.items()}}


def _rows() -> dict[str, Any]:
    return {"x": torch.randn(6, 16), "y": torch.randint(0, 10, (6,))}


def _loss_attribute(output: Any) -> Tensor:
    return output.loss


# -- transformers ------------------------------------------------------------------------------


def gpt2() -> nn.Module:
    """Tied embedding and head, Conv1D weights, dropout everywhere."""
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=2,
            n_embd=WIDTH,
            n_head=4,
            vocab_size=VOCAB,
            n_positions=32,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def llama() -> nn.Module:
    """Grouped queries, rotary buffers, RMS norm, attention dropout."""
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=2,
            hidden_size=WIDTH,
            intermediate_size=96,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=VOCAB,
            attention_dropout=0.1,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
    )


def bert() -> nn.Module:
    """A classifier."""
    return BertForSequenceClassification(
        BertConfig(
            num_hidden_layers=2,
            hidden_size=WIDTH,
            intermediate_size=96,
            num_attention_heads=4,
            vocab_size=VOCAB,
            max_position_embeddings=32,
        )
    )


def t5() -> nn.Module:
    """Encoder and decoder; one embedding for both, and for the head.

    Dynamo of torch 2.11 and 2.12 cannot trace how T5's cache is made: it copies the config.
    """
    return T5ForConditionalGeneration(
        T5Config(
            use_cache=torch.__version__ >= (2, 13),
            num_layers=2,
            d_model=WIDTH,
            d_ff=96,
            d_kv=16,
            num_heads=4,
            vocab_size=VOCAB,
            decoder_start_token_id=0,
        )
    )


# -- convolutions ------------------------------------------------------------------------------


class BasicBlock(nn.Module):
    """Two convolutions with BatchNorm beside a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class ResNet(nn.Module):
    """Two stages of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.stage1 = nn.Sequential(BasicBlock(8, 8, 1), BasicBlock(8, 8, 1))
        self.stage2 = nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16, 1))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.relu(self.bn(self.stem(x)))
        x = self.stage2(self.stage1(x)).mean((2, 3))
        return F.cross_entropy(self.head(self.dropout(x)), y)


def _images() -> dict[str, Any]:
    return {"x": torch.randn(4, 3, 8, 8), "y": torch.randint(0, 10, (4,))}


# -- small ones, one property each -------------------------------------------------------------


class Layer(nn.Module):
    """Linear, GELU, dropout, shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(F.gelu(self.linear(x)))


class MLP(nn.Module):
    def __init__(self, width: int = 32, num_layers: int = 3) -> None:
        super().__init__()
        self.start = nn.Linear(16, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(num_layers))
        self.end = nn.Linear(width, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.start(x)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.end(x), y)


class Tied(nn.Module):
    """One matrix as embedding and as head, and one bias under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 32)
        self.layers = nn.ModuleList(Layer(32) for _ in range(2))
        self.layers[1].linear.bias = self.layers[0].linear.bias
        self.head = nn.Linear(32, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())


def frozen() -> nn.Module:
    """The start, one layer, and half of another do not train."""
    model = MLP()
    model.start.requires_grad_(False)
    model.layers[1].requires_grad_(False)
    model.layers[2].linear.bias.requires_grad_(False)
    return model


class Shared(nn.Module):
    """One layer called twice, another layer in between."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(16, 32)
        self.again = Layer(32)
        self.between = Layer(32)
        self.end = nn.Linear(32, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.again(self.between(self.again(self.start(x))))
        return F.cross_entropy(self.end(x), y)


class Unused(MLP):
    """A trainable layer that forward never calls, and a parameter that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = Layer(32)
        self.end.scale = nn.Parameter(torch.ones(3))


class TupleOutput(MLP):
    """The loss first, then detached company in a nested structure."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        start = self.start(x)
        h = start
        for layer in self.layers:
            h = layer(h)
        logits = self.end(h)
        return F.cross_entropy(logits, y), {"logits": logits, "hidden": [start, (h, 3)]}, x


class DictOutput(MLP):
    """No loss inside: two outputs that both need a gradient."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        h = self.start(x)
        for layer in self.layers:
            h = layer(h)
        return {"logits": self.end(h), "norm": h.square().mean(1)}


@dataclass
class Result:
    loss: Tensor
    logits: Tensor
    note: str = "kept"


class DataclassOutput(MLP):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        h = self.start(x)
        for layer in self.layers:
            h = layer(h)
        logits = self.end(h)
        return Result(F.cross_entropy(logits, y), logits)


def _leaf_rows() -> dict[str, Any]:
    rows = _rows()
    rows["x"].requires_grad_()
    return rows


def _outside_loss(output: Mapping[str, Tensor]) -> Tensor:
    return output["logits"].logsumexp(1).mean() + 0.5 * output["norm"].sum()


def _identity(output: Tensor) -> Tensor:
    return output


def _first(output: tuple[Tensor, ...]) -> Tensor:
    return output[0]


EXAMPLES: Mapping[str, Example] = {
    "gpt2": Example(
        build=gpt2, inputs=functools.partial(_text, labels=_tokens), loss=_loss_attribute
    ),
    "llama": Example(
        build=llama, inputs=functools.partial(_text, labels=_tokens), loss=_loss_attribute
    ),
    "bert": Example(
        build=bert,
        inputs=functools.partial(_text, labels=lambda: torch.randint(0, 2, (BATCH,))),
        loss=_loss_attribute,
    ),
    "t5": Example(
        build=t5,
        inputs=functools.partial(_text, labels=lambda: _tokens(8)),
        loss=_loss_attribute,
    ),
    "resnet": Example(build=ResNet, inputs=_images, loss=_identity),
    "mlp": Example(build=MLP, inputs=_rows, loss=_identity),
    "tied": Example(build=Tied, inputs=_text, loss=_identity),
    "frozen": Example(build=frozen, inputs=_rows, loss=_identity),
    "shared": Example(build=Shared, inputs=_rows, loss=_identity),
    "unused": Example(build=Unused, inputs=_rows, loss=_identity),
    "tuple": Example(build=TupleOutput, inputs=_rows, loss=_first),
    "dict": Example(build=DictOutput, inputs=lambda: {"x": torch.randn(6, 16)}, loss=_outside_loss),
    "dataclass": Example(build=DataclassOutput, inputs=_rows, loss=_loss_attribute),
    "leaf": Example(build=MLP, inputs=_leaf_rows, loss=_identity),
}
