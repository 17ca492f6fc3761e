"""Open sinks: who may write now, and when a forgotten sink is quiet."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvmoverd.adapters.memory.iovec import total_bytes
from kvmoverd.adapters.transport.events import Events
from kvmoverd.adapters.transport.frames import Status
from kvmoverd.core.status import Reason
from kvmoverd.ports.transport import IoVec, Received, Sink, SinkQuiet


class OpenSink:
    """One opening of a sink. A frame keeps hold of it, so that a later sink of the same id is never taken for it."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.forgotten = False
        self.writers = 0


REASONS = {
    Status.APPLIED: Reason.OK,
    Status.REFUSED: Reason.CANCELLED,
    Status.MISMATCH: Reason.INTERNAL,
    Status.FAILED: Reason.INTERNAL,
}
"""How a send ends whose frame had this status."""


class FrameRefused(Exception):
    """A frame that may not be applied: status for the other side, the sink's bytes for a mismatch, and words."""

    def __init__(self, status: Status, message: str, detail: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.detail = detail


class Sinks:
    """All methods may be called from any thread; they hold the lock for less than a microsecond."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._lock = threading.Lock()
        self._open: dict[int, OpenSink] = {}

    def expect(self, sink: Sink) -> None:
        with self._lock:
            assert sink.sink_id not in self._open, f"sink {sink.sink_id} is open already"
            self._open[sink.sink_id] = OpenSink(sink)

    def forget(self, sink_id: int) -> None:
        """From now on `write` moves nothing through it; `SinkQuiet` follows when the last running step has ended."""
        with self._lock:
            found = self._open.pop(sink_id, None)
            assert found is not None, f"sink {sink_id} is not open"
            found.forgotten = True
            if not found.writers:
                self._events.put(SinkQuiet(sink_id))

    def claim(self, sink_id: int, layer: int, first_block: int, payload_bytes: int) -> tuple[OpenSink, IoVec]:
        """Where a frame goes. Raises `FrameRefused`."""
        with self._lock:
            found = self._open.get(sink_id)
        if found is None:
            raise FrameRefused(Status.REFUSED, f"sink {sink_id} is not open here")
        slices = found.sink.resolve(layer, first_block)
        if slices is None:
            raise FrameRefused(Status.REFUSED, f"sink {sink_id} does not allow layer {layer} at block {first_block}")
        size_bytes = total_bytes(slices)
        if size_bytes != payload_bytes:
            text = f"sink {sink_id} has {size_bytes} bytes for layer {layer}, the frame has {payload_bytes}"
            raise FrameRefused(Status.MISMATCH, text, size_bytes)
        return found, slices

    def write(self, opened: OpenSink, step: Callable[[], int]) -> int:
        """Runs one short step that writes through the sink. Raises `FrameRefused` when it was forgotten."""
        with self._lock:
            if opened.forgotten:
                raise FrameRefused(Status.REFUSED, f"sink {opened.sink.sink_id} was closed while the frame came")
            opened.writers += 1
        try:
            return step()
        finally:
            self._leave(opened)

    def _leave(self, opened: OpenSink) -> None:
        with self._lock:
            opened.writers -= 1
            if opened.forgotten and not opened.writers:
                self._events.put(SinkQuiet(opened.sink.sink_id))

    def complete(self, opened: OpenSink, layer: int, first_block: int, moved_bytes: int) -> None:
        """The whole frame is in its slices: tells it. Raises `FrameRefused` when the sink was forgotten meanwhile."""
        with self._lock:
            if opened.forgotten:
                raise FrameRefused(Status.REFUSED, f"sink {opened.sink.sink_id} was closed while the frame came")
            self._events.put(Received(opened.sink.sink_id, layer, first_block, moved_bytes))
