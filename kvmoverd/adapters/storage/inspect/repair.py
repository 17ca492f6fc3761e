"""What a check says for all daemons to hear, in the log of an author of its own, `_fsck.<random>`: nobody else's is touched.

Such an author has no segments, so nothing else would keep what he says: daemons leave his directory alone, and the next
check that repairs takes it over, says again what still matters, and deletes it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from types import TracebackType

import numpy as np

from kvmoverd.adapters.storage.block_io import choose_io
from kvmoverd.adapters.storage.inspect.catalog import Catalog, LoggedSegment
from kvmoverd.adapters.storage.inspect.place import TEMPS, TRASH, StorePlace
from kvmoverd.adapters.storage.inspect.records import Finding
from kvmoverd.adapters.storage.owners import TempNames
from kvmoverd.adapters.storage.segments.author import SEGMENTS, Author
from kvmoverd.adapters.storage.segments.claims import bid, highest
from kvmoverd.adapters.storage.segments.followed import FSCK_NODE, Listing, node_of
from kvmoverd.adapters.storage.segments.leases import Life
from kvmoverd.adapters.storage.segments.log_reader import LogCounters, LogReader, Run
from kvmoverd.adapters.storage.segments.log_writer import LogWriter
from kvmoverd.adapters.storage.segments.page_files import PageFiles
from kvmoverd.adapters.storage.segments.recovery import pages_about
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.adapters.storage.segments.tail_scan import Tail
from kvmoverd.adapters.storage.segments.writes_io import WriteIo
from kvmoverd.core.store.log_pages import ENTRY, Kind, LogPage, about, author16, paged

LOG_PAGES = 64


class Repair:
    """A context: the author is made when there is something to say first, and has ended afterwards. Raises `OSError`."""

    def __init__(self, place: StorePlace, catalog: Catalog) -> None:
        self._place, self._catalog = place, catalog
        self._names = {author16(name): name for name in catalog.lives}
        self._author: Author | None = None
        self._log: LogWriter | None = None

    def __enter__(self) -> Repair:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._log is not None:
            self._log.close()
        if self._author is not None:
            self._author.end()

    def bad(self, segment: LoggedSegment, findings: Sequence[Finding]) -> int:
        """Says that these records are bad; gives how many."""
        entries = np.zeros(len(findings), ENTRY)
        for at, finding in enumerate(findings):
            entries[at]["key"][0], entries[at]["page"] = finding.tag, finding.page
        words = about(Kind.BAD, segment, time_s=int(time.time()), owner16=author16(segment.author))
        self._publish(paged(words, entries))
        return len(findings)

    def found(self, tail: Tail) -> int:
        """Says that these records are there; gives how many."""
        self._publish(pages_about(tail.header.author, tail.header, tail.entries, tail.time_s))
        return len(tail.entries)

    def take_over_former(self) -> None:
        """What former checks have said is said here, unless it is about segments that are gone; their directories go."""
        former = [name for name in self._catalog.lives if self._is_former(name)]
        if not former or (len(former) == 1 and self._author is None):
            return
        for name in former:
            if bid(self._place.authors / name, self._next_claim(name), self._own().name):
                for kind, run in self._said(name):
                    self._publish(paged(_about(kind, run), run.entries))
                self._throw(name)

    def _is_former(self, name: str) -> bool:
        """Whoever has segments, or whatever else may be there, is no check: nothing of his is thrown away."""
        if node_of(name) != FSCK_NODE or self._catalog.lives[name] is Life.LIVE:
            return False
        try:
            return not os.listdir(self._place.authors / name / SEGMENTS)
        except FileNotFoundError:
            return True

    def _next_claim(self, name: str) -> int:
        claim = highest(self._place.authors / name, PageFiles(pages_max=1))
        return claim.number + 1 if claim else 1

    def _said(self, name: str) -> Iterator[tuple[Kind, Run]]:
        """What an author has said of segments that are alive."""
        directory, files = self._place.authors / name, PageFiles()
        for number in Listing.of(directory).logs:
            reader = LogReader(directory, files, LogCounters(), log=number, follow=False)
            try:
                more = True
                while more:
                    news = reader.read()
                    more = news.more
                    yield from ((Kind.BLOCKS, run) for run in news.runs if self._is_alive(run))
                    yield from ((Kind.BAD, run) for run in news.bad if self._is_alive(run))
            finally:
                reader.close()

    def _is_alive(self, run: Run) -> bool:
        owner = self._names.get(run.owner16)
        return owner is not None and self._catalog.segment(owner, run.segment) is not None

    def _throw(self, name: str) -> None:
        """One rename takes it from all eyes; then it is deleted."""
        place = self._place.base / TRASH / f"{self._own().name}.{name}"
        os.rename(self._place.authors / name, place)
        with contextlib.suppress(OSError):
            shutil.rmtree(place)

    def _own(self) -> Author:
        if self._author is None:
            trial = self._place.base / TEMPS / TempNames().new()
            io = WriteIo(direct=choose_io(str(trial), direct=True).direct)
            self._author = Author(
                self._place.authors,
                node=FSCK_NODE,
                boot_id=secrets.token_hex(8),
                io=io,
                dead_s=SegmentSettings().dead_s,
            )
            self._log = LogWriter(self._author, io, pages=LOG_PAGES)
        return self._author

    def _publish(self, pages: Sequence[LogPage]) -> None:
        """Durably, or raises `OSError`."""
        if not pages:
            return
        self._own()
        assert self._log is not None, "an author has a log"
        for failure in self._log.publish(pages):
            if failure is not None:
                raise failure


def _about(kind: Kind, run: Run) -> LogPage:
    return LogPage(
        kind,
        0,
        0,
        run.segment,
        run.generation,
        run.purge,
        run.record_pages,
        run.fingerprint16,
        run.time_s,
        run.owner16,
    )
