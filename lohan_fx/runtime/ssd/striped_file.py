"""A range of bytes of fixed size in files of several directories."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path

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
from lohan_fx.runtime.ssd.io_pool import IoPool, OnSpan
from lohan_fx.runtime.ssd.run_directory import RunDirectory
from lohan_fx.runtime.ssd.striping import Piece, Striping
from lohan_fx.runtime.ssd.syscalls import MAY_PASS, Syscalls, advice, close_all
from lohan_fx.runtime.waiting import Future

DEFAULT_STRIPE_BYTES = 1 << 20
_MAX_STALLS = 8  # consecutive system calls that end short of one sector
_RETRIES_S = (0.01, 0.1, 0.5)  # waits before a failed system call is made again


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
        num_files = len(run.directories)
        self._striping = Striping(
            num_files=num_files,
            stripe_bytes=stripe_bytes if num_files > 1 else max(self._padded_bytes, 1),
        )
        self._lock = threading.Lock()
        self._in_flight: set[Future] = set()
        self._paths: list[Path] = []
        self._fds: list[int] = []
        self._sizes = self._striping.file_sizes(self._padded_bytes)
        self._failing = False
        self._pid = os.getpid()
        self._closed = False
        self._remove = functools.partial(_remove_files, self._pid, self._paths, self._fds)
        self._finalizer = weakref.finalize(self, self._remove)
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
        for piece in self._striping.pieces(offset, round_up(buffer.numel())):
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
            for piece in self._striping.pieces(offset, round_up(buffer.numel()))
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
        piece: Piece,
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
                raise StorageError(
                    f"{'read' if call == self._read else 'write'} failed on "
                    f"{self._paths[piece.file]} at byte {piece.file_offset + done}: {reason} "
                    f"(want {piece.num_bytes} bytes from {piece.file_offset}, got {done + got}"
                    f"{self._lost(piece.file)}); {advice(error)}"
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
                wait_s = next(waits, None) if error.errno in MAY_PASS else None
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
                raise StorageError(f"cannot read {path}{lost}; {advice()}")

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
                for stripe in self._striping.stripes(0, self._padded_bytes):
                    fd = self._fds[stripe.file]
                    map_file_at(base + stripe.offset, stripe.num_bytes, fd, stripe.file_offset)
            except OSError:
                unmap(base, self._padded_bytes)
                raise
        except OSError as error:
            raise StorageError(
                f"cannot map {self.name!r} ({format_bytes(self.num_bytes)} in stripes of "
                f"{format_bytes(self._striping.stripe_bytes)}): {error.strerror}; use larger "
                "stripes or raise vm.max_map_count"
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
                raise StorageError(
                    f"cannot flush {path}: {error.strerror}; {advice(error)}"
                ) from error

    # -- life ------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError(f"{self.name!r} is closed")

    def close(self) -> None:
        """Wait for transfers, then delete the files. A second call does what an interrupted one
        left, or nothing.

        Memory that `map` returned stays valid, and keeps its space on the disk.
        """
        if os.getpid() == self._pid:  # a forked child has no transfers, and the lock may be taken
            with self._lock:
                self._closed = True  # from here on `_submit` refuses
            _wait(self._in_flight.copy())
        self._closed = True
        self._remove()
        self._finalizer.detach()

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
                f"({format_bytes(self.num_bytes)} over {self._striping.num_files} directories), "
                f"have {_free_space(path.parent)}; free some space, or give another SSD directory"
            ) from error


def _wait(futures: Iterable[Future]) -> None:
    for future in futures:
        future.settle()


def _remove_files(owner_pid: int, paths: list[Path], fds: list[int]) -> None:
    """Close and delete. What is not done yet stays in the lists, for another call."""
    close_all(fds)
    while paths and os.getpid() == owner_pid:
        paths[-1].unlink(missing_ok=True)
        paths.pop()


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
