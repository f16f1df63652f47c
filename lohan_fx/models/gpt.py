"""A GPT as the papers train it: pre-norm blocks, learned positions, GELU, tied head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 50257
"""LoHan §V-A."""

NUM_CHUNKS = 16
"""Most chunks of tokens whose logits are made one after another."""

CHUNK_TOKENS = 1024
"""Fewest tokens of a chunk."""


class Block(nn.Module):
    """Attention and a feed-forward part of four times the width, each with a shortcut."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.ln_2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        qkv = self.qkv(self.ln_1(x)).view(batch, length, 3, self.heads, hidden // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


def head_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of a linear head; chunk by chunk, so that no chunk's logits stay.

    Gradients are made together with the loss, in forward (as Liger's fused kernel does), since
    the logits of a large batch would be the largest residual of the step. Same FLOPs. Autograd
    gets them through two dot products, whose value is taken off again.
    """
    with torch.no_grad():
        total, d_x, d_weight = _loss_and_gradients(x, weight, targets)
    value = torch.dot(x.flatten(), d_x.flatten()) + torch.dot(weight.flatten(), d_weight.flatten())
    return total + (value - value.detach())


def _loss_and_gradients(
    x: Tensor, weight: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    total = x.new_zeros((), dtype=torch.float32)
    scale = 1.0 / targets.numel()
    size = max(CHUNK_TOKENS, -(-targets.numel() // NUM_CHUNKS))
    d_x, d_weight = [], torch.zeros_like(weight)
    for chunk, wanted in zip(x.split(size), targets.split(size), strict=True):
        log_p = F.log_softmax((chunk @ weight.t()).float(), dim=-1)
        total = total + F.nll_loss(log_p, wanted, reduction="sum") * scale
        hot = wanted[:, None]
        d_logits = log_p.exp().scatter_add(1, hot, torch.full_like(hot, -1.0, dtype=log_p.dtype))
        d = (d_logits * scale).to(x.dtype)
        d_x.append(d @ weight)
        d_weight = torch.addmm(d_weight, d.t(), chunk)
    return total, torch.cat(d_x), d_weight


class GPT(nn.Module):
    """forward(ids, targets) → loss; both (batch, sequence) integers."""

    def __init__(
        self,
        layers: int,
        heads: int,
        hidden: int,
        *,
        vocabulary: int = VOCABULARY,
        sequence: int = 1024,
    ) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, hidden)
        self.wpe = nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList([Block(hidden, heads) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(hidden)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        hidden = self.ln_f(x).flatten(0, 1)
        return head_loss(hidden, self.wte.weight, targets.flatten())
