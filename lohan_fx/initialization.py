"""Random initialization of a model on the meta device, one module at a time.

The modules' own code runs: ``reset_parameters()``, or ``_init_weights`` as in transformers. Buffers
that no file has get their values by it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lohan_fx._compat import TorchDispatchMode, storage_key
from lohan_fx.annotate import block_paths
from lohan_fx.errors import LohanError, listed


def realize(tensor: Tensor, data: Tensor) -> None:
    """Make a meta tensor the tensor `data`; who holds it (an optimizer, a tied layer) sees that.

    Raises:
        LohanError: something refers to the tensor in a way that forbids it.
    """
    made = data
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(data, requires_grad=tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    try:
        torch.utils.swap_tensors(tensor, made)
    except RuntimeError as error:
        raise LohanError(
            f"a meta tensor of shape {tuple(tensor.shape)} cannot get its data: {error}"
        ) from error


@dataclass(slots=True)
class _Step:
    """The calls that initialize one module, and the parameters that they write (first names)."""

    module: str
    calls: list[Callable[[], object]]
    writes: list[str]

    def run(self) -> None:
        for call in self.calls:
            try:
                with torch.no_grad():
                    call()
            except Exception as error:
                name = getattr(call, "__qualname__", "its initialization")
                raise LohanError(
                    f"{name} of {self.module or 'the model'} failed: {error}. Load "
                    "weights=path, or initialize the model before lohan_fx.compile"
                ) from error


class Initialization:
    """Random values from the modules' own initialization, one module at a time.

    Each module's ``reset_parameters()`` runs (or ``_reset_parameters()``), in the order of
    ``model.modules()``: the values are those that ``model.to_empty(device="cpu")`` and the same
    calls give eager PyTorch, with the CPU generator in the same state. In a model with
    ``_init_weights(module)``, as those of transformers, that runs for each module instead,
    children first (as ``init_weights()`` does), after a ``reset_parameters()`` of modules of which
    it leaves out something.

    Tied parameters are drawn under each name, as they would be before they are tied, and have the
    values of the first.

    A rehearsal on the meta device says what each call writes, sets the buffers, and finds what
    nothing would initialize. A parameter's memory exists from the first call that writes it until
    the last.

    Raises:
        LohanError: names what no call initializes, what has data already, the call that failed,
            or the call that writes parameters of several blocks.
    """

    def __init__(self, model: nn.Module) -> None:
        real = [n for n, p in model.named_parameters() if not p.is_meta]
        if real:
            raise LohanError(
                f'weights="init" initializes a model on the meta device, and {real[0]} '
                f"({len(real)} in all) has data: build the whole model under torch.device('meta')"
            )
        buffers = [b for b in model.buffers() if b.is_meta]
        with _Rehearsal(model, buffers) as rehearsal:
            self._steps = rehearsal.steps(dict(model.named_modules()))
            written = {n for step in self._steps for n in step.writes}
            lost = [n for n, _ in model.named_parameters() if n not in written]
            rehearsal.check(lost)
        blocks = block_paths(model)
        for step in self._steps:
            of = {blocks.get(n.rpartition(".")[0]) for n in step.writes} - {None}
            if len(of) > 1:
                raise LohanError(
                    f"the initialization of {step.module or 'the model'} writes parameters of "
                    f"{len(of)} blocks at once, which need not fit into memory: give each module a "
                    "reset_parameters() of its own"
                )

    def stream(self, model: nn.Module, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Run the calls, and yield parameters as they are finished."""
        last = {n: i for i, step in enumerate(self._steps) for n in step.writes}
        slots = _slots(model)
        wanted = set(names)
        made: set[str] = set()
        try:
            for i, step in enumerate(self._steps):
                for name in step.writes:
                    if name not in made:
                        slots[name].put(slots[name].like("cpu"))
                        made.add(name)
                step.run()
                for name in step.writes:
                    if last[name] == i:
                        value = slots[name].module._parameters[slots[name].key]
                        slots[name].put(slots[name].parameter)
                        made.remove(name)
                        if name in wanted:
                            assert value is not None
                            yield name, value.detach()
                        del value
        finally:
            for name in made:
                slots[name].put(slots[name].parameter)


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a module holds a parameter. A tied parameter has several, of which one is `first`."""

    module: nn.Module
    key: str
    parameter: nn.Parameter
    first: bool

    def put(self, parameter: nn.Parameter) -> None:
        self.module._parameters[self.key] = parameter

    def like(self, device: str) -> nn.Parameter:
        """A new parameter for this slot, without values."""
        p = self.parameter
        made = nn.Parameter(torch.empty_like(p, device=device), requires_grad=p.requires_grad)
        made.__dict__.update(p.__dict__)
        return made


def _slots(model: nn.Module) -> dict[str, _Slot]:
    found: dict[str, _Slot] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        for key, p in module._parameters.items():
            if p is not None:
                name = f"{path}.{key}" if path else key
                found[name] = _Slot(module, key, p, id(p) not in seen)
                seen.add(id(p))
    return found


class _Rehearsal:
    """Runs initialization with parameters on the meta device, and buffers in memory.

    Random numbers that it draws are not missed by anyone. After an error the buffers are on the
    meta device as before.
    """

    def __init__(self, model: nn.Module, buffers: Sequence[Tensor]) -> None:
        self._model = model
        self._buffers = buffers
        self._names = {id(b): n for n, b in model.named_buffers()}
        self._slots = _slots(model)
        self._written: set[int] = set()
        self._stack = ExitStack()

    def __enter__(self) -> _Rehearsal:
        self._stack.enter_context(torch.random.fork_rng(devices=[]))
        for buffer in self._buffers:
            realize(buffer, torch.empty_like(buffer, device="cpu"))
        for slot in self._slots.values():
            if not slot.first:
                slot.put(slot.like("meta"))
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._stack.close()
        for slot in self._slots.values():
            slot.put(slot.parameter)
        if kind is not None:
            for buffer in self._buffers:
                realize(buffer, torch.empty_like(buffer, device="meta"))

    def check(self, lost: Sequence[str]) -> None:
        """Raise if parameters are `lost`, or buffers were not written."""
        there = {id(b) for b in self._model.buffers()}  # a call may have replaced some
        buffers = [
            f"buffer {self._names[id(b)]}"
            for b in self._buffers
            if id(b) in there and storage_key(b) not in self._written
        ]
        found = [*(f"parameter {n}" for n in lost), *buffers]
        if found:
            raise LohanError(
                f"{listed(found)}: on the meta device, in no file, and initialized by no module. "
                "Give the module that owns it a reset_parameters() that fills it in place; or "
                "keep buffers off the meta device (accelerate.init_empty_weights does, or assign "
                "them after construction), and load parameters with weights=path"
            )

    def steps(self, modules: Mapping[str, nn.Module]) -> list[_Step]:
        """Rehearse the initialization of these modules, in its order."""
        by_storage = {storage_key(p): n for n, p in self._model.named_parameters()}
        found: list[_Step] = []
        for name, module, init in _in_order(self._model):
            if name not in modules:
                continue
            own = {
                storage_key(t)
                for t in (*module.parameters(recurse=False), *module.buffers(recurse=False))
            }
            reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
            calls = [] if init is None else [init]
            wrote = self._run(name, calls)
            if callable(reset) and (init is None or not own <= wrote):
                wrote |= self._run(name, [reset])
                calls.insert(0, reset)
                if init is not None:  # as it will be: the last word is its own
                    self._run(name, [init])
            writes = [by_storage[key] for key in wrote if key in by_storage]
            found.append(_Step(name, calls, sorted(writes)))
        return found

    def _run(self, name: str, calls: list[Callable[[], object]]) -> set[int]:
        """Storages that the calls write."""
        before = {id(p) for p in self._model.parameters()}
        with _Writes() as writes:
            _Step(name, calls, []).run()
        if not {id(p) for p in self._model.parameters()} <= before:
            raise LohanError(
                f"the initialization of {name or 'the model'} replaces parameters: it must fill "
                "those that are there in place (with torch.nn.init)"
            )
        self._written |= writes.storages
        return writes.storages


class _Writes(TorchDispatchMode):
    """Collects the storages that ops write into."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            alias = argument.alias_info
            if alias is not None and alias.is_write and isinstance(value, Tensor):
                self.storages.add(storage_key(value))
        return func(*args, **(kwargs or {}))


