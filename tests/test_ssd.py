"""The SSD tier: run directories, striped files, mappings, I/O threads."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import itertools
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lohan_fx
from lohan_fx.errors import StorageError
from lohan_fx.runtime._memory import ALIGNMENT, map_file_at, round_up
from lohan_fx.runtime.arena import Arena
from lohan_fx.runtime.ssd import (
    IoPool,
    RunDirectory,
    StripedFile,
    Syscalls,
    run_directory,
    striped_file,
)
from lohan_fx.runtime.waiting import Future
from tests.faults import interrupted

SECTOR = ALIGNMENT
MIB = 1 << 20


@pytest.fixture(scope="module")
def pool() -> Iterator[IoPool]:
    with closing(IoPool(4)) as pool:
        yield pool


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    with closing(Arena(40 * MIB, pin=False)) as arena:
        yield arena


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, RunDirectory]]:
    """Runs over one, two and three directories."""
    runs = {
        num: RunDirectory([tmp_path_factory.mktemp(f"ssd{num}_{index}") for index in range(num)])
        for num in (1, 2, 3)
    }
    yield runs
    for run in runs.values():
        run.close()


@pytest.fixture
def buffer(arena: Arena) -> torch.Tensor:
    """16 sectors of a pattern in which no two sectors are equal."""
    buffer = arena.view(0, 16 * SECTOR)
    fill(buffer, seed=1)
    return buffer


def fill(tensor: torch.Tensor, *, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensor.copy_(torch.randint(256, tensor.shape, dtype=torch.uint8, generator=generator))


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def is_mapped(directory: Path) -> bool:
    return str(directory) in Path("/proc/self/maps").read_text()


class NoDirect(Syscalls):
    """A file system that refuses O_DIRECT when a file is opened."""

    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().open(path, flags)


class ShortCounts(Syscalls):
    """Calls that end early, after each of the given numbers of bytes in turn."""

    def __init__(self, limits: Sequence[int]) -> None:
        self._limits = list(limits)
        self._lock = threading.Lock()

    def _cut(self, views: Sequence[memoryview]) -> tuple[list[memoryview], int | None]:
        """Return the whole sectors below the limit, and the count to report."""
        with self._lock:
            limit = self._limits.pop() if self._limits else None
        if limit is None or limit >= sum(map(len, views)):
            return list(views), None
        kept, left = [], limit - limit % SECTOR
        for view in views:
            kept.append(view[:left])
            left -= len(kept[-1])
        return [view for view in kept if len(view)], limit

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        views, count = self._cut(buffers)
        moved = super().preadv(fd, views, offset) if views else 0
        return moved if count is None else count

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        views, count = self._cut(buffers)
        moved = super().pwritev(fd, views, offset) if views else 0
        return moved if count is None else count


class Recorder(Syscalls):
    """Records (file offset, bytes, number of views) of each write."""

    def __init__(self) -> None:
        self.writes: list[tuple[int, int, int]] = []

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.writes.append((offset, sum(map(len, buffers)), len(buffers)))
        return super().pwritev(fd, buffers, offset)


class Failing(Syscalls):
    """Calls that raise: after `after` successful ones, with `code`."""

    def __init__(self, code: int, *, after: int = 0) -> None:
        self._error = OSError(code, os.strerror(code))
        self._after = after

    def _fail(self) -> None:
        if self._after == 0:
            raise self._error
        self._after -= 1

    def fallocate(self, fd: int, num_bytes: int) -> None:
        self._fail()
        super().fallocate(fd, num_bytes)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._fail()
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._fail()
        return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        self._fail()


class FailingTransfers(Failing):
    """As `Failing`, but space can be reserved."""

    def fallocate(self, fd: int, num_bytes: int) -> None:
        Syscalls.fallocate(self, fd, num_bytes)


# -- transfers ---------------------------------------------------------------------------


@given(data=st.data(), num_files=st.integers(1, 3), stripe=st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_any_size_round_trips(
    runs: dict[int, RunDirectory],
    pool: IoPool,
    arena: Arena,
    data: st.DataObject,
    num_files: int,
    stripe: int,
) -> None:
    num_bytes = data.draw(st.integers(0, 12 * SECTOR), label="num_bytes")
    shorts = data.draw(st.lists(st.integers(1, 4 * SECTOR), max_size=6), label="short counts")
    padded = round_up(num_bytes)
    source, target = arena.view(0, padded), arena.view(MIB, padded)
    expected = torch.zeros(padded, dtype=torch.uint8)
    file = StripedFile(
        runs[num_files],
        "file",
        num_bytes,
        pool,
        stripe_bytes=stripe * SECTOR,
        syscalls=ShortCounts(shorts),
    )
    with closing(file):
        for seed in range(data.draw(st.integers(1, 3), label="writes")):
            start = SECTOR * data.draw(st.integers(0, num_bytes // SECTOR), label="start")
            length = data.draw(st.integers(0, num_bytes - start), label="length")
            fill(source, seed=seed)
            file.pwrite(source[:length], start)
            expected[start : start + round_up(length)] = source[: round_up(length)]
        target.fill_(0xAA)
        file.pread(target[:num_bytes], 0)
    assert torch.equal(target, expected)


def test_one_directory_gets_few_large_transfers(
    runs: dict[int, RunDirectory], pool: IoPool, arena: Arena
) -> None:
    recorder = Recorder()
    buffer = arena.view(0, 33 * MIB)
    numbers = buffer.view(torch.int32)
    torch.arange(numbers.numel(), dtype=torch.int32, out=numbers)
    with closing(StripedFile(runs[1], "file", 33 * MIB, pool, syscalls=recorder)) as file:
        file.pwrite(buffer, 0)
        buffer.zero_()
        file.pread(buffer, 0)
    assert torch.equal(numbers, torch.arange(numbers.numel(), dtype=torch.int32))
    assert sorted(recorder.writes) == [
        (0, 16 * MIB, 1),
        (16 * MIB, 16 * MIB, 1),
        (32 * MIB, MIB, 1),
    ]


def test_adjacent_stripes_of_a_directory_are_one_transfer(
    runs: dict[int, RunDirectory], pool: IoPool, arena: Arena
) -> None:
    recorder = Recorder()
    with closing(StripedFile(runs[2], "file", 6 * MIB, pool, syscalls=recorder)) as file:
        file.pwrite(arena.view(0, 4 * MIB), MIB)
    assert sorted(recorder.writes) == [(0, 2 * MIB, 2), (MIB, 2 * MIB, 2)]


def test_a_transfer_needs_at_most_1024_views_a_call(
    runs: dict[int, RunDirectory], pool: IoPool, arena: Arena
) -> None:
    recorder = Recorder()
    num_bytes = 2050 * SECTOR
    source, target = arena.view(0, num_bytes), arena.view(20 * MIB, num_bytes)
    fill(source, seed=3)
    file = StripedFile(runs[2], "file", num_bytes, pool, stripe_bytes=SECTOR, syscalls=recorder)
    with closing(file):
        file.pwrite(source, 0)
        file.pread(target, 0)
    assert torch.equal(source, target)
    assert sorted(views for _, _, views in recorder.writes) == [1, 1, 1024, 1024]


def test_directories_are_read_at_the_same_time(
    runs: dict[int, RunDirectory], pool: IoPool, buffer: torch.Tensor
) -> None:
    class Meeting(Syscalls):
        barrier = threading.Barrier(3)

        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            self.barrier.wait(timeout=10)
            return super().preadv(fd, buffers, offset)

    file = StripedFile(runs[3], "file", 3 * SECTOR, pool, stripe_bytes=SECTOR, syscalls=Meeting())
    with closing(file):
        file.pread(buffer[: 3 * SECTOR], 0)
    assert not buffer[: 3 * SECTOR].any()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("call", ["pread", "pwrite"])
def test_a_failed_transfer_says_what_failed(
    runs: dict[int, RunDirectory], pool: IoPool, buffer: torch.Tensor, call: str, code: int
) -> None:
    file = StripedFile(runs[1], "file", 10 * SECTOR, pool, syscalls=FailingTransfers(code))
    path = runs[1].directories[0] / "file.stripes"
    with closing(file), pytest.raises(StorageError) as caught:
        getattr(file, call)(buffer[: 2 * SECTOR], SECTOR)
    message = str(caught.value)
    assert f"{call[1:]} failed on {path} at byte {SECTOR}: {os.strerror(code)}" in message
    assert f"want {2 * SECTOR} bytes from {SECTOR}, got 0" in message
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == code


def test_short_counts_are_resumed_as_long_as_they_lead_on(
    runs: dict[int, RunDirectory], pool: IoPool, buffer: torch.Tensor
) -> None:
    shorts = ShortCounts([SECTOR, 100, 3, SECTOR + 1, 4000] * 8)
    target = buffer[8 * SECTOR :]
    file = StripedFile(runs[2], "f", 8 * SECTOR, pool, stripe_bytes=SECTOR, syscalls=shorts)
    with closing(file):
        file.pwrite(buffer[: 8 * SECTOR], 0)
        file.pread(target, 0)
    assert torch.equal(target, buffer[: 8 * SECTOR])


@pytest.mark.parametrize("count", [0, 100])
def test_a_transfer_that_goes_no_further_ends(
    runs: dict[int, RunDirectory], pool: IoPool, buffer: torch.Tensor, count: int
) -> None:
    stuck = ShortCounts([count] * 100 + [SECTOR])
    with closing(StripedFile(runs[1], "file", 3 * SECTOR, pool, syscalls=stuck)) as file:
        expected = f"at byte {SECTOR}: .* got {SECTOR + count}"
        with pytest.raises(StorageError, match=expected):
            file.pread(buffer[: 3 * SECTOR], 0)


def test_a_file_that_lost_its_end_is_found_out(
    runs: dict[int, RunDirectory], pool: IoPool, buffer: torch.Tensor
) -> None:
    with closing(StripedFile(runs[1], "file", 4 * SECTOR, pool)) as file:
        os.truncate(runs[1].directories[0] / "file.stripes", SECTOR)
        with pytest.raises(StorageError, match=f"want {4 * SECTOR} bytes from 0, got {SECTOR}"):
            file.pread(buffer[: 4 * SECTOR], 0)


def unaligned_storage() -> torch.Tensor:
    """A page-aligned buffer whose storage ends within a sector."""
    return torch.frombuffer(mmap.mmap(-1, 2 * SECTOR), dtype=torch.uint8, count=SECTOR + 1)


@pytest.mark.parametrize(
    ("make", "offset", "message"),
    [
        (lambda b: b[:10], 1, "offset 1 and address"),
        (lambda b: b[1:10], 0, "must be multiples of 4096"),
        (lambda b: b[: 2 * SECTOR], 3 * SECTOR, "are not within 'file' of 16384 bytes"),
        (lambda b: b[:10], -SECTOR, "are not within"),
        (lambda b: b[:SECTOR].view(torch.float32), 0, "uint8 tensor on the CPU, not torch.float32"),
        (lambda b: b[:SECTOR].view(2, -1), 0, "1-D"),
        (lambda b: b[:SECTOR:2], 0, "contiguous"),
        (lambda b: unaligned_storage(), 0, "storage ends 4097 bytes after its start"),
    ],
)
def test_a_buffer_that_breaks_the_rules_is_refused(
    runs: dict[int, RunDirectory],
    pool: IoPool,
    buffer: torch.Tensor,
    make: object,
    offset: int,
    message: str,
) -> None:
    assert callable(make)
    file = StripedFile(runs[1], "file", 4 * SECTOR, pool)
    with closing(file), pytest.raises(ValueError, match=message):
        file.pread(make(buffer), offset)


@pytest.mark.parametrize("arguments", [{"num_bytes": -1}, {"stripe_bytes": 1000}, {"name": "a/b"}])
def test_a_file_that_breaks_the_rules_is_refused(
    runs: dict[int, RunDirectory], pool: IoPool, arguments: dict[str, int]
) -> None:
    whole = {"run": runs[1], "name": "file", "num_bytes": 1, "pool": pool} | arguments
    with pytest.raises(ValueError, match=str(next(iter(arguments.values())))):
        StripedFile(**whole)  # type: ignore[arg-type]


# -- space and names ---------------------------------------------------------------------


def test_space_is_reserved_at_once(runs: dict[int, RunDirectory], pool: IoPool) -> None:
    with closing(StripedFile(runs[2], "file", 3 * MIB + 1, pool)):
        sizes = [os.stat(path / "file.stripes") for path in runs[2].directories]
        assert [size.st_size for size in sizes] == [2 * MIB, MIB + SECTOR]
        assert all(size.st_blocks * 512 >= size.st_size for size in sizes)
    assert not any(list(path.glob("file*")) for path in runs[2].directories)


def test_a_full_disk_is_found_before_the_first_step(
    runs: dict[int, RunDirectory], pool: IoPool
) -> None:
    fds = open_fds()
    full = Failing(errno.ENOSPC, after=1)
    with pytest.raises(StorageError) as caught:
        StripedFile(runs[2], "file", 4 * MIB, pool, syscalls=full)
    message = str(caught.value)
    assert f"cannot create {runs[2].directories[1] / 'file.stripes'}: No space left" in message
    assert "need 2.00 MiB there (4.00 MiB over 2 directories), have " in message
    assert isinstance(caught.value.__cause__, OSError)
    assert not any(list(path.glob("file*")) for path in runs[2].directories)
    assert open_fds() == fds


def test_a_name_is_used_once_at_a_time(
    runs: dict[int, RunDirectory], pool: IoPool, buffer: torch.Tensor
) -> None:
    with closing(StripedFile(runs[1], "file", SECTOR, pool)) as file:
        file.pwrite(buffer[:SECTOR], 0)
        with pytest.raises(StorageError, match=r"file\.stripes: File exists"):
            StripedFile(runs[1], "file", SECTOR, pool)
        target = buffer[SECTOR : 2 * SECTOR]
        file.pread(target, 0)
        assert torch.equal(target, buffer[:SECTOR])
    StripedFile(runs[1], "file", SECTOR, pool).close()


# -- threads and life --------------------------------------------------------------------


def test_counters_count_whole_sectors(runs: dict[int, RunDirectory], buffer: torch.Tensor) -> None:
    with closing(IoPool(2)) as pool, closing(StripedFile(runs[2], "f", 10000, pool)) as file:
        file.pwrite(buffer[:10000], 0)
        file.pread(buffer[:100], 0)
        file.pread(buffer[:0], 0)
        assert pool.counters.bytes_written == 3 * SECTOR
        assert pool.counters.bytes_read == SECTOR
        assert pool.counters.busy_s > 0


def test_a_future_ends_after_its_last_task() -> None:
    started, go = threading.Event(), threading.Event()

    def fail() -> None:
        raise KeyError("first")

    def hold() -> None:
        started.set()
        assert go.wait(10)

    with closing(IoPool(1)) as pool:
        future = pool.submit([fail, hold])
        assert started.wait(10)
        assert not future.done()
        go.set()
        with pytest.raises(KeyError, match="first"):
            future.result()


def test_close_waits_for_transfers(
    runs: dict[int, RunDirectory],
    pool: IoPool,
    buffer: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closing_now = threading.Event()

    class Held(Syscalls):
        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            assert closing_now.wait(10)
            return super().pwritev(fd, buffers, offset)

    wait = striped_file._wait

    def let_go(futures: Iterable[Future]) -> None:
        closing_now.set()
        wait(futures)

    monkeypatch.setattr(striped_file, "_wait", let_go)
    file = StripedFile(runs[1], "file", SECTOR, pool, syscalls=Held())
    future = file.submit_pwrite(buffer[:SECTOR], 0)
    file.close()
    assert future.done()
    assert future.exception() is None
    for use in (lambda: file.pread(buffer[:1], 0), file.map, file.flush):
        with pytest.raises(StorageError, match="'file' is closed"):
            use()
    file.close()


def test_a_file_whose_close_was_interrupted_is_closed(
    runs: dict[int, RunDirectory],
    pool: IoPool,
    buffer: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is transferred any more; a second call waits, and removes what is there."""
    fds = open_fds()
    file = StripedFile(runs[2], "file", 2 * SECTOR, pool)
    file.submit_pwrite(buffer[:SECTOR], 0)

    def interrupt(_: Iterable[Future]) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(striped_file, "_wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            file.close()
    with pytest.raises(StorageError, match="'file' is closed"):
        file.pwrite(buffer[:SECTOR], 0)
    file.close()
    assert open_fds() == fds
    with closing(StripedFile(runs[2], "file", SECTOR, pool)) as other:
        file.close()  # it has nothing to do with that one
        other.check()
        assert all(path.exists() for path in other._paths)


@pytest.mark.parametrize("what", ["pool", "file", "run"])
def test_an_interrupted_close_is_called_again(what: str, tmp_path: Path) -> None:
    """Wherever it was interrupted, the second call leaves nothing."""
    fds, threads = open_fds(), set(threading.enumerate())
    for at in itertools.count(1):
        parts = {"run": RunDirectory([tmp_path]), "pool": IoPool(2)}
        parts["file"] = StripedFile(parts["run"], "file", MIB, parts["pool"])
        closed = False
        with contextlib.suppress(KeyboardInterrupt), interrupted(at) as places:
            parts[what].close()
            closed = True
        again = threading.Thread(target=parts[what].close, daemon=True)
        again.start()
        again.join(10)
        assert not again.is_alive(), places.place
        for name in ("file", "pool", "run"):
            parts[name].close()
        assert open_fds() == fds, places.place
        assert not list(tmp_path.iterdir()), places.place
        if closed:
            break
    until = time.monotonic() + 5
    while set(threading.enumerate()) - threads and time.monotonic() < until:
        time.sleep(0.01)
    assert set(threading.enumerate()) <= threads
    assert at > 5


def test_a_closed_pool_says_so(runs: dict[int, RunDirectory], buffer: torch.Tensor) -> None:
    pool = IoPool(1)
    with closing(StripedFile(runs[1], "file", SECTOR, pool)) as file:
        pool.close()
        pool.close()
        with pytest.raises(StorageError, match="threads are closed"):
            file.pwrite(buffer[:SECTOR], 0)


@pytest.mark.parametrize("tidy", [True, False], ids=["close", "collect"])
def test_nothing_leaks(tmp_path: Path, buffer: torch.Tensor, tidy: bool) -> None:
    fds, threads = open_fds(), threading.enumerate()
    run = RunDirectory([tmp_path])
    pool = IoPool(2)
    file = StripedFile(run, "file", 2 * SECTOR, pool)
    mapped = file.map()
    file.pwrite(buffer[: 2 * SECTOR], 0)
    directory = run.directories[0]
    assert is_mapped(directory)
    workers = [thread for thread in threading.enumerate() if thread not in threads]
    assert workers
    if tidy:
        file.close()
        pool.close()
        run.close()
        assert torch.equal(mapped, buffer[: 2 * SECTOR])  # a mapping outlives its file
    del file, pool, run, mapped
    gc.collect()
    for worker in workers:
        worker.join(10)
        assert not worker.is_alive()
    assert open_fds() == fds
    assert not is_mapped(directory)
    assert not list(tmp_path.iterdir())


# -- mappings ----------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["direct", "buffered"])
def mapped_runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunDirectory]:
    paths = [tmp_path_factory.mktemp("mapped") for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        syscalls = NoDirect() if request.param == "buffered" else None
        with closing(RunDirectory(paths, syscalls=syscalls)) as run:
            yield run


def test_a_mapping_and_transfers_see_the_same_bytes(
    mapped_runs: RunDirectory, pool: IoPool, buffer: torch.Tensor
) -> None:
    num_bytes = 7 * SECTOR + 100
    with closing(StripedFile(mapped_runs, "f", num_bytes, pool, stripe_bytes=SECTOR)) as file:
        mapped = file.map()
        assert mapped.shape == (num_bytes,)
        assert not mapped.any()  # every page is in memory now
        file.pwrite(buffer[:num_bytes], 0)
        assert torch.equal(mapped, buffer[:num_bytes])

        mapped.add_(1)
        file.flush()
        target = buffer[8 * SECTOR :][:num_bytes]
        file.pread(target, 0)
        assert torch.equal(target, buffer[:num_bytes] + 1)
        assert torch.equal(file.map(), mapped)


def test_an_empty_file_maps_to_an_empty_tensor(mapped_runs: RunDirectory, pool: IoPool) -> None:
    with closing(StripedFile(mapped_runs, "f", 0, pool)) as file:
        assert file.map().numel() == 0


def test_a_failed_flush_names_the_file(runs: dict[int, RunDirectory], pool: IoPool) -> None:
    file = StripedFile(runs[1], "f", 1, pool, syscalls=Failing(errno.EIO, after=1))
    with closing(file), pytest.raises(StorageError, match=r"f\.stripes: Input/output error"):
        file.flush()


def test_a_refused_mapping_is_undone(
    runs: dict[int, RunDirectory], pool: IoPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def refuse_third(address: int, num_bytes: int, fd: int, offset: int) -> None:
        calls.append(address)
        if len(calls) == 3:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        map_file_at(address, num_bytes, fd, offset)

    monkeypatch.setattr("lohan_fx.runtime.ssd.striped_file.map_file_at", refuse_third)
    file = StripedFile(runs[2], "f", 4 * MIB, pool)
    with closing(file), pytest.raises(StorageError, match="larger stripes"):
        file.map()
    assert len(calls) == 3
    assert not any(is_mapped(directory) for directory in runs[2].directories)


# -- run directories ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "name at least one"),
        (["missing"], "missing: No such file or directory; create it"),
        (["file"], "file is not a directory"),
        (["good", "good"], "is given twice"),
        (["good", "link"], "link is given twice .also as .*good"),
        (["good", "/sys"], "cannot use the SSD directory /sys: "),  # refuses new directories
    ],
)
def test_a_directory_that_cannot_be_used(tmp_path: Path, names: list[str], message: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "good").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "good")
    with pytest.raises(StorageError, match=message):
        RunDirectory([tmp_path / name for name in names])
    assert not list((tmp_path / "good").iterdir())


