"""Insert `prefetch(handle) → y` where the plan says, and `wait(y)` before the first use."""

from __future__ import annotations

from dataclasses import dataclass

from lohan_fx.passes.base import Mark, Rewrite, replace_uses
from lohan_fx.runtime import ops


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Options: none. Backward, recompute regions included, then reads the reload."""

    name: str = "prefetch"

    def __call__(self, rewrite: Rewrite) -> None:
        w = rewrite.workload
        for v in sorted(rewrite.slots, key=rewrite.first_use):
            slot = rewrite.slots[v]
            decision = rewrite.plan.residuals[v]
            source = rewrite.node(v)
            users = [u for u in source.users if u.meta.get("phase") == "backward"]
            assert decision.prefetch_before is not None
            mark = Mark(
                kind="prefetch",
                name=v,
                key=slot,
                tier=decision.tier,
                num_bytes=w.values[v].num_bytes,
            )
            buffer = rewrite.insert(
                rewrite.before(decision.prefetch_before, mark.rank),
                ops.prefetch,
                (rewrite.handles[v], rewrite.run, slot),
                mark,
                rewrite.empty_like(source),
                behind=False,
                phase="backward",
                block=rewrite.op_nodes[decision.prefetch_before].meta["block"],
            )
            first = w.ops[rewrite.first_use(v)].name
            mark = Mark(kind="wait", name=v, key=slot)
            ready = rewrite.insert(
                rewrite.before(first, mark.rank),
                ops.wait,
                (buffer, rewrite.run, slot),
                mark,
                buffer.meta["val"],
                behind=False,
                phase="backward",
                block=rewrite.op_nodes[first].meta["block"],
            )
            ready.meta["root"] = buffer
            replace_uses(source, ready, users)
