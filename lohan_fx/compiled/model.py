"""A compiled model: programs by input signature, the memory that they share, one step's calls.

`CompiledModel` belongs to one nn.Module. The module's class is replaced by a subclass whose
forward runs the programs (as FSDP2 does), so that isinstance checks, attributes, state_dict and
printing stay what they were.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from lohan_fx import footprint
from lohan_fx.annotate import StateLayout, UnitLayout, annotate, unit_layouts
from lohan_fx.capture import Captured, capture
from lohan_fx.compiled.hooks import Call, SubmoduleCall, refuse_uncalled
from lohan_fx.compiled.notices import Notices
from lohan_fx.compiled.options import Options
from lohan_fx.compiled.user_module import UserModule
from lohan_fx.errors import (
    CaptureError,
    InsufficientMemoryError,
    LohanError,
    PlanError,
    StepError,
)
from lohan_fx.fusion import Kernels, fuse
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.metrics import Meter
from lohan_fx.passes import PassManager, Rewrite, pipeline
from lohan_fx.passes.split import split
from lohan_fx.passes.verify import check_invariants, check_program
from lohan_fx.plan import LATE, WAITING, WHOLE, Plan, Schedule, Tier
from lohan_fx.planners import make_plan
from lohan_fx.planners.registry import PlannerOptions
from lohan_fx.printing import ProgramModule
from lohan_fx.program import Program, Residency, lower, residency, waiting_bytes
from lohan_fx.progress import Line
from lohan_fx.refinement import MIN_GAIN, Measured, Outcome, Refinement
from lohan_fx.runtime.arena import Arena, Layout, PageLocker
from lohan_fx.runtime.clipping import Clipping
from lohan_fx.runtime.eager import ReadParameters
from lohan_fx.runtime.engine import Engine, SlotStore, slots_of
from lohan_fx.runtime.executor import Executor
from lohan_fx.runtime.lanes import Counters, Lanes, close_elsewhere
from lohan_fx.runtime.memory import Memory, ssd_paths
from lohan_fx.runtime.op_timing import OpTimer
from lohan_fx.runtime.ops import engines
from lohan_fx.runtime.optimizer import UnitOptimizer, check_supported
from lohan_fx.runtime.recording import Recorder, Stamp
from lohan_fx.runtime.scratch import update_scratch_bytes
from lohan_fx.runtime.ssd import StripedFile
from lohan_fx.runtime.states import ModelStates
from lohan_fx.runtime.step import Buffers, Resident, Step
from lohan_fx.runtime.updates import Accumulation, Updater
from lohan_fx.signature import Signature, difference, foreign_input, signature_of
from lohan_fx.simulate import simulate
from lohan_fx.weights import Source
from lohan_fx.workload import Workload

MAX_PROGRAMS = 16
"""Programs kept for one model; the least recently used one goes first."""

MAX_EVALUATIONS = 4
"""Programs without backward that are made for one model in all its life. What comes later, as the
growing sequences of generation, runs op by op (`runtime.eager`)."""

_COMPILED = "a model that lohan_fx.compile has made runs its own program: leave torch.compile out"


Loaded = Literal["model", "optimizer"]

_STAGES = {
    "capture": "tracing the model",
    "fuse": "compiling kernels",
    "annotate": "measuring ops",
    "plan": "planning",
    "allocate": "allocating, moving the model's states",
    "rewrite": "rewriting the program",
    "refine": "planning again, with measured seconds",
}
"""What the live line calls the stages of `CompiledModel.setup_s`."""


@dataclass(kw_only=True)
class CompiledProgram:
    """One program with everything that explains it."""

    workload: Workload
    plan: Plan
    graph: ProgramModule
    instructions: Program
    memory: Residency
    executor: Executor


class CompiledModel:
    """The programs of one module. Made by `lohan_fx.compile`; reached as ``model.lohan``."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        options: Options,
        source: Source | None = None,
    ) -> None:
        self._user = UserModule(model)
        self.options = options
        self.optimizer = optimizer
        self.programs: OrderedDict[Signature, CompiledProgram] = OrderedDict()
        self.memory: Memory | None = None
        self.latest: CompiledProgram | None = None
        self.setup_s: dict[str, float] = {}
        self.refined: Outcome | None = None
        self._refinement = (
            Refinement(options.device) if options.refine and options.plan is None else None
        )
        self.source = source
        self.masters: Sequence[str] = ()
        self.pending_states: Callable[[Mapping[str, nn.Parameter]], None] | None = None
        self.resetting = False
        self._notices = Notices()
        self._mended: set[str] = set()
        self._partly: set[str] = set()
        self._replaces = False
        self._meter = Meter()
        self._line = Line(options.progress)
        self._num_evaluations = 0
        self._uncapturable: set[Signature] = set()
        self._scratch: dict[Any, int] = {}
        self._kernels = Kernels(options.device, compiled=True)
        managed = (
            {id(p) for g in optimizer.param_groups for p in g["params"]} if optimizer else set()
        )
        self._trained = tuple(
            name for name, p in model.named_parameters() if id(p) in managed and p.requires_grad
        )
        if managed and not any(id(p) in managed for p in model.parameters()):
            raise LohanError(
                f"no parameter of the {type(model).__name__} is in the optimizer: construct "
                f"{type(optimizer).__name__} from the parameters of the model that you compile"
            )
        self._accumulation = Accumulation(
            kept=options.gradients == "kept",
            limit=None if options.accumulate == "manual" else options.accumulate,
            forwards=options.forwards,
            waiting=_Waiting(self),
        )
        self._clipping = Clipping(
            max_norm=options.clip_grad_norm,
            max_value=options.clip_grad_value,
            skip_nonfinite=options.skip_nonfinite,
        )
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []
        self._state_layout = StateLayout(
            compute_dtype=options.dtype if optimizer is not None else None,
            num_states=_num_states(model, optimizer, self._trained),
            accumulates=self._accumulation.adds,
        )
        self._layouts: tuple[UnitLayout, ...] = unit_layouts(
            model, self._trained, self._state_layout
        )
        self._numbers = itertools.count()
        self._anchor = torch.zeros((), requires_grad=True)
        self._closer: weakref.finalize[Any, Any] | None = None
        self._hooks: list[RemovableHandle] = []
        if optimizer is not None:
            check_supported(optimizer)
            self._hooks = [
                optimizer.register_step_pre_hook(_StepHook(self)),
                optimizer.register_step_post_hook(Call(self, CompiledModel.show_gradients)),
                optimizer.register_state_dict_pre_hook(Call(self, CompiledModel.lend_states)),
                optimizer.register_state_dict_post_hook(Call(self, CompiledModel.unlend_states)),
                optimizer.register_load_state_dict_pre_hook(Call(self, CompiledModel.check_ended)),
                optimizer.register_load_state_dict_post_hook(Call(self, CompiledModel.take_states)),
                model.register_load_state_dict_pre_hook(Call(self, CompiledModel._other_weights)),
                model.register_load_state_dict_post_hook(_end_of_load(weakref.ref(self))),
            ]
            self._hooks += [  # parts of the model are saved, too; the whole is `LohanModule`'s
                module.register_state_dict_pre_hook(SubmoduleCall(self, CompiledModel.sync))
                for module in model.modules()
                if module is not model
            ]
            for p in model.parameters():
                made = optimizer.state.get(p, {}).values() if p.is_meta else ()
                if any(isinstance(v, Tensor) and v.is_meta for v in made):
                    del optimizer.state[p]  # Adagrad makes it at construction; it is made anew

    # -- public views -----------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        return self._user.module

    def program(self) -> CompiledProgram:
        """The training program that ran last (or the evaluation program, if none did)."""
        if self.latest is None:
            raise StepError(
                "there is no program yet: it is made from the first inputs. Run one forward, or "
                "call model.lohan.prepare(*args, **kwargs)"
            )
        return self.latest

    @property
    def _updater(self) -> Updater | None:
        return self.memory.updater if self.memory is not None else None

    @property
    def counters(self) -> Counters:
        """Bytes moved since the model was compiled."""
        return self.memory.lanes.counters.copy() if self.memory is not None else Counters()

    @property
    def grad_norm(self) -> float | None:
        """The norm of the last step's gradients before clipping (`clip_grad_norm` and
        `skip_nonfinite` need it; else None)."""
        return self._clipping.grad_norm

    @property
    def skipped_steps(self) -> int:
        """Steps left out because their gradients were not finite (`skip_nonfinite`)."""
        return self._clipping.skipped_steps

    @property
    def redone_steps(self) -> int:
        """Steps whose updates were tried beside backward in vain, because their gradients had to be
        clipped (schedule "speculative"). Many of them say that it gains nothing here."""
        return self._clipping.redone_steps

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in this block are not the last of their step: they add to its gradients.

        Raises:
            StepError: how many backwards make a step is not for the loop to say.
        """
        accumulation = self._accumulation
        if not accumulation.kept and accumulation.limit is not None:
            raise StepError(
                f"model.no_sync() with accumulate={accumulation.limit}, which counts backwards: "
                "compile with accumulate='manual' to say it by no_sync(), or with gradients='kept'"
            )
        before, accumulation.more = accumulation.more, True
        try:
            yield
        finally:
            accumulation.more = before

    def metrics(self) -> dict[str, float | int]:
        """What the steps since the last call moved, took and wore, for a logger (W&B, TensorBoard).

        Ints are bytes and counts, floats seconds and shares; `lohan_fx.metrics.KEYS` explains each
        key. Reading takes microseconds and waits for nothing.
        """
        return self._meter.read(self)

    # -- programs ---------------------------------------------------------------------------

    def prepare(self, *args: Any, **kwargs: Any) -> CompiledProgram:
        """Make the program for these inputs without running it.

        Raises:
            StepError: backward has begun a step that optimizer.step() has not ended, whose
                gradients are in buffers that a new program may replace.
        """
        with _outside_inference_mode():
            self._clear_unfinished()
            self._check_step()
            return self._program(
                args, kwargs, self._signature(self._user.parameters(), args, kwargs)
            )

    def _program(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], key: Signature
    ) -> CompiledProgram:
        found = self.programs.get(key)
        if found is None:
            if len(self.programs) >= MAX_PROGRAMS:
                _, old = self.programs.popitem(last=False)
                old.executor.drop_pending()
            last = next((k for k in reversed(self.programs) if k.grad == key.grad), None)
            if last is not None:
                self._notices.say(
                    "shapes",
                    f"{difference(last, key, args, kwargs)}: making another program (at most "
                    f"{MAX_PROGRAMS} are kept; this is said once). Where lengths vary much, pad "
                    "batches to a multiple, as pad_to_multiple_of= of transformers' collators does",
                )
            found = self.programs[key] = self._make(args, kwargs, key.grad)
        self.programs.move_to_end(key)
        if key.grad or self.latest is None:
            self.latest = found
        return found

    def _evaluation(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], key: Signature
    ) -> CompiledProgram | None:
        """The program of a forward without backward; None if it is to run op by op."""
        if key in self.programs:
            return self._program(args, kwargs, key)
        if key in self._uncapturable:
            return None
        if self._num_evaluations >= MAX_EVALUATIONS:
            self._notices.say(
                "evaluations",
                f"{MAX_EVALUATIONS} programs without backward were made: other shapes and modes "
                "are evaluated op by op, without a plan",
            )
            return None
        self._num_evaluations += 1
        try:
            return self._program(args, kwargs, key)
        except CaptureError as error:
            self._notices.say("uncaptured", f"evaluating op by op, without a plan: {error}")
            self._uncapturable.add(key)
            return None

    def _signature(
        self, named: Mapping[str, nn.Parameter], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Signature:
        leaves = itertools.chain(named.values(), pytree.tree_leaves((args, kwargs)))
        grad = torch.is_grad_enabled() and any(
            isinstance(x, Tensor) and x.requires_grad for x in leaves
        )
        device = self.options.device
        return signature_of(self.model, named.values(), device, args, kwargs, grad)

    def _make(self, args: tuple[Any, ...], kwargs: dict[str, Any], grad: bool) -> CompiledProgram:
        options = self.options
        self._user.walk()
        if grad:
            refuse_uncalled(self._trained, self._user.parameters(), self._user.inner)
        with self._stage("capture"):
            captured = self._capture(args, kwargs, grad)
        if options.fused:
            with self._stage("fuse"):
                fuse(captured, self.model, self._kernels)
        with self._stage("annotate"):
            workload = self._with_scratch(
                annotate(captured, self.model, self._layouts, self._state_layout, options.hw)
            )
        return self._build(captured, workload, self._plan_for(workload))

    def _build(self, captured: Captured, workload: Workload, plan: Plan) -> CompiledProgram:
        """Make the program of a plan. Units are where it wants them, or nowhere yet."""
        if self._needs_whole_gradients and plan.schedule not in self._whole_schedules:
            raise PlanError(
                f"{plan.strategy!r} planned schedule {plan.schedule!r}, which updates units "
                "before optimizer.step(), but the options about gradients need all of them before: "
                "plan with schedule 'deferred' or 'serial'"
            )
        behind = self._updater is not None and self._updater.behind
        self.sync()  # updates of the last step may still read buffers
        if self.options.forwards == 1 or self._slots_move(workload, plan):
            for program in self.programs.values():
                program.executor.drop_pending()
        elif self.memory is not None:
            self.memory.lanes.drain()  # buffers may move
        if self.memory is None:
            with self._stage("allocate"):
                self.memory = self._allocate(workload, plan)
            self._own_memory()
        else:
            self._own_memory()
            memory, updater, schedule = self.memory, self.memory.updater, plan.schedule
            if updater is not None and not captured.has_backward:
                schedule = updater.schedule  # it updates nothing: that of training programs stays
            if memory.spares and schedule != "speculative":  # others have plans for that memory
                memory.states.sync_from_user(behind=behind)
                memory.drop_spares()
            grown = self._reserve(memory, workload, plan) or not memory.connected
            self._make_spares(memory, workload, schedule)
            if grown or updater is None or updater.schedule != schedule:
                self._connect(memory, workload, schedule)
        with self._stage("rewrite"):
            return self._rewrite(captured, workload, plan)

    @property
    def _whole_schedules(self) -> frozenset[Schedule]:
        return WAITING if self._accumulation.kept else WHOLE

    @property
    def _needs_whole_gradients(self) -> bool:
        return self._accumulation.kept or self._clipping.needs_norms

    def _plan_for(self, workload: Workload) -> Plan:
        """The plan that was given, or one that is made for where the units are."""
        options = self.options
        given = options.plan
        if self.memory is None:
            if given is not None and given.workload == workload.name:
                self._check_given(given, workload)
                return given
            planner = options.planner
        else:
            states = self.memory.states
            planner = dataclasses.replace(
                options.planner,
                fixed_units={u.unit.name: u.tier for u in states.units},
                fixed_copies=states.copies,
            )
        with self._stage("plan"):
            return self._fitting_plan(workload, options.hw, planner)

    def _fitting_plan(
        self, workload: Workload, hw: HardwareProfile, planner: PlannerOptions
    ) -> Plan:
        """A plan that leaves room for what the other forwards hold that wait at once."""
        options = self.options
        others = options.forwards - 1
        budget = options.budget
        while True:
            plan = self._plan_once(workload, hw, budget, planner)
            if not others:
                return plan
            program = lower(workload, plan)
            host = footprint.host_bytes_needed(workload, plan)
            ssd = footprint.ssd_bytes_needed(workload, plan)
            waiting = {
                "device_bytes": waiting_bytes(program),
                "host_bytes": host["residuals"],
                "ssd_bytes": ssd["residuals"],
            }
            peaks = {
                "device_bytes": residency(program).peak_bytes,
                "host_bytes": sum(host.values()),
                "ssd_bytes": sum(ssd.values()),
            }
            less = {
                tier: size
                for tier, peak in peaks.items()
                if peak + others * waiting[tier] > getattr(options.budget, tier)
                and (size := getattr(options.budget, tier) - others * waiting[tier])
                < getattr(budget, tier)
            }
            if not less:
                return plan
            if min(less.values()) < 0:
                raise InsufficientMemoryError(
                    "device",
                    others * waiting["device_bytes"],
                    options.budget.device_bytes,
                    where="what waiting forwards hold",
                    advice=f"give more memory, or a smaller forwards= than {options.forwards}",
                )
            budget = dataclasses.replace(budget, **less)

    def _plan_once(
        self,
        workload: Workload,
        hw: HardwareProfile,
        budget: MemoryBudget,
        planner: PlannerOptions,
    ) -> Plan:
        """A plan; with late updates if early ones into second copies have no room in host memory,
        or drive units to the SSD, or had none for another program: they share it."""
        strategy = self.options.strategy
        if not self.options.may_defer or planner.states == "ssd":
            return make_plan(strategy, workload, hw, budget, planner)
        if self._updater is None or self._updater.schedule != "deferred":
            with suppress(InsufficientMemoryError):
                plan = make_plan(strategy, workload, hw, budget, planner)
                if all(unit.tier != "ssd" for unit in plan.units.values()):
                    return plan
        deferred = dataclasses.replace(planner, schedule="deferred")
        return make_plan(strategy, workload, hw, budget, deferred)

    def _slots_move(self, workload: Workload, plan: Plan) -> bool:
        """Whether a program needs more slots than there are."""
        if self.memory is None:
            return True
        store = self.memory.store
        host = footprint.host_bytes_needed(workload, plan)["residuals"]
        ssd = footprint.ssd_bytes_needed(workload, plan)["residuals"]
        return host > store.host_bytes or ssd > store.ssd_bytes

    def _check_given(self, plan: Plan, workload: Workload) -> None:
        """Refuse a user's plan that is of another program than the one at hand."""
        try:
            lower(workload, plan)
        except PlanError as error:
            raise PlanError(
                f"the plan given to compile is of another program: {error}. It must have been made "
                f"for the same model, inputs and options: here fused={self.options.fused}, "
                f"loss_chunk_bytes={self.options.loss_chunk_bytes} (lohan_fx.plan plans for "
                "fused=False)"
            ) from error

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        """Add the seconds of a stage of making programs to `setup_s`."""
        start = time.perf_counter()
        with self._line.stage(_STAGES.get(name, name)):
            yield
        self.setup_s[name] = self.setup_s.get(name, 0.0) + time.perf_counter() - start

    def _with_scratch(self, workload: Workload) -> Workload:
        """Add what updates take on the device, if units may live there."""
        if self.optimizer is None or self.options.planner.states in ("host", "ssd"):
            return workload
        named = dict(self.model.named_parameters())
        places = {
            id(p): g for g, group in enumerate(self.optimizer.param_groups) for p in group["params"]
        }
        units = []
        for unit, layout in zip(workload.units, self._layouts, strict=True):
            if unit.trainable:
                parameters = [named[s.name] for s in layout.slices]
                key = tuple(
                    (s.offset, s.shape, s.stride, layout.dtype, places[id(p)])
                    for s, p in zip(layout.slices, parameters, strict=True)
                )
                if key not in self._scratch:
                    self._scratch[key] = update_scratch_bytes(
                        self.optimizer,
                        parameters,
                        layout,
                        mixed=self._state_layout.compute_dtype is not None,
                        device=self.options.device,
                        clips=self._clipping.clips,
                    )
                scratch = self._scratch[key]
                units.append(dataclasses.replace(unit, update_scratch_bytes=scratch))
            else:
                units.append(unit)
        return dataclasses.replace(workload, units=tuple(units))

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any], grad: bool) -> Captured:
        with self._user.to_be_traced() as model:
            return capture(
                model,
                args,
                kwargs,
                device=self.options.device,
                dtype=self._state_layout.compute_dtype,
                outputs=self.options.outputs,
                grad=grad,
                loss_chunk_bytes=self.options.loss_chunk_bytes,
            )

    def _rewrite(self, captured: Captured, workload: Workload, plan: Plan) -> CompiledProgram:
        assert self.memory is not None
        memory = self.memory
        rewrite = Rewrite(captured=captured, workload=workload, plan=plan, layouts=self._layouts)
        slots = slots_of(rewrite.slots, workload, plan)
        engine = Engine(slots, (), memory.states, memory.updater, memory.lanes, memory.store)
        rewrite.run = engines.add(engine)
        PassManager(passes=pipeline(), verify=check_invariants)(rewrite)
        instructions = check_program(rewrite, self.options.budget.device_bytes)
        engine.emit_order = tuple(
            rewrite.units[i.name] for i in instructions.instructions if i.kind == "emit_gradients"
        )
        halves = split(rewrite)
        executor = Executor(
            captured=captured,
            halves=halves,
            engine=engine,
            parameters=Resident(memory.states, captured),
            buffers=Buffers(self._user.ref, self.options.device),
        )
        return CompiledProgram(
            workload=workload,
            plan=plan,
            graph=ProgramModule(rewrite),
            instructions=instructions,
            memory=residency(instructions),
            executor=executor,
        )

    # -- memory -----------------------------------------------------------------------------

    def _allocate(self, workload: Workload, plan: Plan) -> Memory:
        """Allocate what the first program needs, before anything is moved; then move the states."""
        options = self.options
        pin, locker = options.device.type == "cuda", PageLocker()
        memory = Memory(
            pin=pin,
            lanes=Lanes(options.device),
            store=SlotStore(pin=pin, locker=locker, places=options.forwards),
            locker=locker,
        )
        try:
            layout = Layout()
            need = footprint.host_bytes_needed(workload, plan)
            region = layout.reserve(need["units"] + need["compute copies"], "units")
            if layout.total_bytes:
                memory.arena = Arena(layout.total_bytes, pin=pin, locker=locker)
            ssd_bytes = footprint.ssd_bytes_needed(workload, plan)["units"]
            if ssd_bytes:
                run, pool = memory.open_ssd(ssd_paths(self.options.hw, ssd_bytes))
                memory.file = StripedFile(
                    run, "states", ssd_bytes, pool, stripe_bytes=footprint.STRIPE_BYTES
                )
            self._reserve(memory, workload, plan)
            memory.states = ModelStates(
                self.model,
                workload.units,
                self._layouts,
                footprint.tiers_of(plan),
                self._state_layout,
                self.optimizer,
                options.device,
                memory.arena,
                region,
                memory.file,
                self.source,
                footprint.host_copies(plan),
            )
            if self.masters and self.source is not None:
                memory.states.write(self.source.stream(self.model, self.masters), self.masters)
            if self.pending_states is not None and self.optimizer is not None:
                memory.states.take_states(self.optimizer, self.pending_states)
            self.source = self.pending_states = None
            self.masters = ()
            self._make_spares(memory, workload, plan.schedule)
            self._connect(memory, workload, plan.schedule)
        except BaseException:
            states = getattr(memory, "states", None)
            if states is not None and self.optimizer is not None:
                states.give_back(self.optimizer)  # the model goes on without us
            memory.close()
            raise
        return memory

    def _reserve(self, memory: Memory, workload: Workload, plan: Plan) -> bool:
        """Have the slots and buffers that a program needs; says whether buffers changed."""
        memory.store.grow_host(footprint.host_bytes_needed(workload, plan)["residuals"])
        ssd_bytes = footprint.ssd_bytes_needed(workload, plan)["residuals"]
        if ssd_bytes:
            memory.store.grow_ssd(
                ssd_bytes, *memory.open_ssd(ssd_paths(self.options.hw, ssd_bytes))
            )
        tiers = footprint.tiers_of(plan)
        direct = footprint.direct_gradients(plan)
        rings = {
            f"gradients {tier}": footprint.gradient_ring(
                workload.units, tiers, plan.schedule, tier, direct
            )
            for tier in ("host", "ssd")
        }
        copies = footprint.host_copies(plan)
        rings["state ring"] = footprint.state_ring(workload.units, tiers, plan.schedule, copies)
        rings["staging"] = footprint.staging_of(workload, plan)
        buffers = {name: (r.count, r.total_bytes) for name, r in rings.items() if r.count}
        for unit in workload.units:
            if footprint.has_own_buffer(unit, tiers[unit.name], plan.schedule, direct):
                buffers[f"gradients of {unit.name}"] = (1, unit.compute_bytes)
        return memory.grow_buffers(buffers)

    @staticmethod
    def _make_spares(memory: Memory, workload: Workload, schedule: Schedule) -> None:
        """Have the second copies that a program's updates are tried in."""
        if schedule == "speculative":
            memory.make_spares({unit.name for unit in workload.units if unit.trainable})

    def _connect(self, memory: Memory, workload: Workload, schedule: Schedule) -> None:
        """Give the updater the buffers; all programs use the new one."""
        if self.optimizer is None or not self._trained:
            memory.connected = True
            return
        old = memory.updater
        rings = {tier: memory.ring(f"gradients {tier}") for tier in ("host", "ssd")}
        own = {i: f"gradients of {unit.name}" for i, unit in enumerate(workload.units)}
        memory.updater = Updater(
            memory.states,
            memory.lanes,
            schedule,
            self.optimizer,
            self._accumulation,
            self._clipping,
            gradient_rings={tier: ring for tier, ring in rings.items() if ring is not None},
            gradient_buffers={i: memory.buffer(n) for i, n in own.items() if n in memory.regions},
            state_ring=memory.ring("state ring"),
        )
        for program in self.programs.values():
            program.executor.engine.updater = memory.updater
        memory.connected = True
        if old is not None:
            old.close()

    # -- running ----------------------------------------------------------------------------

    @torch.compiler.disable(reason=_COMPILED)  # type: ignore[untyped-decorator]
    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with _outside_inference_mode():
            return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = [self._input(x) for x in pytree.tree_leaves((args, kwargs))]
        self._clear_unfinished()
        self._check_step()
        self._end_interrupted()
        named = self._user.parameters()  # walking through the modules once: it takes a millisecond
        grad = torch.is_grad_enabled() and any(p.requires_grad for p in named.values())
        if grad:
            refuse_uncalled(self._trained, named, self._user.inner)
        elif foreign_input(args, kwargs):
            return self._run_eagerly(args, kwargs)
        key = self._signature(named, args, kwargs)
        program = (self._program if key.grad else self._evaluation)(args, kwargs, key)
        if program is None:
            return self._run_eagerly(args, kwargs)
        program = self._refined(program)
        executor = program.executor
        assert self.memory is not None
        place = self._make_place(executor)
        updater = self.memory.updater
        self._check_parameters(named)
        self.memory.states.sync_from_user(behind=updater is not None and updater.behind)
        # the program's ops have their dtypes: no autocast region changes them again
        with torch.autocast(self.options.device.type, enabled=False):
            if not executor.captured.has_backward:
                with torch.no_grad():
                    flat = executor.forward(inputs)
            else:
                wanted = [r for r in executor.halves.backward_outputs if r.kind == "gradient"]
                sources = [named[r.target] if r.target else inputs[r.index] for r in wanted]
                at = (place, next(self._numbers))
                flat = Step.apply(executor, inputs, at, wanted, self._anchor, *sources)
        return executor.captured.unflatten(flat, args, kwargs)

    def _run_eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's own forward without backward; parameters are read from their tiers."""
        self.sync()
        device, dtype = self.options.device, self._state_layout.compute_dtype
        parameters = [p for _, p in self._user.named_parameters()]
        if any(p.is_meta for p in parameters):
            raise StepError(
                "the model is on the meta device still, and this forward makes no program: call "
                "model.lohan.prepare(*args, **kwargs) with a batch as for training first"
            )
        for name, _ in self.model.named_buffers():
            Buffers(self._user.ref, device)(name)
        args, kwargs = pytree.tree_map(self._input, (args, kwargs))
        elsewhere = dtype is not None or any(p.device != device for p in parameters)
        read = ReadParameters(parameters, device, dtype) if elsewhere else nullcontext()
        with self._user.as_it_was() as model, torch.no_grad(), read:
            return model.forward(*args, **kwargs)

    def _make_place(self, executor: Executor) -> int:
        """Room for one more forward that waits for its backward: the oldest one too many goes."""
        waiting = [(p, e.executor) for e in self.programs.values() for p in e.executor.waiting]
        if self.options.forwards == 1:
            for pending, owner in waiting:
                owner.drop(pending)
            return 0
        if not executor.captured.has_backward:
            return 0
        waiting.sort(key=lambda each: each[0].number)
        while len(waiting) >= self.options.forwards:
            pending, owner = waiting.pop(0)
            owner.drop(pending)
        taken = {pending.place for pending, _ in waiting}
        return next(k for k in range(self.options.forwards) if k not in taken)

    def _refined(self, program: CompiledProgram) -> CompiledProgram:
        """The program to run: once, another one, if the first steps' measurements say so."""
        refinement = self._refinement
        if refinement is None or not program.executor.captured.has_backward:
            return program
        assert self.memory is not None
        if any(p.executor.waiting for p in self.programs.values()) and self.options.forwards > 1:
            return program  # what waits could not be moved
        if not refinement.before_step(program.executor, self.memory.lanes):
            return program
        self._refinement = None
        updater = self.memory.updater
        behind = updater is not None and updater.behind
        self.sync()
        self.memory.states.sync_from_user(behind=behind)  # before units move
        measured = refinement.measured(program.workload, self.options.hw)
        refinement.detach(self.memory.lanes)
        if measured is None:
            return program
        began = time.perf_counter()
        plan, before_s, after_s = self._better_plan(program.plan, measured)
        moved: tuple[str, ...] = ()
        program.workload = measured.workload
        self.options = dataclasses.replace(self.options, hw=measured.hw)
        if plan is not None:
            with self._stage("refine"):
                key = next(k for k, p in self.programs.items() if p is program)
                for old in self.programs.values():
                    old.executor.drop_pending()
                self.programs.clear()  # they were made for the tiers that units are in now
                self._num_evaluations = 0
                moved, plan = self._move(plan)
                captured, workload = program.executor.captured, measured.workload
                try:
                    program = self._build(captured, workload, plan or self._plan_for(workload))
                except InsufficientMemoryError as error:  # of buffers: the old ones are held still
                    self._notices.say("move", f"no room to change the plan: {error}")
                    program = self._build(captured, workload, self._plan_for(workload))
                self.programs[key] = self.latest = program
        self.refined = Outcome(
            before_s=before_s,
            after_s=after_s,
            moved=moved,
            seconds=time.perf_counter() - began,
        )
        if self.refined.changed:
            self._notices.say("refined", self.refined.text())
        return program

    def _better_plan(self, plan: Plan, measured: Measured) -> tuple[Plan | None, float, float]:
        """A plan for what was measured, if it is worth it; seconds a step of both. Units stay on
        SSD, or off it: there may be no room, and moving them takes longer than it saves."""
        on_ssd: dict[str, Tier] = {u: "ssd" for u, p in plan.units.items() if p.tier == "ssd"}
        copies = footprint.host_copies(plan)
        options = dataclasses.replace(
            self.options.planner, fixed_units=on_ssd or None, fixed_copies=copies
        )
        before_s = simulate(measured.workload, plan, measured.hw).step_s
        try:
            found = self._fitting_plan(measured.workload, measured.hw, options)
        except InsufficientMemoryError:  # it planned with other seconds before
            return None, before_s, before_s
        after_s = simulate(measured.workload, found, measured.hw).step_s
        same_ssd = all((p.tier == "ssd") == (u in on_ssd) for u, p in found.units.items())
        if not same_ssd or after_s > (1 - MIN_GAIN) * before_s:
            return None, before_s, before_s
        return found, before_s, after_s

    def _move(self, plan: Plan) -> tuple[tuple[str, ...], Plan | None]:
        """Move units to the tiers of a plan. Names of those that moved; the plan, or None if there
        was no room for one, and another plan has to do for where they are."""
        assert self.memory is not None
        memory = self.memory
        tiers = footprint.tiers_of(plan)
        moving = [s for s in memory.states.units if tiers[s.unit.name] != s.tier]
        moving.sort(key=lambda states: states.tier != "device")  # these make room
        moved: list[str] = []
        try:
            if moving:
                memory.drop_spares()  # other units have them then
            for states in moving:
                arena = None
                if tiers[states.unit.name] == "host":
                    arena = Arena(states.num_bytes, pin=memory.pin, locker=memory.locker)
                    memory.moved.append(arena)
                memory.states.move(states, arena)
                moved.append(states.unit.name)
        except (InsufficientMemoryError, torch.OutOfMemoryError) as error:
            self._notices.say("move", f"no room to change the plan: {error}")
            return tuple(moved), None
        finally:
            if moved:
                memory.buffers = {}  # gradients of other units have buffers now
        return tuple(moved), plan

    def _check_parameters(self, named: Mapping[str, nn.Parameter]) -> None:
        """Refuse a model whose layers are others than those that were moved."""
        assert self.memory is not None
        known = {id(p) for unit in self.memory.states.units for p in unit.parameters}
        for name, p in named.items():
            if id(p) not in known:
                raise StepError(
                    f"parameter {name} is another tensor than when the model was compiled: call "
                    "model.lohan.close() before replacing layers, and compile again"
                )

    def _check_step(self) -> None:
        """Refuse a forward while the last step is not over, or a load that failed is not mended."""
        self._check_loaded()
        updater = self._updater
        if updater is None:
            return
        self.check_whole()
        if updater.pending:
            raise StepError(
                "backward ran, but optimizer.step() was not called since, or failed: gradients are "
                "consumed as they appear, so every backward needs its step before the next "
                "forward. Call optimizer.step(); to add up several backwards, compile with "
                "accumulate= or gradients='kept'"
            )

    def _clear_unfinished(self) -> None:
        """Clear what a failed step left, if a second interrupt struck while that was done."""
        for program in self.programs.values():
            if program.executor.unfinished:
                program.executor.abort()

    def _end_interrupted(self) -> None:
        """Wait for what an optimizer.step() that was interrupted left running."""
        updater = self._updater
        if updater is not None and updater.behind and updater.schedule not in LATE:
            updater.join()

    def check_whole(self) -> None:
        """See that weights and states are those of one step, and that their files are whole.

        Raises:
            StepError: a step failed after some units had taken it, or a checkpoint was loaded in
                part.
            StorageError: a file of the SSD tier has lost a part.
        """
        self._check_loaded()
        if self.memory is None:
            return
        if self.memory.file is not None:
            self.memory.file.check()
        torn = self.memory.updater.torn if self.memory.updater is not None else ()
        if torn:
            raise StepError(
                "a step failed after some units were updated, so the model stands between two "
                f"steps: {', '.join(torn)} took the step, the others did not. Load a checkpoint "
                "with lohan_fx.load(), or model.load_state_dict() and optimizer.load_state_dict(), "
                "both, and go on; or call model.lohan.close(), load, and compile again. With "
                "schedule='serial' nothing is updated before optimizer.step()"
            )

    def _check_loaded(self) -> None:
        if self._partly:
            raise StepError(
                f"a checkpoint was loaded in part: the {' and the '.join(sorted(self._partly))} "
                "have neither the values that they had nor those that were saved. Load another "
                "with lohan_fx.load(), or model.load_state_dict() and optimizer.load_state_dict()"
            )

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Let model.state_dict() show what a checkpoint is about to replace, whole or not."""
        self._replaces = True
        try:
            yield
        finally:
            self._replaces = False

    @contextmanager
    def loading(self, parts: Sequence[Loaded]) -> Iterator[None]:
        """While all values of these parts are replaced; without its end they are neither the old
        ones nor the new, and `check_whole` says so."""
        self._partly |= set(parts)
        yield
        for part in parts:
            self.loaded(part)

    def loaded(self, what: Loaded) -> None:
        """All weights, or all states of the optimizer, were loaded: the two mend a torn model."""
        self._partly.discard(what)
        updater = self._updater
        if updater is None or not updater.torn:
            return
        self._mended |= {what}
        if self._mended == {"model", "optimizer"}:
            updater.torn = ()
            self._mended = set()

    def _input(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.device != self.options.device:
            raise LohanError(
                f"an input is on {leaf.device}, the model computes on {self.options.device}: "
                f"call .to({str(self.options.device)!r}) on the batch"
            )
        dtype = self._state_layout.compute_dtype
        if dtype is not None and leaf.is_floating_point() and leaf.dtype != dtype:
            return leaf.to(dtype)
        return leaf

    def sync(self) -> None:
        """Wait until parameters and optimizer states are those that the last step made.

        Only late schedules leave any of that to the next step.

        Raises:
            the first error of an update.
        """
        updater = self._updater
        if updater is not None and not updater.pending:
            updater.join()

    def _other_weights(self) -> None:
        """Weights come by load_state_dict(): masters of a checkpoint are of no use any more."""
        self.sync()
        self.masters = ()

    def lend_states(self) -> None:
        """Let the optimizer have its states while it makes its state_dict().

        Raises:
            StepError: backward has begun a step that optimizer.step() has not ended.
        """
        self.check_saving()
        if self.memory is not None and self.optimizer is not None:
            self.memory.states.give_back(self.optimizer)
        self._materialize_states()

    def _materialize_states(self) -> None:
        """Load the states of a checkpoint into the optimizer, if they still wait for memory."""
        lend, self.pending_states = self.pending_states, None
        if lend is not None and self.optimizer is not None:
            lend(dict(self._user.named_parameters()))
            for entry in self.optimizer.state.values():
                for name, value in entry.items():
                    entry[name] = value.clone() if isinstance(value, Tensor) else value

    def load_states(self, lend: Callable[[Mapping[str, nn.Parameter]], None]) -> None:
        """Take the optimizer's states from a checkpoint: now, or when there is memory for them.

        Args:
            lend: see `ModelStates.take_states`.
        """
        assert self.optimizer is not None
        if self.memory is None:
            self.optimizer.state.clear()
            self.pending_states = lend
        else:
            self.memory.states.take_states(self.optimizer, lend)

    def unlend_states(self) -> None:
        """Take back what `lend_states` gave."""
        if self.memory is not None and self.optimizer is not None:
            self.memory.states.release(self.optimizer)

    def forget_sums(self) -> None:
        """A checkpoint of a whole step was loaded: what has been added up for the next one goes.

        With gradients="kept" it is the user's, as in plain PyTorch.
        """
        if self.memory is not None and not self._accumulation.kept:
            self.memory.states.forget_sums()
            self._accumulation.count = 0

    def check_saving(self) -> None:
        """See that what is saved now are the weights and states of one step.

        Raises:
            StepError, StorageError: as `check_whole`; or backward has begun a step that
                optimizer.step() has not ended.
        """
        self.check_ended()
        if not self._replaces:
            self.check_whole()

    def check_ended(self) -> None:
        """Finish the last step; refuse if it is under way: states are half updated then."""
        updater = self._updater
        if updater is not None and updater.pending:
            raise StepError(
                "the model's weights or the optimizer's states are asked for between backward and "
                "optimizer.step(), while units are being updated: call optimizer.step() first"
            )
        self.sync()

    def take_states(self) -> None:
        """Take over what the optimizer has just loaded."""
        self.pending_states = None
        if self.memory is not None and self.optimizer is not None:
            self.memory.states.take_states(self.optimizer)
        self.loaded("optimizer")

    def finish_step(self) -> None:
        """End the optimizer's work of this step: what optimizer.step() does first."""
        self.show_gradients()  # those that a step hid which then failed
        if self.memory is None or self.memory.updater is None:
            return
        recorder = self.memory.lanes.recorder
        self._clear_unfinished()
        began: Stamp = 0.0
        if recorder is not None:
            recorder.phase = "optimizer"
            began = recorder.mark()
        self.memory.updater.finish()
        if recorder is not None:
            label = self.memory.lanes.label("join", "optimizer.step")
            recorder.add("gpu", label, began, recorder.mark())
        self._meter.end_step()
        # the optimizer's own step must not find them
        found = [p for states in self.memory.states.trained for p in states.parameters]
        self._hidden = [(p, p.grad) for p in found if p.grad is not None]
        for p, _ in self._hidden:
            p.grad = None

    def show_gradients(self) -> None:
        """Give back the ``.grad`` of parameters that `finish_step` hid: what optimizer.step() does
        last."""
        for p, gradient in self._hidden:
            p.grad = gradient
        self._hidden = []

    @contextmanager
    def time_ops(self) -> Iterator[OpTimer]:
        """Time every op of the steps run inside the block (the papers' profiling stage).

        `timed` puts the result into a workload. Steps are slower while their ops are timed.

        Raises:
            StepError: no step has run yet.
        """
        timer = OpTimer(self.options.device)
        executor = self.program().executor
        executor.timer = timer
        try:
            yield timer
        finally:
            executor.timer = None

    @contextmanager
    def record(self) -> Iterator[Recorder]:
        """Record the steps run inside the block; ask the recorder for its `timeline`.

        Raises:
            StepError: no step has run yet, so there is nothing to attach to.
        """
        if self.memory is None:
            raise StepError("record after the first step: before it there is no program")
        recorder = Recorder(self.options.device)
        self.memory.lanes.recorder = recorder
        try:
            yield recorder
            self.sync()  # what a late schedule leaves belongs to the last step
        finally:
            self.memory.lanes.recorder = None

    def _own_memory(self) -> None:
        """See that memory is given back with the model, also if an interrupt struck between."""
        model = self._user.ref()
        if self._closer is None and self.memory is not None and model is not None:
            self._closer = weakref.finalize(model, close_elsewhere, self.memory.close)

    def close(self) -> None:
        """Join all threads, give all memory back, remove all files.

        The model is an ordinary module again, with its weights, and the optimizer has its states
        again; both stay in the memory where they are until they are collected.
        """
        self._own_memory()
        try:
            self.sync()
        except Exception as error:  # noqa: BLE001 - what was held is given back all the same
            self._notices.say("close", f"the last step's updates did not end: {error}")
        if self._closer is not None and self._closer.alive:  # else the model's end closed it
            for program in self.programs.values():
                program.executor.abort()  # before states are read: of a step that never ends
        if self.memory is not None and self.optimizer is not None:
            self.memory.states.give_back(self.optimizer)
            self.memory.states.forget_sums()
        self._materialize_states()
        self._user.give_back(self)
        if self.memory is not None:
            self.memory.states.forget_grad_dtypes()
        self.programs.clear()
        self.latest = None
        for hook in self._hooks:
            hook.remove()
        if self._closer is not None:
            self._closer()
        self.memory = None


