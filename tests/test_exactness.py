"""Training through lohan_fx is plain PyTorch's, bit by bit: fp32 on the CPU, dropout on.

Losses, gradients, weights and buffers of three steps, for every strategy × tier of the states ×
tier of swapped activations × optimizer schedule × model × optimizer. The default suite covers all
pairs of these; the whole product is marked ``slow``. Every run also holds the planned bytes equal
to those that moved.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import lohan_fx
import lohan_fx.compiled
from lohan_fx.api import LohanModule
from lohan_fx.capture import Captured
from lohan_fx.errors import InsufficientMemoryError
from lohan_fx.footprint import PAGE_BYTES
from lohan_fx.hardware import HardwareProfile, MemoryBudget, SsdDevice
from lohan_fx.plan import SCHEDULES, Action, Plan, Tier
from lohan_fx.planners import Choices, PlannerOptions, make_plan, names
from lohan_fx.planners.schedule import draft
from lohan_fx.planners.tiers import unit_tiers
from lohan_fx.workload import Workload
from tests.models import EXAMPLES, loss_of, make
from tests.workloads import small_hardware

NUM_STEPS = 3


class Case(NamedTuple):
    """One way to train one model."""

    model: str
    strategy: str
    states: str
    swap_to: str
    schedule: str
    optimizer: str


FACTORS: Mapping[str, Sequence[str]] = {
    "model": tuple(EXAMPLES),
    "strategy": names(),
    "states": ("device", "host", "ssd"),
    "swap_to": ("host", "ssd"),
    "schedule": SCHEDULES,
    "optimizer": ("adamw", "adam", "sgd"),
}
PRODUCT = [Case(*values) for values in itertools.product(*FACTORS.values())]


def pairwise(factors: Mapping[str, Sequence[str]]) -> list[tuple[str, ...]]:
    """Few rows that hold every pair of values of two factors at least once."""
    levels = list(factors.values())

    def pairs(row: Sequence[str | None]) -> set[tuple[int, str, int, str]]:
        set_ = [(i, v) for i, v in enumerate(row) if v is not None]
        return {(i, a, j, b) for (i, a), (j, b) in itertools.combinations(set_, 2)}

    missing = dict.fromkeys(
        (i, a, j, b)
        for (i, first), (j, second) in itertools.combinations(enumerate(levels), 2)
        for a, b in itertools.product(first, second)
    )
    rows = []
    while missing:
        i, a, j, b = next(iter(missing))
        row: list[str | None] = [None] * len(levels)
        row[i], row[j] = a, b
        for k, values in enumerate(levels):
            if row[k] is None:
                gains = []
                for value in values:
                    row[k] = value
                    gains.append(len(pairs(row) & missing.keys()))
                row[k] = values[gains.index(max(gains))]
        for pair in pairs(row):
            missing.pop(pair, None)
        rows.append(tuple(value for value in row if value is not None))
    return sorted(rows, key=lambda row: levels[0].index(row[0]))


# -- plain PyTorch -----------------------------------------------------------------------------


class Training(NamedTuple):
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None

    def step(self) -> None:
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad()


def training_of(kind: str, model: nn.Module) -> Training:
    """AdamW with no decay on biases and norms and a live learning rate; Adam; SGD."""
    parameters = list(model.parameters())
    if kind == "adam":
        return Training(torch.optim.Adam(parameters, lr=3e-3, betas=(0.8, 0.99)))
    if kind == "sgd":
        return Training(torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01))
    decay = [p for p in parameters if p.dim() > 1]
    other = [p for p in parameters if p.dim() <= 1]
    groups = [{"params": decay}, {"params": other, "weight_decay": 0.0, "lr": 3e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    return Training(optimizer, scheduler)


class Snapshot(NamedTuple):
    """What one step must reproduce."""

    loss: Tensor
    tensors: dict[str, Tensor]
    """Parameters and buffers after the step, and gradients of inputs (and, where they are the
    user's, of parameters) before the next."""


def step(
    name: str, model: nn.Module, inputs: Mapping[str, Any], seed: int, finish: Callable[[], None]
) -> Snapshot:
    """One step. `finish` is the optimizer's part."""
    torch.manual_seed(seed)
    loss = loss_of(name, model(**inputs))
    loss.backward()
    tensors: dict[str, Tensor] = {}
    for key, value in inputs.items():
        if value.grad is not None:
            tensors[f"{key}.grad"] = value.grad
            value.grad = None
    tensors.update({f"{k}.grad": p.grad for k, p in model.named_parameters() if p.grad is not None})
    finish()
    tensors.update(model.named_parameters())
    tensors.update(model.named_buffers())
    return Snapshot(loss.detach(), {k: t.detach().clone() for k, t in tensors.items()})


@functools.cache
def eager(name: str, optimizer: str) -> tuple[Snapshot, ...]:
    """The same steps without lohan_fx."""
    model, inputs = make(name)
    training = training_of(optimizer, model)
    return tuple(step(name, model, inputs, seed, training.step) for seed in range(NUM_STEPS))


def identical(a: Tensor, b: Tensor) -> bool:
    """Equal in shape, dtype and bits."""
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        if a.dim()
        else torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())
    )


