"""Schedule "overlapped": updates that run beside the next forward change nothing but time."""

from __future__ import annotations

import gc
import itertools
import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lohan_fx
from lohan_fx.api import LohanModule
from lohan_fx.errors import StepError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.runtime import ssd
from lohan_fx.runtime.arena import BufferRing
from lohan_fx.runtime.lane import Lane, RankedLane, Ticket
from lohan_fx.runtime.unit_updates import UnitUpdates
from lohan_fx.runtime.updates import Updater
from tests.models import MLP, loss_of, make
from tests.training import (
    Squeezed,
    Training,
    alternating,
    ended,
    identical,
    model_threads,
    remember_captures,
    training_of,
)

TIERS = ("device", "host", "ssd")
LATE_TIERS = ("host", "ssd")
"""Units on the device are updated by compute itself."""


def slow_updates(patch: pytest.MonkeyPatch, longest_s: float, seed: int = 0) -> None:
    """Every update takes up to `longest_s` longer, at its begin or at its end."""
    original = UnitUpdates.run
    chance = random.Random(seed)

    def slow(*args: Any, **kwargs: Any) -> None:
        before, after = (chance.uniform(0, longest_s / 2) for _ in range(2))
        time.sleep(before)
        original(*args, **kwargs)
        time.sleep(after)

    patch.setattr(UnitUpdates, "run", slow)


def compiled(
    name: str,
    hw: HardwareProfile,
    patch: pytest.MonkeyPatch | None,
    *,
    optimizer: str = "adamw",
    **options: Any,
) -> tuple[LohanModule, dict[str, Any], Training]:
    if patch is not None:
        remember_captures(patch, name)
    model, inputs = make(name)
    training = training_of(optimizer, model)
    options = {
        "strategy": Squeezed("swap-all"),
        "states": "ssd",
        "swap_to": "ssd",
        "schedule": "overlapped",
        **options,
    }
    made = lohan_fx.compile(model, hw=hw, optimizer=training.optimizer, **options)
    assert isinstance(made, LohanModule)
    return made, inputs, training


def one_step(
    name: str, model: nn.Module, inputs: dict[str, Any], training: Training, seed: int
) -> Tensor:
    """As a user's loop; unlike `training.step`, it does not look at parameters."""
    torch.manual_seed(seed)
    loss = loss_of(name, model(**inputs))
    loss.backward()
    training.step()
    return loss.detach()


def updater_of(model: LohanModule) -> Updater:
    assert model.lohan.memory is not None
    assert model.lohan.memory.updater is not None
    return model.lohan.memory.updater


def running(model: LohanModule) -> bool:
    return any(not t.done() for t in updater_of(model)._jobs.tickets)


def plain_steps(name: str, num_steps: int, optimizer: str = "adamw") -> tuple[Any, ...]:
    """Losses, model and training of plain PyTorch."""
    model, inputs = make(name)
    training = training_of(optimizer, model)
    losses = [one_step(name, model, inputs, training, seed) for seed in range(num_steps)]
    return losses, model, training


def assert_same_model(found: nn.Module, wanted: nn.Module) -> None:
    pairs = [
        *zip(found.parameters(), wanted.parameters(), strict=True),
        *zip(found.buffers(), wanted.buffers(), strict=True),
    ]
    assert pairs
    assert all(identical(a, b) for a, b in pairs)


def assert_same_states(found: nn.Module, its: Training, wanted: nn.Module, plain: Training) -> None:
    for p, q in zip(found.parameters(), wanted.parameters(), strict=True):
        have, want = its.optimizer.state[p], plain.optimizer.state[q]
        assert have.keys() == want.keys()
        assert want or not q.requires_grad
        for name, value in want.items():
            assert identical(torch.as_tensor(have[name]), value), name


# -- steps -----------------------------------------------------------------------------------------


