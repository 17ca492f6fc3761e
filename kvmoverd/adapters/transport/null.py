"""Null: nothing is copied, but every offset is read and every sink asked. Measures what a daemon costs beside its copies."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvmoverd.adapters.memory.iovec import CopyStep, Cursor
from kvmoverd.adapters.transport.events import Events
from kvmoverd.adapters.transport.local import apply_locally
from kvmoverd.adapters.transport.sinks import Sinks
from kvmoverd.core.status import Reason
from kvmoverd.ports.transport import IoVec, Send, Sent, Sink, TransportEvent

SENDS_PER_POLL = 16
"""Some 0.3 ms of layers of 500 slices: the loop is not kept longer."""


class NullTransport:
    """Implements `Transport` within this process without threads; routes are ignored, bytes stay where they are.

    Sinks let in, refuse and are forgotten as with every other transport. `offsets_sum` depends on every address and length
    given, so that none of them can be left unmade.
    """

    def __init__(self, *, queue_max: int = 4_096) -> None:
        self._events = Events()
        self._sinks = Sinks(self._events)
        self._queue: deque[Send] = deque()
        self._queue_max = queue_max
        self._closed = False
        self.offsets_sum = 0

    @property
    def copy_text(self) -> str:
        """How this process copies: not at all."""
        return "null: offsets are read, no byte is copied"

    def expect(self, sink: Sink) -> None:
        self._sinks.expect(sink)

    def forget(self, sink_id: int) -> None:
        self._sinks.forget(sink_id)

    def submit(self, sends: Sequence[Send]) -> None:
        for send in sends:
            if self._closed:
                self._events.put(Sent(send.op_id, Reason.SHUTTING_DOWN, 0, "the transport is closed"))
            elif len(self._queue) >= self._queue_max:
                text = f"{len(self._queue)} copies wait, transport.queue_max is {self._queue_max}"
                self._events.put(Sent(send.op_id, Reason.POOL_EXHAUSTED, 0, text))
            else:
                self._queue.append(send)
        self._events.wake()

    def poll(self, events_max: int) -> list[TransportEvent]:
        for _ in range(min(SENDS_PER_POLL, len(self._queue))):
            self._events.put(apply_locally(self._sinks, self._queue.popleft(), self._choose))
        found = self._events.poll(events_max)
        if self._queue:
            self._events.wake()
        return found

    def fileno(self) -> int:
        return self._events.fileno()

    def close(self, timeout_s: float) -> bool:
        self._closed = True
        while self._queue:
            self._events.put(Sent(self._queue.popleft().op_id, Reason.SHUTTING_DOWN, 0, "the transport is closed"))
        self._events.close()
        return True

    def _choose(self, destination: IoVec, source: IoVec) -> CopyStep:
        return self._read_offsets

    def _read_offsets(self, destination: Cursor, source: Cursor, stop: bytearray) -> int:
        """The whole layer in one step."""
        moved_bytes = source.left_bytes
        self.offsets_sum += int(destination.slices.sum()) + int(source.slices.sum())
        destination.advance(moved_bytes)
        source.advance(moved_bytes)
        return moved_bytes
