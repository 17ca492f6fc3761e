"""What a segment store does beside reads and writes: one keeper thread with its jobs, and what they say of themselves."""

from __future__ import annotations

import contextlib
import threading

from kvmoverd.adapters.storage.segments.appender import Appender
from kvmoverd.adapters.storage.segments.followers import Followers
from kvmoverd.adapters.storage.segments.index import SegmentIndex
from kvmoverd.adapters.storage.segments.keeper import Keeper
from kvmoverd.adapters.storage.segments.purges import POLL_S, Purges
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.adapters.storage.segments.touches import Touches

TIDY_S = 1.0
DECAY_S = 600.0


class StoreBackground:
    """Implements `Background`; it owns these parts, and starts the keeper at `start`."""

    def __init__(
        self,
        keeper: Keeper,
        settings: SegmentSettings,
        *,
        appender: Appender,
        followers: Followers,
        purges: Purges,
        index: SegmentIndex,
        touches: Touches,
    ) -> None:
        self.keeper, self.followers = keeper, followers
        self._ready = threading.Event()
        self._ready.set()
        keeper.every(settings.heartbeat_s, "heartbeat", appender.heartbeat)
        keeper.every(settings.poll_s, "follow", followers.step)
        keeper.every(POLL_S, "purges", purges.poll)
        keeper.every(TIDY_S, "tidy", index.tidy)
        keeper.every(DECAY_S, "decay", touches.decay)

    def start(self) -> None:
        self.keeper.start()

    def wait_ready(self, timeout_s: float) -> bool:
        return self._ready.wait(timeout_s)

    def heard(self, author: str, log: int) -> None:
        self.followers.heard(author, log)
        self.keeper.wake("follow")

    def purged(self) -> None:
        """Segments that are dead go at the collector's next turn."""

    def notes(self) -> list[str]:
        stuck = self.keeper.stuck()
        return [f"{stuck.job} has been running for {stuck.for_s:.0f} s"] if stuck else []

    def close(self, timeout_s: float) -> bool:
        if not self.keeper.close(timeout_s):
            return False
        with contextlib.suppress(OSError):
            self.followers.close()
        return True
