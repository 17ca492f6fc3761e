"""Garbage collection and touch logs of one store, built from the store's parts, and their jobs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvmoverd.adapters.storage.block_io import BlockIo
from kvmoverd.adapters.storage.namespaces import make_directory
from kvmoverd.adapters.storage.segments.appender import Appender
from kvmoverd.adapters.storage.segments.budgets import Budgets
from kvmoverd.adapters.storage.segments.census import Census
from kvmoverd.adapters.storage.segments.collector import STEP_S, Collector, Owners
from kvmoverd.adapters.storage.segments.dead_files import STEP_S as CLOSE_DEAD_S
from kvmoverd.adapters.storage.segments.dead_files import DeadFiles
from kvmoverd.adapters.storage.segments.graveyard import Graveyard
from kvmoverd.adapters.storage.segments.index import SegmentIndex
from kvmoverd.adapters.storage.segments.purges import Purges
from kvmoverd.adapters.storage.segments.root import SegmentRoot
from kvmoverd.adapters.storage.segments.salvage import Salvage
from kvmoverd.adapters.storage.segments.segment_files import SegmentFiles
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.adapters.storage.segments.touch_log import FLUSH_S, TouchLog, TouchTeller, TouchWatch
from kvmoverd.adapters.storage.segments.touches import Touches
from kvmoverd.adapters.storage.segments.usage import Usage, room_of
from kvmoverd.adapters.storage.trash import Trash


class Jobs(Protocol):
    """The keeper."""

    def every(self, period_s: float, name: str, job: Callable[[], bool | None]) -> None: ...


@dataclass(frozen=True, slots=True)
class StoreParts:
    """What there is of a store before its garbage collection.

    `live`: other authors that are alive. `dropped`: a tombstone names this segment of an author. `told_dead`: all such.
    """

    root: SegmentRoot
    io: BlockIo
    settings: SegmentSettings
    appender: Appender
    files: SegmentFiles
    index: SegmentIndex
    touches: Touches
    purges: Purges
    owners: Owners
    live: Callable[[], Collection[str]]
    dropped: Callable[[str, int], bool]
    told_dead: Callable[[], Mapping[str, Sequence[int]]]


class Collecting:
    """Makes this start's trash, and is what the appender asks for room. `usage`: one that others use, too."""

    def __init__(
        self, parts: StoreParts, *, usage: Usage | None = None, now_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._parts, self._now_ns = parts, now_ns
        self._touch_log: tuple[str, TouchLog] | None = None
        trash = parts.root.trash / parts.appender.author.name
        with contextlib.suppress(OSError):
            # On a full disk it is made when something is thrown away.
            make_directory(trash)
        self.trash = Trash(trash, bytes_per_s=parts.settings.unlink_bytes_per_s, around=parts.root.trash)
        self.usage = usage or Usage(parts.root.authors, parts.io)
        owned = parts.owners.owned
        self.teller = TouchTeller(self._log_now, parts.touches, parts.index, owned=owned, now_ns=now_ns)
        self.watch = TouchWatch(
            parts.root.authors, parts.io, parts.touches, parts.index, owned=owned, live=parts.live, now_ns=now_ns
        )
        self.graveyard = Graveyard(
            log=lambda: parts.appender.log,
            index=parts.index,
            usage=self.usage,
            trash=self.trash,
            files_drop=parts.files.drop,
            told_dead=parts.told_dead,
            grace_s=parts.settings.grace_s,
            now_ns=now_ns,
        )
        self.dead_files = DeadFiles(parts.files, parts.index, grace_s=parts.settings.grace_s, now_ns=now_ns)
        self.collector = self._make_collector()
        parts.appender.make_room = self.collector.make_room
        parts.appender.on_grown = self.collector.grown
        parts.purges.on_purge = lambda fingerprint16: self.collector.hurry()

    def add_to(self, keeper: Jobs, collector: Jobs) -> None:
        """What it does beside reads and writes. What is collected may take seconds to be appended anew: a thread of its own."""
        keeper.every(FLUSH_S, "tell touches", self.teller.step)
        keeper.every(FLUSH_S, "hear touches", self.watch.step)
        collector.every(STEP_S, "collect", self.collector.step)
        collector.every(CLOSE_DEAD_S, "close dead segments", self.dead_files.step)

    def details(self) -> dict[str, int | str]:
        """Of what is on its way out, by name, as status has it. For any thread."""
        return {
            "delete_failures": self.graveyard.failures + self.trash.failures,
            "untold_segments": self.graveyard.untold_segments,
            "trash_stuck_bytes": self.trash.stuck_bytes,
            "touches_dropped": self._parts.touches.fresh_dropped,
        }

    def close(self) -> None:
        """For after the keeper's end."""
        self.trash.close()
        if self._touch_log is not None:
            self._touch_log[1].close()

    def _make_collector(self) -> Collector:
        parts = self._parts
        writer = Salvage(parts.appender, parts.files)
        census = Census(
            index=parts.index,
            touches=parts.touches,
            usage=self.usage,
            graveyard=self.graveyard,
            purges=parts.purges,
            is_active=lambda author, number: number in writer.active(author),
            unknown=self.watch.unknown,
            dropped=parts.dropped,
            now_ns=self._now_ns,
        )
        return Collector(
            budgets=Budgets(parts.settings),
            census=census,
            touches=parts.touches,
            usage=self.usage,
            graveyard=self.graveyard,
            trash=self.trash,
            purges=parts.purges,
            writer=writer,
            owners=parts.owners,
            room=lambda: room_of(parts.root.base),
            grace_s=parts.settings.grace_s,
            now_ns=self._now_ns,
        )

    def _log_now(self) -> TouchLog:
        """The touch log of the author who writes now; a fresh one after he was fenced. Raises `OSError`."""
        author = self._parts.appender.author
        if self._touch_log is None or self._touch_log[0] != author.name:
            if self._touch_log is not None:
                self._touch_log[1].close()
            self._touch_log = None
            self._touch_log = author.name, TouchLog(author.directory, self._parts.io)
        return self._touch_log[1]
