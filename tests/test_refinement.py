"""The first steps correct the cost model once, and a better plan replaces the first one exactly."""

from __future__ import annotations

import contextlib
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lohan_fx
import lohan_fx.compiled.allocation
import lohan_fx.compiled.replanning
import lohan_fx.refinement
from lohan_fx.api import LohanModule
from lohan_fx.errors import InsufficientMemoryError
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import Plan, Tier
from lohan_fx.planners import PlannerOptions, make_plan
from lohan_fx.refinement import RECORDED_STEPS, Outcome, corrected, running_share
from lohan_fx.simulate import simulate
from lohan_fx.timeline import Span, Timeline
from lohan_fx.workload import Workload
from tests.loops import check, windows
from tests.models import loss_of, make
from tests.training import (
    Training,
    assert_identical,
    cpu_hardware,
    eager,
    remember_captures,
    step,
    training_of,
)
from tests.workloads import budget, gpt_workload, small_hardware

NUM_STEPS = 7


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator finds keep-all twice as fast: on models of this size the clock decides nothing
    twice alike. What is measured, moved and run is real."""

    def seconds(_: Workload, plan: Plan, __: HardwareProfile) -> float:
        return {"swap-all": 2.0, "keep-all": 1.0}[plan.strategy]

    monkeypatch.setattr(lohan_fx.compiled.replanning, "step_seconds", seconds)


class Turns:
    """Strategies in turn, each with a tier for every unit but the first, which is in `others`."""

    def __init__(self, *turns: tuple[str, Tier], others: Tier = "host") -> None:
        self.turns = turns
        self.others = others
        self.profiles: list[HardwareProfile] = []

    def __call__(
        self,
        workload: Workload,
        hw: HardwareProfile,
        budget: MemoryBudget,
        options: PlannerOptions,
    ) -> Plan:
        strategy, tier = self.turns[min(len(self.profiles), len(self.turns) - 1)]
        self.profiles.append(hw)
        fixed: dict[str, Tier] = {u.name: tier for u in workload.units}
        fixed[workload.units[0].name] = self.others
        fixed.update(options.fixed_units or {})
        made = PlannerOptions(schedule=options.schedule, swap_to="host", fixed_units=fixed)
        return make_plan(strategy, workload, hw, budget, made)


def trained(
    directory: Path, strategy: Any, name: str = "gpt2", **options: Any
) -> tuple[LohanModule, dict[str, Any]]:
    model, inputs = make(name)
    training = training_of("adamw", model)
    made = lohan_fx.compile(
        model,
        hw=cpu_hardware(directory),
        optimizer=training.optimizer,
        strategy=strategy,
        **{"refine": True, **options},
    )
    assert isinstance(made, LohanModule)
    with pytest.MonkeyPatch.context() as patch:
        remember_captures(patch, name)
        for seed, wanted in enumerate(eager(name, "adamw", NUM_STEPS)):
            assert_identical(step(name, made, inputs, seed, training.step), wanted)
    return made, inputs


def refined_mlp(directory: Path, **options: Any) -> tuple[LohanModule, dict[str, Any], Training]:
    """Another plan is to replace its first one; nothing has run."""
    model, inputs = make("mlp")
    training = training_of("adamw", model)
    made = lohan_fx.compile(
        model,
        hw=cpu_hardware(directory),
        optimizer=training.optimizer,
        strategy=Turns(("swap-all", "host"), ("keep-all", "device")),
        refine=True,
        **options,
    )
    assert isinstance(made, LohanModule)
    return made, inputs, training


def tiers(model: LohanModule) -> dict[str, str]:
    assert model.lohan.memory is not None
    return {s.unit.name: s.tier for s in model.lohan.memory.states.units}


@pytest.mark.parametrize(
    ("first", "second", "schedule"),
    [  # each schedule in one direction, the others are slow
        pytest.param(
            ("swap-all", before),
            ("keep-all", after),
            schedule,
            marks=() if (k + (before == "host")) % 2 else pytest.mark.slow,
        )
        for before, after in (("host", "device"), ("device", "host"))
        for k, schedule in enumerate(("optimized", "overlapped", "serial"))
    ],
)
@pytest.mark.usefixtures("judged")
def test_a_faster_plan_replaces_the_first_one_and_the_run_stays_exact(
    tmp_path: Path, first: tuple[str, Tier], second: tuple[str, Tier], schedule: str
) -> None:
    strategy = Turns(first, second, others="host")
    model, _ = trained(tmp_path, strategy, schedule=schedule)
    refined = model.lohan.refined
    assert refined is not None
    assert len(strategy.profiles) == 2
    assert (refined.before_s, refined.after_s) == (2.0, 1.0)
    assert model.plan.strategy == second[0]
    found = tiers(model)
    unit, *others = found
    assert found[unit] == "host"
    assert {found[o] for o in others} == {second[1]}
    assert set(refined.moved) == set(others)
    states = model.lohan.optimizer.state_dict()["state"]  # type: ignore[union-attr]
    assert {float(s["step"]) for s in states.values()} == {float(NUM_STEPS)}
    model.lohan.close()


@pytest.mark.parametrize("how", ["number", "kept"])
@pytest.mark.usefixtures("judged")
def test_of_several_backwards_whole_steps_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The first update of all, in the first step, is a slow one. And a plan must not change between
    two backwards, when units have sums."""
    measured: list[Timeline] = []
    shares: list[int] = []

    def note(hw: HardwareProfile, timeline: Timeline, *rest: Any) -> HardwareProfile:
        measured.append(timeline)
        return corrected(hw, timeline, *rest)

    def note_runs(timeline: Timeline, timed: Workload, plan: Plan, num_runs: int) -> float:
        shares.append(num_runs)
        return running_share(timeline, timed, plan, num_runs)

    monkeypatch.setattr(lohan_fx.refinement, "corrected", note)
    monkeypatch.setattr(lohan_fx.refinement, "running_share", note_runs)
    sizes = (3, 3, 3, 3, 3, 3) if how == "number" else (3, 3, 1, 3, 2, 3)
    seen: list[bool] = []

    def between(model: nn.Module, _: Training) -> None:
        if isinstance(model, LohanModule):
            seen.append(model.lohan.refined is not None)

    options: dict[str, Any] = {"number": {"accumulate": 3}, "kept": {"gradients": "kept"}}[how]
    check(
        "mlp",
        windows("mlp", sizes, between=between),
        cpu_hardware(tmp_path),
        monkeypatch,
        strategy=Turns(("swap-all", "host"), ("keep-all", "device")),
        refine=True,
        **options,
    )
    (timeline,) = measured
    assert seen == [False] * sum(sizes[:4]) + [True] * sum(sizes[4:])
    assert shares == [sum(sizes[2:4])]
    updates = [s.name for s in timeline.by_lane["cpu"] if s.kind == "update"]
    assert len(updates) == len(RECORDED_STEPS) * len(set(updates)) > 0


