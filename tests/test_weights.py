"""Models on the meta device: loaded from files and initialized, straight into their tiers."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import lohan_fx
from lohan_fx.errors import CheckpointError, LohanError, StepError
from lohan_fx.planners import names
from tests.models import EXAMPLES, MLP, Layer, Tied, loss_of, make
from tests.toys import meta
from tests.training import Squeezed, cpu_hardware, identical, remember_captures, training_of

BUDGET = {"device": "64MiB", "host": "64MiB", "ssd": "64MiB"}


def compiled(tmp_path: Path, model: nn.Module, weights: Any, **options: Any) -> tuple[Any, Any]:
    training = training_of("adamw", model)
    made = lohan_fx.compile(
        model,
        hw=cpu_hardware(tmp_path),
        optimizer=training.optimizer,
        memory=BUDGET,
        weights=weights,
        **{"strategy": "recompute-all", **options},
    )
    return made, training


def steps(
    name: str, model: nn.Module, inputs: Mapping[str, Any], training: Any, count: int = 2
) -> list[Tensor]:
    losses = []
    for seed in range(count):
        torch.manual_seed(seed)
        loss = loss_of(name, model(**inputs))
        loss.backward()
        training.step()
        losses.append(loss.detach())
    return losses


def assert_same_state(a: nn.Module, b: nn.Module) -> None:
    found, wanted = a.state_dict(), b.state_dict()
    assert found.keys() == wanted.keys()
    assert not [k for k in wanted if not identical(found[k], wanted[k])]


# -- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "states"),
    [(name, "ssd") for name in ("gpt2", "llama", "resnet", "tied", "frozen")]
    + [pytest.param(name, "ssd", marks=pytest.mark.slow) for name in ("bert", "t5")]
    + [(name, tier) for name in ("gpt2", "frozen") for tier in ("device", "host")],
)
def test_a_model_on_meta_trains_as_a_loaded_one(
    name: str, states: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tied weights, BatchNorm and rotary buffers, frozen layers; the optimizer was there before.

    ResNet's buffers are in the file, BERT's and Llama's are made by the model's initialization.
    """
    remember_captures(monkeypatch, f"{name} on meta")
    plain, inputs = make(name)
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_model(plain, str(file))
    model = meta(EXAMPLES[name].build).train()
    before = dict(model.named_parameters())
    model, training = compiled(tmp_path, model, file, states=states)
    assert all(p.is_meta for p in before.values()), "nothing is loaded before the first forward"
    assert steps(name, model, inputs, training) == steps(
        name, plain, inputs, training_of("adamw", plain)
    )
    assert_same_state(model, plain)
    assert all(p is before[n] for n, p in model.named_parameters())
    model.lohan.close()


def test_a_file_in_bf16_becomes_masters_in_fp32(tmp_path: Path) -> None:
    plain, inputs = make("mlp")
    weights = {k: t.bfloat16() for k, t in plain.state_dict().items()}
    plain.load_state_dict(weights)
    model, training = compiled(tmp_path, meta(MLP), weights, states="ssd")
    assert steps("mlp", model, inputs, training) == steps(
        "mlp", plain, inputs, training_of("adamw", plain)
    )
    model.lohan.close()
    mixed, _ = compiled(tmp_path, meta(MLP), weights, states="host", dtype="bf16")
    mixed.lohan.prepare(**inputs)
    assert {p.dtype for p in mixed.parameters()} == {torch.float32}
    assert not [k for k, t in mixed.state_dict().items() if not torch.equal(t, weights[k].float())]
    mixed.lohan.close()


def test_frozen_parameters_beside_masters_keep_their_own_dtype(tmp_path: Path) -> None:
    plain, inputs = make("frozen")
    model, training = compiled(
        tmp_path, meta(EXAMPLES["frozen"].build), dict(plain.state_dict()), dtype="bf16"
    )
    model.lohan.prepare(**inputs)
    assert_same_state(model, plain)
    steps("frozen", model, inputs, training, 1)
    model.lohan.close()


