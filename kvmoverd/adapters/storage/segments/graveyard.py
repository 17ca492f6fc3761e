"""The way out of a segment: told as dead, invisible, left alone for a grace, moved into the trash, deleted.

A crash between any two of these steps leaves what the next start finds: a file whose tombstone is in the log waits once more
and goes; the trash is emptied. Readers of other nodes have the grace to end; later they miss.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvmoverd.adapters.storage.segments.followed import SegmentBits
from kvmoverd.adapters.storage.segments.usage import SegmentFile, Usage
from kvmoverd.adapters.storage.trash import Trash

BURY_MAX = 256
"""Segments in one step."""
RETRY_S = 10.0
"""When a segment that could not be moved or deleted is tried again: those behind it have their turn meanwhile."""
_SECOND_NS = 10**9


class DyingIndex(Protocol):
    """The index, as whoever drops segments sees it."""

    def drop_segments(self, author: str, numbers: Sequence[int]) -> None:
        """Invisible at once."""


class Tombstones(Protocol):
    """Whoever writes this node's log."""

    def tombstone(self, numbers: Sequence[int], owner: str = "") -> None:
        """Says durably that these segments of `owner` are dead. Raises `OSError`."""


@dataclass(slots=True)
class Dying:
    """A segment that is tombstoned; it may be deleted from `due_ns` on."""

    segment: SegmentFile
    told_ns: int
    due_ns: int