@pytest.mark.usefixtures("judged")
def test_forwards_that_wait_together_are_all_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []

    def note_runs(timeline: Timeline, timed: Workload, plan: Plan, num_runs: int) -> float:
        counted.append(num_runs)
        return running_share(timeline, timed, plan, num_runs)

    monkeypatch.setattr(lohan_fx.refinement, "running_share", note_runs)
    made, inputs, training = refined_mlp(tmp_path, forwards=2)
    made.lohan.prepare(**inputs)
    for _ in range(RECORDED_STEPS[-1] + 1):
        losses = [loss_of("mlp", made(**_detached(inputs))) for _ in range(2)]
        for loss in losses:
            loss.backward()
        training.step()
    assert counted == [2 * len(RECORDED_STEPS)]
    made.lohan.close()


@pytest.mark.usefixtures("judged")
def test_a_plan_that_gains_nothing_stays(tmp_path: Path) -> None:
    strategy = Turns(("keep-all", "host"), ("swap-all", "host"))
    model, _ = trained(tmp_path, strategy)
    assert model.lohan.refined is not None
    assert not model.lohan.refined.changed
    assert model.plan.strategy == "keep-all"
    assert model.lohan.program().workload.ops[0].seconds > 0
    model.lohan.close()


def test_the_second_plan_is_made_with_measured_rates(tmp_path: Path) -> None:
    strategy = Turns(("swap-all", "host"))
    model, _ = trained(tmp_path, strategy)
    first, second = strategy.profiles
    assert second.cpu_optimizer_params_per_s != first.cpu_optimizer_params_per_s
    assert model.lohan.options.hw == second
    model.lohan.close()


@pytest.mark.usefixtures("judged")
def test_units_stay_on_the_ssd_or_off_it(tmp_path: Path) -> None:
    class ToSsd(Turns):
        """The second plan would move a unit to the SSD."""

        def __call__(self, *given: Any) -> Plan:
            self.others = "ssd" if self.profiles else "host"
            return super().__call__(*given)

    model, _ = trained(tmp_path, ToSsd(("swap-all", "host"), ("keep-all", "device")))
    assert model.plan.strategy == "swap-all"
    assert set(tiers(model).values()) == {"host"}
    model.lohan.close()
    model, _ = trained(tmp_path, Turns(("swap-all", "host"), ("keep-all", "device"), others="ssd"))
    assert next(iter(tiers(model).values())) == "ssd"
    model.lohan.close()


