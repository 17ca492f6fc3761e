"""`store fsck` over stores that the real code has made, and that were damaged in every way."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import time
from pathlib import Path

import pytest

from kvmoverd.adapters.storage.inspect.fsck import fsck
from kvmoverd.adapters.storage.inspect.records import RecordReader
from kvmoverd.adapters.storage.inspect.report import FsckReport
from kvmoverd.core.errors import StorageUnusable
from kvmoverd.core.layout import HEADER_BYTES
from kvmoverd.core.status import Reason
from kvmoverd.core.store.log_pages import Kind
from kvmoverd.core.store.places import PAGE_BYTES
from tests.contract.storage_kit import until
from tests.contract.tools_kit import (
    FILES,
    RECORD_BYTES,
    RECORDS,
    SEGMENTS,
    SETTINGS,
    SPACE,
    Store,
    flip,
    names_below,
    namespace,
    page_of_kind,
    same_but_leases,
    segment_path,
    store,
)

pytestmark = pytest.mark.contract
BOTH = pytest.mark.parametrize("layout", [FILES, SEGMENTS])


def made(root: Path, layout: str, count: int = 20) -> Store:
    """A store that was closed again."""
    with store(root, layout) as one:
        one.chain(count)
    return one


def is_sound(report: FsckReport, blocks: int) -> None:
    assert (report.blocks, report.bytes) == (blocks, blocks * RECORD_BYTES)
    assert report.is_fine and report.corrupt == report.repaired == report.unreadable == report.wrong_manifests == 0
    assert report.damaged_pages == report.unnamed == report.unknown_files == report.copies == 0
    assert report.missing_segments == report.bad_segments == 0 and not report.problems


@BOTH
def test_a_sound_store_is_read_whole_and_left_as_it_is(tmp_path: Path, layout: str) -> None:
    made(tmp_path, layout)
    before = names_below(tmp_path)
    report = fsck(tmp_path, threads=2)
    is_sound(report, 20)
    assert report.layout == layout and names_below(tmp_path) == before
    is_sound(fsck(tmp_path, repair=True), 20)
    assert names_below(tmp_path) == before


@BOTH
@pytest.mark.parametrize(
    ("offset_bytes", "field"),
    [
        (0, "magic"),
        (50, "header_crc32c"),
        (HEADER_BYTES + 10, "layer_crc32c[0]"),
        (HEADER_BYTES + 1010, "layer_crc32c[1]"),
        (HEADER_BYTES + 6000, "layer_crc32c[2]"),
    ],
)
def test_a_flipped_bit_in_header_or_payload_is_one_corrupt_block(
    tmp_path: Path, layout: str, offset_bytes: int, field: str
) -> None:
    with store(tmp_path, layout) as one:
        one.chain(12)
        path, at = one.path(one.keys[5])
    flip(path, at + offset_bytes)
    report = fsck(tmp_path)
    assert (report.blocks, report.corrupt, report.repaired, report.is_fine) == (12, 1, 0, False)
    assert len(report.problems) == 1 and field in report.problems[0]


@BOTH
def test_what_was_repaired_is_found_no_more_and_may_be_stored_anew(tmp_path: Path, layout: str) -> None:
    with store(tmp_path, layout) as one:
        one.chain(12)
        places = [one.path(key) for key in one.keys[4:7]]
    for path, at in places:
        flip(path, at + HEADER_BYTES + 100)
    report = fsck(tmp_path, repair=True)
    assert (report.corrupt, report.repaired, report.is_fine) == (3, 3, True)
    after = fsck(tmp_path)
    assert (after.blocks, after.corrupt, after.bytes) == (9, 0, 9 * RECORD_BYTES)
    assert after.known_bad == (3 if layout == SEGMENTS else 0)
    with store(tmp_path, layout) as again:
        again.blocks.open_namespace(SPACE)
        loaded(again)
        ends = [again.read(key) for key in one.keys]
        assert ends == [Reason.OK] * 4 + [Reason.MISS] * 3 + [Reason.OK] * 5
        again.write(one.keys[5])
        assert again.read(one.keys[5]) is Reason.OK
    assert fsck(tmp_path).blocks == 10


def loaded(one: Store) -> None:
    """Waits until all logs were read once."""
    if one.layout == SEGMENTS:
        until(lambda: one.blocks.background.followers.stats().loaded)  # type: ignore[union-attr]


def test_a_running_node_hears_of_what_was_found_damaged(tmp_path: Path) -> None:
    with store(tmp_path, SEGMENTS) as one, store(tmp_path, SEGMENTS, node="other") as other:
        one.chain(4)
        other.blocks.open_namespace(SPACE)
        path, at = one.path(one.keys[2])
        flip(path, at + HEADER_BYTES)
        assert fsck(tmp_path, repair=True).repaired == 1
        for node in (one, other):
            until(lambda node=node: node.blocks.index.known(SPACE, one.keys).tolist() == [True, True, False, True])
        one.write(one.keys[2])
        assert one.read(one.keys[2]) is Reason.OK


def test_a_live_author_is_not_disturbed(tmp_path: Path) -> None:
    with store(tmp_path, SEGMENTS) as one:
        one.chain(10)
        before = names_below(tmp_path)
        is_sound(fsck(tmp_path), 10)
        is_sound(fsck(tmp_path, repair=True), 10)
        assert same_but_leases(before, names_below(tmp_path))
        one.chain(10)
        assert [one.read(key) for key in one.keys] == [Reason.OK] * 20


def test_blocks_of_two_nodes_and_of_two_namespaces_are_counted_once_each(tmp_path: Path) -> None:
    with store(tmp_path, SEGMENTS) as one, store(tmp_path, SEGMENTS, node="other") as other:
        keys = one.chain(5)
        other.blocks.open_namespace(SPACE)
        until(lambda: other.blocks.index.known(SPACE, keys).all())
        for key in keys[:3]:
            other.blocks.index.mark_bad(SPACE.fingerprint[:16], key, one.place(key), for_s=None)
            other.write(key)
        other.chain(4, namespace("another"))
        report = fsck(tmp_path)
    assert (report.blocks, report.copies, report.bytes) == (9, 3, 12 * RECORD_BYTES)


def test_a_damaged_page_of_a_log_is_counted_and_its_blocks_are_found_again(tmp_path: Path) -> None:
    one = made(tmp_path, SEGMENTS)
    log = tmp_path / "kvm1/authors" / one.author / "log.00000001"
    flip(log, page_of_kind(log, Kind.BLOCKS) + 200)
    report = fsck(tmp_path)
    assert report.damaged_pages == 1 and 0 < report.unnamed == 20 - report.blocks and report.published == 0
    again = fsck(tmp_path, repair=True)
    assert again.published == report.unnamed
    after = fsck(tmp_path)
    assert (after.blocks, after.unnamed, after.damaged_pages, after.corrupt) == (20, 0, 1, 0)


def test_records_that_no_log_names_are_not_touched_while_their_author_lives(tmp_path: Path) -> None:
    with store(tmp_path, SEGMENTS) as one:
        one.chain(10)
        log = tmp_path / "kvm1/authors" / one.author / "log.00000001"
        flip(log, page_of_kind(log, Kind.BLOCKS) + 200)
        report = fsck(tmp_path, repair=True)
        assert (report.damaged_pages, report.unnamed, report.published) == (1, 0, 0)


def test_a_segment_that_was_cut_loses_what_lies_behind_and_nothing_else(tmp_path: Path) -> None:
    with store(tmp_path, SEGMENTS) as one:
        one.chain(20)
        place = one.place(one.keys[3])
        behind = [
            key for key in one.keys if one.place(key).segment == place.segment and one.place(key).page >= place.page
        ]
    os.truncate(segment_path(tmp_path, place), place.offset_bytes + 100)
    report = fsck(tmp_path, repair=True)
    assert (report.blocks, report.corrupt, report.repaired) == (20, len(behind), len(behind))
    assert fsck(tmp_path).blocks == 20 - len(behind)


def test_a_missing_segment_loses_its_blocks(tmp_path: Path) -> None:
    with store(tmp_path, SEGMENTS) as one:
        one.chain(20)
        place = one.place(one.keys[3])
        lost = sum(one.place(key).segment == place.segment for key in one.keys)
    segment_path(tmp_path, place).unlink()
    report = fsck(tmp_path)
    assert (report.missing_segments, report.corrupt, lost) == (1, lost, RECORDS)
    assert fsck(tmp_path, repair=True).repaired == lost
    after = fsck(tmp_path)
    assert (after.missing_segments, after.corrupt, after.blocks) == (0, 0, 20 - lost)


def test_a_damaged_head_of_a_segment_loses_its_blocks(tmp_path: Path) -> None:
    with store(tmp_path, SEGMENTS) as one:
        one.chain(20)
        place = one.place(one.keys[3])
    flip(segment_path(tmp_path, place), 40)
    report = fsck(tmp_path, repair=True)
    assert (report.corrupt, report.bad_segments, report.missing_segments) == (RECORDS, 1, 0)
    after = fsck(tmp_path)
    assert (after.corrupt, after.bad_segments, after.known_bad) == (0, 0, RECORDS) and not after.problems


@pytest.mark.parametrize("damage", ["gone", "head"])
def test_a_lost_segment_is_told_of_once_however_many_blocks_it_had(tmp_path: Path, damage: str) -> None:
    records = 80
    settings = dataclasses.replace(SETTINGS, segment_bytes=(1 + 3 * records) * PAGE_BYTES)
    with store(tmp_path, SEGMENTS, settings=settings) as one:
        one.chain(records)
        path = segment_path(tmp_path, one.place(one.keys[3]))
    path.unlink() if damage == "gone" else flip(path, 40)
    report = fsck(tmp_path)
    (line,) = report.problems
    assert f"/1: {records} blocks are lost: " in line and report.corrupt == records
    assert report.missing_segments + report.bad_segments == 1


def test_a_file_that_only_has_the_name_of_a_segment_is_told_of(tmp_path: Path) -> None:
    one = made(tmp_path, SEGMENTS)
    (tmp_path / "kvm1/authors" / one.author / "seg/00000099.seg").write_bytes(bytes(PAGE_BYTES))
    report = fsck(tmp_path)
    assert (report.bad_segments, report.is_fine) == (1, True)
    assert report.problems == [f"{one.author}/99: its head is damaged, and no log names a record in it"]


@BOTH
def test_names_that_are_no_part_of_a_store_are_named(tmp_path: Path, layout: str) -> None:
    one = made(tmp_path, layout)
    base = tmp_path / "kvm1"
    strange = [base / "core.1234", base / SPACE.fingerprint[:16].hex() / "notes.txt", base / ("0" * 32)]
    if layout == SEGMENTS:
        strange += [
            base / "authors/x",
            base / "authors" / one.author / "log.old",
            base / "authors" / one.author / "seg/1",
        ]
    else:
        fan = one.path(one.keys[0])[0].parent
        taken = {path.parent.parent.name for path in (one.path(key)[0] for key in one.keys)}
        strange.append(
            fan.parent.parent / next(name for name in ("00", "01", "02", *map(str, range(10, 40))) if name not in taken)
        )
        strange += [fan / "x.blk", fan / ("0" * 64 + ".blk") if fan.name != "00" else fan / "y"]
    for path in strange:
        path.write_bytes(b"x")
    report = fsck(tmp_path)
    assert (report.unknown_files, report.blocks, report.corrupt) == (len(strange), 20, 0)
    assert {line.partition(": ")[0] for line in report.problems} == {str(path) for path in strange}


@BOTH
@pytest.mark.parametrize("damage", ["flipped", "gone", "another's"])
def test_a_wrong_manifest_is_said_and_its_blocks_are_checked_all_the_same(
    tmp_path: Path, layout: str, damage: str
) -> None:
    with store(tmp_path, layout) as one:
        one.chain(6)
        path, at = one.path(one.keys[1])
    manifest = tmp_path / "kvm1" / SPACE.fingerprint[:16].hex() / "manifest.json"
    if damage == "gone":
        manifest.unlink()
    elif damage == "flipped":
        flip(manifest, 30)
    else:
        manifest.write_bytes(namespace("another").manifest.canonical())
    report = fsck(tmp_path)
    assert (report.wrong_manifests, report.blocks, report.corrupt, report.is_fine) == (1, 6, 0, False)
    flip(path, at + HEADER_BYTES + 20)
    assert fsck(tmp_path).corrupt == 1


@BOTH
def test_a_purged_namespace_is_not_read(tmp_path: Path, layout: str) -> None:
    with store(tmp_path, layout) as one:
        one.chain(6)
        one.chain(3, namespace("another"))
        one.blocks.purge(SPACE)
        report = fsck(tmp_path)
    assert (report.blocks, report.corrupt, report.missing_segments) == (3, 0, 0)


def test_over_long_and_cut_files_are_corrupt(tmp_path: Path) -> None:
    one = made(tmp_path, FILES)
    with open(one.path(one.keys[0])[0], "ab") as file:
        file.write(b"x")
    os.truncate(one.path(one.keys[1])[0], 5000)
    os.truncate(one.path(one.keys[2])[0], 0)
    shutil.copy(one.path(one.keys[4])[0], one.path(one.keys[3])[0])
    report = fsck(tmp_path, repair=True)
    assert (report.blocks, report.corrupt, report.repaired) == (20, 4, 4)
    assert len(list((tmp_path / "kvm1/.quarantine").iterdir())) == 4
    is_sound(fsck(tmp_path), 16)


def test_checks_that_repair_take_over_what_former_ones_said(tmp_path: Path) -> None:
    with store(tmp_path, SEGMENTS) as one:
        one.chain(20)
        places = [one.path(key) for key in one.keys[:4]]
    for number, (path, at) in enumerate(places):
        flip(path, at + HEADER_BYTES + 100)
        assert fsck(tmp_path, repair=True).repaired == 1
        authors = [name for name in os.listdir(tmp_path / "kvm1/authors") if name.startswith("_fsck.")]
        assert len(authors) == 1
        assert fsck(tmp_path).known_bad == number + 1
    assert os.listdir(tmp_path / "kvm1/.trash") == [one.author]
    assert fsck(tmp_path, repair=True).is_fine
    assert authors == [name for name in os.listdir(tmp_path / "kvm1/authors") if name.startswith("_fsck.")]


def test_a_record_that_the_log_names_twice_is_read_once(tmp_path: Path) -> None:
    one = made(tmp_path, SEGMENTS)
    log = tmp_path / "kvm1/authors" / one.author / "log.00000001"
    flip(log, page_of_kind(log, Kind.BLOCKS) + 200)
    assert fsck(tmp_path, repair=True).published > 0
    flip(log, page_of_kind_at(log) + 200)
    report = fsck(tmp_path)
    assert (report.blocks, report.copies, report.unnamed) == (20, 0, 0)


def page_of_kind_at(log: Path) -> int:
    """The page that was damaged before: the first that is neither the head nor a page."""
    return PAGE_BYTES


def test_daemons_leave_the_word_of_a_check_where_it_is(tmp_path: Path) -> None:
    hasty = dataclasses.replace(SETTINGS, heartbeat_s=0.05, dead_s=0.2, grace_s=0.1)
    with store(tmp_path, SEGMENTS) as one:
        one.chain(4)
        path, at = one.path(one.keys[2])
    flip(path, at + HEADER_BYTES)
    assert fsck(tmp_path, repair=True).repaired == 1
    with store(tmp_path, SEGMENTS, settings=hasty) as later:
        until(lambda: later.author in claims(tmp_path, one.author))
        time.sleep(2.5)
        (word,) = (name for name in os.listdir(tmp_path / "kvm1/authors") if name.startswith("_fsck."))
        assert claims(tmp_path, word) == ""
    report = fsck(tmp_path)
    assert (report.blocks, report.known_bad, report.corrupt) == (3, 1, 0)


def claims(root: Path, author: str) -> str:
    return "".join(path.read_text() for path in (root / "kvm1/authors" / author).glob("adopt.*"))


def test_a_node_may_be_called_fsck_and_keeps_what_it_stores(tmp_path: Path) -> None:
    for _ in range(3):
        with store(tmp_path, SEGMENTS, node="fsck") as one:
            one.chain(4)
            path, at = one.path(one.keys[0])
        flip(path, at + HEADER_BYTES)
        assert fsck(tmp_path, repair=True).repaired == 1
    report = fsck(tmp_path, repair=True)
    assert (report.blocks, report.known_bad) == (9, 3)


def test_no_node_may_have_the_name_of_checks(tmp_path: Path) -> None:
    with pytest.raises(StorageUnusable, match="_fsck"):
        Store(tmp_path, SEGMENTS, node="_fsck")


def test_what_is_called_a_check_and_has_segments_is_not_thrown_away(tmp_path: Path) -> None:
    with store(tmp_path, SEGMENTS) as one:
        one.chain(4)
        path, at = one.path(one.keys[0])
    flip(path, at + HEADER_BYTES)
    strange = tmp_path / "kvm1/authors/_fsck.0123"
    shutil.copytree(tmp_path / "kvm1/authors" / one.author, strange)
    assert fsck(tmp_path, repair=True).repaired >= 1
    assert os.listdir(strange / "seg") == os.listdir(tmp_path / "kvm1/authors" / one.author / "seg")


def test_what_a_device_refuses_to_read_is_not_said_to_be_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made(tmp_path, SEGMENTS, 4)
    real = RecordReader.read

    def refused(reader: RecordReader, fd: int, offset_bytes: int, record_bytes: int) -> memoryview:
        if record_bytes > PAGE_BYTES:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(reader, fd, offset_bytes, record_bytes)

    with monkeypatch.context() as while_broken:
        while_broken.setattr(RecordReader, "read", refused)
        report = fsck(tmp_path, repair=True)
    assert (report.unreadable, report.corrupt, report.repaired) == (4, 0, 0) and not report.is_fine
    assert os.listdir(tmp_path / "kvm1/authors") == [one.author], "nothing was said of them"
    is_sound(fsck(tmp_path), 4)
