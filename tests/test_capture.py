"""The captured joint graph: roles, outputs, exactness by itself, and one clear error."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lohan_fx._compat import storage_key, unfused_rnn
from lohan_fx.capture import capture
from lohan_fx.errors import CaptureError
from lohan_fx.joint_graph import InputRole, OutputRole, is_random, op_name
from tests.captured import check_exact, check_step, leaves, step
from tests.models import EXAMPLES, VOCAB, WIDTH, make
from tests.training import alternating

pytestmark = pytest.mark.usefixtures("seeded")


def rows() -> Tensor:
    return torch.randn(4, 8)


class Affine(nn.Module):
    """One linear layer; subclasses say what else happens."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        return self.a(x).sum()


# -- exactness -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_graph_by_itself_is_eager(name: str) -> None:
    check_step(name)


def test_the_graph_is_eager_under_autocast() -> None:
    class Model(Affine):
        def __init__(self) -> None:
            super().__init__()
            self.b = nn.Linear(3, 5)

        def forward(self, x: Tensor) -> Tensor:
            h = F.gelu(self.a(x))
            with torch.autocast("cpu", enabled=False):  # backward of this runs in float32, too
                h = self.b(h.float())
            return torch.softmax(h, 1).square().sum()

    captured = check_exact(Model(), (rows(),), context=torch.autocast("cpu", dtype=torch.bfloat16))
    made = {n.meta["val"].dtype for n in captured.graph.graph.nodes if op_name(n) == "aten.mm"}
    assert made == {torch.bfloat16, torch.float32}


