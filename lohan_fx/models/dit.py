"""A diffusion transformer: DiT-XL/2's blocks (Peebles & Xie, ICCV'23), scaled as in LoHan §V-H."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LATENT_SIZE = 64
"""512 x 512 pixels behind an encoder that shrinks eightfold."""

LATENT_CHANNELS = 4
PATCH = 2
NUM_CLASSES = 1000
FREQUENCIES = 256


def _modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class Block(nn.Module):
    """Attention and feed-forward part, each shifted, scaled and gated by the condition (adaLN)."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(hidden, elementwise_affine=False, eps=1e-6)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.norm_2 = nn.LayerNorm(hidden, elementwise_affine=False, eps=1e-6)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)
        self.modulation = nn.Linear(hidden, 6 * hidden)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.modulation(condition).chunk(6, 1)
        x = x + gate_1.unsqueeze(1) * self._attention(_modulate(self.norm_1(x), shift_1, scale_1))
        y = F.gelu(self.up(_modulate(self.norm_2(x), shift_2, scale_2)), approximate="tanh")
        return x + gate_2.unsqueeze(1) * self.down(y)

    def _attention(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, hidden // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))


class DiT(nn.Module):
    """forward(x, t, y, target) → mean squared error of the predicted noise.

    x and target: (batch, 4, 64, 64) latents; t: time steps; y: class labels.
    """

    def __init__(self, layers: int, heads: int, hidden: int, *, latent: int = LATENT_SIZE) -> None:
        super().__init__()
        self.latent = latent
        self.patches = nn.Conv2d(LATENT_CHANNELS, hidden, PATCH, PATCH)
        positions = torch.zeros(1, (latent // PATCH) ** 2, hidden)
        self.positions = nn.Parameter(positions, requires_grad=False)  # sine and cosine, fixed
        self.time = nn.Sequential(
            nn.Linear(FREQUENCIES, hidden), nn.SiLU(), nn.Linear(hidden, hidden)
        )
        self.label = nn.Embedding(NUM_CLASSES + 1, hidden)
        self.blocks = nn.ModuleList([Block(hidden, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(hidden, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Linear(hidden, 2 * hidden)
        self.head = nn.Linear(hidden, PATCH * PATCH * 2 * LATENT_CHANNELS)  # noise and variance

    def forward(self, x: Tensor, t: Tensor, y: Tensor, target: Tensor) -> Tensor:
        condition = F.silu(self.time(self._frequencies(t, x.dtype)) + self.label(y))
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            tokens = block(tokens, condition)
        shift, scale = self.modulation(condition).chunk(2, 1)
        noise = self._image(self.head(_modulate(self.norm(tokens), shift, scale)))
        return F.mse_loss(noise[:, :LATENT_CHANNELS].float(), target.float())

    def _frequencies(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        half = FREQUENCIES // 2
        steps = torch.arange(half, device=t.device, dtype=torch.float32)
        angles = t[:, None].float() * torch.exp(-math.log(10_000) / half * steps)
        return torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)

    def _image(self, tokens: Tensor) -> Tensor:
        batch, side = tokens.shape[0], self.latent // PATCH
        tokens = tokens.view(batch, side, side, PATCH, PATCH, 2 * LATENT_CHANNELS)
        return tokens.permute(0, 5, 1, 3, 2, 4).reshape(batch, -1, self.latent, self.latent)
