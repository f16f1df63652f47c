"""Time of one iteration: LoHan §IV-D, Eq. 1–7, and extensions that can be switched off.

T_iter = T_f + T_b (Eq. 1). Each stage lasts as long as its busiest resource (Eq. 2, 4, 5):
the device, each direction of the link, the SSDs (simplex: reads and writes add up).
`CostOptions.paper()` gives the literal equations. Nothing here knows torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from lohan_fx.errors import HardwareError
from lohan_fx.footprint import update_write_bytes
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import WAITING, Schedule, Tier
from lohan_fx.workload import Unit, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class CostOptions:
    """Which extensions of Eq. 1–7 count. All off: the literal equations.

    Attributes:
        roofline: device time is the sum of the ops' roofline seconds, and backward is what
            the workload's backward ops cost. Off: FLOPs / THP_G, and backward is 2·FLOP_f.
        asymmetric_links: H2D and D2H have their own rates. Off: BW_G is the slower one.
        duplex_limit: both directions together are bound by the link's duplex rate.
        cpu_optimizer: seconds of the optimizer on the CPU. Off: hidden by SSD traffic.
        device_optimizer: seconds that the update of device-resident units takes.
    """

    roofline: bool = True
    asymmetric_links: bool = True
    duplex_limit: bool = True
    cpu_optimizer: bool = True
    device_optimizer: bool = True

    @classmethod
    def paper(cls) -> CostOptions:
        """Eq. 1–7 to the letter."""
        return cls(
            roofline=False,
            asymmetric_links=False,
            duplex_limit=False,
            cpu_optimizer=False,
            device_optimizer=False,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What one iteration asks of every resource. Bytes, FLOPs, seconds of device time.

    In the paper's symbols, with every unit on SSD: `swapped_bytes` is A_G2M,
    `swapped_ssd_bytes` αA_G2M; the fetches and `gradient_bytes` are 2P each; an SSD unit reads
    2P of compute copy in both stages and 12P of states in backward, and writes 14P back.
    `num_cpu_params` are updated on the CPU; `device_update_bytes` is the memory traffic of
    updates of device-resident units, `cast_forward_bytes` and `cast_backward_bytes` that of casts
    of masters, where they keep no compute copy. What the device itself reads of host memory and
    writes to it (`direct_…`) takes its time and the link's; `direct_gradient_bytes` are a part of
    `gradient_bytes`.
    """

    forward_flops: int = 0
    backward_flops: int = 0
    recompute_flops: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    recompute_s: float = 0.0
    swapped_bytes: int = 0
    swapped_ssd_bytes: int = 0
    fetch_forward_bytes: int = 0
    fetch_backward_bytes: int = 0
    gradient_bytes: int = 0
    ssd_fetch_forward_bytes: int = 0
    ssd_fetch_backward_bytes: int = 0
    ssd_state_read_bytes: int = 0
    ssd_state_write_bytes: int = 0
    num_cpu_params: int = 0
    device_update_bytes: int = 0
    cast_forward_bytes: int = 0
    cast_backward_bytes: int = 0
    direct_forward_bytes: int = 0
    direct_backward_bytes: int = 0
    direct_gradient_bytes: int = 0

    def with_activations(
        self, *, recompute_flops: int, recompute_s: float, swapped_bytes: int, available_bytes: int
    ) -> Demand:
        """The same iteration with another swap set; αA = max(0, A − MEM_avail) (Eq. 3)."""
        return replace(
            self,
            recompute_flops=recompute_flops,
            recompute_s=recompute_s,
            swapped_bytes=swapped_bytes,
            swapped_ssd_bytes=max(0, swapped_bytes - available_bytes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationTime:
    """T_f and T_b with every term named, in seconds. The binding term is the largest.

    `optimizer_s` is the separate stage of schedule "serial", 0.0 otherwise. `compute` is what
    reports call the term "gpu" (`HardwareProfile.lane_name`).
    """

    forward_s: float
    backward_s: float
    forward_terms: Mapping[str, float]
    backward_terms: Mapping[str, float]
    binding_forward: str
    binding_backward: str
    optimizer_s: float = 0.0
    compute: str = "gpu"

    @property
    def step_s(self) -> float:
        """T_iter (Eq. 1)."""
        return self.forward_s + self.backward_s + self.optimizer_s

    @property
    def binding(self) -> str:
        """Both binding terms, for a report."""
        tail = ", then the optimizer" if self.optimizer_s else ""
        terms = (self.binding_forward, self.binding_backward)
        forward, backward = (self.compute if term == "gpu" else term for term in terms)
        return f"forward: {forward}, backward: {backward}{tail}"


def _seconds(amount: float, rate: float, what: str) -> float:
    if not amount:
        return 0.0
    if rate <= 0:
        raise HardwareError(f"the hardware profile has no {what}, but the plan needs it")
    return amount / rate


@dataclass(frozen=True, slots=True)
class _Rates:
    """Seconds of an amount on each resource, after the options."""

    hw: HardwareProfile
    options: CostOptions

    def _link(self, rate: float) -> float:
        if self.options.asymmetric_links:
            return rate
        return min(self.hw.h2d_bytes_per_s, self.hw.d2h_bytes_per_s)

    def h2d(self, num_bytes: int) -> float:
        return _seconds(num_bytes, self._link(self.hw.h2d_bytes_per_s), "h2d_bytes_per_s")

    def d2h(self, num_bytes: int) -> float:
        return _seconds(num_bytes, self._link(self.hw.d2h_bytes_per_s), "d2h_bytes_per_s")

    def duplex(self, num_bytes: int) -> float:
        return _seconds(num_bytes, self.hw.duplex_bytes_per_s, "duplex_bytes_per_s")

    def ssd_read(self, num_bytes: int) -> float:
        return _seconds(num_bytes, self.hw.ssd_read_bytes_per_s, "ssd_read_bytes_per_s")

    def ssd_write(self, num_bytes: int) -> float:
        return _seconds(num_bytes, self.hw.ssd_write_bytes_per_s, "ssd_write_bytes_per_s")

    def compute(self, flops: float, seconds: float) -> float:
        if self.options.roofline:
            return seconds
        return _seconds(flops, self.hw.block_flops_per_s, "block_flops_per_s")

    def cpu_optimizer(self, num_params: int) -> float:
        if not self.options.cpu_optimizer:
            return 0.0
        rate = self.hw.cpu_optimizer_params_per_s
        return _seconds(num_params, rate, "cpu_optimizer_params_per_s")

    def device(self, num_bytes: int) -> float:
        return _seconds(num_bytes, self.hw.device_bytes_per_s, "device_bytes_per_s")

    def device_optimizer(self, num_bytes: int) -> float:
        if not self.options.device_optimizer:
            return 0.0
        return self.device(num_bytes)


def _forward_terms(rates: _Rates, d: Demand) -> dict[str, float]:
    """The four terms of Eq. 2 (and the duplex rate)."""
    incoming = d.fetch_forward_bytes + d.direct_forward_bytes
    gpu = rates.compute(d.forward_flops, d.forward_s) + rates.h2d(d.direct_forward_bytes)
    terms = {
        "gpu": gpu + rates.device(d.cast_forward_bytes),
        "g2m": rates.d2h(d.swapped_bytes),
        "m2g": rates.h2d(incoming),
        "ssd": rates.ssd_read(d.ssd_fetch_forward_bytes) + rates.ssd_write(d.swapped_ssd_bytes),
    }
    if rates.options.duplex_limit:
        terms["duplex"] = rates.duplex(d.swapped_bytes + incoming)
    return terms


def _backward_terms(rates: _Rates, d: Demand, schedule: Schedule) -> dict[str, float]:
    """The four terms of Eq. 5 (and the duplex rate, the CPU, a naive optimizer's chain)."""
    backward_flops = d.backward_flops if rates.options.roofline else 2 * d.forward_flops
    gpu = rates.compute(backward_flops + d.recompute_flops, d.backward_s + d.recompute_s)
    ssd = rates.ssd_read(d.ssd_fetch_backward_bytes + d.swapped_ssd_bytes)
    states = rates.ssd_read(d.ssd_state_read_bytes) + rates.ssd_write(d.ssd_state_write_bytes)
    cpu = rates.cpu_optimizer(d.num_cpu_params)
    gpu += rates.h2d(d.direct_backward_bytes) + rates.d2h(d.direct_gradient_bytes)
    reloads = d.fetch_backward_bytes + d.swapped_bytes + d.direct_backward_bytes
    gpu += rates.device_optimizer(d.device_update_bytes) + rates.device(d.cast_backward_bytes)
    terms = {
        "gpu": gpu,
        "g2m": rates.d2h(d.gradient_bytes),
        "m2g": rates.h2d(reloads),
        "ssd": ssd if schedule in WAITING else ssd + states,
    }
    if rates.options.duplex_limit:
        terms["duplex"] = rates.duplex(d.gradient_bytes + reloads)
    if schedule == "naive":
        terms["optimizer"] = states + cpu
    elif schedule not in WAITING:
        terms["cpu"] = cpu
    return terms


def _hide_behind_forward(
    rates: _Rates,
    d: Demand,
    forward_s: float,
    forward: Mapping[str, float],
    terms: dict[str, float],
) -> None:
    """Let the CPU's updates and the states' SSD traffic use what the next forward leaves idle."""
    terms["cpu"] = max(0.0, terms["cpu"] - forward_s)
    own = rates.ssd_read(d.ssd_fetch_backward_bytes + d.swapped_ssd_bytes)
    terms["ssd"] = max(own, terms["ssd"] - (forward_s - forward["ssd"]))


def iteration_time(
    hw: HardwareProfile,
    demand: Demand,
    options: CostOptions | None = None,
    schedule: Schedule = "optimized",
) -> IterationTime:
    """T_iter of one iteration (LoHan Eq. 1–5).

    Args:
        demand: what the iteration asks of every resource.
        options: which extensions count; `CostOptions()` if None.
        schedule: "serial" updates after backward (ZeRO), "naive" reads, updates and writes
            one unit after another during backward, "optimized" overlaps the three, "overlapped"
            also with the next forward; "deferred" with the next forward only; "speculative" is
            "overlapped" here: nothing has to be clipped.

    Raises:
        HardwareError: the profile has no rate for a resource that the demand uses.
    """
    rates = _Rates(hw, options or CostOptions())
    forward = _forward_terms(rates, demand)
    if schedule == "deferred":
        forward["cpu"] = rates.cpu_optimizer(demand.num_cpu_params)
        forward["ssd"] += rates.ssd_read(demand.ssd_state_read_bytes)
        forward["ssd"] += rates.ssd_write(demand.ssd_state_write_bytes)
    forward_s = max(forward.values())
    backward = _backward_terms(rates, demand, schedule)
    if schedule in ("overlapped", "speculative"):
        _hide_behind_forward(rates, demand, forward_s, forward, backward)
    optimizer_s = 0.0
    if schedule == "serial":
        optimizer_s = (
            rates.ssd_read(demand.ssd_state_read_bytes)
            + rates.cpu_optimizer(demand.num_cpu_params)
            + rates.ssd_write(demand.ssd_state_write_bytes)
        )
    return IterationTime(
        forward_s=forward_s,
        backward_s=max(backward.values()),
        forward_terms=forward,
        backward_terms=backward,
        binding_forward=max(forward, key=forward.__getitem__),
        binding_backward=max(backward, key=backward.__getitem__),
        optimizer_s=optimizer_s,
        compute=hw.lane_name("gpu"),
    )


def state_demand(
    units: Iterable[Unit],
    tiers: Mapping[str, Tier],
    copies: Collection[str] = (),
    casts: Collection[str] = (),
) -> Demand:
    """The part of a demand that optimizer updates make, by the tier of each unit.

    Units in host memory have no SSD terms; device-resident units cross nothing; frozen units
    are never updated or written back. `copies` are SSD units whose compute copies are in host
    memory, `casts` device units that keep none.
    """
    trainable = [u for u in units if u.trainable]
    ssd = [u for u in trainable if tiers[u.name] == "ssd"]
    moved = [u for u in trainable if tiers[u.name] != "device"]
    resident = [u for u in trainable if tiers[u.name] == "device"]
    return Demand(
        gradient_bytes=sum(u.gradient_bytes for u in moved),
        ssd_state_read_bytes=sum(u.update_read_bytes for u in ssd),
        ssd_state_write_bytes=sum(update_write_bytes(u, copies) for u in ssd),
        num_cpu_params=sum(u.num_params for u in moved),
        device_update_bytes=sum(u.device_update_bytes(copy=u.name not in casts) for u in resident),
    )


def unit_demand(
    workload: Workload,
    tiers: Mapping[str, Tier],
    fetches: Mapping[str, tuple[int, int]],
    copies: Collection[str] = (),
    casts: Collection[str] = (),
) -> Demand:
    """A demand with everything but activations filled in.

    `fetches` has for each unit how often its compute copy comes in during forward and during
    backward (once each in the paper); `copies` are SSD units whose compute copies come from host
    memory, `casts` device units whose copies are cast instead.
    """
    cast = [u for u in workload.units if tiers[u.name] == "device" and u.name in casts]
    moved = [u for u in workload.units if tiers[u.name] != "device"]
    ssd = [u for u in moved if tiers[u.name] == "ssd" and u.name not in copies]
    forward = [op for op in workload.ops if op.phase == "forward"]
    backward = [op for op in workload.ops if op.phase == "backward"]
    return replace(
        state_demand(workload.units, tiers, copies, casts),
        forward_flops=workload.forward_flops,
        backward_flops=workload.backward_flops,
        forward_s=sum(op.seconds for op in forward),
        backward_s=sum(op.seconds for op in backward),
        fetch_forward_bytes=sum(u.compute_bytes * fetches[u.name][0] for u in moved),
        fetch_backward_bytes=sum(u.compute_bytes * fetches[u.name][1] for u in moved),
        ssd_fetch_forward_bytes=sum(u.compute_bytes * fetches[u.name][0] for u in ssd),
        ssd_fetch_backward_bytes=sum(u.compute_bytes * fetches[u.name][1] for u in ssd),
        cast_forward_bytes=sum(u.cast_bytes * fetches[u.name][0] for u in cast),
        cast_backward_bytes=sum(u.cast_bytes * fetches[u.name][1] for u in cast),
    )
