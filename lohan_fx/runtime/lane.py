"""A lane: a thread that runs jobs in order, and a ticket for the end of each."""

from __future__ import annotations

import _thread
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

import torch

from lohan_fx._compat import traces
from lohan_fx.errors import LohanError, StepError
from lohan_fx.runtime.waiting import Latch, start_thread

_closing: dict[Latch, int] = {}
"""What `close_elsewhere` has begun, until it has ended, and in which process."""


def close_elsewhere(close: Callable[[], None]) -> None:
    """Run a finalizer, which may wait for threads, but must join none.

    Python collects garbage anywhere: on one of our threads, which would wait for itself; on one
    that traces, for which updates wait. So only the main thread closes at once, if it does not
    trace; otherwise a thread does that is made for it. `threading` may be collecting, too, with its
    locks held, which threads need to begin and to end: nobody waits for either. That takes two
    threads: a bare one, which needs no lock to begin, starts the one that exit waits for.
    """
    if threading.get_ident() == threading.main_thread().ident and not traces():
        close()
        return
    ended = Latch()

    def run() -> None:
        try:
            close()
        finally:
            end()

    def start() -> None:
        try:
            threading.Thread(target=run, name="lohan_fx-closer", daemon=False).start()
        except Exception:  # noqa: BLE001 - one more is refused, or Python ends: this one does it
            run()

    def end() -> None:
        _closing.pop(ended, None)
        ended.open()

    _closing[ended] = os.getpid()
    try:
        _thread.start_new_thread(start, ())
    except Exception:  # the system refuses a thread
        end()
        raise
    except BaseException:  # noqa: BLE001 - an interrupt comes when the call has returned
        pass  # the thread has begun, and what a finalizer raises is dropped


def wait_closed() -> None:
    """Wait for what `close_elsewhere` has begun, whose memory is about to be wanted again. Does
    nothing on a thread that traces."""
    for ended, pid in _closing.copy().items() if not traces() else ():
        if pid == os.getpid():  # a forked child has none of the threads
            ended.wait()


class Ticket:
    """The end of one transfer: `wait` for compute, `synchronize` for the host.

    A failed transfer raises at both. On CUDA the work may still be queued on the lane's stream
    when the ticket is signalled; `event` then marks its end, and also when, if it is `timed`.
    """

    __slots__ = ("_error", "_signal", "event", "timed")

    def __init__(self) -> None:
        self._signal = Latch()
        self._error: BaseException | None = None
        self.event: torch.cuda.Event | None = None
        self.timed = False

    def finish(self, event: torch.cuda.Event | None = None, *, timed: bool = False) -> None:
        self.event, self.timed = event, timed
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

    run: Callable[[], torch.cuda.Event | None]
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
        self,
        job: Callable[[], torch.cuda.Event | None],
        ticket: Ticket | None = None,
        also: Sequence[Ticket] = (),
    ) -> Ticket:
        """Queue a job. It may use `self.stream`; the ticket's event is recorded behind it.

        Args:
            job: returns the event of its end, with timing, if it has recorded one.
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
        elif self.stream is not None and os.getpid() == self._pid:
            self.stream.synchronize()  # copies that no thread queued

    def close(self, *, joins: bool = True) -> None:
        """Finish what was submitted and join the thread. A second call does nothing.

        Args:
            joins: not in finalizers. Without it the thread uses nothing of the lane's any more,
                but Python may be ending it still, for which it needs locks (`close_elsewhere`).
        """
        self._closed = True
        self._inbox.put(_Job(_nothing, Ticket(), None))  # wakes the thread
        if self._thread.ident != threading.get_ident() and os.getpid() == self._pid:
            self._over.wait()  # Thread.join, interrupted, takes the thread for ended
            if joins:
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
                event = run()
            timed = event is not None
            if event is None and self.stream is not None:
                event = torch.cuda.Event()
                event.record(self.stream)
        except BaseException as error:  # noqa: BLE001 - whoever waits for the ticket gets it
            del run
            ticket.fail(error)
        else:
            del run
            ticket.finish(event, timed=timed)
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
