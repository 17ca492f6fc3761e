"""Damage that one node meets when it reads is told to all others, and to later starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvmoverd.adapters.storage.inspect.fsck import fsck
from kvmoverd.adapters.storage.segments.damage import CUT_SEGMENTS_MAX, TOLD_MAX, TOLD_S, DamageTeller
from kvmoverd.adapters.storage.segments.index_segments import SegmentInfo
from kvmoverd.core.layout import HEADER_BYTES
from kvmoverd.core.status import Reason
from kvmoverd.core.store.log_pages import Kind, LogPage, author16
from kvmoverd.core.store.places import Place
from tests.contract.storage_kit import until
from tests.contract.tools_kit import SEGMENTS, SPACE, flip, store

pytestmark = pytest.mark.contract


def test_what_one_node_finds_damaged_no_other_reads_again(tmp_path: Path) -> None:
    with store(tmp_path, SEGMENTS) as writer, store(tmp_path, SEGMENTS, node="reader") as reader:
        with store(tmp_path, SEGMENTS, node="third") as third:
            writer.chain(6)
            for node in (reader, third):
                node.blocks.open_namespace(SPACE)
                until(lambda node=node: node.blocks.index.known(SPACE, writer.keys).all())
            path, at = writer.path(writer.keys[2])
            flip(path, at + HEADER_BYTES + 5)
            assert reader.read(writer.keys[2]) is Reason.CORRUPT
            wanted = [True, True, False, True, True, True]
            for node in (writer, third):
                until(lambda node=node: node.blocks.index.known(SPACE, writer.keys).tolist() == wanted)
            assert third.read(writer.keys[2]) is Reason.MISS
            writer.write(writer.keys[2])
            until(lambda: third.read(writer.keys[2]) is Reason.OK)
        report = fsck(tmp_path)
        assert (report.blocks, report.corrupt, report.known_bad, report.copies) == (6, 0, 1, 0)
    with store(tmp_path, SEGMENTS) as later:
        later.blocks.open_namespace(SPACE)
        until(lambda: later.read(writer.keys[5]) is Reason.OK and later.read(writer.keys[2]) is Reason.OK)


def test_what_a_segment_has_lost_at_its_end_no_other_and_no_later_start_takes_for_stored(tmp_path: Path) -> None:
    with store(tmp_path, SEGMENTS) as writer, store(tmp_path, SEGMENTS, node="reader") as reader:
        writer.chain(6)
        reader.blocks.open_namespace(SPACE)
        until(lambda: reader.blocks.index.known(SPACE, writer.keys).all())
        path, at = writer.path(writer.keys[3])
        os.truncate(path, at + HEADER_BYTES)
        assert [reader.read(key) for key in writer.keys[3:]] == [Reason.SHORT_READ] * 3
        wanted = [True] * 3 + [False] * 3
        until(lambda: writer.blocks.index.known(SPACE, writer.keys).tolist() == wanted)
    with store(tmp_path, SEGMENTS, node="later") as later:
        later.blocks.open_namespace(SPACE)
        until(lambda: later.read(writer.keys[0]) is Reason.OK)
        until(lambda: later.blocks.index.known(SPACE, writer.keys).tolist() == wanted)


class Segments:
    """One segment of each author that is alive, and one that is dead."""

    def segment_id(self, author: str, number: int) -> int | None:
        return number

    def segment(self, segment_id: int) -> SegmentInfo | None:
        if segment_id > 2:
            return None
        return SegmentInfo("node-1.a", segment_id, b"f" * 16, 7, 0, 3, segment_id == 1, 1, 0.0)


def teller(pages: list[LogPage], own: str = "node-2.b", now: list[int] | None = None) -> DamageTeller:
    def publish(new: list[LogPage]) -> list[OSError | None]:
        pages.extend(new)
        return [None] * len(new)

    clock = now or [10**12]
    return DamageTeller(Segments(), own=lambda: own, publish=publish, now_ns=lambda: clock[0])


def test_a_page_names_the_segment_and_whose_it_is() -> None:
    pages: list[LogPage] = []
    key = os.urandom(32)
    for own in ("node-2.b", "node-1.a"):
        telling = teller(pages, own)
        telling.found(key, Place("node-1.a", 1, 4))
        telling.step()
        assert (telling.told, telling.kept) == (1, 0)
    assert [page.owner16 for page in pages] == [author16("node-1.a"), bytes(16)]
    for page in pages:
        assert (page.kind, page.segment, page.generation, page.record_pages) == (Kind.BAD, 1, 7, 3)
        assert page.entries is not None and page.entries["key"][0].tobytes() == key and page.entries["page"][0] == 4


def test_segments_that_are_dead_or_gone_are_not_spoken_of() -> None:
    pages: list[LogPage] = []
    telling = teller(pages)
    for number in (2, 3):
        telling.found(os.urandom(32), Place("node-1.a", number, 1))
    telling.step()
    assert (pages, telling.told, telling.kept) == ([], 0, 2)


def test_a_node_that_finds_everything_damaged_takes_little_from_the_others() -> None:
    pages: list[LogPage] = []
    now = [10**12]
    telling = teller(pages, now=now)
    for number in range(500):
        telling.found(os.urandom(32), Place("node-1.a", 1, 1 + 3 * number))
    telling.step()
    assert (telling.told, telling.kept) == (TOLD_MAX, 500 - TOLD_MAX)
    now[0] += round(TOLD_S * 1e9)
    telling.found(os.urandom(32), Place("node-1.a", 1, 1))
    telling.step()
    assert telling.told == TOLD_MAX + 1


def test_all_records_that_are_cut_off_are_told_of_so_many_segments_at_a_time() -> None:
    pages: list[LogPage] = []
    now, told = [10**12], 3000
    telling = teller(pages, now=now)
    for number in range(told):
        telling.found(os.urandom(32), Place("node-1.a", 1, 1 + 3 * number), cut=True)
    telling.step()
    assert (telling.told, telling.kept, len(pages)) == (told, 0, -(-told // 62))
    for number in range(2, CUT_SEGMENTS_MAX + 3):
        telling.found(os.urandom(32), Place("node-1.a", number, 1), cut=True)
    telling.step()
    # Those segments are gone: neither they nor those above the limit are told of.
    assert (telling.told, telling.kept) == (told, CUT_SEGMENTS_MAX + 1)
    now[0] += round(TOLD_S * 1e9)
    telling.found(os.urandom(32), Place("node-1.a", 1, 1), cut=True)
    telling.step()
    assert telling.told == told + 1


def test_a_log_that_can_not_be_written_is_an_error_of_the_job() -> None:
    def publish(pages: list[LogPage]) -> list[OSError | None]:
        return [OSError(28, "no space")] * len(pages)

    telling = DamageTeller(Segments(), own=lambda: "node-2.b", publish=publish)
    telling.found(os.urandom(32), Place("node-1.a", 1, 1))
    with pytest.raises(OSError, match="no space"):
        telling.step()
    telling.step()
    assert telling.told == 0
