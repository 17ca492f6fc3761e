"""Touch logs over real files: what one author writes, and what the owner of the segments learns of it."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from kvmoverd.adapters.storage.block_io import BlockIo, choose_io
from kvmoverd.adapters.storage.segments.touch_log import (
    OWN_S,
    PIN_LEASE_S,
    READ_BYTES,
    SILENCE_S,
    UNKNOWN_S,
    TouchFollower,
    TouchLog,
    TouchTeller,
    TouchWatch,
)
from kvmoverd.adapters.storage.segments.touches import Touches
from kvmoverd.core.store.places import PAGE_BYTES, touch_name
from kvmoverd.core.store.touch_pages import TOUCH, USED, author_tag, runs

SECOND_NS = 10**9
OURS, THEIRS = "a.1", "b.1"


class Clock:
    def __init__(self) -> None:
        self.ns = SECOND_NS

    def __call__(self) -> int:
        return self.ns

    def pass_s(self, seconds: float) -> None:
        self.ns += round(seconds * SECOND_NS)


class Name(NamedTuple):
    author: str
    number: int


class Names:
    """Dense ids in the order of asking, as each node has its own."""

    def __init__(self, *known: tuple[str, int]) -> None:
        self.known = [Name(*name) for name in known]

    def segment(self, segment_id: int) -> Name | None:
        return self.known[segment_id] if segment_id < len(self.known) else None

    def segment_id(self, author: str, number: int) -> int | None:
        return self.known.index((author, number)) if (author, number) in self.known else None


class Two:
    """The owner of segments, and another node that uses them; their ids of the same segments differ."""

    def __init__(self, root: Path, pages: int = 64) -> None:
        self.clock = Clock()
        self.live = {THEIRS}
        self.owned = [OURS]
        self.io = choose_io(str(root / "trial"), direct=True)
        for author in (OURS, THEIRS):
            (root / author).mkdir(exist_ok=True)
        self.ours, self.theirs = Touches(now_ns=self.clock), Touches(now_ns=self.clock)
        self.our_names = Names((OURS, 0), (OURS, 1), (THEIRS, 0))
        self.their_names = Names((THEIRS, 0), (OURS, 1), (OURS, 0))
        self.log = TouchLog(root / THEIRS, self.io, pages=pages)
        self.teller = TouchTeller(
            lambda: self.log, self.theirs, self.their_names, owned=lambda: [THEIRS], now_ns=self.clock
        )
        self.watch = TouchWatch(
            root,
            self.io,
            self.ours,
            self.our_names,
            owned=lambda: self.owned,
            live=lambda: self.live,
            now_ns=self.clock,
        )

    def exchange(self) -> None:
        self.teller.step()
        while self.watch.step():
            pass


@pytest.fixture
def two(tmp_path: Path) -> Two:
    return Two(tmp_path)


def u32(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint32)


def test_what_another_node_used_of_ours_counts_here(two: Two) -> None:
    two.theirs.touch(u32(1, 1, 0, 2), u32(3, 4, 9, 0))
    two.theirs.touch(u32(1), u32(4))
    two.exchange()
    assert two.ours.heat(1, 6).tolist() == [0, 0, 0, 1, 2, 0] and two.ours.heat(0, 1).tolist() == [1]
    assert not two.ours.heat(2).size, "what they use of their own is theirs to know"
    assert two.watch.heard_records == 3
    two.exchange()
    assert two.ours.heat(1, 6).sum() == 3, "nothing is counted twice"


def test_who_adopts_segments_learns_what_was_used_of_them_before(two: Two) -> None:
    two.theirs.touch(u32(1, 0), u32(2, 6))
    two.theirs.touch(u32(0), u32(6))
    two.exchange()
    assert not two.ours.heat(2).size, "what they used of their own is told later"
    two.clock.pass_s(OWN_S)
    two.exchange()
    two.clock.pass_s(SILENCE_S)
    assert not two.ours.heat(2).size, "and is nothing to us"
    two.live.clear()
    two.owned.append(THEIRS)
    two.exchange()
    assert two.ours.heat(2, 8).tolist() == [0] * 6 + [2, 0]
    assert two.ours.heat(1, 3).tolist() == [0, 0, 2], "what he said of ours counts once more, which does no harm"


def test_what_the_living_said_of_a_dead_authors_segments_is_read_when_he_is_adopted(tmp_path: Path) -> None:
    two = Two(tmp_path)
    two.our_names.known.append(Name("dead.1", 0))
    two.their_names.known.append(Name("dead.1", 0))
    two.theirs.touch(u32(3), u32(5))
    two.exchange()
    assert not two.ours.heat(3).size
    two.owned.append("dead.1")
    two.exchange()
    assert two.ours.heat(3, 6).tolist() == [0] * 5 + [1]
    two.exchange()
    assert two.ours.heat(3, 6).sum() == 1


def test_a_pin_of_another_node_holds_here_and_ends_when_it_is_taken_back(two: Two) -> None:
    two.theirs.pin(u32(1, 1), u32(3, 4), 600.0)
    two.exchange()
    assert two.ours.pinned(1) == 2
    two.theirs.pin(u32(1), u32(3), 0)
    two.exchange()
    assert two.ours.pinned(1) == 1


def test_a_pin_is_repeated_while_it_holds_and_ends_with_the_node_that_made_it(two: Two) -> None:
    two.theirs.pin(u32(1), u32(3), 600.0)
    for _ in range(20):
        two.exchange()
        two.clock.pass_s(20)
        assert two.ours.pinned(1) == 1
    two.clock.pass_s(PIN_LEASE_S)
    assert two.ours.pinned(1) == 0, "a node that hangs does not repeat it"
    two.exchange()
    assert two.ours.pinned(1) == 1
    two.live.clear()
    two.watch.step()
    assert two.ours.pinned(1) == 0


def test_a_node_that_uses_nothing_says_so_and_one_that_is_silent_is_unknown(two: Two) -> None:
    two.watch.step()
    for _ in range(5):
        two.clock.pass_s(SILENCE_S)
        two.exchange()
        assert not two.watch.unknown()
    two.clock.pass_s(UNKNOWN_S + 1)
    two.watch.step()
    assert two.watch.unknown() == {THEIRS: pytest.approx(UNKNOWN_S + 1)}
    two.exchange()
    assert not two.watch.unknown()
    two.clock.pass_s(UNKNOWN_S + 1)
    two.live.clear()
    two.watch.step()
    assert not two.watch.unknown(), "the dead use nothing"


def test_a_live_node_without_any_touch_log_becomes_unknown(two: Two) -> None:
    two.live.add("c.1")
    two.watch.step()
    two.clock.pass_s(UNKNOWN_S + 1)
    two.exchange()
    assert list(two.watch.unknown()) == ["c.1"]


def test_logs_go_on_in_the_next_file_and_old_ones_go(tmp_path: Path) -> None:
    two = Two(tmp_path, pages=4)
    for step in range(50):
        two.theirs.touch(u32(1), u32(step))
        two.exchange()
    assert two.ours.heat(1, 50).tolist() == [1] * 50
    names = sorted(name for name in os.listdir(tmp_path / THEIRS))
    assert names == [touch_name(11), touch_name(12)]
    assert all((tmp_path / THEIRS / name).stat().st_size == 4 * PAGE_BYTES for name in names)


def test_a_reader_that_comes_late_takes_what_is_left(tmp_path: Path) -> None:
    two = Two(tmp_path, pages=4)
    for step in range(18):
        two.theirs.touch(u32(1), u32(step))
        two.teller.step()
    two.exchange()
    heat = two.ours.heat(1, 18).tolist()
    assert heat == [0] * 12 + [1] * 6


def test_many_touches_take_many_pages_and_files_at_once(tmp_path: Path) -> None:
    two = Two(tmp_path, pages=8)
    records = np.arange(0, 8_000, 2, dtype=np.uint32)
    two.theirs.touch(np.ones(len(records), np.uint32), records)
    two.exchange()
    # 4,000 runs are 24 pages: three files, of which two are kept.
    assert np.count_nonzero(two.ours.heat(1, 8_000)) == 4_000 - 8 * 168


def test_a_torn_page_with_a_good_one_behind_is_skipped(tmp_path: Path) -> None:
    io = choose_io(str(tmp_path / "trial"), direct=True)
    log = TouchLog(tmp_path, io, pages=8)
    follower = TouchFollower(tmp_path, io, mmap.mmap(-1, READ_BYTES))
    assert follower.poll() is None
    for record in range(3):
        log.append(runs(author_tag(OURS), 1, u32(record), u32(1), kind=USED))
    with open(tmp_path / touch_name(0), "r+b") as file:
        file.seek(PAGE_BYTES + 100)
        file.write(b"torn")
    pages = follower.poll()
    assert pages is not None and [int(page["record"][0]) for page in pages] == [0, 2]
    assert follower.bad_pages == 1 and follower.poll() is None
    log.append(np.empty(0, TOUCH))
    pages = follower.poll()
    assert pages is not None and [len(page) for page in pages] == [0]


def test_a_bad_last_page_does_not_hide_the_next_log(tmp_path: Path) -> None:
    io = BlockIo(direct=False)
    log = TouchLog(tmp_path, io, pages=2)
    follower = TouchFollower(tmp_path, io, mmap.mmap(-1, READ_BYTES))
    for record in range(2):
        log.append(runs(author_tag(OURS), 1, u32(record), u32(1), kind=USED))
    with open(tmp_path / touch_name(0), "r+b") as file:
        file.seek(PAGE_BYTES)
        file.write(bytes(PAGE_BYTES))
    assert follower.poll() is not None and follower.poll() is None
    log.append(runs(author_tag(OURS), 1, u32(7), u32(1), kind=USED))
    pages = None
    for _ in range(2):
        pages = pages or follower.poll()
    assert pages is not None and int(pages[0]["record"][0]) == 7


def test_a_page_whose_write_fails_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two = Two(tmp_path)
    two.theirs.touch(u32(1), u32(0))

    def fail(*_: object) -> int:
        raise OSError(5, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        with pytest.raises(OSError, match="broken"):
            two.teller.step()
    two.theirs.touch(u32(1), u32(1))
    two.exchange()
    assert two.ours.heat(1, 2).tolist() == [0, 1], "a touch is lost, and the next one comes"
