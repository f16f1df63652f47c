"""Train a byte-level GPT on the Python standard library's source, in a fraction of the memory.

    python examples/finetune.py                  # own GPT, CPU, SSD tier in a temporary directory
    python examples/finetune.py --hf llama       # the same for a transformers model

The same training loop runs twice, each time in a process of its own: with `lohan_fx.compile`
under a memory budget, and in plain PyTorch. Then losses, weights, speed and peak memory are
compared. Peak memory is the process's largest resident set (VmHWM) over the whole run, tracing
included, less its resident set right before the model is built, when all is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

import lohan_fx
from lohan_fx.api import LohanModule
from lohan_fx.compiled.model import CompiledModel
from lohan_fx.errors import LohanError
from lohan_fx.report import hardware_table, moved_text, plan_parts, short_bytes

SEED = 0
BUDGETS = {  # device, host and SSD: small enough to force swapping and recomputation
    None: ("160MiB", "240MiB", "900MiB"),
    "gpt2": ("240MiB", "300MiB", "1GiB"),
    "llama": ("200MiB", "300MiB", "1GiB"),
    "bert": ("240MiB", "300MiB", "1GiB"),
    "t5": ("320MiB", "340MiB", "1.2GiB"),
}

BUDGET_OPTIONS = ("device-memory", "host-memory", "ssd-space")


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Predicts the next byte; returns the loss."""

    def __init__(self, num_layers: int, width: int, length: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.bytes(input_ids) + self.places.weight[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def build(args: argparse.Namespace) -> nn.Module:
    """The model, with random weights. Models of transformers shift the labels themselves."""
    torch.manual_seed(SEED)
    layers, width, length = args.layers, args.width, args.length
    if not args.hf:
        return GPT(layers, width, length)
    import transformers as hf

    heads = width // 64
    if args.hf == "gpt2":
        return hf.GPT2LMHeadModel(
            hf.GPT2Config(
                vocab_size=256,
                n_positions=length,
                n_embd=width,
                n_layer=layers,
                n_head=heads,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
    common = {
        "vocab_size": 256,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    if args.hf == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(intermediate_size=3 * width, **common))
    if args.hf == "bert":
        return hf.BertForMaskedLM(
            hf.BertConfig(intermediate_size=4 * width, max_position_embeddings=length, **common)
        )
    config = hf.T5Config(
        vocab_size=256,
        d_model=width,
        d_kv=64,
        d_ff=4 * width,
        num_layers=layers // 2,
        num_heads=heads,
    )
    config.decoder_start_token_id = 0
    return hf.T5ForConditionalGeneration(config)


def batches(args: argparse.Namespace) -> Iterator[dict[str, Tensor]]:
    """Random places in the source text of the standard library; the same in every run."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray().join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    data = torch.frombuffer(text, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(args.steps):
        starts = torch.randint(len(data) - args.length, (args.batch,), generator=generator)
        rows = torch.stack([data[s : s + args.length + 1] for s in starts]).long()
        inputs, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        if args.hf in ("gpt2", "llama"):
            labels = inputs
        elif args.hf == "bert":
            hidden = torch.rand(inputs.shape, generator=generator) < 0.15
            labels = inputs.masked_fill(~hidden, -100)
            inputs = inputs.masked_fill(hidden, 0)
        yield {"input_ids": inputs, "labels": labels}


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Iterator[dict[str, Tensor]],
    on_step: Callable[[float, float, float], None],
) -> None:
    """An ordinary training loop: nothing in it knows whether the model is compiled."""
    for batch in data:
        start, cpu = time.perf_counter(), time.process_time()
        result = model(**batch)
        loss = result if isinstance(result, Tensor) else result.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        on_step(loss.item(), time.perf_counter() - start, time.process_time() - cpu)


class Memory:
    """The process's resident set: now, and its peak since the last `reset`."""

    def __init__(self) -> None:
        self.base_bytes = self._read("VmRSS")

    @staticmethod
    def _read(key: str) -> int:
        try:
            lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
            return next(int(x.split()[1]) * 1024 for x in lines if x.startswith(key))
        except OSError:  # not Linux: the peak of the whole process is the closest there is
            unit = 1 if sys.platform == "darwin" else 1024
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def reset(self) -> None:
        """Begin a new peak, so that what imports used does not count."""
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        self.base_bytes = self._read("VmRSS")

    @property
    def peak_bytes(self) -> int:
        return self._read("VmHWM") - self.base_bytes


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """One of the two runs, in this process."""
    import torch._dynamo  # both runs: its import is no part of either's memory

    # How many threads share a sum must not depend on the machine's load (MKL decides by it): the
    # two runs would round differently.
    torch.set_num_threads(1)
    memory = Memory()
    memory.reset()
    model = build(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4 if args.hf == "t5" else 3e-4)
    data = batches(args)
    compiled: CompiledModel | None = None
    if args.run == "lohan_fx":
        hw = lohan_fx.HardwareProfile.load(args.hw)
        model = lohan_fx.compile(
            model,
            hw=hw,
            optimizer=optimizer,
            strategy=args.strategy,
            memory={
                "device": args.device_memory,
                "host": args.host_memory,
                "ssd": args.ssd_space,
            },
        )
        assert isinstance(model, LohanModule)
        compiled = model.lohan
        with console.status("tracing and planning"):
            program = compiled.prepare(**next(batches(args)))
        for part in plan_parts(program.workload, program.plan, compiled.options.budget):
            console.print(part, highlight=False)

    losses: list[float] = []
    seconds: list[float] = []
    cpu_seconds: list[float] = []
    bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    task = bar.add_task(f"{args.run:>8}", total=args.steps)
    state = Text()

    def on_step(loss: float, step_s: float, cpu_s: float) -> None:
        losses.append(loss)
        seconds.append(step_s)
        cpu_seconds.append(cpu_s)
        bar.advance(task)
        lines = [
            f"loss {loss:.4f}, {args.batch * args.length / step_s:,.0f} tokens/s, "
            f"peak memory {short_bytes(memory.peak_bytes)}"
        ]
        if compiled is not None:
            lines.append(f"moved: {moved_text(compiled.counters)}")
        state.plain = "\n".join(f"{'':8} {line}" for line in lines)

    with Live(Group(bar, state), console=console):
        train(model, optimizer, data, on_step)
    if not console.is_terminal:
        console.print()  # rich ends a live display with a new line on terminals only

    peak_bytes = memory.peak_bytes
    weights = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        weights.update(name.encode())
        weights.update(tensor.contiguous().view(torch.uint8).numpy())
    if compiled is not None:
        compiled.close()
    return {
        "losses": [loss.hex() for loss in losses],
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak_bytes": peak_bytes,
        "weights": weights.hexdigest(),
        "num_params": sum(p.numel() for p in model.parameters()),
    }


def compare(
    args: argparse.Namespace, ours: dict[str, Any], plain: dict[str, Any]
) -> tuple[Table, bool]:
    """Both runs side by side, and whether their numbers are the same."""

    def median(samples: list[float]) -> float:
        return statistics.median(samples[1:] or samples)  # the first step warms up

    def speed(result: dict[str, Any]) -> str:
        return f"{args.batch * args.length / median(result['seconds']):,.0f} tokens/s"

    def cpu(result: dict[str, Any]) -> str:
        return f"{median(result['cpu_seconds']):.2f} s"

    def losses(result: dict[str, Any]) -> str:
        first, last = (float.fromhex(result["losses"][i]) for i in (0, -1))
        return f"{first:.6f} → {last:.6f}"

    share = ours["peak_bytes"] / plain["peak_bytes"]
    same_losses = ours["losses"] == plain["losses"]
    same_weights = ours["weights"] == plain["weights"]
    table = Table(
        title=f"{args.steps} steps, {plain['num_params'] / 1e6:.1f}M parameters, "
        f"{args.batch} × {args.length} tokens, float32",
        title_justify="left",
    )
    for column in ("", "plain PyTorch", "lohan_fx", ""):
        table.add_column(column)
    verdict = {True: "identical", False: "DIFFERENT"}
    table.add_row("loss", losses(plain), losses(ours), verdict[same_losses])
    table.add_row(
        "weights, sha256", plain["weights"][:12], ours["weights"][:12], verdict[same_weights]
    )
    table.add_row("speed", speed(plain), speed(ours), "")
    table.add_row("CPU time of a step", cpu(plain), cpu(ours), "")
    table.add_row(
        "peak memory",
        short_bytes(plain["peak_bytes"]),
        short_bytes(ours["peak_bytes"]),
        f"{share:.0%}",
    )
    return table, same_losses and same_weights


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--hf", choices=("gpt2", "llama", "bert", "t5"), help="a transformers model")
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--length", type=int, default=256, help="bytes in a sequence")
    p.add_argument("--layers", type=int, default=18)
    p.add_argument("--width", type=int, default=512)
    p.add_argument("--strategy", default="pareto")
    for tier, name in zip(("device", "host", "SSD"), BUDGET_OPTIONS, strict=True):
        p.add_argument(f"--{name}", metavar="SIZE", help=f"budget of the {tier} tier")
    p.add_argument("--ssd", type=Path, help="directory of the SSD tier; temporary if absent")
    p.add_argument("--run", choices=("lohan_fx", "plain"), help=argparse.SUPPRESS)
    p.add_argument("--hw", help=argparse.SUPPRESS)
    p.add_argument("--out", help=argparse.SUPPRESS)
    args = p.parse_args()
    for name, size in zip(BUDGET_OPTIONS, BUDGETS[args.hf], strict=True):
        key = name.replace("-", "_")
        setattr(args, key, getattr(args, key) or size)
    return args


def demo(args: argparse.Namespace, console: Console) -> int:
    """Both runs, each in its own process, and the comparison."""
    # /tmp is memory on many machines, /var/tmp is not
    disk = "/var/tmp" if Path("/var/tmp").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="lohan_fx-demo-", dir=disk) as folder:
        with console.status("measuring the hardware"):
            hw = lohan_fx.profile_hardware(
                [args.ssd or folder], device="cpu", dtypes=("float32",), quick=True
            )
        console.print(hardware_table(hw))
        hw.save(Path(folder, "hw.json"))
        results = []
        for which in ("lohan_fx", "plain"):
            out = Path(folder, f"{which}.json")
            command = [sys.executable, __file__, *sys.argv[1:], "--run", which]
            command += ["--hw", str(Path(folder, "hw.json")), "--out", str(out)]
            code = subprocess.run(command, check=False).returncode
            if code:
                return code
            results.append(json.loads(out.read_text(encoding="utf-8")))
    table, same = compare(args, *results)
    console.print(table)
    console.print(
        "peak memory: largest resident set of the run's own process, less that before the model "
        "was built",
        style="dim",
    )
    return 0 if same else 1


def main() -> int:
    args, console = parse(), Console()
    try:
        if not args.run:
            return demo(args, console)
        Path(args.out).write_text(json.dumps(run(args, console)), encoding="utf-8")
    except LohanError as error:
        console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
