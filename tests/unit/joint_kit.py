"""A few nodes under the policy "joint": "p..." prefill and "d..." decode, each with engines "node/rank", one group a node."""

from __future__ import annotations

from kvmoverd.core.scheduling.cluster import Cluster
from kvmoverd.core.scheduling.joint_settings import JointSettings
from kvmoverd.core.scheduling.reports import Done, EngineReport, GroupReport, NodeReport, Role
from kvmoverd.core.scheduling.requests import Assignment, CachedPrefix, Request
from kvmoverd.core.scheduling.state import Model
from kvmoverd.core.shares import Depth

MS = 1_000_000
KV = 1_000
"""Bytes a token."""
SNIC = 100_000_000
"""Bytes per second: 100,000 tokens."""
GPU = 10_000
"""Prompt tokens per second."""
MODEL = Model.of("m", kv_bytes_per_token=KV, snic_bytes_per_s=SNIC, gpu_tokens_per_s=GPU)
ROOM = 1_000_000
BUFFER = ROOM * KV


class Yard:
    """One cluster and its clock; loads are what a test sets, beside what was given out and is not done."""

    def __init__(self, prefill: int = 2, decode: int = 2, *, ranks: int = 1, **settings: object) -> None:
        joint = JointSettings(**settings)  # type: ignore[arg-type]
        self.cluster = Cluster([MODEL], policy="joint", joint=joint)
        self.now_ns = 1_000 * MS
        self.sequence = 0
        self.heard: dict[str, int] = {}
        self.nodes = [f"p{n}" for n in range(prefill)] + [f"d{n}" for n in range(decode)]
        self.ranks = {node: [f"{node}/{rank}" for rank in range(ranks)] for node in self.nodes}
        self.busy: dict[str, int] = {}
        self.rates: dict[str, int] = {}
        self.room: dict[str, int] = {}
        self.has: dict[str, dict[str, int]] = {name: {} for ranks_ in self.ranks.values() for name in ranks_}
        self.said: dict[str, tuple[int, int, dict[str, int | bool]]] = {}
        self.assigned: list[Assignment] = []

    def begin(self) -> Yard:
        """Every node reports, every leader pulls."""
        for node in self.nodes:
            self.node(node)
        self.pull()
        return self

    def node(self, name: str, queue_tokens: int = 0, rate: int = SNIC, **more: int | bool) -> None:
        self.sequence += 1
        self.said[name] = queue_tokens, rate, more
        fields = {"buffer_free_bytes": BUFFER, "buffer_bytes": BUFFER, **more}
        said = NodeReport(name, "b", self.sequence, Depth(queue_tokens * KV, rate), **fields)  # type: ignore[arg-type]
        self.cluster.node_reported(said, self.now_ns)

    def pull(self, *nodes: str, done: tuple[Done, ...] = ()) -> list[Assignment]:
        """Their leaders pull, all by default. Returns what was assigned by then and not returned yet."""
        for node in nodes or self.nodes:
            self._pull(node, done)
        return self.news()

    def _pull(self, node: str, done: tuple[Done, ...]) -> None:
        self.sequence += 1
        role = Role.PREFILL if node.startswith("p") else Role.DECODE
        said = []
        for name in self.ranks[node]:
            tokens = self.busy.get(name, 0) + sum(self.has[name].values())
            room = max(0, self.room.get(name, ROOM) - tokens)
            said.append(EngineReport(name, node, len(self.has[name]), tokens, room, self.rates.get(name, 0)))
        report = GroupReport(node, "m", role, "b", self.sequence, tuple(said), self.heard.get(node, 0), done)
        for delivery in self.cluster.pull(report, self.now_ns):
            self.heard[node] = delivery.number
            what = delivery.what
            if isinstance(what, Assignment):
                engine = what.prefill_engine if role is Role.PREFILL else what.decode_engine
                self.has[engine][what.request_id] = what.prompt_tokens
            else:
                for name in self.ranks[node]:
                    self.has[name].pop(what.request_id, None)

    def news(self) -> list[Assignment]:
        found = [news for news in self.cluster.take_news() if isinstance(news, Assignment)]
        self.assigned += found
        return found

    def submit(
        self, name: str, tokens: int = 1_000, hit: int = -1, *, head: int = 1 << 40, **more: str
    ) -> Assignment | None:
        """Hits are nine tenths unless told; of them `head` lie in each place of `cached`. Returns its assignment."""
        hit_tokens = tokens * 9 // 10 if hit < 0 else hit
        places = more.pop("cached", "").split()
        cached = tuple(CachedPrefix(where, min(head, hit_tokens)) for where in places)
        self.cluster.submit(Request(name, "m", tokens, hit_tokens, cached=cached, **more), self.now_ns)  # type: ignore[arg-type]
        return next((what for what in self.news() if what.request_id == name), None)

    def finish(self, what: Assignment) -> None:
        """Its leaders have taken it, prefilled and decoded it, all nodes have reported."""
        self._pull(what.prefill_node, ())
        self._pull(what.decode_node, ())
        self.now_ns += 300 * MS
        for name, (queue_tokens, rate, more) in list(self.said.items()):
            self.node(name, queue_tokens, rate, **more)
        for node, engine in ((what.prefill_node, what.prefill_engine), (what.decode_node, what.decode_engine)):
            self.has[engine].pop(what.request_id, None)
            self._pull(node, (Done(what.request_id, what.attempt),))


def only(what: Assignment | None) -> Assignment:
    assert what is not None
    return what


def numbers(what: Assignment) -> dict[str, float]:
    return dict(what.explain.prefill.numbers)
