"""Units on the device without a compute copy, which is cast from the master where it is used: the
same training to the bit, in less memory."""

from __future__ import annotations

import copy
import functools
import itertools
import tempfile
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import lohan_fx.compiled.allocation
import lohan_fx.compiled.replanning
from lohan_fx._compat import FakeTensorMode
from lohan_fx.api import LohanModule
from lohan_fx.errors import PlanError
from lohan_fx.footprint import cast_units, may_cast, tiers_of
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import Plan, Tier
from lohan_fx.planners import Planner, PlannerOptions, make_plan
from lohan_fx.planners.random_policy import RandomPolicy
from lohan_fx.program import lower
from lohan_fx.runtime import chunked_update
from lohan_fx.runtime.native import adam_cuda
from lohan_fx.runtime.optimizer import UnitOptimizer
from lohan_fx.runtime.states import ModelStates
from lohan_fx.runtime.unit_states import UnitStates
from lohan_fx.runtime.update_values import Updated
from lohan_fx.simulate import simulate
from lohan_fx.workload import Workload
from tests import checkpoints
from tests.loops import assert_same, compiled, windows
from tests.models import loss_of, make
from tests.test_exactness import Meter
from tests.training import (
    NUM_STEPS,
    Training,
    cpu_hardware,
    identical,
    remember_captures,
    step,
    training_of,
)

NEVER, ALWAYS = 1e9, 1e-2


@dataclass(frozen=True)
class Casts:
    """A strategy, with units on the device (or where `tiers` puts them in turn) of which every
    `every`-th keeps no compute copy (0: all keep theirs)."""

    every: int = 1
    strategy: str | Planner = "keep-all"
    tiers: tuple[Tier, ...] = ("device",)

    def __call__(
        self,
        workload: Workload,
        hw: HardwareProfile,
        budget: MemoryBudget,
        options: PlannerOptions,
    ) -> Plan:
        names = [u.name for u in workload.units]
        tiers: Any = {n: self.tiers[i % len(self.tiers)] for i, n in enumerate(names)}
        may = [u.name for u in workload.units if may_cast(u, tiers[u.name])]
        casts: Collection[str] = may[:: self.every] if self.every else ()
        if options.fixed_casts is not None:
            casts = options.fixed_casts
        options = replace(options, fixed_units=options.fixed_units or tiers, fixed_casts=casts)
        return make_plan(self.strategy, workload, hw, budget, options)


KEPT = Casts(0)


def units_of(model: LohanModule) -> list[UnitStates]:
    assert model.lohan.memory is not None
    return model.lohan.memory.states.units


def trained_units(model: LohanModule) -> set[str]:
    return {s.unit.name for s in units_of(model) if s.layout.trains}


def assert_in_memory(model: LohanModule, casts: Collection[str]) -> None:
    """These units and no others keep no copy; memory is what the programs that ran were made for,
    and parameters are views of the masters."""
    assert casts is not None
    for states in units_of(model):
        flats, name = states.flats, states.unit.name
        assert flats is not None
        assert states.casts == (name in casts)
        if not states.layout.trains:
            continue
        assert flats.master.dtype == torch.float32
        assert (flats.compute is flats.master) == states.casts
        assert states.casts or flats.compute.dtype == states.layout.copy_dtype != torch.float32
        assert states.visible is flats.master
        for s, p in zip(states.layout.slices, states.parameters, strict=True):
            assert p.dtype == torch.float32
            assert p.data_ptr() == flats.master.data_ptr() + 4 * s.offset
    for program in model.lohan.programs.values():
        assert cast_units(program.plan) == set(casts)
        fetched = {x.name for x in program.instructions.instructions if x.kind == "fetch_unit"}
        used = {f"{u}#{k}" for u in casts for k in range(len(program.plan.units[u].windows))}
        assert {x for x in fetched if x.rpartition("#")[0] in casts} == used


class Run:
    """A model in mixed precision that trains."""

    def __init__(
        self,
        hw: HardwareProfile,
        strategy: Any = KEPT,
        name: str = "tied",
        optimizer: str = "adamw",
        **options: Any,
    ) -> None:
        self.name = name
        self.plain, self.inputs = make(name)
        for buffer in self.plain.buffers() if name == "resnet" else ():
            if buffer.is_floating_point():  # no kernel of CPUs has both dtypes
                buffer.data = buffer.bfloat16()
        self.training = training_of(optimizer, self.plain)
        options = {"dtype": "bf16", "strategy": strategy, **options}
        self.model = compiled(self.plain, self.training.optimizer, hw, **options)

    def steps(self, first: int, last: int) -> list[Tensor]:
        """Losses, and all of the model after each."""
        noted: list[Tensor] = []
        for seed in range(first, last):
            found = step(self.name, self.model, self.inputs, seed, self.training.step)
            noted += [found.loss, *found.tensors.values()]
        return noted

    def close(self) -> None:
        self.model.lohan.close()


