"""The host tier: one slab of host memory, its layout, and rings of staging buffers.

One slab, because pinning many small allocations is slow and rounds each up; page aligned, so
that the same bytes serve GPU copies and O_DIRECT. Regions start at multiples of `ALIGNMENT`
(4096 bytes).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import resource
import threading
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lohan_fx.errors import InsufficientMemoryError, StorageError, format_bytes
from lohan_fx.runtime._memory import (
    ALIGNMENT,
    inherit,
    map_anonymous,
    map_for_device,
    round_up,
    tensor_over,
    unmap,
)
from lohan_fx.runtime.waiting import Latch, start_thread

_MAX_TOUCH_THREADS = 16
_MIN_TOUCH_BYTES = 16 << 20  # less for one thread is not worth starting it
_MAX_TOUCH_BYTES = 256 << 20  # an interrupt waits for as much


@dataclass(frozen=True, slots=True)
class Region:
    """A named range of a slab. `offset` in bytes, a multiple of `ALIGNMENT`."""

    offset: int
    num_bytes: int
    name: str


class Layout:
    """Plans the regions of a slab before the slab is made.

    Regions lie in the order of their reservation, each padded to `ALIGNMENT` bytes.
    """

    def __init__(self) -> None:
        self._regions: dict[str, Region] = {}
        self._total_bytes = 0

    def reserve(self, num_bytes: int, name: str) -> Region:
        """Reserve `num_bytes`; ValueError for a negative size or a name already taken."""
        if num_bytes < 0:
            raise ValueError(f"num_bytes must not be negative: {num_bytes} for {name!r}")
        if name in self._regions:
            raise ValueError(f"a region is already called {name!r}")
        region = Region(self._total_bytes, num_bytes, name)
        self._regions[name] = region
        self._total_bytes += round_up(num_bytes)
        return region

    @property
    def total_bytes(self) -> int:
        """Size of the slab that holds all regions, in bytes, padding included."""
        return self._total_bytes

    def table(self) -> list[tuple[str, int, int]]:
        """Return a row (name, offset, num_bytes) for each region, by offset."""
        return [(region.name, region.offset, region.num_bytes) for region in self._regions.values()]


class PageLocker:
    """Pins host memory for GPU copies. Tests pass a subclass that needs no GPU.

    Attributes:
        warned: one of the arenas that share it has said that memory is not pinned.
    """

    warned: bool = False

    def available(self) -> bool:
        return torch.cuda.is_available()

    def lock(self, address: int, num_bytes: int) -> str:
        """Pin; return "" or the reason of a refusal."""
        portable = 1  # pinned for every CUDA context
        code = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, portable))
        if code == 0:
            return ""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")  # takes the error, or the next kernel would raise it
        return str(torch.cuda.CudaError(code))

    def unlock(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)


class Arena:
    """A slab of host memory, page aligned, zeroed, resident from the start.

    Views share the slab without a copy and keep its memory alive, also after `close`. No page is
    copied on write after a fork, as transfers by DMA demand: memory is shared with forked
    children or, if `register` pins, not there for them before `close` (`map_for_device`).

    Args:
        num_bytes: size in bytes, more than 0; rounded up to `ALIGNMENT`.
        pin: whether `register` pins. Without a GPU one warning says that it does not.
        available_bytes: host memory that may be taken, instead of what the system reports.
        locker: pins memory. Arenas that share one warn once together.

    Raises:
        InsufficientMemoryError: the slab is larger than the available memory of the machine or
            of the process's cgroup, or the system refuses the mapping.
    """

    def __init__(
        self,
        num_bytes: int,
        *,
        pin: bool,
        available_bytes: int | None = None,
        locker: PageLocker | None = None,
    ) -> None:
        if num_bytes <= 0:
            raise ValueError(f"a slab needs a positive number of bytes: {num_bytes}")
        self.num_bytes = round_up(num_bytes)
        self._locker = locker or PageLocker()
        self._pin = pin and self._locker.available()
        self._locked: dict[int, int] = {}  # offset to bytes
        have_bytes = available_host_bytes() if available_bytes is None else available_bytes
        if self.num_bytes > have_bytes:
            raise _insufficient(self.num_bytes, have_bytes)
        try:
            self._address = (map_for_device if self._pin else map_anonymous)(self.num_bytes)
        except OSError as error:
            raise _insufficient(self.num_bytes, have_bytes) from error
        self._pid = os.getpid()
        release = functools.partial(
            _release, self._locker, self._locked, self._address, self.num_bytes, self._pid
        )
        self._slab: torch.Tensor | None = tensor_over(self._address, self.num_bytes, release)
        _touch(self._slab)
        if pin and not self._pin:
            self._warn("there is no CUDA device")

    def view(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Return a uint8 view of `num_bytes` bytes at `offset`; ValueError if out of range."""
        return self._check(offset, num_bytes)[offset : offset + num_bytes]

    def typed(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous view of `dtype` and `shape` at byte `offset`.

        ValueError if it is out of range or `offset` is no multiple of the item size.
        """
        if offset % dtype.itemsize:
            raise ValueError(f"offset {offset} must be a multiple of {dtype.itemsize} for {dtype}")
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self.view(offset, num_bytes).view(dtype).view(tuple(shape))

    def register(self, offset: int, num_bytes: int) -> bool:
        """Pin a region for GPU copies and say whether it is pinned.

        A GPU copy must not span two registered regions: register what is copied as one piece.
        If the system refuses, one warning says so and the region stays pageable: copies work,
        but are slower and not asynchronous.

        ValueError if the region is out of range, overlaps a registered one, or `offset` is no
        multiple of `ALIGNMENT`. `num_bytes` is rounded up to it.
        """
        self._check(offset, num_bytes)
        if offset % ALIGNMENT:
            raise ValueError(f"offset {offset} must be a multiple of {ALIGNMENT}")
        num_bytes = round_up(num_bytes)
        for start, length in self._locked.items():
            if offset < start + length and start < offset + num_bytes:
                raise ValueError(
                    f"bytes {offset}..{offset + num_bytes} overlap the registered region "
                    f"{start}..{start + length}"
                )
        if not self._pin or num_bytes == 0:
            return False
        refusal = self._locker.lock(self._address + offset, num_bytes)
        if refusal:
            self._warn(
                f"{format_bytes(num_bytes)} were refused: {refusal}. The limit on locked memory "
                f"is {_locked_limit()} (ulimit -l): raise it, or give a smaller host budget"
            )
            return False
        self._locked[offset] = num_bytes
        return True

    def close(self) -> None:
        """Unpin all regions and let go of the slab. A second call does nothing.

        GPU copies must have ended. The memory goes back to the system with the last view.
        """
        _unlock(self._locker, self._locked, self._address, self._pid)
        if self._slab is not None and self._pin:
            inherit(self._address, self.num_bytes)
        self._slab = None

    def _check(self, offset: int, num_bytes: int) -> torch.Tensor:
        if self._slab is None:
            raise ValueError("the arena is closed")
        if offset < 0 or num_bytes < 0 or offset + num_bytes > self.num_bytes:
            raise ValueError(
                f"bytes {offset}..{offset + num_bytes} are not within the slab of "
                f"{self.num_bytes} bytes"
            )
        return self._slab

    def _warn(self, reason: str) -> None:
        if not self._locker.warned:
            self._locker.warned = True
            warnings.warn(
                f"host memory is not pinned, GPU copies will be slower: {reason}",
                RuntimeWarning,
                stacklevel=3,
            )


_CLOSED = (
    "the ring of staging buffers is closed: the compiled model was closed, or a thread of its was "
    "ended from outside"
)


class _Waiter:
    """A thread that waits for a buffer of a ring: none if the ring is closed."""

    __slots__ = ("address", "served")

    def __init__(self) -> None:
        self.served = Latch()
        self.address: int | None = None


class BufferRing:
    """Equal buffers in one region of an arena, lent to threads in the order of their asking.

    Each buffer starts at a multiple of `ALIGNMENT` and has `buffer_bytes` bytes, a multiple
    of it too, so whole buffers suit O_DIRECT.

    Raises:
        ValueError: the region has less than `ALIGNMENT` bytes for each buffer.
    """

    def __init__(self, arena: Arena, region: Region, num_buffers: int) -> None:
        if num_buffers < 1 or region.num_bytes < num_buffers * ALIGNMENT:
            raise ValueError(
                f"{region.name!r} of {region.num_bytes} bytes has no room for {num_buffers} "
                f"buffers of at least {ALIGNMENT} bytes"
            )
        self.buffer_bytes = region.num_bytes // num_buffers // ALIGNMENT * ALIGNMENT
        buffers = [
            arena.view(region.offset + index * self.buffer_bytes, self.buffer_bytes)
            for index in range(num_buffers)
        ]
        self._buffers = {buffer.data_ptr(): buffer for buffer in buffers}
        self._free = deque(self._buffers)
        self._waiting: deque[_Waiter] = deque()
        self._closed = False
        self._lock = threading.RLock()  # no Condition: see `runtime.waiting`

    def acquire(self) -> torch.Tensor:
        """Return a free buffer; wait for one, first come, first served.

        Raises:
            StorageError: the ring is closed, or is closed during the wait.
        """
        waiter = _Waiter()
        try:
            with self._lock:
                if self._closed:
                    raise StorageError(_CLOSED)
                self._waiting.append(waiter)
                self._serve()
            waiter.served.wait()
        except BaseException:  # an interrupt
            with self._lock:
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
                if waiter.address is not None:
                    self._free.append(waiter.address)
                self._serve()
            raise
        if waiter.address is None:
            raise StorageError(_CLOSED)
        return self._buffers[waiter.address]

    def _serve(self) -> None:
        """Give free buffers to those that wait. The lock is held."""
        while self._free and self._waiting:
            waiter = self._waiting.popleft()
            waiter.address = self._free.popleft()
            waiter.served.open()

    def try_acquire(self) -> torch.Tensor | None:
        """Return a free buffer at once, or None if there is none or others wait for one.

        Raises:
            StorageError: the ring is closed.
        """
        with self._lock:
            if self._closed:
                raise StorageError(_CLOSED)
            if not self._free or self._waiting:
                return None
            return self._buffers[self._free.popleft()]

    def release(self, buffer: torch.Tensor) -> None:
        """Give a buffer back; ValueError if it is not lent by this ring."""
        with self._lock:
            address = buffer.data_ptr()
            if address not in self._buffers or address in self._free:
                raise ValueError(f"no buffer at {address:#x} is lent by this ring")
            self._free.append(address)
            self._serve()

    def reset(self) -> None:
        """Take back every buffer: what an interrupted borrower did not release.

        Nothing may be using or waiting for one.
        """
        with self._lock:
            self._free = deque(self._buffers)
            self._waiting.clear()

    @contextlib.contextmanager
    def lend(self) -> Iterator[torch.Tensor]:
        """Acquire a buffer for the length of a `with` block."""
        buffer = self.acquire()
        try:
            yield buffer
        finally:
            self.release(buffer)

    def close(self) -> None:
        """Wake all waiters with an error. Lent buffers stay valid and may be released."""
        with self._lock:
            self._closed = True
            while self._waiting:
                self._waiting.popleft().served.open()


def available_host_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process can still take without swapping or being killed.

    The smallest of the machine's available memory and the headroom of each memory cgroup
    (v1 and v2) around the process; page cache that a cgroup can drop counts as free.
    """
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available_bytes = int(line.split()[1]) << 10  # given in KiB
            return min([available_bytes, *_cgroup_headrooms(proc, cgroups)])
    raise AssertionError("Linux has reported MemAvailable since 3.14")


def _cgroup_headrooms(proc: Path, cgroups: Path) -> Iterator[int]:
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = cgroups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = cgroups / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container the path may be the host's; then only the root exists.
        group = root / path.lstrip("/")
        for directory in (group, *group.parents):
            headroom = _headroom(directory, *names)
            if headroom is not None:
                yield headroom


def _headroom(directory: Path, limit: str, usage: str, droppable: str) -> int | None:
    """Return the bytes left in one cgroup, None if it has no limit."""
    try:
        limit_bytes = (directory / limit).read_text().strip()
        used_bytes = int((directory / usage).read_text())
        rows = (directory / "memory.stat").read_text().splitlines()
    except OSError:
        return None
    if limit_bytes == "max":
        return None
    stat = dict(row.split(maxsplit=1) for row in rows)
    return max(0, int(limit_bytes) - used_bytes + int(stat.get(droppable, 0)))


def _locked_limit() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)


