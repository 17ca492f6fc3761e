"""The pages and wake-ups shared with one engine: sealed memory files, and a pipe in each direction.

An engine is not trusted. It gets the progress page's file after a seal that lets nobody map it writable anew, and neither
file can be cut under this daemon's mapping. The wake-ups are pipes, not eventfds: an eventfd's two holders share its
flags, so an engine could make the daemon's own write or read block; the ends of a pipe have flags of their own.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

from kvmoverd.adapters.memory import libc
from kvmoverd.core.errors import QueueFull
from kvmoverd.core.progress import CREDIT_BYTES, PROGRESS_BYTES, WORD_BYTES

F_SEAL_FUTURE_WRITE = 0x10
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_KICKS_TAKEN_BYTES = 4096
_PIPE_BYTES = 4096
"""The least a pipe can hold: one kick is enough, and an engine that floods it fills no more."""


class _Page:
    """A sealed memory file, mapped; `fd` is the engine's. The mapping keeps the file alive."""

    def __init__(self, name: str, size_bytes: int, protection: int, seals: int) -> None:
        self.fd = os.memfd_create(name, os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        self._size_bytes = size_bytes
        try:
            os.ftruncate(self.fd, size_bytes)
            self._address = libc.map_memory(size_bytes, protection, mmap.MAP_SHARED, self.fd)
        except OSError:
            os.close(self.fd)
            raise
        try:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | seals | fcntl.F_SEAL_SEAL)
        except OSError:
            libc.unmap_memory(self._address, size_bytes)
            os.close(self.fd)
            raise
        bytes_there = (ctypes.c_char * size_bytes).from_address(self._address)
        self.words = memoryview(bytes_there).cast("B").cast("Q")
        if not protection & mmap.PROT_WRITE:
            self.words = self.words.toreadonly()
        assert len(self.words) * WORD_BYTES == size_bytes, f"{len(self.words)} words in {size_bytes} bytes"

    def close(self) -> None:
        self.words.release()
        libc.unmap_memory(self._address, self._size_bytes)


class EnginePages:
    """Implements `SharedPages`. Raises `QueueFull` when the system has no memory or descriptors left; nothing stays open."""

    def __init__(self) -> None:
        self._pages: list[_Page] = []
        self._engine_fds: list[int] = []
        self._own_fds: list[int] = []
        try:
            self._open()
        except OSError as error:
            self.close()
            raise QueueFull(f"no progress page for one more session: {error}") from error

    def _open(self) -> None:
        writes = mmap.PROT_READ | mmap.PROT_WRITE
        for name, size_bytes, protection, seals in (
            ("kvmoverd-progress", PROGRESS_BYTES, writes, F_SEAL_FUTURE_WRITE),
            ("kvmoverd-credits", CREDIT_BYTES, mmap.PROT_READ, 0),
        ):
            page = _Page(name, size_bytes, protection, seals)
            self._pages.append(page)
            self._engine_fds.append(page.fd)
        wake_read, self._wake = self._pipe()
        self._engine_fds.append(wake_read)
        self._own_fds.append(self._wake)
        self._kicks, kick_write = self._pipe()
        self._engine_fds.append(kick_write)
        self._own_fds.append(self._kicks)

    def _pipe(self) -> tuple[int, int]:
        read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.fcntl(write_fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        return read_fd, write_fd

    @property
    def progress(self) -> memoryview:
        return self._pages[0].words

    @property
    def credits(self) -> memoryview:
        return self._pages[1].words

    def fileno(self) -> int:
        return self._kicks

    def wake(self) -> None:
        try:
            os.write(self._wake, b"\1")
        except (BlockingIOError, BrokenPipeError):
            # Full: the engine has a wake-up to read already. Broken: it closed its end, and is told by messages alone.
            return

    def take_kicks(self) -> bool:
        try:
            return os.read(self._kicks, _KICKS_TAKEN_BYTES) != b""
        except BlockingIOError:
            return True

    def engine_fds(self) -> tuple[int, ...]:
        return tuple(self._engine_fds)

    def close_engine_fds(self) -> None:
        fds, self._engine_fds = self._engine_fds, []
        for fd in fds:
            os.close(fd)

    def close(self) -> None:
        self.close_engine_fds()
        own, self._own_fds = self._own_fds, []
        for fd in own:
            os.close(fd)
        pages, self._pages = self._pages, []
        for page in pages:
            page.close()
