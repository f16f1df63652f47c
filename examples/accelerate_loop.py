"""A training loop with Accelerate: accumulation, clipping, a scheduler, saved and loaded state.

    python examples/accelerate_loop.py

The model is compiled before `accelerator.prepare`; the loop itself stays as it is. The losses are
those of the same run without lohan_fx.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lohan_fx

CLASSES = 10


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm2d(channels), nn.Dropout(0.1)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.conv(F.relu(self.norm(x))))


class Net(nn.Module):
    """A small residual network."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.start = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(Block(channels) for _ in range(4))
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def data() -> DataLoader[Any]:
    """Random pictures; the last batch is smaller."""
    generator = torch.Generator().manual_seed(1)
    pictures = torch.randn(44, 3, 12, 12, generator=generator)
    classes = torch.randint(0, CLASSES, (44,), generator=generator)
    return DataLoader(TensorDataset(pictures, classes), batch_size=8)


def train(
    folder: Path, *, compiled: bool, resume: bool = False, epochs: int = 2, **options: Any
) -> list[float]:
    """The losses; the state is saved in `folder` after the first epoch, and read from there."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model: nn.Module = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    if compiled:
        model = lohan_fx.compile(model, optimizer=optimizer, gradients="kept", **options)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, data())
    if resume:
        accelerator.load_state(str(folder))
    losses = []
    for epoch in range(int(resume), epochs):
        for pictures, classes in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(pictures), classes)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        if epoch == 0:
            accelerator.save_state(str(folder), safe_serialization=True)
    return losses


def main() -> None:
    torch.set_num_threads(1)  # for equal sums in both runs
    runs = []
    for compiled in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(train(Path(folder), compiled=compiled))
    same = "identical" if runs[0] == runs[1] else "DIFFERENT"
    print(f"losses with lohan_fx and without: {same}")  # noqa: T201


if __name__ == "__main__":
    main()
