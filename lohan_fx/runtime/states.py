"""Where a model's states live: flat buffers a unit, in the tier that the plan chose.

Every unit has one flat compute copy (what the graph reads), and if it trains, in mixed precision
a flat fp32 master, one flat tensor for each optimizer state, and where gradients add up, one for
them. The model's parameters stay usable tensors: each becomes a view of its unit's flat buffer, in
device memory, in the host slab, or in a mapping of the SSD file; so does ``.grad``, if it is kept.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from lohan_fx._compat import storage_users, version_of
from lohan_fx.annotate import Slice, StateLayout, UnitLayout
from lohan_fx.errors import LohanError, StepError, StorageError, format_bytes
from lohan_fx.footprint import PAGE_BYTES, align, unit_bytes
from lohan_fx.initialization import realize
from lohan_fx.plan import Tier
from lohan_fx.runtime._memory import forget_pages, replace_pages, tensor_over
from lohan_fx.runtime.arena import Arena, Region, available_host_bytes
from lohan_fx.runtime.guards import ConsumedGradient, LentGradient
from lohan_fx.runtime.initial_state import pull_initial_state, release_state
from lohan_fx.runtime.optimizer import UnitOptimizer
from lohan_fx.runtime.ssd import StripedFile
from lohan_fx.weights import Source
from lohan_fx.workload import Unit

logger = logging.getLogger("lohan_fx")


def views_of(flat: Tensor, slices: Sequence[Slice]) -> list[Tensor]:
    """One view a parameter, with the parameter's shape and strides."""
    base = flat.storage_offset()
    return [flat.as_strided(s.shape, s.stride, base + s.offset) for s in slices]


class _HostBytes:
    """Registered host memory, shown to CUDA under its own address (unified addressing)."""

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat  # keeps the memory alive
        self.__cuda_array_interface__ = {
            "shape": (flat.numel() * flat.element_size(),),
            "typestr": "|u1",
            "data": (flat.data_ptr(), False),
            "version": 3,
        }


def on_device(flat: Tensor, device: torch.device) -> Tensor:
    """Flat host memory as a tensor on `device`, without a copy (MemFerry's direct host access).

    Raises:
        LohanError: the memory is not pinned, so the device cannot reach it.
    """
    if device.type == "cpu":
        return flat
    if not flat.is_pinned():
        raise LohanError(
            "direct host access needs pinned memory, and the system refused to pin it: raise the "
            "limit on locked memory (ulimit -l), or choose a strategy without direct access"
        )
    return torch.as_tensor(_HostBytes(flat), device=device).view(flat.dtype)


def _alone(view: Tensor) -> Tensor:
    """The same memory as a storage of its own, so that saving a parameter saves nothing else."""
    if view.device.type != "cpu" or not view.numel():
        return view
    num_bytes = view.numel() * view.element_size()
    memory = tensor_over(view.data_ptr(), num_bytes, partial(_hold, view))
    return memory.view(view.dtype).as_strided(view.shape, view.stride())


def _hold(_: Tensor) -> None:
    """Keeps what a storage lies in alive for as long as the storage."""


@dataclass(slots=True)
class Lent:
    """A parameter's part of a flat as users get it, who may keep it: a storage of its own.

    `users` are the tensors that share it while no user does.
    """

    memory: Tensor
    users: int

    @classmethod
    def of(cls, view: Tensor) -> Lent:
        memory = _alone(view)
        return cls(memory, storage_users(memory))


@dataclass(slots=True)
class Flats:
    """The buffers of one unit somewhere: at rest, or in a staging buffer during its update.

    `gradient` is where gradients add up, in the master's dtype; None if they do not. `shown` is
    what parameters have been given of these flats, `lent` what the optimizer has, by state.
    """

    compute: Tensor
    master: Tensor
    moments: dict[str, Tensor]
    gradient: Tensor | None = None
    shown: list[Lent] = field(default_factory=list)
    lent: dict[str, list[Lent]] = field(default_factory=dict)

    def is_held(self) -> bool:
        """Whether somebody else looks at what parameters and the optimizer were given."""
        given = itertools.chain.from_iterable(self.lent.values())
        return any(_shares(part, 1) for part in self.shown) or any(
            _shares(part, 0) for part in given
        )


def _shares(part: Lent, num_own: int) -> bool:
    """Whether more than `num_own` tensors outside share it. (A tensor without elements has no
    storage of its own, and shows nothing.)"""
    memory = part.memory
    return memory.numel() != 0 and storage_users(memory) > part.users + num_own


