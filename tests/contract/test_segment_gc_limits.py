"""Garbage collection under limits: of a tenant's bytes, of what has just been begun, and of time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from gc_kit import RECORDS, SEGMENT_BYTES, SETTINGS, MakeNode, namespace, nodes_over

from kvmoverd.adapters.storage.segments.settings import Limit
from kvmoverd.core.store.eviction import Why

pytestmark = pytest.mark.contract


@pytest.fixture
def node(tmp_path: Path) -> Iterator[MakeNode]:
    with nodes_over(tmp_path) as make:
        yield make


def test_a_tenants_limit_drops_its_own_segments_only(node: MakeNode) -> None:
    limit = Limit(tenant="acme", bytes_max=3 * SEGMENT_BYTES)
    one = node(settings=replace(SETTINGS, limits=(limit,)))
    acme, other = namespace("m", "acme"), namespace("m", "other")
    keys = {}
    for space in (acme, other):
        one.open(space)
        keys[space] = one.fill(6, space)
    one.collect()
    assert {planned.why for planned in one.collector.plan()} <= {Why.LIMIT}
    one.pass_grace()
    assert sum(one.known(some, acme) for some in keys[acme]) <= 3 * RECORDS
    assert sum(one.known(some, other) for some in keys[other]) == 6 * RECORDS


def test_a_tenant_whose_segments_all_grow_is_held_to_its_limit(node: MakeNode) -> None:
    limit = Limit(tenant="acme", bytes_max=2 * SEGMENT_BYTES)
    one = node(settings=replace(SETTINGS, limits=(limit,)))
    spaces = [namespace(f"m{number}", "acme") for number in range(6)]
    for space in spaces:
        one.open(space)
        one.put([os.urandom(32) for _ in range(RECORDS // 2)], space)
    one.collect()
    assert len(one.appender.segments.active()) < 6, "the coldest of them are to end"
    one.collect()
    one.pass_grace()
    assert one.collector.counters.used_bytes_now <= limit.bytes_max + 2 * SETTINGS.log_pages * 4096 + (1 << 20)
    assert 0 < len(one.appender.segments.active()) < 3, "what it wrote last stays"


def test_a_segment_that_was_begun_is_counted_before_the_next_look_is_due(node: MakeNode) -> None:
    one = node(settings=replace(SETTINGS, bytes_max=4 * SEGMENT_BYTES))
    one.collect()
    for _ in range(8):
        one.fill(1)
        one.clock.pass_s(0.5)
        one.collector.step()
    assert one.collector.counters.evicted_segments >= 3, "a look every five seconds would have missed them"


def test_a_time_to_live_drops_what_is_older(node: MakeNode) -> None:
    one = node(settings=replace(SETTINGS, limits=(Limit(model_id="model", ttl_s=3_600.0),)))
    keys = one.fill(3)
    old = one.root.authors / one.own() / "seg"
    for name in ("00000001.seg", "00000002.seg"):
        os.utime(old / name, (1_000_000_000, 1_000_000_000))
    one.use(keys[0])
    one.collect()
    assert [one.known(some) for some in keys] == [0, 0, RECORDS]
    assert one.collector.counters.expired_segments == 2


def test_a_clock_that_was_set_back_ages_nothing(node: MakeNode) -> None:
    one = node(settings=replace(SETTINGS, limits=(Limit(ttl_s=3_600.0),)))
    keys = one.fill(2)
    future_s = 4_000_000_000
    for name in one.segments():
        os.utime(one.root.authors / one.own() / "seg" / name, (future_s, future_s))
    one.collect()
    assert [one.known(some) for some in keys] == [RECORDS] * 2
