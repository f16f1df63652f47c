"""The models of the four papers: the named GPTs, SSDTrain's BERTs, MemFerry's models.

Names: ``gpt-13b`` (LoHan, Table IV); ``bert-8192x4`` (SSDTrain: hidden x layers, one GPU's half
under tensor parallelism); ``bert-base``, ``roberta``, ``bert-large``, ``gpt2-medium`` and
``xl-1b`` … (MemFerry).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lohan_fx.models import is_known, named
from lohan_fx.workload import Workload

if TYPE_CHECKING:
    from torch import nn

    from lohan_fx.hardware import HardwareProfile

VOCABULARY = 50257
"""LoHan §V-A."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model.

    Attributes:
        forward_flops: of one sample, matmuls and attention, by the usual formula; embeddings are
            gathers and cost none.
        build: makes (module, keyword arguments of forward for a batch); None for named models.
        optimizer: of `torch.optim`, for the size of its states.
        mixed: whether fp32 masters are kept beside the half-precision parameters.
    """

    name: str
    sequence: int
    forward_flops: float
    build: Callable[[], tuple[nn.Module, Callable[[int], dict[str, Any]]]] | None = None
    optimizer: str = "adamw"
    mixed: bool = True

    def model_flops(self, batch: int) -> float:
        """FLOPs of a step without recomputation: FLOP_f + 2·FLOP_f (LoHan, Table I)."""
        return 3 * self.forward_flops * batch

    def trace(self, batch: int, hw: HardwareProfile) -> Workload:
        """Capture the step on meta tensors; blocks that repeat are replicated."""
        import torch

        from lohan_fx.model_arguments import make_tracer

        if self.build is None:
            return _deterministic(make_tracer(self.name, hw=hw).workload(batch).workload)
        with torch.device("meta"):
            module, inputs = self.build()
        if not self.mixed:
            module.bfloat16()
        dtype = torch.bfloat16 if self.mixed else None
        tracer = make_tracer(module, inputs, hw=hw, optimizer=self.optimizer, dtype=dtype)
        return _deterministic(tracer.workload(batch).workload)


def _deterministic(workload: Workload) -> Workload:
    """Fused attention may run again: traced without dropout, it draws nothing."""
    ops = tuple(
        replace(op, recomputable=True) if "scaled_dot_product" in op.target else op
        for op in workload.ops
    )
    return replace(workload, ops=ops)


def decoder_flops(layers: int, hidden: int, sequence: int, vocabulary: int) -> float:
    """One sample: 24·h² a token and layer, attention over the whole sequence, the head."""
    block = 24 * hidden**2 + 4 * sequence * hidden
    return sequence * (layers * block + 2 * hidden * vocabulary)


@dataclass(frozen=True, slots=True)
class _Encoder:
    """Sizes of a BERT; `shards` GPUs share each block (tensor parallelism).

    `masked`: it is pre-trained on masked words; else it learns to classify.
    """

    layers: int
    heads: int
    hidden: int
    vocabulary: int
    sequence: int
    shards: int = 1
    dropout: float = 0.1
    masked: bool = False

    def __call__(self) -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
        import torch

        from benchmarks.papers.encoder import Encoder

        module = Encoder(
            self.layers,
            self.heads,
            self.hidden,
            self.vocabulary,
            self.sequence,
            self.shards,
            self.dropout,
            masked=self.masked,
        )

        def inputs(batch: int) -> dict[str, Any]:
            ids = torch.empty((batch, self.sequence), dtype=torch.long, device="meta")
            classes = torch.empty(batch, dtype=torch.long, device="meta")
            return {"ids": ids, "labels": ids if self.masked else classes}

        return module, inputs


@dataclass(frozen=True, slots=True)
class _Decoder:
    """Sizes of a GPT that no table of LoHan has."""

    layers: int
    heads: int
    hidden: int
    vocabulary: int
    sequence: int

    def __call__(self) -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
        import torch

        from lohan_fx.models.gpt import GPT

        module = GPT(
            self.layers,
            self.heads,
            self.hidden,
            vocabulary=self.vocabulary,
            sequence=self.sequence,
        )

        def inputs(batch: int) -> dict[str, Any]:
            ids = torch.empty((batch, self.sequence), dtype=torch.long, device="meta")
            return {"ids": ids, "targets": ids}

        return module, inputs


def _memferry() -> dict[str, _Encoder | _Decoder]:
    """MemFerry §V-A: transformers' own sizes; transformerXL from 0.7B to 6.7B with hidden 2048 to
    4096, embeddings of 32768 to 130528 rows, sequences of 378 to 4096. Which model has which is
    not stated: here sequences grow with the model."""
    return {
        "bert-base": _Encoder(12, 12, 768, 30522, 512),
        "roberta": _Encoder(12, 12, 768, 50265, 512),
        "bert-large": _Encoder(24, 16, 1024, 30522, 512),
        "gpt2-medium": _Decoder(24, 16, 1024, 50257, 1024),
        "xl-1b": _Encoder(17, 16, 2048, 65536, 384),
        "xl-2.7b": _Encoder(32, 20, 2560, 65536, 512),
        "xl-4.3b": _Encoder(33, 25, 3200, 98304, 768),
        "xl-6.7b": _Encoder(32, 32, 4096, 65536, 1024),
    }


def spec_of(name: str) -> ModelSpec:
    """The model of that name; `LohanError` lists the named ones if it is none."""
    if is_known(name):
        m = named(name)
        flops = decoder_flops(m.layers, m.hidden, m.sequence, VOCABULARY)
        return ModelSpec(name=name, sequence=m.sequence, forward_flops=flops)
    if found := re.fullmatch(r"bert-(\d+)x(\d+)", name):
        hidden, layers = int(found[1]), int(found[2])
        # SSDTrain §IV-A: two GPUs for tensor parallelism, heads of 128, sequence 1024, pure half
        # precision, SGD. Without dropout, whose masks Table III's estimate does not have.
        half = _Encoder(
            layers, hidden // 128, hidden, 30720, 1024, shards=2, dropout=0.0, masked=True
        )
        flops = decoder_flops(layers, hidden, 1024, 30720) / 2 + 2 * 1024 * hidden**2
        return ModelSpec(
            name=name,
            sequence=1024,
            forward_flops=flops,
            build=half,
            optimizer="sgd",
            mixed=False,
        )
    sizes = _memferry().get(name)
    if sizes is None:
        named(name)  # raises, with the names that are known
        raise AssertionError
    head = sizes.vocabulary if isinstance(sizes, _Decoder) else 0
    flops = decoder_flops(sizes.layers, sizes.hidden, sizes.sequence, head)
    return ModelSpec(name=name, sequence=sizes.sequence, forward_flops=flops, build=sizes)
