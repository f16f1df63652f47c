"""Fused steps: which ops become one, and that nothing else changes.

Bodies of fused ops are interpreted, which is eager to the bit; few tests compile them.
"""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from transformers import LlamaConfig, LlamaForCausalLM

import lohan_fx
import lohan_fx.compiled.building
from lohan_fx._compat import OpOverload, fake_mode
from lohan_fx.annotate import (
    annotate,
    is_getitem,
    is_view,
    mark_blocks,
    mark_roots,
    tensors_of,
    unit_layouts,
)
from lohan_fx.api import LohanModule
from lohan_fx.capture import Captured, capture
from lohan_fx.fusion import Kernels, align, clusters, fuse
from lohan_fx.fusion.clusters import Kernel, _Finder, _replace, _sort
from lohan_fx.hardware import HardwareProfile
from lohan_fx.joint_graph import is_random, op_name
from lohan_fx.models.gpt import GPT
from lohan_fx.planners import make_plan
from tests.captured import BUDGET, HW, STATES, check_exact, run_eager, run_graph
from tests.captured import step as captured_step
from tests.models import MLP, loss_of, make
from tests.training import (
    Squeezed,
    assert_identical,
    eager,
    remember_captures,
    step,
    training_of,
)

MODELS = ("gpt2", "llama", "bert", "t5", "resnet", "mlp", "tied", "frozen")
GRAPHS = tuple(name for name in MODELS if name not in ("bert", "t5"))  # like others, and slow
STRATEGIES = ("recompute-all", "swap-all", "random", "lohan")
CPU = torch.device("cpu")
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests' models are small: fuse all the same."""
    monkeypatch.setattr(clusters, "MIN_BYTES", 0)
    monkeypatch.setattr(align, "MIN_ELEMENTS", 0)


class Checked:
    """Interpreting kernels whose calls must return what was planned, in shape and strides."""

    def __init__(self, device: torch.device, *, compiled: bool) -> None:
        self.kernels = Kernels(device, compiled=compiled)
        self.calls = 0
        self._checked: dict[Kernel, Kernel] = {}

    def __call__(self, body: fx.GraphModule, name: str) -> Kernel:
        kernel = self.kernels(body, name)
        if kernel not in self._checked:
            self._checked[kernel] = self._check(kernel, body, name)
        return self._checked[kernel]

    def _check(self, kernel: Kernel, body: fx.GraphModule, name: str) -> Kernel:
        returned: Any = body.graph.output_node().args[0]
        planned = [n.meta["val"] for n in returned]

        @functools.wraps(kernel)
        def checked(*arguments: Tensor) -> Any:
            found = kernel(*arguments)
            self.calls += 1
            for made, wanted in zip(tensors_of(found), planned, strict=True):
                assert made.shape == wanted.shape, name
                assert made.stride() == wanted.stride(), name
                assert made.dtype == wanted.dtype, name
            return found

        return checked


def check_kernels(patch: pytest.MonkeyPatch, *, compiled: bool = False) -> list[Checked]:
    """Let `lohan_fx.compile` make checked kernels; returns those of each model, as they come."""
    made: list[Checked] = []

    def kernels(device: torch.device, **_: bool) -> Checked:
        made.append(Checked(device, compiled=compiled))
        return made[-1]

    patch.setattr(lohan_fx.compiled.building, "Kernels", kernels)
    return made


def fused_nodes(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if "members" in n.meta and not is_getitem(n)]


# -- steps -----------------------------------------------------------------------------------------


CASES = [
    # each model meets half of the strategies, the others are slow
    pytest.param(name, strategy, marks=() if (m + s) % 2 == 0 else pytest.mark.slow)
    for m, name in enumerate(MODELS)
    for s, strategy in enumerate(STRATEGIES)
]


