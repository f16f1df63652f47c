"""Runs the two halves of a program: what autograd sees of a rewritten step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from lohan_fx.capture import Captured, InputRole
from lohan_fx.errors import StepError
from lohan_fx.passes.split import Halves
from lohan_fx.runtime.engine import Engine
from lohan_fx.runtime.op_timing import OpTimer
from lohan_fx.runtime.tracebacks import locals_forgotten
from lohan_fx.runtime.written import Reachable, changed


@dataclass(slots=True, eq=False)
class Pending:
    """A forward that waits for its backward, with what it saved. Used once.

    `place` says in which part of the slot store its swapped residuals are; `number` counts the
    forwards of a model; `versions` are those that `Reachable` had then, `generation` that of the
    weights. `buffers` are what backward reads: a module may have others by then.
    """

    saved: list[Tensor]
    inputs: list[Any]
    buffers: list[Tensor]
    versions: list[int]
    generation: int
    place: int = 0
    number: int = 0
    alive: bool = True

    def take(self) -> list[Tensor]:
        """The saved tensors; the caller is their only owner from here on.

        Raises:
            StepError: they are gone.
        """
        if not self.alive:
            raise StepError(
                "this forward's saved tensors are gone: its backward ran already (a second "
                "backward through one forward, with retain_graph=True, is not supported), or "
                "another forward of the compiled model ran since, an evaluation's included. Call "
                "backward once, before the next forward; or compile with forwards=n, if n forwards "
                "have to wait for their backward (model.lohan.prepare(...) before, for inputs of "
                "other shapes)"
            )
        saved = self.saved
        self.drop()
        return saved

    def drop(self) -> None:
        """Hold nothing any more."""
        self.alive = False
        self.saved = []
        self.inputs = []
        self.buffers = []


@dataclass(kw_only=True, eq=False)
class Executor:
    """One program of a model.

    Args:
        captured, halves: what to run.
        engine: what the program's ops call.
        parameters: name → tensor that the graph reads, for device-resident parameters.
        buffers: name → the module's buffer, looked up when it is needed.
        reachable: what user code may write into before backward reads it.

    Attributes:
        unfinished: a half is running, or failed and what it left has not been cleared: an
            interrupt may strike in `abort` too. The next forward clears it.
    """

    captured: Captured
    halves: Halves
    engine: Engine
    parameters: Callable[[str], Tensor]
    buffers: Callable[[str], Tensor]
    reachable: Reachable
    waiting: list[Pending] = field(default_factory=list)
    unfinished: bool = field(default=False)
    timer: OpTimer | None = field(default=None)

    @property
    def differentiable(self) -> tuple[int, ...]:
        return self.captured.differentiable

    @property
    def pending(self) -> Pending | None:
        """The last forward that waits for its backward."""
        return self.waiting[-1] if self.waiting else None

    @locals_forgotten()
    def forward(self, inputs: Sequence[Any], place: int = 0, number: int = 0) -> tuple[Any, ...]:
        """Run forward on the flattened user inputs; returns the flat outputs.

        Sets `pending` for `backward`. A forward that still waits in this place is dropped: its
        slots are needed.
        """
        for pending in [p for p in self.waiting if p.place == place]:
            self.drop(pending)
        self.engine.place = place
        arguments = [self._argument(role, inputs) for role in self.halves.forward_inputs]
        recorder = self.engine.lanes.recorder
        if recorder is not None:
            recorder.phase = "forward"
            recorder.begin_compute()
        self.unfinished = True
        try:
            results = self._run(self.halves.forward, arguments)
            if recorder is not None:
                recorder.end_compute()
            num_saved = self.halves.num_saved
            split = len(results) - num_saved
            outputs: list[Any] = [None] * self.captured.num_outputs
            for value, role in zip(results[:split], self.halves.forward_outputs, strict=True):
                if role.kind == "output":
                    outputs[role.index] = value
                else:
                    target = self.buffers(role.target) if role.target else inputs[role.index]
                    with torch.no_grad():
                        target.copy_(value)
            self.engine.settle_units()
            if self.halves.backward is not None:
                saved = list(results[split:])
                buffers = [self.buffers(name) for name in self.reachable.buffers]
                self.waiting.append(
                    Pending(
                        saved=saved,
                        inputs=list(inputs),
                        buffers=buffers,
                        versions=self.reachable.versions(saved, buffers),
                        generation=self.engine.states.generation,
                        place=place,
                        number=number,
                    )
                )
            self.unfinished = False
        except BaseException:
            self._fail(place)
            raise
        return tuple(outputs)

    @locals_forgotten()
    def backward(
        self, pending: Pending, tangents: Mapping[int, Tensor]
    ) -> dict[tuple[str, int], Tensor]:
        """Run backward. Returns the gradients that the program did not consume itself, by
        (parameter name, -1) or ("", input index).

        Raises:
            StepError: the saved tensors or the model are gone, or user code has written into
                something that backward reads.
        """
        if self.engine.lanes.closed:
            raise StepError("the compiled model was closed or deleted: its backward cannot run")
        if pending.alive:
            self._check_unchanged(pending)
        buffers, inputs = iter(pending.buffers), pending.inputs
        saved = pending.take()
        self.unfinished = True
        self.waiting.remove(pending)
        self.engine.place = pending.place
        assert self.halves.backward is not None
        arguments: list[Any] = []
        for role in self.halves.backward_inputs:
            if role.kind == "tangent":
                arguments.append(tangents[role.index])
            elif role.kind == "buffer":
                arguments.append(next(buffers))
            else:
                arguments.append(self._argument(role, inputs))
        arguments += saved
        saved.clear()
        updater = self.engine.updater
        recorder = self.engine.lanes.recorder
        if recorder is not None:
            recorder.phase = "backward"
            recorder.begin_compute()
        try:
            if updater is not None:
                updater.begin(self.engine.emit_order)
            gradients = self._run(self.halves.backward, arguments)
            if recorder is not None:
                recorder.end_compute()
            self.engine.settle_units()
            if updater is not None:
                updater.end()
            found = {
                (role.target, role.index): value
                for role, value in zip(self.halves.backward_outputs, gradients, strict=True)
            }
            self.unfinished = False
        except BaseException:
            self._fail(pending.place)
            raise
        return found

    def _check_unchanged(self, pending: Pending) -> None:
        """See that backward would read what forward did; otherwise the forward is dropped.

        Raises:
            StepError: it would not.
        """
        try:
            if pending.generation != self.engine.states.generation:
                raise changed("weights were updated, loaded or written")
            self.reachable.check(pending.saved, pending.buffers, pending.versions)
        except StepError:
            self.drop(pending)
            raise

    def _run(self, half: fx.GraphModule, arguments: list[Any]) -> Any:
        with self.engine.lanes.computing():
            return half(arguments) if self.timer is None else self.timer.run(half, arguments)

    def drop(self, pending: Pending) -> None:
        """Forget a forward whose backward never came."""
        self.unfinished = True
        pending.drop()
        self.waiting.remove(pending)
        self.engine.reset(pending.place)
        self.unfinished = False

    def drop_pending(self) -> None:
        """Forget all forwards whose backward never came."""
        if self.unfinished:
            self.abort()
        for pending in list(self.waiting):
            self.drop(pending)

    def retire(self) -> None:
        """Run no more, and hold no buffers: autograd's graph of a step holds its program for as
        long as user code holds the loss."""
        self.drop_pending()
        self.engine.updater = None

    def close(self) -> None:
        """The model is closed, and all lanes are: hold nothing any more, as `retire`."""
        for pending in self.waiting:
            pending.drop()
        self.waiting = []
        self.engine.forget()
        self.engine.updater = None

    def abort(self) -> None:
        """Leave nothing behind: what waits, or runs, never ends."""
        self.unfinished = True
        for pending in self.waiting:
            pending.drop()
        self.waiting.clear()
        self._fail(None)

    def _fail(self, place: int | None) -> None:
        """Leave nothing behind of a half that failed; its error is on the way to the user."""
        self.unfinished = True
        recorder = self.engine.lanes.recorder
        if recorder is not None:
            recorder.drop_compute()
        self.engine.reset(place)
        if self.engine.updater is not None:
            self.engine.updater.abort()
        self.unfinished = False

    def _argument(self, role: InputRole, inputs: Sequence[Any]) -> Any:
        if role.kind == "parameter":
            return self.parameters(role.target)
        if role.kind == "buffer":
            return self.buffers(role.target)
        return inputs[role.index]
