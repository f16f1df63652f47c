"""The unit optimizer against plain torch.optim, bitwise."""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from lohan_fx.errors import StepError, UnsupportedOptimizerError
from lohan_fx.runtime.initial_state import pull_initial_state
from lohan_fx.runtime.optimizer import UnitOptimizer
from lohan_fx.runtime.param_groups import snapshot_hyperparameters
from lohan_fx.runtime.supported_optimizers import SUPPORTED, check_supported
from tests.optimizers import (
    DEVICES,
    NUM_STEPS,
    Host,
    Make,
    Plain,
    assert_same,
    equal,
    maker,
    new_grads,
    new_params,
    runs,
)


def grid() -> Iterator[Any]:
    """Every supported class with its options, loop and foreach; fused where there is one."""
    common: dict[type[torch.optim.Optimizer], list[dict[str, Any]]] = {
        optim.AdamW: [{}, {"amsgrad": True, "maximize": True}, {"weight_decay": 0.0}],
        optim.Adam: [{}, {"amsgrad": True, "weight_decay": 0.1}, {"maximize": True}],
        optim.SGD: [
            {},
            {"momentum": 0.9, "dampening": 0.3, "maximize": True},
            {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        ],
        optim.RMSprop: [{}, {"momentum": 0.9, "centered": True, "weight_decay": 0.1}],
        optim.Adagrad: [{"initial_accumulator_value": 0.5}, {"lr_decay": 0.1, "maximize": True}],
        optim.Adamax: [{"weight_decay": 0.1}, {"maximize": True}],
        optim.NAdam: [{"weight_decay": 0.1}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
        optim.RAdam: [{"weight_decay": 0.1}, {"maximize": True, "betas": (0.5, 0.6)}],
        optim.Adadelta: [{"weight_decay": 0.1}, {"maximize": True}],
        optim.ASGD: [{"weight_decay": 0.1}, {"t0": 2, "maximize": True}],
        optim.Rprop: [{}, {"maximize": True, "step_sizes": (1e-3, 0.02)}],
    }
    second: dict[type[torch.optim.Optimizer], dict[str, Any]] = {
        optim.AdamW: {"lr": 0.01, "amsgrad": True},
        optim.SGD: {"lr": 0.01, "momentum": 0.5, "weight_decay": 0.2},
        optim.RMSprop: {"lr": 0.005, "centered": False},
        optim.Rprop: {"lr": 0.01},
    }
    fusible = (optim.AdamW, optim.Adam, optim.SGD, optim.Adagrad)
    for cls, variants in common.items():
        for options in variants:
            kinds: list[dict[str, Any]] = [{}, {"foreach": True}, {"foreach": False}]
            kinds += [{"fused": True}] if cls in fusible else []
            for kind in kinds:
                names = [f"{k}={v}" for k, v in {**options, **kind}.items()]
                extra = second.get(cls, {"lr": 0.01, "weight_decay": 0.3})
                yield pytest.param(
                    maker(cls, extra, lr=0.02, **options, **kind),
                    id="-".join([cls.__name__, *names]),
                )


GRID = list(grid())


def test_grid_covers_every_supported_class() -> None:
    names = {str(p.id).split("-")[0] for p in GRID}
    assert names == {cls.__name__ for cls in SUPPORTED}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", GRID)
def test_bitwise_as_plain(make: Make, device: str) -> None:
    if not runs(make, device):
        pytest.skip("no such kernel")
    plain, host = Plain(make, device), Host(make, device)
    host.adopt_state()
    # The fused SGD of torch raises when only some parameters have a momentum buffer.
    fused_sgd = isinstance(plain.optimizer, optim.SGD) and plain.optimizer.defaults["fused"]
    before = [p.detach().clone() for p in host.params]
    schedulers = [ExponentialLR(side.optimizer, 0.5) for side in (plain, host)]
    for step in range(NUM_STEPS):
        grads = new_grads(step, skip_first=not fused_sgd, device=device)
        plain.step(grads)
        host.step(grads)
        host.optimizer.step()  # the user's own object: no gradients, nothing happens
        for scheduler in schedulers:
            scheduler.step()
        assert_same(host, plain)
    assert not any(torch.equal(a, b) for a, b in zip(before, host.masters, strict=True))
    assert all(torch.equal(a, p) for a, p in zip(before, host.params, strict=True))
    assert not host.optimizer.state


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [p for p in GRID if "foreach" not in str(p.id)])
def test_starts_from_the_state_of_the_optimizer(make: Make, device: str) -> None:
    if not runs(make, device):
        pytest.skip("no such kernel")
    plain, other = Plain(make, device), Plain(make, device)
    for step in range(1, 3):
        for side in (plain, other):
            side.step(new_grads(step, device=device))
    host = Host(make, device)
    host.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
    host.adopt_state()
    host.masters = [p.detach().clone() for p in other.params]
    assert_same(host, plain)
    for step in range(3, 6):
        plain.step(new_grads(step, device=device))
        host.step(new_grads(step, device=device))
    assert_same(host, plain)


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs an accelerator")
@pytest.mark.parametrize("options", [{}, {"foreach": True}], ids=["default", "foreach"])
@pytest.mark.parametrize("cls", [optim.AdamW, optim.Adagrad, optim.ASGD, optim.Rprop])
def test_parameters_on_the_accelerator_masters_on_the_host(
    cls: Any, options: dict[str, Any]
) -> None:
    make = maker(cls, {"lr": 0.01}, lr=0.02, **options)
    plain, host = Plain(make), Host(make, "cuda", tier="cpu")
    host.adopt_state()
    for step in range(3):
        plain.step(new_grads(step))
        host.step(new_grads(step))
    assert_same(host, plain)


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs an accelerator")
@pytest.mark.parametrize("tier", DEVICES)
@pytest.mark.parametrize("fused", [None, True])
def test_learning_rate_on_the_accelerator(tier: str, fused: bool | None) -> None:
    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return optim.AdamW(params, lr=torch.tensor(0.02, device=params[0].device), fused=fused)

    plain, host = Plain(make, tier), Host(make, "cuda", tier=tier)
    for step in range(3):
        plain.step(new_grads(step, device=tier))
        host.step(new_grads(step, device=tier))
    assert_same(host, plain)


ADAMW = maker(optim.AdamW, {"lr": 0.01, "amsgrad": True}, lr=0.02)
SGD = maker(optim.SGD, {"lr": 0.01}, lr=0.02, momentum=0.9, dampening=0.1)


@pytest.mark.parametrize("make", [ADAMW, SGD], ids=["AdamW", "SGD"])
def test_resumes_from_json(make: Make) -> None:
    plain, first, second = Plain(make), Host(make), Host(make)
    for step in range(5):
        plain.step(new_grads(step))
    for step in range(2):
        first.step(new_grads(step))
    second.masters, second.state = first.masters, first.state
    for old, new in zip(first.units, second.units, strict=True):
        new.load_scalar_state(json.loads(json.dumps(old.scalar_state())))
    for step in range(2, 5):
        second.step(new_grads(step))
    assert_same(second, plain)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("make", [ADAMW, SGD], ids=["AdamW", "SGD"])
def test_nan_and_inf_pass_through(make: Make, value: float) -> None:
    plain, host = Plain(make), Host(make)
    for step in range(3):
        grads = new_grads(step)
        bad = grads[4]
        assert bad is not None
        bad[::3] = value
        plain.step(grads)
        host.step(grads)
    assert_same(host, plain)
    assert not host.masters[4][::3].isfinite().any()
    assert host.masters[4][1::3].isfinite().all()


def test_tensor_learning_rate_that_a_scheduler_writes_in_place() -> None:
    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return optim.AdamW(
            params, lr=torch.tensor(0.02), betas=(torch.tensor(0.8), torch.tensor(0.9))
        )

    plain, host = Plain(make), Host(make)
    check_supported(host.optimizer)
    schedulers = [ExponentialLR(side.optimizer, 0.5) for side in (plain, host)]
    for step in range(3):
        plain.step(new_grads(step))
        host.step(new_grads(step))
        host.optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    assert_same(host, plain)


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_snapshot_holds_the_hyperparameters(tensor_lr: bool) -> None:
    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return optim.AdamW(params, lr=torch.tensor(0.02) if tensor_lr else 0.02)

    plain, host = Plain(make), Host(make)
    snapshot = snapshot_hyperparameters(host.optimizer)
    lr = host.optimizer.param_groups[0]["lr"]
    if tensor_lr:
        lr.fill_(7.0)
    else:
        host.optimizer.param_groups[0]["lr"] = 7.0
    plain.step(new_grads(1))
    host.step(new_grads(1), snapshot)
    assert_same(host, plain)


def test_hooks_of_the_user_do_not_run() -> None:
    host = Host(ADAMW)
    calls: list[str] = []
    handles = [
        host.optimizer.register_step_pre_hook(lambda *_: calls.append("pre")),
        host.optimizer.register_step_post_hook(lambda *_: calls.append("post")),
        register_optimizer_step_post_hook(lambda *_: calls.append("global")),
    ]
    host.optimizer.step = lambda: calls.append("patched")  # type: ignore[method-assign, assignment]
    try:
        host.step(new_grads(0))
    finally:
        for handle in handles:
            handle.remove()
    assert calls == []
    assert host.scalars[0] == {"step": 1.0}


def test_groups_are_found_again_after_user_code_changed_them() -> None:
    plain, host = Plain(ADAMW), Host(ADAMW)
    for side in (plain, host):
        state = side.optimizer.state_dict()
        state["param_groups"][1]["lr"] = 0.5
        side.optimizer.load_state_dict(state)
        side.optimizer.param_groups.reverse()
        side.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    plain.step(new_grads(0))
    host.step(new_grads(0))
    assert_same(host, plain)
    host.optimizer.param_groups[0]["params"] = []
    with pytest.raises(StepError, match="parameter 1 of the unit"):
        host.step(new_grads(1))


def test_state_names_by_group() -> None:
    host = Host(ADAMW)
    unit = host.units[0]
    assert unit.state_names() == ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    assert unit.state_names(0) == ("exp_avg", "exp_avg_sq")
    assert unit.state_names(1) == ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    assert unit.scalar_names() == unit.scalar_names(2) == ("step",)
    sgd = Host(maker(optim.SGD, {"momentum": 0.9}, lr=0.1)).units[0]
    assert (sgd.state_names(0), sgd.state_names(1)) == ((), ("momentum_buffer",))
    assert sgd.scalar_names() == ()


@pytest.mark.parametrize(
    ("make", "option", "state"),
    [
        (ADAMW, {"amsgrad": True}, "max_exp_avg_sq"),
        (maker(optim.SGD, {}, lr=0.1), {"momentum": 0.5}, "momentum_buffer"),
    ],
    ids=["amsgrad", "momentum"],
)
def test_option_that_needs_more_state_is_refused_before_anything_changes(
    make: Make, option: dict[str, Any], state: str
) -> None:
    host = Host(make)
    host.step(new_grads(0))
    masters, scalars = copy.deepcopy(host.masters), host.scalars
    host.optimizer.param_groups[0].update(option)
    with pytest.raises(StepError, match=state):
        host.step(new_grads(1))
    assert all(map(torch.equal, masters, host.masters))
    assert host.scalars == scalars


@pytest.mark.parametrize("flag", ["capturable", "differentiable"])
def test_group_that_turns_unsupported_is_refused(flag: str) -> None:
    host = Host(ADAMW)
    host.step(new_grads(0))
    host.optimizer.param_groups[0][flag] = True
    with pytest.raises(UnsupportedOptimizerError, match=f"{flag}=True"):
        host.step(new_grads(1))


def test_parameter_that_moves_to_a_group_with_more_state_is_refused() -> None:
    host = Host(ADAMW)
    host.step(new_grads(0))
    first, second = host.optimizer.param_groups
    second["params"].append(first["params"].pop(0))
    with pytest.raises(StepError, match="max_exp_avg_sq"):
        host.step(new_grads(1))


def test_state_that_begins_later_begins_at_zero() -> None:
    """RMSprop made with momentum, first used without: plain torch raises KeyError."""
    make = maker(optim.RMSprop, {}, lr=0.1, momentum=0.9)
    plain, host = Plain(make), Host(make)
    for step, momentum in enumerate([0.0, 0.9]):
        for side in (plain, host):
            for group in side.optimizer.param_groups:
                group["momentum"] = momentum
        if momentum:
            for p, entry in plain.optimizer.state.items():
                entry.setdefault("momentum_buffer", torch.zeros_like(p))
        plain.step(new_grads(step))
        host.step(new_grads(step))
    assert_same(host, plain)


def test_no_view_is_held_after_a_step() -> None:
    params = [nn.Parameter(torch.ones(4))]
    unit = UnitOptimizer(optim.AdamW(params), params)
    for _ in range(2):
        buffers = {n: torch.zeros(4) for n in ("master", "grad", *unit.state_names())}
        alive = [weakref.ref(b.untyped_storage()) for b in buffers.values()]
        views = {n: b.view(4) for n, b in buffers.items()}
        unit.step([views.pop("master")], [views.pop("grad")], [views])
        del views, buffers
        assert [ref() for ref in alive] == [None] * 4


def test_momentum_switched_off_and_on_again() -> None:
    plain, host = Plain(SGD), Host(SGD)
    for step, momentum in enumerate([0.0, 0.9, 0.0, 0.8]):
        for side in (plain, host):
            for group in side.optimizer.param_groups:
                group["momentum"] = momentum
        plain.step(new_grads(step))
        host.step(new_grads(step))
        assert host.masters[0].isfinite().all()
    for i, p in enumerate(plain.params):
        assert equal(host.masters[i], p.detach())
        assert equal(host.state[i]["momentum_buffer"], plain.optimizer.state[p]["momentum_buffer"])


def test_fused_sgd_when_only_some_parameters_have_momentum() -> None:
    """Plain torch raises; here each parameter is updated as it would be alone."""

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return optim.SGD(params, lr=0.1, momentum=0.9, fused=True)

    host, params = Host(make), new_params()
    alone = [optim.SGD([p], lr=0.1, momentum=0.9, fused=True) for p in params]
    for step in range(3):
        grads = new_grads(step)
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        for optimizer in alone:
            optimizer.step()
        host.step(grads)
    assert all(equal(m, p.detach()) for m, p in zip(host.masters, params, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cls", [optim.AdamW, optim.SGD, optim.Adagrad])
def test_prefer_fused_runs_the_fused_kernel_where_there_is_one(cls: Any, device: str) -> None:
    options: dict[str, Any] = {"lr": 0.02, **({"momentum": 0.9} if cls is optim.SGD else {})}
    fused, default = maker(cls, {}, **options, fused=True), maker(cls, {}, **options)
    plain = Plain(fused if runs(fused, device) else default, device)
    host = Host(default, device, prefer_fused=True)
    host.adopt_state()
    for step in range(1, 4):
        plain.step(new_grads(step, device=device))
        host.step(new_grads(step, device=device))
    assert_same(host, plain)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (optim.AdamW, {"foreach": False}),  # the user's choice
        (optim.AdamW, {"fused": False}),
        (optim.RMSprop, {}),  # no kernel
    ],
    ids=["foreach", "fused", "RMSprop"],
)
def test_prefer_fused_does_without(cls: Any, options: dict[str, Any]) -> None:
    make = maker(cls, {}, lr=0.02, **options)
    plain, host = Plain(make), Host(make, prefer_fused=True)
    for step in range(3):
        plain.step(new_grads(step))
        host.step(new_grads(step))
    assert_same(host, plain)


def channels_last(generator: torch.Generator) -> Tensor:
    return torch.randn(2, 3, 4, 4, generator=generator).to(memory_format=torch.channels_last)


def test_memory_order_is_respected_by_fused_kernels() -> None:
    """Fused kernels of torch read memory linearly and do not check it."""
    generator = torch.Generator().manual_seed(0)
    param = nn.Parameter(channels_last(generator))
    master = param.detach().clone()
    optimizer = optim.AdamW([param], lr=0.1, fused=True)
    unit = UnitOptimizer(optimizer, [param])
    state = {n: torch.zeros_like(master) for n in unit.state_names()}
    for _ in range(2):
        param.grad = channels_last(generator)
        unit.step([master], [param.grad.contiguous()], [state])
        optimizer.step()
    assert equal(master, param.detach())
    bf16 = channels_last(generator).bfloat16()
    param.grad = bf16.float()
    unit.step_mixed([master], [bf16.contiguous()], [state], [None], scratch=torch.empty(1024))
    optimizer.step()
    assert equal(master, param.detach())
    wrong = {n: v.contiguous() for n, v in state.items()}
    with pytest.raises(ValueError, match="state exp_avg of parameter 0"):
        unit.step([master], [torch.ones_like(master)], [wrong])


def test_views_that_do_not_fit_change_nothing() -> None:
    params = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3))]
    unit = UnitOptimizer(optim.AdamW(params, lr=0.1), params)
    masters = [torch.ones(4), torch.ones(3)]
    grads = [torch.ones(4), torch.ones(3)]
    state = [{n: torch.zeros_like(m) for n in unit.state_names()} for m in masters]
    cases: list[tuple[str, Callable[[], None]]] = [
        ("gradient 1", lambda: unit.step(masters, [grads[0], torch.ones(4)], state)),
        ("gradient 1", lambda: unit.step(masters, [grads[0], torch.ones(3).double()], state)),
        (
            "exp_avg_sq .*missing",
            lambda: unit.step(masters, grads, [state[0], {"exp_avg": masters[1]}]),
        ),
        ("state exp_avg ", lambda: unit.step(masters, grads, [state[0], state[0]])),
        ("1 masters, 2 gradients", lambda: unit.step(masters[:1], grads, state)),
        ("compute copy 1", lambda: unit.step_mixed(masters, grads, state, [None, torch.ones(4)])),
        (
            "scratch has 6 elements, needs 7",
            lambda: unit.step_mixed(masters, grads, state, [None, None], scratch=torch.ones(6)),
        ),
        (
            "scratch is",
            lambda: unit.step_mixed(
                masters, grads, state, [None, None], scratch=torch.ones(2000).bfloat16()
            ),
        ),
    ]
    for message, call in cases:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(UnsupportedOptimizerError, match="sparse"):
        unit.step(masters, [grads[0], torch.ones(3).to_sparse()], state)
    assert all((m == 1).all() for m in masters)
    assert unit.scalar_state() == [None, None]
    unit.step(masters, grads, state)
    assert unit.scalar_state() == [{"step": 1.0}, {"step": 1.0}]


