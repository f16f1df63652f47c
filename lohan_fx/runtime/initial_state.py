"""State that the user's optimizer holds, before units take it over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lohan_fx.errors import StepError
from lohan_fx.runtime.param_groups import group_values, places_of
from lohan_fx.runtime.shadow import Shadow, state_spec
from lohan_fx.runtime.supported_optimizers import supported_base

ScalarState = list[dict[str, float] | None]
"""Per parameter: the step counters and other scalars by name (`{}` for an optimizer that keeps
none, such as SGD with momentum); None for a parameter that has not been updated yet and
therefore has no state. Plain data, fit for JSON; float32 and float64 values survive exactly."""

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class InitialState:
    """State that the user's optimizer holds already, in the order of the given parameters.

    `tensors` are the optimizer's own tensors by name (no copies; empty for a parameter without
    state), shaped like the parameter; `scalars` is for `UnitOptimizer.load_scalar_state`.
    """

    tensors: tuple[dict[str, Tensor], ...]
    scalars: ScalarState


def pull_initial_state(
    optimizer: Optimizer, params: Sequence[nn.Parameter], names: Sequence[str] = ()
) -> InitialState:
    """Read what `optimizer` keeps for `params`: loaded from a checkpoint, left by plain steps, or
    made at construction (Adagrad).

    Only state that the present hyperparameters use is returned. Nothing is changed: call
    `release_state` once the tensors are copied. Messages have the parameters' `names`, if given.

    Raises:
        UnsupportedOptimizerError: as `check_supported`.
        StepError: a state is incomplete or has another shape than its parameter.
        ValueError: a parameter is in no group of `optimizer`.
    """
    supported_base(optimizer)
    shadow = Shadow(optimizer)
    places = places_of(optimizer, params)
    layouts = {
        g: state_spec(shadow, group_values(optimizer.param_groups[g], _CPU), _CPU)
        for g in dict.fromkeys(g for g, _ in places)
    }
    tensors: list[dict[str, Tensor]] = []
    scalars: ScalarState = []
    for i, (p, (g, _)) in enumerate(zip(params, places, strict=True)):
        entry = {k: v for k, v in optimizer.state.get(p, {}).items() if v is not None}
        layout = layouts[g]
        wanted = (*layout.tensors, *layout.scalars)
        if not entry or not wanted:
            tensors.append({})
            scalars.append(None)
            continue
        missing = [name for name in wanted if name not in entry]
        called = names[i] if names else f"parameter {i} of the unit"
        if missing:
            raise StepError(
                f"the state that {type(optimizer).__name__} has for {called} "
                f"lacks {', '.join(missing)}, which group {g} needs: construct the optimizer with "
                "the options that the state was made with"
            )
        for name in layout.tensors:
            if entry[name].shape != p.shape:
                raise StepError(
                    f"state {name} of {called} has shape {tuple(entry[name].shape)}, the parameter "
                    f"{tuple(p.shape)}"
                )
        tensors.append({name: entry[name] for name in layout.tensors})
        scalars.append({name: float(entry[name]) for name in layout.scalars})
    return InitialState(tensors=tuple(tensors), scalars=scalars)


def release_state(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> None:
    """Drop what `optimizer` keeps for `params`, to free its memory."""
    for p in params:
        optimizer.state.pop(p, None)
