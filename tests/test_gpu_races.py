"""Steps on a GPU whose copies and compute are held against each other, stream by stream.

Run with ``pytest -m gpu``. `tests.stream_races` says what is seen, and what is not.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import lohan_fx
from lohan_fx.api import LohanModule
from tests.stream_races import StreamRaces
from tests.test_stream_races import CASES, PLANTED, Steps, assert_ordered, train, without
from tests.training import cpu_hardware, remember_captures

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    remember_captures(monkeypatch, "gpu races")


def run(steps: Steps, directory: Path) -> StreamRaces:
    hw = cpu_hardware(directory, device_kind="cuda")
    return train(steps, hw, lambda x: x.cuda(), StreamRaces)


@pytest.mark.parametrize("steps", CASES, ids=str)
def test_streams_are_ordered(steps: Steps, tmp_path: Path) -> None:
    assert_ordered(run(steps, tmp_path))


@pytest.mark.parametrize(("owner", "name"), PLANTED)
@pytest.mark.parametrize("tier", ["host", "ssd"])
def test_planted_races_are_found(tier: str, owner: type, name: str, tmp_path: Path) -> None:
    with without(owner, name):
        watched = run(Steps(states=tier, swap_to=tier), tmp_path)
    assert watched.races()


def test_the_checker_sees_streams() -> None:
    """Without lohan_fx: a copy, with and without an event between."""
    source = torch.ones(2**20, pin_memory=True)
    target = torch.zeros(2**20, device="cuda")
    side = torch.cuda.Stream()
    for ordered in (True, False):
        with StreamRaces() as watched:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                target.copy_(source, non_blocking=True)
            if ordered:
                torch.cuda.current_stream().wait_stream(side)
            target[100:200].sum()
        assert bool(watched.races()) != ordered


def test_weights_are_written_after_an_evaluation_has_read_them(tmp_path: Path) -> None:
    """Without the checker, by what comes out: the last layers are still to be fetched when forward
    returns, and the user may write into their weights then, as with a model of plain PyTorch."""
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8)))
    made = lohan_fx.compile(
        model,
        hw=cpu_hardware(tmp_path, device_kind="cuda"),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        states="host",
        schedule="optimized",
        dtype=None,
        fused=False,
        refine=False,
        outputs="all",
    )
    assert isinstance(made, LohanModule)
    x = torch.ones(8, 2048, device="cuda")
    with torch.no_grad():
        wanted = made(x).cpu()
        parameters = list(made.parameters())
        found = made(x)
        for p in reversed(parameters):
            p.zero_()
    made.lohan.close()
    assert torch.equal(found.cpu(), wanted)
