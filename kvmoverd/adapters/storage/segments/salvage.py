"""Hot records of a segment that is about to go: read, checked, and appended anew."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from crc32c import crc32c

from kvmoverd.adapters.storage.block_io import read_into
from kvmoverd.adapters.storage.segments.appender import Appender
from kvmoverd.adapters.storage.segments.segment_files import OpenSegment, SegmentFiles
from kvmoverd.adapters.storage.segments.writes import Append, Appended
from kvmoverd.adapters.storage.segments.writes_io import page_memory
from kvmoverd.core.layout import HEADER_BYTES
from kvmoverd.core.record import Header, RecordMismatch, decode, encode
from kvmoverd.core.status import Reason
from kvmoverd.core.store.places import PAGE_BYTES, Place

RECORDS_AT_ONCE = 8
"""In RAM at a time."""
_RELEASE_LOCK = 1


class Salvage:
    """Implements the collector's `Writer` over the node's appender. `move` is for one thread; the rest for any."""

    def __init__(self, appender: Appender, files: SegmentFiles) -> None:
        self._appender, self._files = appender, files

    def active(self, author: str) -> Collection[int]:
        return self._appender.segments.active() if author == self._appender.author.name else ()

    def retire(self, fingerprints16: Collection[bytes]) -> None:
        self._appender.segments.retire_namespaces(fingerprints16)

    def tombstone(self, numbers: Sequence[int], owner: str = "") -> None:
        self._appender.log.tombstone(numbers, owner)

    def move(self, places: Sequence[Place], timeout_s: float) -> Mapping[Place, Place]:
        """Appends these records anew: the new places of those that are durable there. What is damaged is left behind.

        All are of one namespace. Records whose appends have not ended within the time are not among them.
        """
        deadline_s = time.monotonic() + timeout_s
        moved: dict[Place, Place] = {}
        for start in range(0, len(places), RECORDS_AT_ONCE):
            if time.monotonic() > deadline_s:
                break
            moved |= self._move(places[start : start + RECORDS_AT_ONCE], deadline_s)
        return moved

    def _move(self, places: Sequence[Place], deadline_s: float) -> dict[Place, Place]:
        group = _Group()
        for place in places:
            found = self._read(place)
            if found is None:
                continue
            header, record = found
            group.begin()
            self._appender.append(
                Append(
                    header.fingerprint,
                    header.key,
                    header.parent,
                    header.depth,
                    record,
                    partial(_seal, record, header),
                    partial(group.ended, place),
                )
            )
        return group.wait(deadline_s)

    def _read(self, place: Place) -> tuple[Header, memoryview] | None:
        """A whole record and its header; None where it is damaged, or gone."""
        try:
            segment = self._files.take(place.author, place.segment)
        except (OSError, RecordMismatch):
            return None
        try:
            record = page_memory(segment.header.record_pages * PAGE_BYTES)
            if read_into(segment.fd, record, place.offset_bytes) != len(record):
                return None
            header = decode(record[:HEADER_BYTES])
            return (header, record) if _is_whole(header, record, segment) else None
        except (OSError, RecordMismatch):
            return None
        finally:
            self._files.let_go(segment.fd)


class _Group:
    """Records whose appends are under way."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._left = 0
        self._moved: dict[Place, Place] = {}

    def begin(self) -> None:
        with self._changed:
            self._left += 1

    def ended(self, place: Place, done: Appended) -> None:
        with self._changed:
            self._left -= 1
            if done.reason is Reason.OK and done.place is not None:
                self._moved[place] = done.place
            self._changed.notify()

    def wait(self, deadline_s: float) -> dict[Place, Place]:
        with self._changed:
            self._changed.wait_for(lambda: not self._left, max(0.0, deadline_s - time.monotonic()))
            return dict(self._moved)


def _is_whole(header: Header, record: memoryview, segment: OpenSegment) -> bool:
    """Whether it is a record of this segment, and its payload is as it was stored: one pass, the checksums are chained."""
    if header.fingerprint != segment.header.fingerprint or header.generation != segment.header.generation:
        return False
    end = HEADER_BYTES + header.payload_bytes
    if not header.layer_crcs or end > len(record):
        return False
    return bool(crc32c(record[HEADER_BYTES:end], 0, _RELEASE_LOCK) == header.layer_crcs[-1])


def _seal(record: memoryview, header: Header, generation: int) -> None:
    record[:HEADER_BYTES] = encode(dataclasses.replace(header, generation=generation))
