"""LoHan, Fig. 5a, 5c, 6, 7, 8, 9a, 9b, 10a, 10b, 13."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.papers.figure import Figure, FigureValues, Line, Panel, Row, Spec, best, spread
from benchmarks.papers.jobs import Curve, Job, LargestModel, Results, Step, SwapSweep
from benchmarks.papers.systems import SYSTEMS
from lohan_fx.hardware import HardwareProfile

SERVER = "rtx4090-12xp5510"
PEAK = HardwareProfile.preset(SERVER).block_flops_per_s / 1e12
"""TFLOPS of a transformer block, LoHan's measured peak, as the preset infers it."""

ALL_SSDS = (1, 2, 3, 6, 12)
BASELINES = ("zero-offload", "zero-infinity", "colossal-ai")


def server(num_ssds: int) -> str:
    return f"rtx4090-{num_ssds}xp5510"


def label(system: str) -> str:
    return SYSTEMS[system].label


def tflops(results: Results, *step: object) -> float:
    """0.0 if the step does not fit."""
    return results.step(*step).tflops


def times(a: float, b: float) -> float | None:
    """A / b, None if b did not run."""
    return a / b if b else None


# -- Fig. 5a ----------------------------------------------------------------------------------

BATCHES_5A = (8, 16, 32, 64, 128)
SYSTEMS_5A = ("lohan", *BASELINES)
GATES_5A = {f"b{b}": Step("gpt-13b", b, SERVER, "lohan") for b in BATCHES_5A}


def jobs_5a() -> list[Job]:
    steps = [Step("gpt-13b", b, SERVER, s) for s in SYSTEMS_5A for b in BATCHES_5A]
    return [*steps, Step("gpt-13b", 8, SERVER, "flashneuron")]


def build_5a(results: Results, v: FigureValues) -> Figure:
    found = {s: [tflops(results, "gpt-13b", b, SERVER, s) for b in BATCHES_5A] for s in SYSTEMS_5A}
    top = {s: max(ys) for s, ys in found.items()}
    rows = [v.row(f"b{b}", y) for b, y in zip(BATCHES_5A, found["lohan"], strict=True)]
    rows += [v.row(f"over-{s}", times(top["lohan"], top[s])) for s in BASELINES]
    order = [top[s] for s in SYSTEMS_5A]
    neuron = results.step("gpt-13b", 8, SERVER, "flashneuron")
    own = found["lohan"]
    checks = [
        v.check(
            "order",
            order == sorted(order, reverse=True),
            spread("TFLOPS", order),
        ),
        v.check("flashneuron", not neuron.fits, neuron.reason or "it fits"),
        v.check(
            "optimum",
            own[:4] == sorted(own[:4]) and abs(own[4] / own[3] - 1) < 0.05,
            spread("TFLOPS", own),
        ),
    ]
    stated = [v[f"b{b}"].value for b in BATCHES_5A]
    lines = [Line(label=label(s), x=BATCHES_5A, y=ys) for s, ys in found.items()]
    lines.append(Line(label="LoHan (stated)", x=BATCHES_5A, y=stated, stated=True))
    return Figure(
        key=v.figure,
        title="LoHan Fig. 5a: throughput of 13B on the RTX 4090",
        setup="13B, RTX 4090, 12 SSDs, 768 GB. Zero: out of memory.",
        rows=rows,
        checks=checks,
        panels=[Panel(title="13B", x="batch", y="TFLOPS", lines=lines, log_x=True)],
        notes=[
            "ZeRO-Offload is faster here than in the paper, Colossal-AI slower. The copies of all "
            "three are serialized with compute, as Fuyou §3.2 describes; ZeRO-Infinity and "
            "Colossal-AI have, besides, what the share of a step in which their GPU is busy (36% "
            "and 12% at batch 32, §III-B) leaves unexplained: 24 and 67 s of each step of 13B. No "
            "such share is stated for ZeRO-Offload. That of Colossal-AI and its 8.02 do not agree: "
            "12% of the peak are 15 model TFLOPS, as a busy GPU recomputes, too, and 8.02 means "
            "19.",
            "The baselines end at batch 32, as they compute the loss from all logits at once (31 "
            "GiB at batch 64). That is an inference: what ends them is not stated.",
        ],
    )


