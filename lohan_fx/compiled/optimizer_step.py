"""What the user's optimizer.step() does: it ends the step that backward began."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lohan_fx.compiled.programs import Programs
from lohan_fx.metrics import Meter
from lohan_fx.runtime.recording import Stamp


class OptimizerStep:
    """Both ends of optimizer.step(): ours comes first, torch's own then finds no gradient."""

    def __init__(self, programs: Programs, meter: Meter) -> None:
        self._programs = programs
        self._meter = meter
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []

    def finish(self) -> None:
        """End the optimizer's work of this step: what optimizer.step() does first."""
        self.show_gradients()  # those that a step hid which then failed
        memory, updater = self._programs.memory, self._programs.updater
        if memory is None or updater is None:
            return
        recorder = memory.lanes.recorder
        self._programs.clear_unfinished()
        began: Stamp = 0.0
        if recorder is not None:
            recorder.phase = "optimizer"
            began = recorder.mark()
        updater.finish()
        if recorder is not None:
            label = memory.lanes.label("join", "optimizer.step")
            recorder.add("gpu", label, began, recorder.mark())
        self._meter.end_step()
        # the optimizer's own step must not find them
        found = [p for states in memory.states.trained for p in states.parameters]
        self._hidden = [(p, p.grad) for p in found if p.grad is not None]
        for p, _ in self._hidden:
            p.grad = None

    def show_gradients(self) -> None:
        """Give back the ``.grad`` of parameters that `finish` hid: what optimizer.step() does
        last."""
        for p, gradient in self._hidden:
            p.grad = gradient
        self._hidden = []


class StepHook:
    """Before optimizer.step(). Holds what it calls weakly, as `hooks.Call`.

    A closure runs first, with gradients as they are; what it leaves is the step's.
    """

    def __init__(self, step: OptimizerStep) -> None:
        self._step = weakref.ref(step)

    def __call__(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        step = self._step()
        if step is None:
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            step.finish()
            return None
        step.show_gradients()

        def first() -> Any:
            loss = closure()
            step.finish()
            return loss

        return args[:1], {**kwargs, "closure": first}
