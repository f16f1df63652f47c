"""The host tier: slab, layout, pinning, rings of staging buffers."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lohan_fx.errors import InsufficientMemoryError, StorageError
from lohan_fx.runtime._memory import ALIGNMENT
from lohan_fx.runtime.arena import (
    Arena,
    BufferRing,
    Layout,
    PageLocker,
    Region,
    available_host_bytes,
)

PAGE = ALIGNMENT


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    with closing(Arena(64 * PAGE, pin=False)) as arena:
        yield arena


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, end = line.split(maxsplit=1)[0].partition("-")
        if int(start, 16) <= address < int(end, 16):
            return True
    return False


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# -- layout ------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(0, 5 * PAGE), max_size=20))
def test_regions_are_aligned_and_disjoint(sizes: list[int]) -> None:
    layout = Layout()
    regions = [layout.reserve(size, f"r{index}") for index, size in enumerate(sizes)]
    ends = [region.offset + region.num_bytes for region in regions]
    starts = [region.offset for region in regions] + [layout.total_bytes]
    assert all(start % PAGE == 0 for start in starts)
    assert all(end <= start < end + PAGE for end, start in zip(ends, starts[1:], strict=True))
    assert [region.num_bytes for region in regions] == sizes


def test_layout_table_and_errors() -> None:
    layout = Layout()
    layout.reserve(5000, "block 0")
    assert layout.reserve(1, "staging") == Region(2 * PAGE, 1, "staging")
    assert layout.table() == [("block 0", 0, 5000), ("staging", 2 * PAGE, 1)]
    assert layout.total_bytes == 3 * PAGE
    with pytest.raises(ValueError, match="already called 'staging'"):
        layout.reserve(1, "staging")
    with pytest.raises(ValueError, match="must not be negative: -1"):
        layout.reserve(-1, "x")


# -- the slab ----------------------------------------------------------------------------


def test_views_share_the_slab(arena: Arena) -> None:
    view = arena.view(PAGE, 10)
    typed = arena.typed(PAGE, (2, 3), torch.bfloat16)
    assert view.data_ptr() % PAGE == 0
    assert typed.shape == (2, 3)
    assert typed.is_contiguous()
    typed.fill_(1.0)
    assert view.tolist() == [0x80, 0x3F] * 5
    assert arena.typed(PAGE, (), torch.bfloat16).item() == 1.0
    assert arena.typed(0, (0, 4), torch.float32).shape == (0, 4)


@pytest.mark.parametrize(("offset", "num_bytes"), [(-1, 1), (0, -1), (63 * PAGE, PAGE + 1)])
def test_a_view_out_of_range_is_refused(arena: Arena, offset: int, num_bytes: int) -> None:
    with pytest.raises(ValueError, match="not within the slab of 262144 bytes"):
        arena.view(offset, num_bytes)


def test_a_typed_view_needs_whole_items(arena: Arena) -> None:
    with pytest.raises(ValueError, match="must be a multiple of 4"):
        arena.typed(2, (1,), torch.float32)


def test_the_slab_is_zeroed_and_resident() -> None:
    num_bytes = 33 << 20  # more than one touching thread
    before = resident_bytes()
    with closing(Arena(num_bytes + 1, pin=False)) as arena:
        assert arena.num_bytes == num_bytes + PAGE
        assert resident_bytes() - before > num_bytes * 0.9
        assert not arena.view(0, arena.num_bytes).any()


def test_a_slab_of_several_mappings_is_one_and_goes_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lohan_fx.runtime._memory._SHARED_PIECE_BYTES", 2 * PAGE)
    with closing(Arena(5 * PAGE, pin=False)) as arena:
        numbers = arena.typed(0, (5 * PAGE // 4,), torch.int32)
        address = numbers.data_ptr()
        torch.arange(numbers.numel(), dtype=torch.int32, out=numbers)
        assert torch.equal(numbers, torch.arange(numbers.numel(), dtype=torch.int32))
    del arena, numbers
    gc.collect()
    assert not any(is_mapped(address + index * PAGE) for index in range(5))


@pytest.mark.parametrize("tidy", [True, False], ids=["close", "collect"])
def test_a_view_keeps_the_memory(tidy: bool) -> None:
    fds, threads = os.listdir("/proc/self/fd"), threading.active_count()
    arena = Arena(4 * PAGE, pin=False)
    view = arena.view(PAGE, 3)
    view.fill_(7)
    address = view.data_ptr()
    if tidy:
        arena.close()
        arena.close()
        with pytest.raises(ValueError, match="the arena is closed"):
            arena.view(0, 1)
    del arena
    gc.collect()
    assert view.tolist() == [7, 7, 7]
    assert is_mapped(address)
    del view
    gc.collect()
    assert not is_mapped(address)
    assert os.listdir("/proc/self/fd") == fds
    assert threading.active_count() == threads


def test_a_slab_larger_than_the_free_memory_is_refused() -> None:
    with pytest.raises(InsufficientMemoryError, match="host memory: need 40") as caught:
        Arena(10 * PAGE, pin=False, available_bytes=9 * PAGE)
    assert caught.value.tier == "host"
    assert caught.value.need_bytes == 10 * PAGE
    assert caught.value.have_bytes == 9 * PAGE
    with pytest.raises(InsufficientMemoryError, match="slab"):
        Arena(1 << 50, pin=False)
    with pytest.raises(InsufficientMemoryError, match="slab") as caught:
        Arena(1 << 60, pin=False, available_bytes=1 << 61)  # no such address space
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(ValueError, match="positive"):
        Arena(0, pin=False)


def write_cgroup(directory: Path, files: dict[str, object]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name).write_text(f"{content}\n")


def test_available_memory_heeds_cgroups(tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    write_cgroup(proc, {"meminfo": "MemTotal: 900 kB\nMemFree: 100 kB\nMemAvailable: 500 kB"})
    assert available_host_bytes(proc, cgroups) == 500 << 10  # no cgroups at all

    write_cgroup(proc / "self", {"cgroup": "4:cpu:/\n3:memory,x:/job/1\n0::/a/b"})
    assert available_host_bytes(proc, cgroups) == 500 << 10  # none that can be seen

    v2 = {"memory.current": 200 << 10, "memory.stat": f"anon 1\ninactive_file {50 << 10}"}
    write_cgroup(cgroups / "a/b", {"memory.max": "max", **v2})
    assert available_host_bytes(proc, cgroups) == 500 << 10  # no limit
    write_cgroup(cgroups / "a", {"memory.max": 600 << 10, **v2})
    assert available_host_bytes(proc, cgroups) == 450 << 10  # a limit further out
    write_cgroup(cgroups / "a/b", {"memory.max": 100 << 10, **v2})
    assert available_host_bytes(proc, cgroups) == 0
    write_cgroup(cgroups / "a/b", {"memory.max": "max", **v2})

    v1 = {"memory.usage_in_bytes": 200 << 10, "memory.stat": f"total_inactive_file {10 << 10}"}
    write_cgroup(cgroups / "memory", {"memory.limit_in_bytes": 300 << 10, **v1})
    assert available_host_bytes(proc, cgroups) == 110 << 10


def test_available_memory_of_this_machine() -> None:
    assert 0 < available_host_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# -- pinning -----------------------------------------------------------------------------


class FakeLocker(PageLocker):
    """Pins nothing; refuses what is larger than a limit; knows what is pinned."""

    def __init__(self, limit_bytes: int = 1 << 40) -> None:
        self.limit_bytes = limit_bytes
        self.locked: dict[int, int] = {}

    def available(self) -> bool:
        return True

    def lock(self, address: int, num_bytes: int) -> str:
        if num_bytes > self.limit_bytes:
            return "out of memory"
        self.locked[address] = num_bytes
        return ""

    def unlock(self, address: int) -> None:
        assert is_mapped(address)
        del self.locked[address]


@pytest.mark.parametrize("tidy", [True, False], ids=["close", "collect"])
def test_regions_are_pinned_one_by_one_until_the_end(tidy: bool) -> None:
    locker = FakeLocker()
    arena = Arena(8 * PAGE, pin=True, locker=locker)
    base = arena.view(0, 1).data_ptr()
    assert arena.register(0, 2 * PAGE)
    assert arena.register(4 * PAGE, PAGE + 1)
    assert locker.locked == {base: 2 * PAGE, base + 4 * PAGE: 2 * PAGE}
    if tidy:
        view = arena.view(0, 1)
        arena.close()
        assert not locker.locked
        assert view.item() == 0
        del view
    del arena
    gc.collect()
    assert not locker.locked
    assert not is_mapped(base)


@pytest.mark.parametrize(
    ("offset", "num_bytes", "message"),
    [(1, 1, "multiple of 4096"), (PAGE, 1, "overlap"), (7 * PAGE, 2 * PAGE, "within")],
)
def test_a_region_that_cannot_be_pinned(offset: int, num_bytes: int, message: str) -> None:
    with closing(Arena(8 * PAGE, pin=True, locker=FakeLocker())) as arena:
        arena.register(0, PAGE + 1)
        with pytest.raises(ValueError, match=message):
            arena.register(offset, num_bytes)


def test_refused_pinning_warns_once_and_goes_on() -> None:
    locker = FakeLocker(limit_bytes=PAGE)
    with closing(Arena(8 * PAGE, pin=True, locker=locker)) as arena:
        with pytest.warns(RuntimeWarning, match=r"not pinned.*8\.00 KiB were refused: out of"):
            assert not arena.register(0, 2 * PAGE)
        assert not arena.register(2 * PAGE, 2 * PAGE)  # a second warning would be an error
        assert arena.register(4 * PAGE, PAGE)
        arena.view(0, 2 * PAGE).fill_(1)


def huge_pages_are_given() -> bool:
    """To those who ask."""
    switch = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return switch.exists() and "[never]" not in switch.read_text()


def huge_bytes(address: int) -> int:
    """Of the mapping at `address`, those in huge pages."""
    inside, found = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and not first.endswith(":"):
            start, _, end = first.partition("-")
            inside = int(start, 16) <= address < int(end, 16)
        elif inside and first == "AnonHugePages:":
            found += 1024 * int(line.split()[1])
    return found


@pytest.mark.skipif(not huge_pages_are_given(), reason="needs transparent huge pages")
def test_memory_that_is_to_be_pinned_is_in_huge_pages() -> None:
    num_bytes = (33 << 20) + PAGE
    before = resident_bytes()
    with closing(Arena(num_bytes, pin=True, locker=FakeLocker())) as arena:
        address = arena.view(0, 1).data_ptr()
        assert address % (2 << 20) == 0
        assert 16 << 20 <= huge_bytes(address) <= 32 << 20  # as many as there are in one piece
        assert resident_bytes() - before > num_bytes * 0.9
        assert not arena.view(0, arena.num_bytes).any()
    del arena
    gc.collect()
    assert not any(is_mapped(address + offset) for offset in range(0, num_bytes, 4 << 20))


def child(work: Callable[[], object]) -> int:
    """The exit code of a forked child that does `work`: 0, or the negative of a signal."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            faulthandler.disable()  # a fault is expected
            code = 0 if work() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_no_page_that_a_device_reads_is_copied_after_a_fork() -> None:
    """So a child has none of them; what is left after `close` it has as of the fork."""
    with closing(Arena(4 << 20, pin=True, locker=FakeLocker())) as arena:
        view = arena.view(0, 4 << 20)
        view.fill_(7)

        def read() -> bool:
            """Among as much memory of the child's own, which has to go elsewhere."""
            own = [torch.full((4 << 20,), 9, dtype=torch.uint8) for _ in range(8)]
            return view[5].item() == 7 or not own

        assert child(read) == -signal.SIGSEGV
    assert child(read) == 0


