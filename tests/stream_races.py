"""Finds accesses of CUDA streams to the same bytes of device memory that nothing orders.

What compute-sanitizer's racecheck is for the threads of one kernel, this is for kernels and copies
on streams. `StreamRaces` notes, in the order in which the host issues them, every op with the byte
ranges that it reads and writes, and everything that orders streams: events that are recorded and
waited for, and waits of the host. `find_races` reads these notes afterwards, with vector clocks.
Memory that is freed keeps its history, so a block that another stream gets too early is found.

Who waits on the host knows, and what it launches then comes after that. This knowledge stays with
the host thread: a lane's thread that waits for its stream orders nothing that compute launches.
Autograd's threads count as the user's, which waits while they run.

Not seen:
- kernels that no dispatched op stands for: Inductor's (compile with ``fused=False``), and what an
  op does inside (temporaries of copies, workspaces of cuBLAS). Our Triton Adam is noted by hand;
- accesses to host memory, but for pinned memory that compute reads as a CUDA tensor, and of that
  only what streams do, not what the CPU does;
- reads and writes that a schema does not tell (running statistics of a batch norm);
- order that comes of `Event.query`, of `cudaFree`, or of `Tensor.record_stream`: what relies on
  that alone is reported, though it is right. lohan_fx does not;
- a window of the host's: an op is noted right before it is launched, its results right after. If
  another thread records an event on the same stream between, the event seems to cover the op.

torch's own `torch.cuda._sanitizer` has the same trace, but compares addresses where tensors begin,
forgets freed memory, and lets a wait of any thread order all streams. It is not imported here: that
alone turns it on for the process.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import threading
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.cuda._gpu_trace as gpu_trace
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from lohan_fx import gradient_sums
from lohan_fx.runtime import ops
from lohan_fx.runtime.lane import Lane
from lohan_fx.runtime.native.adam_cuda import CudaAdamKernel

Range = tuple[int, int]
"""Bytes of device memory: from, and to exclusively."""

MAX_RUNS = 512
"""Contiguous pieces of one tensor that are told apart; of more, the gaps count as accessed."""

_FRAMES = 8


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel or copy that was put on a stream, by a host thread (0: the user's)."""

    op: str
    stream: int
    host: int = 0
    reads: tuple[Range, ...] = ()
    writes: tuple[Range, ...] = ()
    stack: tuple[str, ...] = ()


Kind = Literal["made", "record", "wait", "event", "stream", "device", "tell"]


@dataclass(frozen=True, slots=True)
class Order:
    """Something that orders streams: an event is "made", "record"-ed on a stream, or a stream
    "wait"-s for it; a host thread waits for an "event", a "stream", or the "device". It may also
    "tell" what it has waited for: to threads that then wait for the "event" that stands for it."""

    kind: Kind
    host: int = 0
    stream: int = 0
    event: int = 0


