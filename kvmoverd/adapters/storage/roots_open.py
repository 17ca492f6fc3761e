"""Opens storages beside each other, in bounded time: a filesystem that hangs keeps a thread, and not the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass

from kvmoverd.core.errors import StorageUnusable
from kvmoverd.ports.storage import Storage

LATE_CLOSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Opening:
    """One root to open. Those of one `thread` are opened by one thread, which stays; with "" each has its own, which ends."""

    name: str
    build: Callable[[], Storage]
    thread: str = ""


class Attempt:
    """An opening under way, in a thread that may hang."""

    def __init__(self, opening: Opening) -> None:
        self.opening = opening
        self.answer: Future[Storage] = Future()

    @property
    def ended(self) -> bool:
        return self.answer.done()

    def result(self, deadline_s: float) -> Storage | Exception | None:
        """What the opening gave, or why it failed; None when it has not ended at that time of `time.monotonic`."""
        try:
            error = self.answer.exception(max(0.0, deadline_s - time.monotonic()))
        except TimeoutError:
            return None
        if error is None:
            return self.answer.result()
        return error if isinstance(error, Exception) else StorageUnusable(f"{self.opening.name}: {error!r}")

    def give_up(self) -> Storage | Exception | None:
        """Nobody waits any more: what comes later is closed. What it gave, should it have ended just now."""
        return None if self.answer.cancel() else self.result(0.0)


def begin_each(openings: Sequence[Opening], *, stay: threading.Event) -> list[Attempt]:
    """Begins to open these, those of one thread one after another.

    Threads that were named stay until `stay` is set, if they opened something: it may be theirs in the kernel's books.
    """
    attempts = [Attempt(opening) for opening in openings]
    groups: dict[str, list[Attempt]] = {}
    for at, attempt in enumerate(attempts):
        groups.setdefault(attempt.opening.thread or f" {at}", []).append(attempt)
    for group, work in groups.items():
        stays = stay if not group.startswith(" ") else None
        threading.Thread(target=_open, args=(work, stays), name="kvmover-open", daemon=True).start()
    return attempts


def _open(work: Sequence[Attempt], stay: threading.Event | None) -> None:
    opened = False
    for attempt in work:
        if attempt.answer.cancelled():
            continue
        try:
            storage = attempt.opening.build()
        except BaseException as error:  # noqa: BLE001 whatever it is, it belongs to whoever waits
            _tell(attempt.answer, error)
        else:
            opened = True
            if not _tell(attempt.answer, storage):
                storage.close(LATE_CLOSE_S)
    if stay is not None and opened:
        stay.wait()


def _tell(answer: Future[Storage], found: Storage | BaseException) -> bool:
    """False when nobody waits any more."""
    try:
        if isinstance(found, BaseException):
            answer.set_exception(found)
        else:
            answer.set_result(found)
    except InvalidStateError:
        return False
    return True
