"""Predict one step: walk the rewritten program with the runtime's own wait semantics.

Five lanes: the device (gpu) runs compute in order; h2d and d2h carry copies first come, first
served, and share the link's duplex rate while both work; the SSDs (ssd) are simplex; the CPU (cpu)
runs the optimizer. Each process here mirrors a thread of the runtime (`runtime.lanes`,
`runtime.engine`, `runtime.updates`), line by line where order matters. Nothing here knows torch.

What is not modelled: the time to launch kernels; a host that runs ahead of a GPU (transfers start
when compute reaches their instruction); latencies; compute and copies that slow each other down.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from lohan_fx.errors import HardwareError
from lohan_fx.events import Clock, Process, Ring, Server, Signal, Worker
from lohan_fx.footprint import (
    NUM_STAGING,
    align,
    direct_gradients,
    gradient_ring,
    has_own_buffer,
    host_bytes_needed,
    host_copies,
    ssd_bytes_needed,
    staging_of,
    state_ring,
    tiers_of,
    update_write_bytes,
)
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import LATE, PIPELINED, WAITING, WHOLE, Plan, Tier
from lohan_fx.program import (
    Instruction,
    Program,
    Residency,
    host_view_name,
    lower,
    residency,
    window_storage,
)
from lohan_fx.timeline import PHASES, Lane, Series, Span, StepPhase, Timeline, Traffic
from lohan_fx.workload import Unit, Workload

CHUNKS_AHEAD = 4
"""SSD reads of one transfer in flight (`runtime.lanes._CHUNKS_AHEAD`)."""

URGENT = frozenset({"offload", "prefetch", "fetch_unit"})
"""Kinds of transfer for which compute may be waiting; to and from SSD they go in chunks."""

ADD_SHARE = 10 / 28
"""Adding a gradient against an update: bf16 to fp32 moves 10 bytes a parameter, Adam 28."""

MAX_CHUNKS = 30_000
"""Chunks of all SSD transfers together; with more, chunks are simulated larger than they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """In which order the runtime serves the SSDs. The defaults are what it does.

    Attributes:
        urgent_first: fetches, reloads and offloads, for which compute may be waiting, go before
            optimizer states (`runtime.ssd.IoPool`). Off: requests are served in the order in
            which they were made, so that a fetch waits for whole units of states.
        eager_reads: schedule "optimized" reads the next unit's states as soon as a buffer of the
            state ring is free (`runtime.updates`). Off: only after it has updated a unit.
    """

    urgent_first: bool = True
    eager_reads: bool = True


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """One simulated step. Seconds and bytes.

    Attributes:
        timeline: every span, and the memory of each tier over time.
        step_s: from the first instruction to the end of optimizer.step(); the sum of the next
            three.
        forward_s, backward_s: until the device has run the last instruction of the phase.
        optimizer_s: updates and writes that backward does not hide (all, if "serial").
        device: exact device memory by instruction.
        num_events: how much there was to simulate.
    """

    timeline: Timeline
    step_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    device: Residency
    num_events: int = 0

    @property
    def peaks(self) -> Mapping[str, int]:
        """Tier → largest bytes: device by storage, host and SSD as the runtime lays them out."""
        return self.timeline.peaks

    @property
    def series(self) -> Mapping[str, Series]:
        """Tier → (seconds, bytes) points."""
        return self.timeline.memory

    @property
    def traffic(self) -> Traffic:
        """Bytes by link."""
        return self.timeline.traffic

    @property
    def exposed_transfer_s(self) -> float:
        """Seconds in which links or SSDs work and the device does not."""
        return self.timeline.exposed_s()

    @property
    def binding(self) -> Mapping[StepPhase, Lane]:
        """Phase → the lane that works longest in it; phases of no length are left out."""
        spans = self.timeline.phases
        return {p: self.timeline.binding(p) for p in PHASES if spans[p][1] > spans[p][0]}

    def summary(self) -> str:
        """Text for a terminal."""
        return self.timeline.summary()


