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

A fetch therefore fits into one stage, which is more than the runtime asks for, and a result that
is fetched may be read in the same stage at once, which is less; `step_oracle` has the program whose
optimum no plan undercuts. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lohan_fx.errors import InsufficientMemoryError
from lohan_fx.planners.milp import Answer, Limits, Milp, SolverError, pick_solver, value_of
from lohan_fx.planners.oracle_graph import Graph
from lohan_fx.planners.oracle_schedule import (
    Links,
    Place,
    Schedule,
    schedule_peak,
    schedule_seconds,
    trimmed,
)

_BYTES = 1000.0
"""The device budget in the program's own unit of memory: coefficients near 1."""


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
        raise infeasible(graph, budget_bytes)
    program = _Program(graph, budget_bytes, links, kept_bytes)
    answer = program.solve(solver, limits)
    if answer.status == "infeasible":
        raise infeasible(graph, budget_bytes)
    bound_s = program.bound_s(answer)
    if not answer.solved:
        raise _unsolved(solver, graph, limits, bound_s)
    schedule = trimmed(graph, program.schedule())
    seconds = schedule_seconds(graph, schedule, links)
    return OracleResult(
        status="optimal" if answer.status == "optimal" else "feasible",
        seconds=seconds,
        bound_s=min(bound_s, seconds),
        schedule=schedule,
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
        raise infeasible(graph, budget_bytes)
    exact = _Program(graph, budget_bytes, None, None, relaxed=True)
    answer = exact.solve(solver, limits)
    if answer.status == "infeasible":
        raise infeasible(graph, budget_bytes)
    bound_s = exact.bound_s(answer)
    if not answer.solved:
        raise _unsolved(solver, graph, limits, bound_s)
    held = graph.static_bytes + int(0.9 * (budget_bytes - graph.static_bytes))
    tight = _Program(graph, held, None, None, relaxed=True)
    parts = (tight if tight.solve(solver, limits).solved else exact).fractions()
    best: tuple[float, Schedule] | None = None
    for step in range(20):
        schedule = _rounded(graph, parts, step / 20)
        if schedule_peak(graph, schedule) <= budget_bytes:
            seconds = schedule_seconds(graph, schedule, None)
            if best is None or seconds < best[0]:
                best = (seconds, schedule)
    if best is None:
        raise SolverError(
            f"LP rounding found no schedule of {len(graph)} stages that fits; the relaxation "
            f"says at least {bound_s:.6g} s: use strategy 'pareto'"
        )
    return OracleResult(
        status="rounded", seconds=best[0], bound_s=bound_s, schedule=best[1], solver=solver
    )


def _unsolved(solver: str, graph: Graph, limits: Limits, bound_s: float) -> SolverError:
    bound = f" (lower bound {bound_s:.6g} s)" if math.isfinite(bound_s) else ""
    return SolverError(
        f"{solver} found no schedule of {len(graph)} stages in {limits.time_s:g} s{bound}: allow "
        "more time, merge stages (max_nodes), or use strategy 'pareto'"
    )


def infeasible(graph: Graph, budget_bytes: int) -> InsufficientMemoryError:
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


def _rounded(graph: Graph, parts: Mapping[tuple[int, int], float], threshold: float) -> Schedule:
    """S by threshold; R is what each stage must run then."""
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
    found = Schedule(runs=tuple(runs), kept=tuple(frozenset(k) for k in kept))
    return trimmed(graph, found)


# -- the program ------------------------------------------------------------------------------


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
        self.lp = Milp("checkmate", relaxed=relaxed)
        self.graph = graph
        self.links = links
        self.places: tuple[Place, ...] = links.places if links is not None else ()
        self.unit_bytes = max(1.0, budget_bytes / _BYTES)
        self.unit_s = graph.seconds / len(graph) if graph.seconds > 0 else 1.0
        self.budget = budget_bytes / self.unit_bytes
        self.size = [node.num_bytes / self.unit_bytes for node in graph.nodes]
        self.seconds = [node.seconds / self.unit_s for node in graph.nodes]
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

    def _variables(self) -> None:
        for t in range(len(self.graph)):
            for i in range(t + 1):
                node = self.graph.nodes[i]
                if i == t:
                    self.R[t, i] = 1
                elif self.graph.last_need[i] >= t:
                    if node.recomputable:
                        self.R[t, i] = self.lp.binary(f"R_{t}_{i}")
                    self.S[t, i] = 1 if node.pinned else self.lp.binary(f"S_{t}_{i}")
                    if node.swappable and node.num_bytes and not node.pinned:
                        for place in self.places:
                            self.P[place, t, i] = self.lp.binary(f"P_{place}_{t}_{i}")
            for i in range(t + 1):
                node = self.graph.nodes[i]
                worth = self.graph.last_need[i] > t and node.swappable and not node.pinned
                if worth and node.num_bytes:
                    for place in self.places:
                        name = f"O_{place}_{t}_{i}"
                        self.O[place, t, i] = self.lp.number(name, 1)

    def run(self, t: int, i: int) -> Any:
        return self.R.get((t, i), 0)

    def keep(self, t: int, i: int) -> Any:
        return self.S.get((t, i), 0)

    def fetch(self, t: int, i: int) -> Any:
        return sum(self.P.get((place, t, i), 0) for place in self.places)

    def _dependencies(self) -> None:
        for t in range(len(self.graph)):
            for v in range(t + 1):
                if (t, v) in self.R:
                    for u in self.graph.nodes[v].reads:
                        there = self.run(t, u) + self.keep(t, u) + self.fetch(t, u)
                        self.lp.add(self.run(t, v) <= there)
            for i in range(t):
                if (t, i) in self.S:
                    before = t - 1
                    there = self.run(before, i) + self.keep(before, i) + self.fetch(before, i)
                    self.lp.add(self.keep(t, i) <= there)

    def _memory(self) -> None:
        """U[t,k] by its recurrence; FREE as one variable for each (i, k)."""
        lp, graph = self.lp, self.graph
        static = graph.static_bytes / self.unit_bytes
        for t in range(len(graph)):
            now: Any = static + lp.sum(
                self.size[i] * (self.keep(t, i) + self.fetch(t, i)) for i in range(t)
            )
            for k in range(t + 1):
                if (t, k) not in self.R:
                    continue
                now = now + self.size[k] * self.run(t, k)
                scratch = graph.nodes[k].scratch_bytes / self.unit_bytes
                use = lp.number(f"U_{t}_{k}", self.budget - min(0.0, scratch))
                self.lp.add(use == now)
                if scratch:
                    self.lp.add(use + scratch * self.run(t, k) <= self.budget)
                freed = [
                    self.size[i] * self._free(t, i, k)
                    for i in (*graph.nodes[k].reads, k)
                    if self.size[i] and not graph.nodes[i].pinned
                ]
                now = use - lp.sum(freed)

    def _free(self, t: int, i: int, k: int) -> Any:
        free = self.lp.number(f"F_{t}_{i}_{k}", 1)
        self.lp.add(free <= self.run(t, k))
        if t + 1 < len(self.graph):
            self.lp.add(free <= 1 - self.keep(t + 1, i))
        for j in self.graph.users[i]:
            if k < j <= t and (t, j) in self.R:
                self.lp.add(free <= 1 - self.run(t, j))
        return free

    def _transfers(self) -> None:
        assert self.links is not None
        last = len(self.graph)
        for (_, t, i), sent in self.O.items():
            self.lp.add(sent <= self.run(t, i) + self.keep(t, i) + self.fetch(t, i))
        for (place, t, i), fetched in self.P.items():
            sent = self.lp.sum(self.O.get((place, s, i), 0) for s in range(i, t))
            self.lp.add(fetched <= sent)
        for t in range(last):
            for i in range(t):
                if self.places and any((p, t, i) in self.P for p in self.places):
                    self.lp.add(self.fetch(t, i) + self.keep(t, i) + self.run(t, i) <= 1)
        room = {"host": self.links.host_bytes, "ssd": self.links.ssd_bytes}
        for place in self.places:
            sent = [self.size[i] * o for (p, _, i), o in self.O.items() if p == place]
            if math.isfinite(room[place]):
                self.lp.add(self.lp.sum(sent) <= room[place] / self.unit_bytes)

    def _between(self, kept_bytes: int) -> None:
        t = self.graph.turn
        if t < len(self.graph):
            kept = self.lp.sum(self.size[i] * self.keep(t, i) for i in range(t))
            self.lp.add(kept <= kept_bytes / self.unit_bytes)

    def _objective(self) -> None:
        lp = self.lp
        self.constant = 0.0  # solvers report their bound without it
        if not self.places or self.links is None:
            self.constant = sum(self.seconds)
            lp.minimise(self.seconds[i] * r for (t, i), r in self.R.items() if i < t)
            return
        times = [lp.number(f"T_{t}") for t in range(len(self.graph))]
        lp.minimise(times)
        scale = self.unit_bytes / self.unit_s
        for t, time in enumerate(times):
            self.lp.add(time >= lp.sum(self.seconds[i] * self.run(t, i) for i in range(t + 1)))
            out = {p: self._sum(self.O, p, t) for p in self.places}
            back = {p: self._sum(self.P, p, t) for p in self.places}
            sent, fetched = lp.sum(out.values()), lp.sum(back.values())
            self.lp.add(time >= scale / self.links.d2h * sent)
            self.lp.add(time >= scale / self.links.h2d * fetched)
            self.lp.add(time >= scale / self.links.duplex * (sent + fetched))
            if "ssd" in self.places:
                write, read = scale / self.links.ssd_write, scale / self.links.ssd_read
                self.lp.add(time >= write * out["ssd"] + read * back["ssd"])

    def _sum(self, table: Mapping[tuple[Place, int, int], Any], place: Place, t: int) -> Any:
        return self.lp.sum(
            self.size[i] * x for (p, s, i), x in table.items() if p == place and s == t
        )

    # -- solving ----------------------------------------------------------------------------

    def solve(self, solver: str, limits: Limits) -> Answer:
        return self.lp.solve(solver, limits)

    def bound_s(self, answer: Answer) -> float:
        """Seconds that no schedule undercuts."""
        return (answer.bound + self.constant) * self.unit_s

    def fractions(self) -> dict[tuple[int, int], float]:
        """Values of S, for rounding a relaxed program."""
        return {key: value_of(x) for key, x in self.S.items()}

    def schedule(self) -> Schedule:
        stages = range(len(self.graph))

        def on(table: Mapping[tuple[int, int], Any]) -> tuple[frozenset[int], ...]:
            found: list[set[int]] = [set() for _ in stages]
            for (t, i), x in table.items():
                if value_of(x) > 0.5:
                    found[t].add(i)
            return tuple(frozenset(s) for s in found)

        fetched = {
            p: on({(t, i): x for (q, t, i), x in self.P.items() if q == p}) for p in self.places
        }
        sent: dict[Place, tuple[Mapping[int, float], ...]] = {}
        for p in self.places:
            parts: list[dict[int, float]] = [{} for _ in stages]
            for (q, t, i), x in self.O.items():
                if q == p and value_of(x) > 1e-9:
                    parts[t][i] = value_of(x)
            sent[p] = tuple(parts)
        return Schedule(runs=on(self.R), kept=on(self.S), sent=sent, fetched=fetched)
