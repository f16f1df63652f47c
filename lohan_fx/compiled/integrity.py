"""Whether a compiled model is whole: weights and states are all of one step, or of one checkpoint.

A step that failed after some units had taken it *tears* a model; a load that failed leaves it
*loaded in part*. Such a model neither runs nor is saved until a whole checkpoint has been loaded.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from lohan_fx.compiled.programs import Programs
from lohan_fx.errors import StepError
from lohan_fx.runtime.accumulation import Accumulation

Part = Literal["model", "optimizer"]
"""What is loaded: the weights, or the optimizer's states."""


class Integrity:
    """Says whether a model may run, be read, or be saved."""

    def __init__(self, programs: Programs, accumulation: Accumulation) -> None:
        self._programs = programs
        self._accumulation = accumulation
        self._loaded_in_part: set[Part] = set()
        self._mended: set[Part] = set()
        self._replaced = False

    def check_whole(self) -> None:
        """See that weights and states are those of one step, and that their files are whole.

        Raises:
            StepError: a step failed after some units had taken it, or a checkpoint was loaded in
                part.
            StorageError: a file of the SSD tier has lost a part.
        """
        self._check_loaded()
        memory = self._programs.memory
        if memory is not None and memory.file is not None:
            memory.file.check()
        self.check_not_torn()

    def check_not_torn(self) -> None:
        """See that no step failed after some units had taken it.

        Raises:
            StepError: one did.
        """
        updater = self._programs.updater
        torn = updater.torn if updater is not None else ()
        if torn:
            raise StepError(
                "a step failed after some units were updated, so the model stands between two "
                f"steps: {', '.join(torn)} took the step, the others did not. Load a checkpoint "
                "with lohan_fx.load(), or model.load_state_dict() and optimizer.load_state_dict(), "
                "both, and go on; or call model.lohan.close(), load, and compile again. With "
                "schedule='serial' or 'deferred' nothing is updated before optimizer.step(), so an "
                "error or interrupt in backward (Ctrl-C) only loses the step"
            )

    def check_step(self) -> None:
        """Refuse a forward while the last step is not over, or a load that failed is not mended.

        Raises:
            StepError, StorageError: as `check_whole`; or backward has begun a step that
                optimizer.step() has not ended; or the model is closed in part.
        """
        if self._programs.closing:
            raise StepError(
                "the model is closed in part, as model.lohan.close() was interrupted: call it again"
            )
        self._check_loaded()
        updater = self._programs.updater
        if updater is None:
            return
        self.check_whole()
        if updater.pending:
            raise StepError(_missing_step(self._accumulation.limit))

    def check_ended(self) -> None:
        """Finish the last step; refuse if it is under way: states are half updated then, and what
        is written there may be updated again, or was already.

        Raises:
            StepError: backward has begun a step that optimizer.step() has not ended.
            the first error of an update.
        """
        updater = self._programs.updater
        if updater is not None and updater.pending:
            raise StepError(
                "the model's weights or the optimizer's states are read or replaced between "
                "backward and optimizer.step(), while units are being updated: call "
                "optimizer.step() first"
            )
        self._programs.sync()

    def check_saving(self) -> None:
        """See that what is saved now are the weights and states of one step.

        Raises:
            StepError, StorageError: as `check_whole` and `check_ended`.
        """
        self.check_ended()
        if not self._replaced:
            self.check_whole()

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Let model.state_dict() show what a checkpoint is about to replace, whole or not."""
        self._replaced = True
        try:
            yield
        finally:
            self._replaced = False

    @contextmanager
    def loading(self, parts: Sequence[Part]) -> Iterator[None]:
        """While all values of these parts are replaced; without its end they are neither the old
        ones nor the new, and `check_whole` says so."""
        self._loaded_in_part |= set(parts)
        yield
        for part in parts:
            self.loaded(part)

    def loaded(self, part: Part) -> None:
        """All weights, or all states of the optimizer, were loaded: the two mend a torn model."""
        self._loaded_in_part.discard(part)
        updater = self._programs.updater
        if updater is None or not updater.torn:
            return
        self._mended |= {part}
        if self._mended == {"model", "optimizer"}:
            updater.torn = ()
            self._mended = set()

    def _check_loaded(self) -> None:
        if self._loaded_in_part:
            parts = " and the ".join(sorted(self._loaded_in_part))
            raise StepError(
                f"a checkpoint was loaded in part: the {parts} "
                "have neither the values that they had nor those that were saved. Load another "
                "with lohan_fx.load(), or model.load_state_dict() and optimizer.load_state_dict()"
            )


def _missing_step(limit: int | None) -> str:
    """What a forward says between a step's last backward and optimizer.step().

    Args:
        limit: backwards that make a step; None: the last is the one outside ``no_sync()``.
    """
    if limit is None:
        ran = "a backward outside model.no_sync() ran, which is its step's last"
        more = "; run the other backwards of a step inside model.no_sync()"
    elif limit > 1:
        ran, more = f"{limit} of {limit} backwards of accumulate={limit} have run", ""
    else:
        ran = "backward ran"
        more = "; to add up several backwards, compile with accumulate= or gradients='kept'"
    return (
        f"{ran}, but optimizer.step() was not called since, or failed: call optimizer.step() "
        "before the next forward, as gradients are consumed when they appear (after zero_grad() it "
        f"leaves the step out, if no unit has taken it yet){more}"
    )


class LoadsNothing:
    """Refuses load_state_dict() of a model on the meta device, and of its optimizer, before there
    is memory: torch would copy the weights nowhere, and the states onto the meta device.

    Args:
        programs: held weakly.
    """

    def __init__(self, programs: Programs) -> None:
        self._programs = weakref.ref(programs)

    def before_weights(
        self, model: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any
    ) -> None:
        """Hook of the module. Parameters that have data can be loaded: adapters, say."""
        named = model.named_parameters(remove_duplicate=False)
        if self._has_none() and any(p.is_meta and prefix + name in state for name, p in named):
            self._refuse("the weights", "give them to lohan_fx.compile as weights=")

    def before_states(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Hook of the optimizer. Hyperparameters can be loaded, and what is of such parameters."""
        keys = [key for group in state["param_groups"] for key in group["params"]]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        pairs = zip(keys, parameters, strict=False)  # torch says so if their numbers differ
        if self._has_none() and any(p.is_meta and key in state["state"] for key, p in pairs):
            self._refuse("the states", "load a checkpoint with lohan_fx.load")

    def _has_none(self) -> bool:
        programs = self._programs()
        return programs is not None and programs.memory is None

    def _refuse(self, what: str, otherwise: str) -> None:
        raise StepError(
            f"{what} would be lost: the model is on the meta device until its first forward. Call "
            "model.lohan.prepare(*args, **kwargs) with a batch to train on before "
            f"load_state_dict() (and so before a trainer resumes), or {otherwise}"
        )
