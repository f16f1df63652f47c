"""The states of SSD units on their way through host memory: read ahead, written back."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress

from torch import Tensor

from lohan_fx.errors import StorageError
from lohan_fx.footprint import PAGE_BYTES
from lohan_fx.runtime.arena import BufferRing
from lohan_fx.runtime.lane import Ticket
from lohan_fx.runtime.lanes import Lanes
from lohan_fx.runtime.recording import Label
from lohan_fx.runtime.states import ModelStates
from lohan_fx.runtime.unit_states import UnitStates
from lohan_fx.runtime.waiting import Future


class StatePipeline:
    """Reads what updates and additions want of SSD units, and writes what they make of it.

    Args:
        states: the model's.
        lanes: for counts and labels.
        ring: host buffers; None if no unit is on SSD.
        ahead: read the next units' states into every free buffer, and go on while states are
            written; else one unit after another.

    Attributes:
        writes: those that may still run.
    """

    def __init__(
        self, states: ModelStates, lanes: Lanes, ring: BufferRing | None, *, ahead: bool
    ) -> None:
        self._states = states
        self._lanes = lanes
        self._buffers = ring
        self._ahead = ahead
        self.writes: list[Ticket] = []
        self._sums: Collection[int] | None = None  # those that there are; None: reads are of states
        self._order: deque[UnitStates] = deque()
        self._reads: dict[int, tuple[Tensor, Future]] = {}
        self._asking = False  # the update that runs wants a buffer: reading ahead would keep it
        self._lock = threading.Lock()

    def expect(self, sums: Collection[int] | None) -> None:
        """From here on units are read to be updated (None), or to be added to: `sums` are the units
        that have one."""
        self._sums = sums

    def begin(self, units: Sequence[UnitStates]) -> None:
        """Those of these units that are on SSD will be wanted in this order."""
        with self._lock:
            self._order = deque(s for s in units if s.on_ssd and s.index not in self._reads)
        if self._ahead and self._order:
            self._read_ahead()

    def stop(self) -> None:
        """Read nothing more ahead."""
        with self._lock:
            self._order.clear()

    def drain(self) -> None:
        """Read nothing more ahead, and wait for what is being moved."""
        self.stop()
        if self._states.file is not None:
            self._states.file.drain()

    def clear(self) -> None:
        """Forget what a step left behind."""
        self.writes.clear()
        self._reads.clear()
        self._order.clear()

    def read(self, states: UnitStates) -> Tensor:
        """Have a unit in a buffer, as far as it is wanted; to be written, or given back."""
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
            if self._ahead:
                self._read_ahead()
        buffer, read = found
        error = read.exception()
        if error is not None:
            self._ring.release(buffer)
            raise error
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        """A unit in a buffer will not be written."""
        self._ring.release(buffer)

    def write_states(self, states: UnitStates, buffer: Tensor, fresh: Ticket | None) -> None:
        """Write a unit that was updated; `fresh` is signalled when it is on the SSD."""
        unit = states.unit
        label = self._lanes.label("write_states", unit.name)
        pages, num_bytes = (0, states.written_bytes), unit.update_write_bytes
        if states.host_copy is not None:
            num_bytes -= unit.compute_bytes
        self._write(states, buffer, pages, num_bytes, label, fresh)

    def write_sums(self, states: UnitStates, buffer: Tensor) -> None:
        """Write a unit's sums."""
        label = self._lanes.label("write_gradient", states.unit.name)
        pages, num_bytes = states.gradient_range, states.unit.accumulator_bytes
        self._write(states, buffer, pages, num_bytes, label, None)

    @property
    def _ring(self) -> BufferRing:
        assert self._buffers is not None
        return self._buffers

    def _submit_read(self, states: UnitStates, buffer: Tensor) -> Future:
        assert self._states.file is not None
        unit = states.unit
        kind, num_bytes, (first, size) = "read_states", unit.update_read_bytes, states.update_range
        if self._sums is not None:
            kind, num_bytes, (first, size) = (
                "read_gradient",
                unit.accumulator_bytes,
                states.gradient_range,
            )
            if states.index not in self._sums:  # it begins; the page before it is written with it
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
            try:
                if error is not None and self._states.park(states, buffer, first, error):
                    error = None
                self._ring.release(buffer)
            except BaseException as failure:  # the thread is ended from outside
                error = error or StorageError(f"cannot end a write to SSD: {failure!r}")
                raise
            finally:
                for waited in (written, fresh) if fresh is not None else (written,):
                    if error is None:
                        waited.finish()
                    else:
                        waited.fail(error)
            if self._ahead:
                with suppress(RuntimeError):  # the process ends: nothing is read any more
                    self._read_ahead()

        write.add_done_callback(ended)
        if self._ahead:
            self.writes.append(written)
        else:
            written.synchronize()