@pytest.mark.usefixtures("judged")
def test_without_room_to_move_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    arena = lohan_fx.compiled.allocation.Arena
    made: list[int] = []

    def refuse_the_second_move(num_bytes: int, **options: Any) -> Any:
        if "move_units" in _callers():
            made.append(num_bytes)
            if len(made) == 2:
                raise InsufficientMemoryError("host", num_bytes, 0, where="here", advice="wait")
        return arena(num_bytes, **options)

    monkeypatch.setattr(lohan_fx.compiled.allocation, "Arena", refuse_the_second_move)
    strategy = Turns(("swap-all", "device"), ("keep-all", "host"))
    with caplog.at_level(logging.WARNING, "lohan_fx"):
        model, _ = trained(tmp_path, strategy)
    assert len(made) == 2
    assert "no room to change the plan" in caplog.text
    found = list(tiers(model).values())
    assert found.count("device") == len(found) - 2  # the first unit was there, one has moved
    assert len(strategy.profiles) == 3
    model.lohan.close()


def _callers() -> set[str]:
    frame, found = sys._getframe(1), set()
    while frame is not None:
        found.add(frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return found


def test_nothing_is_refined_by_default_on_a_cpu_or_while_the_user_measures(tmp_path: Path) -> None:
    strategy = Turns(("swap-all", "host"), ("keep-all", "device"))
    model, _ = trained(tmp_path, strategy, refine="auto")
    assert len(strategy.profiles) == 1
    assert model.lohan.refined is None
    model.lohan.close()

    model, inputs = make("gpt2")  # type: ignore[assignment]
    training = training_of("adamw", model)
    made = lohan_fx.compile(
        model,
        hw=cpu_hardware(tmp_path),
        optimizer=training.optimizer,
        strategy=strategy,
        refine=True,
    )
    assert isinstance(made, LohanModule)
    wanted = eager("gpt2", "adamw", NUM_STEPS)
    assert_identical(step("gpt2", made, inputs, 0, training.step), wanted[0])
    with made.lohan.record() as recorder:
        for seed in range(1, NUM_STEPS):
            assert_identical(step("gpt2", made, inputs, seed, training.step), wanted[seed])
    assert made.lohan.refined is None
    assert recorder.timeline("mine").spans
    made.lohan.close()


@pytest.mark.usefixtures("judged")
@pytest.mark.parametrize("measured", RECORDED_STEPS)
def test_a_step_that_the_user_records_ends_the_refinement(tmp_path: Path, measured: int) -> None:
    """One of the two that were to be recorded would be missing."""
    made, inputs, training = refined_mlp(tmp_path)
    for index in range(RECORDED_STEPS[-1] + 2):
        with made.lohan.record() if index + 1 == measured else contextlib.nullcontext():
            step("mlp", made, inputs, index, training.step)
    assert made.lohan.refined is None
    assert len(made.lohan.options.strategy.profiles) == 1  # type: ignore[union-attr]
    assert made.lohan.memory is not None
    assert made.lohan.memory.lanes.recorder is None
    made.lohan.close()


@pytest.mark.usefixtures("judged")
def test_other_inputs_in_between_start_the_measurement_again(tmp_path: Path) -> None:
    made, inputs, training = refined_mlp(tmp_path)
    short = {k: v[:1] if isinstance(v, torch.Tensor) and v.dim() else v for k, v in inputs.items()}
    for index in range(RECORDED_STEPS[-1] + 2):
        made.lohan.prepare(**inputs)
        given = short if index == 2 else inputs
        assert made.lohan.refined is None
        step("mlp", made, _detached(given), index, training.step)
    made.lohan.close()


def _detached(inputs: dict[str, Any]) -> dict[str, Any]:
    return {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}


# -- the corrected profile -------------------------------------------------------------------------


def _span(lane: Any, kind: str, name: str, start: float, end: float, num_bytes: int = 0) -> Span:
    return Span(lane=lane, kind=kind, name=name, start_s=start, end_s=end, num_bytes=num_bytes)


def test_rates_are_bytes_by_seconds(tmp_path: Path) -> None:
    hw = cpu_hardware(tmp_path)
    workload = gpt_workload()
    unit = next(u for u in workload.units if u.trainable)
    slower = hw.cpu_optimizer_params_per_s / 2
    second = int(hw.h2d_bytes_per_s / 2) // 2**20 * 2**20
    ssd = int(hw.ssd_read_bytes_per_s)
    timeline = Timeline(
        name="measured",
        spans=(
            _span("h2d", "prefetch", "x", 0, 1, second),
            _span("h2d", "prefetch", "tiny", 1, 9, 8),  # latency
            _span("cpu", "update", unit.name, 0, unit.num_params / slower),
            _span("ssd", "prefetch", "y", 0, 2, ssd // 2),  # two reads at once, in two seconds
            _span("ssd", "prefetch", "z", 0, 2, ssd // 2),
        ),
    )
    options = PlannerOptions(schedule="overlapped", states="host")
    plan = make_plan("recompute-all", workload, small_hardware(), budget(), options)
    found = corrected(hw, timeline, workload, plan)
    assert found.h2d_bytes_per_s == second
    assert found.d2h_bytes_per_s == hw.d2h_bytes_per_s
    assert found.cpu_optimizer_params_per_s == pytest.approx(slower)
    assert found.ssd_read_bytes_per_s == pytest.approx(hw.ssd_read_bytes_per_s / 2, rel=1e-6)
    assert found.ssd_write_bytes_per_s == pytest.approx(hw.ssd_write_bytes_per_s / 2, rel=1e-6)
    assert found.duplex_bytes_per_s <= found.h2d_bytes_per_s + found.d2h_bytes_per_s


def test_an_update_that_takes_up_a_sum_is_not_a_slow_one() -> None:
    """It moves 32 bytes a parameter, not 28, in the simulator, too."""
    hw = small_hardware()
    workload = gpt_workload()
    units = []
    for unit in workload.units:
        size = 4 * unit.num_params
        units.append(replace(unit, state_bytes=unit.state_bytes + size, accumulator_bytes=size))
    adding = replace(workload, units=tuple(units))
    room, options = budget(), PlannerOptions(schedule="optimized", states="host")
    spans = []
    for given in (workload, adding):
        plan = make_plan("recompute-all", given, hw, room, options)
        spans.append(simulate(given, plan, hw).timeline.by_lane["cpu"])
    plain, summed = (sum(s.seconds for s in each if s.kind == "update") for each in spans)
    assert summed == pytest.approx(plain * 32 / 28)
    timeline = Timeline(name="measured", spans=spans[1])
    found = corrected(hw, timeline, adding, plan)
    assert found.cpu_optimizer_params_per_s == pytest.approx(hw.cpu_optimizer_params_per_s)


def test_a_rate_that_is_far_off_is_not_believed() -> None:
    hw = small_hardware()
    timeline = Timeline(name="odd", spans=(_span("d2h", "offload", "x", 0, 1e3, 2**20),))
    workload = gpt_workload()
    plan = make_plan("recompute-all", workload, hw, budget(), PlannerOptions())
    assert corrected(hw, timeline, workload, plan).d2h_bytes_per_s == hw.d2h_bytes_per_s / 4


@pytest.mark.usefixtures("judged")
def test_the_module_says_what_it_was(tmp_path: Path) -> None:
    model, _ = trained(tmp_path, Turns(("swap-all", "host"), ("keep-all", "device")))
    assert model.lohan.refined is not None
    text = model.lohan.refined.text()
    assert "another, which replaces it" in text
    assert "Both are predictions, of one forward, backward and its updates" in text
    assert isinstance(model, nn.Module)
    assert "refined" in model.report()
    model.lohan.close()


def test_what_is_predicted_is_said_to_be_that() -> None:
    """Users compare it with the time of their steps; a plan that stays has one figure."""
    stays = Outcome(before_s=0.25, after_s=0.25, moved=(), seconds=1.0).text()
    assert "the simulator predicts 0.25 s a step" in stays
    assert "This is a prediction, of one forward" in stays
    assert "faster by more than 2%: the plan stays" in stays
    changed = Outcome(before_s=2e-4, after_s=1.5e-4, moved=("h0",), seconds=1.0).text()
    assert "0.0002 s a step of the first plan and 0.00015 s of another" in changed
    assert "1 unit elsewhere" in changed
    assert "not times of steps that ran" in changed


def test_ops_are_not_slower_together_than_they_run() -> None:
    """What timing adds to ops by themselves is taken off: recorded steps say how much."""
    hw = small_hardware()
    workload = gpt_workload()
    options = PlannerOptions(schedule="optimized", states="host")
    plan = make_plan("recompute-all", workload, hw, budget(), options)
    step = simulate(workload, plan, hw).timeline
    seconds = {op.name: op.seconds for op in workload.ops}

    def share(factor: float, num_runs: int = 1) -> float:
        timed = workload.timed({op: factor * s for op, s in seconds.items()})
        return running_share(step, timed, plan, num_runs)

    assert share(1.0) == pytest.approx(1.0)
    assert share(1.25) == pytest.approx(0.8)
    assert share(0.5) == 1.0  # what waits between ops is not theirs
    assert share(1.0, num_runs=2) == pytest.approx(0.5)
    assert share(100.0) == 0.25
    nothing = Timeline(name="nothing", spans=())
    assert running_share(nothing, workload, plan, 1) == 1.0