def test_scalar_state_of_something_else_is_refused() -> None:
    params = [nn.Parameter(torch.ones(4))]
    unit = UnitOptimizer(optim.NAdam(params), params)
    with pytest.raises(ValueError, match="of 2 parameters"):
        unit.load_scalar_state([None, None])
    with pytest.raises(ValueError, match="mu_product"):
        unit.load_scalar_state([{"step": 1.0}])


def test_parameter_outside_the_optimizer_is_refused() -> None:
    inside, outside = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(5))
    optimizer = optim.AdamW([inside])
    with pytest.raises(ValueError, match=r"parameter 1 of the unit, shape \(5,\)"):
        UnitOptimizer(optimizer, [inside, outside])
    with pytest.raises(ValueError, match="AdamW"):
        pull_initial_state(optimizer, [outside])


def test_incomplete_state_is_refused() -> None:
    params = [nn.Parameter(torch.ones(4))]
    optimizer = optim.AdamW(params)
    params[0].grad = torch.ones(4)
    optimizer.step()
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(StepError, match="max_exp_avg_sq"):
        pull_initial_state(optimizer, params)
    optimizer.param_groups[0]["amsgrad"] = False
    optimizer.state[params[0]]["exp_avg"] = torch.ones(2)
    with pytest.raises(StepError, match=r"exp_avg .* shape \(2,\)"):
        pull_initial_state(optimizer, params)
