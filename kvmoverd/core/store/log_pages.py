"""Pages of an index log: 4096 bytes each, written whole, once, in order; zeros mean "not written yet".

    0   magic "KVLG", crc32c of all after it, format u16, kind u16, count u16, 0 u16
    16  log number u32, page number u32 (the page's own place in the log)
    24  segment u32, its generation u32, its purge number u32, its record_pages u32
    40  fingerprint, first 16 bytes
    56  wall-clock second of the commit u64
    64  owner, 16 bytes: whose segments the page is about, `author16` of his name; zeros: the log's own author
   128  entries: of blocks, good or bad, 64 bytes each, at most 62; of a tombstone segment numbers, u32 each, at most 992

All numbers are little-endian. A page is about one author, whom the log's own author is or has adopted: so nobody ever
writes another's log. Only that records are bad may be said by anybody, of anybody's. A page of blocks belongs to one
segment, and an entry to one block of it. One crc covers the page, so an entry is as it was written or not there. A page
that does not pass, with one behind it that does, was torn or damaged: it is skipped, and so counted; with nothing behind
it, it is not there yet.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from kvmoverd.core.store.places import PAGE_BYTES

MAGIC = b"KVLG"
FORMAT = 1
HEADER_BYTES = 128
ENTRY_BYTES = 64
ENTRIES_MAX = (PAGE_BYTES - HEADER_BYTES) // ENTRY_BYTES
SEGMENTS_MAX = (PAGE_BYTES - HEADER_BYTES) // 4
_HEADER = struct.Struct("<4sIHHHHIIIIII16sQ16s48x")
_CRC = struct.Struct("<I")
_COVERED_FROM = 8

ENTRY = np.dtype(
    [("key", "<u8", (4,)), ("parent", "<u8"), ("page", "<u4"), ("depth", "<u4"), ("flags", "<u4"), ("spare", "V12")]
)
"""`parent`: the first 8 bytes of the parent's key; `page`: of the record's header in its segment."""

assert _HEADER.size == HEADER_BYTES and ENTRY.itemsize == ENTRY_BYTES


class Kind(enum.IntEnum):
    """What a page says."""

    HEAD = 1
    """First page of a log; the entries' place holds the author's name. The next log has the next number, and exists."""
    BLOCKS = 2
    """These blocks of this segment are durable."""
    TOMBSTONE = 3
    """These segments are not to be read any more; they are deleted after a grace."""
    SEAL = 4
    """The last page: go on in the next log."""
    BAD = 5
    """These records of this segment were found damaged: whoever hears of it takes them for not stored, for good."""


OF_BLOCKS = frozenset({Kind.BLOCKS, Kind.BAD})
"""Pages whose entries are blocks."""


@dataclass(frozen=True, slots=True)
class LogPage:
    """`entries`: an array of `ENTRY` for BLOCKS and BAD; `segments` for TOMBSTONE; `author` for HEAD."""

    kind: Kind
    log: int
    number: int
    segment: int = 0
    generation: int = 0
    purge: int = 0
    record_pages: int = 0
    fingerprint16: bytes = bytes(16)
    time_s: int = 0
    owner16: bytes = bytes(16)
    entries: npt.NDArray[np.void] | None = None
    segments: Sequence[int] = ()
    author: str = ""


class DescribedSegment(Protocol):
    """What a page says of its segment."""

    @property
    def number(self) -> int: ...

    @property
    def generation(self) -> int: ...

    @property
    def purge(self) -> int: ...

    @property
    def record_pages(self) -> int: ...

    @property
    def fingerprint16(self) -> bytes: ...


def about(kind: Kind, segment: DescribedSegment, *, time_s: int, owner16: bytes = bytes(16)) -> LogPage:
    """A page about a segment, without entries; its place in a log is set when it is written."""
    return LogPage(
        kind,
        0,
        0,
        segment.number,
        segment.generation,
        segment.purge,
        segment.record_pages,
        segment.fingerprint16,
        time_s,
        owner16,
    )


def paged(page: LogPage, entries: npt.NDArray[np.void]) -> list[LogPage]:
    """As many such pages as these entries take."""
    return [replace(page, entries=entries[at : at + ENTRIES_MAX]) for at in range(0, len(entries), ENTRIES_MAX)]


def author16(author: str) -> bytes:
    """16 bytes that stand for an author's name: BLAKE2b."""
    return hashlib.blake2b(author.encode(), digest_size=16).digest()


