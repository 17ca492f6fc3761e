"""The scheduler's state: requests, engines and nodes of all models; reports and requests in, deliveries out. No clock, no I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import count

from kvmoverd.core.errors import BadRequest, QueueFull, UnknownModel, UnknownPeer, UnknownRequest
from kvmoverd.core.scheduling.adoption import Adoption
from kvmoverd.core.scheduling.books import Books
from kvmoverd.core.scheduling.counts import Counts
from kvmoverd.core.scheduling.ended import Drain
from kvmoverd.core.scheduling.explain import Explain, PathWhy
from kvmoverd.core.scheduling.held import ADOPTED
from kvmoverd.core.scheduling.joint_settings import JointSettings
from kvmoverd.core.scheduling.ledger import Ledger
from kvmoverd.core.scheduling.limits import Limits
from kvmoverd.core.scheduling.policies import maker
from kvmoverd.core.scheduling.reports import Arrival, BadReport, Done, GroupReport, NodeReport, Role
from kvmoverd.core.scheduling.requests import (
    Assignment,
    Delivery,
    Entry,
    Fence,
    ReadChoice,
    Request,
    State,
    Ticket,
    after_restart,
    first_of,
    next_attempt,
    since_start,
)
from kvmoverd.core.scheduling.roster import Roster
from kvmoverd.core.scheduling.state import Engine, Group, Model


class Cluster:
    """All that the scheduler knows, and every call that changes it. The same calls in the same order decide the same.

    `numbers_from`: deliveries have higher numbers. A scheduler that starts anew needs one above those of its former starts, since
    leaders say up to which number they have heard: the wall clock's time, in nanoseconds. Attempts rise with it, too.
    `settled_ns`: until then requests that an earlier scheduler may have given out wait for leaders that hold them. `joint`: of
    the policy of that name.
    """

    def __init__(
        self,
        models: Sequence[Model],
        *,
        policy: str = "paper",
        limits: Limits | None = None,
        joint: JointSettings | None = None,
        numbers_from: int = 0,
        settled_ns: int = 0,
    ) -> None:
        self._numbers = count(numbers_from + 1)
        self._since = since_start(numbers_from)
        self.limits = limits or Limits()
        self.policy = policy
        self._roster = Roster(self.limits)
        self.nodes = self._roster.nodes
        self.counts = Counts()
        make = maker(policy, joint)
        self._books = {
            model.name: Books(model, make, self.nodes, self._was_assigned, self._numbers) for model in models
        }
        self._ledger = Ledger(self.limits)
        self._waiting: OrderedDict[str, Entry] = OrderedDict()
        """By when they began to wait."""
        self._drain = Drain()
        self._adoption = Adoption(self._ledger, settled_ns=settled_ns, settle_ns=self.limits.settle_ns)
        self._news: list[Assignment | Ticket] = []

    # Requests.

    def submit(self, request: Request, now_ns: int) -> Ticket:
        """The request waits from now on. Submitted again it is the same one, whatever has become of it.

        Raises `UnknownModel`, `QueueFull` with `retry_after_ms`, and `BadRequest` for another request of the same name.
        """
        known = self._ledger.known(request)
        if known is not None:
            return known
        books = self._model_books(request.model)
        if len(self._waiting) >= self.limits.waiting_max or self._ledger.full:
            self.counts.refused += 1
            crowd = len(self._ledger) if self._ledger.full else len(self._waiting)
            raise QueueFull(
                f"{len(self._waiting)} requests wait and {len(self._ledger)} live, at most {self.limits.waiting_max} and "
                f"{self.limits.live_max} may",
                retry_after_ms=self._drain.retry_after_ms(crowd, now_ns),
            )
        self.counts.submitted += 1
        # Of one that leaders may hold the client learns the number that would be given out, for the next scheduler.
        entry = self._ledger.enter(request, after_restart(request.after_attempt, self._since), now_ns)
        self._waiting[request.request_id] = entry
        if self._adoption.awaits(request, now_ns):
            self._adoption.wait_for(entry)
        else:
            books.policy.submitted(entry, now_ns, again=False)
        return entry.ticket()

    def ticket(self, request_id: str) -> Ticket:
        """Raises `UnknownRequest`."""
        return self._ledger.ticket(request_id)

    def cancel(self, request_id: str) -> Ticket:
        """Its client has left it; leaders that were told of it are told so. Raises `UnknownRequest`."""
        entry = self._ledger.live.get(request_id)
        if entry is None:
            return self.ticket(request_id)
        self.counts.cancelled += 1
        ticket = self._end(entry, State.CANCELLED)
        self._news.append(ticket)
        return ticket

    def explain(self, request_id: str) -> Explain:
        """Why its last assignment is as it is. Raises `UnknownRequest`, also for one that has none."""
        assignment = self.ticket(request_id).assignment
        if assignment is None:
            raise UnknownRequest(f"request {request_id!r} has no assignment")
        return assignment.explain

    def choose_path(
        self, model: str, prefill_node: str, decode_node: str, hit_tokens: int, now_ns: int
    ) -> tuple[ReadChoice, PathWhy]:
        """For clusters with a router of their own: who reads, given both nodes. What it reads counts as given out.

        Raises `UnknownModel`, `UnknownPeer` for a node that never reported, `BadRequest` for tokens out of bounds.
        """
        books = self._model_books(model)
        if not 0 <= hit_tokens <= 1 << 40:
            raise BadRequest(f"hit_tokens is {hit_tokens}, must be 0 to {1 << 40}")
        for name in (prefill_node, decode_node):
            if name not in self.nodes:
                raise UnknownPeer(f"node {name!r} is none of the {len(self.nodes)} that are known")
        return books.choose_read(self.nodes[prefill_node], self.nodes[decode_node], hit_tokens, now_ns)

    # Reports.

    def pull(self, report: GroupReport, now_ns: int) -> tuple[Delivery, ...]:
        """A leader tells how its engines are, and what they have finished; it is told what it has not heard of yet.

        A report that comes twice is taken twice and changes nothing more. A new boot id is a new group: what the former one had
        goes to others. Raises `BadReport`, also for an older one, and `UnknownModel`.
        """
        books = self._model_books(report.model)
        self._roster.check(report)
        arrival = self._roster.group_sources.arrived(report.group, report.boot_id, report.sequence, now_ns)
        if arrival is Arrival.OLD:
            raise BadReport(f"group {report.group!r}: report {report.sequence} of boot {report.boot_id!r} is overtaken")
        group = self.group(report.group)
        if group is not None and arrival is Arrival.NEW_BOOT:
            self._lose(group, list(group.engines.values()), now_ns)
            group = None
        if group is None:
            group = Group(report.group, report.model, report.role, self._numbers)
            self._roster.groups[report.group] = group
        group.heard(report.heard)
        if group.unheard_count > self.limits.told_max:
            self.lose_group(group.name, now_ns)
            raise BadReport(f"group {group.name!r} {group.unheard_text(self.limits.told_max)}")
        self._take_done(report.done, group, now_ns)
        self._take_loads(books, group, report, now_ns)
        if report.held:
            self._take_held(books, group, report, now_ns)
        if group.takers:
            books.policy.pulled(group, now_ns)
        return group.unheard(self.limits.deliveries_max)

    def node_reported(self, report: NodeReport, now_ns: int) -> tuple[Fence, ...]:
        """A daemon tells how busy its node is; it is told what it must refuse and has not heard of yet.

        Raises `BadReport`, also for an older report.
        """
        node = self._roster.node(report.node)
        arrival = self._roster.node_sources.arrived(report.node, report.boot_id, report.sequence, now_ns)
        if arrival is Arrival.OLD:
            raise BadReport(f"node {report.node!r}: report {report.sequence} of boot {report.boot_id!r} is overtaken")
        if arrival is Arrival.NEW_BOOT:
            node.reset()
        node.boot_id = report.boot_id
        drained = node.draining
        node.reported(report, now_ns)
        if node.draining != drained:
            for books in self._books.values():
                books.drains(node)
        return node.fences(report.fences_heard, self.limits.fences_max)

    def lose_group(self, name: str, now_ns: int) -> None:
        """It is known to be dead: what it had and has not finished goes to others. One that is not known is ignored."""
        group = self.group(name)
        if group is not None:
            self._lose(group, list(group.engines.values()), now_ns)
            self._roster.group_sources.forget(name)

    def lose_node(self, name: str, now_ns: int) -> None:
        """It is known to be dead, and so are its engines; those of its groups on other nodes live on."""
        node = self.nodes.get(name)
        if node is None:
            return
        for group in node.groups():
            self._lose(group, [engine for engine in group.engines.values() if engine.node is node], now_ns)
            if not group.engines:
                self._roster.group_sources.forget(group.name)
        self._roster.node_sources.forget(name)
        self.nodes.pop(name, None)

    def tick(self, now_ns: int) -> None:
        """Silent groups are lost, numbers of silent nodes are not believed, who waited too long fails. To be called about once a
        second."""
        for name in list(self._roster.group_sources.silent(now_ns)):
            self.lose_group(name, now_ns)
        for node in self._roster.silent_nodes(now_ns):
            node.reset()
        for entry in self._adoption.orphans(now_ns):
            self._requeue(entry, now_ns)
        for entry in self._adoption.returned(now_ns):
            self._books[entry.request.model].policy.submitted(entry, now_ns, again=False)
        while self._waiting:
            entry = next(iter(self._waiting.values()))
            waited_ns = now_ns - entry.since_ns
            if waited_ns <= self.limits.wait_max_ns:
                break
            self._fail(entry, f"no engine for {waited_ns / 1e9:.0f} s, at most {self.limits.wait_max_ns / 1e9:.0f} s")

    # For the caller's own books.

    def take_news(self) -> list[Assignment | Ticket]:
        """Every change of a request's state or attempt since the last time, in order: assignments, and tickets of the others."""
        news, self._news = self._news, []
        return news

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def live(self) -> int:
        return len(self._ledger)

    def entries(self) -> Iterable[Entry]:
        """The live requests, in the order of their arrival."""
        return self._ledger.entries()

    def waiting_entries(self) -> Iterable[Entry]:
        """Those that wait, the longest first."""
        return self._waiting.values()

    def groups(self) -> Iterable[Group]:
        return self._roster.groups.values()

    def group(self, name: str) -> Group | None:
        """None for one that has not pulled yet, or is lost."""
        return self._roster.groups.get(name)

    def hears_of(self, request_id: str) -> bool:
        """It goes on since before this scheduler's start, and maybe only one of its two leaders has said so yet."""
        return self._adoption.is_half(request_id)

    # Within.

    def _model_books(self, model: str) -> Books:
        books = self._books.get(model)
        if books is None:
            some = ", ".join(sorted(self._books)[:4])
            raise UnknownModel(f"model {model!r} is none of the {len(self._books)} that are scheduled, such as {some}")
        return books

    def _take_loads(self, books: Books, group: Group, report: GroupReport, now_ns: int) -> None:
        """Engines that are new join, those that are missing are lost, the others have new numbers."""
        engines = group.engines
        group.boot_id = report.boot_id
        joined = False
        gone: list[Engine] = []
        for said in report.engines:
            engine = engines.get(said.engine)
            if engine is not None and engine.node.name != said.node:
                self._lose(group, [engine], now_ns)
                engine = None
            if engine is None:
                engine = self._roster.join(group, said.engine, said.node)
                joined = True
            engine.reported(said)
        if len(engines) != len(report.engines):
            names = {said.engine for said in report.engines}
            gone = [engine for name, engine in engines.items() if name not in names]
            self._lose(group, gone, now_ns)
        if joined or gone:
            self._roster.groups[group.name] = group
            books.has(group)
        group.sum_up()

    def _take_held(self, books: Books, group: Group, report: GroupReport, now_ns: int) -> None:
        adopted = self._adoption.adopt(group, books, report.held, now_ns)
        for entry in adopted.entries:
            self._waiting.pop(entry.request.request_id, None)
            self._news.append(entry.ticket())
        for entry, attempt in adopted.doubted:
            self._requeue(entry, now_ns, above=attempt)
        # A leader holds what it has done until it is told that this was heard.
        self._take_done(report.done, group, now_ns)

    def _lose(self, group: Group, engines: Sequence[Engine], now_ns: int) -> None:
        """These engines are gone; with the last of them their group is."""
        if not engines:
            return
        books = self._books[group.model]
        for engine in engines:
            self._roster.leave(engine)
        group.sum_up()
        if group.engines:
            books.has(group)
        else:
            books.has_not(group)
            del self._roster.groups[group.name]
        books.policy.lost(group)
        entries = {entry.order: entry for engine in engines for entry in engine.live.values()}
        for _, entry in sorted(entries.items(), reverse=True):
            self._requeue(entry, now_ns)

    def _requeue(self, entry: Entry, now_ns: int, *, above: int = 0) -> None:
        """One of its engines is lost or gave it back: from the beginning, under a higher attempt if one was told of this one."""
        books, was = self._books[entry.request.model], entry.assignment
        books.undo(entry)
        if was is None:
            entry.state = State.WAITING
            books.policy.submitted(entry, now_ns, again=True)
            return
        entry.given_out += 1
        if entry.given_out >= self.limits.attempts_max:
            self._fail(entry, f"given out {entry.given_out} times, and each time an engine was lost or gave it back")
            return
        self.counts.requeued += 1
        ours = was.explain.path.rule != ADOPTED and not above
        entry.attempt = next_attempt(entry.attempt) if ours else after_restart(max(entry.attempt, above), self._since)
        entry.state, entry.since_ns = State.WAITING, now_ns
        self._waiting[entry.request.request_id] = entry
        self._news.append(entry.ticket())
        books.policy.submitted(entry, now_ns, again=True)

    def _was_assigned(self, entry: Entry, now_ns: int) -> None:
        assignment = entry.assignment
        assert assignment is not None
        del self._waiting[entry.request.request_id]
        self._drain.one(now_ns)
        counts = self.counts
        counts.assigned += 1
        rules = assignment.explain.rules
        counts.by_rule[rules] = counts.by_rule.get(rules, 0) + 1
        self._news.append(assignment)

    def _take_done(self, all_done: Iterable[Done], group: Group, now_ns: int) -> None:
        """A higher attempt than ours, short of the next that we would give, is the engines' own. Others are late: ignored, and so
        is what a group says of a request that it was not given."""
        prefills = group.role is Role.PREFILL
        for done in all_done:
            entry = self._ledger.live.get(done.request_id)
            side = None if entry is None else entry.prefill if prefills else entry.decode
            if entry is None or side is None or side.engine.group is not group or entry.state is not State.ASSIGNED:
                continue
            if entry.attempt != done.attempt and first_of(entry.attempt) != first_of(done.attempt):
                continue
            if done.failed:
                self._requeue(entry, now_ns)
            elif prefills:
                entry.prefilled = True
                self._books[entry.request.model].prefill_ended(entry)
            else:
                self.counts.done += 1
                self._news.append(self._end(entry, State.DONE))

    def _fail(self, entry: Entry, why: str) -> None:
        self.counts.failed += 1
        self._news.append(self._end(entry, State.FAILED, why))

    def _end(self, entry: Entry, state: State, why: str = "") -> Ticket:
        books, request_id = self._books[entry.request.model], entry.request.request_id
        assignment = entry.assignment
        if state is State.DONE:
            books.prefill_ended(entry)
            books.decode_ended(entry)
        else:
            books.undo(entry)
        entry.state = state
        self._waiting.pop(request_id, None)
        self._adoption.forget(request_id)
        ticket = Ticket(request_id, state, entry.attempt, assignment, why)
        self._ledger.end(entry, ticket)
        return ticket