@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_fused_steps_are_eager(
    name: str, strategy: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember_captures(monkeypatch, name)
    original = lohan_fx.compiled.building.capture

    def cloned(*args: Any, **options: Any) -> Any:  # the result is shared; `fuse` would change it
        return original(*args, **options).clone()

    monkeypatch.setattr(lohan_fx.compiled.building, "capture", cloned)
    made = check_kernels(monkeypatch)
    model, inputs = make(name)
    training = training_of("adamw", model)
    model = lohan_fx.compile(
        model,
        hw=hw,
        optimizer=training.optimizer,
        strategy=Squeezed(strategy),
        states="host",
        fused=True,
    )
    assert isinstance(model, LohanModule)
    model.lohan.prepare(**inputs)
    for seed, wanted in enumerate(eager(name, "adamw")[:2]):
        before = model.lohan.counters
        assert_identical(step(name, model, inputs, seed, training.step), wanted)
        moved, planned = model.lohan.counters.minus(before), model.plan.prediction
        assert (moved.d2h_bytes, moved.h2d_bytes) == (planned.d2h_bytes, planned.h2d_bytes)
        assert moved.ssd_read_bytes == planned.ssd_read_bytes
        assert moved.ssd_write_bytes == planned.ssd_write_bytes
    (kernels,) = made
    assert kernels.calls >= 2 * kernels.kernels.count > 0
    assert "fused_" in str(model.graph)  # that the program is the plan's is checked when it is made
    model.lohan.close()


@pytest.mark.parametrize("name", ["gpt2", "mlp"])
def test_off_by_default_on_a_cpu(
    name: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember_captures(monkeypatch, name)
    (model, inputs), made = make(name), check_kernels(monkeypatch)
    model = lohan_fx.compile(model, hw=hw, strategy="keep-all")
    assert isinstance(model, LohanModule)
    model.lohan.prepare(**inputs)
    assert made[0].kernels.count == 0
    assert not fused_nodes(model.graph.graph)
    model.lohan.close()


# -- which ops -------------------------------------------------------------------------------------


def captured_of(name: str) -> tuple[nn.Module, dict[str, Any], Captured]:
    made = captured_step(name)
    return made.model, dict(made.kwargs), made.captured


@functools.cache
def fused_of(name: str) -> tuple[Captured, list[fx.GraphModule]]:
    """A fused copy, and the bodies of its fused ops."""
    model, _, captured = captured_of(name)
    captured = captured.clone()
    bodies = []
    kernels = Kernels(CPU, compiled=False)

    def compiler(body: fx.GraphModule, kernel_name: str) -> Kernel:
        mark_roots(body.graph)  # its own; it has copies of the marks of the whole graph
        bodies.append(body)
        return kernels(body, kernel_name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clusters, "MIN_BYTES", 0)
        patch.setattr(align, "MIN_ELEMENTS", 0)
        count = fuse(captured, model, compiler)
    assert count == len(bodies) == len(fused_nodes(captured.graph.graph))
    return captured, bodies


@pytest.mark.parametrize("name", GRAPHS)
def test_a_fused_op_stays_in_its_block_and_phase(name: str) -> None:
    captured, bodies = fused_of(name)
    assert bodies
    for made in fused_nodes(captured.graph.graph):
        assert {"phase", "block", "module"} <= made.meta.keys()
    for body in bodies:
        ops = [n for n in body.graph.nodes if n.op == "call_function"]
        ops = [n for n in ops if not is_view(n) and not is_getitem(n)]
        assert len(ops) >= 2
        ops = [n for n in ops if not clusters.is_created(n, CPU)]  # these are anybody's
        assert 1 <= len(ops) <= clusters.MAX_OPS
        assert len({(n.meta["phase"], n.meta["block"]) for n in ops}) == 1
        for n in ops:
            assert isinstance(n.target, OpOverload)
            assert not is_random(n)
            assert not n.target._schema.is_mutable
            name_of_op = str(n.target.overloadpacket)
            assert torch.Tag.pointwise in n.target.tags or name_of_op in clusters._FUSIBLE


@pytest.mark.parametrize("name", GRAPHS)
def test_every_op_is_still_there_once(name: str) -> None:
    """But for those that make tensors of numbers alone, which are made where they are read."""
    _, _, before = captured_of(name)
    after, bodies = fused_of(name)

    def ops(graph: fx.Graph) -> list[fx.Node]:
        nodes = [n for n in graph.nodes if n.op == "call_function" and "members" not in n.meta]
        nodes = [n for n in nodes if not is_view(n) and not is_getitem(n)]
        return [n for n in nodes if not clusters.is_created(n, CPU)]

    outside = ops(after.graph.graph)
    inside = [n for body in bodies for n in ops(body.graph)]
    wanted = ops(before.graph.graph)
    assert sorted(str(n.target) for n in outside + inside) == sorted(str(n.target) for n in wanted)
    assert sum(map(is_random, outside)) == sum(map(is_random, wanted)) > 0


@pytest.mark.parametrize("name", GRAPHS)
def test_fused_graphs_are_exact(name: str) -> None:
    """Run as a whole, against eager."""
    model, inputs, _ = captured_of(name)
    captured, _ = fused_of(name)
    check_exact(model, (), inputs, loss=lambda o: loss_of(name, o), captured=captured)


def test_identical_blocks_share_kernels() -> None:
    inputs = {"x": torch.randn(6, 16), "y": torch.randint(0, 10, (6,))}
    counts = []
    for num_layers in (3, 6):
        model = MLP(num_layers=num_layers)
        kernels = Kernels(CPU, compiled=False)
        fused = fuse(capture(model, (), inputs), model, kernels)
        counts.append((kernels.count, fused))
    (few, fused), (many, more) = counts
    assert few == many
    assert more > fused > few


def test_kernels_are_told_apart_by_constants_and_layouts() -> None:
    def body(constant: float, *, transposed: bool = False) -> fx.GraphModule:
        mode = fake_mode()
        with mode:
            x = torch.empty(4, 3).t() if transposed else torch.empty(3, 4)
        graph = fx.Graph()
        given = graph.placeholder("x")
        given.meta["val"] = x
        made = graph.call_function(aten.mul.Tensor, (given, constant))
        with mode:
            made.meta["val"] = x * constant
        graph.output((made,))
        return fx.GraphModule({}, graph)

    kernels = Kernels(CPU, compiled=False)
    first = kernels(body(2.0), "mul")
    assert kernels(body(2.0), "another name") is first
    x = torch.randn(3, 4)
    assert torch.equal(kernels(body(3.0), "mul")(x), 3 * x)
    assert torch.equal(first(x), 2 * x)
    kernels(body(2.0, transposed=True), "mul")
    assert kernels.count == 3
    assert first.__name__ == "mul_0"


# -- graphs made by hand ---------------------------------------------------------------------------


class Draft:
    """A graph made node by node; all of one shape, of one block and phase unless told."""

    SHAPE = (8, 8)

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.mode = fake_mode()

    def placeholder(self, name: str) -> fx.Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(self.SHAPE)
        return node

    def __call__(
        self, target: Any, *args: Any, block: str = "a", phase: str = "forward"
    ) -> fx.Node:
        node = self.graph.call_function(target, args)
        values = pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], args)
        with self.mode:
            node.meta.update(val=target(*values), phase=phase, block=block)
        return node

    def finish(self, *results: fx.Node) -> fx.GraphModule:
        self.graph.output(results)
        mark_roots(self.graph)
        return fx.GraphModule({}, self.graph)

    def finder(self) -> _Finder:
        return _Finder(self.graph, CPU)

    def clusters(self) -> list[set[fx.Node]]:
        return [set(c.members) for c in self.finder().clusters()]


