"""Reading index logs: everything that was written once, in whatever bits it comes, and nothing that was not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvmoverd.adapters.storage.segments.log_reader import HOLE_LOOKS, LogCounters, LogReader, News
from kvmoverd.adapters.storage.segments.page_files import PageFiles
from kvmoverd.core.store.log_pages import ENTRY, Kind, LogPage, author16, encode_page
from kvmoverd.core.store.places import PAGE_BYTES
from tests.unit.segment_kit import FINGERPRINT, RECORD_PAGES, LogKit, keys_of


class Reading:
    """A reader and all that it has found so far."""

    def __init__(self, kit: LogKit, *, log: int = 1, follow: bool = True, direct: bool = True) -> None:
        self.counters = LogCounters()
        self.files = PageFiles(direct=direct)
        self.reader = LogReader(kit.directory, self.files, self.counters, log=log, follow=follow)
        self.tombstones: list[tuple[bytes, tuple[int, ...]]] = []
        self.by_segment: dict[int, npt.NDArray[np.void]] = {}

    def look(self, pages_max: int = 64) -> News:
        """One look, and more while there is more."""
        for _ in range(10_000):
            news = self.reader.read(pages_max)
            self.tombstones += news.tombstones
            for run in news.runs:
                old = self.by_segment.get(run.segment, np.zeros(0, ENTRY))
                self.by_segment[run.segment] = np.concatenate([old, run.entries])
            if not news.more:
                return news
        raise AssertionError("the reader never came to an end")

    def keys(self, segment: int = 1) -> bytes:
        """All keys of a segment, sorted by place."""
        found = self.by_segment.get(segment, np.zeros(0, ENTRY))
        return found[np.argsort(found["page"], kind="stable")]["key"].tobytes()


@pytest.fixture
def kit(tmp_path: Path) -> LogKit:
    return LogKit(tmp_path, "node-1.boot")


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def reading(kit: LogKit, request: pytest.FixtureRequest) -> Iterator[Reading]:
    reading = Reading(kit, direct=request.param)
    yield reading
    reading.reader.close()


def test_blocks_come_by_segment_with_what_their_page_says(kit: LogKit, reading: Reading) -> None:
    first, second = keys_of(1, 100), keys_of(2, 30)
    kit.blocks(first)
    kit.blocks(second, segment=2, owner="node-2.boot", purge=3)
    kit.tombstone([7, 9])
    kit.tombstone([8], owner="node-2.boot")
    news = reading.reader.read()
    runs = {run.segment: run for run in news.runs}
    assert sorted(runs) == [1, 2] and news.entries == 130 and news.pages == 6
    assert runs[1].entries.tobytes() == first.tobytes() and runs[2].entries.tobytes() == second.tobytes()
    assert (runs[1].owner16, runs[2].owner16) == (bytes(16), author16("node-2.boot"))
    assert (runs[2].generation, runs[2].purge, runs[2].record_pages) == (102, 3, RECORD_PAGES)
    assert runs[2].fingerprint16 == FINGERPRINT[:16] and runs[2].time_s == 1_700_000_000
    assert news.tombstones == [(bytes(16), (7, 9)), (author16("node-2.boot"), (8,))]


def test_what_is_written_later_is_found_later(kit: LogKit, reading: Reading) -> None:
    entries = keys_of(1, 90)
    for start in range(0, 90, 10):
        kit.blocks(entries[start : start + 10])
        reading.look(2)
        assert reading.keys() == entries[: start + 10]["key"].tobytes()


def test_seals_lead_on_to_the_next_log_however_many_there_are(tmp_path: Path) -> None:
    kit = LogKit(tmp_path, "node-1.boot", pages=5)
    reading, entries = Reading(kit), keys_of(1, 200)
    kit.blocks(entries, per_page=7)
    reading.look()
    assert reading.keys() == entries["key"].tobytes()
    assert (reading.reader.log, reading.reader.page) == (kit.log, kit.at) and kit.log > 5
    assert reading.counters.damaged_pages == reading.counters.lost_seals == 0


def test_a_page_that_is_being_written_is_not_there_yet(kit: LogKit, reading: Reading) -> None:
    entries = keys_of(1, 20)
    kit.blocks(entries[:10])
    reading.look()
    page = LogPage(Kind.BLOCKS, 1, kit.at, 1, 101, 0, RECORD_PAGES, FINGERPRINT[:16], entries=entries[10:])
    kit.raw(kit.at, encode_page(page)[:512])
    for _ in range(20):
        assert reading.look(2).pages == 0
    kit.raw(kit.at, encode_page(page))
    reading.look(2)
    assert reading.keys() == entries["key"].tobytes()
    assert reading.counters.damaged_pages == 0


def test_a_damaged_page_with_good_ones_behind_is_skipped_and_counted_once(kit: LogKit, reading: Reading) -> None:
    entries = keys_of(1, 30)
    kit.blocks(entries, per_page=10)
    kit.raw(2, os.urandom(PAGE_BYTES))
    for _ in range(HOLE_LOOKS + 2):
        reading.look()
    assert reading.keys() == np.concatenate([entries[:10], entries[20:]])["key"].tobytes()
    assert reading.counters.damaged_pages == 1


def test_a_page_that_comes_after_the_one_behind_it_is_found_all_the_same(kit: LogKit, reading: Reading) -> None:
    entries = keys_of(1, 30)
    kit.blocks(entries, per_page=10)
    with open(kit.log_path(), "rb") as file:
        file.seek(2 * PAGE_BYTES)
        late = file.read(PAGE_BYTES)
    kit.raw(2, bytes(PAGE_BYTES))
    reading.look()
    assert len(reading.by_segment[1]) == 20
    kit.raw(2, late)
    reading.look()
    assert reading.keys() == entries["key"].tobytes() and reading.counters.damaged_pages == 0


def test_damage_that_is_longer_than_a_look_is_passed_when_it_is_known_that_more_must_come(tmp_path: Path) -> None:
    kit = LogKit(tmp_path, "node-1.boot", pages=400)
    reading, entries = Reading(kit), keys_of(1, 300)
    kit.blocks(entries, per_page=1)
    kit.raw(101, bytes(150 * PAGE_BYTES))
    reading.look()
    assert len(reading.by_segment[1]) == 100
    assert reading.reader.look_beyond()
    reading.look()
    assert reading.keys() == np.concatenate([entries[:100], entries[250:]])["key"].tobytes()
    assert reading.counters.damaged_pages == 150
    assert not reading.reader.look_beyond()


def test_wide_damage_that_shows_is_passed_without_being_told(tmp_path: Path) -> None:
    kit = LogKit(tmp_path, "node-1.boot", pages=400)
    reading, entries = Reading(kit), keys_of(1, 300)
    kit.blocks(entries, per_page=1)
    kit.raw(101, os.urandom(150 * PAGE_BYTES))
    for _ in range(10):
        reading.look()
    assert len(reading.by_segment[1]) == 150 and reading.counters.damaged_pages == 150


@pytest.mark.parametrize("last", [b"", os.urandom(PAGE_BYTES)], ids=["zeros", "torn"])
def test_a_log_whose_seal_was_lost_leads_on_once_the_next_has_begun(tmp_path: Path, last: bytes) -> None:
    kit = LogKit(tmp_path, "node-1.boot", pages=6)
    reading, entries = Reading(kit), keys_of(1, 8)
    kit.blocks(entries[:4], per_page=1)
    kit.raw(kit.at, last)
    kit.seal(written=False)
    for _ in range(10):
        reading.look()
    assert reading.reader.log == 1 and len(reading.by_segment[1]) == 4
    kit.blocks(entries[4:], per_page=1)
    for _ in range(10):
        reading.look()
    assert reading.reader.log == 2 and reading.keys() == entries["key"].tobytes()
    assert reading.counters.lost_seals == 1


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
def test_what_was_written_just_before_the_next_log_was_begun_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    kit = LogKit(tmp_path, "node-1.boot", pages=6)
    reading, entries = Reading(kit, direct=direct), keys_of(1, 8)
    kit.blocks(entries[:2], per_page=1)
    reading.look()
    real = PageFiles.open

    def write_first(files: PageFiles, path: Path) -> int:
        """Between the look at this log and that at the next, its author writes what is left of it, and goes on."""
        if path == kit.log_path(2) and kit.log == 1:
            kit.blocks(entries[2:], per_page=1)
        return real(files, path)

    monkeypatch.setattr(PageFiles, "open", write_first)
    reading.look()
    reading.look()
    assert kit.log == 2 and reading.keys() == entries["key"].tobytes()
    assert reading.counters.lost_seals == 0 and reading.reader.log == 2


def test_an_old_log_is_read_to_its_end_and_not_beyond(tmp_path: Path) -> None:
    kit = LogKit(tmp_path, "node-1.boot", pages=100)
    entries = keys_of(1, 150)
    kit.blocks(entries, per_page=1)
    kit.raw(20, os.urandom(70 * PAGE_BYTES), log=1)
    reading = Reading(kit, follow=False)
    reading.look()
    assert reading.reader.log == 1
    assert reading.keys() == np.concatenate([entries[:19], entries[89:98]])["key"].tobytes()
    assert reading.counters.damaged_pages == 70


def test_a_log_that_is_not_there_says_so_and_may_come(tmp_path: Path) -> None:
    kit = LogKit(tmp_path, "node-1.boot")
    reading = Reading(kit, log=3)
    with pytest.raises(FileNotFoundError):
        reading.look()
    kit.make_log(3)
    assert reading.look().entries == 0 and reading.reader.page == 1


def test_a_log_whose_length_is_not_known_yet_is_not_passed_over(kit: LogKit, reading: Reading) -> None:
    os.truncate(kit.log_path(), 100)
    assert reading.look().pages == 0
    assert (reading.reader.log, reading.reader.page) == (1, 0)


def test_pages_of_another_log_or_place_do_not_count(kit: LogKit, reading: Reading) -> None:
    kit.blocks(keys_of(1, 5))
    kit.raw(3, kit.log_path().read_bytes()[PAGE_BYTES : 2 * PAGE_BYTES])
    kit.raw(2, encode_page(LogPage(Kind.SEAL, 9, 2)))
    reading.look()
    assert len(reading.by_segment[1]) == 5 and reading.reader.page == 2


def test_a_record_of_no_size_is_not_believed(kit: LogKit, reading: Reading) -> None:
    kit.put(Kind.BLOCKS, segment=1, record_pages=0, entries=keys_of(1, 5))
    assert reading.look().runs == [] and reading.by_segment == {}


def test_no_flipped_bit_ever_adds_or_changes_a_block(kit: LogKit) -> None:
    entries = keys_of(1, 40)
    kit.blocks(entries, per_page=10)
    known = {entry.tobytes() for entry in entries}
    rng = np.random.default_rng(5)
    whole = kit.log_path().read_bytes()
    for _ in range(100):
        at = int(rng.integers(0, 5 * PAGE_BYTES))
        bad = bytearray(whole)
        bad[at] ^= 1 << int(rng.integers(0, 8))
        kit.log_path().write_bytes(bad)
        reading = Reading(kit)
        reading.look()
        found = {entry.tobytes() for entry in reading.by_segment[1]}
        assert found <= known and len(found) >= 30
        reading.reader.close()


def test_a_fifo_in_place_of_a_log_does_not_hold_the_reader(tmp_path: Path) -> None:
    kit = LogKit(tmp_path, "node-1.boot")
    kit.log_path().unlink()
    os.mkfifo(kit.log_path())
    with pytest.raises(OSError, match="not a regular file"):
        Reading(kit).look()


@pytest.mark.parametrize("seed", range(3))
def test_pages_of_all_sizes_about_many_segments_and_owners_are_told_in_their_order(tmp_path: Path, seed: int) -> None:
    chance = np.random.default_rng(seed)
    kit = LogKit(tmp_path, "node-1.boot", pages=256)
    said: dict[tuple[bytes, int], list[int]] = {}
    for number in range(250):
        segment, owner = int(chance.integers(1, 5)), str(chance.choice(["", "node-2.boot"]))
        entries = keys_of(1000 * seed + number, int(chance.choice([0, 1, 1, 1, 7, 62])))
        if len(entries):
            kit.blocks(entries, segment=segment, owner=owner)
        else:
            kit.put(Kind.BLOCKS, segment=segment, generation=100 + segment, record_pages=RECORD_PAGES, entries=entries)
        name = (author16(owner) if owner else bytes(16), segment)
        said.setdefault(name, []).extend(entries["key"][:, 0].tolist())
    reader = LogReader(kit.directory, PageFiles(), LogCounters(), log=1)
    news = reader.read()
    reader.close()
    found: dict[tuple[bytes, int], list[int]] = {}
    for run in news.runs:
        found.setdefault((run.owner16, run.segment), []).extend(run.entries["key"][:, 0].tolist())
    assert found == said and news.entries == sum(map(len, said.values()))
