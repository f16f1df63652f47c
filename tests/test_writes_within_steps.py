"""What user code writes into parameters between forward and optimizer.step(): updates go on from
it, as in plain PyTorch, or it is refused by name. Nothing is lost in silence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lohan_fx.errors import StepError
from lohan_fx.hardware import HardwareProfile
from tests.casting import ALWAYS, HARD, KEPT, NEVER
from tests.loops import AT_ONCE, assert_same, compiled, updater_of, wait_until_begun
from tests.training import WithCopies, alternating, identical, remember_captures

WIDTH = 8
NUM_STEPS = 4


class Net(nn.Module):
    """Backward reads weights, and no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.first(x)))
        return nn.functional.cross_entropy(self.last(hidden), y)


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is traced once."""
    remember_captures(monkeypatch, "writes within steps")


def weights() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Net()


def batch(seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(4, WIDTH, generator=random)
    return {"x": x, "y": torch.randint(WIDTH, (4,), generator=random)}


# -- writes ----------------------------------------------------------------------------------------


@torch.no_grad()
def in_place(p: nn.Parameter) -> None:
    p.mul_(1.5)


def other_memory(p: nn.Parameter) -> None:
    p.data = p.detach() * 1.5


def data(p: nn.Parameter) -> None:
    p.data.mul_(1.5)


Write = Callable[[nn.Parameter], None]
Loop = tuple[list[Tensor], Net, torch.optim.Optimizer]

READ: dict[str, Callable[[Net], nn.Parameter]] = {
    "last.weight": lambda net: net.last.weight,
    "norm.weight": lambda net: net.norm.weight,
}
PLACES: dict[str, dict[str, Any]] = {
    "host": {"states": "host"},
    "device": {"strategy": KEPT},
    "device, cast": {"strategy": HARD[0]},
    "ssd": {"states": "ssd"},
    "ssd, copies in host memory": {"states": "ssd", "strategy": WithCopies()},
}
MIXED = {"bf16": [*PLACES], "float32": ["host", "device", "ssd"]}
WHERE = [(dtype, place) for dtype, places in MIXED.items() for place in places]
WHOLE: list[dict[str, Any]] = [
    {"schedule": "serial"},
    {"schedule": "deferred", "clip_grad_norm": NEVER},
    {"schedule": "speculative", "clip_grad_norm": NEVER},
    {"schedule": "speculative", "clip_grad_norm": NEVER, "accumulate": 2},
    {"gradients": "kept"},
]


def in_plain_pytorch(write: Write, at: str, dtype: str, num_backwards: int) -> Loop:
    """The loop in float32; or in mixed precision as a user would write it, where compute copies of
    the masters run."""
    masters = weights()
    mixed = dtype == "bf16"
    compute = copy.deepcopy(masters).bfloat16() if mixed else masters
    optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-2, fused=mixed)
    pairs = list(zip(masters.parameters(), compute.parameters(), strict=True)) if mixed else []
    losses = []
    for seed in range(NUM_STEPS):
        if mixed:
            with torch.no_grad():
                for p, c in pairs:
                    c.copy_(p)
        for k in range(num_backwards):
            given = batch(10 * seed + k)
            loss = compute(given["x"].bfloat16() if mixed else given["x"], given["y"])
            if (seed, k, at) == (1, num_backwards - 1, "backward"):
                write(masters.first.bias)
            loss.backward()
            losses.append(loss.detach())
            for p, c in pairs:
                assert c.grad is not None
                total = c.grad.float()
                p.grad, c.grad = total if p.grad is None else p.grad + total, None
        if (seed, at) == (1, "step"):
            write(masters.first.bias)
            write(masters.last.weight)
        optimizer.step()
        optimizer.zero_grad()
    return losses, masters, optimizer


class Ours:
    """A compiled model that trains."""

    def __init__(
        self, hw: HardwareProfile, dtype: str, place: str = "host", **options: Any
    ) -> None:
        self.net = weights()
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.num_backwards = options.get("accumulate", 1)
        options = {**PLACES[place], **options}
        if dtype == "bf16":
            options["dtype"] = "bf16"
        elif place == "device":
            options.update(strategy="keep-all", states="device")
        self.model: Any = compiled(self.net, self.optimizer, hw, **options)

    def step(
        self,
        seed: int,
        between: Callable[[], None] = lambda: None,
        before_step: Callable[[], None] = lambda: None,
    ) -> list[Tensor]:
        """Losses; `between` comes before the last backward."""
        losses = []
        for k in range(self.num_backwards):
            loss = self.model(**batch(10 * seed + k))
            if k == self.num_backwards - 1:
                between()
            loss.backward()
            losses.append(loss.detach())
        before_step()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses


def check(
    write: Write, at: str, hw: HardwareProfile, dtype: str, place: str, **options: Any
) -> None:
    """The same losses, weights and states, to the bit."""
    ours = Ours(hw, dtype, place, **options)
    wanted, masters, its = in_plain_pytorch(write, at, dtype, ours.num_backwards)
    none = in_plain_pytorch(lambda _: None, at, dtype, ours.num_backwards)[0]
    found = []

    def nothing() -> None: ...

    def between() -> None:
        write(ours.net.first.bias)

    def before_step() -> None:
        write(ours.net.first.bias)
        write(ours.net.last.weight)

    for seed in range(NUM_STEPS):
        written = seed == 1
        found += ours.step(
            seed,
            between if written and at == "backward" else nothing,
            before_step if written and at == "step" else nothing,
        )
    ours.model.lohan.close()
    assert not all(map(identical, wanted, none))
    assert all(map(identical, found, wanted))
    assert_same(ours.net, ours.optimizer, masters, its)


# -- updates go on from what was written -----------------------------------------------------------


@pytest.mark.parametrize("write", [in_place, other_memory])
@pytest.mark.parametrize(("dtype", "place"), WHERE)
def test_what_backward_does_not_read(
    dtype: str, place: str, write: Write, hw: HardwareProfile
) -> None:
    check(write, "backward", hw, dtype, place)


@pytest.mark.parametrize("at", ["backward", "step"])
@pytest.mark.parametrize("write", [in_place, other_memory])
@pytest.mark.parametrize(("dtype", "options"), alternating(["bf16", "float32"], WHOLE))
def test_schedules_that_update_nothing_before_step(
    dtype: str, options: dict[str, Any], write: Write, at: str, hw: HardwareProfile
) -> None:
    check(write, at, hw, dtype, "host", **options)


@pytest.mark.parametrize("options", AT_ONCE, ids=str)
def test_schedules_that_update_in_backward(options: dict[str, Any], hw: HardwareProfile) -> None:
    check(other_memory, "backward", hw, "bf16", "host", **options)


@pytest.mark.parametrize(("dtype", "place"), WHERE)
def test_before_step(dtype: str, place: str, hw: HardwareProfile) -> None:
    check(other_memory, "step", hw, dtype, place, schedule="serial")


@pytest.mark.parametrize("at", ["backward", "step"])
def test_trials_that_are_redone(at: str, hw: HardwareProfile) -> None:
    """Clipping drops them all: what was written is there all the same."""

    def loop(schedule: str) -> list[Tensor]:
        ours = Ours(hw, "bf16", schedule=schedule, clip_grad_norm=ALWAYS)
        losses = []
        for seed in range(NUM_STEPS):
            write = (lambda: other_memory(ours.net.first.bias)) if seed == 1 else lambda: None
            calls = {"between" if at == "backward" else "before_step": write}
            losses += ours.step(seed, **calls)
        ours.model.lohan.close()
        return [*losses, *ours.net.parameters()]

    assert all(map(identical, loop("speculative"), loop("serial")))


class TwoHeads(Net):
    """One of them is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)


