"""Workloads of the papers' models, traced once and kept on disk. Op seconds: any server's roofline.

The cache is under $LOHAN_FX_CACHE, or ~/.cache/lohan_fx; its names change with the sources that
workloads and results depend on, so it never needs clearing.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
from collections.abc import Iterable
from pathlib import Path

import lohan_fx
from benchmarks.papers.models import ModelSpec, spec_of
from lohan_fx.hardware import HardwareProfile
from lohan_fx.planned import retimed
from lohan_fx.workload import Workload

_TRACING = (
    "annotate.py",
    "capture.py",
    "depth.py",
    "models",
    "planning.py",
    "replicate.py",
    "workload.py",
)

_REFERENCE = "rtx4090-12xp5510"
"""Tracing needs some profile; its rates are replaced by `retimed`."""


def workload(model: str, batch: int, hw: HardwareProfile) -> Workload:
    """The training step of a model for a batch, with the op seconds of `hw`."""
    return _retimed(model, batch, hw)


def spec(model: str) -> ModelSpec:
    """What the papers' tables say about a model; FLOPs of a step."""
    return spec_of(model)


@functools.lru_cache(maxsize=16)
def _retimed(model: str, batch: int, hw: HardwareProfile) -> Workload:
    return retimed(_traced(model, batch), hw, "bfloat16")


@functools.lru_cache(maxsize=16)
def _traced(model: str, batch: int) -> Workload:
    path = cache_directory() / f"{model}-{batch}-{_fingerprint()}.pickle"
    if path.exists():
        found = pickle.loads(path.read_bytes())
        assert isinstance(found, Workload)
        return found
    made = spec_of(model).trace(batch, HardwareProfile.preset(_REFERENCE))
    write(path, pickle.dumps(made))
    return made


def write(path: Path, data: bytes) -> None:
    """Whole or not at all: two processes may write the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_bytes(data)
    part.replace(path)


def cache_directory() -> Path:
    """Where traced workloads are kept."""
    base = os.environ.get("LOHAN_FX_CACHE") or Path.home() / ".cache" / "lohan_fx"
    return Path(base) / "papers"


@functools.cache
def _fingerprint() -> str:
    """Changes with the code that makes workloads."""
    import torch

    root = Path(lohan_fx.__file__).parent
    own = [Path(__file__).with_name(name) for name in ("models.py", "encoder.py")]
    files = own + [file for name in _TRACING for file in _python_files(root / name)]
    return _digest(files, torch.__version__)


@functools.cache
def source_fingerprint() -> str:
    """Changes with any code that a result depends on."""
    root = Path(lohan_fx.__file__).parent
    own = [Path(__file__).with_name(name) for name in ("jobs.py", "systems.py", "models.py")]
    return _digest([*own, *_python_files(root)], _fingerprint())


def _python_files(path: Path) -> list[Path]:
    """A file, or those of a folder, the runtime's aside: nothing runs here."""
    if path.is_file():
        return [path]
    return [p for p in sorted(path.rglob("*.py")) if "runtime" not in p.parts]


def _digest(files: Iterable[Path], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
