"""A recorded step accounts for every byte and every op of ours, and timing ops changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lohan_fx
from lohan_fx.api import LohanModule
from lohan_fx.errors import StepError
from lohan_fx.hardware import SsdDevice
from lohan_fx.runtime.executor import Executor
from lohan_fx.simulate import simulate
from lohan_fx.timeline import SSD_WRITES, Timeline, load_trace
from tests.loops import InjectedError
from tests.models import loss_of, make
from tests.workloads import small_hardware


def compiled(directory: Path, strategy: str = "swap-all", accumulate: int = 1) -> LohanModule:
    ssd = SsdDevice(
        path=str(directory), read_bytes_per_s=1e9, write_bytes_per_s=1e9, capacity_bytes=2**30
    )
    model, _ = make("mlp")
    made = lohan_fx.compile(
        model,
        hw=small_hardware(device_kind="cpu", ssds=(ssd,)),
        optimizer=torch.optim.AdamW(model.parameters()),
        strategy=strategy,
        states="ssd",
        swap_to="ssd",
        accumulate=accumulate,
    )
    assert isinstance(made, LohanModule)
    return made


def step(model: nn.Module, backwards: int = 1) -> torch.Tensor:
    _, inputs = make("mlp")
    assert isinstance(model, LohanModule)
    optimizer = model.lohan.optimizer
    assert optimizer is not None
    torch.manual_seed(7)
    for _ in range(backwards):
        loss = loss_of("mlp", model(**inputs))
        loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LohanModule, Timeline]]:
    model = compiled(tmp_path_factory.mktemp("ssd"))
    step(model)
    with model.lohan.record() as recorder:
        step(model)
    yield model, recorder.timeline("recorded")
    model.lohan.close()


def test_bytes_are_those_of_the_plan(recorded: tuple[LohanModule, Timeline]) -> None:
    model, timeline = recorded
    planned = model.plan.prediction
    assert timeline.traffic.d2h_bytes == planned.d2h_bytes
    assert timeline.traffic.h2d_bytes == planned.h2d_bytes
    assert timeline.traffic.ssd_read_bytes == planned.ssd_read_bytes
    assert timeline.traffic.ssd_write_bytes == planned.ssd_write_bytes


def test_every_transfer_of_the_program_has_its_spans(
    recorded: tuple[LohanModule, Timeline],
) -> None:
    model, timeline = recorded
    kinds = ("offload", "prefetch", "fetch_unit", "emit_gradients")
    wanted = {
        (i.kind, i.name) for i in model.lohan.program().instructions.instructions if i.kind in kinds
    }
    links = [*timeline.by_lane["h2d"], *timeline.by_lane["d2h"]]
    assert {(s.kind, s.name) for s in links} == wanted
    updated = {s.name for s in timeline.by_lane["cpu"] if s.kind == "update"}
    assert updated == {u.name for u in model.lohan.program().workload.units if u.trainable}


def test_spans_lie_within_the_step_and_know_their_phase(
    recorded: tuple[LohanModule, Timeline],
) -> None:
    _, timeline = recorded
    assert all(s.start_s >= 0 for s in timeline.spans)
    phases = {s.kind: {x.phase for x in timeline.spans if x.kind == s.kind} for s in timeline.spans}
    assert phases["offload"] == {"forward"}
    assert phases["prefetch"] == phases["emit_gradients"] == {"backward"}
    assert phases["fetch_unit"] == {"forward", "backward"}
    assert phases["join"] == {"optimizer"}
    assert any(s.kind in SSD_WRITES for s in timeline.by_lane["ssd"])


def test_the_compute_lane_has_no_overlaps(recorded: tuple[LohanModule, Timeline]) -> None:
    _, timeline = recorded
    gpu = timeline.by_lane["gpu"]
    assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(gpu))


def test_additions_of_gradients_are_recorded(tmp_path: Path) -> None:
    model = compiled(tmp_path, accumulate=2)
    _, inputs = make("mlp")
    step(model, backwards=2)
    with model.lohan.record() as recorder:
        loss_of("mlp", model(**inputs)).backward()
        loss_of("mlp", model(**inputs)).backward()
        model.lohan.optimizer.step()
    lane = recorder.timeline("recorded").by_lane["cpu"]
    units = sorted(u.name for u in model.lohan.program().workload.units if u.trainable)
    assert sorted(s.name for s in lane if s.kind == "add") == units
    assert sorted(s.name for s in lane if s.kind == "update") == units
    model.lohan.close()


def test_nothing_is_recorded_outside_of_the_block(tmp_path: Path) -> None:
    model = compiled(tmp_path)
    step(model)
    with model.lohan.record() as recorder:
        step(model)
    before = len(recorder.timeline("a").spans)
    step(model)
    assert len(recorder.timeline("b").spans) == before
    model.lohan.close()


def test_a_forward_that_fails_leaves_no_compute_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates on the device end what compute does, and let it go on."""

    def failing(*_: Any) -> Any:
        raise InjectedError

    model, inputs = make("mlp")
    optimizer = torch.optim.AdamW(model.parameters())
    made = lohan_fx.compile(
        model,
        hw=small_hardware(device_kind="cpu", ssd=False),
        optimizer=optimizer,
        states="device",
        schedule="deferred",
        accumulate=2,
    )
    assert isinstance(made, LohanModule)
    step(made, backwards=2)
    with made.lohan.record() as recorder:
        loss_of("mlp", made(**inputs)).backward()
        with monkeypatch.context() as patch:
            patch.setattr(Executor, "_run", failing)
            with pytest.raises(InjectedError):
                made(**inputs)
        optimizer.step()
    spans = recorder.timeline("recorded").by_lane["gpu"]
    made.lohan.close()
    assert {s.kind for s in spans if s.phase == "optimizer"} == {"update", "join"}