def test_a_closed_run_takes_no_files(tmp_path: Path, pool: IoPool) -> None:
    run = RunDirectory([tmp_path])
    run.close()
    run.close()
    assert run.closed
    with pytest.raises(StorageError, match="directories are closed"):
        StripedFile(run, "file", 1, pool)


def test_live_runs_in_one_directory_keep_apart(
    tmp_path: Path, pool: IoPool, buffer: torch.Tensor
) -> None:
    with closing(RunDirectory([tmp_path])) as first:
        file = StripedFile(first, "file", SECTOR, pool)
        file.pwrite(buffer[:SECTOR], 0)
        with closing(RunDirectory([tmp_path])) as second:
            StripedFile(second, "file", SECTOR, pool).close()
        assert list(tmp_path.iterdir()) == [first.directories[0]]
        target = buffer[SECTOR : 2 * SECTOR]
        file.pread(target, 0)
        assert torch.equal(target, buffer[:SECTOR])
        file.close()


def test_runs_that_start_together_keep_apart(tmp_path: Path) -> None:
    for _ in range(5):
        with ThreadPoolExecutor(8) as threads:
            runs = list(threads.map(lambda _: RunDirectory([tmp_path]), range(8)))
        assert {path for run in runs for path in run.directories} == set(tmp_path.iterdir())
        for run in runs:
            assert (run.directories[0] / "lohan_fx.lock").exists()
            run.close()
    assert not list(tmp_path.iterdir())