def assert_identical(found: Snapshot, wanted: Snapshot, *, gradients: bool) -> None:
    """`gradients`: whether parameters have a ``.grad`` (without ``optimizer=``)."""
    assert identical(found.loss, wanted.loss), (found.loss, wanted.loss)
    expected = {
        k: t
        for k, t in wanted.tensors.items()
        if gradients or not k.endswith(".grad") or k == "x.grad"
    }
    assert found.tensors.keys() == expected.keys()
    wrong = [k for k, t in expected.items() if not identical(found.tensors[k], t)]
    assert not wrong


# -- lohan_fx ----------------------------------------------------------------------------------

_captured: dict[Any, Captured] = {}


@pytest.fixture
def remember_captures(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes `lohan_fx.compile` trace each model once in this process: the first run traces.

    What is captured depends on the structure of the model only, which is equal in all runs.
    """
    capture = lohan_fx.compiled.capture

    def remember(name: str) -> None:
        def once(model: nn.Module, args: Any, kwargs: Any, **options: Any) -> Captured:
            key = (name, model.training, *options.items())
            if key not in _captured:
                _captured[key] = capture(model, args, kwargs, **options)
            return _captured[key]

        monkeypatch.setattr(lohan_fx.compiled, "capture", once)

    return remember


@pytest.fixture
def hw(tmp_path: Path) -> HardwareProfile:
    return cpu_hardware(tmp_path)


def cpu_hardware(directory: Path) -> HardwareProfile:
    ssd = SsdDevice(
        path=str(directory), read_bytes_per_s=6e9, write_bytes_per_s=4e9, capacity_bytes=2**30
    )
    return small_hardware(device_kind="cpu", ssds=(ssd,))


@dataclass(frozen=True)
class Squeezed:
    """A strategy under the tightest device budget that it has a plan for, of a few.

    The smallest one is what swapping everything needs; without a squeeze these models are so
    small that good strategies keep everything.
    """

    strategy: str

    def __call__(
        self,
        workload: Workload,
        hw: HardwareProfile,
        budget: MemoryBudget,
        options: PlannerOptions,
    ) -> Plan:
        def peak(action: Action) -> int:
            actions = dict.fromkeys(workload.residuals, action)
            choices = Choices(
                actions=actions, unit_tiers=unit_tiers(workload, hw, budget, options)
            )
            made = draft(workload, hw, budget, options, choices, "probe", keep_tiny=False)
            return made.memory.peak_bytes

        least, most = peak("swap"), peak("keep")
        for part in (0.0, 0.1, 0.3, 0.6):
            tight = MemoryBudget(
                device_bytes=least + int(part * (most - least)),
                host_bytes=budget.host_bytes,
                ssd_bytes=budget.ssd_bytes,
            )
            try:
                return make_plan(self.strategy, workload, hw, tight, options)
            except InsufficientMemoryError:
                continue
        return make_plan(self.strategy, workload, hw, budget, options)


def compiled(
    case: Case, hw: HardwareProfile, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> LohanModule:
    made = lohan_fx.compile(
        model,
        hw=hw,
        optimizer=optimizer,
        strategy=Squeezed(case.strategy),
        states=case.states,  # type: ignore[arg-type]
        swap_to=case.swap_to,  # type: ignore[arg-type]
        schedule=case.schedule,  # type: ignore[arg-type]
    )
    assert isinstance(made, LohanModule)
    return made


def assert_as_planned(model: LohanModule, before: Any, pool_before: Any) -> None:
    """One step moved the planned bytes: counted by the lanes, and by the system calls."""
    assert model.lohan.memory is not None
    plan, pool = model.plan, model.lohan.memory.pool
    moved = model.lohan.counters.minus(before)
    predicted = plan.prediction
    assert (moved.d2h_bytes, moved.h2d_bytes) == (predicted.d2h_bytes, predicted.h2d_bytes)
    assert moved.ssd_read_bytes == predicted.ssd_read_bytes
    assert moved.ssd_write_bytes == predicted.ssd_write_bytes
    if pool is None:
        assert moved.ssd_read_bytes == moved.ssd_write_bytes == 0
        return
    # System calls move whole sectors; every transfer adds less than one for the compute copy and
    # one for the states.
    transfers = 2 * sum(
        i.kind in ("offload", "prefetch", "fetch_unit", "emit_gradients")
        for i in model.lohan.program().instructions.instructions
    )
    now = pool.counters
    for real, counted in (
        (now.bytes_read - pool_before.bytes_read, moved.ssd_read_bytes),
        (now.bytes_written - pool_before.bytes_written, moved.ssd_write_bytes),
    ):
        assert counted <= real <= counted + transfers * PAGE_BYTES


def check(case: Case, hw: HardwareProfile) -> LohanModule:
    """Train `case` and compare; returns the model, closed."""
    model, inputs = make(case.model)
    training = training_of(case.optimizer, model)
    made = compiled(case, hw, model, training.optimizer)
    made.lohan.prepare(**inputs)
    plan, memory = made.plan, made.lohan.memory
    assert memory is not None
    assert {u.tier for u in plan.units.values()} == {case.states}
    assert {r.tier for r in plan.residuals.values() if r.action == "swap"} <= {case.swap_to}
    for seed, wanted in enumerate(eager(case.model, case.optimizer)):
        before = made.lohan.counters
        pool_before = memory.pool.counters if memory.pool is not None else None
        found = step(case.model, made, inputs, seed, training.step)
        assert_identical(found, wanted, gradients=False)
        assert_as_planned(made, before, pool_before)
    assert len(made.lohan.programs) == 1
    made.lohan.close()
    return made


def ids(rows: Sequence[Sequence[str]]) -> list[str]:
    return ["-".join(row) for row in rows]


PAIRS = [Case(*row) for row in pairwise(FACTORS)]


@pytest.mark.parametrize("case", PAIRS, ids=ids(PAIRS))
def test_three_steps_equal_plain_pytorch(
    case: Case, hw: HardwareProfile, remember_captures: Callable[[str], None]
) -> None:
    remember_captures(case.model)
    check(case, hw)


@pytest.mark.slow
@pytest.mark.parametrize("model", EXAMPLES)
@pytest.mark.parametrize("strategy", names())
def test_three_steps_equal_plain_pytorch_whole_product(
    model: str,
    strategy: str,
    hw: HardwareProfile,
    remember_captures: Callable[[str], None],
) -> None:
    remember_captures(model)
    for case in PRODUCT:
        if (case.model, case.strategy) == (model, strategy):
            check(case, hw)


# -- without optimizer= ------------------------------------------------------------------------


ACTIVATION_FACTORS = {k: FACTORS[k] for k in ("model", "strategy", "swap_to")}
ACTIVATION_PAIRS = pairwise(ACTIVATION_FACTORS)


@pytest.mark.parametrize(
    ("name", "strategy", "swap_to"), ACTIVATION_PAIRS, ids=ids(ACTIVATION_PAIRS)
)
def test_gradients_equal_plain_pytorch(
    name: str,
    strategy: str,
    swap_to: str,
    hw: HardwareProfile,
    remember_captures: Callable[[str], None],
) -> None:
    """Only activations are managed: gradients land in ``.grad``, the user's optimizer steps."""
    remember_captures(name)
    model, inputs = make(name)
    training = training_of("adamw", model)
    case = Case(name, strategy, "device", swap_to, "optimized", "adamw")
    made = compiled(case, hw, model, None)
    made.lohan.prepare(**inputs)
    assert made.lohan.memory is not None
    for seed, wanted in enumerate(eager(name, "adamw")):
        before, pool = made.lohan.counters, made.lohan.memory.pool
        pool_before = pool.counters if pool is not None else None
        found = step(name, made, inputs, seed, training.step)
        assert_identical(found, wanted, gradients=True)
        assert_as_planned(made, before, pool_before)
    made.lohan.close()


def test_gradients_accumulate_over_micro_batches(
    hw: HardwareProfile, remember_captures: Callable[[str], None]
) -> None:
    def train(model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
        torch.manual_seed(0)
        for part in (slice(0, 3), slice(3, 6)):
            loss_of("mlp", model(**{k: v[part] for k, v in inputs.items()})).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    remember_captures("mlp, half a batch")
    model, inputs = make("mlp")
    wanted = train(model, inputs)
    model, inputs = make("mlp")
    made = compiled(Case("mlp", "swap-all", "device", "ssd", "serial", ""), hw, model, None)
    found = train(made, inputs)
    assert len(found) == len(wanted) > 0
    assert all(map(identical, found, wanted))
    made.lohan.close()


# -- what the cases are made of ----------------------------------------------------------------


def test_the_pairs_are_all_there() -> None:
    for (i, first), (j, second) in itertools.combinations(enumerate(FACTORS.values()), 2):
        assert {(row[i], row[j]) for row in PAIRS} == set(itertools.product(first, second))


@pytest.mark.parametrize(
    ("strategy", "actions"),
    [
        ("keep-all", {"keep"}),
        ("swap-all", {"swap"}),
        ("recompute-all", {"swap", "recompute"}),
        ("lohan", {"keep", "swap", "recompute"}),
        ("lohan-paper", {"swap", "recompute"}),
        ("random", {"keep", "swap", "recompute"}),
    ],
)
def test_the_cases_move_and_recompute(
    strategy: str,
    actions: set[str],
    hw: HardwareProfile,
    remember_captures: Callable[[str], None],
) -> None:
    """A test of the tests: squeezed plans do what their strategies are there for."""
    remember_captures("gpt2")
    model, inputs = make("gpt2")
    optimizer = training_of("adam", model).optimizer
    made = compiled(Case("gpt2", strategy, "host", "ssd", "optimized", "adam"), hw, model, optimizer)
    program = made.lohan.prepare(**inputs)
    sizes: dict[str, int] = {}
    for v, decision in program.plan.residuals.items():
        size = program.workload.values[v].num_bytes
        sizes[decision.action] = sizes.get(decision.action, 0) + size
    large = {a for a, size in sizes.items() if size > 0.05 * sum(sizes.values())}
    assert large == actions
    made.lohan.close()


def test_states_of_one_model_in_all_tiers(
    hw: HardwareProfile, remember_captures: Callable[[str], None]
) -> None:
    """A user's strategy that puts units and residuals everywhere at once."""

    def everywhere(
        workload: Workload, hw: HardwareProfile, budget: MemoryBudget, options: PlannerOptions
    ) -> Choices:
        tiers: tuple[Tier, ...] = ("device", "host", "ssd")
        actions: tuple[Action, ...] = ("swap", "keep", "recompute", "swap")
        return Choices(
            actions={v: actions[i % 4] for i, v in enumerate(workload.residuals)},
            unit_tiers={u.name: tiers[i % 3] for i, u in enumerate(workload.units)},
            swap_tiers={v: tiers[1 + i // 4 % 2] for i, v in enumerate(workload.residuals)},
        )

    remember_captures("gpt2")
    model, inputs = make("gpt2")
    training = training_of("adamw", model)
    made = lohan_fx.compile(model, hw=hw, optimizer=training.optimizer, strategy=everywhere)
    assert isinstance(made, LohanModule)
    made.lohan.prepare(**inputs)
    assert made.lohan.memory is not None and made.lohan.memory.pool is not None
    assert {u.tier for u in made.plan.units.values()} == {"device", "host", "ssd"}
    assert made.plan.count("swap", "host") and made.plan.count("swap", "ssd")
    for seed, wanted in enumerate(eager("gpt2", "adamw")):
        before, pool_before = made.lohan.counters, made.lohan.memory.pool.counters
        found = step("gpt2", made, inputs, seed, training.step)
        assert_identical(found, wanted, gradients=False)
        assert_as_planned(made, before, pool_before)
    made.lohan.close()