@pytest.mark.parametrize("write", [in_place, other_memory])
@pytest.mark.parametrize("states", ["host", "ssd"])
@pytest.mark.parametrize("options", AT_ONCE, ids=str)
def test_what_no_update_touches(
    options: dict[str, Any], states: str, write: Write, hw: HardwareProfile
) -> None:
    """It may be written before the step whatever the schedule: updates leave it as it is."""
    torch.manual_seed(7)
    plain = TwoHeads()
    net = copy.deepcopy(plain)
    its = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model = compiled(net, optimizer, hw, states=states, **options)
    for seed in range(3):
        for k in range(options.get("accumulate", 1)):
            wanted, found = plain(**batch(10 * seed + k)), model(**batch(10 * seed + k))
            assert identical(found, wanted)
            wanted.backward()
            found.backward()
        if seed == 1:
            write(plain.other.weight)
            write(net.other.weight)
        for used in (its, optimizer):
            used.step()
            used.zero_grad()
    model.lohan.close()
    assert_same(net, optimizer, plain, its)


@pytest.mark.parametrize("write", [in_place, other_memory])
@pytest.mark.parametrize("states", ["host", "ssd"])
@pytest.mark.parametrize("at", ["step", "next"])
def test_frozen_units_beside_running_updates(
    at: str, states: str, write: Write, hw: HardwareProfile
) -> None:
    """No update touches them, so the next forward takes over what was written."""
    plain = weights()
    plain.first.requires_grad_(False)
    net = copy.deepcopy(plain)
    its, optimizer = (
        torch.optim.AdamW([*each.norm.parameters(), *each.last.parameters()], lr=1e-2)
        for each in (plain, net)
    )
    model = compiled(net, optimizer, hw, states=states, schedule="overlapped")
    for seed in range(4):
        wanted, found = plain(**batch(seed)), model(**batch(seed))
        assert identical(found, wanted)
        wanted.backward()
        found.backward()
        for each, used in ((plain, its), (net, optimizer)):
            if at == "step":
                write(each.first.weight)
            used.step()
            used.zero_grad()
            if at == "next":
                write(each.first.weight)
    model.lohan.close()
    assert_same(net, optimizer, plain, its)