def test_recording_needs_a_first_step(tmp_path: Path) -> None:
    model = compiled(tmp_path)
    with pytest.raises(StepError, match="after the first step"), model.lohan.record():
        pass
    model.lohan.close()


def test_one_recording_at_a_time(tmp_path: Path) -> None:
    model = compiled(tmp_path)
    step(model)
    with model.lohan.record() as recorder:
        with pytest.raises(StepError, match="recorded already"), model.lohan.record():
            pass
        step(model)
    assert recorder.timeline("recorded").spans
    with model.lohan.record():  # after it, there may be another
        pass
    model.lohan.close()


@pytest.mark.parametrize("strategy", ["swap-all", "recompute-all"])
def test_timed_steps_are_the_same_steps(tmp_path: Path, strategy: str) -> None:
    plain = compiled(tmp_path, strategy)
    timed = compiled(tmp_path, strategy)
    assert torch.equal(step(plain), step(timed))
    with timed.lohan.time_ops() as timer:
        assert torch.equal(step(plain), step(timed))
    assert torch.equal(step(plain), step(timed))
    workload = timed.lohan.program().workload
    seconds = timer.seconds()
    assert {op.name for op in workload.ops} <= set(seconds)
    measured = workload.timed(seconds)
    assert [op.seconds for op in measured.ops] == [seconds[op.name] for op in workload.ops]
    total = sum(op.seconds for op in measured.ops)
    assert simulate(measured, timed.plan, timed.lohan.options.hw).step_s >= total > 0
    plain.lohan.close()
    timed.lohan.close()


def test_the_example_of_the_documentation_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    profile = small_hardware(device_kind="cpu", ssd=False)
    monkeypatch.setattr("lohan_fx.profiling.profile_hardware", lambda **_: profile)
    text = (Path(__file__).parents[1] / "docs" / "simulator.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(text.partition("```python\n")[2].partition("```")[0], names)
    names["model"].lohan.close()
    shown = capsys.readouterr().out
    for row in ("fetch_unit", "prefetch", "emit_gradients", "update"):  # as the text shows them
        assert f" {row} " in shown
        assert f" {row} " in text
    assert "recorded: step" in shown
    simulated, recorded = load_trace("step.json")
    assert (simulated.name, recorded.name) == ("simulated lohan", "recorded")
    assert simulated.traffic == recorded.traffic