@contextmanager
def _outside_inference_mode() -> Iterator[None]:
    """Memory that is made for a call outlives it, so it must not be of inference tensors."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


class _StepHook:
    """Before optimizer.step(). Holds the compiled model weakly, as `hooks.Call`.

    A closure runs first, with gradients as they are; what it leaves is the step's.
    """

    def __init__(self, compiled: CompiledModel) -> None:
        self._compiled = weakref.ref(compiled)

    def __call__(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        compiled = self._compiled()
        if compiled is None:
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            compiled.finish_step()
            return None
        compiled.show_gradients()

        def first() -> Any:
            loss = closure()
            compiled.finish_step()
            return loss

        return args[:1], {**kwargs, "closure": first}


def _end_of_load(ref: weakref.ref[CompiledModel]) -> Callable[[nn.Module, Any], None]:
    """A hook behind model.load_state_dict(): says that all weights were loaded."""

    def hook(_: nn.Module, found: Any) -> None:
        compiled = ref()
        if compiled is not None and not found.missing_keys:
            compiled.loaded("model")

    return hook


class _Waiting:
    """How many forwards of a model wait for their backward. Holds the model weakly."""

    def __init__(self, compiled: CompiledModel) -> None:
        self._compiled = weakref.ref(compiled)

    def __call__(self) -> int:
        compiled = self._compiled()
        if compiled is None:
            return 0
        return sum(len(p.executor.waiting) for p in compiled.programs.values())


def _num_states(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, trained: tuple[str, ...]
) -> int:
    """Optimizer tensors of parameter shape that each element has."""
    if optimizer is None or not trained:
        return 0
    check_supported(optimizer)
    named = dict(model.named_parameters())
    return len(UnitOptimizer(optimizer, [named[n] for n in trained]).state_names())
