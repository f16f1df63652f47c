"""The workload of a captured step: FLOPs, bytes, storages, blocks, units, seconds, residuals."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

import lohan_fx
from lohan_fx._compat import storage_key
from lohan_fx.annotate import (
    ALIGNMENT_BYTES,
    StateLayout,
    block_paths,
    flops_of,
    is_view,
    storage_bytes,
    tensors_of,
    unit_layouts,
)
from lohan_fx.api import LohanModule
from lohan_fx.capture import capture
from lohan_fx.errors import LohanError
from lohan_fx.gradient_sums import sums_in_place
from lohan_fx.workload import Op, Workload
from tests.captured import HW, STATES, Step, leaves, step, step_of
from tests.models import EXAMPLES, MLP, Layer, loss_of
from tests.training import cpu_hardware


def op(workload: Workload, name: str) -> Op:
    return workload.ops[workload.op_index[name]]


def small(model: nn.Module, *args: Tensor) -> Step:
    return step_of(model, dict(zip("xyz", args, strict=False)), "small")


# -- FLOPs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXAMPLES)
def test_flops_are_those_that_eager_counts(name: str) -> None:
    made = step(name)
    with torch.random.fork_rng(devices=[]):
        with FlopCounterMode(display=False) as forward:
            loss = loss_of(name, made.model(**made.kwargs))
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    made.model.zero_grad()
    assert made.workload.forward_flops == forward.get_total_flops() > 0
    assert made.workload.backward_flops == backward.get_total_flops() > 0


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, 4, 16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.w * x, self.w, self.w).sum()


def test_attention_on_the_cpu_has_flops() -> None:
    workload = small(Attention(), torch.randn(2, 4, 16, 8)).workload
    matmul = 2 * 2 * 4 * 16 * 16 * 8
    assert workload.forward_flops == 2 * matmul
    assert workload.backward_flops == 5 * matmul  # the scores again, and two for each input


def test_grouped_mm_has_flops() -> None:
    graph = fx.Graph()
    values = (torch.empty(32, 16, device="meta"), torch.empty(4, 16, 24, device="meta"))
    inputs = []
    for k, value in enumerate(values):
        inputs.append(graph.placeholder(f"x{k}"))
        inputs[-1].meta["val"] = value
    node = graph.call_function(torch.ops.aten._grouped_mm.default, tuple(inputs))
    step("mlp")  # registers what PyTorch lacks
    assert flops_of(node) == 2 * 32 * 16 * 24


# -- bytes and seconds ---------------------------------------------------------------------------


def test_bytes_and_seconds_of_a_matmul() -> None:
    made = step("mlp").workload
    (name,) = [o.name for o in made.ops if o.name == "addmm"]
    addmm = op(made, name)
    assert addmm.flops == 2 * 6 * 16 * 32
    assert addmm.bytes_read == 4 * (6 * 16 + 16 * 32 + 32)
    assert addmm.bytes_written == 4 * 6 * 32
    assert addmm.reads == ("input_0", "p_start_bias", "p_start_weight")
    assert addmm.writes == ("addmm",)


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_seconds_are_the_roofline(name: str) -> None:
    for o in step(name).workload.ops:
        moved = (o.bytes_read + o.bytes_written) / HW.device_bytes_per_s
        assert o.seconds == max(o.flops / HW.flops_per_s("float32"), moved)


def test_a_gather_reads_what_it_returns() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(1000, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.table(x).sum()

    embedding = op(small(Model(), torch.tensor([1, 2])).workload, "embedding")
    assert embedding.bytes_read == 2 * 8 + 2 * 4 * 4


def test_tokens() -> None:
    assert step("gpt2").workload.num_tokens == 2 * 12
    assert step("resnet").workload.num_tokens == 4
    assert step("dict").workload.num_tokens == 6  # rows, where nothing is an integer


# -- storages ------------------------------------------------------------------------------------


class Views(nn.Module):
    """Chains of views, a tuple of views, an op with several results."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.w
        a, b = h.t().split(2)
        top, _ = h.topk(2)
        return (a * b.detach()).sum() + top.sum() + self.w.t().reshape(-1)[3:].exp().sum()


