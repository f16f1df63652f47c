"""Stop and resume: states in torch.optim's own layout, in and out of a compiled model."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lohan_fx
from lohan_fx.errors import LohanError, StepError
from lohan_fx.planners import names
from tests.training import alternating, cpu_hardware, remember_captures

BUDGET = {"device": "3MiB", "host": "64MiB", "ssd": "64MiB"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(nn.functional.gelu(self.up(x)))
        return x + y


@pytest.fixture(autouse=True)
def one_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """All models here are alike, and so are their inputs."""
    remember_captures(monkeypatch, "resumed")


def make() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)


def compiled(tmp_path: Path, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model, optimizer = make()
    hw = cpu_hardware(tmp_path)
    options = {"strategy": "swap-all", "memory": BUDGET, **options}
    made = lohan_fx.compile(model, hw=hw, optimizer=optimizer, **options)
    return made, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    x = torch.linspace(-1, 1, 64 * 64).view(64, 64)
    losses = []
    for _ in range(steps):
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def saved(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    assert len(file.getvalue()) < 2**21, "each tensor has a storage of its own"
    file.seek(0)
    return torch.load(file)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("dtype", "states", "schedule"),
    alternating((None, "bf16"), ("device", "host", "ssd"), ("serial", "optimized", "overlapped")),
)
def test_a_resumed_run_is_the_same_run(
    states: Any, schedule: Any, dtype: Any, tmp_path: Path
) -> None:
    """Also onto another tier and strategy, into a model that has run, and into plain PyTorch."""
    model, optimizer = compiled(
        tmp_path, strategy="recompute-all", states=states, schedule=schedule, dtype=dtype
    )
    train(model, optimizer, 2)
    weights, state = saved(model, optimizer)
    assert not optimizer.state, "the states are lent for the time of state_dict() only"
    assert len(state["state"]) == len(list(model.parameters()))
    rest = train(model, optimizer, 2)
    model.lohan.close()
    other, its = compiled(tmp_path, strategy="swap-all", states="host", dtype=dtype)
    train(other, its, 1)
    other.load_state_dict(weights)
    its.load_state_dict(copy.deepcopy(state))
    assert train(other, its, 2) == rest
    other.lohan.close()
    if dtype is None:
        plain, its = make()
        plain.load_state_dict(weights)
        its.load_state_dict(state)
        assert train(plain, its, 2) == rest


def test_a_plain_run_goes_on_compiled(tmp_path: Path) -> None:
    plain, its = make()
    train(plain, its, 2)
    weights, state = saved(plain, its)
    rest = train(plain, its, 2)
    model, optimizer = compiled(tmp_path)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    assert train(model, optimizer, 2) == rest
    model.lohan.close()


QUICK = ("keep-all", "swap-all", "recompute-all", "lohan", "random", "lohan-resident", "pareto")


@pytest.mark.parametrize(
    "strategy", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in names()]
)
def test_evaluation_between_steps(strategy: str, tmp_path: Path) -> None:
    """A program without backward, whose units stay where training put them."""
    plain, its = make()
    model, optimizer = compiled(tmp_path, strategy=strategy)
    x = torch.linspace(0, 1, 64 * 64).view(64, 64)
    for _ in range(2):
        assert train(plain, its, 1) == train(model, optimizer, 1)
        with torch.no_grad():
            assert torch.equal(model.eval()(x), plain.eval()(x))
        model.train()
        plain.train()
    model.lohan.close()


def test_replaced_layers_and_foreign_optimizers_are_refused(tmp_path: Path) -> None:
    model, optimizer = compiled(tmp_path)
    train(model, optimizer, 1)
    model[1] = Block()
    for rows in (64, 32):  # a program is there, or would be made
        with pytest.raises(StepError, match=r"1\.up\.weight is another tensor .*close\(\)"):
            model(torch.ones(rows, 64))
    model.lohan.close()
    _, foreign = make()
    with pytest.raises(LohanError, match="no parameter of the Sequential is in the optimizer"):
        lohan_fx.compile(make()[0], hw=cpu_hardware(tmp_path), optimizer=foreign)


@pytest.mark.parametrize("call", ["same", "another shape", "evaluation", "prepare"])
def test_writes_beside_running_updates_are_refused(call: str, tmp_path: Path) -> None:
    """Also by a call that would make a program first, and wait for the updates with that."""
    model, optimizer = compiled(tmp_path, schedule="overlapped", states="host")
    train(model, optimizer, 1)
    with torch.no_grad():
        next(iter(optimizer.param_groups[0]["params"])).zero_()
    other = torch.ones(32, 64)
    calls = {
        "same": lambda: train(model, optimizer, 1),
        "another shape": lambda: model(other),
        "evaluation": torch.no_grad()(lambda: model(other)),
        "prepare": lambda: model.lohan.prepare(other),
    }
    for _ in range(2):  # until it is mended
        with pytest.raises(StepError, match=r"written while updates .*sync"):
            calls[call]()
    assert len(model.lohan.programs) == 1
    model.lohan.sync()
    calls[call]()
    train(model, optimizer, 1)
    model.lohan.close()


@pytest.mark.parametrize(
    ("schedule", "states"),
    [
        ("serial", "host"),
        ("overlapped", "host"),
        ("optimized", "device"),
        ("optimized", "host"),
        ("optimized", "ssd"),
    ],
)
def test_states_in_the_middle_of_a_step_are_refused(
    schedule: Any, states: Any, tmp_path: Path
) -> None:
    """And nothing has happened."""
    plain = make()
    model, optimizer = compiled(tmp_path, schedule=schedule, states=states)
    for each in (plain, (model, optimizer)):
        train(*each, 1)
    state, weights = optimizer.state_dict(), plain[0].state_dict()
    for each in (plain[0], model):
        each(torch.ones(64, 64)).square().mean().backward()
    for ask in (
        optimizer.state_dict,
        lambda: optimizer.load_state_dict(state),
        model.state_dict,
        model[0].state_dict,
        lambda: model.load_state_dict(weights),
        model.lohan.sync,
    ):
        with pytest.raises(StepError, match=r"between backward and optimizer\.step\(\)"):
            ask()
    plain[1].step()
    optimizer.step()
    assert len(optimizer.state_dict()["state"]) == len(state["state"])
    assert all(map(torch.equal, model.parameters(), plain[0].parameters()))
    model.lohan.close()


@pytest.mark.parametrize("schedule", ["serial", "overlapped", "deferred"])
@pytest.mark.parametrize("states", ["device", "host", "ssd"])
def test_averages_of_weights(states: Any, schedule: Any, tmp_path: Path) -> None:
    """EMA and SWA of torch.optim.swa_utils, made of the model before it is compiled; asking for its
    parameters waits for late updates."""

    def averaged(model: nn.Module) -> list[AveragedModel]:
        return [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)), AveragedModel(model)]

    def run(model: nn.Module, optimizer: Any, averages: list[AveragedModel]) -> list[Tensor]:
        for _ in range(3):
            train(model, optimizer, 1)
            for average in averages:
                average.update_parameters(model)
        x = torch.linspace(0, 1, 64 * 64).view(64, 64)
        return [*(p.detach() for a in averages for p in a.parameters()), *(a(x) for a in averages)]

    plain, its = make()
    wanted = run(plain, its, averaged(plain))
    model, optimizer = make()
    averages = averaged(model)
    made: Any = lohan_fx.compile(
        model,
        hw=cpu_hardware(tmp_path),
        optimizer=optimizer,
        strategy="swap-all",
        memory=BUDGET,
        states=states,
        schedule=schedule,
    )
    found = run(made, optimizer, averages)
    assert all(map(torch.equal, found, wanted))
    with pytest.raises(LohanError, match="copy the model before lohan_fx"):
        AveragedModel(made)
    made.lohan.close()


@pytest.mark.parametrize("ran", [False, True])
def test_states_that_do_not_fit_are_refused_when_they_are_loaded(ran: bool, tmp_path: Path) -> None:
    """Not at the first forward, nor when some units have theirs already."""
    plain, its = make()
    train(plain, its, 2)
    weights, state = saved(plain, its)
    model, optimizer = compiled(tmp_path)
    if ran:
        train(model, optimizer, 1)
        before = saved(model, optimizer)
    last = max(state["state"])
    for key, wrong, message in (
        ("exp_avg", torch.ones(5), r"state exp_avg of 2\.down\.bias has shape \(5,\), the .*\(64,"),
        ("max_exp_avg_sq", None, r"has for 2\.down\.bias lacks max_exp_avg_sq"),
    ):
        broken = copy.deepcopy(state)
        broken["state"][last][key] = wrong
        with pytest.raises(StepError, match=message):
            optimizer.load_state_dict(broken)
    if ran:
        after = saved(model, optimizer)
        assert str(after) == str(before)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    assert train(model, optimizer, 2) == train(plain, its, 2)
    model.lohan.close()


def test_a_step_without_backward_leaves_nothing_behind(tmp_path: Path) -> None:
    model, optimizer = compiled(tmp_path, schedule="overlapped", states="host")
    train(model, optimizer, 1)
    model.lohan.sync()
    optimizer.step()
    with torch.no_grad():
        next(iter(optimizer.param_groups[0]["params"])).zero_()
    train(model, optimizer, 1)  # the write is taken over, not refused
    model.lohan.close()
