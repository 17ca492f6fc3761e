"""What a scheduler is seen by from outside, in numbers: for status and metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvmoverd.core.scheduling.counts import Counts
from kvmoverd.core.scheduling.state import Group, Node

BOUNDS_NS = tuple(
    us * 1_000
    for us in (50, 100, 200, 400, 600, 800, 1_000, 1_500, 2_000, 3_000, 4_000, 8_000, 16_000, 64_000, 1_000_000)
)
"""Upper ends of the classes that durations are counted in; longer ones are in one more."""


@dataclass(slots=True)
class Durations:
    """How long calls took, counted by class.

    >>> seen = Durations()
    >>> for us in (10, 70, 70, 5_000): seen.add(us * 1_000)
    >>> seen.quantile_ns(0.5), seen.count, seen.sum_ns
    (100000, 4, 5150000)
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_NS) + 1))
    sum_ns: int = 0

    def add(self, duration_ns: int) -> None:
        self.counts[bisect_left(BOUNDS_NS, duration_ns)] += 1
        self.sum_ns += duration_ns

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile_ns(self, share: float) -> int:
        """So long or shorter were so many of all: the upper end of a class. 0 before the first."""
        below, wanted = 0, share * self.count
        for place, count in enumerate(self.counts):
            below += count
            if count and below >= wanted:
                return BOUNDS_NS[min(place, len(BOUNDS_NS) - 1)]
        return 0

    def json(self) -> dict[str, int]:
        return {
            "calls": self.count,
            "us_p50": self.quantile_ns(0.5) // 1_000,
            "us_p99": self.quantile_ns(0.99) // 1_000,
            "us_sum": self.sum_ns // 1_000,
        }


@dataclass(frozen=True, slots=True)
class Census:
    """Who is there. By role: groups and engines. `stale`: nodes whose numbers are not believed, or were never told; `draining`:
    those that take no new requests."""

    groups: Mapping[str, int]
    engines: Mapping[str, int]
    nodes: int
    stale: int
    draining: int

    @classmethod
    def of(cls, groups: Iterable[Group], nodes: Iterable[Node]) -> Census:
        by_role = {"prefill": 0, "decode": 0}
        engines = dict(by_role)
        for group in groups:
            by_role[group.role.value] += 1
            engines[group.role.value] += len(group.engines)
        known = list(nodes)
        stale = sum([node.report is None for node in known])
        return cls(by_role, engines, len(known), stale, sum([node.draining for node in known]))


NOBODY = Census.of((), ())


@dataclass(frozen=True, slots=True)
class JournalNumbers:
    """Of the decision log: lines and bytes written since the start, lines that were dropped, that wait."""

    lines: int = 0
    bytes: int = 0
    dropped: int = 0
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerNumbers:
    """All of one scheduler. Counts are those since it came to lead, `leads_total` how often it did since its start.

    `waits`: calls that wait for a change of a ticket; `streams`: of nodes' reports; `calls`: durations by name.
    """

    policy: str
    leads: bool
    epoch: int
    leads_total: int
    counts: Counts
    waiting: int
    live: int
    census: Census
    waits: int
    streams: int
    calls: Mapping[str, Durations]
    journal: JournalNumbers

    def json(self) -> dict[str, object]:
        """For programs, and for people that read it indented."""
        counts, census = self.counts, self.census
        return {
            "requests": {"waiting": self.waiting, "assigned": self.live - self.waiting},
            "counts": {name: getattr(counts, name) for name in type(counts).__dataclass_fields__ if name != "by_rule"},
            "assignments": {"/".join(rules): count for rules, count in sorted(counts.by_rule.items())},
            "groups": dict(census.groups),
            "engines": dict(census.engines),
            "nodes": {
                "known": census.nodes,
                "stale": census.stale,
                "draining": census.draining,
                "streams": self.streams,
            },
            "waits": self.waits,
            "leads_total": self.leads_total,
            "calls": {name: durations.json() for name, durations in self.calls.items()},
            "journal": {
                "lines": self.journal.lines,
                "bytes": self.journal.bytes,
                "dropped": self.journal.dropped,
                "waiting": self.journal.waiting,
            },
        }