def run(module: fx.GraphModule, num_inputs: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    module.recompile()
    return module(*[torch.randn(Draft.SHAPE, generator=generator) for _ in range(num_inputs)])


def replace_all(module: fx.GraphModule, finder: _Finder, *, compiled: bool = False) -> int:
    """What `fuse` does with clusters."""
    kernels = Kernels(CPU, compiled=compiled)
    count = sum(_replace(finder, cluster, module, kernels) for cluster in finder.clusters())
    _sort(module.graph, finder.position)
    for node in reversed(list(module.graph.nodes)):
        if node.op == "call_function" and not node.users:
            module.graph.erase_node(node)
    module.graph.lint()
    return count


def test_two_clusters_that_would_wait_for_each_other() -> None:
    """With a = {1, 3}, b = {2, 4} and edges 1 → 4, 2 → 3: each is possible, both are not."""
    draft = Draft()
    x = draft.placeholder("x")
    one = draft(aten.sin.default, x, block="a")
    two = draft(aten.cos.default, x, block="b")
    three = draft(aten.add.Tensor, one, two, block="a")
    four = draft(aten.mul.Tensor, two, one, block="b")
    module = draft.finish(three, four)
    wanted = run(module, 1)
    finder = draft.finder()
    assert [set(c.members) for c in finder.clusters()] == [{one, three}, {two, four}]
    assert replace_all(module, finder) == 1
    assert all(map(torch.equal, run(module, 1), wanted))


def random_graph(seed: int) -> tuple[fx.GraphModule, _Finder]:
    """Ops, views, results of several values, and dead code, in blocks that read each other."""
    chance, draft = random.Random(seed), Draft()
    values = [draft.placeholder("x"), draft.placeholder("y")]
    for _ in range(40):
        block, kind = chance.choice("abc"), chance.randrange(9)
        one, two = (values[-1 - min(int(chance.expovariate(0.3)), len(values) - 1)] for _ in "ab")
        if kind == 0:
            made = draft(aten.mm.default, one, two, block=block)
        elif kind == 1:
            made = draft(aten.t.default, one, block=block)
        elif kind == 2:
            several = draft(aten.native_layer_norm.default, one, [8], None, None, 1e-5, block=block)
            made = draft(operator.getitem, several, 0, block=block)
            mean = draft(operator.getitem, several, 1, block=block)
            values.append(draft(aten.mul.Tensor, one, mean, block=chance.choice("abc")))
        elif kind < 6:
            made = draft(aten.add.Tensor, one, two, block=block)
        else:
            made = draft(aten.sin.default, one, block=block)
        values.append(made)
    return draft.finish(*chance.sample(values[2:], 6), values[-1]), draft.finder()


def test_any_graph_keeps_its_order_and_values() -> None:
    fused = 0
    for seed in range(30):
        module, finder = random_graph(seed)
        wanted = run(module, 2)
        fused += replace_all(module, finder)
        found = run(module, 2)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), seed
    assert fused > 30


def test_a_result_that_is_read_between() -> None:
    """A product reads the first and is read by the last: they are no one op."""
    draft = Draft()
    x = draft.placeholder("x")
    one = draft(aten.sin.default, x)
    product = draft(aten.mm.default, one, x)
    two = draft(aten.add.Tensor, one, product)
    draft.finish(two)
    assert draft.clusters() == []


def sums(*, late: bool) -> tuple[Draft, list[fx.Node], list[fx.Node]]:
    """A sum over five products; each made right before it is added (`late`), or all at first."""
    draft = Draft()
    x, y = draft.placeholder("x"), draft.placeholder("y")
    products = [draft(aten.mm.default, x, y, phase="backward") for _ in range(1 if late else 5)]
    total = products[0]
    added = []
    for k in range(1, 5):
        if late:
            products.append(draft(aten.mm.default, x, y, phase="backward"))
        total = draft(aten.add.Tensor, total, products[k], phase="backward")
        added.append(total)
    draft.finish(total)
    return draft, products, added


def test_sums_do_not_wait_for_late_pieces() -> None:
    draft, products, added = sums(late=True)
    size = clusters._bytes(products[0])
    finder = draft.finder()
    assert finder.held_bytes({*added[:2]}, 1000.0) == 2 * size
    assert finder.held_bytes({*added}, 1000.0) == 4 * size
    assert finder.held_bytes({added[3]}, 1000.0) == 0
    assert all(len(c & {*added}) < 2 for c in draft.clusters())


def test_sums_of_what_is_there_are_one_op() -> None:
    draft, _, added = sums(late=False)
    assert draft.finder().held_bytes({*added}, 1000.0) == 0
    assert draft.clusters() == [{*added}]


def cut(*, read_again: bool, products: int) -> tuple[Draft, fx.Node, fx.Node]:
    """Two ops on so many products; the first's result may have another reader behind them."""
    draft = Draft()
    x, y = draft.placeholder("x"), draft.placeholder("y")
    made = [draft(aten.mm.default, x, y) for _ in range(products)]
    first = (
        draft(aten.add.Tensor, *made) if products == 2 else draft(aten.sin.default, *made or [y])
    )
    second = draft(aten.cos.default, first)
    out = draft(aten.mm.default, second, first if read_again else x)
    draft.finish(out)
    return draft, first, second


@pytest.mark.parametrize("read_again", [False, True])
@pytest.mark.parametrize("products", [0, 1, 2])
def test_a_place_to_recompute_from_is_left(read_again: bool, products: int) -> None:
    """The second op could be run again from the first's result, which is kept for its reader. From
    one product both can be run again, and it is not larger."""
    draft, first, second = cut(read_again=read_again, products=products)
    hides = read_again and products == 2
    assert draft.clusters() == ([] if hides else [{first, second}])
    finder = draft.finder()
    a, b = (clusters._Cluster("forward", "a", [n]) for n in (first, second))
    assert finder.hides_a_cut(a, b) == hides


@pytest.mark.parametrize("kept", [False, True])
def test_no_place_to_recompute_from_needs_what_is_not_kept(kept: bool) -> None:
    """The last op reads two values; if only one has another reader, running the op again takes
    the ops before it anyway. (A norm: of the copy in float32, and of the kept inverse root.)"""
    draft = Draft()
    x, y = draft.placeholder("x"), draft.placeholder("y")
    made = [draft(aten.mm.default, x, y) for _ in range(3)]
    wide = draft(aten.addcmul.default, *made)
    root = draft(aten.sin.default, wide)
    last = draft(aten.mul.Tensor, wide, root)
    draft.finish(draft(aten.mm.default, last, root), draft(aten.mm.default, wide if kept else x, y))
    finder = draft.finder()
    a, b = (clusters._Cluster("forward", "a", n) for n in ([wide, root], [last]))
    assert finder.hides_a_cut(a, b) == kept
    assert ({wide, root, last} in draft.clusters()) != kept


def test_the_norms_and_gates_of_a_llama_are_one_op_each() -> None:
    """RMSNorm reads its input once, whose float32 copy and inverse root backward reads, too; a gate
    multiplies SiLU's result, which backward reads, by another product."""
    model, inputs, _ = captured_of("llama")
    captured = capture(model, (), inputs, dtype=torch.bfloat16)
    fuse(captured, model, Kernels(CPU, compiled=False), min_bytes=0)
    forward = [n for n in captured.graph.graph.nodes if n.meta.get("phase") == "forward"]
    left = {op_name(n) for n in forward if "members" not in n.meta}
    assert not left & {"aten.silu", "aten.rsqrt", "aten.mean", "aten.pow"}
    joined = [str(n.target.__name__) for n in forward if "members" in n.meta and not is_getitem(n)]
    layers = model.config.num_hidden_layers
    assert sum(name.startswith("fused_silu_mul") for name in joined) == layers
    assert sum("pow_mean_add" in name for name in joined) == 2 * layers + 1


