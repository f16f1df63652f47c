"""The threads that move bytes between memory and SSDs, and their queue."""

from __future__ import annotations

import heapq
import itertools
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from lohan_fx.errors import StorageError
from lohan_fx.runtime.waiting import Future, Latch, start_thread

_CLOSED = "the I/O threads are closed"
_ENDED = "a thread for SSD transfers was ended from outside: compile the model again"


@dataclass(frozen=True, slots=True, kw_only=True)
class IoCounters:
    """What an `IoPool` has moved so far.

    Bytes are those that the system calls moved, padding to `ALIGNMENT` included;
    `busy_s` is the time, in seconds, during which at least one transfer was running, so that
    bytes / `busy_s` is the bandwidth that was reached. `num_retries` are system calls that were
    made again because they had failed.
    """

    bytes_read: int
    bytes_written: int
    num_retries: int
    busy_s: float


OnSpan = Callable[[float, float], None]
"""Gets the start and the end of a transfer, in seconds of `time.perf_counter`."""


class IoPool:
    """Threads for SSD transfers. `num_threads` bounds the system calls in flight.

    Urgent transfers go ahead of others that wait; within each kind first come, first served.
    So what compute waits for (activations, parameters) does not stand behind the model states
    of a whole unit. The threads end with `close`, with the pool, or with the process.

    Raises:
        StorageError: the system refuses a thread.
    """

    def __init__(self, num_threads: int) -> None:
        self._pid = os.getpid()
        self._queue = _Queue(num_threads)
        self._finalizer = weakref.finalize(self, self._queue.close)
        self._over = [Latch() for _ in range(num_threads)]
        self._threads = [
            threading.Thread(
                target=self._queue.run, args=(over,), name=f"lohan_fx-io_{index}", daemon=True
            )
            for index, over in enumerate(self._over)
        ]
        try:
            for thread in self._threads:
                start_thread(thread)
        except RuntimeError as error:
            self._queue.close()
            raise StorageError(
                f"cannot start {num_threads} threads for SSD transfers: {error}; raise the limit "
                "on processes (ulimit -u, or the container's pids limit), or end other programs"
            ) from error
        except BaseException:  # an interrupt
            self._queue.close()
            raise

    def submit(
        self,
        tasks: Sequence[Callable[[], None]],
        *,
        urgent: bool = True,
        on_span: OnSpan | None = None,
        in_flight: set[Future] | None = None,
    ) -> Future:
        """Run `tasks` in any order; the future ends after the last one, failed or not.

        So a buffer may be used again when the future has ended, whatever the outcome. The
        future raises the first exception; it cannot be cancelled. Do not wait for it on a
        thread of this pool. After `close`, and in a forked child, it raises StorageError.
        `on_span(start, end)` gets the seconds of `time.perf_counter` at which the first task
        began and the last one ended, before the future ends. `in_flight` has the future before
        any task begins, and until its callbacks have run: so what an interrupted call began is
        known, too.
        """
        if not tasks or os.getpid() != self._pid:  # a forked child has none of the threads
            future = Future()
            future.finish(StorageError(_CLOSED) if tasks else None)
            return future
        in_flight = set() if in_flight is None else in_flight
        batch = _Batch(tasks, on_span, in_flight)
        try:
            in_flight.add(batch.future)
            if not self._queue.put(batch, urgent):
                in_flight.discard(batch.future)
                batch.future.finish(StorageError(_CLOSED))
        except BaseException:  # an interrupt
            self._queue.cancel(batch, StorageError("the transfer was interrupted"))
            raise
        return batch.future

    def count(self, *, bytes_read: int = 0, bytes_written: int = 0, num_retries: int = 0) -> None:
        """Add to the counters."""
        self._queue.count(bytes_read, bytes_written, num_retries)

    @property
    def counters(self) -> IoCounters:
        return self._queue.counters()

    def close(self, *, joins: bool = True) -> None:
        """Finish what was submitted and join the threads. A second call does what an interrupted
        one left, or nothing.

        Args:
            joins: as for `runtime.lane.Lane.close`.
        """
        self._queue.close()
        for thread, over in zip(self._threads, self._over, strict=True):
            if thread.ident not in (None, threading.get_ident()) and os.getpid() == self._pid:
                over.wait()
                if joins:
                    thread.join()
        self._finalizer.detach()


