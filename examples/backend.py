"""``torch.compile(backend="lohan_fx")`` inside DistributedDataParallel: activations under a budget.

    python examples/backend.py

Parameters, gradients and the optimizer stay ordinary ones, so a wrapper of torch.distributed works
as ever (here with one process). The losses are those of the same run without torch.compile.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

WIDTH = 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(x))))


def train(*, compiled: bool, num_steps: int = 4, **options: Any) -> list[float]:
    """The losses of some steps; `options` are the backend's."""
    torch.manual_seed(0)
    model: Any = DistributedDataParallel(nn.Sequential(*(Block() for _ in range(6))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if compiled:
        model = torch.compile(model, backend="lohan_fx", options=options)
    x = torch.randn(512, WIDTH)
    losses = []
    for _ in range(num_steps):
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    torch.set_num_threads(1)  # for equal sums in both runs
    # 3.0 MiB of parameters; without swapping and recomputation activations take 10 MiB more
    memory = {"device": "8MiB"}
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
        runs = [train(compiled=True, memory=memory), train(compiled=False)]
        dist.destroy_process_group()
    same = "identical" if runs[0] == runs[1] else "DIFFERENT"
    print(f"losses with backend='lohan_fx' and without: {same}")  # noqa: T201


if __name__ == "__main__":
    main()
