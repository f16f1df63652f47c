"""The linear model of a step behind `pareto`: what every choice costs on every shared resource.

Choices: each residual keeps, goes to host, goes to SSD, or is recomputed; each unit's states are
on the device, in host memory or on SSD. Recomputation is additive: backward needs every residual
anyway, so a recomputed one costs the ops between it and its nearest other residuals, whatever
happens to those (`recompute_cost.layers_of`; ops shared by several are shared out evenly).

Time rows say what no schedule can avoid. For every cut c of forward or backward, a lane's work
that must be done before c and the device's work after c add up, and so do the device's work
before c and a lane's work that cannot start before c. So

    T_f ≥ device(all),   T_f ≥ d2h(offloads made from c on) + device(before c),
    T_f ≥ h2d(fetches needed up to c) + device(from c on), …

with the same for backward, gradients, the CPU's updates (T_b + T_o ≥ …), and the simplex SSDs.
Memory rows: what is alive at one op, whatever the windows. Every row is a lower bound for every
plan whose recompute regions stand before their members' first use (all that `lower` accepts), so
the optimum of the relaxed program bounds the simulated step from below. No torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lohan_fx.footprint import align, host_breakdown, unit_bytes
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import Action, Tier
from lohan_fx.planners.recompute_cost import layers_of
from lohan_fx.planners.registry import PlannerOptions
from lohan_fx.planners.schedule import UnitMode, must_save, tiny_residuals
from lohan_fx.planners.simplex import ChoiceProgram, Floats, Ints
from lohan_fx.planners.structure import Segment, Windows, segments_of, windows_of
from lohan_fx.planners.windows import emit_points, unit_runs, unit_uses
from lohan_fx.program import direct_read_bytes
from lohan_fx.workload import MODEL_INPUT_KINDS, Unit, Workload

Option = Literal[
    "keep", "host", "ssd", "recompute", "device", "hold", "direct", "reload", "ssd-hold"
]
"""Residuals: keep, host, ssd, recompute. Units: the keys of `UNIT_OPTIONS`."""

UNIT_OPTIONS: Mapping[Option, tuple[Tier, UnitMode]] = {
    "device": ("device", "fetch"),
    "host": ("host", "fetch"),
    "hold": ("host", "hold"),
    "direct": ("host", "direct"),
    "reload": ("host", "direct-forward"),
    "ssd": ("ssd", "fetch"),
    "ssd-hold": ("ssd", "hold"),
}
"""Where a unit's states live, and how ops read its compute copy (`schedule.UnitMode`)."""

STAGES = ("forward", "backward", "optimizer")
"""What the time variables T_f, T_b, T_o measure."""

@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Residuals, or units, that are equal to the model: one choice, `len(members)` times.

    Members are in forward order.
    """

    kind: Literal["residual", "unit"]
    members: tuple[str, ...]
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`base` + what the chosen options add ≤ T_f·stages[0] + T_b·stages[1] + T_o·stages[2].

    `resource` names it for reports: "gpu", "d2h", "cpu", …
    """

    resource: str
    stages: tuple[float, float, float]
    base: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """Device bytes at op `op`: `base` + what the chosen options add."""

    op: int
    base: float


class _Residual:
    """Positions and costs of one residual."""

    __slots__ = ("first_back", "last_back", "last_forward", "made", "num_bytes", "recompute_s")

    def __init__(self, workload: Workload, name: str, recompute_s: float) -> None:
        uses = workload.users[name]
        n = workload.num_forward_ops
        self.num_bytes = workload.values[name].num_bytes
        self.made = workload.producer[name]
        self.last_forward = workload.last_forward_use(name)
        self.first_back = next(i for i in uses if i >= n)
        self.last_back = uses[-1]
        self.recompute_s = recompute_s


