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
from lohan_fx.runtime.engine import Engine
from lohan_fx.runtime.states import ModelStates
from tests.loops import compiled
from tests.simulated_streams import SimulatedRaces, SimulatedStreams
from tests.stream_races import StreamRaces
from tests.test_stream_races import assert_ordered, simulated, without
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
    net.first.weight.mul_(1.5)


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


def trained(
    between: Between,
    at: At,
    streams: SimulatedStreams,
    directory: Path,
    kind: str = "float32",
    *,
    freeze: bool = False,
    **options: Any,
) -> StreamRaces:
    """A step, and two that are watched, with this before the backward of each, its optimizer.step()
    or the next forward."""
    shown, dtype = MODELS[kind]
    net = weights().to(shown)
    net.first.requires_grad_(not freeze)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    options = {"states": "host", "dtype": dtype, "fused": False, "refine": False, **options}
    model = compiled(net, optimizer, cpu_hardware(directory), **options)

    def step() -> None:
        given = batch(1)
        loss = model(given["x"].to(shown), given["y"])
        if at == "backward":
            between(model, net)
        loss.backward()
        if at == "step":
            between(model, net)
        optimizer.step()
        if at != "backward":
            model.lohan.sync()
        if at == "next":
            between(model, net)

    try:
        step()
        model.lohan.sync()
        with SimulatedRaces(streams, host=options["states"] == "host") as watched:
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


@pytest.mark.parametrize("at", ["step", "next"])
@pytest.mark.parametrize("schedule", ["optimized", "overlapped", "deferred"])
def test_what_no_update_waits_for(
    schedule: str, at: At, simulated: SimulatedStreams, tmp_path: Path
) -> None:
    assert_ordered(trained(frozen, at, simulated, tmp_path, freeze=True, schedule=schedule))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("states", ["host", "ssd"])
def test_checkpoints_come_after_evaluations(
    states: str, kind: str, simulated: SimulatedStreams, tmp_path: Path
) -> None:
    def between(model: LohanModule, net: Net) -> None:
        evaluated(model, net)
        if not (tmp_path / "kept").exists():
            lohan_fx.save(model, tmp_path / "kept")
        lohan_fx.load(model, tmp_path / "kept")

    assert_ordered(trained(between, "next", simulated, tmp_path, kind, states=states))


@pytest.mark.parametrize(
    ("owner", "name", "kind", "between"),
    [
        pytest.param(Engine, "settle_units", "float32", in_place, id="user code does not wait"),
        pytest.param(ModelStates, "settle", "mixed", uncounted, id="copies are made at once"),
    ],
)
def test_planted_races(
    owner: type, name: str, kind: str, between: Between, simulated: SimulatedStreams, tmp_path: Path
) -> None:
    with without(owner, name):
        watched = trained(between, "backward", simulated, tmp_path, kind, forwards=2)
    assert watched.races()
