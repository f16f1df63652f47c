"""Let copies overlap with compute: extend a draft's windows as far as memory allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lohan_fx.footprint import host_copies, update_write_bytes
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import Plan, Tier
from lohan_fx.planners.lanes import Incoming, Load, Outgoing, place_prefetches, place_releases
from lohan_fx.planners.windows import anchored_seconds
from lohan_fx.program import Region, window_storage
from lohan_fx.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneRates:
    """Seconds of a copy on the link and, for the SSD tier, on the SSDs.

    The SSDs also carry states in backward; copies get the share of the SSD rate that their
    bytes have in all SSD traffic of that stage.
    """

    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    ssd_read_bytes_per_s: float
    ssd_write_bytes_per_s: float
    backward_share: float = 1.0

    def incoming(self, num_bytes: int, tier: Tier, backward: bool) -> tuple[float, float]:
        ssd = num_bytes / self.ssd_read_bytes_per_s if tier == "ssd" else 0.0
        return num_bytes / self.h2d_bytes_per_s, ssd / (self.backward_share if backward else 1.0)

    def outgoing(self, num_bytes: int, tier: Tier) -> tuple[float, float]:
        """A copy that reached host staging has left the device; SSD writes throttle staging."""
        ssd = num_bytes / self.ssd_write_bytes_per_s if tier == "ssd" else 0.0
        return num_bytes / self.d2h_bytes_per_s, ssd


def lane_rates(workload: Workload, plan: Plan, hw: HardwareProfile) -> LaneRates:
    """Rates of the profile, with the SSD shared between activations, fetches and states."""
    ssd_units = [u for u in workload.units if plan.units[u.name].tier == "ssd"]
    elsewhere = host_copies(plan)
    copies = sum(u.compute_bytes for u in ssd_units if u.name not in elsewhere) + sum(
        workload.values[v].num_bytes
        for v, r in plan.residuals.items()
        if r.action == "swap" and r.tier == "ssd"
    )
    states = sum(u.state_bytes + update_write_bytes(u, elsewhere) for u in ssd_units if u.trainable)
    return LaneRates(
        h2d_bytes_per_s=hw.h2d_bytes_per_s,
        d2h_bytes_per_s=hw.d2h_bytes_per_s,
        ssd_read_bytes_per_s=hw.ssd_read_bytes_per_s,
        ssd_write_bytes_per_s=hw.ssd_write_bytes_per_s,
        backward_share=copies / (copies + states) if copies else 1.0,
    )


def _reloads(workload: Workload, plan: Plan, rates: LaneRates) -> list[Incoming]:
    found = []
    for v, decision in plan.residuals.items():
        if decision.action != "swap" or decision.prefetch_before is None:
            continue
        use = workload.op_index[decision.prefetch_before]
        size = workload.values[v].num_bytes
        link_s, ssd_s = rates.incoming(size, decision.tier, backward=True)
        found.append(
            Incoming(
                name=v,
                num_bytes=size,
                use=use,
                earliest=workload.num_forward_ops,
                ahead=use,
                link_s=link_s,
                ssd_s=ssd_s,
            )
        )
    return found


def _fetches(workload: Workload, plan: Plan, rates: LaneRates) -> list[Incoming]:
    """One copy a window; it starts no later than the window before it (of any unit) is used.

    A window stays in its phase (but that of a unit that forward reads in host memory may begin
    there), and begins after the unit's own window before it has ended.
    """
    index, n = workload.op_index, workload.num_forward_ops
    spans = []
    for unit in workload.units:
        free = 0
        direct = plan.units[unit.name].access == "direct"
        if plan.units[unit.name].casts:  # compute itself makes those, and no sooner than it must
            continue
        for k, window in enumerate(plan.units[unit.name].windows):
            first = index[window.first_use]
            stage = n if first >= n and not direct else 0
            spans.append((first, max(free, stage), window_storage(unit.name, k), unit))
            free = index[window.last_use] + 1
    spans.sort(key=lambda span: span[0])
    found = []
    for k, (first, earliest, name, unit) in enumerate(spans):
        tier = plan.units[unit.name].fetch_tier
        link_s, ssd_s = rates.incoming(unit.compute_bytes, tier, backward=first >= n)
        previous = spans[k - 1][0] if k else 0
        found.append(
            Incoming(
                name=name,
                num_bytes=unit.compute_bytes,
                use=first,
                earliest=earliest,
                ahead=max(earliest, min(previous, first)),
                link_s=link_s,
                ssd_s=ssd_s,
            )
        )
    return found


def _departures(workload: Workload, plan: Plan, rates: LaneRates) -> list[Outgoing]:
    """Offloads in order of production, then gradients."""
    index, n = workload.op_index, workload.num_forward_ops
    found = []
    for v in workload.residuals:
        decision = plan.residuals[v]
        if decision.action == "swap":
            size = workload.values[v].num_bytes
            link_s, ssd_s = rates.outgoing(size, decision.tier)
            found.append(
                Outgoing(
                    name=v,
                    num_bytes=size,
                    start=workload.producer[v],
                    last_use=workload.last_forward_use(v),
                    limit=n - 1,
                    link_s=link_s,
                    ssd_s=ssd_s,
                )
            )
    for unit in workload.units:
        emit = plan.units[unit.name].emit_after
        if plan.units[unit.name].release_gradients_after is None or emit is None:
            continue
        size = sum(workload.values[g].num_bytes for g in dict.fromkeys(unit.gradients))
        found.append(
            Outgoing(
                name=unit.name + "@gradients",
                num_bytes=size,
                start=index[emit],
                last_use=index[emit],
                limit=len(workload.ops) - 1,
                link_s=rates.outgoing(unit.gradient_bytes, "host")[0],
            )
        )
    return found


def _reserve(copies: Sequence[Outgoing], slack: int) -> int:
    """Memory that prefetches leave to departing copies: the largest one, at most half the slack."""
    return min(max((c.num_bytes for c in copies), default=0), slack // 2)


def extend(
    workload: Workload,
    plan: Plan,
    regions: Sequence[Region],
    load: Load,
    hw: HardwareProfile,
    budget: MemoryBudget,
) -> Plan:
    """Move prefetches earlier and releases later by the lanes' estimate, within the budget.

    `load` is the draft's memory by op (`schedule.load_of`); it is used up.
    """
    if not len(load):
        return plan
    rates = lane_rates(workload, plan, hw)
    anchored = anchored_seconds(workload, regions)
    seconds = [op.seconds + anchored.get(i, 0.0) for i, op in enumerate(workload.ops)]
    outgoing = _departures(workload, plan, rates)
    reserve = _reserve(outgoing, budget.device_bytes - int(load.max()))
    incoming = [*_fetches(workload, plan, rates), *_reloads(workload, plan, rates)]
    starts = place_prefetches(seconds, load, budget.device_bytes - reserve, incoming)
    ends = place_releases(seconds, load, budget.device_bytes, outgoing)
    _let_reloads_pass(incoming, starts, plan)
    return _move(workload, plan, starts, ends)


def _let_reloads_pass(copies: Sequence[Incoming], starts: dict[str, int], plan: Plan) -> None:
    """Start a fetch one op later if a reload that is used before it starts at the same op.

    Before one op fetches stand before prefetches, so the fetch would block the link for the
    reload. Starting later never needs more memory.
    """
    first_reload: dict[int, int] = {}
    for copy in copies:
        if copy.name in plan.residuals:
            at = starts[copy.name]
            first_reload[at] = min(copy.use, first_reload.get(at, copy.use))
    for copy in copies:
        at = starts[copy.name]
        if copy.name not in plan.residuals and first_reload.get(at, copy.use) < copy.use:
            starts[copy.name] = at + 1


def _move(workload: Workload, plan: Plan, starts: dict[str, int], ends: dict[str, int]) -> Plan:
    ops = workload.ops
    residuals = {
        v: replace(r, release_after=ops[ends[v]].name, prefetch_before=ops[starts[v]].name)
        if r.action == "swap"
        else r
        for v, r in plan.residuals.items()
    }
    units = {}
    for name, unit in plan.units.items():
        windows = unit.windows
        if not unit.casts:
            windows = tuple(
                replace(w, fetch_before=ops[starts[window_storage(name, k)]].name)
                for k, w in enumerate(windows)
            )
        end = ends.get(name + "@gradients")
        units[name] = replace(
            unit,
            windows=windows,
            release_gradients_after=None if end is None else ops[end].name,
        )
    return replace(plan, residuals=residuals, units=units)
