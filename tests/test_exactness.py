"""Training through lohan_fx is plain PyTorch's, bit by bit: fp32 on the CPU, dropout on.

Losses, gradients, weights and buffers of three steps, for strategies × tiers of the states × tiers
of swapped activations × optimizer schedules × models × optimizers. The default suite covers all
pairs of these for the strategies that differ in what they do, and a few cases of each other one;
all pairs of those (`PAIRS`) and the whole product are marked ``slow``. Every step also moves
exactly the bytes that its plan says.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import lohan_fx
from lohan_fx.api import LohanModule
from lohan_fx.footprint import PAGE_BYTES
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import SCHEDULES, Action, Tier
from lohan_fx.planners import Choices, PlannerOptions, names
from lohan_fx.runtime.lanes import Counters
from lohan_fx.runtime.ssd import IoCounters
from lohan_fx.workload import Workload
from tests.models import EXAMPLES, loss_of, make
from tests.training import (
    NUM_STEPS,
    Squeezed,
    assert_identical,
    eager,
    identical,
    ids,
    remember_captures,
    step,
    step_in_mixed_precision,
    training_of,
)


class Case(NamedTuple):
    """One way to train one model."""

    model: str
    strategy: str
    states: str
    swap_to: str
    schedule: str
    optimizer: str


STRATEGIES = ("keep-all", "swap-all", "recompute-all", "lohan", "random")
"""These meet every model; others meet three models, as they decide by the same means."""
OTHER_STRATEGIES = tuple(n for n in names() if n not in STRATEGIES)

FACTORS: Mapping[str, Sequence[str]] = {
    "model": tuple(EXAMPLES),
    "strategy": STRATEGIES,
    "states": ("device", "host", "ssd"),
    "swap_to": ("host", "ssd"),
    "schedule": SCHEDULES,
    "optimizer": ("adamw", "adam", "sgd"),
}
OTHER_FACTORS = {**FACTORS, "model": ("gpt2", "resnet", "shared"), "strategy": OTHER_STRATEGIES}


def pairwise(factors: Mapping[str, Sequence[str]]) -> list[tuple[str, ...]]:
    """Few rows that hold every pair of values of two factors at least once."""
    levels = list(factors.values())

    def pairs(row: Sequence[str | None]) -> set[tuple[int, str, int, str]]:
        chosen = [(i, v) for i, v in enumerate(row) if v is not None]
        return {(i, a, j, b) for (i, a), (j, b) in itertools.combinations(chosen, 2)}

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


PAIRS = [Case(*row) for row in (*pairwise(FACTORS), *pairwise(OTHER_FACTORS))]


def is_quick(case: Case) -> bool:
    """Whether a strategy may meet a model in the default suite.

    Other strategies meet no GPT-2 if test_strategies_run trains one with them; those that solve a
    MILP, which may take seconds, meet the ResNet only.
    """
    if case.strategy in STRATEGIES or case.model == "resnet":
        return True
    if "checkmate" in case.strategy:
        return False
    return case.model == "shared" or case.strategy in ("lohan-paper", "lohan-resident", "pareto")


FIRSTS = {(c.strategy, c.model): c for c in reversed(PAIRS)}
QUICK = {c for c in (*PAIRS[: len(pairwise(FACTORS))], *FIRSTS.values()) if is_quick(c)}
"""All pairs of `FACTORS`, and the first case of each other strategy with a model."""
PRODUCT = [Case(*row) for row in itertools.product(*{**FACTORS, "strategy": names()}.values())]


def compiled(
    case: Case, hw: HardwareProfile, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> LohanModule:
    made = lohan_fx.compile(
        model,
        hw=hw,
        optimizer=optimizer,
        strategy=Squeezed(case.strategy, 0.0 if case.swap_to == "ssd" else 0.2),
        states=case.states,  # type: ignore[arg-type]
        swap_to=case.swap_to,  # type: ignore[arg-type]
        schedule=case.schedule,  # type: ignore[arg-type]
    )
    assert isinstance(made, LohanModule)
    return made


class Meter:
    """What has moved between its making and `check`, as the lanes and as system calls count it."""

    def __init__(self, model: LohanModule) -> None:
        self.model = model
        self.lanes, self.pool = self._now()

    def _now(self) -> tuple[Counters, IoCounters | None]:
        memory = self.model.lohan.memory
        assert memory is not None
        return self.model.lohan.counters, None if memory.pool is None else memory.pool.counters

    def check(self) -> None:
        """One step moved the planned bytes."""
        lanes, pool = self._now()
        moved, plan = lanes.minus(self.lanes), self.model.plan.prediction
        assert (moved.d2h_bytes, moved.h2d_bytes) == (plan.d2h_bytes, plan.h2d_bytes)
        assert moved.ssd_read_bytes == plan.ssd_read_bytes
        assert moved.ssd_write_bytes == plan.ssd_write_bytes
        if pool is None or self.pool is None:
            assert moved.ssd_read_bytes == moved.ssd_write_bytes == 0
            return
        # System calls move whole sectors: less than one more for a residual, a compute copy, the
        # states of a unit.
        program = self.model.lohan.program().instructions.instructions
        kinds = ("offload", "prefetch", "fetch_unit", "emit_gradients")
        padding = 2 * PAGE_BYTES * sum(i.kind in kinds for i in program)
        read = pool.bytes_read - self.pool.bytes_read
        written = pool.bytes_written - self.pool.bytes_written
        assert moved.ssd_read_bytes <= read <= moved.ssd_read_bytes + padding
        assert moved.ssd_write_bytes <= written <= moved.ssd_write_bytes + padding


def check(case: Case, hw: HardwareProfile) -> None:
    """Train `case` and compare every step."""
    model, inputs = make(case.model)
    training = training_of(case.optimizer, model)
    made = compiled(case, hw, model, training.optimizer)
    made.lohan.prepare(**inputs)
    assert {u.tier for u in made.plan.units.values()} == {case.states}
    swapped = [r for r in made.plan.residuals.values() if r.action == "swap"]
    assert {r.tier for r in swapped} <= {case.swap_to}
    for seed, wanted in enumerate(eager(case.model, case.optimizer)):
        meter = Meter(made)
        found = step(case.model, made, inputs, seed, training.step)
        assert_identical(found, wanted)
        meter.check()
    assert len(made.lohan.programs) == 1
    made.lohan.close()


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in PAIRS],
    ids=ids(PAIRS),
)
def test_three_steps_equal_plain_pytorch(
    case: Case, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember_captures(monkeypatch, case.model)
    check(case, hw)


@pytest.mark.slow
@pytest.mark.parametrize("model", EXAMPLES)
@pytest.mark.parametrize("strategy", names())
def test_three_steps_equal_plain_pytorch_in_the_whole_product(
    model: str, strategy: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember_captures(monkeypatch, model)
    for case in PRODUCT:
        if (case.model, case.strategy) == (model, strategy):
            check(case, hw)


# -- without optimizer= ------------------------------------------------------------------------


ACTIVATIONS = ("model", "strategy", "swap_to")
ACTIVATION_PAIRS = [
    row
    for factors in (FACTORS, OTHER_FACTORS)
    for row in pairwise({k: factors[k] for k in ACTIVATIONS})
    if row[0] in ("gpt2", "resnet", "shared") or row[1] in STRATEGIES
]


def is_quick_without_optimizer(name: str, strategy: str) -> bool:
    """GPT-2 meets all main strategies, other models swap-all and one more in turn; each other
    strategy meets one model. `QUICK` has all pairs, with the same passes for activations."""
    if strategy in OTHER_STRATEGIES:
        return name == "shared"
    more = [s for s in STRATEGIES if s != "swap-all"]
    turn = more[tuple(EXAMPLES).index(name) % len(more)]
    return name == "gpt2" or strategy in ("swap-all", turn)


@pytest.mark.parametrize(
    ("name", "strategy", "swap_to"),
    [
        pytest.param(*row, marks=() if is_quick_without_optimizer(*row[:2]) else pytest.mark.slow)
        for row in ACTIVATION_PAIRS
    ],
    ids=ids(ACTIVATION_PAIRS),
)
def test_gradients_equal_plain_pytorch(
    name: str, strategy: str, swap_to: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only activations are managed: gradients land in ``.grad``, the user's optimizer steps."""
    remember_captures(monkeypatch, name)
    model, inputs = make(name)
    training = training_of("adamw", model)
    made = compiled(Case(name, strategy, "device", swap_to, "optimized", ""), hw, model, None)
    made.lohan.prepare(**inputs)
    for seed, wanted in enumerate(eager(name, "adamw")):
        meter = Meter(made)
        found = step(name, made, inputs, seed, training.step)
        assert_identical(found, wanted, gradients=True)
        meter.check()
    made.lohan.close()


