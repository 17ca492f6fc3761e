"""Addresses and queueing disciplines of all interfaces, asked of the kernel over rtnetlink: needs neither root nor tools."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

_TIMEOUT_S = 1.0
_READ_BYTES = 1 << 16
_MESSAGES_MAX = 100_000
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_ERROR, _DONE = 2, 3
_NEW_ADDRESS, _GET_ADDRESS = 20, 22
_NEW_QDISC, _GET_QDISC = 36, 38
_REQUEST_DUMP = 0x301
_ADDRESS_BODY = struct.Struct("=BBBBi")
_QDISC_BODY = struct.Struct("=BxxxiIII")
_IFA_ADDRESS, _IFA_LOCAL, _TCA_KIND = 1, 2, 1


@dataclass(frozen=True, slots=True)
class InterfaceAddress:
    interface: str
    address: str


@dataclass(frozen=True, slots=True)
class Qdisc:
    """`kind`: "fq_codel"; "mq" holds one more for each queue of the device."""

    interface: str
    kind: str


def addresses() -> list[InterfaceAddress]:
    """IPv4 and IPv6. Raises `OSError`."""
    found = []
    for body in _dump(_GET_ADDRESS, _NEW_ADDRESS, _ADDRESS_BODY.pack(0, 0, 0, 0, 0)):
        index = _ADDRESS_BODY.unpack_from(body)[4]
        attributes = dict(_attributes(body[_ADDRESS_BODY.size :]))
        packed = attributes.get(_IFA_LOCAL) or attributes.get(_IFA_ADDRESS)
        if packed:
            found.append(InterfaceAddress(socket.if_indextoname(index), str(ipaddress.ip_address(packed))))
    return found


def qdiscs() -> list[Qdisc]:
    """Raises `OSError`."""
    found = []
    for body in _dump(_GET_QDISC, _NEW_QDISC, _QDISC_BODY.pack(0, 0, 0, 0, 0)):
        index = _QDISC_BODY.unpack_from(body)[1]
        kind = dict(_attributes(body[_QDISC_BODY.size :])).get(_TCA_KIND, b"")
        found.append(Qdisc(socket.if_indextoname(index), kind.rstrip(b"\0").decode()))
    return found


def _dump(ask: int, answer: int, body: bytes) -> Iterator[bytes]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as sock:
        sock.settimeout(_TIMEOUT_S)
        sock.sendto(_HEADER.pack(_HEADER.size + len(body), ask, _REQUEST_DUMP, 1, 0) + body, (0, 0))
        for _ in range(_MESSAGES_MAX):
            data = sock.recv(_READ_BYTES)
            while len(data) >= _HEADER.size:
                size, kind, _flags, _sequence, _port = _HEADER.unpack_from(data)
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    number = -int(struct.unpack_from("=i", data, _HEADER.size)[0])
                    raise OSError(number, os.strerror(number))
                if kind == answer:
                    yield data[_HEADER.size : size]
                data = data[_aligned(size) :]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _ATTRIBUTE.size:
        size, kind = _ATTRIBUTE.unpack_from(data)
        if size < _ATTRIBUTE.size:
            return
        yield kind, data[_ATTRIBUTE.size : size]
        data = data[_aligned(size) :]


def _aligned(size: int) -> int:
    return (size + 3) & ~3
