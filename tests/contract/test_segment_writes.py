"""The writing side over small, full and failing filesystems, through short writes, beside a killed writer."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from loop_kit import loop_filesystem
from segment_writer_kit import LAYOUT, SMALL, SPACE, WAIT_S, Rig, new_keys, payload_of, rig
from storage_kit import mounted

from kvmoverd.adapters.storage import block_io
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.adapters.storage.segments.writes_io import WriteIo, page_memory
from kvmoverd.core.layout import HEADER_BYTES
from kvmoverd.core.record import decode
from kvmoverd.core.status import Reason
from kvmoverd.core.store.log_pages import Kind
from kvmoverd.core.store.places import PAGE_BYTES, Place, segment_name

MIB = 1 << 20
LARGE = dataclasses.replace(SMALL, segment_bytes=MIB, log_pages=64)
"""It is the segments that find the disk full: a log lasts for 62 blocks that come one by one, and the next one is there."""
MANY_LOGS = dataclasses.replace(LARGE, log_pages=8)


def fill_up(made: Rig, appends_max: int) -> tuple[list[bytes], Reason]:
    """Appends until one fails: keys of those that did not, and why."""
    keys: list[bytes] = []
    for key in new_keys(appends_max):
        done = made.put(key)[0]
        if done.reason is not Reason.OK:
            return keys, done.reason
        keys.append(key)
    raise AssertionError(f"{appends_max} blocks found room")


def check_all(made: Rig, keys: list[bytes]) -> None:
    for key in keys:
        record = made.record(Place(*made.index.blocks[key]))
        assert record[HEADER_BYTES : HEADER_BYTES + LAYOUT.block_bytes] == payload_of(key)


def ext4(home: Path) -> object:
    return loop_filesystem(home / "small", 8 * MIB)


def tmpfs(home: Path) -> object:
    place = home / "small"
    place.mkdir()
    return mounted(place, "-t", "tmpfs", "-o", f"size={4 * MIB}", "none")


@pytest.mark.parametrize(("make", "direct"), [(ext4, True), (ext4, False), (tmpfs, False)])
def test_a_disk_that_fills_up_is_no_space_and_what_was_told_durable_stays(
    tmp_path: Path, make: Callable[[Path], object], direct: bool
) -> None:
    with make(tmp_path), rig(tmp_path / "small" / "authors", LARGE, direct=direct) as made:  # type: ignore[attr-defined]
        keys, reason = fill_up(made, 2000)
        assert reason is Reason.NO_SPACE and len(keys) > 100
        check_all(made, keys)
        assert set(made.logged()) >= set(keys) and made.appender.counters.full_disks >= 1


@pytest.mark.parametrize("settings", [LARGE, MANY_LOGS])
def test_room_that_is_made_is_used_by_the_append_that_asked(tmp_path: Path, settings: SegmentSettings) -> None:
    small = loop_filesystem(tmp_path / "small", 8 * MIB)
    with small, rig(tmp_path / "small" / "authors", settings, direct=True) as made:
        fill_up(made, 2000)
        asked: list[int] = []

        def make_room(bytes_wanted: int) -> bool:
            asked.append(bytes_wanted)
            (made.directory / "seg" / segment_name(1)).unlink()
            return True

        made.appender.make_room = make_room
        key = new_keys(1)[0]
        assert made.put(key)[0].reason is Reason.OK and asked == [64 * MIB]
        check_all(made, [key])


def test_a_full_disk_takes_a_tombstone(tmp_path: Path) -> None:
    settings, small = dataclasses.replace(LARGE, log_pages=512), loop_filesystem(tmp_path / "small", 8 * MIB)
    with small, rig(tmp_path / "small" / "authors", settings, direct=True) as made:
        fill_up(made, 500)
        with open(tmp_path / "small" / "rest", "ab", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(os.urandom(PAGE_BYTES)):
                os.fsync(file.fileno())
        assert os.statvfs(tmp_path / "small").f_bavail == 0
        made.appender.log.tombstone([1])
        assert [page.segments for page in made.pages() if page.kind is Kind.TOMBSTONE] == [(1,)]


def test_no_inode_for_another_segment_is_no_space(tmp_path: Path) -> None:
    few = loop_filesystem(tmp_path / "small", 8 * MIB, inodes=32)
    with few, rig(tmp_path / "small" / "authors", SMALL, direct=True) as made:
        keys, reason = fill_up(made, 500)
        assert reason is Reason.NO_SPACE and len(keys) >= 8
        check_all(made, keys)


def test_a_short_write_goes_on_from_its_last_whole_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, calls = os.pwritev, []

    def short(fd: int, buffers: list[memoryview], offset_bytes: int) -> int:
        calls.append(offset_bytes)
        return whole(fd, [buffers[0][:5000]], offset_bytes)

    with rig(tmp_path) as made:
        monkeypatch.setattr(block_io.os, "pwritev", short)
        key = new_keys(1)[0]
        assert made.put(key)[0].reason is Reason.OK
        check_all(made, [key])
        first = Place(*made.index.blocks[key]).offset_bytes
        assert [at for at in calls if at >= first][:3] == [first, first + PAGE_BYTES, first + 2 * PAGE_BYTES]
        monkeypatch.undo()


def test_a_write_that_gets_nowhere_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with rig(tmp_path) as made:
        monkeypatch.setattr(block_io.os, "pwritev", lambda fd, buffers, offset_bytes: 100)
        assert made.put(new_keys(1)[0])[0].reason is Reason.IO_ERROR
        monkeypatch.undo()


def blocks_of(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_a_segment_has_its_room_before_it_is_written_and_gives_back_the_rest(tmp_path: Path) -> None:
    with loop_filesystem(tmp_path / "small", 64 * MIB), rig(tmp_path / "small" / "authors", LARGE, direct=True) as made:
        made.put(new_keys(1)[0])
        path = made.directory / "seg" / segment_name(1)
        assert blocks_of(path) >= MIB == path.stat().st_size
        made.appender.segments.retire_all()
        assert blocks_of(path) <= 16 * PAGE_BYTES and path.stat().st_size == MIB
        check_all(made, list(made.index.blocks))


def test_a_filesystem_that_can_not_reserve_is_asked_once(tmp_path: Path) -> None:
    io = WriteIo(direct=False)
    pipe_read, pipe_write = os.pipe()
    with pytest.raises(OSError, match="seek") as refused:
        io.reserve(pipe_write, 0, PAGE_BYTES)
    assert refused.value.errno == errno.ESPIPE
    os.close(pipe_read)
    os.close(pipe_write)
    place = Path("/proc/self/coredump_filter")
    fd = os.open(place, os.O_RDWR)
    io.reserve(fd, 0, PAGE_BYTES)
    os.close(fd)
    made = io.create(tmp_path / "file", PAGE_BYTES)
    io.reserve(made, 0, PAGE_BYTES)
    assert blocks_of(tmp_path / "file") == 0
    io.write(made, page_memory(PAGE_BYTES), 0)
    io.close(made)


KILLED = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
from segment_writer_kit import Rig, new_keys
import threading
made = Rig(Path({home!r}), direct=True)
def work():
    while True:
        key, = new_keys(1)
        made.append(key)
        if made.wait(key)[0].reason.name == "OK":
            sys.stdout.write(key.hex() + "\\n")
            sys.stdout.flush()
threads = [threading.Thread(target=work) for _ in range(4)]
[thread.start() for thread in threads]
"""