def entries_of(blocks: Sequence[tuple[bytes, bytes, int, int]]) -> npt.NDArray[np.void]:
    """Entries of (key, parent's key, page, depth), as an array of `ENTRY`."""
    found = np.zeros(len(blocks), ENTRY)
    for number, (key, parent, page, depth) in enumerate(blocks):
        found[number]["key"] = np.frombuffer(key, "<u8")
        found[number]["parent"] = int.from_bytes(parent[:8], "little")
        found[number]["page"], found[number]["depth"] = page, depth
    return found


def encode_page(page: LogPage) -> bytes:
    """`PAGE_BYTES` bytes."""
    body = _body(page)
    count = _count(page)
    raw = bytearray(PAGE_BYTES)
    _HEADER.pack_into(
        raw,
        0,
        MAGIC,
        0,
        FORMAT,
        page.kind,
        count,
        0,
        page.log,
        page.number,
        page.segment,
        page.generation,
        page.purge,
        page.record_pages,
        page.fingerprint16,
        page.time_s,
        page.owner16,
    )
    raw[HEADER_BYTES : HEADER_BYTES + len(body)] = body
    _CRC.pack_into(raw, 4, crc32c(memoryview(raw)[_COVERED_FROM:]))
    return bytes(raw)


def decode_page(raw: bytes | memoryview, log: int, number: int) -> LogPage | None:
    """The page, or None when these are not the bytes of page `number` of log `log`: zeros, damage, or another page's."""
    magic, crc, version, kind, count, _, its_log, its_number, *rest = _HEADER.unpack_from(raw)
    if magic != MAGIC or version != FORMAT or (its_log, its_number) != (log, number):
        return None
    if crc32c(memoryview(raw)[_COVERED_FROM:PAGE_BYTES]) != crc or kind not in Kind.__members__.values():
        return None
    segment, generation, purge, record_pages, fingerprint16, time_s, owner16 = rest
    entries, segments, author = None, (), ""
    if kind in OF_BLOCKS:
        if count > ENTRIES_MAX:
            return None
        entries = np.frombuffer(raw, ENTRY, count, HEADER_BYTES)
    elif kind == Kind.TOMBSTONE:
        if count > SEGMENTS_MAX:
            return None
        segments = struct.unpack_from(f"<{count}I", raw, HEADER_BYTES)
    elif kind == Kind.HEAD:
        author = bytes(raw[HEADER_BYTES : HEADER_BYTES + count]).decode(errors="replace")
    return LogPage(
        Kind(kind),
        log,
        number,
        segment,
        generation,
        purge,
        record_pages,
        fingerprint16,
        time_s,
        owner16,
        entries,
        segments,
        author,
    )


def _body(page: LogPage) -> bytes:
    if page.kind in OF_BLOCKS:
        assert page.entries is not None and len(page.entries) <= ENTRIES_MAX, (
            "a page of blocks holds 62 entries at most"
        )
        return page.entries.tobytes()
    if page.kind is Kind.TOMBSTONE:
        assert len(page.segments) <= SEGMENTS_MAX, "a tombstone page holds 992 segments at most"
        return struct.pack(f"<{len(page.segments)}I", *page.segments)
    return page.author.encode() if page.kind is Kind.HEAD else b""


def _count(page: LogPage) -> int:
    if page.kind is Kind.HEAD:
        return len(page.author.encode())
    return len(page.segments) if page.entries is None else len(page.entries)
