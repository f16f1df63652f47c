"""Gradients of units on the device that wait in host memory for optimizer.step()."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from lohan_fx.errors import InsufficientMemoryError, PlanError
from lohan_fx.footprint import (
    has_own_buffer,
    host_bytes_needed,
    may_park,
    parked_gradients,
)
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import Action, Plan, Tier, UnitPlan
from lohan_fx.planners import Choices, PlannerOptions, make_plan
from lohan_fx.planners.random_policy import RandomPolicy
from lohan_fx.program import lower, residency
from lohan_fx.runtime.arena import Arena
from lohan_fx.runtime.gradient_offload import GradientOffload
from lohan_fx.runtime.lane import Ticket
from lohan_fx.runtime.lanes import Lanes
from lohan_fx.simulate import simulate
from lohan_fx.workload import Workload
from tests.loops import assert_same, check, compiled, updater_of, windows
from tests.models import make
from tests.test_simulate import CHUNK, machine, make_the_plan, make_unit, make_workload, spans
from tests.training import Squeezed, cpu_hardware, identical, step, training_of
from tests.workloads import gpt_workload, small_hardware

NEVER, ALWAYS = 1e9, 1e-2
WAITING = ("serial", "deferred", "speculative")


@dataclass(frozen=True)
class Parked:
    """All units on the device (or every second, others in host memory), all gradients parked, or
    none."""

    every: int = 1
    parks: bool = True

    def __call__(
        self,
        workload: Workload,
        hw: HardwareProfile,
        budget: MemoryBudget,
        options: PlannerOptions,
    ) -> Plan:
        names = [u.name for u in workload.units]
        fixed = {n: "device" if i % self.every == 0 else "host" for i, n in enumerate(names)}
        fixed = dict(options.fixed_units or fixed)
        options = replace(
            options, states="host", fixed_units=fixed, fixed_parked=names * self.parks
        )  # type: ignore[arg-type]
        plan = Squeezed("swap-all")(workload, hw, budget, options)
        parked = parked_gradients(plan)
        waits = any(may_park(u, fixed[u.name], options.update_schedule) for u in workload.units)  # type: ignore[arg-type]
        assert bool(parked) == (waits and self.parks)
        return plan


@pytest.fixture
def unparked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of units whose gradients came back, in order."""
    found: list[str] = []
    plain = GradientOffload.unparked

    def noting(self: GradientOffload, states: Any, gradients: Any) -> Any:
        found.append(states.unit.name)
        return plain(self, states, gradients)

    monkeypatch.setattr(GradientOffload, "unparked", noting)
    return found


@pytest.mark.parametrize(
    ("schedule", "norm", "every"),
    [
        ("serial", ALWAYS, 2),
        ("deferred", NEVER, 1),
        ("speculative", NEVER, 2),
        ("speculative", ALWAYS, 1),
    ],
)
def test_a_step_is_plain_pytorchs(
    schedule: Any,
    norm: float,
    every: int,
    unparked: list[str],
    hw: HardwareProfile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = windows("gpt2", (1, 1, 1), norm=norm)
    options: dict[str, Any] = {"schedule": schedule, "clip_grad_norm": norm}
    check("gpt2", loop, hw, monkeypatch, strategy=Parked(every), **options)
    assert unparked
    assert len(unparked) == 3 * len(set(unparked))


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("shared", "resnet", "t5")]


