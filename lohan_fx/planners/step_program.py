"""What no plan's simulated step undercuts: Checkmate's program, cut to what the runtime can do.

Stage t is op t. A forward op runs once in forward and any number of times in backward, right before
a backward op; a backward op runs once. A residual is sent in forward, once, and comes back in
backward, once. A transfer takes as many stages as it needs, at the link's rate; as long as it is
under way, all of its bytes are on the device. Compute waits in forward after an op (`release`), in
backward before one (`wait`). With R[t,k]: op k runs in stage t; W[t] the wait, C[t] = Σ c_k·R[t,k]
the compute of stage t; S[t,v]: value v is there when the stage begins:

    minimise Σ C[t] + W[t]
    forward   Σ m_v·O[t,v] ≤ B_d2h·(C[t] + W[t]),  so for v made in t and W[t] alone,  O ≤ S
    backward  Σ m_v·(F + E)[t,v] ≤ B_h2d·(C[t] + W[t]),  Σ m_v·E[t,v] ≤ B_h2d·W[t]
              F + E ≤ G + P,  G[t,v] ≤ G[t+1,v] + P[t+1,v],  Σ_t P[t,v] ≤ 1,  S + P + G ≤ 1
              P[t,v] ≤ Σ_{s<t} (F + E)[s,v] + E[t,v],  Σ_t (F + E)[t,v] ≤ Σ_t O[t,v]
    SSD       Σ m·O_ssd / B_write + Σ m·(F + E)_ssd / B_read ≤ Σ C[t] + W[t]

O is the part of v that leaves in stage t, F what arrives while the stage computes, E while it
waits; binary P: v is there from stage t on; binary G: its buffer is filling. Memory is counted
before every op and every op that runs again, as in `oracle`, but by value: an op's results may be
kept one by one.

What is there in backward stays to its last use.
Left out, which can only lower the optimum: queues and the order of requests, staging buffers, that
a swapped residual lies in one tier, that what a region reads stays to its end. Units must be on
the device (their updates take time and workspace there, and gradients live until then), and the
schedule other than "serial". No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from lohan_fx.hardware import HardwareProfile
from lohan_fx.planners.milp import Milp, value_of
from lohan_fx.planners.oracle_schedule import Links, Place
from lohan_fx.planners.windows import emit_points, unit_uses
from lohan_fx.workload import MODEL_INPUT_KINDS, Unit, Workload

_BYTES = 1000.0
"""The device budget in the program's own unit of memory: coefficients near 1."""

SMALL_SHIFT = 10
"""Values of at most 2⁻¹⁰ of the bytes of all residuals count as nothing: fewer variables."""


