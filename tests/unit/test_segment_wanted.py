"""Namespaces that the index had left out, and logs that can't be read for a while: all that was said is told again."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvmoverd.adapters.storage.segments.followed import Listing
from kvmoverd.adapters.storage.segments.followers import Followers
from kvmoverd.adapters.storage.segments.page_files import PageFiles
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.core.store.places import PAGE_BYTES, snapshot_name
from tests.unit.segment_kit import FINGERPRINT, Clock, LogKit, PlainIndex, keys_of, tags_of

OWN = "node-0.own"
SPACE = FINGERPRINT[:16]


class World:
    """A root in which this node writes itself, as it does: into its log, and into the index what is durable."""

    def __init__(self, authors: Path) -> None:
        self.authors, self.clock, self.index, self.name = authors, Clock(), PlainIndex(), OWN
        self.own = LogKit(authors, OWN, pages=4)
        self.followers = Followers(
            authors,
            self.index,
            own=lambda: self.name,
            machine="here",
            settings=SegmentSettings(),
            now_ns=self.clock,
        )

    def go(self, seconds: float = 0.2) -> None:
        for _ in range(max(1, round(seconds / 0.2))):
            self.clock.go(0.2)
            for _ in range(1000):
                if not self.followers.step():
                    break

    def want(self, *spaces: bytes) -> None:
        for space in spaces or (SPACE,):
            self.index.left_out.discard(space)
            self.followers.wanted(space)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.followers.close()


def test_own_blocks_are_told_again_from_all_own_logs_when_their_namespace_is_wanted(world: World) -> None:
    entries = keys_of(1, 30)
    world.own.blocks(entries, per_page=1)
    world.followers.load()
    assert world.index.tags(OWN) == set() and OWN not in world.followers.known()
    world.want()
    world.go()
    assert world.index.tags(OWN) == tags_of(entries)
    assert world.followers.stats().damaged_pages == 0


def test_what_the_own_author_says_of_those_he_adopted_is_told_again_too(world: World) -> None:
    dead = LogKit(world.authors, "node-1.dead")
    dead.blocks(keys_of(1, 5))
    world.own.blocks(keys_of(2, 5), segment=2, owner=dead.name)
    world.index.left_out.add(SPACE)
    world.followers.load()
    world.want()
    world.go()
    assert world.index.tags(dead.name, 1) == tags_of(keys_of(1, 5))
    assert world.index.tags(dead.name, 2) == tags_of(keys_of(2, 5))


def test_what_is_committed_while_the_own_logs_are_read_again_is_there_once_it_was_told(world: World) -> None:
    entries = keys_of(1, 40)
    world.own.blocks(entries[:20], per_page=1)
    world.followers.load()
    world.want()
    for at in range(20, 40):
        # As a commit does it: the page first, then the index.
        world.own.blocks(entries[at : at + 1])
        segment_id = world.index.add_segment(OWN, 1, fingerprint16=SPACE, generation=101, purge=0, record_pages=3)
        world.index.add_blocks(segment_id, entries[at : at + 1])
        world.go()
        assert world.index.tags(OWN) == tags_of(entries[: at + 1])


def test_a_directory_that_cant_be_looked_at_when_its_blocks_are_wanted_is_read_again_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = LogKit(world.authors, "node-1.boot")
    other.blocks(keys_of(1, 10))
    world.own.blocks(keys_of(2, 10))
    world.index.left_out.add(SPACE)
    world.followers.load()

    def refuse(directory: Path) -> Listing:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Listing, "of", refuse)
        world.want()
        world.go(2)
        assert world.index.tags(OWN) == world.index.tags(other.name) == set()
    world.go(2)
    assert world.index.tags(OWN) == tags_of(keys_of(2, 10)) and world.index.tags(other.name) == tags_of(keys_of(1, 10))


def test_thousands_of_namespaces_may_be_wanted_at_once(world: World) -> None:
    world.own.blocks(keys_of(1, 10))
    world.followers.load()
    world.want(SPACE, *(number.to_bytes(16, "big") for number in range(5000)))
    world.go()
    assert world.index.tags(OWN) == tags_of(keys_of(1, 10))


def test_what_an_adopter_says_of_this_author_before_he_knows_of_it_counts(world: World) -> None:
    world.own.blocks(keys_of(1, 3), segment=1)
    for segment in (1, 2):
        world.index.add_blocks(
            world.index.add_segment(OWN, segment, fingerprint16=SPACE, generation=1, purge=0, record_pages=3),
            keys_of(segment, 3),
        )
    adopter = LogKit(world.authors, "node-1.boot")
    adopter.tombstone([1], owner=OWN)
    adopter.blocks(keys_of(3, 3), segment=3, owner=OWN)
    world.followers.load()
    assert [world.index.tags(OWN, segment) for segment in (1, 2, 3)] == [
        set(),
        *(tags_of(keys_of(n, 3)) for n in (2, 3)),
    ]
    # He finds out, and goes on under another name; now he follows what he was.
    world.name = "node-0.own-1"
    world.go(2)
    assert [world.index.tags(OWN, segment) for segment in (1, 2, 3)] == [
        set(),
        *(tags_of(keys_of(n, 3)) for n in (2, 3)),
    ]
    assert world.followers.stats().lost_entries == 0


def test_of_a_former_name_whose_directory_is_gone_nothing_is_found_any_more(world: World) -> None:
    number = world.index.add_segment(OWN, 1, fingerprint16=SPACE, generation=1, purge=0, record_pages=3)
    world.index.add_blocks(number, keys_of(1, 3))
    world.followers.load()
    shutil.rmtree(world.own.directory)
    world.go(3)
    assert world.index.tags(OWN) == tags_of(keys_of(1, 3)), "he has not noticed yet"
    world.name = "node-0.own-1"
    LogKit(world.authors, world.name)
    world.go(3)
    assert world.index.tags(OWN) == set() and world.followers.known() == []


def test_what_is_said_of_authors_that_are_gone_does_not_pile_up(world: World) -> None:
    adopter, dead = LogKit(world.authors, "node-1.boot", pages=4), LogKit(world.authors, "node-2.dead")
    dead.blocks(keys_of(1, 5))
    adopter.blocks(keys_of(2, 5), segment=2, owner=dead.name)
    world.followers.load()
    for path in (dead.directory / "seg", *dead.directory.glob("log.*"), dead.directory):
        path.rmdir() if path.is_dir() else path.unlink()
    world.go(2)
    for _ in range(5):
        world.want()
        world.go()
    adopter.blocks(keys_of(3, 5), segment=3, owner=dead.name)
    world.go(1)
    stats = world.followers.stats()
    assert (stats.pending_entries, stats.lost_entries, stats.authors_gone) == (0, 0, 1)


class Broken:
    """Some files can't be read, as long as they are named here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: set[str] = set()
        real = PageFiles.open

        def open_or_fail(files: PageFiles, path: Path) -> int:
            if path.name in self.names:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return real(files, path)

        monkeypatch.setattr(PageFiles, "open", open_or_fail)