def simulate(
    workload: Workload,
    plan: Plan,
    hw: HardwareProfile,
    *,
    program: Program | None = None,
    memory: Residency | None = None,
    warm_start: bool = False,
    rules: Rules | None = None,
    name: str | None = None,
) -> Simulation:
    """Simulate one step of a plan.

    Args:
        program: `lower(workload, plan)`, if it is at hand.
        memory: `residency(program)`, likewise.
        warm_start: what is fetched before the first op is there already; it takes no time. (The
            closed form, `cost_model.iteration_time`, also leaves out how the pipeline fills.)
        rules: of the SSDs; what the runtime does, if None.
        name: of the timeline; "simulated" and the strategy if None.

    Raises:
        HardwareError: the plan uses the SSD tier, and the profile has no SSDs.
        PlanError: the plan does not fit the workload.
    """
    program = program or lower(workload, plan)
    memory = memory or residency(program)
    step = _Step(workload, plan, hw, program, memory, warm_start, rules or Rules())
    return step.run(name or f"simulated {plan.strategy}")


class _Recorder:
    """Spans as they end; pieces of one transfer that touch become one span."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._open: dict[Lane, tuple[float, float, _Label, int]] = {}

    def add(self, lane: Lane, start: float, end: float, label: _Label, num_bytes: int = 0) -> None:
        last = self._open.get(lane)
        if last is not None:
            if last[2] is label and last[1] == start:
                self._open[lane] = (last[0], end, label, last[3] + num_bytes)
                return
            self._close(lane, *last)
        self._open[lane] = (start, end, label, num_bytes)

    def _close(self, lane: Lane, start: float, end: float, label: _Label, num_bytes: int) -> None:
        self.spans.append(
            Span(
                lane=lane,
                name=label.name,
                kind=label.kind,
                start_s=start,
                end_s=end,
                num_bytes=num_bytes if label.counts else 0,
                phase=label.phase,
                block=label.block,
            )
        )

    def finish(self) -> tuple[Span, ...]:
        for lane, last in self._open.items():
            self._close(lane, *last)
        self._open.clear()
        return tuple(self.spans)


@dataclass(frozen=True, slots=True, eq=False)
class _Label:
    """What a span says; one object a transfer. A `free` transfer takes no time (warm start); the
    bytes of one that does not count are another step's."""

    name: str
    kind: str
    phase: StepPhase
    block: str
    free: bool = False
    counts: bool = True


@dataclass(slots=True)
class _Loan:
    """A residual that is away (`runtime.engine._Loan`)."""

    copied: Signal
    written: Signal | None
    loaded: Signal | None = None


