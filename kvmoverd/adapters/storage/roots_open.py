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


def open_each(openings: Sequence[Opening], *, timeout_s: float, stay: threading.Event) -> list[Storage | Exception]:
    """What each opening gave, or why there is nothing; one that takes too long is `StorageUnusable`, and closed if it comes.

    Threads that were named stay until `stay` is set: what they opened may be theirs in the kernel's books.
    """
    deadline_s = time.monotonic() + timeout_s
    answers: list[Future[Storage]] = [Future() for _ in openings]
    groups: dict[str, list[int]] = {}
    for at, opening in enumerate(openings):
        groups.setdefault(opening.thread or f" {at}", []).append(at)
    for group, places in groups.items():
        work = [(openings[at], answers[at]) for at in places]
        stays = stay if not group.startswith(" ") else None
        threading.Thread(target=_open, args=(work, stays), name="kvmover-open", daemon=True).start()
    return [
        _result(opening, answer, max(0.0, deadline_s - time.monotonic()), timeout_s)
        for opening, answer in zip(openings, answers, strict=True)
    ]


def _open(work: Sequence[tuple[Opening, Future[Storage]]], stay: threading.Event | None) -> None:
    for opening, answer in work:
        if answer.cancelled():
            continue
        try:
            storage = opening.build()
        except BaseException as error:  # noqa: BLE001 whatever it is, it belongs to whoever waits
            _tell(answer, error)
        else:
            if not _tell(answer, storage):
                storage.close(LATE_CLOSE_S)
    if stay is not None:
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


def _result(opening: Opening, answer: Future[Storage], left_s: float, timeout_s: float) -> Storage | Exception:
    try:
        error = answer.exception(left_s)
    except TimeoutError:
        if answer.cancel():
            return StorageUnusable(f"{opening.name} did not open within {timeout_s:g} s, does the filesystem hang?")
        error = answer.exception()
    if error is None:
        return answer.result()
    return error if isinstance(error, Exception) else StorageUnusable(f"{opening.name}: {error!r}")
