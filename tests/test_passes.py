"""What the passes make of a plan: printed graphs, the plan's program, and the same numbers."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from lohan_fx.annotate import annotate, is_view
from lohan_fx.capture import capture
from lohan_fx.errors import PlanError, VerificationError
from lohan_fx.footprint import cast_units
from lohan_fx.passes import PassManager, Rewrite, pipeline
from lohan_fx.passes.direct_access import DirectAccess
from lohan_fx.passes.emit_gradients import EmitGradients
from lohan_fx.passes.normalize import Normalize
from lohan_fx.passes.offload import Offload
from lohan_fx.passes.parameters import Parameters
from lohan_fx.passes.prefetch import Prefetch
from lohan_fx.passes.recompute import Recompute
from lohan_fx.passes.split import split
from lohan_fx.passes.verify import check_invariants, check_program, read_back, shown
from lohan_fx.plan import FetchWindow, Plan, ResidualPlan, UnitPlan
from lohan_fx.planners import Choices, PlannerOptions
from lohan_fx.planners.random_policy import RandomPolicy
from lohan_fx.printing import program_lines
from lohan_fx.program import lower
from tests.captured import BUDGET, HW, STATES, Step, step, step_of
from tests.models import EXAMPLES, make
from tests.poison import Runner, assert_same

GOLDEN = Path(__file__).parent / "golden" / "passes"
MIXED = dataclasses.replace(STATES, compute_dtype=torch.bfloat16)
SMALL = [name for name in EXAMPLES if name not in ("gpt2", "llama", "bert", "t5", "resnet")]


def random_plan(made: Step, seed: int) -> Plan:
    """Tiers, actions and places at random; some host units are read and written directly."""
    plan = RandomPolicy(seed=seed)(made.workload, HW, BUDGET, PlannerOptions())
    rng = random.Random(seed)
    units = dict(plan.units)
    for name, unit in units.items():
        if unit.tier == "host" and rng.random() < 0.3:
            units[name] = dataclasses.replace(unit, access="direct", windows=())
        if unit.tier == "host" and rng.random() < 0.3:
            units[name] = dataclasses.replace(
                units[name], gradients="direct", release_gradients_after=None
            )
    return dataclasses.replace(plan, units=units)


def run(rewrite: Rewrite, *passes: Any) -> Rewrite:
    PassManager(passes=passes, verify=check_invariants)(rewrite)
    return rewrite


# -- one golden graph a pass ---------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, rows: int, columns: int, *, last: bool) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(rows, columns))
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.w
        return x if self.last else x.tanh()


class Two(nn.Module):
    """Two layers; one residual, between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(8, 4, last=False), Layer(4, 2, last=True)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@cache
def two() -> Step:
    return step_of(Two(), {"x": torch.zeros(6, 8)}, "two")


@cache
def mixed_two() -> Step:
    """In bfloat16, with masters."""
    return step_of(Two(), {"x": torch.zeros(6, 8)}, "two", MIXED)


KEEP = Plan(
    strategy="by-hand",
    workload="two",
    residuals={"tanh": ResidualPlan(action="keep")},
    units={
        "layers.0": UnitPlan(tier="device", emit_after="mm_4"),
        "layers.1": UnitPlan(tier="device", emit_after="mm_3"),
    },
)
SWAP = ResidualPlan(action="swap", tier="ssd", release_after="mm_1", prefetch_before="mm_2")
RECOMPUTE = ResidualPlan(action="recompute", region="layers.0")
HOST = UnitPlan(
    tier="host",
    windows=(
        FetchWindow(fetch_before="mm", first_use="mm_1", last_use="mm_1"),
        FetchWindow(fetch_before="mm_2", first_use="mm_3", last_use="mm_3"),
    ),
    emit_after="mm_3",
    release_gradients_after="tanh_backward",
)
DIRECT = dataclasses.replace(HOST, windows=(), access="direct")
CAST = dataclasses.replace(HOST, tier="device", casts=True, release_gradients_after=None)
WRITTEN = dataclasses.replace(HOST, gradients="direct", release_gradients_after=None)


