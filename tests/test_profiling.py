from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lohan_fx import profiling
from lohan_fx.errors import HardwareError, StorageError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.profiling import profile_hardware

MIB = 2**20
BLOCK_BYTES = 16 * MIB


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [tmp_path_factory.mktemp(name) for name in ("a", "b")]


@pytest.fixture(scope="module")
def measured(directories: list[Path]) -> HardwareProfile:
    """A real profile of this machine's CPU and disk."""
    return profile_hardware(directories, device="cpu", name="this machine", quick=True)


@pytest.fixture
def one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that the meter measures takes one second."""
    monkeypatch.setattr(profiling._Meter, "seconds", lambda self, work, cap_s: 1.0)


def seconds_of(work: Callable[[], object]) -> float:
    samples = []
    for _ in range(5):
        start = time.perf_counter()
        work()
        samples.append(time.perf_counter() - start)
    return min(samples)


# A whole profile


def test_the_profile_describes_this_machine(
    measured: HardwareProfile, directories: list[Path]
) -> None:
    assert measured.name == "this machine"
    assert measured.device_kind == "cpu"
    assert list(measured.matmul_flops_per_s) == ["float32", "bfloat16"]
    assert measured.block_flops_dtype == "float32"
    assert [ssd.path for ssd in measured.ssds] == [str(path) for path in directories]


def test_nothing_stays_on_the_disk(measured: HardwareProfile, directories: list[Path]) -> None:
    assert [list(path.iterdir()) for path in directories] == [[], []]


def test_a_measured_profile_survives_its_file(measured: HardwareProfile, tmp_path: Path) -> None:
    measured.save(tmp_path / "hw.json")
    assert HardwareProfile.load(tmp_path / "hw.json") == measured


def test_cpu_tiers_are_halves_of_the_free_memory(measured: HardwareProfile) -> None:
    assert abs(measured.device_bytes - measured.host_bytes) <= 1
    assert measured.device_bytes + measured.host_bytes <= psutil.virtual_memory().total


def test_directories_on_one_disk_share_its_space(
    measured: HardwareProfile, directories: list[Path]
) -> None:
    free_bytes = shutil.disk_usage(directories[0]).free
    assert measured.ssd_bytes == pytest.approx(free_bytes, rel=0.3)


def test_rates_agree_with_a_direct_measurement(measured: HardwareProfile) -> None:
    """To a factor of 50: neighbours may be busy, but a slip of units is larger."""
    a = torch.randn(1024, 1024)
    b = torch.empty(16 * MIB)
    data = torch.randn(16 * MIB)
    matmul_flops_per_s = 2 * 1024**3 / seconds_of(lambda: a @ a)
    copied_bytes_per_s = data.nbytes / seconds_of(lambda: b.copy_(data))
    for rate, expected in (
        (measured.flops_per_s("float32"), matmul_flops_per_s),
        (measured.block_flops_per_s, matmul_flops_per_s),
        (measured.device_bytes_per_s, 2 * copied_bytes_per_s),
        (measured.h2d_bytes_per_s, copied_bytes_per_s),
        (measured.d2h_bytes_per_s, copied_bytes_per_s),
        (measured.duplex_bytes_per_s, copied_bytes_per_s),
        (28 * measured.cpu_optimizer_params_per_s, 2 * copied_bytes_per_s),
    ):
        assert expected / 50 < rate < expected * 50


def test_a_stripe_is_about_as_fast_as_its_directories(measured: HardwareProfile) -> None:
    read = sum(ssd.read_bytes_per_s for ssd in measured.ssds)
    write = sum(ssd.write_bytes_per_s for ssd in measured.ssds)
    assert read / 50 < measured.ssd_read_bytes_per_s < 10 * read
    assert write / 50 < measured.ssd_write_bytes_per_s < 10 * write


def test_a_single_path_is_one_ssd_and_its_own_stripe(one_second: None, tmp_path: Path) -> None:
    hw = profile_hardware(str(tmp_path), device="cpu", quick=True, dtypes=["bfloat16"])
    (ssd,) = hw.ssds
    assert ssd.path == str(tmp_path)
    assert hw.ssd_read_bytes_per_s == ssd.read_bytes_per_s
    assert hw.ssd_write_bytes_per_s == ssd.write_bytes_per_s
    assert hw.block_flops_dtype == "bfloat16", "the only dtype asked for"
    assert hw.name == hw.device_name


def test_without_ssd_paths_there_is_no_ssd_tier(one_second: None) -> None:
    state = torch.random.get_rng_state()
    hw = profile_hardware(device="cpu", quick=True, dtypes=["float32"])
    assert torch.equal(torch.random.get_rng_state(), state)  # `compile` profiles in a user's run
    assert (hw.ssds, hw.ssd_read_bytes_per_s, hw.ssd_bytes) == ((), 0.0, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device(tmp_path: Path) -> None:
    hw = profile_hardware([tmp_path], quick=True)
    assert hw.device_kind == "cuda"
    assert hw.block_flops_dtype == "bfloat16"
    assert hw.flops_per_s("bfloat16") > hw.flops_per_s("float32")
    assert hw.device_bytes_per_s > hw.h2d_bytes_per_s
    assert hw.duplex_bytes_per_s > 0.8 * max(hw.h2d_bytes_per_s, hw.d2h_bytes_per_s)
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    assert total_bytes / 10 < hw.device_bytes <= total_bytes


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_cpu_optimizer_shares_host_memory_with_the_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its rate is that of a time half of which had copies beside."""
    taken = []
    seconds = profiling._Meter.seconds

    def noted(meter: Any, work: Any, **options: Any) -> float:
        taken.append(seconds(meter, work, **options))
        return taken[-1]

    monkeypatch.setattr(profiling._Meter, "seconds", noted)
    rate = profiling._cpu_optimizer_params_per_s(profiling._Meter(torch.device("cuda"), True))
    assert rate == 2 * 64 * MIB / sum(taken)
    assert len(taken) == 2


