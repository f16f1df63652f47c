"""The plan is made again once, with what the first steps measured (`lohan_fx.refinement`)."""

from __future__ import annotations

import dataclasses
import time

from lohan_fx import footprint
from lohan_fx.compiled.allocation import move_units
from lohan_fx.compiled.building import Builder
from lohan_fx.compiled.notices import Notices
from lohan_fx.compiled.programs import CompiledProgram, Programs
from lohan_fx.errors import InsufficientMemoryError
from lohan_fx.metrics import Meter
from lohan_fx.plan import Plan, Tier
from lohan_fx.refinement import MIN_GAIN, Measured, Outcome, Refinement
from lohan_fx.simulate import step_seconds


class Replanner:
    """Watches the first steps, and replaces the programs if another plan is faster.

    Args:
        meter: counts the optimizer's steps; None: there are none, and every forward begins one.

    Attributes:
        outcome: what became of it; None: nothing yet.
    """

    def __init__(
        self, programs: Programs, builder: Builder, notices: Notices, meter: Meter | None
    ) -> None:
        options = builder.options
        self.outcome: Outcome | None = None
        self._meter = meter
        self._last_step = -1  # how many steps had ended when one began
        self._programs = programs
        self._builder = builder
        self._notices = notices
        self._refinement = (
            Refinement(options.device) if options.refine and options.plan is None else None
        )

    def program_for(self, program: CompiledProgram) -> CompiledProgram:
        """The program to run: once, another one, if the first steps' measurements say so."""
        refinement, programs, builder = self._refinement, self._programs, self._builder
        if refinement is None or not program.executor.captured.has_backward:
            return program
        memory = programs.memory
        assert memory is not None
        if builder.options.forwards > 1 and programs.waiting():
            refinement.count(program.executor)
            return program  # what waits could not be moved
        if not refinement.before_forward(program.executor, memory.lanes, begins=self._begins()):
            return program
        self._refinement = None
        programs.sync()  # units may move; what user code wrote into them has been taken over
        measured = refinement.measured(program.workload, builder.options.hw, program.plan)
        refinement.detach(memory.lanes)
        if measured is None:
            return program
        began = time.perf_counter()
        plan, before_s, after_s = self._better_plan(program.plan, measured)
        moved: tuple[str, ...] = ()
        program.workload = measured.workload
        builder.use_hardware(measured.hw)
        if plan is not None:
            with builder.stage("refine"):
                program, moved = self._replace(program, plan)
        self.outcome = Outcome(
            before_s=before_s,
            after_s=after_s,
            moved=moved,
            seconds=time.perf_counter() - began,
        )
        if self.outcome.changed:
            self._notices.say("refined", self.outcome.text())
        return program

    def _begins(self) -> bool:
        """Whether the forward that begins now is a step's first."""
        if self._meter is None:
            return True
        before, self._last_step = self._last_step, self._meter.num_steps
        return before != self._last_step

    def _better_plan(self, plan: Plan, measured: Measured) -> tuple[Plan | None, float, float]:
        """A plan for what was measured, if it is worth it; seconds a step of both. Units stay on
        SSD, or off it: there may be no room, and moving them takes longer than it saves."""
        on_ssd: dict[str, Tier] = {u: "ssd" for u, p in plan.units.items() if p.tier == "ssd"}
        copies = footprint.host_copies(plan)
        options = dataclasses.replace(
            self._builder.options.planner,
            fixed_units=on_ssd or None,
            fixed_copies=copies,
            known=(plan,),
        )
        before_s = step_seconds(measured.workload, plan, measured.hw)
        try:
            found = self._builder.fitting_plan(measured.workload, measured.hw, options)
        except InsufficientMemoryError:  # it planned with other seconds before
            return None, before_s, before_s
        after_s = step_seconds(measured.workload, found, measured.hw)
        same_ssd = all((p.tier == "ssd") == (u in on_ssd) for u, p in found.units.items())
        if not same_ssd or after_s > (1 - MIN_GAIN) * before_s:
            return None, before_s, before_s
        return found, before_s, after_s

    def _replace(
        self, program: CompiledProgram, plan: Plan
    ) -> tuple[CompiledProgram, tuple[str, ...]]:
        """Make the program anew by a plan, and forget all others. Where there is no room for that,
        another plan has to do for where units are then.

        Returns:
            the new program; names of the units that moved.
        """
        programs, builder = self._programs, self._builder
        assert programs.memory is not None
        key = next(k for k, p in programs.by_signature.items() if p is program)
        programs.forget()
        captured, workload = program.executor.captured, program.workload
        moved, refusal = move_units(programs.memory, plan)
        if refusal:
            self._say_no_room(refusal)
        try:
            found = builder.plan_for(workload) if refusal else plan
            program = builder.build(captured, workload, found)
        except InsufficientMemoryError as refused:  # of buffers: the old ones are held still
            self._say_no_room(str(refused))
            program = builder.build(captured, workload, builder.plan_for(workload))
        programs.by_signature[key] = programs.latest = program
        return program, moved

    def _say_no_room(self, why: str) -> None:
        self._notices.say("move", f"no room to change the plan: {why}")