def swapping(decision: ResidualPlan) -> Plan:
    return dataclasses.replace(KEEP, residuals={"tanh": decision})


def placing(unit: UnitPlan) -> Plan:
    return dataclasses.replace(KEEP, units={**KEEP.units, "layers.1": unit})


CASES = {
    "normalize": (KEEP, (Normalize(),)),
    "recompute": (swapping(RECOMPUTE), (Normalize(), Recompute())),
    "offload": (swapping(SWAP), (Normalize(), Offload())),
    "prefetch": (swapping(SWAP), (Normalize(), Offload(), Prefetch())),
    "parameters": (placing(HOST), (Normalize(), Parameters())),
    "cast": (placing(CAST), (Normalize(), Parameters())),
    "direct_access": (placing(DIRECT), (Normalize(), Parameters(), DirectAccess())),
    "emit_gradients": (placing(HOST), (Normalize(), EmitGradients())),
    "write_gradient": (placing(WRITTEN), (Normalize(), EmitGradients())),
}

STEPS = {"cast": mixed_two}


@pytest.mark.parametrize("name", CASES)
def test_printed_graph(name: str, request: pytest.FixtureRequest) -> None:
    plan, passes = CASES[name]
    lines = list(program_lines(run(STEPS.get(name, two)().rewrite(plan), *passes)))
    assert len(lines) <= 25
    path = GOLDEN / f"{name}.txt"
    text = "\n".join(lines) + "\n"
    if request.config.getoption("--regen-golden"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", CASES)
def test_hand_made_plans_run(name: str) -> None:
    runner = Runner(STEPS.get(name, two)())
    assert_same(runner.rewritten(CASES[name][0])[0], runner.plain())


@pytest.mark.parametrize("name", ["two", "tied", "shared"])
def test_random_casts(name: str) -> None:
    """The plan's program, its numbers, and its memory: without the copies."""
    made = mixed_two() if name == "two" else step_of(*make(name), name, MIXED)
    runner = Runner(made)
    counts, static = set(), set()
    for seed in range(8):
        plan = RandomPolicy(seed)(made.workload, HW, BUDGET, PlannerOptions(states="device"))
        casts = cast_units(plan)
        copies = sum(made.workload.unit_by_name[u].compute_bytes for u in casts)
        counts.add(len(casts))
        static.add(lower(made.workload, plan).static_bytes + copies)
        check_plan(runner, plan)
    assert len(counts) > 2
    assert len(static) == 1


def test_a_pass_leaves_the_capture_alone() -> None:
    made = two()
    before = [(n.name, str(n.args)) for n in made.captured.graph.graph.nodes]
    made.rewritten(placing(HOST))
    assert before == [(n.name, str(n.args)) for n in made.captured.graph.graph.nodes]


# -- the plan's program, and its numbers -----------------------------------------------------------


def check_plan(runner: Runner, plan: Plan) -> Rewrite:
    """The graph holds the plan's program, and its halves give the unrewritten graph's results."""
    have, rewrite = runner.rewritten(plan)
    program = lower(runner.step.workload, plan)
    assert read_back(rewrite) == tuple(map(shown, program.instructions))
    assert check_program(rewrite) == program
    plain = runner.plain()
    assert_same(have, plain)
    assert_same(runner.rewritten(plan, direct=True)[0], plain)
    return rewrite


@pytest.mark.parametrize(
    "name",
    [
        *("gpt2", "llama", "resnet"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("bert", "t5")),
    ],
)
def test_random_plans_of_large_models(name: str) -> None:
    runner = Runner(step(name))
    for seed in (0, 1):
        check_plan(runner, random_plan(runner.step, seed))


@settings(max_examples=12, deadline=None)
@given(name=st.sampled_from(SMALL), seed=st.integers(0, 2**32 - 1))
def test_random_plans_of_small_models(name: str, seed: int) -> None:
    runner = Runner(step(name))
    check_plan(runner, random_plan(runner.step, seed))


class Gated(nn.Module):
    """Backward reads tuples of views; one half of a tuple dies early."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 12)
        self.b = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.a(x).chunk(2, 1)
        h = self.b(left * right.sigmoid())
        one, two, _ = h.t().split(3)
        return (one * two.exp()[:3]).sum() + h.view(-1)[::2].square().sum()


class Counting(nn.Module):
    """A buffer that forward changes and backward reads, through views, before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 3)
        self.register_buffer("n", torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * self.n.detach().clone().view(1, 3)
        with torch.no_grad():
            self.n.add_(1)
        return (h.tanh() * (self.n * 2).view(1, 3)).square().sum()


class Writing(nn.Module):
    """Changes input 0, and output 0 is the loss: a tangent of the same number."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        before = self.a(x.clone()).tanh()
        x.mul_(2.0)
        return (before * self.a(x)).sum()


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return g, y


class Straight(nn.Module):
    """A gradient is an activation, another the tangent; a third is shared by two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 3)
        self.w = nn.Parameter(torch.randn(4, 3))
        self.u = nn.Parameter(torch.randn(4, 3))
        self.v = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return Through.apply(self.a(x), self.w) + self.u + self.v