def test_a_kernel_that_cannot_wipe_leaves_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lohan_fx.runtime._memory._MADV_WIPEONFORK", 12345)
    monkeypatch.setattr("lohan_fx.runtime._memory._MADV_KEEPONFORK", 12345)
    with closing(Arena(4 * PAGE, pin=True, locker=FakeLocker())) as arena:
        view = arena.view(0, 1)
        view.fill_(7)
        assert child(lambda: view.item() == 7) == -signal.SIGSEGV
    assert child(lambda: view.item() == 7) == 0


HOOKED_BEFORE = """
import os, torch
torch.set_num_threads(1)
own = []
def make():
    own.extend(torch.full((4 << 20,), 9, dtype=torch.uint8) for _ in range(8))
os.register_at_fork(after_in_child=make)
from lohan_fx.runtime._memory import map_for_device
map_for_device(16 << 20)
pid = os.fork()
if pid == 0:
    os._exit(0 if all(int(t.min()) == int(t.max()) == 9 for t in own) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_memory_that_a_child_allocates_first_is_its_own() -> None:
    """By another library's hook, which runs before ours."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", HOOKED_BEFORE],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ran.stdout == "0\n"


def test_a_child_ends_with_pinned_memory_of_its_parent() -> None:
    locker = FakeLocker()
    slabs = [Arena(4 * PAGE, pin=True, locker=locker) for _ in range(2)]
    addresses = [slab.view(0, 1).data_ptr() for slab in slabs]
    assert all(slab.register(0, PAGE) for slab in slabs)

    def end() -> bool:
        """It closes one and collects both: nothing is unpinned, and no address stays taken."""
        slabs[0].close()
        slabs.clear()
        gc.collect()
        return len(locker.locked) == 2 and not any(map(is_mapped, addresses))

    assert child(end) == 0
    slabs[0].close()
    slabs[1].close()
    assert not locker.locked


