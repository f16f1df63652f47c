"""Seconds of every op of a program, measured in a real step: the papers' profiling stage.

The halves are interpreted node by node, with a CUDA event (on a CPU device: a clock reading)
between nodes. What a recompute region runs is not counted; its ops were timed in forward.

The interpreter is slower than small kernels are: left alone, the device would wait for it, and the
time between two events would be the host's (on an H100, 0.26 s of ops in a step that computes for
0.20 s). So the device is kept busy between ops until the host is ahead of it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from lohan_fx import _compat
from lohan_fx.annotate import is_getitem

_OPS_AHEAD = 64
"""Ops for which one pause of the device gives the host time: it launches them meanwhile."""

_PAUSE_CYCLES = 15_000_000
"""Of the device's clock: 8 to 15 ms, 64 times what the host takes for an op with its events."""


class OpTimer:
    """Times the ops of the steps that it runs. `seconds()` gives the smallest time of each op.

    The smallest, because waits for the host or for a transfer only ever add.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._stamps: dict[str, list[tuple[Any, Any]]] = {}
        self._until_pause = 0

    def run(self, half: fx.GraphModule, arguments: list[Any]) -> Any:
        """What ``half(arguments)`` returns, with every node timed."""
        self._until_pause = 0
        return _Runner(half, self, arguments).run(enable_io_processing=False)

    def begin(self) -> Any:
        """The stamp before an op."""
        if self._cuda:
            if not self._until_pause:
                _compat.cuda_sleep(_PAUSE_CYCLES)
                self._until_pause = _OPS_AHEAD
            self._until_pause -= 1
        return self.stamp()

    def stamp(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, name: str, start: Any, end: Any) -> None:
        self._stamps.setdefault(name, []).append((start, end))

    def seconds(self) -> Mapping[str, float]:
        """Op name → seconds."""
        if self._cuda:
            torch.cuda.synchronize()
            return {
                name: min(a.elapsed_time(b) for a, b in pairs) / 1e3
                for name, pairs in self._stamps.items()
            }
        return {name: min(b - a for a, b in pairs) for name, pairs in self._stamps.items()}


class _Runner(fx.Interpreter):
    """Takes `arguments` out of the caller's list one by one: `fx.Interpreter.run` would hold those
    that it is given to its end, and with them all saved activations."""

    def __init__(self, half: fx.GraphModule, timer: OpTimer, arguments: list[Any]) -> None:
        super().__init__(half, garbage_collect_values=True)
        self._timer = timer
        self._arguments = deque(arguments)
        arguments.clear()

    def placeholder(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._arguments.popleft()

    def run_node(self, n: fx.Node) -> Any:
        if n.op not in ("call_function", "call_method"):
            return super().run_node(n)
        if n.op == "call_method" or n.meta.get("lohan") is not None or is_getitem(n):
            result = super().run_node(n)  # a view, or an op of ours
        else:
            start = self._timer.begin()
            result = super().run_node(n)
            self._timer.add(n.name, start, self._timer.stamp())
        # Generated code forgets what nobody reads, such as one of an op's several results. The
        # interpreter forgets values after their last use, which these never have.
        return result if n.users else None