# -- Fig. 5c ----------------------------------------------------------------------------------

BATCHES_5C: Mapping[str, Sequence[int]] = {
    "gpt-6b": (32, 128),
    "gpt-13b": (32, 64),
    "gpt-30b": (32, 64),
    "gpt-70b": (16, 32),
    "gpt-135b": (8, 16),
    "gpt-175b": (8, 16),
}
SYSTEMS_5C = ("lohan", "zero-offload", "zero-infinity")
GATES_5C = {f"b{b}": Step("gpt-175b", b, SERVER, "lohan") for b in (8, 16)}


def jobs_5c() -> list[Job]:
    steps: list[Job] = [
        Step(m, b, SERVER, s)
        for m, batches in BATCHES_5C.items()
        for b in batches
        for s in SYSTEMS_5C
    ]
    return [*steps, Step("gpt-175b", 32, SERVER, "lohan")]


def build_5c(results: Results, v: FigureValues) -> Figure:
    top = {
        s: {
            m: max(tflops(results, m, b, SERVER, s) for b in batches)
            for m, batches in BATCHES_5C.items()
        }
        for s in SYSTEMS_5C
    }
    own = top["lohan"]
    small = [own[m] / PEAK for m in ("gpt-6b", "gpt-13b", "gpt-30b")]
    others = [y / PEAK for s in SYSTEMS_5C[1:] for y in top[s].values()]
    large = {s: top[s]["gpt-175b"] for s in SYSTEMS_5C[1:]}
    b32 = results.step("gpt-175b", 32, SERVER, "lohan")
    rows = [
        v.row("b8", tflops(results, "gpt-175b", 8, SERVER, "lohan")),
        v.row("b16", tflops(results, "gpt-175b", 16, SERVER, "lohan")),
        v.row("peak-175b", own["gpt-175b"] / PEAK),
    ]
    checks = [
        v.check("peak-small", all(0.88 <= y <= 0.98 for y in small), spread("of peak", small, 2)),
        v.check("baselines", max(others) <= 0.4, f"up to {max(others):.2f} of the peak"),
        v.check(
            "order",
            all(own[m] > max(top[s][m] for s in SYSTEMS_5C[1:]) for m in BATCHES_5C),
            "; ".join(spread(label(s), list(top[s].values())) for s in SYSTEMS_5C),
        ),
        v.check("only", own["gpt-175b"] > 0 and not any(large.values()), "zero: does not fit"),
        v.check("oom", not b32.fits, b32.reason or f"it fits: {b32.tflops:.1f} TFLOPS"),
    ]
    models = [m.removeprefix("gpt-").upper() for m in BATCHES_5C]
    lines = [Line(label=label(s), x=models, y=list(top[s].values())) for s in SYSTEMS_5C]
    lines.append(Line(label="peak", x=models, y=[PEAK] * len(models)))
    return Figure(
        key=v.figure,
        title="LoHan Fig. 5c: throughput by model size on the RTX 4090",
        setup="The better of two batches: "
        + ", ".join(f"{m} {a}/{b}" for m, (a, b) in zip(models, BATCHES_5C.values(), strict=True))
        + f". Peak: {PEAK:.0f} TFLOPS.",
        rows=rows,
        checks=checks,
        panels=[Panel(title="best batch", x="parameters", y="TFLOPS", lines=lines)],
        notes=[
            "The paper's own batches are not stated, but for 13B and 175B.",
            "175B at batch 32: the paper's system runs out of GPU memory. Here recompute regions "
            "are parts of a block, copies wait for room, and residency is exact to the tensor; an "
            "allocator's fragmentation is in the 8% that the budget leaves.",
            "ZeRO-Infinity and ZeRO-Offload: see Fig. 5a.",
        ],
    )


# -- Fig. 6 -----------------------------------------------------------------------------------

MEMORY_6 = ("128GiB", "256GiB", "512GiB", "768GiB")
SYSTEMS_6 = ("lohan", "zero-infinity", "colossal-ai")
GPUS_6 = {"RTX 4090 and 3090": SERVER, "RTX 4080": "rtx4080-12xp5510"}


