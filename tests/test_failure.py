"""When something fails: the error is clear, nothing leaks, the run goes on or says how to go on.

Every test here lets something go wrong in the middle of training, then asks the same question as
a user would: are weights and optimizer states those of one step, bit for bit, or does the model
say that they are not, and how to go on?
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lohan_fx.errors import StepError, StorageError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.runtime import states
from lohan_fx.runtime.arena import BufferRing, PageLocker
from lohan_fx.runtime.lane import Lane, RankedLane, Ticket
from lohan_fx.runtime.ssd import IoPool, RunDirectory, StripedFile, striped_file
from lohan_fx.runtime.unit_updates import UnitUpdates
from lohan_fx.runtime.waiting import Future
from tests.failing import Resources, Run, pin_with, same, with_copies
from tests.faults import Fault, Faults
from tests.models import loss_of
from tests.training import (
    identical,
)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(striped_file, "_RETRIES_S", (0.001, 0.001, 0.001))


# -- a disk that fails -----------------------------------------------------------------------------


def assert_explains(error: StorageError, hw: HardwareProfile, code: int) -> None:
    text = str(error)
    assert re.search(r"(read|write) failed on ", text)
    assert str(hw.ssds[0].path) in text
    assert os.strerror(code) in text
    assert re.search(r"want \d+ bytes from \d+, got \d+", text)
    assert re.search("see dmesg|free some space", text)


@with_copies("ssd")
def test_reads_fail(
    schedule: str, where: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For good from the k-th of a step on, until the disk is back."""
    faults = Faults()
    faults.install(monkeypatch)
    run = Run(hw, monkeypatch, states=where, schedule=schedule)
    run.good_step()
    before = faults.counts["preadv"]
    run.good_step()
    each = faults.counts["preadv"] - before
    resources = Resources(run)
    outcomes = []
    for at in (1, 2, each // 3, each // 2, each * 2 // 3, each - 1):
        code = (errno.EIO, errno.ENODEV)[at % 2]
        faults.fault = Fault("preadv", faults.counts["preadv"] + at, code=code)
        try:
            run.step()
            run.model.lohan.sync()
        except StorageError as error:
            assert_explains(error, hw, code)
            faults.fault = None
            outcomes.append(run.go_on())
        else:
            assert not faults.happened
            run.done += 1
        faults.fault, faults.happened = None, 0
        run.good_step()
        resources.assert_back()
    assert "lost" in outcomes
    assert ("ended" in outcomes) == (schedule == "serial")
    assert ("torn" in outcomes) <= (schedule != "serial")
    run.close(hw)


@with_copies("ssd")
def test_writes_fail(
    schedule: str, where: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """States that cannot be written stay in host memory: the run goes on, bit for bit."""
    faults = Faults()
    faults.install(monkeypatch)
    run = Run(hw, monkeypatch, states=where, schedule=schedule, swap_to="host")
    run.good_step()
    before = faults.counts["pwritev"]
    run.good_step()
    each = faults.counts["pwritev"] - before
    memory = run.model.lohan.memory
    assert memory is not None
    units = memory.states.units
    parked = 0
    for at in (each, 1):  # one unit's, then everything's
        faults.fault = Fault("pwritev", faults.counts["pwritev"] + at, code=errno.ENOSPC)
        for _ in range(1 if at == each else 3):
            run.good_step()
        faults.fault = None
        run.good_step()
        assert parked < sum(u.parked for u in units)
        parked = sum(u.parked for u in units)
        assert (parked == len(units)) == (at == 1)
        held = sum(u.num_bytes for u in units if u.parked)
        assert run.model.lohan.metrics()["lohan/parked_bytes"] == held
    said = [r.getMessage() for r in caplog.records if "stay in host memory" in r.getMessage()]
    assert len(said) == parked
    assert all("No space left" in m and "save a checkpoint" in m for m in said)
    weights, state = run.plain.after(run.done)
    run.close(hw)
    assert same(run.model.state_dict(), weights)  # the model's still, after its end
    assert same(run.optimizer.state_dict(), state)


SUMS: list[dict[str, Any]] = [
    {"accumulate": 2, "schedule": "optimized"},  # a step of one backward: the sum is all there is
    {"accumulate": 2, "schedule": "serial"},
    {"accumulate": 2, "schedule": "deferred", "clip_grad_norm": 1e9},
    {"gradients": "kept", "schedule": "serial"},
    {"gradients": "kept", "schedule": "deferred"},
]


@pytest.mark.parametrize("options", SUMS, ids=lambda o: f"{next(iter(o))}-{o['schedule']}")
def test_writes_of_sums_fail(
    options: dict[str, Any], hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient sum that cannot be written stays in host memory with its unit."""
    faults = Faults()
    faults.install(monkeypatch)
    run = Run(hw, monkeypatch, swap_to="host", **options)
    run.good_step()
    units = run.model.lohan.memory.states.units  # type: ignore[union-attr]
    for times, parked in ((1, 1), (1_000_000, len(units))):
        # what a step writes first are sums: its states are written after its last backward
        at = faults.counts["pwritev"] + 1
        faults.fault = Fault("pwritev", at, times=times, code=errno.EROFS)
        torch.manual_seed(run.done)
        loss = loss_of(run.name, run.model(**run.inputs))
        loss.backward()
        run.model.lohan.memory.updater._wait_for_sums()  # type: ignore[union-attr]
        assert sum(u.parked for u in units) == parked
        run.optimizer.step()
        run.optimizer.zero_grad()
        assert identical(loss.detach(), run.plain.loss(run.done))
        run.done += 1
        run.check()
        faults.fault = None
        run.good_step()
    run.close(hw)


@pytest.mark.parametrize("options", SUMS[::3], ids=lambda o: next(iter(o)))
@pytest.mark.parametrize("reads", [True, False])
def test_writes_of_sums_fail_and_units_cannot_be_parked(
    options: dict[str, Any], reads: bool, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without memory for the unit, or the rest of it: the step is lost, weights are not."""
    faults = Faults()
    faults.install(monkeypatch)
    run = Run(hw, monkeypatch, swap_to="host", **options)
    run.good_step()
    if reads:
        monkeypatch.setattr(states, "available_host_bytes", lambda: 0)
    else:
        monkeypatch.setattr(StripedFile, "pread_here", _fails)
    faults.fault = Fault("pwritev", faults.counts["pwritev"] + 1, code=errno.ENOSPC)
    with pytest.raises(StorageError, match="write failed on"):
        run.step()
    faults.fault = None
    run.model.zero_grad()
    run.check()
    run.good_step()
    run.close(hw)


def _fails(*_: Any) -> None:
    raise StorageError("injected")


@with_copies("ssd")
def test_writes_fail_and_there_is_no_memory(
    schedule: str, where: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults()
    faults.install(monkeypatch)
    run = Run(hw, monkeypatch, states=where, schedule=schedule, swap_to="host")
    run.good_step()
    resources = Resources(run)
    monkeypatch.setattr(states, "available_host_bytes", lambda: 0)
    faults.fault = Fault("pwritev", faults.counts["pwritev"] + 1)
    with pytest.raises(StorageError) as caught:
        run.two_steps()
    assert_explains(caught.value, hw, errno.EIO)
    faults.fault = None
    assert run.go_on() == "torn"
    run.good_step()
    resources.assert_back()
    run.close(hw)


def test_offloads_fail(hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations that cannot be written: the step is lost, the model is not."""
    faults = Faults()
    faults.install(monkeypatch)
    run = Run(hw, monkeypatch, states="host")
    for _ in range(3):
        run.good_step()
        faults.fault = Fault("pwritev", faults.counts["pwritev"] + 1)
        with pytest.raises(StorageError) as caught:
            run.step()
        assert_explains(caught.value, hw, errno.EIO)
        faults.fault = None
        assert run.go_on() in ("lost", "torn")
    run.good_step()
    run.close(hw)


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
@pytest.mark.parametrize("how", ["twice", "short", "late", "interrupted"])
def test_faults_that_pass(
    how: str, call: Any, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors that pass, short counts and a slow disk change nothing. Nor does an interrupt on a
    thread of ours, which cannot happen: it is an error like any other."""
    faults = Faults()
    faults.install(monkeypatch)
    run = Run(hw, monkeypatch)
    run.good_step()
    for k in range(4):
        at = faults.counts[call] + 1 + 2 * k
        if how == "interrupted":
            faults.fault = Fault(call, at, times=1, interrupt=True)
            with contextlib.suppress(KeyboardInterrupt):
                run.step()
                run.model.lohan.sync()
            run.go_on()
        else:
            faults.fault = {
                "twice": Fault(call, at, times=2),
                "short": Fault(call, at, times=9, code=0),
                "late": Fault(call, at, times=2, hang_s=0.05),
            }[how]
            run.good_step()
        assert faults.happened
        faults.happened = 0
    faults.fault = None
    run.good_step()
    run.close(hw)


def data_files(hw: HardwareProfile) -> list[Path]:
    return sorted(Path(hw.ssds[0].path).rglob("*.stripes"))


def test_a_file_that_is_cut_behind_our_back(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error, and not a killed process: mappings must not be touched then."""
    run = Run(hw, monkeypatch)
    run.good_step()
    (path,) = [p for p in data_files(hw) if p.name.startswith("states")]
    os.truncate(path, 8192)
    for use in (run.step, run.model.state_dict, run.optimizer.state_dict):
        with pytest.raises(
            StorageError, match=rf"{path}.* was cut to 8192 of its \d+ bytes.*dmesg"
        ):
            use()
    run.model.lohan.memory.file.close()  # type: ignore[union-attr]


def test_a_write_never_fills_the_hole_of_a_cut_file(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would read as zeros."""
    run = Run(hw, monkeypatch, states="host")
    run.good_step()
    (path,) = data_files(hw)
    os.truncate(path, 0)
    with pytest.raises(StorageError, match=r"write failed on .* was cut to 0 of its"):
        run.step()
    assert path.stat().st_size == 0


def test_a_directory_that_is_removed_behind_our_back(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files without a name are files still; closing finds nothing to remove."""
    run = Run(hw, monkeypatch)
    run.good_step()
    for path in data_files(hw):
        path.unlink()
    for path in Path(hw.ssds[0].path).rglob("*.lock"):
        path.unlink()
    for _ in range(2):
        run.good_step()
    run.close(hw)


# -- threads that end ------------------------------------------------------------------------------


def end_thread(thread: threading.Thread) -> None:
    """Raise SystemExit in a thread; it comes when the thread next runs Python."""
    assert thread.ident is not None
    set_error = ctypes.pythonapi.PyThreadState_SetAsyncExc
    assert set_error(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)) == 1


ENDED = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@ENDED
@pytest.mark.parametrize("name", ["optimizer", "d2h", "h2d"])
def test_a_lane_that_is_ended(
    name: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for it gets an error, and nobody waits for ever."""
    run = Run(hw, monkeypatch)
    run.good_step()
    (thread,) = [t for t in threading.enumerate() if t.name == f"lohan_fx-{name}"]
    end_thread(thread)
    with pytest.raises((StepError, StorageError), match=r"thread is gone|was ended"):
        run.two_steps()
    thread.join(10)
    with pytest.raises(
        (StepError, StorageError), match=r"is gone.*a checkpoint|between two steps|was ended"
    ):
        run.step()
    run.close(hw)


@ENDED
def test_threads_for_the_disk_that_are_ended(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(hw, monkeypatch)
    run.good_step()
    for thread in threading.enumerate():
        if "lohan_fx-io" in thread.name:
            end_thread(thread)
    for _ in range(2):
        with pytest.raises((StorageError, StepError)):
            run.step()
    run.close(hw)


@ENDED
def test_a_thread_for_the_disk_that_is_ended_in_a_callback() -> None:
    """What waits for its transfer goes on, and callbacks behind that one are called."""
    pool = IoPool(1)
    begin = threading.Event()
    in_flight: set[Future] = set()
    called: list[Future] = []
    future = pool.submit([lambda: bool(begin.wait(10))], in_flight=in_flight)  # type: ignore[list-item, return-value]
    future.add_done_callback(lambda _: end_thread(threading.current_thread()))
    future.add_done_callback(called.append)
    begin.set()
    waits = threading.Thread(target=future.settle, daemon=True)
    waits.start()
    waits.join(10)
    assert not waits.is_alive()
    assert called == [future]
    pool._threads[0].join(10)
    assert not in_flight
    with pytest.raises(StorageError, match="threads are closed"):
        pool.submit([lambda: None]).result(10)
    pool.close()


@ENDED
@pytest.mark.parametrize("place", ["release", "exception"])
def test_a_thread_for_the_disk_that_is_ended_when_a_write_has_ended(
    place: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In what follows on the write: buffers are given back, tickets signalled."""
    run = Run(hw, monkeypatch)
    run.good_step()
    owner: type = BufferRing if place == "release" else Future
    original = getattr(owner, place)

    def ends(*args: Any) -> Any:
        if "lohan_fx-io" in threading.current_thread().name:
            end_thread(threading.current_thread())
        return original(*args)

    monkeypatch.setattr(owner, place, ends)
    for _ in range(2):
        with pytest.raises((StorageError, StepError)):
            run.step()
    run.close(hw)


@ENDED
def test_what_waits_for_a_lane_that_is_ended_fails() -> None:
    lost = threading.Event()
    lane = RankedLane("test", on_lost=lost.set)
    lane.submit(lambda: None).synchronize()
    first, also = Ticket(), Ticket()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # the thread is ended when it has the first job, after this
    try:
        end_thread(lane._thread)
        lane.submit(first.finish, first)
        ranked = lane.submit_ranked(also.finish, 1, first, (also,))
    finally:
        sys.setswitchinterval(interval)
    for ticket in (first, ranked, also):
        ticket.settle()
        assert isinstance(ticket.error, StepError)
    lane._thread.join(10)
    assert lost.is_set()
    with pytest.raises(StepError, match="the test thread is gone"):
        lane.submit(lambda: None)
    lane.drain()
    lane.close()


def test_a_forked_child_does_not_wait_for_threads_that_it_lacks() -> None:
    lane, pool = Lane("test"), IoPool(1)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with contextlib.suppress(StorageError):
                pool.submit([lambda: None]).result(5)
                os._exit(2)
            lane.submit(lambda: None)
        except StepError as error:
            code = 0 if "does not survive a fork" in str(error) else 3
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    lane.close()
    pool.close()


@pytest.mark.parametrize("states", ["host", "ssd"])
def test_a_child_that_is_forked_beside_updates_ends(
    states: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs at its exit does not wait for threads that it lacks, and leaves its parent's
    files."""
    run = Run(hw, monkeypatch, states=states, schedule="deferred")
    run.good_step()
    go_on = threading.Event()
    update = UnitUpdates.run

    def late(*args: Any) -> None:
        assert go_on.wait(30)
        update(*args)

    monkeypatch.setattr(UnitUpdates, "run", late)
    run.step()
    memory = run.model.lohan.memory
    assert memory is not None
    pid = os.fork()
    if pid == 0:
        memory.close()
        for part in (memory.file, memory.store.file, memory.pool, memory.run):
            if part is not None:
                part.close()
        os._exit(0)
    try:
        until = time.monotonic() + 10
        while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < until:
            time.sleep(0.01)
    finally:
        if not ended[0]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        go_on.set()
    assert ended == (pid, 0)
    run.done += 1
    run.good_step()
    run.close(hw)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # Python 3.12 and later
def test_data_loaders_fork_beside_pinned_memory(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their children, which lack it, load and end; steps stay plain PyTorch's."""

    class Granting(PageLocker):
        def available(self) -> bool:
            return True

        def lock(self, address: int, num_bytes: int) -> str:
            return ""

        def unlock(self, address: int) -> None:
            pass

    pin_with(Granting, monkeypatch)
    run = Run(hw, monkeypatch, states="host", swap_to="host", schedule="overlapped")
    run.good_step()
    rows = torch.utils.data.TensorDataset(torch.arange(4.0))
    loader = torch.utils.data.DataLoader(rows, num_workers=2, multiprocessing_context="fork")
    for k, (row,) in enumerate(loader):
        assert row.item() == k
        run.good_step()
    run.close(hw)


# -- kill -9, and two runs in one directory --------------------------------------------------------

CHILD = """
import os, sys, torch
from pathlib import Path
import lohan_fx
from tests.models import loss_of, make
from tests.training import Squeezed, cpu_hardware, training_of
torch.set_num_threads(1)
root, save = Path(sys.argv[1]), Path(sys.argv[2])
model, inputs = make("mlp")
optimizer = training_of("adam", model).optimizer
model = lohan_fx.compile(model, hw=cpu_hardware(root), optimizer=optimizer, states="ssd",
                         swap_to="ssd", schedule="overlapped", strategy=Squeezed("swap-all", 0.0))
for step in range(int(sys.argv[3])):
    torch.manual_seed(step)
    loss = loss_of("mlp", model(**inputs))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex(), flush=True)
    state = {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, f"{save}.new")
    os.replace(f"{save}.new", save)
sys.stdin.read()
"""


def child(root: Path, save: Path, num_steps: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(root), str(save), str(num_steps)],
        cwd=Path(__file__).parent.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_kill_9_beside_another_run(
    hw: HardwareProfile, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes train in one directory. One is killed in mid-step: the next run removes its
    files, goes on from its last save, and the other never notices."""
    root, saves = Path(hw.ssds[0].path), tmp_path_factory.mktemp("saves")
    killed, other = child(root, saves / "killed", 100_000), child(root, saves / "other", 40)
    try:
        assert killed.stdout is not None
        assert other.stdout is not None
        for _ in range(3):
            assert killed.stdout.readline()
        first = other.stdout.readline()
        time.sleep(random.Random(0).random() * 0.05)
        killed.kill()
        killed.wait(30)
        assert {re.sub(r"\D*(\d+)-.*", r"\1", p.name) for p in root.iterdir()} == {
            str(killed.pid),
            str(other.pid),
        }
        run = Run(hw, monkeypatch)
        saved = torch.load(saves / "killed")
        run.model.load_state_dict(saved["model"])
        run.optimizer.load_state_dict(saved["optimizer"])
        run.done = saved["step"]
        assert run.done >= 2  # what was printed was saved before the next print
        run.good_step()
        names = {re.sub(r"\D*(\d+)-.*", r"\1", p.name) for p in root.iterdir()}
        assert names == {str(os.getpid()), str(other.pid)}
        lines = [first, *(other.stdout.readline() for _ in range(39))]
        wanted = [run.plain.loss(step).item().hex() for step in range(40)]
        assert [line.strip() for line in lines] == wanted
        run.good_step()
        run.model.lohan.close()
        other.communicate(timeout=30)
        assert other.returncode == 0
        RunDirectory([root]).close()
        assert not list(root.iterdir())
    finally:
        for process in (killed, other):
            process.kill()
            process.communicate()
