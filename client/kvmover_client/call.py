"""What all calls have in common: one task reads the events into state, and any number of waiters look at that state.

Nothing is queued: events that grow a number overwrite it, so a call that nobody looks at costs no memory.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

import grpc.aio

from kvmover_client.errors import BadRequest, CallCancelled, DaemonGone, KvmoverError, RequestEnded, TimedOut
from kvmover_client.link import Link
from kvmover_client.progress import ProgressEntry
from kvmover_client.wire import end_from
from kvmover_client.words import End, Reason
from kvmover_proto import common_pb2, engine_pb2

GRACE_S = 20.0
"""How long a call may outlive its own time: the daemon says DEADLINE by itself, and then makes the pages quiet."""
CANCEL_S = 5.0
CANCEL_RETRY_S = 0.1

Event = TypeVar("Event")
Request = TypeVar("Request")
T = TypeVar("T")


class Running(Protocol):
    """The part of a gRPC call that ends it."""

    def cancel(self) -> bool: ...


class Call(ABC, Generic[Event]):
    """A call of one attempt of a request.

    Waits take `timeout_s`; None means as long as the call itself can last. They raise `RequestEnded` when the call ended
    before what they wait for, `DaemonGone` as soon as the session is over, `TimedOut`, or what the daemon raised.
    """

    def __init__(
        self, link: Link, request_id: str, attempt: int, timeout_s: float, entry: ProgressEntry | None = None
    ) -> None:
        """`entry`: the call's words in the session's pages, which the call releases; without, everything is told by message."""
        self.request_id = request_id
        self.attempt = attempt
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._deadline_s = self._loop.time() + timeout_s + GRACE_S
        self._waiters: set[asyncio.Future[bool]] = set()
        self._bells: set[threading.Lock] = set()
        self._end: End | None = None
        self._quiet = False
        self._failure: KvmoverError | None = None
        self._running: Running | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._cancelling = False
        self._entry = entry
        link.track(self)
        if entry is not None:
            entry.on_change = self._wake

    @abstractmethod
    def _apply(self, event: Event) -> None:
        """Takes an event into the state."""

    async def end(self, timeout_s: float | None = None) -> End:
        """The last word. Does not raise for an end that is not OK: look at its `reason`."""
        return await self._until(lambda: self._end, "its end", timeout_s)

    async def quiet(self, timeout_s: float | None = None) -> None:
        """Returns when the call has ended and nothing touches the pages it named any more."""
        await self._until(lambda: self._quiet or None, "its pages were quiet", timeout_s, beyond_end=True)

    def cancel(self) -> None:
        """Asks the daemon to end this attempt; its last word still comes, await `end()`. Does nothing once ended.

        It ends all calls of this request on this node, up to this attempt.
        """
        if self.is_over or self._cancelling:
            return
        self._cancelling = True
        self._spawn(self._cancel())

    def fail(self, error: KvmoverError) -> None:
        """Ends the call from this side: every wait that the state so far can't answer raises `error`."""
        if self._failure is None:
            self._failure = error
        self._link.forget(self)
        if self._entry is not None:
            self._entry.release()
        if self._running is not None:
            self._running.cancel()
            # Whoever keeps the call keeps no connection of a channel that is closed.
            self._running = None
        for task in self._tasks:
            if task is not asyncio.current_task(self._loop):
                task.cancel()
        self._wake()

    @property
    def is_over(self) -> bool:
        """Has it had its last word, or failed?"""
        return self._end is not None or self._failure is not None

    def _begin(self, running: Running, events: AsyncIterable[Event]) -> None:
        self._running = running
        self._spawn(self._read(events))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        self._tasks.append(self._loop.create_task(work))

    async def _read(self, events: AsyncIterable[Event]) -> None:
        try:
            async for event in events:
                self._apply(event)
                self._wake()
        except grpc.aio.AioRpcError as error:
            self.fail(await self._link.meaning(error))
        except KvmoverError as error:
            self.fail(error)
        except asyncio.CancelledError:
            self.fail(CallCancelled(f"the call of {self.request_id!r} was closed before its end"))
            raise
        else:
            self.fail(KvmoverError(f"the daemon closed the call of {self.request_id!r} before its last word"))

    def _terminal(self, message: common_pb2.Terminal) -> None:
        self._end = end_from(message)
        self._quiet = self._end.pages_quiet

    def _became_quiet(self) -> None:
        self._quiet = True

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(True)
        for bell in list(self._bells):
            if bell.locked():
                bell.release()

    @contextmanager
    def a_bell(self) -> Iterator[threading.Lock]:
        """For another thread than the loop's: a lock to acquire, which is released when the state changes."""
        bell = threading.Lock()
        bell.acquire()
        self._bells.add(bell)
        try:
            yield bell
        finally:
            self._bells.discard(bell)

    async def _until(
        self, found: Callable[[], T | None], awaited: str, timeout_s: float | None, *, beyond_end: bool = False
    ) -> T:
        """Waits until the state has it. What came before an end or a failure is still found after it."""
        deadline_s = self._deadline_s if timeout_s is None else self._loop.time() + timeout_s
        while (value := found()) is None:
            if self._end is not None and not beyond_end:
                raise RequestEnded(self._end, awaited)
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            if not await self._change(deadline_s):
                raise TimedOut(f"request {self.request_id!r}: {awaited} did not come in time")
        return value

    async def _change(self, deadline_s: float) -> bool:
        """Waits for the next change of the state; False when the deadline came first."""
        waiter: asyncio.Future[bool] = self._loop.create_future()
        timer = self._loop.call_at(deadline_s, _give_up, waiter)
        self._waiters.add(waiter)
        try:
            return await waiter
        finally:
            timer.cancel()
            self._waiters.discard(waiter)

    async def _cancel(self) -> None:
        """Again until this call is over: its first message may come to the daemon later than the word that cancels it."""
        request = engine_pb2.CancelRequest(request_id=self.request_id, attempt=self.attempt)
        give_up_s = self._loop.time() + CANCEL_S
        try:
            while not self.is_over and self._loop.time() < give_up_s:
                await self._link.ask(self._link.stub.Cancel, request, CANCEL_S, "cancel")
                await asyncio.sleep(CANCEL_RETRY_S)
        except DaemonGone as error:
            self.fail(error)
        except KvmoverError as error:
            self.fail(CallCancelled(f"request {self.request_id!r} was closed, cancelling it failed: {error}"))


