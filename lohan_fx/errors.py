"""Every exception that lohan_fx raises on purpose.

A message names the thing, what it needs, what it has, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Sequence


class LohanError(Exception):
    """Base class of all errors raised on purpose by lohan_fx."""


class CaptureError(LohanError):
    """The model could not be captured as one joint graph."""


class UnsupportedOptimizerError(LohanError):
    """The optimizer's update is not elementwise, or its class is unknown."""


class PlanError(LohanError):
    """A plan contradicts its workload, or a strategy name is unknown."""


class VerificationError(LohanError):
    """A rewritten program breaks an invariant (docs/architecture.md, "Invariants")."""


class HardwareError(LohanError):
    """A hardware profile is incomplete, or has a rate that is zero or missing."""


class StorageError(LohanError):
    """An SSD directory cannot be used, or a read or write on it failed."""


class CheckpointError(LohanError):
    """A file of weights or a checkpoint is damaged, incomplete, or of another model."""


class StepError(LohanError):
    """The training loop called things in an order that has no exact meaning."""


def listed(names: Sequence[str], most: int = 20) -> str:
    """Return the first names and how many more there are."""
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def format_bytes(num_bytes: float) -> str:
    """Return bytes for a person: ``1.50 GiB``, ``12.0 KiB``, ``17 B``."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def format_need(num_bytes: int) -> str:
    """`format_bytes`, rounded up: a budget of that size is enough."""
    size, unit = 1, "B"
    for larger in ("KiB", "MiB", "GiB"):
        if num_bytes < 1024 * size:
            break
        size, unit = 1024 * size, larger
    if unit == "B":
        return f"{num_bytes} B"
    hundredths = -(-100 * num_bytes // size)
    return f"{hundredths // 100}.{hundredths % 100:02} {unit}"


_SHOWN = 8
"""Parts of a peak that an error lists; of the others it says how many they are."""


class InsufficientMemoryError(LohanError):
    """No plan of the chosen strategy fits a tier.

    Attributes:
        tier: ``"device"``, ``"host"`` or ``"ssd"``.
        need_bytes: the smallest peak that the strategy reaches on that tier.
        have_bytes: the budget of that tier.
        at_peak: (name, bytes) of what is resident at the peak, largest first.
        where: the op or the reason at which the peak stands.
        advice: what to do about it.
    """

    def __init__(
        self,
        tier: str,
        need_bytes: int,
        have_bytes: int,
        *,
        where: str,
        at_peak: Sequence[tuple[str, int]] = (),
        advice: str = "",
    ) -> None:
        self.tier = tier
        self.need_bytes = need_bytes
        self.have_bytes = have_bytes
        self.where = where
        self.at_peak = tuple(at_peak)
        self.advice = advice
        need, have = format_need(need_bytes), format_bytes(have_bytes)
        if need == have:
            need += f" ({format_bytes(need_bytes - have_bytes)} more)"
        lines = [f"not enough {tier} memory: need {need}, have {have} (peak at {where})"]
        if at_peak:
            lines.append("resident at the peak, largest first:")
            lines += [f"  {format_bytes(size):>12}  {name}" for name, size in self.at_peak[:_SHOWN]]
            if rest := self.at_peak[_SHOWN:]:
                size = format_bytes(sum(size for _, size in rest))
                lines.append(f"  {size:>12}  and {len(rest)} more, together")
        if advice:
            lines.append(advice)
        super().__init__("\n".join(lines))

    def anew(self, more_advice: str = "") -> InsufficientMemoryError:
        """An equal error, but for more advice, without the frames that this one passed: to keep it,
        and to raise one that is kept.

        An error holds its frames, and they all their callers' with what is in their variables:
        tensors, programs. If one of these frames, or what it works on, keeps the error, then all
        of that lives on until garbage is collected, which device memory cannot wait for.
        """
        return InsufficientMemoryError(
            self.tier,
            self.need_bytes,
            self.have_bytes,
            where=self.where,
            at_peak=self.at_peak,
            advice=" ".join(filter(None, (self.advice, more_advice))),
        )
