"""Predict one step: walk the rewritten program with the runtime's own wait semantics.

rules      in which order the SSDs are served
recorder   what happens when: spans, and memory over time
transfers  links and SSDs, and their threads
updates    the optimizer on the CPU
result     what is predicted
step       the device, which executes the program; `simulate`, `step_seconds`

Five lanes: the device (gpu) runs compute in order; h2d and d2h carry copies first come, first
served, and share the link's duplex rate while both work; the SSDs (ssd) are simplex; the CPU (cpu)
runs the optimizer. Each process here mirrors a thread of the runtime (`runtime.lanes`,
`runtime.engine`, `runtime.updates`), line by line where order matters. Nothing here knows torch.

What is not modelled: the time to launch kernels; a host that runs ahead of a GPU (transfers start
when compute reaches their instruction); latencies; compute and copies that slow each other down.
"""

from lohan_fx.simulate.result import Simulation
from lohan_fx.simulate.rules import Rules
from lohan_fx.simulate.step import simulate, step_seconds

__all__ = ["Rules", "Simulation", "simulate", "step_seconds"]
