"""A segment's first page, and how many records it takes. All numbers are little-endian.

Records of a segment are all of one namespace, hence of one size: record i begins at page 1 + i * record_pages. A record
that is not in the index logs can thus be found by looking at these pages alone.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from crc32c import crc32c

from kvmoverd.core.record import RecordMismatch
from kvmoverd.core.store.places import PAGE_BYTES

MAGIC = b"KVMOSEG\n"
FORMAT = 1
AUTHOR_BYTES_MAX = 256
_FIXED = struct.Struct("<8sII32sIIIIIQQH")
_CRC = struct.Struct("<I")
_COVERED_FROM = len(MAGIC) + _CRC.size


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """`generation`: random, never 0, also in its records' headers; `purge`: the purge number of the namespace at its making.

    A segment whose purge number is below the namespace's present one is dead. `created_ns` is wall-clock time.
    """

    fingerprint: bytes
    author: str
    number: int
    generation: int
    purge: int
    record_pages: int
    records: int
    segment_bytes: int
    created_ns: int

    @property
    def fingerprint16(self) -> bytes:
        """What stands for the namespace in logs and names."""
        return self.fingerprint[:16]

    def page_of(self, index: int) -> int:
        """The first page of record `index`."""
        return 1 + index * self.record_pages

    def index_of(self, page: int) -> int:
        """The record that begins at `page`; -1 when none does."""
        index, rest = divmod(page - 1, self.record_pages)
        return index if not rest and 0 <= index < self.records else -1


def records_in(segment_bytes: int, record_bytes: int) -> int:
    """Records that a segment of this size takes, 0 when not one fits.

    >>> records_in(1 << 30, 627 * 4096)
    418
    """
    return max(0, segment_bytes // PAGE_BYTES - 1) // (record_bytes // PAGE_BYTES)


def encode_segment(header: SegmentHeader) -> bytes:
    """The first page, `PAGE_BYTES` long."""
    author = header.author.encode()
    assert len(author) <= AUTHOR_BYTES_MAX, f"the author's name has {len(author)} bytes, at most {AUTHOR_BYTES_MAX} fit"
    page = bytearray(PAGE_BYTES)
    _FIXED.pack_into(
        page,
        0,
        MAGIC,
        0,
        FORMAT,
        header.fingerprint,
        header.number,
        header.generation,
        header.purge,
        header.record_pages,
        header.records,
        header.segment_bytes,
        header.created_ns,
        len(author),
    )
    page[_FIXED.size : _FIXED.size + len(author)] = author
    _CRC.pack_into(page, len(MAGIC), crc32c(memoryview(page)[_COVERED_FROM:]))
    return bytes(page)


def decode_segment(page: bytes | memoryview) -> SegmentHeader:
    """Raises `RecordMismatch` for a page that is short, foreign, damaged or of a format that this build can't read."""
    if len(page) < PAGE_BYTES:
        raise RecordMismatch("segment_header_bytes", found=len(page), expected=PAGE_BYTES)
    magic, crc, version, fingerprint, number, generation, purge, pages, records, size_bytes, time_ns, name_bytes = (
        _FIXED.unpack_from(page)
    )
    if magic != MAGIC:
        raise RecordMismatch("segment_magic", found=magic, expected=MAGIC)
    if version != FORMAT:
        raise RecordMismatch("segment_format", found=version, expected=FORMAT)
    computed = crc32c(memoryview(page)[_COVERED_FROM:PAGE_BYTES])
    if crc != computed:
        raise RecordMismatch("segment_header_crc32c", found=f"{crc:08x}", expected=f"{computed:08x}")
    author = bytes(page[_FIXED.size : _FIXED.size + name_bytes]).decode()
    return SegmentHeader(fingerprint, author, number, generation, purge, pages, records, size_bytes, time_ns)