def attending_llama(num_layers: int) -> tuple[nn.Module, dict[str, Any]]:
    """Without dropout, which would take the place of a fused attention kernel."""
    config = LlamaConfig(
        num_hidden_layers=num_layers,
        hidden_size=32,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        ids = torch.randint(0, 64, (2, 12))
        return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids, "use_cache": False}


def launches(graph: fx.Graph, block: str, phase: str) -> list[str]:
    """What a block calls: all ops but views."""
    ops = [n for n in graph.nodes if n.op == "call_function" and n.meta["block"] == block]
    ops = [n for n in ops if n.meta["phase"] == phase and not is_view(n) and not is_getitem(n)]
    return [op_name(n) for n in ops]


def test_what_a_llamas_layer_launches() -> None:
    """Nothing is left between products and attention but values that may be kept, and a sum that
    does not wait for its last piece."""
    model, inputs = attending_llama(3)
    captured = capture(model, (), inputs, dtype=torch.bfloat16)
    kernels = Kernels(CPU, compiled=False)
    fuse(captured, model, kernels)
    graph = captured.graph.graph
    forward = launches(graph, "model.layers.1", "forward")
    assert [name.rpartition("_")[0] if "fused" in name else name for name in forward] == [
        "fused_to_copy_pow_mean_add",
        *["aten.mm"] * 3,
        "fused_mul_neg_cat_add",  # rotary embeddings of queries
        "fused_mul_neg_cat_add",  # and of keys, for all heads
        "aten.clone",  # values, for all heads
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten.mm",
        "aten.add.Tensor",
        "fused_to_copy_pow_mean_add",
        *["aten.mm"] * 2,
        "fused_silu_mul",
        "aten.mm",
        "aten.add.Tensor",
    ]
    assert [len(n.meta["members"]) for n in fused_nodes(graph) if "neg_cat" in op_name(n)][:2] == [
        5,  # two products and their sum
        6,  # and a copy
    ]
    backward = launches(graph, "model.layers.1", "backward")
    assert [name.rpartition("_")[0] if "fused" in name else name for name in backward] == [
        *["aten.mm"] * 2,
        "aten.mul.Tensor",  # with the other factor's gradient it would take more memory at once
        "fused_mul_silu_backward",
        *["aten.mm"] * 4,
        "fused_add_mul_sum_to_copy",  # the norm
        *["aten.mm"] * 2,
        "aten._scaled_dot_product_flash_attention_for_cpu_backward",
        "fused_sum_clone",
        "fused_sum_mul_neg_slice_backward",
        "fused_mul_neg_slice_backward_add",
        *["aten.mm"] * 4,
        "aten.add.Tensor",
        *["aten.mm"] * 2,
        "fused_add_mul_sum_to_copy",
    ]


def test_llamas_layers_share_their_kernels() -> None:
    counts = []
    for num_layers in (2, 5):
        model, inputs = attending_llama(num_layers)
        kernels = Kernels(CPU, compiled=False)
        fuse(capture(model, (), inputs, dtype=torch.bfloat16), model, kernels)
        counts.append(kernels.count)
    assert counts[0] == counts[1] < 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", ["keep-all", "recompute-all"])
def test_fused_llamas_take_no_more_memory(strategy: str, dtype: torch.dtype) -> None:
    """An op has all that it reads and makes at once; a step's peak is where that is most."""
    model, inputs = attending_llama(2)
    inputs |= dict.fromkeys(("input_ids", "labels"), torch.zeros(4, 64, dtype=torch.int64))
    trained = [name for name, _ in model.named_parameters()]
    layouts = unit_layouts(model, trained, STATES)

    def peak_bytes(captured: Captured) -> int:
        workload = annotate(captured, model, layouts, STATES, HW)
        return make_plan(strategy, workload, HW, BUDGET).prediction.peak_device_bytes

    captured = capture(model, (), inputs, dtype=dtype)
    plain = peak_bytes(captured.clone())
    assert fuse(captured, model, Kernels(CPU, compiled=False))
    assert peak_bytes(captured) <= plain


def test_fused_llamas_are_exact() -> None:
    """Interpreted: also with ops in the first place of their cluster's instead of the last."""
    model, inputs = attending_llama(2)
    captured = capture(model, (), inputs)
    fuse(captured, model, Kernels(CPU, compiled=False))
    check_exact(model, (), inputs, loss=lambda output: output.loss, captured=captured)


def test_created_tensors_are_made_where_they_are_read() -> None:
    draft = Draft()
    x = draft.placeholder("x")
    ones = draft(aten.ones.default, list(Draft.SHAPE))
    more = draft(aten.t.default, ones)
    one = draft(aten.sin.default, draft(aten.add.Tensor, x, ones), block="a")
    product = draft(aten.mm.default, one, x)
    two = draft(aten.cos.default, draft(aten.add.Tensor, product, more), block="b")
    module = draft.finish(two)
    wanted = run(module, 1)
    finder = draft.finder()
    assert ones not in finder.sources
    assert all(ones not in sources for sources in finder.sources.values())
    assert replace_all(module, finder) == 2
    assert all(map(torch.equal, run(module, 1), wanted))
    assert not any(n.target is aten.ones.default for n in module.graph.nodes)


def test_created_tensors_stay_for_those_who_cannot_make_them() -> None:
    """A product reads it; a single op would save nothing then."""
    draft = Draft()
    x = draft.placeholder("x")
    ones = draft(aten.ones.default, list(Draft.SHAPE))
    sine = draft(aten.sin.default, draft(aten.mm.default, x, ones))
    single = draft(aten.mul.Tensor, draft(aten.mm.default, sine, x), ones)
    module = draft.finish(single)
    assert draft.clusters() == []
    wanted = run(module, 1)
    assert replace_all(module, draft.finder()) == 0
    assert all(map(torch.equal, run(module, 1), wanted))


