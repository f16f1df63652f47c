"""``torch.compile(model, backend="lohan_fx")``: the numbers of the same loop without it.

Here the backend is named by its function; `tests.test_examples` has the entry point.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lohan_fx.backend
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import Plan
from lohan_fx.runtime.engine import Engine
from lohan_fx.workload import Workload
from tests.architectures import everywhere, make
from tests.training import identical

# Dynamo looks at .grad of what it is given, and hides the warning from all but pytest
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def fresh(closed_backends: None) -> None:
    """Graphs of other tests do not count, and those of this one are closed."""


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what the engines are asked to move."""
    counts: Counter[str] = Counter()
    for name in ("offload", "prefetch"):
        original = getattr(Engine, name)

        def counted(self: Engine, *args: Any, _name: str = name, _original: Any = original) -> Any:
            counts[_name] += 1
            return _original(self, *args)

        monkeypatch.setattr(Engine, name, counted)
    return counts


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Workload, Plan]]:
    """Grows by one for each graph with backward."""
    found: list[tuple[Workload, Plan]] = []
    make_plan = lohan_fx.backend.make_plan

    def noted(strategy: Any, workload: Workload, *args: Any) -> Plan:
        plan = make_plan(strategy, workload, *args)
        found.append((workload, plan))
        return plan

    monkeypatch.setattr(lohan_fx.backend, "make_plan", noted)
    return found


def compiled(model: Any, hw: HardwareProfile, **options: Any) -> Any:
    given = {"hw": hw, "strategy": everywhere, **options}
    return torch.compile(model, backend=lohan_fx.backend.backend, options=given)


def train(
    model: nn.Module,
    inputs: dict[str, Any],
    call: Callable[..., Any] | None = None,
    steps: int = 3,
) -> list[Tensor]:
    """Losses, then weights and buffers."""
    call = model if call is None else call
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for seed in range(steps):
        torch.manual_seed(seed)
        output = call(**inputs)
        loss = output if isinstance(output, Tensor) else output.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    weights = (t.full_tensor() if hasattr(t, "full_tensor") else t for t in model.parameters())
    return [*losses, *(t.detach().clone() for t in (*weights, *model.buffers()))]


def assert_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted)
    assert all(map(identical, found, wanted))


@pytest.mark.parametrize(
    "name", ["GPT-2", "U-Net", pytest.param("ResNet-50", marks=pytest.mark.slow)]
)
def test_three_steps_equal_plain_pytorch(
    name: str,
    hw: HardwareProfile,
    moved: Counter[str],
    plans: list[tuple[Workload, Plan]],
) -> None:
    wanted = train(*make(name))
    model, inputs = make(name)
    assert_equal(train(model, inputs, compiled(model, hw)), wanted)
    assert all(sum(p.count("swap", tier) for _, p in plans) for tier in ("host", "ssd"))
    assert any(plan.count("recompute") for _, plan in plans)
    assert moved["offload"] == moved["prefetch"] >= 3 * min(p.count("swap") for _, p in plans) > 0
    blocks = {op.block for workload, _ in plans for op in workload.ops}
    if name == "GPT-2":
        assert {"transformer.h.0", "transformer.h.1"} <= blocks


def test_autocast_and_evaluation(hw: HardwareProfile) -> None:
    def steps(model: nn.Module, call: Any, inputs: dict[str, Any]) -> list[Tensor]:
        found = []
        for seed in range(2):
            torch.manual_seed(seed)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = call(**inputs).loss
            loss.backward()
            with torch.no_grad():
                found.append(call(**inputs).loss)
            found.append(loss.detach())
        return [*found, *(p.grad for p in model.parameters() if p.grad is not None)]

    model, inputs = make("Llama")
    wanted = steps(model, model, inputs)
    model, inputs = make("Llama")
    assert_equal(steps(model, compiled(model, hw), inputs), wanted)