def _give_up(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)


class LayerCall(Call[Event]):
    """A call that puts layers into pages, in order."""

    _ready_layers = 0

    @property
    def ready_layers(self) -> int:
        """Layers [0, n) are in the pages, checked."""
        return self._ready_layers if self._entry is None else max(self._ready_layers, self._entry.layers)

    async def wait_layer(self, layer: int, timeout_s: float | None = None) -> None:
        """Returns when the layer is in the pages, checked."""
        if self.ready_layers <= layer:
            await self._until(lambda: self.ready_layers > layer or None, f"layer {layer}", timeout_s)

    def _became_ready(self, ready: engine_pb2.Ready) -> None:
        if ready.first_layer != self._ready_layers or ready.last_layer < ready.first_layer:
            raise KvmoverError(
                f"the daemon announced layers {ready.first_layer} to {ready.last_layer} after {self._ready_layers} layers"
            )
        self._ready_layers = ready.last_layer + 1


class AnsweredCall(Call[Event]):
    """One request message, a stream of events."""

    def __init__(
        self,
        link: Link,
        method: grpc.aio.UnaryStreamMultiCallable[Request, Event],
        request: Request,
        *,
        name: tuple[str, int],
        timeout_s: float,
        entry: ProgressEntry | None = None,
    ) -> None:
        """`name`: request id and attempt."""
        super().__init__(link, *name, timeout_s, entry)
        events = method(request, timeout=timeout_s + GRACE_S, metadata=link.metadata)
        self._begin(events, events)


class PlannedCall(Call[Event], Generic[Request, Event]):
    """A plan, then "computed" messages, and a stream of events."""

    def __init__(
        self,
        link: Link,
        method: grpc.aio.StreamStreamMultiCallable[Request, Event],
        plan: Request,
        *,
        name: tuple[str, int],
        timeout_s: float,
        entry: ProgressEntry | None = None,
    ) -> None:
        """`name`: request id and attempt."""
        super().__init__(link, *name, timeout_s, entry)
        self._computed = 0
        self._more_computed = asyncio.Event()
        stream = method(timeout=timeout_s + GRACE_S, metadata=link.metadata)
        self._begin(stream, stream)
        self._spawn(self._write(stream, plan))

    @abstractmethod
    def _computed_message(self, layers: int) -> Request:
        """The message that says so."""

    async def computed(self, layers: int) -> None:
        """Says that layers [0, layers) are computed; returns at once, and words that pile up are sent as one.

        Raises `RequestEnded`, unless it ended with OK, and `BadRequest` for a number that shrinks.
        """
        if self._end is not None and self._end.reason is not Reason.OK:
            raise RequestEnded(self._end, f"layers [0, {layers}) were computed")
        if self._end is None and self._failure is not None:
            raise self._failure.with_traceback(None)
        if layers < self._computed:
            raise BadRequest(f"layers [0, {layers}) said to be computed after [0, {self._computed})")
        self._computed = layers
        if self._entry is None or not self._entry.credit(layers):
            self._more_computed.set()

    async def _write(self, stream: grpc.aio.StreamStreamCall[Request, Event], plan: Request) -> None:
        said = 0
        try:
            await stream.write(plan)
            while not self.is_over:
                await self._more_computed.wait()
                self._more_computed.clear()
                if self._computed > said:
                    said = self._computed
                    await stream.write(self._computed_message(said))
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            # The reader sees why the stream broke, and says so.
            return
