"""The MILPs: as good as brute force, below every plan, and honest about what was not proved."""

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
from lohan_fx.plan import Action
from lohan_fx.planners import Choices, PlannerOptions, finish, make_plan
from lohan_fx.planners.milp import Limits, Milp, SolverError, available_solvers, pick_solver
from lohan_fx.planners.oracle import round_graph, solve_graph
from lohan_fx.planners.oracle_graph import Graph, Node, graph_of
from lohan_fx.planners.oracle_schedule import Links, Schedule, schedule_peak, schedule_seconds
from lohan_fx.planners.pareto import Pareto
from lohan_fx.planners.step_oracle import least_device_bytes, step_bound
from lohan_fx.program import regions_of
from lohan_fx.simulate import step_seconds
from lohan_fx.workload import Workload
from tests.test_pareto import machine, tiny_workload
from tests.workloads import Builder, budget, gpt_workload, random_workload, small_hardware

pulp = pytest.importorskip("pulp")
SOLVERS = available_solvers()
HW = small_hardware()
EXACT = Limits(time_s=60.0, gap=1e-6)
RESIDENT = PlannerOptions(states="device", schedule="optimized")
FAST = (
    "capuchin",
    "chen-sqrt",
    "fuyou",
    "lohan",
    "lohan-paper",
    "random",
    "recompute-all",
    "swap-all",
    "zero-offload",
)
"""Strategies that the bound is held against."""


def chain_graph(sizes: list[int], seconds: list[float]) -> Graph:
    """Forward nodes one after another; then backward nodes, each reading one of them, in turn."""
    nodes = []
    for k, (size, time) in enumerate(zip(sizes, seconds, strict=True)):
        reads = (k - 1,) if k else ()
        nodes.append(Node(name=f"f{k}", seconds=time, num_bytes=size, reads=reads))
    count = len(sizes)
    for k in reversed(range(count)):
        reads = (k, len(nodes) - 1) if len(nodes) > count else (k,)
        node = Node(name=f"b{k}", seconds=1.0, num_bytes=1, reads=reads, recomputable=False)
        nodes.append(node)
    return Graph(nodes=tuple(nodes), turn=count)


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
    return range(graph.working_bytes, max(total, graph.working_bytes) + 1, 3)


# -- Checkmate's program --------------------------------------------------------------------------


def test_by_hand() -> None:
    """f0 (3 s) and f1 (5 s) make 10 B each, b1 and b0 (1 s) 1 B; b1 has 21 B about it if f0 stays.

    Without it f0 runs again before b0, or comes back while it runs.
    """
    graph = chain_graph([10, 10], [3.0, 5.0])
    for solver in SOLVERS:
        limits = replace(EXACT, solver=solver)

        def seconds(limit: int, rate: float = 0.0, limits: Limits = limits) -> float:
            links = Links(h2d=rate, d2h=100.0, duplex=200.0) if rate else None
            return solve_graph(graph, limit, links, limits).seconds

        assert seconds(21) == pytest.approx(10)
        assert seconds(20) == pytest.approx(13)
        assert seconds(20, rate=5.0) == pytest.approx(11)  # 2 s beside 1 s of b0
        assert seconds(20, rate=2.0) == pytest.approx(13)  # 5 s against 3 s + 1 s
        with pytest.raises(InsufficientMemoryError):
            seconds(19)


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
    graph = graph_of(gpt_workload(layers=1))
    limit = graph.working_bytes + sum(n.num_bytes for n in graph.nodes[: graph.turn]) // 4
    links = Links.of(HW)
    for solver in SOLVERS:
        for seconds in (0.01, 0.5):
            limits = Limits(solver=solver, time_s=seconds, gap=1e-6)
            try:
                found = solve_graph(graph, limit, links, limits)
            except SolverError as error:
                assert "found no schedule" in str(error)
                assert f"{seconds:g} s" in str(error)
                continue
            assert schedule_peak(graph, found.schedule) <= limit
            assert found.bound_s <= found.seconds
            assert found.status == ("optimal" if found.gap <= 1e-5 else "feasible")


def test_a_solver_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise pulp.PulpError("cannot write")

    monkeypatch.setattr(pulp.LpProblem, "solve", broken)
    for solver in SOLVERS:
        with pytest.raises(SolverError, match=f"{solver} failed .*cannot write.*'pareto'"):
            solve_graph(random_graph(1, 4), 1000, None, Limits(solver=solver))


def test_a_solver_that_is_not_there() -> None:
    with pytest.raises(SolverError, match="no MILP solver is named 'gurobi'"):
        pick_solver("gurobi")
    assert pick_solver("auto") == SOLVERS[0]


def test_constraints_without_variables() -> None:
    for solver in SOLVERS:
        program = Milp("none")
        x = program.number("x")
        program.add(x >= 2)
        program.add(program.sum([]) <= 1)
        program.add(True)
        program.minimise([x])
        assert program.solve(solver, EXACT).value == pytest.approx(2)
        program.add(program.sum([]) >= 1)
        assert program.solve(solver, EXACT).status == "infeasible"


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


# -- the least time of a step --------------------------------------------------------------------


