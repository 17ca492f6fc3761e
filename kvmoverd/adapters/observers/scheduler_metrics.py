"""The scheduler's numbers as Prometheus has them. They are read when somebody asks, and kept nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from kvmoverd.core.scheduling.numbers import BOUNDS_NS, Durations, SchedulerNumbers

PREFIX = "kvmoverd_scheduler_"
COUNTS = {
    "submitted": "Requests that were taken",
    "assigned": "Assignments, also of requests that were given out again",
    "done": "Requests that were decoded to their end",
    "requeued": "Requests that were given to others, because an engine was lost",
    "failed": "Requests that waited too long, or were given out too often",
    "cancelled": "Requests that their clients have left",
    "refused": "Requests that were refused, because too many waited",
}
"""Names of `Counts`, with what they mean."""


class SchedulerCollector:
    """`numbers` is asked at each scrape."""

    def __init__(self, numbers: Callable[[], SchedulerNumbers]) -> None:
        self._numbers = numbers

    def collect(self) -> Iterator[Metric]:
        found = self._numbers()
        yield from _counts(found)
        yield from _gauges(found)
        yield _durations(found)
        yield from _by_word(found)


def registry_of(numbers: Callable[[], SchedulerNumbers]) -> CollectorRegistry:
    """With the scheduler's numbers, and nothing else."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SchedulerCollector(numbers))
    return registry


def _counts(found: SchedulerNumbers) -> Iterator[Metric]:
    for name, what in COUNTS.items():
        yield CounterMetricFamily(f"{PREFIX}{name}", what, value=getattr(found.counts, name))
    yield CounterMetricFamily(f"{PREFIX}leads", "How often this scheduler came to lead", value=found.leads_total)
    journal = found.journal
    yield CounterMetricFamily(f"{PREFIX}journal_lines", "Lines of the decision log written", value=journal.lines)
    yield CounterMetricFamily(f"{PREFIX}journal_bytes", "Bytes of the decision log written", value=journal.bytes)
    yield CounterMetricFamily(f"{PREFIX}journal_dropped", "Lines of the decision log dropped", value=journal.dropped)


def _gauges(found: SchedulerNumbers) -> Iterator[Metric]:
    for name, what, value in (
        ("leading", "1 where this scheduler decides, else 0", int(found.leads)),
        ("epoch", "Of the election that it won; 0 without one", found.epoch),
        ("waiting", "Requests that lack an engine", found.waiting),
        ("live", "Requests that are not done", found.live),
        ("nodes", "Nodes that are known", found.census.nodes),
        ("nodes_stale", "Nodes whose numbers are not believed, because none came lately", found.census.stale),
        ("nodes_draining", "Nodes that take no new requests", found.census.draining),
        ("ticket_waits", "Calls that wait for a change of a ticket", found.waits),
        ("report_streams", "Streams over which nodes report", found.streams),
        ("journal_waiting", "Lines of the decision log that are not written yet", found.journal.waiting),
    ):
        yield GaugeMetricFamily(f"{PREFIX}{name}", what, value=value)


def _by_word(found: SchedulerNumbers) -> Iterator[Metric]:
    rules = CounterMetricFamily(
        f"{PREFIX}assignments", "Assignments by reason", labels=("policy", "prefill", "decode", "path")
    )
    for words, count in found.counts.by_rule.items():
        rules.add_metric((found.policy, *words), count)
    yield rules
    for name, what, by_role in (
        ("groups", "Groups of engines", found.census.groups),
        ("engines", "Engines", found.census.engines),
    ):
        family = GaugeMetricFamily(f"{PREFIX}{name}", what, labels=("role",))
        for role, count in by_role.items():
            family.add_metric((role,), count)
        yield family


def _durations(found: SchedulerNumbers) -> Metric:
    family = HistogramMetricFamily(
        f"{PREFIX}decision_seconds", "From a call's arrival to its answer, in this process", labels=("call",)
    )
    for name, durations in found.calls.items():
        family.add_metric((name,), buckets=list(_buckets(durations)), sum_value=durations.sum_ns / 1e9)
    return family


def _buckets(durations: Durations) -> Iterable[tuple[str, float]]:
    total = 0
    bounds = [*(f"{bound_ns / 1e9:g}" for bound_ns in BOUNDS_NS), "+Inf"]
    for bound, count in zip(bounds, durations.counts, strict=True):
        total += count
        yield bound, total
