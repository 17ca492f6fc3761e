"""Turns the core's errors into gRPC answers, the same way for every call."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar, cast

import grpc.aio

from kvmoverd.core.errors import KvmoverError, NotRead
from kvmoverd.rpc.errors import fault_status, to_status

log = logging.getLogger(__name__)

Service = TypeVar("Service")
Request = TypeVar("Request")
Reply = TypeVar("Reply")
Context = grpc.aio.ServicerContext[Any, Any]

WRITE_S = 30.0
"""A caller that leaves a call's full window unread for this long has given the call up. Events are few and small: those of
many requests fit into the window."""


def answering(
    method: Callable[[Service, Request, Context], Awaitable[Reply]],
) -> Callable[[Service, Request, Context], Awaitable[Reply]]:
    """For calls with one answer."""

    @functools.wraps(method)
    async def guarded(self: Service, request: Request, context: Context) -> Reply:
        try:
            return await method(self, request, context)
        except KvmoverError as error:
            await context.abort_with_status(to_status(error))
        except Exception as error:
            log.exception("%s failed", method.__name__)
            await context.abort_with_status(fault_status(method.__name__, error))

    return guarded


def streaming(
    method: Callable[[Service, Request, Context], AsyncGenerator[Reply, None]],
) -> Callable[[Service, Request, Context], AsyncIterator[Reply]]:
    """For calls with a stream of answers.

    gRPC gets a coroutine that writes, not the generator: a generator that is dropped at a `yield` is only closed when the
    garbage collector comes by, and until then a call whose client has gone would hold its slots and pages. The same goes for
    a client that stops reading: the generator is closed after `WRITE_S`. The status then waits inside gRPC, which lets no
    server cut a single call, until the client reads on or its connection ends.
    """

    @functools.wraps(method)
    async def guarded(self: Service, request: Request, context: Context) -> None:
        try:
            async with aclosing(method(self, request, context)) as replies:
                async for reply in replies:
                    await _written(context, reply)
        except KvmoverError as error:
            await context.abort_with_status(to_status(error))
        except grpc.aio.InternalError as error:
            # gRPC's own: there is nobody any more to write to.
            log.debug("%s: its caller went away: %s", method.__name__, error)
        except Exception as error:
            log.exception("%s failed", method.__name__)
            await context.abort_with_status(fault_status(method.__name__, error))

    # The generated types know only the other form of handler; gRPC takes both.
    return cast(Callable[[Service, Request, Context], AsyncIterator[Reply]], guarded)


async def _written(context: Context, reply: object) -> None:
    """Raises `NotRead`."""
    try:
        async with asyncio.timeout(WRITE_S):
            await context.write(reply)
    except TimeoutError:
        raise NotRead(f"the events of this call were not read for {WRITE_S:g} s; it was given up") from None
