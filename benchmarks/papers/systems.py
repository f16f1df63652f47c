"""The systems of the papers' figures, as strategies of lohan_fx. No torch.

A `System` makes a plan and says how its step is timed. Where a system differs from the strategy of
its name, it does so by what the papers state about it, and only by that:

  - DeepSpeed and Colossal-AI start each copy when compute waits for it (`eager=False`): "P (SSD to
    CPU), P (CPU to GPU), C (GPU) and A (GPU to CPU) are serialized" (Fuyou §3.2).
  - DeepSpeed and Colossal-AI compute the loss from all logits at once (`whole_logits`), which ends
    at batch 32 on 24 GB; the named GPTs do it in pieces.
  - ZeRO-Infinity keeps the GPU busy for 36% of a step of 13B at batch 32, Colossal-AI for 12%
    (LoHan §III-B). What the plan does not explain of that is added to every step, in proportion to
    the parameters (`overhead_s_per_param`): at 36% the step is 63 s, and 40 s are explained.
  - ZeRO-Infinity needs 1.1 TB of host memory for 175B (LoHan §I): 6 bytes a parameter, what
    gradients in fp32 and parameters take. Colossal-AI trains smaller models than that (Fuyou,
    footnote 5): 8 bytes, parameters, gradients and masters.
  - "Without overlap", LoHan and Fuyou still overlap reads, updates and writes inside the optimizer
    stage (Fuyou §4.4): `pipelined`.
  - ZeRO-Offload as MemFerry runs it copies all parameters before forward begins (MemFerry §II-B).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.papers.models import VOCABULARY
from lohan_fx.errors import InsufficientMemoryError
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import FetchWindow, Plan, Schedule
from lohan_fx.planners import Planner, PlannerOptions, combine, get, make_plan
from lohan_fx.planners.go_memferry import go_memferry
from lohan_fx.planners.memferry import keep_everything
from lohan_fx.planners.prediction import predict
from lohan_fx.planners.registry import States, SwapTo
from lohan_fx.planners.strategy import Parameters, Setting, Strategy, place, with_defaults
from lohan_fx.program import lower, residency
from lohan_fx.workload import Workload

HOST_SHARE = 0.8
"""Of the host memory that a paper leaves to a system; `MemoryBudget`'s own default."""

LOGIT_BYTES = 2 + 4 + 4
"""Of one logit: half precision, fp32, and its gradient."""


@dataclass(frozen=True, kw_only=True)
class System:
    """One line of a figure.

    Attributes:
        label: as the papers call it.
        planner: a strategy.
        states, swap_to, schedule: `PlannerOptions`; "auto" is the strategy's own.
        eager: whether copies start as early as memory allows.
        pipelined: with schedule "serial": whether the optimizer stage overlaps its own reads,
            updates and writes.
        host_bytes_per_param: of host memory that the real system needs at least.
        whole_logits: whether logits of all tokens are on the device at once: in half precision,
            in fp32, and their gradients.
        overhead_s_per_param: seconds of every step that the plan does not explain.
        copy_first: whether all parameters are copied before forward begins.
        smallest: the key of what this system comes down to where memory is short; quicker to try.
    """

    label: str
    planner: str | Planner
    states: States = "auto"
    swap_to: SwapTo = "auto"
    schedule: Schedule | Literal["auto"] = "auto"
    eager: bool = True
    pipelined: bool = False
    host_bytes_per_param: float = 0.0
    whole_logits: bool = False
    overhead_s_per_param: float = 0.0
    copy_first: bool = False
    smallest: str | None = None

    def plan(self, workload: Workload, hw: HardwareProfile, host_bytes: int) -> Plan:
        """Plan one step on a server with so much host memory.

        Raises:
            InsufficientMemoryError: it does not fit.
        """
        need = int(self.host_bytes_per_param * workload.num_params)
        if need > host_bytes:
            raise InsufficientMemoryError(
                "host", need, host_bytes, where=self.label, at_peak=[], advice="Give it more."
            )
        budget = MemoryBudget.from_request(hw, {"host": int(HOST_SHARE * host_bytes)})
        options = PlannerOptions(states=self.states, swap_to=self.swap_to, schedule=self.schedule)
        if self.eager:
            made = make_plan(self.planner, workload, hw, budget, options)
        else:
            made = _unhurried(self.planner, workload, hw, budget, options)
        if self.whole_logits:
            self._check_logits(workload, hw, made)
        return _copied_first(workload, hw, options, made) if self.copy_first else made

    def _check_logits(self, workload: Workload, hw: HardwareProfile, plan: Plan) -> None:
        """Logits beside the residuals that stay on the device."""
        logits = LOGIT_BYTES * VOCABULARY * workload.num_tokens
        kept = [v for v, r in plan.residuals.items() if r.action == "keep"]
        need = logits + sum(workload.values[v].num_bytes for v in kept)
        if need > hw.device_bytes:
            raise InsufficientMemoryError(
                "device",
                need,
                hw.device_bytes,
                where=f"the logits of all tokens, {self.label}",
                at_peak=[("logits", logits)],
                advice="Use a smaller batch.",
            )


