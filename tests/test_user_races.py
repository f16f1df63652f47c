"""What user code does to weights while a forward runs on the device: torch orders what happens on
the device, but weights in host memory are written at once. Streams are simulated, and host memory
is watched; `test_gpu_writes` has the same on a CUDA device, by what comes out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import lohan_fx
from lohan_fx.api import LohanModule
from lohan_fx.plan import LATE
from lohan_fx.runtime.engine import Engine
from lohan_fx.runtime.executor import Executor
from lohan_fx.runtime.lanes import Lanes
from lohan_fx.runtime.states import ModelStates
from tests.loops import compiled
from tests.simulated_streams import SimulatedRaces, SimulatedStreams
from tests.stream_races import StreamRaces
from tests.test_stream_races import assert_ordered, direct, simulated, without
from tests.test_writes_within_steps import WHOLE, Net, batch, weights
from tests.training import cpu_hardware

__all__ = ["simulated"]  # a fixture

Between = Callable[[LohanModule, Net], object]


@torch.no_grad()
def evaluated(model: LohanModule, net: Net) -> None:
    given = batch(7)
    model(given["x"].to(net.first.weight.dtype), given["y"])


@torch.no_grad()
def in_place(_: LohanModule, net: Net) -> None:
    """Backward reads no bias."""
    net.last.bias.mul_(1.5)


@torch.no_grad()
def whole(_: LohanModule, net: Net) -> None:
    for p in net.parameters():
        p.mul_(1.5)


@torch.no_grad()
def frozen(_: LohanModule, net: Net) -> None:
    """Forward and backward read it."""
    net.norm.weight.mul_(1.5)


def other_memory(_: LohanModule, net: Net) -> None:
    net.last.bias.data = net.last.bias.detach() * 1.5


def uncounted(model: LohanModule, net: Net) -> None:
    """Written where nobody counts: all copies are compared, and made anew."""
    net.last.bias.data.mul_(1.5)
    model.lohan.take_over()


@torch.no_grad()
def and_evaluated(model: LohanModule, net: Net) -> None:
    in_place(model, net)
    evaluated(model, net)


WRITES: list[Between] = [in_place, other_memory, uncounted, and_evaluated]
MODELS: dict[str, tuple[torch.dtype, Any]] = {
    "float32": (torch.float32, None),
    "mixed": (torch.float32, "bf16"),
    "bf16": (torch.bfloat16, "bf16"),
}
At = Literal["backward", "step", "next"]


def made(
    directory: Path, kind: str, *, freeze: bool = False, **options: Any
) -> tuple[LohanModule, Net, torch.optim.Optimizer]:
    shown, dtype = MODELS[kind]
    net = weights().to(shown)
    net.norm.requires_grad_(not freeze)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    options = {"states": "host", "dtype": dtype, "fused": False, "refine": False, **options}
    return compiled(net, optimizer, cpu_hardware(directory), **options), net, optimizer


def trained(
    between: Between,
    at: At,
    streams: SimulatedStreams,
    directory: Path,
    kind: str = "float32",
    **options: Any,
) -> StreamRaces:
    """A step, and two that are watched, with this before the backward of each, its optimizer.step()
    or the next forward."""
    model, net, optimizer = made(directory, kind, **options)

    def step() -> None:
        given = batch(1)
        loss = model(given["x"].to(MODELS[kind][0]), given["y"])
        if at == "backward":
            between(model, net)
        loss.backward()
        if at == "step":
            between(model, net)
        optimizer.step()
        if options.get("schedule") in LATE:
            model.lohan.sync()
        if at == "next":
            between(model, net)

    try:
        step()
        model.lohan.sync()
        with SimulatedRaces(streams, host=True) as watched:
            step()
            step()
            model.lohan.sync()
    finally:
        model.lohan.close()
    return watched


@pytest.mark.parametrize("between", WRITES)
@pytest.mark.parametrize("kind", MODELS)
def test_forward_has_read_what_is_written(
    kind: str, between: Between, simulated: SimulatedStreams, tmp_path: Path
) -> None:
    assert_ordered(trained(between, "backward", simulated, tmp_path, kind, forwards=2))


@pytest.mark.parametrize(
    "options", [each for each in WHOLE if each.get("schedule") != "speculative"], ids=str
)
def test_backward_has_read_what_is_written(
    options: dict[str, Any], simulated: SimulatedStreams, tmp_path: Path
) -> None:
    """(Trials read beside the write; those that did are dropped.)"""
    assert_ordered(trained(whole, "step", simulated, tmp_path, **options))


EARLY_OR_LATE = ["optimized", "overlapped", "deferred"]


@pytest.mark.parametrize("schedule", EARLY_OR_LATE)
def test_what_no_update_waits_for(
    schedule: str, simulated: SimulatedStreams, tmp_path: Path
) -> None:
    assert_ordered(trained(frozen, "step", simulated, tmp_path, freeze=True, schedule=schedule))


@pytest.mark.parametrize("kind", MODELS)
def test_checkpoints_come_after_evaluations(
    kind: str, simulated: SimulatedStreams, tmp_path: Path
) -> None:
    def between(model: LohanModule, net: Net) -> None:
        evaluated(model, net)
        if not (tmp_path / "kept").exists():
            lohan_fx.save(model, tmp_path / "kept")
        lohan_fx.load(model, tmp_path / "kept")

    assert_ordered(trained(between, "next", simulated, tmp_path, kind))


@pytest.mark.parametrize(("kind", "waits"), [("float32", 1), ("mixed", 0)])
def test_units_that_are_read_where_they_lie(
    kind: str,
    waits: int,
    simulated: SimulatedStreams,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forward and backward wait for compute, if parameters show what it reads there. (Ops that read
    it look like the host's to the checker of races.)"""
    settle, settled = Lanes.settle, []

    def counted(lanes: Lanes) -> None:
        settled.append(lanes)
        settle(lanes)

    monkeypatch.setattr(Lanes, "settle", counted)
    model, _, optimizer = made(tmp_path, kind, strategy=direct)
    given = batch(1)
    for _ in range(2):
        settled.clear()
        loss = model(*given.values())
        assert len(settled) == waits
        loss.backward()
        assert len(settled) == 2 * waits
        optimizer.step()
    model.lohan.close()


@pytest.mark.parametrize(
    ("owner", "name", "kind", "between", "at"),
    [
        pytest.param(Engine, "settle_units", "float32", in_place, "backward", id="user code"),
        pytest.param(ModelStates, "settle", "mixed", uncounted, "backward", id="copies"),
    ],
)
def test_planted_races(
    owner: type,
    name: str,
    kind: str,
    between: Between,
    at: At,
    simulated: SimulatedStreams,
    tmp_path: Path,
) -> None:
    with without(owner, name):
        watched = trained(between, at, simulated, tmp_path, kind, forwards=2)
    assert watched.races()


@pytest.mark.parametrize("schedule", EARLY_OR_LATE)
def test_planted_races_of_backward(
    schedule: str,
    simulated: SimulatedStreams,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forward waits, and backward does not."""
    backward = Executor.backward

    def silent(*args: Any) -> Any:
        with without(Engine, "settle_units"):
            return backward(*args)

    monkeypatch.setattr(Executor, "backward", silent)
    options: dict[str, Any] = {"freeze": True, "schedule": schedule}
    assert trained(frozen, "step", simulated, tmp_path, **options).races()
