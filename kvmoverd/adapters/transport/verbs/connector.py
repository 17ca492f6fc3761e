"""Ends on their way to be connected, each in a thread of its own: one whose peer does not answer takes a second.

Meanwhile the end is that thread's: it is neither failed nor destroyed before the thread is through.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from kvmoverd.adapters.transport.verbs.end import LinkEnd
from kvmoverd.adapters.transport.verbs.fabric import FabricError
from kvmoverd.core.qos import Marks
from kvmoverd.ports.connection import PathEnd

THREADS_MAX = 16
"""Connecting at once; the others wait for their turn."""

Connected: TypeAlias = Callable[[FabricError | None, float], None]
"""In the engine's thread: why it could not be, and the time now."""


@dataclass(slots=True)
class _Job:
    end: LinkEnd[Any]
    peer: PathEnd
    marks: Marks
    then: Connected


class Connector:
    """Called in the engine's thread. `post`: has a command called there, unless the engine is stopping."""

    def __init__(self, post: Callable[[Callable[[float], None]], bool]) -> None:
        self._post = post
        self._waiting: deque[_Job] = deque()
        self._running: set[threading.Thread] = set()

    def start(self, end: LinkEnd[Any], peer: PathEnd, marks: Marks, then: Connected) -> None:
        """`then` is called once, later, if the end was not given up before its turn."""
        self._waiting.append(_Job(end, peer, marks, then))
        self._next()

    def join(self, timeout_s: float) -> None:
        """Nobody's turn comes any more; waits for those that are under way."""
        self._waiting.clear()
        until_s = time.monotonic() + timeout_s
        for thread in list(self._running):
            thread.join(max(0.0, until_s - time.monotonic()))

    def _next(self) -> None:
        while self._waiting and len(self._running) < THREADS_MAX:
            job = self._waiting.popleft()
            if job.end.given_up:
                continue
            thread = threading.Thread(target=self._run, args=(job,), name="verbs:connect", daemon=True)
            job.end.connecting = True
            self._running.add(thread)
            try:
                thread.start()
            except RuntimeError as error:
                self._running.discard(thread)
                job.end.connecting = False
                self._post(partial(job.then, FabricError(f"no thread can be started: {error}")))

    def _run(self, job: _Job) -> None:
        error: FabricError | None = None
        try:
            job.end.join(job.peer, job.marks)
        except FabricError as why:
            error = why
        except Exception as why:  # noqa: BLE001 - words of another node that can't be used: only this link is refused
            error = FabricError(repr(why))
        job.end.connecting = False
        self._post(partial(self._ended, threading.current_thread(), job, error))

    def _ended(self, thread: threading.Thread, job: _Job, error: FabricError | None, now_s: float) -> None:
        self._running.discard(thread)
        self._next()
        job.then(error, now_s)
