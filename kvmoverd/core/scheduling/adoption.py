"""Requests from before the scheduler's start: those that leaders hold go on, those that nobody holds are given out anew."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from kvmoverd.core.scheduling.books import Books
from kvmoverd.core.scheduling.held import ADOPTED, Held
from kvmoverd.core.scheduling.ledger import Ledger
from kvmoverd.core.scheduling.reports import Role
from kvmoverd.core.scheduling.requests import Entry, Request, Revoked, State, after_restart, first_of
from kvmoverd.core.scheduling.state import Group


class Adoption:
    """A client that submits a request again may be faster than the leaders that hold it: until `settled_ns` its request waits for
    them. A request of which only one leader is known is given up `settle_ns` later."""

    def __init__(self, ledger: Ledger, *, settled_ns: int, settle_ns: int) -> None:
        self._ledger = ledger
        self._settled_ns = settled_ns
        self._settle_ns = settle_ns
        self._returning: OrderedDict[str, Entry] = OrderedDict()
        self._halves: OrderedDict[str, tuple[int, Entry]] = OrderedDict()

    def awaits(self, request: Request, now_ns: int) -> bool:
        """Somebody may hold it."""
        return request.after_attempt > 0 and now_ns < self._settled_ns

    def wait_for(self, entry: Entry) -> None:
        self._returning[entry.request.request_id] = entry

    def forget(self, request_id: str) -> None:
        self._returning.pop(request_id, None)
        self._halves.pop(request_id, None)

    def is_half(self, request_id: str) -> bool:
        """One of its engines may not be known yet."""
        return request_id in self._halves

    def adopted(self, group: Group, books: Books, all_held: Sequence[Held], now_ns: int) -> list[Entry]:
        """Those that the group goes on with; it is told of the others that it must not."""
        found = [self._adopt(group, books, held, now_ns) for held in all_held]
        return [entry for entry in found if entry is not None]

    def _adopt(self, group: Group, books: Books, held: Held, now_ns: int) -> Entry | None:
        name = held.prefill_engine if group.role is Role.PREFILL else held.decode_engine
        engine = group.engines.get(name)
        entry = self._entry(group, books, held, now_ns) if engine is not None else None
        if engine is None or entry is None:
            group.tell(Revoked(held.request_id, held.attempt), None)
            return None
        if entry.assignment is None:
            entry.assignment = held.assignment(books.policy.name)
            entry.state = State.ASSIGNED
        entry.attempt = max(entry.attempt, held.attempt)
        if group.role is Role.DECODE and held.prefill_done:
            entry.prefilled = True
            books.prefill_ended(entry)
        side = entry.prefill if group.role is Role.PREFILL else entry.decode
        if side is not None and side.engine is not engine:
            group.tell(Revoked(held.request_id, held.attempt), None)
        elif side is None and not (group.role is Role.PREFILL and entry.prefilled):
            books.adopt(entry, engine)
        return entry

    def _entry(self, group: Group, books: Books, held: Held, now_ns: int) -> Entry | None:
        """That of the request, if this attempt is its present one."""
        entry = self._ledger.live.get(held.request_id)
        if entry is None:
            if self._ledger.has_ended(held.request_id) or self._ledger.full:
                return None
            entry = self._ledger.enter(held.request(group.model), held.attempt, now_ns)
            entry.adopted = True
        elif entry.request.model != group.model:
            return None
        elif entry.state is State.WAITING:
            if held.request_id not in self._returning or held.attempt < first_of(entry.attempt):
                return None
            del self._returning[held.request_id]
        elif first_of(held.attempt) != first_of(entry.attempt):
            assert entry.assignment is not None
            if held.attempt < entry.attempt or entry.assignment.explain.path.rule != ADOPTED:
                return None
            # An earlier scheduler had given it out once more before it ended: the later attempt is the one that counts.
            books.undo(entry)
            entry.state = State.WAITING
        self._halves[held.request_id] = now_ns, entry
        return entry

    def returned(self, now_ns: int) -> Iterator[Entry]:
        """Nobody said that he holds them: to be given out anew, under a higher attempt than anybody can know of."""
        if now_ns >= self._settled_ns:
            while self._returning:
                _, entry = self._returning.popitem(last=False)
                entry.attempt = after_restart(entry.attempt)
                yield entry

    def orphans(self, now_ns: int) -> Iterator[Entry]:
        """One of the two engines goes on with them, and of the other nobody has heard."""
        while self._halves:
            since_ns, entry = next(iter(self._halves.values()))
            if now_ns - since_ns < self._settle_ns:
                return
            self._halves.popitem(last=False)
            if entry.decode is None or (entry.prefill is None and not entry.prefilled):
                yield entry
