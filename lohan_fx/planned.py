"""A plan together with all that it was made from: workload, machine, budget; simulated on demand.

`lohan_fx.plan` makes a `Planned`. `save` writes a plan file that `Plan.load` and `lohan-fx report`
read too; with what it holds besides, `Planned.load` brings everything back without torch, so that
a plan can be simulated again, on another machine if need be.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from rich.table import Table

from lohan_fx.arguments import path_of
from lohan_fx.bounds import Bound, step_bound
from lohan_fx.errors import HardwareError, LohanError, PlanError
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import LATE, TIERS, Plan
from lohan_fx.planners import PlannerOptions
from lohan_fx.planners.pareto import lower_bound
from lohan_fx.planners.prediction import predicted_time
from lohan_fx.planners.registry import AskedSchedule, States, SwapTo
from lohan_fx.program import Program, lower
from lohan_fx.reading import Reader, json_of, kind_of
from lohan_fx.report import (
    cast_lines,
    flops_text,
    footprint_parts,
    memory_table,
    plan_table,
    render,
    short_bytes,
)
from lohan_fx.simulate import Simulation, simulate
from lohan_fx.timeline import PHASES, save_trace
from lohan_fx.workload import MODEL_INPUT_KINDS, Op, Unit, Value, Workload

T = TypeVar("T")

SearchKind = Literal["max-batch", "max-model"]

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One batch size or model that a search tried; `reason` says why it does not fit."""

    label: str
    fits: bool
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Search:
    """How the largest batch or model was found.

    Attributes:
        kind: "max-batch" or "max-model".
        found: what fits, ``batch 96`` or ``gpt-175b``.
        trials: in the order in which they were tried.
        limit: what binds: why the next larger one does not fit; or that nothing larger was tried.
    """

    kind: SearchKind
    found: str
    trials: tuple[Trial, ...]
    limit: str

    def table(self) -> Table:
        """Every trial, from small to large."""
        table = Table(title=f"{self.kind}: {self.found}", title_justify="left", title_style="bold")
        table.add_column("tried", no_wrap=True)
        table.add_column("fits")
        table.add_column("why not")
        for trial in self.trials:
            table.add_row(trial.label, "yes" if trial.fits else "no", trial.reason)
        return table


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan and what explains it. Seconds, bytes, FLOPs.

    Attributes:
        model: the model's name.
        workload: the step; `Op.seconds` are for `hw`.
        budget: the memory that the plan may use.
        batch: samples of one step, if known.
        num_items: what throughput counts in one step, `items` of them: tokens, images, samples.
        compute_dtype: name of the dtype of matmuls, ``bfloat16``.
        traced: how the workload was made: in full, or by replication, and why.
        search: how `batch` or `model` was found, if it was searched for.
        states, swap_to, schedule: what the plan was asked to be, as `PlannerOptions` have them: the
            bound is of plans that obey these, too.
        source: makes workloads of other batch sizes; None if the plan was loaded from a file.
    """

    model: str
    workload: Workload
    plan: Plan
    hw: HardwareProfile
    budget: MemoryBudget
    batch: int | None = None
    num_items: int = 0
    items: str = "samples"
    compute_dtype: str = "float32"
    traced: str = ""
    search: Search | None = None
    states: States = "auto"
    swap_to: SwapTo = "auto"
    schedule: AskedSchedule = "auto"
    source: Any = field(default=None, repr=False, compare=False)

    # -- what it does -----------------------------------------------------------------------

    @cached_property
    def program(self) -> Program:
        """The instructions of the step."""
        return lower(self.workload, self.plan)

    @cached_property
    def simulation(self) -> Simulation:
        """One simulated step on `hw`.

        Raises:
            HardwareError: the plan uses the SSD tier, and the profile has no SSDs.
        """
        return simulate(self.workload, self.plan, self.hw, program=self.program)

    @cached_property
    def busiest(self) -> Bound:
        """What this plan's busiest resource needs: no order of the same work is faster."""
        return step_bound(self.workload, self.plan, self.hw, program=self.program)

    @cached_property
    def bound_s(self) -> float:
        """Seconds that no plan undercuts on this machine and budget, of whatever strategy, with the
        `states`, `swap_to` and `schedule` that were asked for: the lower bound in `pareto`'s notes.
        Schedule "auto" is "optimized" ("overlapped" or "deferred", if that is this plan's)."""
        return lower_bound(self.workload, self.hw, self.budget, self.bound_options)

    @property
    def bound_options(self) -> PlannerOptions:
        """What plans have in common that `bound_s` is of."""
        schedule = self.plan.schedule if self.plan.schedule in LATE else self.schedule
        return PlannerOptions(
            states=self.states,
            swap_to=self.swap_to,
            schedule="optimized" if schedule == "auto" else schedule,
        )

    @property
    def closed_form_s(self) -> float:
        """T_iter of this plan by LoHan Eq. 1–7 and their extensions (`cost_model`)."""
        options = PlannerOptions()
        return predicted_time(self.workload, self.hw, options, self.plan, self.program).step_s

    @property
    def step_s(self) -> float:
        """Simulated seconds of one step, optimizer included."""
        return self.simulation.step_s

    @property
    def gap(self) -> float:
        """How much longer the simulated step is than `bound_s`: 0.02 is 2%."""
        return self.step_s / self.bound_s - 1 if self.bound_s > 0 else 0.0

    @property
    def items_per_s(self) -> float:
        """Throughput in `items`."""
        return self.num_items / self.step_s if self.step_s else 0.0

    @property
    def flops_per_s(self) -> float:
        """FLOPs of forward and backward, without recomputation, over the step."""
        done = self.workload.forward_flops + self.workload.backward_flops
        return done / self.step_s if self.step_s else 0.0

    @property
    def ideal_s(self) -> float:
        """Device seconds of forward and backward alone, with nothing recomputed or moved."""
        return sum(op.seconds for op in self.workload.ops)

    def on(self, hw: HardwareProfile) -> Planned:
        """The same plan on another machine; op seconds are made anew by the roofline."""
        if hw == self.hw:
            return self
        workload = retimed(self.workload, hw, self.compute_dtype)
        return replace(self, hw=hw, workload=workload)

    def misfits(self) -> list[str]:
        """Where the plan needs more memory than the machine has (after `on`)."""
        have = {tier: getattr(self.hw, f"{tier}_bytes") for tier in TIERS}
        return [
            f"{self.model}, {self.plan.strategy}: needs {short_bytes(need)} of {tier} memory, and "
            f"{self.hw.name} has {short_bytes(have[tier])}"
            for tier in TIERS
            if (need := self.simulation.peaks[tier]) > have[tier]
        ]

    # -- output -----------------------------------------------------------------------------

    def parts(self) -> list[Table | str]:
        """Tables and notes, ready to print with rich."""
        found: list[Table | str] = [self.search.table()] if self.search is not None else []
        if self.search is not None:
            found.append(f"limit: {self.search.limit}")
        found.append(step_table([self]))
        parts = footprint_parts(self.workload, self.plan)
        found += [plan_table(self.workload, self.plan), *cast_lines(self.plan)]
        found.append(memory_table(self.plan, self.budget, parts))
        found += [f"note: {note}" for note in self.plan.notes]
        found += [f"traced: {self.traced}"] if self.traced else []
        return found

    def report(self) -> str:
        """The same as plain text."""
        return render(self.parts())

    def __str__(self) -> str:
        return self.report()

    def trace(self, path: str | Path) -> None:
        """Write the simulated timeline for Perfetto."""
        save_trace(path, self.simulation.timeline)

    def save(self, path: str | Path) -> None:
        """Write a plan file, with workload, machine and budget in it."""
        data = {**self.plan.to_dict(), "planned": self._made_from()}
        try:
            path_of("path", path).write_text(json.dumps(data) + "\n", encoding="utf-8")
        except OSError as error:
            raise PlanError(f"cannot write {path}: {error.strerror}; name a file") from error

    def _made_from(self) -> dict[str, Any]:
        return {
            "format": FORMAT_VERSION,
            "model": self.model,
            "batch": self.batch,
            "num_items": self.num_items,
            "items": self.items,
            "compute_dtype": self.compute_dtype,
            "traced": self.traced,
            "states": self.states,
            "swap_to": self.swap_to,
            "schedule": self.schedule,
            "hardware": self.hw.to_dict(),
            "budget": dataclasses.asdict(self.budget),
            "workload": workload_to_dict(self.workload),
        }

    @classmethod
    def load(cls, path: str | Path) -> Planned:
        """Read what `save` wrote.

        Raises:
            PlanError: the file is something else: a plan alone has no workload to simulate.
        """
        try:
            data = json_of(path_of("path", path))
        except OSError as error:
            raise PlanError(
                f"cannot read the plan {path}: {error.strerror}; name a file that Planned.save or "
                "lohan-fx plan --out wrote"
            ) from error
        except ValueError as error:
            raise PlanError(f"{path} is no JSON file: {error}") from error
        if kind_of(data) not in ("", "a plan"):
            raise PlanError(f"{path} is no plan, but {kind_of(data)}")
        made = data.get("planned") if isinstance(data, Mapping) else None
        if not isinstance(made, Mapping) or made.get("format") != FORMAT_VERSION:
            raise PlanError(
                f"{path} holds no workload: `lohan-fx plan --out` and Planned.save write files "
                "that can be simulated (Plan.save writes the decisions alone)"
            )
        try:
            parts = _READER.read(_MadeFrom, made, "planned")
            found = cls(
                plan=Plan.from_dict(data),
                workload=workload_from_dict(parts.workload),
                hw=HardwareProfile.from_dict(parts.hardware),
                **{key: getattr(parts, key) for key in _MADE_FROM_AS_IT_IS},
            )
            _ = found.program  # what the plan says of the workload fits, too
        except LohanError as error:
            raise PlanError(f"{path}: {error}") from error
        except (KeyError, IndexError, StopIteration, ValueError) as error:
            raise PlanError(
                f"{path} has a workload that contradicts itself ({error!r}): plan it again"
            ) from error
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _MadeFrom:
    """The entry "planned" of a plan file."""

    format: int
    model: str
    batch: int | None
    num_items: int
    items: str
    compute_dtype: str
    traced: str
    hardware: Mapping[str, Any]
    budget: MemoryBudget
    workload: Mapping[str, Any]
    states: States = "auto"
    swap_to: SwapTo = "auto"
    schedule: AskedSchedule = "auto"


