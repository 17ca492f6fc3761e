"""One group's commit: segments synced, index pages written, log synced, own index told, ends called."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvmoverd.adapters.storage.block_io import DISK_FULL
from kvmoverd.adapters.storage.segments.author import GONE, Author
from kvmoverd.adapters.storage.segments.log_writer import LogWriter
from kvmoverd.adapters.storage.segments.parts import WrittenIndex
from kvmoverd.adapters.storage.segments.writes import Append, AppendCounters, Appended, failure
from kvmoverd.adapters.storage.segments.writes_io import WriteIo
from kvmoverd.adapters.storage.segments.writes_segments import GrowingSegment, GrowingSegments
from kvmoverd.core.status import Reason
from kvmoverd.core.store.log_pages import ENTRIES_MAX, Kind, LogPage, about, entries_of

Tell = Callable[[Append, Appended], None]


class Commits:
    """Commits groups for one author, one after another: his log, and his segments that are being filled."""

    def __init__(
        self,
        author: Author,
        log: LogWriter,
        segments: GrowingSegments,
        io: WriteIo,
        index: WrittenIndex,
        *,
        purge_of: Callable[[bytes], int],
        counters: AppendCounters,
        tell: Tell,
        more_room: Callable[[], bool],
    ) -> None:
        self.author, self.log, self.segments = author, log, segments
        self._io, self._index = io, index
        self._purge_of, self._counters, self._tell, self._more_room = purge_of, counters, tell, more_room

    def run(self, group: Sequence[Append]) -> None:
        """Each of them is told how it ended; what fails, fails with its segment, or with its page.

        Raises `Fenced` before any of it is published, `OSError` when that can't be found out.
        """
        by_segment: dict[GrowingSegment, list[Append]] = {}
        for append in group:
            assert append.segment is not None, f"{append.key.hex()} has no place"
            by_segment.setdefault(append.segment, []).append(append)
        pages: list[tuple[GrowingSegment, list[Append]]] = []
        for segment, appends in by_segment.items():
            if self._is_durable(segment, appends):
                pages += [(segment, appends[at : at + ENTRIES_MAX]) for at in range(0, len(appends), ENTRIES_MAX)]
        if pages:
            self.author.check()
            self._publish(pages)
        self._counters.commits += 1

    def _is_durable(self, segment: GrowingSegment, appends: list[Append]) -> bool:
        """Syncs. After a failure nobody knows what is on the disk, and the next sync would not say: no more goes there."""
        if not segment.broken:
            try:
                self._io.sync(segment.fd)
            except OSError as error:
                self._look_if_gone(error)
                segment.owner.retire(segment, broken=True)
                self._fail(appends, failure(error))
                return False
            self._counters.segment_syncs += 1
        if segment.broken:
            self._fail(appends, Appended(Reason.IO_ERROR, f"a sync of {segment.header.number} failed before"))
            return False
        if segment.header.purge != self._purge_of(segment.header.fingerprint[:16]):
            self._fail(appends, Appended(Reason.IO_ERROR, "the namespace was purged meanwhile"))
            return False
        return True

    def _publish(self, pages: list[tuple[GrowingSegment, list[Append]]]) -> None:
        time_s = int(time.time())
        encoded = [_page(segment, appends, time_s) for segment, appends in pages]
        failures = self._publish_where_room(encoded)
        for error in failures:
            self._look_if_gone(error)
        for (segment, appends), page, error in zip(pages, encoded, failures, strict=True):
            if error is not None:
                self._fail(appends, failure(error))
                continue
            self._show(segment, page)
            for append in appends:
                self._tell(append, Appended(Reason.OK, place=segment.place(append.index)))

    def _look_if_gone(self, error: OSError | None) -> None:
        """Raises `Fenced` when something failed as the author's directory is gone: then all is written again elsewhere."""
        if error is not None and error.errno in GONE:
            self.author.look()

    def _publish_where_room(self, pages: list[LogPage]) -> list[OSError | None]:
        """For each page whether it failed. For a new log the disk may be too full: once more, then, after room was made."""
        failures = self.log.publish(pages)
        self._counters.log_syncs += 1
        full = [at for at, failure in enumerate(failures) if failure is not None and failure.errno in DISK_FULL]
        if full and self._more_room():
            for at, failure in zip(full, self.log.publish([pages[at] for at in full]), strict=True):
                failures[at] = failure
        return failures

    def _show(self, segment: GrowingSegment, page: LogPage) -> None:
        header = segment.header
        number = self._index.add_segment(
            header.author,
            header.number,
            fingerprint16=header.fingerprint[:16],
            generation=header.generation,
            purge=header.purge,
            record_pages=header.record_pages,
        )
        if number >= 0 and page.entries is not None:
            self._index.add_blocks(number, page.entries)

    def close(self) -> None:
        """Takes no more records, and closes the files. It may be called again."""
        self.segments.retire_all()
        self.log.close()

    def _fail(self, appends: list[Append], done: Appended) -> None:
        for append in appends:
            self._tell(append, done)


def _page(segment: GrowingSegment, appends: list[Append], time_s: int) -> LogPage:
    """The page that says that these blocks are durable; its place in the log comes later."""
    header = segment.header
    entries = entries_of([(a.key, a.parent, header.page_of(a.index), a.depth) for a in appends])
    return replace(about(Kind.BLOCKS, header, time_s=time_s), entries=entries)
