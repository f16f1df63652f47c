"""Compile the body of a fused op, once for each structure."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from lohan_fx import _compat
from lohan_fx.fusion.clusters import Kernel

logger = logging.getLogger("lohan_fx")


class Kernels:
    """Makes kernels, and remembers them by structure: all blocks of a model share theirs.

    Args:
        device: where they run; what they allocate there besides their results is measured.
        compiled: by Inductor; otherwise the body is interpreted, which fuses nothing and is exact
            to the bit.
    """

    def __init__(self, device: torch.device, *, compiled: bool) -> None:
        self._device = device
        self._compiled = compiled
        self._made: dict[str, Kernel | None] = {}

    @property
    def count(self) -> int:
        """Different kernels so far."""
        return sum(kernel is not None for kernel in self._made.values())

    def __call__(self, body: fx.GraphModule, name: str) -> Kernel | None:
        """The kernel of a body; None, said once a structure, if it cannot be compiled."""
        key = structure(body)
        if key not in self._made:
            try:
                self._made[key] = self._make(body, f"{name}_{len(self._made)}")
            except Exception as error:  # noqa: BLE001 - compilers fail in many ways; ops run as they are
                first = str(error).splitlines()[0] if str(error) else type(error).__name__
                logger.warning("lohan_fx: %s is not fused: %s", name, first)
                self._made[key] = None
        return self._made[key]

    def _make(self, body: fx.GraphModule, name: str) -> Kernel:
        inputs = [n.meta["val"] for n in body.graph.find_nodes(op="placeholder")]
        returned: Any = body.graph.output_node().args[0]
        wanted = [n.meta["val"] for n in returned]
        run: Callable[[list[Tensor]], Sequence[Tensor]]
        scratch_bytes = 0
        if self._compiled:
            run, strides = _compat.inductor_kernel(body, inputs)
            if self._device.type == "cuda":
                scratch_bytes, made = _rehearse(run, inputs, wanted[0].device)
            else:
                made = _announced(strides, wanted, name)
            shapes = _missing_shapes(made, wanted, name)
            if any(shape is not None for shape in shapes):
                run = partial(_shaped, run, shapes)
        else:
            run = _compat.boxed(body, body.graph)
        kernel = _callable(run, len(wanted), name)
        kernel.scratch_bytes = scratch_bytes  # type: ignore[attr-defined]
        return kernel


def _callable(
    run: Callable[[list[Tensor]], Sequence[Tensor]], num_results: int, name: str
) -> Kernel:
    """A function with the name under which programs print it."""

    def single(*arguments: Tensor) -> Tensor:
        return run(list(arguments))[0]

    def several(*arguments: Tensor) -> tuple[Tensor, ...]:
        return tuple(run(list(arguments)))

    made: Any = single if num_results == 1 else several
    made.__name__ = made.__qualname__ = name
    return made  # type: ignore[no-any-return]


def _shaped(
    run: Callable[[list[Tensor]], Sequence[Tensor]],
    shapes: Sequence[torch.Size | None],
    arguments: list[Tensor],
) -> list[Tensor]:
    """Run, and give results the shapes that Inductor left out (of sums that keep dimensions)."""
    return [
        made if shape is None else made.view(shape)
        for made, shape in zip(run(arguments), shapes, strict=True)
    ]


def _rehearse(
    run: Callable[[list[Tensor]], Sequence[Tensor]], inputs: Sequence[Tensor], device: torch.device
) -> tuple[int, Sequence[Tensor]]:
    """Run once on zeros: bytes allocated at once besides results; and the results."""
    given = [
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in inputs
    ]
    for t in given:
        t.zero_()
    run(list(given))  # the first run may try several variants, in memory of their own
    stats = partial(torch.cuda.memory_stats, device)
    before = stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats(device)
    results = run(list(given))
    torch.cuda.synchronize(device)
    peak = stats()["requested_bytes.all.peak"] - before
    held = stats()["requested_bytes.all.current"] - before
    return max(0, int(peak - held)), results


def _announced(
    strides: Sequence[tuple[int, ...] | None], wanted: Sequence[Tensor], name: str
) -> list[Tensor]:
    """What the kernel will return, by the strides that Inductor tells: on a CPU a rehearsal takes
    as long as the op itself."""
    made = []
    for found, planned in zip(strides, wanted, strict=True):
        if found is None or len(found) != planned.dim():
            raise RuntimeError(f"Inductor made strides {found} of {name}, not {planned.stride()}")
        made.append(torch.empty_strided(planned.shape, found, dtype=planned.dtype, device="meta"))
    return made


def _missing_shapes(
    results: Sequence[Tensor], wanted: Sequence[Tensor], name: str
) -> list[torch.Size | None]:
    """The shapes of those results that are laid out as planned but for their shape. Checks that the
    others are as planned."""
    shapes: list[torch.Size | None] = []
    for made, planned in zip(results, wanted, strict=True):
        same = _form(made) == _form(planned)
        if not same and not _same_memory(made, planned):
            raise RuntimeError(f"Inductor made {_form(made)} of {name}, not {_form(planned)}")
        shapes.append(None if same else planned.shape)
    return shapes


def _same_memory(made: Tensor, planned: Tensor) -> bool:
    """Whether two tensors have the same elements in the same order, whatever their shapes."""
    return (
        made.dtype == planned.dtype
        and made.numel() == planned.numel()
        and made.is_contiguous()
        and planned.is_contiguous()
        and _form(made)[3:] == _form(planned)[3:]
    )


def _form(tensor: Tensor) -> tuple[Any, ...]:
    """What a plan takes for granted of a result."""
    size = tensor.untyped_storage().nbytes()
    return (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), size)


def structure(body: fx.GraphModule) -> str:
    """What decides the kernel: ops, constants, and layouts of inputs and results."""
    names = {node: f"v{k}" for k, node in enumerate(body.graph.nodes)}
    lines = []
    for node in body.graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _Name(names[n]))
        line = f"{names[node]} = {node.op} {node.target if node.op != 'placeholder' else ''}"
        lines.append(f"{line} {args} {kwargs}{_layout(node)}")
    return "\n".join(lines)


class _Name(str):
    """Printed as it is, unlike a string that is an argument."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _layout(node: fx.Node) -> str:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return ""
    return f" {value.dtype} {tuple(value.shape)} {value.stride()} {value.storage_offset()}"
