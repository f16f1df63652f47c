"""How much host memory and SSD space the runtime lays out for a plan. Nothing here knows torch.

The runtime's engine lays out its slab by these same functions, so that what the planner counts
is what is allocated. Every region starts and ends on a page (4096 bytes), as O_DIRECT needs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from lohan_fx.plan import PIPELINED, WHOLE, Plan, Schedule, Tier
from lohan_fx.workload import Unit, Workload

PAGE_BYTES = 4096
STAGING_BYTES = 16 * 2**20
NUM_STAGING = 8
STRIPE_BYTES = 4 * 2**20


def align(num_bytes: int) -> int:
    """Round up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """`count` equal buffers of `num_bytes` each, page-aligned."""

    count: int = 0
    num_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.count * self.num_bytes


def unit_bytes(unit: Unit, *, copy: bool = True) -> int:
    """Bytes of a unit at rest in host memory or on SSD: compute copy and states, aligned.

    `copy`: whether the compute copy lies with its states (`host_copies`).
    """
    return (align(unit.compute_bytes) if copy else 0) + align(unit.state_bytes)


def update_write_bytes(unit: Unit, copies: Collection[str] = ()) -> int:
    """What an update writes to the SSD, if the unit is there."""
    return unit.update_write_bytes - (unit.compute_bytes if unit.name in copies else 0)


def spare_bytes(unit: Unit, tier: Tier, schedule: Schedule) -> int:
    """Bytes of the second copy that schedule "speculative" updates a host unit into, aligned: all
    of it but the flat in which gradients add up."""
    if schedule != "speculative" or tier != "host" or not unit.trainable:
        return 0
    return align(unit.compute_bytes) + align(unit.state_bytes - unit.accumulator_bytes)


def _in_tier(units: Iterable[Unit], tiers: Mapping[str, Tier], tier: Tier) -> list[Unit]:
    return [u for u in units if tiers[u.name] == tier]


def has_own_buffer(unit: Unit, tier: Tier, schedule: Schedule, own: Collection[str] = ()) -> bool:
    """Whether a unit's gradients wait for its update in a host buffer of their own.

    They do with schedules "serial", "deferred" and "speculative", which have them until
    optimizer.step(), unless they are added to what the unit has; with "overlapped", so that
    backward need not wait for updates, and with "speculative", which may have to take additions
    back (units on SSD have a ring all the same: host memory is what they lack); and where the
    plan says so (`own`): the device writes gradients as they are made, or its own units' are
    parked.
    """
    if not unit.trainable:
        return False
    if tier == "device":
        return unit.name in own
    waits = schedule in WHOLE and not unit.accumulator_bytes
    waits = waits or (schedule in ("overlapped", "speculative") and tier == "host")
    return waits or unit.name in own


def gradient_ring(
    units: Iterable[Unit],
    tiers: Mapping[str, Tier],
    schedule: Schedule,
    tier: Tier,
    own: Collection[str] = (),
) -> Ring:
    """Host buffers that receive gradients of the units in `tier` (none for the device tier).

    Two buffers of the largest unit take turns, beside those of units that have their own; four
    where gradients are added to sums in host memory, so that the thread that launches kernels stays
    ahead of the one that adds. (Sums on SSD keep both waiting for the disk.)
    """
    if tier == "device":
        return Ring()
    found = [
        u
        for u in _in_tier(units, tiers, tier)
        if u.trainable and not has_own_buffer(u, tier, schedule, own)
    ]
    if not found:
        return Ring()
    adds = tier == "host" and any(u.accumulator_bytes for u in found)
    count = max(2, min(4, len(found))) if adds else 2
    return Ring(count=count, num_bytes=max(align(u.compute_bytes) for u in found))


def gradient_bytes_needed(
    units: Iterable[Unit],
    tiers: Mapping[str, Tier],
    schedule: Schedule,
    own: Collection[str] = (),
) -> int:
    """Host bytes of all gradient buffers."""
    units = tuple(units)
    alone = sum(
        align(u.compute_bytes) for u in units if has_own_buffer(u, tiers[u.name], schedule, own)
    )
    rings = (gradient_ring(units, tiers, schedule, tier, own) for tier in ("host", "ssd"))
    return alone + sum(ring.total_bytes for ring in rings)


def state_ring(
    units: Iterable[Unit],
    tiers: Mapping[str, Tier],
    schedule: Schedule,
    copies: Collection[str] = (),
) -> Ring:
    """Host buffers through which trainable SSD units pass while they are updated.

    Pipelined schedules read unit i−1, update i and write i+1 at once (LoHan §IV-C): three buffers
    of the largest unit. The others have one unit in flight.
    """
    sizes = [
        unit_bytes(u, copy=u.name not in copies)
        for u in _in_tier(units, tiers, "ssd")
        if u.trainable
    ]
    if not sizes:
        return Ring()
    return Ring(count=3 if schedule in PIPELINED else 1, num_bytes=max(sizes))


def staging(
    units: Iterable[Unit],
    tiers: Mapping[str, Tier],
    ssd_residuals: Iterable[int],
    copies: Collection[str] = (),
) -> Ring:
    """Bounce buffers between SSD and device: 8 of at most 16 MiB, none without SSD traffic.

    `ssd_residuals` are the sizes in bytes of the residuals swapped to SSD.
    """
    sizes = [u.compute_bytes for u in _in_tier(units, tiers, "ssd") if u.name not in copies]
    sizes += ssd_residuals
    if not sizes:
        return Ring()
    return Ring(count=NUM_STAGING, num_bytes=min(STAGING_BYTES, align(max(sizes))))