def test_without_pin_nothing_is_pinned(arena: Arena) -> None:
    assert not arena.register(0, PAGE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_pinning_warns_once() -> None:
    with pytest.warns(RuntimeWarning, match="there is no CUDA device") as caught:
        arena = Arena(PAGE, pin=True)
    assert len(caught) == 1
    with closing(arena):
        assert not arena.register(0, PAGE)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_pinned_copies_on_a_gpu() -> None:
    with closing(Arena(1 << 20, pin=True)) as arena:
        assert arena.register(0, 1 << 19)
        source, target = arena.view(0, 1 << 18), arena.view(1 << 18, 1 << 18)
        assert source.is_pinned()
        source.copy_(torch.arange(1 << 18, dtype=torch.int32) % 251)
        target.copy_(source.to("cuda", non_blocking=True), non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(source, target)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_refusal_by_cuda_leaves_no_error_behind() -> None:
    first = Arena(1 << 20, pin=True)
    assert first.register(0, 1 << 20)
    with closing(first), closing(Arena(1 << 20, pin=True)) as second:
        second._address = first._address  # CUDA refuses to register memory twice
        with pytest.warns(RuntimeWarning, match="already"):
            assert not second.register(0, 1 << 20)
        assert torch.ones(3, device="cuda").sum().item() == 3


# -- rings -------------------------------------------------------------------------------


def make_ring(arena: Arena, num_buffers: int) -> BufferRing:
    return BufferRing(arena, Region(8 * PAGE, 24 * PAGE + 5, "staging"), num_buffers)


def wait_for_waiters(ring: BufferRing, num_waiters: int) -> None:
    while len(ring._waiting) < num_waiters:
        os.sched_yield()


def test_buffers_are_equal_aligned_and_disjoint(arena: Arena) -> None:
    ring = make_ring(arena, 5)
    buffers = [ring.acquire() for _ in range(5)]
    assert ring.buffer_bytes == 4 * PAGE
    assert {buffer.numel() for buffer in buffers} == {4 * PAGE}
    base = arena.view(0, 1).data_ptr()
    assert [buffer.data_ptr() - base for buffer in buffers] == [
        (8 + 4 * index) * PAGE for index in range(5)
    ]


def test_a_region_too_small_for_its_buffers_is_refused(arena: Arena) -> None:
    with pytest.raises(ValueError, match="'staging' of 98309 bytes has no room for 25"):
        make_ring(arena, 25)
    with pytest.raises(ValueError, match="no room for 0"):
        make_ring(arena, 0)


def test_waiters_are_served_in_order(arena: Arena) -> None:
    ring = make_ring(arena, 1)
    buffer = ring.acquire()
    served: list[int] = []

    def work(index: int) -> None:
        with ring.lend():
            served.append(index)

    with ThreadPoolExecutor(6) as threads:
        futures = []
        for index in range(6):
            futures.append(threads.submit(work, index))
            wait_for_waiters(ring, index + 1)
        ring.release(buffer)
        for future in futures:
            future.result(10)
    assert served == list(range(6))


def test_no_buffer_is_lent_twice(arena: Arena) -> None:
    ring = make_ring(arena, 2)
    lent: set[int] = set()

    def work(_: int) -> None:
        with ring.lend() as buffer:
            assert buffer.data_ptr() not in lent
            lent.add(buffer.data_ptr())
            os.sched_yield()
            lent.remove(buffer.data_ptr())

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(300)))


