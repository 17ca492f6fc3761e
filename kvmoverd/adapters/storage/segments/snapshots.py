"""Snapshots: what an author's logs up to one number said of segments that are still alive, in 16 bytes a block.

    0     magic "KVMSNAP\\n", crc32c of the rest of the page u32, format u32
    16    number u32, segments u32, tombstones u32, sections u32
    32    blocks u64, crc32c of the tables u32
    4096  tables: 80 bytes for each segment, and for the bad blocks of one, sorted by namespace and owner; 20 bytes for each
          tombstone of another author's segment, and of an own one that is still there; the crc32c of each MiB of blocks;
          zeros to a whole page
    ...   blocks: the first 8 bytes of the key, page u32, depth u32; segment by segment, in the order of the table

All numbers are little-endian. The file is written under another name, made durable, and never changed. A MiB of blocks that
does not pass loses the segments that lie in it, and no others.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from kvmoverd.adapters.storage.block_io import open_regular, read_into
from kvmoverd.adapters.storage.segments.log_reader import News, Run
from kvmoverd.core.store.log_pages import ENTRY
from kvmoverd.core.store.places import PAGE_BYTES, snapshot_name

MAGIC = b"KVMSNAP\n"
FORMAT = 1
SECTION_BYTES = 1 << 20
ROWS_MAX = 1 << 24
HEAD = struct.Struct("<8sIIIIIIQI")
_COVERED_FROM = 12
_NEWS_BYTES = 4 << 20

ROW = np.dtype(
    [
        ("fingerprint16", "V16"),
        ("owner16", "V16"),
        ("number", "<u4"),
        ("generation", "<u4"),
        ("purge", "<u4"),
        ("record_pages", "<u4"),
        ("first", "<u8"),
        ("time_s", "<u8"),
        ("count", "<u4"),
        ("bad", "<u4"),
        ("spare", "V8"),
    ]
)
"""A segment; its blocks are `count` from number `first` on. `bad` 1: those that somebody found damaged."""
TOMBSTONE = np.dtype([("owner16", "V16"), ("number", "<u4")])
BLOCK = np.dtype([("tag", "<u8"), ("page", "<u4"), ("depth", "<u4")])
assert ROW.itemsize == 80 and BLOCK.itemsize == 16


class SnapshotDamaged(OSError):
    """The snapshot's head or tables are not what was written: nothing of it can be used."""


@dataclass(slots=True)
class SnapshotCounters:
    """`damaged`: sections that did not pass; `lost_segments`: those that lay in them."""

    damaged: int = 0
    lost_segments: int = 0


