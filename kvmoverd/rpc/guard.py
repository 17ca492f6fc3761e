"""Turns the core's errors into gRPC answers, the same way for every call."""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc.aio

from kvmoverd.core.errors import KvmoverError
from kvmoverd.rpc.errors import to_status

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
        except (grpc.aio.AbortError, GeneratorExit):
            raise
        except Exception as error:
            log.exception("%s failed", method.__name__)
            await context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"[:512])

    return guarded


def streaming(
    method: Callable[[Service, Request, Context], AsyncIterator[Reply]],
) -> Callable[[Service, Request, Context], AsyncIterator[Reply]]:
    """For calls with a stream of answers."""

    @functools.wraps(method)
    async def guarded(self: Service, request: Request, context: Context) -> AsyncIterator[Reply]:
        try:
            async for reply in method(self, request, context):
                yield reply
        except KvmoverError as error:
            await context.abort_with_status(to_status(error))
        except (grpc.aio.AbortError, GeneratorExit):
            raise
        except Exception as error:
            log.exception("%s failed", method.__name__)
            await context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"[:512])

    return guarded
