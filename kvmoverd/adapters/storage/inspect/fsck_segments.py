"""The check of segments: from the logs to the records, and from the segments back to what no log names."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvmoverd.adapters.storage.block_io import errno_name
from kvmoverd.adapters.storage.inspect.catalog import Catalog, LoggedSegment, Progress, Rows, SegmentName, read_catalog
from kvmoverd.adapters.storage.inspect.log_damage import damaged_pages
from kvmoverd.adapters.storage.inspect.manifests import Spaces, read_spaces
from kvmoverd.adapters.storage.inspect.parallel import each
from kvmoverd.adapters.storage.inspect.place import StorePlace
from kvmoverd.adapters.storage.inspect.records import Finding, RecordReader, SegmentCheck, check_records
from kvmoverd.adapters.storage.inspect.repair import Repair
from kvmoverd.adapters.storage.inspect.report import FsckReport
from kvmoverd.adapters.storage.inspect.strangers import strangers_of_segments
from kvmoverd.adapters.storage.segments.leases import Life
from kvmoverd.adapters.storage.segments.page_files import PageFiles
from kvmoverd.adapters.storage.segments.tail_scan import ScanStats, Tail, scan_segment
from kvmoverd.core.store.places import number_of, segment_name

SEGMENTS = "seg"
_RECORDS_AT_ONCE = 32
"""That one thread reads; segments are few where they are large."""


def check_segments(place: StorePlace, report: FsckReport, *, repair: bool, threads: int, progress: Progress) -> None:
    """Fills in the report. Raises `StorageUnusable`, `OSError` where the root itself can't be read, or repaired."""
    _Check(place, report, threads=threads, progress=progress).run(repair=repair)


