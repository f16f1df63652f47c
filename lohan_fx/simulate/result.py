"""What a simulated step comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lohan_fx.program import Residency
from lohan_fx.timeline import PHASES, Lane, Series, StepPhase, Timeline, Traffic


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """One simulated step. Seconds and bytes.

    Attributes:
        timeline: every span, and the memory of each tier over time.
        step_s: from the first instruction to the end of optimizer.step(); the sum of the next
            three.
        forward_s, backward_s: until the device has run the last instruction of the phase.
        optimizer_s: updates and writes that backward does not hide (all, if "serial").
        device: exact device memory by instruction.
        num_events: how much there was to simulate.
    """

    timeline: Timeline
    step_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    device: Residency
    num_events: int = 0

    @property
    def peaks(self) -> Mapping[str, int]:
        """Tier → largest bytes: device by storage, host and SSD as the runtime lays them out."""
        return self.timeline.peaks

    @property
    def series(self) -> Mapping[str, Series]:
        """Tier → (seconds, bytes) points."""
        return self.timeline.memory

    @property
    def traffic(self) -> Traffic:
        """Bytes by link."""
        return self.timeline.traffic

    @property
    def exposed_transfer_s(self) -> float:
        """Seconds in which links or SSDs work and the device does not."""
        return self.timeline.exposed_s()

    @property
    def binding(self) -> Mapping[StepPhase, Lane]:
        """Phase → the lane that works longest in it; phases of no length are left out."""
        spans = self.timeline.phases
        return {p: self.timeline.binding(p) for p in PHASES if spans[p][1] > spans[p][0]}

    def summary(self) -> str:
        """Text for a terminal."""
        return self.timeline.summary()
