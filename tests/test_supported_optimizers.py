"""Which optimizers are supported, and how others are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn, optim

from lohan_fx.errors import UnsupportedOptimizerError
from lohan_fx.runtime.supported_optimizers import check_supported
from tests.optimizers import (
    Host,
    Plain,
    assert_same,
    new_grads,
    new_params,
)


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
