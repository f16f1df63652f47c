"""Active gradient offloading: gradients leave backward as they appear, the optimizer follows.

Schedules (LoHan §IV-C, Fig. 3):
  serial     gradients wait in host memory; units are read, updated and written one by one in
             `optimizer.step()` (ZeRO).
  naive      on arrival of a gradient: read the unit's states, update, write back; one unit at a
             time, beside backward (Fig. 3a).
  optimized  states of the next units are read before their gradients arrive, and written back
             while the next unit is updated (Fig. 3b).
  overlapped optimized, and `optimizer.step()` does not wait: what backward leaves over runs beside
             the next forward, the unit that it needs first before others. A unit is fetched when
             it has been updated, so the step is the same. (§IV-C stops at the end of backward.)
  deferred   overlapped, but no update begins before `optimizer.step()`: by then all gradients are
             known, so that they can be clipped by their norm, or the step be skipped.
  speculative
             deferred, but beside backward host units are updated into second copies, as if nothing
             had to be clipped. If that was right, `optimizer.step()` goes on with those copies;
             otherwise it updates what is still there (`runtime.trials`). Where gradients add up
             it mostly knows that before it knows the norm (`runtime.clipping.Bounds`), which is
             there when all updates have ended.

Where gradients add up (`runtime.accumulation`), those of a backward that does not end the step are
added to what the unit has, on arrival; so are those of the last, and the unit is updated by the
schedule. (In one pass, where the update, or the trial of one, need not wait.)
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from lohan_fx.errors import StepError
from lohan_fx.plan import LATE, PIPELINED, WHOLE, Schedule
from lohan_fx.runtime.accumulation import Accumulation
from lohan_fx.runtime.arena import BufferRing
from lohan_fx.runtime.clipping import Clipping, Norms
from lohan_fx.runtime.gradient_offload import GradientOffload
from lohan_fx.runtime.lane import RankedLane, Ticket
from lohan_fx.runtime.lanes import Lanes
from lohan_fx.runtime.param_groups import same_hyperparameters, snapshot_hyperparameters
from lohan_fx.runtime.state_pipeline import StatePipeline
from lohan_fx.runtime.states import ModelStates, Written
from lohan_fx.runtime.trials import Trial, Trials
from lohan_fx.runtime.unit_gradients import UnitGradients
from lohan_fx.runtime.unit_jobs import STOPPED, UnitJobs, there
from lohan_fx.runtime.unit_states import UnitStates
from lohan_fx.runtime.unit_updates import UnitUpdates


class Updater:
    """Runs the optimizer of every unit, once a step, in the order in which gradients arrive.

    Args:
        states: the model's states.
        lanes: transfers; gradients leave through its d2h lane.
        schedule: see the module.
        optimizer: the user's; hyperparameters are read when backward begins, or in
            `optimizer.step()` if nothing is updated before.
        accumulation: which backwards end a step.
        clipping: what happens to whole gradients before they are used.
        gradient_rings: unit tier → ring of host buffers that receive gradients in turn.
        gradient_buffers: unit index → buffer of its own (`footprint.has_own_buffer`).
        state_ring: host buffers for units on SSD.

    Attributes:
        pending: the last backward of a step has begun, and `finish` has not ended the step; or
            another one runs.
        behind: `finish` has ended a step whose updates may still run; `join` has not run since.
        torn: units that were updated by a step that then failed.
        num_left: updates that the last `finish` left to run beside the next forward.
        trials: updates into second copies, with schedule "speculative".
    """

    def __init__(
        self,
        states: ModelStates,
        lanes: Lanes,
        schedule: Schedule,
        optimizer: torch.optim.Optimizer,
        accumulation: Accumulation,
        clipping: Clipping,
        *,
        gradient_rings: dict[str, BufferRing],
        gradient_buffers: dict[int, Tensor],
        state_ring: BufferRing | None,
    ) -> None:
        self.schedule = schedule
        self.pending = False
        self.behind = False
        self.torn: tuple[str, ...] = ()
        self._accumulation = accumulation
        self._clipping = clipping
        self._norms = norms = Norms(in_passing=lanes.device.type == "cuda")
        trial_sums = schedule == "speculative" and accumulation.adds
        norms.bounds.wanted = trial_sums and norms.in_passing and clipping.needs_norms
        self._owes_norm = False  # of the step that `finish` ended: `join` knows it
        self._updates = UnitUpdates(lanes, self._norms)
        self._last = False  # the backward that runs, or ran last, ends a step
        self.num_left = 0
        self._states = states
        self._lanes = lanes
        self._optimizer = optimizer
        self._offload = GradientOffload(lanes, gradient_rings, gradient_buffers)
        self._pipeline = StatePipeline(states, lanes, state_ring, ahead=schedule in PIPELINED)
        # without the thread nobody would release what `emit` waits for
        self._all_rings = [r for r in (*gradient_rings.values(), state_ring) if r is not None]
        self._lane = RankedLane("optimizer", on_lost=partial(_close_all, self._all_rings))
        self._jobs = UnitJobs(
            self._lane,
            self._updates,
            self._pipeline,
            self._offload,
            late=schedule in LATE,
            tries=schedule == "speculative",
        )
        self._held: list[UnitGradients] = []
        self._emitted: list[tuple[UnitStates, list[bool]]] = []
        self._updating: dict[int, list[bool]] = {}  # by backward: unit → which parameters
        self._tried: list[Trial] = []  # which add in passing
        self.trials: Trials | None = None
        if schedule == "speculative":
            try:
                self.trials = Trials(lanes, self._lane, clipping, self._updates)
            except BaseException:
                self._lane.close()
                raise

    # -- called by the program -------------------------------------------------------------

    def begin(self, order: Sequence[int]) -> None:
        """Backward begins. `order` are the units in the order in which it emits gradients.

        Raises:
            the first error of an update of the step before.
            StepError: a parameter has a ``.grad`` that is not of this model's making.
        """
        self.join()
        self._jobs.begin(order)
        accumulation = self._accumulation
        self._states.gradients.forget_hidden()
        if accumulation.kept:
            self._states.gradients.expect_scaled()  # also after a step that was given up
            self._states.gradients.take()
        elif not self._states.gradients.drop_zeroed():
            accumulation.count = 0
        self.pending = True
        self._last = accumulation.ends()
        wanted = self._last and self._clipping.needs_norms
        self._norms.begin(wanted=wanted, next_may_end=accumulation.next_may_end())
        sums = frozenset(s.index for s in self._states.trained if any(s.sums))
        self._pipeline.expect(sums if self._adds_up else None)
        if self._last:
            self._copy_written(self._states.written_before_update())  # before units are read
        if self.trials is not None:
            self.trials.begin(self._optimizer, self._jobs.rank, last=self._last)
        if self._updates_now:
            self._updates.clip = self._clipping.by_value()
            self._updates.hyperparameters = snapshot_hyperparameters(self._optimizer)
        if self._updates_now or self._adds_up:
            self._pipeline.begin([self._states.units[i] for i in order])

    def _copy_written(self, written: Sequence[Written]) -> None:
        """Updates go on from what parameters show: take over what user code wrote into them since
        forward. Backward reads none of these parameters any more, or it would have been refused."""
        if not written:
            return
        if self.trials is not None:
            self.trials.distrust({states.index for states, _ in written})
        self._states.copy_written(written)

    def _overtaken(self, written: Sequence[Written]) -> str | None:
        """One of these parameters that backward has begun to update; None if there is none. A unit
        on an SSD comes back as a whole, and compute copies are made as a whole."""
        for states, which in written:
            if states.index not in self._updating:
                continue
            flats = states.flats
            copies = states.mixed and flats is not None and states.visible is flats.compute
            for i in which:
                if self._updating[states.index][i] or states.on_ssd or copies:
                    return states.layout.slices[i].name
        return None

    def _reset_gradient(self, begun: bool) -> str | None:
        """What was done to the ``.grad`` of a parameter that has a gradient of this step, if user
        code has reset or replaced it; None if it has not.

        Raises:
            StepError: that is not ``zero_grad()`` of all of them, which leaves the step out, and
                updates have not begun.
        """
        has = {states.index: list(states.sums) for states in self._states.trained}
        if self.pending:
            for states, emitted in self._emitted:
                both = zip(has[states.index], emitted, strict=True)
                has[states.index] = [a or b for a, b in both]
        found = self._states.gradients.reset(has)
        if not found:
            return None
        name, gone = found[0]
        did = f"the .grad of parameter {name} was {'reset' if gone else 'replaced or zeroed'}"
        if not begun and (
            not all(gone for _, gone in found) or len(found) < sum(map(sum, has.values()))
        ):
            raise StepError(
                f"{did} between backward and optimizer.step(): gradients are consumed, and this "
                "step has no other. optimizer.zero_grad() leaves the whole step out; with "
                "gradients='kept' .grad is yours"
            )
        return did

    @property
    def _updates_now(self) -> bool:
        """Whether units are updated when their gradients arrive, and that counts."""
        return self._last and self.schedule not in WHOLE

    @property
    def _adds_up(self) -> bool:
        """Whether gradients of this backward are added to what the units have, and no more."""
        return self._accumulation.adds and not self._updates_now

    def end(self) -> None:
        """Backward has run.

        Raises:
            the first error of an addition, if gradients are kept: users read them from here on.
        """
        emitted = tuple(self._emitted)
        if self._accumulation.kept:
            self.join()
            self._states.gradients.show(states for states, _ in emitted)
            return
        self._states.gradients.mark_consumed(emitted)
        if not self._last:
            if not self._accumulation.waiting():
                self._accumulation.count += 1
            self.pending = False

    def emit(self, index: int, gradients: Sequence[Tensor | None], *, parked: bool = False) -> None:
        """Take a unit's gradients: start their copy; on arrival they are added, or the unit is
        updated. Those of a unit on the device stay there, unless they are `parked`."""
        states = self._states.units[index]
        norms = self._norms_now
        if self._takes_bounds(states):
            for i, gradient in enumerate(gradients):
                if gradient is not None:
                    self._norms.bounds.take(states, i, gradient)
        if states.tier == "device" and not parked:
            if norms is not None:
                norms.take_all(states, gradients)
            self._arrived(states, list(gradients), None)
            return
        views, arrival, borrowed = self._offload.start(states, gradients, norms)
        self._arrived(states, views, arrival, borrowed)

    @property
    def _norms_now(self) -> Norms | None:
        """What takes norms of gradients that are emitted, if they are whole, and norms wanted."""
        return self._norms if self._norms.wanted and not self._adds_up else None

    def _takes_bounds(self, states: UnitStates) -> bool:
        """Whether a trial will add a unit's gradients to sums, and take norms."""
        wanted = self._norms.wanted and self._norms.bounds.wanted and self._adds_up
        return wanted and self.trials is not None and self.trials.takes(states)

    def _arrived(
        self,
        states: UnitStates,
        gradients: list[Tensor | None],
        arrival: Ticket | None,
        borrowed: Tensor | None = None,
    ) -> None:
        """Add a unit's gradients, or update it, when they are there; or keep them for `finish`.

        Units on the device are served at once (without an `arrival`, unless they are parked).
        """
        given = UnitGradients(states, gradients, list(states.sums), arrival)
        self._emitted.append((states, [g is not None for g in gradients]))
        if self._adds_up:
            for i, gradient in enumerate(gradients):
                states.sums[i] |= gradient is not None
            if arrival is None:
                assert states.flats is not None
                given.add(states.flats, self._norms)
                if self._norms.wanted:
                    self._norms.take_sums(states, states.flats, states.sums)
                return
            trial = None
            if self._last and self.trials is not None:
                trial = self.trials.submit(given, arrival, self._norms)
            if trial is None:
                self._jobs.submit(given, borrowed, None, "add")
            else:
                self._tried.append(trial)
            return
        if not self._updates_now:
            if arrival is None:
                given.gradients = [None if g is None else _own(g) for g in gradients]
            elif self.trials is not None:
                self.trials.submit(given, arrival)
            self._held.append(given)
            return
        self._updating[states.index] = [
            has or g is not None for has, g in zip(states.sums, gradients, strict=True)
        ]
        states.sums = [False] * len(states.sums)
        self._jobs.start(given, borrowed)

    def fresh(self, index: int) -> Ticket | None:
        """When a unit at rest is what the last step made it; None if it is."""
        return self._jobs.fresh.get(index)

    def write(self, index: int, gradients: Sequence[Tensor], indices: Sequence[int]) -> None:
        """Compute itself writes gradients into the unit's host buffer (direct host access)."""
        states = self._states.units[index]
        if self._takes_bounds(states):
            for i, gradient in zip(indices, gradients, strict=True):
                self._norms.bounds.take(states, i, gradient)
        self._offload.write(states, gradients, indices, self._norms_now)

    def emit_written(self, index: int) -> None:
        """All gradients of a unit have been written: update it once compute has got here."""
        states = self._states.units[index]
        self._arrived(states, *self._offload.finish_writes(states))

    def release(self, index: int) -> Ticket:
        """Compute waits until the unit's gradients have left the device. Returns for what."""
        return self._offload.release(index)

    def finish(self) -> bool:
        """End the step, as optimizer.step() does: with late schedules updates go on.

        Returns:
            whether there was a step: gradients, even if they are not finite and it is left out.

        Raises:
            StepError: hyperparameters are others than those that updates in backward had, or
                parameters were written, or their ``.grad`` reset, that backward has updated; some
                of the gradients were reset, or replaced.
            as `join`.
        """
        kept = self._accumulation.kept
        begun = self.pending and self._updates_now
        changed = begun and not same_hyperparameters(self._updates.hyperparameters, self._optimizer)
        # of a step that failed: some units have taken it, so that it cannot be left out any more
        retries = self._held and (kept or self._updates.begun) and not begun
        reset = None if kept or retries else self._reset_gradient(begun)
        if reset is not None and not begun:
            given = []
            if self.trials is not None:
                self.trials.drop()
        else:
            given = list(self._held) if retries else self._kept() if kept else self._left(begun)
        ends_step = bool(begun or given)
        if given and not retries:
            if not begun:
                self._updates.hyperparameters = snapshot_hyperparameters(self._optimizer)
            if kept:
                self._updates.clip = None  # gradients are the user's to clip
            if not kept and not begun and self._skips(given):
                given = []
                if self.trials is not None:
                    self.trials.drop()
        written = self._states.written_before_update() if ends_step else []
        overtaken = self._overtaken(written)
        if written and given:
            if retries:
                self.settle()  # units may be updated still, from before an interrupt
            updated = {
                *self._updates.begun,
                *(self._states.units[i].unit.name for i in self._updating),
            }
            self._copy_written([w for w in written if w[0].unit.name not in updated])
        self._held = given  # an interrupt may strike anywhere: a next call goes on from here
        self._tried.clear()
        self._norms.bounds.clear()
        self._states.generation += bool(begun or given)
        if not kept:
            for states in self._states.trained:
                states.sums = [False] * len(states.sums)
        if given:
            self._update_all(given)
        if self.schedule != "serial":
            self._held = []
        if self.schedule in LATE:
            self.num_left = sum(not ticket.done() for ticket in self._jobs.tickets)
            self.behind = self.behind or self.pending or bool(given)
            if kept and given:
                self._states.gradients.lend(weakref.WeakMethod(self.wait))
        else:
            self.pending = self.pending or bool(given)
            self.join()
        self.pending = False
        self._accumulation.count = 0
        self._states.gradients.expect_scaled()
        if written and begun:
            self.join()  # so that the next forward can take over the rest
        if changed:
            raise StepError(
                "the optimizer's hyperparameters were changed between backward and "
                f"optimizer.step(), but with schedule {self.schedule!r} backward had updated units "
                "with the old ones, and this step is done: change them before backward (as a "
                "scheduler after optimizer.step() does), or compile with schedule='deferred' or "
                "'serial', or gradients='kept'"
            )
        if reset is not None and begun:
            raise StepError(
                f"{reset} between backward and optimizer.step(), but with schedule "
                f"{self.schedule!r} backward had begun to update units: this step is done. Compile "
                "with schedule='serial' or 'deferred' to leave out steps by zero_grad(), or with "
                "gradients='kept'; skip_nonfinite=True leaves out those that are not finite"
            )
        if overtaken is not None:
            raise StepError(
                f"parameter {overtaken} was written between backward and optimizer.step(), but "
                f"with schedule {self.schedule!r} backward had begun to update it: this step is "
                "done, and one of the two is lost. Write into parameters before forward or after "
                "optimizer.step(), or compile with schedule='serial' or 'deferred', or "
                "gradients='kept'"
            )
        return ends_step

    def wait(self) -> None:
        """Wait until nothing reads the last step's gradients."""
        if self.behind:
            self.join()

    def _left(self, begun: bool) -> list[UnitGradients]:
        """Gradients that wait for `finish`, and sums, of which there are others than `begun`."""
        held = {given.states.index for given in self._held}
        tried = [t.given for t in self._tried if t.states.index not in held]
        held.update(given.states.index for given in tried)
        sums = [s for s in self._states.trained if any(s.sums) and s.index not in held]
        found = [*self._held, *tried, *map(UnitGradients.only_sums, sums)]
        if (sums or tried) and not begun:
            self._states.settle()  # compute may be far behind this thread: trials go on meanwhile
            began = time.perf_counter()
            try:
                self._end_tried_additions(found)
            finally:
                self._lanes.wait_s += time.perf_counter() - began
        return found

    def _end_tried_additions(self, found: Sequence[UnitGradients]) -> None:
        """Backward has ended on the device: wait for sums, and have all norms, or know that they
        will change nothing. Trials that have not begun are given up."""
        wanted = self._norms.wanted
        trials = self.trials
        left = [trial for trial in self._tried if trials and not trials.give_up(trial)]
        self._wait_for_sums()
        goes_on = self._goes_on(found)
        self._owes_norm = goes_on and wanted
        if goes_on:
            return
        for trial in left if wanted else ():
            self._jobs.submit(trial.given, None, None, "norms")
        for trial in self._tried:
            trial.ended.settle()
            if trial.failed:  # the step, too, if it was adding, or its gradients never came
                self._jobs.submit(trial.given, None, None, "norms")
        self._wait_for_sums()

    def _goes_on(self, found: Sequence[UnitGradients]) -> bool:
        """Whether the step need not wait for its trials, nor for norms of what they have not begun:
        whatever these are, gradients are used as they are."""
        unended = [trial for trial in self._tried if trial.dropped or not trial.ended.ended()]
        if not unended:
            return False  # there is nothing to wait for
        if self._norms.wanted:
            parts = [(given.states, given.gradients, given.sums) for given in found]
            if not self._clipping.keeps(self._norms.bound(parts)):
                return False
        return not [trial for trial in self._tried if trial.may_fail_step()]

    def _skips(self, found: Sequence[UnitGradients]) -> bool:
        """Choose how to clip whole gradients; says whether the step is left out."""
        clipping, norms = self._clipping, self._norms
        if not clipping.needs_norms or self._owes_norm:
            self._updates.clip = clipping.by_value()
            clipping.grad_norm = None
            return False
        for given in found:
            states = given.states
            late = [
                has and not norms.has(states, i) for i, has in enumerate(given.sums)
            ]  # the step's last backward did not reach them, or there was none
            if any(late):
                assert states.flats is not None
                norms.take_sums(states, states.flats, late)
        total = norms.total()
        if clipping.skips(total):
            return True
        self._updates.clip = clipping.choose(total)
        return False

    def _kept(self) -> list[UnitGradients]:
        """What the parameters have as ``.grad``, unit by unit: those that have none are left."""
        self.join()
        self._states.settle()
        if not self._states.gradients.unscale(self._optimizer):
            return []
        if self.schedule in LATE:
            self._states.gradients.take()  # a tensor of the user's may be written before it is read
        return self._states.gradients.found()

    def _update_all(self, found: Sequence[UnitGradients]) -> None:
        """Update units whose gradients have waited: by the schedule; resident ones at once."""
        self._pipeline.expect(None)
        self._jobs.stopped = None
        here = [given for given in found if given.states.tier == "device"]
        away = [given for given in found if given.states.tier != "device"]
        if self.schedule == "serial":
            self._held = [*here, *away]  # `join` does it
            return
        for given in here:  # before anything has changed: a copy may fail, or be interrupted
            if given.arrival is not None:
                given.arrival.synchronize()
        try:
            for given in here:
                self._update_once(given)
        except BaseException:
            self._tear()
            raise
        away.sort(key=lambda given: self._jobs.rank.get(given.states.index, 1))
        if self.trials is not None:
            for trial in self.trials.settle(self._optimizer, self._updates.clip):
                self._jobs.fresh[trial.states.index] = trial.fresh
                self._jobs.tickets.append(trial.ended)
            away = [given for given in away if not self._updates.has_begun(given)]
        if self.schedule in LATE & WHOLE and any(given.states.on_ssd for given in away):
            # on the lane, where no interrupt strikes, and before the updates
            read = partial(self._begin_reading, away)
            self._jobs.tickets.append(
                self._lane.submit_ranked(read, -len(self._jobs.rank) - 1, there())
            )
        for given in away:
            self._jobs.start(given)

    def _begin_reading(self, found: Sequence[UnitGradients]) -> None:
        """Units whose update has not begun will be wanted in this order."""
        self._pipeline.begin([g.states for g in found if not self._updates.has_begun(g)])

    def join(self) -> None:
        """Finish what runs: every sum made, every unit updated, every byte written back.

        If the wait is interrupted (KeyboardInterrupt), what runs goes on, and the next `join`
        waits for it: the step is taken. With schedule "serial", units whose states could not be
        read are left as they were: a next `finish` takes them on.

        Raises:
            the first error of any of that; later ones are lost with it.
        """
        began = time.perf_counter()
        error: BaseException | None = None
        try:
            if self.trials is not None:
                self.trials.wait()  # those that were dropped read gradients still
            for given in self._held:
                if given.states.tier == "device":
                    try:
                        self._update_once(given)
                    except Exception as failure:  # noqa: BLE001 - raised below
                        error = error or failure
                else:  # on the lane, where no interrupt strikes
                    self._jobs.tickets.append(self._lane.submit(partial(self._update_once, given)))
            failed = self.settle()
            error = error or failed
        except BaseException:
            # the lane goes on; what this thread was updating itself does not
            begun, ended = self._updates.begun, self._updates.ended
            here = [g.states.unit.name for g in self._held if g.states.tier == "device"]
            if any(name in begun and name not in ended for name in here):
                self._tear()
            else:
                self.behind, self.pending = True, False
            raise
        finally:
            self._lanes.wait_s += time.perf_counter() - began
        left = [given for given in self._held if not self._updates.has_begun(given)]
        if error is None:
            self.behind, self.pending = True, False  # ended, also if what follows is cut short
            if self._owes_norm:
                self._clipping.grad_norm = float(self._norms.total())
            self._clear()
            return
        if left and len(self._updates.begun) == len(self._updates.ended):
            error.add_note(
                f"{len(left)} units did not take the step yet; their gradients are kept: call "
                "optimizer.step() again when the cause has gone"
            )
            self._held[:] = left
            self._jobs.forget_ended()
        else:
            self._take_back()
            self._tear()
        raise error

    def _update_once(self, given: UnitGradients) -> None:
        """Update a unit whose gradients were held back, unless an interrupted `join` did."""
        if self._updates.has_begun(given):
            return
        if given.arrival is not None:
            given.arrival.synchronize()
            if given.states.tier == "device":
                given.gradients = self._offload.unparked(given.states, given.gradients)
                given.arrival = None
        self._jobs.update(given, None)

    def sync(self) -> None:
        """Wait until parameters and optimizer states are those that the last step made.

        Only late schedules leave any of that to the next step. Between backward and
        optimizer.step(): until no update that backward began is running.

        Raises:
            the first error of an update; between backward and optimizer.step() none, as the step
                raises it.
        """
        if self.pending:
            self.settle()
        else:
            self.join()

    def know_norm(self) -> None:
        """Have `Clipping.grad_norm` of the last step, for which its updates may have to end.

        Raises:
            as `join`.
        """
        if self._owes_norm and self.behind:
            self.join()

    @property
    def has_consumed(self) -> bool:
        """Whether gradients are gone from ``.grad`` that no step has taken, nor zero_grad()."""
        return not self._accumulation.kept and (self.pending or self._states.gradients.holds_sums())

    def settle(self) -> BaseException | None:
        """Wait for all that was submitted; returns the first error. The step goes on."""
        return self._jobs.settle()

    def _tear(self) -> None:
        """Give a failed step up; it leaves the model between two steps if units took it."""
        self.torn = self.torn or tuple(self._updates.begun)
        self._drop()

    def _wait_for_sums(self) -> None:
        """Wait for what is added. Raises the first error; the sums are dropped then."""
        error = self.settle()
        if error is not None:
            self._take_back()
            self._tear()
            error.add_note("the gradients of this step are gone: run all of its backwards again")
            raise error
        self._jobs.forget_ended()

    def abort(self) -> None:
        """Leave nothing running after a step that failed; its error is already on the way.

        If units were updated before, the model stands between two steps: see `torn`. What has been
        added up for the step is dropped, unless it is the user's.
        """
        if not self.pending:  # a forward failed: the step before it ends as if it had not
            with suppress(BaseException):  # `torn` says it, and the error of forward is on its way
                self.join()
            return
        self._jobs.stopped = self._jobs.stopped or StepError(STOPPED)
        self._pipeline.stop()
        if self.trials is not None:
            self.trials.drop()
        self._lane.drain()
        self.settle()
        self._take_back()
        self._tear()

    def _take_back(self) -> None:
        """Have all buffers again, those too that were read into for updates that never ran."""
        self._pipeline.drain()
        for ring in self._all_rings:
            ring.reset()

    def _drop(self) -> None:
        """Forget the step, and what has been added up for it."""
        if not self._accumulation.kept:
            self._states.gradients.forget_sums()
            self._norms.bounds.clear()
            self._accumulation.count = 0
        self._clear()

    def close(self, *, joins: bool = True) -> None:
        """Finish what is running and join the thread. `joins` as for `Lane.close`. Raises as
        `join`, when all has ended."""
        try:
            self.join()
        finally:
            self._lane.close(joins=joins)
            if self.trials is not None:
                self.trials.close(joins=joins)

    def _clear(self) -> None:
        if self.trials is not None:
            self.trials.drop()
        self._held.clear()  # before what says which of them are updated: an interrupt may strike
        self._updates.clear()
        self._emitted.clear()
        self._updating.clear()
        self._tried.clear()
        self._offload.clear()
        self._pipeline.clear()
        self._jobs.clear()
        self._owes_norm = False
        self.pending = self.behind = False


def _close_all(rings: Sequence[BufferRing]) -> None:
    for ring in rings:
        ring.close()


def _own(gradient: Tensor) -> Tensor:
    """The gradient, in memory that nothing else reads: optimizers may overwrite it."""
    whole = gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
    return gradient if whole else gradient.clone()
