"""What the other policies are measured against, rule by rule."""

from __future__ import annotations

import pytest

from kvmoverd.core.scheduling.requests import Assignment
from kvmoverd.core.status import Path
from tests.unit.scheduling_kit import BETA, KV, Bench

BOTH = ["round-robin", "prefill-only"]


def town(policy: str) -> Bench:
    """Two prefill groups and a decode group; nothing has been submitted."""
    bench = Bench(policy)
    bench.pull("p1", {"a/0": (0, 0), "a/1": (0, 0)})
    bench.pull("p2", {"b/0": (9, 10 * BETA)})
    bench.pull("d", {"x/0": (0, 0), "x/1": (9, 9_000, 0)})
    return bench


def given(bench: Bench) -> list[Assignment]:
    return [news for news in bench.cluster.take_news() if isinstance(news, Assignment)]


@pytest.mark.parametrize("policy", BOTH)
def test_engines_have_turns_from_group_to_group_whatever_they_have_to_do(policy: str) -> None:
    bench = town(policy)
    bench.submit(5, 5, 5, 5)
    found = given(bench)
    assert [what.prefill_engine for what in found] == ["a/0", "b/0", "a/1", "a/0"]
    assert [what.decode_engine for what in found] == ["x/0", "x/1", "x/0", "x/1"]
    assert {what.explain.rules[:2] for what in found} == {("turn", "turn")}


@pytest.mark.parametrize(
    ("policy", "paths", "rule"),
    [
        ("round-robin", [Path.PE, Path.DE, Path.PE, Path.DE], "alternate"),
        ("prefill-only", [Path.PE] * 4, "fixed"),
    ],
)
def test_who_reads_is_settled_before_anybody_looks_at_queues(policy: str, paths: list[Path], rule: str) -> None:
    bench = town(policy)
    bench.node("a", 10_000)
    bench.submit(5, 5, 5, 5, hit=5)
    found = given(bench)
    assert [what.read.path for what in found] == paths
    assert {what.explain.path.rule for what in found} == {rule}
    ahead = {name: bench.cluster.nodes[name].given_bytes for name in "abx"}
    assert (
        ahead == {"a": 10 * KV, "b": 0, "x": 10 * KV}
        if policy == "round-robin"
        else {"a": 15 * KV, "b": 5 * KV, "x": 0}
    )


@pytest.mark.parametrize("policy", BOTH)
def test_without_an_engine_of_each_kind_all_wait_in_their_order(policy: str) -> None:
    bench = Bench(policy)
    bench.pull("p", {"a/0": (0, 0)})
    bench.submit(5, 6)
    assert given(bench) == [] and bench.cluster.waiting == 2
    bench.pull("d", {"x/0": (0, 0)})
    assert [what.request_id for what in given(bench)] == ["r1", "r2"]
    assert bench.pull("p", {"a/0": (0, 0)}) != []