def test_shards_by_index(tmp_path: Path) -> None:
    plain, inputs = make("tied")
    state = {k: t.clone() for k, t in plain.state_dict().items() if k != "head.weight"}
    places = {}
    for i, keys in enumerate((list(state)[:2], list(state)[2:])):
        file = f"part-{i}.safetensors"
        safetensors.torch.save_file({k: state[k] for k in keys}, str(tmp_path / file))
        places.update(dict.fromkeys(keys, file))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    for weights in (tmp_path, index):
        model, _ = compiled(tmp_path, meta(Tied), weights)
        model.lohan.prepare(**inputs)
        assert_same_state(model, plain)
        model.lohan.close()
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*part-1\.safetensors: No such file"):
        compiled(tmp_path, meta(Tied), tmp_path)
    index.write_text(json.dumps({"weight_map": {**places, "more": "part-0.safetensors"}}))
    safetensors.torch.save_file(
        {k: state[k] for k in list(state)[2:]}, str(tmp_path / "part-1.safetensors")
    )
    with pytest.raises(CheckpointError, match=r"are not there: more \(in part-0\.safetensors\)"):
        compiled(tmp_path, meta(Tied), tmp_path)


def test_parts_that_have_data_are_loaded_at_once(tmp_path: Path) -> None:
    plain, inputs = make("mlp")
    state = dict(plain.state_dict())
    model = meta(MLP)
    model.end = nn.Linear(32, 10)
    model, training = compiled(tmp_path, model, state)
    assert torch.equal(model.end.weight, plain.end.weight)
    assert steps("mlp", model, inputs, training) == steps(
        "mlp", plain, inputs, training_of("adamw", plain)
    )
    model.lohan.close()


