"""What a dead author wrote into his segments and did not live to say in his log: found record by record."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from kvmoverd.adapters.storage.segments.page_files import PAGES_AT_ONCE, PageFiles
from kvmoverd.core.layout import padded
from kvmoverd.core.record import Header, RecordMismatch, decode
from kvmoverd.core.store.log_pages import entries_of
from kvmoverd.core.store.places import PAGE_BYTES
from kvmoverd.core.store.segment_header import SegmentHeader, decode_segment

EMPTY_MAX = 64
"""Records are written in about the order of their places: behind so many that are not there, none is."""


@dataclass(slots=True)
class ScanStats:
    """Totals since start. `torn`: records whose header was whole and whose layers were not."""

    segments: int = 0
    bad_segments: int = 0
    headers: int = 0
    found: int = 0
    torn: int = 0
    read_bytes: int = 0


@dataclass(slots=True)
class Tail:
    """A segment and what was found in it, an array of `ENTRY`; `time_s`: when the last of it was written, wall clock."""

    header: SegmentHeader
    entries: npt.NDArray[np.void]
    time_s: int


def scan_segment(
    path: Path, author: str, number: int, said: npt.NDArray[np.uint32], files: PageFiles, stats: ScanStats
) -> Iterator[Tail | None]:
    """Looks at all records whose pages are not in `said`; None after each, for a pause, at last the tail if there is one.

    Raises `OSError` where the segment can't be read. One that is not this author's, or whose head is damaged, has no tail.
    """
    fd = files.open(path)
    try:
        try:
            header = decode_segment(files.read(fd, 0, 1).reshape(-1).data)
        except RecordMismatch:
            stats.bad_segments += 1
            return
        if (header.author, header.number) != (author, number) or header.record_pages < 2:
            stats.bad_segments += 1
            return
        stats.segments += 1
        yield from _scan(fd, header, said, files, stats)
    finally:
        with contextlib.suppress(OSError):
            os.close(fd)


def _scan(
    fd: int, segment: SegmentHeader, said: npt.NDArray[np.uint32], files: PageFiles, stats: ScanStats
) -> Iterator[Tail | None]:
    unsaid = np.ones(segment.records, np.bool_)
    indexes = (said.astype(np.int64) - 1) // segment.record_pages
    unsaid[indexes[(indexes >= 0) & (indexes < segment.records)]] = False
    found: list[tuple[bytes, bytes, int, int]] = []
    empty, time_s = 0, 0
    for index in np.flatnonzero(unsaid).tolist():
        page = segment.page_of(index)
        header = _header_at(fd, page, segment, files, stats)
        if header is None:
            empty += 1
            if empty >= EMPTY_MAX:
                break
        else:
            empty = 0
            if _is_whole(fd, page, header, files, stats):
                found.append((header.key, header.parent, page, header.depth))
                time_s = max(time_s, header.write_time_ns // 10**9)
            else:
                stats.torn += 1
        yield None
    if found:
        stats.found += len(found)
        yield Tail(segment, entries_of(found), time_s)


def _header_at(fd: int, page: int, segment: SegmentHeader, files: PageFiles, stats: ScanStats) -> Header | None:
    """The header of a record of this segment; None for zeros, damage, and what another use of these bytes left."""
    stats.headers += 1
    raw = files.read(fd, page, 1)
    if not len(raw):
        return None
    try:
        header = decode(raw.reshape(-1).data)
    except RecordMismatch:
        return None
    if (header.generation, header.fingerprint) != (segment.generation, segment.fingerprint) or not header.layer_crcs:
        return None
    return header if padded(header.payload_bytes) == (segment.record_pages - 1) * PAGE_BYTES else None


def _is_whole(fd: int, page: int, header: Header, files: PageFiles, stats: ScanStats) -> bool:
    """Reads all layers. Their checksums are chained: the last one covers all."""
    left_bytes, crc = header.payload_bytes, 0
    page += 1
    while left_bytes > 0:
        raw = files.read(fd, page, PAGES_AT_ONCE).reshape(-1)[:left_bytes]
        if not len(raw):
            return False
        crc = crc32c(raw.data, crc)
        stats.read_bytes += len(raw)
        left_bytes -= len(raw)
        page += PAGES_AT_ONCE
    return crc == header.layer_crcs[-1]
