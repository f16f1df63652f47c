"""What backward reads and user code can reach, and whether it was written in the meantime.

Autograd counts the writes into what it saves and refuses a backward through what has changed. A
program saves in its own hands, and reads parameters again, so it has to count itself. Updates are
no writes that a tensor counts, nor are weights that a checkpoint brings: see
`ModelStates.generation`. What is written through ``.data`` nobody counts, autograd neither; where
a compute copy follows it, `ModelStates.uncounted` does.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from lohan_fx._compat import versions_of
from lohan_fx.errors import StepError


@dataclass(frozen=True, slots=True, kw_only=True)
class Reachable:
    """What a program's backward reads that user code may write into.

    Attributes:
        saved: index among the saved tensors, and what that is to the user.
        buffers: their names.
        constants: tensors that the graph holds, and their names in it.
        parameters: and what `uncounted` calls them; autograd's graph of a step must not keep them.
        units: what it calls their units.
        uncounted: see `ModelStates`.
    """

    saved: tuple[tuple[int, str], ...]
    buffers: tuple[str, ...]
    constants: tuple[tuple[str, Tensor], ...]
    parameters: tuple[tuple[str, weakref.ref[nn.Parameter]], ...]
    units: tuple[str, ...]
    uncounted: Mapping[str, int]

    def versions(self, saved: Sequence[Tensor], buffers: Sequence[Tensor]) -> list[int]:
        """How often each was written so far; those of deleted parameters are left out."""
        parameters = [p for _, ref in self.parameters if (p := ref()) is not None]
        own = (saved[index] for index, _ in self.saved)
        counted = versions_of([*own, *buffers, *(c for _, c in self.constants), *parameters])
        others = (*(what for what, _ in self.parameters), *self.units)
        return counted + [self.uncounted.get(what, 0) for what in others]

    def check(
        self, saved: Sequence[Tensor], buffers: Sequence[Tensor], before: Sequence[int]
    ) -> None:
        """See that nothing was written since.

        Raises:
            StepError: names what was.
        """
        now = self.versions(saved, buffers)
        if now == before:
            return
        names = [
            *(what for _, what in self.saved),
            *(f"buffer {name}" for name in self.buffers),
            *(f"constant {name} of forward" for name, _ in self.constants),
            *(what for what, ref in self.parameters if ref() is not None),
            *(what for what, _ in self.parameters),
            *self.units,
        ]
        found = (n for n, a, b in zip(names, before, now, strict=True) if a != b)
        written = [*dict.fromkeys(found)]  # a parameter may be there twice
        some = f"{', '.join(written[:3])}{' …' if len(written) > 3 else ''}"
        raise changed(f"{some} was written", "" if {*self.units}.isdisjoint(written) else _UNKNOWN)


def parameter_written(name: str) -> str:
    """What an error calls a write into a parameter."""
    return f"parameter {name}"


def unit_written(name: str) -> str:
    """What an error calls a write that compute copies followed, but nobody counted."""
    return f"a parameter of {name}"


_UNKNOWN = (
    ". PyTorch does not count what .data, NumPy or fused optimizers write, so all parameters of "
    "that unit are taken for written: torch.autograd.graph.increment_version(p) behind the write "
    "says that it was p alone"
)


def changed(what: str, note: str = "") -> StepError:
    """The error of a backward that would not be that of its forward."""
    return StepError(
        f"{what} between forward and backward, which needs the value that forward saw: do it after "
        "backward, or write into a clone. This forward's backward cannot run any more; the next "
        f"forward can{note}"
    )