def test_a_new_head_on_a_body_from_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What has data and is in no file stays; also within a unit of which the rest is loaded."""
    plain, inputs = make("mlp")
    model = meta(MLP)
    model.end = copy.deepcopy(plain.end)
    model.layers[1].linear.bias = copy.deepcopy(plain.layers[1].linear.bias)
    kept = ("end.weight", "end.bias", "layers.1.linear.bias")
    weights = {k: t for k, t in plain.state_dict().items() if k not in kept}
    model, training = compiled(tmp_path, model, weights, states="ssd")
    assert "nothing for layers.1.linear.bias, end.weight, end.bias, which keep" in caplog.text
    assert steps("mlp", model, inputs, training) == steps(
        "mlp", plain, inputs, training_of("adamw", plain)
    )
    model.lohan.close()
    with pytest.raises(CheckpointError, match=r"missing \(3\): layers\.1\.linear\.bias"):
        compiled(tmp_path, MLP(), weights)


# -- refusals ----------------------------------------------------------------------------------


def test_all_keys_that_do_not_fit_are_named_at_once(tmp_path: Path) -> None:
    state = dict(MLP().state_dict())
    del state["layers.1.linear.bias"], state["end.bias"]
    state["start.weight"] = torch.zeros(3, 16)
    state["layers.0.linear.bias"] = torch.zeros(32, dtype=torch.int64)
    state["more"] = torch.zeros(2)
    file = tmp_path / "w.safetensors"
    safetensors.torch.save_file(state, str(file))
    model = meta(MLP)
    with pytest.raises(CheckpointError) as error:
        compiled(tmp_path, model, file)
    text = str(error.value)
    assert "missing (2): layers.1.linear.bias (32,) float32, end.bias (10,) float32" in text
    assert "unexpected (1): more (2,) float32" in text
    assert "start.weight: file (3, 16) float32, model (32, 16) float32" in text
    assert "layers.0.linear.bias: file (32,) int64" in text
    assert str(file) in text
    assert all(p.is_meta for p in model.parameters())
    assert type(model) is MLP


@pytest.mark.parametrize(
    ("rename", "hint"),
    [
        (lambda k: f"module.{k}", r"names fit without 'module\.': the file is of an outer module"),
        (lambda k: k.removeprefix("layers."), r"most names fit after 'layers\.'"),
    ],
)
def test_a_prefix_is_recognized(rename: Any, hint: str, tmp_path: Path) -> None:
    state = {rename(k): t for k, t in MLP(num_layers=8).state_dict().items()}
    with pytest.raises(CheckpointError, match=hint):
        compiled(tmp_path, meta(lambda: MLP(num_layers=8)), state)


def test_the_weights_of_what_adapters_wrap_are_recognized(tmp_path: Path) -> None:
    """As peft wraps: what the message says to pass is then accepted, but for the adapters."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer, self.adapter = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

    def build() -> nn.Module:
        return nn.ModuleDict({"base": nn.Sequential(Adapted(), nn.Linear(4, 4), nn.Linear(4, 4))})

    tensors = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).state_dict()
    hint = (
        r"after 'base\.', and with '\.base_layer\.' where a layer is wrapped: .* "
        r"weights=\{'base\.' \+ name: tensors\[name\.replace\('\.base_layer\.', '\.'\)\]"
    )
    with pytest.raises(CheckpointError, match=hint):
        compiled(tmp_path, meta(build), dict(tensors))
    own = (name.removeprefix("base.") for name in build().state_dict())
    taken = {name: name.replace(".base_layer.", ".") for name in own}
    weights = {"base." + name: tensors[key] for name, key in taken.items() if key in tensors}
    with pytest.raises(CheckpointError, match=r"missing \(1\): base\.0\.adapter\.weight"):
        compiled(tmp_path, meta(build), weights)


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file(dict(MLP().state_dict()), str(file))
    whole = file.read_bytes()
    for cut in (4, 100, len(whole) - 1):
        file.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match=re.escape(f"{file} is no complete safetensors")):
            compiled(tmp_path, meta(MLP), file)
    (tmp_path / "w.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"w\.bin is no \.safetensors file: convert it"):
        compiled(tmp_path, meta(MLP), tmp_path / "w.bin")
    with pytest.raises(CheckpointError, match="No such file"):
        compiled(tmp_path, meta(MLP), tmp_path / "none.safetensors")
    file.unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor .*it has w\.bin"):
        compiled(tmp_path, meta(MLP), tmp_path)
    with pytest.raises(LohanError, match=r"weights=3: give a path"):
        compiled(tmp_path, meta(MLP), 3)
    with pytest.raises(LohanError, match=r"'start\.weight'\] is a meta tensor"):
        compiled(tmp_path, meta(MLP), dict(meta(MLP).state_dict()))


def test_tied_names_with_two_values_are_refused(tmp_path: Path) -> None:
    plain, inputs = make("tied")
    state = {k: t.clone() for k, t in plain.state_dict().items()}
    model, _ = compiled(tmp_path, meta(Tied), state)  # twice the same is fine
    model.lohan.prepare(**inputs)
    assert model.head.weight is model.embedding.weight
    assert_same_state(model, plain)
    model.lohan.close()
    state["head.weight"] = state["head.weight"] + 1
    with pytest.raises(CheckpointError, match=r"embedding\.weight and head\.weight are one param"):
        compiled(tmp_path, meta(Tied), state)


class Table(nn.Module):
    """A buffer that no file has, and perhaps nobody makes."""

    def __init__(self, makes: bool) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(16.0), persistent=False)
        self.linear = nn.Linear(16, 1)
        if makes:
            self.reset_parameters = self._fill

    def _fill(self) -> None:
        self.table.copy_(torch.arange(16.0))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x + self.table).mean()
        return y


def test_buffers_that_no_file_has_are_made_or_refused(tmp_path: Path) -> None:
    plain = Table(True)
    weights = dict(plain.state_dict())
    weights["table"] = torch.zeros(16)  # as old files have: no reason to refuse them
    model = meta(lambda: Table(False))
    with pytest.raises(LohanError, match=r"^buffer table: on the meta device, in no file, and"):
        compiled(tmp_path, model, weights)
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    model, _ = compiled(tmp_path, meta(lambda: Table(True)), weights)
    assert torch.equal(model.table, plain.table)
    x = torch.ones(2, 16)
    assert model(x) == plain(x)
    model.lohan.close()


def test_a_meta_model_without_weights_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(LohanError, match=r"start\.weight is on the meta .* weights=path"):
        compiled(tmp_path, meta(MLP), None)
    with pytest.raises(LohanError, match=r'weights="init" .* start\.weight \(10 in all\) has data'):
        compiled(tmp_path, MLP(), "init")


# -- initialization ----------------------------------------------------------------------------


