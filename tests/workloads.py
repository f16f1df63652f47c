"""Workloads for tests: a small GPT, and random ones."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from lohan_fx.hardware import HardwareProfile, MemoryBudget, SsdDevice
from lohan_fx.workload import Op, Phase, Unit, Value, ValueKind, Workload

GPU_FLOPS_PER_S = 1e14
GPU_BYTES_PER_S = 1e12


def small_hardware(*, ssd: bool = True, **changes: Any) -> HardwareProfile:
    """Round rates, 1 GiB of everything; changes replace fields."""
    ssds = (
        SsdDevice(path="/ssd", read_bytes_per_s=6e9, write_bytes_per_s=4e9, capacity_bytes=2**30),
    )
    fields: dict[str, Any] = {
        "name": "small",
        "device_kind": "cuda",
        "device_name": "test",
        "matmul_flops_per_s": {"bfloat16": GPU_FLOPS_PER_S},
        "block_flops_per_s": GPU_FLOPS_PER_S,
        "block_flops_dtype": "bfloat16",
        "device_bytes_per_s": GPU_BYTES_PER_S,
        "h2d_bytes_per_s": 2e10,
        "d2h_bytes_per_s": 2e10,
        "duplex_bytes_per_s": 3.5e10,
        "cpu_optimizer_params_per_s": 2e9,
        "device_bytes": 2**30,
        "host_bytes": 2**30,
        "ssds": ssds if ssd else (),
        "ssd_read_bytes_per_s": 6e9 if ssd else 0.0,
        "ssd_write_bytes_per_s": 4e9 if ssd else 0.0,
    }
    return HardwareProfile(**{**fields, **changes})


def budget(device: int = 2**30, host: int = 2**30, ssd: int = 2**30) -> MemoryBudget:
    return MemoryBudget(device_bytes=device, host_bytes=host, ssd_bytes=ssd)


class Builder:
    """Writes ops, values and units one after another."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ops: list[Op] = []
        self.values: dict[str, Value] = {}
        self.units: list[Unit] = []

    def value(self, name: str, num_bytes: int, kind: ValueKind = "activation", **extra: Any) -> str:
        self.values[name] = Value(name=name, num_bytes=num_bytes, kind=kind, **extra)
        return name

    def op(
        self,
        name: str,
        reads: Sequence[str],
        writes: Sequence[tuple[str, int]],
        *,
        block: str,
        phase: Phase = "forward",
        flops: int = 0,
        recomputable: bool = True,
        output: bool = False,
        kind: ValueKind = "activation",
    ) -> str:
        for v, size in writes:
            self.value(v, size, kind, block=block, is_output=output)
        inside = sum(self.values[v].num_bytes for v in reads)
        outside = sum(size for _, size in writes)
        self.ops.append(
            Op(
                name=name,
                target=name.rpartition(".")[2],
                block=block,
                phase=phase,
                reads=tuple(reads),
                writes=tuple(v for v, _ in writes),
                flops=flops,
                bytes_read=inside,
                bytes_written=outside,
                seconds=max(flops / GPU_FLOPS_PER_S, (inside + outside) / GPU_BYTES_PER_S),
                recomputable=recomputable,
            )
        )
        return writes[0][0]

    def unit(
        self,
        name: str,
        block: str,
        parameters: dict[str, int],
        *,
        frozen: bool = False,
        master: bool = False,
    ) -> None:
        """bf16 compute copy, fp32 AdamW: 2, 12 and 2 bytes a parameter. `master`: the model shows
        the fp32 master, so that nobody needs the copy but the graph."""
        n = sum(parameters.values())
        for p, count in parameters.items():
            self.value(p, 2 * count, "parameter", block=block, unit=name)
        self.units.append(
            Unit(
                name=name,
                block=block,
                parameters=tuple(parameters),
                num_params=n,
                compute_bytes=2 * n,
                state_bytes=0 if frozen else 12 * n,
                gradient_bytes=0 if frozen else 2 * n,
                gradients=() if frozen else tuple(f"grad.{p}" for p in parameters),
                update_scratch_bytes=0 if frozen else 4 * n,
                master_bytes=4 * n if master and not frozen else 0,
            )
        )

    def build(self) -> Workload:
        return Workload(
            name=self.name, ops=tuple(self.ops), values=self.values, units=tuple(self.units)
        )


