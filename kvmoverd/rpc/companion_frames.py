"""Messages of the companion socket: read one at a time with their descriptors, written whole or not at all."""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Sequence

from kvmover_proto import companion_pb2
from kvmoverd.core.errors import BadRequest, KvmoverError

log = logging.getLogger(__name__)

FRAME_BYTES_MAX = 65_536
ERROR_TEXT_MAX = 512
FDS_SEEN_MAX = 8
"""Descriptors that one read is offered at most; the kernel closes those beyond. More than one is refused all the same."""

_LENGTH = struct.Struct("<I")


class Frame:
    """One message as it arrives. Never reads beyond it, so the descriptors read with it are its own."""

    def __init__(self) -> None:
        self.fds: list[int] = []
        self.fds_cut = False
        self._bytes = bytearray()
        self._need = _LENGTH.size
        self._has_length = False

    @property
    def begun(self) -> bool:
        return bool(self._bytes) or self._has_length

    def read(self, sock: socket.socket) -> bytes | None:
        """One read; the message's bytes when it is whole. Raises `EOFError`, `BadRequest`, `OSError`."""
        missing = self._need - len(self._bytes)
        found, fds, flags, _ = socket.recv_fds(sock, missing, FDS_SEEN_MAX, socket.MSG_CMSG_CLOEXEC)
        self.fds += fds
        self.fds_cut |= bool(flags & socket.MSG_CTRUNC)
        if not found:
            raise EOFError
        self._bytes += found
        if len(self._bytes) < self._need:
            return None
        if self._has_length:
            return bytes(self._bytes)
        return self._begin_body()

    def _begin_body(self) -> bytes | None:
        (self._need,) = _LENGTH.unpack(self._bytes)
        if self._need > FRAME_BYTES_MAX:
            raise BadRequest(f"a message of {self._need} bytes is refused, at most {FRAME_BYTES_MAX} are taken")
        self._has_length = True
        self._bytes.clear()
        return b"" if self._need == 0 else None

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()


def send_reply(sock: socket.socket, reply: companion_pb2.CompanionReply, fds: Sequence[int] = ()) -> bool:
    """Sends a whole reply, descriptors with its first byte, or says that it could not."""
    body = reply.SerializeToString()
    frame = _LENGTH.pack(len(body)) + body
    try:
        return socket.send_fds(sock, [frame], list(fds), socket.MSG_NOSIGNAL) == len(frame)
    except OSError as error:
        log.debug("a reply of %d bytes was not sent: %s", len(frame), error)
        return False


def refusal(error: KvmoverError) -> companion_pb2.CompanionReply:
    text = f"{error.reason}: {error}"[:ERROR_TEXT_MAX]
    return companion_pb2.CompanionReply(error=companion_pb2.CompanionError(message=text))