def host_breakdown(
    units: Iterable[Unit],
    tiers: Mapping[str, Tier],
    schedule: Schedule,
    host_residuals: Iterable[int] = (),
    ssd_residuals: Iterable[int] = (),
    own: Collection[str] = (),
    copies: Collection[str] = (),
) -> dict[str, int]:
    """`host_bytes_needed` before there is a plan: residuals are given as sizes in bytes.

    `own` names the units for which the plan wants a gradient buffer of their own, `copies` the SSD
    units whose compute copies are in host memory.
    """
    units = tuple(units)
    return {
        "units": sum(unit_bytes(u) for u in _in_tier(units, tiers, "host")),
        "spares": sum(spare_bytes(u, tiers[u.name], schedule) for u in units),
        "compute copies": sum(align(u.compute_bytes) for u in units if u.name in copies),
        "gradients": gradient_bytes_needed(units, tiers, schedule, own),
        "state ring": state_ring(units, tiers, schedule, copies).total_bytes,
        "staging": staging(units, tiers, ssd_residuals, copies).total_bytes,
        "residuals": sum(align(size) for size in host_residuals),
    }


def staging_of(workload: Workload, plan: Plan) -> Ring:
    """`staging` of a finished plan."""
    ssd_residuals = _swapped(workload, plan, "ssd").values()
    return staging(workload.units, tiers_of(plan), ssd_residuals, host_copies(plan))


def tiers_of(plan: Plan) -> dict[str, Tier]:
    """Unit name → tier."""
    return {name: unit.tier for name, unit in plan.units.items()}


def direct_gradients(plan: Plan) -> frozenset[str]:
    """Units whose gradients the device writes to the host as they are made."""
    return frozenset(name for name, unit in plan.units.items() if unit.gradients == "direct")


def may_park(unit: Unit, tier: Tier, schedule: Schedule) -> bool:
    """Whether a unit's gradients could wait in host memory for an update on the device."""
    waits = schedule in WHOLE and not unit.accumulator_bytes
    return unit.trainable and tier == "device" and waits


def parked_gradients(plan: Plan) -> frozenset[str]:
    """Units on the device whose gradients wait in host memory."""
    return frozenset(name for name, unit in plan.units.items() if unit.gradients == "parked")


def may_cast(unit: Unit, tier: Tier) -> bool:
    """Whether a unit could keep no compute copy, which is cast from its master instead."""
    return tier == "device" and unit.master_bytes > 0


def cast_units(plan: Plan) -> frozenset[str]:
    """Units on the device that keep no compute copy."""
    return frozenset(name for name, unit in plan.units.items() if unit.casts)


def own_buffers(plan: Plan) -> frozenset[str]:
    """Units for which the plan wants a gradient buffer of their own."""
    return direct_gradients(plan) | parked_gradients(plan)


def host_copies(plan: Plan) -> frozenset[str]:
    """SSD units whose compute copies are in host memory."""
    return frozenset(name for name, unit in plan.units.items() if unit.copy_tier == "host")


def _swapped(workload: Workload, plan: Plan, tier: Tier) -> dict[str, int]:
    return {
        v: workload.values[v].num_bytes
        for v in workload.residuals
        if plan.residuals[v].action == "swap" and plan.residuals[v].tier == tier
    }


def slots(workload: Workload, plan: Plan, tier: Tier) -> dict[str, tuple[int, int]]:
    """Residual → (offset, bytes) of its slot in the region of `tier` ("host" or "ssd").

    Every swapped residual lives across the boundary between forward and backward, so no two
    of them can share a slot, and the sum of their sizes is also the least possible peak.
    """
    found: dict[str, tuple[int, int]] = {}
    offset = 0
    for v, size in _swapped(workload, plan, tier).items():
        found[v] = (offset, align(size))
        offset += align(size)
    return found


def host_slots(workload: Workload, plan: Plan) -> dict[str, tuple[int, int]]:
    """Residual → (offset, bytes) in the host region "residuals"."""
    return slots(workload, plan, "host")


def ssd_slots(workload: Workload, plan: Plan) -> dict[str, tuple[int, int]]:
    """Residual → (offset, bytes) in the SSD region "residuals"."""
    return slots(workload, plan, "ssd")


def host_bytes_needed(workload: Workload, plan: Plan) -> dict[str, int]:
    """Host bytes by purpose, page-aligned; their sum is what the runtime allocates.

    "units": compute copies and states of host units; "spares": their second copies, with schedule
    "speculative"; "compute copies": those of SSD units that are here; "gradients": buffers that
    receive gradients; "state ring": buffers in which SSD units are updated; "staging": bounce
    buffers of SSD traffic; "residuals": activations swapped to host memory.
    """
    return host_breakdown(
        workload.units,
        tiers_of(plan),
        plan.schedule,
        _swapped(workload, plan, "host").values(),
        _swapped(workload, plan, "ssd").values(),
        own_buffers(plan),
        host_copies(plan),
    )


def ssd_bytes_needed(workload: Workload, plan: Plan) -> dict[str, int]:
    """SSD bytes by purpose: "units" at rest and swapped "residuals", page-aligned."""
    units = _in_tier(workload.units, tiers_of(plan), "ssd")
    copies = host_copies(plan)
    return {
        "units": sum(unit_bytes(u, copy=u.name not in copies) for u in units),
        "residuals": sum(align(size) for size in _swapped(workload, plan, "ssd").values()),
    }