@pytest.mark.parametrize("states", ["device", "ssd"])
@pytest.mark.parametrize("name", ["mlp", "resnet", "tied"])
def test_initialization_is_that_of_eager_mode(
    name: str, states: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember_captures(monkeypatch, f"{name} on meta")
    model = meta(EXAMPLES[name].build).train()
    inputs = make(name)[1]
    state = torch.get_rng_state()
    model, training = compiled(tmp_path, model, "init", states=states)
    assert torch.equal(torch.get_rng_state(), state), "compile draws nothing"
    torch.manual_seed(3)
    model.lohan.prepare(**inputs)
    plain = meta(EXAMPLES[name].build).to_empty(device="cpu").train()
    torch.manual_seed(3)
    for module in plain.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    if name == "tied":  # `to_empty` parts tied parameters
        plain.head.weight = plain.embedding.weight
        plain.layers[1].linear.bias = plain.layers[0].linear.bias
    assert_same_state(model, plain)
    assert steps(name, model, inputs, training) == steps(
        name, plain, inputs, training_of("adamw", plain)
    )
    model.lohan.close()


@pytest.mark.parametrize(
    "name",
    ["gpt2", "llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bert", "t5"))],
)
def test_initialization_of_transformers(name: str, tmp_path: Path) -> None:
    model, _ = compiled(tmp_path, meta(EXAMPLES[name].build).train(), "init")
    torch.manual_seed(3)
    model.lohan.prepare(**make(name)[1])
    plain = meta(EXAMPLES[name].build).to_empty(device="cpu")
    for module in plain.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    torch.manual_seed(3)
    plain.init_weights()
    assert_same_state(model, plain)
    assert all(torch.equal(b, dict(plain.named_buffers())[n]) for n, b in model.named_buffers())
    model.lohan.close()


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.linear = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x * self.scale).mean()
        return y


class AtOnce(nn.Sequential):
    def reset_parameters(self) -> None:
        for p in self.parameters():
            nn.init.normal_(p)


class Replaces(Bare):
    def reset_parameters(self) -> None:
        self.scale = nn.Parameter(torch.ones(16))


class Fails(Bare):
    def reset_parameters(self) -> None:
        raise RuntimeError("no luck")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (Bare, r"^parameter scale: on the meta device, in no file, and initialized by no module"),
        (lambda: AtOnce(Layer(16), Layer(16)), r"of the model writes parameters of 2 blocks"),
        (Replaces, r"the initialization of the model replaces parameters"),
        (Fails, r"reset_parameters of the model failed: no luck"),
    ],
)
def test_what_cannot_be_initialized_is_refused(build: Any, message: str, tmp_path: Path) -> None:
    model = meta(build)
    with pytest.raises(LohanError, match=message):
        compiled(tmp_path, model, "init")
    assert all(p.is_meta for p in model.parameters())


# -- life --------------------------------------------------------------------------------------


def test_states_made_on_meta_at_construction_are_made_anew(tmp_path: Path) -> None:
    """Adagrad."""
    plain, inputs = make("mlp")
    weights = dict(plain.state_dict())
    model = meta(MLP)
    options = {"lr": 0.1, "initial_accumulator_value": 0.5}
    optimizers = [torch.optim.Adagrad(m.parameters(), **options) for m in (model, plain)]
    made = lohan_fx.compile(
        model, hw=cpu_hardware(tmp_path), optimizer=optimizers[0], memory=BUDGET, weights=weights
    )
    for m, optimizer in zip((made, plain), optimizers, strict=True):
        for seed in range(2):
            torch.manual_seed(seed)
            m(**inputs).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(made, plain)
    made.lohan.close()


@pytest.mark.parametrize(
    "made_by",
    [torch.optim.AdamW, partial(torch.optim.SGD, lr=0.1, momentum=0.9), torch.optim.Adagrad],
)
def test_states_loaded_on_meta_are_refused(
    made_by: Callable[..., torch.optim.Optimizer], tmp_path: Path
) -> None:
    """They have no data: a plain resume, in the plain order."""
    plain, inputs = make("mlp")
    trained = made_by(plain.parameters())
    plain(**inputs).backward()
    trained.step()
    model = meta(MLP)
    optimizer = made_by(model.parameters())
    optimizer.load_state_dict(trained.state_dict())
    with pytest.raises(LohanError, match=r"has states of parameter start\.weight on the meta"):
        lohan_fx.compile(
            model,
            hw=cpu_hardware(tmp_path),
            optimizer=optimizer,
            memory=BUDGET,
            weights=dict(plain.state_dict()),
        )
    assert not model._load_state_dict_pre_hooks, "the model is as it was"


