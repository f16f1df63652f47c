"""The device: it executes the program, one instruction after another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lohan_fx.errors import HardwareError
from lohan_fx.events import Clock, Process, Signal
from lohan_fx.footprint import (
    align,
    cast_units,
    host_bytes_needed,
    parked_gradients,
    ssd_bytes_needed,
)
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import LATE, WHOLE, Plan
from lohan_fx.program import (
    Instruction,
    Program,
    Residency,
    host_view_name,
    lower,
    residency,
    window_storage,
)
from lohan_fx.simulate.recorder import Label, NoRecorder, Recorder, series_of, slot_series
from lohan_fx.simulate.result import Simulation
from lohan_fx.simulate.rules import Rules
from lohan_fx.simulate.transfers import Transfers, chunk_bytes_of
from lohan_fx.simulate.updates import Updates
from lohan_fx.timeline import Lane, Series, StepPhase, Timeline
from lohan_fx.workload import Unit, Workload


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
    step = _Step(workload, plan, hw, program, Recorder(), warm_start, rules or Rules())
    step.run()
    return step.result(name or f"simulated {plan.strategy}", memory)


def step_seconds(workload: Workload, plan: Plan, hw: HardwareProfile) -> float:
    """`simulate(…).step_s`, without a timeline, which takes a planner longer to make than to use.

    Raises: as `simulate`.
    """
    step = _Step(workload, plan, hw, lower(workload, plan), NoRecorder(), False, Rules())
    step.run()
    return step.step_s


@dataclass(slots=True)
class _Loan:
    """A residual that is away (`runtime.engine._Loan`)."""

    copied: Signal
    written: Signal | None
    loaded: Signal | None = None


class _Step:
    """The compute stream: executes the program, one instruction after another."""

    def __init__(
        self,
        workload: Workload,
        plan: Plan,
        hw: HardwareProfile,
        program: Program,
        record: Recorder,
        warm_start: bool,
        rules: Rules,
    ) -> None:
        self.workload = workload
        self.plan = plan
        self.hw = hw
        self.program = program
        _check_ssd(workload, plan, hw)
        self.clock = Clock()
        self.record = record
        self.transfers = Transfers(
            self.clock, self.record, hw, chunk_bytes_of(workload, plan, program), rules
        )
        self.warm = warm_start
        self.parked = parked_gradients(plan)
        self.casts = cast_units(plan)
        self.updates = Updates(self.clock, self.record, hw, self.transfers, workload, plan)
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

    @property
    def step_s(self) -> float:
        return self.time - self.origin

    def run(self) -> None:
        self.clock.start(self._execute())
        self.clock.run()
        if not self.done:
            at = self.program.instructions[len(self.starts) - 1] if self.starts else "the start"
            raise RuntimeError(f"nothing can go on: the program is stuck at {at}")

    def result(self, name: str, memory: Residency) -> Simulation:
        """What has run, and the program's memory."""
        return Simulation(
            timeline=Timeline(
                name=name,
                spans=tuple(self.record.finish(self.origin, self.time)),
                memory=self._memory(memory),
                compute=self.hw.lane_name("gpu"),
            ),
            step_s=self.step_s,
            forward_s=self.forward_end - self.origin,
            backward_s=self.backward_end - self.forward_end,
            optimizer_s=self.time - self.backward_end,
            device=memory,
            num_events=self.clock.count,
        )

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
            yield from self._update_on_device("optimizer")
            self.updates.release()
            yield self.time

    def _emission_order(self) -> list[Unit]:
        by_name = self.workload.unit_by_name
        return [by_name[x.name] for x in self.program.instructions if x.kind == "emit_gradients"]

    def _work(self, seconds: float, label: Label) -> None:
        start, self.time = self.time, self.time + seconds
        self.record.add("gpu", start, self.time, label)

    def _stall(self, signal: Signal, label: Label) -> Process:
        yield signal
        if self.clock.now > self.time:
            self.record.add("gpu", self.time, self.clock.now, label)
            self.time = self.clock.now

    def _stall_for(self, others: Process, label: Label) -> Process:
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
        if x.tier == "device":
            self._work(self._unit_of[x.name].cast_bytes / self.hw.device_bytes_per_s, label)
            self._fetches[x.name] = Signal(done=True)
        elif x.tier == "host":
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
        label = self._label(x, "emit_gradients")
        if self.updates.tiers[x.name] == "device":
            self._held.append(unit)
            if x.name in self.parked:
                self._arrivals[x.name] = self.transfers.copy("d2h", x.num_bytes, label)
            elif self.plan.schedule not in WHOLE:
                yield from self._update_on_device("backward")
            return
        if x.name in self.updates.direct:
            self.updates.emitted(unit, Signal(done=True))
            return
        if not self.updates.has_own_buffer(unit):
            yield from self._stall(self.updates.rings[x.tier].acquire(), label)
        arrival = self._arrivals[x.name] = self.transfers.copy("d2h", x.num_bytes, label)
        self.updates.emitted(unit, arrival)

    def _release_gradients(self, x: Instruction) -> Process:
        label = self._label(x, "release_gradients")
        yield from self._stall(self._arrivals.pop(x.name), label)

    def _update_on_device(self, phase: StepPhase) -> Process:
        """Updates of device-resident units run between the ops, at device memory bandwidth: all
        of the states and the copy are read and written, and the gradient read; over the link before
        all that if it is parked."""
        for unit in self._held:
            if unit.name in self.parked:
                label = Label(unit.name, "direct_read", phase, unit.block, counts=self.counts)
                yield self.time
                yield self.transfers.link("h2d", unit.gradient_bytes, label, by_compute=True)
                self._work(self.clock.now - self.time, label)
            label = Label(unit.name, "update", phase, unit.block)
            moved = unit.device_update_bytes(copy=unit.name not in self.casts)
            self._work(moved / self.hw.device_bytes_per_s, label)
        self._held.clear()

    def _join(self) -> Process:
        yield from self._update_on_device("optimizer")
        label = Label("optimizer.step", "join", "optimizer", "")
        yield from self._stall_for(self.updates.join(), label)

    # -- names and memory -------------------------------------------------------------------

    def _label(self, x: Instruction, kind: str) -> Label:
        return Label(x.name, kind, x.phase, self._block(x), self.warm, self.counts)

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

    def _memory(self, memory: Residency) -> dict[str, Series]:
        host = host_bytes_needed(self.workload, self.plan)
        ssd = ssd_bytes_needed(self.workload, self.plan)
        starts = (t - self.origin for t in self.starts)
        device = list(zip(starts, memory.series, strict=True))
        slots = {k: [(t - self.origin, size) for t, size in v] for k, v in self.slots.items()}
        return {
            "device": series_of(device),
            "host": slot_series(sum(host.values()) - host["residuals"], slots["host"]),
            "ssd": slot_series(ssd["units"], slots["ssd"]),
        }


def _check_ssd(workload: Workload, plan: Plan, hw: HardwareProfile) -> None:
    if hw.ssds or not sum(ssd_bytes_needed(workload, plan).values()):
        return
    raise HardwareError(
        f"plan {plan.strategy!r} uses the ssd tier, but hardware profile {hw.name} has no SSDs: "
        "plan again for this profile, or profile with profile_hardware(ssd=[…])"
    )