def jobs_6() -> list[Job]:
    found: list[Job] = [
        LargestModel(1, hw, s, m) for hw in GPUS_6.values() for s in SYSTEMS_6 for m in MEMORY_6
    ]
    return [*found, LargestModel(1, SERVER, "flashneuron")]


def billions(name: str) -> float:
    """``gpt-13b`` → 13.0; 0.0 for none."""
    return float(name.removeprefix("gpt-").removesuffix("b")) if name else 0.0


def build_6(results: Results, v: FigureValues) -> Figure:
    found = {
        (gpu, s): [billions(results[LargestModel(1, hw, s, m)]) for m in MEMORY_6]
        for gpu, hw in GPUS_6.items()
        for s in SYSTEMS_6
    }
    neuron = results[LargestModel(1, SERVER, "flashneuron")]
    wins = all(
        a >= b and (a > b or a == 412)
        for gpu in GPUS_6
        for s in SYSTEMS_6[1:]
        for a, b in zip(found[gpu, "lohan"], found[gpu, s], strict=True)
    )
    others = [max(found["RTX 4090 and 3090", s]) for s in SYSTEMS_6[1:]]
    rows = [
        v.row("lohan-4090-768", found["RTX 4090 and 3090", "lohan"][3]),
        v.row("zero-infinity-4090-768", found["RTX 4090 and 3090", "zero-infinity"][3]),
    ]
    on_4080 = found["RTX 4080", "lohan"][1]
    checks = [
        v.check("order", wins, "at every one of 8 points"),
        v.check("4080", on_4080 >= 175, f"{on_4080:.0f}B"),
        v.check("flashneuron", not neuron, neuron or "6B does not fit"),
        v.check("baselines", max(others) < 175, spread("B", others, 0)),
    ]
    panels = [
        Panel(
            title=gpu,
            x="main memory",
            y="billion parameters",
            kind="bar",
            lines=[Line(label=label(s), x=MEMORY_6, y=found[gpu, s]) for s in SYSTEMS_6],
        )
        for gpu in GPUS_6
    ]
    return Figure(
        key=v.figure,
        title="LoHan Fig. 6: largest model by main memory",
        setup="Batch 1; the sizes of Table IV, 6B to 412B, so 412B may be more. The 4090 and 3090 "
        "both have 24 GB.",
        rows=rows,
        checks=checks,
        panels=panels,
        notes=[
            "LoHan trains larger models here than in the paper: on the device are one unit's "
            "parameters and gradients and what compute needs of its activations, no more; the "
            "paper's system prefetches a unit beyond that, and fragmentation takes its share.",
            "ZeRO-Infinity and Colossal-AI need 6 and 8 bytes of main memory a parameter; see "
            "`benchmarks/papers/systems.py`.",
        ],
    )


# -- Fig. 7 -----------------------------------------------------------------------------------

SYSTEMS_7 = ("lohan", "lohan-naive", "lohan-serial")
BATCHES_7: Mapping[str, Sequence[int]] = {"gpt-13b": (8, 16, 32, 64), "gpt-175b": (8, 16)}


def jobs_7() -> list[Job]:
    return [Step(m, b, SERVER, s) for m, bs in BATCHES_7.items() for b in bs for s in SYSTEMS_7]


