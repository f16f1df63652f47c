"""The programs of one model, by input signature, and the memory that they share."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lohan_fx.compiled.ending import Ending, give_memory_back
from lohan_fx.plan import LATE, Plan
from lohan_fx.printing import ProgramModule
from lohan_fx.program import Program, Residency
from lohan_fx.runtime.executor import Executor, Pending
from lohan_fx.runtime.memory import Memory
from lohan_fx.runtime.updates import Updater
from lohan_fx.signature import Signature
from lohan_fx.workload import Workload


@dataclass(kw_only=True)
class CompiledProgram:
    """One program with everything that explains it."""

    workload: Workload
    plan: Plan
    graph: ProgramModule
    instructions: Program
    memory: Residency
    executor: Executor


class Programs:
    """What exists of a compiled model.

    Args:
        optimizer: the user's.

    Attributes:
        by_signature: the programs; the one that ran last is the last.
        memory: what they share; made with the first of them.
        latest: the training program that ran last, or the evaluation program, if none did.
        num_evaluations: programs without backward that were made.
        executors: of these programs and of those that were forgotten, while anybody holds them, as
            autograd's graph of a step does.
        closing: `CompiledModel.close` has begun to take the model apart.
        ending: what becomes of the optimizer if the module is deleted.
    """

    def __init__(self, optimizer: Optimizer | None) -> None:
        self.by_signature: OrderedDict[Signature, CompiledProgram] = OrderedDict()
        self.memory: Memory | None = None
        self.latest: CompiledProgram | None = None
        self.num_evaluations = 0
        self.closing = False
        self.ending = Ending()
        self._optimizer = optimizer
        self.executors: weakref.WeakSet[Executor] = weakref.WeakSet()
        self._closer: weakref.finalize[Any, Any] | None = None

    @property
    def updater(self) -> Updater | None:
        return self.memory.updater if self.memory is not None else None

    @property
    def behind(self) -> bool:
        """Whether updates of the last step run still, or may."""
        updater = self.updater
        return updater is not None and updater.behind

    def waiting(self) -> list[tuple[Pending, Executor]]:
        """Forwards that wait for their backward, and whose they are."""
        executors = [program.executor for program in self.by_signature.values()]
        return [(pending, executor) for executor in executors for pending in executor.waiting]

    def drop_pending(self) -> None:
        """Forget all forwards whose backward never came."""
        for program in self.by_signature.values():
            program.executor.drop_pending()

    def forget(self) -> None:
        """Forget all programs, which were made for the tiers that units are in now."""
        for program in self.by_signature.values():
            program.executor.retire()
        self.by_signature.clear()
        self.num_evaluations = 0

    def clear_unfinished(self) -> None:
        """Clear what a failed step left, if a second interrupt struck while that was done."""
        for program in self.by_signature.values():
            if program.executor.unfinished:
                program.executor.abort()

    def end_interrupted(self) -> None:
        """Wait for what an optimizer.step() that was interrupted left running."""
        updater = self.updater
        if updater is not None and updater.behind and updater.schedule not in LATE:
            updater.join()

    def sync(self) -> None:
        """Wait until parameters and optimizer states are those that the last step made, as
        `Updater.sync`."""
        if self.updater is not None:
            self.updater.sync()

    def know_norm(self) -> None:
        """Have the norm of the last step's gradients, as `Updater.know_norm`."""
        if self.updater is not None:
            self.updater.know_norm()

    def own_memory(self, module: nn.Module | None) -> None:
        """See that memory is given back with the model, also if an interrupt struck between."""
        if self._closer is None and self.memory is not None and module is not None:
            left = (self.memory, self.executors, self._optimizer)
            self._closer = weakref.finalize(module, _end, weakref.ref(self), self.ending, *left)

    def abort(self) -> None:
        """End what runs, for good; nothing, if the model's end has done it."""
        if self._closer is not None and self._closer.alive:
            for program in self.by_signature.values():
                program.executor.abort()

    def forget_all(self) -> None:
        """No program is left; memory is."""
        self.by_signature.clear()
        self.latest = None

    def close_memory(self) -> None:
        """Join all threads, give all memory back, remove all files; nothing, if the model's end has
        done it. An interrupted call leaves the rest to another one, or to the model's end."""
        if self.memory is not None and self._closer is not None and self._closer.alive:
            give_memory_back(self.memory, self.executors)
            self._closer.detach()
        self.memory = None


def _end(
    programs: weakref.ref[Programs],
    ending: Ending,
    memory: Memory,
    executors: Iterable[Executor],
    optimizer: Optimizer | None,
) -> None:
    """The module is gone; who holds the rest has a model without programs and memory."""
    found = programs()
    if found is not None:
        found.forget_all()
        found.memory = None
    ending.begin(memory, executors, optimizer)


class NumWaiting:
    """How many forwards of a model wait for their backward. Holds its programs weakly: their
    updater asks."""

    def __init__(self, programs: Programs) -> None:
        self._programs = weakref.ref(programs)

    def __call__(self) -> int:
        programs = self._programs()
        return 0 if programs is None else len(programs.waiting())
