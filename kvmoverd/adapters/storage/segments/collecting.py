"""Garbage collection and touch logs of one store, built from the store's parts, and their jobs."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Protocol

from kvmoverd.adapters.storage.block_io import BlockIo
from kvmoverd.adapters.storage.namespaces import make_directory
from kvmoverd.adapters.storage.segments.appender import Appender
from kvmoverd.adapters.storage.segments.budgets import Budgets
from kvmoverd.adapters.storage.segments.census import Census
from kvmoverd.adapters.storage.segments.collector import STEP_S, Collector, Owners
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


class Collecting:
    """Makes this start's trash. Raises `OSError`. `live`: other authors that are alive. `room` of the filesystem may be faked."""

    def __init__(
        self,
        root: SegmentRoot,
        io: BlockIo,
        settings: SegmentSettings,
        *,
        appender: Appender,
        files: SegmentFiles,
        index: SegmentIndex,
        touches: Touches,
        purges: Purges,
        owners: Owners,
        live: Callable[[], Collection[str]],
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._appender, self._io = appender, io
        self._touch_log: tuple[str, TouchLog] | None = None
        trash = root.trash / appender.author.name
        make_directory(trash)
        self.trash = Trash(trash, bytes_per_s=settings.unlink_bytes_per_s)
        self.usage = Usage(root.authors, io)
        self.teller = TouchTeller(self._log_now, touches, index, owned=owners.owned, now_ns=now_ns)
        self.watch = TouchWatch(root.authors, io, touches, index, owned=owners.owned, live=live, now_ns=now_ns)
        writer = Salvage(appender, files)
        self.graveyard = Graveyard(
            log=lambda: appender.log,
            index=index,
            usage=self.usage,
            trash=self.trash,
            files_drop=files.drop,
            grace_s=settings.grace_s,
            now_ns=now_ns,
        )
        self.census = Census(
            index=index,
            touches=touches,
            usage=self.usage,
            graveyard=self.graveyard,
            purges=purges,
            is_active=lambda author, number: number in writer.active(author),
            unknown=self.watch.unknown,
            now_ns=now_ns,
        )
        self.collector = Collector(
            budgets=Budgets(settings),
            census=self.census,
            touches=touches,
            usage=self.usage,
            graveyard=self.graveyard,
            trash=self.trash,
            purges=purges,
            writer=writer,
            owners=owners,
            room=lambda: room_of(root.base),
            grace_s=settings.grace_s,
            now_ns=now_ns,
        )
        appender.make_room = self.collector.make_room
        purges.on_purge = lambda fingerprint16: self.collector.hurry()

    def add_to(self, keeper: Jobs) -> None:
        """What it does beside reads and writes."""
        keeper.every(FLUSH_S, "tell touches", self.teller.step)
        keeper.every(FLUSH_S, "hear touches", self.watch.step)
        keeper.every(STEP_S, "collect", self.collector.step)

    def close(self) -> None:
        """For after the keeper's end."""
        self.trash.close()
        if self._touch_log is not None:
            self._touch_log[1].close()

    def _log_now(self) -> TouchLog:
        """The touch log of the author who writes now; a fresh one after he was fenced. Raises `OSError`."""
        author = self._appender.author
        if self._touch_log is None or self._touch_log[0] != author.name:
            if self._touch_log is not None:
                self._touch_log[1].close()
            self._touch_log = None
            self._touch_log = author.name, TouchLog(author.directory, self._io)
        return self._touch_log[1]
