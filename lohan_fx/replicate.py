"""The workload of a deep model from those of two shallow ones: blocks repeat. No torch.

A model with n + 1 equal blocks runs the ops of one with n, and somewhere in forward, and
somewhere in backward, one period more. `extrapolate` finds the periods by structure, in the ops,
in the model's inputs (parameters above all) and in the units, and inserts more of them.

Names come out as a full trace would make them: every number inside a name (``addmm_47``,
``blocks.11``, ``p_blocks_3_qkv_weight``) grows linearly with the depth of the model and with the
period that it stands in, because tracing numbers things as it meets them. Both slopes are read off
the two traces. What does not fit (a period that cannot be found, a read of something
that is not there, a name made twice) raises `NotRepeatedError`; nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from lohan_fx.workload import MODEL_INPUT_KINDS, Op, Unit, Value, ValueKind, Workload

T = TypeVar("T", Op, Value, Unit)

NameKind = Literal["plain", "node", "block"]
"""plain: all numbers are written out. node: an FX node, whose first one has no ``_0``. block: a
block, whose first run has no ``@1``."""


class NotRepeatedError(Exception):
    """Two shallow workloads do not determine a deep one; the text says why."""


# -- names -----------------------------------------------------------------------------------

_NUMBER = re.compile(r"\d+")
_NODE = re.compile(r"(?P<stem>.*?)(?P<count>_\d+)?(?P<result>_r\d+|\.\d+)?")
"""An FX node, or one of its results: ``mm``, ``mm_1``, ``gru_2_r1``, ``gru_2.3``."""


@dataclass(frozen=True, slots=True)
class _Name:
    """A name as a template with its numbers taken out.

    `explicit` says that the name itself ends in ``_0``, so that a first one is written that way.
    """

    kind: NameKind
    template: str
    numbers: tuple[int, ...]
    explicit: bool = False

    @classmethod
    def parse(cls, text: str, kind: NameKind) -> _Name:
        full, explicit = text, False
        if kind == "node":
            stem, count, result = _parts(text)
            explicit = count == "_0"
            full = f"{stem}{count or '_0'}{result}"
        elif kind == "block" and not re.search(r"@\d+$", text):
            full = f"{text}@1"
        numbers = tuple(int(n) for n in _NUMBER.findall(full))
        return cls(kind, _NUMBER.sub("{}", full), numbers, explicit)

    def render(self, numbers: Sequence[int]) -> str:
        """The name with other numbers."""
        if any(n < 0 for n in numbers):
            raise NotRepeatedError(f"the numbers in {self.template!r} would fall below zero")
        text = self.template.format(*numbers)
        if self.kind == "node" and not self.explicit:
            stem, count, result = _parts(text)
            return f"{stem}{'' if count == '_0' else count}{result}"
        return text.removesuffix("@1") if self.kind == "block" else text


def _parts(text: str) -> tuple[str, str, str]:
    """(stem, count, result) of a node's name; the last two may be empty."""
    match = _NODE.fullmatch(text)
    assert match is not None
    return match["stem"], match["count"] or "", match["result"] or ""


# -- items: ops, inputs and units in one shape -----------------------------------------------


@dataclass(frozen=True, slots=True)
class _Item:
    """One element of a sequence: what must be equal, and the names that change."""

    same: Hashable
    names: tuple[_Name, ...]
    build: Callable[[Sequence[str]], tuple[object, ...]]
    """Names, in the same order → the new op with its values, input or unit."""

    @property
    def signature(self) -> Hashable:
        return (self.same, tuple(n.template for n in self.names))

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(k for n in self.names for k in n.numbers)

    def render(self, numbers: Sequence[int]) -> tuple[object, ...]:
        texts = []
        at = 0
        for name in self.names:
            texts.append(name.render(numbers[at : at + len(name.numbers)]))
            at += len(name.numbers)
        return self.build(texts)


def _value_kind(value: Value) -> NameKind:
    """Inputs are numbered by hand, nodes by FX."""
    return "plain" if value.kind in MODEL_INPUT_KINDS and value.kind != "constant" else "node"


