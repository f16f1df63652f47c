"""SSDTrain, Table III and Fig. 5; MemFerry, Fig. 9, 12, 13."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from benchmarks.papers.figure import Figure, FigureValues, Line, Panel, Spec, spread
from benchmarks.papers.jobs import Activations, DeviceMemory, Job, Memory, Results, Step, StepSize
from lohan_fx.hardware import HardwareProfile
from lohan_fx.planners.ssdtrain import ENDURANCE_GAIN, SSD_RATED_BYTES, YEAR_S, lifespan_s

SSDTRAIN = "ssdtrain-a100-4xp5800x"
MEMFERRY = "memferry-a100"

# -- SSDTrain, Table III ----------------------------------------------------------------------

BERTS = ("bert-8192x4", "bert-12288x3", "bert-16384x2")
BERT_NAMES = ("H8192 L4", "H12288 L3", "H16384 L2")


def jobs_table() -> list[Job]:
    return [Step(m, 16, SSDTRAIN, s) for m in BERTS for s in ("ssdtrain", "keep-all")]


def build_table(results: Results, v: FigureValues) -> Figure:
    steps = [results.step(m, 16, SSDTRAIN, "ssdtrain") for m in BERTS]
    kept = [results.step(m, 16, SSDTRAIN, "keep-all") for m in BERTS]
    offloaded = [s.ssd_write_bytes / 1e9 for s in steps]
    bandwidth = [gb / (s.step_s / 2) for gb, s in zip(offloaded, steps, strict=True)]
    rows = [v.row(f"offloaded-{m}", gb) for m, gb in zip(BERTS, offloaded, strict=True)]
    rows += [v.row(f"estimate-{m}", gb) for m, gb in zip(BERTS, offloaded, strict=True)]
    rows += [v.row(f"bandwidth-{m}", rate) for m, rate in zip(BERTS, bandwidth, strict=True)]
    overhead = [s.step_s / k.step_s - 1 for s, k in zip(steps, kept, strict=True)]
    checks = [
        v.check("order", bandwidth == sorted(bandwidth, reverse=True), spread("GB/s", bandwidth)),
        v.check("overhead", max(overhead) < 0.02, spread("%", [100 * o for o in overhead])),
    ]
    panels = [
        Panel(
            title="offloaded",
            x="",
            y="GB",
            kind="bar",
            lines=[
                Line(label="ours", x=BERT_NAMES, y=offloaded),
                Line(
                    label="stated",
                    x=BERT_NAMES,
                    y=[v[f"offloaded-{m}"].value for m in BERTS],
                    stated=True,
                ),
            ],
        ),
        Panel(
            title="required write bandwidth",
            x="",
            y="GB/s",
            kind="bar",
            lines=[
                Line(label="ours", x=BERT_NAMES, y=bandwidth),
                Line(
                    label="stated",
                    x=BERT_NAMES,
                    y=[v[f"bandwidth-{m}"].value for m in BERTS],
                    stated=True,
                ),
            ],
        ),
    ]
    return Figure(
        key=v.figure,
        title="SSDTrain Table III: offloaded bytes and write bandwidth",
        setup="One of two A100 under tensor parallelism: BERT with half of the heads, inner widths "
        "and vocabulary; batch 16, half precision, SGD, masked-word loss. Bandwidth is offloaded "
        "bytes over half of the step.",
        rows=rows,
        checks=checks,
        panels=panels,
        notes=[
            "Not simulated: the sums over the two GPUs. H16384 L2 is 8% faster than the paper's "
            "step (2 × 10.75 / 8.76 = 2.45 s), the other two within 4%; its bandwidth is higher by "
            "the same, and by 5% more bytes.",
            "Dropout masks are left out: with them each layer saves 11 instead of 10 units of "
            "batch × sequence × hidden × 2 bytes, and Table III's own estimate is "
            "10.0 per layer and 1.3 beside (a fit to its three values).",
            "H8192 L4 waits: here a tensor's memory is given back within forward, so all writes "
            "end there, in a third of the step. 10.75 GB need 29 GB/s for that, and the link has "
            "24. SSDTrain's writes have half of the step.",
        ],
    )


# -- SSDTrain, Fig. 5 -------------------------------------------------------------------------

LARGE = ("gpt-175b", "gpt-276b", "gpt-412b")
SHARDS = 8
SSDS_PER_GPU = 4


def jobs_5() -> list[Job]:
    return [Activations(m, 1) for m in LARGE]


def build_5(results: Results, v: FigureValues) -> Figure:
    rate = HardwareProfile.preset(SSDTRAIN).block_flops_per_s
    endurance = SSD_RATED_BYTES * ENDURANCE_GAIN * SSDS_PER_GPU
    years, bandwidth = [], []
    for m in LARGE:
        size: StepSize = results[Activations(m, 1)]
        step_s = size.model_flops / rate / SHARDS
        written = size.activations / SHARDS
        bandwidth.append(written / (step_s / 2) / 1e9)
        years.append(lifespan_s(endurance, step_s, written) / YEAR_S)
    checks = [
        v.check("lifespan", min(years) > 2, spread("years", years)),
        v.check("bandwidth", max(bandwidth) <= 12.1, spread("GB/s", bandwidth)),
        v.check(
            "trend",
            bandwidth == sorted(bandwidth, reverse=True) and years == sorted(years),
            "both, over 175B, 276B, 412B",
        ),
    ]
    names = [m.removeprefix("gpt-").upper() for m in LARGE]
    return Figure(
        key=v.figure,
        title="SSDTrain Fig. 5: SSD lifespan and write bandwidth at scale",
        setup="GPTs of LoHan's Table IV over groups of eight A100: tensor and sequence "
        "parallelism share FLOPs and activations evenly; "
        f"{rate / 1e12:.0f} TFLOPS a GPU, four Samsung 980 PRO 1 TB a GPU (§III-D). Per token "
        "neither depends on the batch.",
        rows=[],
        checks=checks,
        panels=[
            Panel(
                title="lifespan",
                x="",
                y="years",
                kind="bar",
                lines=[Line(label="ours", x=names, y=years)],
            ),
            Panel(
                title="write bandwidth a GPU",
                x="",
                y="GB/s",
                kind="bar",
                lines=[Line(label="ours", x=names, y=bandwidth)],
            ),
        ],
        notes=[
            "The paper's models, GPU counts and step times are Megatron-LM's, which its text does "
            'not repeat; so are the micro-batches (8 to 32) behind "0.4 TB to 1.8 TB" of '
            "activations a GPU, which is not compared.",
        ],
    )


# -- MemFerry, Fig. 9 -------------------------------------------------------------------------

SMALL = ("bert-base", "roberta")
LARGER = ("bert-large", "gpt2-medium")
BATCH = {"bert-base": 8, "roberta": 8, "bert-large": 16, "gpt2-medium": 8}
FERRIES = ("native-offload", "memferry", "go-memferry")
LABELS = {"native-offload": "ZeRO-Offload", "memferry": "MemFerry", "go-memferry": "GO-MemFerry"}
XL = ("xl-1b", "xl-2.7b", "xl-4.3b", "xl-6.7b")


def jobs_9() -> list[Job]:
    return [Step(m, BATCH[m], MEMFERRY, s) for m in (*SMALL, *LARGER) for s in FERRIES]


def build_9(results: Results, v: FigureValues) -> Figure:
    models = (*SMALL, *LARGER)
    found = {s: {m: results.step(m, BATCH[m], MEMFERRY, s).step_s for m in models} for s in FERRIES}
    gain = {m: found["native-offload"][m] / found["memferry"][m] for m in models}
    over_go = [found["go-memferry"][m] / found["memferry"][m] for m in models]
    small, larger = [gain[m] for m in SMALL], [gain[m] for m in LARGER]
    checks = [
        v.check(
            "order",
            min(*gain.values(), *over_go) > 1,
            spread("over ZeRO-Offload", list(gain.values()), 2)
            + "; "
            + spread("over GO-MemFerry", over_go, 2),
        ),
        v.check("small", all(1.217 <= g <= 1.687 for g in small), spread("×", small, 2)),
        v.check("large", all(1.071 <= g <= 1.321 for g in larger), spread("×", larger, 2)),
    ]
    lines = [
        Line(label=LABELS[s], x=models, y=[1e3 * found[s][m] for m in models]) for s in FERRIES
    ]
    return Figure(
        key=v.figure,
        title="MemFerry Fig. 9: step time",
        setup="One A100 80 GB, PCIe 3.0. BERT-base, RoBERTa: classification, 512 tokens, batch 8; "
        "BERT-large: batch 16; GPT-2 medium: 1024 tokens, batch 8. None of it is stated, but that "
        'the larger two "usually require large input" (§V-B).',
        rows=[v.row("mean", fmean(gain.values())), v.row("most", max(gain.values()))],
        checks=checks,
        panels=[Panel(title="A100", x="", y="milliseconds", lines=lines, kind="bar")],
        notes=[
            "Two baselines of the paper, DeepSpeed and its own Native-Offload, are one here: what "
            "tells them apart is that DeepSpeed makes and destroys gradient buffers.",
            "GO-MemFerry is the paper's default, all gradients written directly.",
            "The preset's rates of GPU and CPU are fitted to the mean and to 1.26 at 6.7B (Fig. "
            "13); the paper states none.",
        ],
    )


# -- MemFerry, Fig. 12 ------------------------------------------------------------------------


def reduction(memory: DeviceMemory, system: str) -> float:
    """Per cent under the baseline."""
    return 100 * (1 - memory.of(system) / memory.of("native-offload"))


def jobs_12() -> list[Job]:
    return [Memory(m, BATCH[m], MEMFERRY) for m in (*SMALL, *LARGER)]


def build_12(results: Results, v: FigureValues) -> Figure:
    models = (*SMALL, *LARGER)
    found: dict[str, DeviceMemory] = {m: results[Memory(m, BATCH[m], MEMFERRY)] for m in models}
    less = {s: [reduction(found[m], s) for m in models] for s in FERRIES[1:]}
    under = [100 * (1 - m.of("go-memferry") / m.of("memferry")) for m in found.values()]
    ordered = all(
        m.of("go-memferry") <= m.of("memferry") <= m.of("native-offload") for m in found.values()
    )
    lines = [
        Line(label=LABELS[s], x=models, y=[found[m].of(s) / 2**30 for m in models]) for s in FERRIES
    ]
    return Figure(
        key=v.figure,
        title="MemFerry Fig. 12: peak device memory",
        setup="As Fig. 9. Activations at their peak by exact residency, and what §II-B and §IV-D "
        "say is on the GPU besides: all parameters and gradients for ZeRO-Offload, without what "
        "is read in host memory for MemFerry, without gradients for GO-MemFerry.",
        rows=[
            v.row("memferry", fmean(less["memferry"])),
            v.row("go-memferry", fmean(less["go-memferry"])),
            v.row("gpt2", less["memferry"][-1]),
            v.row("small", fmean(less["memferry"][: len(SMALL)])),
            v.row("gradients", fmean(under)),
        ],
        checks=[
            v.check(
                "order",
                ordered,
                "; ".join(spread(f"{LABELS[s]} %", less[s]) for s in FERRIES[1:]),
            )
        ],
        panels=[Panel(title="A100", x="", y="GiB", lines=lines, kind="bar")],
        notes=[
            "The amounts miss: the embeddings, all that is read in host memory, are 21% of "
            "BERT-base's parameters, and activations outweigh parameters at these batches. No "
            "share of parameters explains the paper's 40% for MemFerry on the small models; "
            "DeepSpeed's own buffers (two buckets of 5·10⁸ elements by default) would.",
        ],
    )


# -- MemFerry, Fig. 13 ------------------------------------------------------------------------


def jobs_13() -> list[Job]:
    steps = [Step(m, 8, MEMFERRY, s) for m in XL for s in FERRIES]
    return [*steps, *(Memory(m, 8, MEMFERRY) for m in XL)]


def build_13(results: Results, v: FigureValues) -> Figure:
    time = {s: [results.step(m, 8, MEMFERRY, s).step_s for m in XL] for s in FERRIES}
    memory: list[DeviceMemory] = [results[Memory(m, 8, MEMFERRY)] for m in XL]
    gain = [a / b for a, b in zip(time["native-offload"], time["memferry"], strict=True)]
    less = [reduction(m, "go-memferry") for m in memory]
    over_go = [a / b for a, b in zip(time["go-memferry"], time["memferry"], strict=True)]
    fastest = min(*gain, *over_go) > 1
    leanest = all(m.of("go-memferry") <= m.of("memferry") for m in memory)
    sizes = [m.removeprefix("xl-").upper() for m in XL]
    return Figure(
        key=v.figure,
        title="MemFerry Fig. 13: larger models",
        setup="One A100, batch 8, classification; 1B to 6.7B of parameters with hidden 2048 to "
        "4096, embeddings of 65536 to 98304 rows and 384 to 1024 tokens, within the stated ranges. "
        "Standard attention in place of TransformerXL's.",
        rows=[
            v.row("mean", fmean(gain)),
            v.row("xl-1b", gain[0]),
            v.row("xl-6.7b", gain[-1]),
            v.row("memory", fmean(less)),
        ],
        checks=[
            v.check(
                "order",
                fastest and leanest,
                spread("over ZeRO-Offload", gain, 2)
                + "; "
                + spread("over GO-MemFerry", over_go, 2)
                + "; "
                + spread("% less", less),
            ),
            v.check("savings", all(18 <= x <= 22 for x in less), spread("%", less)),
            v.check("trend", gain[-1] < gain[0], f"{gain[0]:.3f} and {gain[-1]:.3f} times"),
        ],
        panels=[
            Panel(
                title="speed",
                x="parameters",
                y="steps a second",
                lines=[Line(label=LABELS[s], x=sizes, y=[1 / t for t in time[s]]) for s in FERRIES],
                kind="bar",
            ),
            Panel(
                title="peak device memory",
                x="parameters",
                y="GiB",
                lines=[
                    Line(label=LABELS[s], x=sizes, y=[m.of(s) / 2**30 for m in memory])
                    for s in FERRIES
                ],
                kind="bar",
            ),
        ],
        notes=[
            "Which model has which sequence, hidden size and embedding is not stated. Here "
            "sequences grow with the model: with one length for all, compute, copies and the "
            "optimizer would grow alike, and the speedup would not fall. It also makes gradients a "
            "larger part of the memory of the smaller models, so the savings fall instead of "
            "staying.",
        ],
    )


FIGURES: Sequence[Spec] = (
    Spec(key="ssdtrain-3", title="Table III", jobs=jobs_table, build=build_table),
    Spec(key="ssdtrain-5", title="Fig. 5", jobs=jobs_5, build=build_5),
    Spec(key="memferry-9", title="Fig. 9", jobs=jobs_9, build=build_9),
    Spec(key="memferry-12", title="Fig. 12", jobs=jobs_12, build=build_12),
    Spec(key="memferry-13", title="Fig. 13", jobs=jobs_13, build=build_13),
)
