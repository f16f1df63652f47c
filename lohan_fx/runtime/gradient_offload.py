"""Gradients leave the device: copied into host buffers, or written there by compute itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from lohan_fx.runtime.arena import BufferRing
from lohan_fx.runtime.clipping import Norms
from lohan_fx.runtime.flats import on_device, views_of
from lohan_fx.runtime.lane import Ticket
from lohan_fx.runtime.lanes import Lanes
from lohan_fx.runtime.recording import Label
from lohan_fx.runtime.unit_states import UnitStates


class GradientOffload:
    """Takes gradients to host memory.

    Args:
        lanes: gradients leave through its d2h lane.
        rings: unit tier → ring of host buffers that receive gradients in turn.
        buffers: unit index → buffer of its own.
    """

    def __init__(
        self, lanes: Lanes, rings: Mapping[str, BufferRing], buffers: Mapping[int, Tensor]
    ) -> None:
        self._lanes = lanes
        self._rings = rings
        self._buffers = buffers
        self._arrivals: dict[int, Ticket] = {}
        self._written: dict[int, dict[int, Tensor]] = {}

    def start(
        self, states: UnitStates, gradients: Sequence[Tensor | None], norms: Norms | None
    ) -> tuple[list[Tensor | None], Ticket, Tensor | None]:
        """Copy a unit's gradients to the host; waits for a buffer.

        Args:
            norms: takes those of the gradients, if they are whole.

        Returns:
            where they will be, when they are there, and the buffer to `give_back`, if it was lent.
        """
        index = states.index
        label = self._lanes.label("emit_gradients", states.unit.name)
        own = index in self._buffers
        buffer = self._buffers[index] if own else self._lent(states.tier, label)
        flat = buffer[: states.unit.compute_bytes].view(states.layout.copy_dtype)
        views: list[Tensor | None] = list(views_of(flat, states.layout.slices))
        pairs = []
        for i, gradient in enumerate(gradients):
            if gradient is None:
                views[i] = None
            else:
                view = views[i]
                assert view is not None
                pairs.append((gradient, view))
        if norms is not None:
            norms.take_all(states, gradients)
        arrival = self._arrivals[index] = self._lanes.to_host(pairs, label)
        return views, arrival, None if own else buffer

    def _lent(self, tier: str, label: Label) -> Tensor:
        """A buffer. Where all are in use, this thread waits, and compute for it."""
        ring = self._rings[tier]
        buffer = ring.try_acquire()
        if buffer is None:
            began = self._lanes.pause()
            buffer = ring.acquire()
            self._lanes.resume(began, label)
        return buffer

    def unparked(
        self, states: UnitStates, gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Gradients that `start` took to the host, as the device reads them: where they are, over
        the link; or copied back, where the system refused to pin them, or the update may read them
        more than once, as it does not cast them first."""
        flat = self._flat(states)
        device = self._lanes.device
        once = states.mixed and flat.is_pinned()
        there = on_device(flat, device) if once or device.type == "cpu" else flat.to(device)
        views = views_of(there, states.layout.slices)
        found = [None if g is None else v for g, v in zip(gradients, views, strict=True)]
        self._lanes.count(h2d_bytes=sum(v.nbytes for v in found if v is not None))
        return found

    def _flat(self, states: UnitStates) -> Tensor:
        buffer = self._buffers[states.index]
        return buffer[: states.unit.compute_bytes].view(states.layout.copy_dtype)

    def give_back(self, states: UnitStates, buffer: Tensor) -> None:
        """Let others have a unit's buffer."""
        self._rings[states.tier].release(buffer)

    def release(self, index: int) -> Ticket:
        """Compute waits until the unit's gradients have left the device. Returns for what."""
        arrival = self._arrivals.pop(index)
        arrival.wait(self._lanes.stream)
        return arrival

    def write(
        self,
        states: UnitStates,
        gradients: Sequence[Tensor],
        indices: Sequence[int],
        norms: Norms | None,
    ) -> None:
        """Compute itself writes gradients into the unit's host buffer (direct host access).

        Args:
            indices: of the parameters.
            norms: takes those of the gradients, if they are whole.
        """
        flat = self._flat(states)
        written = self._written.setdefault(states.index, {})
        for i, view in enumerate(
            views_of(on_device(flat, self._lanes.device), states.layout.slices)
        ):
            if i in indices:
                gradient = gradients[indices.index(i)]
                view.copy_(gradient)
                if norms is not None:
                    norms.take(states, i, gradient)
                self._lanes.count(d2h_bytes=gradient.numel() * gradient.element_size())
                written[i] = views_of(flat, states.layout.slices)[i]

    def finish_writes(self, states: UnitStates) -> tuple[list[Tensor | None], Ticket]:
        """All gradients of a unit have been written: where they are, once compute has got here."""
        written = self._written.pop(states.index, {})
        views = [written.get(i) for i in range(len(states.layout.slices))]
        arrival = Ticket()
        arrival.finish(self._lanes.mark())
        return views, arrival

    def clear(self) -> None:
        """Forget what a step left behind."""
        self._written.clear()
        self._arrivals.clear()