class Scaled(nn.Linear):
    """With a parameter that is not used, of a unit that is."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.ones(WIDTH))


class ScaledNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Scaled(), Scaled()


@pytest.mark.parametrize("options", AT_ONCE[:3], ids=str)
def test_copies_that_updates_make_as_a_whole(options: dict[str, Any], hw: HardwareProfile) -> None:
    """Compute copies that users see: what is written meanwhile into one that has no gradient would
    be lost, and is refused."""
    net = ScaledNet().bfloat16()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    model = compiled(net, optimizer, hw, dtype="bf16", states="host", **options)
    model(**batch(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    model(**batch(1)).backward()
    with torch.no_grad():
        net.last.unused.add_(1)  # type: ignore[operator]
    with pytest.raises(StepError, match=r"^parameter last\.unused was written between backward"):
        optimizer.step()
    model.lohan.close()


def test_backward_reads_what_forward_did(hw: HardwareProfile) -> None:
    """A write that is taken over before backward brings no other along, which nobody counts, into
    the copies that backward reads."""

    def trained(*, unseen: bool) -> Tensor:
        ours = Ours(hw, "bf16")
        ours.step(0)

        def between() -> None:
            in_place(ours.net.last.bias)
            if unseen:
                data(ours.net.last.weight)

        ours.step(1, between)
        ours.model.lohan.close()
        return ours.net.first.weight.detach()

    assert identical(trained(unseen=True), trained(unseen=False))


def test_units_that_move_while_a_forward_waits(hw: HardwareProfile) -> None:
    """Their parameters are elsewhere then, but nobody has written into them."""

    def trained(*, move: bool) -> list[Tensor]:
        options = {"schedule": "speculative", "clip_grad_norm": NEVER, "forwards": 2}
        ours = Ours(hw, "bf16", **options)

        def accepted() -> None:
            trials = updater_of(ours.model).trials
            assert trials is not None
            wait_until_begun(trials)

        ours.step(0, before_step=accepted)
        loss = ours.model(**batch(1))
        ours.model.lohan.sync()
        memory = ours.model.lohan.memory
        assert any(states.away for states in memory.states.units)
        if move:
            memory.drop_spares()
        loss.backward()
        ours.optimizer.step()
        ours.model.lohan.close()
        return [loss.detach(), *ours.net.parameters()]

    assert all(map(identical, trained(move=True), trained(move=False)))


@pytest.mark.parametrize("at", ["backward", "step"])
@pytest.mark.parametrize("write", [in_place, other_memory])
def test_masters_that_no_parameter_shows(write: Write, at: str, hw: HardwareProfile) -> None:
    """They begin from what was written, and are more than their copies afterwards."""
    net = weights().bfloat16()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    model = compiled(net, optimizer, hw, dtype="bf16", states="host", schedule="serial")
    p, name = net.first.bias, "first.bias"
    loss = model(**batch(0))
    for now in ("backward", "step"):
        if now == at:
            write(p)
            value = p.detach().float()
        if now == "backward":
            loss.backward()
    optimizer.step()
    assert model.lohan.memory is not None
    master = dict(model.lohan.memory.states.hidden_masters())[name].clone()
    assert not identical(master, value)
    assert torch.allclose(master, value, atol=1e-2)
    assert identical(p.detach(), master.bfloat16())
    with torch.no_grad():
        model(**batch(1))
    assert identical(dict(model.lohan.memory.states.hidden_masters())[name], master)
    model.lohan.close()


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("write", [in_place, other_memory])
@pytest.mark.parametrize(("dtype", "place"), WHERE)
def test_what_backward_reads(
    dtype: str, place: str, write: Write, name: str, hw: HardwareProfile
) -> None:
    """By name; training goes on from what was written."""
    ours = Ours(hw, dtype, place)
    ours.step(0)
    loss = ours.model(**batch(1))
    write(READ[name](ours.net))
    value = READ[name](ours.net).detach().clone()
    with pytest.raises(StepError, match=f"parameter {name} was written between forward and"):
        loss.backward()
    assert identical(READ[name](ours.net).detach(), value)
    assert identical(ours.model(**batch(2)).detach(), loss_of(ours.net, dtype, batch(2)))
    ours.step(3)
    ours.model.lohan.close()


@torch.no_grad()
def loss_of(net: Net, dtype: str, given: dict[str, Tensor]) -> Tensor:
    """By other copies."""
    fresh = Net()
    fresh.load_state_dict(net.state_dict())
    if dtype == "bf16":
        fresh, given = fresh.bfloat16(), {**given, "x": given["x"].bfloat16()}
    loss: Tensor = fresh(**given)
    return loss


@pytest.mark.parametrize("write", [in_place, other_memory])
@pytest.mark.parametrize("options", AT_ONCE, ids=str)
def test_written_when_backward_has_updated_it(
    options: dict[str, Any], write: Write, hw: HardwareProfile
) -> None:
    """The step is done; training goes on."""
    ours = Ours(hw, "bf16", **options)
    ours.step(0)
    with pytest.raises(StepError, match=r"parameter first\.bias was written between backward and"):
        ours.step(1, before_step=lambda: write(ours.net.first.bias))
    ours.optimizer.zero_grad()
    found = ours.model(**batch(2))
    assert identical(found.detach(), loss_of(ours.net, "bf16", batch(2)))
    found.backward()
    ours.optimizer.step()
    ours.model.lohan.close()


def test_a_step_that_is_left_out_loses_no_write(hw: HardwareProfile) -> None:
    ours = Ours(hw, "bf16", schedule="serial", skip_nonfinite=True)
    ours.step(0)
    (ours.model(**batch(1)) * float("inf")).backward()
    other_memory(ours.net.first.bias)
    value = ours.net.first.bias.detach().clone()
    ours.optimizer.step()
    assert ours.model.lohan.skipped_steps == 1
    ours.optimizer.zero_grad()
    assert identical(ours.model(**batch(2)).detach(), loss_of(ours.net, "bf16", batch(2)))
    assert identical(ours.net.first.bias.detach(), value)
    ours.model.lohan.close()
