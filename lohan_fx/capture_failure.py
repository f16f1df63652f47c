"""Why a model cannot be captured: in which module, at which line of user code, what to do."""

from __future__ import annotations

import inspect
import re
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from lohan_fx import _compat

FIXED_SHAPES = (
    "lohan_fx plans memory before the step runs and needs fixed shapes: mask (torch.where) instead "
    "of selecting, and run experts as one product, not in a loop (models of transformers: "
    "experts_implementation='grouped_mm' or 'batched_mm')"
)


def explain(model: nn.Module, error: Exception) -> str:
    """One message: in which module, at which line of user code, what broke, what to do."""
    frames = _compat.user_frames(error) or [
        (f.filename, f.lineno or 0, f.name, f.line or "")
        for f in traceback.extract_tb(error.__traceback__)
    ]
    text = str(error).strip()
    what = text.splitlines()[0] if text else type(error).__name__
    for label in ("Explanation", "Developer debug context"):
        if found := re.search(rf"{label}: *(\S.*)", text):
            what += f"\n  {found[1]}"
    hint = re.search(r"Hint: (.*)", text)
    advice = f"\n  hint: {hint[1]}" if hint else ""
    need = (
        "lohan_fx needs a forward without graph breaks: no data-dependent Python control flow, "
        "no calls that Dynamo cannot trace"
    )
    if "data-dependent expression" in what:  # Dynamo proposes annotations, which fix no size
        what, advice, need = "a size or a branch depends on data", "", FIXED_SHAPES
    return (
        f"cannot capture {type(model).__name__} as one graph{location(model, frames)}\n"
        f"  {what}{advice}\n  {need}"
    )


def location(model: nn.Module, frames: Sequence[_compat.Frame]) -> str:
    """The innermost module whose forward is on the stack, and the line of user code."""
    inside: list[tuple[str, nn.Module]] = []
    for frame in frames:  # outermost first: each forward narrows the choice
        under = tuple(f"{name}." if name else "" for name, _ in inside) or ("",)
        found = [
            (name, module)
            for name, module in model.named_modules()
            if name.startswith(under) and _runs(module, frame)
        ]
        inside = found or inside
    text = ""
    if inside:
        name, module = inside[0]
        more = f", or {len(inside) - 1} more of its kind" if len(inside) > 1 else ""
        text = f"\n  in module {name or '(the model itself)'} ({type(module).__name__}{more})"
    user = [f for f in frames if not _is_foreign(f[0])]
    if user:
        file, line, function, code = user[-1]
        text += f"\n  at {file}:{line} in {function}: {code.strip()}"
    return text


def _runs(module: nn.Module, frame: _compat.Frame) -> bool:
    """Whether the frame is in the module's forward."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None or code.co_filename != frame[0]:
        return False
    lines = [line for _, _, line in code.co_lines() if line is not None]
    return bool(lines) and min(lines) <= frame[1] <= max(lines)


def _is_foreign(file: str) -> bool:
    """Whether a file is no user code: PyTorch, this package, or the standard library."""
    roots = [str(Path(torch.__file__).parent), str(Path(__file__).parent)]
    library = sysconfig.get_paths()["stdlib"]
    packages = "site-packages" in file or "dist-packages" in file
    return any(file.startswith(r) for r in roots) or (file.startswith(library) and not packages)
