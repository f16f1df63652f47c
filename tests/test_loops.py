"""Loops as people write them: evaluation, generation, autocast, shapes that change, torch.compile.

Everything is compared with the same loop in plain PyTorch, bit by bit.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import peft
import pytest
import torch
from torch import Tensor, nn

import lohan_fx
import lohan_fx.compiled.building
import lohan_fx.compiled.model
from lohan_fx.api import LohanModule
from lohan_fx.compiled.lookup import MAX_EVALUATIONS
from lohan_fx.errors import LohanError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.signature import Signature, difference, signature_of
from tests import models
from tests.architectures import ARCHITECTURES, everywhere, make
from tests.training import identical


class Run(NamedTuple):
    """One model in a loop; `inputs` for every step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    inputs: dict[str, Any]

    def step(self, seed: int, inputs: dict[str, Any] | None = None) -> Tensor:
        torch.manual_seed(seed)
        output = self.model(**(self.inputs if inputs is None else inputs))
        loss: Tensor = output if isinstance(output, Tensor) else output.loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    @property
    def lohan(self) -> lohan_fx.compiled.model.CompiledModel:
        assert isinstance(self.model, LohanModule)
        return self.model.lohan


def run(model: nn.Module, inputs: dict[str, Any], hw: HardwareProfile | None) -> Run:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if hw is not None:
        model = lohan_fx.compile(model, hw=hw, optimizer=optimizer, strategy=everywhere)
    return Run(model, optimizer, inputs)


def both(name: str, hw: HardwareProfile) -> tuple[Run, Run]:
    """(with lohan_fx, in plain PyTorch); an architecture, or one of `tests.models`."""
    build = make if name in ARCHITECTURES else models.make
    return run(*build(name), hw), run(*build(name), None)


