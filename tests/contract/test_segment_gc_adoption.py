"""Garbage collection after crashes: whoever adopts a dead start's directory deletes what that start left behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from gc_kit import GRACE_S, SEGMENT_BYTES, SETTINGS, SPACE, MakeNode, must_drop, nodes_over

from kvmoverd.adapters.storage.segments.budgets import Budgets
from kvmoverd.core.store.places import PAGE_BYTES

pytestmark = pytest.mark.contract


@pytest.fixture
def node(tmp_path: Path) -> Iterator[MakeNode]:
    with nodes_over(tmp_path) as make:
        yield make


def taken_bytes(directory: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in [directory, *directory.rglob("*")])


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
