"""`ablate`: strategies and other axes of a plan side by side, predicted and measured.

Every case is planned and simulated; one that does not fit is a row with the reason. With
``measure=True`` the cases that fit also run on this machine (`lohan_fx.measuring`).
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.table import Table

from lohan_fx.arguments import check_call, check_count, check_flag, several
from lohan_fx.errors import HardwareError, InsufficientMemoryError, LohanError, PlanError
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import TIERS
from lohan_fx.planned import Planned, hardware, rate_text, seconds_text
from lohan_fx.planners import Planner, PlannerOptions, get, make_plan, names
from lohan_fx.report import render, short_bytes
from lohan_fx.workload import Workload

if TYPE_CHECKING:
    from lohan_fx.measuring import Measured

SLOW = frozenset({"checkmate", "lohan+checkmate"})
"""Strategies that are left out unless they are asked for: minutes on deep models."""

Memory = Mapping[str, int | str] | MemoryBudget | None


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one row was asked for."""

    strategy: str
    batch: int | None = None
    memory: str = ""
    states: str = "auto"
    swap_to: str = "auto"
    schedule: str = "auto"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case. Seconds, bytes, FLOPs; of a step. What was not found out is None.

    Attributes:
        case: what was asked for.
        reason: why it does not fit; empty if it does.
        schedule: how the plan's optimizer overlaps.
        step_s, forward_s, backward_s, optimizer_s: simulated.
        items_per_s: throughput in what `Ablation.items` says.
        flops_per_s: model FLOPs (recomputation left out) over the step.
        swapped_bytes: A_G2M, activations that leave the device.
        num_casts: units on the device that keep no compute copy.
        bound_s: no plan of any strategy is faster on this machine and budget, with the states,
            swap_to and schedule of the case.
        gap: step_s / bound_s − 1.
        binding: the lane that works longest, as reports call it.
        plan_s: how long planning took.
        measured: what running it showed.
        planned: the plan; not part of any output.
    """

    case: Case
    reason: str = ""
    schedule: str | None = None
    step_s: float | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    optimizer_s: float | None = None
    items_per_s: float | None = None
    flops_per_s: float | None = None
    peak_device_bytes: int | None = None
    peak_host_bytes: int | None = None
    peak_ssd_bytes: int | None = None
    d2h_bytes: int | None = None
    h2d_bytes: int | None = None
    ssd_read_bytes: int | None = None
    ssd_write_bytes: int | None = None
    swapped_bytes: int | None = None
    recompute_flops: int | None = None
    num_casts: int | None = None
    bound_s: float | None = None
    gap: float | None = None
    binding: str | None = None
    plan_s: float | None = None
    measured: Measured | None = None
    planned: Planned | None = field(default=None, repr=False, compare=False)

    @property
    def fits(self) -> bool:
        return self.planned is not None

    def flat(self) -> dict[str, Any]:
        """Column → plain value; the same columns for every row."""
        found: dict[str, Any] = {f.name: getattr(self.case, f.name) for f in fields(self.case)}
        found["fits"] = self.fits
        for f in fields(self):
            if f.name not in ("case", "measured", "planned"):
                name = "plan_schedule" if f.name == "schedule" else f.name
                found[name] = getattr(self, f.name)
        for name in _MEASURED:
            found[f"measured_{name}"] = getattr(self.measured, name, None)
        return found


_MEASURED = (
    "step_s",
    "items_per_s",
    "flops_per_s",
    "peak_device_bytes",
    "d2h_bytes",
    "h2d_bytes",
    "ssd_read_bytes",
    "ssd_write_bytes",
    "timed_step_s",
)
"""Fields of `measuring.Measured` that a table shows."""


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """All rows, in the order in which they were planned."""

    model: str
    hardware: str
    items: str
    rows: tuple[Row, ...]

    @property
    def best(self) -> Row | None:
        """The row with the shortest simulated step; None if nothing fits."""
        found = [row for row in self.rows if row.step_s is not None]
        return min(found, key=lambda row: row.step_s or 0.0, default=None)

    # -- output -----------------------------------------------------------------------------

    def tables(self) -> list[Table]:
        """For people: time and throughput, memory and traffic of what fits, what was measured."""
        time_columns = [*self._case_columns(), *self._time_columns()]
        title = f"{self.model} on {self.hardware}: one step"
        found = [_table(title, time_columns, self.rows)]
        fitting = [row for row in self.rows if row.fits]
        if fitting:
            columns = [*self._case_columns(), *self._memory_columns()]
            title = f"peaks and traffic of one step in {self._unit[0]}, recomputation in TFLOP"
            table = _table(title, columns, fitting)
            if self._casts:
                table.caption, table.caption_justify = _CASTS_TEXT, "left"
            found.append(table)
        measured = [row for row in self.rows if row.measured is not None]
        if measured:
            columns = [*self._case_columns(), *self._measured_columns()]
            found.append(_table("measured on this machine", columns, measured))
        return found

    def __str__(self) -> str:
        return render(self.tables())

    def to_json(self) -> str:
        """Every figure, unrounded."""
        data = {
            "model": self.model,
            "hardware": self.hardware,
            "items": self.items,
            "rows": [row.flat() for row in self.rows],
        }
        return json.dumps(data, indent=1) + "\n"

    def to_csv(self) -> str:
        """One line a row, unrounded; what is not known is empty."""
        out = io.StringIO()
        found = [row.flat() for row in self.rows]
        columns = list(found[0]) if found else []
        writer = csv.DictWriter(out, fieldnames=columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
        return out.getvalue()

    def to_markdown(self) -> str:
        """All columns in one table."""
        columns = [*self._case_columns(), *self._time_columns(), *self._memory_columns(named=True)]
        if any(row.measured is not None for row in self.rows):
            columns += self._measured_columns()[1:]
        lines = [
            "| " + " | ".join(column.name for column in columns) + " |",
            "|" + "".join("---|" if column.left else "---:|" for column in columns),
        ]
        lines += ["| " + " | ".join(c.text(row) for c in columns) + " |" for row in self.rows]
        return "\n".join(lines) + "\n"

    def save(self, path: str | Path) -> None:
        """Write JSON, CSV or Markdown, by the file's ending.

        Raises:
            LohanError: another ending.
        """
        formats = {".json": self.to_json, ".csv": self.to_csv, ".md": self.to_markdown}
        make = formats.get(Path(path).suffix)
        if make is None:
            raise LohanError(f"{path}: use a name that ends in {', '.join(formats)}")
        Path(path).write_text(make(), encoding="utf-8")

    def plot(self, path: str | Path) -> None:
        """T_iter over A_G2M, every strategy's choice starred (LoHan Fig. 9b)."""
        from lohan_fx.plots import plot_swaps

        plot_swaps(self, path)

    def plot_memory(self, path: str | Path) -> None:
        """Throughput over peak activation memory: SSDTrain's recompute-offload-keep curve."""
        from lohan_fx.plots import plot_memory

        plot_memory(self, path)

    def _case_columns(self) -> list[_Column]:
        varying = (a for a in _AXES if len({getattr(row.case, a) for row in self.rows}) > 1)
        return [
            _Column("strategy", lambda r: r.case.strategy, left=True, always=True),
            *(_Column(axis, _axis(axis), left=True, always=True) for axis in varying),
        ]

    def _time_columns(self) -> list[_Column]:
        found = [
            _Column("time", lambda r: seconds_text(r.step_s or 0.0)),
            _Column(f"{self.items}/s", lambda r: rate_text(r.items_per_s or 0.0)),
            _Column("TFLOPS", _number("flops_per_s", 1e12)),
            _Column("gap", lambda r: "" if r.gap is None else f"{r.gap:.1%}"),
            _Column("busiest", lambda r: r.binding or "", left=True),
        ]
        if not all(row.fits for row in self.rows):
            found.append(_Column("why not", lambda r: r.reason, left=True, always=True))
        return found

    def _measured_columns(self) -> list[_Column]:
        return [
            _Column("predicted", lambda r: seconds_text(r.step_s or 0.0)),
            _Column("ops timed", _measured("timed_step_s", seconds_text)),
            _Column("measured", _measured("step_s", seconds_text)),
            _Column(_ERROR, _error),
            _Column(f"measured {self.items}/s", _measured("items_per_s", rate_text)),
            _Column("measured device", _measured("peak_device_bytes", short_bytes)),
        ]

    @property
    def _unit(self) -> tuple[str, int]:
        """What sizes are written in."""
        sizes = (getattr(row, name) or 0 for row in self.rows for name, _ in _SIZES)
        return ("GiB", 2**30) if max(sizes, default=0) >= 2**30 else ("MiB", 2**20)

    def _memory_columns(self, *, named: bool = False) -> list[_Column]:
        unit, scale = self._unit
        tail, flops = (f" {unit}", " TFLOP") if named else ("", "")
        return [
            *(_Column(name + tail, _size(field_name, scale)) for field_name, name in _SIZES),
            _Column(f"recomputed{flops}", _number("recompute_flops", 1e12, 3)),
            *([_Column(_CASTS, lambda r: str(r.num_casts or 0))] if self._casts else []),
        ]

    @property
    def _casts(self) -> bool:
        """Whether any row's plan has units without compute copies."""
        return any(row.num_casts for row in self.rows)


