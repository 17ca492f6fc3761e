"""Segments that are being filled: one per namespace, the next one made before it is needed."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from kvmoverd.adapters.storage.segments.author import Author
from kvmoverd.adapters.storage.segments.writes_io import WriteIo, page_memory
from kvmoverd.core.errors import StorageUnusable
from kvmoverd.core.store.places import PAGE_BYTES, Place, segment_name
from kvmoverd.core.store.segment_header import SegmentHeader, encode_segment, records_in

RESERVE_BYTES = 4 << 20
"""Room that a new segment takes on the disk, for two records at least; what it has is doubled when little of it is left."""
RESERVE_STEP_BYTES = 128 << 20
"""It takes no more than so much at once: what a killed daemon had reserved stays so until the segment is collected."""
LOCK_WAIT_S = 5.0
"""Whoever makes a segment for so long is stuck in the filesystem: others that need one fail meanwhile."""


NAMESPACES_MAX = 256
"""Namespaces with a segment that grows; beyond that the one that was not written to for longest gets no more records."""
IDLE_NS = 3600 * 10**9
"""A segment that got no record for so long gets none any more: while it grows it is not collected, and has room reserved."""


@dataclass(slots=True, eq=False)
class GrowingSegment:
    """`taken`: records given out, the last at `taken_ns`, monotonic; `under_way`: those of them that have not ended yet.

    `reserved_bytes`: so many of the file, from its begin, have room on the disk. `retired`: takes no more records; `broken`: a
    sync failed, so that nobody can say what is on the disk.
    """

    fd: int
    header: SegmentHeader
    owner: GrowingSegments = field(repr=False)
    taken: int = 0
    taken_ns: int = 0
    under_way: int = 0
    reserved_bytes: int = 0
    retired: bool = False
    broken: bool = False

    @property
    def room(self) -> int:
        return 0 if self.retired else self.header.records - self.taken

    @property
    def taken_bytes(self) -> int:
        """Where the last record ends that was given out."""
        return self.header.page_of(self.taken) * PAGE_BYTES

    @property
    def is_tight(self) -> bool:
        left_bytes = self.reserved_bytes - self.taken_bytes
        few_bytes = min(self.reserved_bytes // 4, RESERVE_STEP_BYTES)
        return left_bytes < few_bytes and self.reserved_bytes < self.header.segment_bytes

    @property
    def next_reserve_bytes(self) -> int:
        """How many bytes of the file are to have room next."""
        doubled_bytes = 2 * max(self.reserved_bytes, self.taken_bytes)
        most_bytes = max(self.reserved_bytes, self.taken_bytes) + RESERVE_STEP_BYTES
        return min(doubled_bytes, most_bytes, self.header.segment_bytes)

    def place(self, index: int) -> Place:
        return Place(self.header.author, self.header.number, self.header.page_of(index))


class GrowingSegments:
    """Gives records their places. Safe for many threads; `take` may make a file, and raises `OSError` then."""

    def __init__(
        self, author: Author, io: WriteIo, *, segment_bytes: int, on_made: Callable[[], None] = lambda: None
    ) -> None:
        self._author, self._io, self._segment_bytes, self._on_made = author, io, segment_bytes, on_made
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._now: dict[bytes, GrowingSegment] = {}
        self._next: dict[bytes, GrowingSegment] = {}
        self._open: set[GrowingSegment] = set()

    def take(self, fingerprint: bytes, record_bytes: int, purge: int) -> tuple[GrowingSegment, int]:
        """A segment of the namespace and the index of a free record in it. `purge`: the namespace's number now.

        Raises `OSError`, and `StorageUnusable` for a record that no segment can hold.
        """
        taken = self._take_ready(fingerprint, purge)
        if taken is not None:
            return taken
        with self._making_alone():
            while (taken := self._take_ready(fingerprint, purge)) is None:
                made = self._make(fingerprint, record_bytes, purge)
                self._keep_few()
                with self._lock:
                    self._now[fingerprint] = made
        return taken

    def prepare(self) -> None:
        """Makes room, and next segments, before they are needed; for the thread that commits. Failures show when they are."""
        with self._lock:
            tight = [segment for segment in self._open if not segment.retired and segment.is_tight]
            for segment in tight:
                segment.under_way += 1
        for segment in tight:
            self._reserve(segment, segment.next_reserve_bytes)
            self.ended(segment)
        for fingerprint in self._without_next():
            with contextlib.suppress(OSError), self._making_alone():
                # Meanwhile another thread may have made it, or a purge ended the segment that it was to follow.
                header = self._without_next().get(fingerprint)
                if header is not None:
                    made = self._make(fingerprint, header.record_pages * PAGE_BYTES, header.purge)
                    with self._lock:
                        self._next[fingerprint] = made

    def ended(self, segment: GrowingSegment, count: int = 1) -> None:
        """So many of the segment's records are published or given up."""
        with self._lock:
            segment.under_way -= count
            assert segment.under_way >= 0, f"{segment.under_way} records are under way in {segment.header.number}"
            done = self._take_done([segment])
        self._close(done)

    def retire(self, segment: GrowingSegment, *, broken: bool = False) -> None:
        """The segment takes no more records."""
        with self._lock:
            segment.broken = segment.broken or broken
            segment.retired = True
            done = self._take_done([segment])
        self._close(done)

    def retire_namespaces(self, fingerprints16: Collection[bytes]) -> None:
        """The segments of these namespaces take no more records: what comes goes into new ones."""
        with self._lock:
            retired = [one for one in self._open if one.header.fingerprint[:16] in fingerprints16]
            for segment in retired:
                segment.retired = True
            done = self._take_done(retired)
        self._close(done)

    def retire_idle(self, now_ns: int) -> None:
        """Segments that got no record for `IDLE_NS` get none any more."""
        with self._lock:
            idle = [one for one in self._now.values() if now_ns - one.taken_ns > IDLE_NS]
        self.retire_namespaces({segment.header.fingerprint[:16] for segment in idle})

    def retire_all(self) -> None:
        with self._lock:
            for segment in self._open:
                segment.retired = True
            done = self._take_done(list(self._open))
        self._close(done)

    def active(self) -> set[int]:
        """Numbers of segments that take records, or have records that are under way."""
        with self._lock:
            return {segment.header.number for segment in self._open}

    def _keep_few(self) -> None:
        """Makes place for one namespace more. The first in the dict is the one that was not written to for longest."""
        with self._lock:
            many = list(self._now)[: max(0, 1 + len(self._now) - NAMESPACES_MAX)]
        self.retire_namespaces({fingerprint[:16] for fingerprint in many})

    def _without_next(self) -> dict[bytes, SegmentHeader]:
        """By fingerprint, segments that are more than half full and have no successor."""
        with self._lock:
            return {
                fingerprint: segment.header
                for fingerprint, segment in self._now.items()
                if segment.room and 2 * segment.taken > segment.header.records and fingerprint not in self._next
            }

    @contextlib.contextmanager
    def _making_alone(self) -> Iterator[None]:
        if not self._making.acquire(timeout=LOCK_WAIT_S):
            raise TimeoutError(f"a segment has been in the making for {LOCK_WAIT_S:.0f} s")
        try:
            yield
        finally:
            self._making.release()

    def _take_ready(self, fingerprint: bytes, purge: int) -> tuple[GrowingSegment, int] | None:
        """None: a segment must be made. Those of a namespace that are full, or purged, are retired by the way."""
        taken, done = None, []
        with self._lock:
            for source in (self._now, self._next):
                segment = source.pop(fingerprint, None)
                if segment is None:
                    continue
                if segment.header.purge == purge and segment.room:
                    self._now[fingerprint] = segment
                    segment.taken += 1
                    segment.taken_ns = time.monotonic_ns()
                    segment.under_way += 1
                    taken = segment, segment.taken - 1
                    break
                segment.retired = True
                done += self._take_done([segment])
        self._close(done)
        return taken

    def _make(self, fingerprint: bytes, record_bytes: int, purge: int) -> GrowingSegment:
        """A new segment with its header, durable with its name before anything can point at it."""
        records = records_in(self._segment_bytes, record_bytes)
        if not records:
            message = f"a record of {record_bytes} bytes does not fit in a segment of {self._segment_bytes} bytes"
            raise StorageUnusable(message, record_bytes=record_bytes, segment_bytes=self._segment_bytes)
        header = SegmentHeader(
            fingerprint,
            self._author.name,
            self._author.next_segment(),
            secrets.randbelow((1 << 32) - 1) + 1,
            purge,
            record_bytes // PAGE_BYTES,
            records,
            self._segment_bytes,
            time.time_ns(),
        )
        segment = GrowingSegment(self._create(header), header, self)
        self._reserve(segment, min(max(RESERVE_BYTES, header.page_of(2) * PAGE_BYTES), header.segment_bytes))
        with self._lock:
            self._open.add(segment)
        self._on_made()
        return segment

    def _create(self, header: SegmentHeader) -> int:
        path = self._author.segments / segment_name(header.number)
        fd = self._io.create(path, header.segment_bytes)
        try:
            page = page_memory(PAGE_BYTES)
            page[:] = encode_segment(header)
            self._io.write(fd, page, 0)
            self._io.sync_whole(fd)
            self._io.sync_names(path.parent)
        except OSError:
            self._io.close(fd)
            path.unlink(missing_ok=True)
            raise
        return fd

    def _reserve(self, segment: GrowingSegment, upto_bytes: int) -> None:
        """Where that fails nothing has changed: whoever writes will learn whether there is room."""
        with contextlib.suppress(OSError):
            self._io.reserve(segment.fd, segment.reserved_bytes, upto_bytes - segment.reserved_bytes)
            segment.reserved_bytes = upto_bytes

    def _take_done(self, segments: list[GrowingSegment]) -> list[GrowingSegment]:
        """Those of them that are to be closed, by the caller, outside of the lock: nobody uses them any more."""
        done = [one for one in segments if one.retired and not one.under_way and one in self._open]
        self._open.difference_update(done)
        return done

    def _close(self, segments: list[GrowingSegment]) -> None:
        for segment in segments:
            with contextlib.suppress(OSError):
                unused_bytes = segment.header.segment_bytes - segment.taken_bytes
                if segment.reserved_bytes > segment.taken_bytes:
                    self._io.give_back(segment.fd, segment.taken_bytes, unused_bytes)
            with contextlib.suppress(OSError):
                self._io.close(segment.fd)
