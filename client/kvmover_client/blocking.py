"""Blocking twins of asyncio objects: a thread runs the loop, and a descriptor turns each coroutine method into a call."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from kvmover_client.errors import DaemonGone

STOP_S = 10.0

P = ParamSpec("P")
T = TypeVar("T")
Inner = TypeVar("Inner")
Inner_co = TypeVar("Inner_co", covariant=True)


class LoopThread:
    """An event loop in a daemon thread, so that a program that forgets to close it can still end."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Waits for a coroutine, which bounds its own time. Raises what it raises, and `DaemonGone` after `stop`."""
        with self._lock:
            if self._closed:
                work.close()
                raise DaemonGone("this client is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise DaemonGone("this client was closed in the middle of a call") from None
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancels what still runs, then ends the thread. Calls of other threads end with `DaemonGone`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()


class Twin(Generic[Inner_co]):
    """A blocking object around an asyncio one."""

    def __init__(self, inner: Inner_co, thread: LoopThread) -> None:
        self._inner = inner
        self._thread = thread


class blocking(Generic[Inner, P, T]):  # noqa: N801 - read as a word in the bodies of twins
    """Turns a coroutine method of the inner object into a blocking method of its twin.

    >>> class Twice:
    ...     async def of(self, number: int) -> int:
    ...         return 2 * number
    >>> class BlockingTwice(Twin[Twice]):
    ...     of = blocking(Twice.of)
    """

    def __init__(self, method: Callable[Concatenate[Inner, P], Coroutine[Any, Any, T]]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    @overload
    def __get__(self, twin: None, owner: type[Twin[Inner]]) -> blocking[Inner, P, T]: ...

    @overload
    def __get__(self, twin: Twin[Inner], owner: type[Twin[Inner]]) -> Callable[P, T]: ...

    def __get__(self, twin: Twin[Inner] | None, owner: type[Twin[Inner]]) -> blocking[Inner, P, T] | Callable[P, T]:
        if twin is None:
            return self

        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            return twin._thread.run(self._method(twin._inner, *args, **kwargs))

        call.__doc__ = self.__doc__
        return call


Call = TypeVar("Call")
CallTwin = TypeVar("CallTwin")


class opening(Generic[Inner, P, Call, CallTwin]):  # noqa: N801
    """Like `blocking`, for methods that return a call object: wraps it in its own twin."""

    def __init__(
        self,
        method: Callable[Concatenate[Inner, P], Coroutine[Any, Any, Call]],
        wrap: Callable[[Call, LoopThread], CallTwin],
    ) -> None:
        self._method = method
        self._wrap = wrap
        self.__doc__ = method.__doc__

    @overload
    def __get__(self, twin: None, owner: type[Twin[Inner]]) -> opening[Inner, P, Call, CallTwin]: ...

    @overload
    def __get__(self, twin: Twin[Inner], owner: type[Twin[Inner]]) -> Callable[P, CallTwin]: ...

    def __get__(
        self, twin: Twin[Inner] | None, owner: type[Twin[Inner]]
    ) -> opening[Inner, P, Call, CallTwin] | Callable[P, CallTwin]:
        if twin is None:
            return self

        def call(*args: P.args, **kwargs: P.kwargs) -> CallTwin:
            return self._wrap(twin._thread.run(self._method(twin._inner, *args, **kwargs)), twin._thread)

        call.__doc__ = self.__doc__
        return call
