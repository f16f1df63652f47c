"""What backward reads and user code can reach, and whether it was written in the meantime.

Autograd counts the writes into what it saves and refuses a backward through what has changed. A
program saves in its own hands, and reads parameters again, so it has to count itself. Updates are
no writes that a tensor counts, nor are weights that a checkpoint brings: see
`ModelStates.generation`. What is written through ``.data`` nobody counts, autograd neither; where
a compute copy follows it, `ModelStates.uncounted` does. Other memory (``p.data = …``) lies
elsewhere than the unit shows it. (Autograd goes on then, with what the parameter had or with what
it has, op by op.)
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from lohan_fx._compat import versions_of
from lohan_fx.errors import StepError
from lohan_fx.runtime.unit_states import UnitStates, addresses_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Reachable:
    """What a program's backward reads that user code may write into.

    Attributes:
        saved: index among the saved tensors, and what that is to the user.
        buffers: their names.
        constants: tensors that the graph holds, and their names in it.
        parameters: by name; autograd's graph of a step must not keep them.
        places: of each of them: its unit, which it must not keep either, and which one of it.
        uncounted: see `ModelStates`.
    """

    saved: tuple[tuple[int, str], ...]
    buffers: tuple[str, ...]
    constants: tuple[tuple[str, Tensor], ...]
    parameters: tuple[tuple[str, weakref.ref[nn.Parameter]], ...]
    places: tuple[tuple[weakref.ref[UnitStates], int], ...]
    uncounted: Mapping[str, int]

    def versions(self, saved: Sequence[Tensor], buffers: Sequence[Tensor]) -> list[int]:
        """How often each was written so far; those of deleted parameters are left out."""
        parameters = [p for _, ref in self.parameters if (p := ref()) is not None]
        own = (saved[index] for index, _ in self.saved)
        counted = versions_of([*own, *buffers, *(c for _, c in self.constants), *parameters])
        return counted + [self.uncounted.get(name, 0) for name, _ in self.parameters]

    def _moved(self) -> list[str]:
        """Parameters that user code gave other memory, which nobody has taken over."""
        both = zip(self.parameters, self.places, strict=True)
        here = [
            (name, p, states, i)
            for (name, ref), (unit, i) in both
            if (p := ref()) is not None and (states := unit()) is not None
        ]
        now = addresses_of(p for _, p, _, _ in here)
        return [
            name
            for (name, _, states, i), address in zip(here, now, strict=True)
            if states.addresses[i : i + 1] != [address]  # none: interrupted while it moved
        ]

    def check(
        self, saved: Sequence[Tensor], buffers: Sequence[Tensor], before: Sequence[int]
    ) -> None:
        """See that nothing was written since.

        Raises:
            StepError: names what was.
        """
        now, moved = self.versions(saved, buffers), self._moved()
        if now == before and not moved:
            return
        names = [
            *(what for _, what in self.saved),
            *(f"buffer {name}" for name in self.buffers),
            *(f"constant {name} of forward" for name, _ in self.constants),
            *(f"parameter {name}" for name, ref in self.parameters if ref() is not None),
            *(f"parameter {name}" for name, _ in self.parameters),
        ]
        written = [n for n, a, b in zip(names, before, now, strict=True) if a != b]
        written += [f"parameter {name}" for name in moved]
        written = [*dict.fromkeys(written)]  # a parameter may be there more than once
        raise changed(f"{', '.join(written[:3])}{' …' if len(written) > 3 else ''} was written")


def changed(what: str) -> StepError:
    """The error of a backward that would not be that of its forward."""
    return StepError(
        f"{what} between forward and backward, which needs the value that forward saw: do it after "
        "backward, or write into a clone. This forward's backward cannot run any more; the next "
        "forward can"
    )
