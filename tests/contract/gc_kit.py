"""Nodes of one segment store, each built of the real parts over one directory, whose clock the test moves."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from kvmoverd.adapters.storage.block_io import choose_io, read_into
from kvmoverd.adapters.storage.segments.appender import Appender
from kvmoverd.adapters.storage.segments.author import Author, machine_name
from kvmoverd.adapters.storage.segments.budgets import Budgets
from kvmoverd.adapters.storage.segments.collecting import Collecting, StoreParts
from kvmoverd.adapters.storage.segments.collector import REFRESH_S
from kvmoverd.adapters.storage.segments.followers import Followers
from kvmoverd.adapters.storage.segments.index import SegmentIndex
from kvmoverd.adapters.storage.segments.purges import Purges
from kvmoverd.adapters.storage.segments.root import SegmentRoot
from kvmoverd.adapters.storage.segments.segment_files import SegmentFiles
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.adapters.storage.segments.touches import Touches
from kvmoverd.adapters.storage.segments.usage import Room
from kvmoverd.adapters.storage.segments.writes import Append, Appended
from kvmoverd.adapters.storage.segments.writes_io import WriteIo
from kvmoverd.core.keys import ROOT
from kvmoverd.core.layout import HEADER_BYTES, Layout
from kvmoverd.core.manifest import Manifest, Namespace
from kvmoverd.core.record import RecordMismatch, check_layers, seal
from kvmoverd.core.status import Reason
from kvmoverd.core.store.places import PAGE_BYTES

LAYOUT = Layout(block_tokens=16, layers=((1000,), (37,), (74_000,)))
RECORD_PAGES = 20
RECORDS = 16
SEGMENT_BYTES = (1 + RECORD_PAGES * RECORDS) * PAGE_BYTES
GRACE_S = 60.0
SETTINGS = SegmentSettings(
    segment_bytes=SEGMENT_BYTES,
    log_pages=32,
    commit_wait_s=0.005,
    commit_blocks=16,
    grace_s=GRACE_S,
    unlink_bytes_per_s=1e12,
)
WAIT_S = 10.0
_SECOND_NS = 10**9


def namespace(model_id: str = "model", tenant: str = "") -> Namespace:
    return Namespace(Manifest(model_id, b"w" * 32, b"t" * 32, LAYOUT, "u8", tenant=tenant))


SPACE = namespace()


class Clock:
    def __init__(self) -> None:
        self.ns = 1_000 * _SECOND_NS

    def __call__(self) -> int:
        return self.ns

    def pass_s(self, seconds: float) -> None:
        self.ns += round(seconds * _SECOND_NS)


class Node:
    """Writes as `<name>.<boot>`; `adopted`: dead authors whose segments it collects; `live`: others that it takes for alive.

    `room`: what the filesystem says of itself, a huge one unless the test says otherwise.
    """

    def __init__(
        self,
        home: Path,
        name: str,
        clock: Clock,
        settings: SegmentSettings = SETTINGS,
        *,
        adopted: Sequence[str] = (),
        live: Collection[str] = (),
        index_ram_bytes_max: int = 1 << 30,
    ) -> None:
        self.clock, self.live = clock, set(live)
        self.adopted = list(adopted)
        self.room = Room(1 << 60, 1 << 60, 0, 0)
        self.root = SegmentRoot(home)
        io = choose_io(self.root.new_temp(), direct=True)
        self.io = io
        self.touches = Touches(now_ns=clock)
        self.index = SegmentIndex(ram_bytes_max=index_ram_bytes_max, touches=self.touches, now_ns=clock)
        self.purges = Purges(self.root.base, self.index)
        writing = WriteIo(direct=io.direct)
        node, boot_id = name.split(".")
        author = Author(self.root.authors, node=node, boot_id=boot_id, io=writing, dead_s=60.0)
        self.appender = Appender(author, writing, self.index, settings, purge_of=self.purges.number, name=name)
        self.files = SegmentFiles(self.root.authors, io)
        self.followers = Followers(
            self.root.authors,
            self.index,
            own=self.own,
            machine=machine_name(),
            settings=settings,
            now_ns=clock,
            direct=io.direct,
            on_namespace=self._watch,
        )
        parts = StoreParts(
            self.root,
            io,
            settings,
            self.appender,
            self.files,
            self.index,
            self.touches,
            self.purges,
            self,
            lambda: self.live,
            self.followers.dropped,
            self.followers.told_dead,
        )
        self.collecting = Collecting(parts, now_ns=clock)
        self.collector, self.graveyard = self.collecting.collector, self.collecting.graveyard
        self.collector._room = lambda: self.room

    def own(self) -> str:
        return self.appender.author.name

    def owned(self) -> Collection[str]:
        return [self.own(), *self.adopted]

    def left(self, author: str) -> None:
        self.adopted.remove(author)

    def open(self, space: Namespace = SPACE) -> None:
        self.root.open_namespace(space)
        self.purges.look(space)

    def put(self, keys: Sequence[bytes], space: Namespace = SPACE, *, depth: int = 0) -> list[Appended]:
        """Stores these, one after the other, and waits until all have ended."""
        ends: dict[bytes, Appended] = {}
        changed = threading.Condition()

        def ended(key: bytes, done: Appended) -> None:
            with changed:
                ends[key] = done
                changed.notify()

        for number, key in enumerate(keys):
            record = memoryview(mmap.mmap(-1, space.layout.record_bytes))
            record[HEADER_BYTES : HEADER_BYTES + space.layout.block_bytes] = payload_of(key, space)
            fill = partial(_seal, record, space, key, depth + number)
            self.appender.append(
                Append(space.fingerprint, key, ROOT, depth + number, record, fill, partial(ended, key))
            )
        with changed:
            assert changed.wait_for(lambda: len(ends) == len(keys), WAIT_S), "no end"
        return [ends[key] for key in keys]

    def fill(self, segments: int, space: Namespace = SPACE) -> list[list[bytes]]:
        """Keys of so many full segments, by segment; one more is begun, so that these take no more records."""
        keys = [[os.urandom(32) for _ in range(RECORDS)] for _ in range(segments)]
        for some in keys:
            assert {done.reason for done in self.put(some, space)} == {Reason.OK}
        self.put([os.urandom(32)], space)
        return keys

    def use(self, keys: Sequence[bytes], space: Namespace = SPACE) -> None:
        self.index.touch(space, keys)

    def known(self, keys: Sequence[bytes], space: Namespace = SPACE) -> int:
        return int(self.index.known(space, keys).sum())

    def follow(self) -> None:
        """Learns of all that others have said until now."""
        for _ in range(3):
            self.clock.pass_s(2)
            self.followers.load()
        self.purges.poll()

    def collect(self) -> None:
        """Steps of the collector until it has nothing to do, after a look at everything."""
        self.collector.hurry()
        for _ in range(100):
            if not self.collector.step():
                return
        raise AssertionError("the collector finds no end")

    def pass_grace(self) -> None:
        """What waits goes into the trash, and is deleted."""
        self.clock.pass_s(GRACE_S + REFRESH_S)
        self.collect()
        deadline_s = time.monotonic() + WAIT_S
        while any(self.collecting.trash.pending()):
            assert time.monotonic() < deadline_s, "the trash is not emptied"
            time.sleep(0.005)
        self.collect()

    def segments(self, author: str = "") -> list[str]:
        """Names of segment files that are there."""
        return sorted(os.listdir(self.root.authors / (author or self.own()) / "seg"))

    def reads(self, key: bytes, space: Namespace = SPACE) -> bool:
        """Whether the record is found, and whole; every one that is found and readable must be right."""
        place = self.index.find(space.fingerprint[:16], key)
        if place is None:
            return False
        try:
            segment = self.files.take(place.author, place.segment)
        except (FileNotFoundError, RecordMismatch):
            return False
        try:
            record = memoryview(mmap.mmap(-1, space.layout.record_bytes))
            read_into(segment.fd, record, place.offset_bytes)
        finally:
            self.files.let_go(segment.fd)
        check_layers(record, space, key, 0, space.layout.layer_count)
        return bytes(record[HEADER_BYTES : HEADER_BYTES + space.layout.block_bytes]) == payload_of(key, space)

    def close(self) -> None:
        """As at a stop; what is waiting in RAM is forgotten, as after a crash."""
        assert self.appender.close(WAIT_S)
        self.followers.close()
        self.files.close()
        self.collecting.close()

    def _watch(self, fingerprint16: bytes) -> None:
        with contextlib.suppress(OSError):
            self.purges.watch(fingerprint16)


MakeNode = Callable[..., Node]


@contextlib.contextmanager
def nodes_over(home: Path) -> Iterator[MakeNode]:
    """Makes nodes over one directory, with one clock; each is closed in the end."""
    made: list[Node] = []
    clock = Clock()

    def make(name: str = "a.1", settings: SegmentSettings = SETTINGS, **options: object) -> Node:
        one = Node(home, name, clock, settings, **options)  # type: ignore[arg-type]
        one.open()
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()


def must_drop(one: Node, segments: float) -> None:
    """Gives the running node a budget above which it is, by so many segments over the low mark."""
    one.collecting.usage.refresh(one.owned(), one.collector._is_active)
    used = one.collecting.usage.totals()[0]
    bytes_max = round((used - segments * SEGMENT_BYTES) / SETTINGS.low)
    assert used > SETTINGS.high * bytes_max, f"{used} bytes are not above the high mark of {bytes_max}"
    one.collector._budgets = Budgets(replace(SETTINGS, bytes_max=bytes_max))


def payload_of(key: bytes, space: Namespace = SPACE) -> bytes:
    size_bytes = space.layout.block_bytes
    return (key * (size_bytes // len(key) + 1))[:size_bytes]


def _seal(record: memoryview, space: Namespace, key: bytes, depth: int, generation: int) -> None:
    seal(record, space, key=key, parent=ROOT, depth=depth, write_time_ns=1, generation=generation)
