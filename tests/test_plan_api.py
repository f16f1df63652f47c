"""`lohan_fx.plan`: planning without a machine, and what it refuses."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from transformers import LlamaConfig

import lohan_fx
from lohan_fx import footprint
from lohan_fx._compat import FakeTensorMode
from lohan_fx.api import LohanModule
from lohan_fx.bounds import step_bound
from lohan_fx.errors import (
    CaptureError,
    HardwareError,
    InsufficientMemoryError,
    LohanError,
    PlanError,
    UnsupportedOptimizerError,
)
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.model_arguments import num_states
from lohan_fx.models import family_of, is_known, named, names
from lohan_fx.plan import TIERS, Plan
from lohan_fx.planned import Planned, retimed
from lohan_fx.planners import PlannerOptions, make_plan
from lohan_fx.planning import next_batch
from lohan_fx.program import waiting_bytes
from lohan_fx.report import render
from lohan_fx.simulate import simulate
from lohan_fx.workspace import workspace_bytes
from tests.toys import WIDTH, Block, Toy, made, meta, rows, small, toy
from tests.workloads import gpt_workload, small_hardware

HW = small_hardware()
SERVER = HardwareProfile.preset("rtx4090-12xp5510")
CPU = small_hardware(device_kind="cpu")

plan = partial(lohan_fx.plan, strategy="lohan")
"""With a quicker strategy than the default, whatever else may be asked for."""


def plan_toy(**more: Any) -> Planned:
    return plan(meta(lambda: toy(8)), rows(), **{"hw": HW, **more})


@pytest.fixture(scope="module")
def planned() -> Planned:
    return plan_toy(batch=64)


# -- what comes out --------------------------------------------------------------------------


def test_it_is_the_plan_that_compile_makes() -> None:
    model, x = toy(1), torch.randn(8, WIDTH)
    hw = small_hardware(device_kind="cpu", ssd=False)
    memory = {"device": "14KiB"}
    found = lohan_fx.plan(model, x, hw=hw, memory=memory)
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = lohan_fx.compile(model, hw=hw, optimizer=optimizer, memory=memory)
    program = compiled.lohan.prepare(x)  # type: ignore[union-attr, operator]
    assert found.workload == program.workload
    assert found.plan == program.plan
    assert found.plan.count("keep") < len(found.workload.residuals)
    compiled.lohan.close()  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("options", [{"accumulate": 4}, {"gradients": "kept"}])
def test_it_counts_sums_of_gradients(options: dict[str, Any]) -> None:
    model, x = toy(2), torch.randn(8, WIDTH)
    hw = small_hardware(device_kind="cpu", ssd=False)
    planned = lohan_fx.plan(model, x, hw=hw, schedule="serial", accumulates=True)
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = lohan_fx.compile(model, hw=hw, optimizer=optimizer, schedule="serial", **options)
    program = compiled.lohan.prepare(x)  # type: ignore[union-attr, operator]
    assert planned.workload == program.workload
    assert planned.plan == program.plan
    assert all(u.accumulator_bytes == 4 * u.num_params for u in planned.workload.units)
    compiled.lohan.close()  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("short", [0, 1])
def test_it_has_the_schedule_that_clipping_has(short: int) -> None:
    """Second copies, or late updates if host memory has no room for them."""
    model, x = toy(2), torch.randn(8, WIDTH)
    hw = small_hardware(device_kind="cpu", ssd=False)
    options: dict[str, Any] = {"hw": hw, "states": "host", "strategy": "keep-all"}
    whole = lohan_fx.plan(model, x, clips=True, **options)
    assert whole.plan.schedule == "speculative"
    memory = {"host": whole.plan.prediction.peak_host_bytes - short}
    found = lohan_fx.plan(model, x, clips=True, memory=memory, **options)
    assert found.plan.schedule == ("deferred" if short else "speculative")
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = lohan_fx.compile(
        model, optimizer=optimizer, clip_grad_norm=1.0, memory=memory, **options
    )
    assert isinstance(compiled, LohanModule)
    assert compiled.lohan.prepare(x).plan == found.plan
    compiled.lohan.close()
    with pytest.raises(LohanError, match="schedule 'overlapped' updates units before"):
        lohan_fx.plan(model, x, clips=True, schedule="overlapped", **options)
    with pytest.raises(LohanError, match="clips=True needs an optimizer"):
        lohan_fx.plan(model, x, clips=True, optimizer=None, **options)


def test_a_plan_can_be_given_to_compile() -> None:
    model, x = made()
    given = plan(model, x, hw=CPU, strategy="swap-all", memory={"device": "24KiB"}).plan
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = lohan_fx.compile(model, hw=CPU, optimizer=optimizer, plan=given)
    compiled(x).backward()
    optimizer.step()
    assert compiled.plan == given  # type: ignore[comparison-overlap]
    compiled.lohan.close()  # type: ignore[union-attr, operator]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"schedule": "serial"}, "the plan was made with schedule 'optimized'"),
        (
            {"clip_grad_norm": 1.0},
            "so make another plan, with clips=True (lohan-fx plan --clip) or",
        ),
        ({"gradients": "kept"}, "so make another plan, with schedule="),
        ({"states": "ssd"}, "a plan says itself where states are"),
        ({"schedule": "serail", "clip_grad_norm": 1.0}, "'serail' is none of auto, serial"),
    ],
)
def test_a_plan_and_options_that_contradict_it(options: dict[str, Any], why: str) -> None:
    model, x = small()
    given = plan(model, x, hw=CPU, strategy="swap-all").plan
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(LohanError, match=re.escape(why)):
        lohan_fx.compile(model, hw=CPU, optimizer=optimizer, plan=given, **options)


def test_a_plan_of_another_model() -> None:
    model, x = small()
    given = replace(plan(model, x, hw=CPU, strategy="swap-all").plan, workload="Other")
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = lohan_fx.compile(model, hw=CPU, optimizer=optimizer, plan=given)
    with pytest.raises(PlanError, match="is of Other, not of"):
        compiled(x)


@pytest.mark.parametrize(
    ("tier", "forwards"), [("device", 1), ("host", 1), ("ssd", 1), ("device", 2), ("host", 2)]
)
def test_a_plan_over_budget(tier: Any, forwards: int) -> None:
    """A plan is held to the memory that compile may use, for all forwards that may wait at once."""
    model, x = made()
    swap_to: Any = "ssd" if tier == "ssd" else "host"
    found = plan(model, x, hw=CPU, strategy="swap-all", accumulates=forwards > 1, swap_to=swap_to)
    if tier == "device":
        waiting = waiting_bytes(found.program)
    else:
        slots = footprint.slots(found.workload, found.plan, tier)
        waiting = sum(size for _, size in slots.values())
    assert waiting > 0
    needed = getattr(found.plan.prediction, f"peak_{tier}_bytes") + (forwards - 1) * waiting
    for short in (0, 1):
        if tier == "ssd" and not short:
            continue  # there is none
        optimizer = torch.optim.AdamW(model.parameters())
        compiled = lohan_fx.compile(
            model,
            hw=CPU,
            optimizer=optimizer,
            plan=found.plan,
            forwards=forwards,
            memory={tier: needed - short},
        )
        assert isinstance(compiled, LohanModule)
        if short:
            with pytest.raises(InsufficientMemoryError, match="the plan given to compile") as error:
                compiled.lohan.prepare(x)
            assert (error.value.tier, error.value.need_bytes) == (tier, needed)
            assert ("forwards=2" if forwards == 2 else "the memory= that it") in str(error.value)
        else:
            compiled.lohan.prepare(x)
        compiled.lohan.close()


def test_a_plan_of_less_than_what_runs() -> None:
    """Made for the same memory, but not with sums of gradients: it is not memory= that is wrong."""
    model, x = made()
    given = plan(model, x, hw=CPU, strategy="swap-all").plan
    memory = {"host": given.prediction.peak_host_bytes}
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = lohan_fx.compile(
        model, hw=CPU, optimizer=optimizer, plan=given, memory=memory, accumulate=2
    )
    assert isinstance(compiled, LohanModule)
    with pytest.raises(InsufficientMemoryError, match="accumulates=True of lohan_fx"):
        compiled.lohan.prepare(x)
    compiled.lohan.close()


def test_a_plan_and_an_evaluation_first() -> None:
    """Where units are is settled by what runs first: so a step that trains is prepared before."""
    model, x = made()
    given = plan(model, x, hw=CPU, strategy="swap-all").plan
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = lohan_fx.compile(model, hw=CPU, optimizer=optimizer, plan=given)
    assert isinstance(compiled, LohanModule)
    with torch.no_grad(), pytest.raises(PlanError, match=r"call model.lohan.prepare\(…\) with"):
        compiled(x)
    assert compiled.lohan.prepare(x).plan == given
    with torch.no_grad():
        compiled(x)
    compiled.lohan.close()


def test_a_given_plan_has_the_peaks_of_what_runs() -> None:
    """Not those that its file says, of another optimizer or version."""
    model, x = small()
    given = plan(model, x, hw=CPU, strategy="swap-all").plan
    peaks = {f"peak_{tier}_bytes": 1 for tier in TIERS}
    old = replace(given, prediction=replace(given.prediction, **peaks))
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = lohan_fx.compile(model, hw=CPU, optimizer=optimizer, plan=old)
    assert isinstance(compiled, LohanModule)
    found = compiled.lohan.prepare(x).plan
    assert replace(found, notes=given.notes) == given
    assert "expected peaks of 1 B on the device, 1 B in host memory" in found.notes[0]
    compiled.lohan.close()


@pytest.mark.parametrize("strategy", ["swap-all", "keep-all"])
def test_a_plan_of_another_batch_says_so(strategy: str) -> None:
    """It has the same ops and values by name, so nothing refuses it: but all that it predicts, and
    its notes, would be of the other batch."""
    model, x = small()
    given = plan(model, x, hw=CPU, strategy=strategy).plan
    larger = torch.cat([x, x, x, x])
    there = plan(model, larger, hw=CPU, strategy=strategy).plan
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = lohan_fx.compile(model, hw=CPU, optimizer=optimizer, plan=given)
    assert isinstance(compiled, LohanModule)
    found = compiled.lohan.prepare(larger).plan
    peak = found.prediction.peak_device_bytes  # windows may stand elsewhere in a plan of its own
    assert peak > given.prediction.peak_device_bytes
    assert found.prediction == replace(there.prediction, peak_device_bytes=peak)
    assert found.notes[1:] == given.notes
    assert "made for another step than this one (other shapes" in found.notes[0]
    assert "note: the plan given to compile was made for another step" in compiled.report()
    compiled.lohan.close()


def test_a_plan_of_another_machine_and_strategy() -> None:
    """What is predicted is of the machine that runs it; what it was asked to plan with, plans what
    the plan is not for."""
    model, x = small()
    slow = replace(CPU, h2d_bytes_per_s=CPU.h2d_bytes_per_s / 100)
    given = plan(model, x, hw=CPU, strategy="swap-all").plan
    there = plan(model, x, hw=slow, strategy="swap-all").plan
    assert there.prediction.step_s > 1.01 * given.prediction.step_s
    optimizer = torch.optim.AdamW(model.parameters())
    for strategy in ("lohan", "swap-all"):
        compiled = lohan_fx.compile(
            model, hw=slow, optimizer=optimizer, plan=given, strategy=strategy
        )
        assert isinstance(compiled, LohanModule)
        found = compiled.lohan.prepare(x).plan
        assert found.prediction.step_s == pytest.approx(there.prediction.step_s)
        notes = [note for note in found.notes if "strategy='lohan' did not make this plan" in note]
        assert len(notes) == (strategy == "lohan")
        assert found.notes[len(notes) :] == given.notes
        compiled.lohan.close()


def test_a_plan_that_was_kept_is_run_without_planning(tmp_path: Path) -> None:
    def run(**options: Any) -> Plan:
        model, x = small()
        optimizer = torch.optim.AdamW(model.parameters())
        compiled = lohan_fx.compile(model, hw=CPU, optimizer=optimizer, **options)
        assert isinstance(compiled, LohanModule)
        compiled(x).backward()
        optimizer.step()
        found = compiled.plan
        compiled.lohan.close()
        return found

    kept = run(strategy="swap-all")
    kept.save(tmp_path / "plan.json")

    def never(*_: object) -> Plan:
        pytest.fail("it plans")

    assert run(plan=tmp_path / "plan.json", strategy=never) == kept


def test_figures_of_a_plan(planned: Planned) -> None:
    simulation = simulate(planned.workload, planned.plan, HW)
    assert planned.step_s == simulation.step_s
    assert (planned.batch, planned.num_items, planned.items) == (64, 64, "samples")
    assert planned.items_per_s == pytest.approx(64 / simulation.step_s)
    done = planned.workload.forward_flops + planned.workload.backward_flops
    assert planned.flops_per_s == pytest.approx(done / simulation.step_s)
    assert planned.compute_dtype == "bfloat16"
    assert planned.bound_s <= planned.step_s
    assert planned.gap == pytest.approx(planned.step_s / planned.bound_s - 1)
    assert planned.ideal_s <= planned.step_s
    assert planned.traced == "with 3 and 4 of the 8 blocks in blocks; the others are replicas"


def test_report_has_all_of_it(planned: Planned) -> None:
    text = planned.report()
    assert str(planned) == text
    for part in ("Toy, lohan", "64 (64 samples)", "no plan is faster than", "blocks.0", "device"):
        assert part in text
    assert "traced: with 3 and 4 of the 8 blocks" in text
    assert all(len(line) <= 110 for line in text.splitlines())


def test_mixed_precision_is_accounted_for() -> None:
    """Table II: 2P of compute copy, 12P of master and Adam states, 2P of gradients."""
    plain, adam, sgd, none = (
        plan(meta(lambda: toy(2)), rows(), hw=HW, **more).workload.units
        for more in (
            {"dtype": None},
            {},
            {"optimizer": partial(torch.optim.SGD, momentum=0.9)},
            {"optimizer": None},
        )
    )
    for p, a, s, n in zip(plain, adam, sgd, none, strict=True):
        assert (a.compute_bytes, a.state_bytes) == (2 * a.num_params, 12 * a.num_params)
        assert a.gradient_bytes <= a.compute_bytes
        assert (s.compute_bytes, s.state_bytes) == (2 * s.num_params, 8 * s.num_params)
        assert (p.compute_bytes, p.state_bytes) == (4 * p.num_params, 8 * p.num_params)
        assert (n.compute_bytes, n.state_bytes) == (4 * n.num_params, 0)
        assert p.own_master
        assert not n.trainable


def test_a_gpu_has_none_of_the_workspaces_of_cpu_kernels() -> None:
    gpu, cpu = (plan(meta(lambda: toy(2)), rows(), hw=hw) for hw in (HW, CPU))
    assert not any(op.scratch_bytes for op in gpu.workload.ops)
    assert any(op.scratch_bytes for op in cpu.workload.ops)


@pytest.mark.parametrize(("device", "need"), [("cuda", 84_541_696), ("meta", 0)])
def test_the_workspace_of_cudnns_attention(device: str, need: int) -> None:
    """As an H200's allocator counted it, beside what a plan for it had."""
    graph = fx.Graph()
    with FakeTensorMode():
        x = torch.empty(8, 20, 1024, 128, dtype=torch.bfloat16, device=device)
    tensors = [graph.placeholder(name) for name in "gqkv"]
    for node in tensors:
        node.meta["val"] = x
    op = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
    assert workspace_bytes(graph.call_function(op, (*tensors,))) == need