def test_a_single_op_takes_in_what_is_created_for_it() -> None:
    """As the two values of an attention mask."""
    draft = Draft()
    x = draft.placeholder("x")
    mask = draft(aten.gt.Scalar, draft(aten.mm.default, x, x), 0.0, block="a")
    zero, least = (draft(aten.scalar_tensor.default, v) for v in (0.0, float("-inf")))
    wheres = [draft(aten.where.self, mask, zero, least, block=b) for b in "bc"]
    module = draft.finish(*wheres)
    assert draft.clusters() == [{wheres[0]}, {wheres[1]}]
    wanted = run(module, 1)
    assert replace_all(module, draft.finder()) == 2
    assert all(map(torch.equal, run(module, 1), wanted))
    assert not any(n.target is aten.scalar_tensor.default for n in module.graph.nodes)


@pytest.mark.parametrize(("pieces", "fusible"), [(clusters.MAX_PIECES, True), (9, False)])
def test_few_pieces_are_put_together(pieces: int, fusible: bool) -> None:
    draft = Draft()
    x = draft.placeholder("x")
    made = [draft(aten.sin.default, x) for _ in range(pieces)]
    joined = draft(aten.cat.default, made)
    repeated = draft(aten.cat.default, made[:1] * pieces)
    draft.finish(joined, repeated)
    assert clusters.is_fusible(joined, CPU) == fusible
    assert clusters.is_fusible(repeated, CPU) == fusible


class Joining(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x.sin().cos(), y.exp().tanh()]).mul(2.0).neg()


@pytest.mark.parametrize(("least", "fused"), [(0, 3), (1000, 1)])
def test_what_is_joined_is_fused_apart_if_kernels_cannot_join(least: int, fused: int) -> None:
    inputs = {"x": torch.rand(8, 8), "y": torch.rand(8, 8)}
    kernels = Kernels(CPU, compiled=False)

    def compiler(body: fx.GraphModule, name: str) -> Kernel | None:
        joins = any(n.target is aten.cat.default for n in body.graph.nodes)
        return None if joins else kernels(body, name)

    captured = capture(Joining(), (), inputs, grad=False)
    assert fuse(captured.clone(), Joining(), kernels, min_bytes=0) == 1
    assert fuse(captured, Joining(), compiler, min_bytes=least) == fused
    members = [len(n.meta["members"]) for n in fused_nodes(captured.graph.graph)]
    assert members == [2] * fused
    (found,) = captured.graph(*inputs.values())
    assert torch.equal(found, Joining()(**inputs))


@pytest.mark.parametrize("wide", [False, True])
def test_one_op_in_the_first_place_if_that_holds_less(wide: bool) -> None:
    """The sum of a product would hold it, past another, for its own reader. That can be run at
    once, if its result is no larger than the sum."""
    draft = Draft()
    x, y = draft.placeholder("x"), draft.placeholder("y")
    product = draft(aten.mm.default, x, y)
    total = draft(aten.sum.default, product)
    other = draft(aten.mm.default, y, x)
    half = draft(aten.slice.Tensor, x, 0, 0, 4)
    last = draft(aten.add.Tensor, *(half, total) if wide else (total, 1.0))
    module = draft.finish(other, last)
    finder = draft.finder()
    assert finder.held_bytes({total, last}, 1000.0) == clusters._bytes(product)
    assert finder.is_free_early({total, last}) != wide
    found = finder.clusters()
    assert [(set(c.members), c.early) for c in found] == ([] if wide else [({total, last}, True)])
    wanted = run(module, 2)
    assert replace_all(module, finder) == (not wide)
    assert all(map(torch.equal, run(module, 2), wanted))
    names = [n.name for n in module.graph.nodes]
    assert wide or names.index(f"fused_{last.name}") < names.index(other.name)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_readers_of_one_gradient_are_one_op(phase: str) -> None:
    """If they read all of it, element by element, in backward: nothing there is run again."""
    draft = Draft()
    x = draft.placeholder("x")
    product = draft(aten.mm.default, x, x, phase=phase)
    sine, cosine = (draft(t, product, phase=phase) for t in (aten.sin.default, aten.cos.default))
    total = draft(aten.sum.default, product, phase=phase)
    of_x = draft(aten.exp.default, x, phase=phase)  # an input: it is there anyway
    draft.finish(sine, cosine, total, of_x)
    assert draft.clusters() == ([{sine, cosine}] if phase == "backward" else [])


@pytest.mark.parametrize("is_kept", [False, True])
def test_readers_of_one_gradient_that_take_more_memory_at_once(is_kept: bool) -> None:
    """One's other factor is gone when the other's result is made."""
    draft = Draft()
    x = draft.placeholder("x")
    gone, product = (draft(aten.mm.default, x, x, phase="backward") for _ in "ab")
    one = draft(aten.mul.Tensor, product, gone, phase="backward")
    two = draft(aten.sin.default, product, phase="backward")
    draft.finish(one, two, *[gone] * is_kept)
    assert draft.clusters() == ([{one, two}] if is_kept else [])


class Gates(nn.Module):
    """A recurrence: gates read one product, and what they make is read in every step."""

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.eye(8)), nn.Parameter(torch.ones(8))
        self.num_steps = num_steps

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for _ in range(self.num_steps):
            z = x @ self.weight
            forget, out = (z + self.scale).sigmoid(), (z * self.scale).sigmoid()
            x = x * forget + z.sigmoid() * z.tanh() * out
            total = total + x.square().sum()
        return x.sum() + total


def test_early_places_are_no_hindrance() -> None:
    """Clusters that may only stand early are grown last: they kept others from being one."""
    counts = []
    for num_steps in (5, 15):
        model = Gates(num_steps)
        captured = capture(model, (), {"x": torch.randn(4, 8)})
        fuse(captured, model, Kernels(CPU, compiled=False))
        (block,) = {n.meta["block"] for n in fused_nodes(captured.graph.graph)}
        counts.append(len(launches(captured.graph.graph, block, "backward")))
    assert (counts[1] - counts[0]) / 10 == 5


