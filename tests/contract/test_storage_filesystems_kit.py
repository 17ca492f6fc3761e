"""The filesystem with faults that other tests stand on: it passes files through, and fails exactly as it is told."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuse_kit import AS_3FS, FuseMount, fuse_mount, mounts_below
from storage_kit import until

PAYLOAD = os.urandom(3 * 65536 + 17)


@pytest.fixture
def fuse(tmp_path: Path) -> Iterator[FuseMount]:
    with fuse_mount(tmp_path / "place", tmp_path / "backing") as fuse:
        yield fuse
    assert not mounts_below(tmp_path)


def direct_read(path: Path, size_bytes: int, offset: int = 0) -> int:
    """Bytes that one system call gives."""
    with mmap.mmap(-1, size_bytes) as page:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            return os.preadv(fd, [page], offset)
        finally:
            os.close(fd)


def fallocate(fd: int, size_bytes: int) -> int:
    """The errno; the C library's own makes up for what a filesystem lacks, the system call does not."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(fd, 0, ctypes.c_long(0), ctypes.c_long(size_bytes)):
        return ctypes.get_errno()
    return 0


def test_it_is_a_filesystem_like_any_other(fuse: FuseMount) -> None:
    directory = fuse.place / "a" / "b"
    directory.mkdir(parents=True)
    (directory / "one").write_bytes(PAYLOAD)
    os.link(directory / "one", directory / "two")
    os.rename(directory / "one", fuse.place / "three")
    assert (fuse.place / "three").read_bytes() == PAYLOAD == (fuse.backing / "three").read_bytes()
    assert (directory / "two").stat().st_nlink == 2
    assert sorted(os.listdir(directory)) == ["two"] and not (directory / "one").exists()
    os.truncate(directory / "two", 5)
    assert (fuse.place / "three").read_bytes() == PAYLOAD[:5]
    os.utime(directory / "two", ns=(1_000_000_007, 2_000_000_009))
    assert (directory / "two").stat().st_mtime_ns == 2_000_000_009
    os.symlink("two", directory / "link")
    assert (directory / "link").read_bytes() == PAYLOAD[:5]
    (directory / "two").chmod(0o600)
    assert (fuse.backing / "three").stat().st_mode & 0o777 == 0o600
    for name in ("two", "link"):
        (directory / name).unlink()
    directory.rmdir()
    with pytest.raises(FileExistsError):
        os.open(fuse.place / "three", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    assert os.statvfs(fuse.place).f_blocks == os.statvfs(fuse.backing).f_blocks


def test_a_directory_of_many_names_is_listed_whole(fuse: FuseMount) -> None:
    names = [f"{number:0200d}" for number in range(500)]
    for name in names:
        (fuse.backing / name).touch()
    assert sorted(os.listdir(fuse.place)) == names


def test_reads_and_writes_are_as_short_as_told_and_only_where_told(fuse: FuseMount) -> None:
    for name in ("short.blk", "whole"):
        (fuse.place / name).write_bytes(PAYLOAD)
    fuse.shorten("READ", "*.blk", 5000)
    assert direct_read(fuse.place / "short.blk", 65536) == 5000
    assert direct_read(fuse.place / "whole", 65536) == 65536
    fuse.shorten("WRITE", "*.blk", 9000)
    fd = os.open(fuse.place / "short.blk", os.O_WRONLY | os.O_DIRECT)
    assert os.pwrite(fd, b"x" * 65536, 0) == 9000
    os.close(fd)
    assert (fuse.backing / "short.blk").read_bytes() == b"x" * 9000 + PAYLOAD[9000:]


def test_errors_come_when_they_were_asked_for_and_no_longer(fuse: FuseMount) -> None:
    (fuse.place / "file").write_bytes(PAYLOAD)
    fuse.fail("READ", "file", errno.EIO, after=1, times=2)
    assert direct_read(fuse.place / "file", 4096) == 4096
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output error"):
            direct_read(fuse.place / "file", 4096)
    assert direct_read(fuse.place / "file", 4096) == 4096
    rule = fuse.fail("OPEN", number=errno.ESTALE)
    with pytest.raises(OSError, match="Stale file handle"):
        direct_read(fuse.place / "file", 4096)
    fuse.clear(rule)
    assert direct_read(fuse.place / "file", 4096) == 4096


def test_what_is_delayed_comes_late_and_holds_up_nobody(fuse: FuseMount) -> None:
    for name in ("slow", "quick"):
        (fuse.place / name).write_bytes(PAYLOAD)
    fuse.delay("READ", "slow", 0.3)
    took_s: list[float] = []

    def read_slowly() -> None:
        started_s = time.monotonic()
        direct_read(fuse.place / "slow", 4096)
        took_s.append(time.monotonic() - started_s)

    reader = threading.Thread(target=read_slowly)
    reader.start()
    direct_read(fuse.place / "quick", 4096)
    assert not took_s, "the quick read did not wait for the slow one"
    reader.join(10.0)
    assert 0.3 <= took_s[0] < 5.0


def test_what_hangs_is_served_after_all_when_it_is_resumed(fuse: FuseMount) -> None:
    (fuse.place / "file").write_bytes(PAYLOAD)
    fuse.hang("READ")
    got: list[int] = []
    reader = threading.Thread(target=lambda: got.append(direct_read(fuse.place / "file", 4096)))
    reader.start()
    until(lambda: fuse.held == 1)
    assert not got and fuse.resume() == 1
    reader.join(10.0)
    assert got == [4096]
    assert direct_read(fuse.place / "file", 4096) == 4096


def test_the_end_frees_whoever_hangs(tmp_path: Path) -> None:
    with fuse_mount(tmp_path / "place", tmp_path / "backing") as fuse:
        (fuse.place / "file").write_bytes(PAYLOAD)
        fuse.hang("OPEN")
        child = subprocess.Popen([sys.executable, "-c", f"open({str(fuse.place / 'file')!r}).read()"], stderr=-3)
        until(lambda: fuse.held == 1)
        child.kill()
        time.sleep(0.1)
        assert child.poll() is None, "a process that hangs in a filesystem can't be killed"
    child.wait(10.0)
    assert not mounts_below(tmp_path)


def test_a_server_ends_by_itself_when_its_time_is_over(tmp_path: Path) -> None:
    with fuse_mount(tmp_path / "place", tmp_path / "backing", life_s=0.3) as fuse:
        fuse.hang()
        with pytest.raises(OSError, match="connection abort"):
            os.stat(fuse.place / "file")
        until(lambda: not mounts_below(tmp_path))


@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
def test_a_power_cut_takes_what_was_not_synced_page_by_page(tmp_path: Path, keep: float) -> None:
    with fuse_mount(tmp_path / "place", tmp_path / "backing", volatile=True) as fuse:
        synced = fuse.place / "synced"
        with synced.open("wb", buffering=0) as file:
            file.write(PAYLOAD)
            os.fdatasync(file)
        with (fuse.place / "lost").open("wb", buffering=0) as file:
            file.truncate(64 * 4096)
            os.fdatasync(file)
            file.write(b"\x5a" * (64 * 4096))
        assert (fuse.place / "lost").read_bytes() == b"\x5a" * (64 * 4096), "who lives sees what was written"
        assert (fuse.backing / "lost").read_bytes() == bytes(64 * 4096)
        assert fuse.unsynced_pages == 64
        lost = fuse.power_cut(keep=keep, seed=1)
        pages = [(fuse.place / "lost").read_bytes()[at : at + 4096] for at in range(0, 64 * 4096, 4096)]
        assert synced.read_bytes() == PAYLOAD
        assert pages.count(bytes(4096)) == lost and pages.count(b"\x5a" * 4096) == 64 - lost
        assert (lost == 64, lost == 0) == (keep == 0.0, keep == 1.0)


def test_two_mounts_of_one_directory_have_caches_of_their_own(tmp_path: Path) -> None:
    backing = tmp_path / "backing"
    with (
        fuse_mount(tmp_path / "one", backing, caching=AS_3FS) as one,
        fuse_mount(tmp_path / "two", backing, caching=AS_3FS) as two,
    ):
        (one.place / "file").write_bytes(b"1")
        assert (two.place / "file").stat().st_size == 1 and not (two.place / "new").exists()
        (one.place / "file").write_bytes(b"123")
        (one.place / "new").write_bytes(b"4")
        assert (two.place / "file").stat().st_size == 1, "the attributes are believed for 30 s"
        assert not (two.place / "new").exists(), "that there is no such name is believed for 5 s"
        assert direct_read(two.place / "file", 4096) == 3, "a direct read asks"
        assert sorted(os.listdir(two.place)) == ["file", "new"], "a listing asks"


def test_without_caching_two_mounts_see_each_other_at_once(tmp_path: Path) -> None:
    with fuse_mount(tmp_path / "one", tmp_path / "backing") as one, fuse_mount(tmp_path / "two", one.backing) as two:
        assert not (two.place / "new").exists()
        (one.place / "new").write_bytes(b"4")
        assert (two.place / "new").read_bytes() == b"4"


def test_it_has_locks_or_has_none_as_3fs(tmp_path: Path) -> None:
    for locks, expected in ((True, 0), (False, errno.ENOSYS)):
        with fuse_mount(tmp_path / "place", tmp_path / "backing", locks=locks) as fuse:
            with (fuse.place / "file").open("w") as file:
                number = 0
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    number = error.errno or -1
            assert number == expected


def test_it_lacks_what_3fs_lacks(fuse: FuseMount) -> None:
    with (fuse.place / "file").open("wb") as file:
        assert fallocate(file.fileno(), 4096) == errno.EOPNOTSUPP
        with pytest.raises(OSError, match="not supported"):
            os.setxattr(file.fileno(), "user.name", b"")


def test_requests_are_counted_by_name(fuse: FuseMount) -> None:
    (fuse.place / "file").write_bytes(PAYLOAD)
    before = fuse.counts
    direct_read(fuse.place / "file", 4096)
    after = fuse.counts
    assert after["READ"] - before.get("READ", 0) == 1 and after["OPEN"] - before.get("OPEN", 0) == 1
