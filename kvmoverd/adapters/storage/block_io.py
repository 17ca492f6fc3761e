"""Whole records in and out of files: direct where a real trial works. The only place that compares byte counts."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from kvmoverd.core.layout import ALIGN_BYTES

FILE_MODE = 0o640
NOT_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM})
"""What filesystems and devices say when they can't do direct I/O."""
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
UNREADABLE = frozenset({errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN, errno.ETIMEDOUT})
"""What says that these bytes can't be had from this device, now at least; other errors are ours, or pass."""


@dataclass(frozen=True, slots=True)
class BlockIo:
    """How files of one root are opened; `note` says why not direct where that was asked."""

    direct: bool
    note: str = ""

    @property
    def mode(self) -> str:
        return "direct" if self.direct else "buffered"

    def open_read(self, path: str) -> tuple[int, os.stat_result]:
        """A descriptor for `read_into`, which the caller closes, and what it is. Raises `OSError`."""
        return open_regular(path, self._flag)

    def write_new(self, path: str, record: memoryview) -> None:
        """Creates the file, writes all of `record` and makes it durable. Raises `OSError`; the caller unlinks."""
        fd = create_file(path, self._flag)
        try:
            write_from(fd, record)
            os.fdatasync(fd)
        finally:
            os.close(fd)

    @property
    def _flag(self) -> int:
        return os.O_DIRECT if self.direct else 0


class NotRegular(OSError):
    """A directory, a FIFO, a device or a socket lies where a file should."""


def open_regular(path: str, flags: int = 0) -> tuple[int, os.stat_result]:
    """Opens a file to read: descriptor and status. Raises `OSError`, `NotRegular` for what is no regular file.

    A FIFO would hold the thread for ever.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    except OSError as error:
        # O_DIRECT is refused with the same word on a FIFO, and on a filesystem that can't.
        if error.errno == errno.EINVAL:
            _check_regular(path, os.stat(path))
        raise
    try:
        status = os.fstat(fd)
        _check_regular(path, status)
    except OSError:
        os.close(fd)
        raise
    return fd, status


def _check_regular(path: str, status: os.stat_result) -> None:
    """Raises `NotRegular`."""
    if not stat.S_ISREG(status.st_mode):
        kind = errno.EISDIR if stat.S_ISDIR(status.st_mode) else errno.EINVAL
        raise NotRegular(kind, "not a regular file", path)


def close_quietly(fd: int) -> None:
    """Closes a file that was only read: what a filesystem says about that changes nothing."""
    with contextlib.suppress(OSError):
        os.close(fd)


def create_file(path: str | Path, flags: int = 0) -> int:
    """Creates a file with our mode whatever the umask; gives a descriptor to write to, which the caller closes.

    Raises `FileExistsError` when it is there.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | flags, FILE_MODE)
    try:
        os.fchmod(fd, FILE_MODE)
    except OSError:
        os.close(fd)
        raise
    return fd


def choose_io(trial_path: str, *, direct: bool) -> BlockIo:
    """Tries the I/O asked for, on a file at `trial_path` that must not exist and does not afterwards.

    Falls back to buffered where direct is refused. Raises `OSError` when the place can't be written at all; but a full
    disk can still be read, and is used as asked.
    """
    io = BlockIo(direct=True) if direct else BlockIo(direct=False, note="direct I/O is switched off")
    try:
        _trial(io, trial_path)
    except OSError as error:
        if error.errno in DISK_FULL:
            return BlockIo(direct, io.note or "at the start the disk was full: direct I/O was not tried to the end")
        if not direct or error.errno not in NOT_DIRECT:
            raise
        io = BlockIo(direct=False, note=f"direct I/O was tried and refused ({errno_name(error)})")
        _trial(io, trial_path)
    return io


def errno_name(error: OSError) -> str:
    """
    >>> errno_name(OSError(5, "broken"))
    'EIO'
    """
    return errno.errorcode.get(error.errno or 0, f"errno {error.errno}")


def read_into(fd: int, target: memoryview, offset_bytes: int = 0) -> int:
    """Reads from an offset of the file until `target` is full or the file ends; gives the bytes read.

    Goes on after a short read, from the last whole page: direct reads must start at one, and so must `offset_bytes`.
    Interrupted calls are repeated by `os.preadv` itself.
    """
    done = 0
    while done < len(target):
        got = os.preadv(fd, [target[done:]], offset_bytes + done)
        if done + got >= len(target):
            return done + got
        whole = got - got % ALIGN_BYTES
        if whole == 0:
            return done + got
        done += whole
    return done


def write_from(fd: int, record: memoryview, offset_bytes: int = 0) -> None:
    """Writes all of `record` at an offset of the file. Raises `OSError`, also when the device takes no more of it.

    Goes on after a short write as `read_into` does.
    """
    done = 0
    while done < len(record):
        put = os.pwritev(fd, [record[done:]], offset_bytes + done)
        whole = put if done + put == len(record) else put - put % ALIGN_BYTES
        if whole == 0:
            raise OSError(errno.EIO, f"the write stopped after {done + put} of {len(record)} bytes")
        done += whole


def _trial(io: BlockIo, path: str) -> None:
    with mmap.mmap(-1, 4 * ALIGN_BYTES) as pages, memoryview(pages) as view:
        view[: 2 * ALIGN_BYTES] = os.urandom(2 * ALIGN_BYTES)
        try:
            with view[: 2 * ALIGN_BYTES] as written:
                io.write_new(path, written)
            fd, _ = io.open_read(path)
            try:
                with view[2 * ALIGN_BYTES :] as back:
                    got = read_into(fd, back)
            finally:
                os.close(fd)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        if got != 2 * ALIGN_BYTES or view[: 2 * ALIGN_BYTES] != view[2 * ALIGN_BYTES :]:
            raise OSError(errno.EINVAL, f"{got} of {2 * ALIGN_BYTES} bytes came back, or others than written")
