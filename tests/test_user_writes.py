"""What user code writes into parameters between two steps in mixed precision, where forward reads
compute copies: the next forward sees it, or the one behind `take_over`."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lohan_fx
from lohan_fx.errors import StepError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.runtime import unit_states
from lohan_fx.runtime.ssd import StripedFile
from lohan_fx.runtime.unit_states import UnitStates
from tests.casting import ALWAYS, HARD, KEPT, NEVER, units_of
from tests.loops import assert_same, compiled
from tests.training import (
    WithCopies,
    alternating,
    identical,
    remember_captures,
    step_in_mixed_precision,
)

WIDTH = 8
NUM_STEPS = 4


class Net(nn.Module):
    """One weight is used twice; a layer is frozen, and a part of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        for p in (*self.layers[1].parameters(), self.layers[2].weight):
            p.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.last(x), y)


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is traced once."""
    remember_captures(monkeypatch, "what users write")


def made(hw: HardwareProfile, **options: Any) -> tuple[Any, Net, torch.optim.Optimizer]:
    net = weights()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    return compiled(net, optimizer, hw, **{"dtype": "bf16", **options}), net, optimizer


def weights() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Net()


def batch(seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(4, WIDTH, generator=random)
    return {"x": x, "y": torch.randint(WIDTH, (4,), generator=random)}


def train(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> Tensor:
    loss = model(**batch(seed))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    found: Tensor = loss.detach()
    return found


@torch.no_grad()
def evaluated(net: Net) -> Tensor:
    """The loss of batch 1 by other copies."""
    fresh, given = Net(), batch(1)
    fresh.load_state_dict(net.state_dict())
    loss: Tensor = fresh.bfloat16()(given["x"].bfloat16(), given["y"])
    return loss


# -- writes ----------------------------------------------------------------------------------------


def some(net: Net) -> list[nn.Parameter]:
    """Of each kind; units have others, too."""
    layers: Any = net.layers
    return [net.last.weight, layers[0].weight, layers[1].bias, layers[2].weight, layers[2].bias]


@torch.no_grad()
def in_place(net: Net) -> None:
    for p in some(net):
        p.copy_(p * 1.5)


@torch.no_grad()
def elements(net: Net) -> None:
    """As WGAN's clamping, of some elements."""
    for p in some(net):
        p.view(-1)[1::2].clamp_(-0.05, 0.05)


def initialized(net: Net) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        for p in some(net):
            nn.init.normal_(p)


def by_an_optimizer(net: Net, *, fused: bool = False) -> None:
    had = [p.grad for p in some(net)]
    for p in some(net):
        p.grad = torch.ones_like(p)
    torch.optim.SGD(some(net), lr=0.1, fused=fused).step()
    for p, grad in zip(some(net), had, strict=True):
        p.grad = grad


def by_inference(net: Net) -> None:
    with torch.inference_mode():
        torch._foreach_mul_(some(net), 1.5)


def other_memory(net: Net) -> None:
    for p in some(net):
        p.data = p.detach() * 1.5


def loaded(net: Net) -> None:
    net.load_state_dict({name: v * 1.5 for name, v in net.state_dict().items()})


def data(net: Net) -> None:
    for p in some(net):
        p.data.mul_(1.5)


def by_a_fused_optimizer(net: Net) -> None:
    """Nothing is counted there."""
    by_an_optimizer(net, fused=True)


def arrays(net: Net) -> None:
    for p in some(net):
        p.detach().numpy()[...] += 0.125


Write = Callable[[Net], None]
SEEN: list[Write] = [
    in_place,
    elements,
    initialized,
    by_an_optimizer,
    by_inference,
    other_memory,
    loaded,
]
UNCOUNTED: list[Write] = [data, arrays, by_a_fused_optimizer]

PLACES: dict[str, dict[str, Any]] = {
    "host": {"states": "host"},
    "device": {"strategy": KEPT},
    "device, cast": {"strategy": HARD[0]},
    "ssd": {"states": "ssd"},
    "ssd, copies in host memory": {"states": "ssd", "strategy": WithCopies()},
}


