"""Host and SSD layout: worked examples, and no two slots overlap."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lohan_fx.footprint import (
    PAGE_BYTES,
    STAGING_BYTES,
    Ring,
    align,
    gradient_ring,
    host_breakdown,
    host_bytes_needed,
    host_slots,
    ssd_bytes_needed,
    ssd_slots,
    staging,
    state_ring,
    unit_bytes,
)
from lohan_fx.plan import SCHEDULES, Schedule, Tier
from lohan_fx.planners import PlannerOptions, make_plan
from lohan_fx.planners.random_policy import RandomPolicy
from lohan_fx.workload import Unit, Workload
from tests.workloads import budget, gpt_workload, small_hardware, workloads

K = PAGE_BYTES


def unit(name: str, pages: int, *, frozen: bool = False) -> Unit:
    """Compute copy of `pages` pages less one byte, six times that in states."""
    return Unit(
        name=name,
        block=name,
        parameters=(name,),
        num_params=pages,
        compute_bytes=pages * K - 1,
        state_bytes=0 if frozen else 6 * pages * K - 5,
        gradient_bytes=0 if frozen else pages * K - 1,
        gradients=() if frozen else (f"g.{name}",),
    )


UNITS = (unit("a", 1), unit("b", 2), unit("c", 3), unit("d", 5, frozen=True))


def tiers(**where: Tier) -> dict[str, Tier]:
    return {u.name: where.get(u.name, "device") for u in UNITS}


def test_pages() -> None:
    assert [align(n) for n in (0, 1, K, K + 1)] == [0, K, K, 2 * K]
    assert unit_bytes(UNITS[0]) == 7 * K


def test_device_units_need_no_host_memory() -> None:
    assert sum(host_breakdown(UNITS, tiers(), "optimized").values()) == 0


def test_host_units() -> None:
    need = host_breakdown(UNITS, tiers(a="host", b="host", d="host"), "optimized", [1, K + 1])
    assert need == {
        "units": (7 + 14 + 5) * K,
        "spares": 0,
        "compute copies": 0,
        "gradients": 2 * 2 * K,
        "state ring": 0,
        "staging": 0,
        "residuals": 3 * K,
    }


def test_serial_has_all_gradients_at_once() -> None:
    where = tiers(a="host", b="host", c="ssd")
    assert host_breakdown(UNITS, where, "serial")["gradients"] == (1 + 2 + 3) * K
    assert host_breakdown(UNITS, where, "naive")["gradients"] == (2 * 2 + 2 * 3) * K
    assert gradient_ring(UNITS, where, "naive", "ssd") == Ring(count=2, num_bytes=3 * K)
    assert gradient_ring(UNITS, where, "naive", "device") == Ring()


@pytest.mark.parametrize("schedule", sorted(set(SCHEDULES) - {"overlapped", "speculative"}))
def test_four_buffers_where_gradients_add_up(schedule: Schedule) -> None:
    """In host memory, and no more than there are units (two at least)."""
    units = [replace(UNITS[0], name=name, accumulator_bytes=K) for name in "abcde"]
    for count, buffers in ((1, 2), (3, 3), (5, 4)):
        given = units[:count]
        for tier, wanted in (("host", buffers), ("ssd", 2)):
            where: dict[str, Tier] = dict.fromkeys("abcde", tier)
            assert gradient_ring(given, where, schedule, tier).count == wanted


def test_ssd_units_pass_a_ring() -> None:
    where = tiers(b="ssd", c="ssd", d="ssd")
    assert state_ring(UNITS, where, "optimized") == Ring(count=3, num_bytes=21 * K)
    assert state_ring(UNITS, where, "naive") == Ring(count=1, num_bytes=21 * K)
    assert staging(UNITS, where, []) == Ring(count=8, num_bytes=5 * K)
    assert staging(UNITS, where, [2**40]).num_bytes == STAGING_BYTES
    assert staging(UNITS, tiers(a="host"), []) == Ring()


def test_copies_in_host_memory_leave_ring_staging_and_file() -> None:
    where = tiers(a="ssd", b="ssd", c="ssd")
    some = host_breakdown(UNITS, where, "optimized", copies=["a", "c"])
    assert some["compute copies"] == (1 + 3) * K
    assert some["units"] == 0
    assert state_ring(UNITS, where, "optimized", ["a", "c"]) == Ring(count=3, num_bytes=18 * K)
    assert state_ring(UNITS, where, "optimized", ["a"]).num_bytes == 21 * K
    assert staging(UNITS, where, [], ["a", "c"]).num_bytes == 2 * K
    assert staging(UNITS, where, [], ["a", "b", "c"]) == Ring()
    assert unit_bytes(UNITS[2], copy=False) == 18 * K


@settings(max_examples=25, deadline=None)
@given(workload=workloads(), seed=st.integers(0, 99), schedule=st.sampled_from(SCHEDULES))
def test_plans_add_up(workload: Workload, seed: int, schedule: Any) -> None:
    options = PlannerOptions(schedule=schedule, copies="host")
    plan = make_plan(RandomPolicy(seed), workload, small_hardware(), budget(), options)
    host, ssd = host_bytes_needed(workload, plan), ssd_bytes_needed(workload, plan)
    for slots, need in ((host_slots, host), (ssd_slots, ssd)):
        end = 0
        for v, (offset, size) in slots(workload, plan).items():
            assert offset == end
            assert offset % K == 0
            assert size == align(workload.values[v].num_bytes)
            end += size
        assert end == need["residuals"]
    swapped = {v for v, r in plan.residuals.items() if r.action == "swap"}
    assert swapped == set(host_slots(workload, plan)) | set(ssd_slots(workload, plan))
    assert all(n % K == 0 for n in (*host.values(), *ssd.values()))
    on_ssd = [u for u in workload.units if plan.units[u.name].tier == "ssd"]
    copies = {name for name, u in plan.units.items() if u.copy_tier == "host"}
    assert ssd["units"] == sum(unit_bytes(u, copy=u.name not in copies) for u in on_ssd)
    sizes = [align(u.compute_bytes) for u in on_ssd if u.name in copies]
    assert host["compute copies"] == sum(sizes)


def test_gpt_on_ssd_needs_little_host_memory() -> None:
    workload = gpt_workload(layers=12, hidden=128)
    options = PlannerOptions(states="ssd", swap_to="ssd")
    plan = make_plan("swap-all", workload, small_hardware(), budget(), options)
    need = sum(host_bytes_needed(workload, plan).values())
    assert need < 14 * workload.num_params / 2
