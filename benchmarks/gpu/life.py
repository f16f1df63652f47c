"""The life of a run: killed twice with SIGKILL, resumed to the bit; the price of clipping and sums.

    python benchmarks/gpu/life.py [--parts life,costs] [--tiny] [--hw FILE] [--out FILE]

A Llama of the shape of Llama-3.2-1B (transformers, random weights) under 12 GiB of device memory:
bf16 compute, fp32 masters, AdamW, a cosine schedule, four micro-batches a step, norm clipping.

**life.** Four processes, which share one profile of the machine and one plan:

1. *whole* trains all steps, and saves nothing.
2. *killed* does the same, but saves on the way, until SIGKILL hits it in the middle of a step: one
   of its four backwards has run, so half-made sums and updates that run beside are lost.
3. *killed in save* starts from other random weights, loads the latest checkpoint and trains on; it
   is killed in its next save, when the weights are in files and the optimizer's states are not.
   The checkpoint before must be the latest one still.
4. *resumed* loads that and trains to the end, saving over what the dead left.

Every loss, gradient norm and rate that any of them reported must be that of *whole* to the bit, and
so must the final weights and optimizer states (SHA-256). Otherwise the exit status is 1.

What equality needs, beyond lohan_fx: the same kernels, in the same order, without atomics.

- One plan (units on the device are updated by another kernel than units in host memory), made by
  *whole* and read by the others, and no refinement of it.
- `torch.use_deterministic_algorithms(True)`, not `warn_only`, with which flash attention's backward
  adds up with atomics as before. It keeps cuDNN's attention out, too, and lets Inductor choose
  reductions by rule instead of by timing. cuBLAS wants CUBLAS_WORKSPACE_CONFIG. The gradients of
  embeddings are made by eager PyTorch's kernel, which sorts. `fill_uninitialized_memory` is off:
  it would write every buffer of a run once more and changes no result.

What determinism costs is the time of a step of *whole* beside that of the same options in *costs*.

**costs.** One process, without deterministic algorithms, with plans that the first steps refine (as
by default on CUDA); medians of four steps after six. Columns:

- *step*, *micro-batch*: seconds of a step, and the same over its number of micro-batches.
- *predicted*: the plan's, of the last micro-batch with the updates (of a step, if it has one).
- *clipping*: the step over the one with as many micro-batches and no clipping (schedule
  "overlapped"), less 1. The limit of the norm is never reached in rows "not clipped": what
  backward tried was right ("speculative"). It is always exceeded in rows "clipped".
- *accumulation*: a step of four micro-batches over four steps of one, less 1. (Negative where
  steps of one wait for updates that a step of four hides.)
- *more*: an additional micro-batch, (t(4) − t(1)) / 3, over its arithmetic, less 1: forward and
  backward of the same model where everything stays on the device (keep-all, uncapped,
  `model.no_sync()`: no update; gradients add up there). So it has what 12 GiB cost a micro-batch
  (recomputation, transfers), and what sums beside states in host memory do.

`--tiny` does all of this with a toy, on the CPU where there is no GPU. Times mean nothing then.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import itertools
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from harness import profiled
from life_training import (
    ATTEMPTS,
    CUDA,
    DEVICE,
    FULL,
    GIB,
    MICRO_BATCHES,
    TINY,
    Case,
    Training,
    build,
    micro_batches,
)
from torch import Tensor

import lohan_fx
from lohan_fx.hardware import HardwareProfile
from lohan_fx.timeline import save_trace

# -- children ------------------------------------------------------------------------------------


def say(event: str, **values: Any) -> None:
    """A line for the parent."""
    print(json.dumps({"event": event, **values}), flush=True)


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def cap(gib: float | None) -> None:
    if CUDA:
        total = torch.cuda.get_device_properties().total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if gib is None else gib * GIB / total)


def rss_peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def profile_child(job: dict[str, Any]) -> None:
    hw = profiled(job["profile"] and Path(job["profile"]), device=DEVICE)
    hw = hw.replace(ssds=(), ssd_read_bytes_per_s=0.0, ssd_write_bytes_per_s=0.0)  # of speed.py's
    hw.save(job["hw"])
    card = torch.cuda.get_device_name() if CUDA else hw.device_name
    say(
        "profiled",
        card=card,
        torch=torch.__version__,
        lines=[f"{k}: {v}" for k, v in hw.describe()],
    )


def train_child(job: dict[str, Any]) -> None:
    """Train from the latest checkpoint, if any, to the last step; save on the way."""
    if job["deterministic"]:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    case, plan = Case(**job["case"]), Path(job["plan"])
    cap(case.cap)
    torch.manual_seed(job["seed"])
    with torch.device("meta"):
        model = build(case)
    training = Training(
        model,
        case,
        HardwareProfile.load(job["hw"]),
        memory={"device": case.device},
        accumulate=MICRO_BATCHES,
        clip_grad_norm=1.0,
        weights="init",  # of other values with another seed; a checkpoint takes their place
        plan=plan if plan.is_file() else None,
    )
    first = 0
    checkpoints = Path(job["checkpoints"])
    found = lohan_fx.latest(checkpoints)
    if found is not None:
        checkpoint = lohan_fx.load(training.model, found)
        training.scheduler.load_state_dict(checkpoint.extra["scheduler"])
        assert checkpoint.step is not None
        first = checkpoint.step
    say("started", step=first, seed=job["seed"])
    for step in range(first + 1, case.steps + 1):
        rate = training.optimizer.param_groups[0]["lr"]
        start = time.perf_counter()
        losses = training.step(step, MICRO_BATCHES, lambda step=step: say("middle", step=step))
        values = [loss.item() for loss in losses]
        seconds = time.perf_counter() - start
        say(
            "step",
            step=step,
            losses=[value.hex() for value in values],
            norm=training.model.lohan.grad_norm.hex(),
            rate=rate.hex(),
            seconds=seconds,
        )
        if step == first + 1 and not plan.is_file():
            training.model.plan.save(plan)
        if step in job["saves"]:
            say("saving", step=step)
            start = time.perf_counter()
            extra = {"scheduler": training.scheduler.state_dict()}
            path = checkpoints / f"step-{step}"
            lohan_fx.save(training.model, path, step=step, extra=extra)
            num_bytes = sum(file.stat().st_size for file in path.iterdir())
            say("saved", step=step, seconds=time.perf_counter() - start, bytes=num_bytes)
    weights = digest(training.model.state_dict())
    states = digest(
        {
            f"{i}.{name}": value
            for i, of in training.optimizer.state_dict()["state"].items()
            for name, value in of.items()
        }
    )
    say(
        "end",
        weights=weights,
        states=states,
        rss=rss_peak_bytes(),
        plan=str(training.model.plan).splitlines(),
        num_params=sum(p.numel() for p in training.model.parameters()),
    )
    training.model.lohan.close()


def digest(tensors: dict[str, Any]) -> str:
    """SHA-256 of names and bytes."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode())
        flat = torch.as_tensor(tensor).detach().cpu().contiguous().view(-1)
        found.update(flat.view(torch.uint8).numpy().data)
    return found.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One row of the table of costs."""

    count: int
    options: dict[str, Any]
    over: str | None = None
    """The row without clipping."""


NEVER, ALWAYS = {"clip_grad_norm": 1e6}, {"clip_grad_norm": 1e-6}
VARIANTS = {
    "1": Variant(count=1, options={"schedule": "overlapped"}),
    "1, not clipped": Variant(count=1, options=NEVER, over="1"),
    "4": Variant(count=4, options={"schedule": "overlapped", "accumulate": 4}),
    "4, not clipped": Variant(count=4, options={"accumulate": 4, **NEVER}, over="4"),
    "4, clipped": Variant(count=4, options={"accumulate": 4, **ALWAYS}, over="4"),
}
ARITHMETIC = "arithmetic"


def costs_child(job: dict[str, Any]) -> None:
    case, hw = Case(**job["case"]), HardwareProfile.load(job["hw"])
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = build(case)
    weights = {name: p.detach().cpu() for name, p in model.named_parameters()}  # tied ones once
    del model
    free()
    for name, variant in VARIANTS.items():
        if name not in job["rows"]:
            continue
        cap(case.cap)
        with torch.device("meta"):
            model = build(case)
        options = {"memory": {"device": case.device}, "weights": weights, **variant.options}
        options["refine"] = CUDA and job["refine"]
        training = Training(model, case, hw, **options)
        del model
        seconds = timed(lambda n, t=training, c=variant.count: t.step(n, c), job)
        with training.model.lohan.record() as recorder:
            training.step(len(seconds), variant.count)
        timeline = recorder.timeline(f"recorded {name}")
        if job["traces"]:
            save_trace(Path(job["traces"]) / f"{name.replace(', ', '-')}.trace.json", [timeline])
        report(name, training, seconds, variant.count, timeline.summary().splitlines())
        del training
        free()
    if ARITHMETIC not in job["rows"]:
        return
    cap(None)
    with torch.device("meta"):
        model = build(case)
    training = Training(
        model,
        case,
        hw,
        memory={"device": case.resident},
        weights=weights,
        strategy="keep-all",
        states="device",
        accumulate="manual",
    )
    del model

    def arithmetic(number: int) -> list[Tensor]:
        (ids,) = micro_batches(case, number, 1)
        with training.model.no_sync():
            loss = training.model(ids)
            loss.backward()
        return [loss.detach()]

    report(ARITHMETIC, training, timed(arithmetic, job), 1)


def timed(step: Callable[[int], list[Tensor]], job: dict[str, Any]) -> list[float]:
    """Seconds of each step, from the end of the one before: updates that run on are in the next
    one's. Steps that warm up are left out."""
    ends = []
    for number in range(1, job["warmups"] + job["repeats"] + 1):
        for loss in step(number):
            loss.item()
        synchronize()
        ends.append(time.perf_counter())
    ends = ends[job["warmups"] - 1 :]
    return [b - a for a, b in itertools.pairwise(ends)]