def by_hand(write: Write) -> tuple[list[Tensor], Net, torch.optim.Optimizer]:
    """Losses, and what is left, with a write after the second step."""
    masters = weights()
    compute = copy.deepcopy(masters).bfloat16()
    optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-2, fused=True)
    losses = []
    for seed in range(NUM_STEPS):
        losses.append(step_in_mixed_precision(masters, compute, batch(seed), optimizer))
        if seed == 1:
            write(masters)
    return losses, masters, optimizer


def check(write: Write, place: str, hw: HardwareProfile, **options: Any) -> None:
    """The same losses, weights and states, to the bit."""
    wanted, masters, its = by_hand(write)
    model, net, optimizer = made(hw, **PLACES[place], **options)
    found = []
    for seed in range(NUM_STEPS):
        found.append(train(model, optimizer, seed))
        if seed == 1:
            model.lohan.sync()
            write(net)
            if write in UNCOUNTED:
                model.lohan.take_over()
    model.lohan.close()
    assert all(map(identical, found, wanted))
    assert not identical(wanted[2], by_hand(lambda _: None)[0][2])
    assert_same(net, optimizer, masters, its)


@pytest.mark.parametrize(("place", "write"), alternating([*PLACES], [*SEEN, *UNCOUNTED]))
def test_the_next_forward_sees_it(place: str, write: Write, hw: HardwareProfile) -> None:
    check(write, place, hw)


@pytest.mark.parametrize("write", [other_memory, data])
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "overlapped"},
        {"schedule": "deferred", "clip_grad_norm": NEVER},
        {"schedule": "speculative", "clip_grad_norm": NEVER},
        {"schedule": "serial", "gradients": "kept"},
    ],
    ids=str,
)
def test_with_schedules(options: dict[str, Any], write: Write, hw: HardwareProfile) -> None:
    check(write, "host", hw, **options)


@pytest.mark.parametrize("write", [*SEEN, *UNCOUNTED])
def test_evaluations_see_it(write: Write, hw: HardwareProfile) -> None:
    """The first forward behind the write is no step."""
    masters = weights()
    write(masters)
    wanted = evaluated(masters)
    model, net, _ = made(hw, states="host", forwards=2)
    model.lohan.prepare(**batch(0))
    write(net)
    if write in UNCOUNTED:
        model.lohan.take_over()
    with torch.no_grad():
        assert identical(model(**batch(1)), wanted)
    model.lohan.close()


def test_memory_replaced_twice(hw: HardwareProfile) -> None:
    """What the last forward saw stays until the next, or other memory would have its address."""
    model, net, _ = made(hw, states="host")
    model.lohan.prepare(**batch(0))
    p: Any = net.layers[1].weight  # type: ignore[union-attr]
    array = np.full(p.shape, 0.5, np.float32)
    p.data, seen = torch.from_numpy(array), weakref.ref(array)
    del array
    for factor in (1.0, 0.5):
        with torch.no_grad():
            assert identical(model(**batch(1)), evaluated(net))
        for _ in range(2):
            p.data = p.detach() * factor
        assert (seen() is None) == (factor != 1.0)
    model.lohan.close()


# -- another optimizer -----------------------------------------------------------------------------


class OfData(torch.optim.SGD):
    """Written as many were."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-group["lr"])


class Both:
    """Each has some of a model's parameters."""

    def __init__(self, net: Net, other: str, *, fused: bool | None = None) -> None:
        layers: Any = net.layers
        given = [net.first.bias, *layers[0].parameters()]
        ids = {id(p) for p in given}
        rest = [p for p in net.parameters() if id(p) not in ids]
        self.ours = torch.optim.AdamW(rest, lr=1e-2, fused=fused)
        options: dict[str, Any] = {"lr": 0.3}
        cls = OfData if other == "data" else torch.optim.SGD
        self.other = cls(given, **options, fused=other == "fused")

    def step(self) -> None:
        self.ours.step()
        self.other.step()

    def zero_grad(self) -> None:
        self.ours.zero_grad()
        self.other.zero_grad()


