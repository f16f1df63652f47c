"""What lohan_fx is compared with: the same GPT, batches and optimizer, run by others.

Each baseline is made once and is then a training step: (ids, targets) → loss.
"""

from __future__ import annotations

import gc
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed
from gpt import Block, Gpt, PlainMixed, Shape
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
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


def plain_mixed(
    shape: Shape, *, recompute: bool = False, compiled: bool = True, whole: bool = False
) -> Step:
    """Everything on the GPU; bfloat16 compute, float32 masters and AdamW states."""
    made = PlainMixed(build(shape), lr=1e-4)
    if recompute:
        recompute_blocks(made.model)
    if whole:
        made.model.compile(dynamic=False)
    elif compiled:
        compile_blocks(made.model)
    return partial(made.step, made.model)


@contextmanager
def _one_process() -> Iterator[None]:
    """A process group of this process alone, for systems that need one."""
    with tempfile.TemporaryDirectory() as directory:
        torch.distributed.init_process_group(
            "nccl", init_method=f"file://{directory}/group", rank=0, world_size=1
        )
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()


def fsdp_offload(shape: Shape) -> Step:
    """FSDP2 with CPU offload on one GPU: parameters, gradients and AdamW in host memory."""
    stack = ExitStack()
    stack.enter_context(_one_process())
    model = build(shape).cpu()
    free()
    recompute_blocks(model)
    settings: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=True),
    }
    for block in model.blocks:
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    step = optimize(model)
    weakref.finalize(model, stack.close)
    return step


def deepspeed_zero3(shape: Shape) -> Step:
    """DeepSpeed ZeRO-3 with parameters and optimizer in host memory (its CPU Adam), bfloat16.

    Raises:
        ImportError: DeepSpeed is not installed.
    """
    import deepspeed

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    deepspeed.init_distributed("nccl")
    host = {"device": "cpu", "pin_memory": True}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "offload_optimizer": host,
            "offload_param": host,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "steps_per_print": 10**9,
    }
    model = build(shape).to(torch.bfloat16)
    recompute_blocks(model)
    engine, *_ = deepspeed.initialize(
        model=model, config=config, model_parameters=model.parameters()
    )

    def step(ids: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = engine(ids, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def saved_on_cpu(shape: Shape) -> Step:
    """`torch.autograd.graph.save_on_cpu` over the whole forward; parameters stay on the GPU."""
    step = plain(shape, recompute=False, compiled=False)

    def saving(ids: Tensor, targets: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return step(ids, targets)

    return saving
