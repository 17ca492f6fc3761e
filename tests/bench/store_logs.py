"""A large store, made in seconds: what a former start of node `bench` left, in real logs and segments.

Its logs name all blocks, 32 to a page as group commits leave them. Its segments have their full size and are sparse, but for
one whole record in some of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvmoverd.adapters.storage.segments.root import SegmentRoot
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.adapters.storage.segments.writes_io import page_memory
from kvmoverd.core.keys import ROOT
from kvmoverd.core.layout import HEADER_BYTES
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.record import seal
from kvmoverd.core.store.lease_page import Lease, encode_lease
from kvmoverd.core.store.log_pages import ENTRY, Kind, LogPage, encode_page
from kvmoverd.core.store.places import PAGE_BYTES, log_name, segment_name
from kvmoverd.core.store.segment_header import SegmentHeader, encode_segment, records_in

SETTINGS = SegmentSettings()
AUTHOR = "bench.former"
SAMPLES = 32


@dataclass(frozen=True, slots=True)
class Sample:
    """A block whose record is really there."""

    key: bytes
    seed: int

    def payload(self, size_bytes: int) -> bytes:
        return np.random.default_rng(self.seed).bytes(size_bytes)


def make_store(root: Path, space: Namespace, blocks: int) -> list[Sample]:
    """Fills an empty directory; the samples lie evenly in the store, the first not at its begin."""
    place = SegmentRoot(root)
    place.open_namespace(space)
    directory = place.authors / AUTHOR
    (directory / "seg").mkdir(parents=True)
    (directory / "lease").write_bytes(encode_lease(Lease(1, 1, 1, 1, 1, "bench", ended=True)))
    record_pages = space.layout.record_bytes // PAGE_BYTES
    records = records_in(SETTINGS.segment_bytes, space.layout.record_bytes)
    segments = -(-blocks // records)
    chance = np.random.default_rng(blocks)
    samples = []
    with _Log(directory, space) as log:
        for number in range(1, segments + 1):
            entries = np.zeros(min(records, blocks - (number - 1) * records), ENTRY)
            entries["key"] = chance.integers(1, 1 << 63, (len(entries), 4), np.uint64)
            entries["page"] = 1 + record_pages * np.arange(len(entries))
            header = SegmentHeader(
                space.fingerprint, AUTHOR, number, number, 0, record_pages, records, SETTINGS.segment_bytes, 1
            )
            sample = Sample(entries[-1]["key"].tobytes(), number)
            has_sample = number % max(1, segments // SAMPLES) == 0
            _make_segment(directory, space, header, entries[-1], sample if has_sample else None)
            samples += [sample] if has_sample else []
            log.say(header, entries)
    return samples


def log_files(root: Path) -> Iterator[Path]:
    return (root / "kvm1" / "authors").glob("*/log.*")


def _make_segment(
    directory: Path, space: Namespace, header: SegmentHeader, entry: np.void, sample: Sample | None
) -> None:
    with open(directory / "seg" / segment_name(header.number), "wb") as file:
        file.write(encode_segment(header))
        file.truncate(header.segment_bytes)
        if sample is not None:
            layout = space.layout
            record = page_memory(layout.record_bytes)
            record[HEADER_BYTES : HEADER_BYTES + layout.block_bytes] = sample.payload(layout.block_bytes)
            seal(record, space, key=sample.key, parent=ROOT, depth=0, write_time_ns=1, generation=header.generation)
            file.seek(int(entry["page"]) * PAGE_BYTES)
            file.write(record)


class _Log:
    """Writes an author's logs, one after the other."""

    def __init__(self, directory: Path, space: Namespace) -> None:
        self._directory, self._space, self._number = directory, space, 0
        self._pages: list[bytes] = []

    def __enter__(self) -> _Log:
        self._begin()
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def say(self, segment: SegmentHeader, entries: npt.NDArray[np.void]) -> None:
        for first in range(0, len(entries), SETTINGS.commit_blocks):
            if len(self._pages) == SETTINGS.log_pages - 1:
                self._put(LogPage(Kind.SEAL, self._number, len(self._pages)))
                self._end()
                self._begin()
            page = LogPage(
                Kind.BLOCKS,
                self._number,
                len(self._pages),
                segment=segment.number,
                generation=segment.generation,
                record_pages=segment.record_pages,
                fingerprint16=self._space.fingerprint[:16],
                entries=entries[first : first + SETTINGS.commit_blocks],
            )
            self._put(page)

    def _begin(self) -> None:
        self._number, self._pages = self._number + 1, []
        self._put(LogPage(Kind.HEAD, self._number, 0, author=AUTHOR))

    def _put(self, page: LogPage) -> None:
        self._pages.append(encode_page(page))

    def _end(self) -> None:
        with open(self._directory / log_name(self._number), "wb") as file:
            file.write(b"".join(self._pages))
            file.truncate(SETTINGS.log_pages * PAGE_BYTES)
            file.flush()
            os.fsync(file.fileno())
