"""Outbox: what a request tells its caller, coalesced, in order, read by one reader."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

from kvmoverd.core.machines.actions import (
    Action,
    AnnounceLayers,
    AnnounceProgress,
    AnnounceQuiet,
    Finish,
    FinishDelivery,
)
from kvmoverd.core.status import BlockOutcome
from kvmoverd.node.progress import ProgressEntry

READY_S = 0.5
"""Layers that an engine sees on its progress page are told as messages no sooner than this, unless more is to be told."""


@dataclass(frozen=True, slots=True)
class Attached:
    """The prefill side has reserved: what the decode engine will get."""

    blocks: int
    tail_tokens: int
    prefill_node: str


@dataclass(frozen=True, slots=True)
class Fetched:
    """Outcome of each block of a fetch, and the lease on the good ones; lease_id 0 means none."""

    outcomes: tuple[BlockOutcome, ...]
    lease_id: int = 0
    lease_generation: int = 0
    lease_s: float = 0.0


Told: TypeAlias = Action | Attached | Fetched


class Outbox:
    """Never blocks the writer and never grows beyond a few entries: neighbouring layer ranges become one."""

    def __init__(self) -> None:
        self._waiting: deque[Told] = deque()
        self._filled = asyncio.Event()
        self._unquiet = False
        self._closed = False
        self._entry: ProgressEntry | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._overdue = False

    def report_to(self, entry: ProgressEntry) -> None:
        """From here on progress goes to the engine's page first; also what waits here."""
        self._entry = entry
        for told in self._waiting:
            entry.tell(told)

    def put(self, told: Told) -> None:
        if self._closed:
            return
        if self._entry is not None:
            self._entry.tell(told)
        last = self._waiting[-1] if self._waiting else None
        if isinstance(told, AnnounceLayers) and isinstance(last, AnnounceLayers) and last.last + 1 == told.first:
            self._waiting[-1] = AnnounceLayers(last.first, told.last)
        elif isinstance(told, AnnounceProgress) and isinstance(last, AnnounceProgress):
            self._waiting[-1] = told
        else:
            self._waiting.append(told)
        self._close_at_end(told)
        if self._is_due():
            self._filled.set()
        else:
            self._promise()

    def _promise(self) -> None:
        """What waits is told in `READY_S` at the latest."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(READY_S, self._become_due)

    def _is_due(self) -> bool:
        """Is there something to tell? Layers alone, which the engine sees anyway, may wait."""
        if self._entry is None or self._overdue or len(self._waiting) != 1:
            return bool(self._waiting)
        return not isinstance(self._waiting[0], AnnounceLayers)

    def _become_due(self) -> None:
        self._overdue = True
        self._filled.set()

    def _close_at_end(self, told: Told) -> None:
        if isinstance(told, Finish | FinishDelivery):
            self._unquiet = not told.end.pages_quiet
            self._closed = not self._unquiet
        elif isinstance(told, AnnounceQuiet):
            self._closed = True

    async def get(self) -> Told | None:
        """The next event; None after the last one."""
        while not self._is_due():
            if self._closed and not self._waiting:
                return None
            if self._waiting:
                self._promise()
            self._filled.clear()
            await self._filled.wait()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._overdue = False
        return self._waiting.popleft()
