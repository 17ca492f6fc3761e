"""Following the logs of others: everything is found, whoever comes, goes, dies or is damaged."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvmoverd.adapters.storage.owners import start_ticks
from kvmoverd.adapters.storage.segments.followers import Followers
from kvmoverd.adapters.storage.segments.leases import Life
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.core.store.log_pages import Kind
from kvmoverd.core.store.places import PAGE_BYTES, log_name
from tests.unit.segment_kit import FINGERPRINT, Clock, LogKit, PlainIndex, keys_of, tags_of

SETTINGS = SegmentSettings(poll_s=0.2, heartbeat_s=5.0, dead_s=60.0)
OWN = "node-0.own"


class World:
    """A root with its authors, and one node that follows them."""

    def __init__(self, authors: Path, index: PlainIndex | None = None) -> None:
        self.authors, self.clock, self.index = authors, Clock(), index or PlainIndex()
        (authors / OWN).mkdir()
        self.namespaces: list[bytes] = []
        self.followers = Followers(
            authors,
            self.index,
            own=lambda: OWN,
            machine="here",
            settings=SETTINGS,
            now_ns=self.clock,
            on_namespace=self.namespaces.append,
        )

    def kit(self, name: str = "node-1.boot", pages: int = 64) -> LogKit:
        return LogKit(self.authors, name, pages=pages)

    def go(self, seconds: float, step_s: float = 0.2) -> None:
        """Time goes by, and the keeper does its job."""
        for _ in range(max(1, round(seconds / step_s))):
            self.clock.go(step_s)
            for _ in range(1000):
                if not self.followers.step():
                    break


def open_logs(kit: LogKit) -> list[str]:
    """Logs of this author that this process has open."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(Path(os.readlink(f"/proc/self/fd/{fd}")))
    return sorted(path.name for path in found if path.parent == kit.directory and path.name.startswith("log."))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.followers.close()


def test_what_was_written_before_the_start_is_found(world: World) -> None:
    kit, entries = world.kit(pages=8), keys_of(1, 1000)
    kit.blocks(entries, per_page=10)
    world.followers.load()
    assert world.index.tags(kit.name) == tags_of(entries)
    stats = world.followers.stats()
    assert stats.loaded and stats.entries == stats.load_entries == 1000 and stats.damaged_pages == 0
    assert world.namespaces == [FINGERPRINT[:16]]


def test_a_new_block_of_a_peer_is_seen_within_a_second_also_after_long_silence(world: World) -> None:
    kit, entries = world.kit(), keys_of(1, 20)
    world.followers.load()
    kit.blocks(entries[:10])
    world.go(0.2)
    assert world.index.tags(kit.name) == tags_of(entries[:10])
    for beat in range(60):
        kit.beat(beat)
        world.go(5.0)
    kit.blocks(entries[10:])
    world.go(0.8)
    assert world.index.tags(kit.name) == tags_of(entries)


def test_a_new_author_is_found_with_the_next_scan(world: World) -> None:
    world.followers.load()
    kit, entries = world.kit(), keys_of(1, 10)
    kit.blocks(entries)
    world.go(1.2)
    assert world.index.tags(kit.name) == tags_of(entries)


def test_a_new_author_of_whom_a_peer_speaks_is_found_at_once(world: World) -> None:
    world.followers.load()
    kit, entries = world.kit(), keys_of(1, 10)
    kit.blocks(entries)
    world.followers.heard(kit.name, 1)
    world.followers.step()
    assert world.index.tags(kit.name) == tags_of(entries)


@pytest.mark.parametrize("name", ["node-9.gone", "../node-1.boot", "", "x" * 300, ".trash", OWN])
def test_words_about_authors_that_are_not_there_change_nothing(world: World, name: str) -> None:
    world.kit()
    world.followers.load()
    world.followers.heard(name, 1)
    world.go(1.0)
    assert world.followers.known() == ["node-1.boot"]


def test_too_many_words_of_peers_are_forgotten(world: World) -> None:
    for number in range(100_000):
        world.followers.heard(f"node-1.boot-{number}", 1)
    world.followers.step()
    assert world.followers.stats().heard == 1024


def test_former_starts_of_this_node_come_first_and_of_others_the_newest_logs(world: World) -> None:
    other, mine = world.kit("a-node.boot", pages=4), world.kit("node-0.former", pages=4)
    for kit in (other, mine):
        for segment in range(1, 25):
            kit.blocks(keys_of(segment, 2), segment=segment, per_page=1)
    world.followers.load()
    # The newest three logs of each are followed: what comes before them is the backlog.
    backlog = [name for name in world.index.order if name[1] <= 18]
    assert {name for name, _ in backlog[:18]} == {"node-0.former"}
    assert [number for name, number in backlog if name == "a-node.boot"] == list(range(18, 0, -1))
    assert len(backlog) == 36


