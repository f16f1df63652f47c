"""checkmate: as the program says, block by block on large models, and honest about its solver."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lohan_fx.errors import InsufficientMemoryError, PlanError
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.planners import PlannerOptions, make_plan, milp
from lohan_fx.planners.checkmate import Checkmate
from lohan_fx.planners.milp import Limits, SolverError
from lohan_fx.planners.oracle import solve_graph
from lohan_fx.planners.oracle_graph import Graph
from lohan_fx.program import regions_of
from lohan_fx.simulate import step_seconds
from lohan_fx.workload import Workload
from tests.test_pareto import deep_workload
from tests.test_planners import check, print_plan, smallest_peak
from tests.test_strategies import ladder_workload
from tests.workloads import budget, gpt_workload, mlp_workload, small_hardware, workloads

pytest.importorskip("pulp")
HW = small_hardware()
QUICK = Checkmate(limits=Limits(time_s=4.0, gap=0.05))
GOLDEN = Path(__file__).parent / "golden" / "plans"


def peak(workload: Workload, strategy: str, options: PlannerOptions) -> int:
    """Device bytes of a strategy's plan where there is plenty."""
    return make_plan(strategy, workload, HW, budget(), options).prediction.peak_device_bytes


def test_cbc_alone_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(milp, "available_solvers", lambda: ("cbc",))
    plan = make_plan(Checkmate(), mlp_workload(), HW, budget(device=40_000))
    assert "cbc" in plan.notes[0]


def test_a_solver_that_is_not_there() -> None:
    with pytest.raises(SolverError, match="no MILP solver is named 'cplex'"):
        make_plan(Checkmate(limits=Limits(solver="cplex")), mlp_workload(), HW, budget())


def test_no_solver_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(milp, "available_solvers", tuple)
    for name in ("auto", "highs", "cbc"):
        with pytest.raises(SolverError, match="pip install pulp") as caught:
            make_plan(Checkmate(limits=Limits(solver=name)), mlp_workload(), HW, budget())
        assert isinstance(caught.value, PlanError)
        assert "pareto" in str(caught.value)


# -- the strategy ---------------------------------------------------------------------------------


def test_each_kind_of_block_is_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def counted(graph: Graph, *args: object, **kwargs: object) -> object:
        sizes.append(len(graph))
        return solve_graph(graph, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("lohan_fx.planners.checkmate.solve_graph", counted)
    workload = gpt_workload(layers=12, hidden=512, batch=8)
    values = sum(v.num_bytes for v in workload.values.values())
    limit = budget(device=values // 4)
    plan = make_plan(Checkmate(), workload, HW, limit)
    check(workload, plan, limit)
    assert len(sizes) == 3
    assert max(sizes) <= Checkmate().max_nodes
    for note in plan.notes[:3]:
        assert "gap" in note
    actions = {
        tuple(plan.residuals[f"h{k}.{v}"].action for v in ("a_up", "a_gelu", "a_qkv"))
        for k in range(3, 12)
    }
    assert len(actions) <= 2
    assert {r.tier for r in plan.residuals.values() if r.action == "swap"} <= {"host"}


def test_remat_only_swaps_nothing() -> None:
    workload = gpt_workload(layers=6, hidden=512, batch=8)
    options = PlannerOptions(states="host")
    roomy = make_plan("recompute-all", workload, HW, budget(), options).prediction
    limit = budget(device=int(roomy.peak_device_bytes * 1.4))
    planner = Checkmate(remat_only=True)
    plan = make_plan(planner, workload, HW, limit, options)
    check(workload, plan, limit)
    assert plan.count("swap") == 0
    assert plan.count("recompute") > 0
    assert regions_of(workload, plan)


def test_too_little_memory_raises() -> None:
    with pytest.raises(InsufficientMemoryError) as caught:
        make_plan(Checkmate(), gpt_workload(), HW, budget(device=10_000))
    assert caught.value.tier == "device"
    with pytest.raises(InsufficientMemoryError) as caught:
        make_plan(Checkmate(), gpt_workload(), small_hardware(ssd=False), budget(host=1000, ssd=0))
    assert caught.value.tier == "host"


def test_little_host_memory_makes_it_recompute() -> None:
    workload = gpt_workload(layers=4, batch=32)
    options = PlannerOptions(states="device")
    limit = budget(device=int(0.8 * peak(workload, "keep-all", options)), ssd=0)
    plans = []
    for host in (0, 500_000):
        tight = MemoryBudget(device_bytes=limit.device_bytes, host_bytes=host, ssd_bytes=0)
        plans.append(make_plan(QUICK, workload, HW, tight, options))
        check(workload, plans[-1], tight)
    assert plans[0].count("swap") == 0
    assert plans[0].count("recompute") > 0


@pytest.mark.parametrize("swap_to", ["auto", "host", "ssd"])
def test_swapped_residuals_lie_where_they_may(swap_to: Literal["auto", "host", "ssd"]) -> None:
    workload = gpt_workload(layers=4, batch=32)
    options = PlannerOptions(states="device", swap_to=swap_to)
    limit = budget(device=int(0.7 * peak(workload, "keep-all", options)))
    plan = make_plan(QUICK, workload, HW, limit, options)
    check(workload, plan, limit)
    tiers = {r.tier for r in plan.residuals.values() if r.action == "swap"}
    assert tiers <= ({"host", "ssd"} if swap_to == "auto" else {swap_to})


def test_a_slow_solver_is_no_failure() -> None:
    """Nothing is found for any kind of block: its residuals are swapped, and a note says so."""
    workload = gpt_workload(layers=4, hidden=128, batch=8)
    limit = budget(device=int(0.6 * peak(workload, "keep-all", PlannerOptions())))
    plan = make_plan(Checkmate(limits=Limits(time_s=1e-6)), workload, HW, limit)
    check(workload, plan, limit)
    assert any("found nothing in" in note or "rounded" in note for note in plan.notes)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    workload=workloads(max_blocks=2),
    states=st.sampled_from(("device", "host")),
    tightness=st.floats(0, 1.3),
)
def test_any_plan_fits(
    workload: Workload, states: Literal["device", "host"], tightness: float
) -> None:
    options = PlannerOptions(states=states)
    least = smallest_peak(workload, options, dict.fromkeys(workload.unit_by_name, states))
    total = sum(v.num_bytes for v in workload.values.values())
    limit = budget(device=least + int(tightness * total))
    check(workload, make_plan(QUICK, workload, HW, limit, options), limit)


@pytest.mark.parametrize("strategy", ["checkmate", "lohan+checkmate"])
def test_golden_plans(strategy: str, request: pytest.FixtureRequest) -> None:
    workload = ladder_workload()
    text = print_plan(workload, make_plan(strategy, workload, HW, budget(device=62_000)))
    assert text.count("\n") <= 30
    path = GOLDEN / f"{strategy}.txt"
    if request.config.getoption("--regen-golden"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


def test_same_input_same_plan() -> None:
    workload = mlp_workload()
    one, two = (make_plan(Checkmate(), workload, HW, budget(device=40_000)) for _ in range(2))
    assert one.fingerprint == two.fingerprint


@pytest.mark.slow
def test_a_large_model_is_solved_block_by_block() -> None:
    workload = deep_workload(24, 20, repeated=True)
    hw = HardwareProfile.preset("rtx4090-12xp5510")
    limit = MemoryBudget.from_request(hw)
    plan = make_plan(Checkmate(), workload, hw, limit)
    check(workload, plan, limit)
    rival = make_plan("recompute-all", workload, hw, limit)
    assert step_seconds(workload, plan, hw) <= step_seconds(workload, rival, hw)
