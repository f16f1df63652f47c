"""Private directories of one run: locked for its life, and removed when it is over."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import mmap
import os
import re
import tempfile
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path

from lohan_fx.errors import StorageError
from lohan_fx.runtime._memory import ALIGNMENT
from lohan_fx.runtime.ssd.syscalls import Syscalls, close_all

_LOCK_NAME = "lohan_fx.lock"
_RUN_NAME = re.compile(r"lohan_fx-\d+-[a-z0-9_]{8}")


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
        closed: `close` has begun.

    Raises:
        StorageError: no path is given, one is given twice, is missing, is no directory, or
            cannot be written.
    """

    def __init__(self, paths: Sequence[str | Path], *, syscalls: Syscalls | None = None) -> None:
        self.closed = False
        owned: list[Path] = []
        locks: list[int] = []
        self._remove = functools.partial(_remove_run, os.getpid(), owned, locks)
        self._finalizer = weakref.finalize(self, self._remove)
        direct: list[bool] = []
        for root in _checked_roots(paths):
            try:
                _remove_dead_runs(root)
                path, lock = _create_locked(root)
                owned.append(path)
                locks.append(lock)
                direct.append(_takes_direct(path, syscalls or Syscalls()))
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
        self.directories = tuple(owned)
        self.direct = tuple(direct)

    def close(self) -> None:
        """Remove the directories and all that is in them. A second call does what an interrupted
        one left, or nothing.

        Files that are still open keep their space until they are closed too.
        """
        self.closed = True
        self._remove()
        self._finalizer.detach()


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


def _remove_run(owner_pid: int, paths: list[Path], locks: list[int]) -> None:
    """Remove a run's directories, then unlock them. May be called again, until it has succeeded."""
    if os.getpid() != owner_pid:
        return
    with contextlib.ExitStack() as stack:  # one failure does not keep the others
        stack.callback(close_all, locks)
        for path in paths:
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
