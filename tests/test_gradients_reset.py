"""``.grad`` that is reset between backward and optimizer.step(): the step is left out, as in plain
PyTorch, or refused by name."""

from __future__ import annotations

import copy
import errno
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lohan_fx.errors import StepError, StorageError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.runtime.ssd import striped_file
from tests.casting import NEVER
from tests.faults import Fault, Faults
from tests.loops import AT_ONCE, assert_same, compiled, updater_of
from tests.training import identical, remember_captures

WIDTH = 8

WHOLE: list[dict[str, Any]] = [
    {"schedule": "serial"},
    {"schedule": "serial", "accumulate": 2},
    {"schedule": "deferred", "clip_grad_norm": NEVER},
    {"schedule": "deferred", "clip_grad_norm": NEVER, "accumulate": 2},
    {"schedule": "speculative", "clip_grad_norm": NEVER},
    {"schedule": "speculative", "clip_grad_norm": NEVER, "accumulate": 2},
    {"gradients": "kept"},
]
"""Updates begin in step()."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.last(torch.tanh(self.first(x))), y)


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is traced once."""
    remember_captures(monkeypatch, "gradients reset")


def pair() -> tuple[Net, Net]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        plain = Net()
    return plain, copy.deepcopy(plain)


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def batch(seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(4, WIDTH, generator=random)
    return {"x": x, "y": torch.randint(WIDTH, (4,), generator=random)}


def by_optimizer(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def by_model(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net.zero_grad()


def by_hand(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in net.parameters():
        p.grad = None


@pytest.mark.parametrize("states", ["host", "ssd"])
@pytest.mark.parametrize("reset", [by_optimizer, by_model, by_hand])
@pytest.mark.parametrize("options", WHOLE, ids=str)
def test_a_step_is_left_out(
    options: dict[str, Any],
    reset: Callable[[nn.Module, torch.optim.Optimizer], None],
    states: str,
    hw: HardwareProfile,
) -> None:
    plain, net = pair()
    its, optimizer = adam(plain), adam(net)
    model = compiled(net, optimizer, hw, states=states, **options)
    for seed in range(4):
        for k in range(options.get("accumulate", 1)):
            wanted, found = plain(**batch(10 * seed + k)), model(**batch(10 * seed + k))
            assert identical(found, wanted)
            wanted.backward()
            found.backward()
        before = net.last.bias.detach().clone()
        for module, used in ((plain, its), (net, optimizer)):
            if seed == 1:
                reset(module, used)
            used.step()
        model.lohan.sync()
        assert identical(net.last.bias.detach(), before) == (seed == 1)
        for used in (its, optimizer):
            used.zero_grad()
    assert model.lohan.skipped_steps == 0
    model.lohan.close()
    assert_same(net, optimizer, plain, its)


@pytest.mark.parametrize("reset", [by_optimizer, by_hand])
@pytest.mark.parametrize("options", AT_ONCE, ids=str)
def test_backward_has_begun_to_update(
    options: dict[str, Any],
    reset: Callable[[nn.Module, torch.optim.Optimizer], None],
    hw: HardwareProfile,
) -> None:
    """The step is done, and says so; training goes on as if nobody had reset anything."""
    plain, net = pair()
    its, optimizer = adam(plain), adam(net)
    model = compiled(net, optimizer, hw, states="host", **options)
    for seed in range(3):
        for k in range(options.get("accumulate", 1)):
            plain(**batch(10 * seed + k)).backward()
            model(**batch(10 * seed + k)).backward()
        its.step()
        if seed == 1:
            reset(net, optimizer)
            with pytest.raises(StepError, match=r"was reset between backward and .* step is done"):
                optimizer.step()
        else:
            optimizer.step()
        its.zero_grad()
        optimizer.zero_grad()
    model.lohan.close()
    assert_same(net, optimizer, plain, its)


def one(net: Net, optimizer: torch.optim.Optimizer) -> None:
    net.first.bias.grad = None


def zeros(net: Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def another(net: Net, optimizer: torch.optim.Optimizer) -> None:
    net.first.bias.grad = torch.ones(WIDTH)


@pytest.mark.parametrize(
    ("change", "did"), [(one, "reset"), (zeros, "replaced"), (another, "repl")]
)
@pytest.mark.parametrize("options", [*WHOLE[:-1], *AT_ONCE], ids=str)
def test_what_cannot_be_honoured(
    options: dict[str, Any],
    change: Callable[[Net, torch.optim.Optimizer], None],
    did: str,
    hw: HardwareProfile,
) -> None:
    """Refused by name. Where no update has begun zero_grad() still leaves the step out."""
    _, net = pair()
    optimizer = adam(net)
    model = compiled(net, optimizer, hw, states="host", **options)
    for k in range(options.get("accumulate", 1)):
        model(**batch(k)).backward()
    change(net, optimizer)
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    with pytest.raises(StepError, match=rf"the \.grad of parameter first\.\w+ was {did}"):
        optimizer.step()
    optimizer.zero_grad()
    if options in WHOLE:
        optimizer.step()
        assert all(identical(p.detach(), before[n]) for n, p in net.named_parameters())
    for k in range(options.get("accumulate", 1)):
        model(**batch(10 + k)).backward()
    optimizer.step()
    model.lohan.close()
    assert not identical(net.first.bias.detach(), before["first.bias"])


@pytest.mark.parametrize("more", [{}, {"skip_nonfinite": True}], ids=str)
def test_a_step_that_some_units_have_taken(
    more: dict[str, Any], hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be left out any more: the next step() ends it."""
    monkeypatch.setattr(striped_file, "_RETRIES_S", (0.001,))
    faults = Faults()
    faults.install(monkeypatch)
    plain, net = pair()
    its, optimizer = adam(plain), adam(net)
    model = compiled(net, optimizer, hw, states="ssd", schedule="serial", **more)

    def backward(seed: int) -> None:
        plain(**batch(seed)).backward()
        model(**batch(seed)).backward()

    reads = 0
    for seed in range(2):
        backward(seed)
        before = faults.counts["preadv"]
        for used in (its, optimizer):
            used.step()
            used.zero_grad()
        reads = faults.counts["preadv"] - before
    backward(2)
    faults.fault = Fault("preadv", faults.counts["preadv"] + reads, code=errno.EIO)
    with pytest.raises(StorageError):
        optimizer.step()
    faults.fault = None
    assert updater_of(model)._updates.begun
    optimizer.zero_grad()
    optimizer.step()
    its.step()
    its.zero_grad()
    backward(3)
    its.step()
    optimizer.step()
    model.lohan.close()
    assert_same(net, optimizer, plain, its)
