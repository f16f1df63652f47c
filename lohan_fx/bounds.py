"""How long a step takes at least: what its busiest resource has to do. Nothing here knows torch.

Whatever the order, a lane works for as long as what it is asked to move takes (the terms of LoHan
Eq. 2 and 5 over the whole step). A simulated step can only be longer; the gap between the two is
what waiting costs, not what the plan chose to move.
"""

from __future__ import annotations

from dataclasses import dataclass

from lohan_fx.cost_model import Demand
from lohan_fx.errors import HardwareError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import Plan, Schedule
from lohan_fx.planners.prediction import demand_of
from lohan_fx.program import Program, lower
from lohan_fx.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Seconds of one step at least, and the resource that says so.

    `work` has the seconds of every resource: gpu, d2h, h2d, link (both directions at the
    duplex rate), ssd, cpu. With schedule "serial" the optimizer's part comes after the others, with
    "deferred" beside forward only.
    """

    seconds: float
    resource: str
    work: dict[str, float]


def step_bound(
    workload: Workload, plan: Plan, hw: HardwareProfile, *, program: Program | None = None
) -> Bound:
    """The bound of one plan.

    Raises:
        HardwareError: the plan uses the SSD tier, and the profile has no SSDs.
        PlanError: the plan does not fit the workload.
    """
    demand = demand_of(workload, plan, program or lower(workload, plan))
    return demand_bound(hw, demand, plan.schedule)


def demand_bound(hw: HardwareProfile, d: Demand, schedule: Schedule) -> Bound:
    """The bound of what one iteration asks of every resource."""
    incoming = (
        d.fetch_forward_bytes
        + d.fetch_backward_bytes
        + d.swapped_bytes
        + d.direct_forward_bytes
        + d.direct_backward_bytes
    )
    outgoing = d.swapped_bytes + d.gradient_bytes
    direct_s = (d.direct_forward_bytes + d.direct_backward_bytes) / hw.h2d_bytes_per_s
    direct_s += d.direct_gradient_bytes / hw.d2h_bytes_per_s
    read = d.ssd_fetch_forward_bytes + d.ssd_fetch_backward_bytes + d.swapped_ssd_bytes
    states_s = _ssd_s(hw, d.ssd_state_read_bytes, d.ssd_state_write_bytes)
    cpu_s = d.num_cpu_params / hw.cpu_optimizer_params_per_s
    work = {
        "gpu": d.forward_s
        + d.backward_s
        + d.recompute_s
        + (d.device_update_bytes + d.cast_forward_bytes + d.cast_backward_bytes)
        / hw.device_bytes_per_s
        + direct_s,
        "d2h": outgoing / hw.d2h_bytes_per_s,
        "h2d": incoming / hw.h2d_bytes_per_s,
        "link": (incoming + outgoing)
        / max(hw.duplex_bytes_per_s, hw.h2d_bytes_per_s, hw.d2h_bytes_per_s),
        "ssd": _ssd_s(hw, read, d.swapped_ssd_bytes),
    }
    if schedule == "serial":
        device_s = d.device_update_bytes / hw.device_bytes_per_s  # beside those of other units
        before = {**work, "gpu": work["gpu"] - device_s}
        resource = max(before, key=before.__getitem__)
        after = max(cpu_s, states_s, device_s)
        tail = " + optimizer" if after else ""
        seconds = before[resource] + after
        work["ssd"] += states_s
        return Bound(seconds=seconds, resource=resource + tail, work={**work, "cpu": cpu_s})
    work["ssd"] += states_s
    work["cpu"] = cpu_s
    resource = max(work, key=work.__getitem__)
    if schedule == "deferred":
        backward_s = d.backward_s + d.recompute_s
        if (apart := backward_s + max(cpu_s, states_s)) > work[resource]:
            return Bound(seconds=apart, resource="gpu + optimizer", work=work)
    return Bound(seconds=work[resource], resource=resource, work=work)


def _ssd_s(hw: HardwareProfile, read_bytes: int, write_bytes: int) -> float:
    if not read_bytes and not write_bytes:
        return 0.0
    if not hw.ssds:
        raise HardwareError(
            f"the plan uses the ssd tier, but hardware profile {hw.name} has no SSDs: plan again "
            "for this profile, or profile with profile_hardware(ssd=[…])"
        )
    return read_bytes / hw.ssd_read_bytes_per_s + write_bytes / hw.ssd_write_bytes_per_s
