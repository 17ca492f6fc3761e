"""Random histories of a scheduler: engines die, leaders repeat themselves, clients leave. Nothing is lost or done twice.

Each leader is played with what it was told; a request counts as served when a decode engine has ended an attempt that is still
the current one, as the daemons' fence sees to.
"""

from __future__ import annotations

import random

import pytest

from kvmoverd.core.errors import QueueFull
from kvmoverd.core.scheduling.cluster import Cluster
from kvmoverd.core.scheduling.explain import EngineWhy
from kvmoverd.core.scheduling.limits import Limits
from kvmoverd.core.scheduling.policies import POLICIES
from kvmoverd.core.scheduling.reports import Done, EngineReport, GroupReport, NodeReport, Role
from kvmoverd.core.scheduling.requests import Assignment, Entry, Request, Revoked, State
from kvmoverd.core.scheduling.state import Engine
from kvmoverd.core.shares import Depth
from tests.unit.scheduling_kit import BETA, KV, MODEL, MS, assert_sound

STEPS = 400


class _Leader:
    """What a group was told and has not finished, by request."""

    def __init__(self, name: str, role: Role, nodes: list[str]) -> None:
        self.name, self.role, self.nodes = name, role, nodes
        self.boot, self.sequence = 0, 0
        self.restart()

    def restart(self) -> None:
        self.boot += 1
        self.heard = 0
        self.has: dict[str, tuple[int, str]] = {}
        self.done: list[Done] = []

    def engines(self) -> list[str]:
        return [f"{self.name}.{node}/{rank}" for node in self.nodes for rank in range(2)]