class Model:
    """Rows and groups of one workload on one machine; budgets come with `program`.

    Args:
        by_value: every residual and unit is a group of its own, however equal.
    """

    def __init__(
        self,
        workload: Workload,
        hw: HardwareProfile,
        options: PlannerOptions,
        *,
        by_value: bool = False,
    ) -> None:
        self.workload = workload
        self.hw = hw
        self.options = options
        self.segments: tuple[Segment, ...] = segments_of(workload)
        self.windows: Windows = windows_of(workload, self.segments)
        self.tiny = tiny_residuals(workload)
        self.saved = must_save(workload)
        self.by_value = by_value
        self._uses = unit_uses(workload)
        self._emits = emit_points(workload, self._uses)
        self._runs = {u.name: unit_runs(workload, self._uses[u.name]) for u in workload.units}
        work = {
            v: layer.seconds * workload.values[v].num_bytes / max(1, layer.num_bytes)
            for layer in layers_of(workload, workload.residuals)
            for v in layer.values
        }
        self._residuals = {v: _Residual(workload, v, work[v]) for v in workload.residuals}
        seconds = np.array([op.seconds for op in workload.ops])
        self._through = np.concatenate([[0.0], np.cumsum(seconds)])
        self.groups: tuple[Group, ...] = (*self._residual_groups(), *self._unit_groups())
        self.group_of = {m: g for g, group in enumerate(self.groups) for m in group.members}
        sizes = [len(group.options) for group in self.groups]
        self.start = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.column_group: Ints = np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)
        self.counts: Floats = np.array([len(g.members) for g in self.groups], dtype=np.float64)
        self.rows: list[Row] = []
        self._time: list[Floats] = []
        self._build_time()
        self.time: Floats = np.array(self._time).reshape(len(self.rows), len(self.column_group))
        self.memory_rows: list[MemoryRow] = []
        self._least: list[Floats] = []
        self._mean: list[Floats] = []
        self._alive = self._constant_load()
        for op in self._row_ops():
            self.add_memory_row(op)
        self.host: Floats = self._capacity("host")
        self.ssd: Floats = self._capacity("ssd")

    # -- groups -----------------------------------------------------------------------------

    def _residual_groups(self) -> Iterable[Group]:
        found: dict[object, list[str]] = defaultdict(list)
        for segment in self.segments:
            for k, v in enumerate(segment.values):
                window = self.windows.of_op(self._residuals[v].made)
                key: object = v if self.by_value else (segment.kind, k, window)
                found[key].append(v)
        for members in found.values():
            yield Group(
                kind="residual",
                members=tuple(members),
                options=self._residual_options(members[0]),
            )

    def _residual_options(self, value: str) -> tuple[Option, ...]:
        if value in self.tiny:
            return ("keep",)
        found: list[Option] = ["keep"]
        if self.options.swap_to != "ssd":
            found.append("host")
        if self.options.swap_to != "host" and self.hw.ssds:
            found.append("ssd")
        if value not in self.saved:
            found.append("recompute")
        return tuple(found)

    def _unit_groups(self) -> Iterable[Group]:
        fixed = dict(self.options.fixed_units or {})
        found: dict[object, list[str]] = defaultdict(list)
        options: dict[object, tuple[Option, ...]] = {}
        for unit in self.workload.units:
            uses = self._uses[unit.name]
            window = self.windows.of_op(uses[0]) if uses else 0
            sizes = (
                unit.num_params,
                unit.compute_bytes,
                unit.state_bytes,
                unit.gradient_bytes,
                unit.trainable,
                unit.update_read_bytes,
                len(self._runs[unit.name]),
            )
            key: object = (window, sizes, fixed.get(unit.name))
            if self.by_value:
                key = unit.name
            found[key].append(unit.name)
            options[key] = self._unit_options(fixed.get(unit.name))
        for key, members in found.items():
            yield Group(kind="unit", members=tuple(members), options=options[key])

    def _unit_options(self, fixed: Tier | None) -> tuple[Option, ...]:
        wanted = self.options.states if fixed is None else fixed
        return tuple(
            option
            for option, (tier, _) in UNIT_OPTIONS.items()
            if wanted in ("auto", tier) and (tier != "ssd" or self.hw.ssds or wanted == "ssd")
        )

    def columns(self) -> Iterable[tuple[int, Group, Option]]:
        """(column, group, option) in order."""
        column = 0
        for group in self.groups:
            for option in group.options:
                yield column, group, option
                column += 1

    # -- time -------------------------------------------------------------------------------

    def _seconds(self, first: int, stop: int) -> float:
        """Device seconds of ops [first, stop)."""
        return float(self._through[stop] - self._through[first]) if stop > first else 0.0

    def _add(
        self,
        resource: str,
        stages: tuple[float, float, float],
        base: float,
        residual: Mapping[str, Floats] | None = None,
        unit: Mapping[str, Floats] | None = None,
    ) -> None:
        """One row. `residual`, `unit`: option → what each member adds (arrays in name order)."""
        costs = np.zeros(len(self.column_group))
        for column, group, option in self.columns():
            table = residual if group.kind == "residual" else unit
            if table and option in table:
                costs[column] = min(table[option][self._rank[m]] for m in group.members)
        self.rows.append(Row(resource=resource, stages=stages, base=base))
        self._time.append(costs)

    def _build_time(self) -> None:
        w, hw = self.workload, self.hw
        n, end = w.num_forward_ops, len(w.ops)
        rs, us = list(self._residuals.values()), list(w.units)
        self._rank = {v: i for i, v in enumerate(self._residuals)}
        self._rank.update({u.name: i for i, u in enumerate(us)})
        size = np.array([float(r.num_bytes) for r in rs])
        made = np.array([r.made for r in rs])
        first_back = np.array([r.first_back for r in rs])
        again = np.array([r.recompute_s for r in rs])
        zero_ssd = not hw.ssds
        read = 0.0 if zero_ssd else 1 / hw.ssd_read_bytes_per_s
        write = 0.0 if zero_ssd else 1 / hw.ssd_write_bytes_per_s
        h2d, d2h = 1 / hw.h2d_bytes_per_s, 1 / hw.d2h_bytes_per_s
        duplex = 1 / max(hw.duplex_bytes_per_s, hw.h2d_bytes_per_s, hw.d2h_bytes_per_s)
        unit = _UnitTable(self, us)
        forward, backward, tail = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 1.0, 1.0)
        device_s = unit.device_s(hw) if self.options.schedule != "serial" else unit.zero

        # forward
        self._add("gpu", forward, self._seconds(0, n))
        for c in self.windows.forward:
            leaving = np.where(made >= c, size * d2h, 0.0)
            both = {"host": leaving, "ssd": leaving}
            self._add("d2h", forward, self._seconds(0, c), both)
            fetched = unit.fetched(0, c, n)
            rest = self._seconds(c, n)
            moved = {"host": fetched * h2d, "ssd": fetched * h2d}
            self._add("h2d", forward, rest, None, moved)
            if read:
                self._add("ssd", forward, rest, None, {"ssd": fetched * read})
        fetched = unit.fetched(0, n, n)
        moved = {"host": fetched * duplex, "ssd": fetched * duplex}
        self._add("duplex", forward, 0.0, {"host": size * duplex, "ssd": size * duplex}, moved)

        # backward
        self._add("gpu", backward, self._seconds(n, end), {"recompute": again}, {"device": device_s})
        cuts = sorted({n, *self.windows.backward, max(n, end - 1)})
        for c in cuts:
            back = np.where(first_back <= c, size, 0.0)
            fetched = unit.fetched(n, c, end)
            rest = self._seconds(c, end)
            later = {"device": np.where(unit.emit >= c, device_s, 0.0)}
            moved = {"host": fetched * h2d, "ssd": fetched * h2d, **later}
            self._add("h2d", backward, rest, {"host": back * h2d, "ssd": back * h2d}, moved)
            if read:
                ssd = {"ssd": fetched * read, **later}
                self._add("ssd", backward, rest, {"ssd": back * read}, ssd)
        emits = sorted({*cuts, *(int(i) for i in unit.emit if i >= n)})
        if len(emits) > len(cuts) + 4:  # the last updates are the ones that nothing hides
            emits = sorted({*cuts, *emits[-3:]})
        for c in emits:
            before = self._seconds(n, c + 1)
            remade = {"recompute": np.where(first_back <= c, again, 0.0)}
            late = unit.emit >= c
            earlier = {"device": np.where(unit.emit < c, device_s, 0.0)}
            grads = np.where(late, unit.gradient, 0.0) * d2h
            self._add("d2h", backward, before, remade, {"host": grads, "ssd": grads, **earlier})
            if self.options.schedule == "serial":
                continue
            cpu = np.where(late, unit.params, 0.0) / hw.cpu_optimizer_params_per_s
            states = np.where(late, unit.state_read * read + unit.state_write * write, 0.0)
            naive = self.options.schedule == "naive"
            chain = {"host": cpu, "ssd": cpu + states if naive else cpu, **earlier}
            self._add("cpu", tail, before, remade, chain)
            if write:
                kept = {"ssd": np.where(late, unit.state_write * write, 0.0), **earlier}
                self._add("ssd", tail, before, remade, kept)
        fetched = unit.fetched(n, end, end) + unit.gradient
        moved = {"host": fetched * duplex, "ssd": fetched * duplex}
        self._add("duplex", backward, 0.0, {"host": size * duplex, "ssd": size * duplex}, moved)
        states = unit.state_read * read + unit.state_write * write
        if self.options.schedule == "serial":
            chain = unit.params / hw.cpu_optimizer_params_per_s
            self._add("cpu", (0.0, 0.0, 1.0), 0.0, None, {"host": chain, "ssd": chain + states})
            self._add("gpu", (0.0, 0.0, 1.0), 0.0, None, {"device": unit.device_s(hw)})
        if read:
            back = unit.fetched(n, end, end) * read + states
            self._add("ssd", tail, 0.0, {"ssd": size * read}, {"ssd": back})
            every = unit.fetched(0, n, n) * read + back
            self._add("ssd", (1.0, 1.0, 1.0), 0.0, {"ssd": size * (read + write)}, {"ssd": every})

    # -- memory -----------------------------------------------------------------------------

    def _constant_load(self) -> Floats:
        """Bytes alive at each op whatever is chosen, states and compute copies aside."""
        w = self.workload
        end = len(w.ops)
        change = np.zeros(end + 1)
        emitted: dict[str, int] = {}
        for unit in w.units:
            for g in unit.gradients:
                emitted[g] = max(emitted.get(g, 0), self._emits[unit.name])
        static = 0
        for name, value in w.values.items():
            if value.kind in MODEL_INPUT_KINDS:
                static += value.num_bytes if value.kind != "parameter" else 0
                continue
            spans = self._sure_spans(name, emitted)
            for a, b in spans:
                change[a] += value.num_bytes
                change[b + 1] -= value.num_bytes
        return static + np.cumsum(change[:-1])

    def _sure_spans(self, name: str, emitted: Mapping[str, int]) -> list[tuple[int, int]]:
        w = self.workload
        if name not in w.producer:
            return []
        made, uses = w.producer[name], w.users[name]
        if name in self._residuals and name not in self.tiny:
            r = self._residuals[name]
            return [(r.made, r.last_forward), (r.first_back, r.last_back)]
        if w.values[name].is_output:
            return [(made, len(w.ops) - 1)]
        if name in self.tiny:  # left out: the relaxed program may do anything with them
            return []
        return [(made, max([made, *uses, emitted.get(name, 0)]))]

    def _row_ops(self) -> list[int]:
        """Where memory may bind: the fullest op of each window in backward, and about the turn."""
        n, end = self.workload.num_forward_ops, len(self.workload.ops)
        if not end:
            return []
        copies = np.zeros(end + 1)
        for unit in self.workload.units:
            for a, b in self._runs[unit.name]:
                copies[a] += unit.compute_bytes
                copies[b + 1] -= unit.compute_bytes
        load = self._alive + np.cumsum(copies[:-1])
        found = set()
        stops = [*self.windows.backward, n]
        bounds = sorted({n, *stops, end})
        for a, b in zip(bounds, bounds[1:], strict=False):
            found.add(a + int(np.argmax(load[a:b])))
        starts = sorted({*self.windows.forward, n})
        for a, b in list(zip(starts, starts[1:], strict=False))[-3:]:
            found.add(a + int(np.argmax(load[a:b])))
        return sorted(found)

    def add_memory_row(self, op: int) -> None:
        """Bound the bytes at one more op (say, where a draft exceeded the budget)."""
        if any(row.op == op for row in self.memory_rows):
            return
        base = float(self._alive[op])
        least = np.zeros(len(self.column_group))
        mean = np.zeros(len(self.column_group))
        for g, group in enumerate(self.groups):
            table = np.array(
                [[self._bytes_at(group.kind, m, o, op) for o in group.options] for m in group.members]
            )
            sure = table.min(axis=1)
            base += float(sure.sum())
            columns = slice(int(self.start[g]), int(self.start[g + 1]))
            least[columns] = (table - sure[:, None]).min(axis=0)
            mean[columns] = (table - sure[:, None]).mean(axis=0)
        self.memory_rows.append(MemoryRow(op=op, base=base))
        self._least.append(least)
        self._mean.append(mean)

    def _bytes_at(self, kind: str, member: str, option: Option, op: int) -> float:
        if kind == "residual":
            r = self._residuals[member]
            if member in self.tiny or option != "keep":
                return 0.0
            return float(r.num_bytes) if r.last_forward < op < r.first_back else 0.0
        unit = self.workload.unit_by_name[member]
        if option == "device":
            held = unit.compute_bytes + unit.state_bytes
            if self.options.schedule == "serial" and op > self._emits.get(member, op):
                held += sum(self.workload.values[g].num_bytes for g in set(unit.gradients))
            return float(held)
        here = any(a <= op <= b for a, b in self._runs[member])
        return float(unit.compute_bytes) if here else 0.0

    def _capacity(self, tier: Tier) -> Floats:
        """Bytes that each option takes in host memory or on SSD, at least."""
        found = np.zeros(len(self.column_group))
        serial = self.options.schedule == "serial"
        for column, group, option in self.columns():
            if group.kind == "residual":
                size = align(self._residuals[group.members[0]].num_bytes)
                found[column] = size if option == tier else 0
                continue
            unit = self.workload.unit_by_name[group.members[0]]
            size = unit_bytes(unit) if option == tier else 0
            if tier == "host" and serial and unit.trainable and option != "device":
                size += align(unit.compute_bytes)
            found[column] = size
        return found

    # -- programs ---------------------------------------------------------------------------

    def program(
        self,
        budget: MemoryBudget,
        *,
        relaxed: bool = True,
        reserve: tuple[float, float] = (0.0, 0.0),
        tie_break: float = 0.0,
    ) -> ChoiceProgram:
        """The linear program under a budget, in units of the step's device seconds.

        Args:
            relaxed: memory rows hold for every plan (for a bound). Off: members of a group
                count with their mean, and the tiny residuals that are kept count too.
            reserve: device and host bytes that are not to be used.
            tie_break: weight of every second of copy or recomputation, hidden or not.
        """
        device = float(budget.device_bytes) - reserve[0]
        host = float(budget.host_bytes) - reserve[1]
        base = np.array([row.base for row in self.memory_rows])
        if not relaxed:
            base = base + sum(self.workload.values[v].num_bytes for v in self.tiny)
        memory = np.array(self._least if relaxed else self._mean)
        memory = memory.reshape(len(base), len(self.column_group))
        unit = self.unit_s
        matrix = np.vstack([self.time / unit, memory, self.host, self.ssd])
        extra = np.zeros((len(matrix), 3))
        extra[: len(self.rows)] = -np.array([row.stages for row in self.rows])
        limits = np.concatenate(
            [
                [-row.base / unit for row in self.rows],
                device - base,
                [host, float(budget.ssd_bytes)],
            ]
        )
        costs = self.effort * (tie_break / unit)
        return ChoiceProgram(
            costs=costs,
            matrix=matrix,
            group=self.column_group,
            counts=self.counts,
            extra=extra,
            extra_costs=np.ones(3),
            limits=limits,
        )

    @property
    def unit_s(self) -> float:
        """Seconds that the programs count in."""
        return float(self._through[-1]) or 1.0

    @property
    def effort(self) -> Floats:
        """Seconds of copies and recomputation that each option causes, on all lanes together."""
        hw = self.hw
        found = np.zeros(len(self.column_group))
        for column, group, option in self.columns():
            if group.kind == "residual":
                r = self._residuals[group.members[0]]
                link = r.num_bytes * (1 / hw.h2d_bytes_per_s + 1 / hw.d2h_bytes_per_s)
                if option == "recompute":
                    found[column] = r.recompute_s
                elif option == "host":
                    found[column] = link
                elif option == "ssd":
                    ssd = 1 / hw.ssd_read_bytes_per_s + 1 / hw.ssd_write_bytes_per_s
                    found[column] = link + r.num_bytes * ssd
                continue
            u = self.workload.unit_by_name[group.members[0]]
            moved = len(self._runs[u.name]) * u.compute_bytes / hw.h2d_bytes_per_s
            moved += u.gradient_bytes / hw.d2h_bytes_per_s
            if option != "device":
                found[column] = moved
                if u.trainable:
                    found[column] += u.num_params / hw.cpu_optimizer_params_per_s
            if option == "ssd":
                states = u.update_read_bytes / hw.ssd_read_bytes_per_s
                states += (u.state_bytes + u.compute_bytes) / hw.ssd_write_bytes_per_s
                found[column] += states if u.trainable else 0.0
        return found

    def leanest(self) -> Ints:
        """For each group the option that uses the least device memory: a start for the solver."""
        order: Mapping[str, int] = {"ssd": 0, "host": 1, "recompute": 2, "device": 3, "keep": 4}
        found = []
        for g, group in enumerate(self.groups):
            k = min(range(len(group.options)), key=lambda k: order[group.options[k]])
            found.append(int(self.start[g]) + k)
        return np.array(found, dtype=np.int64)

    def host_overhead(self, tiers: Mapping[str, Tier], ssd_residuals: Sequence[int] = ()) -> int:
        """Host bytes beside units and residuals: gradient buffers, rings, staging."""
        args = (self.workload.units, tiers, self.options.schedule, (), ssd_residuals)
        parts = host_breakdown(*args)
        serial = self.options.schedule == "serial"
        return sum(
            size
            for name, size in parts.items()
            if name not in ("units", "residuals") and not (serial and name == "gradients")
        )

    def region_of(self) -> dict[str, str] | None:
        """Residual → name of its region, if segments are not blocks; else None."""
        if all(s.name == self.workload.values[v].block for s in self.segments for v in s.values):
            return None
        return {v: s.name for s in self.segments for v in s.values}


