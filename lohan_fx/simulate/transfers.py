"""Links and SSDs, and the threads that serve them."""

from __future__ import annotations

from collections import deque
from functools import partial

from lohan_fx.events import Clock, Process, Ring, Server, Signal, Worker
from lohan_fx.footprint import NUM_STAGING, staging_of
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import Plan
from lohan_fx.program import Program
from lohan_fx.simulate.recorder import Label, Recorder
from lohan_fx.simulate.rules import Rules
from lohan_fx.timeline import Lane
from lohan_fx.workload import Workload

CHUNKS_AHEAD = 4
"""SSD reads of one transfer in flight (`runtime.lanes._CHUNKS_AHEAD`)."""

URGENT = frozenset({"offload", "prefetch", "fetch_unit"})
"""Kinds of transfer for which compute may be waiting; to and from SSD they go in chunks."""

MAX_CHUNKS = 30_000
"""Chunks of all SSD transfers together; with more, chunks are simulated larger than they are."""


class Transfers:
    """The lanes d2h, h2d and ssd (`runtime.lanes.Lanes`).

    On a CPU device every copy of a direction goes through that direction's thread. On CUDA only
    copies to and from SSD do; others go straight to the stream, between the chunks of those.
    """

    def __init__(
        self,
        clock: Clock,
        record: Recorder,
        hw: HardwareProfile,
        chunk_bytes: int,
        rules: Rules,
    ) -> None:
        self.clock = clock
        self.hw = hw
        self.chunk_bytes = chunk_bytes
        self.rules = rules
        self.staging = Ring(clock, NUM_STAGING)
        self._ssd = Server(clock, partial(record.add, "ssd"))
        self._links: dict[Lane, Server] = {
            lane: Server(clock, partial(record.add, lane)) for lane in ("d2h", "h2d")
        }
        self._threads: dict[Lane, Worker] = {"d2h": Worker(clock), "h2d": Worker(clock)}
        self._streams = hw.device_kind == "cuda"
        self._rates: dict[Lane, float] = {"d2h": hw.d2h_bytes_per_s, "h2d": hw.h2d_bytes_per_s}
        shared = hw.duplex_bytes_per_s / sum(self._rates.values())
        if shared < 1:
            self._links["d2h"].couple(self._links["h2d"], shared)

    def link(self, lane: Lane, num_bytes: int, label: Label, *, by_compute: bool = False) -> Signal:
        """Occupy a direction of the link. What compute itself reads or writes goes first: it does
        not queue with copies, and they get what it leaves."""
        seconds = 0.0 if label.free else num_bytes / self._rates[lane]
        return self._links[lane].submit(seconds, label, num_bytes, urgent=by_compute)

    def read(self, num_bytes: int, label: Label) -> Signal:
        return self._io(num_bytes, self.hw.ssd_read_bytes_per_s, label)

    def write(self, num_bytes: int, label: Label) -> Signal:
        return self._io(num_bytes, self.hw.ssd_write_bytes_per_s, label)

    def _io(self, num_bytes: int, rate: float, label: Label) -> Signal:
        seconds = 0.0 if label.free else num_bytes / rate
        urgent = not self.rules.urgent_first or label.kind in URGENT
        return self._ssd.submit(seconds, label, num_bytes, urgent=urgent)

    # -- what instructions ask for ----------------------------------------------------------

    def copy(self, lane: Lane, num_bytes: int, label: Label, after: Signal | None = None) -> Signal:
        """Between device and host memory, not before `after`."""
        if self._streams and (after is None or after.done):
            return self.link(lane, num_bytes, label)

        def job() -> Process:
            if after is not None:
                yield after
            yield self.link(lane, num_bytes, label)

        return self._threads[lane].submit(job())

    def to_ssd(self, num_bytes: int, label: Label) -> tuple[Signal, Signal]:
        """Returns (the source has been copied, the bytes are on the SSD)."""
        written = Signal()

        def job() -> Process:
            left = self._chunks(num_bytes)
            count = len(left)

            def ended() -> None:
                nonlocal count
                count -= 1
                self.staging.release()
                if not count:
                    self.clock.fire(written)

            for size in left:
                yield self.staging.acquire()
                yield self.link("d2h", size, label)
                self.write(size, label).then(ended)

        return self._threads["d2h"].submit(job()), written

    def from_ssd(self, num_bytes: int, label: Label, after: Signal | None = None) -> Signal:
        """Returns the arrival on the device; reading begins after `after`."""

        def job() -> Process:
            if after is not None:
                yield after
            left = deque(self._chunks(num_bytes))
            reads: deque[tuple[int, Signal]] = deque()
            while left or reads:
                while left and len(reads) < CHUNKS_AHEAD:
                    if not reads:
                        yield self.staging.acquire()
                    elif not self.staging.try_acquire():
                        break
                    size = left.popleft()
                    reads.append((size, self.read(size, label)))
                size, read = reads[0]
                yield read
                yield self.link("h2d", size, label)
                reads.popleft()
                self.staging.release()

        return self._threads["h2d"].submit(job())

    def _chunks(self, num_bytes: int) -> list[int]:
        step = self.chunk_bytes
        whole, rest = divmod(num_bytes, step)
        return [step] * whole + ([rest] if rest or not whole else [])


def chunk_bytes_of(workload: Workload, plan: Plan, program: Program) -> int:
    """Size of a staging buffer, or more if there were too many chunks to simulate."""
    moved = sum(x.num_bytes for x in program.instructions if x.tier == "ssd" and x.kind in URGENT)
    return max(staging_of(workload, plan).num_bytes, moved // MAX_CHUNKS, 1)
