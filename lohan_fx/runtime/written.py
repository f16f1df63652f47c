"""What backward reads and user code can reach, and whether it was written in the meantime.

Autograd counts the writes into what it saves and refuses a backward through what has changed. A
program saves in its own hands, and reads parameters and buffers again, so it has to count itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from lohan_fx._compat import versions_of
from lohan_fx.errors import StepError


@dataclass(frozen=True, slots=True, kw_only=True)
class Reachable:
    """What a program's backward reads that user code may write into.

    Attributes:
        saved: index among the saved tensors, and what that is to the user.
        parameters: by name.
        buffers: their names.
        find_buffer: name → the module's buffer.
    """

    saved: tuple[tuple[int, str], ...]
    parameters: tuple[tuple[str, nn.Parameter], ...]
    buffers: tuple[str, ...]
    find_buffer: Callable[[str], Tensor]

    def versions(self, saved: Sequence[Tensor]) -> list[int]:
        """How often each was written so far."""
        parameters = (p for _, p in self.parameters)
        buffers = map(self.find_buffer, self.buffers)
        return versions_of([*parameters, *buffers, *(saved[index] for index, _ in self.saved)])

    def check(self, saved: Sequence[Tensor], before: Sequence[int]) -> None:
        """See that nothing was written since.

        Raises:
            StepError: names what was.
        """
        now = self.versions(saved)
        if now == before:
            return
        names = [
            *(f"parameter {name}" for name, _ in self.parameters),
            *(f"buffer {name}" for name in self.buffers),
            *(what for _, what in self.saved),
        ]
        written = [n for n, a, b in zip(names, before, now, strict=True) if a != b]
        raise StepError(
            f"{', '.join(written[:3])}{' …' if len(written) > 3 else ''} was written in place "
            "between forward and backward, which needs the value that forward saw (plain PyTorch "
            "refuses that, too, where its backward does): write after backward, or into a clone. "
            "This forward's backward cannot run any more; the next forward can"
        )
