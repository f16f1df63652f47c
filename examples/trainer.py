"""Fine-tune with transformers' Trainer, unchanged: the model that it gets is compiled.

    python examples/trainer.py

Trainer accumulates gradients over two batches and clips their norm, so gradients are kept. It gets
the optimizer that the model was compiled with, evaluates between steps, saves checkpoints and goes
on from them. The losses are those of the same run without lohan_fx.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    get_linear_schedule_with_warmup,
)

import lohan_fx

LENGTH = 32
NUM_STEPS = 8


def build() -> nn.Module:
    """GPT-2 over bytes, small, with random weights."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=4, n_head=4, use_cache=False
    )
    config.bos_token_id = config.eos_token_id = 0
    return GPT2LMHeadModel(config)


def dataset() -> list[dict[str, torch.Tensor]]:
    """The bytes of this file, cut in pieces."""
    data = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    rows = data[: len(data) // LENGTH * LENGTH].view(-1, LENGTH)
    return [{"input_ids": row, "labels": row} for row in rows]


def train(
    folder: Path,
    *,
    compiled: bool,
    num_steps: int = NUM_STEPS,
    resume: bool = False,
    **options: Any,
) -> tuple[list[float], nn.Module]:
    """Train and evaluate; the losses in the order of Trainer's log, and the model.

    Args:
        folder: for checkpoints.
        compiled: whether the model is compiled by lohan_fx.
        resume: go on from the last checkpoint in `folder`.
        options: of `lohan_fx.compile`, beside the optimizer.
    """
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=num_steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        eval_strategy="steps",
        eval_steps=NUM_STEPS // 2,
        save_steps=NUM_STEPS // 2,
        logging_steps=1,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
        seed=1,
    )
    model, rows = build(), dataset()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, NUM_STEPS)
    if compiled:
        model = lohan_fx.compile(model, optimizer=optimizer, gradients="kept", **options)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=rows[:-8],
        eval_dataset=rows[-8:],
        optimizers=(optimizer, scheduler),
    )
    trainer.train(resume_from_checkpoint=resume)
    log = trainer.state.log_history
    return [e[k] for e in log for k in ("loss", "eval_loss") if k in e], model


def main() -> None:
    torch.set_num_threads(1)  # for equal sums in both runs
    runs = []
    for compiled in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            losses, _ = train(Path(folder), compiled=compiled)
        runs.append(losses)
    same = "identical" if runs[0] == runs[1] else "DIFFERENT"
    print(f"losses with lohan_fx and without: {same}")  # noqa: T201


if __name__ == "__main__":
    main()
