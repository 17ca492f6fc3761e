"""The writer of index logs: pages in order, logs one after the other, tombstones even on a full disk."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from segment_writer_kit import RecordingIo

from kvmoverd.adapters.storage.segments.author import Author
from kvmoverd.adapters.storage.segments.log_writer import FILL_PAGES, SPARE_PAGES, LogWriter
from kvmoverd.core.store.log_pages import SEGMENTS_MAX, Kind, LogPage, author16, decode_page
from kvmoverd.core.store.places import PAGE_BYTES, log_name

PAGES = 4
"""Two beside head and seal."""


class Rig:
    def __init__(self, home: Path, pages: int = PAGES) -> None:
        self.io = RecordingIo()
        self.author = Author(home, node="node-0", boot_id="1", io=self.io, dead_s=60.0)
        self.log = LogWriter(self.author, self.io, pages=pages)
        self.sealed: list[int] = []
        self.log.on_seal = self.sealed.append

    def pages(self, log: int) -> list[LogPage | None]:
        raw = (self.author.directory / log_name(log)).read_bytes()
        return [decode_page(raw[at : at + PAGE_BYTES], log, at // PAGE_BYTES) for at in range(0, len(raw), PAGE_BYTES)]

    def kinds(self, log: int) -> list[Kind | None]:
        return [page and page.kind for page in self.pages(log)]

    def taken_pages(self, log: int) -> int:
        return (self.author.directory / log_name(log)).stat().st_blocks * 512 // PAGE_BYTES

    def logs(self) -> list[str]:
        return sorted(path.name for path in self.author.directory.glob("log.*"))

    def fail(self, call: str, name: str, code: int = errno.EIO, *, at: int | None = None) -> None:
        def before(its_call: str, its_name: str, offset_bytes: int) -> None:
            if (its_call, its_name) == (call, name) and at in (None, offset_bytes):
                raise OSError(code, "made to fail")

        self.io.before = before

    def heal(self) -> None:
        self.io.before = lambda call, name, offset_bytes: None


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def tombstones(rig: Rig, count: int, first: int = 1) -> None:
    for number in range(first, first + count):
        rig.log.tombstone([number])


def test_two_whole_logs_are_there_at_the_start_and_the_names_are_durable(rig: Rig) -> None:
    assert rig.logs() == [log_name(1), log_name(2)]
    assert rig.kinds(1) == [Kind.HEAD, None, None, None] == rig.kinds(2)
    assert {(rig.author.directory / name).stat().st_size for name in rig.logs()} == {PAGES * PAGE_BYTES}
    made = rig.io.names("create", "sync_whole", "sync_names")
    at = made.index(f"create {log_name(1)}")
    assert made[at : at + 3] == [
        f"create {log_name(1)}",
        f"sync_whole {log_name(1)}",
        f"sync_names {rig.author.name}",
    ]


def test_a_full_log_is_sealed_and_the_one_after_the_next_is_made(rig: Rig) -> None:
    tombstones(rig, 2)
    assert rig.logs() == [log_name(1), log_name(2)] and rig.sealed == []
    tombstones(rig, 1, first=3)
    assert rig.kinds(1) == [Kind.HEAD, Kind.TOMBSTONE, Kind.TOMBSTONE, Kind.SEAL]
    assert rig.kinds(2) == [Kind.HEAD, Kind.TOMBSTONE, None, None]
    assert rig.logs() == [log_name(1), log_name(2), log_name(3)]
    assert (rig.sealed, rig.log.number, rig.author.log) == ([1], 2, 3)


def test_one_call_may_reach_over_the_end_of_a_log(rig: Rig) -> None:
    failures = rig.log.publish([LogPage(Kind.TOMBSTONE, 0, 0, segments=(number,)) for number in range(5)])
    assert failures == [None] * 5 and rig.sealed == [1, 2]
    said = [page.segments for log in (1, 2, 3) for page in rig.pages(log) if page and page.kind is Kind.TOMBSTONE]
    assert said == [(number,) for number in range(5)]


def test_a_log_is_sealed_only_when_its_pages_are_durable(rig: Rig) -> None:
    rig.io.calls.clear()
    rig.log.publish([LogPage(Kind.TOMBSTONE, 0, 0, segments=(number,)) for number in range(3)])
    calls = [(call, name) for call, name, _ in rig.io.calls if name in (log_name(1), log_name(2))]
    assert calls == [
        ("write", log_name(1)),
        ("write", log_name(1)),
        ("write", log_name(1)),
        ("sync", log_name(1)),
        ("write", log_name(2)),
        ("sync", log_name(2)),
    ]


def test_a_page_that_fails_is_skipped_and_the_others_of_the_call_are_durable(rig: Rig) -> None:
    rig.fail("write", log_name(1), at=PAGE_BYTES)
    failures = rig.log.publish([LogPage(Kind.TOMBSTONE, 0, 0, segments=(number,)) for number in (1, 2)])
    assert [failure is None for failure in failures] == [False, True]
    assert rig.kinds(1) == [Kind.HEAD, None, Kind.TOMBSTONE, None]


def test_a_failed_sync_fails_every_page_of_the_call(rig: Rig) -> None:
    rig.fail("sync", log_name(1))
    assert None not in rig.log.publish([LogPage(Kind.TOMBSTONE, 0, 0, segments=(1,))] * 2)
    rig.heal()
    with pytest.raises(OSError, match="closed"):
        rig.log.close() or tombstones(rig, 1)


def test_a_failed_sync_before_a_seal_fails_the_pages_that_it_was_for(rig: Rig) -> None:
    rig.fail("sync", log_name(1))
    failures = rig.log.publish([LogPage(Kind.TOMBSTONE, 0, 0, segments=(number,)) for number in range(4)])
    assert [failure is None for failure in failures] == [False, False, False, True]
    assert rig.log.number == 2


def test_a_full_disk_still_takes_what_the_present_and_the_next_log_hold(rig: Rig) -> None:
    rig.fail("create", log_name(3), errno.ENOSPC)
    tombstones(rig, 4)
    assert rig.log.number == 2 and rig.logs() == [log_name(1), log_name(2)]
    with pytest.raises(OSError, match="made to fail") as full:
        rig.log.tombstone([9])
    assert full.value.errno == errno.ENOSPC and rig.kinds(2)[-1] is None
    rig.heal()
    tombstones(rig, 1, first=5)
    assert rig.kinds(2)[-1] is Kind.SEAL and rig.logs()[-1] == log_name(4) and rig.log.number == 3


def test_a_start_that_is_killed_leaves_little_behind_and_logs_keep_their_size(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 4096)
    size_bytes = 4096 * PAGE_BYTES
    assert [rig.taken_pages(log) for log in (1, 2)] == [2 + SPARE_PAGES] * 2
    tombstones(rig, 2)
    assert rig.taken_pages(1) == 2 + SPARE_PAGES + FILL_PAGES and rig.taken_pages(2) == 2 + SPARE_PAGES
    tombstones(rig, FILL_PAGES, first=3)
    assert rig.taken_pages(1) == 2 + SPARE_PAGES + 2 * FILL_PAGES
    assert {(rig.author.directory / name).stat().st_size for name in rig.logs()} == {size_bytes}


def test_a_full_disk_takes_as_many_pages_as_there_is_room_for_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 4096)
    rig.fail("write", log_name(1), errno.ENOSPC, at=(2 + SPARE_PAGES) * PAGE_BYTES)
    tombstones(rig, SPARE_PAGES)
    for _ in range(3):
        with pytest.raises(OSError, match="made to fail"):
            rig.log.tombstone([99])
    rig.heal()
    tombstones(rig, 2, first=1 + SPARE_PAGES)
    said = [page.segments for page in rig.pages(1) if page and page.kind is Kind.TOMBSTONE]
    assert said == [(number,) for number in range(1, 3 + SPARE_PAGES)]


def test_a_log_that_a_full_disk_has_no_room_for_to_its_end_is_sealed_when_there_is_room(tmp_path: Path) -> None:
    pages = 3 + SPARE_PAGES
    rig = Rig(tmp_path, pages)
    rig.fail("write", log_name(1), errno.ENOSPC, at=(pages - 1) * PAGE_BYTES)
    tombstones(rig, SPARE_PAGES)
    with pytest.raises(OSError, match="made to fail"):
        rig.log.tombstone([99])
    assert rig.log.number == 1
    rig.heal()
    tombstones(rig, 2, first=1 + SPARE_PAGES)
    assert rig.kinds(1) == [Kind.HEAD, *[Kind.TOMBSTONE] * (1 + SPARE_PAGES), Kind.SEAL] and rig.log.number == 2


def test_a_device_that_refuses_the_room_for_pages_is_asked_for_each_page_alone(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 4096)
    rig.fail("write", log_name(1), errno.EIO, at=(2 + SPARE_PAGES) * PAGE_BYTES)
    tombstones(rig, 1 + SPARE_PAGES)
    with pytest.raises(OSError, match="made to fail"):
        rig.log.tombstone([99])
    tombstones(rig, 1, first=100)
    said = [page.segments for page in rig.pages(1) if page and page.kind is Kind.TOMBSTONE]
    assert said[-1] == (100,) and len(said) == 2 + SPARE_PAGES


def test_a_log_that_could_not_be_made_leaves_no_file(rig: Rig) -> None:
    rig.fail("sync_whole", log_name(3), errno.ENOSPC)
    tombstones(rig, 3)
    assert rig.logs() == [log_name(1), log_name(2)]
    rig.heal()
    tombstones(rig, 1)
    assert rig.logs() == [log_name(1), log_name(2), log_name(3)]


def test_many_tombstones_take_several_pages_and_one_sync(rig: Rig) -> None:
    rig.io.calls.clear()
    rig.log.tombstone(range(SEGMENTS_MAX + 1), "node-9.1")
    first, second = (page for page in rig.pages(1) if page and page.kind is Kind.TOMBSTONE)
    assert (len(first.segments), second.segments) == (SEGMENTS_MAX, (SEGMENTS_MAX,))
    assert first.owner16 == author16("node-9.1") == second.owner16
    assert rig.io.names("sync") == [f"sync {log_name(1)}"]


def test_ones_own_name_as_owner_is_written_as_nobodys(rig: Rig) -> None:
    rig.log.tombstone([1], rig.author.name)
    page = rig.pages(1)[1]
    assert page is not None and page.owner16 == bytes(16)