class Graveyard:
    """Segments of the authors that this node owns, on their way out. Thread-safe.

    `files_drop`: closes what readers of this node have open. `log`: the log that is written now. `told_dead`: segments that
    the logs of others say are dead, by author.
    """

    def __init__(
        self,
        *,
        log: Callable[[], Tombstones],
        index: DyingIndex,
        usage: Usage,
        trash: Trash,
        files_drop: Callable[[str, Iterable[int]], None],
        told_dead: Callable[[], Mapping[str, Sequence[int]]] = dict,
        grace_s: float,
        now_ns: Callable[[], int],
    ) -> None:
        self._log, self._index, self._usage, self._trash = log, index, usage, trash
        self._told_dead = told_dead
        self._files_drop, self._grace_ns, self._now_ns = files_drop, round(grace_s * _SECOND_NS), now_ns
        self._lock = threading.RLock()
        self._dying: dict[tuple[str, int], Dying] = {}
        self._untold: dict[str, list[int]] = {}
        self._repeated_in: Tombstones | None = None
        self._repeated: dict[str, SegmentBits] = {}
        self.untold_segments = 0
        """Deleted on a full disk before their tombstones could be written; those follow."""
        self.failures = 0
        """Moves, deletions and tombstones of dead segments that failed, at each try."""

    def __contains__(self, name: tuple[str, int]) -> bool:
        return name in self._dying

    def waiting(self) -> tuple[int, int, float]:
        """Segments that wait for the end of their grace, their bytes, and how long the oldest has been told, in seconds."""
        with self._lock:
            dying = list(self._dying.values())
        oldest_s = max(((self._now_ns() - one.told_ns) / _SECOND_NS for one in dying), default=0.0)
        return len(dying), sum(one.segment.size_bytes for one in dying), oldest_s

    def bury(self, segments: Iterable[SegmentFile]) -> list[SegmentFile]:
        """Tombstones these, and makes them invisible; gives those that it did. Raises `OSError` with none of an author's done."""
        buried: list[SegmentFile] = []
        by_author: dict[str, list[SegmentFile]] = {}
        with self._lock:
            for segment in segments:
                if segment.name not in self._dying and self._usage.find(*segment.name) is segment:
                    by_author.setdefault(segment.author, []).append(segment)
            for author, some in by_author.items():
                self._log().tombstone([segment.number for segment in some], author)
                self._lay_down(author, some)
                buried += some
        return buried

    def lay_down(self, segments: Iterable[SegmentFile]) -> None:
        """As `bury`, for segments that are dead by a tombstone or a purge already: after another grace they go."""
        with self._lock:
            for segment in segments:
                if segment.name not in self._dying:
                    self._lay_down(segment.author, [segment])

    def finish(self, owned: Collection[str]) -> bool:
        """Moves those whose grace is over into the trash; True when there are more. What can't be moved is tried again later.

        What belongs to an author that is not owned any more is left to who owns it now.
        """
        now_ns = self._now_ns()
        with self._lock:
            for name in [name for name in self._dying if name[0] not in owned]:
                del self._dying[name]
            due = [one for one in self._dying.values() if one.due_ns <= now_ns]
            for one in due[:BURY_MAX]:
                segment = one.segment
                try:
                    self._trash.throw(segment.path, f"{segment.author}.{segment.number:08d}.seg")
                except OSError:
                    self._put_off(one)
                else:
                    self._gone(one)
        return len(due) > BURY_MAX

    def tell(self, owned: Collection[str]) -> None:
        """Writes the tombstones that a full disk had no room for; those that fail stay for the next time."""
        with self._lock:
            for author in list(self._untold):
                try:
                    if author in owned:
                        self._log().tombstone(self._untold[author], author)
                except OSError:
                    self.failures += 1
                else:
                    del self._untold[author]

    def repeat(self, leaving: Collection[str]) -> None:
        """Says again what is dead, as the logs of these authors go, which may be all that says so. Raises `OSError`.

        Else whoever starts later takes what their former owners, or those that they had adopted, have said of it for true.
        Each is said once in the log that is written now, however many authors leave.
        """
        log = self._log()
        if self._repeated_in is not log:
            self._repeated_in, self._repeated = log, {}
        told_dead = self._told_dead()
        self._repeated = {author: bits for author, bits in self._repeated.items() if author in told_dead}
        for author, numbers in told_dead.items():
            said = self._repeated.get(author, SegmentBits())
            fresh = [number for number in numbers if number not in said]
            if fresh and author not in leaving:
                log.tombstone(fresh, author)
                for number in fresh:
                    said.add(number)
                self._repeated[author] = said

    def delete_waiting(self, bytes_wanted: int, deadline_s: float) -> int:
        """Ends the grace of as many as it takes to free so many bytes; gives the bytes.

        Until the deadline on the monotonic clock: another thread may be moving files of a filesystem that hangs.
        """
        freed_bytes = 0
        with self._held(deadline_s) as held:
            for one in list(self._dying.values()) if held else ():
                if freed_bytes >= bytes_wanted or time.monotonic() > deadline_s:
                    break
                freed_bytes += self._delete(one)
        return freed_bytes

    def delete_now(self, segment: SegmentFile, deadline_s: float) -> int:
        """Tombstones and deletes one at once; gives the bytes: 0 when it was on its way already, can't go, or time is over.

        Where the log has no room for the tombstone it is deleted all the same, or the disk would stay full: whoever reads it
        then misses, and the tombstone follows.
        """
        with self._held(deadline_s) as held:
            if not held or segment.name in self._dying or self._usage.find(*segment.name) is not segment:
                return 0
            try:
                self._log().tombstone([segment.number], segment.author)
            except OSError:
                self._untold.setdefault(segment.author, []).append(segment.number)
                self.untold_segments += 1
            self._lay_down(segment.author, [segment])
            return self._delete(self._dying[segment.name])

    def _lay_down(self, author: str, segments: Sequence[SegmentFile]) -> None:
        now_ns = self._now_ns()
        for segment in segments:
            self._dying[segment.name] = Dying(segment, now_ns, now_ns + self._grace_ns)
        self._index.drop_segments(author, [segment.number for segment in segments])

    @contextlib.contextmanager
    def _held(self, deadline_s: float) -> Iterator[bool]:
        """The lock, if it can be had in time."""
        held = self._lock.acquire(timeout=max(0.0, deadline_s - time.monotonic()))
        try:
            yield held
        finally:
            if held:
                self._lock.release()

    def _delete(self, one: Dying) -> int:
        """Gives the bytes that are free now."""
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(one.segment.path)
        except OSError:
            self._put_off(one)
            return 0
        self._gone(one)
        return one.segment.size_bytes

    def _put_off(self, one: Dying) -> None:
        self.failures += 1
        one.due_ns = max(one.due_ns, self._now_ns() + round(RETRY_S * _SECOND_NS))

    def _gone(self, one: Dying) -> None:
        segment = one.segment
        self._files_drop(segment.author, [segment.number])
        self._usage.gone(segment)
        del self._dying[segment.name]
