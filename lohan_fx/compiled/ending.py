"""The end of a model: its memory goes, and if its module is deleted, its optimizer lives on."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from torch.optim import Optimizer

from lohan_fx._compat import without_modes
from lohan_fx.errors import StepError
from lohan_fx.runtime.executor import Executor
from lohan_fx.runtime.lane import close_elsewhere
from lohan_fx.runtime.memory import Memory
from lohan_fx.runtime.waiting import Latch


def give_memory_back(memory: Memory, executors: Iterable[Executor], *, joins: bool = True) -> None:
    """Give all back, and let programs that somebody holds still have nothing of it. `joins` as for
    `Lane.close`.

    An interrupt may leave lanes running, which use what programs have: another call does the rest.
    """
    try:
        memory.close(joins=joins)
    finally:
        if memory.lanes.ended:
            for executor in list(executors):
                executor.close()


class Ending:
    """What becomes of the optimizer of a model that is deleted: as if the model had been closed, it
    has its states again, and goes on in plain PyTorch.

    As a hook of the optimizer it waits until that is so. Hooks hold it, so it holds nothing of the
    model.
    """

    def __init__(self) -> None:
        self._over: Latch | None = None
        self._pid = os.getpid()
        self._lost = ""

    def begin(
        self, memory: Memory, executors: Iterable[Executor], optimizer: Optimizer | None
    ) -> None:
        """The module is gone. Garbage collection may call this anywhere, on any thread."""
        over = self._over = Latch()
        self._pid = os.getpid()
        try:
            close_elsewhere(partial(self._end, over, memory, executors, optimizer))
        except BaseException as error:  # nobody else opens it, if there is no thread for it
            self._lost = self._lost or (
                f"the compiled model was deleted, but could not be closed ({error!r}): load model "
                "and optimizer from a checkpoint"
            )
            over.open()
            raise

    def wait(self) -> None:
        """Wait until a model that is deleted is closed, perhaps on another thread."""
        if self._over is not None and os.getpid() == self._pid:  # a forked child lacks the thread
            self._over.wait()

    def __call__(self, *_: Any) -> None:
        self.wait()

    def check_step(self) -> None:
        """What optimizer.step() asks first.

        Raises:
            StepError: the model was deleted when its gradients had been consumed and no step had
                taken them. It is said once: what comes later is not of that model.
        """
        self.wait()
        lost, self._lost = self._lost, ""
        if lost:
            raise StepError(lost)

    def _end(
        self,
        over: Latch,
        memory: Memory,
        executors: Iterable[Executor],
        optimizer: Optimizer | None,
    ) -> None:
        try:
            with without_modes():  # this may be in the middle of another model's tracing
                try:
                    if optimizer is not None and not memory.inherited:
                        self._give_back(memory, optimizer)
                finally:
                    give_memory_back(memory, executors, joins=False)
        finally:
            over.open()

    def _give_back(self, memory: Memory, optimizer: Optimizer) -> None:
        consumed = False
        torn: tuple[str, ...] = ()
        updater = memory.updater
        if updater is not None:
            with suppress(Exception):  # of an update: `torn` says it
                updater.sync()
            consumed = updater.has_consumed
            updater.abort()
            torn = updater.torn
        memory.states.give_back(optimizer)
        memory.states.gradients.forget_sums()
        memory.states.gradients.forget_dtypes()
        if consumed or torn:
            self._lost = _lost_step(torn)


def _lost_step(torn: tuple[str, ...]) -> str:
    stands = (
        f"Its weights stand between two steps: {', '.join(torn)} took the step, the others did not"
        if torn
        else "Its weights and states are those of the step before"
    )
    return (
        "the compiled model was deleted between backward and optimizer.step(), and the gradients "
        f"of this step are gone. {stands}. Keep the model until optimizer.step() has returned, "
        "or compile with gradients='kept'"
    )
