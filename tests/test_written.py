"""What backward reads may not be written in the meantime: an error, as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lohan_fx
from lohan_fx.errors import StepError
from tests.models import loss_of, make
from tests.training import cpu_hardware, identical

WIDTH = 8


class Net(nn.Module):
    """Returns a loss, a value that backward needs, and one that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))
        self.scale: Tensor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = (self.first(x) * self.scale.to(x.dtype)).tanh()
        result = self.last(hidden)
        return result.sum(), hidden, result


Write = Callable[[Net, Tensor, tuple[Tensor, ...]], Any]

NEEDED: dict[str, Write] = {
    "input 0": lambda _, x, __: x.mul_(2),
    "output 1": lambda _, __, out: out[1].detach().mul_(2),
    "buffer scale": lambda net, _, __: net.scale.mul_(2),
    "parameter last.weight": lambda net, _, __: net.last.weight.mul_(2),
}
"""What the error says → a write into what plain PyTorch's backward needs, too."""

NOT_NEEDED: dict[str, Write] = {
    "output": lambda _, __, out: out[2].detach().mul_(2),
    "bias": lambda net, _, __: net.first.bias.mul_(2),
    "first layer": lambda net, _, __: net.first.weight.mul_(2),  # its input needs no gradient
    "nothing": lambda *_: None,
}


def made(directory: Path | None = None, **options: Any) -> tuple[Any, Net, torch.optim.Optimizer]:
    """What is trained, its module, and its optimizer; plain PyTorch without a directory."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if directory is None:
        return net, net, optimizer
    hw = cpu_hardware(directory)
    model = lohan_fx.compile(net, hw=hw, optimizer=optimizer, outputs="all", **options)
    return model, net, optimizer


def batch(seed: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def step(model: Any, net: Net, optimizer: torch.optim.Optimizer, seed: int, write: Write) -> Tensor:
    x = batch(seed)
    out = model(x)
    with torch.no_grad():
        write(net, x, out)
    out[0].backward()
    optimizer.step()
    optimizer.zero_grad()
    loss: Tensor = out[0].detach()
    return loss


@pytest.mark.parametrize("states", ["device", "host", "ssd"])
@pytest.mark.parametrize("strategy", ["keep-all", "swap-all", "recompute-all"])
@pytest.mark.parametrize("what", NEEDED)
def test_a_backward_that_would_be_wrong_is_refused(
    tmp_path: Path, what: str, strategy: str, states: str
) -> None:
    """Plain PyTorch refuses it, too; and the next step is right."""
    write = NEEDED[what]
    plain, model = made(), made(tmp_path, strategy=strategy, states=states)
    for each in (plain, model):
        step(*each, 0, lambda *_: None)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(*plain, 1, write)
    plain[2].zero_grad()  # what ran of that backward
    with pytest.raises(StepError, match=f"^{what} was written in place between forward and backw"):
        step(*model, 1, write)
    for seed in (2, 3):
        assert identical(step(*model, seed, lambda *_: None), step(*plain, seed, lambda *_: None))
    for p, q in zip(model[1].parameters(), plain[1].parameters(), strict=True):
        assert identical(p, q)
    model[0].lohan.close()


@pytest.mark.parametrize("states", ["device", "host", "ssd"])
@pytest.mark.parametrize("what", NOT_NEEDED)
def test_what_backward_does_not_need_may_be_written(tmp_path: Path, what: str, states: str) -> None:
    write = NOT_NEEDED[what]
    plain, model = made(), made(tmp_path, strategy="keep-all", states=states)
    for seed in range(3):
        assert identical(step(*model, seed, write), step(*plain, seed, write))
    for p, q in zip(model[1].parameters(), plain[1].parameters(), strict=True):
        assert identical(p, q)
    model[0].lohan.close()


def test_of_several_forwards_each_has_its_own_count(tmp_path: Path) -> None:
    """The first forward's input is written before the second; the second's backward runs."""
    model, _, _ = made(tmp_path, strategy="keep-all", forwards=2)
    x, y = batch(0), batch(1)
    model.lohan.prepare(x)
    first = model(x)[0]
    x.mul_(2)
    second = model(y)[0]
    second.backward()
    with pytest.raises(StepError, match="input 0 was written"):
        first.backward()
    model.lohan.close()


@pytest.mark.parametrize(("strategy", "refused"), [("keep-all", False), ("recompute-all", True)])
def test_a_parameter_that_only_recomputation_reads_counts(
    tmp_path: Path, strategy: str, refused: bool
) -> None:
    """A bias makes what is recomputed; plain PyTorch's backward needs no bias."""
    net, inputs = make("gpt2")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    hw = cpu_hardware(tmp_path)
    model: Any = lohan_fx.compile(net, hw=hw, optimizer=optimizer, strategy=strategy)
    loss: Any = loss_of("gpt2", model(**inputs))
    name = "transformer.h.0.mlp.c_fc.bias"
    with torch.no_grad():
        net.get_parameter(name).mul_(2)
    expected = pytest.raises(StepError, match=f"^parameter {name} was written")
    with expected if refused else nullcontext():
        loss.backward()
        optimizer.step()
    model.lohan.close()


@pytest.mark.parametrize("schedule", ["overlapped", "speculative", "serial"])
def test_only_the_users_writes_count(tmp_path: Path, schedule: str) -> None:
    """Updates, copies and moves of the runtime's own are none, also in mixed precision."""
    clip = {"clip_grad_norm": 1e6} if schedule == "speculative" else {}
    options = {"dtype": "bf16", "states": "host", "schedule": schedule, **clip}
    model, net, optimizer = made(tmp_path, **options)

    def write(*_: Any) -> None:
        model.lohan.sync()
        net.last.weight.mul_(2)

    for seed in range(4):
        step(model, net, optimizer, seed, lambda *_: None)
    with pytest.raises(StepError, match=r"parameter last\.weight"):
        step(model, net, optimizer, 5, write)
    step(model, net, optimizer, 6, lambda *_: None)
    model.lohan.close()
