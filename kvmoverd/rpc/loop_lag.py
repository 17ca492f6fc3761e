"""Lag of the event loop: how late a timer fires."""

from __future__ import annotations

import asyncio

PERIOD_S = 0.1
WINDOW_S = 10.0


class LoopLag:
    """Worst delay in the last 10 s, at least in the last 5."""

    def __init__(self) -> None:
        self._now_max_s = 0.0
        self._before_max_s = 0.0

    async def watch(self) -> None:
        """Runs until it is cancelled."""
        loop = asyncio.get_running_loop()
        window_end_s = loop.time() + WINDOW_S / 2
        while True:
            due_s = loop.time() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            self._now_max_s = max(self._now_max_s, loop.time() - due_s)
            if loop.time() > window_end_s:
                self._before_max_s, self._now_max_s = self._now_max_s, 0.0
                window_end_s = loop.time() + WINDOW_S / 2

    @property
    def max_us(self) -> int:
        return int(max(self._now_max_s, self._before_max_s) * 1e6)
