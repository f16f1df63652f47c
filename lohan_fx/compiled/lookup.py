"""Which program runs for the inputs of a call: one that is kept, a new one, or none."""

from __future__ import annotations

from typing import Any

from lohan_fx.compiled.building import Builder
from lohan_fx.compiled.fitting import PREPARE, leaves_too_little
from lohan_fx.compiled.notices import Notices
from lohan_fx.compiled.programs import CompiledProgram, Programs
from lohan_fx.compiled.structure import Seen
from lohan_fx.errors import CaptureError, LohanError
from lohan_fx.signature import Signature, difference, signature_of

MAX_PROGRAMS = 16
"""Programs kept for one model; the least recently used one goes first."""

MAX_EVALUATIONS = 4
"""Programs without backward that are made for one model in all its life. What comes later, as the
growing sequences of generation, runs op by op (`runtime.eager`)."""


class Lookup:
    """Finds programs by signature, and has those made that are not there."""

    def __init__(self, programs: Programs, builder: Builder, notices: Notices) -> None:
        self._programs = programs
        self._builder = builder
        self._notices = notices
        self._uncapturable: set[Signature] = set()

    def signature(self, seen: Seen, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
        """What a program for these inputs is found by, of a model that looks so."""
        return signature_of(seen.modes, seen.trains, self._builder.options.device, args, kwargs)

    def program(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], key: Signature
    ) -> CompiledProgram:
        """The program, made if it is not there."""
        programs, kept = self._programs, self._programs.by_signature
        found = kept.get(key)
        if found is None:
            if len(kept) >= MAX_PROGRAMS:
                _, old = kept.popitem(last=False)
                old.executor.retire()
            last = next((k for k in reversed(kept) if k.grad == key.grad), None)
            if last is not None:
                self._notices.say(
                    "shapes",
                    f"{difference(last, key, args, kwargs)}: making another program (at most "
                    f"{MAX_PROGRAMS} are kept; this is said once). Where lengths vary much, pad "
                    "batches to a multiple, as pad_to_multiple_of= of transformers' collators does",
                )
            settled = bool(kept) and not any(k.grad for k in kept)
            held = self._builder.beside().waiting
            found = kept[key] = self._builder.make(args, kwargs, key.grad)
            programs.num_evaluations += not key.grad
            self._make_room(held)
            if settled and key.grad:
                self._notices.say(
                    "settled",
                    "where states are was planned for an evaluation, which came before the first "
                    f"step that trains: call {PREPARE} before it, for a plan made for training",
                )
        kept.move_to_end(key)
        if key.grad or programs.latest is None:
            programs.latest = found
        return found

    def _make_room(self, held: int) -> None:
        """Forget evaluations that leave too little room for forwards that wait, if these hold more
        than what programs left them room for (`held`): their next call makes them again."""
        programs, options = self._programs, self._builder.options
        waiting = self._builder.beside().waiting
        if waiting <= held:
            return
        left = options.budget.device_bytes - options.forwards * waiting
        for key, program in [*programs.by_signature.items()]:
            if key.grad or leaves_too_little(program.plan):  # no plan leaves more
                continue
            if program.memory.peak_bytes > left:
                del programs.by_signature[key]
                program.executor.retire()
                programs.num_evaluations -= 1

    def evaluation(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], key: Signature
    ) -> CompiledProgram | None:
        """The program of a forward without backward; None if it is to run op by op."""
        programs = self._programs
        if key in programs.by_signature:
            return self.program(args, kwargs, key)
        if key in self._uncapturable:
            return None
        if programs.num_evaluations >= MAX_EVALUATIONS:
            self._notices.say(
                "evaluations",
                f"{MAX_EVALUATIONS} programs without backward were made: other shapes and modes "
                "are evaluated op by op, without a plan",
            )
            return None
        try:
            return self.program(args, kwargs, key)
        except CaptureError as error:
            programs.num_evaluations += 1
            self._notices.say("uncaptured", f"evaluating op by op, without a plan: {error}")
            self._uncapturable.add(key)
            return None
        except LohanError:
            programs.num_evaluations += 1  # a few times: what comes later runs op by op
            raise
