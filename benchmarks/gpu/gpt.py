"""The GPT that the GPU benchmarks train, and plain mixed-precision training of it.

Pre-norm decoder, learned positions, untied head, GELU (tanh): the block of the papers' GPT-3
family. The loss is computed in pieces of the tokens, as all systems compared here do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LOSS_PIECES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of one model: `layers` blocks of width `hidden`, `heads` attention heads."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int = 50257
    sequence: int = 1024

    @property
    def num_params(self) -> int:
        per_block = 12 * self.hidden**2 + 13 * self.hidden
        outer = (2 * self.vocabulary + self.sequence + 2) * self.hidden
        return self.layers * per_block + outer


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        h = shape.hidden
        self.heads = shape.heads
        self.ln_1 = nn.LayerNorm(h)
        self.qkv = nn.Linear(h, 3 * h)
        self.out = nn.Linear(h, h)
        self.ln_2 = nn.LayerNorm(h)
        self.up = nn.Linear(h, 4 * h)
        self.down = nn.Linear(4 * h, h)

    def forward(self, x: Tensor) -> Tensor:
        b, n, h = x.shape
        qkv = self.qkv(self.ln_1(x)).view(b, n, 3, self.heads, h // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, n, h))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """forward(ids, targets) → loss; both (batch, sequence) int64."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.wte = nn.Embedding(shape.vocabulary, shape.hidden)
        self.wpe = nn.Embedding(shape.sequence, shape.hidden)
        self.blocks = nn.ModuleList([Block(shape) for _ in range(shape.layers)])
        self.ln_f = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        self.apply(self._init)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        rows = self.ln_f(x).flatten(0, 1).chunk(LOSS_PIECES)
        wanted = targets.flatten().chunk(LOSS_PIECES)
        losses = [
            F.cross_entropy(self.head(r).float(), t, reduction="sum")
            for r, t in zip(rows, wanted, strict=True)
        ]
        return torch.stack(losses).sum() / targets.numel()


class PlainMixed:
    """Plain PyTorch mixed precision, all on the GPU: bf16 model, fp32 masters and AdamW states."""

    def __init__(self, model: Gpt, lr: float) -> None:
        self.masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
        self.model = model.to(torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.masters, lr=lr, fused=True)

    def step(self, call: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
        loss = call(ids, targets)
        loss.backward()
        for master, p in zip(self.masters, self.model.parameters(), strict=True):
            assert p.grad is not None
            master.grad = p.grad.float()
            p.grad = None
        self.optimizer.step()
        with torch.no_grad():
            for master, p in zip(self.masters, self.model.parameters(), strict=True):
                p.copy_(master)
                master.grad = None
        return loss.detach()
