"""What a training step does, as plain data: ops, storages, parameter units.

`annotate` makes a `Workload` from a captured joint graph; planners, the lowering and
the simulator read it. Nothing here knows torch.

Values are keyed by *storage*: a tensor and all views of it are one `Value`. View ops are
not listed; an op that reads a view reads the storage behind it.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

Phase = Literal["forward", "backward"]
ValueKind = Literal["activation", "input", "parameter", "buffer", "gradient", "constant"]

MODEL_INPUT_KINDS: frozenset[str] = frozenset({"input", "parameter", "buffer", "constant"})
"""Kinds that exist before the step begins; they are no residuals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One storage.

    `name` is the FX node that creates it; `num_bytes` its whole size in bytes;
    `unit` names the parameter unit for parameters; `is_output` says that it is
    held to the end of the step: user code receives it, or it is not on the device at all (then
    `num_bytes` is 0).
    """

    name: str
    num_bytes: int
    kind: ValueKind = "activation"
    block: str = ""
    unit: str | None = None
    is_output: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One compute op of the joint graph, in execution order.

    `seconds` is the roofline estimate max(flops / rate, bytes / bandwidth).
    `scratch_bytes` is what the op holds on the device while it runs, beyond what it reads and
    writes; less than nothing, if a result takes the memory of something that it reads last.
    `recomputable` is False for ops that draw randomness, mutate, communicate or whose
    result cannot be had again; their results must be kept or swapped.
    """

    name: str
    target: str
    block: str
    phase: Phase
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    seconds: float = 0.0
    scratch_bytes: int = 0
    recomputable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Parameters that move together: a transformer block, an embedding, a head.

    `parameters` are fully qualified names in flat order; `num_params` counts the elements,
    padding included. Bytes are of the whole unit: `compute_bytes` of the copy that the
    graph reads, `state_bytes` of everything else that training keeps for it (masters and
    optimizer state; 0 for a frozen unit), `gradient_bytes` of what backward emits (its host
    buffer is laid out like the compute copy). `own_master` says that the compute copy is the
    master itself, so an update reads it too.
    `gradients` are the values that backward emits for it, in flat order of their parameters.
    `update_scratch_bytes` is what the optimizer allocates on the device while it updates the
    unit there (units in other tiers allocate nothing on the device).
    `accumulator_bytes`, a part of `state_bytes`, is the flat in which gradients add up (0 if the
    unit has none). So is `master_bytes`: the master, if the compute copy can be cast from it
    wherever the graph reads it, as nobody else looks at the copy (0 if it cannot be).
    """

    name: str
    block: str
    parameters: tuple[str, ...]
    num_params: int
    compute_bytes: int
    state_bytes: int
    gradient_bytes: int
    gradients: tuple[str, ...] = ()
    update_scratch_bytes: int = 0
    own_master: bool = False
    accumulator_bytes: int = 0
    master_bytes: int = 0

    @property
    def trainable(self) -> bool:
        return bool(self.gradients)

    @property
    def has_separate_copy(self) -> bool:
        """Whether the compute copy is one of a master that is kept beside it, so that the two can
        live in different tiers."""
        return not self.own_master and self.state_bytes > 0

    @property
    def update_read_bytes(self) -> int:
        """What an update must read of the unit's states."""
        return self.state_bytes + (self.compute_bytes if self.own_master else 0)

    @property
    def update_write_bytes(self) -> int:
        """What an update writes: all but the gradient."""
        return self.state_bytes + self.compute_bytes - self.accumulator_bytes

    def device_update_bytes(self, *, copy: bool = True) -> int:
        """What crosses the memory of the device when it updates the unit there: states and `copy`,
        if it is kept, are read and written, the gradient read (and before, if it is added,
        written)."""
        kept = self.compute_bytes if copy else 0
        return 2 * (self.state_bytes + kept) + self.gradient_bytes

    @property
    def cast_bytes(self) -> int:
        """What crosses the memory of the device when the compute copy is cast from the master."""
        return self.master_bytes + self.compute_bytes


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A whole training step. Ops are in execution order, forward then backward."""

    name: str
    ops: tuple[Op, ...]
    values: Mapping[str, Value]
    units: tuple[Unit, ...] = ()
    num_tokens: int = 0
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [op.name for op in self.ops]
        if len(set(names)) != len(names):
            raise ValueError("op names must be unique")
        known = set(self.values)
        for op in self.ops:
            missing = [v for v in (*op.reads, *op.writes) if v not in known]
            if missing:
                raise ValueError(f"op {op.name} names unknown values {missing}")
        phases = [op.phase for op in self.ops]
        if "forward" in phases[self.num_forward_ops :]:
            raise ValueError("forward ops must come before backward ops")

    @cached_property
    def num_forward_ops(self) -> int:
        return next((i for i, op in enumerate(self.ops) if op.phase == "backward"), len(self.ops))

    @cached_property
    def op_index(self) -> Mapping[str, int]:
        return {op.name: i for i, op in enumerate(self.ops)}

    @cached_property
    def unit_by_name(self) -> Mapping[str, Unit]:
        return {unit.name: unit for unit in self.units}

    @cached_property
    def producer(self) -> Mapping[str, int]:
        """Value name → index of the op that creates it (absent for model inputs)."""
        return {v: i for i, op in enumerate(self.ops) for v in op.writes}

    @cached_property
    def users(self) -> Mapping[str, tuple[int, ...]]:
        """Value name → indices of the ops that read it, ascending."""
        found: dict[str, list[int]] = {name: [] for name in self.values}
        for i, op in enumerate(self.ops):
            for v in dict.fromkeys(op.reads):
                found[v].append(i)
        return {name: tuple(where) for name, where in found.items()}

    @cached_property
    def residuals(self) -> tuple[str, ...]:
        """Activations made in forward and read in backward, in order of creation."""
        n = self.num_forward_ops
        return tuple(
            v
            for op in self.ops[:n]
            for v in op.writes
            if self.users[v] and self.users[v][-1] >= n and not self.values[v].is_output
        )

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """Block names in forward order."""
        return tuple(dict.fromkeys(op.block for op in self.ops if op.phase == "forward"))

    @cached_property
    def steps_reads(self) -> tuple[tuple[str, ...], ...]:
        """For each op what it reads that the step itself makes, each once."""
        values = self.values
        return tuple(
            tuple(dict.fromkeys(v for v in op.reads if values[v].kind not in MODEL_INPUT_KINDS))
            for op in self.ops
        )

    @cached_property
    def units_read(self) -> tuple[tuple[str, ...], ...]:
        """For each op the units whose parameters it reads, each once."""
        of = {v.name: v.unit for v in self.values.values() if v.kind == "parameter" and v.unit}
        return tuple(tuple(dict.fromkeys(of[v] for v in op.reads if v in of)) for op in self.ops)

    @cached_property
    def lowered(self) -> dict[int | str, Any]:
        """What `program.lower` made last for an op or a region: most of it is the same the next
        time, and planning lowers a workload hundreds of times."""
        return {}

    @cached_property
    def parameters_of_unit(self) -> Mapping[str, tuple[str, ...]]:
        """Unit name → its parameter values."""
        found: dict[str, list[str]] = {unit.name: [] for unit in self.units}
        for v in self.values.values():
            if v.kind == "parameter" and v.unit is not None:
                found[v.unit].append(v.name)
        return {name: tuple(vs) for name, vs in found.items()}

    def first_backward_use(self, value: str) -> int:
        uses = self.users[value]
        return uses[bisect_left(uses, self.num_forward_ops)]

    def last_forward_use(self, value: str) -> int:
        """Index of the last forward op that reads the value, or of its producer."""
        uses = self.users[value]
        forward = bisect_left(uses, self.num_forward_ops)
        return uses[forward - 1] if forward else self.producer[value]

    @cached_property
    def must_save(self) -> frozenset[str]:
        """Residuals that no region can make again, whatever else is saved.

        Those are made by ops that cannot run again, or need the result of one through values that
        are no residuals (a mask made from random bits: the bits are gone, so the mask is saved).
        """
        residuals = set(self.residuals)
        lost: set[str] = set()
        found: set[str] = set()
        for op in self.ops[: self.num_forward_ops]:
            if op.recomputable and lost.isdisjoint(op.reads):
                continue
            found.update(v for v in op.writes if v in residuals)
            values = (self.values[v] for v in op.writes if v not in residuals)
            lost.update(
                v.name for v in values if not v.is_output and v.kind not in MODEL_INPUT_KINDS
            )
        return frozenset(found)

    @cached_property
    def inter_block(self) -> frozenset[str]:
        """Residuals that one block makes and the forward of another reads: block inputs."""
        n = self.num_forward_ops
        return frozenset(
            v
            for v in self.residuals
            if any(self.ops[i].block != self.values[v].block for i in self.users[v] if i < n)
        )

    def recompute_ops(
        self, wanted: Iterable[str], available: Iterable[str]
    ) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Exact cost of recomputing `wanted` on the DAG.

        Returns the indices of the forward ops to run again, ascending, and the values that
        they need but that are neither available nor recomputable (results of random ops):
        those must be saved as well. Model inputs are always available.
        """
        have = available if isinstance(available, set | frozenset) else set(available)
        blocked: dict[str, None] = {}
        run: set[int] = set()
        stack = [v for v in wanted if v not in have]
        while stack:
            v = stack.pop()
            if v in have or self.values[v].kind in MODEL_INPUT_KINDS or v in blocked:
                continue
            i = self.producer[v]
            op = self.ops[i]
            if not op.recomputable:
                blocked[v] = None
                continue
            if i not in run:
                run.add(i)
                stack.extend(op.reads)
        return tuple(sorted(run)), tuple(blocked)

    def timed(self, seconds: Mapping[str, float]) -> Workload:
        """The same workload with measured seconds in place of the roofline's, by op name."""
        ops = tuple(
            dataclasses.replace(op, seconds=seconds[op.name]) if op.name in seconds else op
            for op in self.ops
        )
        return dataclasses.replace(self, ops=ops)

    @property
    def num_params(self) -> int:
        return sum(unit.num_params for unit in self.units)

    @cached_property
    def forward_flops(self) -> int:
        return sum(op.flops for op in self.ops if op.phase == "forward")

    @cached_property
    def backward_flops(self) -> int:
        return sum(op.flops for op in self.ops if op.phase == "backward")
