"""The one-pass Adam in C++ against torch's fused kernels, bit by bit; and how it is built."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW

from lohan_fx.errors import UnsupportedOptimizerError
from lohan_fx.runtime.native import adam
from lohan_fx.runtime.native.adam import AdamKernel, Target, Update
from lohan_fx.runtime.optimizer import UnitOptimizer

needs_compiler = pytest.mark.skipif(
    not (os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")),
    reason="needs a C++ compiler",
)

SIZES = (*range(1, 41), *range(60, 69), *range(124, 133), *range(993, 1031), 70_001)
"""Every remainder of a vector, of the kernel's block, and more than two of a thread's pieces."""
STEPS = 3
NAMES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
DEFAULTS: dict[str, Any] = {
    "lr": 0.01,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "amsgrad": False,
    "maximize": False,
}


@pytest.fixture(scope="module")
def library() -> Path:
    return adam.library()


@pytest.fixture(scope="module")
def kernels(library: Path) -> Iterator[Mapping[int, AdamKernel]]:
    made = {n: AdamKernel(library, n) for n in (1, 2, 5)}
    yield made
    for kernel in made.values():
        kernel.close()


def same(a: Tensor, b: Tensor) -> bool:
    """Equal in shape, dtype and bits; any NaN equals any other."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    whole = torch.int32 if a.element_size() == 4 else torch.int16
    return bool(((a.view(whole) == b.view(whole)) | (a.isnan() & b.isnan())).all())


class Pair:
    """Parameters that torch's fused optimizer updates, and the same ones for the kernel."""

    def __init__(
        self,
        cls: type[torch.optim.Optimizer],
        groups: Sequence[tuple[Sequence[int], Mapping[str, Any]]],
        *,
        seed: int = 0,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.decoupled = cls is AdamW
        self.params = [
            [nn.Parameter(torch.randn(n, generator=self.generator)) for n in sizes]
            for sizes, _ in groups
        ]
        options = [{**DEFAULTS, **given} for _, given in groups]
        self.optimizer = cls(
            [{"params": p, **o} for p, o in zip(self.params, options, strict=True)],  # type: ignore[call-arg]
            fused=True,
        )
        self.all = [(p, o) for ps, o in zip(self.params, options, strict=True) for p in ps]
        self.masters = [p.detach().clone() for p, _ in self.all]
        self.states = [{n: torch.zeros_like(m) for n in NAMES} for m in self.masters]
        self.step_number = 0

    def step(
        self,
        kernel: AdamKernel,
        grad_dtype: torch.dtype = torch.float32,
        copy_dtype: torch.dtype | None = None,
        spoil: Mapping[int, float] | None = None,
    ) -> None:
        """One step of both; they must not differ. `spoil`: period → value of such gradients."""
        self.step_number += 1
        updates, copies = [], []
        for (p, o), master, state in zip(self.all, self.masters, self.states, strict=True):
            grad = torch.randn(p.shape, generator=self.generator).to(grad_dtype)
            for period, value in (spoil or {}).items():
                grad[period - 1 :: period] = value
            p.grad = grad.float()
            made = None if copy_dtype is None else torch.zeros_like(master, dtype=copy_dtype)
            copies.append(made)
            updates.append(
                Update(
                    master=master,
                    exp_avg=state["exp_avg"],
                    exp_avg_sq=state["exp_avg_sq"],
                    max_exp_avg_sq=state["max_exp_avg_sq"] if o["amsgrad"] else None,
                    gradient=grad,
                    copy=made,
                    lr=o["lr"],
                    beta1=o["betas"][0],
                    beta2=o["betas"][1],
                    eps=o["eps"],
                    weight_decay=o["weight_decay"],
                    step=float(self.step_number),
                    decoupled=self.decoupled,
                    maximize=o["maximize"],
                )
            )
        given = [u.gradient.clone() for u in updates]
        assert all(u.supported() for u in updates)
        kernel.run(updates)
        self.optimizer.step()
        assert all(same(u.gradient, g) for u, g in zip(updates, given, strict=True))
        for (p, o), u, made in zip(self.all, updates, copies, strict=True):
            where = f"{p.numel()} elements, step {self.step_number}"
            kept = self.optimizer.state[p]
            assert same(u.exp_avg, kept["exp_avg"]), where
            assert same(u.exp_avg_sq, kept["exp_avg_sq"]), where
            if o["amsgrad"]:
                assert u.max_exp_avg_sq is not None
                assert same(u.max_exp_avg_sq, kept["max_exp_avg_sq"]), where
            assert same(u.master, p.detach()), where
            if made is not None:
                assert same(made, p.detach().to(made.dtype)), where


# -- the arithmetic ------------------------------------------------------------------------------


VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"weight_decay": 0.1},
    {"amsgrad": True},
    {"maximize": True, "weight_decay": 0.1},
    {"betas": (0.4, 0.99)},  # torch's lerp has another formula from weight 0.5 on
    {"betas": (0.4, 0.99), "amsgrad": True, "maximize": True, "weight_decay": 0.01},
    {"betas": (0.5, 0.5), "eps": 1e-3, "lr": 1.0},
    {"betas": (0.0, 0.0), "weight_decay": 0.1},
    {"lr": 0.0},
)


