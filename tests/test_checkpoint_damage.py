"""Checkpoints that are damaged, of another model, or cannot be written, change nothing."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import lohan_fx
import lohan_fx.atomic
from lohan_fx.errors import CheckpointError, LohanError, StepError, StorageError
from tests.checkpoints import (
    BUDGET,
    HOST,
    STEPS,
    Net,
    assert_same,
    started,
    state_of,
)
from tests.training import alternating, cpu_hardware, identical, remember_captures


@pytest.fixture(scope="module")
def reference() -> tuple[list[float], dict[str, Tensor]]:
    """Losses of an uninterrupted run in plain PyTorch, and what it ends with."""
    run = started()
    return run.train(2 * STEPS), state_of(run)


@pytest.fixture(autouse=True)
def captures(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    remember_captures(monkeypatch, f"net of {request.function.__name__}")


def _cut(name: str, by: int = 1) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with (path / name).open("r+b") as file:
            file.truncate((path / name).stat().st_size - by)

    return damage


def _without_checksums(path: Path) -> None:
    """As checkpoints were written before."""
    file = path / "checkpoint.json"
    found = json.loads(file.read_text())
    del found["checksums"], found["checksum"]
    file.write_text(json.dumps(found))


def _without(key: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        _without_checksums(path)
        file = path / "optimizer.safetensors"
        tensors = safetensors.torch.load_file(file)
        del tensors[key]
        safetensors.torch.save_file(tensors, file)

    return damage


def _rewritten(**changes: Any) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        _without_checksums(path)
        file = path / "checkpoint.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return damage


def _edited(name: str, old: bytes, new: bytes) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = (path / name).read_bytes()
        assert old in data
        (path / name).write_bytes(data.replace(old, new))

    return damage


def _lost(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def _flipped(name: str, at: int) -> Callable[[Path], None]:
    """One bit of the byte `at`, or so many from the end."""

    def damage(path: Path) -> None:
        data = bytearray((path / name).read_bytes())
        data[at] ^= 1
        (path / name).write_bytes(data)

    return damage


DAMAGES = (
    (_cut("model.safetensors"), r"model\.safetensors is no complete safetensors file"),
    (_cut("optimizer.safetensors"), r"optimizer\.safetensors is no complete safetensors"),
    (_cut("extra.safetensors"), r"extra\.safetensors is no complete safetensors file"),
    (_cut("checkpoint.json"), r"checkpoint\.json is damaged"),
    (_without("embedding.weight.exp_avg"), r"lacks embedding\.weight\.exp_avg$"),
    (_rewritten(version=9), r"is of version 9; this lohan_fx reads 1"),
    (_rewritten(format="x"), r"is of another format"),
    (_rewritten(optimizer=None), r"has no states of an optimizer.* optimizer=False"),
    (
        _edited("checkpoint.json", b'decay": 0.1', b'decay": 0.3'),
        r"checkpoint\.json is damaged: it has other values .* remove its last",
    ),
    (_lost("model.safetensors"), r"saved with model\.safetensors: copy them back, or load an"),
    (_lost("optimizer.safetensors"), r"with optimizer\.safetensors: .*optimizer=False\) takes"),
    (
        _lost("extra.safetensors"),
        r"saved with extra\.safetensors: .* compile\(weights='/.*/c'\)",
    ),
    (
        _edited("model.safetensors", b"blocks.0", b"blocks.7"),
        r"model\.safetensors is damaged: its header has other",
    ),
    (_flipped("extra.safetensors", -9), r"extra\.safetensors is damaged: tensor random\."),
    (lambda path: (path / "checkpoint.json").unlink(), r"is no checkpoint of lohan_fx\.save"),
    (shutil.rmtree, r"is no checkpoint of lohan_fx\.save"),
)


@pytest.mark.parametrize(("compiled", "damage", "message"), alternating((False, True), DAMAGES))
def test_a_damaged_checkpoint_changes_nothing(
    damage: Any, message: str, compiled: bool, tmp_path: Path
) -> None:
    run = started()
    run.train(1)
    run.save(tmp_path / "c")
    damage(tmp_path / "c")
    other = started(tmp_path if compiled else None, seed=7, **(HOST if compiled else {}))
    other.train(1)
    before, generator = state_of(other), torch.get_rng_state()
    with pytest.raises(CheckpointError, match=message) as error:
        other.load(tmp_path / "c")
    assert str(tmp_path / "c") in str(error.value)
    assert_same(state_of(other), before)
    assert torch.equal(torch.get_rng_state(), generator)
    other.close()


@pytest.mark.parametrize("name", ["model", "optimizer"])
@pytest.mark.parametrize("kind", ["plain", "compiled", "resumed"])
def test_a_flipped_bit_is_found(name: str, kind: str, tmp_path: Path) -> None:
    """While values stream in: a compiled model then waits for a checkpoint that is whole."""
    run = started()
    run.train(1)
    run.save(tmp_path / "c")
    run.save(tmp_path / "whole")
    _flipped(f"{name}.safetensors", -40)(tmp_path / "c")
    other = started(seed=7) if kind == "plain" else started(tmp_path, seed=7, **HOST)
    if kind == "compiled":
        other.train(1)
    message = rf"{name}\.safetensors is damaged: tensor \S+ has other bytes"
    if kind == "resumed" and name == "optimizer":  # its states wait for memory
        other.load(tmp_path / "c")
        with pytest.raises(CheckpointError, match=message):
            other.train(1)
    else:
        with pytest.raises(CheckpointError, match=message + ".* loaded in part: load another"):
            other.load(tmp_path / "c")
        if kind != "plain":
            for call in (lambda: other.train(1), other.model.state_dict):
                with pytest.raises(StepError, match="a checkpoint was loaded in part: the model"):
                    call()
            with pytest.raises(StepError, match="loaded in part"):
                other.save(tmp_path / "d")
    other.load(tmp_path / "whole")
    assert_same(state_of(other), state_of(run))
    found = other.train(1)
    run.load(tmp_path / "whole")
    assert found == run.train(1)
    other.close()


def test_damaged_states_that_wait_for_memory_are_not_forgotten(tmp_path: Path) -> None:
    """Whoever asks for them is refused, again and again; they do not begin as zeros."""
    run = started()
    run.train(1)
    run.save(tmp_path / "c")
    _flipped("optimizer.safetensors", -40)(tmp_path / "c")
    other = started(tmp_path, seed=7, **HOST)
    other.load(tmp_path / "c")
    asks: list[Callable[[], Any]] = [
        other.optimizer.state_dict,
        lambda: other.save(tmp_path / "d"),
        other.train,
        other.optimizer.state_dict,
    ]
    for ask in asks:
        with pytest.raises(CheckpointError, match=r"optimizer\.safetensors is damaged: tensor"):
            ask()
    lohan_fx.load(other.model, tmp_path / "c", verify=False)
    other.train()
    other.close()


@pytest.mark.parametrize("size", [5 << 30, 4096])
def test_every_bit_of_a_checkpoint_counts(size: int, tmp_path: Path) -> None:
    run = started()
    run.train(1)
    run.save(tmp_path / "c", max_shard_bytes=size)
    files = sorted(path.name for path in (tmp_path / "c").iterdir())
    assert len(files) == 4 if size > 1 << 20 else len(files) > 6
    generator = random.Random(0)
    for name in files:
        num_bytes = (tmp_path / "c" / name).stat().st_size
        for at in (0, 9, num_bytes - 1, *(generator.randrange(num_bytes) for _ in range(5))):
            _flipped(name, at)(tmp_path / "c")
            with pytest.raises(CheckpointError, match=rf"/c/?.*{re.escape(name)}"):
                started().load(tmp_path / "c")
            _flipped(name, at)(tmp_path / "c")
    started().load(tmp_path / "c")


def test_damage_may_be_read_on_purpose(tmp_path: Path) -> None:
    run = started()
    run.save(tmp_path / "c")
    wanted = run.model.state_dict()
    _flipped("model.safetensors", -1)(tmp_path / "c")
    other = started(seed=7)
    lohan_fx.load(other.model, tmp_path / "c", optimizer=other.optimizer, verify=False)
    found = other.model.state_dict()
    assert sum(not identical(found[k], wanted[k]) for k in wanted) == 1
    with pytest.raises(CheckpointError, match="is damaged: tensor"):
        started(tmp_path, weights=tmp_path / "c", **HOST)
    other = started(tmp_path, weights=tmp_path / "c" / "model.safetensors", **HOST)
    other.train(1)
    other.close()


def test_checkpoints_without_checksums_are_read(tmp_path: Path) -> None:
    run = started()
    run.train(1)
    run.save(tmp_path / "c")
    _without_checksums(tmp_path / "c")
    other = started(seed=7)
    other.load(tmp_path / "c")
    assert_same(state_of(other), state_of(run))


def test_weights_alone_of_a_checkpoint_that_lost_its_states(tmp_path: Path) -> None:
    run = started()
    run.save(tmp_path / "c")
    _lost("optimizer.safetensors")(tmp_path / "c")
    other = started(seed=7)
    lohan_fx.load(other.model, tmp_path / "c", optimizer=False)
    assert_same(other.model.state_dict(), run.model.state_dict())


def test_another_model_or_optimizer_is_refused(tmp_path: Path) -> None:
    run = started()
    run.train(1)
    run.save(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"(?s)missing \(2\): weight .*unexpected \(15\): bl"):
        lohan_fx.load(nn.Linear(2, 2), tmp_path / "c")
    other = started(tmp_path, seed=7, **HOST)
    one_group = torch.optim.AdamW(other.model.parameters())
    with pytest.raises(CheckpointError, match=r"2 groups of \[3, 6\] parameters, here 1 of \[9\]"):
        lohan_fx.load(other.model, tmp_path / "c", optimizer=one_group)
    foreign = torch.optim.AdamW([nn.Parameter(torch.ones(5))])
    with pytest.raises(LohanError, match=r"a parameter of shape \(5,\) that is not in the Net"):
        lohan_fx.save(other.model, tmp_path / "d", optimizer=foreign)
    model = Net()
    sgd = torch.optim.SGD([{"params": g["params"]} for g in started().optimizer.param_groups])
    names = [[n for n, p in model.named_parameters() if (p.dim() > 1) == d] for d in (True, False)]
    by_name = dict(model.named_parameters())
    sgd = torch.optim.SGD([{"params": [by_name[n] for n in g]} for g in names], momentum=0.9)
    model = lohan_fx.compile(model, hw=cpu_hardware(tmp_path), optimizer=sgd, memory=BUDGET)
    with pytest.raises(CheckpointError, match=r"'exp_avg', .* keeps \['momentum_buffer'\]"):
        lohan_fx.load(model, tmp_path / "c")
    lohan_fx.load(model, tmp_path / "c", optimizer=False)
    assert identical(model.embedding.weight, run.model.embedding.weight)


def test_directories_of_others_are_left_alone(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match=r"is not empty and no checkpoint .*it has notes\.txt"):
        lohan_fx.save(model, tmp_path)
    with pytest.raises(StorageError, match=r"notes\.txt is a file: name a directory"):
        lohan_fx.save(model, tmp_path / "notes.txt")
    (tmp_path / "c").mkdir()
    lohan_fx.save(model, tmp_path / "c")
    (tmp_path / "c" / "notes.txt").write_text("mine")
    lohan_fx.save(model, tmp_path / "c", max_shard_bytes=8)
    assert (tmp_path / "c" / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "c" / "model.safetensors").exists(), "what is outdated goes"
    (tmp_path / "link").symlink_to(tmp_path / "c")
    lohan_fx.save(model, tmp_path / "link", step=4)
    assert (tmp_path / "link").is_symlink()
    assert lohan_fx.load(model, tmp_path / "c").step == 4
    (tmp_path / "c" / "inner").mkdir()
    with pytest.raises(StorageError, match="the directory inner in it, which saving"):
        lohan_fx.save(model, tmp_path / "c")


class FullDisk(NamedTuple):
    f_bavail: int = 3
    f_frsize: int = 1024


def test_a_full_disk_is_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(64, 64)
    lohan_fx.save(model, tmp_path / "c", step=1)
    monkeypatch.setattr(lohan_fx.atomic.os, "statvfs", lambda _: FullDisk())
    message = rf"not enough space .* {re.escape(str(tmp_path))}: need .* KiB, have 3\.00 KiB"
    with pytest.raises(StorageError, match=message):
        lohan_fx.save(model, tmp_path / "c", step=2)
    assert lohan_fx.load(model, tmp_path / "c").step == 1
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_failed_write_keeps_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(64, 64)
    lohan_fx.save(model, tmp_path / "c", step=1)

    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(lohan_fx.atomic.os, "fsync", fail)
    with pytest.raises(StorageError, match=r"cannot write the checkpoint .*/c: Input/output error"):
        lohan_fx.save(model, tmp_path / "c", step=2)
    assert lohan_fx.load(model, tmp_path / "c").step == 1
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
