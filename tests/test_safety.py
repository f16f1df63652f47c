"""Bad input, interrupted steps, and what must be back where it was: errors are early and clear.

A test that goes on after an error compares what follows with plain PyTorch, bit by bit.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import logging
import os
import pickle
import resource
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import lohan_fx
import lohan_fx.compiled.building
import lohan_fx.compiled.lookup
from lohan_fx.api import LohanModule
from lohan_fx.errors import (
    InsufficientMemoryError,
    LohanError,
    StepError,
    StorageError,
    UnsupportedOptimizerError,
    format_bytes,
    format_need,
)
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import SCHEDULES, WHOLE
from lohan_fx.runtime import arena, ssd
from lohan_fx.runtime.engine import Engine
from lohan_fx.runtime.trials import Trials
from lohan_fx.runtime.unit_updates import UnitUpdates
from lohan_fx.runtime.updates import Updater
from tests.models import make
from tests.training import (
    Snapshot,
    Squeezed,
    Training,
    alternating,
    assert_identical,
    assert_same_weights,
    cpu_hardware,
    eager,
    identical,
    remember_captures,
    step,
    training_of,
)

TIERS = ("device", "host", "ssd")


class Run(NamedTuple):
    """A compiled model with all that a loop needs."""

    name: str
    model: LohanModule
    inputs: dict[str, Any]
    training: Training

    def step(self, seed: int) -> Snapshot:
        return step(self.name, self.model, self.inputs, seed, self.training.step)

    def forward(self, seed: int) -> Tensor:
        torch.manual_seed(seed)
        found = self.model(**self.inputs)
        return found if isinstance(found, Tensor) else found.loss


def start(
    name: str,
    hw: HardwareProfile,
    monkeypatch: pytest.MonkeyPatch | None = None,
    *,
    optimizer: str = "adamw",
    **options: Any,
) -> Run:
    """Compile an example. With `monkeypatch`, its capture may come from an earlier test."""
    if monkeypatch is not None:
        remember_captures(monkeypatch, name)
    model, inputs = make(name)
    training = training_of(optimizer, model)
    options = {"strategy": Squeezed("swap-all", 0.0), "states": "ssd", "swap_to": "ssd", **options}
    made = lohan_fx.compile(model, hw=hw, optimizer=training.optimizer, **options)
    assert isinstance(made, LohanModule)
    return Run(name, made, inputs, training)


def files_in(hw: HardwareProfile) -> list[Path]:
    return [path for d in hw.ssds for path in Path(d.path).rglob("*")]


# -- too little memory ---------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["swap-all", "lohan", "recompute-all", "keep-all"])
def test_too_little_device_memory(
    strategy: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"strategy": strategy, "states": "host", "swap_to": "host"}
    run = start("gpt2", hw, monkeypatch, memory={"device": "20KiB"}, **options)
    before = {k: v.clone() for k, v in run.model.state_dict().items()}
    with pytest.raises(InsufficientMemoryError) as caught:
        run.forward(0)
    error = caught.value
    assert (error.tier, error.have_bytes) == ("device", 20 * 1024)
    lines = str(error).splitlines()
    assert lines[0] == (
        f"not enough device memory: need {format_need(error.need_bytes)}, have 20.00 KiB "
        f"(peak at {error.where})"
    )
    assert lines[1] == "resident at the peak, largest first:"
    sizes = [size for _, size in error.at_peak]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) <= error.need_bytes
    for (name, size), line in zip(error.at_peak[:8], lines[2:], strict=False):
        assert line.split(maxsplit=2) == [*format_bytes(size).split(), name]
    if rest := sizes[8:]:
        assert lines[10].split(maxsplit=2)[2] == f"and {len(rest)} more, together"
    assert all(identical(v, before[k]) for k, v in run.model.state_dict().items())
    run.model.lohan.close()

    # What it asks for is enough, and a byte less is not.
    for less in (1, 0):
        run = start("gpt2", hw, monkeypatch, memory={"device": error.need_bytes - less}, **options)
        if less:
            with pytest.raises(InsufficientMemoryError):
                run.forward(0)
        else:
            assert_identical(run.step(0), eager("gpt2", "adamw")[0])
        run.model.lohan.close()


@pytest.mark.parametrize(
    ("tier", "options", "parts"),
    [
        ("host", {"states": "host", "swap_to": "host"}, {"units", "residuals", "gradients"}),
        ("ssd", {"states": "ssd", "swap_to": "ssd"}, {"units", "residuals"}),
    ],
)
def test_too_little_host_memory_or_ssd(
    tier: str,
    options: dict[str, str],
    parts: set[str],
    hw: HardwareProfile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = start("gpt2", hw, monkeypatch, memory={tier: "100KiB"}, **options)
    with pytest.raises(InsufficientMemoryError) as caught:
        run.forward(0)
    error = caught.value
    assert (error.tier, error.have_bytes) == (tier, 100 * 1024)
    assert f"not enough {tier} memory: need {format_need(error.need_bytes)}" in str(error)
    assert {name for name, _ in error.at_peak} == parts
    assert sum(size for _, size in error.at_peak) == error.need_bytes
    assert not files_in(hw)
    run.model.lohan.close()
    run = start("gpt2", hw, monkeypatch, memory={tier: error.need_bytes}, **options)
    assert_identical(run.step(0), eager("gpt2", "adamw")[0])
    run.model.lohan.close()


def test_an_evaluation_that_settles_where_units_are(
    hw: HardwareProfile, caplog: pytest.LogCaptureFixture
) -> None:
    """It needs no room for updates. A step that trains may lack it, and the error says why; if it
    does not, that is said all the same, as another plan may be better."""

    def compiled(host: str) -> LohanModule:
        torch.manual_seed(0)
        layers = [part for _ in range(6) for part in (nn.Linear(64, 64), nn.GELU())]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters())
        options: dict[str, Any] = {"strategy": "lohan", "memory": {"host": host}}
        made = lohan_fx.compile(model, hw=hw, optimizer=optimizer, clip_grad_norm=1.0, **options)
        assert isinstance(made, LohanModule)
        return made

    x = torch.randn(64, 64)
    model = compiled("192KiB")
    with torch.no_grad():
        model(x)
    with pytest.raises(InsufficientMemoryError, match=r"call model.lohan.prepare\(…\) with"):
        model(x)
    model.lohan.close()
    model = compiled("192KiB")
    model.lohan.prepare(x)
    with torch.no_grad():
        wanted = model(x)
    assert identical(model(x).detach(), wanted)
    model.lohan.close()
    assert "planned for an evaluation" not in caplog.text
    model = compiled("2MiB")
    with torch.no_grad():
        wanted = model(x)
    assert identical(model(x).detach(), wanted)
    assert "call model.lohan.prepare(…) with a batch to train on before it" in caplog.text
    model.lohan.close()


def test_less_host_memory_than_the_profile_says(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program has taken it since: found before anything is moved."""
    monkeypatch.setattr(arena, "available_host_bytes", lambda: 4096)
    run = start("mlp", hw, monkeypatch, states="host")
    with pytest.raises(InsufficientMemoryError, match=r"not enough host memory: .*have 4.00 KiB"):
        run.forward(0)
    assert run.model.lohan.memory is None
    monkeypatch.undo()
    assert_identical(run.step(0), eager("mlp", "adamw")[0])
    run.model.lohan.close()


