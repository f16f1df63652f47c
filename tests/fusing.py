"""What tests of fusion share: kernels that are checked, graphs made by hand, a Llama."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from transformers import LlamaConfig, LlamaForCausalLM

import lohan_fx
import lohan_fx.compiled.building
from lohan_fx._compat import fake_mode
from lohan_fx.annotate import (
    is_getitem,
    mark_roots,
    tensors_of,
)
from lohan_fx.fusion import Kernels, align, clusters
from lohan_fx.fusion.clusters import Kernel, _Finder, _replace, _sort

CPU = torch.device("cpu")


def fuse_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests' models are small: fuse all the same."""
    monkeypatch.setattr(clusters, "MIN_BYTES", 0)
    monkeypatch.setattr(align, "MIN_ELEMENTS", 0)


class Checked:
    """Interpreting kernels whose calls must return what was planned, in shape and strides."""

    def __init__(self, device: torch.device, *, compiled: bool) -> None:
        self.kernels = Kernels(device, compiled=compiled)
        self.calls = 0
        self._checked: dict[Kernel, Kernel] = {}

    def __call__(self, body: fx.GraphModule, name: str) -> Kernel:
        kernel = self.kernels(body, name)
        if kernel not in self._checked:
            self._checked[kernel] = self._check(kernel, body, name)
        return self._checked[kernel]

    def _check(self, kernel: Kernel, body: fx.GraphModule, name: str) -> Kernel:
        returned: Any = body.graph.output_node().args[0]
        planned = [n.meta["val"] for n in returned]

        @functools.wraps(kernel)
        def checked(*arguments: Tensor) -> Any:
            found = kernel(*arguments)
            self.calls += 1
            for made, wanted in zip(tensors_of(found), planned, strict=True):
                assert made.shape == wanted.shape, name
                assert made.stride() == wanted.stride(), name
                assert made.dtype == wanted.dtype, name
            return found

        return checked


def check_kernels(patch: pytest.MonkeyPatch, *, compiled: bool = False) -> list[Checked]:
    """Let `lohan_fx.compile` make checked kernels; returns those of each model, as they come."""
    made: list[Checked] = []

    def kernels(device: torch.device, **_: bool) -> Checked:
        made.append(Checked(device, compiled=compiled))
        return made[-1]

    patch.setattr(lohan_fx.compiled.building, "Kernels", kernels)
    return made


def fused_nodes(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if "members" in n.meta and not is_getitem(n)]


class Draft:
    """A graph made node by node; all of one shape, of one block and phase unless told."""

    SHAPE = (8, 8)

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.mode = fake_mode()

    def placeholder(self, name: str) -> fx.Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(self.SHAPE)
        return node

    def __call__(
        self, target: Any, *args: Any, block: str = "a", phase: str = "forward"
    ) -> fx.Node:
        node = self.graph.call_function(target, args)
        values = pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], args)
        with self.mode:
            node.meta.update(val=target(*values), phase=phase, block=block)
        return node

    def finish(self, *results: fx.Node) -> fx.GraphModule:
        self.graph.output(results)
        mark_roots(self.graph)
        return fx.GraphModule({}, self.graph)

    def finder(self) -> _Finder:
        return _Finder(self.graph, CPU)

    def clusters(self) -> list[set[fx.Node]]:
        return [set(c.members) for c in self.finder().clusters()]


def run(module: fx.GraphModule, num_inputs: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    module.recompile()
    return module(*[torch.randn(Draft.SHAPE, generator=generator) for _ in range(num_inputs)])


def replace_all(module: fx.GraphModule, finder: _Finder, *, compiled: bool = False) -> int:
    """What `fuse` does with clusters."""
    kernels = Kernels(CPU, compiled=compiled)
    count = sum(_replace(finder, cluster, module, kernels) for cluster in finder.clusters())
    _sort(module.graph, finder.position)
    for node in reversed(list(module.graph.nodes)):
        if node.op == "call_function" and not node.users:
            module.graph.erase_node(node)
    module.graph.lint()
    return count


def attending_llama(num_layers: int) -> tuple[nn.Module, dict[str, Any]]:
    """Without dropout, which would take the place of a fused attention kernel."""
    config = LlamaConfig(
        num_hidden_layers=num_layers,
        hidden_size=32,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        ids = torch.randint(0, 64, (2, 12))
        return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids, "use_cache": False}
