"""Where features meet: what a review of them together found, held for ever."""

from __future__ import annotations

import _thread
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lohan_fx
import lohan_fx.compiled.replanning
from lohan_fx._compat import TRACING
from lohan_fx.api import LohanModule
from lohan_fx.backend import backend
from lohan_fx.compiled import allocation, building
from lohan_fx.errors import LohanError, StepError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import SCHEDULES, WHOLE
from lohan_fx.runtime import lane
from lohan_fx.runtime.lane import close_elsewhere, wait_closed
from lohan_fx.runtime.ssd import Syscalls
from lohan_fx.runtime.unit_updates import UnitUpdates
from tests.models import make
from tests.test_refinement import Turns
from tests.training import alternating, remember_captures, training_of


class Sums(nn.Module):
    """One tensor is the gradient of `p`, of `q` and of what the first layer returns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.p, self.q = nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(8, 16))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x) + self.p + self.q)
        return y.square().sum()


@pytest.mark.parametrize("tier", ["device", "host", "ssd"])
@pytest.mark.parametrize(
    "options",
    [
        {"clip_grad_norm": 1.0},
        {"clip_grad_norm": 1.0, "schedule": "serial"},
        {"clip_grad_value": 0.1},
        {"clip_grad_value": 0.1, "schedule": "naive"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_a_gradient_that_others_read_is_clipped_for_each_alone(
    options: dict[str, Any], tier: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember_captures(monkeypatch, "sums")

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, plain: bool) -> list[Tensor]:
        torch.manual_seed(1)
        x = torch.randn(8, 16, requires_grad=True)
        for _ in range(3):
            model(x).backward()
            if plain and "clip_grad_norm" in options:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            elif plain:
                torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        assert x.grad is not None
        return [*(p.detach().clone() for p in model.parameters()), x.grad]

    plain = Sums()
    wanted = run(plain, torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9), True)
    model = Sums()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    options = {"strategy": "keep-all", "states": tier, **options}
    made = lohan_fx.compile(model, hw=hw, optimizer=optimizer, **options)
    found = run(made, optimizer, False)
    assert all(map(torch.equal, found, wanted))
    made.lohan.close()  # type: ignore[attr-defined]


TURNS = {
    "to the device": (("swap-all", "host"), ("keep-all", "device")),
    "to the host": (("swap-all", "device"), ("keep-all", "host")),
}
WRITES = (("copy_", torch.bfloat16), ("data", None), ("load_state_dict", torch.bfloat16))


@pytest.mark.parametrize(("where", "write", "dtype"), alternating(tuple(TURNS), WRITES))
def test_units_that_move_take_along_what_was_written(
    where: str, write: str, dtype: Any, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what somebody holds of the state before stays what it was."""
    seconds = {"swap-all": 2.0, "keep-all": 1.0}
    monkeypatch.setattr(
        lohan_fx.compiled.replanning,
        "step_seconds",
        lambda _, plan, __: seconds[plan.strategy],
    )

    def run(refine: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
        model, inputs = make("mlp")
        training = training_of("adamw", model)
        made = lohan_fx.compile(
            model,
            hw=hw,
            optimizer=training.optimizer,
            strategy=Turns(*TURNS[where]),
            refine=refine,
            dtype=dtype,
            schedule="optimized",
        )
        assert isinstance(made, LohanModule)
        losses = []
        for index in range(6):
            if index == 4:  # before the fifth forward, in which units move
                held = made.state_dict()
                held.update(
                    {
                        str(k): v["exp_avg"]
                        for k, v in training.optimizer.state_dict()["state"].items()
                    }
                )
                held = {k: v for k, v in held.items() if isinstance(v, Tensor)}
                before = {k: v.clone() for k, v in held.items()}
                with torch.no_grad():
                    if write == "load_state_dict":
                        made.load_state_dict({k: v * 0.5 for k, v in made.state_dict().items()})
                    else:
                        for p in made.parameters():
                            if write == "copy_":
                                p.copy_(p * 0.5)
                            else:
                                p.data = p.data * 0.5
                before.update({k: v.clone() for k, v in held.items()})
            torch.manual_seed(index)
            loss = made(**{k: v.detach() for k, v in inputs.items()})
            if index == 4 and refine:
                assert made.lohan.refined is not None
                assert made.lohan.refined.moved
                if write != "data":  # memory that is replaced is copied to where the views look
                    assert all(torch.equal(v, before[k]) for k, v in held.items())
            loss.backward()
            losses.append(loss.detach().clone())
            training.step()
        weights = {k: v.detach().clone() for k, v in made.named_parameters()}
        made.lohan.close()
        return losses, weights

    (losses, weights), (wanted, wanted_weights) = run(True), run(False)
    assert all(map(torch.equal, losses, wanted))
    assert all(torch.equal(v, wanted_weights[k]) for k, v in weights.items())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_learning_rate_that_changes_after_backward(
    schedule: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where units have been updated by then, an error says so; elsewhere the new one counts."""
    remember_captures(monkeypatch, "mlp")

    def run(model: nn.Module, inputs: dict[str, Any], training: Any) -> list[float]:
        losses = []
        for index in range(3):
            torch.manual_seed(index)
            loss = model(**{k: v.detach() for k, v in inputs.items()})
            loss.backward()
            for group in training.optimizer.param_groups:
                group["lr"] = 0.1 / (1 + index)
            training.optimizer.step()
            training.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    plain, inputs = make("mlp")
    wanted = run(plain, inputs, training_of("adamw", plain))
    model, _ = make("mlp")
    training = training_of("adamw", model)
    made = lohan_fx.compile(
        model,
        hw=hw,
        optimizer=training.optimizer,
        strategy="keep-all",
        states="host",
        schedule=schedule,  # type: ignore[arg-type]
    )
    if schedule in WHOLE:
        assert run(made, inputs, training) == wanted
    else:
        with pytest.raises(StepError, match="changed between backward and"):
            run(made, inputs, training)
        made(**{k: v.detach() for k, v in inputs.items()}).backward()
        training.optimizer.step()  # with the rate that backward has seen
    made.lohan.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("schedule", "tier"), alternating(sorted({*SCHEDULES} - {"serial"}), ("host", "ssd"))
)
def test_forward_after_an_interrupted_step(
    schedule: str, tier: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the weights that the step makes, whenever they are done."""
    remember_captures(monkeypatch, "mlp")
    plain, inputs = make("mlp")
    theirs = training_of("adamw", plain)
    model, _ = make("mlp")
    ours = training_of("adamw", model)
    made = lohan_fx.compile(
        model,
        hw=hw,
        optimizer=ours.optimizer,
        strategy="keep-all",
        states=tier,
        schedule=schedule,  # type: ignore[arg-type]
    )
    step = UnitUpdates.run

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.05)
        return step(*args, **kwargs)

    def one(side: nn.Module, training: Any) -> Tensor:
        torch.manual_seed(5)
        loss: Tensor = side(**{k: v.detach() for k, v in inputs.items()})
        loss.backward()
        return loss.detach()

    assert torch.equal(one(made, ours), one(plain, theirs))
    theirs.step()
    ours.step()
    monkeypatch.setattr(UnitUpdates, "run", slow)
    assert torch.equal(one(made, ours), one(plain, theirs))
    theirs.step()
    timer = threading.Timer(0.02, _thread.interrupt_main)
    timer.start()
    try:
        ours.optimizer.step()
        time.sleep(0.1)  # a late schedule's step returns at once
    except KeyboardInterrupt:
        pass
    timer.join()
    ours.optimizer.zero_grad()
    if ours.scheduler is not None:
        ours.scheduler.step()
    assert torch.equal(one(made, ours), one(plain, theirs))
    made.lohan.close()  # type: ignore[attr-defined]


def test_a_finalizer_on_a_thread_of_ours_does_not_wait_for_it() -> None:
    done: list[str] = []

    def collect() -> None:
        close_elsewhere(close)

    def close() -> None:
        thread.join(timeout=10)
        done.append("ended" if not thread.is_alive() else "waits for itself")

    thread = threading.Thread(target=collect)
    thread.start()
    thread.join(timeout=20)
    wait_closed()
    assert done == ["ended"]
    close_elsewhere(lambda: done.append(threading.current_thread().name))
    assert done[-1] == threading.main_thread().name


def test_an_interrupt_when_a_finalizer_has_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes when the thread is there: who waits for what that closes goes on to."""
    start, go_on, done = _thread.start_new_thread, threading.Event(), []

    def struck(*args: Any) -> None:
        start(*args)
        if args[0].__module__ == lane.__name__:
            raise KeyboardInterrupt

    def close() -> None:
        assert go_on.wait(timeout=30)
        done.append("closed")

    with TRACING, monkeypatch.context() as patch:
        patch.setattr(_thread, "start_new_thread", struck)
        close_elsewhere(close)
    threading.Timer(0.1, go_on.set).start()
    wait_closed()
    assert done == ["closed"]


def test_memory_of_a_model_that_is_gone_is_waited_for(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, seen = threading.Event(), []
    allocate = allocation.allocate

    def close() -> None:
        assert asked.wait(timeout=30)
        seen.append("closed")

    def waiting() -> None:
        asked.set()
        wait_closed()

    def allocated(*args: Any, **options: Any) -> Any:
        seen.append("allocated")
        return allocate(*args, **options)

    monkeypatch.setattr(building, "wait_closed", waiting)
    monkeypatch.setattr(allocation, "allocate", allocated)
    with TRACING:
        close_elsewhere(close)
    model, inputs = make("mlp")
    optimizer = training_of("adam", model).optimizer
    made = lohan_fx.compile(model, hw=hw, optimizer=optimizer, strategy="recompute-all")
    made(**inputs)
    made.lohan.close()
    assert seen == ["closed", "allocated"]


@pytest.mark.usefixtures("closed_backends")
def test_a_slow_write_of_one_call_keeps_its_buffer(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of a compiled block share staging buffers: one ends while another's write runs."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(nn.functional.gelu(self.up(x)))

    write, slow = Syscalls.pwritev, [False]

    def pwritev(self: Syscalls, *args: Any) -> int:
        if slow[0]:
            slow[0] = False
            time.sleep(0.7)
        return write(self, *args)

    monkeypatch.setattr(Syscalls, "pwritev", pwritev)

    def gradients(compiled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        blocks = nn.ModuleList(Block() for _ in range(3))
        x = torch.randn(2048, 64, requires_grad=True)
        memory = {"device": "200MiB", "host": "200MiB", "ssd": "500MiB"}
        options = {"hw": hw, "strategy": "swap-all", "swap_to": "ssd", "memory": memory}
        for block in blocks if compiled else ():
            block.compile(backend=backend, options=options)
        for index in range(2):
            slow[0] = compiled and index == 1
            blocks.zero_grad()
            h = x
            for block in blocks:
                h = block(h)
            h.square().mean().backward()
        return [p.grad for p in blocks.parameters() if p.grad is not None]

    assert all(map(torch.equal, gradients(True), gradients(False)))
    assert not slow[0]


def test_loading_in_the_middle_of_a_window_begins_it_again(
    hw: HardwareProfile, tmp_path: Path
) -> None:
    def steps(model: nn.Module, inputs: dict[str, Any], training: Any) -> list[Tensor]:
        for index in range(2):
            torch.manual_seed(index)
            model(**{k: v.detach() for k, v in inputs.items()}).backward()
        training.optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    model, inputs = make("mlp")
    training = training_of("adamw", model)
    made = lohan_fx.compile(model, hw=hw, optimizer=training.optimizer, states="host", accumulate=2)
    steps(made, inputs, training)
    lohan_fx.save(made, tmp_path / "checkpoint")
    wanted = steps(made, inputs, training)
    made(**{k: v.detach() for k, v in inputs.items()}).backward()
    with pytest.warns(UserWarning, match="load in the middle of a step: gradients of 1 backward"):
        lohan_fx.load(made, tmp_path / "checkpoint")
    assert all(map(torch.equal, steps(made, inputs, training), wanted))
    made.lohan.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hw": 5}, "hw=5: use a profile"),
        ({"hw": "nowhere.json"}, "cannot read the hardware profile nowhere.json: No such"),
        ({"plan": "nowhere.json"}, "cannot read the plan nowhere.json: No such file"),
        ({"optimizer": torch.optim.AdamW}, r"optimizer= needs .* not AdamW"),
        ({"hw": Path()}, "no hardware preset '.'"),
        ({"plan": 5}, "plan=5: use a plan"),
        ({"strategy": 3}, "a name or a callable, not int"),
        (
            {"strategy": lambda: None},
            r"with workload, hw, budget and options, and .*cannot",
        ),
        ({"memory": "lots"}, "memory='lots': write it as"),
        ({"outputs": 5}, "outputs=5: use 'auto', 'all', or a sequence"),
        ({"outputs": []}, "use 'auto', 'all', or a sequence"),
        ({"dtype": torch.int32}, "dtype=torch.int32: use 'auto', None, one of"),
        ({"dtype": 5}, "dtype=5: use 'auto', None, one of"),
        ({"dtype": torch.float8_e4m3fn}, "use 'auto', None, one of"),
        ({"weights": {5: torch.ones(2)}}, "weights has the key 5: keys are names"),
        ({"fused": torch.ones(2)}, "use True, False or 'auto'"),
        ({"loss_chunk_bytes": "1MiB"}, "use a number of bytes"),
        ({"forwards": "2"}, "use a number of forwards, at least 1"),
        ({"accumulate": True}, "use 'manual' or a number"),
        ({"clip_grad_norm": float("nan")}, "use None or a number"),
        ({"clip_grad_norm": "1"}, "use None or a number"),
        ({"clip_grad_value": True}, "use None or a number"),
        ({"skip_nonfinite": "yes"}, "use True or False"),
        ({"refine": "yes"}, "use True, False or 'auto'"),
        ({"loss_chunk_bytes": -1}, "bytes, or 0 for never"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_named(
    options: dict[str, Any], message: str, hw: HardwareProfile
) -> None:
    model, _ = make("mlp")
    given = {"hw": hw, "optimizer": training_of("adamw", model).optimizer, **options}
    with pytest.raises(LohanError, match=message):
        lohan_fx.compile(model, **given)
    assert not isinstance(model, LohanModule)


def test_what_is_given_without_its_name_is_told_it(hw: HardwareProfile) -> None:
    model, _ = make("mlp")
    optimizer = training_of("adamw", model).optimizer
    compile: Any = lohan_fx.compile  # a checker of types refuses these calls, too
    for given, message in (
        ((optimizer,), r"by its place: write the AdamW as optimizer=…, as in .*optimizer=opt"),
        ((hw, optimizer), "write the HardwareProfile as hw=…"),
        (("pareto",), "write every other argument by its name"),
    ):
        with pytest.raises(LohanError, match=message):
            compile(model, *given)
    with pytest.raises(LohanError, match="not the AdamW: write optimizer= for that"):
        compile(model, hw=optimizer)
    assert not isinstance(model, LohanModule)


@pytest.mark.parametrize(("own", "dtype"), [("float16", "bf16"), ("bfloat16", "fp16")])
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
def test_a_trained_parameter_has_to_show_its_master_or_copy(
    own: str, dtype: str, trained: bool, hw: HardwareProfile
) -> None:
    """Of a third dtype it would keep what it was before training."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[0].to(getattr(torch, own)).requires_grad_(trained)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    if trained:
        with pytest.raises(LohanError, match=rf"0\.weight is trained and torch\.{own}.*\.float"):
            lohan_fx.compile(model, hw=hw, optimizer=optimizer, dtype=dtype)
        return
    made = lohan_fx.compile(model, hw=hw, optimizer=optimizer, dtype=dtype)
    made(torch.randn(4, 16)).sum().backward()
    made.lohan.close()
