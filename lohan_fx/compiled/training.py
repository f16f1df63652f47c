"""What is trained: the optimizer, its parameters, what happens to gradients, how states lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from lohan_fx.annotate import StateLayout, UnitLayout, unit_layouts
from lohan_fx.compiled.options import Options
from lohan_fx.errors import LohanError, StepError
from lohan_fx.plan import WAITING, WHOLE, Schedule
from lohan_fx.runtime.accumulation import Accumulation
from lohan_fx.runtime.clipping import Clipping
from lohan_fx.runtime.optimizer import UnitOptimizer
from lohan_fx.runtime.supported_optimizers import check_supported


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, for the life of a compiled model.

    Attributes:
        optimizer: the user's; None: gradients are in ``.grad`` as ever.
        names: the parameters that it updates.
        parameters: the ids of all that the model had when it was compiled, by every name.
            (Weak references would keep torch from giving parameters on meta their data.)
        accumulation: which backwards end a step.
        clipping: what happens to whole gradients before they are used.
        state_layout: what lies beside each parameter.
        layouts: where parameters lie in their units.
    """

    optimizer: Optimizer | None
    names: tuple[str, ...]
    parameters: Mapping[str, int]
    accumulation: Accumulation
    clipping: Clipping
    state_layout: StateLayout
    layouts: tuple[UnitLayout, ...]

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The dtype of the program; None is the model's own."""
        return self.state_layout.compute_dtype

    @property
    def needs_whole_gradients(self) -> bool:
        """Whether all gradients have to be there before the first update counts."""
        return self.accumulation.kept or self.clipping.needs_norms

    def check_parameters(self, named: Mapping[str, nn.Parameter]) -> None:
        """See that the model's parameters are those that it had when it was compiled.

        Args:
            named: what it has now, by every name.

        Raises:
            StepError: a layer was replaced, added or removed.
        """
        had = self.parameters
        known, found = set(had.values()), set(map(id, named.values()))
        if new := [name for name, p in named.items() if id(p) not in known]:
            what = f"{new[0]} is another tensor than when the model was compiled"
        elif gone := [name for name, p in had.items() if p not in found]:
            what = f"{gone[0]} is no longer part of the model"
        elif renamed := [name for name in had if name not in named]:
            what = f"{renamed[0]} has another name now"
        else:
            return
        raise StepError(
            f"parameter {what}: call model.lohan.close() before replacing layers, and compile again"
        )

    @property
    def whole_schedules(self) -> frozenset[Schedule]:
        """The schedules that update nothing before."""
        return WAITING if self.accumulation.kept else WHOLE


def training_of(
    module: nn.Module, optimizer: Optimizer | None, options: Options, waiting: Callable[[], int]
) -> Training:
    """What is trained of a module.

    Args:
        module: as the user made it.
        optimizer: the user's.
        options: what about gradients and dtypes was asked for.
        waiting: how many forwards wait for their backward.

    Raises:
        LohanError: the optimizer has no parameter of the module.
        UnsupportedOptimizerError: its update is not elementwise.
    """
    groups = optimizer.param_groups if optimizer is not None else []
    managed = {id(p) for group in groups for p in group["params"]}
    names = tuple(
        name for name, p in module.named_parameters() if id(p) in managed and p.requires_grad
    )
    if managed and not any(id(p) in managed for p in module.parameters()):
        raise LohanError(
            f"no parameter of the {type(module).__name__} is in the optimizer: construct "
            f"{type(optimizer).__name__} from the parameters of the model that you compile"
        )
    accumulation = Accumulation(
        kept=options.gradients == "kept",
        limit=None if options.accumulate == "manual" else options.accumulate,
        forwards=options.forwards,
        waiting=waiting,
    )
    state_layout = StateLayout(
        compute_dtype=options.dtype if optimizer is not None else None,
        num_states=_num_states(module, optimizer, names),
        accumulates=accumulation.adds,
    )
    return Training(
        optimizer=optimizer,
        names=names,
        parameters={name: id(p) for name, p in module.named_parameters(remove_duplicate=False)},
        accumulation=accumulation,
        clipping=Clipping(
            max_norm=options.clip_grad_norm,
            max_value=options.clip_grad_value,
            skip_nonfinite=options.skip_nonfinite,
        ),
        state_layout=state_layout,
        layouts=unit_layouts(module, names, state_layout),
    )


def _num_states(module: nn.Module, optimizer: Optimizer | None, names: tuple[str, ...]) -> int:
    """Optimizer tensors of parameter shape that each element has."""
    if optimizer is None:
        return 0
    check_supported(optimizer)
    if not names:
        return 0
    named = dict(module.named_parameters())
    return len(UnitOptimizer(optimizer, [named[n] for n in names]).state_names())