_MADE_FROM_AS_IT_IS = (
    "model",
    "batch",
    "num_items",
    "items",
    "compute_dtype",
    "traced",
    "budget",
    "states",
    "swap_to",
    "schedule",
)

_READER = Reader(
    what="the plan file",
    error=PlanError,
    optional={_MadeFrom: ("states", "swap_to", "schedule")},  # files of earlier versions lack them
)


def hardware(hw: HardwareProfile | str | Path) -> HardwareProfile:
    """A profile as it is, a preset by name, or a profile from a ``.json`` file.

    Raises:
        HardwareError: there is no such preset or file, or the file holds no profile.
    """
    if isinstance(hw, HardwareProfile):
        return hw
    if not isinstance(hw, (str, Path)):
        raise HardwareError(
            f"hw={hw!r}: use a profile (lohan_fx.profile_hardware()), the name of a preset, or the "
            "file of a saved profile"
        )
    is_file = str(hw).endswith(".json")
    return HardwareProfile.load(hw) if is_file else HardwareProfile.preset(str(hw))


# -- tables ----------------------------------------------------------------------------------


def seconds_text(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def step_table(planned: Sequence[Planned]) -> Table:
    """One column a plan: size, simulated time by phase, throughput, bound, traffic."""
    accumulates = any(u.accumulator_bytes for p in planned for u in p.workload.units)
    what = "the last micro-batch of a step, with the updates" if accumulates else "one step"
    table = Table(title=f"{what}, simulated", title_justify="left", title_style="bold")
    table.add_column("")
    for p in planned:
        table.add_column(f"{p.model}, {p.plan.strategy}", justify="right")
    rows: list[tuple[str, Callable[[Planned], str]]] = [
        ("machine", lambda p: p.hw.name),
        ("parameters", _params_text),
        ("batch", _batch_text),
        ("optimizer schedule", lambda p: p.plan.schedule),
        ("time", lambda p: seconds_text(p.step_s)),
        *((f"  {phase}", _phase_text(phase)) for phase in PHASES),
        ("  device waits for transfers", lambda p: seconds_text(p.simulation.exposed_transfer_s)),
        ("  its busiest resource alone", lambda p: _bound_text(p.busiest, p.hw)),
        ("closed form (LoHan Eq. 1–7), no bound", lambda p: seconds_text(p.closed_form_s)),
        ("lower bound: no plan is faster than", lambda p: seconds_text(p.bound_s)),
        ("gap to that", lambda p: f"{p.gap:.1%}"),
        ("throughput", lambda p: f"{rate_text(p.items_per_s)} {p.items}/s"),
        ("model FLOPs", lambda p: f"{flops_text(p.flops_per_s)}FLOPS"),
        ("recomputed", lambda p: f"{flops_text(p.plan.prediction.recompute_flops)}FLOP"),
        ("device to host", lambda p: short_bytes(p.simulation.traffic.d2h_bytes)),
        ("host to device", lambda p: short_bytes(p.simulation.traffic.h2d_bytes)),
        ("SSD read", lambda p: short_bytes(p.simulation.traffic.ssd_read_bytes)),
        ("SSD written", lambda p: short_bytes(p.simulation.traffic.ssd_write_bytes)),
    ]
    for what, cell in rows:
        table.add_row(what, *(cell(p) for p in planned))
    return table


def rate_text(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _bound_text(bound: Bound, hw: HardwareProfile) -> str:
    resource = " + ".join(map(hw.lane_name, bound.resource.split(" + ")))
    return f"{seconds_text(bound.seconds)} ({resource})"


def _params_text(p: Planned) -> str:
    count = p.workload.num_params
    for factor, unit in ((1e9, "billion"), (1e6, "million")):
        if count >= 0.1 * factor:
            return f"{count / factor:,.2f} {unit}"
    return f"{count:,}"


def _batch_text(p: Planned) -> str:
    items = f"{p.num_items:,} {p.items}"
    return items if p.batch is None else f"{p.batch:,} ({items})"


def _phase_text(phase: str) -> Callable[[Planned], str]:
    def text(p: Planned) -> str:
        seconds: float = getattr(p.simulation, f"{phase}_s")
        lane = p.simulation.binding.get(phase)  # type: ignore[call-overload]
        return seconds_text(seconds) + (f" ({p.hw.lane_name(lane)})" if lane and seconds else "")

    return text


# -- other machines --------------------------------------------------------------------------


def retimed(workload: Workload, hw: HardwareProfile, dtype: str) -> Workload:
    """The workload with another machine's roofline: max(FLOPs / rate, bytes / bandwidth).

    Args:
        dtype: name of the dtype whose matmul rate counts for every op.
    """
    rate = hw.flops_per_s(dtype)
    return workload.timed(
        {
            op.name: max(
                op.flops / rate, (op.bytes_read + op.bytes_written) / hw.device_bytes_per_s
            )
            for op in workload.ops
        }
    )


# -- workloads as JSON -----------------------------------------------------------------------

_OP = tuple(f.name for f in dataclasses.fields(Op))
_VALUE = tuple(f.name for f in dataclasses.fields(Value))
_UNIT = tuple(f.name for f in dataclasses.fields(Unit))


def workload_to_dict(workload: Workload) -> dict[str, Any]:
    """Rows without field names: a deep model has thousands."""
    return {
        "name": workload.name,
        "num_tokens": workload.num_tokens,
        "op_fields": _OP,
        "ops": [[getattr(x, f) for f in _OP] for x in workload.ops],
        "value_fields": _VALUE,
        "values": [[getattr(x, f) for f in _VALUE] for x in workload.values.values()],
        "unit_fields": _UNIT,
        "units": [[getattr(x, f) for f in _UNIT] for x in workload.units],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """What `workload_to_dict` makes."""

    name: str
    num_tokens: int
    op_fields: tuple[str, ...]
    ops: tuple[tuple[Any, ...], ...]
    value_fields: tuple[str, ...]
    values: tuple[tuple[Any, ...], ...]
    unit_fields: tuple[str, ...]
    units: tuple[tuple[Any, ...], ...]


def workload_from_dict(data: Mapping[str, Any]) -> Workload:
    """The inverse of `workload_to_dict`.

    Raises:
        PlanError: something is missing or of another kind, or the rows have other fields than this
            version of lohan_fx.
        ValueError: it contradicts itself: an op reads what no op before it makes.
    """
    at = "planned.workload"
    rows = _READER.read(_Rows, data, at)
    known = {"op_fields": _OP, "value_fields": _VALUE, "unit_fields": _UNIT}
    for key, names in known.items():
        if getattr(rows, key) != names:
            raise PlanError(f"{key} of the workload are not this version's: plan it again")

    def made(kind: type[T], names: Sequence[str], what: str) -> tuple[T, ...]:
        found = []
        for i, cells in enumerate(getattr(rows, what)):
            if len(cells) != len(names):
                raise _READER.wrong(f"{at}.{what}[{i}]", cells, f"a list of {len(names)}")
            cell_of = dict(zip(names, cells, strict=True))
            found.append(_READER.read(kind, cell_of, f"{at}.{what}[{i}]"))
        return tuple(found)

    workload = Workload(
        name=rows.name,
        ops=made(Op, _OP, "ops"),
        values={v.name: v for v in made(Value, _VALUE, "values")},
        units=made(Unit, _UNIT, "units"),
        num_tokens=rows.num_tokens,
    )
    _check_names(workload)
    return workload


def _check_names(workload: Workload) -> None:
    """See that what is named is there when it is needed; that ops name known values is checked."""
    values = workload.values.values()
    there = {v.name for v in values if v.kind in MODEL_INPUT_KINDS}
    for op in workload.ops:
        early = [name for name in op.reads if name not in there]
        if early:
            raise ValueError(f"op {op.name} reads {early[0]} before an op makes it")
        there.update(op.writes)
    for v in values:
        if v.unit is not None and v.unit not in workload.unit_by_name:
            raise ValueError(f"value {v.name} is of unit {v.unit}, which is not there")
    for unit in workload.units:
        lost = [name for name in unit.gradients if name not in workload.producer]
        if lost:
            raise ValueError(f"no op makes gradient {lost[0]} of unit {unit.name}")