def sections_of(blocks: int) -> int:
    return -(-blocks * BLOCK.itemsize // SECTION_BYTES)


def tables_bytes(segments: int, tombstones: int, blocks: int) -> int:
    """Of the tables, with the zeros behind them."""
    used = segments * ROW.itemsize + tombstones * TOMBSTONE.itemsize + 4 * sections_of(blocks)
    return -(-used // PAGE_BYTES) * PAGE_BYTES


def encode_head(number: int, segments: int, tombstones: int, blocks: int, tables: bytes) -> bytes:
    """The first page."""
    page = bytearray(PAGE_BYTES)
    sections = sections_of(blocks)
    HEAD.pack_into(page, 0, MAGIC, 0, FORMAT, number, segments, tombstones, sections, blocks, crc32c(tables))
    struct.pack_into("<I", page, len(MAGIC), crc32c(memoryview(page)[_COVERED_FROM:]))
    return bytes(page)


class Snapshot:
    """An open snapshot; its tables are in RAM. Raises `OSError`, `SnapshotDamaged`."""

    def __init__(self, directory: Path, number: int) -> None:
        self._path = str(directory / snapshot_name(number))
        self._fd, _ = open_regular(self._path)
        try:
            self._read_tables(number)
        except OSError:
            self.close()
            raise

    @property
    def blocks(self) -> int:
        return int(self.rows["count"].sum())

    def close(self) -> None:
        os.close(self._fd)

    def read_blocks(self, first: int, count: int) -> npt.NDArray[np.void] | None:
        """These blocks, as an array of `BLOCK`; None when a section that they lie in is damaged. Raises `OSError`."""
        start, stop = first * BLOCK.itemsize, (first + count) * BLOCK.itemsize
        low = start // SECTION_BYTES * SECTION_BYTES
        high = min(-(-stop // SECTION_BYTES) * SECTION_BYTES, self.blocks * BLOCK.itemsize)
        raw = bytearray(high - low)
        got = read_into(self._fd, memoryview(raw), self._blocks_at + low)
        for number, at in enumerate(range(0, high - low, SECTION_BYTES), low // SECTION_BYTES):
            section = memoryview(raw)[at : at + SECTION_BYTES]
            if at + len(section) > got or crc32c(section) != self._crcs[number]:
                return None
        return np.frombuffer(raw, np.uint8)[start - low : stop - low].view(BLOCK)

    def _read_tables(self, number: int) -> None:
        head = self._read(0, PAGE_BYTES)
        magic, crc, version, its_number, segments, tombstones, sections, blocks, tables_crc = HEAD.unpack_from(head)
        if magic != MAGIC or version != FORMAT or its_number != number:
            raise SnapshotDamaged(f"{self._path}: not snapshot {number}, or of another format")
        if crc32c(memoryview(head)[_COVERED_FROM:]) != crc or sections != sections_of(blocks) or segments > ROWS_MAX:
            raise SnapshotDamaged(f"{self._path}: the head is damaged")
        size_bytes = tables_bytes(segments, tombstones, blocks)
        tables = self._read(PAGE_BYTES, size_bytes)
        if crc32c(tables) != tables_crc:
            raise SnapshotDamaged(f"{self._path}: the tables are damaged")
        self.rows = np.frombuffer(tables, ROW, segments)
        at = segments * ROW.itemsize
        self.tombstones = np.frombuffer(tables, TOMBSTONE, tombstones, at)
        self._crcs = np.frombuffer(tables, "<u4", sections, at + tombstones * TOMBSTONE.itemsize).tolist()
        self._blocks_at = PAGE_BYTES + size_bytes
        if blocks != self.blocks:
            raise SnapshotDamaged(f"{self._path}: it has {blocks} blocks, its segments {self.blocks}")

    def _read(self, at: int, size_bytes: int) -> bytes:
        if size_bytes > os.fstat(self._fd).st_size:
            raise SnapshotDamaged(f"{self._path}: it ends before its tables do")
        raw = bytearray(size_bytes)
        if read_into(self._fd, memoryview(raw), at) != size_bytes:
            raise SnapshotDamaged(f"{self._path}: it ends before its tables do")
        return bytes(raw)


def read_snapshot(
    directory: Path, number: int, counters: SnapshotCounters, *, only: Collection[bytes] | None = None
) -> Iterator[News]:
    """What the snapshot says, some megabytes at a time. `only`: of these namespaces. Raises `OSError`."""
    snapshot = Snapshot(directory, number)
    try:
        yield _tombstones(snapshot)
        rows = snapshot.rows
        if only is not None:
            rows = rows[[row.tobytes() in only for row in rows["fingerprint16"]]]
        for some in _portions(rows):
            yield _news(snapshot, some, counters)
    finally:
        snapshot.close()


def own_segments(directory: Path, number: int) -> set[int]:
    """Numbers of the author's own segments that were alive. Raises `OSError`."""
    snapshot = Snapshot(directory, number)
    try:
        own = (snapshot.rows["owner16"] == np.zeros(1, "V16")[0]) & (snapshot.rows["bad"] == 0)
        return set(snapshot.rows["number"][own].tolist())
    finally:
        snapshot.close()


def entries_of_blocks(blocks: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Entries as of a log, but of the keys only the first 8 bytes."""
    entries = np.zeros(len(blocks), ENTRY)
    entries["key"][:, 0] = blocks["tag"]
    entries["page"], entries["depth"] = blocks["page"], blocks["depth"]
    return entries


def _tombstones(snapshot: Snapshot) -> News:
    news = News(more=True)
    for row in snapshot.tombstones:
        news.tombstones.append((row["owner16"].tobytes(), (int(row["number"]),)))
    return news


def _portions(rows: npt.NDArray[np.void]) -> Iterator[npt.NDArray[np.void]]:
    """Runs of neighbouring rows with some megabytes of blocks each, one row at least."""
    start = 0
    while start < len(rows):
        first = rows["first"][start]
        near = rows["first"][start:] + rows["count"][start:] - first <= _NEWS_BYTES // BLOCK.itemsize
        stop = start + max(1, int(np.argmin(near)) if not near.all() else len(near))
        yield rows[start:stop]
        start = stop


def _news(snapshot: Snapshot, rows: npt.NDArray[np.void], counters: SnapshotCounters) -> News:
    first = int(rows["first"][0])
    blocks = snapshot.read_blocks(first, int(rows["first"][-1] + rows["count"][-1]) - first)
    if blocks is None and len(rows) == 1:
        counters.damaged += 1
        counters.lost_segments += 1
        return News()
    news = News()
    if blocks is None:
        for at in range(len(rows)):
            found = _news(snapshot, rows[at : at + 1], counters)
            news.runs += found.runs
            news.bad += found.bad
            news.entries += found.entries
        return news
    entries = entries_of_blocks(blocks)
    for row in rows:
        start = int(row["first"]) - first
        part = entries[start : start + int(row["count"])]
        if row["bad"]:
            news.bad.append(_run(row, part))
        else:
            news.runs.append(_run(row, part))
            news.entries += len(part)
    return news


def _run(row: np.void, entries: npt.NDArray[np.void]) -> Run:
    return Run(
        row["owner16"].tobytes(),
        int(row["number"]),
        int(row["generation"]),
        int(row["purge"]),
        int(row["record_pages"]),
        row["fingerprint16"].tobytes(),
        int(row["time_s"]),
        entries,
    )