def gpt_workload(
    layers: int = 3,
    hidden: int = 64,
    batch: int = 2,
    seq: int = 32,
    vocab: int = 128,
    heads: int = 4,
    *,
    tied: bool = False,
    dropout: bool = False,
    masters: bool = False,
) -> Workload:
    """A GPT: embedding, blocks, head and loss; bf16, one unit a block, fp32 AdamW. `masters`: all
    units may keep no compute copy."""
    b = Builder(f"gpt-{layers}x{hidden}")
    t = batch * seq
    act = 2 * t * hidden
    b.value("ids", 8 * t, "input")
    b.unit("embed", "embed", {"wte": vocab * hidden}, master=masters)
    for k in range(layers):
        h2 = hidden * hidden
        parameters = {"ln1": hidden, "qkv": 3 * h2, "proj": h2, "ln2": hidden, "up": 4 * h2}
        parameters["down"] = 4 * h2
        parameters = {f"h{k}.{p}": n for p, n in parameters.items()}
        b.unit(f"h{k}", f"h{k}", parameters, master=masters)
    if not tied:
        b.unit("head", "head", {"lm_head": vocab * hidden}, master=masters)
    head = "wte" if tied else "lm_head"
    x = b.op("embed", ["ids", "wte"], [("x0", act)], block="embed")
    saved = []
    for k in range(layers):
        x, names = _gpt_block(b, k, x, t, hidden, heads, batch, seq, dropout)
        saved.append(names)
    logits = b.op(
        "head", [x, head], [("logits", 2 * t * vocab)], block="head", flops=2 * t * vocab * hidden
    )
    b.op("loss", [logits, "ids"], [("loss", 4)], block="head", output=True)
    grad = {"block": "head", "phase": "backward"}
    flops = 2 * t * vocab * hidden
    b.op("loss.b", [logits, "ids"], [("d.logits", 2 * t * vocab)], **grad)  # type: ignore[arg-type]
    b.op("head.bx", ["d.logits", head], [("d.x", act)], flops=flops, **grad)  # type: ignore[arg-type]
    tail = "grad.head" if tied else "grad.lm_head"
    size = 2 * vocab * hidden
    b.op("head.bw", ["d.logits", x], [(tail, size)], flops=flops, **grad)  # type: ignore[arg-type]
    d = "d.x"
    for k in reversed(range(layers)):
        d = _gpt_block_backward(b, k, saved[k], d, t, hidden)
    if tied:
        b.op("embed.b", [d, "ids"], [("grad.embed", size)], block="embed", phase="backward")
        reads = ["grad.embed", "grad.head"]
        b.op("tie.b", reads, [("grad.wte", size)], block="embed", phase="backward")
    else:
        b.op("embed.b", [d, "ids"], [("grad.wte", size)], block="embed", phase="backward")
    return b.build()


def _gpt_block(
    b: Builder, k: int, x: str, t: int, h: int, heads: int, batch: int, seq: int, dropout: bool
) -> tuple[str, dict[str, str]]:
    p = f"h{k}."
    act = 2 * t * h
    n = {"x": x}
    stats = [(p + "mean1", 4 * t), (p + "rstd1", 4 * t)]
    n["ln1"] = b.op(p + "ln1", [x, p + "ln1"], [(p + "y1", act), *stats], block=f"h{k}")
    n["qkv"] = b.op(
        p + "qkv",
        [n["ln1"], p + "qkv"],
        [(p + "a_qkv", 3 * act)],
        block=f"h{k}",
        flops=6 * t * h * h,
    )
    lse = (p + "lse", 4 * batch * heads * seq)
    n["att"] = b.op(
        p + "attention", [n["qkv"]], [(p + "a_att", act), lse], block=f"h{k}", flops=4 * t * seq * h
    )
    n["lse"], n["m1"], n["r1"] = p + "lse", p + "mean1", p + "rstd1"
    out = b.op(
        p + "proj",
        [n["att"], p + "proj"],
        [(p + "a_proj", act)],
        block=f"h{k}",
        flops=2 * t * h * h,
    )
    if dropout:
        writes = [(p + "a_drop", act), (p + "mask", t * h)]
        out = b.op(p + "dropout", [out], writes, block=f"h{k}", recomputable=False)
        n["mask"] = p + "mask"
    n["mid"] = b.op(p + "add1", [x, out], [(p + "a_mid", act)], block=f"h{k}")
    stats = [(p + "mean2", 4 * t), (p + "rstd2", 4 * t)]
    n["ln2"] = b.op(p + "ln2", [n["mid"], p + "ln2"], [(p + "y2", act), *stats], block=f"h{k}")
    n["m2"], n["r2"] = p + "mean2", p + "rstd2"
    n["up"] = b.op(
        p + "up", [n["ln2"], p + "up"], [(p + "a_up", 4 * act)], block=f"h{k}", flops=8 * t * h * h
    )
    n["gelu"] = b.op(p + "gelu", [n["up"]], [(p + "a_gelu", 4 * act)], block=f"h{k}")
    down = b.op(
        p + "down",
        [n["gelu"], p + "down"],
        [(p + "a_down", act)],
        block=f"h{k}",
        flops=8 * t * h * h,
    )
    out = b.op(p + "add2", [n["mid"], down], [(f"x{k + 1}", act)], block=f"h{k}")
    return out, n