class StepProgram:
    """Builds the program. Tables are by (stage, op) or (stage, value).

    Args:
        budget_bytes: of the device; None looks for the smallest that is enough, not for the
            shortest step.
        links: None forbids swapping.
        relaxed: let all variables be fractions.
    """

    def __init__(
        self,
        workload: Workload,
        hw: HardwareProfile,
        budget_bytes: int | None,
        links: Links | None,
        *,
        relaxed: bool = False,
    ) -> None:
        w = self.workload = workload
        self.links = links
        self.places: tuple[Place, ...] = links.places if links is not None else ()
        self.turn, self.end = w.num_forward_ops, len(w.ops)
        self.residuals = frozenset(w.residuals)
        self.writes = [
            [v for v in op.writes if w.values[v].kind not in MODEL_INPUT_KINDS] for op in w.ops
        ]
        self.reads = [
            [v for v in dict.fromkeys(op.reads) if w.values[v].kind not in MODEL_INPUT_KINDS]
            for op in w.ops
        ]
        self.static_bytes = sum(
            v.num_bytes
            for v in w.values.values()
            if v.kind in MODEL_INPUT_KINDS and v.kind != "parameter"
        ) + sum(u.state_bytes + (0 if u.master_bytes else u.compute_bytes) for u in w.units)
        seconds = [op.seconds for op in w.ops]
        self._units(hw, seconds)
        scale = self.static_bytes if budget_bytes is None else budget_bytes
        self.unit_bytes = max(1.0, scale / _BYTES)
        total = sum(seconds)
        self.unit_s = total / self.end if total > 0 else 1.0
        self.lp = Milp("step", relaxed=relaxed)
        self.budget: Any = (
            self.lp.number("M") if budget_bytes is None else budget_bytes / self.unit_bytes
        )
        small = sum(w.values[v].num_bytes for v in self.residuals) >> SMALL_SHIFT
        self.size = {
            name: v.num_bytes / self.unit_bytes if v.num_bytes > small else 0.0
            for name, v in w.values.items()
        }
        self.cost = [s / self.unit_s for s in seconds]
        self.constant = sum(self.cost)
        self._last_needs()
        self.R: dict[tuple[int, int], Any] = {}
        self.S: dict[tuple[int, str], Any] = {}
        self.P: dict[tuple[int, str], Any] = {}
        self.G: dict[tuple[int, str], Any] = {}
        self.arrive: dict[tuple[int, str], list[tuple[Any, Any]]] = {}
        self.sent: dict[tuple[int, str], list[Any]] = {}
        self._variables()
        self.wait = [self.lp.number(f"W_{t}") for t in range(self.end)]
        self._dependencies()
        self._memory()
        self._update_memory()
        if self.places:
            self._offloads()
            self._fetches()
            self._capacities()
        again = [self.cost[k] * r for (_, k), r in self.R.items()]
        self.lp.minimise([self.budget] if budget_bytes is None else [*again, *self.wait])

    def seconds_of(self, objective: float) -> float:
        return (objective + self.constant) * self.unit_s

    def remade(self) -> dict[str, str]:
        """Of the solution: residual that is made again → the op before which it first is."""
        found: dict[str, str] = {}
        for (t, k), x in sorted(self.R.items(), key=lambda item: item[0]):
            for v in self.writes[k] if value_of(x) > 0.5 else ():
                if v in self.residuals and value_of(self.S.get((t, v), 0)) < 0.5:
                    found.setdefault(v, self.workload.ops[t].name)
        return found

    def swapped(self) -> frozenset[str]:
        """Of the solution: residuals that come back."""
        return frozenset(v for (_, v), x in self.P.items() if value_of(x) > 0.5)

    def _units(self, hw: HardwareProfile, seconds: list[float]) -> None:
        """Updates take time after a unit's last gradient; all its gradients live until then."""
        emits = emit_points(self.workload, unit_uses(self.workload))
        self.updates: list[tuple[int, Unit]] = []
        for unit in self.workload.units:
            if unit.trainable:
                at = emits[unit.name]
                moved = unit.device_update_bytes(copy=not unit.master_bytes)
                seconds[at] += moved / hw.device_bytes_per_s
                self.reads[at] = list(dict.fromkeys([*self.reads[at], *unit.gradients]))
                self.updates.append((at, unit))

    def _last_needs(self) -> None:
        """For each value the last stage that may read it, and the last one in forward."""
        self.last: dict[str, int] = {}
        self.forward_end: dict[str, int] = {}
        self.rerun: list[int] = list(range(self.end))
        readers: dict[str, list[int]] = {v: [] for v in self.workload.values}
        for k in reversed(range(self.end)):
            for v in self.writes[k]:
                pinned = self.workload.values[v].is_output
                self.forward_end[v] = max([k, *(j for j in readers[v] if j < self.turn)])
                ends = [self.rerun[j] for j in readers[v]]
                self.last[v] = self.end - 1 if pinned else max([k, *ends])
            if k < self.turn and self.workload.ops[k].recomputable:
                again = (v for v in self.writes[k] if not self.workload.values[v].is_output)
                self.rerun[k] = max([k, *(self.last[v] for v in again)])
            for v in self.reads[k]:
                readers[v].append(k)

    def least_bytes(self) -> tuple[int, str]:
        """What some op needs at once whatever is planned, and its name."""
        values = self.workload.values
        need = []
        for t, op in enumerate(self.workload.ops):
            alive = {v for v in (*self.reads[t], *self.writes[t]) if v in self.last}
            alive |= {v for v, x in self._kept(t) if x == 1 and self.size[v]}
            held = sum(values[v].num_bytes for v in alive)
            need.append((self.static_bytes + held + op.scratch_bytes, op.name))
        return max(need, key=lambda item: item[0], default=(self.static_bytes, "start"))

    def _kept(self, t: int) -> Iterator[tuple[str, int]]:
        return ((v, x) for (s, v), x in self.S.items() if s == t and isinstance(x, int))

    # -- variables ----------------------------------------------------------------------------

    def _variables(self) -> None:
        lp = self.lp
        for v, last in self.last.items():
            made = self.workload.producer[v]
            pinned = self.workload.values[v].is_output
            if made >= self.turn or pinned:
                self.S.update({(t, v): 1 for t in range(made + 1, last + 1)})
                continue
            for t in range(made + 1, self.forward_end[v] + 1):
                self.S[t, v] = 1
            if v not in self.residuals:
                continue
            for t in range(self.forward_end[v] + 1, last + 1):
                self.S[t, v] = lp.binary(f"S_{t}_{v}") if self.size[v] else 1
            if self.places and self.size[v]:
                for t in range(made, self.turn):
                    self.sent[t, v] = [lp.number(f"O_{p}_{t}_{v}", 1) for p in self.places]
                for t in range(self.turn, last + 1):
                    self._fetch_variables(t, v)
        for k in range(self.turn):
            for t in range(self.turn, self.rerun[k] + 1):
                self.R[t, k] = lp.binary(f"R_{t}_{k}")

    def _fetch_variables(self, t: int, v: str) -> None:
        lp = self.lp
        self.P[t, v] = lp.binary(f"P_{t}_{v}")
        self.G[t, v] = lp.binary(f"G_{t}_{v}")
        self.arrive[t, v] = [
            (lp.number(f"F_{p}_{t}_{v}", 1), lp.number(f"E_{p}_{t}_{v}", 1)) for p in self.places
        ]

    def runs(self, t: int, k: int) -> Any:
        return 1 if k == t else self.R.get((t, k), 0)

    def there(self, t: int, v: str) -> Any:
        """Whether a value can be read in stage t, or kept after it."""
        made = self.runs(t, self.workload.producer[v])
        return self.lp.sum([made, self.S.get((t, v), 0), self.P.get((t, v), 0)])

    # -- constraints --------------------------------------------------------------------------

    def _dependencies(self) -> None:
        lp = self.lp
        for (t, k), run in self.R.items():
            for v in self.reads[k]:
                lp.add(run <= self.there(t, v))
        for t in range(self.turn, self.end):
            for v in self.reads[t]:
                if v in self.last and not isinstance(self.S.get((t, v)), int):
                    lp.add(self.there(t, v) >= 1)
        for (t, v), kept in self.S.items():
            if not isinstance(kept, int):
                lp.add(kept <= self.there(t - 1, v))
        for (t, v), fetched in self.P.items():
            lp.add(lp.sum([fetched, self.G[t, v], self.S.get((t, v), 0)]) <= 1)
        self._stays()

    def _stays(self) -> None:
        """What is there in backward, kept or fetched, stays to the last op that reads it."""
        for (t, v), kept in self.S.items():
            after = self.S.get((t + 1, v), 0)
            if t < self.turn or isinstance(kept, int) or isinstance(after, int):
                continue
            if t < self.workload.users[v][-1]:
                self.lp.add(after >= kept + self.P.get((t, v), 0))

    def _memory(self) -> None:
        lp = self.lp
        held: list[list[Any]] = [[] for _ in range(self.end)]
        for table in (self.S, self.P, self.G):
            for (t, v), x in table.items():
                held[t].append(self.size[v] * x)
        static = self.static_bytes / self.unit_bytes
        for t in range(self.end):
            now: Any = static + lp.sum(held[t])
            for k in (*(k for k in range(self.turn) if (t, k) in self.R), t):
                run = self.runs(t, k)
                now = now + lp.sum(self.size[v] * self._born(t, k, v) for v in self.writes[k])
                scratch = self.workload.ops[k].scratch_bytes / self.unit_bytes
                lp.add(now + scratch * run <= self.budget)
                if k < t:
                    use = lp.number(f"U_{t}_{k}")
                    lp.add(use == now)
                    now = use - lp.sum(self._freed(t, k))

    def _update_memory(self) -> None:
        """Workspace of an update beside what lives on, unless a region delays the update."""
        lp = self.lp
        for at, unit in self.updates:
            parameters = set(self.workload.parameters_of_unit[unit.name])
            late = [
                run
                for (t, k), run in self.R.items()
                if t > at and parameters.intersection(self.workload.ops[k].reads)
            ]
            beside = [self.size[v] * x for (t, v), x in self.S.items() if t == at + 1]
            beside += [self.size[v] * x for (t, v), x in self.G.items() if t == at]
            gone = [g for g in dict.fromkeys(unit.gradients) if (at + 1, g) not in self.S]
            held = self.static_bytes + sum(self.workload.values[g].num_bytes for g in gone)
            scratch = unit.update_scratch_bytes / self.unit_bytes
            now = held / self.unit_bytes + lp.sum(beside) + scratch * (1 - lp.sum(late))
            lp.add(now <= self.budget)

    def _born(self, t: int, k: int, v: str) -> Any:
        """Whether op k allocates v. An op of several results may run for another one's sake."""
        if k == t or len(self.writes[k]) == 1:
            return self.runs(t, k)
        born = self.lp.number(f"N_{t}_{v}", 1)
        here = self.lp.sum([self.S.get((t, v), 0), self.P.get((t, v), 0)])
        self.lp.add(born >= self.R[t, k] - here)
        return born

    def _freed(self, t: int, k: int) -> list[Any]:
        """Bytes that die right after op k has run again in stage t."""
        lp = self.lp
        found = []
        for v in (*self.reads[k], *self.writes[k]):
            kept = self.S.get((t + 1, v), 0)
            later = [j for j in self.workload.users[v] if j > k and (j == t or (t, j) in self.R)]
            pinned = self.workload.values[v].is_output
            if not self.size[v] or pinned or t in later or (isinstance(kept, int) and kept):
                continue
            free = lp.number(f"D_{t}_{k}_{v}", 1)
            lp.add(free <= self.R[t, k])
            lp.add(free + kept <= 1)
            for j in later:
                lp.add(free + self.R[t, j] <= 1)
            found.append(self.size[v] * free)
        return found

    def _again(self, t: int) -> Any:
        """Seconds that stage t spends on ops that run again."""
        ran = (k for k in range(self.turn) if (t, k) in self.R)
        return self.lp.sum(self.cost[k] * self.R[t, k] for k in ran)

    @property
    def scale(self) -> float:
        """Bytes per second to the program's own units, upside down."""
        return self.unit_bytes / self.unit_s

    def _offloads(self) -> None:
        assert self.links is not None
        lp, pace = self.lp, self.scale / self.links.d2h
        for t in range(self.turn):
            stage = ((v, xs) for (s, v), xs in self.sent.items() if s == t)
            parts = [(v, self.size[v] * x) for v, xs in stage for x in xs]
            lp.add(pace * lp.sum(x for _, x in parts) <= self.cost[t] + self.wait[t])
            own = lp.sum(x for v, x in parts if self.workload.producer[v] == t)
            lp.add(pace * own <= self.wait[t])
        for (t, v), parts_of in self.sent.items():
            kept = self.S.get((t, v), 0)
            if t > self.workload.producer[v] and not isinstance(kept, int):
                lp.add(lp.sum(parts_of) <= kept)

    def _fetches(self) -> None:
        assert self.links is not None
        lp, pace = self.lp, self.scale / self.links.h2d
        for t in range(self.turn, self.end):
            stage = [
                (self.size[v], f, e) for (s, v), xs in self.arrive.items() if s == t for f, e in xs
            ]
            busy = self.cost[t] + self._again(t) + self.wait[t]
            lp.add(pace * lp.sum(m * (f + e) for m, f, e in stage) <= busy)
            lp.add(pace * lp.sum(m * e for m, _, e in stage) <= self.wait[t])
        for v in sorted({v for _, v in self.P}):
            stages = [t for t in range(self.turn, self.end) if (t, v) in self.P]
            lp.add(lp.sum(self.P[t, v] for t in stages) <= 1)
            for at in range(len(self.places)):
                arrived = lp.sum(x for t in stages for x in self.arrive[t, v][at])
                made = self.workload.producer[v]
                lp.add(arrived <= lp.sum(self.sent[t, v][at] for t in range(made, self.turn)))
            past: list[Any] = []
            for t in stages:
                parts = self.arrive[t, v]
                lp.add(lp.sum(f + e for f, e in parts) <= self.G[t, v] + self.P[t, v])
                lp.add(self.P[t, v] <= lp.sum([*past, *(e for _, e in parts)]))
                past += [x for part in parts for x in part]
                after = [self.G.get((t + 1, v), 0), self.P.get((t + 1, v), 0)]
                lp.add(self.G[t, v] <= lp.sum(after))

    def _capacities(self) -> None:
        """Bytes of the tiers; seconds of the SSDs, which write and read one at a time."""
        assert self.links is not None
        lp, links = self.lp, self.links
        room = {"host": links.host_bytes, "ssd": links.ssd_bytes}
        for at, place in enumerate(self.places):
            stored = lp.sum(self.size[v] * xs[at] for (_, v), xs in self.sent.items())
            if math.isfinite(room[place]):
                lp.add(stored <= room[place] / self.unit_bytes)
            if place == "ssd":
                read = lp.sum(
                    self.size[v] * x for (_, v), xs in self.arrive.items() for x in xs[at]
                )
                again = lp.sum(self._again(t) for t in range(self.turn, self.end))
                busy = self.scale / links.ssd_write * stored + self.scale / links.ssd_read * read
                lp.add(busy <= self.constant + again + lp.sum(self.wait))