class _Transfers:
    """The lanes d2h, h2d and ssd (`runtime.lanes.Lanes`).

    On a CPU device every copy of a direction goes through that direction's thread. On CUDA only
    copies to and from SSD do; others go straight to the stream, between the chunks of those.
    """

    def __init__(
        self,
        clock: Clock,
        record: _Recorder,
        hw: HardwareProfile,
        chunk_bytes: int,
        rules: Rules,
    ) -> None:
        self.clock = clock
        self.hw = hw
        self.chunk_bytes = chunk_bytes
        self.rules = rules
        self.staging = Ring(clock, NUM_STAGING)
        self._ssd = Server(clock, partial(record.add, "ssd"))
        self._links: dict[Lane, Server] = {
            lane: Server(clock, partial(record.add, lane)) for lane in ("d2h", "h2d")
        }
        self._threads: dict[Lane, Worker] = {"d2h": Worker(clock), "h2d": Worker(clock)}
        self._streams = hw.device_kind == "cuda"
        self._rates: dict[Lane, float] = {"d2h": hw.d2h_bytes_per_s, "h2d": hw.h2d_bytes_per_s}
        shared = hw.duplex_bytes_per_s / sum(self._rates.values())
        if shared < 1:
            self._links["d2h"].couple(self._links["h2d"], shared)

    def link(
        self, lane: Lane, num_bytes: int, label: _Label, *, by_compute: bool = False
    ) -> Signal:
        """Occupy a direction of the link. What compute itself reads or writes goes first: it does
        not queue with copies, and they get what it leaves."""
        seconds = 0.0 if label.free else num_bytes / self._rates[lane]
        return self._links[lane].submit(seconds, label, num_bytes, urgent=by_compute)

    def read(self, num_bytes: int, label: _Label) -> Signal:
        return self._io(num_bytes, self.hw.ssd_read_bytes_per_s, label)

    def write(self, num_bytes: int, label: _Label) -> Signal:
        return self._io(num_bytes, self.hw.ssd_write_bytes_per_s, label)

    def _io(self, num_bytes: int, rate: float, label: _Label) -> Signal:
        seconds = 0.0 if label.free else num_bytes / rate
        urgent = not self.rules.urgent_first or label.kind in URGENT
        return self._ssd.submit(seconds, label, num_bytes, urgent=urgent)

    # -- what instructions ask for ----------------------------------------------------------

    def copy(
        self, lane: Lane, num_bytes: int, label: _Label, after: Signal | None = None
    ) -> Signal:
        """Between device and host memory, not before `after`."""
        if self._streams and (after is None or after.done):
            return self.link(lane, num_bytes, label)

        def job() -> Process:
            if after is not None:
                yield after
            yield self.link(lane, num_bytes, label)

        return self._threads[lane].submit(job())

    def to_ssd(self, num_bytes: int, label: _Label) -> tuple[Signal, Signal]:
        """Returns (the source has been copied, the bytes are on the SSD)."""
        written = Signal()

        def job() -> Process:
            left = self._chunks(num_bytes)
            count = len(left)

            def ended() -> None:
                nonlocal count
                count -= 1
                self.staging.release()
                if not count:
                    self.clock.fire(written)

            for size in left:
                yield self.staging.acquire()
                yield self.link("d2h", size, label)
                self.write(size, label).then(ended)

        return self._threads["d2h"].submit(job()), written

    def from_ssd(self, num_bytes: int, label: _Label, after: Signal | None = None) -> Signal:
        """Returns the arrival on the device; reading begins after `after`."""

        def job() -> Process:
            if after is not None:
                yield after
            left = deque(self._chunks(num_bytes))
            reads: deque[tuple[int, Signal]] = deque()
            while left or reads:
                while left and len(reads) < CHUNKS_AHEAD:
                    if not reads:
                        yield self.staging.acquire()
                    elif not self.staging.try_acquire():
                        break
                    size = left.popleft()
                    reads.append((size, self.read(size, label)))
                size, read = reads[0]
                yield read
                yield self.link("h2d", size, label)
                reads.popleft()
                self.staging.release()

        return self._threads["h2d"].submit(job())

    def _chunks(self, num_bytes: int) -> list[int]:
        step = self.chunk_bytes
        whole, rest = divmod(num_bytes, step)
        return [step] * whole + ([rest] if rest or not whole else [])


