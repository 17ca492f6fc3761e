"""The C library of 3FS's user space ring I/O, by ctypes: the only module that knows its structures.

All its calls run without the interpreter lock. Nothing here may be used before a trial in another process
(`usrbio_probe`): the library ends the process when it does not like what it finds, and sizes a table by the hard limit of
open files.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from typing import Any

LIBRARY = "libhf3fs_api_shared.so"
VIRTUAL = "3fs-virt/iovs"
"""Beneath a mount point: links made here tell the filesystem's daemon of shared memory."""
PATH_BYTES = 256
ANY_NUMA = -1

PRIORITY_NORMAL = 0
PRIORITY_LOW = 1


class IovStruct(ctypes.Structure):
    """Memory that is shared with the daemon."""

    _fields_ = [
        ("base", ctypes.c_void_p),
        ("handle", ctypes.c_void_p),
        ("id", ctypes.c_uint8 * 16),
        ("mount_point", ctypes.c_char * PATH_BYTES),
        ("size", ctypes.c_size_t),
        ("block_size", ctypes.c_size_t),
        ("numa", ctypes.c_int),
    ]


class IorStruct(ctypes.Structure):
    """A ring."""

    _fields_ = [
        ("iov", IovStruct),
        ("handle", ctypes.c_void_p),
        ("mount_point", ctypes.c_char * PATH_BYTES),
        ("for_read", ctypes.c_bool),
        ("io_depth", ctypes.c_int),
        ("priority", ctypes.c_int),
        ("timeout", ctypes.c_int),
        ("flags", ctypes.c_uint64),
    ]


class CqeStruct(ctypes.Structure):
    """How one read ended."""

    _fields_ = [
        ("index", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("result", ctypes.c_int64),
        ("userdata", ctypes.c_size_t),
    ]


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_IOV, _IOR = ctypes.POINTER(IovStruct), ctypes.POINTER(IorStruct)
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "hf3fs_is_hf3fs": (ctypes.c_bool, [ctypes.c_int]),
    "hf3fs_extract_mount_point": (ctypes.c_int, [ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p]),
    "hf3fs_iovwrap": (
        ctypes.c_int,
        [_IOV, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int],
    ),
    "hf3fs_iorcreate3": (
        ctypes.c_int,
        [_IOR, ctypes.c_char_p, ctypes.c_int, ctypes.c_bool, *[ctypes.c_int] * 4],
    ),
    "hf3fs_iordestroy": (None, [_IOR]),
    "hf3fs_io_entries": (ctypes.c_int, [_IOR]),
    "hf3fs_reg_fd": (ctypes.c_int, [ctypes.c_int, ctypes.c_uint64]),
    "hf3fs_dereg_fd": (None, [ctypes.c_int]),
    "hf3fs_prep_io": (
        ctypes.c_int,
        [
            _IOR,
            _IOV,
            ctypes.c_bool,
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_size_t,
            ctypes.c_uint64,
            ctypes.c_size_t,
        ],
    ),
    "hf3fs_submit_ios": (ctypes.c_int, [_IOR]),
    "hf3fs_wait_for_ios": (
        ctypes.c_int,
        [_IOR, ctypes.POINTER(CqeStruct), ctypes.c_int, ctypes.c_int, ctypes.POINTER(_Timespec)],
    ),
}


