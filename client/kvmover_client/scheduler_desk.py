"""How a client's words get to the scheduler: bounded in number, over sessions that come and go, with pauses that grow."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import grpc.aio

from kvmover_client.errors import (
    DaemonGone,
    Draining,
    KvmoverError,
    QueueFull,
    SchedulerUnreachable,
    TimedOut,
    Unavailable,
)
from kvmover_client.link import Link
from kvmover_client.scheduling import Identity
from kvmover_proto import engine_pb2_grpc

ANSWER_S = 10.0
PAUSE_S, PAUSE_MAX_S = 0.05, 2.0
"""After a call that no scheduler has answered; it doubles from the first to the second, and is spread by a half each way."""
CROWD = 64
"""So many calls that pause ask as often as one of them would alone; more share that."""
SHORT_CALLS_MAX = 128
"""That are under way at once: a daemon takes 4,096 of all its engines, and answers each in about a third of a millisecond."""
LONG_POLLS_MAX = 256
LONG_POLL_S = 5.0
CROWDED_POLL_S = 0.25
"""How long one waits for a change: the first alone, the second when others wait for their turn. 256 at a time make about a
thousand calls a second then, and 10,000 requests are looked at every 10 s each."""
LATE_S = 1.0
"""An answer that waits for a change comes at the caller's deadline, and may be late by so much."""
OPEN_S = 5.0

Request = TypeVar("Request")
Reply = TypeVar("Reply")
T = TypeVar("T")

Method: TypeAlias = "Callable[[engine_pb2_grpc.EngineAsyncStub], grpc.aio.UnaryUnaryMultiCallable[Request, Reply]]"


class Crowd:
    """Calls that pause because nobody answers. The first answer that any call gets wakes them all: so they need not ask
    often, however many they are."""

    def __init__(self) -> None:
        self._paused: set[asyncio.Future[None]] = set()

    async def pause(self, pause_s: float, most_s: float) -> None:
        """For `pause_s`, longer the more others pause, or until there was an answer; never longer than `most_s`."""
        first_s = min(pause_s, most_s, PAUSE_S)
        await asyncio.sleep(first_s)
        wait_s = min(most_s, pause_s * max(1.0, len(self._paused) / CROWD)) - first_s
        woken = asyncio.get_running_loop().create_future()
        self._paused.add(woken)
        try:
            await asyncio.wait((woken,), timeout=max(0.0, wait_s))
        finally:
            self._paused.discard(woken)

    def wake(self) -> None:
        for woken in self._paused:
            if not woken.done():
                woken.set_result(None)


@dataclass
class Pauses:
    """Pauses between tries of one call, up to a deadline of the loop's clock."""

    until_s: float
    chance: Callable[[], float]
    crowd: Crowd
    tries: int = 0

    async def after(self, error: KvmoverError, last_known: str) -> None:
        """Waits, as long as the other side wants at least. Raises `TimedOut` at the deadline."""
        grown_s = min(PAUSE_MAX_S, PAUSE_S * 2.0 ** min(self.tries, 16))
        pause_s = max(grown_s, min(PAUSE_MAX_S, retry_after_s(error))) * (0.5 + self.chance())
        self.tries += 1
        loop = asyncio.get_running_loop()
        left_s = max(0.0, self.until_s - loop.time())
        if isinstance(error, QueueFull):
            # Answers that others get say nothing of a full queue.
            await asyncio.sleep(min(left_s, pause_s))
        else:
            await self.crowd.pause(pause_s, left_s)
        if loop.time() >= self.until_s:
            raise TimedOut(
                f"{last_known}; {self.tries} tries, the last one failed with {error.reason}: {error.message}",
                details={"tries": str(self.tries), "last": error.reason},
            ) from error


def retry_after_s(error: KvmoverError) -> float:
    """0 where the other side has not said."""
    text = error.details.get("retry_after_ms", "")
    return int(text) / 1000 if text.isdecimal() else 0.0


def may_pass(error: KvmoverError) -> bool:
    """Does it say that the same question may be answered later, whoever has failed to now?"""
    return isinstance(error, DaemonGone | TimedOut | Unavailable) and not isinstance(error, Draining)


