"""Statistics of a network interface that only its driver names, as `ethtool -S` prints them. Needs no root."""

from __future__ import annotations

import array
import fcntl
import socket
import struct
from collections.abc import Mapping

_SIOCETHTOOL = 0x8946
_GSTRINGS, _GSTATS, _GSSET_INFO = 0x1B, 0x1D, 0x37
_STATISTICS = 1
_NAME_BYTES = 32
_STATISTICS_MAX = 1 << 15
_REQUEST = struct.Struct("16sP")


def statistics(interface: str) -> Mapping[str, int]:
    """By the driver's own names; empty where it has none. Raises `OSError` where there is no such interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        info = _ask(sock, interface, struct.pack("=IIQI", _GSSET_INFO, 0, 1 << _STATISTICS, 0))
        count = struct.unpack_from("=I", info, 16)[0] if struct.unpack_from("=Q", info, 8)[0] else 0
        if not 0 < count <= _STATISTICS_MAX:
            return {}
        head = struct.pack("=III", _GSTRINGS, _STATISTICS, count)
        names = _ask(sock, interface, head + bytes(count * _NAME_BYTES))[len(head) :]
        head = struct.pack("=II", _GSTATS, count)
        values = _ask(sock, interface, head + bytes(8 * count))[len(head) :]
    keys = [names[at : at + _NAME_BYTES].split(b"\0")[0].decode() for at in range(0, len(names), _NAME_BYTES)]
    return dict(zip(keys, struct.unpack(f"={count}Q", values), strict=True))


def _ask(sock: socket.socket, interface: str, request: bytes) -> bytes:
    buffer = array.array("B", request)
    fcntl.ioctl(sock, _SIOCETHTOOL, _REQUEST.pack(interface.encode()[:15], buffer.buffer_info()[0]))
    return buffer.tobytes()
