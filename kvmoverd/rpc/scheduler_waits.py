"""Calls that wait until something about a request changes. They are woken by it; nobody looks again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvmoverd.core.errors import KvmoverError, QueueFull

RETRY_AFTER_MS = 1_000


class Waits:
    """At most `waits_max` calls, each for one request."""

    def __init__(self, waits_max: int) -> None:
        self._waits_max = waits_max
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    async def change(self, request_id: str, timeout_s: float) -> None:
        """Returns at the next word about the request, or after the time.

        Raises `QueueFull` when too many wait already, and what `end` was given.
        """
        if self._count >= self._waits_max:
            raise QueueFull(
                f"{self._count} calls wait for news of their requests, at most {self._waits_max} can",
                retry_after_ms=RETRY_AFTER_MS,
            )
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(request_id, []).append(woken)
        self._count += 1
        try:
            async with asyncio.timeout(timeout_s):
                await woken
        except TimeoutError:
            return
        finally:
            self._count -= 1
            self._forget(request_id, woken)

    def tell(self, request_id: str) -> None:
        """There is news of it."""
        for woken in self._waiting.pop(request_id, ()):
            if not woken.done():
                woken.set_result(None)

    def end(self, make: Callable[[], KvmoverError]) -> None:
        """All that wait now fail, each with an error of its own."""
        waiting, self._waiting = self._waiting, {}
        for calls in waiting.values():
            for woken in calls:
                if not woken.done():
                    woken.set_exception(make())

    def _forget(self, request_id: str, woken: asyncio.Future[None]) -> None:
        calls = self._waiting.get(request_id)
        if calls is not None and woken in calls:
            calls.remove(woken)
            if not calls:
                del self._waiting[request_id]
