"""Values that come before there is memory for them: the first program's plan says where it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lohan_fx.weights import Source

Lend = Callable[[Mapping[str, nn.Parameter]], None]
"""Puts a checkpoint's states of the parameters that it is given into the optimizer."""


@dataclass(kw_only=True)
class Arriving:
    """What waits for memory.

    Attributes:
        source: values of parameters, read at the first forward.
        masters: parameters whose float32 masters `source` has, besides.
        states: the optimizer's states, of a checkpoint.
    """

    source: Source | None = None
    masters: Sequence[str] = ()
    states: Lend | None = None

    def forget_masters(self) -> None:
        """Other weights come: a checkpoint's masters are of no use any more."""
        self.masters = ()

    def arrived(self) -> None:
        """There was memory for everything."""
        self.source = self.states = None
        self.masters = ()
