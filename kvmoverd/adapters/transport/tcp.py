"""TCP between nodes: payloads are gathered from the source's slices and scattered into the sink's, on one lane."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

from kvmoverd.adapters.transport.frames import BodyKind
from kvmoverd.adapters.transport.lane import Lane, set_lane
from kvmoverd.adapters.transport.medium import ChannelSettings, CheckKey
from kvmoverd.adapters.transport.threaded import ThreadedTransport
from kvmoverd.core.errors import ConfigError
from kvmoverd.ports.transport import Send

__all__ = ["Lane", "TcpTransport"]

BACKLOG = 128
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 10, 5, 3
"""An idle peer that is gone without a word is noticed after some 25 s; one that owes an ack, after `io_timeout_s`."""


class TcpMedium:
    """Sockets for one listening address. `lane_text` is what the kernel said about the latest one."""

    kind = BodyKind.PAYLOAD

    def __init__(self, host: str, port: int, lane: Lane, *, io_timeout_s: float) -> None:
        self._host = host
        self._port = port
        self._lane = lane
        self._io_timeout_s = io_timeout_s
        self.lane_text = ""

    def listen(self) -> socket.socket:
        """Raises `ConfigError` when the address can't be had."""
        try:
            family, _, _, _, address = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)[0]
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError as error:
            raise ConfigError(f"transport.listen is {self._host}:{self._port}: {error}") from error
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._dress(sock)
            sock.bind(address)
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            raise ConfigError(f"transport.listen is {self._host}:{self._port}: {error}") from error
        return sock

    def connect(self, endpoint: str) -> socket.socket:
        host, port = split_endpoint(endpoint)
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._dress(sock)
            error = sock.connect_ex(address)
            if error not in (0, errno.EINPROGRESS):
                raise OSError(error, errno.errorcode.get(error, "connect"))
        except OSError:
            sock.close()
            raise
        return sock

    def accepted(self, sock: socket.socket) -> int:
        self._dress(sock)
        return 0

    def _dress(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(self._io_timeout_s * 1000)))
        self.lane_text = set_lane(sock, self._lane)


class TcpTransport(ThreadedTransport):
    """Implements `Transport` between daemons; a sink of this process needs another transport.

    `inbound_max` bounds the connections that other nodes hold, `queue_max` the sends per route, `connections` those of a
    route. Raises `ConfigError`, and `TransportRefused` where the system starts no thread.
    """

    def __init__(
        self,
        node: str,
        boot_id: str,
        listen_host: str,
        listen_port: int,
        *,
        lane: Lane,
        check_key: CheckKey,
        io_timeout_s: float = 10.0,
        queue_max: int = 4_096,
        inbound_max: int = 1_024,
        connections: int = 2,
    ) -> None:
        super().__init__("tcp")
        self._medium = TcpMedium(listen_host, listen_port, lane, io_timeout_s=io_timeout_s)
        settings = ChannelSettings(node, boot_id, io_timeout_s, queue_max, connections, self._stop_fd)
        self._hub = self._open_hub(self._medium, settings, check_key=check_key, inbound_max=inbound_max)
        host, port = self._hub.listening.getsockname()[:2]
        self._endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def endpoint(self) -> str:
        """Where others dial: `host:port` of the listening socket, an IPv6 host in brackets."""
        return self._endpoint

    @property
    def lane_text(self) -> str:
        """What the kernel says about the lane, e.g. "DSCP 8, SO_PRIORITY 1", or what could not be set."""
        return self._medium.lane_text

    def sent_bytes(self) -> dict[str, int]:
        """Bytes applied at each node since start."""
        return self._hub.sent_bytes()

    def submit(self, sends: Sequence[Send]) -> None:
        for send in sends:
            assert send.route is not None, f"send {send.op_id} has no route: TCP does not move within a process"
            self._hub.submit(send, send.route)

    def _stop_taking(self) -> None:
        self._hub.stop_taking()


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port. Raises `ValueError`.

    >>> split_endpoint("[::1]:9401")
    ('::1', 9401)
    """
    host, colon, port = endpoint.rpartition(":")
    if not colon or not host or not port.isdecimal():
        raise ValueError(f"endpoint {endpoint!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)