def test_only_dead_runs_are_removed(tmp_path: Path) -> None:
    dead = tmp_path / "lohan_fx-1-aaaaaaaa"
    born_dead = tmp_path / "lohan_fx-2-bbbbbbbb"
    theirs = [tmp_path / name for name in ("lohan_fx-3-cccccccc", "lohan_fx-results", "other")]
    link = tmp_path / "lohan_fx-4-dddddddd"
    for path in (dead, born_dead, *theirs):
        path.mkdir()
    for path in (dead, *theirs):
        (path / "data").touch()
    (dead / "lohan_fx.lock").touch()
    (theirs[1] / "lohan_fx.lock").touch()
    link.symlink_to(theirs[1])
    RunDirectory([tmp_path]).close()
    assert set(tmp_path.iterdir()) == {*theirs, link}
    assert all((path / "data").exists() for path in theirs)


def test_a_directory_removed_before_its_lock_exists_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, made = tempfile.mkdtemp, []

    def mkdtemp(*, prefix: str, dir: Path) -> str:
        made.append(real(prefix=prefix, dir=dir))
        if len(made) == 1:
            run_directory._remove_dead_runs(tmp_path)
            assert not os.path.exists(made[0])
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    with closing(RunDirectory([tmp_path])) as run:
        assert [str(path) for path in run.directories] == made[1:] == os_paths(tmp_path)