def test_gradients_accumulate_over_micro_batches(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def accumulate(model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
        torch.manual_seed(0)
        for part in (slice(0, 3), slice(3, 6)):
            loss_of("mlp", model(**{k: v[part] for k, v in inputs.items()})).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    remember_captures(monkeypatch, "mlp, half a batch")
    model, inputs = make("mlp")
    wanted = accumulate(model, inputs)
    model, inputs = make("mlp")
    made = compiled(Case("mlp", "swap-all", "device", "ssd", "serial", ""), hw, model, None)
    found = accumulate(made, inputs)
    assert len(found) == len(wanted) > 0
    assert all(map(identical, found, wanted))
    made.lohan.close()


@pytest.mark.parametrize("states", FACTORS["states"])
def test_mixed_precision_equals_masters_by_hand(
    states: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bf16 compute, fp32 masters: what a user would write, with PyTorch's fused AdamW."""
    masters, inputs = make("mlp")
    compute = copy.deepcopy(masters).bfloat16()
    plain = torch.optim.AdamW(masters.parameters(), lr=1e-3, fused=True)
    remember_captures(monkeypatch, "mlp")
    model, _ = make("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    made = lohan_fx.compile(
        model,
        hw=hw,
        optimizer=optimizer,
        dtype=torch.bfloat16,
        strategy="swap-all",
        states=states,  # type: ignore[arg-type]
        swap_to="ssd",
    )
    assert isinstance(made, LohanModule)
    for seed in range(NUM_STEPS):
        torch.manual_seed(seed)
        wanted = step_in_mixed_precision(masters, compute, inputs, plain)
        torch.manual_seed(seed)
        found = made(**inputs)
        found.backward()
        optimizer.step()
        assert identical(found.detach(), wanted)
        pairs = zip(made.parameters(), masters.parameters(), strict=True)
        assert all(identical(a, b) for a, b in pairs)
    made.lohan.close()


# -- what the cases are made of ----------------------------------------------------------------


def test_the_pairs_are_all_there() -> None:
    for factors in (FACTORS, OTHER_FACTORS):
        for (i, first), (j, second) in itertools.combinations(enumerate(factors.values()), 2):
            assert {(row[i], row[j]) for row in PAIRS} >= set(itertools.product(first, second))
    for (i, first), (j, second) in itertools.combinations(enumerate(FACTORS.values()), 2):
        assert {(row[i], row[j]) for row in QUICK} >= set(itertools.product(first, second))
    assert {case.strategy for case in QUICK} == set(names())


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
    strategy: str, actions: set[str], hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test of the tests: squeezed plans do what their strategies are there for."""
    remember_captures(monkeypatch, "gpt2")
    model, inputs = make("gpt2")
    optimizer = training_of("adam", model).optimizer
    case = Case("gpt2", strategy, "host", "host", "optimized", "adam")
    made = compiled(case, hw, model, optimizer)
    program = made.lohan.prepare(**inputs)
    sizes: dict[str, int] = {}
    for v, decision in program.plan.residuals.items():
        size = program.workload.values[v].num_bytes
        sizes[decision.action] = sizes.get(decision.action, 0) + size
    assert {a for a, size in sizes.items() if size > 0.02 * sum(sizes.values())} >= actions
    made.lohan.close()


def test_states_of_one_model_in_all_tiers(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
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

    remember_captures(monkeypatch, "gpt2")
    model, inputs = make("gpt2")
    training = training_of("adamw", model)
    made = lohan_fx.compile(model, hw=hw, optimizer=training.optimizer, strategy=everywhere)
    assert isinstance(made, LohanModule)
    made.lohan.prepare(**inputs)
    assert {u.tier for u in made.plan.units.values()} == {"device", "host", "ssd"}
    assert made.plan.count("swap", "host")
    assert made.plan.count("swap", "ssd")
    for seed, wanted in enumerate(eager("gpt2", "adamw")):
        meter = Meter(made)
        assert_identical(step("gpt2", made, inputs, seed, training.step), wanted)
        meter.check()
    made.lohan.close()
