"""Rows of the linear model about time: what no schedule of a step can avoid. No torch.

For every cut c of forward or backward, a lane's work that must be done before op c and the
device's work from c on add up; so do the device's work before c and a lane's work that cannot
start before c:

    T_f ≥ device(all of forward)
    T_f ≥ d2h(offloads of what is made from c on) + device(before c)
    T_f ≥ h2d(what is fetched for uses up to c) + device(from c on)
    T_b ≥ h2d(reloads and fetches for uses up to c) + device(from c on)
    T_b ≥ device(up to c) + d2h(gradients emitted from c on)
    T_b + T_o ≥ device(up to c) + cpu(updates of units emitted from c on)
    T_f + T_o ≥ cpu(all updates), with schedule "deferred"

and the like for the SSDs, which are simplex (LoHan Eq. 2 and 5 are the rows with c at an end).
They hold for the step that `simulate` walks: fetches of a phase start in it, compute waits for
offloads in forward and for gradients in backward, and the step ends when the last update has
ended. Recomputation counts before c only if its residual is used up to c: a region stands before
its members' first use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import LATE, WAITING, WHOLE, Schedule
from lohan_fx.planners.simplex import Floats
from lohan_fx.planners.structure import Windows
from lohan_fx.program import direct_read_bytes
from lohan_fx.workload import Workload

Stages = tuple[float, float, float]
FORWARD: Stages = (1.0, 0.0, 0.0)
BACKWARD: Stages = (0.0, 1.0, 0.0)
OPTIMIZER: Stages = (0.0, 0.0, 1.0)
TO_END: Stages = (0.0, 1.0, 1.0)
BETWEEN: Stages = (1.0, 0.0, 1.0)
"""From one backward to the next: what schedule "deferred" lets run beside updates on the device and
the next forward."""
STEP: Stages = (1.0, 1.0, 1.0)

_LAST_UPDATES = 3
"""So many of the last emissions are cuts: their updates are the ones that nothing hides."""

Table = Mapping[str, Floats]
"""Option → what each residual, or each unit, adds to a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`base` + what the chosen options add ≤ T_f·stages[0] + T_b·stages[1] + T_o·stages[2].

    Seconds. `resource` names it for reports. `residual` and `unit` have arrays in workload order.
    """

    resource: str
    stages: Stages
    base: float
    residual: Table
    unit: Table


def _sum(*tables: Table) -> dict[str, Floats]:
    """What several tables say, added."""
    found: dict[str, Floats] = {}
    for table in tables:
        for option, seconds in table.items():
            found[option] = found[option] + seconds if option in found else seconds
    return found


class _Rates:
    """Seconds per byte, or per parameter; 0.0 for SSDs that are not there."""

    def __init__(self, hw: HardwareProfile) -> None:
        self.h2d = 1 / hw.h2d_bytes_per_s
        self.d2h = 1 / hw.d2h_bytes_per_s
        fastest = max(hw.duplex_bytes_per_s, hw.h2d_bytes_per_s, hw.d2h_bytes_per_s)
        self.duplex = 1 / fastest
        self.read = 1 / hw.ssd_read_bytes_per_s if hw.ssds else 0.0
        self.write = 1 / hw.ssd_write_bytes_per_s if hw.ssds else 0.0
        self.cpu = 1 / hw.cpu_optimizer_params_per_s
        self.device = 1 / hw.device_bytes_per_s


class TimeRows:
    """All rows of one workload on one machine.

    Args:
        recompute_s: residual → seconds of running it again.
        runs: unit → (first, last) op of each of its runs (`windows.unit_runs`).
        emits: trainable unit → op after which its gradients leave.
    """

    def __init__(
        self,
        workload: Workload,
        hw: HardwareProfile,
        schedule: Schedule,
        windows: Windows,
        recompute_s: Mapping[str, float],
        runs: Mapping[str, Sequence[tuple[int, int]]],
        emits: Mapping[str, int],
    ) -> None:
        self.w = workload
        self.schedule = schedule
        self.windows = windows
        self.rate = _Rates(hw)
        self.turn, self.end = workload.num_forward_ops, len(workload.ops)
        residuals = workload.residuals
        self.size = np.array([float(workload.values[v].num_bytes) for v in residuals])
        self.made = np.array([workload.producer[v] for v in residuals])
        self.back = np.array([workload.first_backward_use(v) for v in residuals])
        self.again = np.array([recompute_s[v] for v in residuals])
        seconds = np.array([op.seconds for op in workload.ops])
        self._through = np.concatenate([[0.0], np.cumsum(seconds)])
        units = workload.units
        trained = np.array([float(u.trainable) for u in units])
        self.runs = [runs[u.name] for u in units]
        self.emit = np.array([emits.get(u.name, -1) for u in units], dtype=np.int64)
        self.compute = np.array([float(u.compute_bytes) for u in units])
        self.params = trained * [float(u.num_params) for u in units]
        self.gradient = trained * [float(u.gradient_bytes) for u in units]
        self.state_read = trained * [float(u.update_read_bytes) for u in units]
        written = trained * [float(u.update_write_bytes) for u in units]
        states_only = trained * [float(u.update_write_bytes - u.compute_bytes) for u in units]
        # by where the compute copy is: with the states, or in host memory
        self.state_write = {"ssd": written, "ssd-copy": states_only}
        # by whether the compute copy is kept
        self.update_s, self.bare_update_s = (
            trained * [u.device_update_bytes(copy=copy) * self.rate.device for u in units]
            for copy in (True, False)
        )
        self.cast_s = np.array([u.cast_bytes * self.rate.device for u in units])
        self.direct = self._direct_bytes()

    def __iter__(self) -> Iterator[Row]:
        yield from self._forward()
        yield from self._backward_loads()
        yield from self._after_backward()
        yield from self._ssd_totals()

    def device_s(self, first: int, stop: int) -> float:
        """Device seconds of ops [first, stop), each once."""
        return float(self._through[stop] - self._through[first]) if stop > first else 0.0

    def _direct_bytes(self) -> tuple[Floats, Floats]:
        """Bytes that ops read of each unit in place, in forward and in backward."""
        rank = {u.name: i for i, u in enumerate(self.w.units)}
        found = (np.zeros(len(rank)), np.zeros(len(rank)))
        for op in self.w.ops:
            for v in dict.fromkeys(op.reads):
                value = self.w.values[v]
                if value.kind == "parameter" and value.unit in rank:
                    read = direct_read_bytes(op, value.num_bytes)
                    found[op.phase == "backward"][rank[value.unit]] += read
        return found

    def _copies(self, first: int, last: int) -> Floats:
        """Bytes fetched for runs that begin in [first, last]."""
        times = [sum(first <= a <= last for a, _ in runs) for runs in self.runs]
        return self.compute * np.array(times, dtype=np.float64)

    def _held(self, first: int, last: int) -> Floats:
        """Bytes of one copy for the whole step, if its first run begins in [first, last]."""
        times = [bool(runs) and first <= runs[0][0] <= last for runs in self.runs]
        return self.compute * np.array(times, dtype=np.float64)

    def _fetches(self, first: int, last: int, per_byte: float, direct: Floats) -> dict[str, Floats]:
        """Seconds on the link to the device, by option."""
        runs, held = self._copies(first, last) * per_byte, self._held(first, last) * per_byte
        return {
            "host": runs,
            "ssd": runs,
            "ssd-copy": runs,
            "hold": held,
            "ssd-hold": held,
            "ssd-copy-hold": held,
            "direct": direct * per_byte,
        }

    def _ssd_fetches(self, first: int, last: int) -> dict[str, Floats]:
        read = self.rate.read
        return {"ssd": self._copies(first, last) * read, "ssd-hold": self._held(first, last) * read}

    def _moved(self, amount: Floats) -> dict[str, Floats]:
        """The same amount for every option of a unit that is not on the device."""
        names = ("host", "hold", "direct", "reload")
        return {**dict.fromkeys(names, amount), **self._on_ssd(amount)}

    def _on_ssd(self, amount: Floats, written: Floats | float = 0.0) -> dict[str, Floats]:
        """The same amount for every option of a unit on SSD; and seconds of so much of what its
        update writes."""
        seconds = {o: amount + written * x for o, x in self.state_write.items()}
        return {**seconds, **{f"{o}-hold": x for o, x in seconds.items()}}

    def _swapped(self, amount: Floats) -> dict[str, Floats]:
        return {"host": amount, "ssd": amount}

    def _forward(self) -> Iterator[Row]:
        n, rate = self.turn, self.rate
        read_s = self.direct[0] * rate.h2d
        own = {"direct": read_s, "reload": read_s, **self._casts(0, n - 1)}
        yield Row(resource="gpu", stages=FORWARD, base=self.device_s(0, n), residual={}, unit=own)
        for c in self.windows.forward:
            leaving = np.where(self.made >= c, self.size * rate.d2h, 0.0)
            yield Row(
                resource="d2h",
                stages=FORWARD,
                base=self.device_s(0, c),
                residual=self._swapped(leaving),
                unit={},
            )
            fetched = self._fetches(0, c, rate.h2d, self.direct[0])
            rest = self.device_s(c, n)
            fetched["reload"] = fetched["direct"]
            yield Row(resource="h2d", stages=FORWARD, base=rest, residual={}, unit=fetched)
            if rate.read:
                fetched = self._ssd_fetches(0, c)
                yield Row(resource="ssd", stages=FORWARD, base=rest, residual={}, unit=fetched)
        fetched = self._fetches(0, n, rate.duplex, self.direct[0])
        yield Row(
            resource="duplex",
            stages=FORWARD,
            base=0.0,
            residual=self._swapped(self.size * rate.duplex),
            unit=fetched,
        )

    def _cuts(self) -> list[int]:
        return sorted({self.turn, *self.windows.backward, max(self.turn, self.end - 1)})

    def _casts(self, first: int, last: int) -> dict[str, Floats]:
        """Seconds of casts for runs that begin in [first, last]."""
        times = [sum(first <= a <= last for a, _ in runs) for runs in self.runs]
        seconds = self.cast_s * np.array(times, dtype=np.float64)
        return {"cast": seconds, "cast-parked": seconds}

    def _updates(self, which: npt.NDArray[np.bool_] | bool = True) -> dict[str, Floats]:
        """Seconds of updates on the device, of the units in `which`, that are part of backward."""
        if self.schedule in WHOLE:
            return {}
        zero = np.zeros_like(self.update_s)
        return {
            "device": np.where(which, self.update_s, zero),
            "cast": np.where(which, self.bare_update_s, zero),
        }

    def _backward_loads(self) -> Iterator[Row]:
        n, end, rate = self.turn, self.end, self.rate
        yield Row(
            resource="gpu",
            stages=BACKWARD,
            base=self.device_s(n, end),
            residual={"recompute": self.again},
            unit=_sum(self._updates(), self._casts(n, end), {"direct": self.direct[1] * rate.h2d}),
        )
        if n >= end:
            return
        for c in self._cuts():
            back = np.where(self.back <= c, self.size, 0.0)
            rest = self.device_s(c, end)
            later = self._updates(self.emit >= c)
            yield Row(
                resource="h2d",
                stages=BACKWARD,
                base=rest,
                residual=self._swapped(back * rate.h2d),
                unit={**self._fetches(n, c, rate.h2d, self.direct[1]), **later},
            )
            if rate.read:
                yield Row(
                    resource="ssd",
                    stages=BACKWARD,
                    base=rest,
                    residual={"ssd": back * rate.read},
                    unit={**self._ssd_fetches(n, c), **later},
                )
        fetched = self._fetches(n, end, rate.duplex, self.direct[1])
        grads = self._moved(self.gradient * rate.duplex)
        yield Row(
            resource="duplex",
            stages=BACKWARD,
            base=0.0,
            residual=self._swapped(self.size * rate.duplex),
            unit={
                **{o: grads[o] + fetched.get(o, 0.0) for o in grads},
                **dict.fromkeys(("parked", "cast-parked"), self.gradient * rate.duplex),
            },
        )

    def _after_backward(self) -> Iterator[Row]:
        n, rate = self.turn, self.rate
        if n >= self.end:
            return
        emits = sorted({int(i) for i in self.emit if i >= n})
        for c in sorted({*self._cuts(), *emits[-_LAST_UPDATES:]}):
            before = self.device_s(n, c + 1)
            remade = {"recompute": np.where(self.back <= c, self.again, 0.0)}
            late = (self.emit >= c).astype(np.float64)
            earlier = self._updates(self.emit < c)
            grads = self._moved(late * self.gradient * rate.d2h)
            if self.schedule in LATE:  # the next forward may hide all of this
                continue
            yield Row(
                resource="d2h",
                stages=BACKWARD,
                base=before,
                residual=remade,
                unit={**grads, **earlier},
            )
            if self.schedule == "serial":
                continue
            cpu = late * self.params * rate.cpu
            chain = {**self._moved(cpu), **earlier}
            if self.schedule == "naive":
                read = late * self.state_read * rate.read
                chain.update(self._on_ssd(cpu + read, late * rate.write))
            yield Row(resource="cpu", stages=TO_END, base=before, residual=remade, unit=chain)
            if rate.write:
                chain = {**self._on_ssd(np.zeros_like(late), late * rate.write), **earlier}
                yield Row(resource="ssd", stages=TO_END, base=before, residual=remade, unit=chain)
        if self.schedule in LATE - WAITING:
            chain = self._moved(self.params * rate.cpu)
            yield Row(resource="cpu", stages=STEP, base=0.0, residual={}, unit=chain)
        if self.schedule == "deferred":
            chain = self._moved(self.params * rate.cpu)
            yield Row(resource="cpu", stages=BETWEEN, base=0.0, residual={}, unit=chain)
        if self.schedule == "serial":
            cpu = self.params * rate.cpu
            chain = self._moved(cpu)
            chain.update(self._on_ssd(cpu + self.state_read * rate.read, rate.write))
            yield Row(resource="cpu", stages=OPTIMIZER, base=0.0, residual={}, unit=chain)
        if self.schedule in WHOLE:
            read_s = self.gradient * rate.h2d  # over the link, by the update
            chain = {
                "device": self.update_s,
                "cast": self.bare_update_s,
                "parked": self.update_s + read_s,
                "cast-parked": self.bare_update_s + read_s,
            }
            yield Row(resource="gpu", stages=OPTIMIZER, base=0.0, residual={}, unit=chain)

    def _ssd_totals(self) -> Iterable[Row]:
        n, end, rate = self.turn, self.end, self.rate
        if not rate.read:
            return
        states = self._on_ssd(self.state_read * rate.read, rate.write)

        def with_states(fetched: dict[str, Floats]) -> dict[str, Floats]:
            return {o: x + fetched.get(o, 0.0) for o, x in states.items()}

        back = with_states(self._ssd_fetches(n, end))
        every = with_states(self._ssd_fetches(0, end))
        if self.schedule == "deferred":
            ahead = with_states(self._ssd_fetches(0, max(0, n - 1)))
            yield Row(resource="ssd", stages=BETWEEN, base=0.0, residual={}, unit=ahead)
        if self.schedule not in LATE:
            yield Row(
                resource="ssd",
                stages=TO_END,
                base=0.0,
                residual={"ssd": self.size * rate.read},
                unit=back,
            )
        yield Row(
            resource="ssd",
            stages=STEP,
            base=0.0,
            residual={"ssd": self.size * (rate.read + rate.write)},
            unit=every,
        )
