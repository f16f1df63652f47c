"""Units that move between tiers, and come to keep a compute copy or lose it, between two steps."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import lohan_fx.compiled.allocation
import lohan_fx.compiled.replanning
from lohan_fx.footprint import tiers_of
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import Plan, Tier
from lohan_fx.planners import make_plan
from lohan_fx.runtime.states import ModelStates
from lohan_fx.runtime.unit_states import UnitStates
from tests.casting import (
    ALWAYS,
    KEPT,
    Casts,
    Run,
    assert_equal,
    assert_in_memory,
    assert_same_run,
    units_of,
)
from tests.training import (
    identical,
    remember_captures,
)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of `Run` is traced once."""
    remember_captures(monkeypatch, "casts, tied")


PLACES: dict[str, tuple[Tier, bool]] = {
    "kept": ("device", False),
    "cast": ("device", True),
    "host": ("host", False),
}


def place_of(states: UnitStates) -> str:
    return next(k for k, v in PLACES.items() if v == (states.tier, states.casts))


def planned(run: Run, places: dict[str, str], strategy: str = "keep-all") -> Plan:
    """A plan with units in these places."""
    lohan = run.model.lohan
    options = replace(
        lohan.options.planner,
        fixed_units={name: PLACES[place][0] for name, place in places.items()},
        fixed_casts=[name for name, place in places.items() if PLACES[place][1]],
    )
    workload = lohan.program().workload
    return make_plan(strategy, workload, lohan.options.hw, lohan.options.budget, options)


def move(run: Run, places: dict[str, str], strategy: str = "swap-all") -> tuple[str, ...]:
    """Let another plan replace the present one, as after measured steps; the units that moved. No
    value may change by it."""
    lohan = run.model.lohan
    lohan.sync()

    def values() -> list[Tensor]:
        entries = run.training.optimizer.state_dict()["state"].values()
        each = [*run.model.state_dict().values(), *(v for e in entries for v in e.values())]
        grads = [p.grad for p in run.plain.parameters() if p.grad is not None]
        return [torch.as_tensor(v).detach().clone() for v in (*each, *grads)]

    before = values()
    _, moved = lohan._replanner._replace(lohan.program(), planned(run, places, strategy))
    assert_equal(values(), before)
    return moved


def places_of(run: Run) -> dict[str, str]:
    return {s.unit.name: place_of(s) for s in units_of(run.model)}


def assert_consistent(run: Run) -> None:
    assert_in_memory(run.model, {n for n, place in places_of(run).items() if place == "cast"})
    plan = run.model.plan
    assert {s.unit.name: s.tier for s in units_of(run.model)} == tiers_of(plan)
    copies = [s.flats for s in units_of(run.model) if not s.casts]
    for flats in copies:  # what was kept, or made anew, is what the master says
        assert flats is not None
        assert identical(flats.compute, flats.master.bfloat16())


MOVES = [*itertools.permutations(PLACES, 2)]


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "one by one"])
@pytest.mark.parametrize(("before", "after"), MOVES)
def test_units_move(before: str, after: str, at_once: bool, hw: HardwareProfile) -> None:
    which = MOVES.index((before, after))
    more: dict[str, Any] = (
        {"schedule": "speculative", "clip_grad_norm": ALWAYS},
        {"schedule": "serial", "gradients": "kept"},
        {"schedule": "overlapped"},
    )[which % 3]
    tier, casts = PLACES[before]
    run = Run(hw, Casts(int(casts), tiers=(tier,)), **more)
    kept = Run(hw, KEPT, **more)
    assert_equal(run.steps(0, 2), kept.steps(0, 2))
    names = list(places_of(run))
    assert set(places_of(run).values()) == {before}
    seed = 2
    for group in [names] if at_once else [[name] for name in names]:
        wanted = {**places_of(run), **dict.fromkeys(group, after)}
        assert set(move(run, wanted)) == set(group)
        assert places_of(run) == wanted
        assert_consistent(run)
        assert_equal(run.steps(seed, seed + 1), kept.steps(seed, seed + 1))
        seed += 1
    assert_equal(run.steps(seed, seed + 2), kept.steps(seed, seed + 2))
    assert_consistent(run)
    for each in (run, kept):
        each.close()
    assert_same_run(run, kept)


