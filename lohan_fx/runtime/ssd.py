"""The SSD tier: files striped over several directories, read and written with O_DIRECT.

A `RunDirectory` is the private place of one run in each of the user's SSD directories. A
`StripedFile` is a range of bytes dealt out over them in stripes. An `IoPool` is the threads
that move the bytes; system calls release the GIL.

All offsets are multiples of `ALIGNMENT` (4096 bytes), and so are all buffer addresses.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import heapq
import itertools
import math
import mmap
import os
import re
import tempfile
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import torch

from lohan_fx.errors import StorageError, format_bytes
from lohan_fx.runtime._memory import (
    ALIGNMENT,
    map_file_at,
    reserve_addresses,
    round_up,
    tensor_over,
    unmap,
)
from lohan_fx.runtime.waiting import Future

DEFAULT_STRIPE_BYTES = 1 << 20
MAX_IO_BYTES = 16 << 20
"""Bytes of one read or write system call at most."""

_MAX_SPANS = 1024  # IOV_MAX on Linux
_MAX_STALLS = 8  # consecutive system calls that end short of one sector
_RETRIES_S = (0.01, 0.1, 0.5)  # waits before a failed system call is made again
_MAY_PASS = frozenset(
    {
        errno.EAGAIN,
        errno.EBUSY,
        errno.EDQUOT,
        errno.EIO,
        errno.ENOBUFS,
        errno.ENOMEM,
        errno.ENOSPC,
        errno.EREMOTEIO,
        errno.ETIMEDOUT,
    }
)
_ADVICE = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some space there, or raise the quota",
    errno.EROFS: "the file system was remounted read-only, as after errors: see dmesg",
    errno.ENODEV: "the disk is gone: see dmesg, and whether it is still mounted",
    errno.ENXIO: "the disk is gone: see dmesg, and whether it is still mounted",
    errno.ESTALE: "the file or its server is gone: use a directory on a local file system",
}
_SEE = "see dmesg for errors of the disk; go on from a checkpoint, with another SSD directory"
_LOCK_NAME = "lohan_fx.lock"
_RUN_NAME = re.compile(r"lohan_fx-\d+-[a-z0-9_]{8}")


class Syscalls:
    """The raw system calls on data files. Tests pass a subclass that injects faults."""

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags, 0o600)

    def fallocate(self, fd: int, num_bytes: int) -> None:
        os.posix_fallocate(fd, 0, num_bytes)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size


# ---------------------------------------------------------------------------------------
# Directories


class RunDirectory:
    """The private directory of one run in each of the user's SSD directories.

    Each is called `lohan_fx-<pid>-<random>` and holds a lock file that is locked for the life
    of the run. Directories of dead runs (kill -9, power loss) are removed when a new run
    starts in the same place; those of live runs are never touched. A close, garbage
    collection and interpreter exit remove the directory; a forked child never does.

    Where the file system refuses O_DIRECT, one warning says so, and its files go through the
    page cache.

    Attributes:
        directories: one private directory for each given path, in their order.
        direct: for each directory, whether its file system takes O_DIRECT.

    Raises:
        StorageError: no path is given, one is given twice, is missing, is no directory, or
            cannot be written.
    """

    def __init__(self, paths: Sequence[str | Path], *, syscalls: Syscalls | None = None) -> None:
        owned: list[tuple[Path, int]] = []
        self._finalizer = weakref.finalize(self, _remove_run, os.getpid(), owned)
        direct: list[bool] = []
        for root in _checked_roots(paths):
            try:
                _remove_dead_runs(root)
                owned.append(_create_locked(root))
                direct.append(_takes_direct(owned[-1][0], syscalls or Syscalls()))
            except OSError as error:
                self.close()
                raise StorageError(
                    f"cannot use the SSD directory {root}: {error.strerror}; "
                    "give a directory on a local file system that this user may write to"
                ) from error
            if not direct[-1]:
                warnings.warn(
                    f"the file system of {root} refuses O_DIRECT (tmpfs?): reads and writes go "
                    "through the page cache and take host memory beyond the plan",
                    RuntimeWarning,
                    stacklevel=2,
                )
        self.directories = tuple(path for path, _ in owned)
        self.direct = tuple(direct)

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def close(self) -> None:
        """Remove the directories and all that is in them. A second call does nothing.

        Files that are still open keep their space until they are closed too.
        """
        self._finalizer()


def _checked_roots(paths: Sequence[str | Path]) -> list[Path]:
    if not paths:
        raise StorageError("no SSD directory is given: name at least one")
    roots: dict[tuple[int, int], Path] = {}
    for path in map(Path, paths):
        try:
            status = path.stat()
        except OSError as error:
            raise StorageError(
                f"cannot use the SSD directory {path}: {error.strerror}; create it, or correct "
                "the path"
            ) from error
        if not path.is_dir():
            raise StorageError(f"{path} is not a directory: give a directory on the SSD")
        identity = (status.st_dev, status.st_ino)
        if identity in roots:
            raise StorageError(
                f"the SSD directory {path} is given twice (also as {roots[identity]}): "
                "give each SSD once"
            )
        roots[identity] = path.resolve()
    return list(roots.values())


def _create_locked(root: Path) -> tuple[Path, int]:
    """Return a new directory in `root` and the descriptor of its lock, which is held.

    Another run that starts now may find the directory before its lock is held, and may take
    it for a dead run's. It then removes the lock file with the directory, which shows here as
    a missing directory, a lock held by someone else, or a lock file without a name: try again.
    """
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"lohan_fx-{os.getpid()}-", dir=root))
        try:
            lock = os.open(path / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_nlink:
                return path, lock
        except BlockingIOError:
            pass
        except OSError:
            _remove_directory(path)
            os.close(lock)
            raise
        os.close(lock)


def _remove_dead_runs(root: Path) -> None:
    with os.scandir(root) as entries:
        paths = [
            Path(entry.path)
            for entry in entries
            if _RUN_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        ]
    for path in paths:
        with contextlib.suppress(OSError):  # alive, another user's, or going away by itself
            _remove_if_dead(path)


def _remove_if_dead(path: Path) -> None:
    """Remove the directory of a dead run; OSError if it is alive or not ours to remove."""
    try:
        lock = os.open(path / _LOCK_NAME, os.O_RDWR)
    except FileNotFoundError:
        path.rmdir()  # without a lock only an empty one goes: its maker died, or will try again
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove_directory(path)
    finally:
        os.close(lock)


def _remove_directory(path: Path) -> None:
    """Remove a run's directory, its lock file last: a removal cut short can be resumed."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(path):
            if name != _LOCK_NAME:
                (path / name).unlink(missing_ok=True)
        (path / _LOCK_NAME).unlink(missing_ok=True)
        path.rmdir()


