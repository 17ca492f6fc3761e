"""Calls whose caller goes on talking: its messages are read while the answers are being sent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager

import grpc.aio

log = logging.getLogger(__name__)

END_S = 1.0


@asynccontextmanager
async def fed(reading: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Runs `reading` beside the body, no longer than it; an error of `reading` becomes that of the call.

    `reading` must see to it that the body ends when it fails.
    """
    task = asyncio.get_running_loop().create_task(reading)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task], timeout=END_S)
        error = task.exception() if task.done() and not task.cancelled() else None
    if isinstance(error, grpc.aio.UsageError | grpc.aio.InternalError):
        log.debug("the caller's side of a call broke: %s", error)
    elif error is not None:
        raise error
