"""The same work on many things, by some threads, in order, with a bounded number of results waiting."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

THREADS_MAX = 8
_WAITING_PER_THREAD = 2


def threads_here() -> int:
    """Reads wait for the device most of the time, so more than there are cores."""
    return min(THREADS_MAX, 2 * (os.cpu_count() or 1))


def each(items: Iterable[Item], work: Callable[[Item], Result], *, threads: int) -> Iterator[Result]:
    """What `work` gives for each item, in their order; items are taken as they are needed. Raises what `work` raises."""
    with ThreadPoolExecutor(threads, thread_name_prefix="kvmover-inspect") as pool:
        waiting: deque[Future[Result]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) >= _WAITING_PER_THREAD * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for left in waiting:
                left.cancel()