class Bare(nn.Module):
    """Backward has nothing to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.sum()


class Returning(nn.Module):
    """Returns its inputs, parameters, buffers, constants, and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 3)
        self.register_buffer("b", torch.ones(3))

    def forward(self, x: Tensor) -> Any:
        h = self.a(x).tanh()
        made = torch.tensor([1.0, 2.0, 3.0])
        loss = (h * made * self.b).exp().sum()
        return {
            "loss": loss,
            "h": h,
            "w": self.a.weight.t(),
            "x": x.t(),
            "b": self.b[:2],
            "m": made,
        }


class Choosing(nn.Module):
    """A higher-order op, whose branch draws: it must not run again."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        draw = h.square().sum() > -1
        h = torch.cond(draw, lambda h: nn.functional.dropout(h, 0.5), lambda h: h.cos(), (h,))
        return self.b(h).square().sum()


TRICKY: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "gated": (Gated, lambda: torch.randn(5, 8)),
    "counting": (Counting, lambda: torch.randn(4, 8)),
    "writing": (Writing, lambda: torch.randn(4, 8)),
    "straight": (Straight, lambda: torch.randn(4, 8)),
    "bare": (Bare, lambda: torch.randn(4, 8)),
    "returning": (Returning, lambda: torch.randn(4, 8)),
    "choosing": (Choosing, lambda: torch.randn(4, 8)),
}


@cache
def tricky(name: str) -> Step:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        build, rows = TRICKY[name]
        return step_of(build(), {"x": rows()}, name)


@pytest.mark.parametrize("name", TRICKY)
def test_plans_of_tricky_models(name: str) -> None:
    made = tricky(name)
    runner = Runner(made)
    units = [u.name for u in made.layouts]
    for tier in ("device", "host", "ssd"):
        for action in ("keep", "swap", "recompute"):
            actions = dict.fromkeys(made.workload.residuals, action)
            plan = made.plan(Choices(actions=actions, unit_tiers=dict.fromkeys(units, tier)))
            check_plan(runner, plan)
    for seed in range(6):
        check_plan(runner, random_plan(made, seed))


def test_higher_order_ops_are_not_recomputed() -> None:
    kept = [o.name for o in tricky("choosing").workload.ops if not o.recomputable]
    assert kept == ["cond", "cond_1"]


# -- the structure of what comes out ---------------------------------------------------------------


def test_backward_reads_roots_alone() -> None:
    """After `normalize`, no view of anything older than backward crosses into it."""
    for name in ("gpt2", "resnet"):
        graph = run(step(name).rewrite(random_plan(step(name), 0)), Normalize()).graph
        for node in graph.nodes:
            if node.op == "output" or node.meta["phase"] != "backward":
                continue
            for source in node.all_input_nodes:
                assert source.meta["phase"] == "backward" or not is_view(source)


def test_views_follow_their_source() -> None:
    """Roots stay true while reloads, recomputed values and fetched parameters take over."""
    rewrite = step("gpt2").rewritten(random_plan(step("gpt2"), 2))
    for node in rewrite.graph.nodes:
        if is_view(node) and "lohan" not in node.meta:
            assert node.meta["root"] in {a.meta.get("root") for a in node.all_input_nodes}


def test_parameters_of_units_off_the_device_are_no_inputs() -> None:
    made = step("bert")
    choices = Choices(
        actions=dict.fromkeys(made.workload.residuals, "keep"),
        unit_tiers={u.name: "host" for u in made.layouts},
    )
    halves = split(made.rewritten(made.plan(choices)))
    roles = {r.kind for r in (*halves.forward_inputs, *halves.backward_inputs)}
    assert "parameter" not in roles


def test_each_half_keeps_only_what_it_needs() -> None:
    made = two()
    halves = split(made.rewritten(KEEP))
    assert [(r.kind, r.target) for r in halves.forward_inputs] == [
        ("parameter", "layers.0.w"),
        ("parameter", "layers.1.w"),
        ("input", ""),
    ]
    assert [(r.kind, r.target) for r in halves.backward_inputs] == [
        ("parameter", "layers.1.w"),
        ("tangent", ""),
    ]
    assert halves.num_saved == 2  # the residual and the input
    swapped = split(made.rewritten(swapping(SWAP)))
    assert swapped.num_saved == 2  # the input and the release's token
    assert halves.backward_outputs == swapped.backward_outputs == ()


def test_evaluation_has_one_half() -> None:
    made = two()
    captured = capture(made.model, (), made.kwargs, grad=False)
    workload = annotate(captured, made.model, made.layouts, STATES, HW, name="two")
    plan = Plan(
        strategy="by-hand",
        workload="two",
        residuals={},
        units={
            "layers.0": UnitPlan(tier="device"),
            "layers.1": UnitPlan(
                tier="host",
                windows=(FetchWindow(fetch_before="mm", first_use="mm_1", last_use="mm_1"),),
            ),
        },
    )
    rewrite = Rewrite(captured=captured, workload=workload, plan=plan, layouts=made.layouts)
    run(rewrite, *pipeline())
    check_program(rewrite)
    halves = split(rewrite)
    assert halves.backward is None
    assert halves.num_saved == 0


# -- the pass manager ------------------------------------------------------------------------------


def test_a_failing_pass_is_named_with_those_before_it() -> None:
    class Broken:
        name = "broken"

        def __call__(self, rewrite: Rewrite) -> None:
            raise RuntimeError("something odd")

    seen: list[str] = []
    manager = PassManager(
        passes=(Normalize(), Offload(), Broken()), observe=lambda name, _: seen.append(name)
    )
    with pytest.raises(VerificationError, match=r"'broken' \(after normalize, offload\): .* odd"):
        manager(two().rewrite(KEEP))
    assert seen == ["normalize", "offload"]


def test_errors_about_the_plan_are_not_disguised() -> None:
    class Contradicting:
        name = "contradicting"

        def __call__(self, rewrite: Rewrite) -> None:
            raise PlanError("the plan contradicts itself")

    with pytest.raises(PlanError, match=r"^the plan contradicts itself$"):
        run(two().rewrite(KEEP), Normalize(), Contradicting())


def test_nodes_of_ours_have_telling_names() -> None:
    names = [n.name for n in two().rewritten(swapping(SWAP)).graph.nodes]
    assert {"offload_tanh", "release_tanh", "prefetch_tanh", "wait_tanh"} <= set(names)
    assert isinstance(two().rewritten(KEEP).graph, fx.Graph)
