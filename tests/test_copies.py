"""Compute copies of SSD units in host memory: the same training, with fewer bytes to the SSD."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import lohan_fx
from lohan_fx.api import LohanModule
from lohan_fx.footprint import align, host_bytes_needed, host_copies, ssd_bytes_needed
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import SCHEDULES, Plan
from lohan_fx.planners import PlannerOptions
from lohan_fx.simulate import simulate
from lohan_fx.workload import Workload
from tests.loops import assert_same, compiled, windows
from tests.models import loss_of, make
from tests.test_exactness import Meter
from tests.training import (
    Squeezed,
    Training,
    WithCopies,
    identical,
    remember_captures,
    step,
    training_of,
)


def train(
    name: str,
    hw: HardwareProfile,
    loop: Callable[[LohanModule, Training, dict[str, Any]], list[Tensor]],
    **options: Any,
) -> tuple[list[Tensor], nn.Module, torch.optim.Optimizer]:
    """What a loop notes, and the closed model."""
    model, inputs = make(name)
    training = training_of("adamw", model)
    options = {"dtype": "bf16", "swap_to": "ssd", **options}
    made = compiled(model, training.optimizer, hw, **options)
    found = loop(made, training, inputs)
    made.lohan.close()
    return found, model, training.optimizer


MORE = (("gpt2", 2), ("llama", 1), ("frozen", 1), ("tied", 2), ("shared", 1))
"""Models, and which units have copies."""


def assert_like_host(
    name: str,
    hw: HardwareProfile,
    loop: Callable[[LohanModule, Training, dict[str, Any]], list[Tensor]],
    **options: Any,
) -> None:
    """A loop notes and leaves the same, to the bit, as with all states in host memory."""
    strategy = options.pop("strategy", WithCopies())
    wanted, plain, its = train(name, hw, loop, states="host", **options)
    found, model, optimizer = train(name, hw, loop, states="ssd", strategy=strategy, **options)
    assert len(found) == len(wanted) > 0
    assert all(map(identical, found, wanted))
    assert_same(model, optimizer, plain, its)


# -- the same training ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(s, marks=pytest.mark.slow if s in ("naive", "optimized") else ())
        for s in SCHEDULES
    ],
)
@pytest.mark.parametrize(
    ("name", "every"),
    [("gpt2", 1), *(pytest.param(*row, marks=pytest.mark.slow) for row in MORE)],
)
def test_steps_are_the_same_and_move_the_planned_bytes(
    name: str, every: int, schedule: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loop(made: LohanModule, training: Training, inputs: dict[str, Any]) -> list[Tensor]:
        made.lohan.prepare(**inputs)
        noted = []
        for seed in range(3):
            meter = Meter(made)
            found = step(name, made, inputs, seed, training.step)
            noted += [found.loss, *found.tensors.values()]
            meter.check()
        return noted

    remember_captures(monkeypatch, f"{name}, bf16")
    assert_like_host(name, hw, loop, schedule=schedule, strategy=WithCopies(every=every))


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 2, "schedule": "overlapped"},
        {"accumulate": 2, "schedule": "serial"},
        {"accumulate": 2, "clip_grad_norm": 0.1, "schedule": "deferred"},
        {"gradients": "kept", "schedule": "serial"},
        {"gradients": "kept", "schedule": "deferred"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_sums_of_gradients(
    options: dict[str, Any], hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluations in between read the copies, too."""
    remember_captures(monkeypatch, "tied, bf16")
    norm = options.get("clip_grad_norm")
    loop = windows("tied", (2, 2, 1), norm=norm)
    assert_like_host("tied", hw, loop, strategy=WithCopies(every=2), **options)


# -- memory and bytes ------------------------------------------------------------------------------


