"""Plans for steps beside which other forwards wait for their backward (`forwards=`).

A plan for all of the budget leaves no room for them, and one with more room to itself keeps more:
what a waiting forward holds grows with the budget that its plan is made for. So plans are made for
several budgets, and each is held to the whole one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lohan_fx import footprint
from lohan_fx.errors import InsufficientMemoryError, format_need
from lohan_fx.hardware import MemoryBudget
from lohan_fx.plan import Plan, Tier
from lohan_fx.program import Program, Residency, lower, residency, waiting_bytes
from lohan_fx.workload import Workload

MakePlan = Callable[[MemoryBudget], Plan]
"""A strategy that only lacks its budget."""

_OUTER: tuple[Tier, ...] = ("device", "host", "ssd")
_BISECTIONS = 4
"""So many device budgets are tried between one that is too large and the smallest."""

_NEAR = 1.02
"""A plan this near to the seconds of the one that leaves no room is good enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Device bytes of other programs of the model: the largest peak of one that trains, beside
    which this one's forwards may wait, and the most that a waiting forward of one holds.

    They are those made before. One that trains and is made later leaves room for these in turn, or
    has evaluations made again that leave too little for it (`compiled.lookup`)."""

    peak: int = 0
    waiting: int = 0


ALONE = Beside()


def needs(
    workload: Workload, plan: Plan, program: Program, memory: Residency
) -> dict[Tier, tuple[int, int]]:
    """Bytes of every tier: at the peak of a step, and for what one more waiting forward holds. An
    evaluation's waits for nothing."""
    waits = workload.num_forward_ops < len(workload.ops)
    host = footprint.host_bytes_needed(workload, plan)
    ssd = footprint.ssd_bytes_needed(workload, plan)
    return {
        "device": (memory.peak_bytes, waiting_bytes(program) if waits else 0),
        "host": (sum(host.values()), host["residuals"]),
        "ssd": (sum(ssd.values()), ssd["residuals"]),
    }


def plan_leaving_room(
    workload: Workload, budget: MemoryBudget, others: int, make: MakePlan, beside: Beside = ALONE
) -> Plan:
    """The fastest plan found whose peak, and what the other forwards hold, fit the budget.

    Args:
        workload: what is planned.
        budget: for all of them together.
        others: how many forwards may wait beside the one that runs.
        make: makes the plan for a budget of its own.
        beside: what other programs' forwards take, which may be those that wait.

    Raises:
        InsufficientMemoryError: none was found; it needs what the leanest one does.
    """
    return _Search(workload, budget, others, make, beside).run()


@dataclass
class _Search:
    """One run. Between the device budgets `low` and `high` are those worth another trial: a plan
    for `high` holds too much, one for `low` does not, or there is none. `whole_s` are the seconds
    of the first plan."""

    workload: Workload
    budget: MemoryBudget
    others: int
    make: MakePlan
    beside: Beside
    low: int = 0
    high: int = 0
    whole_s: float | None = None

    def run(self) -> Plan:
        have = self.high = self.budget.device_bytes
        best: Plan | None = None
        error: InsufficientMemoryError | None = None
        try:
            best = self.lowered(_OUTER, self.budget)
        except InsufficientMemoryError as short:
            error = short.anew()
        for _ in range(_BISECTIONS):
            if self.high - self.low <= have // 32:
                break
            if best is not None and best.prediction.step_s <= _NEAR * (self.whole_s or 0.0):
                break
            middle = (self.low + self.high) // 2
            try:
                plan = self.lowered(_OUTER[1:], _with(self.budget, "device", middle))
            except InsufficientMemoryError:
                self.low = middle
                continue
            peak, whole = self.peak_and_whole(plan, "device")
            if whole > have:
                self.high = min(middle, peak)
                continue
            self.low = middle
            if best is None or plan.prediction.step_s < best.prediction.step_s:
                best = plan
        if best is None:
            assert error is not None
            raise error
        return best

    def lowered(self, tiers: Sequence[Tier], budget: MemoryBudget) -> Plan:
        """A plan that leaves room in these tiers: for less and less of the first one, down to the
        least that the strategy has a plan for; the same in the others, for each of these sizes.

        Where a step alone is too large it goes on with what that needs, to say how much is missing.
        """
        if not tiers:
            plan = self.make(budget)
            if self.whole_s is None:
                self.whole_s = plan.prediction.step_s
            return plan
        tier = tiers[0]
        have = size = _of(budget, tier)
        least: InsufficientMemoryError | None = None
        while True:
            if tier == "device":
                self.low = size
            try:
                plan = self.lowered(tiers[1:], _with(budget, tier, size))
            except InsufficientMemoryError as short:
                if short.tier != tier or short.need_bytes <= size:
                    raise
                size, least = short.need_bytes, short.anew()
                continue
            peak, whole = self.peak_and_whole(plan, tier)
            if whole <= have:
                return plan
            if tier == "device":
                self.high = min(self.high, peak)
            left = max(0, peak - (whole - have), least.need_bytes if least else 0)
            if left >= size:
                raise self.shortage(tier, peak, whole, least)
            size = left

    def peak_and_whole(self, plan: Plan, tier: Tier) -> tuple[int, int]:
        """Bytes of a plan's step at its peak; of any step at its peak with all that may wait."""
        program = lower(self.workload, plan)
        peak, waiting = needs(self.workload, plan, program, residency(program))[tier]
        if tier != "device":
            return peak, peak + self.others * waiting
        held = self.others * max(waiting, self.beside.waiting)
        return peak, max(peak, self.beside.peak) + held

    def shortage(
        self, tier: Tier, peak: int, whole: int, least: InsufficientMemoryError | None
    ) -> InsufficientMemoryError:
        """Of a plan that cannot be leaner; `least` is what the strategy said of a smaller one."""
        if whole == peak and least is not None:  # nothing of what waits is in this tier
            return InsufficientMemoryError(
                tier,
                whole,
                _of(self.budget, tier),
                where=least.where,
                at_peak=least.at_peak,
                advice=least.advice,
            )
        wait = "one forward waits" if self.others == 1 else f"{self.others} forwards wait"
        ways = f"Give more {tier} memory or a smaller batch."
        return InsufficientMemoryError(
            tier,
            whole,
            _of(self.budget, tier),
            where=f"{least.where if least else 'the whole step'}, while {wait}",
            at_peak=((f"what waiting forwards hold (forwards={self.others + 1})", whole - peak),)
            + (least.at_peak if least else ()),
            advice=f"One step alone needs {format_need(peak)}. {least.advice if least else ways} "
            f"A smaller forwards= than {self.others + 1} needs less, too.",
        )


def _of(budget: MemoryBudget, tier: Tier) -> int:
    size: int = getattr(budget, f"{tier}_bytes")
    return size


def _with(budget: MemoryBudget, tier: Tier, size: int) -> MemoryBudget:
    return dataclasses.replace(budget, **{f"{tier}_bytes": size})
