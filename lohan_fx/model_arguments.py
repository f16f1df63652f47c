"""What users give `plan` and `ablate` for a model, its inputs and its optimizer → a `Tracer`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lohan_fx.annotate import StateLayout
from lohan_fx.api import LohanModule
from lohan_fx.arguments import check_call, check_count, check_flag, check_outputs
from lohan_fx.capture import Outputs
from lohan_fx.compile_arguments import dtype_of
from lohan_fx.errors import LohanError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.models import NamedModel, named
from lohan_fx.runtime.optimizer import UnitOptimizer
from lohan_fx.runtime.supported_optimizers import SUPPORTED, check_supported
from lohan_fx.tracer import Tracer

Inputs = Mapping[str, Any] | Sequence[Any] | Tensor | Callable[[int], Any]
"""Example inputs: keyword arguments, positional ones, one tensor, or batch size → one of these."""

Model = str | NamedModel | nn.Module | Callable[[], Any]
"""A name, a module, a function that builds one (or it and its inputs), a configuration."""

Optimizer = str | torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None


def make_tracer(
    model: Model,
    inputs: Inputs | None = None,
    *,
    hw: HardwareProfile,
    sequence: int | None = None,
    optimizer: Optimizer = "adamw",
    dtype: torch.dtype | str | None = "auto",
    outputs: Outputs = "auto",
    accumulates: bool = False,
    full_trace: bool = False,
) -> Tracer:
    """What makes workloads of a model; arguments as for `plan`.

    Raises:
        LohanError: an unknown name, a missing input, a model that is compiled already.
    """
    if sequence is not None:
        check_count("sequence", sequence, "tokens")
    check_flag("accumulates", accumulates)
    check_flag("full_trace", full_trace)
    check_outputs(outputs)
    if isinstance(model, str):
        model = named(model)
    module, own, name, items = _module_of(model, sequence)
    given = inputs if inputs is not None else own
    if isinstance(module, LohanModule):
        raise LohanError("the model is compiled already: plan it before compile, or read .plan")
    if given is None and _is_config(getattr(module, "config", None)):
        given = _text_inputs(sequence or 1024)
    if given is None:
        raise LohanError(
            f"inputs= is missing: {type(module).__name__} is no named model, so an example of "
            "its inputs is needed (meta tensors will do)"
        )
    if dtype == "auto":
        on_gpu = hw.device_kind != "cpu" and optimizer is not None
        dtype = torch.bfloat16 if on_gpu else None
    elif dtype is not None:
        dtype = dtype_of(dtype)
    if dtype is not None and optimizer is None:
        raise LohanError("dtype= needs optimizer=: without one there are no masters to update")
    return Tracer(
        name=name or type(module).__name__,
        model=module,
        inputs=_inputs(given),
        hw=hw,
        states=StateLayout(
            compute_dtype=dtype,
            num_states=num_states(optimizer),
            accumulates=accumulates and optimizer is not None,
        ),
        optimizer=functools.partial(make_optimizer, optimizer) if optimizer is not None else None,
        outputs=outputs,
        items=items,
        full_trace=full_trace,
    )


def _module_of(
    model: NamedModel | nn.Module | Callable[[], Any], sequence: int | None
) -> tuple[nn.Module, Inputs | None, str, str | None]:
    """(module, inputs if the model brings them, name, what throughput counts)."""
    if isinstance(model, NamedModel):
        spec = model
        with torch.device("meta"):
            module = spec.build(sequence=sequence)
        return module, lambda batch: spec.inputs(batch, sequence), spec.name, spec.items
    if isinstance(model, nn.Module):
        return model, None, "", None
    if _is_config(model):
        return _from_config(model), None, "", None
    return (*_built(model), "", None)


def _built(model: Callable[[], Any]) -> tuple[nn.Module, Inputs | None]:
    """The result of a factory: a module, or a module and its inputs."""
    if not callable(model):
        raise LohanError(
            f"model is {type(model).__name__}: give a name, a torch.nn.Module, a function that "
            "builds one, or a transformers configuration"
        )
    check_call(model, 0, "the function that builds the model is called without arguments")
    with torch.device("meta"):
        made = model()
    module, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module):
        raise LohanError(f"the model's function returned {type(module).__name__}, no nn.Module")
    return module, inputs


def _is_config(model: Any) -> bool:
    """Whether it is a configuration of Hugging Face transformers."""
    return hasattr(model, "model_type") and hasattr(model, "to_dict")


def _from_config(config: Any) -> nn.Module:
    """The model of a transformers configuration, on the meta device, without a cache of keys."""
    import transformers

    config = copy.deepcopy(config)
    config.use_cache = False
    names = [n for n in config.architectures or () if hasattr(transformers, n)]
    with torch.device("meta"):
        if names:
            made = getattr(transformers, names[0])(config)
        else:
            auto: Any = transformers.AutoModelForCausalLM
            if getattr(config, "is_encoder_decoder", False):
                auto = transformers.AutoModelForSeq2SeqLM
            made = auto.from_config(config)
    assert isinstance(made, nn.Module)
    return made.train()


def _text_inputs(sequence: int) -> Callable[[int], dict[str, Tensor]]:
    def make(batch: int) -> dict[str, Tensor]:
        ids = torch.empty((batch, sequence), dtype=torch.long, device="meta")
        return {"input_ids": ids, "labels": ids}

    return make


def split_inputs(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs → (args, kwargs)."""
    if isinstance(given, Mapping):
        return (), dict(given)
    if isinstance(given, Tensor):
        return (given,), {}
    if isinstance(given, Sequence) and not isinstance(given, str):
        return tuple(given), {}
    raise LohanError(
        f"inputs are {type(given).__name__}: give keyword arguments as a dict, positional ones as "
        "a tuple, one tensor, or a function of the batch size that returns one of these"
    )


