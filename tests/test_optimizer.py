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
from lohan_fx.runtime.initial_state import pull_initial_state, release_state
from lohan_fx.runtime.optimizer import UnitOptimizer
from lohan_fx.runtime.param_groups import Hyperparameters, snapshot_hyperparameters
from lohan_fx.runtime.supported_optimizers import SUPPORTED, check_supported
from lohan_fx.runtime.update_values import Clip

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

SHAPES = ((37,), (5, 7), (), (2, 3, 4, 4), (33,), (3, 1))
"""Odd sizes: every kernel has elements left over after its last full vector."""
UNITS = ((0, 1, 2), (3, 4, 5))
SECOND_GROUP = (1, 4, 5)
NUM_STEPS = 5
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def equal(a: Tensor, b: Tensor) -> bool:
    """Equal in shape, dtype, device and bits (NaN equals NaN)."""
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    return bool(((a == b) | (a.isnan() & b.isnan())).all()) and torch.equal(
        a.signbit(), b.signbit()
    )


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other are slow on busy machines; the results are the same."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def new_params(device: str = "cpu") -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(s, generator=generator).to(device)) for s in SHAPES]


def new_grads(step: int, *, skip_first: bool = True, device: str = "cpu") -> list[Tensor | None]:
    """Gradients of one step; parameter 3 gets none at first, parameter 1 none in between."""
    generator = torch.Generator().manual_seed(100 + step)
    grads: list[Tensor | None] = [torch.randn(s, generator=generator).to(device) for s in SHAPES]
    if step == 2:
        grads[1] = None
    if step == 0 and skip_first:
        grads[3] = None
    return grads


def maker(cls: type[torch.optim.Optimizer], second: dict[str, Any], **options: Any) -> Make:
    """Two groups: the parameters of `SECOND_GROUP` get the options `second` as well."""

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        chosen = [params[i] for i in SECOND_GROUP]
        others = [p for i, p in enumerate(params) if i not in SECOND_GROUP]
        groups: list[dict[str, Any]] = [{"params": others}, {"params": chosen, **second}]
        return cls(groups, **options)

    return make


class Host:
    """What the engine does: masters and state in storage, copied to new addresses each step."""

    def __init__(
        self, make: Make, device: str = "cpu", *, tier: str | None = None, **options: Any
    ) -> None:
        self.params = new_params(device)
        self.optimizer = make(self.params)
        self.units = [
            UnitOptimizer(self.optimizer, [self.params[i] for i in unit], **options)
            for unit in UNITS
        ]
        self.masters = [p.detach().to(tier or device, copy=True) for p in self.params]
        self.state: list[dict[str, Tensor]] = [{} for _ in self.params]
        for unit, indices in zip(self.units, UNITS, strict=True):
            for k, i in enumerate(indices):
                # Nothing may read state before the first update.
                self.state[i] = {
                    n: torch.full_like(self.masters[i], torch.nan) for n in unit.state_names(k)
                }
        self.addresses = 0

    def adopt_state(self) -> None:
        """Move the state of the user's optimizer into storage."""
        for unit, indices in zip(self.units, UNITS, strict=True):
            params = [self.params[i] for i in indices]
            initial = pull_initial_state(self.optimizer, params)
            for i, tensors in zip(indices, initial.tensors, strict=True):
                for name, value in tensors.items():
                    self.state[i][name].copy_(value)
            unit.load_scalar_state(initial.scalars)
            release_state(self.optimizer, params)

    def stage(self, source: Tensor) -> Tensor:
        """Copy to a view of a new flat buffer, at another alignment each time.

        On accelerators aligned to 16 bytes: elsewhere torch's fused SGD with maximize rounds
        differently.
        """
        self.addresses += 1
        offset = self.addresses % 7 * (1 if source.is_cpu else 4)
        flat = torch.empty(source.numel() + offset, dtype=source.dtype, device=source.device)
        view = flat[offset:].view(source.shape)
        view.copy_(source)
        return view

    def step(
        self, grads: list[Tensor | None], hyperparameters: Hyperparameters | None = None
    ) -> None:
        for unit, indices in zip(self.units, UNITS, strict=True):
            masters = [self.stage(self.masters[i]) for i in indices]
            state = [{n: self.stage(v) for n, v in self.state[i].items()} for i in indices]
            given = [grads[i] for i in indices]
            staged = [None if g is None else self.stage(g) for g in given]
            unit.step(masters, staged, state, hyperparameters=hyperparameters)
            for i, master, views in zip(indices, masters, state, strict=True):
                assert master.grad is None
                self.masters[i].copy_(master)
                for name, view in views.items():
                    self.state[i][name].copy_(view)

    @property
    def scalars(self) -> list[dict[str, float] | None]:
        return [s for unit in self.units for s in unit.scalar_state()]


