"""Transfers between device, host and SSD, in lanes that run beside compute.

A lane is a thread that runs transfers in order of submission: d2h (offloads), h2d (reloads and
fetches). On CUDA each has a stream of its own; on a CPU device the same lanes copy memory. SSD
transfers pass through a ring of staging buffers, chunk by chunk, so that the copy of one chunk
overlaps the I/O of others and host memory stays bounded.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lohan_fx.errors import StorageError
from lohan_fx.runtime.arena import BufferRing
from lohan_fx.runtime.lane import Lane, Ticket
from lohan_fx.runtime.recording import Label, Recorder, Stamp
from lohan_fx.runtime.ssd import OnSpan, StripedFile
from lohan_fx.runtime.waiting import Future

_CHUNKS_AHEAD = 4
"""SSD reads of one transfer in flight while an earlier chunk is copied."""


def storage_of(tensor: Tensor) -> Tensor:
    """The whole storage behind a tensor as flat uint8, without a copy."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))


@dataclass
class Counters:
    """Bytes moved so far, by link. D2H and H2D count what crosses between device and host."""

    d2h_bytes: int = 0
    h2d_bytes: int = 0
    ssd_read_bytes: int = 0
    ssd_write_bytes: int = 0

    def minus(self, other: Counters) -> Counters:
        return Counters(
            self.d2h_bytes - other.d2h_bytes,
            self.h2d_bytes - other.h2d_bytes,
            self.ssd_read_bytes - other.ssd_read_bytes,
            self.ssd_write_bytes - other.ssd_write_bytes,
        )

    def copy(self) -> Counters:
        return self.minus(Counters())


