"""zero-infinity: checkpoints to host memory, states on SSD, the CPU optimizer after backward.

Source: Rajbhandari et al., SC'21, as LoHan §V-A and Fuyou §5.1 run it (DeepSpeed 0.9.3).

Not as in the system: gradients wait in host memory for the optimizer, and do not pass through
the SSDs (Fuyou §4.3).
"""

from __future__ import annotations

from lohan_fx.planners.block_inputs import BlockInputs
from lohan_fx.planners.registry import register
from lohan_fx.planners.strategy import Strategy

ZERO_INFINITY = register("zero-infinity")(
    Strategy(
        name="zero-infinity",
        activations=BlockInputs("swap"),
        states="ssd",
        swap_to="host",
        schedule="serial",
    )
)
