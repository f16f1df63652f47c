"""ssdtrain: as many activations to SSD as that costs no time; no recomputation.

Source: papers/ssdtrain.txt §III. Activations are stored in the order in which forward makes them
(first in, first out), and loaded in the order in which backward needs them; those of the last
module stay (§III-C2). The amount is set from the model's computation and the SSD's bandwidth
(Fig. 3, Alg. 1 line 5). Each storage is one residual here, so views are not stored twice
(§III-C1), and parameters are no residuals. States stay on the device; its optimizer runs after
backward.

  - The amount: the longest prefix of the order whose last write ends before the first of its
    loads must start (§III-D counts half of the step's time for writes).
  - Forwarding: a tensor that is still being stored when backward wants it is taken from memory
    (§III-C2). It never left, so here it is kept. With the amount above there is none; a fixed
    `amount_bytes` can have some.
  - If memory is too small for what stays, more is offloaded, in the same order, although
    backward then waits.

Not as in the system: Alg. 1 line 2 never offloads tensors of less than 2^20 elements; here
`schedule.tiny_residuals` are kept, by a rule that scales with the model. The path leads through
host memory, not GPUDirect Storage, at the slower of the two rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lohan_fx.errors import format_bytes
from lohan_fx.plan import Plan, Tier
from lohan_fx.planners.clock import Clock, in_s, out_s
from lohan_fx.planners.prefix import affordable_prefix, fewest_swapped, swap_prefix
from lohan_fx.planners.registry import register
from lohan_fx.planners.schedule import tiny_residuals
from lohan_fx.planners.strategy import Activations, Setting, Strategy
from lohan_fx.planners.tiers import has_ssd
from lohan_fx.workload import Workload

SSD_RATED_BYTES = 600e12
"""Rated writes of one SSD: Samsung 980 PRO 1 TB, four of which §III-D assumes for a GPU."""

ENDURANCE_GAIN = 2.5 * 86
"""§III-D: write amplification of the rating against none here; short retention's P/E cycles."""

YEAR_S = 365.25 * 24 * 3600


@dataclass(frozen=True, slots=True)
class Transfers:
    """When each offloaded residual's write ends, and when its load must start. Seconds.

    Both lanes are first come, first served; loads are placed as late as their uses allow.
    """

    written: dict[str, float]
    load: dict[str, float]

    @classmethod
    def of(cls, setting: Setting, clock: Clock, offloaded: Sequence[str]) -> Transfers:
        """`offloaded` in order of creation."""
        w, tier = setting.workload, swap_tier(setting)
        written: dict[str, float] = {}
        load: dict[str, float] = {}
        now = 0.0
        for v in offloaded:
            now = max(now, clock.made(v)) + out_s(setting.hw, w.values[v].num_bytes, tier)
            written[v] = now
        now = float("inf")
        for v in sorted(offloaded, key=lambda v: (-w.first_backward_use(v), v)):
            now = min(now, clock.back(v)) - in_s(setting.hw, w.values[v].num_bytes, tier)
            load[v] = now
        return cls(written, load)

    @property
    def hidden(self) -> bool:
        """Whether all writes end before the first load must start."""
        if not self.written:
            return True
        return max(self.written.values()) <= min(self.load.values())

    @property
    def forwarded(self) -> frozenset[str]:
        """Residuals that are still being written when they must be loaded."""
        return frozenset(v for v in self.written if self.written[v] > self.load[v])


def swap_tier(setting: Setting) -> Tier:
    """The tier whose rates count: SSD, unless only host memory may be used."""
    ssd = has_ssd(setting.hw, setting.budget) and setting.options.swap_to != "host"
    return "ssd" if ssd else "host"


def last_module(workload: Workload) -> frozenset[str]:
    """Residuals of the last block that makes any."""
    block = next((workload.values[v].block for v in reversed(workload.residuals)), "")
    return frozenset(v for v in workload.residuals if workload.values[v].block == block)