def report(
    name: str,
    training: Training,
    seconds: list[float],
    count: int,
    recorded: Sequence[str] = (),
) -> None:
    """Say a row, and close the model. `recorded` is what the lanes did in one more step."""
    step_s = statistics.median(seconds)
    plan, refined = training.model.plan, training.model.lohan.refined
    say(
        "row",
        name=name,
        count=count,
        step_s=step_s,
        seconds=seconds,
        tokens_per_s=count * training.case.tokens / step_s,
        schedule=plan.schedule,
        prediction=asdict(plan.prediction),
        plan=str(plan).splitlines(),
        setup_s=training.model.lohan.setup_s,
        refined=None if refined is None else refined.text(),
        recorded=list(recorded),
        device_peak=torch.cuda.max_memory_allocated() if CUDA else None,
        rss=rss_peak_bytes(),
    )
    training.model.lohan.close()
    if CUDA:
        torch.cuda.reset_peak_memory_stats()


def free() -> None:
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


# -- the parent ----------------------------------------------------------------------------------

Events = list[dict[str, Any]]


class FailedRunError(Exception):
    """What should have happened did not."""


def run(
    kind: str, job: dict[str, Any], *, kill: Callable[[dict[str, Any]], bool] | None = None
) -> Events:
    """Run a child and return what it said; kill it with SIGKILL as soon as `kill` returns True.

    Raises:
        FailedRunError: the child failed, or ended before it could be killed.
    """
    env = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if job.get("deterministic") else None
    command = [sys.executable, __file__, "--child", kind, "--job", json.dumps(job)]
    events: Events = []
    killed = False
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if not line.startswith('{"event"'):
                    print(line, end="", flush=True)
                    continue
                events.append(json.loads(line))
                if events[-1]["event"] == "row":
                    print(f"{events[-1]['name']}: {events[-1]['step_s']:.3f} s", flush=True)
                if not killed and kill is not None and kill(events[-1]):
                    killed = True
                    process.kill()  # what it said until then is read to its end
        finally:
            process.kill()
    if process.returncode != (-9 if killed else 0) or (kill is not None and not killed):
        raise FailedRunError(
            f"{kind}: exit status {process.returncode}, {'' if killed else 'not '}killed"
        )
    return events


