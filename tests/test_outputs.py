"""Outputs without a gradient: what plain PyTorch would differentiate is refused, not left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lohan_fx
from lohan_fx.errors import StepError
from tests.models import make
from tests.training import cpu_hardware, identical, remember_captures


@pytest.fixture(autouse=True)
def one_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    remember_captures(monkeypatch, "gpt2")


def made(directory: Path | None, **options: Any) -> tuple[Any, dict[str, Any], Any]:
    """A GPT-2 with a loss and logits, its batch and its optimizer; plain without a directory."""
    model, inputs = make("gpt2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if directory is None:
        return model, inputs, optimizer
    options = {"hw": cpu_hardware(directory), "strategy": "lohan", **options}  # plans quickly
    return lohan_fx.compile(model, optimizer=optimizer, **options), inputs, optimizer


def step(each: tuple[Any, dict[str, Any], Any], seed: int, *, logits: bool) -> torch.Tensor:
    model, inputs, optimizer = each
    torch.manual_seed(seed)
    out = model(**inputs)
    loss = out.loss + 1e-2 * out.logits.square().mean() if logits else out.loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    found: torch.Tensor = loss.detach()
    return found


def test_a_loss_that_uses_logits_too_is_refused_and_the_next_step_is_right(tmp_path: Path) -> None:
    ours, plain = made(tmp_path), made(None)
    assert identical(step(ours, 0, logits=False), step(plain, 0, logits=False))
    with pytest.raises(StepError, match=r"output 'logits' .*\(outputs=\['loss', 'logits'\]\)"):
        step(ours, 1, logits=True)
    for seed in (2, 3):
        assert identical(step(ours, seed, logits=False), step(plain, seed, logits=False))
    ours[0].lohan.close()


def test_a_loss_of_logits_alone_names_them(tmp_path: Path) -> None:
    model, inputs, _ = made(tmp_path)
    loss = model(**inputs).logits.logsumexp(-1).mean()
    with pytest.raises(StepError, match="output 'logits'"):
        loss.backward()
    model.lohan.close()


@pytest.mark.parametrize("outputs", ["all", ["loss", "logits"]], ids=str)
def test_with_a_gradient_for_both_it_is_plain_pytorchs(tmp_path: Path, outputs: Any) -> None:
    ours, plain = made(tmp_path, outputs=outputs), made(None)
    for seed in range(3):
        assert identical(step(ours, seed, logits=True), step(plain, seed, logits=True))
    ours[0].lohan.close()


def test_logits_can_be_looked_at_and_written(tmp_path: Path) -> None:
    """As in plain PyTorch; nobody's gradient comes to them."""
    ours, plain = made(tmp_path), made(None)
    for seed in range(2):
        for model, inputs, optimizer in (ours, plain):
            torch.manual_seed(seed)
            out = model(**inputs)
            assert out.logits.requires_grad
            assert out.logits.detach().numpy().shape == out.logits.shape
            accuracy = (out.logits.argmax(-1) == inputs["labels"]).float().mean()
            assert not accuracy.requires_grad
            out.loss.backward()
            with torch.no_grad():
                out.logits.div_(2)
            logits = out.logits
            logits /= 2.0
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(ours[0].parameters(), plain[0].parameters(), strict=True):
        assert identical(p, q)
    with torch.no_grad():
        assert not ours[0](**ours[1]).logits.requires_grad
    ours[0].lohan.close()


def test_a_detached_part_is_left_out(tmp_path: Path) -> None:
    model, inputs, optimizer = made(tmp_path)
    out = model(**inputs)
    (out.loss + out.logits.detach().square().mean()).backward()
    optimizer.step()
    model.lohan.close()
