"""Reads whole records and says what is wrong with them: every layer, against header, manifest and the log's word."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass

import numpy as np
from crc32c import crc32c

from kvmoverd.adapters.storage.block_io import NOT_DIRECT, errno_name, open_regular, read_into
from kvmoverd.adapters.storage.inspect.catalog import LoggedSegment, Rows
from kvmoverd.adapters.storage.segments.writes_io import page_memory
from kvmoverd.core.layout import HEADER_BYTES, padded
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.record import Header, RecordMismatch, chained_crcs, decode
from kvmoverd.core.store.places import PAGE_BYTES
from kvmoverd.core.store.segment_header import SegmentHeader, decode_segment

LOOKS = 2
"""Damage that is gone at the second look came from the way, not from the disk."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with the record at `page`. `unreadable`: the device refused it."""

    page: int
    tag: int
    what: str
    unreadable: bool = False


class RecordReader:
    """Memory for one record at a time, as large as the largest so far. For one thread."""

    def __init__(self) -> None:
        self._memory = page_memory(PAGE_BYTES)

    def read(self, fd: int, offset_bytes: int, record_bytes: int) -> memoryview:
        """What there is of the record; it stays until the next call. Raises `OSError`."""
        if len(self._memory) < record_bytes:
            self._memory = page_memory(record_bytes)
        target = self._memory[:record_bytes]
        try:
            return target[: read_into(fd, target, offset_bytes)]
        except OSError as error:
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            if error.errno not in NOT_DIRECT or not flags & os.O_DIRECT:
                raise
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return target[: read_into(fd, target, offset_bytes)]


def open_direct(path: str) -> tuple[int, os.stat_result]:
    """Past the page cache, which may know better than the disk; where that can't be, through it. Raises `OSError`."""
    try:
        return open_regular(path, os.O_DIRECT)
    except OSError as error:
        if error.errno not in NOT_DIRECT:
            raise
        return open_regular(path)


def check_record(record: memoryview, record_bytes: int, space: Namespace | None) -> Header:
    """The header of a record that is whole and right. Raises `RecordMismatch`. `space`: of the manifest, where that is known."""
    if len(record) < record_bytes:
        raise RecordMismatch("record_bytes", found=len(record), expected=record_bytes)
    header = decode(record[:HEADER_BYTES])
    if padded(header.payload_bytes) + HEADER_BYTES != record_bytes or not header.layer_crcs:
        raise RecordMismatch("payload_bytes", found=header.payload_bytes, expected=f"to fill {record_bytes} bytes")
    payload = record[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
    if space is None:
        # The sizes of the layers stand in the manifest; the last checksum covers them all.
        last = crc32c(payload)
        if last != header.layer_crcs[-1]:
            raise RecordMismatch("payload_crc32c", found=f"{last:08x}", expected=f"{header.layer_crcs[-1]:08x}")
        return header
    _check_layout(header, space)
    crcs = chained_crcs(payload, space.layout)
    for layer, (found, expected) in enumerate(zip(crcs, header.layer_crcs, strict=True)):
        if found != expected:
            raise RecordMismatch(f"layer_crc32c[{layer}]", found=f"{found:08x}", expected=f"{expected:08x}")
    return header


def _check_layout(header: Header, space: Namespace) -> None:
    layout = space.layout
    for field, found, expected in (
        ("fingerprint", header.fingerprint.hex(), space.fingerprint.hex()),
        ("layer_count", len(header.layer_crcs), layout.layer_count),
        ("block_tokens", header.block_tokens, layout.block_tokens),
        ("payload_bytes", header.payload_bytes, layout.block_bytes),
    ):
        if found != expected:
            raise RecordMismatch(field, found=found, expected=expected)


@dataclass(slots=True)
class SegmentCheck:
    """Of some records of one segment that logs name. `missing`: it is not there; `bad_head`: it is not what it should be."""

    segment: LoggedSegment
    rows: Rows
    findings: list[Finding]
    read_bytes: int = 0
    missing: bool = False
    bad_head: bool = False


def check_records(
    path: str, segment: LoggedSegment, rows: Rows, space: Namespace | None, reader: RecordReader
) -> SegmentCheck:
    """Reads these records of a segment, and raises nothing: what can't be read is a finding."""
    checked = SegmentCheck(segment, rows, [])
    try:
        fd, _ = open_direct(path)
    except OSError as error:
        checked.missing = isinstance(error, FileNotFoundError)
        checked.findings = _all_of(checked.rows, f"the segment: {errno_name(error)}", unreadable=not checked.missing)
        return checked
    try:
        header = _head(fd, segment, reader)
        for row in checked.rows:
            finding = _check_row(fd, row, header, space, reader)
            checked.read_bytes += header.record_pages * PAGE_BYTES
            if finding is not None:
                checked.findings.append(finding)
    except OSError as error:
        checked.findings = _all_of(checked.rows, f"the segment's head: {errno_name(error)}", unreadable=True)
    except RecordMismatch as error:
        checked.bad_head = True
        checked.findings = _all_of(checked.rows, f"the segment's head: {error}", unreadable=False)
    finally:
        os.close(fd)
    return checked


def _head(fd: int, segment: LoggedSegment, reader: RecordReader) -> SegmentHeader:
    """The segment's first page, held against what logs say of it. Raises `OSError`, `RecordMismatch`."""
    header = decode_segment(bytes(reader.read(fd, 0, PAGE_BYTES)))
    for field, found, expected in (
        ("author", header.author, segment.author),
        ("number", header.number, segment.number),
        ("fingerprint", header.fingerprint[:16].hex(), segment.fingerprint16.hex()),
        ("generation", header.generation, segment.generation),
        ("purge", header.purge, segment.purge),
        ("record_pages", header.record_pages, segment.record_pages),
    ):
        if found != expected:
            raise RecordMismatch(field, found=found, expected=expected)
    return header


def _check_row(
    fd: int, row: np.void, segment: SegmentHeader, space: Namespace | None, reader: RecordReader
) -> Finding | None:
    page, tag = int(row["page"]), int(row["tag"])
    if segment.index_of(page) < 0:
        return Finding(page, tag, f"no record begins at page {page}")
    what, record_bytes = "", segment.record_pages * PAGE_BYTES
    for _ in range(LOOKS):
        try:
            header = check_record(reader.read(fd, page * PAGE_BYTES, record_bytes), record_bytes, space)
            _check_identity(header, segment, tag)
            return None
        except RecordMismatch as error:
            what = str(error)
        except OSError as error:
            return Finding(page, tag, errno_name(error), unreadable=True)
    return Finding(page, tag, what)


def _check_identity(header: Header, segment: SegmentHeader, tag: int) -> None:
    for field, found, expected in (
        ("fingerprint", header.fingerprint.hex(), segment.fingerprint.hex()),
        ("generation", header.generation, segment.generation),
        ("key", header.key[:8].hex(), tag.to_bytes(8, "little").hex()),
    ):
        if found != expected:
            raise RecordMismatch(field, found=found, expected=expected)


def _all_of(rows: Rows, what: str, *, unreadable: bool) -> list[Finding]:
    return [Finding(int(row["page"]), int(row["tag"]), what, unreadable) for row in rows]