def runs(make: Make, device: str) -> bool:
    """Whether this torch has such a kernel on this device (fused Adagrad came late to CUDA)."""
    try:
        Plain(make, device).step(new_grads(1, device=device))
    except RuntimeError:
        return False
    return True


class Plain:
    """The user's loop without lohan_fx."""

    def __init__(self, make: Make, device: str = "cpu") -> None:
        self.params = new_params(device)
        self.optimizer = make(self.params)

    def step(self, grads: list[Tensor | None]) -> None:
        for p, g in zip(self.params, grads, strict=True):
            p.grad = None if g is None else g.clone()
        self.optimizer.step()


def assert_same(host: Host, plain: Plain) -> None:
    for i, p in enumerate(plain.params):
        assert equal(host.masters[i], p.detach()), f"master {i}"
        entry = {k: v for k, v in plain.optimizer.state.get(p, {}).items() if v is not None}
        scalars = host.scalars[i]
        if not entry:
            assert scalars is None
            continue
        assert scalars is not None
        assert {*entry} == {*host.state[i], *scalars}
        for name, value in entry.items():
            if name in scalars:
                assert scalars[name] == float(value), f"scalar {name} of {i}"
            else:
                assert equal(host.state[i][name], value), f"state {name} of {i}"


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


LARGE = (70_001, 1500, 1024, 3)

CHUNKED = [
    (optim.AdamW, {"amsgrad": True}),
    (optim.AdamW, {"fused": True}),
    (optim.SGD, {"momentum": 0.9, "fused": True}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True, "foreach": True}),
    (optim.ASGD, {"foreach": True}),
]


@pytest.mark.parametrize("chunk", [1, 5000, None])
@pytest.mark.parametrize(("cls", "options"), CHUNKED, ids=lambda v: getattr(v, "__name__", str(v)))
def test_chunks_change_nothing(cls: Any, options: dict[str, Any], chunk: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(n, generator=generator)) for n in LARGE]
    masters = [p.detach().clone() for p in params]
    optimizer = cls(params, lr=0.1, **options)
    unit = UnitOptimizer(optimizer, params, chunk_elements=chunk)
    state = [{n: torch.full_like(m, torch.nan) for n in unit.state_names()} for m in masters]
    for _ in range(3):
        grads = [torch.randn(n, generator=generator) for n in LARGE]
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
        unit.step(masters, grads, state)
    for p, m, views in zip(params, masters, state, strict=True):
        assert equal(p.detach(), m)
        assert all(equal(optimizer.state[p][n], v) for n, v in views.items())
    assert unit.scalar_state()[0] == {
        n: float(optimizer.state[params[0]][n]) for n in unit.scalar_names()
    }


@pytest.mark.parametrize("scratch_elements", [None, 2000, 100_000])
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
def test_mixed_precision(scratch_elements: int | None, grad_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(n, generator=generator).bfloat16() for n in LARGE]
    params = [nn.Parameter(s.clone()) for s in start]  # what the user sees: the compute copies
    unit = UnitOptimizer(optim.AdamW(params, lr=0.01), params, chunk_elements=4096)
    masters = [s.float() for s in start]
    state = [{n: torch.empty_like(m) for n in unit.state_names()} for m in masters]
    compute = [torch.zeros_like(s) for s in start]
    scratch = None if scratch_elements is None else torch.empty(scratch_elements)
    reference = [nn.Parameter(s.float()) for s in start]
    optimizer = optim.AdamW(reference, lr=0.01)
    for step in range(4):
        grads: list[Tensor | None] = [
            torch.randn(n, generator=generator).to(grad_dtype) for n in LARGE
        ]
        if step == 0:
            grads[1] = None
        kept = copy.deepcopy(grads)
        unit.step_mixed(masters, grads, state, compute, scratch=scratch)
        for p, g in zip(reference, kept, strict=True):
            p.grad = None if g is None else g.float()
        optimizer.step()
        for p, m, c in zip(reference, masters, compute, strict=True):
            assert equal(p.detach(), m)
            assert equal(p.detach().bfloat16(), c)
        assert all(
            a is b is None or (a is not None and b is not None and equal(a, b))
            for a, b in zip(grads, kept, strict=True)
        )
    assert not torch.equal(compute[0], start[0])


