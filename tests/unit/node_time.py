"""Time for tests of nodes: while nothing happens it jumps to the next timer, so that no test waits and no load makes one late.

Every round of the loop takes `ROUND_S`, however long it really took. What a test would wait for in threads or from the kernel
has no place here: blocking work is done at once, on the loop.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

START_S = 1000.0
ROUND_S = 5e-6


class LoopClock:
    """Clock port over the time of the running loop."""

    def now_ns(self) -> int:
        return int(asyncio.get_running_loop().time() * 1e9)


class Pumped(Protocol):
    """Who has completions to hand out, but no descriptor with the loop."""

    def pump(self) -> None: ...

    def has_completions(self) -> bool: ...


class _Selector:
    """In place of the loop's own: hands out completions each round, and never sleeps while a timer is set."""

    def __init__(self, loop: Any, nodes: Sequence[Pumped]) -> None:
        self.now_s = START_S
        self._loop, self._inner, self._nodes = loop, loop._selector, nodes

    def select(self, timeout_s: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now_s += ROUND_S
        self._pump()
        if self._loop._ready or any(node.has_completions() for node in self._nodes):
            return self._inner.select(0)
        if timeout_s is None:
            return self._inner.select(None)
        found = self._inner.select(0)
        if not found:
            self.now_s += max(0.0, timeout_s - ROUND_S)
        return found

    def _pump(self) -> None:
        for node in self._nodes:
            try:
                node.pump()
            except Exception as error:  # noqa: BLE001 - the test's to see
                self._loop.call_exception_handler({"message": "handing out completions failed", "exception": error})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@contextmanager
def jumping_time(nodes: Sequence[Pumped] = ()) -> Iterator[None]:
    """Changes the running loop: a test gets one that was made before. What `nodes` have to hand out comes every round."""
    loop: Any = asyncio.get_running_loop()
    selector = _Selector(loop, nodes)
    inner, loop._selector = loop._selector, selector
    loop.time = lambda: selector.now_s
    try:
        yield
    finally:
        loop._selector = inner
        del loop.time


def pass_time(seconds: float) -> None:
    """Timers that are due by then fire in the next round."""
    loop: Any = asyncio.get_running_loop()
    loop._selector.now_s += seconds


async def at_once(work: Callable[[], T], *, what: str, timeout_s: float) -> T:
    """In place of threads."""
    await asyncio.sleep(0)
    return work()
