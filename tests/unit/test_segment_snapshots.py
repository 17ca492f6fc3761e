"""Snapshots of sealed logs: they say the same as the logs that they stand for, less what is dead, or nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvmoverd.adapters.storage.segments.backlog import Backlog
from kvmoverd.adapters.storage.segments.followed import Followed, Listing
from kvmoverd.adapters.storage.segments.followers import Followers
from kvmoverd.adapters.storage.segments.log_reader import LogCounters
from kvmoverd.adapters.storage.segments.page_files import PageFiles
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.adapters.storage.segments.snapshot_writer import Snapshots
from kvmoverd.adapters.storage.segments.snapshots import (
    SECTION_BYTES,
    Snapshot,
    SnapshotCounters,
    SnapshotDamaged,
    own_segments,
    read_snapshot,
)
from kvmoverd.core.store.log_pages import Kind, author16
from kvmoverd.core.store.places import PAGE_BYTES, snapshot_name
from tests.unit.segment_kit import FINGERPRINT, Clock, LogKit, PlainIndex, keys_of, tags_of

OTHER = "node-2.other"
GRACE_S = 60.0


class Maker:
    """An author who makes snapshots of his logs."""

    def __init__(self, authors: Path, pages: int = 16) -> None:
        self.kit, self.clock, self.trash = (
            LogKit(authors, "node-1.boot", pages=pages),
            Clock(),
            authors.parent / "trash",
        )
        self.trash.mkdir(exist_ok=True)
        self.known = {author16(OTHER)}
        self.snapshots = Snapshots(
            self.kit.directory,
            is_known=self.known.__contains__,
            throw=lambda path, name: os.rename(path, self.trash / name),
            grace_s=GRACE_S,
            now_ns=self.clock,
        )

    def make(self) -> int:
        """A snapshot of all that is sealed; gives its number."""
        self.kit.seal()
        for log in range(1, self.kit.log):
            self.snapshots.sealed(log)
        for _ in range(10_000):
            if not self.snapshots.step():
                break
        assert self.snapshots.stats().last == self.kit.log - 1
        return self.kit.log - 1

    def told(self, number: int, only: set[bytes] | None = None) -> dict[tuple[bytes, int], npt.NDArray[np.void]]:
        found = {}
        for news in read_snapshot(self.kit.directory, number, SnapshotCounters(), only=only):
            for run in news.runs:
                found[run.owner16, run.segment] = run.entries
        return found

    def names(self) -> set[str]:
        return {name for name in os.listdir(self.kit.directory) if name.startswith(("log.", "snap."))}


@pytest.fixture
def maker(tmp_path: Path) -> Maker:
    (tmp_path / "authors").mkdir()
    return Maker(tmp_path / "authors")


@pytest.fixture
def loaded(maker: Maker) -> Iterator[tuple[PlainIndex, Followers]]:
    index = PlainIndex()
    followers = Followers(
        maker.kit.authors,
        index,
        own=lambda: "",
        machine="here",
        settings=SegmentSettings(),
        now_ns=maker.clock,
    )
    yield index, followers
    followers.close()


def damage(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_a_snapshot_says_what_the_logs_said_of_the_living(maker: Maker) -> None:
    maker.kit.blocks(keys_of(1, 300), segment=1, per_page=7)
    maker.kit.blocks(keys_of(2, 10), segment=2)
    maker.kit.blocks(keys_of(3, 5), segment=3, owner=OTHER, purge=2)
    maker.kit.tombstone([2])
    told = maker.told(maker.make())
    assert set(told) == {(bytes(16), 1), (author16(OTHER), 3)}
    expected = keys_of(1, 300)
    for field in ("page", "depth"):
        assert told[bytes(16), 1][field].tolist() == expected[field].tolist()
    assert told[bytes(16), 1]["key"][:, 0].tolist() == expected["key"][:, 0].tolist()


def test_what_a_page_says_of_its_segment_is_kept(maker: Maker) -> None:
    maker.kit.blocks(keys_of(3, 5), segment=3, owner=OTHER, purge=2)
    number = maker.make()
    run = next(run for news in read_snapshot(maker.kit.directory, number, SnapshotCounters()) for run in news.runs)
    assert (run.generation, run.purge, run.record_pages, run.time_s) == (103, 2, 3, 1_700_000_000)
    assert run.fingerprint16 == FINGERPRINT[:16] and run.owner16 == author16(OTHER)


def test_a_later_snapshot_takes_on_the_one_before(maker: Maker) -> None:
    maker.kit.blocks(keys_of(1, 50), segment=1, per_page=5)
    maker.kit.blocks(keys_of(9, 3), segment=9)
    maker.make()
    maker.kit.blocks(np.concatenate([keys_of(1, 50), keys_of(4, 20)])[50:], segment=1, per_page=5)
    maker.kit.blocks(keys_of(2, 10), segment=2)
    maker.kit.tombstone([9])
    told = maker.told(maker.make())
    assert {name[1] for name in told} == {1, 2}
    assert tags_of(told[bytes(16), 1]) == tags_of(keys_of(1, 50)) | tags_of(keys_of(4, 20))


def test_logs_and_older_snapshots_go_after_the_grace_and_what_is_newer_stays(maker: Maker) -> None:
    for number in range(3):
        maker.kit.blocks(keys_of(number, 20), segment=number + 1)
        maker.make()
    assert {"snap.00000001", "snap.00000002", "snap.00000003", "log.00000001", "log.00000004"} <= maker.names()
    maker.clock.go(GRACE_S - 1)
    maker.snapshots.step()
    assert "log.00000001" in maker.names()
    maker.clock.go(1)
    for _ in range(3):
        maker.snapshots.step()
    assert maker.names() == {"snap.00000003", "log.00000004", "log.00000005"}
    assert len(os.listdir(maker.trash)) == 5


def test_after_a_restart_the_snapshot_and_the_logs_behind_it_are_loaded(
    maker: Maker, loaded: tuple[PlainIndex, Followers]
) -> None:
    index, followers = loaded
    maker.kit.blocks(keys_of(1, 100), segment=1, per_page=5)
    maker.kit.blocks(keys_of(5, 5), segment=5)
    maker.make()
    maker.kit.blocks(keys_of(2, 100), segment=2, per_page=5)
    maker.kit.tombstone([5])
    maker.clock.go(GRACE_S)
    maker.snapshots.step()
    followers.load()
    found = [index.tags(maker.kit.name, segment) for segment in (1, 2, 5)]
    assert found == [tags_of(keys_of(1, 100)), tags_of(keys_of(2, 100)), set()]
    assert followers.stats().snapshots == 1 and followers.stats().unread_logs == 0


def test_a_follower_that_was_away_too_long_takes_the_snapshot_and_drops_what_died_meanwhile(
    maker: Maker, loaded: tuple[PlainIndex, Followers]
) -> None:
    index, followers = loaded
    maker.kit.blocks(keys_of(1, 10), segment=1)
    maker.kit.blocks(keys_of(2, 10), segment=2)
    followers.load()
    assert index.tags(maker.kit.name, 1)
    maker.kit.tombstone([1])
    for segment in range(3, 8):
        maker.kit.blocks(keys_of(segment, 10), segment=segment, per_page=1)
    maker.make()
    maker.clock.go(GRACE_S)
    maker.snapshots.step()
    maker.kit.blocks(keys_of(8, 10), segment=8)
    followers._followed[maker.kit.name].tail.close()
    for _ in range(20):
        maker.clock.go(1)
        followers.step()
    found = [index.tags(maker.kit.name, segment) for segment in range(1, 9)]
    assert found == [set(), *(tags_of(keys_of(segment, 10)) for segment in range(2, 9))]
    assert followers.stats().logs_gone == 1


def test_what_is_said_of_others_dead_segments_is_kept_while_their_author_is_there(maker: Maker) -> None:
    maker.kit.tombstone([4, 5], owner=OTHER)
    maker.kit.tombstone([6], owner="node-3.gone")
    maker.kit.tombstone([7])
    number = maker.make()
    news = list(read_snapshot(maker.kit.directory, number, SnapshotCounters()))
    told = [tombstone for one in news for tombstone in one.tombstones]
    assert told == [(author16(OTHER), (4,)), (author16(OTHER), (5,))]
    maker.known.clear()
    maker.kit.tombstone([8])
    again = list(read_snapshot(maker.kit.directory, maker.make(), SnapshotCounters()))
    assert [tombstone for one in again for tombstone in one.tombstones] == []


def test_an_own_dead_segment_is_said_to_be_dead_as_long_as_it_is_there(maker: Maker) -> None:
    """Or whoever adopts the directory takes its records for some that nobody lived to tell."""
    for segment in (1, 2):
        maker.kit.make_segment(segment)
        maker.kit.blocks(keys_of(segment, 5), segment=segment)
    maker.kit.tombstone([1, 2])
    maker.kit.segment_path(2).unlink()
    for _ in range(2):
        news = list(read_snapshot(maker.kit.directory, maker.make(), SnapshotCounters()))
        assert [tombstone for one in news for tombstone in one.tombstones] == [(bytes(16), (1,))]
    maker.kit.segment_path(1).unlink()
    news = list(read_snapshot(maker.kit.directory, maker.make(), SnapshotCounters()))
    assert [tombstone for one in news for tombstone in one.tombstones] == []


def test_one_namespace_can_be_read_alone(maker: Maker) -> None:
    maker.kit.blocks(keys_of(1, 5))
    number = maker.make()
    assert maker.told(number, only={b"x" * 16}) == {} and len(maker.told(number, only={FINGERPRINT[:16]})) == 1


@pytest.mark.parametrize("at", [0, 9, 20, 40, PAGE_BYTES + 3, PAGE_BYTES + 90])
def test_damage_before_the_blocks_is_refused_whole(maker: Maker, at: int) -> None:
    maker.kit.blocks(keys_of(1, 50))
    maker.kit.blocks(keys_of(2, 50), segment=2)
    number = maker.make()
    damage(maker.kit.directory / snapshot_name(number), at)
    with pytest.raises(SnapshotDamaged):
        Snapshot(maker.kit.directory, number)


@pytest.mark.parametrize("size_bytes", [0, 100, PAGE_BYTES, PAGE_BYTES + 10])
def test_a_snapshot_that_ends_too_early_is_refused(maker: Maker, size_bytes: int) -> None:
    maker.kit.blocks(keys_of(1, 50))
    number = maker.make()
    os.truncate(maker.kit.directory / snapshot_name(number), size_bytes)
    with pytest.raises(SnapshotDamaged):
        own_segments(maker.kit.directory, number)


def test_a_damaged_snapshot_is_replaced_by_the_one_before_and_the_logs_that_are_there(
    maker: Maker, loaded: tuple[PlainIndex, Followers]
) -> None:
    index, followers = loaded
    for segment in (1, 2, 3):
        maker.kit.blocks(keys_of(segment, 20), segment=segment)
        maker.make()
    damage(maker.kit.directory / snapshot_name(3), 30)
    followers.load()
    found = [index.tags(maker.kit.name, segment) for segment in (1, 2, 3)]
    assert found == [tags_of(keys_of(segment, 20)) for segment in (1, 2, 3)]


def test_a_damaged_section_loses_the_segments_that_lie_in_it_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "authors").mkdir()
    maker = Maker(tmp_path / "authors", pages=4000)
    per_segment = 20_000
    for segment in range(1, 9):
        maker.kit.blocks(keys_of(segment, per_segment), segment=segment)
    number = maker.make()
    snapshot = Snapshot(maker.kit.directory, number)
    damage(maker.kit.directory / snapshot_name(number), snapshot._blocks_at + SECTION_BYTES + 5)
    snapshot.close()
    counters = SnapshotCounters()
    found = {run.segment for news in read_snapshot(maker.kit.directory, number, counters) for run in news.runs}
    # A MiB has 65,536 blocks: the second one has parts of segments 4 to 7.
    assert found == {1, 2, 3, 8} and (counters.lost_segments, counters.damaged) == (4, 4)


def test_a_snapshot_on_a_damaged_one_goes_on_without_what_was_lost(maker: Maker) -> None:
    maker.kit.blocks(keys_of(1, 50))
    number = maker.make()
    damage(
        maker.kit.directory / snapshot_name(number), os.path.getsize(maker.kit.directory / snapshot_name(number)) - 3
    )
    maker.kit.blocks(keys_of(2, 50), segment=2)
    assert {name[1] for name in maker.told(maker.make())} == {2}


@pytest.mark.parametrize("at", [20, PAGE_BYTES + 3])
def test_a_snapshot_that_is_damaged_whole_is_replaced_by_the_next(maker: Maker, at: int) -> None:
    for segment in (1, 2, 3):
        maker.kit.blocks(keys_of(segment, 20), segment=segment)
        number = maker.make()
    damage(maker.kit.directory / snapshot_name(number), at)
    maker.kit.blocks(keys_of(4, 20), segment=4)
    told = maker.told(maker.make())
    assert {name[1]: tags_of(entries) for name, entries in told.items()} == {
        segment: tags_of(keys_of(segment, 20)) for segment in (1, 2, 3, 4)
    }
    assert maker.snapshots.stats().damaged == 1
    maker.clock.go(2 * GRACE_S)
    for _ in range(4):
        maker.snapshots.step()
    assert {name for name in maker.names() if name.startswith("snap.")} == {snapshot_name(4)}
    assert not maker.kit.log_path(4).exists(), "logs go on being taken away"


def test_where_no_older_snapshot_and_no_older_log_is_left_the_next_one_has_what_is_there(maker: Maker) -> None:
    maker.kit.blocks(keys_of(1, 20), segment=1)
    number = maker.make()
    maker.clock.go(2 * GRACE_S)
    maker.snapshots.step()
    assert not maker.kit.log_path(1).exists()
    damage(maker.kit.directory / snapshot_name(number), 20)
    maker.kit.blocks(keys_of(2, 20), segment=2)
    assert {name[1] for name in maker.told(maker.make())} == {2}
    assert maker.snapshots.stats().damaged == 1


def test_a_snapshot_that_can_not_be_written_leaves_nothing_and_comes_later(
    maker: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker.kit.blocks(keys_of(1, 50))
    maker.kit.seal()
    maker.snapshots.sealed(1)
    fsync = os.fsync

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        maker.snapshots.step()
    assert not any(name.startswith("snap.") for name in maker.names())
    monkeypatch.setattr(os, "fsync", fsync)
    assert not maker.snapshots.step()
    assert "snap.00000001" in maker.names()


def test_snapshots_of_a_large_store_are_not_made_for_each_log(maker: Maker) -> None:
    maker.kit.blocks(keys_of(1, 62 * 14 * 20))
    maker.make()
    first = maker.snapshots.stats().written
    made = []
    for segment in range(2, 12):
        maker.kit.blocks(keys_of(segment, 10), segment=segment)
        maker.kit.seal()
        maker.snapshots.sealed(maker.kit.log - 1)
        maker.snapshots.step()
        made.append(maker.snapshots.stats().written - first)
    assert made[0] == 0 and 2 <= made[-1] <= 5


def test_what_was_found_damaged_stays_so_in_a_snapshot_of_a_snapshot(
    maker: Maker, loaded: tuple[PlainIndex, Followers]
) -> None:
    own, theirs = keys_of(1, 10), keys_of(2, 10)
    other = LogKit(maker.kit.authors, OTHER)
    other.blocks(theirs)
    maker.kit.blocks(own)
    maker.kit.blocks(own[:2], kind=Kind.BAD)
    maker.make()
    maker.kit.blocks(theirs[5:], owner=OTHER, kind=Kind.BAD)
    maker.make()
    maker.clock.now += round(2 * GRACE_S * 1e9)
    for _ in range(2):
        maker.snapshots.step()
    assert not maker.kit.log_path(1).exists() and not maker.kit.log_path(2).exists()
    index, followers = loaded
    followers.load()
    assert index.tags(maker.kit.name) == tags_of(own[2:]) and index.tags(OTHER) == tags_of(theirs[:5])
    assert own_segments(maker.kit.directory, 2) == {1}


def test_a_snapshot_that_gives_way_to_a_newer_one_before_it_was_read_loses_nothing(maker: Maker) -> None:
    for segment in (1, 2):
        maker.kit.blocks(keys_of(segment, 20), segment=segment)
        maker.make()
        if segment == 1:
            listing = Listing.of(maker.kit.directory)
    author = Followed(maker.kit.authors, maker.kit.name, PageFiles(), LogCounters(), SegmentSettings(), machine="here")
    backlog = Backlog(PageFiles(), LogCounters(), is_own_node=lambda author: False, now_ns=maker.clock)
    backlog.add(author, listing, 2)
    (maker.kit.directory / snapshot_name(1)).unlink()
    maker.kit.log_path(1).unlink()
    found = set()
    while (step := backlog.step()) is not None:
        found |= {run.segment for run in step[1].runs}
    assert found == {1, 2} and backlog.counters.failed == 0 and len(backlog) == 0
    # The newer one is damaged, too: it ends, with what is left.
    damage(maker.kit.directory / snapshot_name(2), 30)
    backlog.add(author, listing, 2)
    while (step := backlog.step()) is not None:
        found.clear()
    assert len(backlog) == 0 and backlog.counters.failed <= 2
