"""Units on the device without a compute copy: what users see of it, other programs of the model,
and memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lohan_fx.api import LohanModule
from lohan_fx.errors import PlanError, format_bytes
from lohan_fx.footprint import cast_units
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import Plan, Tier
from lohan_fx.planners import PlannerOptions
from lohan_fx.planners.random_policy import RandomPolicy
from lohan_fx.program import lower
from lohan_fx.runtime.unit_states import UnitStates
from lohan_fx.simulate import simulate
from lohan_fx.workload import Workload
from tests import checkpoints
from tests.casting import (
    HARD,
    KEPT,
    Casts,
    Run,
    assert_equal,
    assert_in_memory,
    assert_same_run,
    trained_units,
    units_of,
)
from tests.loops import compiled
from tests.models import loss_of, make
from tests.training import (
    identical,
    remember_captures,
    step,
    training_of,
)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of `Run` is traced once."""
    remember_captures(monkeypatch, "casts, tied")


# -- what users see of it ------------------------------------------------------------------------


@pytest.mark.usefixtures("traced")
def test_parameters_show_the_masters(hw: HardwareProfile) -> None:
    """So does state_dict(); what they have beyond bfloat16 is there, and stays when it closes."""
    runs = [Run(hw, strategy, schedule="overlapped") for strategy in (Casts(), KEPT)]
    a, b = runs
    assert_equal(a.steps(0, 2), b.steps(0, 2))
    for run in runs:
        run.model.lohan.sync()
    assert_in_memory(a.model, trained_units(a.model))
    found = a.model.state_dict()
    assert any(not torch.equal(v, v.bfloat16().float()) for v in found.values())
    assert_equal([*found.values()], [*b.model.state_dict().values()])
    assert_same_run(a, b)
    for run in runs:
        run.close()
    assert_equal([*found.values()], [*a.plain.state_dict().values()])
    assert_same_run(a, b)


def load(run: Run) -> None:
    state = {k: v + 0.01 for k, v in run.model.state_dict().items()}
    run.model.load_state_dict(state)


def mutate(run: Run) -> None:
    """In place, and by other memory."""
    with torch.no_grad():
        for i, p in enumerate(run.plain.parameters()):
            if i % 2:
                p.mul_(1.5)
            else:
                p.data = p.detach() + 0.01


def a_weight(run: Run) -> Tensor:
    return run.plain.get_parameter("layers.0.linear.weight")


def one_row(run: Run) -> None:
    with torch.no_grad():
        a_weight(run)[1] = 0.5


def one_row_of_data(run: Run) -> None:
    """Where nobody counts."""
    a_weight(run).data[1] = 0.5


def one_row_taken_over(run: Run) -> None:
    one_row_of_data(run)
    run.model.lohan.take_over()


SEEN: dict[Any, Callable[[Run], None]] = {one_row_of_data: one_row_taken_over}
"""What to do instead where there is a copy: it is not made anew of what nobody has counted."""


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("change", [load, mutate, one_row, one_row_of_data])
@pytest.mark.parametrize("schedule", ["serial", "deferred"])
def test_what_is_written_is_seen_by_the_next_forward(
    schedule: str, change: Callable[[Run], None], hw: HardwareProfile
) -> None:
    runs = [Run(hw, strategy, schedule=schedule) for strategy in (HARD[0], KEPT)]
    noted = []
    for run, how in zip(runs, (change, SEEN.get(change, change)), strict=True):
        found = run.steps(0, 2)
        run.model.lohan.sync()
        before = [p.detach().clone() for p in run.plain.parameters()]
        how(run)
        assert not all(map(identical, before, run.plain.parameters()))
        noted.append(found + run.steps(2, 4))
    assert_in_memory(runs[0].model, trained_units(runs[0].model))
    assert_equal(*noted)
    assert_same_run(*runs)
    for run in runs:
        run.close()


@pytest.mark.parametrize(("saver", "loader"), [*itertools.permutations((1, 2, 0), 2)])
def test_checkpoints(saver: int, loader: int, tmp_path: Path) -> None:
    """From a run into one whose units keep other copies."""
    options: dict[str, Any] = {"dtype": "bf16", "schedule": "serial", "buffers": False}
    with pytest.MonkeyPatch.context() as patch:
        remember_captures(patch, "casts, checkpoints")
        plain = checkpoints.started(tmp_path / "whole", strategy=KEPT, **options)
        first = checkpoints.started(tmp_path / "a", strategy=Casts(saver), **options)
        torch.manual_seed(1)
        losses = plain.train(4)
        torch.manual_seed(1)
        assert first.train(2) == losses[:2]
        saved = first.save(tmp_path / "saved")
        keys = load_file(saved / "optimizer.safetensors").keys()
        assert keys
        assert not [key for key in keys if key.endswith("fp32_master")]  # the weights are that
        first.close()
        second = checkpoints.started(tmp_path / "b", seed=1, strategy=Casts(loader), **options)
        second.load(tmp_path / "saved")
        assert second.train(2) == losses[2:]
        checkpoints.assert_same(checkpoints.state_of(second), checkpoints.state_of(plain))
        second.close()
        plain.close()


