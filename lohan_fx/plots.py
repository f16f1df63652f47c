"""Figures of an ablation: LoHan's Fig. 9b and SSDTrain's recompute-offload-keep curve.

Nothing here knows torch; drawing needs matplotlib (the extra ``plots``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lohan_fx.errors import InsufficientMemoryError, LohanError
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import Action
from lohan_fx.planned import Planned
from lohan_fx.planners import Choices, PlannerOptions, make_plan
from lohan_fx.planners.algorithm1 import search
from lohan_fx.planners.strategy import place
from lohan_fx.simulate import simulate
from lohan_fx.timeline import LANES, Timeline
from lohan_fx.workload import Workload

if TYPE_CHECKING:
    from lohan_fx.ablation import Ablation, Row

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class SwapCurve:
    """T_iter over A_G2M: (bytes, seconds), by bytes.

    Attributes:
        points: simulated; residuals are swapped by falling offloading benefit, and all others
            recomputed.
        closed_form: the same by Eq. 1–7, for every prefix.
        num_skipped: amounts that were not simulated, as what they recompute does not fit.
    """

    points: tuple[tuple[int, float], ...]
    closed_form: tuple[tuple[int, float], ...]
    num_skipped: int


def swap_curve(
    workload: Workload,
    hw: HardwareProfile,
    budget: MemoryBudget,
    options: PlannerOptions | None = None,
    *,
    num_points: int = 13,
) -> SwapCurve:
    """Force amounts from A_interBlock to all activations (LoHan §V-E: "with different amounts")."""
    options = options or PlannerOptions()
    tiers = place(workload, hw, budget, options)
    found = search(workload, hw, budget, options, tiers)
    own = {v for layer in found.layers for v in layer.values}
    base = [v for v in workload.residuals if v not in own]
    counts = _evenly([size for size, _ in found.points], num_points)
    points: list[tuple[int, float]] = []
    skipped = 0
    for count in sorted(counts):
        swapped = {*base, *(v for layer in found.layers[:count] for v in layer.values)}
        actions: dict[str, Action] = {
            v: "swap" if v in swapped else "recompute" for v in workload.residuals
        }
        choices = Choices(actions=actions, unit_tiers=tiers)
        try:
            plan = make_plan(lambda *_, c=choices: c, workload, hw, budget, options)
        except InsufficientMemoryError:
            skipped += 1
            continue
        size = sum(workload.values[v].num_bytes for v in swapped)
        points.append((size, simulate(workload, plan, hw).step_s))
    return SwapCurve(points=tuple(points), closed_form=found.points, num_skipped=skipped)


def _evenly(sizes: Sequence[int], count: int) -> set[int]:
    """Indices of about `count` sizes, first and last included, at even distances."""
    step = (sizes[-1] - sizes[0]) / max(1, count - 1)
    wanted = (sizes[0] + k * step for k in range(count))
    return {min(range(len(sizes)), key=lambda i: abs(sizes[i] - size)) for size in wanted}


def activation_peak_bytes(planned: Planned) -> int:
    """Largest device memory beyond what is there all along: states, inputs, buffers."""
    memory = planned.simulation.device
    return memory.peak_bytes - memory.static_bytes


def plot_swaps(ablation: Ablation, path: str | Path) -> None:
    """Draw one curve a batch and budget, and a star for every strategy that fits.

    Raises:
        LohanError: nothing fits, or matplotlib is not installed.
    """
    groups = _groups(ablation)
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(8, 5))
    marks = _marks(ablation)
    for k, (label, rows) in enumerate(groups.items()):
        first = rows[0].planned
        assert first is not None
        curve = swap_curve(first.workload, first.hw, first.budget)
        color = f"C{k}"
        for points, style in ((curve.points, "-"), (curve.closed_form, ":")):
            xy = [(size / GIB, seconds) for size, seconds in points]
            if xy:
                name = f"{label}{'' if style == '-' else ', Eq. 1–7'}"
                axes.plot(*zip(*xy, strict=True), style, color=color, label=name, linewidth=1)
        for row in rows:
            x, y = (row.swapped_bytes or 0) / GIB, row.step_s
            axes.plot([x], [y], "*", color=color, markersize=12, markeredgecolor="black")
            text = marks[row.case.strategy]
            axes.annotate(text, (x, y), (5, 5), textcoords="offset points", fontsize=8)
    axes.set_xlabel("activations swapped, A_G2M (GiB)")
    axes.set_ylabel("time of one step (s)")
    key = "   ".join(f"{mark} {name}" for name, mark in marks.items())
    axes.set_title(f"{ablation.model} on {ablation.hardware}")
    figure.text(0.01, 0.01, key, fontsize=7, wrap=True)
    axes.legend(fontsize=8)
    _save(plt, figure, path)


def plot_memory(ablation: Ablation, path: str | Path) -> None:
    """Draw throughput over peak activation memory; one line a strategy, one point a batch.

    Raises:
        LohanError: nothing fits, or matplotlib is not installed.
    """
    _groups(ablation)
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(8, 5))
    lines: dict[str, list[Row]] = defaultdict(list)
    for row in ablation.rows:
        if row.planned is not None:
            lines[row.case.strategy].append(row)
    for name, rows in lines.items():
        points = [
            (activation_peak_bytes(row.planned) / GIB, (row.flops_per_s or 0.0) / 1e12)
            for row in rows
            if row.planned is not None
        ]
        (drawn,) = axes.plot(*zip(*points, strict=True), "o-", label=name, markersize=4)
        for row, point in zip(rows, points, strict=True):
            if row.planned is not None and row.planned.batch is not None:
                text = f" B{row.planned.batch}"
                axes.annotate(text, point, fontsize=7, color=drawn.get_color())
    axes.set_xlabel("peak activation memory on the device (GiB)")
    axes.set_ylabel("model throughput (TFLOPS)")
    axes.set_title(f"{ablation.model} on {ablation.hardware}: recompute, offload, keep")
    axes.legend(fontsize=8)
    _save(plt, figure, path)


def _groups(ablation: Ablation) -> dict[str, list[Row]]:
    """Batch and budget → rows that fit."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in ablation.rows:
        if row.planned is not None:
            batch = row.planned.batch
            parts = [f"batch {batch}"] if batch is not None else []
            parts += [row.case.memory] if row.case.memory not in ("default", "as planned") else []
            found[", ".join(parts) or "step"].append(row)
    if not found:
        raise LohanError("nothing to plot: no case fits")
    return found


