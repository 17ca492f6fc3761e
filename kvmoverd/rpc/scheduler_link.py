"""The way to the scheduler that leads: one connection at a time, to whichever address answers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias, TypeVar

import grpc
import grpc.aio

from kvmover_proto import scheduler_pb2, scheduler_pb2_grpc
from kvmoverd.core.breaker import Breaker
from kvmoverd.core.errors import KvmoverError, NotLeading, SchedulerUnreachable, ShuttingDown
from kvmoverd.rpc.errors import PassedOn, error_info, from_call

PAUSE_S, PAUSE_MAX_S = 0.1, 0.4
"""When no address answered, calls fail at once for this long; longer, when it goes on like that. A scheduler that starts waits
for leaders to say what they hold (`limits.settle`): it must be found long before that is over."""
SILENT_MAX = 2
"""So many calls in a row without an answer in time, and a scheduler that used to answer is given up."""
PATIENT_SHARE = 0.9
"""Of `timeout_s`: a call that had less says nothing of a scheduler when it was too late."""
REDIRECTS_MAX = 4
"""So often one call follows the name of a leader."""
ADDRESS_CHARS_MAX = 256
CLOSE_S = 5.0
MESSAGE_BYTES_MAX = 32 << 20
"""A pull with all that a group holds is the largest message."""
OPTIONS = (
    # Each connection is a fresh try: it shares no pause between tries with one that was given up.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
)

_ELSEWHERE = frozenset({NotLeading.reason, ShuttingDown.reason})
"""What a scheduler says that is not the one to ask."""
_NO_ANSWER = frozenset(
    {
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.UNKNOWN,
    }
)
"""What gRPC ends a call with that no scheduler has answered."""

Reply = TypeVar("Reply")
Begin: TypeAlias = "Callable[[scheduler_pb2_grpc.SchedulerAsyncStub, float], grpc.aio.UnaryUnaryCall[Any, Reply]]"
"""Begins a call over a connection, with its deadline in seconds."""


class Elsewhere(SchedulerUnreachable):
    """This connection is not the one: the same call may be answered over another."""


class Cancellable(Protocol):
    """A call that is under way."""

    def cancel(self) -> bool: ...


class Connection:
    """One address. `answers`: it has answered a call as one that leads; `silent`: calls since then without an answer in time."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.answers = False
        self.silent = 0
        self._channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        self.stub: scheduler_pb2_grpc.SchedulerAsyncStub = scheduler_pb2_grpc.SchedulerStub(self._channel)
        self._calls: set[Cancellable] = set()

    @contextmanager
    def holding(self, call: Cancellable) -> Iterator[None]:
        """While the caller waits for `call`, it can be cut. Raises `Elsewhere` then."""
        self._calls.add(call)
        try:
            yield
        except asyncio.CancelledError:
            # Also a call that nobody waited for when its channel was closed says so only now.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Elsewhere(f"{self.address} was given up meanwhile") from None
        finally:
            self._calls.discard(call)

    def cut(self) -> None:
        """Ends all calls."""
        calls, self._calls = self._calls, set()
        for call in calls:
            call.cancel()

    async def close(self) -> None:
        self.cut()
        await self._channel.close()


