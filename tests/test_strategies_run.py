"""Every strategy of the papers trains a tiny GPT on the CPU, bit by bit as plain PyTorch does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lohan_fx
from lohan_fx.api import LohanModule
from lohan_fx.errors import InsufficientMemoryError
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import Plan
from lohan_fx.planners import Choices, Planner, PlannerOptions, finish, get, make_plan
from lohan_fx.planners.go_memferry import go_memferry
from lohan_fx.planners.schedule import UnitMode
from lohan_fx.workload import Workload
from tests.models import EXAMPLES, VOCAB, Example, gpt2, make
from tests.test_strategies import STRATEGIES
from tests.training import (
    assert_identical,
    cpu_hardware,
    eager,
    one_thread,
    remember_captures,
    step,
    training_of,
)

PLANNERS: dict[str, str | Planner] = {
    **{name: name for name in STRATEGIES},
    "go-memferry, all written": go_memferry(reserve=0.0),
}


NAME = "gpt2, many tokens"
"""So many that its activations outweigh its states."""


def many_tokens() -> dict[str, Any]:
    return {k: torch.randint(0, VOCAB, (16, 32)) for k in ("input_ids", "labels")}


@pytest.fixture(scope="module", autouse=True)
def one_capture() -> Iterator[None]:
    """The GPT is traced once for all tests of this module."""
    example = Example(build=gpt2, inputs=many_tokens, loss=EXAMPLES["gpt2"].loss)
    with pytest.MonkeyPatch.context() as patch, one_thread():
        patch.setitem(EXAMPLES, NAME, example)
        remember_captures(patch, NAME)
        yield


@dataclass(frozen=True)
class Tight:
    """A strategy with its own axes, under the tightest of some budgets that it has a plan for."""

    planner: str | Planner

    def __call__(
        self,
        workload: Workload,
        hw: HardwareProfile,
        budget: MemoryBudget,
        options: PlannerOptions,
    ) -> Plan:
        options = replace(options, schedule="auto")
        plan = make_plan(self.planner, workload, hw, budget, options)
        for part in (0.5, 0.6, 0.7, 0.8, 0.9):
            limit = int(part * plan.prediction.peak_device_bytes)
            try:
                tight = replace(budget, device_bytes=limit)
                return make_plan(self.planner, workload, hw, tight, options)
            except InsufficientMemoryError:
                continue
        return plan


def needs_direct_access(plan: Plan) -> bool:
    return any(u.access == "direct" or u.gradients == "direct" for u in plan.units.values())


def train(planner: Planner, hw: HardwareProfile, num_steps: int = 3) -> Plan:
    """Three steps, each compared with plain PyTorch's."""
    model, inputs = make(NAME)
    training = training_of("adamw", model)
    made = lohan_fx.compile(model, hw=hw, optimizer=training.optimizer, strategy=planner)
    assert isinstance(made, LohanModule)
    made.lohan.prepare(**inputs)
    for seed, wanted in enumerate(eager(NAME, "adamw")[:num_steps]):
        before = made.lohan.counters
        assert_identical(step(NAME, made, inputs, seed, training.step), wanted)
        moved, expected = made.lohan.counters.minus(before), made.plan.prediction
        assert (moved.d2h_bytes, moved.h2d_bytes) == (expected.d2h_bytes, expected.h2d_bytes)
    plan = made.plan
    made.lohan.close()
    return plan


@pytest.mark.parametrize("name", PLANNERS)
def test_three_steps_equal_plain_pytorch(name: str, tmp_path: Path) -> None:
    hw = cpu_hardware(tmp_path)
    plan = train(Tight(PLANNERS[name]), hw)
    planner = get(PLANNERS[name])
    assert plan.schedule == getattr(planner, "schedule", "optimized")
    if "memferry" in name:
        assert needs_direct_access(plan)
        return
    assert plan.count("swap") + plan.count("recompute") > 0


def test_units_held_from_forward_to_backward(tmp_path: Path) -> None:
    """MemFerry's GFGB: one copy of a unit serves both phases."""

    def hold(
        workload: Workload, hw: HardwareProfile, budget: MemoryBudget, options: PlannerOptions
    ) -> Plan:
        modes: dict[str, UnitMode] = dict.fromkeys(workload.unit_by_name, "hold")
        choices = Choices(
            actions=dict.fromkeys(workload.residuals, "recompute"),
            unit_tiers=dict.fromkeys(workload.unit_by_name, "host"),
            modes=modes,
        )
        return finish(workload, hw, budget, options, choices, "hold")

    plan = train(hold, cpu_hardware(tmp_path))
    assert {len(u.windows) for u in plan.units.values()} == {1}