@pytest.mark.usefixtures("traced")
def test_there_and_back(hw: HardwareProfile) -> None:
    """Units in all places at once, all of which move on, and once more."""
    run, kept = (Run(hw, strategy, schedule="deferred") for strategy in (Casts(2), KEPT))
    for turn in range(4):
        assert_equal(run.steps(turn, turn + 1), kept.steps(turn, turn + 1))
        every = itertools.cycle(PLACES)
        places = {name: next(every) for name in places_of(run)}
        for _ in range(turn):
            values = [*places.values()]
            places = dict(zip(places, values[1:] + values[:1], strict=True))
        move(run, places)
        assert places_of(run) == places
        assert len(set(places.values())) == len(PLACES)
        assert_consistent(run)
    assert_equal(run.steps(4, 6), kept.steps(4, 6))
    for each in (run, kept):
        each.close()
    assert_same_run(run, kept)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("turn", [1, 2])
@pytest.mark.parametrize(("before", "after"), [m for m in MOVES if m != ("kept", "cast")])
def test_without_room_to_move_the_run_goes_on(
    before: str, after: str, turn: int, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units that have moved by then stay where they are, and others where they were."""
    tier, casts = PLACES[before]
    run = Run(hw, Casts(int(casts), tiers=(tier,)), schedule="overlapped")
    kept = Run(hw, KEPT, schedule="overlapped")
    assert_equal(run.steps(0, 2), kept.steps(0, 2))
    calls = itertools.count(1)
    what: tuple[Any, str] = (UnitStates, "allocate")
    if after == "host":
        what = lohan_fx.compiled.allocation, "Arena"
    elif before == "cast":
        what = UnitStates, "new_copy"
    plain = getattr(*what)

    def refusing(*args: Any, **options: Any) -> Any:
        if next(calls) == turn:
            raise torch.OutOfMemoryError("no room here")
        return plain(*args, **options)

    names = list(places_of(run))
    assert len(names) > 2
    with monkeypatch.context() as patch:
        patch.setattr(*what, refusing)
        moved = move(run, dict.fromkeys(names, after))
    assert next(calls) > turn
    assert len(moved) == turn - 1
    assert places_of(run) == {n: after if n in moved else before for n in names}
    assert_consistent(run)
    assert_equal(run.steps(2, 4), kept.steps(2, 4))
    assert set(move(run, dict.fromkeys(names, after))) == set(names) - set(moved)
    assert_consistent(run)
    assert_equal(run.steps(4, 5), kept.steps(4, 5))
    for each in (run, kept):
        each.close()
    assert_same_run(run, kept)


@pytest.mark.usefixtures("traced")
def test_those_that_give_memory_back_move_first(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit that is to have a copy again waits for one that is to have none, or to leave."""
    order: list[str] = []
    move_one = ModelStates.move

    def noting(self: ModelStates, states: UnitStates, *args: Any, **options: Any) -> None:
        order.append(states.unit.name)
        move_one(self, states, *args, **options)

    monkeypatch.setattr(ModelStates, "move", noting)
    run = Run(hw, Casts(), schedule="serial")
    run.steps(0, 1)
    names = list(places_of(run))
    move(run, dict(zip(names, ["cast", "kept", "host", "kept"], strict=False)))
    order.clear()
    move(run, dict(zip(names, ["kept", "cast", "cast", "host"], strict=False)))
    assert len(order) == len(names)
    assert order.index(names[1]) < order.index(names[0])
    assert order.index(names[1]) < order.index(names[2])
    if len(names) > 3:
        assert order.index(names[3]) < order.index(names[0])
    run.close()


@pytest.mark.usefixtures("traced")
def test_measured_steps_may_change_which_units_have_copies(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = iter([Casts(1, "swap-all"), KEPT])
    seconds = {"swap-all": 2.0, "keep-all": 1.0}
    monkeypatch.setattr(
        lohan_fx.compiled.replanning, "step_seconds", lambda _, plan, __: seconds[plan.strategy]
    )

    def strategy(*given: Any) -> Plan:
        return next(turns)(*given)

    run, kept = Run(hw, strategy, refine=True), Run(hw, KEPT)
    assert_equal(run.steps(0, 7), kept.steps(0, 7))
    refined = run.model.lohan.refined
    assert refined is not None
    assert set(refined.moved) == set(places_of(run))
    assert set(places_of(run).values()) == {"kept"}
    for each in (run, kept):
        each.close()
    assert_same_run(run, kept)
