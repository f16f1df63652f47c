"""What `lohan_fx.compile` was asked for, checked and chosen (`lohan_fx.compile_arguments`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from lohan_fx.capture import Outputs
from lohan_fx.chunk_loss import LOSS_CHUNK_BYTES
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import Plan
from lohan_fx.planners.registry import Planner, PlannerOptions
from lohan_fx.progress import Shown

Gradients = Literal["consumed", "kept"]
"""What becomes of gradients: see `lohan_fx.compile`."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `lohan_fx.compile` was asked for; see there.

    `may_defer`: schedule "speculative" is not the user's wish; without room, "deferred" does.
    """

    hw: HardwareProfile
    budget: MemoryBudget
    device: torch.device
    dtype: torch.dtype | None
    strategy: str | Planner
    planner: PlannerOptions
    outputs: Outputs
    fused: bool = False
    plan: Plan | None = None
    loss_chunk_bytes: int = LOSS_CHUNK_BYTES
    gradients: Gradients = "consumed"
    accumulate: int | Literal["manual"] = 1
    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None
    skip_nonfinite: bool = False
    forwards: int = 1
    may_defer: bool = False
    refine: bool = False
    progress: Shown = "auto"
