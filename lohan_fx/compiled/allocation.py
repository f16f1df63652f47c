"""The memory that a plan needs: allocated by the first program, grown and rearranged by later ones.

What is in it (`runtime.memory`) knows of no plan; nothing here knows of programs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import nn

from lohan_fx import footprint
from lohan_fx.compiled.arriving import Arriving
from lohan_fx.compiled.options import Options
from lohan_fx.compiled.training import Training
from lohan_fx.errors import InsufficientMemoryError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import Plan, Schedule, Tier
from lohan_fx.runtime.arena import Arena, Layout, PageLocker
from lohan_fx.runtime.engine import Engine, SlotStore
from lohan_fx.runtime.lanes import Lanes
from lohan_fx.runtime.memory import Memory, ssd_paths
from lohan_fx.runtime.ssd import StripedFile
from lohan_fx.runtime.states import ModelStates
from lohan_fx.runtime.unit_states import UnitStates
from lohan_fx.runtime.updates import Updater
from lohan_fx.workload import Workload


def allocate(
    module: nn.Module,
    workload: Workload,
    plan: Plan,
    *,
    options: Options,
    training: Training,
    arriving: Arriving,
) -> Memory:
    """Allocate what the first program needs, before anything is moved; then move the states.

    If that fails, nothing is held, and the optimizer has its states.

    Raises:
        InsufficientMemoryError: memory, or space on SSDs, was refused.
        StorageError: a file cannot be written.
    """
    optimizer, hw = training.optimizer, options.hw
    pin, locker = options.device.type == "cuda", PageLocker()
    memory = Memory(
        pin=pin,
        lanes=Lanes(options.device),
        store=SlotStore(pin=pin, locker=locker, places=options.forwards),
        locker=locker,
    )
    try:
        layout = Layout()
        need = footprint.host_bytes_needed(workload, plan)
        region = layout.reserve(need["units"] + need["compute copies"], "units")
        if layout.total_bytes:
            memory.arena = Arena(layout.total_bytes, pin=pin, locker=locker)
        ssd_bytes = footprint.ssd_bytes_needed(workload, plan)["units"]
        if ssd_bytes:
            run, pool = memory.open_ssd(ssd_paths(hw, ssd_bytes))
            memory.file = StripedFile(
                run, "states", ssd_bytes, pool, stripe_bytes=footprint.STRIPE_BYTES
            )
        reserve(memory, hw, workload, plan)
        memory.states = ModelStates(
            module,
            workload.units,
            training.layouts,
            footprint.tiers_of(plan),
            training.state_layout,
            optimizer,
            memory.lanes,
            memory.arena,
            region,
            memory.file,
            arriving.source,
            footprint.host_copies(plan),
            footprint.cast_units(plan),
        )
        if arriving.masters and arriving.source is not None:
            memory.states.write(arriving.source.stream(module, arriving.masters), arriving.masters)
        if arriving.states is not None and optimizer is not None:
            memory.states.take_states(optimizer, arriving.states)
        arriving.arrived()
        make_spares(memory, workload, plan.schedule)
        connect(memory, training, workload, plan.schedule)
    except BaseException:
        states = getattr(memory, "states", None)
        if states is not None and optimizer is not None:
            states.give_back(optimizer)  # the model goes on without us
        memory.close()
        raise
    return memory


def has_slots(memory: Memory, workload: Workload, plan: Plan) -> bool:
    """Whether a program needs no more slots than there are."""
    store = memory.store
    host = footprint.host_bytes_needed(workload, plan)["residuals"]
    ssd = footprint.ssd_bytes_needed(workload, plan)["residuals"]
    return host <= store.host_bytes and ssd <= store.ssd_bytes


def reserve(memory: Memory, hw: HardwareProfile, workload: Workload, plan: Plan) -> bool:
    """Have the slots and buffers that a program needs; says whether buffers changed."""
    memory.store.grow_host(footprint.host_bytes_needed(workload, plan)["residuals"])
    ssd_bytes = footprint.ssd_bytes_needed(workload, plan)["residuals"]
    if ssd_bytes:
        memory.store.grow_ssd(ssd_bytes, *memory.open_ssd(ssd_paths(hw, ssd_bytes)))
    tiers = footprint.tiers_of(plan)
    own = footprint.own_buffers(plan)
    rings = {
        f"gradients {tier}": footprint.gradient_ring(
            workload.units, tiers, plan.schedule, tier, own
        )
        for tier in ("host", "ssd")
    }
    copies = footprint.host_copies(plan)
    rings["state ring"] = footprint.state_ring(workload.units, tiers, plan.schedule, copies)
    rings["staging"] = footprint.staging_of(workload, plan)
    buffers = {name: (r.count, r.total_bytes) for name, r in rings.items() if r.count}
    for unit in workload.units:
        if footprint.has_own_buffer(unit, tiers[unit.name], plan.schedule, own):
            buffers[f"gradients of {unit.name}"] = (1, unit.compute_bytes)
    return memory.grow_buffers(buffers)


def make_spares(memory: Memory, workload: Workload, schedule: Schedule) -> None:
    """Have the second copies that a program's updates are tried in."""
    if schedule == "speculative":
        memory.make_spares({unit.name for unit in workload.units if unit.trainable})


