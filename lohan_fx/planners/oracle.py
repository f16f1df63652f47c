"""The Checkmate program (Jain et al., MLSys 2020) as a MILP, and its extension by swapping.

Stage t computes node t for the first time; before that it may run earlier nodes again. Binary
R[t,i]: node i runs in stage t; S[t,i]: its result is on the device when stage t begins;
FREE[t,(i,k)]: it dies right after node k has run in stage t. U[t,k]: device bytes when node k runs.

    R[t,t] = 1, R[t,i>t] = 0, S[t,i≥t] = 0,  minimise Σ c_i·R[t,i]
    R[t,v] ≤ R[t,u] + S[t,u]  for v reads u,   S[t+1,i] ≤ S[t,i] + R[t,i]
    FREE[t,(i,k)] ≤ R[t,k],  ≤ 1 − S[t+1,i],  ≤ 1 − R[t,j] for every later user j of i
    U[t,0] = R[t,0]·m_0 + Σ S[t,i]·m_i
    U[t,k+1] = U[t,k] + R[t,k+1]·m_{k+1} − Σ m_i·FREE[t,(i,k)] ≤ budget

The conjunction in the paper's FREE is written as one inequality for each factor, which makes the
relaxation much tighter. The extension (planners.md): O[t,i] is the part of a result that is sent
in stage t, binary P[t,i] fetches it, each for host memory and SSD; a stage lasts as long as its
busiest lane:

    minimise Σ Time[t],  Time[t] ≥ Σ c·R,  B_d2h·Time[t] ≥ Σ m·O,  B_h2d·Time[t] ≥ Σ m·P,
    Time[t] ≥ Σ m·O_ssd / B_write + Σ m·P_ssd / B_read      (SSDs are simplex)
    P[t,i] ≤ Σ_{s<t} O[s,i],  P + S + R ≤ 1,  O[t,i] ≤ S + R + P,  S[t+1,i] ≤ S + R + P

A fetch therefore fits into one stage, which is more than the runtime asks for. Results are
reported as the solver proved them: PuLP's `status` says "Optimal" after a time-out, so `sol_status`
and the solver's own bound count. No torch; PuLP is imported when it is needed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lohan_fx.errors import InsufficientMemoryError, PlanError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.planners.oracle_graph import Graph

Solver = Literal["auto", "highs", "cbc"]
Place = Literal["host", "ssd"]

_BYTES = 1000.0
"""The device budget in the program's own unit of memory: coefficients near 1."""