def test_try_acquire_never_waits_and_never_overtakes(arena: Arena) -> None:
    ring = make_ring(arena, 1)
    buffer = ring.try_acquire()
    assert buffer is not None
    assert ring.try_acquire() is None
    ring.release(buffer)
    ring._waiting.append("a thread that was woken and has not run yet")
    assert ring.try_acquire() is None
    ring._waiting.clear()
    ring.close()
    with pytest.raises(StorageError, match="closed"):
        ring.try_acquire()


def test_close_wakes_waiters(arena: Arena) -> None:
    ring = make_ring(arena, 1)
    buffer = ring.acquire()
    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(ring.acquire) for _ in range(2)]
        wait_for_waiters(ring, 2)
        ring.close()
        for future in futures:
            with pytest.raises(StorageError, match="ring of staging buffers is closed"):
                future.result(10)
    ring.release(buffer)
    with pytest.raises(StorageError, match="closed"):
        ring.acquire()


def test_only_lent_buffers_are_taken_back(arena: Arena) -> None:
    ring = make_ring(arena, 2)
    buffer = ring.acquire()
    with pytest.raises(ValueError, match="is lent by this ring"):
        ring.release(arena.view(0, PAGE))
    ring.release(buffer)
    with pytest.raises(ValueError, match="is lent by this ring"):
        ring.release(buffer)
