"""speed.py's results as a table.

python benchmarks/gpu/table.py [benchmarks/results/speed_h200.json]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from cases import CASES
from rich.console import Console
from rich.table import Table

GIB = 2**30


def table(results: dict[str, Any]) -> Table:
    """A row for every system of every case; the disk's floor is one of them. Its speed is set
    against ours in the column "ours / it", its goal beside it; what binds our step, and the floor
    of our plan, stand in our rows."""
    title = ", ".join(results[k] for k in ("card", "torch", "commit") if k in results)
    made = Table(title=title, title_justify="left")
    made.add_column("case")
    made.add_column("system")
    for name in ("s/step", "tokens/s", "ours / it", "goal", "floor s"):
        made.add_column(name, justify="right")
    made.add_column("binds")
    for name in ("GPU GiB", "RSS GiB", "first step s"):
        made.add_column(name, justify="right")
    for name, case in results["cases"].items():
        for cells in case_cells(name, case):
            made.add_row(*cells)
        made.add_section()
    return made


def case_cells(name: str, found: dict[str, Any]) -> list[list[str]]:
    """Rows of a case: its name, the system, and the columns of `table`."""
    goals = CASES[name].goals if name in CASES else {}
    systems = {k: row for k, row in found.items() if isinstance(row, dict) and k != "shape"}
    ours = systems.get("ours", {})
    if ours.get("floor_s"):
        systems["disk"] = {"step_s": ours["floor_s"]}
    rows = []
    for system, row in systems.items():
        if "step_s" not in row and "failed" not in row:  # not a system: what the host gave
            continue
        if "failed" in row:
            rows.append([name, system, row["failed"]])
            continue
        goal = goals.get(system)
        against = "step_s" in ours and system != "ours"
        rows.append(
            [
                name,
                system,
                f"{row['step_s']:.3f}",
                f"{row['tokens_per_s']:,.0f}" if "tokens_per_s" in row else "",
                f"{row['step_s'] / ours['step_s']:.3f}" if against else "",
                f"{goal:g}" if goal else "",
                f"{row['bound_s']:.3f}" if "bound_s" in row else "",
                row.get("binds", ""),
                f"{row['peak'] / GIB:.2f}" if "peak" in row else "",
                f"{row['rss'] / GIB:.1f}" if "rss" in row else "",
                f"{row['first_step_s']:.1f}" if "first_step_s" in row else "",
            ]
        )
    return rows


def show(results: dict[str, Any]) -> None:
    Console(width=130).print(table(results))


def load(file: Path) -> dict[str, Any]:
    """What speed.py wrote.

    Raises:
        SystemExit: the file cannot be read, or is of something else.
    """
    try:
        results = json.loads(file.read_text())
    except (OSError, ValueError) as error:  # of JSON and of its encoding, too
        raise SystemExit(f"table.py cannot read {file}: {error}") from None
    if not isinstance(results, dict) or "cases" not in results:
        raise SystemExit(f"table.py: {file} has no cases: it is not what speed.py --out writes")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).parent.parent / "results/speed_h200.json"
    parser.add_argument("file", type=Path, nargs="?", default=default)
    show(load(parser.parse_args().file))


if __name__ == "__main__":
    main()
