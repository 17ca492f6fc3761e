"""Push: computed layers leave the prefill engine's pages for the DE buffer."""

from __future__ import annotations

import enum

from kvmoverd.core.errors import BadRequest
from kvmoverd.core.machines.actions import Action, AnnounceQuiet, Finish
from kvmoverd.core.machines.window import LayerWindow
from kvmoverd.core.status import End, Reason


class PushState(enum.Enum):
    WAITING = "waiting"
    PUSHING = "pushing"
    DRAINING = "draining"
    UNQUIET = "unquiet"
    ENDED = "ended"


class PushMachine:
    """Sends layer l once the engine said "computed" and the decode node knows which blocks are new."""

    def __init__(self, *, layers: int, window_layers: int) -> None:
        self.state = PushState.WAITING
        self.window = LayerWindow(layers=layers, window_layers=window_layers)
        self._end: End | None = None

    def on_prefix_set(self) -> list[Action]:
        """The decode node waits for the layers."""
        if self.state is not PushState.WAITING:
            return []
        self.state = PushState.PUSHING
        return list(self.window.due())

    def on_computed(self, layers: int) -> list[Action]:
        """Layers [0, layers) are in the pages. Raises `BadRequest` for layers that do not exist."""
        if layers > self.window.layers:
            raise BadRequest(f"layers [0, {layers}) said to be computed, the model has {self.window.layers}")
        self.window.allow(layers)
        return list(self.window.due()) if self.state is PushState.PUSHING else []

    def on_sent(self, layer: int, reason: Reason, message: str = "") -> list[Action]:
        """A layer was applied in the DE buffer, or not."""
        if layer not in self.window.inflight:
            return []
        if self.state in (PushState.DRAINING, PushState.UNQUIET):
            self.window.lost(layer)
            return self._drained()
        if reason is not Reason.OK:
            self.window.lost(layer)
            return self.on_stop(reason, message)
        told: list[Action] = list(self.window.sent(layer))
        if self.window.complete:
            return told + self._finished(End(Reason.OK))
        return told + list(self.window.due())

    def on_stop(self, reason: Reason, message: str = "", good_blocks: int = 0) -> list[Action]:
        """Cancel, deadline, death, shutdown, or the end of the stream. `good_blocks`: what a cut left good."""
        if self.state not in (PushState.WAITING, PushState.PUSHING):
            return []
        self._end = End(reason, message, prefix_blocks=good_blocks)
        self.state = PushState.DRAINING
        return self._drained()

    def on_quiesce_timeout(self) -> list[Action]:
        """Sends under way did not end in time: they still read the pages."""
        if self.state is not PushState.DRAINING:
            return []
        assert self._end is not None, "draining without an end"
        self.state = PushState.UNQUIET
        end = self._end
        return [Finish(End(end.reason, end.message, pages_quiet=False, prefix_blocks=end.prefix_blocks))]

    def _drained(self) -> list[Action]:
        if self.window.inflight:
            return []
        if self.state is PushState.UNQUIET:
            self.state = PushState.ENDED
            return [AnnounceQuiet()]
        assert self._end is not None, "draining without an end"
        return self._finished(self._end)

    def _finished(self, end: End) -> list[Action]:
        self.state = PushState.ENDED
        return [Finish(end)]
