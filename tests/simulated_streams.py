"""CUDA's streams and events on a CPU device: all runs at once, and is noted as if it did not.

The lanes then take the paths that they take on CUDA, with streams and events that only leave notes
for `tests.stream_races`. Memory of the device is all memory but that of slabs and file mappings.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lohan_fx.runtime.arena import Arena
from lohan_fx.runtime.lanes import Lanes
from lohan_fx.runtime.ssd import StripedFile
from tests.stream_races import StreamRaces


class SimulatedStreams:
    """Stands in for `torch.cuda`'s streams and events, from before a model is compiled on."""

    def __init__(self) -> None:
        self.races: StreamRaces | None = None  # takes the notes
        self.host: list[tuple[int, int]] = []  # ranges of host memory
        self._numbers = itertools.count(1)
        self._local = threading.local()
        self._compute = self._stream(0)

    def current(self, device: object = None) -> Any:
        return getattr(self._local, "stream", self._compute)

    @property
    def on_host(self) -> bool:
        """Whether this thread is a lane's, and works for no stream."""
        assert self.races is not None
        return self.races.host != 0 and not hasattr(self._local, "stream")

    def note(self, kind: Any, **where: int) -> None:
        if self.races is not None:
            self.races.order(kind, **where)

    def _stream(self, number: int) -> Any:
        note = self.note

        class Stream:
            cuda_stream = number

            def wait_event(self, event: Any) -> None:
                note("wait", stream=number, event=event.number)

            def synchronize(self) -> None:
                note("stream", stream=number)

            def query(self) -> bool:
                return True

        return Stream()

    def _event_class(self) -> Any:
        streams = self

        class Event:
            def __init__(self) -> None:
                self.number = next(streams._numbers)

            def record(self, stream: Any = None) -> None:
                at = (stream or streams.current()).cuda_stream
                streams.note("record", stream=at, event=self.number)

            def synchronize(self) -> None:
                streams.note("event", event=self.number)

            def query(self) -> bool:
                return True

        return Event

    @contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        before = self.current()
        self._local.stream = stream
        try:
            yield
        finally:
            if before is self._compute:
                del self._local.stream
            else:
                self._local.stream = before

    @contextmanager
    def __call__(self) -> Iterator[SimulatedStreams]:
        lanes, arena, mapped = Lanes.__init__, Arena.__init__, StripedFile.map

        def with_streams(made: Lanes, *args: Any, **options: Any) -> None:
            lanes(made, *args, **options)
            made._cuda = True
            for lane in (made.d2h, made.h2d):
                lane.stream = self._stream(next(self._numbers))

        def noted(made: Arena, *args: Any, **options: Any) -> None:
            arena(made, *args, **options)
            self.host.append((made._address, made._address + made.num_bytes))

        def noted_map(made: StripedFile) -> Tensor:
            found = mapped(made)
            self.host.append((found.data_ptr(), found.data_ptr() + found.numel()))
            return found

        with ExitStack() as stack:
            for owner, name, value in (
                (Lanes, "__init__", with_streams),
                (Arena, "__init__", noted),
                (StripedFile, "map", noted_map),
                (torch.cuda, "Event", self._event_class()),
                (torch.cuda, "stream", self._on),
                (torch.cuda, "current_stream", self.current),
            ):
                stack.enter_context(mock.patch.object(owner, name, value))
            yield self


class SimulatedRaces(StreamRaces):
    """`StreamRaces` of simulated streams."""

    def __init__(self, streams: SimulatedStreams) -> None:
        super().__init__()
        self._streams = streams

    def connect(self, stack: ExitStack) -> None:
        self._streams.races = self
        stack.callback(setattr, self._streams, "races", None)
        self.order("device")

    def stream(self) -> int:
        return int(self._streams.current().cuda_stream)

    def tracked(self, tensor: Tensor) -> bool:
        if self._streams.on_host or tensor.device.type != "cpu":
            return False
        try:
            address = tensor.data_ptr()
        except RuntimeError:
            return False
        return not any(start <= address < stop for start, stop in self._streams.host)
