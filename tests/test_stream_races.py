"""The checker of `tests.stream_races`: what it makes of notes, and of steps on simulated streams.

Simulated streams (`tests.simulated_streams`) let a CPU device's lanes do what they do on CUDA, so
the order that lohan_fx puts its copies in is checked here, too. `tests.test_gpu_races` runs the
same steps on a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import lohan_fx
from lohan_fx.api import LohanModule
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import Plan, Tier
from lohan_fx.planners import Choices, PlannerOptions, finish
from lohan_fx.planners.tiers import unit_tiers
from lohan_fx.runtime.engine import Engine
from lohan_fx.runtime.gradient_offload import GradientOffload
from lohan_fx.runtime.lane import Ticket
from lohan_fx.runtime.lanes import Lanes
from lohan_fx.workload import Workload
from tests.models import loss_of, make
from tests.simulated_streams import SimulatedRaces, SimulatedStreams
from tests.stream_races import (
    MAX_RUNS,
    Launch,
    Order,
    Race,
    Range,
    StreamRaces,
    accesses,
    find_races,
    runs,
    unnoted,
)
from tests.training import Squeezed, cpu_hardware, remember_captures, training_of

COMPUTE, H2D, D2H = 0, 1, 2
USER, LANE = 0, 7
EVENT = 0xE


def reads(stream: int, *ranges: Range, host: int = USER) -> Launch:
    return Launch("read", stream, host, reads=ranges)


def writes(stream: int, *ranges: Range, host: int = USER) -> Launch:
    return Launch("write", stream, host, writes=ranges)


def record(stream: int, event: int = EVENT, host: int = USER) -> Order:
    return Order("record", host, stream, event)


def wait(stream: int, event: int = EVENT, host: int = USER) -> Order:
    return Order("wait", host, stream, event)


def found(*notes: Launch | Order) -> list[Range]:
    return [(race.start, race.stop) for race in find_races(notes)]


# -- what conflicts ------------------------------------------------------------------------------


def test_overlapping_bytes_conflict() -> None:
    """A copy moves a flat; a kernel reads a parameter in its midst."""
    assert found(writes(H2D, (0, 100)), reads(COMPUTE, (40, 60))) == [(40, 60)]
    assert found(writes(H2D, (0, 100)), reads(COMPUTE, (90, 120))) == [(90, 100)]
    assert found(reads(D2H, (40, 60)), writes(COMPUTE, (0, 100))) == [(40, 60)]
    assert found(writes(D2H, (0, 1)), writes(COMPUTE, (0, 1))) == [(0, 1)]


@pytest.mark.parametrize(
    "notes",
    [
        (writes(H2D, (0, 40)), reads(COMPUTE, (40, 60))),
        (reads(H2D, (0, 40)), reads(COMPUTE, (0, 40))),
        (writes(H2D, (0, 40)), reads(H2D, (0, 40)), writes(H2D, (0, 40))),
    ],
    ids=["beside", "both read", "one stream"],
)
def test_no_conflict(notes: Sequence[Launch | Order]) -> None:
    assert not found(*notes)


def test_a_write_is_held_against_all_reads_since_the_last() -> None:
    notes = [writes(COMPUTE, (0, 10)), record(COMPUTE), wait(D2H), wait(H2D)]
    notes += [reads(D2H, (0, 5)), reads(H2D, (5, 10)), writes(COMPUTE, (0, 10))]
    assert len(find_races(notes)) == 1  # one of each pair of places; these look alike
    named = [Launch("a", D2H, reads=((0, 5),)), Launch("b", H2D, reads=((5, 10),))]
    assert found(*notes[:4], *named, writes(COMPUTE, (0, 10))) == [(0, 5), (5, 10)]


def test_writes_in_parts_keep_the_rest() -> None:
    """A later write of some bytes leaves the history of the others."""
    whole = Launch("whole", H2D, writes=((0, 100),))
    notes = [whole, record(H2D), wait(COMPUTE), Launch("part", COMPUTE, writes=((20, 30),))]
    assert found(*notes, reads(D2H, (0, 100))) == [(0, 20), (20, 30)]
    assert found(*notes, record(COMPUTE), wait(D2H), reads(D2H, (0, 100))) == []


# -- what orders ---------------------------------------------------------------------------------


def test_an_event_orders_what_came_before_it() -> None:
    copy, use = writes(H2D, (0, 10)), reads(COMPUTE, (0, 10))
    assert not found(copy, record(H2D), wait(COMPUTE), use)
    assert found(record(H2D), copy, wait(COMPUTE), use)
    assert found(copy, record(H2D), use, wait(COMPUTE))
    assert found(copy, record(H2D), wait(D2H), use)
    assert not found(copy, record(H2D), wait(D2H), record(D2H, 2), wait(COMPUTE, 2), use)


def test_an_event_that_is_made_anew_is_another() -> None:
    """Under the address of one that is gone."""
    copy, use = writes(H2D, (0, 10)), reads(COMPUTE, (0, 10))
    assert found(copy, record(H2D), Order("made", event=EVENT), wait(COMPUTE), use)


def test_a_wait_sees_the_event_as_it_was_then() -> None:
    first, second = writes(H2D, (0, 10)), writes(H2D, (10, 20))
    notes = [first, record(H2D), wait(COMPUTE), second, record(H2D)]
    assert found(*notes, reads(COMPUTE, (0, 20))) == [(10, 20)]


def test_memory_that_was_freed_keeps_its_history() -> None:
    """A residual dies before its copy has ended, and another tensor gets its block."""
    made = [writes(COMPUTE, (0, 64)), record(COMPUTE), wait(D2H), reads(D2H, (0, 64))]
    assert found(*made, writes(COMPUTE, (0, 32))) == [(0, 32)]
    assert not found(*made, record(D2H), wait(COMPUTE), writes(COMPUTE, (0, 32)))


def test_a_wait_for_the_device_orders_everything() -> None:
    copy, use = writes(H2D, (0, 10), host=LANE), reads(COMPUTE, (0, 10))
    assert not found(copy, Order("device"), use)
    assert found(Order("device"), copy, use)


@pytest.mark.parametrize("waited", [Order("stream", USER, H2D), Order("event", USER, 0, EVENT)])
def test_what_a_thread_has_waited_for_comes_before_what_it_launches(waited: Order) -> None:
    copy, use = writes(H2D, (0, 10)), reads(COMPUTE, (0, 10))
    assert not found(copy, record(H2D), waited, use)
    assert not found(
        copy, record(H2D), waited, record(COMPUTE, 2), wait(D2H, 2), reads(D2H, (0, 9))
    )
    assert found(waited, copy, use)


def test_what_another_thread_has_waited_for_does_not() -> None:
    """A lane waits for its own copy; compute has to wait for it as well."""
    copy, use = writes(H2D, (0, 10), host=LANE), reads(COMPUTE, (0, 10))
    assert found(copy, Order("stream", LANE, H2D), use)
    assert not found(copy, Order("stream", LANE, H2D), record(D2H, host=LANE), wait(COMPUTE), use)


def test_a_race_says_who_and_where() -> None:
    copy = Launch("copy_", H2D, LANE, writes=((0, 10),), stack=("lanes.py:1 copy",))
    use = Launch("mm", COMPUTE, USER, reads=((4, 8),), stack=("program:2 forward",))
    [race] = find_races([copy, use, use])
    assert isinstance(race, Race)
    text = str(race)
    assert "4 bytes at 0x4" in text
    for part in (
        "copy_ writes on stream 0x1, by lane thread 7",
        "mm reads on stream 0x0",
        *copy.stack,
    ):
        assert part in text


# -- what ops access -----------------------------------------------------------------------------


def spans(tensor: Tensor, whole: Tensor) -> list[Range]:
    return sorted((a - whole.data_ptr(), b - whole.data_ptr()) for a, b in runs(tensor))


def test_bytes_of_tensors() -> None:
    x = torch.zeros(4, 6)
    assert spans(x, x) == spans(x.t(), x) == spans(x.view(2, 2, 3, 2), x) == [(0, 96)]
    assert spans(x[1:3], x) == [(24, 72)]
    assert spans(x[:, 1:3], x) == [(4, 12), (28, 36), (52, 60), (76, 84)]
    assert spans(x[:2].expand(3, 2, 6), x) == [(0, 48)]
    assert spans(x.as_strided((3, 4), (2, 1)), x) == [(0, 32)]  # overlaps itself
    assert runs(x[:0]) == runs(torch.empty(2, 0)) == []
    many = torch.zeros(MAX_RUNS + 1, 2)
    assert spans(many[:, 0], many) == [(0, MAX_RUNS * 8 + 4)]


def test_two_columns_do_not_conflict() -> None:
    x = torch.zeros(4, 6)
    left, right = writes(H2D, *runs(x[:, :3])), reads(COMPUTE, *runs(x[:, 3:]))
    assert not found(left, right)
    assert found(left, reads(COMPUTE, *runs(x[:, 2:])))


def test_what_schemas_say() -> None:
    x, y = torch.zeros(2), torch.zeros(2)
    aten = torch.ops.aten

    def of(op: Any, *args: Any, **kwargs: Any) -> tuple[list[int], list[int], bool]:
        read, written, makes = accesses(op._schema, args, kwargs, lambda _: True)
        names = {id(x): 1, id(y): 2}
        return [names[id(t)] for t in read], [names[id(t)] for t in written], makes

    assert of(aten.add.Tensor, x, y) == ([1, 2], [], True)
    assert of(aten.copy_.default, x, y, non_blocking=True) == ([2], [1], True)
    assert of(aten.add.out, x, y, out=y) == ([1, 2], [2], True)
    assert of(aten._foreach_add_.List, [x], [y]) == ([2], [1], True)
    assert of(aten.view.default, x, [2]) == ([], [], True)
    assert of(aten.zeros_like.default, x) == ([], [], True)
    assert of(aten.empty_like.default, x) == of(aten.set_.source_Tensor, x, y) == ([], [], False)


# -- steps ---------------------------------------------------------------------------------------


def direct(
    workload: Workload, hw: HardwareProfile, budget: MemoryBudget, options: PlannerOptions
) -> Plan:
    """Swap everything, read units where they lie in host memory, and write gradients there."""
    units = workload.unit_by_name
    choices = Choices(
        actions=dict.fromkeys(workload.residuals, "swap"),
        unit_tiers=unit_tiers(workload, hw, budget, options),
        modes={name: ("direct", "direct-forward")[k % 2] for k, name in enumerate(units)},
        direct_gradients=frozenset(units),
    )
    return finish(workload, hw, budget, options, choices, "direct")


SWAP_ALL = Squeezed("swap-all", 0.0)


def casting(
    workload: Workload, hw: HardwareProfile, budget: MemoryBudget, options: PlannerOptions
) -> Plan:
    """Swap everything; units are on the device or in host memory, and keep no copies there."""
    names = list(workload.unit_by_name)
    tiers: dict[str, Tier] = dict.fromkeys(names[::2], "device")
    tiers.update(dict.fromkeys(names[1::2], "host"))
    return SWAP_ALL(workload, hw, budget, replace(options, fixed_units=tiers, fixed_casts=names))


@dataclass(frozen=True)
class Steps:
    """How a model is compiled and trained. With ``forwards=n``, n forwards come at once."""

    strategy: Any = SWAP_ALL
    states: Any = "host"
    swap_to: Any = "host"
    schedule: Any = "optimized"
    optimizer: str = "sgd"
    num_backwards: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        name = getattr(self.strategy, "strategy", None) or self.strategy.__name__
        return "-".join([name, self.states, self.swap_to, self.schedule, *self.options])

    @property
    def in_host_tier(self) -> bool:
        """Whether simulated streams can watch slabs, too."""
        return self.states != "ssd" and self.swap_to == "host" and self.strategy is not direct


CASES = [
    Steps(),
    Steps(schedule="naive"),
    Steps(schedule="serial"),
    Steps(states="ssd", swap_to="ssd"),
    Steps(states="ssd", swap_to="ssd", schedule="deferred"),
    Steps(states="device"),
    Steps(states="device", swap_to="ssd", options={"accumulate": 2}, num_backwards=2),
    Steps(schedule="overlapped", options={"accumulate": 2}, num_backwards=2),
    Steps(strategy=Squeezed("lohan"), swap_to="auto", schedule="overlapped"),
    Steps(
        strategy=Squeezed("lohan-resident"),
        states="auto",
        schedule="speculative",
        options={"clip_grad_norm": 1e6},
    ),
    Steps(
        strategy=Squeezed("lohan-resident"),
        states="auto",
        schedule="speculative",
        options={"clip_grad_norm": 0.1},
    ),
    Steps(schedule="deferred", options={"clip_grad_norm": 0.1}),
    Steps(strategy=Squeezed("recompute-all"), schedule="overlapped"),
    Steps(options={"gradients": "kept"}, schedule="deferred"),
    Steps(states="device", optimizer="adamw", options={"dtype": torch.bfloat16}),
    Steps(optimizer="adamw", options={"dtype": torch.bfloat16}, schedule="overlapped"),
    Steps(
        strategy=casting,
        optimizer="adamw",
        options={"dtype": torch.bfloat16, "clip_grad_norm": 0.1},
        schedule="speculative",
    ),
    Steps(strategy=direct),
    Steps(strategy=direct, schedule="deferred", options={"accumulate": 2}, num_backwards=2),
    Steps(options={"forwards": 2, "accumulate": 2}, num_backwards=2),
    Steps(
        schedule="speculative",
        options={"clip_grad_norm": 1e6, "accumulate": 2},
        num_backwards=2,
    ),
]


def train(
    steps: Steps,
    hw: HardwareProfile,
    move: Callable[[Any], Any],
    watch: Callable[[], StreamRaces],
) -> StreamRaces:
    """Train for one step, and for three that are watched.

    Args:
        move: brings inputs to the device.
    """
    model, inputs = make("gpt2")
    model.config.use_cache = False
    inputs = {name: move(value) for name, value in inputs.items()}
    training = training_of(steps.optimizer, model)
    options = {"dtype": None, **steps.options}
    made = lohan_fx.compile(
        model,
        hw=hw,
        optimizer=training.optimizer,
        strategy=steps.strategy,
        states=steps.states,
        swap_to=steps.swap_to,
        schedule=steps.schedule,
        fused=False,  # Inductor's kernels would not be seen
        refine=False,
        **options,
    )
    assert isinstance(made, LohanModule)
    try:
        together = options.get("forwards", 1)

        def step() -> None:
            for _ in range(0, steps.num_backwards, together):
                for loss in [loss_of("gpt2", made(**inputs)) for _ in range(together)]:
                    loss.backward()
            training.step()

        step()
        made.lohan.sync()
        watched = watch()
        with watched:
            for _ in range(3):
                step()
            made.lohan.sync()
        return watched
    finally:
        made.lohan.close()


@contextmanager
def without(owner: type, name: str) -> Iterator[None]:
    """Leave a wait out, as far as the checker sees. It is done all the same: what compute would
    read too early may be indices."""
    original = getattr(owner, name)

    def silent(*args: Any) -> Any:
        with unnoted():
            return original(*args)

    with mock.patch.object(owner, name, silent):
        yield


LIKE_OTHERS = [
    Steps(states="ssd", swap_to="ssd", schedule="deferred"),
    Steps(schedule="overlapped", options={"accumulate": 2}, num_backwards=2),
    Steps(states="device", optimizer="adamw", options={"dtype": torch.bfloat16}),
]
"""What these have in common with others, each of them shows."""
PLANTED = [
    pytest.param(Ticket, "wait", id="compute waits for no copy"),
    pytest.param(Lanes, "mark", id="copies do not wait for compute"),
    pytest.param(Engine, "release", id="residuals die under their copy"),
    pytest.param(GradientOffload, "release", id="gradients die under their copy"),
]


def assert_ordered(watched: StreamRaces) -> None:
    assert len(watched.streams) >= 2  # it saw compute and copies
    races = watched.races()
    assert not races, f"{len(races)} races, the first ones:\n" + "\n".join(map(str, races[:3]))


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedStreams]:
    remember_captures(monkeypatch, "races")
    streams = SimulatedStreams()
    with streams():
        yield streams


@pytest.mark.parametrize(
    "steps",
    [pytest.param(s, marks=pytest.mark.slow if s in LIKE_OTHERS else ()) for s in CASES],
    ids=str,
)
def test_steps_on_simulated_streams(
    steps: Steps, simulated: SimulatedStreams, tmp_path: Path
) -> None:
    def watch() -> StreamRaces:
        return SimulatedRaces(simulated, host=steps.in_host_tier)

    assert_ordered(train(steps, cpu_hardware(tmp_path), lambda x: x, watch))


def test_ops_of_ops_are_seen(simulated: SimulatedStreams) -> None:
    """Also below autograd, where composite ones are dispatched whole: our own ops run there."""
    x = torch.ones(2, 3)
    kernel = torch.ops.aten
    with SimulatedRaces(simulated) as watched, torch._C._AutoDispatchBelowAutograd():
        kernel.contiguous.default(x.t())
        kernel.item.default(x[0, 0])
    names = [note.op for note in watched.notes if isinstance(note, Launch)]
    assert names == ["aten.clone.default", "aten.clone.default", "aten._local_scalar_dense.default"]


@pytest.mark.parametrize(
    ("tier", "owner", "name"),
    [
        pytest.param(
            tier, *plant.values, marks=pytest.mark.slow if odd else (), id=f"{tier}-{plant.id}"
        )
        for i, tier in enumerate(("host", "ssd"))
        for k, plant in enumerate(PLANTED)
        for odd in [(i + k) % 2]  # each race in one of the two
    ],
)
def test_planted_races_on_simulated_streams(
    tier: str, owner: type, name: str, simulated: SimulatedStreams, tmp_path: Path
) -> None:
    steps = Steps(states=tier, swap_to=tier)
    with without(owner, name):
        watched = train(
            steps, cpu_hardware(tmp_path), lambda x: x, lambda: SimulatedRaces(simulated)
        )
    assert watched.races()


@pytest.mark.parametrize("schedule", ["serial", "optimized", "overlapped", "deferred"])
def test_updates_wait_for_gradients(
    schedule: str, simulated: SimulatedStreams, tmp_path: Path
) -> None:
    """The planted race is in host memory: updates read gradients that are on their way."""
    with without(Ticket, "synchronize"):
        watched = train(
            Steps(schedule=schedule),
            cpu_hardware(tmp_path),
            lambda x: x,
            lambda: SimulatedRaces(simulated, host=True),
        )
    assert watched.races()


@pytest.mark.parametrize("dtype", [None, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_weights_are_written_after_an_evaluation_has_read_them(
    dtype: torch.dtype | None, simulated: SimulatedStreams, tmp_path: Path
) -> None:
    """By the user, who owns them; in mixed precision by the next forward, which takes them over."""
    model, inputs = make("mlp")
    optimizer = training_of("sgd", model).optimizer
    made = lohan_fx.compile(
        model,
        hw=cpu_hardware(tmp_path),
        optimizer=optimizer,
        states="host",
        schedule="optimized",
        dtype=dtype,
        refine=False,
    )
    assert isinstance(made, LohanModule)
    with torch.no_grad():
        made(**inputs)
        watched = SimulatedRaces(simulated, host=True)
        with watched:
            made(**inputs)
            for p in made.parameters():
                p.mul_(2)
            made(**inputs)
    made.lohan.close()
    assert_ordered(watched)


@pytest.mark.parametrize("end", ["another shape", "deletion"])
def test_slabs_are_unpinned_after_their_copies(end: str, tmp_path: Path) -> None:
    """`Arena.close` wants that. Nothing on the host waits for a step's residuals where no gradient
    leaves the device: not before a program that needs more of them, nor when the model goes."""
    with SimulatedStreams()() as simulated:
        model, inputs = make("gpt2")
        model.config.use_cache = False
        training = training_of("sgd", model)
        made = lohan_fx.compile(
            model,
            hw=cpu_hardware(tmp_path),
            optimizer=training.optimizer,
            strategy=SWAP_ALL,
            states="device",
            swap_to="host",
            schedule="optimized",
            dtype=None,
            refine=False,
        )
        assert isinstance(made, LohanModule)
        loss_of("gpt2", made(**inputs)).backward()
        training.step()
        watched = SimulatedRaces(simulated, host=True)
        with watched:
            loss_of("gpt2", made(**inputs)).backward()
            training.step()
        with watched.listening():
            if end == "another shape":
                loss_of(
                    "gpt2", made(**{k: torch.cat([v, v]) for k, v in inputs.items()})
                ).backward()
                training.step()
                made.lohan.close()
            del made, model, training
            gc.collect()
    assert_ordered(watched)
