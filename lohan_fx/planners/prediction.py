"""What a finished plan is expected to do: bytes by link, exact peaks, seconds by Eq. 1–7."""

from __future__ import annotations

from dataclasses import replace

from lohan_fx.cost_model import Demand, IterationTime, iteration_time, state_demand
from lohan_fx.footprint import (
    cast_units,
    host_bytes_needed,
    host_copies,
    parked_gradients,
    ssd_bytes_needed,
    tiers_of,
)
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import Plan, Prediction, Tier
from lohan_fx.planners.registry import PlannerOptions
from lohan_fx.program import Kind, Program, Residency
from lohan_fx.workload import Phase, Workload


def _moved(
    program: Program, kind: Kind, tier: Tier | None = None, phase: Phase | None = None
) -> int:
    return sum(
        x.num_bytes
        for x in program.instructions
        if x.kind == kind and tier in (None, x.tier) and phase in (None, x.phase)
    )


def _cast(workload: Workload, plan: Plan, phase: Phase) -> int:
    """Device bytes that casts of masters move in a phase."""
    ops, index = workload.ops, workload.op_index
    return sum(
        workload.unit_by_name[name].cast_bytes
        for name in cast_units(plan)
        for window in plan.units[name].windows
        if ops[index[window.fetch_before]].phase == phase
    )


def demand_of(workload: Workload, plan: Plan, program: Program) -> Demand:
    """What the program asks of every resource; recomputation exact on the DAG."""
    regions = [x for x in program.instructions if x.kind == "recompute"]
    ops = workload.ops
    n = workload.num_forward_ops
    return replace(
        state_demand(workload.units, tiers_of(plan), host_copies(plan), cast_units(plan)),
        cast_forward_bytes=_cast(workload, plan, "forward"),
        cast_backward_bytes=_cast(workload, plan, "backward"),
        forward_flops=workload.forward_flops,
        backward_flops=workload.backward_flops,
        recompute_flops=sum(x.flops for x in regions),
        forward_s=sum(op.seconds for op in ops[:n]),
        backward_s=sum(op.seconds for op in ops[n:]),
        recompute_s=sum(x.seconds for x in regions),
        swapped_bytes=_moved(program, "offload"),
        swapped_ssd_bytes=_moved(program, "offload", "ssd"),
        fetch_forward_bytes=_moved(program, "fetch_unit", phase="forward"),
        fetch_backward_bytes=_moved(program, "fetch_unit", phase="backward"),
        ssd_fetch_forward_bytes=_moved(program, "fetch_unit", "ssd", "forward"),
        ssd_fetch_backward_bytes=_moved(program, "fetch_unit", "ssd", "backward"),
        direct_forward_bytes=_moved(program, "host_view", phase="forward"),
        direct_backward_bytes=_moved(program, "host_view", phase="backward"),
        direct_gradient_bytes=_moved(program, "write_gradient"),
    )


def predicted_time(
    workload: Workload, hw: HardwareProfile, options: PlannerOptions, plan: Plan, program: Program
) -> IterationTime:
    """Eq. 1–7 (with the extensions that `options.cost` has on) for a finished plan."""
    demand = demand_of(workload, plan, program)
    return iteration_time(hw, demand, options.cost, plan.schedule)


def predict(
    workload: Workload,
    hw: HardwareProfile,
    options: PlannerOptions,
    plan: Plan,
    program: Program,
    memory: Residency,
) -> Prediction:
    """Fill a prediction. Peaks are exact; seconds are the cost model's."""
    demand = demand_of(workload, plan, program)
    time = iteration_time(hw, demand, options.cost, plan.schedule)
    return Prediction(
        step_s=time.step_s,
        forward_s=time.forward_s,
        backward_s=time.backward_s,
        peak_device_bytes=memory.peak_bytes,
        peak_host_bytes=sum(host_bytes_needed(workload, plan).values()),
        peak_ssd_bytes=sum(ssd_bytes_needed(workload, plan).values()),
        d2h_bytes=_moved(program, "offload")
        + _moved(program, "emit_gradients")
        + _moved(program, "write_gradient"),
        h2d_bytes=_moved(program, "prefetch")
        + _moved(program, "fetch_unit")
        + _moved(program, "host_view")
        + sum(workload.unit_by_name[name].gradient_bytes for name in parked_gradients(plan)),
        ssd_read_bytes=_moved(program, "prefetch", "ssd")
        + _moved(program, "fetch_unit", "ssd")
        + demand.ssd_state_read_bytes,
        ssd_write_bytes=_moved(program, "offload", "ssd") + demand.ssd_state_write_bytes,
        recompute_flops=demand.recompute_flops,
        recompute_s=demand.recompute_s,
        binding=time.binding,
    )
