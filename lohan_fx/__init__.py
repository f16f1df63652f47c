"""Train models far larger than GPU memory, at close to the speed as if they fitted.

    compile(model, hw=, optimizer=, memory=)    the one new line in a training loop
    profile_hardware(ssd=[...])                 measures the machine that plans are made for
    save(model, directory), load(…)             a checkpoint, streamed and atomic
    plan(model, inputs, hw=)                    plans and simulates a step, without the machine
    ablate(model, inputs, hw=)                  compares strategies
    LohanError                                  base class of all that they raise on purpose

Importing the package's torch-free parts (`lohan_fx.planners`, `lohan_fx.hardware`, …) does not
import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lohan_fx.ablation import ablate
    from lohan_fx.api import compile
    from lohan_fx.checkpoint import latest, load, save
    from lohan_fx.errors import (
        CaptureError,
        CheckpointError,
        HardwareError,
        InsufficientMemoryError,
        LohanError,
        PlanError,
        StepError,
        StorageError,
        UnsupportedOptimizerError,
    )
    from lohan_fx.hardware import HardwareProfile, MemoryBudget
    from lohan_fx.plan import Plan
    from lohan_fx.planning import plan
    from lohan_fx.profiling import profile_hardware

__version__ = "0.1.0"

_HOMES = {
    "ablate": "lohan_fx.ablation",
    "compile": "lohan_fx.api",
    "latest": "lohan_fx.checkpoint",
    "load": "lohan_fx.checkpoint",
    "save": "lohan_fx.checkpoint",
    "CaptureError": "lohan_fx.errors",
    "CheckpointError": "lohan_fx.errors",
    "HardwareError": "lohan_fx.errors",
    "InsufficientMemoryError": "lohan_fx.errors",
    "LohanError": "lohan_fx.errors",
    "PlanError": "lohan_fx.errors",
    "StepError": "lohan_fx.errors",
    "StorageError": "lohan_fx.errors",
    "UnsupportedOptimizerError": "lohan_fx.errors",
    "HardwareProfile": "lohan_fx.hardware",
    "MemoryBudget": "lohan_fx.hardware",
    "Plan": "lohan_fx.plan",
    "plan": "lohan_fx.planning",
    "profile_hardware": "lohan_fx.profiling",
}

__all__ = [
    "CaptureError",
    "CheckpointError",
    "HardwareError",
    "HardwareProfile",
    "InsufficientMemoryError",
    "LohanError",
    "MemoryBudget",
    "Plan",
    "PlanError",
    "StepError",
    "StorageError",
    "UnsupportedOptimizerError",
    "ablate",
    "compile",
    "latest",
    "load",
    "plan",
    "profile_hardware",
    "save",
]


importlib.import_module("lohan_fx.plan")
del globals()["plan"]  # the module stays importable; `lohan_fx.plan` is the function


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that planning needs no torch."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'lohan_fx' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    """What is there, and the public names that are imported on first use."""
    return sorted({*globals(), *__all__})
