"""What the user's optimizer.step() does: it ends the step that backward began."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lohan_fx.compiled.ending import Ending
from lohan_fx.compiled.grad_mode import grad_mode_kept
from lohan_fx.compiled.integrity import Integrity
from lohan_fx.compiled.programs import Programs
from lohan_fx.metrics import Meter
from lohan_fx.runtime.recording import Stamp
from lohan_fx.runtime.tracebacks import locals_forgotten


class OptimizerStep:
    """Both ends of optimizer.step(): ours comes first, torch's own then finds no gradient.

    A step whose second end never comes, as torch's own was interrupted or a hook of the user's
    raised, has been taken all the same: its gradients are gone.
    """

    def __init__(self, programs: Programs, integrity: Integrity, meter: Meter) -> None:
        self._programs = programs
        self._integrity = integrity
        self._meter = meter

    @locals_forgotten()
    def finish(self) -> None:
        """End the optimizer's work of this step: what optimizer.step() does first.

        Raises:
            StepError: a step failed after some units had taken it, this one or an earlier one.
            as `Updater.finish`.
        """
        memory, updater = self._programs.memory, self._programs.updater
        if memory is None or updater is None:
            return
        recorder = memory.lanes.recorder
        self._programs.clear_unfinished()
        self._integrity.check_not_torn()
        memory.states.gradients.forget_hidden()
        began: Stamp = 0.0
        if recorder is not None:
            recorder.phase = "optimizer"
            began = recorder.mark()
        with grad_mode_kept():
            ends_step = updater.finish()
        if recorder is not None:
            label = memory.lanes.label("join", "optimizer.step")
            recorder.add("gpu", label, began, recorder.mark())
        if ends_step:
            self._meter.end_step()
        memory.states.gradients.hide()

    def show_gradients(self) -> None:
        """Give back the ``.grad`` of parameters that `finish` hid: what optimizer.step() does
        last."""
        memory = self._programs.memory
        if memory is not None:
            memory.states.gradients.show_hidden()


class StepHook:
    """Before optimizer.step(). Holds what it calls weakly, as `hooks.Call`.

    A closure runs first, with gradients as they are; what it leaves is the step's.
    """

    def __init__(self, step: OptimizerStep, ending: Ending, module: nn.Module) -> None:
        self._step = weakref.ref(step)
        self._module = weakref.ref(module)
        self._ending = ending

    def __call__(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._ending.check_step()
        # garbage collection must not end in the middle of a step a model that nobody holds
        step, module = self._step(), self._module()
        if step is None or module is None:
            self._ending.check_step()  # on another thread it may have ended just now
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            step.finish()
            return None

        def first() -> Any:
            loss = closure()
            step.finish()
            return loss

        return args[:1], {**kwargs, "closure": first}
