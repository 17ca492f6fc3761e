"""What a segment store does beside reads and writes: keeper threads with their jobs, and what they say of themselves."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping

from kvmoverd.adapters.storage.segments.appender import Appender
from kvmoverd.adapters.storage.segments.collecting import Collecting
from kvmoverd.adapters.storage.segments.damage import STEP_S as DAMAGE_S
from kvmoverd.adapters.storage.segments.damage import DamageTeller
from kvmoverd.adapters.storage.segments.details import (
    append_details,
    collector_details,
    follow_details,
    index_details,
    job_details,
    owner_details,
)
from kvmoverd.adapters.storage.segments.followers import Followers
from kvmoverd.adapters.storage.segments.following import Following
from kvmoverd.adapters.storage.segments.index import SegmentIndex
from kvmoverd.adapters.storage.segments.keeper import JobStats, Keeper
from kvmoverd.adapters.storage.segments.purges import POLL_S, Purges
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.core.store.log_pages import LogPage
from kvmoverd.core.store.places import Place

TIDY_S = 1.0


class StoreBackground:
    """Implements `Background`; it owns these parts, and starts the keepers at `start`.

    `pulse`: a keeper for the heartbeat alone: others take who is late with it for dead. `collector`: one for what may take
    long, so that following does not wait for it.
    """

    def __init__(
        self,
        keeper: Keeper,
        pulse: Keeper,
        collector: Keeper,
        settings: SegmentSettings,
        *,
        appender: Appender,
        followers: Followers,
        following: Following,
        collecting: Collecting,
        purges: Purges,
        index: SegmentIndex,
    ) -> None:
        self.keeper, self.followers, self.following, self.collecting = keeper, followers, following, collecting
        self._settings, self._index, self._appender = settings, index, appender
        self.pulse, self.collector = pulse, collector
        pulse.every(settings.heartbeat_s, "heartbeat", appender.heartbeat)
        following.add_to(keeper)
        keeper.every(POLL_S, "purges", purges.poll)
        collecting.add_to(keeper, collector)
        self.damage = DamageTeller(index, own=lambda: appender.author.name, publish=self._publish)
        keeper.every(DAMAGE_S, "tell damage", self.damage.step)
        keeper.every(TIDY_S, "tidy", index.tidy)

    def start(self) -> None:
        for keeper in self._keepers:
            keeper.start()

    def wait_ready(self, timeout_s: float) -> bool:
        return self.following.recovery.wait_ready(timeout_s)

    def heard(self, author: str, log: int) -> None:
        self.followers.heard(author, log)
        self.keeper.wake("follow")

    def purged(self) -> None:
        self.collector.wake("collect")

    def damaged(self, key: bytes, place: Place, cut: bool) -> None:
        self.damage.found(key, place, cut=cut)

    def notes(self) -> list[str]:
        found = [stuck for keeper in self._keepers if (stuck := keeper.stuck()) is not None]
        said = [f"{stuck.job} has been running for {stuck.for_s:.0f} s" for stuck in found]
        if self._appender.refusal:
            said.append(self._appender.refusal)
        if namesake := self.followers.namesakes.note():
            said.append(namesake)
        said += [f"{name} failed: {job.error}" for name, job in self._jobs() if job.error]
        return [*said, *self.following.recovery.notes(), *self.collecting.collector.notes()]

    def details(self) -> Mapping[str, int | str]:
        return {
            "refusal": self._appender.refusal,
            **index_details(self._index.load_state()),
            **append_details(self._appender.counters, self._appender.segments.active()),
            **follow_details(self.followers.stats()),
            **owner_details(
                self.following.adoption.stats(), self.following.recovery.stats(), self.following.snapshots.stats()
            ),
            **collector_details(self.collecting.collector.counters, self._settings),
            **self.collecting.details(),
            **job_details([job for _, job in self._jobs()]),
            "damage_untold": self.damage.kept,
        }

    def close(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        quiet = [keeper.close(max(0.0, deadline_s - time.monotonic())) for keeper in self._keepers]
        if not all(quiet):
            return False
        with contextlib.suppress(OSError):
            self.following.close()
        with contextlib.suppress(OSError):
            self.collecting.close()
        return True

    @property
    def _keepers(self) -> tuple[Keeper, ...]:
        return self.keeper, self.pulse, self.collector

    def _jobs(self) -> list[tuple[str, JobStats]]:
        return [pair for keeper in self._keepers for pair in keeper.stats().items()]

    def _publish(self, pages: list[LogPage]) -> list[OSError | None]:
        """In the log of the author who writes now."""
        return self._appender.log.publish(pages)
