"""Adoption: who owns the directory of a dead author, seen by several nodes with clocks of their own."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest

from kvmoverd.adapters.storage.segments.adoption import Adoption
from kvmoverd.adapters.storage.segments.claims import CLAIMS_MAX, Claim, bid, highest
from kvmoverd.adapters.storage.segments.followers import Followers
from kvmoverd.adapters.storage.segments.page_files import PageFiles
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from tests.unit.segment_kit import Clock, LogKit, PlainIndex

SETTINGS = SegmentSettings(poll_s=1.0, heartbeat_s=5.0, dead_s=60.0)
DEAD = "node-9.dead"


class Node:
    """One node's follower and adopter, with a clock of its own; it beats while it lives."""

    def __init__(self, authors: Path, name: str, *, kit: LogKit | None = None) -> None:
        self.name, self.clock, self.beats = name, Clock(), 0
        self.kit = kit or LogKit(authors, name)
        self.events: list[str] = []
        self.followers = Followers(
            authors,
            PlainIndex(),
            own=lambda: self.name,
            machine=f"machine of {name}",
            settings=SETTINGS,
            now_ns=self.clock,
        )
        self.adoption = Adoption(
            authors,
            self.followers,
            own=lambda: self.name,
            settings=SETTINGS,
            now_ns=self.clock,
            on_adopted=lambda author: self.events.append(f"adopted {author}"),
            on_lost=lambda author: self.events.append(f"lost {author}"),
        )

    def step(self, seconds: float = 5.0) -> None:
        self.beats += 1
        self.kit.beat(self.beats, machine=f"machine of {self.name}", pid=os.getpid())
        self.clock.go(seconds)
        self.followers.step()
        self.adoption.step()

    @property
    def owned(self) -> list[str]:
        return self.adoption.owned()


def together(nodes: list[Node], seconds: float) -> None:
    for _ in range(round(seconds / 5)):
        for node in nodes:
            node.step()


def claim(authors: Path, author: str = DEAD) -> Claim | None:
    return highest(authors / author, PageFiles(pages_max=1))


def test_a_dead_author_is_adopted_by_one_of_all_nodes(tmp_path: Path) -> None:
    LogKit(tmp_path, DEAD).beat(1)
    nodes = [Node(tmp_path, f"node-{number}.boot") for number in range(4)]
    together(nodes, 55)
    assert [node.owned for node in nodes] == [[], [], [], []]
    together(nodes, 60)
    owners = [node for node in nodes if node.owned]
    assert [node.owned for node in owners] == [[DEAD]]
    assert claim(tmp_path) == Claim(1, owners[0].name) and owners[0].events == [f"adopted {DEAD}"]


def test_the_living_are_never_adopted(tmp_path: Path) -> None:
    nodes = [Node(tmp_path, f"node-{number}.boot") for number in range(2)]
    together(nodes, 600)
    assert nodes[0].owned == nodes[1].owned == []


def test_a_former_start_of_this_node_is_adopted_as_soon_as_its_process_is_gone(tmp_path: Path) -> None:
    LogKit(tmp_path, "node-0.former").beat(1, machine="machine of node-0.boot", pid=1, start_ticks=12345)
    ended = LogKit(tmp_path, "node-0.ended")
    ended.beat(1, ended=True)
    node = Node(tmp_path, "node-0.boot")
    node.step()
    assert sorted(node.owned) == ["node-0.ended", "node-0.former"]


def test_another_node_on_this_machine_leaves_the_dead_to_their_own_node_for_a_while(tmp_path: Path) -> None:
    LogKit(tmp_path, "node-0.former").beat(1, machine="machine of node-1.boot", pid=1, start_ticks=12345)
    node = Node(tmp_path, "node-1.boot")
    together([node], 50)
    assert node.owned == []
    together([node], 40)
    assert node.owned == ["node-0.former"]


def test_a_claimant_that_dies_is_outbid_by_exactly_one(tmp_path: Path) -> None:
    LogKit(tmp_path, DEAD).beat(1)
    first = Node(tmp_path, "node-0.boot")
    together([first], 90)
    assert first.owned == [DEAD]
    others = [Node(tmp_path, f"node-{number}.boot") for number in (1, 2)]
    together(others, 150)
    owners = [node for node in others if DEAD in node.owned]
    assert len(owners) == 1 and claim(tmp_path) == Claim(2, owners[0].name)
    first.step()
    assert first.owned == [] and first.events[-1] == f"lost {DEAD}"


def test_what_a_former_start_had_adopted_is_taken_on_at_once(tmp_path: Path) -> None:
    dead = LogKit(tmp_path, DEAD)
    dead.beat(1)
    LogKit(tmp_path, "node-0.former").beat(9, ended=True)
    assert bid(dead.directory, 1, "node-0.former")
    node = Node(tmp_path, "node-0.boot")
    node.step()
    assert sorted(node.owned) == ["node-0.former", DEAD] and claim(tmp_path) == Claim(2, "node-0.boot")


