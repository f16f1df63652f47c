"""chen-sqrt: keep every ⌊√n⌋-th articulation point of forward, recompute the segments between.

Source: Chen et al. 2016, as planners.md and Checkmate (MLSys'20, "AP √n") carry it over from
chains to graphs: only at an articulation point can forward be cut so that one value is enough to
run it again from there. Everything on the device, the optimizer after backward.

Not as in the paper: a point whose value backward never reads is passed over (nothing of it is
saved anyway, n does not count it); results that cannot be made again (random masks) are kept.
"""

from __future__ import annotations

import math

from lohan_fx.plan import Action
from lohan_fx.planners.registry import register
from lohan_fx.planners.schedule import must_save
from lohan_fx.planners.strategy import Activations, Setting, Strategy
from lohan_fx.workload import MODEL_INPUT_KINDS, Workload


def articulation_points(workload: Workload) -> tuple[str, ...]:
    """Residuals through which every path of the forward graph leads, in order of creation.

    One pass, exact on a DAG: nothing made before such a value is read after it, so in any
    order that respects the edges it is the only value that is still to be read. Model inputs are
    always there and do not count.
    """
    n = workload.num_forward_ops
    residuals = set(workload.residuals)
    unread: dict[str, int] = {}
    found: list[str] = []
    for i, op in enumerate(workload.ops[:n]):
        for v in dict.fromkeys(op.reads):
            if v in unread:
                unread[v] -= 1
                if not unread[v]:
                    del unread[v]
        for v in op.writes:
            uses = sum(1 for user in workload.users[v] if i < user < n)
            if uses and workload.values[v].kind not in MODEL_INPUT_KINDS:
                unread[v] = uses
        if len(unread) == 1 and (v := next(iter(unread))) in op.writes and v in residuals:
            found.append(v)
    return tuple(found)


def checkpoints(workload: Workload) -> tuple[str, ...]:
    """Every ⌊√n⌋-th of the n articulation points."""
    points = articulation_points(workload)
    step = max(1, math.isqrt(len(points)))
    return points[step - 1 :: step]


def keep_checkpoints(setting: Setting) -> Activations:
    """The activation policy: one region a segment, named by the checkpoint that it starts from."""
    w = setting.workload
    chosen = set(checkpoints(w))
    kept = chosen | must_save(w)
    actions: dict[str, Action] = {v: "keep" if v in kept else "recompute" for v in w.residuals}
    regions: dict[str, str] = {}
    segment = "start"
    for v in w.residuals:
        if v in chosen:
            segment = f"after {v}"
        elif actions[v] == "recompute":
            regions[v] = segment
    note = f"{len(chosen)} of {len(articulation_points(w))} articulation points are kept"
    return Activations(actions=actions, regions=regions, notes=(note,))


CHEN_SQRT = register("chen-sqrt")(
    Strategy(name="chen-sqrt", activations=keep_checkpoints, states="device", schedule="serial")
)