def chain(count: int, *, seed: int = 0, size: int = 20_000) -> Workload:
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
        d = b.op(
            f"{block}.gb",
            [d, y],
            [(f"{block}.dy", size)],
            block=block,
            phase="backward",
            flops=2 * 10**7,
        )
        d = b.op(
            f"{block}.fb",
            [d, source],
            [(f"{block}.dx", size)],
            block=block,
            phase="backward",
            flops=6 * 10**7,
        )
    return b.build()


def two_layers() -> Workload:
    """`test_by_hand` in MB and seconds."""
    b = Builder("two")
    b.value("x", 4096, "input")
    b.op("f0", ["x"], [("y0", 10**7)], block="b0", flops=3 * 10**14)
    b.op("f1", ["y0"], [("y1", 10**7)], block="b1", flops=5 * 10**14)
    b.op("loss", ["y1"], [("loss", 4)], block="b1", output=True)
    b.op("f1.b", ["y1"], [("d1", 10**6)], block="b1", phase="backward", flops=10**14)
    b.op("f0.b", ["y0", "d1"], [("d0", 10**6)], block="b0", phase="backward", flops=10**14)
    return b.build()


@pytest.mark.parametrize(
    ("megabytes", "rate", "seconds", "what"),
    [
        (21.5, 5e6, 10, "keep"),
        (20.5, 5e6, 12, "swap"),  # sent beside f1; it comes back while f0.b waits, for 2 s
        (20.5, 2e6, 13, "recompute"),
        (20.5, 0.0, 13, "recompute"),
        (20.5, 10.5e6, 10 + 10 / 10.5, "swap"),
    ],
)
def test_a_step_by_hand(megabytes: float, rate: float, seconds: float, what: Action) -> None:
    workload = two_layers()
    rates = {"h2d_bytes_per_s": rate, "d2h_bytes_per_s": 5e6, "duplex_bytes_per_s": 1e8}
    hw = small_hardware(ssd=False, **(rates if rate else {}))
    limit = budget(device=int(megabytes * 1e6), host=2**30 if rate else 0, ssd=0)
    for solver in SOLVERS:
        found = step_bound(workload, hw, limit, replace(EXACT, solver=solver))
        assert found.status == "optimal"
        assert found.bound_s == pytest.approx(seconds, rel=1e-4)
        choices = found.choices(workload)
        assert choices.actions["y0"] == what
        plan = finish(workload, hw, limit, RESIDENT, choices, "oracle")
        assert step_seconds(workload, plan, hw) == pytest.approx(found.bound_s, rel=1e-6)


def test_ssds_are_slower_than_host_memory() -> None:
    """y0 is written for 2 s, beside f1, and read for 4 s, two of them beside nothing."""
    hw = small_hardware(ssd_read_bytes_per_s=2.5e6, ssd_write_bytes_per_s=5e6)
    hw = replace(hw, h2d_bytes_per_s=5e6, d2h_bytes_per_s=5e6, duplex_bytes_per_s=1e8)
    at = {
        name: step_bound(two_layers(), hw, limit, EXACT).bound_s
        for name, limit in (
            ("host", budget(device=20_500_000)),
            ("half", budget(device=20_500_000, host=5_000_000)),
            ("ssd", budget(device=20_500_000, host=0)),
            ("none", budget(device=20_500_000, host=0, ssd=0)),
        )
    }
    assert at["host"] == pytest.approx(12, rel=1e-4)
    assert at["host"] <= at["half"] <= at["ssd"] <= at["none"]
    assert at["none"] == pytest.approx(13, rel=1e-4)


def below_no_strategy(workload: Workload, hw: HardwareProfile, part: float) -> None:
    """Neither in time nor in memory."""
    room = budget(ssd=2**30 if hw.ssds else 0)
    most = make_plan("keep-all", workload, hw, room, RESIDENT).prediction.peak_device_bytes
    limit = replace(room, device_bytes=int(part * most))
    try:
        bound_s = step_bound(workload, hw, limit, EXACT).bound_s
    except InsufficientMemoryError as error:
        assert error.need_bytes > limit.device_bytes
        bound_s = math.inf
    low, high = least_device_bytes(workload, hw, room, EXACT)
    assert low <= high
    for strategy in FAST:
        try:
            plan = make_plan(strategy, workload, hw, limit, RESIDENT)
        except (InsufficientMemoryError, PlanError):
            continue
        assert step_seconds(workload, plan, hw) >= bound_s * (1 - 1e-9), strategy
        assert plan.prediction.peak_device_bytes >= low, strategy


@pytest.mark.parametrize("seed", range(8))
def test_no_plan_is_below_the_bound(seed: int) -> None:
    workload = tiny_workload(seed) if seed % 2 else random_workload(seed, 2, 3)
    below_no_strategy(workload, machine(seed), (0.95, 0.9, 0.8)[seed % 3])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8, 80))
def test_no_plan_is_below_the_bound_at_length(seed: int) -> None:
    workload = tiny_workload(seed) if seed % 2 else random_workload(seed, 2, 4)
    for part in (0.95, 0.85, 0.7):
        below_no_strategy(workload, machine(seed), part)


