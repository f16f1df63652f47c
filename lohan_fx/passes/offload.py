"""Insert `offload(x) → handle` behind the producer, and `release(x, handle)` where memory falls."""

from __future__ import annotations

from dataclasses import dataclass

from lohan_fx.passes.base import Mark, Rewrite
from lohan_fx.runtime import ops


@dataclass(frozen=True, slots=True)
class Offload:
    """Options: none; the plan says which residuals, to which tier, and where they are released."""

    name: str = "offload"

    def __call__(self, rewrite: Rewrite) -> None:
        w = rewrite.workload
        for v, slot in rewrite.slots.items():
            decision = rewrite.plan.residuals[v]
            assert decision.release_after is not None
            source = rewrite.nodes[v]
            handle = rewrite.insert_after(
                w.ops[w.producer[v]].name,
                ops.offload,
                (source, rewrite.run, slot),
                Mark(
                    kind="offload",
                    name=v,
                    key=slot,
                    tier=decision.tier,
                    num_bytes=w.values[v].num_bytes,
                ),
            )
            rewrite.handles[v] = rewrite.insert_after(
                decision.release_after,
                ops.release,
                (source, handle, rewrite.run, slot),
                Mark(kind="release", name=v, key=slot),
            )
