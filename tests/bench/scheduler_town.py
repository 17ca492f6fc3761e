"""A cluster that a scheduler is asked for: leaders that pull, engines that work, agents that come again. On a virtual clock.

Engines are as simple as can be: a prefill engine goes through its tokens at a rate, one request after the other; a decode engine
finishes a request a time after its prefill; a node reads what it is told to at the rate of its storage NIC. What counts is how
often and with how much the scheduler is asked, and that the reports follow from what it decided.
"""

from __future__ import annotations

import heapq
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvmoverd.core.scheduling.cluster import Cluster
from kvmoverd.core.scheduling.limits import Limits
from kvmoverd.core.scheduling.reports import Done, EngineReport, GroupReport, NodeReport, Role
from kvmoverd.core.scheduling.requests import Assignment, Delivery, Request, Ticket
from kvmoverd.core.scheduling.state import Model
from kvmoverd.core.shares import Depth
from kvmoverd.core.status import Path

MODEL = Model.of("v3.2", kv_bytes_per_token=40_016, snic_bytes_per_s=50e9, gpu_tokens_per_s=1.6e5)
SNIC_BYTES_PER_S = 50_000_000_000
GPU_TOKENS_PER_S = 160_000
ENGINES_A_NODE = 8
HBM_TOKENS = 1_500_000
"""Of a decode engine: 60 GB of KV."""
BUFFER_BYTES = 80_000_000_000
TURN_TOKENS = 430
PROMPT_TOKENS = (1_500, 64_000)
DECODE_NS = 3_000_000_000
"""A turn's answer: about 100 tokens of 36 ms."""
PULL_NS = 100_000_000


@dataclass(frozen=True, slots=True)
class Size:
    """Nodes of prefill and of decode, and agents that each have a request at every time."""

    prefill: int
    decode: int
    agents: int

    @property
    def engines(self) -> int:
        return (self.prefill + self.decode) * ENGINES_A_NODE


class Node:
    """A storage NIC: reads that were begun end one after the other."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sequence = 0
        self.free_ns = 0
        self.read_bytes = 0

    def read(self, size_bytes: int, now_ns: int) -> int:
        """Until when it is read."""
        self.read_bytes += size_bytes
        self.free_ns = max(self.free_ns, now_ns) + size_bytes * 1_000_000_000 // SNIC_BYTES_PER_S
        return self.free_ns

    def report(self, now_ns: int) -> NodeReport:
        self.sequence += 1
        ahead = max(0, self.free_ns - now_ns) * SNIC_BYTES_PER_S // 1_000_000_000
        return NodeReport(
            self.name,
            "boot",
            self.sequence,
            Depth(ahead, SNIC_BYTES_PER_S),
            buffer_free_bytes=BUFFER_BYTES,
            buffer_bytes=BUFFER_BYTES,
        )


class Engine:
    """Loads as it reports them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seqs = self.tokens = 0
        self.free_ns = 0


class Leader:
    """One group: takes deliveries, and works them off. `prefilled`: when a request's prefill ends, by its id, of all groups;
    `decodes`: who decodes one of which that is not known yet."""

    def __init__(
        self,
        role: Role,
        number: int,
        nodes: dict[str, Node],
        done: Callable[[str, int], None],
        prefilled: dict[str, int],
        decodes: dict[str, Callable[[int], None]],
    ) -> None:
        self.role = role
        self.name = f"{role.value}{number:04}"
        self.node = nodes[self.name]
        self.engines = {name: Engine(name) for name in (f"{self.name}/{rank}" for rank in range(ENGINES_A_NODE))}
        self.heard = 0
        self.sequence = 0
        self._nodes = nodes
        self._done = done
        self._prefilled = prefilled
        self._decodes = decodes
        self._ends: list[tuple[int, str, int, str, int]] = []
        self._finished: deque[Done] = deque()

    def report(self, now_ns: int) -> GroupReport:
        """What has ended by now is finished, and told."""
        while self._ends and self._ends[0][0] <= now_ns:
            _, request_id, attempt, engine_name, tokens = heapq.heappop(self._ends)
            engine = self.engines[engine_name]
            engine.seqs -= 1
            engine.tokens -= tokens
            self._finished.append(Done(request_id, attempt))
        self.sequence += 1
        free = HBM_TOKENS if self.role is Role.DECODE else 0
        said = [
            EngineReport(e.name, self.node.name, e.seqs, e.tokens, max(0, free - e.tokens))
            for e in self.engines.values()
        ]
        return GroupReport(
            self.name, MODEL.name, self.role, "boot", self.sequence, tuple(said), self.heard, tuple(self._finished)
        )

    def take(self, deliveries: tuple[Delivery, ...], prompts: dict[str, Request], now_ns: int) -> int:
        """Begins what is new. Returns how many."""
        for done in self._finished:
            if self.role is Role.DECODE:
                self._done(done.request_id, now_ns)
        self._finished.clear()
        for delivery in deliveries:
            assert isinstance(delivery.what, Assignment) and delivery.number > self.heard
            self.heard = delivery.number
            self._begin(delivery.what, prompts[delivery.what.request_id], now_ns)
        return len(deliveries)

    def _begin(self, what: Assignment, request: Request, now_ns: int) -> None:
        engine = self.engines[what.prefill_engine if self.role is Role.PREFILL else what.decode_engine]
        engine.seqs += 1
        engine.tokens += request.prompt_tokens
        hit_bytes = request.hit_tokens * MODEL.kv_bytes_per_token
        name, attempt, tokens = what.request_id, what.attempt, request.prompt_tokens

        def ends(at_ns: int) -> None:
            heapq.heappush(self._ends, (at_ns, name, attempt, engine.name, tokens))

        if self.role is Role.DECODE:
            prefilled_ns = self._prefilled.pop(name, None)
            if prefilled_ns is None:
                self._decodes[name] = ends
            else:
                ends(prefilled_ns + DECODE_NS)
            return
        readers = [(part.node, part.stop - part.first) for part in what.read.parts] or [
            (what.prefill_node if what.read.path is Path.PE else what.decode_node, 1.0)
        ]
        read_ns = max(self._nodes[node].read(int(part * hit_bytes), now_ns) for node, part in readers)
        computed_ns = max(engine.free_ns, now_ns) + tokens * 1_000_000_000 // GPU_TOKENS_PER_S
        engine.free_ns = ended_ns = max(read_ns, computed_ns)
        ends(ended_ns)
        decodes = self._decodes.pop(name, None)
        if decodes is None:
            self._prefilled[name] = ended_ns
        else:
            decodes(ended_ns + DECODE_NS)