class Attention(nn.Module):
    """Drops attention weights; forward(x) → loss."""

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x @ w)[:, None]
        f = torch.nn.functional
        return f.scaled_dot_product_attention(y, y, y, dropout_p=0.1).square().mean()


def test_attention_with_dropout_is_fused_as_on_a_gpu() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.empty(8, 8))
            self.attention = Attention()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(x, self.w)

    x = torch.empty(2, 6, 8, device="meta")
    targets = [[op.target for op in plan(meta(Model), x, hw=hw).workload.ops] for hw in (HW, CPU)]
    fused = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    assert fused in targets[0]
    assert fused not in targets[1]


def test_full_trace_is_the_same(planned: Planned) -> None:
    full = plan_toy(batch=64, full_trace=True)
    assert full.traced == "in full, as asked for"
    assert full.workload == planned.workload
    assert full.plan == planned.plan


# -- what goes in ----------------------------------------------------------------------------


def test_models_come_in_many_forms() -> None:
    def inputs(batch: int) -> torch.Tensor:
        return rows(batch)

    wanted = plan(meta(lambda: toy(2)), rows(64), hw=HW).plan
    for model, given in (
        (lambda: toy(2), rows(64)),
        (lambda: (toy(2), rows(64)), None),
        (lambda: toy(2), {"x": rows(64)}),
        (lambda: toy(2), (rows(64),)),
    ):
        assert plan(model, given, hw=HW).plan == wanted
    assert plan(lambda: toy(2), inputs, hw=HW, batch=64).plan == wanted