class _Updates:
    """The optimizer on the CPU (`runtime.updates.Updater`)."""

    def __init__(
        self,
        clock: Clock,
        record: _Recorder,
        hw: HardwareProfile,
        transfers: _Transfers,
        workload: Workload,
        plan: Plan,
    ) -> None:
        self.clock = clock
        self.record = record
        self.rate = hw.cpu_optimizer_params_per_s
        self.transfers = transfers
        self.schedule = plan.schedule
        self.eager = transfers.rules.eager_reads
        self.tiers = tiers_of(plan)
        self.direct = direct_gradients(plan)
        self.copies = host_copies(plan)
        units = workload.units
        self.rings = {
            tier: Ring(
                clock, gradient_ring(units, self.tiers, plan.schedule, tier, self.direct).count
            )
            for tier in ("host", "ssd")
        }
        self.states = Ring(clock, state_ring(units, self.tiers, plan.schedule, self.copies).count)
        self.counts = True
        self._worker = Worker(clock)
        self._order: deque[Unit] = deque()
        self._reads: dict[str, Signal] = {}
        self._ends: list[Signal] = []
        self._held: list[tuple[Unit, Signal]] = []
        self._rank: dict[str, int] = {}
        self._fresh: dict[str, Signal] = {}

    def begin(self, order: list[Unit], *, counts: bool) -> None:
        """Backward begins; it will emit the gradients of these units."""
        self.counts = counts
        self._rank = {u.name: -i for i, u in enumerate(order)}
        if self._waits("ssd"):
            return
        self._order = deque(u for u in order if self.tiers[u.name] == "ssd")
        if self.schedule in PIPELINED and self._order:
            self._ends.append(self._worker.submit(self._first_reads()))

    def emitted(self, unit: Unit, arrival: Signal) -> None:
        """A unit's gradients are on their way to the host, in a buffer of the ring unless the
        device wrote them directly."""
        if self.schedule in WHOLE and unit.accumulator_bytes:
            arrival = self._worker.submit(self._add(unit, arrival))
            self._ends.append(arrival)
        if self._waits(self.tiers[unit.name]):
            self._held.append((unit, arrival))
        else:
            self._start(unit, arrival)

    def _waits(self, tier: Tier) -> bool:
        """Whether updates of units in a tier wait for optimizer.step(). (A simulated step clips
        nothing, so that what schedule "speculative" did in backward is right.)"""
        return self.schedule in WAITING or (self.schedule == "speculative" and tier != "host")

    def _start(self, unit: Unit, arrival: Signal) -> None:
        """Update a unit when its gradients are there."""

        def job() -> Process:
            yield arrival
            yield from self._update(unit)
            if self.schedule not in WHOLE and not self.has_own_buffer(unit):
                self.rings[self.tiers[unit.name]].release()

        if self.schedule not in LATE:
            self._ends.append(self._worker.submit(job()))
            return
        self._fresh[unit.name] = Signal()
        on_ssd = self.tiers[unit.name] == "ssd"
        rank = None if on_ssd else self._rank[unit.name]
        self._ends.append(self._worker.submit(job(), rank=rank, ready=arrival))

    def release(self) -> None:
        """optimizer.step() with a schedule of which some updates wait for it: start them, as
        forward needs them."""
        held = sorted(self._held, key=lambda each: self._rank[each[0].name])
        self._held.clear()
        self._order = deque(u for u, _ in held if self.tiers[u.name] == "ssd")
        if self._order:
            self._ends.append(self._worker.submit(self._first_reads()))
        for unit, arrival in held:
            self._start(unit, arrival)

    def has_own_buffer(self, unit: Unit) -> bool:
        return has_own_buffer(unit, self.tiers[unit.name], self.schedule, self.direct)

    def fresh(self, unit: Unit) -> Signal | None:
        """When the unit at rest is what the last step made it; None if it is."""
        return self._fresh.get(unit.name)

    def join(self) -> Process:
        """optimizer.step(): wait for every update and every write."""
        for unit, _ in self._held:
            self._ends.append(self._worker.submit(self._update(unit)))
        yield from self._ends  # it grows while updates submit their writes
        self._ends.clear()
        self._held.clear()
        self._fresh.clear()

    def _add(self, unit: Unit, arrival: Signal) -> Process:
        """Add the unit's gradients to what it has."""
        yield arrival
        on_ssd = self.tiers[unit.name] == "ssd"
        if on_ssd:
            yield self.states.acquire()
            yield self.transfers.read(unit.accumulator_bytes, self._label(unit, "read_gradient"))
        start = self.clock.now
        end = start + ADD_SHARE * unit.num_params / self.rate
        yield end
        self.record.add("cpu", start, end, self._label(unit, "add"))
        if on_ssd:
            label = self._label(unit, "write_gradient")
            yield self.transfers.write(unit.accumulator_bytes, label)
            self.states.release()
        if not self.has_own_buffer(unit):
            self.rings[self.tiers[unit.name]].release()

    def _update(self, unit: Unit) -> Process:
        on_ssd = self.tiers[unit.name] == "ssd"
        if on_ssd:
            if unit.name not in self._reads:
                if unit in self._order:
                    self._order.remove(unit)
                yield self.states.acquire()
                self._read(unit)
            yield self._reads.pop(unit.name)
        start = self.clock.now
        end = start + unit.num_params / self.rate
        yield end
        self.record.add("cpu", start, end, self._label(unit, "update"))
        fresh = self._fresh.get(unit.name)
        in_host = not on_ssd or unit.name in self.copies
        if fresh is not None and in_host:
            self.clock.fire(fresh)
        if not on_ssd:
            return
        label = self._label(unit, "write_states")
        written = self.transfers.write(update_write_bytes(unit, self.copies), label)
        written.then(self.states.release)
        if fresh is not None and not in_host:
            written.then(partial(self.clock.fire, fresh))
        if self.schedule in PIPELINED:
            self._ends.append(written)
            if self.eager:
                written.then(self._read_ahead)
            self._read_ahead()
        else:
            yield written

    def _first_reads(self) -> Process:
        self._read_ahead()
        yield from ()

    def _read_ahead(self) -> None:
        while self._order and self.states.try_acquire():
            self._read(self._order.popleft())

    def _read(self, unit: Unit) -> None:
        label = self._label(unit, "read_states")
        self._reads[unit.name] = self.transfers.read(unit.update_read_bytes, label)

    def _label(self, unit: Unit, kind: str) -> _Label:
        phase: StepPhase = "optimizer" if self.schedule in WAITING else "backward"
        return _Label(unit.name, kind, phase, unit.block, counts=self.counts)