@pytest.mark.parametrize(
    ("place", "other", "schedule"),
    alternating([*PLACES], ["counted", "fused", "data"], ["serial", "overlapped", "deferred"]),
)
def test_what_another_optimizer_trains(
    place: str, other: str, schedule: str, hw: HardwareProfile
) -> None:
    """Seen without a call, and beside updates that run late."""
    masters = weights()
    compute = copy.deepcopy(masters).bfloat16()
    its: Any = Both(masters, other, fused=True)
    net = weights()
    both: Any = Both(net, other)
    model = compiled(net, both.ours, hw, dtype="bf16", schedule=schedule, **PLACES[place])
    for seed in range(NUM_STEPS):
        wanted = step_in_mixed_precision(masters, compute, batch(seed), its)
        assert identical(train(model, both, seed), wanted)
    model.lohan.close()
    assert_same(net, both.ours, masters, its.ours)


@pytest.mark.parametrize("options", [{}, {"gradients": "kept"}], ids=str)
@pytest.mark.parametrize("other", ["fused", "data"])
def test_evaluations_between_see_what_it_trains(
    other: str, options: dict[str, Any], hw: HardwareProfile
) -> None:
    """Also one that comes when it has its gradients and has not used them yet."""
    net = weights()
    both: Any = Both(net, other)
    model: Any = compiled(net, both.ours, hw, dtype="bf16", states="host", **options)

    def evaluate() -> None:
        with torch.no_grad():
            assert identical(model(**batch(1)), evaluated(net))

    for seed in range(2):
        model(**batch(seed)).backward()
        both.ours.step()
        evaluate()
        both.other.step()
        both.zero_grad()
        evaluate()
    model.lohan.close()


