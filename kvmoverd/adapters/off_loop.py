"""Runs blocking work beside the loop, in threads that a stop does not have to wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from kvmoverd.core.errors import QueueFull, StorageUnusable

T = TypeVar("T")

THREADS_MAX = 16
"""Work at a time. A filesystem that hangs keeps a thread each; beyond this nothing more is begun."""

_running = threading.Semaphore(THREADS_MAX)


async def off_loop(work: Callable[[], T], *, what: str, timeout_s: float) -> T:
    """The result of `work`, or what it raises. A thread that outlives `timeout_s` is left to itself.

    Raises `StorageUnusable` when it takes too long, `QueueFull` when too much is under way.
    """
    if not _running.acquire(blocking=False):
        raise QueueFull(f"{what}: {THREADS_MAX} pieces of blocking work are under way, does a filesystem hang?")
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()
    thread = threading.Thread(target=_run, args=(work, loop, answer), name=f"kvmoverd-{what}", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        _running.release()
        raise
    try:
        return await asyncio.wait_for(answer, timeout_s)
    except TimeoutError:
        raise StorageUnusable(f"{what} did not end within {timeout_s:g} s") from None


def _run(work: Callable[[], T], loop: asyncio.AbstractEventLoop, answer: asyncio.Future[T]) -> None:
    try:
        found = work()
    except BaseException as error:  # noqa: BLE001 whatever it is, it belongs to the caller
        _tell(loop, answer, partial(answer.set_exception, error))
    else:
        _tell(loop, answer, partial(answer.set_result, found))
    finally:
        _running.release()


def _tell(loop: asyncio.AbstractEventLoop, answer: asyncio.Future[T], told: Callable[[], None]) -> None:
    def tell() -> None:
        if not answer.done():
            told()

    try:
        loop.call_soon_threadsafe(tell)
    except RuntimeError:
        return  # the loop has ended: nobody waits any more
