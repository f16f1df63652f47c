"""Options shared by all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--regen-golden", action="store_true", help="rewrite the files in tests/golden"
    )


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tests' kernels are too small to share, and how many threads share one must not depend on
    the machine's load: sums would be rounded differently from run to run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def interrupts() -> None:
    """A shell that starts tests in the background makes them ignore Ctrl-C, which some send."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
