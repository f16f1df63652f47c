"""What a figure is made of: rows against the paper's values, statements, a plot. Data only."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from benchmarks.papers.jobs import Job, Results, Step

VALUES = Path(__file__).with_name("values.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A number that a paper states. `gate`: the deviation that tests allow, if any."""

    figure: str
    key: str
    label: str
    value: float
    unit: str
    where: str
    gate: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A statement of a paper. `order`: about who wins, or where the optimum lies."""

    figure: str
    key: str
    text: str
    where: str
    order: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A stated number and the simulation's; `ours` None where nothing fits."""

    paper: Value
    ours: float | None

    @property
    def ratio(self) -> float | None:
        """Ours over the paper's."""
        if self.ours is None or not self.paper.value:
            return None
        return self.ours / self.paper.value

    @property
    def within_gate(self) -> bool | None:
        """Whether the deviation is allowed; None without a gate."""
        if self.paper.gate is None:
            return None
        return self.ratio is not None and abs(self.ratio - 1) <= self.paper.gate


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A statement, whether the simulation agrees, and what it found."""

    claim: Claim
    holds: bool
    found: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line, or one group of bars, of a plot; `stars` are indices of marked points."""

    label: str
    x: Sequence[float | str]
    y: Sequence[float]
    stated: bool = False
    stars: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One pair of axes."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    kind: Literal["line", "bar"] = "line"
    log_x: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A finished figure.

    Attributes:
        setup: what was simulated, in a sentence or two.
        notes: what differs from the paper, and why.
    """

    key: str
    title: str
    setup: str
    rows: Sequence[Row]
    checks: Sequence[Check]
    panels: Sequence[Panel]
    notes: Sequence[str] = ()


class Values:
    """values.toml, by figure and key; counts what was asked for."""

    def __init__(self, path: Path = VALUES) -> None:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        self.values = {(v["figure"], v["key"]): Value(**v) for v in data["value"]}
        self.claims = {(c["figure"], c["key"]): Claim(**c) for c in data["claim"]}
        if len(self.values) < len(data["value"]) or len(self.claims) < len(data["claim"]):
            raise ValueError(f"{path.name}: a key is there twice")

    def of(self, figure: str) -> FigureValues:
        return FigureValues(self, figure)


@dataclass(frozen=True)
class FigureValues:
    """The stated values of one figure."""

    values: Values
    figure: str

    def __getitem__(self, key: str) -> Value:
        return self.values.values[self.figure, key]

    def row(self, key: str, ours: float | None) -> Row:
        return Row(paper=self[key], ours=ours)

    def check(self, key: str, holds: bool, found: str) -> Check:
        return Check(claim=self.values.claims[self.figure, key], holds=bool(holds), found=found)

    @cached_property
    def keys(self) -> frozenset[str]:
        """Keys of the figure's values and claims."""
        both = (*self.values.values, *self.values.claims)
        return frozenset(key for figure, key in both if figure == self.figure)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """How a figure is made.

    `jobs` is all that it needs; `gates` are the steps behind the values that have a gate.
    """

    key: str
    title: str
    jobs: Callable[[], Sequence[Job]]
    build: Callable[[Results, FigureValues], Figure]
    gates: Mapping[str, Step] = field(default_factory=dict)

    def figure(self, results: Results, values: Values) -> Figure:
        """Build, and see to it that no stated value is left out."""
        own = values.of(self.key)
        made = self.build(results, own)
        used = {r.paper.key for r in made.rows} | {c.claim.key for c in made.checks}
        gated = {key for key in own.keys if (self.key, key) in values.values and own[key].gate}
        if gated != set(self.gates):
            raise ValueError(f"{self.key}: no step for the gates {sorted(gated ^ set(self.gates))}")
        if used != own.keys:
            raise ValueError(f"{self.key} does not use {sorted(own.keys ^ used)}")
        return made


def best(values: Mapping[Any, float]) -> Any:
    """Key of the largest value; the first of equal ones."""
    return max(values, key=lambda k: values[k])


def join(parts: Sequence[str]) -> str:
    """``a, b, c``."""
    return ", ".join(parts)


def spread(label: str, values: Sequence[float], digits: int = 1) -> str:
    """``label 1.0, 2.0``."""
    return f"{label} " + join([f"{v:.{digits}f}" for v in values])
