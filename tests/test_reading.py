"""Files that somebody edited, or that are damaged: an error names the field, whatever is wrong."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import lohan_fx
from lohan_fx.errors import CheckpointError, HardwareError, LohanError, PlanError
from lohan_fx.hardware import HardwareProfile, MemoryBudget
from lohan_fx.plan import Plan
from lohan_fx.planned import Planned
from lohan_fx.planners import make_plan
from lohan_fx.reading import Reader, json_of
from lohan_fx.simulate import simulate
from tests.workloads import budget, gpt_workload, small_hardware

HW = small_hardware()
WORKLOAD = gpt_workload()
PLAN = make_plan("lohan", WORKLOAD, HW, budget(device=400_000))
PLANNED = Planned(
    model="toy",
    workload=WORKLOAD,
    plan=PLAN,
    hw=HW,
    budget=MemoryBudget(device_bytes=2**20, host_bytes=2**20, ssd_bytes=0),
)

JUNK: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**70, 10**400, 1e308, float("inf"), float("nan"), 0.5),
    *("", "x", "device", "ssd", "swap", "\0", [], {}, [1], {"a": 1}, [[]]),
)


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int
    rate: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    kind: Literal["a", "b"] | None
    inner: Mapping[str, Inner]
    flags: tuple[bool, ...] = ()


READER = Reader(what="the file", error=PlanError, optional={Inner: ["rate", "size"]})
GOOD: dict[str, Any] = {"name": "n", "kind": "a", "inner": {"h.0": {"size": 1}}, "flags": [True]}


def test_what_is_right_is_read() -> None:
    wanted = Outer(name="n", kind="a", inner={"h.0": Inner(size=1)}, flags=(True,))
    assert READER.read(Outer, GOOD) == wanted
    assert READER.read(Outer, {**GOOD, "kind": None}).kind is None
    assert READER.read(float, 3) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 5}, "the wrong kind: name is 5, not a text"),
        ({"kind": "c"}, "kind is 'c', not 'a' or 'b'"),
        ({"kind": []}, r"kind is \[\], not 'a' or 'b'"),
        ({"inner": []}, r"inner is \[\], not a JSON object"),
        ({"inner": {"h.0": 1}}, r"inner\['h\.0'\] is 1, not a JSON object"),
        ({"inner": {"h.0": {}}}, r"""lacks "inner\['h\.0'\]\.size": is the file complete"""),
        ({"inner": {"h": {"size": True}}}, r"size is True, not a whole number from 0 to 1e30"),
        ({"inner": {"h": {"size": 1.0}}}, r"size is 1\.0, not a whole number"),
        ({"inner": {"h": {"size": 10**30}}}, r"size is 1000.*000, not a whole number from 0"),
        ({"inner": {"h": {"size": 1, "rate": "1"}}}, r"rate is '1', not a number"),
        ({"inner": {"h": {"size": 1, "rate": float("nan")}}}, r"rate is nan, not a number"),
        ({"inner": {"h": {"size": 1, "rate": -1.0}}}, r"rate is -1\.0, not a number from 0"),
        ({"inner": {"h": {"size": 1, "x": 1}}}, r"does not know: inner\['h'\]\.x$"),
        ({"flags": True}, "flags is True, not a list"),
        ({"flags": [True, 0]}, r"flags\[1\] is 0, not true or false"),
        ({"name": "x" * 10**6, "kind": "y" * 10**6}, r"kind is '.{1,60}', not 'a'"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=f"the file .*{message}"):
        READER.read(Outer, {**GOOD, **change})


def test_all_of_it_may_be_wrong(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="all of it is 5, not a JSON object"):
        READER.read(Outer, 5)
    with pytest.raises(PlanError, match="the file lacks 'flags'"):  # a default is no leave
        READER.read(Outer, {k: v for k, v in GOOD.items() if k != "flags"})
    (tmp_path / "deep.json").write_text("[" * 10**5)
    with pytest.raises(ValueError, match="nested more than 200 deep"):
        json_of(tmp_path / "deep.json")


# -- whole files ----------------------------------------------------------------------------------


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every entry of a JSON value, as its container and key."""
    keys = value if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


@st.composite
def damaged(draw: st.DrawFn, good: Mapping[str, Any]) -> str:
    """The text of a file in which one entry is another, gone, or one too many."""
    data = copy.deepcopy(json.loads(json.dumps(good)))
    found = list(places(data))
    # the first entries of the file are few, and each is a kind of its own
    container, key = found[draw(st.integers(0, len(found) - 1))]
    if draw(st.booleans()):
        container, key = data, draw(st.sampled_from(list(data)))
    how = draw(st.sampled_from(("other", "other", "gone", "more")))
    if how == "other":
        container[key] = draw(st.sampled_from(JUNK))
    elif how == "gone":
        del container[key]
    elif isinstance(container, dict):
        container["more"] = draw(st.sampled_from(JUNK))
    else:
        container.append(draw(st.sampled_from(JUNK)))
    text = json.dumps(data)
    return text if draw(st.integers(0, 19)) else text[: draw(st.integers(0, len(text)))]


