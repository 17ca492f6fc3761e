"""Mover: one face for the transports of a node. Sends and sinks get callbacks; a local sink needs no network."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvmoverd.core.status import Reason
from kvmoverd.ports.transport import (
    IoVec,
    Received,
    Route,
    RouteLost,
    Send,
    Sender,
    Sent,
    Sink,
    SinkQuiet,
    Transport,
    TransportEvent,
)

EVENTS_MAX = 32
"""Taken of each transport in one step of the loop: a layer of a large request costs some 20 us."""

OnSent = Callable[[int, Reason, int, str], None]
"""layer, reason, bytes, message."""
OnLayer = Callable[[int, int], None]
"""layer, bytes."""


@dataclass(slots=True)
class _OpenSink:
    transport: Transport
    on_layer: OnLayer
    on_quiet: Callable[[], None] | None = None


class Mover:
    """`local` moves within this process (pool and engines' regions), `remote` to other daemons; they may be the same."""

    def __init__(self, local: Transport, remote: Transport, on_route_lost: Callable[[RouteLost], None]) -> None:
        self._local = local
        self._remote = remote
        self._transports: Sequence[Transport] = [local] if local is remote else [local, remote]
        self._on_route_lost = on_route_lost
        self._ids = itertools.count(1)
        self._sends: dict[int, tuple[int, OnSent]] = {}
        self._sinks: dict[int, _OpenSink] = {}

    def filenos(self) -> list[int]:
        return [transport.fileno() for transport in self._transports]

    def expect(
        self, resolve: Callable[[int, int], IoVec | None], on_layer: OnLayer, sender: Sender | None = None
    ) -> int:
        """Opens a sink for one sender, None: this process itself; returns its id, never used twice."""
        sink_id = next(self._ids)
        transport = self._local if sender is None else self._remote
        self._sinks[sink_id] = _OpenSink(transport, on_layer)
        transport.expect(Sink(sink_id, resolve, sender))
        return sink_id

    def forget(self, sink_id: int, on_quiet: Callable[[], None]) -> None:
        """Fences a sink; `on_quiet` is called when no write can land through it. Once per sink."""
        sink = self._sinks[sink_id]
        assert sink.on_quiet is None, f"sink {sink_id} is forgotten already"
        sink.on_quiet = on_quiet
        sink.transport.forget(sink_id)

    def send(
        self, route: Route | None, sink_id: int, layer: int, first_block: int, source: IoVec, done: OnSent
    ) -> None:
        """Moves one layer to a sink here (`route` None) or on another node; `done` is called once, from `pump`."""
        op_id = next(self._ids)
        self._sends[op_id] = (layer, done)
        transport = self._local if route is None else self._remote
        transport.submit([Send(op_id, route, sink_id, layer, first_block, source)])

    def pump(self) -> None:
        """Hands completions to their owners, a bounded number of them: a transport stays readable while it has more."""
        for transport in self._transports:
            for event in transport.poll(EVENTS_MAX):
                self._take(event)

    def sends_under_way(self) -> int:
        return len(self._sends)

    def close(self, timeout_s: float) -> bool:
        closed = [transport.close(timeout_s) for transport in self._transports]
        return all(closed)

    def _take(self, event: TransportEvent) -> None:
        match event:
            case Sent(op_id, reason, moved_bytes, message):
                layer, done = self._sends.pop(op_id)
                done(layer, reason, moved_bytes, message)
            case Received(sink_id, layer, _, moved_bytes):
                sink = self._sinks.get(sink_id)
                if sink is not None and sink.on_quiet is None:
                    sink.on_layer(layer, moved_bytes)
            case SinkQuiet(sink_id):
                self._sink_quiet(sink_id)
            case RouteLost():
                self._on_route_lost(event)

    def _sink_quiet(self, sink_id: int) -> None:
        sink = self._sinks.pop(sink_id)
        assert sink.on_quiet is not None, f"sink {sink_id} is quiet without being forgotten"
        sink.on_quiet()