def test_dropped_segments_stay_dropped_in_whatever_order_the_logs_are_read(world: World) -> None:
    kit = world.kit(pages=4)
    kit.blocks(keys_of(1, 5), segment=1)
    kit.blocks(keys_of(2, 5), segment=2)
    for segment in range(3, 20):
        kit.blocks(keys_of(segment, 1), segment=segment)
    kit.tombstone([1])
    world.followers.load()
    assert world.index.tags(kit.name, 1) == set() and world.index.tags(kit.name, 2) == tags_of(keys_of(2, 5))
    assert world.followers.dropped(kit.name, 1) and not world.followers.dropped(kit.name, 2)


def test_an_adopter_speaks_for_the_dead_in_whatever_order_both_are_met(world: World) -> None:
    adopter = world.kit("a-adopter.boot")
    adopter.tombstone([1], owner="node-1.dead")
    adopter.blocks(keys_of(3, 4), segment=3, owner="node-1.dead")
    world.followers.load()
    assert world.followers.stats().pending_entries == 4
    dead = world.kit("node-1.dead")
    dead.blocks(keys_of(1, 5), segment=1)
    dead.blocks(keys_of(2, 5), segment=2)
    world.go(1.2)
    found = [world.index.tags("node-1.dead", segment) for segment in (1, 2, 3)]
    assert found == [set(), tags_of(keys_of(2, 5)), tags_of(keys_of(3, 4))]
    assert world.followers.stats().pending_entries == 0


def test_an_author_whose_directory_is_gone_is_forgotten_whole(world: World) -> None:
    kit = world.kit()
    kit.blocks(keys_of(1, 5))
    world.followers.load()
    shutil.rmtree(kit.directory)
    world.go(1.2)
    assert world.followers.known() == [] and world.index.tags(kit.name) == set()
    assert world.followers.stats().authors_gone == 1


def test_a_root_that_shows_nothing_makes_nobody_gone(world: World) -> None:
    kit = world.kit()
    kit.blocks(keys_of(1, 5))
    world.followers.load()
    world.authors.rename(world.authors.parent / "elsewhere")
    world.go(3.0)
    assert world.followers.stats().scan_failures >= 2
    world.authors.mkdir()
    world.go(3.0)
    assert world.index.tags(kit.name) == tags_of(keys_of(1, 5)) and world.followers.known() == [kit.name]
    world.authors.rmdir()
    (world.authors.parent / "elsewhere").rename(world.authors)


def test_rubbish_between_the_authors_is_passed_over_and_counted(world: World) -> None:
    (world.authors / "README").write_text("hello")
    (world.authors / "no-dot").mkdir()
    (world.authors / ".hidden.x").mkdir()
    (world.authors / "a\nb.c").mkdir()
    (world.authors / "link.boot").symlink_to("/")
    kit = world.kit()
    world.followers.load()
    assert world.followers.known() == [kit.name] and world.followers.stats().ignored_names == 5


def test_rubbish_in_an_authors_directory_is_passed_over(world: World) -> None:
    kit, entries = world.kit(), keys_of(1, 10)
    for name in ("log.tmp", "log.", "log.-1", "log.٣", "snap.x", "lease.old"):
        (kit.directory / name).write_bytes(os.urandom(100))
    (kit.directory / "lease").write_bytes(os.urandom(PAGE_BYTES))
    kit.blocks(entries)
    world.followers.load()
    assert world.index.tags(kit.name) == tags_of(entries)