def build_7(results: Results, v: FigureValues) -> Figure:
    found = {
        (m, s): [tflops(results, m, b, SERVER, s) for b in bs]
        for m, bs in BATCHES_7.items()
        for s in SYSTEMS_7
    }
    small = found["gpt-13b", "lohan"]
    naive, serial = found["gpt-13b", "lohan-naive"], found["gpt-13b", "lohan-serial"]
    gains = [a / b for a, b in zip(small, serial, strict=True)]
    fastest = all(
        found[m, "lohan"][k] >= found[m, s][k] for m, s in found for k in range(len(found[m, s]))
    )
    checks = [
        v.check("order", fastest, "at every one of 6 points"),
        v.check("small", gains[0] < max(gains), spread("×", gains, 2)),
    ]
    panels = [
        Panel(
            title=m.removeprefix("gpt-").upper(),
            x="batch",
            y="TFLOPS",
            kind="bar",
            lines=[Line(label=label(s), x=[str(b) for b in bs], y=found[m, s]) for s in SYSTEMS_7],
        )
        for m, bs in BATCHES_7.items()
    ]
    return Figure(
        key=v.figure,
        title="LoHan Fig. 7: active gradient offloading",
        setup="RTX 4090, 12 SSDs. LoHan+ZeRO: the optimizer after backward, its own reads, updates "
        "and writes overlapped.",
        rows=[
            v.row("over-naive", small[3] / naive[3]),
            v.row("over-serial", small[3] / serial[3]),
        ],
        checks=checks,
        panels=panels,
        notes=[
            "Naïve at batch 64: reading, updating and writing all units one after another takes "
            "15 s, and the GPU's backward 22 s, so the chain is hidden even if nothing in it "
            "overlaps. That the paper's loses 22% there must come from something else than the "
            "order of Fig. 3a, perhaps from blocking the training loop. At batches 8 to 32, where "
            "the chain is the longer one, naïve loses 12 to 19% here, too.",
        ],
    )


# -- Fig. 8 -----------------------------------------------------------------------------------

BATCHES_8 = (12, 24, 36, 48, 60)
MEMORY_8 = ("128GiB", "256GiB")
SYSTEMS_8 = ("lohan", "lohan-cpu-act")


def jobs_8() -> list[Job]:
    return [LargestModel(b, SERVER, s, m) for b in BATCHES_8 for m in MEMORY_8 for s in SYSTEMS_8]


def build_8(results: Results, v: FigureValues) -> Figure:
    found = {
        (m, s): [billions(results[LargestModel(b, SERVER, s, m)]) for b in BATCHES_8]
        for m in MEMORY_8
        for s in SYSTEMS_8
    }
    pairs = {
        m: list(zip(found[m, "lohan"], found[m, "lohan-cpu-act"], strict=True)) for m in MEMORY_8
    }
    factors = [a / b if b else float("inf") for a, b in pairs["128GiB"]]
    ahead = [f for f in factors if f >= 2]
    a60, b60 = pairs["256GiB"][-1]
    checks = [
        v.check("larger", bool(ahead) and max(factors) <= 6, spread("×", factors, 2)),
        v.check(
            "never-smaller", all(a >= b for m in MEMORY_8 for a, b in pairs[m]), "at 10 points"
        ),
        v.check("equal", a60 == b60, f"{a60:.0f}B and {b60:.0f}B"),
    ]
    panels = [
        Panel(
            title=f"{m} main memory",
            x="batch",
            y="billion parameters",
            kind="bar",
            lines=[
                Line(label=label(s), x=[str(b) for b in BATCHES_8], y=found[m, s])
                for s in SYSTEMS_8
            ],
        )
        for m in MEMORY_8
    ]
    return Figure(
        key=v.figure,
        title="LoHan Fig. 8: activations to SSD or to main memory alone",
        setup="RTX 4090; the sizes of Table IV. LoHan+CpuAct never swaps activations to SSD.",
        rows=[],
        checks=checks,
        panels=panels,
        notes=[
            "Which batches the paper has between 12 and 60 is not stated.",
            "At batch 60 and 256 GB, the paper's systems are both bound by a whole layer's "
            "activations on the GPU. LoHan is not, here: it swaps what it cannot hold.",
        ],
    )


# -- Fig. 9a ----------------------------------------------------------------------------------

BATCHES_9A: Mapping[str, Mapping[str, int]] = {  # Table V
    "lohan+ds": {"128GiB": 16, "256GiB": 24, "512GiB": 32},
    "lohan+cap": {"128GiB": 16, "256GiB": 24, "512GiB": 32},
    "lohan+g10": {"128GiB": 32, "256GiB": 32, "512GiB": 32},
    "lohan+cm": {"256GiB": 24, "512GiB": 32},
    "lohan": {"128GiB": 32, "256GiB": 32, "512GiB": 32},
}
MEMORY_9A = ("128GiB", "256GiB", "512GiB")


