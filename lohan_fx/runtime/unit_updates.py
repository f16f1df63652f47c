"""Additions to, and updates of, single units in memory; which units took the step."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from torch import Tensor

from lohan_fx.runtime.clipping import Norms
from lohan_fx.runtime.flats import Flats, views_of
from lohan_fx.runtime.lanes import Lanes
from lohan_fx.runtime.param_groups import Hyperparameters
from lohan_fx.runtime.unit_gradients import UnitGradients
from lohan_fx.runtime.update_values import Clip, Squares
from lohan_fx.timeline import Lane


class UnitUpdates:
    """Adds to units and updates them, as a step wants it.

    Attributes:
        hyperparameters, clip: the step's; what happens to its gradients first.
        begun: names of the units whose update has begun.
        ended: of those whose new states are complete, in host memory at least.
    """

    def __init__(self, lanes: Lanes, norms: Norms) -> None:
        self._lanes = lanes
        self._norms = norms
        self.hyperparameters: Hyperparameters = ()
        self.clip: Clip | None = None
        self.begun: list[str] = []
        self.ended: list[str] = []

    def has_begun(self, given: UnitGradients) -> bool:
        """Whether a unit took the step, or began to."""
        return given.states.unit.name in self.begun

    def add(self, given: UnitGradients, flats: Flats) -> None:
        """Add gradients to what a unit has, which is in `flats`, in host memory."""
        recorder = self._lanes.recorder
        began = time.perf_counter()
        given.add(flats, self._norms)
        given.take_norms(flats, self._norms)
        if recorder is not None:
            label = self._lanes.label("add", given.states.unit.name)
            recorder.add("cpu", label, began, time.perf_counter())

    def complete(self, given: UnitGradients, flats: Flats) -> None:
        """Take the norms of gradients with the sums that a unit in host memory has; add only if
        that is no slower."""
        recorder = self._lanes.recorder
        began = time.perf_counter()
        if not given.foresee_norms(flats, self._norms):
            self.add(given, flats)
        elif recorder is not None:
            label = self._lanes.label("norm", given.states.unit.name)
            recorder.add("cpu", label, began, time.perf_counter())

    def run(self, given: UnitGradients, flats: Flats) -> None:
        """Update a unit, whose states are in `flats`; take norms that are missing."""
        states = given.states
        self.begun.append(states.unit.name)
        recorder = self._lanes.recorder
        on_device = states.tier == "device"
        began_s = time.perf_counter()
        in_backward = recorder is not None and on_device and recorder.computing
        began = recorder.end_compute(self._lanes.stream) if recorder and on_device else began_s
        if not given.lacks_norms(self._norms):
            self._step(given, flats)
        elif not self._step_with_norms(given, flats):
            self.complete(given, flats)
            began_s = began = time.perf_counter()
            self._step(given, flats)
        self.ended.append(states.unit.name)
        if not on_device:
            self._lanes.update_s += time.perf_counter() - began_s
        if recorder is not None:
            ended = recorder.mark(self._lanes.stream) if on_device else time.perf_counter()
            lane: Lane = "gpu" if on_device else "cpu"
            recorder.add(lane, self._lanes.label("update", states.unit.name), began, ended)
            if in_backward:
                recorder.begin_compute(ended)

    def _step_with_norms(self, given: UnitGradients, flats: Flats) -> bool:
        """Update a unit in host memory and take norms in the same pass, if a kernel does that."""
        if not self._norms.in_passing:
            return False
        squares = self._step(given, flats, squared=True)
        if squares is None:
            return False
        self._norms.note_all(given.states, squares)
        given.take_norms(flats, self._norms)
        return True

    def _step(self, given: UnitGradients, flats: Flats, *, squared: bool = False) -> Squares | None:
        """Update, as `UnitOptimizer.step`."""
        states = given.states
        slices = states.layout.slices
        optimizer = states.optimizer
        assert optimizer is not None
        step: Callable[..., Squares | None] = optimizer.step
        if states.mixed:
            none: list[Tensor | None] = [None] * len(slices)
            copies = none if states.casts else views_of(flats.compute, slices)
            step = partial(optimizer.step_mixed, compute=copies)
        return step(
            views_of(flats.master, slices),
            given.gradients,
            states.moments(flats),
            sums=given.totals(flats),
            squared=squared,
            hyperparameters=self.hyperparameters,
            clip=self.clip,
        )

    def clear(self) -> None:
        """No unit has taken the next step."""
        self.begun.clear()
        self.ended.clear()
