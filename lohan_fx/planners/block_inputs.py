"""Static checkpoints: what a block passes to the next is saved, all else is computed again.

The activation policy of ZeRO-Infinity, ZeRO-Offload and Colossal-AI as the papers set them up
(LoHan §V-A, Fuyou §5.1: "the activation checkpoint granularity is each transformer block").
"""

from __future__ import annotations

from dataclasses import dataclass

from lohan_fx.plan import Action
from lohan_fx.planners.schedule import must_save
from lohan_fx.planners.strategy import Activations, Setting


@dataclass(frozen=True, slots=True)
class BlockInputs:
    """Save block inputs by the action `saved` ("swap" or "keep"), and recompute the rest.

    Random masks, which no region may draw again, are saved like block inputs.
    """

    saved: Action

    def __call__(self, setting: Setting) -> Activations:
        w = setting.workload
        checkpoints = w.inter_block | must_save(w)
        return Activations(
            actions={v: self.saved if v in checkpoints else "recompute" for v in w.residuals}
        )
