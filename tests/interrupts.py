"""Interrupts what threads share, again and again, and sees that everybody goes on. A process of its
own (python -m tests.interrupts traced every | signals seconds), which ends with all stacks if it
hangs."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lohan_fx.atomic import TensorFile
from lohan_fx.runtime.arena import Arena, BufferRing, Region
from lohan_fx.runtime.lane import Lane, RankedLane, Ticket
from lohan_fx.runtime.lanes import Lanes
from lohan_fx.runtime.ssd import IoPool
from lohan_fx.runtime.waiting import Future
from tests.faults import interrupted

HANGS_S = 10
PAGE = 4096


class Shared:
    """One of each, and what the main thread does with it."""

    def __init__(self) -> None:
        self.lane, self.ranked, self.pool = Lane("lane"), RankedLane("ranked"), IoPool(2)
        self.ring = BufferRing(Arena(2 * PAGE, pin=False), Region(0, 2 * PAGE, "ring"), 2)
        self.in_flight: set[Future] = set()
        self.made: list[Arena | IoPool | Lanes] = []  # by `touch` and `make`
        self.there = Ticket()
        self.there.finish()
        self.num_threads = len(ours())

    def submit(self) -> None:
        self.lane.submit(_nothing).settle()

    def drain(self) -> None:
        self.ranked.submit_ranked(_nothing, 1, self.there)
        self.ranked.drain()

    def borrow(self) -> None:
        for _ in range(3):  # waits for the first one
            buffer = self.ring.acquire()
            self.lane.submit(lambda b=buffer: self.ring.release(b))  # type: ignore[misc]
        self.lane.drain()

    def transfer(self) -> None:
        future = self.pool.submit([_nothing] * 3, in_flight=self.in_flight)
        future.add_done_callback(_nothing)
        future.settle()
        _ = self.pool.counters

    def touch(self) -> None:
        self.made.append(Arena(17 << 20, pin=False, available_bytes=1 << 30))

    def make(self) -> None:
        if self.made:
            time.sleep(HANGS_S)  # for the signal
        self.made.append(Lanes(torch.device("cpu")))
        self.made.append(IoPool(2))

    def save(self) -> None:
        with Path(os.devnull).open("wb") as file:
            TensorFile("file", {"x": torch.zeros(1 << 20)}, {}).write(file, _nothing)

    def check(self) -> None:
        """All are as new."""
        self.lane.drain()
        self.ranked.drain()
        for future in self.in_flight.copy():
            future.settle()
        self.ring.reset()
        self.submit()
        self.drain()
        self.borrow()
        self.transfer()
        while self.made:
            self.made.pop().close()
        while len(ours()) > self.num_threads:  # what was begun ends by itself
            time.sleep(1e-4)

    def close(self) -> None:
        self.lane.close()
        self.ranked.close()
        self.pool.close()


def ours() -> list[str]:
    """Names of threads of lohan_fx."""
    return [t.name for t in threading.enumerate() if t.name.startswith("lohan_fx")]


def say(line: str) -> None:
    """For whoever looks for the place of a hang."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _nothing(*_: object) -> None:
    pass


def traced(do: Callable[[], None], check: Callable[[], None], every: int) -> int:
    """Interrupt at every line, call and return, or at every second, …"""
    with interrupted() as counted:
        do()
    check()
    for at in range(1, counted.count + 1, every):
        time.sleep(0.001)  # threads have nothing to do and sleep
        with interrupted(at) as places:
            try:
                do()
            except KeyboardInterrupt:
                say(places.place)
        faulthandler.dump_traceback_later(HANGS_S, exit=True)
        check()
    return len(range(1, counted.count + 1, every))


def signals(do: Callable[[], None], check: Callable[[], None], seconds: float) -> int:
    """Interrupt by signals at random moments, between any two instructions of Python."""
    chance = random.Random(0)
    count = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        faulthandler.dump_traceback_later(HANGS_S, exit=True)
        try:
            signal.setitimer(signal.ITIMER_REAL, 2e-5 + chance.random() * 3e-4)
            while True:
                do()
        except KeyboardInterrupt:
            count += 1
        check()
    return count


def main(how: str, amount: float) -> None:
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    shared = Shared()
    for name in ("submit", "drain", "borrow", "transfer", "touch", "make", "save"):
        do = getattr(shared, name)
        say(name)
        check = shared.check
        count = traced(do, check, int(amount)) if how == "traced" else signals(do, check, amount)
        assert count > 10
        say(f"{count} interrupts")
    shared.close()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
