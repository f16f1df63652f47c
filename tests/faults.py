"""Faults on purpose: the k-th system call fails, ends short or hangs; an interrupt anywhere.

`Faults` stands in the place of `ssd.Syscalls`, the one seam that all transfers go through, and
counts. `interrupted` raises KeyboardInterrupt at the k-th place that a thread comes to, as a signal
would: in lohan_fx, and in what the standard library has in Python for threads that share something,
where an interrupt may leave a lock behind.

CPython looks for signals when a function begins, when a call has returned and when a loop jumps
back. Here every line counts, and the end of a function: a bit more than that, but where lines are
excepted (`headers`) no signal is taken, and between the calls of one line one may be, which only
real signals meet (`tests.interrupts`, `test_interrupts.test_a_signal_from_outside`).
"""

from __future__ import annotations

import ast
import concurrent.futures
import errno
import functools
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import pytest

import lohan_fx
from lohan_fx.runtime import ssd

Call = Literal["open", "fallocate", "preadv", "pwritev", "fdatasync"]
PACKAGES = (
    str(Path(lohan_fx.__file__).parent),
    str(Path(concurrent.futures.__file__).parent),
    str(threading.__file__),
    str(queue.__file__),
)


@dataclass
class Fault:
    """What happens to calls number `at`, `at` + 1, … `at` + `times` − 1 of one kind.

    `code`: they fail with this errno; 0: they end after one sector, or after `hang_s` seconds.
    """

    call: Call
    at: int
    times: int = 1_000_000
    code: int = errno.EIO
    hang_s: float = 0.0
    interrupt: bool = False


@dataclass
class Faults:
    """Counts system calls of the SSD tier, and lets some of them go wrong."""

    fault: Fault | None = None
    counts: dict[str, int] = field(default_factory=dict)
    happened: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def strikes(self, call: str) -> Fault | None:
        """Count a call; the fault if it is its turn."""
        with self._lock:
            k = self.counts[call] = self.counts.get(call, 0) + 1
            fault = self.fault
            if fault is None or fault.call != call or not 0 <= k - fault.at < fault.times:
                return None
            self.happened += 1
        if fault.hang_s:
            time.sleep(fault.hang_s)
            return None
        if fault.interrupt:
            raise KeyboardInterrupt
        if fault.code:
            raise OSError(fault.code, os.strerror(fault.code))
        return fault

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Let every `ssd.Syscalls` go through here."""

        def wrap(call: str) -> None:
            original = getattr(ssd.Syscalls, call)

            def wrapper(calls: ssd.Syscalls, first: Any, *rest: Any) -> Any:
                short = self.strikes(call)
                if short is not None:  # the first sector only
                    buffers, offset = rest
                    return original(calls, first, [buffers[0][:4096]], offset)
                return original(calls, first, *rest)

            patch.setattr(ssd.Syscalls, call, wrapper)

        for call in ("open", "fallocate", "preadv", "pwritev", "fdatasync"):
            wrap(call)


@functools.cache
def headers(path: str) -> frozenset[int]:
    """The lines of a file's `with` statements: they run again when the block is left, before
    `__exit__`, where CPython takes no signal (it takes one in `__exit__`, if that is Python)."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(Path(path).read_text())):
        if isinstance(node, ast.With):
            found.update(range(node.lineno, node.body[0].lineno))
    return frozenset(found)


class Places:
    """Counts the places at which a signal could strike this thread: calls, returns and lines.
    Interrupts it at one of them."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.count = 0
        self.place = ""

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        path = frame.f_code.co_filename
        if not path.startswith(PACKAGES):
            return None
        returns = event == "return" and arg is not None
        if event == "call" or returns or (event == "line" and frame.f_lineno not in headers(path)):
            self.count += 1
            if self.count == self.at:
                self.place = f"{event} {Path(path).name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self


@contextmanager
def interrupted(at: int = 0) -> Iterator[Places]:
    """Raise KeyboardInterrupt at that place, counted from 1 at the block's begin."""
    places = Places(at)
    before = sys.gettrace()
    sys.settrace(places)
    try:
        yield places
    finally:
        sys.settrace(before)
