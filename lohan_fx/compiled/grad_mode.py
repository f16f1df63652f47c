"""Whether autograd records, where an interrupt may have left it off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def grad_mode_kept() -> Iterator[None]:
    """After an exception, record as before.

    ``torch.no_grad`` is Python: an interrupt that strikes when its ``__exit__`` begins leaves
    autograd off, and who goes on gets losses without a backward.
    """
    before = torch.is_grad_enabled()
    try:
        yield
    except BaseException:
        torch.set_grad_enabled(before)
        raise
