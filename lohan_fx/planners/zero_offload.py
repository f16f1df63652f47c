"""zero-offload: checkpoints and states in host memory, the CPU optimizer after backward.

Source: Ren et al., ATC'21, as LoHan §V-A and Fuyou §5.1 run it: DeepSpeed 0.9.3, without the
delayed update, which makes parameters stale. Host memory alone: no SSD takes what it cannot hold.
"""

from __future__ import annotations

from lohan_fx.planners.block_inputs import BlockInputs
from lohan_fx.planners.registry import register
from lohan_fx.planners.strategy import Strategy

ZERO_OFFLOAD = register("zero-offload")(
    Strategy(
        name="zero-offload",
        activations=BlockInputs("swap"),
        states="host",
        swap_to="host",
        schedule="serial",
    )
)