def test_a_link_is_kept_busy_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """All the time, and no longer; an error of a copy is raised. (What CUDA has apart.)"""
    nothing, stream = contextlib.nullcontext(), mock.Mock()
    for name, made in (("device", nothing), ("stream", nothing), ("Stream", stream)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, made=made: made)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    copies = {"h2d": 0, "d2h": 0}
    meter = profiling._Meter(torch.device("cpu"), quick=True)

    def counted(way: str) -> Callable[[profiling._Link], None]:
        def copy(_: profiling._Link) -> None:
            copies[way] += 1

        return copy

    for way in copies:
        monkeypatch.setattr(profiling._Link, way, counted(way))
    before = threading.active_count()
    with profiling._copying_both_ways(meter):
        seen = dict(copies)
        deadline = time.monotonic() + 30
        while min(copies[way] - seen[way] for way in copies) < 3:
            assert time.monotonic() < deadline
    assert threading.active_count() == before
    failed = threading.Event()

    def fail(_: profiling._Link) -> None:
        failed.set()
        raise OSError("the link")

    monkeypatch.setattr(profiling._Link, "d2h", fail)
    with pytest.raises(OSError, match="the link"), profiling._copying_both_ways(meter):
        assert failed.wait(timeout=30)
    assert threading.active_count() == before


# The arithmetic of rates


def test_amounts_of_work(one_second: None) -> None:
    meter = profiling._Meter(torch.device("cpu"), quick=True)
    assert profiling._device_bytes_per_s(meter) == 2 * 64 * MIB, "read plus written"
    assert profiling._link_bytes_per_s(meter) == (64 * MIB, 64 * MIB, 128 * MIB)
    assert profiling._cpu_optimizer_params_per_s(meter) == 16 * MIB
    size = (profiling._matmul_flops_per_s(meter, torch.float32) / 2) ** (1 / 3)
    assert round(size) in (512, 1024, 2048, 4096, 8192)


def test_block_flops_are_three_times_what_torch_counts_in_forward(one_second: None) -> None:
    # The math kernel, because torch does not count the CPU's fused attention.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        profiling._Block(512, num_heads=8)(torch.randn(1, 256, 512))
    meter = profiling._Meter(torch.device("cpu"), quick=True)
    assert profiling._block_flops_per_s(meter, torch.float32) == 3 * counter.get_total_flops()