class Broken(nn.Module):
    """Two graphs: Python looks at a value in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)).sigmoid()
        if x.sum() < 0:
            return x.sum()
        return torch.tanh(self.second(x)).sigmoid().square().sum()


def test_graph_breaks_give_several_programs(
    hw: HardwareProfile, moved: Counter[str], plans: list[tuple[Workload, Plan]]
) -> None:
    torch.manual_seed(0)
    model, reference = Broken(), Broken()
    reference.load_state_dict(model.state_dict())
    inputs = {"x": torch.randn(4, 8)}
    wanted = train(reference, inputs)
    found = train(model, inputs, compiled(model, hw, strategy="swap-all"))
    assert_equal(found, wanted)
    assert len(plans) == 2
    assert moved["offload"] == moved["prefetch"] == 3 * sum(p.count("swap") for _, p in plans) > 0


def test_shapes_are_programs_of_their_own(
    hw: HardwareProfile, plans: list[tuple[Workload, Plan]]
) -> None:
    torch.manual_seed(0)
    model, reference = Broken(), Broken()
    reference.load_state_dict(model.state_dict())
    call = compiled(model, hw, strategy="swap-all")
    for size in (4, 3, 4, 2, 3):
        x = torch.randn(size, 8)
        for m, f in ((model, call), (reference, reference)):
            m.zero_grad()
            f(x).backward()
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        assert all(identical(a.grad, b.grad) for a, b in pairs)
    assert len(plans) == 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(x)).sigmoid())


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _stack() -> tuple[Stack, dict[str, Tensor]]:
    torch.manual_seed(3)
    return Stack(), {"x": torch.randn(6, 16)}


def compile_layers(model: Stack, hw: HardwareProfile, **options: Any) -> None:
    given = {"hw": hw, "strategy": "swap-all", **options}
    for layer in model.layers:
        layer.compile(backend=lohan_fx.backend.backend, options=given)


@pytest.mark.parametrize("swap_to", ["host", "ssd"])
def test_blocks_share_a_program(
    swap_to: str, hw: HardwareProfile, moved: Counter[str], plans: list[tuple[Workload, Plan]]
) -> None:
    """All forwards run before the first backward: each call has slots of its own.

    A forward whose backward never comes gives them back.
    """
    wanted = train(*_stack())
    model, inputs = _stack()
    compile_layers(model, hw, swap_to=swap_to)
    model(**inputs)
    before = moved["offload"]
    assert_equal(train(model, inputs), wanted)
    assert len(plans) <= 2  # the first layer's input needs no gradient
    assert moved["offload"] == 4 * before
    assert moved["prefetch"] == 3 * before > 0


def test_more_in_flight_than_the_budget(hw: HardwareProfile) -> None:
    model, inputs = _stack()
    compile_layers(model, hw, swap_to="host", memory={"host": "20KiB", "device": "1MiB"})
    with pytest.raises(Exception, match=r"not enough host memory.*\n?.*forward before the first"):
        model(**inputs)


def test_a_second_backward(hw: HardwareProfile) -> None:
    model, inputs = make("U-Net")
    loss = compiled(model, hw)(**inputs)
    loss.backward(retain_graph=True)
    with pytest.raises(Exception, match="backward ran twice"):
        loss.backward()


@pytest.mark.parametrize("name", ["offload", "prefetch"])
def test_an_error_in_a_step(
    name: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps that follow are right."""
    wanted = train(*make("U-Net"))
    model, inputs = make("U-Net")
    call = compiled(model, hw)
    original = getattr(Engine, name)
    asked: list[int] = []

    def fails_once(self: Engine, *args: Any) -> Any:
        asked.append(0)
        if len(asked) == 5:
            raise MemoryError("the fifth time")
        return original(self, *args)

    monkeypatch.setattr(Engine, name, fails_once)
    with pytest.raises(MemoryError, match="the fifth time"):
        call(**inputs).backward()
    model.zero_grad()
    assert_equal(train(model, inputs, call), wanted)


def test_files_are_gone_when_nobody_uses_them(hw: HardwareProfile) -> None:
    model, inputs = _stack()
    compile_layers(model, hw, swap_to="ssd")
    model(**inputs).backward()
    directory = Path(hw.ssds[0].path)
    assert list(directory.iterdir())
    del model
    torch.compiler.reset()
    gc.collect()
    assert not [p for p in directory.rglob("*") if p.is_file()]


def test_options_are_checked(hw: HardwareProfile) -> None:
    with pytest.raises(Exception, match="optimizer is unknown; there are hw, memory, strategy"):
        compiled(nn.Linear(2, 2), hw, optimizer=1)(torch.ones(1, 2))
    model, inputs = make("U-Net")
    with pytest.raises(Exception, match="not enough device memory: need"):
        compiled(model, hw, memory={"device": "64KiB"}, strategy="pareto")(**inputs)


# -- wrappers of torch.distributed, one process ----------------------------------------------------


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_inside_ddp(hw: HardwareProfile, moved: Counter[str]) -> None:
    model, inputs = make("GPT-2")
    wanted = train(DistributedDataParallel(model), inputs)
    model, inputs = make("GPT-2")
    wrapped = DistributedDataParallel(model)
    assert_equal(train(wrapped, inputs, compiled(wrapped, hw)), wanted)
    assert moved["offload"] == moved["prefetch"] > 0


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "whole"])
def test_inside_fsdp(whole: bool, hw: HardwareProfile, moved: Counter[str]) -> None:
    def sharded() -> tuple[Stack, dict[str, Tensor]]:
        model, inputs = _stack()
        mesh = dist.init_device_mesh("cpu", (1,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, inputs

    wanted = train(*sharded())
    model, inputs = sharded()
    call: Any = model
    if whole:
        call = compiled(model, hw, strategy="swap-all")
    else:
        compile_layers(model, hw)
    assert_equal(train(model, inputs, call), wanted)
    assert moved["offload"] == moved["prefetch"] > 0
