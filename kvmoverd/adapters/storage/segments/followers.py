"""Follows the logs of all authors of a root into the index: those of other nodes, and of this node's former starts."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

from kvmoverd.adapters.storage.segments.backlog import Backlog
from kvmoverd.adapters.storage.segments.follow_stats import FollowStats
from kvmoverd.adapters.storage.segments.followed import (
    Followed,
    IndexSink,
    Listing,
    is_author,
    node_of,
)
from kvmoverd.adapters.storage.segments.leases import Life
from kvmoverd.adapters.storage.segments.log_reader import LOG_PAGES_MAX, PEEK_PAGES, LogCounters, LogReader, News
from kvmoverd.adapters.storage.segments.namesakes import Namesakes
from kvmoverd.adapters.storage.segments.page_files import PAGES_AT_ONCE, PageFiles
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.adapters.storage.segments.snapshots import own_segments
from kvmoverd.adapters.storage.segments.telling import Telling

AUTHORS_MAX = 1 << 14
SCAN_S = 1.0
_STEP_NS = 50_000_000
_HEARD_MAX = 1024


class Followers:
    """`step` is the keeper's job, with `SegmentSettings.poll_s` as its period; `heard`, `wanted`, `life`, `stats` are for
    any thread.

    `own`: the author that this process writes as; the index hears of him from elsewhere, but for what is `wanted`.
    `on_namespace` is told of each fingerprint before the first of its segments. `machine`: as in our own lease.
    """

    def __init__(
        self,
        authors: Path,
        index: IndexSink,
        *,
        own: Callable[[], str],
        machine: str,
        settings: SegmentSettings,
        now_ns: Callable[[], int],
        direct: bool = True,
        on_namespace: Callable[[bytes], None] = lambda fingerprint16: None,
    ) -> None:
        self._authors, self._own, self._machine = authors, own, machine
        self._settings, self._now_ns = settings, now_ns
        self._files, self._pages = PageFiles(direct=direct), LogCounters()
        self._followed: dict[str, Followed] = {}
        self._self: Followed | None = None
        self._backlog = Backlog(
            self._files, self._pages, is_own_node=lambda author: author.node == node_of(own()), now_ns=now_ns
        )
        self._heard: deque[tuple[str, int]] = deque(maxlen=_HEARD_MAX)
        self._wanted: dict[bytes, None] = {}
        self._stats = FollowStats()
        self._telling = Telling(index, self._stats, on_namespace)
        self.namesakes = Namesakes(own)
        self.scanned = False
        """Whether it is known who is there."""
        self._began_ns = self._scan_due_ns = now_ns()

    def load(self) -> None:
        """Reads all that there is; for those who can wait, as long as that takes."""
        while self.step() or not self._stats.loaded:
            pass

    def step(self) -> bool:
        """Looks wherever that is due, and reads on for a twentieth of a second; True when there is more to read."""
        # What could not be told comes before what is new.
        self._telling.flush()
        self._meet_own()
        self._listen()
        if self._now_ns() >= self._scan_due_ns:
            self._scan()
        more = self._look_at_tails()
        # What is new comes first, and is not to wait for what is old.
        self._telling.flush()
        deadline_ns = self._now_ns() + _STEP_NS
        while self._now_ns() < deadline_ns and (found := self._backlog.step()) is not None:
            item, news = found
            try:
                self._telling.take(item.author.name16, news, item.only, old=True)
            except Exception:
                self._backlog.again(item)
                raise
        self._telling.flush()
        more = more or self._backlog.busy
        self._say_loaded()
        return more

    def heard(self, author: str, log: int) -> None:
        """A peer says that this author has this log: it is looked for at the next step, by its name."""
        self._heard.append((author, log))

    def wanted(self, fingerprint16: bytes) -> None:
        """The index wants a namespace that it had left out: all logs are read for it again, the own ones too."""
        self._wanted[fingerprint16] = None

    def life(self, author: str) -> Life | None:
        """None for an author who is not known, or not any more."""
        followed = self._followed.get(author)
        return None if followed is None else followed.lease.life

    def silent_s(self, author: str) -> float:
        """For how long he has shown no sign of life."""
        followed = self._followed.get(author)
        return 0.0 if followed is None else followed.lease.silent_ns / 1e9

    def known(self) -> list[str]:
        """Authors that are followed, the own one not among them."""
        return list(self._followed)

    def name_of(self, name16: bytes) -> str | None:
        return self._telling.name_of(name16)

    def dropped(self, author: str, segment: int) -> bool:
        """Whether somebody has said that this segment is not to be read any more."""
        return self._telling.dropped(author, segment)

    def told_dead(self) -> dict[str, list[int]]:
        """All for which `dropped` holds, by author. Not of those who are seen to live: they have said it themselves."""
        alive = {author.name for author in list(self._followed.values()) if author.lease.is_seen_alive}
        return self._telling.told_dead(left_out=alive)

    def caught_up(self, author: str) -> bool:
        """Whether all was read once that this author has said."""
        followed = self._followed.get(author)
        return followed is not None and followed.caught_up and not len(self._backlog)

    def finish(self, author: str) -> None:
        """He is dead: nothing more will come behind what is damaged at his log's end, so it is searched. Raises `OSError`."""
        followed = self._followed.get(author)
        if followed is None or followed.tail is None:
            return
        # A log that is not there, or not any more, has nothing to add.
        with contextlib.suppress(FileNotFoundError):
            more = True
            while more:
                news = self._read_on(followed, followed.tail)
                more = news.more or followed.tail.look_beyond()
        followed.tail.close()
        self._telling.flush()

    def stats(self) -> FollowStats:
        """The totals now; not to be changed."""
        stats = self._stats
        stats.authors, stats.backlog = len(self._followed), len(self._backlog)
        stats.damaged_pages, stats.lost_seals = self._pages.damaged_pages, self._pages.lost_seals
        stats.failed_pages, stats.bad_blocks = self._files.failed_pages, len(self._telling.bad)
        stats.snapshots, stats.unread_logs = self._backlog.counters.snapshots, self._backlog.counters.failed
        stats.damaged_sections = self._backlog.sections.damaged
        followed = list(self._followed.values())
        live = [author for author in followed if author.lease.life is Life.LIVE]
        stats.live = len(live)
        looked = [(author.looked_ns, author.name) for author in live if author.looked_ns is not None]
        oldest_ns, stats.lag_author = min(looked, default=(0, ""))
        stats.lag_ms_max = (self._now_ns() - oldest_ns) // 1_000_000 if looked else 0
        stats.unreadable_authors = sum(author.failures > 0 for author in followed)
        return stats

    def close(self) -> None:
        for author in self._followed.values():
            author.close()

    def _listen(self) -> None:
        for _ in range(len(self._heard)):
            name, log = self._heard.popleft()
            self._stats.heard += 1
            self._hear(name, log)
        wanted = set()
        while self._wanted:
            wanted.add(self._wanted.popitem()[0])
        if wanted:
            for author in self._all():
                author.wanted |= wanted
                self._tell_again(author)

    def _meet_own(self) -> None:
        """Others may speak of the own author: who has adopted him, if he was taken for dead.

        Then this process goes on under another name, and follows its former one as that of any other: also to hear that
        nothing is left of it.
        """
        own = self._own()
        if not is_author(own) or (self._self is not None and self._self.name == own):
            return
        self._telling.met(own)
        former, self._self = self._self, self._new(own)
        if former is not None and former.name not in self._followed:
            self._begin(former.name, None)

    def _all(self) -> list[Followed]:
        return [*self._followed.values(), *([self._self] if self._self else ())]

    def _tell_again(self, author: Followed) -> None:
        """Puts all his logs into the backlog for the namespaces that are wanted of him; again at the next scan if that fails.

        Of the own author it may be that blocks are told of twice, as they are committed meanwhile. None is missed: the index
        takes what is committed since it has wanted the namespace, and what was before is in the logs that are there now.
        """
        try:
            listing = Listing.of(author.directory)
        except OSError:
            return
        below = LOG_PAGES_MAX if author is self._self else author.tail.log + 1 if author.tail else 1
        self._backlog.add(author, listing, below, frozenset(author.wanted))
        author.wanted.clear()

    def _hear(self, name: str, log: int) -> None:
        if name == self._own() or not is_author(name):
            return
        author = self._followed.get(name)
        if author is None:
            # Only what is there: a peer's word alone makes no author.
            with contextlib.suppress(OSError):
                self._begin(name, Listing.of(self._authors / name))
            return
        author.due_ns = self._now_ns()
        if author.tail is not None and author.tail.log < log:
            with contextlib.suppress(OSError):
                self._read_on(author, author.tail)
                if author.tail.log < log:
                    author.tail.look_beyond()

    def _scan(self) -> None:
        """Looks who is there; an author whom a directory that can be trusted does not show is asked for by name."""
        self._scan_due_ns = self._now_ns() + round(SCAN_S * 1e9)
        try:
            with os.scandir(self._authors) as entries:
                names = {entry.name for entry in entries if self._may_follow(entry)}
        except OSError:
            self._stats.scan_failures += 1
            return
        self.scanned = True
        for author in self._all():
            if author.wanted:
                self._tell_again(author)
        own = self._own()
        for name in sorted(names - self._followed.keys(), key=lambda name: (node_of(name) != node_of(own), name)):
            if name != own and len(self._followed) < AUTHORS_MAX:
                self._begin(name, None)
        self.namesakes.look(self._followed.values())
        if own in names or not own:
            for name in self._followed.keys() - names:
                self._drop_if_gone(self._followed[name])

    def _may_follow(self, entry: os.DirEntry[str]) -> bool:
        may = is_author(entry.name) and entry.is_dir(follow_symlinks=False)
        self._stats.ignored_names += not may
        return may

    def _begin(self, name: str, listing: Listing | None) -> None:
        self._telling.met(name)
        author = self._followed[name] = self._new(name)
        self._open(author, listing)

    def _new(self, name: str) -> Followed:
        return Followed(self._authors, name, self._files, self._pages, self._settings, self._machine)

    def _open(self, author: Followed, listing: Listing | None) -> None:
        """Finds out where he is in his logs; a directory that can't be read now is tried again."""
        try:
            listing = listing or Listing.of(author.directory)
        except OSError as error:
            author.failed(self._now_ns(), error)
            return
        tail = author.follow_from(listing.first_tail)
        author.due_ns = self._now_ns()
        self._backlog.add(author, listing, tail.log)

    def _drop_if_gone(self, author: Followed) -> None:
        try:
            os.scandir(author.directory).close()
        except (FileNotFoundError, NotADirectoryError):
            self._stats.authors_gone += 1
            author.close()
            self._backlog.forget(author)
            del self._followed[author.name]
            self._telling.gone(author.name)
        except OSError as error:
            author.failed(self._now_ns(), error)

    def _look_at_tails(self) -> bool:
        now_ns, more = self._now_ns(), False
        for author in list(self._followed.values()):
            if author.lease_due_ns <= now_ns:
                self._look_at_lease(author, now_ns)
            if author.due_ns <= now_ns:
                more = self._look(author) or more
        return more

    def _look_at_lease(self, author: Followed, now_ns: int) -> None:
        author.lease_due_ns = now_ns + round(self._settings.heartbeat_s * 1e9)
        with contextlib.suppress(OSError):
            author.lease.look(self._files, now_ns)

    def _look(self, author: Followed) -> bool:
        """Reads on in his newest log; True when there is more."""
        if author.tail is None:
            self._open(author, None)
            if author.tail is None:
                return False
        try:
            news = self._read_on(author, author.tail, PAGES_AT_ONCE if not author.caught_up else PEEK_PAGES)
            if news.more and author.caught_up:
                news = self._read_on(author, author.tail)
        except FileNotFoundError as error:
            self._log_gone(author, error)
            return False
        except OSError as error:
            author.failed(self._now_ns(), error)
            return False
        author.looked(self._now_ns(), pages=news.pages, more=news.more)
        if not news.more and author.lease.life is not Life.LIVE:
            # Nothing more is to be expected, and each start leaves one behind: it is opened for each look.
            author.tail.close()
        return news.more

    def _read_on(self, author: Followed, tail: LogReader, pages_max: int = PAGES_AT_ONCE) -> News:
        """Reads, and tells what it has read; what could not be told is read again. Raises `OSError`."""
        before = tail.position()
        news = tail.read(pages_max)
        try:
            self._telling.take(author.name16, news, old=not author.caught_up)
        except Exception:
            tail.go_back(before)
            raise
        return news

    def _log_gone(self, author: Followed, error: FileNotFoundError) -> None:
        """His log is not there yet, or no more: then a snapshot stands for it, and for all before it."""
        assert author.tail is not None
        try:
            listing = Listing.of(author.directory)
            newest = listing.snapshots[-1] if listing.snapshots else 0
            if newest < author.tail.log:
                author.failed(self._now_ns(), error)
                return
            alive = own_segments(author.directory, newest)
        except OSError as now:
            author.failed(self._now_ns(), now)
            return
        self._stats.logs_gone += 1
        self._telling.drop_all_but(author.name16, alive)
        tail = author.follow_from(newest + 1)
        self._backlog.add(author, listing, tail.log)
        author.looked(self._now_ns(), pages=0, more=True)

    def _say_loaded(self) -> None:
        stats = self._stats
        if stats.loaded:
            return
        stats.load_s = (self._now_ns() - self._began_ns) / 1e9
        stats.load_entries = stats.entries
        stats.loaded = not self._backlog.busy and all(author.caught_up for author in self._followed.values())
        if stats.loaded:
            # What is told later is told in the order in which it happened: bad first, then stored anew.
            for fingerprint16 in self._telling.bad_late:
                self.wanted(fingerprint16)
