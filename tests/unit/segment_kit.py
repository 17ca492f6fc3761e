"""A writer of index logs, leases and segments as plain bytes: what tests of readers read, damage and take away."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from kvmoverd.core.record import Header, encode
from kvmoverd.core.store.lease_page import Lease, encode_lease
from kvmoverd.core.store.log_pages import ENTRIES_MAX, ENTRY, Kind, LogPage, author16, encode_page
from kvmoverd.core.store.places import PAGE_BYTES, Place, log_name, segment_name
from kvmoverd.core.store.segment_header import SegmentHeader, encode_segment, records_in

RECORD_PAGES = 3
FINGERPRINT = b"fingerprint-of-a-namespace-32-by"
SEGMENT_BYTES = 1 << 20


def keys_of(seed: int, count: int) -> npt.NDArray[np.void]:
    """Entries with random keys, one record after the other, as an array of `ENTRY`."""
    entries = np.zeros(count, ENTRY)
    entries["key"] = np.random.default_rng(seed).integers(1, 1 << 63, (count, 4), dtype=np.uint64)
    entries["page"] = 1 + RECORD_PAGES * np.arange(count)
    entries["depth"] = np.arange(count)
    return entries


@dataclass
class LogKit:
    """One author's directory, written by nobody else."""

    authors: Path
    name: str
    pages: int = 64
    log: int = 0
    at: int = 0
    segments: dict[int, SegmentHeader] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.directory / "seg").mkdir(parents=True)
        self.make_log(1)
        self.log, self.at = 1, 1
        self.make_log(2)

    @property
    def directory(self) -> Path:
        return self.authors / self.name

    def log_path(self, number: int = 0) -> Path:
        return self.directory / log_name(number or self.log)

    def make_log(self, number: int) -> None:
        with open(self.log_path(number), "wb") as file:
            file.write(encode_page(LogPage(Kind.HEAD, number, 0, author=self.name)))
            file.truncate(self.pages * PAGE_BYTES)

    def raw(self, at: int, raw: bytes, log: int = 0) -> None:
        """Puts bytes where page `at` lies."""
        with open(self.log_path(log), "r+b") as file:
            file.seek(at * PAGE_BYTES)
            file.write(raw)

    def put(self, kind: Kind, **fields: object) -> LogPage:
        """Writes the next page; the next log where this one has only its last page left."""
        if self.at == self.pages - 1:
            self.seal()
        page = LogPage(kind, self.log, self.at, **fields)  # type: ignore[arg-type]
        self.raw(self.at, encode_page(page))
        self.at += 1
        return page

    def seal(self, *, written: bool = True) -> None:
        if written:
            self.raw(self.at, encode_page(LogPage(Kind.SEAL, self.log, self.at)))
        self.make_log(self.log + 2)
        self.log, self.at = self.log + 1, 1

    def blocks(
        self,
        entries: npt.NDArray[np.void],
        *,
        segment: int = 1,
        owner: str = "",
        purge: int = 0,
        per_page: int = ENTRIES_MAX,
        kind: Kind = Kind.BLOCKS,
    ) -> None:
        """Says that these blocks of a segment are durable, whether they are there or not."""
        owner16 = author16(owner) if owner else bytes(16)
        for start in range(0, len(entries), per_page):
            self.put(
                kind,
                segment=segment,
                generation=100 + segment,
                purge=purge,
                record_pages=RECORD_PAGES,
                fingerprint16=FINGERPRINT[:16],
                time_s=1_700_000_000,
                owner16=owner16,
                entries=entries[start : start + per_page],
            )

    def tombstone(self, numbers: Sequence[int], *, owner: str = "") -> None:
        self.put(Kind.TOMBSTONE, segments=tuple(numbers), owner16=author16(owner) if owner else bytes(16))

    def beat(
        self, beat: int, *, machine: str = "elsewhere", pid: int = 1, start_ticks: int = 1, ended: bool = False
    ) -> None:
        lease = Lease(beat, pid, start_ticks, self.log + 1, max(self.segments, default=0), machine, ended)
        (self.directory / "lease").write_bytes(encode_lease(lease))

    def make_segment(self, number: int, *, record_pages: int = RECORD_PAGES, purge: int = 0) -> SegmentHeader:
        """A segment file of its full size, with a header page and no records."""
        records = records_in(SEGMENT_BYTES, record_pages * PAGE_BYTES)
        header = SegmentHeader(
            FINGERPRINT, self.name, number, 100 + number, purge, record_pages, records, SEGMENT_BYTES, 1
        )
        with open(self.segment_path(number), "wb") as file:
            file.write(encode_segment(header))
            file.truncate(SEGMENT_BYTES)
        self.segments[number] = header
        return header

    def segment_path(self, number: int) -> Path:
        return self.directory / "seg" / segment_name(number)

    def record(
        self, number: int, index: int, entry: np.void, *, generation: int = 0, fingerprint: bytes = FINGERPRINT
    ) -> None:
        """Writes a whole record of this key into a segment, with a random payload that ends in mid-page."""
        header = self.segments[number]
        payload = os.urandom((header.record_pages - 1) * PAGE_BYTES - 100)
        half = len(payload) // 2
        head = Header(
            fingerprint=fingerprint,
            key=entry["key"].tobytes(),
            parent=int(entry["parent"]).to_bytes(8, "little") + bytes(24),
            depth=int(entry["depth"]),
            generation=generation or header.generation,
            block_tokens=16,
            payload_bytes=len(payload),
            write_time_ns=1,
            flags=0,
            layer_crcs=(crc32c(payload[:half]), crc32c(payload)),
        )
        with open(self.segment_path(number), "r+b") as file:
            file.seek(header.page_of(index) * PAGE_BYTES)
            file.write(encode(head) + payload)


