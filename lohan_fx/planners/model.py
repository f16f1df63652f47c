"""The linear model of a step behind `pareto`: what every choice costs on every shared resource.

Choices: each residual keeps, goes to host, goes to SSD, or is recomputed; each unit's states are
on the device, in host memory or on SSD. Recomputation is additive: backward needs every residual
anyway, so a recomputed one costs the ops between it and its nearest other residuals, whatever
happens to those (`recompute_cost.layers_of`; ops shared by several are shared out evenly).

Time rows (`time_rows`) say what no schedule can avoid; memory rows what is alive at one op,
whatever the windows. Every row is a lower bound for every plan that `lower` accepts, so the
optimum of the relaxed program bounds the simulated step from below. No torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np

from lohan_fx.footprint import (
    align,
    has_own_buffer,
    host_breakdown,
    may_cast,
    may_park,
    spare_bytes,
    unit_bytes,
    update_write_bytes,
)
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import WHOLE, Schedule, Tier
from lohan_fx.planners.recompute_cost import layers_of
from lohan_fx.planners.registry import PlannerOptions
from lohan_fx.planners.schedule import UnitMode, must_save, tiny_residuals
from lohan_fx.planners.simplex import ChoiceProgram, Floats, Ints
from lohan_fx.planners.structure import Segment, Windows, segments_of, windows_of
from lohan_fx.planners.time_rows import Row, TimeRows
from lohan_fx.planners.windows import emit_points, unit_runs, unit_uses
from lohan_fx.workload import MODEL_INPUT_KINDS, Unit, Workload

Option = Literal[
    "keep",
    "host",
    "ssd",
    "recompute",
    "device",
    "parked",
    "cast",
    "cast-parked",
    "hold",
    "direct",
    "reload",
    "ssd-hold",
    "ssd-copy",
    "ssd-copy-hold",
]
"""Residuals: keep, host, ssd, recompute. Units: the keys of `UNIT_OPTIONS`."""

UNIT_OPTIONS: Mapping[Option, tuple[Tier, UnitMode]] = {
    "device": ("device", "fetch"),
    "parked": ("device", "fetch"),
    "cast": ("device", "fetch"),
    "cast-parked": ("device", "fetch"),
    "host": ("host", "fetch"),
    "hold": ("host", "hold"),
    "direct": ("host", "direct"),
    "reload": ("host", "direct-forward"),
    "ssd": ("ssd", "fetch"),
    "ssd-hold": ("ssd", "hold"),
    "ssd-copy": ("ssd", "fetch"),
    "ssd-copy-hold": ("ssd", "hold"),
}
"""Where a unit's states live, and how ops read its compute copy (`schedule.UnitMode`). "parked":
its gradients wait in host memory for optimizer.step(), where those of "device" stay there. "cast":
it keeps no compute copy, which is cast for each run of ops that use it."""

PARKED: frozenset[Option] = frozenset({"parked", "cast-parked"})
"""The options of units on the device with which gradients wait in host memory."""

CAST: frozenset[Option] = frozenset({"cast", "cast-parked"})
"""The options of units on the device that keep no compute copy."""

COPIED: frozenset[Option] = frozenset({"ssd-copy", "ssd-copy-hold"})
"""The options with which the compute copy is in host memory, and only the states are on SSD."""

HELD: frozenset[Option] = frozenset({"hold", "ssd-hold", "ssd-copy-hold"})
"""The options with which one copy stays on the device from the first use of a step to the last."""

_ON_DEVICE = frozenset(option for option, (tier, _) in UNIT_OPTIONS.items() if tier == "device")

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
class MemoryRow:
    """Device bytes at op `op`: a base and what the chosen options add.

    `base` and `least` hold for every plan; `likely_base` and `mean` are what to expect if a
    group's options are spread evenly over its members.
    """

    op: int
    base: float
    likely_base: float
    least: Floats
    mean: Floats


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
        self.schedule: Schedule = options.update_schedule
        self.unit_s = sum(op.seconds for op in workload.ops) or 1.0
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
        self.groups: tuple[Group, ...] = (*self._residual_groups(), *self._unit_groups())
        self.group_of = {m: g for g, group in enumerate(self.groups) for m in group.members}
        sizes = [len(group.options) for group in self.groups]
        self.start = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.column_group: Ints = np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)
        self.counts: Floats = np.array([len(g.members) for g in self.groups], dtype=np.float64)
        self._rank = {v: i for i, v in enumerate(workload.residuals)}
        self._rank.update({u.name: i for i, u in enumerate(workload.units)})
        table = TimeRows(workload, hw, self.schedule, self.windows, work, self._runs, self._emits)
        self.rows: tuple[Row, ...] = tuple(table)
        self.time: Floats = np.array([self._costs(row) for row in self.rows])
        self.direct = {
            u.name: float(table.direct[0][i] + table.direct[1][i])
            for i, u in enumerate(workload.units)
        }
        self._alive = self._constant_load()
        self._memory: dict[int, MemoryRow] = {}
        self.memory_ops = self._row_ops()
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
                unit.master_bytes,
                len(self._runs[unit.name]),
            )
            wanted = self._unit_options(unit, fixed.get(unit.name))
            key: object = (window, sizes, wanted)
            if self.by_value:
                key = unit.name
            found[key].append(unit.name)
            options[key] = wanted
        for key, members in found.items():
            yield Group(kind="unit", members=tuple(members), options=options[key])

    def _unit_options(self, unit: Unit, fixed: Tier | None) -> tuple[Option, ...]:
        wanted = self.options.states if fixed is None else fixed
        copies = self.options.fixed_copies
        if copies is None:
            ways = (False, True) if self.options.copies == "host" else (False,)
            ways = ways if unit.has_separate_copy else (False,)
        else:
            ways = (unit.name in copies,)
        return tuple(
            option
            for option, (tier, _) in UNIT_OPTIONS.items()
            if wanted in ("auto", tier)
            and (tier != "device" or (option in PARKED) in self._ways_to_wait(unit))
            and (tier != "device" or (option in CAST) in self._ways_to_copy(unit))
            and (tier != "ssd" or self.hw.ssds or wanted == "ssd")
            and (tier != "ssd" or (option in COPIED) in ways)
        )

    def _ways_to_wait(self, unit: Unit) -> tuple[bool, ...]:
        """Whether the gradients of a unit on the device are parked, are not, or may be either."""
        if not may_park(unit, "device", self.schedule):
            return (False,)
        fixed = self.options.fixed_parked
        return (False, True) if fixed is None else (unit.name in fixed,)

    def _ways_to_copy(self, unit: Unit) -> tuple[bool, ...]:
        """Whether a unit on the device keeps no compute copy, keeps one, or may do either."""
        if not may_cast(unit, "device"):
            return (False,)
        fixed = self.options.fixed_casts
        return (False, True) if fixed is None else (unit.name in fixed,)

    def _may_do_without(self, unit: Unit) -> bool:
        """Whether a unit has an option in which it keeps no compute copy on the device."""
        return not CAST.isdisjoint(self.groups[self.group_of[unit.name]].options)

    def columns(self) -> Iterable[tuple[int, Group, Option]]:
        """(column, group, option) in order."""
        column = 0
        for group in self.groups:
            for option in group.options:
                yield column, group, option
                column += 1

    def column(self, member: str, option: Option) -> int | None:
        """The column of a residual's or unit's option; None if it has no such option."""
        g = self.group_of[member]
        options = self.groups[g].options
        return int(self.start[g]) + options.index(option) if option in options else None

    # -- time -------------------------------------------------------------------------------

    def _costs(self, row: Row) -> Floats:
        """What each option adds to a row: the least of the group's members."""
        found = np.zeros(len(self.column_group))
        for column, group, option in self.columns():
            table = row.residual if group.kind == "residual" else row.unit
            if option in table:
                found[column] = min(table[option][self._rank[m]] for m in group.members)
        return found

    # -- memory -----------------------------------------------------------------------------

    def _constant_load(self) -> tuple[Floats, Floats]:
        """Bytes alive at each op whatever is chosen, states and compute copies aside.

        The first array holds for every plan; in the second tiny residuals are kept, and
        gradients stay until their unit's are complete.
        """
        w = self.workload
        end = len(w.ops)
        sure, likely = np.zeros(end + 1), np.zeros(end + 1)

        def add(change: Floats, first: int, last: int, size: int) -> None:
            change[first] += size
            change[last + 1] -= size

        emitted: dict[str, int] = {}
        for unit in w.units:
            for g in unit.gradients:
                emitted[g] = max(emitted.get(g, 0), self._emits[unit.name])
        static = 0
        for name, value in w.values.items():
            size = value.num_bytes
            if value.kind in MODEL_INPUT_KINDS:
                static += size if value.kind != "parameter" else 0
                continue
            made = w.producer.get(name)
            if made is None:
                continue
            if name in self._residuals:
                r = self._residuals[name]
                add(sure, made, r.last_forward, size)
                add(sure, r.first_back, r.last_back, size)
                if name in self.tiny and r.last_forward + 1 < r.first_back:
                    add(likely, r.last_forward + 1, r.first_back - 1, size)
                continue
            last = end - 1 if value.is_output else max([made, *w.users[name]])
            add(sure, made, last, size)
            if emitted.get(name, 0) > last:
                add(likely, last + 1, emitted[name], size)
        held = static + np.cumsum(sure[:-1])
        held += np.array([float(op.scratch_bytes) for op in w.ops])
        return held, held + np.cumsum(likely[:-1])

    def _row_ops(self) -> tuple[int, ...]:
        """Where memory may bind: the fullest op of each window in backward, and about the turn."""
        n, end = self.workload.num_forward_ops, len(self.workload.ops)
        if not end:
            return ()
        copies = np.zeros(end + 1)
        scratch = np.zeros(end)
        for unit in self.workload.units:
            if not _ON_DEVICE.isdisjoint(self.groups[self.group_of[unit.name]].options):
                at = self._emits.get(unit.name, 0)
                scratch[at] = max(scratch[at], self._scratch_at(unit.name, at))
            for a, b in self._runs[unit.name]:
                copies[a] += unit.compute_bytes
                copies[b + 1] -= unit.compute_bytes
        load = self._alive[1] + np.cumsum(copies[:-1])
        backward = sorted({n, *self.windows.backward, end})
        forward = sorted({*self.windows.forward, n})
        spans = [*pairwise(backward), *list(pairwise(forward))[-3:]]
        return tuple(
            sorted(
                {
                    a + int(np.argmax(size[a:b]))
                    for a, b in spans
                    if b > a
                    for size in (load, load + scratch)
                }
            )
        )

    def memory_row(self, op: int) -> MemoryRow:
        """The bytes at one op (say, where a draft exceeded the budget)."""
        if op in self._memory:
            return self._memory[op]
        sure_bytes = 0.0
        least = np.zeros(len(self.column_group))
        mean = np.zeros(len(self.column_group))
        for g, group in enumerate(self.groups):
            table = np.array(
                [
                    [self._bytes_at(group.kind, m, o, op) for o in group.options]
                    for m in group.members
                ]
            )
            sure = table.min(axis=1)
            sure_bytes += float(sure.sum())
            columns = slice(int(self.start[g]), int(self.start[g + 1]))
            least[columns] = (table - sure[:, None]).min(axis=0)
            mean[columns] = (table - sure[:, None]).mean(axis=0)
            for k, option in enumerate(group.options):
                if option in _ON_DEVICE:
                    scratch = sum(self._scratch_at(m, op) for m in group.members)
                    mean[columns.start + k] += scratch / len(group.members)
        row = MemoryRow(
            op=op,
            base=float(self._alive[0][op]) + sure_bytes,
            likely_base=float(self._alive[1][op]) + sure_bytes,
            least=least,
            mean=mean,
        )
        self._memory[op] = row
        return row

    def _scratch_at(self, unit: str, op: int) -> int:
        """What a unit's update on the device needs at an op; it runs right after the emission."""
        if self.schedule in WHOLE or self._emits.get(unit) != op:
            return 0
        return self.workload.unit_by_name[unit].update_scratch_bytes

    def _bytes_at(self, kind: str, member: str, option: Option, op: int) -> float:
        if kind == "residual":
            r = self._residuals[member]
            if member in self.tiny or option != "keep":
                return 0.0
            return float(r.num_bytes) if r.last_forward < op < r.first_back else 0.0
        unit = self.workload.unit_by_name[member]
        runs = self._runs[member]
        if option in _ON_DEVICE:
            here = option not in CAST or any(a <= op <= b for a, b in runs)
            held = unit.state_bytes + (unit.compute_bytes if here else 0)
            stay = option not in PARKED and may_park(unit, "device", self.schedule)
            if stay and op > self._emits.get(member, op):
                held += sum(self.workload.values[g].num_bytes for g in set(unit.gradients))
            return float(held)
        if option in HELD:
            runs = [(runs[0][0], runs[-1][1])] if runs else []
        elif option == "reload":
            backward = [i for i in self._uses[member] if i >= self.workload.num_forward_ops]
            runs = [(backward[0], backward[-1])] if backward else []
        here = option != "direct" and any(a <= op <= b for a, b in runs)
        return float(unit.compute_bytes) if here else 0.0

    def _capacity(self, tier: Tier) -> Floats:
        """Bytes that each option takes in host memory or on SSD, at least."""
        found = np.zeros(len(self.column_group))
        for column, group, option in self.columns():
            if group.kind == "residual":
                size = align(self._residuals[group.members[0]].num_bytes)
                found[column] = size if option == tier else 0
                continue
            unit = self.workload.unit_by_name[group.members[0]]
            home = UNIT_OPTIONS[option][0]
            copied = option in COPIED
            size = unit_bytes(unit, copy=not copied) if home == tier else 0
            if tier == "host" and copied:
                size += align(unit.compute_bytes)
            own = [unit.name] if option in PARKED else []
            if tier == "host" and has_own_buffer(unit, home, self.schedule, own):
                size += align(unit.compute_bytes)
            if tier == "host":
                size += spare_bytes(unit, home, self.schedule)
            found[column] = size
        return found

    # -- programs ---------------------------------------------------------------------------

    def program(
        self,
        budget: MemoryBudget,
        *,
        relaxed: bool = True,
        reserve: tuple[int, int] = (0, 0),
        tie_break: float = 0.0,
        more_ops: Iterable[int] = (),
        banned: Collection[int] = (),
        least_memory: bool = False,
    ) -> ChoiceProgram:
        """The linear program under a budget, in units of the step's device seconds.

        Args:
            relaxed: memory rows hold for every plan (for a bound). Off: what to expect.
            reserve: device and host bytes that are not to be used.
            tie_break: weight of every second of copy or recomputation, hidden or not.
            more_ops: further ops whose memory is limited.
            banned: columns that must not be used, beside those that `too_large` finds.
            least_memory: find the least device memory, in bytes, instead of the least time;
                the device budget does not count.
        """
        rows = [self.memory_row(op) for op in sorted({*self.memory_ops, *more_ops})]
        num_time, num_memory = len(self.rows), len(rows)
        memory = np.array([row.least if relaxed else row.mean for row in rows])
        base = np.array([row.base if relaxed else row.likely_base for row in rows])
        device = 0.0 if least_memory else float(budget.device_bytes - reserve[0])
        matrix = np.vstack(
            [
                self.time / self.unit_s,
                memory.reshape(num_memory, len(self.column_group)),
                self.host,
                self.ssd,
            ]
        )
        extra = np.zeros((len(matrix), 4))
        extra[:num_time, :3] = -np.array([row.stages for row in self.rows])
        extra[num_time : num_time + num_memory, 3] = -1.0 if least_memory else 0.0
        limits = np.concatenate(
            [
                [-row.base / self.unit_s for row in self.rows],
                device - base,
                [
                    float(budget.host_bytes - max(reserve[1], self.least_buffers(budget))),
                    float(budget.ssd_bytes),
                ],
            ]
        )
        none = np.zeros(len(self.column_group))
        none[[*banned, *self.too_large(budget)]] = 1.0
        matrix = np.vstack([matrix, none])
        extra = np.vstack([extra, np.zeros(4)])
        limits = np.append(limits, 0.0)
        return ChoiceProgram(
            costs=self.effort * (tie_break / self.unit_s),
            matrix=matrix,
            group=self.column_group,
            counts=self.counts,
            extra=extra,
            extra_costs=np.array([0.0, 0.0, 0.0, 1.0] if least_memory else [1.0, 1.0, 1.0, 0.0]),
            limits=limits,
        )

    def least_buffers(self, budget: MemoryBudget) -> int:
        """Host bytes that buffers of SSD units take at least.

        What device and host have no room for is on SSD; so at least one unit is there that is
        as large as the last of those with the same bytes, smallest first.
        """
        # on the device nothing is aligned, and copies may not be kept
        sizes = {
            u.name: u.state_bytes + (0 if self._may_do_without(u) else u.compute_bytes)
            for u in self.workload.units
        }
        units = [u for u in self.workload.units if u.trainable]
        units.sort(key=lambda u: sizes[u.name])
        left = sum(sizes[u.name] for u in units) - budget.device_bytes - budget.host_bytes
        for k, unit in enumerate(units):
            if left <= 0:
                return 0
            left -= sizes[unit.name]
            if left <= 0:
                return min(self._buffers(u) for u in units[k:])
        return 0

    def _buffers(self, unit: Unit) -> int:
        """Host bytes that an SSD unit takes at least beside those in `host`."""
        copied = COPIED & set(self.groups[self.group_of[unit.name]].options)
        copies = [unit.name] if copied else []
        need = host_breakdown([unit], {unit.name: "ssd"}, self.schedule, copies=copies)
        own = has_own_buffer(unit, "ssd", self.schedule)
        elsewhere = need["compute copies"] + (align(unit.compute_bytes) if own else 0)
        return sum(need.values()) - elsewhere

    def too_large(self, budget: MemoryBudget) -> frozenset[int]:
        """Options of units whose buffers alone exceed host memory.

        A unit on SSD is updated through as much as three buffers of its size.
        """
        return frozenset(np.flatnonzero(self._alone > budget.host_bytes).tolist())

    @cached_property
    def _alone(self) -> Ints:
        """Host bytes that each option of a unit takes if there is no other unit."""
        found = np.zeros(len(self.column_group), dtype=np.int64)
        for column, group, option in self.columns():
            if group.kind == "unit":
                unit = self.workload.unit_by_name[group.members[0]]
                tiers = {unit.name: UNIT_OPTIONS[option][0]}
                copies = [unit.name] if option in COPIED else []
                need = host_breakdown([unit], tiers, self.schedule, copies=copies)
                found[column] = sum(need.values())
        return found

    def largest_moved(self, assignment: Mapping[str, Option]) -> set[int]:
        """The options with which the largest units that are not on the device leave it."""
        tiers = {u.name: UNIT_OPTIONS[assignment[u.name]][0] for u in self.workload.units}
        moved = [u for u in self.workload.units if u.trainable and tiers[u.name] != "device"]
        if not moved:
            return set()
        top = max(moved, key=lambda u: (unit_bytes(u), tiers[u.name] == "ssd"))
        return {
            column
            for column, group, option in self.columns()
            if group.kind == "unit"
            and UNIT_OPTIONS[option][0] == tiers[top.name]
            and unit_bytes(self.workload.unit_by_name[group.members[0]]) >= unit_bytes(top)
        }

    @cached_property
    def remade_inputs(self) -> frozenset[int]:
        """The options that recompute a block's input.

        Its region stands before those of all later blocks that are recomputed from it, so that
        in a chain of them all are on the device at once: the rows of memory do not know that.
        """
        return frozenset(
            column
            for column, group, option in self.columns()
            if option == "recompute" and not self.workload.inter_block.isdisjoint(group.members)
        )

    @cached_property
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
            found[column] = self._unit_effort(group.members[0], option)
        return found

    def _unit_effort(self, name: str, option: Option) -> float:
        hw, unit = self.hw, self.workload.unit_by_name[name]
        if option in _ON_DEVICE:
            link = 1 / hw.h2d_bytes_per_s + 1 / hw.d2h_bytes_per_s
            found = unit.gradient_bytes * link if option in PARKED else 0.0
            casts = len(self._runs[name]) if option in CAST else 0
            return found + casts * unit.cast_bytes / hw.device_bytes_per_s
        copies = 1 if option in HELD or option == "reload" else len(self._runs[name])
        found = copies * unit.compute_bytes / hw.h2d_bytes_per_s
        if option in ("direct", "reload"):
            found = (found if option == "reload" else 0.0) + self.direct[name] / hw.h2d_bytes_per_s
        if unit.trainable:
            found += unit.gradient_bytes / hw.d2h_bytes_per_s
            found += unit.num_params / hw.cpu_optimizer_params_per_s
            if UNIT_OPTIONS[option][0] == "ssd":
                found += unit.update_read_bytes / hw.ssd_read_bytes_per_s
                written = update_write_bytes(unit, [name] if option in COPIED else [])
                found += written / hw.ssd_write_bytes_per_s
        return found

    @cached_property
    def leanest(self) -> Ints:
        """For each group the option that uses the least device memory: a start for the solver."""
        names = (
            "direct",
            "ssd",
            "ssd-copy",
            "host",
            "recompute",
            "reload",
            "ssd-hold",
            "ssd-copy-hold",
            "hold",
            "cast-parked",
            "cast",
            "parked",
            "device",
            "keep",
        )
        order = {name: k for k, name in enumerate(names)}
        found = []
        for g, group in enumerate(self.groups):
            k = min(range(len(group.options)), key=lambda k: order[group.options[k]])
            found.append(int(self.start[g]) + k)
        return np.array(found, dtype=np.int64)

    @cached_property
    def region_of(self) -> dict[str, str] | None:
        """Residual → name of its region, if segments are not blocks; else None."""
        if all(s.name == self.workload.values[v].block for s in self.segments for v in s.values):
            return None
        return {v: s.name for s in self.segments for v in s.values}
