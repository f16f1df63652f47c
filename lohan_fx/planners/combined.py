"""lohan+zero, lohan+capuchin, lohan+g10, lohan+checkmate: LoHan with another activation policy.

Source: LoHan §V-E, Fig. 9a (LoHan+DS, LoHan+Cap, LoHan+G10, LoHan+CM): model states and the
optimizer as LoHan has them (host memory, then SSD; `states="ssd"` for the paper's "all model
states to SSDs"; updates on the CPU, beside backward), the activation policy of another system.
`strategy.combine` mixes any others.
"""

from __future__ import annotations

from lohan_fx.planners.registry import register
from lohan_fx.planners.strategy import combine

for _name, _activations in (
    ("lohan+zero", "zero-infinity"),
    ("lohan+capuchin", "capuchin"),
    ("lohan+g10", "g10"),
    ("lohan+checkmate", "checkmate"),
):
    register(_name)(combine(_activations, name=_name))