def test_a_transformers_configuration() -> None:
    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=64,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    found = plan(config, hw=HW, batch=3, sequence=16)
    assert (found.model, found.batch) == ("LlamaForCausalLM", 3)
    assert (found.num_items, found.items) == (48, "tokens")
    assert not any("past" in v for v in found.workload.values)
    assert config.use_cache


def test_named_models_have_the_papers_sizes() -> None:
    found = {m.name: (m.layers, m.heads, m.hidden) for m in map(named, names())}
    assert found["gpt-6b"] == (28, 32, 4096)
    assert found["gpt-412b"] == (128, 128, 16384)
    assert found["dit-0.67b"] == (28, 16, 1152)
    assert found["dit-40b"] == (48, 56, 7168)
    assert len(found) == 14
    assert named(" GPT_13B ") is named("gpt-13b")
    assert is_known("dit-0.90b")
    assert [m.name for m in family_of("dit-1.4b")] == [n for n in names() if n.startswith("dit")]


@pytest.mark.parametrize("name", names())
def test_sizes_are_what_the_names_say(name: str) -> None:
    """The diffusion models' own count is not known to the digit: §V-H scales DiT-XL/2."""
    with torch.device("meta"):
        model = named(name).build()
    count = sum(p.numel() for p in model.parameters())
    said = float(name.split("-")[1].removesuffix("b")) * 1e9
    assert count == pytest.approx(said, rel=0.1 if name.startswith("gpt") else 0.15)


