"""Waiting for other threads, so that an interrupt leaves no lock behind.

Python runs signal handlers on the main thread: when a function begins, when a call has returned,
when a loop jumps back; there, too, threads take turns, so that a busy machine keeps the main thread
for long just there. `threading.Condition`, and with it `Event`, `queue.Queue` and
`concurrent.futures.Future`, is written in Python. A handler that raises (Ctrl-C) when the call that
took its lock has returned, but before the ``with`` block has begun, leaves the lock taken, and so
does one that raises when its ``__exit__`` begins: the next thread that wants the lock waits for
ever. One that raises in ``notify``, when a waiter was woken and before it is forgotten, lets the
next ``notify`` wake nobody.

So what the main thread shares with others is guarded by ``with`` on a plain `Lock` or `RLock`,
which CPython enters and leaves without looking for signals (since 3.10, bpo-29988; 3.14 looks for
them again, python/cpython#148874); by operations of `deque`, `dict`, `set` and `SimpleQueue` that
are one call of C; and by what is here.
"""

from __future__ import annotations

import _thread
import logging
import threading
from collections import deque
from collections.abc import Callable

_log = logging.getLogger(__name__)


class Latch:
    """Closed until it is opened, once and for all. As `threading.Event`, but each waiter has a lock
    of its own, which nobody misses if it is interrupted."""

    __slots__ = ("_open", "_waiting")

    def __init__(self) -> None:
        self._open = False
        self._waiting: deque[threading.Lock] = deque()

    def open(self) -> None:
        self._open = True
        while True:
            try:
                waiter = self._waiting.popleft()
            except IndexError:
                return
            waiter.release()

    def is_open(self) -> bool:
        return self._open

    def wait(self, timeout: float = -1) -> bool:
        """Wait until it is open, or for `timeout` seconds (negative: for ever). Returns whether it
        is."""
        if not self._open:
            waiter = threading.Lock()
            waiter.acquire()
            self._waiting.append(waiter)
            if not self._open:  # else `open` may have looked for waiters before
                waiter.acquire(timeout=timeout)
        return self._open


class Future:
    """The end of something that runs on another thread. The part of `concurrent.futures.Future`
    that is needed here; it cannot be cancelled."""

    __slots__ = ("_callbacks", "_called_back", "_ended", "_error")

    def __init__(self) -> None:
        self._ended = Latch()
        self._called_back = Latch()
        self._error: BaseException | None = None
        self._callbacks: deque[Callable[[Future], object]] = deque()

    def finish(self, error: BaseException | None = None) -> None:
        """It has ended, or failed with an error. Runs the callbacks, all of them, also if this
        thread is ended from outside in one."""
        self._error = error
        try:
            self._ended.open()
            self._call_back()
        finally:
            self._called_back.open()

    def done(self) -> bool:
        return self._ended.is_open()

    def settle(self) -> None:
        """Wait until it has ended, failed or not, and its callbacks have run."""
        self._called_back.wait()

    def exception(self) -> BaseException | None:
        """Wait for the end; returns the error, if it failed."""
        self._ended.wait()
        return self._error

    def result(self, timeout: float = -1) -> None:
        """Wait for the end, at most `timeout` seconds (negative: for ever). Raises the error if it
        failed, TimeoutError if it has not ended."""
        if not self._ended.wait(timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error

    def add_done_callback(self, callback: Callable[[Future], object]) -> None:
        """Call it at the end, on the thread that ends this; at once if it has ended."""
        self._callbacks.append(callback)
        if self._ended.is_open():  # `finish` may have looked for callbacks before
            self._call_back()

    def _call_back(self) -> None:
        while True:
            try:
                callback = self._callbacks.popleft()
            except IndexError:
                return
            try:
                callback(self)
            except Exception:  # noqa: BLE001 - the others are called, too
                _log.exception("a callback at the end of a transfer failed")
            except BaseException:
                self._call_back()
                raise


def start_thread(thread: threading.Thread) -> None:
    """`Thread.start`, which waits for a `threading.Event` that the new thread sets: interrupted
    there, it may leave that thread waiting for ever. So another one starts it, where no interrupt
    strikes. If this call is interrupted, the thread starts nevertheless, or never did.

    Raises:
        RuntimeError: the system refuses a thread.
    """
    started = Future()

    def start() -> None:
        try:
            thread.start()
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            started.finish(error)
        else:
            started.finish()

    _thread.start_new_thread(start, ())
    started.result()
