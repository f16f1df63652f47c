"""Why `pareto` has no plan: what lacks least, and what would do instead. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lohan_fx.errors import InsufficientMemoryError, format_bytes, format_need
from lohan_fx.footprint import host_bytes_needed
from lohan_fx.hardware import MemoryBudget
from lohan_fx.plan import Plan
from lohan_fx.planners.effort import Effort
from lohan_fx.planners.model import Model
from lohan_fx.planners.on_ssd import budget_with_ssds, more_than
from lohan_fx.planners.pareto_report import NAME
from lohan_fx.planners.registry import PlannerOptions
from lohan_fx.planners.schedule import at_the_peak
from lohan_fx.planners.tiers import device_advice, host_advice
from lohan_fx.planners.trial import leanest_of_all, least_host, least_memory
from lohan_fx.program import lower, residency


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """What is missing where nothing fits.

    Attributes:
        model: of the workload and the options.
        budget: in which nothing fits.
        effort: how hard to look for the smallest need.
        errors: of all that was tried, the leanest plan among it.
        first_plan: the first plan that a search finds for another budget, or with other options;
            None if it finds none.
    """

    model: Model
    budget: MemoryBudget
    effort: Effort
    errors: Sequence[InsufficientMemoryError]
    first_plan: Callable[[MemoryBudget, PlannerOptions], Plan | None]

    def error(self) -> InsufficientMemoryError:
        """Of the tier that lacks least for a plan, by its share of what there is; of the other one,
        its advice; and of the way with SSDs, where these lack space.

        With schedule "speculative" host memory comes first: what has no room there twice goes to
        the device, so the leanest plan would lack that.
        """
        found = self._error()
        model = self.model
        way = budget_with_ssds(model.workload, model.hw, self.budget, model.options)
        if way is None or way.ssd_bytes <= self.budget.ssd_bytes:
            return found  # it is host memory alone that lacks, which `found` is about
        if found.tier == "device" and way.device_bytes >= found.need_bytes:
            return found
        return found.anew(f"Or use SSDs: with {more_than(self.budget, way)} there is a plan, too.")

    def _error(self) -> InsufficientMemoryError:
        host = self._of_host()
        least = self.least_error()
        if host is None or (least.tier == "ssd" and self.model.options.schedule != "speculative"):
            return self._of_device(least)
        if self.model.options.schedule == "speculative" or _growth(host) <= _growth(least):
            return host
        return self._of_device(least, host)

    def least_error(self) -> InsufficientMemoryError:
        """What the leanest plan needs; of the device if that is what it lacks."""
        device = [e for e in self.errors if e.tier == "device"]
        least = min(device or self.errors, key=lambda e: e.need_bytes)
        where = least.where.partition(", strategy ")[0]  # one of those that this one tried
        return InsufficientMemoryError(
            least.tier,
            least.need_bytes,
            least.have_bytes,
            where=f"{where}, strategy {NAME!r}",
            at_peak=least.at_peak,
            advice=least.advice,
        )

    def _of_host(self) -> InsufficientMemoryError | None:
        """Of host memory, if a plan fits with more of that alone."""
        lean = least_host(self.model, self.budget, NAME, self.effort.lean)
        found = self._less_host(lean[0] if lean is not None else math.inf)
        if found is None and lean is not None:
            found = lean[0], lean[1].plan
        if found is None:
            return None
        need, plan = found
        parts = host_bytes_needed(self.model.workload, plan)
        advice = host_advice(self.model.workload, plan, self.budget)
        where = "the whole step"
        if self.model.options.schedule == "speculative":
            where += ", with second copies of units in host memory"
            if self._fits_deferred():
                advice += " Or use schedule='deferred': it needs no second copies, and fits."
            else:
                advice += " schedule='deferred', which needs no second copies, does not fit either."
        elif self.budget.ssd_bytes and any(e.tier == "ssd" for e in self.errors):
            advice += " More room on SSD would do, too."
        return InsufficientMemoryError(
            "host",
            need,
            self.budget.host_bytes,
            where=where,
            at_peak=sorted(((n, b) for n, b in parts.items() if b), key=lambda part: -part[1]),
            advice=advice,
        )

    def _less_host(self, limit: float) -> tuple[int, Plan] | None:
        """The smallest host budget below a limit that another strategy's error asks for, and a plan
        for it; None if that error keeps silent about the device, which may lack then."""
        asked = [e.need_bytes for e in self.errors if e.tier == "host"]
        need = min((n for n in asked if self.budget.host_bytes < n < limit), default=None)
        if need is None:
            return None
        plan = self.first_plan(replace(self.budget, host_bytes=need), self.model.options)
        return None if plan is None else (need, plan)

    def _fits_deferred(self) -> bool:
        """Whether there is a plan for the same budget without second copies."""
        model = self.model
        options = replace(model.options, schedule="deferred")
        deferred = Model(model.workload, model.hw, options)
        leanest = leanest_of_all(deferred, self.budget, NAME, self.effort.lean)
        if leanest is not None and leanest.memory.peak_bytes <= self.budget.device_bytes:
            return True
        return self.first_plan(self.budget, options) is not None

    def _of_device(
        self, least: InsufficientMemoryError, host: InsufficientMemoryError | None = None
    ) -> InsufficientMemoryError:
        """The `least_error`; smaller budgets may have plans all the same, so some are tried.

        `host` is what would do instead.
        """
        bound = least_memory(self.model, self.budget) if least.tier == "device" else math.inf
        need, at_peak, where = least.need_bytes, least.at_peak, least.where
        peak = need
        for _ in range(self.effort.lower):
            if least.tier != "device" or max(peak - 1, bound) >= need:
                break
            size = peak if peak - 1 < bound else peak - 1
            plan = self._plan_on(size)
            if plan is None and size < peak < need:
                size = peak
                plan = self._plan_on(size)
            if plan is None:
                break
            need = size
            memory = residency(lower(self.model.workload, plan))
            at_peak, where = at_the_peak(memory), f"{memory.peak_name}, strategy {NAME!r}"
            if need == peak:
                break
            peak = memory.peak_bytes
        advice = "This is the smallest need of all plans that were found"
        if need // 2 < bound < math.inf:  # else it says next to nothing
            same = format_need(math.ceil(bound)) == format_need(need)
            advice += "; none can need less" + ("" if same else f" than {format_bytes(bound)}")
        if host is not None and least.tier == "device":
            advice += f". With {format_need(host.need_bytes)} of host memory "
            advice += f"(there are {format_bytes(host.have_bytes)}) there is one for this device"
        if least.tier == "device":
            ways = device_advice(self.model.workload, self.budget, self.model.options)
            advice += f". {ways}."
        else:
            advice += f". {least.advice}"
        return InsufficientMemoryError(
            least.tier, need, least.have_bytes, where=where, at_peak=at_peak, advice=advice.strip()
        )

    def _plan_on(self, device_bytes: int) -> Plan | None:
        """A plan for another device budget (other than the leanest), if there is one."""
        return self.first_plan(replace(self.budget, device_bytes=device_bytes), self.model.options)


def _growth(error: InsufficientMemoryError) -> float:
    """How many times what there is would be needed."""
    return error.need_bytes / error.have_bytes if error.have_bytes else math.inf
