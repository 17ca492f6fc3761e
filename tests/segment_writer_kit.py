"""What the tests of the writing side share: files whose every call is written down and may fail, and an index that is a dict."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvmoverd.adapters.storage.segments.appender import Appender
from kvmoverd.adapters.storage.segments.author import Author
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.adapters.storage.segments.writes import Append, Appended
from kvmoverd.adapters.storage.segments.writes_io import WriteIo
from kvmoverd.core.keys import ROOT
from kvmoverd.core.layout import HEADER_BYTES, Layout
from kvmoverd.core.manifest import Manifest, Namespace
from kvmoverd.core.record import memory_view, seal
from kvmoverd.core.store.log_pages import Kind, LogPage, decode_page
from kvmoverd.core.store.places import PAGE_BYTES, Place, log_name

WAIT_S = 10.0
LAYOUT = Layout(block_tokens=16, layers=((1000,), (37,), (5000,)))
"""Records of three pages."""


def namespace(model_id: str = "model") -> Namespace:
    return Namespace(Manifest(model_id, b"w" * 32, b"t" * 32, LAYOUT, "u8"))


SPACE = namespace()
SMALL = SegmentSettings(segment_bytes=(1 + 3 * 8) * PAGE_BYTES, log_pages=8, commit_wait_s=0.02)
"""Eight records a segment, six pages a log beside head and seal."""


class RecordingIo(WriteIo):
    """Writes down what was done to which file; `before` may raise, or wait, before any of it."""

    def __init__(self, *, direct: bool = False) -> None:
        super().__init__(direct=direct)
        self.calls: list[tuple[str, str, int]] = []
        self.before: Callable[[str, str, int], None] = lambda call, name, offset_bytes: None

    def names(self, *calls: str) -> list[str]:
        return [f"{call} {name}" for call, name, _ in self.calls if not calls or call in calls]

    def create(self, path: Path, size_bytes: int) -> int:
        self._note("create", path.name, size_bytes)
        return super().create(path, size_bytes)

    def write(self, fd: int, content: memoryview, offset_bytes: int) -> None:
        self._note("write", name_of(fd), offset_bytes)
        super().write(fd, content, offset_bytes)

    def sync(self, fd: int) -> None:
        self._note("sync", name_of(fd), 0)
        super().sync(fd)

    def sync_whole(self, fd: int) -> None:
        self._note("sync_whole", name_of(fd), 0)
        super().sync_whole(fd)

    def sync_names(self, directory: Path) -> None:
        self._note("sync_names", directory.name, 0)
        super().sync_names(directory)

    def _note(self, call: str, name: str, offset_bytes: int) -> None:
        self.before(call, name, offset_bytes)
        self.calls.append((call, name, offset_bytes))


def name_of(fd: int) -> str:
    return Path(os.readlink(f"/proc/self/fd/{fd}")).name


class DictIndex:
    """Keeps what it is told; `calls` of the io are told, too, so that the order can be seen."""

    def __init__(self, io: RecordingIo) -> None:
        self._io = io
        self.segments: list[tuple[str, int, int]] = []
        self.blocks: dict[bytes, tuple[str, int, int]] = {}

    def add_segment(
        self, author: str, number: int, *, fingerprint16: bytes, generation: int, purge: int, record_pages: int
    ) -> int:
        name = (author, number, generation)
        if name not in self.segments:
            self.segments.append(name)
        return self.segments.index(name)

    def add_blocks(self, segment_id: int, entries: npt.NDArray[np.void]) -> None:
        self._io.calls.append(("show", str(len(entries)), 0))
        author, number, _ = self.segments[segment_id]
        for entry in entries:
            self.blocks[entry["key"].tobytes()] = (author, number, int(entry["page"]))


class Rig:
    """An appender over real files, and records to append."""

    def __init__(self, home: Path, settings: SegmentSettings = SMALL, *, direct: bool = False) -> None:
        self.home = home
        self.io = RecordingIo(direct=direct)
        self.index = DictIndex(self.io)
        self.purges: dict[bytes, int] = {}
        self.now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        home.mkdir(exist_ok=True)
        author = Author(
            home, node="node-0", boot_id="0123abcd", io=self.io, dead_s=settings.dead_s, now_ns=lambda: self.now_ns
        )
        self.appender = Appender(
            author, self.io, self.index, settings, purge_of=lambda fingerprint16: self.purges.get(fingerprint16, 0)
        )
        self.ends: list[tuple[bytes, Appended]] = []
        self._changed = threading.Condition()
        self._maps: list[mmap.mmap] = []

    @property
    def directory(self) -> Path:
        return self.appender.author.directory

    def append(self, key: bytes, space: Namespace = SPACE, *, parent: bytes = ROOT, depth: int = 0) -> None:
        pages = mmap.mmap(-1, space.layout.record_bytes)
        self._maps.append(pages)
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        record = memory_view(address, space.layout.record_bytes)
        record[HEADER_BYTES : HEADER_BYTES + space.layout.block_bytes] = payload_of(key, space)

        def fill(generation: int) -> None:
            seal(record, space, key=key, parent=parent, depth=depth, write_time_ns=1, generation=generation)

        self.appender.append(
            Append(space.fingerprint, key, parent, depth, record, fill, lambda done: self._end(key, done))
        )

    def put(self, *keys: bytes, space: Namespace = SPACE) -> list[Appended]:
        """Appends each in a thread of its own; how they ended, in order."""
        threads = [threading.Thread(target=self.append, args=(key, space)) for key in keys]
        for thread in threads:
            thread.start()
        ends = self.wait(*keys)
        for thread in threads:
            thread.join(WAIT_S)
        return ends

    def wait(self, *keys: bytes) -> list[Appended]:
        with self._changed:
            assert self._changed.wait_for(lambda: set(keys) <= {key for key, _ in self.ends}, WAIT_S), "no end"
            return [next(done for name, done in self.ends if name == key) for key in keys]

    def record(self, place: Place, space: Namespace = SPACE) -> bytes:
        path = self.home / place.author / "seg" / f"{place.segment:08d}.seg"
        with open(path, "rb") as file:
            file.seek(place.offset_bytes)
            return file.read(space.layout.record_bytes)

    def pages(self, author: str = "") -> list[LogPage]:
        """What all logs of an author say, in order."""
        directory = self.home / (author or self.appender.author.name)
        found = []
        for log in range(1, 1000):
            path = directory / log_name(log)
            if not path.exists():
                return found
            raw = path.read_bytes()
            for number in range(len(raw) // PAGE_BYTES):
                page = decode_page(raw[number * PAGE_BYTES : (number + 1) * PAGE_BYTES], log, number)
                if page is not None:
                    found.append(page)
        return found

    def logged(self, author: str = "") -> list[bytes]:
        """Keys that the logs name, in order."""
        return [
            entry["key"].tobytes()
            for page in self.pages(author)
            if page.kind is Kind.BLOCKS and page.entries is not None
            for entry in page.entries
        ]

    def _end(self, key: bytes, done: Appended) -> None:
        self.io.calls.append(("end", done.reason.name, 0))
        with self._changed:
            self.ends.append((key, done))
            self._changed.notify_all()


@contextmanager
def rig(home: Path, settings: SegmentSettings = SMALL, *, direct: bool = False) -> Iterator[Rig]:
    made = Rig(home, settings, direct=direct)
    yield made
    made.io.before = lambda call, name, offset_bytes: None
    assert made.appender.close(WAIT_S)


def payload_of(key: bytes, space: Namespace = SPACE) -> bytes:
    return np.random.default_rng(list(key)).bytes(space.layout.block_bytes)


def new_keys(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]
