"""The user's optimizer, run unit by unit on views of flat buffers.

A `UnitOptimizer` updates the parameters of one unit with the arithmetic of the user's own
`torch.optim` object: a *shadow* of the same class, without its hooks, is given views in place of
the parameters, gradients and state, and its own `step` runs on them. Nothing of an update rule
is written down here, so a unit's update equals plain PyTorch's on the same device, bitwise.

No storage, no threads: the caller owns all buffers and may pass other addresses in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lohan_fx.errors import StepError
from lohan_fx.runtime import chunked_update, native_update
from lohan_fx.runtime.initial_state import ScalarState
from lohan_fx.runtime.param_groups import Hyperparameters, group_values, places_of
from lohan_fx.runtime.shadow import Shadow, StateSpec, state_spec, structure_of
from lohan_fx.runtime.sums import added
from lohan_fx.runtime.supported_optimizers import supported_base
from lohan_fx.runtime.update_values import Clip, Member, Operands, Results, Squares, Tried

_CPU = torch.device("cpu")


class UnitOptimizer:
    """Updates the parameters of one unit as the user's optimizer would.

    Args:
        optimizer: the user's optimizer. Its groups are read at every step; its state, its hooks
            and its `step` are left alone.
        params: the user's own parameters, in the order of the views that `step` gets.
        prefer_fused: run the fused kernel where the user left `fused` and `foreach` to torch and
            torch has one for the class and device. It is several times faster on CPUs and rounds
            differently: not bitwise what plain PyTorch gives. Not for complex parameters.
        chunk_elements: update at most so many elements at a time, rounded up to a multiple of
            1024; larger parameters are cut, smaller ones taken together. The result does not
            depend on it, and temporary memory is a few times this many elements (parameters that
            are not contiguous are taken whole). None: on CPUs a chunk that stays in cache,
            elsewhere the whole unit.

    Raises:
        UnsupportedOptimizerError: as `check_supported`.
        ValueError: a parameter is in no group of `optimizer`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        params: Sequence[nn.Parameter],
        *,
        prefer_fused: bool = False,
        chunk_elements: int | None = None,
    ) -> None:
        if chunk_elements is not None and chunk_elements < 1:
            raise ValueError(f"chunk_elements must be positive, not {chunk_elements}")
        supported_base(optimizer)
        self._optimizer = optimizer
        self._shadow = Shadow(optimizer)
        self._params = tuple(params)
        self._prefer_fused = prefer_fused
        self._chunk_elements = chunk_elements
        self._scalars: list[dict[str, Tensor] | None] = [None] * len(self._params)
        self._places = places_of(optimizer, self._params)
        self._fuses: dict[tuple[int, torch.device], bool] = {}
        self._checked: dict[int, object] = {}
        self._layouts: dict[int, StateSpec] = {}
        for g in dict.fromkeys(g for g, _ in self._places):
            values = self._values(g, optimizer.param_groups[g], _CPU)
            self._layouts[g] = state_spec(self._shadow, values, _CPU)
        self._planned = tuple(self._layouts[g] for g, _ in self._places)

    def state_names(self, index: int | None = None) -> tuple[str, ...]:
        """Names of the state of parameter shape: of parameter `index`, or of all in the unit.

        Its dtype is the master's. The number of names is the state elements per element.
        """
        planned = self._planned if index is None else (self._planned[index],)
        return tuple(dict.fromkeys(name for layout in planned for name in layout.tensors))

    def scalar_names(self, index: int | None = None) -> tuple[str, ...]:
        """Names of the scalar state, which is kept here: of one parameter, or of all."""
        planned = self._planned if index is None else (self._planned[index],)
        return tuple(dict.fromkeys(name for layout in planned for name in layout.scalars))

    def scalar_bytes(self, index: int) -> int:
        """Bytes of the scalar state that there is of one parameter."""
        return sum(value.nbytes for value in (self._scalars[index] or {}).values())

    def scalar_state(self) -> ScalarState:
        """Return the scalar state of all parameters, for a checkpoint."""
        return [
            None if values is None else {name: float(v) for name, v in values.items()}
            for values in self._scalars
        ]

    def load_scalar_state(self, values: Sequence[Mapping[str, float] | None]) -> None:
        """Take over scalar state; a parameter with None starts anew, whatever its views hold.

        Raises:
            ValueError: the values are of other parameters or of another kind of optimizer.
        """
        if len(values) != len(self._params):
            raise ValueError(
                f"scalar state of {len(values)} parameters, the unit has {len(self._params)}"
            )
        loaded: list[dict[str, Tensor] | None] = []
        for i, (given, layout) in enumerate(zip(values, self._planned, strict=True)):
            if given is None:
                loaded.append(None)
                continue
            if set(given) != set(layout.scalars):
                raise ValueError(
                    f"scalar state of parameter {i} is {sorted(given)}, "
                    f"{type(self._optimizer).__name__} keeps {sorted(layout.scalars)}"
                )
            loaded.append(
                {n: torch.tensor(v, dtype=layout.scalars[n][1]) for n, v in given.items()}
            )
        self._scalars = loaded

    @torch.no_grad()
    def step(
        self,
        masters: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        state: Sequence[Mapping[str, Tensor]],
        *,
        sums: Sequence[Tensor | None] | None = None,
        squared: bool = False,
        hyperparameters: Hyperparameters | None = None,
        clip: Clip | None = None,
    ) -> Squares | None:
        """Update `masters` and `state` in place from `grads`.

        Args:
            masters: one view a parameter, any floating dtype and shape, all on one device.
            grads: shape, dtype and device of the master. None: the parameter is left alone, as
                torch.optim does. As in torch.optim, the values may be overwritten.
            state: the tensors named by `state_names(i)`, with shape, dtype, device and memory
                order of the master; more may be there. What they hold before the first update of
                a parameter does not matter.
            sums: of gradients before, as their masters; what `grads` has is added to them, in the
                update's own pass where the kernel can. What they hold then is left open.
            squared: only if a kernel takes squares in passing, which leaves `sums` as they are; in
                host memory.
            hyperparameters: from `param_groups.snapshot_hyperparameters`; None: the user's groups
                as they are.
            clip: what to do to gradients first.

        Returns:
            if it is `squared`, as `Tried.squares`; None then: nothing was done.

        Nothing has changed after an error of these; should the arithmetic itself fail (out of
        memory), views may be half updated while scalar state is that of the step before.

        Raises:
            ValueError: views do not fit each other.
            StepError: a changed hyperparameter needs state that has no storage, or a parameter
                has left the optimizer.
            UnsupportedOptimizerError: a gradient is sparse, or a group became one that
                `check_supported` refuses.
        """
        given = self._given(masters, grads, sums, state, None, clip)
        squares = self._update(given, hyperparameters, squared=squared, in_passing=squared)
        return None if squares is None or not squared else _of_gradients(squares, grads)

    @torch.no_grad()
    def step_mixed(
        self,
        masters: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        state: Sequence[Mapping[str, Tensor]],
        compute: Sequence[Tensor | None],
        *,
        sums: Sequence[Tensor | None] | None = None,
        scratch: Tensor | None = None,
        squared: bool = False,
        hyperparameters: Hyperparameters | None = None,
        clip: Clip | None = None,
    ) -> Squares | None:
        """`step` for masters with compute copies: cast, update and write, chunk by chunk.

        Args:
            masters, sums, state, squared, hyperparameters, clip: as for `step`.
            grads: as for `step`, but of any floating dtype (bfloat16 for float32 masters); those
                of another dtype than their master are not overwritten.
            compute: shape of the master, any floating dtype; gets the rounded master, also where
                there is no gradient. None: no copy.
            scratch: flat, dtype and device of the masters, at least 1024 elements or as many as
                the unit has; takes the cast gradients and bounds the chunk. None: allocated.

        Returns:
            as `step`.

        Raises:
            ValueError, StepError, UnsupportedOptimizerError: as `step`.
        """
        given = self._given(masters, grads, sums, state, compute, clip)
        squares = self._update(given, hyperparameters, scratch, squared=squared, in_passing=squared)
        if squares is None:
            return None
        for i, (master, grad, copy) in enumerate(zip(masters, grads, compute, strict=True)):
            if copy is not None and grad is None and given.sums[i] is None:
                copy.copy_(master)
        return _of_gradients(squares, grads) if squared else None

    @torch.no_grad()
    def try_step(
        self,
        masters: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        state: Sequence[Mapping[str, Tensor]],
        results: Results,
        *,
        sums: Sequence[Tensor | None] | None = None,
        squared: bool = False,
        hyperparameters: Hyperparameters | None = None,
        clip: Clip | None = None,
        passing: Callable[[], None] = lambda: None,
    ) -> Tried | None:
        """`step_mixed` (`step`, if `results` has no compute copies) with its results elsewhere.

        Masters, gradients, sums, state and the scalars here stay as they are (but for state that
        no update has written yet). `results` gets everything, also of parameters without a
        gradient.

        Args:
            squared: sums of squares of what `grads` and `sums` are together are wanted, of the
                parameters that `grads` has something of.
            passing: called as soon as it is sure that a kernel adds in passing.

        Returns:
            what came of it, for `accept`; None: nothing was done, as no kernel adds and takes
            squares in passing.

        Raises:
            as `step`.
        """
        given = self._given(masters, grads, sums, state, results.compute, clip, results)
        pairs = list(zip(grads, given.sums, strict=True))
        adds = any(grad is not None and total is not None for grad, total in pairs)
        before, self._scalars = self._scalars, list(self._scalars)
        try:
            squares = self._update(
                given,
                hyperparameters,
                squared=squared,
                in_passing=squared or adds,
                passing=passing,
            )
            if squares is None:
                return None
            for i, (grad, total) in enumerate(pairs):
                if grad is None and total is None:
                    results.masters[i].copy_(masters[i])
                    for name, view in results.state[i].items():
                        view.copy_(state[i][name])
                    if results.compute is not None:
                        results.compute[i].copy_(masters[i])
            return Tried(tuple(self._scalars), _of_gradients(squares, grads))
        finally:
            self._scalars = before

    def accept(self, tried: Tried) -> None:
        """Go on from an update that was tried."""
        self._scalars = list(tried.scalars)

    def _values(self, index: int, group: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
        """Hyperparameters of group `index` as the shadow gets them."""
        values = group_values(group, device)
        if self._prefer_fused and values.get("fused", False) is values.get("foreach") is None:
            fused = {**values, "fused": True}
            if (index, device) not in self._fuses:
                try:
                    state_spec(self._shadow, fused, device)
                except RuntimeError:  # no such kernel on this device
                    self._fuses[index, device] = False
                else:
                    self._fuses[index, device] = True
            if self._fuses[index, device]:
                return fused
        return values

    def _find_groups(self) -> None:
        """Notice what load_state_dict, add_param_group and user code did to the groups."""
        groups = self._optimizer.param_groups
        try:
            if all(
                groups[g]["params"][k] is p
                for p, (g, k) in zip(self._params, self._places, strict=True)
            ):
                return
        except IndexError:
            pass
        try:
            self._places = places_of(self._optimizer, self._params)
        except ValueError as error:
            raise StepError(f"the optimizer's groups have changed: {error}") from None
        self._checked = {}

    def _settings(
        self, hyperparameters: Hyperparameters | None, device: torch.device
    ) -> dict[int, dict[str, Any]]:
        """Values of the unit's groups by index. All state that they need has storage."""
        groups: Sequence[Mapping[str, Any]] = hyperparameters or self._optimizer.param_groups
        settings: dict[int, dict[str, Any]] = {}
        for g in dict.fromkeys(g for g, _ in self._places):
            values = settings[g] = self._values(g, groups[g], device)
            key = (device, structure_of(values))
            if self._checked.get(g) == key:
                continue
            layout = state_spec(self._shadow, values, device)
            for planned, (of, _) in zip(self._planned, self._places, strict=True):
                new = set(layout.tensors) - set(planned.tensors) if of == g else ()
                if new:
                    raise StepError(
                        f"group {g} of the {type(self._optimizer).__name__} now needs the state "
                        f"{', '.join(sorted(new))}, for which there is no storage: set the option "
                        "before lohan_fx.compile"
                    )
            self._layouts[g] = layout
            self._checked[g] = key
        return settings

    def _given(
        self,
        masters: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        sums: Sequence[Tensor | None] | None,
        state: Sequence[Mapping[str, Tensor]],
        compute: Sequence[Tensor | None] | None,
        clip: Clip | None,
        results: Results | None = None,
    ) -> Operands:
        """The operands of one update, as many of each as there are parameters."""
        nothing = (None,) * len(self._params)
        copies = nothing if compute is None else compute
        sums = nothing if sums is None else sums
        lists = (masters, grads, sums, state, copies)
        if any(len(each) != len(self._params) for each in lists):
            raise ValueError(
                f"{len(masters)} masters, {len(grads)} gradients, {len(sums)} sums, {len(state)} "
                f"states, {len(copies)} compute copies for {len(self._params)} parameters"
            )
        return Operands(
            masters=masters,
            grads=grads,
            sums=sums,
            state=state,
            copies=copies,
            mixed=compute is not None,
            clip=clip or Clip(),
            results=results,
        )

    def _update(
        self,
        given: Operands,
        hyperparameters: Hyperparameters | None,
        scratch: Tensor | None = None,
        *,
        squared: bool,
        in_passing: bool,
        passing: Callable[[], None] = lambda: None,
    ) -> Mapping[int, float] | None:
        """Update all. `in_passing`: only by a kernel that adds, and takes squares, in its one pass;
        `passing` is called before it runs.

        Returns:
            the sums of squares by parameter, if they are `squared`; None: nothing was done.
        """
        if not self._params:
            return {}
        self._find_groups()
        device = given.masters[0].device
        members = self._members(hyperparameters, device)
        if device.type != "cpu":
            grads = added(given.grads, given.sums)
            given = replace(given, grads=grads, sums=(None,) * len(grads))
        updated = native_update.update(
            self._optimizer, given, members, squared=squared, passing=passing
        )
        if updated is None:
            if in_passing:
                return None
            updated = chunked_update.update(
                self._shadow, given, members, chunk_elements=self._chunk_elements, scratch=scratch
            )
        for i, scalars in updated.scalars.items():
            self._scalars[i] = scalars
        return updated.squares

    def _members(
        self, hyperparameters: Hyperparameters | None, device: torch.device
    ) -> list[Member]:
        """The parameters in their groups, as the groups are now."""
        settings = self._settings(hyperparameters, device)
        return [
            Member(
                group=g,
                values=settings[g],
                layout=self._layouts[g],
                names=planned.tensors,
                scalars=scalars,
            )
            for (g, _), planned, scalars in zip(
                self._places, self._planned, self._scalars, strict=True
            )
        ]


def _of_gradients(squares: Mapping[int, float], grads: Sequence[object]) -> Squares:
    """What was found, of the parameters that `grads` has something of."""
    return tuple(squares.get(i) if g is not None else None for i, g in enumerate(grads))
