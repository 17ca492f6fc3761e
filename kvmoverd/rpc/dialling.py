"""Carries offers of queue pairs to other nodes: `Dial` of `ports.connection`, over the node-to-node API."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from typing import Protocol

from kvmoverd.core.errors import KvmoverError, PeerUnreachable, QueueFull
from kvmoverd.ports.connection import Answer, Answered, Offer
from kvmoverd.ports.transport import Route

DIALS_MAX = 1_024
"""Offers under way at once; beyond that they are refused."""
CONNECT_S = 5.0
ANSWER_S = CONNECT_S + 1.0
"""From the offer to `answered`, whatever happens: a loop that is late included."""


class ConnectingPeer(Protocol):
    """Another node, as far as it is needed here."""

    async def connect_queue_pair(self, route: Route, offer: Offer) -> Answer:
        """Raises `KvmoverError`."""


class Dialler:
    """May be called from any thread; the calls themselves are made by the loop that it was made in.

    Each offer is answered once: by the other node, by `ANSWER_S`, or by `stop`. After `stop` everything is refused at once.
    """

    def __init__(self, find: Callable[[str], ConnectingPeer | None]) -> None:
        """`find`: the node of a name, asked in the loop."""
        self._find = find
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, Answered] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False

    def __call__(self, route: Route, offer: Offer, answered: Answered) -> None:
        with self._lock:
            refusal = self._refusal()
            number = next(self._numbers)
            if refusal is None:
                self._waiting[number] = answered
        if refusal is not None:
            answered(refusal)
            return
        try:
            self._loop.call_soon_threadsafe(self._begin, number, route, offer)
        except RuntimeError:
            self._answer(number, PeerUnreachable("the daemon has stopped"))

    def stop(self) -> None:
        """In the loop. Nothing is under way any more when this returns, whoever waited was told."""
        with self._lock:
            self._stopped = True
            numbers = list(self._waiting)
        for number in numbers:
            self._answer(number, PeerUnreachable("the daemon is stopping"))
        for task in self._tasks:
            task.cancel()

    def _refusal(self) -> KvmoverError | None:
        if self._stopped:
            return PeerUnreachable("the daemon is stopping")
        if len(self._waiting) >= DIALS_MAX:
            return QueueFull(f"{len(self._waiting)} queue pairs are being connected, at most {DIALS_MAX} at once")
        return None

    def _begin(self, number: int, route: Route, offer: Offer) -> None:
        if self._stopped:
            return
        task = self._loop.create_task(self._dial(number, route, offer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _dial(self, number: int, route: Route, offer: Offer) -> None:
        answer: Answer | KvmoverError = PeerUnreachable(f"an offer to {route.node} was cut short")
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await self._asked(route, offer)
        except KvmoverError as error:
            answer = error
        except TimeoutError:
            answer = PeerUnreachable(f"{route.node} did not answer an offer within {ANSWER_S:g} s")
        except Exception as error:  # noqa: BLE001 - whatever it is, the transport waits for its answer
            answer = KvmoverError(f"an offer to {route.node} failed: {error!r}")
        finally:
            self._answer(number, answer)

    async def _asked(self, route: Route, offer: Offer) -> Answer:
        peer = self._find(route.node)
        if peer is None:
            raise PeerUnreachable(f"{route.node} is no peer of this node any more")
        return await peer.connect_queue_pair(route, offer)

    def _answer(self, number: int, answer: Answer | KvmoverError) -> None:
        with self._lock:
            answered = self._waiting.pop(number, None)
        if answered is not None:
            answered(answer)
