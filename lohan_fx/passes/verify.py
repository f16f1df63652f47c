"""Read the program back from the graph, and check the invariants.

`instructions(rewrite)` is the inverse of the passes: the same list of `Instruction` that
`lohan_fx.program.lower` makes from the plan. After the last pass the two must be equal; after
every pass the invariants below hold:

1. one wait before the first use of each prefetch, one offload a release, in that order;
2. no use of a value after its release, nor of any view of it;
3. every slot is reloaded exactly once;
4. nothing recomputed draws randomness, mutates or communicates;
5. the peak by storage is within the budget, and equal to the plan's.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import fx

from lohan_fx.annotate import is_getitem, is_view
from lohan_fx.capture import is_random
from lohan_fx.errors import InsufficientMemoryError, VerificationError
from lohan_fx.passes.base import Mark, Rewrite
from lohan_fx.program import Instruction, Program, lower, residency


def printed(rewrite: Rewrite) -> list[tuple[str, str]]:
    """(kind, name) of everything that runs, in the order of the graph."""
    names = {node: name for name, node in rewrite.op_nodes.items()}
    found: list[tuple[str, str]] = []
    for node in rewrite.graph.nodes:
        mark: Mark | None = node.meta.get("lohan")
        if mark is not None:
            if not mark.part:
                found.append((mark.kind, mark.name))
        elif node in names:
            found.append(("compute", names[node]))
    return found


def check_invariants(rewrite: Rewrite) -> None:
    """Check what must hold after every pass.

    Raises:
        VerificationError: names the invariant, the value and the nodes.
    """
    order = {node: i for i, node in enumerate(rewrite.graph.nodes)}
    marked: dict[tuple[str, str], list[fx.Node]] = {}
    for node in rewrite.graph.nodes:
        mark = node.meta.get("lohan")
        if mark is not None and not mark.part:
            marked.setdefault((mark.kind, mark.name), []).append(node)
    twice = [key for key, nodes in marked.items() if len(nodes) > 1]
    if twice:
        raise VerificationError(f"{twice[0][0]} of {twice[0][1]} stands {len(marked[twice[0]])} times")
    for (kind, name), (node,) in marked.items():
        if kind == "release":
            _check_release(node, name, order)
        elif kind == "prefetch":
            _check_prefetch(node, name, marked, order)
        elif kind == "recompute":
            _check_region(rewrite, node)


def _check_release(node: fx.Node, name: str, order: dict[fx.Node, int]) -> None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    alive = [source]
    while alive:
        value = alive.pop()
        for user in value.users:
            # backward readers move to the reload in a later pass; _check_prefetch sees to them
            if order[user] > order[node] and user.meta.get("phase") == "forward":
                raise VerificationError(
                    f"{name} is read by {user.name} after its release at {node.name}"
                )
            if is_view(user) and user.meta.get("lohan") is None:
                alive.append(user)


def _check_prefetch(
    node: fx.Node,
    name: str,
    marked: dict[tuple[str, str], list[fx.Node]],
    order: dict[fx.Node, int],
) -> None:
    for kind in ("offload", "release", "wait"):
        if (kind, name) not in marked:
            raise VerificationError(f"{name} is reloaded but has no {kind}")
    (offload,), (release,), (wait,) = (marked[k, name] for k in ("offload", "release", "wait"))
    places = [order[n] for n in (offload, release, node, wait)]
    if places != sorted(places):
        raise VerificationError(
            f"{name}: offload, release, prefetch and wait stand at {places}, out of order"
        )
    early = [u.name for u in node.users if u is not wait]
    if early:
        raise VerificationError(f"reload of {name} is read by {early[0]} without a wait")
    source = offload.args[0]
    assert isinstance(source, fx.Node)
    late = [u.name for u in source.users if u.op != "output" and order[u] > order[release]]
    if late:
        raise VerificationError(f"{name} is read by {late[0]} after its release")


def _check_region(rewrite: Rewrite, node: fx.Node) -> None:
    body = rewrite.module.get_submodule(str(node.target))
    assert isinstance(body, fx.GraphModule)
    for inner in body.graph.nodes:
        if inner.op == "call_function" and (is_random(inner) or inner.is_impure()):
            raise VerificationError(
                f"region {node.name} would run {inner.target} again, which draws randomness, "
                "mutates or communicates"
            )


def check_program(rewrite: Rewrite, budget_bytes: int | None = None) -> Program:
    """Hold the finished graph equal to the lowering of its plan; check its peak.

    Returns the program. `budget_bytes` is the device budget (None: unlimited).

    Raises:
        VerificationError: the graph and the plan disagree.
        InsufficientMemoryError: the program needs more than the budget.
    """
    program = lower(rewrite.workload, rewrite.plan)
    wanted = [(i.kind, i.name) for i in program.instructions]
    found = printed(rewrite)
    if wanted != found:
        k = next(
            (k for k, (a, b) in enumerate(zip(wanted, found, strict=False)) if a != b),
            min(len(wanted), len(found)),
        )
        raise VerificationError(
            f"the graph is not the plan's program: at {k} the plan has {wanted[k : k + 3]}, the "
            f"graph {found[k : k + 3]}; missing {list((Counter(wanted) - Counter(found)))[:3]}, "
            f"extra {list((Counter(found) - Counter(wanted)))[:3]}"
        )
    memory = residency(program)
    if budget_bytes is not None and memory.peak_bytes > budget_bytes:
        raise InsufficientMemoryError(
            "device",
            memory.peak_bytes,
            budget_bytes,
            where=memory.peak_name,
            at_peak=memory.at_peak,
        )
    return program