@dataclass(frozen=True, slots=True)
class Access:
    """What a launch did to some bytes; `number` counts launches."""

    launch: Launch
    number: int
    writes: bool

    def __str__(self) -> str:
        at = self.launch
        who = "the user's thread" if at.host == 0 else f"lane thread {at.host}"
        head = f"{at.op} {'writes' if self.writes else 'reads'} on stream {at.stream:#x}, by {who}"
        return "\n".join([head, *(f"      {frame}" for frame in at.stack)])


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses to the same bytes, at least one a write, and nothing that orders them."""

    first: Access
    second: Access
    start: int
    stop: int

    def __str__(self) -> str:
        return (
            f"{self.stop - self.start} bytes at {self.start:#x}:\n  {self.first}\n  and, not "
            f"ordered behind it, {self.second}"
        )


# -- what orders streams -------------------------------------------------------------------------


class _Clock(defaultdict[int, int]):
    """Stream → the number of its last launch that has ended, as far as somebody knows."""

    def __init__(self) -> None:
        super().__init__(int)

    def learn(self, other: _Clock) -> None:
        for stream, number in other.items():
            self[stream] = max(self[stream], number)


class _Clocks:
    """What comes before what a stream does next."""

    def __init__(self) -> None:
        self._streams: dict[int, _Clock] = defaultdict(_Clock)
        self._hosts: dict[int, _Clock] = defaultdict(_Clock)
        self._events: dict[int, _Clock] = defaultdict(_Clock)
        self._settled = 0  # the last launch before a wait for the device
        self._number = 0

    def launch(self, stream: int, host: int) -> int:
        self._number += 1
        clock = self._issued(stream, host)
        clock[stream] = self._number
        return self._number

    def order(self, order: Order) -> None:
        stream, event = order.stream, order.event
        match order.kind:
            case "made":  # under the address of one that is gone, maybe
                self._events[event] = _Clock()
            case "record":
                self._events[event] = made = _Clock()
                made.learn(self._issued(stream, order.host))
            case "wait":
                self._issued(stream, order.host).learn(self._events[event])
            case "tell":
                self._events[event] = told = _Clock()
                told.learn(self._hosts[order.host])
            case "event":
                self._hosts[order.host].learn(self._events[event])
            case "stream":
                self._hosts[order.host].learn(self._streams[stream])
            case "device":
                self._settled = self._number

    def is_before(self, access: Access, stream: int) -> bool:
        """Whether an access has ended when the stream goes on."""
        number = access.number
        return number <= self._settled or number <= self._streams[stream][access.launch.stream]

    def _issued(self, stream: int, host: int) -> _Clock:
        """The stream's clock, when a thread puts something on it: what the thread has waited for
        comes before that."""
        clock = self._streams[stream]
        clock.learn(self._hosts[host])
        return clock


# -- who accessed which bytes --------------------------------------------------------------------


@dataclass(slots=True)
class _Segment:
    """Bytes of one history: the last write, and each stream's last read since."""

    start: int
    stop: int
    write: Access | None = None
    reads: dict[int, Access] = field(default_factory=dict)

    def cut(self, at: int) -> _Segment:
        """Keep the part before `at`; returns the rest."""
        rest = _Segment(at, self.stop, self.write, dict(self.reads))
        self.stop = at
        return rest


class _Memory:
    """The history of device memory, as segments side by side, in order."""

    def __init__(self) -> None:
        self._segments: list[_Segment] = []

    def read(self, at: Range, access: Access) -> Iterator[_Segment]:
        """Note a read. Yields what was there before, piece by piece."""
        for segment in self._over(at):
            yield segment
            segment.reads[access.launch.stream] = access

    def write(self, at: Range, access: Access) -> Iterator[_Segment]:
        """Note a write, as `read`."""
        segments = self._over(at)
        yield from segments
        first = self._index(segments[0].start)
        self._segments[first : first + len(segments)] = [_Segment(*at, access)]

    def _index(self, address: int) -> int:
        return bisect_left(self._segments, address, key=lambda s: s.start)

    def _over(self, at: Range) -> list[_Segment]:
        """Segments that are exactly these bytes, cut where they must be, and new in the gaps."""
        start, stop = at
        for edge in at:
            k = bisect_right(self._segments, edge, key=lambda s: s.start) - 1
            if k >= 0 and self._segments[k].start < edge < self._segments[k].stop:
                self._segments.insert(k + 1, self._segments[k].cut(edge))
        first, end = self._index(start), self._index(stop)
        found: list[_Segment] = []
        for segment in self._segments[first:end]:
            if segment.start > start:
                found.append(_Segment(start, segment.start))
            found.append(segment)
            start = segment.stop
        if start < stop:
            found.append(_Segment(start, stop))
        self._segments[first:end] = found
        return found


def find_races(notes: Iterable[Launch | Order]) -> list[Race]:
    """All races in what was noted; one of each pair of places in the program."""
    clocks, memory = _Clocks(), _Memory()
    found: dict[object, Race] = {}

    def check(before: Access | None, now: Access, segment: _Segment) -> None:
        if before is not None and not clocks.is_before(before, now.launch.stream):
            sides = [(a.launch.op, a.launch.stack, a.writes) for a in (before, now)]
            found.setdefault(tuple(sides), Race(before, now, segment.start, segment.stop))

    for note in notes:
        if isinstance(note, Order):
            clocks.order(note)
            continue
        number = clocks.launch(note.stream, note.host)
        read, written = Access(note, number, False), Access(note, number, True)
        for at in note.reads:
            for segment in memory.read(at, read):
                check(segment.write, read, segment)
        for at in note.writes:
            for segment in memory.write(at, written):
                check(segment.write, written, segment)
                for other in segment.reads.values():
                    check(other, written, segment)
    return list(found.values())


# -- what ops access -----------------------------------------------------------------------------


