"""Allocators set so that a device budget means something.

On CUDA: expandable segments, so that the gaps between tensors of many sizes do not add up to
gigabytes beyond the budget. On a CPU: freed tensors leave the process.

glibc gives memory back at once only for allocations that it maps on their own. It starts with
those above 128 KiB, but raises that limit up to 32 MiB whenever a larger one is freed; from then
on tensors come from its heaps, and what dies in the middle of a heap stays resident.
"""

from __future__ import annotations

import ctypes
import os

from lohan_fx._compat import set_cuda_allocator

_M_MMAP_THRESHOLD = -3  # <malloc.h>
_THRESHOLD_BYTES = 2**20


def return_freed_memory() -> bool:
    """Fix glibc's limit at 1 MiB for this process; tensors above it are unmapped when they die.

    A limit that the user set (``MALLOC_MMAP_THRESHOLD_``) stays. False where malloc has no such
    setting (musl maps large allocations on their own anyway).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES))


def expand_segments() -> bool:
    """Let CUDA's caching allocator grow and shrink its segments, for this process.

    What the user set (``PYTORCH_ALLOC_CONF``, ``PYTORCH_CUDA_ALLOC_CONF``) stays.
    """
    if "PYTORCH_ALLOC_CONF" in os.environ or "PYTORCH_CUDA_ALLOC_CONF" in os.environ:
        return False
    return set_cuda_allocator("expandable_segments:True")