class _UnitTable:
    """Arrays over the units, in workload order."""

    def __init__(self, model: Model, units: Sequence[Unit]) -> None:
        self.units = units
        self.runs = [model._runs[u.name] for u in units]
        self.zero = np.zeros(len(units))
        self.params = np.array([float(u.num_params) if u.trainable else 0.0 for u in units])
        self.gradient = np.array([float(u.gradient_bytes) if u.trainable else 0.0 for u in units])
        self.compute = np.array([float(u.compute_bytes) for u in units])
        states = [float(u.update_read_bytes) if u.trainable else 0.0 for u in units]
        self.state_read = np.array(states)
        written = [float(u.state_bytes + u.compute_bytes) if u.trainable else 0.0 for u in units]
        self.state_write = np.array(written)
        self.emit = np.array([model._emits.get(u.name, -1) for u in units], dtype=np.int64)

    def device_s(self, hw: HardwareProfile) -> Floats:
        """Seconds of each unit's update on the device."""
        return (2 * self.state_write + self.gradient) / hw.device_bytes_per_s

    def fetched(self, first: int, last: int, stop: int) -> Floats:
        """Bytes that a unit off the device fetches for runs that begin in [first, last], < stop."""
        times = [sum(first <= a <= last and a < stop for a, _ in runs) for runs in self.runs]
        return self.compute * np.array(times, dtype=np.float64)


def action_of(option: Option) -> Action:
    """The action of a residual's option."""
    if option in ("host", "ssd"):
        return "swap"
    return "keep" if option == "keep" else "recompute"
