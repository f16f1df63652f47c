"""lohan: Algorithm 1 of the paper (§IV-D), then keep on the device what fits there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from lohan_fx.cost_model import CostOptions
from lohan_fx.errors import InsufficientMemoryError, format_bytes
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import Action, Plan, Tier
from lohan_fx.planners.algorithm1 import (
    SwapSearch,
    by_benefit,
    overflow,
    search,
    swap_room,
)
from lohan_fx.planners.keep import keep_greedily, overlap_reserve
from lohan_fx.planners.prediction import predicted_time
from lohan_fx.planners.recompute_cost import layers_of
from lohan_fx.planners.registry import PlannerOptions, register
from lohan_fx.planners.schedule import (
    ALL_KEPT,
    Choices,
    Draft,
    device_error,
    finish_draft,
    lean_draft,
    must_save,
    tiny_residuals,
)
from lohan_fx.planners.tiers import unit_tiers
from lohan_fx.workload import Workload

_LINKS = ("g2m", "m2g", "duplex", "ssd")
_HIDDEN_WORTH = 0.05
"""What a hidden copy is worth to avoid, against the same copy on the binding resource."""


@dataclass(frozen=True, slots=True)
class Lohan:
    """Algorithm 1 over residuals.

    Attributes:
        name: the strategy's name in plans and errors.
        keep: after Algorithm 1, keep residuals on the device while the exact peak, and room
            for copies to overlap, stay within the budget.
        literal: FLOP_r by Eq. 7, stop at the first turn of T_iter, `CostOptions.paper()`.
    """

    name: str = "lohan"
    keep: bool = True
    literal: bool = False

    def __call__(
        self,
        workload: Workload,
        hw: HardwareProfile,
        budget: MemoryBudget,
        options: PlannerOptions,
    ) -> Plan:
        """Plan one step.

        Raises:
            InsufficientMemoryError: no variant fits a tier, swapping everything included.
        """
        if self.literal:
            options = replace(options, cost=CostOptions.paper())
        try:
            return _Search(self, workload, hw, budget, options).run()
        except InsufficientMemoryError as error:
            if error.tier == "device" or options.states != "auto":
                raise
            resident = _Search(self, workload, hw, budget, options, home="device")
            resident.notes.append(f"units stay on the device: too little {error.tier} memory")
            try:
                return resident.run()
            except InsufficientMemoryError:
                raise error from None


@dataclass
class _Search:
    """One planning run. `notes` collects what was decided and why.

    Units live in host memory, then on SSD (`home` "host"); on the device only if those two are
    too small and `options.states` leaves the choice.
    `resident` are residuals that stay on the device from the start: tiny ones, and block inputs
    that no other tier has room for.
    """

    strategy: Lohan
    workload: Workload
    hw: HardwareProfile
    budget: MemoryBudget
    options: PlannerOptions
    home: Tier = "host"
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        w = self.workload
        saved = w.inter_block | must_save(w)
        swap_bytes = sum(w.values[v].num_bytes for v in saved)
        self.tiers: dict[str, Tier] = unit_tiers(
            w, self.hw, self.budget, self.options, auto=self.home, swap_bytes=swap_bytes
        )
        room = swap_room(w, self.hw, self.budget, self.options, self.tiers)
        tiny = tiny_residuals(w)
        self.resident = tiny | overflow(w, room, saved - tiny)

    def draft(self, actions: dict[str, Action], *, keep_tiny: bool = True) -> Draft:
        choices = Choices(actions=actions, unit_tiers=self.tiers)
        args = (self.workload, self.hw, self.budget, self.options, choices, self.strategy.name)
        return lean_draft(*args, keep_tiny=keep_tiny)

    def fits(self, made: Draft, limit: int | None = None) -> bool:
        return made.memory.peak_bytes <= (self.budget.device_bytes if limit is None else limit)

    def run(self) -> Plan:
        if self.strategy.keep:
            everything = self.draft(dict.fromkeys(self.workload.residuals, "keep"))
            reserve = overlap_reserve(self.workload, self.tiers)
            if self.fits(everything, self.budget.device_bytes - reserve):
                self.notes.append(ALL_KEPT)
                return self.finish(everything)
        found = self.algorithm1(self.resident)
        made = self.feasible(found)
        if self.strategy.keep:
            made = self.keep_more(made)
        return self.finish(made)

    def finish(self, made: Draft) -> Plan:
        return finish_draft(made, self.hw, self.budget, self.options, self.notes)

    def algorithm1(self, kept: Collection[str]) -> SwapSearch:
        args = (self.workload, self.hw, self.budget, self.options, self.tiers, kept)
        return search(*args, literal=self.strategy.literal)

    def actions(self, swapped: Collection[str], kept: Collection[str]) -> dict[str, Action]:
        return {
            v: "keep" if v in kept else "swap" if v in swapped else "recompute"
            for v in self.workload.residuals
        }

    def feasible(self, found: SwapSearch) -> Draft:
        """The first variant that fits: as found, then with less and less recomputation."""
        self.notes.append(found.note)
        errors: list[InsufficientMemoryError] = []
        for note, attempt in self.variants(found):
            try:
                made = attempt()
            except InsufficientMemoryError as error:
                errors.append(error.anew())
                continue
            if self.fits(made):
                self.notes += [note] if note else []
                return made
            errors.append(device_error(made, self.budget, self.options))
        device = [e for e in errors if e.tier == "device"]
        raise min(device or errors, key=lambda e: e.need_bytes).anew()

    def variants(self, found: SwapSearch) -> Iterator[tuple[str, Callable[[], Draft]]]:
        residuals = self.workload.residuals
        first = self.actions(found.swapped, self.resident)
        yield "", lambda: self.draft(first)
        yield (
            "regions whose working set exceeds the device are swapped in part",
            lambda: self.relieve(first),
        )
        least = must_save(self.workload)
        inputs = self.workload.inter_block
        few = self.actions(inputs | least, self.resident)
        yield (
            "block inputs are swapped, and the fewest others that regions leave no memory for",
            lambda: self.relieve(few),
        )
        swap: dict[str, Action] = dict.fromkeys(residuals, "swap")
        yield "everything is swapped: recomputation does not fit", lambda: self.draft(swap)
        yield (
            "everything is swapped, tiny residuals too",
            lambda: self.draft(swap, keep_tiny=False),
        )
        for saved, rest in ((inputs | least, least), (inputs, least - inputs)):
            kept: dict[str, Action] = {
                v: "keep" if v in saved else "swap" if v in rest else "recompute" for v in residuals
            }
            yield (
                "block inputs stay on the device: host memory and SSD are too small for them",
                partial(self.draft, kept),
            )
        remade: dict[str, Action] = {v: "swap" if v in least else "recompute" for v in residuals}
        yield "block inputs are made again: no tier has room for them", lambda: self.draft(remade)

    def relieve(self, actions: dict[str, Action]) -> Draft:
        """Swap one member of every region that stands where memory is exceeded, until it is not.

        The member with the highest offloading benefit goes first; it cuts its region in two
        (`split_regions`) where that helps most.
        """
        remade = [v for v, action in actions.items() if action == "recompute"]
        order = by_benefit(layers_of(self.workload, remade), self.options)
        rank = {v: k for k, layer in enumerate(order) for v in layer.values}
        made = self.draft(actions)
        while not self.fits(made) and not made.peaks_before_regions:
            over = set()
            for region in made.regions:
                end = max(self.workload.users[v][-1] for v in region.wanted)
                if made.load[region.anchor : end + 1].max() > self.budget.device_bytes:
                    over.add(min(region.wanted, key=rank.__getitem__))
            if not over:
                break
            actions = {v: "swap" if v in over else a for v, a in actions.items()}
            made = self.draft(actions)
        return made

    def keep_more(self, made: Draft) -> Draft:
        """Keep what fits; run Algorithm 1 again on the rest; stop when a round gains nothing."""
        best = self.kept(made)
        kept = {v for v, r in best.plan.residuals.items() if r.action == "keep"}
        found = self.algorithm1(kept)
        again = self.swapped_instead(found, kept)
        if again is not None and self.seconds(again) < self.seconds(best):
            self.notes.append("after keeping: " + found.note)
            best = again
        count = best.plan.count("keep")
        if count:
            size = sum(
                self.workload.values[v].num_bytes
                for v, r in best.plan.residuals.items()
                if r.action == "keep"
            )
            self.notes.append(f"{count} residuals stay on the device ({format_bytes(size)})")
        return best

    def swapped_instead(self, found: SwapSearch, kept: Collection[str]) -> Draft | None:
        """The draft of a second search beside what is kept, if it fits."""
        try:
            made = self.draft(self.actions(found.swapped, kept))
        except InsufficientMemoryError:
            return None
        return self.kept(made) if self.fits(made) else None

    def seconds(self, made: Draft) -> float:
        args = (self.workload, self.hw, self.options, made.plan, made.program)
        return predicted_time(*args).step_s

    def kept(self, made: Draft) -> Draft:
        """One greedy pass; if the bound was too optimistic, half as many, until it is exact."""
        slack = self.budget.device_bytes - made.memory.peak_bytes
        limit = self.budget.device_bytes - min(
            overlap_reserve(self.workload, self.tiers), slack // 2
        )
        names = keep_greedily(made, limit, self.workload.residuals, self.worth(made))
        before: dict[str, Action] = {v: r.action for v, r in made.plan.residuals.items()}
        while names:
            trial = self.draft({**before, **dict.fromkeys(names, "keep")}, keep_tiny=False)
            if self.fits(trial, max(limit, made.memory.peak_bytes)):
                return trial
            names = names[: len(names) // 2]
        return made

    def worth(self, made: Draft) -> Callable[[str], float]:
        """Seconds that keeping a residual saves: its recomputation, or its copies.

        Copies on a stage's binding resource count in full, hidden ones for little.
        """
        time = predicted_time(self.workload, self.hw, self.options, made.plan, made.program)
        out = 1.0 if time.binding_forward in _LINKS else _HIDDEN_WORTH
        back = 1.0 if time.binding_backward in _LINKS else _HIDDEN_WORTH
        hw, plan = self.hw, made.plan
        remade = [v for v, r in plan.residuals.items() if r.action == "recompute"]
        work = {
            v: layer.seconds for layer in layers_of(self.workload, remade) for v in layer.values
        }

        def worth(v: str) -> float:
            if plan.residuals[v].action == "recompute":
                return work[v]
            size = self.workload.values[v].num_bytes
            cost = size * (out / hw.d2h_bytes_per_s + back / hw.h2d_bytes_per_s)
            if plan.residuals[v].tier == "ssd":
                cost += size * (out / hw.ssd_write_bytes_per_s + back / hw.ssd_read_bytes_per_s)
            return cost

        return worth


register("lohan")(Lohan())
register("lohan-paper")(Lohan(name="lohan-paper", keep=False, literal=True))
