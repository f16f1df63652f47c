"""``model.lohan``: a compiled model as its user has it.

`CompiledModel` belongs to one nn.Module. The module's class is replaced by a subclass whose
forward runs the programs (as FSDP2 does), so that isinstance checks, attributes, state_dict and
printing stay what they were.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lohan_fx.compiled.arriving import Arriving
from lohan_fx.compiled.building import Builder
from lohan_fx.compiled.ending import Ending
from lohan_fx.compiled.grad_mode import grad_mode_kept
from lohan_fx.compiled.hooks import Call, NoCopies, SubmoduleCall
from lohan_fx.compiled.integrity import Integrity, LoadsNothing
from lohan_fx.compiled.lookup import Lookup
from lohan_fx.compiled.notices import Notices
from lohan_fx.compiled.optimizer_states import OptimizerStates
from lohan_fx.compiled.optimizer_step import OptimizerStep, StepHook
from lohan_fx.compiled.options import Options
from lohan_fx.compiled.programs import CompiledProgram, NumWaiting, Programs
from lohan_fx.compiled.replanning import Replanner
from lohan_fx.compiled.running import Runner, take_over_parameters
from lohan_fx.compiled.training import training_of
from lohan_fx.compiled.user_module import UserModule
from lohan_fx.errors import LohanError, StepError
from lohan_fx.metrics import Meter
from lohan_fx.refinement import Outcome
from lohan_fx.runtime.lanes import Counters
from lohan_fx.runtime.memory import Memory
from lohan_fx.runtime.op_timing import OpTimer
from lohan_fx.runtime.recording import Recorder
from lohan_fx.signature import Signature
from lohan_fx.weights import Source

_COMPILED = "a model that lohan_fx.compile has made runs its own program: leave torch.compile out"


class CompiledModel:
    """The programs of one module. Made by `lohan_fx.compile`; reached as ``model.lohan``.

    Attributes:
        optimizer: the user's.
        builder: makes programs.
        integrity: says whether the model may run, be read, or be saved.
        optimizer_states: lends them to the optimizer; None without one.
        arriving: values that wait for memory.
        resetting: zero_grad() runs, which reads no parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        options: Options,
        source: Source | None = None,
    ) -> None:
        if optimizer is not None:
            _check_meta_states(model, optimizer)
        self.optimizer = optimizer
        self.arriving = Arriving(source=source)
        self.resetting = False
        self._records = False
        self._user = user = UserModule(model)
        self._programs = programs = Programs(optimizer)
        self._notices = Notices()
        self._meter = Meter()
        self._training = training = training_of(model, optimizer, options, NumWaiting(programs))
        self.integrity = Integrity(programs, training.accumulation)
        self.builder = Builder(user, options, training, self.arriving, programs)
        self._lookup = Lookup(programs, self.builder, self._notices)
        self._replanner = Replanner(
            programs, self.builder, self._notices, self._meter if optimizer is not None else None
        )
        self._runner = Runner(
            user, options, training, programs, self.integrity, self._lookup, self._replanner
        )
        self._step = OptimizerStep(programs, self.integrity, self._meter)
        self.optimizer_states: OptimizerStates | None = None
        loads_nothing = LoadsNothing(programs)
        self._hooks: list[RemovableHandle | NoCopies] = [
            model.register_load_state_dict_pre_hook(loads_nothing.before_weights)
        ]
        if optimizer is not None:
            self.optimizer_states = OptimizerStates(
                user, optimizer, training, self.arriving, programs, self.integrity
            )
            self._hooks += [
                optimizer.register_load_state_dict_pre_hook(loads_nothing.before_states),
                *_optimizer_hooks(
                    optimizer,
                    StepHook(self._step, programs.ending, model),
                    programs.ending,
                    self._step,
                    self.optimizer_states,
                    self.integrity,
                ),
                *_model_hooks(model, self.integrity, self.arriving),
                NoCopies(optimizer, model),
            ]

    # -- views ------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        return self._user.module

    @property
    def options(self) -> Options:
        """What was asked for; the profile of the hardware is the one that was measured last."""
        return self.builder.options

    @property
    def programs(self) -> MutableMapping[Signature, CompiledProgram]:
        """The programs that are kept; the one that ran last is the last."""
        return self._programs.by_signature

    @property
    def memory(self) -> Memory | None:
        """What all programs share; None before the first."""
        return self._programs.memory

    def program(self) -> CompiledProgram:
        """The training program that ran last (or the evaluation program, if none did)."""
        if self._programs.latest is None:
            raise StepError(
                "there is no program yet: it is made from the first inputs. Run one forward, or "
                "call model.lohan.prepare(*args, **kwargs)"
            )
        return self._programs.latest

    @property
    def setup_s(self) -> dict[str, float]:
        """Seconds that making programs took so far, by stage."""
        return self.builder.setup_s

    @property
    def refined(self) -> Outcome | None:
        """What became of measured refinement; None: nothing yet."""
        return self._replanner.outcome

    @property
    def counters(self) -> Counters:
        """Bytes moved since the model was compiled."""
        return self.memory.lanes.counters.copy() if self.memory is not None else Counters()

    @property
    def grad_norm(self) -> float | None:
        """The norm of the last step's gradients before clipping (`clip_grad_norm` and
        `skip_nonfinite` need it; else None).

        With schedule "speculative" and accumulated gradients optimizer.step() may know that nothing
        has to be clipped before it knows the norm: this waits then for the step's updates, as
        `sync`, until the next backward has done so anyway.

        Raises:
            the first error of an update, if it waits.
        """
        self._programs.know_norm()
        return self._training.clipping.grad_norm

    @property
    def skipped_steps(self) -> int:
        """Steps left out because their gradients were not finite (`skip_nonfinite`)."""
        return self._training.clipping.skipped_steps

    @property
    def redone_steps(self) -> int:
        """Steps whose updates were tried beside backward in vain, because their gradients had to be
        clipped (schedule "speculative"). Many of them say that it gains nothing here."""
        return self._training.clipping.redone_steps

    def metrics(self) -> dict[str, float | int]:
        """What the steps since the last call moved, took and wore, for a logger (W&B, TensorBoard).

        Ints are bytes and counts, floats seconds, shares and a norm; `lohan_fx.metrics.KEYS`
        explains each key. Reading takes microseconds and waits for nothing, but for the norm of
        the last step's gradients, as `grad_norm`.
        """
        self._programs.know_norm()
        peaks = [program.memory.peak_bytes for program in self.programs.values()]
        return self._meter.read(
            self.memory, self.options.hw, self.options.device, peaks, self._training.clipping
        )

    # -- running ----------------------------------------------------------------------------

    def prepare(self, *args: Any, **kwargs: Any) -> CompiledProgram:
        """Make the program for these inputs without running it.

        Raises:
            StepError: backward has begun a step that optimizer.step() has not ended, whose
                gradients are in buffers that a new program may replace; the model is closed in
                part; or as forward, about parameters.
        """
        with grad_mode_kept(), _outside_inference_mode():
            self._programs.clear_unfinished()
            self.integrity.check_step()
            seen = self._user.look()
            take_over_parameters(self._programs, self._training, seen.named)
            key = self._lookup.signature(seen, args, kwargs)
            return self._lookup.program(args, kwargs, key)

    def take_over(self, *, uncounted: bool = True) -> None:
        """Take over what user code wrote into parameters: the next forward reads it then.

        Forward does so itself with what PyTorch counts (``copy_`` and other ops on a parameter,
        ``nn.init``, ``load_state_dict``), with ``p.data = …``, and with parameters that want a
        gradient and are not in our optimizer; so does an update that comes before it, or it
        refuses. (`lohan_fx.save` calls this.) What else is written into ``p.data``, by NumPy, or by
        torch's fused optimizers, nobody counts: in mixed precision forward goes on with compute
        copies of what was there before, until the next update makes them anew (those of frozen
        parameters for ever); a parameter that is itself the compute copy, as of a bf16 model, loses
        what was written in its next update. Call this after such writes. It reads all weights, on
        SSDs, too. (``torch.autograd.graph.increment_version(p)`` has PyTorch count one, and reads
        nothing.)

        Where a compute copy changed that backward reads, a forward that waits for it can have none
        any more. Where there are no copies (``dtype=None``, units that cast) nobody notices that
        what backward reads was written, as in plain PyTorch.

        Args:
            uncounted: look for such writes. Without, this does what forward does.

        Raises:
            StepError: as `prepare`.
            the first error of an update, if `uncounted`.
        """
        with grad_mode_kept(), _outside_inference_mode():
            self._programs.clear_unfinished()
            self.integrity.check_step()
            take_over_parameters(self._programs, self._training, self._user.parameters())
            if uncounted and self.memory is not None:
                self.sync()
                self.memory.states.compare()

    @torch.compiler.disable(reason=_COMPILED)  # type: ignore[untyped-decorator]
    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with grad_mode_kept(), _outside_inference_mode():
            return self._runner.run(args, kwargs)

    def sync(self) -> None:
        """Wait until parameters and optimizer states are those that the last step made.

        Only late schedules leave any of that to the next step. Call it before you read or write
        parameters that you hold; what you write into their ``.data`` wants `take_over` behind it.

        Raises:
            StepError: backward has begun a step that optimizer.step() has not ended.
            the first error of an update.
        """
        self.integrity.check_ended()

    def wait(self) -> None:
        """As `sync`; but between backward and optimizer.step() wait for what backward began: each
        parameter is whole then, of the last step or of this one.

        Raises:
            the first error of an update of the last step.
        """
        self._programs.sync()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in this block are not the last of their step: they add to its gradients.

        Raises:
            StepError: how many backwards make a step is not for the loop to say.
        """
        accumulation = self._training.accumulation
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
            StepError: no step has run yet, so there is nothing to attach to; or this is inside of
                another such block.
        """
        memory = self.memory
        if memory is None:
            raise StepError("record after the first step: before it there is no program")
        if self._records:
            raise StepError("steps are recorded already: end the other record() block first")
        recorder = Recorder(self.options.device)
        self._records = True
        try:
            memory.lanes.recorder = recorder
            yield recorder
            self.wait()  # what a late schedule leaves belongs to the last step
        finally:
            memory.lanes.recorder, self._records = None, False

    def close(self) -> None:
        """Join all threads, give all memory back, remove all files.

        The model is an ordinary module again, with its weights, and the optimizer has its states
        again; both stay in the memory where they are until they are collected. (Units in host
        memory share theirs, and so do those on SSDs: one weight holds all of it.) Nothing else
        stays, whatever user code holds: losses, errors of steps, programs. If it is interrupted,
        another call goes on. All this is done, too, when the module is deleted.
        """
        programs = self._programs
        programs.ending.wait()
        programs.own_memory(self._user.ref())
        try:
            programs.sync()
        except Exception as error:  # noqa: BLE001 - what was held is given back all the same
            self._notices.say("close", f"the last step's updates did not end: {error}")
        programs.abort()  # before states are read: of a step that never ends
        if self.optimizer_states is not None:
            self.optimizer_states.give_back()
        programs.closing = True  # the model goes on without us, or not at all
        if programs.memory is not None:
            programs.memory.states.gradients.forget_dtypes()
        programs.forget_all()
        for hook in self._hooks:
            hook.remove()
        try:
            programs.close_memory()
        except Exception:  # a disk's: the model is free all the same
            self._user.give_back(self)
            raise
        self._user.give_back(self)  # last: an interrupted close is called again through the model