class SchedulerLink:
    """Calls of this daemon to the scheduler that leads, wherever that is.

    `addresses` says where schedulers may be, each time that one is looked for; a leader that is named by another is tried
    first. Every call may be made again over the next connection: the scheduler's calls are all idempotent. Belongs to the
    loop's thread.
    """

    def __init__(
        self, addresses: Callable[[], Sequence[str]], *, timeout_s: float, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        """`timeout_s`: for an answer to a call that does not wait for anything."""
        self.timeout_s = timeout_s
        self.calls: Counter[str] = Counter()
        self.boot_id, self.epoch = "", 0
        self.answered_s: float | None = None
        self.why = "it was not asked yet"
        self._addresses = addresses
        self._now_s = now_s
        self._current: Connection | None = None
        self._last_address = ""
        self._hint = ""
        self._left_s: dict[str, float] = {}
        """When each address was last given up: those go last."""
        self._breaker = Breaker(failures_max=1, pause_s=PAUSE_S, pause_max_s=PAUSE_MAX_S)
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def answered_ms(self) -> int:
        """Since the last answer to anything; 0 without one."""
        return 0 if self.answered_s is None else round(1000 * (self._now_s() - self.answered_s))

    @property
    def address(self) -> str:
        """Of the connection that there is, or of the last one."""
        return self._last_address

    async def ask(self, begin: Begin[Reply], *, wait_s: float = 0.0, left_s: float | None = None) -> Reply:
        """The answer of the scheduler that leads.

        `wait_s`: for so long it may wait for something before it answers; `left_s`: the caller's own deadline. Raises
        `PassedOn` with what the scheduler refused it with, and `SchedulerUnreachable`.
        """
        self._check_pause()
        call_s = self.timeout_s + wait_s
        until_s = self._now_s() + (call_s if left_s is None else min(call_s, left_s))
        tried: list[Connection] = []
        while (connection := self._next(tried)) is not None and self._now_s() < until_s:
            tried.append(connection)
            try:
                return await self._try(connection, begin, self._share_s(connection, tried, until_s))
            except Elsewhere as error:
                self.why = str(error)
        if connection is None:
            # All were tried: whoever comes next would fare no better.
            self._breaker.on_failure(self._now_s())
        raise self._unreachable(self.why if tried else "no address of one is known")

    def connection(self) -> Connection:
        """For a stream: the one that there is, else one to the next address. Raises `SchedulerUnreachable`."""
        found = self._next([])
        if found is None:
            raise self._unreachable("no address of one is known")
        return found

    def heard(self, connection: Connection, identity: scheduler_pb2.SchedulerIdentity | None) -> None:
        """An answer has come; `identity`: who says that it speaks. Raises `Elsewhere` for one that leads no more."""
        if identity is not None:
            if identity.epoch < self.epoch:
                self.calls["stale_epoch"] += 1
                why = f"{connection.address} speaks for epoch {identity.epoch}, {self.epoch} is known"
                self.leave(connection, why)
                raise Elsewhere(why)
            self.boot_id, self.epoch = identity.boot_id, identity.epoch
        connection.answers, connection.silent = True, 0
        self.answered_s, self.why = self._now_s(), ""
        self._breaker.on_success()

    def judged(self, connection: Connection, error: grpc.aio.AioRpcError, *, patient: bool = True) -> KvmoverError:
        """What a failed call means: `Elsewhere` when another connection may answer it. `patient`: it had its time."""
        info = error_info(error)
        if info is not None and info.reason not in _ELSEWHERE:
            self.heard(connection, None)
            self.calls["refused"] += 1
            return PassedOn(error, info)
        if info is not None:
            self.calls["not_leading"] += 1
            why = f"{connection.address} does not lead"
            self.leave(connection, why, leader=info.metadata.get("leader", ""))
            return Elsewhere(why)
        code = error.code()
        if code not in _NO_ANSWER:
            return from_call(error)
        why = f"{connection.address}: {code.name}: {error.details() or ''}"[:ADDRESS_CHARS_MAX]
        if code is grpc.StatusCode.UNIMPLEMENTED:
            why = f"{connection.address}: what answers there is no scheduler, or one of another version"
        connection.silent += patient
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and connection.answers and connection.silent < SILENT_MAX:
            # One call that was late says little, and all others over this connection would end with it.
            return self._unreachable(why)
        self.leave(connection, why)
        return Elsewhere(why)

    def stalled(self, connection: Connection, what: str) -> KvmoverError:
        """A stream got no answer in time. If other calls did, whoever is there has much to do: they are not cut for it."""
        why = f"{connection.address} {what}"
        if self.answered_s is not None and self._now_s() - self.answered_s < self.timeout_s:
            return self._unreachable(why)
        self.leave(connection, why)
        return Elsewhere(why)

    def leave(self, connection: Connection, why: str, *, leader: str = "") -> None:
        """Whoever is at this connection is not the one to ask; calls that run over it go elsewhere."""
        self._left_s[connection.address] = self._now_s()
        self.why = why
        if 0 < len(leader) <= ADDRESS_CHARS_MAX:
            self._hint = leader
        if self._current is connection:
            self._current = None
            connection.cut()
            closing = asyncio.get_running_loop().create_task(connection.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Calls that run end; there are none after it."""
        self._addresses = list
        self._hint = ""
        if self._current is not None:
            self.leave(self._current, "this daemon stops")
        if self._closing:
            await asyncio.wait(self._closing, timeout=CLOSE_S)

    async def _try(self, connection: Connection, begin: Begin[Reply], timeout_s: float) -> Reply:
        """Raises `Elsewhere`, and as `ask`."""
        call = begin(connection.stub, timeout_s)
        try:
            with connection.holding(call):
                reply = await call
        except grpc.aio.AioRpcError as error:
            raise self.judged(connection, error, patient=timeout_s >= PATIENT_SHARE * self.timeout_s) from error
        self.heard(connection, getattr(reply, "scheduler", None))
        self.calls["answered"] += 1
        return reply

    def _next(self, tried: Sequence[Connection]) -> Connection | None:
        """The connection that there is, also one that another call has made meanwhile; else one to the leader that was named,
        or to an address that this call has not tried."""
        known = self._known()
        if len(tried) >= len(known) + REDIRECTS_MAX:
            return None
        if self._current is not None:
            return self._current if self._current not in tried else None
        hint, self._hint = self._hint, ""
        addresses = {connection.address for connection in tried}
        untried = [hint] if hint else [address for address in known if address not in addresses]
        if not untried:
            return None
        self._last_address = min(untried, key=lambda address: self._left_s.get(address, 0.0))
        self._current = Connection(self._last_address)
        return self._current

    def _known(self) -> list[str]:
        addresses = [address for address in self._addresses() if address]
        self._left_s = {address: left_s for address, left_s in self._left_s.items() if address in addresses}
        return addresses

    def _share_s(self, connection: Connection, tried: Sequence[Connection], until_s: float) -> float:
        """Who has answered before gets all the time there is; while one is looked for, each gets its share."""
        left_s = max(0.001, until_s - self._now_s())
        if connection.answers:
            return left_s
        addresses = {connection.address for connection in tried}
        return left_s / (1 + sum(address not in addresses for address in self._known()))

    def _check_pause(self) -> None:
        if self._breaker.wait_s(self._now_s()) > 0:
            raise self._unreachable(self.why)

    def _unreachable(self, why: str) -> SchedulerUnreachable:
        self.calls["unreachable"] += 1
        wait_s = max(PAUSE_S, self._breaker.wait_s(self._now_s()))
        return SchedulerUnreachable(f"no scheduler that leads has answered: {why}", retry_after_ms=round(1000 * wait_s))
