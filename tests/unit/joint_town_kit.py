"""A virtual town for comparing policies: nodes with storage NICs that read in order, prefill engines that work in order, and
agents whose turns come in bursts. One clock, no chance but the seed's."""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvmoverd.core.scheduling.cluster import Cluster
from kvmoverd.core.scheduling.joint_settings import JointSettings
from kvmoverd.core.scheduling.reports import Done, EngineReport, GroupReport, NodeReport, Role
from kvmoverd.core.scheduling.requests import Assignment, CachedPrefix, Request
from kvmoverd.core.scheduling.state import Model
from kvmoverd.core.shares import Depth
from kvmoverd.core.status import Path

MS = 1_000_000
S = 1_000 * MS
KV = 40_000
SNIC = 1_000_000_000
"""Bytes per second of a node."""
GPU = 40_000
"""Prompt tokens per second of an engine."""
ENGINES = 2
MODEL = Model.of("m", kv_bytes_per_token=KV, snic_bytes_per_s=SNIC, gpu_tokens_per_s=GPU)
BUFFER = 60_000_000_000
HBM_TOKENS = 2_000_000
STEP_NS = 20 * MS
REPORT_NS = 100 * MS
DECODE_NS = 2 * S


@dataclass
class Snic:
    """Reads one after the other; `slow`: at that fraction of its rate."""

    name: str
    free_ns: int = 0
    slow: float = 1.0
    queue_bytes: int = 0
    busy: list[tuple[int, int, int]] = field(default_factory=list)
    """From when to when how many bytes were read."""

    def read(self, size: int, now_ns: int) -> int:
        """Until when it is read."""
        begun = max(self.free_ns, now_ns)
        self.free_ns = begun + int(size * S / (SNIC * self.slow))
        if size:
            self.busy.append((begun, self.free_ns, size))
        return self.free_ns

    def depth(self, now_ns: int) -> Depth:
        rate = int(SNIC * self.slow)
        return Depth(max(0, self.free_ns - now_ns) * rate // S, rate if self.busy else 0)

    def read_within(self, first_ns: int, stop_ns: int) -> float:
        return sum(
            size * max(0, min(stop, stop_ns) - max(first, first_ns)) / (stop - first) for first, stop, size in self.busy
        )


@dataclass
class Rank:
    """An engine: what it has, and until when it prefills."""

    name: str
    node: str
    has: dict[str, int] = field(default_factory=dict)
    free_ns: int = 0


class Crew:
    """The engines of a node, and what their leader has to say."""

    def __init__(self, role: Role, number: int) -> None:
        self.role = role
        self.name = f"{role.value[0]}{number:02}"
        self.ranks = {f"{self.name}/{n}": Rank(f"{self.name}/{n}", self.name) for n in range(ENGINES)}
        self.sequence = self.heard = 0
        self.done: list[Done] = []

    def report(self) -> GroupReport:
        self.sequence += 1
        room = HBM_TOKENS if self.role is Role.DECODE else 0
        said = tuple(
            EngineReport(
                rank.name, self.name, len(rank.has), sum(rank.has.values()), max(0, room - sum(rank.has.values())), GPU
            )
            for rank in self.ranks.values()
        )
        done, self.done = tuple(self.done), []
        return GroupReport(self.name, "m", self.role, "b", self.sequence, said, self.heard, done)


class JointTown:
    """P prefill and D decode nodes."""

    def __init__(
        self,
        policy: str,
        prefill: int,
        decode: int,
        *,
        joint: JointSettings | None = None,
        buffer_bytes: int = BUFFER,
        true: Callable[[Request], bool] = lambda request: False,
    ) -> None:
        """`true`: whether what its client says of pools is."""
        self._true = true
        self.cluster = Cluster([MODEL], policy=policy, joint=joint)
        self.buffer_bytes = buffer_bytes
        crews = [Crew(Role.PREFILL, n) for n in range(prefill)] + [Crew(Role.DECODE, n) for n in range(decode)]
        self.crews = {crew.name: crew for crew in crews}
        self.snics = {name: Snic(name) for name in self.crews}
        self.buffers = dict.fromkeys(self.crews, 0)
        self.fullest = 0
        self.now_ns = 0
        self.requests: dict[str, Request] = {}
        self.arrived: dict[str, int] = {}
        self.ttft_ns: dict[str, int] = {}
        self.rules: dict[tuple[str, str, str], int] = {}
        self._ends: list[tuple[int, int, str, Assignment]] = []
        self._sequence = 0

    def run(self, arrivals: deque[tuple[int, Request]], until_ns: int) -> None:
        """Steps until that time, or until all is done."""
        while self.now_ns < until_ns and (arrivals or len(self.ttft_ns) < len(self.requests)):
            self.step(arrivals)

    def step(self, arrivals: deque[tuple[int, Request]]) -> None:
        self.now_ns += STEP_NS
        while arrivals and arrivals[0][0] <= self.now_ns:
            at_ns, request = arrivals.popleft()
            self.requests[request.request_id], self.arrived[request.request_id] = request, at_ns
            self.cluster.submit(request, self.now_ns)
        self._end()
        if self.now_ns % REPORT_NS == 0:
            for name in self.crews:
                self._report(name)
        for crew in self.crews.values():
            for delivery in self.cluster.pull(crew.report(), self.now_ns):
                assert isinstance(delivery.what, Assignment)
                crew.heard = delivery.number
                self._begin(crew, delivery.what)
        if self.now_ns % S == 0:
            self.cluster.tick(self.now_ns)

    def _report(self, name: str) -> None:
        self._sequence += 1
        free = max(0, self.buffer_bytes - self.buffers[name])
        depth = self.snics[name].depth(self.now_ns)
        said = NodeReport(name, "b", self._sequence, depth, free, self.buffer_bytes, help_free_bytes=4_000_000_000)
        self.cluster.node_reported(said, self.now_ns)

    def _begin(self, crew: Crew, what: Assignment) -> None:
        request = self.requests[what.request_id]
        engine = what.prefill_engine if crew.role is Role.PREFILL else what.decode_engine
        rank = crew.ranks[engine]
        rank.has[what.request_id] = request.prompt_tokens
        if crew.role is Role.DECODE:
            return
        reads = self._reads(what, request)
        self.buffers[what.decode_node] += request.prompt_tokens * KV
        self.fullest = max(self.fullest, self.buffers[what.decode_node])
        read_ns = max(self.snics[node].read(size, self.now_ns) for node, size in reads)
        rank.free_ns = max(read_ns, rank.free_ns) + request.prompt_tokens * S // GPU
        rules = what.explain.rules
        self.rules[rules] = self.rules.get(rules, 0) + 1
        heapq.heappush(self._ends, (rank.free_ns, 0, what.request_id, what))
        heapq.heappush(self._ends, (rank.free_ns + DECODE_NS, 1, what.request_id, what))

    def _reads(self, what: Assignment, request: Request) -> list[tuple[str, int]]:
        """Who reads how much: what is believed to lie in a pool, and does not, its node reads."""
        size, why = request.hit_tokens * KV, what.explain.path
        if request.cached and self._true(request) and why.hit_bytes < size:
            return list(why.reads) or [(what.decode_node, 0)]
        return [(part.node, int((part.stop - part.first) * size)) for part in what.read.parts] or [
            (what.prefill_node if what.read.path is Path.PE else what.decode_node, size)
        ]

    def _end(self) -> None:
        while self._ends and self._ends[0][0] <= self.now_ns:
            ends_ns, last, request_id, what = heapq.heappop(self._ends)
            crew = self.crews[what.decode_node if last else what.prefill_node]
            crew.ranks[what.decode_engine if last else what.prefill_engine].has.pop(request_id, None)
            crew.done.append(Done(request_id, what.attempt))
            if not last:
                self.ttft_ns[request_id] = ends_ns - self.arrived[request_id]
                self.buffers[what.decode_node] -= self.requests[request_id].prompt_tokens * KV

    @property
    def ttft_mean_s(self) -> float:
        return sum(self.ttft_ns.values()) / len(self.ttft_ns) / S

    def snic_max_over_avg(self, until_ns: int) -> float:
        """Mean over windows of 1 s with more than half load."""
        ratios = []
        for first_ns in range(0, until_ns, S):
            reads = [snic.read_within(first_ns, first_ns + S) for snic in self.snics.values()]
            mean = sum(reads) / len(reads)
            if mean > SNIC / 2:
                ratios.append(max(reads) / mean)
        return sum(ratios) / max(1, len(ratios))


class PoolTown(JointTown):
    """Nodes have pools of that size, in which the oldest goes first; clients say what lies there when they come: by the time that
    it is read it may be gone. `silent`: they say nothing."""

    def __init__(self, policy: str, pool_bytes: int, *, silent: bool = False) -> None:
        super().__init__(policy, 3, 6, joint=JointSettings(sessions_max=0))
        self.pool_bytes = pool_bytes
        self.silent = silent
        self.pools: dict[str, OrderedDict[str, int]] = {name: OrderedDict() for name in self.crews}
        self.read_bytes = 0

    def step(self, arrivals: deque[tuple[int, Request]]) -> None:
        coming = []
        while arrivals and arrivals[0][0] <= self.now_ns + STEP_NS and not self.silent:
            at_ns, request = arrivals.popleft()
            coming.append((at_ns, replace(request, cached=self._cached(request))))
        arrivals.extendleft(reversed(coming))
        super().step(arrivals)

    def _cached(self, request: Request) -> tuple[CachedPrefix, ...]:
        there = [(name, pool.get(request.session, 0) // KV) for name, pool in self.pools.items()]
        return tuple(CachedPrefix(name, min(tokens, request.hit_tokens)) for name, tokens in there if tokens)

    def _reads(self, what: Assignment, request: Request) -> list[tuple[str, int]]:
        found = []
        for node, size in super()._reads(what, request):
            more = max(0, size - self.pools[node].get(request.session, 0))
            self._put(node, request.request_id, more)
            found.append((node, more))
            self.read_bytes += more
        self._put(what.decode_node, request.session, request.prompt_tokens * KV)
        return found

    def _put(self, node: str, name: str, size: int) -> None:
        pool = self.pools[node]
        pool.pop(name, None)
        pool[name] = size
        while sum(pool.values()) > self.pool_bytes:
            pool.popitem(last=False)


def hinted(arrivals: deque[tuple[int, Request]], seed: int, places: list[str]) -> deque[tuple[int, Request]]:
    """Each client says that one of these nodes has all of its KV."""
    chance = random.Random(seed)

    def says(request: Request) -> Request:
        return replace(request, cached=(CachedPrefix(chance.choice(places), request.hit_tokens),))

    return deque((at_ns, says(request)) for at_ns, request in arrivals)


def trace(seed: int, *, seconds: int, requests_per_s: float, tenants: int = 1) -> deque[tuple[int, Request]]:
    """Turns of agents: at the rate on average, a third of them in bursts; prompts of 2 K to 60 K tokens, 97 % hit."""
    chance = random.Random(seed)
    found: list[tuple[int, Request]] = []
    at_s = 0.0
    while at_s < seconds:
        at_s += chance.expovariate(requests_per_s * 0.8)
        for _ in range(6 if chance.random() < 0.05 else 1):
            tokens = int(2_000 * 30 ** chance.random())
            number = len(found)
            hit = int(tokens * 0.97)
            found.append((int(at_s * S), Request(f"r{number}", "m", tokens, hit, tenant=f"t{number % tenants}")))
    return deque(found)
