"""Garbage collection of segments over real files: how much goes above the marks, and that what is used or pinned stays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gc_kit import GRACE_S, RECORDS, SEGMENT_BYTES, SETTINGS, SPACE, MakeNode, Node, must_drop, nodes_over

from kvmoverd.adapters.storage.segments.budgets import Budgets
from kvmoverd.adapters.storage.segments.collector import REFRESH_S, Writer
from kvmoverd.adapters.storage.segments.touch_log import UNKNOWN_S
from kvmoverd.adapters.storage.segments.usage import Room
from kvmoverd.core.store.eviction import Why
from kvmoverd.core.store.places import Place

pytestmark = pytest.mark.contract


@pytest.fixture
def node(tmp_path: Path) -> Iterator[MakeNode]:
    with nodes_over(tmp_path) as make:
        yield make


class MovesNothing:
    """A writer for which every salvage takes too long."""

    def __init__(self, writer: Writer) -> None:
        self.active, self.retire = writer.active, writer.retire

    def move(self, places: Sequence[Place], timeout_s: float) -> Mapping[Place, Place]:
        return {}


def budget_used(one: Node, part: float) -> Budgets:
    """Of which the node uses this part now."""
    one.collecting.usage.refresh(one.owned(), one.collector._is_active)
    return Budgets(replace(SETTINGS, bytes_max=round(one.collecting.usage.totals()[0] / part)))


def test_above_the_mark_the_coldest_segments_go_and_the_rest_stays(node: MakeNode) -> None:
    one = node()
    keys = one.fill(10)
    one.clock.pass_s(3_600)
    for some in keys[3:]:
        one.use(some)
    must_drop(one, 2.5)
    one.collect()
    gone = [number for number, some in enumerate(keys) if not one.known(some)]
    assert gone and set(gone) <= {0, 1, 2} and all(one.known(some) == RECORDS for some in keys[3:])
    assert len(one.segments()) >= 11, "during the grace the files stay, for those who read them"
    one.pass_grace()
    counters = one.collector.counters
    assert counters.evicted_segments == len(gone) == 3 and counters.dying_segments_now == 0
    assert counters.budget_used_now <= 0.9
    assert all(f"{number + 1:08d}.seg" not in one.segments() for number in gone)
    assert all(one.reads(key) for some in keys[3:] for key in some)


def test_a_few_hot_blocks_are_appended_anew_and_read_from_there(node: MakeNode) -> None:
    one = node()
    keys = one.fill(6)
    hot = [some[5] for some in keys]
    for _ in range(3):
        one.use(hot)
    must_drop(one, 2)
    one.collect()
    dropped = [number for number, some in enumerate(keys) if one.known(some) <= 1]
    assert dropped and one.collector.counters.salvaged_blocks == len(dropped)
    assert one.collector.counters.lost_hot_blocks == 0
    one.pass_grace()
    assert all(one.reads(key) for key in hot)
    for number in dropped:
        place = one.index.find(SPACE.fingerprint[:16], hot[number])
        assert place is not None and place.segment > 6
        segment_id = one.index.segment_id(place.author, place.segment)
        assert segment_id is not None and one.touches.heat(segment_id).max() == 3, "its heat went along"


def test_another_node_that_follows_finds_salvaged_blocks_in_their_new_place(node: MakeNode) -> None:
    one, other = node("a.1"), node("b.1")
    keys = one.fill(6)
    hot = [some[5] for some in keys]
    one.use(hot)
    other.follow()
    assert other.known(hot) == 6
    must_drop(one, 2)
    one.collect()
    other.follow()
    one.pass_grace()
    assert all(other.reads(key) for key in hot)


def test_touches_and_pins_of_another_node_keep_our_segments(node: MakeNode) -> None:
    one, other = node("a.1", live={"b.1"}), node("b.1", live={"a.1"})
    keys = one.fill(6)
    other.follow()
    other.use(keys[0])
    other.use(keys[1])
    other.index.pin(SPACE, keys[2][:1], 600.0)
    other.collecting.teller.step()
    while one.collecting.watch.step():
        pass
    must_drop(one, 2)
    one.collect()
    assert one.known(keys[0]) == RECORDS == one.known(keys[1]) == one.known(keys[2])
    assert one.collector.counters.evicted_segments > 0


def test_while_the_use_by_a_live_node_is_unknown_little_is_dropped_and_only_beyond_95_percent(node: MakeNode) -> None:
    one = node("a.1", live={"b.1"})
    one.fill(9)
    one.collecting.watch.step()
    one.clock.pass_s(UNKNOWN_S + 1)
    one.collecting.watch.step()
    one.collector._budgets = budget_used(one, 0.93)
    one.collect()
    assert one.collector.counters.unknown_peers_now == 1
    assert one.collector.counters.evicted_segments == 0 and 0.9 < one.collector.counters.budget_used_now < 0.95
    one.collector._budgets = budget_used(one, 0.98)
    one.collect()
    few = one.collector.counters.evicted_segments
    assert 1 <= few <= 2, "down to the high mark"
    one.live.clear()
    one.collecting.watch.step()
    one.collect()
    assert one.collector.counters.evicted_segments > few, "the dead use nothing: down to the low mark"


def test_active_segments_and_those_with_many_pins_stay_however_full_it_is(node: MakeNode) -> None:
    one = node()
    keys = one.fill(3)
    one.index.pin(SPACE, keys[1][:2], 600.0)
    one.collector._budgets = Budgets(replace(SETTINGS, bytes_max=1))
    one.collect()
    one.pass_grace()
    assert [one.known(some) for some in keys] == [0, RECORDS, 0]
    assert len(one.segments()) >= 2
    one.clock.pass_s(700)
    one.collect()
    one.pass_grace()
    assert one.known(keys[1]) == 0


def test_a_pinned_block_is_appended_anew_and_its_pin_goes_along(node: MakeNode) -> None:
    one = node()
    keys = one.fill(3)
    pinned = keys[1][5]
    one.index.pin(SPACE, [pinned], 600.0)
    one.collector._budgets = Budgets(replace(SETTINGS, bytes_max=1))
    one.collect()
    one.pass_grace()
    assert [one.known(some) for some in keys] == [0, 1, 0]
    assert one.reads(pinned) and one.collector.counters.salvaged_blocks == 1
    place = one.index.find(SPACE.fingerprint[:16], pinned)
    assert place is not None and place.segment > 3
    moved = one.index.segment_id(place.author, place.segment)
    assert moved is not None and one.touches.pinned(moved) == 1
    assert one.touches.pins().counts.tolist() == [600 - round(GRACE_S + REFRESH_S)]


def test_a_segment_in_which_another_node_has_pinned_stays(node: MakeNode) -> None:
    one = node()
    keys = one.fill(2)
    place = one.index.find(SPACE.fingerprint[:16], keys[0][0])
    assert place is not None
    segment_id = one.index.segment_id(place.author, place.segment)
    assert segment_id is not None
    one.touches.pin(np.array([segment_id], np.uint32), np.array([0], np.uint32), 600.0, by="b.1")
    one.collector._budgets = Budgets(replace(SETTINGS, bytes_max=1))
    one.collect()
    one.pass_grace()
    assert [one.known(some) for some in keys] == [RECORDS, 0]


def test_a_pinned_block_that_could_not_be_moved_keeps_its_segment(node: MakeNode) -> None:
    one = node()
    keys = one.fill(2)
    one.index.pin(SPACE, keys[0][:1], 600.0)
    one.collector._budgets = Budgets(replace(SETTINGS, bytes_max=1))
    writer = one.collector._writer
    one.collector._writer = MovesNothing(writer)
    one.collect()
    one.pass_grace()
    assert [one.known(some) for some in keys] == [RECORDS, 0]
    one.collector._writer = writer
    one.clock.pass_s(10)
    one.collect()
    one.pass_grace()
    assert [one.known(some) for some in keys] == [1, 0]


def test_inodes_count_too(node: MakeNode) -> None:
    one = node()
    one.fill(10)
    one.collect()
    inodes = one.collector.counters.used_inodes_now
    one.collector._budgets = Budgets(replace(SETTINGS, inodes_max=inodes))
    one.collect()
    assert 2 <= one.collector.counters.evicted_segments <= 6
    one.pass_grace()
    assert one.collector.counters.used_inodes_now <= 0.9 * inodes


def test_the_filesystems_own_room_counts_and_each_gives_as_much_as_it_has(node: MakeNode) -> None:
    one = node()
    one.fill(10)
    one.collect()
    used = one.collector.counters.used_bytes_now
    # Half of what is used is ours, and 95 % are used: a third of that half is more than our part of the excess.
    total = round(2 * used / 0.95)
    one.room = Room(total, total - 2 * used, 0, 0)
    one.collect()
    assert one.collector.counters.evicted_bytes == pytest.approx(0.15 * total / 2, abs=2 * SEGMENT_BYTES)


def test_a_plan_says_what_would_go_and_changes_nothing(node: MakeNode) -> None:
    one = node()
    keys = one.fill(6)
    one.collect()
    assert one.collector.plan() == []
    must_drop(one, 2)
    plan = one.collector.plan()
    assert (
        plan
        and {planned.why for planned in plan} == {Why.WATERMARK}
        and {planned.author for planned in plan} == {"a.1"}
    )
    assert all(one.known(some) == RECORDS for some in keys) and one.graveyard.waiting()[0] == 0
    one.collect()
    assert one.graveyard.waiting()[0] == len(plan)
