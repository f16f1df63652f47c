"""One trial of `pareto`: the integer program at a budget, as an exact draft. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from lohan_fx.errors import InsufficientMemoryError
from lohan_fx.footprint import host_breakdown, host_bytes_needed, unit_bytes
from lohan_fx.hardware import MemoryBudget
from lohan_fx.plan import Tier
from lohan_fx.planners.assign import Assignment, assign, choices_of, rounded, rounded_evenly
from lohan_fx.planners.integer import solve_whole
from lohan_fx.planners.keep import keep_greedily
from lohan_fx.planners.model import Model, Option
from lohan_fx.planners.schedule import Draft, lean_draft
from lohan_fx.planners.simplex import Floats, Ints, solve

TIE_BREAK = 0.005
"""Weight of hidden copies and recomputation against the step: none is better than some."""

_ATTEMPTS = 9
"""The model's memory is an estimate between its rows: so often is it corrected."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A draft whose peak is within the target; `value_s` is the model's estimate of its step."""

    made: Draft
    assignment: Assignment
    value_s: float


_SHALLOW = 8
"""With more blocks than this, a chain of recomputed block inputs never fits."""


class _Host:
    """Host memory that the model does not know of: rings, staging. It is corrected in two ways.

    First what was exceeded is set aside (`reserve`). If then nothing fits, the largest units must
    not be where they were, as buffers have the size of the largest unit of a tier (`banned`).
    """

    def __init__(self, model: Model, budget: MemoryBudget) -> None:
        self.model = model
        self.least = model.least_buffers(budget)
        self.reserve = self.least
        self.banned: set[int] = set()
        self._largest: set[int] = set()
        self._rounding = 0

    def exceeded(self, x: Ints, assignment: Assignment, error: InsufficientMemoryError) -> None:
        """Take note that `x` needs too much: its buffers are set aside."""
        last = self.reserve == error.have_bytes
        buffers = error.need_bytes - int(self.model.host @ x)
        if buffers <= self.reserve:  # `x` was rounded to more than there is, as the next one may be
            least = max(error.need_bytes - error.have_bytes, error.have_bytes // 256)
            self._rounding = max(2 * self._rounding, least)
            buffers = self.reserve + self._rounding
        self.reserve = min(error.have_bytes, buffers)
        self._largest = self.model.largest_moved(assignment)
        if last:
            self.relax()

    def relax(self) -> bool:
        """After a program without a solution: whether there is anything else to try."""
        if not self._largest - self.banned:
            return False
        self.banned |= self._largest
        self.reserve = self.least
        return True


def make_draft(
    model: Model, assignment: Assignment, budget: MemoryBudget, name: str, *, keep_tiny: bool = True
) -> Draft:
    """The draft of an assignment; regions smaller than blocks if else it exceeds the device budget.

    It may exceed it all the same.

    Raises:
        InsufficientMemoryError: host memory or SSD is too small.
    """
    args = (model.workload, model.hw, budget, model.options, choices_of(model, assignment), name)
    return lean_draft(*args, keep_tiny=keep_tiny)


def solve_at(model: Model, target: MemoryBudget, name: str, max_nodes: int = 1) -> Trial | None:
    """The best assignment found for a budget; None if none was found.

    Depends on the arguments alone. Where the exact draft exceeds the target, a row
    for that op is added and the budget corrected by the excess.
    """
    device = 0
    host = _Host(model, target)
    ops: set[int] = set()
    deep = len(model.segments) > _SHALLOW
    inputs = model.remade_inputs if deep else frozenset()
    for _ in range(_ATTEMPTS):
        program = model.program(
            target,
            relaxed=False,
            reserve=(device, host.reserve),
            tie_break=TIE_BREAK,
            more_ops=ops,
            banned=host.banned | inputs,
        )
        whole = solve_whole(model, program, max_nodes)
        if whole is None:
            if host.relax():
                continue
            return None
        assignment = assign(model, whole.x)
        try:
            made = make_draft(model, assignment, target, name)
        except InsufficientMemoryError as error:
            if error.tier != "host":
                return None
            host.exceeded(whole.x, assignment, error)
            continue
        over = made.memory.peak_bytes - target.device_bytes
        if over <= 0:
            value = whole.value * model.unit_s
            found = Trial(made=made, assignment=assignment, value_s=value)
            return filled(model, found, target, whole.worth, name)
        if not inputs and any(whole.x[j] for j in model.remade_inputs):
            inputs = model.remade_inputs
            continue
        device += over
        ops.add(int(np.argmax(made.load)))
    return None


def filled(model: Model, trial: Trial, target: MemoryBudget, worth: Floats, name: str) -> Trial:
    """Keep more residuals where the exact load leaves room; `worth` has each option's price."""

    def saved(v: str) -> float:
        g = model.group_of[v]
        options = model.groups[g].options
        start = int(model.start[g])
        now = start + options.index(trial.assignment[v])
        return float(worth[now] - worth[start + options.index("keep")])

    names = [
        v
        for v in keep_greedily(trial.made, target.device_bytes, model.workload.residuals, saved)
        if saved(v) > 0
    ]
    while names:
        kept: Mapping[str, Option] = {**trial.assignment, **dict.fromkeys(names, "keep")}
        made = make_draft(model, kept, target, name)
        if made.memory.peak_bytes <= target.device_bytes:
            return replace(trial, made=made, assignment=kept)
        names = names[: len(names) // 2]
    return trial


UNLIMITED = 2**62
"""Bytes that every model fits into."""


def leanest_draft(model: Model, budget: MemoryBudget, name: str, trials: int) -> Draft | None:
    """A draft with as little device memory as host memory and SSD allow, whatever the time.

    None if those two are too small. Two ways are tried: the device budget decides only whether the
    first of them will do, so what is found for one budget is found for every larger one. The model
    knows no working sets of recomputed regions: `trials` drafts look whether it helps to change
    what is recomputed or kept at the fullest op.
    """
    first = _leanest_draft(model, budget, name, trials, evenly=False)
    if first is not None and first.memory.peak_bytes <= budget.device_bytes:
        return first
    second = _leanest_draft(model, budget, name, trials, evenly=True)
    found = [made for made in (first, second) if made is not None]
    return min(found, key=_fullness, default=None)


def leanest_of_all(model: Model, budget: MemoryBudget, name: str, trials: int) -> Draft | None:
    """`leanest_draft`; if that does not fit the device, also with less SSD, as buffers for it may
    take the host memory that units would have, and with all units on the device, if that is open.
    """
    made = leanest_draft(model, budget, name, trials)
    if made is not None and made.memory.peak_bytes <= budget.device_bytes:
        return made
    found = [made]
    limit = math.inf if made is None else made.memory.peak_bytes

    def add(model: Model, budget: MemoryBudget) -> None:
        if least_memory(model, budget) < limit + 1:  # else it is no leaner, and takes its time
            found.append(leanest_draft(model, budget, name, trials))

    tiers = {"device", "ssd"} if made is None else {u.tier for u in made.plan.units.values()}
    whole = sum(unit_bytes(unit) for unit in model.workload.units)
    if tiers >= {"device", "ssd"}:  # else no unit gains a place
        for ssd in (whole, whole // 2, whole // 4, 0):  # of no budget: a smaller one's are tried
            if ssd < budget.ssd_bytes:
                add(model, replace(budget, ssd_bytes=ssd))
    if model.options.states == "auto" and tiers != {"device"}:
        options = replace(model.options, states="device")
        add(Model(model.workload, model.hw, options), replace(budget, ssd_bytes=0))
    return min((made for made in found if made is not None), key=_fullness, default=None)


def _leanest_draft(
    model: Model, budget: MemoryBudget, name: str, trials: int, *, evenly: bool
) -> Draft | None:
    """One of the ways of `leanest_draft`."""
    assignment = _leanest(model, budget, name, evenly=evenly)
    if assignment is None:
        return None
    budget = replace(budget, device_bytes=0)
    made = make_draft(model, assignment, budget, name, keep_tiny=False)
    ways = _leaner(model, assignment, made)
    for _ in range(trials):
        changed = next(ways, None)
        if changed is None:
            break
        try:
            trial = make_draft(model, changed, budget, name, keep_tiny=False)
        except InsufficientMemoryError:
            continue
        if _fullness(trial) < _fullness(made):
            made, ways = trial, _leaner(model, changed, trial)
    return made


def _leanest(
    model: Model, budget: MemoryBudget, name: str, *, evenly: bool
) -> dict[str, Option] | None:
    """By the linear program alone.

    Args:
        evenly: let units stay on the device, and have as many of them elsewhere as there is room
            for. Else as few as possible are there, and buffers are set aside for those on SSD,
            which leaves no room in host memory for any where there is little of it.
    """
    drafts = replace(budget, device_bytes=0)
    budget = replace(budget, device_bytes=UNLIMITED) if evenly else drafts
    host = _Host(model, budget)
    for _ in range(_ATTEMPTS):
        program = model.program(
            budget,
            relaxed=False,
            reserve=(0, host.reserve),
            tie_break=1e-3,
            banned=host.banned,
            least_memory=True,
        )
        solution = solve(program, model.leanest)
        if solution.status == "infeasible":
            if host.relax():
                continue
            return None
        x = rounded_evenly(model, solution.x) if evenly else rounded(model, solution.x)
        assignment = assign(model, x)
        try:
            make_draft(model, assignment, drafts, name, keep_tiny=False)
        except InsufficientMemoryError as error:
            if error.tier != "host":
                return None
            host.exceeded(x, assignment, error)
        else:
            return assignment
    return None


def _fullness(made: Draft) -> tuple[int, int]:
    """The peak, and at how many ops it is reached."""
    peak = made.memory.peak_bytes
    return peak, int((made.load == peak).sum())


def _leaner(model: Model, now: Assignment, made: Draft) -> Iterator[dict[str, Option]]:
    """Other options for what is alive at the fullest op: for all alike at once, then for one."""
    w = model.workload
    at = int(np.argmax(made.load))
    alive = [v for v in w.residuals if w.last_forward_use(v) < at < w.first_backward_use(v)]
    alive = [v for v in alive if now[v] == "keep"]
    for region in made.regions:
        if region.anchor <= at <= max(w.users[v][-1] for v in region.wanted):
            alive += region.wanted
    for v in sorted(alive, key=lambda v: (-w.values[v].num_bytes, v)):
        group = model.groups[model.group_of[v]]
        for option in ("host", "ssd", "recompute"):
            if option in group.options and option != now[v]:
                for members in (group.members, (v,)) if len(group.members) > 1 else ((v,),):
                    yield {**now, **dict.fromkeys(members, option)}


def least_host(
    model: Model, budget: MemoryBudget, name: str, trials: int
) -> tuple[int, Draft] | None:
    """Host bytes with which `leanest_draft` fits the device, and its draft there.

    The least that is more than the budget's, to 1%; None: no amount of host memory helps.
    """
    w = model.workload

    def fitting(host_bytes: int, trials: int = 0) -> Draft | None:
        made = leanest_draft(model, replace(budget, host_bytes=host_bytes), name, trials)
        fits = made is not None and made.memory.peak_bytes <= budget.device_bytes
        return made if fits else None

    tiers: dict[str, Tier] = dict.fromkeys(w.unit_by_name, "host")
    sizes = [w.values[v].num_bytes for v in w.residuals]
    whole = host_breakdown(w.units, tiers, model.options.update_schedule, sizes, sizes)
    low, need = budget.host_bytes, max(sum(whole.values()), budget.host_bytes + 1)
    found = fitting(need)
    if found is None:  # the only one that is worth the trials
        found = fitting(need, trials)
        return None if found is None else (need, found)
    while need - low > max(1, need // 100):
        middle = (low + need) // 2
        made = fitting(middle)
        if made is None:
            low = middle
        else:
            need, found = middle, made
    used = sum(host_bytes_needed(w, found.plan).values())
    made = fitting(used) if low < used < need else None
    return (need, found) if made is None else (used, made)


def least_memory(model: Model, budget: MemoryBudget) -> float:
    """Device bytes that no plan undercuts, however many there are; infinite if host memory or SSD
    is too small."""
    budget = replace(budget, device_bytes=UNLIMITED)  # units may all be there: no buffers for SSD
    return solve(model.program(budget, least_memory=True), model.leanest).bound
