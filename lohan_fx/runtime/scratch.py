"""What an update takes on its device besides the unit's own buffers: found by a rehearsal.

The unit's update runs on fake tensors of the real shapes, and every storage that an op makes is
counted for as long as it lives. So the figure is that of the user's own optimizer with its options,
and of the chunks in which the unit is updated; no update rule is written down here. Of the chunks
of a large parameter only a few are rehearsed: the others add their scalar state, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lohan_fx._compat import (
    DataDependentOutputException,
    FakeTensorMode,
    StorageWeakRef,
    TorchDispatchMode,
)
from lohan_fx.annotate import Slice, UnitLayout
from lohan_fx.runtime.chunked_update import default_limit
from lohan_fx.runtime.optimizer import UnitOptimizer
from lohan_fx.runtime.update_values import Clip

_CHUNKS = 2
"""Full chunks of a parameter that are rehearsed, if it has more: with less it may not be cut."""


def update_scratch_bytes(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    layout: UnitLayout,
    *,
    mixed: bool,
    device: torch.device,
    clips: bool = False,
) -> int:
    """Most bytes that an update of the unit takes on `device`; of clipped gradients, if `clips`.

    The first update takes more than later ones: it makes the optimizer's state anew.
    """
    arguments = (optimizer, parameters, layout, mixed, device, clips)
    try:
        return _rehearse(FakeTensorMode(), *arguments)
    except DataDependentOutputException:  # the update branches on its state: ASGD
        return _rehearse(nullcontext(), *arguments)


def _rehearse(
    mode: AbstractContextManager[Any],
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    layout: UnitLayout,
    mixed: bool,
    device: torch.device,
    clips: bool,
) -> int:
    clip = Clip(limit=1.0) if clips else None
    limit = default_limit(device)
    slices = [_shortened(s, limit) for s in layout.slices]
    with mode:
        unit = UnitOptimizer(optimizer, parameters, prefer_fused=mixed)
        names = unit.state_names()

        def views(dtype: torch.dtype) -> list[Tensor]:
            kind: Any = {"dtype": dtype, "device": device}
            return [torch.empty_strided(s.shape, s.stride, **kind).zero_() for s in slices]

        masters = views(layout.dtype)
        moments = {name: views(layout.dtype) for name in names}
        state = [{name: moments[name][i] for name in names} for i in range(len(masters))]
        copies = views(layout.copy_dtype) if mixed else masters
        grads = [torch.zeros_like(c) for c in copies]
        with _Meter(device) as meter:
            for _ in range(2):
                if mixed:
                    unit.step_mixed(masters, grads, state, copies, clip=clip)
                else:
                    unit.step(masters, grads, state, clip=clip)
    # Of equal chunks the last one has the most scalars beside it, and those of a second update are
    # all there from the beginning: nothing is missing. At most these few bytes are too many, if the
    # peak comes before, in a parameter that is taken whole, or in a group that needs more.
    left_out = [(a.numel - b.numel) // limit for a, b in zip(layout.slices, slices, strict=True)]
    return meter.peak_bytes + sum(n * unit.scalar_bytes(i) for i, n in enumerate(left_out))


def _shortened(given: Slice, limit: int) -> Slice:
    """A parameter with fewer full chunks, as a vector; itself, if it has few or is not cut."""
    left_out = max(0, given.numel // limit - _CHUNKS)
    whole = torch.empty_strided(given.shape, given.stride, device="meta")
    if not left_out or not whole.is_contiguous():
        return given
    numel = given.numel - left_out * limit
    return replace(given, numel=numel, shape=(numel,), stride=(1,))


class _Meter(TorchDispatchMode):
    """The most bytes at once, on one device, of storages that ops made while the mode was on."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._device = device.type
        self._made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = {
            StorageWeakRef(t.untyped_storage())
            for t in pytree.tree_leaves((args, kwargs))
            if isinstance(t, Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for t in pytree.tree_leaves(result):
            if isinstance(t, Tensor) and t.device.type == self._device:
                ref = StorageWeakRef(t.untyped_storage())
                if ref not in given:
                    self._made[ref] = t.untyped_storage().nbytes()
        self._made = {ref: size for ref, size in self._made.items() if not ref.expired()}
        self.peak_bytes = max(self.peak_bytes, sum(self._made.values()))
        return result
