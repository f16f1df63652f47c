"""A BERT, whole or as one GPU's part under tensor parallelism."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Pre-norm attention and feed-forward part, with dropout before each shortcut (Megatron).

    One of `shards` GPUs has its share of the heads and of the inner width; what it sums up with
    the others has the full width.
    """

    def __init__(self, hidden: int, heads: int, shards: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.heads = heads // shards
        own = hidden // shards
        self.ln_1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * own)
        self.out = nn.Linear(own, hidden)
        self.ln_2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * own)
        self.down = nn.Linear(4 * own, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.ln_1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v)
        own = mixed.transpose(1, 2).reshape(batch, length, -1)
        x = x + self._drop(self.out(own))
        return x + self._drop(self.down(F.gelu(self.up(self.ln_2(x)))))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout) if self.dropout else x


class Encoder(nn.Module):
    """forward(ids, labels) → cross entropy: of two classes, from the first token; or, with
    `masked`, of the words at every position (pre-training), from the tied embedding."""

    def __init__(
        self,
        layers: int,
        heads: int,
        hidden: int,
        vocabulary: int,
        sequence: int,
        shards: int = 1,
        dropout: float = 0.1,
        *,
        masked: bool = False,
    ) -> None:
        super().__init__()
        self.masked = masked
        self.words = nn.Embedding(vocabulary // shards, hidden)
        self.positions = nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList([Block(hidden, heads, shards, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(hidden)
        self.pooler = nn.Linear(hidden, hidden)
        if masked:
            self.head_norm = nn.LayerNorm(hidden)
        else:
            self.classes = nn.Linear(hidden, 2)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if self.masked:
            x = self.head_norm(F.gelu(self.pooler(x))).flatten(0, 1)
            logits = x @ self.words.weight.t()
            return F.cross_entropy(logits.float(), labels.flatten())
        first = torch.tanh(self.pooler(x[:, 0]))
        return F.cross_entropy(self.classes(first).float(), labels)