def test_random_and_mutating_ops_are_left_alone() -> None:
    draft = Draft()
    x = draft.placeholder("x")
    nodes = [
        draft(aten.rand_like.default, x),
        draft(aten.bernoulli.default, x),
        draft(aten.mul_.Tensor, x, 2.0),
        draft(aten.mm.default, x, x),
        draft(aten.sin.default, x),
    ]
    draft.finish(*nodes)
    assert [clusters.is_fusible(n, CPU) for n in nodes] == [False] * 4 + [True]


def test_at_most_so_many_ops() -> None:
    draft = Draft()
    node = draft.placeholder("x")
    for _ in range(3 * clusters.MAX_OPS):
        node = draft(aten.sin.default, node)
    module = draft.finish(node)
    wanted = run(module, 1)
    assert [len(c) for c in draft.clusters()] == [clusters.MAX_OPS] * 3
    assert replace_all(module, draft.finder()) == 3
    assert torch.equal(run(module, 1)[0], wanted[0])


def test_results_behind_views_and_before_them() -> None:
    """A view of a result is read outside; the result itself only inside."""
    draft = Draft()
    x = draft.placeholder("x")
    one = draft(aten.sin.default, x)
    view = draft(aten.t.default, one)
    two = draft(aten.add.Tensor, view, x)
    product = draft(aten.mm.default, view, two)
    module = draft.finish(product, draft(aten.t.default, two))
    wanted = run(module, 1)
    assert replace_all(module, draft.finder()) == 1
    found = run(module, 1)
    assert all(map(torch.equal, found, wanted))
    assert len(fused_nodes(module.graph)) == 1


def test_small_clusters_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, captured = captured_of("mlp")
    captured = captured.clone()
    assert fuse(captured, model, Kernels(CPU, compiled=False), min_bytes=2**30) == 0
    assert not fused_nodes(captured.graph.graph)
    monkeypatch.setattr(clusters, "MIN_BYTES", 2**30)
    assert fuse(captured, model, Kernels(CPU, compiled=False)) == 0


# -- odd products ----------------------------------------------------------------------------------


class Odd(nn.Module):
    """A head over an odd vocabulary; with `logits`, these are returned, too."""

    def __init__(self, width: int, columns: int, *, bias: bool, logits: bool = False) -> None:
        super().__init__()
        self.start = nn.Linear(16, width)
        self.head = nn.Linear(width, columns, bias=bias)
        self.logits = logits

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.head(nn.functional.gelu(self.start(x)))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        return (loss, logits) if self.logits else loss


def odd(
    rows: int, columns: int, *, bias: bool, logits: bool = False
) -> tuple[nn.Module, dict[str, Any]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Odd(24, columns, bias=bias, logits=logits).double()
        x = torch.randn(1, rows, 16, dtype=torch.float64)
        return model, {"x": x, "y": torch.randint(0, columns, (1, rows))}


def aligned(model: nn.Module, inputs: dict[str, Any], **options: Any) -> tuple[Captured, int]:
    captured = capture(model, (), inputs, **options)
    mark_blocks(captured.graph.graph, model)
    mark_roots(captured.graph.graph)
    # `fuse` pads what it fuses with the padding, which is nothing in float64
    count = align.align(captured.graph.graph, lambda node: node.op == "call_function")
    captured.graph.graph.lint()
    captured.graph.recompile()
    return captured, count


class Strides(fx.Interpreter):
    """Runs a graph and holds every value to its planned layout."""

    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        planned = n.meta.get("val")
        if n.op == "call_function" and isinstance(planned, Tensor):
            assert found.shape == planned.shape, n
            assert found.stride() == planned.stride(), n
            assert found.untyped_storage().nbytes() == planned.untyped_storage().nbytes(), n
        return found


def check_layouts(captured: Captured, model: nn.Module, inputs: dict[str, Any]) -> None:
    named = dict(model.named_parameters())
    arguments = [
        named[r.target].detach() if r.kind == "parameter"
        else torch.ones((), dtype=torch.float64) if r.kind == "tangent"
        else list(inputs.values())[r.index]
        for r in captured.inputs
    ]  # fmt: skip
    with torch.no_grad():
        Strides(captured.graph).run(*arguments)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("columns", [100, 101])
@pytest.mark.parametrize("rows", [36, 37])
def test_odd_products_have_the_same_values(rows: int, columns: int, bias: bool) -> None:
    model, inputs = odd(rows, columns, bias=bias)
    captured, count = aligned(model, inputs)
    assert bool(count) == bool(columns % 2 or rows % 2)  # weights' gradients sum over rows
    want, tangents = run_eager(model, (), inputs, lambda loss: loss, nullcontext())
    have = run_graph(captured, model, (), inputs, tangents)
    torch.testing.assert_close(have.outputs, want.outputs, rtol=1e-13, atol=0)
    assert have.gradients.keys() == want.gradients.keys()
    for name, gradient in have.gradients.items():
        torch.testing.assert_close(gradient, want.gradients[name], rtol=1e-11, atol=1e-15)
        assert gradient.is_contiguous()


@pytest.mark.parametrize("fused", [False, True])
def test_layouts_are_as_planned_behind_odd_products(fused: bool) -> None:
    """Views follow the rows' new stride; sizes of storages are what memory plans count."""
    model, inputs = odd(37, 101, bias=True)
    captured, count = aligned(model, inputs)
    assert count
    if fused:
        captured = capture(model, (), inputs)
        fuse(captured, model, Kernels(CPU, compiled=False))
    check_layouts(captured, model, inputs)
    heads = [n for n in captured.graph.graph.nodes if n.target is align.aligned_addmm]
    assert [n.meta["val"].stride() for n in heads] == [(24, 1), (102, 1)][-len(heads) :]
    views = [u for n in heads for u in n.users if is_view(u)]
    assert {max(u.meta["val"].stride()[-2:]) for u in views} == {102}


def test_returned_logits_are_left_alone() -> None:
    model, inputs = odd(36, 101, bias=True, logits=True)
    captured, _ = aligned(model, inputs)
    assert not any(
        n.target in (align.aligned_mm, align.aligned_addmm) and 101 in n.meta["val"].shape
        for n in captured.graph.graph.nodes
        if n.meta.get("phase") == "forward"
    )
    with torch.no_grad():
        _, wanted = model(**inputs)
    _, tangents = run_eager(model, (), inputs, lambda o: o[0], nullcontext())
    have = run_graph(captured, model, (), inputs, tangents)
    assert torch.equal(have.outputs[1], wanted)
    assert have.outputs[1].is_contiguous()


def test_small_products_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(align, "MIN_ELEMENTS", 2**20)
    assert aligned(*odd(37, 101, bias=True))[1] == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(36, 40), (37, 41), (1, 9), (40, 5)])