def _op_items(w: Workload) -> list[_Item]:
    """Reads in the order in which they were made: that order does not depend on names."""
    rank: dict[str, tuple[int, int]] = {
        name: (-1, i) for i, name in enumerate(n for n in w.values if n not in w.producer)
    }
    for i, op in enumerate(w.ops):
        rank.update({v: (i, k) for k, v in enumerate(op.writes)})
    return [_op_item(w, op, sorted(op.reads, key=rank.__getitem__)) for op in w.ops]


def _op_item(w: Workload, op: Op, reads: Sequence[str]) -> _Item:
    made = [w.values[v] for v in op.writes]
    units = [v.unit for v in made]
    names = (
        _Name.parse(op.name, "node"),
        _Name.parse(op.block, "block"),
        *(_Name.parse(v, _value_kind(w.values[v])) for v in reads),
        *(_Name.parse(v.name, "node") for v in made),
        *(_Name.parse(v.block, "block") for v in made),
    )

    def build(texts: Sequence[str]) -> tuple[object, ...]:
        n, m = len(reads), len(made)
        written = texts[2 + n : 2 + n + m]
        new = replace(
            op,
            name=texts[0],
            block=texts[1],
            reads=tuple(sorted(texts[2 : 2 + n])),
            writes=tuple(written),
        )
        values = (
            replace(v, name=name, block=block)
            for v, name, block in zip(made, written, texts[2 + n + m :], strict=True)
        )
        return (new, *values)

    same = (
        replace(op, name="", block="", reads=(), writes=()),
        len(reads),
        tuple(replace(v, name="", block="") for v in made),
        tuple(units),
    )
    return _Item(same, names, build)


def _input_items(w: Workload, kind: ValueKind) -> list[_Item]:
    """What exists before the step, and tensors that forward holds as constants."""
    return [_input_item(v) for n, v in w.values.items() if n not in w.producer and v.kind == kind]


def _input_item(value: Value) -> _Item:
    unit = value.unit
    names = [_Name.parse(value.name, _value_kind(value)), _Name.parse(value.block, "block")]
    if unit is not None:
        names.append(_Name.parse(unit, "plain"))

    def build(texts: Sequence[str]) -> tuple[object, ...]:
        owner = texts[2] if unit is not None else None
        return (replace(value, name=texts[0], block=texts[1], unit=owner),)

    return _Item(replace(value, name="", block="", unit=None), tuple(names), build)


def _unit_items(w: Workload) -> list[_Item]:
    return [_unit_item(w, u) for u in w.units]


def _unit_item(w: Workload, unit: Unit) -> _Item:
    count = len(unit.parameters)
    names = (
        _Name.parse(unit.name, "plain"),
        _Name.parse(unit.block, "plain"),
        *(_Name.parse(p, "plain") for p in unit.parameters),
        *(_Name.parse(g, _value_kind(w.values[g])) for g in unit.gradients),
    )

    def build(texts: Sequence[str]) -> tuple[object, ...]:
        return (
            replace(
                unit,
                name=texts[0],
                block=texts[1],
                parameters=tuple(texts[2 : 2 + count]),
                gradients=tuple(texts[2 + count :]),
            ),
        )

    same = (replace(unit, name="", block="", parameters=(), gradients=()), count)
    return _Item(same, names, build)


# -- sequences -------------------------------------------------------------------------------