def test_a_directory_removed_before_its_lock_is_held_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.flock

    def flock(fd: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        run_directory._remove_dead_runs(tmp_path)
        assert not list(tmp_path.iterdir())
        real(fd, operation)

    fds = open_fds()
    monkeypatch.setattr(fcntl, "flock", flock)
    with closing(RunDirectory([tmp_path])) as run:
        assert os_paths(tmp_path) == [str(run.directories[0])]
    assert open_fds() == fds


def os_paths(root: Path) -> list[str]:
    return [str(path) for path in root.iterdir()]


def start_process(code: str, root: Path) -> subprocess.Popen[str]:
    """Run `code` after a run with one file was made in `root` and its name printed."""
    header = (
        "import os, sys\n"
        "from lohan_fx.runtime.ssd import IoPool, RunDirectory, StripedFile\n"
        "run = RunDirectory([sys.argv[1]])\n"
        "file = StripedFile(run, 'file', 1 << 20, IoPool(1))\n"
        "print(run.directories[0].name, flush=True)\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", header + code, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(lohan_fx.__file__).parents[1])},
    )


def test_processes_that_end_leave_nothing(tmp_path: Path) -> None:
    """One is killed, one ends without a close, and a forked child of that one ends before."""
    killed = start_process("sys.stdin.read()", tmp_path)
    fork = "pid = os.fork()\nif not pid: sys.exit()\nassert os.waitpid(pid, 0)[1] == 0\n"
    look = "print(file.map().numel(), *sorted(os.listdir(run.directories[0])), flush=True)\n"
    ended = start_process(fork + look + "sys.stdin.read()", tmp_path)
    try:
        outputs = [process.stdout for process in (killed, ended) if process.stdout]
        names = [output.readline().strip() for output in outputs]
        assert outputs[1].readline().split() == [str(MIB), "file.stripes", "lohan_fx.lock"]

        RunDirectory([tmp_path]).close()
        assert {path.name for path in tmp_path.iterdir()} == set(names)

        killed.kill()
        killed.wait(60)
        ended.communicate(timeout=60)
        assert ended.returncode == 0
        assert [path.name for path in tmp_path.iterdir()] == names[:1]

        RunDirectory([tmp_path]).close()
        assert not list(tmp_path.iterdir())
    finally:
        for process in (killed, ended):
            process.kill()
            process.communicate()


