"""Halves that call what they call directly: fewer calls, the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from lohan_fx._compat import boxed
from lohan_fx.passes.direct_calls import direct_calls
from lohan_fx.runtime import ops
from lohan_fx.runtime.ops import engines
from tests.captured import step
from tests.poison import Runner
from tests.test_passes import random_plan

aten = torch.ops.aten


def half_of(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """A function of tensors as a half: traced to ATen ops, and boxed."""
    traced = make_fx(function, tracing_mode="fake")(*inputs)
    graph = fx.Graph()
    value: Any = graph.graph_copy(traced.graph, {})
    graph.output(tuple(value) if isinstance(value, (list, tuple)) else (value,))
    return boxed(traced, graph)


def calls(half: fx.GraphModule) -> list[str]:
    """What it calls, methods of tensors with a dot."""
    return [
        f".{n.target}" if n.op == "call_method" else str(n.target)
        for n in half.graph.nodes
        if n.op.startswith("call")
    ]


def check(function: Callable[..., Any], *inputs: Tensor) -> list[str]:
    """Results, with their layouts, are the same; returns what is called."""
    half = half_of(function, *inputs)
    with torch.no_grad():
        wanted = half(list(inputs))
        direct_calls(half)
        found = half(list(inputs))
    for have, want in zip(found, wanted, strict=True):
        assert torch.equal(have, want)
        assert (have.shape, have.stride(), have.storage_offset()) == (
            want.shape,
            want.stride(),
            want.storage_offset(),
        )
    return calls(half)


X = torch.arange(24.0).view(2, 3, 4)


def test_views_are_methods() -> None:
    def function(x: Tensor) -> list[Tensor]:
        return [
            aten.view.default(x, [6, 4]),
            aten.transpose.int(x, 0, 2),
            aten.permute.default(x, [2, 0, 1]),
            aten.unsqueeze.default(x, -1),
            aten.expand.default(aten.unsqueeze.default(x, 0), [5, 2, 3, 4]),
            aten.select.int(x, 1, 2),
            aten.squeeze.dim(aten.unsqueeze.default(x, 2), 2),
            aten.t.default(aten.select.int(x, 0, 1)),
        ]

    found = check(function, X)
    assert all(name.startswith(".") for name in found), found


def test_equal_views_are_one() -> None:
    def function(x: Tensor) -> list[Tensor]:
        rows = [aten.view.default(aten.neg.default(x), [6, 4]) for _ in range(2)]
        y = aten.exp.default(x)
        return [*rows, *(aten.sin.default(aten.view.default(y, [6, 4])) for _ in range(3))]

    found = check(function, X)
    assert found.count(".view") == 3  # of two results of neg, and of one of exp


def test_a_view_of_a_view_is_one_and_transposed_twice_none() -> None:
    def function(x: Tensor) -> list[Tensor]:
        made = aten.mm.default(aten.view.default(x, [6, 4]), aten.view.default(x, [4, 6]))
        return [
            aten.view.default(aten._unsafe_view.default(made, [2, 3, 6]), [2, 3, 3, 2]),
            aten.t.default(aten.t.default(made)),
        ]

    assert check(function, X) == [".view", ".view", "aten.mm.default", ".view"]


def test_a_view_that_only_the_one_between_can_have_stays() -> None:
    """[4, 3] of a transposed tensor cannot be made from it at once."""

    def function(x: Tensor) -> Tensor:
        return aten.view.default(aten.view.default(aten.t.default(x), [3, 2, 2]), [3, 4])

    assert check(function, torch.arange(12.0).view(4, 3)) == [".t", ".view", ".view"]


def test_views_of_others_with_equal_arguments_stay_apart() -> None:
    def function(x: Tensor) -> list[Tensor]:
        return [aten.view.default(f(x), [6, 4]) for f in (aten.sin.default, aten.cos.default)]

    assert check(function, X).count(".view") == 2


def test_a_region_of_the_printed_program_stays_as_it_is() -> None:
    runner = Runner(step("llama"))
    rewrites = [
        runner.rewritten(random_plan(runner.step, 0), direct=direct)[1] for direct in (False, True)
    ]
    bodies = [
        [str(module.graph) for _, module in rewrite.module.named_children()] for rewrite in rewrites
    ]
    assert bodies[0]
    assert bodies[0] == bodies[1]


@pytest.mark.parametrize("op", list(ops.direct), ids=str)
def test_each_op_has_a_function(op: Any) -> None:
    """The dispatcher gets a token where the function returns nothing: schemas have no None."""

    class Engine:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            called.append(name)
            made = {"prefetch": X, "fetch_unit": X, "wait_unit": [X], "host_view": [X]}
            return lambda *_: made.get(name)

    called: list[str] = []
    engine = Engine()
    run = engines.add(engine)
    given: dict[str, Any] = {"Tensor": X.clone(), "int": 0, "List[Tensor]": [X.clone()]}
    given |= {"List[Optional[Tensor]]": [X.clone(), None], "List[int]": [0]}
    arguments = [run if a.name == "run" else given[str(a.type)] for a in op._schema.arguments]
    returned = op(*arguments)
    assert isinstance(returned, Tensor) or all(isinstance(t, Tensor) for t in returned)
    directly = ops.direct[op](*arguments)
    assert called == [str(op).split(".")[1]] * 2
    if directly is not None:
        assert type(directly) is type(returned)
