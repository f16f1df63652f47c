"""A clock, processes and FIFO servers: what the simulator is made of. No torch, no threads.

A process is a generator. It yields a time to sleep until, or a `Signal` to wait for; the clock
resumes it then. Everything that happens at one time happens in the order in which it was asked for,
so a run is the same every time.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

Process = Generator["Signal | float", None, None]


class Signal:
    """Something that happens once; processes may wait for it."""

    __slots__ = ("_calls", "_waiting", "done")

    def __init__(self, *, done: bool = False) -> None:
        self.done = done
        self._waiting: list[Process] = []
        self._calls: list[Callable[[], None]] = []

    def then(self, call: Callable[[], None]) -> None:
        """Call when it happens, before those who wait go on; now if it has happened."""
        if self.done:
            call()
        else:
            self._calls.append(call)


class Clock:
    """Time in seconds, and what is due at which time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.count = 0

    def at(self, time: float, call: Callable[..., None], *args: Any) -> None:
        self.count += 1
        heapq.heappush(self._due, (time, self.count, call, args))

    def start(self, process: Process) -> None:
        """Run a process to its next wait."""
        for target in process:
            if isinstance(target, Signal):
                if not target.done:
                    target._waiting.append(process)
                    return
            elif target > self.now:
                self.at(target, self.start, process)
                return

    def fire(self, signal: Signal) -> None:
        """It has happened: calls, then waiting processes in order of their arrival."""
        signal.done = True
        for call in signal._calls:
            call()
        for process in signal._waiting:
            self.start(process)

    def run(self) -> None:
        """Go on until nothing is due."""
        due = self._due
        while due:
            self.now, _, call, args = heapq.heappop(due)
            call(*args)


class Worker:
    """A thread: runs processes to their end, one after another.

    The next is the one of lowest rank among those that are ready; jobs of rank None run last and in
    order. If none is ready, the one that was submitted first (`runtime.lane.RankedLane`).
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._jobs: list[tuple[int | None, Signal | None, Process, Signal]] = []
        self._running = False

    def submit(self, job: Process, *, rank: int | None = 0, ready: Signal | None = None) -> Signal:
        """Queue a job; the signal is its end."""
        ended = Signal()
        self._jobs.append((rank, ready, job, ended))
        if not self._running:
            self._clock.start(self._run())
        return ended

    def _run(self) -> Process:
        self._running = True
        while self._jobs:
            _, _, job, ended = self._jobs.pop(self._choose())
            yield from job
            self._clock.fire(ended)
        self._running = False

    def _choose(self) -> int:
        best, best_rank, in_order = 0, math.inf, False
        found = False
        for k, (rank, ready, _, _) in enumerate(self._jobs):
            if rank is None:
                if in_order:
                    continue
                in_order = True
            value = math.inf if rank is None else rank
            if (not found or value < best_rank) and (ready is None or ready.done):
                best, best_rank, found = k, value, True
        return best


class Ring:
    """Equal buffers, lent in the order of asking (`runtime.arena.BufferRing`)."""

    def __init__(self, clock: Clock, count: int) -> None:
        self._clock = clock
        self._free = count
        self._waiting: deque[Signal] = deque()

    def acquire(self) -> Signal:
        """Ask for a buffer; it is the caller's when the signal is done."""
        if self.try_acquire():
            return Signal(done=True)
        self._waiting.append(Signal())
        return self._waiting[-1]

    def try_acquire(self) -> bool:
        """Take a buffer if one is free and nobody waits for it."""
        if not self._free or self._waiting:
            return False
        self._free -= 1
        return True

    def release(self) -> None:
        if self._waiting:
            self._clock.fire(self._waiting.popleft())
        else:
            self._free += 1


class _Job:
    __slots__ = ("ended", "label", "left_s", "num_bytes", "reported_bytes", "urgent", "work_s")

    def __init__(self, work_s: float, label: Any, num_bytes: int, urgent: bool) -> None:
        self.work_s = self.left_s = work_s
        self.label = label
        self.num_bytes = num_bytes
        self.reported_bytes = 0
        self.urgent = urgent
        self.ended = Signal()


OnSpan = Callable[[float, float, Any, int], None]
"""Told (start, end, the job's label, bytes) of each stretch in which a job was served."""


class Server:
    """Serves one job at a time, first come, first served: a link, or the SSDs.

    An urgent job goes before all that are not, and interrupts one that is not; so jobs that are
    not urgent stand for queues of small pieces.
    Two servers may be `couple`d: while both work, each runs at a share of its speed.
    """

    def __init__(self, clock: Clock, on_span: OnSpan) -> None:
        self._clock = clock
        self._on_span = on_span
        self._urgent: deque[_Job] = deque()
        self._later: deque[_Job] = deque()
        self._job: _Job | None = None
        self._started = self._since = 0.0
        self._version = 0
        self._partner: Server | None = None
        self._shared_speed = 1.0

    def couple(self, other: Server, shared_speed: float) -> None:
        """While both work, both run at `shared_speed`, 0 < speed < 1, of their own speeds."""
        self._partner, other._partner = other, self
        self._shared_speed = other._shared_speed = shared_speed

    def submit(self, work_s: float, label: Any, num_bytes: int, *, urgent: bool = True) -> Signal:
        """Queue a job of `work_s` seconds at full speed. The signal is its end."""
        job = _Job(work_s, label, num_bytes, urgent)
        (self._urgent if urgent else self._later).append(job)
        if self._job is None:
            self._next()
        elif urgent and not self._job.urgent:
            self._interrupt(self._job)
        return job.ended

    def _interrupt(self, job: _Job) -> None:
        self._progress()
        if job.left_s > 0:
            so_far = int(job.num_bytes * (1 - job.left_s / job.work_s))
            if self._clock.now > self._started:
                self._report(job, so_far)
            self._later.appendleft(job)
            self._next()

    def _report(self, job: _Job, so_far: int) -> None:
        num_bytes = so_far - job.reported_bytes
        self._on_span(self._started, self._clock.now, job.label, num_bytes)
        job.reported_bytes = so_far

    def _next(self) -> None:
        """Take the next job, or rest; a coupled partner speeds up or slows down."""
        was_busy = self._job is not None
        queue = self._urgent or self._later
        if self._partner is not None and was_busy != bool(queue):
            self._partner._progress()
        self._job = queue.popleft() if queue else None
        self._started = self._since = self._clock.now
        if self._partner is not None and was_busy != bool(self._job):
            self._partner._set_end()
        self._set_end()

    @property
    def _speed(self) -> float:
        shared = self._partner is not None and self._partner._job is not None
        return self._shared_speed if shared else 1.0

    def _progress(self) -> None:
        """Account for the work since the last change of speed."""
        now = self._clock.now
        if self._job is not None:
            self._job.left_s = max(0.0, self._job.left_s - (now - self._since) * self._speed)
        self._since = now

    def _set_end(self) -> None:
        self._version += 1
        job = self._job
        if job is not None:
            end = self._since + job.left_s / self._speed
            self._clock.at(end, self._finish, job, self._version)

    def _finish(self, job: _Job, version: int) -> None:
        if version == self._version:  # else its speed has changed since
            self._report(job, job.num_bytes)
            self._next()
            self._clock.fire(job.ended)
