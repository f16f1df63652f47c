"""Units on the device without a compute copy: a strategy that makes them, and runs of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lohan_fx.api import LohanModule
from lohan_fx.footprint import cast_units, may_cast
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import Plan, Tier
from lohan_fx.planners import Planner, PlannerOptions, make_plan
from lohan_fx.planners.random_policy import RandomPolicy
from lohan_fx.runtime.unit_states import UnitStates
from lohan_fx.workload import Workload
from tests.loops import compiled
from tests.models import make
from tests.training import (
    identical,
    step,
    training_of,
)

NEVER, ALWAYS = 1e9, 1e-2


NEVER, ALWAYS = 1e9, 1e-2
"""Norms to clip to."""


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
HARD = [Casts(1, "swap-all"), Casts(1, "recompute-all"), Casts(2, RandomPolicy(seed=5))]


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
