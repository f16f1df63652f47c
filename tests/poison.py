"""Runs the two halves of a rewritten program with an engine that destroys what must not be read.

A released residual is overwritten with garbage on the spot, a buffer under way holds garbage until
its wait. Whatever a pass gets wrong then shows in the numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lohan_fx.joint_graph import OutputRole
from lohan_fx.passes import PassManager, Rewrite, pipeline
from lohan_fx.passes.direct_calls import direct_calls
from lohan_fx.passes.split import split
from lohan_fx.passes.verify import check_invariants, check_program
from lohan_fx.plan import Plan
from lohan_fx.runtime.ops import engines
from tests.captured import Step


def spoil(t: Tensor) -> None:
    """NaN as floats, −1 as integers, in the whole storage behind a tensor."""
    torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()).fill_(255)


@dataclass
class PoisonEngine:
    """What the ops of a program call; see `lohan_fx.runtime.engine`."""

    rewrite: Rewrite
    parameters: dict[str, Tensor]
    away: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    buffers: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    fetched: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)

    def offload(self, x: Tensor, slot: int) -> None:
        assert slot not in self.away
        self.away[slot] = (x, x.clone())

    def release(self, slot: int) -> None:
        x, copied = self.away[slot]
        assert torch.equal(x.nan_to_num(), copied.nan_to_num()), "changed while it was copied"
        spoil(x)

    def prefetch(self, slot: int) -> Tensor:
        x, _ = self.away[slot]
        buffer = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype)
        spoil(buffer)
        self.buffers[slot] = buffer
        return buffer

    def wait(self, slot: int) -> None:
        self.buffers.pop(slot).copy_(self.away.pop(slot)[1])

    def fetch_unit(self, unit: int, window: int) -> Tensor:
        layout = self.rewrite.layouts[unit]
        flat = torch.empty(layout.numel, dtype=layout.copy_dtype)
        spoil(flat)
        self.fetched[unit, window] = flat
        return flat

    def wait_unit(self, flat: Tensor, unit: int, window: int) -> list[Tensor]:
        assert self.fetched.pop((unit, window)) is flat
        views = []
        for s in self.rewrite.layouts[unit].slices:
            view = flat.as_strided(s.shape, s.stride, s.offset)
            view.copy_(self.parameters[s.name])
            views.append(view)
        return views

    def host_view(self, unit: int, num_bytes: int) -> list[Tensor]:
        return [self.parameters[s.name] for s in self.rewrite.layouts[unit].slices]

    def write_gradient(self, gradients: Sequence[Tensor], unit: int, indices: list[int]) -> None:
        for gradient, index in zip(gradients, indices, strict=True):
            self._emit(gradient, unit, index)

    def emit_written(self, unit: int) -> None:
        self.log.append(self.rewrite.layouts[unit].name)

    def emit_gradients(self, gradients: Sequence[Tensor | None], unit: int) -> None:
        self.log.append(self.rewrite.layouts[unit].name)
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self._emit(gradient, unit, index)

    def _emit(self, gradient: Tensor, unit: int, index: int) -> None:
        name = self.rewrite.layouts[unit].slices[index].name
        assert name not in self.gradients
        self.gradients[name] = gradient.clone()

    def release_gradients(self, unit: int) -> None:
        assert self.rewrite.layouts[unit].name in self.log


Outcome = dict[tuple[str, str, int], Any]
"""(kind, first name or "", index) → value, of everything that a step returns or emits."""


def assert_same(have: Outcome, want: Outcome) -> None:
    assert have.keys() == want.keys()
    for key, value in want.items():
        if isinstance(value, Tensor):
            assert torch.equal(have[key], value), key
        else:
            assert have[key] == value, key


class Runner:
    """Inputs of one step, the same at every run; those with a fraction in its compute dtype."""

    def __init__(self, step: Step) -> None:
        self.step = step
        model = step.model
        self.parameters = {
            n: self._cast(p.detach()) for n, p in model.named_parameters(remove_duplicate=False)
        }
        self.buffers = dict(model.named_buffers(remove_duplicate=False))
        self.inputs = pytree.tree_leaves(((), dict(step.kwargs)))
        self.tangents: dict[int, Tensor] = {}
        for node in step.captured.graph.graph.find_nodes(op="placeholder"):
            if node.meta["role"].kind == "tangent":
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(3)
                    tangent = self._cast(torch.rand(node.meta["val"].shape))
                self.tangents[node.meta["role"].index] = tangent

    def _cast(self, x: Tensor) -> Tensor:
        dtype = self.step.captured.compute_dtype
        return x.to(dtype) if dtype is not None and x.is_floating_point() else x

    def argument(self, role: Any) -> Any:
        if role.kind == "parameter":
            return self.parameters[role.target]
        if role.kind == "buffer":
            return self.buffers[role.target].clone()
        if role.kind == "tangent":
            return self.tangents[role.index].clone()
        value = self.inputs[role.index]
        return self._cast(value.detach()).clone() if isinstance(value, Tensor) else value

    def plain(self) -> Outcome:
        """The captured graph, not rewritten."""
        captured = self.step.captured
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            results = captured.graph(*[self.argument(r) for r in captured.inputs])
        return self._outcome(zip(results, captured.outputs, strict=True))

    def rewritten(self, plan: Plan, *, direct: bool = False) -> tuple[Outcome, Rewrite]:
        """The two halves of the plan's program; `direct`: as they are when a model runs."""
        rewrite = self.step.rewrite(plan)
        engine = PoisonEngine(rewrite, self.parameters)
        rewrite.run = engines.add(engine)  # type: ignore[arg-type]
        PassManager(passes=pipeline(), verify=check_invariants)(rewrite)
        check_program(rewrite)
        halves = split(rewrite)
        if direct:
            for half in (halves.forward, halves.backward):
                if half is not None:
                    direct_calls(half)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            results = list(halves.forward([self.argument(r) for r in halves.forward_inputs]))
            saved = results[len(halves.forward_outputs) :]
            assert len(saved) == halves.num_saved
            outcome = self._outcome(zip(results, halves.forward_outputs, strict=False))
            del results
            if halves.backward is not None:
                given = [self.argument(r) for r in halves.backward_inputs] + saved
                del saved
                gradients = halves.backward(given)
                assert not given, "inputs must die at their last use"
                outcome |= self._outcome(zip(gradients, halves.backward_outputs, strict=True))
        assert not engine.away
        assert not engine.buffers
        assert not engine.fetched
        outcome |= {("gradient", name, -1): g for name, g in engine.gradients.items()}
        return outcome, rewrite

    def _outcome(self, results: Iterable[tuple[Any, OutputRole]]) -> Outcome:
        first = self.step.captured.first_name
        return {
            (r.kind, first(r.target) if r.kind == "gradient" and r.target else r.target, r.index): v
            for v, r in results
            if r.kind != "gradient" or v is not None
        }
