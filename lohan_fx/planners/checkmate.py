"""checkmate: the MILP of Checkmate (Jain et al., MLSys 2020), with swapping to main memory.

As an ablation of LoHan (§V-E, LoHan+CM) it "recomputes or offloads activations to main memory with
a cost model and MILP solver"; states are placed and updated as LoHan does. `remat_only` is
Checkmate itself: keep or recompute. The program (`oracle`) is exact for small graphs. A larger
model is solved block by block, each kind of block once, and the result is copied to all blocks of
its kind; the memory that is left beside a block's working set is shared out among the blocks by
their bytes. Where a block has too many ops, neighbours are merged (`oracle_graph`).

Not as in the paper: the runtime runs a forward op at most once more, in backward, so that only the
first time that the schedule recomputes a residual counts; backward ops never run twice. What the
plan's exact memory exceeds is swapped (or, with `remat_only`, raises).

A solver that is slow makes the plan depend on the machine: notes say what was proved. No torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from lohan_fx.errors import InsufficientMemoryError
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import Action, Plan, Tier
from lohan_fx.planners.evaluate import step_seconds
from lohan_fx.planners.oracle import (
    Limits,
    Links,
    OracleResult,
    SolverError,
    pick_solver,
    round_graph,
    solve_graph,
)
from lohan_fx.planners.oracle_graph import Graph, graph_of
from lohan_fx.planners.registry import PlannerOptions, register
from lohan_fx.planners.schedule import (
    TINY_SHIFT,
    Choices,
    Draft,
    device_error,
    draft,
    finish_draft,
    must_save,
    tiny_residuals,
)
from lohan_fx.planners.strategy import place, with_defaults
from lohan_fx.planners.tiers import host_room
from lohan_fx.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkmate:
    """The strategy.

    Attributes:
        remat_only: keep or recompute, nothing is swapped.
        limits: of the solver, for one program; `time_s` is shared by all kinds of blocks.
        max_nodes: stages of one program; planners.md: about 80 without and 40 with swapping can
            be solved in a minute.
    """

    name: str = "checkmate"
    remat_only: bool = False
    limits: Limits = field(default_factory=lambda: Limits(time_s=60.0, gap=0.01))
    max_nodes: int = 36

    def __call__(
        self,
        workload: Workload,
        hw: HardwareProfile,
        budget: MemoryBudget,
        options: PlannerOptions,
    ) -> Plan:
        """Plan one step.

        Raises:
            SolverError: no solver is installed, or the one that is named is not.
            InsufficientMemoryError: the program is infeasible, or its plan exceeds a tier.
        """
        pick_solver(self.limits.solver)
        options = with_defaults(options, swap_to="host", schedule="optimized")
        return _Run(self, workload, hw, budget, options).plan()


@dataclass
class _Run:
    """One planning run."""

    strategy: Checkmate
    workload: Workload
    hw: HardwareProfile
    budget: MemoryBudget
    options: PlannerOptions
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        w = self.workload
        self.tiers: dict[str, Tier] = place(w, self.hw, self.budget, self.options)
        self.small = sum(w.values[v].num_bytes for v in w.residuals) >> TINY_SHIFT
        self.tiny = tiny_residuals(w)
        self.saved = must_save(w)

    def plan(self) -> Plan:
        floor = self.floor()
        if len(self.workload.ops) <= self.strategy.max_nodes:
            actions, stages = self.whole(floor)
        else:
            actions, stages = self.by_block(floor)
        drafts: list[tuple[float, int, Plan]] = []
        errors: list[InsufficientMemoryError] = []
        for regions in (stages, None):
            made = self.fitted(actions, regions)
            if isinstance(made, InsufficientMemoryError):
                errors.append(made)
                continue
            plan = finish_draft(made, self.hw, self.budget, self.options, self.notes)
            drafts.append((step_seconds(self.workload, plan, self.hw), len(drafts), plan))
        if not drafts:
            raise min(errors, key=lambda e: e.need_bytes)
        return min(drafts, key=lambda item: item[:2])[2]

    # -- memory -----------------------------------------------------------------------------

    def floor(self) -> Draft:
        """Everything swapped: the smallest peak that there is, with these tiers.

        With `remat_only` nothing may be swapped: everything is recomputed but what cannot be.
        """
        w = self.workload
        remat = self.strategy.remat_only
        rest: Action = "recompute" if remat else "swap"
        least: Action = "keep" if remat else "swap"
        actions: dict[str, Action] = {v: least if v in self.saved else rest for v in w.residuals}
        if remat:
            actions = {v: "keep" if v in w.inter_block else a for v, a in actions.items()}
        return self.draft(actions, None)

    def draft(self, actions: Mapping[str, Action], regions: Mapping[str, str] | None) -> Draft:
        swapped: dict[str, Tier] = {}
        if self.options.swap_to != "auto":
            tier: Tier = self.options.swap_to
            swapped = {v: tier for v, a in actions.items() if a == "swap"}
        choices = Choices(
            actions=actions, unit_tiers=self.tiers, swap_tiers=swapped or None, regions=regions
        )
        args = (self.workload, self.hw, self.budget, self.options, choices, self.strategy.name)
        return draft(*args)

    def fits(self, made: Draft) -> bool:
        return made.memory.peak_bytes <= self.budget.device_bytes

    def links(self) -> Links | None:
        if self.strategy.remat_only:
            return None
        ssd = self.options.swap_to != "host"
        return Links.of(self.hw, ssd_bytes=self.budget.ssd_bytes if ssd else 0)

    # -- programs ---------------------------------------------------------------------------

    def whole(self, floor: Draft) -> tuple[dict[str, Action], dict[str, str]]:
        """One program for the whole step."""
        fetched = max(
            (u.compute_bytes for u in self.workload.units if self.tiers[u.name] != "device"),
            default=0,
        )
        graph = graph_of(
            self.workload,
            small_bytes=self.small,
            static_bytes=floor.memory.static_bytes + fetched,
        )
        links = self.links()
        if links is not None:
            room = host_room(self.workload, self.budget, self.options, self.tiers)
            links = replace(links, host_bytes=float(room))
        result = self.solve(graph, self.budget.device_bytes, links, None, 1, "the step")
        return self.decisions(graph, result, {v: v for v in self.workload.residuals})

    def by_block(self, floor: Draft) -> tuple[dict[str, Action], dict[str, str]]:
        """A program for each kind of block."""
        kinds = self.kinds()
        graphs = {
            blocks[0]: graph_of(
                self.workload,
                ops=self.ops_of(blocks[0]),
                max_nodes=self.strategy.max_nodes,
                small_bytes=self.small,
            )
            for blocks in kinds
        }
        working = max((g.working_bytes for g in graphs.values()), default=0)
        left = max(0, self.budget.device_bytes - floor.memory.peak_bytes)
        total = self.num_bytes(self.workload.residuals)
        actions: dict[str, Action] = {}
        stages: dict[str, str] = {}
        for blocks in kinds:
            graph = graphs[blocks[0]]
            names = self.names_of(blocks[0])
            share = left * self.num_bytes(self.values_of(blocks[0])) // max(1, total)
            label = f"block {blocks[0]}" + (f" and {len(blocks) - 1} equal" if blocks[1:] else "")
            args = (graph, working + share, self.links(), share, len(kinds), label)
            result = self.solve(*args)
            for block in blocks:
                twin = dict(zip(names, self.names_of(block), strict=True))
                found, regions = self.decisions(graph, result, twin)
                actions.update(found)
                stages.update(regions)
        return actions, stages

    def solve(
        self,
        graph: Graph,
        budget_bytes: int,
        links: Links | None,
        kept_bytes: int | None,
        num_programs: int,
        label: str,
    ) -> OracleResult | None:
        """The program's schedule; by rounding if it takes too long; None if that fails, too."""
        limits = replace(self.strategy.limits, time_s=self.strategy.limits.time_s / num_programs)
        try:
            result = solve_graph(graph, budget_bytes, links, limits, kept_bytes=kept_bytes)
        except InsufficientMemoryError:
            if kept_bytes is None:
                raise
            self.notes.append(f"{label}: no schedule within its share of memory")
            return None
        except SolverError:
            try:
                result = round_graph(graph, budget_bytes, limits)
            except (InsufficientMemoryError, SolverError):
                self.notes.append(f"{label}: {limits.solver} found nothing in {limits.time_s:g} s")
                return None
        self.notes.append(
            f"{label}: {len(graph)} stages, {result.solver}, {result.status}, "
            f"gap {100 * result.gap:.2f}%"
        )
        return result

    def kinds(self) -> list[list[str]]:
        """Blocks with residuals, equal ones together."""
        w = self.workload
        members: dict[str, list[object]] = defaultdict(list)
        for op in w.ops:
            members[op.block].append(
                (
                    op.phase,
                    op.target,
                    op.seconds,
                    op.recomputable,
                    tuple(w.values[v].num_bytes for v in op.reads),
                    tuple(w.values[v].num_bytes for v in op.writes),
                )
            )
        found: dict[object, list[str]] = defaultdict(list)
        for block in dict.fromkeys(w.values[v].block for v in w.residuals):
            found[tuple(members[block]), len(self.names_of(block))].append(block)
        return list(found.values())

    def ops_of(self, block: str) -> list[int]:
        return [i for i, op in enumerate(self.workload.ops) if op.block == block]

    def values_of(self, block: str) -> list[str]:
        return [v for v in self.workload.residuals if self.workload.values[v].block == block]

    def names_of(self, block: str) -> list[str]:
        """The residuals that the block makes, then what it reads of other blocks."""
        w = self.workload
        own = self.values_of(block)
        made = {v for i in self.ops_of(block) for v in w.ops[i].writes}
        reads = (v for i in self.ops_of(block) for v in w.ops[i].reads)
        return [*own, *dict.fromkeys(v for v in reads if v in w.producer and v not in made)]

    def num_bytes(self, values: Iterable[str]) -> int:
        return sum(self.workload.values[v].num_bytes for v in values)

    # -- from schedules to plans --------------------------------------------------------------

    def default(self, value: str) -> Action:
        """For residuals that no program decides about."""
        if self.strategy.remat_only:
            kept = value in self.workload.inter_block or value in self.saved
            return "keep" if kept else "recompute"
        return "swap"

    def decisions(
        self, graph: Graph, result: OracleResult | None, twin: Mapping[str, str]
    ) -> tuple[dict[str, Action], dict[str, str]]:
        """Actions, and the region of what is recomputed: one for each stage that does.

        `twin` has for each value of the graph the one of the block that is decided about. Of two
        ways back, recomputation and fetch, the one that the schedule takes first counts.
        """
        actions: dict[str, Action] = {}
        regions: dict[str, str] = {}
        residuals = set(self.workload.residuals)
        for i, node in enumerate(graph.nodes[: graph.turn]):
            stages = range(graph.turn, len(graph))
            again = fetched = len(graph)
            if result is not None:
                schedule = result.schedule
                again = min((t for t in stages if i in schedule.runs[t]), default=again)
                back = [s for s in schedule.fetched.values() for t in stages if i in s[t]]
                if back:
                    fetched = min(t for s in back for t in stages if i in s[t])
            for v in node.values:
                name = twin.get(v)
                if name not in residuals or name in actions:
                    continue
                if result is None:
                    actions[name] = self.default(name)
                elif again < fetched:
                    actions[name] = "recompute"
                    regions[name] = f"{self.workload.values[name].block}@{again}"
                else:
                    actions[name] = "swap" if fetched < len(graph) else "keep"
        return actions, regions

    def fitted(
        self, found: Mapping[str, Action], regions: Mapping[str, str] | None
    ) -> Draft | InsufficientMemoryError:
        """The draft of the actions; what is kept leaves the device, from the first, until it fits."""
        w = self.workload
        remat = self.strategy.remat_only
        away: Action = "recompute" if remat else "swap"
        fixed = self.tiny | (w.inter_block | self.saved if remat else frozenset())
        actions: dict[str, Action] = {v: found.get(v, self.default(v)) for v in w.residuals}
        kept = [v for v in w.residuals if actions[v] == "keep" and v not in fixed]

        def trial(count: int) -> Draft:
            return self.draft({**actions, **dict.fromkeys(kept[:count], away)}, regions)

        try:
            made = trial(0)
            if self.fits(made):
                return made
            made = trial(len(kept))
            if not self.fits(made):
                return self.error(made)
            low, high = 0, len(kept)
            while high - low > 1:
                middle = (low + high) // 2
                attempt = trial(middle)
                if self.fits(attempt):
                    high, made = middle, attempt
                else:
                    low = middle
        except InsufficientMemoryError as error:
            return error
        return made

    def error(self, made: Draft) -> InsufficientMemoryError:
        return device_error(made.memory, self.budget, self.strategy.name)


register("checkmate")(Checkmate())
