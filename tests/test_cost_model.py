"""Eq. 1–7 against numbers worked out by hand, and the extensions one by one."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lohan_fx.cost_model import CostOptions, Demand, iteration_time, state_demand, unit_demand
from lohan_fx.errors import HardwareError
from lohan_fx.plan import Tier
from lohan_fx.planners.algorithm1 import by_benefit, search
from lohan_fx.planners.recompute_cost import RecomputeCost, layers_of
from lohan_fx.planners.registry import PlannerOptions
from lohan_fx.planners.schedule import must_save
from lohan_fx.planners.windows import num_fetches
from lohan_fx.workload import Workload
from tests.workloads import budget, gpt_workload, small_hardware, workloads

# THP_G = 100 FLOP/s, BW_G = 10 B/s, BW_S2M = 5 B/s, BW_M2S = 4 B/s, CPU Adam 2 parameters/s.
HW = small_hardware(
    block_flops_per_s=100.0,
    device_bytes_per_s=50.0,
    h2d_bytes_per_s=10.0,
    d2h_bytes_per_s=10.0,
    duplex_bytes_per_s=15.0,
    ssd_read_bytes_per_s=5.0,
    ssd_write_bytes_per_s=4.0,
    cpu_optimizer_params_per_s=2.0,
)
P = 10
PAPER = Demand(
    forward_flops=600,
    backward_flops=999,
    recompute_flops=300,
    forward_s=3.0,
    backward_s=5.0,
    recompute_s=2.0,
    swapped_bytes=80,
    swapped_ssd_bytes=30,
    fetch_forward_bytes=2 * P,
    fetch_backward_bytes=2 * P,
    gradient_bytes=2 * P,
    ssd_fetch_forward_bytes=2 * P,
    ssd_fetch_backward_bytes=2 * P,
    ssd_state_read_bytes=12 * P,
    ssd_state_write_bytes=14 * P,
    num_cpu_params=P,
)
WITHOUT = CostOptions.paper()


def test_the_papers_equations() -> None:
    time = iteration_time(HW, PAPER, WITHOUT)
    assert time.forward_terms == pytest.approx(
        {"gpu": 6.0, "g2m": 8.0, "m2g": 2.0, "ssd": 20 / 5 + 30 / 4}
    )
    assert time.backward_terms == pytest.approx(
        {
            "gpu": (2 * 600 + 300) / 100,
            "g2m": 2.0,
            "m2g": (20 + 80) / 10,
            "ssd": (140 + 30) / 5 + 140 / 4,
            "cpu": 0.0,
        }
    )
    assert (time.forward_s, time.backward_s) == pytest.approx((11.5, 69.0))
    assert time.step_s == pytest.approx(80.5)
    assert (time.binding_forward, time.binding_backward) == ("ssd", "ssd")
    assert time.binding == "forward: ssd, backward: ssd"


def test_host_states_have_no_ssd_terms() -> None:
    host = replace(
        PAPER,
        swapped_ssd_bytes=0,
        ssd_fetch_forward_bytes=0,
        ssd_fetch_backward_bytes=0,
        ssd_state_read_bytes=0,
        ssd_state_write_bytes=0,
    )
    no_ssd = small_hardware(ssd=False, block_flops_per_s=100.0)
    assert iteration_time(no_ssd, host, WITHOUT).backward_terms["ssd"] == 0.0
    with pytest.raises(HardwareError, match="ssd_read_bytes_per_s"):
        iteration_time(no_ssd, PAPER, WITHOUT)


def terms(option: str, **changes: Any) -> tuple[dict[str, float], dict[str, float]]:
    options = replace(WITHOUT, **{option: True})
    time = iteration_time(HW.replace(**changes), PAPER, options)
    return dict(time.forward_terms), dict(time.backward_terms)


def test_each_extension_alone() -> None:
    forward, backward = terms("roofline")
    assert (forward["gpu"], backward["gpu"]) == (3.0, 7.0)
    forward, backward = terms("asymmetric_links", d2h_bytes_per_s=4.0)
    assert (forward["g2m"], forward["m2g"], backward["g2m"]) == (20.0, 2.0, 5.0)
    forward, _ = terms("roofline", d2h_bytes_per_s=4.0)
    assert (forward["g2m"], forward["m2g"]) == (20.0, 5.0)  # BW_G is the slower direction
    forward, backward = terms("duplex_limit")
    assert forward["duplex"] == pytest.approx(100 / 15)
    assert backward["duplex"] == pytest.approx(120 / 15)
    assert terms("cpu_optimizer")[1]["cpu"] == 5.0


def test_updates_of_resident_units_take_device_time() -> None:
    demand = replace(PAPER, device_update_bytes=100)
    options = replace(WITHOUT, device_optimizer=True)
    assert iteration_time(HW, demand, options).backward_terms["gpu"] == 17.0
    assert iteration_time(HW, demand, WITHOUT).backward_terms["gpu"] == 15.0


def test_schedules() -> None:
    options = replace(WITHOUT, cpu_optimizer=True)
    chain = 120 / 5 + 5 + 140 / 4
    serial = iteration_time(HW, PAPER, options, "serial")
    assert serial.optimizer_s == pytest.approx(chain)
    assert serial.backward_terms["ssd"] == pytest.approx((20 + 30) / 5)
    assert serial.step_s == pytest.approx(11.5 + 15 + chain)
    naive = iteration_time(HW, PAPER, options, "naive")
    assert naive.backward_terms["optimizer"] == pytest.approx(chain)
    optimized = iteration_time(HW, PAPER, options, "optimized")
    assert optimized.step_s <= naive.step_s <= serial.step_s


def test_updates_hide_behind_the_next_forward() -> None:
    options = replace(WITHOUT, cpu_optimizer=True)
    slow = HW.replace(cpu_optimizer_params_per_s=0.1)  # 100 s of updates
    time = iteration_time(slow, replace(PAPER, ssd_state_write_bytes=0), options, "overlapped")
    assert time.backward_terms["cpu"] == pytest.approx(100 - time.forward_s)
    assert time.step_s == pytest.approx(100)


def test_unit_demand_by_tier() -> None:
    workload = gpt_workload(layers=2, hidden=16, vocab=32)
    one, two = workload.units[1:3]
    tiers: dict[str, Tier] = dict.fromkeys(workload.unit_by_name, "device")
    everything = state_demand(workload.units, tiers)
    assert everything.num_cpu_params == everything.gradient_bytes == 0
    assert everything.device_update_bytes == sum(30 * u.num_params for u in workload.units)
    tiers |= {one.name: "host", two.name: "ssd"}
    demand = unit_demand(workload, tiers, num_fetches(workload))
    n = one.num_params
    assert demand.num_cpu_params == 2 * n
    assert demand.fetch_forward_bytes == demand.fetch_backward_bytes == 4 * n
    assert demand.ssd_fetch_forward_bytes == demand.ssd_fetch_backward_bytes == 2 * n
    assert (demand.ssd_state_read_bytes, demand.ssd_state_write_bytes) == (12 * n, 14 * n)
    assert demand.forward_flops == workload.forward_flops


@pytest.mark.parametrize(("available", "on_ssd"), [(20, 30), (50, 0), (70, 0)])
def test_swapped_bytes_beyond_host_memory_go_to_ssd(available: int, on_ssd: int) -> None:
    demand = PAPER.with_activations(
        recompute_flops=1, recompute_s=0.1, swapped_bytes=50, available_bytes=available
    )
    assert demand.swapped_ssd_bytes == on_ssd


@settings(max_examples=30, deadline=None)
@given(
    workload=workloads(),
    flops=st.floats(1e6, 1e14),
    link=st.floats(1e6, 1e12),
    ssd=st.floats(1e6, 1e12),
    host=st.integers(0, 100_000),
)
def test_t_iter_is_convex_in_swapped_bytes(
    workload: Workload, flops: float, link: float, ssd: float, host: int
) -> None:
    """Along Algorithm 1's order, with FLOP_r by Eq. 7 (LoHan, "Proving Convexity")."""
    hw = small_hardware(
        block_flops_per_s=flops,
        h2d_bytes_per_s=link,
        d2h_bytes_per_s=link,
        ssd_read_bytes_per_s=ssd,
        ssd_write_bytes_per_s=ssd / 2,
    )
    options = PlannerOptions(cost=WITHOUT)
    tiers: dict[str, Tier] = dict.fromkeys(workload.unit_by_name, "ssd")
    demand = unit_demand(workload, tiers, num_fetches(workload))
    layers = [x for x in layers_of(workload, workload.residuals) if x.num_bytes]
    flops_left, swapped = sum(layer.flops for layer in layers), 0
    points = []
    for layer in [None, *by_benefit(layers, options)]:
        flops_left -= layer.flops if layer else 0
        swapped += layer.num_bytes if layer else 0
        filled = replace(
            demand.with_activations(
                recompute_flops=0, recompute_s=0.0, swapped_bytes=swapped, available_bytes=host
            ),
            recompute_flops=flops_left,  # type: ignore[arg-type]
        )
        points.append((swapped, iteration_time(hw, filled, WITHOUT).step_s))
    # αA has a kink at MEM_avail, which lies between two points: convex all the same.
    slopes = [(t2 - t1) / (a2 - a1) for (a1, t1), (a2, t2) in pairwise(points)]
    scale = max(map(abs, slopes), default=0.0)
    for lower, higher in pairwise(slopes):
        assert lower <= higher + 1e-9 * scale


