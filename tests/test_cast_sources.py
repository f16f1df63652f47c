"""Casts that backward makes again: found where they should be, exact, and never more memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from transformers import LlamaConfig, LlamaForCausalLM

import lohan_fx
import lohan_fx.capture
from lohan_fx.annotate import annotate, is_view, unit_layouts
from lohan_fx.api import LohanModule
from lohan_fx.capture import Captured, capture
from lohan_fx.errors import StepError
from lohan_fx.joint_graph import is_random
from lohan_fx.planners import PlannerOptions, make_plan
from lohan_fx.program import regions_of
from lohan_fx.workload import Workload
from tests.captured import BUDGET, HW, STATES, Step, check_exact, step_of
from tests.models import VOCAB, WIDTH, make
from tests.training import Squeezed, cpu_hardware, identical, remember_captures, training_of

aten = torch.ops.aten
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NUM_LAYERS = 2


@contextmanager
def switched_off() -> Iterator[None]:
    """Captures as they were without the rewrite."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lohan_fx.capture, "save_sources_of_casts", lambda graph: None)
        yield


def widening(graph: fx.Graph, phase: str) -> list[fx.Node]:
    """Casts to a wider dtype."""
    found = graph.find_nodes(op="call_function", target=aten._to_copy.default)
    return [
        n
        for n in found
        if n.meta["phase"] == phase
        and n.meta["val"].is_floating_point()
        and n.meta["val"].itemsize > n.all_input_nodes[0].meta["val"].itemsize
    ]


def made_again(graph: fx.Graph) -> list[fx.Node]:
    """The casts of what forward made that backward makes."""
    return [
        n for n in widening(graph, "backward") if n.all_input_nodes[0].meta["phase"] == "forward"
    ]


def dead(graph: fx.Graph) -> list[fx.Node]:
    """Ops for nothing (what draws randomness has to be run)."""
    return [n for n in graph.nodes if n.op == "call_function" and not (n.users or is_random(n))]


def workload_of(captured: Captured, model: nn.Module) -> Workload:
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    return annotate(captured, model, unit_layouts(model, trained, STATES), STATES, HW)


def saved(workload: Workload) -> dict[str, int]:
    """Residual → bytes."""
    return {v: workload.values[v].num_bytes for v in workload.residuals}


# -- Llama -------------------------------------------------------------------------------------


