"""Time for tests of nodes: while nothing happens it jumps to the next timer, so that no test waits and no load makes one late.

Every round of the loop takes `ROUND_S`, however long it really took. What a test would wait for in threads or from the kernel
has no place here: blocking work is done at once, on the loop. Where storage does have threads, time is `real_time`.
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
LOOK_S = 0.0005
"""How often nodes are asked for completions in real time while nothing else happens."""


class LoopClock:
    """Clock port over the time of the running loop."""

    def now_ns(self) -> int:
        return int(asyncio.get_running_loop().time() * 1e9)


class Pumped(Protocol):
    """Who has completions to hand out, but no descriptor with the loop."""

    def pump(self) -> None: ...

    def has_completions(self) -> bool: ...


class _Pumping:
    """In place of the loop's own selector: hands out completions each round."""

    def __init__(self, loop: Any, nodes: Sequence[Pumped]) -> None:
        self._loop, self._inner, self._nodes = loop, loop._selector, nodes

    def select(self, timeout_s: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        self._pump()
        if self._loop._ready or any(node.has_completions() for node in self._nodes):
            return self._inner.select(0)
        return self._wait(timeout_s)

    def _wait(self, timeout_s: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        return self._inner.select(LOOK_S if timeout_s is None else min(timeout_s, LOOK_S))

    def _pump(self) -> None:
        for node in self._nodes:
            try:
                node.pump()
            except Exception as error:  # noqa: BLE001 - the test's to see
                self._loop.call_exception_handler({"message": "handing out completions failed", "exception": error})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Jumping(_Pumping):
    """Never sleeps while a timer is set."""

    def __init__(self, loop: Any, nodes: Sequence[Pumped]) -> None:
        super().__init__(loop, nodes)
        self.now_s = START_S

    def select(self, timeout_s: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now_s += ROUND_S
        return super().select(timeout_s)

    def _wait(self, timeout_s: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        found = self._inner.select(None if timeout_s is None else 0)
        if not found and timeout_s is not None:
            self.now_s += max(0.0, timeout_s - ROUND_S)
        return found


@contextmanager
def real_time(nodes: Sequence[Pumped]) -> Iterator[None]:
    """What `nodes` have to hand out comes every round of the running loop."""
    loop: Any = asyncio.get_running_loop()
    inner, loop._selector = loop._selector, _Pumping(loop, nodes)
    try:
        yield
    finally:
        loop._selector = inner


@contextmanager
def jumping_time(nodes: Sequence[Pumped] = ()) -> Iterator[None]:
    """Changes the running loop: a test gets one that was made before. What `nodes` have to hand out comes every round."""
    loop: Any = asyncio.get_running_loop()
    selector = _Jumping(loop, nodes)
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