def _stretch(
    small: Sequence[_Item], large: Sequence[_Item], copies: int, what: str
) -> list[tuple[object, ...]]:
    """`large` with `copies` periods more, each as long as what `large` has beyond `small`."""
    period = len(large) - len(small)
    if period < 0:
        raise NotRepeatedError(f"a deeper model has fewer {what}")
    a = [item.signature for item in small]
    b = [item.signature for item in large]
    front = next((p for p, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
    back = next(
        (p for p, (x, y) in enumerate(zip(a[::-1], b[::-1], strict=False)) if x != y), len(a)
    )
    if period == 0:
        if front < len(a):
            raise NotRepeatedError(f"{what} change with depth, but their number does not")
        return _cut(small, large, copies, len(large), 0)
    first, last = max(len(b) - back, period), front
    if first > last:
        raise NotRepeatedError(f"no period of {period} {what} repeats twice")
    steady = _steady(large, period)
    for at in range(first, last + 1):
        if all(steady[at - period : at]):
            return _cut(small, large, copies, at, period)
    raise NotRepeatedError(f"no period of {period} {what} repeats three times in equal steps")


def _steady(items: Sequence[_Item], period: int) -> list[bool]:
    """For each item whether it is one of three in a row, a period apart, whose numbers grow
    evenly: next to the first and the last block there may be one that is like the others but for
    the distance to what it reads."""
    end = len(items) - period
    steps = [
        _minus(items[p + period].numbers, items[p].numbers)
        if items[p].signature == items[p + period].signature
        else None
        for p in range(end)
    ]

    def even(p: int) -> bool:
        if p < 0 or p + period >= end or steps[p] is None:
            return False
        return steps[p] == steps[p + period]

    return [even(p) or even(p - period) for p in range(len(items))]


def _cut(
    small: Sequence[_Item], large: Sequence[_Item], copies: int, at: int, period: int
) -> list[tuple[object, ...]]:
    """Insert the copies at `at`: the period before it is like the one after it."""
    found = []
    for p in range(at):
        slope = _minus(large[p].numbers, small[p].numbers)
        found.append(large[p].render(_plus(large[p].numbers, slope, copies)))
    for k in range(1, copies + 1):
        for p in range(at - period, at):
            slope = _minus(large[p].numbers, small[p].numbers)
            step = _minus(large[p + period].numbers, large[p].numbers)
            numbers = _plus(_plus(large[p].numbers, slope, copies), step, k)
            found.append(large[p].render(numbers))
    for p in range(at, len(large)):
        slope = _minus(large[p].numbers, small[p - period].numbers)
        found.append(large[p].render(_plus(large[p].numbers, slope, copies)))
    return found


def _minus(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(x - y for x, y in zip(a, b, strict=True))


def _plus(a: Sequence[int], slope: Sequence[int], times: int) -> tuple[int, ...]:
    return tuple(x + times * s for x, s in zip(a, slope, strict=True))


# -- workloads -------------------------------------------------------------------------------


def extrapolate(small: Workload, large: Workload, copies: int) -> Workload:
    """The workload of a model that is `copies` periods deeper than `large`.

    Args:
        small: of a model that is one period (a block, or a few that alternate) shallower.
        large: with at least three periods that are alike.

    Raises:
        NotRepeatedError: the two do not determine the deep one.
    """
    if replace(small, ops=(), values={}, units=()) != replace(large, ops=(), values={}, units=()):
        raise NotRepeatedError("the two workloads are not of one model and batch")
    inputs = [
        row
        for kind in dict.fromkeys(v.kind for v in large.values.values())
        for row in _stretch(
            _input_items(small, kind), _input_items(large, kind), copies, f"inputs ({kind})"
        )
    ]
    units = _stretch(_unit_items(small), _unit_items(large), copies, "units")
    n, m = small.num_forward_ops, large.num_forward_ops
    a, b = _op_items(small), _op_items(large)
    forward = _stretch(a[:n], b[:m], copies, "ops of forward")
    backward = _stretch(a[n:], b[m:], copies, "ops of backward")
    values: dict[str, Value] = {}
    for row in inputs:
        _add(values, row, Value)
    ops: dict[str, Op] = {}
    for row in (*forward, *backward):
        _add(ops, row[:1], Op)
        _check_reads(ops, values, row[0])
        _add(values, row[1:], Value)
    named: dict[str, Unit] = {}
    for row in units:
        _add(named, row, Unit)
    _check_units(values, named)
    return replace(
        large,
        ops=tuple(ops.values()),
        values=values,
        units=tuple(named.values()),
    )


def _add(found: dict[str, T], row: Iterable[object], kind: type[T]) -> None:
    for x in row:
        assert isinstance(x, kind)
        if x.name in found:
            raise NotRepeatedError(f"the name {x.name!r} would be given twice")
        found[x.name] = x


def _check_reads(ops: Mapping[str, Op], values: Mapping[str, Value], op: object) -> None:
    assert isinstance(op, Op)
    missing = [v for v in op.reads if v not in values]
    if missing:
        raise NotRepeatedError(f"{op.name} would read {missing[0]!r}, which nothing makes before")


def _check_units(values: Mapping[str, Value], units: Mapping[str, Unit]) -> None:
    odd = {v.unit for v in values.values() if v.unit is not None} - set(units)
    lost = [g for u in units.values() for g in u.gradients if g not in values]
    if odd or lost:
        raise NotRepeatedError(f"units and values do not match: {sorted(odd)[:3] or lost[:3]}")
