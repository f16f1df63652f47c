"""Training loops for tests: the same steps with lohan_fx and without, to compare bit by bit."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import lohan_fx.compiled.building
from lohan_fx.capture import Captured
from lohan_fx.errors import InsufficientMemoryError
from lohan_fx.hardware import HardwareProfile, MemoryBudget, SsdDevice
from lohan_fx.plan import Action, Plan
from lohan_fx.planners import Choices, Planner, PlannerOptions, make_plan
from lohan_fx.planners.schedule import draft
from lohan_fx.planners.tiers import unit_tiers
from lohan_fx.runtime.guards import ConsumedGradient
from lohan_fx.workload import Workload
from tests.models import loss_of, make
from tests.workloads import small_hardware

NUM_STEPS = 3


class Training(NamedTuple):
    """The user's side of a step."""

    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None

    def step(self) -> None:
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad()


def training_of(kind: str, model: nn.Module) -> Training:
    """AdamW with no decay on biases and norms and a live learning rate; Adam, also fused; SGD."""
    parameters = list(model.parameters())
    if kind in ("adam", "fused adam"):
        options = {"lr": 3e-3, "betas": (0.8, 0.99), "fused": kind == "fused adam" or None}
        return Training(torch.optim.Adam(parameters, **options))
    if kind == "sgd":
        return Training(torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01))
    decay = [p for p in parameters if p.dim() > 1]
    other = [p for p in parameters if p.dim() <= 1]
    groups = [{"params": decay}, {"params": other, "weight_decay": 0.0, "lr": 3e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    return Training(optimizer, scheduler)


class Snapshot(NamedTuple):
    """What one step must reproduce: its loss, and tensors by name.

    These are the parameters and buffers after the step, and the gradients of inputs (and of
    parameters, where the user gets them) before the optimizer's part.
    """

    loss: Tensor
    tensors: dict[str, Tensor]


def step(
    name: str, model: nn.Module, inputs: Mapping[str, Any], seed: int, finish: Callable[[], None]
) -> Snapshot:
    """One step; `finish` is the optimizer's part."""
    torch.manual_seed(seed)
    loss = loss_of(name, model(**inputs))
    loss.backward()
    tensors: dict[str, Tensor] = {}
    for key, value in inputs.items():
        if value.grad is not None:
            tensors[f"{key}.grad"] = value.grad
            value.grad = None
    given = {f"{k}.grad": p.grad for k, p in model.named_parameters() if p.grad is not None}
    tensors.update({k: g for k, g in given.items() if not isinstance(g, ConsumedGradient)})
    finish()
    tensors.update(model.named_parameters())
    tensors.update(model.named_buffers())
    return Snapshot(loss.detach(), {k: t.detach().clone() for k, t in tensors.items()})


@functools.cache
def eager(name: str, optimizer: str, num_steps: int = NUM_STEPS) -> tuple[Snapshot, ...]:
    """The steps in plain PyTorch, with seeds 0, 1, …"""
    model, inputs = make(name)
    training = training_of(optimizer, model)
    return tuple(step(name, model, inputs, seed, training.step) for seed in range(num_steps))


def identical(a: Tensor, b: Tensor) -> bool:
    """Equal in shape, dtype and bits."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    bits = [t.detach().contiguous().flatten().view(torch.uint8) for t in (a, b)]
    return torch.equal(*bits)


def assert_identical(found: Snapshot, wanted: Snapshot, *, gradients: bool = False) -> None:
    """`gradients`: whether parameters have a ``.grad`` (without ``optimizer=``)."""
    assert identical(found.loss, wanted.loss), (found.loss, wanted.loss)
    expected = {
        k: t
        for k, t in wanted.tensors.items()
        if gradients or not k.endswith(".grad") or k == "x.grad"
    }
    assert found.tensors.keys() == expected.keys()
    wrong = [k for k, t in expected.items() if not identical(found.tensors[k], t)]
    assert not wrong


def assert_same_weights(model: nn.Module, wanted: Snapshot) -> None:
    """Parameters and buffers are those after the step `wanted`."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    wrong = [k for k, t in found.items() if not identical(t, wanted.tensors[k])]
    assert found
    assert not wrong


def cpu_hardware(directory: Path, **changes: Any) -> HardwareProfile:
    """A small machine with `directory` as its SSD, whose rates make plans that do everything."""
    ssd = SsdDevice(
        path=str(directory), read_bytes_per_s=6e9, write_bytes_per_s=4e9, capacity_bytes=2**30
    )
    return small_hardware(**{"device_kind": "cpu", "ssds": (ssd,), **changes})


@dataclass(frozen=True)
class Squeezed:
    """A strategy under a tight device budget, or the next looser one if it has no plan for that.

    `room` is where the budget stands between what swapping everything needs (0.0) and what keeping
    everything needs (1.0). Without a squeeze, tests' models are so small that good strategies keep
    everything.
    """

    strategy: str
    room: float = 0.2

    def __call__(
        self,
        workload: Workload,
        hw: HardwareProfile,
        budget: MemoryBudget,
        options: PlannerOptions,
    ) -> Plan:
        def peak(action: Action) -> int:
            actions = dict.fromkeys(workload.residuals, action)
            choices = Choices(actions=actions, unit_tiers=unit_tiers(workload, hw, budget, options))
            made = draft(workload, hw, budget, options, choices, "probe", keep_tiny=False)
            return made.memory.peak_bytes

        least, most = peak("swap"), peak("keep")
        for room in (self.room, 0.4, 0.7):
            tight = MemoryBudget(
                device_bytes=least + int(room * (most - least)),
                host_bytes=budget.host_bytes,
                ssd_bytes=budget.ssd_bytes,
            )
            try:
                return make_plan(self.strategy, workload, hw, tight, options)
            except InsufficientMemoryError:
                continue
        return make_plan(self.strategy, workload, hw, budget, options)


@dataclass(frozen=True)
class WithCopies:
    """A strategy, with compute copies of SSD units in host memory: of all, or of every second."""

    strategy: str | Planner = Squeezed("swap-all", 0.0)
    every: int = 1

    def __call__(
        self,
        workload: Workload,
        hw: HardwareProfile,
        budget: MemoryBudget,
        options: PlannerOptions,
    ) -> Plan:
        if options.fixed_copies is None:
            units = [u.name for u in workload.units if u.has_separate_copy]
            options = replace(options, fixed_copies=units[:: self.every])
        return make_plan(self.strategy, workload, hw, budget, options)


_captured: dict[Any, Captured] = {}


def remember_captures(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let `lohan_fx.compile` trace each model once in this process: the first run traces.

    What is captured depends on the structure of the model and its inputs only; `name` stands for
    both, as far as the model's class and dtypes, and shapes and flags among the inputs, do not.
    """
    capture = lohan_fx.compiled.building.capture

    def once(model: nn.Module, args: Any, kwargs: Any, **options: Any) -> Captured:
        modes = tuple(m.training for m in model.modules())
        given = (*args, *kwargs.values())
        flags = [v for v in given if isinstance(v, bool)]
        shapes = tuple(v.shape for v in given if isinstance(v, Tensor))
        dtypes = frozenset(p.dtype for p in model.parameters())
        key = (name, type(model), modes, dtypes, shapes, *flags, repr(options))
        if key not in _captured:
            _captured[key] = capture(model, args, kwargs, **options)
        return _captured[key]

    monkeypatch.setattr(lohan_fx.compiled.building, "capture", once)


def model_threads() -> set[threading.Thread]:
    """Threads of models that are neither closed nor gone: none, between two tests."""
    return {t for t in threading.enumerate() if t.name.startswith("lohan_fx")}


def ended(threads: set[threading.Thread]) -> bool:
    """Whether these end within some seconds: finalizers tell threads to end, and join none."""
    until = time.monotonic() + 10
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


@contextmanager
def one_thread() -> Iterator[None]:
    """Tiny kernels are too small to share: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def alternating(*factors: Sequence[Any]) -> list[Any]:
    """All rows of a product for ``parametrize``; every second one in the default suite.

    So each value is there, and of three factors each pair of values; the other rows are slow. A
    tuple among the values is several arguments.
    """
    rows = []
    for row in itertools.product(*map(enumerate, factors)):
        values = [x for _, v in row for x in (v if isinstance(v, tuple) else (v,))]
        odd = sum(i for i, _ in row) % 2
        rows.append(pytest.param(*values, marks=pytest.mark.slow if odd else ()))
    return rows


def ids(rows: Sequence[Sequence[str]]) -> list[str]:
    return ["-".join(row) for row in rows]


def step_in_mixed_precision(
    masters: nn.Module, compute: nn.Module, inputs: Mapping[str, Tensor], optimizer: Optimizer
) -> Tensor:
    """One step as a user would write it in bfloat16: copies of the masters run, and their gradients
    become the masters'. Returns the loss. (Frozen parameters have none.)"""
    with torch.no_grad():
        for p, c in zip(masters.parameters(), compute.parameters(), strict=True):
            c.copy_(p)
    loss: Tensor = compute(inputs["x"].bfloat16(), inputs["y"])
    loss.backward()
    for p, c in zip(masters.parameters(), compute.parameters(), strict=True):
        assert (c.grad is not None) == p.requires_grad
        if c.grad is not None:
            p.grad, c.grad = c.grad.float(), None
    optimizer.step()
    return loss.detach()