def _remove_run(owner_pid: int, owned: list[tuple[Path, int]]) -> None:
    if os.getpid() != owner_pid:
        return
    with contextlib.ExitStack() as stack:  # one failure does not keep the others
        for path, lock in owned:
            stack.callback(os.close, lock)
            stack.callback(_remove_directory, path)


def _takes_direct(directory: Path, syscalls: Syscalls) -> bool:
    """Write and read one sector with O_DIRECT: some file systems refuse only then."""
    probe = directory / "probe"
    os.close(syscalls.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL))
    try:
        fd = syscalls.open(probe, os.O_RDWR | os.O_DIRECT)
        try:
            with mmap.mmap(-1, ALIGNMENT) as page, memoryview(page) as view:
                syscalls.pwritev(fd, [view], 0)
                return syscalls.preadv(fd, [view], 0) == ALIGNMENT
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    finally:
        probe.unlink()


# ---------------------------------------------------------------------------------------
# Threads


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
        self._threads = [
            threading.Thread(target=self._queue.run, name=f"lohan_fx-io_{index}", daemon=True)
            for index in range(num_threads)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:
            self._queue.close()
            raise StorageError(
                f"cannot start {num_threads} threads for SSD transfers: {error}; raise the limit "
                "on processes (ulimit -u, or the container's pids limit), or end other programs"
            ) from error

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
        in_flight = set() if in_flight is None else in_flight
        batch = _Batch(tasks, on_span, in_flight)
        in_flight.add(batch.future)
        try:
            if not tasks:
                batch.end(0, None)
            elif os.getpid() != self._pid:  # a forked child has the queue, but none of its threads
                batch.end(len(tasks), StorageError(_CLOSED))
            elif not self._queue.put(batch, urgent):
                self._queue.cancel(batch, StorageError(_CLOSED))
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

    def close(self) -> None:
        """Finish what was submitted and join the threads. A second call does nothing."""
        self._finalizer()
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join()


_CLOSED = "the I/O threads are closed"
_ENDED = "a thread for SSD transfers was ended from outside: compile the model again"


class _Queue:
    """What the threads of a pool share. They hold it and not the pool, which may be collected."""

    def __init__(self, num_threads: int) -> None:
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

    def run(self) -> None:
        """The life of a thread. If it is ended from outside, nobody waits for what it leaves."""
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
        if self._on_span is not None and self._start_s < math.inf:
            self._on_span(self._start_s, time.perf_counter())
        self.future.finish(self._error)
        self._in_flight.discard(self.future)


# ---------------------------------------------------------------------------------------
# Files


class _Stripe(NamedTuple):
    """A run of bytes that lies in one file."""

    file: int
    file_offset: int
    offset: int  # in the logical range
    num_bytes: int


@dataclass(slots=True, kw_only=True)
class _Piece:
    """One system call: adjacent stripes of one file, and where they lie in the buffer."""

    file: int
    file_offset: int
    num_bytes: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)  # (buffer offset, bytes)


