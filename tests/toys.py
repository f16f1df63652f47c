"""Small models with blocks, for planning: they repeat, alternate, or do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 16


class Block(nn.Module):
    """A feed-forward layer with a shortcut; `expand` times as wide inside."""

    def __init__(self, expand: int = 2, *, drop: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, expand * WIDTH)
        self.down = nn.Linear(expand * WIDTH, WIDTH)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Gate(nn.Module):
    """Another kind of block."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.gate(x))


class Toy(nn.Module):
    """forward(x) → loss: an embedding, any blocks, a head."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class Pair(nn.Module):
    """Two stacks; every block of the second also reads what the first one returns."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([Block() for _ in range(first)])
        self.decoder = nn.ModuleList([Block(3) for _ in range(second)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.encoder:
            x = block(x)
        for block in self.decoder:
            y = block(y + x)
        return y.square().mean()


class Skips(nn.Module):
    """A U-Net of linear layers: what goes down comes up again, the last first."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.down = nn.ModuleList([Block() for _ in range(depth)])
        self.up = nn.ModuleList([Block() for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
        for block in self.up:
            x = block(x + kept.pop())
        return x.square().mean()


class Everything(nn.Module):
    """The head reads the output of every block at once."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.blocks:
            x = block(x)
            kept.append(x)
        return torch.cat(kept).square().mean()


class Counted(Toy):
    """Asks for its blocks by number, and for as many as there were once."""

    def __init__(self, depth: int) -> None:
        super().__init__([Block() for _ in range(depth)])
        self.depth = depth

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i in range(self.depth):
            x = self.blocks[i](x)
        return self.head(x).square().mean()


def meta(build: Callable[[], nn.Module]) -> nn.Module:
    """A model without weights."""
    with torch.device("meta"):
        return build()


def rows(batch: int = 4) -> Tensor:
    """Inputs of the toys that take one."""
    return torch.empty(batch, WIDTH, device="meta")


def toy(depth: int) -> Toy:
    return Toy([Block() for _ in range(depth)])


def small() -> tuple[nn.Module, Tensor]:
    """As `made`, with so few blocks that all are traced."""
    torch.manual_seed(0)
    return toy(2), torch.randn(8, WIDTH)


def made() -> tuple[nn.Module, Tensor]:
    """For the command line: a model with its inputs (real ones, if it is not built on meta)."""
    torch.manual_seed(0)
    return toy(6), torch.randn(8, WIDTH)