def _inputs(given: Inputs) -> Callable[[int | None], tuple[tuple[Any, ...], dict[str, Any]]]:
    """Example inputs → inputs of any batch size."""
    if callable(given) and not isinstance(given, Tensor):
        make = given
        return lambda batch: split_inputs(make(1 if batch is None else batch))
    args, kwargs = split_inputs(given)
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    sizes = {t.shape[0] if t.dim() else None for t in tensors}

    def sized(batch: int | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if batch is None or sizes == {batch}:
            return args, kwargs
        if len(sizes) != 1 or None in sizes:
            raise LohanError(
                "batch= needs inputs whose tensors all have the batch as their first dimension, "
                "or inputs as a function of the batch size"
            )

        def resize(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            size = (batch, *x.shape[1:])
            return torch.empty(size, dtype=x.dtype, device="meta", requires_grad=x.requires_grad)

        made: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(resize, (args, kwargs))
        return made

    return sized


def num_states(optimizer: Optimizer) -> int:
    """Optimizer tensors of parameter shape that each element has.

    Raises:
        LohanError: no optimizer of torch.optim has that name.
        UnsupportedOptimizerError: its update is not elementwise.
    """
    if optimizer is None:
        return 0
    made = make_optimizer(optimizer, [nn.Parameter(torch.zeros(1))])
    check_supported(made)
    parameter = made.param_groups[0]["params"][0]
    return len(UnitOptimizer(made, [parameter]).state_names())


def make_optimizer(
    optimizer: Optimizer, parameters: Sequence[nn.Parameter]
) -> torch.optim.Optimizer:
    """An optimizer by name, or by a class or function of the parameters; one that exists as it is.

    Raises:
        LohanError: no optimizer of torch.optim has that name, or the function returns none.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if isinstance(optimizer, str):
        known: dict[str, Callable[[Any], torch.optim.Optimizer]]
        known = {cls.__name__.lower(): cls for cls in SUPPORTED}
        if optimizer.lower() not in known:
            raise LohanError(f"no optimizer {optimizer!r}: use one of {', '.join(known)}")
        return known[optimizer.lower()](parameters)
    made = optimizer(parameters) if callable(optimizer) else optimizer
    if not isinstance(made, torch.optim.Optimizer):
        raise LohanError(
            f"optimizer= is a {type(made).__name__}: give a name, a class of torch.optim, or a "
            "function that makes one from parameters"
        )
    return made
