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
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from lohan_fx.errors import StepError
from lohan_fx.plan import PIPELINED, Schedule
from lohan_fx.runtime.arena import BufferRing
from lohan_fx.runtime.lanes import Lanes, RankedLane, Ticket
from lohan_fx.runtime.optimizer import Hyperparameters, snapshot_hyperparameters
from lohan_fx.runtime.states import Flats, ModelStates, UnitStates, on_device, views_of
from lohan_fx.timeline import Lane as Lane_

_STOPPED = "an earlier update of this step failed: no further one begins"


class Updater:
    """Runs the optimizer of every unit, once a step, in the order in which gradients arrive.

    Args:
        states: the model's states.
        lanes: transfers; gradients leave through its d2h lane.
        schedule: see the module.
        optimizer: the user's; hyperparameters are read when backward begins.
        gradient_rings: unit tier → ring of host buffers that receive gradients in turn.
        gradient_buffers: unit index → buffer of its own ("serial", and direct gradients).
        state_ring: host buffers for units on SSD.

    Attributes:
        pending: backward has begun and `finish` or `join` has not run.
        behind: `finish` has ended a step whose updates may still run; `join` has not run since.
        torn: units that were updated by a step that then failed.
        num_left: updates that the last `finish` left to run beside the next forward.
    """

    def __init__(
        self,
        states: ModelStates,
        lanes: Lanes,
        schedule: Schedule,
        optimizer: torch.optim.Optimizer,
        *,
        gradient_rings: dict[str, BufferRing],
        gradient_buffers: dict[int, Tensor],
        state_ring: BufferRing | None,
    ) -> None:
        self.schedule = schedule
        self.pending = False
        self.behind = False
        self.torn: tuple[str, ...] = ()
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
        self._reads: dict[int, tuple[Tensor, Future[None]]] = {}
        self._asking = False  # the update that runs wants a buffer: reading ahead would keep it
        self._writes: list[Ticket] = []
        self._arrivals: dict[int, Ticket] = {}
        self._updates: list[Ticket] = []
        self._held: list[tuple[UnitStates, list[Tensor | None], Ticket | None]] = []
        self._written: dict[int, dict[int, Tensor]] = {}
        self._lock = threading.Lock()
        self._hyperparameters: Hyperparameters = ()

    # -- called by the program -------------------------------------------------------------

    def begin(self, order: Sequence[int]) -> None:
        """Backward begins. `order` are the units in the order in which it emits gradients.

        Raises:
            the first error of an update of the step before.
        """
        self.join()
        self._rank = {index: -i for i, index in enumerate(order)}  # last out is needed first
        self._hyperparameters = snapshot_hyperparameters(self._optimizer)
        self.pending = True
        self._stopped = None
        on_ssd = [self._states.units[i] for i in order if self._states.units[i].on_ssd]
        self._order = deque(on_ssd)
        if self.schedule in PIPELINED and on_ssd:
            self._read_ahead()

    def emit(self, index: int, gradients: Sequence[Tensor | None]) -> None:
        """Take a unit's gradients: start their copy; on arrival the unit is updated."""
        states = self._states.units[index]
        if states.tier == "device":
            kept = [None if g is None else _own(g) for g in gradients]
            if self.schedule == "serial":
                self._held.append((states, kept, None))
            else:
                assert states.flats is not None
                self._step(states, states.flats, kept)
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
        label = self._lanes.label("emit_gradients", states.unit.name)
        arrival = self._arrivals[index] = self._lanes.to_host(pairs, label)
        self._arrived(states, views, arrival, None if own else buffer)

    def _arrived(
        self,
        states: UnitStates,
        views: list[Tensor | None],
        arrival: Ticket,
        borrowed: Tensor | None = None,
    ) -> None:
        """Update a unit when its gradients are there, or keep them for `join`."""
        if self.schedule == "serial":
            self._held.append((states, views, arrival))
            return

        fresh = Ticket() if self.schedule == "overlapped" else None

        def job() -> None:
            try:
                arrival.synchronize()
                if self._stopped is not None:
                    raise StepError(_STOPPED) from self._stopped
                self._update(states, views, fresh)
            except BaseException as error:
                if not self._begun:  # nothing has changed yet: let it stay so
                    self._stopped = self._stopped or error
                if fresh is not None:
                    fresh.fail(error)
                raise
            finally:
                if borrowed is not None:
                    self._rings[states.tier].release(borrowed)

        if fresh is None:
            self._updates.append(self._lane.submit(job))
            return
        self._fresh[states.index] = fresh
        # states are read ahead in the order of emission: another order would wait for a buffer that
        # a unit behind it holds
        rank = self._rank[states.index] if states.tier == "host" else None
        self._updates.append(self._lane.submit_ranked(job, rank, arrival, (fresh,)))

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
        """End the step, as optimizer.step() does: with schedule "overlapped" updates go on.

        Raises:
            as `join`.
        """
        if self.schedule == "overlapped":
            self.num_left = sum(not ticket.done() for ticket in self._updates)
            self.behind = self.behind or self.pending
        else:
            self.join()
        self.pending = False

    def join(self) -> None:
        """Finish the step: every unit updated, every byte written back.

        If the wait is interrupted (KeyboardInterrupt), what runs goes on, and the next `join`
        waits for it: the step is taken. With schedule "serial", units whose states could not be
        read are left as they were: a next `finish` takes them on.

        Raises:
            the first error of any update; later ones are lost with it.
        """
        began = time.perf_counter()
        error: BaseException | None = None
        try:
            for states, gradients, arrival in self._held:
                if arrival is None:
                    try:
                        self._update_once(states, gradients)
                    except Exception as failure:  # noqa: BLE001 - raised below
                        error = error or failure
                else:  # on the lane, where no interrupt strikes
                    job = partial(self._update_once, states, gradients, arrival)
                    self._updates.append(self._lane.submit(job))
            for tickets in (self._updates, self._writes):  # updates submit the writes
                for ticket in tickets:
                    ticket.settle()
                    error = error or ticket.error
        except BaseException:
            # the lane goes on; what this thread was updating itself does not
            here = [states.unit.name for states, _, arrival in self._held if arrival is None]
            if any(name in self._begun and name not in self._ended for name in here):
                self._tear()
            else:
                self.behind, self.pending = True, False
            raise
        finally:
            self._lanes.wait_s += time.perf_counter() - began
        left = [held for held in self._held if held[0].unit.name not in self._begun]
        if error is None:
            self._clear()
            return
        if left and len(self._begun) == len(self._ended):
            error.add_note(
                f"{len(left)} units did not take the step yet; their gradients are kept: call "
                "optimizer.step() again when the cause has gone"
            )
            self._held[:] = left
            self._updates.clear()
            self._writes.clear()
        else:
            self._tear()
        raise error

    def _update_once(
        self, states: UnitStates, gradients: list[Tensor | None], arrival: Ticket | None = None
    ) -> None:
        """Update a unit whose gradients were held back, unless an interrupted `join` did."""
        if states.unit.name in self._begun:
            return
        if arrival is None:
            assert states.flats is not None
            self._step(states, states.flats, gradients)
        else:
            arrival.synchronize()
            self._update(states, gradients)

    def _tear(self) -> None:
        """Give a failed step up; it leaves the model between two steps if units took it."""
        self.torn = self.torn or tuple(self._begun)
        self._clear()

    def abort(self) -> None:
        """Leave nothing running after a step that failed; its error is already on the way.

        If units were updated before, the model stands between two steps: see `torn`.
        """
        if not self.pending:  # a forward failed: the step before it ends as if it had not
            with suppress(BaseException):  # `torn` says it, and the error of forward is on its way
                self.join()
            return
        self._stopped = self._stopped or StepError(_STOPPED)
        with self._lock:
            self._order.clear()  # nothing more is read ahead
        self._lane.drain()
        for ticket in (*self._updates, *self._writes):
            ticket.settle()
        if self._states.file is not None:
            self._states.file.drain()
        for ring in self._all_rings:
            ring.reset()
        self._tear()

    def close(self) -> None:
        """Finish what is running and join the thread. Raises as `join`, when all has ended."""
        try:
            self.join()
        finally:
            self._lane.close()

    def _clear(self) -> None:
        self._begun.clear()
        self._ended.clear()
        self._held.clear()
        self._written.clear()
        self._updates.clear()
        self._writes.clear()
        self._arrivals.clear()
        self._reads.clear()
        self._order.clear()
        self._fresh.clear()
        self.pending = self.behind = False

    # -- on the optimizer's thread ----------------------------------------------------------

    def _update(
        self, states: UnitStates, gradients: list[Tensor | None], fresh: Ticket | None = None
    ) -> None:
        if not states.on_ssd:
            assert states.flats is not None
            self._step(states, states.flats, gradients)
            if fresh is not None:
                fresh.finish()
            return
        buffer = self._read_states(states)
        try:
            self._step(states, states.carve(buffer), gradients)
        except BaseException:
            self._ring.release(buffer)
            raise
        self._write_back(states, buffer, fresh)

    @property
    def _ring(self) -> BufferRing:
        assert self._state_ring is not None
        return self._state_ring

    def _submit_read(self, states: UnitStates, buffer: Tensor) -> Future[None]:
        assert self._states.file is not None
        first, size = states.update_range
        unit = states.unit
        self._lanes.count(ssd_read_bytes=unit.update_read_bytes)
        label = self._lanes.label("read_states", unit.name)
        return self._states.file.submit_pread(
            buffer[first : first + size],
            states.offset + first,
            urgent=False,
            on_span=self._lanes.on_io(label, unit.update_read_bytes),
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
        assert self._states.file is not None
        unit = states.unit
        size = unit.state_bytes + unit.compute_bytes
        self._lanes.count(ssd_write_bytes=size)
        write = self._states.file.submit_pwrite(
            buffer[: states.num_bytes],
            states.offset,
            urgent=False,
            on_span=self._lanes.on_io(self._lanes.label("write_states", unit.name), size),
        )

        written = Ticket()

        def ended(write: Future[None]) -> None:
            error = write.exception()
            if error is not None and self._states.park(states, buffer, error):
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

    def _step(self, states: UnitStates, flats: Flats, gradients: Sequence[Tensor | None]) -> None:
        self._begun.append(states.unit.name)
        slices = states.layout.slices
        optimizer = states.optimizer
        assert optimizer is not None
        masters = views_of(flats.master, slices)
        moments = {name: views_of(flat, slices) for name, flat in flats.moments.items()}
        state = [{name: views[i] for name, views in moments.items()} for i in range(len(slices))]
        recorder = self._lanes.recorder
        on_device = states.tier == "device"
        began_s = time.perf_counter()
        began = recorder.mark() if recorder and on_device else began_s
        if states.mixed:
            optimizer.step_mixed(
                masters,
                gradients,
                state,
                views_of(flats.compute, slices),
                hyperparameters=self._hyperparameters,
            )
        else:
            optimizer.step(masters, gradients, state, hyperparameters=self._hyperparameters)
        self._ended.append(states.unit.name)
        if not on_device:
            self._lanes.update_s += time.perf_counter() - began_s
        if recorder is not None:
            ended = recorder.mark() if on_device else time.perf_counter()
            lane: Lane_ = "gpu" if on_device else "cpu"
            recorder.add(lane, self._lanes.label("update", states.unit.name), began, ended)


def _close_all(rings: Sequence[BufferRing]) -> None:
    for ring in rings:
        ring.close()


def _own(gradient: Tensor) -> Tensor:
    """The gradient, in memory that nothing else reads: optimizers may overwrite it."""
    whole = gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
    return gradient if whole else gradient.clone()