def assert_equal(a: list[Tensor], b: list[Tensor]) -> None:
    assert len(a) == len(b) > 0
    assert all(map(identical, a, b))


def assert_same_run(a: Run, b: Run) -> None:
    """Weights and states of the optimizers; of models that are closed, too."""
    states = [run.training.optimizer.state_dict()["state"] for run in (a, b)]
    assert states[0].keys() == states[1].keys()
    assert states[0]
    for i, entry in states[0].items():
        assert entry.keys() == states[1][i].keys()
        assert all(identical(v, states[1][i][k]) for k, v in entry.items())
    assert_equal([*a.plain.state_dict().values()], [*b.plain.state_dict().values()])


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of `Run` is traced once."""
    remember_captures(monkeypatch, "casts, tied")


# -- the same training ---------------------------------------------------------------------------

Loop = Callable[[LohanModule, Training, dict[str, Any]], list[Tensor]]


def stepping(name: str, num_steps: int = NUM_STEPS) -> Loop:
    """Steps that move the planned bytes, which casts do not cross any link with."""

    def loop(made: LohanModule, training: Training, inputs: dict[str, Any]) -> list[Tensor]:
        made.lohan.prepare(**inputs)
        noted = []
        for seed in range(num_steps):
            meter = Meter(made)
            found = step(name, made, inputs, seed, training.step)
            noted += [found.loss, *found.tensors.values()]
            meter.check()
        return noted

    return loop


def manually(name: str) -> Loop:
    """Micro-batches, of which the loop says which is a step's last."""

    def loop(made: LohanModule, training: Training, inputs: dict[str, Any]) -> list[Tensor]:
        noted = []
        for size in (1, 3, 2):
            for k in range(size):
                with made.no_sync() if k + 1 < size else nullcontext():
                    torch.manual_seed(10 * size + k)
                    loss = loss_of(name, made(**inputs))
                    loss.backward()
                noted.append(loss.detach())
            training.step()
        return noted + [p.detach().clone() for p in made.parameters()]

    return loop


Left = tuple[list[Tensor], Run]


def run_of(name: str, hw: HardwareProfile, strategy: Any, loop: Loop, **options: Any) -> Left:
    run = Run(hw, strategy, name, **options)
    found = loop(run.model, run.training, run.inputs)
    wanted = trained_units(run.model) if strategy.every == 1 else None
    if strategy.every == 0:
        wanted = set()
    if wanted is not None:
        assert_in_memory(run.model, wanted)
    assert bool(cast_units(run.model.plan)) == bool(strategy.every)
    run.close()
    return found, run


@functools.cache
def kept(name: str, loop: Callable[[str], Loop], options: tuple[tuple[str, Any], ...]) -> Left:
    """What a plan gives that keeps everything."""
    with tempfile.TemporaryDirectory() as directory:
        hw = cpu_hardware(Path(directory))
        return run_of(name, hw, KEPT, loop(name), **dict(options))


def check(
    name: str,
    hw: HardwareProfile,
    patch: pytest.MonkeyPatch,
    strategy: Casts,
    loop: Callable[[str], Loop] = stepping,
    *,
    schedule: str = "serial",
    **options: Any,
) -> Run:
    """A loop notes and leaves the same, to the bit, as with copies and activations kept."""
    remember_captures(patch, f"casts, {name}")
    wanted, plain = kept(name, loop, tuple(options.items()))
    found, run = run_of(name, hw, strategy, loop(name), schedule=schedule, **options)
    assert_equal(found, wanted)
    assert_same_run(run, plain)
    return run


SCHEDULES = ("overlapped", "optimized", "serial", "deferred", "speculative")
HARD = [Casts(1, "swap-all"), Casts(1, "recompute-all"), Casts(2, RandomPolicy(seed=5))]
RANDOM = [Casts(1, RandomPolicy(seed=seed)) for seed in (1, 2)]


