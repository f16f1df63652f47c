"""Tables for people: the plan, what it predicts, what was moved."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from lohan_fx.errors import format_bytes
from lohan_fx.plan import Plan
from lohan_fx.workload import Workload

if TYPE_CHECKING:
    from lohan_fx.compiled import CompiledModel


def plan_table(workload: Workload, plan: Plan) -> Table:
    """One row a block: what happens to its activations, and where its states live."""
    table = Table(title=f"{plan.strategy} plan for {plan.workload}", title_justify="left")
    for column in ("block", "keep", "swap host", "swap ssd", "recompute", "states"):
        table.add_column(column, justify="left" if column in ("block", "states") else "right")
    tiers: dict[str, set[str]] = {}
    for unit in workload.units:
        tiers.setdefault(unit.block, set()).add(plan.units[unit.name].tier)
    rows: dict[str, dict[str, int]] = {b: {} for b in (*workload.blocks, *tiers)}
    for v in workload.residuals:
        decision = plan.residuals[v]
        action = f"swap {decision.tier}" if decision.action == "swap" else decision.action
        row = rows.setdefault(workload.values[v].block, {})
        row[action] = row.get(action, 0) + workload.values[v].num_bytes
    for block, sizes in rows.items():
        cells = [
            format_bytes(sizes[a]) if a in sizes else "" for a in
            ("keep", "swap host", "swap ssd", "recompute")
        ]
        table.add_row(block or "(outer)", *cells, ", ".join(sorted(tiers.get(block, ()))))
    return table


def prediction_table(plan: Plan) -> Table:
    """Predicted step time, peaks by tier and bytes by link."""
    p = plan.prediction
    table = Table(title="prediction for one step", title_justify="left", show_header=False)
    table.add_row("step", f"{p.step_s * 1e3:.1f} ms (bound by {p.binding})")
    table.add_row("peak device / host / ssd", " / ".join(
        format_bytes(b) for b in (p.peak_device_bytes, p.peak_host_bytes, p.peak_ssd_bytes)
    ))
    table.add_row("device to host / back", " / ".join(
        format_bytes(b) for b in (p.d2h_bytes, p.h2d_bytes)
    ))
    table.add_row("ssd read / written", " / ".join(
        format_bytes(b) for b in (p.ssd_read_bytes, p.ssd_write_bytes)
    ))
    table.add_row("recomputed", f"{p.recompute_flops / 1e9:.2f} GFLOP")
    return table


def render(*tables: Table, width: int = 100) -> str:
    """Rich tables as plain text."""
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=False, color_system=None)
    for table in tables:
        console.print(table)
    return out.getvalue().rstrip() + "\n"


def report_text(compiled: CompiledModel) -> str:
    """What `model.report()` returns."""
    program = compiled.program()
    moved = compiled.counters
    table = Table(title="moved so far", title_justify="left", show_header=False)
    table.add_row("device to host", format_bytes(moved.d2h_bytes))
    table.add_row("host to device", format_bytes(moved.h2d_bytes))
    table.add_row("ssd read", format_bytes(moved.ssd_read_bytes))
    table.add_row("ssd written", format_bytes(moved.ssd_write_bytes))
    notes = "".join(f"note: {note}\n" for note in program.plan.notes)
    return (
        render(plan_table(program.workload, program.plan), prediction_table(program.plan), table)
        + notes
    )
