"""What backward reads may not be written in the meantime: an error, as in plain PyTorch."""

from __future__ import annotations

import itertools
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

PLAIN: tuple[type[Exception], str] = (RuntimeError, "modified by an inplace operation")
"""What plain PyTorch raises, and says."""


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

QUICK = {("keep-all", "device"), ("swap-all", "ssd"), ("recompute-all", "host")}

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


@pytest.mark.parametrize(
    ("strategy", "states"),
    [
        pytest.param(*row, marks=() if row in QUICK else pytest.mark.slow)
        for row in itertools.product(
            ("keep-all", "swap-all", "recompute-all"), ("device", "host", "ssd")
        )
    ],
)
@pytest.mark.parametrize("what", NEEDED)
def test_a_backward_that_would_be_wrong_is_refused(
    tmp_path: Path, what: str, strategy: str, states: str
) -> None:
    """Plain PyTorch refuses it, too; and the next step is right."""
    write = NEEDED[what]
    plain, model = made(), made(tmp_path, strategy=strategy, states=states)
    for each in (plain, model):
        step(*each, 0, lambda *_: None)
    error, text = PLAIN
    with pytest.raises(error, match=text):
        step(*plain, 1, write)
    plain[2].zero_grad()  # what ran of that backward
    with pytest.raises(StepError, match=f"^{what} was written between forward and backw"):
        step(*model, 1, write)
    for seed in (2, 3):
        assert identical(step(*model, seed, lambda *_: None), step(*plain, seed, lambda *_: None))
    for p, q in zip(model[1].parameters(), plain[1].parameters(), strict=True):
        assert identical(p, q)
    model[0].lohan.close()


@pytest.mark.parametrize("states", ["host", "ssd"])
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


# -- what no version counts ------------------------------------------------------------------------


@pytest.mark.parametrize("states", ["device", "ssd"])
@pytest.mark.parametrize(
    "options",
    [
        {"gradients": "kept", "schedule": "serial"},
        {"gradients": "kept", "schedule": "deferred"},
        {"forwards": 2},
        {"forwards": 2, "schedule": "overlapped"},
    ],
    ids=str,
)
def test_no_step_between_a_forward_and_its_backward(
    tmp_path: Path, options: dict[str, Any], states: str
) -> None:
    """Updates write into parameters, also where no version counts it."""
    plain, model = made(), made(tmp_path, states=states, **options)
    for each in (plain, model):
        trained, _, optimizer = each
        first, second = trained(batch(0))[0], None
        if "forwards" in options:
            second = trained(batch(1))[0]
            second.backward()
        else:
            first.backward()
            optimizer.step()
            optimizer.zero_grad()
            first, second = trained(batch(1))[0], trained
            for p in trained.parameters():
                p.grad = torch.ones_like(p)
        optimizer.step()
        error, text = (StepError, "^weights were updated") if each is model else PLAIN
        with pytest.raises(error, match=text):
            first.backward()
    model[0].lohan.close()


def test_no_load_between_a_forward_and_its_backward(tmp_path: Path) -> None:
    model, net, optimizer = made(tmp_path / "ssd", strategy="keep-all")
    step(model, net, optimizer, 0, lambda *_: None)
    lohan_fx.save(model, tmp_path / "saved")
    loss = model(batch(1))[0]
    lohan_fx.load(model, tmp_path / "saved")
    with pytest.raises(StepError, match="weights were updated, loaded or written between"):
        loss.backward()
    step(model, net, optimizer, 2, lambda *_: None)
    model.lohan.close()


@pytest.mark.parametrize("strategy", ["keep-all", "recompute-all"])
@pytest.mark.parametrize("forwards", [1, 2])
def test_a_buffer_that_is_another_by_then(tmp_path: Path, forwards: int, strategy: str) -> None:
    """Not written: backward reads the one that forward read."""

    def rebind(net: Net, *_: Any) -> None:
        net.scale = net.scale * 3

    plain, model = made(), made(tmp_path, strategy=strategy, forwards=forwards)
    for seed in range(3):
        assert identical(step(*model, seed, rebind), step(*plain, seed, rebind))
    for p, q in zip(model[1].parameters(), plain[1].parameters(), strict=True):
        assert identical(p, q)
    model[0].lohan.close()


FACTOR = torch.full((WIDTH,), 3.0)


class Scaled(nn.Module):
    """Reads a tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (self.linear(x) * FACTOR).sum()
        return loss


def test_a_constant_that_was_written(tmp_path: Path) -> None:
    net = Scaled()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model: Any = lohan_fx.compile(net, hw=cpu_hardware(tmp_path), optimizer=optimizer)
    for each, (error, text) in (
        (Scaled(), PLAIN),
        (model, (StepError, r"^constant \w+ of forward")),
    ):
        loss = each(batch(0))
        FACTOR.mul_(1)
        with pytest.raises(error, match=text):
            loss.backward()
    model.lohan.close()


def test_inference_tensors_count_nothing(tmp_path: Path) -> None:
    """They may be given, also where recomputation reads them."""
    with torch.inference_mode():
        x = batch(0)
    for strategy in ("keep-all", "recompute-all"):
        model, net, _ = made(tmp_path, strategy=strategy)
        net.first.requires_grad_(False)
        model(x)[0].backward()
        model.lohan.close()


def test_a_refused_forward_holds_nothing(tmp_path: Path) -> None:
    model, net, optimizer = made(tmp_path, strategy="keep-all", forwards=2)
    with pytest.raises(StepError, match="input 0 was written"):
        step(model, net, optimizer, 0, NEEDED["input 0"])
    assert not model.lohan.program().executor.waiting
    for seed in range(3):
        step(model, net, optimizer, seed, lambda *_: None)
    model.lohan.close()
