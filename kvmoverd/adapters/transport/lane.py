"""The lane of a TCP connection: DSCP for the network, SO_PRIORITY for the host's queues; set, then read back."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from kvmoverd.core.errors import ConfigError

DSCP_MAX = 63
PRIORITY_MAX = 6
"""Above it the kernel asks for CAP_NET_ADMIN."""
_DSCP_SHIFT = 2


@dataclass(frozen=True, slots=True)
class Lane:
    """Class of all KV traffic. Raises `ConfigError` for a class that does not exist."""

    dscp: int
    so_priority: int

    def __post_init__(self) -> None:
        if not 0 <= self.dscp <= DSCP_MAX:
            raise ConfigError(f"transport.dscp is {self.dscp}, must be 0 to {DSCP_MAX}")
        if not 0 <= self.so_priority <= PRIORITY_MAX:
            raise ConfigError(f"transport.so_priority is {self.so_priority}, must be 0 to {PRIORITY_MAX}")


def set_lane(sock: socket.socket, lane: Lane) -> str:
    """Sets both and says what the kernel says then, e.g. "DSCP 8, SO_PRIORITY 1".

    The priority comes second: the kernel derives one from the DSCP.
    """
    if sock.family == socket.AF_INET6:
        level, option = socket.IPPROTO_IPV6, socket.IPV6_TCLASS
    else:
        level, option = socket.IPPROTO_IP, socket.IP_TOS
    dscp = _set(sock, "DSCP", level, option, lane.dscp << _DSCP_SHIFT, _DSCP_SHIFT)
    return f"{dscp}, {_set(sock, 'SO_PRIORITY', socket.SOL_SOCKET, socket.SO_PRIORITY, lane.so_priority, 0)}"


def _set(sock: socket.socket, name: str, level: int, option: int, value: int, shift: int) -> str:
    asked = value >> shift
    try:
        sock.setsockopt(level, option, value)
        found = sock.getsockopt(level, option) >> shift
    except OSError as error:
        return f"{name} {asked} can't be set: {os.strerror(error.errno or 0)}"
    return f"{name} {found}" if found == asked else f"{name} {asked} was asked for, the kernel says {found}"
