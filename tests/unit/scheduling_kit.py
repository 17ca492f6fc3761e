"""A small cluster for tests of the scheduler: leaders, engines and nodes in a word or two."""

from __future__ import annotations

from kvmoverd.core.scheduling.cluster import Cluster
from kvmoverd.core.scheduling.limits import Limits
from kvmoverd.core.scheduling.reports import Done, EngineReport, GroupReport, NodeReport, Role
from kvmoverd.core.scheduling.requests import Assignment, Delivery, Request, Revoked
from kvmoverd.core.scheduling.state import Model
from kvmoverd.core.shares import Depth

MS = 1_000_000
KV = 1_000
"""Bytes a token."""
ALPHA, BETA = 300, 500
MODEL = Model("m", KV, ALPHA, BETA)
ROOM = 10_000

Load = tuple[int, int] | tuple[int, int, int]
"""seq_e, tok_e and maybe free HBM."""


class Bench:
    """One cluster, its leaders' words, and a clock that is moved by hand."""

    def __init__(self, policy: str = "paper", *, limits: Limits | None = None, model: Model = MODEL) -> None:
        self.cluster = Cluster([model], policy=policy, limits=limits)
        self.model = model
        self.now_ns = 1_000 * MS
        self.sequence = 0
        self.told: dict[str, list[Delivery]] = {}
        self.heard: dict[str, int] = {}

    def node(self, name: str, queue_tokens: int = 0, *, boot: str = "b", rate: int = 10**6, **more: int | bool) -> None:
        """Reports a read queue of so many tokens."""
        self.sequence += 1
        said = NodeReport(name, boot, self.sequence, Depth(queue_tokens * KV, rate), **more)  # type: ignore[arg-type]
        self.cluster.node_reported(said, self.now_ns)

    def submit(self, *prompts: int | str, hit: int = 0, **more: str | int) -> list[str]:
        """Requests of so many tokens, named after their place: r1, r2, ... A name instead has 100 tokens."""
        names = []
        for prompt in prompts:
            name = prompt if isinstance(prompt, str) else f"r{self.cluster.counts.submitted + 1}"
            tokens = 100 if isinstance(prompt, str) else prompt
            self.cluster.submit(Request(name, self.model.name, tokens, hit, **more), self.now_ns)  # type: ignore[arg-type]
            names.append(name)
        return names

    def pull(
        self, group: str, loads: dict[str, Load], *, boot: str = "b", done: tuple[Done, ...] = (), hear: bool = True
    ) -> list[Assignment | Revoked]:
        """A leader pulls: groups that begin with "p" prefill. Engines are "node/rank". Returns what is new to it."""
        self.sequence += 1
        role = Role.PREFILL if group.startswith("p") else Role.DECODE
        said = tuple(
            EngineReport(name, name.split("/", maxsplit=1)[0], load[0], load[1], load[2] if len(load) > 2 else ROOM)
            for name, load in loads.items()
        )
        report = GroupReport(
            group, self.model.name, role, boot, self.sequence, said, self.heard.get(group + boot, 0), done
        )
        found = self.cluster.pull(report, self.now_ns)
        if hear and found:
            self.heard[group + boot] = found[-1].number
        return [delivery.what for delivery in found]

    def prefill_of(self, request_id: str) -> str:
        """The engine that prefills it, "" if none does."""
        side = next(e.prefill for e in self.cluster.entries() if e.request.request_id == request_id)
        return side.engine.name if side else ""

    def decode_of(self, request_id: str) -> str:
        side = next(e.decode for e in self.cluster.entries() if e.request.request_id == request_id)
        return side.engine.name if side else ""

    def rule_of(self, request_id: str) -> tuple[str, str]:
        """By which rules its engines were chosen; "" for one that was not."""
        entry = next(e for e in self.cluster.entries() if e.request.request_id == request_id)
        return entry.prefill.why.rule if entry.prefill else "", entry.decode.why.rule if entry.decode else ""


def assert_sound(cluster: Cluster) -> None:
    """The books add up: sums are those of their parts, each live request is in one place."""
    waiting = [entry for entry in cluster.entries() if entry.assignment is None]
    assert len(waiting) == cluster.waiting
    given = dict.fromkeys(cluster.nodes, 0)
    for entry in cluster.entries():
        name = entry.request.request_id
        assert (entry.assignment is None) == entry.lacks_engine or cluster.hears_of(name), name
        for side in (entry.prefill, entry.decode):
            if side is not None:
                assert side.engine.live[name] is entry
                assert side.engine.group.engines[side.engine.name] is side.engine
        if entry.decode is not None:
            given[entry.decode.engine.node.name] += entry.tokens * KV
    for group in cluster.groups():
        assert group.tok_sum == sum(engine.tok_e for engine in group.engines.values())
        assert group.private_tokens == sum(entry.tokens for entry in group.private.values())
        for engine in group.engines.values():
            sides = [
                side
                for entry in engine.live.values()
                for side in (entry.prefill, entry.decode)
                if side is not None and side.engine is engine
            ]
            assert len(sides) == len(engine.live)
            assert engine.unheard_seqs == sum(not side.heard for side in sides)
            assert engine.unheard_tokens == sum(side.tokens for side in sides if not side.heard)
    for name, node in cluster.nodes.items():
        assert node.reserved_bytes == given[name], name