def test_the_meter_takes_the_median_without_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    durations = iter([50.0, 1.0, 2.0, 3.0, 9.0])

    def work() -> None:
        nonlocal now
        now += next(durations)

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    meter = profiling._Meter(torch.device("cpu"), quick=False)
    assert meter.seconds(work, cap_s=65) == 2.5  # the median of 1, 2, 3 and 9


def test_the_meter_samples_once_when_the_cap_is_short() -> None:
    calls = []
    profiling._Meter(torch.device("cpu"), quick=False).seconds(lambda: calls.append(1), cap_s=0)
    assert len(calls) == 2, "warm-up and one sample"


# Bad requests


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "meta"}, "device 'meta' is not supported: use 'cpu' or 'cuda'"),
        ({"device": "nonsense"}, "device 'nonsense' is unknown"),
        ({"device": "cuda:99"}, "device 'cuda:99': torch .* sees"),
        ({"dtypes": ["int8"]}, "dtype 'int8' is no floating-point dtype"),
        ({"dtypes": ["nonsense"]}, "dtype 'nonsense'"),
        ({"dtypes": []}, "name at least one in a list"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(HardwareError, match=message):
        profile_hardware(**arguments)


def test_bad_directories_are_named_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(profiling._Meter, "seconds")
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(StorageError, match=f"{tmp_path}/missing does not exist: create it"):
        profile_hardware([tmp_path, tmp_path / "missing"], device="cpu")
    with pytest.raises(StorageError, match=f"{file} is no directory"):
        profile_hardware([file], device="cpu")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(StorageError, match=f"{tmp_path} is not writable"):
        profile_hardware([tmp_path], device="cpu")


# SSDs


@pytest.fixture
def clean(tmp_path: Path) -> Any:
    """After the test no file and no file descriptor is left."""
    num_open = len(os.listdir("/proc/self/fd"))
    yield
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == num_open


def raising(error: int) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise OSError(error, os.strerror(error))

    return call


@pytest.mark.parametrize("function", ["pwritev", "preadv"])
def test_a_failing_disk(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean: None
) -> None:
    action = "write" if function == "pwritev" else "read"
    with monkeypatch.context() as patch:
        patch.setattr(os, function, raising(errno.EIO))
        with pytest.raises(StorageError, match=f"{action} in {tmp_path} failed: Input/output"):
            profiling._measure_ssds([tmp_path], quick=True)
        patch.setattr(os, function, lambda fd, buffers, offset: 4096)
        with pytest.raises(StorageError, match=f"short {action} in {tmp_path}: 4.00 KiB of 16.00"):
            profiling._measure_ssds([tmp_path], quick=True)


def test_a_read_only_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean: None
) -> None:
    monkeypatch.setattr(profiling.tempfile, "mkstemp", raising(errno.EROFS))
    with pytest.raises(StorageError, match=f"{tmp_path} is not writable .Read-only file system"):
        profiling._measure_ssds([tmp_path], quick=True)


def with_free_bytes(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    usage = shutil.disk_usage("/")._replace(free=free_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean: None) -> None:
    with_free_bytes(monkeypatch, 10 * MIB)
    with pytest.raises(StorageError, match=r"need 64.00 MiB of free .* have 10.00 MiB"):
        profiling._measure_ssds([tmp_path], quick=True)


def test_a_small_disk_gets_a_small_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean: None
) -> None:
    with_free_bytes(monkeypatch, 100 * MIB)
    with profiling._test_file(tmp_path, 100 * MIB, bytes(BLOCK_BYTES), quick=False) as file:
        assert file.num_blocks == 3
    (ssd,), _, _ = profiling._measure_ssds([tmp_path], quick=True)
    assert ssd.capacity_bytes == 100 * MIB


def test_the_file_is_gone_before_it_is_written(tmp_path: Path, clean: None) -> None:
    with profiling._test_file(tmp_path, 100 * MIB, bytes(BLOCK_BYTES), quick=False):
        assert list(tmp_path.iterdir()) == []


