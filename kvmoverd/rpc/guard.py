"""Turns the core's errors into gRPC answers, the same way for every call."""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar, cast

import grpc.aio

from kvmoverd.core.errors import KvmoverError
from kvmoverd.rpc.errors import fault_status, to_status

log = logging.getLogger(__name__)

Service = TypeVar("Service")
Request = TypeVar("Request")
Reply = TypeVar("Reply")
Context = grpc.aio.ServicerContext[Any, Any]


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
    garbage collector comes by, and until then a call whose client has gone would hold its slots and pages.
    """

    @functools.wraps(method)
    async def guarded(self: Service, request: Request, context: Context) -> None:
        try:
            async with aclosing(method(self, request, context)) as replies:
                async for reply in replies:
                    await context.write(reply)
        except KvmoverError as error:
            await context.abort_with_status(to_status(error))
        except Exception as error:
            log.exception("%s failed", method.__name__)
            await context.abort_with_status(fault_status(method.__name__, error))

    # The generated types know only the other form of handler; gRPC takes both.
    return cast(Callable[[Service, Request, Context], AsyncIterator[Reply]], guarded)
