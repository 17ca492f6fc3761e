"""What differs between media: how to listen and to connect, what a frame's body is, and who is at the other end."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvmoverd.adapters.transport.frames import BodyKind
from kvmoverd.ports.transport import Sender

CheckKey = Callable[[bytes], Sender | None]
"""Node and boot id that a key was issued to; called from any thread."""


class Medium(Protocol):
    @property
    def kind(self) -> BodyKind: ...

    def listen(self) -> socket.socket:
        """A listening socket that does not block."""

    def connect(self, endpoint: str) -> socket.socket:
        """A socket that does not block, its connect under way. Raises `OSError`, `ValueError` for a bad endpoint."""

    def accepted(self, sock: socket.socket) -> int:
        """Sets an accepted socket up; process id at the other end, 0 where there is none. Raises `OSError`."""


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """Of all channels of one transport. `queue_max` bounds what waits or is under way per route, `connections` its sockets."""

    node: str
    boot_id: str
    io_timeout_s: float
    queue_max: int
    connections: int
    stop_fd: int
