"""What the transports with threads have in common: sinks, events, and an end in bounded time."""

from __future__ import annotations

import os

from kvmoverd.adapters.transport.events import Events
from kvmoverd.adapters.transport.hub import Hub
from kvmoverd.adapters.transport.medium import ChannelSettings, CheckKey, Medium
from kvmoverd.adapters.transport.sinks import Sinks
from kvmoverd.adapters.transport.threads import Threads
from kvmoverd.core.errors import ConfigError, TransportRefused
from kvmoverd.ports.transport import Sink, TransportEvent


class ThreadedTransport:
    """Base of a `Transport`. `_stop_fd` becomes readable, and stays so, when the threads must end."""

    def __init__(self, name: str) -> None:
        self._events = Events()
        self._sinks = Sinks(self._events)
        self._threads = Threads(name)
        self._stop_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._quiet: bool | None = None

    def expect(self, sink: Sink) -> None:
        self._sinks.expect(sink)

    def forget(self, sink_id: int) -> None:
        self._sinks.forget(sink_id)

    def poll(self, events_max: int) -> list[TransportEvent]:
        """Works after `close` too: what the threads said last is still there."""
        return self._events.poll(events_max)

    def fileno(self) -> int:
        return self._events.fileno()

    def close(self, timeout_s: float) -> bool:
        """Sends that did not end get their `Sent`; no thread is left when it gives True. The first call decides."""
        if self._quiet is None:
            self._stop_taking()
            os.eventfd_write(self._stop_fd, 1)
            self._quiet = self._threads.join(timeout_s)
            if self._quiet:
                os.close(self._stop_fd)
            self._release()
            self._events.close()
        return self._quiet

    def _open_hub(self, medium: Medium, settings: ChannelSettings, *, check_key: CheckKey, inbound_max: int) -> Hub:
        """The channels over a medium; nothing of the transport is left open where they can't be had.

        Raises `ConfigError`, `TransportRefused`.
        """
        try:
            return Hub(
                medium,
                settings,
                self._sinks,
                self._events,
                self._threads,
                check_key=check_key,
                inbound_max=inbound_max,
            )
        except (ConfigError, TransportRefused):
            os.close(self._stop_fd)
            self._events.close()
            raise

    def _stop_taking(self) -> None:
        """From now on `submit` refuses."""

    def _release(self) -> None:
        """Gives up what is left in the file system."""
