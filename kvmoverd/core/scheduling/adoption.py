"""Requests from before the scheduler's start: those that leaders hold go on, those that nobody holds are given out anew."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvmoverd.core.scheduling.books import Books
from kvmoverd.core.scheduling.held import ADOPTED, Held
from kvmoverd.core.scheduling.ledger import Ledger
from kvmoverd.core.scheduling.reports import Role
from kvmoverd.core.scheduling.requests import Assignment, Entry, Request, Revoked, State, first_of
from kvmoverd.core.scheduling.state import Engine, Group


@dataclass(slots=True)
class Adopted:
    """What became of what a leader holds: `entries` are its own now; `doubted` are those that others have though this leader had
    an attempt that is not lower, with that: nodes were told to refuse both, so that none of the two may go on."""

    entries: list[Entry] = field(default_factory=list)
    doubted: list[tuple[Entry, int]] = field(default_factory=list)


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
        if self._returning or self._halves:
            self._returning.pop(request_id, None)
            self._halves.pop(request_id, None)

    def is_half(self, request_id: str) -> bool:
        """One of its engines may not be known yet."""
        return request_id in self._halves

    def adopt(self, group: Group, books: Books, all_held: Sequence[Held], now_ns: int) -> Adopted:
        """What the group goes on with is known from now on; it is told of what it must not go on with."""
        adopted = Adopted()
        for held in all_held:
            engine = group.engines.get(held.prefill_engine if group.role is Role.PREFILL else held.decode_engine)
            entry = self._ledger.live.get(held.request_id)
            if engine is not None and self._may_have(group, books, held, entry):
                entry = entry or self._entered(group, held, now_ns)
                self._take(engine, books, held, entry)
                self._halves[held.request_id] = now_ns, entry
                adopted.entries.append(entry)
            else:
                group.tell(Revoked(held.request_id, held.attempt), None)
                if entry is not None and entry.assignment is not None and held.attempt >= first_of(entry.attempt):
                    adopted.doubted.append((entry, held.attempt))
        return adopted

    def _may_have(self, group: Group, books: Books, held: Held, entry: Entry | None) -> bool:
        """This attempt is the request's present one, or is so from now on."""
        if entry is None:
            return not self._ledger.has_ended(held.request_id) and not self._ledger.full
        if entry.request.model != group.model:
            return False
        if self._returning.pop(held.request_id, None) is not None:
            entry.attempt = held.attempt
            return True
        if held.attempt < first_of(entry.attempt):
            return False
        if entry.assignment is None:
            # Nobody was told of any other.
            books.undo(entry)
            return True
        if entry.assignment.explain.path.rule != ADOPTED:
            return _is_same(held, entry.assignment)
        if first_of(held.attempt) != first_of(entry.attempt):
            # An earlier scheduler had given it out once more before it ended: the later attempt is the one that counts.
            books.undo(entry)
            entry.state = State.WAITING
            return True
        return _is_same(held, entry.assignment)

    def _entered(self, group: Group, held: Held, now_ns: int) -> Entry:
        entry = self._ledger.enter(held.request(group.model), held.attempt, now_ns)
        entry.adopted = True
        return entry

    def _take(self, engine: Engine, books: Books, held: Held, entry: Entry) -> None:
        if entry.assignment is None:
            entry.assignment = held.assignment(books.policy.name)
            entry.state = State.ASSIGNED
        entry.attempt = max(entry.attempt, held.attempt)
        prefills = engine.group.role is Role.PREFILL
        if held.prefill_done and not prefills:
            entry.prefilled = True
            books.prefill_ended(entry)
        if (entry.prefill if prefills else entry.decode) is None and not (prefills and entry.prefilled):
            books.adopt(entry, engine)

    def returned(self, now_ns: int) -> Iterator[Entry]:
        """Nobody said that he holds them: to be given out anew."""
        if now_ns >= self._settled_ns:
            while self._returning:
                _, entry = self._returning.popitem(last=False)
                yield entry

    def orphans(self, now_ns: int) -> Iterator[Entry]:
        """One of the two engines goes on with them, and of the other nobody has heard."""
        while self._halves:
            since_ns, entry = next(iter(self._halves.values()))
            if now_ns - since_ns < self._settle_ns:
                return
            self._halves.popitem(last=False)
            if entry.assignment is not None and entry.lacks_engine:
                yield entry


def _is_same(held: Held, assignment: Assignment) -> bool:
    """One attempt, by the engines."""
    return (held.prefill_engine, held.decode_engine) == (
        assignment.prefill_engine,
        assignment.decode_engine,
    ) and first_of(held.attempt) == first_of(assignment.attempt)
