"""Runs one rewritten program: slots of swapped residuals, stays of units, one step at a time.

The ops of the program (`runtime.ops`) call the methods named after them. All of them return at
once except release, wait and wait_unit, which make compute wait for a transfer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lohan_fx import footprint
from lohan_fx.errors import StepError
from lohan_fx.footprint import PAGE_BYTES, STRIPE_BYTES
from lohan_fx.plan import Plan, Tier
from lohan_fx.program import window_storage
from lohan_fx.runtime.arena import Arena, PageLocker
from lohan_fx.runtime.flats import views_of
from lohan_fx.runtime.lane import Ticket
from lohan_fx.runtime.lanes import Lanes, storage_of
from lohan_fx.runtime.recording import Label
from lohan_fx.runtime.ssd import IoPool, RunDirectory, StripedFile
from lohan_fx.runtime.states import ModelStates
from lohan_fx.runtime.unit_states import UnitStates
from lohan_fx.runtime.updates import Updater
from lohan_fx.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Where one swapped residual waits for backward. Offsets are in its tier's slot region."""

    name: str
    num_bytes: int
    tier: Tier
    offset: int


def slots_of(swapped: Iterable[str], workload: Workload, plan: Plan) -> list[Slot]:
    """The slots of a plan's swapped residuals, in this order."""
    where: dict[Tier, Mapping[str, tuple[int, int]]] = {
        "host": footprint.host_slots(workload, plan),
        "ssd": footprint.ssd_slots(workload, plan),
    }
    tiers = {v: plan.residuals[v].tier for v in swapped}
    return [
        Slot(
            name=v,
            num_bytes=workload.values[v].num_bytes,
            tier=tier,
            offset=where[tier][v][0],
        )
        for v, tier in tiers.items()
    ]


class SlotStore:
    """Host memory and SSD space for the slots of all programs of a model; they run in turn.

    Args:
        places: parts of equal size, for so many forwards that wait at once.
        name: tells stores that share a directory apart.
    """

    def __init__(
        self,
        *,
        pin: bool,
        locker: PageLocker | None = None,
        places: int = 1,
        name: str = "slots",
    ) -> None:
        self._pin = pin
        self._locker = locker
        self._name = name
        self.places = places
        self.arena: Arena | None = None
        self.file: StripedFile | None = None

    @property
    def host_bytes(self) -> int:
        """Bytes of one place in host memory."""
        return _share(self.arena.num_bytes, self.places) if self.arena is not None else 0

    @property
    def ssd_bytes(self) -> int:
        """Bytes of one place on SSDs."""
        return _share(self.file.num_bytes, self.places) if self.file is not None else 0

    def grow_host(self, num_bytes: int) -> None:
        """Have at least `num_bytes` of host memory a place. Nothing may be in use."""
        have = self.host_bytes
        if num_bytes > have:
            if self.arena is not None:
                self.arena.close()
                self.arena = None
            try:
                self.arena = self._slab(num_bytes)
            except BaseException:
                self.arena = self._slab(have) if have else None  # for the programs that there are
                raise

    def grow_ssd(self, num_bytes: int, run: RunDirectory, pool: IoPool) -> None:
        """Have at least `num_bytes` of SSD space a place. Nothing may be in use."""
        have = self.ssd_bytes
        if num_bytes > have:
            if self.file is not None:
                self.file.close()
                self.file = None

            def make(size: int) -> StripedFile:
                whole = self.places * size
                name = f"{self._name}-{whole}"
                return StripedFile(run, name, whole, pool, stripe_bytes=STRIPE_BYTES)

            try:
                self.file = make(num_bytes)
            except BaseException:
                self.file = make(have) if have else None  # for the programs that there are
                raise

    def _slab(self, num_bytes: int) -> Arena:
        arena = Arena(self.places * num_bytes, pin=self._pin, locker=self._locker)
        arena.register(0, self.places * num_bytes)
        return arena

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        if self.arena is not None:
            self.arena.close()


def _share(num_bytes: int, places: int) -> int:
    """Whole pages of each part."""
    return num_bytes // places // PAGE_BYTES * PAGE_BYTES


