"""The live line of set-up: on a terminal only, one line, gone afterwards and after interrupts."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import lohan_fx
from lohan_fx.errors import LohanError
from lohan_fx.progress import Line, listening, report
from tests.models import make
from tests.training import cpu_hardware

ROOT = Path(__file__).parent.parent


class Terminal(io.StringIO):
    """Stands for stderr inside a test's body (pytest puts its own there before)."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        patch.setattr(sys, "stderr", self)
        patch.setenv("TERM", "xterm")


def wait_for(text: str, out: io.StringIO) -> None:
    end_s = time.perf_counter() + 20
    while text not in out.getvalue():
        assert time.perf_counter() < end_s, out.getvalue()
        time.sleep(0.01)


@pytest.fixture
def no_threads_left() -> Iterator[None]:
    before = threading.enumerate()
    yield
    for thread in threading.enumerate():
        if thread not in before:  # a timer that was cancelled is about to end
            thread.join(10)
            assert not thread.is_alive()


@pytest.mark.usefixtures("no_threads_left")
def test_it_is_silent_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal(monkeypatch)
    with Line("auto", delay_s=0.0).stage("planning"):
        report("trying lohan")
        time.sleep(0.1)
    assert not stderr.getvalue()


@pytest.mark.usefixtures("no_threads_left")
def test_it_shows_stage_and_report(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal(monkeypatch)
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich draws as on a terminal
    line = Line(True, delay_s=0.0)
    for name in ("tracing the model", "planning"):
        with line.stage(name):
            wait_for(f"lohan_fx: {name}", stderr)
            report("trying lohan")
            wait_for("trying lohan", stderr)
            with line.stage("inside"):
                wait_for("inside", stderr)
    report("nobody listens")
    assert "nobody" not in stderr.getvalue()


@pytest.mark.usefixtures("no_threads_left")
def test_short_stages_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal(monkeypatch)
    line = Line(True, delay_s=30.0)
    for _ in range(3):
        with line.stage("planning"):
            pass
    assert not stderr.getvalue()


@pytest.mark.usefixtures("no_threads_left")
def test_errors_and_interrupts_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal(monkeypatch)

    def fail(error: type[BaseException]) -> None:
        with Line(True, delay_s=0.0).stage("planning"):
            wait_for("planning", stderr)
            raise error

    for error in (KeyboardInterrupt, LohanError):
        with pytest.raises(error):
            fail(error)
    heard: list[str] = []
    with listening(heard.append):
        report("heard")
    report("not heard")
    assert heard == ["heard"]


def test_planners_report_without_torch_and_rich() -> None:
    code = """
import sys
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.planners import make_plan
from lohan_fx.progress import listening
from tests.workloads import gpt_workload, small_hardware
heard = []
w, hw = gpt_workload(layers=2), small_hardware()
with listening(heard.append):
    make_plan("pareto", w, hw, MemoryBudget.from_request(hw, None))
assert any("trying lohan" in text for text in heard), heard
assert "torch" not in sys.modules and "rich" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def test_the_option(tmp_path: Path) -> None:
    model, _ = make("mlp")
    with pytest.raises(LohanError, match="progress='often': use True, False or 'auto'"):
        lohan_fx.compile(model, hw=cpu_hardware(tmp_path), progress="often")  # type: ignore[arg-type]


def test_on_a_terminal_every_stage_and_nothing_left() -> None:
    """A real terminal: the stages of set-up are shown, and the last control codes erase the line
    and show the cursor."""
    code = """
import torch, lohan_fx, lohan_fx.progress as progress
from tests.toys import made
from tests.workloads import small_hardware
progress.Line.__init__.__kwdefaults__["delay_s"] = 0.0
model, x = made()
hw = small_hardware(device_kind="cpu", ssd=False)
model = lohan_fx.compile(model, hw=hw, optimizer=torch.optim.AdamW(model.parameters()))
model(x)
"""
    terminal, end = pty.openpty()
    shown = b""
    with closing(os.fdopen(terminal, "rb", buffering=0)) as reader:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            stderr=end,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
        )
        os.close(end)
        try:
            while part := reader.read(4096):
                shown += part
        except OSError:  # Linux: the other side is closed
            pass
        assert process.wait(60) == 0
    text = shown.decode(errors="replace")
    for stage in ("tracing the model", "planning"):
        assert f"lohan_fx: {stage}" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") > 0  # the cursor: hidden, shown
    assert re.search(r"\x1b\[2K\s*$", text[text.rindex("\x1b[?25h") :]), text[-200:]