class SolverError(PlanError):
    """A MILP solver is not there, or ended without a solution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Bytes per second. An SSD rate of 0.0: there are no SSDs. Host and SSD capacities in bytes."""

    h2d: float
    d2h: float
    duplex: float
    ssd_read: float = 0.0
    ssd_write: float = 0.0
    host_bytes: float = math.inf
    ssd_bytes: float = math.inf

    @classmethod
    def of(cls, hw: HardwareProfile, host_bytes: float = math.inf, ssd_bytes: float = 0.0) -> Links:
        """The rates of a profile; no SSD tier unless there are bytes for it."""
        ssd = bool(hw.ssds) and ssd_bytes > 0
        return cls(
            h2d=hw.h2d_bytes_per_s,
            d2h=hw.d2h_bytes_per_s,
            duplex=hw.duplex_bytes_per_s,
            ssd_read=hw.ssd_read_bytes_per_s if ssd else 0.0,
            ssd_write=hw.ssd_write_bytes_per_s if ssd else 0.0,
            host_bytes=host_bytes,
            ssd_bytes=ssd_bytes,
        )

    @property
    def places(self) -> tuple[Place, ...]:
        found: list[Place] = ["host"] if self.host_bytes > 0 else []
        return (*found, "ssd") if self.ssd_read > 0 and self.ssd_bytes > 0 else tuple(found)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a solver stops.

    Attributes:
        solver: "auto" is HiGHS if `highspy` is installed, else CBC.
        time_s: wall-clock seconds.
        gap: relative gap at which a solution counts as optimal.
    """

    solver: str = "auto"
    time_s: float = 60.0
    gap: float = 1e-4


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A schedule of a graph. `runs[t]`, `kept[t]`: nodes that run in, are there before stage t.

    `sent[place][t]` has (node, fraction); `fetched[place][t]` nodes.
    """

    runs: tuple[frozenset[int], ...]
    kept: tuple[frozenset[int], ...]
    sent: Mapping[Place, tuple[Mapping[int, float], ...]] = field(default_factory=dict)
    fetched: Mapping[Place, tuple[frozenset[int], ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class OracleResult:
    """What a solver proved.

    Attributes:
        status: "optimal" within the gap that was asked for; "feasible" if the solver stopped
            early; "rounded" if the schedule comes from the linear relaxation.
        seconds: of the schedule: device time, or with swapping the sum of the stages' times.
        bound_s: no schedule takes less, as far as the solver got.
        solver: which one ran.
    """

    status: Literal["optimal", "feasible", "rounded"]
    seconds: float
    bound_s: float
    schedule: Schedule
    solver: str

    @property
    def gap(self) -> float:
        """Seconds / bound_s − 1."""
        return self.seconds / self.bound_s - 1 if self.bound_s > 0 else math.inf


def available_solvers() -> tuple[str, ...]:
    """Those that `Limits.solver` may name here, best first."""
    if importlib.util.find_spec("pulp") is None:
        return ()
    found = ["highs"] if importlib.util.find_spec("highspy") is not None else []
    import pulp

    return (*found, "cbc") if pulp.PULP_CBC_CMD(msg=False).available() else tuple(found)


def pick_solver(name: str) -> str:
    """The solver that a name stands for.

    Raises:
        SolverError: it is not there; the message says what to install.
    """
    there = available_solvers()
    wanted = there[0] if name == "auto" and there else name
    if wanted in there:
        return wanted
    have = f"available: {', '.join(there)}" if there else "no solver is available"
    if name not in ("auto", "highs", "cbc"):
        raise SolverError(f"no MILP solver is named {name!r}: use auto, highs or cbc ({have})")
    raise SolverError(
        f"the MILP solver {name!r} is not installed ({have}): pip install pulp for CBC, "
        "pip install pulp highspy for HiGHS, or use a strategy that needs no solver, such as "
        "'pareto'"
    )


def solve_graph(
    graph: Graph,
    budget_bytes: int,
    links: Links | None = None,
    limits: Limits | None = None,
    *,
    kept_bytes: int | None = None,
) -> OracleResult:
    """The best schedule of a graph: rematerialisation only, or with swapping if `links` is given.

    Args:
        budget_bytes: device memory, `graph.static_bytes` included.
        kept_bytes: at most so many bytes may be on the device between forward and backward.

    Raises:
        InsufficientMemoryError: the solver proved that no schedule fits.
        SolverError: the solver is not there, or the time was up before it found anything.
    """
    limits = limits or Limits()
    solver = pick_solver(limits.solver)
    if graph.working_bytes > budget_bytes:
        raise _infeasible(graph, budget_bytes)
    program = _Program(graph, budget_bytes, links, kept_bytes)
    outcome = program.solve(solver, limits)
    if outcome.infeasible:
        raise _infeasible(graph, budget_bytes)
    if outcome.schedule is None:
        raise SolverError(
            f"{solver} found no schedule of {len(graph)} stages in {limits.time_s:g} s"
            + (f" (lower bound {outcome.bound_s:.6g} s)" if math.isfinite(outcome.bound_s) else "")
            + ": allow more time, merge stages (max_nodes), or use strategy 'pareto'"
        )
    seconds = schedule_seconds(graph, outcome.schedule, links)
    return OracleResult(
        status="optimal" if outcome.optimal else "feasible",
        seconds=seconds,
        bound_s=min(outcome.bound_s, seconds),
        schedule=outcome.schedule,
        solver=solver,
    )


def round_graph(graph: Graph, budget_bytes: int, limits: Limits | None = None) -> OracleResult:
    """Two-phase LP rounding (Checkmate §5): for graphs too large for the MILP; no swapping.

    The relaxation is solved at 0.9 times the budget; S is cut at several thresholds, R follows
    from S; the cheapest schedule that fits the whole budget is taken.

    Raises:
        InsufficientMemoryError: the relaxation is infeasible at the budget itself.
        SolverError: the solver is not there, was too slow, or no threshold gave a schedule.
    """
    limits = limits or Limits()
    solver = pick_solver(limits.solver)
    if graph.working_bytes > budget_bytes:
        raise _infeasible(graph, budget_bytes)
    exact = _Program(graph, budget_bytes, None, None, relaxed=True).solve(solver, limits)
    if exact.infeasible:
        raise _infeasible(graph, budget_bytes)
    held = graph.static_bytes + int(0.9 * (budget_bytes - graph.static_bytes))
    tight = _Program(graph, held, None, None, relaxed=True).solve(solver, limits)
    parts = exact.fractions if tight.infeasible or tight.fractions is None else tight.fractions
    best: tuple[float, Schedule] | None = None
    for step in range(20):
        schedule = _rounded(graph, parts or {}, step / 20)
        if schedule_peak(graph, schedule) <= budget_bytes:
            seconds = schedule_seconds(graph, schedule, None)
            if best is None or seconds < best[0]:
                best = (seconds, schedule)
    if best is None:
        raise SolverError(
            f"LP rounding found no schedule of {len(graph)} stages that fits; the relaxation "
            f"says at least {exact.bound_s:.6g} s: use strategy 'pareto'"
        )
    return OracleResult(
        status="rounded", seconds=best[0], bound_s=exact.bound_s, schedule=best[1], solver=solver
    )


def _infeasible(graph: Graph, budget_bytes: int) -> InsufficientMemoryError:
    need = max(graph.working_bytes, budget_bytes + 1)
    largest = max(range(len(graph)), key=lambda k: _working(graph, k), default=0)
    node = graph.nodes[largest] if graph.nodes else None
    at_peak = [("static", graph.static_bytes)]
    if node is not None:
        at_peak += [(node.name, node.num_bytes + node.scratch_bytes)]
        at_peak += [(graph.nodes[i].name, graph.nodes[i].num_bytes) for i in node.reads]
    return InsufficientMemoryError(
        "device",
        need,
        budget_bytes,
        where=f"{node.name if node else 'start'}, the Checkmate program is infeasible",
        at_peak=sorted(at_peak, key=lambda item: (-item[1], item[0])),
        advice="Every schedule needs more than the budget: at least what is named here.",
    )


def _working(graph: Graph, k: int) -> int:
    node = graph.nodes[k]
    return node.num_bytes + node.scratch_bytes + sum(graph.nodes[i].num_bytes for i in node.reads)


# -- schedules, checked apart from the program ------------------------------------------------


def schedule_peak(graph: Graph, schedule: Schedule) -> int:
    """Device bytes of a schedule at its fullest moment, by walking it.

    Raises:
        PlanError: a node runs without what it reads, or something is kept that is not there.
    """
    last = len(graph) - 1
    peak = graph.static_bytes
    for t in range(len(graph)):
        alive = set(schedule.kept[t])
        if t and not alive <= _there(schedule, t - 1):
            raise PlanError(f"stage {t} keeps results that stage {t - 1} did not have")
        for stages in schedule.fetched.values():
            alive |= stages[t]
        needed = schedule.kept[t + 1] if t < last else frozenset()
        for k in sorted(schedule.runs[t]):
            node = graph.nodes[k]
            if not set(node.reads) <= alive:
                raise PlanError(f"node {node.name} runs in stage {t} without what it reads")
            alive.add(k)
            held = graph.static_bytes + sum(graph.nodes[i].num_bytes for i in alive)
            peak = max(peak, held + node.scratch_bytes)
            for i in (*node.reads, k):
                later = any(j > k and j in schedule.runs[t] for j in graph.users[i])
                if not later and i not in needed and not graph.nodes[i].pinned:
                    alive.discard(i)
    return peak


def _there(schedule: Schedule, t: int) -> set[int]:
    found = set(schedule.kept[t]) | set(schedule.runs[t])
    for stages in schedule.fetched.values():
        found |= stages[t]
    return found


def schedule_seconds(graph: Graph, schedule: Schedule, links: Links | None) -> float:
    """Σ c·R, or with swapping Σ Time[t]."""
    total = 0.0
    for t in range(len(graph)):
        busy = [sum(graph.nodes[i].seconds for i in sorted(schedule.runs[t]))]
        if links is not None:
            out = dict.fromkeys(links.places, 0.0)
            back = dict.fromkeys(links.places, 0.0)
            for place, stages in schedule.sent.items():
                out[place] = sum(graph.nodes[i].num_bytes * part for i, part in stages[t].items())
            for place, fetched in schedule.fetched.items():
                back[place] = sum(graph.nodes[i].num_bytes for i in sorted(fetched[t]))
            busy.append(sum(out.values()) / links.d2h)
            busy.append(sum(back.values()) / links.h2d)
            busy.append((sum(out.values()) + sum(back.values())) / links.duplex)
            if "ssd" in links.places:
                busy.append(out["ssd"] / links.ssd_write + back["ssd"] / links.ssd_read)
        total += max(busy)
    return total


def _rounded(graph: Graph, parts: Mapping[tuple[int, int], float], threshold: float) -> Schedule:
    """S by threshold; R is what each stage must run then; last, S only of what is used."""
    runs: list[frozenset[int]] = []
    kept: list[set[int]] = []
    there: set[int] = set()
    for t in range(len(graph)):
        keep = {i for i in there if parts.get((t, i), 0.0) >= threshold or graph.nodes[i].pinned}
        keep |= {i for i in there if not graph.nodes[i].recomputable}
        run: set[int] = set()
        stack = [t]
        while stack:
            i = stack.pop()
            if i not in run and i not in keep:
                run.add(i)
                stack.extend(graph.nodes[i].reads)
        runs.append(frozenset(run))
        kept.append(keep)
        there = keep | run
    needed: set[int] = set()
    for t in reversed(range(len(graph))):
        read = {i for k in runs[t] for i in graph.nodes[k].reads}
        kept[t] = {i for i in kept[t] if i in read or i in needed or graph.nodes[i].pinned}
        needed = kept[t]
    return Schedule(runs=tuple(runs), kept=tuple(frozenset(k) for k in kept))


# -- the program ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """`fractions` are the values of S of a relaxed program."""

    infeasible: bool = False
    optimal: bool = False
    bound_s: float = -math.inf
    schedule: Schedule | None = None
    fractions: Mapping[tuple[int, int], float] | None = None


class _Program:
    """Builds the program in PuLP, solves it, reads the schedule back."""

    def __init__(
        self,
        graph: Graph,
        budget_bytes: int,
        links: Links | None,
        kept_bytes: int | None,
        *,
        relaxed: bool = False,
    ) -> None:
        import pulp

        self.lp: Any = pulp
        self.graph = graph
        self.links = links
        self.relaxed = relaxed
        self.places: tuple[Place, ...] = links.places if links is not None else ()
        self.unit_bytes = max(1.0, budget_bytes / _BYTES)
        self.unit_s = graph.seconds / len(graph) if graph.seconds > 0 else 1.0
        self.budget = budget_bytes / self.unit_bytes
        self.size = [node.num_bytes / self.unit_bytes for node in graph.nodes]
        self.seconds = [node.seconds / self.unit_s for node in graph.nodes]
        self.problem: Any = pulp.LpProblem("checkmate", pulp.LpMinimize)
        self.R: dict[tuple[int, int], Any] = {}
        self.S: dict[tuple[int, int], Any] = {}
        self.O: dict[tuple[Place, int, int], Any] = {}
        self.P: dict[tuple[Place, int, int], Any] = {}
        self._variables()
        self._dependencies()
        self._memory()
        if self.places:
            self._transfers()
        if kept_bytes is not None:
            self._between(kept_bytes)
        self._objective()

    def _binary(self, name: str) -> Any:
        kind = self.lp.LpContinuous if self.relaxed else self.lp.LpBinary
        return self.lp.LpVariable(name, 0, 1, cat=kind)

    def _variables(self) -> None:
        for t in range(len(self.graph)):
            for i in range(t + 1):
                node = self.graph.nodes[i]
                if i == t:
                    self.R[t, i] = 1
                elif self.graph.last_need[i] >= t:
                    if node.recomputable:
                        self.R[t, i] = self._binary(f"R_{t}_{i}")
                    self.S[t, i] = 1 if node.pinned else self._binary(f"S_{t}_{i}")
                    if node.swappable and node.num_bytes and not node.pinned:
                        for place in self.places:
                            self.P[place, t, i] = self._binary(f"P_{place}_{t}_{i}")
            for i in range(t + 1):
                node = self.graph.nodes[i]
                worth = self.graph.last_need[i] > t and node.swappable and not node.pinned
                if worth and node.num_bytes:
                    for place in self.places:
                        name = f"O_{place}_{t}_{i}"
                        self.O[place, t, i] = self.lp.LpVariable(name, 0, 1)

    def run(self, t: int, i: int) -> Any:
        return self.R.get((t, i), 0)

    def keep(self, t: int, i: int) -> Any:
        return self.S.get((t, i), 0)

    def fetch(self, t: int, i: int) -> Any:
        return sum(self.P.get((place, t, i), 0) for place in self.places)

    def _add(self, constraint: Any) -> None:
        """PuLP folds a constraint without variables to a bool."""
        if constraint is True:
            return
        if constraint is False:
            constraint = self.lp.LpConstraint(
                self.lp.LpAffineExpression(constant=1.0), self.lp.LpConstraintLE, rhs=0
            )
        self.problem += constraint

    def _dependencies(self) -> None:
        for t in range(len(self.graph)):
            for v in range(t + 1):
                if (t, v) in self.R:
                    for u in self.graph.nodes[v].reads:
                        there = self.run(t, u) + self.keep(t, u) + self.fetch(t, u)
                        self._add(self.run(t, v) <= there)
            for i in range(t):
                if (t, i) in self.S:
                    before = t - 1
                    there = self.run(before, i) + self.keep(before, i) + self.fetch(before, i)
                    self._add(self.keep(t, i) <= there)

    def _memory(self) -> None:
        """U[t,k] by its recurrence; FREE as one variable for each (i, k)."""
        lp, graph = self.lp, self.graph
        static = graph.static_bytes / self.unit_bytes
        for t in range(len(graph)):
            now: Any = static + lp.lpSum(
                self.size[i] * (self.keep(t, i) + self.fetch(t, i)) for i in range(t)
            )
            for k in range(t + 1):
                if (t, k) not in self.R:
                    continue
                now = now + self.size[k] * self.run(t, k)
                use = lp.LpVariable(f"U_{t}_{k}", 0, self.budget)
                self._add(use == now)
                scratch = graph.nodes[k].scratch_bytes / self.unit_bytes
                if scratch:
                    self._add(use + scratch * self.run(t, k) <= self.budget)
                freed = [
                    self.size[i] * self._free(t, i, k)
                    for i in (*graph.nodes[k].reads, k)
                    if self.size[i] and not graph.nodes[i].pinned
                ]
                now = use - lp.lpSum(freed)

    def _free(self, t: int, i: int, k: int) -> Any:
        free = self.lp.LpVariable(f"F_{t}_{i}_{k}", 0, 1)
        self._add(free <= self.run(t, k))
        if t + 1 < len(self.graph):
            self._add(free <= 1 - self.keep(t + 1, i))
        for j in self.graph.users[i]:
            if k < j <= t and (t, j) in self.R:
                self._add(free <= 1 - self.run(t, j))
        return free

    def _transfers(self) -> None:
        assert self.links is not None
        last = len(self.graph)
        for (_, t, i), sent in self.O.items():
            self._add(sent <= self.run(t, i) + self.keep(t, i) + self.fetch(t, i))
        for (place, t, i), fetched in self.P.items():
            sent = self.lp.lpSum(self.O.get((place, s, i), 0) for s in range(i, t))
            self._add(fetched <= sent)
        for t in range(last):
            for i in range(t):
                if self.places and any((p, t, i) in self.P for p in self.places):
                    self._add(self.fetch(t, i) + self.keep(t, i) + self.run(t, i) <= 1)
        room = {"host": self.links.host_bytes, "ssd": self.links.ssd_bytes}
        for place in self.places:
            sent = [self.size[i] * o for (p, _, i), o in self.O.items() if p == place]
            if math.isfinite(room[place]):
                self._add(self.lp.lpSum(sent) <= room[place] / self.unit_bytes)

    def _between(self, kept_bytes: int) -> None:
        t = self.graph.turn
        if t < len(self.graph):
            kept = self.lp.lpSum(self.size[i] * self.keep(t, i) for i in range(t))
            self._add(kept <= kept_bytes / self.unit_bytes)

    def _objective(self) -> None:
        lp = self.lp
        self.constant = 0.0  # solvers report their bound without it
        if not self.places or self.links is None:
            self.constant = sum(self.seconds)
            self.problem += lp.lpSum(self.seconds[i] * r for (t, i), r in self.R.items() if i < t)
            return
        times = [lp.LpVariable(f"T_{t}", 0) for t in range(len(self.graph))]
        self.problem += lp.lpSum(times)
        scale = self.unit_bytes / self.unit_s
        for t, time in enumerate(times):
            self._add(time >= lp.lpSum(self.seconds[i] * self.run(t, i) for i in range(t + 1)))
            out = {p: self._sum(self.O, p, t) for p in self.places}
            back = {p: self._sum(self.P, p, t) for p in self.places}
            sent, fetched = lp.lpSum(out.values()), lp.lpSum(back.values())
            self._add(time >= scale / self.links.d2h * sent)
            self._add(time >= scale / self.links.h2d * fetched)
            self._add(time >= scale / self.links.duplex * (sent + fetched))
            if "ssd" in self.places:
                write, read = scale / self.links.ssd_write, scale / self.links.ssd_read
                self._add(time >= write * out["ssd"] + read * back["ssd"])

    def _sum(self, table: Mapping[tuple[Place, int, int], Any], place: Place, t: int) -> Any:
        return self.lp.lpSum(
            self.size[i] * x for (p, s, i), x in table.items() if p == place and s == t
        )

    # -- solving ----------------------------------------------------------------------------

    def solve(self, solver: str, limits: Limits) -> _Outcome:
        with tempfile.TemporaryDirectory() as folder, _silent():
            log = Path(folder) / "log"
            bound = self._run(solver, limits, log)
        lp, status = self.lp, self.problem.sol_status
        proved = self.problem.status == lp.LpStatusInfeasible
        if proved or status in (lp.LpSolutionInfeasible, lp.LpSolutionUnbounded):
            return _Outcome(infeasible=True)
        bound += self.constant
        if status not in (lp.LpSolutionOptimal, lp.LpSolutionIntegerFeasible):
            return _Outcome(bound_s=bound * self.unit_s)
        optimal = status == lp.LpSolutionOptimal
        value = float(lp.value(self.problem.objective) or 0.0) + self.constant
        if not math.isfinite(bound):
            bound = value * (1 - limits.gap) if optimal else -math.inf
        if self.relaxed:
            fractions = {key: _value(x) for key, x in self.S.items()}
            return _Outcome(optimal=optimal, bound_s=bound * self.unit_s, fractions=fractions)
        return _Outcome(optimal=optimal, bound_s=bound * self.unit_s, schedule=self._schedule())

    def _run(self, solver: str, limits: Limits, log: Path) -> float:
        """Returns the solver's own lower bound, −∞ if it has none."""
        lp = self.lp
        if solver == "highs":
            command = lp.HiGHS(
                msg=False,
                timeLimit=limits.time_s,
                gapRel=limits.gap,
                threads=1,
                random_seed=0,
            )
            self.problem.solve(command)
            info = self.problem.solverModel.getInfo()
            bound = info.objective_function_value if self.relaxed else info.mip_dual_bound
            return float(bound) if math.isfinite(bound) and abs(bound) < 1e29 else -math.inf
        command = lp.PULP_CBC_CMD(
            msg=False,
            timeLimit=max(1.0, limits.time_s),
            gapRel=limits.gap,
            threads=1,
            logPath=str(log),
        )
        self.problem.solve(command)
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        found = re.findall(r"Lower bound:\s+([-+.\deE]+)", text)
        return float(found[-1]) if found else -math.inf

    def _schedule(self) -> Schedule:
        stages = range(len(self.graph))

        def on(table: Mapping[tuple[int, int], Any]) -> tuple[frozenset[int], ...]:
            found: list[set[int]] = [set() for _ in stages]
            for (t, i), x in table.items():
                if _value(x) > 0.5:
                    found[t].add(i)
            return tuple(frozenset(s) for s in found)

        fetched = {
            p: on({(t, i): x for (q, t, i), x in self.P.items() if q == p}) for p in self.places
        }
        sent: dict[Place, tuple[Mapping[int, float], ...]] = {}
        for p in self.places:
            parts: list[dict[int, float]] = [{} for _ in stages]
            for (q, t, i), x in self.O.items():
                if q == p and _value(x) > 1e-9:
                    parts[t][i] = _value(x)
            sent[p] = tuple(parts)
        return Schedule(runs=on(self.R), kept=on(self.S), sent=sent, fetched=fetched)


def _value(x: Any) -> float:
    if isinstance(x, int | float):
        return float(x)
    return float(x.varValue or 0.0)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """HiGHS prints a banner of its own to the process's standard output; keep it out of there."""
    sys.stdout.flush()
    try:
        saved = os.dup(1)
    except OSError:  # no standard output at all
        yield
        return
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)
        os.close(sink)