class _Step:
    """The compute stream: executes the program, one instruction after another."""

    def __init__(
        self,
        workload: Workload,
        plan: Plan,
        hw: HardwareProfile,
        program: Program,
        memory: Residency,
        warm_start: bool,
        rules: Rules,
    ) -> None:
        self.workload = workload
        self.plan = plan
        self.hw = hw
        self.program = program
        self.memory = memory
        _check_ssd(workload, plan, hw)
        self.clock = Clock()
        self.record = _Recorder()
        self.transfers = _Transfers(
            self.clock, self.record, hw, _chunk_bytes(workload, plan, program), rules
        )
        self.warm = warm_start
        self.updates = _Updates(self.clock, self.record, hw, self.transfers, workload, plan)
        self.time = 0.0
        self.done = False
        self.origin = 0.0
        self.counts = plan.schedule not in LATE
        self.forward_end = 0.0
        self.backward_end = 0.0
        self.starts: list[float] = []
        self.slots: dict[str, list[tuple[float, int]]] = {"host": [], "ssd": []}
        self._loans: dict[str, _Loan] = {}
        self._fetches: dict[str, Signal] = {}
        self._arrivals: dict[str, Signal] = {}
        self._held: list[Unit] = []
        self._blocks = {op.name: op.block for op in workload.ops}
        self._unit_of = {
            window_storage(u.name, k): u
            for u in workload.units
            for k in range(len(plan.units[u.name].windows))
        }
        for u in workload.units:
            for phase in ("forward", "backward"):
                self._unit_of[host_view_name(u.name, phase)] = u
        self._handlers: dict[str, Callable[[Instruction], Process]] = {
            "offload": self._offload,
            "release": self._release,
            "prefetch": self._prefetch,
            "wait": self._wait,
            "fetch_unit": self._fetch_unit,
            "wait_unit": self._wait_unit,
            "host_view": self._host_view,
            "write_gradient": self._write_gradient,
            "emit_gradients": self._emit_gradients,
            "release_gradients": self._release_gradients,
        }

    def run(self, name: str) -> Simulation:
        self.clock.start(self._execute())
        self.clock.run()
        if not self.done:
            at = self.program.instructions[len(self.starts) - 1] if self.starts else "the start"
            raise RuntimeError(f"nothing can go on: the program is stuck at {at}")
        step_s = self.time - self.origin
        spans = tuple(self._within_step(self.record.finish()))
        return Simulation(
            timeline=Timeline(
                name=name,
                spans=spans,
                memory=self._memory(),
                compute=self.hw.lane_name("gpu"),
            ),
            step_s=step_s,
            forward_s=self.forward_end - self.origin,
            backward_s=self.backward_end - self.forward_end,
            optimizer_s=self.time - self.backward_end,
            device=self.memory,
            num_events=self.clock.count,
        )

    def _within_step(self, spans: Iterable[Span]) -> Iterator[Span]:
        """Spans by the time since the step's start. What goes on after its end is cut there, and
        what the step before left over moves no bytes of this one."""
        if not self.origin:
            yield from spans
            return
        for span in spans:
            start, end = (min(t, self.time) - self.origin for t in (span.start_s, span.end_s))
            if end <= 0:
                continue
            yield replace(span, start_s=max(start, 0.0), end_s=end)

    # -- the program ------------------------------------------------------------------------

    def _execute(self) -> Process:
        """With late schedules the second of two steps counts: it has the first one's updates
        beside it, as every step but the first has."""
        if self.plan.schedule in LATE:
            yield from self._once()
            self.origin = self.time
            self.counts = True
            self.starts.clear()
            for changes in self.slots.values():
                changes.clear()
        yield from self._once()
        if self.plan.schedule not in LATE:
            yield from self._join()
        self.done = True

    def _once(self) -> Process:
        """`self.time` is the device's own clock: it computes alone, and meets the others where
        an instruction touches a transfer."""
        backward = False
        for x in self.program.instructions:
            if x.phase == "backward" and not backward:
                backward = True
                yield self.time
                self.forward_end = self.time
                if self.plan.schedule in LATE:
                    yield from self._stall_for(self.updates.join(), self._label(x, "join"))
                self.updates.begin(self._emission_order(), counts=self.counts)
            self.starts.append(self.time)
            if x.kind == "compute" or x.kind == "recompute":
                self.warm = False
                label = self._label(x, x.kind)
                if x.direct_bytes:
                    yield self.time
                    yield from self._over_link("h2d", x.direct_bytes, x, "direct_read")
                self._work(x.seconds, label)
            else:
                yield self.time
                yield from self._handlers[x.kind](x)
        yield self.time
        self.backward_end = self.time
        if not backward:
            self.forward_end = self.time
        if self.plan.schedule in LATE & WHOLE:
            self._update_on_device("optimizer")
            self.updates.release()
            yield self.time

    def _emission_order(self) -> list[Unit]:
        by_name = self.workload.unit_by_name
        return [by_name[x.name] for x in self.program.instructions if x.kind == "emit_gradients"]

    def _work(self, seconds: float, label: _Label) -> None:
        start, self.time = self.time, self.time + seconds
        self.record.add("gpu", start, self.time, label)

    def _stall(self, signal: Signal, label: _Label) -> Process:
        yield signal
        if self.clock.now > self.time:
            self.record.add("gpu", self.time, self.clock.now, label)
            self.time = self.clock.now

    def _stall_for(self, others: Process, label: _Label) -> Process:
        yield from others
        yield self.time
        if self.clock.now > self.time:
            self.record.add("gpu", self.time, self.clock.now, label)
            self.time = self.clock.now

    def _offload(self, x: Instruction) -> Process:
        label = self._label(x, "offload")
        if x.tier == "host":
            loan = _Loan(self.transfers.copy("d2h", x.num_bytes, label), None)
        else:
            loan = _Loan(*self.transfers.to_ssd(x.num_bytes, label))
        self._loans[x.name] = loan
        self.slots[x.tier].append((self.time, align(x.num_bytes)))
        yield from ()

    def _release(self, x: Instruction) -> Process:
        yield from self._stall(self._loans[x.name].copied, self._label(x, "release"))

    def _prefetch(self, x: Instruction) -> Process:
        label = self._label(x, "prefetch")
        loan = self._loans[x.name]
        if x.tier == "host":
            loan.loaded = self.transfers.copy("h2d", x.num_bytes, label)
        else:
            loan.loaded = self.transfers.from_ssd(x.num_bytes, label, after=loan.written)
        size = align(x.num_bytes)
        slots = self.slots[x.tier]
        loan.loaded.then(lambda: slots.append((self.clock.now, -size)))
        yield from ()

    def _wait(self, x: Instruction) -> Process:
        loaded = self._loans.pop(x.name).loaded
        assert loaded is not None
        yield from self._stall(loaded, self._label(x, "wait"))

    def _fetch_unit(self, x: Instruction) -> Process:
        label = self._label(x, "fetch_unit")
        after = self.updates.fresh(self._unit_of[x.name])
        if x.tier == "host":
            self._fetches[x.name] = self.transfers.copy("h2d", x.num_bytes, label, after)
        else:
            self._fetches[x.name] = self.transfers.from_ssd(x.num_bytes, label, after)
        yield from ()

    def _wait_unit(self, x: Instruction) -> Process:
        yield from self._stall(self._fetches.pop(x.name), self._label(x, "wait_unit"))

    def _over_link(self, lane: Lane, num_bytes: int, x: Instruction, kind: str) -> Process:
        """The device itself reads or writes host memory, and is busy with it."""
        label = self._label(x, kind)
        yield self.transfers.link(lane, num_bytes, label, by_compute=True)
        self._work(self.clock.now - self.time, label)

    def _host_view(self, x: Instruction) -> Process:
        fresh = self.updates.fresh(self._unit_of[x.name])
        if fresh is not None:
            yield from self._stall(fresh, self._label(x, "host_view"))

    def _write_gradient(self, x: Instruction) -> Process:
        yield from self._over_link("d2h", x.num_bytes, x, "write_gradient")

    def _emit_gradients(self, x: Instruction) -> Process:
        unit = self.workload.unit_by_name[x.name]
        if x.tier == "device":
            self._held.append(unit)
            if self.plan.schedule not in WHOLE:
                self._update_on_device("backward")
            return
        if x.name in self.updates.direct:
            self.updates.emitted(unit, Signal(done=True))
            return
        label = self._label(x, "emit_gradients")
        if not self.updates.has_own_buffer(unit):
            yield from self._stall(self.updates.rings[x.tier].acquire(), label)
        arrival = self._arrivals[x.name] = self.transfers.copy("d2h", x.num_bytes, label)
        self.updates.emitted(unit, arrival)

    def _release_gradients(self, x: Instruction) -> Process:
        label = self._label(x, "release_gradients")
        yield from self._stall(self._arrivals.pop(x.name), label)

    def _update_on_device(self, phase: StepPhase) -> None:
        """Updates of device-resident units run between the ops, at device memory bandwidth: all
        of the states and the copy are read and written, and the gradient read."""
        for unit in self._held:
            label = _Label(unit.name, "update", phase, unit.block)
            self._work(unit.device_update_bytes / self.hw.device_bytes_per_s, label)
        self._held.clear()

    def _join(self) -> Process:
        self._update_on_device("optimizer")
        label = _Label("optimizer.step", "join", "optimizer", "")
        yield from self._stall_for(self.updates.join(), label)

    # -- names and memory -------------------------------------------------------------------

    def _label(self, x: Instruction, kind: str) -> _Label:
        return _Label(x.name, kind, x.phase, self._block(x), self.warm, self.counts)

    def _block(self, x: Instruction) -> str:
        if x.kind == "compute":
            return self._blocks[x.name]
        if x.kind == "recompute":
            return self._blocks[x.body[0].name] if x.body else ""
        if x.kind in ("fetch_unit", "wait_unit"):
            return self._unit_of[x.name].block
        if x.kind in ("emit_gradients", "release_gradients"):
            return self.workload.unit_by_name[x.name].block
        if x.kind == "host_view":
            return self.workload.unit_by_name[x.name.rpartition("@")[0]].block
        if x.kind == "write_gradient":
            return self.workload.values[x.reads[0]].block
        return self.workload.values[x.name].block

    def _memory(self) -> dict[str, Series]:
        host = host_bytes_needed(self.workload, self.plan)
        ssd = ssd_bytes_needed(self.workload, self.plan)
        starts = (t - self.origin for t in self.starts)
        device = list(zip(starts, self.memory.series, strict=True))
        slots = {k: [(t - self.origin, size) for t, size in v] for k, v in self.slots.items()}
        return {
            "device": _steps(device),
            "host": _slots(sum(host.values()) - host["residuals"], slots["host"]),
            "ssd": _slots(ssd["units"], slots["ssd"]),
        }


