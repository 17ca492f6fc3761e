"""When recovery scans: at a limited rate, in short turns, again after what failed, and not what is another's by now."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvmoverd.adapters.storage.segments.page_files import PageFiles
from kvmoverd.core.store.places import PAGE_BYTES, log_name
from tests.unit.recovery_kit import DEAD, OWN, SlowClock, World
from tests.unit.segment_kit import RECORD_PAGES, tags_of


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.followers.close()


def test_a_full_disk_makes_the_scan_begin_again_later(world: World) -> None:
    entries = world.segment(1, range(5), range(0))
    world.fail_publish = 2
    world.recover()
    assert world.said_tags == [tags_of(entries[:5])]
    assert world.recovery.stats().failures == 2 and world.recovery.owned() == [OWN, DEAD]


def test_a_directory_that_vanishes_is_given_up(world: World) -> None:
    world.segment(1, range(5), range(0))
    world.followers.load()
    shutil.rmtree(world.kit.directory)
    world.recovery.adopted(DEAD)
    for _ in range(100):
        if not world.recovery.step():
            break
    assert world.recovery.owned() == [OWN] and world.recovery.stats().waiting == 0


def test_what_is_not_ours_any_more_is_not_scanned_on(world: World) -> None:
    world.segment(1, range(5), range(0))
    world.followers.load()
    world.recovery.adopted(DEAD)
    world.recovery.lost(DEAD)
    assert not world.recovery.step() and world.said == [] and world.recovery.owned() == [OWN]


def test_a_scan_that_is_under_way_ends_when_the_directory_is_not_ours_any_more(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.segment(1, range(85), range(0))
    world.followers.load()
    world.recovery.adopted(DEAD)
    monkeypatch.setattr(world.recovery, "_now_ns", SlowClock())
    assert world.recovery.step() and world.recovery.stats().waiting == 1
    world.recovery.lost(DEAD)
    assert world.recovery.stats().waiting == 0
    for _ in range(100):
        assert not world.recovery.step()
    assert world.said == [] and world.recovery.owned() == [OWN]


def test_a_log_that_cant_be_read_for_some_seconds_is_waited_for_before_its_segments_are_searched(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries, real, broken = world.segment(1, range(20), range(18)), PageFiles.open, [True]
    world.followers.load()
    world.recovery.adopted(DEAD)

    def open_or_fail(files: PageFiles, path: Path) -> int:
        if broken and path.name == log_name(1) and files is world.recovery._files:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(files, path)

    monkeypatch.setattr(PageFiles, "open", open_or_fail)
    for _ in range(9):
        assert not world.recovery.step(), "nothing can be done until the log is tried again"
        world.clock.go(0.5)
    assert world.said == [] and world.recovery.owned() == [OWN]
    broken.clear()
    for _ in range(20):
        world.recovery.step()
        world.clock.go(0.5)
    assert world.said_tags == [tags_of(entries[18:20])] and world.recovery.owned() == [OWN, DEAD]


def test_a_log_that_can_never_be_read_is_done_without_after_a_minute(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries, real = world.segment(1, range(20), range(18)), PageFiles.open
    world.followers.load()
    world.recovery.adopted(DEAD)

    def open_or_fail(files: PageFiles, path: Path) -> int:
        if path.name == log_name(1) and files is world.recovery._files:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(files, path)

    monkeypatch.setattr(PageFiles, "open", open_or_fail)
    for _ in range(70):
        world.recovery.step()
        world.clock.go(1)
    assert world.said_tags == [tags_of(entries[:20])] and world.recovery.owned() == [OWN, DEAD]


def test_what_a_lost_log_named_is_read_at_a_limited_rate(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = world.segment(1, range(85), range(0))
    record_bytes = RECORD_PAGES * PAGE_BYTES
    monkeypatch.setattr("kvmoverd.adapters.storage.segments.recovery.SCAN_BYTES_PER_S", 20 * record_bytes)
    world.followers.load()
    world.recovery.step()
    world.recovery.adopted(DEAD)
    scan = world.recovery.stats().scan
    seen = []
    while world.recovery.stats().waiting:
        assert world.recovery.step() is False, "it may not go on at once"
        seen.append(scan.headers)
        world.clock.go(0.5)
    steps = np.diff(seen)
    assert (steps[:-1] <= 12).all() and 7 <= len(seen) <= 10, seen
    assert world.said_tags == [tags_of(entries)]
    # Long idleness saves nothing up.
    world.segment(2, range(85), range(0))
    world.clock.go(3600)
    world.recovery.adopted(DEAD)
    before = scan.headers
    world.recovery.step()
    assert scan.headers - before <= 12


def test_a_scan_that_ends_with_a_surprise_is_begun_again_and_not_taken_for_one_that_is_done(world: World) -> None:
    entries = world.segment(1, range(5), range(0))
    world.followers.load()
    world.recovery.step()
    world.surprise = True
    world.recovery.adopted(DEAD)
    with pytest.raises(RuntimeError):
        world.recovery.step()
    assert world.recovery.owned() == [OWN]
    world.clock.go(5)
    while world.recovery.step() or world.recovery.stats().waiting:
        world.clock.go(1)
    assert world.recovery.owned() == [OWN, DEAD] and world.said_tags == [tags_of(entries[:5])]


def test_a_scan_gives_way_after_each_twentieth_of_a_second(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.segment(1, range(85), range(0))
    world.followers.load()
    world.recovery.step()
    world.recovery.adopted(DEAD)
    monkeypatch.setattr(world.recovery, "_now_ns", SlowClock())
    turns = 0
    while world.recovery.step():
        turns += 1
    assert turns >= 85 // 6 and world.recovery.stats().scan.found == 85
