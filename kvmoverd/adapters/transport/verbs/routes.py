"""Sends on their way to the link that they go over: which CNIC here, which CNIC there, and which of them is still alive."""

from __future__ import annotations

import itertools
import logging
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvmoverd.adapters.transport.events import Events
from kvmoverd.adapters.transport.frames import FRAME_BYTES_MAX
from kvmoverd.adapters.transport.verbs.book import Book
from kvmoverd.adapters.transport.verbs.engine import Engine
from kvmoverd.adapters.transport.verbs.frame import Frame
from kvmoverd.adapters.transport.verbs.link import LinkKey, LinkSettings
from kvmoverd.adapters.transport.verbs.messages import CNICS_MAX
from kvmoverd.adapters.transport.verbs.outgoing import OutgoingLink
from kvmoverd.adapters.transport.verbs.pairs import PAIRS_TRIED_MAX, Pair, other_pair
from kvmoverd.core.errors import KvmoverError
from kvmoverd.core.qos import KvClass, Marks
from kvmoverd.core.status import Reason
from kvmoverd.ports.connection import Answer, Dial, Offer
from kvmoverd.ports.transport import Route, RouteLost, Send, Sender

log = logging.getLogger(__name__)

ENDPOINT_PREFIX = "verbs:"
SINKS_TOLD_MAX = 4_096
"""Sinks of one node of which the nearest CNIC is remembered."""

ROUTES_MAX = 1_024

Ended = Callable[[Send, Reason, int, str], None]
"""Once for each send: reason, bytes, words."""


class Wordless(Exception):
    """A send that can't be put into words; the message says which number is out of its bounds."""


@dataclass(slots=True)
class Totals:
    """Since start. `reconnects`: links that dialled again; `repeats`: frames that were asked for again."""

    reconnects: int = 0
    repeats: int = 0


class FarRoute:
    """The way to one boot of a node; implements `RouteHooks` for its links."""

    def __init__(self, routes: Routes, route: Route, cnics: int) -> None:
        self.node = route.node
        self.route = route
        self.peer_cnics = cnics_of(route.endpoint)
        self.links: dict[LinkKey, OutgoingLink] = {}
        self._routes = routes
        self._cnics = cnics
        self._doubted: set[LinkKey] = set()
        self._told: OrderedDict[int, int] = OrderedDict()

    def peer_cnic(self, sink_id: int) -> tuple[int, bool]:
        """Which CNIC of the other node, and whether it was told."""
        told = self._told.get(sink_id)
        return (sink_id % self.peer_cnics, False) if told is None else (told, True)

    @property
    def pairs(self) -> int:
        return self._cnics * self.peer_cnics

    def pair_for(self, frame: Frame, wanted: Pair, now_s: float) -> Pair | None:
        """The wanted pair, or another one while that is out; None: all are out, or have failed under this frame.

        A pair that failed is tried again after its pause, with one frame at a time as long as there are others.
        """
        if not self._doubted:
            return wanted
        self._doubted = {key for key in self._doubted if self.links[key].patience.doubted}
        out = self._out(now_s)
        on_trial = {key.pair for key in self._doubted if self.links[key].busy} - out
        if wanted not in out | on_trial and wanted not in frame.tried:
            return wanted
        return other_pair(wanted, self._cnics, self.peer_cnics, out=out, on_trial=on_trial, tried=frame.tried)

    def is_lost(self, now_s: float) -> bool:
        """No pair is left, or nothing works and enough were tried."""
        return len(self._out(now_s)) == self.pairs or not any(link.works for link in self.links.values())

    def dial(self, offer: Offer, answered: Callable[[Answer | KvmoverError], None]) -> None:
        self._routes.dial(self.route, offer, answered)

    def next_generation(self) -> int:
        return self._routes.next_generation()

    def ended(self, frame: Frame, reason: Reason, moved_bytes: int, message: str) -> None:
        self._routes.ended(frame.send, reason, moved_bytes, message)

    def moved(self, frame: Frame, peer_cnic: int, now_s: float) -> None:
        self._told[frame.send.sink_id] = peer_cnic
        self._told.move_to_end(frame.send.sink_id)
        while len(self._told) > SINKS_TOLD_MAX:
            self._told.popitem(last=False)
        self._routes.start(self, frame, now_s)

    def works_elsewhere(self, key: LinkKey) -> bool:
        return any(link.works for known, link in self.links.items() if known.pair != key.pair)

    def failed(self, key: LinkKey, frames: Sequence[Frame], reason: Reason, message: str, now_s: float) -> None:
        self._doubted.add(key)
        self._routes.failed(self, key, frames, reason, message, now_s)

    def _out(self, now_s: float) -> set[Pair]:
        return {key.pair for key in self._doubted if self.links[key].patience.rests(now_s)}