class _Queue:
    """What the threads of a pool share. They hold it and not the pool, which may be collected."""

    def __init__(self, num_threads: int) -> None:
        self._pid = os.getpid()
        # no Condition: see `runtime.waiting`. Reentrant, as `close` may be called by the collector
        self._lock = threading.RLock()
        self._bell: SimpleQueue[None] = SimpleQueue()  # wakes one thread: there may be work
        self._num_threads = num_threads
        self._num_idle = 0  # those that wait for the bell, or have heard it just now
        self._batches: list[tuple[bool, int, _Batch]] = []
        self._count = itertools.count()
        self._closed = False
        self._bytes_read = 0
        self._bytes_written = 0
        self._num_retries = 0
        self._busy_s = 0.0
        self._num_running = 0
        self._busy_since = 0.0

    def put(self, batch: _Batch, urgent: bool) -> bool:
        """Queue all tasks of a batch, or none if the queue is closed."""
        with self._lock:
            if self._closed:
                return False
            wanted = min(len(batch.tasks), self._num_idle)
            heapq.heappush(self._batches, (not urgent, next(self._count), batch))
        self._wake(wanted)  # the others look for more before they wait
        return True

    def cancel(self, batch: _Batch, error: StorageError) -> None:
        """Run no further task of a batch, which may be queued or not."""
        with self._lock:
            num_left = len(batch.tasks)
            batch.tasks.clear()
        if num_left:
            batch.end(num_left, error)

    def close(self) -> None:
        """End the threads. In a forked child, which has none: nothing; the lock may be taken."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
        self._wake(self._num_threads)

    def _wake(self, num_threads: int) -> None:
        for _ in range(num_threads):
            self._bell.put(None)

    def count(self, bytes_read: int, bytes_written: int, num_retries: int) -> None:
        with self._lock:
            self._bytes_read += bytes_read
            self._bytes_written += bytes_written
            self._num_retries += num_retries

    def counters(self) -> IoCounters:
        with self._lock:
            running_s = time.perf_counter() - self._busy_since if self._num_running else 0.0
            return IoCounters(
                bytes_read=self._bytes_read,
                bytes_written=self._bytes_written,
                num_retries=self._num_retries,
                busy_s=self._busy_s + running_s,
            )

    def run(self, over: Latch) -> None:
        """The life of a thread, until `over`. If it is ended from outside, nobody waits for what it
        leaves."""
        try:
            while self._run_next():
                pass
        except BaseException:
            self.close()
            with self._lock:
                left, self._batches = self._batches, []
            for *_, batch in left:
                self.cancel(batch, StorageError(_ENDED))
            raise
        finally:
            over.open()

    def _run_next(self) -> bool:
        """Run the most urgent task; False when the queue is closed and empty."""
        with self._lock:
            while self._batches and not self._batches[0][2].tasks:
                heapq.heappop(self._batches)
            closed = self._closed
            found = self._batches[0][2] if self._batches else None
            if found is None:
                self._num_idle += 1
            else:
                task = found.tasks.popleft()
                now = time.perf_counter()
                if self._num_running == 0:
                    self._busy_since = now
                self._num_running += 1
        if found is None:
            if not closed:
                self._bell.get()
            with self._lock:
                self._num_idle -= 1
            return not closed
        error: BaseException | None = StorageError(_ENDED)
        try:
            found.begin(now)
            try:
                task()
                error = None
            except BaseException as caught:  # noqa: BLE001 - the future has it
                error = caught
            del task
            with self._lock:
                self._num_running -= 1
                if self._num_running == 0:
                    self._busy_s += time.perf_counter() - self._busy_since
        finally:
            found.end(1, error)
        return True


class _Batch:
    """A future over several tasks."""

    def __init__(
        self, tasks: Sequence[Callable[[], None]], on_span: OnSpan | None, in_flight: set[Future]
    ) -> None:
        self.future = Future()
        self._in_flight = in_flight
        self.tasks = deque(tasks)  # those that have not begun
        self._on_span = on_span
        self._start_s = math.inf
        self._lock = threading.Lock()
        self._num_left = len(tasks)
        self._error: BaseException | None = None

    def begin(self, now_s: float) -> None:
        with self._lock:
            self._start_s = min(self._start_s, now_s)

    def end(self, num_tasks: int, error: BaseException | None) -> None:
        with self._lock:
            self._num_left -= num_tasks
            if self._error is None:
                self._error = error
            if self._num_left:
                return
        try:
            if self._on_span is not None and self._start_s < math.inf:
                self._on_span(self._start_s, time.perf_counter())
        finally:  # whatever ends this thread, nobody waits for it
            try:
                self.future.finish(self._error)
            finally:
                self._in_flight.discard(self.future)
