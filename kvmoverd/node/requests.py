"""Live requests: who runs, the fence of attempts, and how requests ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvmoverd.core.errors import Draining, KvmoverError, QueueFull, RequestTaken
from kvmoverd.core.fence import AttemptFence
from kvmoverd.core.status import Reason
from kvmoverd.node.driver import Driver

Owners = Callable[[str, str, int], set[str]]
"""Whose a request is for a call of (kind, request_id, attempt): the owners of what a higher attempt than theirs would end."""


@dataclass(frozen=True, slots=True)
class Over:
    """Attempts of a request that are at an end, up to `attempt`. `known`: the one that refusals name; `why`: for the ends."""

    request_id: str
    attempt: int
    known: int
    why: str


OWNER_SHARE = 4
"""One session or node may have a quarter of all live requests: one whose calls never end leaves room for the others."""


class Requests:
    """All live drivers of a node; bounded, together and by owner."""

    def __init__(self, *, live_max: int, fence: AttemptFence) -> None:
        self.live_max = live_max
        self.outcomes: Counter[str] = Counter()
        self.draining = False
        self.stopping = False
        self.on_over: list[Callable[[Over], None]] = []
        self.waiting_owners: list[Owners] = []
        self._fence = fence
        self._live: dict[Driver, str] = {}
        self._by_request: dict[str, dict[Driver, str]] = {}
        self._owned: Counter[str] = Counter()
        self._owned_max = max(1, live_max // OWNER_SHARE)

    def enter(self, kind: str, request_id: str, attempt: int, *, owner: str = "") -> None:
        """Admits a call of an attempt; lower attempts of the same request are stopped.

        `owner` is the session or the node that calls: a higher attempt counts only from one that has a part in the lower
        one, as its caller or as the node that reserved for it. An empty one is this node itself.
        While draining, the further calls of an attempt that is known are admitted: it may go on to its own end. Raises
        `Draining`, `QueueFull`, `StaleAttempt`, `RequestTaken`.
        """
        if self.stopping or (self.draining and not self._fence.is_current(request_id, attempt)):
            raise Draining("this node takes no new requests: it is draining")
        if len(self._live) >= self.live_max:
            raise QueueFull(f"{len(self._live)} requests are live, at most {self.live_max} may be")
        if owner and self._owned[owner] >= self._owned_max:
            raise QueueFull(
                f"{self._owned[owner]} requests of {owner} are live, at most {self._owned_max} of one may be"
            )
        if owner:
            self._refuse_strangers(kind, request_id, attempt, owner)
        if self._fence.enter(kind, request_id, attempt):
            self._end_attempts(Over(request_id, attempt - 1, attempt, f"attempt {attempt} came"))

    def fence_off(self, request_id: str, attempt: int) -> bool:
        """The scheduler has given this attempt and lower ones up: calls that run end, later ones are refused.

        Whoever owns them: the higher attempt may be anybody's, and begin at once. False when that was known.
        """
        if not self._fence.fence_off(request_id, attempt):
            return False
        self._end_attempts(Over(request_id, attempt, attempt, f"the scheduler has given attempt {attempt} up"))
        return True

    def _end_attempts(self, over: Over) -> None:
        """What runs, and what waits without running."""
        self.cancel(over.request_id, over.attempt, Reason.STALE_ATTEMPT, over.why)
        for told in self.on_over:
            told(over)

    @contextmanager
    def entering(self, kind: str, request_id: str, attempt: int, *, owner: str = "") -> Iterator[None]:
        """As `enter`; a call that is refused inside may be made again under the same attempt."""
        self.enter(kind, request_id, attempt, owner=owner)
        self._fence.hold(request_id)
        try:
            yield
        except KvmoverError:
            self._fence.withdraw(kind, request_id, attempt)
            raise
        finally:
            self._fence.let_go(request_id)

    def withdraw(self, kind: str, request_id: str, attempt: int) -> None:
        """A call that took what it was admitted for has given it back: it may be made again under the same attempt."""
        self._fence.withdraw(kind, request_id, attempt)

    def _refuse_strangers(self, kind: str, request_id: str, attempt: int, owner: str) -> None:
        """Raises `RequestTaken` when calls that go on would be ended by one that has no part in any of them."""
        owners: set[str] = set()
        for driver, added_by in self._by_request.get(request_id, {}).items():
            if driver.call.attempt < attempt and not _is_ending(driver):
                owners |= {added_by, driver.call.session_id}
        for waiting in self.waiting_owners:
            owners |= waiting(kind, request_id, attempt)
        owners.discard("")
        if owners and owner not in owners:
            raise RequestTaken(f"request {request_id!r}: attempt {attempt} would end a lower one, which is another's")

    def add(self, driver: Driver, *, owner: str = "") -> None:
        """The driver is live until it is gone. `owner`: who asked for it, where that is not the session of its call."""
        self._live[driver] = owner = owner or driver.call.session_id
        self._by_request.setdefault(driver.call.request_id, {})[driver] = owner
        self._owned[owner] += 1
        self._fence.hold(driver.call.request_id)
        driver.on_gone.append(lambda: self._remove(driver))

    def _remove(self, driver: Driver) -> None:
        owner = self._live.pop(driver, None)
        if owner is not None:
            self._leave_request(driver)
            self._owned[owner] -= 1
            if not self._owned[owner]:
                del self._owned[owner]
            self._fence.let_go(driver.call.request_id)
        if driver.ended is not None:
            self.outcomes[f"{driver.kind}/{driver.ended.reason.name}"] += 1

    def _leave_request(self, driver: Driver) -> None:
        request_id = driver.call.request_id
        of_request = self._by_request[request_id]
        del of_request[driver]
        if not of_request:
            del self._by_request[request_id]

    def cancel(self, request_id: str, attempt: int, reason: Reason, message: str) -> int:
        """Stops all calls of this attempt and lower ones; returns how many."""
        of_request = self._by_request.get(request_id, {})
        found = [driver for driver in of_request if driver.call.attempt <= attempt]
        for driver in found:
            driver.stop(reason, message)
        return len(found)

    def cancel_of_session(self, session_id: str, request_id: str, attempt: int, message: str) -> int:
        """Cancels as `cancel` does, but only what this session asked for."""
        of_request = self._by_request.get(request_id, {})
        found = [d for d in of_request if d.call.session_id == session_id and d.call.attempt <= attempt]
        for driver in found:
            driver.stop(Reason.CANCELLED, message)
        return len(found)

    def stop_session(self, session_id: str, message: str) -> None:
        """The engine is gone: everything it asked for ends."""
        for driver in self.live():
            if driver.call.session_id == session_id:
                driver.stop(Reason.ENGINE_GONE, message)

    def stop_all(self, reason: Reason, message: str) -> None:
        for driver in self.live():
            driver.stop(reason, message)

    def live(self) -> list[Driver]:
        return list(self._live)

    def by_kind(self) -> Counter[str]:
        return Counter(driver.kind for driver in self._live)


def _is_ending(driver: Driver) -> bool:
    """Its end is told, or decided: there is nothing left to protect."""
    return driver.ended is not None or driver.machine.state.name == "DRAINING"
