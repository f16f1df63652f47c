"""Regenerate the papers' figures by simulation.

    python -m benchmarks.papers [--quick] [--only KEY …] [--out docs] [--jobs 2]

Writes docs/papers.md and docs/img/papers-*.png. With --quick, only the values that have a gate are
simulated, and printed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from benchmarks.papers import fuyou, lohan, others
from benchmarks.papers.figure import Row, Spec, Values
from benchmarks.papers.jobs import run
from benchmarks.papers.report import gates_table, markdown, plot, plot_name

FIGURES: Sequence[Spec] = (*lohan.FIGURES, *fuyou.FIGURES, *others.FIGURES)
ROOT = Path(__file__).parents[2]


def quick(processes: int = 1, keys: Collection[tuple[str, str]] | None = None) -> list[Row]:
    """The rows that have a gate; of these only those of some (figure, key), if they are given."""
    values = Values()
    wanted = {
        (spec.key, key): step
        for spec in FIGURES
        for key, step in spec.gates.items()
        if keys is None or (spec.key, key) in keys
    }
    results = run(wanted.values(), processes)
    return [
        values.of(figure).row(key, results[step].tflops or None)
        for (figure, key), step in wanted.items()
    ]


def full(
    out: Path, only: Sequence[str] = (), processes: int = 1, *, verbose: bool = False
) -> list[Row]:
    """Write the document and the plots; returns all rows."""
    values = Values()
    specs = [spec for spec in FIGURES if not only or spec.key in only]
    jobs = [job for spec in specs for job in (*spec.jobs(), *spec.gates.values())]
    progress = (lambda text: print(text, file=sys.stderr, flush=True)) if verbose else None
    results = run(jobs, processes, progress)
    figures = [spec.figure(results, values) for spec in specs]
    images = out / "img"
    images.mkdir(parents=True, exist_ok=True)
    for figure in figures:
        plot(figure, images / plot_name(figure))
    (out / "papers.md").write_text(markdown(figures, images.name), encoding="utf-8")
    return [row for figure in figures for row in figure.rows]


def main() -> None:
    keys = [spec.key for spec in FIGURES]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.papers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the gates alone")
    parser.add_argument("--only", nargs="*", default=(), choices=keys, metavar="KEY")
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args()
    if options.quick:
        rows = quick(options.jobs)
    else:
        rows = full(options.out, options.only, options.jobs, verbose=True)
    print(gates_table(rows))
    sys.exit(any(row.within_gate is False for row in rows))


if __name__ == "__main__":
    main()
