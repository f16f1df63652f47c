"""The local search of `pareto`: from plans that were offered to ones near them. No torch."""

from __future__ import annotations

from itertools import zip_longest

from lohan_fx.plan import Plan
from lohan_fx.planners.assign import assignment_of
from lohan_fx.planners.exhaustive import exchanges
from lohan_fx.planners.model import Model
from lohan_fx.planners.pareto_offers import Candidate, Offers, faster
from lohan_fx.simulate import step_seconds
from lohan_fx.workload import Workload


def climb(offers: Offers, start: Plan, simulations: int) -> None:
    """Change one unit or residual at a time, the largest first; the first change that gains is
    made, until none does, or so many plans were simulated."""
    model, w = offers.model, offers.model.workload
    assignment = assignment_of(model, start)
    if assignment is None:
        return
    seconds = step_seconds(w, start, model.hw)
    stop = offers.num_simulated + simulations
    names, idle, k = _by_size(w), 0, 0
    while idle < len(names) and offers.num_simulated < stop and not offers.done:
        name = names[k % len(names)]
        k, idle = k + 1, idle + 1
        for option in model.groups[model.group_of[name]].options:
            if option == assignment[name] or offers.num_simulated >= stop:
                continue
            changed = {**assignment, name: option}
            if not faster(offers.bound_of(changed), seconds):
                continue
            made_s = offers.seconds_of(changed)
            if faster(made_s, seconds):
                assignment, seconds, idle = changed, made_s, 0


def exchange_choices(offers: Offers, starts: int, drafts: int) -> None:
    """From the best plans of so many strategies, change one or two choices at a time.

    Regions are as late as they can be, or joined, across blocks too: so this finds what
    `climb` cannot. What one start has led to is not offered again from another.
    """
    stop = offers.num_drafts + drafts
    made = offers.model
    model = Model(made.workload, made.hw, made.options, by_value=True)
    found = sorted(offers.by_source.values(), key=lambda candidate: candidate.order)
    for start in found[:starts]:
        _descend(offers, model, start, stop)


def _descend(offers: Offers, model: Model, start: Candidate, stop: int) -> None:
    """The first of the changes, by ascending bound, that gains; again, until none does."""
    found, seconds = assignment_of(offers.model, start.plan), start.seconds
    if found is not None:
        seconds = min(seconds, offers.simulate_late(found, seconds))
    while found is not None and not offers.done:
        now, found = found, None
        for bound_s, changed in exchanges(model, offers.budget, now):
            if offers.num_drafts >= stop or not faster(bound_s, seconds):
                return
            made_s = offers.simulate_late(changed, seconds)
            if made_s < seconds:
                found, seconds = changed, made_s
                break


def _by_size(workload: Workload) -> list[str]:
    """Residuals and units in turn, the largest of each first."""
    units = [(u.compute_bytes + u.state_bytes, u.name) for u in workload.units]
    sizes = [(workload.values[v].num_bytes, v) for v in workload.residuals]
    ordered = (sorted(of, key=lambda item: (-item[0], item[1])) for of in (sizes, units))
    return [item[1] for pair in zip_longest(*ordered) for item in pair if item is not None]
