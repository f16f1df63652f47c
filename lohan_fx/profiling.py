"""Measure a `HardwareProfile`: device, links, host, SSDs. Takes 10 to 20 seconds.

Every measurement is a median of repeats under a time cap, on random data: zeros compress in
SSDs and draw less power, hence run faster, on GPUs.
"""

from __future__ import annotations

import errno
import mmap
import os
import platform
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import psutil
import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

from lohan_fx.arguments import path_of
from lohan_fx.errors import HardwareError, StorageError, format_bytes, format_need
from lohan_fx.hardware import HardwareProfile, SsdDevice
from lohan_fx.runtime.arena import Arena
from lohan_fx.runtime.lane import Lane
from lohan_fx.runtime.optimizer import UnitOptimizer
from lohan_fx.runtime.ssd import IoPool
from lohan_fx.runtime.waiting import Latch

_T = TypeVar("_T")

_MIB = 2**20
_SSD_BLOCK_BYTES = 16 * _MIB
_SSD_THREADS = 2  # per directory: one block is always queued while another completes
_MIN_FILE_BYTES = _SSD_THREADS * _SSD_BLOCK_BYTES


def profile_hardware(
    ssd: Sequence[str | Path] = (),
    *,
    device: str | None = None,
    name: str | None = None,
    progress: bool = True,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    quick: bool = False,
) -> HardwareProfile:
    """Measure this machine.

    Rates are in bytes, FLOPs or parameters per second. The transformer block runs in bfloat16
    on CUDA and in float32 on a CPU where `dtypes` has these, else in the first of `dtypes`.
    Capacities are what is free now: device memory that no other process holds, host memory
    under the cgroup's limit, free disk space. On a CPU device, half of the memory counts as
    device and half as host. Test files are unlinked before the first byte is written, so they
    vanish whatever happens.

    Args:
        ssd: directories, best one per physical SSD. They are measured alone and all at once,
            with O_DIRECT where the file system allows it.
        device: ``"cuda"``, ``"cuda:1"`` or ``"cpu"``; CUDA where available by default.
        name: the profile's label; the device's name by default.
        progress: show a progress bar on stderr while it is a terminal.
        dtypes: names of the matmul dtypes to measure.
        quick: smaller samples, less exact, about a quarter of the time.

    Raises:
        HardwareError: the device or a dtype does not exist here.
        StorageError: a directory is missing, not writable, too full, or fails to read or write.
    """
    given = [ssd] if isinstance(ssd, str | Path) or not hasattr(ssd, "__iter__") else [*ssd]
    directories = [_checked_directory(path_of("ssd", path)) for path in given]
    if isinstance(dtypes, str) or not dtypes:
        raise HardwareError(f"dtypes={dtypes!r}: name at least one in a list, such as ['float32']")
    torch_dtypes = {dtype: _torch_dtype(dtype) for dtype in dtypes}
    where = _torch_device(device)
    on_cuda = where.type == "cuda"
    meter = _Meter(where, quick)
    preferred = "bfloat16" if on_cuda else "float32"
    block_dtype = preferred if preferred in torch_dtypes else next(iter(torch_dtypes))
    # First, because CUDA keeps pinned test buffers in its own cache.
    memory_bytes = _host_memory_bytes()
    ssds: tuple[SsdDevice, ...] = ()
    ssd_read = ssd_write = 0.0

    console = Console(stderr=True)
    hidden = not (progress and console.is_terminal)
    with (
        Progress(console=console, transient=True, disable=hidden) as bar,
        torch.cuda.device(where if on_cuda else -1),
        torch.random.fork_rng([where] if on_cuda else []),  # the run's own draws stay as they are
    ):
        task = bar.add_task("profiling", total=len(torch_dtypes) + 4 + bool(directories))

        def stage(what: str, measure: Callable[[], _T]) -> _T:
            bar.update(task, description=f"measuring {what}")
            result = measure()
            bar.advance(task)
            return result

        matmul = {
            dtype_name: stage(f"{dtype_name} matmul", partial(_matmul_flops_per_s, meter, dtype))
            for dtype_name, dtype in torch_dtypes.items()
        }
        block_flops_per_s = stage(
            "a transformer block", lambda: _block_flops_per_s(meter, torch_dtypes[block_dtype])
        )
        device_bytes_per_s = stage("device memory", lambda: _device_bytes_per_s(meter))
        h2d, d2h, duplex = stage("the host link", lambda: _link_bytes_per_s(meter))
        optimizer_params_per_s = stage(
            "the CPU optimizer", lambda: _cpu_optimizer_params_per_s(meter)
        )
        if directories:
            ssds, ssd_read, ssd_write = stage(
                "SSDs", lambda: _measure_ssds(directories, quick=quick)
            )
        if on_cuda:
            device_name = torch.cuda.get_device_name(where)
            torch.cuda.empty_cache()
            device_bytes = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
            host_bytes = memory_bytes
        else:
            device_name = _cpu_name()
            device_bytes = memory_bytes // 2
            host_bytes = memory_bytes - device_bytes

    return HardwareProfile(
        name=name or device_name,
        device_kind="cuda" if on_cuda else "cpu",
        device_name=device_name,
        matmul_flops_per_s=matmul,
        block_flops_per_s=block_flops_per_s,
        block_flops_dtype=block_dtype,
        device_bytes_per_s=device_bytes_per_s,
        h2d_bytes_per_s=h2d,
        d2h_bytes_per_s=d2h,
        duplex_bytes_per_s=duplex,
        cpu_optimizer_params_per_s=optimizer_params_per_s,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        ssds=ssds,
        ssd_read_bytes_per_s=ssd_read,
        ssd_write_bytes_per_s=ssd_write,
    )


