"""checkmate: the MILP equals brute force, and says what it did not prove."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lohan_fx.errors import InsufficientMemoryError, PlanError
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.planners import PlannerOptions, make_plan, oracle
from lohan_fx.planners.checkmate import Checkmate
from lohan_fx.planners.evaluate import step_seconds
from lohan_fx.planners.oracle import (
    Limits,
    Links,
    Schedule,
    SolverError,
    available_solvers,
    pick_solver,
    round_graph,
    schedule_peak,
    schedule_seconds,
    solve_graph,
)
from lohan_fx.planners.oracle_graph import Graph, Node, graph_of
from lohan_fx.planners.pareto import Pareto
from lohan_fx.program import regions_of
from tests.test_pareto import deep_workload, whole_bytes
from tests.test_planners import check
from tests.workloads import Builder, budget, gpt_workload, mlp_workload, small_hardware

pytest.importorskip("pulp")
SOLVERS = available_solvers()
HW = small_hardware()
EXACT = Limits(time_s=60.0, gap=1e-6)


def random_graph(seed: int, count: int) -> Graph:
    """Nodes that read one or two earlier ones; the last one reads the first."""
    rng = random.Random(seed)
    nodes = []
    for k in range(count):
        reads = {k - 1, rng.randrange(k)} if k else set()
        reads |= {0} if k == count - 1 and rng.random() < 0.7 else set()
        nodes.append(
            Node(
                name=f"n{k}",
                seconds=float(rng.randint(1, 9)),
                num_bytes=rng.randint(1, 9),
                scratch_bytes=rng.choice((0, 0, 3)),
                reads=tuple(sorted(reads)),
                recomputable=rng.random() < 0.9,
                pinned=k > 0 and rng.random() < 0.1,
            )
        )
    return Graph(nodes=tuple(nodes), turn=count // 2, static_bytes=2)


def every_schedule(graph: Graph, *, swap: bool) -> Iterator[Schedule]:
    """Every choice of what is kept (and fetched) before each stage; R is what follows.

    With swapping everything is sent when it is first made, which costs nothing if the link out is
    infinitely fast.
    """
    n = len(graph)
    slots = [(t, i) for t in range(1, n) for i in range(t)]
    for ways in itertools.product(range(3 if swap else 2), repeat=len(slots)):
        kept: list[set[int]] = [set() for _ in range(n)]
        fetched: list[set[int]] = [set() for _ in range(n)]
        for (t, i), way in zip(slots, ways, strict=True):
            if way == 1:
                kept[t].add(i)
            elif way == 2:
                fetched[t].add(i)
        if any(graph.nodes[i].pinned and i not in kept[t] for t, i in slots):
            continue
        if any(graph.nodes[i].pinned for t in range(n) for i in fetched[t]):
            continue
        runs = closure(graph, kept, fetched)
        if runs is not None:
            sent = tuple({t: 1.0} for t in range(n))
            yield Schedule(
                runs=runs,
                kept=tuple(map(frozenset, kept)),
                sent={"host": sent} if swap else {},
                fetched={"host": tuple(map(frozenset, fetched))} if swap else {},
            )


def closure(
    graph: Graph, kept: list[set[int]], fetched: list[set[int]]
) -> tuple[frozenset[int], ...] | None:
    """What every stage must run: its own node, and what the next one keeps and it has not."""
    n = len(graph)
    found = []
    for t in range(n):
        there = kept[t] | fetched[t]
        run: set[int] = set()
        stack = [t, *(i for i in (kept[t + 1] if t + 1 < n else ()) if i not in there)]
        while stack:
            i = stack.pop()
            if i in run or i in there:
                continue
            if i > t or (i < t and not graph.nodes[i].recomputable):
                return None
            run.add(i)
            stack.extend(graph.nodes[i].reads)
        found.append(frozenset(run))
    return tuple(found)


def brute_force(graph: Graph, limit: int, links: Links | None) -> float:
    best = math.inf
    for schedule in every_schedule(graph, swap=links is not None):
        seconds = schedule_seconds(graph, schedule, links)
        if seconds < best and schedule_peak(graph, schedule) <= limit:
            best = seconds
    return best


def limits_of(graph: Graph) -> range:
    total = graph.static_bytes + sum(node.num_bytes for node in graph.nodes)
    return range(graph.working_bytes, total + 1, 3)


# -- the program ----------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**6), data=st.data())
def test_rematerialisation_equals_brute_force(seed: int, data: st.DataObject) -> None:
    graph = random_graph(seed, 5)
    limit = data.draw(st.sampled_from(limits_of(graph)))
    best = brute_force(graph, limit, None)
    for solver in SOLVERS:
        try:
            found = solve_graph(graph, limit, None, replace(EXACT, solver=solver))
        except InsufficientMemoryError:
            assert best == math.inf
            continue
        assert found.status == "optimal"
        assert found.seconds == pytest.approx(best, rel=1e-6)
        assert schedule_peak(graph, found.schedule) <= limit
        assert found.gap <= 2e-6


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**6), rate=st.sampled_from((0.5, 2.0, 20.0)), data=st.data())
def test_swapping_equals_brute_force(seed: int, rate: float, data: st.DataObject) -> None:
    graph = random_graph(seed, 4)
    limit = data.draw(st.sampled_from(limits_of(graph)))
    links = Links(h2d=rate, d2h=1e12, duplex=1e12)
    best = brute_force(graph, limit, links)
    for solver in SOLVERS:
        try:
            found = solve_graph(graph, limit, links, replace(EXACT, solver=solver))
        except InsufficientMemoryError:
            assert best == math.inf
            continue
        assert found.seconds == pytest.approx(best, rel=1e-6)
        assert schedule_peak(graph, found.schedule) <= limit


def test_a_slow_link_out_and_ssds_cost_time() -> None:
    graph = random_graph(3, 6)
    limit = limits_of(graph)[1]
    fast = Links(h2d=9.0, d2h=9.0, duplex=18.0)
    ssd = replace(fast, ssd_read=3.0, ssd_write=3.0, host_bytes=0.0)
    both = replace(fast, ssd_read=3.0, ssd_write=3.0)
    seconds = {
        name: solve_graph(graph, limit, links, EXACT).seconds
        for name, links in (
            ("fast", fast),
            ("slow", replace(fast, d2h=0.5)),
            ("ssd", ssd),
            ("both", both),
        )
    }
    assert seconds["fast"] <= seconds["slow"]
    assert seconds["both"] <= seconds["fast"] * (1 + 1e-6)
    assert seconds["fast"] <= seconds["ssd"] * (1 + 1e-6)


def test_capacity_of_host_memory_counts() -> None:
    graph = random_graph(3, 6)
    limit = limits_of(graph)[1]
    links = Links(h2d=9.0, d2h=9.0, duplex=18.0)
    none = solve_graph(graph, limit, replace(links, host_bytes=0.0), EXACT)
    assert none.seconds == pytest.approx(solve_graph(graph, limit, None, EXACT).seconds)


def test_infeasible_is_said() -> None:
    graph = random_graph(1, 6)
    with pytest.raises(InsufficientMemoryError, match="infeasible") as caught:
        solve_graph(graph, graph.working_bytes - 1)
    assert caught.value.need_bytes == graph.working_bytes
    assert caught.value.at_peak
    chain = Graph(
        nodes=tuple(
            Node(
                name=f"n{k}",
                seconds=1.0,
                num_bytes=10,
                reads=((k - 1,) if k < 5 else (4, 0)) if k else (),
                recomputable=False,
            )
            for k in range(6)
        ),
        turn=3,
    )
    for solver in SOLVERS:
        with pytest.raises(InsufficientMemoryError, match="infeasible") as caught:
            solve_graph(chain, 30 - 1, None, Limits(solver=solver))
        assert caught.value.need_bytes > 29


def test_a_time_out_is_never_called_optimal() -> None:
    workload = gpt_workload(layers=3)
    graph = graph_of(workload)
    limit = graph.static_bytes + sum(n.num_bytes for n in graph.nodes[: graph.turn]) // 3
    links = Links.of(HW)
    for solver in SOLVERS:
        for seconds in (0.01, 2.0):
            try:
                found = solve_graph(graph, limit, links, Limits(solver=solver, time_s=seconds))
            except SolverError as error:
                assert "found no schedule" in str(error)
                assert f"{seconds:g} s" in str(error)
                continue
            assert schedule_peak(graph, found.schedule) <= limit
            assert found.bound_s <= found.seconds
            if found.gap > 1e-3:
                assert found.status == "feasible"


def test_a_solver_that_is_not_there() -> None:
    with pytest.raises(SolverError, match="no MILP solver is named 'gurobi'"):
        pick_solver("gurobi")
    workload = mlp_workload()
    with pytest.raises(SolverError, match="no MILP solver is named 'cplex'"):
        make_plan(Checkmate(limits=Limits(solver="cplex")), workload, HW, budget())


def test_no_solver_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "available_solvers", tuple)
    for name in ("auto", "highs", "cbc"):
        with pytest.raises(SolverError, match="pip install pulp") as caught:
            make_plan(Checkmate(limits=Limits(solver=name)), mlp_workload(), HW, budget())
        assert isinstance(caught.value, PlanError)
        assert "pareto" in str(caught.value)


def test_cbc_alone_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "available_solvers", lambda: ("cbc",))
    plan = make_plan(Checkmate(), mlp_workload(), HW, budget(device=40_000))
    assert "cbc" in plan.notes[0]


def test_rounding_is_feasible_and_no_better_than_the_optimum() -> None:
    graph = graph_of(gpt_workload(layers=1), recompute_backward=False)
    exact = {}
    for part in (0.6, 0.8, 1.2):
        limit = int(graph.working_bytes + part * sum(n.num_bytes for n in graph.nodes) / 3)
        rounded = round_graph(graph, limit)
        exact[part] = solve_graph(graph, limit, None, Limits(time_s=20.0))
        assert rounded.status == "rounded"
        assert schedule_peak(graph, rounded.schedule) <= limit
        assert rounded.bound_s <= exact[part].seconds * (1 + 1e-6)
        assert rounded.seconds >= exact[part].bound_s * (1 - 1e-6)


def test_walking_a_broken_schedule_fails() -> None:
    graph = random_graph(2, 5)
    found = solve_graph(graph, limits_of(graph)[-1], None, EXACT).schedule
    empty = replace(found, kept=tuple(frozenset() for _ in found.kept))
    with pytest.raises(PlanError, match="without what it reads"):
        schedule_peak(graph, empty)
    late = replace(found, kept=(*found.kept[:-1], frozenset({0, 1, 2, 3})))
    if not late.kept[-1] <= found.kept[-2] | found.runs[-2]:
        with pytest.raises(PlanError, match="keeps results"):
            schedule_peak(graph, late)


# -- graphs ---------------------------------------------------------------------------------------


def test_a_graph_has_the_residency_of_its_workload() -> None:
    """Keep-all: the walk's peak is that of the program without units."""
    workload = chain(4)
    graph = graph_of(workload, static_bytes=workload.values["x"].num_bytes)
    found = solve_graph(graph, 2**30, None, EXACT)
    plan = make_plan("keep-all", workload, HW, budget())
    assert found.seconds == pytest.approx(sum(op.seconds for op in workload.ops))
    assert schedule_peak(graph, found.schedule) == plan.prediction.peak_device_bytes


