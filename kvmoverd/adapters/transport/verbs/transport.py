"""RDMA verbs as a transport: links to other nodes, loopbacks within this one, all driven by one thread."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from kvmoverd.adapters.transport.threaded import ThreadedTransport
from kvmoverd.adapters.transport.threads import NO_THREAD
from kvmoverd.adapters.transport.verbs.acceptors import Acceptors
from kvmoverd.adapters.transport.verbs.book import Book
from kvmoverd.adapters.transport.verbs.claims import Claims
from kvmoverd.adapters.transport.verbs.engine import Engine
from kvmoverd.adapters.transport.verbs.fabric import Fabric, FabricError
from kvmoverd.adapters.transport.verbs.frame import Frame
from kvmoverd.adapters.transport.verbs.link import LinkSettings
from kvmoverd.adapters.transport.verbs.loops import Loops
from kvmoverd.adapters.transport.verbs.routes import ENDPOINT_PREFIX, Routes
from kvmoverd.core.errors import TransportRefused
from kvmoverd.core.qos import KvClass, Marks
from kvmoverd.core.status import Reason
from kvmoverd.ports.connection import Answered, Dial, Offer
from kvmoverd.ports.transport import Send, Sender, Sent

log = logging.getLogger(__name__)

CLOSED = "the transport is closed"

_Place = Sender | None


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """`queue_pairs`: there are now; the rest since start. `fences`: ends destroyed under frames that were not let go."""

    queue_pairs: int = 0
    queue_pairs_max: int = 0
    links_in: int = 0
    reconnects: int = 0
    repeats: int = 0
    fences: int = 0
    loop_breaks: int = 0


class VerbsTransport(ThreadedTransport):
    """Implements `Transport` and `Connects`. `fabrics`: the CNICs, in the order that `book` knows; `close` closes both.

    `io_timeout_s` without any progress of a frame breaks its link; `fence_s` is how long a forgotten sink waits for a sender
    that does not let go of it; `queue_max` bounds the sends per node, and those within this process; `qps_max` the queue
    pairs. Raises `TransportRefused` where the system starts no thread.
    """

    def __init__(
        self,
        fabrics: Sequence[Fabric],
        book: Book,
        *,
        marks: Mapping[KvClass, Marks],
        io_timeout_s: float = 10.0,
        fence_s: float = 1.0,
        queue_max: int = 4_096,
        qps_max: int = 4_096,
    ) -> None:
        super().__init__("verbs")
        assert fabrics and set(marks) == set(KvClass), f"{len(fabrics)} CNICs, marks for {sorted(marks, key=str)}"
        self._fabrics = list(fabrics)
        self._book = book
        self._marks = dict(marks)
        self._queue_max = queue_max
        self._lock = threading.Lock()
        self._pending: dict[_Place, int] = {}
        self._sent_bytes: dict[str, int] = {}
        self._sequences = itertools.count(1)
        self._facts = LinkFacts(queue_pairs_max=qps_max)
        settings = LinkSettings(io_timeout_s, fence_s)
        self._engine = Engine(self._fabrics, ends_max=qps_max)
        claims = Claims(self._sinks, book)
        self._acceptors = Acceptors(self._engine, claims, settings, self._marks)
        self._routes = Routes(self._engine, book, self._events, settings, self._marks, self._end)
        self._loops = Loops(self._engine, claims, book, settings, self._marks, self._end)
        self._ends_quiet = False
        if not self._threads.start("engine", self._run):
            self._engine.stop()
            self._ends_quiet = self._engine.run(lambda now_s: None)
            self.close(0.0)
            raise TransportRefused(NO_THREAD)

    @property
    def endpoint(self) -> str:
        """What other nodes must know beside the node-to-node API: how many CNICs there are."""
        return f"{ENDPOINT_PREFIX}{len(self._fabrics)}"

    @property
    def lane_text(self) -> str:
        """The marks of each class, e.g. "layers SL 2, DSCP 8; ..."."""
        said = {
            kv_class.value: f"SL {marks.service_level}, DSCP {marks.dscp}" for kv_class, marks in self._marks.items()
        }
        if len(set(said.values())) == 1:
            return next(iter(said.values()))
        return "; ".join(f"{name} {text}" for name, text in said.items())

    @property
    def facts(self) -> LinkFacts:
        """As of the last `count`."""
        self.count()
        return self._facts

    def count(self) -> None:
        """Has the facts counted anew, soon; never waits."""
        self._engine.post(self._count)

    def sent_bytes(self) -> dict[str, int]:
        """Bytes applied at each node since start."""
        with self._lock:
            return dict(self._sent_bytes)

    def forget(self, sink_id: int) -> None:
        super().forget(sink_id)
        self._engine.post(self._forgot)

    def submit(self, sends: Sequence[Send]) -> None:
        taken = [send for send in sends if self._enter(send)]
        if taken and not self._engine.post(partial(self._start, taken)):
            for send in taken:
                self._end(send, Reason.SHUTTING_DOWN, 0, CLOSED)

    # Connects

    def dial_with(self, dial: Dial) -> None:
        self._routes.dial_by = dial

    def accept(self, sender: Sender, offer: Offer, answered: Answered) -> None:
        if not self._engine.post(partial(self._acceptors.accept, sender, offer, answered)):
            answered(TransportRefused(CLOSED))

    def peer_gone(self, sender: Sender, message: str) -> None:
        self._engine.post(partial(self._peer_gone, sender, message))

    # The engine's thread

    def _run(self) -> None:
        self._ends_quiet = self._engine.run(self._close_all)

    def _start(self, sends: Sequence[Send], now_s: float) -> None:
        for send in sends:
            try:
                frame = Frame(send, next(self._sequences))
                if send.route is None:
                    self._loops.submit(frame)
                else:
                    self._routes.submit(frame, send.route, now_s)
            except Exception as error:  # noqa: BLE001 - one send that can't be begun must not take the others along
                self._end(send, Reason.INTERNAL, 0, f"send failed: {error!r}")

    def _forgot(self, now_s: float) -> None:
        self._acceptors.forgot(now_s)
        self._loops.forgot(now_s)

    def _peer_gone(self, sender: Sender, message: str, now_s: float) -> None:
        self._acceptors.peer_gone(sender, now_s)
        self._routes.peer_gone(sender, message, now_s)

    def _close_all(self, now_s: float) -> None:
        with ExitStack() as closing:
            # The last comes first; each does whatever became of the others.
            for close in (self._loops.close, self._routes.close, self._acceptors.close):
                closing.callback(close, now_s)

    def _count(self, now_s: float) -> None:
        totals = self._routes.totals
        self._facts = LinkFacts(
            self._engine.ends,
            self._engine.ends_max,
            self._acceptors.links,
            totals.reconnects,
            totals.repeats,
            self._acceptors.fences,
            self._loops.breaks,
        )

    # Any thread

    def _enter(self, send: Send) -> bool:
        """Counts a send, or refuses it with its `Sent`."""
        place = _place_of(send)
        with self._lock:
            pending = self._pending.get(place, 0)
            if pending < self._queue_max:
                self._pending[place] = pending + 1
                return True
        where = send.route.node if send.route is not None else "this process"
        text = f"{pending} sends to {where} wait or run, transport.queue_max is {self._queue_max}"
        self._events.put(Sent(send.op_id, Reason.POOL_EXHAUSTED, 0, text))
        return False

    def _end(self, send: Send, reason: Reason, moved_bytes: int, message: str) -> None:
        place = _place_of(send)
        with self._lock:
            self._pending[place] -= 1
            if not self._pending[place]:
                del self._pending[place]
            if moved_bytes and send.route is not None:
                self._sent_bytes[send.route.node] = self._sent_bytes.get(send.route.node, 0) + moved_bytes
        self._events.put(Sent(send.op_id, reason, moved_bytes, message))

    def _stop_taking(self) -> None:
        self._engine.stop()

    def _release(self) -> None:
        """Registrations go after all queue pairs, the CNICs after both; if one is still there, so must they be."""
        if not (self._quiet and self._ends_quiet and self._book.close()):
            return
        for fabric in self._fabrics:
            try:
                fabric.close()
            except FabricError as error:
                log.warning("RDMA: a CNIC stays open until this process ends: %s", error)


def _place_of(send: Send) -> _Place:
    return (send.route.node, send.route.boot_id) if send.route is not None else None
