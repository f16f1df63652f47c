"""Broken plans and broken graphs are refused, with a message that names the thing."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from lohan_fx.errors import InsufficientMemoryError, PlanError, VerificationError
from lohan_fx.passes import Rewrite
from lohan_fx.passes.base import replace_uses
from lohan_fx.passes.split import split
from lohan_fx.passes.verify import body_of, check_invariants, check_program, read_back
from lohan_fx.plan import FetchWindow, Plan, ResidualPlan, UnitPlan
from lohan_fx.planners import Choices
from lohan_fx.program import residency
from lohan_fx.runtime import ops
from tests.captured import Step, step, step_of
from tests.test_passes import HOST, KEEP, RECOMPUTE, SWAP, placing, swapping, two


def checked(rewrite: Rewrite) -> None:
    check_invariants(rewrite)
    rewrite.graph.lint()
    check_program(rewrite)


def node(rewrite: Rewrite, name: str) -> fx.Node:
    return next(n for n in rewrite.graph.nodes if n.name == name)


# -- broken plans ----------------------------------------------------------------------------------


def swap(**changes: Any) -> Plan:
    return swapping(dataclasses.replace(SWAP, **changes))


def host(**changes: Any) -> Plan:
    return placing(dataclasses.replace(HOST, **changes))


BROKEN_PLANS: dict[str, tuple[Plan, str]] = {
    "unknown op": (swap(release_after="mm_9"), "residual tanh names op 'mm_9'"),
    "no position": (swap(prefetch_before=None), "residual tanh names op None"),
    "release before a use": (swap(release_after="tanh"), "release of tanh must stand in forward"),
    "release in backward": (swap(release_after="mm_2"), "release of tanh must stand in forward"),
    "reload in forward": (swap(prefetch_before="mm_1"), "prefetch of tanh must stand in backward"),
    "reload after its use": (swap(prefetch_before="mm_3"), "prefetch of tanh .* first use"),
    "residual missing": (
        dataclasses.replace(KEEP, residuals={}),
        r"disagree on residuals \['tanh'\]",
    ),
    "residual unknown": (
        dataclasses.replace(KEEP, residuals={**KEEP.residuals, "mm": SWAP}),
        r"disagree on residuals \['mm'\]",
    ),
    "unit missing": (
        dataclasses.replace(KEEP, units={"layers.0": KEEP.units["layers.0"]}),
        r"disagree on units \['layers.1'\]",
    ),
    "window too small": (
        host(windows=HOST.windows[:1]),
        "p_layers_1_w of unit layers.1 is read at op 4 outside its windows",
    ),
    "window out of order": (
        host(windows=(FetchWindow(fetch_before="mm_1", first_use="mm", last_use="mm_1"),)),
        "window 0 of unit layers.1 is out of order",
    ),
    "emitted before it exists": (
        host(emit_after="tanh"),
        "unit layers.1 emits before gradient mm_2 exists",
    ),
    "emitted before the last read": (
        host(emit_after="mm_2"),
        "unit layers.1 emits before op 4 read it",
    ),
    "gradients gone before emission": (
        host(release_gradients_after="mm_2"),
        "unit layers.1 releases its gradients before it emits them",
    ),
    "nothing emitted": (host(emit_after=None), "unit layers.1 names op None"),
}


@pytest.mark.parametrize("name", BROKEN_PLANS)
def test_broken_plans_are_refused(name: str) -> None:
    plan, words = BROKEN_PLANS[name]
    with pytest.raises(PlanError, match=words):
        two().rewrite(plan)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x @ self.w, 0.5).exp().sum()


def dropping() -> Step:
    return step_of(Dropping(), {"x": torch.randn(6, 8)}, "dropping")


def test_a_plan_that_draws_again_is_refused() -> None:
    made = dropping()
    mask = "native_dropout_r1"
    assert mask in made.workload.residuals
    residuals = dict.fromkeys(made.workload.residuals, ResidualPlan(action="keep"))
    residuals[mask] = ResidualPlan(action="recompute", region="all")
    emit = made.workload.ops[-1].name
    plan = Plan(
        strategy="by-hand",
        workload="dropping",
        residuals=residuals,
        units={"root": UnitPlan(tier="device", emit_after=emit)},
    )
    with pytest.raises(PlanError, match=f"region all .* needs {mask}, made by ops that cannot"):
        made.rewrite(plan)


# -- broken graphs ---------------------------------------------------------------------------------


def delete_wait(rewrite: Rewrite) -> None:
    wait = node(rewrite, "wait_tanh")
    wait.replace_all_uses_with(node(rewrite, "prefetch_tanh"))
    rewrite.graph.erase_node(wait)


def read_before_wait(rewrite: Rewrite) -> None:
    view = next(u for u in node(rewrite, "wait_tanh").users if u.name.startswith("t_"))
    node(rewrite, "prefetch_tanh").append(view)
    view.replace_input_with(node(rewrite, "wait_tanh"), node(rewrite, "prefetch_tanh"))


def release_before_use(rewrite: Rewrite) -> None:
    node(rewrite, "offload_tanh").append(node(rewrite, "release_tanh"))


def use_after_release(rewrite: Rewrite) -> None:
    release, late = node(rewrite, "release_tanh"), node(rewrite, "mm_1")
    release.append(late)


def use_after_release_through_a_view(rewrite: Rewrite) -> None:
    """A view made in time, read too late."""
    tanh, release, late = (node(rewrite, n) for n in ("tanh", "release_tanh", "mm_1"))
    with rewrite.graph.inserting_after(tanh):
        view = rewrite.graph.call_function(torch.ops.aten.view.default, (tanh, [6, 4]))
    view.meta.update(tanh.meta, root=tanh)
    late.replace_input_with(tanh, view)
    release.append(late)


def read_the_original(rewrite: Rewrite) -> None:
    """Backward forgets the reload."""
    wait = node(rewrite, "wait_tanh")
    replace_uses(wait, node(rewrite, "tanh"), [u for u in wait.users if u.name == "tanh_backward"])


def reload_twice(rewrite: Rewrite) -> None:
    first = node(rewrite, "prefetch_tanh")
    with rewrite.graph.inserting_after(first):
        second = rewrite.graph.node_copy(first)
    second.meta = dict(first.meta)
    second.meta["root"] = second


def reload_before_release(rewrite: Rewrite) -> None:
    prefetch = node(rewrite, "prefetch_tanh")
    node(rewrite, "offload_tanh").append(prefetch)
    prefetch.args = (node(rewrite, "offload_tanh"), *prefetch.args[1:])


def delete_offload(rewrite: Rewrite) -> None:
    offload = node(rewrite, "offload_tanh")
    offload.replace_all_uses_with(node(rewrite, "tanh"))
    rewrite.graph.erase_node(offload)


def wrong_tier(rewrite: Rewrite) -> None:
    offload = node(rewrite, "offload_tanh")
    offload.meta["lohan"] = dataclasses.replace(offload.meta["lohan"], tier="host")


def wrong_bytes(rewrite: Rewrite) -> None:
    prefetch = node(rewrite, "prefetch_tanh")
    prefetch.meta["val"] = prefetch.meta["val"].new_empty(7, 4)


BROKEN_SWAPS: dict[str, tuple[Callable[[Rewrite], None], str]] = {
    "delete a wait": (delete_wait, "tanh is reloaded, but there is no wait of it"),
    "read before the wait": (read_before_wait, "reload of tanh is read by t_\\d without a wait"),
    "release before a use": (release_before_use, "tanh is read by mm_1 after its release"),
    "use after release": (use_after_release, "tanh is read by mm_1 after its release"),
    "use after release through a view": (
        use_after_release_through_a_view,
        "tanh is read by mm_1 after its release at release_tanh",
    ),
    "read the original": (read_the_original, "tanh is read by tanh_backward after its release"),
    "reload twice": (reload_twice, "prefetch of tanh stands twice: prefetch_tanh and prefetch_"),
    "reload before release": (
        reload_before_release,
        "tanh: prefetch_tanh stands before release_tanh",
    ),
    "delete an offload": (delete_offload, "tanh is reloaded, but there is no offload of it"),
    "wrong tier": (wrong_tier, "tier of offload tanh: plan ssd, graph host"),
    "wrong bytes": (wrong_bytes, r"births of prefetch tanh: plan .* 96\),\), graph .* 112\),\)"),
}


@pytest.mark.parametrize("name", BROKEN_SWAPS)
def test_broken_swaps_are_refused(name: str) -> None:
    breaking, words = BROKEN_SWAPS[name]
    rewrite = two().rewritten(swapping(SWAP))
    checked(rewrite)
    breaking(rewrite)
    with pytest.raises(VerificationError, match=words):
        checked(rewrite)


def test_a_region_that_draws_again_is_refused() -> None:
    rewrite = two().rewritten(swapping(RECOMPUTE))
    checked(rewrite)
    (call,) = [n for n in rewrite.graph.nodes if n.op == "call_module"]
    graph = body_of(rewrite, call).graph
    inner = next(n for n in graph.nodes if n.name == "tanh")
    inner.target = torch.ops.aten.bernoulli.default
    with pytest.raises(VerificationError, match=r"would run tanh \(aten.bernoulli\) again"):
        check_invariants(rewrite)


def test_a_region_that_runs_something_else_is_refused() -> None:
    rewrite = two().rewritten(swapping(RECOMPUTE))
    (call,) = [n for n in rewrite.graph.nodes if n.op == "call_module"]
    graph = body_of(rewrite, call).graph
    inner = next(n for n in graph.nodes if n.name == "tanh")
    first = next(iter(graph.find_nodes(op="placeholder")))
    inner.args = (first,)
    with pytest.raises(VerificationError, match="reads of compute tanh"):
        checked(rewrite)


def test_a_region_that_reads_what_was_released_is_refused() -> None:
    made = step("mlp")
    actions = {v: "swap" if v.startswith("add") else "recompute" for v in made.workload.residuals}
    choices = Choices(actions=actions, unit_tiers={u.name: "device" for u in made.layouts})  # type: ignore[arg-type]
    rewrite = made.rewritten(made.plan(choices))
    checked(rewrite)
    for call in (n for n in rewrite.graph.nodes if n.op == "call_module"):
        for source in call.all_input_nodes:
            mark = source.meta.get("lohan")
            if mark is not None and mark.kind == "wait":
                call.replace_input_with(source, rewrite.nodes[mark.name])
                with pytest.raises(VerificationError, match=f"{mark.name} is read by {call.name}"):
                    checked(rewrite)
                return
    raise AssertionError("no region reads a reload")


def test_a_parameter_read_outside_its_window_is_refused() -> None:
    rewrite = two().rewritten(placing(HOST))
    checked(rewrite)
    late, early = (node(rewrite, f"p_layers_1_w_{k}") for k in (2, 1))
    replace_uses(late, early, list(late.users))
    with pytest.raises(VerificationError, match=r"reads of compute mm_3: .*layers.1#1.*layers.1#0"):
        checked(rewrite)


def test_a_missing_fetch_is_refused() -> None:
    rewrite = two().rewritten(placing(HOST))
    for name in ("p_layers_1_w_2", "wait_unit_layers_1_1", "fetch_unit_layers_1_1"):
        found = node(rewrite, name)
        found.replace_all_uses_with(node(rewrite, "p_layers_0_w"))
        rewrite.graph.erase_node(found)
    with pytest.raises(
        VerificationError, match=r"missing: fetch_unit layers.1#1, wait_unit layers.1#1$"
    ):
        check_program(rewrite)


def test_gradients_emitted_before_they_exist_are_refused() -> None:
    rewrite = two().rewritten(KEEP)
    checked(rewrite)
    emit = node(rewrite, "emit_gradients_layers_0")
    node(rewrite, "mm_3").append(emit)
    with pytest.raises(
        VerificationError, match=r"unit layers.0 emits its gradients at .*, before mm_4 is made"
    ):
        check_invariants(rewrite)


def test_the_wrong_gradients_are_refused() -> None:
    rewrite = two().rewritten(KEEP)
    emit = node(rewrite, "emit_gradients_layers_0")
    emit.args = ([node(rewrite, "mm_2")], *emit.args[1:])
    with pytest.raises(
        VerificationError, match=r"reads of emit_gradients layers.0: .*'mm_4'.*'mm_2'"
    ):
        checked(rewrite)


def test_another_order_is_refused() -> None:
    rewrite = two().rewritten(KEEP)
    node(rewrite, "mm_2").prepend(node(rewrite, "t_4"))
    node(rewrite, "t_4").append(node(rewrite, "mm_3"))
    with pytest.raises(
        VerificationError, match=r"the plan has compute mm_2, compute mm_3.* graph compute mm_3"
    ):
        check_program(rewrite)


def test_an_op_of_ours_too_many_is_refused() -> None:
    rewrite = two().rewritten(swapping(SWAP))
    first = node(rewrite, "offload_tanh")
    with rewrite.graph.inserting_after(first):
        second = rewrite.graph.call_function(ops.offload, (node(rewrite, "tanh"), 0, 9))
    second.meta.update(first.meta)
    second.meta["lohan"] = dataclasses.replace(first.meta["lohan"], name="other", key=9)
    with pytest.raises(VerificationError, match="not in the plan: offload other"):
        check_program(rewrite)


# -- budget ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_over_budget_is_refused(name: str) -> None:
    made = step(name)
    actions = dict.fromkeys(made.workload.residuals, "keep")
    choices = Choices(actions=actions, unit_tiers={u.name: "device" for u in made.layouts})  # type: ignore[arg-type]
    rewrite = made.rewritten(made.plan(choices))
    peak = residency(check_program(rewrite)).peak_bytes
    check_program(rewrite, peak)
    with pytest.raises(InsufficientMemoryError) as caught:
        check_program(rewrite, peak - 1)
    error = caught.value
    assert (error.tier, error.need_bytes, error.have_bytes) == ("device", peak, peak - 1)
    assert error.where in {o.name for o in made.workload.ops} | set(made.workload.unit_by_name)
    assert {name for name, _ in error.at_peak} & set(made.workload.residuals)


def test_the_program_in_the_graph_has_the_planned_peak() -> None:
    """Residency of what was read back is that of the plan's program, seconds and scratch aside."""
    made = step("gpt2")
    actions = {
        v: ("keep", "swap", "recompute")[k % 3] for k, v in enumerate(made.workload.residuals)
    }
    choices = Choices(actions=actions, unit_tiers={u.name: "host" for u in made.layouts})  # type: ignore[arg-type]
    rewrite = made.rewritten(made.plan(choices))
    program = check_program(rewrite)
    again = dataclasses.replace(program, instructions=read_back(rewrite))
    assert residency(again).peak_bytes == residency(program).peak_bytes


def test_split_of_a_checked_program_is_two_graphs_without_gaps() -> None:
    """No half reads what it was not given."""
    halves = split(two().rewritten(swapping(SWAP)))
    for half in (halves.forward, halves.backward):
        assert half is not None
        half.graph.lint()
        assert not [n for n in half.graph.nodes if n.target is operator.getitem]
