"""A dead author whose segments a test damages, and the recovery of whoever adopts him."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvmoverd.adapters.storage.segments.followers import Followers
from kvmoverd.adapters.storage.segments.recovery import Recovery
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.core.store.places import PAGE_BYTES
from kvmoverd.core.store.segment_header import SegmentHeader
from tests.unit.segment_kit import RECORD_PAGES, SEGMENT_BYTES, Clock, LogKit, PlainIndex, keys_of, tags_of

OWN = "node-0.own"
DEAD = "node-1.dead"

assert SEGMENT_BYTES // PAGE_BYTES // RECORD_PAGES == 85


class PlainCount:
    """Counts what it was asked to look at."""

    def __init__(self) -> None:
        self.looked: list[str] = []
        self.broken: set[str] = set()
        self.pauses = 0

    def look(self, author: str, is_active: Callable[[str, int], bool]) -> Iterator[None]:
        for _ in range(self.pauses):
            yield
        if author in self.broken:
            raise PermissionError(errno.EACCES, "Permission denied", f"{author}/seg")
        if author not in self.looked:
            self.looked.append(author)
        assert is_active(OWN, 1) and not is_active(DEAD, 1)


class World:
    """A dead author with segments, and the recovery of whoever adopts him."""

    def __init__(self, authors: Path) -> None:
        (authors / OWN).mkdir()
        self.kit, self.clock, self.index, self.count = LogKit(authors, DEAD), Clock(), PlainIndex(), PlainCount()
        self.said: list[tuple[str, SegmentHeader, npt.NDArray[np.void], int]] = []
        self.buried: list[tuple[str, list[int]]] = []
        self.fail_publish = 0
        self.surprise = False
        settings = SegmentSettings()
        self.followers = Followers(
            authors, self.index, own=lambda: OWN, machine="here", settings=settings, now_ns=self.clock
        )
        self.recovery = Recovery(
            authors,
            self.followers,
            own=lambda: OWN,
            machine="here",
            settings=settings,
            accountable=lambda: [OWN, DEAD],
            counted=self.count,
            publish=self.publish,
            bury=lambda author, numbers: self.buried.append((author, list(numbers))),
            on_found=self.found,
            now_ns=self.clock,
        )

    def publish(self, author: str, segment: SegmentHeader, entries: npt.NDArray[np.void], time_s: int) -> None:
        if self.surprise:
            self.surprise = False
            raise RuntimeError("nobody has thought of this")
        if self.fail_publish:
            self.fail_publish -= 1
            raise OSError(28, "No space left on device")
        self.said.append((author, segment, entries, time_s))

    def found(self, author: str, segment: SegmentHeader, entries: npt.NDArray[np.void]) -> None:
        segment_id = self.index.add_segment(
            author,
            segment.number,
            fingerprint16=segment.fingerprint[:16],
            generation=segment.generation,
            purge=segment.purge,
            record_pages=segment.record_pages,
        )
        self.index.add_blocks(segment_id, entries)

    def segment(self, number: int, written: range, said: range) -> npt.NDArray[np.void]:
        """A segment with some records written and some of them said to be there; gives entries of all places."""
        header = self.kit.make_segment(number)
        entries = keys_of(number, header.records)
        for index in written:
            self.kit.record(number, index, entries[index])
        self.kit.blocks(entries[said.start : said.stop], segment=number)
        return entries

    def recover(self) -> None:
        self.followers.load()
        self.recovery.adopted(DEAD)
        for _ in range(10_000):
            if not self.recovery.step() and not self.recovery.stats().waiting:
                return
            self.clock.go(1)
        raise AssertionError("the scan never came to an end")

    @property
    def said_tags(self) -> list[set[bytes]]:
        return [tags_of(entries) for _, _, entries, _ in self.said]


class SlowClock:
    """Goes on by 10 ms whenever it is looked at."""

    def __init__(self) -> None:
        self.now_ns = 10**15

    def __call__(self) -> int:
        self.now_ns += 10_000_000
        return self.now_ns