def test_without_o_direct_it_warns_and_flushes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean: None
) -> None:
    flushed = []
    fsync, open_ = os.fsync, os.open

    def refusing_open(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return open_(path, flags, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refusing_open)
        patch.setattr(os, "fsync", lambda fd: flushed.append(fd) or fsync(fd))
        with pytest.warns(UserWarning, match=f"{tmp_path} is in memory .* or refuses O_DIRECT"):
            (ssd,), _, _ = profiling._measure_ssds([tmp_path], quick=True)
    assert flushed
    assert ssd.write_bytes_per_s > 0


@pytest.mark.skipif(
    not os.access("/dev/shm", os.W_OK) or shutil.disk_usage("/dev/shm").free < 200 * MIB,
    reason="needs a tmpfs",
)
def test_a_tmpfs_is_no_ssd() -> None:
    with pytest.warns(UserWarning, match="is in memory"):
        profiling._measure_ssds([Path("/dev/shm")], quick=True)


def test_a_warning_turned_error_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean: None
) -> None:
    monkeypatch.setattr(profiling, "_is_in_memory", lambda path: True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning):
            profiling._measure_ssds([tmp_path], quick=True)


def test_only_written_blocks_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean: None
) -> None:
    """A hole in a file reads at memory speed."""
    offsets: dict[str, list[int]] = {"write": [], "read": []}

    def recording(action: str) -> Callable[..., int]:
        def move(fd: int, buffers: list[Any], offset: int) -> int:
            offsets[action].append(offset)
            return len(buffers[0])

        return move

    monkeypatch.setattr(os, "pwritev", recording("write"))
    monkeypatch.setattr(os, "preadv", recording("read"))
    with profiling._test_file(tmp_path, 10**9, bytes(BLOCK_BYTES), quick=False) as file:
        profiling._ssd_bytes_per_s([file], "write", cap_s=0)
        assert sorted(offsets["write"]) == [0, BLOCK_BYTES], "one block a thread, then the cap"
        profiling._ssd_bytes_per_s([file], "read", cap_s=60)
        assert set(offsets["read"]) == {0, BLOCK_BYTES}
        profiling._ssd_bytes_per_s([file], "write", cap_s=60)
        assert set(offsets["write"]) == {i * BLOCK_BYTES for i in range(16)}


def test_a_stripe_writes_all_directories_at_once(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_four = threading.Barrier(4, timeout=20)

    def pwritev(fd: int, buffers: list[Any], offset: int) -> int:
        all_four.wait()  # breaks unless two threads for each of two directories are in here
        return len(buffers[0])

    monkeypatch.setattr(os, "pwritev", pwritev)
    paths = [tmp_path_factory.mktemp("stripe") for _ in range(2)]
    with (
        profiling._test_file(paths[0], 10**9, bytes(BLOCK_BYTES), quick=True) as a,
        profiling._test_file(paths[1], 10**9, bytes(BLOCK_BYTES), quick=True) as b,
    ):
        assert profiling._ssd_bytes_per_s([a, b], "write", cap_s=0) > 0


# Host memory


@pytest.mark.parametrize(
    ("membership", "files", "limits"),
    [
        ("0::/job/7", {"job/memory.max": "700", "job/7/memory.max": "max"}, [700]),
        ("0::/", {"memory.max": "500"}, [500]),
        ("0::/of/the/host", {"memory.max": "400"}, [400]),
        ("3:cpu,memory:/x", {"memory/x/memory.limit_in_bytes": "300"}, [300]),
        ("3:cpu:/x\n0::/x", {"x/memory.max": "5", "x/cpu.max": "1"}, [5]),
        ("0::/", {}, []),
    ],
)
def test_cgroup_limits(
    membership: str, files: dict[str, str], limits: list[int], tmp_path: Path
) -> None:
    mount = tmp_path / "cgroup"
    for name, text in files.items():
        (mount / name).parent.mkdir(parents=True, exist_ok=True)
        (mount / name).write_text(text + "\n")
    (tmp_path / "self").write_text(membership + "\n")
    assert list(profiling._cgroup_limits_bytes(tmp_path / "self", mount)) == limits


def test_a_cgroup_limit_caps_the_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "_cgroup_limits_bytes", lambda *paths: iter([12345]))
    assert profiling._host_memory_bytes() == 12345
    monkeypatch.setattr(profiling, "_cgroup_limits_bytes", lambda *paths: iter([2**60]))
    assert profiling._host_memory_bytes() < 2**60