def test_a_named_model_plans() -> None:
    found = plan("gpt-6b", hw="rtx4090-12xp5510", batch=2)
    assert found.model == "gpt-6b"
    assert found.workload.num_params == pytest.approx(5.85e9, rel=0.01)
    assert (found.num_items, found.items) == (2048, "tokens")
    flops = found.workload.forward_flops + found.workload.backward_flops
    assert flops == pytest.approx(6 * 5.85e9 * 2048, rel=0.1)
    assert found.plan.prediction.peak_device_bytes <= found.budget.device_bytes


def test_the_gpts_loss_is_cross_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    from lohan_fx.models import gpt

    monkeypatch.setattr(gpt, "CHUNK_TOKENS", 8)
    monkeypatch.setattr(gpt, "NUM_CHUNKS", 3)
    torch.manual_seed(0)
    x = torch.randn(20, 16, requires_grad=True)
    weight = torch.randn(30, 16, requires_grad=True)
    targets = torch.randint(0, 30, (20,))
    loss = gpt.head_loss(x, weight, targets)
    plain = torch.nn.functional.cross_entropy(x @ weight.t(), targets)
    torch.testing.assert_close(loss, plain)
    found = torch.autograd.grad(3 * loss, (x, weight))
    torch.testing.assert_close(found, torch.autograd.grad(3 * plain, (x, weight)))


