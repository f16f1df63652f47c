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
            source = rewrite.node(v)
            made = w.ops[w.producer[v]].name
            mark = Mark(
                kind="offload",
                name=v,
                key=slot,
                tier=decision.tier,
                num_bytes=w.values[v].num_bytes,
            )
            handle = rewrite.insert(
                rewrite.after(made, mark.rank),
                ops.offload,
                (source, rewrite.run, slot),
                mark,
                rewrite.token(),
                behind=True,
                phase="forward",
                block=source.meta["block"],
            )
            assert decision.release_after is not None
            mark = Mark(kind="release", name=v, key=slot)
            rewrite.handles[v] = rewrite.insert(
                rewrite.after(decision.release_after, mark.rank),
                ops.release,
                (source, handle, rewrite.run, slot),
                mark,
                rewrite.token(),
                behind=True,
                phase="forward",
                block=rewrite.op_nodes[decision.release_after].meta["block"],
            )
