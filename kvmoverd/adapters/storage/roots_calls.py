"""Blocking calls of one root in threads of its own: a call that hangs keeps its thread, and neither its caller nor others."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Generic, TypeVar

from kvmoverd.core.errors import QueueFull, StorageUnusable
from kvmoverd.ports.storage import Storage

T = TypeVar("T")

CALLS_MAX = 4
"""At a time. A filesystem that hangs keeps a thread each; beyond this no more is begun."""
CLOSE_SPARE_S = 0.5
"""For a storage that keeps to its time by a little less than exactly."""


class Call(Generic[T]):
    """One that was begun."""

    def __init__(self, what: str, answer: Future[T]) -> None:
        self._what = what
        self._answer = answer

    @property
    def ended(self) -> bool:
        return self._answer.done()

    def wait(self, timeout_s: float) -> bool:
        """Has it ended, or does it within so many seconds?"""
        with contextlib.suppress(TimeoutError):
            self._answer.exception(timeout_s)
        return self._answer.done()

    def result(self, deadline_s: float) -> T:
        """What it gives, or raises. Raises `StorageUnusable` when it has not ended at that time of `time.monotonic`."""
        left_s = max(0.0, deadline_s - time.monotonic())
        try:
            return self._answer.result(left_s)
        except TimeoutError:
            raise StorageUnusable(f"{self._what} has not ended in time, does the filesystem hang?") from None


class RootCalls:
    """For any thread. The threads are daemon threads: one that is stuck in the kernel delays no exit."""

    def __init__(self, name: str, *, calls_max: int = CALLS_MAX) -> None:
        self._name = name
        self._calls_max = calls_max
        self._lock = threading.Lock()
        self.running = 0

    def begin(self, work: Callable[[], T], *, what: str) -> Call[T]:
        """Raises `QueueFull` when too many are under way."""
        text = f"{self._name}: {what}"
        if not self._take_place():
            raise QueueFull(f"{text}: {self._calls_max} calls are under way, does the filesystem hang?")
        answer: Future[T] = Future()
        thread = threading.Thread(target=self._run, args=(work, answer), name=f"kvmover-{self._name}-call", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self._give_place()
            raise
        return Call(text, answer)

    def _run(self, work: Callable[[], T], answer: Future[T]) -> None:
        try:
            found = work()
        except BaseException as error:  # noqa: BLE001 whatever it is, it belongs to the caller
            answer.set_exception(error)
        else:
            answer.set_result(found)
        finally:
            self._give_place()

    def _take_place(self) -> bool:
        with self._lock:
            if self.running >= self._calls_max:
                return False
            self.running += 1
            return True

    def _give_place(self) -> None:
        with self._lock:
            self.running -= 1


def close_all(storages: Sequence[Storage], timeout_s: float) -> bool:
    """Closes storages at once, each in a thread of its own; True when all are quiet in time."""
    deadline_s = time.monotonic() + timeout_s
    calls = [
        RootCalls(storage.facts.root).begin(partial(storage.close, timeout_s), what="closing") for storage in storages
    ]
    quiet = True
    for call in calls:
        try:
            quiet = call.result(deadline_s + CLOSE_SPARE_S) and quiet
        except StorageUnusable:
            quiet = False
    return quiet