def test_views_are_resolved_to_the_node_that_made_their_storage() -> None:
    made = small(Views(), torch.randn(3, 6))
    nodes = {n.name: n for n in made.captured.graph.graph.nodes}
    root = {name: n.meta["root"].name for name, n in nodes.items() if "root" in n.meta}
    assert root["mm"] == "mm"
    assert {root[n] for n in ("t", "split", "split_r0", "split_r1")} == {"mm"}
    assert all(is_view(nodes[n]) for n in ("t", "split", "split_r0"))
    assert (root["topk_r0"], root["topk_r1"]) == ("topk_r0", "topk_r1")
    assert "root" not in nodes["topk"].meta
    assert not is_view(nodes["topk"])
    transposes = [n for n in root if n.startswith("t_") and root[n] == "p_w"]
    assert transposes, "a parameter and its transpose are one storage"
    values = made.workload.values
    assert not {"t", "split", "split_r0", "split_r1", *transposes} & set(values)
    assert op(made.workload, "topk").writes == ("topk_r0", "topk_r1")
    assert op(made.workload, "mul").reads == ("mm",)


def test_results_that_nobody_takes_are_values_too() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 6))

        def forward(self, x: Tensor) -> Tensor:
            return (self.w * x.topk(6)[0]).sum()

    workload = small(Model(), torch.randn(3, 6)).workload
    assert op(workload, "topk").writes == ("topk_r0", "topk.1")
    assert workload.values["topk.1"].num_bytes == 8 * 3 * 6
    assert not workload.users["topk.1"]