def test_a_claim_that_says_nothing_is_void_after_a_minute(tmp_path: Path) -> None:
    dead = LogKit(tmp_path, DEAD)
    dead.beat(9, ended=True)
    (dead.directory / "adopt.1").write_bytes(b"node-3.bo")
    node = Node(tmp_path, "node-0.boot")
    together([node], 50)
    assert node.owned == []
    together([node], 60)
    assert node.owned == [DEAD] and claim(tmp_path) == Claim(2, node.name)


def test_a_claim_by_somebody_who_is_not_there_is_outbid(tmp_path: Path) -> None:
    dead = LogKit(tmp_path, DEAD)
    dead.beat(1)
    assert bid(dead.directory, 4, "node-7.gone")
    node = Node(tmp_path, "node-0.boot")
    together([node], 120)
    assert node.owned == [DEAD] and claim(tmp_path) == Claim(5, node.name)


def test_a_name_that_this_process_was_known_by_before_does_not_hold_a_claim(tmp_path: Path) -> None:
    dead = LogKit(tmp_path, DEAD)
    dead.beat(1)
    LogKit(tmp_path, "node-0.boot").beat(3)
    assert bid(dead.directory, 1, "node-0.boot")
    node = Node(tmp_path, "node-0.boot-1")
    together([node], 65)
    assert DEAD in node.owned and claim(tmp_path) == Claim(2, "node-0.boot-1")


def test_rubbish_among_the_claims_changes_nothing(tmp_path: Path) -> None:
    dead = LogKit(tmp_path, DEAD)
    dead.beat(1)
    for name in ("adopt.", "adopt.x", "adopt.-1", "adopt.0", f"adopt.{CLAIMS_MAX + 1}", "adopt.1.tmp"):
        (dead.directory / name).write_text("node-3.boot\n")
    node = Node(tmp_path, "node-0.boot")
    together([node], 90)
    assert claim(tmp_path) == Claim(1, node.name)


def test_a_directory_that_vanishes_is_not_owned_any_more(tmp_path: Path) -> None:
    dead = LogKit(tmp_path, DEAD)
    dead.beat(9, ended=True)
    node = Node(tmp_path, "node-0.boot")
    together([node], 90)
    assert node.owned == [DEAD]
    shutil.rmtree(dead.directory)
    node.step()
    node.step()
    assert node.owned == [] and node.adoption.stats().gone == 1


def test_a_claim_that_can_not_be_written_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, raw: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        bid(tmp_path, 1, "node-0.boot")
    assert os.listdir(tmp_path) == []


def test_a_full_disk_has_no_room_for_a_claim_and_a_former_start_is_ours_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for author in ("node-1.former", DEAD):
        LogKit(tmp_path, author).beat(1)
    node = Node(tmp_path, "node-1.now")

    def full(directory: Path, number: int, claimant: str) -> bool:
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as patch:
        patch.setattr("kvmoverd.adapters.storage.segments.adoption.bid", full)
        for _ in range(40):
            node.step()
        assert node.owned == ["node-1.former"] and node.events == ["adopted node-1.former"], "others are left alone"
    for _ in range(4):
        node.step()
    assert claim(tmp_path, "node-1.former") == Claim(1, "node-1.now")
    assert node.events.count("adopted node-1.former") == 2, "what could not be said is said now"
    assert not [event for event in node.events if event.startswith("lost")]


def test_a_former_start_that_another_claims_is_lost_though_there_was_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LogKit(tmp_path, "node-1.former").beat(1)
    node, other = Node(tmp_path, "node-1.now"), Node(tmp_path, "node-2.boot")

    def full(directory: Path, number: int, claimant: str) -> bool:
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as patch:
        patch.setattr("kvmoverd.adapters.storage.segments.adoption.bid", full)
        for _ in range(20):
            together([node, other], 5)
        assert node.owned == ["node-1.former"]
    assert bid(tmp_path / "node-1.former", 1, "node-2.boot")
    for _ in range(4):
        together([node, other], 5)
    assert node.owned == [] and other.owned == ["node-1.former"]


def test_of_many_that_bid_at_once_one_wins(tmp_path: Path) -> None:
    begin, won = threading.Barrier(8), []

    def race(number: int) -> None:
        begin.wait(5)
        if bid(tmp_path, 1, f"node-{number}.boot"):
            won.append(f"node-{number}.boot")

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(won) == 1 and highest(tmp_path, PageFiles(pages_max=1)) == Claim(1, won[0])


def test_the_bytes_of_former_starts_count_before_they_are_adopted(tmp_path: Path) -> None:
    LogKit(tmp_path, "node-0.former").beat(1)
    theirs, taken = LogKit(tmp_path, "node-1.boot"), LogKit(tmp_path, DEAD)
    theirs.beat(1)
    taken.beat(1)
    assert bid(taken.directory, 1, "node-0.former")
    node = Node(tmp_path, "node-0.boot")
    node.followers.step()
    assert sorted(node.adoption.accountable()) == ["node-0.boot", "node-0.former", DEAD]