class _Check:
    def __init__(self, place: StorePlace, report: FsckReport, *, threads: int, progress: Progress) -> None:
        self._place, self._report, self._threads, self._progress = place, report, threads, progress
        self._files = PageFiles()
        self._local = threading.local()
        self._damaged: list[SegmentCheck] = []
        self._tails: list[Tail] = []
        self._records = 0
        self._bad_heads: set[SegmentName] = set()
        self._tags: dict[bytes, list[npt.NDArray[np.uint64]]] = {}

    def run(self, *, repair: bool) -> None:
        report = self._report
        catalog = read_catalog(self._place, self._progress)
        spaces = read_spaces(self._place.base)
        self._check_manifests(catalog, spaces)
        report.known_bad = sum(len(segment.bad) for segment in catalog.segments())
        report.unread_logs = catalog.stats.unread_logs
        for checked in each(_portions(catalog), lambda some: self._check(*some, spaces), threads=self._threads):
            self._take(checked)
        self._forgive_what_went_meanwhile()
        self._count_blocks()
        for author, life in sorted(catalog.lives.items()):
            with contextlib.suppress(FileNotFoundError):
                self._check_author(catalog, author, is_dead=life is not Life.LIVE)
        for stranger in strangers_of_segments(self._place):
            report.unknown_files += 1
            report.problem(f"{stranger}: an unknown file, no part of a store")
        self._say_damage()
        if repair:
            self._repair(catalog)

    def _check(self, segment: LoggedSegment, rows: Rows, spaces: Spaces) -> SegmentCheck:
        """For one of the threads."""
        if not hasattr(self._local, "reader"):
            self._local.reader = RecordReader()
        path = self._path(segment.author, segment.number)
        return check_records(str(path), segment, rows, spaces.spaces.get(segment.fingerprint16), self._local.reader)

    def _take(self, checked: SegmentCheck) -> None:
        report = self._report
        report.bytes += checked.read_bytes
        if not checked.missing:
            self._count(checked)
        if checked.findings:
            self._damaged.append(checked)
        self._records += len(checked.rows)
        self._progress(f"{self._records} records, {report.bytes >> 20} MiB read")

    def _count(self, checked: SegmentCheck) -> None:
        self._tags.setdefault(checked.segment.fingerprint16, []).append(checked.rows["tag"].copy())

    def _forgive_what_went_meanwhile(self) -> None:
        """A segment that was deleted while this read is not missing: by now its tombstone can be read, too."""
        if any(checked.missing for checked in self._damaged):
            now = read_catalog(self._place, self._progress)
            self._damaged = [
                one for one in self._damaged if not one.missing or now.segment(*one.segment.name) is not None
            ]
            for checked in self._damaged:
                if checked.missing:
                    self._count(checked)

    def _count_blocks(self) -> None:
        for tags in self._tags.values():
            every = np.concatenate(tags)
            blocks = len(np.unique(every))
            self._report.blocks += blocks
            self._report.copies += len(every) - blocks
        self._tags = {}

    def _check_manifests(self, catalog: Catalog, spaces: Spaces) -> None:
        for what in spaces.wrong.values():
            self._report.problem(what)
        self._report.wrong_manifests = len(spaces.wrong)
        for fingerprint16 in sorted(catalog.namespaces() - set(spaces.directories)):
            self._report.wrong_manifests += 1
            self._report.problem(f"{self._place.base / fingerprint16.hex()}: there is none, and segments are of it")

    def _check_author(self, catalog: Catalog, author: str, *, is_dead: bool) -> None:
        """Its logs page by page; of the dead also what lies in segments and no log names. Raises `FileNotFoundError`."""
        report, directory = self._report, self._place.authors / author
        try:
            for log, pages in damaged_pages(directory, self._files, is_dead=is_dead).items():
                report.damaged_pages += len(pages)
                report.problem(f"{directory}: log {log}: damaged pages {', '.join(map(str, pages[:20]))}")
            if is_dead:
                self._scan(catalog, author)
        except FileNotFoundError:
            raise
        except OSError as error:
            report.unread_logs += 1
            report.problem(f"{directory}: {errno_name(error)} ({error})")

    def _scan(self, catalog: Catalog, author: str) -> None:
        names = os.listdir(self._place.authors / author / SEGMENTS)
        numbers = sorted(number for name in names if (number := number_of(name, "seg")) is not None)
        for number in numbers:
            if number in catalog.dropped.get(author, ()):
                continue
            stats = ScanStats()
            for tail in scan_segment(
                self._path(author, number), author, number, catalog.said(author, number), self._files, stats
            ):
                if tail is not None and tail.header.purge >= catalog.purges.get(tail.header.fingerprint[:16], 0):
                    self._tails.append(tail)
                    self._report.unnamed += len(tail.entries)
                    self._report.problem(f"{author}/{number}: {len(tail.entries)} whole records that no log names")
            if stats.bad_segments:
                self._take_bad_head(catalog, author, number)

    def _take_bad_head(self, catalog: Catalog, author: str, number: int) -> None:
        """Nothing is left to say of one whose records all are known to be bad: it goes with the garbage."""
        segment = catalog.segment(author, number)
        if segment is not None and segment.bad and not len(segment.rows()):
            return
        self._bad_heads.add((author, number))
        if segment is None:
            self._report.problem(f"{author}/{number}: its head is damaged, and no log names a record in it")

    def _say_damage(self) -> None:
        report = self._report
        self._bad_heads |= {checked.segment.name for checked in self._damaged if checked.bad_head}
        report.bad_segments = len(self._bad_heads)
        lost: dict[SegmentName, list[Finding]] = {}
        for checked in self._damaged:
            report.unreadable += sum(finding.unreadable for finding in checked.findings)
            report.corrupt += sum(not finding.unreadable for finding in checked.findings)
            report.missing_segments += checked.missing and checked.segment.name not in lost
            if checked.missing or checked.bad_head:
                lost.setdefault(checked.segment.name, []).extend(checked.findings)
                continue
            for finding in checked.findings:
                name = f"{checked.segment.author}/{checked.segment.number}"
                report.problem(f"{name} page {finding.page}: {finding.what}")
        for (author, number), findings in lost.items():
            report.problem(f"{author}/{number}: {len(findings)} blocks are lost: {findings[0].what}")

    def _repair(self, catalog: Catalog) -> None:
        with Repair(self._place, catalog) as repairing:
            for checked in self._damaged:
                bad = [finding for finding in checked.findings if not finding.unreadable]
                self._report.repaired += repairing.bad(checked.segment, bad)
            for tail in self._tails:
                self._report.published += repairing.found(tail)
            repairing.take_over_former()

    def _path(self, author: str, number: int) -> Path:
        return self._place.authors / author / SEGMENTS / segment_name(number)


def _portions(catalog: Catalog) -> Iterator[tuple[LoggedSegment, Rows]]:
    """Segments in parts; one of which no good record is known is looked at, too."""
    for segment in catalog.segments():
        rows = segment.rows()
        for start in range(0, max(1, len(rows)), _RECORDS_AT_ONCE):
            yield segment, rows[start : start + _RECORDS_AT_ONCE]
