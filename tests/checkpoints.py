"""A small model with a checkpointed run."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lohan_fx
import lohan_fx.atomic
from tests.toys import meta
from tests.training import cpu_hardware, identical

VOCAB, WIDTH = 32, 16
BUDGET = {"device": "64MiB", "host": "64MiB", "ssd": "64MiB"}
STEPS = 2
HOST = {"states": "host", "strategy": "swap-all", "schedule": "serial"}


class Block(nn.Module):
    def __init__(self, buffers: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if buffers else nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout(F.gelu(self.norm(self.linear(x))))
        return x + y


class Net(nn.Module):
    """Dropout, BatchNorm's buffers, one matrix under two names."""

    def __init__(self, buffers: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(buffers) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), ids.flip(0))


class Run(NamedTuple):
    model: Any
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    device: str = "cpu"

    def train(self, steps: int = STEPS) -> list[float]:
        """Batches and dropout are drawn from the global generator."""
        losses = []
        for _ in range(steps):
            loss = self.model(torch.randint(0, VOCAB, (12,)).to(self.device))
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def save(self, directory: Path, **options: Any) -> Path:
        extra = {"scheduler": self.scheduler.state_dict()}
        return lohan_fx.save(
            self.model, directory, optimizer=self.optimizer, extra=extra, **options
        )

    def load(self, directory: Path) -> Any:
        found = lohan_fx.load(self.model, directory, optimizer=self.optimizer)
        self.scheduler.load_state_dict(found.extra["scheduler"])
        return found

    def close(self) -> None:
        if hasattr(self.model, "lohan"):
            self.model.lohan.close()


def started(tmp_path: Path | None = None, *, seed: int = 0, **options: Any) -> Run:
    """A run in plain PyTorch, or compiled if there is a directory for it."""
    torch.manual_seed(seed)
    on_meta = "weights" in options
    device = options.pop("device", "cpu")
    build = functools.partial(Net, options.pop("buffers", True))
    model: nn.Module = meta(build) if on_meta else build()
    dtype = options.pop("parameters", None)
    if dtype is not None:
        model.to(dtype)
    decay = [p for p in model.parameters() if p.dim() > 1]
    other = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay}, {"params": other, "weight_decay": 0.0, "lr": 3e-3}],
        lr=1e-2,
        weight_decay=0.1,
    )
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.5)
    if tmp_path is not None:
        options = {"strategy": "recompute-all", "memory": BUDGET, **options}
        hw = cpu_hardware(tmp_path, device_kind=device)
        model = lohan_fx.compile(model, hw=hw, optimizer=optimizer, **options)
    return Run(model, optimizer, scheduler, device)


def state_of(run: Run) -> dict[str, Tensor]:
    found = {k: t.detach().clone() for k, t in run.model.state_dict().items()}
    for i, entry in run.optimizer.state_dict()["state"].items():
        found.update({f"{i}.{k}": v.clone() for k, v in entry.items()})
    return found


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert not [k for k in b if not identical(a[k], b[k])]