FAILED_9A = Step("gpt-70b", 16, SERVER, "lohan+cm", "128GiB")
"""Table V has no batch for it; 16 is the smallest of the others."""


def jobs_9a() -> list[Job]:
    steps = [
        Step("gpt-70b", b, SERVER, s, m) for s, bs in BATCHES_9A.items() for m, b in bs.items()
    ]
    return [*steps, FAILED_9A]


def build_9a(results: Results, v: FigureValues) -> Figure:
    found = {
        s: [
            tflops(results, "gpt-70b", BATCHES_9A[s][m], SERVER, s, m) if m in BATCHES_9A[s] else 0
            for m in MEMORY_9A
        ]
        for s in BATCHES_9A
    }
    own = found["lohan"]
    others = [s for s in found if s != "lohan"]
    text = "; ".join(spread(label(s), found[s]) for s in found)
    checks = [
        v.check("order", all(own[k] > found[s][k] for s in others for k in range(3)), text),
        v.check("same-batch", all(own[2] > found[s][2] for s in others), "the last of each"),
        v.check("steady", max(own) / min(own) < 1.05, spread("TFLOPS", own)),
        v.check(
            "drop",
            all(found[s][0] < 0.95 * found[s][2] for s in ("lohan+ds", "lohan+cap"))
            and found["lohan+g10"][0] > 0.95 * found["lohan+g10"][2],
            text,
        ),
    ]
    misfits = [
        f"{label(s)}, {m}"
        for s, batches in BATCHES_9A.items()
        for m, b in batches.items()
        if not results.step("gpt-70b", b, SERVER, s, m).fits
    ]
    failed = results[FAILED_9A]
    checks += [
        v.check("fits", not misfits, "; ".join(misfits) or "all do"),
        v.check(
            "failed",
            not failed.fits,
            failed.reason or f"it fits at batch {FAILED_9A.batch}: {failed.tflops:.1f} TFLOPS",
        ),
    ]
    lines = [Line(label=label(s), x=MEMORY_9A, y=ys) for s, ys in found.items()]
    return Figure(
        key=v.figure,
        title="LoHan Fig. 9a: activation strategies, 70B",
        setup="RTX 4090, 12 SSDs, model states on SSD and LoHan's optimizer for all; the batches "
        "of Table V.",
        rows=[],
        checks=checks,
        panels=[Panel(title="70B", x="main memory", y="TFLOPS", lines=lines, kind="bar")],
        notes=[
            "LoHan+CM is solved for one block and repeated; what finds no room in main memory is "
            "recomputed. Why the paper's fails with 128 GB is not stated. Its solver stops after a "
            "minute with the best it has, so its numbers depend on the machine: alone on two cores "
            "it found 117.7 and 138.0 TFLOPS with 256 and 512 GB.",
        ],
    )


# -- Fig. 9b ----------------------------------------------------------------------------------

BATCHES_9B = (24, 36, 48, 60)


def jobs_9b() -> list[Job]:
    return [SwapSweep("gpt-13b", b, SERVER) for b in BATCHES_9B]


def turns(curve: Curve, slack: float = 0.01) -> bool:
    """Whether it falls and then grows, both by more than `slack`."""
    ys = [s for _, s in curve.points]
    low = min(ys)
    return ys[0] > low * (1 + slack) and ys[-1] > low * (1 + slack)


def curve_line(name: str, curve: Curve, scale: float = 1e9) -> Line:
    return Line(
        label=name,
        x=[b / scale for b, _ in curve.points],
        y=[s for _, s in curve.points],
        stars=[curve.predicted],
    )


