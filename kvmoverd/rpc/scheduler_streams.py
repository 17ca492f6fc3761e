"""The streams over which nodes report: one for each node, the newest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from kvmoverd.core.errors import KvmoverError, NotRead, QueueFull
from kvmoverd.core.scheduling.reports import BadReport

END_S = 1.0
RETRY_AFTER_MS = 1_000

Message = TypeVar("Message")


async def first_of(messages: AsyncIterator[Message], timeout_s: float) -> Message | None:
    """The first message of a call, None when there is none. Raises `NotRead` after the time."""
    try:
        async with asyncio.timeout(timeout_s):
            return await anext(messages, None)
    except TimeoutError:
        raise NotRead(f"a stream of reports brought none in {timeout_s:g} s") from None


class Stream:
    """One call. `over` is done, with an error, when this side ends it."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(self, error: KvmoverError) -> None:
        if not self.over.done():
            self.over.set_exception(error)

    async def next(self, messages: AsyncIterator[Message], timeout_s: float) -> Message | None:
        """The next message, None after the last. Raises what the stream was ended with, and `NotRead` after the time."""
        reading = asyncio.ensure_future(anext(messages, None))
        try:
            await asyncio.wait((reading, self.over), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not reading.done():
                reading.cancel()
                await asyncio.wait((reading,), timeout=END_S)
        if self.over.done():
            self.over.result()
        if reading.done() and not reading.cancelled():
            return reading.result()
        raise NotRead(f"node {self.node!r} sent no report for {timeout_s:g} s")


class Streams:
    """At most `streams_max`, and of each node one: a second one ends the first, whose daemon has given it up."""

    def __init__(self, streams_max: int) -> None:
        self._streams_max = streams_max
        self._streams: dict[str, Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    @contextmanager
    def one(self, node: str) -> Iterator[Stream]:
        """Raises `QueueFull`."""
        former = self._streams.get(node)
        if former is None and len(self._streams) >= self._streams_max:
            raise QueueFull(
                f"{len(self._streams)} nodes report, at most {self._streams_max} can", retry_after_ms=RETRY_AFTER_MS
            )
        if former is not None:
            former.end(BadReport(f"node {node!r} reports over another stream, which began after this one"))
        stream = self._streams[node] = Stream(node)
        try:
            yield stream
        finally:
            if self._streams.get(node) is stream:
                del self._streams[node]
            if stream.over.done():
                # Nobody may have waited for it.
                stream.over.exception()
            else:
                stream.over.cancel()

    def end(self, make: Callable[[], KvmoverError]) -> None:
        """All that there are now."""
        for stream in self._streams.values():
            stream.end(make())