# -- searches --------------------------------------------------------------------------------


def plan_small(**more: Any) -> Planned:
    asked = {"hw": HW, "strategy": "keep-all", "memory": {"device": "128KiB"}, **more}
    return plan(meta(lambda: toy(2)), rows(), **asked)


def test_the_largest_batch_is_the_largest() -> None:
    peak = plan_small(batch=6, memory=None).plan.prediction.peak_device_bytes
    small = partial(plan_small, memory={"device": peak})
    found = small(search="max-batch")
    assert found.search is not None
    assert found.batch == 6
    with pytest.raises(InsufficientMemoryError) as error:
        small(batch=found.batch + 1)
    assert found.search.found == f"batch {found.batch}"
    assert found.search.limit.startswith(f"batch {found.batch + 1}: device memory: needs ")
    assert f"{error.value.need_bytes - error.value.have_bytes} B too much" in found.search.limit
    fits = [t.fits for t in found.search.trials]
    assert fits == sorted(fits, reverse=True)
    assert found.search.limit in render(found.parts(), width=300)
    assert small(search="max-batch", batch=found.batch + 2).batch == found.batch


def test_not_even_a_batch_of_one() -> None:
    with pytest.raises(InsufficientMemoryError, match="not enough device memory"):
        plan_small(search="max-batch", memory={"device": "1KiB"})
    with pytest.raises(InsufficientMemoryError):
        plan_small(search="max-batch", memory={"device": "1KiB"}, batch=3)