class Lanes:
    """The lanes of one compiled model.

    Args:
        device: the compute device.
        staging: buffers for SSD transfers; None if nothing is on SSDs.

    Attributes:
        exposed_s: seconds that compute has waited for transfers (on a CPU device).
        wait_s, update_s: seconds that steps' ends have waited for updates, and of updates in host
            memory (`Updater` counts them here, as it may be replaced).
        stream: the one that compute runs on, while a half runs (`computing`).
        closed: `close` has begun.
        ended: it has ended, and no thread of theirs uses memory any more.
    """

    def __init__(self, device: torch.device, staging: BufferRing | None = None) -> None:
        self.device = device
        self.staging = staging
        self.counters = Counters()
        self.closed = False
        self.ended = False
        self.exposed_s = self.wait_s = self.update_s = 0.0
        self.recorder: Recorder | None = None
        self.stream: torch.cuda.Stream | None = None
        self._computed: torch.cuda.Stream | None = None
        self._count_lock = threading.Lock()
        self._cuda = device.type == "cuda"
        self.d2h = Lane("d2h", torch.cuda.Stream(device) if self._cuda else None)
        try:
            self.h2d = Lane("h2d", torch.cuda.Stream(device) if self._cuda else None)
        except BaseException:
            self.d2h.close()
            raise

    def count(self, **amounts: int) -> None:
        with self._count_lock:
            for name, amount in amounts.items():
                setattr(self.counters, name, getattr(self.counters, name) + amount)

    def label(self, kind: str, name: str) -> Label:
        """Name a transfer that is issued now."""
        return Label(kind, name, self.recorder.phase if self.recorder is not None else "forward")

    def mark(self) -> torch.cuda.Event | None:
        """An event at the present end of the compute stream (None on a CPU device)."""
        if not self._cuda:
            return None
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def settle(self) -> None:
        """Wait until the device has run what compute was given, with the copies it waits for: on
        the stream that is current here, and on the last one that ran a program."""
        reached = self.mark()
        if reached is not None:
            reached.synchronize()
        if self._computed is not None:
            self._computed.synchronize()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """What the calling thread runs inside is compute, on its current stream, which stays.

        torch looks up the current stream in Python, at every event and at each of the two changes
        of stream around a copy; with hundreds of transfers, the device waits for that.

        A context of the device is made current, too. torch's autograd runs backward on a thread of
        its own, which has none until its first call that needs one (for device 0 torch does not set
        the device, as it is the default). If that is a matrix product, as where backward begins
        with recomputing, cuBLAS finds no context, and torch warns. A query of the stream is the
        cheapest such call.
        """
        if not self._cuda:
            yield
            return
        stream = torch.cuda.current_stream(self.device)
        stream.query()
        self._computed = stream
        try:
            # on another device, changes of stream would change which device is current
            here = torch.cuda.current_device() == stream.device_index
            self.stream = stream if here else None
            yield
        finally:
            if self.stream is not None:
                self.stream = None
                torch.cuda.set_stream(stream)  # an interrupt may have struck in `_on`

    @contextmanager
    def _on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """As `torch.cuda.stream`."""
        compute = self.stream
        if compute is None:
            with torch.cuda.stream(stream):
                yield
            return
        torch.cuda.set_stream(stream)
        try:
            yield
        finally:
            torch.cuda.set_stream(compute)

    # -- host tier ---------------------------------------------------------------------------

    def to_host(self, pairs: Sequence[tuple[Tensor, Tensor]], label: Label) -> Ticket:
        """Copy (device source, host destination) pairs once compute has reached this point."""
        return self._copy(self.d2h, "d2h", list(pairs), label)

    def to_device(
        self, pairs: Sequence[tuple[Tensor, Tensor]], label: Label, after: Ticket | None = None
    ) -> Ticket:
        """Copy (host source, device destination) pairs once compute has reached this point and
        the sources are there (`after`)."""
        return self._copy(self.h2d, "h2d", list(pairs), label, after)

    def _copy(
        self,
        lane: Lane,
        link: Literal["d2h", "h2d"],
        pairs: list[tuple[Tensor, Tensor]],
        label: Label,
        after: Ticket | None = None,
    ) -> Ticket:
        size = sum(source.numel() * source.element_size() for source, _ in pairs)
        self.count(**{f"{link}_bytes": size})
        start = self.mark()
        stream = lane.stream
        recorder = self.recorder

        def copy() -> torch.cuda.Event | None:
            """Returns the event of the end, with timing, if that is recorded."""
            if stream is not None and start is not None:
                stream.wait_event(start)
            began = recorder.mark(stream) if recorder is not None else 0.0
            began_s = time.perf_counter()
            while pairs:
                source, destination = pairs.pop()
                destination.copy_(source, non_blocking=True)
            if stream is None:
                lane.busy_s += time.perf_counter() - began_s
            if recorder is None:
                return None
            ended = recorder.mark(stream)
            recorder.add(link, label, began, ended, size)
            return None if isinstance(ended, float) else ended

        if stream is not None and (after is None or after.done()):
            if after is not None:
                after.synchronize()  # raises if it failed
            ticket = Ticket()
            with self._on(stream):  # asynchronous already: no thread need queue it
                event = copy()
                timed = event is not None
                if event is None:
                    event = torch.cuda.Event()
                    event.record(stream)
            ticket.finish(event, timed=timed)
            return ticket

        def job() -> torch.cuda.Event | None:
            if after is not None:
                after.synchronize()
            return copy()

        return lane.submit(job)

    # -- SSD tier ----------------------------------------------------------------------------

    def to_ssd(
        self, source: Tensor, file: StripedFile, offset: int, label: Label
    ) -> tuple[Ticket, Ticket]:
        """Write flat device bytes to a file. Returns (source copied, bytes on the SSD)."""
        size = source.numel()
        self.count(d2h_bytes=size, ssd_write_bytes=size)
        start = self.mark()
        written = Ticket()
        held = [source]

        def job() -> None:
            writes: list[Future] = []
            try:
                self._write_chunks(held.pop(), file, offset, start, writes, label)
            except BaseException as error:
                _join(writes)
                written.fail(error)
                raise
            _when_all_done(writes, written)

        return self.d2h.submit(job, also=(written,)), written

    def _write_chunks(
        self,
        source: Tensor,
        file: StripedFile,
        offset: int,
        start: torch.cuda.Event | None,
        writes: list[Future],
        label: Label,
    ) -> None:
        assert self.staging is not None
        stream = self.d2h.stream
        if stream is not None and start is not None:
            stream.wait_event(start)
        step = self.staging.buffer_bytes
        for begin in range(0, source.numel(), step):
            chunk = source[begin : begin + step]
            buffer = self.staging.acquire()
            try:
                with self._recorded("d2h", label, chunk.numel()):
                    buffer[: chunk.numel()].copy_(chunk, non_blocking=True)
                if stream is not None:
                    stream.synchronize()
                write = file.submit_pwrite(
                    buffer[: chunk.numel()],
                    offset + begin,
                    on_span=self.on_io(label, chunk.numel()),
                )
            except BaseException:
                self.staging.release(buffer)
                raise
            write.add_done_callback(lambda _, b=buffer: self.staging.release(b))  # type: ignore[misc]
            writes.append(write)

    def from_ssd(
        self,
        file: StripedFile,
        offset: int,
        destination: Tensor,
        label: Label,
        after: Ticket | None = None,
        instead: Callable[[], Tensor | None] = lambda: None,
    ) -> Ticket:
        """Read flat device bytes from a file, once `after` (the write of them) has ended.

        `instead` is asked then, on the lane: the host bytes to take instead, if the write failed.
        """
        size = destination.numel()
        self.count(h2d_bytes=size, ssd_read_bytes=size)
        start = self.mark()
        held = [destination]

        def job() -> None:
            if after is not None:
                after.synchronize()
            elsewhere = instead()
            if elsewhere is not None:
                if self.h2d.stream is not None and start is not None:
                    self.h2d.stream.wait_event(start)
                held.pop().copy_(elsewhere)
                return
            self._read_chunks(held.pop(), file, offset, start, label)

        return self.h2d.submit(job)

    def _read_chunks(
        self,
        destination: Tensor,
        file: StripedFile,
        offset: int,
        start: torch.cuda.Event | None,
        label: Label,
    ) -> None:
        assert self.staging is not None
        stream = self.h2d.stream
        if stream is not None and start is not None:
            stream.wait_event(start)
        step = self.staging.buffer_bytes
        begins = deque(range(0, destination.numel(), step))
        reads: deque[tuple[int, Tensor, Future]] = deque()
        try:
            while begins or reads:
                while begins and len(reads) < _CHUNKS_AHEAD:
                    begin = begins[0]
                    # Only the first read may wait for a buffer: others would hold what it needs.
                    buffer = self.staging.acquire() if not reads else self.staging.try_acquire()
                    if buffer is None:
                        break
                    begins.popleft()
                    size = min(step, destination.numel() - begin)
                    try:
                        read = file.submit_pread(
                            buffer[:size], offset + begin, on_span=self.on_io(label, size)
                        )
                    except BaseException:
                        self.staging.release(buffer)
                        raise
                    reads.append((begin, buffer, read))
                begin, buffer, read = reads[0]
                read.result()
                size = min(step, destination.numel() - begin)
                with self._recorded("h2d", label, size):
                    destination[begin : begin + size].copy_(buffer[:size], non_blocking=True)
                if stream is not None:
                    stream.synchronize()
                reads.popleft()
                self.staging.release(buffer)
        finally:
            for _, buffer, read in reads:
                read.exception()
                self.staging.release(buffer)

    # -- recording ---------------------------------------------------------------------------

    def pause(self) -> torch.cuda.Event | float | None:
        """Compute pauses for an op of ours; None if that is not noted (CUDA, not recorded)."""
        if self.recorder is not None:
            return self.recorder.end_compute(self.stream)
        return None if self._cuda else time.perf_counter()

    def resume(
        self,
        began: torch.cuda.Event | float | None,
        label: Label,
        behind: Ticket | None = None,
        *,
        waits: bool = True,
    ) -> None:
        """Compute goes on; `label` names the time since `began`, as waiting or as work.

        Args:
            behind: all that compute has waited for: its own event, if timed, says until when, and
                the device takes no other.
        """
        if began is None:
            return
        if waits and isinstance(began, float):
            self.exposed_s += time.perf_counter() - began
        if self.recorder is None:
            return
        now: Stamp
        if behind is not None and behind.timed:
            assert not isinstance(began, float)
            assert behind.event is not None
            now = (began, behind.event)
        else:
            now = self.recorder.mark(self.stream)
        self.recorder.add("gpu", label, began, now)
        self.recorder.begin_compute(now)

    @contextmanager
    def _recorded(self, lane: Literal["d2h", "h2d"], label: Label, size: int) -> Iterator[None]:
        recorder = self.recorder
        began = recorder.mark() if recorder is not None else 0.0
        began_s = time.perf_counter()
        yield
        if not self._cuda:
            (self.d2h if lane == "d2h" else self.h2d).busy_s += time.perf_counter() - began_s
        if recorder is not None:
            recorder.add(lane, label, began, recorder.mark(), size)

    def on_io(self, label: Label, size: int) -> OnSpan | None:
        """For a transfer's `on_span`: leaves a span on the ssd lane while a step is recorded."""
        recorder = self.recorder
        if recorder is None:
            return None
        return lambda start, end: recorder.add("ssd", label, start, end, size)

    def drain(self) -> None:
        """Wait until no transfer is running."""
        self.d2h.drain()
        self.h2d.drain()

    def close(self, *, joins: bool = True) -> None:
        """Finish all transfers and join the threads. `joins` as for `Lane.close`."""
        self.closed = True
        if self.staging is not None:
            self.staging.close()
        self.d2h.close(joins=joins)
        self.h2d.close(joins=joins)
        self.ended = True


def _join(futures: Sequence[Future]) -> None:
    for future in futures:
        future.exception()


def _when_all_done(futures: list[Future], ticket: Ticket) -> None:
    """Signal the ticket when the last future ends; with the first error if there is one."""
    if not futures:
        ticket.finish()
        return
    lock = threading.Lock()
    left = [len(futures)]

    def ended(_: Future) -> None:
        try:
            with lock:
                left[0] -= 1
                last = left[0] == 0
            if last:
                errors = [e for f in futures if (e := f.exception()) is not None]
                if errors:
                    ticket.fail(errors[0])
                else:
                    ticket.finish()
                futures.clear()
        except BaseException as error:  # the thread is ended from outside
            ticket.fail(StorageError(f"cannot end a write to SSD: {error!r}"))
            raise

    for future in list(futures):
        future.add_done_callback(ended)
