"""Wrong arguments of the public functions, as a user gives them: every one is told by its name.

Those of `compile` are in test_interactions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lohan_fx
from lohan_fx.errors import CheckpointError, LohanError
from lohan_fx.hardware import HardwareProfile

# wrong types on purpose, which a checker of types would refuse
save: Any = lohan_fx.save
load: Any = lohan_fx.load
latest: Any = lohan_fx.latest
plan: Any = lohan_fx.plan
ablate: Any = lohan_fx.ablate
profile: Any = lohan_fx.profile_hardware
Plan: Any = lohan_fx.Plan
Profile: Any = HardwareProfile
X = torch.ones(2, 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, hw, p: save(5, p), "of a torch.nn.Module and its optimizer, not of a int"),
        (lambda m, hw, p: save(m.state_dict(), p), "not of a OrderedDict"),
        (lambda m, hw, p: save(m, None), "directory=None: give a path"),
        (lambda m, hw, p: save(m, ""), "directory='' is no path"),
        (lambda m, hw, p: save(m, "a\0b"), "is no path"),
        (lambda m, hw, p: save(m, p / ("x" * 300)), "cannot use .*: File name too long"),
        (lambda m, hw, p: save(m, p / "s", step="a"), "step='a': use a whole number"),
        (lambda m, hw, p: save(m, p / "s", extra=[1]), r"extra=\[1\]: give a dict"),
        (lambda m, hw, p: save(m, p / "s", max_shard_bytes="x"), "max_shard_bytes: 'x' is no size"),
        (lambda m, hw, p: save(m, p / "s", optimizer=torch.optim.SGD), "optimizer=SGD: use None"),
        (lambda m, hw, p: load(None, p), "not of a NoneType"),
        (lambda m, hw, p: load(m, 5), "directory=5: give a path"),
        (lambda m, hw, p: load(m, latest(p)), "latest returns None where there is none"),
        (lambda m, hw, p: load(m, p, optimizer=True), "optimizer=bool: use None"),
        (lambda m, hw, p: load(m, p, verify="no"), "verify='no': use True or False"),
        (lambda m, hw, p: latest(None), "directory=None: give a path"),
        (lambda m, hw, p: profile(5), "ssd=5: give a path"),
        (lambda m, hw, p: profile(dtypes=[5]), "dtype 5 is no floating-point dtype"),
        (lambda m, hw, p: profile(dtypes="float32"), r"in a list, such as \['float32'\]"),
        (lambda m, hw, p: Plan.load(p), "cannot read the plan .*: Is a directory"),
        (lambda m, hw, p: Plan.load(None), "path=None: give a path"),
        (lambda m, hw, p: Profile.load(p / "no"), "cannot read the hardware profile .*: No such"),
        (lambda m, hw, p: Profile.preset(None), "None is no name of a preset"),
        (lambda m, hw, p: hw.save(p), "cannot write .*: Is a directory"),
        (lambda m, hw, p: hw.replace(pcie=1), "pcie"),
        (lambda m, hw, p: plan(m, X, hw=5), "hw=5: use a profile"),
        (lambda m, hw, p: plan(m, X, hw=p / "no.json"), "cannot read the hardware profile"),
        (lambda m, hw, p: plan(m, X, hw=hw, batch="x"), "batch='x': use a number of samples"),
        (lambda m, hw, p: plan(m, X, hw=hw, sequence=-1), "sequence=-1: use a number of tokens"),
        (lambda m, hw, p: plan(m, X, hw=hw, memory="lots"), "memory='lots': write it as"),
        (lambda m, hw, p: plan(m, X, hw=hw, dtype="nope"), "dtype='nope': use 'auto'"),
        (lambda m, hw, p: plan(m, X, hw=hw, outputs=5), "outputs=5: use 'auto'"),
        (lambda m, hw, p: plan(nn.Linear, X, hw=hw), "called without arguments, and Linear"),
        (lambda m, hw, p: ablate(m, X, hw=hw, strategies=[]), r"strategies=\[\]: give one"),
        (lambda m, hw, p: ablate(m, X, hw=hw, strategies=5), "a name or a callable, not int"),
        (lambda m, hw, p: ablate(m, X, hw=hw, batch=[]), r"batch=\[\]: give one"),
        (lambda m, hw, p: ablate(m, X, hw=hw, memory="lots"), "memory='lots': write it as"),
        (lambda m, hw, p: ablate(m, X, hw=hw, steps=0), "steps=0: use a number"),
        (lambda m, hw, p: ablate(m, X, hw=hw, on_row=5), "on_row=5: give a function"),
    ],
)
def test_wrong_calls_are_named(
    call: Any, message: str, hw: HardwareProfile, tmp_path: Path
) -> None:
    with pytest.raises(LohanError, match=message):
        call(nn.Linear(8, 8), hw, tmp_path)
    assert not (tmp_path / "s").exists()


def test_values_of_a_checkpoint_that_nobody_checked(tmp_path: Path) -> None:
    """It was written before there were checksums, or edited."""
    model = nn.Linear(8, 8)
    file = lohan_fx.save(model, tmp_path / "c", step=1) / "checkpoint.json"
    found = json.loads(file.read_text())
    del found["checksum"], found["checksums"]
    damage: dict[str, tuple[Any, str]] = {
        "step": ("1", "step is '1', not a whole number or null"),
        "files": (5, "files is 5, not a list"),
        "extra": ({"a": {"$tensor": "lost"}}, r"extra\.a lacks its tensor 'lost'"),
        "random": ({}, r"no whole states of the random generators .* rng=False"),
    }
    for key, (value, message) in damage.items():
        file.write_text(json.dumps({**found, key: value}))
        with pytest.raises(CheckpointError, match=message):
            lohan_fx.load(model, tmp_path / "c")
    file.write_text(json.dumps({**found, "step": "7"}))
    lohan_fx.save(model, tmp_path / "d", step=3)
    assert lohan_fx.latest(tmp_path) == tmp_path / "d"
