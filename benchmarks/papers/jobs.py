"""What there is to simulate: jobs that compare by value, each run once, in several processes."""

from __future__ import annotations

import hashlib
import multiprocessing
import pickle
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from benchmarks.papers.models import spec_of
from benchmarks.papers.systems import SYSTEMS, System
from benchmarks.papers.workloads import (
    cache_directory,
    source_fingerprint,
    workload,
    write,
)
from lohan_fx.errors import InsufficientMemoryError
from lohan_fx.hardware import HardwareProfile, MemoryBudget, parse_bytes
from lohan_fx.models import family_of
from lohan_fx.plan import Action, Plan
from lohan_fx.planners import Choices, PlannerOptions, finish
from lohan_fx.planners.algorithm1 import search
from lohan_fx.planners.fuyou import by_priority, swap_scale
from lohan_fx.planners.recompute_cost import Layer, layers_of
from lohan_fx.planners.schedule import must_save, tiny_residuals
from lohan_fx.planners.strategy import Setting
from lohan_fx.planners.tiers import unit_tiers
from lohan_fx.program import lower, residency
from lohan_fx.simulate import simulate
from lohan_fx.workload import Workload


class Job(Protocol):
    """A hashable description of work."""

    @property
    def model(self) -> str: ...

    @property
    def batch(self) -> int: ...

    def run(self) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One simulated step; `tflops` are model FLOPs over time, 0.0 if it does not fit."""

    fits: bool = True
    reason: str = ""
    step_s: float = float("inf")
    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    closed_form_s: float = 0.0
    tflops: float = 0.0
    tokens_per_s: float = 0.0
    swapped_bytes: int = 0
    recompute_flops: int = 0
    peak_device_bytes: int = 0
    ssd_write_bytes: int = 0


def _host_bytes(hw: HardwareProfile, host: str | None) -> int:
    return hw.host_bytes if host is None else parse_bytes(host)


@dataclass(frozen=True, slots=True)
class Step:
    """One training step: a model, a batch, a server, a system, and perhaps less host memory."""

    model: str
    batch: int
    hw: str
    system: str
    host: str | None = None

    def run(self) -> Outcome:
        hw = HardwareProfile.preset(self.hw)
        w = workload(self.model, self.batch, hw)
        system = SYSTEMS[self.system]
        try:
            plan = system.plan(w, hw, _host_bytes(hw, self.host))
        except InsufficientMemoryError as error:
            return Outcome(fits=False, reason=str(error).splitlines()[0])
        return outcome(self.model, self.batch, w, plan, hw, system)


def outcome(
    model: str,
    batch: int,
    w: Workload,
    plan: Plan,
    hw: HardwareProfile,
    system: System,
) -> Outcome:
    """Simulate a plan."""
    sim = simulate(w, plan, hw)
    optimizer_s = _pipelined_s(w, plan, hw) if system.pipelined else sim.optimizer_s
    overhead_s = system.overhead_s_per_param * w.num_params
    step_s = sim.forward_s + sim.backward_s + optimizer_s + overhead_s
    spec = spec_of(model)
    return Outcome(
        step_s=step_s,
        forward_s=sim.forward_s,
        backward_s=sim.backward_s,
        optimizer_s=optimizer_s,
        closed_form_s=plan.prediction.step_s,
        tflops=spec.model_flops(batch) / step_s / 1e12,
        tokens_per_s=batch * spec.sequence / step_s,
        swapped_bytes=_swapped_bytes(w, plan),
        recompute_flops=plan.prediction.recompute_flops,
        peak_device_bytes=sim.device.peak_bytes,
        ssd_write_bytes=sim.traffic.ssd_write_bytes,
    )


def _swapped_bytes(w: Workload, plan: Plan) -> int:
    swapped = (v for v in w.residuals if plan.residuals[v].action == "swap")
    return sum(w.values[v].num_bytes for v in swapped)


def _pipelined_s(w: Workload, plan: Plan, hw: HardwareProfile) -> float:
    """An optimizer stage whose reads, updates and writes overlap (Fuyou §4.4): the busiest of
    SSDs and CPU, and the first read and the last write that nothing hides."""
    units = [u for u in w.units if u.trainable and plan.units[u.name].tier != "device"]
    on_ssd = [u for u in units if plan.units[u.name].tier == "ssd"]
    cpu_s = sum(u.num_params for u in units) / hw.cpu_optimizer_params_per_s
    if not on_ssd:
        return cpu_s
    reads = [u.update_read_bytes / hw.ssd_read_bytes_per_s for u in on_ssd]
    writes = [(u.state_bytes + u.compute_bytes) / hw.ssd_write_bytes_per_s for u in on_ssd]
    fill = on_ssd[-1].num_params / hw.cpu_optimizer_params_per_s
    return max(sum(reads) + sum(writes), cpu_s + reads[-1] + writes[0]) + fill


@dataclass(frozen=True, slots=True)
class LargestModel:
    """The largest named GPT that a system trains."""

    batch: int
    hw: str
    system: str
    host: str | None = None

    @property
    def model(self) -> str:
        return "gpt"

    def run(self) -> str:
        """Its name; empty if even the smallest does not fit."""
        hw = HardwareProfile.preset(self.hw)
        system = SYSTEMS[SYSTEMS[self.system].smallest or self.system]
        ladder = [m.name for m in family_of("gpt")]
        low, high = -1, len(ladder)
        while high - low > 1:
            middle = (low + high) // 2
            try:
                w = workload(ladder[middle], self.batch, hw)
                system.plan(w, hw, _host_bytes(hw, self.host))
                low = middle
            except InsufficientMemoryError:
                high = middle
        return ladder[low] if low >= 0 else ""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """T_iter over the swapped bytes.

    Attributes:
        points: (swapped bytes, simulated seconds), ascending.
        predicted: index of the point that the policy chooses by its closed form.
        base_bytes, all_bytes: the least (block inputs) and the most that can be swapped.
    """

    points: tuple[tuple[int, float], ...]
    predicted: int
    base_bytes: int
    all_bytes: int

    @property
    def least_s(self) -> float:
        """The shortest simulated step."""
        return min(seconds for _, seconds in self.points)

    @property
    def predicted_s(self) -> float:
        """The simulated step at the predicted amount."""
        return self.points[self.predicted][1]

    def share(self, at: int) -> float:
        """Swapped bytes beyond the block inputs, of all beyond them: Fuyou's swap coefficient."""
        return (self.points[at][0] - self.base_bytes) / (self.all_bytes - self.base_bytes)