def build_9b(results: Results, v: FigureValues) -> Figure:
    curves: dict[int, Curve] = {b: results[SwapSweep("gpt-13b", b, SERVER)] for b in BATCHES_9B}
    first = curves[24]
    ys = [s for _, s in first.points]
    errors = [c.predicted_s / c.least_s - 1 for c in curves.values()]
    checks = [
        v.check(
            "case-1",
            first.least_s > 0.99 * ys[0] and ys[-1] > ys[0],
            f"{ys[0]:.1f} s to {ys[-1]:.1f} s, least {first.least_s:.1f} s",
        ),
        v.check("case-3", all(turns(curves[b]) for b in BATCHES_9B[1:]), "all three"),
        v.check("star", max(errors) < 0.01, spread("% off", [100 * e for e in errors], 2)),
    ]
    return Figure(
        key=v.figure,
        title="LoHan Fig. 9b: step time over swapped activations, 13B",
        setup="RTX 4090, 12 SSDs. Ten amounts in Algorithm 1's order, nothing kept on the GPU; the "
        "star is what Algorithm 1 chooses by its closed form, the lines are simulated.",
        rows=[],
        checks=checks,
        panels=[
            Panel(
                title="13B",
                x="swapped, GB",
                y="seconds",
                lines=[curve_line(f"batch {b}", c) for b, c in curves.items()],
            )
        ],
    )


# -- Fig. 10a ---------------------------------------------------------------------------------

BATCH_10A = 16


def jobs_10a() -> list[Job]:
    return [
        Step("gpt-135b", BATCH_10A, server(n), s)
        for n in ALL_SSDS
        for s in ("lohan", "zero-infinity")
    ]


def build_10a(results: Results, v: FigureValues) -> Figure:
    own, other = (
        [tflops(results, "gpt-135b", BATCH_10A, server(n), s) for n in ALL_SSDS]
        for s in ("lohan", "zero-infinity")
    )
    slow = other[-1] / other[0] if other[0] else 0.0
    checks = [
        v.check("linear", own[2] / own[0] >= 2.4, f"{own[2] / own[0]:.2f} times"),
        v.check(
            "flat",
            own[4] / own[3] < own[3] / own[2],
            f"{own[4] / own[3]:.2f} times after {own[3] / own[2]:.2f} times",
        ),
        v.check(
            "slow", 0 < slow < own[-1] / own[0], f"{slow:.1f} against {own[-1] / own[0]:.1f} times"
        ),
        v.check(
            "order",
            all(a > b for a, b in zip(own, other, strict=True)),
            spread("LoHan", own) + "; " + spread("ZeRO-Infinity", other),
        ),
    ]
    lines = [
        Line(label="LoHan", x=ALL_SSDS, y=own),
        Line(label="ZeRO-Infinity", x=ALL_SSDS, y=other),
    ]
    return Figure(
        key=v.figure,
        title="LoHan Fig. 10a: number of SSDs, 135B",
        setup=f"RTX 4090, batch {BATCH_10A} for both (the paper's is not stated). The caption says "
        "13B, the text 135B.",
        rows=[],
        checks=checks,
        panels=[Panel(title="135B", x="SSDs", y="TFLOPS", lines=lines)],
    )


# -- Fig. 10b ---------------------------------------------------------------------------------

BATCHES_10B = (32, 48, 64)
GATES_10B = {f"b64-{n}": Step("gpt-13b", 64, server(n), "lohan") for n in ALL_SSDS}


def jobs_10b() -> list[Job]:
    return [Step("gpt-13b", b, server(n), "lohan") for b in BATCHES_10B for n in ALL_SSDS]


def build_10b(results: Results, v: FigureValues) -> Figure:
    found = {
        b: [tflops(results, "gpt-13b", b, server(n), "lohan") for n in ALL_SSDS]
        for b in BATCHES_10B
    }
    rows = [v.row(f"b64-{n}", y) for n, y in zip(ALL_SSDS, found[64], strict=True)]
    rows += [v.row("b32-12", found[32][4]), v.row("b48-6", found[48][3])]
    need = [
        next((n for n, y in zip(ALL_SSDS, found[b], strict=True) if y >= 135), 13)
        for b in BATCHES_10B
    ]
    checks = [
        v.check(
            "fewer",
            need == sorted(need, reverse=True) and need[0] > need[-1],
            spread("SSDs at batch 32, 48, 64:", need, 0),
        ),
        v.check(
            "enough",
            found[64][3] > 0.95 * found[64][4],
            f"{found[64][3]:.1f} and {found[64][4]:.1f} TFLOPS",
        ),
    ]
    lines = [Line(label=f"batch {b}", x=ALL_SSDS, y=ys) for b, ys in found.items()]
    stated = [v[f"b64-{n}"].value for n in ALL_SSDS]
    lines.append(Line(label="batch 64 (stated)", x=ALL_SSDS, y=stated, stated=True))
    return Figure(
        key=v.figure,
        title="LoHan Fig. 10b: number of SSDs, 13B",
        setup="RTX 4090.",
        rows=rows,
        checks=checks,
        panels=[Panel(title="13B", x="SSDs", y="TFLOPS", lines=lines)],
        notes=[
            "One SSD is too slow and three are too fast by about as much: no rate of a single SSD "
            "that all counts share fits both.",
        ],
    )