@pytest.mark.parametrize("blocks", [1, 30, 100])
def test_what_a_killed_writer_was_told_durable_is_in_its_logs_and_whole(tmp_path: Path, blocks: int) -> None:
    program = KILLED.format(path=sys.path, home=str(tmp_path))
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    told = [child.stdout.readline().strip() for _ in range(blocks)]
    child.send_signal(signal.SIGKILL)
    told += [line.strip() for line in child.stdout if len(line.strip()) == 64]
    child.wait(WAIT_S)
    child.stdout.close()
    made = Rig(tmp_path)
    author = made.appender.author.name.removesuffix("-1")
    assert made.appender.author.name == f"{author}-1"
    logged = made.logged(author)
    assert {bytes.fromhex(key) for key in told if key} <= set(logged)
    pages = [page for page in made.pages(author) if page.kind is Kind.BLOCKS]
    for page in pages:
        assert page.entries is not None
        for entry in page.entries:
            record = made.record(Place(author, page.segment, int(entry["page"])))
            header = decode(record[:HEADER_BYTES])
            assert (header.key, header.generation) == (entry["key"].tobytes(), page.generation)
            assert record[HEADER_BYTES : HEADER_BYTES + LAYOUT.block_bytes] == payload_of(header.key)
    assert made.appender.close(WAIT_S)


def test_a_close_ends_in_time_with_many_writes_under_way(tmp_path: Path) -> None:
    with rig(tmp_path, direct=True) as made:
        stop, threads = threading.Event(), []

        def work() -> None:
            while not stop.is_set():
                made.append(*new_keys(1), space=SPACE)

        for _ in range(4):
            threads.append(threading.Thread(target=work))
            threads[-1].start()
        while len(made.ends) < 50:
            pass
        assert made.appender.close(WAIT_S)
        stop.set()
        for thread in threads:
            thread.join(WAIT_S)
        told = {key for key, done in made.ends if done.reason is Reason.OK}
        assert told == set(made.logged()) and len(told) >= 30
        assert {done.reason for _, done in made.ends} == {Reason.OK, Reason.SHUTTING_DOWN}
