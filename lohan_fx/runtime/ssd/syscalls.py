"""The raw system calls on data files, and what their errors mean."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path

MAY_PASS = frozenset(
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
"""Errors after which the same call may succeed."""

_ADVICE = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some space there, or raise the quota",
    errno.EROFS: "the file system was remounted read-only, as after errors: see dmesg",
    errno.ENODEV: "the disk is gone: see dmesg, and whether it is still mounted",
    errno.ENXIO: "the disk is gone: see dmesg, and whether it is still mounted",
    errno.ESTALE: "the file or its server is gone: use a directory on a local file system",
}
_SEE = "see dmesg for errors of the disk; go on from a checkpoint, with another SSD directory"


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


def close_all(fds: list[int]) -> None:
    """Close descriptors, and leave the list empty.

    In one call of C, which no interrupt divides: none is closed twice, when its number may be
    another file's, and none is forgotten.
    """
    with contextlib.suppress(IndexError):  # there is none left
        deque(map(os.close, iter(fds.pop, None)), maxlen=0)


def advice(error: OSError | None = None) -> str:
    """What to do where a system call failed for good, or (None) a file ended too early."""
    return _SEE if error is None else _ADVICE.get(error.errno or 0, _SEE)
