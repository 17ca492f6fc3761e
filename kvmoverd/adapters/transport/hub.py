"""All channels of one transport: the listener, a sending end per route, a receiving end per connection."""

from __future__ import annotations

import errno
import select
import socket
import threading
from collections.abc import Callable

from kvmoverd.adapters.transport.events import Events
from kvmoverd.adapters.transport.incoming import Incoming
from kvmoverd.adapters.transport.link import Peers
from kvmoverd.adapters.transport.medium import ChannelSettings, CheckKey, Medium
from kvmoverd.adapters.transport.outgoing import Outgoing
from kvmoverd.adapters.transport.sinks import Sinks
from kvmoverd.adapters.transport.threads import NO_THREAD, Threads
from kvmoverd.adapters.transport.wire import IDLE_WAIT_S, READ
from kvmoverd.core.errors import TransportRefused
from kvmoverd.core.status import Reason
from kvmoverd.ports.transport import Route, Send, Sent

ROUTES_MAX = 256
_ACCEPT_PAUSE_S = 0.1


class Hub:
    """Refuses what is beyond its limits with a `Sent`, or by closing the connection."""

    def __init__(
        self,
        medium: Medium,
        settings: ChannelSettings,
        sinks: Sinks,
        events: Events,
        threads: Threads,
        *,
        check_key: CheckKey,
        inbound_max: int,
    ) -> None:
        self._medium = medium
        self._settings = settings
        self._sinks = sinks
        self._events = events
        self._threads = threads
        self._check_key = check_key
        self._inbound_max = inbound_max
        self._inbound = 0
        self._lock = threading.Lock()
        self._peers = Peers()
        self._outgoing: dict[tuple[str, str], Outgoing] = {}
        self._retired_bytes: dict[str, int] = {}
        self._closed = False
        self._listener = medium.listen()
        if not threads.start("listen", self._listen):
            self._listener.close()
            raise TransportRefused(NO_THREAD)

    @property
    def listening(self) -> socket.socket:
        return self._listener

    def submit(self, send: Send, route: Route) -> None:
        place = (route.node, route.boot_id)
        with self._lock:
            if self._closed:
                self._events.put(Sent(send.op_id, Reason.SHUTTING_DOWN, 0, "the transport is closed"))
                return
            known = self._outgoing.get(place)
            if known is not None and not known.replaced_by(route) and known.submit(send, route):
                return
            self._drop_retired()
            if len(self._outgoing) >= ROUTES_MAX:
                text = f"{len(self._outgoing)} routes are in use, at most {ROUTES_MAX} may be"
                self._events.put(Sent(send.op_id, Reason.POOL_EXHAUSTED, 0, text))
                return
            self._open(send, route)

    def _open(self, send: Send, route: Route) -> None:
        """A new end for a route and its first send, which is refused where descriptors or threads have run out."""
        try:
            made = Outgoing(route, self._medium, self._settings, self._events, self._threads)
        except OSError as error:
            self._events.put(Sent(send.op_id, Reason.POOL_EXHAUSTED, 0, f"no channel to {route.node}: {error}"))
            return
        made.submit(send, route)
        if self._threads.start(f"to-{route.node}", made.run):
            self._outgoing[route.node, route.boot_id] = made
        else:
            made.abandon(Reason.POOL_EXHAUSTED, NO_THREAD)

    def stop_taking(self) -> None:
        with self._lock:
            self._closed = True

    def sent_bytes(self) -> dict[str, int]:
        """Bytes applied at each node since start, as its acks told."""
        with self._lock:
            found = dict(self._retired_bytes)
            for channel in self._outgoing.values():
                found[channel.node] = found.get(channel.node, 0) + channel.sent_bytes
            return found

    def _drop_retired(self) -> None:
        for place, channel in list(self._outgoing.items()):
            if channel.retired:
                del self._outgoing[place]
                self._retired_bytes[channel.node] = self._retired_bytes.get(channel.node, 0) + channel.sent_bytes

    def _listen(self) -> None:
        poller = select.poll()
        stop_fd = self._settings.stop_fd
        for fd in (stop_fd, self._listener.fileno()):
            poller.register(fd, READ)
        try:
            while stop_fd not in (ready := dict(poller.poll(IDLE_WAIT_S * 1000))):
                if ready:
                    self._accept_one()
        finally:
            self._listener.close()

    def _accept_one(self) -> None:
        """A connection that breaks while it is accepted is its own trouble; without descriptors we wait for some."""
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._rest()
            return
        try:
            sock.setblocking(False)
            peer_pid = self._medium.accepted(sock)
        except OSError:
            sock.close()
            return
        self._serve(sock, peer_pid)

    def _serve(self, sock: socket.socket, peer_pid: int) -> None:
        with self._lock:
            if self._inbound >= self._inbound_max:
                sock.close()
                return
            self._inbound += 1
        incoming = Incoming(
            sock, self._medium.kind, peer_pid, self._settings, self._sinks, self._events, self._check_key, self._peers
        )
        if not self._threads.start("from", lambda: self._counted(incoming.run)):
            sock.close()
            self._one_less()

    def _counted(self, run: Callable[[], None]) -> None:
        try:
            run()
        finally:
            self._one_less()

    def _one_less(self) -> None:
        with self._lock:
            self._inbound -= 1

    def _rest(self) -> None:
        poller = select.poll()
        poller.register(self._settings.stop_fd, READ)
        poller.poll(_ACCEPT_PAUSE_S * 1000)
