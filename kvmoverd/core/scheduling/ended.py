"""Requests that have ended, remembered for a while; and how fast requests go, to say when to try again."""

from __future__ import annotations

from collections import OrderedDict

from kvmoverd.core.scheduling.requests import Request, Ticket

RETRY_MIN_MS = 50
RETRY_MAX_MS = 10_000
RETRY_SHARE = 0.05
"""Of the full queue has to go before another try makes sense: those who were refused come in a crowd."""
WINDOW_NS = 1_000_000_000


class Ended:
    """The last `ended_max` tickets of requests that ended, with what was asked."""

    def __init__(self, ended_max: int) -> None:
        self._ended_max = ended_max
        self._tickets: OrderedDict[str, tuple[Request, Ticket]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tickets)

    def add(self, request: Request, ticket: Ticket) -> None:
        self._tickets[request.request_id] = request, ticket
        if len(self._tickets) > self._ended_max:
            self._tickets.popitem(last=False)

    def get(self, request_id: str) -> tuple[Request, Ticket] | None:
        return self._tickets.get(request_id)


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