@pytest.mark.parametrize("strategy", [Casts(), *RANDOM], ids=["kept", "random 1", "random 2"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_steps(
    schedule: str, strategy: Casts, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = check("gpt2", hw, monkeypatch, strategy, schedule=schedule)
    assert run


@pytest.mark.parametrize("strategy", HARD, ids=["swap", "recompute", "every second"])
@pytest.mark.parametrize("name", ["llama", "bert", "resnet", "frozen", "shared", "unused"])
def test_architectures(
    name: str, strategy: Casts, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = ["llama", "bert", "resnet", "frozen", "shared", "unused"].index(name)
    schedule = SCHEDULES[(index + HARD.index(strategy)) % len(SCHEDULES)]
    check(name, hw, monkeypatch, strategy, schedule=schedule)


def test_halves(hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    check("tied", hw, monkeypatch, HARD[0], schedule="overlapped", dtype="fp16")


def together(name: str) -> Loop:
    """Two forwards at once, whose backwards begin with the first."""

    def loop(made: LohanModule, training: Training, inputs: dict[str, Any]) -> list[Tensor]:
        noted: list[Tensor] = []
        for seed in range(3):
            torch.manual_seed(seed)
            losses = [loss_of(name, made(**inputs)) for _ in range(2)]
            for loss in losses:
                loss.backward()
            training.step()
            noted += [loss.detach() for loss in losses]
        return noted

    return loop


@pytest.mark.parametrize("schedule", ["optimized", "deferred"])
def test_forwards_that_wait(
    schedule: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"forwards": 2, "accumulate": 2}
    check("tied", hw, monkeypatch, RANDOM[0], together, schedule=schedule, **options)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("schedule", ["overlapped", "speculative"])
def test_other_optimizers(
    schedule: str, optimizer: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    check("tied", hw, monkeypatch, HARD[0], schedule=schedule, optimizer=optimizer)


@pytest.mark.parametrize("schedule", ["overlapped", "serial", "deferred", "speculative"])
def test_micro_batches(schedule: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"schedule": schedule, "accumulate": "manual"}
    check("gpt2", hw, monkeypatch, RANDOM[0], manually, **options)


def clipping(norm: float) -> Callable[[str], Loop]:
    """Norms, and evaluations between steps, by a program of their own."""
    return clipping_always if norm == ALWAYS else clipping_never


def clipping_always(name: str) -> Loop:
    return windows(name, (2, 2, 1), norm=ALWAYS)


def clipping_never(name: str) -> Loop:
    return windows(name, (2, 2, 1), norm=NEVER)


@pytest.mark.parametrize("norm", [ALWAYS, NEVER], ids=["always", "never"])
@pytest.mark.parametrize("schedule", ["serial", "deferred", "speculative"])
def test_clipping(
    schedule: str, norm: float, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"schedule": schedule, "accumulate": 2, "clip_grad_norm": norm}
    check("tied", hw, monkeypatch, HARD[2], clipping(norm), **options)


def whole(name: str) -> Loop:
    return windows(name, (2, 1))


@pytest.mark.parametrize("schedule", ["serial", "deferred"])
def test_gradients_kept(
    schedule: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    check("tied", hw, monkeypatch, HARD[0], whole, schedule=schedule, gradients="kept")


@pytest.mark.parametrize("schedule", ["overlapped", "speculative"])
def test_a_step_is_what_a_user_would_write(
    schedule: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bf16 model cast from fp32 masters before each step, and PyTorch's fused AdamW on these."""
    remember_captures(monkeypatch, "casts, mlp")
    masters, inputs = make("mlp")
    compute = copy.deepcopy(masters).bfloat16()
    plain = torch.optim.AdamW(masters.parameters(), lr=1e-3, fused=True)
    model, _ = make("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "schedule": schedule}
    made = compiled(model, optimizer, hw, strategy=HARD[0], **options)
    for seed in range(NUM_STEPS):
        with torch.no_grad():
            for p, c in zip(masters.parameters(), compute.parameters(), strict=True):
                c.copy_(p)
        torch.manual_seed(seed)
        wanted = compute(inputs["x"].bfloat16(), inputs["y"])
        wanted.backward()
        for p, c in zip(masters.parameters(), compute.parameters(), strict=True):
            assert c.grad is not None
            p.grad, c.grad = c.grad.float(), None
        plain.step()
        torch.manual_seed(seed)
        found = made(**inputs)
        found.backward()
        optimizer.step()
        assert identical(found.detach(), wanted.detach())
        assert_equal([*made.parameters()], [*masters.parameters()])
    assert_in_memory(made, trained_units(made))
    made.lohan.close()
    assert_same(model, optimizer, masters, plain)


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


SEEN: dict[Any, Callable[[Run], None]] = {one_row_of_data: one_row}
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
            assert f"= fetch_unit({x.name}) <- master\n" in text
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


# -- moving --------------------------------------------------------------------------------------

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


# -- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [True, False])
def test_our_kernel_updates_units_on_a_gpu(copied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a copy or without, as plans count on: torch's own wants gradients in float32 beside
    these, and rounds differently. (Nothing runs: there need be no GPU.)"""
    by_torch: list[bool] = []

    def update(*_: Any, **__: Any) -> Updated:
        by_torch.append(True)
        return Updated({}, {})

    monkeypatch.setattr(adam_cuda, "expected", lambda: True)
    monkeypatch.setattr(chunked_update, "update", update)
    p = nn.Parameter(torch.zeros(4096))
    with FakeTensorMode():
        unit = UnitOptimizer(torch.optim.AdamW([p], fused=True), [p])
        master = torch.zeros(4096, device="cuda")
        gradient = torch.zeros(4096, device="cuda", dtype=torch.bfloat16)
        state = [{name: torch.zeros_like(master) for name in unit.state_names()}]
        unit.step_mixed([master], [gradient], state, [gradient.clone() if copied else None])
        assert not by_torch
        unit.step([master], [gradient.float()], state)
        assert by_torch
