"""A world around a scheduler that goes wrong in all the ways it may: clients, leaders, daemons, and a scheduler that starts anew.

What is played: answers that are lost, reports that come twice or late, leaders and daemons that die, groups that are cut off and
come back, a scheduler that forgets everything, clients that submit again with the attempt that they know of. A decode engine
finishes only what was prefilled under the same attempt, so that a request that lost one side hangs unless the scheduler sees it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from kvmoverd.core.errors import QueueFull, UnknownRequest
from kvmoverd.core.scheduling.cluster import Cluster
from kvmoverd.core.scheduling.explain import EngineWhy
from kvmoverd.core.scheduling.held import Held
from kvmoverd.core.scheduling.limits import Limits
from kvmoverd.core.scheduling.policy import Desk
from kvmoverd.core.scheduling.reports import BadReport, Done, EngineReport, GroupReport, NodeReport, Role
from kvmoverd.core.scheduling.requests import (
    FIRST_NS,
    Assignment,
    Delivery,
    Entry,
    Fence,
    Request,
    Revoked,
    State,
    Ticket,
)
from kvmoverd.core.scheduling.state import Engine
from kvmoverd.core.shares import Depth
from tests.unit.scheduling_kit import KV, MODEL, MS

HBM_TOKENS = 900
MINUTE_NS = 60_000_000_000
LIMITS = Limits(waiting_max=60, attempts_max=1000, ended_max=10_000)
ROLES = {
    "p1": (Role.PREFILL, "ab"),
    "p2": (Role.PREFILL, "c"),
    "d1": (Role.DECODE, "x"),
    "d2": (Role.DECODE, "yz"),
}
NODES = "abcxyz"
Key = tuple[str, int]
"""A request and an attempt."""


class WatchedDesk:
    """The policy's desk, which looks at each choice before it is noted."""

    def __init__(self, desk: Desk, *, beta: int | None) -> None:
        self._desk = desk
        self._beta = beta

    def __getattr__(self, name: str) -> object:
        return getattr(self._desk, name)

    def give_prefill(self, entry: Entry, engine: Engine, why: EngineWhy, now_ns: int) -> None:
        """Nobody above beta gets a request, nobody whose node drains, no engine that is gone."""
        assert self._beta is None or engine.tok_e <= self._beta, (engine.name, engine.tok_e, self._beta)
        self._may_have(engine)
        self._desk.give_prefill(entry, engine, why, now_ns)

    def give_decode(self, entry: Entry, engine: Engine, why: EngineWhy, now_ns: int) -> None:
        self._may_have(engine)
        self._desk.give_decode(entry, engine, why, now_ns)

    def _may_have(self, engine: Engine) -> None:
        assert not engine.node.draining, f"{engine.name} is on {engine.node.name}, which drains"
        assert engine.group.engines.get(engine.name) is engine, f"{engine.name} is gone"


@dataclass(slots=True)
class Daemon:
    """A node: what it refuses."""

    name: str
    boot: int = 1
    sequence: int = 0
    heard: int = 0
    draining: bool = False
    refuses: dict[str, int] = field(default_factory=dict)

    def takes(self, key: Key) -> bool:
        return self.refuses.get(key[0], 0) < key[1]

    def fenced(self, fences: tuple[Fence, ...]) -> None:
        """Numbers rise; what was heard of is in force."""
        for fence in fences:
            assert fence.number > self.heard
            self.heard = fence.number
            self.refuse(fence.request_id, fence.attempt)

    def refuse(self, request_id: str, attempt: int) -> None:
        self.refuses[request_id] = max(attempt, self.refuses.get(request_id, 0))


