"""What the collector goes by: budgets, limits, what directories take, and the trash."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvmoverd.adapters.storage.block_io import BlockIo
from kvmoverd.adapters.storage.segments.budgets import Budgets, Taken, of_limits
from kvmoverd.adapters.storage.segments.purges import Identity
from kvmoverd.adapters.storage.segments.settings import Limit, SegmentSettings
from kvmoverd.adapters.storage.segments.usage import LOOK_AT_ONCE, Room, Usage, room_of
from kvmoverd.adapters.storage.trash import Trash
from kvmoverd.core.store.eviction import SegmentUse
from kvmoverd.core.store.places import PAGE_BYTES, segment_name
from kvmoverd.core.store.segment_header import SegmentHeader, encode_segment

GIB = 1 << 30
HUGE = Room(1 << 60, 1 << 60, 0, 0)


def settings(**fields: object) -> SegmentSettings:
    return SegmentSettings(high=0.9, low=0.8, **fields)  # type: ignore[arg-type]


def test_without_budgets_only_the_filesystem_counts() -> None:
    budgets = Budgets(settings())
    assert not budgets.excess(Taken(10**15, 10**9), HUGE, unknown=False)
    assert budgets.used == 0.0
    full = Room(100 * GIB, 5 * GIB, 0, 0)
    assert budgets.excess(Taken(95 * GIB, 1), full, unknown=False).size_bytes == 15 * GIB
    assert budgets.used == 0.95


def test_what_is_leaving_already_need_not_go_again() -> None:
    budgets = Budgets(settings(bytes_max=100 * GIB, inodes_max=1_000))
    assert budgets.excess(Taken(91 * GIB, 950), HUGE, unknown=False).size_bytes == 11 * GIB
    left = budgets.excess(Taken(91 * GIB, 950, leaving_bytes=8 * GIB, leaving_inodes=200), HUGE, unknown=False)
    assert (left.size_bytes, left.inodes) == (3 * GIB, 0)


def test_each_node_gives_as_much_of_a_full_filesystem_as_it_has() -> None:
    room = Room(1_000 * GIB, 50 * GIB, 1_000_000, 20_000)
    excess = Budgets(settings()).excess(Taken(95 * GIB, 98_000), room, unknown=False)
    assert excess.size_bytes == pytest.approx(15 * GIB, rel=0.01)
    assert excess.inodes == pytest.approx(18_000, rel=0.01)


def test_while_use_is_unknown_only_what_is_beyond_95_percent_goes_down_to_the_high_mark() -> None:
    budgets = Budgets(settings(bytes_max=100 * GIB))
    assert not budgets.excess(Taken(94 * GIB, 1), HUGE, unknown=True)
    assert budgets.excess(Taken(96 * GIB, 1), HUGE, unknown=True).size_bytes == 6 * GIB
    assert budgets.excess(Taken(96 * GIB, 1), HUGE, unknown=False).size_bytes == 16 * GIB


def test_a_copy_is_asked_without_a_trace() -> None:
    budgets = Budgets(settings(bytes_max=100))
    assert budgets.copy().excess(Taken(95, 1), HUGE, unknown=False)
    assert not budgets.excess(Taken(85, 1), HUGE, unknown=False)


def test_the_first_limit_that_matches_counts() -> None:
    budgets = Budgets(settings(limits=(Limit("acme", "big", 10), Limit("acme", "", 20), Limit("", "big", 30))))
    whose = {
        b"0": Identity("acme", "big"),
        b"1": Identity("acme", "x"),
        b"2": Identity("z", "big"),
        b"3": Identity("z", "x"),
    }
    uses = [SegmentUse("a.1", number, str(number).encode(), 1, np.zeros(1, np.uint8), 0.0) for number in range(5)]
    found = [[use.number for use in some] for _, _, some in of_limits(budgets.limits, uses, whose.get)]
    assert found == [[0], [1], [2]]


class Author:
    """A directory with segments."""

    def __init__(self, root: Path, name: str = "a.1") -> None:
        self.name, self.directory = name, root / name
        (self.directory / "seg").mkdir(parents=True)
        (self.directory / "log.00000001").write_bytes(b"x" * 8 * PAGE_BYTES)

    def segment(self, number: int, pages: int = 4) -> Path:
        path = self.directory / "seg" / segment_name(number)
        header = SegmentHeader(b"f" * 32, self.name, number, 7, 0, 3, 1, pages * PAGE_BYTES, 1)
        path.write_bytes(encode_segment(header) + os.urandom((pages - 1) * PAGE_BYTES))
        return path


def idle(author: str, number: int) -> bool:
    return False


def test_bytes_and_inodes_are_those_of_the_blocks_on_disk(tmp_path: Path) -> None:
    author = Author(tmp_path)
    author.segment(1)
    with open(author.segment(2), "r+b") as file:
        file.truncate(1 << 30)
    usage = Usage(tmp_path, BlockIo(direct=False))
    usage.refresh(["a.1", "gone.1"], idle)
    directories = sum(os.stat(path).st_blocks for path in (author.directory / "seg",)) * 512
    assert usage.totals() == (16 * PAGE_BYTES + directories, 2 + 3), "holes take nothing"
    assert usage.of_author("a.1") == 2 and usage.of_author("gone.1") == 0
    usage.refresh([], idle)
    assert usage.totals() == (0, 0)


def test_a_segment_that_grows_is_measured_until_it_is_done(tmp_path: Path) -> None:
    author = Author(tmp_path)
    path = author.segment(1)
    usage = Usage(tmp_path, BlockIo(direct=False))
    active = {1}

    def is_active(author: str, number: int) -> bool:
        return number in active

    for _ in range(2):
        usage.refresh(["a.1"], is_active)
        with open(path, "ab") as file:
            file.write(os.urandom(4 * PAGE_BYTES))
    (segment,) = usage.segments()
    assert segment.size_bytes == 8 * PAGE_BYTES
    active.clear()
    usage.refresh(["a.1"], is_active)
    assert segment.size_bytes == 12 * PAGE_BYTES and segment.settled
    path.write_bytes(b"")
    usage.refresh(["a.1"], is_active)
    assert segment.size_bytes == 12 * PAGE_BYTES, "what is done is not looked at again"


def test_a_look_at_many_segments_pauses_and_gives_the_same_segments_as_another_meanwhile(tmp_path: Path) -> None:
    author = Author(tmp_path)
    for number in range(1, 2 * LOOK_AT_ONCE + 2):
        author.segment(number)
    usage = Usage(tmp_path, BlockIo(direct=False))
    look = usage.look("a.1", idle)
    next(look)
    assert usage.segments() == [], "half a look is none"
    usage.refresh(["a.1"], idle)
    found = usage.segments()
    assert len(list(look)) == 1 and usage.segments() == found
    again = usage.look("a.1", idle)
    next(again)
    usage.gone(found[7])
    assert len(list(again)) == 1 and usage.segments() == found[:7] + found[8:]


def test_an_author_who_cant_be_looked_at_keeps_no_other_from_it(tmp_path: Path) -> None:
    (tmp_path / "a.1").write_bytes(b"no directory")
    Author(tmp_path, "b.1").segment(1)
    usage = Usage(tmp_path, BlockIo(direct=False))
    with pytest.raises(NotADirectoryError):
        usage.refresh(["a.1", "b.1"], idle)
    assert usage.of_author("b.1") == 1


def test_what_was_dropped_stays_dropped(tmp_path: Path) -> None:
    author = Author(tmp_path)
    author.segment(1)
    usage = Usage(tmp_path, BlockIo(direct=False))
    usage.refresh(["a.1"], idle)
    (segment,) = usage.segments()
    os.unlink(segment.path)
    usage.gone(segment)
    assert usage.find("a.1", 1) is None
    usage.refresh(["a.1"], idle)
    assert usage.segments() == []


def test_a_header_is_read_once_and_only_believed_when_it_is_that_segments(tmp_path: Path) -> None:
    author, other = Author(tmp_path), Author(tmp_path, "b.1")
    author.segment(1)
    os.rename(other.segment(9), author.directory / "seg" / segment_name(2))
    (author.directory / "seg" / segment_name(3)).write_bytes(b"short")
    usage = Usage(tmp_path, BlockIo(direct=False))
    usage.refresh(["a.1"], idle)
    headers = [usage.header(segment) for segment in usage.segments()]
    assert headers[0] is not None and headers[0].fingerprint == b"f" * 32 and headers[1:] == [None, None]
    os.unlink(author.directory / "seg" / segment_name(1))
    assert usage.header(usage.segments()[0]) is headers[0]


def test_the_room_is_the_filesystems(tmp_path: Path) -> None:
    room = room_of(tmp_path)
    assert 0 <= room.bytes_free <= room.bytes_total and room.bytes_used == room.bytes_total - room.bytes_free


def until(true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline_s, "not true within 10 s"
        time.sleep(0.005)


def wait_empty(trash: Trash) -> None:
    until(lambda: not any(trash.pending()))


def test_the_trash_deletes_no_faster_than_it_may(tmp_path: Path) -> None:
    (tmp_path / "trash").mkdir()
    trash = Trash(tmp_path / "trash", bytes_per_s=20 * 16 * PAGE_BYTES)
    try:
        for number in range(4):
            path = tmp_path / str(number)
            path.write_bytes(os.urandom(16 * PAGE_BYTES))
            trash.throw(path, f"{number}.seg")
            assert not path.exists()
        began_s = time.monotonic()
        wait_empty(trash)
        assert time.monotonic() - began_s > 0.1
        assert (trash.deleted_files, trash.deleted_bytes) == (4, 64 * PAGE_BYTES)
    finally:
        trash.close()


def test_the_trash_is_emptied_at_once_where_that_is_needed(tmp_path: Path) -> None:
    (tmp_path / "trash").mkdir()
    trash = Trash(tmp_path / "trash", bytes_per_s=1.0)
    try:
        for number in range(6):
            (tmp_path / str(number)).write_bytes(os.urandom(16 * PAGE_BYTES))
            trash.throw(tmp_path / str(number))
        freed_bytes = trash.empty_now(40 * PAGE_BYTES, time.monotonic() + 10)
        assert 40 * PAGE_BYTES <= freed_bytes <= 48 * PAGE_BYTES
        assert trash.empty_now(1, time.monotonic() - 1) == 0, "the time is over"
    finally:
        trash.close()


def test_what_cant_be_deleted_keeps_nothing_else_in_the_trash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, broken = os.unlink, True

    def unlink(path: str | os.PathLike[str]) -> None:
        if broken and os.fspath(path).endswith("stuck"):
            raise PermissionError(errno.EACCES, "not yours", os.fspath(path))
        real(path)

    monkeypatch.setattr(os, "unlink", unlink)
    (tmp_path / "trash/deep").mkdir(parents=True)
    for name in ("0", "1", "2", "stuck", "deep/3", "deep/stuck"):
        (tmp_path / "trash" / name).write_bytes(os.urandom(PAGE_BYTES))
    trash = Trash(tmp_path / "trash")
    try:
        until(lambda: trash.pending() == (2 * PAGE_BYTES, 2) and trash.stuck_bytes == 2 * PAGE_BYTES)
        assert trash.failures == 2 and trash.deleted_files == 4
        assert trash.empty_now(1, time.monotonic() + 10) == 0
        broken = False
        trash.throw(tmp_path / "nothing")
        until(lambda: not any((tmp_path / "trash").iterdir()) and not trash.stuck_bytes)
    finally:
        trash.close()


def test_a_trash_that_was_thrown_away_itself_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "trash").mkdir()
    trash = Trash(tmp_path / "trash")
    try:
        wait_empty(trash)
        (tmp_path / "trash").rmdir()
        (tmp_path / "file").write_bytes(b"x")
        trash.throw(tmp_path / "file")
        trash.throw(tmp_path / "nothing")
        assert not (tmp_path / "file").exists()
        wait_empty(trash)
    finally:
        trash.close()


def test_an_urgent_emptying_takes_what_others_threw_away_too(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    trash = Trash(tmp_path / "ours", bytes_per_s=1.0, around=tmp_path)
    try:
        (tmp_path / "theirs/old").write_bytes(os.urandom(PAGE_BYTES))
        assert trash.empty_now(1 << 20, time.monotonic() + 10) == PAGE_BYTES
        assert list((tmp_path / "theirs").iterdir()) == []
    finally:
        trash.close()


def test_a_trash_that_is_closed_holds_its_directory_no_longer(tmp_path: Path) -> None:
    (tmp_path / "trash").mkdir()
    for number in range(2_000):
        (tmp_path / "trash" / str(number)).touch()
    Trash(tmp_path / "trash").close()
    held = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    ]
    assert str(tmp_path / "trash") not in held
