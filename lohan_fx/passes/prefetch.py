"""Insert `prefetch(handle) → y` where the plan says, and `wait(y)` before the first use."""

from __future__ import annotations

from dataclasses import dataclass

from lohan_fx.passes.base import Mark, Rewrite, backward_users, replace_uses
from lohan_fx.runtime import ops


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Options: none. Backward, recompute regions included, then reads the reload."""

    name: str = "prefetch"

    def __call__(self, rewrite: Rewrite) -> None:
        w = rewrite.workload
        for v, first in rewrite.first_uses.items():
            slot = rewrite.slots[v]
            decision = rewrite.plan.residuals[v]
            assert decision.prefetch_before is not None
            source = rewrite.nodes[v]
            users = backward_users(source)
            buffer = rewrite.insert_before(
                decision.prefetch_before,
                ops.prefetch,
                (rewrite.handles[v], rewrite.run, slot),
                Mark(
                    kind="prefetch",
                    name=v,
                    key=slot,
                    tier=decision.tier,
                    num_bytes=w.values[v].num_bytes,
                ),
            )
            rewrite.returns(buffer, rewrite.empty_like(source))
            ready = rewrite.insert_before(
                w.ops[first].name,
                ops.wait,
                (buffer, rewrite.run, slot),
                Mark(kind="wait", name=v, key=slot),
            )
            rewrite.returns(ready, buffer.meta["val"], view_of=buffer)
            replace_uses(source, ready, users)
