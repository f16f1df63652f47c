"""A live line on the terminal while set-up is long: what is being done, and for how long.

Whoever takes time says so: `stage("plan")` around it, `report("trying lohan")` inside. Both do
nothing unless a `Line` is shown, so planners may call `report` and still know neither torch nor
rich. One line is shown at a time, for the thread (or context) that set-up runs in.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

Shown = bool | Literal["auto"]
"""Whether to show a line; "auto": if stderr is a terminal."""

_listener: ContextVar[Callable[[str], None] | None] = ContextVar("lohan_fx_progress", default=None)


def report(text: str) -> None:
    """Say in a few words what is being done now. Costs a look-up if nobody listens."""
    listener = _listener.get()
    if listener is not None:
        listener(text)


@contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """Let `listener` have what is reported in the block, in this thread."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class Line:
    """The live line. It appears with the first stage that lasts, and leaves nothing behind.

    Args:
        shown: see `Shown`.
        delay_s: stages that end sooner are not shown.
    """

    def __init__(self, shown: Shown = "auto", *, delay_s: float = 0.5) -> None:
        self.shown = sys.stderr.isatty() if shown == "auto" else shown
        self._delay_s = delay_s

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Show `name` and the seconds since, while the block runs. Inside another stage it is
        what that one reports."""
        if not self.shown or _listener.get() is not None:
            report(name)
            yield
            return
        with _Show(name, self._delay_s) as show, listening(show.say):
            yield


class _Show:
    """One stage on the terminal: a timer starts the display, unless the stage has ended."""

    def __init__(self, name: str, delay_s: float) -> None:
        from threading import Lock, Timer

        self._name = name
        self._text = ""
        self._began_s = time.perf_counter()
        self._display: Progress | None = None
        self._task: TaskID | None = None
        self._ended = False
        self._lock = Lock()
        self._timer = Timer(delay_s, self._start)
        self._timer.daemon = True

    def say(self, text: str) -> None:
        self._text = text
        with self._lock:
            if self._display is not None and self._task is not None:
                self._display.update(self._task, text=self._text)

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        with self._lock:
            if self._ended:
                return
            self._display = Progress(
                SpinnerColumn(),
                TextColumn("lohan_fx: {task.description}"),
                TimeElapsedColumn(),
                TextColumn("{task.fields[text]}"),
                console=Console(file=sys.stderr, force_terminal=True),
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._task = self._display.add_task(self._name, total=None, text=self._text)
            self._display.start()

    def __enter__(self) -> _Show:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            self._ended = True
            if self._display is not None:
                self._display.stop()
