"""checkmate: the MILP of Checkmate (Jain et al., MLSys 2020), with swapping to main memory.

As an ablation of LoHan (§V-E, LoHan+CM) it "recomputes or offloads activations to main memory with
a cost model and MILP solver"; states are placed and updated as LoHan does. `remat_only` is
Checkmate itself: keep or recompute. The program (`oracle`) is exact for small graphs. A larger
model is solved block by block, each kind of block once, and the result is copied to all blocks of
its kind; the memory that is left beside a block's working set is shared out among the blocks by
their bytes. Where a block has too many ops, neighbours are merged (`oracle_graph`).

Not as in the paper: the runtime runs a forward op at most once more, in backward, so that only the
first time that the schedule recomputes a residual counts; backward ops never run twice. What the
plan's exact memory exceeds is swapped (with `remat_only` recomputed).

A solver that is slow makes the plan depend on the machine: notes say what was proved. No torch.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from lohan_fx import progress
from lohan_fx.errors import InsufficientMemoryError, format_bytes
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import Action, Plan, Tier
from lohan_fx.planners.milp import Limits, SolverError, pick_solver
from lohan_fx.planners.oracle import OracleResult, round_graph, solve_graph
from lohan_fx.planners.oracle_graph import Graph, graph_of
from lohan_fx.planners.oracle_schedule import Links
from lohan_fx.planners.registry import PlannerOptions, register
from lohan_fx.planners.schedule import (
    TINY_SHIFT,
    Choices,
    Draft,
    device_error,
    finish_draft,
    lean_draft,
    must_save,
    tiny_residuals,
)
from lohan_fx.planners.strategy import place, with_defaults
from lohan_fx.planners.tiers import host_room
from lohan_fx.simulate import step_seconds
from lohan_fx.workload import Workload

_SHARES = (1.0, 0.95, 0.9)
"""Of the device budget, for the program of a whole step: what the plan needs may be a little more
than the program knows of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkmate:
    """The strategy.

    Attributes:
        remat_only: keep or recompute, nothing is swapped.
        limits: of the solver; `time_s` is for all programs together.
        max_nodes: stages of one program; planners.md: about 80 without and 40 with swapping can
            be solved in a minute.
    """

    name: str = "checkmate"
    remat_only: bool = False
    limits: Limits = field(default_factory=lambda: Limits(time_s=30.0, gap=0.01))
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
            InsufficientMemoryError: no plan that recomputes or swaps as far as needed fits a tier.
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
            for share in _SHARES:
                actions, stages = self.whole(floor, int(share * self.budget.device_bytes))
                if any(self.is_legal(actions, regions) for regions in (stages, None)):
                    break
        else:
            actions, stages = self.by_block(floor)
        drafts, errors = self.fitting(actions, stages)
        if not drafts:
            device = [e for e in errors if e.tier == "device"]
            raise min(device or errors, key=lambda e: e.need_bytes).anew()
        args = (self.hw, self.budget, self.options, self.notes)
        plans = [finish_draft(made, *args) for made in drafts]
        return min(plans, key=lambda plan: step_seconds(self.workload, plan, self.hw))

    # -- memory -----------------------------------------------------------------------------

    def floor(self) -> Draft:
        """The smallest peak that there is, with these tiers: everything swapped, if it may be."""
        if self.may_swap:
            with contextlib.suppress(InsufficientMemoryError):
                return self.draft(dict.fromkeys(self.workload.residuals, "swap"), None)
            with contextlib.suppress(InsufficientMemoryError):
                return self.draft(self.recomputed("swap"), None)
        return self.draft(self.recomputed("keep"), None)

    @property
    def may_swap(self) -> bool:
        links = self.links()
        return links is not None and bool(links.places)

    def recomputed(self, rest: Action) -> dict[str, Action]:
        """Everything recomputed but what must be saved, and block inputs."""
        saved = self.saved | self.workload.inter_block
        return {v: rest if v in saved else "recompute" for v in self.workload.residuals}

    def is_legal(self, actions: Mapping[str, Action], regions: Mapping[str, str] | None) -> bool:
        """Whether a plan with these actions fits as it is."""
        try:
            return self.fits(self.draft(actions, regions))
        except InsufficientMemoryError:
            return False

    def draft(self, actions: Mapping[str, Action], regions: Mapping[str, str] | None) -> Draft:
        swapped: dict[str, Tier] = {}
        if self.options.swap_to != "auto":
            tier: Tier = self.options.swap_to
            swapped = {v: tier for v, a in actions.items() if a == "swap"}
        choices = Choices(
            actions=actions, unit_tiers=self.tiers, swap_tiers=swapped or None, regions=regions
        )
        args = (self.workload, self.hw, self.budget, self.options, choices, self.strategy.name)
        return lean_draft(*args)

    def fits(self, made: Draft) -> bool:
        return made.memory.peak_bytes <= self.budget.device_bytes

    def links(self, part: float = 1.0) -> Links | None:
        """Rates, and the part of the tiers' room that the graph's residuals may take."""
        if self.strategy.remat_only:
            return None
        args = (self.workload, self.budget, self.options, self.tiers)
        host = 0 if self.options.swap_to == "ssd" else host_room(*args)
        ssd = 0 if self.options.swap_to == "host" else self.budget.ssd_bytes
        return Links.of(self.hw, host_bytes=part * host, ssd_bytes=part * ssd)

    # -- programs ---------------------------------------------------------------------------

    def whole(self, floor: Draft, device_bytes: int) -> tuple[dict[str, Action], dict[str, str]]:
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
        args = (
            graph,
            device_bytes,
            self.links(),
            None,
            len(_SHARES),
            f"the step in {format_bytes(device_bytes)}",
        )
        result = self.solve(*args)
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
        total = max(1, self.num_bytes(self.workload.residuals))
        actions: dict[str, Action] = {}
        stages: dict[str, str] = {}
        for blocks in kinds:
            graph = graphs[blocks[0]]
            names = self.names_of(blocks[0])
            own = self.num_bytes(self.values_of(blocks[0]))
            share = left * own // total
            label = f"block {blocks[0]}" + (f" and {len(blocks) - 1} equal" if blocks[1:] else "")
            args = (graph, working + share, self.links(own / total), share, len(kinds), label)
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
        progress.report(f"{limits.solver} for {label}, at most {limits.time_s:.0f} s")
        try:
            result = solve_graph(graph, budget_bytes, links, limits, kept_bytes=kept_bytes)
        except InsufficientMemoryError:
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
        if self.may_swap:
            return "swap"
        kept = value in self.workload.inter_block or value in self.saved
        return "keep" if kept else "recompute"

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

    def fitting(
        self, found: Mapping[str, Action], stages: Mapping[str, str]
    ) -> tuple[list[Draft], list[InsufficientMemoryError]]:
        """Drafts of the actions that fit, and the errors of those that do not.

        With regions as the stages have them, and as other strategies do. Of what is kept some
        leaves, if need be: is swapped or recomputed. Where the actions are far from fitting,
        recomputing all, or swapping all, may be better than what is left of them.
        """
        rest: Action = "swap" if self.may_swap else "keep"
        actions: dict[str, Action] = {
            v: found.get(v, self.default(v)) for v in self.workload.residuals
        }
        ways: tuple[Action, ...] = ("swap", "recompute") if self.may_swap else ("recompute",)
        tries: list[tuple[dict[str, Action], Action]] = [(actions, way) for way in ways]
        tries.append((self.recomputed("keep"), rest))
        if self.may_swap:
            tries.append((self.recomputed("swap"), rest))
            tries.append((dict.fromkeys(self.workload.residuals, "swap"), rest))
        drafts: list[Draft] = []
        errors: list[InsufficientMemoryError] = []
        for (attempt, away), regions in itertools.product(tries, (stages, None)):
            try:
                made = self.lessened(attempt, away, regions)
            except InsufficientMemoryError as error:
                errors.append(error.anew())
                continue
            if self.fits(made):
                drafts.append(made)
            else:
                errors.append(device_error(made, self.budget, self.options))
        return drafts, errors

    def lessened(
        self, actions: Mapping[str, Action], away: Action, regions: Mapping[str, str] | None
    ) -> Draft:
        """As few kept residuals as needed leave. Raises if host memory or SSD is too small."""
        w = self.workload
        fixed = self.tiny | (frozenset() if away == "swap" else w.inter_block | self.saved)
        kept = [v for v in w.residuals if actions[v] == "keep" and v not in fixed]

        def trial(count: int) -> Draft:
            return self.draft({**actions, **dict.fromkeys(kept[:count], away)}, regions)

        made = trial(0)
        if self.fits(made) or not kept:
            return made
        made = trial(len(kept))
        if not self.fits(made):
            return made
        low, high = 0, len(kept)
        while high - low > 1:
            middle = (low + high) // 2
            attempt = trial(middle)
            if self.fits(attempt):
                high, made = middle, attempt
            else:
                low = middle
        return made


register("checkmate")(Checkmate())