def of(events: Events, kind: str) -> Events:
    return [event for event in events if event["event"] == kind]


def wait_for_half_a_save(checkpoints: Path, step: int) -> None:
    """Wait until a save has written the weights and begun with the optimizer's states (or has
    ended: a toy's may be too fast to be caught)."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if any(checkpoints.glob(".*/optimizer*")):
            return
        if (checkpoints / f"step-{step}").exists():
            return
        time.sleep(5e-4)
    raise FailedRunError("no save began within 300 s")


def numbers(events: Events) -> dict[int, Any]:
    """What must not differ, by step."""
    return {e["step"]: (e["losses"], e["norm"], e["rate"]) for e in of(events, "step")}


def differing(found: dict[int, Any], wanted: dict[int, Any]) -> list[int]:
    """The steps whose numbers are not as wanted; prints the first."""
    steps = [step for step, value in found.items() if wanted.get(step) != value]
    for step in steps[:1]:
        print(f"  step {step}: {found[step]}, wanted {wanted.get(step)}", flush=True)
    return steps


def show(name: str, events: Events) -> None:
    """A line about a process that trained."""
    steps = of(events, "step")
    line = f"{name}: steps {steps[0]['step']} to {steps[-1]['step']}"
    for which in (steps[0], steps[-1]):
        values = [float.fromhex(loss) for loss in which["losses"]]
        line += f", loss {statistics.mean(values):.4f}"
    for event in of(events, "saved"):
        line += f"; saved {event['bytes'] / GIB:.2f} GiB in {event['seconds']:.1f} s"
    print(line, flush=True)


def life(job: dict[str, Any], root: Path) -> dict[str, Any]:
    """Run the four processes and compare them."""
    case = Case(**job["case"])
    first, second = case.saves
    checkpoints = root / "checkpoints"
    job = {**job, "plan": str(root / "plan.json"), "deterministic": True}
    after = {**job, "checkpoints": str(checkpoints), "saves": case.saves}

    whole = run("train", {**job, "seed": 0, "checkpoints": str(root / "whole"), "saves": []})
    show("whole", whole)
    print(*(f"  {line}" for line in of(whole, "end")[0]["plan"]), sep="\n", flush=True)

    killed = run(
        "train",
        {**after, "seed": 0},
        kill=lambda event: event["event"] == "middle" and event["step"] == case.kill,
    )
    show(f"killed in step {case.kill}", killed)

    def half_saved(event: dict[str, Any]) -> bool:
        if event["event"] != "saving" or event["step"] != second:
            return False
        wait_for_half_a_save(checkpoints, second)
        return True

    saving: Events = []
    for _ in range(0 if job["once"] else ATTEMPTS):
        saving = run("train", {**after, "seed": 1}, kill=half_saved)
        complete = checkpoints / f"step-{second}"
        if not complete.exists():
            break
        shutil.rmtree(complete)  # the save was faster than the kill
    if saving:
        show(f"killed in the save of step {second}", saving)
    left = sorted(path.name for path in checkpoints.iterdir())
    latest = lohan_fx.latest(checkpoints)
    print(f"  left behind: {', '.join(left)}; latest {latest and latest.name}", flush=True)

    resumed = run("train", {**after, "seed": 2})
    show("resumed", resumed)
    mended = sorted(path.name for path in checkpoints.iterdir())

    wanted = numbers(whole)
    (end,), (its,) = of(whole, "end"), of(resumed, "end")
    checks = {
        "the kill in a step hit before the next save": not of(killed[-1:], "saved")
        and max(numbers(killed)) < second,
        "the kill in a save left half of one": f"step-{second}" not in left
        and len(left) == 1 + bool(saving),
        "then the checkpoint before is the latest": latest == checkpoints / f"step-{first}",
        "both go on from there": {of(e, "started")[0]["step"] for e in (saving, resumed) if e}
        == {first},
        "and trained to the end": max(numbers(resumed)) == case.steps == max(wanted),
        "what the dead left is gone": mended == sorted(f"step-{step}" for step in case.saves),
        "same numbers, killed in a step": not differing(numbers(killed), wanted),
        "same numbers, killed in a save": not differing(numbers(saving), wanted),
        "same numbers, resumed": not differing(numbers(resumed), wanted),
        "same weights": end["weights"] == its["weights"],
        "same optimizer states": end["states"] == its["states"],
    }
    for check, held in checks.items():
        print(f"  {check}: {'yes' if held else 'NO'}", flush=True)
    seconds = [event["seconds"] for event in of(whole, "step")]
    return {
        "checks": checks,
        "step_s": statistics.median(seconds[2:]),
        "steps": {"whole": of(whole, "step"), "killed": of(killed, "step")}
        | {"killed in save": of(saving, "step"), "resumed": of(resumed, "step")},
        "saved": [e for events in (whole, killed, resumed) for e in of(events, "saved")],
        "end": end,
        "resumed_end": its,
    }


def costs(job: dict[str, Any], life_step_s: float | None) -> dict[str, Any]:
    """Run and print the table of costs."""
    rows = {row["name"]: row for row in of(run("costs", job), "row")}
    for rest in ("", ", not clipped"):
        if not {f"1{rest}", f"4{rest}"} <= rows.keys():
            continue
        one, four = rows[f"1{rest}"]["step_s"], rows[f"4{rest}"]["step_s"]
        rows[f"4{rest}"]["accumulation"] = four / (4 * one) - 1
        if ARITHMETIC in rows:
            rows[f"4{rest}"]["more"] = (four - one) / 3 / rows[ARITHMETIC]["step_s"] - 1
    for name, variant in VARIANTS.items():
        if variant.over is not None and {name, variant.over} <= rows.keys():
            rows[name]["clipping"] = rows[name]["step_s"] / rows[variant.over]["step_s"] - 1

    def percent(row: dict[str, Any], key: str) -> str:
        return f"{row[key]:+.1%}" if key in row else ""

    table = "{:<18}{:>10}{:>12}{:>13}{:>11}{:>10}{:>14}{:>9}  {}"
    heads = ("step", "micro-batch", "predicted", "tokens/s", "clipping", "accumulation", "more")
    print(table.format("micro-batches", *heads, "schedule"))
    for name, row in rows.items():
        print(
            table.format(
                name if name != ARITHMETIC else "1, resident, sums",
                f"{row['step_s']:.3f} s",
                f"{row['step_s'] / row['count']:.3f} s",
                f"{row['prediction']['step_s']:.3f} s",
                f"{row['tokens_per_s']:,.0f}",
                percent(row, "clipping"),
                percent(row, "accumulation"),
                percent(row, "more"),
                row["schedule"] if name != ARITHMETIC else "no update",
            )
        )
    found: dict[str, Any] = {"rows": rows}
    if life_step_s is not None and "4, not clipped" in rows:
        found["determinism"] = life_step_s / rows["4, not clipped"]["step_s"] - 1
        print(
            f"deterministic algorithms: a step of {life_step_s:.3f} s, {found['determinism']:+.1%}"
        )
    rss = max(row["rss"] for row in rows.values())
    print(f"largest resident set of a process that has run them all: {rss / GIB:.1f} GiB")
    return found


def commit() -> str:
    """Of the code that runs, where git is there to ask."""
    if shutil.which("git") is None:
        return "unknown"
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


def save(result: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        out.write_text(json.dumps(result, indent=1))


CHILDREN = {"profile": profile_child, "train": train_child, "costs": costs_child}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", default="life,costs", help="life, costs, or both")
    parser.add_argument("--tiny", action="store_true", help="a toy, also without a GPU")
    parser.add_argument("--once", action="store_true", help="leave the kill in a save out")
    every = [*VARIANTS, ARITHMETIC]
    parser.add_argument("--rows", nargs="+", choices=every, default=every, help="of the costs")
    parser.add_argument("--no-refine", action="store_true", help="costs of the first plans")
    parser.add_argument("--traces", type=Path, help="a directory for a recorded step of each row")
    parser.add_argument("--hw", type=Path, help="the machine's profile: read, or made and kept")
    parser.add_argument("--directory", type=Path, help="of checkpoints; a temporary one if absent")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        CHILDREN[options.child](options.job)
        return
    parts = options.parts.split(",")
    if not {"life", "costs"}.issuperset(parts):
        parser.error(f"--parts {options.parts}: use life, costs, or life,costs")
    if not (options.tiny or CUDA):
        parser.error("there is no GPU here; --tiny runs on a CPU")
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        root = Path(directory)
        job: dict[str, Any] = {"case": asdict(TINY if options.tiny else FULL)}
        job |= {"once": options.once, "rows": options.rows, "refine": not options.no_refine}
        job["traces"] = options.traces and str(options.traces)
        job["profile"] = options.hw and str(options.hw)
        job |= {"hw": str(root / "hw.json"), "warmups": 6, "repeats": 2 if options.tiny else 4}
        (found,) = run("profile", job)
        print(*found.pop("lines"), sep="\n", flush=True)
        result: dict[str, Any] = {**found, "commit": commit(), "case": job["case"]}
        if "life" in parts:
            result["life"] = life(job, root)
            save(result, options.out)
        if "costs" in parts:
            result["costs"] = costs(job, result.get("life", {}).get("step_s"))
    result["seconds"] = time.perf_counter() - begun
    save(result, options.out)
    if not all(result.get("life", {}).get("checks", {}).values()):
        raise SystemExit("the run that was killed is not the run that was not")


if __name__ == "__main__":
    main()