class StripedFile:
    """A range of bytes of fixed size, dealt out over a run's directories in stripes.

    Stripe k lies in directory k mod n. All space is reserved at once, so that a full disk is
    found here and not in the middle of a step.

    Buffers of transfers are contiguous 1-D uint8 tensors on the CPU whose address is a
    multiple of `ALIGNMENT` (4096 bytes), as regions of an `Arena` are. The offset in the file
    is a multiple of `ALIGNMENT` too. The length is free: a transfer is padded to whole sectors
    of `ALIGNMENT` bytes, in the file and in memory, so the buffer's *storage* must reach to
    the end of its last sector. A read overwrites that padding; a write stores it. Hence ranges
    that are written separately start at multiples of `ALIGNMENT`. ValueError says what breaks
    these rules.

    Short reads and writes are resumed where they ended. A call that fails with an error that may
    pass (EIO, ENOSPC, …) is made again, three times within a second; while a file has failed for
    good, once only. What cannot be completed raises StorageError with the path, the offset, the
    bytes wanted and got, and what to do. A file that has lost its end is never written to: the
    hole would read as zeros.

    Args:
        run: where the files lie; closing it removes them.
        name: unique in the run; no slash.
        num_bytes: size of the logical range in bytes, any number from 0.
        pool: the threads that transfer.
        stripe_bytes: a multiple of `ALIGNMENT`. Each stripe of a mapped file with several
            directories is a mapping of its own, and Linux allows 65,530 of them in a process
            (vm.max_map_count): give large files that are mapped larger stripes.
        syscalls: the raw system calls.

    Raises:
        StorageError: a file cannot be made or there is too little space (the message has the
            path, the need and the free space), or the run is closed.
        ValueError: an argument breaks the rules above.
    """

    def __init__(
        self,
        run: RunDirectory,
        name: str,
        num_bytes: int,
        pool: IoPool,
        *,
        stripe_bytes: int = DEFAULT_STRIPE_BYTES,
        syscalls: Syscalls | None = None,
    ) -> None:
        if num_bytes < 0:
            raise ValueError(f"num_bytes must not be negative: {num_bytes}")
        if stripe_bytes <= 0 or stripe_bytes % ALIGNMENT:
            raise ValueError(f"stripe_bytes must be a multiple of {ALIGNMENT}: {stripe_bytes}")
        if not name or "/" in name:
            raise ValueError(f"a file name must not be empty or contain a slash: {name!r}")
        if run.closed:
            raise StorageError(f"cannot create {name!r}: the run's SSD directories are closed")
        self.name = name
        self.num_bytes = num_bytes
        self._pool = pool
        self._syscalls = syscalls or Syscalls()
        self._run = run  # its directories live as long as their files
        self._padded_bytes = round_up(num_bytes)
        self._num_files = len(run.directories)
        self._stripe_bytes = stripe_bytes if self._num_files > 1 else max(self._padded_bytes, 1)
        self._lock = threading.Lock()
        self._in_flight: set[Future] = set()
        self._paths: list[Path] = []
        self._fds: list[int] = []
        self._sizes = self._file_sizes()
        self._failing = False
        self._finalizer = weakref.finalize(self, _remove_files, os.getpid(), self._paths, self._fds)
        for directory, direct, size in zip(run.directories, run.direct, self._sizes, strict=True):
            self._create(directory / f"{name}.stripes", size, direct)

    # -- transfers -------------------------------------------------------------------

    def pread(self, buffer: torch.Tensor, offset: int) -> None:
        """Read `buffer.numel()` bytes at `offset` into `buffer`; return when they are there."""
        self.submit_pread(buffer, offset).result()

    def pwrite(self, buffer: torch.Tensor, offset: int) -> None:
        """Write all of `buffer` at `offset`; return when the device has it."""
        self.submit_pwrite(buffer, offset).result()

    def pread_here(self, buffer: torch.Tensor, offset: int) -> None:
        """As `pread`, on the calling thread: for I/O threads, which must not wait for another."""
        self._check(buffer, offset)
        for piece in self._pieces(offset, round_up(buffer.numel())):
            self._transfer(self._read, buffer, piece)

    def submit_pread(
        self,
        buffer: torch.Tensor,
        offset: int,
        *,
        urgent: bool = True,
        on_span: OnSpan | None = None,
    ) -> Future:
        """Start `pread`. Leave `buffer` alone until the future has ended.

        `urgent` and `on_span` are those of `IoPool.submit`.
        """
        return self._submit(self._read, buffer, offset, urgent, on_span)

    def submit_pwrite(
        self,
        buffer: torch.Tensor,
        offset: int,
        *,
        urgent: bool = True,
        on_span: OnSpan | None = None,
    ) -> Future:
        """Start `pwrite`. Do not write to `buffer` until the future has ended.

        `urgent` and `on_span` are those of `IoPool.submit`.
        """
        return self._submit(self._write, buffer, offset, urgent, on_span)

    def _submit(
        self,
        call: Callable[[int, list[memoryview], int], int],
        buffer: torch.Tensor,
        offset: int,
        urgent: bool,
        on_span: OnSpan | None,
    ) -> Future:
        self._check(buffer, offset)
        tasks = [
            functools.partial(self._transfer, call, buffer, piece)
            for piece in self._pieces(offset, round_up(buffer.numel()))
        ]
        with self._lock:
            self._check_open()
            return self._pool.submit(
                tasks, urgent=urgent, on_span=on_span, in_flight=self._in_flight
            )

    def _read(self, fd: int, views: list[memoryview], offset: int) -> int:
        num_bytes = self._syscalls.preadv(fd, views, offset)
        self._pool.count(bytes_read=num_bytes)
        return num_bytes

    def _write(self, fd: int, views: list[memoryview], offset: int) -> int:
        num_bytes = self._syscalls.pwritev(fd, views, offset)
        self._pool.count(bytes_written=num_bytes)
        return num_bytes

    def _transfer(
        self,
        call: Callable[[int, list[memoryview], int], int],
        buffer: torch.Tensor,
        piece: _Piece,
    ) -> None:
        done = stalls = 0
        while done < piece.num_bytes:
            views = _views(buffer.data_ptr(), piece.spans, skip_bytes=done)
            error: OSError | None = None
            got = 0
            try:
                got = self._call(call, piece.file, views, piece.file_offset + done)
            except OSError as caught:
                error = caught
            # O_DIRECT goes on at a sector only: bytes of a part of a sector move again.
            sectors = got - got % ALIGNMENT
            stalls = 0 if sectors else stalls + 1
            if error is not None or stalls == _MAX_STALLS:
                reason = error.strerror if error is not None else "it went no further"
                advice = _ADVICE.get(error.errno or 0, _SEE) if error is not None else _SEE
                raise StorageError(
                    f"{'read' if call == self._read else 'write'} failed on "
                    f"{self._paths[piece.file]} at byte {piece.file_offset + done}: {reason} "
                    f"(want {piece.num_bytes} bytes from {piece.file_offset}, got {done + got}"
                    f"{self._lost(piece.file)}); {advice}"
                ) from error
            done += sectors

    def _call(
        self,
        call: Callable[[int, list[memoryview], int], int],
        file: int,
        views: list[memoryview],
        offset: int,
    ) -> int:
        """Make a system call, again where its error may pass."""
        waits = iter(() if self._failing else _RETRIES_S)
        while True:
            if call == self._write and self._lost(file):
                return 0
            try:
                got = call(self._fds[file], views, offset)
            except OSError as error:
                wait_s = next(waits, None) if error.errno in _MAY_PASS else None
                if wait_s is None:
                    self._failing = True  # what is queued behind must not wait as long again
                    raise
                self._pool.count(num_retries=1)
                time.sleep(wait_s)
            else:
                self._failing = False
                return got

    def _lost(self, file: int) -> str:
        """How much of itself a file has lost, as a clause; empty if nothing."""
        have, want = self._syscalls.size(self._fds[file]), self._sizes[file]
        return "" if have >= want else f"; the file was cut to {have} of its {want} bytes"

    def check(self) -> None:
        """See that the files are whole, for whoever is to read through the mapping next: the
        process would be killed (SIGBUS) where they are not.

        Raises:
            StorageError: one is not; the message names it.
        """
        self._check_open()
        for file, path in enumerate(self._paths):
            lost = self._lost(file)
            if lost:
                raise StorageError(f"cannot read {path}{lost}; {_SEE}")

    def drain(self) -> None:
        """Wait until no transfer is running, and what follows on each has been done; their errors
        are their own."""
        _wait(self._in_flight.copy())

    def _check(self, buffer: torch.Tensor, offset: int) -> None:
        num_bytes = buffer.numel()
        if (
            buffer.dtype != torch.uint8
            or buffer.device.type != "cpu"
            or buffer.dim() != 1
            or not buffer.is_contiguous()
        ):
            raise ValueError(
                "a transfer takes a contiguous 1-D uint8 tensor on the CPU, not "
                f"{buffer.dtype} {tuple(buffer.shape)} on {buffer.device}"
            )
        if offset % ALIGNMENT or buffer.data_ptr() % ALIGNMENT:
            raise ValueError(
                f"offset {offset} and address {buffer.data_ptr():#x} must be multiples of "
                f"{ALIGNMENT}"
            )
        if offset < 0 or offset + num_bytes > self.num_bytes:
            raise ValueError(
                f"bytes {offset}..{offset + num_bytes} are not within {self.name!r} "
                f"of {self.num_bytes} bytes"
            )
        room = buffer.untyped_storage().nbytes() - buffer.storage_offset()
        if num_bytes and room < round_up(num_bytes):
            raise ValueError(
                f"the buffer's storage ends {room} bytes after its start, before the end of its "
                f"last sector ({round_up(num_bytes)}): take buffers of whole sectors"
            )

    # -- mapping ---------------------------------------------------------------------

    def map(self) -> torch.Tensor:
        """Return the whole range as one writable uint8 tensor that is mapped, not read.

        The mapping is shared with other mappings and with transfers, and outlives `close`;
        it goes when the last view of the tensor is collected. After stores through it, call
        `flush` before a transfer reads them; what a transfer wrote is seen at once. Neither
        side may run while the other writes the same bytes.

        Raises:
            StorageError: the file is closed, or the system refuses a mapping.
        """
        self._check_open()
        if self.num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        try:
            base = reserve_addresses(self._padded_bytes)
            try:
                for stripe in self._stripes(0, self._padded_bytes):
                    fd = self._fds[stripe.file]
                    map_file_at(base + stripe.offset, stripe.num_bytes, fd, stripe.file_offset)
            except OSError:
                unmap(base, self._padded_bytes)
                raise
        except OSError as error:
            raise StorageError(
                f"cannot map {self.name!r} ({format_bytes(self.num_bytes)} in stripes of "
                f"{format_bytes(self._stripe_bytes)}): {error.strerror}; use larger stripes or "
                "raise vm.max_map_count"
            ) from error
        release = functools.partial(unmap, base, self._padded_bytes)
        return tensor_over(base, self._padded_bytes, release)[: self.num_bytes]

    def flush(self) -> None:
        """Write what was stored through `map` to the files, as msync does."""
        self._check_open()
        for fd, path, direct in zip(self._fds, self._paths, self._run.direct, strict=True):
            if not direct:
                continue  # transfers go through the same page cache as the mapping
            try:
                self._syscalls.fdatasync(fd)
            except OSError as error:
                advice = _ADVICE.get(error.errno or 0, _SEE)
                raise StorageError(f"cannot flush {path}: {error.strerror}; {advice}") from error

    # -- life ------------------------------------------------------------------------

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise StorageError(f"{self.name!r} is closed")

    def close(self) -> None:
        """Wait for transfers, then delete the files. A second call does nothing.

        Memory that `map` returned stays valid, and keeps its space on the disk.
        """
        with self._lock:
            finalizer = self._finalizer.detach()  # from here on `_submit` refuses
        _wait(self._in_flight.copy())
        if finalizer is not None:
            _remove_files(*finalizer[2])

    def _create(self, path: Path, num_bytes: int, direct: bool) -> None:
        """Make one file and reserve its space through the page cache, then open it to use.

        Where a file system cannot reserve, libc writes single bytes, which O_DIRECT refuses.
        """
        calls = self._syscalls
        try:
            self._fds.append(calls.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL))
            self._paths.append(path)
            if num_bytes:
                calls.fallocate(self._fds[-1], num_bytes)
            if direct:
                os.close(self._fds.pop())
                self._fds.append(calls.open(path, os.O_RDWR | os.O_DIRECT))
        except OSError as error:
            self.close()
            raise StorageError(
                f"cannot create {path}: {error.strerror}; need {format_bytes(num_bytes)} there "
                f"({format_bytes(self.num_bytes)} over {self._num_files} directories), have "
                f"{_free_space(path.parent)}; free some space, or give another SSD directory"
            ) from error

    # -- layout ----------------------------------------------------------------------

    def _file_sizes(self) -> list[int]:
        sizes = [0] * self._num_files
        for stripe in self._stripes(0, self._padded_bytes):
            sizes[stripe.file] += stripe.num_bytes
        return sizes

    def _stripes(self, offset: int, num_bytes: int) -> Iterator[_Stripe]:
        end = offset + num_bytes
        while offset < end:
            index, within = divmod(offset, self._stripe_bytes)
            length = min(self._stripe_bytes - within, end - offset)
            yield _Stripe(
                file=index % self._num_files,
                file_offset=index // self._num_files * self._stripe_bytes + within,
                offset=offset,
                num_bytes=length,
            )
            offset += length

    def _pieces(self, offset: int, num_bytes: int) -> list[_Piece]:
        """Cut a transfer into system calls, the directories taking turns."""
        queues: list[list[_Piece]] = [[] for _ in range(self._num_files)]
        for stripe in self._stripes(offset, num_bytes):
            queue = queues[stripe.file]
            for start in range(0, stripe.num_bytes, MAX_IO_BYTES):
                length = min(MAX_IO_BYTES, stripe.num_bytes - start)
                if (
                    not queue
                    or queue[-1].num_bytes + length > MAX_IO_BYTES
                    or len(queue[-1].spans) == _MAX_SPANS
                ):
                    queue.append(_Piece(file=stripe.file, file_offset=stripe.file_offset + start))
                queue[-1].spans.append((stripe.offset - offset + start, length))
                queue[-1].num_bytes += length
        turns = itertools.zip_longest(*queues)
        return [piece for turn in turns for piece in turn if piece is not None]


def _wait(futures: Iterable[Future]) -> None:
    for future in futures:
        future.settle()


def _remove_files(owner_pid: int, paths: list[Path], fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
    if os.getpid() == owner_pid:
        for path in paths:
            path.unlink(missing_ok=True)


def _free_space(directory: Path) -> str:
    try:
        usage = os.statvfs(directory)
    except OSError as error:
        return f"unknown space ({error.strerror})"
    return format_bytes(usage.f_bavail * usage.f_frsize)


def _views(address: int, spans: list[tuple[int, int]], *, skip_bytes: int) -> list[memoryview]:
    """Return writable views of `spans` of the memory at `address`, less the first bytes."""
    views = []
    for offset, num_bytes in spans:
        skipped = min(skip_bytes, num_bytes)
        skip_bytes -= skipped
        if skipped < num_bytes:
            array = ctypes.c_uint8 * (num_bytes - skipped)
            views.append(memoryview(array.from_address(address + offset + skipped)))
    return views