@pytest.mark.parametrize("clip", [None, Clip(factor=torch.tensor(0.25), limit=0.1)])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("cls", "options"),
    [(optim.AdamW, {"fused": True}), (optim.AdamW, {"foreach": False}), (optim.SGD, {})],
)
def test_gradients_that_are_added_to_sums(
    cls: Any, options: dict[str, Any], device: str, clip: Clip | None
) -> None:
    """As if they had been added before: in the update's own pass (fused, on a CPU), or apart. A
    parameter may have a gradient, a sum, both, or neither."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(n, generator=generator).to(device)) for n in (*LARGE, 7)]
    grads = [torch.randn(p.shape, generator=generator).to(device).bfloat16() for p in params]
    before = [torch.randn(p.shape, generator=generator).to(device) for p in params]
    has = [(True, True), (False, True), (True, False), (False, False)]
    has += [(True, True)] * (len(params) - len(has))
    found = []
    for adds in (False, True):
        unit = UnitOptimizer(cls(params, lr=0.01, **options), params)
        masters = [p.detach().clone() for p in params]
        state = [{n: torch.zeros_like(m) for n in unit.state_names()} for m in masters]
        compute = [torch.zeros_like(m, dtype=torch.bfloat16) for m in masters]
        late = [g.clone() if one else None for g, (one, _) in zip(grads, has, strict=True)]
        sums = [t.clone() if two else None for t, (_, two) in zip(before, has, strict=True)]
        if adds:
            unit.step_mixed(masters, late, state, compute, sums=sums, clip=clip)
        else:
            whole = [
                s if g is None else g.float() if s is None else s + g.float()
                for g, s in zip(late, sums, strict=True)
            ]
            unit.step_mixed(masters, whole, state, compute, clip=clip)
        found.append([*masters, *compute, *(v for views in state for v in views.values())])
    assert all(map(equal, *found))
    assert not torch.equal(found[0][0], params[0].detach())


def test_sums_of_another_number_of_parameters() -> None:
    params = new_params()
    unit = UnitOptimizer(optim.SGD(params, lr=0.1), params)
    masters = [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match="6 gradients, 2 sums"):
        unit.step(masters, new_grads(1), [{} for _ in params], sums=[None, None])


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


class Renamed(torch.optim.AdamW):
    """Overrides nothing of the update."""

    def __init__(self, params: Any, peak: float) -> None:
        super().__init__(params, lr=peak)
        self.peak = peak


class OwnStep(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return None


class OwnState(torch.optim.Adam):
    def _init_group(self, *args: Any) -> bool:
        return False


class Closure(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Callable[[], float]) -> float:  # type: ignore[override]
        return closure()


class Wrapper(torch.optim.Optimizer):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups[0]["params"], {})


def test_subclass_without_overrides_is_supported() -> None:
    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return Renamed(params, 0.02)

    check_supported(make(new_params()))
    plain, host = Plain(make), Host(make)
    plain.step(new_grads(0))
    host.step(new_grads(0))
    assert_same(host, plain)


def refused() -> Iterator[Any]:
    def case(name: str, reason: str, make: Callable[[list[nn.Parameter]], Any]) -> Any:
        return pytest.param(name, reason, make, id=name + "-" + reason.split(" ", maxsplit=1)[0])

    yield case("LBFGS", "closure", optim.LBFGS)
    yield case("SparseAdam", "sparse", optim.SparseAdam)
    yield case("Adafactor", "rows and columns", optim.Adafactor)
    if hasattr(optim, "Muon"):
        yield case("Muon", "orthogonalizes", lambda p: optim.Muon([nn.Parameter(torch.ones(2, 2))]))
    yield case("Closure", "needs a closure", Closure)
    yield case("Wrapper", "Pass the AdamW that it wraps", lambda p: Wrapper(optim.AdamW(p)))
    yield case("Optimizer", "not known", lambda p: optim.Optimizer(p, {}))
    yield case("OwnStep", "OwnStep overrides AdamW.step", OwnStep)
    yield case("OwnState", "OwnState overrides Adam._init_group", OwnState)
    yield case("AdamW", "differentiable=True", lambda p: optim.AdamW(p, differentiable=True))
    yield case("Adam", "capturable=True", lambda p: optim.Adam([{"params": p, "capturable": True}]))
    yield case("Linear", "no torch.optim.Optimizer", lambda p: nn.Linear(1, 1))


@pytest.mark.parametrize(("name", "reason", "make"), list(refused()))
def test_unsupported_optimizers_are_refused(
    name: str, reason: str, make: Callable[[list[nn.Parameter]], Any]
) -> None:
    params = [nn.Parameter(torch.ones(3))]
    with pytest.raises(UnsupportedOptimizerError, match=rf"\b{name} cannot update.*{reason}"):
        check_supported(make(params))


def test_sparse_gradient_is_refused() -> None:
    params = [nn.Parameter(torch.ones(3))]
    optimizer = optim.SGD(params)
    check_supported(optimizer)
    params[0].grad = torch.ones(3).to_sparse()
    with pytest.raises(UnsupportedOptimizerError, match=r"SGD .*sparse=False"):
        check_supported(optimizer)