def hidden_amount(setting: Setting, order: Sequence[str]) -> int:
    """The longest prefix of `order` that drains before backward needs any of it."""
    clock = Clock(setting.workload)
    low, high = 0, len(order)
    while low < high:
        middle = (low + high + 1) // 2
        if Transfers.of(setting, clock, order[:middle]).hidden:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True, slots=True)
class TensorCache:
    """The activation policy.

    `amount_bytes` offloads that much in forward order, whether it is hidden or not (tensors still
    being written are then forwarded); None adapts the amount.
    """

    amount_bytes: int | None = None

    def __call__(self, setting: Setting) -> Activations:
        """Raises `InsufficientMemoryError` if it does not fit with everything offloaded."""
        w = setting.workload
        tiny = tiny_residuals(w)
        stays = last_module(w)
        order = [v for v in w.residuals if v not in stays and v not in tiny]
        affordable = affordable_prefix(setting, order)
        last_resort = [*order, *(v for v in w.residuals if v in stays), *sorted(tiny)]
        if self.amount_bytes is None:
            wanted = affordable[: hidden_amount(setting, affordable)]
            note = "drain before backward needs them"
        else:
            wanted, note = self._fixed(setting, affordable)
        actions = swap_prefix(setting, wanted, len(wanted)).actions
        notes = [f"{len(wanted)} residuals ({format_bytes(setting.num_bytes(wanted))}) {note}"]
        if not setting.fits(setting.draft(Activations(actions=actions))):
            count = fewest_swapped(setting, last_resort)
            more = set(last_resort[:count]) - set(wanted)
            actions = {v: "swap" if v in more else a for v, a in actions.items()}
            notes.append(
                f"{format_bytes(setting.num_bytes(more))} more must leave the device: backward "
                "waits for them"
            )
        return Activations(actions=actions, notes=tuple(notes))

    def _fixed(self, setting: Setting, order: Sequence[str]) -> tuple[list[str], str]:
        assert self.amount_bytes is not None
        taken: list[str] = []
        total = 0
        for v in order:
            if total >= self.amount_bytes:  # is_offload_amount_reached, Alg. 1
                break
            taken.append(v)
            total += setting.workload.values[v].num_bytes
        forwarded = Transfers.of(setting, Clock(setting.workload), taken).forwarded
        kept = format_bytes(setting.num_bytes(forwarded))
        return [v for v in taken if v not in forwarded], f"leave, {kept} are forwarded"


def lifespan_s(endurance_bytes: float, step_s: float, activation_bytes: float) -> float:
    """t_life = S_endurance · t_step / S_activations (§III-D); infinite if nothing is written."""
    return endurance_bytes * step_s / activation_bytes if activation_bytes else float("inf")


@dataclass(frozen=True, slots=True)
class Lifespan:
    """A note on how long the SSDs last, if training never stops.

    `endurance_bytes` are the lifetime writes of all SSDs together; None assumes §III-D's drive
    for each of them.
    """

    endurance_bytes: float | None = None

    def __call__(self, setting: Setting, plan: Plan) -> tuple[str, ...]:
        written = plan.prediction.ssd_write_bytes
        if not written:
            return ()
        endurance = self.endurance_bytes
        if endurance is None:
            endurance = SSD_RATED_BYTES * ENDURANCE_GAIN * len(setting.hw.ssds)
        years = lifespan_s(endurance, plan.prediction.step_s, written) / YEAR_S
        return (
            f"SSD lifespan {years:.3g} years: {format_bytes(written)} a step of "
            f"{plan.prediction.step_s:.3g} s, {endurance / 1e15:.4g} PB in all",
        )


def ssdtrain(*, amount_bytes: int | None = None, endurance_bytes: float | None = None) -> Strategy:
    """The strategy with a fixed amount of offloaded bytes, or other SSDs."""
    return Strategy(
        name="ssdtrain",
        activations=TensorCache(amount_bytes),
        states="device",
        swap_to="ssd",
        schedule="serial",
        remarks=Lifespan(endurance_bytes),
    )


register("ssdtrain")(ssdtrain())
