"""Models that nobody holds are collected where a thread must wait for no other: while it traces, or
with the locks of `threading`, which has garbage collected, too. A process of its own (python -m
tests.collected folder), which ends with all stacks if it hangs."""

from __future__ import annotations

import faulthandler
import gc
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lohan_fx
from lohan_fx._compat import TRACING
from lohan_fx.runtime.lane import wait_closed
from tests.models import loss_of, make
from tests.training import cpu_hardware, model_threads, training_of

HANGS_S = 60


def train(folder: Path | None) -> tuple[list[Tensor], torch.optim.Optimizer]:
    """One step of a model that is gone then; compiled, its updates begin in optimizer.step()."""
    model, inputs = make("mlp")
    parameters = list(model.parameters())
    optimizer = training_of("adam", model).optimizer
    made: Any = model
    if folder is not None:
        made = lohan_fx.compile(
            model,
            hw=cpu_hardware(folder),
            optimizer=optimizer,
            states="ssd",
            schedule="deferred",
            strategy="recompute-all",
        )
    torch.manual_seed(0)
    loss_of("mlp", made(**inputs)).backward()
    optimizer.step()
    return parameters, optimizer


def on_another_thread(collect: Callable[[], object]) -> None:
    thread = threading.Thread(target=collect)
    thread.start()
    thread.join()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    gc.disable()
    wanted, plain = train(None)
    locks: dict[str, AbstractContextManager[Any]] = {"tracing": TRACING}
    for name in ("_active_limbo_lock", "_shutdown_locks_lock"):  # the second one until Python 3.12
        if hasattr(threading, name):
            locks[name] = getattr(threading, name)
    for name, lock in locks.items():
        for call in (lambda collect: collect(), on_another_thread):

            def collect(lock: AbstractContextManager[Any] = lock) -> None:
                with lock:
                    gc.collect()

            faulthandler.dump_traceback_later(HANGS_S, exit=True)
            if name == "tracing":
                with TRACING:  # updates wait
                    weights, optimizer = train(folder)
                    call(gc.collect)
            else:
                weights, optimizer = train(folder)
                call(collect)
            optimizer.zero_grad()
            optimizer.step()  # waits until it has its states again, and changes nothing
            assert all(map(torch.equal, weights, wanted)), name
            for ours, theirs in zip(weights, wanted, strict=True):
                have, want = optimizer.state[ours], plain.state[theirs]
                assert have.keys() == want.keys(), name
                assert all(torch.equal(have[key], want[key]) for key in want), name
            wait_closed()
            for thread in model_threads():
                thread.join()  # it was told to end, and may be about to
            assert not list(folder.iterdir()), name
            sys.stdout.write(f"{name}\n")
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
