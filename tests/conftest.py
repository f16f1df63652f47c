"""Options shared by all tests.

Nothing heavy is imported here: pytest-xdist's controller reads this file, too, before it starts
the workers, and runs no test.
"""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from lohan_fx.hardware import HardwareProfile


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--regen-golden", action="store_true", help="rewrite the files in tests/golden"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Properties are tried on the same examples in every run, so that a run says something about
    what changed. ``--hypothesis-profile=default``, as in `./dev test-all`, looks for new ones."""
    from hypothesis import settings

    settings.register_profile("fixed", derandomize=True, database=None)
    if config.getoption("--hypothesis-profile") is None:
        settings.load_profile("fixed")


def pytest_collection() -> None:
    """Imports make a million objects and next to no garbage: the collector need not look."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def single_thread() -> Iterator[None]:
    """Tests' kernels are too small to share, and how many threads share one must not depend on
    the machine's load: sums would be rounded differently from run to run."""
    from tests.training import one_thread

    with one_thread():
        yield


@pytest.fixture(autouse=True, scope="session")
def interrupts() -> None:
    """A shell that starts tests in the background makes them ignore Ctrl-C, which some send."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="module")
def every_model_is_closed() -> Iterator[None]:
    """No module leaves a model behind that still has its threads.

    What is there before a module's first test is taken out of the collector's sight: most of it is
    imported code, and to walk through it is what `gc.collect` would take its time for. Workers of
    pytest-xdist steal tests from each other, so what they have of a module ends anywhere: only runs
    in one process look.
    """
    from tests.training import model_threads

    gc.collect()
    gc.freeze()
    before = model_threads()
    yield
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    gc.collect()
    until = time.monotonic() + 5  # a thread that was told to end needs a moment
    while model_threads() - before and time.monotonic() < until:
        time.sleep(0.01)
    left = sorted(t.name for t in model_threads() - before)
    assert not left, f"a test of this module leaves a model open, with threads {left}"


@pytest.fixture
def hw(tmp_path: Path) -> HardwareProfile:
    """A small machine, of this test alone, with an SSD tier in its temporary folder."""
    from tests.training import cpu_hardware

    return cpu_hardware(tmp_path)


@pytest.fixture
def closed_backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torch.compile makes of this test's graphs with our backend ends with it.

    Where a graph breaks, Dynamo puts its functions into the globals of the user's module, and a
    reset leaves them there with our graphs: these are closed here, as they would be at exit.
    """
    import torch

    from lohan_fx.backend import Calls, _close

    made: list[weakref.ref[Calls]] = []
    original = Calls.__init__

    def remembered(self: Calls, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        made.append(weakref.ref(self))

    monkeypatch.setattr(Calls, "__init__", remembered)
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    gc.collect()
    for calls in filter(None, (ref() for ref in made)):
        _close(calls._memory, calls._stores)


@pytest.fixture
def seeded() -> Iterator[None]:
    """Torch's generator begins anew, and is afterwards as it was."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