@settings(max_examples=30, deadline=None)
@given(workload=workloads(), order=st.randoms(use_true_random=False))
def test_cached_recompute_cost_is_the_exact_one(workload: Workload, order: Any) -> None:
    base = set(must_save(workload) | workload.inter_block)
    cost = RecomputeCost(workload, base)
    rest = [v for v in workload.residuals if v not in base]
    order.shuffle(rest)
    outputs = {v.name for v in workload.values.values() if v.is_output}
    for v in [None, *rest]:
        if v is not None:
            base.add(v)
            cost.save([v])
        expected = 0
        for block in {workload.values[v].block for v in workload.residuals}:
            wanted = [
                v for v in workload.residuals if workload.values[v].block == block and v not in base
            ]
            ops, blocked = workload.recompute_ops(wanted, base | outputs)
            assert not blocked
            expected += sum(workload.ops[i].flops for i in ops)
        assert cost.flops == expected
    assert cost.flops == 0


@settings(max_examples=20, deadline=None)
@given(workload=workloads(), host=st.integers(0, 200_000), rate=st.floats(1e8, 1e12))
def test_search_takes_the_least_time_it_saw(workload: Workload, host: int, rate: float) -> None:
    hw = small_hardware(h2d_bytes_per_s=rate, d2h_bytes_per_s=rate)
    tiers: dict[str, Tier] = dict.fromkeys(workload.unit_by_name, "device")
    found = search(workload, hw, budget(host=host), PlannerOptions(), tiers)
    assert found.time.step_s <= min(t for _, t in found.points) * (1 + 1e-9)
    assert workload.inter_block | must_save(workload) <= found.swapped
    assert found.case in (1, 2, 3)
    literal = search(workload, hw, budget(host=host), PlannerOptions(), tiers, literal=True)
    assert literal.time.step_s <= literal.points[-1][1]
