"""The user's optimizer, run unit by unit on views of flat buffers.

A `UnitOptimizer` updates the parameters of one unit with the arithmetic of the user's own
`torch.optim` object: a *shadow* of the same class, without its hooks, is given views in place of
the parameters, gradients and state, and its own `step` runs on them. Nothing of an update rule
is written down here, so a unit's update equals plain PyTorch's on the same device, bitwise.

No storage, no threads: the caller owns all buffers and may pass other addresses in every step.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from lohan_fx._compat import FakeTensor
from lohan_fx.errors import StepError
from lohan_fx.runtime.initial_state import ScalarState
from lohan_fx.runtime.native import adam, adam_cuda
from lohan_fx.runtime.param_groups import Hyperparameters, group_values, places_of
from lohan_fx.runtime.shadow import Shadow, StateSpec, state_spec, structure_of
from lohan_fx.runtime.sums import added
from lohan_fx.runtime.supported_optimizers import sparse_refusal, supported_base

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """What happens to gradients before they are used, in the masters' dtype.

    Attributes:
        factor: every element is multiplied by it: a scalar tensor on the CPU, or None.
        limit: every element is brought into [-limit, limit]; None: it is not.
    """

    factor: Tensor | None = None
    limit: float | None = None

    @property
    def changes(self) -> bool:
        """Whether anything happens to them."""
        return self.factor is not None or self.limit is not None

    def apply(self, gradient: Tensor) -> None:
        """Change a gradient in place, as torch.nn.utils would. Nothing else may hold it: one tensor
        can be the gradient of two parameters, or go on to the layers below."""
        if self.factor is not None:
            gradient.mul_(self.factor.to(gradient.device))
        if self.limit is not None:
            gradient.clamp_(-self.limit, self.limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Where the results of an update go that is only tried: as the arguments of `step_mixed`."""

    masters: Sequence[Tensor]
    state: Sequence[Mapping[str, Tensor]]
    compute: Sequence[Tensor] | None


Squares = tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Tried:
    """What came of an update that was only tried.

    Attributes:
        scalars: the scalar state of each parameter after it.
        squares: of each parameter's gradient the sum of squares in float64; None where it was not
            asked for, or there is no gradient.
    """

    scalars: tuple[dict[str, Tensor] | None, ...]
    squares: Squares


_ALIGNMENT = 1024
"""Pieces of a parameter begin at multiples of this many elements, so that vectorized kernels
treat every element as they do in the whole parameter (fused CPU kernels round the elements that
are left over after the last full vector differently)."""