@dataclass(slots=True)
class Spent:
    """What the scheduler took, in processor time: others on the machine do not count. `decision_us`: of the decisions of a call,
    the share of each in it, with their count."""

    total_ns: int = 0
    decisions: int = 0
    calls: int = 0
    virtual_ns: int = 0

    decision_us: list[tuple[float, int]] = field(default_factory=list)
    pull_us: list[float] = field(default_factory=list)
    snic_max_over_avg: list[float] = field(default_factory=list)

    def count(self, took_ns: int, news: list[Assignment | Ticket]) -> None:
        """A call that decided these."""
        decided = sum(isinstance(what, Assignment) for what in news)
        self.total_ns += took_ns
        self.calls += 1
        self.decisions += decided
        if decided:
            self.decision_us.append((took_ns / 1e3 / decided, decided))


class Town:
    """Agents, leaders and nodes around one scheduler."""

    def __init__(self, size: Size, policy: str, *, seed: int = 1, cluster: Cluster | None = None) -> None:
        self.size = size
        # Every agent may have a request that waits, and one that has just ended.
        room = 2 * size.agents
        limits = Limits(waiting_max=room, live_max=room)
        self.cluster = cluster or Cluster([MODEL], policy=policy, limits=limits)
        self._chance = random.Random(seed)
        self.now_ns = 0
        self.spent = Spent()
        self._prompts: dict[str, Request] = {}
        self._again: deque[str] = deque()
        roles = [(Role.PREFILL, size.prefill), (Role.DECODE, size.decode)]
        self.nodes = {
            name: Node(name) for role, count in roles for name in (f"{role.value}{n:04}" for n in range(count))
        }
        prefilled: dict[str, int] = {}
        decodes: dict[str, Callable[[int], None]] = {}
        self._leaders = [
            Leader(role, n, self.nodes, self._came_back, prefilled, decodes)
            for role, count in roles
            for n in range(count)
        ]
        self._chance.shuffle(self._leaders)
        for leader in self._leaders:
            self.cluster.pull(leader.report(0), 0)
        for agent in range(size.agents):
            self._prompts[f"{agent}.0"] = self._request(agent, 0, self._chance.randint(*PROMPT_TOKENS))
            self._again.append(f"{agent}.0")

    def _request(self, agent: int, turn: int, tokens: int) -> Request:
        return Request(
            f"{agent}.{turn}",
            MODEL.name,
            tokens,
            max(0, tokens - TURN_TOKENS) // 64 * 64,
            tenant=f"t{agent % 4}",
            session=f"s{agent}",
        )

    def _came_back(self, request_id: str, now_ns: int) -> None:
        """The agent's next turn: a little longer; beyond the longest it begins anew."""
        agent, turn = (int(part) for part in request_id.split("."))
        tokens = self._prompts.pop(request_id).prompt_tokens + TURN_TOKENS
        if tokens > PROMPT_TOKENS[1]:
            tokens = PROMPT_TOKENS[0]
        again = self._request(agent, turn + 1, tokens)
        self._prompts[again.request_id] = again
        self._again.append(again.request_id)

    def interval(self) -> None:
        """Every node reports once, every leader pulls once, agents submit in between."""
        self.now_ns += PULL_NS
        spent, cluster, clock = self.spent, self.cluster, time.thread_time_ns
        before = {name: node.read_bytes for name, node in self.nodes.items()}
        for leader in self._leaders:
            report = leader.node.report(self.now_ns)
            begun = clock()
            cluster.node_reported(report, self.now_ns)
            spent.total_ns += clock() - begun
            self._submit()
            self._pull(leader)
        begun = clock()
        cluster.tick(self.now_ns)
        spent.total_ns += clock() - begun
        spent.virtual_ns += PULL_NS
        reads = [node.read_bytes - before[name] for name, node in self.nodes.items()]
        if sum(reads):
            spent.snic_max_over_avg.append(max(reads) * len(reads) / sum(reads))

    def _submit(self) -> None:
        again, spent, clock = self._again, self.spent, time.thread_time_ns
        while again:
            request = self._prompts[again.popleft()]
            begun = clock()
            self.cluster.submit(request, self.now_ns)
            news = self.cluster.take_news()
            spent.count(clock() - begun, news)

    def _pull(self, leader: Leader) -> None:
        spent = self.spent
        report = leader.report(self.now_ns)
        begun = time.thread_time_ns()
        deliveries = self.cluster.pull(report, self.now_ns)
        news = self.cluster.take_news()
        took_ns = time.thread_time_ns() - begun
        spent.count(took_ns, news)
        spent.pull_us.append(took_ns / 1e3)
        leader.take(deliveries, self._prompts, self.now_ns)

    def forget_spent(self) -> None:
        """What was until now was the warming up."""
        self.spent = Spent()