def _insufficient(need_bytes: int, have_bytes: int) -> InsufficientMemoryError:
    return InsufficientMemoryError(
        "host",
        need_bytes,
        have_bytes,
        where="making the host slab",
        advice="give lohan_fx a smaller host budget or an SSD directory, or end other programs",
    )


def _touch(slab: torch.Tensor) -> None:
    """Write to every page, so that the page faults happen now, on several threads.

    Each holds what it writes to, so that the memory stays mapped under it, whatever becomes of
    this call.
    """
    num_threads = min(_MAX_TOUCH_THREADS, len(os.sched_getaffinity(0)))
    share = round_up(-(-slab.numel() // num_threads))
    pieces = deque(slab.split(min(max(share, _MIN_TOUCH_BYTES), _MAX_TOUCH_BYTES)))
    helped: list[Latch] = []
    try:
        with contextlib.suppress(RuntimeError):  # no more threads: slower, but it is the same
            for _ in range(min(num_threads, len(pieces)) - 1):
                ended = Latch()
                helper = threading.Thread(
                    target=_help_touch, args=(pieces, ended), name="lohan_fx-touch", daemon=True
                )
                start_thread(helper)
                helped.append(ended)
        _touch_pieces(pieces)
    finally:
        pieces.clear()  # if this is interrupted
        for ended in helped:
            ended.wait()


def _help_touch(pieces: deque[torch.Tensor], ended: Latch) -> None:
    try:
        _touch_pieces(pieces)
    finally:
        ended.open()


def _touch_pieces(pieces: deque[torch.Tensor]) -> None:
    """Write to pieces until none is left for this thread."""
    while True:
        try:
            piece = pieces.popleft()
        except IndexError:
            return
        ctypes.memset(piece.data_ptr(), 0, piece.numel())


def _unlock(locker: PageLocker, locked: dict[int, int], base: int, pid: int) -> None:
    while locked:
        offset, _ = locked.popitem()
        if os.getpid() == pid:  # a forked child has pinned nothing
            locker.unlock(base + offset)


def _release(
    locker: PageLocker, locked: dict[int, int], base: int, num_bytes: int, pid: int
) -> None:
    _unlock(locker, locked, base, pid)
    unmap(base, num_bytes)