def _gpt_block_backward(b: Builder, k: int, n: dict[str, str], d: str, t: int, h: int) -> str:
    p, act, hh = f"h{k}.", 2 * t * h, t * h * h

    def op(name: str, reads: list[str], writes: list[tuple[str, int]], flops: int = 0) -> str:
        return b.op(p + name, reads, writes, block=f"h{k}", phase="backward", flops=flops)

    def weight(name: str, size: int) -> tuple[str, int]:
        return (f"grad.{p}{name}", 2 * size)

    g = op("down.bx", [d, p + "down"], [(p + "d_gelu", 4 * act)], 8 * hh)
    op("down.bw", [d, n["gelu"]], [weight("down", 4 * h * h)], 8 * hh)
    g = op("gelu.b", [g, n["up"]], [(p + "d_up", 4 * act)])
    y = op("up.bx", [g, p + "up"], [(p + "d_y2", act)], 8 * hh)
    op("up.bw", [g, n["ln2"]], [weight("up", 4 * h * h)], 8 * hh)
    reads = [y, n["mid"], n["m2"], n["r2"], p + "ln2"]
    d2 = op("ln2.b", reads, [(p + "d_ln2", act), weight("ln2", h)])
    mid = op("add1.b", [d, d2], [(p + "d_mid", act)])
    g = op("dropout.b", [mid, n["mask"]], [(p + "d_drop", act)]) if "mask" in n else mid
    a = op("proj.bx", [g, p + "proj"], [(p + "d_att", act)], 2 * hh)
    op("proj.bw", [g, n["att"]], [weight("proj", h * h)], 2 * hh)
    a = op("attention.b", [a, n["qkv"], n["att"], n["lse"]], [(p + "d_qkv", 3 * act)], 10 * hh)
    y = op("qkv.bx", [a, p + "qkv"], [(p + "d_y1", act)], 6 * hh)
    op("qkv.bw", [a, n["ln1"]], [weight("qkv", 3 * h * h)], 6 * hh)
    reads = [y, n["x"], n["m1"], n["r1"], p + "ln1"]
    d1 = op("ln1.b", reads, [(p + "d_ln1", act), weight("ln1", h)])
    return op("add0.b", [mid, d1], [(f"d.x{k}", act)])


def mlp_workload() -> Workload:
    """Two blocks of one hidden layer, a random mask, a loss; small enough to check by hand."""
    b = Builder("mlp")
    b.value("x", 4096, "input")
    for k in range(2):
        b.unit(f"b{k}", f"b{k}", {f"w{k}": 1024})
    b.op("lin0", ["x", "w0"], [("h0", 8192)], block="b0", flops=4_000_000)
    b.op("drop0", ["h0"], [("a0", 8192), ("m0", 1024)], block="b0", recomputable=False)
    b.op("lin1", ["a0", "w1"], [("h1", 8192)], block="b1", flops=8_000_000)
    b.op("gelu1", ["h1"], [("g1", 8192)], block="b1")
    b.op("loss", ["g1"], [("loss", 4)], block="b1", output=True)
    back: dict[str, Any] = {"phase": "backward"}
    b.op("loss.b", ["g1"], [("d3", 8192)], block="b1", **back)
    b.op("gelu1.b", ["d3", "h1"], [("d2", 8192)], block="b1", **back)
    writes = [("d1", 8192), ("grad.w1", 2048)]
    b.op("lin1.b", ["d2", "a0", "w1"], writes, block="b1", flops=16_000_000, **back)
    b.op("drop0.b", ["d1", "m0"], [("d0", 8192)], block="b0", **back)
    b.op("lin0.b", ["d0", "x"], [("grad.w0", 2048)], block="b0", flops=4_000_000, **back)
    return b.build()