def _in_order(model: nn.Module) -> Iterator[tuple[str, nn.Module, Callable[[], object] | None]]:
    """(name, module, its owner's ``_init_weights`` for it) in the order of initialization."""
    seen: set[int] = set()

    def children_first(
        name: str, module: nn.Module, init: Callable[[nn.Module], object] | None
    ) -> Iterator[tuple[str, nn.Module, Callable[[], object] | None]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        init = getattr(module, "_init_weights", init)
        for key, child in module.named_children():
            yield from children_first(f"{name}.{key}" if name else key, child, init)
        yield name, module, None if init is None else partial(init, module)

    if any(hasattr(m, "_init_weights") for m in model.modules()):
        yield from children_first("", model, None)
    else:
        for name, module in model.named_modules():
            yield name, module, None


def restore_buffers(model: nn.Module, loaded: Container[int]) -> None:
    """Give meta buffers that are in no file their values, by their modules' initialization."""
    buffers = {id(b): b for b in model.buffers() if b.is_meta and id(b) not in loaded}
    owners = {
        n: m
        for n, m in model.named_modules()
        if any(id(b) in buffers for b in m.buffers(recurse=False))
    }
    if buffers:
        with _Rehearsal(model, list(buffers.values())) as rehearsal:
            rehearsal.steps(owners)
            rehearsal.check([])
