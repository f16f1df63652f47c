"""Train with Lightning: compile in the LightningModule's constructor, and nothing else changes.

    python examples/lightning_loop.py

Lightning accumulates over two batches, clips, and hands optimizer.step() a closure, so gradients
are kept. The losses are those of the same run without lohan_fx.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lohan_fx

WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(x))))


class Regression(lightning.LightningModule):
    """Learns to reverse its input; the model is compiled if `compiled`, with `options`."""

    def __init__(self, compiled: bool, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Block() for _ in range(4)))
        self.adamw = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        if compiled:
            # before Lightning moves modules to the device: this one stays where the plan puts it
            self.model = lohan_fx.compile(
                self.model, optimizer=self.adamw, gradients="kept", **options
            )
        self.losses: list[float] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.adamw

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        (x,) = batch
        loss = (self.model(x) - x.flip(1)).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        (x,) = batch
        self.losses.append((self.model(x) - x.flip(1)).square().mean().item())


def data(seed: int, rows: int) -> DataLoader[Any]:
    """Batches of 8 rows; the last one may be smaller."""
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(TensorDataset(torch.randn(rows, WIDTH, generator=generator)), batch_size=8)


def train(
    folder: Path,
    *,
    compiled: bool,
    epochs: int = 2,
    resume: Path | None = None,
    **options: Any,
) -> tuple[list[float], Path]:
    """Losses of training and validation in their order, and a checkpoint of the end."""
    module = Regression(compiled, **options)
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=1,
        max_epochs=epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(1)
    trainer.fit(module, data(0, 36), data(1, 8), ckpt_path=resume, weights_only=True)
    checkpoint = folder / f"epoch-{epochs}.ckpt"
    trainer.save_checkpoint(checkpoint)
    return module.losses, checkpoint


def main() -> None:
    torch.set_num_threads(1)  # for equal sums in both runs
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    with tempfile.TemporaryDirectory() as folder:
        runs = [train(Path(folder), compiled=compiled)[0] for compiled in (True, False)]
    same = "identical" if runs[0] == runs[1] else "DIFFERENT"
    print(f"losses with lohan_fx and without: {same}")  # noqa: T201


if __name__ == "__main__":
    main()
