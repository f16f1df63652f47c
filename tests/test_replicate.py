"""A deep workload from two shallow ones equals the one of a full trace, or there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from lohan_fx.depth import Repetition, cut, repetitions
from lohan_fx.hardware import HardwareProfile
from lohan_fx.model_arguments import make_tracer
from lohan_fx.models import named
from lohan_fx.replicate import NotRepeatedError, _Name, extrapolate
from lohan_fx.tracer import Tracer
from lohan_fx.workload import Workload
from tests.toys import (
    WIDTH,
    Block,
    Counted,
    Everything,
    Gate,
    Pair,
    Skips,
    Toy,
    meta,
    rows,
    toy,
)
from tests.workloads import gpt_workload

HW = HardwareProfile.preset("rtx4090-12xp5510")


def full(model: nn.Module, *inputs: Any) -> Workload:
    return make_tracer(model, inputs, hw=HW, full_trace=True).workload().workload


def assert_same(found: Workload, wanted: Workload) -> None:
    """All of it; first what says most when it fails."""
    assert [op.name for op in found.ops] == [op.name for op in wanted.ops]
    assert found.ops == wanted.ops
    assert found.units == wanted.units
    assert found.values == wanted.values
    assert list(found.residuals) == list(wanted.residuals)
    assert found == wanted


def check(tracer: Tracer, batch: int | None = None) -> str:
    """Trace with replication and in full; returns how the former was made."""
    traced = tracer.workload(batch)
    tracer.full_trace = True
    tracer._found.clear()
    assert_same(traced.workload, tracer.workload(batch).workload)
    return traced.how


# -- names -----------------------------------------------------------------------------------


@given(
    st.sampled_from(["mm", "conv2d", "_to_copy", "lift_fresh_copy", "view_as_real"]),
    st.integers(0, 200),
    st.sampled_from(["", "_r1", ".3"]),
)
def test_names_of_nodes_come_back(stem: str, number: int, result: str) -> None:
    text = stem + (f"_{number}" if number else "") + result
    name = _Name.parse(text, "node")
    assert name.render(name.numbers) == text
    deeper = [
        n + 7 if k == name.template[: name.template.rindex("_{}")].count("{}") else n
        for k, n in enumerate(name.numbers)
    ]
    assert name.render(deeper) == f"{stem}_{number + 7}{result}"


@pytest.mark.parametrize("text", ["blocks.0", "blocks.11@2", "h.3@14", "transformer"])
def test_names_of_blocks_come_back(text: str) -> None:
    name = _Name.parse(text, "block")
    assert name.render(name.numbers) == text


def test_a_first_node_has_no_number() -> None:
    second = _Name.parse("mm_1", "node")
    assert second.render([0]) == "mm"
    assert _Name.parse("lifted_tensor_0", "node").render([0]) == "lifted_tensor_0"
    with pytest.raises(NotRepeatedError, match="below zero"):
        second.render([-1])


# -- equal to the full trace -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt-13b", pytest.param("dit-0.67b", marks=pytest.mark.slow)])
def test_named_models_with_8_blocks(name: str) -> None:
    tracer = make_tracer(replace(named(name), layers=8), hw=HW)
    how = check(tracer, 2)
    assert how == "with 3 and 4 of the 8 blocks in blocks; the others are replicas"


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)]
)
def test_transformers_with_a_cache_of_keys(dtype: torch.dtype) -> None:
    """Constants, buffers, a list of keys and values among the outputs; one mask for all blocks."""
    config = LlamaConfig(
        num_hidden_layers=8,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=64,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = meta(lambda: LlamaForCausalLM(config))
    ids = torch.empty(2, 8, dtype=torch.long, device="meta")
    tracer = make_tracer(model, {"input_ids": ids, "labels": ids}, hw=HW, dtype=dtype)
    assert "3 and 4 of the 8 blocks in model.layers" in check(tracer)
    masks = [op for op in tracer.workload().workload.ops if op.target == "aten.where.self"]
    assert [op.block for op in masks] == ["model.embed_tokens"]


@pytest.mark.slow
def test_encoder_and_decoder_of_t5() -> None:
    """The first block of each is of its own kind: it has the table of positions."""
    config = T5Config(
        num_layers=3,
        num_decoder_layers=14,
        d_model=32,
        d_ff=48,
        d_kv=16,
        num_heads=2,
        vocab_size=64,
        decoder_start_token_id=0,
        use_cache=False,
    )
    model = meta(lambda: T5ForConditionalGeneration(config))
    ids = torch.empty(2, 8, dtype=torch.long, device="meta")
    how = check(make_tracer(model, {"input_ids": ids, "labels": ids}, hw=HW))
    assert "of the 14 blocks in decoder.block" in how


def alternating() -> nn.Module:
    return Toy([Block() if i % 2 else Gate() for i in range(16)])


def special_ends() -> nn.Module:
    return Toy([Gate(), Block(3), *(Block() for _ in range(11)), Gate()])


def with_dropout() -> nn.Module:
    return Toy([Block(drop=0.1) for _ in range(8)]).train()


def frozen() -> nn.Module:
    model = toy(8)
    for block in model.blocks:
        block.up.requires_grad_(False)
    return model


def tied() -> nn.Module:
    model = toy(9)
    for block in model.blocks:
        block.up.weight = model.blocks[0].up.weight
    return model


@pytest.mark.parametrize(
    ("build", "blocks"),
    [
        (alternating, "6 and 8 of the 16"),
        (special_ends, "6 and 7 of the 14"),
        (with_dropout, "3 and 4 of the 8"),
        (frozen, "3 and 4 of the 8"),
        (tied, "in full"),  # the gradient of the tied weight is summed up from the second on
    ],
)
def test_toys(build: Callable[[], nn.Module], blocks: str) -> None:
    assert blocks in check(make_tracer(meta(build), rows(), hw=HW))


@pytest.mark.slow
def test_two_containers() -> None:
    """Four times four traces, as the second one needs more than three periods."""
    model = meta(lambda: Pair(40, 60))
    how = check(make_tracer(model, (rows(), rows()), hw=HW))
    assert "of the 40 blocks in encoder" in how
    assert "of the 60 blocks in decoder" in how


def test_without_optimizer_and_on_a_cpu() -> None:
    """Gradients are outputs then, and CPU kernels have workspaces."""
    cpu = HW.replace(device_kind="cpu")
    tracer = make_tracer(meta(lambda: toy(8)), rows(), hw=cpu, optimizer=None)
    assert "3 and 4 of the 8" in check(tracer)
    assert any(op.scratch_bytes for op in tracer.workload().workload.ops)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("depth", [3, 4])
def test_hand_made_workloads(depth: int, tied: bool, dropout: bool) -> None:
    """Names of another style: numbers inside of words, none at the end."""

    def gpt(layers: int) -> Workload:
        w = gpt_workload(layers, tied=tied, dropout=dropout)
        ops = tuple(replace(op, reads=tuple(sorted(op.reads))) for op in w.ops)
        return replace(w, name="gpt", ops=ops)

    small, large, deep = (gpt(n) for n in (depth, depth + 1, depth + 9))
    assert_same(extrapolate(small, large, 8), deep)
    assert_same(extrapolate(small, large, 0), large)


def test_two_periods_are_not_enough() -> None:
    """The first of them may be one that is like the others but for what it reads."""
    with pytest.raises(NotRepeatedError, match="three times"):
        extrapolate(*(full(meta(lambda n=n: Pair(2, n)), rows(), rows()) for n in (2, 3)), 4)


# -- what is not replicated ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: Everything(8), "could not be replicated"),
        (lambda: Counted(8), "could not be replicated"),
        (lambda: Toy([Block(k) for k in range(1, 7)]), "too few blocks repeat"),
        (lambda: toy(3), "too few blocks repeat"),
        (lambda: nn.Sequential(nn.Linear(WIDTH, 4), nn.GELU(), nn.Linear(4, 1)), "too few"),
    ],
)
def test_others_are_traced_in_full_and_it_says_so(
    model: Callable[[], nn.Module], reason: str
) -> None:
    how = check(make_tracer(meta(model), rows(), hw=HW))
    assert how.startswith("in full: ")
    assert reason in how


@pytest.mark.slow
def test_mirrored_skips_are_exact_either_way() -> None:
    check(make_tracer(meta(lambda: Skips(8)), rows(), hw=HW))


def test_workloads_of_different_models_do_not_mix() -> None:
    a, b = full(meta(lambda: toy(2)), rows()), full(meta(lambda: toy(3)), rows(8))
    with pytest.raises(NotRepeatedError):
        extrapolate(a, b, 3)
    with pytest.raises(NotRepeatedError, match="fewer inputs"):
        extrapolate(full(meta(lambda: toy(3)), rows()), a, 3)
    with pytest.raises(NotRepeatedError, match="not of one model"):
        extrapolate(a, replace(a, name="other"), 3)


# -- containers ------------------------------------------------------------------------------


def test_repetitions_of_a_model() -> None:
    assert repetitions(meta(special_ends)) == (
        Repetition(path="blocks", before=2, period=1, count=11, after=1),
    )
    assert repetitions(meta(alternating)) == (
        Repetition(path="blocks", before=0, period=2, count=8, after=0),
    )
    assert repetitions(meta(lambda: toy(3))) == ()


def numbered() -> nn.Module:
    model = toy(6)
    for i, block in enumerate(model.blocks):
        block.index = i
    return model


def differing() -> nn.Module:
    model = toy(6)
    for i, block in enumerate(model.blocks):
        block.rate = 0.1 * i
    return model


def hooked() -> nn.Module:
    model = toy(6)
    model.blocks[2].register_forward_hook(lambda *_: None)
    return model


def test_what_makes_blocks_differ() -> None:
    assert repetitions(meta(numbered))[0].count == 6
    assert repetitions(meta(differing)) == ()
    assert repetitions(meta(hooked)) == ()
    evaluated = meta(lambda: toy(6))
    evaluated.blocks[3].eval()  # type: ignore[union-attr, index, operator]
    assert repetitions(evaluated) == ()


def test_cutting_is_undone() -> None:
    model = meta(special_ends)
    before = [name for name, _ in model.named_parameters()]
    (found,) = repetitions(model)

    def inside() -> None:
        with cut(model, {found: 2}):
            kinds = [type(b).__name__ for b in model.blocks]  # type: ignore[union-attr]
            assert kinds == ["Gate", "Block", "Block", "Block", "Gate"]
            assert list(model.blocks._modules) == ["0", "1", "2", "3", "4"]  # type: ignore[union-attr]
            raise KeyError

    with pytest.raises(KeyError):
        inside()
    assert [name for name, _ in model.named_parameters()] == before