class Shadow(fx.Interpreter):
    """Runs a graph on real tensors; collects nodes whose memory is not what was planned."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.planned: dict[int, int] = {}
        self.kept: list[Any] = []
        self.odd: list[tuple[str, str]] = []

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.kept.append(result)
        if n.op in ("placeholder", "call_function"):
            pairs = zip(tensors_of(n.meta["val"]), tensors_of(result), strict=True)
            for fake, real in pairs:
                self.compare(n, fake, real)
        return result

    def compare(self, n: fx.Node, fake: Tensor, real: Tensor) -> None:
        if (fake.shape, fake.dtype) != (real.shape, real.dtype):
            self.odd.append((n.name, "type"))
        elif fake.stride() != real.stride() and real.numel() > 1:
            self.odd.append((n.name, "strides"))
        if n.op != "placeholder" and storage_bytes(fake) != storage_bytes(real):
            self.odd.append((n.name, "bytes"))
        if sums_in_place(n):  # into what is planned to die, and is read no more
            total = self.env[n.args[0]]
            if real.data_ptr() != total.data_ptr():
                self.odd.append((n.name, "copy"))
        elif real.numel():
            key = self.planned.setdefault(real.untyped_storage().data_ptr(), storage_key(fake))
            if key != storage_key(fake):
                self.odd.append((n.name, "alias"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_real_storages_are_the_planned_ones(name: str) -> None:
    made = step(name)
    tensors = {
        **dict(made.model.named_parameters(remove_duplicate=False)),
        **dict(made.model.named_buffers(remove_duplicate=False)),
    }
    flat = pytree.tree_leaves(((), dict(made.kwargs)))
    arguments = []
    for node in made.captured.graph.graph.find_nodes(op="placeholder"):
        role = node.meta["role"]
        if role.kind == "tangent":
            arguments.append(torch.ones(node.meta["val"].shape))
        elif role.kind == "input":
            arguments.append(flat[role.index].detach())
        else:
            arguments.append(tensors[role.target].detach().clone())
    shadow = Shadow(made.captured.graph)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        shadow.run(*arguments)
    # T5 shifts its labels by slices; the copy's real storage is the base's
    assert shadow.odd == ([("copy", "bytes")] if name == "t5" else [])


# -- blocks --------------------------------------------------------------------------------------

BLOCKS = {
    "gpt2": ["transformer", "transformer.h.0", "transformer.h.1", "transformer.ln_f"],
    "llama": ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm"],
    "bert": [
        "bert.embeddings",
        "bert.encoder.layer.0",
        "bert.encoder.layer.1",
        "bert.pooler",
    ],
    "t5": [
        "encoder.embed_tokens",
        "encoder.block.0",
        "encoder.block.1",
        "encoder.final_layer_norm",
        "decoder.block.0",
        "decoder.block.1",
        "decoder.final_layer_norm",
    ],
    "resnet": ["stem", "stage1.0", "stage1.1", "stage2.0", "stage2.1", "dropout"],
    "mlp": ["start", "layers.0", "layers.1", "layers.2", "end"],
    "tied": ["embedding", "layers.0", "layers.1", "head"],
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name: str) -> None:
    workload = step(name).workload
    assert list(workload.blocks) == BLOCKS[name]
    backward = list(dict.fromkeys(o.block for o in workload.ops if o.phase == "backward"))
    inner = [b for b in BLOCKS[name] if b.rpartition(".")[2].isdigit()]
    assert [b for b in backward if b in inner] == inner[::-1]


def test_a_block_is_entered_once_in_backward() -> None:
    """Sums of gradients go with the block that made the last summand."""
    ops = [o for o in step("gpt2").workload.ops if o.phase == "backward"]
    runs = [o.block for k, o in enumerate(ops) if k == 0 or ops[k - 1].block != o.block]
    assert runs == ["transformer.ln_f", "transformer.h.1", "transformer.h.0", "transformer"]


def test_a_shared_block_has_a_name_for_each_run() -> None:
    class Model(MLP):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = self.layers[0](self.layers[1](self.layers[0](self.start(x))))
            return F.cross_entropy(self.end(x), y)

    workload = small(Model(), torch.randn(6, 16), torch.randint(0, 10, (6,))).workload
    assert workload.blocks == ("start", "layers.0", "layers.1", "layers.0@2", "end")


def test_only_repeated_containers_hold_blocks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Layer(4), Layer(4)), nn.ReLU())
    found = block_paths(model)
    assert found["1.0.linear"] == "1.0"
    assert "0" not in found
    assert block_paths(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))["2"] == "2"


def test_source_layers_are_marked() -> None:
    modules = {n.name: n.meta.get("module") for n in step("bert").captured.graph.graph.nodes}
    assert modules["native_layer_norm"] == "bert.embeddings.LayerNorm"
    assert modules["native_layer_norm_backward"] == "bert.encoder.layer.1.output.LayerNorm"


# -- units ---------------------------------------------------------------------------------------


def test_units_are_blocks_and_modules() -> None:
    units = {u.name: u for u in step("gpt2").workload.units}
    assert list(units) == [
        "transformer.wte",
        "transformer.wpe",
        "transformer.h.0",
        "transformer.h.1",
        "transformer.ln_f",
    ]
    block = units["transformer.h.0"]
    assert len(block.parameters) == len(block.gradients) == 12
    assert block.compute_bytes == 4 * block.num_params == block.gradient_bytes
    assert block.state_bytes == 2 * block.compute_bytes
    assert block.own_master
    head = units["transformer.wte"]
    assert head.parameters == ("transformer.wte.weight",)  # tied: under its first name


def test_tied_parameters_are_in_one_unit() -> None:
    workload = step("tied").workload
    units = {u.name: u for u in workload.units}
    assert "head" not in units
    assert "layers.0.linear.bias" in units["layers.0"].parameters
    assert units["layers.1"].parameters == ("layers.1.linear.weight",)
    tied = workload.values["p_embedding_weight"]
    blocks = {workload.ops[i].block for i in workload.users[tied.name]}
    assert {"embedding", "head"} <= blocks


def test_frozen_parameters_are_apart() -> None:
    units = {u.name: u for u in step("frozen").workload.units}
    assert not units["start"].trainable
    assert units["start"].state_bytes == units["start"].gradient_bytes == 0
    assert units["layers.2[train,float32]"].parameters == ("layers.2.linear.weight",)
    assert units["layers.2[frozen,float32]"].parameters == ("layers.2.linear.bias",)


def test_parameters_that_nothing_reads_have_no_gradient() -> None:
    units = {u.name: u for u in step("unused").workload.units}
    assert not units["idle.linear"].trainable
    assert units["idle.linear"].state_bytes > 0  # it trains, as far as anyone knows
    assert units["end"].gradient_bytes < units["end"].compute_bytes


def test_dtypes_are_apart_and_slices_are_aligned() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 7))
    model[2].bias = nn.Parameter(model[2].bias.to(torch.float64))
    names = [n for n, _ in model.named_parameters()]
    layouts = {u.name: u for u in unit_layouts(model, names, STATES)}
    assert set(layouts) == {"0", "2[train,float32]", "2[train,float64]"}
    for layout in layouts.values():
        size = layout.copy_dtype.itemsize
        assert all(s.offset * size % ALIGNMENT_BYTES == 0 for s in layout.slices)
        assert layout.numel * size % ALIGNMENT_BYTES == 0
    low = StateLayout(compute_dtype=torch.bfloat16, num_states=2)
    with pytest.raises(LohanError, match=r"2\.bias is trained and torch\.float64"):
        unit_layouts(model, names, low)
    model[2].bias = nn.Parameter(model[2].bias.to(torch.bfloat16))
    half = unit_layouts(model, names, low)
    assert {u.shown_dtype for u in half} == {torch.float32, torch.bfloat16}
    assert {u.copy_dtype for u in half} == {torch.bfloat16}
    assert {u.dtype for u in half} == {torch.float32}


def test_strides_without_gaps_are_kept() -> None:
    model = nn.ParameterDict(
        {
            "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
            "transposed": torch.randn(3, 5).t(),
            "gaps": torch.randn(4, 6)[:, ::2],
        }
    )
    (layout,) = unit_layouts(model, [], STATES)
    strides = {s.name: s.stride for s in layout.slices}
    assert strides["channels_last"] == (48, 1, 12, 3)
    assert strides["transposed"] == (1, 5)
    assert strides["gaps"] == (3, 1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = model

        def forward(self, x: Tensor) -> Tensor:
            return sum(p.sum() for p in self.p.values()) * x  # type: ignore[return-value]

    captured = capture(Model(), (torch.tensor(2.0),))
    for node in captured.graph.graph.find_nodes(op="placeholder"):
        if node.meta["role"].kind == "parameter":
            key = node.meta["role"].target.partition(".")[2]
            assert node.meta["val"].stride() == strides[key], "traced as it will be laid out"


# -- residuals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXAMPLES)
def test_residuals_are_what_eager_saves(name: str) -> None:
    """By storage, of activations. One thing differs on the CPU: dropout saves its mask as bool,
    where eager saves it as the float that it multiplies with."""
    made = step(name)
    workload = made.workload
    static = [*made.model.parameters(), *made.model.buffers(), *pytree.tree_leaves(made.kwargs)]
    known = {storage_key(t) for t in static if isinstance(t, Tensor)}
    saved: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        if storage_key(t) not in known:
            saved[storage_key(t)] = t
        return t

    with (
        torch.random.fork_rng(devices=[]),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
    ):
        output = made.model(**made.kwargs)
    given = {storage_key(t) for t in leaves(output) if isinstance(t, Tensor)}
    eager = Counter(storage_bytes(t) for key, t in saved.items() if key not in given)
    graph = Counter(workload.values[v].num_bytes for v in workload.residuals)
    masks = Counter(
        workload.values[v].num_bytes
        for o in workload.ops
        if o.target == "aten.native_dropout.default"
        for v in o.writes[1:]
    )
    for size, count in masks.items():
        graph[size] -= count
        graph[4 * size] += count
    difference = {k: graph[k] - eager[k] for k in {*graph, *eager} if graph[k] != eager[k]}
    if name == "t5":  # the encoder's padding mask: eager keeps the decoder's twice instead
        assert difference == {12: 1, 64: -1}
    else:
        assert difference == {}


class _SameNames(nn.Module):
    """Modules called as the ops that they run."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.gelu = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.gelu(self.embedding(x))).square().sum()


def test_units_and_values_have_names_of_their_own(tmp_path: Path) -> None:
    model = _SameNames()
    made = lohan_fx.compile(
        model,
        hw=cpu_hardware(tmp_path),
        optimizer=torch.optim.SGD(model.parameters()),
        states="ssd",
    )
    assert isinstance(made, LohanModule)
    workload = made.lohan.prepare(torch.arange(6)).workload
    assert {u.name for u in workload.units} == {"embedding", "gelu"}
    assert not {u.name for u in workload.units} & set(workload.values)
    assert {"embedding_op", "gelu_op"} <= set(workload.values)
    made(torch.arange(6)).backward()
    made.lohan.close()