@dataclass(slots=True)
class _Piece:
    """A whole parameter, or a run of its elements.

    `views` is where the state belongs; `entry` is what the shadow sees and fills: empty before
    the first update, else the views and the scalars.
    """

    index: int
    group: int
    fresh: bool
    master: Tensor
    grad: Tensor
    compute: Tensor | None
    views: dict[str, Tensor]
    entry: dict[str, Tensor]


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
        squares = self._update(
            masters,
            grads,
            sums,
            state,
            None,
            None,
            hyperparameters,
            clip,
            squared=squared,
            in_passing=squared,
        )
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
        squares = self._update(
            masters,
            grads,
            sums,
            state,
            compute,
            scratch,
            hyperparameters,
            clip,
            squared=squared,
            in_passing=squared,
        )
        if squares is None:
            return None
        for i, (master, grad, copy) in enumerate(zip(masters, grads, compute, strict=True)):
            if copy is not None and grad is None and (sums is None or sums[i] is None):
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
        sums = (None,) * len(grads) if sums is None else sums
        both = [g is not None and s is not None for g, s in zip(grads, sums, strict=True)]
        before, self._scalars = self._scalars, list(self._scalars)
        try:
            squares = self._update(
                masters,
                grads,
                sums,
                state,
                results.compute,
                None,
                hyperparameters,
                clip,
                results,
                squared=squared,
                in_passing=squared or any(both),
                passing=passing,
            )
            if squares is None:
                return None
            for i, (grad, total) in enumerate(zip(grads, sums, strict=True)):
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

    def _limit(self, master: Tensor, unit_elements: int, scratch: Tensor | None) -> int:
        """Most elements to update at a time."""
        if self._chunk_elements is not None:
            limit = -(-self._chunk_elements // _ALIGNMENT) * _ALIGNMENT
        elif master.device.type == "cpu":
            # Kernels give a thread no fewer than 2**15 elements.
            limit = max(2**20, 2**15 * torch.get_num_threads())
        else:
            limit = sys.maxsize
        if scratch is None:
            return limit
        if scratch.dtype != master.dtype or scratch.device != master.device or scratch.dim() != 1:
            raise _misfit("scratch", scratch, master)
        have = scratch.numel()
        if have >= unit_elements:
            return limit
        if have < _ALIGNMENT:
            raise ValueError(f"scratch has {have} elements, needs {min(unit_elements, _ALIGNMENT)}")
        return min(limit, have // _ALIGNMENT * _ALIGNMENT)

    def _update(
        self,
        masters: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        sums: Sequence[Tensor | None] | None,
        state: Sequence[Mapping[str, Tensor]],
        compute: Sequence[Tensor | None] | None,
        scratch: Tensor | None,
        hyperparameters: Hyperparameters | None,
        clip: Clip | None,
        results: Results | None = None,
        *,
        squared: bool = False,
        in_passing: bool = False,
        passing: Callable[[], None] = lambda: None,
    ) -> dict[int, float] | None:
        """Update all. `in_passing`: only by a kernel that adds, and takes squares, in its one pass;
        `passing` is called before it runs.

        Returns:
            the sums of squares by parameter, if they are `squared`; None: nothing was done.
        """
        clip = clip or Clip()
        copies = (None,) * len(self._params) if compute is None else compute
        sums = (None,) * len(self._params) if sums is None else sums
        given = (masters, grads, sums, state, copies)
        if any(len(each) != len(self._params) for each in given):
            raise ValueError(
                f"{len(masters)} masters, {len(grads)} gradients, {len(sums)} sums, {len(state)} "
                f"states, {len(copies)} compute copies for {len(self._params)} parameters"
            )
        if not masters:
            return {}
        self._find_groups()
        settings = self._settings(hyperparameters, masters[0].device)
        mixed = compute is not None
        if masters[0].device.type != "cpu":
            grads, sums = added(grads, sums), (None,) * len(sums)
        squares = self._update_natively(
            masters,
            grads,
            sums,
            state,
            copies,
            settings,
            clip,
            results,
            mixed=mixed,
            squared=squared,
            passing=passing,
        )
        if squares is not None or in_passing:
            return squares
        grads = added(grads, sums)
        if results is not None:
            for i, (master, views) in enumerate(zip(masters, state, strict=True)):
                results.masters[i].copy_(master)
                for name, view in results.state[i].items():
                    view.copy_(views[name])
            masters, state = results.masters, results.state
        limit = self._limit(masters[0], sum(m.numel() for m in masters), scratch)
        pieces: list[_Piece] = []
        for i, (master, grad, copy) in enumerate(zip(masters, grads, copies, strict=True)):
            if master.device != masters[0].device:
                raise _misfit(f"master {i}", master, masters[0])
            if copy is not None and copy.shape != master.shape:
                raise _misfit(f"compute copy {i}", copy, master)
            if grad is None:
                continue
            if grad.layout is not torch.strided:
                raise sparse_refusal(self._optimizer)
            if (
                grad.shape != master.shape
                or grad.device != master.device
                or (compute is None and grad.dtype != master.dtype)
            ):
                raise _misfit(f"gradient {i}", grad, master)
            pieces += self._pieces(i, master.detach(), grad, copy, state[i], limit)
        for batch in _batches(pieces, limit):
            self._run(batch, settings, scratch, clip, keep=results is not None)
        for piece in reversed(pieces):  # all pieces of a parameter end with the same scalars
            if piece.entry:
                names = self._planned[piece.index].tensors
                self._scalars[piece.index] = {
                    n: v for n, v in piece.entry.items() if n not in names
                }
        return {}

    def _update_natively(
        self,
        masters: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        sums: Sequence[Tensor | None],
        state: Sequence[Mapping[str, Tensor]],
        copies: Sequence[Tensor | None],
        settings: Mapping[int, Mapping[str, Any]],
        clip: Clip,
        results: Results | None,
        *,
        mixed: bool,
        squared: bool,
        passing: Callable[[], None],
    ) -> dict[int, float] | None:
        """Update all at once by our own kernel, if it has the arithmetic that is asked for.

        That is torch's fused Adam and AdamW on float32: in host memory, where the results are the
        same to the bit, in one pass and without the GIL; on CUDA in mixed precision only.

        Returns:
            as `_update`; None if it does not.
        """
        if not isinstance(self._optimizer, (Adam, AdamW)):
            return None
        if any(values.get("fused") is not True for values in settings.values()):
            return None
        on_cuda = masters[0].device.type == "cuda"
        if on_cuda and any(copy is None for copy in copies):
            return None
        if masters[0].device.type not in ("cpu", "cuda"):
            return None
        rehearsal = any(isinstance(master, FakeTensor) for master in masters)  # see `scratch`
        kernel: adam.AdamKernel | adam_cuda.CudaAdamKernel | None
        if on_cuda and rehearsal:
            if not adam_cuda.expected():
                return None
            kernel = None
        else:
            kernel = adam_cuda.kernel() if on_cuda else adam.kernel()
            if kernel is None:
                return None
        updates: list[adam.Update] = []
        steps: dict[int, Tensor] = {}
        for i, (master, copy) in enumerate(zip(masters, copies, strict=True)):
            grad, total = grads[i], sums[i]
            if grad is None:
                grad, total = total, None
            if grad is None:
                continue
            values = settings[self._places[i][0]]
            scalars = self._scalars[i]
            if not rehearsal:
                steps[i] = scalars["step"] + 1 if scalars else torch.ones((), dtype=torch.float32)
            beta1, beta2 = values["betas"]
            amsgrad = bool(values["amsgrad"])
            try:
                update = adam.Update(
                    master=master,
                    exp_avg=state[i]["exp_avg"],
                    exp_avg_sq=state[i]["exp_avg_sq"],
                    max_exp_avg_sq=state[i]["max_exp_avg_sq"] if amsgrad else None,
                    gradient=grad,
                    copy=copy,
                    lr=float(values["lr"]),
                    beta1=float(beta1),
                    beta2=float(beta2),
                    eps=float(values["eps"]),
                    weight_decay=float(values["weight_decay"]),
                    step=float(steps.get(i, 1.0)),
                    decoupled=_decouples(self._optimizer, values),
                    maximize=bool(values["maximize"]),
                    factor=1.0 if clip.factor is None else float(clip.factor),
                    limit=math.inf if clip.limit is None else clip.limit,
                    target=None if results is None else _target(results, i, amsgrad),
                    sum=total,
                )
            except KeyError:
                return None
            if not update.supported() or (on_cuda and (amsgrad or results is not None or squared)):
                return None
            halves = torch.float16 in (grad.dtype, None if copy is None else copy.dtype)
            if halves and not getattr(kernel, "has_half", True):
                return None
            if not mixed and grad.dtype != master.dtype:  # `_update` refuses it
                return None
            updates.append(update)
        if rehearsal or kernel is None:
            return {}  # the kernel allocates nothing
        passing()
        for i in steps:
            if self._scalars[i] is None:
                for name in self._planned[i].tensors:
                    state[i][name].zero_()
        if isinstance(kernel, adam.AdamKernel):
            squares = dict(zip(steps, kernel.run(updates, squared=squared), strict=squared))
        else:
            kernel.run(updates)
            squares = {}
        for i, step in steps.items():
            self._scalars[i] = {"step": step}
        return squares

    def _pieces(
        self,
        index: int,
        master: Tensor,
        grad: Tensor,
        compute: Tensor | None,
        state: Mapping[str, Tensor],
        limit: int,
    ) -> Iterator[_Piece]:
        """Cut one parameter into pieces of at most `limit` elements, where it is contiguous."""
        shape, dtype, device = master.shape, master.dtype, master.device
        views: dict[str, Tensor] = {}
        for name in self._planned[index].tensors:
            view = state.get(name)
            if view is None:
                raise ValueError(f"state {name} of parameter {index} is missing")
            if (
                view.shape != shape
                or view.dtype != dtype
                or view.device != device
                or not _same_order(view, master)
            ):
                raise _misfit(f"state {name} of parameter {index}", view, master)
            views[name] = view
        group, _ = self._places[index]
        layout = self._layouts[group]
        scalars = self._scalars[index]
        fresh = scalars is None and bool(layout.tensors or layout.scalars)
        numel = master.numel()
        whole = numel <= limit or not (
            master.is_contiguous()
            and grad.is_contiguous()
            and (compute is None or compute.is_contiguous())
        )
        for start in range(0, 1 if whole else numel, limit):
            if whole:
                part, part_grad, part_compute, part_views = master, grad, compute, views
            else:
                at = slice(start, start + limit)
                part, part_grad = master.view(-1)[at], grad.view(-1)[at]
                part_compute = None if compute is None else compute.view(-1)[at]
                part_views = {name: view.view(-1)[at] for name, view in views.items()}
            entry: dict[str, Tensor] = {}
            if scalars is not None:
                for name, value in scalars.items():
                    to_device, to_dtype = layout.scalars.get(name, (value.device, value.dtype))
                    entry[name] = value.to(to_device, to_dtype, copy=True)
                entry.update(part_views)
            yield _Piece(index, group, fresh, part, part_grad, part_compute, part_views, entry)

    def _run(
        self,
        batch: Sequence[_Piece],
        settings: Mapping[int, Mapping[str, Any]],
        scratch: Tensor | None,
        clip: Clip,
        *,
        keep: bool,
    ) -> None:
        """Update one batch: cast and clip gradients, step, bring home new state, write compute
        copies. `keep`: gradients must not be overwritten."""
        groups: dict[int, dict[str, Any]] = {}
        used = 0
        for piece in batch:
            master, grad = piece.master, piece.grad
            cast = grad.dtype != master.dtype or not _same_order(grad, master)
            if cast or clip.changes or keep:
                end = used + master.numel()
                if scratch is not None and end <= scratch.numel() and master.is_contiguous():
                    grad = scratch[used:end].view(master.shape)
                    used = end
                else:
                    grad = torch.empty_like(master)
                grad.copy_(piece.grad)
            clip.apply(grad)
            master.grad = grad
            if piece.group not in groups:
                groups[piece.group] = {**settings[piece.group], "params": []}
            groups[piece.group]["params"].append(master)
        self._shadow.run(list(groups.values()), [(piece.master, piece.entry) for piece in batch])
        for piece in batch:
            for name, view in piece.views.items():
                made = piece.entry.get(name)
                if made is view or not piece.entry:
                    continue
                if made is None:
                    view.zero_()
                else:
                    view.copy_(made)
                    piece.entry[name] = view
            piece.master.grad = None
            if piece.compute is not None:
                piece.compute.copy_(piece.master)


def _batches(pieces: Iterable[_Piece], limit: int) -> Iterator[list[_Piece]]:
    """Take pieces together up to `limit` elements.

    Parameters without state come apart from others: the fused SGD of torch cannot mix them.
    """
    batch: list[_Piece] = []
    size = 0
    for piece in pieces:
        numel = piece.master.numel()
        if batch and (size + numel > limit or piece.fresh != batch[0].fresh):
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += numel
    if batch:
        yield batch


def _of_gradients(squares: Mapping[int, float], grads: Sequence[object]) -> Squares:
    """What was found, of the parameters that `grads` has something of."""
    return tuple(squares.get(i) if g is not None else None for i, g in enumerate(grads))


def _target(results: Results, index: int, amsgrad: bool) -> adam.Target:
    state = results.state[index]
    return adam.Target(
        master=results.masters[index],
        exp_avg=state["exp_avg"],
        exp_avg_sq=state["exp_avg_sq"],
        max_exp_avg_sq=state["max_exp_avg_sq"] if amsgrad else None,
    )


def _decouples(optimizer: Optimizer, values: Mapping[str, Any]) -> bool:
    """Whether weight decay is AdamW's."""
    return bool(values.get("decoupled_weight_decay", isinstance(optimizer, AdamW)))


def _same_order(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape lie in memory alike; fused kernels read them linearly."""
    return a.stride() == b.stride() or (a.is_contiguous() and b.is_contiguous())


def _misfit(what: str, found: Tensor, master: Tensor) -> ValueError:
    def text(t: Tensor) -> str:
        return f"{tuple(t.shape)} {t.dtype} on {t.device}, strides {t.stride()}"

    return ValueError(f"{what} is {text(found)}; it does not fit the master: {text(master)}")