def test_a_directory_that_can_not_be_read_is_tried_again_and_holds_up_nobody(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, kit = world.kit("a-secret.boot"), world.kit()
    secret.blocks(keys_of(1, 5))
    kit.blocks(keys_of(2, 5))
    listdir = os.listdir

    def refusing(path: Path) -> list[str]:
        if path == secret.directory:
            raise PermissionError(13, "Permission denied", str(path))
        return listdir(path)

    # Root may read everything: so the refusal is made here.
    monkeypatch.setattr(os, "listdir", refusing)
    world.followers.load()
    assert world.index.tags(kit.name) == tags_of(keys_of(2, 5))
    assert world.followers.stats().unreadable_authors == 1 and world.index.tags(secret.name) == set()
    monkeypatch.setattr(os, "listdir", listdir)
    world.go(6.0)
    assert world.index.tags(secret.name) == tags_of(keys_of(1, 5))
    assert world.followers.stats().unreadable_authors == 0


def test_a_log_that_vanishes_between_two_others_loses_only_its_own_blocks(world: World) -> None:
    kit, entries = world.kit(pages=4), keys_of(1, 20)
    kit.blocks(entries, per_page=1)
    kit.log_path(2).unlink()
    world.followers.load()
    assert world.index.tags(kit.name) == tags_of(np.concatenate([entries[:2], entries[4:]]))
    assert world.followers.stats().loaded


def test_a_namespace_that_was_left_out_is_read_again_when_it_is_wanted(world: World) -> None:
    kit, entries = world.kit(pages=4), keys_of(1, 20)
    world.index.left_out.add(FINGERPRINT[:16])
    kit.blocks(entries, per_page=1)
    world.followers.load()
    assert world.index.tags(kit.name) == set() and world.followers.stats().skipped_entries == 20
    world.index.left_out.clear()
    world.followers.wanted(FINGERPRINT[:16])
    world.go(0.2)
    assert world.index.tags(kit.name) == tags_of(entries)
    assert world.followers.stats().damaged_pages == 0


def test_a_heartbeat_that_stands_still_for_a_minute_is_a_death_and_one_that_goes_on_is_not(world: World) -> None:
    still, beating, bare = world.kit("still.boot"), world.kit("beating.boot"), world.kit("bare.boot")
    still.beat(1)
    for beat in range(14):
        beating.beat(beat)
        world.go(5.0)
        lives = [world.followers.life(kit.name) for kit in (still, beating, bare)]
        if beat == 10:
            assert lives == [Life.LIVE, Life.LIVE, Life.LIVE]
    assert lives == [Life.DEAD, Life.LIVE, Life.DEAD]
    still.beat(2)
    world.go(5.0)
    assert world.followers.life(still.name) is Life.LIVE


def test_whoever_writes_blocks_is_alive_though_his_lease_stands_still(world: World) -> None:
    kit = world.kit()
    kit.beat(1)
    for number in range(20):
        kit.blocks(keys_of(number, 1))
        world.go(5.0)
    assert world.followers.life(kit.name) is Life.LIVE


def test_a_standstill_of_this_node_makes_nobody_dead(world: World) -> None:
    kit = world.kit()
    kit.beat(1)
    world.followers.load()
    world.clock.go(3600)
    world.go(5.0)
    assert world.followers.life(kit.name) is Life.LIVE


def test_a_process_of_this_machine_that_is_not_there_is_dead_at_once(world: World) -> None:
    kit, elsewhere = world.kit("node-0.former"), world.kit("node-1.boot")
    kit.beat(1, machine="here", pid=os.getpid(), start_ticks=1)
    elsewhere.beat(1, machine="there", pid=os.getpid(), start_ticks=1)
    world.followers.load()
    assert world.followers.life(kit.name) is Life.DEAD and world.followers.life(elsewhere.name) is Life.LIVE


def test_whoever_says_that_he_has_ended_is_believed(world: World) -> None:
    kit = world.kit()
    kit.beat(7, ended=True)
    world.followers.load()
    assert world.followers.life(kit.name) is Life.ENDED


def test_the_log_of_a_dead_author_is_open_only_while_it_is_read_and_one_who_revives_is_heard(world: World) -> None:
    kit, entries = world.kit(), keys_of(1, 30)
    kit.beat(1, machine="here", pid=os.getpid(), start_ticks=start_ticks(os.getpid()) or 0)
    kit.blocks(entries[:10])
    world.followers.load()
    world.go(1)
    assert open_logs(kit) == [log_name(1)]
    kit.beat(2, machine="here", pid=os.getpid(), start_ticks=1)
    world.go(8)
    assert world.followers.life(kit.name) is Life.DEAD and open_logs(kit) == []
    kit.blocks(entries[10:20])
    world.go(3)
    assert world.index.tags(kit.name) == tags_of(entries[:20]) and open_logs(kit) == []
    kit.beat(3, machine="here", pid=os.getpid(), start_ticks=start_ticks(os.getpid()) or 0)
    kit.blocks(entries[20:])
    world.go(6)
    assert world.index.tags(kit.name) == tags_of(entries) and open_logs(kit) == [log_name(1)]


def test_the_blocks_of_the_dead_stay_and_what_lies_behind_damage_is_found_at_last(world: World) -> None:
    kit, entries = world.kit(pages=600), keys_of(1, 500)
    kit.blocks(entries, per_page=1)
    kit.raw(11, bytes(300 * PAGE_BYTES))
    world.followers.load()
    assert world.index.tags(kit.name) == tags_of(entries[:10])
    world.followers.finish(kit.name)
    assert world.index.tags(kit.name) == tags_of(np.concatenate([entries[:10], entries[310:]]))
    assert world.followers.stats().damaged_pages == 300


def test_the_wall_clock_decides_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    kit = world.kit()
    kit.beat(1)
    os.utime(kit.directory / "lease", (1, 1))
    monkeypatch.setattr(time, "time", lambda: -1e9)
    monkeypatch.setattr(time, "time_ns", lambda: -(10**18))
    world.go(50.0)
    assert world.followers.life(kit.name) is Life.LIVE


@pytest.mark.parametrize("first", ["node-2.zz", "node-0.aa"])
def test_what_anybody_found_damaged_is_not_found_in_whatever_order_the_logs_are_read(world: World, first: str) -> None:
    writer, other = LogKit(world.authors, "node-1.boot"), LogKit(world.authors, first)
    entries = keys_of(7, 10)
    writer.blocks(entries)
    other.blocks(entries[3:5], owner=writer.name, kind=Kind.BAD)
    world.followers.load()
    assert world.index.tags(writer.name) == tags_of(entries) - tags_of(entries[3:5])
    assert world.followers.stats().bad_blocks == 2
    other.blocks(entries[9:], owner=writer.name, kind=Kind.BAD)
    world.go(1.0)
    assert len(world.index.tags(writer.name)) == 7
