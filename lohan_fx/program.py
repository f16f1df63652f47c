"""The rewritten step as one list of instructions: what is printed, verified, simulated, run.

`lower(workload, plan)` makes the list without torch. The passes make the same program on the
FX graph; `passes.verify` reads it back from there, and a test holds the two equal.

Canonical order around op i:
  before it  fetch_unit, prefetch, wait_unit, host_view, wait, recompute
  after it   offload, release, write_gradient, emit_gradients, release_gradients
Within one kind: units in workload order, residuals in order of creation (waits and prefetches:
order of first backward use), regions in order of creation, gradients in the unit's order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lohan_fx.errors import PlanError
from lohan_fx.footprint import may_cast, may_park
from lohan_fx.plan import WHOLE, Plan, Tier, UnitPlan
from lohan_fx.workload import MODEL_INPUT_KINDS, Op, Phase, Unit, Workload

Kind = Literal[
    "compute",
    "offload",
    "release",
    "prefetch",
    "wait",
    "fetch_unit",
    "wait_unit",
    "host_view",
    "recompute",
    "write_gradient",
    "emit_gradients",
    "release_gradients",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One step of the program.

    `name` is the op, residual, unit or region that it is about. `reads` are storages that
    must be alive; `births` are (storage, bytes) that it allocates on the device; a storage
    dies after the last instruction that reads it. `num_bytes` crosses a link (0 for none),
    to or from `tier`; of a host_view, that is what all ops of the phase read through it. (A
    fetch_unit from "device" casts the unit's master, and crosses none.) A recompute carries its
    ops in `body`.
    `direct_bytes` are what compute itself reads of host memory, while it runs (0 for most); the
    device is also busy for as long as a write_gradient's `num_bytes` take to cross the link.
    """

    kind: Kind
    name: str
    phase: Phase
    reads: tuple[str, ...] = ()
    births: tuple[tuple[str, int], ...] = ()
    tier: Tier = "device"
    num_bytes: int = 0
    seconds: float = 0.0
    flops: int = 0
    scratch_bytes: int = 0
    direct_bytes: int = 0
    body: tuple[Instruction, ...] = ()

    def __str__(self) -> str:
        where = "" if self.tier == "device" else f" {self.tier}"
        size = f" {self.num_bytes} B" if self.num_bytes else ""
        direct = f" reading {self.direct_bytes} B of host memory" if self.direct_bytes else ""
        ops = f" [{len(self.body)} ops]" if self.body else ""
        return f"{self.kind} {self.name}{where}{size}{direct}{ops}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The instructions of one step, with what is on the device all along.

    `pinned` are storages that never die (outputs that user code holds, gradients kept for an
    update after backward); `static_bytes` counts inputs, buffers, constants and device-resident
    units.
    """

    instructions: tuple[Instruction, ...]
    pinned: frozenset[str]
    static_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """Device memory over one step, in requested bytes (no allocator rounding).

    `series[i]` is the largest residency during instruction i; all include `static_bytes`.
    """

    static_bytes: int
    peak_bytes: int
    peak_index: int
    peak_name: str
    at_peak: tuple[tuple[str, int], ...]
    series: tuple[int, ...]


def waiting_bytes(program: Program) -> int:
    """Device bytes that a forward holds while it waits for its backward."""
    made: dict[str, int] = {}
    for x in program.instructions:
        if x.phase == "forward":
            made.update(x.births)
    needed = {
        name
        for x in program.instructions
        if x.phase == "backward"
        for name in (*x.reads, *(r for op in x.body for r in op.reads))
    }
    return sum(size for name, size in made.items() if name in needed or name in program.pinned)


def reload_of(value: str) -> str:
    """Name of the device buffer that a swapped residual comes back into."""
    return f"{value}@reload"


def recomputed(value: str, region: str) -> str:
    """Name of a storage that a recompute region makes."""
    return f"{value}@{region}"


def window_storage(unit: str, index: int) -> str:
    """Name of the flat device buffer of a unit's fetch window."""
    return f"{unit}#{index}"


def host_view_name(unit: str, phase: Phase) -> str:
    """Name of a unit's `host_view`: one stands before the first direct read of each phase."""
    return f"{unit}@{phase}"


