"""What every block makes anew, made once: which values are merged, where they stand, and that steps
are those of eager mode to the bit."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import lohan_fx
import lohan_fx.capture
from lohan_fx.annotate import annotate, mark_blocks, mark_roots, unit_layouts
from lohan_fx.capture import Captured, capture
from lohan_fx.equal_values import merge_equal_values
from lohan_fx.gradient_sums import sums_in_place
from lohan_fx.hardware import HardwareProfile
from lohan_fx.joint_graph import InputRole, op_name
from lohan_fx.planners import make_plan
from tests.captured import BUDGET, HW, STATES, check_exact, run_graph
from tests.fusing import attending_llama
from tests.training import (
    Snapshot,
    Squeezed,
    assert_identical,
    remember_captures,
    step,
    training_of,
)

WIDTH = 8
aten = torch.ops.aten


pytestmark = pytest.mark.usefixtures("seeded")


def rows() -> Tensor:
    return torch.randn(WIDTH, WIDTH)


def ops(captured: Captured, target: Any, phase: str | None = "forward") -> list[fx.Node]:
    found = captured.graph.graph.find_nodes(op="call_function", target=target)
    return [n for n in found if phase in (None, n.meta["phase"])]


def marked(captured: Captured, model: nn.Module) -> list[fx.Node]:
    """The nodes of a graph that is whole, with blocks and roots."""
    graph = captured.graph.graph
    graph.lint()
    mark_blocks(graph, model)
    mark_roots(graph)
    phases = [n.meta["phase"] for n in graph.nodes if n.op not in ("placeholder", "output")]
    assert phases == sorted(phases, reverse=True), "forward comes first"
    return list(graph.nodes)


def check_storages(captured: Captured, model: nn.Module, *inputs: Tensor) -> None:
    """Views are of what they are planned to be views of, and nothing else is one, but sums in place
    of what they consume."""
    parameters = dict(model.named_parameters())
    arguments: list[Tensor] = []
    for role in captured.inputs:
        if role.kind == "parameter":
            arguments.append(parameters[role.target])
        else:
            arguments.append(inputs[role.index] if role.kind == "input" else torch.ones(()))
    marks = {n: n.meta.get("root") for n in captured.graph.graph.nodes}
    planned: dict[int, fx.Node] = {}
    kept = []

    class Shadow(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            kept.append(result)
            if sums_in_place(n):
                assert result.data_ptr() == self.env[n.args[0]].data_ptr()
            elif isinstance(result, Tensor) and n.op == "call_function":
                key = result.untyped_storage().data_ptr()
                assert planned.setdefault(key, marks[n]) is marks[n], n
            elif isinstance(result, Tensor):
                planned.setdefault(result.untyped_storage().data_ptr(), n)
            return result

    with torch.no_grad():
        Shadow(captured.graph, garbage_collect_values=False).run(*arguments)


class Net(nn.Module):
    """Blocks that all get the same condition, too; `first` makes it of the input."""

    def __init__(self, *blocks: nn.Module, first: nn.Module | None = None) -> None:
        super().__init__()
        self.start = nn.Linear(WIDTH, WIDTH)
        self.first = first or nn.Identity()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        condition = self.first(condition)
        x = self.start(x)
        for block in self.blocks:
            x = block(x, condition)
        return x.square().sum()


class Block(nn.Module):
    """A layer times something made of the condition; a function that saves its result."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.make = make

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return self.linear(x) * self.make(condition)


def net(make: Callable[[Tensor], Tensor], *, first: nn.Module | None = None) -> Net:
    return Net(*(Block(make) for _ in range(3)), first=first)


