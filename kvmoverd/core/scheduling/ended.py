"""Requests that have ended, remembered for a while; and how fast requests go, to say when to try again."""

from __future__ import annotations

from collections import OrderedDict, deque

from kvmoverd.core.scheduling.explain import EngineWhy, Explain
from kvmoverd.core.scheduling.requests import Request, Ticket

RETRY_MIN_MS = 50
RETRY_MAX_MS = 10_000
RETRY_SHARE = 0.05
"""Of the full queue has to go before another try makes sense: those who were refused come in a crowd."""
WINDOW_NS = 1_000_000_000
CANDIDATES_MAX = 2_000_000
"""That are remembered of ended requests, about 250 bytes each: a group may have thousands of engines, and each is one."""


class Ended:
    """The last `ended_max` tickets of requests that ended, with what was asked."""

    def __init__(self, ended_max: int) -> None:
        self._ended_max = ended_max
        self._tickets: OrderedDict[str, tuple[Request, Ticket]] = OrderedDict()
        self._explained: deque[tuple[str, int]] = deque()
        """Those that have their candidates, and how many."""
        self._candidates = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def add(self, request: Request, ticket: Ticket) -> None:
        self._tickets[request.request_id] = request, ticket
        if len(self._tickets) > self._ended_max:
            self._tickets.popitem(last=False)
        if ticket.assignment is not None:
            why = ticket.assignment.explain
            count = len(why.prefill.board.seen) + len(why.decode.board.seen)
            self._explained.append((request.request_id, count))
            self._candidates += count
            while self._candidates > CANDIDATES_MAX or len(self._explained) > self._ended_max:
                self._forget_candidates(*self._explained.popleft())

    def get(self, request_id: str) -> tuple[Request, Ticket] | None:
        return self._tickets.get(request_id)

    def _forget_candidates(self, request_id: str, count: int) -> None:
        self._candidates -= count
        found = self._tickets.get(request_id)
        if found is None or (assignment := found[1].assignment) is None:
            return
        why = assignment.explain
        brief = Explain(why.policy, _alone(why.prefill), _alone(why.decode), why.path, why.waited_ns)
        self._tickets[request_id] = found[0], found[1]._replace(assignment=assignment._replace(explain=brief))


def _alone(why: EngineWhy) -> EngineWhy:
    return EngineWhy(why.rule, why.engine, why.numbers)


class Drain:
    """How many requests were assigned in a second, as last seen over a whole window."""

    def __init__(self) -> None:
        self._begun_ns = 0
        self._count = 0
        self.per_s = 0.0

    def one(self, now_ns: int) -> None:
        """A request was assigned."""
        past_ns = now_ns - self._begun_ns
        if past_ns >= WINDOW_NS:
            self.per_s = self._count * 1e9 / past_ns
            self._begun_ns, self._count = now_ns, 0
        self._count += 1

    def retry_after_ms(self, waiting: int, now_ns: int) -> int:
        """Until a share of so many waiting requests will be gone, by that rate, or by a lower one if few were assigned since.

        >>> drain = Drain()
        >>> for ms in range(1001): drain.one(ms * 1_000_000)
        >>> drain.retry_after_ms(10_000, 1_001_000_000), drain.retry_after_ms(10_000, 60_000_000_000)
        (500, 10000)
        """
        past_ns = now_ns - self._begun_ns
        per_s = min(self.per_s, self._count * 1e9 / past_ns) if past_ns > 2 * WINDOW_NS else self.per_s
        if per_s <= 0:
            return RETRY_MAX_MS
        return int(min(RETRY_MAX_MS, max(RETRY_MIN_MS, waiting * RETRY_SHARE * 1000 / per_s)))
