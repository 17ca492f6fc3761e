"""Recovery lets writes in once the bytes of what is owned are counted, or after half a minute."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.recovery_kit import DEAD, OWN, SlowClock, World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.followers.close()


def test_no_write_is_let_in_before_the_bytes_are_counted(world: World) -> None:
    assert not world.recovery.wait_ready(0)
    assert not world.recovery.step() and not world.recovery.wait_ready(0)
    world.followers.load()
    world.recovery.step()
    assert world.recovery.wait_ready(0) and world.count.looked == [OWN, DEAD]


def test_a_count_that_takes_long_lets_others_have_their_turn_and_writes_in_after_half_a_minute(world: World) -> None:
    world.followers.load()
    world.count.pauses, clock = 3_000, SlowClock()
    world.recovery._now_ns = world.recovery._accounting._now_ns = clock
    began_ns, notes = clock.now_ns, []
    while world.recovery.step():
        assert (clock.now_ns - began_ns >= 29e9) or not world.recovery.wait_ready(0)
        notes.append(world.recovery.notes())
        assert len(notes) < 3_000
    assert len(notes) > 500, "each step is short"
    assert [] in notes and any("still being counted after 30 s" in note for some in notes for note in some)
    assert world.recovery.notes() == [] and world.recovery.wait_ready(0) and world.count.looked == [OWN, DEAD]
    assert world.recovery.stats().uncounted == 0 and world.recovery.stats().account_s > 30


def test_a_directory_that_cant_be_counted_holds_writes_up_for_half_a_minute_and_is_named(world: World) -> None:
    world.followers.load()
    world.count.broken = {DEAD}
    for _ in range(59):
        with pytest.raises(PermissionError):
            world.recovery.step()
        world.clock.go(0.5)
    assert not world.recovery.wait_ready(0) and world.recovery.notes() == []
    world.clock.go(0.5)
    world.recovery.step()
    assert world.recovery.wait_ready(0) and world.count.looked == [OWN] and world.recovery.stats().uncounted == 1
    (note,) = world.recovery.notes()
    assert str(world.kit.directory) in note and "EACCES" in note and "30 s" in note
    world.count.broken.clear()
    world.recovery.step()
    assert world.recovery.notes() != [], "it is looked at again only after as long"
    world.clock.go(30)
    world.recovery.step()
    assert world.recovery.notes() == [] and world.count.looked == [OWN, DEAD]
    assert world.recovery.stats().uncounted == 0


def test_a_root_that_cant_be_listed_holds_writes_up_for_half_a_minute(world: World) -> None:
    world.recovery.step()
    world.clock.go(29)
    world.recovery.step()
    assert not world.recovery.wait_ready(0)
    world.clock.go(1)
    world.recovery.step()
    assert world.recovery.wait_ready(0) and "could not be listed" in world.recovery.notes()[0]
