"""Fuse memory-bound ops of a captured step, before it is annotated and planned.

Matrix products and attention run the kernels that eager mode runs; what lies between them
(normalization, activations, rotary embeddings, masks, casts, sums of bias gradients) is compiled by
Inductor, a kernel for each structure. A fused op is one op for everything that follows: annotation,
planners, passes, recomputation, simulation. So planned memory stays exact.
"""

from lohan_fx.fusion.clusters import fuse
from lohan_fx.fusion.kernel import Kernels

__all__ = ["Kernels", "fuse"]
