"""One connected socket, without blocking: every wait ends by data, by a deadline, or because the transport stops."""

from __future__ import annotations

import os
import select
import socket

from kvmoverd.adapters.memory.iovec import Cursor, receive_step, send_step

READ = select.POLLIN
WRITE = select.POLLOUT
_BROKEN = select.POLLHUP | select.POLLERR | select.POLLNVAL
IDLE_WAIT_S = 60.0
"""Who waits for work that may never come looks up this often; keepalive finds the dead in between."""
SCRATCH_BYTES = 1 << 20
LOW_WATER_BYTES = 1 << 20
"""A reader of a long frame is woken for so many bytes: long reads cost a quarter less of a core than many short ones."""


class ChannelLost(Exception):
    """The connection is of no more use; the message says why."""


class Stopped(Exception):
    """The transport closes."""


class Wire:
    """Owns a socket. Methods raise `ChannelLost` or `Stopped`; `io_timeout_s` bounds the time without progress."""

    def __init__(self, sock: socket.socket, *, stop_fd: int, io_timeout_s: float) -> None:
        self._sock = sock
        self._stop_fd = stop_fd
        self._io_timeout_s = io_timeout_s
        self._low_water_bytes = 1
        self._scratch: bytearray | None = None
        self.fd = sock.fileno()

    def close(self) -> None:
        self._sock.close()

    def connected(self) -> None:
        """Waits for a connect under way."""
        self.await_ready(WRITE)
        error = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise ChannelLost(os.strerror(error))

    def await_ready(self, flags: int, *, patient: bool = False) -> None:
        """Waits until the socket is readable or writable; `patient`: as long as it takes."""
        while not self.poll({self.fd: flags}, IDLE_WAIT_S if patient else self._io_timeout_s):
            if not patient:
                raise ChannelLost(f"no byte moved for {self._io_timeout_s:g} s")

    def await_bytes(self, left_bytes: int) -> None:
        """Waits until a good part of the `left_bytes` of a frame can be read, or any of them when that takes too long.

        A peer that stalls behind a part too small to wake for is found after twice the time without progress.
        """
        if left_bytes < LOW_WATER_BYTES:
            self._set_low_water(1)
            self.await_ready(READ)
            return
        self._set_low_water(LOW_WATER_BYTES)
        if not self.poll({self.fd: READ}, self._io_timeout_s):
            self._set_low_water(1)
            if not self.poll({self.fd: READ}, 0):
                raise ChannelLost(f"no byte moved for {self._io_timeout_s:g} s")

    def poll(self, wanted: dict[int, int], timeout_s: float) -> dict[int, int]:
        """Descriptors that are ready. Raises `Stopped` when the transport closes."""
        poller = select.poll()
        poller.register(self._stop_fd, READ)
        for fd, flags in wanted.items():
            poller.register(fd, flags)
        ready = dict(poller.poll(max(0.0, timeout_s) * 1000))
        if self._stop_fd in ready:
            raise Stopped
        return ready

    def read_some(self, size_max: int) -> bytes:
        """What is there now, b"" when nothing is."""
        try:
            found = self._sock.recv(size_max)
        except BlockingIOError:
            return b""
        except OSError as error:
            raise ChannelLost(str(error)) from error
        if not found:
            raise ChannelLost("the other side closed the connection")
        return found

    def read_exactly(self, size_bytes: int, *, patient: bool = False) -> bytes:
        """`patient`: the first byte may take as long as it likes."""
        buffer = bytearray(size_bytes)
        self._read_into(memoryview(buffer), patient=patient)
        return bytes(buffer)

    def drain(self, size_bytes: int) -> None:
        """Reads bytes that nobody wants."""
        if self._scratch is None:
            self._scratch = bytearray(SCRATCH_BYTES)
        while size_bytes:
            part_bytes = min(size_bytes, SCRATCH_BYTES)
            self._read_into(memoryview(self._scratch)[:part_bytes])
            size_bytes -= part_bytes

    def write_all(self, raw: bytes) -> None:
        """For headers; the bytes of layers go by `send_step`."""
        left = memoryview(raw)
        while left:
            try:
                left = left[self._sock.send(left, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                self.await_ready(WRITE)
            except OSError as error:
                raise ChannelLost(str(error)) from error

    def send_step(self, source: Cursor) -> int:
        """Bytes taken, 0 when the socket is full."""
        try:
            return send_step(self.fd, source)
        except OSError as error:
            raise ChannelLost(str(error)) from error

    def receive_step(self, destination: Cursor) -> int:
        """Bytes scattered, 0 when none are there."""
        try:
            return receive_step(self.fd, destination)
        except EOFError as error:
            raise ChannelLost("the other side closed the connection in the middle of a frame") from error
        except OSError as error:
            raise ChannelLost(str(error)) from error

    def check_open(self) -> None:
        """Raises `ChannelLost` when the other side has closed, whatever it sent before."""
        if self.poll({self.fd: select.POLLRDHUP}, 0).get(self.fd, 0) & (_BROKEN | select.POLLRDHUP):
            raise ChannelLost("the other side closed the connection in the middle of a frame")

    def _read_into(self, buffer: memoryview, *, patient: bool = False) -> None:
        self._set_low_water(1)
        got = 0
        while got < len(buffer):
            try:
                moved = self._sock.recv_into(buffer[got:])
            except BlockingIOError:
                self.await_ready(READ, patient=patient and got == 0)
                continue
            except OSError as error:
                raise ChannelLost(str(error)) from error
            if moved == 0:
                raise ChannelLost("the other side closed the connection")
            got += moved

    def _set_low_water(self, low_water_bytes: int) -> None:
        if low_water_bytes != self._low_water_bytes:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water_bytes)
            self._low_water_bytes = low_water_bytes