def test_nothing_is_loaded_before_there_is_memory(tmp_path: Path) -> None:
    """Neither weights nor states; after `prepare` both, and the run is plain PyTorch's."""
    plain, inputs = make("mlp")
    fresh = {name: value.clone() for name, value in plain.state_dict().items()}
    model = meta(MLP)
    optimizers = [training_of("adamw", m).optimizer for m in (plain, model)]
    untrained = optimizers[0].state_dict()
    plain(**inputs).backward()
    optimizers[0].step()
    optimizers[0].zero_grad()
    options: dict[str, Any] = {"hw": cpu_hardware(tmp_path), "memory": BUDGET, "weights": fresh}
    made = lohan_fx.compile(model, optimizer=optimizers[1], **options)
    weights, states = copy.deepcopy((plain.state_dict(), optimizers[0].state_dict()))
    with pytest.raises(StepError, match=r"^the weights would be lost: .*prepare.* weights="):
        made.load_state_dict(weights)
    with pytest.raises(StepError, match=r"^the states would be lost: .*prepare.* lohan_fx\.load"):
        optimizers[1].load_state_dict(states)
    optimizers[1].load_state_dict(untrained)  # hyperparameters alone
    made.lohan.prepare(**inputs)
    made.load_state_dict(weights)
    optimizers[1].load_state_dict(states)
    for m, optimizer in zip((plain, made), optimizers, strict=True):
        torch.manual_seed(0)
        m(**inputs).backward()
        optimizer.step()
    assert_same_state(made, plain)
    made.lohan.close()
    assert not model._load_state_dict_pre_hooks


def test_what_has_data_is_loaded_before_there_is_memory(tmp_path: Path) -> None:
    """Adapters and a head beside a base on meta, and their states."""
    plain, inputs = make("mlp")
    weights = dict(plain.state_dict())
    model = meta(MLP)
    model.end = nn.Linear(32, 10)
    head = {name: value + 1 for name, value in weights.items() if name.startswith("end.")}
    base = {name: value for name, value in weights.items() if name not in head}
    optimizer = torch.optim.SGD(model.end.parameters(), lr=0.1, momentum=0.9)
    other = torch.optim.SGD(plain.end.parameters(), lr=0.1, momentum=0.9)
    plain(**inputs).backward()
    other.step()
    options: dict[str, Any] = {"hw": cpu_hardware(tmp_path), "memory": BUDGET, "weights": base}
    made = lohan_fx.compile(model, optimizer=optimizer, **options)
    made.load_state_dict(head, strict=False)
    optimizer.load_state_dict(other.state_dict())
    made.lohan.prepare(**inputs)
    assert all(torch.equal(made.state_dict()[name], value) for name, value in head.items())
    found, wanted = optimizer.state_dict()["state"], other.state_dict()["state"]
    assert found.keys() == wanted.keys() == {0, 1}
    for i, entry in wanted.items():
        assert torch.equal(found[i]["momentum_buffer"], entry["momentum_buffer"])
    made.lohan.close()


def test_without_an_optimizer_gradients_land_in_grad(tmp_path: Path) -> None:
    plain, inputs = make("tied")
    model = meta(Tied)
    training = training_of("adamw", model)  # its own, over parameters on meta
    model = lohan_fx.compile(
        model, hw=cpu_hardware(tmp_path), memory=BUDGET, weights=dict(plain.state_dict())
    )
    assert steps("tied", model, inputs, training) == steps(
        "tied", plain, inputs, training_of("adamw", plain)
    )
    assert_same_state(model, plain)
    model.lohan.close()


QUICK = ("keep-all", "swap-all", "recompute-all", "lohan", "random")