def random_workload(seed: int, num_blocks: int, ops_per_block: int) -> Workload:
    """Any legal shape: branches, random ops, several results, tied and frozen parameters, units
    that may keep no compute copy.

    Backward mirrors forward; every op's backward reads the incoming gradient and some of what
    its forward op read and made.
    """
    rng, masters = random.Random(seed), random.Random(f"masters of {seed}")
    b = Builder(f"random-{seed}")
    b.value("x", rng.randint(1, 4000), "input")
    b.value("rope", rng.randint(1, 4000), "buffer")
    blocks = [f"b{k}" for k in range(num_blocks)]
    owned = {block: [f"{block}.w{k}" for k in range(rng.randint(0, 2))] for block in blocks}
    owned["tied"] = ["tied.w"] if rng.random() < 0.5 else []
    counts = {p: rng.randint(1, 800) for ps in owned.values() for p in ps}
    for unit, parameters in owned.items():
        for p in parameters:
            b.value(p, 2 * counts[p], "parameter", block=unit, unit=unit)
    made = ["x"]
    for block in blocks:
        for k in range(rng.randint(1, ops_per_block)):
            made += _random_op(b, rng, f"{block}.{k}", block, made, owned)
    b.op("loss", [made[-1]], [("loss", 4)], block=blocks[-1], output=True)
    gradients = _random_backward(b, rng, {p for p in counts if rng.random() < 0.85})
    for unit, parameters in owned.items():
        if parameters:
            found = tuple(gradients[p] for p in parameters if p in gradients)
            n = sum(counts[p] for p in parameters)
            b.units.append(
                Unit(
                    name=unit,
                    block=unit,
                    parameters=tuple(parameters),
                    num_params=n,
                    compute_bytes=2 * n,
                    state_bytes=12 * n if found else 0,
                    gradient_bytes=2 * n if found else 0,
                    gradients=found,
                    update_scratch_bytes=rng.choice((0, 4 * n)) if found else 0,
                    master_bytes=masters.choice((0, 4 * n, 4 * n)) if found else 0,
                )
            )
    return b.build()


def _random_op(
    b: Builder,
    rng: random.Random,
    name: str,
    block: str,
    made: list[str],
    owned: dict[str, list[str]],
) -> list[str]:
    reads = {made[-1], rng.choice(made), rng.choice([*made, "rope"])}
    reads |= {p for p in (*owned[block], *owned["tied"]) if rng.random() < 0.6}
    writes = [
        (f"{name}.y{k}", rng.choice((0, 7, 900, 5000, 9000))) for k in range(rng.randint(1, 2))
    ]
    b.op(
        name,
        sorted(reads),
        writes,
        block=block,
        flops=rng.randint(0, 10**7),
        recomputable=rng.random() < 0.85,
        output=rng.random() < 0.07,
    )
    return [v for v, _ in writes]


def _random_backward(b: Builder, rng: random.Random, trainable: set[str]) -> dict[str, str]:
    """Mirror the forward ops; a parameter's last partial gradient is its gradient."""
    forward = list(b.ops)
    partial: dict[str, list[str]] = defaultdict(list)
    d = "loss"
    for op in reversed(forward):
        seen = (*op.reads, *op.writes)
        reads = [d, *(v for v in seen if rng.random() < 0.5 and v != d)]
        writes = [(f"d.{op.name}", rng.choice((7, 900, 5000)))]
        for p in op.reads:
            if p in trainable:
                reads += partial[p]
                partial[p].append(f"grad.{p}.{op.name}")
                writes.append((partial[p][-1], b.values[p].num_bytes))
        d = b.op(
            f"{op.name}.b",
            list(dict.fromkeys(reads)),
            writes,
            block=op.block,
            phase="backward",
            flops=2 * op.flops,
        )
    return {p: names[-1] for p, names in partial.items()}


@st.composite
def workloads(draw: st.DrawFn, max_blocks: int = 4, ops_per_block: int = 4) -> Workload:
    """Random small workloads (`random_workload`)."""
    seed = draw(st.integers(0, 2**32 - 1))
    return random_workload(seed, draw(st.integers(1, max_blocks)), ops_per_block)
