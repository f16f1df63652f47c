"""colossal-ai: checkpoints stay on the device, states on SSD, the CPU optimizer after backward.

Source: Bian et al., ICPP'23, as LoHan §V-A and Fuyou §5.1 run it: "we do not offload activation
checkpoints in Colossal-AI because it does not support" that.

Not as in the system: a unit's states are all in one tier, so its compute copy is on SSD too
(Colossal-AI: parameters and gradients in host memory, optimizer states on SSD). What cannot be
made again is kept with the checkpoints.
"""

from __future__ import annotations

from lohan_fx.planners.block_inputs import BlockInputs
from lohan_fx.planners.registry import register
from lohan_fx.planners.strategy import Strategy

COLOSSAL_AI = register("colossal-ai")(
    Strategy(name="colossal-ai", activations=BlockInputs("keep"), states="ssd", schedule="serial")
)
