"""Adoption, recovery and snapshots of one store, built from the store's parts, and their jobs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvmoverd.adapters.storage.segments.accounting import Counted
from kvmoverd.adapters.storage.segments.adoption import PERIOD_S as ADOPT_S
from kvmoverd.adapters.storage.segments.adoption import Adoption
from kvmoverd.adapters.storage.segments.appender import Appender
from kvmoverd.adapters.storage.segments.author import Author
from kvmoverd.adapters.storage.segments.followers import Followers
from kvmoverd.adapters.storage.segments.leases import Life
from kvmoverd.adapters.storage.segments.parts import WrittenIndex
from kvmoverd.adapters.storage.segments.recovery import PERIOD_S as RECOVER_S
from kvmoverd.adapters.storage.segments.recovery import Recovery, pages_about
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.adapters.storage.segments.snapshot_writer import PERIOD_S as SNAPSHOT_S
from kvmoverd.adapters.storage.segments.snapshot_writer import Snapshots
from kvmoverd.core.store.segment_header import SegmentHeader


class Jobs(Protocol):
    """The keeper."""

    def every(self, period_s: float, name: str, job: Callable[[], bool | None]) -> None: ...


class FollowedIndex(WrittenIndex, Protocol):
    """The index, as far as an adopter speaks to it."""

    def drop_segments(self, author: str, numbers: Sequence[int]) -> None:
        """These are not to be found any more."""


class Following:
    """`recovery` is whom the garbage collector asks for its owners, and the store for `wait_ready`.

    `throw` takes a file away for good: path, and its name in the trash. `machine`: as in our own lease.
    """

    def __init__(
        self,
        authors: Path,
        appender: Appender,
        followers: Followers,
        index: FollowedIndex,
        usage: Counted,
        settings: SegmentSettings,
        *,
        machine: str,
        throw: Callable[[Path, str], None],
        direct: bool = True,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._appender, self._followers, self._index, self._settings = appender, followers, index, settings
        self._throw, self._direct, self._now_ns = throw, direct, now_ns
        own = self._own
        self.adoption = Adoption(authors, followers, own=own, settings=settings, now_ns=now_ns, direct=direct)
        self.recovery = Recovery(
            authors,
            followers,
            own=own,
            machine=machine,
            settings=settings,
            accountable=self.adoption.accountable,
            counted=usage,
            publish=self._publish,
            bury=self._bury,
            on_found=self._found,
            now_ns=now_ns,
            direct=direct,
        )
        self.adoption.on_adopted, self.adoption.on_lost = self.recovery.adopted, self.recovery.lost
        self.snapshots = self._snapshots_of(appender.author)

    def add_to(self, keeper: Jobs) -> None:
        """What it does beside reads and writes, following among it."""
        keeper.every(self._settings.poll_s, "follow", self._followers.step)
        keeper.every(ADOPT_S, "adopt", self.adoption.step)
        keeper.every(RECOVER_S, "recover", self.recovery.step)
        keeper.every(SNAPSHOT_S, "snapshots", self._step_snapshots)

    def live(self) -> list[str]:
        """Other authors that are alive, as far as is known."""
        return [author for author in self._followers.known() if self._followers.life(author) is Life.LIVE]

    def close(self) -> None:
        """For after the keeper's end."""
        self.snapshots.close()
        self._followers.close()

    def _own(self) -> str:
        return self._appender.author.name

    def _snapshots_of(self, author: Author) -> Snapshots:
        snapshots = Snapshots(
            author.directory,
            is_known=lambda owner16: self._followers.name_of(owner16) is not None,
            throw=self._throw,
            grace_s=self._settings.grace_s,
            now_ns=self._now_ns,
            direct=self._direct,
        )
        self._appender.on_seal = snapshots.sealed
        return snapshots

    def _step_snapshots(self) -> bool:
        """After the author was taken for dead his directory is left as it is."""
        if self.snapshots.directory != self._appender.author.directory:
            self.snapshots.close()
            self.snapshots = self._snapshots_of(self._appender.author)
        return self.snapshots.step()

    def _publish(self, author: str, segment: SegmentHeader, entries: npt.NDArray[np.void], time_s: int) -> None:
        if not self._appender.author.born:
            # On a full disk there is no log yet: others hear of these when the claim is made, and they are scanned again.
            return
        for failure in self._appender.log.publish(pages_about(author, segment, entries, time_s)):
            if failure is not None:
                raise failure

    def _bury(self, author: str, numbers: Sequence[int]) -> None:
        if self._appender.author.born:
            # Else there is no log yet, as the disk is full: what was found is said when the claim is made, as with blocks.
            self._appender.log.tombstone(numbers, author)
        self._index.drop_segments(author, numbers)

    def _found(self, author: str, segment: SegmentHeader, entries: npt.NDArray[np.void]) -> None:
        segment_id = self._index.add_segment(
            author,
            segment.number,
            fingerprint16=segment.fingerprint[:16],
            generation=segment.generation,
            purge=segment.purge,
            record_pages=segment.record_pages,
        )
        if segment_id >= 0:
            self._index.add_blocks(segment_id, entries)