class _Walk:
    def __init__(self, seed: int, policy: str) -> None:
        self.chance = random.Random(seed)
        self.cluster = Cluster(
            [MODEL], policy=policy, limits=Limits(waiting_max=60, attempts_max=1000, ended_max=10_000)
        )
        self.policy = policy
        self.now_ns = 1_000 * MS
        self.leaders = [
            _Leader("p1", Role.PREFILL, ["a", "b"]),
            _Leader("p2", Role.PREFILL, ["c"]),
            _Leader("d1", Role.DECODE, ["x"]),
            _Leader("d2", Role.DECODE, ["y", "z"]),
        ]
        self.requests: dict[str, Request] = {}
        self.served: list[str] = []
        self.attempts: dict[str, int] = {}
        self.sequence = 0
        self.prefills = 0
        if policy == "paper":
            self.watch_beta()

    def watch_beta(self) -> None:
        """Whoever is given a prefill is looked at just before, whatever the policy says of itself."""
        books = self.cluster._books["m"]
        give = books.give_prefill

        def watched(entry: Entry, engine: Engine, why: EngineWhy, now_ns: int) -> None:
            assert engine.tok_e <= BETA
            self.prefills += 1
            give(entry, engine, why, now_ns)

        books.give_prefill = watched  # type: ignore[method-assign]

    def step(self) -> None:
        self.now_ns += self.chance.randrange(1, 400) * MS
        leader = self.chance.choice(self.leaders)
        what = self.chance.random()
        if what < 0.25:
            self.submit()
        elif what < 0.75:
            self.pull(leader)
        elif what < 0.85:
            self.node(self.chance.choice("abcxyz"))
        elif what < 0.88:
            leader.restart()
        elif what < 0.90:
            self.cluster.lose_group(leader.name, self.now_ns)
        elif what < 0.91:
            self.cluster.lose_node(self.chance.choice("abcxyz"), self.now_ns)
        elif what < 0.94 and self.requests:
            self.cluster.cancel(self.chance.choice(list(self.requests)))
        else:
            self.cluster.tick(self.now_ns)
        for news in self.cluster.take_news():
            if not isinstance(news, Assignment):
                assert news.state is not State.FAILED, news
                continue
            assert news.attempt > self.attempts.get(news.request_id, 0)
            self.attempts[news.request_id] = news.attempt
        assert_sound(self.cluster)

    def submit(self) -> None:
        tokens = self.chance.randrange(1, 300)
        request = Request(
            f"r{len(self.requests)}", "m", tokens, self.chance.randrange(tokens + 1), self.chance.choice("tuv")
        )
        try:
            self.cluster.submit(request, self.now_ns)
        except QueueFull:
            return
        self.requests[request.request_id] = request
        if self.chance.random() < 0.2:
            assert self.cluster.submit(request, self.now_ns).request_id == request.request_id

    def pull(self, leader: _Leader) -> None:
        for request_id, (attempt, _) in list(leader.has.items()):
            if self.chance.random() < 0.4:
                del leader.has[request_id]
                leader.done.append(Done(request_id, attempt))
        leader.sequence += 1
        report = self.report(leader)
        if leader.role is Role.DECODE:
            for done in leader.done:
                ticket = self.cluster.ticket(done.request_id)
                if (ticket.attempt, ticket.state) == (done.attempt, State.ASSIGNED):
                    self.served.append(done.request_id)
        found = self.cluster.pull(report, self.now_ns)
        if self.chance.random() < 0.2:
            assert self.cluster.pull(report, self.now_ns)[: len(found)] == found
            return
        leader.done = []
        for delivery in found:
            assert delivery.number > leader.heard
            leader.heard = delivery.number
            what = delivery.what
            if isinstance(what, Revoked):
                leader.has.pop(what.request_id, None)
            else:
                engine = what.prefill_engine if leader.role is Role.PREFILL else what.decode_engine
                assert engine in leader.engines()
                leader.has[what.request_id] = what.attempt, engine

    def report(self, leader: _Leader) -> GroupReport:
        said = []
        for engine in leader.engines():
            prompts = [self.requests[name].prompt_tokens for name, (_, by) in leader.has.items() if by == engine]
            node = engine.split(".")[1].split("/")[0]
            said.append(EngineReport(engine, node, len(prompts), sum(prompts), max(0, 900 - sum(prompts))))
        boot = f"{leader.name}-{leader.boot}"
        return GroupReport(
            leader.name, "m", leader.role, boot, leader.sequence, tuple(said), leader.heard, tuple(leader.done)
        )

    def node(self, name: str) -> None:
        self.sequence += 1
        depth = Depth(self.chance.randrange(600) * KV, self.chance.choice([0, 10**6, 2 * 10**6]))
        free = self.chance.randrange(2_000) * KV
        self.cluster.node_reported(NodeReport(name, "b", self.sequence, depth, free, 2_000 * KV), self.now_ns)

    def calm(self) -> None:
        """Nobody dies any more: all that waits is served."""
        for _ in range(400):
            self.now_ns += 300 * MS
            for name in "abcxyz":
                self.sequence += 1
                report = NodeReport(name, "b", self.sequence, Depth(0, 10**6), 4_000 * KV, 4_000 * KV)
                self.cluster.node_reported(report, self.now_ns)
            for leader in self.leaders:
                self.pull(leader)
            for news in self.cluster.take_news():
                assert isinstance(news, Assignment) or news.state in (State.DONE, State.WAITING)
                self.attempts[news.request_id] = news.attempt
            if not self.cluster.live:
                return
        raise AssertionError(f"{self.cluster.waiting} of {self.cluster.live} wait for ever")


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(5))
def test_no_request_is_lost_and_none_is_served_twice(seed: int, policy: str) -> None:
    walk = _Walk(seed, policy)
    for _ in range(STEPS):
        walk.step()
    walk.calm()
    assert len(walk.served) == len(set(walk.served))
    ends = {name: walk.cluster.ticket(name).state for name in walk.requests}
    assert set(ends.values()) <= {State.DONE, State.CANCELLED}
    assert sorted(walk.served) == sorted(name for name, end in ends.items() if end is State.DONE)
    assert walk.cluster.counts.done == len(walk.served) and walk.cluster.counts.requeued > 0
    assert policy != "paper" or walk.prefills >= walk.cluster.counts.assigned > 0
