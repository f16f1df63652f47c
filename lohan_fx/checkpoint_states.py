"""The optimizer's part of a checkpoint: what is written of it, and what is read is checked against
the optimizer that gets it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lohan_fx import manifest
from lohan_fx.compiled.model import CompiledModel
from lohan_fx.encoded import decode, encode, tensors_in
from lohan_fx.errors import CheckpointError, LohanError
from lohan_fx.manifest import DESCRIPTION
from lohan_fx.runtime.optimizer import UnitOptimizer
from lohan_fx.weights import TensorInfo, kind_of, sharded, text_of

OPTIMIZER = "optimizer.safetensors"
OPTIMIZER_INDEX = "optimizer.safetensors.index.json"


def _names_of(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Names of the parameters of each group."""
    names = {id(p): name for name, p in model.named_parameters()}
    found = []
    for g, group in enumerate(optimizer.param_groups):
        foreign = [tuple(p.shape) for p in group["params"] if id(p) not in names]
        if foreign:
            raise LohanError(
                f"group {g} of the {type(optimizer).__name__} has a parameter of shape "
                f"{foreign[0]} that is not in the {type(model).__name__}: a checkpoint holds one "
                "model and its own optimizer"
            )
        found.append([names[id(p)] for p in group["params"]])
    return found


