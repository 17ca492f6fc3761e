"""Reads of records: found by the index or by a hint, held to the header that lies there, and remembered when they are bad."""

from __future__ import annotations

import errno
from collections.abc import Callable

from kvmoverd.adapters.storage.block_io import UNREADABLE, read_into
from kvmoverd.adapters.storage.blocks import Opened
from kvmoverd.adapters.storage.segments.parts import Purges, StoreIndex
from kvmoverd.adapters.storage.segments.segment_files import SegmentFiles
from kvmoverd.adapters.storage.segments.writes_io import page_memory
from kvmoverd.core.layout import HEADER_BYTES
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.record import RecordMismatch, check_layers, decode, memory_view, verify
from kvmoverd.core.status import Reason
from kvmoverd.core.store.places import PAGE_BYTES, Place
from kvmoverd.ports.storage import BlockRead, StorageDone

BAD_S = 30.0
"""How long a block that the device could not read is left alone."""
_OTHER_RECORD = frozenset({"fingerprint", "key", "generation", "nothing"})
"""What differs where another record lies than the one that is looked for: a miss. All else is damage."""
_NOTHING = bytes(HEADER_BYTES)
_GONE = frozenset({errno.ENOENT, errno.ESTALE})


class Reads:
    """Safe for many threads. All but `check` and `failed` do I/O. `on_damage` is told key and place of damaged records, and
    whether they are cut off: their segment ends early.
    """

    def __init__(
        self, files: SegmentFiles, index: StoreIndex, purges: Purges, on_damage: Callable[[bytes, Place, bool], None]
    ) -> None:
        self._files, self._index, self._purges, self._on_damage = files, index, purges, on_damage

    def open(self, op: BlockRead) -> Opened:
        """Where the record is, by the index first, then by the hint. Raises `OSError`: ENOENT when nobody knows."""
        fingerprint16 = op.namespace.fingerprint[:16]
        known = None if op.first_layer and op.place else self._index.find(fingerprint16, op.key)
        if known is not None:
            try:
                return self._open_at(op.namespace, known)
            except OSError as error:
                self.failed(op, known, error)
                if op.place in (None, known):
                    raise
        if op.place is None:
            raise FileNotFoundError(errno.ENOENT, "not stored, as far as is known", op.key.hex())
        return self._open_at(op.namespace, op.place)

    def let_go(self, opened: Opened) -> None:
        self._files.let_go(opened.fd)

    def check(self, op: BlockRead, opened: Opened | None) -> None:
        """Checks what came into the slot from there. Raises `RecordMismatch`."""
        record = memory_view(op.address, op.namespace.layout.record_bytes)
        if opened is not None and not op.first_layer:
            _check_identity(record, opened.generation)
        check_layers(record, op.namespace, op.key, op.layers.start, op.layers.stop)

    def failed(self, op: BlockRead, place: Place | None, error: OSError) -> None:
        """A place that the device can't read is left alone for `BAD_S`; one that is gone until the block is stored again."""
        if place is not None:
            self._failed(op.namespace, op.key, place, error)

    def read(self, op: BlockRead, *, looks: int) -> StorageDone:
        """Reads and checks, `looks` times at most. Raises `OSError`; what is wrong at every look is found no more."""
        for _ in range(looks):
            opened = self.open(op)
            try:
                done = self._read_once(op, opened)
                if done.reason is Reason.OK:
                    return done
                same = not op.first_layer or self._is_same_record(op, opened)
            except OSError as error:
                self.failed(op, opened.place, error)
                raise
            finally:
                self.let_go(opened)
        assert opened.place is not None, "a record of a segment has a place"
        what = f"{opened.place.author}/{opened.place.segment} page {opened.place.page}: {done.message}"
        if not same:
            return StorageDone(op.op_id, Reason.CORRUPT, done.moved_bytes, message=f"{what}; another record's bytes")
        self._index.mark_bad(op.namespace.fingerprint[:16], op.key, opened.place, for_s=None)
        if done.reason is not Reason.MISS:
            self._on_damage(op.key, opened.place, done.reason is Reason.SHORT_READ)
        return StorageDone(op.op_id, done.reason, done.moved_bytes, message=f"{what}; not used any more")

    def is_stored(self, namespace: Namespace, key: bytes) -> Place | None:
        """Where the block is, if its header is there; whoever reads it checks its layers. None: not, or who knows."""
        place = self._index.find(namespace.fingerprint[:16], key)
        if place is None:
            return None
        try:
            opened = self._open_at(namespace, place)
            try:
                page = page_memory(PAGE_BYTES)
                verify(page[: read_into(opened.fd, page, opened.offset_bytes)], namespace, key)
                if not opened.whole:
                    raise RecordMismatch("record_bytes", found="cut", expected=namespace.layout.record_bytes)
            finally:
                self.let_go(opened)
        except RecordMismatch:
            self._index.mark_bad(namespace.fingerprint[:16], key, place, for_s=None)
            if not opened.whole:
                self._on_damage(key, place, True)
            return None
        except OSError as error:
            # It may be there all the same, as when this process has no descriptor to spare.
            self._failed(namespace, key, place, error)
            return None
        return place

    def _failed(self, namespace: Namespace, key: bytes, place: Place, error: OSError) -> None:
        if error.errno in _GONE or error.errno in UNREADABLE:
            for_s = None if error.errno in _GONE else BAD_S
            self._index.mark_bad(namespace.fingerprint[:16], key, place, for_s=for_s)

    def _open_at(self, namespace: Namespace, place: Place) -> Opened:
        """Raises `OSError`; ENOENT also for a segment that is of another namespace, or purged."""
        try:
            segment = self._files.take(place.author, place.segment)
        except RecordMismatch as error:
            raise FileNotFoundError(errno.ENOENT, f"no segment: {error}", str(place)) from error
        header, layout = segment.header, namespace.layout
        fits = (
            header.fingerprint == namespace.fingerprint
            and header.record_pages * PAGE_BYTES == layout.record_bytes
            and header.index_of(place.page) >= 0
            and header.purge >= self._purges.number(namespace.fingerprint[:16])
        )
        if not fits:
            self._files.let_go(segment.fd)
            raise FileNotFoundError(errno.ENOENT, "no such record in this segment, or purged", str(place))
        whole = segment.size_bytes >= place.offset_bytes + layout.record_bytes
        return Opened(segment.fd, place.offset_bytes, whole, lasting=True, place=place, generation=header.generation)

    def _read_once(self, op: BlockRead, opened: Opened) -> StorageDone:
        span, record_bytes = op.span, op.namespace.layout.record_bytes
        record = memory_view(op.address, record_bytes)
        got = read_into(opened.fd, record[span.start : span.stop], opened.offset_bytes + span.start)
        if got < len(span):
            message = f"the segment ends after {span.start + got} of {record_bytes} bytes of the record"
            return StorageDone(op.op_id, Reason.SHORT_READ, got, message=message)
        try:
            if not op.first_layer:
                _check_identity(record, opened.generation)
            check_layers(record, op.namespace, op.key, op.layers.start, op.layers.stop)
        except RecordMismatch as error:
            reason = Reason.MISS if error.field in _OTHER_RECORD else Reason.CORRUPT
            return StorageDone(op.op_id, reason, got, message=str(error))
        return StorageDone(op.op_id, Reason.OK, got, place=opened.place)

    def _is_same_record(self, op: BlockRead, opened: Opened) -> bool:
        """Only then may a range that does not match be held against the place: the ranges before came from there."""
        page = page_memory(HEADER_BYTES)
        got = read_into(opened.fd, page, opened.offset_bytes)
        return got == HEADER_BYTES and page == memory_view(op.address, HEADER_BYTES)


def _check_identity(record: memoryview, generation: int) -> None:
    """Raises `RecordMismatch` where there is no record, or one that was not written into this segment."""
    if record[:HEADER_BYTES] == _NOTHING:
        raise RecordMismatch("nothing", found="zeros", expected="a record")
    found = decode(record[:HEADER_BYTES]).generation
    if found != generation:
        raise RecordMismatch("generation", found=found, expected=generation)
