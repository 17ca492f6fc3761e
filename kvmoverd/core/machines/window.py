"""Bookkeeping shared by the machines that move layers: what may go, what is under way, what has arrived."""

from __future__ import annotations

from kvmoverd.core.machines.actions import AnnounceLayers, SendLayer


class LayerWindow:
    """Sends layers `first_layer`, ... in order: at most `window_layers` under way, never beyond the layers allowed.

    Layers below `first_layer` have arrived already, by another way.

    >>> window = LayerWindow(layers=3, window_layers=2)
    >>> window.allow(3)
    >>> [send.layer for send in window.due()]
    [0, 1]
    """

    def __init__(self, *, layers: int, window_layers: int, first_layer: int = 0) -> None:
        self.layers = layers
        self.window_layers = window_layers
        self.allowed = first_layer
        self.next_layer = first_layer
        self.inflight: set[int] = set()
        self.arrived = Arrivals(layers, first_layer)

    def allow(self, layers: int) -> None:
        """Layers [0, layers) may be sent; a smaller number than before changes nothing."""
        self.allowed = max(self.allowed, min(layers, self.layers))

    def end_at(self, layers: int) -> None:
        """There are only so many layers from now on; none beyond was allowed yet."""
        assert self.allowed <= layers <= self.layers, f"{self.allowed} layers are allowed, {layers} shall be all"
        self.layers = self.arrived.layers = layers

    def due(self) -> list[SendLayer]:
        """Sends to be made now; they are counted as under way."""
        sends = []
        while self.next_layer < self.allowed and len(self.inflight) < self.window_layers:
            self.inflight.add(self.next_layer)
            sends.append(SendLayer(self.next_layer))
            self.next_layer += 1
        return sends

    def sent(self, layer: int) -> list[AnnounceLayers]:
        """A send under way arrived: the layers that are now complete from the start on, coalesced."""
        self.inflight.remove(layer)
        return self.arrived.add(layer)

    def lost(self, layer: int) -> None:
        """A send under way ended, and whether it arrived does not matter any more."""
        self.inflight.remove(layer)

    @property
    def complete(self) -> bool:
        return self.arrived.complete


class Arrivals:
    """Layers from `first_layer` on may arrive out of order and twice; they are announced in order and once."""

    def __init__(self, layers: int, first_layer: int = 0) -> None:
        self.layers = layers
        self.in_order = first_layer
        self._early: set[int] = set()

    def add(self, layer: int) -> list[AnnounceLayers]:
        if layer < self.in_order or layer >= self.layers:
            return []
        self._early.add(layer)
        first = self.in_order
        while self.in_order in self._early:
            self._early.remove(self.in_order)
            self.in_order += 1
        return [AnnounceLayers(first, self.in_order - 1)] if self.in_order > first else []

    @property
    def count(self) -> int:
        """Layers that are there, those below `first_layer` and those that came early, too."""
        return self.in_order + len(self._early)

    @property
    def stop(self) -> int:
        """One more than the last layer that is there, in order or early."""
        return max(self._early, default=self.in_order - 1) + 1

    @property
    def complete(self) -> bool:
        return self.in_order == self.layers
