"""The run that `life.py` starts, kills and times: a Llama, its batches, its training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR
from transformers import LlamaConfig, LlamaForCausalLM

import lohan_fx
from lohan_fx.hardware import HardwareProfile

GIB = 2**30
MICRO_BATCHES = 4
ATTEMPTS = 3
"""At killing a process while it saves."""
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its batches, its budget and its life. `cap` is the device memory of the process in
    GiB, of which CUDA's own share and fragments take a part; None: no cap. `resident` is a budget
    that holds everything. Checkpoints are saved after the steps `saves`; the first kill is in the
    middle of step `kill` between them, the second in the second save."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    batch: int
    sequence: int
    cap: float | None
    device: str
    resident: str
    steps: int
    saves: tuple[int, int]
    kill: int

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.batch * self.sequence


FULL = Case(
    hidden=2048,
    layers=16,
    heads=32,
    kv_heads=8,
    ffn=8192,
    vocabulary=128256,
    batch=8,
    sequence=1024,
    cap=12,
    device="10.5GiB",
    resident="70GiB",
    steps=30,
    saves=(12, 20),
    kill=17,
)
TINY = Case(
    hidden=192,
    layers=4,
    heads=4,
    kv_heads=2,
    ffn=512,
    vocabulary=4096,
    batch=2,
    sequence=64,
    cap=None,
    device="12MiB",
    resident="1GiB",
    steps=9,
    saves=(3, 7),
    kill=5,
)


class Llama(LlamaForCausalLM):  # type: ignore[misc]
    """Returns the loss alone: logits that nobody gets can be made in chunks."""

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = super().forward(input_ids=ids, labels=ids, use_cache=False).loss
        return loss


def build(case: Case) -> Llama:
    config = LlamaConfig(
        hidden_size=case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads,
        intermediate_size=case.ffn,
        vocab_size=case.vocabulary,
        max_position_embeddings=case.sequence,
        tie_word_embeddings=True,
    )
    return Llama(config).train()


def micro_batches(case: Case, step: int, count: int) -> Iterator[Tensor]:
    """The data of a step, by its number: counts by a random stride from a random start, modulo
    1,000, which is something to learn."""
    generator = torch.Generator().manual_seed(step)
    places = torch.arange(case.sequence)
    for _ in range(count):
        start, stride = torch.randint(1, 1000, (2, case.batch, 1), generator=generator)
        yield ((start + stride * places) % 1000).to(DEVICE)


class Training:
    """A compiled model with its optimizer and scheduler, and its training step."""

    def __init__(self, model: Llama, case: Case, hw: HardwareProfile, **options: Any) -> None:
        self.case = case
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        self.scheduler = CosineAnnealingLR(self.optimizer, T_max=case.steps)
        self.model: Any = lohan_fx.compile(
            model,
            hw=hw,
            optimizer=self.optimizer,
            dtype="bf16",
            **{"strategy": "lohan-resident", "refine": False, **options},
        )

    def step(
        self, number: int, count: int, between: Callable[[], None] = lambda: None
    ) -> list[Tensor]:
        """Step `number` (from 1), of `count` micro-batches; `between` is called after the first.
        Returns their losses."""
        losses = []
        for ids in list(micro_batches(self.case, number, count)):  # there before the step begins
            loss = self.model(ids)
            (loss / count).backward()
            losses.append(loss.detach())
            if len(losses) == 1:
                between()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return losses