@dataclass(frozen=True)
class _Column:
    """A column of a table; it is empty for rows that do not fit, unless it `always` shows."""

    name: str
    cell: Callable[[Row], str]
    left: bool = False
    always: bool = False

    def text(self, row: Row) -> str:
        return self.cell(row) if row.fits or self.always else ""


_ERROR = "error of ops timed"

_CASTS = "cast units"
_CASTS_TEXT = (
    "cast units: units on the device that keep no compute copy; it is cast from the fp32 master "
    "where ops use it"
)


def _table(title: str, columns: Sequence[_Column], rows: Iterable[Row]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        justify: Literal["left", "right"] = "left" if column.left else "right"
        if column.name in ("memory", "why not", _ERROR):
            table.add_column(column.name, justify=justify, overflow="fold")
        else:
            table.add_column(column.name, justify=justify, no_wrap=True)
    for row in rows:
        table.add_row(*(column.text(row) for column in columns))
    return table


_AXES = ("batch", "memory", "states", "swap_to", "schedule")


def _axis(name: str) -> Callable[[Row], str]:
    return lambda row: str(getattr(row.case, name))


def _number(field_name: str, scale: float = 1.0, digits: int = 4) -> Callable[[Row], str]:
    return lambda row: f"{(getattr(row, field_name) or 0) / scale:,.{digits}g}"


def _size(field_name: str, scale: int) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        value = (getattr(row, field_name) or 0) / scale
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value else "–"

    return text


def _measured(field_name: str, show: Callable[[Any], str]) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        value = getattr(row.measured, field_name, None)
        return "" if value is None else show(value)

    return text


def _error(row: Row) -> str:
    if row.measured is None:
        return ""
    return f"{row.measured.timed_step_s / row.measured.step_s - 1:+.0%}"


_SIZES = (
    ("peak_device_bytes", "device"),
    ("peak_host_bytes", "host"),
    ("peak_ssd_bytes", "SSD"),
    ("d2h_bytes", "D2H"),
    ("h2d_bytes", "H2D"),
    ("ssd_read_bytes", "read"),
    ("ssd_write_bytes", "written"),
)
"""Field of a row, and its column."""

# -- running ---------------------------------------------------------------------------------


def ablate(
    model: Any,
    inputs: Any = None,
    *,
    hw: HardwareProfile | str | None = None,
    strategies: str | Planner | Iterable[str | Planner] | None = None,
    batch: int | Iterable[int] | None = None,
    memory: Memory | Sequence[Memory] = None,
    states: str | Iterable[str] = "auto",
    swap_to: str | Iterable[str] = "auto",
    schedule: str | Iterable[str] = "auto",
    sequence: int | None = None,
    optimizer: Any = "adamw",
    dtype: Any = "auto",
    outputs: Any = "auto",
    full_trace: bool = False,
    measure: bool = False,
    steps: int = 3,
    on_row: Callable[[Row], None] | None = None,
) -> Ablation:
    """Compare strategies; every axis may have several values, and all combinations are tried.

    Args:
        model, inputs, sequence, optimizer, dtype, outputs, full_trace: as for `lohan_fx.plan`. A
            `Planned` or a `Workload` will do as the model.
        hw: a profile, a preset's name, or a file; a `Planned` brings its own.
        strategies: one or several names or callables; all registered ones but `SLOW` if None.
        batch: one or several.
        memory: one budget or several, each as for `lohan_fx.compile` or a `MemoryBudget`.
        states, swap_to, schedule: one or several values of `PlannerOptions`.
        measure: also compile and run what fits, on this machine; the model needs weights (or is a
            function that builds it), its forward returns the loss, its inputs are real tensors,
            and `hw` is of this machine.
        steps: measured steps; the median counts.
        on_row: is called with each row when it is finished.

    Raises:
        LohanError: what is asked for cannot be tried at all; a case that does not fit is a row.
    """
    if strategies is None:
        strategies = [s for s in names() if s not in SLOW]
    chosen = [strategies] if callable(strategies) else several("strategies", strategies)
    for strategy in chosen:
        get(strategy)
    axes = [several("states", states), several("swap_to", swap_to), several("schedule", schedule)]
    sizes = several("batch", batch)
    check_flag("measure", measure)
    check_count("steps", steps, "measured steps")
    if on_row is not None:
        if not callable(on_row):
            raise LohanError(f"on_row={on_row!r}: give a function of a row")
        check_call(on_row, 1, "on_row is called with each row")
    for where, to, how in itertools.product(*axes):
        PlannerOptions(states=where, swap_to=to, schedule=how)  # refused before minutes of work
    given = _Given(model, inputs, hw, sequence, optimizer, dtype, outputs, full_trace).start()
    budgets = _budgets(given.hw, memory, given.budget)
    runner = None
    if measure:
        from lohan_fx.measuring import Runner

        runner = Runner(model, inputs, given.hw, sequence, optimizer, dtype, outputs, steps)
    rows = []
    bounds: dict[tuple[Any, ...], float] = {}
    cases: tuple[Iterable[Any], ...] = (sizes, budgets, *axes, chosen)
    for size, (label, budget), where, to, how, strategy in itertools.product(*cases):
        case = Case(
            strategy=strategy if isinstance(strategy, str) else _label(strategy),
            batch=size,
            memory=label,
            states=where,
            swap_to=to,
            schedule=how,
        )
        options = PlannerOptions(states=where, swap_to=to, schedule=how)
        row = given.row(case, strategy, budget, options, bounds)
        if runner is not None and row.planned is not None:
            measured = runner.run(strategy, row.planned, options)
            row = replace(row, measured=measured)
        rows.append(row)
        if on_row is not None:
            on_row(row)
    items = next((r.planned.items for r in rows if r.planned is not None), "items")
    return Ablation(model=given.name, hardware=given.hw.name, items=items, rows=tuple(rows))


def _label(strategy: Planner) -> str:
    return str(getattr(strategy, "name", None) or getattr(strategy, "__name__", "custom"))


def _budgets(
    hw: HardwareProfile, memory: Memory | Sequence[Memory], default: MemoryBudget | None
) -> list[tuple[str, MemoryBudget]]:
    """(label, budget) of each request."""
    asked: list[Memory] = (
        list(memory) if isinstance(memory, Sequence) and not isinstance(memory, str) else [memory]
    )
    found = []
    for request in asked:
        if isinstance(request, MemoryBudget):
            sizes = ((tier, getattr(request, f"{tier}_bytes")) for tier in TIERS)
            found.append((" ".join(f"{t}={short_bytes(size)}" for t, size in sizes), request))
        elif request is None and default is not None:
            found.append(("as planned", default))
        else:
            budget = MemoryBudget.from_request(hw, request)
            label = " ".join(f"{tier}={_text(size)}" for tier, size in (request or {}).items())
            found.append((label or "default", budget))
    return found


def _text(size: int | str) -> str:
    return size if isinstance(size, str) else short_bytes(size)


@dataclass
class _Given:
    """The model in whatever form it was given."""

    model: Any
    inputs: Any
    profile: HardwareProfile | str | None
    sequence: int | None
    optimizer: Any
    dtype: Any
    outputs: Any
    full_trace: bool
    budget: MemoryBudget | None = None
    name: str = ""
    tracer: Any = None
    base: Planned | None = None

    def start(self) -> _Given:
        model = self.model
        if isinstance(model, Planned):
            self.base, self.tracer = model, model.source
            self.name = model.model
            if self.profile is None:
                self.profile, self.budget = model.hw, model.budget
            elif hardware(self.profile) != model.hw:
                self.base, self.tracer = model.on(hardware(self.profile)), None
        if self.profile is None:
            raise LohanError("hw= is missing: give a profile, the name of a preset, or a file")
        if isinstance(model, Workload):
            self.name = model.name
        elif not isinstance(model, Planned):
            from lohan_fx.model_arguments import make_tracer

            self.tracer = make_tracer(
                model,
                self.inputs,
                hw=self.hw,
                sequence=self.sequence,
                optimizer=self.optimizer,
                dtype=self.dtype,
                outputs=self.outputs,
                full_trace=self.full_trace,
            )
            self.name = self.tracer.name
        return self

    @property
    def hw(self) -> HardwareProfile:
        assert self.profile is not None
        return hardware(self.profile)

    def shell(self, batch: int | None, budget: MemoryBudget) -> dict[str, Any]:
        """What a `Planned` of that batch is made of, the plan aside."""
        if self.base is not None and batch in (None, self.base.batch):
            base = self.base
            known = [f.name for f in fields(base) if f.name not in ("plan", "search")]
            return {name: getattr(base, name) for name in known} | {"budget": budget}
        if self.tracer is not None:
            traced = self.tracer.workload(batch)
            return {
                "model": self.name,
                "workload": traced.workload,
                "hw": self.hw,
                "budget": budget,
                "batch": traced.batch,
                "num_items": traced.num_items,
                "items": traced.items,
                "compute_dtype": self.tracer.compute_dtype,
                "traced": traced.how,
                "source": self.tracer,
            }
        if batch is not None:
            raise LohanError("batch= needs the model: a workload has the batch of its trace")
        assert isinstance(self.model, Workload)
        return {
            "model": self.name,
            "workload": self.model,
            "hw": self.hw,
            "budget": budget,
            "num_items": self.model.num_tokens,
            "items": "tokens",
        }

    def row(
        self,
        case: Case,
        strategy: str | Planner,
        budget: MemoryBudget,
        options: PlannerOptions,
        bounds: dict[tuple[Any, ...], float],
    ) -> Row:
        shell = self.shell(case.batch, budget)
        start = time.perf_counter()
        try:
            plan = make_plan(strategy, shell["workload"], self.hw, budget, options)
            plan_s = time.perf_counter() - start
            asked = {name: getattr(options, name) for name in ("states", "swap_to", "schedule")}
            made = Planned(**{**shell, **asked}, plan=plan)
            seconds = made.step_s
        except (InsufficientMemoryError, PlanError, HardwareError) as error:
            return Row(case=case, reason=_reason(error))
        asked_for = made.bound_options
        key = (case.batch, budget, *(getattr(asked_for, name) for name in asked))
        bound = bounds[key] = bounds.get(key) or made.bound_s
        s, p = made.simulation, plan.prediction
        return Row(
            case=case,
            schedule=plan.schedule,
            step_s=seconds,
            forward_s=s.forward_s,
            backward_s=s.backward_s,
            optimizer_s=s.optimizer_s,
            items_per_s=made.items_per_s,
            flops_per_s=made.flops_per_s,
            peak_device_bytes=p.peak_device_bytes,
            peak_host_bytes=p.peak_host_bytes,
            peak_ssd_bytes=p.peak_ssd_bytes,
            d2h_bytes=s.traffic.d2h_bytes,
            h2d_bytes=s.traffic.h2d_bytes,
            ssd_read_bytes=s.traffic.ssd_read_bytes,
            ssd_write_bytes=s.traffic.ssd_write_bytes,
            swapped_bytes=swapped_bytes(made),
            recompute_flops=p.recompute_flops,
            num_casts=sum(unit.casts for unit in plan.units.values()),
            bound_s=bound,
            gap=seconds / bound - 1 if 0 < bound < float("inf") else None,
            binding=made.hw.lane_name(s.timeline.binding()),
            plan_s=plan_s,
            planned=made,
        )


def _reason(error: Exception) -> str:
    """The error in one line; a tier that is too small in one short line."""
    if not isinstance(error, InsufficientMemoryError):
        return str(error).splitlines()[0]
    need, have = short_bytes(error.need_bytes), short_bytes(error.have_bytes)
    return f"{error.tier}: needs {need}, has {have}"


def swapped_bytes(planned: Planned) -> int:
    """A_G2M: bytes of the residuals that a plan swaps."""
    w = planned.workload
    decisions = planned.plan.residuals
    return sum(w.values[v].num_bytes for v in w.residuals if decisions[v].action == "swap")
