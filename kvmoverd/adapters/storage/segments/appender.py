"""Appends records to segments, and has them committed in groups.

Record bytes, sync of the segment, index page, sync of the log, visible in our own index, told: in this order, always. A
power cut between any two of these loses blocks that nobody was told of; it never shows one that is not there.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from kvmoverd.adapters.storage.block_io import DISK_FULL
from kvmoverd.adapters.storage.segments.author import GONE, Author, Fenced
from kvmoverd.adapters.storage.segments.log_writer import LogWriter
from kvmoverd.adapters.storage.segments.parts import WrittenIndex
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.adapters.storage.segments.writes import Append, AppendCounters, Appended, failure
from kvmoverd.adapters.storage.segments.writes_commit import Commits
from kvmoverd.adapters.storage.segments.writes_io import WriteIo
from kvmoverd.adapters.storage.segments.writes_segments import GrowingSegments
from kvmoverd.core.errors import StorageUnusable
from kvmoverd.core.status import Reason
from kvmoverd.core.store.places import PAGE_BYTES

log = logging.getLogger(__name__)

IDLE_S = 60.0
WAIT_S = 2.0
"""How long an append waits for others: for their commits, or for the room that one of them makes. Reads share its thread."""
QUEUE_GROUPS_MAX = 8
"""Groups that may wait for their commit."""
ROOM_BYTES_MIN = 64 << 20
"""What is asked for, at least, when the disk is full."""
_RENEWALS_MAX = 3


class Appender:
    """Any number of threads append; one thread of its own commits. Makes the first files: raises `OSError`.

    On a full disk it begins without, and makes them when there is room: each heartbeat tries, and an append has room made.
    `purge_of`: the purge number of a namespace, by the first 16 bytes of its fingerprint. `make_room` is asked, in the thread
    of an append or of a commit, to free so many bytes when the disk is full; `make_base` is called before a fresh author
    begins, to make what else of the store was deleted, and may raise `OSError`, `StorageUnusable`. `on_seal` is told of each
    log that is full, `on_grown` that a segment was made.
    """

    def __init__(
        self,
        author: Author,
        io: WriteIo,
        index: WrittenIndex,
        settings: SegmentSettings,
        *,
        purge_of: Callable[[bytes], int],
        name: str = "",
    ) -> None:
        self._io, self._index, self._settings, self._purge_of = io, index, settings, purge_of
        self.make_room: Callable[[int], bool] = lambda bytes_wanted: False
        self.make_base: Callable[[], None] = lambda: None
        self.on_seal: Callable[[int], None] = lambda log: None
        self.on_grown: Callable[[], None] = lambda: None
        self.counters = AppendCounters()
        self._ready = threading.Condition()
        self._written: deque[Append] = deque()
        self._under_way = 0
        self._closing = False
        self._fenced = False
        self._refusal = ""
        self._renewing = threading.Lock()
        self._room_lock = threading.Lock()
        self._rooms_made = 0
        self._commits = self._begin_where_room(author)
        self._thread = threading.Thread(target=self._run, name=f"kvmover-{name}-commit", daemon=True)
        self._thread.start()

    @property
    def author(self) -> Author:
        return self._commits.author

    @property
    def log(self) -> LogWriter:
        return self._commits.log

    @property
    def segments(self) -> GrowingSegments:
        return self._commits.segments

    @property
    def refusal(self) -> str:
        """Why nothing can be written now; empty when it can, as far as is known."""
        if not self.author.born:
            return "the disk is full: nothing can be written until there is room"
        return self._refusal

    def append(self, append: Append) -> None:
        """Writes the record; `append.end` is called when it is durable and visible, or has failed. Blocks for the write."""
        with self._ready:
            limit = QUEUE_GROUPS_MAX * self._settings.commit_blocks
            room = self._ready.wait_for(lambda: len(self._written) < limit or self._closing, WAIT_S)
            if self._closing or not room:
                reason = Reason.SHUTTING_DOWN if self._closing else Reason.DROPPED
                self._end(append, Appended(reason, f"{len(self._written)} records wait for their commit"))
                return
            self._under_way += 1
        try:
            self._write_where_room(append)
        except Exception as error:  # noqa: BLE001 - an append without an end would hold its slot for ever
            with self._ready:
                self._under_way -= 1
                self._ready.notify_all()
            self._fail(append, error)
            return
        with self._ready:
            self._written.append(append)
            self._under_way -= 1
            if len(self._written) in (1, self._settings.commit_blocks) or not self._under_way:
                self._ready.notify_all()

    def heartbeat(self) -> None:
        """For the keeper, every `heartbeat_s`. Raises `OSError`."""
        commits = self._commits
        try:
            commits.author.heartbeat()
            # A renewal that has failed is tried again, whether something is to be written or not.
            fenced = self._fenced
        except Fenced:
            fenced = True
        if fenced:
            self._renew(commits)
        self._commits.segments.retire_idle(time.monotonic_ns())

    def close(self, timeout_s: float) -> bool:
        """Commits what is written; what comes later ends with SHUTTING_DOWN. True when nothing is under way any more."""
        with self._ready:
            self._closing = True
            self._ready.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._commits.close()
        self._commits.author.end()
        return True

    def _begin(self, author: Author) -> Commits:
        try:
            log = LogWriter(author, self._io, pages=self._settings.log_pages)
        except OSError:
            author.discard()
            raise
        log.on_seal = self._tell_seal
        self._fenced = not author.born
        return Commits(
            author,
            log,
            GrowingSegments(author, self._io, segment_bytes=self._settings.segment_bytes, on_made=self._tell_grown),
            self._io,
            self._index,
            purge_of=self._purge_of,
            counters=self.counters,
            tell=self._end,
            more_room=self._room_for_a_log,
        )

    def _begin_where_room(self, author: Author) -> Commits:
        try:
            return self._begin(author)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            return self._begin(author.successor(born=False))

    def _tell_seal(self, log: int) -> None:
        self.on_seal(log)

    def _tell_grown(self) -> None:
        self.on_grown()

    def _renew(self, fenced: Commits) -> None:
        """Goes on under a fresh name, unless another thread has seen to that. Until it succeeds nothing is written."""
        with self._renewing:
            if self._commits is not fenced:
                return
            self._fenced = True
            fenced.close()
            fenced.author.end()
            try:
                self.make_base()
                self._commits = self._begin(fenced.author.successor())
            except (OSError, StorageUnusable) as error:
                self._refuse(fenced.author, f"nothing can be written: {error}")
                if isinstance(error, OSError):
                    raise
                raise OSError(errno.EIO, str(error)) from error
            self._refusal = ""
            self.counters.renewals += 1
            if fenced.author.born:
                was, now = fenced.author.directory, self._commits.author.name
                log.warning("%s was adopted, deleted or replaced: this node writes as %s now", was, now)

    def _refuse(self, author: Author, why: str) -> None:
        """Says so once, however often it is tried again."""
        if why != self._refusal:
            log.warning("%s is lost, and no other could be begun: %s", author.directory, why)
        self._refusal = why

    def _write_where_room(self, append: Append) -> None:
        """Writes it, and once more after room was made on a full disk, or the author renewed whose directory is gone."""
        seen, commits = self._rooms_made, self._commits
        try:
            self._write(append)
        except OSError as error:
            if error.errno in GONE:
                try:
                    commits.author.look()
                except Fenced:
                    self._renew(commits)
                else:
                    raise
            elif error.errno not in DISK_FULL or not self._more_room(2 * len(append.record), seen):
                raise
            self._write(append)

    def _room_for_a_log(self) -> bool:
        return self._more_room(2 * self._settings.log_pages * PAGE_BYTES, self._rooms_made)

    def _more_room(self, wanted_bytes: int, seen: int) -> bool:
        """Has room made, unless another thread had since `seen` was read."""
        self.counters.full_disks += 1
        if not self._room_lock.acquire(timeout=WAIT_S):
            return False
        try:
            if self._rooms_made == seen:
                if not self.make_room(max(wanted_bytes, ROOM_BYTES_MIN)):
                    return False
                self._rooms_made += 1
            return True
        finally:
            self._room_lock.release()

    def _write(self, append: Append) -> None:
        if self._fenced:
            self._renew(self._commits)
        purge = self._purge_of(append.fingerprint[:16])
        segment, index = self._commits.segments.take(append.fingerprint, len(append.record), purge)
        try:
            append.seal(segment.header.generation)
            self._io.write(segment.fd, append.record, segment.place(index).offset_bytes)
        except BaseException:
            segment.owner.ended(segment)
            raise
        append.segment, append.index = segment, index

    def _run(self) -> None:
        while group := self._gather():
            began_ns = time.monotonic_ns()
            try:
                self._commit(group)
            except Exception as error:  # noqa: BLE001 - each of them must end, and the next group be served
                for append in group:
                    self._fail(append, error)
            took_s = (time.monotonic_ns() - began_ns) / 1e9
            self.counters.longest_commit_s = max(self.counters.longest_commit_s, took_s)
            self._commits.segments.prepare()

    def _gather(self) -> list[Append]:
        """The next group: full, or waited for long enough, or nothing else on its way. Empty: closed, and all is done."""
        group_max = self._settings.commit_blocks
        with self._ready:
            while not self._written:
                if self._closing and not self._under_way:
                    return []
                self._ready.wait(IDLE_S)
            deadline_s = time.monotonic() + self._settings.commit_wait_s
            while len(self._written) < group_max and self._under_way:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    break
                self._ready.wait(left_s)
            group = [self._written.popleft() for _ in range(min(group_max, len(self._written)))]
            self._ready.notify_all()
            return group

    def _commit(self, group: list[Append]) -> None:
        for _ in range(_RENEWALS_MAX):
            commits = self._commits
            try:
                group = self._all_of(commits.segments, group)
                commits.run(group)
            except Fenced:
                self._renew(commits)
            else:
                return
        raise OSError(f"the author was fenced {_RENEWALS_MAX} times in a row")

    def _all_of(self, segments: GrowingSegments, group: list[Append]) -> list[Append]:
        """Those that were written under a former author are written again; without those that fail, or have ended."""
        kept = []
        for append in group:
            if append.ended:
                continue
            segment = append.segment
            if segment is not None and segment.owner is not segments:
                segment.owner.ended(segment)
                append.segment = None
                try:
                    self._write_where_room(append)
                except Exception as error:  # noqa: BLE001 - it fails alone
                    self._fail(append, error)
                    continue
            kept.append(append)
        return kept

    def _fail(self, append: Append, error: Exception) -> None:
        self._end(append, failure(error))

    def _end(self, append: Append, done: Appended) -> None:
        """Tells it, once."""
        if append.ended:
            return
        append.ended = True
        counters = self.counters
        if done.reason is Reason.OK:
            counters.appended_blocks += 1
            counters.appended_bytes += len(append.record)
            counters.last_good_ns = time.monotonic_ns()
        else:
            counters.failed_blocks += 1
        if append.segment is not None:
            append.segment.owner.ended(append.segment)
        append.end(done)
