"""One step as autograd sees it, and where its program finds the tensors that nobody passes."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lohan_fx.capture import Captured
from lohan_fx.errors import StepError
from lohan_fx.runtime.executor import Executor
from lohan_fx.runtime.states import ModelStates


@dataclass(frozen=True, slots=True)
class Resident:
    """Name → the tensor that the graph reads of a device-resident parameter.

    It keeps none: autograd's graph of a step holds the program that made it for as long as user
    code holds the loss, and units that have moved must not stay on the device for that.
    """

    states: ModelStates
    captured: Captured

    def __call__(self, target: str) -> Tensor:
        return self.states.resident_view(self.captured.first_name(target))


@dataclass(frozen=True, slots=True)
class Buffers:
    """Name → the module's buffer, moved to the compute device if it is elsewhere."""

    model: weakref.ref[nn.Module]
    device: torch.device

    def __call__(self, target: str) -> Tensor:
        model = self.model()
        assert model is not None
        owner, _, name = target.rpartition(".")
        module = model.get_submodule(owner)
        buffer = module._buffers[name]
        assert buffer is not None
        if buffer.device != self.device:
            buffer.data = buffer.data.to(self.device)
        return buffer


class Step(torch.autograd.Function):
    """One step for autograd: saved tensors live in the program's own hands.

    `sources` are the tensors whose gradients the program returns; the anchor makes autograd call
    backward when the program consumes all gradients itself.
    """

    @staticmethod
    def forward(
        ctx: Any,
        executor: Executor,
        inputs: list[Any],
        at: tuple[int, int],
        wanted: Any,
        anchor: Tensor,
        *sources: Tensor,
    ) -> Any:
        flat = executor.forward(inputs, *at)
        ctx.executor = executor
        ctx.pending = executor.pending
        ctx.wanted = wanted
        ctx.set_materialize_grads(False)
        chosen = set(executor.differentiable)
        flat = tuple(
            v.view_as(v) if isinstance(v, Tensor) and any(v is x for x in inputs) else v
            for v in flat
        )
        ctx.mark_non_differentiable(
            *[v for i, v in enumerate(flat) if i not in chosen and isinstance(v, Tensor)]
        )
        ctx.shapes = {
            i: (v.shape, v.stride(), v.dtype, v.device) for i in chosen for v in [flat[i]]
        }
        return flat

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise StepError(
                "backward ran with create_graph=True, but a compiled step cannot be differentiated "
                "twice: compute what needs second derivatives in a module that is not compiled"
            )
        tangents: dict[int, Tensor] = {}
        for i, (shape, stride, dtype, device) in ctx.shapes.items():
            tangent = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            given = gradients[i]
            if given is None:
                tangent.zero_()
            elif given.stride() == stride:
                tangent = given
            else:
                tangent.copy_(given)
            tangents[i] = tangent
        with torch.autocast(ctx.executor.captured.device.type, enabled=False):
            found = ctx.executor.backward(ctx.pending, tangents)
        return (None, None, None, None, None, *[found.get((r.target, r.index)) for r in ctx.wanted])


class WithoutGradient(torch.autograd.Function):
    """An output that would have a gradient in plain PyTorch, and gets none here: a backward that
    comes to it is refused, where a detached one would silently lose its part."""

    @staticmethod
    def forward(ctx: Any, name: str, value: list[Tensor], anchor: Tensor) -> Tensor:
        ctx.name = name
        return value.pop().detach()  # no view: user code may write into it, as in plain PyTorch

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise StepError(
            f"backward came to output {ctx.name!r} of the compiled model, which has no gradient: "
            "by default a loss that the model returns is all that has. Compile with outputs='all', "
            f"or name what the loss is made of (outputs=['loss', {ctx.name!r}]); or detach it"
        )
