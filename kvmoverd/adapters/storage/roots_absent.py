"""A copy that could not be opened yet: it stands in its place among the roots, and holds nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from kvmoverd.adapters.storage.learned_index import LearnedIndex
from kvmoverd.adapters.storage.roots_open import LATE_CLOSE_S, Attempt, Opening, begin_each
from kvmoverd.core.errors import StorageUnusable
from kvmoverd.core.manifest import Namespace
from kvmoverd.ports.storage import (
    BlockIndex,
    Storage,
    StorageCounters,
    StorageDone,
    StorageFacts,
    StorageOp,
)


class _Nothing(LearnedIndex):
    complete = True


class AbsentStorage:
    """Storage port of a root that is asked for nothing. `attempt`: the one that was begun and has not ended.

    `try_again` is for the one thread that opens it, all else as the port has it.
    """

    def __init__(
        self, opening: Opening, facts: StorageFacts, *, stay: threading.Event, attempt: Attempt | None = None
    ) -> None:
        self._opening, self._facts, self._stay, self._attempt = opening, facts, stay, attempt
        self._index = _Nothing()
        self._counters = StorageCounters()
        self._given_up = False
        self._lock = threading.Lock()

    @property
    def facts(self) -> StorageFacts:
        return self._facts

    @property
    def counters(self) -> StorageCounters:
        return self._counters

    @property
    def index(self) -> BlockIndex:
        return self._index

    def try_again(self) -> Storage | Exception | None:
        """What an attempt has given: a storage, or why not; None while it is under way. Begins one if there is none."""
        with self._lock:
            if self._given_up:
                return None
            if self._attempt is None:
                (self._attempt,) = begin_each([self._opening], stay=self._stay)
            found = self._attempt.result(time.monotonic())
            if found is not None:
                self._attempt = None
        if isinstance(found, Exception):
            self._facts = left_out(self._facts, f"{found}")
        return found

    def open_namespace(self, namespace: Namespace) -> None:
        raise StorageUnusable(f"{self._facts.root} is {self._facts.note}")

    def purge(self, namespace: Namespace) -> tuple[int, int]:
        raise StorageUnusable(f"{self._facts.root} is {self._facts.note}")

    def purge_tenant(self, tenant: str) -> tuple[int, int]:
        raise StorageUnusable(f"{self._facts.root} is {self._facts.note}")

    def heard(self, author: str, log: int) -> None:
        """Copies are nobody else's."""

    def signature(self) -> tuple[str, int]:
        return "", 0

    def submit(self, ops: Sequence[StorageOp]) -> None:
        raise AssertionError(f"{len(ops)} ops for {self._facts.root}, which is {self._facts.note}")

    def poll(self, completions_max: int) -> list[StorageDone]:
        return []

    def fileno(self) -> int:
        """It never has anything to say."""
        return -1

    def close(self, timeout_s: float) -> bool:
        """What comes later is closed."""
        with self._lock:
            self._given_up = True
            found = self._attempt.give_up() if self._attempt is not None else None
            self._attempt = None
        if found is not None and not isinstance(found, Exception):
            return found.close(min(timeout_s, LATE_CLOSE_S))
        return True


def left_out(facts: StorageFacts, why: str) -> StorageFacts:
    """What status says of a root that is not there."""
    details: dict[str, int | str] = {**facts.details, "state": "refused", "why": why}
    return StorageFacts(facts.root, facts.kind, "none", f"left out: {why}", details)