def llama(
    num_layers: int = NUM_LAYERS, attention: str = "sdpa"
) -> tuple[nn.Module, dict[str, Any]]:
    """In bfloat16, with norms in float32."""
    config = LlamaConfig(
        num_hidden_layers=num_layers,
        hidden_size=WIDTH,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        ids = torch.randint(0, VOCAB, (2, 12))
        model: nn.Module = LlamaForCausalLM(config).bfloat16()
        return model, {"input_ids": ids, "labels": ids, "attention_mask": padding(2, 12)}


def padding(*shape: int) -> Tensor:
    """The mask of a batch whose last row is shorter. (Without one, eager mode's attention is told
    that it is causal, and a traced model's is given a mask: sums are rounded otherwise.)"""
    mask = torch.ones(shape, dtype=torch.long)
    mask[-1, -3:] = 0
    return mask


@pytest.fixture(scope="module")
def llama_step() -> Step:
    return step_of(*llama(), "llama")


def layers() -> list[str]:
    return [f"model.layers.{k}" for k in range(NUM_LAYERS)]


def block_inputs(w: Workload, block: str) -> set[str]:
    """Residuals that the block reads and others make, of parameters (masks and positions aside)."""
    ops = [op for op in w.ops[: w.num_forward_ops] if op.block == block]
    read = {v for op in ops for v in op.reads if v in w.residuals}
    return {v for v in read if w.values[v].block != block and not is_of_inputs_alone(w, v)}


def is_of_inputs_alone(w: Workload, value: str) -> bool:
    run, blocked = w.recompute_ops([value], ())
    read = {v for i in run for v in w.ops[i].reads}
    return not blocked and not any(w.values[v].kind == "parameter" for v in read)


def test_a_llamas_block_inputs_are_saved_and_not_their_wide_copies(llama_step: Step) -> None:
    w, graph = llama_step.workload, llama_step.captured.graph.graph
    wide = {n.name for n in widening(graph, "forward")}
    assert len(wide) >= 2 * NUM_LAYERS + 1
    assert not wide & set(w.residuals)
    num_bytes = 2 * 12 * WIDTH * BF16.itemsize
    for block in (*layers(), "model.norm"):
        (value,) = block_inputs(w, block)
        assert value in w.inter_block
        assert w.values[value].num_bytes == num_bytes


def test_a_llama_without_the_rewrite_saves_no_block_input() -> None:
    """What the other tests here would not see if there were nothing to rewrite."""
    with switched_off():
        made = step_of(*llama(), "llama")
    w = made.workload
    assert not any(block_inputs(w, block) for block in (*layers(), "model.norm"))
    wide = {n.name for n in widening(made.captured.graph.graph, "forward")}
    assert len(wide & set(w.residuals)) == 2 * NUM_LAYERS + 1


@pytest.mark.parametrize(
    "strategy", ["recompute-all", Squeezed("recompute-all"), Squeezed("lohan")]
)
def test_no_block_is_recomputed_from_another(llama_step: Step, strategy: Any) -> None:
    w = llama_step.workload
    plan = make_plan(strategy, w, HW, BUDGET, PlannerOptions())
    regions = regions_of(w, plan)
    assert {r.name.partition("/")[0] for r in regions} & set(layers())
    for region in regions:
        block = region.name.partition("/")[0]
        foreign = [w.ops[i] for i in region.ops if w.ops[i].block != block]
        assert all(is_of_inputs_alone(w, v) for op in foreign for v in op.writes), region
        members = {v for v in region.reads if plan.residuals.get(v) is not None}
        again = {v for v in members if plan.residuals[v].action == "recompute"}
        assert all(w.values[v].block == block or is_of_inputs_alone(w, v) for v in again), region


def test_a_cast_belongs_to_the_block_and_module_that_reads_it(llama_step: Step) -> None:
    graph = llama_step.captured.graph.graph
    again = made_again(graph)
    places = [(n.meta["block"], n.meta["module"]) for n in again]
    wanted = [
        (layer, f"{layer}.{norm}")
        for layer in layers()
        for norm in ("input_layernorm", "post_attention_layernorm")
    ]
    assert places == [*wanted, ("model.norm", "model.norm")][::-1]
    by_name = {op.name: op for op in llama_step.workload.ops}
    assert all(by_name[n.name].block == n.meta["block"] for n in again)
    assert all(user.meta["block"] == n.meta["block"] for n in again for user in n.users)


# -- exact -------------------------------------------------------------------------------------


def test_a_llama_is_exact(llama_step: Step) -> None:
    check_exact(llama_step.model, (), llama_step.kwargs, captured=llama_step.captured)


@pytest.mark.parametrize("name", ["llama", pytest.param("t5", marks=pytest.mark.slow)])
def test_dropout_and_bfloat16_are_exact(name: str) -> None:
    """Dropout in Llama's attention, and everywhere in T5; norms and softmax in float32."""
    model, inputs = make(name)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False
    inputs["attention_mask"] = padding(*inputs["input_ids"].shape)
    if name == "t5":
        inputs["decoder_attention_mask"] = padding(*inputs["labels"].shape)
    captured = check_exact(model.bfloat16(), (), inputs)
    assert len(made_again(captured.graph.graph)) >= 5
    captured.graph.graph.lint()
    assert not dead(captured.graph.graph)


@pytest.mark.parametrize("strategy", ["recompute-all", "swap-all", "lohan"])
def test_training_a_llama_is_plain_pytorchs(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember_captures(monkeypatch, "llama with casts")
    model, inputs = llama(2)
    plain = copy.deepcopy(model)
    training, other = training_of("adamw", model), training_of("adamw", plain)
    made = lohan_fx.compile(
        model,
        hw=cpu_hardware(tmp_path),
        optimizer=training.optimizer,
        strategy=Squeezed(strategy),
    )
    assert isinstance(made, LohanModule)
    for _ in range(2):
        losses = []
        for each, side in ((made, training), (plain, other)):
            loss = each(**inputs).loss
            loss.backward()
            side.step()
            losses.append(loss.detach())
        assert identical(*losses)
    found = dict(made.named_parameters())
    assert all(identical(found[key], p) for key, p in plain.named_parameters())
    assert made.plan.count("recompute" if strategy == "recompute-all" else "swap")
    made.lohan.close()


def test_a_source_that_is_written_before_backward(tmp_path: Path) -> None:
    """Never a wrong gradient: an input's cast is saved, as in plain PyTorch; a result is refused,
    for which plain PyTorch would give the right one."""
    made = compiled_toy(REWRITTEN["also returned narrow"][0], tmp_path)
    loss, h = made(torch.randn(N, N).bfloat16())
    h.add_(1)
    with pytest.raises(StepError, match="output 1 was written"):
        loss.backward()
    made.lohan.close()

    made = compiled_toy(only_cast, tmp_path, optimizer=False)
    model = Toy(only_cast, BF16)
    model.load_state_dict(made.state_dict())
    x = torch.randn(N, N).bfloat16()
    for each in (made, model):
        given = x.clone()
        loss = each(given)
        given.add_(1)
        loss.backward()
    assert identical(made.get_parameter("wide").grad, model.wide.grad)
    made.lohan.close()


def only_cast(toy: Any, h: Tensor, x: Tensor) -> Any:
    return (x.float() * toy.wide).sum()


def compiled_toy(body: Any, directory: Path, *, optimizer: bool = True) -> Any:
    model = Toy(body, BF16)
    training = training_of("sgd", model)
    hw = cpu_hardware(directory)
    return lohan_fx.compile(model, hw=hw, optimizer=training.optimizer if optimizer else None)


class Mixed(nn.Module):
    """Products in bfloat16, norms and loss in float32, as an autocast region has them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            a, b = self.first(x).chunk(2, -1)
            y = self.second(a.float().sin() * b.float().cos())
            z = self.norm(y.float()) + y
            return nn.functional.mse_loss(z.float(), x.float()) + y.float().square().mean()


def test_an_autocast_region_is_exact() -> None:
    torch.manual_seed(0)
    captured = check_exact(Mixed(), (torch.randn(6, WIDTH),))
    assert made_again(captured.graph.graph)
    assert not dead(captured.graph.graph)


# -- one cast ----------------------------------------------------------------------------------

N = 8


class Toy(nn.Module):
    """A linear layer, and what `body` does with its result `h` of shape (N, N).

    There are parameters in bfloat16 and in float32, and buffers in bfloat16.
    """

    def __init__(self, body: Callable[[Any, Tensor, Tensor], Any], dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(N, N, dtype=dtype)
        self.wide = nn.Parameter(torch.randn(N, N))
        self.narrow = nn.Parameter(torch.randn(N, N).to(dtype))
        self.register_buffer("scale", torch.randn(N, N).to(dtype))
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(self, self.linear(x), x)


def check_toy(
    body: Callable[[Any, Tensor, Tensor], Any], dtype: torch.dtype = BF16
) -> tuple[Step, Step]:
    """The step with the rewrite, exact and sound, and without."""
    torch.manual_seed(0)
    model, inputs = Toy(body, dtype), {"x": torch.randn(N, N).to(dtype)}
    made = step_of(model, inputs, "toy")
    graph = made.captured.graph.graph
    check_exact(model, (), inputs, captured=made.captured)
    graph.lint()
    assert not dead(graph)
    with switched_off():
        return made, step_of(model, inputs, "toy")


def both(a: Tensor, b: Tensor) -> Tensor:
    """A loss; backward reads the two."""
    return a.sin().sum() + b.cos().sum()


def views(toy: Any, h: Tensor, x: Tensor) -> Tensor:
    c = h.float()
    return both(c.t()[1:], c.view(-1).unsqueeze(0).expand(3, -1)) + c.tanh().sum()


def chain(toy: Any, h: Tensor, x: Tensor) -> Tensor:
    c = h.float()
    return both(c, c.double())


def part_of_a_chain(toy: Any, h: Tensor, x: Tensor) -> Tensor:
    """The rewritten wide copy is no value that backward reads anyway."""
    c = h.float()
    return both(c, c[0, :1].double())


def part_of_what_is_read(toy: Any, h: Tensor, x: Tensor) -> Tensor:
    return both(h, h[:, :2].float())


def piece_of_what_is_read(toy: Any, h: Tensor, x: Tensor) -> Tensor:
    return both(h, h.chunk(2, -1)[1].float())


def in_a_product(toy: Any, h: Tensor, x: Tensor) -> Tensor:
    """Backward has a view of its own of what it reads."""
    return (h.float() @ toy.wide).sin().sum()


REWRITTEN: dict[str, tuple[Callable[[Any, Tensor, Tensor], Any], int]] = {
    "plain": (lambda toy, h, x: h.float().sin().sum(), 1),
    "through views": (views, 1),
    "a view": (lambda toy, h, x: h.t().float().sin().sum(), 1),
    "twice": (lambda toy, h, x: both(h.float(), h.float()), 2),
    "twice, seen otherwise": (lambda toy, h, x: both(h.float(), h.float().t()), 2),
    "to two dtypes": (lambda toy, h, x: both(h.float(), h.double()), 2),
    "chain": (chain, 2),
    "part of a chain": (part_of_a_chain, 2),
    "part of what is read": (part_of_what_is_read, 1),
    "piece of what is read": (piece_of_what_is_read, 1),
    "expanded": (lambda toy, h, x: h[:, :1].expand(N, 3 * N).float().sin().sum(), 1),
    "in a product": (in_a_product, 1),
    "also returned narrow": (lambda toy, h, x: (h.float().sin().sum(), h), 1),
}


@pytest.mark.parametrize("dtype", [BF16, pytest.param(F16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", REWRITTEN)
def test_rewritten(name: str, dtype: torch.dtype) -> None:
    body, count = REWRITTEN[name]
    made, before = check_toy(body, dtype)
    graph = made.captured.graph.graph
    wide = {n.name for n in widening(graph, "forward")}
    assert not wide & set(made.workload.residuals)
    assert len(widening(before.captured.graph.graph, "backward")) == 0
    assert len(widening(graph, "backward")) == count
    assert sum(saved(made.workload).values()) < sum(saved(before.workload).values())
    for cast in widening(graph, "backward"):
        check_place(cast)


def check_place(cast: fx.Node) -> None:
    """Nothing but its views, and casts for the same op, stands between it and its first reader:
    it is not there for longer."""
    casts = widening(cast.graph, "backward")
    views, read = {cast}, set()
    for node in cast.graph.nodes:
        if views & set(node.all_input_nodes):
            (views if is_view(node) else read).add(node)
    node = cast.next
    while node not in read:
        assert is_view(node) or node in casts
        node = node.next


def returned(toy: Any, h: Tensor, x: Tensor) -> Any:
    c = h.float()
    return c.sin().sum(), c


def returned_as_a_view(toy: Any, h: Tensor, x: Tensor) -> Any:
    c = h.float()
    return c.sin().sum(), c.view(-1)


def in_pieces(toy: Any, h: Tensor, x: Tensor) -> Tensor:
    return both(*h.float().chunk(2, -1))


def parameters_piece(toy: Any, h: Tensor, x: Tensor) -> Tensor:
    """Larger in float32 than the whole parameter."""
    piece, _ = toy.narrow.split([N - 1, 1], -1)
    return h.sum() + piece.float().sin().sum()


def changed_buffer(toy: Any, h: Tensor, x: Tensor) -> Tensor:
    y = (toy.scale.float() * toy.wide).sum()
    toy.scale.add_(1)
    return y + h.sum()


def changed_input(toy: Any, h: Tensor, x: Tensor) -> Tensor:
    y = (x.float() * toy.wide).sum()
    x.add_(1)
    return y


LEFT_ALONE: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "returned": returned,
    "returned as a view": returned_as_a_view,
    "not read in backward": lambda toy, h, x: h.float().sum(),
    "parameter": lambda toy, h, x: h.sum() + toy.narrow.float().sin().sum(),
    "parameter's view": lambda toy, h, x: h.sum() + toy.narrow.t()[1:].float().sin().sum(),
    "parameter's piece": parameters_piece,
    "part of what is not read": lambda toy, h, x: h[:, :2].float().sin().sum(),
    "half of what is not read": lambda toy, h, x: h[:, : N // 2].float().sin().sum(),
    "in pieces": in_pieces,
    "narrowed": lambda toy, h, x: toy.wide.sin().bfloat16().sin().sum() + h.sum(),
    "as wide": lambda toy, h, x: h.to(F16 if h.dtype == BF16 else BF16).sin().sum(),
    "integer": lambda toy, h, x: (h.sum() + torch.arange(N).float() * toy.wide).sum(),
    "input": lambda toy, h, x: (h.sum() + x.float() * toy.wide).sum(),
    "buffer": lambda toy, h, x: (h.sum() + toy.scale.float() * toy.wide).sum(),
    "boolean": lambda toy, h, x: (h.sum() + (x > 0).float() * toy.wide).sum(),
    "buffer that the step writes": changed_buffer,
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_alone(name: str) -> None:
    made, before = check_toy(LEFT_ALONE[name])
    assert str(made.captured.graph.graph) == str(before.captured.graph.graph)


def test_an_input_that_the_step_writes_is_left_alone() -> None:
    torch.manual_seed(0)
    model, inputs = Toy(changed_input, BF16), {"x": torch.randn(N, N).bfloat16()}
    captured = capture(model, (), inputs)
    assert any(role.kind == "mutation" for role in captured.outputs)
    assert not widening(captured.graph.graph, "backward")


def test_evaluation_is_left_alone() -> None:
    model, inputs = llama(1)
    captured = capture(model, (), inputs, grad=False)
    with switched_off():
        before = capture(model, (), inputs, grad=False)
    assert widening(captured.graph.graph, "forward")
    assert str(captured.graph.graph) == str(before.graph.graph)


# -- random steps ------------------------------------------------------------------------------

Instruction = tuple[str, int, int]
"""An op, and what it reads of what has been made so far (modulo its number)."""

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "sin": torch.sin,
    "tanh": torch.tanh,
    "t": lambda a: a.transpose(0, -1),
    "flat": lambda a: a.reshape(-1),
    "part": lambda a: a[: max(1, len(a) // 2)],
    "first": lambda a: a[:1],
    "piece": lambda a: a.chunk(2)[0],
    "wide": lambda a: a.unsqueeze(0).expand(2, *a.shape),
    "bfloat16": lambda a: a.to(BF16),
    "float16": lambda a: a.to(F16),
    "float32": lambda a: a.to(F32),
    "float64": lambda a: a.to(F64),
}
CASTS = ("bfloat16", "float32", "float32", "float64", "float16")
MAX_DIMS = 4


class Random(nn.Module):
    """Ops on what others made, from a linear layer's result on; returns a loss and one value."""

    def __init__(self, program: Sequence[Instruction]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=BF16)
        self.program = program

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = [self.linear(x), x]
        for name, i, j in self.program:
            a, b = made[i % len(made)], made[j % len(made)]
            if name != "mul":
                made.append(UNARY[name](a) if a.dim() < MAX_DIMS else a.flatten())
            elif a.shape == b.shape:
                made.append(a * b)
        _, i, _ = self.program[-1]
        return sum(a.sin().double().sum() for a in made), made[i % len(made)].detach()


instructions = st.tuples(
    st.one_of(st.sampled_from(CASTS), st.sampled_from([*UNARY, "mul"])),
    st.integers(0, 15),
    st.integers(0, 15),
)


@settings(max_examples=6, deadline=None)
@given(st.lists(instructions, min_size=2, max_size=14))
def test_random_steps_are_exact_and_save_no_more(program: list[Instruction]) -> None:
    torch.manual_seed(0)
    model, inputs = Random(program), {"x": torch.randn(4, 4, dtype=BF16)}
    made = step_of(model, inputs, "random")
    graph = made.captured.graph.graph
    graph.lint()
    assert not dead(graph)
    check_exact(model, (), inputs, captured=made.captured)
    with switched_off():
        before = step_of(model, inputs, "random")
    assert sum(saved(made.workload).values()) <= sum(saved(before.workload).values())
    for cast in widening(graph, "backward"):
        check_place(cast)
