"""Which blocks of a model repeat, and the same model with fewer of them.

Two children of a container repeat each other if everything that tracing can see of them is equal:
classes, parameters, buffers, plain attributes (an attribute that is the child's own index is no
difference), hooks. Blocks that alternate (a global attention after five local ones) repeat with a
longer period; blocks of their own kind may stand before and after.
"""

from __future__ import annotations

import contextlib
import types
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lohan_fx.annotate import block_paths

_INTERNAL = frozenset(nn.Module().__dict__) - {"training"}

_KEPT = 4
"""Periods that replication needs to see."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """Children of container `path`: `before` ones, `count` periods of `period`, `after` ones."""

    path: str
    before: int
    period: int
    count: int
    after: int

    @property
    def num_blocks(self) -> int:
        return self.blocks_at(self.count)

    def blocks_at(self, count: int) -> int:
        """Number of children with `count` periods."""
        return self.before + count * self.period + self.after


def repetitions(model: nn.Module, *, at_least: int = _KEPT + 1) -> tuple[Repetition, ...]:
    """What repeats at least `at_least` times in the model's containers of blocks."""
    shared = Counter(
        id(p) for m in model.modules() for p in (*m._parameters.values(), *m._buffers.values())
    )
    containers = dict.fromkeys(b.rpartition(".")[0] for b in block_paths(model).values())
    found = []
    for path in containers:
        children = model.get_submodule(path)._modules
        if list(children) != [str(i) for i in range(len(children))] or None in children.values():
            continue
        kinds = _kinds([c for c in children.values() if c is not None], shared)
        best = _longest(path, kinds)
        if best is not None and best.count >= at_least:
            found.append(best)
    return tuple(found)


def _longest(path: str, kinds: Sequence[int]) -> Repetition | None:
    """The repetition that leaves the fewest children once it is cut to `_KEPT` periods."""
    best: Repetition | None = None
    for period in range(1, len(kinds) // 2 + 1):
        start = 0
        for i in range(len(kinds)):
            if i >= period and kinds[i] != kinds[i - period]:
                start = i - period + 1
            count = (i + 1 - start) // period
            found = Repetition(
                path=path,
                before=start,
                period=period,
                count=count,
                after=len(kinds) - start - count * period,
            )
            if count > 1 and (best is None or found.blocks_at(_KEPT) < best.blocks_at(_KEPT)):
                best = found
    return best


@contextlib.contextmanager
def cut(model: nn.Module, counts: Mapping[Repetition, int]) -> Iterator[None]:
    """Leave that many periods of each repetition in the model, for the time of the block."""
    saved = []
    try:
        for repetition, count in counts.items():
            container = model.get_submodule(repetition.path)
            children = container._modules
            saved.append((container, children))
            all_of_them = list(children.values())
            front = repetition.before + count * repetition.period
            kept = all_of_them[:front] + all_of_them[len(all_of_them) - repetition.after :]
            container._modules = {str(i): child for i, child in enumerate(kept)}
        yield
    finally:
        for container, children in reversed(saved):
            container._modules = children


# -- what is equal ---------------------------------------------------------------------------


def _kinds(children: Sequence[nn.Module], shared: Counter[int]) -> list[int]:
    """For each child the number of its kind."""
    seen = [_facts(child, shared) for child in children]
    indices = {
        key
        for key, value in seen[0].items()
        if value == ("int", 0) and all(f.get(key) == ("int", i) for i, f in enumerate(seen))
    }
    numbers: dict[Hashable, int] = {}
    kinds = []
    for facts in seen:
        key = tuple((k, v) for k, v in facts.items() if k not in indices)
        kinds.append(numbers.setdefault(key, len(numbers)))
    return kinds


def _facts(child: nn.Module, shared: Counter[int]) -> dict[Hashable, Any]:
    """(module, attribute) → everything that may change what tracing sees."""
    found: dict[Hashable, Any] = {}
    for name, module in child.named_modules():
        found[name, "class"] = type(module)
        for kind in ("_parameters", "_buffers"):
            for key, tensor in getattr(module, kind).items():
                found[name, kind, key] = _tensor_facts(tensor, shared)
        found[name, "hooks"] = tuple(
            id(h) for kind in _HOOKS for h in getattr(module, kind, {}).values()
        )
        for key, value in vars(module).items():
            if key not in _INTERNAL:
                found[name, key] = _plain(value)
    return found


def _tensor_facts(tensor: torch.Tensor | None, shared: Counter[int]) -> Hashable:
    """Shape and kind; which tensor, if several places of the model hold it."""
    if tensor is None:
        return None
    which = id(tensor) if shared[id(tensor)] > 1 else None
    return (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad, which)


def _plain(value: Any) -> Hashable:
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        return (type(value).__name__, value)
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.stride(), value.dtype, value.requires_grad)
    if isinstance(value, types.MethodType):
        return (value.__func__, type(value.__self__))
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return value
    if isinstance(value, (list, tuple)):
        return (type(value), *(_plain(v) for v in value))
    if isinstance(value, Mapping):
        return (type(value), *((str(k), _plain(v)) for k, v in value.items()))
    return (type(value), _text(value))


def _text(value: Any) -> Hashable:
    """What an object says of itself; its identity, unless that is all it says."""
    text = repr(value)
    return None if " at 0x" in text else text
