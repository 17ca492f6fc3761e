"""Recovery: what the dead wrote and did not live to say is found, checked whole, and said by whoever adopted it."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvmoverd.adapters.storage.segments.followers import Followers
from kvmoverd.adapters.storage.segments.page_files import PageFiles
from kvmoverd.adapters.storage.segments.recovery import Recovery, pages_about
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.adapters.storage.segments.tail_scan import EMPTY_MAX
from kvmoverd.core.store.log_pages import author16, decode_page, encode_page
from kvmoverd.core.store.places import PAGE_BYTES, log_name
from kvmoverd.core.store.segment_header import SegmentHeader
from tests.unit.segment_kit import RECORD_PAGES, SEGMENT_BYTES, Clock, LogKit, PlainIndex, keys_of, tags_of

OWN = "node-0.own"
DEAD = "node-1.dead"


class PlainCount:
    """Counts what it was asked to look at."""

    def __init__(self) -> None:
        self.looked: list[str] = []
        self.broken: set[str] = set()
        self.pauses = 0

    def look(self, author: str, is_active: Callable[[str, int], bool]) -> Iterator[None]:
        for _ in range(self.pauses):
            yield
        if author in self.broken:
            raise PermissionError(errno.EACCES, "Permission denied", f"{author}/seg")
        if author not in self.looked:
            self.looked.append(author)
        assert is_active(OWN, 1) and not is_active(DEAD, 1)


class World:
    """A dead author with segments, and the recovery of whoever adopts him."""

    def __init__(self, authors: Path) -> None:
        (authors / OWN).mkdir()
        self.kit, self.clock, self.index, self.count = LogKit(authors, DEAD), Clock(), PlainIndex(), PlainCount()
        self.said: list[tuple[str, SegmentHeader, npt.NDArray[np.void], int]] = []
        self.buried: list[tuple[str, list[int]]] = []
        self.fail_publish = 0
        self.surprise = False
        settings = SegmentSettings()
        self.followers = Followers(
            authors, self.index, own=lambda: OWN, machine="here", settings=settings, now_ns=self.clock
        )
        self.recovery = Recovery(
            authors,
            self.followers,
            own=lambda: OWN,
            machine="here",
            settings=settings,
            accountable=lambda: [OWN, DEAD],
            counted=self.count,
            publish=self.publish,
            bury=lambda author, numbers: self.buried.append((author, list(numbers))),
            on_found=self.found,
            now_ns=self.clock,
        )

    def publish(self, author: str, segment: SegmentHeader, entries: npt.NDArray[np.void], time_s: int) -> None:
        if self.surprise:
            self.surprise = False
            raise RuntimeError("nobody has thought of this")
        if self.fail_publish:
            self.fail_publish -= 1
            raise OSError(28, "No space left on device")
        self.said.append((author, segment, entries, time_s))

    def found(self, author: str, segment: SegmentHeader, entries: npt.NDArray[np.void]) -> None:
        segment_id = self.index.add_segment(
            author,
            segment.number,
            fingerprint16=segment.fingerprint[:16],
            generation=segment.generation,
            purge=segment.purge,
            record_pages=segment.record_pages,
        )
        self.index.add_blocks(segment_id, entries)

    def segment(self, number: int, written: range, said: range) -> npt.NDArray[np.void]:
        """A segment with some records written and some of them said to be there; gives entries of all places."""
        header = self.kit.make_segment(number)
        entries = keys_of(number, header.records)
        for index in written:
            self.kit.record(number, index, entries[index])
        self.kit.blocks(entries[said.start : said.stop], segment=number)
        return entries

    def recover(self) -> None:
        self.followers.load()
        self.recovery.adopted(DEAD)
        for _ in range(10_000):
            if not self.recovery.step() and not self.recovery.stats().waiting:
                return
            self.clock.go(1)
        raise AssertionError("the scan never came to an end")

    @property
    def said_tags(self) -> list[set[bytes]]:
        return [tags_of(entries) for _, _, entries, _ in self.said]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.followers.close()


def test_records_that_no_log_speaks_of_are_found_and_said(world: World) -> None:
    entries = world.segment(1, range(30), range(20))
    world.recover()
    assert world.said_tags == [tags_of(entries[20:30])]
    author, segment, found, time_s = world.said[0]
    assert (author, segment.number, time_s) == (DEAD, 1, 0)
    assert found["key"].tobytes() == entries[20:30]["key"].tobytes()
    for field in ("page", "depth", "parent"):
        assert found[field].tolist() == entries[20:30][field].tolist()
    assert world.index.tags(DEAD) == tags_of(entries[:30])
    assert world.recovery.owned() == [OWN, DEAD] and world.recovery.stats().scan.found == 10


def test_what_is_said_of_the_dead_can_be_written_as_pages(world: World) -> None:
    entries = world.segment(7, range(80), range(0))
    world.recover()
    pages = pages_about(*world.said[0])
    assert [len(page.entries) for page in pages if page.entries is not None] == [62, 18]
    back = decode_page(encode_page(pages[0]), 0, 0)
    assert back is not None and back.owner16 == author16(DEAD) and back.entries is not None
    assert (back.segment, back.generation, back.record_pages) == (7, 107, RECORD_PAGES)
    assert back.entries["key"].tobytes() == entries[:62]["key"].tobytes()


def test_holes_in_the_middle_are_filled_and_a_whole_segment_is_not_looked_at(world: World) -> None:
    entries = world.segment(1, range(40), range(10))
    world.kit.blocks(entries[20:40], segment=1)
    records = world.kit.make_segment(2).records
    world.kit.blocks(keys_of(2, records), segment=2)
    world.recover()
    assert world.said_tags == [tags_of(entries[10:20])]
    assert world.recovery.stats().scan.headers == 10 + 85 - 40


@pytest.mark.parametrize(
    ("at_page", "at_byte"), [(0, 9), (0, 60), (0, 300), (0, 4000), (1, 0), (1, 2047), (2, 0), (2, PAGE_BYTES - 101)]
)
def test_a_record_with_any_byte_damaged_does_not_count(world: World, at_page: int, at_byte: int) -> None:
    entries = world.segment(1, range(3), range(0))
    with open(world.kit.segment_path(1), "r+b") as file:
        at = (1 + RECORD_PAGES + at_page) * PAGE_BYTES + at_byte
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x40]))
    world.recover()
    assert world.said_tags == [tags_of(entries[[0, 2]])]
    assert world.recovery.stats().scan.torn == (at_page > 0)


def test_a_record_of_another_generation_or_namespace_does_not_count(world: World) -> None:
    header = world.kit.make_segment(1)
    entries = keys_of(1, header.records)
    world.kit.record(1, 0, entries[0], generation=header.generation + 1)
    world.kit.record(1, 1, entries[1], fingerprint=b"another-namespace-of-32-bytes--!")
    world.kit.record(1, 2, entries[2])
    world.recover()
    assert world.said_tags == [tags_of(entries[2:3])]


def test_a_gap_shorter_than_the_limit_is_crossed_and_a_longer_one_is_not(world: World) -> None:
    # 85 records fit: the last of them lies behind a gap of 63, or of 64.
    for number, first in ((1, EMPTY_MAX - 1), (2, EMPTY_MAX)):
        header = world.kit.make_segment(number)
        world.kit.record(number, first, keys_of(number, header.records)[first])
    world.recover()
    assert [segment.number for _, segment, _, _ in world.said] == [1]
    assert world.recovery.stats().scan.headers < header.records * 2


def test_who_is_dead_is_said_again_by_the_adopter_and_of_whom_nothing_is_left_too(world: World) -> None:
    for number in (1, 2, 3, 4):
        world.segment(number, range(2), range(2))
    first = LogKit(world.kit.authors, "node-2.first")
    first.tombstone([1, 9], owner=DEAD)
    world.kit.tombstone([2])
    world.kit.segment_path(3).unlink()
    world.recover()
    assert world.buried == [(DEAD, [1, 2, 3])] and world.said == []


def test_dead_segments_and_those_that_are_not_his_are_not_scanned(world: World) -> None:
    world.segment(1, range(5), range(0))
    world.kit.tombstone([1])
    world.segment(2, range(5), range(0))
    world.kit.segment_path(2).rename(world.kit.segment_path(3))
    world.kit.segment_path(4).write_bytes(os.urandom(PAGE_BYTES))
    world.kit.segment_path(5).write_bytes(b"")
    (world.kit.directory / "seg" / "rubbish").write_bytes(b"x")
    world.recover()
    assert world.said == [] and world.recovery.stats().scan.bad_segments == 3
    assert world.recovery.stats().scanned_authors == 1


def test_a_segment_that_ends_too_early_gives_what_it_has(world: World) -> None:
    entries = world.segment(1, range(5), range(0))
    os.truncate(world.kit.segment_path(1), (1 + 3 * RECORD_PAGES + 1) * PAGE_BYTES)
    world.recover()
    assert world.said_tags == [tags_of(entries[:3])]


def test_a_whole_lost_log_is_found_again_from_the_segments(world: World) -> None:
    entries = world.segment(1, range(85), range(85))
    for log in (1, 2):
        world.kit.log_path(log).unlink()
    world.recover()
    assert world.said_tags == [tags_of(entries)] and world.index.tags(DEAD) == tags_of(entries)
    assert world.recovery.stats().scan.read_bytes == 85 * ((RECORD_PAGES - 1) * PAGE_BYTES - 100)


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


class SlowClock:
    """Goes on by 10 ms whenever it is looked at."""

    def __init__(self) -> None:
        self.now_ns = 10**15

    def __call__(self) -> int:
        self.now_ns += 10_000_000
        return self.now_ns


assert SEGMENT_BYTES // PAGE_BYTES // RECORD_PAGES == 85
