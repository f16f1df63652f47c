"""The integer program of `pareto` at a budget, and at a ladder of smaller ones. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from lohan_fx.footprint import host_bytes_needed, ssd_bytes_needed
from lohan_fx.hardware import MemoryBudget
from lohan_fx.planners.effort import Effort
from lohan_fx.planners.keep import overlap_reserve
from lohan_fx.planners.pareto_offers import Offers
from lohan_fx.planners.pareto_report import NAME
from lohan_fx.planners.simplex import lagrangian_bound
from lohan_fx.planners.trial import solve_at
from lohan_fx.workload import Workload


def try_budget(offers: Offers, effort: Effort) -> None:
    """The program at the budget itself, with several shares of it left to copies."""
    reserve = _reserve_bytes(offers.model.workload)
    for k, share in enumerate(effort.reserves):
        nodes = effort.nodes if k < 2 else 1
        _try(offers, offers.budget, int(share * reserve), nodes)


def try_rungs(offers: Offers, effort: Effort) -> None:
    """The program at the rungs of a fixed ladder of budgets below this one.

    What is found at a rung is found for every larger budget, so that a larger one is not
    slower. A rung is passed over if its bound is no better than the best plan, or if a
    higher rung's plan fits it: the program has the same optimum there.
    """
    reserve = _reserve_bytes(offers.model.workload)
    used: list[tuple[MemoryBudget, MemoryBudget]] = []
    failed: list[MemoryBudget] = []
    for rung in _rungs(offers, effort):
        if len(used) + len(failed) >= effort.ladder or offers.done:
            return
        if any(rung.within(above) and need.within(rung) for above, need in used):
            continue
        if any(rung.within(above) for above in failed):
            continue
        need = _try(offers, rung, min(reserve, rung.device_bytes // 8))
        if need is not None:
            used.append((rung, need))
        else:
            failed.append(rung)


def _rungs(offers: Offers, effort: Effort) -> Iterator[MemoryBudget]:
    """Rungs of all tiers, device memory descending; those that cannot gain are left out."""
    budget = offers.budget
    hosts = list(_geometric(budget.host_bytes, effort.host_rungs, 8))
    ssds = list(_geometric(budget.ssd_bytes, 1, 4))
    for device in _geometric(budget.device_bytes, effort.device_rungs, 16):
        top = MemoryBudget(device_bytes=device, host_bytes=hosts[0], ssd_bytes=ssds[0])
        if not offers.may_gain(_bound(offers, replace(budget, device_bytes=device))):
            return
        for host in hosts:
            for ssd in ssds:
                rung = replace(top, host_bytes=host, ssd_bytes=ssd)
                if offers.may_gain(_bound(offers, rung)):
                    yield rung


def _try(
    offers: Offers, budget: MemoryBudget, reserve: int, max_nodes: int = 1
) -> MemoryBudget | None:
    """The program at a budget less a reserve, which windows may use.

    Returns what the found draft uses of every tier; None if there is none.
    """
    target = replace(budget, device_bytes=budget.device_bytes - reserve)
    if target.device_bytes <= 0 or not offers.may_gain(_bound(offers, target)):
        return None
    trial = solve_at(offers.model, target, NAME, max_nodes)
    if trial is None:
        return None
    offers.finish(trial.made, budget)
    w, plan = offers.model.workload, trial.made.plan
    return MemoryBudget(
        device_bytes=trial.made.memory.peak_bytes + reserve,
        host_bytes=sum(host_bytes_needed(w, plan).values()),
        ssd_bytes=sum(ssd_bytes_needed(w, plan).values()),
    )


def _bound(offers: Offers, budget: MemoryBudget) -> float:
    """A lower bound in seconds at another budget, by the prices of this one's optimum."""
    if not math.isfinite(offers.relaxed.bound):
        return 0.0
    program = offers.model.program(budget)
    return lagrangian_bound(program, offers.relaxed.prices) * offers.model.unit_s


def _reserve_bytes(workload: Workload) -> int:
    """A unit's copy and gradients, or the largest residual: what lets one copy overlap."""
    sizes = [workload.values[v].num_bytes for v in workload.residuals]
    units = (unit.name for unit in workload.units)
    return max([overlap_reserve(workload, dict.fromkeys(units, "host")), *sizes])


def _geometric(limit: int, per_octave: int, count: int) -> Iterator[int]:
    """The `count` largest numbers 2^(k / per_octave), k whole, up to the limit; one at least."""
    if limit <= 1:
        yield max(limit, 0)
        return
    top = math.floor(math.log2(limit) * per_octave + 1e-9)
    for k in range(top, max(top - count, 0), -1):
        size = int(2 ** (k / per_octave))
        if size <= limit:
            yield size