@dataclass(frozen=True, slots=True)
class SwapSweep:
    """Simulated steps for growing sets of swapped residuals, in the order of `policy`."""

    model: str
    batch: int
    hw: str
    policy: Literal["lohan", "fuyou"] = "lohan"
    count: int = 9

    def run(self) -> Curve:
        hw = HardwareProfile.preset(self.hw)
        w = workload(self.model, self.batch, hw)
        budget = MemoryBudget.from_request(hw)
        options = PlannerOptions(states="ssd", schedule="optimized")
        tiers = unit_tiers(w, hw, budget, options)
        tiny = tiny_residuals(w)
        base = (w.inter_block | must_save(w)) - tiny
        order, best = self._order(
            Setting(
                name=self.policy, workload=w, hw=hw, budget=budget, options=options, tiers=tiers
            ),
            base,
            tiny,
        )
        last = len(order)
        counts = sorted({round(k * last / (self.count - 1)) for k in range(self.count)} | {best})
        points: list[tuple[int, float]] = []
        predicted = 0
        for count in counts:
            swapped = base | {v for layer in order[:count] for v in layer.values}
            actions: dict[str, Action] = {
                v: "keep" if v in tiny else "swap" if v in swapped else "recompute"
                for v in w.residuals
            }
            choices = Choices(actions=actions, unit_tiers=tiers)
            try:
                plan = finish(w, hw, budget, options, choices, f"{count} layers")
            except InsufficientMemoryError:
                continue
            predicted = len(points) if count <= best else predicted
            points.append((_swapped_bytes(w, plan), simulate(w, plan, hw).step_s))
        sizes = {v: w.values[v].num_bytes for v in w.residuals if v not in tiny}
        return Curve(
            points=tuple(points),
            predicted=predicted,
            base_bytes=sum(sizes[v] for v in base),
            all_bytes=sum(sizes.values()),
        )

    def _order(
        self, s: Setting, base: frozenset[str], tiny: frozenset[str]
    ) -> tuple[Sequence[Layer], int]:
        """Layers beyond the block inputs in the order of the policy, and how many it swaps."""
        w = s.workload
        if self.policy == "lohan":
            found = search(w, s.hw, s.budget, s.options, s.tiers, tiny)
            times = [seconds for _, seconds in found.points]
            return found.layers, times.index(min(times))
        order = by_priority(layers_of(w, [v for v in w.residuals if v not in base | tiny]))
        return order, swap_scale(s, sorted(base), order).best.count


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Bytes on the GPU as MemFerry counts them (§II-B, §IV-D).

    `direct` parameters are read in host memory in forward and backward, and never copied.
    """

    activations: int
    parameters: int
    gradients: int
    direct: int

    def of(self, system: str) -> int:
        """The peak of native-offload, memferry or go-memferry."""
        if system == "native-offload":
            return self.activations + self.parameters + self.gradients
        own = self.activations + self.parameters - self.direct
        return own if system == "go-memferry" else own + self.gradients


@dataclass(frozen=True, slots=True)
class Memory:
    """The device memory of MemFerry's systems."""

    model: str
    batch: int
    hw: str

    def run(self) -> DeviceMemory:
        hw = HardwareProfile.preset(self.hw)
        w = workload(self.model, self.batch, hw)
        plan = SYSTEMS["memferry"].plan(w, hw, hw.host_bytes)
        units = tuple(replace(u, compute_bytes=0, gradient_bytes=0) for u in w.units)
        values = {
            name: replace(v, num_bytes=0) if v.kind == "gradient" else v
            for name, v in w.values.items()
        }
        without = replace(w, units=units, values=values)
        return DeviceMemory(
            activations=residency(lower(without, plan)).peak_bytes,
            parameters=sum(u.compute_bytes for u in w.units),
            gradients=sum(u.gradient_bytes for u in w.units),
            direct=sum(u.compute_bytes for u in w.units if not plan.units[u.name].windows),
        )