@dataclass(slots=True)
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
    visible: Tensor | None = None
    direct: Tensor | None = None
    parked: bool = False
    taken: bool = False
    versions: list[int] = field(default_factory=list)
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

        master = take() if self.mixed else compute
        moments = {name: take() for name in self.moment_names} if layout.trains else {}
        gradient = take() if sums and self.unit.accumulator_bytes else None
        return Flats(compute=compute, master=master, moments=moments, gradient=gradient)


def _take_states(states: UnitStates, optimizer: torch.optim.Optimizer) -> None:
    """Move what the optimizer keeps for a unit into the unit's flats."""
    if states.optimizer is None or states.flats is None:
        return
    names = [s.name for s in states.layout.slices]
    initial = pull_initial_state(optimizer, states.parameters, names)
    for name, flat in states.flats.moments.items():
        views = views_of(flat, states.layout.slices)
        for view, tensors in zip(views, initial.tensors, strict=True):
            if name in tensors:
                view.copy_(tensors[name])
    states.optimizer.load_scalar_state(initial.scalars)
    states.taken = True
    release_state(optimizer, states.parameters)


def _is_written(states: UnitStates) -> bool:
    """Whether user code wrote through a parameter of the unit."""
    return [version_of(p) for p in states.parameters] != states.versions


