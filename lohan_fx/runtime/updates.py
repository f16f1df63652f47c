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
             otherwise it updates what is still there (`runtime.trials`).

Where gradients add up (`Accumulation`), those of a backward that does not end the step are added to
what the unit has, on arrival; so are those of the last, and the unit is updated by the schedule.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lohan_fx.errors import StepError
from lohan_fx.footprint import PAGE_BYTES
from lohan_fx.plan import LATE, PIPELINED, WHOLE, Schedule
from lohan_fx.runtime import sums
from lohan_fx.runtime.arena import BufferRing
from lohan_fx.runtime.clipping import Clipping, Norms
from lohan_fx.runtime.lanes import Lanes, RankedLane, Ticket
from lohan_fx.runtime.native.adam import Addend
from lohan_fx.runtime.optimizer import (
    Clip,
    Hyperparameters,
    same_hyperparameters,
    snapshot_hyperparameters,
)
from lohan_fx.runtime.recording import Label
from lohan_fx.runtime.states import Flats, ModelStates, UnitStates, on_device, views_of
from lohan_fx.runtime.trials import Trials
from lohan_fx.runtime.waiting import Future
from lohan_fx.timeline import Lane as Lane_

_STOPPED = "an earlier update of this step failed: no further one begins"


@dataclass(slots=True, kw_only=True)
class Accumulation:
    """How many backwards make a step; one object for all updaters of a model.

    Attributes:
        kept: gradients are the user's, as in plain PyTorch: every backward adds to them, and
            optimizer.step() reads them.
        limit: so many backwards make a step (the user's optimizer.step() may end it before);
            None: every backward is the last one that is not `more`.
        more: the user says that the backwards that run now are not the last.
        forwards: so many of them may wait for their backward at once; a step's last backward is
            one that leaves none.
        waiting: how many wait now.
        count: backwards of this step so far, without the last.
    """

    kept: bool = False
    limit: int | None = 1
    more: bool = False
    forwards: int = 1
    waiting: Callable[[], int] = lambda: 0
    count: int = 0

    @property
    def adds(self) -> bool:
        """Whether units have a flat in which gradients add up."""
        return self.kept or self.limit != 1 or self.forwards > 1

    def ends(self) -> bool:
        """Whether the backward that begins is the step's last."""
        if self.kept or self.waiting():
            return False
        return not self.more if self.limit is None else self.count + 1 >= self.limit


