"""What the router of a scheduled replay gives its engines, and what they made of it: one entry a request."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from kvmover_client.replay.engines import Decoded, Prefilled
from kvmover_client.replay.request import Request


@dataclass(frozen=True, slots=True)
class Finished:
    """An attempt that both engines have finished."""

    attempt: int
    prefilled: Prefilled
    decoded: Decoded


@dataclass(frozen=True, slots=True)
class Failed:
    """An attempt that an engine could not finish. `retryable`: the same prompt may succeed once more."""

    attempt: int
    message: str
    retryable: bool


@dataclass(slots=True)
class Entry:
    """One request. Engines report by attempt; whichever comes first, its end or a failure, wakes the router."""

    request: Request
    finished: list[Finished] = field(default_factory=list)
    failures: asyncio.Queue[Failed] = field(default_factory=asyncio.Queue)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    _prefilled: dict[int, Prefilled] = field(default_factory=dict)
    _decoded: dict[int, Decoded] = field(default_factory=dict)

    def prefilled(self, attempt: int, seen: Prefilled) -> None:
        self._prefilled[attempt] = seen
        self._match(attempt)

    def decoded(self, attempt: int, seen: Decoded) -> None:
        self._decoded[attempt] = seen
        self._match(attempt)

    def failed(self, failure: Failed) -> None:
        self.failures.put_nowait(failure)

    def _match(self, attempt: int) -> None:
        prefilled, decoded = self._prefilled.get(attempt), self._decoded.get(attempt)
        if prefilled is not None and decoded is not None:
            self.finished.append(Finished(attempt, prefilled, decoded))
            self.over.set()


class Board:
    """Entries of the requests that are under way, by their ids."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def open(self, request: Request) -> Entry:
        assert request.request_id not in self._entries, f"{request.request_id} is open already"
        entry = self._entries[request.request_id] = Entry(request)
        return entry

    def find(self, request_id: str) -> Entry | None:
        """None when the router has left it meanwhile."""
        return self._entries.get(request_id)

    def close(self, entry: Entry) -> None:
        del self._entries[entry.request.request_id]
