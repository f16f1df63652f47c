"""Updates that are tried before it is known whether they are right (schedule "speculative").

Clipping by the norm needs the gradients of all units before the first one is updated, but mostly
changes nothing. So while backward runs, host units are updated into second copies of their states,
as if there were nothing to clip; the states themselves stay. `optimizer.step()` then knows the
norm: if nothing had to be clipped, each unit goes on with its second copy (the two trade places,
nothing is moved); otherwise what was tried is dropped, and the units are updated from the states
that are still there. So it is as exact as an update that waits. (SuperOffload, Lian et al. 2025,
"speculation then validation", speculates in place and rolls back.)

A unit whose memory somebody else looks at (a kept `state_dict()`, an array), or has written into,
does not trade places: it is updated again, where it is, and they see the new weights, as in plain
PyTorch. What has not begun when `optimizer.step()` knows the norm is not tried any more: in place
an update is faster (H100 host: 5.0 against 3.7 Gparam/s).

Where gradients add up, a trial adds the last ones in its own pass and takes the norm of the sum
(32 bytes a parameter instead of 10 and 30); sum and gradients stay as they are, in case that it is
dropped. If no kernel does that, they are added first. `optimizer.step()` waits until backward has
ended on the device, which may be long after it was called; trials go on until then. It needs no
norms of what has not ended then, if a bound shows that nothing has to be clipped: the norm of a sum
is at most the sum of norms. What runs goes on, and what has not begun is updated in place and adds
and takes norms there. Otherwise these are taken in a pass of their own (6 bytes), and it waits for
all of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from lohan_fx.runtime.clipping import Clipping, Norms
from lohan_fx.runtime.flats import Flats, views_of
from lohan_fx.runtime.lane import Lane, RankedLane, Ticket
from lohan_fx.runtime.lanes import Lanes
from lohan_fx.runtime.param_groups import (
    Hyperparameters,
    same_hyperparameters,
    snapshot_hyperparameters,
)
from lohan_fx.runtime.unit_gradients import UnitGradients
from lohan_fx.runtime.unit_states import UnitStates
from lohan_fx.runtime.unit_updates import UnitUpdates
from lohan_fx.runtime.update_values import Clip, Results, Tried


@dataclass(slots=True, eq=False, kw_only=True)
class Trial:
    """One unit's update into its second copy.

    Attributes:
        given: gradients, sums, or both, which are added in passing.
        source, target: the states as they are, and their second copy.
        norms: take those of the gradients, if they are wanted; None: they are known.
        fresh: signalled when the second copy is whole; failed if it never will be.
        ended: when nothing of it runs any more.
        decided: it is known whether it adds gradients before it updates: `adds`.
        tried: what came of it, once it has been made.
        stale: user code has written into parameters since, and it did not begin from that.
    """

    given: UnitGradients
    source: Flats
    target: Flats
    norms: Norms | None
    fresh: Ticket = field(default_factory=Ticket)
    ended: Ticket = field(default_factory=Ticket)
    decided: Ticket = field(default_factory=Ticket)
    adds: bool = False
    tried: Tried | None = None
    begun: bool = False
    failed: bool = False
    accepted: bool = False
    dropped: bool = False
    stale: bool = False

    @property
    def states(self) -> UnitStates:
        return self.given.states

    def may_fail_step(self) -> bool:
        """Whether the step should not go on before it has ended: it adds, and if that fails the
        step fails; or it has failed. Waits until it is known, if it has begun; a kernel that adds
        in passing is not waited for."""
        if self.begun:
            self.decided.settle()
        return self.failed or (self.adds and not self.ended.ended())


class Trials:
    """What one updater tries.

    Args:
        lanes: for labels and records.
        lane: the optimizer's thread.
        clipping: counts the steps that are redone.
        updates: which units took the step; accepted ones are added.
    """

    def __init__(
        self,
        lanes: Lanes,
        lane: RankedLane,
        clipping: Clipping,
        updates: UnitUpdates,
    ) -> None:
        self._clipping = clipping
        self._updates = updates
        self._lanes = lanes
        self._lane = lane
        self._quiet = Lane("acceptance")  # where no interrupt strikes
        self._lock = threading.Lock()
        self._hyperparameters: Hyperparameters = ()
        self._clip: Clip | None = None
        self._rank: Mapping[int, int] = {}
        self._tries = False
        self._clipped = False  # in the last step: this one will hardly be otherwise
        self._open: list[Trial] = []
        self._accepted: list[Trial] = []
        self._dropped: list[Trial] = []
        self._settling: Ticket | None = None

    def begin(
        self,
        optimizer: torch.optim.Optimizer,
        rank: Mapping[int, int],
        *,
        last: bool,
    ) -> None:
        """Backward begins, which may be the `last` one of its step. `rank`: unit → how late the
        next forward needs it."""
        self._tries = last and not self._clipped
        if self._tries:
            self._hyperparameters = snapshot_hyperparameters(optimizer)
            self._clip = self._clipping.by_value()
            self._rank = rank

    def takes(self, states: UnitStates) -> bool:
        """Whether `submit` would try the unit's update."""
        return self._tries and states.spare is not None and states.flats is not None

    def submit(
        self, given: UnitGradients, ready: Ticket, norms: Norms | None = None
    ) -> Trial | None:
        """Update a unit, if it has a spare, when its gradients or its sums are `ready`; after what
        is urgent on the lane.

        Args:
            norms: take those of the gradients, which are not known yet.

        Returns:
            the trial; None if there is none.
        """
        states = given.states
        if not self.takes(states):
            return None
        assert states.flats is not None
        assert states.spare is not None
        trial = Trial(given=given, source=states.flats, target=states.spare, norms=norms)
        rank = 1 + len(self._rank) + self._rank.get(states.index, 1)
        job = partial(self._run, trial, ready)
        trial.ended = self._lane.submit_ranked(job, rank, ready, (trial.fresh, trial.decided))
        self._open.append(trial)
        return trial

    def give_up(self, trial: Trial) -> bool:
        """Do not try it any more, unless it has begun; says whether it has."""
        with self._lock:
            trial.dropped = trial.dropped or not trial.begun
            return trial.begun

    def distrust(self, units: Collection[int]) -> None:
        """Accept no trial of these units: what user code wrote into them is taken over."""
        for trial in self._open:
            trial.stale |= trial.states.index in units

    def settle(self, optimizer: torch.optim.Optimizer, clip: Clip | None) -> list[Trial]:
        """The gradients are known: accept all trials of the step, or drop them.

        Args:
            optimizer: as it is now; it may have been changed since backward.
            clip: what has to be done to gradients.

        Returns:
            the accepted trials of this step; they may still run. After an interrupted call, or one
            that failed, the next one goes on and returns all of them.

        Raises:
            what kept the acceptance thread from it.
        """
        self._wait_settled()
        if self._open:
            self._clipped = _by_norm(clip)
            self._clipping.redone_steps += self._clipped
            right = not self._clipped and same_hyperparameters(self._hyperparameters, optimizer)
            self._settling = self._quiet.submit(partial(self._settle, right))
            error = self._wait_settled()
            if error is not None:
                raise error
        elif not self._tries:
            self._clipped = _by_norm(clip)
        return list(self._accepted)

    def _settle(self, right: bool) -> None:
        while self._open:
            trial = self._open[-1]
            if right and not trial.stale and trial.states.may_flip():
                self._accept(trial)
            if not trial.accepted:
                self._drop(trial)
            self._open.pop()

    def _wait_settled(self) -> BaseException | None:
        """Wait for the acceptance thread; returns its error, and forgets it."""
        settling = self._settling
        if settling is None:
            return None
        settling.settle()
        self._settling = None
        return settling.error

    def drop(self) -> None:
        """The step has ended: forget what was accepted, and drop what was not."""
        self._wait_settled()
        if self._open:  # an interrupted `settle` may not know that it has submitted anything
            self._quiet.drain()
        while self._open:
            self._drop(self._open[-1])
            self._open.pop()
        self._dropped += self._accepted
        self._accepted = []

    def wait(self) -> None:
        """Wait until no trial reads gradients any more."""
        self._wait_settled()
        for trial in (*self._dropped, *self._accepted):
            trial.ended.settle()
        self._dropped.clear()

    def close(self, *, joins: bool = True) -> None:
        """Join the thread; the optimizer's is closed before. `joins` as for `Lane.close`."""
        self._quiet.close(joins=joins)

    def _accept(self, trial: Trial) -> None:
        with self._lock:
            if trial.failed or not trial.begun:
                return
            trial.accepted = True
            self._updates.begun.append(trial.states.unit.name)
            self._accepted.append(trial)
            self._commit(trial)
        trial.states.flip()

    def _commit(self, trial: Trial) -> None:
        """Take over the scalars of an accepted trial that has ended. The lock is held."""
        if trial.accepted and trial.tried is not None:
            assert trial.states.optimizer is not None
            trial.states.optimizer.accept(trial.tried)
            self._updates.ended.append(trial.states.unit.name)

    def _drop(self, trial: Trial) -> None:
        with self._lock:
            trial.dropped = True
        self._dropped.append(trial)

    # -- on the optimizer's thread ----------------------------------------------------------

    def _run(self, trial: Trial, ready: Ticket) -> None:
        with self._lock:
            if trial.dropped:
                trial.fresh.finish()
                return
            trial.begun = True
        try:
            ready.synchronize()
            tried = self._try(trial)
        except BaseException as error:
            with self._lock:
                trial.failed = True
                accepted = trial.accepted
            trial.decided.finish()
            trial.fresh.fail(error)
            if accepted:
                raise
            return  # the update that follows meets the cause again, and says it
        with self._lock:
            trial.tried = tried
            self._commit(trial)
        trial.decided.finish()
        trial.fresh.finish()

    def _try(self, trial: Trial) -> Tried:
        given, norms = trial.given, trial.norms
        tried = None
        if norms is None or norms.in_passing or not norms.wanted:
            tried = self._update(trial)
        if tried is None:
            trial.adds = True
            trial.decided.finish()
            try:
                self._updates.add(given, trial.source)
            except BaseException as error:  # some may have been added: nobody may add them again
                given.arrival = Ticket()
                given.arrival.fail(error)
                raise
            tried = self._update(trial)
            assert tried is not None
        elif norms is not None:
            norms.note_all(trial.states, tried.squares)
            given.take_norms(trial.source, norms)
        return tried

    def _update(self, trial: Trial) -> Tried | None:
        """Update into the second copy; None: that cannot be done before gradients are added."""
        states, source, target = trial.states, trial.source, trial.target
        given, norms = trial.given, trial.norms
        slices = states.layout.slices
        assert states.optimizer is not None
        began = time.perf_counter()
        tried = states.optimizer.try_step(
            views_of(source.master, slices),
            given.gradients,
            states.moments(source),
            Results(
                masters=views_of(target.master, slices),
                state=states.moments(target),
                compute=views_of(target.compute, slices) if states.mixed else None,
            ),
            sums=given.totals(source),
            squared=norms is not None and norms.wanted and given.unadded,
            hyperparameters=self._hyperparameters,
            clip=self._clip,
            passing=trial.decided.finish,
        )
        if tried is None:
            return None
        ended = time.perf_counter()
        self._lanes.update_s += ended - began
        if self._lanes.recorder is not None:
            self._lanes.recorder.add(
                "cpu", self._lanes.label("update", states.unit.name), began, ended
            )
        return tried


def _by_norm(clip: Clip | None) -> bool:
    return clip is not None and clip.factor is not None