def test_an_older_log_that_cant_be_read_for_some_seconds_is_read_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit, entries, broken = LogKit(world.authors, "node-1.boot", pages=4), keys_of(1, 20), Broken(monkeypatch)
    kit.blocks(entries, per_page=1)
    broken.names = {"log.00000001", "log.00000002"}
    world.followers.load()
    assert world.index.tags(kit.name) == tags_of(entries[4:]) and world.followers.stats().loaded
    assert not world.followers.caught_up(kit.name)
    world.go(4)
    broken.names.clear()
    world.go(10)
    assert world.index.tags(kit.name) == tags_of(entries) and world.followers.caught_up(kit.name)
    assert world.followers.stats().unread_logs == 0


def test_a_log_that_cant_be_read_is_given_up_at_last_also_beside_a_snapshot_that_is_damaged(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit, entries, broken = LogKit(world.authors, "node-1.boot", pages=4), keys_of(1, 20), Broken(monkeypatch)
    kit.blocks(entries, per_page=1)
    (kit.directory / snapshot_name(3)).write_bytes(os.urandom(PAGE_BYTES))
    broken.names = {"log.00000001"}
    world.followers.load()
    world.go(120)
    assert world.index.tags(kit.name) == tags_of(np.concatenate([entries[2:]]))
    assert world.followers.stats().unread_logs == 1 and world.followers.caught_up(kit.name)
