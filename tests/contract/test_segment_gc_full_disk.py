"""Garbage collection on a full disk: segments go at once, no more of them than are needed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from gc_kit import RECORDS, SEGMENT_BYTES, MakeNode, must_drop, nodes_over

pytestmark = pytest.mark.contract


@pytest.fixture
def node(tmp_path: Path) -> Iterator[MakeNode]:
    with nodes_over(tmp_path) as make:
        yield make


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