# -- masks of attention ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16]
)
@pytest.mark.parametrize("num_layers", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_layers_of_a_llama_read_one_mask(num_layers: int, dtype: torch.dtype) -> None:
    model, inputs = attending_llama(num_layers)
    captured = capture(model, (), inputs, dtype=dtype)
    nodes = marked(captured, model)
    (mask,) = ops(captured, aten.where.self, None)
    assert mask.meta["block"] == "model.embed_tokens"
    blocks = [n.meta["block"] for n in nodes if "block" in n.meta]
    layers = [f"model.layers.{k}" for k in range(num_layers)]
    assert list(dict.fromkeys(blocks)) == ["model.embed_tokens", *layers, "model.norm"]
    readers = [(n.meta["phase"], n.meta["block"]) for n in mask.users]
    wanted = [(phase, layer) for phase in ("forward", "backward") for layer in layers]
    assert sorted(readers) == sorted(wanted)
    assert all("attention" in op_name(n) for n in mask.users)


def padded_llama(dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    """Without padding, transformers makes a mask, and repeats keys, only while it is traced; and
    other kernels round otherwise."""
    model, inputs = attending_llama(3)
    model.config.use_cache = inputs.pop("use_cache")
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][1, -4:] = 0
    return model.to(dtype), inputs


@functools.cache
def eager_steps(dtype: torch.dtype) -> list[Snapshot]:
    model, inputs = padded_llama(dtype)
    training = training_of("adamw", model)
    return [step("llama", model, inputs, seed, training.step) for seed in range(3)]


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16]
)
@pytest.mark.parametrize("strategy", ["keep-all", "recompute-all", "swap-all", "lohan"])
def test_llamas_train_exactly(
    strategy: str, dtype: torch.dtype, hw: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember_captures(monkeypatch, f"padded llama, {dtype}")
    model, inputs = padded_llama(dtype)
    training = training_of("adamw", model)
    compiled = lohan_fx.compile(
        model,
        hw=hw,
        optimizer=training.optimizer,
        strategy=Squeezed(strategy),
        gradients="kept",
        fused=False,
    )
    for seed, wanted in enumerate(eager_steps(dtype)):
        found = step("llama", compiled, inputs, seed, training.step)
        assert_identical(found, wanted, gradients=True)
    masks = [op for op in compiled.lohan.program().workload.ops if op.target == "aten.where.self"]
    assert [op.block for op in masks] == ["model.embed_tokens"]
    compiled.lohan.close()


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
def test_what_one_mask_does_to_a_llamas_memory(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who keeps all holds a mask less for every layer but one. Who recomputes all holds one from
    its first reader in backward to the last, where every layer had its own: no more than that."""
    num_layers, length = 2, 64
    model, inputs = attending_llama(num_layers)
    inputs |= dict.fromkeys(("input_ids", "labels"), torch.zeros(2, length, dtype=torch.int64))
    layouts = unit_layouts(model, [name for name, _ in model.named_parameters()], STATES)
    mask_bytes = 2 * length * length * dtype.itemsize

    def peaks_bytes() -> list[int]:
        captured = capture(model, (), inputs, dtype=dtype)
        workload = annotate(captured, model, layouts, STATES, HW)
        plans = (make_plan(s, workload, HW, BUDGET) for s in ("keep-all", "recompute-all"))
        return [plan.prediction.peak_device_bytes for plan in plans]

    kept, recomputed = peaks_bytes()
    monkeypatch.setattr(lohan_fx.capture, "merge_equal_values", lambda graph: 0)
    kept_apart, recomputed_apart = peaks_bytes()
    assert kept_apart - kept == (num_layers - 1) * mask_bytes
    assert recomputed - recomputed_apart <= mask_bytes


# -- where they stand ------------------------------------------------------------------------------


def check_net(model: Net, target: Any, *, grad: bool = False) -> fx.Node:
    """Three blocks read one value: exact, with the storages that are planned. `grad`: the
    condition's gradient is wanted."""
    x, condition = rows(), rows().requires_grad_(grad)
    captured = check_exact(model, (x, condition))
    marked(captured, model)
    check_storages(captured, model, x, condition)
    (node,) = ops(captured, target)
    forward = [n.meta["block"] for n in node.users if n.meta["phase"] == "forward"]
    assert forward == ["blocks.0", "blocks.1", "blocks.2"]
    return node


def test_made_of_inputs_only_it_stands_first() -> None:
    node = check_net(net(lambda c: c.sin()), aten.sin.default)
    assert node.prev.op == "placeholder"
    assert node.meta["block"] == "start"


def test_made_of_what_a_module_makes_it_stands_behind_that() -> None:
    first = nn.Sequential(nn.Tanh())
    node = check_net(net(lambda c: c.sin(), first=first), aten.sin.default)
    assert op_name(node.prev) == "aten.tanh"
    assert node.meta["block"] == node.prev.meta["block"] == "first.0"


def test_what_parameters_have_a_part_in_is_left_alone() -> None:
    """Each block can make it again of its input; one for all would live from first to last."""

    class Model(Net):
        def forward(self, x: Tensor, condition: Tensor) -> Tensor:
            x = condition = self.blocks[0](x, condition)
            for block in self.blocks[1:]:
                x = block(x, condition)
            return x.sum()

    model = Model(Block(torch.tanh), Block(torch.sigmoid), Block(torch.sigmoid))
    captured = check_exact(model, (rows(), rows()))
    blocks = [n.meta["block"] for n in marked(captured, model) if "block" in n.meta]
    assert list(dict.fromkeys(blocks)) == ["blocks.0", "blocks.1", "blocks.2"]
    assert len(ops(captured, aten.sigmoid.default)) == 2


def test_made_of_a_constant_it_stands_behind_that() -> None:
    table = [[float(i * k) for k in range(WIDTH)] for i in range(WIDTH)]
    model = net(lambda c: torch.tensor(table[0]) + c)
    captured = check_exact(model, (rows(), rows()))
    assert len(ops(captured, aten.add.Tensor)) == 3, "three constants, for all that we know"

    class Model(Net):
        def forward(self, x: Tensor, condition: Tensor) -> Tensor:
            return super().forward(x, torch.tensor(table))

    model = Model(*(Block(torch.sin) for _ in range(3)))
    captured = check_exact(model, (rows(), rows()))
    blocks = [n.meta["block"] for n in marked(captured, model) if "block" in n.meta]
    assert list(dict.fromkeys(blocks)) == ["outer", "blocks.0", "blocks.1", "blocks.2"]
    (made,) = ops(captured, aten.sin.default)
    assert made.meta["block"] == "outer"
    assert len(made.users) == 6


def test_made_of_a_constant_itself_it_stays_where_it_is() -> None:
    """A graph made by hand: captured ones copy constants first."""
    graph = fx.Graph()

    def add(node: fx.Node, phase: str, module: str) -> fx.Node:
        node.meta.update(val=torch.empty(4), phase=phase, nn_module_stack={"": (module, nn.Module)})
        return node

    made = [add(graph.call_function(aten.ones.default, ([4],)), "forward", "L['self'].start")]
    for module in ("L['self'].blocks[0]", "L['self'].blocks[1]"):
        one = add(graph.get_attr("one"), "forward", module)
        made.append(add(graph.call_function(aten.sin.default, (one,)), "forward", module))
    readers = [graph.call_function(aten.cos.default, (node,)) for node in made]
    graph.output(tuple(add(node, "backward", "L['self']") for node in readers))
    assert merge_equal_values(graph) == 1
    names = [op_name(n) for n in graph.nodes if n.meta.get("phase") == "forward"]
    assert names == ["aten.ones", "one", "aten.sin"]
    assert made[1].meta["nn_module_stack"] == {"": ("L['self'].blocks[0]", nn.Module)}
    assert [r.args for r in readers[1:]] == [(made[1],)] * 2
    graph.lint()


def test_numbers_and_views_go_with_it() -> None:
    node = check_net(net(lambda c: torch.where(c.t() > 0, 0.5, 2.0)), aten.where.self)
    assert [op_name(n) for n in node.all_input_nodes] == [
        "aten.gt.Scalar",
        *["aten.scalar_tensor"] * 2,
    ]
    first = nn.Sequential(nn.Tanh())
    node = check_net(net(lambda c: c.t()[1:2].sin(), first=first), aten.sin.default)
    assert node.meta["block"] == "first.0"


def test_a_copied_view_is_one_of_the_copied_number() -> None:
    """The number itself has other readers, behind the copy."""

    class Model(Block):
        def forward(self, x: Tensor, condition: Tensor) -> Tensor:
            one = torch.full((), 2.0)
            value = torch.where(condition, one.expand(WIDTH, WIDTH), 0.5)
            return self.linear(x) * value + one

    class Positive(nn.Module):
        def forward(self, condition: Tensor) -> Tensor:
            return condition > 0

    model = Net(*(Model(torch.sin) for _ in range(3)), first=Positive())
    node = check_net(model, aten.where.self)
    (view,) = (n for n in node.all_input_nodes if op_name(n) == "aten.expand")
    assert view.meta["root"] is view.args[0]


def test_values_that_are_made_of_each_other_move_together() -> None:
    model = net(lambda c: c.sigmoid().exp(), first=nn.Sequential(nn.Tanh()))
    node = check_net(model, aten.exp.default, grad=True)
    assert [op_name(n) for n in (node.prev, node.prev.prev)] == ["aten.sigmoid", "aten.tanh"]
    assert node.meta["block"] == node.prev.meta["block"] == "first.0"


def test_within_one_module_nothing_moves() -> None:
    class Twice(Block):
        def forward(self, x: Tensor, condition: Tensor) -> Tensor:
            x = self.linear(x) * self.make(condition)
            return x + self.linear(x) * self.make(condition)

    model = Net(Twice(torch.sin), Twice(torch.cos))
    captured = check_exact(model, (rows(), rows()))
    marked(captured, model)
    (made,) = ops(captured, aten.sin.default)
    assert made.meta["block"] == "blocks.0"


# -- left alone ------------------------------------------------------------------------------------


class Pair(nn.Module):
    """Two values of one, in one step; subclasses say which."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(rows())

    def a(self, x: Tensor) -> Tensor:
        return x.sin()

    def b(self, x: Tensor) -> Tensor:
        return self.a(x)

    def forward(self, x: Tensor) -> Any:
        return (self.a(x) * self.w + self.b(x) * self.w).sum()


def test_a_pair_is_merged() -> None:
    captured = check_exact(Pair(), (rows(),))
    assert len(ops(captured, aten.sin.default)) == 1


def test_randomness_is_drawn_twice() -> None:
    class Dropout(Pair):
        def a(self, x: Tensor) -> Tensor:
            return torch.nn.functional.dropout(x.sin(), 0.5)

    captured = check_exact(Dropout(), (rows(),))
    assert len(ops(captured, aten.native_dropout.default)) == 2

    class Noise(Pair):
        def a(self, x: Tensor) -> Tensor:
            return torch.rand_like(x)

    captured = check_exact(Noise(), (rows(),))
    assert len(ops(captured, aten.rand_like.default)) == 2


def test_what_is_returned_is_of_its_own() -> None:
    """A caller may write into one of them; backward has read what is saved by then, or not."""

    class Model(Pair):
        def forward(self, x: Tensor) -> Any:
            a, b, c = self.a(x), self.a(x), self.a(x)
            return ((a * self.w) + (b * self.w) + (c * self.w)).sum(), a, b.view(-1)

    model, x = Model(), rows()
    captured = check_exact(model, (x,))
    assert len(ops(captured, aten.sin.default)) == 3
    compiled = lohan_fx.compile(model, hw=HW, strategy="keep-all", fused=False)
    _, a, b = compiled(x)
    a.zero_()
    assert torch.equal(b, x.sin().flatten())
    compiled.lohan.close()


def test_values_with_views_are_of_their_own() -> None:
    class Viewed(Pair):
        def forward(self, x: Tensor) -> Any:
            a, b = self.a(x), self.a(x)
            return (a * self.w + b * self.w).sum() + (b.t() + 1).square().sum()

    assert len(ops(check_exact(Viewed(), (rows(),)), aten.sin.default)) == 2

    class ReadThroughViews(Pair):
        def forward(self, x: Tensor) -> Any:
            return (self.a(x) @ self.w + self.b(x) @ self.w).sum()  # backward transposes it

    assert len(ops(check_exact(ReadThroughViews(), (rows(),)), aten.sin.default)) == 2


def test_values_with_tuples_of_views_are_of_their_own() -> None:
    """What a split returns would be planned as memory of its own, when its source has gone."""

    class Model(Pair):
        def forward(self, x: Tensor) -> Any:
            total = x.new_zeros(())
            for _ in range(2):
                value = self.a(x)
                upper, lower = value.chunk(2)
                total = total + (value * self.w).sum() + (upper + lower).sum()
            return total

    model = Model()
    captured = check_exact(model, (rows(),))
    assert len(ops(captured, aten.sin.default)) == 2
    nodes = marked(captured, model)
    assert all("root" in n.meta for n in nodes if n.target is aten.split.Tensor)


def test_what_backward_does_not_read_is_of_its_own() -> None:
    class Model(Pair):
        def forward(self, x: Tensor) -> Any:
            return (self.w + self.a(x)).sum() + (self.w + self.b(x)).sum()

    assert len(ops(check_exact(Model(), (rows(),)), aten.sin.default)) == 2


def test_results_of_several_are_of_their_own() -> None:
    class Norm(Pair):
        def a(self, x: Tensor) -> Tensor:
            return torch.nn.functional.layer_norm(x * 2, (WIDTH,), self.w[0])

    captured = check_exact(Norm(), (rows(),))
    assert len(ops(captured, aten.native_layer_norm.default)) == 2

    class Parts(Pair):
        def a(self, x: Tensor) -> Tensor:
            upper, lower = (x * 2).chunk(2)
            return torch.cat([upper * self.w[:4], lower * self.w[4:]])

    captured = check_exact(Parts(), (rows(),))
    assert len(ops(captured, aten.split.Tensor)) == 2


def test_forward_alone_is_as_it_was() -> None:
    model, x = Pair(), rows()
    with torch.no_grad():
        captured = capture(model, (x,), grad=False)
        assert len(ops(captured, aten.sin.default)) == 2
        assert torch.equal(run_graph(captured, model, (x,), {}, ()).outputs[0], model(x))


@pytest.mark.parametrize(
    ("first", "second"),
    [(1, 1.0), (1, True), (0.0, -0.0), (0, False), (2, 3), ([1, 2], [2, 1])],
)
def test_numbers_are_told_apart(first: Any, second: Any) -> None:
    """A graph made by hand: what ops do with them does not count."""
    assert merged(lambda x: [(x, first), (x, second)]) == 0
    assert merged(lambda x: [(x, first), (x, first)]) == 1


def test_options_are_told_apart() -> None:
    float64, float32 = {"dtype": torch.float64}, {"dtype": torch.float32}
    assert merged(lambda x: [(x, float64), (x, float32)]) == 0
    meta, cpu = {"device": torch.device("meta")}, {"device": torch.device("cpu")}
    assert merged(lambda x: [(x, meta), (x, cpu)]) == 0
    assert merged(lambda x: [(x, meta), (x, {})]) == 0
    assert merged(lambda x: [(x, meta | float32), (x, float32 | meta)]) == 1


def test_constants_are_told_apart_by_name() -> None:
    assert merged(lambda x: [("one",), ("two",)]) == 0
    assert merged(lambda x: [("one",), ("one",)]) == 1


def merged(expressions: Callable[[fx.Node], list[tuple[Any, ...]]]) -> int:
    """How many values are merged in a graph of ``sin(source, *rest)``, all read by backward.

    A dict at the end has keyword arguments; a source that is a string is a constant.
    """
    graph = fx.Graph()
    x = graph.placeholder("x")
    role = InputRole(kind="input", index=0)
    x.meta.update(val=torch.empty(4), phase="forward", role=role)
    made = []
    for of, *rest in expressions(x):
        kwargs = rest.pop() if rest and isinstance(rest[-1], dict) else {}
        source = graph.get_attr(of) if isinstance(of, str) else of
        source.meta.update(val=source.meta.get("val", torch.empty(4)), phase="forward")
        node = graph.call_function(aten.sin.default, (source, *rest), kwargs)
        node.meta.update(val=torch.empty(4), phase="forward")
        made.append(node)
    readers = [graph.call_function(aten.cos.default, (node,)) for node in made]
    for node in readers:
        node.meta.update(val=torch.empty(4), phase="backward")
    graph.output(tuple(readers))
    count = merge_equal_values(graph)
    assert len(graph.find_nodes(op="call_function", target=aten.sin.default)) == 2 - count
    return count


# -- modules that run twice ------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(self.linear(self.norm(x))).tanh()


class Again(nn.Module):
    """One layer, twice on the same and once on what it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.layers[0](x), self.layers[0](x)
        return (one * two + self.layers[1](two) * self.layers[0](one)).square().sum()


def test_a_module_that_runs_twice_on_the_same() -> None:
    model = Again()
    captured = check_exact(model, (rows().requires_grad_(),))
    assert len(ops(captured, aten.tanh.default)) == 4, "activations are the blocks' own"
    marked(captured, model)


# -- at random -------------------------------------------------------------------------------------


class Random(nn.Module):
    """A few blocks over a pool of values; the same seeds make the same expressions."""

    UNARY: tuple[Callable[[Tensor], Tensor], ...] = (
        torch.sin,
        torch.tanh,
        torch.exp,
        lambda x: x.t(),
        lambda x: x[:4].repeat(2, 1),
        lambda x: x.chunk(2)[1].repeat(2, 1),
        lambda x: torch.where(x > 0, 0.5, -1.0),
        lambda x: torch.where(x > 0, torch.full((), 2.0).expand(WIDTH, WIDTH), x),
        lambda x: torch.nn.functional.layer_norm(x, (WIDTH,)),
        lambda x: torch.softmax(x, -1),
        lambda x: x.double().sigmoid().float(),
        lambda x: torch.nn.functional.dropout(x, 0.3),
    )
    BINARY: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (torch.mul, torch.add, torch.mm)

    class Part(nn.Module):
        """What it does is drawn when it is made: Dynamo traces no generators of Python's."""

        def __init__(self, seed: int) -> None:
            super().__init__()
            draw = random.Random(seed)
            self.w = nn.Parameter(rows() / 3)
            self.steps = [
                (
                    draw.choice(Random.UNARY),
                    draw.randrange(k),
                    draw.choice(Random.BINARY),
                    draw.randrange(-1, k),
                )
                for k in range(3, 8)
            ]

        def forward(self, x: Tensor, given: Tensor) -> Tensor:
            pool = [x, given, given.tanh()]
            for unary, of, binary, other in self.steps:
                value = binary(unary(pool[of]), pool[other] if other >= 0 else self.w)
                pool.append(value.tanh())
            return pool[-1] * self.w + pool[-2] * given.cos()  # equal in all of them

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        seeds = [draw.randrange(100) for _ in range(2)]
        self.blocks = nn.ModuleList(self.Part(draw.choice(seeds)) for _ in range(4))
        self.returns = draw.random() < 0.5

    def forward(self, x: Tensor) -> Any:
        given = x.sin()
        last = given
        values = []
        for block in self.blocks:
            last = block(last if len(values) > 2 else given, given)
            values.append(last)
        total = torch.stack(values).square().mean()
        return (total, given, values[0]) if self.returns else total


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(k, marks=pytest.mark.slow) for k in range(2, 12))]
)
def test_steps_at_random(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    monkeypatch.setattr(
        lohan_fx.capture,
        "merge_equal_values",
        lambda graph: counts.append(merge_equal_values(graph)),
    )
    model, x = Random(seed), rows().requires_grad_()
    captured = check_exact(model, (x,))
    assert counts[0] > 0
    marked(captured, model)
    check_storages(captured, model, x)
