"""docs/papers.md and its plots from finished figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.papers.figure import Check, Figure, Line, Panel, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COMMAND = "python -m benchmarks.papers"

HEAD = f"""# The papers' figures, by simulation

Made by `{COMMAND}`; do not edit. Every number under "ours" is simulated: the model
is traced on meta tensors (blocks replicated), planned by the strategy, lowered to its program, and
the program walked by the simulator under a preset of `lohan_fx.hardware`, one for each server.
"Paper" has what the papers' text and tables state, and LoHan's evaluation data; their pictures were
not at hand. All values and where they stand are in `benchmarks/papers/values.toml`.

- **TFLOPS** are model FLOPs over the step's time: 3 · FLOP_f, without recomputation. LoHan's Table
  I has backward as 2 · FLOP_f; that FLOPs done again do not count follows from its numbers. At
  batch 8, 13B is bound by the SSDs, 360 GB of model states over 28 GB/s (§III-C): 42.8 TFLOPS are
  15.2 s if they are model FLOPs, and 20.2 s if a recomputed forward counts. FLOP_f counts matmuls
  and attention: tokens · (layers · (24 h² + 4 s h) + 2 h v).
- **The head.** Logits of 13B at batch 128 take 25 GiB in fp32; the papers' GPU has 24 GB, so their
  head cannot have had them at once. The named GPTs compute loss and gradients of the head in pieces
  of 2048 tokens, in forward; FLOPs are the same.
