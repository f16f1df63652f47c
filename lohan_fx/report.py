"""Tables for people: the hardware, the plan, what it predicts, what was moved.

Sizes are GiB, MiB and KiB, in 1024s. Predicted bytes are exact, predicted seconds the cost
model's.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from lohan_fx.footprint import host_bytes_needed, ssd_bytes_needed
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import TIERS, Plan, Tier
from lohan_fx.workload import Workload

if TYPE_CHECKING:
    from lohan_fx.compiled.model import CompiledModel
    from lohan_fx.runtime.lanes import Counters

_ACTIONS = ("keep", "swap host", "swap ssd", "recompute")
_LINKS = {
    "d2h_bytes": ("device to host", "D2H"),
    "h2d_bytes": ("host to device", "H2D"),
    "ssd_read_bytes": ("SSD read", "SSD read"),
    "ssd_write_bytes": ("SSD written", "written"),
}


def short_bytes(num_bytes: float) -> str:
    """Bytes in three digits or so: ``1.44 GiB``, ``24.0 MiB``, ``520 MiB``, ``17 B``."""
    size, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(size) >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    digits = 0 if units[0] == "B" or abs(size) >= 100 else 1 if abs(size) >= 10 else 2
    return f"{size:.{digits}f} {units[0]}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _table(title: str, left: Iterable[str], right: Iterable[str] = ()) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in left:
        table.add_column(column)
    for column in right:
        table.add_column(column, justify="right", no_wrap=True)
    return table


# Hardware


def hardware_table(hw: HardwareProfile) -> Table:
    """Rates and capacities of a profile."""
    table = _table(f"hardware profile {hw.name}", ("what", "value"))
    for what, value in hw.describe():
        table.add_row(what, value)
    return table


def presets_table() -> Table:
    """One row a built-in hardware profile."""
    columns = ("device memory", "host memory", "SSDs, read / write")
    table = _table("hardware presets", ("name", "device"), columns)
    table.columns[0].no_wrap = True
    for name in HardwareProfile.preset_names():
        hw = HardwareProfile.preset(name)
        rates = (hw.ssd_read_bytes_per_s / 1e9, hw.ssd_write_bytes_per_s / 1e9)
        table.add_row(
            name,
            hw.device_name,
            short_bytes(hw.device_bytes),
            short_bytes(hw.host_bytes),
            f"{len(hw.ssds)}, {rates[0]:.1f} / {rates[1]:.1f} GB/s",
        )
    return table


# Plans


def plan_table(workload: Workload, plan: Plan) -> Table:
    """What happens to each block's residuals, in bytes, and where its states live.

    Neighbours that are treated alike share a row, which shows one of them.
    """
    title = f"{plan.strategy} plan for {plan.workload}: residuals by block"
    table = _table(title, (), ("block", *_ACTIONS, "states"))
    for column in (table.columns[0], table.columns[-1]):
        column.justify, column.no_wrap = "left", False
    sizes: dict[str, dict[str, int]] = {block: {} for block in workload.blocks}
    states: dict[str, dict[str, None]] = {}
    for v in workload.residuals:
        decision = plan.residuals[v]
        action = f"swap {decision.tier}" if decision.action == "swap" else decision.action
        found = sizes.setdefault(workload.values[v].block, {})
        found[action] = found.get(action, 0) + workload.values[v].num_bytes
    for unit in workload.units:
        where = plan.units[unit.name]
        direct = ", direct" if where.access == "direct" else ""
        copy = f", copy {where.copy_tier}" if where.copy_tier else ""
        copy += ", copy cast" if where.casts else ""
        states.setdefault(unit.block, {})[where.tier + direct + copy] = None
        sizes.setdefault(unit.block, {})

    def cells(block: str) -> tuple[str, ...]:
        found = sizes[block]
        moved = (short_bytes(found[a]) if a in found else "" for a in _ACTIONS)
        return (*moved, ", ".join(states.get(block, ())))

    for row, same in groupby(sizes, cells):
        table.add_row(_range(list(same)), *row)
    table.add_section()
    totals = [sum(found.get(a, 0) for found in sizes.values()) for a in _ACTIONS]
    table.add_row("all", *(short_bytes(total) if total else "" for total in totals), "")
    return table


def cast_lines(plan: Plan) -> list[str]:
    """What "copy cast" in `plan_table` means, if it stands there."""
    count = sum(unit.casts for unit in plan.units.values())
    if not count:
        return []
    units = f"{count} units on the device keep" if count > 1 else "1 unit on the device keeps"
    return [
        f"copy cast: {units} no compute copy; it is cast from the fp32 master where ops use it, "
        "which leaves room on the device"
    ]


def _range(blocks: list[str]) -> str:
    """``h.0 … 11 (12×)`` for twelve neighbours."""
    first, last = (blocks[i] or "(outside)" for i in (0, -1))
    if len(blocks) == 1:
        return first
    container = first.rpartition(".")[0] + "."
    return f"{first} … {last.removeprefix(container)} ({len(blocks)}×)"


def memory_table(
    plan: Plan, budget: MemoryBudget | None = None, parts: Mapping[str, str] | None = None
) -> Table:
    """Predicted peak of each tier, its share of the budget, and what it consists of.

    Args:
        plan: any finished plan.
        budget: what the plan was made for; a plan file does not say it.
        parts: tier → what its peak consists of (`footprint_parts`).
    """
    columns = ("peak", "budget", "used") if budget is not None else ("peak",)
    table = _table("predicted memory", ("tier",), columns)
    if parts:
        table.add_column("of it")
    for tier in TIERS:
        peak = getattr(plan.prediction, f"peak_{tier}_bytes")
        cells = [tier, short_bytes(peak)]
        if budget is not None:
            have = getattr(budget, f"{tier}_bytes")
            cells += [short_bytes(have), f"{peak / have:.0%}" if have else ""]
        if parts:
            cells.append(parts.get(tier, ""))
        table.add_row(*cells)
    return table


def footprint_parts(workload: Workload, plan: Plan) -> dict[str, str]:
    """What the host and SSD peaks of a plan consist of, largest first. Flats in which gradients add
    up, which are among the units' states, are named by themselves."""

    def text(tier: Tier, need: Mapping[str, int]) -> str:
        units = (u for u in workload.units if plan.units[u.name].tier == tier)
        sums = sum(u.accumulator_bytes for u in units)
        parts = {**need, "units": need["units"] - sums, "sums of gradients": sums}
        found = sorted(parts.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {short_bytes(size)}" for name, size in found if size)

    return {
        "host": text("host", host_bytes_needed(workload, plan)),
        "ssd": text("ssd", ssd_bytes_needed(workload, plan)),
    }


def step_table(plan: Plan, moved: Counters | None = None, *, accumulates: bool = False) -> Table:
    """Time (by Eq. 1–7, not simulated) and traffic that the plan predicts for one step, and what
    was moved so far. If gradients accumulate, a plan is of the last of a step's micro-batches, with
    the updates."""
    p = plan.prediction
    columns = ("predicted", "moved so far") if moved is not None else ("predicted",)
    title = "the last micro-batch of a step, with the updates" if accumulates else "one step"
    table = _table(title, ("what",), columns)
    table.add_row("optimizer schedule", plan.schedule)
    table.add_row("time (closed form)", _seconds(p.step_s))
    table.add_row("  forward", _seconds(p.forward_s))
    table.add_row("  backward", _seconds(p.backward_s))
    table.add_row("  binding in it", p.binding)
    # elementwise ops, which are recomputed first, have none
    flops = f", {flops_text(p.recompute_flops)}FLOP" if p.recompute_flops else ""
    table.add_row("recomputing", _seconds(p.recompute_s) + flops)
    for field, (what, _) in _LINKS.items():
        so_far = [short_bytes(getattr(moved, field))] if moved is not None else []
        table.add_row(what, short_bytes(getattr(p, field)), *so_far)
    return table


def flops_text(flops: float) -> str:
    """FLOPs for a person, without the word: ``1.2 T``, ``34.0 G``, ``0 ``."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if flops >= 0.1 * factor:
            return f"{flops / factor:,.1f} {prefix}"
    return f"{flops:,.0f} "


def _decisions_table(plan: Plan) -> Table:
    table = _table(f"{plan.strategy} plan for {plan.workload}", ("what", "value"))
    swaps = (f"swap to {tier} {plan.count('swap', tier)}" for tier in TIERS[1:])
    counts = (f"keep {plan.count('keep')}", *swaps, f"recompute {plan.count('recompute')}")
    table.add_row("residuals", ", ".join(counts))
    units = (f"{tier} {sum(u.tier == tier for u in plan.units.values())}" for tier in TIERS)
    table.add_row("units", ", ".join(units))
    casts = sum(unit.casts for unit in plan.units.values())
    if casts:
        table.add_row(
            "  without compute copies", f"{casts} on the device, cast where they are used"
        )
    table.add_row("fingerprint", plan.fingerprint)
    return table


def plan_parts(
    workload: Workload,
    plan: Plan,
    budget: MemoryBudget | None = None,
    moved: Counters | None = None,
) -> list[Table | str]:
    """All about one plan, ready to print: tables, then the planner's notes."""
    return [
        plan_table(workload, plan),
        *cast_lines(plan),
        memory_table(plan, budget, footprint_parts(workload, plan)),
        step_table(plan, moved, accumulates=any(u.accumulator_bytes for u in workload.units)),
        *(f"note: {note}" for note in plan.notes),
    ]


def plan_file_parts(plan: Plan) -> list[Table | str]:
    """The same for a plan alone: decisions by count, as a file has no sizes and no blocks."""
    notes = (f"note: {note}" for note in plan.notes)
    return [_decisions_table(plan), memory_table(plan), step_table(plan), *notes]


# What runs


def moved_text(moved: Counters) -> str:
    """What was moved so far, in one line."""
    cells = (f"{name} {short_bytes(getattr(moved, f))}" for f, (_, name) in _LINKS.items())
    return ", ".join(cells)


def report_text(compiled: CompiledModel) -> str:
    """What `model.report()` returns."""
    program = compiled.program()
    budget, moved = compiled.options.budget, compiled.counters
    parts = plan_parts(program.workload, program.plan, budget, moved)
    if compiled.refined is not None:
        parts.append(f"refined: {compiled.refined.text()}")
    return render(parts)


def render(parts: Iterable[Any], *, width: int = 110) -> str:
    """Renderables of rich as plain text, without trailing blanks."""
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, highlight=False, markup=False)
    for part in parts:
        console.print(part)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())