# -- SSD directories -----------------------------------------------------------------------------


@contextlib.contextmanager
def mounted(kind: str, at: Path, *options: str) -> Iterator[None]:
    at.mkdir(exist_ok=True)
    command = ["mount", "-t", kind, *options, kind, str(at)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip(f"mounting {kind} is not permitted here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(at)], check=True)


def assert_refused(directory: Path, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first forward says what is wrong with the directory, and leaves nothing behind."""
    run = start("gpt2", cpu_hardware(directory), monkeypatch)
    before = Resources()
    with pytest.raises(StorageError, match=message):
        run.forward(0)
    assert run.model.lohan.memory is None
    before.assert_back()


def test_a_missing_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused(tmp_path / "gone", "gone: No such file or directory; create it", monkeypatch)
    (tmp_path / "gone").mkdir()
    run = start("gpt2", cpu_hardware(tmp_path / "gone"), monkeypatch)
    assert_identical(run.step(0), eager("gpt2", "adamw")[0])
    run.model.lohan.close()


def test_a_file_instead_of_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert_refused(tmp_path / "file", "file is not a directory", monkeypatch)


def test_a_directory_in_which_nobody_may_create(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused(Path("/sys"), "cannot use the SSD directory /sys: ", monkeypatch)


def test_a_read_only_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid():
        tmp_path.chmod(0o500)
        assert_refused(tmp_path, f"{tmp_path}: Permission denied", monkeypatch)
        return
    with mounted("tmpfs", tmp_path / "disk", "-o", "ro"):  # modes do not bind root
        assert_refused(tmp_path / "disk", "disk: Read-only file system", monkeypatch)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mounted("tmpfs", tmp_path / "disk", "-o", "size=256k"):
        message = r"No space left.*; need .*MiB there .*have 2\d\d.\d\d KiB; free some space"
        assert_refused(tmp_path / "disk", message, monkeypatch)
        assert not list((tmp_path / "disk").iterdir())


def test_a_limit_on_file_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (128 * 1024, hard))
    try:
        assert_refused(tmp_path, r"cannot create .*: File too large; need .*MiB", monkeypatch)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def train_with_one_warning(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start("gpt2", cpu_hardware(directory), monkeypatch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed, wanted in enumerate(eager("gpt2", "adamw")):
            assert_identical(run.step(seed), wanted)
    messages = [str(w.message) for w in caught]
    assert [f"{directory} refuses O_DIRECT" in m for m in messages] == [True], messages
    run.model.lohan.close()
    assert not list(directory.iterdir())


def test_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = ssd.Syscalls.open

    def refuse(self: ssd.Syscalls, path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return opened(self, path, flags)

    monkeypatch.setattr(ssd.Syscalls, "open", refuse)
    train_with_one_warning(tmp_path, monkeypatch)


def test_a_file_system_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mounted("ramfs", tmp_path / "disk"):
        train_with_one_warning(tmp_path / "disk", monkeypatch)


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_failed_transfer_is_raised(
    call: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An SSD that fails in the middle of a step; nothing hangs and nothing leaks."""
    run = start("gpt2", hw, monkeypatch)
    run.step(0)

    def fail(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(ssd.Syscalls, call, fail)
        with pytest.raises(StorageError, match=r"failed on .*Input/output error"):
            run.step(1)
    run.model.lohan.close()
    assert not files_in(hw)


# -- inputs and models ---------------------------------------------------------------------------


def test_shapes_that_change(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each shape gets its program, a bounded number is kept, one message says so."""
    monkeypatch.setattr(lohan_fx.compiled.lookup, "MAX_PROGRAMS", 3)
    sizes = (2, 4, 5, 6, 5, 3, 2, 6)
    reference, batch = make("mlp")
    plain = training_of("adamw", reference)
    run = start("mlp", hw)
    caplog.set_level(logging.WARNING, "lohan_fx")
    threads = None
    for seed, size in enumerate(sizes):
        inputs = {k: v[:size] for k, v in batch.items()}
        wanted = step("mlp", reference, inputs, seed, plain.step)
        found = step("mlp", run.model, inputs, seed, run.training.step)
        assert_identical(found, wanted)
        assert len(run.model.lohan.programs) <= 3
        # threads for I/O are made as transfers meet
        running = [t for t in threading.enumerate() if "lohan_fx-io" not in t.name]
        now = (len(running), psutil.Process().num_fds())
        threads = threads or now
        assert now[0] == threads[0]
        assert now[1] <= threads[1] + 1
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 1
    assert "x of shape (2, 16) → (4, 16): making another program (at most 3 are kept" in said[0]
    run.model.lohan.close()


def test_a_shape_that_does_not_fit(hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes before its first step; the shapes that there are go on."""
    reference, batch = make("mlp")
    plain = training_of("adamw", reference)
    run = start("mlp", hw, monkeypatch)
    monkeypatch.undo()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def both(seed: int) -> None:
        wanted = step("mlp", reference, batch, seed, plain.step)
        assert_identical(run.step(seed), wanted)

    both(0)
    assert run.model.lohan.memory is not None
    assert run.model.lohan.memory.store.file is not None
    have = run.model.lohan.memory.store.file.num_bytes
    large = {"x": torch.randn(600, 16), "y": torch.zeros(600, dtype=torch.long)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * have, hard))
    try:
        with pytest.raises(StorageError, match=r"cannot create .*File too large; need .*KiB"):
            run.model(**large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    both(1)
    for model, finish in ((reference, plain.step), (run.model, run.training.step)):
        torch.manual_seed(2)
        model(**large).backward()
        finish()
    both(3)
    run.model.lohan.close()


def test_a_program_is_found_again(hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = []
    capture = lohan_fx.compiled.building.capture

    def counted(*args: Any, **options: Any) -> Any:
        captured.append(args)
        return capture(*args, **options)

    monkeypatch.setattr(lohan_fx.compiled.building, "capture", counted)
    run = start("mlp", hw)
    for seed, size in enumerate((6, 4, 6, 4)):
        inputs = {k: v[:size].clone() for k, v in run.inputs.items()}
        step("mlp", run.model, inputs, seed, run.training.step)
    assert len(captured) == 2
    run.model.lohan.close()


@pytest.mark.parametrize("states", TIERS)
def test_a_parameter_that_never_gets_a_gradient(
    states: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weight decay and momentum leave it alone, as in plain PyTorch."""
    run = start("unused", hw, monkeypatch, optimizer="sgd", states=states)
    idle = {k: p.clone() for k, p in run.model.named_parameters() if "idle" in k or "scale" in k}
    assert len(idle) == 3
    for seed, wanted in enumerate(eager("unused", "sgd")):
        assert_identical(run.step(seed), wanted)
    parameters = dict(run.model.named_parameters())
    assert all(identical(parameters[k], v) and parameters[k].grad is None for k, v in idle.items())
    run.model.lohan.close()


def test_inputs_on_the_wrong_device(hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start("mlp", hw, monkeypatch)
    away = {**run.inputs, "x": run.inputs["x"].to("meta")}
    with pytest.raises(LohanError, match=r"an input is on meta, the model computes on cpu: call"):
        run.model(**away)
    assert not run.model.lohan.programs
    assert_identical(run.step(0), eager("mlp", "adamw")[0])
    run.model.lohan.close()


def test_a_model_without_data(hw: HardwareProfile) -> None:
    model, inputs = make("mlp")
    model.to("meta")
    optimizer = training_of("adam", model).optimizer
    with pytest.raises(LohanError, match=r"start\.weight is on the meta device: it has no data"):
        lohan_fx.compile(model, hw=hw, optimizer=optimizer)(**inputs)


@pytest.mark.parametrize("states", TIERS)
def test_nan_passes_through(
    states: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("mlp", hw, monkeypatch, states=states)
    reference, batch = make("mlp")
    plain = training_of("adamw", reference)
    for inputs in (run.inputs, batch):
        inputs["x"][0, 0] = float("inf")
    for seed in range(2):
        wanted = step("mlp", reference, batch, seed, plain.step)
        assert_identical(run.step(seed), wanted)
    assert all(p.isnan().any() for p in run.model.parameters())
    run.model.lohan.close()


def test_optimizers_that_are_refused(hw: HardwareProfile) -> None:
    class Mine(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise NotImplementedError

    for make_optimizer, name in (
        (torch.optim.LBFGS, r"torch\.optim\.lbfgs\.LBFGS"),
        (torch.optim.Adafactor, r"Adafactor"),
        (Mine, r"test_optimizers_that_are_refused\.<locals>\.Mine"),
    ):
        model, _ = make("mlp")
        optimizer = make_optimizer(model.parameters())
        with pytest.raises(UnsupportedOptimizerError, match=rf"{name} cannot update .*AdamW"):
            lohan_fx.compile(model, hw=hw, optimizer=optimizer)
        assert type(model).__name__ == "MLP"
        assert not isinstance(model, LohanModule)


# -- the order of calls --------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_forward_after_backward_needs_a_step(
    schedule: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("mlp", hw, monkeypatch, schedule=schedule)
    wanted = eager("mlp", "adamw")
    loss = run.forward(0)
    loss.backward()
    with pytest.raises(StepError, match=r"optimizer\.step\(\) was not called"):
        run.forward(1)
    run.training.step()
    assert_same_weights(run.model, wanted[0])
    assert_identical(run.step(1), wanted[1])
    run.model.lohan.close()


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_two_backwards(
    with_optimizer: bool, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember_captures(monkeypatch, "mlp")
    model, inputs = make("mlp")
    training = training_of("adamw", model)
    made = lohan_fx.compile(
        model, hw=hw, optimizer=training.optimizer if with_optimizer else None, strategy="swap-all"
    )
    assert isinstance(made, LohanModule)
    run = Run("mlp", made, inputs, training)
    loss = run.forward(0)
    loss.backward(retain_graph=True)
    with pytest.raises(StepError, match=r"ran already.*retain_graph=True, is not supported"):
        loss.backward()
    run.training.step()
    wanted = eager("mlp", "adamw")
    assert_same_weights(run.model, wanted[0])
    assert_identical(run.step(1), wanted[1], gradients=not with_optimizer)
    run.model.lohan.close()


def test_a_forward_without_backward_is_forgotten(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss that is not used; a loss that is used too late."""
    run = start("mlp", hw, monkeypatch)
    wanted = eager("mlp", "adamw")
    late = run.forward(7)
    assert_identical(run.step(0), wanted[0])
    with pytest.raises(StepError, match="another forward of the compiled model ran since"):
        late.backward()
    assert_identical(run.step(1), wanted[1])
    run.model.lohan.close()


def test_double_backward(hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    remember_captures(monkeypatch, "leaf")
    model, inputs = make("leaf")
    made = lohan_fx.compile(model, hw=hw)
    assert isinstance(made, LohanModule)
    torch.manual_seed(0)
    loss = made(**inputs)
    with pytest.raises(StepError, match=r"create_graph=True.*cannot be differentiated twice"):
        torch.autograd.grad(loss, inputs["x"], create_graph=True)
    with pytest.raises(StepError, match=r"create_graph=True"):
        loss.backward(create_graph=True)
    loss.backward()  # the forward is still good
    assert inputs["x"].grad is not None
    assert identical(inputs["x"].grad, eager("leaf", "adamw")[0].tensors["x.grad"])
    made.lohan.close()


@pytest.mark.parametrize("states", TIERS)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_close_and_compile_again(
    optimizer: str, states: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `close` model and optimizer are the user's again, with weights and states."""
    run = start("mlp", hw, monkeypatch, optimizer=optimizer, states=states)
    wanted = eager("mlp", optimizer, 4)
    with pytest.raises(LohanError, match=r"compiled already: call model\.lohan\.close\(\)"):
        lohan_fx.compile(run.model, hw=hw)
    assert_identical(run.step(0), wanted[0])
    run.model.lohan.close()
    assert not isinstance(run.model, LohanModule)
    assert_identical(run.step(1), wanted[1], gradients=True)
    made = lohan_fx.compile(run.model, hw=hw, optimizer=run.training.optimizer, strategy="keep-all")
    for seed in (2, 3):
        assert_identical(run.step(seed), wanted[seed])
    made.lohan.close()


COPIES = [copy.deepcopy, copy.copy, pickle.dumps, lambda m: torch.save(m, io.BytesIO())]


@pytest.mark.parametrize("copies", COPIES)
def test_copies_of_a_compiled_model_are_refused(
    copies: Callable[[nn.Module], object], hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("mlp", hw, monkeypatch)
    run.step(0)
    with pytest.raises(LohanError, match=r"a compiled MLP cannot be copied or pickled.*state_dict"):
        copies(run.model)
    assert_identical(run.step(1), eager("mlp", "adamw")[1])
    run.model.lohan.close()
    assert all(map(identical, copy.deepcopy(run.model).parameters(), run.model.parameters()))


@pytest.mark.parametrize("copies", COPIES)
def test_copies_of_its_optimizer_are_refused(
    copies: Callable[[object], object], hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would have none of its states. After close() they have all."""
    run = start("mlp", hw, monkeypatch)
    optimizer = run.training.optimizer
    run.step(0)
    with pytest.raises(LohanError, match=r"the AdamW of a compiled model cannot be copied"):
        copies(optimizer)
    assert_identical(run.step(1), eager("mlp", "adamw")[1])
    run.model.lohan.close()
    copies(optimizer)
    assert "__getstate__" not in vars(optimizer)
    have = copy.deepcopy(optimizer).state_dict()["state"]
    want = optimizer.state_dict()["state"]
    assert have.keys() == want.keys()
    assert len(want) > 0
    for key, state in want.items():
        assert all(identical(have[key][name], state[name]) for name in state)


@pytest.mark.parametrize("first", [0, 1])
def test_copies_of_an_optimizer_that_two_models_share(first: int, hw: HardwareProfile) -> None:
    """They are refused until both are closed, in whichever order, or deleted."""
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    optimizer = torch.optim.AdamW([p for model in models for p in model.parameters()])
    made = [lohan_fx.compile(model, hw=hw, optimizer=optimizer) for model in models]
    made.pop(first).lohan.close()
    with pytest.raises(LohanError, match="cannot be copied or pickled"):
        copy.deepcopy(optimizer)
    models.clear()
    made.clear()
    gc.collect()
    copy.deepcopy(optimizer)


# -- exceptions in the middle of a step ----------------------------------------------------------


class InjectedError(Exception):
    pass


def fail_once(patch: pytest.MonkeyPatch, cls: type, method: str, *, at: int) -> None:
    """The `at`-th call of a method raises."""
    original = getattr(cls, method)
    calls = [0]

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            raise InjectedError
        return original(*args, **kwargs)

    patch.setattr(cls, method, wrapper)


def assert_recovers(run: Run, patch: pytest.MonkeyPatch, hw: HardwareProfile) -> None:
    """A step fails as `patch` says; then it and another are right; nothing has leaked."""
    wanted = eager(run.name, "adamw")
    assert_identical(run.step(0), wanted[0])
    before = Resources(running=True)
    with pytest.raises(InjectedError):
        run.step(1)
    patch.undo()
    assert_same_weights(run.model, wanted[0])
    assert_identical(run.step(1), wanted[1])
    assert_identical(run.step(2), wanted[2])
    before.assert_back()
    run.model.lohan.close()
    assert not files_in(hw)


@pytest.mark.parametrize(
    ("method", "at", "states", "schedule"),
    [
        ("offload", 1, "device", "optimized"),
        ("offload", 5, "ssd", "naive"),
        ("release", 3, "device", "serial"),
        ("release", 1, "ssd", "optimized"),
        ("fetch_unit", 2, "host", "naive"),
        ("fetch_unit", 3, "ssd", "optimized"),
        ("wait_unit", 2, "host", "optimized"),
        ("wait_unit", 1, "ssd", "serial"),
    ],
)
def test_an_exception_in_forward(
    method: str,
    at: int,
    states: str,
    schedule: str,
    hw: HardwareProfile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = start("mlp", hw, monkeypatch, states=states, schedule=schedule)
    program = run.model.lohan.prepare(**run.inputs).instructions.instructions
    assert sum(i.kind == method and i.phase == "forward" for i in program) >= at
    total = sum(i.kind == method for i in program)
    with pytest.MonkeyPatch.context() as patch:
        fail_once(patch, Engine, method, at=total + at)  # in the second step
        assert_recovers(run, patch, hw)


def test_an_exception_of_an_op(hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that the vocabulary lacks."""
    run = start("gpt2", hw, monkeypatch)
    wanted = eager("gpt2", "adamw")
    assert_identical(run.step(0), wanted[0])
    before = Resources(running=True)
    wrong = run.inputs["input_ids"].clone()
    wrong[0, 0] = 10_000
    with pytest.raises(IndexError):
        run.model(**{**run.inputs, "input_ids": wrong})
    assert_identical(run.step(1), wanted[1])
    before.assert_back()
    run.model.lohan.close()


@pytest.mark.parametrize(
    ("method", "states", "schedule"),
    [
        ("begin", "device", "optimized"),
        ("begin", "ssd", "naive"),
        ("prefetch", "ssd", "optimized"),
        ("prefetch", "host", "naive"),
        ("wait", "host", "optimized"),
        ("wait", "ssd", "optimized"),
        ("wait", "device", "serial"),
    ],
)
def test_an_exception_early_in_backward(
    method: str,
    states: str,
    schedule: str,
    hw: HardwareProfile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the first gradient is emitted."""
    run = start("mlp", hw, monkeypatch, states=states, schedule=schedule)
    program = run.model.lohan.prepare(**run.inputs).instructions.instructions
    total = sum(i.kind == "prefetch" for i in program)
    with pytest.MonkeyPatch.context() as patch:
        if method == "begin":
            fail_once(patch, Updater, "begin", at=2)
        else:
            fail_once(patch, Engine, method, at=total + 1)
        assert_recovers(run, patch, hw)


EXCEPTIONS = (
    ("prefetch", "serial"),
    ("wait", "serial"),
    *(("emit_gradients", schedule) for schedule in sorted(WHOLE)),
)


@pytest.mark.parametrize(("states", "method", "schedule"), alternating(TIERS, EXCEPTIONS))
def test_an_exception_late_in_a_backward_that_updates_nothing(
    states: str, method: str, schedule: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After gradients were emitted; no update counts before ``optimizer.step()``."""
    run = start("mlp", hw, monkeypatch, states=states, schedule=schedule)
    program = run.model.lohan.prepare(**run.inputs).instructions.instructions
    total = sum(i.kind == method for i in program)
    with pytest.MonkeyPatch.context() as patch:
        fail_once(patch, Engine, method, at=2 * total)
        assert_recovers(run, patch, hw)


@pytest.mark.parametrize("schedule", ["naive", "optimized"])
@pytest.mark.parametrize("states", TIERS)
def test_an_exception_between_two_updates(
    states: str, schedule: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some units took the step and others cannot any more: said at once, and not trained on."""
    run = start("mlp", hw, monkeypatch, states=states, schedule=schedule)
    program = run.model.lohan.prepare(**run.inputs).instructions.instructions
    total = sum(i.kind == "emit_gradients" for i in program)
    assert_identical(run.step(0), eager("mlp", "adamw")[0])
    before = Resources(running=True)
    with pytest.MonkeyPatch.context() as patch:
        fail_once(patch, Engine, "emit_gradients", at=total)
        with pytest.raises(InjectedError):
            run.step(1)
    for _ in range(2):
        with pytest.raises(
            StepError, match=r"between two steps.*layers\.2.*serial.*deferred.*Ctrl-C"
        ):
            run.forward(1)
    before.assert_back()
    with torch.no_grad(), pytest.raises(StepError, match="between two steps"):
        run.forward(1)
    run.model.lohan.close()
    assert not files_in(hw)


@pytest.mark.parametrize(("schedule", "states"), alternating(SCHEDULES, TIERS))
def test_an_exception_in_an_update(
    states: str, schedule: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It surfaces in backward or in ``optimizer.step()``, whoever meets it first."""
    run = start("mlp", hw, monkeypatch, states=states, schedule=schedule)
    assert_identical(run.step(0), eager("mlp", "adamw")[0])
    with pytest.MonkeyPatch.context() as patch:
        fail_once(patch, UnitUpdates, "run", at=2)
        if schedule == "speculative":  # what fails in a trial is done again: see test_speculative
            patch.setattr(Trials, "submit", lambda *_: None)
        with pytest.raises(InjectedError):
            run.step(1)
    if schedule == "serial":  # gradients are all there: the step is taken up again
        with pytest.raises(StepError, match=r"optimizer\.step\(\) was not called since, or failed"):
            run.forward(1)
        run.training.step()
        assert_same_weights(run.model, eager("mlp", "adamw")[1])
        assert_identical(run.step(2), eager("mlp", "adamw")[2])
    else:
        with pytest.raises(StepError, match="between two steps"):
            run.forward(1)
    run.model.lohan.close()
    assert not files_in(hw)


# -- evaluation and state ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "states"),
    [
        ("gpt2", "device"),
        ("resnet", "host"),
        ("gpt2", "ssd"),
        pytest.param("resnet", "device", marks=pytest.mark.slow),
        pytest.param("gpt2", "host", marks=pytest.mark.slow),
        pytest.param("resnet", "ssd", marks=pytest.mark.slow),
    ],
)
def test_evaluation_between_steps(
    name: str, states: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, batch = make(name)
    plain = training_of("adamw", reference)
    run = start(name, hw, monkeypatch, states=states)

    def evaluate(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        model.eval()
        with torch.no_grad():
            found = model(**inputs)
        model.train()
        loss: Tensor = found if isinstance(found, Tensor) else found.loss
        return loss

    for seed in range(3):
        assert identical(evaluate(run.model, run.inputs), evaluate(reference, batch))
        wanted = step(name, reference, batch, seed, plain.step)
        assert_identical(run.step(seed), wanted)
    assert not evaluate(run.model, run.inputs).requires_grad
    assert len(run.model.lohan.programs) == 2
    assert run.model.lohan.program().executor.captured.has_backward  # what is reported
    run.model.lohan.close()


def test_evaluation_between_forward_and_backward(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs the slots of the step: the step says that it is lost, and can be run again."""
    run = start("mlp", hw, monkeypatch)
    loss = run.forward(0)
    with torch.no_grad():
        run.forward(0)
    with pytest.raises(StepError, match="another forward of the compiled model ran since"):
        loss.backward()
    assert_identical(run.step(0), eager("mlp", "adamw")[0])
    run.model.lohan.close()


def through_safetensors(model: nn.Module, path: Path) -> dict[str, Tensor]:
    safetensors.torch.save_model(model, str(path))
    return safetensors.torch.load_file(path)


def through_torch(model: nn.Module, path: Path) -> dict[str, Tensor]:
    torch.save(model.state_dict(), path)
    loaded: dict[str, Tensor] = torch.load(path)
    return loaded


@pytest.mark.parametrize(
    ("through", "states"), alternating((through_safetensors, through_torch), TIERS)
)
def test_state_is_saved_and_loaded_between_steps(
    through: Callable[[nn.Module, Path], dict[str, Tensor]],
    states: str,
    hw: HardwareProfile,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Save after each step; then load an older one into the running model, as plain PyTorch."""
    reference, batch = make("gpt2")
    plain = training_of("adamw", reference)
    run = start("gpt2", hw, monkeypatch, states=states)
    run.model.load_state_dict(reference.state_dict())  # before the first step
    tied = ("lm_head.weight", "transformer.wte.weight")  # safetensors saves one of them
    saved = []
    for seed in range(3):
        assert_identical(run.step(seed), step("gpt2", reference, batch, seed, plain.step))
        path = tmp_path / f"saved-{seed}"
        saved.append(through(run.model, path))
        wanted = reference.state_dict()
        assert all(identical(t, wanted[k]) for k, t in saved[-1].items())
        own = sum(p.numel() * p.element_size() for p in reference.parameters())
        assert path.stat().st_size < 1.2 * own + 2**16  # the parameters, not all that is kept
    for model in (run.model, reference):
        missing, unexpected = model.load_state_dict(saved[0], strict=False)
        assert not unexpected
        assert set(missing) <= set(tied)
    for seed in (3, 4):
        assert_identical(run.step(seed), step("gpt2", reference, batch, seed, plain.step))
    run.model.lohan.close()


@pytest.mark.parametrize("states", TIERS)
def test_writes_to_parameters_between_steps(
    states: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place, through ``.data``, and by memory of the user's."""
    reference, batch = make("mlp")
    plain = training_of("adamw", reference)
    run = start("mlp", hw, monkeypatch, states=states)
    for seed in range(4):
        assert_identical(run.step(seed), step("mlp", reference, batch, seed, plain.step))
        for model in (run.model, reference):
            start_ = model.get_submodule("start")
            assert isinstance(start_, nn.Linear)
            with torch.no_grad():
                if seed == 0:
                    start_.weight.mul_(0.5)
                elif seed == 1:
                    start_.bias.data = torch.full_like(start_.bias, 0.25)
                else:
                    start_.weight.data.add_(0.125)
                    start_.bias[2] = 3.0
    run.model.lohan.close()


def test_printing(hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = make("mlp")
    run = start("mlp", hw, monkeypatch)
    run.step(0)
    assert repr(run.model) == repr(plain)
    assert "Parameter containing" in repr(run.model.get_parameter("start.weight"))
    run.model.lohan.close()


# -- nothing stays behind ------------------------------------------------------------------------


class Resources:
    """Descriptors, threads, children, and mappings of files of this process.

    While a model lives (`running`), its I/O threads, which start one by one, do not count.
    """

    def __init__(self, *, running: bool = False) -> None:
        self._running = running
        gc.collect()
        self.found = self._now()

    def _now(self) -> dict[str, Any]:
        process = psutil.Process()
        maps = Path("/proc/self/maps").read_text().splitlines()
        names = sorted(t.name for t in threading.enumerate())
        started = sum("lohan_fx-io" in name for name in names) if self._running else 0
        return {
            "descriptors": process.num_fds(),
            "threads": [n for n in names if not (self._running and "lohan_fx-io" in n)],
            "system threads": process.num_threads() - started,
            "children": [c.pid for c in process.children(recursive=True)],
            # files, not lines: the kernel splits and joins the ranges of one
            "mapped files": len({line.split(maxsplit=5)[5] for line in maps if ".stripes" in line}),
        }

    def assert_back(self) -> None:
        gc.collect()
        until = time.monotonic() + 5  # a thread that was told to end needs a moment
        while self._now() != self.found and time.monotonic() < until:
            time.sleep(0.01)
            gc.collect()
        assert self._now() == self.found


def train_and_delete(hw: HardwareProfile, states: str, how: str) -> None:
    model, inputs = make("mlp")
    training = training_of("adamw", model)
    made = lohan_fx.compile(
        model,
        hw=hw,
        optimizer=training.optimizer,
        strategy="swap-all",
        states=states,  # type: ignore[arg-type]
        swap_to="ssd",
    )
    loss = made(**inputs)
    if how == "after a forward":
        return
    if how == "after an error":
        with pytest.MonkeyPatch.context() as patch:
            fail_once(patch, Engine, "emit_gradients", at=2)
            with pytest.raises(InjectedError):
                loss.backward()
        return
    loss.backward()
    if how == "after a backward":
        return
    training.step()
    if how == "after evaluation":
        with torch.no_grad():
            made.eval()(**inputs)
    if how == "after close":
        assert isinstance(made, LohanModule)
        compiled = made.lohan
        compiled.close()
        compiled.close()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What PyTorch starts once and keeps is there."""
    train_and_delete(cpu_hardware(tmp_path_factory.mktemp("first")), "ssd", "after a step")


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize(
    ("how", "states"),
    alternating(
        (
            "after a step",
            "after a forward",
            "after a backward",
            "after an error",
            "after evaluation",
            "after close",
        ),
        TIERS,
    ),
)
def test_a_deleted_model_leaves_nothing(states: str, how: str, hw: HardwareProfile) -> None:
    before = Resources()
    train_and_delete(hw, states, how)
    before.assert_back()
    assert not files_in(hw)


@pytest.mark.usefixtures("started")
def test_a_refused_model_leaves_nothing(hw: HardwareProfile) -> None:
    before = Resources()

    def refused() -> None:
        model, inputs = make("mlp")
        optimizer = training_of("adam", model).optimizer
        for memory in ({"device": 4096}, {"host": 4096}, {"ssd": 4096}):
            made = lohan_fx.compile(
                model, hw=hw, optimizer=optimizer, memory=memory, states="ssd", swap_to="ssd"
            )
            with pytest.raises(InsufficientMemoryError):
                made(**inputs)
            assert isinstance(made, LohanModule)
            made.lohan.close()

    refused()
    before.assert_back()
    assert not files_in(hw)


def test_parameters_outlive_the_model(hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever holds a parameter may read it; its memory goes with it."""
    for states in TIERS:
        run = start("mlp", hw, monkeypatch, states=states)
        run.step(0)
        held = dict(run.model.named_parameters())
        state = run.model.state_dict()
        del run
        gc.collect()
        wanted = eager("mlp", "adamw")[0].tensors
        assert all(identical(p, wanted[k]) for k, p in held.items())
        assert all(identical(t, wanted[k]) for k, t in state.items())
        assert not files_in(hw)


def test_backward_after_the_model_is_gone(
    hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("mlp", hw, monkeypatch)
    loss = run.forward(0)
    del run
    gc.collect()
    with pytest.raises(StepError, match=r"closed or deleted"):
        loss.backward()


def test_a_process_that_ends_without_closing(tmp_path: Path) -> None:
    """It ends by itself, without noise, and its files are gone."""
    code = f"""
import pathlib, torch, lohan_fx
from lohan_fx.hardware import SsdDevice
from tests.toys import made
from tests.workloads import small_hardware
model, x = made()
optimizer = torch.optim.AdamW(model.parameters())
rates = {{"read_bytes_per_s": 6e9, "write_bytes_per_s": 4e9}}
ssd = SsdDevice(path={str(tmp_path)!r}, capacity_bytes=2**30, **rates)
hw = small_hardware(device_kind="cpu", ssds=(ssd,))
model = lohan_fx.compile(model, hw=hw, optimizer=optimizer, states="ssd", swap_to="ssd")
model(x).backward()
assert list(pathlib.Path({str(tmp_path)!r}).iterdir())
print("here")
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "here\n", "")
    assert not list(tmp_path.iterdir())
