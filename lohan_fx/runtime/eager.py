"""Running a module's own forward, op by op, while its parameters live in the tiers.

For evaluation that gets no program: its shapes change with every call, or its forward cannot be
captured. Nothing is planned; what is on the device beside activations is one op's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from lohan_fx.errors import StepError

_METADATA = frozenset(
    {
        Tensor.size,
        Tensor.stride,
        Tensor.dim,
        Tensor.numel,
        Tensor.nelement,
        Tensor.element_size,
        Tensor.is_floating_point,
        Tensor.is_complex,
        Tensor.is_contiguous,
        Tensor.data_ptr,
    }
)
_VIEWS = frozenset({"T", "mT", "H", "mH", "real", "imag", "data"})


class ReadParameters(TorchFunctionMode):
    """Every function gets copies of the parameters among its arguments, made for that call.

    Args:
        parameters: those that live elsewhere than on `device`, or in another dtype.
        device: where the forward computes.
        dtype: of floating-point copies; None keeps the parameters'.
    """

    def __init__(
        self, parameters: Iterable[Tensor], device: torch.device, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        self._known = {id(p) for p in parameters}
        self._device = device
        self._dtype = dtype

    def _copy(self, x: Any) -> Any:
        if id(x) not in self._known:
            return x
        return x.detach().to(self._device, self._dtype if x.is_floating_point() else None)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") == "__get__" and id(args[0]) in self._known:
            name = getattr(getattr(func, "__self__", None), "__name__", "")
            if name == "device":
                return self._device
            if name == "dtype" and self._dtype is not None and args[0].is_floating_point():
                return self._dtype
            if name not in _VIEWS:
                return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        target = kwargs.get("out", args[0] if args and name.endswith("_") else None)
        if id(target) in self._known and not name.endswith("__"):
            raise StepError(
                f"forward writes into a parameter ({name}) while it is evaluated op by op, where "
                "parameters are copies: change weights outside of forward"
            )
        args, kwargs = pytree.tree_map(self._copy, (args, kwargs))
        return func(*args, **kwargs)