def test_batches_without_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lohan_fx.planning.MAX_BATCH", 20)
    found = plan_small(search="max-batch", memory=None)
    assert found.batch == 16
    assert found.search is not None
    assert found.search.limit == "nothing up to batch 16; larger ones were not tried"


def test_searches_try_a_quicker_strategy_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lohan_fx.planning.MAX_BATCH", 5)
    found = plan_small(search="max-batch", strategy="pareto")
    assert (found.batch, found.plan.strategy) == (4, "pareto")


def test_guesses_stay_inside() -> None:
    error = InsufficientMemoryError("device", 10**9, 1, where="here")
    assert next_batch(3, 9, error, halve=False) == 6
    near = InsufficientMemoryError("device", 10, 5, where="here")
    assert next_batch(3, 9, near, halve=False) == 4
    assert next_batch(4, 9, near, halve=False) == 6
    assert next_batch(3, 9, error, halve=True) == 6
    assert next_batch(8, 10, error, halve=True) == 9


def test_the_largest_model(monkeypatch: pytest.MonkeyPatch) -> None:
    base = replace(named("gpt-6b"), hidden=8, heads=2)
    ladder = tuple(replace(base, name=f"gpt-{n}", layers=n) for n in (1, 2, 3))
    monkeypatch.setattr("lohan_fx.planning.family_of", lambda _: ladder)
    given = {"hw": HW, "strategy": "keep-all", "batch": 1, "sequence": 8}
    ask = partial(plan, "gpt", search="max-model", **given)
    middle = plan(ladder[1], **given).plan.prediction
    found = ask(memory={"device": middle.peak_device_bytes})
    assert found.model == "gpt-2"
    assert found.search is not None
    assert found.search.limit.startswith("gpt-3: device memory: needs ")
    assert [t.label for t in found.search.trials] == ["gpt-2", "gpt-3"]
    assert "largest of its family" in ask().search.limit  # type: ignore[union-attr]
    with pytest.raises(InsufficientMemoryError):
        ask(memory={"device": "1KiB"})


# -- files and other machines ----------------------------------------------------------------