def connect(
    memory: Memory,
    training: Training,
    workload: Workload,
    schedule: Schedule,
    engines: Iterable[Engine] = (),
) -> None:
    """Give a new updater the buffers, and all programs' engines the updater."""
    if training.optimizer is None or not training.names:
        memory.connected = True
        return
    old = memory.updater
    rings = {tier: memory.ring(f"gradients {tier}") for tier in ("host", "ssd")}
    own = {i: f"gradients of {unit.name}" for i, unit in enumerate(workload.units)}
    memory.updater = Updater(
        memory.states,
        memory.lanes,
        schedule,
        training.optimizer,
        training.accumulation,
        training.clipping,
        gradient_rings={tier: ring for tier, ring in rings.items() if ring is not None},
        gradient_buffers={i: memory.buffer(n) for i, n in own.items() if n in memory.regions},
        state_ring=memory.ring("state ring"),
    )
    for engine in engines:
        engine.updater = memory.updater
    memory.connected = True
    if old is not None:
        old.close()


def move_units(memory: Memory, plan: Plan) -> tuple[tuple[str, ...], str]:
    """Move units to the tiers of a plan, between device and host, and let those on the device keep
    compute copies as it says.

    Returns:
        the names of those that moved; why the others did not, if there was no room ("": all
            have). An error would hold this frame, and what moved with it.
    """
    tiers, casts = footprint.tiers_of(plan), footprint.cast_units(plan)
    moving = [
        s
        for s in memory.states.units
        if tiers[s.unit.name] != s.tier or (s.unit.name in casts) != s.casts
    ]
    moving.sort(key=lambda states: _takes_memory(states, tiers, casts))
    moved: list[str] = []
    try:
        if moving:
            memory.drop_spares()  # other units have them then
        for states in moving:
            arena = None
            if tiers[states.unit.name] == "host":
                arena = Arena(states.num_bytes, pin=memory.pin, locker=memory.locker)
                memory.moved.append(arena)
            memory.states.move(states, arena, casts=states.unit.name in casts)
            moved.append(states.unit.name)
    except (InsufficientMemoryError, torch.OutOfMemoryError) as error:
        return tuple(moved), str(error)
    finally:
        if moved:
            memory.buffers = {}  # gradients of other units have buffers now
    return tuple(moved), ""


def _takes_memory(states: UnitStates, tiers: Mapping[str, Tier], casts: Collection[str]) -> bool:
    """Whether the device needs more memory for a unit that is to change."""
    if tiers[states.unit.name] != "device":
        return False
    return states.tier != "device" or states.unit.name not in casts