class Desk:
    """One for each client. While the client's own session is over, calls go through another one that the desk opens.

    The client's own is left alone: what was registered over it is gone with it, and that is to be seen by who has done so.
    """

    def __init__(
        self, own: Callable[[], Link], endpoint: str, name: str, chance: Callable[[], float] = random.random
    ) -> None:
        self.chance = chance
        self.epoch = 0
        self._own = own
        self._endpoint = endpoint
        self._name = name
        self._spare: Link | None = None
        self._opening: asyncio.Task[Link] | None = None
        self._closed = False
        self._crowd = Crowd()
        self._short = asyncio.Semaphore(SHORT_CALLS_MAX)
        self._long = asyncio.Semaphore(LONG_POLLS_MAX)

    async def ask(self, method: Method[Request, Reply], request: Request, what: str, *, until_s: float) -> Reply:
        """One short call. Raises what the daemon or the scheduler raised, `DaemonGone`, `TimedOut`."""
        async with self._slot(self._short, what, until_s):
            return await self._ask(method, request, what, min(ANSWER_S, _left_s(until_s)))

    async def poll(
        self, method: Method[Request, Reply], make: Callable[[int], Request], what: str, *, until_s: float
    ) -> Reply:
        """As `ask`, for a call that waits for a change: `make` is given for how many milliseconds, when its turn has come."""
        async with self._slot(self._long, what, until_s):
            left_s = _left_s(until_s)
            # The last free place is taken: others wait for this one, or will soon.
            wait_s = min(left_s, CROWDED_POLL_S if self._long.locked() else LONG_POLL_S)
            return await self._ask(method, make(int(1000 * wait_s)), what, min(wait_s + ANSWER_S, left_s + LATE_S))

    def check(self, scheduler: Identity) -> Identity:
        """Raises `SchedulerUnreachable` for the words of one that leads no more."""
        if scheduler.epoch < self.epoch:
            raise SchedulerUnreachable(
                f"a scheduler speaks for epoch {scheduler.epoch}, {self.epoch} is known: it leads no more"
            )
        self.epoch = scheduler.epoch
        return scheduler

    async def patiently(
        self,
        call: Callable[[], Coroutine[Any, Any, T]],
        last_known: Callable[[], str],
        *,
        until_s: float,
        also_full: bool = True,
    ) -> T:
        """The answer of the first try that gets one. `also_full` False: `QueueFull` is raised at once.

        Raises `TimedOut` with what was last known at the deadline, and what no pause would mend.
        """
        pauses = Pauses(until_s, self.chance, self._crowd)
        while True:
            try:
                return await call()
            except KvmoverError as error:
                is_final = self._closed or not may_pass(error) or (isinstance(error, QueueFull) and not also_full)
                if is_final:
                    raise
                await pauses.after(error, last_known())

    async def use_own(self) -> None:
        """The client has a session again, or for the first time after `close`."""
        self._closed = False
        await self._drop_spare()

    async def close(self) -> None:
        """Calls that wait fail with `DaemonGone`, as later ones do."""
        self._closed = True
        self._crowd.wake()
        await self._drop_spare()

    async def _drop_spare(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait((self._opening,))
        spare, self._spare = self._spare, None
        if spare is not None:
            await spare.close()

    async def _ask(self, method: Method[Request, Reply], request: Request, what: str, timeout_s: float) -> Reply:
        until_s = asyncio.get_running_loop().time() + timeout_s
        link = await self._link(until_s)
        reply = await link.ask(method(link.stub), request, _left_s(until_s), what)
        self._crowd.wake()
        return reply

    async def _link(self, until_s: float) -> Link:
        """Raises `DaemonGone`, `Refused`, `TimedOut`."""
        own = self._own()
        if self._closed or not own.is_gone:
            own.check()
            return own
        if self._spare is None or self._spare.is_gone:
            if self._opening is None:
                self._opening = asyncio.get_running_loop().create_task(self._open())
                # All that wait for it may have gone before it failed.
                self._opening.add_done_callback(lambda opening: opening.cancelled() or opening.exception())
            opening = self._opening
            await asyncio.wait((opening,), timeout=_left_s(until_s))
            if not opening.done():
                raise TimedOut(f"no session with the daemon at {self._endpoint} in time")
            if opening.cancelled():
                raise DaemonGone(f"{self._endpoint}: the session was given up while it was opened")
            return opening.result()
        return self._spare

    async def _open(self) -> Link:
        """One for all that wait: each of them would otherwise try by itself, one after the other."""
        try:
            if self._spare is not None:
                await self._spare.close()
            self._spare, _ = await Link.open(
                self._endpoint,
                name=self._name,
                timeout_s=OPEN_S,
                calls_max=SHORT_CALLS_MAX + LONG_POLLS_MAX,
                progress_page=False,
            )
            return self._spare
        finally:
            if self._opening is asyncio.current_task():
                self._opening = None

    @asynccontextmanager
    async def _slot(self, slots: asyncio.Semaphore, what: str, until_s: float) -> AsyncIterator[None]:
        """First come, first served. Raises `TimedOut`."""
        try:
            async with asyncio.timeout_at(until_s):
                await slots.acquire()
        except TimeoutError:
            raise TimedOut(f"{what}: no turn came in time, others were first") from None
        try:
            yield
        finally:
            slots.release()


def _left_s(until_s: float) -> float:
    return max(0.001, until_s - asyncio.get_running_loop().time())