@dataclass(frozen=True, kw_only=True)
class StepSize:
    """Bytes of what backward reads of forward, and model FLOPs, of one step."""

    activations: int
    model_flops: float


@dataclass(frozen=True, slots=True)
class Activations:
    """How much a step saves for backward."""

    model: str
    batch: int

    def run(self) -> StepSize:
        w = workload(self.model, self.batch, HardwareProfile.preset("rtx4090-12xp5510"))
        return StepSize(
            activations=sum(w.values[v].num_bytes for v in w.residuals),
            model_flops=spec_of(self.model).model_flops(self.batch),
        )


class Results:
    """Job → result."""

    def __init__(self, found: dict[Job, Any]) -> None:
        self._found = found

    def __getitem__(self, job: Job) -> Any:
        return self._found[job]

    def step(self, *args: Any) -> Outcome:
        found = self._found[Step(*args)]
        assert isinstance(found, Outcome)
        return found


def _run(job: Job) -> Any:
    """The result, from disk if the same code has run the same job before."""
    name = hashlib.sha256(repr(job).encode()).hexdigest()[:16]
    path = cache_directory() / f"results-{source_fingerprint()}" / f"{name}.pickle"
    if path.exists():
        return pickle.loads(path.read_bytes())
    result = job.run()
    write(path, pickle.dumps(result))
    return result


def run(
    jobs: Iterable[Job], processes: int = 1, progress: Callable[[str], None] | None = None
) -> Results:
    """Run every distinct job once, jobs of one workload one after another."""
    todo: Sequence[Job] = sorted(dict.fromkeys(jobs), key=lambda j: (j.model, j.batch, repr(j)))
    found: dict[Job, Any] = {}
    start = time.monotonic()

    def done(job: Job, result: Any) -> None:
        found[job] = result
        if progress is not None:
            progress(f"[{len(found)}/{len(todo)}, {time.monotonic() - start:.0f} s] {job}")

    if processes <= 1:
        for job in todo:
            done(job, _run(job))
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(processes, mp_context=context, initializer=_one_thread) as pool:
            for job, result in zip(todo, pool.map(_run, todo, chunksize=4), strict=True):
                done(job, result)
    return Results(found)


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