class Clock:
    """A monotonic clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 1_000_000_000

    def __call__(self) -> int:
        return self.now

    def go(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)


class PlainIndex:
    """An index as a dict: which keys are alive, by author and segment, and in which order calls came."""

    def __init__(self) -> None:
        self.ids: dict[tuple[str, int], int] = {}
        self.blocks: dict[int, dict[bytes, int]] = {}
        self.left_out: set[bytes] = set()
        self.order: list[tuple[str, int]] = []

    def add_segment(
        self, author: str, number: int, *, fingerprint16: bytes, generation: int, purge: int, record_pages: int
    ) -> int:
        if fingerprint16 in self.left_out:
            return -1
        return self.ids.setdefault((author, number), len(self.ids))

    def add_blocks(self, segment_id: int, entries: npt.NDArray[np.void]) -> None:
        found = self.blocks.setdefault(segment_id, {})
        for tag, page in zip(entries["key"][:, 0].tolist(), entries["page"].tolist(), strict=True):
            found[tag.to_bytes(8, "little")] = page
        self.order.append(next(name for name, number in self.ids.items() if number == segment_id))

    def add_many(self, parts: Sequence[tuple[int, npt.NDArray[np.void]]], *, old: bool = False) -> None:
        for segment_id, entries in parts:
            self.add_blocks(segment_id, entries)

    def drop_segments(self, author: str, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.blocks.pop(self.ids.get((author, number), -1), None)

    def mark_bad(self, fingerprint16: bytes, key: bytes, place: Place, *, for_s: float | None) -> None:
        found = self.blocks.get(self.ids.get((place.author, place.segment), -1), {})
        if found.get(key[:8]) == place.page:
            del found[key[:8]]

    def drop_author(self, author: str) -> None:
        self.drop_segments(author, [number for name, number in self.ids if name == author])

    def tags(self, author: str, segment: int = 1) -> set[bytes]:
        """First 8 bytes of the keys that are known there."""
        return set(self.blocks.get(self.ids.get((author, segment), -1), {}))


def tags_of(entries: npt.NDArray[np.void]) -> set[bytes]:
    return {tag.to_bytes(8, "little") for tag in entries["key"][:, 0].tolist()}