def _torch_device(device: str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise HardwareError(f"device {device!r} is unknown: use 'cpu' or 'cuda'") from error
    if where.type not in ("cpu", "cuda"):
        raise HardwareError(f"device {device!r} is not supported: use 'cpu' or 'cuda'")
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise HardwareError(
            f"device {device!r}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA "
            "devices; install a CUDA build of torch, or use device='cpu'"
        )
    return where


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise HardwareError(f"dtype {name!r} is no floating-point dtype of torch: use 'bfloat16'")
    return dtype


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # no such file outside Linux
    return platform.processor() or platform.machine() or "cpu"


def _host_memory_bytes() -> int:
    available: int = psutil.virtual_memory().available
    return min(
        [available, *_cgroup_limits_bytes(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))]
    )


def _cgroup_limits_bytes(membership: Path, mount: Path) -> Iterator[int]:
    """Memory limits of this process's cgroups (v1 and v2) and of all cgroups above them."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return  # no cgroups outside Linux
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            root, file = mount, "memory.max"
        elif "memory" in controllers.split(","):
            root, file = mount / "memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the group's path may be the host's, of which only the root is visible.
        folder = root / group.lstrip("/")
        for parent in (folder, *folder.parents):
            if parent.is_relative_to(root) and (parent / file).is_file():
                text = (parent / file).read_text(encoding="utf-8").strip()
                if text != "max":
                    yield int(text)


class _Meter:
    """Runs a piece of work repeatedly on one device and returns its median seconds."""

    def __init__(self, device: torch.device, quick: bool) -> None:
        self.device = device
        self.on_cuda = device.type == "cuda"
        self.quick = quick

    def seconds_once(self, work: Callable[[], object]) -> float:
        start = time.perf_counter()
        work()
        if self.on_cuda:
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start

    def seconds(self, work: Callable[[], object], *, cap_s: float) -> float:
        """Median seconds: one warm-up, then repeats until the cap."""
        deadline = time.perf_counter() + (cap_s / 4 if self.quick else cap_s)
        self.seconds_once(work)
        samples = [self.seconds_once(work)]
        while time.perf_counter() + samples[-1] < deadline and len(samples) < 50:
            samples.append(self.seconds_once(work))
        return statistics.median(samples)


def _matmul_flops_per_s(meter: _Meter, dtype: torch.dtype) -> float:
    # Grow until one product takes long enough to time and to fill the device. The best of
    # three decides, so that one interruption by a neighbour does not.
    size = 512
    while True:
        a, b = (torch.randn(size, size, device=meter.device).to(dtype) for _ in range(2))
        work = partial(torch.mm, a, b)
        best_s = min(meter.seconds_once(work) for _ in range(3))
        if size >= 8192 or best_s > (0.005 if meter.quick else 0.03):
            break
        size *= 2
    return 2 * size**3 / meter.seconds(work, cap_s=0.8)


class _Block(nn.Module):
    """A GPT block: causal attention and a four times wider MLP, both with a residual."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def _block_flops_per_s(meter: _Meter, dtype: torch.dtype) -> float:
    if meter.on_cuda:
        hidden, length, batch = (2048 if meter.quick else 4096), 1024, 8
    else:
        hidden, length, batch = (512, 256, 1) if meter.quick else (768, 512, 1)
    block = _Block(hidden, num_heads=hidden // 64).to(meter.device, dtype)
    x = torch.randn(batch, length, hidden, device=meter.device).to(dtype).requires_grad_()
    grad = torch.randn_like(x)
    inputs = [x, *block.parameters()]

    def work() -> None:
        torch.autograd.grad(block(x), inputs, grad)

    # Backward costs twice forward. Attention counts in full although it is causal, as in
    # torch's flop counter.
    tokens = batch * length
    forward_flops = 24 * tokens * hidden**2 + 4 * tokens * length * hidden
    return 3 * forward_flops / meter.seconds(work, cap_s=1.5)


def _random_bytes(meter: _Meter, num_bytes: int) -> torch.Tensor:
    return torch.rand(num_bytes // 4, device=meter.device)


def _device_bytes_per_s(meter: _Meter) -> float:
    # Much larger than any cache.
    num_bytes = (64 if meter.quick else 256) * _MIB * (4 if meter.on_cuda else 1)
    source = _random_bytes(meter, num_bytes)
    target = torch.empty_like(source)
    return 2 * num_bytes / meter.seconds(lambda: target.copy_(source), cap_s=0.8)


class _Link:
    """Copies between device and host memory, each of `num_bytes`; on a CPU these are memcpys."""

    def __init__(self, meter: _Meter, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._device = [_random_bytes(meter, self.num_bytes) for _ in range(2)]
        self._host = [torch.rand(self.num_bytes // 4, pin_memory=meter.on_cuda) for _ in range(2)]

    def h2d(self) -> None:
        self._device[0].copy_(self._host[0], non_blocking=True)

    def d2h(self) -> None:
        self._host[1].copy_(self._device[1], non_blocking=True)


def _link_bytes_per_s(meter: _Meter) -> tuple[float, float, float]:
    """(host to device, device to host, both at once); on a CPU these are memcpy rates."""
    link = _Link(meter, (64 if meter.quick else 256) * _MIB)
    h2d_s = meter.seconds(link.h2d, cap_s=0.6)
    d2h_s = meter.seconds(link.d2h, cap_s=0.6)
    if meter.on_cuda:
        streams = [torch.cuda.Stream() for _ in range(2)]

        def both() -> None:
            for stream, copy in zip(streams, (link.h2d, link.d2h), strict=True):
                with torch.cuda.stream(stream):
                    copy()

        both_s = meter.seconds(both, cap_s=0.6)
    else:
        with closing(Lane("h2d")) as first, closing(Lane("d2h")) as second:

            def both() -> None:
                for ticket in (first.submit(link.h2d), second.submit(link.d2h)):
                    ticket.synchronize()

            both_s = meter.seconds(both, cap_s=0.6)
    size = link.num_bytes
    return size / h2d_s, size / d2h_s, 2 * size / both_s


@contextmanager
def _copying_both_ways(meter: _Meter) -> Iterator[None]:
    """A CUDA device copies from and to host memory all the time."""
    link, over = _Link(meter, 64 * _MIB), Latch()

    def repeat(copy: Callable[[], None]) -> None:
        with torch.cuda.device(meter.device), torch.cuda.stream(torch.cuda.Stream()):
            while not over.is_open():
                copy()
                torch.cuda.current_stream().synchronize()

    with closing(Lane("h2d")) as first, closing(Lane("d2h")) as second:
        copies = [first.submit(partial(repeat, link.h2d)), second.submit(partial(repeat, link.d2h))]
        try:
            yield
        finally:
            over.open()
        for each in copies:
            each.synchronize()


def _cpu_optimizer_params_per_s(meter: _Meter) -> float:
    """Parameters a second of AdamW as units in host memory run it, in a slab: mixed if for a GPU,
    and half of the time beside copies in both directions. These share the host's memory with it:
    alone an H200's host updates 5.0 to 5.6 Gparam/s, beside all that the link can copy 3.2, in
    steps 3.7 to 3.9."""
    num_params = (16 if not meter.on_cuda else 64) * 2**20  # gigabytes: no cache holds them
    with closing(Arena(16 * num_params, pin=meter.on_cuda)) as arena:
        rows = [arena.typed(4 * k * num_params, [num_params], torch.float32) for k in range(4)]
        master = rows[0].uniform_()
        parameter = nn.Parameter(master)
        unit = UnitOptimizer(torch.optim.AdamW([parameter], fused=True), [parameter])
        state = [dict(zip(unit.state_names(), rows[1:3], strict=True))]
        on_cpu = _Meter(torch.device("cpu"), meter.quick)
        if not meter.on_cuda:
            step = partial(unit.step, [master], [rows[3].uniform_()], state)
            return num_params / on_cpu.seconds(step, cap_s=1.0)
        gradient, copy = rows[3].view(torch.bfloat16).chunk(2)
        gradient.uniform_()
        step = partial(unit.step_mixed, [master], [gradient], state, [copy])
        alone_s = on_cpu.seconds(step, cap_s=0.7)
        with _copying_both_ways(meter):
            beside_s = on_cpu.seconds(step, cap_s=0.7)
        return 2 * num_params / (alone_s + beside_s)


# SSDs


@dataclass
class _TestFile:
    """An open, already unlinked file, and which of its blocks hold data."""

    directory: Path
    fd: int
    direct: bool
    num_blocks: int
    buffers: list[mmap.mmap]
    written: set[int] = field(default_factory=set)


def _checked_directory(path: Path) -> Path:
    path = path.expanduser().resolve()
    if not path.exists():
        raise StorageError(f"SSD directory {path} does not exist: create it, or name another")
    if not path.is_dir():
        raise StorageError(f"SSD path {path} is no directory: name a directory on the SSD")
    if not os.access(path, os.W_OK | os.X_OK):
        raise StorageError(f"SSD directory {path} is not writable: change its mode, or use another")
    return path


def _measure_ssds(
    directories: Sequence[Path], *, quick: bool
) -> tuple[tuple[SsdDevice, ...], float, float]:
    """Each directory alone, then all at once: (devices, read bytes/s, write bytes/s)."""
    disks = [path.stat().st_dev for path in directories]
    # Directories on one disk share its free space.
    free_bytes = [
        shutil.disk_usage(path).free // disks.count(disk)
        for path, disk in zip(directories, disks, strict=True)
    ]
    cap_s = min(1.5, 6.0 / len(directories)) / (4 if quick else 1)
    pattern = os.urandom(_SSD_BLOCK_BYTES)
    with ExitStack() as stack:
        files = [
            stack.enter_context(_test_file(path, free, pattern, quick=quick))
            for path, free in zip(directories, free_bytes, strict=True)
        ]
        alone = [
            (_ssd_bytes_per_s([file], "write", cap_s), _ssd_bytes_per_s([file], "read", cap_s))
            for file in files
        ]
        if len(files) == 1:
            write, read = alone[0]
        else:
            write = _ssd_bytes_per_s(files, "write", cap_s)
            read = _ssd_bytes_per_s(files, "read", cap_s)
    ssds = tuple(
        SsdDevice(
            path=str(path),
            read_bytes_per_s=read_alone,
            write_bytes_per_s=write_alone,
            capacity_bytes=free,
        )
        for path, free, (write_alone, read_alone) in zip(
            directories, free_bytes, alone, strict=True
        )
    )
    return ssds, read, write


def _is_in_memory(directory: Path) -> bool:
    # Recent kernels accept O_DIRECT on tmpfs, and ignore it.
    mounts = [m for m in psutil.disk_partitions(all=True) if directory.is_relative_to(m.mountpoint)]
    fstypes = [m.fstype for m in sorted(mounts, key=lambda m: len(m.mountpoint))]
    return bool(fstypes) and fstypes[-1] in ("tmpfs", "ramfs")


@contextmanager
def _test_file(
    directory: Path, free_bytes: int, pattern: bytes, *, quick: bool
) -> Iterator[_TestFile]:
    # Leave at least half of the free space to others.
    num_bytes = min((64 if quick else 256) * _MIB, free_bytes // 2)
    if num_bytes < _MIN_FILE_BYTES:
        raise StorageError(
            f"SSD directory {directory}: need {format_need(2 * _MIN_FILE_BYTES)} of free space "
            f"to measure, have {format_bytes(free_bytes)}: free some, or use another disk"
        )
    try:
        fd, path = tempfile.mkstemp(prefix=".lohan_fx-", dir=directory)
    except OSError as error:
        raise StorageError(
            f"SSD directory {directory} is not writable ({error.strerror}): "
            "remount it or change its mode, or use another"
        ) from error
    direct = hasattr(os, "O_DIRECT")
    try:
        if direct:
            direct_fd = os.open(path, os.O_RDWR | os.O_DIRECT)
            os.close(fd)
            fd = direct_fd
    except OSError as error:
        if error.errno != errno.EINVAL:
            os.close(fd)
            raise StorageError(f"SSD directory {directory}: {error}") from error
        direct = False
    finally:
        os.unlink(path)
    try:
        if not direct or _is_in_memory(directory):
            warnings.warn(
                f"{directory} is in memory (tmpfs) or refuses O_DIRECT: measured through the page "
                "cache, so its rates, the read rate above all, are not a disk's; name another",
                stacklevel=2,
            )
        buffers = [mmap.mmap(-1, _SSD_BLOCK_BYTES) for _ in range(_SSD_THREADS)]  # page-aligned
        for buffer in buffers:
            buffer[:] = pattern
        yield _TestFile(
            directory=directory,
            fd=fd,
            direct=direct,
            num_blocks=num_bytes // _SSD_BLOCK_BYTES,
            buffers=buffers,
        )
    finally:
        os.close(fd)


def _ssd_bytes_per_s(
    files: Sequence[_TestFile], action: Literal["read", "write"], cap_s: float
) -> float:
    """Median over passes through all files at once. Reads only what was written: a hole in a
    file is read without touching the disk."""
    deadline = time.perf_counter() + cap_s
    rates: list[float] = []
    with closing(IoPool(_SSD_THREADS * len(files))) as pool:
        while not rates or (time.perf_counter() < deadline and len(rates) < 5):
            start = time.perf_counter()
            moved_bytes: list[int] = []
            passes = [
                partial(_ssd_pass, file, action, thread, deadline, moved_bytes)
                for file in files
                for thread in range(_SSD_THREADS)
            ]
            pool.submit(passes).result()
            for file in files:
                if action == "write" and not file.direct:
                    os.fsync(file.fd)
            rates.append(sum(moved_bytes) / (time.perf_counter() - start))
            for file in files:
                if not file.direct and hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    # A pass that the deadline cut short is a sample as good as the others, only shorter.
    return statistics.median(rates)


def _ssd_pass(
    file: _TestFile,
    action: Literal["read", "write"],
    thread: int,
    deadline: float,
    moved_bytes: list[int],
) -> None:
    """Move every `_SSD_THREADS`-th block, at least one; append the bytes moved."""
    blocks = range(file.num_blocks) if action == "write" else sorted(file.written)
    move = os.pwritev if action == "write" else os.preadv
    for block in blocks[thread::_SSD_THREADS]:
        try:
            count = move(file.fd, [file.buffers[thread]], block * _SSD_BLOCK_BYTES)
        except OSError as error:
            raise StorageError(f"{action} in {file.directory} failed: {error.strerror}") from error
        if count != _SSD_BLOCK_BYTES:
            raise StorageError(
                f"short {action} in {file.directory}: {format_bytes(count)} of "
                f"{format_bytes(_SSD_BLOCK_BYTES)}: is the disk full, or failing?"
            )
        if action == "write":
            file.written.add(block)
        moved_bytes.append(count)
        if time.perf_counter() > deadline:
            break
