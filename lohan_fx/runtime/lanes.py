"""Transfers between device, host and SSD, in lanes that run beside compute.

A lane is a thread that runs transfers in order of submission: d2h (offloads), h2d (reloads and
fetches). On CUDA each has a stream of its own; on a CPU device the same lanes copy memory. SSD
transfers pass through a ring of staging buffers, chunk by chunk, so that the copy of one chunk
overlaps the I/O of others and host memory stays bounded.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lohan_fx.errors import LohanError, StepError, StorageError
from lohan_fx.runtime.arena import BufferRing
from lohan_fx.runtime.recording import Label, Recorder
from lohan_fx.runtime.ssd import OnSpan, StripedFile
from lohan_fx.runtime.waiting import Future, Latch, start_thread

_CHUNKS_AHEAD = 4
"""SSD reads of one transfer in flight while an earlier chunk is copied."""


def close_elsewhere(close: Callable[[], None]) -> None:
    """Run a finalizer that joins threads.

    Python collects garbage on any thread, on one of ours, too, which would wait for itself. So only
    the main thread closes at once; others leave it to a thread that is made for it.
    """
    if threading.current_thread() is threading.main_thread():
        close()
    else:
        threading.Thread(target=close, name="lohan_fx-closer").start()


class Ticket:
    """The end of one transfer: `wait` for compute, `synchronize` for the host.

    A failed transfer raises at both. On CUDA the work may still be queued on the lane's stream
    when the ticket is signalled; `event` then marks its end.
    """

    __slots__ = ("_error", "_signal", "event")

    def __init__(self) -> None:
        self._signal = Latch()
        self._error: BaseException | None = None
        self.event: torch.cuda.Event | None = None

    def finish(self, event: torch.cuda.Event | None = None) -> None:
        self.event = event
        self._signal.open()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._signal.open()

    @property
    def error(self) -> BaseException | None:
        """Why the transfer failed, if it has ended and failed."""
        return self._error

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Make the compute stream (on a CPU device: the caller) wait for the transfer.

        Args:
            stream: the current one, if the caller knows it: to look it up takes longer than this.
        """
        self._signal.wait()
        if self._error is not None:
            raise self._error
        if self.event is not None:
            self.event.wait(stream)

    def synchronize(self) -> None:
        """Wait on the host until the bytes have arrived."""
        self._signal.wait()
        if self._error is not None:
            raise self._error
        if self.event is not None:
            self.event.synchronize()

    def ended(self) -> bool:
        """Whether the transfer was signalled; on CUDA it may be queued still."""
        return self._signal.is_open()

    def done(self) -> bool:
        """Whether the bytes have arrived, or never will."""
        if not self._signal.is_open():
            return False
        if self._error is not None or self.event is None:
            return True
        try:
            return bool(self.event.query())
        except RuntimeError:  # the device failed: whoever waits for the ticket raises it
            return True

    def settle(self) -> None:
        """Wait on the host until the transfer has ended, failed or not."""
        self._signal.wait()
        if self.event is not None:
            self.event.synchronize()


class _Job(NamedTuple):
    """`rank` and `ready` are those of `RankedLane`. `last`: after all that was submitted before.
    `lane`: whose it is, and that lives until it has run."""

    run: Callable[[], None]
    ticket: Ticket
    lane: Lane | None
    rank: int | None = 0
    ready: Ticket | None = None
    last: bool = False