class ModelStates:
    """The states of all units of one compiled model.

    Args:
        model: its parameters become views of the flat buffers.
        units, layouts: from `annotate`, in the same order.
        tiers: unit → tier.
        state_layout: compute dtype and number of optimizer states.
        optimizer: the user's optimizer; None if nothing is managed for it.
        device: the compute device.
        arena, region: the slab and the part of it that holds the host units, and the `copies`.
        file: the SSD file that holds the SSD units.
        source: gives units with parameters on the meta device their values.
        copies: SSD units whose compute copies are in the slab.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        layouts: Sequence[UnitLayout],
        tiers: Mapping[str, Tier],
        state_layout: StateLayout,
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
        arena: Arena | None,
        region: Region | None,
        file: StripedFile | None,
        source: Source | None = None,
        copies: Collection[str] = (),
    ) -> None:
        self.device = device
        self.file = file
        self._mapping = file.map() if file is not None else None
        by_name = dict(model.named_parameters())
        places = {name: i for i, name in enumerate(by_name)}
        self.units: list[UnitStates] = []
        host_offset = region.offset if region is not None else 0
        ssd_offset = 0

        def in_slab(num_bytes: int) -> Tensor:
            nonlocal host_offset
            assert arena is not None
            arena.register(host_offset, align(num_bytes))
            buffer = arena.view(host_offset, num_bytes)
            host_offset += align(num_bytes)
            return buffer

        for index, (unit, layout) in enumerate(zip(units, layouts, strict=True)):
            parameters = [by_name[s.name] for s in layout.slices]
            states = UnitStates(
                index=index,
                unit=unit,
                layout=layout,
                tier=tiers[unit.name],
                mixed=layout.trains and state_layout.compute_dtype is not None,
                moment_names=(),
                parameters=parameters,
                positions=[places[s.name] for s in layout.slices],
                sums=[False] * len(parameters),
            )
            if layout.trains and optimizer is not None:
                states.optimizer = UnitOptimizer(
                    optimizer, parameters, prefer_fused=state_layout.compute_dtype is not None
                )
                states.moment_names = states.optimizer.state_names()
            if states.tier == "device":
                buffer = torch.zeros(states.num_bytes, dtype=torch.uint8, device=device)
            elif states.tier == "host":
                buffer = in_slab(states.num_bytes)
            else:
                assert self._mapping is not None
                if unit.name in copies:
                    states.host_copy = in_slab(unit.compute_bytes).view(layout.copy_dtype)
                buffer = self._mapping[ssd_offset : ssd_offset + states.num_bytes]
                states.offset = ssd_offset
                ssd_offset += states.num_bytes
            states.flats = flats = states.carve(buffer)
            dtype = parameters[0].dtype
            states.visible = next(
                (f for f in (flats.master, flats.compute) if f.dtype == dtype), None
            )
            self.units.append(states)
        try:
            self._take_over(model, optimizer, source)
        except BaseException:
            if optimizer is not None:
                self.give_back(optimizer)  # the model goes on without us
            raise

    @property
    def copies(self) -> frozenset[str]:
        """SSD units whose compute copies are in host memory."""
        return frozenset(s.unit.name for s in self.units if s.host_copy is not None)

    def _take_over(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        source: Source | None,
    ) -> None:
        """Move all units in: from the model's memory, or for parameters on meta from `source`."""
        on_meta: list[str] = []
        for states in self.units:
            with torch.no_grad():
                for i, (s, p) in enumerate(
                    zip(states.layout.slices, states.parameters, strict=True)
                ):
                    if p.is_meta:
                        on_meta.append(s.name)
                    else:
                        self._write(states, i, p.detach())
            if not any(p.is_meta for p in states.parameters):
                self._adopt(states, optimizer)
        if on_meta:
            assert source is not None
            self.write(source.stream(model, on_meta), on_meta, optimizer)

    @staticmethod
    def _write(states: UnitStates, index: int, value: Tensor) -> None:
        """Copy the value of a unit's parameter into its flats."""
        flats = states.flats
        assert flats is not None
        s = states.layout.slices[index]
        for flat in {id(f): f for f in (flats.compute, flats.master)}.values():
            flat.as_strided(s.shape, s.stride, flat.storage_offset() + s.offset).copy_(value)

    def _adopt(self, states: UnitStates, optimizer: torch.optim.Optimizer | None) -> None:
        """Take a unit's optimizer state, and make its parameters views of its flats."""
        if optimizer is not None:
            with torch.no_grad():
                _take_states(states, optimizer)
        self._expose(states)
        self.flush(states)

    def write(
        self,
        values: Iterable[tuple[str, Tensor]],
        names: Collection[str],
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Write parameters by name, as they come; each unit's are exposed with its last one.

        Args:
            values: of any floating dtype, in any order.
            names: of all that come.
            optimizer: has states for these units, to be taken over.
        """
        where = {
            s.name: (states, i) for states in self.units for i, s in enumerate(states.layout.slices)
        }
        waiting = Counter(where[name][0].index for name in names)
        for name, value in values:
            states, i = where[name]
            p = states.parameters[i]
            with torch.no_grad():
                self._write(states, i, value)
                if states.visible is None:  # it keeps memory of its own
                    if p.is_meta:
                        realize(p, torch.empty_like(p, device="cpu"))
                    p.copy_(value)
            waiting[states.index] -= 1
            if not waiting[states.index]:
                self._adopt(states, optimizer)

    def _expose(self, states: UnitStates) -> None:
        if states.visible is not None:
            flats = states.flats
            assert flats is not None
            if not flats.shown:  # the same each time: who keeps it is seen by it
                views = views_of(states.visible, states.layout.slices)
                flats.shown = [Lent.of(view) for view in views]
            for p, part in zip(states.parameters, flats.shown, strict=True):
                if p.is_meta:
                    realize(p, part.memory.data)  # a version of its own: updates are not the user's
                else:
                    p.data = part.memory
        states.versions = [version_of(p) for p in states.parameters]

    # -- second copies --------------------------------------------------------------------------

    def without_spare(self) -> list[UnitStates]:
        """Trained host units that have no second flats."""
        return [s for s in self.trained if s.tier == "host" and s.spare is None]

    def give_spare(self, states: UnitStates, buffer: Tensor) -> None:
        """Let a unit have its second flats in `spare_bytes` bytes of registered host memory."""
        flats = states.flats
        assert flats is not None
        spare = states.carve(buffer, sums=False)
        spare.gradient = flats.gradient
        if states.visible is not None:  # now, so that nothing is left to fail in `flip`
            visible = spare.compute if states.visible is flats.compute else spare.master
            spare.shown = [Lent.of(view) for view in views_of(visible, states.layout.slices)]
        states.spare = spare

    def may_flip(self, states: UnitStates) -> bool:
        """Whether nobody would miss it: no one else looks at the memory of the unit's parameters or
        states (a state_dict() that is kept, an array, a view), which must go on showing them, and
        user code has written nothing into parameters since they were exposed."""
        assert states.flats is not None
        return not states.flats.is_held() and not self._is_changed(states)

    def flip(self, states: UnitStates) -> None:
        """Go on with the unit's second flats, and let its parameters be views of them."""
        old, new = states.flats, states.spare
        assert old is not None
        assert new is not None
        in_copy = states.visible is old.compute
        states.flats, states.spare, states.away = new, old, not states.away
        states.direct = None
        if states.visible is None:
            return
        states.visible = new.compute if in_copy else new.master
        self._expose(states)

    def drop_spares(self) -> None:
        """Go on without second flats: units return to the memory that they had first. Nothing reads
        or writes either; what users wrote into parameters has been taken over."""
        for states in self.units:
            if states.away:
                old, new = states.flats, states.spare
                assert old is not None
                assert new is not None
                new.compute.copy_(old.compute)
                if new.master is not new.compute:
                    new.master.copy_(old.master)
                for name, flat in new.moments.items():
                    flat.copy_(old.moments[name])
                self.flip(states)
            states.spare = None
        # the second memory stays as it is: a state_dict() that somebody holds may look into it

    def sync_from_user(self, *, behind: bool = False) -> None:
        """Take over what user code wrote into parameters since the last step.

        Writes through a parameter (``load_state_dict``, ``copy_``) are seen by its version
        counter, replaced memory (``p.data = …``) by its address.

        Args:
            behind: updates of the last step may still run.

        Raises:
            StepError: something was written, and `behind`.
        """
        written = [(s, moved) for s in self.units if (moved := self._moved(s)) or _is_written(s)]
        if written and behind:
            raise StepError(
                f"parameters of {written[0][0].unit.name} were written while updates of the last "
                "step were running, and one of the two is lost: call model.lohan.sync() before "
                "writing into parameters, or use schedule='serial' or 'optimized'"
            )
        for states, moved in written:
            flats = states.flats
            assert flats is not None
            with torch.no_grad():
                for flat in {id(f): f for f in (flats.compute, flats.master)}.values():
                    if flat is states.visible and not moved:
                        continue
                    views = views_of(flat, states.layout.slices)
                    for view, p in zip(views, states.parameters, strict=True):
                        view.copy_(p.detach())
            self._expose(states)
        if any(states.on_ssd for states, _ in written):
            self.flush()

    def _is_changed(self, states: UnitStates) -> bool:
        return self._moved(states) or _is_written(states)

    @staticmethod
    def _moved(states: UnitStates) -> bool:
        flat = states.visible
        if flat is None:
            return False
        start, size, device = flat.data_ptr(), flat.element_size(), flat.device
        return any(
            p.numel() != 0 and (p.data_ptr() != start + s.offset * size or p.device != device)
            for p, s in zip(states.parameters, states.layout.slices, strict=True)
        )

    def move(self, states: UnitStates, arena: Arena | None) -> None:
        """Move a unit between device and host, between two steps: to `arena`, or the device.

        The parameters become views of where it is then. If there is no room, nothing has changed.
        The copies have ended when it returns. Old memory goes with its slab, when all is closed.
        """
        if arena is None:
            buffer = torch.zeros(states.num_bytes, dtype=torch.uint8, device=self.device)
        else:
            buffer = arena.view(0, states.num_bytes)
            arena.register(0, states.num_bytes)
        old, flats = states.flats, states.carve(buffer)
        assert old is not None
        flats.compute.copy_(old.compute)
        if flats.master is not flats.compute:
            flats.master.copy_(old.master)
        for name, flat in flats.moments.items():
            flat.copy_(old.moments[name])
        given = [p.grad for p in states.parameters]
        owned = [g is not None and self.owns(states, i, g) for i, g in enumerate(given)]
        if flats.gradient is not None and old.gradient is not None:
            flats.gradient.copy_(old.gradient)
            states.grads, states.lent = [], []
        for p in states.parameters:
            p.grad = None  # it may have to be on another device
        if states.visible is not None:
            states.visible = flats.compute if states.visible is old.compute else flats.master
        states.flats, states.direct = flats, None
        states.spare, states.away = None, False
        states.tier = "device" if arena is None else "host"
        self._expose(states)
        for i, (p, gradient) in enumerate(zip(states.parameters, given, strict=True)):
            if owned[i]:
                p.grad = self._grads(states)[i]
            elif isinstance(gradient, ConsumedGradient):
                states.guards[i] = ConsumedGradient.of(p)
                states.guards[i].zeroed = gradient.zeroed
                p.grad = states.guards[i]
            elif gradient is not None:
                p.grad = gradient.to(p.device)
        # the old memory stays as it is: a state_dict() that somebody holds may look into it

    def park(self, states: UnitStates, buffer: Tensor, first: int, error: BaseException) -> bool:
        """Keep a unit in host memory whose new states, in `buffer`, could not be written.

        The memory takes the place of the unit's part of the file mapping, so parameters and
        flats are the new states, under their old addresses. Called when nobody reads what is new.

        Args:
            first: the bytes before are not in the buffer: they are as in the file.

        Returns:
            whether there was enough memory, and the file could be read.
        """
        assert self._mapping is not None
        assert self.file is not None
        if available_host_bytes() < 2 * states.num_bytes:
            return False
        try:
            if first:
                self.file.pread_here(buffer[:first], states.offset)
            target = self._mapping.data_ptr() + states.offset
            replace_pages(target, buffer[: states.num_bytes])
        except (OSError, StorageError):
            return False
        states.parked = True
        logger.warning(
            "lohan_fx: %s. The states of %s stay in host memory from now on (%s beyond the plan), "
            "and training goes on; save a checkpoint and replace the disk",
            error,
            states.unit.name,
            format_bytes(states.num_bytes),
        )
        return True

    def flush(self, written: UnitStates | None = None) -> None:
        """Make writes through the SSD mapping visible to direct reads of the file.

        Args:
            written: the one unit that was written, if it was one: its pages leave the process.
        """
        if self.file is not None and (written is None or written.on_ssd):
            self.file.flush()
            if written is not None:
                assert self._mapping is not None
                end = written.offset + written.num_bytes
                forget_pages(self._mapping[written.offset : end])

    def forget(self) -> None:
        """Let pages of the SSD mapping that were only read leave the process."""
        if self._mapping is not None:
            forget_pages(self._mapping)

    # -- gradients that stay --------------------------------------------------------------------

    @property
    def trained(self) -> list[UnitStates]:
        """The units that the optimizer updates."""
        return [states for states in self.units if states.optimizer is not None]

    def take_gradients(self) -> None:
        """See which parameters have a ``.grad``; one that is not ours is copied into its place.

        Afterwards `UnitStates.sums` say so, and transfers see what user code did to gradients.
        """
        on_ssd = False
        with torch.no_grad():
            for states in self.trained:
                for i, p in enumerate(states.parameters):
                    given = p.grad
                    states.sums[i] = given is not None
                    if given is not None and not self.owns(states, i, given):
                        own = self._grads(states)[i]
                        own.copy_(given)
                        p.grad = own
                on_ssd |= states.on_ssd and any(states.sums)
        if on_ssd:
            self.flush()

    def show_gradients(self, emitted: Iterable[tuple[int, Sequence[bool]]]) -> None:
        """Make the ``.grad`` of parameters of these units, where there is a sum, views of it."""
        for index, _ in emitted:
            states = self.units[index]
            views = self._grads(states)
            for p, view, has in zip(states.parameters, views, states.sums, strict=True):
                if has and p.grad is not view:
                    p.grad = view

    @staticmethod
    def owns(states: UnitStates, i: int, gradient: Tensor) -> bool:
        """Whether this ``.grad`` of parameter `i` is the unit's own."""
        owned = (states.grads, states.lent)
        return any(bool(tensors) and gradient is tensors[i] for tensors in owned)

    def lend_gradients(self, wait: Callable[[], Callable[[], None] | None]) -> None:
        """Let whoever uses a ``.grad`` call `wait` (a weak method) first."""

        def call() -> None:
            method = wait()
            if method is not None:
                method()

        for states in self.trained:
            if not states.grads:
                continue
            if not states.lent:
                states.lent = [LentGradient.of(g) for g in states.grads]
            for i, p in enumerate(states.parameters):
                if p.grad is not None and self.owns(states, i, p.grad):
                    states.lent[i].wait = call
                    p.grad = states.lent[i]

    @staticmethod
    def _grads(states: UnitStates) -> list[Tensor]:
        if not states.grads:
            assert states.flats is not None
            assert states.flats.gradient is not None
            views = views_of(states.flats.gradient, states.layout.slices)
            states.grads = [_alone(view) for view in views]
            for p in states.parameters:
                if p.dtype != states.layout.dtype:
                    p.grad_dtype = states.layout.dtype
        return states.grads

    def forget_grad_dtypes(self) -> None:
        """Let parameters have gradients of their own dtype again, if they have none now."""
        for states in self.trained:
            for p in states.parameters:
                if p.dtype != states.layout.dtype and p.grad is None:
                    p.grad_dtype = p.dtype

    # -- gradients that are consumed ------------------------------------------------------------

    def drop_zeroed(self) -> bool:
        """Forget sums of parameters whose ``.grad`` was reset; says whether any is left.

        Raises:
            StepError: a parameter has a ``.grad`` of the user's own.
        """
        for states in self.trained:
            for i, p in enumerate(states.parameters):
                given = p.grad
                if given is None:
                    states.sums[i] = False
                elif not isinstance(given, ConsumedGradient):
                    raise StepError(
                        f"parameter {states.layout.slices[i].name} has a .grad that this backward "
                        "would have to add to, but gradients are consumed while it runs: call "
                        "optimizer.zero_grad() before, or compile with gradients='kept'"
                    )
                elif given.zeroed:
                    states.sums[i] = False
        return any(any(states.sums) for states in self.trained)

    def holds_sums(self) -> bool:
        """Whether gradients were added up that no step and no zero_grad() has taken since."""
        return any(
            has and isinstance(p.grad, ConsumedGradient) and not p.grad.zeroed
            for states in self.trained
            for has, p in zip(states.sums, states.parameters, strict=True)
        )

    def mark_consumed(self, emitted: Iterable[tuple[int, Sequence[bool]]]) -> None:
        """Put guards where plain PyTorch would have gradients."""
        for index, has in emitted:
            states = self.units[index]
            if not states.guards:
                states.guards = [ConsumedGradient.of(p) for p in states.parameters]
            for i, p in enumerate(states.parameters):
                if has[i]:
                    if not states.guards[i].fits(p):
                        states.guards[i] = ConsumedGradient.of(p)
                    states.guards[i].zeroed = False
                    p.grad = states.guards[i]

    def forget_sums(self) -> None:
        """Leave no sum, and no guard."""
        for states in self.trained:
            states.sums = [False] * len(states.sums)
            for p in states.parameters:
                if isinstance(p.grad, ConsumedGradient):
                    p.grad = None

    # -- states ---------------------------------------------------------------------------------

    def reachable(self, states: UnitStates) -> Tensor:
        """A host unit's compute copy as a tensor of the compute device, without a copy."""
        assert states.flats is not None
        if states.direct is None:
            states.direct = on_device(states.flats.compute, self.device)
        return states.direct

    def take_states(
        self,
        optimizer: torch.optim.Optimizer,
        lend: Callable[[Mapping[str, nn.Parameter]], None] | None = None,
    ) -> None:
        """Take over states that the optimizer has loaded.

        Args:
            optimizer: the user's.
            lend: puts states of the parameters that it is given into the optimizer; called for
                one unit after another.
        """
        for states in self.units:
            if lend is not None:
                lend(
                    dict(
                        zip((s.name for s in states.layout.slices), states.parameters, strict=True)
                    )
                )
            with torch.no_grad():
                _take_states(states, optimizer)
            self.flush(states)

    def release(self, optimizer: torch.optim.Optimizer) -> None:
        """Take back what `give_back` gave."""
        for states in self.units:
            release_state(optimizer, states.parameters)

    def give_back(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer have its states, as views of where they are."""
        for states in self.units:
            if states.optimizer is None or states.flats is None or not states.taken:
                continue
            slices = states.layout.slices
            lent = states.flats.lent
            for name, flat in states.flats.moments.items():
                if name not in lent:
                    lent[name] = [Lent.of(view) for view in views_of(flat, slices)]
            for i, (p, scalars) in enumerate(
                zip(states.parameters, states.optimizer.scalar_state(), strict=True)
            ):
                if scalars is not None:
                    entry = {name: torch.tensor(value) for name, value in scalars.items()}
                    names = states.optimizer.state_names(i)
                    entry.update({name: lent[name][i].memory.detach() for name in names})
                    optimizer.state[p] = entry

    def hidden_masters(self) -> Iterator[tuple[str, Tensor]]:
        """Masters by name where the user's parameter is the compute copy, of less precision."""
        for states in self.units:
            if states.mixed and states.flats is not None and states.visible is states.flats.compute:
                views = views_of(states.flats.master, states.layout.slices)
                yield from zip((s.name for s in states.layout.slices), views, strict=True)

    def resident_views(self) -> dict[str, Tensor]:
        """Name → what the graph reads, for parameters of units in the device tier."""
        found: dict[str, Tensor] = {}
        for states in self.units:
            if states.tier == "device" and states.flats is not None:
                views = views_of(states.flats.compute, states.layout.slices)
                found.update(zip((s.name for s in states.layout.slices), views, strict=True))
        return found
