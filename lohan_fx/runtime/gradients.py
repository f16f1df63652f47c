"""Gradients as users see them: what stands in ``.grad`` of the parameters that are trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from lohan_fx.errors import StepError
from lohan_fx.runtime.flats import alone, views_of
from lohan_fx.runtime.guards import ConsumedGradient, LentGradient
from lohan_fx.runtime.ssd import StripedFile
from lohan_fx.runtime.unit_gradients import UnitGradients
from lohan_fx.runtime.unit_states import UnitStates


class Gradients:
    """What stands in ``.grad`` of the parameters of one compiled model.

    Args:
        units: those that the optimizer updates.
        file: the SSD file that holds the SSD units.
    """

    def __init__(self, units: Sequence[UnitStates], file: StripedFile | None) -> None:
        self._units = units
        self._file = file
        self._unscaled: set[int] = set()  # parameters whose ``.grad`` this step has divided
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []

    # -- while torch's own step runs, which must not find any -----------------------------------

    def hide(self) -> None:
        """Let no parameter have a ``.grad`` until `show_hidden`."""
        found = [p for states in self._units for p in states.parameters]
        self._hidden = [(p, p.grad) for p in found if p.grad is not None]
        for p, _ in self._hidden:
            p.grad = None

    def show_hidden(self) -> None:
        """Give back what `hide` took."""
        for p, gradient in self._hidden:
            p.grad = gradient
        self._hidden = []

    def forget_hidden(self) -> None:
        """Hide for good what a step hid that then failed: it was taken, and what parameters have
        now is of the next one. Called before there is a gradient of the next backward."""
        for p, gradient in self._hidden:
            if p.grad is gradient:  # the step was interrupted while it hid or showed them
                p.grad = None
        self._hidden = []

    # -- gradients that stay --------------------------------------------------------------------

    def take(self) -> None:
        """See which parameters have a ``.grad``; one that is not ours is copied into its place.

        Afterwards `UnitStates.sums` say so, and transfers see what user code did to gradients.
        """
        on_ssd = False
        for states in self._units:
            for i, p in enumerate(states.parameters):
                given = p.grad
                states.sums[i] = given is not None
                if given is not None and not _owns(states, i, given):
                    own = _own(states)[i]
                    own.copy_(given.detach())
                    p.grad = own
            on_ssd |= states.on_ssd and any(states.sums)
        if on_ssd:
            assert self._file is not None
            self._file.flush()

    def show(self, emitted: Iterable[UnitStates]) -> None:
        """Make the ``.grad`` of parameters of these units, where there is a sum, views of it."""
        for states in emitted:
            views = _own(states)
            for p, view, has in zip(states.parameters, views, states.sums, strict=True):
                if has and p.grad is not view:
                    p.grad = view

    def unscale(self, optimizer: Optimizer) -> bool:
        """What GradScaler leaves to fused optimizers: divide by the scale; False: skip the step."""
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and found_inf.item():
            return False
        scale = getattr(optimizer, "grad_scale", None)
        if scale is not None:
            for states in self._units:  # others' are the optimizer's own to unscale
                for p in states.parameters:
                    if p.grad is not None and id(p) not in self._unscaled:
                        self._unscaled.add(id(p))  # first: a step that is interrupted runs again
                        p.grad.div_(scale.to(p.grad.device))
        return True

    def found(self) -> list[UnitGradients]:
        """What the parameters have as ``.grad``, unit by unit: those that have none are left."""
        found = []
        for states in self._units:
            given = [p.grad for p in states.parameters]
            sums = [g is not None and _owns(states, i, g) for i, g in enumerate(given)]
            others = [None if own else g for g, own in zip(given, sums, strict=True)]
            if any(g is not None for g in given):
                found.append(UnitGradients(states, others, sums))
        if any(given.states.on_ssd for given in found):
            assert self._file is not None
            self._file.flush()  # what user code did to gradients
        return found

    def expect_scaled(self) -> None:
        """Those that `unscale` finds next are scaled, all of them."""
        self._unscaled.clear()

    def lend(self, wait: Callable[[], Callable[[], None] | None]) -> None:
        """Let whoever uses a ``.grad`` call `wait` (a weak method) first."""

        def call() -> None:
            method = wait()
            if method is not None:
                method()

        for states in self._units:
            if not states.grads:
                continue
            if not states.lent:
                states.lent = [LentGradient.of(g) for g in states.grads]
            for i, p in enumerate(states.parameters):
                if p.grad is not None and _owns(states, i, p.grad):
                    states.lent[i].wait = call
                    p.grad = states.lent[i]

    def forget_dtypes(self) -> None:
        """Let parameters have gradients of their own dtype again, if they have none now."""
        for states in self._units:
            for p in states.parameters:
                if p.dtype != states.layout.dtype and p.grad is None:
                    p.grad_dtype = p.dtype

    # -- gradients that are consumed ------------------------------------------------------------

    def drop_zeroed(self) -> bool:
        """Forget sums of parameters whose ``.grad`` was reset; says whether any is left.

        Raises:
            StepError: a parameter has a ``.grad`` of the user's own.
        """
        for states in self._units:
            for i, p in enumerate(states.parameters):
                given = p.grad
                if given is None:
                    states.sums[i] = False
                elif not isinstance(given, ConsumedGradient):
                    raise StepError(
                        f"parameter {states.layout.slices[i].name} has a .grad that this backward "
                        "would have to add to, but gradients are consumed while it runs: call "
                        "optimizer.zero_grad() before, or compile with gradients='kept'"
                    )
                elif given.zeroed:
                    states.sums[i] = False
        return any(any(states.sums) for states in self._units)

    def reset(self, has: Mapping[int, Sequence[bool]]) -> list[tuple[str, bool]]:
        """Of the parameters that have a gradient of this step (by unit), those without a guard that
        says so: names, and whether there is no ``.grad`` at all."""
        return [
            (states.layout.slices[i].name, p.grad is None)
            for states in self._units
            for i, p in enumerate(states.parameters)
            if has[states.index][i]
            and not (isinstance(p.grad, ConsumedGradient) and not p.grad.zeroed)
        ]

    def holds_sums(self) -> bool:
        """Whether gradients were added up that no step and no zero_grad() has taken since."""
        return any(
            has and isinstance(p.grad, ConsumedGradient) and not p.grad.zeroed
            for states in self._units
            for has, p in zip(states.sums, states.parameters, strict=True)
        )

    def mark_consumed(self, emitted: Iterable[tuple[UnitStates, Sequence[bool]]]) -> None:
        """Put guards where plain PyTorch would have gradients."""
        for states, has in emitted:
            if not states.guards:
                states.guards = [ConsumedGradient.of(p) for p in states.parameters]
            for i, p in enumerate(states.parameters):
                if has[i]:
                    if not states.guards[i].fits(p):
                        states.guards[i] = ConsumedGradient.of(p)
                    states.guards[i].zeroed = False
                    p.grad = states.guards[i]

    def forget_sums(self) -> None:
        """Leave no sum, and no guard."""
        for states in self._units:
            states.sums = [False] * len(states.sums)
            for p in states.parameters:
                if isinstance(p.grad, ConsumedGradient):
                    p.grad = None

    # -- units that move ------------------------------------------------------------------------

    def detach(self, states: UnitStates) -> list[tuple[Tensor | None, bool]]:
        """Take the ``.grad`` of a unit's parameters away, which may have to be on another device.

        Returns:
            each, and whether it is the unit's own: for `attach`, when the unit has moved.
        """
        given = [p.grad for p in states.parameters]
        found = [(g, g is not None and _owns(states, i, g)) for i, g in enumerate(given)]
        states.grads, states.lent = [], []
        for p in states.parameters:
            p.grad = None
        return found

    def attach(self, states: UnitStates, found: Sequence[tuple[Tensor | None, bool]]) -> None:
        """Give a unit that has moved what `detach` took away."""
        for i, (p, (gradient, owned)) in enumerate(zip(states.parameters, found, strict=True)):
            if owned:
                p.grad = _own(states)[i]
            elif isinstance(gradient, ConsumedGradient):
                states.guards[i] = ConsumedGradient.of(p)
                states.guards[i].zeroed = gradient.zeroed
                p.grad = states.guards[i]
            elif gradient is not None:
                p.grad = gradient.to(p.device)


def _owns(states: UnitStates, i: int, gradient: Tensor) -> bool:
    """Whether this ``.grad`` of parameter `i` is the unit's own."""
    owned = (states.grads, states.lent)
    return any(bool(tensors) and gradient is tensors[i] for tensors in owned)


def _own(states: UnitStates) -> list[Tensor]:
    """A unit's own gradients, parameter by parameter: views of where they add up."""
    if not states.grads:
        assert states.flats is not None
        assert states.flats.gradient is not None
        views = views_of(states.flats.gradient, states.layout.slices)
        states.grads = [alone(view) for view in views]
        for p in states.parameters:
            if p.dtype != states.layout.dtype:
                p.grad_dtype = states.layout.dtype
    return states.grads