@dataclass(slots=True)
class _Given:
    """A unit's gradients: those that have come, and of which parameters there is a sum besides.

    `arrival` is when they are there (None: they are).
    """

    states: UnitStates
    gradients: list[Tensor | None]
    sums: list[bool]
    arrival: Ticket | None = None
    fresh: Ticket | None = None


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
        gradient_buffers: unit index → buffer of its own ("serial", and direct gradients).
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
        self._norms = Norms(in_passing=lanes.device.type == "cuda")
        self._clip: Clip | None = None
        self._had: frozenset[int] = frozenset()  # units with sums when backward began
        self._reads_sums = False  # what is read ahead: the sums, or all states
        self._last = False  # the backward that runs, or ran last, ends a step
        self.num_left = 0
        self._begun: list[str] = []  # units whose update has begun, and those of them
        self._ended: list[str] = []  # whose new states are complete, in host memory at least
        self._stopped: BaseException | None = None  # why no further update may begin
        self._states = states
        self._lanes = lanes
        self._optimizer = optimizer
        self._rings = gradient_rings
        self._buffers = gradient_buffers
        self._state_ring = state_ring
        # without the thread nobody would release what `emit` waits for
        self._all_rings = [r for r in (*gradient_rings.values(), state_ring) if r is not None]
        self._lane = RankedLane("optimizer", on_lost=partial(_close_all, self._all_rings))
        self._rank: dict[int, int] = {}
        self._fresh: dict[int, Ticket] = {}
        self._order: deque[UnitStates] = deque()
        self._reads: dict[int, tuple[Tensor, Future]] = {}
        self._asking = False  # the update that runs wants a buffer: reading ahead would keep it
        self._writes: list[Ticket] = []
        self._arrivals: dict[int, Ticket] = {}
        self._jobs: list[Ticket] = []
        self._held: list[_Given] = []
        self._unscaled: set[int] = set()  # parameters whose ``.grad`` this step has divided
        self._emitted: list[tuple[int, list[bool]]] = []
        self._written: dict[int, dict[int, Tensor]] = {}
        self._lock = threading.Lock()
        self._hyperparameters: Hyperparameters = ()
        self.trials: Trials | None = None
        if schedule == "speculative":
            try:
                self.trials = Trials(states, lanes, self._lane, clipping, self._begun, self._ended)
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
        self._rank = {index: -i for i, index in enumerate(order)}  # last out is needed first
        accumulation = self._accumulation
        if accumulation.kept:
            self._states.take_gradients()
        elif not self._states.drop_zeroed():
            accumulation.count = 0
        self.pending = True
        self._stopped = None
        self._last = accumulation.ends()
        self._had = frozenset(s.index for s in self._states.trained if any(s.sums))
        self._norms.clear()
        self._reads_sums = self._adds_up
        if self.trials is not None:
            self.trials.begin(self._optimizer, self._rank, last=self._last)
        if self._updates_now:
            self._clip = self._clipping.by_value()
            self._hyperparameters = snapshot_hyperparameters(self._optimizer)
        if self._updates_now or self._adds_up:
            self._begin_reading([self._states.units[i] for i in order])

    @property
    def _updates_now(self) -> bool:
        """Whether units are updated when their gradients arrive, and that counts."""
        return self._last and self.schedule not in WHOLE

    @property
    def _adds_up(self) -> bool:
        """Whether gradients of this backward are added to what the units have, and no more."""
        return self._accumulation.adds and not self._updates_now

    def _begin_reading(self, units: Sequence[UnitStates]) -> None:
        """Units on SSD will be wanted in this order."""
        with self._lock:
            done = {*self._reads, *(s.index for s in units if s.unit.name in self._begun)}
            self._order = deque(s for s in units if s.on_ssd and s.index not in done)
        if self.schedule in PIPELINED and self._order:
            self._read_ahead()

    def end(self) -> None:
        """Backward has run.

        Raises:
            the first error of an addition, if gradients are kept: users read them from here on.
        """
        emitted = tuple(self._emitted)
        if self._accumulation.kept:
            self.join()
            self._states.show_gradients(emitted)
            return
        self._states.mark_consumed(emitted)
        if not self._last:
            if not self._accumulation.waiting():
                self._accumulation.count += 1
            self.pending = False

    def emit(self, index: int, gradients: Sequence[Tensor | None]) -> None:
        """Take a unit's gradients: start their copy; on arrival they are added, or the unit is
        updated."""
        states = self._states.units[index]
        if states.tier == "device":
            if self._wants_norms and not self._adds_up:
                self._norms.take_all(states, gradients)
            self._arrived(states, list(gradients), None)
            return
        own = index in self._buffers
        buffer = self._buffers[index] if own else self._rings[states.tier].acquire()
        flat = buffer[: states.unit.compute_bytes].view(states.layout.copy_dtype)
        views: list[Tensor | None] = list(views_of(flat, states.layout.slices))
        pairs = []
        for i, gradient in enumerate(gradients):
            if gradient is None:
                views[i] = None
            else:
                view = views[i]
                assert view is not None
                pairs.append((gradient, view))
        if self._wants_norms and not self._adds_up:
            self._norms.take_all(states, gradients)
        label = self._lanes.label("emit_gradients", states.unit.name)
        arrival = self._arrivals[index] = self._lanes.to_host(pairs, label)
        self._arrived(states, views, arrival, None if own else buffer)

    def _arrived(
        self,
        states: UnitStates,
        gradients: list[Tensor | None],
        arrival: Ticket | None,
        borrowed: Tensor | None = None,
    ) -> None:
        """Add a unit's gradients, or update it, when they are there; or keep them for `finish`.

        Units on the device (without an `arrival`) are served at once.
        """
        given = _Given(states, gradients, list(states.sums), arrival)
        self._emitted.append((states.index, [g is not None for g in gradients]))
        if self._adds_up:
            for i, gradient in enumerate(gradients):
                states.sums[i] |= gradient is not None
            if arrival is None:
                assert states.flats is not None
                self._add(states.flats, given)
                if self._wants_norms:
                    self._norms.take_sums(states, states.flats, states.sums)
            else:
                self._submit(given, borrowed, None, adds=True)
                if self._last:  # its sums are whole then
                    self._try(states, [None] * len(gradients), list(states.sums), self._jobs[-1])
            return
        if not self._updates_now:
            if arrival is None:
                given.gradients = [None if g is None else _own(g) for g in gradients]
            else:
                self._try(states, given.gradients, given.sums, arrival)
            self._held.append(given)
            return
        states.sums = [False] * len(states.sums)
        self._start(given, borrowed)

    def _try(
        self,
        states: UnitStates,
        gradients: Sequence[Tensor | None],
        sums: Sequence[bool],
        ready: Ticket,
    ) -> None:
        """Update a unit into its second copy when its gradients, or sums, are `ready`."""
        if self.trials is not None:
            self.trials.submit(states, gradients, sums, ready)

    @property
    def _wants_norms(self) -> bool:
        """Whether the gradients that come now are whole, and their norms needed."""
        return self._last and self._clipping.needs_norms

    def _start(self, given: _Given, borrowed: Tensor | None = None) -> None:
        """Update a unit when its gradients are there; at once if it is on the device."""
        states = given.states
        if states.tier == "device":
            assert states.flats is not None
            self._step(states, states.flats, given)
            return
        fresh = given.fresh or Ticket() if self.schedule in LATE else None
        if fresh is not None:
            given.fresh = self._fresh[states.index] = fresh
        self._submit(given, borrowed, fresh, adds=False)

    def _submit(
        self, given: _Given, borrowed: Tensor | None, fresh: Ticket | None, *, adds: bool
    ) -> None:
        def job() -> None:
            self._run(given, borrowed, fresh, adds=adds)

        arrival = given.arrival or _there()
        given.arrival = arrival
        if fresh is None:
            if self.trials is None:
                ticket = self._lane.submit(job)
            else:  # before all trials, but these run while it waits for its gradients
                ticket = self._lane.submit_ranked(job, -1 - len(self._rank), arrival)
            self._jobs.append(ticket)
            return
        # states are read ahead in the order in which units are submitted: another order would wait
        # for a buffer that a unit behind it holds
        states = given.states
        rank = self._rank.get(states.index, 1) if states.tier == "host" else None
        self._jobs.append(self._lane.submit_ranked(job, rank, arrival, (fresh,)))

    def fresh(self, index: int) -> Ticket | None:
        """When a unit at rest is what the last step made it; None if it is."""
        return self._fresh.get(index)

    def write(self, index: int, gradients: Sequence[Tensor], indices: Sequence[int]) -> None:
        """Compute itself writes gradients into the unit's host buffer (direct host access)."""
        states = self._states.units[index]
        buffer = self._buffers[index]
        flat = buffer[: states.unit.compute_bytes].view(states.layout.copy_dtype)
        written = self._written.setdefault(index, {})
        for i, view in enumerate(
            views_of(on_device(flat, self._lanes.device), states.layout.slices)
        ):
            if i in indices:
                gradient = gradients[indices.index(i)]
                view.copy_(gradient)
                if self._wants_norms and not self._adds_up:
                    self._norms.take(states, i, gradient)
                self._lanes.count(d2h_bytes=gradient.numel() * gradient.element_size())
                written[i] = views_of(flat, states.layout.slices)[i]

    def emit_written(self, index: int) -> None:
        """All gradients of a unit have been written: update it once compute has got here."""
        states = self._states.units[index]
        written = self._written.pop(index, {})
        views = [written.get(i) for i in range(len(states.layout.slices))]
        arrival = Ticket()
        arrival.finish(self._lanes.mark())
        self._arrived(states, views, arrival)

    def release(self, index: int) -> None:
        """Compute waits until the unit's gradients have left the device."""
        self._arrivals.pop(index).wait()

    def finish(self) -> None:
        """End the step, as optimizer.step() does: with late schedules updates go on.

        Raises:
            StepError: hyperparameters are others than those that updates in backward had.
            as `join`.
        """
        kept = self._accumulation.kept
        begun = self.pending and self._updates_now
        changed = begun and not same_hyperparameters(self._hyperparameters, self._optimizer)
        retries = self._held and (kept or self._begun) and not begun  # of a step that failed
        given = list(self._held) if retries else self._kept() if kept else self._left(begun)
        if given and not retries:
            if not begun:
                self._hyperparameters = snapshot_hyperparameters(self._optimizer)
            if kept:
                self._clip = None  # gradients are the user's to clip
            if not kept and not begun and self._skips(given):
                given = []
                if self.trials is not None:
                    self.trials.drop()
        self._held = given  # an interrupt may strike anywhere: a next call goes on from here
        if not kept:
            for states in self._states.trained:
                states.sums = [False] * len(states.sums)
        if given:
            self._update_all(given)
        if self.schedule != "serial":
            self._held = []
        if self.schedule in LATE:
            self.num_left = sum(not ticket.done() for ticket in self._jobs)
            self.behind = self.behind or self.pending or bool(given)
            if kept and given:
                self._states.lend_gradients(weakref.WeakMethod(self.wait))
        else:
            self.pending = self.pending or bool(given)
            self.join()
        self.pending = False
        self._accumulation.count = 0
        self._unscaled.clear()
        if changed:
            raise StepError(
                "the optimizer's hyperparameters were changed between backward and "
                f"optimizer.step(), but with schedule {self.schedule!r} backward had updated units "
                "with the old ones, and this step is done: change them before backward (as a "
                "scheduler after optimizer.step() does), or compile with schedule='deferred' or "
                "'serial', or gradients='kept'"
            )

    def wait(self) -> None:
        """Wait until nothing reads the last step's gradients."""
        if self.behind:
            self.join()

    def _left(self, begun: bool) -> list[_Given]:
        """Gradients that wait for `finish`, and sums, of which there are others than `begun`."""
        held = {given.states.index for given in self._held}
        sums = [s for s in self._states.trained if any(s.sums) and s.index not in held]
        if sums and not begun:
            self._wait_for_sums()
            self._settle_compute()
        return [*self._held, *(_Given(s, [None] * len(s.sums), list(s.sums)) for s in sums)]

    def _skips(self, found: Sequence[_Given]) -> bool:
        """Choose how to clip whole gradients; says whether the step is left out."""
        clipping, norms = self._clipping, self._norms
        if not clipping.needs_norms:
            self._clip = clipping.by_value()
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
        self._clip = clipping.choose(total)
        return False

    def _kept(self) -> list[_Given]:
        """What the parameters have as ``.grad``, unit by unit: those that have none are left."""
        self.join()
        self._settle_compute()
        if not self._unscale():
            return []
        if self.schedule in LATE:
            self._states.take_gradients()  # a tensor of the user's may be written before it is read
        found = []
        for states in self._states.trained:
            given = [p.grad for p in states.parameters]
            sums = [g is not None and self._states.owns(states, i, g) for i, g in enumerate(given)]
            others = [None if own else g for g, own in zip(given, sums, strict=True)]
            if any(g is not None for g in given):
                found.append(_Given(states, others, sums))
        if any(given.states.on_ssd for given in found):
            self._states.flush()  # what user code did to gradients
        return found

    def _unscale(self) -> bool:
        """What GradScaler leaves to fused optimizers: divide by the scale; False: skip the step."""
        found_inf = getattr(self._optimizer, "found_inf", None)
        if found_inf is not None and found_inf.item():
            return False
        scale = getattr(self._optimizer, "grad_scale", None)
        if scale is not None:
            for states in self._states.trained:  # others' are the optimizer's own to unscale
                for p in states.parameters:
                    if p.grad is not None and id(p) not in self._unscaled:
                        self._unscaled.add(id(p))  # first: a step that is interrupted runs again
                        p.grad.div_(scale.to(p.grad.device))
        return True

    def _settle_compute(self) -> None:
        """A forward after backward may still read what updates in host memory write."""
        reached = self._lanes.mark()
        if reached is not None and any(s.tier != "device" for s in self._states.units):
            reached.synchronize()

    def _update_all(self, found: Sequence[_Given]) -> None:
        """Update units whose gradients have waited: by the schedule; resident ones at once."""
        self._reads_sums = False
        self._stopped = None
        here = [given for given in found if given.states.tier == "device"]
        away = [given for given in found if given.states.tier != "device"]
        if self.schedule == "serial":
            self._held = [*here, *away]  # `join` does it
            return
        try:
            for given in here:
                self._update_once(given)
        except BaseException:
            self._tear()
            raise
        away.sort(key=lambda given: self._rank.get(given.states.index, 1))
        if self.trials is not None:
            for trial in self.trials.settle(self._optimizer, self._clip):
                self._fresh[trial.states.index] = trial.fresh
                self._jobs.append(trial.ended)
            away = [given for given in away if given.states.unit.name not in self._begun]
        if self.schedule in LATE & WHOLE and any(given.states.on_ssd for given in away):
            # on the lane, where no interrupt strikes, and before the updates
            read = partial(self._begin_reading, [given.states for given in away])
            self._jobs.append(self._lane.submit_ranked(read, -len(self._rank) - 1, _there()))
        for given in away:
            self._start(given)

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
                    self._jobs.append(self._lane.submit(partial(self._update_once, given)))
            for tickets in (self._jobs, self._writes):  # updates submit the writes
                for ticket in tickets:
                    ticket.settle()
                    error = error or ticket.error
        except BaseException:
            # the lane goes on; what this thread was updating itself does not
            here = [g.states.unit.name for g in self._held if g.states.tier == "device"]
            if any(name in self._begun and name not in self._ended for name in here):
                self._tear()
            else:
                self.behind, self.pending = True, False
            raise
        finally:
            self._lanes.wait_s += time.perf_counter() - began
        left = [given for given in self._held if given.states.unit.name not in self._begun]
        if error is None:
            self._clear()
            return
        if left and len(self._begun) == len(self._ended):
            error.add_note(
                f"{len(left)} units did not take the step yet; their gradients are kept: call "
                "optimizer.step() again when the cause has gone"
            )
            self._held[:] = left
            self._jobs.clear()
            self._writes.clear()
        else:
            self._take_back()
            self._tear()
        raise error

    def _update_once(self, given: _Given) -> None:
        """Update a unit whose gradients were held back, unless an interrupted `join` did."""
        states = given.states
        if states.unit.name in self._begun:
            return
        if given.arrival is not None:
            given.arrival.synchronize()
        if states.tier == "device":
            assert states.flats is not None
            self._step(states, states.flats, given)
        else:
            self._update(given, None)

    def _tear(self) -> None:
        """Give a failed step up; it leaves the model between two steps if units took it."""
        self.torn = self.torn or tuple(self._begun)
        self._drop()

    def _wait_for_sums(self) -> None:
        """Wait for what is added. Raises the first error; the sums are dropped then."""
        error: BaseException | None = None
        for tickets in (self._jobs, self._writes):
            for ticket in tickets:
                ticket.settle()
                error = error or ticket.error
        if error is not None:
            self._take_back()
            self._tear()
            raise error
        self._jobs.clear()
        self._writes.clear()

    def abort(self) -> None:
        """Leave nothing running after a step that failed; its error is already on the way.

        If units were updated before, the model stands between two steps: see `torn`. What has been
        added up for the step is dropped, unless it is the user's.
        """
        if not self.pending:  # a forward failed: the step before it ends as if it had not
            with suppress(BaseException):  # `torn` says it, and the error of forward is on its way
                self.join()
            return
        self._stopped = self._stopped or StepError(_STOPPED)
        with self._lock:
            self._order.clear()  # nothing more is read ahead
        if self.trials is not None:
            self.trials.drop()
        self._lane.drain()
        for ticket in (*self._jobs, *self._writes):
            ticket.settle()
        self._take_back()
        self._tear()

    def _take_back(self) -> None:
        """Have all buffers again, those too that were read into for updates that never ran."""
        with self._lock:
            self._order.clear()
        if self._states.file is not None:
            self._states.file.drain()
        for ring in self._all_rings:
            ring.reset()

    def _drop(self) -> None:
        """Forget the step, and what has been added up for it."""
        if not self._accumulation.kept:
            self._states.forget_sums()
            self._accumulation.count = 0
        self._clear()

    def close(self) -> None:
        """Finish what is running and join the thread. Raises as `join`, when all has ended."""
        try:
            self.join()
        finally:
            self._lane.close()
            if self.trials is not None:
                self.trials.close()

    def _clear(self) -> None:
        if self.trials is not None:
            self.trials.drop()
        self._begun.clear()
        self._ended.clear()
        self._held.clear()
        self._emitted.clear()
        self._written.clear()
        self._jobs.clear()
        self._writes.clear()
        self._arrivals.clear()
        self._reads.clear()
        self._order.clear()
        self._fresh.clear()
        self.pending = self.behind = False

    # -- on the optimizer's thread ----------------------------------------------------------

    def _run(
        self, given: _Given, borrowed: Tensor | None, fresh: Ticket | None, *, adds: bool
    ) -> None:
        """Add a unit's gradients or update it, once they are there."""
        states = given.states
        try:
            assert given.arrival is not None
            given.arrival.synchronize()
            if self._stopped is not None:
                raise StepError(_STOPPED) from self._stopped
            if adds:
                self._add_at_rest(given)
            elif states.unit.name not in self._begun:  # else an interrupt made it come twice
                self._update(given, fresh)
        except BaseException as error:
            if not self._begun:  # nothing has changed yet: let it stay so
                self._stopped = self._stopped or error
            if fresh is not None:
                fresh.fail(error)
            raise
        finally:
            if borrowed is not None:
                self._rings[states.tier].release(borrowed)

    def _update(self, given: _Given, fresh: Ticket | None) -> None:
        states = given.states
        if not states.on_ssd:
            assert states.flats is not None
            self._step(states, states.flats, given)
            if fresh is not None:
                fresh.finish()
            return
        buffer = self._read_states(states)
        try:
            self._step(states, states.carve(buffer), given)
        except BaseException:
            self._ring.release(buffer)
            raise
        if fresh is not None and not states.copy_on_ssd:  # the next forward needs no more than that
            fresh.finish()
            fresh = None
        self._write_back(states, buffer, fresh)

    def _add_at_rest(self, given: _Given) -> None:
        """Add gradients to what the unit has, where it is."""
        states = given.states
        if not states.on_ssd:
            assert states.flats is not None
            self._add_on_host(states.flats, given)
            return
        buffer = self._read_states(states)
        try:
            self._add_on_host(states.carve(buffer), given)
        except BaseException:
            self._ring.release(buffer)
            raise
        label = self._lanes.label("write_gradient", states.unit.name)
        pages, num_bytes = states.gradient_range, states.unit.accumulator_bytes
        self._write(states, buffer, pages, num_bytes, label, None)

    def _add_on_host(self, flats: Flats, given: _Given) -> None:
        recorder = self._lanes.recorder
        began = time.perf_counter()
        self._add(flats, given)
        self._take_norms(given, flats)
        if recorder is not None:
            label = self._lanes.label("add", given.states.unit.name)
            recorder.add("cpu", label, began, time.perf_counter())

    def _take_norms(self, given: _Given, flats: Flats) -> None:
        if self._wants_norms:
            states, norms = given.states, self._norms
            parts = zip(given.gradients, given.sums, strict=True)
            whole = [has or g is not None for g, has in parts]
            norms.take_sums(
                states, flats, [has and not norms.has(states, i) for i, has in enumerate(whole)]
            )

    def _add(self, flats: Flats, given: _Given) -> None:
        """Add gradients to the sums that there are; the others begin with them."""
        assert flats.gradient is not None
        states = given.states
        totals = views_of(flats.gradient, states.layout.slices)
        parts = zip(totals, given.gradients, given.sums, strict=True)
        addends = {i: Addend(t, g, not has) for i, (t, g, has) in enumerate(parts) if g is not None}
        squared = self._wants_norms and self._norms.in_passing
        squares = sums.add(list(addends.values()), squared=squared)
        for i, value in zip(addends, squares, strict=True):
            if value is not None:
                self._norms.note(states, i, value)

    @property
    def _ring(self) -> BufferRing:
        assert self._state_ring is not None
        return self._state_ring

    def _submit_read(self, states: UnitStates, buffer: Tensor) -> Future:
        assert self._states.file is not None
        unit = states.unit
        kind, num_bytes, (first, size) = "read_states", unit.update_read_bytes, states.update_range
        if self._reads_sums:
            kind, num_bytes, (first, size) = (
                "read_gradient",
                unit.accumulator_bytes,
                states.gradient_range,
            )
            if states.index not in self._had:  # it begins; the page before it is written with it
                num_bytes, size = 0, min(size, PAGE_BYTES)
        self._lanes.count(ssd_read_bytes=num_bytes)
        return self._states.file.submit_pread(
            buffer[first : first + size],
            states.offset + first,
            urgent=False,
            on_span=self._lanes.on_io(self._lanes.label(kind, unit.name), num_bytes),
        )

    def _read_ahead(self) -> None:
        """Start reading the next units' states into every free buffer.

        Runs when backward begins, and on an I/O thread whenever a write has freed a buffer.
        """
        with self._lock:
            while self._order and not self._asking:
                buffer = self._ring.try_acquire()
                if buffer is None:
                    return
                states = self._order[0]
                try:
                    read = self._submit_read(states, buffer)
                except BaseException:
                    self._ring.release(buffer)
                    raise
                self._order.popleft()
                self._reads[states.index] = (buffer, read)

    def _read_states(self, states: UnitStates) -> Tensor:
        with self._lock:
            found = self._reads.pop(states.index, None)
            if found is None and states in self._order:
                self._order.remove(states)
            self._asking = found is None
        if found is None:
            try:
                buffer = self._ring.acquire()
            finally:
                self._asking = False
            found = (buffer, self._submit_read(states, buffer))
            if self.schedule in PIPELINED:
                self._read_ahead()
        buffer, read = found
        error = read.exception()
        if error is not None:
            self._ring.release(buffer)
            raise error
        return buffer

    def _write_back(self, states: UnitStates, buffer: Tensor, fresh: Ticket | None) -> None:
        unit = states.unit
        label = self._lanes.label("write_states", unit.name)
        pages, num_bytes = (0, states.written_bytes), unit.update_write_bytes
        if states.host_copy is not None:
            num_bytes -= unit.compute_bytes
        self._write(states, buffer, pages, num_bytes, label, fresh)

    def _write(
        self,
        states: UnitStates,
        buffer: Tensor,
        pages: tuple[int, int],
        num_bytes: int,
        label: Label,
        fresh: Ticket | None,
    ) -> None:
        """Write `pages` (offset, bytes) of a unit, of which `num_bytes` count, and give the buffer
        back. Of the unit, what comes before these pages is not in the buffer."""
        file = self._states.file
        assert file is not None
        first, size = pages
        self._lanes.count(ssd_write_bytes=num_bytes)
        write = file.submit_pwrite(
            buffer[first : first + size],
            states.offset + first,
            urgent=False,
            on_span=self._lanes.on_io(label, num_bytes),
        )

        written = Ticket()

        def ended(write: Future) -> None:
            error = write.exception()
            if error is not None and self._states.park(states, buffer, first, error):
                error = None
            self._ring.release(buffer)
            for waited in (written, fresh) if fresh is not None else (written,):
                if error is None:
                    waited.finish()
                else:
                    waited.fail(error)
            if self.schedule in PIPELINED:
                with suppress(RuntimeError):  # the process ends: nothing is read any more
                    self._read_ahead()

        write.add_done_callback(ended)
        if self.schedule in PIPELINED:
            self._writes.append(written)
        else:
            written.synchronize()

    def _step(self, states: UnitStates, flats: Flats, given: _Given) -> None:
        self._begun.append(states.unit.name)
        slices = states.layout.slices
        optimizer = states.optimizer
        assert optimizer is not None
        masters = views_of(flats.master, slices)
        state = states.moments(flats)
        recorder = self._lanes.recorder
        on_device = states.tier == "device"
        totals = self._totals(states, flats, given)
        began_s = time.perf_counter()
        began = recorder.mark() if recorder and on_device else began_s
        if states.mixed:
            optimizer.step_mixed(
                masters,
                given.gradients,
                state,
                views_of(flats.compute, slices),
                sums=totals,
                hyperparameters=self._hyperparameters,
                clip=self._clip,
            )
        else:
            optimizer.step(
                masters,
                given.gradients,
                state,
                sums=totals,
                hyperparameters=self._hyperparameters,
                clip=self._clip,
            )
        self._ended.append(states.unit.name)
        if not on_device:
            self._lanes.update_s += time.perf_counter() - began_s
        if recorder is not None:
            ended = recorder.mark() if on_device else time.perf_counter()
            lane: Lane_ = "gpu" if on_device else "cpu"
            recorder.add(lane, self._lanes.label("update", states.unit.name), began, ended)

    def _totals(
        self, states: UnitStates, flats: Flats, given: _Given
    ) -> list[Tensor | None] | None:
        """The sums to which the gradients that came last are added; None if there are none."""
        if not any(given.sums):
            return None
        assert flats.gradient is not None
        totals = views_of(flats.gradient, states.layout.slices)
        return [t if has else None for t, has in zip(totals, given.sums, strict=True)]


def _close_all(rings: Sequence[BufferRing]) -> None:
    for ring in rings:
        ring.close()


def _there() -> Ticket:
    ticket = Ticket()
    ticket.finish()
    return ticket


def _own(gradient: Tensor) -> Tensor:
    """The gradient, in memory that nothing else reads: optimizers may overwrite it."""
    whole = gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
    return gradient if whole else gradient.clone()