class Routes:
    """Called in the engine's thread."""

    def __init__(
        self,
        engine: Engine,
        book: Book,
        events: Events,
        settings: LinkSettings,
        marks: Mapping[KvClass, Marks],
        ended: Ended,
    ) -> None:
        self.ended = ended
        self.dial_by: Dial | None = None
        self._engine = engine
        self._book = book
        self._events = events
        self._settings = settings
        self._marks = marks
        self._routes: dict[Sender, FarRoute] = {}
        self._generations = itertools.count(1)
        self._gone = Totals()

    def submit(self, frame: Frame, route: Route, now_s: float) -> None:
        """Every frame ends, once."""
        place = (route.node, route.boot_id)
        far = self._routes.get(place)
        try:
            check_words(frame)
            if far is None:
                far = self._make(place, route)
        except ValueError as error:
            self.ended(frame.send, Reason.PEER_LOST, 0, f"{route.node}: {error}")
            return
        except Wordless as error:
            self.ended(frame.send, Reason.INTERNAL, 0, str(error))
            return
        if far is None:
            text = f"{len(self._routes)} routes are in use, at most {ROUTES_MAX} may be"
            self.ended(frame.send, Reason.POOL_EXHAUSTED, 0, text)
            return
        far.route = route
        self.start(far, frame, now_s)

    def start(self, far: FarRoute, frame: Frame, now_s: float) -> None:
        """Puts it on its link; the first one makes it. Where all pairs are out it waits for the one that it wants."""
        wanted = self._wanted(far, frame)
        pair = far.pair_for(frame, wanted, now_s) or wanted
        frame.settled = frame.settled or pair != wanted
        self._link(far, frame, pair).submit(frame)

    def failed(
        self, far: FarRoute, key: LinkKey, frames: Sequence[Frame], reason: Reason, message: str, now_s: float
    ) -> None:
        """Frames that have no other pair end; if then none is left for anybody, the node is lost."""
        known = self._routes.get((far.node, far.route.boot_id)) is far
        left = list[Frame]()
        for frame in frames:
            frame.breaks = 0
            frame.tried.append(key.pair)
            pair = far.pair_for(frame, self._wanted(far, frame), now_s)
            if pair is None or not known or len(frame.tried) >= PAIRS_TRIED_MAX:
                left.append(frame)
                continue
            frame.settled = True
            self._link(far, frame, pair).submit(frame)
        if len(left) < len(frames):
            log.warning(
                "%s: %d layers go on over another pair of CNICs: %s", key.words, len(frames) - len(left), message
            )
        for frame in left:
            self.ended(frame.send, reason, 0, message)
        if left and reason is Reason.PEER_LOST and far.is_lost(now_s):
            self.lost(far, message, now_s)

    def dial(self, route: Route, offer: Offer, answered: Callable[[Answer | KvmoverError], None]) -> None:
        assert self.dial_by is not None, "dial_with was not called before the first send"
        self.dial_by(route, offer, answered)

    def next_generation(self) -> int:
        return next(self._generations)

    def lost(self, far: FarRoute, message: str, now_s: float) -> None:
        """All that waits for a link to that node ends; links that work go on until they find out for themselves."""
        for link in list(far.links.values()):
            if not link.works:
                link.give_up(Reason.PEER_LOST, message, now_s)
                link.patience.hurry(now_s)
        self._events.put(RouteLost(far.node, far.route.boot_id, False, message))

    def peer_gone(self, sender: Sender, message: str, now_s: float) -> None:
        far = self._routes.pop(sender, None)
        if far is not None:
            self._retire(far, Reason.PEER_LOST, f"{far.node}: {message}", now_s)

    def close(self, now_s: float) -> None:
        for far in self._routes.values():
            for link in list(far.links.values()):
                link.give_up(Reason.SHUTTING_DOWN, "the transport is closed", now_s)

    @property
    def totals(self) -> Totals:
        found = Totals(self._gone.reconnects, self._gone.repeats)
        for far in self._routes.values():
            _add(found, far)
        return found

    def _retire(self, far: FarRoute, reason: Reason, message: str, now_s: float) -> None:
        for link in list(far.links.values()):
            link.give_up(reason, message, now_s)
        _add(self._gone, far)

    def _wanted(self, far: FarRoute, frame: Frame) -> Pair:
        """The nearest to the memory at both ends, as far as is known."""
        peer_cnic, told = far.peer_cnic(frame.send.sink_id)
        frame.settled = frame.settled or told
        near = self._book.preferred(frame.send.source)
        return (near if near >= 0 else peer_cnic % len(self._engine.fabrics)), peer_cnic

    def _link(self, far: FarRoute, frame: Frame, pair: Pair) -> OutgoingLink:
        kv_class = frame.send.kv_class
        key = LinkKey(kv_class, *pair)
        link = far.links.get(key)
        if link is None:
            marks = self._marks[kv_class]
            link = far.links[key] = OutgoingLink(key, far, self._engine, self._book, self._settings, marks)
        return link

    def _make(self, place: Sender, route: Route) -> FarRoute | None:
        """None: there are too many, and all are in use. Raises `ValueError` for an endpoint that is none."""
        if len(self._routes) >= ROUTES_MAX:
            for known, far in list(self._routes.items()):
                if not any(link.busy or link.works for link in far.links.values()):
                    _add(self._gone, self._routes.pop(known))
            if len(self._routes) >= ROUTES_MAX:
                return None
        made = self._routes[place] = FarRoute(self, route, len(self._engine.fabrics))
        return made


def cnics_of(endpoint: str) -> int:
    """Raises `ValueError`.

    >>> cnics_of("verbs:8")
    8
    """
    count = endpoint.removeprefix(ENDPOINT_PREFIX)
    if count == endpoint or not count.isdecimal() or not 1 <= int(count) <= CNICS_MAX:
        raise ValueError(
            f"endpoint {endpoint!r} is not {ENDPOINT_PREFIX}<1 to {CNICS_MAX}>: all nodes need one transport.kind"
        )
    return int(count)


def check_words(frame: Frame) -> None:
    """Raises `Wordless`."""
    send = frame.send
    if frame.payload_bytes > FRAME_BYTES_MAX:
        raise Wordless(f"a frame of {frame.payload_bytes} bytes, at most {FRAME_BYTES_MAX} are allowed")
    try:
        frame.ask.encode()
    except struct.error as error:
        text = f"layer {send.layer}, block {send.first_block} or sink {send.sink_id} is out of bounds: {error}"
        raise Wordless(text) from error


def _add(totals: Totals, far: FarRoute) -> None:
    totals.reconnects += sum(link.reconnects for link in far.links.values())
    totals.repeats += sum(link.repeats for link in far.links.values())
