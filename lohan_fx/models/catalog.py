"""The models that have a name: sizes and how to build them. Nothing here imports torch at once."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lohan_fx.errors import LohanError

if TYPE_CHECKING:
    from torch import nn

Family = Literal["gpt", "dit"]

FAMILIES: Mapping[Family, str] = {
    "gpt": "LoHan, Table IV",
    "dit": "LoHan, Table VI",
}

_SEQUENCE: Mapping[Family, int] = {"gpt": 1024, "dit": 1024}
"""GPT: §V-A. DiT: a 64 x 64 latent in patches of 2 x 2 (§V-H: 512 x 512, DiT-XL/2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """One row of Table IV or VI.

    Attributes:
        name: as on the command line, ``gpt-13b``.
        family: ``gpt`` or ``dit``.
        layers, heads, hidden: number of blocks, attention heads, width.
        sequence: tokens of one sample, if nothing else is asked for.
    """

    name: str
    family: Family
    layers: int
    heads: int
    hidden: int

    @property
    def sequence(self) -> int:
        return _SEQUENCE[self.family]

    @property
    def items(self) -> str:
        """What throughput counts."""
        return "tokens" if self.family == "gpt" else "images"

    def build(self, layers: int | None = None, *, sequence: int | None = None) -> nn.Module:
        """The module, with `layers` blocks in place of all; use under ``torch.device("meta")``.

        Raises:
            LohanError: the model has a fixed sequence length, and another one is asked for.
        """
        layers = self.layers if layers is None else layers
        if self.family == "gpt":
            from lohan_fx.models.gpt import GPT

            length = sequence or self.sequence
            return GPT(layers, self.heads, self.hidden, sequence=length)
        from lohan_fx.models.dit import DiT

        self._check(sequence)
        return DiT(layers, self.heads, self.hidden)

    def inputs(
        self, batch: int, sequence: int | None = None, *, device: str = "meta"
    ) -> dict[str, Any]:
        """Keyword arguments of forward; random ones, if `device` is not the meta device."""
        import torch

        def integers(limit: int, *size: int) -> torch.Tensor:
            return torch.randint(limit, size, device=device)

        if self.family == "gpt":
            from lohan_fx.models.gpt import VOCABULARY

            length = sequence or self.sequence
            ids, targets = (integers(VOCABULARY, batch, length) for _ in range(2))
            return {"ids": ids, "targets": targets}
        from lohan_fx.models.dit import LATENT_CHANNELS, LATENT_SIZE, NUM_CLASSES

        self._check(sequence)
        size = (batch, LATENT_CHANNELS, LATENT_SIZE, LATENT_SIZE)
        return {
            "x": torch.randn(size, device=device),
            "t": integers(1000, batch),
            "y": integers(NUM_CLASSES, batch),
            "target": torch.randn(size, device=device),
        }

    def _check(self, sequence: int | None) -> None:
        if sequence not in (None, self.sequence):
            raise LohanError(
                f"{self.name} has {self.sequence} tokens a sample (a 512 x 512 image), not "
                f"{sequence}: leave the sequence length out"
            )


def _rows(family: Family, *rows: tuple[str, int, int, int]) -> tuple[NamedModel, ...]:
    return tuple(
        NamedModel(name=f"{family}-{size}", family=family, layers=n, heads=heads, hidden=hidden)
        for size, n, heads, hidden in rows
    )


_MODELS: tuple[NamedModel, ...] = (
    *_rows(  # LoHan, Table IV
        "gpt",
        ("6b", 28, 32, 4096),
        ("13b", 40, 40, 5120),
        ("30b", 48, 56, 7168),
        ("70b", 80, 64, 8192),
        ("135b", 88, 88, 11264),
        ("175b", 96, 96, 12288),
        ("276b", 112, 112, 14336),
        ("412b", 128, 128, 16384),
    ),
    *_rows(  # LoHan, Table VI
        "dit",
        ("0.67b", 28, 16, 1152),
        ("0.9b", 30, 16, 1280),
        ("1.4b", 32, 16, 1536),
        ("10b", 28, 32, 4096),
        ("20b", 40, 40, 5120),
        ("40b", 48, 56, 7168),
    ),
)

_BY_NAME: Mapping[str, NamedModel] = {m.name: m for m in _MODELS}


def names() -> tuple[str, ...]:
    """All names: GPTs, then DiTs, each from small to large."""
    return tuple(_BY_NAME)


def _key(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace("0.90b", "0.9b")


def is_known(name: str) -> bool:
    """Whether `named` knows the name."""
    return _key(name) in _BY_NAME


def named(name: str) -> NamedModel:
    """The model of that name; case does not matter.

    Raises:
        LohanError: there is none; the message has the nearest name and all names.
    """
    found = _BY_NAME.get(_key(name))
    if found is not None:
        return found
    near = difflib.get_close_matches(_key(name), names(), n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise LohanError(f"no model is named {name!r}: {hint}known are {', '.join(names())}")


def family_of(name: str) -> tuple[NamedModel, ...]:
    """All models of the family of that name (``gpt`` or ``gpt-13b``), from small to large.

    Raises:
        LohanError: no family or model has that name.
    """
    key = _key(name)
    family = key if key in FAMILIES else named(name).family
    return tuple(m for m in _MODELS if m.family == family)
