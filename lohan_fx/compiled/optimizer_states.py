"""States of the optimizer: they are in tiers, and state_dict() looks for them in the optimizer."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from lohan_fx.compiled.arriving import Arriving, Lend
from lohan_fx.compiled.integrity import Integrity
from lohan_fx.compiled.programs import Programs
from lohan_fx.compiled.training import Training
from lohan_fx.compiled.user_module import UserModule
from lohan_fx.errors import StepError
from lohan_fx.runtime.initial_state import pull_initial_state, release_state


class OptimizerStates:
    """Lends the states of one model to its optimizer, and takes over what the optimizer loads."""

    def __init__(
        self,
        user: UserModule,
        optimizer: Optimizer,
        training: Training,
        arriving: Arriving,
        programs: Programs,
        integrity: Integrity,
    ) -> None:
        self._user = user
        self._optimizer = optimizer
        self._names = training.names
        self._accumulation = training.accumulation
        self._arriving = arriving
        self._programs = programs
        self._integrity = integrity

    @property
    def unsaved_backwards(self) -> int:
        """Backwards whose gradients wait for more before optimizer.step(): no checkpoint has them.

        Backwards of several forwards that wait at once (`forwards=`) count as one. 0 with
        gradients="kept": what is in ``.grad`` is the user's, and nobody saves it in plain PyTorch.
        """
        memory, accumulation = self._programs.memory, self._accumulation
        if memory is None or accumulation.kept or not memory.states.gradients.holds_sums():
            return 0
        return max(accumulation.count, 1)

    def lend(self) -> None:
        """Let the optimizer have its states while it makes its state_dict().

        Raises:
            StepError: backward has begun a step that optimizer.step() has not ended.
        """
        self._integrity.check_saving()
        if self._programs.memory is not None:
            self._programs.memory.states.give_back(self._optimizer)
        self._materialize()

    def unlend(self) -> None:
        """Take back what `lend` gave."""
        if self._programs.memory is not None:
            self._programs.memory.states.release(self._optimizer)

    def take(self) -> None:
        """Take over what the optimizer has just loaded, now or when there is memory for it.

        Raises:
            StepError: a state lacks something, or has another shape than its parameter. None has
                been taken over.
        """
        self._arriving.states = None
        if self._user.ref() is None:  # deleted: the optimizer has its states itself
            return
        memory, named = self._programs.memory, self._user.parameters()
        try:
            pull_initial_state(self._optimizer, [named[n] for n in self._names], self._names)
        except StepError:
            if memory is not None:  # where those that the model had are still
                memory.states.release(self._optimizer)
            raise
        if memory is not None:
            memory.states.take_states(self._optimizer)
        self._integrity.loaded("optimizer")

    def load(self, lend: Lend) -> None:
        """Take the states of a checkpoint of a whole step: now, or when there is memory for them.

        What has been added up for the next step goes; with gradients="kept" it is the user's, as in
        plain PyTorch.
        """
        memory = self._programs.memory
        if memory is None:
            self._optimizer.state.clear()
            self._arriving.states = lend
            return
        memory.states.take_states(self._optimizer, lend)
        if not self._accumulation.kept:
            memory.states.gradients.forget_sums()
            self._accumulation.count = 0

    def give_back(self) -> None:
        """The optimizer has its states again, for good."""
        memory = self._programs.memory
        if memory is not None:
            memory.states.give_back(self._optimizer)
            memory.states.gradients.forget_sums()
        self._materialize()

    def _materialize(self) -> None:
        """Load the states of a checkpoint into the optimizer, if they still wait for memory."""
        lend = self._arriving.states
        if lend is None:
            return
        named = dict(self._user.named_parameters())
        try:
            lend(named)
            for entry in self._optimizer.state.values():
                for name, value in entry.items():
                    entry[name] = value.clone() if isinstance(value, Tensor) else value
        except BaseException:  # damaged, say: what is asked for next must not begin without them
            release_state(self._optimizer, named.values())
            raise
        self._arriving.states = None
