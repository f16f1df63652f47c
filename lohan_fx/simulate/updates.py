"""The optimizer on the CPU."""

from __future__ import annotations

from collections import deque
from functools import partial

from lohan_fx.events import Clock, Process, Ring, Signal, Worker
from lohan_fx.footprint import (
    direct_gradients,
    gradient_ring,
    has_own_buffer,
    host_copies,
    own_buffers,
    state_ring,
    tiers_of,
    update_write_bytes,
)
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import LATE, PIPELINED, WAITING, WHOLE, Plan, Schedule, Tier
from lohan_fx.simulate.recorder import Label, Recorder
from lohan_fx.simulate.transfers import Transfers
from lohan_fx.timeline import StepPhase
from lohan_fx.workload import Unit, Workload

ADD_SHARE = 10 / 28
"""Adding a gradient against an update: bf16 to fp32 moves 10 bytes a parameter, Adam 28."""


def waits(tier: Tier, schedule: Schedule) -> bool:
    """Whether updates of units in a tier wait for optimizer.step(). (A simulated step clips
    nothing, so that what schedule "speculative" did in backward is right.)"""
    return schedule in WAITING or (schedule == "speculative" and tier != "host")


def adds_first(unit: Unit, tier: Tier, schedule: Schedule) -> bool:
    """Whether a unit's last gradients are added to its sums before it is updated, not in
    passing."""
    return unit.accumulator_bytes > 0 and waits(tier, schedule)


def update_share(unit: Unit, tier: Tier, schedule: Schedule) -> float:
    """A unit's update against one from a bf16 gradient alone, which moves 28 bytes a parameter. A
    sum is read, too."""
    if not unit.accumulator_bytes:
        return 1.0
    return (30 if adds_first(unit, tier, schedule) else 32) / 28


class Updates:
    """The optimizer on the CPU (`runtime.updates.Updater`)."""

    def __init__(
        self,
        clock: Clock,
        record: Recorder,
        hw: HardwareProfile,
        transfers: Transfers,
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
        self.own = own_buffers(plan)
        self.copies = host_copies(plan)
        units = workload.units
        self.rings = {
            tier: Ring(clock, gradient_ring(units, self.tiers, plan.schedule, tier, self.own).count)
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
        if waits("ssd", self.schedule):
            return
        self._order = deque(u for u in order if self.tiers[u.name] == "ssd")
        if self.schedule in PIPELINED and self._order:
            self._ends.append(self._worker.submit(self._first_reads()))

    def emitted(self, unit: Unit, arrival: Signal) -> None:
        """A unit's gradients are on their way to the host, in a buffer of the ring unless the
        device wrote them directly."""
        tier = self.tiers[unit.name]
        if adds_first(unit, tier, self.schedule):
            arrival = self._worker.submit(self._add(unit, arrival))
            self._ends.append(arrival)
        if waits(tier, self.schedule):
            self._held.append((unit, arrival))
        else:
            self._start(unit, arrival)

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
        return has_own_buffer(unit, self.tiers[unit.name], self.schedule, self.own)

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
        share = update_share(unit, self.tiers[unit.name], self.schedule)
        end = start + share * unit.num_params / self.rate
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

    def _label(self, unit: Unit, kind: str) -> Label:
        phase: StepPhase = "optimizer" if self.schedule in WAITING else "backward"
        return Label(unit.name, kind, phase, unit.block, counts=self.counts)
