"""What a planner decides. The passes obey it; the lowering prints it; nothing here knows torch.

A plan is complete: every movement has its place, named by the op that it comes before or
after. A plan file therefore reproduces a program exactly.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lohan_fx.arguments import path_of
from lohan_fx.errors import PlanError, format_bytes
from lohan_fx.reading import Reader, json_of, kind_of

Tier = Literal["device", "host", "ssd"]
Action = Literal["keep", "swap", "recompute"]
Schedule = Literal["serial", "naive", "optimized", "overlapped", "deferred", "speculative"]
Access = Literal["fetch", "direct"]
Emission = Literal["copy", "direct", "parked"]
CopyTier = Literal["host"]

TIERS: tuple[Tier, ...] = ("device", "host", "ssd")
SCHEDULES: tuple[Schedule, ...] = (
    "serial",
    "naive",
    "optimized",
    "overlapped",
    "deferred",
    "speculative",
)

PIPELINED: frozenset[Schedule] = frozenset({"optimized", "overlapped", "deferred", "speculative"})
"""Schedules that read states ahead and write them back beside the next update (LoHan §IV-C)."""

LATE: frozenset[Schedule] = frozenset({"overlapped", "deferred", "speculative"})
"""Schedules whose updates may run beside the next forward."""

WAITING: frozenset[Schedule] = frozenset({"serial", "deferred"})
"""Schedules that update nothing before optimizer.step(): by then gradients are whole."""

WHOLE: frozenset[Schedule] = WAITING | {"speculative"}
"""Schedules whose updates count from optimizer.step() on, so that gradients can be clipped by their
norm. "speculative" updates host units beside backward, into spare memory, as if nothing had to be
clipped; what turns out wrong is done again. Its other units wait, as with "deferred"."""

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualPlan:
    """What happens to one residual between forward and backward.

    keep: it stays on the device.
    swap: its copy to `tier` starts right after its producer; compute waits for the end of
    that copy after op `release_after`, where the device memory falls; the reload starts
    before op `prefetch_before` and compute waits for it at its first backward use.
    recompute: region `region` makes it again, right before the region's first use.
    """

    action: Action
    tier: Tier = "device"
    release_after: str | None = None
    prefetch_before: str | None = None
    region: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchWindow:
    """One stay of a unit's compute copy on the device.

    The copy starts before op `fetch_before`; compute waits for it before op `first_use`;
    its memory is free after op `last_use`. All three are op names; a recompute region
    counts as used at the op that it stands before.
    """

    fetch_before: str
    first_use: str
    last_use: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """Where a unit's states live, and when its compute copy is on the device.

    Units in the device tier have no windows, as nothing of theirs moves, unless `casts`: those
    keep no compute copy there, only what an update needs. For each window it is cast from the
    master where that is.
    `emit_after` is the op after which all gradients exist and nothing reads the
    parameters any more; compute waits for their copy to the host after op
    `release_gradients_after`, where their device memory falls. Both are None for units
    without gradients; the second also for units in the device tier, whose update reads the
    gradients in place unless they are parked, and for those whose gradients are written directly.
    `access` "direct" (host tier only): ops outside of the windows read the compute copy where
    it lies, in host memory, over the link (MemFerry's direct host access).
    `gradients` "direct": the device writes each gradient to the host as soon as it is made, and
    frees it; nothing is left to copy when they are emitted. "parked" (device tier, where updates
    wait for optimizer.step(), and gradients do not add up): they wait in host memory, where the
    update reads them.
    `copy_tier` "host" (SSD tier, and units with a master beside their compute copy only): the
    compute copy lives in host memory. So it is fetched from there, and an update writes all but it
    to the SSD. None: it lives with the states.
    """

    tier: Tier
    windows: tuple[FetchWindow, ...] = ()
    emit_after: str | None = None
    release_gradients_after: str | None = None
    access: Access = "fetch"
    gradients: Emission = "copy"
    copy_tier: CopyTier | None = None
    casts: bool = False

    @property
    def gradient_tier(self) -> Tier:
        """Where gradients are when they have been emitted."""
        return "host" if self.gradients == "parked" else self.tier

    @property
    def fetch_tier(self) -> Tier:
        """Where the compute copy lives."""
        return self.copy_tier or self.tier


_UNIT_DEFAULTS: Mapping[str, Any] = {
    "access": "fetch",
    "gradients": "copy",
    "copy_tier": None,
    "casts": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the planner expects of one step. Seconds, bytes, FLOPs."""

    step_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    peak_device_bytes: int = 0
    peak_host_bytes: int = 0
    peak_ssd_bytes: int = 0
    d2h_bytes: int = 0
    h2d_bytes: int = 0
    ssd_read_bytes: int = 0
    ssd_write_bytes: int = 0
    recompute_flops: int = 0
    recompute_s: float = 0.0
    binding: str = ""


def _counts(counter: collections.Counter[Any]) -> str:
    return ", ".join(f"{n} {what}" for what, n in sorted(counter.items())) or "none"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A complete decision for one workload under one hardware profile and budget."""

    strategy: str
    workload: str
    residuals: Mapping[str, ResidualPlan]
    units: Mapping[str, UnitPlan]
    schedule: Schedule = "optimized"
    prediction: Prediction = field(default_factory=Prediction)
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Decisions by their number, what they are expected to cost, and the notes."""
        actions = collections.Counter(
            r.action if r.action != "swap" else f"swap to {r.tier}" for r in self.residuals.values()
        )
        tiers = collections.Counter(
            u.tier
            + (f" with copies in {u.copy_tier} memory" if u.copy_tier is not None else "")
            + (" with copies cast where they are used" if u.casts else "")
            for u in self.units.values()
        )
        p = self.prediction
        sizes = {
            "device peak": p.peak_device_bytes,
            "host peak": p.peak_host_bytes,
            "SSD peak": p.peak_ssd_bytes,
            "D2H": p.d2h_bytes,
            "H2D": p.h2d_bytes,
            "SSD read": p.ssd_read_bytes,
            "SSD written": p.ssd_write_bytes,
        }
        expected = [f"{p.step_s:.4g} s"] if p.step_s else []
        expected += [f"{what} {format_bytes(size)}" for what, size in sizes.items() if size]
        lines = [
            f"{self.strategy} plan for {self.workload}, schedule {self.schedule}",
            f"residuals: {_counts(actions)}",
            f"units: {_counts(tiers)}",
            *([f"expected of a step: {', '.join(expected)}"] if expected else []),
            *(f"note: {note}" for note in self.notes),
        ]
        return "\n".join(lines)

    def count(self, action: Action, tier: Tier | None = None) -> int:
        return sum(
            1
            for r in self.residuals.values()
            if r.action == action and (tier is None or r.tier == tier)
        )

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits that change when any decision changes (predictions aside)."""
        data = self.to_dict()
        for key in ("prediction", "notes"):
            data.pop(key)
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        data["format"] = FORMAT_VERSION
        for unit in data["units"].values():  # left out where they have their defaults
            for key, default in _UNIT_DEFAULTS.items():
                if unit[key] == default:
                    del unit[key]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """The plan that `to_dict` wrote.

        Raises:
            PlanError: another format, or an entry that is missing, unknown or of the wrong kind.
        """
        if data.get("format") != FORMAT_VERSION:
            raise PlanError(
                f"plan format {data.get('format')!r} is not {FORMAT_VERSION}: "
                "make the plan again with this version of lohan_fx"
            )
        own = {of.name for of in dataclasses.fields(cls)}  # a file may say more, beside the plan
        return _READER.read(cls, {key: data[key] for key in data if key in own})

    def save(self, path: str | Path) -> None:
        file = path_of("path", path)
        try:
            file.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise PlanError(f"cannot write {path}: {error.strerror}; name a file") from error

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """The plan that `save` wrote.

        Raises:
            PlanError: the file is no plan, or not a whole one.
        """
        file = path_of("path", path)
        try:
            data = json_of(file)
        except OSError as error:
            raise PlanError(
                f"cannot read the plan {path}: {error.strerror}; name a file that Plan.save or "
                "lohan-fx plan --out wrote"
            ) from error
        except ValueError as error:
            raise PlanError(f"{path} is no JSON file: {error}") from None
        if not isinstance(data, dict):
            raise PlanError(f"{path} is no plan: it holds a {type(data).__name__}")
        if kind_of(data) not in ("", "a plan"):
            raise PlanError(f"{path} is no plan, but {kind_of(data)}")
        try:
            return cls.from_dict(data)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error


_READER = Reader(
    what="the plan",
    error=PlanError,
    optional={
        UnitPlan: _UNIT_DEFAULTS,
        Prediction: [of.name for of in dataclasses.fields(Prediction)],
    },
)
