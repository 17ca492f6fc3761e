"""An author: his directory, his heartbeat, and when he looks whether he still is one."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from segment_writer_kit import RecordingIo

from kvmoverd.adapters.storage.segments.author import Author, Fenced, machine_name
from kvmoverd.adapters.storage.segments.log_writer import LogWriter
from kvmoverd.adapters.storage.segments.writes_io import WriteIo
from kvmoverd.core.errors import StorageUnusable
from kvmoverd.core.store.lease_page import Lease, decode_lease
from kvmoverd.core.store.log_pages import Kind, LogPage

DEAD_S = 60.0


class Clock:
    def __init__(self) -> None:
        self.now_ns = 10**12

    def __call__(self) -> int:
        return self.now_ns


class Watched(Author):
    io: RecordingIo


def author(home: Path, clock: Clock | None = None, *, node: str = "node-0", boot_id: str = "0123abcd") -> Watched:
    io = RecordingIo()
    made = Watched(home, node=node, boot_id=boot_id, io=io, dead_s=DEAD_S, now_ns=clock or Clock())
    made.io = io
    return made


def lease(made: Author) -> Lease:
    found = decode_lease((made.directory / "lease").read_bytes())
    assert found is not None
    return found


def test_a_directory_that_is_there_is_never_taken_again(tmp_path: Path) -> None:
    names = [author(tmp_path).name for _ in range(3)]
    assert names == ["node-0.0123abcd", "node-0.0123abcd-1", "node-0.0123abcd-2"]


def test_a_successor_has_the_next_name(tmp_path: Path) -> None:
    first = author(tmp_path)
    assert first.successor().successor().name == "node-0.0123abcd-2"


@pytest.mark.parametrize("node", ["", "../evil", ".hidden", "a/b", "n" * 300, "with space"])
def test_a_name_that_is_no_plain_directory_name_is_refused(tmp_path: Path, node: str) -> None:
    with pytest.raises(StorageUnusable, match="is no name"):
        author(tmp_path, node=node)
    assert list(tmp_path.iterdir()) == []


def test_each_heartbeat_is_another_and_says_who_lives_and_how_far_he_is(tmp_path: Path) -> None:
    made = author(tmp_path)
    first = lease(made)
    assert (first.pid, first.machine, first.ended) == (os.getpid(), machine_name(), False)
    made.log, number = 7, made.next_segment()
    made.heartbeat()
    second = lease(made)
    assert (second.beat, second.log, second.segment) == (first.beat + 1, 7, number)


def test_an_end_is_told_once_and_nothing_is_written_after_it(tmp_path: Path) -> None:
    made = author(tmp_path)
    made.end()
    last = lease(made)
    assert last.ended
    made.end()
    assert lease(made) == last


def test_a_claim_is_seen_by_every_heartbeat_and_the_lease_is_left_as_it_was(tmp_path: Path) -> None:
    made = author(tmp_path)
    before = lease(made)
    (made.directory / "adopt.1").touch()
    with pytest.raises(Fenced):
        made.heartbeat()
    made.end()
    assert lease(made) == before


def test_a_directory_that_is_gone_was_claimed_and_he_goes_on_under_another_name(tmp_path: Path) -> None:
    made = author(tmp_path)
    shutil.rmtree(made.directory)
    with pytest.raises(Fenced):
        made.heartbeat()
    with pytest.raises(Fenced):
        made.check()
    successor = made.successor()
    successor.heartbeat()
    assert successor.name == f"{made.name}-1"


def test_a_claim_is_looked_for_before_publishing_only_when_heartbeats_are_late(tmp_path: Path) -> None:
    clock = Clock()
    made = author(tmp_path, clock)
    (made.directory / "adopt.1").touch()
    clock.now_ns += int(DEAD_S / 2 * 1e9)
    made.check()
    clock.now_ns += 1
    with pytest.raises(Fenced):
        made.check()


def test_a_heartbeat_that_could_not_be_written_does_not_count(tmp_path: Path) -> None:
    clock = Clock()
    made = author(tmp_path, clock)
    clock.now_ns += int(DEAD_S / 2 * 1e9) + 1

    def before(call: str, name: str, offset_bytes: int) -> None:
        raise OSError(errno.EIO, "made to fail")

    made.io.before = before
    with pytest.raises(OSError, match="made to fail"):
        made.heartbeat()
    made.check()
    (made.directory / "adopt.1").touch()
    with pytest.raises(Fenced):
        made.check()


def test_who_was_fenced_once_is_fenced_for_good(tmp_path: Path) -> None:
    made = author(tmp_path)
    (made.directory / "adopt.1").touch()
    with pytest.raises(Fenced):
        made.heartbeat()
    (made.directory / "adopt.1").unlink()
    with pytest.raises(Fenced):
        made.check()


def test_no_heartbeat_follows_the_end(tmp_path: Path) -> None:
    made = author(tmp_path)
    made.end()
    made.heartbeat()
    assert lease(made).beat == 2 and lease(made).ended


def test_a_late_author_whom_nobody_took_over_goes_on(tmp_path: Path) -> None:
    clock = Clock()
    made = author(tmp_path, clock)
    clock.now_ns += int(10 * DEAD_S * 1e9)
    made.check()
    made.heartbeat()
    assert lease(made).beat == 2


def test_modes_do_not_depend_on_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o777)
    try:
        made = author(tmp_path)
    finally:
        os.umask(before)
    modes = {
        path.name: path.stat().st_mode & 0o777 for path in (made.directory, made.segments, made.directory / "lease")
    }
    assert modes == {made.name: 0o750, "seg": 0o750, "lease": 0o640}


def test_an_author_without_room_leaves_nothing_behind_and_begins_when_there_is(tmp_path: Path) -> None:
    class FullIo(WriteIo):
        full = True

        def create(self, path: Path, size_bytes: int) -> int:
            if self.full:
                raise OSError(errno.ENOSPC, "no room")
            return super().create(path, size_bytes)

    io = FullIo(direct=False)
    with pytest.raises(OSError, match="no room"):
        Author(tmp_path, node="node", boot_id="1", io=io, dead_s=60.0)
    assert list(tmp_path.iterdir()) == []
    waiting = Author(tmp_path, node="node", boot_id="1", io=io, dead_s=60.0, born=False)
    assert (waiting.name, waiting.born, list(tmp_path.iterdir())) == ("node.1", False, [])
    for refused in (waiting.heartbeat, waiting.check):
        with pytest.raises(Fenced):
            refused()
    assert [type(error) for error in LogWriter(waiting, io, pages=8).publish([LogPage(Kind.SEAL, 1, 1)])] == [OSError]
    io.full = False
    assert waiting.successor().name == "node.1"
    waiting.end()
