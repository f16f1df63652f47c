"""Options shared by all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from lohan_fx.hardware import HardwareProfile
from tests.training import cpu_hardware, one_thread


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--regen-golden", action="store_true", help="rewrite the files in tests/golden"
    )


@pytest.fixture(autouse=True, scope="session")
def single_thread() -> Iterator[None]:
    """Tests' kernels are too small to share, and how many threads share one must not depend on
    the machine's load: sums would be rounded differently from run to run."""
    with one_thread():
        yield


@pytest.fixture(autouse=True, scope="session")
def interrupts() -> None:
    """A shell that starts tests in the background makes them ignore Ctrl-C, which some send."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def hw(tmp_path: Path) -> HardwareProfile:
    """A small machine, of this test alone, with an SSD tier in its temporary folder."""
    return cpu_hardware(tmp_path)