def runs(tensor: Tensor) -> list[Range]:
    """The bytes of a tensor's elements as contiguous ranges, up to `MAX_RUNS`; otherwise one
    range from the first element to the last."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return []
    try:
        base = tensor.data_ptr()
    except RuntimeError:  # a subclass without storage
        return []
    if base == 0:
        return []
    size = tensor.element_size()
    whole = size + sum(
        (n - 1) * k * size for n, k in zip(tensor.shape, tensor.stride(), strict=True)
    )
    dims = sorted(
        (k * size, n) for n, k in zip(tensor.shape, tensor.stride(), strict=True) if n > 1
    )
    run, outer = size, []
    for step, n in dims:
        if step == run:
            run *= n
        elif step:
            outer.append((step, n))
    count = math.prod(n for _, n in outer)
    if count > MAX_RUNS or any(step < run for step, _ in outer):
        return [(base, base + whole)]
    starts = [base]
    for step, n in outer:
        starts = [start + i * step for i, start in itertools.product(range(n), starts)]
    return [(start, start + run) for start in starts]


_NO_ACCESS = frozenset(
    {"aten::_unsafe_view", "aten::is_pinned", "aten::record_stream", "aten::resize_", "aten::set_"}
)
"""Ops that only look at where a tensor lies, or change that, and whose schemas do not say so."""


def _makes_anew(name: str) -> bool:
    """Whether an op takes only the looks of its first argument (``zeros_like``, ``new_full``)."""
    return name.endswith("_like") or name.startswith("new_")


def accesses(
    schema: Any, args: Sequence[Any], kwargs: dict[str, Any], tracked: Any
) -> tuple[list[Tensor], list[Tensor], bool]:
    """Tensors that an op reads, and those among its arguments that it writes; whether it writes
    what it returns anew.

    Args:
        tracked: says of a tensor whether it counts.
    """
    name = schema.name.partition("::")[2]
    if schema.name in _NO_ACCESS or name.startswith(("empty", "new_empty")):
        return [], [], False
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for k, argument in enumerate(schema.arguments):
        value = args[k] if k < len(args) else kwargs.get(argument.name)
        tensors = [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor) and tracked(t)]
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            writes += tensors
        elif alias is None and not (k == 0 and _makes_anew(name)):
            reads += tensors
    return reads, writes, True


# -- watching ------------------------------------------------------------------------------------


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class _Mode(TorchDispatchMode):
    def __init__(self, races: StreamRaces) -> None:
        super().__init__()
        self._races = races

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "lohan":  # Python, whose own ops would not be seen
            with self._races.watching(self):
                name = "_" + func._schema.name.partition("::")[2]
                module = ops if hasattr(ops, name) else gradient_sums
                return getattr(module, name)(*args, **kwargs)
        if func.has_kernel_for_dispatch_key(_COMPOSITE):  # below autograd these come whole
            with self._races.watching(self):
                return func.decompose(*args, **kwargs)
        return self._races.run(func, args, kwargs)


_unnoted = threading.local()


@contextmanager
def unnoted() -> Iterator[None]:
    """Nothing that this thread does to order streams leaves a note: a planted race without harm."""
    before = getattr(_unnoted, "on", False)
    _unnoted.on = True
    try:
        yield
    finally:
        _unnoted.on = before


class StreamRaces:
    """While it is entered, notes what this thread, autograd's and the lanes' put on streams.

    Enter it between two steps, after the first one: Dynamo traces nothing under a dispatch mode.
    Nothing may run on the lanes then (``model.lohan.sync()``), nor when it is left.

    Torch's trace stays on in this process, which slows it down a little.

    Attributes:
        notes: what `find_races` reads.
    """

    def __init__(self) -> None:
        self.notes: list[Launch | Order] = []
        self._local = threading.local()
        self._stack = ExitStack()
        self._mode = _Mode(self)

    @property
    def streams(self) -> set[int]:
        """Streams that something was launched on."""
        return {note.stream for note in self.notes if isinstance(note, Launch)}

    def races(self) -> list[Race]:
        return find_races(self.notes)

    def __enter__(self) -> StreamRaces:
        with ExitStack() as stack:
            stack.enter_context(self._lanes())
            stack.enter_context(self._adam())
            self.connect(stack)
            stack.enter_context(self._mode)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    # -- notes: appending to a list is one call of C, so threads need no lock -------------------

    @property
    def host(self) -> int:
        """The thread that this is: 0 for the user's and autograd's."""
        return getattr(self._local, "host", 0)

    def stream(self) -> int:
        """The stream that an op goes to."""
        return torch.cuda.current_stream().cuda_stream

    def tracked(self, tensor: Tensor) -> bool:
        """Whether a tensor is in memory that streams share."""
        return tensor.is_cuda

    def order(
        self,
        kind: Kind,
        *,
        stream: int = 0,
        event: int = 0,
    ) -> None:
        if not getattr(_unnoted, "on", False):
            self.notes.append(Order(kind, self.host, stream, event))

    def launch(self, op: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        self.launch_on(self.stream(), op, reads, writes)

    def launch_on(
        self, stream: int, op: str, reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> None:
        read = tuple(r for t in reads for r in runs(t))
        written = tuple(r for t in writes for r in runs(t))
        if read or written:
            self.notes.append(Launch(op, stream, self.host, read, written, _frames()))

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op, and note it."""
        with torch._C.DisableTorchFunctionSubclass():  # lent gradients wait when they are asked
            reads, writes, makes = accesses(func._schema, args, kwargs, self.tracked)
            self.launch(str(func), reads, writes)
        result = func(*args, **kwargs)
        if makes:
            given = {_storage(t) for t in (*reads, *writes)}
            made = [
                t
                for value, of in zip(_returned(result), func._schema.returns, strict=False)
                if of.alias_info is None
                for t in pytree.tree_leaves(value)
                if isinstance(t, Tensor) and self.tracked(t) and _storage(t) not in given
            ]
            self.launch(str(func), (), made)
        return result

    # -- where things are noted -----------------------------------------------------------------

    @contextmanager
    def watching(self, mode: _Mode) -> Iterator[None]:
        """Let a mode see the ops of this thread. Not by entering it: that also sets flags of the
        whole process, and threads would set each other's back."""
        _push_mode(mode)
        try:
            yield
        finally:
            _pop_mode()

    @contextmanager
    def _lanes(self) -> Iterator[None]:
        """Lanes have threads of their own, which no mode of this one reaches."""
        run_next = Lane._run_next

        def watched(lane: Lane) -> None:
            self._local.host = threading.get_ident()
            with self.watching(_Mode(self)):
                run_next(lane)

        with mock.patch.object(Lane, "_run_next", watched):
            yield

    @contextmanager
    def _adam(self) -> Iterator[None]:
        """Triton's kernels are launched past the dispatcher."""
        run = CudaAdamKernel.run

        def watched(kernel: CudaAdamKernel, updates: Sequence[Any]) -> None:
            for u in updates:
                written = (u.master, u.exp_avg, u.exp_avg_sq, u.copy)
                self.launch("adam_triton", [u.gradient], [t for t in written if t is not None])
            run(kernel, updates)

        with mock.patch.object(CudaAdamKernel, "run", watched):
            yield

    def connect(self, stack: ExitStack) -> None:
        """Note what orders streams from here on, until `stack` is closed."""
        torch._C._activate_gpu_trace()
        for registry, callback in (
            (gpu_trace.EventCreationCallbacks, lambda e: self.order("made", event=e)),
            (gpu_trace.EventRecordCallbacks, lambda e, s: self.order("record", stream=s, event=e)),
            (gpu_trace.EventWaitCallbacks, lambda e, s: self.order("wait", stream=s, event=e)),
            (gpu_trace.EventSynchronizationCallbacks, lambda e: self.order("event", event=e)),
            (gpu_trace.StreamSynchronizationCallbacks, lambda s: self.order("stream", stream=s)),
            (gpu_trace.DeviceSynchronizationCallbacks, lambda: self.order("device")),
        ):
            registry.add_callback(callback)
            stack.callback(registry.callback_list.remove, callback)
        torch.cuda.synchronize()  # what came before was not noted


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # it has none
        return -id(tensor)


def _returned(result: Any) -> tuple[Any, ...]:
    """An op's results one by one, as its schema counts them: a list is one of them."""
    return result if isinstance(result, tuple) else (result,)


_FOREIGN = (
    __file__,
    str(Path(__file__).with_name("simulated_streams.py")),
    str(Path(torch.__file__).parent),
    str(Path(threading.__file__).parent),
)
"""Where files lie whose frames say nothing: the checker's, torch's and the standard library's,
beside which lies what is installed."""


@functools.cache
def _short(path: str) -> str:
    return "/".join(Path(path).parts[-2:])


def _frames() -> tuple[str, ...]:
    """The innermost frames, but for foreign ones."""
    found: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < _FRAMES:
        name = frame.f_code.co_filename
        if not name.startswith(_FOREIGN):
            found.append(f"{_short(name)}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(found)
