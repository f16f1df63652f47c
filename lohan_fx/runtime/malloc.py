"""Make freed CPU tensors leave the process, so that a device budget on a CPU means something.

glibc gives memory back at once only for allocations that it maps on their own. It starts with
those above 128 KiB, but raises that limit up to 32 MiB whenever a larger one is freed; from then
on tensors come from its heaps, and what dies in the middle of a heap stays resident.
"""

from __future__ import annotations

import ctypes
import os

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
