"""What one unit's gradients are for, where the unit is: on the optimizer's thread, or at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from lohan_fx.errors import StepError
from lohan_fx.runtime.gradient_offload import GradientOffload
from lohan_fx.runtime.lane import RankedLane, Ticket
from lohan_fx.runtime.state_pipeline import StatePipeline
from lohan_fx.runtime.unit_gradients import UnitGradients
from lohan_fx.runtime.unit_updates import UnitUpdates

Work = Literal["add", "norms", "update"]
STOPPED = "an earlier update of this step failed: no further one begins"


class UnitJobs:
    """Adds gradients to units and updates units, when the gradients are there.

    Args:
        lane: the optimizer's thread.
        updates: of units in memory.
        pipeline: has units on SSD in memory for as long.
        offload: gets the buffers of gradients back.
        late: updates may run beside the next forward.
        tries: trials run on the lane, too.

    Attributes:
        rank: unit → how late the next forward needs it.
        fresh: unit → when at rest it is what the step makes it, if it is late.
        tickets: all that was submitted.
        stopped: why no further update may begin.
    """

    def __init__(
        self,
        lane: RankedLane,
        updates: UnitUpdates,
        pipeline: StatePipeline,
        offload: GradientOffload,
        *,
        late: bool,
        tries: bool,
    ) -> None:
        self._lane = lane
        self._updates = updates
        self._pipeline = pipeline
        self._offload = offload
        self._late = late
        self._tries = tries
        self.rank: dict[int, int] = {}
        self.fresh: dict[int, Ticket] = {}
        self.tickets: list[Ticket] = []
        self.stopped: BaseException | None = None

    def begin(self, order: Sequence[int]) -> None:
        """Backward begins, which emits the gradients of units in this order."""
        self.rank = {index: -i for i, index in enumerate(order)}  # last out is needed first
        self.stopped = None

    def start(self, given: UnitGradients, borrowed: Tensor | None = None) -> None:
        """Update a unit when its gradients are there; at once if it is on the device."""
        states = given.states
        if states.tier == "device":
            self.update(given, None)
            return
        fresh = given.fresh or Ticket() if self._late else None
        if fresh is not None:
            given.fresh = self.fresh[states.index] = fresh
        self.submit(given, borrowed, fresh, "update")

    def submit(
        self, given: UnitGradients, borrowed: Tensor | None, fresh: Ticket | None, work: Work
    ) -> None:
        """Work on a unit's gradients when they are there.

        Args:
            given: the gradients, of a unit that is not on the device.
            borrowed: the buffer that they are in, if it has to go back.
            fresh: to be signalled when the unit at rest is updated.
            work: what to do.
        """

        def job() -> None:
            self._run(given, borrowed, fresh, work)

        arrival = given.arrival or there()
        given.arrival = arrival
        if fresh is None:
            if not self._tries:
                ticket = self._lane.submit(job)
            else:  # before all trials, but these run while it waits for its gradients
                ticket = self._lane.submit_ranked(job, -1 - len(self.rank), arrival)
            self.tickets.append(ticket)
            return
        # states are read ahead in the order in which units are submitted: another order would wait
        # for a buffer that a unit behind it holds
        states = given.states
        rank = self.rank.get(states.index, 1) if states.tier == "host" else None
        self.tickets.append(self._lane.submit_ranked(job, rank, arrival, (fresh,)))

    def update(self, given: UnitGradients, fresh: Ticket | None) -> None:
        """Update a unit whose gradients are there, on any thread."""
        states = given.states
        if not states.on_ssd:
            assert states.flats is not None
            self._updates.run(given, states.flats)
            if fresh is not None:
                fresh.finish()
            return
        buffer = self._pipeline.read(states)
        try:
            self._updates.run(given, states.carve(buffer))
        except BaseException:
            self._pipeline.give_back(buffer)
            raise
        if fresh is not None and not states.copy_on_ssd:  # the next forward needs no more than that
            fresh.finish()
            fresh = None
        self._pipeline.write_states(states, buffer, fresh)

    def settle(self) -> BaseException | None:
        """Wait for all that was submitted, and what it writes; returns the first error."""
        error: BaseException | None = None
        for tickets in (self.tickets, self._pipeline.writes):  # updates submit the writes
            for ticket in tickets:
                ticket.settle()
                error = error or ticket.error
        return error

    def forget_ended(self) -> None:
        """What was submitted has ended, and so have its writes."""
        self.tickets.clear()
        self._pipeline.writes.clear()

    def clear(self) -> None:
        """Forget what a step left behind."""
        self.tickets.clear()
        self.fresh.clear()

    # -- on the optimizer's thread ----------------------------------------------------------

    def _run(
        self, given: UnitGradients, borrowed: Tensor | None, fresh: Ticket | None, work: Work
    ) -> None:
        """Work on a unit's gradients once they are there."""
        states = given.states
        try:
            assert given.arrival is not None
            given.arrival.synchronize()
            if self.stopped is not None:
                raise StepError(STOPPED) from self.stopped
            if work == "add":
                self._add(given)
            elif work == "norms":
                assert states.flats is not None
                self._updates.complete(given, states.flats)
            elif not self._updates.has_begun(given):  # else an interrupt made it come twice
                self.update(given, fresh)
        except BaseException as error:
            if not self._updates.begun:  # nothing has changed yet: let it stay so
                self.stopped = self.stopped or error
            if fresh is not None:
                fresh.fail(error)
            raise
        finally:
            if borrowed is not None:
                self._offload.give_back(states, borrowed)

    def _add(self, given: UnitGradients) -> None:
        """Add gradients to what the unit has, where it is."""
        states = given.states
        if not states.on_ssd:
            assert states.flats is not None
            self._updates.add(given, states.flats)
            return
        buffer = self._pipeline.read(states)
        try:
            self._updates.add(given, states.carve(buffer))
        except BaseException:
            self._pipeline.give_back(buffer)
            raise
        self._pipeline.write_sums(states, buffer)


def there() -> Ticket:
    """A ticket of what is there already."""
    ticket = Ticket()
    ticket.finish()
    return ticket
