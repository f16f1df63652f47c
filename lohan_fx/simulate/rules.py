"""In which order the SSDs are served."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """In which order the runtime serves the SSDs. The defaults are what it does.

    Attributes:
        urgent_first: fetches, reloads and offloads, for which compute may be waiting, go before
            optimizer states (`runtime.ssd.io_pool`). Off: requests are served in the order in
            which they were made, so that a fetch waits for whole units of states.
        eager_reads: schedule "optimized" reads the next unit's states as soon as a buffer of the
            state ring is free (`runtime.state_pipeline`). Off: only after it has updated a unit.
    """

    urgent_first: bool = True
    eager_reads: bool = True