@contextmanager
def _outside_inference_mode() -> Iterator[None]:
    """Memory that is made for a call outlives it, so it must not be of inference tensors."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def _optimizer_hooks(
    optimizer: Optimizer,
    before_step: StepHook,
    ending: Ending,
    step: OptimizerStep,
    states: OptimizerStates,
    integrity: Integrity,
) -> list[RemovableHandle]:
    """Hooks on step(), state_dict() and load_state_dict() of the optimizer."""
    return [
        optimizer.register_step_pre_hook(before_step),
        optimizer.register_step_post_hook(Call(step, OptimizerStep.show_gradients)),
        optimizer.register_state_dict_pre_hook(ending),
        optimizer.register_state_dict_pre_hook(Call(states, OptimizerStates.lend)),
        optimizer.register_state_dict_post_hook(Call(states, OptimizerStates.unlend)),
        optimizer.register_load_state_dict_pre_hook(ending),
        optimizer.register_load_state_dict_pre_hook(Call(integrity, Integrity.check_ended)),
        optimizer.register_load_state_dict_post_hook(Call(states, OptimizerStates.take)),
    ]


def _model_hooks(
    model: nn.Module, integrity: Integrity, arriving: Arriving
) -> list[RemovableHandle]:
    """Hooks on load_state_dict() of the model, and on state_dict() of its parts: that of the whole
    is `LohanModule`'s."""
    return [
        model.register_load_state_dict_pre_hook(Call(integrity, Integrity.check_ended)),
        model.register_load_state_dict_pre_hook(Call(arriving, Arriving.forget_masters)),
        model.register_load_state_dict_post_hook(_WeightsLoaded(integrity)),
        *(
            module.register_state_dict_pre_hook(SubmoduleCall(integrity, Integrity.check_ended))
            for module in model.modules()
            if module is not model
        ),
    ]


