"""One unit's states: how they lie in memory or in a file, and what users see of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lohan_fx._compat import version_of, versions_of
from lohan_fx.annotate import UnitLayout
from lohan_fx.footprint import PAGE_BYTES, align, unit_bytes
from lohan_fx.initialization import realize
from lohan_fx.plan import Tier
from lohan_fx.runtime.flats import Flats, Lent, on_device, views_of
from lohan_fx.runtime.guards import ConsumedGradient, LentGradient
from lohan_fx.runtime.optimizer import UnitOptimizer
from lohan_fx.workload import Unit


@dataclass(slots=True, weakref_slot=True)
class UnitStates:
    """One unit at rest.

    `flats` are None for frozen parts; `offset` is the unit's place in the SSD file.
    `visible` are the flats whose views the user's parameters are (None: the parameters keep
    memory of their own, as frozen parameters do whose dtype is not the compute dtype).
    `sums` says of each parameter whether the unit's gradient flat holds a gradient of it; `grads`
    are views of that flat, for users, once there was need of them; `lent` and `guards` what else
    stands in ``.grad`` (`runtime.guards`). `positions` are the parameters' in model.parameters().
    `taken`: the optimizer's states of the unit are here, and no longer with the optimizer.
    `spare` are a host unit's second flats, which updates are tried in (schedule "speculative"; sums
    of gradients have no second flat). `away`: the two have traded places, an odd number of times.
    `parked`: an SSD unit that is in host memory, because its file could not be written.
    `host_copy`: the compute copy of an SSD unit whose file holds all but that (None: all of it).
    `casts`: a unit on the device that keeps no compute copy.
    `held`: the parameters' memory while it is their own, so that no other gets its `addresses`.
    Offsets and sizes below are of what lies together, so without it.
    """

    index: int
    unit: Unit
    layout: UnitLayout
    tier: Tier
    mixed: bool
    moment_names: tuple[str, ...]
    parameters: list[nn.Parameter]
    positions: list[int]
    optimizer: UnitOptimizer | None = None
    flats: Flats | None = None
    spare: Flats | None = None
    away: bool = False
    offset: int = -1
    host_copy: Tensor | None = None
    casts: bool = False
    visible: Tensor | None = None
    direct: Tensor | None = None
    parked: bool = False
    taken: bool = False
    versions: list[int] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)
    sums: list[bool] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    lent: list[LentGradient] = field(default_factory=list)
    guards: list[ConsumedGradient] = field(default_factory=list)

    @property
    def on_ssd(self) -> bool:
        return self.tier == "ssd" and not self.parked

    @property
    def copy_on_ssd(self) -> bool:
        return self.on_ssd and self.host_copy is None

    @property
    def num_bytes(self) -> int:
        return unit_bytes(self.unit, copy=self.host_copy is None)

    @property
    def _state_offset(self) -> int:
        return self.num_bytes - align(self.unit.state_bytes)

    @property
    def spare_bytes(self) -> int:
        """Of a second copy: all but the flat in which gradients add up."""
        unit = self.unit
        return align(unit.compute_bytes) + align(unit.state_bytes - unit.accumulator_bytes)

    @property
    def update_range(self) -> tuple[int, int]:
        """(offset, bytes) in the unit of what an update must read: all but a copy it rewrites."""
        first = self._state_offset if self.mixed else 0
        return first, self.num_bytes - first

    @property
    def _gradient_offset(self) -> int:
        return self._state_offset + self.unit.state_bytes - self.unit.accumulator_bytes

    @property
    def written_bytes(self) -> int:
        """From the unit's begin: what an update writes, up to the end of a page."""
        return align(self._gradient_offset)

    @property
    def gradient_range(self) -> tuple[int, int]:
        """(offset, bytes) in the unit of the pages that hold its gradient. The first one may begin
        with the end of the flat before."""
        first = self._gradient_offset // PAGE_BYTES * PAGE_BYTES
        return first, self.num_bytes - first

    def moments(self, flats: Flats) -> list[dict[str, Tensor]]:
        """The optimizer's states by name, parameter by parameter."""
        slices = self.layout.slices
        views = {name: views_of(flat, slices) for name, flat in flats.moments.items()}
        return [{name: of[i] for name, of in views.items()} for i in range(len(slices))]

    def carve(self, buffer: Tensor, *, sums: bool = True) -> Flats:
        """Lay the unit's flats over `num_bytes` bytes of uint8 memory (`spare_bytes`, if not
        `sums`)."""
        layout = self.layout
        position = self._state_offset
        compute = self.host_copy
        if compute is None:
            compute = buffer[: self.unit.compute_bytes].view(layout.copy_dtype)

        def take() -> Tensor:
            nonlocal position
            size = layout.numel * layout.dtype.itemsize
            flat = buffer[position : position + size].view(layout.dtype)
            position += size
            return flat

        return self._flats(compute, take, sums=sums)

    def allocate(self, device: torch.device, *, casts: bool) -> Flats:
        """Have the unit's flats on the device, zeroed, each in memory of its own: when the model is
        closed, weights stay that the module has, and nothing else of the unit with them."""
        layout = self.layout

        def take() -> Tensor:
            return torch.zeros(layout.numel, dtype=layout.dtype, device=device)

        compute = None if casts else self.new_copy(device).zero_()
        return self._flats(compute, take, sums=True)

    def new_copy(self, device: torch.device) -> Tensor:
        """Memory for a compute copy of the unit."""
        dtype = self.layout.copy_dtype
        return torch.empty(self.unit.compute_bytes // dtype.itemsize, dtype=dtype, device=device)

    def _flats(self, compute: Tensor | None, take: Callable[[], Tensor], *, sums: bool) -> Flats:
        master = take() if self.mixed or compute is None else compute
        moments = {name: take() for name in self.moment_names} if self.layout.trains else {}
        gradient = take() if sums and self.unit.accumulator_bytes else None
        copy = master if compute is None else compute
        return Flats(compute=copy, master=master, moments=moments, gradient=gradient)

    # -- what users see -------------------------------------------------------------------------

    def write(self, index: int, value: Tensor) -> None:
        """Copy the value of a parameter into the flats."""
        assert self.flats is not None
        s = self.layout.slices[index]
        for flat in self.flats.weights:
            flat.as_strided(s.shape, s.stride, flat.storage_offset() + s.offset).copy_(value)

    def expose(self) -> None:
        """Make the parameters views of the flats."""
        if self.visible is not None:
            flats = self.flats
            assert flats is not None
            if not flats.shown:  # the same each time: who keeps it is seen by it
                views = views_of(self.visible, self.layout.slices)
                flats.shown = [Lent.of(view) for view in views]
            for p, part in zip(self.parameters, flats.shown, strict=True):
                if p.is_meta:
                    realize(p, part.memory.data)  # a version of its own: updates are not the user's
                else:
                    p.data = part.memory
        else:
            self.held = [p.detach() for p in self.parameters]
        self.versions = versions_of(self.parameters)
        self.addresses = addresses_of(self.parameters)

    def written(self) -> list[int]:
        """The parameters that user code wrote to, or gave other memory, since they were exposed, or
        may have."""
        may = self.may_be_written()
        if (
            not may
            and versions_of(self.parameters) == self.versions
            and addresses_of(self.parameters) == self.addresses
        ):
            return []
        return [i for i in range(len(self.parameters)) if i in may or self._is_counted(i)]

    def _is_counted(self, i: int) -> bool:
        """Whether a parameter's version or address says that user code wrote into it."""
        return version_of(self.parameters[i]) != self.versions[i] or self._is_moved(i)

    def may_be_written(self) -> Collection[int]:
        """The parameters, other than the unit's flats, that another optimizer trains: torch's fused
        ones write where nobody counts, as those do that write into ``.data``."""
        if self.optimizer is not None or self.visible is not None:
            return ()
        return {i for i, p in enumerate(self.parameters) if p.requires_grad}

    def is_another_optimizers(self, written: Iterable[int]) -> bool:
        """Whether a write to these parameters is an optimizer's that is not ours: no update of ours
        changes them, and nothing reads them any more when they have their gradients."""
        return self.optimizer is None and all(self.parameters[i].requires_grad for i in written)

    def _is_moved(self, i: int) -> bool:
        p, flat = self.parameters[i], self.visible
        if p.numel() == 0:
            return False
        if flat is None:
            return self.addresses[i : i + 1] != [p.data_ptr()]
        address = flat.data_ptr() + self.layout.slices[i].offset * flat.element_size()
        return bool(p.data_ptr() != address or p.device != flat.device)

    def copy_written(
        self,
        written: Collection[int],
        settle: Callable[[UnitStates], None],
        *,
        compare: bool = True,
    ) -> dict[int, bool]:
        """Copy what user code wrote into the flats that it did not write into itself, once they are
        not read any more (`settle`).

        Other parameters keep their masters, which are more than their compute copies, unless they
        were written where nobody counts (``.data``), if flats are to be compared. Says which had
        anything to copy, and whether their version shows that they were written. (An address does
        not any more: they are views of the flats again.)
        """
        assert self.flats is not None
        copied = {}
        with torch.no_grad():
            for flat in self.flats.weights:
                for i, view in enumerate(views_of(flat, self.layout.slices)):
                    p = self.parameters[i].detach()
                    if flat is self.visible:
                        differs = self._is_moved(i)
                    else:
                        counted = i in written and self._is_counted(i)
                        differs = counted or (compare and not _agree(view, p))
                    if differs:
                        settle(self)
                        view.copy_(p)
                        copied[i] = version_of(self.parameters[i]) != self.versions[i]
        self.expose()
        return copied

    def cast(self) -> Tensor:
        """A compute copy, cast from the master where that is."""
        assert self.flats is not None
        master = self.flats.master
        return self.new_copy(master.device).copy_(master)

    def keep_copy(self, keep: bool) -> None:
        """Have a compute copy of a unit on the device from now on, or none. Nothing reads it. If
        there is no room, nothing has changed."""
        flats = self.flats
        assert flats is not None
        # both at once: an interrupt finds the one or the other
        flats.compute, self.casts = self.cast() if keep else flats.master, not keep

    def reachable(self, device: torch.device) -> Tensor:
        """A host unit's compute copy as a tensor of the compute device, without a copy."""
        assert self.flats is not None
        if self.direct is None:
            self.direct = on_device(self.flats.compute, device)
        return self.direct

    # -- second copies --------------------------------------------------------------------------

    def give_spare(self, buffer: Tensor) -> None:
        """Have second flats in `spare_bytes` bytes of registered host memory."""
        flats = self.flats
        assert flats is not None
        spare = self.carve(buffer, sums=False)
        spare.gradient = flats.gradient
        if self.visible is not None:  # now, so that nothing is left to fail in `flip`
            visible = spare.compute if self.visible is flats.compute else spare.master
            spare.shown = [Lent.of(view) for view in views_of(visible, self.layout.slices)]
        self.spare = spare

    def may_flip(self) -> bool:
        """Whether nobody would miss it: no one else looks at the memory of the unit's parameters or
        states (a state_dict() that is kept, an array, a view), which must go on showing them, and
        user code has written nothing into parameters since they were exposed."""
        assert self.flats is not None
        return not self.flats.is_held() and not self.written()

    def flip(self) -> None:
        """Go on with the second flats, and let the parameters be views of them."""
        old, new = self.flats, self.spare
        assert old is not None
        assert new is not None
        in_copy = self.visible is old.compute
        self.flats, self.spare, self.away = new, old, not self.away
        self.direct = None
        if self.visible is None:
            return
        self.visible = new.compute if in_copy else new.master
        self.expose()

    def drop_spare(self) -> None:
        """Go on without second flats, in the memory that the unit had first. Nothing reads or
        writes either; what users wrote into parameters has been taken over."""
        if self.away:
            old, new = self.flats, self.spare
            assert old is not None
            assert new is not None
            new.copy_from(old)
            self.flip()
        self.spare = None
        # the second memory stays as it is: a state_dict() that somebody holds may look into it


def _agree(view: Tensor, p: Tensor) -> bool:
    """Whether the one of less precision is the other's cast. (Casts of NaN may differ in bits.)"""
    if view.element_size() > p.element_size():
        view, p = p, view
    cast = p.to(view)
    if torch.equal(view, cast):
        return True
    same = (view == cast) | (view.isnan() & cast.isnan()) if cast.isnan().any() else None
    return same is not None and bool(same.all())


def addresses_of(tensors: Iterable[Tensor]) -> list[int]:
    """Where their memory begins."""
    return [*map(Tensor.data_ptr, tensors)]