def written_gradient(unit: str, gradient: str) -> str:
    """Name of the `write_gradient` of one of a unit's gradients."""
    return f"{gradient}@{unit}"


ROWS_PER_PASS = 256
"""Rows of a matmul's result that one pass over its weight serves, when it reads the weight in
host memory, which no cache of the device keeps: the height of its tiles. Measured: 4096 x 4096
bf16 and 8192 rows take 21.2 ms over a link of 55.3 GB/s, which 32 passes take 19.4 ms of."""


def direct_read_bytes(op: Op, num_bytes: int) -> int:
    """Bytes that cross the link when `op` reads a parameter of `num_bytes` in host memory.

    An op that reads less than the parameter (a gather of rows) reads no more than it needs. A
    matmul reads its weight again for every `ROWS_PER_PASS` rows: a weight of n bf16 bytes and r
    rows are n·r FLOPs.
    """
    read = min(num_bytes, op.bytes_read) if op.bytes_read else num_bytes
    passes = -(-op.flops // (ROWS_PER_PASS * read)) if read else 1
    return read * max(1, passes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """One recompute region: the forward ops to run again before backward op `anchor`."""

    name: str
    anchor: int
    wanted: tuple[str, ...]
    ops: tuple[int, ...]
    reads: tuple[str, ...]


def regions_of(workload: Workload, plan: Plan) -> tuple[Region, ...]:
    """Resolve the plan's recompute regions: members, clones to run, anchor, inputs.

    A region stands before the first backward op that reads one of its members. It may read
    kept or reloaded residuals, model inputs, outputs that user code holds, and members of
    regions that stand before it.

    Raises:
        PlanError: a region needs the result of an op that cannot be run again.
    """
    members: dict[str, list[str]] = defaultdict(list)
    for v in workload.residuals:
        decision = plan.residuals[v]
        if decision.action == "recompute":
            members[decision.region or workload.values[v].block].append(v)
    anchors = {r: min(workload.first_backward_use(v) for v in vs) for r, vs in members.items()}
    have = {v for v in workload.residuals if plan.residuals[v].action != "recompute"}
    have |= {v.name for v in workload.values.values() if v.is_output}
    found = []
    for name in sorted(members, key=lambda r: (anchors[r], r)):
        wanted = tuple(members[name])
        ops, blocked = workload.recompute_ops(wanted, have)
        if blocked:
            raise PlanError(
                f"region {name} of strategy {plan.strategy!r} needs {', '.join(blocked)}, "
                "made by ops that cannot be run again: keep or swap them"
            )
        made = {v for i in ops for v in workload.ops[i].writes}
        reads = tuple(dict.fromkeys(v for i in ops for v in workload.ops[i].reads if v not in made))
        found.append(Region(name=name, anchor=anchors[name], wanted=wanted, ops=ops, reads=reads))
        have |= set(wanted)
    return tuple(found)


def _check_names(w: Workload, plan: Plan) -> None:
    if set(plan.residuals) != set(w.residuals):
        odd = set(plan.residuals) ^ set(w.residuals)
        raise PlanError(f"plan and workload disagree on residuals {sorted(odd)[:5]}")
    if set(plan.units) != {u.name for u in w.units}:
        odd = set(plan.units) ^ {u.name for u in w.units}
        raise PlanError(f"plan and workload disagree on units {sorted(odd)[:5]}")


class _Lowering:
    def __init__(
        self, workload: Workload, plan: Plan, regions: tuple[Region, ...] | None = None
    ) -> None:
        self.workload = workload
        self.plan = plan
        self.regions = regions_of(workload, plan) if regions is None else regions
        self.read_again: dict[str, int] = {}  # value → the first region that reads it
        for region in self.regions:
            for v in region.reads:
                self.read_again[v] = min(region.anchor, self.read_again.get(v, region.anchor))
        self.source: dict[str, str] = {}
        self.before: dict[int, list[Instruction]] = defaultdict(list)
        self.after: dict[int, list[Instruction]] = defaultdict(list)
        self.windows: dict[str, list[tuple[int, int, str]]] = {}
        self.direct = {name for name, unit in plan.units.items() if unit.access == "direct"}
        self.num_forward_ops = workload.num_forward_ops

    def phase(self, index: int) -> Phase:
        return self.workload.ops[index].phase

    def index(self, op: str | None, what: str) -> int:
        if op is None or op not in self.workload.op_index:
            raise PlanError(f"{what} names op {op!r}, which workload {self.workload.name} lacks")
        return self.workload.op_index[op]

    def first_use(self, value: str) -> int:
        """First backward use of a residual, by an op or by a region that stands before one."""
        first = self.workload.first_backward_use(value)
        return min(first, self.read_again.get(value, first))

    def storage(self, value: str, at: int) -> str | None:
        """The storage that an instruction at op `at` reads for `value`; None if static."""
        v = self.workload.values[value]
        if v.kind not in MODEL_INPUT_KINDS:
            return self.source.get(value, value) if at >= self.num_forward_ops else value
        if v.kind != "parameter" or v.unit not in self.windows:
            return None
        for first, last, name in self.windows[v.unit]:
            if first <= at <= last:
                return name
        if v.unit in self.direct:
            return None
        raise PlanError(f"{value} of unit {v.unit} is read at op {at} outside its windows")

    def reads(self, values: Sequence[str], at: int) -> tuple[str, ...]:
        found = (self.storage(v, at) for v in values)
        return tuple(dict.fromkeys(s for s in found if s is not None))

    def direct_reads(self, op: Op, at: int) -> list[str]:
        """The parameters that `op`, which runs at op `at`, reads in host memory."""
        values = (self.workload.values[v] for v in op.reads)
        return [
            v.name
            for v in values
            if v.kind == "parameter" and v.unit in self.direct and self.storage(v.name, at) is None
        ]

    def lower(self) -> Program:
        w = self.workload
        self._units()
        self._prefetches()
        self._wait_units()
        self._host_views()
        self._waits()
        self._recomputes()
        self._offloads()
        self._gradients()
        instructions: list[Instruction] = []
        for i in range(len(w.ops)):
            instructions += self.before.get(i, ())
            instructions.append(self._op(i))
            instructions += self.after.get(i, ())
        return Program(
            instructions=tuple(instructions), pinned=self._pinned(), static_bytes=self._static()
        )

    def _op(self, at: int) -> Instruction:
        """Op `at` in its own place; the instruction of the last program, if that is the same."""
        w = self.workload
        units = w.units_read[at]
        if units and not self.direct.isdisjoint(units):
            return self._compute(w.ops[at], at)
        if units and not self.windows.keys().isdisjoint(units):
            reads = self.reads(w.ops[at].reads, at)
        else:
            reads = w.steps_reads[at]
            if at >= self.num_forward_ops and not self.source.keys().isdisjoint(reads):
                reads = tuple([self.source.get(v, v) for v in reads])
        found: Instruction | None = w.lowered.get(at)
        if found is None or found.reads != reads:
            found = w.lowered[at] = self._compute(w.ops[at], at)
        return found

    def _compute(self, op: Op, at: int, rename: Mapping[str, str] | None = None) -> Instruction:
        rename = rename or {}
        outside: dict[str, None] = {}
        inside: dict[str, None] = {}
        for v in op.reads:
            if v in rename:
                inside[rename[v]] = None
            elif (storage := self.storage(v, at)) is not None:
                outside[storage] = None
        values = self.workload.values
        return Instruction(
            kind="compute",
            name=op.name,
            phase=self.phase(at),
            reads=tuple(outside | inside if inside else outside),
            births=tuple([(rename.get(v, v), values[v].num_bytes) for v in op.writes]),
            seconds=op.seconds,
            flops=op.flops,
            scratch_bytes=op.scratch_bytes,
            direct_bytes=sum(
                direct_read_bytes(op, values[v].num_bytes) for v in self.direct_reads(op, at)
            )
            if self.direct
            else 0,
        )

    def _units(self) -> None:
        for unit in self.workload.units:
            p = self.plan.units[unit.name]
            if p.access == "direct" and p.tier != "host":
                raise PlanError(
                    f"unit {unit.name} is in the {p.tier} tier: only host memory can be read "
                    "directly"
                )
            may_leave = p.tier == "ssd" and unit.has_separate_copy
            if p.copy_tier not in (None, "host") or (p.copy_tier is not None and not may_leave):
                raise PlanError(
                    f"the compute copy of unit {unit.name} cannot live in {p.copy_tier} memory: "
                    "only host memory can have it, of units in the ssd tier with a master beside it"
                )
            if p.casts and not may_cast(unit, p.tier):
                raise PlanError(
                    f"unit {unit.name} ({p.tier} tier) must keep its compute copy: only on the "
                    "device, from a master that the model shows, it can be cast where it is used"
                )
            if p.tier == "device" and not p.casts:
                continue
            spans: list[tuple[int, int, str]] = []
            for k, window in enumerate(p.windows):
                issue = self.index(window.fetch_before, f"unit {unit.name}")
                first = self.index(window.first_use, f"unit {unit.name}")
                last = self.index(window.last_use, f"unit {unit.name}")
                if not issue <= first <= last:
                    raise PlanError(f"window {k} of unit {unit.name} is out of order")
                if spans and issue <= spans[-1][1]:
                    raise PlanError(
                        f"window {k} of unit {unit.name} begins before window {k - 1} has ended"
                    )
                name = window_storage(unit.name, k)
                spans.append((first, last, name))
                self.before[issue].append(
                    Instruction(
                        kind="fetch_unit",
                        name=name,
                        phase=self.phase(issue),
                        births=((name, unit.compute_bytes),),
                        tier=p.fetch_tier,
                        num_bytes=0 if p.casts else unit.compute_bytes,
                    )
                )
            self.windows[unit.name] = spans

    def _swapped(self) -> list[str]:
        return [v for v in self.workload.residuals if self.plan.residuals[v].action == "swap"]

    def _prefetches(self) -> None:
        for v in sorted(self._swapped(), key=self.first_use):
            decision = self.plan.residuals[v]
            if decision.tier == "device":
                raise PlanError(f"residual {v} is swapped to the device: use 'host' or 'ssd'")
            at = self.index(decision.prefetch_before, f"residual {v}")
            if not self.workload.num_forward_ops <= at <= self.first_use(v):
                raise PlanError(f"prefetch of {v} must stand in backward, before its first use")
            self.source[v] = reload_of(v)
            size = self.workload.values[v].num_bytes
            self.before[at].append(
                Instruction(
                    kind="prefetch",
                    name=v,
                    phase="backward",
                    births=((reload_of(v), size),),
                    tier=decision.tier,
                    num_bytes=size,
                )
            )

    def _wait_units(self) -> None:
        for unit in self.workload.units:
            for first, _, name in self.windows.get(unit.name, ()):
                self.before[first].append(
                    Instruction(kind="wait_unit", name=name, phase=self.phase(first), reads=(name,))
                )

    def _host_views(self) -> None:
        """One view before the first direct read of each phase."""
        if not self.direct:
            return
        first: dict[tuple[str, Phase], int] = {}
        last: dict[str, int] = {}
        read_bytes: dict[tuple[str, Phase], int] = defaultdict(int)
        runs = list(enumerate(self.workload.ops))
        for region in self.regions:
            runs += [(region.anchor, self.workload.ops[i]) for i in region.ops]
        for at, op in runs:
            for v in self.direct_reads(op, at):
                value = self.workload.values[v]
                name = value.unit or ""
                key = (name, self.phase(at))
                first[key] = min(at, first.get(key, at))
                last[name] = max(at, last.get(name, at))
                read_bytes[key] += direct_read_bytes(op, value.num_bytes)
        for unit in self.workload.units:
            emit = self.plan.units[unit.name].emit_after
            if emit is not None and last.get(unit.name, -1) > self.index(emit, f"unit {unit.name}"):
                raise PlanError(f"unit {unit.name} emits before op {last[unit.name]} read it")
            for (name, phase), at in first.items():
                if name == unit.name:
                    self.before[at].append(
                        Instruction(
                            kind="host_view",
                            name=host_view_name(name, phase),
                            phase=phase,
                            tier="host",
                            num_bytes=read_bytes[name, phase],
                        )
                    )

    def _waits(self) -> None:
        for v in sorted(self._swapped(), key=self.first_use):
            self.before[self.first_use(v)].append(
                Instruction(kind="wait", name=v, phase="backward", reads=(reload_of(v),))
            )

    def _recomputes(self) -> None:
        for region in self.regions:
            outside = tuple([self.storage(v, region.anchor) for v in region.reads])
            key = (region, outside, frozenset(self.direct))
            last, found = self.workload.lowered.get(region.name, (None, None))
            if last != key:
                found = self._recompute(region)
                self.workload.lowered[region.name] = key, found
            self.before[region.anchor].append(found)
            for v in region.wanted:
                self.source[v] = recomputed(v, region.name)

    def _recompute(self, region: Region) -> Instruction:
        ops = [self.workload.ops[i] for i in region.ops]
        rename = {v: recomputed(v, region.name) for op in ops for v in op.writes}
        body = tuple([self._compute(op, region.anchor, rename) for op in ops])
        values = self.workload.values
        return Instruction(
            kind="recompute",
            name=region.name,
            phase="backward",
            reads=self.reads(region.reads, region.anchor),
            births=tuple((rename[v], values[v].num_bytes) for v in region.wanted),
            seconds=sum(b.seconds for b in body),
            flops=sum(b.flops for b in body),
            direct_bytes=sum(b.direct_bytes for b in body),
            body=body,
        )

    def _offloads(self) -> None:
        for v in self._swapped():
            decision = self.plan.residuals[v]
            size = self.workload.values[v].num_bytes
            made = self.workload.producer[v]
            at = self.index(decision.release_after, f"residual {v}")
            if not self.workload.last_forward_use(v) <= at < self.workload.num_forward_ops:
                raise PlanError(f"release of {v} must stand in forward, after its last use")
            self.after[made].append(
                Instruction(
                    kind="offload",
                    name=v,
                    phase="forward",
                    reads=(v,),
                    tier=decision.tier,
                    num_bytes=size,
                )
            )
            self.after[at].append(Instruction(kind="release", name=v, phase="forward", reads=(v,)))
        for instructions in self.after.values():
            instructions.sort(key=lambda x: x.kind == "release")  # stable: offloads first

    def _gradients(self) -> None:
        self._gradient_writes()
        releases = []
        for unit in self.workload.units:
            if not unit.trainable:
                continue
            p: UnitPlan = self.plan.units[unit.name]
            at = self.index(p.emit_after, f"unit {unit.name}")
            late = [g for g in unit.gradients if self.workload.producer.get(g, -1) > at]
            if late:
                raise PlanError(f"unit {unit.name} emits before gradient {late[0]} exists")
            used_later = [last for _, last, _ in self.windows.get(unit.name, ()) if last > at]
            if used_later:
                raise PlanError(f"unit {unit.name} emits before op {max(used_later)} read it")
            self._check_parked(unit)
            moves = p.tier != "device"
            leaves = moves if p.gradients == "copy" else p.gradients == "parked"
            self.after[at].append(
                Instruction(
                    kind="emit_gradients",
                    name=unit.name,
                    phase="backward",
                    reads=() if p.gradients == "direct" else unit.gradients,
                    tier=p.gradient_tier,
                    num_bytes=unit.gradient_bytes if leaves else 0,
                    scratch_bytes=0 if moves or self._updates_late else unit.update_scratch_bytes,
                )
            )
            if leaves:
                end = self.index(p.release_gradients_after, f"unit {unit.name}")
                if end < at:
                    raise PlanError(f"unit {unit.name} releases its gradients before it emits them")
                releases.append((end, unit))
        for end, unit in releases:
            self.after[end].append(
                Instruction(
                    kind="release_gradients",
                    name=unit.name,
                    phase="backward",
                    reads=unit.gradients,
                )
            )

    def _check_parked(self, unit: Unit) -> None:
        p = self.plan.units[unit.name]
        if p.gradients == "parked" and not may_park(unit, p.tier, self.plan.schedule):
            raise PlanError(
                f"the gradients of unit {unit.name} ({p.tier} tier, schedule {self.plan.schedule}) "
                "cannot be parked: no update on the device waits for them until optimizer.step()"
            )

    def _gradient_writes(self) -> None:
        """Each gradient of a unit with direct gradients is written right after it is made."""
        for unit in self.workload.units:
            p = self.plan.units[unit.name]
            if p.gradients != "direct" or not unit.trainable:
                continue
            if p.tier == "device":
                raise PlanError(f"unit {unit.name} is in the device tier: its gradients stay there")
            for g in dict.fromkeys(unit.gradients):
                made = max(self.workload.producer.get(g, -1), self.workload.num_forward_ops)
                self.after[made].append(
                    Instruction(
                        kind="write_gradient",
                        name=written_gradient(unit.name, g),
                        phase="backward",
                        reads=(g,),
                        tier=p.tier,
                        num_bytes=self.workload.values[g].num_bytes,
                    )
                )

    @property
    def _updates_late(self) -> bool:
        """Whether units in the device tier wait for optimizer.step()."""
        return self.plan.schedule in WHOLE

    def _pinned(self) -> frozenset[str]:
        kept = {v.name for v in self.workload.values.values() if v.is_output}
        for unit in self.workload.units:  # gradients that wait where they are
            p = self.plan.units[unit.name]
            if p.gradients == "copy" and may_park(unit, p.tier, self.plan.schedule):
                kept |= set(unit.gradients)
        return frozenset(kept)

    def _static(self) -> int:
        held = sum(
            v.num_bytes
            for v in self.workload.values.values()
            if v.kind in MODEL_INPUT_KINDS and v.kind != "parameter"
        )
        return held + sum(
            unit.state_bytes + (0 if self.plan.units[unit.name].casts else unit.compute_bytes)
            for unit in self.workload.units
            if self.plan.units[unit.name].tier == "device"
        )


def lower(workload: Workload, plan: Plan, regions: tuple[Region, ...] | None = None) -> Program:
    """Turn a plan into the program that will run, in canonical order. `regions` are those of the
    plan, if somebody has them already.

    Raises:
        PlanError: the plan names ops, values or units that the workload lacks, or orders
            movements so that a value would be read before it exists or after it is gone.
    """
    _check_names(workload, plan)
    return _Lowering(workload, plan, regions).lower()


def residency(program: Program) -> Residency:
    """Walk the program by storage: allocate, sample, free after the last reader.

    A storage is born with the instruction that makes it and dies after the last that reads it.
    What a recompute reads stays to its end (the caller holds it); its inner values die inside.
    """
    steps: list[Instruction] = []  # those of a body, then what they are the body of
    where: list[int] = []
    for k, instruction in enumerate(program.instructions):
        steps += instruction.body
        steps.append(instruction)
        where += [k] * (len(instruction.body) + 1)
    last: dict[str, int] = {}
    for s, instruction in enumerate(steps):
        for name, _ in instruction.births:
            last[name] = s
        for name in instruction.reads:
            last[name] = s
    pinned = program.pinned
    alive: dict[str, int] = {}
    now = peak = program.static_bytes
    peak_step = -1
    series = [now] * len(program.instructions)
    for s, instruction in enumerate(steps):
        for name, size in instruction.births:
            if name not in alive:
                alive[name] = size
                now += size
        top = now + instruction.scratch_bytes
        if top > series[where[s]]:
            series[where[s]] = top
            if top > peak:
                peak, peak_step = top, s
        for name, _ in instruction.births:
            if last[name] == s and name not in pinned:
                now -= alive.pop(name, 0)
        for name in instruction.reads:
            if last[name] == s and name not in pinned:
                now -= alive.pop(name, 0)
    return Residency(
        static_bytes=program.static_bytes,
        peak_bytes=peak,
        peak_index=where[peak_step] if peak_step >= 0 else 0,
        peak_name=steps[peak_step].name if peak_step >= 0 else "start",
        at_peak=_alive_at(program, steps[: peak_step + 1], last),
        series=tuple(series),
    )


def _alive_at(
    program: Program, steps: Sequence[Instruction], last: Mapping[str, int]
) -> tuple[tuple[str, int], ...]:
    """(name, bytes) of all storages that are alive in the last of these steps, with its scratch;
    largest first. `last` has the last step of each."""
    if not steps:
        return ()
    found: dict[str, int] = {}
    for instruction in steps:
        for name, size in instruction.births:
            if last[name] >= len(steps) - 1 or name in program.pinned:
                found.setdefault(name, size)
    at = steps[-1]
    if at.scratch_bytes < 0:  # the result takes the memory of what is read
        found[at.births[0][0]] += at.scratch_bytes
    elif at.scratch_bytes:
        what = "workspace" if at.kind == "compute" else "update"
        found[f"{at.name} ({what})"] = at.scratch_bytes
    return tuple(sorted(found.items(), key=lambda item: (-item[1], item[0])))