class _WeightsLoaded:
    """Behind model.load_state_dict(): all weights were loaded. Holds what it tells weakly."""

    def __init__(self, integrity: Integrity) -> None:
        self._integrity = weakref.ref(integrity)

    def __call__(self, _: nn.Module, found: Any) -> None:
        integrity = self._integrity()
        if integrity is not None and not found.missing_keys:
            integrity.loaded("model")


def _check_meta_states(model: nn.Module, optimizer: Optimizer) -> None:
    """States of parameters without data have none either. Those that Adagrad makes when it is
    constructed are made anew.

    Raises:
        LohanError: others: ``optimizer.load_state_dict`` has put them there.
    """
    for name, p in model.named_parameters():
        made = optimizer.state.get(p, {}) if p.is_meta else {}
        if not any(isinstance(v, Tensor) and v.is_meta for v in made.values()):
            continue
        step = made.get("step")
        taken = not isinstance(step, Tensor) or (not step.is_meta and step.item() > 0)
        if taken or not isinstance(optimizer, torch.optim.Adagrad):
            raise LohanError(
                f"the {type(optimizer).__name__} has states of parameter {name} on the meta "
                "device, where they have no data: it loaded them before the model had any. Compile "
                "with a new optimizer, call model.lohan.prepare(*args, **kwargs) with a batch to "
                "train on, and then optimizer.load_state_dict(); or use lohan_fx.load"
            )
        del optimizer.state[p]
