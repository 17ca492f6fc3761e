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

    def put(self, told: Told) -> None:
        if self._closed:
            return
        last = self._waiting[-1] if self._waiting else None
        if isinstance(told, AnnounceLayers) and isinstance(last, AnnounceLayers) and last.last + 1 == told.first:
            self._waiting[-1] = AnnounceLayers(last.first, told.last)
        elif isinstance(told, AnnounceProgress) and isinstance(last, AnnounceProgress):
            self._waiting[-1] = told
        else:
            self._waiting.append(told)
        self._close_at_end(told)
        self._filled.set()

    def _close_at_end(self, told: Told) -> None:
        if isinstance(told, Finish | FinishDelivery):
            self._unquiet = not told.end.pages_quiet
            self._closed = not self._unquiet
        elif isinstance(told, AnnounceQuiet):
            self._closed = True

    async def get(self) -> Told | None:
        """The next event; None after the last one."""
        while not self._waiting:
            if self._closed:
                return None
            self._filled.clear()
            await self._filled.wait()
        return self._waiting.popleft()