@pytest.mark.parametrize("ran", [False, True], ids=["new", "ran"])
def test_masters_that_a_checkpoint_has_beside_its_weights(ran: bool, tmp_path: Path) -> None:
    """The run that saved it is in bfloat16; this one shows the masters."""
    options: dict[str, Any] = {"dtype": "bf16", "schedule": "serial", "buffers": False}
    saving = checkpoints.started(
        tmp_path / "saving", strategy=Casts(), parameters=torch.bfloat16, **options
    )
    saving.train(2)
    saving.save(tmp_path / "saved")
    saving.close()
    found = []
    for strategy in (Casts(), KEPT):
        run = checkpoints.started(tmp_path / "run", seed=1, strategy=strategy, **options)
        if ran:
            run.train(1)
        run.load(tmp_path / "saved")
        torch.manual_seed(3)
        found.append((run.train(2), checkpoints.state_of(run)))
        assert bool(cast_units(run.model.plan)) == bool(strategy.every)
        run.close()
    (losses, state), (wanted, its) = found
    assert losses == wanted
    checkpoints.assert_same(state, its)


@pytest.mark.parametrize("strategy", [Casts(1), Casts(2)], ids=["all", "every second"])
def test_models_on_meta(strategy: Casts, hw: HardwareProfile) -> None:
    weights = {k: v.clone() for k, v in make("mlp")[0].named_parameters()}
    _, inputs = make("mlp")
    found = []
    for given, how in ((weights, strategy), (None, KEPT)):
        model, _ = make("mlp")
        if given is not None:
            model = model.to("meta")
        training = training_of("adamw", model)
        options: dict[str, Any] = {"dtype": "bf16", "weights": given}
        made = compiled(model, training.optimizer, hw, strategy=how, **options)
        snapshots = [step("mlp", made, inputs, seed, training.step) for seed in range(2)]
        assert bool(cast_units(made.plan)) == bool(how.every)
        made.lohan.close()
        found.append([t for s in snapshots for t in (s.loss, *s.tensors.values())])
    assert_equal(*found)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("schedule", ["optimized", "serial"])