@needs_compiler
@pytest.mark.parametrize("cls", [Adam, AdamW])
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_every_size_is_torchs(
    cls: Any, options: Mapping[str, Any], kernels: Mapping[int, AdamKernel]
) -> None:
    pair = Pair(cls, [(SIZES, options)])
    for _ in range(STEPS):
        pair.step(kernels[2])


@needs_compiler
@pytest.mark.parametrize("copy_dtype", [None, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_of_gradients_and_copies(
    grad_dtype: torch.dtype, copy_dtype: torch.dtype | None, kernels: Mapping[int, AdamKernel]
) -> None:
    pair = Pair(AdamW, [(SIZES, {"weight_decay": 0.1, "lr": 0.1})])
    for _ in range(STEPS):
        pair.step(kernels[2], grad_dtype, copy_dtype)


@needs_compiler
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_different_hyperparameters_in_one_call(
    num_threads: int, kernels: Mapping[int, AdamKernel]
) -> None:
    """Whoever takes which piece: also of parameters of 0 elements, and of many pieces."""
    sizes = ((70_001, 3, 1), (32_768, 0, 32_769, 7), (200_003,), (5, 1000, 0))
    options = (
        {},
        {"weight_decay": 0.1, "amsgrad": True, "lr": 0.1},
        {"betas": (0.4, 0.9), "maximize": True},
        {"eps": 1e-4, "weight_decay": 0.01, "lr": 1e-4},
    )
    pair = Pair(AdamW, list(zip(sizes, options, strict=True)))
    for _ in range(STEPS):
        pair.step(kernels[num_threads], torch.bfloat16, torch.bfloat16)


@needs_compiler
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("copy_dtype", [torch.bfloat16, torch.float16])
def test_nan_and_infinity_are_torchs(
    grad_dtype: torch.dtype,
    copy_dtype: torch.dtype,
    amsgrad: bool,
    kernels: Mapping[int, AdamKernel],
) -> None:
    pair = Pair(Adam, [(SIZES, {"amsgrad": amsgrad, "weight_decay": 0.1})])
    spoil = {5: torch.nan, 7: torch.inf, 11: -torch.inf}
    for spoiled in (spoil, None, {3: torch.nan}, None):
        pair.step(kernels[2], grad_dtype, copy_dtype, spoiled)
    last = pair.masters[-1]
    assert last[4::5].isnan().all()
    assert last[0].isfinite()


@needs_compiler
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20])
def test_very_small_and_very_large_gradients(
    scale: float, kernels: Mapping[int, AdamKernel]
) -> None:
    """Squares that underflow to denormal numbers or zero, or overflow."""
    pair = Pair(Adam, [(SIZES, {"eps": 1e-30})])
    for params in pair.params:
        for p in params:
            p.data *= scale
    pair.masters = [p.detach().clone() for p, _ in pair.all]
    randn = torch.randn

    def scaled(*args: Any, **kwargs: Any) -> Tensor:
        return randn(*args, **kwargs) * scale

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn", scaled)
        for _ in range(STEPS):
            pair.step(kernels[2])


