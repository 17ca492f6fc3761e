"""How many calls a server takes at once. Those that look, end something or give it back have places of their own."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio

from kvmoverd.core.errors import QueueFull
from kvmoverd.rpc.errors import to_status

SPARE_MAX = 64
"""Places for streams that only look: health and reflection."""
SHORT_MAX = 64
"""Places for the calls that are always let through: none of them waits for anything."""

Details = grpc.HandlerCallDetails
Continuation = Callable[[Details], Awaitable[Any]]


class _Places:
    """A number of calls at once."""

    def __init__(self, what: str, calls_max: int) -> None:
        self._what = what
        self._calls_max = calls_max
        self._calls = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Raises `QueueFull`."""
        if self._calls >= self._calls_max:
            raise QueueFull(f"{self._calls} {self._what} are under way, at most {self._calls_max} may be")
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1


class CallLimits(grpc.aio.ServerInterceptor):
    """Refuses calls of `service` beyond `calls_max` with QUEUE_FULL, except those that are `always` let through."""

    def __init__(self, service: str, always: frozenset[str], *, calls_max: int) -> None:
        self._prefix = f"/{service}/"
        self._always = always
        self._own = _Places("calls", calls_max)
        self._spare = _Places("health and reflection calls", SPARE_MAX)
        self._short = _Places("short calls", SHORT_MAX)
        self.total_max = calls_max + SPARE_MAX + SHORT_MAX
        self._made: dict[str, tuple[Any, Any]] = {}
        """Of each method, its handler and the limited one: making one anew for each call takes a tenth of a short call's time."""

    async def intercept_service(self, continuation: Continuation, handler_call_details: Details) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        known, limited = self._made.get(method, (None, None))
        if known is not handler:
            limited = _limited(handler, self._places(method, handler))
            self._made[method] = handler, limited
        return limited

    def _places(self, method: str, handler: Any) -> _Places:
        if method.startswith(self._prefix) and method.removeprefix(self._prefix) not in self._always:
            return self._own
        return self._spare if handler.response_streaming else self._short


def _limited(handler: Any, places: _Places) -> Any:
    """The same handler, which first takes a place."""
    for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
        inner = getattr(handler, kind)
        if inner is not None:
            made = getattr(grpc, f"{kind}_rpc_method_handler")
            wrapped = _generating(inner, places) if inspect.isasyncgenfunction(inner) else _answering(inner, places)
            return made(wrapped, handler.request_deserializer, handler.response_serializer)
    raise AssertionError(f"{handler} handles nothing")


def _answering(inner: Callable[[Any, Any], Awaitable[Any]], places: _Places) -> Callable[[Any, Any], Awaitable[Any]]:
    async def limited(request: Any, context: Any) -> Any:
        try:
            with places.one():
                return await inner(request, context)
        except QueueFull as error:
            await context.abort_with_status(to_status(error))

    return limited


def _generating(
    inner: Callable[[Any, Any], AsyncIterator[Any]], places: _Places
) -> Callable[[Any, Any], AsyncIterator[Any]]:
    async def limited(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            with places.one():
                async for reply in inner(request, context):
                    yield reply
        except QueueFull as error:
            await context.abort_with_status(to_status(error))

    return limited