def test_a_cast_that_gets_no_memory(
    schedule: str, phase: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step fails, and may be run again; with a schedule that updates units in backward, if none
    has been by then."""
    run, kept = (Run(hw, s, schedule=schedule) for s in (Casts(), KEPT))
    assert_equal(run.steps(0, 1), kept.steps(0, 1))
    windows = [len(u.windows) for u in run.model.plan.units.values()]
    num_forward = sum(
        x.kind == "fetch_unit" and x.phase == "forward"
        for x in run.model.lohan.program().instructions.instructions
    )
    assert 0 < num_forward < sum(windows)
    calls, plain = itertools.count(1), UnitStates.cast

    def refusing(self: UnitStates) -> Tensor:
        if next(calls) == (2 if phase == "forward" else num_forward + 1):
            raise torch.OutOfMemoryError("no room here")
        return plain(self)

    with monkeypatch.context() as patch:
        patch.setattr(UnitStates, "cast", refusing)
        with pytest.raises(torch.OutOfMemoryError):
            loss_of("tied", run.model(**run.inputs)).backward()
    assert_equal(run.steps(1, 3), kept.steps(1, 3))
    for each in (run, kept):
        each.close()
    assert_same_run(run, kept)


# -- other programs of the model -----------------------------------------------------------------


def half(inputs: dict[str, Any]) -> dict[str, Any]:
    return {k: v[: len(v) // 2] for k, v in inputs.items()}


def evaluated(run: Run, inputs: dict[str, Any]) -> Tensor:
    run.model.eval()
    with torch.no_grad():
        loss = loss_of(run.name, run.model(**inputs)).clone()
    run.model.train()
    return loss


@pytest.mark.parametrize("begins", ["train", "evaluate", "prepare"])
def test_other_programs_obey_what_is_in_memory(
    begins: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though their strategy would choose others: the one that runs first has decided."""
    given: list[PlannerOptions] = []

    def restless(w: Workload, h: HardwareProfile, b: MemoryBudget, options: PlannerOptions) -> Plan:
        given.append(options)
        turn = len(given)
        return Casts(2 if turn == 1 else turn % 2, HARD[0].strategy)(w, h, b, options)

    remember_captures(monkeypatch, "casts, mlp")
    notes: list[list[Tensor]] = []
    for strategy in (restless, KEPT):
        run = Run(hw, strategy, "mlp")
        noted: list[Tensor] = []
        notes.append(noted)
        if begins == "prepare":
            run.model.lohan.prepare(**run.inputs)
        if begins == "evaluate":
            noted.append(evaluated(run, run.inputs))
        noted += run.steps(0, 2)
        noted.append(evaluated(run, run.inputs))
        loss_of(run.name, run.model(**half(run.inputs))).backward()
        run.training.step()
        noted.append(evaluated(run, half(run.inputs)))
        noted += run.steps(2, 3)
        assert len(run.model.lohan.programs) == 4
        if strategy is restless:
            first, *others = run.model.lohan.programs.values()
            assert 0 < len(cast_units(first.plan)) < len(first.plan.units)
            assert all(cast_units(p.plan) == cast_units(first.plan) for p in others)
            assert_in_memory(run.model, cast_units(first.plan))
            assert given[0].fixed_casts is None
            assert all(o.fixed_casts == cast_units(first.plan) for o in given[1:])
        run.close()
    assert_equal(*notes)


# -- memory, and what a plan says ----------------------------------------------------------------


def held_bytes(model: LohanModule) -> int:
    """Of all flats on the device."""
    found: dict[int, int] = {}
    for states in units_of(model):
        flats = states.flats
        if flats is not None and states.tier == "device":
            each = (flats.compute, flats.master, flats.gradient, *flats.moments.values())
            found.update({t.data_ptr(): t.nbytes for t in each if t is not None})
    return sum(found.values())


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_only_the_copies_are_gone(accumulate: int, hw: HardwareProfile) -> None:
    static, held, peak = [], [], []
    options: dict[str, Any] = {"accumulate": accumulate, "schedule": "serial"}
    for strategy in (KEPT, Casts(2), Casts()):
        run = Run(hw, strategy, **options)
        program = run.model.lohan.prepare(**run.inputs)
        static.append(program.memory.static_bytes)
        peak.append(program.memory.peak_bytes)
        held.append(held_bytes(run.model))
        copies = sum(
            program.workload.unit_by_name[name].compute_bytes for name in cast_units(program.plan)
        )
        assert bool(copies) == bool(strategy.every)
        assert held[0] - held[-1] == static[0] - static[-1] == copies
        run.close()
    assert peak[0] > peak[1] > peak[2]


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("strategy", HARD, ids=["swap", "recompute", "every second"])
def test_a_given_plan_runs_and_its_casts_are_work(strategy: Casts, hw: HardwareProfile) -> None:
    first = Run(hw, strategy, schedule="overlapped")
    plan = first.model.lohan.prepare(**first.inputs).plan
    first.close()
    given = Plan.from_dict(plan.to_dict())
    assert given == plan
    assert "with copies cast where they are used" in str(plan)
    run, kept = Run(hw, plan=given), Run(hw, schedule="overlapped")
    noted = [run.steps(0, 1)]
    assert_in_memory(run.model, cast_units(plan))
    with run.model.lohan.record() as recorder:
        noted.append(run.steps(1, 2))
    assert_equal([*noted[0], *noted[1]], kept.steps(0, 2))
    program = run.model.lohan.program()
    assert run.model.plan == plan
    casts = [(x.name, x.phase) for x in program.instructions.instructions if x.kind == "fetch_unit"]
    assert {phase for _, phase in casts} == {"forward", "backward"}
    for timeline in (
        recorder.timeline("recorded"),
        simulate(program.workload, plan, hw).timeline,
    ):
        spans = [s for s in timeline.spans if s.kind == "fetch_unit"]
        assert [(s.name, s.phase) for s in spans] == casts
        assert {(s.lane, s.stall, s.num_bytes) for s in spans} == {("gpu", False, 0)}
        work = sorted(
            (s for s in timeline.by_lane["gpu"] if not s.stall), key=lambda s: (s.start_s, s.end_s)
        )
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in itertools.pairwise(work))
    for s in spans:  # of the simulated one
        unit = program.workload.unit_by_name[s.name.rpartition("#")[0]]
        assert unit.cast_bytes == 4 * unit.num_params + unit.compute_bytes
        assert s.seconds == pytest.approx(unit.cast_bytes / hw.device_bytes_per_s)
    for each in (run, kept):
        each.close()


