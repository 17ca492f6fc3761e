"""One start's directory: its name, its heartbeat, and the check that nobody took it over meanwhile.

A daemon that stood still for long may have been taken for dead, and another may own its directory. It can only find that
out by looking: so it looks at every heartbeat, and before it publishes when the last look was long ago.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvmoverd.adapters.storage.namespaces import make_directory
from kvmoverd.adapters.storage.owners import start_ticks
from kvmoverd.adapters.storage.segments.followed import is_author
from kvmoverd.adapters.storage.segments.writes_io import WriteIo, page_memory
from kvmoverd.core.errors import StorageUnusable
from kvmoverd.core.store.lease_page import Lease, encode_lease
from kvmoverd.core.store.log_pages import author16
from kvmoverd.core.store.places import PAGE_BYTES

LEASE = "lease"
SEGMENTS = "seg"
GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})
"""What is heard of a directory that was deleted or replaced."""
_CLAIM = "adopt."
_NAME_CHARS_MAX = 200
_NAMES_MAX = 10_000


class Fenced(Exception):
    """Another node has adopted this author's directory, or it is gone: nothing may be written there any more."""


def boottime_ns() -> int:
    """Goes on while the machine sleeps, as the clocks of those do who watch our heartbeat."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def machine_name() -> str:
    """The same for two processes only if each sees the other's pid: host, boot of the kernel and pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"


class Author:
    """The directory `<authors>/<node>.<boot_id>[-<k>]`, made anew. Raises `OSError`, `StorageUnusable`.

    `dead_s`: after how long without a heartbeat others may take it over. Safe for many threads. `born` false: there is no
    room for a directory now; it makes none, counts as fenced, and its successor is the one who writes.
    """

    def __init__(
        self,
        authors: Path,
        *,
        node: str,
        boot_id: str,
        io: WriteIo,
        dead_s: float,
        now_ns: Callable[[], int] = boottime_ns,
        first: int = 0,
        born: bool = True,
    ) -> None:
        self._authors, self._node, self._boot_id, self._io = authors, node, boot_id, io
        self._dead_s, self._now_ns = dead_s, now_ns
        self._lock = threading.Lock()
        self._machine, self._pid, self._start_ticks = machine_name(), os.getpid(), start_ticks(os.getpid())
        self._page = page_memory(PAGE_BYTES)
        self._beats = 0
        self._segments = 0
        self._ended = False
        self.log = 0
        """The highest log that there is, for the heartbeat."""
        self._beat_ns, self._lease_fd, self._lease_links = 0, -1, 0
        self.born, self._fenced = born, not born
        self._fresh_name, self.name = self._make_directory(first, born=born)
        self.name16 = author16(self.name)
        self.directory = authors / self.name
        self.segments = self.directory / SEGMENTS
        if born:
            try:
                self._make_files()
            except OSError:
                self.discard()
                raise

    def successor(self, *, born: bool = True) -> Author:
        """The author to go on as when this one is fenced: the same start under a fresh name."""
        return Author(
            self._authors,
            node=self._node,
            boot_id=self._boot_id,
            io=self._io,
            dead_s=self._dead_s,
            now_ns=self._now_ns,
            first=self._fresh_name + 1,
            born=born,
        )

    def discard(self) -> None:
        """Takes the directory away again, in which nothing was published: there was no room for all that belongs there."""
        with contextlib.suppress(OSError):
            self._io.close(self._lease_fd)
        self._ended = self._fenced = True
        shutil.rmtree(self.directory, ignore_errors=True)

    def next_segment(self) -> int:
        """A segment number that was never given before."""
        with self._lock:
            self._segments += 1
            return self._segments

    def heartbeat(self) -> None:
        """Shows that the author lives; nothing after his end. Raises `Fenced`, `OSError`."""
        with self._lock:
            if self._ended:
                return
            now_ns = self._now_ns()
            self._look()
            try:
                self._write_lease()
            except OSError as error:
                if error.errno not in GONE:
                    raise
                self._fenced = True
                raise Fenced(self.name) from error
            self._beat_ns = now_ns

    def check(self) -> None:
        """Raises `Fenced` when others may have taken the directory, and have; costs nothing while heartbeats are on time."""
        if self._fenced or self._now_ns() - self._beat_ns > self._dead_s * 1e9 / 2:
            self.look()

    def look(self) -> None:
        """As `check`, whenever the last heartbeat was: for who was told that something is not there. Raises `OSError`, too."""
        with self._lock:
            self._look()

    def end(self) -> None:
        """The last heartbeat: others need not wait until they take this author for dead. It may be called again."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            try:
                self._look()
                self._write_lease()
            except (OSError, Fenced):
                pass
            finally:
                # Some filesystems that have died refuse even this; a stop goes on.
                with contextlib.suppress(OSError):
                    self._io.close(self._lease_fd)

    def _look(self) -> None:
        """Raises `Fenced`, then and ever after, when there is a claim on the directory; `OSError` when it can't be read.

        One that is gone was claimed, too, or deleted; in one that was put in its place our lease is not there.
        """
        if not self._fenced:
            try:
                names = os.listdir(self.directory)
                lost = LEASE not in names or os.fstat(self._lease_fd).st_nlink < self._lease_links
            except OSError as error:
                if error.errno not in GONE:
                    raise
                names, lost = [], True
            self._fenced = lost or any(name.startswith(_CLAIM) for name in names)
        if self._fenced:
            raise Fenced(self.name)

    def _write_lease(self) -> None:
        self._beats += 1
        lease = Lease(self._beats, self._pid, self._start_ticks, self.log, self._segments, self._machine, self._ended)
        self._page[:] = encode_lease(lease)
        self._io.write(self._lease_fd, self._page, 0)
        self._io.sync(self._lease_fd)

    def _make_files(self) -> None:
        make_directory(self.segments)
        self._lease_fd = self._io.create(self.directory / LEASE, PAGE_BYTES)
        self._io.sync_whole(self._lease_fd)
        self._lease_links = os.fstat(self._lease_fd).st_nlink
        self.heartbeat()
        self._io.sync_names(self.directory)
        self._io.sync_names(self._authors)

    def _plain_name(self) -> str:
        plain = f"{self._node}.{self._boot_id}"
        if not self._node or not is_author(plain) or len(plain) > _NAME_CHARS_MAX:
            allowed = f"a letter or digit, then letters, digits and _.@:+- , {_NAME_CHARS_MAX} at most"
            message = f"{plain!r} is no name of an author: {allowed}"
            raise StorageUnusable(message, author=plain)
        return plain

    def _make_directory(self, first: int, *, born: bool) -> tuple[int, str]:
        """(k, name) of the first directory from number `first` on that was not there; k - 1 when it is not made yet."""
        plain = self._plain_name()
        for number in range(first, first + _NAMES_MAX):
            name = f"{plain}-{number}" if number else plain
            if not born:
                if os.path.lexists(self._authors / name):
                    continue
                return number - 1, name
            try:
                os.mkdir(self._authors / name)
            except FileExistsError:
                continue
            os.chmod(self._authors / name, 0o750)
            return number, name
        raise StorageUnusable(f"{_NAMES_MAX} directories {plain}-<k> are there already", author=plain)