def test_what_is_planned_is_allocated_and_predicted(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the same plan without copies: 2 reads and a write of the copy less, a step."""
    remember_captures(monkeypatch, "gpt2, bf16")

    def measured(strategy: Any) -> tuple[Plan, Workload, dict[str, Any]]:
        model, inputs = make("gpt2")
        optimizer = training_of("adamw", model).optimizer
        options: dict[str, Any] = {"dtype": "bf16", "states": "ssd", "swap_to": "host"}
        made = compiled(model, optimizer, hw, strategy=strategy, schedule="optimized", **options)
        program = made.lohan.prepare(**inputs)
        found = made.lohan.metrics()
        made.lohan.close()
        traffic = simulate(program.workload, program.plan, hw).traffic
        predicted = program.plan.prediction
        assert traffic.ssd_read_bytes == predicted.ssd_read_bytes
        assert traffic.ssd_write_bytes == predicted.ssd_write_bytes
        host = host_bytes_needed(program.workload, program.plan)
        ssd = ssd_bytes_needed(program.workload, program.plan)
        assert found["lohan/host_bytes"] == sum(host.values()) == predicted.peak_host_bytes
        assert found["lohan/ssd_bytes"] == sum(ssd.values()) == predicted.peak_ssd_bytes
        return program.plan, program.workload, {**host, "file": ssd["units"]}

    before, workload, without = measured(Squeezed("swap-all", 0.0))
    after, _, need = measured(WithCopies())
    copies = sum(align(u.compute_bytes) for u in workload.units)
    fetched = sum(u.compute_bytes * len(before.units[u.name].windows) for u in workload.units)
    assert need["compute copies"] == copies == without["file"] - need["file"] > 0
    assert need["state ring"] < without["state ring"]
    assert need["staging"] == 0 < without["staging"]
    read, written = (
        (p.prediction.ssd_read_bytes, p.prediction.ssd_write_bytes) for p in (before, after)
    )
    saved = sum(u.compute_bytes for u in workload.units)
    assert (read[0] - written[0], read[1] - written[1]) == (fetched, saved)


# -- what else happens to a model ------------------------------------------------------------------


class Trained:
    """A model in mixed precision that trains step by step."""

    def __init__(self, hw: HardwareProfile, *, brief: bool = False, **options: Any) -> None:
        self.plain, self.inputs = make("tied")
        if brief:
            self.plain.bfloat16()
        self.optimizer = training_of("adamw", self.plain).optimizer
        self.model = compiled(self.plain, self.optimizer, hw, dtype="bf16", **options)

    def steps(self, first: int, last: int) -> None:
        for seed in range(first, last):
            torch.manual_seed(seed)
            loss_of("tied", self.model(**self.inputs)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def close(self) -> None:
        self.model.lohan.close()


ON_SSD: dict[str, Any] = {
    "states": "ssd",
    "strategy": WithCopies(every=2),
    "schedule": "overlapped",
}
IN_HOST: dict[str, Any] = {"states": "host"}


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> None:
    remember_captures(monkeypatch, "tied, bf16")


@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize("loader", [ON_SSD, IN_HOST], ids=["ssd", "host"])
@pytest.mark.parametrize("ran", [False, True], ids=["new", "ran"])
def test_checkpoints(
    ran: bool, loader: dict[str, Any], hw: HardwareProfile, tmp_path: Path
) -> None:
    whole = Trained(hw, **IN_HOST)
    whole.steps(0, 4)
    first = Trained(hw, **ON_SSD)
    first.steps(0, 2)
    lohan_fx.save(first.model, tmp_path / "saved", optimizer=first.optimizer)
    first.close()
    second = Trained(hw, **loader)
    if ran:
        second.steps(7, 8)
    lohan_fx.load(second.model, tmp_path / "saved", optimizer=second.optimizer)
    second.steps(2, 4)
    assert_same(second.plain, second.optimizer, whole.plain, whole.optimizer)
    second.close()
    whole.close()


@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize("schedule", ["serial", "overlapped"])
def test_weights_that_are_written_reach_the_copies(schedule: str, hw: HardwareProfile) -> None:
    """Through a parameter, or by another tensor in its place."""
    runs = [Trained(hw, **{**where, "schedule": schedule}) for where in (ON_SSD, IN_HOST)]
    for run in runs:
        run.steps(0, 2)
        run.model.lohan.sync()
        with torch.no_grad():
            for i, p in enumerate(run.plain.parameters()):
                if i % 2:
                    p.mul_(1.5)
                else:
                    p.data = p.detach() + 0.01
        run.steps(2, 3)
        run.model.lohan.sync()
    a, b = runs
    assert_same(a.plain, a.optimizer, b.plain, b.optimizer)
    a.close()
    b.close()


def test_parameters_may_be_the_copies(hw: HardwareProfile, tmp_path: Path) -> None:
    """Parameters of the compute dtype are views of host memory; their masters are saved, too."""
    runs = [Trained(hw, brief=True, **where) for where in (ON_SSD, IN_HOST)]
    for run in runs:
        run.steps(0, 2)
        run.model.lohan.sync()
    a, b = runs
    assert {p.dtype for p in a.plain.parameters()} == {torch.bfloat16}
    assert_same(a.plain, a.optimizer, b.plain, b.optimizer)
    for name, run in (("a", a), ("b", b)):
        lohan_fx.save(run.model, tmp_path / name, optimizer=run.optimizer)
        run.close()
    saved = [load_file(tmp_path / name / "optimizer.safetensors") for name in ("a", "b")]
    assert any(key.endswith("fp32_master") for key in saved[0])
    assert saved[0].keys() == saved[1].keys()
    assert all(identical(tensor, saved[1][key]) for key, tensor in saved[0].items())


@pytest.mark.parametrize("where", [ON_SSD, IN_HOST], ids=["ssd", "host"])
def test_what_is_not_written_keeps_its_master(
    where: dict[str, Any], hw: HardwareProfile, tmp_path: Path
) -> None:
    """A bias that is clamped does not round the weight beside it, which is more than its copy;
    what is written through ``.data`` in the same unit counts."""
    run = Trained(hw, brief=True, **where)
    run.steps(0, 2)
    run.model.lohan.sync()

    def masters(name: str) -> dict[str, Tensor]:
        lohan_fx.save(run.model, tmp_path / name, optimizer=run.optimizer)
        saved = load_file(tmp_path / name / "optimizer.safetensors")
        return {key: v for key, v in saved.items() if key.endswith("fp32_master")}

    linear = run.plain.get_submodule("layers.0.linear")
    found = [masters("trained")]
    with torch.no_grad():
        linear.bias.clamp_(-1e-3, 1e-3)
    found.append(masters("clamped"))
    with torch.no_grad():
        linear.bias.clamp_(-1e-3, 1e-3)
        linear.weight.data[0] = 0.5
    found.append(masters("written"))
    run.close()
    first, second = (
        {key.rpartition(".")[0] for key in a if not identical(a[key], b[key])}
        for a, b in itertools.pairwise(found)
    )
    assert first == {"layers.0.linear.bias"}
    assert second == {"layers.0.linear.weight"}


@pytest.mark.usefixtures("trained")
def test_a_second_program_finds_the_copies_where_they_are(hw: HardwareProfile) -> None:
    """Its strategy would choose others: but that has been decided."""
    calls: list[PlannerOptions] = []

    def restless(
        workload: Workload, hw: HardwareProfile, budget: MemoryBudget, options: PlannerOptions
    ) -> Plan:
        calls.append(options)
        return WithCopies(every=len(calls))(workload, hw, budget, options)

    run = Trained(hw, states="ssd", strategy=restless)
    run.steps(0, 1)
    (program,) = run.model.lohan.programs.values()
    run.model.eval()
    run.steps(1, 2)
    first, second = run.model.lohan.programs.values()
    assert first is program
    assert host_copies(first.plan) == host_copies(second.plan) == set(first.plan.units)
    run.close()
