"""The scheduler's state: requests, engines and nodes of all models; reports and requests in, deliveries out. No clock, no I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import count

from kvmoverd.core.errors import BadRequest, QueueFull, UnknownModel, UnknownPeer, UnknownRequest
from kvmoverd.core.scheduling.books import Books
from kvmoverd.core.scheduling.counts import Counts
from kvmoverd.core.scheduling.ended import Drain, Ended
from kvmoverd.core.scheduling.explain import Explain, PathWhy
from kvmoverd.core.scheduling.limits import Limits
from kvmoverd.core.scheduling.policies import maker
from kvmoverd.core.scheduling.reports import Arrival, BadReport, Done, GroupReport, NodeReport, Role, Sources
from kvmoverd.core.scheduling.requests import Assignment, Delivery, Entry, ReadChoice, Request, State, Ticket
from kvmoverd.core.scheduling.state import Engine, Group, Model, Node

ATTEMPT_STEP = 16
"""From one attempt that is given out to the next. Those between are the engines' own: one whose prefix was cut goes on under the
next one by itself, and must not meet the number that the scheduler gives to others meanwhile."""


class Cluster:
    """All that the scheduler knows, and every call that changes it. The same calls in the same order decide the same.

    `numbers_from`: deliveries have higher numbers. A scheduler that starts anew needs one above those of its former starts, the
    time in nanoseconds for instance, since leaders say up to which number they have heard.
    """

    def __init__(
        self, models: Sequence[Model], *, policy: str = "paper", limits: Limits | None = None, numbers_from: int = 0
    ) -> None:
        self._numbers = count(numbers_from + 1)
        self.limits = limits or Limits()
        self.policy = policy
        self.nodes: dict[str, Node] = {}
        self.counts = Counts()
        self._books = {model.name: Books(model, maker(policy), self.nodes, self._was_assigned) for model in models}
        self._groups: dict[str, Group] = {}
        self._engines: dict[str, Engine] = {}
        self._group_sources = Sources(self.limits.group_silent_ns)
        self._node_sources = Sources(self.limits.node_silent_ns)
        self._live: dict[str, Entry] = {}
        self._waiting: OrderedDict[str, Entry] = OrderedDict()
        """By when they began to wait."""
        self._ended = Ended(self.limits.ended_max)
        self._drain = Drain()
        self._orders = 0
        self._news: list[Assignment | Ticket] = []

    # Requests.

    def submit(self, request: Request, now_ns: int) -> Ticket:
        """The request waits from now on. Submitted again it is the same one, whatever has become of it.

        Raises `UnknownModel`, `QueueFull` with `retry_after_ms`, and `BadRequest` for another request of the same name.
        """
        known = self._known(request)
        if known is not None:
            return known
        books = self._model_books(request.model)
        if len(self._waiting) >= self.limits.waiting_max or len(self._live) >= self.limits.live_max:
            self.counts.refused += 1
            raise QueueFull(
                f"{len(self._waiting)} requests wait and {len(self._live)} live, at most {self.limits.waiting_max} and "
                f"{self.limits.live_max} may",
                retry_after_ms=self._drain.retry_after_ms(len(self._waiting)),
            )
        self.counts.submitted += 1
        self._orders += 1
        entry = Entry(request, self._orders, _next_attempt(request.after_attempt), now_ns)
        self._live[request.request_id] = self._waiting[request.request_id] = entry
        books.policy.submitted(entry, now_ns, again=False)
        return entry.ticket()

    def ticket(self, request_id: str) -> Ticket:
        """Raises `UnknownRequest`."""
        entry = self._live.get(request_id)
        if entry is not None:
            return entry.ticket()
        ended = self._ended.get(request_id)
        if ended is None:
            raise UnknownRequest(f"request {request_id!r} is not known; the last {len(self._ended)} that ended are")
        return ended[1]

    def cancel(self, request_id: str) -> Ticket:
        """Its client has left it; leaders that were told of it are told so. Raises `UnknownRequest`."""
        entry = self._live.get(request_id)
        if entry is None:
            return self.ticket(request_id)
        self.counts.cancelled += 1
        return self._end(entry, State.CANCELLED)

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
        self._check_engines(report)
        arrival = self._group_sources.arrived(report.group, report.boot_id, report.sequence, now_ns)
        if arrival is Arrival.OLD:
            raise BadReport(f"group {report.group!r}: report {report.sequence} of boot {report.boot_id!r} is overtaken")
        group = self._groups.get(report.group)
        if group is not None and arrival is Arrival.NEW_BOOT:
            self._lose(group, list(group.engines.values()), now_ns)
            group = None
        if group is None:
            group = self._groups[report.group] = Group(report.group, report.model, report.role, self._numbers)
        group.heard(report.heard)
        for done in report.done:
            self._is_done(done, group.role)
        self._take_loads(books, group, report, now_ns)
        books.policy.pulled(group, now_ns)
        return group.unheard(self.limits.deliveries_max)

    def node_reported(self, report: NodeReport, now_ns: int) -> None:
        """A daemon tells how busy its node is. Raises `BadReport`, also for an older report."""
        node = self._node(report.node)
        arrival = self._node_sources.arrived(report.node, report.boot_id, report.sequence, now_ns)
        if arrival is Arrival.OLD:
            raise BadReport(f"node {report.node!r}: report {report.sequence} of boot {report.boot_id!r} is overtaken")
        if arrival is Arrival.NEW_BOOT:
            node.reset()
        node.boot_id = report.boot_id
        node.reported(report, now_ns)

    def lose_group(self, name: str, now_ns: int) -> None:
        """It is known to be dead: what it had and has not finished goes to others. One that is not known is ignored."""
        group = self._groups.get(name)
        if group is not None:
            self._lose(group, list(group.engines.values()), now_ns)
            self._group_sources.forget(name)

    def lose_node(self, name: str, now_ns: int) -> None:
        """It is known to be dead, and so are its engines; those of its groups on other nodes live on."""
        node = self.nodes.get(name)
        if node is None:
            return
        by_group: dict[str, list[Engine]] = {}
        for engine in node.engines.values():
            by_group.setdefault(engine.group.name, []).append(engine)
        for engines in by_group.values():
            group = engines[0].group
            self._lose(group, engines, now_ns)
            if not group.engines:
                self._group_sources.forget(group.name)
        self._node_sources.forget(name)
        self.nodes.pop(name, None)

    def tick(self, now_ns: int) -> None:
        """Silent groups are lost, numbers of silent nodes are not believed, who waited too long fails. To be called about once a
        second."""
        for name in list(self._group_sources.silent(now_ns)):
            self.lose_group(name, now_ns)
        for name in list(self._node_sources.silent(now_ns)):
            self._node_sources.forget(name)
            node = self.nodes[name]
            node.reset()
            if not node.engines:
                del self.nodes[name]
        while self._waiting:
            entry = next(iter(self._waiting.values()))
            waited_ns = now_ns - entry.since_ns
            if waited_ns <= self.limits.wait_max_ns:
                break
            self._fail(entry, f"no engine for {waited_ns / 1e9:.0f} s, at most {self.limits.wait_max_ns / 1e9:.0f} s")

    # For the caller's own books.

    def take_news(self) -> list[Assignment | Ticket]:
        """What was assigned, and who failed, since the last time, in order."""
        news, self._news = self._news, []
        return news

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def live(self) -> int:
        return len(self._live)

    def entries(self) -> Iterable[Entry]:
        """The live requests, in the order of their arrival."""
        return self._live.values()

    def groups(self) -> Iterable[Group]:
        return self._groups.values()

    # Within.

    def _known(self, request: Request) -> Ticket | None:
        entry = self._live.get(request.request_id)
        if entry is not None:
            was, ticket = entry.request, entry.ticket()
        else:
            ended = self._ended.get(request.request_id)
            if ended is None:
                return None
            was, ticket = ended
        if (was.model, was.prompt_tokens, was.tenant) != (request.model, request.prompt_tokens, request.tenant):
            raise BadRequest(
                f"request {request.request_id!r} is known with {was.prompt_tokens} tokens for {was.model!r}, and now has "
                f"{request.prompt_tokens} for {request.model!r}"
            )
        return ticket

    def _model_books(self, model: str) -> Books:
        books = self._books.get(model)
        if books is None:
            raise UnknownModel(f"model {model!r} is none of the {len(self._books)} that are scheduled")
        return books

    def _node(self, name: str) -> Node:
        node = self.nodes.get(name)
        if node is None:
            if len(self.nodes) >= self.limits.nodes_max:
                raise BadReport(
                    f"node {name!r} would be the {len(self.nodes) + 1}th, at most {self.limits.nodes_max} are"
                )
            node = self.nodes[name] = Node(name, self.limits.read_lag_ns)
        return node

    def _check_engines(self, report: GroupReport) -> None:
        """Before anything is changed: engines of other groups, another role or model, too many."""
        group = self._groups.get(report.group)
        if group is not None and group.boot_id == report.boot_id:
            if (group.model, group.role) != (report.model, report.role):
                raise BadReport(f"group {report.group!r} was {group.role.value} of {group.model!r} in this boot")
            if len(group.engines) == len(report.engines) and all(
                said.engine in group.engines for said in report.engines
            ):
                return
        for said in report.engines:
            engine = self._engines.get(said.engine)
            if engine is not None and engine.group.name != report.group:
                raise BadReport(f"engine {said.engine!r} of group {report.group!r} is one of {engine.group.name!r}")
        engines = sum(said.engine not in self._engines for said in report.engines) + len(self._engines)
        nodes = len({said.node for said in report.engines} - self.nodes.keys()) + len(self.nodes)
        if engines > self.limits.engines_max or nodes > self.limits.nodes_max:
            raise BadReport(
                f"with group {report.group!r} there would be {engines} engines on {nodes} nodes, at most "
                f"{self.limits.engines_max} and {self.limits.nodes_max} are"
            )

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
                engine = self._join(group, said.engine, said.node)
                joined = True
            engine.reported(said)
        if len(engines) != len(report.engines):
            names = {said.engine for said in report.engines}
            gone = [engine for name, engine in engines.items() if name not in names]
            self._lose(group, gone, now_ns)
        if joined or gone:
            self._groups[group.name] = group
            books.has(group)
        group.sum_up()

    def _join(self, group: Group, name: str, node_name: str) -> Engine:
        node = self._node(node_name)
        engine = Engine(name, node, group)
        group.engines[name] = node.engines[name] = self._engines[name] = engine
        return engine

    def _lose(self, group: Group, engines: Sequence[Engine], now_ns: int) -> None:
        """These engines are gone; with the last of them their group is."""
        if not engines:
            return
        books = self._books[group.model]
        for engine in engines:
            node = engine.node
            del group.engines[engine.name], node.engines[engine.name], self._engines[engine.name]
            if not node.engines and node.name not in self._node_sources:
                self.nodes.pop(node.name, None)
        group.sum_up()
        if group.engines:
            books.has(group)
        else:
            books.has_not(group)
            del self._groups[group.name]
        books.policy.lost(group)
        entries = {entry.order: entry for engine in engines for entry in engine.live.values()}
        for _, entry in sorted(entries.items(), reverse=True):
            self._requeue(entry, now_ns)

    def _requeue(self, entry: Entry, now_ns: int) -> None:
        """One of its engines is lost: from the beginning, under a higher attempt if anybody was told of this one."""
        books = self._books[entry.request.model]
        told = entry.assignment is not None
        books.undo(entry)
        if not told:
            entry.state = State.WAITING
            books.policy.submitted(entry, now_ns, again=True)
            return
        entry.given_out += 1
        if entry.given_out >= self.limits.attempts_max:
            self._fail(entry, f"given out {entry.given_out} times, and each time an engine was lost")
            return
        self.counts.requeued += 1
        entry.attempt = _next_attempt(entry.attempt)
        entry.state, entry.since_ns = State.WAITING, now_ns
        self._waiting[entry.request.request_id] = entry
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

    def _is_done(self, done: Done, role: Role) -> None:
        """A higher attempt than ours, short of the next that we would give, is the engines' own. Others are late: ignored."""
        entry = self._live.get(done.request_id)
        if entry is None or entry.state is not State.ASSIGNED:
            return
        if not entry.attempt <= done.attempt < _next_attempt(entry.attempt):
            return
        if role is Role.PREFILL:
            entry.prefilled = True
            self._books[entry.request.model].prefill_ended(entry)
        else:
            self.counts.done += 1
            self._end(entry, State.DONE)

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
        del self._live[request_id]
        self._waiting.pop(request_id, None)
        ticket = Ticket(request_id, state, entry.attempt, assignment, why)
        self._ended.add(entry.request, ticket)
        return ticket


def _next_attempt(attempt: int) -> int:
    """The first is 1, and each after it one step further.

    >>> _next_attempt(0), _next_attempt(1), _next_attempt(5), _next_attempt(17)
    (1, 17, 17, 33)
    """
    return 1 if attempt < 1 else (attempt - 1) // ATTEMPT_STEP * ATTEMPT_STEP + ATTEMPT_STEP + 1
