"""Mover: one face for the transports of a node. Sends and sinks get callbacks; a local sink needs no network.

Sends go out in the order of need. Few are handed to a transport at a time, so that one which is due soon never waits behind
all that others have asked for before; each waits at most as long as its need allows, so none starves.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvmoverd.core.qos import KvClass
from kvmoverd.core.status import Reason
from kvmoverd.node.hand_out import HandOut
from kvmoverd.node.lane_watch import LaneWatch
from kvmoverd.ports.clock import Clock
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

UNDER_WAY_MAX = 16
"""Sends that a transport has at once, here or to one node: enough to keep it busy while the loop does other things."""
STORES_UNDER_WAY_MAX = 3
"""Of these, large copies for the store: who waits for a layer waits for them. It keeps two threads busy."""
EVENTS_MAX = 32
"""Taken of each transport in one step of the loop: a layer of a large request costs some 20 us."""

OnSent = Callable[[int, Reason, int, str], None]
"""layer, reason, bytes, message."""
OnLayer = Callable[[int, int], None]
"""layer, bytes."""


class Need(enum.Enum):
    """How soon a send is needed: ns that it may stand back for those that are needed sooner."""

    LAYERS = 0
    """An engine waits for these layers to compute on."""
    PAGES = 2_000_000
    """An engine waits for all of them: deliveries, Full Blocks."""
    ASSEMBLY = 10_000_000
    """Computed layers on their way to the decode node."""
    STORE = 100_000_000
    """Copies out of pages, to be written."""


KV_CLASSES = {
    Need.LAYERS: KvClass.LAYERS,
    Need.PAGES: KvClass.LAYERS,
    Need.ASSEMBLY: KvClass.ASSEMBLY,
    Need.STORE: KvClass.WRITE_BACK,
}
"""The lane of each."""

Place = tuple[str, str] | None
"""Node and boot id that sends go to; None: this process."""


Waiting = list[tuple[int, int, Send]]
"""A heap: due time in ns, number, send."""


@dataclass(slots=True)
class _Line:
    """Sends to one place: how many the transport has, `stores` of them for the store, and those that wait."""

    under_way: int = 0
    stores: int = 0
    waiting: Waiting = field(default_factory=list)
    waiting_stores: Waiting = field(default_factory=list)

    def next(self) -> Waiting | None:
        """Where the send is that is due first, of those that may go now."""
        if self.under_way >= UNDER_WAY_MAX:
            return None
        stores = self.waiting_stores if self.stores < STORES_UNDER_WAY_MAX else []
        return min((queue for queue in (self.waiting, stores) if queue), default=None, key=lambda queue: queue[0])


@dataclass(slots=True)
class _OpenSink:
    transport: Transport
    on_layer: OnLayer
    on_quiet: Callable[[], None] | None = None


class Mover:
    """`local` moves within this process (pool and engines' regions), `remote` to other daemons; they may be the same.

    What waits is bounded by the live requests and their windows. `lanes` hears of what goes to other nodes, while a
    transport has it.
    """

    def __init__(
        self,
        local: Transport,
        remote: Transport,
        on_route_lost: Callable[[RouteLost], None],
        clock: Clock,
        lanes: LaneWatch,
    ) -> None:
        self._local = local
        self._remote = remote
        self._transports: Sequence[Transport] = [local] if local is remote else [local, remote]
        self._on_route_lost = on_route_lost
        self._ids = itertools.count(1)
        self._clock = clock
        self.lanes = lanes
        self._under_way_bytes: dict[int, int] = {}
        self._sends: dict[int, tuple[int, Place, Need, OnSent]] = {}
        self._lines: dict[Place, _Line] = {}
        self._sinks: dict[int, _OpenSink] = {}

    def filenos(self) -> list[int]:
        return [transport.fileno() for transport in self._transports]

    def expect(
        self,
        resolve: Callable[[int, int], IoVec | None],
        on_layer: OnLayer,
        sender: Sender | None = None,
        *,
        sum_ends: npt.NDArray[np.uint64] | None = None,
        on_sums: Callable[[int, npt.NDArray[np.uint32]], None] | None = None,
    ) -> int:
        """Opens a sink for one sender, None: this process itself; returns its id, never used twice. Sums: as in `Sink`."""
        sink_id = next(self._ids)
        transport = self._local if sender is None else self._remote
        self._sinks[sink_id] = _OpenSink(transport, on_layer)
        transport.expect(Sink(sink_id, resolve, sender, sum_ends, on_sums))
        return sink_id

    def forget(self, sink_id: int, on_quiet: Callable[[], None]) -> None:
        """Fences a sink; `on_quiet` is called when no write can land through it. Once per sink."""
        sink = self._sinks[sink_id]
        assert sink.on_quiet is None, f"sink {sink_id} is forgotten already"
        sink.on_quiet = on_quiet
        sink.transport.forget(sink_id)

    def send(
        self,
        route: Route | None,
        sink_id: int,
        layer: int,
        first_block: int,
        source: IoVec,
        done: OnSent,
        *,
        need: Need,
        since_ns: int | None = None,
    ) -> None:
        """Moves one layer to a sink here (`route` None) or on another node; `done` is called once, from `pump`.

        `since_ns`: when it began to be needed, or, of layers, will be: `LayerDues`. None: now.
        """
        op_id = next(self._ids)
        place = None if route is None else (route.node, route.boot_id)
        self._sends[op_id] = (layer, place, need, done)
        line = self._lines.get(place)
        if line is None:
            line = self._lines[place] = _Line()
        queue = line.waiting_stores if need is Need.STORE else line.waiting
        due_ns = (self._clock.now_ns() if since_ns is None else since_ns) + need.value
        heapq.heappush(
            queue, (due_ns, op_id, Send(op_id, route, sink_id, layer, first_block, source, KV_CLASSES[need]))
        )
        self._submit_next(line, place)

    def _submit_next(self, line: _Line, place: Place) -> None:
        """One send, if one may go."""
        queue = line.next()
        if queue is None:
            return
        send = heapq.heappop(queue)[2]
        line.under_way += 1
        line.stores += queue is line.waiting_stores
        if place is None:
            self._local.submit([send])
            return
        size_bytes = self._under_way_bytes[send.op_id] = int(send.source[:, 1].sum())
        self.lanes.begun(place, send.kv_class, size_bytes, self._clock.now_ns())
        self._remote.submit([send])

    def _ended(self, op_id: int, place: Place, need: Need, reason: Reason, moved_bytes: int) -> None:
        """The lane hears of it; the transport has room for one more."""
        if place is not None:
            moved = moved_bytes if reason is Reason.OK else None
            size_bytes = self._under_way_bytes.pop(op_id)
            self.lanes.ended(place, KV_CLASSES[need], size_bytes, moved, self._clock.now_ns())
        self._next(place, need)

    def _waiting_for_lost(self, place: Place) -> list[Send]:
        """All that waits for a route that broke: it fails at once, instead of being tried one after the other."""
        line = self._lines[place]
        waiting = sorted([*line.waiting, *line.waiting_stores])
        line.waiting, line.waiting_stores = [], []
        return [send for _, _, send in waiting]

    def _next(self, place: Place, ended: Need) -> None:
        line = self._lines[place]
        line.under_way -= 1
        line.stores -= ended is Need.STORE
        self._submit_next(line, place)
        if not line.under_way:
            del self._lines[place]

    def pump(self) -> None:
        """Hands completions to their owners, a bounded number of them: a transport stays readable while it has more."""
        handed = HandOut()
        for transport in self._transports:
            for event in transport.poll(EVENTS_MAX):
                handed.out(self._take, event)
        handed.check()

    def look_at_lanes(self) -> None:
        """To be called every half second or so: who gets nothing hears nothing."""
        self.lanes.look(self._clock.now_ns())

    def sends_under_way(self) -> int:
        return len(self._sends)

    def close(self, timeout_s: float) -> bool:
        closed = [transport.close(timeout_s) for transport in self._transports]
        return all(closed)

    def _take(self, event: TransportEvent) -> None:
        match event:
            case Sent(op_id, reason, moved_bytes, message):
                layer, place, need, done = self._sends.pop(op_id)
                waiting = self._waiting_for_lost(place) if reason is Reason.PEER_LOST else []
                self._ended(op_id, place, need, reason, moved_bytes)
                done(layer, reason, moved_bytes, message)
                for send in waiting:
                    layer, _, _, done = self._sends.pop(send.op_id)
                    done(layer, reason, 0, message)
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
