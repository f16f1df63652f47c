"""Tables for people: the hardware, the plan, what it predicts, what was moved.

Sizes are GiB, MiB and so on of 1024; seconds are the cost model's, peaks are exact.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from lohan_fx.errors import format_bytes
from lohan_fx.footprint import host_bytes_needed, ssd_bytes_needed
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import TIERS, Plan, Tier
from lohan_fx.workload import Workload

if TYPE_CHECKING:
    from lohan_fx.compiled import CompiledModel
    from lohan_fx.runtime.lanes import Counters

_ACTIONS = ("keep", "swap host", "swap ssd", "recompute")
_LINKS = {
    "d2h_bytes": "device to host",
    "h2d_bytes": "host to device",
    "ssd_read_bytes": "SSD read",
    "ssd_write_bytes": "SSD written",
}


def _table(title: str, left: Iterable[str], right: Iterable[str] = ()) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in left:
        table.add_column(column)
    for column in right:
        table.add_column(column, justify="right")
    return table


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def hardware_table(hw: HardwareProfile) -> Table:
    """Rates and capacities of a profile."""
    table = _table(f"hardware profile {hw.name}", ("what", "value"))
    for what, value in hw.describe():
        table.add_row(what, value)
    return table


def presets_table() -> Table:
    """One row a built-in hardware profile."""
    table = _table(
        "hardware presets",
        ("name", "device"),
        ("device memory", "host memory", "SSDs", "SSD read / write"),
    )
    for name in HardwareProfile.preset_names():
        hw = HardwareProfile.preset(name)
        rates = (hw.ssd_read_bytes_per_s, hw.ssd_write_bytes_per_s)
        table.add_row(
            name,
            hw.device_name,
            format_bytes(hw.device_bytes),
            format_bytes(hw.host_bytes),
            str(len(hw.ssds)),
            " / ".join(f"{rate / 1e9:.1f}" for rate in rates) + " GB/s",
        )
    return table


def plan_table(workload: Workload, plan: Plan) -> Table:
    """What happens to each block's activations, and where its states live.

    Bytes are of residuals; neighbours that are treated alike share a row.
    """
    table = _table(
        f"{plan.strategy} plan for {plan.workload}: activations by block, and the states' tier",
        ("block",),
        _ACTIONS,
    )
    table.add_column("states")
    sizes: dict[str, dict[str, int]] = {block: {} for block in workload.blocks}
    tiers: dict[str, dict[Tier, None]] = {}
    for v in workload.residuals:
        decision = plan.residuals[v]
        action = f"swap {decision.tier}" if decision.action == "swap" else decision.action
        row = sizes.setdefault(workload.values[v].block, {})
        row[action] = row.get(action, 0) + workload.values[v].num_bytes
    for unit in workload.units:
        tiers.setdefault(unit.block, {})[plan.units[unit.name].tier] = None
        sizes.setdefault(unit.block, {})

    def cells(block: str) -> tuple[str, ...]:
        row = sizes[block]
        states = ", ".join(tiers.get(block, ()))
        return (*(format_bytes(row[a]) if a in row else "" for a in _ACTIONS), states)

    for row, same in groupby(sizes, cells):
        blocks = list(same)
        name = blocks[0] or "(outside)"
        if len(blocks) > 1:
            name = f"{blocks[0]} … {blocks[-1]} ({len(blocks)}, each)"
        table.add_row(name, *row)
    table.add_section()
    totals = [sum(row.get(a, 0) for row in sizes.values()) for a in _ACTIONS]
    table.add_row("all", *(format_bytes(total) if total else "" for total in totals), "")
    return table


def memory_table(plan: Plan, budget: MemoryBudget | None = None, **parts: str) -> Table:
    """Predicted peak of each tier, what of the budget that is, and what it consists of.

    Args:
        plan: any finished plan.
        budget: what the plan was made for; a plan file does not say it.
        **parts: tier → what its peak consists of.
    """
    columns = ("peak", "budget", "used") if budget is not None else ("peak",)
    table = _table("memory by tier, predicted", ("tier",), columns)
    if parts:
        table.add_column("of it")
    for tier in TIERS:
        peak = getattr(plan.prediction, f"peak_{tier}_bytes")
        cells = [tier, format_bytes(peak)]
        if budget is not None:
            have = getattr(budget, f"{tier}_bytes")
            cells += [format_bytes(have), f"{peak / have:.0%}" if have else "–"]
        if parts:
            cells.append(parts.get(tier, ""))
        table.add_row(*cells)
    return table


def footprint_parts(workload: Workload, plan: Plan) -> dict[str, str]:
    """What the host and SSD peaks of a plan consist of, largest first, for `memory_table`."""

    def text(need: Mapping[str, int]) -> str:
        found = sorted(need.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {format_bytes(size)}" for name, size in found if size)

    return {
        "host": text(host_bytes_needed(workload, plan)),
        "ssd": text(ssd_bytes_needed(workload, plan)),
    }


def step_table(plan: Plan, moved: Counters | None = None) -> Table:
    """Time and traffic that the plan predicts for one step, and what was moved so far."""
    p = plan.prediction
    columns = ("predicted", "moved so far") if moved is not None else ("predicted",)
    table = _table("one step", ("what",), columns)

    def add(what: str, predicted: str, so_far: str = "") -> None:
        table.add_row(what, predicted, *([so_far] if moved is not None else []))

    add("time", _seconds(p.step_s))
    add("  forward", _seconds(p.forward_s))
    add("  backward", _seconds(p.backward_s))
    add("bound by", p.binding or "–")
    add("recomputed", f"{p.recompute_flops / 1e9:.2f} GFLOP")
    for field, what in _LINKS.items():
        so_far = "" if moved is None else format_bytes(getattr(moved, field))
        add(what, format_bytes(getattr(p, field)), so_far)
    return table


def plan_file_table(plan: Plan) -> Table:
    """The decisions of a plan, by count: a plan file has no sizes and no blocks."""
    table = _table(f"{plan.strategy} plan for {plan.workload}", ("what", "value"))
    swaps = ", ".join(f"swap to {t} {plan.count('swap', t)}" for t in TIERS[1:])
    table.add_row(
        "residuals",
        f"keep {plan.count('keep')}, {swaps}, recompute {plan.count('recompute')}",
    )
    units = [sum(u.tier == tier for u in plan.units.values()) for tier in TIERS]
    table.add_row(
        "units", ", ".join(f"{tier} {n}" for tier, n in zip(TIERS, units, strict=True))
    )
    table.add_row("optimizer schedule", plan.schedule)
    table.add_row("fingerprint", plan.fingerprint)
    return table


def moved_cells(moved: Counters) -> list[tuple[str, str]]:
    """(link, bytes so far) for a progress line: ``("D2H", "1.50 GiB")``."""
    short = {"d2h_bytes": "D2H", "h2d_bytes": "H2D", "ssd_read_bytes": "SSD r"}
    short["ssd_write_bytes"] = "SSD w"
    return [(name, format_bytes(getattr(moved, field))) for field, name in short.items()]


def render(*parts: Any, width: int = 110) -> str:
    """Rich renderables as plain text, without trailing blanks."""
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=False, color_system=None)
    for part in parts:
        console.print(part, highlight=False, markup=False)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).rstrip() + "\n"


def plan_parts(
    workload: Workload, plan: Plan, budget: MemoryBudget | None = None, moved: Counters | None = None
) -> list[Any]:
    """Everything about one plan, ready to print."""
    return [
        plan_table(workload, plan),
        memory_table(plan, budget, **footprint_parts(workload, plan)),
        step_table(plan, moved),
        *(f"note: {note}" for note in plan.notes),
    ]


def report_text(compiled: CompiledModel) -> str:
    """What `model.report()` returns."""
    program = compiled.program()
    budget, moved = compiled.options.budget, compiled.counters
    return render(*plan_parts(program.workload, program.plan, budget, moved))