def _check_ssd(workload: Workload, plan: Plan, hw: HardwareProfile) -> None:
    if hw.ssds or not sum(ssd_bytes_needed(workload, plan).values()):
        return
    raise HardwareError(
        f"plan {plan.strategy!r} uses the ssd tier, but hardware profile {hw.name} has no SSDs: "
        "plan again for this profile, or profile with profile_hardware(ssd=[…])"
    )


def _chunk_bytes(workload: Workload, plan: Plan, program: Program) -> int:
    """Size of a staging buffer, or more if there were too many chunks to simulate."""
    moved = sum(x.num_bytes for x in program.instructions if x.tier == "ssd" and x.kind in URGENT)
    return max(staging_of(workload, plan).num_bytes, moved // MAX_CHUNKS, 1)


def _steps(points: list[tuple[float, int]]) -> Series:
    """Largest value at each time, without repetitions."""
    found: list[tuple[float, int]] = []
    for time, size in points:
        if found and found[-1][0] == time:
            found[-1] = (time, max(found[-1][1], size))
        elif not found or found[-1][1] != size:
            found.append((time, size))
    return tuple(found)


def _slots(base: int, changes: list[tuple[float, int]]) -> Series:
    now = base
    points = [(0.0, base)]
    for time, change in sorted(changes, key=lambda c: c[0]):
        now += change
        points.append((time, now))
    return _steps(points)