- **A step** begins with nothing on the GPU and ends with the last write of the optimizer (the
  runtime's own order, `lohan_fx.simulate.Rules()`).
- **Presets** are fitted to what the papers state, once for each server; every rate has its source
  in `lohan_fx/hardware.py`.
- **Systems** other than LoHan and Fuyou are strategies of lohan_fx with what the papers state about
  the real ones: `benchmarks/papers/systems.py` says what.
"""


def markdown(figures: Sequence[Figure], images: str) -> str:
    """The whole document. `images` is the folder of the plots, as seen from it."""
    parts = [HEAD, _gates(figures), _missing(figures)]
    parts += [_section(figure, images) for figure in figures]
    return "\n".join(parts)


def gates_table(rows: Iterable[Row]) -> str:
    """The rows that have a gate, and whether they are within it."""
    lines = ["| what | paper | ours | ratio | gate | |", "|---|--:|--:|--:|--:|---|"]
    for row in rows:
        gate = row.paper.gate
        if gate is None:
            continue
        verdict = "within" if row.within_gate else "**outside**"
        cells = (_label(row), *_numbers(row), f"±{gate:.0%}", verdict)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _gates(figures: Sequence[Figure]) -> str:
    rows = [row for figure in figures for row in figure.rows]
    checks = [check for figure in figures for check in figure.checks]
    order = [check.holds for check in checks if check.claim.order]
    more = [check.holds for check in checks if not check.claim.order]
    return f"""## Gates

{gates_table(rows)}

Of {len(order)} statements about order (who wins, where the optimum lies), {sum(order)} hold; of
{len(more)} others, {sum(more)}.
"""


def _missing(figures: Sequence[Figure]) -> str:
    """What is off by more than a quarter, or does not hold."""
    lines = ["## What misses", ""]
    for figure in figures:
        off = [r for r in figure.rows if r.ratio is None or abs(r.ratio - 1) > 0.25]
        off = [r for r in off if r.paper.value or r.ours]
        found = [f"{_label(r)}: {_number(r.ours)} for {_number(r.paper.value)}" for r in off]
        found += [
            f"does not hold: {c.claim.text} ({c.found})" for c in figure.checks if not c.holds
        ]
        if found:
            lines.append(f"- **[{figure.title}](#{figure.key})**: " + "; ".join(found) + ".")
    lines += ["", "More than 25% off, or not holding. The reasons are with each figure.", ""]
    return "\n".join(lines)


def _section(figure: Figure, images: str) -> str:
    parts = [f'## <a id="{figure.key}"></a>{figure.title}', "", figure.setup, ""]
    if figure.rows:
        parts += ["| what | paper | ours | ratio | stated in |", "|---|--:|--:|--:|---|"]
        for row in figure.rows:
            cells = (_label(row), *_numbers(row), row.paper.where)
            parts.append(f"| {' | '.join(cells)} |")
        parts.append("")
    if figure.checks:
        parts += ["| statement | holds | found | stated in |", "|---|---|---|---|"]
        parts += [_check_row(check) for check in figure.checks]
        parts.append("")
    parts += [f"![{figure.title}]({images}/{plot_name(figure)})", ""]
    parts += [f"- {note}" for note in figure.notes]
    return "\n".join(parts) + ("\n" if figure.notes else "")


def _check_row(check: Check) -> str:
    holds = "yes" if check.holds else "**no**"
    return f"| {check.claim.text} | {holds} | {check.found} | {check.claim.where} |"


def _label(row: Row) -> str:
    unit = row.paper.unit
    return f"{row.paper.label}, {unit}" if unit and unit != "×" else row.paper.label


def _numbers(row: Row) -> tuple[str, str, str]:
    ratio = f"{row.ratio:.3f}" if row.ratio is not None else "–"
    return _number(row.paper.value), _number(row.ours), ratio


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1f}" if abs(value) >= 20 else f"{value:.2f}"


# -- plots ------------------------------------------------------------------------------------


def plot_name(figure: Figure) -> str:
    return f"papers-{figure.key}.png"


def plot(figure: Figure, path: Path) -> None:
    """Write the figure's plot as PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    count = len(figure.panels)
    size = (4.6 * count, 3.4)
    made, axes = plt.subplots(1, count, figsize=size, squeeze=False, layout="constrained")
    for panel, ax in zip(figure.panels, axes[0], strict=True):
        _draw(panel, ax)
    made.savefig(path, dpi=90, metadata={"Software": None})
    plt.close(made)


def _draw(panel: Panel, ax: Axes) -> None:
    if panel.kind == "bar" or any(isinstance(x, str) for line in panel.lines for x in line.x):
        _bars(panel, ax)
    else:
        for line in panel.lines:
            _line(line, ax)
        if panel.log_x:
            ticks = sorted({float(x) for line in panel.lines for x in line.x})
            ax.set_xscale("log", base=2)
            ax.set_xticks(ticks, [f"{t:.0f}" for t in ticks])
            ax.minorticks_off()
    ax.set_title(panel.title, fontsize=10)
    ax.set_xlabel(panel.x)
    ax.set_ylabel(panel.y)
    ax.set_ylim(bottom=0)
    ax.grid(visible=True, alpha=0.3)
    ax.legend(fontsize=8)


def _line(line: Line, ax: Axes) -> None:
    style: dict[str, Any] = {"marker": "o", "markersize": 4}
    if line.stated:
        style = {"marker": "x", "linestyle": "none", "color": "black"}
    xs = [float(x) for x in line.x]
    (drawn,) = ax.plot(xs, list(line.y), label=line.label, **style)
    if line.stars:
        points = [xs[k] for k in line.stars], [line.y[k] for k in line.stars]
        ax.plot(*points, "*", markersize=13, color=drawn.get_color())


def _bars(panel: Panel, ax: Axes) -> None:
    names = [str(x) for x in panel.lines[0].x]
    width = 0.8 / len(panel.lines)
    for k, line in enumerate(panel.lines):
        at = [i + (k - (len(panel.lines) - 1) / 2) * width for i in range(len(names))]
        color: dict[str, Any] = {"color": "black", "alpha": 0.6} if line.stated else {}
        ax.bar(at, list(line.y), width=width, label=line.label, **color)
    ax.set_xticks(range(len(names)), names, fontsize=8)