def describe(
    model: nn.Module, compiled: CompiledModel | None, optimizer: Optimizer, extra: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What JSON has to say of the optimizer, and its tensors. Tensor hyperparameters go to
    `extra`."""
    name = type(optimizer).__name__
    tensors: dict[str, Tensor] = {}
    groups = []
    states = {}
    for g, (group, names) in enumerate(
        zip(optimizer.param_groups, _names_of(model, optimizer), strict=True)
    ):
        values = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        groups.append({"params": names, "values": encode(values, f"{name}.groups.{g}", extra)})
        for p, of in zip(group["params"], names, strict=True):
            if optimizer.state.get(p):
                states[of] = encode(dict(optimizer.state[p]), of, tensors)
    masters = {}
    if compiled is not None and compiled.memory is not None and optimizer is compiled.optimizer:
        for of, master in compiled.memory.states.hidden_masters():
            masters[of] = f"{of}.fp32_master"
            tensors[masters[of]] = master
    described = {"class": name, "groups": groups, "states": states, "masters": masters}
    return described, tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """A group of the optimizer: names of its parameters, and encoded hyperparameters."""

    params: tuple[str, ...]
    values: Mapping[str, Any]


def _is_number(value: Any) -> bool:
    """Whether float() takes it, and it is no text."""
    if isinstance(value, Tensor):
        return not value.dim()
    return isinstance(value, int | float) and not abs(value) > sys.float_info.max


def _is_alike(now: Any, value: Any) -> bool:
    """Whether a hyperparameter may become this value: a number stays one, or begins as None."""
    if now is None or value is None:
        return True
    if isinstance(now, int | float | Tensor):
        return isinstance(value, int | float | Tensor)
    kinds = (kind for kind in (str, list | tuple) if isinstance(now, kind))
    return all(isinstance(value, kind) for kind in kinds)


class SavedStates:
    """The optimizer's part of a checkpoint, checked against an optimizer.

    Attributes:
        store: the tensors.
        masters: parameter → key of its master, where the parameter has less precision.

    Raises:
        CheckpointError: there is none, or it is of other groups.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        path: Path,
        description: Mapping[str, Any],
        checksums: manifest.Checksums,
    ) -> None:
        found = description.get("optimizer")
        if found is None:
            raise CheckpointError(
                f"{path} has no states of an optimizer: it was saved without. Pass "
                "optimizer=False to load weights only"
            )
        self._optimizer = optimizer
        self._path = path
        self._at = f"{path / DESCRIPTION}: optimizer"
        reader = manifest.reader_of(path)
        part = reader.read(dict[str, Any], found, "optimizer")
        self._groups = reader.read(tuple[_Group, ...], part.get("groups"), "optimizer.groups")
        self._entries = reader.read(
            dict[str, dict[str, Any]], part.get("states"), "optimizer.states"
        )
        self.masters = reader.read(dict[str, str], part.get("masters"), "optimizer.masters")
        self._parameters = dict(model.named_parameters())
        self.store = sharded(path, OPTIMIZER, OPTIMIZER_INDEX, checksums)
        self._names = _names_of(model, optimizer)
        saved = [group.params for group in self._groups]
        if [sorted(names) for names in saved] != [sorted(names) for names in self._names]:
            raise CheckpointError(self._other_groups(saved))
        keys = [key for entry in self._entries.values() for key in tensors_in(entry)]
        keys += self.masters.values()
        lost = [k for k in keys if not isinstance(k, str) or k not in self.store.infos]
        if lost:
            raise CheckpointError(f"{self.store.name} lacks {', '.join(map(str, lost[:8]))}")
        for name in self._entries:
            self._entry(name, self.store.infos)
        for name, key in self.masters.items():
            if name not in self._parameters:
                raise CheckpointError(f"{self._at}.masters has {name}, which the model lacks")
            self._check_like(name, key, self.store.infos[key])

    def _entry(self, name: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The states of a parameter, with these in the place of their tensors."""
        at = f"{self._at}.states.{name}"
        return {k: decode(v, tensors, f"{at}.{k}") for k, v in self._entries[name].items()}

    def _check_like(self, name: str, what: str, found: TensorInfo | Tensor) -> None:
        """See that a tensor has the shape of a parameter, and numbers of its kind."""
        p = self._parameters[name]
        if tuple(found.shape) != tuple(p.shape) or kind_of(found) != kind_of(p):
            raise CheckpointError(
                f"{what} in {self.store.name} is {text_of(found)}, the parameter {text_of(p)}"
            )

    def _other_groups(self, saved: Sequence[Sequence[str]]) -> str:
        lines = [
            f"{self._path} is of another optimizer: {len(saved)} groups of "
            f"{[len(names) for names in saved]} parameters, here "
            f"{len(self._names)} of {[len(names) for names in self._names]}"
        ]
        for g, (a, b) in enumerate(zip(saved, self._names, strict=False)):
            only = [("checkpoint", set(a) - set(b)), ("optimizer", set(b) - set(a))]
            lines += [
                f"  group {g}, only in the {where}: {', '.join(sorted(names)[:8])}"
                for where, names in only
                if names
            ]
        return "\n".join(lines)

    def check_elementwise(self) -> None:
        """Refuse states that the present options of the optimizer do not go with."""
        names = [name for names in self._names for name in names]
        unit = UnitOptimizer(self._optimizer, [self._parameters[name] for name in names])
        for i, name in enumerate(names):
            found = self._entry(name, self.store.infos) if name in self._entries else {}
            entry = {k: v for k, v in found.items() if v is not None}
            wanted = {*unit.state_names(i), *unit.scalar_names(i)}
            if entry and set(entry) != wanted:
                raise CheckpointError(
                    f"{self._path} has the states {sorted(entry)} for {name}; this "
                    f"{type(self._optimizer).__name__} keeps {sorted(wanted)}: construct the "
                    "optimizer with the options that it was saved with"
                )
            for key, value in entry.items():
                what = f"{key} of {name}"
                if key in unit.state_names(i) and isinstance(value, TensorInfo | Tensor):
                    self._check_like(name, what, value)
                elif key in unit.state_names(i) or not _is_number(value):
                    raise CheckpointError(f"{self._at}.states has {value!r} as {what}")

    def check_groups(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse hyperparameters that are of another kind than the optimizer's."""
        for g, group in enumerate(self._optimizer.param_groups):
            for key, value in self._values(g, tensors).items():
                if not _is_alike(group.get(key), value):
                    raise CheckpointError(
                        f"{self._at}.groups[{g}].values.{key} is {value!r}, and "
                        f"{type(self._optimizer).__name__} has {group[key]!r} there"
                    )

    def _values(self, g: int, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """The hyperparameters of group `g`."""
        at = f"{self._at}.groups[{g}].values"
        return {k: decode(v, tensors, f"{at}.{k}") for k, v in self._groups[g].values.items()}

    def lend(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Give the optimizer the states of these parameters, as they are in the files."""
        keys = [key for name in parameters for key in tensors_in(self._entries.get(name))]
        tensors = dict(zip(keys, self.store.read(keys), strict=True))
        for name, p in parameters.items():
            if name in self._entries:
                self._optimizer.state[p] = self._entry(name, tensors)

    def load_groups(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the hyperparameters; tensors among them keep their identity."""
        for g, group in enumerate(self._optimizer.param_groups):
            for key, value in self._values(g, tensors).items():
                if isinstance(group.get(key), Tensor):
                    group[key].copy_(torch.as_tensor(value))
                else:
                    group[key] = value

    def load_plainly(self, tensors: Mapping[str, Tensor]) -> None:
        """Load states and hyperparameters by the optimizer's own ``load_state_dict``."""
        self._optimizer.state.clear()
        self.lend(self._parameters)
        groups: list[dict[str, Any]] = []
        states = {}
        for g, group in enumerate(self._optimizer.param_groups):
            first = sum(len(g["params"]) for g in groups)
            indices = range(first, first + len(group["params"]))
            groups.append({**self._values(g, tensors), "params": list(indices)})
            for i, p in zip(indices, group["params"], strict=True):
                entry = self._optimizer.state.pop(p, None)
                if entry is not None:
                    states[i] = {
                        k: v.clone() if isinstance(v, Tensor) else v for k, v in entry.items()
                    }
        try:
            self._optimizer.load_state_dict({"state": states, "param_groups": groups})
        except (
            AttributeError,
            KeyError,
            OverflowError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise CheckpointError(
                f"{self._path} has states that {type(self._optimizer).__name__} does not take "
                f"({error!r})"
            ) from error
