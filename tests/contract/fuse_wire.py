"""The kernel's FUSE protocol as bytes: what a filesystem server of the tests reads from and writes to /dev/fuse.

Names and layouts are those of `linux/fuse.h`, minor version 31. Only what is needed to pass files through.
"""

from __future__ import annotations

import enum
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

IN_HEADER = struct.Struct("<IIQQIIIHH")
OUT_HEADER = struct.Struct("<IiQ")
INIT_IN = struct.Struct("<IIII")
INIT_OUT = struct.Struct("<IIIIHHIIHHIIH22x")
ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
ENTRY_OUT = struct.Struct("<QQQQII")
ATTR_OUT = struct.Struct("<QII")
GETATTR_IN = struct.Struct("<IIQ")
SETATTR_IN = struct.Struct("<IIQQQQQQIIIIIIII")
OPEN_OUT = struct.Struct("<QII")
CREATE_IN = struct.Struct("<IIII")
MKNOD_IN = struct.Struct("<IIII")
MKDIR_IN = struct.Struct("<II")
RENAME2_IN = struct.Struct("<QII")
IO_IN = struct.Struct("<QQIIQII")
FSYNC_IN = struct.Struct("<QII")
FORGET_ONE = struct.Struct("<QQ")
STATFS_OUT = struct.Struct("<QQQQQIIII24x")
DIRENT = struct.Struct("<QQII")
PAIR = struct.Struct("<II")
WORD = struct.Struct("<Q")

MAJOR, MINOR = 7, 31
IO_BYTES_MAX = 1 << 20
"""Of one READ or WRITE, as on 3FS: a larger one comes in pieces."""
REQUEST_BYTES_MAX = IO_BYTES_MAX + 4096
ROOT_NODE = 1
FOPEN_DIRECT_IO = 1


class Op(enum.IntEnum):
    """Requests by their numbers in the protocol."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    GETXATTR = 22
    LISTXATTR = 23
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    SETLK = 32
    SETLKW = 33
    ACCESS = 34
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42
    FALLOCATE = 43
    RENAME2 = 45


class InitFlag(enum.IntFlag):
    """What server and kernel agree on at INIT."""

    ASYNC_READ = 1 << 0
    POSIX_LOCKS = 1 << 1
    ATOMIC_O_TRUNC = 1 << 3
    BIG_WRITES = 1 << 5
    FLOCK_LOCKS = 1 << 10
    ASYNC_DIO = 1 << 15
    PARALLEL_DIROPS = 1 << 18
    MAX_PAGES = 1 << 22


class SetAttr(enum.IntFlag):
    """Which fields of a SETATTR count."""

    MODE = 1 << 0
    UID = 1 << 1
    GID = 1 << 2
    SIZE = 1 << 3
    ATIME = 1 << 4
    MTIME = 1 << 5
    ATIME_NOW = 1 << 7
    MTIME_NOW = 1 << 8


NO_ANSWER = frozenset({Op.FORGET, Op.BATCH_FORGET, Op.INTERRUPT})


@dataclass(frozen=True, slots=True)
class Request:
    """One message of the kernel; `body` is valid until the next one is read, unless `kept()`."""

    op: int
    unique: int
    node: int
    uid: int
    gid: int
    body: memoryview

    @classmethod
    def of(cls, message: memoryview) -> Request:
        _, op, unique, node, uid, gid, _, _, _ = IN_HEADER.unpack_from(message)
        return cls(op, unique, node, uid, gid, message[IN_HEADER.size :])

    def kept(self) -> Request:
        """The same with bytes of its own."""
        return Request(self.op, self.unique, self.node, self.uid, self.gid, memoryview(bytes(self.body)))

    def names(self, offset: int) -> list[str]:
        """The strings that begin at byte `offset` of the body."""
        return [name.decode() for name in bytes(self.body[offset:]).split(b"\0")[:-1]]


@dataclass(frozen=True, slots=True)
class Caching:
    """For how many seconds the kernel may believe what it was told; 0: it asks again."""

    attr_s: float = 0.0
    entry_s: float = 0.0
    negative_s: float = 0.0


def seconds_and_ns(time_s: float) -> tuple[int, int]:
    return int(time_s), int(time_s % 1 * 1e9)


def attributes(stat: os.stat_result, size_bytes: int) -> bytes:
    times = [divmod(ns, 1_000_000_000) for ns in (stat.st_atime_ns, stat.st_mtime_ns, stat.st_ctime_ns)]
    return ATTR.pack(
        stat.st_ino,
        size_bytes,
        stat.st_blocks,
        *(second for second, _ in times),
        *(ns for _, ns in times),
        stat.st_mode,
        stat.st_nlink,
        stat.st_uid,
        stat.st_gid,
        stat.st_rdev,
        stat.st_blksize,
        0,
    )


def entry_answer(node: int, attrs: bytes, caching: Caching) -> bytes:
    """A name that leads to `node`; 0: to nothing, and the kernel may remember that."""
    entry_s, entry_ns = seconds_and_ns(caching.entry_s if node else caching.negative_s)
    attr_s, attr_ns = seconds_and_ns(caching.attr_s)
    return ENTRY_OUT.pack(node, 0, entry_s, attr_s, entry_ns, attr_ns) + attrs


def attr_answer(attrs: bytes, caching: Caching) -> bytes:
    return ATTR_OUT.pack(*seconds_and_ns(caching.attr_s), 0) + attrs


def init_answer(body: memoryview, *, locks: bool) -> bytes:
    """`locks` false: the kernel asks for every lock, and the server knows none, as on 3FS."""
    _, _, readahead_bytes, offered = INIT_IN.unpack_from(body)
    wanted = InitFlag.ASYNC_READ | InitFlag.ATOMIC_O_TRUNC | InitFlag.BIG_WRITES | InitFlag.ASYNC_DIO
    wanted |= InitFlag.PARALLEL_DIROPS | InitFlag.MAX_PAGES
    if not locks:
        wanted |= InitFlag.POSIX_LOCKS | InitFlag.FLOCK_LOCKS
    pages = IO_BYTES_MAX // 4096
    return INIT_OUT.pack(MAJOR, MINOR, readahead_bytes, wanted & offered, 64, 48, IO_BYTES_MAX, 1, pages, 0, 0, 0, 0)


def statfs_answer(room: os.statvfs_result) -> bytes:
    counts = (room.f_blocks, room.f_bfree, room.f_bavail, room.f_files, room.f_ffree)
    return STATFS_OUT.pack(*counts, room.f_bsize, room.f_namemax, room.f_frsize, 0)


def dirents(names: Sequence[tuple[str, int, int]], first: int, bytes_max: int) -> bytes:
    """Entries of (name, inode, type) from number `first` on, as many as fit."""
    return b"".join(_fitting(names, first, bytes_max))


def _fitting(names: Sequence[tuple[str, int, int]], first: int, bytes_max: int) -> Iterator[bytes]:
    for number, (name, inode, kind) in enumerate(names[first:], first + 1):
        raw = name.encode()
        entry = DIRENT.pack(inode, number, len(raw), kind) + raw
        entry += bytes(-len(entry) % 8)
        bytes_max -= len(entry)
        if bytes_max < 0:
            return
        yield entry