@pytest.mark.parametrize("place", ["host", "ssd", "ssd, copies in host memory"])
def test_what_it_has_not_written_is_not_stored(
    place: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each forward compares it, and that is all."""
    net = weights()
    both: Any = Both(net, "data")
    model: Any = compiled(net, both.ours, hw, dtype="bf16", **PLACES[place])
    train(model, both, 0)
    model(**batch(1)).backward()
    both.ours.step()
    before, compared = counts(model), counted(monkeypatch, unit_states, "_agree")
    flushes = counted(monkeypatch, StripedFile, "flush")
    num_compared = []
    for seed in range(3):
        with torch.no_grad():
            model(**batch(seed))
        num_compared.append(len(compared))
    assert before == counts(model)
    assert not flushes
    assert num_compared == [3, 6, 9]
    model.lohan.close()


@pytest.mark.parametrize("way", ["fused", "data"])
def test_gradients_of_another_optimizer_that_no_backward_of_ours_made(
    way: str, hw: HardwareProfile
) -> None:
    """By a loss that uses a layer alone, eagerly: the next forward sees what it learned."""
    net = weights()
    both: Any = Both(net, way)
    model: Any = compiled(net, both.ours, hw, dtype="bf16", states="host")
    train(model, both, 0)
    for seed in range(2):
        for p in both.other.param_groups[0]["params"]:
            p.grad = torch.full_like(p, 0.25 + seed)
        both.other.step()
        both.zero_grad()
        with torch.no_grad():
            assert identical(model(**batch(1)), evaluated(net))
    model.lohan.close()


# -- parameters in the compute dtype ---------------------------------------------------------------


@pytest.mark.parametrize("place", ["host", "device", "ssd, copies in host memory"])
def test_masters_that_no_parameter_shows(place: str, hw: HardwareProfile) -> None:
    """They become what was written; those of other parameters stay more than their copies."""
    net = weights().bfloat16()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model = compiled(net, optimizer, hw, dtype="bf16", **PLACES[place])
    for seed in range(2):
        train(model, optimizer, seed)
    states = model.lohan.memory.states  # type: ignore[union-attr]

    def masters() -> dict[str, Tensor]:
        return {name: v.clone() for name, v in states.hidden_masters()}

    before = masters()
    data(net)
    model.lohan.take_over()
    after = masters()
    parameters = dict(net.named_parameters())
    written = {id(p) for p in some(net)}
    assert {id(parameters[name]) for name in before} & written
    for name, v in before.items():
        p = parameters[name]
        assert identical(after[name], p.float() if id(p) in written else v)
        assert not identical(v, v.bfloat16().float())
    train(model, optimizer, 2)
    model.lohan.close()


def counts(model: Any) -> tuple[int, list[int]]:
    """How often weights have changed, and how often each compute copy was written."""
    copies = [s.flats.compute._version for s in units_of(model) if s.flats]
    return model.lohan.memory.states.generation, copies


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[None]:
    """One element a call of a function, from now on."""
    calls: list[None] = []
    function = getattr(owner, name)

    def call(*args: Any) -> Any:
        calls.append(None)
        return function(*args)

    monkeypatch.setattr(owner, name, call)
    return calls


# -- what is no write ------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("norm", [ALWAYS, NEVER])
def test_updates_are_no_writes(place: str, norm: float, hw: HardwareProfile) -> None:
    """Nothing is cast anew for them, nor by a call in vain."""
    schedule = "speculative" if place == "host" else "deferred"
    model, _, optimizer = made(hw, **PLACES[place], schedule=schedule, clip_grad_norm=norm)
    for seed in range(3):
        train(model, optimizer, seed)
        model.lohan.sync()
        assert not any(s.written() for s in units_of(model))
        before = counts(model)
        model.lohan.take_over()
        assert before == counts(model)
    model.lohan.close()


@pytest.mark.parametrize(("place", "most"), [("ssd", 1), ("host", 0)])
def test_a_call_in_vain_stores_nothing(
    place: str, most: int, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users may have written into the file's mapping: that is one flush, not one a unit."""
    model, _, optimizer = made(hw, **PLACES[place])
    train(model, optimizer, 0)
    flushes = counted(monkeypatch, StripedFile, "flush")
    model.lohan.take_over()
    assert len(flushes) == most
    model.lohan.close()


def test_nan_is_no_write(hw: HardwareProfile) -> None:
    """It equals nothing."""
    model, net, optimizer = made(hw, states="host")
    train(model, optimizer, 0)
    for p in some(net):
        p.data.view(-1)[:3] = float("nan")
    model.lohan.take_over()
    before = counts(model)
    model.lohan.take_over()
    assert before == counts(model)
    model.lohan.close()


# -- when it is refused ----------------------------------------------------------------------------


WEIGHTS: dict[str, Callable[[Net], nn.Parameter]] = {
    "ours": lambda net: net.first.weight,
    "another optimizer's": lambda net: net.layers[0].weight,  # type: ignore[union-attr,return-value]
    "frozen": lambda net: net.layers[1].weight,  # type: ignore[union-attr,return-value]
}


@pytest.mark.parametrize("looks", ["evaluation", "take_over", "save"])
@pytest.mark.parametrize("write", ["in place", "memory", "data"])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_between_forward_and_backward(
    weight: str, write: str, looks: str, hw: HardwareProfile, tmp_path: Path
) -> None:
    """Backward would read other copies than its forward did, of this one weight."""
    names: list[str] = []

    def backward(*, written: bool) -> Tensor:
        net = weights()
        both: Any = Both(net, "data")
        model: Any = compiled(net, both.ours, hw, dtype="bf16", states="host", forwards=2)
        model(**batch(0)).backward()
        both.step()
        both.ours.zero_grad()  # the other one may have a step to come
        loss, p = model(**batch(1)), WEIGHTS[weight](net)
        names[:] = [name for name, each in net.named_parameters() if each is p]
        if not written:
            pass
        elif write == "in place":
            with torch.no_grad():
                p.mul_(3)
        elif write == "memory":
            p.data = p.detach() * 3
        else:
            p.data.mul_(3)
        if looks == "evaluation":
            with torch.no_grad():
                model(**batch(2))
        elif looks == "take_over":
            model.lohan.take_over()
        else:
            lohan_fx.save(model, tmp_path)
        try:
            loss.backward()
            gradient = net.layers[0].bias.grad  # type: ignore[union-attr]
            assert isinstance(gradient, Tensor)
            return gradient.clone()
        finally:
            model.lohan.close()

    unseen = write == "data" and looks == "evaluation" and weight != "another optimizer's"
    if unseen:
        assert identical(backward(written=True), backward(written=False))
        return
    with pytest.raises(StepError) as error:
        backward(written=True)
    assert str(error.value).startswith(f"parameter {names[0]} was written between forward and")


BIASES: dict[str, Callable[[Net], nn.Parameter]] = {
    "ours": lambda net: net.first.bias,
    "beside a frozen weight": lambda net: net.layers[2].bias,  # type: ignore[union-attr,return-value]
    "frozen": lambda net: net.layers[1].bias,  # type: ignore[union-attr,return-value]
}


@pytest.mark.parametrize("dtype", [None, "bf16"])
@pytest.mark.parametrize(
    ("place", "bias", "write"), alternating([*PLACES], [*BIASES], ["in place", "memory"])
)
def test_what_backward_does_not_read_may_be_written(
    place: str, bias: str, write: str, dtype: str | None, hw: HardwareProfile
) -> None:
    """As in plain PyTorch, also where an evaluation in between makes compute copies of it."""
    plain = weights()
    compute = copy.deepcopy(plain).bfloat16() if dtype else plain
    its = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=bool(dtype))
    model, net, optimizer = made(hw, dtype=dtype, forwards=2, **PLACES[place])

    def eager(seed: int) -> Tensor:
        x, y = batch(seed).values()
        loss: Tensor = compute(x.bfloat16() if dtype else x, y)
        return loss

    wanted, found = eager(0), model(**batch(0))
    assert identical(found, wanted)
    for p in (BIASES[bias](plain), BIASES[bias](net)):
        if write == "in place":
            with torch.no_grad():
                p.add_(0.5)
        else:
            p.data = p.detach() + 0.5
    with torch.no_grad():
        BIASES[bias](compute).copy_(BIASES[bias](plain))
        assert identical(model(**batch(1)), eager(1))
    wanted.backward()
    found.backward()
    for p, c in zip(plain.parameters(), compute.parameters(), strict=True):
        p.grad = None if c.grad is None else c.grad.float()
    its.step()
    optimizer.step()
    model.lohan.close()
    assert_same(net, optimizer, plain, its)


