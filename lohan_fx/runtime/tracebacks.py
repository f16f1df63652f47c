"""What the error of a failed step holds: its traceback has the frames, and these their locals."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def locals_forgotten() -> Iterator[None]:
    """Let an error that leaves the block hold no local variables of frames inside.

    They are activations, gradients and buffers: user code that keeps the error, or is still in its
    ``except`` clause, could neither run the step again nor close the model and have their memory.
    Lines and names of the traceback stay. So do errors that were being handled before: what their
    frames hold is the user's.
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
        traceback.clear_frames(each.__traceback__)  # leaves those alone that still run
        waiting += [each.__cause__, each.__context__]
