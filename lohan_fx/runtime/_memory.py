"""Raw memory as torch tensors: libc's mmap, and 4096-byte alignment.

`mmap.mmap` cannot place a mapping at a chosen address, and unmaps before its weak references
are told; so the runtime calls libc.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections.abc import Callable

import torch

ALIGNMENT = 4096
"""Bytes. O_DIRECT transfers, regions of the host slab and logical file ranges start and end
at multiples of it."""

HUGE_PAGE_BYTES = 2 << 20
"""Of x86-64, and of Arm with pages of 4 KiB. Elsewhere memory is aligned to it, and as good."""

_not_inherited: dict[int, int] = {}
"""Memory of `map_for_device` whose content a forked child lacks: address to bytes."""

_SHARED_PIECE_BYTES = 256 << 20
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_NO_ACCESS = 0
_MAP_FIXED = 0x10  # Linux, all architectures; not in Python's mmap module
_MADV_WIPEONFORK, _MADV_KEEPONFORK = 18, 19  # Linux 4.14
_MREMAP_TO = 0x3  # MREMAP_MAYMOVE | MREMAP_FIXED
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def round_up(num_bytes: int) -> int:
    """Return the smallest multiple of `ALIGNMENT` that is at least `num_bytes`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def map_anonymous(num_bytes: int) -> int:
    """Map zeroed memory and return its address; OSError when the system has none.

    The memory is shared: O_DIRECT and DMA into private memory are unsafe across a fork (see
    open(2)), and DataLoader workers fork. It consists of adjacent mappings, because page
    faults of several threads in one shared mapping wait for each other.
    """
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_FIXED
    base = reserve_addresses(num_bytes)
    try:
        for start in range(0, num_bytes, _SHARED_PIECE_BYTES):
            length = min(_SHARED_PIECE_BYTES, num_bytes - start)
            _mmap(base + start, length, _READ_WRITE, flags, -1, 0)
    except OSError:
        unmap(base, num_bytes)
        raise
    return base


def map_for_device(num_bytes: int) -> int:
    """Map zeroed memory that a device is to read and write, and return its address; OSError when
    the system has none.

    It is in huge pages where the system gives them to those who ask (`transparent_hugepage`:
    "madvise" or "always"); shared memory has a switch of its own (`shmem_enabled`), which is off
    nearly everywhere. They are why it is private: the CPU optimizer streams through gigabytes, and
    does so faster beside the device's copies (benchmarks/gpu/LOG.md). A page that is copied on
    write after a fork would leave the device with the old one, so forked children have the
    addresses, but not what is there, until `inherit`: they get SIGSEGV if they touch it.
    """
    base = reserve_addresses(num_bytes + HUGE_PAGE_BYTES)
    address = -(-base // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = -(-(address + num_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    unmap(base, address - base)
    unmap(end, base + num_bytes + HUGE_PAGE_BYTES - end)
    try:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        _mmap(address, num_bytes, _READ_WRITE, flags, -1, 0)
        try:
            _advise(address, num_bytes, _MADV_WIPEONFORK)
        except OSError:  # a kernel without it, as sandboxes have: the child has a gap there
            _advise(address, num_bytes, mmap.MADV_DONTFORK)
    except OSError:
        unmap(address, num_bytes)
        raise
    _not_inherited[address] = num_bytes
    with contextlib.suppress(OSError):  # a kernel without huge pages
        _advise(address, num_bytes, mmap.MADV_HUGEPAGE)
    return address


def inherit(address: int, num_bytes: int) -> None:
    """Let children that are forked from now on have memory of `map_for_device`, as a copy."""
    for advice in (_MADV_KEEPONFORK, mmap.MADV_DOFORK):
        with contextlib.suppress(OSError):  # the one that a kernel lacks
            _advise(address, num_bytes, advice)
    _not_inherited.pop(address, None)


def _close() -> None:
    """In a forked child: let it fault where it would read zeros for what its parent has there."""
    for address, num_bytes in _not_inherited.items():
        _libc.mprotect(address, num_bytes, _NO_ACCESS)


os.register_at_fork(after_in_child=_close)


def reserve_addresses(num_bytes: int) -> int:
    """Return the start of `num_bytes` of address space without memory, for `map_file_at`."""
    return _mmap(None, num_bytes, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)


def map_file_at(address: int, num_bytes: int, fd: int, offset: int) -> None:
    """Map `num_bytes` of a file, shared and writable, over reserved addresses."""
    _mmap(address, num_bytes, _READ_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd, offset)


def replace_pages(address: int, content: torch.Tensor) -> None:
    """Put new shared memory with `content` in the place of mapped pages, at once.

    `content` is uint8 on the CPU, in whole pages. OSError if the system refuses.
    """
    num_bytes = content.numel()
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
    made = _mmap(None, num_bytes, _READ_WRITE, flags, -1, 0)
    ctypes.memmove(made, content.data_ptr(), num_bytes)
    if _libc.mremap(made, num_bytes, num_bytes, _MREMAP_TO, address) == _MAP_FAILED:
        code = ctypes.get_errno()
        unmap(made, num_bytes)
        raise OSError(code, os.strerror(code))


def unmap(address: int, num_bytes: int) -> None:
    """Undo any of the mappings above."""
    _not_inherited.pop(address, None)
    if num_bytes > 0:
        _libc.munmap(address, num_bytes)


def forget_pages(tensor: torch.Tensor) -> None:
    """Take the pages of a shared file mapping out of this process's memory; a touch brings them
    back, with what was stored. `tensor` is uint8; only whole pages inside it go."""
    start = round_up(tensor.data_ptr())
    length = (tensor.data_ptr() + tensor.numel()) // ALIGNMENT * ALIGNMENT - start
    if length > 0:
        _libc.madvise(start, length, mmap.MADV_DONTNEED)


def tensor_over(address: int, num_bytes: int, release: Callable[[], None]) -> torch.Tensor:
    """Return a uint8 tensor over raw memory; `release` runs when its last view is collected.

    `release` does not run at interpreter exit: other exit handlers may still read the memory.
    """
    array = (ctypes.c_uint8 * num_bytes).from_address(address)
    weakref.finalize(array, release).atexit = False
    return torch.frombuffer(array, dtype=torch.uint8)


def _advise(address: int, num_bytes: int, advice: int) -> None:
    if _libc.madvise(address, num_bytes, advice) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _mmap(
    address: int | None, num_bytes: int, protection: int, flags: int, fd: int, offset: int
) -> int:
    result: int = _libc.mmap(address, num_bytes, protection, flags, fd, offset)
    if result == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
