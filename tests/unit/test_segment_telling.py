"""What is told to the index: nothing is lost when it can't be taken at once, and any thread may ask who is dead."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvmoverd.adapters.storage.segments.followed import SegmentBits
from tests.unit.segment_kit import PlainIndex, keys_of, tags_of
from tests.unit.test_segment_followers import World


class Refusing(PlainIndex):
    """An index that has no memory left when it is told of blocks, or of what is dead, so many times."""

    refusals = drop_refusals = 0

    def add_many(self, parts: Sequence[tuple[int, npt.NDArray[np.void]]], *, old: bool = False) -> None:
        if self.refusals:
            self.refusals -= 1
            raise MemoryError
        super().add_many(parts, old=old)

    def drop_segments(self, author: str, numbers: Sequence[int]) -> None:
        if self.drop_refusals:
            self.drop_refusals -= 1
            raise MemoryError
        super().drop_segments(author, numbers)


def step_to_the_end(world: World) -> int:
    """How many steps have raised."""
    raised = 0
    for _ in range(50):
        world.clock.go(0.2)
        try:
            world.followers.step()
        except MemoryError:
            raised += 1
    return raised


@pytest.mark.parametrize("logs", [1, 6], ids=["the log that is written", "older logs, too"])
@pytest.mark.parametrize("refusals", [1, 2, 3])
def test_what_the_index_could_not_take_is_told_again(tmp_path: Path, logs: int, refusals: int) -> None:
    index = Refusing()
    world = World(tmp_path, index)
    kit = world.kit(pages=8)
    kit.tombstone([9])
    written = [keys_of(number, 40) for number in range(logs)]
    for number, entries in enumerate(written, 1):
        kit.blocks(entries, segment=number)
        if number < logs:
            kit.seal()
    index.refusals = refusals
    assert step_to_the_end(world) == refusals
    assert [index.tags(kit.name, number) for number in range(1, logs + 1)] == [tags_of(one) for one in written]
    index.refusals, index.drop_refusals = refusals, 2
    late = keys_of(99, 30)
    kit.tombstone([1])
    kit.blocks(late, segment=50)
    assert step_to_the_end(world) == refusals + 2
    assert (index.tags(kit.name, 50), index.tags(kit.name, 1)) == (tags_of(late), set())
    world.followers.close()


def test_a_tombstone_in_an_older_log_is_told_again_when_the_index_refuses_it(tmp_path: Path) -> None:
    index = Refusing()
    world = World(tmp_path, index)
    kit = world.kit(pages=8)
    kit.blocks(keys_of(1, 40), segment=1)
    kit.tombstone([1])
    kit.blocks(keys_of(2, 40), segment=2)
    for number in range(3, 8):
        kit.seal()
        kit.blocks(keys_of(number, 40), segment=number)
    index.drop_refusals = 3
    assert step_to_the_end(world) == 3
    assert world.followers.dropped(kit.name, 1) and index.tags(kit.name, 1) == set()
    assert index.tags(kit.name, 2) == tags_of(keys_of(2, 40))
    world.followers.close()


def test_a_page_that_comes_late_is_not_lost_when_the_index_refuses_it_first(tmp_path: Path) -> None:
    index = Refusing()
    world = World(tmp_path, index)
    kit = world.kit()
    kit.blocks(keys_of(1, 5), segment=1)
    hole = kit.at
    kit.at += 1
    kit.blocks(keys_of(2, 5), segment=2)
    world.go(0.4)
    late = keys_of(3, 5)
    kit.at, after = hole, kit.at
    kit.tombstone([77])
    kit.at = after
    kit.blocks(late, segment=3)
    index.drop_refusals = 1
    assert step_to_the_end(world) == 1
    assert world.followers.dropped(kit.name, 77)
    assert index.tags(kit.name, 3) == tags_of(late)
    world.followers.close()


def test_segments_that_are_dead_are_read_by_one_thread_while_another_adds_more() -> None:
    bits, ended = SegmentBits(), threading.Event()
    assert bits.numbers() == []

    def read() -> None:
        while not ended.is_set():
            bits.numbers()

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(0, 1 << 18, 8):
            bits.add(number)
    finally:
        ended.set()
        reader.join()
        sys.setswitchinterval(interval_s)
    assert bits.numbers() == list(range(0, 1 << 18, 8))


def test_who_is_seen_to_live_says_himself_which_of_his_segments_are_dead(tmp_path: Path) -> None:
    world = World(tmp_path)
    alive, still = world.kit("alive.boot"), world.kit("still.boot")
    for kit in (alive, still):
        kit.beat(1)
        kit.tombstone([3, 4])
    world.go(1.0)
    assert world.followers.told_dead() == {alive.name: [3, 4], still.name: [3, 4]}, "nobody is known to live yet"
    alive.beat(2)
    world.go(6.0)
    assert world.followers.told_dead() == {still.name: [3, 4]}
    alive.beat(3, ended=True)
    world.go(6.0)
    assert world.followers.told_dead() == {alive.name: [3, 4], still.name: [3, 4]}
    world.followers.close()