@pytest.mark.parametrize(
    ("bidirectional", "layer"), alternating((False, True), (nn.LSTM, nn.GRU, nn.RNN))
)
def test_recurrent_layers_are_their_unfused_cells(
    layer: type[nn.RNNBase], bidirectional: bool
) -> None:
    """With the dropout between layers, which PyTorch's own decomposition forgets."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = layer(
                8, 5, num_layers=3, batch_first=True, dropout=0.3, bidirectional=bidirectional
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(x)[0].square().sum()

    model = Model()
    with unfused_rnn(model):  # equal to the fused kernel only by rounding
        captured = check_exact(model, (torch.randn(2, 3, 8),))
    targets = {str(n.target) for n in captured.graph.graph.nodes}
    assert not any("mkldnn" in t or "cudnn" in t for t in targets)


def test_a_saved_activation_may_be_a_gradient() -> None:
    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x.exp())
            return x * w

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return g, ctx.saved_tensors[0]

    class Model(Affine):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return Through.apply(self.a(x), self.w).sum()

    assert_owned(check_exact(Model(), (rows(),)))


def test_a_gradient_may_be_the_tangent() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.v = nn.Parameter(torch.randn(4, 8))
            self.w = nn.Parameter(torch.randn(4, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.v + self.w

    captured = check_exact(Model(), (rows(),), loss=lambda output: output.square().sum())
    assert_owned(captured)


def assert_owned(captured: Any) -> None:
    """Every gradient has memory that backward made, and no two share it."""
    output = captured.graph.graph.output_node()
    before = [n for n in captured.graph.graph.nodes if n.meta.get("phase") == "forward"]
    before += captured.graph.graph.find_nodes(op="placeholder")
    old = {storage_key(n.meta["val"]) for n in before if "val" in n.meta}
    made = [
        storage_key(node.meta["val"])
        for node, role in zip(output.args[0], captured.outputs, strict=True)
        if role.kind == "gradient"
    ]
    assert made
    assert not old & set(made)
    assert len(made) == len(set(made))


# -- roles ---------------------------------------------------------------------------------------


def test_roles_name_every_edge() -> None:
    captured = capture(Affine(), (rows(),))
    assert captured.inputs == (
        InputRole(kind="parameter", target="a.weight"),
        InputRole(kind="parameter", target="a.bias"),
        InputRole(kind="input", index=0),
        InputRole(kind="tangent", index=0),
    )
    assert captured.outputs == (
        OutputRole(kind="output", index=0),
        OutputRole(kind="gradient", target="a.weight"),
        OutputRole(kind="gradient", target="a.bias"),
    )
    names = [n.name for n in captured.graph.graph.find_nodes(op="placeholder")]
    assert names == ["p_a_weight", "p_a_bias", "input_0", "tangent_0"]


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "resnet", "tied", "shared"])
def test_parameters_are_known_by_their_full_names(name: str) -> None:
    made = step(name)
    targets = [r.target for r in made.captured.inputs if r.kind == "parameter"]
    assert len(targets) == len(set(targets))
    first = {made.captured.first_name(t) for t in targets}
    assert first == {n for n, _ in made.model.named_parameters()}


def test_results_of_tuples_are_named_after_their_op() -> None:
    names = {n.name for n in step("bert").captured.graph.graph.nodes}
    assert {"native_layer_norm_r0", "native_layer_norm_1_r2"} <= names
    assert not any(name.startswith("getitem") for name in names)


def test_forward_nodes_come_before_backward_nodes() -> None:
    for name in ("gpt2", "resnet"):
        nodes = step(name).captured.graph.graph.nodes
        phases = [n.meta["phase"] for n in nodes if n.op not in ("placeholder", "output")]
        assert phases == sorted(phases, key=lambda phase: phase == "backward")


def test_tied_parameters_have_one_gradient() -> None:
    made = step("tied")
    assert made.captured.first_name("head.weight") == "embedding.weight"
    assert made.captured.first_name("layers.1.linear.bias") == "layers.0.linear.bias"
    gradients = [r.target for r in made.captured.outputs if r.kind == "gradient"]
    assert len({made.captured.first_name(t) for t in gradients}) == len(gradients)


def test_frozen_parameters_have_none() -> None:
    made = step("frozen")
    gradients = {r.target for r in made.captured.outputs if r.kind == "gradient"}
    trained = {n for n, p in made.model.named_parameters() if p.requires_grad}
    assert gradients == trained
    assert "layers.1.linear.weight" not in gradients


def test_what_nothing_reads_is_no_input() -> None:
    made = step("unused")
    read = {r.target for r in made.captured.inputs if r.kind == "parameter"}
    assert not {"idle.linear.weight", "end.scale"} & read


def test_batch_norm_changes_its_buffers() -> None:
    captured = step("resnet").captured
    changed = {r.target for r in captured.outputs if r.kind == "mutation"}
    assert len(changed) == 3 * 10
    assert {"bn.running_mean", "bn.running_var", "bn.num_batches_tracked"} <= changed


def test_evaluation_has_no_backward() -> None:
    model, kwargs = make("resnet")
    captured = capture(model.eval(), (), kwargs, grad=False)
    assert not captured.has_backward
    assert {r.kind for r in captured.outputs} == {"output"}
    assert all(
        n.meta["phase"] == "forward" for n in captured.graph.graph.nodes if "phase" in n.meta
    )


def test_compute_dtype_is_that_of_parameters_and_inputs() -> None:
    captured = capture(*_affine_case(), dtype=torch.bfloat16)
    values = {
        n.name: n.meta["val"].dtype for n in captured.graph.graph.find_nodes(op="placeholder")
    }
    assert values.pop("b_count") == torch.int64
    assert set(values.values()) == {torch.bfloat16}


def _affine_case() -> tuple[nn.Module, tuple[Tensor]]:
    class Model(Affine):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.tensor(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x).sum() * self.count

    return Model(), (rows(),)


# -- outputs -------------------------------------------------------------------------------------


def test_auto_takes_the_loss_alone() -> None:
    for name in ("gpt2", "llama", "bert", "t5", "dataclass"):
        captured = step(name).captured
        output = captured.graph.graph.output_node().args[0]
        values = {r.index: n.meta["val"] for n, r in zip(output, captured.outputs, strict=True)}
        (index,) = captured.differentiable
        assert values[index].dim() == 0
        assert sum(r.kind == "tangent" for r in captured.inputs) == 1


def test_auto_takes_everything_where_no_output_is_a_scalar() -> None:
    assert len(step("dict").captured.differentiable) == 2


def test_all_takes_everything_that_needs_a_gradient() -> None:
    model, kwargs = make("dataclass")
    captured = capture(model, (), kwargs, outputs="all")
    assert len(captured.differentiable) == 2
    check_exact(model, (), kwargs, outputs="all", loss=lambda o: o.loss + o.logits.square().sum())


def test_outputs_by_name() -> None:
    model, kwargs = make("dict")
    check_exact(model, (), kwargs, outputs=["norm"], loss=lambda output: output["norm"].sum())
    with pytest.raises(CaptureError, match=r"\['loss'\] are not .* it has \['logits', 'norm'\]"):
        capture(model, (), kwargs, outputs=["norm", "loss"])
    with pytest.raises(CaptureError, match="'auto', 'all', or a sequence"):
        capture(model, (), kwargs, outputs="norm")


def test_nothing_to_train_is_an_error() -> None:
    model, kwargs = make("mlp")
    model.requires_grad_(False)
    with pytest.raises(CaptureError, match="no output of the model requires a gradient"):
        capture(model, (), kwargs)


class Aliases(Affine):
    """Outputs that are one memory: a tensor, views of it, views of a parameter and of an input."""

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        return {"h": h, "flat": h.view(-1), "t": h.t(), "w": self.a.weight.t(), "x": x.view(-1)}


@pytest.mark.parametrize("outputs", ["all", ["flat"], ["h", "t"], ["w"]])
def test_outputs_that_share_memory_have_their_own_gradients(outputs: Any) -> None:
    chosen = ["h", "flat", "t", "w"] if outputs == "all" else outputs

    def loss(output: Any) -> Tensor:
        return sum((k + 1.0) * output[name].exp().sum() for k, name in enumerate(chosen))  # type: ignore[return-value]

    captured = check_exact(  # gradients of several outputs are summed in another order
        Aliases(), (rows(),), outputs=outputs, loss=loss, equal=torch.allclose
    )
    nodes: Any = captured.graph.graph.output_node().args[0]
    parameter = next(iter(captured.graph.graph.find_nodes(op="placeholder"))).meta["val"]
    for node in nodes:
        assert storage_key(node.meta["val"]) != storage_key(parameter)


# -- arguments -----------------------------------------------------------------------------------


class Arguments(Affine):
    def forward(self, x: Any, *more: Any, scale: Any = 2.0, mask: Any = None, **rest: Any) -> Any:
        total = self.a(x["rows"] if isinstance(x, dict) else x).sum() * scale
        for extra in more:
            total = total + extra.sum()
        for value in rest.values():
            total = total + sum(leaf.sum() for leaf in value)
        return {"loss": total, "echo": (x, [scale, mask, 7]), "shape": total.shape}


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((rows(),), {}),
        ((), {"x": rows()}),
        (({"rows": rows()},), {"scale": 3.0}),
        ((rows(), rows(), rows()), {"mask": None}),
        ((rows(),), {"scale": torch.tensor(0.5), "mask": torch.ones(2)}),
        ((rows(),), {"rest": [rows(), rows()], "scale": 1}),
        ((rows(),), {"b": (rows(),), "a": (rows(),)}),
    ],
    ids=["args", "kwargs", "dict", "varargs", "tensors", "nested", "order"],
)
def test_any_arguments(args: Any, kwargs: Any) -> None:
    model = Arguments()
    captured = check_exact(model, args, kwargs)
    flat = (torch.tensor(1.0),) * captured.num_outputs
    output = captured.unflatten(model, flat, args, kwargs)
    assert output["echo"][0] is (args[0] if args else kwargs["x"])


def test_one_tensor_for_two_arguments_is_not_merged() -> None:
    class Model(Affine):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.a(x).sum() + (self.a(y) * 2).sum()

    x = rows()
    captured = capture(Model(), (x, x))
    assert [r.index for r in captured.inputs if r.kind == "input"] == [0, 1]
    check_exact(Model(), (x, rows()), captured=captured)


def test_input_gradients() -> None:
    captured = check_exact(Affine(), (rows().requires_grad_(),))
    assert OutputRole(kind="gradient", index=0) in captured.outputs


def test_an_input_may_be_changed() -> None:
    class Model(Affine):
        def forward(self, x: Tensor) -> Tensor:
            x.mul_(2.0)
            return self.a(x).sum()

    captured = capture(Model(), (rows(),))
    assert OutputRole(kind="mutation", index=0) in captured.outputs


# -- constants and randomness --------------------------------------------------------------------

SCALE = torch.tensor([1.0, 2.0, 3.0])


def test_constants_keep_their_values() -> None:
    class Model(Affine):
        def __init__(self) -> None:
            super().__init__()
            self.plain = torch.tensor([3.0, 1.0, 2.0])
            self.listed = [torch.tensor(0.5)]

        def forward(self, x: Tensor) -> Tensor:
            made = torch.tensor([0.5, 1.5, 2.5])
            return (self.a(x) * made * SCALE * self.plain.view(1, 3)).sum() * self.listed[0]

    check_exact(Model(), (rows(),))


def test_random_ops_are_never_dropped() -> None:
    class Model(Affine):
        def forward(self, x: Tensor) -> Tensor:
            torch.rand(3)
            F.dropout(x, 0.5)
            noise = torch.randn_like(x)
            torch.randint(0, 9, (2,))
            return self.a(x + noise).sum()

    captured = check_exact(Model(), (rows(),))
    assert sum(map(is_random, captured.graph.graph.nodes)) == 4


@pytest.mark.parametrize("probability", [0.0, 0.25])
def test_attention_is_random_only_with_dropout(probability: float) -> None:
    class Model(Affine):
        def forward(self, x: Tensor) -> Tensor:
            q = self.a(x)[None, None]
            return F.scaled_dot_product_attention(q, q, q, dropout_p=probability).sum()

    captured = check_exact(Model(), (rows(),))
    assert any(map(is_random, captured.graph.graph.nodes)) == (probability > 0)


# -- what capture leaves behind ------------------------------------------------------------------


def test_the_model_and_the_generator_stay_as_they_were() -> None:
    model, kwargs = make("resnet")
    before = {n: (t, t.clone()) for n, t in model.state_dict(keep_vars=True).items()}
    rng = torch.get_rng_state()
    config = (torch._dynamo.config.allow_rnn, torch.backends.mkldnn.enabled)
    capture(model, (), kwargs)
    after = model.state_dict(keep_vars=True)
    for name, (tensor, value) in before.items():
        assert after[name] is tensor
        assert torch.equal(tensor, value)
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(rng, torch.get_rng_state())
    assert config == (torch._dynamo.config.allow_rnn, torch.backends.mkldnn.enabled)


def test_other_compiled_functions_are_left_alone() -> None:
    compiled = 0

    def backend(graph: Any, _: Any) -> Any:
        nonlocal compiled
        compiled += 1
        return graph

    other = torch.compile(lambda x: x + 1, backend=backend)
    other(rows())
    capture(Affine(), (rows(),))
    other(rows())
    assert compiled == 1


def test_a_model_without_memory() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2, n_embd=WIDTH, n_head=4, vocab_size=VOCAB, bos_token_id=0, eos_token_id=0
    )
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
        ids = torch.empty(2, 12, dtype=torch.int64)
    captured = capture(model, (), {"input_ids": ids, "labels": ids})
    devices = {n.meta["val"].device.type for n in captured.graph.graph.find_nodes(op="placeholder")}
    assert devices == {"cpu"}
    assert all(p.device.type == "meta" for p in model.parameters())


def test_attributes_that_forward_sets_are_said(caplog: pytest.LogCaptureFixture) -> None:
    class Model(Affine):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.a(x).sum()

    with caplog.at_level(logging.WARNING, logger="lohan_fx"):
        capture(Affine(), (rows(),))
        assert not caplog.records
        capture(Model(), (rows(),))
    assert "sets attributes of the model itself" in caplog.text


def test_parametrizations_write_their_buffers_in_place() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x).sum()

    captured = check_exact(Model(), (rows(),))
    assert sum(r.kind == "mutation" for r in captured.outputs) == 2


# -- refusals ------------------------------------------------------------------------------------


class Branch(Affine):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if y.sum() > 0:  # the line that the error names
            y = y * 2
        return y.sum()


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Identity(), inner])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))


def line_of(text: str) -> str:
    with open(__file__, encoding="utf-8") as file:
        number = next(i for i, line in enumerate(file, 1) if text in line)
    return f"{__file__}:{number}"


class Item(Affine):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).sum() * x.mean().item()  # a value


class Nonzero(Affine):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)[x[:, 0] > 0].sum()  # a size


class Raises(Affine):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("my own check")


class Printing(Affine):
    def forward(self, x: Tensor) -> Tensor:
        print("hello")  # noqa: T201
        return self.a(x).sum()


class Mismatch(Affine):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x[:, :5]).sum()  # too few columns


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("inner", "line", "words"),
    [
        (Branch, "# the line that the error names", "data-dependent branching"),
        (Item, "# a value", "item returns depends on data"),
        (Nonzero, "# a size", "getitem returns depends on data"),
        (Raises, 'ValueError("my own check")', "my own check"),
        (Printing, 'print("hello")', "print"),
        (Mismatch, "# too few columns", "must have same reduction dim"),
    ],
)
def test_one_error_names_the_module_and_the_line(
    inner: type[nn.Module], line: str, words: str
) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(Outer(inner()), (rows(),))
    text = str(caught.value)
    assert text.startswith("cannot capture Outer as one graph")
    assert re.search(r"in module blocks\.1(\.a)? \(", text)
    assert line_of(line) in text
    assert words.lower() in text.lower()
    assert text.count("cannot capture") == 1
    assert len(text.splitlines()) < 12


def test_inputs_are_plain_tensors() -> None:
    with pytest.raises(CaptureError, match=r"an input is a Tensor \(torch.sparse_coo\)"):
        capture(Affine(), (rows().to_sparse(),))


def test_missing_arguments() -> None:
    with pytest.raises(CaptureError, match="missing a required argument: 'x'"):
        capture(Affine())


class WritesParameter(Affine):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.a.weight.clamp_(-0.1, 0.1)
        return self.a(x).sum()


class ReplacesBuffer(Affine):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return (self.a(x) * self.seen).sum()


class SharedBuffers(ReplacesBuffer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("view", self.seen.view(3, 1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        return self.a(x).sum() * self.view.sum()


class SharedParameters(Affine):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Parameter(self.a.weight.data)


class WritesAttribute(Affine):
    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        self.plain.add_(1)
        return (self.a(x) * self.plain).sum()


class SparseGradient(Affine):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 8, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.table(x.long().clamp(0, 8))).sum()


class Renormalized(SparseGradient):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 8, max_norm=1.0)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (WritesParameter, "parameter a.weight in place"),
        (ReplacesBuffer, r"assigns a new tensor .* \(the model itself\) \(seen\)"),
        (SharedBuffers, "buffers seen and view, which share memory"),
        (SharedParameters, r"(a.weight and again|again and a.weight) are different tensors"),
        (WritesAttribute, "writes into l_self_plain in place"),
        (SparseGradient, "sparse=True"),
        (Renormalized, "parameter table.weight in place"),
    ],
)
def test_what_would_be_wrong_silently_is_refused(model: type[nn.Module], words: str) -> None:
    made = model()
    before = {n: t.clone() for n, t in made.state_dict().items()}
    with pytest.raises(CaptureError, match=words):
        capture(made, (rows(),))
    assert all(torch.equal(t, before[n]) for n, t in made.state_dict().items())
    if isinstance(made, WritesAttribute):
        assert torch.equal(made.plain, torch.zeros(3))


def test_leaves_know_plain_dataclasses() -> None:
    model, kwargs = make("dataclass")
    assert len(leaves(model(**kwargs))) == 3
