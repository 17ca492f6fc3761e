"""Loopback: copies within the process at `submit`; completions are found by `poll`. For tests and simulations."""

from __future__ import annotations

from collections.abc import Sequence

from kvmoverd.adapters.memory import iovec
from kvmoverd.adapters.transport.events import Events
from kvmoverd.adapters.transport.local import apply_locally
from kvmoverd.adapters.transport.sinks import Sinks
from kvmoverd.core.status import Reason
from kvmoverd.ports.transport import Send, Sent, Sink, TransportEvent


class LoopbackTransport:
    """Implements `Transport` without threads; routes are ignored: every sink is one of this process."""

    def __init__(self) -> None:
        self._events = Events()
        self._sinks = Sinks(self._events)
        self._closed = False

    def expect(self, sink: Sink) -> None:
        self._sinks.expect(sink)

    def forget(self, sink_id: int) -> None:
        self._sinks.forget(sink_id)

    def submit(self, sends: Sequence[Send]) -> None:
        for send in sends:
            if self._closed:
                self._events.put(Sent(send.op_id, Reason.SHUTTING_DOWN, 0, "the transport is closed"))
            else:
                self._events.put(
                    apply_locally(self._sinks, send, lambda destination, source: iovec.copy_pinning_source)
                )

    def poll(self, events_max: int) -> list[TransportEvent]:
        return self._events.poll(events_max)

    def fileno(self) -> int:
        return self._events.fileno()

    def close(self, timeout_s: float) -> bool:
        self._closed = True
        self._events.close()
        return True