class Lane:
    """One thread that runs jobs in order. A job's closure is gone before its ticket is signalled,
    so that the memory it held falls at a known point.

    The thread ends with `close`, when the lane is collected (an interrupt may keep its maker from
    having it), or with the process. Nobody waits for a lane that is gone: if its thread is ended
    from outside, all that was submitted fails, and `submit` raises; so it does in a forked child,
    which has no threads.

    An interrupted `submit` has submitted the job, or has not; the lane goes on (see
    `runtime.waiting`: submission is one call of C).

    Attributes:
        busy_s: seconds of copies so far; 0.0 on CUDA, where the host does not see them.

    Args:
        on_lost: called when the thread was ended from outside.

    Raises:
        LohanError: the system refuses a thread.
    """

    def __init__(
        self,
        name: str,
        stream: torch.cuda.Stream | None = None,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        self.stream = stream
        self._on_lost = on_lost
        self.busy_s = 0.0
        self._name = name
        self._inbox: SimpleQueue[_Job] = SimpleQueue()
        self._jobs: deque[_Job] = deque()  # the thread's own
        self._unsettled: dict[Ticket, Sequence[Ticket]] = {}  # what fails if no job signals it
        self._closed = False
        self._lost: BaseException | None = None
        self._over = Latch()  # the thread takes no job any more
        self._pid = os.getpid()
        self._thread = threading.Thread(
            target=_run,
            args=(self._inbox, self._jobs, weakref.ref(self)),
            name=f"lohan_fx-{name}",
            daemon=True,
        )
        wake = _Job(_nothing, Ticket(), None)
        weakref.finalize(self, self._inbox.put, wake).atexit = False
        try:
            start_thread(self._thread)
        except RuntimeError as error:
            raise LohanError(
                f"cannot start the {name} thread: {error}; raise the limit on processes "
                "(ulimit -u, or the container's pids limit), or end other programs"
            ) from error
        except BaseException:  # an interrupt; the thread may be about to begin
            self._closed = True
            self._inbox.put(wake)
            raise

    def submit(
        self, job: Callable[[], None], ticket: Ticket | None = None, also: Sequence[Ticket] = ()
    ) -> Ticket:
        """Queue a job. It may use `self.stream`; the ticket's event is recorded behind it.

        Args:
            also: tickets that the job is to signal; they fail if it can never run.

        Raises:
            StepError: the lane is closed, or its thread is gone.
        """
        return self._submit(_Job(job, ticket or Ticket(), self), also)

    def _submit(self, job: _Job, also: Sequence[Ticket] = ()) -> Ticket:
        if self._closed or self._gone():
            raise self._refusal() from self._lost
        self._unsettled[job.ticket] = also
        self._inbox.put(job)
        if self._over.is_open():  # the thread may not have seen it
            self._fail_all()
        return job.ticket

    def _gone(self) -> bool:
        # not Thread.is_alive: interrupted, it takes a running thread for one that has ended
        return self._lost is not None or os.getpid() != self._pid

    def _refusal(self) -> StepError:
        if self._closed and self._lost is None:
            return StepError(f"the {self._name} lane is closed: the compiled model was closed")
        return StepError(
            f"the {self._name} thread is gone ({self._lost or 'it does not survive a fork'}): "
            "call model.lohan.close(), load model and optimizer from a checkpoint, and compile "
            "again"
        )

    def drain(self) -> None:
        """Wait until everything that was submitted has ended, failed or not."""
        if self._closed:
            self.close()
        elif not self._gone():
            self._submit(_Job(_nothing, Ticket(), self, last=True)).settle()

    def close(self) -> None:
        """Finish what was submitted and join the thread. A second call does nothing."""
        self._closed = True
        self._inbox.put(_Job(_nothing, Ticket(), None))  # wakes the thread
        if self._thread is not threading.current_thread() and os.getpid() == self._pid:
            self._over.wait()  # Thread.join, interrupted, takes the thread for ended
            self._thread.join()
            if self.stream is not None:  # copies that no thread queued, from memory that now goes
                with suppress(RuntimeError):  # the device failed: whoever uses it gets the error
                    self.stream.synchronize()

    # -- on the thread ----------------------------------------------------------------------

    def _end(self, lost: BaseException | None) -> None:
        """The thread ends; `lost`: from outside."""
        self._lost = lost
        self._over.open()
        self._fail_all()
        if lost is not None and self._on_lost is not None:
            self._on_lost()

    def _fail_all(self) -> None:
        """Fail what no job will signal. On several threads at once, each ticket is one's."""
        while True:
            try:
                ticket, also = self._unsettled.popitem()
            except KeyError:
                return
            for failed in (ticket, *also):
                if not failed.ended():
                    failed.fail(self._refusal())

    def _run_all(self) -> bool:
        """Run what has been submitted; False when the lane is closed."""
        while True:
            closed = self._closed  # looked at first: nothing is submitted later
            if not self._receive():
                return not closed
            self._run_next()

    def _run_next(self) -> None:
        """Run one job; there is one."""
        run, ticket = self._take()[:2]
        try:
            with self._context():
                run()
            event = None
            if self.stream is not None:
                event = torch.cuda.Event()
                event.record(self.stream)
        except BaseException as error:  # noqa: BLE001 - whoever waits for the ticket gets it
            del run
            ticket.fail(error)
        else:
            del run
            ticket.finish(event)
        self._unsettled.pop(ticket, None)

    def _receive(self) -> bool:
        """Take over what has been submitted; says whether there is a job."""
        while True:
            try:
                self._jobs.append(self._inbox.get_nowait())
            except Empty:
                return bool(self._jobs)

    def _take(self) -> _Job:
        """The next job; there is one."""
        return self._jobs.popleft()

    def _context(self) -> AbstractContextManager[object]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


def _run(inbox: SimpleQueue[_Job], jobs: deque[_Job], lane: weakref.ref[Lane]) -> None:
    """The life of a lane's thread. Without a job it does not hold the lane, which may be
    collected then."""
    lost: BaseException | None = None
    try:
        while True:
            jobs.append(inbox.get())
            alive = lane()
            if alive is None or not alive._run_all():
                return
            del alive
    except BaseException as error:
        lost = error
        raise
    finally:
        alive = lane()
        if alive is not None:
            alive._end(lost)


class RankedLane(Lane):
    """A lane that runs, among the jobs whose input has arrived, the one of lowest rank.

    If no input has arrived, the job that was submitted first runs and waits for its own. Jobs of
    rank None run in the order of submission among themselves, after those with a rank. Jobs
    submitted without one are always ready and of rank 0. Jobs of one rank whose inputs arrive in
    the order of submission run in that order.
    """

    def submit_ranked(
        self,
        job: Callable[[], None],
        rank: int | None,
        ready: Ticket,
        also: Sequence[Ticket] = (),
    ) -> Ticket:
        """Queue a job that waits for `ready` itself. `also` as for `submit`."""
        return self._submit(_Job(job, Ticket(), self, rank, ready), also)

    def _take(self) -> _Job:
        best = 0
        best_rank = math.inf
        jobs = list(self._jobs)
        in_order = next((k for k, job in enumerate(jobs) if job.rank is None), None)
        # from the last on: an earlier job's input, looked at later, is there if a later one's was
        for k in reversed(range(len(jobs))):
            rank, ready = jobs[k].rank, jobs[k].ready
            if (rank is None and k != in_order) or (jobs[k].last and k > 0):
                continue
            value = math.inf if rank is None else rank
            if value <= best_rank and (ready is None or ready.done()):
                best, best_rank = k, value
        del self._jobs[best]
        return jobs[best]


def _nothing() -> None:
    pass


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
        joined: it has ended, and no thread of theirs runs.
    """

    def __init__(self, device: torch.device, staging: BufferRing | None = None) -> None:
        self.device = device
        self.staging = staging
        self.counters = Counters()
        self.closed = False
        self.joined = False
        self.exposed_s = self.wait_s = self.update_s = 0.0
        self.recorder: Recorder | None = None
        self.stream: torch.cuda.Stream | None = None
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

        def copy() -> None:
            if stream is not None and start is not None:
                stream.wait_event(start)
            began = recorder.mark() if recorder is not None else 0.0
            began_s = time.perf_counter()
            while pairs:
                source, destination = pairs.pop()
                destination.copy_(source, non_blocking=True)
            if stream is None:
                lane.busy_s += time.perf_counter() - began_s
            if recorder is not None:
                recorder.add(link, label, began, recorder.mark(), size)

        if stream is not None and (after is None or after.done()):
            if after is not None:
                after.synchronize()  # raises if it failed
            ticket = Ticket()
            with self._on(stream):  # asynchronous already: no thread need queue it
                copy()
                event = torch.cuda.Event()
                event.record(stream)
            ticket.finish(event)
            return ticket

        def job() -> None:
            if after is not None:
                after.synchronize()
            copy()

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

    def close(self) -> None:
        """Finish all transfers and join the threads."""
        self.closed = True
        if self.staging is not None:
            self.staging.close()
        self.d2h.close()
        self.h2d.close()
        self.joined = True


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
