"""Flat buffers of one unit, and views of them: one a parameter."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from lohan_fx._compat import storage_users
from lohan_fx.annotate import Slice
from lohan_fx.errors import LohanError
from lohan_fx.runtime._memory import tensor_over


def views_of(flat: Tensor, slices: Sequence[Slice]) -> list[Tensor]:
    """One view a parameter, with the parameter's shape and strides."""
    base = flat.storage_offset()
    return [flat.as_strided(s.shape, s.stride, base + s.offset) for s in slices]


class _HostBytes:
    """Registered host memory, shown to CUDA under its own address (unified addressing)."""

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat  # keeps the memory alive
        self.__cuda_array_interface__ = {
            "shape": (flat.numel() * flat.element_size(),),
            "typestr": "|u1",
            "data": (flat.data_ptr(), False),
            "version": 3,
        }


def on_device(flat: Tensor, device: torch.device) -> Tensor:
    """Flat host memory as a tensor on `device`, without a copy (MemFerry's direct host access).

    Raises:
        LohanError: the memory is not pinned, so the device cannot reach it.
    """
    if device.type == "cpu":
        return flat
    if not flat.is_pinned():
        raise LohanError(
            "direct host access needs pinned memory, and the system refused to pin it: raise the "
            "limit on locked memory (ulimit -l), or choose a strategy without direct access"
        )
    return torch.as_tensor(_HostBytes(flat), device=device).view(flat.dtype)


def alone(view: Tensor) -> Tensor:
    """The same memory as a storage of its own, so that saving a parameter saves nothing else."""
    if view.device.type != "cpu" or not view.numel():
        return view
    num_bytes = view.numel() * view.element_size()
    memory = tensor_over(view.data_ptr(), num_bytes, partial(_hold, view))
    return memory.view(view.dtype).as_strided(view.shape, view.stride())


def _hold(_: Tensor) -> None:
    """Keeps what a storage lies in alive for as long as the storage."""


@dataclass(slots=True)
class Lent:
    """A parameter's part of a flat as users get it, who may keep it: a storage of its own.

    `users` are the tensors that share it while no user does.
    """

    memory: Tensor
    users: int

    @classmethod
    def of(cls, view: Tensor) -> Lent:
        memory = alone(view)
        return cls(memory, storage_users(memory))


@dataclass(slots=True)
class Flats:
    """The buffers of one unit somewhere: at rest, or in a staging buffer during its update.

    `compute` is the master where that is its own copy, or no copy is kept. `gradient` is where
    gradients add up, in the master's dtype; None if they do not. `shown` is what parameters have
    been given of these flats, `lent` what the optimizer has, by state.
    """

    compute: Tensor
    master: Tensor
    moments: dict[str, Tensor]
    gradient: Tensor | None = None
    shown: list[Lent] = field(default_factory=list)
    lent: dict[str, list[Lent]] = field(default_factory=dict)

    @property
    def weights(self) -> list[Tensor]:
        """The compute copy and the master, which may be one tensor."""
        return [self.compute] if self.master is self.compute else [self.compute, self.master]

    def copy_from(self, other: Flats) -> None:
        """Copy all of another's flats but the one in which gradients add up; cast a compute copy
        that the other does not keep."""
        self.master.copy_(other.master)
        if self.compute is not self.master:
            kept = other.compute is not other.master
            self.compute.copy_(other.compute if kept else self.master)
        for name, flat in self.moments.items():
            flat.copy_(other.moments[name])

    def is_held(self) -> bool:
        """Whether somebody else looks at what parameters and the optimizer were given."""
        given = itertools.chain.from_iterable(self.lent.values())
        return any(_shares(part, 1) for part in self.shown) or any(
            _shares(part, 0) for part in given
        )


def _shares(part: Lent, num_own: int) -> bool:
    """Whether more than `num_own` tensors outside share it. (A tensor without elements has no
    storage of its own, and shows nothing.)"""
    memory = part.memory
    return memory.numel() != 0 and storage_users(memory) > part.users + num_own
