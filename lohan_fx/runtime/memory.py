"""What all programs of a model share: host memory, lanes, the directory on SSDs, the states.

Nothing is planned here. `compiled.Programs`, and each graph of the torch.compile backend, has one
`Memory`; a program only asks it for buffers.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from torch import Tensor

from lohan_fx.errors import InsufficientMemoryError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.runtime.arena import Arena, BufferRing, Layout, PageLocker, Region
from lohan_fx.runtime.engine import SlotStore
from lohan_fx.runtime.lanes import Lanes
from lohan_fx.runtime.ssd import IoPool, RunDirectory, StripedFile
from lohan_fx.runtime.states import ModelStates
from lohan_fx.runtime.updates import Updater

NUM_IO_THREADS = 4
"""For each directory."""


@dataclass(kw_only=True)
class Memory:
    """What all programs of a model share: host memory, lanes, the SSD directory, the states.

    `buffers` are what bytes pass through: staging, gradients, states under update, as
    name → (number, bytes of all); they grow if a later program needs more. `connected`: the
    updater has the present ones. `pid`: the process whose threads work here.
    """

    pin: bool
    lanes: Lanes
    store: SlotStore
    locker: PageLocker
    states: ModelStates = field(init=False)
    updater: Updater | None = None
    connected: bool = False
    arena: Arena | None = None
    moved: list[Arena] = field(default_factory=list)
    spares: list[Arena] = field(default_factory=list)
    buffers: dict[str, tuple[int, int]] = field(default_factory=dict)
    buffer_arena: Arena | None = None
    regions: dict[str, Region] = field(default_factory=dict)
    pool: IoPool | None = None
    run: RunDirectory | None = None
    file: StripedFile | None = None
    pid: int = field(default_factory=os.getpid)

    def open_ssd(self, paths: Sequence[str]) -> tuple[RunDirectory, IoPool]:
        """Have a directory of this run, and threads for transfers."""
        if self.run is None or self.pool is None:
            self.run = RunDirectory(paths)
            self.pool = IoPool(NUM_IO_THREADS * len(paths))
        return self.run, self.pool

    def grow_buffers(self, wanted: Mapping[str, tuple[int, int]]) -> bool:
        """Have at least the `wanted` buffers; says whether that changed any."""
        merged = dict(self.buffers)
        for name, (count, size) in wanted.items():
            merged[name] = (count, max(size, merged.get(name, (0, 0))[1]))
        if merged == self.buffers:
            return False
        layout = Layout()
        regions = {name: layout.reserve(size, name) for name, (_, size) in merged.items()}
        arena = Arena(layout.total_bytes, pin=self.pin, locker=self.locker)
        for region in regions.values():
            arena.register(region.offset, region.num_bytes)
        self.connected = False
        if self.buffer_arena is not None:
            self.lanes.settle()  # an update may still read parked gradients
            self.buffer_arena.close()
        self.buffer_arena, self.regions, self.buffers = arena, regions, merged
        if "staging" in merged:
            self.lanes.staging = self.ring("staging")
        return True

    def make_spares(self, units: Collection[str]) -> None:
        """Have second copies of these units, where in host memory (schedule "speculative")."""
        lacking = [
            states
            for states in self.states.trained
            if states.tier == "host" and states.spare is None and states.unit.name in units
        ]
        if not lacking:
            return
        arena = Arena(sum(s.spare_bytes for s in lacking), pin=self.pin, locker=self.locker)
        self.spares.append(arena)
        offset = 0
        for states in lacking:
            arena.register(offset, states.spare_bytes)
            states.give_spare(arena.view(offset, states.spare_bytes))
            offset += states.spare_bytes

    def drop_spares(self) -> None:
        """Give the second copies' memory back. No updates run."""
        if not self.spares:
            return
        self.lanes.drain()
        self.lanes.settle()  # a forward may still read units where they lie
        for states in self.states.units:
            states.drop_spare()
        for arena in self.spares:
            arena.close()
        self.spares = []

    def ring(self, name: str) -> BufferRing | None:
        """A new ring over the buffers of that name."""
        if name not in self.regions or self.buffer_arena is None:
            return None
        return BufferRing(self.buffer_arena, self.regions[name], self.buffers[name][0])

    def buffer(self, name: str) -> Tensor:
        """The one buffer of that name."""
        assert self.buffer_arena is not None
        region = self.regions[name]
        return self.buffer_arena.view(region.offset, region.num_bytes)

    @property
    def inherited(self) -> bool:
        """Whether this is a forked child, which has none of the threads."""
        return os.getpid() != self.pid

    def close(self, *, joins: bool = True) -> None:
        """Join all threads, give all memory back, remove all files. A second call does what an
        interrupted one left, or nothing; so does one in a forked child, which has no threads.
        `joins` as for `Lane.close`.

        Memory behind parameters that somebody still holds, and behind states that the optimizer
        has, goes with the last of them.
        """
        if self.inherited:
            return
        if self.updater is not None:
            self.updater.abort()
            self.updater.close(joins=joins)
        with suppress(RuntimeError):  # a device that has failed reads nothing any more
            self.lanes.settle()
        self.lanes.close(joins=joins)
        self.store.close()
        if self.file is not None:
            self.file.close()
        if self.pool is not None:
            self.pool.close(joins=joins)
        if self.run is not None:
            self.run.close()
        for arena in (self.arena, self.buffer_arena, *self.moved, *self.spares):
            if arena is not None:
                arena.close()
        self.lanes.staging = None  # now that no write gives a buffer back
        states = getattr(self, "states", None)
        if states is not None:
            states.close()


def ssd_paths(hw: HardwareProfile, need_bytes: int) -> list[str]:
    """The profile's SSD directories. Raises InsufficientMemoryError if there are none."""
    paths = [d.path for d in hw.ssds]
    if not paths:
        raise InsufficientMemoryError(
            "ssd", need_bytes, 0, where="the plan", advice="give profile_hardware(ssd=[…])"
        )
    return paths
