"""Adam and AdamW in one pass over host memory, and sums of gradients, without Python's lock.

`library` builds `adam.cpp` with the system's C++ compiler once a machine and loads it through
ctypes, which lets go of the GIL for the whole call. Where there is no compiler the optimizer runs
torch's own kernels, chunk by chunk, at a third of the rate or less.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import logging
import math
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lohan_fx import progress

logger = logging.getLogger("lohan_fx")

_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
    "-pthread",
)

_DTYPES = {None: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


_VECTOR = 8
"""Float32 elements in a vector of torch's CPU kernels (of their remainder loop, with AVX-512)."""


class _Tensors(ctypes.Structure):
    """`Tensors` of adam.cpp."""

    _fields_ = (
        ("master", ctypes.c_void_p),
        ("exp_avg", ctypes.c_void_p),
        ("exp_avg_sq", ctypes.c_void_p),
        ("max_exp_avg_sq", ctypes.c_void_p),
        ("new_master", ctypes.c_void_p),
        ("new_exp_avg", ctypes.c_void_p),
        ("new_exp_avg_sq", ctypes.c_void_p),
        ("new_max_exp_avg_sq", ctypes.c_void_p),
        ("sum", ctypes.c_void_p),
        ("gradient", ctypes.c_void_p),
        ("copy", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("tail", ctypes.c_int64),
        ("gradient_dtype", ctypes.c_int32),
        ("copy_dtype", ctypes.c_int32),
        ("lr", ctypes.c_double),
        ("beta1", ctypes.c_double),
        ("beta2", ctypes.c_double),
        ("eps", ctypes.c_double),
        ("weight_decay", ctypes.c_double),
        ("step", ctypes.c_double),
        ("decoupled", ctypes.c_int32),
        ("maximize", ctypes.c_int32),
        ("factor", ctypes.c_float),
        ("limit", ctypes.c_float),
        ("squares", ctypes.c_double),
    )


class _Part(ctypes.Structure):
    """`Part` of adam.cpp."""

    _fields_ = (
        ("total", ctypes.c_void_p),
        ("gradient", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("begins", ctypes.c_int32),
        ("squares", ctypes.c_double),
    )


class Addend(NamedTuple):
    """A gradient and the float32 total to which it is added, in host memory; of one size, and lying
    in memory alike, without gaps. `begins`: the total begins with it."""

    total: Tensor
    gradient: Tensor
    begins: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where an update's results go, if not where they come from: float32, as the states are."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One parameter's update. Tensors are contiguous, in one memory and of one size.

    Attributes:
        master, exp_avg, exp_avg_sq, max_exp_avg_sq: float32; the last is None without amsgrad.
        gradient, copy: float32, bfloat16 or float16; no copy is written if it is None.
        target: None: master and states are updated in place.
        sum: float32: the gradient is added to it first; it stays as it is. None: there is none.
        step: number of this update, from 1.
        decoupled: AdamW; else Adam.
        factor, limit: the gradient is multiplied by `factor`, then brought into [-limit, limit]
            (1.0 and inf: it is left as it is), in float32.
    """

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None
    gradient: Tensor
    copy: Tensor | None
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: float
    decoupled: bool
    maximize: bool
    factor: float = 1.0
    limit: float = math.inf
    target: Target | None = None
    sum: Tensor | None = None

    def supported(self) -> bool:
        """Whether the kernel can run it."""
        states = [self.master, self.exp_avg, self.exp_avg_sq]
        if self.max_exp_avg_sq is not None:
            states.append(self.max_exp_avg_sq)
        if self.target is not None:
            states += [self.target.master, self.target.exp_avg, self.target.exp_avg_sq]
            if self.max_exp_avg_sq is not None:
                if self.target.max_exp_avg_sq is None:
                    return False
                states.append(self.target.max_exp_avg_sq)
        if self.sum is not None:
            states.append(self.sum)
        others = [self.gradient] if self.copy is None else [self.gradient, self.copy]
        return (
            all(t.dtype == torch.float32 for t in states)
            and all(t.dtype in _DTYPES for t in others)
            and all(map(self._fits, states + others))
        )

    def _fits(self, tensor: Tensor) -> bool:
        return (
            tensor.layout is torch.strided
            and tensor.device == self.master.device
            and tensor.shape == self.master.shape
            and tensor.is_contiguous()
        )

    def _packed(self) -> _Tensors:
        def address(tensor: Tensor | None) -> int | None:
            return None if tensor is None else tensor.data_ptr()

        target = self.target
        return _Tensors(
            new_master=None if target is None else address(target.master),
            new_exp_avg=None if target is None else address(target.exp_avg),
            new_exp_avg_sq=None if target is None else address(target.exp_avg_sq),
            new_max_exp_avg_sq=None if target is None else address(target.max_exp_avg_sq),
            master=address(self.master),
            exp_avg=address(self.exp_avg),
            exp_avg_sq=address(self.exp_avg_sq),
            max_exp_avg_sq=address(self.max_exp_avg_sq),
            sum=address(self.sum),
            gradient=address(self.gradient),
            copy=address(self.copy),
            size=self.master.numel(),
            tail=self.master.numel() % _VECTOR,
            gradient_dtype=_DTYPES[self.gradient.dtype],
            copy_dtype=_DTYPES[None if self.copy is None else self.copy.dtype],
            lr=self.lr,
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            step=self.step,
            decoupled=self.decoupled,
            maximize=self.maximize,
            factor=self.factor,
            limit=self.limit,
        )


class AdamKernel:
    """The loaded library and its threads.

    Args:
        path: the shared library.
        num_threads: threads of one update, the caller's among them.
    """

    def __init__(self, path: Path, num_threads: int) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.lohan_pool_new.argtypes = [ctypes.c_int]
        self._library.lohan_pool_new.restype = ctypes.c_void_p
        self._library.lohan_pool_delete.argtypes = [ctypes.c_void_p]
        self._library.lohan_pool_delete.restype = None
        self._library.lohan_adam.argtypes = [
            ctypes.c_void_p,
            ctypes.POINTER(_Tensors),
            ctypes.c_int64,
            ctypes.c_int32,
        ]
        self._library.lohan_adam.restype = ctypes.c_int
        self._library.lohan_add.argtypes = [
            ctypes.c_void_p,
            ctypes.POINTER(_Part),
            ctypes.c_int64,
            ctypes.c_int32,
            ctypes.c_int32,
        ]
        self._library.lohan_add.restype = ctypes.c_int
        self.has_half = bool(self._library.lohan_has_half())
        self.num_threads = num_threads
        self._pool = self._library.lohan_pool_new(num_threads)
        if not self._pool:
            raise OSError(f"the system refused {num_threads} threads for the CPU optimizer")

    def run(self, updates: Sequence[Update], *, squared: bool = False) -> list[float]:
        """Update all parameters. Calls from several threads run one after the other.

        Returns:
            with `squared`: of each gradient, with its sum and before `factor` and `limit`, the sum
            of squares in float64: what `add` would find, to the bit.

        Raises:
            MemoryError: no memory for the list of parameters; nothing has changed.
        """
        packed = (_Tensors * len(updates))(*(update._packed() for update in updates))
        if self._library.lohan_adam(self._pool, packed, len(updates), squared):
            raise MemoryError(f"no memory to list {len(updates)} parameters for their update")
        return [update.squares for update in packed] if squared else []

    def takes(self, total: Tensor, gradient: Tensor) -> bool:
        """Whether the kernel can add a gradient to a total: they lie in memory alike."""
        return (
            total.dtype == torch.float32
            and gradient.dtype in _DTYPES
            and (gradient.dtype != torch.float16 or self.has_half)
            and total.device.type == gradient.device.type == "cpu"
            and total.shape == gradient.shape
            and total.stride() == gradient.stride()
        )

    def add(self, addends: Sequence[Addend], *, squared: bool = False) -> list[float]:
        """Add gradients to totals, of which it `takes` all.

        Returns:
            with `squared`: of each total, the sum of squares of what it is then, in float64; the
            same for any number of threads. It takes no second pass over them.

        Raises:
            MemoryError: no memory for the list of gradients; nothing has changed.
        """
        return self._add(addends, squared=squared, written=True)

    def squares(self, addends: Sequence[Addend]) -> list[float]:
        """What `add` would return, to the bit; totals stay as they are.

        Raises:
            MemoryError: as `add`.
        """
        return self._add(addends, squared=True, written=False)

    def _add(self, addends: Sequence[Addend], *, squared: bool, written: bool) -> list[float]:
        parts = (_Part * len(addends))(
            *(
                _Part(
                    total=total.data_ptr(),
                    gradient=gradient.data_ptr(),
                    size=total.numel(),
                    dtype=_DTYPES[gradient.dtype],
                    begins=begins,
                )
                for total, gradient, begins in addends
            )
        )
        if self._library.lohan_add(self._pool, parts, len(addends), squared, written):
            raise MemoryError(f"no memory to list {len(addends)} gradients for their addition")
        return [part.squares for part in parts] if squared else []

    def close(self) -> None:
        """Join the threads. No call may be running."""
        self._library.lohan_pool_delete(self._pool)
        self._pool = None


@functools.cache
def kernel() -> AdamKernel | None:
    """The process's kernel, built at the first call; None where it cannot be built."""
    try:
        return AdamKernel(library(), max(1, torch.get_num_threads()))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or b""
        last = said.decode(errors="replace").strip().splitlines()[-1:]
        logger.warning(
            "lohan_fx: no compiled CPU optimizer, torch's kernels run instead: %s",
            "; ".join([str(error), *last]),
        )
        return None


os.register_at_fork(after_in_child=kernel.cache_clear)  # threads stay behind


def library() -> Path:
    """Build the library unless this machine has it; return its path.

    Raises:
        OSError: no compiler, or no folder to write to.
        subprocess.SubprocessError: the compiler failed or took more than two minutes.
    """
    compiler = shlex.split(os.environ.get("CXX", ""))  # may hold options
    compiler = compiler or [c for c in map(shutil.which, ("g++", "clang++")) if c][:1]
    if not compiler:
        raise FileNotFoundError("no C++ compiler: install g++, or set CXX")
    source = resources.files(__package__).joinpath("adam.cpp").read_bytes()
    key = hashlib.sha256(source)
    for part in (*compiler, *_FLAGS, _processor()):
        key.update(part.encode() + b"\0")
    folder = _cache()
    found = folder / f"adam-{key.hexdigest()[:24]}.so"
    if not found.exists():
        progress.report("compiling the CPU optimizer")
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch, "adam.so")
            subprocess.run(
                [*compiler, *_FLAGS, "-x", "c++", "-", "-o", str(made)],
                input=source,
                check=True,
                capture_output=True,
                timeout=120,
            )
            made.replace(found)  # atomic: processes that build at once do not meet
    return found


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    wanted = ("model name", "flags", "Features")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def _cache() -> Path:
    """A folder of this user's alone: what lies there is loaded as code."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base, "lohan_fx")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        private = found.st_uid == os.getuid() and not found.st_mode & 0o022
        if private and os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    made = Path(tempfile.mkdtemp(prefix="lohan_fx-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made
