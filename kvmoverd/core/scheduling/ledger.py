"""The requests that are known: those that live, and the last that ended."""

from __future__ import annotations

from collections.abc import Iterable

from kvmoverd.core.errors import BadRequest, UnknownRequest
from kvmoverd.core.scheduling.ended import Ended
from kvmoverd.core.scheduling.limits import Limits
from kvmoverd.core.scheduling.requests import Entry, Request, Ticket


class Ledger:
    """By their ids, which are unique in the cluster."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.live: dict[str, Entry] = {}
        self._ended = Ended(limits.ended_max)
        self._orders = 0

    def __len__(self) -> int:
        return len(self.live)

    @property
    def full(self) -> bool:
        return len(self.live) >= self._limits.live_max

    def entries(self) -> Iterable[Entry]:
        return self.live.values()

    def enter(self, request: Request, attempt: int, now_ns: int) -> Entry:
        """It lives from now on."""
        self._orders += 1
        entry = self.live[request.request_id] = Entry(request, self._orders, attempt, now_ns)
        return entry

    def end(self, entry: Entry, ticket: Ticket) -> None:
        """It is remembered with this ticket."""
        del self.live[entry.request.request_id]
        self._ended.add(entry.request, ticket)

    def has_ended(self, request_id: str) -> bool:
        return self._ended.get(request_id) is not None

    def ticket(self, request_id: str) -> Ticket:
        """Raises `UnknownRequest`."""
        entry = self.live.get(request_id)
        if entry is not None:
            return entry.ticket()
        ended = self._ended.get(request_id)
        if ended is None:
            raise UnknownRequest(f"request {request_id!r} is not known; the last {len(self._ended)} that ended are")
        return ended[1]

    def known(self, request: Request) -> Ticket | None:
        """What has become of it, if it was submitted before. Raises `BadRequest` if that was another one of the same name."""
        entry = self.live.get(request.request_id)
        if entry is not None:
            if entry.adopted and entry.request.has_prompt_of(request):
                entry.request, entry.adopted = request, False
            was, ticket = entry.request, entry.ticket()
        else:
            ended = self._ended.get(request.request_id)
            if ended is None:
                return None
            was, ticket = ended
        # Leaders, of whom it may be known, don't know the tenant.
        if not was.has_prompt_of(request) or was.tenant not in ("", request.tenant):
            raise BadRequest(f"request {request.request_id!r} {was.differs_text(request)}")
        return ticket