# -- file systems without O_DIRECT -------------------------------------------------------


class NoDirectWrites(NoDirect):
    """A file system that refuses O_DIRECT only when bytes move."""

    open = Syscalls.open

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().pwritev(fd, buffers, offset)


@pytest.mark.parametrize("syscalls", [NoDirect(), NoDirectWrites()], ids=["open", "write"])
def test_without_direct_io_one_warning_names_the_directory(
    tmp_path: Path, pool: IoPool, buffer: torch.Tensor, syscalls: Syscalls
) -> None:
    with pytest.warns(RuntimeWarning, match=f"{tmp_path} refuses O_DIRECT") as caught:
        run = RunDirectory([tmp_path], syscalls=syscalls)
    assert len(caught) == 1
    with closing(run):
        assert run.direct == (False,)
        with closing(StripedFile(run, "file", 10000, pool, syscalls=syscalls)) as file:
            file.pwrite(buffer[:10000], 0)
            target = buffer[4 * SECTOR :][:10000]
            file.pread(target, 0)
            assert torch.equal(target, buffer[:10000])


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no tmpfs at /dev/shm")
def test_tmpfs(pool: IoPool, buffer: torch.Tensor) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        try:  # Linux 6.6 and later take the flag
            os.close(os.open(Path(root) / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600))
            takes_direct = True
        except OSError:
            takes_direct = False
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run = RunDirectory([root])
        assert [root in str(warning.message) for warning in caught] == [True] * (not takes_direct)
        with closing(run), closing(StripedFile(run, "file", 3 * SECTOR, pool)) as file:
            mapped = file.map()
            file.pwrite(buffer[: 3 * SECTOR], 0)
            assert torch.equal(mapped, buffer[: 3 * SECTOR])
