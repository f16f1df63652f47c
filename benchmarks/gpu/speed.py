"""lohan_fx under a memory cap against others on one card: step time, peaks, floors, what binds.

    python benchmarks/gpu/speed.py 2.78B-b8 [CASE…] [--systems plain,ours] [--hw FILE] [--out FILE]

Every system trains the same GPT on the same batches; ratios are within this run. lohan_fx is
capped by `torch.cuda.set_per_process_memory_fraction`; plain training is not. Where several are run
each has a process of its own, with an empty cache for what Inductor compiles: none meets what
another left behind, and one that dies, for lack of host memory say, is a row of the table.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import baselines
import psutil
import torch
from cases import CASES, Case
from harness import RECORDED_STEPS, Batch, Ours, Timing, batches, ours, profiled, timed
from optimizer import BYTES_PER_PARAM, HostMemory, host_memory
from table import show

from lohan_fx.bounds import step_bound
from lohan_fx.footprint import host_bytes_needed
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import Plan
from lohan_fx.simulate import simulate
from lohan_fx.timeline import Timeline, save_trace

GIB = 2**30
RECORDINGS = 4
"""So often steps are recorded, and timed without, by turns."""


BASELINES: dict[str, Callable[[Case], baselines.Step]] = {
    "plain": lambda case: baselines.plain(case.shape, recompute=case.recompute, whole=True),
    "plain-blocks": lambda case: baselines.plain(case.shape, recompute=case.recompute),
    "plain-mixed": lambda case: baselines.plain_mixed(case.shape, recompute=case.recompute),
    "plain-mixed-whole": lambda case: baselines.plain_mixed(
        case.shape, recompute=case.recompute, whole=True
    ),
    "save-on-cpu": lambda case: baselines.saved_on_cpu(case.shape),
    "fsdp-offload": lambda case: baselines.fsdp_offload(case.shape),
    "deepspeed-zero3": lambda case: baselines.deepspeed_zero3(case.shape),
}


def run_baseline(name: str, case: Case, data: list[Batch], skip: int) -> dict[str, Any]:
    baselines.free()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    start = time.perf_counter()
    step = BASELINES[name](case)
    built = time.perf_counter()
    step(*data[0])
    torch.cuda.synchronize()
    first_s = time.perf_counter() - built
    held = torch.cuda.memory_stats()["requested_bytes.all.current"] - before
    timing = timed(step, data)
    del step
    baselines.free()
    return {
        "step_s": timing.step_s(skip),
        "rss": psutil.Process().memory_info().rss,
        "peak": held + timing.peak_bytes,
        "build_s": built - start,
        "first_step_s": first_s,
        "losses": timing.losses,
    }


def cap(gib: float | None) -> None:
    total = torch.cuda.get_device_properties().total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if gib is None else gib * GIB / total)


def run_ours(
    case: Case,
    data: list[Batch],
    hw: HardwareProfile,
    memory: HostMemory | None,
    options: argparse.Namespace,
    name: str,
) -> dict[str, Any]:
    weights = {k: v.cpu() for k, v in baselines.build(case.shape).state_dict().items()}
    baselines.free()
    cap(case.cap)
    budget = f"{case.cap - options.slack}GiB" if case.cap is not None else "76GiB"
    budgets = {"device": budget}
    if case.host is not None:
        budgets["host"] = f"{case.host}GiB"
    settings: dict[str, Any] = {"strategy": case.strategy, "memory": budgets}
    settings["refine"] = case.refine
    if options.clip is not None:
        settings["clip_grad_norm"] = options.clip
    if case.ssd:
        settings.update(states="ssd", swap_to="ssd")
    if case.schedule != "auto":
        settings["schedule"] = case.schedule
    with ours(case.shape, weights, hw, **settings) as run:
        start = run.started
        program = run.lohan.prepare(*data[0])
        prepared = time.perf_counter()
        run.step(*data[0])
        torch.cuda.synchronize()
        first = time.perf_counter()
        if case.refine:
            for batch in (data * 4)[:4]:  # the fifth step runs the plan that stays
                run.step(*batch)
        timing: Timing = timed(run.step, data)
        print(f"{name} ours: {timing.step_s(options.skip):.4f} s", flush=True)
        rss = psutil.Process().memory_info().rss
        recording_costs, real, op_seconds, optimizer = None, None, {}, {}
        if memory is not None and len(data) > 1:  # the first of recorded steps is not timed
            recording_costs, real = recorded(run, data, f"recorded {name}")
            sizes = {u.name: u.num_params for u in run.lohan.program().workload.units}
            optimizer = optimizer_beside(real, sizes, memory)
            print(f"after it: {host_memory()}", flush=True)  # hosts' rates vary within minutes
            with run.lohan.time_ops() as timer:
                run.step(*data[0])
            op_seconds = timer.seconds()
        program, hw = run.lohan.program(), run.lohan.options.hw
        workload = program.workload.timed(op_seconds)
        predicted = simulate(workload, program.plan, hw)
        bound = step_bound(workload, program.plan, hw, program=program.instructions)
        print(run.model.report(), flush=True)  # type: ignore[operator]
        if real is not None:
            print(real.summary(), flush=True)
        tiers = [u.tier for u in program.plan.units.values()]
        row = {
            "step_s": timing.step_s(options.skip),
            "recording_costs": recording_costs,
            "optimizer": optimizer,
            "refined": None if run.lohan.refined is None else asdict(run.lohan.refined),
            "host": host_bytes_needed(workload, program.plan),
            "floor_s": ssd_floor(case, hw, program.plan) if case.ssd else None,
            "peak": timing.peak_bytes + program.memory.static_bytes,
            "planned_peak": program.memory.peak_bytes,
            "first_step_s": first - start,
            "prepare_s": prepared - start,
            "setup_s": run.lohan.setup_s,
            "rss": rss,
            "losses": timing.losses,
            "predicted_s": predicted.step_s,
            "bound_s": bound.seconds,
            "binds": bound.resource,
            "work_s": bound.work,
            "tiers": {t: tiers.count(t) for t in set(tiers)},
            "notes": program.plan.notes,
        }
        if options.traces and real is not None:
            options.traces.mkdir(parents=True, exist_ok=True)
            stem = options.traces / name
            save_trace(Path(f"{stem}.trace.json"), [real, predicted.timeline.coalesce()])
            Path(f"{stem}.ops.json").write_text(json.dumps(op_seconds))
            Path(f"{stem}.plan.json").write_text(json.dumps(program.plan.to_dict()))
            # what planners see: to plan, simulate and compare again without the card
            Path(f"{stem}.workload.pickle").write_bytes(pickle.dumps((workload, hw)))
    cap(None)
    return row


def recorded(run: Ours, data: list[Batch], name: str) -> tuple[float, Timeline]:
    """What recording adds to a step, as a share of it, and what the last steps did. Steps with and
    without it take turns, and either come first: from one minute to the next the host's speed
    differs by more."""
    without, beside = [], []
    for turn in range(RECORDINGS):
        for records in (turn % 2 == 1, turn % 2 == 0):
            if not records:
                without += timed(run.step, data[:RECORDED_STEPS]).seconds[1:]
                continue
            with run.lohan.record() as recorder:
                beside += timed(run.step, data[:RECORDED_STEPS]).seconds[1:]
    costs = statistics.median(beside) / statistics.median(without) - 1
    return costs, recorder.timeline(name)


def optimizer_beside(
    real: Timeline, num_params: dict[str, int], memory: HostMemory
) -> dict[str, float]:
    """The CPU optimizer in a recorded step: its parameters/s while it updates, bytes/s of the link
    in that time, and its rate as a share of what memory gives it alone, and of what it has room
    for beside the link."""
    updates = [s for s in real.by_lane["cpu"] if s.kind == "update"]
    seconds = sum(s.seconds for s in updates)
    if not seconds:
        return {}
    rate = sum(num_params[s.name] for s in updates) / seconds
    moved = 0.0
    for span in (*real.by_lane["h2d"], *real.by_lane["d2h"]):
        shared = sum(
            max(0.0, min(u.end_s, span.end_s) - max(u.start_s, span.start_s)) for u in updates
        )
        moved += span.num_bytes * shared / max(span.seconds, 1e-9)
    link = moved / seconds
    return {
        "params_per_s": rate,
        "link_bytes_per_s": link,
        "bytes_per_s": BYTES_PER_PARAM * rate + link,
        "of_memory": BYTES_PER_PARAM * rate / memory.bytes_per_s,
        "of_alone": rate / memory.alone,
        "of_what_the_link_leaves": rate / memory.left(link),
    }


def ssd_floor(case: Case, hw: HardwareProfile, plan: Plan) -> float:
    """Seconds that the disk needs at its own rates, reads and writes in turn: 14 bytes a parameter
    each way (a compute copy, a master, two moments), and the swapped activations."""
    states = 14 * case.shape.num_params
    swapped = plan.prediction.d2h_bytes - 2 * case.shape.num_params  # gradients leave as bf16
    reads = (states + swapped) / hw.ssd_read_bytes_per_s
    return reads + (states + swapped) / hw.ssd_write_bytes_per_s


def commit() -> str:
    """Of the code that runs, where git is there to ask."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