@pytest.mark.parametrize(
    "strategy", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in names()]
)
def test_every_strategy_starts_on_meta(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember_captures(monkeypatch, "mlp on meta")
    plain, inputs = make("mlp")
    model, training = compiled(
        tmp_path, meta(MLP), dict(plain.state_dict()), strategy=Squeezed(strategy)
    )
    assert steps("mlp", model, inputs, training) == steps(
        "mlp", plain, inputs, training_of("adamw", plain)
    )
    assert_same_state(model, plain)
    model.lohan.close()


def test_a_failed_allocation_can_be_tried_again(tmp_path: Path) -> None:
    plain, inputs = make("mlp")
    weights = dict(plain.state_dict())
    model, training = compiled(tmp_path, meta(MLP), weights)
    missing = weights.pop("end.bias")
    with pytest.raises(KeyError, match=r"end\.bias"):
        model(**inputs)
    weights["end.bias"] = missing
    assert steps("mlp", model, inputs, training) == steps(
        "mlp", plain, inputs, training_of("adamw", plain)
    )
    model.lohan.close()


MEMORY = """
    import sys, threading
    from contextlib import contextmanager
    from pathlib import Path
    import torch
    from torch import nn
    import lohan_fx
    from lohan_fx import footprint
    from tests.toys import meta
    from tests.training import cpu_hardware

    def memory():
        # Anonymous memory, private and shared: all but pages of files, which the kernel may drop.
        lines = dict(l.split(":", 1) for l in open("/proc/self/status") if ":" in l)
        return sum(int(lines[k].split()[0]) for k in ("RssAnon", "RssShmem")) << 10

    @contextmanager
    def grows(name):
        samples, ended = [memory()], threading.Event()
        def sample():
            while not ended.wait(0.001):
                samples.append(memory())
        thread = threading.Thread(target=sample)
        thread.start()
        yield
        ended.set()
        thread.join()
        print(name, max(samples) - samples[0])

    def build(width=512, depth=32):
        block = lambda: nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width))
        return nn.Sequential(*(block() for _ in range(depth)))

    def compile(model, weights, **options):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)
        return lohan_fx.compile(
            model, hw=cpu_hardware(directory), optimizer=optimizer, states="ssd",
            strategy="recompute-all", weights=weights,
            memory={"device": "128MiB", "host": "256MiB", "ssd": "1GiB"}), optimizer

    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    small, _ = compile(build(8), None)
    small.lohan.prepare(torch.ones(2, 8))  # tracing has its memory from here on
"""

LOADS = """
    model = meta(build)
    weights = sys.argv[2]
    print("model", sum(p.numel() for p in model.parameters()) * 4)
    with grows("grown"):
        model, _ = compile(model, weights)
        program = model.lohan.prepare(torch.ones(2, 512))
    print("planned", sum(footprint.host_bytes_needed(program.workload, program.plan).values()))
    print("unit", max(u.compute_bytes for u in program.workload.units))
    print("value", model[3][1].weight[5, 7].item())
"""


def measured(script: str, *arguments: str) -> dict[str, float]:
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEMORY) + textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return {name: float(value) for name, value in map(str.split, ran.stdout.splitlines())}


@pytest.mark.slow
@pytest.mark.parametrize("source", ["file", "init"])
def test_loading_takes_one_unit_beyond_the_plan(source: str, tmp_path: Path) -> None:
    """Anonymous memory (RssAnon and RssShmem) while a model of 268 MB goes to the SSD tier."""
    width, weights = 512, "init"
    if source == "file":
        weights = str(tmp_path / "model.safetensors")
        tensors = {}
        for i in range(32):
            for k, (n, m) in enumerate(((4 * width, width), (width, 4 * width))):
                tensors[f"{i}.{k}.weight"] = torch.full((n, m), float(i))
                tensors[f"{i}.{k}.bias"] = torch.zeros(n)
        safetensors.torch.save_file(tensors, weights)
        del tensors
    found = measured(LOADS, str(tmp_path), weights)
    shutil.rmtree(tmp_path)
    assert found["model"] > 268e6
    assert found["grown"] < found["planned"] + found["unit"] + 2**25, found
    assert found["grown"] < found["model"] / 2
    assert source == "init" or found["value"] == 3.0
