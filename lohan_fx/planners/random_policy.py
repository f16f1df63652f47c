"""random: seeded coin tosses. A floor for comparisons, and a test of every combination."""

from __future__ import annotations

import random
from dataclasses import dataclass

from lohan_fx.footprint import may_cast, may_park
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import Action, Plan, Tier
from lohan_fx.planners.registry import PlannerOptions, register
from lohan_fx.planners.schedule import Choices, finish
from lohan_fx.planners.tiers import has_ssd, unit_tiers
from lohan_fx.workload import Workload

_ACTIONS: tuple[Action, ...] = ("keep", "swap", "recompute")


@dataclass(frozen=True, slots=True)
class RandomPolicy:
    """Uniform action for each residual, uniform tier for each unit and each swapped residual (and
    for compute copies of SSD units, if `options.copies` lets them leave their states; for gradients
    that wait; and for copies on the device).

    `options.states` and `options.swap_to` narrow the choice. The same seed gives the same plan.
    """

    seed: int = 0

    def __call__(
        self,
        workload: Workload,
        hw: HardwareProfile,
        budget: MemoryBudget,
        options: PlannerOptions,
    ) -> Plan:
        """Raises `InsufficientMemoryError` if the dice ask for more than there is."""
        rng = random.Random(self.seed)
        ssd = has_ssd(hw, budget)
        homes: tuple[Tier, ...] = ("device", "host", "ssd") if ssd else ("device", "host")
        tiers = unit_tiers(workload, hw, budget, options)
        fixed = options.fixed_units or {}
        for unit in workload.units:
            tier = rng.choice(homes)
            if options.states == "auto" and unit.name not in fixed:
                tiers[unit.name] = tier
        swap_homes: tuple[Tier, ...] = ("host", "ssd") if ssd else ("host",)
        choices = Choices(
            actions={v: rng.choice(_ACTIONS) for v in workload.residuals},
            unit_tiers=tiers,
            swap_tiers={v: rng.choice(swap_homes) for v in workload.residuals}
            if options.swap_to == "auto"
            else None,
            copies=[
                u.name
                for u in workload.units
                if tiers[u.name] == "ssd" and u.has_separate_copy and rng.random() < 0.5
            ]
            if options.copies == "host"
            else None,
            parked=[
                u.name
                for u in workload.units
                if may_park(u, tiers[u.name], options.update_schedule) and rng.random() < 0.5
            ],
            casts=[
                u.name for u in workload.units if may_cast(u, tiers[u.name]) and rng.random() < 0.5
            ],
        )
        return finish(workload, hw, budget, options, choices, "random")


register("random")(RandomPolicy())
