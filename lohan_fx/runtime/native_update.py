"""The update of a unit by our own kernels for Adam and AdamW, all parameters in one call.

They have the arithmetic of torch's fused kernels on float32: in host memory, where the results are
the same to the bit, in one pass and without the GIL; on CUDA in mixed precision only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from lohan_fx._compat import FakeTensor
from lohan_fx.runtime.native import adam, adam_cuda
from lohan_fx.runtime.update_values import Member, Operands, Results, Updated


def update(
    optimizer: Optimizer,
    given: Operands,
    members: Sequence[Member],
    *,
    squared: bool,
    passing: Callable[[], None],
) -> Updated | None:
    """Update all parameters in one pass, if a kernel has the arithmetic that is asked for.

    Args:
        optimizer: the user's.
        given: at least one parameter.
        members: one a parameter.
        squared: sums of squares of the gradients are wanted.
        passing: called before the kernel runs.

    Returns:
        what came of it; None: nothing was done, as no kernel has it.
    """
    if not isinstance(optimizer, (Adam, AdamW)):
        return None
    if any(member.values.get("fused") is not True for member in members):
        return None
    device = given.masters[0].device
    on_cuda = device.type == "cuda"
    if on_cuda and not given.mixed:
        return None
    if device.type not in ("cpu", "cuda"):
        return None
    rehearsal = any(isinstance(master, FakeTensor) for master in given.masters)  # see `scratch`
    kernel: adam.AdamKernel | adam_cuda.CudaAdamKernel | None
    if on_cuda and rehearsal:
        if not adam_cuda.expected():
            return None
        kernel = None
    else:
        kernel = adam_cuda.kernel() if on_cuda else adam.kernel()
        if kernel is None:
            return None
    updates: list[adam.Update] = []
    steps: dict[int, Tensor] = {}
    for i, member in enumerate(members):
        master, copy, grad, total = given.masters[i], given.copies[i], given.grads[i], given.sums[i]
        if grad is None:
            grad, total = total, None
        if grad is None:
            continue
        values, scalars = member.values, member.scalars
        if not rehearsal:
            steps[i] = scalars["step"] + 1 if scalars else torch.ones((), dtype=torch.float32)
        beta1, beta2 = values["betas"]
        amsgrad = bool(values["amsgrad"])
        try:
            one = adam.Update(
                master=master,
                exp_avg=given.state[i]["exp_avg"],
                exp_avg_sq=given.state[i]["exp_avg_sq"],
                max_exp_avg_sq=given.state[i]["max_exp_avg_sq"] if amsgrad else None,
                gradient=grad,
                copy=copy,
                lr=float(values["lr"]),
                beta1=float(beta1),
                beta2=float(beta2),
                eps=float(values["eps"]),
                weight_decay=float(values["weight_decay"]),
                step=float(steps.get(i, 1.0)),
                decoupled=_decouples(optimizer, values),
                maximize=bool(values["maximize"]),
                factor=1.0 if given.clip.factor is None else float(given.clip.factor),
                limit=math.inf if given.clip.limit is None else given.clip.limit,
                target=None if given.results is None else _target(given.results, i, amsgrad),
                sum=total,
            )
        except KeyError:
            return None
        if not one.supported():
            return None
        if on_cuda and (amsgrad or given.results is not None or squared):
            return None
        halves = torch.float16 in (grad.dtype, None if copy is None else copy.dtype)
        if halves and not getattr(kernel, "has_half", True):
            return None
        if not given.mixed and grad.dtype != master.dtype:  # `chunked_update` refuses it
            return None
        updates.append(one)
    if rehearsal or kernel is None:
        return Updated({}, {})  # the kernel allocates nothing
    passing()
    for i in steps:
        if members[i].scalars is None:
            for name in members[i].names:
                given.state[i][name].zero_()
    squares: dict[int, float] = {}
    if isinstance(kernel, adam.AdamKernel):
        squares = dict(zip(steps, kernel.run(updates, squared=squared), strict=squared))
    else:
        kernel.run(updates)
    return Updated({i: {"step": step} for i, step in steps.items()}, squares)


def _target(results: Results, index: int, amsgrad: bool) -> adam.Target:
    state = results.state[index]
    return adam.Target(
        master=results.masters[index],
        exp_avg=state["exp_avg"],
        exp_avg_sq=state["exp_avg_sq"],
        max_exp_avg_sq=state["max_exp_avg_sq"] if amsgrad else None,
    )


def _decouples(optimizer: Optimizer, values: Mapping[str, Any]) -> bool:
    """Whether weight decay is AdamW's."""
    return bool(values.get("decoupled_weight_decay", isinstance(optimizer, AdamW)))