def test_aligned_products_by_themselves(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, columns = shape
    a = torch.randint(-3, 4, (rows, 16), generator=generator).to(dtype)
    b = torch.randint(-3, 4, (16, columns), generator=generator).to(dtype)
    bias = torch.randint(-3, 4, (columns,), generator=generator).to(dtype)
    for found, wanted in (
        (align.aligned_mm(a, b), a @ b),
        (align.aligned_mm(a, b.t().contiguous().t()), a @ b),
        (align.aligned_addmm(bias, a, b), torch.addmm(bias, a, b)),
    ):
        assert torch.equal(found, wanted)  # whole numbers: no order of sums rounds
        assert found.stride(0) * found.element_size() % align.ROW_BYTES == 0
        assert found.stride(0) - columns < align.ROW_BYTES


def test_sums_of_float16_are_not_cut() -> None:
    """A part of a sum may be too large for it where the sum is not."""
    a, b = torch.zeros(8, 80, dtype=torch.float16)[:, :73], torch.zeros(73, 8, dtype=torch.float16)
    a[:, -1], b[-1] = 300.0, 300.0
    a[:, 0], b[0] = -250.0, 250.0
    assert torch.equal(align.aligned_mm(a, b), a @ b)
    assert (a @ b).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_odd_sums_are_cut_where_rows_are_aligned(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient that a head passes on sums over the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    step = align.ROW_BYTES // dtype.itemsize
    depth = 9 * step + 1

    def whole(rows: int, columns: int) -> Tensor:
        values = torch.randint(-3, 4, (rows, columns), generator=generator)
        return values.to(dtype)

    padded = torch.full((37, 10 * step), torch.nan).to(dtype)
    padded[:, :depth] = whole(37, depth)
    b = whole(depth, 5 * step)
    depths = []
    mm, addmm_ = torch.mm, Tensor.addmm_

    def counted(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        depths.append(a.shape[1])
        return mm(a, b, out=out)

    def added(self: Tensor, a: Tensor, b: Tensor) -> Tensor:
        depths.append(a.shape[1])
        return addmm_(self, a, b)

    monkeypatch.setattr(torch, "mm", counted)
    monkeypatch.setattr(Tensor, "addmm_", added)
    for a, second, parts in (
        (padded[:, :depth], b, [1, 9 * step]),
        (padded[:, :depth].contiguous(), b, [depth]),  # rows that are not aligned
        (padded[:, : 9 * step], b[: 9 * step], [9 * step]),
    ):
        found = align.aligned_mm(a, second)
        assert torch.equal(found, a @ second)
        assert found.is_contiguous()
        assert depths == parts
        depths.clear()


def test_the_gradient_that_a_head_passes_on_is_cut() -> None:
    model, inputs = odd(36, 101, bias=True)
    captured, _ = aligned(model, inputs)
    passed = [
        n
        for n in captured.graph.graph.nodes
        if n.target is align.aligned_mm
        and n.meta["phase"] == "backward"
        and n.args[0].meta["val"].shape == (36, 101)
    ]
    assert len(passed) == 1
    check_layouts(captured, model, inputs)


@pytest.mark.parametrize("strategy", ["recompute-all", "swap-all"])
def test_odd_steps_are_eager_to_rounding(
    strategy: str, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = check_kernels(monkeypatch)
    plain, inputs = odd(37, 101, bias=True)
    model, _ = odd(37, 101, bias=True)
    training = training_of("adam", model)
    reference = training_of("adam", plain)
    model = lohan_fx.compile(
        model, hw=hw, optimizer=training.optimizer, strategy=strategy, states="host", fused=True
    )
    for _ in range(3):
        losses = []
        for side, its in ((plain, reference), (model, training)):
            loss = side(**inputs)
            loss.backward()
            its.step()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=0)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
    assert made
    assert isinstance(model, LohanModule)
    assert "aligned_addmm" in str(model.graph)
    model.lohan.close()


# -- Inductor --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("vocabulary", [96, 101])
def test_compiled_steps_are_eager_to_rounding(
    vocabulary: int, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SGD: Adam makes steps of full size from gradients that are rounding only."""

    def train(model: nn.Module, training: Any) -> list[Tensor]:
        losses = []
        for _ in range(3):
            loss = model(ids, targets)
            loss.backward()
            training.step()
            losses.append(loss.detach())
        return losses

    def new() -> nn.Module:
        torch.manual_seed(0)
        return GPT(2, 2, 32, vocabulary=vocabulary, sequence=12)

    torch.manual_seed(1)
    ids, targets = torch.randint(0, vocabulary, (2, 3, 12))
    plain = new()
    wanted = train(plain, training_of("sgd", plain))
    made = check_kernels(monkeypatch, compiled=True)
    model = new()
    training = training_of("sgd", model)
    model = lohan_fx.compile(
        model, hw=hw, optimizer=training.optimizer, strategy="recompute-all", fused=True
    )
    found = train(model, training)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    assert made[0].calls > 0
    assert isinstance(model, LohanModule)
    model.lohan.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_llamas_are_eager_to_rounding() -> None:
    """Rotary embeddings, masks and norms, forward and backward."""
    model, inputs = attending_llama(2)
    captured = capture(model, (), inputs)
    made = Checked(CPU, compiled=True)
    assert fuse(captured, model, made) > made.kernels.count > 0
    assert None not in made.kernels._made.values()
    want, tangents = run_eager(model, (), inputs, lambda output: output.loss, nullcontext())
    have = run_graph(captured, model, (), inputs, tangents)
    assert made.calls >= made.kernels.count
    torch.testing.assert_close(have.outputs, want.outputs, rtol=1e-5, atol=1e-6)
    assert have.gradients.keys() == want.gradients.keys()
    for name, gradient in have.gradients.items():
        torch.testing.assert_close(gradient, want.gradients[name], rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_kernel_that_reads_nothing() -> None:
    """A causal mask is made of numbers alone."""
    draft = Draft()
    rows, columns = (draft(aten.arange.default, 8) for _ in "ab")
    below = draft(aten.le.Tensor, columns, draft(aten.unsqueeze.default, rows, 1))
    mask = draft(aten.where.self, below, *(draft(aten.scalar_tensor.default, v) for v in (0.0, -1)))
    module = draft.finish(draft(aten.mm.default, mask, draft.placeholder("x")))
    finder = draft.finder()
    (cluster,) = finder.clusters()
    assert _replace(finder, cluster, module, Kernels(CPU, compiled=True))
    (made,) = fused_nodes(module.graph)
    assert not made.args
    assert torch.equal(made.target(), torch.ones(8, 8).triu(1).neg())  # type: ignore[operator]


def compiled(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[fx.GraphModule, list[int]]:
    """A function whose clusters Inductor compiled, and how many ops each has."""
    module = make_fx(function, tracing_mode="fake")(*inputs)
    module.graph.output_node().args = ((module.graph.output_node().args[0],),)
    for node in module.graph.nodes:
        if node.op == "call_function":
            node.meta.update(phase="forward", block="a")
    mark_roots(module.graph)
    finder = _Finder(module.graph, CPU)
    replace_all(module, finder, compiled=True)
    module.recompile()
    return module, [len(n.meta["members"]) for n in fused_nodes(module.graph)]


BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("function", "members"),
    [
        # Inductor would not round these numbers to their dtype
        (lambda x: torch.full((8,), 0.1, dtype=BF16).float() + x, [2]),
        (lambda x: torch.full((8,), 1 / 3, dtype=FP16) * x + 1.0, [2]),
        (lambda x: torch.full_like(x, 0.1, dtype=BF16).float() + x, [2]),
        (lambda x: torch.arange(1000, 1008, dtype=BF16).float() + x, [2]),
        (lambda x: torch.arange(0.3, 700.25, 0.1).view(-1, 8) + x.sin() * 0.0, [3]),
        # and here there is nothing to round
        (lambda x: torch.full((8,), 0.5, dtype=BF16).float() + x, [2]),
        (lambda x: torch.arange(8).float() + x, [2]),
        (lambda x: torch.arange(8, dtype=torch.float32) + x, [1]),
        (lambda x: torch.ones_like(x, dtype=BF16).float() + x, [3]),
        (lambda x: torch.full((8,), 0.1) + x, [1]),
    ],
)
def test_created_numbers_are_rounded_to_their_dtype(
    function: Callable[[Tensor], Tensor], members: list[int]
) -> None:
    x = torch.arange(8.0)
    module, found = compiled(function, x)
    assert torch.equal(module(x)[0], function(x))
    assert found == members


@pytest.mark.filterwarnings("ignore")
def test_joined_images_keep_their_layout() -> None:
    """Also of equal pieces, for which Inductor has a way of its own."""

    def join(x: Tensor) -> Tensor:
        return (torch.cat([x, x], 1) + 1.0) * 2.0

    x = torch.randn(2, 4, 6, 5).contiguous(memory_format=torch.channels_last)
    module, members = compiled(join, x)
    assert members == [3]
    found, wanted = module(x)[0], join(x)
    assert torch.equal(found, wanted)
    assert found.stride() == wanted.stride() == (240, 1, 40, 8)


@pytest.mark.parametrize("strides", [(1, 8), (64,), None])
def test_kernels_with_another_layout_are_given_up(
    strides: tuple[int, ...] | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    original = lohan_fx._compat.inductor_kernel

    def another(*args: Any) -> Any:
        return original(*args)[0], [strides]

    monkeypatch.setattr(lohan_fx._compat, "inductor_kernel", another)
    draft = Draft()
    x = draft.placeholder("x")
    body = draft.finish(draft(aten.sin.default, draft(aten.cos.default, x)))
    assert Kernels(CPU, compiled=True)(body, "sine") is None
    assert "sine is not fused: Inductor made" in caplog.text


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, BF16, FP16])
@pytest.mark.parametrize("least", ["-inf", "min"])
def test_an_attention_mask_is_one_op_in_any_dtype(dtype: torch.dtype, least: str) -> None:
    number = torch.finfo(dtype).min if least == "min" else float("-inf")

    def mask() -> Tensor:
        below = torch.arange(8) <= torch.arange(8)[:, None]
        return torch.where(below, *(torch.scalar_tensor(v, dtype=dtype) for v in (0.0, number)))

    module, found = compiled(mask)
    assert found == [2]  # the comparison and the choice
    assert [n.op for n in module.graph.nodes] == ["call_function", "output"]
    assert torch.equal(module()[0], mask())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [101, 127, 129])
def test_products_of_padded_matrices_take_the_padding_along(
    columns: int, dtype: torch.dtype
) -> None:
    """The gradient of a head: its rows are the columns of the padded matrix."""
    generator = torch.Generator().manual_seed(0)
    step = align.PADDED_BYTES // dtype.itemsize
    stride = -(-columns // step) * step
    whole = torch.full((37, stride), torch.nan).to(dtype)
    gradient = whole[:, :columns]
    gradient.copy_(torch.randint(-3, 4, (37, columns), generator=generator))
    x = torch.randint(-3, 4, (37, 24), generator=generator).to(dtype)
    found = align.aligned_mm(gradient.t(), x)
    assert torch.equal(found, gradient.t().contiguous() @ x)
    assert found.is_contiguous()
    assert found.untyped_storage().nbytes() == stride * 24 * dtype.itemsize  # one product of all


def test_heads_gradients_are_computed_with_their_padding() -> None:
    """In the graph, too: the layout that is planned says so. (With the loss in chunks: a gradient
    that is returned as it is made is left alone.)"""
    model, inputs = odd(37, 101, bias=False)
    captured, _ = aligned(model, inputs, loss_chunk_bytes=12 * 101 * 4)
    products = [
        n
        for n in captured.graph.graph.nodes
        if n.target is align.aligned_mm and n.meta["phase"] == "backward"
    ]
    step = align.PADDED_BYTES // 8
    rows = -(-101 // step) * step
    sizes = [
        n.meta["val"].untyped_storage().nbytes() for n in products if n.meta["val"].shape[0] == 101
    ]
    assert sizes == [rows * 24 * 8] * len(sizes)
    assert sizes
    check_layouts(captured, model, inputs)
