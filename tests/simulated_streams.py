"""CUDA's streams and events on a CPU device: all runs at once, and is noted as if it did not.

The lanes then take the paths that they take on CUDA, with streams and events that only leave notes
for `tests.stream_races`. Memory of the device is all memory but that of slabs and file mappings.

Slabs can be watched as well (`host=True`): what torch's kernels do there on a thread of the host is
noted as if the thread were a stream that it waits for at once, and tickets, jobs and buffers of
rings carry what a thread knows to the next. That holds for the host tier only: nobody sees what
threads of SSD transfers do, and ops that read units where they lie look like the host's.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lohan_fx.runtime.arena import Arena, BufferRing
from lohan_fx.runtime.lane import Lane, Ticket
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
            device_index = 0

            def wait_event(self, event: Any) -> None:
                event.wait(self)

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

            def wait(self, stream: Any = None) -> None:
                at = (stream or streams.current()).cuda_stream
                streams.note("wait", stream=at, event=self.number)

            def synchronize(self) -> None:
                streams.note("event", event=self.number)

            def query(self) -> bool:
                return True

        return Event

    @contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        before = self.current()
        self._set(stream)
        try:
            yield
        finally:
            self._set(before)

    def _set(self, stream: Any) -> None:
        if stream is not self._compute:
            self._local.stream = stream
        elif hasattr(self._local, "stream"):
            del self._local.stream

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
                (torch.cuda, "set_stream", self._set),
                (torch.cuda, "current_stream", self.current),
                (torch.cuda, "current_device", lambda: 0),
            ):
                stack.enter_context(mock.patch.object(owner, name, value))
            yield self


class SimulatedRaces(StreamRaces):
    """`StreamRaces` of simulated streams; with `host`, also of threads in slabs."""

    def __init__(self, streams: SimulatedStreams, *, host: bool = False) -> None:
        super().__init__()
        self._streams = streams
        self._watches_host = host

    def connect(self, stack: ExitStack) -> None:
        self.order("device")
        stack.enter_context(self.listening())

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Go on with notes, but for ops: torch may trace meanwhile."""
        with ExitStack() as stack:
            self._streams.races = self
            stack.callback(setattr, self._streams, "races", None)
            if self._watches_host:
                self._hand_over(stack)
                stack.enter_context(self._closed_slabs())
            yield

    @contextmanager
    def _closed_slabs(self) -> Iterator[None]:
        """A slab that is unpinned counts as written by the thread that does it."""
        close = Arena.close

        def closed(arena: Arena) -> None:
            slab = arena._slab
            if slab is not None:
                thread = -1 - self.host
                self.launch_on(thread, "unpin", (), (slab,))
                self.order("stream", stream=thread)
            close(arena)

        with mock.patch.object(Arena, "close", closed):
            yield

    def stream(self) -> int:
        return int(self._streams.current().cuda_stream)

    def tracked(self, tensor: Tensor) -> bool:
        if tensor.device.type != "cpu":
            return False
        if self._is_host(tensor):
            return self._watches_host
        return not self._streams.on_host

    def _is_host(self, tensor: Tensor) -> bool:
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # a subclass without storage
            return False
        return any(start <= address < stop for start, stop in self._streams.host)

    def launch(self, op: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        read, written = ([t for t in side if self._is_host(t)] for side in (reads, writes))
        if self.stream() or not (read or written):  # copies of a lane, or compute
            super().launch(op, reads, writes)
            return
        thread = -1 - self.host
        self.launch_on(thread, op, read, written)
        self.order("stream", stream=thread)

    def _hand_over(self, stack: ExitStack) -> None:
        """Let what is handed from thread to thread carry what the one knows."""

        def tell(thing: object, part: int = 0) -> None:
            self.order("tell", event=-4 * id(thing) - part)

        def hear(thing: object, part: int = 0) -> None:
            self.order("event", event=-4 * id(thing) - part)

        def before(owner: type, name: str) -> None:
            original = getattr(owner, name)

            def told(thing: Any, *args: Any, **options: Any) -> Any:
                tell(thing)
                return original(thing, *args, **options)

            stack.enter_context(mock.patch.object(owner, name, told))

        def after(owner: type, name: str) -> None:
            original = getattr(owner, name)

            def heard(thing: Any, *args: Any) -> Any:
                result = original(thing, *args)
                hear(thing)
                return result

            stack.enter_context(mock.patch.object(owner, name, heard))

        for name in ("finish", "fail"):
            before(Ticket, name)
        for name in ("wait", "synchronize", "settle"):
            after(Ticket, name)
        before(BufferRing, "release")
        for name in ("acquire", "try_acquire"):
            after(BufferRing, name)
        submit = Lane._submit

        def submitted(lane: Lane, job: Any, also: Sequence[Ticket] = ()) -> Ticket:
            tell(job.ticket, 1)

            def run() -> Any:
                hear(job.ticket, 1)
                return job.run()

            return submit(lane, job._replace(run=run), also)

        stack.enter_context(mock.patch.object(Lane, "_submit", submitted))
