"""Layer dues: when the engine of one stream will need each layer. Of two streams, who needs its next one first goes first."""

from __future__ import annotations

LAYER_NS = 1_000_000
"""What a layer takes to be computed, as long as nothing was heard of the engine."""
LAYER_NS_MIN, LAYER_NS_MAX = 50_000, 20_000_000
"""Of what was measured: a single late word does not make a stream look as if it had all the time in the world."""
SHARE = 0.25
"""Of the newest measurement in what a layer is taken to take."""


class LayerDues:
    """Layer l is due when the engine has computed those before it: from the last that it told, so many layers' time later.

    Before it told anything, the first layer that is sent is due at once, and the others follow at the engine's pace. Times in
    ns of the node's clock.

    >>> dues = LayerDues()
    >>> dues.due_ns(0, now_ns=5_000_000), dues.due_ns(3, now_ns=6_000_000)
    (5000000, 8000000)
    >>> dues.computed(3, now_ns=9_000_000)
    >>> dues.due_ns(3, now_ns=9_500_000)
    9000000
    """

    def __init__(self, layer_ns: int = LAYER_NS) -> None:
        self._layer_ns = layer_ns
        self._anchor: tuple[int, int] | None = None
        self._computed = 0
        self._told_ns: int | None = None

    def computed(self, layers: int, now_ns: int) -> None:
        """The engine has computed so many leading layers; a smaller number than before changes nothing."""
        if layers <= self._computed:
            return
        if self._told_ns is not None:
            took_ns = (now_ns - self._told_ns) // (layers - self._computed)
            took_ns = min(LAYER_NS_MAX, max(LAYER_NS_MIN, took_ns))
            self._layer_ns += int(SHARE * (took_ns - self._layer_ns))
        self._computed, self._told_ns = layers, now_ns
        self._anchor = layers, now_ns

    def due_ns(self, layer: int, now_ns: int) -> int:
        """May be in the past: the engine waits for it."""
        if self._anchor is None:
            self._anchor = layer, now_ns
        first, since_ns = self._anchor
        return since_ns + (layer - first) * self._layer_ns
