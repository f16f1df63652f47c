"""What user code does within a step, while the device is far behind: the results are those of a
device that is waited for before and after, to the bit, and plain PyTorch's to rounding.

Run with ``pytest -m gpu``. (`test_user_races` has the same without a device, by what is ordered.)
"""

from __future__ import annotations

import itertools
import operator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import lohan_fx
from lohan_fx.api import LohanModule
from lohan_fx.runtime.engine import Engine
from tests.test_stream_races import direct
from tests.training import Squeezed, cpu_hardware, identical, remember_captures

pytestmark = pytest.mark.gpu

WIDTH, DEPTH = 1024, 6
NUM_STEPS = 3

At = Literal["backward", "step", "next", "evaluated", "zeroed"]
MODELS: dict[str, tuple[torch.dtype, Any]] = {
    "float32": (torch.float32, None),
    "mixed": (torch.float32, "bf16"),
    "bf16": (torch.bfloat16, "bf16"),
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "serial": {"schedule": "serial"},
    "overlapped": {"schedule": "overlapped"},
    "deferred": {"schedule": "deferred", "clip_grad_norm": 1e9},
    "speculative": {"schedule": "speculative", "clip_grad_norm": 1e9},
}


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are traced once."""
    remember_captures(monkeypatch, "writes on a device")


class Net(nn.Module):
    """Backward reads no bias. The first layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.layers[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean() * 100


def weights() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Net()


@torch.no_grad()
def write(net: Net, at: At) -> None:
    """Into biases of layers that are still to be fetched; or into what backward has read."""
    layers = list(net.layers)
    if at in ("backward", "evaluated"):
        layers[-1].bias.fill_(0.5)
        layers[-2].bias.data = layers[-2].bias.detach() + 0.25
    elif at == "step":
        for p in net.parameters():
            p.mul_(1.25)
    elif at == "next":  # no update touches it
        layers[0].weight.mul_(1.25)


def occupied() -> None:
    """Keep the device busy for some hundred milliseconds."""
    a = torch.ones(8192, 8192, device="cuda")
    for _ in range(10):
        a = a @ a / 8192


def trained(
    model: Any, net: Net, optimizer: torch.optim.Optimizer, at: At, *, busy: bool
) -> list[Tensor]:
    """Losses and weights."""
    dtype = net.layers[0].weight.dtype
    found = []

    def now() -> None:
        if not busy:
            torch.cuda.synchronize()

    for seed in range(NUM_STEPS):
        random = torch.Generator().manual_seed(seed)
        x = torch.randn(64, WIDTH, generator=random).to("cuda", dtype)
        now()
        if busy:
            occupied()
        loss = model(x)
        now()
        if at == "backward":
            write(net, at)
        if at == "evaluated":
            write(net, at)
            with torch.no_grad():
                found.append(model(x))
        now()
        loss.backward()
        now()
        if at == "step":
            write(net, at)
        if at == "zeroed" and seed == 1:
            optimizer.zero_grad()
        now()
        optimizer.step()
        optimizer.zero_grad()
        now()
        if at in ("step", "next") and isinstance(model, LohanModule):
            model.lohan.sync()  # late schedules may be behind
        if at == "next":
            write(net, at)
        found.append(loss.detach())
    if isinstance(model, LohanModule):
        model.lohan.close()
    return [t.detach().float().cpu() for t in (*found, *net.parameters())]


def optimizer_of(net: Net) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def ours(directory: Path, at: At, kind: str, *, busy: bool = True, **options: Any) -> list[Tensor]:
    shown, dtype = MODELS[kind]
    net = weights().to(shown)
    optimizer = optimizer_of(net)
    model = lohan_fx.compile(
        net,
        hw=cpu_hardware(directory, device_kind="cuda"),
        optimizer=optimizer,
        dtype=dtype,
        forwards=2,
        fused=False,
        refine=False,
        **{"strategy": Squeezed("swap-all"), "outputs": "all", **options},
    )
    return trained(model, net, optimizer, at, busy=busy)


def plain(at: At) -> list[Tensor]:
    net = weights().cuda()
    return trained(net, net, optimizer_of(net), at, busy=False)


def check(directory: Path, at: At, kind: str, **options: Any) -> None:
    found = ours(directory, at, kind, **options)
    waited = ours(directory, at, kind, busy=False, **options)
    assert all(map(identical, found, waited))
    if kind == "float32":
        for a, b in zip(found, plain(at), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("at", ["backward", "evaluated"])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("states", ["host", "ssd", "device"])
def test_between_forward_and_backward(states: str, kind: str, at: At, tmp_path: Path) -> None:
    schedule = "overlapped" if at == "backward" else "optimized"
    check(tmp_path, at, kind, states=states, schedule=schedule)


@pytest.mark.parametrize("at", ["backward", "next", "zeroed"])
@pytest.mark.parametrize(
    ("schedule", "kind"),
    [
        ("serial", "float32"),
        ("overlapped", "mixed"),
        ("deferred", "float32"),
        ("speculative", "mixed"),
    ],
)
def test_with_schedules(schedule: str, kind: str, at: At, tmp_path: Path) -> None:
    if (at, schedule) == ("zeroed", "overlapped"):
        at = "next"  # zero_grad() is refused when backward has updated
    check(tmp_path, at, kind, states="host", **SCHEDULES[schedule])


@pytest.mark.parametrize(
    ("schedule", "kind"),
    [("serial", "float32"), ("deferred", "mixed"), ("speculative", "bf16")],
)
@pytest.mark.parametrize("states", ["host", "ssd"])
def test_between_backward_and_step(states: str, schedule: str, kind: str, tmp_path: Path) -> None:
    if schedule == "speculative" and states == "ssd":
        states = "host"  # its second copies are there
    check(tmp_path, "step", kind, states=states, **SCHEDULES[schedule])


@pytest.mark.parametrize("at", ["backward", "step"])
def test_units_that_are_read_where_they_lie(at: At, tmp_path: Path) -> None:
    check(tmp_path, at, "float32", states="host", strategy=direct, schedule="serial")


def test_without_waits_forward_reads_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other tests can fail: the device is far enough behind."""
    waited = ours(tmp_path, "backward", "float32", busy=False, states="host")
    monkeypatch.setattr(Engine, "settle_units", lambda _: None)
    found = ours(tmp_path, "backward", "float32", states="host")
    assert not identical(found[0], waited[0])


@pytest.mark.parametrize("states", ["host", "ssd", "device"])
def test_recorded_waits_end_with_their_transfers(states: str, tmp_path: Path) -> None:
    """Compute's spans follow each other; each wait ends no earlier than what it waits for."""
    net = weights()
    optimizer = optimizer_of(net)
    model = lohan_fx.compile(
        net,
        hw=cpu_hardware(tmp_path, device_kind="cuda"),
        optimizer=optimizer,
        dtype=None,
        strategy=Squeezed("swap-all"),
        states=states,
        fused=False,
        refine=False,
    )
    assert isinstance(model, LohanModule)
    x = torch.randn(64, WIDTH, device="cuda")

    def step() -> None:
        model(x).backward()
        optimizer.step()

    step()
    with model.lohan.record() as recorder:
        step()
    timeline = recorder.timeline("recorded")
    planned = model.plan.prediction
    model.lohan.close()
    assert timeline.traffic.h2d_bytes == planned.h2d_bytes
    assert timeline.traffic.d2h_bytes == planned.d2h_bytes
    gpu = sorted(timeline.by_lane["gpu"], key=lambda s: (s.start_s, s.end_s))
    assert all(a.end_s <= b.start_s + 1e-7 for a, b in itertools.pairwise(gpu))
    assert sum(s.kind == "compute" for s in gpu) > DEPTH
    waits = [s for s in gpu if s.kind == "wait_unit"]
    if states == "device":
        assert not waits
        assert sum(s.kind == "update" for s in gpu) == DEPTH - 1
        return
    fetches = [s for s in timeline.by_lane["h2d"] if s.kind == "fetch_unit"]
    key = operator.attrgetter("phase", "name", "start_s")
    assert waits
    for wait, fetch in zip(sorted(waits, key=key), sorted(fetches, key=key), strict=True):
        assert (wait.phase, wait.name) == (fetch.phase, fetch.name)
        assert wait.end_s >= fetch.end_s - 1e-7