def _marks(ablation: Ablation) -> dict[str, str]:
    names = dict.fromkeys(row.case.strategy for row in ablation.rows if row.planned is not None)
    return {name: str(k) for k, name in enumerate(names, 1)}


_KIND_COLORS = {
    "compute": "tab:gray",
    "recompute": "tab:orange",
    "update": "tab:purple",
    "offload": "tab:blue",
    "prefetch": "tab:cyan",
    "fetch_unit": "tab:green",
    "emit_gradients": "tab:pink",
    "read_states": "tab:olive",
    "write_states": "tab:brown",
}


def plot_timelines(timelines: Sequence[Timeline], path: str | Path) -> None:
    """Draw lanes over time, one timeline under another; waiting on the device is red."""
    plt = _pyplot()
    figure, plots = plt.subplots(
        len(timelines), 1, figsize=(11, 2.4 * len(timelines) + 0.6), sharex=True, squeeze=False
    )
    end = max(t.end_s - t.start_s for t in timelines)
    shown: dict[str, Any] = {}
    for axes, timeline in zip(plots[:, 0], timelines, strict=True):
        lanes = [lane for lane in LANES if timeline.by_lane[lane]]
        for row, lane in enumerate(reversed(lanes)):
            bars: dict[str, list[tuple[float, float]]] = defaultdict(list)
            for span in timeline.by_lane[lane]:
                kind = "waiting" if span.stall else span.kind
                bars[kind].append((1e3 * (span.start_s - timeline.start_s), 1e3 * span.seconds))
            for kind, parts in bars.items():
                color = "tab:red" if kind == "waiting" else _KIND_COLORS.get(kind, "black")
                made = axes.broken_barh(parts, (row - 0.4, 0.8), facecolors=color)
                shown.setdefault(kind, made)
        axes.set_yticks(range(len(lanes)), [timeline.shown(lane) for lane in reversed(lanes)])
        length = 1e3 * (timeline.end_s - timeline.start_s)
        axes.set_title(f"{timeline.name}: {length:.0f} ms", loc="left", fontsize=9)
        axes.set_xlim(0, 1e3 * end)
    plots[-1, 0].set_xlabel("ms")
    figure.legend(shown.values(), shown.keys(), loc="lower center", ncols=len(shown), fontsize=8)
    _save(plt, figure, path)


def check_drawing() -> None:
    """See that plots can be drawn, before the work whose results they show.

    Raises:
        LohanError: matplotlib is not installed.
    """
    _pyplot()


def _pyplot() -> Any:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise LohanError(
            "plots need matplotlib: pip install matplotlib, or '.[plots]' in the clone"
        ) from error
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def _save(plt: Any, figure: Any, path: str | Path) -> None:
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise LohanError(f"cannot draw {path}: {error}") from error
    finally:
        plt.close(figure)
