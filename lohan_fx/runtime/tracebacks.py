"""What the error of a failed step holds: its traceback has the frames, and these their locals."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

import torch

from lohan_fx._compat import is_generated

_OURS = str(Path(__file__).parents[1]) + "/"
_TORCH = str(Path(torch.__file__).parent) + "/"


@contextmanager
def locals_forgotten() -> Iterator[None]:
    """Let an error that leaves the block hold no local variables of our frames.

    They are activations, gradients and buffers: user code that keeps the error, or is still in its
    ``except`` clause, could neither run the step again nor close the model and have their memory.
    Lines and names of the traceback stay.

    Only frames whose code lies in lohan_fx are cleared, and those of programs and of torch that
    they called. What the user's own frames hold is the user's: of hooks and ops that a program
    calls, of errors that this one came from, and of all errors that were being handled before.
    """
    before = sys.exception()
    try:
        yield
    except BaseException as error:
        _forget_locals(error, before)
        raise


def _forget_locals(error: BaseException, before: BaseException | None) -> None:
    """Of this error and of those that it came from, up to `before`."""
    waiting: list[BaseException | None] = [error]
    seen = {id(before), id(None)}
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        _clear_frames(each.__traceback__)
        waiting += [each.__cause__, each.__context__]


def _clear_frames(entry: TracebackType | None) -> None:
    """Clear our frames of a traceback, outermost first, and what they called outside user code."""
    inside = False
    while entry is not None:
        file = entry.tb_frame.f_code.co_filename
        inside = inside or file.startswith(_OURS)
        if inside and (file.startswith((_OURS, _TORCH)) or is_generated(file)):
            with suppress(RuntimeError):  # it still runs
                entry.tb_frame.clear()
        entry = entry.tb_next