@needs_compiler
def test_copies_round_to_nearest_even(kernels: Mapping[int, AdamKernel]) -> None:
    """Every bf16 and fp16 number, the middles between neighbours, and their neighbours."""
    bits = torch.arange(2**16, dtype=torch.int32)
    near = [(bits << 16) + d for d in (0, 1, 0x7FFF, 0x8000, 0x8001)]
    halves = bits.to(torch.int16).view(torch.float16).float().view(torch.int32)
    near += [halves + d for d in (0, 1, 0xFFF, 0x1000, 0x1001)]
    values = torch.cat(near).view(torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        made = torch.empty_like(values, dtype=dtype)
        update = Update(
            master=values.clone(), exp_avg=torch.zeros_like(values),
            exp_avg_sq=torch.zeros_like(values), max_exp_avg_sq=None,
            gradient=torch.zeros_like(values), copy=made, lr=0.0, beta1=0.9, beta2=0.999,
            eps=1e-8, weight_decay=0.0, step=1.0, decoupled=True, maximize=False,
        )  # fmt: skip
        kernels[2].run([update])
        assert same(made, values.to(dtype))


@needs_compiler
def test_no_parameters(kernels: Mapping[int, AdamKernel]) -> None:
    for kernel in kernels.values():
        kernel.run([])


# -- results elsewhere ---------------------------------------------------------------------------


def placed(sizes: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Tensors side by side, so that they begin at any address; and all of their memory."""
    whole = torch.full((sum(sizes) + 2,), torch.nan, dtype=dtype)
    return whole, list(whole[1:-1].split(list(sizes)))


def compare_elsewhere(
    kernel: AdamKernel,
    options: Mapping[str, Any],
    *,
    decoupled: bool = True,
    grad_dtype: torch.dtype = torch.float32,
    copy_dtype: torch.dtype | None = None,
    clip: Mapping[str, float] = {},
) -> None:
    """One step in place and one elsewhere: the same bits; what was read stays as it was."""
    generator = torch.Generator().manual_seed(0)
    o = {**DEFAULTS, **options}
    given = [
        [torch.randn(n, generator=generator) for _ in range(2)]
        + [torch.rand(n, generator=generator) for _ in range(2)]
        + [torch.randn(n, generator=generator).to(grad_dtype)]
        for n in SIZES
    ]
    for tensors in given:
        tensors[4][4::5] = torch.nan
        tensors[4][6::7] = -torch.inf
    made = {name: placed(SIZES, torch.float32) for name in ("master", *NAMES)}
    copies = placed(SIZES, copy_dtype) if copy_dtype else (torch.empty(0), [None] * len(SIZES))
    before = [[t.clone() for t in tensors] for tensors in given]
    in_place = [[t.clone() for t in tensors] for tensors in given]
    wanted_copies = [None if c is None else torch.empty_like(c) for c in copies[1]]

    def update(tensors: list[Tensor], copy: Tensor | None, target: Target | None) -> Update:
        return Update(
            master=tensors[0], exp_avg=tensors[1], exp_avg_sq=tensors[2],
            max_exp_avg_sq=tensors[3] if o["amsgrad"] else None, gradient=tensors[4], copy=copy,
            lr=o["lr"], beta1=o["betas"][0], beta2=o["betas"][1], eps=o["eps"],
            weight_decay=o["weight_decay"], step=3.0, decoupled=decoupled, maximize=o["maximize"],
            target=target, **clip,
        )  # fmt: skip

    targets = [
        Target(
            master=made["master"][1][k],
            exp_avg=made["exp_avg"][1][k],
            exp_avg_sq=made["exp_avg_sq"][1][k],
            max_exp_avg_sq=made["max_exp_avg_sq"][1][k] if o["amsgrad"] else None,
        )
        for k in range(len(SIZES))
    ]
    updates = [update(*each) for each in zip(given, copies[1], targets, strict=True)]
    assert all(u.supported() for u in updates)
    kernel.run(updates)
    kernel.run([update(t, c, None) for t, c in zip(in_place, wanted_copies, strict=True)])
    for k, size in enumerate(SIZES):
        assert all(map(same, given[k], before[k])), size
        for at, name in enumerate(("master", *NAMES)):
            if name != "max_exp_avg_sq" or o["amsgrad"]:
                assert same(made[name][1][k], in_place[k][at]), (size, name)
        copy, wanted = copies[1][k], wanted_copies[k]
        if copy is not None and wanted is not None:
            assert same(copy, wanted), size
    for whole, _ in made.values():
        assert whole[0].isnan()
        assert whole[-1].isnan()
    if not o["amsgrad"]:
        assert made["max_exp_avg_sq"][0].isnan().all()


@needs_compiler
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_every_size_elsewhere(
    options: Mapping[str, Any], decoupled: bool, kernels: Mapping[int, AdamKernel]
) -> None:
    compare_elsewhere(kernels[2], options, decoupled=decoupled)


@needs_compiler
@pytest.mark.parametrize("copy_dtype", [None, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("clip", [{"factor": 0.3}, {"limit": 0.5}], ids=str)
def test_dtypes_elsewhere(
    clip: Mapping[str, float],
    grad_dtype: torch.dtype,
    copy_dtype: torch.dtype | None,
    kernels: Mapping[int, AdamKernel],
) -> None:
    options = {"amsgrad": True, "weight_decay": 0.1}
    compare_elsewhere(kernels[2], options, grad_dtype=grad_dtype, copy_dtype=copy_dtype, clip=clip)


@needs_compiler
@pytest.mark.parametrize("what", ["dtype", "size", "max"])
def test_targets_that_do_not_fit_are_not_supported(what: str) -> None:
    (update,) = long_call(1)
    good, bad = torch.ones(2**18), torch.ones(2**18, dtype=torch.float64)
    if what == "size":
        bad = torch.ones(3)
    target = Target(master=good, exp_avg=good, exp_avg_sq=good, max_exp_avg_sq=None)
    assert dataclasses.replace(update, target=target).supported()
    if what == "max":
        wrong = dataclasses.replace(update, target=target, max_exp_avg_sq=good)
    else:
        wrong = dataclasses.replace(update, target=dataclasses.replace(target, exp_avg=bad))
    assert not wrong.supported()


# -- threads -------------------------------------------------------------------------------------


def long_call(num_updates: int) -> list[Update]:
    tensors = [torch.ones(2**18) for _ in range(4)]
    update = Update(
        master=tensors[0], exp_avg=tensors[1], exp_avg_sq=tensors[2], max_exp_avg_sq=None,
        gradient=tensors[3], copy=None, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8,
        weight_decay=0.0, step=1.0, decoupled=True, maximize=False,
    )  # fmt: skip
    return [update] * num_updates


@needs_compiler
def test_python_goes_on_during_a_call(kernels: Mapping[int, AdamKernel]) -> None:
    span: list[float] = []
    updates = long_call(1500)

    def call() -> None:
        span.append(time.perf_counter())
        kernels[1].run(updates)
        span.append(time.perf_counter())

    thread = threading.Thread(target=call)
    thread.start()
    ticks = []
    while thread.is_alive():
        ticks.append(time.perf_counter())
        time.sleep(0.001)
    thread.join()
    begin, end = span
    # packing the list holds the lock, so count in the second half, when all of it is packed
    inside = [t for t in ticks if (begin + end) / 2 < t < end]
    assert end - begin > 0.05, "too fast to tell"
    assert len(inside) >= 5


@needs_compiler
def test_calls_from_several_threads(kernels: Mapping[int, AdamKernel]) -> None:
    """They take turns; each is right."""
    failures: list[BaseException] = []

    def train(seed: int) -> None:
        try:
            pair = Pair(AdamW, [((70_001, 5), {"weight_decay": 0.1})], seed=seed)
            for _ in range(10):
                pair.step(kernels[5])
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@needs_compiler
def test_closing_ends_the_threads(library: Path) -> None:
    def running() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    before = running()
    kernel = AdamKernel(library, 5)
    made = running() - before
    assert len(made) == 4
    kernel.run(long_call(1))
    kernel.close()
    assert not made & running()


# -- the unit optimizer uses it ------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache folder, and a process that has no kernel yet; puts the kernel back."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    adam.kernel.cache_clear()
    yield folder
    adam.kernel.cache_clear()


@pytest.fixture
def compiler(fresh: Path, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that copies the library made before; it writes its calls into the file."""
    calls = tmp_path / "calls"
    script = tmp_path / "g++"
    script.write_text(
        f'#!/bin/sh\nfor last; do :; done\necho "$last" >> {calls}\n'
        f'cat > /dev/null\ncp {library} "$last"\n'
    )
    script.chmod(0o700)
    monkeypatch.setenv("CXX", str(script))
    return calls


SHAPES = ((37,), (5, 7), (), (70_001,))


def train(dtype: torch.dtype | None, **options: Any) -> list[Tensor]:
    """Masters, states and copies after a few steps of a unit."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(s, generator=generator)) for s in SHAPES]
    unit = UnitOptimizer(AdamW(params, lr=0.01, fused=True, **options), params)
    masters = [p.detach().clone() for p in params]
    state = [{n: torch.full_like(m, torch.nan) for n in unit.state_names()} for m in masters]
    copies = [torch.zeros_like(m, dtype=dtype) for m in masters] if dtype else []
    for step in range(STEPS):
        grads: list[Tensor | None] = [
            torch.randn(s, generator=generator).to(dtype or torch.float32) for s in SHAPES
        ]
        if step == 1:
            grads[1] = None
        if dtype is None:
            unit.step(masters, grads, state)
        else:
            unit.step_mixed(masters, grads, state, copies)
    assert [s and s["step"] for s in unit.scalar_state()] == [3.0, 2.0, 3.0, 3.0]
    return [*masters, *copies, *(v for views in state for v in views.values())]


def uses_the_kernel(monkeypatch: pytest.MonkeyPatch, **options: Any) -> bool:
    ran = []
    run = AdamKernel.run
    with monkeypatch.context() as patch:
        patch.setattr(
            AdamKernel, "run", lambda self, us, **kw: (ran.append(1), run(self, us, **kw))[1]
        )
        train(torch.bfloat16, **options)
    return bool(ran)


DTYPES = (None, torch.bfloat16, torch.float16)
WITHOUT: Mapping[str, Any] = {"amsgrad": False, "maximize": False}


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_units_with_and_without_it(
    dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert uses_the_kernel(monkeypatch)
    for amsgrad, maximize in itertools.product((False, True), (False, True)):
        found = train(dtype, amsgrad=amsgrad, maximize=maximize)
        with monkeypatch.context() as patch:
            patch.setattr(adam, "kernel", lambda: None)
            wanted = train(dtype, amsgrad=amsgrad, maximize=maximize)
        assert all(map(same, found, wanted))


@needs_compiler
def test_learning_rates_that_are_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[Tensor]:
        params = [nn.Parameter(torch.ones(37))]
        unit = UnitOptimizer(AdamW(params, lr=torch.tensor(0.1), fused=True), params)
        master = torch.ones(37)
        state = {n: torch.zeros(37) for n in unit.state_names()}
        for _ in range(STEPS):
            unit.step([master], [torch.linspace(-1, 1, 37)], [state])
        return [master, *state.values()]

    found = run()
    monkeypatch.setattr(adam, "kernel", lambda: None)
    assert all(map(same, found, run()))


@needs_compiler
@pytest.mark.parametrize("case", ["gradient", "copy", "state", "sparse", "missing"])
def test_what_does_not_fit_is_refused(case: str) -> None:
    """The kernel checks nothing: it must not see tensors of other sizes."""
    params = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3))]
    unit = UnitOptimizer(AdamW(params, lr=0.1, fused=True), params)
    masters = [torch.ones(4), torch.ones(3)]
    grads: list[Tensor | None] = [torch.ones(4), torch.ones(3)]
    copies = [torch.ones(4).bfloat16(), torch.ones(3).bfloat16()]
    state = [{n: torch.zeros_like(m) for n in unit.state_names()} for m in masters]
    if case == "gradient":
        grads[1] = torch.ones(2)
    elif case == "copy":
        copies[1] = copies[0]
    elif case == "state":
        state[1] = state[0]
    elif case == "sparse":
        grads[1] = torch.ones(3).to_sparse()
    else:
        del state[1]["exp_avg_sq"]
    with pytest.raises((ValueError, UnsupportedOptimizerError)):
        unit.step_mixed(masters, grads, state, copies)
    assert all((m == 1).all() for m in masters)
    assert unit.scalar_state() == [None, None]


# -- building ------------------------------------------------------------------------------------


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "no compiled CPU" in r.getMessage()]


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_compiler(
    dtype: torch.dtype | None,
    fresh: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Torch's own kernels give the same numbers; one line in the log says so."""
    caplog.set_level(logging.INFO, "lohan_fx")
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    assert not uses_the_kernel(monkeypatch)
    found = train(dtype)
    (line,) = messages(caplog)
    assert "no C++ compiler: install g++, or set CXX" in line
    assert not fresh.exists()
    monkeypatch.undo()
    adam.kernel.cache_clear()
    assert all(map(same, found, train(dtype)))


@pytest.mark.parametrize("path", ["/bin/false", "/nowhere/g++"])
def test_a_broken_compiler(
    path: str, fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lohan_fx")
    monkeypatch.setenv("CXX", path)
    assert adam.kernel() is None
    assert not uses_the_kernel(monkeypatch)
    (line,) = messages(caplog)
    assert path in line
    assert not list((fresh / "lohan_fx").iterdir())


def test_a_compiler_that_makes_no_library(
    compiler: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "lohan_fx")
    monkeypatch.setenv("CXX", "/bin/true")
    assert adam.kernel() is None
    assert len(messages(caplog)) == 1


@needs_compiler
def test_built_once_a_machine(fresh: Path, compiler: Path) -> None:
    first = adam.library()
    assert adam.library() == first
    assert len(compiler.read_text().splitlines()) == 1
    assert first.parent == fresh / "lohan_fx"
    assert list(first.parent.iterdir()) == [first]
    kernel = adam.kernel()
    assert kernel is not None
    assert adam.kernel() is kernel


@needs_compiler
def test_compiler_with_options(
    compiler: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """CXX may hold a command with arguments, as make takes it."""
    monkeypatch.setenv("CXX", f"{tmp_path / 'g++'} -pipe")
    assert adam.kernel() is not None


@needs_compiler
def test_another_source_or_machine_is_built_anew(
    compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = adam.library()
    monkeypatch.setattr(adam, "_processor", lambda: "another")
    second = adam.library()
    monkeypatch.setattr(adam, "_FLAGS", (*adam._FLAGS, "-g"))
    assert len({first, second, adam.library()}) == 3


@needs_compiler
def test_the_folder_is_private(fresh: Path, compiler: Path) -> None:
    """What lies there is loaded as code."""
    folder = adam.library().parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@needs_compiler
def test_a_folder_that_others_can_write_is_not_used(fresh: Path, compiler: Path) -> None:
    folder = fresh / "lohan_fx"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    made = adam.library()
    assert made.parent != folder
    assert stat.S_IMODE(made.parent.stat().st_mode) == 0o700
    assert not list(folder.iterdir())


@needs_compiler
def test_an_unwritable_folder(
    fresh: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where a file stands in the way, a temporary folder of this process does."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    at_exit: list[Any] = []
    monkeypatch.setattr("atexit.register", lambda *call, **options: at_exit.append((call, options)))
    assert uses_the_kernel(monkeypatch)
    (made,) = (tmp_path / "tmp").iterdir()
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    for (function, *arguments), options in at_exit:
        function(*arguments, **options)
    assert not list((tmp_path / "tmp").iterdir())


CHILD = """
import torch
from lohan_fx.runtime.native import adam
kernel = adam.kernel()
assert kernel is not None
ones = [torch.ones(8) for _ in range(4)]
kernel.run([adam.Update(
    master=ones[0], exp_avg=ones[1], exp_avg_sq=ones[2], max_exp_avg_sq=None, gradient=ones[3],
    copy=None, lr=0.5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=1.0,
    decoupled=True, maximize=False)])
print(bool((ones[0] < 1).all()))
"""


def start_child(cache: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    environment.pop("CXX", None)
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", CHILD],
        cwd=Path(__file__).parent.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@needs_compiler
def test_processes_that_build_at_once(tmp_path: Path) -> None:
    """Both have a whole library; one file stays."""
    children = [start_child(tmp_path) for _ in range(2)]
    for child in children:
        out, err = child.communicate(timeout=120)
        assert (child.returncode, out, err) == (0, "True\n", "")
    assert len(list((tmp_path / "lohan_fx").iterdir())) == 1