# -- Fig. 13 ----------------------------------------------------------------------------------

PRICES = {"dgx": 200_000, "server": 14_098, "rtx4090": 1_600, "a100": 14_177, "ssd": 308}
"""Dollars: LoHan Table VII, Fuyou Table 5."""

A100_PEAK = HardwareProfile.preset("a100-80gb-12xp5510").block_flops_per_s / 1e12
BATCH_13 = 32


def jobs_13() -> list[Job]:
    return [Step("gpt-30b", BATCH_13, server(n), "lohan", "192GiB") for n in ALL_SSDS]


def build_13(results: Results, v: FigureValues) -> Figure:
    dgx = 8 * A100_PEAK / PRICES["dgx"]
    ours = [
        4
        * tflops(results, "gpt-30b", BATCH_13, server(n), "lohan", "192GiB")
        / (PRICES["server"] + 4 * PRICES["rtx4090"] + n * PRICES["ssd"])
        / dgx
        for n in ALL_SSDS
    ]
    top = best(dict(zip(ALL_SSDS, ours, strict=True)))
    rows: list[Row] = [v.row("optimum", top), v.row("over-megatron", max(ours))]
    checks = [
        v.check("drop", ours[4] < ours[3], spread("×", ours, 2)),
        v.check("wins", max(ours) > 1, f"{max(ours):.2f} times"),
    ]
    return Figure(
        key=v.figure,
        title="LoHan Fig. 13: throughput per dollar, 30B, four RTX 4090",
        setup=f"Four GPUs, batch {BATCH_13} each. Simulated is one of them, with all of the SSDs "
        "(model states cross them once for all GPUs) and a quarter of the main memory. Megatron-LM "
        f"is taken at eight times the A100's measured block peak, {A100_PEAK:.0f} TFLOPS.",
        rows=rows,
        checks=checks,
        panels=[
            Panel(
                title="over Megatron-LM on the DGX-A100",
                x="SSDs",
                y="throughput per dollar",
                lines=[Line(label="LoHan, 4 × RTX 4090", x=ALL_SSDS, y=ours)],
            )
        ],
        notes=[
            "The paper states neither Megatron-LM's throughput nor its own, the batch, or how the "
            "GPUs share PCIe. Not modelled: the sum of gradients over GPUs, contention of four "
            "GPUs for the host's memory and PCIe. So the ratio is an upper bound of the system's; "
            "only the shape is compared.",
        ],
    )


FIGURES: Sequence[Spec] = (
    Spec(key="lohan-5a", title="Fig. 5a", jobs=jobs_5a, build=build_5a, gates=GATES_5A),
    Spec(key="lohan-5c", title="Fig. 5c", jobs=jobs_5c, build=build_5c, gates=GATES_5C),
    Spec(key="lohan-6", title="Fig. 6", jobs=jobs_6, build=build_6),
    Spec(key="lohan-7", title="Fig. 7", jobs=jobs_7, build=build_7),
    Spec(key="lohan-8", title="Fig. 8", jobs=jobs_8, build=build_8),
    Spec(key="lohan-9a", title="Fig. 9a", jobs=jobs_9a, build=build_9a),
    Spec(key="lohan-9b", title="Fig. 9b", jobs=jobs_9b, build=build_9b),
    Spec(key="lohan-10a", title="Fig. 10a", jobs=jobs_10a, build=build_10a),
    Spec(key="lohan-10b", title="Fig. 10b", jobs=jobs_10b, build=build_10b, gates=GATES_10B),
    Spec(key="lohan-13", title="Fig. 13", jobs=jobs_13, build=build_13),
)