QUICK = {
    ("gpt2", "ssd", "swap-all"),
    ("gpt2", "host", "recompute-all"),
    ("mlp", "host", "swap-all"),
    ("mlp", "device", "swap-all"),
    ("resnet", "ssd", "recompute-all"),
    ("frozen", "ssd", "swap-all"),
    ("frozen", "host", "recompute-all"),
}
CASES = [
    pytest.param(*row, marks=() if row in QUICK else pytest.mark.slow)
    for row in itertools.product(
        ("gpt2", "mlp", "resnet", "frozen", "tied"), TIERS, ("swap-all", "recompute-all", "random")
    )
]


@pytest.mark.parametrize(("name", "states", "strategy"), CASES)
def test_late_updates_change_nothing(
    name: str,
    states: str,
    strategy: str,
    hw: HardwareProfile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Losses, weights and moments of some steps, with a learning rate that changes."""
    num_steps = 3
    losses, reference, plain = plain_steps(name, num_steps)
    slow_updates(monkeypatch, 0.02, seed=hash_of(name, states))
    model, inputs, training = compiled(
        name, hw, monkeypatch, states=states, strategy=Squeezed(strategy)
    )
    late = 0
    for seed, wanted in enumerate(losses):
        assert identical(one_step(name, model, inputs, training, seed), wanted)
        late += running(model)
    if states != "device":
        assert late == num_steps
    model.lohan.close()
    assert_same_model(model, reference)
    assert_same_states(model, training, reference, plain)


def hash_of(*words: str) -> int:
    """The same in every process, unlike `hash`."""
    return sum(map(ord, "".join(words)))


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_late_updates_of_other_optimizers(
    optimizer: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, reference, plain = plain_steps("mlp", 3, optimizer)
    slow_updates(monkeypatch, 0.02)
    model, inputs, training = compiled("mlp", hw, monkeypatch, optimizer=optimizer, states="host")
    for seed, wanted in enumerate(losses):
        assert identical(one_step("mlp", model, inputs, training, seed), wanted)
    model.lohan.close()
    assert_same_model(model, reference)
    assert_same_states(model, training, reference, plain)


@pytest.mark.parametrize(
    ("how", "states"),
    alternating(("state_dict", "parameters", "sync", "close", "load"), LATE_TIERS),
)
def test_who_asks_gets_updated_weights(
    how: str, states: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, reference, _ = plain_steps("mlp", 2)
    slow_updates(monkeypatch, 0.06)
    model, inputs, training = compiled("mlp", hw, monkeypatch, states=states)
    held = list(model.parameters())
    wanted = reference.state_dict()
    for seed, loss in enumerate(losses):
        assert identical(one_step("mlp", model, inputs, training, seed), loss)
    assert running(model)
    if how == "state_dict":
        found = model.state_dict()
    elif how == "parameters":
        found = dict(zip(wanted, model.parameters(), strict=True))
    elif how == "load":
        model.load_state_dict({k: torch.full_like(v, 0.5) for k, v in wanted.items()})
        found = dict(model.named_parameters())
        wanted = {k: torch.full_like(v, 0.5) for k, v in wanted.items()}
    else:
        model.lohan.sync() if how == "sync" else model.lohan.close()
        found = dict(zip(wanted, held, strict=True))
    if how != "close":
        assert not running(model)
    assert all(identical(found[k], v) for k, v in wanted.items())
    if how != "close":
        model.lohan.close()


@pytest.mark.parametrize("schedule", ["optimized", "overlapped"])
@pytest.mark.parametrize("states", LATE_TIERS)
def test_who_asks_between_backward_and_step_gets_whole_units(
    states: str, schedule: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, reference, _ = plain_steps("mlp", 1)
    slow_updates(monkeypatch, 0.06)
    model, inputs, training = compiled("mlp", hw, monkeypatch, states=states, schedule=schedule)
    torch.manual_seed(0)
    loss_of("mlp", model(**inputs)).backward()
    assert running(model)
    found = list(model.parameters())
    assert not running(model)
    assert all(map(identical, found, reference.parameters()))
    training.step()
    assert_same_model(model, reference)
    model.lohan.close()


@pytest.mark.parametrize("states", [pytest.param("host", marks=pytest.mark.slow), "ssd"])
def test_evaluation_beside_updates(
    states: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the weights that the step before made."""
    slow_updates(monkeypatch, 0.03)
    model, inputs, training = compiled("gpt2", hw, monkeypatch, states=states)
    reference, batch = make("gpt2")
    plain = training_of("adamw", reference)

    def evaluate(side: nn.Module, its: dict[str, Any]) -> Tensor:
        side.eval()
        with torch.no_grad():
            found = side(**its).loss
        side.train()
        assert isinstance(found, Tensor)
        return found

    for seed in range(3):
        wanted = one_step("gpt2", reference, batch, plain, seed)
        assert identical(one_step("gpt2", model, inputs, training, seed), wanted)
        assert running(model)
        assert identical(evaluate(model, inputs), evaluate(reference, batch))
    model.lohan.close()


@pytest.mark.parametrize("states", ["host", pytest.param("ssd", marks=pytest.mark.slow)])
def test_another_shape_beside_updates(
    states: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its program needs larger buffers than those through which updates run."""
    slow_updates(monkeypatch, 0.03)
    model, _, training = compiled("mlp", hw, None, states=states)
    reference, batch = make("mlp")
    plain = training_of("adamw", reference)
    for seed, size in enumerate((2, 6, 4, 6, 2)):
        inputs = {k: v[:size] for k, v in batch.items()}
        wanted = one_step("mlp", reference, inputs, plain, seed)
        assert identical(one_step("mlp", model, inputs, training, seed), wanted)
        assert running(model)
    model.lohan.close()
    assert_same_model(model, reference)


def test_two_models_at_once(hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """One updates while the other runs forward, backward, and its own updates."""
    slow_updates(monkeypatch, 0.03)
    sides = []
    for name, states in (("mlp", "host"), ("gpt2", "ssd")):
        losses, reference, plain = plain_steps(name, 3)
        model, inputs, training = compiled(name, hw, None, states=states)
        sides.append((name, losses, reference, plain, model, inputs, training))
    for seed in range(3):
        for name, losses, _, _, model, inputs, training in sides:
            assert identical(one_step(name, model, inputs, training, seed), losses[seed])
    for _, _, reference, plain, model, _, training in sides:
        model.lohan.close()
        assert_same_model(model, reference)
        assert_same_states(model, training, reference, plain)


def test_a_failed_forward_beside_updates(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates of the step before end as if it had not been."""
    losses, reference, _ = plain_steps("gpt2", 3)
    slow_updates(monkeypatch, 0.03)
    model, inputs, training = compiled("gpt2", hw, monkeypatch)
    for seed, wanted in enumerate(losses):
        assert identical(one_step("gpt2", model, inputs, training, seed), wanted)
        assert running(model)
        with pytest.raises(IndexError):
            model(**{**inputs, "input_ids": inputs["input_ids"] + 10_000})
    model.lohan.close()
    assert_same_model(model, reference)


@pytest.mark.parametrize("states", LATE_TIERS)
def test_a_model_that_is_dropped_beside_updates(
    states: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = model_threads()
    slow_updates(monkeypatch, 0.03)
    model, inputs, training = compiled("mlp", hw, None, states=states)  # captures hold models
    one_step("mlp", model, inputs, training, 0)
    held = list(model.parameters())
    one_step("mlp", model, inputs, training, 1)
    assert running(model)
    del model, training
    gc.collect()
    assert ended(model_threads() - before)
    assert not list(Path(hw.ssds[0].path).rglob("*"))
    _, reference, _ = plain_steps("mlp", 2)
    assert all(identical(p, q) for p, q in zip(held, reference.parameters(), strict=True))


# -- failures --------------------------------------------------------------------------------------


class InjectedError(Exception):
    pass


@pytest.mark.parametrize(
    ("how", "states"),
    alternating(("forward", "evaluation", "sync", "parameters", "close"), LATE_TIERS),
)
def test_an_update_that_fails(
    how: str, states: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised where the weights are needed next; what took the step is named."""
    losses, _, _ = plain_steps("mlp", 2)
    model, inputs, training = compiled("mlp", hw, monkeypatch, states=states)
    assert identical(one_step("mlp", model, inputs, training, 0), losses[0])
    model.lohan.sync()
    go = threading.Event()
    original = UnitUpdates.run
    calls = [0]

    def fail_second(*args: Any, **kwargs: Any) -> None:
        assert go.wait(30)
        calls[0] += 1
        if calls[0] == 2:
            raise InjectedError
        original(*args, **kwargs)

    def evaluate() -> None:
        with torch.no_grad():
            model(**inputs)

    def forward() -> None:
        model(**inputs).backward()

    with monkeypatch.context() as patch:
        patch.setattr(UnitUpdates, "run", fail_second)
        threading.Timer(0.05, go.set).start()
        # the SSD's gradients pass two buffers: backward waits for updates, and meets nothing
        assert identical(one_step("mlp", model, inputs, training, 1), losses[1])
        if how == "close":
            model.lohan.close()
        else:
            ask = {
                "forward": forward,
                "evaluation": evaluate,
                "sync": model.lohan.sync,
                "parameters": lambda: list(model.parameters()),
            }[how]
            with pytest.raises(InjectedError):
                ask()
            assert updater_of(model).torn
            for again in (forward, evaluate):
                with pytest.raises(StepError, match=r"between two steps: .* took the step"):
                    again()
            model.lohan.close()
    assert not list(Path(hw.ssds[0].path).rglob("*"))
    assert not isinstance(model, LohanModule)
    other, batch, its = compiled("mlp", hw, monkeypatch, states=states)
    for seed, wanted in enumerate(losses):
        assert identical(one_step("mlp", other, batch, its, seed), wanted)
    other.lohan.close()


# -- buffers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["optimized", "overlapped"])
def test_reading_ahead_leaves_a_buffer_to_the_update_that_waits(
    schedule: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update that has asked for a buffer late must not find all of them read into by others,
    which are updated behind it."""
    original, written = BufferRing.acquire, ssd.Syscalls.pwritev

    def late(self: BufferRing) -> Tensor:
        if threading.current_thread().name == "lohan_fx-optimizer":
            time.sleep(0.1)  # writes end meanwhile, and free buffers
        return original(self)

    def slow(self: ssd.Syscalls, *arguments: Any) -> int:
        time.sleep(0.02)  # updates run ahead of their writes
        return written(self, *arguments)

    monkeypatch.setattr(BufferRing, "acquire", late)
    monkeypatch.setattr(ssd.Syscalls, "pwritev", slow)
    torch.manual_seed(0)
    batch = {"x": torch.randn(6, 16), "y": torch.randint(0, 10, (6,))}
    sides: list[list[Tensor]] = []

    def train(model: nn.Module) -> None:
        training = training_of("adam", model)
        if sides:
            model = lohan_fx.compile(
                model,
                hw=hw,
                optimizer=training.optimizer,
                strategy="swap-all",
                states="ssd",
                schedule=schedule,  # type: ignore[arg-type]
            )
        sides.append([one_step("mlp", model, batch, training, seed) for seed in range(3)])
        if isinstance(model, LohanModule):
            model.lohan.close()

    def model() -> nn.Module:
        torch.manual_seed(0)
        return MLP(num_layers=8)

    train(model())
    thread = threading.Thread(target=train, args=(model(),), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "updates wait for each other"
    assert all(map(identical, *sides))


# -- the lane --------------------------------------------------------------------------------------


@pytest.fixture
def lane() -> Iterator[RankedLane]:
    made = RankedLane("test")
    yield made
    made.close()


def finished() -> Ticket:
    ticket = Ticket()
    ticket.finish()
    return ticket


class Jobs:
    """Jobs that note their names when they run. The first holds the lane until `go`."""

    def __init__(self, lane: RankedLane) -> None:
        self.lane = lane
        self.ran: list[str] = []
        self.go = threading.Event()
        self.tickets = [lane.submit(self._hold)]

    def _hold(self) -> None:
        assert self.go.wait(30)

    def add(self, name: str, rank: int | None = None, ready: Ticket | None = None) -> None:
        def job() -> None:
            if ready is not None:
                ready.synchronize()
            self.ran.append(name)

        if rank is None:
            self.tickets.append(self.lane.submit(job))
        else:
            assert ready is not None
            self.tickets.append(self.lane.submit_ranked(job, rank, ready))

    def finish(self) -> Sequence[str]:
        self.go.set()
        for ticket in self.tickets:
            ticket.synchronize()
        return self.ran


def test_the_lowest_rank_runs_first(lane: RankedLane) -> None:
    jobs = Jobs(lane)
    for name, rank in (("a", 3), ("b", 1), ("c", 2), ("d", 1), ("e", -5)):
        jobs.add(name, rank, finished())
    assert jobs.finish() == ["e", "b", "d", "c", "a"]  # of equal ranks: the first


def test_what_is_not_ready_waits(lane: RankedLane) -> None:
    jobs, late = Jobs(lane), Ticket()
    jobs.add("late", -1, late)
    jobs.add("ready", 5, finished())
    jobs.go.set()
    jobs.tickets[2].synchronize()
    assert jobs.ran == ["ready"]
    late.finish()
    assert jobs.finish() == ["ready", "late"]


def test_in_order_if_nothing_is_ready(lane: RankedLane) -> None:
    jobs = Jobs(lane)
    tickets = [Ticket() for _ in range(3)]
    for name, rank, ticket in zip("abc", (2, 1, 3), tickets, strict=True):
        jobs.add(name, rank, ticket)
    jobs.go.set()
    jobs.tickets[0].synchronize()
    time.sleep(0.02)  # the lane has chosen
    for ticket in reversed(tickets):
        ticket.finish()
    assert jobs.finish() == ["a", "b", "c"]


def test_jobs_without_a_rank(lane: RankedLane) -> None:
    """They are ready, and of rank 0."""
    jobs = Jobs(lane)
    jobs.add("ranked", 1, finished())
    jobs.add("plain")
    jobs.add("first", -1, finished())
    assert jobs.finish() == ["first", "plain", "ranked"]


def test_a_failed_input_is_ready(lane: RankedLane) -> None:
    """Its job runs, and fails; others do not."""
    jobs, broken = Jobs(lane), Ticket()
    broken.fail(InjectedError())
    jobs.add("broken", 0, broken)
    jobs.add("good", 1, finished())
    jobs.go.set()
    with pytest.raises(InjectedError):
        jobs.tickets[1].synchronize()
    jobs.tickets.pop(1)
    assert jobs.finish() == ["good"]


def test_closing_runs_what_is_queued() -> None:
    lane = RankedLane("test")
    jobs = Jobs(lane)
    for k in range(5):
        jobs.add(str(k), -k, finished())
    jobs.go.set()
    lane.close()
    lane.close()
    assert jobs.ran == ["4", "3", "2", "1", "0"]
    assert not lane._unsettled
    with pytest.raises(StepError, match="closed"):
        lane.submit(lambda: None)
    with pytest.raises(StepError, match="closed"):
        lane.submit_ranked(lambda: None, 0, finished())


def test_a_plain_lane_runs_in_order() -> None:
    lane = Lane("test")
    ran: list[int] = []
    for k in range(100):
        lane.submit(lambda k=k: ran.append(k))  # type: ignore[misc]
    lane.drain()
    assert ran == list(range(100))
    lane.close()
