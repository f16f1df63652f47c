"""The ops that a rewritten program is made of, in the ``lohan::`` namespace.

They are thin: each looks up the engine that the program was compiled for and calls it. `run` is
the engine's number, `slot`, `unit` and `window` number swapped residuals, units and the units'
stays on the device; together they make every call unique, so that no pass may merge two.
Order is by data: release takes the handle of the offload, prefetch that of the release.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_SCHEMAS = {
    "offload": "(Tensor x, int run, int slot) -> Tensor",
    "release": "(Tensor x, Tensor handle, int run, int slot) -> Tensor",
    "prefetch": "(Tensor handle, int run, int slot) -> Tensor",
    "wait": "(Tensor(a) y, int run, int slot) -> Tensor(a)",
    "fetch_unit": "(int run, int unit, int window) -> Tensor",
    "wait_unit": "(Tensor(a) flat, int run, int unit, int window) -> Tensor(a)[]",
    "host_view": "(int run, int unit, int phase, int num_bytes) -> Tensor[]",
    "write_gradient": "(Tensor[] gradients, int run, int unit, int[] indices) -> Tensor",
    "emit_written": "(Tensor[] tokens, int run, int unit) -> Tensor",
    "emit_gradients": "(Tensor?[] gradients, int run, int unit) -> Tensor",
    "release_gradients": "(Tensor?[] gradients, Tensor token, int run, int unit) -> Tensor",
}


class EngineRegistry:
    """Number → live engine. The only state that ops share; engines leave when they close.

    An engine is an `Engine`, or what stands for several of them (`lohan_fx.backend.Calls`).
    """

    def __init__(self) -> None:
        self._engines: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._numbers = itertools.count(1)

    def add(self, engine: Any) -> int:
        number = next(self._numbers)
        self._engines[number] = engine
        return number

    def __getitem__(self, number: int) -> Any:
        engine = self._engines.get(number)
        if engine is None:
            raise RuntimeError(f"program of run {number} outlived its engine")
        return engine


engines = EngineRegistry()


def _offload(x: Tensor, run: int, slot: int) -> None:
    engines[run].offload(x, slot)


def _release(x: Tensor, handle: Tensor | None, run: int, slot: int) -> None:
    engines[run].release(slot)


def _prefetch(handle: Tensor | None, run: int, slot: int) -> Tensor:
    return engines[run].prefetch(slot)


def _wait(y: Tensor, run: int, slot: int) -> Tensor:
    engines[run].wait(slot)
    return y


def _fetch_unit(run: int, unit: int, window: int) -> Tensor:
    return engines[run].fetch_unit(unit, window)


def _wait_unit(flat: Tensor, run: int, unit: int, window: int) -> list[Tensor]:
    return engines[run].wait_unit(flat, unit, window)


def _host_view(run: int, unit: int, phase: int, num_bytes: int) -> list[Tensor]:
    return engines[run].host_view(unit, num_bytes)


def _write_gradient(gradients: list[Tensor], run: int, unit: int, indices: Sequence[int]) -> None:
    engines[run].write_gradient(gradients, unit, indices)


def _emit_written(tokens: Sequence[Tensor | None], run: int, unit: int) -> None:
    engines[run].emit_written(unit)


def _emit_gradients(gradients: Sequence[Tensor | None], run: int, unit: int) -> None:
    engines[run].emit_gradients(gradients, unit)


def _release_gradients(
    gradients: Sequence[Tensor | None], token: Tensor | None, run: int, unit: int
) -> None:
    engines[run].release_gradients(unit)


def _with_token(call: Callable[..., Tensor | None]) -> Callable[..., Tensor]:
    """The kernel of an op whose schema has a result: a tensor that stands for the order of calls,
    where there is nothing else."""

    def kernel(*arguments: Any) -> Tensor:
        result = call(*arguments)
        return torch.empty(0) if result is None else result

    return kernel


_library = torch.library.Library("lohan", "DEF")
direct: dict[Any, Callable[..., Any]] = {}
"""Op → the function that it calls, for programs that run without torch's dispatcher: which costs
more than the functions do. What is a token for the dispatcher is None there."""
for _name, _schema in _SCHEMAS.items():
    _function = globals()[f"_{_name}"]
    _library.define(_name + _schema)
    # One kernel for every device: an op's tensors may be on the device, on the host, or absent.
    _library.impl(_name, _with_token(_function), "CompositeExplicitAutograd")
    direct[getattr(torch.ops.lohan, _name).default] = _function

offload = torch.ops.lohan.offload.default
release = torch.ops.lohan.release.default
prefetch = torch.ops.lohan.prefetch.default
wait = torch.ops.lohan.wait.default
fetch_unit = torch.ops.lohan.fetch_unit.default
wait_unit = torch.ops.lohan.wait_unit.default
host_view = torch.ops.lohan.host_view.default
write_gradient = torch.ops.lohan.write_gradient.default
emit_written = torch.ops.lohan.emit_written.default
emit_gradients = torch.ops.lohan.emit_gradients.default
release_gradients = torch.ops.lohan.release_gradients.default