def test_ops_are_merged_between_residuals() -> None:
    workload = gpt_workload(layers=1)
    whole = graph_of(workload)
    merged = graph_of(workload, max_nodes=24)
    assert len(merged) <= 24
    assert merged.seconds == pytest.approx(whole.seconds)
    forward = [node for node in merged.nodes[: merged.turn] if node.values]
    assert len(forward) >= 8
    small = graph_of(workload, max_nodes=6)
    assert len(small) == 6


# -- the strategy ---------------------------------------------------------------------------------


def test_each_kind_of_block_is_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def counted(graph: Graph, *args: object, **kwargs: object) -> object:
        sizes.append(len(graph))
        return solve_graph(graph, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("lohan_fx.planners.checkmate.solve_graph", counted)
    workload = gpt_workload(layers=12, hidden=512, batch=8)
    limit = budget(device=int(0.25 * whole_bytes(workload)))
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


def test_same_input_same_plan() -> None:
    workload = mlp_workload()
    one, two = (make_plan(Checkmate(), workload, HW, budget(device=40_000)) for _ in range(2))
    assert one.fingerprint == two.fingerprint


# -- pareto against the oracle --------------------------------------------------------------------


def chain(count: int, *, seed: int = 0, size: int = 20_000) -> object:
    """Blocks of two ops each, no units: a network whose activations are all there is to plan."""
    rng = random.Random(seed)
    b = Builder(f"chain-{count}")
    b.value("x", 4096, "input")
    last, tape = "x", []
    for k in range(count):
        block = f"b{k}"
        wide = size * rng.choice((1, 2, 3))
        y = b.op(f"{block}.f", [last], [(f"{block}.y", wide)], block=block, flops=3 * 10**7)
        z = b.op(f"{block}.g", [y], [(f"{block}.z", size)], block=block, flops=10**7)
        tape.append((block, last, y))
        last = z
    b.op("loss", [last], [("loss", 4)], block="head", output=True)
    d = b.op("loss.b", [last], [("d", size)], block="head", phase="backward")
    for block, source, y in reversed(tape):
        d = b.op(f"{block}.gb", [d, y], [(f"{block}.dy", size)], block=block, phase="backward", flops=2 * 10**7)
        d = b.op(f"{block}.fb", [d, source], [(f"{block}.dx", size)], block=block, phase="backward", flops=6 * 10**7)
    return b.build()


@pytest.mark.parametrize("part", [0.45, 0.6, 0.8, 1.0])
@pytest.mark.parametrize("rate", [2e9, 2e11])
def test_pareto_is_within_one_percent_of_the_oracle(part: float, rate: float) -> None:
    """Swap and recompute. The oracle's stages wait for their own copies only, and a copy must fit
    into one stage; the simulated step of `pareto` is at most 1% above its optimum."""
    workload = chain(4)
    hw = small_hardware(ssd=False, h2d_bytes_per_s=rate, d2h_bytes_per_s=rate, duplex_bytes_per_s=2 * rate)
    static = workload.values["x"].num_bytes
    graph = graph_of(workload, static_bytes=static)
    kept = schedule_peak(graph, solve_graph(graph, 2**30, None, EXACT).schedule)
    limit = max(int(part * kept), graph.working_bytes)
    try:
        best = solve_graph(graph, limit, Links.of(hw), Limits(time_s=30.0, gap=1e-3))
    except InsufficientMemoryError:
        with pytest.raises(InsufficientMemoryError):
            Pareto().solve(workload, hw, budget(device=limit, ssd=0))
        return
    _, report = Pareto().solve(workload, hw, budget(device=limit, ssd=0))
    assert report.step_s <= best.seconds * 1.01


@pytest.mark.parametrize("part", [0.5, 0.65, 0.8, 1.0])
def test_pareto_is_within_one_percent_of_rematerialisation(part: float) -> None:
    """No tier but the device: keep or recompute, forward ops once more at most."""
    workload = chain(4, seed=1)
    hw = small_hardware(ssd=False)
    static = workload.values["x"].num_bytes
    graph = graph_of(workload, static_bytes=static)
    kept = schedule_peak(graph, solve_graph(graph, 2**30, None, EXACT).schedule)
    limit = max(int(part * kept), graph.working_bytes)
    only = MemoryBudget(device_bytes=limit, host_bytes=0, ssd_bytes=0)
    try:
        best = solve_graph(graph, limit, None, Limits(time_s=30.0, gap=1e-3))
    except InsufficientMemoryError:
        return
    try:
        _, report = Pareto().solve(workload, hw, only)
    except InsufficientMemoryError:
        pytest.fail(f"the oracle fits {limit} B, pareto does not")
    assert report.step_s <= best.seconds * 1.01


@pytest.mark.slow
def test_a_large_model_is_solved_block_by_block() -> None:
    workload = deep_workload(24, 20, repeated=True)
    hw = HardwareProfile.preset("rtx4090-12xp5510")
    limit = MemoryBudget.from_request(hw)
    plan = make_plan(Checkmate(), workload, hw, limit)
    check(workload, plan, limit)
    rival = make_plan("recompute-all", workload, hw, limit)
    assert step_seconds(workload, plan, hw) <= step_seconds(workload, rival, hw)
