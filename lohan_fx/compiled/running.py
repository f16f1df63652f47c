"""One call of a compiled model: its program runs forward, and autograd knows of its backward."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lohan_fx.compiled.hooks import refuse_uncalled
from lohan_fx.compiled.integrity import Integrity
from lohan_fx.compiled.lookup import Lookup
from lohan_fx.compiled.options import Options
from lohan_fx.compiled.programs import Programs
from lohan_fx.compiled.replanning import Replanner
from lohan_fx.compiled.training import Training
from lohan_fx.compiled.user_module import UserModule
from lohan_fx.errors import LohanError, StepError
from lohan_fx.runtime.eager import ReadParameters
from lohan_fx.runtime.executor import Executor
from lohan_fx.runtime.step import Buffers, Step, WithoutGradient
from lohan_fx.signature import foreign_input


class Runner:
    """Runs the forwards of one model."""

    def __init__(
        self,
        user: UserModule,
        options: Options,
        training: Training,
        programs: Programs,
        integrity: Integrity,
        lookup: Lookup,
        replanner: Replanner,
    ) -> None:
        self._user = user
        self._device = options.device
        self._num_places = options.forwards
        self._training = training
        self._programs = programs
        self._integrity = integrity
        self._lookup = lookup
        self._replanner = replanner
        self._numbers = itertools.count()
        self._anchor = torch.zeros((), requires_grad=True)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module's own forward would return."""
        programs, lookup = self._programs, self._lookup
        inputs = [self._input(x) for x in pytree.tree_leaves((args, kwargs))]
        programs.clear_unfinished()
        self._integrity.check_step()
        seen = self._user.look()
        named = seen.named
        take_over_parameters(programs, self._training, named)
        programs.end_interrupted()
        grad = torch.is_grad_enabled() and any(seen.trains)
        if grad:
            if seen.hooked:
                refuse_uncalled(self._training.names, named, seen.inner)
        elif foreign_input(args, kwargs):
            return self._run_eagerly(args, kwargs)
        key = lookup.signature(seen, args, kwargs)
        program = (lookup.program if key.grad else lookup.evaluation)(args, kwargs, key)
        if program is None:
            return self._run_eagerly(args, kwargs)
        executor = self._replanner.program_for(program).executor
        assert programs.memory is not None
        place = self._make_place(executor)
        # the program's ops have their dtypes: no autocast region changes them again
        with torch.autocast(self._device.type, enabled=False):
            if not executor.captured.has_backward:
                with torch.no_grad():
                    flat = executor.forward(inputs)
            else:
                wanted = [r for r in executor.halves.backward_outputs if r.kind == "gradient"]
                sources = [named[r.target] if r.target else inputs[r.index] for r in wanted]
                at = (place, next(self._numbers))
                flat = self._without_gradients(
                    executor, Step.apply(executor, inputs, at, wanted, self._anchor, *sources)
                )
        return executor.captured.unflatten(self._user.module, flat, args, kwargs)

    def _without_gradients(self, executor: Executor, flat: tuple[Any, ...]) -> tuple[Any, ...]:
        """Let a backward through outputs that have no gradient say so."""
        detached = executor.captured.detached
        return tuple(
            WithoutGradient.apply(detached[i], [v], self._anchor) if i in detached else v
            for i, v in enumerate(flat)
        )

    def _run_eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's own forward without backward; parameters are read from their tiers."""
        self._programs.sync()
        device, dtype = self._device, self._training.compute_dtype
        parameters = [p for _, p in self._user.named_parameters()]
        if any(p.is_meta for p in parameters):
            raise StepError(
                "the model is on the meta device still, and this forward makes no program: call "
                "model.lohan.prepare(*args, **kwargs) with a batch as for training first"
            )
        for name, _ in self._user.module.named_buffers():
            Buffers(self._user.ref, device)(name)
        args, kwargs = pytree.tree_map(self._input, (args, kwargs))
        elsewhere = dtype is not None or any(p.device != device for p in parameters)
        read = ReadParameters(parameters, device, dtype) if elsewhere else nullcontext()
        with self._user.as_it_was() as module, torch.no_grad(), read:
            return module.forward(*args, **kwargs)

    def _input(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.device != self._device:
            raise LohanError(
                f"an input is on {leaf.device}, the model computes on {self._device}: "
                f"call .to({str(self._device)!r}) on the batch"
            )
        dtype = self._training.compute_dtype
        if dtype is not None and leaf.is_floating_point() and leaf.dtype != dtype:
            return leaf.to(dtype)
        return leaf

    def _make_place(self, executor: Executor) -> int:
        """Room for one more forward that waits for its backward: the oldest one too many goes."""
        waiting = self._programs.waiting()
        if self._num_places == 1:
            for pending, owner in waiting:
                owner.drop(pending)
            return 0
        if not executor.captured.has_backward:
            return 0
        waiting.sort(key=lambda each: each[0].number)
        while len(waiting) >= self._num_places:
            pending, owner = waiting.pop(0)
            owner.drop(pending)
        taken = {pending.place for pending, _ in waiting}
        return next(k for k in range(self._num_places) if k not in taken)


def take_over_parameters(
    programs: Programs, training: Training, named: Mapping[str, nn.Parameter]
) -> None:
    """Take over what user code wrote into parameters since the last step.

    It comes before a program is looked for: making one waits for the last step's updates, and
    afterwards nobody knows that they ran beside the write.

    Raises:
        StepError: the model's layers are others than those that were compiled; or parameters were
            written while updates ran.
    """
    memory = programs.memory
    if memory is None:
        training.check_parameters(named)
        return
    if memory.states.parameter_ids != set(map(id, named.values())):
        training.check_parameters(named)
    memory.states.sync_from_user(behind=programs.behind)