@pytest.mark.usefixtures("traced")
def test_casts_are_printed(hw: HardwareProfile) -> None:
    run = Run(hw, Casts())
    program = run.model.lohan.prepare(**run.inputs)
    text = str(run.model.graph)
    for x in program.instructions.instructions:
        if x.kind == "fetch_unit":
            size = format_bytes(
                sum(size for _, size in x.births)
            )  # of the copy, as of a fetched one
            assert f"= fetch_unit({x.name}) <- master {size}\n" in text
    assert text.count("<- master") == sum(len(u.windows) for u in program.plan.units.values()) > 0
    run.close()


@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("strategy", [Casts(), RandomPolicy(seed=1), "lohan-resident", "pareto"])
def test_without_a_master_that_is_shown_nothing_is_cast(
    strategy: Any, parameters: torch.dtype, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model in bfloat16, whose parameters are the copies; a model that trains in float32."""
    remember_captures(monkeypatch, "casts, mlp")
    model, inputs = make("mlp")
    model.to(parameters)
    training = training_of("adamw", model)
    dtype = "bf16" if parameters == torch.bfloat16 else None
    options: dict[str, Any] = {"dtype": dtype, "states": "device"}
    made = compiled(model, training.optimizer, hw, strategy=strategy, **options)
    program = made.lohan.prepare(**inputs)
    assert {u.master_bytes for u in program.workload.units} == {0}
    assert not cast_units(program.plan)
    step("mlp", made, inputs, 0, training.step)
    assert not any(s.casts for s in units_of(made))
    made.lohan.close()


def casting(plan: Plan, name: str) -> Plan:
    units = {**plan.units, name: replace(plan.units[name], casts=True)}
    return replace(plan, units=units)


@pytest.mark.parametrize("why", ["bfloat16", "float32", "host", "frozen"])
def test_a_plan_with_casts_that_cannot_be_is_refused(
    why: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember_captures(monkeypatch, "casts, frozen" if why == "frozen" else "casts, mlp")
    dtype = None if why == "float32" else "bf16"

    def build() -> tuple[LohanModule, dict[str, Any], Callable[[Plan], LohanModule]]:
        model, inputs = make("frozen" if why == "frozen" else "mlp")
        if why == "bfloat16":
            model.bfloat16()
        optimizer = training_of("adamw", model).optimizer
        tiers: tuple[Tier, ...] = ("host",) if why == "host" else ("device",)
        first = compiled(model, optimizer, hw, dtype=dtype, strategy=Casts(0, tiers=tiers))
        return first, inputs, lambda plan: compiled(model, optimizer, hw, dtype=dtype, plan=plan)

    first, inputs, again = build()
    program = first.lohan.prepare(**inputs)
    frozen = [u.name for u in program.workload.units if not u.trainable]
    name = frozen[0] if why == "frozen" else program.workload.units[0].name
    first.lohan.close()
    made = again(casting(program.plan, name))
    with pytest.raises(PlanError, match=f"unit {name} .* must keep its compute copy"):
        made.lohan.prepare(**inputs)
    made.lohan.close()


@pytest.mark.parametrize("windows", ["none", "first", "out of order"])
def test_casts_must_be_there_where_they_are_read(
    windows: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember_captures(monkeypatch, "casts, mlp")
    first = Run(hw, Casts(), "mlp")
    program = first.model.lohan.prepare(**first.inputs)
    first.close()
    name, unit = next((n, u) for n, u in program.plan.units.items() if len(u.windows) == 2)
    changed: Any = {
        "none": (),
        "first": unit.windows[:1],
        "out of order": (unit.windows[0], replace(unit.windows[1], fetch_before="no such op")),
    }[windows]
    units = {**program.plan.units, name: replace(unit, windows=changed)}
    with pytest.raises(PlanError):
        lower(program.workload, replace(program.plan, units=units))


@pytest.mark.usefixtures("traced")
def test_windows_of_a_unit_that_keeps_its_copy_are_left_alone(hw: HardwareProfile) -> None:
    """Somebody has only said of a plan that it casts no more."""
    first = Run(hw, Casts(), schedule="overlapped")
    plan = first.model.lohan.prepare(**first.inputs).plan
    first.close()
    units = {name: replace(unit, casts=False) for name, unit in plan.units.items()}
    run, kept = Run(hw, plan=replace(plan, units=units)), Run(hw, schedule="overlapped")
    assert_equal(run.steps(0, 2), kept.steps(0, 2))
    assert_in_memory(run.model, set())
    for each in (run, kept):
        each.close()