class Leader:
    """One group, and all that its engines go on with."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.role, self.nodes = ROLES[name]
        self.boot = self.sequence = 0
        self.without: set[str] = set()
        """Nodes whose engines are away."""
        self.restart()

    def restart(self) -> None:
        """Nothing is left of what its engines had."""
        self.boot += 1
        self.heard = 0
        self.has: dict[Key, Assignment] = {}
        self.done: dict[Key, Assignment] = {}
        """Finished, and not answered yet: held until then."""

    @property
    def boot_id(self) -> str:
        return f"{self.name}-{self.boot}"

    def engine_of(self, what: Assignment) -> tuple[str, str]:
        """The engine that has it here, and its node."""
        if self.role is Role.PREFILL:
            return what.prefill_engine, what.prefill_node
        return what.decode_engine, what.decode_node

    def drop(self, node: str) -> None:
        """What ran on this node is gone."""
        self.has = {key: what for key, what in self.has.items() if self.engine_of(what)[1] != node}

    def take(self, deliveries: tuple[Delivery, ...], daemons: dict[str, Daemon]) -> None:
        """Each goes through the daemon, which refuses what is over before the leader hears of it."""
        for delivery in deliveries:
            assert delivery.number > self.heard
            self.heard = delivery.number
            what = delivery.what
            if isinstance(what, Revoked):
                key = what.request_id, what.attempt
                over = self.has.pop(key, None) or self.done.get(key)
                if over is not None:
                    daemons[self.engine_of(over)[1]].refuse(*key)
            else:
                engine, node = self.engine_of(what)
                daemons[node].refuse(what.request_id, what.attempt - 1)
                assert engine.startswith(f"{self.name}.{node}/")
                self.has[what.request_id, what.attempt] = what


@dataclass(slots=True)
class Client:
    """One request, as who wants it sees it. `boot`: of the scheduler that it has submitted it to."""

    request: Request
    boot: int = 0
    tried: bool = False
    attempt: int = 0
    state: State = State.WAITING
    left: bool = False

    def heard(self, ticket: Ticket, boot: int) -> None:
        self.boot, self.state, self.attempt = boot, ticket.state, max(self.attempt, ticket.attempt)


class World:
    """All of it, on one clock and one chance."""

    def __init__(self, seed: int, policy: str, limits: Limits = LIMITS) -> None:
        self.chance = random.Random(seed)
        self.policy = policy
        self.limits = limits
        self.now_ns = 1_000 * MS
        self.boot = 0
        self.daemons = {name: Daemon(name) for name in NODES}
        self.leaders = {name: Leader(name) for name in ROLES}
        self.clients: dict[str, Client] = {}
        self.prefilled: set[Key] = set()
        self.finished: dict[str, list[int]] = {}
        """By request, the attempts that a decode engine came to the end of."""
        self.given: dict[Key, Assignment] = {}
        self.said: list[GroupReport | NodeReport] = []
        self.start_scheduler()

    def start_scheduler(self) -> None:
        """It knows of nothing. By the wall clock it is a minute after the last one."""
        self.boot += 1
        self.cluster = Cluster(
            [MODEL],
            policy=self.policy,
            limits=self.limits,
            numbers_from=FIRST_NS + self.boot * MINUTE_NS + self.now_ns,
            settled_ns=self.now_ns + self.limits.settle_ns if self.boot > 1 else 0,
        )
        for books in self.cluster._books.values():
            desk = WatchedDesk(books, beta=MODEL.beta_tokens if self.policy == "paper" else None)
            books.policy._desk = desk  # type: ignore[attr-defined]
        for daemon in self.daemons.values():
            daemon.heard = 0

    # Clients.

    def new_request(self) -> Client:
        tokens = self.chance.randrange(1, 300)
        name, hit = f"r{len(self.clients)}", self.chance.randrange(tokens + 1)
        client = Client(Request(name, MODEL.name, tokens, hit, self.chance.choice("tuv"), self.chance.choice("sSZ")))
        self.clients[name] = client
        return client

    def submit(self, client: Client) -> None:
        """With the attempt that it knows of; at least the first, once an earlier scheduler may have been told of it."""
        was = request = client.request
        if client.boot != self.boot:
            request = Request(
                was.request_id,
                was.model,
                was.prompt_tokens,
                was.hit_tokens,
                was.tenant,
                was.session,
                max(client.attempt, int(client.tried)),
            )
        client.tried = True
        try:
            ticket = self.cluster.submit(request, self.now_ns)
        except QueueFull:
            return
        if self.chance.random() < 0.9:
            client.heard(ticket, self.boot)

    def look(self, client: Client) -> None:
        """GetTicket; a scheduler that does not know the request is told of it again."""
        try:
            client.heard(self.cluster.ticket(client.request.request_id), self.boot)
        except UnknownRequest:
            if not client.state.ended:
                self.submit(client)

    def leave(self, client: Client) -> None:
        client.left = True
        try:
            client.heard(self.cluster.cancel(client.request.request_id), self.boot)
        except UnknownRequest:
            if not client.boot:
                client.state = State.CANCELLED

    # Leaders.

    def work(self, leader: Leader, share: float) -> None:
        """Its engines end a part of what they have and may go on with; what a daemon refuses ends, too."""
        for key, what in list(leader.has.items()):
            if not self.daemons[leader.engine_of(what)[1]].takes(key):
                del leader.has[key]
            elif self.chance.random() < share and (leader.role is Role.PREFILL or key in self.prefilled):
                leader.done[key] = leader.has.pop(key)
                if leader.role is Role.PREFILL:
                    self.prefilled.add(key)
                else:
                    self.finished.setdefault(key[0], []).append(key[1])

    def pull(self, leader: Leader, *, lost: float = 0.0) -> None:
        """As the service does it: a group that this scheduler does not know is asked first what it goes on with."""
        leader.sequence += 1
        self.work(leader, 0.0)
        known = self.cluster.group(leader.name)
        held = () if known is not None and known.boot_id == leader.boot_id else self.held(leader)
        report = self.report(leader, held)
        self.said.append(report)
        deliveries = self.cluster.pull(report, self.now_ns)
        if self.chance.random() < lost:
            again = self.cluster.pull(report, self.now_ns)
            assert again[: len(deliveries)] == deliveries
            return
        leader.done = {}
        leader.take(deliveries, self.daemons)

    def held(self, leader: Leader) -> tuple[Held, ...]:
        return tuple(
            Held(
                what.request_id,
                what.attempt,
                what.prefill_engine,
                what.prefill_node,
                what.decode_engine,
                what.decode_node,
                what.read,
                what.prompt_tokens,
                what.hit_tokens,
                prefill_done=leader.role is Role.DECODE and key in self.prefilled,
            )
            for key, what in (leader.has | leader.done).items()
        )

    def report(self, leader: Leader, held: tuple[Held, ...]) -> GroupReport:
        said = []
        for node in leader.nodes:
            for rank in range(0 if node in leader.without else 2):
                name = f"{leader.name}.{node}/{rank}"
                prompts = [what.prompt_tokens for what in leader.has.values() if leader.engine_of(what)[0] == name]
                free = max(0, HBM_TOKENS - sum(prompts))
                said.append(EngineReport(name, node, len(prompts), sum(prompts), free, self.chance.choice([0, 900])))
        return GroupReport(
            leader.name,
            MODEL.name,
            leader.role,
            leader.boot_id,
            leader.sequence,
            tuple(said),
            leader.heard,
            tuple(Done(*key) for key in leader.done),
            held,
        )

    # Daemons.

    def daemon_reports(self, daemon: Daemon, *, lost: float = 0.0, queue_tokens: int = 0) -> None:
        daemon.sequence += 1
        report = NodeReport(
            daemon.name,
            f"{daemon.name}-{daemon.boot}",
            daemon.sequence,
            Depth(queue_tokens * KV, self.chance.choice([0, 10**6, 2 * 10**6])),
            buffer_free_bytes=4_000 * KV,
            buffer_bytes=4_000 * KV,
            fences_heard=daemon.heard,
            draining=daemon.draining,
        )
        self.said.append(report)
        try:
            fences = self.cluster.node_reported(report, self.now_ns)
        except BadReport:
            # A late one of an earlier boot is taken for a later one, until that has been silent for long enough.
            return
        if self.chance.random() >= lost:
            daemon.fenced(fences)

    def kill_daemon(self, daemon: Daemon) -> None:
        """It starts anew and refuses nothing; its engines have lost all, and each leader says so: it restarts, or leaves them
        out of its next report."""
        daemon.boot += 1
        daemon.heard = 0
        daemon.refuses.clear()
        for leader in self.leaders.values():
            if daemon.name in leader.nodes:
                leader.drop(daemon.name)
                if len(leader.nodes) == 1 or self.chance.random() < 0.5:
                    leader.restart()
                else:
                    leader.without = {daemon.name}
                    self.pull(leader)
                    leader.without = set()

    def say_again(self) -> None:
        """A report that was on its way for long: it is a repeat, or refused and changes nothing."""
        report = self.chance.choice(self.said[-40:])
        try:
            if isinstance(report, NodeReport):
                self.cluster.node_reported(report, self.now_ns)
            elif (known := self.cluster.group(report.group)) is not None and known.boot_id == report.boot_id:
                self.cluster.pull(report, self.now_ns)
        except BadReport:
            pass

    # What must hold.

    def check_nodes(self) -> None:
        """No node that has to do with a request's present attempt refuses it, or is told to."""
        for entry in self.cluster.entries():
            what, key = entry.assignment, (entry.request.request_id, entry.attempt)
            if what is not None and not self.cluster.hears_of(key[0]):
                for node in {what.decode_node} if entry.prefilled else {what.prefill_node, what.decode_node}:
                    assert self.daemons[node].takes(key) and not self.is_fenced(node, key), (
                        f"{key} is refused by {node}"
                    )

    def check_works(self) -> None:
        """Whatever an engine goes on with is the current attempt, or its end is on its way, or its leader is asked anyway."""
        for leader in self.leaders.values():
            group = self.cluster.group(leader.name)
            if group is None or group.boot_id != leader.boot_id:
                continue
            revoked = {
                (delivery.what.request_id, delivery.what.attempt)
                for delivery in group.unheard(1 << 20)
                if isinstance(delivery.what, Revoked)
            }
            for key, what in leader.has.items():
                engine, node = leader.engine_of(what)
                if key in revoked or not self.daemons[node].takes(key) or self.is_fenced(node, key):
                    continue
                entry = next((e for e in self.cluster.entries() if e.request.request_id == key[0]), None)
                assert entry is not None, f"{key} goes on at {engine}, and nobody ends it"
                assert entry.attempt == key[1], f"{key} goes on at {engine} beside attempt {entry.attempt}"
                side = entry.prefill if leader.role is Role.PREFILL else entry.decode
                assert side is not None and side.engine.name == engine, f"{key} goes on at {engine}, unknown to all"

    def is_fenced(self, node: str, key: Key) -> bool:
        """A fence waits for the node's next report."""
        known = self.cluster.nodes.get(node)
        pending = known.fences(self.daemons[node].heard, 1 << 20) if known is not None else ()
        return any(fence.request_id == key[0] and fence.attempt >= key[1] for fence in pending)
