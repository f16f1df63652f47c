"""Rewrites of the joint graph, one pass a file. They hold no heuristics: they obey the plan.

Order (`pipeline`): normalize, recompute, offload, prefetch, parameters, direct_access,
emit_gradients, each followed by `verify`; `split` cuts the result between forward and backward,
and `direct_calls` lets the halves run without torch's dispatcher.
"""

from __future__ import annotations

from lohan_fx.passes.base import Pass, PassManager, Rewrite
from lohan_fx.passes.direct_access import DirectAccess
from lohan_fx.passes.emit_gradients import EmitGradients
from lohan_fx.passes.normalize import Normalize
from lohan_fx.passes.offload import Offload
from lohan_fx.passes.parameters import Parameters
from lohan_fx.passes.prefetch import Prefetch
from lohan_fx.passes.recompute import Recompute

__all__ = ["Pass", "PassManager", "Rewrite", "pipeline"]


def pipeline() -> tuple[Pass, ...]:
    """All rewriting passes in order. Verification runs after each (see `PassManager`)."""
    return (
        Normalize(),
        Recompute(),
        Offload(),
        Prefetch(),
        Parameters(),
        DirectAccess(),
        EmitGradients(),
    )
