"""Schedules of a graph of stages, and what they cost: a check apart from any program. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from lohan_fx.errors import PlanError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.planners.oracle_graph import Graph

Place = Literal["host", "ssd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Bytes per second. An SSD rate of 0.0: there are no SSDs. Host and SSD capacities in bytes."""

    h2d: float
    d2h: float
    duplex: float
    ssd_read: float = 0.0
    ssd_write: float = 0.0
    host_bytes: float = math.inf
    ssd_bytes: float = math.inf

    @classmethod
    def of(cls, hw: HardwareProfile, host_bytes: float = math.inf, ssd_bytes: float = 0.0) -> Links:
        """The rates of a profile; no SSD tier unless there are bytes for it."""
        ssd = bool(hw.ssds) and ssd_bytes > 0
        return cls(
            h2d=hw.h2d_bytes_per_s,
            d2h=hw.d2h_bytes_per_s,
            duplex=hw.duplex_bytes_per_s,
            ssd_read=hw.ssd_read_bytes_per_s if ssd else 0.0,
            ssd_write=hw.ssd_write_bytes_per_s if ssd else 0.0,
            host_bytes=host_bytes,
            ssd_bytes=ssd_bytes,
        )

    @property
    def places(self) -> tuple[Place, ...]:
        found: list[Place] = ["host"] if self.host_bytes > 0 else []
        return (*found, "ssd") if self.ssd_read > 0 and self.ssd_bytes > 0 else tuple(found)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A schedule of a graph. `runs[t]`, `kept[t]`: nodes that run in, are there before stage t.

    `sent[place][t]` has (node, fraction); `fetched[place][t]` nodes.
    """

    runs: tuple[frozenset[int], ...]
    kept: tuple[frozenset[int], ...]
    sent: Mapping[Place, tuple[Mapping[int, float], ...]] = field(default_factory=dict)
    fetched: Mapping[Place, tuple[frozenset[int], ...]] = field(default_factory=dict)


def schedule_peak(graph: Graph, schedule: Schedule) -> int:
    """Device bytes of a schedule at its fullest moment, by walking it.

    Raises:
        PlanError: a node runs without what it reads, or something is kept that is not there.
    """
    last = len(graph) - 1
    peak = graph.static_bytes
    for t in range(len(graph)):
        alive = set(schedule.kept[t])
        if t and not alive <= _there(schedule, t - 1):
            raise PlanError(f"stage {t} keeps results that stage {t - 1} did not have")
        for stages in schedule.fetched.values():
            alive |= stages[t]
        needed = schedule.kept[t + 1] if t < last else frozenset()
        for k in sorted(schedule.runs[t]):
            node = graph.nodes[k]
            if not set(node.reads) <= alive:
                raise PlanError(f"node {node.name} runs in stage {t} without what it reads")
            alive.add(k)
            held = graph.static_bytes + sum(graph.nodes[i].num_bytes for i in alive)
            peak = max(peak, held + node.scratch_bytes)
            for i in (*node.reads, k):
                later = any(j > k and j in schedule.runs[t] for j in graph.users[i])
                if not later and i not in needed and not graph.nodes[i].pinned:
                    alive.discard(i)
    return peak


def _there(schedule: Schedule, t: int) -> set[int]:
    found = set(schedule.kept[t]) | set(schedule.runs[t])
    for stages in schedule.fetched.values():
        found |= stages[t]
    return found


def schedule_seconds(graph: Graph, schedule: Schedule, links: Links | None) -> float:
    """Σ c·R, or with swapping Σ Time[t]."""
    total = 0.0
    for t in range(len(graph)):
        busy = [sum(graph.nodes[i].seconds for i in sorted(schedule.runs[t]))]
        if links is not None:
            out = dict.fromkeys(links.places, 0.0)
            back = dict.fromkeys(links.places, 0.0)
            for place, stages in schedule.sent.items():
                out[place] = sum(graph.nodes[i].num_bytes * part for i, part in stages[t].items())
            for place, fetched in schedule.fetched.items():
                back[place] = sum(graph.nodes[i].num_bytes for i in sorted(fetched[t]))
            busy.append(sum(out.values()) / links.d2h)
            busy.append(sum(back.values()) / links.h2d)
            busy.append((sum(out.values()) + sum(back.values())) / links.duplex)
            if "ssd" in links.places:
                busy.append(out["ssd"] / links.ssd_write + back["ssd"] / links.ssd_read)
        total += max(busy)
    return total


def trimmed(graph: Graph, schedule: Schedule) -> Schedule:
    """The schedule without what is of no use: where memory is plenty, solvers leave that in."""
    runs = [set(stage) for stage in schedule.runs]
    kept = [set(stage) for stage in schedule.kept]
    fetched = {p: [set(s) for s in stages] for p, stages in schedule.fetched.items()}
    needed: set[int] = set()
    for t in reversed(range(len(graph))):
        useful: set[int] = set()
        read: set[int] = set()
        for k in sorted(runs[t], reverse=True):
            if k == t or k in needed or k in read:
                useful.add(k)
                read.update(graph.nodes[k].reads)
        runs[t] = useful
        wanted = (needed | read) - (useful - kept[t])
        for stages in fetched.values():
            stages[t] &= wanted
        pinned = {i for i in kept[t] if graph.nodes[i].pinned}
        kept[t] = kept[t] & wanted | pinned
        needed = kept[t]
    sent = {
        p: tuple(
            {i: part for i, part in stage.items() if any(i in s for s in fetched[p][t + 1 :])}
            for t, stage in enumerate(stages)
        )
        for p, stages in schedule.sent.items()
    }
    return Schedule(
        runs=tuple(map(frozenset, runs)),
        kept=tuple(map(frozenset, kept)),
        sent=sent,
        fetched={p: tuple(map(frozenset, stages)) for p, stages in fetched.items()},
    )