def best_recomputation(workload: Workload, limit: MemoryBudget) -> float:
    """Every choice of what to keep, every partition of the rest into regions."""
    residuals, best = workload.residuals, math.inf
    for picked in itertools.product((False, True), repeat=len(residuals)):
        again = [v for v, x in zip(residuals, picked, strict=True) if x]
        for parts in itertools.product(range(len(again)), repeat=len(again)):
            if any(p > max((-1, *parts[:k])) + 1 for k, p in enumerate(parts)):
                continue  # the same partition by other names
            actions: dict[str, Action] = dict.fromkeys(residuals, "keep")
            actions.update(dict.fromkeys(again, "recompute"))
            regions = {v: f"r{p}" for v, p in zip(again, parts, strict=True)}
            choices = Choices(actions=actions, unit_tiers={}, regions=regions)
            try:
                plan = finish(workload, HW, limit, RESIDENT, choices, "every")
            except InsufficientMemoryError:
                continue
            best = min(best, step_seconds(workload, plan, HW))
    return best


@pytest.mark.parametrize("part", [0.65, pytest.param(0.8, marks=pytest.mark.slow)])
def test_the_bound_is_the_best_recomputation(part: float) -> None:
    workload = chain(3, seed=1)
    most = make_plan("keep-all", workload, HW, budget()).prediction.peak_device_bytes
    limit = MemoryBudget(device_bytes=int(part * most), host_bytes=0, ssd_bytes=0)
    found = step_bound(workload, HW, limit, EXACT)
    assert found.bound_s == pytest.approx(best_recomputation(workload, limit), rel=1e-6)


@pytest.mark.parametrize(
    ("seed", "part"),
    [
        *((0, 0.45), (0, 0.8), (1, 0.65)),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in ((0, 0.6), (0, 1.0), (1, 0.45))),
        pytest.param(2, 0.45, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("rate", [0.0, 2e9, 2e11])
def test_pareto_is_within_one_percent_of_the_oracle(seed: int, part: float, rate: float) -> None:
    workload = chain(4, seed=seed)
    rates = dict.fromkeys(("h2d_bytes_per_s", "d2h_bytes_per_s"), rate)
    hw = small_hardware(ssd=False, **(rates if rate else {}))
    most = make_plan("keep-all", workload, hw, budget()).prediction.peak_device_bytes
    limit = budget(device=int(part * most), host=2**30 if rate else 0, ssd=0)
    try:
        found = step_bound(workload, hw, limit, Limits(time_s=30.0, gap=1e-3))
    except InsufficientMemoryError:
        with pytest.raises(InsufficientMemoryError):
            Pareto().solve(workload, hw, limit)
        return
    _, report = Pareto().solve(workload, hw, limit)
    assert found.bound_s * (1 - 1e-6) <= report.step_s <= found.bound_s * 1.01


def test_a_region_may_pay_across_blocks() -> None:
    """What two blocks need is made once, before the one that needs it first: `pareto` does it."""
    workload = chain(4, seed=1)
    most = make_plan("keep-all", workload, HW, budget()).prediction.peak_device_bytes
    limit = MemoryBudget(device_bytes=int(0.65 * most), host_bytes=0, ssd_bytes=0)
    found = step_bound(workload, HW, limit, EXACT)
    choices = found.choices(workload)
    shared: dict[str, set[str]] = {}
    for v, region in (choices.regions or {}).items():
        shared.setdefault(region, set()).add(workload.values[v].block)
    assert max(len(blocks) for blocks in shared.values()) == 2
    plan = finish(workload, HW, limit, RESIDENT, choices, "oracle")
    assert step_seconds(workload, plan, HW) == pytest.approx(found.bound_s, rel=1e-6)
    plan, report = Pareto().solve(workload, HW, limit)
    assert report.source == "pareto"
    assert report.step_s == pytest.approx(found.bound_s, rel=1e-6)
    blocks = [{workload.values[v].block for v in r.wanted} for r in regions_of(workload, plan)]
    assert max(len(names) for names in blocks) == 2


def test_a_step_that_cannot_fit() -> None:
    workload = gpt_workload(layers=1)
    for device in (1000, 600_000):
        with pytest.raises(InsufficientMemoryError, match="infeasible") as caught:
            step_bound(workload, HW, budget(device=device), Limits(time_s=20.0))
        assert caught.value.need_bytes > device
    with pytest.raises(SolverError, match="no MILP solver is named 'scip'"):
        step_bound(workload, HW, budget(), Limits(solver="scip"))


def test_an_early_stop_still_has_a_bound() -> None:
    workload = gpt_workload(layers=2, hidden=256)
    most = make_plan("keep-all", workload, HW, budget(), RESIDENT).prediction.peak_device_bytes
    limit = budget(device=int(0.99 * most), ssd=0)
    try:
        found = step_bound(workload, HW, limit, Limits(time_s=1.0))
    except SolverError as error:
        assert "proved nothing" in str(error)
        return
    assert found.bound_s <= found.seconds
    if found.gap > 1e-3:
        assert found.status in ("feasible", "unknown")
