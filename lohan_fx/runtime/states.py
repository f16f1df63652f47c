"""Where a model's states live: flat buffers a unit, in the tier that the plan chose.

Every unit has one flat compute copy (what the graph reads; units on the device may do without), and
if it trains, in mixed precision a flat fp32 master, one flat tensor for each optimizer state, and
where gradients add up, one for them (`runtime.unit_states`). The model's parameters stay usable
tensors: each becomes a view of its unit's flat buffer, in device memory, in the host slab, or in a
mapping of the SSD file; so does ``.grad``, if it is kept (`runtime.gradients`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from lohan_fx._compat import versions_of
from lohan_fx.annotate import StateLayout, UnitLayout
from lohan_fx.errors import StepError, StorageError, format_bytes
from lohan_fx.footprint import align
from lohan_fx.initialization import realize
from lohan_fx.plan import Tier
from lohan_fx.runtime._memory import forget_pages, replace_pages
from lohan_fx.runtime.arena import Arena, Region, available_host_bytes
from lohan_fx.runtime.flats import Lent, views_of
from lohan_fx.runtime.gradients import Gradients
from lohan_fx.runtime.initial_state import pull_initial_state, release_state
from lohan_fx.runtime.lanes import Lanes
from lohan_fx.runtime.optimizer import UnitOptimizer
from lohan_fx.runtime.ssd import StripedFile
from lohan_fx.runtime.unit_states import UnitStates, addresses_of
from lohan_fx.weights import Source
from lohan_fx.workload import Unit

logger = logging.getLogger("lohan_fx")


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


Written = tuple[UnitStates, Collection[int]]
"""A unit, and the parameters of it that user code wrote into, or may have."""


def _written(units: Collection[UnitStates]) -> list[Written]:
    """Of units that have such."""
    parameters = [p for states in units for p in states.parameters]
    if (  # at once: asking unit by unit takes longer
        versions_of(parameters) == [v for states in units for v in states.versions]
        and addresses_of(parameters) == [a for states in units for a in states.addresses]
        and not any(states.may_be_written() for states in units)
    ):
        return []
    return [(states, which) for states in units if (which := states.written())]


class ModelStates:
    """The states of all units of one compiled model.

    Args:
        model: its parameters become views of the flat buffers.
        units, layouts: from `annotate`, in the same order.
        tiers: unit → tier.
        state_layout: compute dtype and number of optimizer states.
        optimizer: the user's optimizer; None if nothing is managed for it.
        lanes: of the compute device.
        arena, region: the slab and the part of it that holds the host units, and the `copies`.
        file: the SSD file that holds the SSD units.
        source: gives units with parameters on the meta device their values.
        copies: SSD units whose compute copies are in the slab.
        casts: units on the device that keep no compute copy.

    Attributes:
        units: the states of each, in the order of `units`.
        parameter_ids: of the parameters of all units.
        gradients: what stands in ``.grad`` of the parameters that are trained.
        generation: how often updates or loaded values have changed what forward reads: what
            backward reads again must be of its forward's.
        uncounted: how often users' writes have that no version shows, by parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        layouts: Sequence[UnitLayout],
        tiers: Mapping[str, Tier],
        state_layout: StateLayout,
        optimizer: torch.optim.Optimizer | None,
        lanes: Lanes,
        arena: Arena | None,
        region: Region | None,
        file: StripedFile | None,
        source: Source | None = None,
        copies: Collection[str] = (),
        casts: Collection[str] = (),
    ) -> None:
        self._lanes = lanes
        self.device = device = lanes.device
        self.generation = 0
        self.uncounted: Counter[str] = Counter()
        self.file = file
        self._mapping = file.map() if file is not None else None
        by_name = dict(model.named_parameters())
        places = {name: i for i, name in enumerate(by_name)}
        self.units: list[UnitStates] = []
        self._resident: dict[str, Tensor] = {}
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
                casts=unit.name in casts,
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
                flats = states.allocate(device, casts=states.casts)
            elif states.tier == "host":
                flats = states.carve(in_slab(states.num_bytes))
            else:
                assert self._mapping is not None
                if unit.name in copies:
                    states.host_copy = in_slab(unit.compute_bytes).view(layout.copy_dtype)
                flats = states.carve(self._mapping[ssd_offset : ssd_offset + states.num_bytes])
                states.offset = ssd_offset
                ssd_offset += states.num_bytes
            states.flats = flats
            states.visible = next(
                (f for f in (flats.master, flats.compute) if f.dtype == layout.shown_dtype), None
            )
            self.units.append(states)
        self.parameter_ids = frozenset(id(p) for s in self.units for p in s.parameters)
        self.gradients = Gradients(self.trained, file)
        try:
            self._take_over(model, optimizer, source)
        except BaseException:
            if optimizer is not None:
                self.give_back(optimizer)  # the model goes on without us
            raise

    @property
    def trained(self) -> list[UnitStates]:
        """The units that the optimizer updates."""
        return [states for states in self.units if states.optimizer is not None]

    @property
    def copies(self) -> frozenset[str]:
        """SSD units whose compute copies are in host memory."""
        return frozenset(s.unit.name for s in self.units if s.host_copy is not None)

    @property
    def casts(self) -> frozenset[str]:
        """Units on the device that keep no compute copy."""
        return frozenset(s.unit.name for s in self.units if s.casts)

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
                        states.write(i, p.detach())
            if not any(p.is_meta for p in states.parameters):
                self._adopt(states, optimizer)
        if on_meta:
            assert source is not None
            self.write(source.stream(model, on_meta), on_meta, optimizer)

    def _adopt(self, states: UnitStates, optimizer: torch.optim.Optimizer | None) -> None:
        """Take a unit's optimizer state, and make its parameters views of its flats."""
        if optimizer is not None:
            with torch.no_grad():
                _take_states(states, optimizer)
        states.expose()
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
        self.settle()
        self.generation += 1
        for name, value in values:
            states, i = where[name]
            p = states.parameters[i]
            with torch.no_grad():
                states.write(i, value)
                if states.visible is None:  # it keeps memory of its own
                    if p.is_meta:
                        realize(p, torch.empty_like(p, device="cpu"))
                    p.copy_(value)
            waiting[states.index] -= 1
            if not waiting[states.index]:
                self._adopt(states, optimizer)

    # -- what users write, and where units are --------------------------------------------------

    def sync_from_user(self, *, behind: bool = False) -> None:
        """Take over what user code wrote into parameters since the last step.

        Writes through a parameter (``load_state_dict``, ``copy_``) are seen by its version
        counter, replaced memory (``p.data = …``) by its address; others are not (`compare`).

        Args:
            behind: updates of the last step may still run.

        Raises:
            StepError: something was written that is not another optimizer's, nor all frozen, and
                `behind`.
        """
        written = _written(self.units)
        if not written:
            return
        ours = [
            states
            for states, which in written
            if states.unit.trainable and not states.is_another_optimizers(which)
        ]
        if ours and behind:
            raise StepError(
                f"parameters of {ours[0].unit.name} were written while updates of the last "
                "step may have been running, and one of the two may be lost: call "
                "model.lohan.sync() before writing into parameters, and now, to write again; or "
                "use schedule='serial' or 'optimized'"
            )
        self._copy_written(written)

    def written_before_update(self) -> list[Written]:
        """What was written since forward took over what was, and our optimizer updates."""
        return _written(self.trained)

    def copy_written(self, written: Iterable[Written]) -> None:
        """Take over what `written_before_update` found, and no more: backward may be about to read
        the rest."""
        self._copy_written(written, compare=False)

    def settle(self, unit: UnitStates | None = None) -> None:
        """Wait for compute, before this unit (any) is written: it may be in a forward still that
        reads it in host memory. What it does on the device comes in order."""
        if any(states.tier != "device" for states in (self.units if unit is None else (unit,))):
            self._lanes.settle()

    def compare(self) -> None:
        """Take over what user code wrote where nobody counts: all weights are read."""
        self._copy_written((states, ()) for states in self.units)

    def _copy_written(self, written: Iterable[Written], *, compare: bool = True) -> None:
        """Take over these parameters of units, and note what no version counts: a backward that is
        to come and reads it would not be that of its forward."""
        before, stored = self.generation, False
        self.generation += 1  # first: an interrupt may leave some copied
        for states, which in written:
            copied = states.copy_written(which, self.settle, compare=compare)
            slices = states.layout.slices
            self.uncounted.update(slices[i].name for i, counted in copied.items() if not counted)
            if states.on_ssd:
                stored |= bool(copied) or states.visible is not None  # users store there themselves
                self._forget(states)
        if stored:
            self.flush()
        self.generation = before

    def move(self, states: UnitStates, arena: Arena | None, *, casts: bool = False) -> None:
        """Move a unit between device and host, between two steps: to `arena`, or the device, where
        it keeps no compute copy if it `casts`. (A unit that is there may change that.)

        The parameters become views of where it is then. If there is no room, nothing has changed.
        The copies have ended when it returns. Old host memory goes with its slab, when all is
        closed; old device memory at once, unless user code looks into it.
        """
        if arena is None and states.tier == "device":
            states.keep_copy(not casts)  # on the compute stream, in order with what reads it
            self._resident.clear()
            return
        if arena is None:
            flats = states.allocate(self.device, casts=casts)
        else:
            flats = states.carve(arena.view(0, states.num_bytes))
            arena.register(0, states.num_bytes)
        old = states.flats
        assert old is not None
        flats.copy_from(old)
        if flats.gradient is not None and old.gradient is not None:
            flats.gradient.copy_(old.gradient)
        gradients = self.gradients.detach(states)
        visible = states.visible
        if visible is not None:
            visible = flats.master if visible is old.master else flats.compute
        tier: Tier = "device" if arena is None else "host"
        self._resident.clear()
        # All at once, so that an interrupt finds the unit here or there; and from now on until
        # `expose` it finds parameters that are elsewhere than they were, which the next step mends.
        states.addresses = []
        states.flats, states.visible, states.tier, states.casts = flats, visible, tier, casts
        states.direct, states.spare, states.away = None, None, False
        states.expose()
        self.gradients.attach(states, gradients)
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
                self._forget(written)

    def _forget(self, states: UnitStates) -> None:
        """Let a unit's pages of the SSD mapping leave the process, flushed or not."""
        assert self._mapping is not None
        forget_pages(self._mapping[states.offset : states.offset + states.num_bytes])

    def forget(self) -> None:
        """Let pages of the SSD mapping that were only read leave the process."""
        if self._mapping is not None:
            forget_pages(self._mapping)

    def close(self) -> None:
        """Let go of all units. Nothing is moved: what parameters show stays while somebody holds
        them, and so do states that the optimizer has (`give_back`).

        Autograd's graph of a step holds the program, and that these states, for as long as user
        code holds a loss.
        """
        self.units = []
        self._resident = {}
        self._mapping = None
        self.gradients = Gradients((), None)

    # -- states of the optimizer, and other views -----------------------------------------------

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
            flats = states.flats
            if flats is not None and flats.master is not flats.compute is states.visible:
                views = views_of(flats.master, states.layout.slices)
                yield from zip((s.name for s in states.layout.slices), views, strict=True)

    def resident_view(self, name: str) -> Tensor:
        """What the graph reads of a parameter, of a unit in the device tier that keeps a copy.

        Callers must not keep it past a step: the unit may move, and its memory has to go then.
        """
        if not self._resident:
            for states in self.units:
                if states.tier == "device" and not states.casts and states.flats is not None:
                    views = views_of(states.flats.compute, states.layout.slices)
                    names = (s.name for s in states.layout.slices)
                    self._resident.update(zip(names, views, strict=True))
        return self._resident[name]