many = settings(
    max_examples=75,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@many
@given(text=damaged(PLAN.to_dict()))
def test_a_damaged_plan(tmp_path: Path, text: str) -> None:
    """It is refused by name, or says something else that can be printed, and run or refused."""
    path = tmp_path / "plan.json"
    path.write_text(text)
    try:
        plan = Plan.load(path)
    except PlanError as error:
        assert str(path) in str(error)
        return
    assert str(plan)
    assert plan.fingerprint
    with suppress(PlanError):
        simulate(WORKLOAD, plan, HW)


@many
@given(text=damaged(HW.to_dict()))
def test_a_damaged_profile(tmp_path: Path, text: str) -> None:
    path = tmp_path / "hw.json"
    path.write_text(text)
    try:
        hw = HardwareProfile.load(path)
    except HardwareError as error:
        assert str(path) in str(error)
        return
    assert hw.describe()
    assert hw.fingerprint
    assert MemoryBudget.from_request(hw).device_bytes >= 0
    with suppress(LohanError):
        simulate(WORKLOAD, PLAN, hw)


_PLANNED = {**PLAN.to_dict(), "planned": PLANNED._made_from()}


@many
@given(text=damaged(_PLANNED["planned"]))
def test_a_damaged_plan_with_its_workload(tmp_path: Path, text: str) -> None:
    path = tmp_path / "planned.json"
    whole = {**_PLANNED, "planned": "here"}
    path.write_text(json.dumps(whole).replace('"here"', text))
    try:
        planned = Planned.load(path)
    except PlanError as error:
        assert str(path) in str(error)
        return
    with suppress(LohanError):
        assert planned.report()


UNIT = next(iter(PLAN.to_dict()["units"].values()))
RESIDUAL = next(iter(PLAN.to_dict()["residuals"].values()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"units": {"h0": {**UNIT, "tier": "gpu"}}},
            r"units\['h0'\]\.tier is 'gpu', not 'device' or 'ho",
        ),
        ({"residuals": {"a": {**RESIDUAL, "tier": 3}}}, r"residuals\['a'\]\.tier is 3, not"),
        ({"residuals": {"a": {"act": "keep"}}}, r"residuals\['a'\]\.action"),
        ({"units": {"h0": {"tier": "host"}}}, r"lacks .units\['h0'\]\.windows"),
        ({"residuals": [1]}, r"residuals is \[1\], not a JSON object"),
        ({"schedule": "soon"}, "schedule is 'soon', not 'serial' or"),
        ({"notes": "abc"}, "notes is 'abc', not a list"),
        ({"prediction": {"step_s": 1e400}}, r"prediction\.step_s is inf, not a number"),
        ({"prediction": {"d2h_bytes": 10**400}}, r"prediction\.d2h_bytes is 1000.*, not a whole"),
        ({"strategy": None}, "strategy is None, not a text"),
    ],
)
def test_fields_of_a_plan_are_named(change: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**PLAN.to_dict(), **change}))
    with pytest.raises(PlanError, match=rf"plan\.json: the plan .*{message}"):
        Plan.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"h2d_bytes_per_s": 10**400}, r"h2d_bytes_per_s is 1000.*below 1e30"),
        (
            {"ssds": [{**HW.to_dict()["ssds"][0], "path": 5}]},
            r"ssds\[0\]\.path is 5, but must name",
        ),
        ({"ssds": [{**HW.to_dict()["ssds"][0], "path": "a\0"}]}, r"ssds\[0\]\.path is 'a\\x00'"),
        ({"ssds": [5]}, r"ssds\[0\] is 5, but must be a JSON object"),
    ],
)
def test_fields_of_a_profile_are_named(change: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "hw.json"
    path.write_text(json.dumps({**HW.to_dict(), **change}))
    with pytest.raises(HardwareError, match=rf"hw\.json: {message}"):
        HardwareProfile.load(path)


def test_a_swap_to_the_device_is_refused(tmp_path: Path) -> None:
    data = json.loads(json.dumps(make_plan("swap-all", WORKLOAD, HW, budget()).to_dict()))
    name = next(k for k, v in data["residuals"].items() if v["action"] == "swap")
    data["residuals"][name]["tier"] = "device"
    with pytest.raises(PlanError, match=f"residual {name} is swapped to the device"):
        simulate(WORKLOAD, Plan.from_dict(data), HW)


# -- checkpoints ----------------------------------------------------------------------------------


def optimized(hw: HardwareProfile | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with states; compiled, if there is a machine for it."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    if hw is not None:
        model = lohan_fx.compile(model, hw=hw, optimizer=optimizer)
        return model, optimizer
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def described(directory: Path) -> Path:
    """A checkpoint without checksums, as an edited one has none."""
    model, optimizer = optimized()
    extra = {"a": {1: [torch.ones(2), torch.tensor(3)], "b": (1, None)}}
    path = lohan_fx.save(model, directory, optimizer=optimizer, step=1, extra=extra)
    file = path / "checkpoint.json"
    found = json.loads(file.read_text())
    del found["checksum"], found["checksums"]
    file.write_text(json.dumps(found))
    return file


@pytest.mark.parametrize("compiled", [False, True])
def test_a_damaged_description_of_a_checkpoint(
    compiled: bool, tmp_path: Path, hw: HardwareProfile
) -> None:
    """It changes nothing, or all of it is loaded."""
    file = described(tmp_path / "c")

    @settings(max_examples=50, deadline=None)
    @given(text=damaged(json.loads(file.read_text())))
    def check(text: str) -> None:
        file.write_text(text)
        model, optimizer = optimized(hw if compiled else None)
        weight = model.weight.detach().clone()
        try:
            lohan_fx.load(model, file.parent, optimizer=optimizer)
        except CheckpointError as error:
            assert str(file.parent) in str(error)
            changed = not torch.equal(model.weight, weight)
            assert not changed or "has been loaded" in str(error)  # in part, or all but generators
        else:
            assert not torch.equal(model.weight, weight)
        if compiled:
            model.lohan.close()  # type: ignore[union-attr, operator]

    check()


def _entry(found: Any) -> Any:
    return found["optimizer"]["states"]["weight"]


def _groups(found: Any) -> Any:
    return found["optimizer"]["groups"][0]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.update(optimizer=5), "optimizer is 5, not a JSON object"),
        (lambda d: d["optimizer"].pop("groups"), "optimizer.groups is None, not a list"),
        (lambda d: _groups(d).update(params=[1]), r"groups\[0\]\.params\[0\] is 1, not a text"),
        (lambda d: _groups(d)["values"].update(lr="1"), r"groups\[0\]\.values\.lr is '1', and Ad"),
        (lambda d: _groups(d)["values"].update(betas=1), r"values\.betas is 1, and AdamW has \("),
        (lambda d: _entry(d).update(step="1"), "optimizer.states has '1' as step of weight"),
        (lambda d: _entry(d).update(exp_avg=1), "optimizer.states has 1 as exp_avg of weight"),
        (
            lambda d: _entry(d).update(exp_avg={"$tensor": "bias.exp_avg"}),
            r"exp_avg of weight in .* is \(4,\) float32, the parameter \(4, 4\) float32",
        ),
        (
            lambda d: _entry(d).update(step={"$scalar": ["F99", 1]}),
            r"states\.weight\.step is damaged",
        ),
        (
            lambda d: d["optimizer"].update(masters={"bias": "weight.exp_avg"}),
            r"weight\.exp_avg in .* is \(4, 4\) float32, the parameter \(4,\) float32",
        ),
        (
            lambda d: d["optimizer"].update(masters={"no": "weight.exp_avg"}),
            "optimizer.masters has no, which the model lacks",
        ),
        (lambda d: d.update(checksums={"model.safetensors": 1}), r"checksums\['model.*'\] is 1"),
    ],
)
def test_fields_of_a_checkpoint_are_named(
    edit: Any, message: str, tmp_path: Path, hw: HardwareProfile
) -> None:
    file = described(tmp_path / "c")
    found = json.loads(file.read_text())
    edit(found)
    file.write_text(json.dumps(found))
    model, _ = optimized(hw)
    with pytest.raises(CheckpointError, match=message) as error:
        lohan_fx.load(model, file.parent)
    assert str(file.parent) in str(error.value)
    model.lohan.close()  # type: ignore[union-attr, operator]


def test_what_could_not_be_read_again_is_not_saved(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(150):
        deep = (deep,)
    itself: dict[str, Any] = {}
    itself["self"] = itself
    for extra in ({"deep": deep}, itself):
        with pytest.raises(LohanError, match="extra= is nested too deeply"):
            lohan_fx.save(nn.Linear(2, 2), tmp_path / "c", extra=extra)
    assert not (tmp_path / "c").exists()