def described(name: str, system: str, row: dict[str, Any]) -> str:
    """What was found, in a line; the table has what is compared."""
    text = f"{name} {system}: {row['step_s']:.3f} s, {row['tokens_per_s']:,.0f} tokens/s"
    text += f", peak {row['peak'] / GIB:.2f} GiB, first step {row['first_step_s']:.1f} s"
    if system != "ours":
        return text
    if row["recording_costs"] is not None:
        text += f"; recording costs {row['recording_costs']:.1%}"
    if row["optimizer"]:
        parts = (f"{k} {v:.4g}" for k, v in row["optimizer"].items())
        text += f"; CPU optimizer: {', '.join(parts)}"
    stages = ", ".join(f"{k} {v:.1f}" for k, v in row["setup_s"].items())
    text += f"; refined {row['refined']}; set-up {stages} s"
    text += f"; predicted {row['predicted_s']:.3f} s, floor {row['bound_s']:.3f} s "
    return text + f"({row['binds']}), RSS {row['rss'] / GIB:.1f} GiB, {row['tiers']}"


def run_here(name: str, system: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one system of one case in this process; results as `--out` has them."""
    own = {k: getattr(options, k) for k in ("strategy", "schedule", "refine")}
    case = replace(CASES[name], **{k: v for k, v in own.items() if v is not None})
    hw, memory = None, None
    with tempfile.TemporaryDirectory() as temporary:
        if system == "ours":  # nobody else asks for rates
            directory = options.hw.with_suffix(".ssd") if options.hw else Path(temporary)
            directory.mkdir(parents=True, exist_ok=True)
            hw = profiled(options.hw, ssd=[str(directory.resolve())])
            if options.cpu_rate:
                hw = hw.replace(cpu_optimizer_params_per_s=1e9 * options.cpu_rate)
            print(*(f"  {k}: {v}" for k, v in hw.describe()), sep="\n", flush=True)
            memory = None if options.lean else host_memory()
            if memory is not None:
                print(memory, flush=True)
        data = batches(case.shape, case.batch, options.steps)
        if hw is None:
            row = run_baseline(system, case, data, options.skip)
        else:
            baselines.free()
            row = run_ours(case, data, hw, memory, options, name)
    row["tokens_per_s"] = case.tokens / row["step_s"]
    print(described(name, system, row), flush=True)
    of_case = about(case) | {system: row}
    if memory is not None:
        of_case["host_memory"] = asdict(memory)
    return {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": commit(),
        "cases": {name: of_case},
    }


def about(case: Case) -> dict[str, Any]:
    """What the results of a case begin with."""
    return {
        "shape": asdict(case.shape),
        "batch": case.batch,
        "strategy": case.strategy,
        "schedule": case.schedule,
        "refine": case.refine,
    }


def run_apart(name: str, system: str, options: argparse.Namespace, hw: Path) -> dict[str, Any]:
    """The same in a process of its own; where it dies, the row says of what."""
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "out.json"
        command = [sys.executable, __file__, name, "--systems", system, "--out", str(out)]
        command += ["--hw", str(hw), *passed_on(options)]
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{temporary}/inductor"}
        last, error = "", ""
        with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            for line in process.stderr:
                print(line, end="", file=sys.stderr, flush=True)
                last = line.strip() or last
                if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line):  # warnings may follow it
                    error = line.strip()
        if process.returncode == 0:
            found: dict[str, Any] = json.loads(out.read_text())
            return found
    code = process.returncode
    reason = f"killed by {signal.Signals(-code).name}" if code < 0 else error or last
    print(f"{name} {system} failed: {reason}", flush=True)
    return {"cases": {name: {system: {"failed": reason}}}}


def passed_on(options: argparse.Namespace) -> list[str]:
    """Arguments that say the same about how a system is run."""
    out = []
    for name, value in vars(options).items():
        if name in {"cases", "systems", "out", "hw"} or value is None:
            continue
        flag = name.replace("_", "-")
        if not isinstance(value, bool):
            out += [f"--{flag}", str(value)]
        elif value:
            out.append(f"--{flag}")
        elif name == "refine":
            out.append(f"--no-{flag}")
    return out


def merge(results: dict[str, Any], found: dict[str, Any]) -> None:
    """Add what another process found."""
    cases = results["cases"]
    for name, of_case in found.pop("cases").items():
        cases.setdefault(name, {}).update(of_case)
    results.update(found)


def parse(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", nargs="+", choices=sorted(CASES))
    parser.add_argument("--systems", help="of ours, " + ", ".join(BASELINES))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--strategy", help="for the case's own")
    parser.add_argument("--schedule", help="for the case's own")
    parser.add_argument("--skip", type=int, default=3, help="steps that are not timed")
    parser.add_argument(
        "--refine",
        action=argparse.BooleanOptionalAction,
        help="let the first steps correct plans, or not; for the case's own",
    )
    parser.add_argument("--lean", action="store_true", help="no recording, no timing of ops")
    parser.add_argument("--clip", type=float, help="clip_grad_norm= of lohan_fx")
    parser.add_argument("--slack", type=float, default=1.5, help="GiB of the cap left to CUDA")
    parser.add_argument("--cpu-rate", type=float, help="Gparam/s of the optimizer beside a step")
    parser.add_argument(
        "--hw",
        type=Path,
        metavar="FILE",
        help="the machine's profile: read, or made and kept (its SSD is a folder beside it)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="results as JSON")
    parser.add_argument(
        "--traces", type=Path, metavar="FOLDER", help="recorded steps, plans and workloads of ours"
    )
    options = parser.parse_args(given)
    if options.steps <= options.skip:
        parser.error(f"--steps {options.steps} are all skipped by --skip {options.skip}")
    if options.systems is not None:
        options.systems = options.systems.split(",")
        unknown = {*options.systems} - {*BASELINES, "ours"}
        if unknown:
            parser.error(f"--systems {', '.join(unknown)}: use ours, {', '.join(BASELINES)}")
    return options


def main() -> None:
    options = parse(sys.argv[1:])
    if not torch.cuda.is_available():  # before --hw keeps a profile, which would be of the CPU
        print("speed.py needs a CUDA GPU", file=sys.stderr)
        raise SystemExit(2)
    runs = [(n, s) for n in options.cases for s in options.systems or CASES[n].systems]
    results: dict[str, Any] = {"cases": {}}
    with tempfile.TemporaryDirectory() as temporary:
        for name, system in runs:
            if len(runs) == 1:
                found = run_here(name, system, options)
            else:
                found = run_apart(name, system, options, options.hw or Path(temporary) / "hw.json")
            merge(results, found)
            if options.out:  # after each, as a machine's time may end before the next does
                options.out.write_text(json.dumps(results, indent=1))
    show(results)
    if any("failed" in of_case.get("ours", {}) for of_case in results["cases"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