def assert_same_weights(ours: Run, plain: Run) -> None:
    pairs = zip(ours.model.state_dict().values(), plain.model.state_dict().values(), strict=True)
    assert all(identical(a, b) for a, b in pairs)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Grows by one for each capture: whether it was of a step with backward."""
    found: list[bool] = []
    capture = lohan_fx.compiled.building.capture

    def counted(*args: Any, **options: Any) -> Any:
        found.append(options["grad"])
        return capture(*args, **options)

    monkeypatch.setattr(lohan_fx.compiled.building, "capture", counted)
    return found


# -- evaluation ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "train", "context"),
    [
        # test_safety evaluates with eval() and no_grad(), on all tiers
        pytest.param("GPT-2", False, torch.inference_mode, marks=pytest.mark.slow),
        ("GPT-2", True, torch.inference_mode),
        pytest.param("U-Net", True, torch.no_grad, marks=pytest.mark.slow),
        ("resnet", True, torch.inference_mode),
    ],
)
def test_forwards_without_gradients_between_steps(
    name: str, train: bool, context: Callable[[], Any], hw: HardwareProfile
) -> None:
    """Before the first step, too; in training mode dropout is drawn and statistics are taken."""
    runs = ours, plain = both(name, hw)
    plans = set()
    for seed in range(3):
        seen = []
        for r in runs:
            r.model.train(train)
            torch.manual_seed(seed)
            with context():
                output = r.model(**r.inputs)
            seen.append(output if isinstance(output, Tensor) else output.loss)
            r.model.train()
        assert identical(*seen)
        assert not seen[0].requires_grad
        assert identical(ours.step(seed), plain.step(seed))
        plans.add(id(ours.lohan.program().plan))
    assert_same_weights(ours, plain)
    assert len(plans) == 1
    assert len(ours.lohan.programs) == 2
    ours.lohan.close()


@pytest.mark.parametrize("use_cache", [True, False])
def test_generation_between_steps(
    use_cache: bool, hw: HardwareProfile, captures: list[bool]
) -> None:
    """With a cache of keys and values nothing is captured; without one, a few programs are."""
    runs = ours, plain = both("GPT-2", hw)
    for seed in range(2):
        assert identical(ours.step(seed), plain.step(seed))
        seen = []
        for r in runs:
            r.model.eval()
            prompt = {k: r.inputs[k][:1] for k in ("input_ids", "attention_mask")}
            seen.append(
                r.model.generate(
                    **prompt, max_new_tokens=9, do_sample=False, use_cache=use_cache, pad_token_id=0
                )
            )
            r.model.train()
        assert torch.equal(*seen)
    assert captures.count(True) == 1
    assert captures.count(False) == (0 if use_cache else MAX_EVALUATIONS)
    assert identical(ours.step(2), plain.step(2))
    assert_same_weights(ours, plain)
    ours.lohan.close()


def test_evaluation_of_ever_new_shapes(
    hw: HardwareProfile, captures: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    runs = ours, plain = both("mlp", hw)
    caplog.set_level(logging.WARNING, "lohan_fx")
    assert identical(ours.step(0), plain.step(0))
    for size in (6, 5, 4, 3, 2, 1, 5, 2):
        seen = []
        for r in runs:
            with torch.inference_mode():
                seen.append(r.model.eval()(**{k: v[:size] for k, v in r.inputs.items()}))
            r.model.train()
        assert identical(*seen)
    assert captures == [True] + [False] * MAX_EVALUATIONS
    said = [r.getMessage() for r in caplog.records]
    assert len([m for m in said if "evaluated op by op" in m]) == 1
    assert identical(ours.step(1), plain.step(1))
    ours.lohan.close()


class Selects(nn.Module):
    """Evaluates only rows that are positive: how many depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.register_buffer("shift", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            x = x[x[:, 0] > 0]
        for layer in self.layers:
            x = torch.tanh(layer(x) + self.shift)
        return x.square().mean()


def test_what_cannot_be_captured_is_evaluated_op_by_op(
    hw: HardwareProfile, captures: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    x = torch.randn(9, 6)
    model, reference = Selects(), Selects()
    reference.load_state_dict(model.state_dict())
    runs = ours, plain = run(model, {"x": x}, hw), run(reference, {"x": x}, None)
    caplog.set_level(logging.WARNING, "lohan_fx")
    for seed in range(3):
        assert identical(ours.step(seed), plain.step(seed))
        with torch.no_grad():
            seen = [r.model.eval()(x) for r in runs]
        assert identical(*seen)
        [r.model.train() for r in runs]
    assert captures == [True, False]
    said = [r.getMessage() for r in caplog.records]
    assert len([m for m in said if "op by op" in m and "depends on data" in m]) == len(said) == 1
    ours.lohan.close()


def test_evaluation_op_by_op_in_mixed_precision(hw: HardwareProfile) -> None:
    """It computes in the compute dtype, and asks parameters for it; masters stay as they are."""

    class Asks(Selects):
        def forward(self, x: Tensor) -> Tensor:
            first = self.layers[0].weight
            assert (first.dtype, first.shape, first.size(1)) == (torch.bfloat16, (6, 6), 6)
            x = x.to(first.dtype) + first.T[0] + first.data[1] + self.layers[1].bias.float().sum()
            return super().forward(x.to(first.device, first.dtype))

        def __init__(self) -> None:
            super().__init__()
            self.shift = self.shift.bfloat16()

    torch.manual_seed(0)
    x = torch.randn(9, 6)
    model, reference = Asks(), Asks()
    reference.load_state_dict(model.state_dict())
    reference.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = lohan_fx.compile(
        model.eval(), hw=hw, optimizer=optimizer, dtype=torch.bfloat16, strategy=everywhere
    )
    with torch.no_grad():
        assert identical(compiled(x), reference.eval()(x.bfloat16()))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


# -- shapes ----------------------------------------------------------------------------------------


def test_the_last_batch_is_smaller_and_lengths_vary(
    hw: HardwareProfile, captures: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    """Two epochs of batches that a collator padded to multiples of 4: a program for each shape."""
    ours, plain = both("BERT", hw)
    caplog.set_level(logging.WARNING, "lohan_fx")

    def shaped(batch: int, length: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(batch + length)
        lengths = torch.randint(1, length + 1, (batch,), generator=generator)
        mask = (torch.arange(-(-length // 4) * 4)[None] < lengths[:, None]).long()
        ids = torch.randint(1, 64, mask.shape, generator=generator) * mask
        return {"input_ids": ids, "attention_mask": mask, "labels": lengths % 2}

    for seed, shape in enumerate([(2, 5), (2, 8), (2, 11), (2, 7), (1, 6)] * 2):
        inputs = shaped(*shape)
        assert identical(ours.step(seed, inputs), plain.step(seed, inputs))
    assert_same_weights(ours, plain)
    assert captures == [True] * 3
    said = [r.getMessage() for r in caplog.records]
    assert [m for m in said if "another program" in m] == [
        m for m in said if "input_ids of shape (2, 8) → (2, 12)" in m and "pad_to_multiple_of" in m
    ]
    assert len(said) == 1
    ours.lohan.close()


def _signature(model: nn.Module, *args: Any, **kwargs: Any) -> Signature:
    modes = tuple(module.training for module in model.modules())
    trains = tuple(p.requires_grad for p in model.parameters())
    return signature_of(modes, trains, torch.device("cpu"), args, kwargs)


def test_messages_name_what_differs() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    x = torch.ones(2, 3)
    before = _signature(model, x, {"a": [x, 1]}, y=x)

    def said(*args: Any, **kwargs: Any) -> str:
        return difference(before, _signature(model, *args, **kwargs), args, kwargs)

    assert said(x[:1], {"a": [x, 1]}, y=x) == "argument 0 of shape (2, 3) → (1, 3)"
    assert said(x, {"a": [x.int(), 1]}, y=x).startswith("argument 1['a'][0] of dtype torch.float32")
    assert said(x, {"a": [x, 2]}, y=x) == "argument 1['a'][1] 1 → 2"
    assert said(x, {"a": [x, 1]}, y=x.T.contiguous().T) == "y of strides (3, 1) → (1, 2)"
    assert said(x, {"a": [x, 1]}, y=1) == "y is a tensor now and then"
    assert said(x, {"a": [x]}, y=x) == "other arguments, or containers of them"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert said(x, {"a": [x, 1]}, y=x) == "autocast off → torch.bfloat16"
    model[0].eval()
    assert said(x, {"a": [x, 1]}, y=x) == "train() or eval() of 1 modules"
    model[0].train()
    model[1].bias.requires_grad_(False)
    assert said(x, {"a": [x, 1]}, y=x) == "requires_grad of parameters"


# -- autocast --------------------------------------------------------------------------------------


class Inside(nn.Module):
    """Autocast regions in forward, one inside the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = torch.relu(self.layers[0](x))
            with torch.autocast("cpu", enabled=False):
                x = torch.relu(self.layers[1](x.float()))
            x = self.layers[2](x)
        return x.float().square().mean()


def test_autocast_in_forward(hw: HardwareProfile) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 16)
    model, reference = Inside(), Inside()
    reference.load_state_dict(model.state_dict())
    ours, plain = run(model, {"x": x}, hw), run(reference, {"x": x}, None)
    for seed in range(3):
        assert identical(ours.step(seed), plain.step(seed))
    assert_same_weights(ours, plain)
    ours.lohan.close()


@pytest.mark.parametrize(
    "name",
    [
        "GPT-2",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("resnet", "Llama", "ViT", "ResNet-50")
        ),
    ],
)
def test_autocast_around_forward(name: str, hw: HardwareProfile) -> None:
    """As loops have it: forward in the region, backward outside. Then a step without it."""
    runs = ours, plain = both(name, hw)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    for seed, context in enumerate((autocast, contextlib.nullcontext(), autocast)):
        losses = []
        for r in runs:
            torch.manual_seed(seed)
            with context:
                output = r.model(**r.inputs)
                losses.append(output if isinstance(output, Tensor) else output.loss)
            losses[-1].backward()
            r.optimizer.step()
            r.optimizer.zero_grad()
        assert identical(*losses)
    assert_same_weights(ours, plain)
    assert len(ours.lohan.programs) == 2
    ours.lohan.close()


# -- frozen parameters -----------------------------------------------------------------------------


def _lora() -> tuple[nn.Module, dict[str, Any]]:
    """Llama in bf16, frozen, with LoRA adapters in fp32 (peft)."""
    model, inputs = make("Llama")
    config = peft.LoraConfig(
        r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = peft.get_peft_model(model.bfloat16(), config)
        for name, p in model.named_parameters():
            if "lora_B" in name:  # zeros, behind which nothing of A would be seen
                nn.init.normal_(p, std=0.05)
    return model.train(), inputs


def test_a_checkpoint_of_lora_does_not_look_like_one_of_the_base(tmp_path: Path) -> None:
    """Transformers would load it with random weights, as all names are others."""
    for module, has in ((_lora()[0], False), (make("Llama")[0], True)):
        lohan_fx.save(module, tmp_path / str(has))
        assert (tmp_path / str(has) / "config.json").exists() == has


@pytest.mark.parametrize("autocast", [pytest.param(False, marks=pytest.mark.slow), True])
def test_lora_trains_adapters_alone(autocast: bool, hw: HardwareProfile) -> None:
    runs = []
    for machine in (hw, None):
        model, inputs = _lora()
        adapters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(adapters, lr=1e-2)
        if machine is not None:
            model = lohan_fx.compile(model, hw=hw, optimizer=optimizer, strategy=everywhere)
        runs.append(Run(model, optimizer, inputs))
    ours, plain = runs
    assert {p.dtype: p.requires_grad for p in plain.model.parameters()} == {
        torch.bfloat16: False,
        torch.float32: True,
    }
    for seed in range(3):
        losses = []
        for r in runs:
            torch.manual_seed(seed)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                losses.append(r.model(**r.inputs).loss)
            losses[-1].backward()
            r.optimizer.step()
            r.optimizer.zero_grad()
        assert identical(*losses)
    assert_same_weights(ours, plain)
    program = ours.lohan.program()
    units = {u.name: u for u in program.workload.units}
    assert {u.state_bytes > 0 for u in units.values() if u.trainable} == {True}
    assert {u.state_bytes for u in units.values() if not u.trainable} == {0}
    emitted = {i.name for i in program.instructions.instructions if i.kind == "emit_gradients"}
    assert emitted == {name for name, u in units.items() if u.trainable}
    frozen = {p.tier for name, p in program.plan.units.items() if not units[name].trainable}
    assert frozen >= {"host", "ssd"}
    state = ours.optimizer.state_dict()["state"]
    assert len(state) == len(plain.optimizer.state_dict()["state"]) == 8
    ours.lohan.close()


# -- wrappers --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_torch_compile_of_a_compiled_model(hw: HardwareProfile) -> None:
    """It breaks the graph and runs the program."""
    ours, plain = both("GPT-2", hw)
    around = ours._replace(model=torch.compile(ours.model, backend="eager"))
    for seed in range(2):
        assert identical(around.step(seed), plain.step(seed))
    torch.compiler.reset()
    whole = torch.compile(ours.model, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"leave torch\.compile out"):
        whole(**ours.inputs)
    ours.lohan.close()


def test_compiling_what_torch_compile_made() -> None:
    model = torch.compile(nn.Linear(2, 2), backend="eager")
    with pytest.raises(LohanError, match="give the model itself"):
        lohan_fx.compile(model, hw="rtx4090-12xp5510")


def test_a_forward_of_the_instance_alone(hw: HardwareProfile) -> None:
    """As accelerate sets it: before compile it is captured; after it, it wraps the compiled one."""

    def wrapped(model: nn.Module, change: Callable[[Tensor], Tensor]) -> nn.Module:
        forward = model.forward.__func__  # type: ignore[attr-defined]

        def changed(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            return change(forward(self, *args, **kwargs))

        model.forward = types.MethodType(changed, model)  # type: ignore[method-assign]
        return model

    model, inputs = make("U-Net")
    plain = run(wrapped(wrapped(model, lambda y: 2 * y), lambda y: y + 1), inputs, None)
    model, _ = make("U-Net")
    ours = run(wrapped(model, lambda y: 2 * y), inputs, hw)
    wrapped(model, lambda y: y + 1)
    for seed in range(2):
        assert identical(ours.step(seed), plain.step(seed))
    assert len(ours.lohan.programs) == 1
    ours.lohan.close()
    assert_same_weights(ours, plain)
    with torch.no_grad():
        assert identical(*(r.model.eval()(**inputs) for r in (ours, plain)))


def test_forward_keeps_its_signature(hw: HardwareProfile) -> None:
    """Loops look into it for the inputs that a model takes."""
    model, _ = make("GPT-2")
    wanted = inspect.signature(model.forward)
    ours = run(model, {}, hw)
    assert inspect.signature(ours.model.forward) == wanted
    assert "labels" in wanted.parameters


def test_moving_a_compiled_model(hw: HardwareProfile) -> None:
    """Loops move models to the device that they are on; anything else is refused."""
    ours, plain = both("GPT-2", hw)
    for _ in range(2):
        assert ours.model.to("cpu") is ours.model.to(torch.device("cpu"), non_blocking=True)
        assert ours.model.cpu() is ours.model.to(torch.float32) is ours.model
        assert nn.Sequential(ours.model).to("cpu")[0] is ours.model
        changes = (
            lambda: ours.model.to("meta"),
            lambda: nn.Sequential(ours.model).to("meta"),
            lambda: ours.model.to(memory_format=torch.channels_last),
            ours.model.bfloat16,
        )
        for change in changes:
            with pytest.raises(LohanError, match=r"before lohan_fx\.compile"):
                change()
        assert identical(ours.step(0), plain.step(0))
    ours.lohan.close()
    assert ours.model.bfloat16().dtype == torch.bfloat16
