"""From inputs to a program: trace, fuse, annotate, plan, have memory, rewrite."""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lohan_fx.annotate import annotate
from lohan_fx.capture import Captured, capture
from lohan_fx.compiled import allocation
from lohan_fx.compiled.arriving import Arriving
from lohan_fx.compiled.fitting import PREPARE, fitting_plan, given_plan, has_backward
from lohan_fx.compiled.hooks import refuse_uncalled
from lohan_fx.compiled.leaving_room import ALONE, Beside
from lohan_fx.compiled.options import Options
from lohan_fx.compiled.programs import CompiledProgram, Programs
from lohan_fx.compiled.training import Training
from lohan_fx.compiled.user_module import UserModule
from lohan_fx.errors import InsufficientMemoryError, PlanError
from lohan_fx.footprint import parked_gradients
from lohan_fx.fusion import Kernels, fuse
from lohan_fx.hardware import HardwareProfile
from lohan_fx.passes import PassManager, Rewrite, pipeline
from lohan_fx.passes.direct_calls import direct_calls
from lohan_fx.passes.split import Halves, split
from lohan_fx.passes.verify import check_invariants, check_program
from lohan_fx.plan import Plan
from lohan_fx.planners.registry import PlannerOptions
from lohan_fx.printing import ProgramModule
from lohan_fx.program import Program, residency, waiting_bytes
from lohan_fx.progress import Line
from lohan_fx.runtime.engine import Engine, slots_of
from lohan_fx.runtime.executor import Executor
from lohan_fx.runtime.lane import wait_closed
from lohan_fx.runtime.memory import Memory
from lohan_fx.runtime.ops import engines
from lohan_fx.runtime.scratch import update_scratch_bytes
from lohan_fx.runtime.step import Buffers, Resident
from lohan_fx.runtime.written import Reachable
from lohan_fx.workload import Workload

_STAGES = {
    "capture": "tracing the model",
    "fuse": "compiling kernels",
    "annotate": "measuring ops",
    "plan": "planning",
    "allocate": "allocating, moving the model's states",
    "rewrite": "rewriting the program",
    "refine": "planning again, with measured seconds",
}
"""What the live line calls the stages of `Builder.setup_s`."""


