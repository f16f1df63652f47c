"""What lohan_fx is compared with: the same GPT, batches and optimizer, run by others.

Each baseline is made once and is then a training step: (ids, targets) → loss.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import torch
from gpt import Block, Gpt, PlainMixed, Shape
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Step = Callable[[Tensor, Tensor], Tensor]


def build(shape: Shape, *, seed: int = 0) -> Gpt:
    """The model on the GPU in float32: the same weights at every call."""
    torch.manual_seed(seed)
    with torch.device("cuda"):
        return Gpt(shape)


def free() -> None:
    """Give cached memory back."""
    gc.collect()
    torch.cuda.empty_cache()


def recompute_blocks(model: Gpt) -> None:
    """Keep the inputs of blocks only."""
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]


def compile_blocks(model: Gpt) -> None:
    """torch.compile block by block: one kernel set for all, so that compilation takes seconds."""
    for block in model.blocks:
        assert isinstance(block, Block)
        block.compile()


def optimize(model: nn.Module) -> Step:
    """AdamW in the parameters' dtype, fused."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(ids: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(ids, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def plain(shape: Shape, *, recompute: bool, compiled: bool = True, whole: bool = False) -> Step:
    """Everything on the GPU; parameters, gradients and AdamW's states in bfloat16.

    `whole` compiles the model as one graph: fastest, after minutes; otherwise block by block.
    """
    model = build(shape).to(torch.bfloat16)
    if recompute:
        recompute_blocks(model)
    if whole:
        model.compile(dynamic=False)
    elif compiled:
        compile_blocks(model)
    return optimize(model)


def plain_mixed(shape: Shape, *, recompute: bool = False, compiled: bool = True) -> Step:
    """Everything on the GPU; bfloat16 compute, float32 masters and AdamW states."""
    made = PlainMixed(build(shape), lr=1e-4)
    if recompute:
        recompute_blocks(made.model)
    if compiled:
        compile_blocks(made.model)
    return partial(made.step, made.model)


def saved_on_cpu(shape: Shape) -> Step:
    """`torch.autograd.graph.save_on_cpu` over the whole forward; parameters stay on the GPU."""
    step = plain(shape, recompute=False, compiled=False)

    def saving(ids: Tensor, targets: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return step(ids, targets)

    return saving