@dataclass(slots=True)
class _Loan:
    """A residual that is away: its shape, and the transfers that are under way."""

    num_bytes: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    storage_offset: int | torch.SymInt
    copied: Ticket
    written: Ticket | None
    loaded: Ticket | None = None
    held: Tensor | None = None

    @classmethod
    def of(cls, x: Tensor) -> _Loan:
        """A loan that moves nothing."""
        there = Ticket()
        there.finish()
        return cls(0, x.dtype, x.size(), x.stride(), x.storage_offset(), there, None, held=x)


class Engine:
    """One program, ready to run.

    Args:
        slots: numbered as in the program's ops.
        emit_order: units in the order in which backward emits their gradients.
        states, updater, lanes, store: shared with the model's other programs.

    Attributes:
        parked: units on the device whose gradients wait in host memory.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        emit_order: Sequence[int],
        states: ModelStates,
        updater: Updater | None,
        lanes: Lanes,
        store: SlotStore,
    ) -> None:
        self.slots = tuple(slots)
        self.emit_order = tuple(emit_order)
        self.parked: frozenset[int] = frozenset()
        self.states = states
        self.updater = updater
        self.lanes = lanes
        self.store = store
        self.place = 0  # of the forward, or backward, that runs
        self._loans: dict[tuple[int, int], _Loan] = {}
        self._fetches: dict[tuple[int, int], Ticket] = {}
        self._copies_shown = self._reads_shown = False  # since `settle_units`

    # -- the program's ops ------------------------------------------------------------------

    def offload(self, x: Tensor, slot: int) -> None:
        where = self.slots[slot]
        if x.device.type != self.lanes.device.type:  # traced as a device tensor, made on the host
            self._loans[self.place, slot] = _Loan.of(x)
            return
        last = sum((n - 1) * k for n, k in zip(x.size(), x.stride(), strict=True))
        need = (x.storage_offset() + last + 1) * x.element_size() if x.numel() else 0
        if need > where.num_bytes:
            raise StepError(
                f"{where.name} takes {need} bytes, {where.num_bytes} were planned: tracing showed "
                f"another dtype than {x.dtype} or another layout than the op gives on "
                f"{x.device.type}. Please report it; strategy='keep-all' does not move it"
            )
        source = storage_of(x)
        size = min(where.num_bytes, source.numel())
        source = source[:size]
        written = None
        label = self.lanes.label("offload", where.name)
        if where.tier == "host":
            assert self.store.arena is not None
            target = self.store.arena.view(self._offset(where), size)
            copied = self.lanes.to_host([(source, target)], label)
        else:
            assert self.store.file is not None
            copied, written = self.lanes.to_ssd(source, self.store.file, self._offset(where), label)
        self._loans[self.place, slot] = _Loan(
            num_bytes=size,
            dtype=x.dtype,
            size=x.size(),
            stride=x.stride(),
            storage_offset=x.storage_offset(),
            copied=copied,
            written=written,
        )

    def _offset(self, where: Slot) -> int:
        store = self.store
        each = store.host_bytes if where.tier == "host" else store.ssd_bytes
        return self.place * each + where.offset

    def release(self, slot: int) -> None:
        began = self.lanes.pause()
        copied = self._loans[self.place, slot].copied
        copied.wait(self.lanes.stream)
        self.lanes.resume(began, self.lanes.label("release", self.slots[slot].name), copied)

    def prefetch(self, slot: int) -> Tensor:
        where = self.slots[slot]
        loan = self._loans[self.place, slot]
        if loan.held is not None:
            loan.loaded = loan.copied
            return loan.held
        label = self.lanes.label("prefetch", where.name)
        flat = torch.empty(loan.num_bytes, dtype=torch.uint8, device=self.lanes.device)
        if where.tier == "host":
            assert self.store.arena is not None
            source = self.store.arena.view(self._offset(where), loan.num_bytes)
            loan.loaded = self.lanes.to_device([(source, flat)], label)
        else:
            assert self.store.file is not None
            loan.loaded = self.lanes.from_ssd(
                self.store.file, self._offset(where), flat, label, after=loan.written
            )
        whole = loan.num_bytes // loan.dtype.itemsize * loan.dtype.itemsize
        return flat[:whole].view(loan.dtype).as_strided(loan.size, loan.stride, loan.storage_offset)

    def wait(self, slot: int) -> None:
        loaded = self._loans.pop((self.place, slot)).loaded
        assert loaded is not None
        began = self.lanes.pause()
        loaded.wait(self.lanes.stream)
        self.lanes.resume(began, self.lanes.label("wait", self.slots[slot].name), loaded)

    def fetch_unit(self, unit: int, window: int) -> Tensor:
        states = self.states.units[unit]
        flats = states.flats
        assert flats is not None
        label = self.lanes.label("fetch_unit", window_storage(states.unit.name, window))
        if states.casts:
            flat, self._fetches[self.place, unit] = self._cast(states, label)
            return flat
        flat = torch.empty_like(flats.compute, device=self.lanes.device)
        after = self.updater.fresh(unit) if self.updater is not None else None
        if not states.copy_on_ssd:
            ticket = self.lanes.to_device([(flats.compute, flat)], label, after)
        else:
            assert self.states.file is not None

            def parked() -> Tensor | None:
                return None if states.copy_on_ssd else flats.compute.view(torch.uint8)

            ticket = self.lanes.from_ssd(
                self.states.file,
                states.offset,
                flat.view(torch.uint8),
                label,
                after=after,
                instead=parked,
            )
        self._fetches[self.place, unit] = ticket
        self._copies_shown |= flats.compute is states.visible
        return flat

    def _cast(self, states: UnitStates, label: Label) -> tuple[Tensor, Ticket]:
        """A compute copy made by compute itself, in order with updates and with what reads it."""
        began = self.lanes.pause()
        flat, there = states.cast(), Ticket()
        there.finish()
        self.lanes.resume(began, label, waits=False)
        return flat, there

    def wait_unit(self, flat: Tensor, unit: int, window: int) -> list[Tensor]:
        states = self.states.units[unit]
        label = self.lanes.label("wait_unit", window_storage(states.unit.name, window))
        began = self.lanes.pause()
        fetched = self._fetches.pop((self.place, unit))
        fetched.wait(self.lanes.stream)
        self.lanes.resume(began, label, fetched)
        return views_of(flat, states.layout.slices)

    def host_view(self, unit: int, num_bytes: int) -> list[Tensor]:
        """Views of a unit's host buffer that compute can read: `num_bytes` will cross the link."""
        states = self.states.units[unit]
        after = self.updater.fresh(unit) if self.updater is not None else None
        if after is not None:
            after.synchronize()
        self.lanes.count(h2d_bytes=num_bytes)
        assert states.flats is not None
        self._reads_shown |= states.flats.compute is states.visible
        return views_of(states.reachable(self.lanes.device), states.layout.slices)

    def write_gradient(
        self, gradients: Sequence[Tensor], unit: int, indices: Sequence[int]
    ) -> None:
        assert self.updater is not None
        self.updater.write(unit, gradients, indices)

    def emit_written(self, unit: int) -> None:
        assert self.updater is not None
        self.updater.emit_written(unit)

    def emit_gradients(self, gradients: Sequence[Tensor | None], unit: int) -> None:
        assert self.updater is not None
        self.updater.emit(unit, gradients, parked=unit in self.parked)

    def release_gradients(self, unit: int) -> None:
        assert self.updater is not None
        label = self.lanes.label("release_gradients", self.states.units[unit].unit.name)
        began = self.lanes.pause()
        self.lanes.resume(began, label, self.updater.release(unit))

    # -- one step ---------------------------------------------------------------------------

    def settle_units(self) -> None:
        """Wait on the host until neither copies nor compute itself read what parameters show of
        units in host memory: user code may write there now. (Compute copies beside masters are
        written by `ModelStates` alone, which waits where it does so.)"""
        if self._reads_shown:
            self.lanes.settle()
        elif self._copies_shown:
            self.lanes.h2d.drain()
        self._copies_shown = self._reads_shown = False

    def reset(self, place: int | None = None) -> None:
        """Forget what a step left behind that did not run to its end, in one place or in all.

        An interrupt may have struck between any two lines: so nothing is undone by its record,
        but everything that may run is waited for, and all buffers are taken back.
        """
        self.lanes.drain()
        if self.store.file is not None:
            self.store.file.drain()
        if self.lanes.staging is not None:
            self.lanes.staging.reset()
        self.forget(place)

    def forget(self, place: int | None = None) -> None:
        """Drop the records of what has been moved, in one place or in all."""
        for key in [k for k in self._loans if place in (None, k[0])]:
            del self._loans[key]
        for key in [k for k in self._fetches if place in (None, k[0])]:
            del self._fetches[key]