def test_saving_and_loading(planned: Planned, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    planned.save(path)
    again = Planned.load(path)
    assert again == planned
    assert again.workload == planned.workload
    assert again.step_s == planned.step_s
    assert Plan.load(path) == planned.plan
    assert again.report() == planned.report()


def test_files_that_hold_no_workload(planned: Planned, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    planned.plan.save(path)
    with pytest.raises(PlanError, match="holds no workload"):
        Planned.load(path)
    path.write_text("[1]")
    with pytest.raises(PlanError, match="holds no workload"):
        Planned.load(path)
    path.write_text("no json")
    with pytest.raises(PlanError, match="is no JSON file"):
        Planned.load(path)
    planned.save(path)
    data = json.loads(path.read_text())
    del data["planned"]["budget"]
    path.write_text(json.dumps(data))
    with pytest.raises(PlanError, match=r"lacks 'planned\.budget'"):
        Planned.load(path)


def test_on_another_machine(planned: Planned) -> None:
    slow = HW.replace(
        name="slow", matmul_flops_per_s={"bfloat16": 1e9}, block_flops_per_s=1e9, device_bytes=2**14
    )
    there = planned.on(slow)
    assert planned.on(HW) is planned
    assert there.step_s > planned.step_s
    assert there.closed_form_s > planned.closed_form_s
    assert retimed(planned.workload, HW, "bfloat16") == planned.workload
    assert planned.misfits() == []
    (text,) = there.misfits()
    assert text.startswith("Toy, lohan: needs ")
    swapped = plan_toy(strategy="swap-all", swap_to="ssd", states="ssd")
    with pytest.raises(HardwareError, match="no SSDs"):
        _ = swapped.on(small_hardware(ssd=False)).step_s
    with pytest.raises(HardwareError, match="no SSDs"):
        _ = swapped.on(small_hardware(ssd=False)).busiest


def test_the_trace_opens(planned: Planned, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    planned.trace(path)
    events = json.loads(path.read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"simulated lohan"}


@pytest.mark.parametrize(
    "strategy", ["lohan", "zero-infinity", "zero-offload", "keep-all", "swap-all", "fuyou"]
)
@pytest.mark.parametrize("schedule", ["auto", "serial", "deferred"])
def test_no_step_undercuts_its_bound(strategy: str, schedule: Any) -> None:
    workload = gpt_workload()
    budget = MemoryBudget(device_bytes=2**30, host_bytes=2**30, ssd_bytes=2**30)
    plan = make_plan(strategy, workload, HW, budget, PlannerOptions(schedule=schedule))
    bound = step_bound(workload, plan, HW)
    assert 0 < bound.seconds <= simulate(workload, plan, HW).step_s * (1 + 1e-9)
    assert bound.work[bound.resource.split(" ")[0]] <= bound.seconds


# -- bad input -------------------------------------------------------------------------------


def test_unknown_names() -> None:
    with pytest.raises(LohanError, match="did you mean 'gpt-13b'"):
        plan("gpt-13", hw=HW)
    with pytest.raises(LohanError, match="known are gpt-6b"):
        plan("zzz", hw=HW)
    with pytest.raises(PlanError, match="did you mean 'lohan'"):
        plan_toy(strategy="lohen")
    with pytest.raises(HardwareError, match="no hardware preset"):
        plan_toy(hw="rtx9090")
    with pytest.raises(LohanError, match="no optimizer 'adamx'"):
        plan_toy(optimizer="adamx")
    with pytest.raises(LohanError, match="max-batch"):
        plan_toy(search="max-speed")
    with pytest.raises(LohanError, match="schedule"):
        plan_toy(schedule="late")


def test_inputs_that_do_not_do() -> None:
    model = meta(lambda: toy(3))
    with pytest.raises(LohanError, match="inputs= is missing"):
        plan(model, hw=HW)
    with pytest.raises(LohanError, match="inputs are int"):
        plan(model, 3, hw=HW)
    with pytest.raises(LohanError, match="first dimension"):
        plan(model, {"x": rows(), "y": rows(3)}, hw=HW, batch=2)
    with pytest.raises(LohanError, match="number of samples, at least 1"):
        plan(model, rows(), hw=HW, batch=0)
    with pytest.raises(LohanError, match="1024 tokens a sample"):
        plan("dit-0.67b", hw=HW, sequence=77)
    with pytest.raises(LohanError, match="give a name"):
        plan(3, hw=HW)  # type: ignore[arg-type]
    with pytest.raises(LohanError, match=r"returned int, no nn\.Module"):
        plan(lambda: 3, hw=HW)
    with pytest.raises(LohanError, match="name one"):
        plan(model, rows(), hw=HW, search="max-model")
    with pytest.raises(CaptureError, match="cannot capture"):
        plan(model, torch.empty(3, WIDTH + 1, device="meta"), hw=HW)


def test_a_compiled_model_is_refused() -> None:
    model, x = made()
    compiled = lohan_fx.compile(model, hw=CPU)
    with pytest.raises(LohanError, match="compiled already"):
        plan(compiled, x, hw=CPU)
    compiled.lohan.close()  # type: ignore[union-attr, operator]


def test_budgets_below_the_minimum() -> None:
    with pytest.raises(InsufficientMemoryError) as error:
        plan_toy(batch=64, memory={"device": "4KiB"})
    assert error.value.tier == "device"
    assert error.value.need_bytes > error.value.have_bytes == 4096
    with pytest.raises(HardwareError, match=r"need 9\.00 GiB, have 1\.00 GiB"):
        plan_toy(memory={"device": "9GiB"})
    with pytest.raises(InsufficientMemoryError, match="host"):
        plan_toy(states="host", memory={"host": "1KiB", "ssd": 0})


@pytest.mark.parametrize("rate", ["h2d_bytes_per_s", "cpu_optimizer_params_per_s"])
def test_rates_that_are_zero_or_missing(rate: str, tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match=rate):
        plan_toy(hw=HW.replace(**{rate: 0.0}))
    path = tmp_path / "hw.json"
    data = HW.to_dict()
    data[rate] = 0
    path.write_text(json.dumps(data))
    with pytest.raises(HardwareError, match=rate):
        plan_toy(hw=str(path))
    del data[rate]
    path.write_text(json.dumps(data))
    with pytest.raises(HardwareError, match=f"missing fields: {rate}"):
        plan_toy(hw=str(path))


def test_no_ssd_where_one_is_asked_for() -> None:
    with pytest.raises(PlanError, match="no SSDs"):
        plan_toy(hw=small_hardware(ssd=False), states="ssd")


def test_optimizers() -> None:
    assert [num_states(o) for o in ("adamw", "Adam", "sgd", "rmsprop", None)] == [2, 2, 0, 1, 0]
    assert num_states(torch.optim.Adamax) == 2
    model = toy(1)
    assert num_states(torch.optim.AdamW(model.parameters(), amsgrad=True)) == 3
    with pytest.raises(UnsupportedOptimizerError):
        num_states(torch.optim.LBFGS)
    with pytest.raises(LohanError, match="optimizer= is a int"):
        num_states(lambda _: 3)  # type: ignore[arg-type, return-value]
    with pytest.raises(LohanError, match="needs optimizer="):
        plan_toy(optimizer=None, dtype=torch.bfloat16)


def test_planned_and_simulated_without_torch() -> None:
    """A saved plan needs no torch to be looked at again; neither do the tables."""
    modules = ("planned", "bounds", "replicate", "ablation", "plots", "models", "cli_plan")
    code = "import sys\n" + "".join(f"import lohan_fx.{m}\n" for m in modules)
    code += "sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_name_is_the_function() -> None:
    import lohan_fx.plan as by_path
    from lohan_fx import plan
    from lohan_fx.planning import plan as wanted

    assert plan is by_path is lohan_fx.plan is wanted
    assert sys.modules["lohan_fx.plan"].Plan is Plan


# -- size ------------------------------------------------------------------------------------


def uneven(blocks: int) -> nn.Module:
    """Blocks of many widths, in no order."""
    return Toy([Block(1 + (k * k) % 97) for k in range(blocks)])


@pytest.mark.slow
def test_5000_nodes_that_do_not_repeat() -> None:
    start = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    model = meta(lambda: uneven(340))
    found = plan(model, rows(64), hw=HW, memory={"device": "2MiB"})
    assert found.traced.startswith("in full")
    assert len(found.workload.ops) >= 5000
    seconds = resource.getrusage(resource.RUSAGE_SELF).ru_utime - start
    assert seconds < 60


@pytest.mark.slow
def test_175b_in_30_seconds_and_4_gib() -> None:
    """A fresh process, imports included; seconds of its own work, others may be running."""
    code = """
import resource, time
start = time.perf_counter()
import lohan_fx
found = lohan_fx.plan("gpt-175b", hw="rtx4090-12xp5510", batch=16)
assert found.step_s > 0
use = resource.getrusage(resource.RUSAGE_SELF)
print(use.ru_utime + use.ru_stime, use.ru_maxrss * 1024, time.perf_counter() - start)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    cpu_s, peak_bytes, wall_s = map(float, done.stdout.split())
    print(f"175B: {cpu_s:.1f} s of CPU, {wall_s:.1f} s, {peak_bytes / 2**30:.2f} GiB")  # noqa: T201
    assert cpu_s < 30
    assert peak_bytes < 4 * 2**30
