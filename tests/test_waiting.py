"""Threads wait for each other, and an interrupt keeps none waiting for ever."""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import lohan_fx
from lohan_fx.runtime.lane import RankedLane, Ticket
from lohan_fx.runtime.waiting import Future, Latch


def run(module: str, *arguments: str, timeout: float) -> None:
    """In a process of its own: what hangs cannot be ended in this one."""
    ended = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-500:] + ended.stderr[-5000:]


def interrupt(how: str, amount: float) -> None:
    run("tests.interrupts", how, str(amount), timeout=120 + 4 * amount)


def test_garbage_is_collected_where_nobody_may_wait(tmp_path: Path) -> None:
    run("tests.collected", str(tmp_path), timeout=500)


@pytest.mark.parametrize(("how", "amount"), [("traced", 3), ("signals", 0.25)])
def test_interrupts_leave_no_lock_behind(how: str, amount: float) -> None:
    """At every third place, and at random moments for some time."""
    interrupt(how, amount)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "amount"), [("traced", 1), ("signals", 20)])
def test_interrupts_leave_no_lock_behind_for_long(how: str, amount: float) -> None:
    interrupt(how, amount)


def test_nothing_is_waited_for_with_a_condition() -> None:
    """An interrupt would leave its lock taken: see `runtime.waiting`."""
    broken = {
        *(f"threading.{name}" for name in ("Barrier", "Condition", "Event", "Semaphore")),
        *(f"queue.{name}" for name in ("LifoQueue", "PriorityQueue", "Queue")),
    }
    for path in Path(lohan_fx.__file__).parent.rglob("*.py"):
        used: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                used.add(f"{node.value.id}.{node.attr}")
            elif isinstance(node, ast.ImportFrom):
                used |= {f"{node.module}.{alias.name}" for alias in node.names}
        assert not used & broken, path
        assert not any(name.startswith("concurrent.futures.") for name in used), path


def test_a_latch_lets_all_go_on_that_wait() -> None:
    latch = Latch()
    assert not latch.wait(0.001)  # who gave up is not missed
    threads = [threading.Thread(target=latch.wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    latch.open()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert latch.wait()


def test_a_future_calls_back_once_and_settles_after_that() -> None:
    future = Future()
    order: list[str] = []
    go_on = threading.Event()

    def late(ended: Future) -> None:
        assert ended.exception() is error
        assert go_on.wait(10)
        order.append("called back")

    def fails(_: Future) -> None:
        raise ValueError

    error = OSError("it failed")
    future.add_done_callback(fails)
    future.add_done_callback(late)
    with pytest.raises(TimeoutError):
        future.result(0.001)
    ends = threading.Thread(target=future.finish, args=(error,))
    ends.start()
    with pytest.raises(OSError, match="it failed"):
        future.result(10)
    go_on.set()
    future.settle()
    order.append("settled")
    assert order == ["called back", "settled"]
    future.add_done_callback(lambda _: order.append("at once"))
    assert order[-1] == "at once"
    ends.join(10)


def test_a_ranked_lane_is_drained_behind_what_waits_for_its_input() -> None:
    lane = RankedLane("test")
    ready, also = Ticket(), Ticket()
    try:
        held = threading.Event()
        lane.submit(lambda: bool(held.wait(10)))  # type: ignore[arg-type, return-value]
        job = lane.submit_ranked(ready.synchronize, None, ready, (also,))
        drains = threading.Thread(target=lane.drain)
        drains.start()
        held.set()
        drains.join(0.05)
        assert drains.is_alive()
        ready.finish()
        drains.join(10)
        assert not drains.is_alive()
        assert job.done()
    finally:
        lane.close()
