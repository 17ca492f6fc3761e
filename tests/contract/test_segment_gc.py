"""Garbage collection of segments over real files: budgets, touches of others, crashes in between, full disks, purges."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gc_kit import GRACE_S, RECORDS, SEGMENT_BYTES, SETTINGS, SPACE, Clock, Node, namespace

from kvmoverd.adapters.storage.segments.budgets import Budgets
from kvmoverd.adapters.storage.segments.collector import REFRESH_S, Writer
from kvmoverd.adapters.storage.segments.settings import Limit, SegmentSettings
from kvmoverd.adapters.storage.segments.touch_log import UNKNOWN_S
from kvmoverd.adapters.storage.segments.usage import Room
from kvmoverd.core.store.eviction import Why
from kvmoverd.core.store.places import PAGE_BYTES, Place

pytestmark = pytest.mark.contract
MakeNode = Callable[..., Node]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def node(tmp_path: Path, clock: Clock) -> Iterator[MakeNode]:
    """Makes nodes over one directory; each is closed in the end."""
    made: list[Node] = []

    def make(name: str = "a.1", settings: SegmentSettings = SETTINGS, **options: object) -> Node:
        one = Node(tmp_path, name, clock, settings, **options)  # type: ignore[arg-type]
        one.open()
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()


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


def must_drop(one: Node, segments: float) -> None:
    """Gives the running node a budget above which it is, by so many segments over the low mark."""
    one.collecting.usage.refresh(one.owned(), one.collector._is_active)
    used = one.collecting.usage.totals()[0]
    bytes_max = round((used - segments * SEGMENT_BYTES) / SETTINGS.low)
    assert used > SETTINGS.high * bytes_max, f"{used} bytes are not above the high mark of {bytes_max}"
    one.collector._budgets = Budgets(replace(SETTINGS, bytes_max=bytes_max))


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


def test_a_crash_after_the_tombstone_is_made_good_by_the_next_start(node: MakeNode, tmp_path: Path) -> None:
    one = node("a.1")
    keys = one.fill(5)
    must_drop(one, 2)
    one.collect()
    waiting = one.collector.counters.dying_segments_now
    assert waiting >= 2
    next_start = node("a.2", adopted=["a.1"])
    next_start.follow()
    assert len(next_start.segments("a.1")) >= 5
    next_start.collect()
    assert next_start.graveyard.waiting()[0] >= waiting
    next_start.clock.pass_s(GRACE_S / 2)
    next_start.collect()
    assert len(next_start.segments("a.1")) >= 5, "readers have their grace again"
    next_start.pass_grace()
    left = [some for some in keys if next_start.known(some)]
    assert all(next_start.reads(key) for some in left for key in some)
    assert f"{1:08d}.seg" not in next_start.segments("a.1")


def test_a_crash_before_the_tombstone_loses_nothing(node: MakeNode) -> None:
    one = node("a.1")
    keys = one.fill(5)

    def fail(numbers: object, owner: str = "") -> None:
        raise OSError(5, "broken")

    one.appender.log.tombstone = fail  # type: ignore[method-assign,assignment]
    must_drop(one, 2)
    one.collect()
    assert "broken" in one.collector.notes()[0] and one.graveyard.waiting()[0] == 0
    assert all(one.reads(key) for some in keys for key in some)
    next_start = node("a.2", adopted=["a.1"])
    next_start.follow()
    next_start.collect()
    assert next_start.graveyard.waiting()[0] == 0
    assert all(next_start.reads(key) for some in keys for key in some)


def test_what_lies_in_the_trash_of_a_start_that_died_is_deleted_by_who_adopts_it(
    node: MakeNode, tmp_path: Path
) -> None:
    one = node("a.1")
    one.fill(1)
    one.collecting.trash.close()
    left = one.root.trash / "a.1" / "left"
    left.write_bytes(b"x" * 100)
    next_start = node("a.2", adopted=["a.1"])
    next_start.follow()
    next_start.collect()
    next_start.pass_grace()
    assert not left.exists() and not (one.root.trash / "a.1").exists()


def test_an_adopted_directory_goes_when_its_last_segment_has_gone(node: MakeNode) -> None:
    one = node("a.1")
    one.fill(3)
    one.appender.segments.retire_all()
    other = node("b.1", adopted=["a.1"])
    other.follow()
    other.collector._budgets = Budgets(replace(SETTINGS, bytes_max=1))
    other.collect()
    other.pass_grace()
    other.pass_grace()
    other.pass_grace()
    assert other.adopted == [] and not (other.root.authors / "a.1").exists()
    assert other.collector.counters.authors_left == 1


def taken_bytes(directory: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in [directory, *directory.rglob("*")])


def test_a_directory_that_was_thrown_away_counts_once(node: MakeNode) -> None:
    for boot in range(8):
        node(f"node-0.{boot}").close()
    other = node("node-0.b", adopted=[f"node-0.{boot}" for boot in range(8)])
    own_bytes = taken_bytes(other.root.authors / other.own())
    other.collecting.trash.close()
    other.collector.step()
    assert other.collector.counters.authors_left == 8
    thrown_bytes = taken_bytes(other.collecting.trash.directory)
    assert other.collector.counters.trash_bytes_now >= 8 * 2 * PAGE_BYTES
    assert other.collector.counters.used_bytes_now <= own_bytes + thrown_bytes


def test_what_was_told_dead_stays_dead_when_the_log_that_said_so_goes(node: MakeNode) -> None:
    first = node("a.1")
    keys = first.fill(3)
    second = node("a.2", adopted=["a.1"])
    second.follow()
    second.collector._budgets = Budgets(replace(SETTINGS, bytes_max=4 * SEGMENT_BYTES))
    second.collect()
    second.pass_grace()
    gone = [number for number, some in enumerate(keys) if not second.known(some)]
    assert 0 < len(gone) < 3
    third = node("a.3", adopted=["a.1", "a.2"])
    third.follow()
    third.collect()
    assert third.adopted == ["a.1"], "nothing of its own was left of the second"
    fourth = node("a.4")
    fourth.follow()
    assert [number for number, some in enumerate(keys) if not fourth.known(some)] == gone


def test_what_a_killed_start_was_about_to_delete_goes_when_it_is_adopted(node: MakeNode) -> None:
    first = node("a.1")
    keys = first.fill(4)
    must_drop(first, 2)
    first.collect()
    dead = [number for number, some in enumerate(keys) if not first.known(some)]
    second = node("a.2")
    second.collect()
    second.follow()
    second.adopted.append("a.1")
    for _ in range(4):
        second.clock.pass_s(1)
        second.collector.step()
    assert second.graveyard.waiting()[0] == len(dead), "found at once, not at the next look at everything"
    second.pass_grace()
    assert not {f"{number + 1:08d}.seg" for number in dead} & set(second.segments("a.1"))


def test_segments_that_no_log_tells_of_go_after_a_grace(node: MakeNode) -> None:
    one = node("a.1")
    one.fill(1)
    one.appender.segments.retire_all()
    made = one.appender.segments._make(SPACE.fingerprint, SPACE.layout.record_bytes, 0)
    one.appender.segments.retire(made)
    name = f"{made.header.number:08d}.seg"
    one.collect()
    assert name in one.segments() and not one.graveyard.waiting()[0]
    one.clock.pass_s(GRACE_S + 1)
    one.collect()
    assert one.collector.counters.unheard_segments == 1
    one.pass_grace()
    assert name not in one.segments()


def test_a_full_disk_frees_at_once_without_a_grace(node: MakeNode) -> None:
    one = node()
    keys = one.fill(5)
    one.use(keys[0])
    one.collect()
    before = len(one.segments())
    assert one.collector.make_room(2 * SEGMENT_BYTES - 1)
    assert len(one.segments()) == before - 2
    assert one.known(keys[0]) == RECORDS, "hot ones go last"
    assert one.collector.counters.no_space_segments == 2
    other = node("b.1")
    other.follow()
    assert [other.known(some) for some in keys] == [one.known(some) for some in keys], "others were told"


def test_a_full_disk_takes_first_what_is_on_its_way(node: MakeNode) -> None:
    one = node()
    keys = one.fill(5)
    must_drop(one, 2)
    one.collect()
    waiting = one.graveyard.waiting()[0]
    known = [one.known(some) for some in keys]
    assert waiting >= 1 and one.collector.make_room(1)
    assert one.graveyard.waiting()[0] == waiting - 1 and [one.known(some) for some in keys] == known


def test_where_nothing_may_go_there_is_no_room(node: MakeNode) -> None:
    one = node()
    one.put([os.urandom(32)])
    one.collect()
    assert not one.collector.make_room(1)
    assert one.collector.counters.rooms_refused == 1


def test_a_log_without_room_for_a_tombstone_does_not_keep_the_disk_full(node: MakeNode) -> None:
    one = node()
    keys = one.fill(2)
    one.collect()
    told, tombstone = [], one.appender.log.tombstone

    def fail(numbers: object, owner: str = "") -> None:
        raise OSError(28, "no space")

    one.appender.log.tombstone = fail  # type: ignore[method-assign,assignment]
    assert one.collector.make_room(1)
    assert one.graveyard.untold_segments == 1 and sum(one.known(some) == 0 for some in keys) == 1

    def tell(numbers: list[int], owner: str = "") -> None:
        told.extend(numbers)
        tombstone(numbers, owner)

    one.appender.log.tombstone = tell  # type: ignore[method-assign,assignment]
    one.collect()
    assert len(told) == 1


def test_many_who_need_room_at_once_do_not_clear_the_disk(node: MakeNode) -> None:
    one = node()
    one.fill(12)
    one.collect()
    before = len(one.segments())
    made: list[bool] = []
    threads = [threading.Thread(target=lambda: made.append(one.collector.make_room(1))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert made == [True] * 4 and before - len(one.segments()) == 4


def test_a_purged_namespace_is_gone_at_once_and_its_bytes_after_the_grace(node: MakeNode) -> None:
    one, other = node("a.1"), node("b.1")
    two = namespace("other")
    one.open(two)
    keys, kept = one.fill(2), one.fill(1, two)
    other.follow()
    assert other.known(keys[0]) == RECORDS
    one.purges.purge(SPACE)
    assert one.known([key for some in keys for key in some]) == 0
    other.purges.poll()
    assert other.known([key for some in keys for key in some]) == 0, "without a look at any log"
    one.collect()
    one.pass_grace()
    assert one.known(kept[0], two) == RECORDS
    present = {segment.header.fingerprint for segment in _open(one)}
    assert present == {two.fingerprint}, "also the segment that was being filled"
    again = one.put([keys[0][0]])
    assert again[0].place is not None and one.reads(keys[0][0]), "it can be stored anew"


def test_a_tenants_purge_takes_the_segments_of_all_its_namespaces(node: MakeNode) -> None:
    one = node()
    spaces = [namespace("m1", "acme"), namespace("m2", "acme"), namespace("m1", "other")]
    keys = {}
    for space in spaces:
        one.open(space)
        keys[space.fingerprint] = one.fill(1, space)[0]
    one.purges.purge_tenant("acme")
    one.collect()
    one.pass_grace()
    assert [one.known(keys[space.fingerprint], space) for space in spaces] == [0, 0, RECORDS]
    assert {segment.header.fingerprint for segment in _open(one)} == {spaces[2].fingerprint}


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


def _open(one: Node) -> list:
    """What is open and there, of this node's own."""
    numbers = [int(name.removesuffix(".seg")) for name in one.segments()]
    found = [one.files.take(one.own(), number) for number in numbers]
    for segment in found:
        one.files.let_go(segment.fd)
    return found
