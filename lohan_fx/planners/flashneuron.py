"""flashneuron: states on the device, saved activations to SSD in forward order until it fits.

Source: Bae et al., FAST'21 (linear tensor selection: the first tensors of forward, until
the rest fits), as LoHan §V-A runs it. States, gradients included, stay on the device, where the
optimizer runs after backward: 16 bytes a parameter, which end at 1.55B parameters on 24 GiB
(LoHan §I).

Not as in the system: no compression of activations (its second selection phase).
"""

from __future__ import annotations

from lohan_fx.errors import format_bytes
from lohan_fx.planners.prefix import fewest_swapped, swap_prefix
from lohan_fx.planners.registry import register
from lohan_fx.planners.strategy import Activations, Setting, Strategy


def offload_in_forward_order(setting: Setting) -> Activations:
    """Swap the fewest first residuals of forward that make the rest fit.

    Raises:
        InsufficientMemoryError: it does not fit with all of them swapped.
    """
    order = setting.workload.residuals
    count = fewest_swapped(setting, order)
    found = swap_prefix(setting, order, count)
    size = setting.num_bytes(order[:count])
    note = f"the first {count} of {len(order)} residuals are offloaded ({format_bytes(size)})"
    return Activations(actions=found.actions, notes=(note,))


FLASHNEURON = register("flashneuron")(
    Strategy(
        name="flashneuron",
        activations=offload_in_forward_order,
        states="device",
        swap_to="ssd",
        schedule="serial",
    )
)