@pytest.mark.parametrize("name", ["tied", "frozen", *SLOW])
def test_architectures(
    name: str, unparked: list[str], hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = windows(name, (1, 1), norm=NEVER)
    check(
        name,
        loop,
        hw,
        monkeypatch,
        strategy=Parked(1 if name == "frozen" else 2),
        clip_grad_norm=NEVER,
    )
    assert unparked


def test_mixed_precision(
    unparked: list[str], hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parked or not, in bfloat16: the same losses, norms and weights."""

    def run(strategy: Any) -> tuple[list[Any], list[torch.Tensor]]:
        model, inputs = make("gpt2")
        training = training_of("adamw", model)
        options: dict[str, Any] = {"dtype": "bf16", "clip_grad_norm": 1.0}
        made = compiled(model, training.optimizer, hw, strategy=strategy, **options)
        noted: list[Any] = []
        for seed in range(3):
            noted.append(step("gpt2", made, inputs, seed, training.step).loss.item())
            noted.append(made.lohan.grad_norm)
        made.lohan.close()
        return noted, [p.detach().clone() for p in model.parameters()]

    losses, weights = run(Parked())
    assert unparked
    unparked.clear()
    wanted, its = run(Parked(parks=False))
    assert not unparked
    assert losses == wanted
    assert all(map(identical, weights, its))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, "bf16"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("schedule", WAITING)
def test_on_a_gpu(
    schedule: Any, optimizer: str, dtype: Any, unparked: list[str], tmp_path: Path
) -> None:
    """The update reads parked gradients over the link: the same losses, norms and weights to the
    bit as when they stay."""
    hw = cpu_hardware(tmp_path, device_kind="cuda")

    def run(strategy: Any) -> list[torch.Tensor]:
        model, inputs = make("gpt2")
        inputs = {k: v.cuda() for k, v in inputs.items()}
        training = training_of(optimizer, model)
        options = {"schedule": schedule, "dtype": dtype, "clip_grad_norm": 1.0, "fused": False}
        made = compiled(model, training.optimizer, hw, strategy=strategy, **options)
        noted = []
        for seed in range(3):
            before = made.lohan.counters
            noted.append(step("gpt2", made, inputs, seed, training.step).loss.cpu())
            noted.append(torch.tensor(made.lohan.grad_norm))
            moved = made.lohan.counters.minus(before)
            assert moved.d2h_bytes == made.plan.prediction.d2h_bytes
            assert moved.h2d_bytes == made.plan.prediction.h2d_bytes
        made.lohan.close()
        return noted + [p.detach().cpu() for p in model.parameters()]

    found = run(Parked())
    assert unparked
    unparked.clear()
    wanted = run(replace(Parked(), parks=False))
    assert not unparked
    assert all(map(identical, found, wanted))


def test_programs_of_one_model_may_differ(
    unparked: list[str], hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second program whose plan parks nothing keeps gradients on the device, though there are
    buffers that another one parks in."""
    model, inputs = make("mlp")
    training = training_of("adamw", model)
    parks = iter([True, False])

    def strategy(w: Workload, hw: HardwareProfile, b: MemoryBudget, o: PlannerOptions) -> Any:
        if next(parks):
            return Parked()(w, hw, b, o)
        return Squeezed("swap-all")(w, hw, b, replace(o, fixed_parked=()))

    made = compiled(model, training.optimizer, hw, strategy=strategy, clip_grad_norm=NEVER)
    step("mlp", made, inputs, 0, training.step)
    assert unparked
    unparked.clear()
    half = {k: v[: len(v) // 2] for k, v in inputs.items()}
    step("mlp", made, half, 1, training.step)
    assert not unparked
    step("mlp", made, inputs, 2, training.step)
    assert unparked
    made.lohan.close()


@pytest.mark.parametrize("schedule", WAITING)
def test_an_interrupt_while_a_step_waits_for_copies(
    schedule: Any, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing has been updated by then: the step can be taken once more, and is plain PyTorch's."""
    plain, inputs = make("mlp")
    its = training_of("adamw", plain)
    model, _ = make("mlp")
    training = training_of("adamw", model)
    made = compiled(model, training.optimizer, hw, strategy=Parked(), schedule=schedule)
    calls = itertools.count(1)
    synchronize = Ticket.synchronize

    def interrupted(ticket: Ticket) -> None:
        if next(calls) == 2:
            raise KeyboardInterrupt
        synchronize(ticket)

    def twice() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Ticket, "synchronize", interrupted)
            with pytest.raises(KeyboardInterrupt):
                training.optimizer.step()
        training.step()

    for seed in range(3):
        wanted = step("mlp", plain, inputs, seed, its.step)
        if schedule == "serial" or seed != 1:
            found = step("mlp", made, inputs, seed, training.step)
        else:
            found = step("mlp", made, inputs, seed, twice)
        assert identical(found.loss, wanted.loss)
    assert schedule == "serial" or next(calls) > 2
    assert not updater_of(made).torn
    made.lohan.close()
    assert_same(model, training.optimizer, plain, its.optimizer)


class Event:
    """Of a compute stream: which events were waited for, beside what else a log has."""

    log: ClassVar[list[tuple[str, Any]]] = []

    def __init__(self) -> None:
        self.at = len(self.log)

    def synchronize(self) -> None:
        self.log.append(("waited", self.at))

    def wait(self, *_: Any) -> None: ...

    def query(self) -> bool:
        return True


@pytest.mark.parametrize("how", ["another program", "close"])
def test_memory_outlives_the_updates_that_read_it(
    how: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA updates are only queued when optimizer.step() returns: an event that stands behind
    them is waited for before the memory goes."""
    Event.log.clear()
    monkeypatch.setattr(Lanes, "mark", lambda self: Event())
    unparked, close = GradientOffload.unparked, Arena.close

    def reading(self: GradientOffload, states: Any, gradients: Any) -> Any:
        Event.log.append(("read", states.unit.name))
        return unparked(self, states, gradients)

    def closing(self: Arena) -> None:
        Event.log.append(("closed", id(self)))
        close(self)

    monkeypatch.setattr(GradientOffload, "unparked", reading)
    monkeypatch.setattr(Arena, "close", closing)
    turns = iter([1, None])

    def strategy(w: Workload, hw: HardwareProfile, b: MemoryBudget, o: PlannerOptions) -> Plan:
        names = [u.name for u in w.units]
        fixed: Any = dict(o.fixed_units or dict.fromkeys(names, "device"))
        o = replace(o, states="host", fixed_units=fixed, fixed_parked=names[: next(turns)])
        return Squeezed("swap-all")(w, hw, b, o)

    model, inputs = make("mlp")
    training = training_of("adamw", model)
    options: dict[str, Any] = {"schedule": "deferred", "clip_grad_norm": NEVER}
    made = compiled(model, training.optimizer, hw, strategy=strategy, **options)
    step("mlp", made, inputs, 0, training.step)
    lohan = made.lohan
    assert lohan.memory is not None
    arena = lohan.memory.buffer_arena
    if how == "another program":
        made(**{k: v[: len(v) // 2] for k, v in inputs.items()})  # its buffers are larger
        assert lohan.memory.buffer_arena is not arena
    else:
        lohan.close()
    log = Event.log
    read = max(i for i, (what, _) in enumerate(log) if what == "read")
    closed = next(i for i, each in enumerate(log) if i > read and each == ("closed", id(arena)))
    assert any(what == "waited" and at > read for what, at in log[read:closed])
    lohan.close()


def test_a_smaller_batch_parks_the_same(hw: HardwareProfile) -> None:
    """The second program has its units where the first one's plan had room for them only as their
    gradients were parked."""
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8))
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    rates = {"device_bytes_per_s": 1e13, "h2d_bytes_per_s": 1e12, "d2h_bytes_per_s": 1e12}
    made = compiled(
        model,
        optimizer,
        hw.replace(cpu_optimizer_params_per_s=1e5, duplex_bytes_per_s=2e12, **rates),
        strategy="lohan-resident",
        schedule="deferred",
        memory={"device": "5MiB", "host": "100MiB", "ssd": "0"},
    )
    parked = []
    for batch in (128, 128, 64):
        made(torch.randn(batch, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        parked.append(parked_gradients(made.plan))
    assert parked[0]
    assert parked[0] == parked[1] == parked[2]
    assert len(made.lohan.programs) == 2
    made.lohan.close()


# -- plans ---------------------------------------------------------------------------------------

OPS = [
    ("f0", 1.0, "x w0", "a"),
    ("f1", 1.0, "a w1", "b"),
    ("b1", 1.0, "b a w1", "d g.u1"),
    ("b0", 1.0, "d x w0", "g.u0"),
]
SIZES = {"a": 1, "b": 1, "d": 1, "w0": 2, "w1": 2, "g.u0": 2, "g.u1": 2}
UNITS = [make_unit(n, params=4, compute=2, states=6) for n in ("u0", "u1")]
WORKLOAD = make_workload(OPS, SIZES, UNITS, {"w0": "u0", "w1": "u1"})


def by_hand(schedule: Any, gradients: Any, release: str | None) -> Plan:
    units = {
        "u0": UnitPlan(tier="device", emit_after="b0"),
        "u1": UnitPlan(
            tier="device",
            emit_after="b1",
            gradients=gradients,
            release_gradients_after=release,
        ),
    }
    return make_the_plan(WORKLOAD, units=units, schedule=schedule)


def test_the_program_and_its_memory() -> None:
    stay, parked = by_hand("deferred", "copy", None), by_hand("deferred", "parked", "b1")
    program = lower(WORKLOAD, parked)
    text = [str(i) for i in program.instructions if i.phase == "backward"]
    assert text == [
        "compute b1",
        f"emit_gradients u1 host {2 * CHUNK} B",
        "release_gradients u1",
        "compute b0",
        "emit_gradients u0",
    ]
    assert program.pinned == {"g.u0"}
    before, after = residency(lower(WORKLOAD, stay)), residency(program)
    assert before.series[-1] - after.series[-1] == 2 * CHUNK
    host = host_bytes_needed(WORKLOAD, parked)
    assert host["gradients"] == 2 * CHUNK
    assert sum(host.values()) == 2 * CHUNK
    assert not sum(host_bytes_needed(WORKLOAD, stay).values())
    assert Plan.from_dict(parked.to_dict()) == parked


def test_the_simulated_step() -> None:
    """Two seconds to the host, for which the release waits, and two back, before the update."""
    made = simulate(WORKLOAD, by_hand("deferred", "parked", "b1"), machine())
    assert spans(made, "d2h") == [("emit_gradients", "u1", 3.0, 5.0)]
    assert ("release_gradients", "u1", 3.0, 5.0) in spans(made, "gpu")
    assert spans(made, "h2d") == [("direct_read", "u1", 6.0, 8.0)]
    last = [span[:2] for span in spans(made, "gpu")][-3:]
    assert last == [("direct_read", "u1"), ("update", "u1"), ("update", "u0")]


@pytest.mark.parametrize(
    ("schedule", "tier", "accumulates"),
    [("overlapped", "device", 0), ("deferred", "host", 0), ("deferred", "device", CHUNK)],
)
def test_what_cannot_be_parked(schedule: Any, tier: Any, accumulates: int) -> None:
    unit = replace(UNITS[1], accumulator_bytes=accumulates)
    workload = replace(WORKLOAD, units=(UNITS[0], unit))
    plan = by_hand(schedule, "parked", "b1")
    plan = replace(plan, units={**plan.units, "u1": replace(plan.units["u1"], tier=tier)})
    assert not may_park(unit, tier, schedule)
    with pytest.raises(PlanError, match=r"gradients of unit u1 .* cannot be parked"):
        lower(workload, plan)


def test_buffers() -> None:
    unit = UNITS[0]
    assert not has_own_buffer(unit, "device", "deferred")
    assert has_own_buffer(unit, "device", "deferred", ["u0"])
    assert not has_own_buffer(make_unit("frozen", compute=2), "device", "deferred", ["frozen"])


@pytest.mark.parametrize("strategy", ["lohan-resident", "pareto"])
def test_strategies_park_where_that_keeps_a_unit_on_the_device(strategy: str) -> None:
    """Many layers whose optimizer the CPU is slow with, and a device that holds most of them: what
    gradients that wait take there is the place of a unit."""
    n = 8
    forward = [(f"f{i}", 1.0, f"{'x' if not i else f'a{i - 1}'} w{i}", f"a{i}") for i in range(n)]
    backward = [
        (f"b{i}", 2.0, f"{f'd{i + 1}' if i + 1 < n else f'a{n - 1}'} w{i}", f"d{i} g.u{i}")
        for i in reversed(range(n))
    ]
    sizes = {f"w{i}": 4 for i in range(n)} | {f"g.u{i}": 4 for i in range(n)}
    units = [make_unit(f"u{i}", params=8, compute=4, states=12) for i in range(n)]
    workload = make_workload(
        [*forward, *backward], sizes, units, {f"w{i}": f"u{i}" for i in range(n)}
    )
    hw = machine(h2d=8, d2h=8).replace(device_bytes_per_s=1000.0 * CHUNK)
    budget = MemoryBudget(device_bytes=116 * CHUNK, host_bytes=2**40, ssd_bytes=0)
    options = PlannerOptions(schedule="speculative")
    plan = make_plan(strategy, workload, hw, budget, options)
    assert parked_gradients(plan)
    assert residency(lower(workload, plan)).peak_bytes <= budget.device_bytes
    without = make_plan("lohan", workload, hw, budget, options)
    assert simulate(workload, plan, hw).step_s < simulate(workload, without, hw).step_s
    assert not parked_gradients(
        make_plan(strategy, workload, hw, budget, PlannerOptions(schedule="overlapped"))
    )


@pytest.mark.parametrize("strategy", ["lohan-resident", "pareto"])
def test_a_budget_that_nothing_fits(strategy: str) -> None:
    """Is refused, with schedules in which gradients wait as with others."""
    budget = MemoryBudget(device_bytes=CHUNK, host_bytes=CHUNK, ssd_bytes=0)
    for schedule in ("overlapped", "deferred"):
        options = PlannerOptions(schedule=schedule)  # type: ignore[arg-type]
        with pytest.raises(InsufficientMemoryError):
            make_plan(strategy, WORKLOAD, machine(), budget, options)


@pytest.mark.parametrize("fixed", [(), ("u1",), ("u0", "u1")])
@pytest.mark.parametrize("strategy", ["lohan-resident", "pareto", "swap-all"])
def test_what_is_parked_may_be_given(strategy: str, fixed: tuple[str, ...]) -> None:
    budget = MemoryBudget(device_bytes=2**40, host_bytes=2**40, ssd_bytes=0)
    options = PlannerOptions(schedule="deferred", states="device", fixed_parked=fixed)
    assert parked_gradients(make_plan(strategy, WORKLOAD, machine(), budget, options)) == {*fixed}


@pytest.mark.parametrize("chosen", ["options", "strategy"])
def test_residuals_leave_room_for_buffers(chosen: str) -> None:
    """Host memory has the buffers, and as many residuals as fit beside them; others go to SSD."""
    workload, hw = gpt_workload(layers=16), small_hardware()
    parked = [u.name for u in workload.units if u.trainable]
    options = PlannerOptions(schedule="deferred", states="device")

    def strategy(w: Workload, hw: HardwareProfile, b: MemoryBudget, o: PlannerOptions) -> Choices:
        del hw, b, o
        actions: dict[str, Action] = dict.fromkeys(w.residuals, "swap")
        tiers: dict[str, Tier] = dict.fromkeys(w.unit_by_name, "device")
        return Choices(actions=actions, unit_tiers=tiers, parked=parked)

    if chosen == "options":
        options = replace(options, fixed_parked=parked)
    named = "swap-all" if chosen == "options" else strategy
    budget = MemoryBudget(device_bytes=2**40, host_bytes=2**40, ssd_bytes=2**40)
    need = host_bytes_needed(workload, make_plan(named, workload, hw, budget, options))
    assert need["gradients"] > need["residuals"] // 4 > 0
    budget = replace(budget, host_bytes=need["gradients"] + need["residuals"] * 3 // 4)
    plan = make_plan(named, workload, hw, budget, options)
    assert parked_gradients(plan) == {*parked}
    assert plan.count("swap", "host") > 0
    assert plan.count("swap", "ssd") > 0


def test_random_plans_park() -> None:
    found = set()
    budget = MemoryBudget(device_bytes=2**40, host_bytes=2**40, ssd_bytes=0)
    for seed in range(8):
        options = PlannerOptions(schedule="speculative", states="device")
        plan = RandomPolicy(seed)(WORKLOAD, small_hardware(), budget, options)
        found.add(len(parked_gradients(plan)))
        lower(WORKLOAD, plan)
    assert found == {0, 1, 2}