class Library:
    """The calls, with errors as `OSError`. Raises `OSError` when the library, or a function of it, is not there."""

    def __init__(self, path: str) -> None:
        self.path = path
        calls = ctypes.CDLL(path)
        try:
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(calls, name)
                function.restype, function.argtypes = result, arguments
        except AttributeError as error:
            raise OSError(errno.ENOSYS, f"{path} is another version: {error}") from error
        self._calls = calls

    def is_3fs(self, fd: int) -> bool:
        """Is the file of a descriptor on 3FS?"""
        return bool(self._calls.hf3fs_is_hf3fs(fd))

    def mount_point(self, path: str) -> str:
        """Where the filesystem of a path is mounted. Raises `OSError` when it is not 3FS, or shares no memory."""
        found = ctypes.create_string_buffer(PATH_BYTES)
        size_bytes = self._calls.hf3fs_extract_mount_point(found, PATH_BYTES, os.fsencode(path))
        if size_bytes < 0:
            raise OSError(errno.ENOTSUP, f"{path} is on no mount of 3FS")
        if size_bytes > PATH_BYTES:
            raise OSError(errno.ENAMETOOLONG, f"a mount point of {size_bytes} bytes, {PATH_BYTES} can be used")
        mount = os.fsdecode(found.value)
        if not os.path.isdir(f"{mount}/{VIRTUAL}"):
            raise OSError(errno.ENOTSUP, f"{mount} has no {VIRTUAL}: its daemon shares no memory")
        return mount

    def wrap(self, address: int, size_bytes: int, block_bytes: int, identity: bytes, mount: str) -> IovStruct:
        """Memory of ours that the daemon knows by `identity`. Raises `OSError`."""
        iov = IovStruct()
        _check(
            self._calls.hf3fs_iovwrap(iov, address, identity, os.fsencode(mount), size_bytes, block_bytes, ANY_NUMA),
            "hf3fs_iovwrap",
        )
        return iov

    def create_ring(self, mount: str, entries: int, priority: int) -> IorStruct:
        """A ring for reads, that are begun as soon as they are seen. Raises `OSError`.

        A depth below zero would be what a limit of each batch wants, but newer daemons refuse its name, and one above
        zero hangs until there are as many reads.
        """
        ring = IorStruct()
        depth, timeout_ms = 0, 0
        _check(
            self._calls.hf3fs_iorcreate3(
                ring, os.fsencode(mount), entries, True, depth, priority, timeout_ms, ANY_NUMA
            ),
            "hf3fs_iorcreate3",
        )
        return ring

    def destroy_ring(self, ring: IorStruct) -> None:
        """Only when nothing is under way in it: its memory goes away."""
        self._calls.hf3fs_iordestroy(ring)

    def entries(self, ring: IorStruct) -> int:
        return int(self._calls.hf3fs_io_entries(ring))

    def register(self, fd: int) -> None:
        """Lets reads name this descriptor. Raises `OSError`: EINVAL when its number is registered, EBADF when not of 3FS."""
        number = int(self._calls.hf3fs_reg_fd(fd, 0))
        if number > 0:
            raise OSError(number, f"hf3fs_reg_fd: {os.strerror(number)}")

    def deregister(self, fd: int) -> None:
        """Before the descriptor is closed; afterwards its number would stand for the old file."""
        self._calls.hf3fs_dereg_fd(fd)

    def prepare(
        self, ring: IorStruct, iov: IovStruct, fd: int, address: int, size_bytes: int, offset_bytes: int, number: int
    ) -> None:
        """Puts a read into the ring; it may begin at once. Raises `OSError`, `BlockingIOError` when the ring is full."""
        _check(
            self._calls.hf3fs_prep_io(ring, iov, True, address, fd, offset_bytes, size_bytes, number), "hf3fs_prep_io"
        )

    def submit(self, ring: IorStruct) -> None:
        """Tells the daemon that there is something to do. Raises `OSError`."""
        _check(self._calls.hf3fs_submit_ios(ring), "hf3fs_submit_ios")

    def wait(self, ring: IorStruct, ended: ctypes.Array[CqeStruct], timeout_s: float) -> int:
        """Waits for at least one end, and fills in those that are there: how many. Raises `OSError`.

        The library measures by the wall clock: where that is set back while nothing ends, the wait gets longer by so much.
        """
        until_ns = time.time_ns() + int(timeout_s * 1e9)
        until = _Timespec(*divmod(until_ns, 1_000_000_000))
        found = int(self._calls.hf3fs_wait_for_ios(ring, ended, len(ended), 1, until))
        return _check(found, "hf3fs_wait_for_ios")


def _check(result: int, call: str) -> int:
    """The library returns errors as negative numbers."""
    if result < 0:
        raise OSError(-result, f"{call}: {os.strerror(-result)}")
    return result