def _unhurried(
    planner: str | Planner,
    workload: Workload,
    hw: HardwareProfile,
    budget: MemoryBudget,
    options: PlannerOptions,
) -> Plan:
    """A strategy's choices with the shortest windows: copies start when compute waits for them."""
    strategy = get(planner)
    assert isinstance(strategy, Strategy)
    options = with_defaults(
        options, states=strategy.states, swap_to=strategy.swap_to, schedule=strategy.schedule
    )
    setting = Setting(
        name=strategy.name,
        workload=workload,
        hw=hw,
        budget=budget,
        options=options,
        tiers=place(workload, hw, budget, options),
    )
    made = setting.draft(strategy.activations(setting))
    if not setting.fits(made):
        raise setting.error(made)
    prediction = predict(workload, hw, options, made.plan, made.program, made.memory)
    return replace(made.plan, prediction=prediction)


def _copied_first(
    workload: Workload, hw: HardwareProfile, options: PlannerOptions, plan: Plan
) -> Plan:
    """All parameters are on the device before the first op, and stay to the end of the step."""
    first = workload.ops[0].name
    emitted = {u.emit_after for u in plan.units.values()}
    last = next(op.name for op in reversed(workload.ops) if op.name in emitted)
    units = {
        name: replace(
            unit,
            windows=tuple(
                FetchWindow(fetch_before=first, first_use=first, last_use=unit.emit_after or last)
                for _ in unit.windows[-1:]
            ),
        )
        for name, unit in plan.units.items()
    }
    plan = replace(plan, units=units)
    program = lower(workload, plan)
    prediction = predict(workload, hw, options, plan, program, residency(program))
    return replace(plan, prediction=prediction)


def _held(setting: Setting, found: object) -> Parameters:
    """One copy of every unit, from its first use to its last."""
    return Parameters(modes={u.name: "hold" for u in setting.workload.units})


_NATIVE_OFFLOAD = Strategy(
    name="native-offload",
    activations=keep_everything,
    parameters=_held,
    states="host",
    swap_to="host",
    schedule="serial",
)


SYSTEMS: Mapping[str, System] = {
    "lohan": System(label="LoHan", planner="lohan", states="ssd", smallest="swap-all"),
    "swap-all": System(label="swap all", planner="swap-all", states="ssd"),
    "lohan-naive": System(label="LoHan Naïve", planner="lohan", states="ssd", schedule="naive"),
    "lohan-serial": System(
        label="LoHan+ZeRO", planner="lohan", states="ssd", schedule="serial", pipelined=True
    ),
    "lohan-cpu-act": System(label="LoHan+CpuAct", planner="lohan", states="ssd", swap_to="host"),
    "zero-infinity": System(
        label="ZeRO-Infinity",
        planner="zero-infinity",
        eager=False,
        host_bytes_per_param=6.0,
        whole_logits=True,
        overhead_s_per_param=1.84e-9,
    ),
    "zero-offload": System(
        label="ZeRO-Offload", planner="zero-offload", eager=False, whole_logits=True
    ),
    "colossal-ai": System(
        label="Colossal-AI",
        planner="colossal-ai",
        eager=False,
        host_bytes_per_param=8.0,
        whole_logits=True,
        overhead_s_per_param=5.2e-9,
    ),
    "flashneuron": System(label="FlashNeuron", planner="flashneuron"),
    "lohan+ds": System(
        label="LoHan+DS", planner=combine("zero-infinity", states="ssd", name="lohan+ds")
    ),
    "lohan+cap": System(
        label="LoHan+Cap", planner=combine("capuchin", states="ssd", swap_to="host")
    ),
    "lohan+g10": System(label="LoHan+G10", planner=combine("g10", states="ssd")),
    "fuyou": System(label="Fuyou", planner="fuyou"),
    "fuyou-serial": System(
        label="Fuyou w/o overlapping", planner="fuyou", schedule="serial", pipelined=True
    ),
    "ssdtrain": System(label="SSDTrain", planner="ssdtrain"),
    "keep-all": System(label="keep all", planner="keep-all", states="device"),
    "native-offload": System(label="Native-Offload", planner=_NATIVE_OFFLOAD, copy_first=True),
    "memferry": System(label="MemFerry", planner="memferry"),
    "go-memferry": System(label="GO-MemFerry", planner=go_memferry(reserve=0.0)),
    "lohan+cm": System(label="LoHan+CM", planner=combine("checkmate", states="ssd")),
}
"""Key → system; keys are what figures and tests name."""