class Builder:
    """Makes the programs of one model.

    Attributes:
        options: what was asked for; the profile of the hardware changes when it is measured anew.
        setup_s: seconds by stage so far.
    """

    def __init__(
        self,
        user: UserModule,
        options: Options,
        training: Training,
        arriving: Arriving,
        programs: Programs,
    ) -> None:
        self.options = options
        self.setup_s: dict[str, float] = {}
        self._user = user
        self._training = training
        self._arriving = arriving
        self._programs = programs
        self._line = Line(options.progress)
        self._scratch: dict[Any, int] = {}
        self._kernels = Kernels(options.device, compiled=True)

    def use_hardware(self, hw: HardwareProfile) -> None:
        """Plan for this profile from now on: it was measured in steps."""
        self.options = dataclasses.replace(self.options, hw=hw)

    def make(self, args: tuple[Any, ...], kwargs: dict[str, Any], grad: bool) -> CompiledProgram:
        """Make the program for these inputs."""
        options, training, user = self.options, self._training, self._user
        if grad:
            seen = user.look()
            refuse_uncalled(training.names, seen.named, seen.inner)
        with self.stage("capture"):
            captured = self._capture(args, kwargs, grad)
        if options.fused:
            with self.stage("fuse"):
                fuse(captured, user.module, self._kernels)
        with self.stage("annotate"):
            workload = self._with_scratch(
                annotate(captured, user.module, training.layouts, training.state_layout, options.hw)
            )
        return self.build(captured, workload, self.plan_for(workload))

    def build(self, captured: Captured, workload: Workload, plan: Plan) -> CompiledProgram:
        """Make the program of a plan. Units are where it wants them, or nowhere yet."""
        training, programs = self._training, self._programs
        if training.needs_whole_gradients and plan.schedule not in training.whole_schedules:
            raise PlanError(
                f"{plan.strategy!r} planned schedule {plan.schedule!r}, which updates units "
                "before optimizer.step(), but the options about gradients need all of them before: "
                "plan with schedule 'deferred' or 'serial'"
            )
        programs.sync()  # updates of the last step may still read buffers
        memory = programs.memory
        if (
            memory is None
            or self.options.forwards == 1
            or not allocation.has_slots(memory, workload, plan)
        ):
            programs.drop_pending()
        if memory is not None:
            memory.lanes.drain()  # buffers may move, and nobody may have waited for copies of them
        wait_closed()  # memory of models that are gone
        if memory is None:
            with self.stage("allocate"):
                programs.memory = allocation.allocate(
                    self._user.module,
                    workload,
                    plan,
                    options=self.options,
                    training=training,
                    arriving=self._arriving,
                )
            programs.own_memory(self._user.ref())
            memory = programs.memory
        else:
            programs.own_memory(self._user.ref())
            self._grow(memory, captured, workload, plan)
        with self.stage("rewrite"):
            return self._rewrite(memory, captured, workload, plan)

    def _grow(self, memory: Memory, captured: Captured, workload: Workload, plan: Plan) -> None:
        """Let memory that other programs have suffice for one more."""
        updater, schedule = memory.updater, plan.schedule
        if updater is not None and not captured.has_backward:
            schedule = updater.schedule  # it updates nothing: that of training programs stays
        if memory.spares and schedule != "speculative":  # others have plans for that memory
            memory.drop_spares()
        grown = allocation.reserve(memory, self.options.hw, workload, plan) or not memory.connected
        allocation.make_spares(memory, workload, schedule)
        if grown or updater is None or updater.schedule != schedule:
            programs = self._programs.by_signature.values()
            allocation.connect(
                memory, self._training, workload, schedule, [p.executor.engine for p in programs]
            )

    def plan_for(self, workload: Workload) -> Plan:
        """The plan that was given, or one that is made for where the units are."""
        planner, memory = self.options.planner, self._programs.memory
        if memory is None:
            given = given_plan(self.options, workload)
            if given is not None:
                return given
        else:
            planner = dataclasses.replace(
                planner,
                fixed_units={u.unit.name: u.tier for u in memory.states.units},
                fixed_copies=memory.states.copies,
                fixed_casts=memory.states.casts,
                fixed_parked=self._parked(),
            )
        try:
            with self.stage("plan"):
                return self.fitting_plan(workload, self.options.hw, planner, self.beside())
        except InsufficientMemoryError as error:
            if memory is None or not has_backward(workload):
                raise
            if planner.fixed_parked is None:
                raise error.anew(
                    "An evaluation ran before the first step that trains, and units are where it "
                    f"had room for them: call {PREPARE} before it."
                ) from None
            if error.tier != "device" or "device" not in (planner.fixed_units or {}).values():
                raise
            raise error.anew(
                "That is so where units are now, which is where the first batch had room for them: "
                "compile anew, and call model.lohan.prepare(…) with the largest batch before any "
                "other."
            ) from None

    def _parked(self) -> frozenset[str] | None:
        """The units whose gradients programs that train park, for which there are buffers; None if
        no program trains."""
        programs = self._programs.by_signature.values()
        plans = [p.plan for p in programs if p.executor.captured.has_backward]
        return frozenset().union(*map(parked_gradients, plans)) if plans else None

    def fitting_plan(
        self,
        workload: Workload,
        hw: HardwareProfile,
        planner: PlannerOptions,
        beside: Beside = ALONE,
    ) -> Plan:
        """A plan within budget; late updates if another program has no room for early ones."""
        updater = self._programs.updater
        deferred = updater is not None and updater.schedule == "deferred"
        return fitting_plan(self.options, workload, hw, planner, deferred=deferred, beside=beside)

    def beside(self) -> Beside:
        """What programs that train take, whose forwards may wait while another one runs."""
        if self.options.forwards == 1:
            return ALONE
        programs = self._programs.by_signature.values()
        train = [p for p in programs if p.executor.captured.has_backward]
        return Beside(
            peak=max((p.memory.peak_bytes for p in train), default=0),
            waiting=max((waiting_bytes(p.instructions) for p in train), default=0),
        )

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the seconds of a stage of making programs to `setup_s`."""
        start = time.perf_counter()
        with self._line.stage(_STAGES.get(name, name)):
            yield
        self.setup_s[name] = self.setup_s.get(name, 0.0) + time.perf_counter() - start

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any], grad: bool) -> Captured:
        with self._user.to_be_traced() as module:
            return capture(
                module,
                args,
                kwargs,
                device=self.options.device,
                dtype=self._training.compute_dtype,
                outputs=self.options.outputs,
                grad=grad,
                loss_chunk_bytes=self.options.loss_chunk_bytes,
            )

    def _with_scratch(self, workload: Workload) -> Workload:
        """Add what updates take on the device, if units may live there."""
        training, optimizer = self._training, self._training.optimizer
        if optimizer is None or self.options.planner.states in ("host", "ssd"):
            return workload
        named = dict(self._user.module.named_parameters())
        places = {
            id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]
        }
        units = []
        for unit, layout in zip(workload.units, training.layouts, strict=True):
            if unit.trainable:
                parameters = [named[s.name] for s in layout.slices]
                key = tuple(
                    (s.offset, s.shape, s.stride, layout.dtype, places[id(p)])
                    for s, p in zip(layout.slices, parameters, strict=True)
                )
                if key not in self._scratch:
                    self._scratch[key] = update_scratch_bytes(
                        optimizer,
                        parameters,
                        layout,
                        mixed=training.compute_dtype is not None,
                        device=self.options.device,
                        clips=training.clipping.clips,
                    )
                scratch = self._scratch[key]
                units.append(dataclasses.replace(unit, update_scratch_bytes=scratch))
            else:
                units.append(unit)
        return dataclasses.replace(workload, units=tuple(units))

    def _rewrite(
        self, memory: Memory, captured: Captured, workload: Workload, plan: Plan
    ) -> CompiledProgram:
        """Write the plan into the graph; bind its ops to memory."""
        rewrite = Rewrite(
            captured=captured, workload=workload, plan=plan, layouts=self._training.layouts
        )
        slots = slots_of(rewrite.slots, workload, plan)
        engine = Engine(slots, (), memory.states, memory.updater, memory.lanes, memory.store)
        rewrite.run = engines.add(engine)
        PassManager(passes=pipeline(), verify=check_invariants)(rewrite)
        instructions = check_program(rewrite, self.options.budget.device_bytes)
        engine.emit_order = tuple(
            rewrite.units[i.name] for i in instructions.instructions if i.kind == "emit_gradients"
        )
        engine.parked = frozenset(rewrite.units[name] for name in parked_gradients(plan))
        halves = split(rewrite)
        for half in (halves.forward, halves.backward):
            if half is not None:
                direct_calls(half)
        executor = Executor(
            captured=captured,
            halves=halves,
            engine=engine,
            parameters=Resident(memory.states, captured),
            buffers=Buffers(self._user.ref, self.options.device),
            reachable=_reachable(captured, halves, instructions, workload, memory),
        )
        self._programs.executors.add(executor)
        return CompiledProgram(
            workload=workload,
            plan=plan,
            graph=ProgramModule(rewrite),
            instructions=instructions,
            memory=residency(instructions),
            executor=executor,
        )


def _reachable(
    captured: Captured, halves: Halves, instructions: Program, workload: Workload, memory: Memory
) -> Reachable:
    """What backward reads, recomputation included, that user code may write into."""
    late = [x for x in instructions.instructions if x.phase == "backward"]
    names = {x.name for x in late if x.kind == "compute"} | {op.name for x in late for op in x.body}
    read = {v for op in workload.ops if op.name in names for v in op.reads}
    wanted = {
        captured.first_name(n.meta["role"].target)
        for n in captured.graph.graph.find_nodes(op="placeholder")
        if n.name in read and n.meta["role"].kind == "parameter"
    }
    half = halves.backward
    constants = half.graph.find_nodes(op="get_attr") if half is not None else ()
    read_late = [
        (s.name, states.parameters[i], (weakref.ref(states), i))
        for states in memory.states.units
        for i, s in enumerate(states.layout.slices)
        if s.name in wanted
    ]
    return Reachable(
        saved=halves.reachable,
        buffers=tuple(r.target for r in halves.backward_inputs if r.kind == "buffer"),
        constants=tuple((n.target, getattr(half, n.target)) for n in constants),
        parameters=tuple((name, weakref.ref(p)) for name, p, _ in read_late),
        places=tuple(place for *_, place in read_late),
        uncounted=memory.states.uncounted,
    )
