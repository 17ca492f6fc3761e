"""Recovery: what the dead wrote and did not live to say is found, checked whole, and said by whoever adopted it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmoverd.adapters.storage.segments.recovery import pages_about
from kvmoverd.adapters.storage.segments.tail_scan import EMPTY_MAX
from kvmoverd.core.store.log_pages import author16, decode_page, encode_page
from kvmoverd.core.store.places import PAGE_BYTES
from tests.unit.recovery_kit import DEAD, OWN, World
from tests.unit.segment_kit import RECORD_PAGES, LogKit, keys_of, tags_of


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