@pytest.mark.parametrize("looks", ["evaluation", "take_over"])
@pytest.mark.parametrize("read", [False, True], ids=["unread", "read"])
def test_what_is_written_where_nobody_counts(read: bool, looks: str, hw: HardwareProfile) -> None:
    """A copy changes that backward reads, or one beside it."""
    model, net, _ = made(hw, states="host", forwards=2)
    loss, first = model(**batch(0)), net.first
    with torch.no_grad():
        first.bias.add_(0.5)
    (first.weight if read else first.bias).data.mul_(2)
    if looks == "take_over":
        model.lohan.take_over()
    with torch.no_grad():
        assert identical(model(**batch(1)), evaluated(net))
    if not read:
        loss.backward()
    else:
        with pytest.raises(StepError, match=r"^parameter first.weight was written between"):
            loss.backward()
    model.lohan.close()


def test_training_goes_on_without_it(hw: HardwareProfile) -> None:
    model, net, optimizer = made(hw, states="host")
    train(model, optimizer, 0)
    loss = model(**batch(1))
    model.lohan.take_over()
    loss.backward()
    optimizer.step()
    loss = model(**batch(2))
    data(net)
    model.lohan.take_over()
    with pytest.raises(StepError, match=r"^parameter first.weight, .* was written between"):
        loss.backward()
    train(model, optimizer, 2)
    model.lohan.close()


def test_an_interrupt_leaves_no_forward_to_go_on_from(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, net, optimizer = made(hw, states="host", forwards=2)
    train(model, optimizer, 0)
    loss = model(**batch(1))
    other_memory(net)
    copy_written = UnitStates.copy_written

    def interrupted(states: UnitStates, *args: Any, compare: bool) -> bool:
        copy_written(states, *args, compare=compare)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(UnitStates, "copy_written", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.lohan.take_over()
    with pytest.raises(StepError, match="weights were updated, loaded or written between"):
        loss.backward()
    model.lohan.close()


def test_between_backward_and_step(hw: HardwareProfile) -> None:
    """Refused before anything is written."""
    model, net, optimizer = made(hw, states="host", schedule="serial")
    model.lohan.take_over()  # there is nothing yet
    model(**batch(0)).backward()
    in_place(net)
    before = counts(model)
    with pytest.raises(StepError, match=r"call optimizer\.step\(\) before"):
        model.lohan.take_over()
    assert before == counts(model)
    optimizer.step()
    model.lohan.take_over()
    model.lohan.close()
